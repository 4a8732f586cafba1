"""Parses the user's settings: `GROUP=CHOICE` and `KEY=VALUE` on the command line, and the keys of a config file.

Hydra's grammar is used to parse the values on the command line. This module replaces Hydra's error messages, which have
several lines and refer to Hydra's own syntax, with one-line messages about rltrain's settings.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

from rltrain.base.errors import ConfigError, one_line
from rltrain.settings.config_groups import choices, group_names
from rltrain.settings.key import text_keys
from rltrain.settings.other_names import name_here
from rltrain.settings.sampling_config import DifficultyConfig, ReuseConfig
from rltrain.settings.schema import Config, LoRAConfig
from rltrain.settings.typed import keys, require, unknown_key

# Maps each config section that holds parameters of a loss or an estimator to the config key that selects the loss or
# the estimator. The config schema does not define the parameters of losses and estimators.
# `rltrain.settings.algorithm_rules` checks the names and values of the parameters of losses and estimators.
KNOBS = {"algorithm.advantage": "algorithm.advantage_estimator", "algorithm.loss": "algorithm.loss_mode"}
TEXT_KEYS = text_keys(Config)
# Keys whose values are lists of texts, in which `\n` stands for a line break. Hydra parses lists of texts, but does not
# convert `\n` to a line break.
LISTS_OF_TEXT = frozenset({"rollout.stop"})
_NEW_LINE = re.compile(r"\\?\\n")
# Config keys whose value is a mapping or null. If `model.lora` is null, for example, setting the key `model.lora.rank`
# creates the mapping `model.lora`.
OPTIONAL: Mapping[str, type] = {
    "model.lora": LoRAConfig,
    "data.difficulty": DifficultyConfig,
    "trainer.reuse": ReuseConfig,
}


@dataclass(frozen=True)
class Choice:
    """The user's choice of a YAML file in a config group, such as `algorithm=ppo`."""

    group: str
    choice: str


@dataclass(frozen=True)
class Setting:
    """A value that the user sets for one config key.

    If the user sets a key to a mapping, this mapping replaces the mapping that the chosen YAML file has under the same
    key. The user's mapping and the YAML file's mapping are not merged.

    Attributes:
        key: dotted name of the config key.
        value: the new value of the config key, which consists of plain Python types. A text value may contain
            references such as `${data.train}`.
    """

    key: str
    value: Any


@dataclass(frozen=True)
class Removal:
    """A setting such as `~algorithm.loss.clip_ratio_c`, with which the user removes a function parameter that the
    chosen YAML file sets.
    """

    key: str


Item = Choice | Setting | Removal


def sets_text(text: str) -> bool:
    """Return whether a word of the command line has the form KEY=VALUE and KEY is one of `TEXT_KEYS`."""
    key, equals, _ = text.lstrip("+").partition("=")
    return bool(equals) and key in TEXT_KEYS


def from_command_line(text: str) -> Item:
    """Parse one word of the command line, such as `algorithm=ppo` or `trainer.seed=1`.

    Hydra does not parse the values of the keys in `TEXT_KEYS`, which are free text and may contain any character. In
    free text, a backslash followed by `n` stands for a line break, and two backslashes followed by `n` stand for one
    backslash and `n`. For a free-text key, the value `null` means that there is no text. The value of a key in
    `LISTS_OF_TEXT` is a list of texts, which can contain the same two escape sequences as free text.

    Hydra requires a `+` before a key that is not in the YAML files, such as an optional function parameter. rltrain
    accepts `KEY=VALUE` without a `+` for all keys.

    Raises:
        ConfigError: `text` is not a valid setting.
    """
    if sets_text(text):
        text_key, _, value = text.lstrip("+").partition("=")
        return Setting(text_key, _as_typed(value))
    override = _parse_override(text)
    key = override.key_or_group
    if key.split(".")[0].split("/")[0] == "hydra":
        raise ConfigError(
            f"'{text}': Hydra's settings apply only to a sweep; leave the argument out, or add --multirun"
        )
    if override.is_sweep_override():
        raise ConfigError(
            f"'{text}': several values, but a run takes one; add --multirun to start one run for each value, or write "
            "a list as KEY=[A,B]"
        )
    is_group = key in group_names()
    if not is_group:
        _check_key(key, text)
    if override.is_delete():
        require(_is_knob(key), f"'{text}': a key can be set, not removed; write {key}=VALUE")
        return Removal(key)
    typed = override.value()
    if key in LISTS_OF_TEXT:
        typed = [_with_lines(one) for one in typed] if isinstance(typed, list) else _with_lines(typed)
    return _choice(key, typed) if is_group else _setting(key, typed, text.lstrip("+"))


