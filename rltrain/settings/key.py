"""What the schema says about one config key: meaning, unit, bounds, and whether it may change on resume.

A section of the config is a dataclass made by `section`. Each of its fields is declared with `key`. The bounds are
checked when a section is created. `rltrain.settings.reference` writes the documentation from the same declarations.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from rltrain.settings.typed import require

T = TypeVar("T")
_KEY = "key"  # name of a field's declaration in the field's metadata


@dataclass(frozen=True, kw_only=True)
class Key:
    """Declaration of one config key.

    Attributes:
        meaning: one or two sentences about the effect of the key.
        unit: unit of the value; "" if the value has none, or if the meaning names it.
        values: description of the valid values; "" if type and bounds describe them.
        if_left_out: what applies if an entry of a list or mapping leaves the key out; "" if YAML holds the default.
        changeable: whether a resumed run may change the value. For a section, this applies to all its keys.
        at_least: smallest valid value.
        above: the valid values are greater than this number.
        at_most: largest valid value.
        below: the valid values are less than this number.
        refusal: template of the error message, with the fields `name`, `rule` and `value`.
        text: whether the command line takes the value as it is typed: no character of it has a meaning for Hydra.
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
        """Return whether the value is inside the bounds."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    @property
    def bounds(self) -> str:
        """The bounds as text, such as `>= 1` or `in [0, 1)`. Empty if there are none."""
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
    """Declare a field of a section. See `Key` for the arguments. The field has no default value."""
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
    """Make a class a section of the config: a frozen dataclass with keyword-only fields and checked bounds.

    Creating an instance first checks the bounds of all keys. Then it runs the class's own `__post_init__`, which holds
    the rules between keys.
    """
    rules = getattr(kind, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        _require_bounds(self)
        if rules is not None:
            rules(self)

    kind.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(kind)


def _require_bounds(values: Any) -> None:
    """Raise ConfigError if a value is outside the bounds of its key. None is inside."""
    hints = get_type_hints(type(values))
    for one in fields(values):
        declared, value = one.metadata[_KEY], getattr(values, one.name)
        if value is None or not declared.bounds:
            continue
        rule = declared.bounds + (" or null" if type(None) in get_args(hints[one.name]) else "")
        require(declared.allows(value), declared.refusal.format(name=one.name, rule=rule, value=value))


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A key in its place.

    Attributes:
        path: dotted name, such as `trainer.seed`. `[]` follows the name of a list, as in `reward.functions[].weight`.
        key: the declaration.
        hint: type of the value.
        section: class of the value if it is a section or a list of sections, else None.
        changeable: whether a resumed run may change the value, according to the key or a section around it.
    """

    path: str
    key: Key
    hint: Any
    section: type | None
    changeable: bool


def declared_keys(kind: type, prefix: str = "", *, changeable: bool = False) -> Iterator[Declared]:
    """Yield the keys of a section and of the sections inside it, in the schema's order. Sections precede their keys.

    Args:
        kind: class of the section.
        prefix: text before the names, such as `trainer.`.
        changeable: whether the whole section may change on resume.
    """
    hints = get_type_hints(kind)
    for one in fields(kind):
        hint, declared = hints[one.name], one.metadata[_KEY]
        inner, free, path = _section_in(hint), changeable or declared.changeable, prefix + one.name
        yield Declared(path=path, key=declared, hint=hint, section=inner, changeable=free)
        if inner is not None:
            yield from declared_keys(inner, f"{path}[]." if get_origin(hint) is list else f"{path}.", changeable=free)


def _section_in(hint: Any) -> type | None:
    """Return the section that a type consists of, or None if it is the type of a plain value."""
    return next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)


def text_keys(kind: type) -> frozenset[str]:
    """Return the keys whose values the command line takes as they are typed."""
    return frozenset(one.path for one in declared_keys(kind) if one.key.text)


def changeable_keys(kind: type) -> frozenset[str]:
    """Return the keys, and the sections as a whole, that a resumed run may change."""
    return frozenset(one.path for one in declared_keys(kind) if one.changeable)
