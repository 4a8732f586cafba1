"""One trajectory in an environment, from the prompt to the reward."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rltrain.base.random_streams import stream_seed
from rltrain.batch.trajectory import Trajectory
from rltrain.environments.contract import EnvironmentFailure
from rltrain.environments.tool_calls import BrokenCall, ParsedAction, ToolCall
from workers.environments.messages import EpisodeRequest, Limits
from workers.environments.recording import Message, Recording, with_attempts
from workers.environments.user_environment import UserEnvironment
from workers.rollout.turns import TurnRequest, TurnResult

_ENVIRONMENT = 1 << 32  # Seed component that separates the environment's random stream from the turns' random streams.


class Sampler(Protocol):
    """Interface of the object that samples the actions of trajectories."""

    async def sample(self, request: TurnRequest) -> TurnResult:
        """Sample the policy's action in response to new messages."""


async def run_episode(
    request: EpisodeRequest, engine: Sampler, make: Callable[[], UserEnvironment], limits: Limits
) -> Trajectory:
    """Run one trajectory in an environment, and return the trajectory.

    If the environment fails, the trajectory starts again in a new environment. If all attempts to run the trajectory
    fail, `run_episode` returns a trajectory with an error message and no actions.
    """

    async def attempt() -> Trajectory:
        environment = make()
        try:
            return await Episode(request, engine, environment, limits).run()
        finally:
            await environment.close()

    return await with_attempts(request, attempt)


def environment_seed(request: EpisodeRequest) -> int:
    """Return the seed of the random numbers that the user's code draws in a trajectory."""
    return stream_seed(request.seed, *request.key, _ENVIRONMENT)


class Episode:
    """A running trajectory.

    Args:
        request: The prompt, the data columns and the seed of the trajectory.
        engine: The object that samples the actions.
        environment: The environment of the trajectory, which has not been reset yet.
        limits: Limits on the turns, the tokens and the duration of the trajectory.
    """

    def __init__(self, request: EpisodeRequest, engine: Sampler, environment: UserEnvironment, limits: Limits) -> None:
        self.request, self.engine, self.environment, self.limits = request, engine, environment, limits
        self.record = Recording(request, limits)

    async def run(self) -> Trajectory:
        """Run the trajectory until it ends or reaches a limit.

        Raises:
            EnvironmentFailure: the code of the environment failed, or the prompt cannot be rendered.
        """
        text = await self.environment.reset(self.request.columns, environment_seed(self.request))
        new = prompt_with(self.request.messages, text)
        stop_reason = ""
        while not stop_reason:
            result = await self.engine.sample(self.record.turn_request(new))
            if result.error:
                raise EnvironmentFailure(result.error)
            if result.full:
                self.record.messages += result.messages
                stop_reason = "max_response_length"
                break
            new, stop_reason = await self._answered(result)
        return self.record.trajectory(stop_reason, await self.environment.reward())

    async def _answered(self, result: TurnResult) -> tuple[list[Message], str]:
        """Record a sampled action, and return the environment's messages in response to the action.

        Returns:
            A pair: the messages in response to the action, and why the trajectory ends ("" if it continues).
        """
        assert result.action is not None, "a turn without an action must have failed or hit the token limit"
        complete = result.finish_reason == "stop"
        new, reward, done = await self._answer_to(result.action, complete=complete)
        self.record.add(result, transcript_message(result.action, result.written), reward)
        if done:
            return [], "done"
        if not complete:  # A truncated action is not a final answer.
            return [], "max_response_length"
        if not new and not result.action.calls:
            return [], "answer"
        if self.record.expired:
            return [], "deadline"
        if len(self.record.turns) >= self.limits.max_turns:
            return [], "max_turns"
        return new, ""

    async def _answer_to(self, action: ParsedAction, *, complete: bool) -> tuple[list[Message], float | None, bool]:
        """Run the tool calls of an action in order, or pass the text of the action to the environment's `step`.

        The calls of an action that is not complete are not made. When the time limit of the trajectory has passed, the
        remaining calls are not made either.

        `step` is called only if the action has no tool calls and the environment has a method `step`. Only a run with
        tools has actions with tool calls.

        Returns:
            Three values: the messages that respond to the action, the reward of the turn, and whether the environment
            ended the trajectory. If the list of messages that respond to the action is empty, the action is the final
            answer.
        """
        if action.calls:
            results: list[Message] = []
            for call in action.calls if complete else ():
                if self.record.expired:
                    break
                results.append(await self._result_of(call))
            return results, None, False
        if self.environment.plays:
            observation, reward, done = await self.environment.step(action.content)
            return [{"role": "user", "content": observation}], reward, done
        return [], None, False

    async def _result_of(self, call: Any) -> Message:
        known = isinstance(call, ToolCall)
        text = await self.environment.call(call, self.record.time_left_s) if known else f"error: {call.error}"
        message = {"role": "tool", "content": text, "tool_call_id": call.id}
        return message | ({"name": call.name} if known else {})


def prompt_with(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages of a prompt, after appending the text of the environment's `reset` to the last message."""
    if not text:
        return list(messages)
    *before, last = messages
    content = f"{last['content']}\n{text}" if last["content"] else text
    return [*before, {**last, "content": content}]


def transcript_message(action: ParsedAction, written: str) -> Message:
    """Convert an action to an assistant message whose text includes the action's malformed tool calls.

    The assistant message is stored with the conversation, but is never rendered for the model, because the context of
    the next action consists of the sampled token ids.

    Args:
        action: The action.
        written: Text of the action as the model wrote it. If the action has only malformed tool calls, `written` is the
            content of the message. If the action has both well-formed and malformed tool calls, the key `tool_calls` of
            the message lists the well-formed tool calls, and the content of the message is the action's content
            followed by the malformed tool calls.
    """
    message = assistant_message(action)
    broken = [call.text for call in action.calls if isinstance(call, BrokenCall)]
    if not broken:
        return message
    if "tool_calls" not in message and written:
        return {**message, "content": written.strip()}
    return {**message, "content": "\n".join(filter(None, [action.content, *broken]))}


def assistant_message(action: ParsedAction) -> Message:
    """Convert an action to an assistant message that leaves out the action's malformed tool calls."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in action.calls
        if isinstance(call, ToolCall)
    ]
    return {"role": "assistant", "content": action.content} | ({"tool_calls": calls} if calls else {})
