"""Trajectories, which record for each turn the tokens added to the context and the tokens that the policy sampled.

A trajectory becomes one row of a batch. The observation of the trajectory's first turn is the row's prompt. Everything
after the prompt is the row's response: the sampled tokens of all turns, and the observations between the sampled
tokens.

A turn can have a new context, for instance because an agent program starts a sub-agent or shortens the conversation.
The observation of a turn with a new context is the whole context. A trajectory with several contexts still becomes only
one row. The column `context_starts` marks the first token of each new context. A model's forward pass computes each
context separately, as if no tokens stood before the context. If a new context repeats tokens that the policy sampled
earlier, the repeated tokens belong to the observation and are not trained on again.

Two columns of a batch distinguish tokens that the policy sampled from tokens that belong to observations. The column
`response_mask` is True at sampled tokens that are trained on. Later stages of a training step may set `response_mask`
to False, for instance in rows without a score. The column `policy_version` is -1 at observation tokens, and later
stages never change it. To find all sampled tokens, the module `rltrain.batch.sampled_tokens` reads `policy_version` and
not `response_mask`, because `response_mask` is also False at the sampled tokens of rows that are not trained on.

`rltrain.batch.trajectory` does not import torch, because environment processes import `rltrain.batch.trajectory` but
must not load torch.
"""

import base64
import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Self, TypeVar

from rltrain.batch.token_arrays import FLOAT32, INT16, INT32, INT64, float_array, int_array, short_array

NOT_SAMPLED = -1  # The value of `policy_version` at a response token that belongs to an observation.
# Values of `Trajectory.stop_reason` which mean that a limit cut the trajectory off.
LIMITS = ("max_turns", "max_response_length", "deadline")
# Values of `Trajectory.stop_reason` for trajectories in an environment.
STOP_REASONS = ("answer", "done", "error", *LIMITS)

