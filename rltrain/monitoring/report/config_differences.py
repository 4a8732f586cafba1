"""Compares the config of a run with the presets chosen by its command, and compares the configs of several runs.

A run records its command and the config of its presets in the file `command.json`, because a later version of rltrain
may contain other values for the same presets.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltrain.base.secret_values import redacted

COMMAND = "command.json"
# The output and checkpoint folders are not compared with the presets, because every run has its own folders.
_OF_A_PLACE = {"trainer.output_dir", "trainer.checkpoint_dir"}


@dataclass(frozen=True)
class Command:
    """The command line that started a run, and the presets that the command line chose.

    Attributes:
        arguments: arguments of the command line.
        presets: the command-line arguments that choose a file of a config group, such as `algorithm=dapo`.
        values: the config that results from the presets alone, as nested values; {} if the config of the presets is
            unknown.
    """

    arguments: list[str]
    presets: list[str]
    values: dict[str, Any] = field(default_factory=dict)


def write_command(command: Command, output_dir: Path) -> None:
    """Write the file `command.json` of a run, without secrets."""
    values = {
        "arguments": [redacted(one) for one in command.arguments],
        "presets": [redacted(one) for one in command.presets],
        "values": command.values,
    }
    (output_dir / COMMAND).write_text(redacted(json.dumps(values, default=str)) + "\n", "utf-8", "replace")


def read_command(text: str) -> Command:
    """Parse the content of a run's file `command.json`.

    Raises:
        ValueError: the text does not have the form that `write_command` writes.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("values"), dict):
        raise ValueError("the file must be a JSON object whose key 'values' holds an object")
    lists = [found.get(name) for name in ("arguments", "presets")]
    if not all(isinstance(one, list) and all(isinstance(word, str) for word in one) for one in lists):
        raise ValueError("the keys 'arguments' and 'presets' of the file must each hold a list of strings")
    return Command(found["arguments"], found["presets"], found["values"])


def differences(config: Mapping[str, Any], presets: Mapping[str, Any]) -> list[tuple[str, str | None, str | None]]:
    """Return (key, preset value, run value) for each config key whose value differs between a run and its presets.

    The preset value and the run value are JSON text. The preset value is None if the presets lack the key, and the run
    value is None if the run's config lacks the key.
    """
    own, theirs = flat(config), flat(presets)
    keys = sorted((own.keys() | theirs.keys()) - _OF_A_PLACE)
    return [(key, theirs.get(key), own.get(key)) for key in keys if theirs.get(key) != own.get(key)]


def between(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Return the config keys whose values differ between runs, each with the value of every run as JSON text."""
    values = [flat(config) for config in configs]
    keys = sorted({key for one in values for key in one}) if len(configs) > 1 else []
    rows = [(key, [one.get(key) for one in values]) for key in keys]
    return [(key, row) for key, row in rows if len(set(row)) > 1]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Convert nested config values to a flat mapping from dotted keys to values as JSON text, without secrets.

    A list in the config counts as one value, so the elements of a list have no dotted keys.
    """
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = redacted(json.dumps(value, default=str, ensure_ascii=False))
    return found
