"""Conversion of the command line, with overrides `group=choice` and `key=value`, into one typed config.

Hydra composes the YAML files. Its errors have several lines and refer to Hydra's own syntax. This module replaces each
of them by a one-line message that names the existing keys or choices.
"""

import dataclasses
import difflib
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from rltrain.base.errors import ConfigError
from rltrain.base.secret_values import redacted, secret_in
from rltrain.rewards.loading import is_penalty
from rltrain.settings.key import text_keys
from rltrain.settings.schema import ALL_LINEAR, Config
from rltrain.settings.typed import keys, parse, require, unknown_key

# Maps each section of knobs to the key that selects their function. The schema does not know which knobs exist.
# `rltrain.settings.algorithm_rules` checks their names and values.
KNOBS = {"algorithm.advantage": "algorithm.advantage_estimator", "algorithm.loss": "algorithm.loss_mode"}
TEXT_KEYS = text_keys(Config)
_NEW_LINE = re.compile(r"\\?\\n")
WHOLE = "model.lora"  # a mapping on the command line replaces the mapping in the chosen file
AUTO = "auto"
STALE_UPPER = 2.0  # upper bound of importance weights with `algorithm.correction.level=auto`, as in tis.yaml

EXAMPLES = (
    ("algorithm=ppo trainer.total_steps=60", "another algorithm, half the steps"),
    ("algorithm.loss.clip_ratio_high=0.28", "a knob of the loss"),
    ("data=sort rollout=hf", "another task, answers without vLLM"),
    ("placement=inprocess rollout=hf", "one process, no Ray: breakpoint() works anywhere"),
    ("model.path=DIR data.train=my.jsonl reward.functions=[my_reward.py:score]", "your own"),
)


@dataclass(frozen=True)
class Args:
    """Contents of the command line.

    Attributes:
        action: whether to run, to print the resolved config, or to print the help.
        overrides: the settings `group=choice` and `key=value`.
    """

    action: Literal["run", "config", "help"]
    overrides: list[str]


def parse_args(argv: Sequence[str]) -> Args:
    """Split the command line into flags and overrides.

    Raises:
        ConfigError: a flag does not exist.
    """
    action: Literal["run", "config", "help"] = "run"
    overrides: list[str] = []
    for before, word in zip(("", *argv), argv, strict=False):
        if word in ("--help", "-h"):
            action = "help"
        elif word in ("--cfg", "--cfg=job"):
            action = "config" if action == "run" else action
        elif word.startswith("-"):
            raise ConfigError(f"unknown flag '{word}': the flags are --help and --cfg; settings are written KEY=VALUE")
        elif not (before == "--cfg" and word == "job"):
            overrides.append(word)
    return Args(action, overrides)


def usage() -> str:
    """Return the text of `--help`."""
    command = "python -m rltrain.main"
    groups = "\n".join(
        textwrap.fill(", ".join(choices(group)), 80, initial_indent=f"  {group:<10} ", subsequent_indent=" " * 13)
        for group in group_names()
    )
    examples = "\n".join(f"  {overrides}\n      {meaning}" for overrides, meaning in EXAMPLES)
    return (
        f"Train a language model by reinforcement learning.\n\n"
        f"  {command} [GROUP=CHOICE ...] [KEY=VALUE ...]\n"
        f"  {command} [...] --cfg    print every key and its value, and stop\n\n"
        f"Groups and their choices:\n{groups}\n\nExamples:\n{examples}"
    )


def config_dir() -> Path:
    """Return the folder of the YAML files.

    The folder is inside the package if the package is installed, and beside the package in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "config"
    return inside if inside.is_dir() else package.parent / "config"


def group_names() -> list[str]:
    """Return the config groups, in the schema's order."""
    order = [field.name for field in dataclasses.fields(Config)]
    found = [folder.name for folder in config_dir().iterdir() if folder.is_dir() and any(folder.glob("*.yaml"))]
    return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))


def choices(group: str) -> list[str]:
    """Return the choices of a config group."""
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))


def compose(overrides: Sequence[str]) -> tuple[Config, str]:
    """Compose the YAML files with the overrides.

    Returns:
        The typed config, and the same config as YAML text with every key.

    Raises:
        ConfigError: the overrides or the resulting values are invalid. The message is one line.
    """
    typed, others = _split_text(overrides)
    accepted = [line for text in others for line in _accept(text)]
    values = _resolve(_without_knobs_of_other_functions(accepted))
    _set_text(values, typed)
    reward = values.get("reward")
    if isinstance(reward, dict):
        reward["functions"] = _reward_functions(reward.get("functions"))
        reward["models"] = _reward_models(reward.get("models"))
    model = values.get("model")
    if isinstance(model, dict):
        model["lora"] = _lora(model.get("lora"))
    algorithm, trainer = values.get("algorithm"), values.get("trainer")
    if isinstance(algorithm, dict) and isinstance(trainer, dict):
        algorithm["correction"] = _correction(algorithm, trainer.get("max_staleness"))
    _refuse_secrets(values)
    config = parse(Config, values)
    return config, to_yaml(config)


