"""One trajectory in an environment, from the prompt to the reward."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rltrain.base.random_streams import stream_seed
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.environments.contract import EnvironmentFailure
from rltrain.environments.tool_calls import ParsedAction, ToolCall
from workers.environments.messages import EpisodeRequest, Limits
from workers.environments.user_environment import UserEnvironment
from workers.rollout.turns import TurnRequest, TurnResult

Message = Mapping[str, Any]
ATTEMPTS = 2  # Maximum number of attempts to run a trajectory whose environment fails.
_ENVIRONMENT = 1 << 32  # Seed component that separates the random stream of the environment from those of the turns.


class Samples(Protocol):
    """Interface of the object that samples the actions of trajectories."""

    async def sample(self, request: TurnRequest) -> TurnResult:
        """Sample the policy's action in response to new messages."""


async def run_episode(
    request: EpisodeRequest, engine: Samples, make: Callable[[], UserEnvironment], limits: Limits
) -> Trajectory:
    """Run one trajectory, and return it.

    If the environment fails, the trajectory starts again in a new environment. After `ATTEMPTS` failures, the returned
    trajectory has an error and no actions.
    """
    error = ""
    for _ in range(ATTEMPTS):
        environment = make()
        try:
            return await Episode(request, engine, environment, limits).run()
        except EnvironmentFailure as failure:
            error = str(failure)
        finally:
            await environment.close()
    return Trajectory(*request.key, [Turn((), (), (), (), "abort")], "error", error=error)


class Episode:
    """A running trajectory.

    Args:
        request: The prompt, the data columns and the seed of the trajectory.
        engine: The object that samples the actions.
        environment: The environment of the trajectory, which has not been reset yet.
        limits: Limits of the trajectory.
    """

    def __init__(self, request: EpisodeRequest, engine: Samples, environment: UserEnvironment, limits: Limits) -> None:
        self.request, self.engine, self.environment, self.limits = request, engine, environment, limits
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.ids: list[int] = []  # Token ids of the trajectory before the last action.
        self.deadline = time.monotonic() + limits.timeout_s

    async def run(self) -> Trajectory:
        """Run the trajectory until it ends or reaches a limit.

        Raises:
            EnvironmentFailure: the code of the environment failed, or the prompt cannot be rendered.
        """
        seed = stream_seed(self.request.seed, *self.request.key, _ENVIRONMENT)
        text = await self.environment.reset(self.request.columns, seed)
        new = prompt_with(self.request.messages, text)
        stop_reason = ""
        while not stop_reason:
            result = await self.engine.sample(self._turn(new))
            if result.error:
                raise EnvironmentFailure(result.error)
            self.messages += result.messages
            if result.full:
                stop_reason = "max_response_length"
                break
            new, stop_reason = await self._answered(result)
        reward = await self.environment.reward()
        key, turns = self.request.key, self.turns or [Turn((), (), (), (), "abort")]
        return Trajectory(*key, turns, stop_reason, self.messages, reward)

    def _turn(self, new: Sequence[Message]) -> TurnRequest:
        """Return the request for the next action; `new` holds the messages since the last action."""
        limits, number = self.limits, len(self.turns)
        last = list(self.turns[-1].action_ids) if self.turns else []
        prompt = len(self.turns[0].observation_ids) if self.turns else 0
        seed = stream_seed(self.request.seed, *self.request.key, *([number] if number else []))
        return TurnRequest(
            key=(*self.request.key, number),
            context_ids=list(self.ids),
            action_ids=last,
            messages=new,
            room=limits.max_response_tokens - (len(self.ids) + len(last) - prompt),
            max_prompt_tokens=limits.max_prompt_tokens,
            max_tokens=limits.max_turn_tokens,
            max_message_tokens=limits.max_message_tokens,
            temperature=self.request.temperature,
            seed=seed,
        )

    async def _answered(self, result: TurnResult) -> tuple[list[Message], str]:
        """Record a sampled action, and return the environment's new messages in response to the action.

        Returns:
            A pair: the new messages, and the reason why the trajectory ends ("" if the trajectory continues).
        """
        assert result.action is not None, "a turn that is neither full nor failed has an action"
        action, number = result.action, len(self.turns)
        self.messages.append(assistant_message(action))
        if self.turns:
            self.ids += self.turns[-1].action_ids
        self.ids += result.observation_ids
        new, reward, done = await self._answer_to(action)
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
        if done:
            return [], "done"
        if not new:
            return [], "answer"
        if result.finish_reason != "stop":
            return [], "max_response_length"
        if number + 1 >= self.limits.max_turns:
            return [], "max_turns"
        return new, "deadline" if time.monotonic() > self.deadline else ""

    async def _answer_to(self, action: ParsedAction) -> tuple[list[Message], float | None, bool]:
        """Run the tool calls of an action in order, or pass the text of the action to the environment's `step`.

        `step` is called only if the action has no tool calls and the environment has a method `step`.

        Returns:
            Three values: the messages that respond to the action, the reward of the turn, and whether the environment
            ended the trajectory. If no messages respond to the action, the action is the final answer.
        """
        if action.calls:
            return [await self._result_of(call) for call in action.calls], None, False
        if self.environment.plays:
            observation, reward, done = await self.environment.step(action.content)
            return [{"role": "user", "content": observation}], reward, done
        return [], None, False

    async def _result_of(self, call: Any) -> Message:
        known = isinstance(call, ToolCall)
        text = await self.environment.call(call) if known else f"error: {call.error}"
        message = {"role": "tool", "content": text, "tool_call_id": call.id}
        return message | ({"name": call.name} if known else {})


def prompt_with(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages of a prompt, after appending the text of the environment's `reset` to the last message."""
    if not text:
        return list(messages)
    *before, last = messages
    content = f"{last['content']}\n{text}" if last["content"] else text
    return [*before, {**last, "content": content}]


def assistant_message(action: ParsedAction) -> Message:
    """Convert an action to an assistant message, which is stored with the conversation."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in action.calls
        if isinstance(call, ToolCall)
    ]
    return {"role": "assistant", "content": action.content} | ({"tool_calls": calls} if calls else {})
