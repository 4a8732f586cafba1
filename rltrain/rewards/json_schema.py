"""Reward for structured output: 1 if a response is JSON that is valid under a schema."""

import functools
import json
from collections.abc import Mapping
from typing import Any

_OPENING, _CLOSING = "```json", "```"
# If a value is nested at most _SHALLOW levels deep, a RecursionError means that the schema refers to itself endlessly.
_SHALLOW = 20


def json_schema(prompt: str, response: str, *, schema: Mapping[str, Any] | bool | str | None) -> float | None:
    """Validate the response, or its last closed code block that is fenced as ```json, against a JSON Schema.

    The opening fence and the closing fence of a code block must each be on a separate line. A response is invalid if it
    contains a constant that Python reads but JSON does not allow (NaN, Infinity), an integer of more than 4300 digits,
    or lists that are nested several hundred levels deep. If the schema uses the keyword `multipleOf`, a number that is
    too large for a float is invalid. The schema keyword `format` is treated as an annotation and is not checked.
    References to documents outside the schema are never fetched.

    Args:
        prompt: unused.
        response: the model's text.
        schema: the schema, or its JSON text, for example from a column of the data. A schema without the key `$schema`
            is read as JSON Schema draft 2020-12.

    Returns:
        1.0 if the response's JSON is valid under the schema, else 0.0; None if `schema` is None.

    Raises:
        ValueError: the schema is not JSON, is not a JSON Schema, refers to itself endlessly, or refers to a definition
            that the schema does not contain.
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
        raise ValueError(
            f"schema {text[:80]!r} refers to {error.ref!r}, which the schema does not contain; add that definition"
        ) from None
    except RecursionError:
        if _depth(value) <= _SHALLOW:
            raise ValueError(
                f"schema {text[:80]!r} contains an endless reference to itself; remove that reference"
            ) from None
        return 0.0
    except (ValueError, OverflowError):  # The schema keyword `multipleOf` causes OverflowError for a huge number.
        return 0.0


def _json_text(response: str) -> str:
    """Return the content of the last closed json block, or the whole response if no json block is closed.

    The function searches for json blocks line by line, which is safe because a JSON string cannot contain a line break.
    """
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
            # A new json block begins although the previous block was never closed; the previous block is ignored.
            opened = []
        else:
            opened.append(line)
    return response if block is None else block


def _depth(value: Any) -> int:
    """Return how deeply lists and objects are nested in a value; a number or text has depth 0."""
    depth, level = 0, [value]
    while level := [inner for one in level for inner in _members(one)]:
        depth += 1
    return depth


def _members(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not allowed in JSON")


@functools.lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    """Check the schema in `text`, and return a validator for the schema; validators are cached."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY

    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"schema {text[:80]!r} is not valid JSON: {error}; give a schema or its JSON text") from None
    if not isinstance(schema, dict | bool):
        raise ValueError(f"schema {text[:80]!r} is a {type(schema).__name__}; a JSON Schema is an object or a boolean")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        reason = " ".join(error.message.split())[:120]
        raise ValueError(f"schema {text[:80]!r} is not a valid JSON Schema: {reason}; correct the schema") from None
    # The validator gets a registry that holds only the standard meta-schemas, because the default registry of
    # jsonschema would fetch unknown references from the network.
    return kind(schema, registry=REGISTRY)
