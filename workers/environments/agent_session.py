"""The conversation of one agent program with the policy."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.environments.openai_api import ApiError, Message, ModelAnswer, ModelRequest
from rltrain.environments.tool_calls import BrokenCall, ParsedAction
from workers.environments.episode import Samples, assistant_message
from workers.environments.messages import EpisodeRequest, Limits
from workers.environments.recording import Recording
from workers.rollout.turns import TurnResult


class AgentSession:
    """Answers the requests of one agent program, and records them as one trajectory.

    Each request contains the whole conversation. A request must continue the recorded conversation: it repeats all
    recorded messages and adds new messages. A request that is equal to an earlier request gets the recorded answer
    again, because HTTP clients repeat requests after errors. Each answer is therefore sampled and trained once.

    Args:
        request: The prompt, the columns and the random streams of the trajectory.
        engine: The engine that samples the answers.
        limits: Limits of the trajectory.

    Attributes:
        key: API key of the session.
        record: The recorded turns.
        stop_reason: The limit that has refused a request; "" if no limit has refused a request.
        refusal: Error message of the last refused request.
        reward: Reward of the whole conversation that the program has sent; None if it has sent no such reward.
        lost: Becomes an exception if the engine can sample no further answer.
        calls: Tasks of the requests that are being answered.
    """

    def __init__(self, request: EpisodeRequest, engine: Samples, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.record = Recording(request, limits)
        self.key = secrets.token_urlsafe(24)
        self.stop_reason, self.refusal = "", ""
        self.reward: float | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: set[asyncio.Task[Any]] = set()
        self._answering = asyncio.Lock()
        self._sent: list[Message] = []  # The last answered request's messages, and the answer.
        self._answers: dict[int, ModelAnswer] = {}  # By the answer's position in `_sent`, in the order of the turns.
        self._tools: Sequence[Mapping[str, Any]] = ()

    async def answer(self, asked: ModelRequest) -> ModelAnswer:
        """Sample the answer to a request, or return the recorded answer if the request was answered before.

        Raises:
            ApiError: the request does not continue the conversation, cannot be rendered, or exceeds a limit.
        """
        async with self._answering:
            position = len(asked.messages)
            repeats = list(asked.messages) == self._sent[:position] and asked.tools == self._tools
            if repeats and position in self._answers:
                return self._answers[position]
            return await self._sampled(asked)

    def rewarded(self, answer_id: str, reward: float | None) -> None:
        """Record the reward of one answer.

        Raises:
            ApiError: the session has no such answer.
        """
        self.record.reward_turn(list(self._answers).index(self._position(answer_id)), reward)

    def conversation(self, answer_id: str) -> Sequence[Message]:
        """Return the conversation up to an answer, including the answer.

        Raises:
            ApiError: the session has no such answer.
        """
        return self._sent[: self._position(answer_id) + 1]

    def _position(self, answer_id: str) -> int:
        for position, answer in self._answers.items():
            if answer.id == answer_id:
                return position
        raise ApiError(f"this conversation has no answer with the id {answer_id!r:.80}", code="not_found")

    def close(self) -> None:
        """Cancel all requests that are still being answered."""
        for task in self.calls:
            task.cancel()
        self.lost.cancel()

    async def _sampled(self, asked: ModelRequest) -> ModelAnswer:
        new = self._new_messages(asked)
        self._check_limits()
        turn = self.record.turn_request(new, tools=asked.tools, max_tokens=asked.max_tokens)
        try:
            result = await self.engine.sample(turn)
        except Exception as error:
            if not self.lost.done():
                self.lost.set_exception(error)
            raise ApiError("the engine is gone", status=503, code="engine_gone") from error
        if result.error:
            raise ApiError(result.error)
        if result.full:
            raise self._limit("max_response_length", "no token is left of rollout.max_response_length")
        before = len(turn.context_ids) + len(turn.action_ids) + len(result.observation_ids)
        return self._recorded(asked, result, before)

    def _new_messages(self, asked: ModelRequest) -> list[Message]:
        """Return the messages of a request after the recorded conversation.

        Raises:
            ApiError: the request does not continue the recorded conversation.
        """
        known = len(self._sent)
        if not known:
            self._tools = asked.tools
            return list(asked.messages)
        new = [_with_name(message, self._sent[-1]) for message in asked.messages[known:]]
        if list(asked.messages[:known]) != self._sent:
            raise ApiError(
                "the request does not repeat the earlier messages of this conversation, or changes one of them: send "
                "all earlier messages as they were, and new messages after them",
                code="conversation_changed",
            )
        if asked.tools != self._tools:
            raise ApiError("the tools must stay the same in a conversation", code="tools_changed")
        if not new or any(message["role"] == "assistant" for message in new):
            raise ApiError("new messages must be there, and must come from tools or a user", code="no_new_messages")
        return new

    def _check_limits(self) -> None:
        if len(self.record.turns) >= self.limits.max_turns:
            raise self._limit("max_turns", f"rollout.max_turns={self.limits.max_turns} answers were given")
        if self.record.expired:
            raise self._limit("deadline", f"rollout.trajectory_timeout_s={self.limits.timeout_s:g} has passed")

    def _limit(self, stop_reason: str, message: str) -> ApiError:
        self.stop_reason = stop_reason
        return ApiError(message, code="context_length_exceeded" if stop_reason == "max_response_length" else "limit")

    def _recorded(self, asked: ModelRequest, result: TurnResult, prompt_tokens: int) -> ModelAnswer:
        assert result.action is not None, "a turn that is neither full nor failed has an action"
        action = ParsedAction(result.text.strip()) if asked.text_only else result.action
        message = assistant_message(shown(action))
        self.record.add(result, message)
        uid, sample, turn = result.key
        answer = ModelAnswer(
            id=f"{uid}-{sample}-{turn}-{self.key[:8]}",
            message=dict(message),
            cut=result.finish_reason == "length",
            prompt_tokens=prompt_tokens,
            completion_tokens=len(result.token_ids),
            created=int(time.time()),
        )
        self._answers[len(asked.messages)] = answer
        self._sent = [*asked.messages, answer.message]
        self.stop_reason = ""  # A program may go on after a refused request, for example with a shorter message.
        return answer


def shown(action: ParsedAction) -> ParsedAction:
    """Return an action whose malformed tool calls are ordinary text.

    The OpenAI API has no form for a malformed call. A malformed call next to well-formed calls is left out.
    """
    broken = [call.text for call in action.calls if isinstance(call, BrokenCall)]
    calls = [call for call in action.calls if not isinstance(call, BrokenCall)]
    if calls or not broken:
        return ParsedAction(action.content, calls)
    return ParsedAction("\n".join(filter(None, [action.content, *broken])))


def _with_name(message: Message, action: Mapping[str, Any]) -> Message:
    """Add the name of the called tool to a tool's result, which some chat templates need."""
    names = {call["id"]: call["function"]["name"] for call in action.get("tool_calls", ())}
    name = names.get(message.get("tool_call_id", ""))
    return message | {"name": name} if name else message
