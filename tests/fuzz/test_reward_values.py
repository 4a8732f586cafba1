"""Whatever a reward function returns or raises, its sample gets a number or fails with one readable line."""

import asyncio
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import gc
import math
import pickle
import signal
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from harness import cases
from hypothesis import given
from hypothesis import strategies as st

from rltrain.base.errors import RewardError
from rltrain.rewards.loading import load_function
from rltrain.rewards.result import RewardResult
from rltrain.settings.compose import compose
from rltrain.settings.schema import Config
from rltrain.trajectories.scoring import combined_scores
from workers.reward.messages import RewardRequest, SampleScores
from workers.reward.pool import RewardPool

CODE = """
ANSWERS = []

def plain(prompt, response):
    return ANSWERS[0](response)

async def later(prompt, response):
    return ANSWERS[0](response)

def lists(prompts, responses):
    return [ANSWERS[0](response) for response in responses]

async def later_lists(prompts, responses):
    return [ANSWERS[0](response) for response in responses]

def all_at_once(prompts, responses):
    return ANSWERS[0]("odd")

def aggregate(**columns):
    return ANSWERS[0]("odd")
"""
FORMS = ["plain", "later", "lists", "later_lists", "all_at_once"]
LARGEST = 3.4028234663852886e38
HOOKS = [
    "__float__", "__repr__", "__str__", "__iter__", "__len__", "__getitem__", "__bool__", "__eq__", "__index__",
    "__class__", "__getattr__", "__getattribute__", "__hash__", "__array__", "__await__", "__del__", "__reduce__",
    "__format__", "item", "shape", "tolist", "score", "failed", "message",
]  # fmt: skip
ATTRIBUTES = ("__class__", "shape", "score", "failed", "message")


@dataclass(frozen=True)
class Made:
    """A return value that is created only when the reward function returns it.

    If a coroutine were made earlier, it might never be awaited, and Python would warn.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def made(value: Any) -> Any:
    """Return `value` after creating every `Made` value in it, at any depth."""
    if isinstance(value, Made):
        return value.function(*map(made, value.arguments))
    if isinstance(value, list | tuple):
        return type(value)(map(made, value))
    return {key: made(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def makes(function: Callable[..., Any], *arguments: Any) -> Any:
    return st.tuples(*arguments).map(lambda drawn: Made(function, drawn))


class Own(BaseException):
    """An exception class that is neither derived from `Exception` nor built into Python."""


class Mute(Exception):
    def __str__(self):
        raise SystemExit("no text")


class Level(enum.IntEnum):
    HIGH = 3


def raising(error: BaseException) -> Any:
    raise error


def hostile(name: str, error: BaseException, base: type) -> Any:
    """Return an object with one method or attribute that raises `error`."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return type("Odd", (base,), {name: property(fail) if name in ATTRIBUTES else fail})()


def circular() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def renamed(name: str, text: str) -> Exception:
    return type(name, (Exception,), {})(text)


