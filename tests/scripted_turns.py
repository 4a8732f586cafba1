"""An engine whose actions are scripted, for tests of trajectories with several turns."""

from rltrain.environments.tool_calls import ParsedAction, ToolCall
from workers.environments.messages import EpisodeRequest, Limits
from workers.rollout.turns import TurnResult

REQUEST = EpisodeRequest((3, 1), [{"role": "user", "content": "go"}], {"answer": "7"}, temperature=1.0, seed=5)
END = 99  # Token id that ends each scripted action.


def limits(**changed):
    """Return limits of a trajectory, with the given changes."""
    values = {
        "max_turns": 8, "max_prompt_tokens": 50, "max_response_tokens": 100, "max_turn_tokens": 10,
        "max_message_tokens": 20, "call_timeout_s": 5.0, "timeout_s": 60.0, "max_parallel_turns": 8,
    }  # fmt: skip
    return Limits(**(values | changed))


class Script:
    """An engine that returns scripted actions, with one token per new message and two tokens per action.

    Attributes:
        requests: all requests so far.
    """

    def __init__(self, *actions, reasons=()):
        self.actions, self.reasons, self.requests = list(actions), dict(enumerate(reasons)), []

    async def sample(self, request):
        """Return the scripted action of the requested turn."""
        number = len(self.requests)
        self.requests.append(request)
        action = self.actions[request.key[2]]
        observed = [10 * number + 1] * len(request.messages)
        if len(observed) + (2 if number else 0) > request.room:
            return TurnResult(request.key, observed, messages=list(request.messages), full=True, serial=request.serial)
        return TurnResult(
            request.key, observed, [50 + number, END], [-0.5, -0.25], [number, number],
            self.reasons.get(number, "stop"), f"text {number}", action, list(request.messages),
            serial=request.serial,
        )  # fmt: skip


def say(text):
    """Return an action without tool calls."""
    return ParsedAction(text)


def call(*calls):
    """Return an action that calls tools, each given as (name, arguments)."""
    made = [ToolCall(name, arguments, f"c{n}") for n, (name, arguments) in enumerate(calls)]
    return ParsedAction("", made)
