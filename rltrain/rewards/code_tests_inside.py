"""Program and tests in two processes inside one sandbox: objects of one can be used in the other.

Only for `rltrain.rewards.code_tests`, which runs the text of this file in both processes. Plain data crosses by value;
whatever else stays where it is, and the other process gets a `Far` in its place. What the tests' process receives can
only be plain data, whatever the program's process does: no object of the program, with an equality of its own, gets in.
"""

import ast
import builtins
import functools
import importlib
import io
import operator
import os
import pickle
import sys
from typing import Any

_VALUES = {
    "builtins": "bool bytearray bytes complex dict float frozenset int list range set slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
}
_BASES = {  # how to make plain data of a subclass of plain data, without asking the subclass
    int: int.__int__,
    float: float.__float__,
    str: lambda text: "".join((text,)),
    bytes: lambda text: bytes.__getitem__(text, slice(None)),
    tuple: lambda row: (*tuple.__iter__(row),),
    list: lambda row: [*list.__iter__(row)],
    dict: lambda table: dict(dict.items(table)),
    set: lambda members: {*set.__iter__(members)},
    frozenset: lambda members: frozenset(frozenset.__iter__(members)),
}
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and_ or_ xor neg pos abs getitem setitem delitem contains"
_COMPARED = ("eq", "lt", "le", "gt", "ge")
_DOES = {
    "call": lambda function, *args, **named: function(*args, **named),
    "get": getattr,
    "set": setattr,
    "module": lambda name: sys.modules[name],
    **{function.__name__: function for function in (iter, next, len, str, repr)},
    **{name: getattr(operator, name) for name in (*_ARITHMETIC.split(), *_COMPARED)},
}
_FOR_THE_PROGRAM = ("call", "get", "set", "iter", "next", "len", "getitem")


class Raised(Exception):
    """An exception of the other process that is none of Python's own."""


class Far:
    """An object of the other process. Equal to nothing here; two of them are as equal as the other process says."""

    def __init__(self, link: "Link", number: int) -> None:
        vars(self).update(_link=link, _number=number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call it over there."""
        return self._link.ask("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("set", self, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Far) and self._link.ask("eq", self, other) is True)

    def __hash__(self) -> int:
        return id(self)


def _forwarded(name: str, *, compared: bool = False) -> Any:
    def forward(self: Far, *args: Any) -> Any:
        if compared and not isinstance(args[0], Far):
            return NotImplemented
        return self._link.ask(name, self, *args)

    return forward


for _name in ("iter", "next", "len", "str", "repr", *_ARITHMETIC.split(), *_COMPARED[1:]):
    setattr(Far, f"__{_name.strip('_')}__", _forwarded(_name, compared=_name in _COMPARED))


class Link:
    """One end of the two pipes. Each request waits for its answer, and serves what the other end asks meanwhile."""

    def __init__(self, reads: int, writes: int, *, trusted: str | None = None) -> None:
        """Take the two descriptors; `trusted` names the module whose objects alone the other end may look into."""
        self._reads, self._writes, self._trusted = reads, writes, trusted
        self._mine: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._far: dict[int, Far] = {}

    def ask(self, what: str, *args: Any, **named: Any) -> Any:
        """Have the other process do something, and return what came of it, or raise what it raised."""
        self.send(("ask", what, args, named))
        while True:
            kind, *rest = self.receive()
            if kind == "ask":
                self.serve(*rest)
            elif kind == "raised":
                raise _exception(*rest)
            else:
                result, after = rest
                for old, new in zip(args, after, strict=False):
                    _renew(old, new)
                return result

    def serve(self, what: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Do what the other process asks for."""
        try:
            if self._trusted is not None:
                self._check(what, args)
            result = _DOES[what](*args, **named)
            self.send(("answer", result, args if any(type(arg) in _RENEWED for arg in args) else ()))
        except BaseException as error:
            self.send(("raised", type(error).__name__, str(error)))

    def _check(self, what: str, args: tuple[Any, ...]) -> None:
        if what not in _FOR_THE_PROGRAM:
            raise PermissionError(f"a program may not ask for '{what}'")
        if what in ("get", "set") and (type(args[0]).__module__ != self._trusted or str(args[1]).startswith("_")):
            raise AttributeError(args[1])

    def send(self, message: object) -> None:
        """Write a message with its length in front."""
        buffer = io.BytesIO()
        _Out(buffer, self).dump(message)
        data = buffer.getvalue()
        left = memoryview(len(data).to_bytes(8, "little") + data)
        while left:
            left = left[os.write(self._writes, left) :]

    def receive(self) -> Any:
        """Read one message. If the other process has gone, so does this one: nothing can be passed any more."""
        size = int.from_bytes(self._read(8), "little")
        if size > _LONGEST:
            os._exit(4)
        return _In(io.BytesIO(self._read(size)), self).load()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (more := os.read(self._reads, min(size - len(data), 1 << 20))):
                os._exit(4)
            data += more
        return bytes(data)

    def number(self, thing: object) -> int:
        """Remember an object that the other process will refer to."""
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._mine)
            self._mine.append(thing)
        return self._numbers[id(thing)]

    def far(self, number: int) -> Far:
        """Return what stands for the other process's object of this number."""
        return self._far.setdefault(number, Far(self, number))

    def mine(self, number: int) -> Any:
        """Return the object of this process that was given this number."""
        return self._mine[number]