texts = st.one_of(
    st.text(st.characters(), max_size=8),
    st.sampled_from(["0.5", "", "a\nb", "\x1b[31m", "\ud800", "\x00", "x" * 3000, "nan", "Traceback", "{}", "%s"]),
)
kinds = st.sampled_from([
    ValueError, KeyError, OSError, AssertionError, StopIteration, StopAsyncIteration, SystemExit, GeneratorExit,
    MemoryError, asyncio.CancelledError, RecursionError, Own, Mute, UnicodeError, KeyboardInterrupt, TimeoutError,
])  # fmt: skip
errors = st.one_of(
    makes(lambda kind, text: kind(text), kinds, st.one_of(texts, st.binary(max_size=3), st.integers(), st.none())),
    makes(renamed, st.text("ab\n \ud800", max_size=4), texts),
    makes(lambda text: ExceptionGroup(text, [ValueError(text)]), texts),
)
numbers = st.one_of(
    st.booleans(), st.integers(), st.integers(-(10**600), 10**600), st.floats(), st.decimals(), st.fractions(),
    st.complex_numbers(),
    st.sampled_from([fractions.Fraction(10**400, 3), decimal.Decimal("sNaN"), decimal.Decimal("1e999"), Level.HIGH,
                     3.4e38, 3.5e38, 5e-324, -0.0]),
)  # fmt: skip
shapes = st.sampled_from([(), (), (1,), (0,), (2,), (3,), (1, 1), (3, 1)])
DTYPES = ["f2", "f4", "f8", "g", "i1", "u8", "?", "c8", "c16", "U3", "S3", "O", "M8[s]", "M8[ns]", "m8[s]", "V4"]
arrays = makes(
    lambda dtype, shape, value: numpy.full(shape, value).astype(dtype)[()], st.sampled_from(DTYPES), shapes,
    st.sampled_from([0, 1, 2]),
)  # fmt: skip
tensors = makes(
    lambda dtype, shape, device: torch.ones(shape, dtype=dtype, device=device),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64,
                     torch.uint8, torch.float8_e4m3fn]),
    shapes, st.sampled_from(["cpu", "cpu", "meta"]),
)  # fmt: skip
SCALAR = types.SimpleNamespace(shape=(), item=lambda: 1.0)
BASES = st.sampled_from([object, float, int, str, list, dict, RewardResult])
objects = st.one_of(
    makes(hostile, st.sampled_from(HOOKS), errors, BASES), makes(raising, errors), errors, makes(circular),
    makes(lambda: asyncio.sleep(0, 1.0)), makes(lambda: types.SimpleNamespace(__await__=lambda: iter([]))),
    makes(lambda: (number for number in [1.0])), makes(lambda: iter([1.0])), makes(lambda: torch.ones(3).to_sparse()),
    makes(lambda: torch.ones((), requires_grad=True)), makes(lambda: torch.ones(3).numpy()[::2]),
    st.sampled_from([object(), Ellipsis, NotImplemented, int, math, len, lambda: 1, numpy.ma.masked,
                     datetime.date.today(), SCALAR, types.SimpleNamespace(shape=(), item=None)]),
)  # fmt: skip
results = makes(
    RewardResult,
    st.one_of(numbers, st.none(), texts, arrays, objects),
    st.booleans() | texts,
    texts | numbers | objects,
)
single = st.one_of(numbers, numbers, st.none(), texts, st.binary(max_size=5), arrays, tensors, objects, results)
value = st.recursive(
    single,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(texts, st.none(), st.integers()), inner, max_size=3),
    ),
    max_leaves=5,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _interrupts():
    """Let SIGINT end the process, as in a reward process. Then only a reward function can raise KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_for_other_files():
    """Delete returned coroutines that nobody awaited, whose warning would otherwise fail a test of another file."""
    yield
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "answers.py"
    path.write_text(CODE)
    return str(path)


def answering(path: str, answer: Callable[[str], Any]) -> Config:
    """Return a config with one reward function, which computes `answer(response)`."""
    load_function(path).__globals__["ANSWERS"][:] = [answer]
    return config_of(path)


@functools.cache
def config_of(path: str) -> Config:
    return compose([f"reward.functions=['{path}']"])[0]


def finish(pool: RewardPool) -> list[SampleScores]:
    results: list[SampleScores] = []
    while pool.pending:
        results += asyncio.run(pool.poll())
    return results


def check_line(text: str, start: str) -> None:
    assert text.startswith(start), text
    assert not {*text} & {*"\n\r"}, text
    assert "Traceback (most" not in text, text
    assert len(text) < 1000, text


@pytest.mark.timeout(7200)
@given(drawn=value, form=st.sampled_from(FORMS))
@cases(0.08, 80)
@pytest.mark.filterwarnings("ignore")
def test_whatever_a_function_returns_is_a_number_or_a_failure_with_one_readable_line(file, drawn, form):
    config = answering(f"{file}:{form}", lambda response: made(drawn) if response == "odd" else float(response))
    responses = ["odd"] * 3 if form == "all_at_once" else ["1.5", "odd", "2.5"]
    with RewardPool.in_process(config.reward) as pool:
        pool.submit(RewardRequest((0, number), "p", response, {}) for number, response in enumerate(responses))
        found = {result.key: result for result in finish(pool)}
        assert sorted(found) == [(0, 0), (0, 1), (0, 2)]
        for (_, number), result in found.items():
            assert pickle.loads(pickle.dumps(result)) == result
            if result.failed:
                check_line(result.error, f"reward function '{form}' ")
            else:
                assert result.scores[0] is None or (
                    type(result.scores[0]) is float and abs(result.scores[0]) <= LARGEST
                )
            if responses[number] != "odd":
                assert result.scores == (float(responses[number]),)
        load_function(f"{file}:{form}").__globals__["ANSWERS"][:] = [lambda _: [1.0] if form == "all_at_once" else 1.0]
        pool.submit([RewardRequest((1, 0), "p", "r", {})])  # The pool must still work.
        assert finish(pool)[0].scores == (1.0,)


@pytest.mark.timeout(7200)
@given(drawn=st.one_of(value, tensors))
@cases(0.02, 20)
@pytest.mark.filterwarnings("ignore")
def test_whatever_an_aggregation_returns_is_a_number_a_row_or_an_error_of_one_line(file, drawn):
    path = f"{file}:aggregate"
    config = answering(path, lambda _: made(drawn))
    reward = dataclasses.replace(config.reward, aggregation=path)
    components = torch.tensor([[0.0], [1.0], [torch.nan]])
    uid, counted = torch.tensor([0, 0, 1]), torch.tensor([True, True, False])
    try:
        totals = combined_scores(components, uid, counted, reward)
    except RewardError as error:
        check_line(str(error).encode("utf-8", "backslashreplace").decode(), f"reward.aggregation={path} ")
    except KeyboardInterrupt:  # The driver treats a KeyboardInterrupt as the user's Ctrl-C.
        pass
    else:
        assert (totals.dtype, totals.shape) == (torch.float32, (3,))
        assert not bool(totals.isinf().any())
