"""Composes rltrain's YAML files, the user's config files and command-line settings into one typed config."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from rltrain.base.errors import ConfigError
from rltrain.base.secret_values import redacted, secret_in
from rltrain.settings.config_groups import choices, composed_files, config_dir
from rltrain.settings.expansion import expand
from rltrain.settings.overrides import (
    KNOBS,
    Choice,
    Item,
    Setting,
    apply,
    chosen,
    from_command_line,
    from_file,
    set_text,
)
from rltrain.settings.schema import Config
from rltrain.settings.typed import parse, require
from rltrain.tasks import BUILTIN, TASKS, ConversationTask


def compose(overrides: Sequence[str], files: Sequence[str] = ()) -> tuple[Config, str]:
    """Compose rltrain's YAML files with the user's settings.

    Args:
        overrides: the settings `GROUP=CHOICE` and `KEY=VALUE` from the command line.
        files: paths of the user's config files. Later config files override earlier ones, and the command line
            overrides all files.

    Returns:
        The composed config in two forms: as a typed `Config`, and as YAML text with every key.

    Raises:
        ConfigError: the settings or the resulting values are invalid. The message of the ConfigError is one line.
    """
    items = _items(overrides, files)
    values = _resolve(items)
    set_text(values, items)
    expand(values)
    _refuse_secrets(values)
    typed = set(map(_key_of, overrides))
    if "trainer.total_steps" in typed and "trainer.total_epochs" not in typed:
        # The number of steps on the command line replaces the number of epochs in a config file.
        values["trainer"]["total_epochs"] = None
    config = parse(Config, values)
    if "trainer.total_steps" in typed and config.trainer.total_epochs is not None:
        raise ConfigError(
            f"trainer.total_steps={config.trainer.total_steps} with trainer.total_epochs="
            f"{config.trainer.total_epochs:g}: both set the length of the run; leave one of them out"
        )
    return config, to_yaml(config)


def _key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _items(overrides: Sequence[str], files: Sequence[str]) -> list[Item]:
    from_files = [item for file in files for item in from_file(file)]
    typed = [from_command_line(word) for word in overrides]
    choices_typed = chosen(typed)
    items = [*(item for item in from_files if not _undoes_a_choice(item, choices_typed)), *typed]
    return [*_default_choices(items), *items]


def _undoes_a_choice(item: Item, typed: Mapping[str, str]) -> bool:
    """Return whether a setting of a config file would override a choice that the user typed on the command line.

    Settings override choices. If the command line has `rollout=hf` and a config file sets `rollout.engine`, the file's
    engine would be used, so this setting must be left out. The file's `rollout.temperature` is kept, because it is the
    same in all choices of the group `rollout`.

    Args:
        item: a setting or a choice of a config file.
        typed: the user's choices on the command line, as a dict from the name of a config group to the name of the
            chosen YAML file.

    Raises:
        ConfigError: an algorithm is chosen on the command line, and the config file sets an advantage estimator or a
            loss. The file's other settings may fit only the file's algorithm.
    """
    if not isinstance(item, Setting):
        return False
    group, _, name = item.key.partition(".")
    if group not in typed or not name:
        return False
    if group == "algorithm":
        require(
            item.key not in KNOBS.values(),
            f"algorithm={typed[group]}: a file of --config sets {item.key} too, and the settings of two algorithms "
            f"cannot be mixed; leave out algorithm={typed[group]}, or delete the section 'algorithm' in the file",
        )
        return False
    key = name.partition(".")[0]
    if item.key.startswith("rollout.engine_options"):
        return True  # The options belong to the file's engine.
    values = [composed_files(config_dir(), ((group, choice),))[group][key] for choice in choices(group)]
    new = composed_files(config_dir(), ((group, typed[group]),))[group][key]
    # `rollout=vllm` keeps a config file's `rollout.vllm.process`; `rollout=hf` drops it, because its `vllm` is null.
    return any(value != values[0] for value in values) and (name == key or new is None)


def choices_of(overrides: Sequence[str], files: Sequence[str] = ()) -> list[str]:
    """Return the user's choices in config groups, each as a command-line setting `GROUP=CHOICE`.

    If the user chooses no profile or no reward, but the user's model, task or data needs another choice than the
    default, `choices_of` adds the needed choice.
    """
    return [f"{group}={choice}" for group, choice in chosen(_items(overrides, files)).items()]


def _default_choices(items: list[Item]) -> list[Item]:
    """Return the choices of config groups that follow from the user's settings, where `config/train.yaml` has other
    defaults.

    - `profile=instruct` if `model.path` names no built-in model, and otherwise `profile=conversation` if the task is a
      built-in task with several turns.
    - `reward=none` if `data.train` is not a built-in task, because the reward of a built-in task is wrong for other
      data.

    A group in which the user chooses is left out. `reward=none` is also left out if the user sets `reward.functions`.
    """
    taken = chosen(items)
    found: list[Item] = []
    if "profile" not in taken:
        if _last(items, "model.path", "builtin") not in ("builtin", "builtin-vision"):
            found.append(Choice("profile", "instruct"))
        elif isinstance(TASKS.get(taken.get("data", "")), ConversationTask):
            found.append(Choice("profile", "conversation"))
    own_data = not str(_last(items, "data.train", BUILTIN)).startswith(BUILTIN)
    if own_data and "reward" not in taken and _last(items, "reward.functions", None) is None:
        found.append(Choice("reward", "none"))
    return found


def _last(items: list[Item], key: str, default: Any) -> Any:
    """Return the value that the user's last setting of a config key gives, or `default` if the user sets no value."""
    return next((item.value for item in reversed(items) if isinstance(item, Setting) and item.key == key), default)


