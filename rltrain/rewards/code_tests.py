"""Rewards for programs: the share of tests that a response's code passes, in a sandbox."""

import re
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rltrain.rewards import code_tests_inside, code_tests_link
from rltrain.rewards.sandbox import SandboxError, run
from rltrain.rewards.sandbox_inside import LINK

_OPENING = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^`\n]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_OF_A_CALL = 0.75  # of the seconds that a reward's call may take; the rest is for starting and ending processes
_CLOSING = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)


def code_tests(
    prompt: str,
    response: str,
    *,
    tests: str | Iterable[Mapping[str, str]],
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    sandbox: str = "auto",
    all_or_nothing: bool = False,
    entry_point: str | None = None,
    reward_timeout_s: float | None = None,
) -> float:
    """Run the program in a response, and tests on it.

    Tests as text run in a process beside the program's, in the same sandbox; a function of the program that they call
    runs in the program's process, and only plain data comes back. So a program passes nothing by ending early, by what
    it prints or registers, by objects that are equal to everything, or by changing what assert, AssertionError,
    unittest or builtins mean: all that is in another process, which cannot be read from there. It does not see the
    tests either, apart from the arguments of calls that are made.

    What remains: a program can tell by its arguments that it is tested, and remember answers; helpers, modules' members
    and classes that the tests take from the program are the program's, comparisons of two of its own objects too.
    In the weak form of the sandbox nothing of this holds against a program that looks for it outside of Python.

    What tests as text cannot do: `isinstance` and `except` with the program's own classes; arithmetic, `<` and `in`
    between the program's own objects and plain data, as in `Vector(1, 2) * 3` (between two of its objects is fine);
    and look below the first level of an argument for what the program changed in place by identity. Names of builtins
    stay Python's, and so do `math`, `cmath` and `unittest`.

    Args:
        prompt: not looked at; every reward function gets it.
        response: its last block fenced as python is the program, or the last one without a language, or else the whole.
        tests: Python text of asserts, as in MBPP, or with functions that hold them, as in HumanEval; or pairs
            {"input": ..., "output": ...}: the program reads the one and must write the other and end with exit code 0.
            White space at the ends of lines, and empty lines at the end, do not count.
        timeout_s: wall-clock seconds for all tests together, without those that interpreters take to start. When they
            are used up, what passed until then counts.
        memory_mb: see `sandbox.run`.
        sandbox: "auto", "required" or "limits": the `level` of `sandbox.run`.
        all_or_nothing: 1 if every test passes, else 0.
        entry_point: the program's function that `check`, which tests of HumanEval define, is called with.
        reward_timeout_s: the run's `reward.timeout_s`, which is filled in: `timeout_s` is at most 3/4 of it.

    Returns:
        Passed tests over all tests; those that were not reached in time did not pass.

    Raises:
        ValueError: there are no tests, or they cannot be read. It is not the response's fault.
        SandboxError: no sandbox of this level works here, or starting it for each pair takes too long.
    """
    most = float("inf") if reward_timeout_s is None else _OF_A_CALL * reward_timeout_s
    limits: dict[str, Any] = {"timeout_s": min(timeout_s, most), "memory_mb": memory_mb, "level": sandbox}
    program = extract_program(response)
    if isinstance(tests, str):
        share = _share_of_asserts(program, tests, entry_point, limits)
    else:
        share = _share_of_pairs(program, list(tests), all_or_nothing, limits, time.monotonic() + most)
    return float(share == 1.0) if all_or_nothing else share


def extract_program(response: str) -> str:
    """Return the last block fenced as python, else the last without a language, else all; an open block ends last."""
    blocks: dict[str, str] = {}
    place = 0
    while opening := _OPENING.search(response, place):
        closing = _CLOSING.search(response, opening.end())
        blocks["python" if opening[1].lower() in _PYTHON else opening[1]] = response[
            opening.end() : closing.start() if closing else len(response)
        ]
        place = closing.end() if closing else len(response)
    return blocks.get("python", blocks.get("", response))


def _share_of_asserts(program: str, tests: str, entry_point: str | None, limits: dict[str, Any]) -> float:
    try:
        total = sum(is_test for _, is_test in code_tests_inside.statements(tests, entry_point))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"tests: {error}; they must be Python text") from None
    if not total:
        raise ValueError(f"tests: {tests[:60]!r} holds no assert and no call; add one")
    both = _inside()
    result = run(
        f"{both}\nserve_program({program!r}, *{LINK})",
        judge=f"{both}\njudge_program({tests!r}, {entry_point!r}, *{LINK})",
        **limits,
    )
    return result.judged.count("1") / total


def _share_of_pairs(
    program: str, pairs: list[Mapping[str, str]], all_or_nothing: bool, limits: dict[str, Any], end: float
) -> float:
    for pair in pairs:
        if not isinstance(pair, Mapping) or not {"input", "output"} <= pair.keys():
            raise ValueError(f"tests: {str(pair)[:60]!r} is no pair; give {{'input': text, 'output': text}}")
    if not pairs:
        raise ValueError("tests: there are none; give at least one pair or an assert")
    passed, begin, left = 0, time.monotonic(), limits["timeout_s"]
    for done, pair in enumerate(pairs):
        if left <= 0:
            break
        in_time = end - time.monotonic()
        used = limits["timeout_s"] - left
        if in_time <= 0 and used < (time.monotonic() - begin) / 2:  # not the program's fault: no score
            raise SandboxError(
                f"sandbox: {done} of {len(pairs)} pairs of tests were run in time, and most of it went into starting "
                "Python; raise reward.timeout_s, or give fewer pairs"
            )
        if in_time <= 0:
            break
        result = run(program, stdin=str(pair["input"]), **{**limits, "timeout_s": min(left, in_time)})
        left -= result.seconds
        right = result.status == "ok" and _without_edges(result.stdout) == _without_edges(str(pair["output"]))
        passed += right
        if all_or_nothing and not right:
            break
    return passed / len(pairs)


def _without_edges(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


@cache
def _inside() -> str:
    """One text of both modules: in the sandbox there is no package to import from."""
    link, inside = (Path(str(module.__file__)).read_text("utf-8") for module in (code_tests_link, code_tests_inside))
    return link + "".join(line for line in inside.splitlines(True) if not line.startswith("from rltrain."))
