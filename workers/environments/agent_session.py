"""The conversation of one agent program with the policy."""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltrain.environments.openai_api import ApiError, Message, ModelAnswer, ModelRequest
from rltrain.environments.tool_calls import BrokenCall, ParsedAction
from workers.environments.episode import Sampler, assistant_message
from workers.environments.messages import EpisodeRequest, Limits
from workers.environments.recording import Recording
from workers.rollout.turns import TurnRequest, TurnResult


@dataclass(frozen=True)
class Answered:
    """An answered request of an agent program.

    Attributes:
        messages: The messages of the request, followed by the answer.
        tools: Schemas of the tools of the request.
        answer: The answer to the request.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    answer: ModelAnswer

    def begins(self, asked: ModelRequest, size: int) -> bool:
        """Return whether `asked` has the same tools and the same first `size` messages as this earlier request.

        The last element of `self.messages` is the answer to this earlier request.
        """
        same = len(asked.messages) >= size and asked.tools == self.tools
        return same and list(asked.messages[:size]) == list(self.messages[:size])


class AgentSession:
    """Object that answers the requests of one agent program, and records requests and answers as one trajectory.

    Each request contains a whole conversation. A request that repeats the messages and the answer of an earlier
    request, and adds new messages, continues the context of the earlier request. A request that continues no earlier
    context starts a new context. For example, the first request of a sub-agent starts a new context, and so does a
    request for which the program has shortened the conversation. A request that is equal to an earlier request gets the
    recorded answer again, because HTTP clients repeat requests after errors. Because repeated requests get recorded
    answers, each answer is sampled and trained on only once.

    Up to `Limits.max_parallel_turns` requests are answered at the same time, and the turns are recorded in the order in
    which their answers end. The first request is answered alone, because its messages are the prompt of the trajectory.
    If an answer no longer fits into the trajectory when it ends, because other answers were recorded meanwhile, it is
    sampled again with less room, from the same random stream.

    Args:
        request: The prompt, the data columns and the seed of the trajectory.
        engine: The engine that samples the answers.
        limits: Limits on the turns, the tokens and the duration of the trajectory.

    Attributes:
        key: API key of the session.
        record: The recorded turns.
        stop_reason: Name of the limit that a refused request exceeded; "" if no request has exceeded a limit, or if a
            request that arrived after the refusal was answered.
        refusal: Error message of the last refused request.
        reward: Reward that the program has sent for the whole conversation; None if the program has sent no reward for
            the whole conversation.
        lost: Future that gets an exception if the engine can sample no further answer.
        calls: The asyncio tasks that are answering requests.
    """

    def __init__(self, request: EpisodeRequest, engine: Sampler, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.record = Recording(request, limits)
        self.key = secrets.token_urlsafe(24)
        self.stop_reason, self.refusal = "", ""
        self.reward: float | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: set[asyncio.Task[Any]] = set()
        self._places = asyncio.Semaphore(1)  # Further places are added when the first request has been answered.
        self._answered: list[Answered] = []  # The answered requests of all turns, in the order of the turns.
        # Requests whose answers are being sampled, by the number of the turn, each with an event for its end.
        self._open: dict[int, tuple[ModelRequest, asyncio.Event]] = {}
        self._numbers: set[int] = set()  # The numbers of all answered turns.
        self._refusals = 0  # Number of requests that were refused because of a limit.

    async def answer(self, asked: ModelRequest) -> ModelAnswer:
        """Sample the answer to a request, or return the recorded answer if the request was answered before.

        Raises:
            ApiError: the last message of the request is an answer of the policy, the request cannot be rendered, or the
                request exceeds a limit.
        """
        refusals = self._refusals
        while True:
            async with self._places:
                for earlier in reversed(self._answered):
                    size = len(earlier.messages) - 1
                    if len(asked.messages) == size and earlier.begins(asked, size):
                        return earlier.answer
                same = next((end for other, end in self._open.values() if _is_repeated(other, asked)), None)
                if same is None:
                    answer = await self._sampled(asked)
                    if refusals == self._refusals:
                        # The program went on after a refused request, for example with a shorter message.
                        self.stop_reason = ""
                    return answer
            await same.wait()

    def rewarded(self, answer_id: str, reward: float | None) -> None:
        """Record the reward of one answer.

        Raises:
            ApiError: the session has no answer with the id `answer_id`.
        """
        self.record.reward_turn(self._turn_of(answer_id), reward)

    def conversation(self, answer_id: str) -> Sequence[Message]:
        """Return the conversation up to an answer, including the answer.

        Raises:
            ApiError: the session has no answer with the id `answer_id`.
        """
        return self._answered[self._turn_of(answer_id)].messages

    def _turn_of(self, answer_id: str) -> int:
        for turn, answered in enumerate(self._answered):
            if answered.answer.id == answer_id:
                return turn
        raise ApiError(f"this conversation has no answer with the id {answer_id!r:.80}", code="not_found")

    def close(self) -> None:
        """Cancel all requests that are still being answered."""
        for task in self.calls:
            task.cancel()
        self.lost.cancel()

    async def _sampled(self, asked: ModelRequest) -> ModelAnswer:
        if asked.messages[-1]["role"] == "assistant":
            raise ApiError("the last message is an answer: send a new message after it", code="no_new_messages")
        after = self._continued(asked)
        known = 0 if after is None else len(self._answered[after].messages)
        self._check_limits()
        new = _with_names(asked.messages)[known:]
        with self._opened(asked) as number:
            while True:
                turn = self.record.turn_request(
                    new, number=number, after=after, tools=asked.tools, max_tokens=asked.max_tokens
                )
                result = await self._result_of(turn)
                if self.record.has_room_for(result, after=after):
                    break
        before = len(turn.context_ids) + len(turn.action_ids) + len(result.observation_ids)
        return self._recorded(asked, result, after, before)

    @contextlib.contextmanager
    def _opened(self, asked: ModelRequest) -> Iterator[int]:
        """Mark a request as being answered inside the `with` block, and yield the number of its turn."""
        number = next(one for one in itertools.count() if one not in self._numbers and one not in self._open)
        self._open[number] = asked, asyncio.Event()
        try:
            yield number
        finally:
            self._open.pop(number)[1].set()

    async def _result_of(self, turn: TurnRequest) -> TurnResult:
        """Sample a turn.

        Raises:
            ApiError: the engine is lost, the messages of the turn cannot be rendered, or they leave no token for an
                answer.
        """
        try:
            result = await self.engine.sample(turn)
        except Exception as error:
            if not self.lost.done():
                self.lost.set_exception(error)
            raise ApiError("the rollout engine is no longer available", status=503, code="engine_gone") from error
        if result.error:
            raise ApiError(result.error)
        if result.full:
            raise self._no_room()
        return result

    def _continued(self, asked: ModelRequest) -> int | None:
        """Return the index of the turn whose context a request continues, or None if the request starts a new context.

        If a request begins with the messages of several earlier conversations, the request continues the longest of
        them. If a request adds an answer (a message of the role assistant) to an earlier conversation, the request
        starts a new context, because the policy did not sample this answer in the earlier conversation.
        """
        found, longest = None, 0
        for turn, earlier in enumerate(self._answered):
            size = len(earlier.messages)
            if longest < size < len(asked.messages) and earlier.begins(asked, size):
                found, longest = turn, size
        added = asked.messages[longest:]
        return None if any(message["role"] == "assistant" for message in added) else found

    def _check_limits(self) -> None:
        if len(self.record.turns) + len(self._open) >= self.limits.max_turns:
            raise self._limit("max_turns", f"the limit rollout.max_turns={self.limits.max_turns} has been reached")
        if self.record.expired:
            raise self._limit("deadline", f"rollout.trajectory_timeout_s={self.limits.timeout_s:g} has passed")

    def _limit(self, stop_reason: str, message: str) -> ApiError:
        self.stop_reason = stop_reason
        self._refusals += 1
        return ApiError(message, code="context_length_exceeded" if stop_reason == "max_response_length" else "limit")

    def _no_room(self) -> ApiError:
        return self._limit("max_response_length", "rollout.max_response_length leaves no token for another answer")

    def _recorded(self, asked: ModelRequest, result: TurnResult, after: int | None, prompt_tokens: int) -> ModelAnswer:
        assert result.action is not None, "a turn without an action must have failed or hit the token limit"
        action = ParsedAction(result.text.strip()) if asked.text_only else result.action
        message = assistant_message(shown(action))
        self.record.add(result, message, after=after)
        uid, sample, turn = result.key
        answer = ModelAnswer(
            id=f"{uid}-{sample}-{turn}-{self.key[:8]}",
            message=dict(message),
            cut=result.finish_reason == "length",
            prompt_tokens=prompt_tokens,
            completion_tokens=len(result.token_ids),
            created=int(time.time()),
        )
        self._answered.append(Answered([*asked.messages, answer.message], asked.tools, answer))
        self._numbers.add(turn)
        if len(self._answered) == 1:
            for _ in range(self.limits.max_parallel_turns - 1):
                self._places.release()
        return answer


def _is_repeated(earlier: ModelRequest, asked: ModelRequest) -> bool:
    """Return whether a request has the messages and the tools of an earlier request."""
    return list(asked.messages) == list(earlier.messages) and asked.tools == earlier.tools


def shown(action: ParsedAction) -> ParsedAction:
    """Return a copy of an action in which malformed tool calls are ordinary text.

    The OpenAI API cannot represent a malformed tool call. The text of the malformed tool calls follows the action's
    other text, and the well-formed tool calls remain tool calls.
    """
    broken = [call.text for call in action.calls if isinstance(call, BrokenCall)]
    calls = [call for call in action.calls if not isinstance(call, BrokenCall)]
    content = "\n".join(filter(None, [action.content, *broken])) if broken else action.content
    return ParsedAction(content, calls)


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with the name of the called tool added to each tool result.

    Some chat templates require the tool's name in each tool result.
    """
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        named.append(message | {"name": name} if name else message)
    return named