def _as_typed(value: str) -> str | None:
    return None if value == "null" else str(_with_lines(value))


def _with_lines(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return _NEW_LINE.sub(lambda typed: "\n" if typed[0] == r"\n" else r"\n", value)


def from_file(path: str) -> list[Item]:
    """Read a config file of the user: a YAML file whose keys may be nested or dotted names.

    In a config file, the value of a config group is either the name of a choice, as in `algorithm: ppo`, or a mapping
    that sets keys of the group. A config file can list choices of config groups under `defaults`, in the same way as
    Hydra's own files. The file `config.yaml` in a run's output folder can also be used as a config file. If its
    `trainer.checkpoint_dir` is the default, the folder `checkpoints` in `trainer.output_dir`, then this setting is left
    out, so that a new run with another output folder does not use the checkpoints of the old run.

    Raises:
        ConfigError: the file cannot be read, or a setting in it is invalid. The message of the ConfigError is one line
            and names the config file.
    """
    where = f"--config {path}"
    values = _load(Path(path).expanduser(), where)
    found: list[Item] = []
    try:
        for group, choice in _defaults(values.pop("defaults", [])):
            require(
                group in group_names(), f"defaults: '{group}' is not a group; the groups are {_listed(group_names())}"
            )
            found.append(_choice(group, choice))
        for key, value in values.items():
            is_choice = key in group_names() and not isinstance(value, dict)
            found += [_choice(key, value)] if is_choice else _settings(str(key), value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    settings = {item.key: item for item in found if isinstance(item, Setting)}
    output, checkpoints = (settings.get(f"trainer.{name}") for name in ("output_dir", "checkpoint_dir"))
    if output and checkpoints and checkpoints.value == f"{output.value}/checkpoints":
        found.remove(checkpoints)
    return found


def _load(path: Path, where: str) -> dict[str, Any]:
    try:
        # OmegaConf's YAML loader reads the user's config file, because this loader accepts only plain values.
        values = get_yaml_loader()(path.read_text("utf-8")).get_single_data()
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such file; check the path (relative paths start at {Path.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror}); name a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:
        # The place of an error has no file name, because the text was read before it was parsed.
        found = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"{where}: not a valid YAML file ({one_line(found, 200)})") from None
    values = {} if values is None else values
    require(isinstance(values, dict), f"{where}: holds no mapping; write keys and values, such as trainer.seed: 1")
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _defaults(entries: Any) -> Iterator[tuple[str, Any]]:
    hint = "write defaults as a list of choices, such as [{algorithm: ppo}]"
    require(isinstance(entries, list), f"defaults={entries}: not a list; {hint}")
    for entry in entries:
        if entry != "_self_":
            require(isinstance(entry, dict) and len(entry) == 1, f"defaults: {entry!r} is not a choice; {hint}")
            yield next((str(group).removeprefix("override "), choice) for group, choice in entry.items())


def _settings(key: str, value: Any) -> list[Item]:
    """Convert one entry of a config file, given as key and value, to settings.

    If `key` names a section, the returned list has one setting for each key in the section.
    """
    inside = any(name.startswith(f"{key}.") for name in keys(Config))
    if not (inside and isinstance(value, dict)):
        text = f"{key}: {value}"
        # If a config file sets a section to null, the function `parse` checks later whether the schema allows null for
        # the section.
        if not (inside and value is None):
            _check_key(key, text)
        return [_setting(key, value, text)]
    return [item for name, inner in value.items() for item in _settings(f"{key}.{name}", inner)]


def _setting(key: str, value: Any, text: str) -> Setting:
    if key in KNOBS:
        require(isinstance(value, dict), f"'{text}': must be a mapping, as in {key}={{name:value}}")
    return Setting(key, value)


def _choice(group: str, choice: Any) -> Choice:
    known = choices(group)
    if choice not in known:
        near = difflib.get_close_matches(str(choice), known, n=1)
        hint = f"the nearest is '{near[0]}', and all choices" if near else "its choices"
        raise ConfigError(f"{group}={choice}: unknown choice; {hint} are {_listed(known)}")
    return Choice(group, choice)


def _parse_override(text: str) -> Override:
    require("=" in text or text.startswith("~"), f"'{text}': settings are written KEY=VALUE; see --help")
    key, _, value = text.partition("=")
    require(bool(key.strip("+~ ")), f"'{text}': no key before the '='; settings are written KEY=VALUE")
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError):  # Python raises ValueError when it parses a number with thousands of digits.
        hint = f"""quote special characters, as in '{key}="{value}"'"""
        if value.startswith(("[", "{")):
            hint = "close each bracket, and quote texts with special characters, as in [a,'b c'] or {a:1,b:'x y'}"
        raise ConfigError(f"'{text}': cannot read the value; {hint}") from None
    require(override.package is None, f"'{text}': '@' is not supported; write GROUP=CHOICE or KEY=VALUE")
    return override