def _split_text(overrides: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    r"""Take out the keys that the schema calls text. Their values never reach Hydra, so any character may be in them.

    The two characters `\n` become a line break, and `\\n` becomes `\n`. `null` stands for no text.

    Returns:
        The values by key, and the other overrides.
    """
    typed: dict[str, str | None] = {}
    others: list[str] = []
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if equals and key in TEXT_KEYS:
            typed[key] = None if value == "null" else _NEW_LINE.sub(_line_break, value)
        else:
            others.append(override)
    return typed, others


def _line_break(typed: re.Match[str]) -> str:
    return "\n" if typed[0] == r"\n" else r"\n"


def _set_text(values: dict[str, Any], typed: Mapping[str, str | None]) -> None:
    for key, value in typed.items():
        *sections, name = key.split(".")
        inside = values
        for section in sections:
            inside = inside[section]
        inside[name] = value


def _without_knobs_of_other_functions(overrides: list[str]) -> list[str]:
    """Clear a preset's knobs if the command line selects another loss or estimator than the preset.

    The knobs in a preset belong to the function that the preset selects: `algorithm=dapo algorithm.loss_mode=gspo` must
    not give DAPO's clip range to GSPO. Knobs from the command line are kept.

    Returns:
        The overrides, preceded by those that clear the knobs.
    """
    chosen = [override for text in overrides if (override := _parse_override(text)).key_or_group in KNOBS.values()]
    if not chosen:
        return overrides
    preset = _resolve([text for text in overrides if text.startswith("algorithm=")])["algorithm"]
    emptied: list[str] = []
    for knobs, function in KNOBS.items():
        names = [override.value() for override in chosen if override.key_or_group == function]
        if names and names[-1] != preset[function.rpartition(".")[2]]:
            emptied += [f"~{knobs}", f"++{knobs}={{}}"]
    return [*emptied, *overrides]


def to_yaml(config: Config) -> str:
    """Return a config as YAML text with every key."""
    # `OmegaConf.create` would refuse free text with an unpaired "${".
    text: str = yaml.dump(
        dataclasses.asdict(config),
        Dumper=get_omega_conf_dumper(),
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
    )
    return text


def _resolve(overrides: list[str]) -> dict[str, Any]:
    """Compose and resolve the config with Hydra. Returns plain nested values."""
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            composed = hydra_compose("train", overrides=overrides)
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        hint = "write a plain value, or ${KEY} of a key that exists"
        raise ConfigError(f"{where}{_first_line(error)}; {hint}") from None
    except HydraException as error:
        raise ConfigError(_composition_error(_first_line(error))) from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _composition_error(message: str) -> str:
    """Return the error message for a config that Hydra cannot compose.

    If Hydra refuses a key that is in the schema, the key's section is absent or null, and the message explains that.
    """
    for key in keys(Config):
        if f"'{key}'" in message:
            section = key.rpartition(".")[0]
            return f"{key}: {section} is null under the chosen groups; leave the override out, or choose other groups"
    return f"{message}; see --help"


def _refuse_secrets(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if the resolved config holds a secret, because config.yaml and the logs would show it."""
    if key := secret_in(values):
        raise ConfigError(
            f"{key}: holds a key, token or password, which config.yaml and logs would show to others; put it into an "
            "environment variable, and give the variable's name instead, as in api_key_env=NAME"
        )


def _first_line(error: Exception) -> str:
    return redacted(str(error)).strip().partition("\n")[0].rstrip(".")


def _accept(text: str) -> list[str]:
    """Check one override by itself. Returns the equivalent overrides in Hydra's syntax.

    Hydra requires a `+` before a key that is not in the YAML files, as is the case for every knob. rltrain accepts
    `key=value` for all keys. A mapping of knobs replaces the mapping in the chosen file.

    Raises:
        ConfigError: the override is invalid.
    """
    override = _parse_override(text)
    key = override.key_or_group
    if key.split(".")[0].split("/")[0] == "hydra":
        raise ConfigError(f"'{text}': Hydra's own settings cannot be changed; leave it out")
    if override.is_sweep_override():
        raise ConfigError(
            f"'{text}': several values, and a run takes one; start one run for each, or write a list as KEY=[A,B]"
        )
    is_group = key in group_names()
    is_knob = any(key.startswith(f"{section}.") for section in KNOBS)
    if not is_group and not is_knob:
        _check_key(key, text)
    if override.is_delete():
        require(is_knob, f"'{text}': a key can be set, not removed; write {key}=VALUE")
        return [text]
    if is_group:
        return [_accept_choice(override)]
    plain = text.lstrip("+")
    if key in KNOBS:
        require(isinstance(override.value(), dict), f"'{plain}': must be a mapping, as in {key}={{name:value}}")
        return [f"~{key}", f"++{plain}"]
    if key == WHOLE:
        return [f"{key}=null", plain]
    return [f"++{plain}" if is_knob else plain]


def _parse_override(text: str) -> Override:
    require("=" in text or text.startswith("~"), f"'{text}': settings are written KEY=VALUE; see --help")
    key, _, value = text.partition("=")
    require(bool(key.strip("+~ ")), f"'{text}': no key before the '='; settings are written KEY=VALUE")
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError):  # ValueError: a number with thousands of digits
        raise ConfigError(
            f"""'{text}': cannot read the value; quote one with special characters, as in '{key}="{value}"'"""
        ) from None
    require(override.package is None, f"'{text}': '@' is not available; write GROUP=CHOICE or KEY=VALUE")
    return override


def _accept_choice(override: Override) -> str:
    group, choice, known = override.key_or_group, override.value(), choices(override.key_or_group)
    if choice not in known:
        near = difflib.get_close_matches(str(choice), known, n=1)
        hint = f"the nearest is '{near[0]}', and all" if near else "its choices"
        raise ConfigError(f"{group}={override.value()}: unknown choice; {hint} are {', '.join(known)}")
    return f"{group}={choice}"


def _check_key(key: str, text: str) -> None:
    known = keys(Config)
    if any(name.startswith(f"{key}.") for name in known):
        raise ConfigError(f"'{text}': '{key}' is a section; set its keys one at a time, as {key}.KEY=VALUE")
    if key not in known:
        raise unknown_key(key, sorted({*group_names(), *known}))


def _reward_functions(functions: Any) -> list[Any]:
    """Convert each entry of `reward.functions` to a mapping with all keys.

    A string is the path of the function. By default, the name is that of the function, and the weight is 1. By default,
    a function scores the outcome, except for rltrain's own penalties.
    """
    require(
        isinstance(functions, list),
        f"reward.functions={functions}: must be a list, as in reward.functions=[my_reward.py:score]",
    )
    return [_reward_function(function) for function in functions]


def _reward_function(function: Any) -> Any:
    given = {"path": function} if isinstance(function, str) else function
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        raise ConfigError(
            f"reward.functions: {function!r} names no function; write package.module:function or file.py:function, or "
            "{path:file.py:function,weight:0.5}"
        )
    path = given["path"]
    default = {"name": re.split(r"[:.]", path)[-1], "weight": 1.0, "gate": False, "outcome": not is_penalty(path)}
    return default | {"kwargs": {}} | given


def _reward_models(models: Any) -> list[Any]:
    """Convert each entry of `reward.models` to a mapping with all keys.

    A string is the directory of the model. By default, the name is that of the directory, and the weight is 1.
    """
    require(
        isinstance(models, list), f"reward.models={models}: must be a list, as in reward.models=[path/to/directory]"
    )
    return [_reward_model(model) for model in models]


def _reward_model(model: Any) -> Any:
    given = {"path": model} if isinstance(model, str) else model
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        raise ConfigError(f"reward.models: {model!r} names no directory; write DIR or {{path:DIR,weight:0.5}}")
    name = Path(given["path"]).name or "reward_model"
    return {"name": name, "weight": 1.0, "gate": False, "outcome": True, "prompt_template": None} | given


def _lora(lora: Any) -> Any:
    """Convert `model.lora` to a mapping with all keys.

    By default, all linear layers get adapters, and alpha is twice the rank, so that alpha / rank is 2.
    """
    if lora is None:
        return None
    if not isinstance(lora, dict) or "rank" not in lora:
        raise ConfigError(f"model.lora={lora}: must be null, or a mapping with a rank, as in model.lora={{rank:16}}")
    rank, targets = lora["rank"], lora.get("targets", ALL_LINEAR)
    twice = 2 * rank if isinstance(rank, int | float) else rank  # a wrong type is reported later, for the rank
    return {"alpha": twice} | lora | {"targets": [targets] if isinstance(targets, str) else targets}


def _correction(algorithm: dict[str, Any], max_staleness: Any) -> Any:
    """Replace `level: auto` in `algorithm.correction` with its meaning.

    The level becomes `token`, with truncated importance weights, if answers may be stale: the actor's policy before the
    update is then not the policy that sampled the answers. Otherwise, the level becomes null. It also becomes null in
    two cases that need no correction: the engine's log-probs serve as the old log-probs, so that the loss's ratio is
    relative to the engine, or `rejection` handles the difference.
    """
    correction = algorithm.get("correction")
    if not isinstance(correction, dict) or correction.get("level") != AUTO:
        return correction
    stale = isinstance(max_staleness, int) and max_staleness > 0
    rejects = algorithm["rejection"]["kl_estimator"] is not None
    if not stale or rejects or algorithm["old_log_probs"] != "actor":
        return correction | {"level": None}
    unbounded = correction["lower"] is None and correction["upper"] is None
    return correction | {"level": "token"} | ({"upper": STALE_UPPER} if unbounded else {})
