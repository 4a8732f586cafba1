"""Finds the folder of rltrain's YAML files, the config groups in the folder, and the choices of each group."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from rltrain.settings.schema import Config


def config_dir() -> Path:
    """Return the folder of rltrain's YAML config files.

    In an installed rltrain, the folder `config` is inside the package `rltrain`. In a source checkout, the folder
    `config` is next to the package `rltrain`.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "config"
    return inside if inside.is_dir() else package.parent / "config"


def group_names() -> list[str]:
    """Return the names of the config groups, in the order of the fields of `Config`."""
    order = [field.name for field in dataclasses.fields(Config)]
    found = [folder.name for folder in config_dir().iterdir() if folder.is_dir() and any(folder.glob("*.yaml"))]
    return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))


def choices(group: str) -> list[str]:
    """Return the names of the choices in a config group."""
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))


@functools.cache
def composed_files(folder: Path, choices: tuple[tuple[str, str], ...]) -> Any:
    """Compose the YAML files of `folder`, with the given choices in the config groups, into one `DictConfig`.

    The composed config is cached, because a process composes the same files several times. Callers must not change the
    cached config, but may change a copy.

    Args:
        folder: the folder of rltrain's YAML config files, as returned by `config_dir`.
        choices: pairs (name of a config group, name of the chosen file). A config group that is not in `choices`
            keeps its default choice.
    """
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose("train", [f"{group}={choice}" for group, choice in choices])
