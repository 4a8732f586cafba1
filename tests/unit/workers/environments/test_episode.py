"""Tests of one trajectory in an environment, with an engine that answers from a script."""

import asyncio
import inspect
import json
import time
from typing import ClassVar

import pytest

from rltrain.environments.tool_calls import BrokenCall, ParsedAction, ToolCall, hermes
from tests.scripted_turns import END, REQUEST, Script, call, limits, say
from workers.environments.episode import run_episode, transcript_message
from workers.environments.recording import ATTEMPTS
from workers.environments.user_environment import UserEnvironment


def run(engine, environment=None, tools=None, **changed):
    def make():
        return UserEnvironment(environment, tools or {}, limits(**changed).call_timeout_s)

    return asyncio.run(run_episode(REQUEST, engine, make, limits(**changed)))


class Countdown:
    """A game that ends at the third step and stores the arguments of its methods."""

    made: ClassVar[list] = []

    def reset(self, answer, seed):
        self.answer, self.seed, self.texts, self.closed = answer, seed, [], False
        self.made.append(self)
        return f"start at {answer}"

    def step(self, text):
        self.texts.append(text)
        return f"seen {text}", 0.25 * len(self.texts), len(self.texts) == 3

    def reward(self):
        return 1.0

    def close(self):
        self.closed = True


def test_a_game_of_three_turns_gives_one_trajectory_with_the_rewards_of_its_turns():
    Countdown.made.clear()
    engine = Script(say("a"), say("b"), say("c"))
    found = run(engine, Countdown)
    assert found.key == (3, 1)
    assert (found.stop_reason, found.finish_reason, found.error) == ("done", "stop", "")
    assert [list(turn.observation_ids) for turn in found.turns] == [[1], [11], [21]]
    assert list(found.response_ids()) == [50, END, 11, 51, END, 21, 52, END]
    assert list(found.versions()) == [0, 0, -1, 1, 1, -1, 2, 2]
    assert [turn.reward for turn in found.turns] == [0.25, 0.5, 0.75]
    assert (found.reward, found.environment_reward) == (1.0, 2.5)
    (game,) = Countdown.made
    assert (game.answer, game.texts, game.closed) == ("7", ["a", "b", "c"], True)
    assert [message["content"] for message in found.messages] == [
        "go\nstart at 7", "a", "seen a", "b", "seen b", "c",
    ]  # fmt: skip


def test_each_context_starts_with_all_earlier_ids_and_each_turn_has_a_random_stream_of_its_own():
    engine = Script(say("a"), say("b"), say("c"))
    run(engine, Countdown)
    contexts = [[*request.context_ids, *request.action_ids] for request in engine.requests]
    assert contexts == [[], [1, 50, END], [1, 50, END, 11, 51, END]]
    assert [request.room for request in engine.requests] == [100, 98, 95]
    assert len({request.seed for request in engine.requests}) == 3
    assert [request.key for request in engine.requests] == [(3, 1, 0), (3, 1, 1), (3, 1, 2)]


def add(a: int, b: int) -> int:
    return a + b


async def slow(text: str) -> str:
    await asyncio.sleep(0.01)
    return text


def test_tools_are_called_in_the_order_of_the_calls_and_an_answer_without_a_call_ends_the_trajectory():
    engine = Script(call(("add", {"a": 2, "b": 3}), ("slow", {"text": "x"}), ("add", {"a": 1, "b": 1})), say("done"))
    found = run(engine, tools={"add": add, "slow": slow})
    assert found.stop_reason == "answer"
    assert [(m["role"], m["content"], m["tool_call_id"]) for m in engine.requests[1].messages] == [
        ("tool", "5", "c0"), ("tool", "x", "c1"), ("tool", "2", "c2"),
    ]  # fmt: skip
    assert found.environment_reward is None
    assert found.answer == "text 1"


def broken(text: str) -> str:
    raise KeyError(text)


def hang() -> str:
    time.sleep(0.5)
    return "late"


def leave() -> None:
    raise SystemExit(3)


async def leave_async() -> None:
    raise SystemExit(3)


def stop() -> None:
    raise StopIteration("no more")


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (
            call(("lookup", {})),
            r"error: there is no tool 'lookup'; the tools are add, broken, hang, leave, leave_async, stop",
        ),
        (call(("add", {"a": 1})), r"error: add: missing a required argument: 'b'"),
        (call(("add", {"a": 1, "b": 2, "c": 3})), r"error: add: got an unexpected keyword argument 'c'"),
        (call(("broken", {"text": "y"})), r"error: broken: KeyError: 'y'"),
        (call(("leave", {})), r"error: leave: RuntimeError: SystemExit: 3"),
        (call(("leave_async", {})), r"error: leave_async: RuntimeError: SystemExit: 3"),
        (call(("stop", {})), r"error: stop: RuntimeError: StopIteration: no more"),
        (call(("hang", {})), r"error: hang took more than 0.1 s"),
        (ParsedAction("", [BrokenCall("{", "the call is not valid JSON", "c0")]), r"error: the call is not valid JSON"),
    ],
)
def test_T7_the_policy_is_told_what_was_wrong_with_a_call(action, told):
    engine = Script(action, say("sorry"))
    tools = {one.__name__: one for one in (add, broken, hang, leave, leave_async, stop)}
    found = run(engine, tools=tools, call_timeout_s=0.1)
    assert [m["content"] for m in engine.requests[1].messages] == [told]
    assert (found.stop_reason, found.error) == ("answer", "")