_Value = TypeVar("_Value", int, float)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a trajectory: an observation and the policy's action on the observation.

    The values of the sampled tokens (`action_ids`, `log_probs`, `versions`) may be given as any sequences and are
    stored as arrays. `observation_ids` is stored as it is given.

    Attributes:
        observation_ids: token ids that were added to the context after the previous turn, such as a tool's result or a
            user's reply; in the first turn, the token ids of the prompt.
        action_ids: token ids that the policy sampled in the turn; empty if the trajectory ended with the turn's
            observation.
        log_probs: log-probability of each sampled token in nats, under the distribution from which the token was
            sampled.
        versions: version of the policy's weights that sampled each token, 0 or above.
        finish_reason: why the turn ended: "stop", "length" or "abort", as the engine reported it.
        text: text of the tokens that the policy sampled in the turn, without special tokens.
        reward: reward that the environment gave for the turn; None if the environment gave no reward for the turn.
        new_context: whether `observation_ids` is the whole context of the turn. If `new_context` is False, the context
            of the turn consists of the context and the action of the previous turn, followed by `observation_ids`. In
            the first turn, `new_context` has no effect.
        experts: the experts that a mixture-of-experts model's routers chose, as in
            `workers.rollout.messages.Completion`; empty if the engine did not record them.
    """

    observation_ids: Sequence[int]
    action_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    text: str = ""
    reward: float | None = None
    new_context: bool = False
    experts: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not len(self.action_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"{len(self.action_ids)} sampled tokens, {len(self.log_probs)} log-probs, {len(self.versions)} "
                "versions: each sampled token of a turn must have one log-prob and one version"
            )
        object.__setattr__(self, "action_ids", int_array(self.action_ids))
        object.__setattr__(self, "log_probs", float_array(self.log_probs))
        object.__setattr__(self, "versions", int_array(self.versions))
        object.__setattr__(self, "experts", short_array(self.experts))

    def token_rewards(self) -> list[float]:
        """Return the reward of each sampled token: the turn's reward for the last token, 0.0 for all other tokens."""
        if not self.action_ids:
            return []
        return [0.0] * (len(self.action_ids) - 1) + [self.reward or 0.0]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample of a prompt: a sequence of turns.

    The tokens from which the policy samples an action (the action's context) start with the observation of the latest
    turn whose `new_context` is True. If `new_context` is False in all turns so far, the context starts with the prompt.

    Attributes:
        uid: number that identifies the prompt group of the sample.
        sample: number that identifies the sample within its prompt group.
        turns: the turns of the trajectory, in order; at least one turn.
        stop_reason: why a trajectory in an environment ended: "answer" (the policy called no tool in an answer that was
            not cut off), "done" (the environment ended the trajectory), "error" (the environment failed), or one of
            `LIMITS`. A single answer without an environment has the stop reason "".
        messages: the conversation as chat messages, from the prompt to the last message; empty without an environment.
            Messages that start the second or a later context have the key `context`, whose value is the number of
            earlier contexts.
        reward: reward that the environment gave for the whole trajectory; None if the environment gave no reward for
            the whole trajectory.
        error: one line that says how the environment failed; "" if the environment did not fail. A trajectory with an
            error is not trained on.
    """

    uid: int
    sample: int
    turns: Sequence[Turn]
    stop_reason: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    reward: float | None = None
    error: str = ""

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(
                f"sample {(self.uid, self.sample)} has no turns; give at least one turn, which holds the prompt"
            )

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Token ids of the prompt, which is the observation of the first turn."""
        return self.turns[0].observation_ids

    @property
    def key(self) -> tuple[int, int]:
        """Pair that identifies the trajectory: (uid of the prompt group, index of the sample in the group)."""
        return self.uid, self.sample

    @property
    def finish_reason(self) -> str:
        """Reason why the last turn of the trajectory ended; "length" if a limit cut the trajectory off."""
        return "length" if self.stop_reason in LIMITS else self.turns[-1].finish_reason

    @property
    def text(self) -> str:
        """Text of the sampled tokens of all turns, without the observations between the turns."""
        return "".join(turn.text for turn in self.turns)

    @property
    def answer(self) -> str:
        """Text of the sampled tokens of the last turn, which is the final answer."""
        return self.turns[-1].text

    @property
    def environment_reward(self) -> float | None:
        """Sum of the rewards that the environment gave for single turns and for the whole trajectory.

        The property `environment_reward` is None if the environment gave no reward at all.
        """
        rewards = [one for one in (*(turn.reward for turn in self.turns), self.reward) if one is not None]
        return sum(rewards) if rewards else None

    @property
    def contexts(self) -> int:
        """Number of contexts in the trajectory: 1 for the first turn, and 1 for each later turn with a new context."""
        return 1 + sum(turn.new_context for turn in self.turns[1:])

    @property
    def tool_calls(self) -> int:
        """Number of well-formed tool calls that the policy made."""
        # Messages that start the second or a later context can repeat tool calls of earlier contexts. To count each
        # tool call only once, messages with the key `context` are skipped.
        own = [message for message in self.messages if "context" not in message]
        return sum(len(message.get("tool_calls", ())) for message in own)

    def sampled_ids(self) -> list[int]:
        """Return the token ids that the policy sampled, in order, without the observations between the turns."""
        return [token for turn in self.turns for token in turn.action_ids]

    def state_dict(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Return the trajectory as a dict from which `from_state` can restore the trajectory.

        The dict holds only values that JSON can represent. If the token ids of the trajectory's prompt equal
        `prompt_ids`, `state_dict` leaves these token ids out of the dict.
        """
        state = asdict(self)
        for turn in state["turns"]:
            turn |= {name: list(turn[name]) for name in ("observation_ids", "action_ids", "log_probs", "versions")}
            turn["experts"] = base64.b64encode(turn["experts"]).decode()
        if list(self.prompt_ids) == list(prompt_ids):
            del state["turns"][0]["observation_ids"]
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any], prompt_ids: Sequence[int]) -> Self:
        """Restore a trajectory from a state that `state_dict` returned for the same `prompt_ids`."""
        turns = []
        for turn in state["turns"]:
            observed = int_array(turn["observation_ids"]) if "observation_ids" in turn else prompt_ids
            experts = array(INT16, base64.b64decode(turn.get("experts", "")))
            turns.append(Turn(**turn | {"observation_ids": observed, "experts": experts}))
        return cls(**{**state, "turns": turns})

    def segments(self) -> list[tuple[int, bool]]:
        """Return the segments of the response in order, each as (number of tokens, whether the policy sampled these
        tokens).
        """
        found = [(len(self.turns[0].action_ids), True)]
        for turn in self.turns[1:]:
            found += (len(turn.observation_ids), False), (len(turn.action_ids), True)
        return found

    def turn_index(self) -> list[int]:
        """Return for each sampled token the index of its turn, and -1 for each observation token."""
        index = [0] * len(self.turns[0].action_ids)
        for number, turn in enumerate(self.turns[1:], 1):
            index += [-1] * len(turn.observation_ids) + [number] * len(turn.action_ids)
        return index

    def turn_states(self) -> Sequence[int]:
        """Return for each sampled token a hash of its turn's observation, and 0 for each observation token."""
        return self._response(
            INT64,
            lambda turn: [_hash(turn.observation_ids)] * len(turn.action_ids),
            lambda turn: [0] * len(turn.observation_ids),
        )

    def context_starts(self) -> list[int]:
        """Return the positions in the response at which new contexts begin, in ascending order."""
        starts, position = [], len(self.turns[0].action_ids)
        for turn in self.turns[1:]:
            if turn.new_context:
                starts.append(position)
            position += len(turn.observation_ids) + len(turn.action_ids)
        return starts

    def turn_rewards(self) -> Sequence[float]:
        """Return the turn's reward at the last sampled token of each turn, and 0.0 at all other response tokens."""
        return self._response(FLOAT32, Turn.token_rewards, lambda turn: [0.0] * len(turn.observation_ids))

    def response_ids(self) -> Sequence[int]:
        """Return the token ids of the response: the first action, then each observation followed by its action."""
        return self._response(INT32, attrgetter("action_ids"), attrgetter("observation_ids"))

    def log_probs(self) -> Sequence[float]:
        """Return the log-prob of each response token in nats; the value at observation tokens is 0."""
        return self._response(FLOAT32, attrgetter("log_probs"), lambda turn: [0.0] * len(turn.observation_ids))

    def versions(self) -> Sequence[int]:
        """Return the weight version of each response token; the value at observation tokens is `NOT_SAMPLED`."""
        return self._response(INT32, attrgetter("versions"), lambda turn: [NOT_SAMPLED] * len(turn.observation_ids))

    def _response(
        self,
        typecode: str,
        of_action: Callable[[Turn], Sequence[_Value]],
        of_observation: Callable[[Turn], Sequence[_Value]],
    ) -> Sequence[_Value]:
        """Concatenate the values of a response: the first action, then each observation followed by its action.

        If the trajectory has only one turn, the result of `of_action` is returned unchanged. Otherwise, the values are
        returned as an array.

        Args:
            typecode: type of the values in the array.
            of_action: function that returns the values of a turn's sampled tokens.
            of_observation: function that returns the values of a turn's observation tokens.
        """
        first = of_action(self.turns[0])
        if len(self.turns) == 1:
            return first
        values = array(typecode, first)
        for turn in self.turns[1:]:
            values.extend(of_observation(turn))
            values.extend(of_action(turn))
        return values


def _hash(ids: Sequence[int]) -> int:
    """Return a 63-bit hash of token ids that is the same in every process."""
    digest = hashlib.blake2b(repr(list(ids)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
