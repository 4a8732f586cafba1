"""Converts plain nested values into typed dataclasses.

The message of a conversion error names the config key whose value is wrong. For an unknown key, the error message names
the unknown key and the most similar known key.
"""

import dataclasses
import difflib
import functools
import sys
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rltrain.base.errors import ConfigError

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds.

    By convention, `message` names the wrong value, the violated rule and a way to fix the setting.
    """
    if not condition:
        raise ConfigError(message)


def parse(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Convert nested plain values into the dataclass `kind`.

    Args:
        kind: the dataclass of which an object is created.
        values: maps the names of the dataclass's fields to plain values.
        where: text, such as `trainer.`, that is put before the key names in error messages.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid. The error message names the config key and the
            violated rule. For an unknown key, the error message names the unknown key and the most similar known key.
    """
    hints = _hints(cast("Any", kind))
    for key in values:
        if key not in hints:
            raise unknown_key(where + str(key), [where + name for name in hints])
    missing = [where + name for name in hints if name not in values]
    require(not missing, f"{', '.join(missing)}: a value is required; write {missing[0] if missing else ''}=VALUE")
    fields = {name: _value(hint, values[name], where + name) for name, hint in hints.items()}
    try:
        return kind(**fields)
    # A ConfigError from the `__post_init__` of a config section names only the field, so the name of the section is
    # put before the name of the field.
    except ConfigError as error:
        raise ConfigError(where + str(error)) from None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


# Similarity, between 0 and 1, that a known key must have to an unknown key to be suggested in the error message.
_SIMILAR = 0.65


def unknown_key(key: str, known: list[str]) -> ConfigError:
    """Return the ConfigError for a key that does not exist.

    The error message names the most similar known key, unless no known key is similar enough to be what the user meant.
    """
    similarity, nearest = max(((_similarity(key, name), name) for name in known), default=(0.0, ""))
    hint = f"the nearest known key is '{nearest}'" if similarity >= _SIMILAR else "--cfg prints all keys"
    return ConfigError(f"unknown config key '{key}'; {hint}")


def _similarity(key: str, name: str) -> float:
    # `_similarity` compares the whole keys, and separately the last parts of the keys, because a user may write the
    # right key in a wrong section. The similarity of two keys is at least 0.9 times the similarity of their last parts.
    section, _, last = key.rpartition(".")
    known_section, _, known_last = name.rpartition(".")
    whole = difflib.SequenceMatcher(None, key, name).ratio()
    ends = difflib.SequenceMatcher(None, last, known_last).ratio()
    # If a user writes only the beginning of a long config key, SequenceMatcher's ratio alone would prefer an unrelated
    # short key. A known key that starts with the user's text always has a similarity of at least 0.9. A known key has a
    # similarity of at least 0.95 if two conditions hold: both keys are in the same section, and the last part of the
    # known key contains all words of the last part of the user's key. For example, if the user writes the unknown key
    # `trainer.steps`, `trainer.total_steps` gets a similarity of at least 0.95, so the error message suggests
    # `trainer.total_steps` rather than `trainer.reuse.steps`.
    contained = section == known_section and set(last.split("_")) <= set(known_last.split("_"))
    return max(whole, 0.9 * ends, 0.9 * name.startswith(key), 0.95 * contained)


def keys(kind: type, prefix: str = "") -> list[str]:
    """Return the dotted names of all leaf keys of the dataclass `kind`, including keys that can be None.

    A list counts as a leaf, even if the list's entries are dataclasses. A dataclass whose attribute `given_whole` is
    true counts as a leaf, because the user sets the dataclass as one mapping.
    """
    found: list[str] = []
    for name, hint in _hints(kind).items():
        kinds = () if get_origin(hint) is list else (hint, *get_args(hint))
        sections = (t for t in kinds if isinstance(t, type) and dataclasses.is_dataclass(t))
        inner = next((t for t in sections if not getattr(t, "given_whole", False)), None)
        found += keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return found


def _choice(hint: Any, value: Any, key: str, *, optional: bool = False) -> Any:
    """Return `value`, which must be one of the choices of the `Literal` type `hint`.

    If `optional` is True, the error of another value also names null as a choice.
    """
    choices = get_args(hint)
    names = ", ".join([*map(str, choices), *["null"] * optional])
    require(value in choices, f"{key}={value}: unknown choice; use one of {names}")
    return value


def _value(hint: Any, value: Any, key: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        optional = type(None) in args
        if value is None and optional:
            return None
        inner = next(arg for arg in args if arg is not type(None))
        if get_origin(inner) is Literal:
            return _choice(inner, value, key, optional=optional)
        return _value(inner, value, key)
    if origin is Literal:
        return _choice(hint, value, key)
    if origin is list:
        require(isinstance(value, list), _wrong_type(key, value, "a list"))
        return [_value(args[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        require(isinstance(value, dict), _wrong_type(key, value, "a mapping such as {}"))
        return dict(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        require(isinstance(value, Mapping), _wrong_type(key, value, "a mapping"))
        return parse(hint, value, f"{key}.")
    good = isinstance(value, (int, float) if hint is float else hint) and (hint is bool or not isinstance(value, bool))
    # An int is compared with the largest float without conversion to float, because the conversion of a very large int
    # would fail. NaN is refused, because every comparison with NaN is false.
    good = good and (hint is not float or abs(value) <= sys.float_info.max)
    good = good and (hint is not int or abs(value) <= LARGEST_INT)
    require(good, _wrong_type(key, value, _KINDS.get(hint, hint.__name__)))
    return float(value) if hint is float else value


LARGEST_INT = 2**63 - 1  # Largest number that an int64 tensor can hold.

_KINDS: dict[Any, str] = {
    int: "a whole number below 2^63",
    float: "a finite number",
    str: "text",
    bool: "true or false",
}


def _wrong_type(key: str, value: Any, wanted: str) -> str:
    number = "number" in wanted and isinstance(value, str)
    hint = ", without quotes" if number else ""
    return f"{key}={'null' if value is None else repr(value)}: must be {wanted}{hint}"
