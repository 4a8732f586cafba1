"""Messages and interface through which environment processes ask a rollout worker to sample turns of trajectories.

This module imports no large packages, because environment processes never import torch or transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rltrain.environments.tool_calls import ParsedAction


@dataclass(frozen=True)
class TurnFormat:
    """What the turns of a run's trajectories can contain: the tools, and the format in which the model calls tools.

    Attributes:
        tools: Schemas of the tools, as `transformers.utils.get_json_schema` returns them.
        tool_format: Name of the format of tool calls, or path of the user's function that finds the tool calls in a
            text.
    """

    tools: Sequence[Mapping[str, Any]]
    tool_format: str


@dataclass(frozen=True)
class TurnRequest:
    """Request to add messages to the context of a trajectory and to sample the policy's next action.

    Attributes:
        key: The turn as a tuple (prompt group uid, index of the sample in the prompt group, index of the turn).
        context_ids: Token ids that come before the policy's previous action in the context; empty in a turn with a new
            context, for instance in the first turn.
        action_ids: Token ids of the policy's previous action in the context; empty in a turn with a new context.
        messages: Chat messages that are added to the context. In a turn with a new context, `messages` is the whole
            conversation. In a turn that continues a context, `messages` contains, for instance, the results of tools.
        room: Maximum number of tokens in the turn's messages and the action together. In the first turn, `room` limits
            only the number of tokens in the action.
        max_prompt_tokens: Maximum number of tokens in the prompt of the first turn.
        max_tokens: Maximum number of tokens in the action.
        max_message_tokens: Maximum number of tokens in the text of each new message after the first turn; longer texts
            are cut off. Messages of the assistant are never cut off. In a new context, the messages before the
            assistant's first message are never cut off, because these messages are the prompt of the context.
        temperature: Sampling temperature. At temperature 0, the engine decodes greedily.
        seed: Seed of the random numbers with which the action is sampled.
        tools: Schemas of the tools that are described in the prompt; None stands for the tools of the run, which are in
            `TurnFormat.tools`.
        serial: Sequence number of the request among all requests of the same client. The field `key` does not identify
            a request, because a trajectory that starts again reuses the keys of its earlier requests.
    """

    key: tuple[int, int, int]
    context_ids: Sequence[int]
    action_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    room: int
    max_prompt_tokens: int
    max_tokens: int
    max_message_tokens: int
    temperature: float
    seed: int
    tools: Sequence[Mapping[str, Any]] | None = None
    serial: int = 0


@dataclass(frozen=True)
class TurnResult:
    """The sampled action of a turn, or the reason why no action was sampled.

    Attributes:
        key: Key of the `TurnRequest` that this result answers.
        observation_ids: Token ids that the turn's messages added to the context before the action was sampled.
        token_ids: Token ids of the action, including the final end token.
        log_probs: Log-probability of each sampled token in nats, under the distribution from which the token was
            sampled.
        versions: For each sampled token, the version of the weights with which the token was sampled.
        finish_reason: The engine's reason for ending the action: "stop", "length" or "abort".
        text: Text of the action, without special tokens.
        action: The action's text and tool calls.
        messages: The turn's messages before the action, as the model has seen them; long texts are cut off.
        full: Whether the turn's messages left no tokens for an action, so that no action was sampled.
        error: One line that says why the messages cannot be put into the context; "" if no error occurred.
        serial: The field `serial` of the `TurnRequest` that this result answers.
        written: If a tool call of the action is malformed: the text of the action as the model wrote it, including the
            markup of tool calls; otherwise "".
    """

    key: tuple[int, int, int]
    observation_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    versions: Sequence[int] = ()
    finish_reason: str = ""
    text: str = ""
    action: ParsedAction | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    full: bool = False
    error: str = ""
    serial: int = 0
    written: str = ""


class SamplesTurns(Protocol):
    """Interface through which environment processes use a rollout worker."""

    def submit_turns(self, client: str, requests: Sequence[TurnRequest]) -> None:
        """Queue requests of an environment process, without waiting for the results."""

    def poll_turns(self, client: str, timeout_s: float) -> list[TurnResult]:
        """Return the finished turns that the environment process `client` has requested.

        Wait up to `timeout_s` seconds for the first result.
        """
