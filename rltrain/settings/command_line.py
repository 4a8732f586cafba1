"""Parses the flags and settings on the command line of `rltrain.main`, and writes the text of `--help`.

A setting has the form `GROUP=CHOICE` or `KEY=VALUE`.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rltrain.base.errors import ConfigError
from rltrain.settings.config_groups import choices, group_names
from rltrain.settings.other_names import name_here
from rltrain.settings.schema import Config
from rltrain.settings.typed import keys

Action = Literal["run", "plan", "check", "config", "sweep", "help"]

FLAGS = {  # Maps each flag that takes no value to the action that the flag selects.
    "--help": "help",
    "-h": "help",
    "--cfg": "config",
    "--cfg=job": "config",
    "--plan": "plan",
    "--check": "check",
    "--multirun": "sweep",
    "-m": "sweep",
}
FLAG_MEANINGS = (
    ("--config FILE.yaml", "read settings from a file of your own"),
    ("--plan", "check the setup, print the plan, and stop"),
    ("--check", "check the setup and each node of the cluster, and stop"),
    ("--cfg", "print every key and its value, and stop"),
    ("-m, --multirun", "train once for each combination of KEY=A,B values"),
    ("-h, --help", "print this text"),
)
EXAMPLES = (
    ("algorithm=ppo trainer.total_steps=60", "train with PPO, and for 60 steps instead of 120"),
    ("algorithm.loss.clip_ratio_high=0.28", "set a parameter of the loss"),
    ("data=sort rollout=hf", "train on another task, and generate without vLLM"),
    ("placement=inprocess rollout=hf", "run in one process without Ray, so that breakpoint() works anywhere"),
    ("model.path=DIR data.train=my.jsonl reward.functions=[my_reward.py:score]", "your own model, data and reward"),
)


@dataclass(frozen=True)
class Args:
    """The flags and settings parsed from the command line.

    Attributes:
        action: what the program does: train, print the plan, check the nodes, print the resolved config, train once for
            each combination of the given values (a sweep), or print the help.
        overrides: the config settings on the command line, each of the form `GROUP=CHOICE` or `KEY=VALUE`.
        files: paths of the user's config files, in the order in which the files are applied.
    """

    action: Action
    overrides: list[str]
    files: list[str] = field(default_factory=list)


def parse_args(argv: Sequence[str]) -> Args:
    """Split the command line into flags and config settings.

    If the flags select several actions, the action that comes first in this list is used: help, sweep, config, check,
    plan.

    Raises:
        ConfigError: a flag is unknown, `--config` is given without a file, or a sweep is combined with another action.
    """
    found: list[str] = []
    overrides: list[str] = []
    files: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if word in FLAGS:
            found.append(FLAGS[word])
        elif name == "--config":
            value = value if equals else next(words, "")
            if not value or value.startswith("-"):
                raise ConfigError("--config: no file; write --config FILE.yaml")
            files.append(value)
        elif word.startswith("-"):
            raise _unknown_flag(word, next(words, ""))
        elif not (word == "job" and found and found[-1] == "config"):
            overrides.append(word)
    if "sweep" in found and "help" not in found and (others := {"config", "check", "plan"}.intersection(found)):
        flag = next(flag for flag in FLAGS if FLAGS[flag] in others)
        raise ConfigError(
            f"--multirun with {flag}: a sweep trains its runs; to look at one of them, leave out --multirun and give "
            "each key one value"
        )
    actions: tuple[Action, ...] = ("help", "sweep", "config", "check", "plan")
    return Args(next((action for action in actions if action in found), "run"), overrides, files)


def _unknown_flag(word: str, following: str) -> ConfigError:
    """Return the ConfigError for a word that looks like a flag but is none.

    If a config key of rltrain or an option of another trainer has the flag's name, the error message names the config
    key to set.

    Args:
        word: the flag as typed, such as `--learning_rate` or `--beta=0.1`.
        following: the next word on the command line, which can be the flag's value; "" if there is none.
    """
    flag, equals, value = word.partition("=")
    option, known = flag.lstrip("-").replace("-", "_"), [*group_names(), *keys(Config)]
    ends = [key for key in known if key.endswith(f".{option}")]
    key, note = option if option in known else "", ""
    if not key and (name := name_here(option)) is not None:
        key, note = name.key, name.note
    elif not key and len(ends) == 1:
        key = ends[0]
    if not key:
        return ConfigError(
            f"unknown flag '{word}': the flags are --help, --cfg, --plan, --check, --config FILE and --multirun; "
            "settings are written KEY=VALUE"
        )
    if not equals:
        value = "" if following.startswith("-") or "=" in following else following
    # An option with a note differs from the config key in meaning or unit, so its value may not fit the config key.
    return ConfigError(
        f"unknown flag '{flag}': rltrain's name for it is '{key}'{note}; settings are written without dashes, as in "
        f"{key}={value if value and not note else 'VALUE'}"
    )


def usage() -> str:
    """Return the text that `--help` prints."""
    groups = "\n".join(
        textwrap.fill(", ".join(choices(group)), 80, initial_indent=f"  {group:<10} ", subsequent_indent=" " * 13)
        for group in group_names()
    )
    examples = "\n".join(f"  {overrides}\n      {meaning}" for overrides, meaning in EXAMPLES)
    flags = "\n".join(f"  {flag:<20} {meaning}" for flag, meaning in FLAG_MEANINGS)
    return (
        f"Train a language model by reinforcement learning.\n\n"
        f"  python -m rltrain.main [FLAGS] [GROUP=CHOICE ...] [KEY=VALUE ...]\n\n"
        f"Flags:\n{flags}\n\nGroups and their choices:\n{groups}\n\nExamples:\n{examples}"
    )