def profile_defaults(overrides: Sequence[str], files: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values that the profile gives to config keys, without the keys that the user sets.

    Args:
        overrides: the settings from the command line.
        files: paths of the user's config files.
    """
    items = _items(overrides, files)
    named = {item.key for item in items if isinstance(item, Setting)}
    file = config_dir() / "profile" / f"{chosen(items).get('profile', 'demo')}.yaml"
    values = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(values, dict)
    sections = {str(name): value for name, value in values.items() if isinstance(value, dict)}
    pairs = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {key: value for key, value in pairs.items() if key not in named}


def to_yaml(config: Config) -> str:
    """Return a config as YAML text that contains every key."""
    # PyYAML writes the YAML text, because `OmegaConf.create` refuses values that contain "${" without a closing brace.
    text: str = yaml.dump(
        dataclasses.asdict(config),
        Dumper=get_omega_conf_dumper(),
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
    )
    return text


def _resolve(items: list[Item]) -> dict[str, Any]:
    """Compose the chosen YAML files, apply the user's settings, and resolve references such as `${data.train}`.

    Return the composed config as nested dicts of plain values.
    """
    try:
        composed = copy.deepcopy(composed_files(config_dir(), tuple(chosen(items).items())))
        apply([*_without_knobs_of_other_functions(items, composed), *items], composed)
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        hint = "write a plain value, or ${KEY} with the name of an existing key"
        raise ConfigError(f"{where}{_first_line(error)}; {hint}") from None
    except HydraException as error:
        raise ConfigError(f"{_first_line(error)}; see --help") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _without_knobs_of_other_functions(items: list[Item], preset: Any) -> list[Item]:
    """Return settings that remove the preset's parameters of a loss or estimator if the user selects another one.

    A preset's parameters are meant for the loss and the estimator that the preset selects. For example, `algorithm=dapo
    algorithm.loss_mode=gspo` must not give DAPO's clip range to GSPO. Parameters that the user sets are kept, because
    the user's settings are applied after the preset's parameters are removed.
    """
    emptied: list[Item] = []
    for knobs, function in KNOBS.items():
        names = [item.value for item in items if isinstance(item, Setting) and item.key == function]
        if names and names[-1] != OmegaConf.select(preset, function):
            emptied.append(Setting(knobs, {}))
    return emptied


def _refuse_secrets(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if the resolved config contains a secret such as an API key. A secret in the config would
    appear in config.yaml and in the logs.
    """
    if key := secret_in(values):
        raise ConfigError(
            f"{key}: holds a key, token or password, which config.yaml and logs would show to others; put it into an "
            "environment variable, and give the variable's name instead, as in api_key_env=NAME"
        )


def _first_line(error: Exception) -> str:
    return redacted(str(error)).strip().partition("\n")[0].rstrip(".")
