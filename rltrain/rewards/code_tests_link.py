"""Let two processes use each other's objects even if one process is hostile; see `code_tests_inside`.

If a process sends an object of a plain-data type, such as a number, a string or a list, through a `Link`, the receiving
process gets a copy. An object that is not plain data stays in the process that created it, and the receiving process
gets a `Far` proxy for the object. Whatever the program's process sends, the process that runs the tests can only
receive plain data and `Far` objects. The process that runs the tests never holds an object whose `==` the program
defines. Unpickling a message never calls a function that the message names, and never changes an existing object.
"""

import builtins
import importlib
import io
import operator
import os
import pickle
import sys
from typing import Any

_BASIC = frozenset(
    {type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset}
)  # Types whose objects can be pickled without naming a class or function in the pickle.
# `_VALUES` maps each plain-data type outside `_BASIC` to the names of its attributes, in the order of the constructor's
# arguments. If a type is also a key of `_PARTS`, its value in `_VALUES` is an empty string, because `_PARTS` gives the
# constructor's arguments.
_VALUES = {
    "builtins.complex": "real imag",
    "builtins.range": "start stop step",
    "builtins.slice": "start stop step",
    "collections.Counter": "",
    "collections.OrderedDict": "",
    "collections.defaultdict": "",
    "collections.deque": "",
    "datetime.date": "year month day",
    "datetime.datetime": "year month day hour minute second microsecond tzinfo",
    "datetime.time": "hour minute second microsecond tzinfo",
    "datetime.timedelta": "days seconds microseconds",
    "datetime.timezone": "",
    "decimal.Decimal": "",
    "fractions.Fraction": "numerator denominator",
}
# `_PARTS` maps a plain-data type to a function that returns the constructor arguments with which a given object can be
# rebuilt.
_PARTS: dict[str, Any] = {
    "collections.Counter": lambda counts: (dict(dict.items(counts)),),
    "collections.OrderedDict": lambda table: (dict(table.items()),),
    "collections.defaultdict": lambda table: (table.default_factory, dict(dict.items(table))),
    "collections.deque": lambda row: ([*row], row.maxlen),
    "datetime.timezone": lambda zone: zone.__getinitargs__(),
    "decimal.Decimal": lambda number: (str(number),),
}
# `_BASES` maps each base type to a function that converts an object of a subclass to the base type, without calling
# methods of the subclass.
_BASES: dict[type, Any] = {
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
# Binary operators that a test must not apply if one operand is an object of the tested program and the other operand is
# plain data, such as a number. If a test could, for example, add a number to an object that the tested program defines,
# the tested program could return any sum that the test expects.
_BETWEEN_TWO = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lt",
    "le",
    "gt",
    "ge",
)
_OF_ONE = ("neg", "pos", "abs", "getitem", "setitem", "delitem")
_BY_PYTHON = (iter, next, len, str, repr)
_DOES = {
    "call": lambda function, *args, **named: function(*args, **named),
    "get": getattr,
    "set": setattr,
    "module": lambda name: sys.modules[name],
    **{function.__name__: function for function in _BY_PYTHON},
    **{name: getattr(operator, name) for name in ("eq", *_BETWEEN_TWO, *_OF_ONE)},
}
_FOR_THE_PROGRAM = ("call", "get", "set", "iter", "next", "len", "getitem")


class Raised(Exception):
    """Stands for an exception that the process at the other end of a `Link` raised.

    An exception of a built-in Python type is raised again as the same type, without `Raised`, if the type's constructor
    accepts a single text.
    """


