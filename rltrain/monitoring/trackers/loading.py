"""Checks and creates the sinks that the config key `trainer.trackers` names, before a run starts."""

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from rltrain.base.errors import ConfigError, described
from rltrain.monitoring.sinks import JsonLines, Sink, TensorBoard
from rltrain.monitoring.trackers.background import BackgroundSink
from rltrain.monitoring.trackers.mlflow_tracker import MlflowTracker
from rltrain.monitoring.trackers.trackio_tracker import TrackioTracker
from rltrain.monitoring.trackers.wandb_tracker import WandbTracker
from rltrain.rewards.loading import import_function

KEY = "trainer.trackers"
TENSORBOARD = "tensorboard"
# LIBRARIES maps the name of a tracker to the tracker's sink class. The name of a tracker is also the name of its Python
# library and of an optional extra of the package rltrain.
LIBRARIES: dict[str, Callable[[Path], Sink]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
NAMES = (TENSORBOARD, *LIBRARIES)
METHODS = ("log_step", "log_eval", "restore", "close")


def check_trackers(names: Sequence[str]) -> None:
    """Check that each name is a tracker whose package is installed, or the import path of a sink class.

    Raises:
        ConfigError: a tracker name is unknown or appears twice, a package is missing, or a tracker class is not a sink.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{KEY}={_shown(names)}: {name} appears more than once; list each tracker once")
        if name in LIBRARIES:
            _check_library(name)
        elif name != TENSORBOARD:
            _check_class(name, _class(name))


def make_sinks(output_dir: Path, names: Sequence[str]) -> list[Sink]:
    """Make all sinks of a run, in the order in which they receive the metrics.

    The sink `JsonLines` is always included, because checkpoints copy the files of `JsonLines`, and a resumed run reads
    earlier metrics from those copies. `JsonLines` and `TensorBoard` are called directly, because they only write to the
    output folder. Every sink except `JsonLines` and `TensorBoard` is called in a separate thread.

    Args:
        output_dir: output folder of the run; must exist.
        names: value of `trainer.trackers`, which `check_trackers` has accepted.
    """
    sinks: list[Sink] = [JsonLines(output_dir)]
    for name in names:
        if name == TENSORBOARD:
            sinks.append(TensorBoard(output_dir))
        else:
            make = LIBRARIES[name] if name in LIBRARIES else _class(name)
            sinks.append(BackgroundSink(name, make(output_dir)))
    return sinks


def _check_library(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"{KEY}=[{name}]: the package {name} is not installed; run pip install rltrain[{name}]")
    try:
        importlib.import_module(name)
    except Exception as error:  # Importing a package with missing dependencies may raise any exception.
        raise ConfigError(
            f"{KEY}=[{name}]: the package {name} cannot be imported ({described(error)}); "
            f"run pip install rltrain[{name}]"
        ) from None
    if name == "wandb":
        WandbTracker.check()


def _class(path: str) -> Callable[[Path], Sink]:
    """Import the class with the import path `path`, which has the form `package.module:Class` or `file.py:Class`."""
    if ":" not in path:
        near = difflib.get_close_matches(path, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else "name your own class as package.module:Class or file.py:Class"
        raise ConfigError(f"{KEY}=[{path}]: not one of {', '.join(NAMES)}; {hint}")
    found: Callable[[Path], Sink] = import_function(path, f"{KEY} '{path}'", "class")
    return found


def _check_class(path: str, found: Callable[[Path], Sink]) -> None:
    where = f"{KEY}=[{path}]"
    if not inspect.isclass(found):
        raise ConfigError(f"{where}: is not a class; name a class with the methods {', '.join(METHODS)}")
    missing = [name for name in METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(
            f"{where}: the class lacks {', '.join(missing)}; a tracker must have the methods {', '.join(METHODS)}"
        )
    try:
        inspect.signature(found).bind(Path())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: cannot be created with the output folder as its only argument ({error}); define __init__(self, "
            "output_dir)"
        ) from None


def _shown(names: Sequence[str]) -> str:
    return f"[{','.join(names)}]"
