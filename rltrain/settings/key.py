"""Declares config keys: the meaning, unit and bounds of a key, and whether a resumed run may change the key's value.

Each section of the config is a dataclass with the decorator `section`. Each field of a config section is declared with
the function `key`. The bounds of the keys are checked when an instance of a section is created.
`rltrain.settings.reference` generates the documentation of the keys from their declarations.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from rltrain.settings.typed import require

T = TypeVar("T")
_KEY = "key"  # Name under which a dataclass field's metadata stores the declaration of the config key.


@dataclass(frozen=True, kw_only=True)
class Key:
    """Declaration of one config key.

    Attributes:
        meaning: sentences about the effect of the key, for the documentation.
        unit: unit of the key's value; "" if the value has no unit, or if `meaning` names the unit.
        values: description of the valid values; "" if the type and the bounds of the key describe the valid values
            completely.
        if_left_out: text that describes the default value of a key whose default no YAML file defines, such as a
            key of a list entry or of an optional mapping; "" if a YAML file defines the default.
        changeable: whether a resumed run may change the value. If the value of a changeable key is a section, a resumed
            run may change all keys of the section.
        at_least: smallest valid value; None if there is no inclusive lower bound.
        above: exclusive lower bound: valid values are greater than this number; None if there is no exclusive lower
            bound.
        at_most: largest valid value; None if there is no inclusive upper bound.
        below: exclusive upper bound: valid values are less than this number; None if there is no exclusive upper bound.
        refusal: template of the error message for a value outside the bounds, with the fields `name`, `rule` and
            `value`.
        text: whether the command line takes the value literally, instead of parsing it with Hydra's grammar.
    """

    meaning: str
    unit: str
    values: str
    if_left_out: str
    changeable: bool
    at_least: float | None
    above: float | None
    at_most: float | None
    below: float | None
    refusal: str
    text: bool

    def allows(self, value: float) -> bool:
        """Return whether a value is inside the bounds of the config key."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    @property
    def bounds(self) -> str:
        """The bounds of the key as text, such as `>= 1` or `in [0, 1)`; "" if the key has no bounds."""
        low = self.above if self.at_least is None else self.at_least
        high = self.below if self.at_most is None else self.at_most
        left, right = "[" if self.above is None else "(", "]" if self.below is None else ")"
        if low is not None and high is not None:
            return f"in {left}{low:g}, {high:g}{right}"
        if low is not None:
            return f"{'>=' if left == '[' else '>'} {low:g}"
        return f"{'<=' if right == ']' else '<'} {high:g}" if high is not None else ""


def key(
    meaning: str,
    *,
    unit: str = "",
    values: str = "",
    if_left_out: str = "",
    changeable: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    refusal: str = "{name} must be {rule}, got {value}",
    text: bool = False,
) -> Any:
    """Declare a field of a config section.

    The arguments of `key` have the same meaning as the attributes of `Key`. A dataclass field that is declared with the
    function `key` has no default value.
    """
    declared = Key(
        meaning=meaning,
        unit=unit,
        values=values,
        if_left_out=if_left_out,
        changeable=changeable,
        at_least=at_least,
        above=above,
        at_most=at_most,
        below=below,
        refusal=refusal,
        text=text,
    )
    return field(metadata={_KEY: declared})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(key,))
def section(kind: type[T]) -> type[T]:
    """Turn a class into a section of the config: a frozen dataclass with keyword-only fields whose bounds are checked.

    Creating an instance of a section first checks the bounds of all keys. After the check of the bounds, the section's
    own `__post_init__` checks the rules that involve several keys.
    """
    rules = getattr(kind, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        _require_bounds(self)
        if rules is not None:
            rules(self)

    kind.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(kind)


def _require_bounds(values: Any) -> None:
    """Raise ConfigError if a value in a section is outside the bounds of its key.

    The value None is accepted for every key, whatever the key's bounds are.
    """
    hints = get_type_hints(type(values))
    for one in fields(values):
        declared, value = one.metadata[_KEY], getattr(values, one.name)
        if value is None or not declared.bounds:
            continue
        rule = declared.bounds + (" or null" if type(None) in get_args(hints[one.name]) else "")
        require(declared.allows(value), declared.refusal.format(name=one.name, rule=rule, value=value))


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A config key with its full path and type.

    Attributes:
        path: dotted name of the key, such as `trainer.seed`. In a path, `[]` follows the name of a list, as in
            `reward.functions[].weight`.
        key: the declaration of the key.
        hint: type annotation of the value.
        section: class of the section if the value is a section or a list of sections; otherwise None.
        changeable: whether a resumed run may change the value, because the key or an enclosing section is declared as
            changeable.
    """

    path: str
    key: Key
    hint: Any
    section: type | None
    changeable: bool


def declared_keys(kind: type, prefix: str = "", *, changeable: bool = False) -> Iterator[Declared]:
    """Yield the keys of a section and of its nested sections, in the order of their declaration.

    The key of a nested section is yielded before the keys inside that section.

    Args:
        kind: class of the section.
        prefix: text that is put before the names of the keys, such as `trainer.`.
        changeable: whether a resumed run may change all keys of the section.
    """
    hints = get_type_hints(kind)
    for one in fields(kind):
        hint, declared = hints[one.name], one.metadata[_KEY]
        inner, free, path = _section_in(hint), changeable or declared.changeable, prefix + one.name
        yield Declared(path=path, key=declared, hint=hint, section=inner, changeable=free)
        if inner is not None:
            yield from declared_keys(inner, f"{path}[]." if get_origin(hint) is list else f"{path}.", changeable=free)


def _section_in(hint: Any) -> type | None:
    """Return the config section (a dataclass) that a type annotation contains, such as `S` in `list[S]`. Return None if
    the type annotation contains no config section.
    """
    return next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)


def text_keys(kind: type) -> frozenset[str]:
    """Return the paths of the keys whose values the command line takes literally, instead of parsing them with Hydra's
    grammar.
    """
    return frozenset(one.path for one in declared_keys(kind) if one.key.text)


def changeable_keys(kind: type) -> frozenset[str]:
    """Return the paths of the keys that a resumed run may change, and of the sections in which a resumed run may change
    all keys.
    """
    return frozenset(one.path for one in declared_keys(kind) if one.changeable)
