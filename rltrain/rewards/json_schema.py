"""1 where a response is JSON of the form that a schema describes."""

import functools
import json
from collections.abc import Mapping
from typing import Any

_OPENING, _CLOSING = "```json", "```"
_SHALLOW = 20  # lists in lists that any schema that ends can be followed through


def json_schema(prompt: str, response: str, *, schema: Mapping[str, Any] | bool | str | None) -> float | None:
    """Check the response, or its last closed block fenced as ```json, against a JSON Schema.

    Each fence is a line of its own. What Python reads but JSON does not know (NaN, Infinity) is not valid, nor are
    whole numbers of more than 4300 digits, lists nested some hundred deep or, under `multipleOf`, numbers beyond a
    float's range. `format` in a schema is an annotation and checks nothing. References outside the schema are never
    fetched.

    Args:
        prompt: not looked at.
        response: the model's text.
        schema: the schema, or its JSON text, as a column of the data may hold it; without `$schema`, draft 2020-12.

    Returns:
        1.0 if valid, else 0.0; None without a schema.

    Raises:
        ValueError: the schema is no JSON, no JSON Schema, or refers to itself without end or to what it does not hold.
    """
    if schema is None:
        return None
    from referencing.exceptions import Unresolvable

    text = schema if isinstance(schema, str) else json.dumps(schema)
    validator = _validator(text)
    try:
        value = json.loads(_json_text(response), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    try:
        return float(validator.is_valid(value))
    except Unresolvable as error:
        raise ValueError(f"schema {text[:80]!r} refers to {error.ref!r}, which it does not hold; put it in") from None
    except RecursionError:
        if _depth(value) <= _SHALLOW:
            raise ValueError(f"schema {text[:80]!r} refers to itself without end; correct it") from None
        return 0.0
    except (ValueError, OverflowError):  # OverflowError: multipleOf of a number beyond a float's range
        return 0.0


def _json_text(response: str) -> str:
    """Return the last closed json block, else the whole response. Line by line: a JSON string holds no line end."""
    block: str | None = None
    opened: list[str] | None = None
    if _OPENING not in response.lower():
        return response
    for line in response.split("\n"):
        mark = line.strip().lower()
        if opened is None:
            opened = [] if mark == _OPENING else None
        elif mark == _CLOSING:
            block, opened = "\n".join(opened), None
        elif mark == _OPENING:
            opened = []  # the one before was never closed
        else:
            opened.append(line)
    return response if block is None else block


def _depth(value: Any) -> int:
    """How deep lists and objects lie in each other; 0 for a number."""
    depth, level = 0, [value]
    while level := [inner for one in level for inner in _members(one)]:
        depth += 1
    return depth


def _members(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


@functools.lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    """Check a schema once and build what validates with it."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY

    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"schema {text[:80]!r} is no JSON: {error}; give a schema or its JSON text") from None
    if not isinstance(schema, dict | bool):
        raise ValueError(f"schema {text[:80]!r} is a {type(schema).__name__}; a JSON Schema is an object or a boolean")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        reason = " ".join(error.message.split())[:120]
        raise ValueError(f"schema {text[:80]!r} is no JSON Schema: {reason}; correct it") from None
    return kind(schema, registry=REGISTRY)  # its own registry would fetch references from the network