class Far:
    """Proxy for an object that exists in the process at the other end of a `Link`.

    The operator `==` always gives False between a `Far` proxy and an object that is not a `Far` proxy. Two different
    `Far` proxies are equal if the process at the other end of the `Link` reports that the objects behind the proxies
    are equal.
    """

    def __init__(self, link: "Link", number: int) -> None:
        vars(self).update(_link=link, _number=number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the object that this `Far` proxy represents, in the process that holds the object."""
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


def _forwarded(name: str) -> Any:
    def forward(self: Far, *args: Any) -> Any:
        if name in _BETWEEN_TWO and not all(isinstance(arg, Far) for arg in args):
            return NotImplemented
        return self._link.ask(name, self, *args)

    return forward


for _name in (*_BETWEEN_TWO, *_OF_ONE, *(function.__name__ for function in _BY_PYTHON)):
    setattr(Far, f"__{_name.strip('_')}__", _forwarded(_name))


class Link:
    """One end of the two-pipe connection between the program's process and the tests' process.

    While `Link.ask` waits for the answer to a request, it executes requests from the process at the other end.
    """

    def __init__(self, reads: int, writes: int, *, trusted: str | None = None) -> None:
        """Create a link from two file descriptors: one pipe end to read from and one pipe end to write to.

        If `trusted` names a module, the process at the other end of the link may send only the requests in
        `_FOR_THE_PROGRAM`. If `trusted` names a module, the process at the other end of the link may access attributes
        only of objects whose class is defined in that module.
        """
        self._reads, self._writes, self._trusted = reads, writes, trusted
        self._mine: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._far: dict[int, Far] = {}

    def ask(self, what: str, *args: Any, **named: Any) -> Any:
        """Send a request to the process at the other end of the link, and return the result of the request.

        If the process at the other end of the link fails to execute a request, `ask` raises an exception that describes
        the failure.
        """
        self.send(("ask", what, args, named))
        while True:
            match self.receive():
                case "ask", asked, tuple(given), dict(others):
                    self.serve(asked, given, others)
                case "raised", str(kind), str(text):
                    raise _exception(kind, text)
                case "answer", result, tuple(after):
                    for old, new in zip(args, after, strict=False):
                        _renew(old, new)
                    return result
                case _:
                    os._exit(4)

    def serve(self, what: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Execute a request from the process at the other end of the link, and send back the result or exception."""
        try:
            if self._trusted is not None:
                self._check(what, args)
            result = _DOES[what](*args, **named)
            self.send(("answer", result, args if any(type(arg) in _RENEWED for arg in args) else ()))
        except BaseException as error:
            self.send(("raised", type(error).__name__, str(error)))

    def _check(self, what: str, args: tuple[Any, ...]) -> None:
        if what not in _FOR_THE_PROGRAM:
            raise PermissionError(f"a program may not send the request '{what}'")
        if what not in ("get", "set"):
            return
        owner, name = type(args[0]), args[1]
        if owner.__module__ != self._trusted or type(name) is not str or name.startswith("_"):
            raise AttributeError(name)
        if what == "set" and callable(getattr(owner, name, None)):
            raise AttributeError(f"a program may not replace the method '{name}'")

    def send(self, message: object) -> None:
        """Write a message to the link's pipe: first the length as 8 bytes, then the pickled message."""
        buffer = io.BytesIO()
        _Out(buffer, self).dump(message)
        data = buffer.getvalue()
        left = memoryview(len(data).to_bytes(8, "little") + data)
        while left:
            left = left[os.write(self._writes, left) :]

    def receive(self) -> Any:
        """Read and unpickle one message from the link's pipe.

        If the process at the other end of the link has ended or the message is invalid, exit the current process, so
        that no further test can pass.
        """
        size = int.from_bytes(self._read(8), "little")
        if size > _LONGEST:
            os._exit(4)
        try:
            return _In(io.BytesIO(self._read(size))).built(self)
        except Exception:
            os._exit(4)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (more := os.read(self._reads, min(size - len(data), 1 << 20))):
                os._exit(4)
            data += more
        return bytes(data)

    def number(self, thing: object) -> int:
        """Store the object `thing`, and return the number by which the process at the other end refers to `thing`."""
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._mine)
            self._mine.append(thing)
        return self._numbers[id(thing)]

    def far(self, number: int) -> Far:
        """Return the `Far` proxy for the object that has the number `number` at the other end of the link."""
        return self._far.setdefault(number, Far(self, number))

    def mine(self, number: int) -> Any:
        """Return the object of the current process to which the method `Link.number` assigned the given number."""
        return self._mine[range(len(self._mine))[number]]


class _Out(pickle.Pickler):
    """Pickler that replaces each object of a type outside `_BASIC` with a description that uses only `_BASIC` types."""

    def __init__(self, file: io.BytesIO, link: Link) -> None:
        super().__init__(file, protocol=5)
        self._link = link

    def persistent_id(self, thing: Any) -> tuple[Any, ...] | None:
        kind = type(thing)
        if kind in _BASIC:
            return None
        if kind is Far:
            return "mine", vars(thing)["_number"]
        if isinstance(thing, type):
            name = f"{thing.__module__}.{thing.__qualname__}"
            return ("type", name) if _plain_type(name) is thing else ("far", self._link.number(thing))
        name = f"{kind.__module__}.{kind.__qualname__}"
        if _plain_type(name) is kind and (parts := _parts(name, thing)) is not None:
            return "value", name, parts
        for base, plain in _BASES.items():
            if isinstance(thing, base):
                return "basic", plain(thing)
        return "far", self._link.number(thing)


class _Described:
    """Placeholder that holds the description of an object while the message with the object is unpickled.

    After a message is unpickled, `_built` replaces each `_Described` instance with the object that the instance
    describes. `_Described` has no `__dict__`, so a message cannot add attributes to an instance.
    """

    __slots__ = ("words",)

    def __init__(self, words: Any) -> None:
        self.words = words


