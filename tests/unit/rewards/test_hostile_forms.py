"""Tests of reward functions with unexpected exceptions or return values, and of functions that are refused early."""

import signal

import pytest

from rltrain.base.errors import ConfigError
from rltrain.rewards import loading
from rltrain.settings.compose import compose
from rltrain.settings.reward_config import RewardFunctionConfig
from tests.reward_configs import reward_function
from workers.reward.messages import RewardRequest
from workers.reward.worker import RewardWorker

RAISES = """
import asyncio

class Own(BaseException): pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

WHAT = {
    "cancelled": asyncio.CancelledError(), "own": Own("mine"), "generator": GeneratorExit(), "mute": Mute(),
    "group": BaseExceptionGroup("several", [Own("one")]), "exit": SystemExit(3),
}

def plain(response):
    return raised(response)

async def awaited(response):
    if response == "ctrl-c":
        raise KeyboardInterrupt
    if response == "itself":
        asyncio.current_task().cancel()
        await asyncio.sleep(0)
    if response == "stop":
        asyncio.get_running_loop().stop()
    return raised(response)

def lists(prompts, responses):
    return [raised(response) for response in responses]

async def async_lists(prompts, responses):
    if "itself" in responses:
        asyncio.current_task().cancel()
        return [len(r) for r in responses]
    if "ctrl-c" in responses:
        raise KeyboardInterrupt
    return [raised(response) for response in responses]

def raised(response):
    if response in WHAT:
        raise WHAT[response]
    return len(response)

async def stubborn(response):
    while response == "stay":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
    return len(response)

class Shy:
    def __repr__(self):
        raise RuntimeError("no repr")

def shy(prompts, responses):
    return [Shy() if r == "shy" else 1.0 for r in responses]

class Leaves:
    def __repr__(self):
        raise SystemExit(3)

class Left(list):
    def __iter__(self):
        raise SystemExit(4)

def leaves(prompts, responses):
    return Left(responses) if "all" in responses else [Leaves() if r == "one" else 1.0 for r in responses]

def misplaced(response):
    code = (lambda: 1 / 0).__code__.replace(co_filename=response)
    exec(code)

def coroutine(prompts, responses):
    return [awaited(response) for response in responses]
"""
SAID = {
    "cancelled": "CancelledError", "own": "Own: mine", "generator": "GeneratorExit",
    "group": "BaseExceptionGroup: several",
    "mute": "Mute: no text, because __str__ raised RuntimeError", "exit": "3",
}  # fmt: skip


def function(path, name: str, **kwargs) -> RewardFunctionConfig:
    return reward_function(name, f"{path}:{name}", kwargs=kwargs)


def requests(*responses: str) -> list[RewardRequest]:
    return [RewardRequest((0, n), "p", text, {}) for n, text in enumerate(responses)]


def scores(results) -> list:
    return ["failed" if r.failed else r.scores[0] if len(r.scores) == 1 else r.scores for r in results]


@pytest.fixture
def raising(tmp_path):
    (tmp_path / "raising.py").write_text(RAISES)
    return tmp_path / "raising.py"


@pytest.mark.parametrize("form", ["plain", "awaited", "lists", "async_lists"])
@pytest.mark.parametrize("what", SAID)
def test_G2_whatever_is_raised_is_failed_with_its_name_and_the_others_are_scored(raising, form, what):
    worker = RewardWorker([function(raising, form)])
    results = worker.score(requests("abc", what, "a"))
    assert scores(results) == [3.0, "failed", 1.0]
    assert results[1].error.startswith(f"reward function '{form}' ")
    assert SAID[what] in results[1].error
    assert scores(worker.score(requests("ab"))) == [2.0]  # The worker's event loop still works.


@pytest.mark.parametrize(("form", "what"), [("awaited", "ctrl-c"), ("awaited", "itself"), ("async_lists", "ctrl-c"),
                                            ("async_lists", "itself")])  # fmt: skip
def test_G2_an_async_function_can_neither_end_the_loop_nor_cancel_its_caller(raising, form, what):
    worker = RewardWorker([function(raising, form)])
    assert scores(worker.score(requests(what))) == ["failed"]
    assert scores(worker.score(requests("ab"))) == [2.0]


