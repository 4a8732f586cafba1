"""Run a program and its tests in two processes inside one sandbox, connected by a link.

Only `rltrain.rewards.code_tests` uses this file. It runs the source of `code_tests_link` and of this file in both
processes.
"""

import ast
import builtins
import importlib
import os
import sys
from typing import Any

from rltrain.rewards.code_tests_link import Link

_KEPT = ("math", "cmath", "unittest")  # names that no program's own object takes: verdicts are made of them


def serve_program(program: str, reads: int, writes: int) -> None:
    """Run the program, offer its names to the tests, and do what they ask for."""
    link = Link(reads, writes)
    module = sys.modules["program"] = type(sys)("program")
    exec(compile(program, "program.py", "exec"), vars(module))
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    modules = {name: value.__name__ for name, value in names.items() if isinstance(value, type(sys))}
    link.send(({name: value for name, value in names.items() if name not in modules}, modules))
    while True:
        _, what, args, named = link.receive()
        link.serve(what, args, named)


def judge_program(tests: str, entry_point: str | None, reads: int, writes: int) -> None:
    """Run the tests on what the program offers; write a 1 or a 0 for each as soon as it is known."""
    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the tests print
    link = Link(reads, writes, trusted="tests")
    module = sys.modules["tests"] = type(sys)("tests")
    vars(module).update(_offered(link.receive()))
    vars(module)["__builtins__"] = builtins
    for statement, is_test in statements(tests, entry_point):
        passed = _passes(statement, vars(module))
        if is_test:
            os.write(verdicts, b"1" if passed else b"0")
        elif not passed:
            os._exit(1)  # what comes after it cannot be trusted to mean anything
    os._exit(0)


def _offered(message: Any) -> dict[str, Any]:
    """What the tests get of the names that the program offers: nothing that Python, or the tests' judge, has itself."""
    match message:
        case dict(values), dict(modules) if {type(name) for name in (*values, *modules, *modules.values())} <= {str}:
            taken = {name for name in (*values, *modules) if name.startswith("__") or hasattr(builtins, name)}
        case _:
            os._exit(4)
    offered = {name: value for name, value in values.items() if name not in taken and name not in _KEPT}
    for name, full in modules.items():
        top = full.partition(".")[0]
        # As in `import math` and `import numpy as np`: no other module in the place of one that verdicts are made of.
        if name not in taken and top in sys.stdlib_module_names and (name not in _KEPT or name == full):
            offered[name] = importlib.import_module(full)
    return offered


def _passes(statement: ast.stmt, names: dict[str, Any]) -> bool:
    try:
        exec(compile(ast.Module([statement], []), "tests.py", "exec"), names)
    except SystemExit as error:
        return not error.code
    except BaseException:
        return False
    return True


def statements(tests: str, entry_point: str | None = None) -> list[tuple[ast.stmt, bool]]:
    """Split tests into their statements, and say of each whether it is a test or prepares some.

    A test is a statement with an assert in it, or a call of a function with an assert in it. If there is neither: each
    call of the functions named test_..., which nobody need have written; and failing that, each expression.

    Raises:
        SyntaxError: this is no Python.
    """
    body = ast.parse(tests + (f"\ncheck({entry_point})\n" if entry_point else "")).body
    defined = {part.name for part in body if isinstance(part, ast.FunctionDef) and _asserts(part)}
    marked = [(part, _is_test(part, defined)) for part in body]
    if not any(is_test for _, is_test in marked):
        named = sorted(name for name in defined if name.startswith("test_"))
        marked += [(part, True) for part in ast.parse("".join(f"{name}()\n" for name in named)).body]
        if not named:
            marked = [(part, isinstance(part, ast.Expr) and not isinstance(part.value, ast.Constant)) for part in body]
    return marked


def _asserts(part: ast.stmt) -> bool:
    return any(isinstance(inner, ast.Assert) for inner in ast.walk(part))


def _is_test(part: ast.stmt, defined: set[str]) -> bool:
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    calls = isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and part.value.func
    return _asserts(part) or (isinstance(calls, ast.Name) and calls.id in defined)
