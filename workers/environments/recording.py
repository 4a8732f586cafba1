"""The record of a running trajectory: its turns, its token ids and its messages."""

import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rltrain.base.random_streams import stream_seed
from rltrain.batch.token_arrays import int_array
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.environments.contract import EnvironmentFailure
from workers.environments.messages import EpisodeRequest, Limits
from workers.rollout.turns import TurnRequest, TurnResult

Message = Mapping[str, Any]
ATTEMPTS = 2  # Maximum number of attempts to run a trajectory whose environment or agent program fails.
LAST = -1  # A turn that is requested or recorded with `after=LAST` continues the context of the last finished turn.
_NO_ACTION = Turn((), (), (), (), "abort")


@dataclass(frozen=True)
class _Context:
    """The context in which the action of one turn was sampled.

    Attributes:
        ids: Token ids of the context, followed by the turn's action. The array `ids` may end with the token ids of a
            later turn that continues the context.
        begin: Number of tokens in the context before the turn's action.
        end: Number of tokens in the context up to the end of the turn's action.
    """

    ids: "array[int]"
    begin: int
    end: int


class Recording:
    """The turns of a running trajectory.

    Each turn either continues the context of an earlier turn or has a new context. If a new turn continues the context
    of a turn that is not the last recorded turn, the whole context is recorded again. A row of a batch is one sequence
    with the tokens of all turns in their order, so the tokens of a context must come directly before the tokens of the
    turn that continues the context.

    Args:
        request: The prompt, the data columns and the seed of the trajectory.
        limits: Limits of the trajectory.

    Attributes:
        turns: The finished turns.
        messages: The messages of all turns, in the order of the turns. If a turn does not continue the context of the
            preceding turn, each new message of the turn has the key `context`, whose value is the number of contexts
            that were recorded before the turn.
    """

    def __init__(self, request: EpisodeRequest, limits: Limits) -> None:
        self.request, self.limits = request, limits
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._contexts: list[_Context] = []  # Contexts of the finished turns.
        self._tokens = 0  # Number of tokens in all finished turns.
        self._deadline = time.monotonic() + limits.timeout_s

    @property
    def time_left_s(self) -> float:
        """Time in seconds until the time limit of the trajectory, negative if the time limit has passed."""
        return self._deadline - time.monotonic()

    @property
    def expired(self) -> bool:
        """Whether the time limit of the trajectory has passed."""
        return self.time_left_s < 0

    def turn_request(
        self,
        new: Sequence[Message],
        *,
        number: int | None = None,
        after: int | None = LAST,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> TurnRequest:
        """Return the request for the next action.

        Args:
            new: The messages that the request adds to the context: those that follow the action of the turn with the
                index `after`, or all messages of a new context if `after` is None.
            number: Number that identifies the turn in its trajectory, from which the turn's random stream is derived;
                by default, the number of finished turns. If turns are sampled at the same time, each needs a number of
                its own.
            after: Index of the finished turn whose context the request continues; None for a new context.
            tools: Schemas of the tools that the prompt describes; None for the tools of the run.
            max_tokens: Additional limit on the number of tokens of the action, besides the limits of the trajectory, or
                None.
        """
        limits, number = self.limits, len(self.turns) if number is None else number
        context, _ = self._continued(after)
        return TurnRequest(
            key=(*self.request.key, number),
            context_ids=context.ids[: context.begin],
            action_ids=context.ids[context.begin : context.end],
            messages=new,
            room=self._room(after),
            max_prompt_tokens=limits.max_prompt_tokens,
            max_tokens=min(limits.max_turn_tokens, max_tokens or limits.max_turn_tokens),
            max_message_tokens=limits.max_message_tokens,
            temperature=self.request.temperature,
            seed=stream_seed(self.request.seed, *self.request.key, *([number] if number else [])),
            tools=tools,
        )

    def has_room_for(self, result: TurnResult, *, after: int | None) -> bool:
        """Return whether the tokens of a sampled turn fit into the trajectory.

        A turn may no longer fit if other turns were recorded after the request for the turn.
        """
        return not self.turns or len(result.observation_ids) + len(result.token_ids) <= self._room(after)

    def _room(self, after: int | None) -> int:
        """Return the maximum number of tokens in a new turn that continues the context of the turn `after`."""
        context, of_last = self._continued(after)
        repeated = 0 if of_last else context.end
        prompt = len(self.turns[0].observation_ids) if self.turns else 0
        return self.limits.max_response_tokens - (self._tokens + repeated - prompt)

    def add(
        self, result: TurnResult, action: Message, reward: float | None = None, *, after: int | None = LAST
    ) -> None:
        """Record a finished turn.

        Args:
            result: The sampled action, and the turn's messages before the action.
            action: The action as a chat message.
            reward: Reward of the turn.
            after: Index of the finished turn whose context the turn continues; None for a new context.
        """
        context, of_last = self._continued(after)
        repeated = int_array(()) if of_last else context.ids[: context.end]
        ids = context.ids if len(context.ids) == context.end else context.ids[: context.end]
        ids.extend(result.observation_ids)
        self._contexts.append(_Context(ids, len(ids), len(ids) + len(result.token_ids)))
        ids.extend(result.token_ids)
        turn = Turn(
            repeated + int_array(result.observation_ids),
            result.token_ids,
            result.log_probs,
            result.versions,
            result.finish_reason,
            result.text,
            reward,
            new_context=not of_last,
        )
        self.turns.append(turn)
        self._tokens += len(turn.observation_ids) + len(turn.action_ids)
        number = sum(one.new_context for one in self.turns)
        self.messages += [message if of_last else {**message, "context": number} for message in result.messages]
        self.messages.append(action)

    def _continued(self, after: int | None) -> tuple[_Context, bool]:
        """Return the context that a new turn continues, and whether the last finished turn has this context.

        For a turn that continues no earlier context, `_continued` returns a `_Context` without tokens. For the first
        turn of a trajectory, `_continued` returns a `_Context` without tokens, and True.
        """
        if after is None or not self.turns:
            return _Context(int_array(()), 0, 0), not self.turns
        return self._contexts[after], after in (LAST, len(self.turns) - 1)

    def reward_turn(self, number: int, reward: float | None) -> None:
        """Set the reward of a finished turn."""
        self.turns[number] = replace(self.turns[number], reward=reward)

    def trajectory(self, stop_reason: str, reward: float | None) -> Trajectory:
        """Convert the recorded turns to a `Trajectory` that has ended for the reason `stop_reason`."""
        turns = list(self.turns) or [_NO_ACTION]
        return Trajectory(*self.request.key, turns, stop_reason, list(self.messages), reward)


async def with_attempts(request: EpisodeRequest, attempt: Callable[[], Awaitable[Trajectory]]) -> Trajectory:
    """Run a trajectory, and start it again if the user's code fails.

    If all `ATTEMPTS` attempts fail, `with_attempts` returns a trajectory with an error message and no actions.
    """
    error = ""
    for _ in range(ATTEMPTS):
        try:
            return await attempt()
        except EnvironmentFailure as failure:
            error = str(failure)
    return failed_trajectory(request.key, error)


def failed_trajectory(key: tuple[int, int], error: str) -> Trajectory:
    """Return a trajectory without actions, whose environment or agent program has failed with the message `error`."""
    return Trajectory(*key, [_NO_ACTION], "error", error=error)
