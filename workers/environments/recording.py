"""The record of a running trajectory: its turns, its token ids and its messages."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rltrain.base.random_streams import stream_seed
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.environments.contract import EnvironmentFailure
from workers.environments.messages import EpisodeRequest, Limits
from workers.rollout.turns import TurnRequest, TurnResult

Message = Mapping[str, Any]
ATTEMPTS = 2  # Maximum number of attempts to run a trajectory whose environment or agent program fails.
_NO_ACTION = Turn((), (), (), (), "abort")


class Recording:
    """The turns of a running trajectory.

    Args:
        request: The prompt, the columns and the random streams of the trajectory.
        limits: Limits of the trajectory.

    Attributes:
        turns: The finished turns.
        messages: The conversation so far.
    """

    def __init__(self, request: EpisodeRequest, limits: Limits) -> None:
        self.request, self.limits = request, limits
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self._ids: list[int] = []  # Token ids of the trajectory before the last action.
        self._deadline = time.monotonic() + limits.timeout_s

    @property
    def expired(self) -> bool:
        """Whether the time limit of the trajectory has passed."""
        return time.monotonic() > self._deadline

    def turn_request(
        self,
        new: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> TurnRequest:
        """Return the request for the next action.

        Args:
            new: The messages since the last action.
            tools: Schemas of the tools; None for the tools of the run.
            max_tokens: Maximum number of tokens of the action, in addition to the limits of the trajectory.
        """
        limits, number = self.limits, len(self.turns)
        last = list(self.turns[-1].action_ids) if self.turns else []
        prompt = len(self.turns[0].observation_ids) if self.turns else 0
        return TurnRequest(
            key=(*self.request.key, number),
            context_ids=list(self._ids),
            action_ids=last,
            messages=new,
            room=limits.max_response_tokens - (len(self._ids) + len(last) - prompt),
            max_prompt_tokens=limits.max_prompt_tokens,
            max_tokens=min(limits.max_turn_tokens, max_tokens or limits.max_turn_tokens),
            max_message_tokens=limits.max_message_tokens,
            temperature=self.request.temperature,
            seed=stream_seed(self.request.seed, *self.request.key, *([number] if number else [])),
            tools=tools,
        )

    def add(self, result: TurnResult, action: Message, reward: float | None = None) -> None:
        """Record a finished turn.

        Args:
            result: The sampled action and the new messages before the action.
            action: The action as a chat message.
            reward: Reward of the turn.
        """
        self.messages += [*result.messages, action]
        if self.turns:
            self._ids += self.turns[-1].action_ids
        self._ids += result.observation_ids
        turn = Turn(
            result.observation_ids,
            result.token_ids,
            result.log_probs,
            result.versions,
            result.finish_reason,
            result.text,
            reward,
        )
        self.turns.append(turn)

    def reward_turn(self, number: int, reward: float | None) -> None:
        """Set the reward of a finished turn."""
        self.turns[number] = replace(self.turns[number], reward=reward)

    def trajectory(self, stop_reason: str, reward: float | None) -> Trajectory:
        """Return the trajectory, which has ended for the given reason."""
        turns = list(self.turns) or [_NO_ACTION]
        return Trajectory(*self.request.key, turns, stop_reason, list(self.messages), reward)


async def with_attempts(request: EpisodeRequest, attempt: Callable[[], Awaitable[Trajectory]]) -> Trajectory:
    """Run a trajectory, and start it again if the user's code fails.

    After `ATTEMPTS` failures, the returned trajectory has an error and no actions.
    """
    error = ""
    for _ in range(ATTEMPTS):
        try:
            return await attempt()
        except EnvironmentFailure as failure:
            error = str(failure)
    return Trajectory(*request.key, [_NO_ACTION], "error", error=error)