class Vault:
    """A game with a documented helper that the model must not call."""

    def step(self, text):
        return self.reveal() if text == "open" else "closed", 0.0, False

    def reveal(self) -> str:
        """Show the secret."""
        return "secret"


def test_T7_the_model_cannot_call_the_helpers_of_a_game_but_the_tools_beside_the_game():
    for tools, known in (({}, "none"), ({"add": add}, "add")):
        engine = Script(call(("reveal", {}), ("add", {"a": 1, "b": 2})), say("open"), say("x"))
        run(engine, Vault, tools, max_turns=3)
        shown = [m["content"] for m in engine.requests[1].messages]
        assert shown[0] == f"error: there is no tool 'reveal'; the tools are {known}"
        assert shown[1] == ("3" if tools else "error: there is no tool 'add'; the tools are none")
        assert engine.requests[2].messages == [{"role": "user", "content": "secret"}]


def test_a_malformed_call_is_in_the_messages_as_the_model_wrote_it():
    text = 'I look.\n<tool_call>\n{"key": }\n</tool_call>\nDone.'
    assert transcript_message(hermes(text), text) == {"role": "assistant", "content": text}
    good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    mixed = transcript_message(hermes(text + good), text + good)
    assert mixed["content"] == 'I look.\n\nDone.\n<tool_call>\n{"key": }\n</tool_call>'
    assert [call["function"]["name"] for call in mixed["tool_calls"]] == ["add"]
    assert transcript_message(hermes(good), "")["content"] == ""


def test_a_malformed_call_changes_neither_the_ids_nor_the_messages_to_the_model():
    broken = ParsedAction("", [BrokenCall("<tool_call>{</tool_call>", "the call is not valid JSON", "c0")])
    right = ParsedAction("", [ToolCall("add", {"a": 1, "b": 2}, "c0")])
    engines = [Script(action, say("sorry")) for action in (broken, right)]
    shown, called = (run(engine, tools={"add": add}) for engine in engines)
    assert shown.response_ids() == called.response_ids()
    assert [m["role"] for m in engines[0].requests[1].messages] == ["tool"]
    assert [m["content"] for m in shown.messages] == [
        "go", "<tool_call>{</tool_call>", "error: the call is not valid JSON", "sorry",
    ]  # fmt: skip
    assert shown.tool_calls == 0


def test_limits_end_a_trajectory_with_their_names_and_its_reward_is_still_asked_for():
    for changed, actions, reason in (
        ({"max_turns": 2}, 3, "max_turns"),
        ({"max_response_tokens": 4}, 3, "max_response_length"),
        ({"timeout_s": 0.0}, 3, "deadline"),
    ):
        engine = Script(*[say("x")] * actions)
        found = run(engine, Countdown, **changed)
        assert (found.stop_reason, found.finish_reason, found.reward) == (reason, "length", 1.0)


def test_an_action_that_was_cut_off_ends_the_trajectory():
    found = run(Script(say("a"), say("b"), reasons=["stop", "length"]), Countdown)
    assert (found.stop_reason, len(found.turns)) == ("max_response_length", 2)


def test_a_cut_answer_without_a_tool_call_is_no_final_answer():
    action = call(("add", {"a": 2, "b": 3}))
    found = run(Script(action, say("The sum i"), reasons=["stop", "length"]), tools={"add": add})
    assert (found.stop_reason, found.finish_reason, len(found.turns)) == ("max_response_length", "length", 2)
    assert list(found.response_ids()) == [50, END, 11, 51, END]
    ended = run(Script(action, say("The sum is 5"), reasons=["stop", "stop"]), tools={"add": add})
    assert (ended.stop_reason, ended.finish_reason, ended.response_ids()) == ("answer", "stop", found.response_ids())


def test_the_time_limit_of_a_trajectory_ends_a_call_and_the_calls_after_it_are_not_made():
    begun, ended = [], []

    async def nap(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0.5)
        ended.append(number)

    engine = Script(call(*[("nap", {"number": number}) for number in range(5)]), say("rested"))
    found = run(engine, tools={"nap": nap}, timeout_s=0.1, max_turns=1)
    assert (found.stop_reason, found.finish_reason, len(found.turns)) == ("deadline", "length", 1)
    assert (begun, ended) == ([0], [])
    begun.clear()
    assert run(engine, tools={"nap": nap}, timeout_s=-1.0).stop_reason == "deadline"
    assert begun == []


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_the_calls_of_an_action_that_was_cut_off_are_not_made(reason):
    made = []
    tools = {"add": lambda a, b: made.append((a, b))}
    found = run(Script(call(("add", {"a": 2, "b": 3})), say("done"), reasons=[reason]), tools=tools)
    assert made == ([] if reason == "length" else [(2, 3)])
    assert found.stop_reason == ("max_response_length" if reason == "length" else "answer")


