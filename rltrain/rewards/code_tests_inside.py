"""Run a program and its tests in two processes inside one sandbox, connected by two pipes.

Only `rltrain.rewards.code_tests` uses `code_tests_inside`. The module `code_tests` joins the source text of
`code_tests_link` and `code_tests_inside` into one script, which the program's process and the tests' process both run.
"""

import ast
import builtins
import importlib
import os
import sys
from typing import Any

from rltrain.rewards.code_tests_link import Link

# In the tests, `math`, `cmath` and `unittest` always refer to Python's own modules, never to objects of the program.
_KEPT = ("math", "cmath", "unittest")


def serve_program(program: str, reads: int, writes: int) -> None:
    """Run the program, and then execute requests from the process that runs the tests.

    `serve_program` sends the names and values of the program's objects to the process that runs the tests. Then
    `serve_program` executes the requests from the process that runs the tests.
    """
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
    """Run the tests, which call functions of the tested program.

    For each test, write 1 (passed) or 0 (failed) to the original standard output as soon as the test has ended.
    """
    verdicts = os.dup(1)
    # Connect standard output to /dev/null, to discard what the tests print.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    link = Link(reads, writes, trusted="tests")
    module = sys.modules["tests"] = type(sys)("tests")
    vars(module).update(_offered(link.receive()))
    vars(module)["__builtins__"] = builtins
    for statement, is_test in statements(tests, entry_point):
        passed = _passes(statement, vars(module))
        if is_test:
            os.write(verdicts, b"1" if passed else b"0")
        elif not passed:
            # If a statement that sets up the tests fails, the later tests are not run, because their results would be
            # meaningless.
            os._exit(1)
    os._exit(0)


def _offered(message: Any) -> dict[str, Any]:
    """Return the objects of the tested program that the tests can use, such as functions, as a dict indexed by name.

    `_offered` leaves out objects whose name is that of a Python builtin or begins with `__`. Under a name in `_KEPT`,
    such as `math`, the tests get either Python's own module of that name or nothing.
    """
    match message:
        case dict(values), dict(modules) if {type(name) for name in (*values, *modules, *modules.values())} <= {str}:
            taken = {name for name in (*values, *modules) if name.startswith("__") or hasattr(builtins, name)}
        case _:
            os._exit(4)
    offered = {name: value for name, value in values.items() if name not in taken and name not in _KEPT}
    for name, full in modules.items():
        top = full.partition(".")[0]
        # If the program imported a module of the standard library, the tests can use that module under the same name. A
        # name in `_KEPT` can only mean the module of that name: after `import cmath as math`, the tests do not get
        # `cmath` as `math`.
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
    """Split tests into statements, and pair each statement with a flag that is True if the statement is a test.

    A test is a statement that contains an assert, or a call of a function that contains an assert. If no statement is a
    test, `statements` appends a call of each function that contains an assert and whose name begins with `test_`, and
    marks the appended calls as tests. If no statement is a test and no function named `test_...` contains an assert,
    each expression statement that is not a constant is a test.

    Raises:
        SyntaxError: `tests` is not valid Python code.
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