class _Out(pickle.Pickler):
    def __init__(self, file: io.BytesIO, link: Link) -> None:
        super().__init__(file, protocol=5)
        self._link = link

    def reducer_override(self, thing: Any) -> Any:
        kind = type(thing)
        named = thing if isinstance(thing, type) else kind
        is_value = named.__name__ in _VALUES.get(named.__module__, "").split()
        is_exception = isinstance(thing, type) and thing is _builtin_exception(thing.__name__)
        if is_value or is_exception or thing is _far or thing is _mine:
            return NotImplemented  # pickled in the ordinary way
        if kind is Far:
            return _mine, (vars(thing)["_number"],)
        for base, plain in _BASES.items():
            if isinstance(thing, base):
                return base, (plain(thing),)
        return _far, (self._link.number(thing),)


class _In(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, link: Link) -> None:
        super().__init__(file)
        self._link = link

    def find_class(self, module: str, name: str) -> Any:
        if name in ("_far", "_mine"):
            return getattr(self._link, name[1:])
        if module == "builtins" and (exception := _builtin_exception(name)):
            return exception
        if name not in _VALUES.get(module, "").split():
            raise pickle.UnpicklingError(f"{module}.{name} is no plain data")
        found = getattr(importlib.import_module(module), name)
        # A hostile pickle can set attributes of what it names; those of builtins cannot be set.
        return found if module == "builtins" else functools.partial(found)


def _far(number: int) -> None:
    """Stand for `Link.far` in a message."""


def _mine(number: int) -> None:
    """Stand for `Link.mine` in a message."""


_LONGEST = 1 << 30
_RENEWED = (list, dict, set, bytearray)


def _renew(old: Any, new: Any) -> None:
    """Repeat on our side what the other process did to an argument."""
    if type(old) is not type(new) or type(old) not in _RENEWED:
        return
    old.clear()
    old.extend(new) if isinstance(old, list | bytearray) else old.update(new)


def _exception(name: str, text: str) -> Exception:
    try:
        if (kind := _builtin_exception(str(name))) is not None:
            return kind(text)
    except TypeError:  # UnicodeDecodeError wants more
        pass
    return Raised(f"{name}: {text}")


def _builtin_exception(name: str) -> type[Exception] | None:
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


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
    values, modules = link.receive()
    for name, value in values.items():
        if not hasattr(builtins, name):  # else a program could bring an `all` of its own
            setattr(module, name, value)
    for name, full in modules.items():
        if full.partition(".")[0] in sys.stdlib_module_names:
            setattr(module, name, importlib.import_module(full))
    for statement, is_test in statements(tests, entry_point):
        passed = _passes(statement, vars(module))
        if is_test:
            os.write(verdicts, b"1" if passed else b"0")
        elif not passed:
            os._exit(1)  # what comes after it cannot be trusted to mean anything
    os._exit(0)


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
