"""Rewards for programs: the share of tests that a response's code passes, in a sandbox."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rltrain.rewards import code_tests_inside
from rltrain.rewards.sandbox import run
from rltrain.rewards.sandbox_inside import LINK

_OPENING = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^`\n]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")
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
) -> float:
    """Run the program in a response, and tests on it.

    Tests as text run in a process beside the program's, in the same sandbox; a function of the program that they call
    runs in the program's process, and only plain data comes back. So a program passes nothing by ending early, by what
    it prints or registers, by objects that are equal to everything, or by changing what assert, AssertionError,
    unittest or builtins mean: all that is in another process, which cannot be read from there. It does not see the
    tests either, apart from the arguments of calls that are made.

    What remains: a program can tell by its arguments that it is tested, and remember answers; helpers, modules' members
    and classes that the tests take from the program are the program's, comparisons of two of its own objects too.
    In the weak form of the sandbox nothing of this holds against a program that looks for it.

    What tests as text cannot do: `isinstance` and `except` with the program's own classes, and look below the first
    level of an argument for what the program changed in place by identity. Names of builtins stay Python's.

    Args:
        prompt: not looked at; every reward function gets it.
        response: its last block fenced as python is the program, or the last one without a language, or else the whole.
        tests: Python text of asserts, as in MBPP, or with functions that hold them, as in HumanEval; or pairs
            {"input": ..., "output": ...}: the program reads the one and must write the other and end with exit code 0.
            White space at the ends of lines, and empty lines at the end, do not count.
        timeout_s: wall-clock seconds for the program and all tests as text together, or for each pair.
        memory_mb: see `sandbox.run`.
        sandbox: "auto", "required" or "limits": the `level` of `sandbox.run`.
        all_or_nothing: 1 if every test passes, else 0.
        entry_point: the program's function that `check`, which tests of HumanEval define, is called with.

    Returns:
        Passed tests over all tests; those that were not reached in time did not pass.

    Raises:
        ValueError: there are no tests, or they cannot be read. It is not the response's fault.
        SandboxError: no sandbox of this level works here.
    """
    limits: dict[str, Any] = {"timeout_s": timeout_s, "memory_mb": memory_mb, "level": sandbox}
    program = extract_program(response)
    if isinstance(tests, str):
        share = _share_of_asserts(program, tests, entry_point, limits)
    else:
        share = _share_of_pairs(program, list(tests), all_or_nothing, limits)
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
    program: str, pairs: list[Mapping[str, str]], all_or_nothing: bool, limits: dict[str, Any]
) -> float:
    for pair in pairs:
        if not isinstance(pair, Mapping) or not {"input", "output"} <= pair.keys():
            raise ValueError(f"tests: {str(pair)[:60]!r} is no pair; give {{'input': text, 'output': text}}")
    if not pairs:
        raise ValueError("tests: there are none; give at least one pair or an assert")
    passed = 0
    for pair in pairs:
        result = run(program, stdin=str(pair["input"]), **limits)
        right = result.status == "ok" and _without_edges(result.stdout) == _without_edges(str(pair["output"]))
        passed += right
        if all_or_nothing and not right:
            break
    return passed / len(pairs)


def _without_edges(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


@cache
def _inside() -> str:
    return Path(code_tests_inside.__file__).read_text(encoding="utf-8")