class _In(pickle.Unpickler):
    """Unpickler for messages that a hostile process may have sent.

    A pickle that names a class or function is refused, so reading a message neither calls a function nor changes an
    existing object. After a message is unpickled, `_built` replaces each `_Described` object in the message with the
    object that it describes.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._described = False

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}: a message may not name a class or function")

    def persistent_load(self, words: Any) -> Any:
        self._described = True
        return _Described(words)

    def built(self, link: Link) -> Any:
        message = self.load()
        return _built(message, link, {}) if self._described else message


def _built(thing: Any, link: Link, done: dict[int, tuple[Any, Any]]) -> Any:
    """Return `thing` after replacing each `_Described` object inside `thing` by the object that is described.

    `done` maps the id of each object visited so far to a pair: the object and its replacement. The lookup in `done`
    ensures that each object is converted only once, even if several objects contain the object or references form a
    cycle. `done` holds each visited object itself so that the object is not deleted. If an object whose id is a key of
    `done` were deleted, Python could give the id to a new object, and the lookup of the new object in `done` would
    return a wrong replacement.
    """
    kind = type(thing)
    if kind not in (list, dict, set, tuple, frozenset, _Described):
        return thing
    if id(thing) in done:
        return done[id(thing)][1]
    if kind in (list, dict, set):
        done[id(thing)] = (thing, thing)
    if kind is _Described:
        result = _made(link, *_built(thing.words, link, done))
    elif kind is dict:
        result, items = thing, [(_built(key, link, done), _built(value, link, done)) for key, value in thing.items()]
        thing.clear()
        thing.update(items)
    else:
        members = [_built(member, link, done) for member in thing]
        result = members if kind is list else kind(members)
        if kind in (list, set):
            thing.clear()
            (thing.extend if kind is list else thing.update)(members)
            result = thing
    done[id(thing)] = (thing, result)
    return result


def _made(link: Link, what: str, *words: Any) -> Any:
    match what, *words:
        case "far" | "mine", int(number):
            return getattr(link, what)(number)
        case "type", str(name):
            found = _plain_type(name)
        case "basic", basic if type(basic) in _BASIC:
            return basic
        case "value", str(name), tuple(parts) if name in _VALUES and _fit(name, parts):
            kind: Any = _plain_type(name)
            return kind(*parts)
        case _:
            found = None
    if found is None:
        raise pickle.UnpicklingError("the description of an object is not valid")
    return found


def _parts(name: str, thing: Any) -> tuple[Any, ...] | None:
    """Return the constructor arguments that build a copy of `thing`, or None if an argument is not plain data."""
    parts = _PARTS[name](thing) if name in _PARTS else tuple(getattr(thing, part) for part in _VALUES[name].split())
    return parts if _fit(name, parts) else None


def _fit(name: str, parts: tuple[Any, ...]) -> bool:
    """Return whether the values in `parts` have the types that the constructor of the type called `name` takes."""
    kinds = [type(part) for part in parts]
    if name in ("collections.Counter", "collections.OrderedDict"):
        return kinds == [dict]
    if name == "collections.deque":
        return kinds in ([list, int], [list, type(None)])
    if name == "collections.defaultdict":
        return len(kinds) == 2 and kinds[1] is dict
    times = ("datetime.timedelta", "datetime.timezone")
    return all(kind in (int, float, str, type(None)) or f"{kind.__module__}.{kind.__name__}" in times for kind in kinds)


def _plain_type(name: str) -> type | None:
    """Return the plain-data type or the built-in exception called `name`, or None if neither exists."""
    module, _, own = name.rpartition(".")
    if name in _VALUES:
        value: type = getattr(importlib.import_module(module), own)
        return value
    found = getattr(builtins, own, None) if module == "builtins" else None
    return found if found in _BASIC or _builtin_exception(own) is found else None


_LONGEST = 1 << 30
_RENEWED = (list, dict, set, bytearray)


def _renew(old: Any, new: Any) -> None:
    """Overwrite `old` with the content of `new`, a copy of `old` that the process at the other end may have changed."""
    if type(old) is not type(new) or type(old) not in _RENEWED:
        return
    old.clear()
    old.extend(new) if isinstance(old, list | bytearray) else old.update(new)


def _exception(name: str, text: str) -> Exception:
    try:
        if (kind := _builtin_exception(str(name))) is not None:
            return kind(text)
    except TypeError:
        # A single text is not enough for the constructors of some exceptions, such as UnicodeDecodeError.
        pass
    return Raised(f"{name}: {text}")


def _builtin_exception(name: str) -> type[Exception] | None:
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None