def _is_knob(key: str) -> bool:
    return any(key.startswith(f"{section}.") for section in KNOBS)


def _check_key(key: str, text: str) -> None:
    known = keys(Config)
    if _is_knob(key) or key in known or key in _keys_of_optional():
        return
    if any(name.startswith(f"{key}.") for name in known):
        raise ConfigError(f"'{text}': '{key}' is a section; set its keys one at a time, as {key}.KEY=VALUE")
    if (name := name_here(key)) is not None:
        raise ConfigError(f"unknown config key '{key}'; rltrain's name for it is '{name.key}'{name.note}")
    raise unknown_key(key, sorted({*group_names(), *known, *_keys_of_optional()}))


def _keys_of_optional() -> list[str]:
    return [f"{path}.{name}" for path, kind in OPTIONAL.items() for name in keys(kind)]


def _listed(names: list[str]) -> str:
    return ", ".join(names)


def apply(items: list[Item], composed: Any) -> None:
    """Write settings into a composed config, in the order of `items`.

    Args:
        items: the settings and removals to apply. Choices of config groups are skipped, because the composed config
            already contains the chosen YAML files. Settings of keys with free text are skipped, because OmegaConf would
            resolve references in the text; `set_text` sets the keys with free text later.
        composed: the `DictConfig` to change.

    Raises:
        ConfigError: a key to set is in a section that is null in the chosen YAML files, or a parameter to remove does
            not exist.
    """
    OmegaConf.set_struct(composed, False)
    for item in items:
        if isinstance(item, Setting) and item.key not in TEXT_KEYS:
            _set(composed, item)
        elif isinstance(item, Removal):
            section, _, name = item.key.rpartition(".")
            knobs = OmegaConf.select(composed, section)
            require(name in knobs, f"the key '{item.key}' does not exist; see --help")
            del knobs[name]


def _set(composed: Any, setting: Setting) -> None:
    section = setting.key.rpartition(".")[0]
    if section and OmegaConf.select(composed, section) is None:
        require(
            section in OPTIONAL,
            f"{setting.key}: {section} is null in the chosen YAML files; leave the setting out, or change GROUP=CHOICE",
        )
        OmegaConf.update(composed, section, {}, merge=False)
    OmegaConf.update(composed, setting.key, setting.value, merge=False)


def set_text(values: dict[str, Any], items: list[Item]) -> None:
    """Set the keys in `TEXT_KEYS` to the user's values in the config `values`, which consists of nested dicts."""
    for item in items:
        if isinstance(item, Setting) and item.key in TEXT_KEYS:
            *sections, name = item.key.split(".")
            inside = values
            for section in sections:
                inside = inside[section]
            inside[name] = item.value


def chosen(items: list[Item]) -> Mapping[str, str]:
    """Return the user's choices as a dict from the name of a config group to the name of the chosen YAML file.

    If the user chooses several times in the same config group, the last choice in `items` counts.
    """
    return {item.group: item.choice for item in items if isinstance(item, Choice)}