class Fails:
    """An environment whose first `failures` objects raise an error in the method named `method`."""

    failures, method, made = 0, "reset", 0

    def _maybe(self, method):
        if method == self.method and type(self).made <= self.failures:
            raise OSError("no connection")

    def reset(self):
        type(self).made += 1
        self._maybe("reset")

    def step(self, text):
        self._maybe("step")
        return "", 1.0, True

    def reward(self):
        self._maybe("reward")
        return 0.0


@pytest.mark.parametrize("method", ["reset", "step", "reward"])
def test_T7_a_failed_environment_starts_again_and_then_gives_a_trajectory_with_an_error(monkeypatch, method):
    monkeypatch.setattr(Fails, "method", method)
    monkeypatch.setattr(Fails, "made", 0)
    monkeypatch.setattr(Fails, "failures", ATTEMPTS - 1)
    assert run(Script(say("a")), Fails).error == ""
    monkeypatch.setattr(Fails, "made", 0)
    monkeypatch.setattr(Fails, "failures", ATTEMPTS)
    found = run(Script(say("a")), Fails)
    line = inspect.getsourcelines(Fails._maybe)[1] + 2
    assert found.error == f"the environment's {method} raised OSError: no connection ({__file__}:{line})"
    assert (found.stop_reason, list(found.response_ids())) == ("error", [])


@pytest.mark.parametrize("returned", [None, 3, ("text", 1.0), ("text", float("nan"), False), ("text", "much", False)])
def test_a_step_that_returns_something_else_is_a_failure_of_the_environment(returned):
    class Odd:
        def step(self, text):
            return returned

    assert "return" in run(Script(say("a")), Odd).error or "reward" in run(Script(say("a")), Odd).error


def test_an_error_names_the_line_of_the_user_and_not_that_of_a_library():
    class Reads:
        def reset(self):
            json.loads("{")

        def step(self, text): ...

    line = inspect.getsourcelines(Reads.reset)[1] + 1
    assert run(Script(say("a")), Reads).error.endswith(f"({__file__}:{line})")

    class Wants:
        def reset(self, *, absent): ...

        def step(self, text): ...

    assert run(Script(say("a")), Wants).error.endswith("required keyword-only argument: 'absent'")


# Tests of environment classes that were written for TRL


class Till:
    """A shop in the form that TRL documents: tools are methods, and the attribute `reward` holds the reward."""

    def __init__(self):
        self.reward = None

    def reset(self, **columns):
        self.wanted = columns["answer"]
        return "A customer waits."

    def sell(self, fruit: str) -> str:
        """Sell a fruit to the customer.

        Args:
            fruit: Name of the fruit.
        """
        self.reward = 1.0 if fruit == self.wanted else 0.25
        return "sold"


class CountedTill(Till):
    """A shop that computes its reward in the method `get_reward`, which takes precedence over the attribute."""

    def get_reward(self):
        return 2 * self.reward


class LateTill(Till):
    """A shop whose attribute `reward` is a property."""

    paid = None

    @property
    def reward(self):
        return self.paid

    @reward.setter
    def reward(self, value):
        self.paid = value if value is None else value / 2


@pytest.mark.parametrize(("environment", "reward"), [(Till, 1.0), (CountedTill, 2.0), (LateTill, 0.5)])
def test_an_environment_class_of_TRL_gives_its_reward_as_an_attribute_or_with_get_reward(environment, reward):
    engine = Script(call(("sell", {"fruit": "6"})), call(("sell", {"fruit": "7"})), say("sold"))
    found = run(engine, environment)
    assert (found.stop_reason, found.error, found.reward) == ("answer", "", reward)
    assert found.messages[0]["content"] == "go\nA customer waits."
    assert [m["content"] for m in found.messages if m["role"] == "tool"] == ["sold", "sold"]


def test_an_attribute_without_a_reward_gives_none_and_one_that_is_no_number_is_a_failure():
    class Odd(Till):
        def reset(self, **columns):
            self.reward = "much"

    unsold = run(Script(say("no")), Till)
    assert (unsold.reward, unsold.error) == (None, "")
    assert run(Script(say("no")), Odd).error == "the reward 'much' is not a number"


def test_the_attribute_of_a_game_is_not_added_to_the_rewards_that_step_has_returned():
    class Game:
        def step(self, text):
            self.reward = 0.5
            return "", self.reward, True

    found = run(Script(say("a")), Game)
    assert (found.turns[0].reward, found.reward, found.environment_reward) == (0.5, None, 0.5)
