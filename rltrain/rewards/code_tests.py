"""Reward for programs: run the code of a response in a sandbox and return the share of tests that the code passes."""

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
# The tests may use three quarters of `reward_timeout_s`. A quarter of `reward_timeout_s` is reserved for starting and
# ending the processes of the sandbox.
_OF_A_CALL = 0.75
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
    """Run the program in a response, and return the share of tests that the program passes.

    If `tests` is Python text, the tests and the tested program run in two processes of the same sandbox. When a test
    calls a function of the program, the function runs in the program's process, which sends back only plain data and
    references to the program's objects. The tested program can neither read nor change the memory of the process that
    runs the tests. A program cannot pass a test by exiting early, printing output, registering hooks, returning objects
    that are equal to everything, or redefining `assert`, `AssertionError`, `unittest` or `builtins`. The tested program
    sees nothing of the tests except the arguments with which the tests call the program's functions.

    Known weaknesses: A program can detect from the arguments of its functions that it is being tested, and can return
    memorized answers. The program can change the behaviour of every function and class that the tests get from the
    program. The program can even replace imported functions, such as `gcd` in `from math import gcd`. When a test
    compares two objects that both come from the tested program, the program controls the result of the comparison. If
    `sandbox` is "limits", or is "auto" on a machine where isolation does not work, the program is not isolated and can
    attack the tests through the operating system.

    Tests given as text cannot use `isinstance` or `except` with the program's own classes. Tests given as text cannot
    use arithmetic or `<` between one of the program's objects and plain data, as in `Vector(1, 2) * 3`. The tests can
    apply arithmetic and `<` to two objects that both come from the tested program. If `thing` is an object of the
    program, the expression `x in thing` in a test iterates over `thing` instead of calling the method `__contains__` of
    `thing`. If a function of the program changes an argument in place, the test sees the change in the object that it
    passed. But a list inside such an argument is replaced by a changed copy: if the test runs `row = table[0]`, and the
    program then changes the list `table[0]` in place, the test sees the change in `table`, but not in `row`. In the
    tests, the names of Python's builtins, `math`, `cmath` and `unittest` always refer to Python's own objects, even if
    the program redefines these names.

    Args:
        prompt: the prompt, which is not used.
        response: the model's text. The program is the last code block that is fenced as python, or else the last block
            without a language, or else the whole response.
        tests: the tests, as Python text or as a list of test pairs. Tests given as Python text contain asserts, as in
            MBPP, or functions that contain asserts, as in HumanEval. A test pair is {"input": ..., "output": ...}. The
            program reads the input of a test pair from standard input. To pass, the program must write the expected
            output to standard output, and must exit with code 0. When the program's output is compared with the
            expected output, white space at the ends of lines and empty lines at the end are ignored.
        timeout_s: limit on the wall-clock seconds of all tests together, without the start-up time of the interpreters.
            When `timeout_s` is used up, tests that have already passed still count as passed.
        memory_mb: limit on the program's memory in MB, as in `sandbox.run`.
        sandbox: form of the sandbox, "auto", "required" or "limits", with the same meaning as `level` in `sandbox.run`.
        all_or_nothing: if True, the score is 1 if every test passes, else 0.
        entry_point: name of the function that HumanEval tests test. HumanEval tests define a function `check`, which
            gets the program's function `entry_point` as its argument.
        reward_timeout_s: the config value `reward.timeout_s`, passed automatically; the tests may use at most 3/4 of
            `reward_timeout_s`.

    Returns:
        The number of passed tests divided by the number of all tests, unless `all_or_nothing` is set. Tests that have
        not run when the time limit is reached count as failed.

    Raises:
        ValueError: the data is wrong, because there are no tests or the tests cannot be parsed.
        SandboxError: no sandbox of the requested level works on the local machine, or starting one sandbox for each
            pair of input and expected output takes too long.
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
    """Return the program in a response: the last code block that is fenced as python.

    If no code block is fenced as python, return the last code block without a language tag. If every code block has a
    language tag other than python, or if there is no code block, return the whole response. A code block that is never
    closed extends to the end of the response.
    """
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
        raise ValueError(f"tests: {error}; the tests must be Python text") from None
    if not total:
        raise ValueError(f"tests: {tests[:60]!r} contains neither an assert nor a call; add an assert")
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
            raise ValueError(f"tests: {str(pair)[:60]!r} is not a test pair; give {{'input': text, 'output': text}}")
    if not pairs:
        raise ValueError("tests: the list is empty; give at least one test pair, or Python text with an assert")
    passed, begin, left = 0, time.monotonic(), limits["timeout_s"]
    for done, pair in enumerate(pairs):
        if left <= 0:
            break
        in_time = end - time.monotonic()
        used = limits["timeout_s"] - left
        # If most of the time went into starting Python, the program did not cause the timeout, so the program must not
        # get the score 0. The SandboxError marks the sample as failed and leaves the sample without a score.
        if in_time <= 0 and used < (time.monotonic() - begin) / 2:
            raise SandboxError(
                f"sandbox: {done} of {len(pairs)} test pairs were run in time, and most of the time went into starting "
                "Python; set a larger reward.timeout_s, or give fewer test pairs"
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
    """Return the sources of the modules `code_tests_*` as one text, because the sandbox cannot import rltrain."""
    link, inside = (Path(str(module.__file__)).read_text("utf-8") for module in (code_tests_link, code_tests_inside))
    return link + "".join(line for line in inside.splitlines(True) if not line.startswith("from rltrain."))