def test_an_async_function_that_stops_the_loop_stops_no_other(raising):
    worker = RewardWorker([function(raising, "awaited")])
    assert scores(worker.score(requests("abc", "stop", "a"))) == [3.0, 4.0, 1.0]


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_of_the_user_goes_through(raising, monkeypatch):
    worker = RewardWorker([function(raising, "plain")])
    monkeypatch.setattr(worker._functions[0], "bound", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        worker.score(requests("a"))


def test_an_async_function_that_goes_on_when_it_is_cancelled_is_left_behind(raising, monkeypatch):
    monkeypatch.setattr("workers.reward.worker._CANCEL_S", 0.2)
    results = RewardWorker([function(raising, "stubborn")]).score(requests("abc", "stay", "a"), limit_s=0.2)
    assert scores(results) == [3.0, "failed", 1.0]
    ending = "did not return within 0.2 s, and did not end when it was cancelled"
    assert results[1].error == f"reward function 'stubborn' {ending}"


def test_a_result_that_cannot_be_shown_fails_alone(raising):
    assert scores(RewardWorker([function(raising, "shy")]).score(requests("a", "shy"))) == [1.0, "failed"]


def test_a_result_that_ends_the_program_when_it_is_looked_at_fails_alone(raising):
    worker = RewardWorker([function(raising, "leaves")])
    assert scores(worker.score(requests("a", "one"))) == [1.0, "failed"]
    assert scores(worker.score(requests("a", "all"))) == ["failed", "failed"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [("plain.py", "(plain.py:"), ("half\udc9f", r"(half\udc9f:"), ("nul\0", r"(nul\x00:"),
     ("two\nlines", r"(two\nlines:"), ("x" * 5000, "x ... x")],
)  # fmt: skip
def test_what_a_function_of_a_strange_file_name_raises_can_be_stored(raising, name, shown):
    (result,) = RewardWorker([function(raising, "misplaced")]).score(requests(name))
    assert result.error.startswith("reward function 'misplaced' raised ZeroDivisionError: division by zero (")
    assert shown in result.error
    assert len(result.error.encode()) < 400


def test_a_coroutine_among_the_scores_is_no_score(raising):
    (result,) = RewardWorker([function(raising, "coroutine")]).score(requests("a"))
    assert "of type coroutine: a score must be a number" in result.error


LEAKS = """
import json, os
from decimal import Decimal
from rltrain.rewards.result import RewardResult

class Odd:
    def __repr__(self):
        return f"Odd({os.environ['DEPLOY_KEY']!r})"

KEY = os.environ["DEPLOY_KEY"]
WAYS = {
    "message": lambda: RewardResult(failed=True, message=KEY),
    "text": lambda: KEY,
    "list": lambda: KEY.splitlines(),
    "repr": Odd,
}

def leak(response):
    if response in WAYS:
        return WAYS[response]()
    said = {"raised": KEY, "escaped": repr(KEY), "json": json.dumps({"key": KEY}), "cut": "x" * 280 + KEY}
    raise ValueError(said[response])

async def later(response):
    return leak(response)

def all_of_them(prompts, responses):
    return [leak(response) for response in responses]
"""


@pytest.mark.parametrize("form", ["leak", "later", "all_of_them"])
def test_no_failure_that_is_kept_shows_a_key_of_many_lines(tmp_path, monkeypatch, form):
    key = (
        "-----BEGIN KEY-----\n"
        + "\n".join(f"{n}abcdefghijklmnopqrst+/{n}" for n in range(30))
        + "\n-----END KEY-----\n"
    )
    monkeypatch.setenv("DEPLOY_KEY", key)
    (tmp_path / "leaks.py").write_text(LEAKS)
    ways = ("message", "text", "list", "repr", "raised", "escaped", "json", "cut")
    results = RewardWorker([function(tmp_path / "leaks.py", form)]).score(requests(*ways))
    assert scores(results) == ["failed"] * len(ways)
    for way, result in zip(ways, results, strict=True):
        assert "[hidden]" in result.error, way
        assert "abcdef" not in result.error, way


def test_no_import_that_fails_shows_a_key_of_many_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPLOY_KEY", "first-line-of-it\nsecond-line-of-it")
    (tmp_path / "odd.py").write_text("import os\nraise ValueError(os.environ['DEPLOY_KEY'])")
    with pytest.raises(ConfigError, match=r"does not import \(ValueError: \[hidden\]\)"):
        loading.load_function(f"{tmp_path}/odd.py:score")


# Tests of functions that are refused before anything runs


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def score(prompt, response): yield 1.0", "'score' has a yield"),
        ("async def score(prompt, response): yield 1.0", "'score' has a yield"),
        ("class Own(BaseException): pass\nraise Own('x')", "does not import (Own: x)"),
        ("class Own(Exception):\n    def __str__(self): raise ValueError\nraise Own", "does not import (Own: no text"),
    ],
)
def test_a_function_that_cannot_score_is_refused_in_one_line(tmp_path, code, said):
    (tmp_path / "odd.py").write_text(code)
    with pytest.raises(ConfigError) as caught:
        loading.load_function(f"{tmp_path}/odd.py:score")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_to_which_nothing_would_be_passed_is_refused():
    def blind(*args): ...
    def wrapped(*args, **kwargs): ...
    def named(response, *others): ...

    with pytest.raises(ConfigError, match=r"'mine' takes \*args, but arguments are passed by name"):
        loading.check_columns(blind, "mine", [])
    loading.check_columns(wrapped, "mine", [])
    loading.check_columns(named, "mine", [])


def test_a_device_is_no_reward_file():
    with pytest.raises(ConfigError, match="/dev/null is not a regular file; name a Python file"):
        loading.load_function("/dev/null:score")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("name: ''", "name ''"),
        ("name: a/b", "name 'a/b'"),
        ("name: a b", "name 'a b'"),
        ("weight: 1e39", "weight of 'plain' is 1e+39, which is outside float32's range"),
        ("weight: -1e39", "weight of 'plain' is -1e+39"),
        ("kwargs: {prompt: x}", "reward.functions[0].kwargs.prompt: must be the name of an option"),
        ("kwargs: {responses: x}", "reward.functions[0].kwargs.responses: must be"),
        ("kwargs: {1: x}", "reward.functions[0].kwargs.1: must be"),
    ],
)
def test_a_function_config_that_makes_no_sense_is_refused(changes, said):
    with pytest.raises(ConfigError) as caught:
        compose([f"reward.functions=[{{path: 'x.py:plain', {changes}}}]"])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
