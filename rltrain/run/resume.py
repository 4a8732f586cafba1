"""Resuming a run: find the checkpoint that `trainer.resume` names, and check that the config fits the saved run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import CheckpointError, ConfigError, RLTrainError, described, one_line
from rltrain.base.storage import Folder, absolute
from rltrain.data.prompts import PromptSet
from rltrain.monitoring.alarms import Alarms
from rltrain.monitoring.json_lines import rows_of
from rltrain.monitoring.learning_curve import CURVES
from rltrain.monitoring.sinks import EVALUATIONS, METRICS
from rltrain.run.checkpoints import (
    CONFIG,
    MANIFEST,
    Checkpoint,
    Checkpoints,
    read,
    read_manifest,
    require_own,
    steps_in,
)
from rltrain.run.checks import RUN_FILES
from rltrain.run.source_fingerprints import sources
from rltrain.settings.algorithm_rules import needs_critic
from rltrain.settings.key import changeable_keys
from rltrain.settings.schema import Config, TrainerConfig
from rltrain.settings.typed import require
from rltrain.trajectories.collector import Collector
from rltrain.trajectories.token_rewards import entropy_controller, kl_controller
from workers.models.state_files import read_index
from workers.training.rank_state import MODEL, STATE, reason

CHANGEABLE = changeable_keys(Config)
AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class Beginning:
    """The state from which a process of a run starts: the initial state of the run, or a checkpoint.

    Attributes:
        checkpoint: checkpoint from which the run is resumed; None if the run trains from the start.
        said: lines of text to show to the user; empty if `trainer.resume=never` starts a new run.
        over: True if the run has already taken all its training steps.
    """

    checkpoint: Checkpoint | None
    said: tuple[str, ...] = ()
    over: bool = False


def beginning(config: Config) -> Beginning:
    """Determine from `trainer.resume` whether a run trains from the start or continues from a checkpoint.

    Args:
        config: the whole config, including the default values of all parameters of the loss and the advantage
            estimator.

    Raises:
        ConfigError: the checkpoint does not exist, is damaged or cannot be read; the config differs from the saved
            config in a key that must not change; or a folder of the run holds files of another run.
    """
    try:
        return _beginning(config)
    except RLTrainError:
        raise
    except Exception as error:
        # A driver of a remote file system may raise an exception of any type. If a dict or list in the config contains
        # itself, `asdict` raises RecursionError.
        trainer = config.trainer
        raise ConfigError(
            f"trainer.resume={trainer.resume} with trainer.checkpoint_dir={trainer.checkpoint_dir}: cannot be read "
            f"({reason(error)}); name a readable folder"
        ) from None


def saved_values(trainer: TrainerConfig) -> Mapping[str, Any]:
    """Return the config values of the saved run that `trainer.resume` continues.

    Returns:
        The saved run's config as nested dicts and lists; {} if a new run begins or the saved config cannot be read. If
        the saved run's config cannot be read, the function `beginning` reports the reason.
    """
    if trainer.resume == NEVER:
        return {}
    run = Folder(absolute(trainer.output_dir if trainer.resume == AUTO else trainer.resume))
    own = Folder(absolute(trainer.checkpoint_dir)) if trainer.resume == AUTO else run.at("checkpoints")
    try:
        of_steps = [place.at(f"step_{step}") for place in (run, own) for step in reversed(steps_in(place))]
        found = next((place for place in (run, *of_steps) if place.exists(CONFIG)), None)
        return {} if found is None else _values(found.read(CONFIG).decode(), str(found))
    except Exception:  # A file system driver may raise any exception.
        return {}


def _beginning(config: Config) -> Beginning:
    trainer = config.trainer
    own = Folder(absolute(trainer.checkpoint_dir))
    require_own(own)
    if trainer.resume == AUTO:
        return _auto(config, own)
    if trainer.resume == NEVER:
        _require_no_checkpoints(own)
        return Beginning(None)
    checkpoint = _named(trainer.resume)
    _require_no_other_run(config, own, checkpoint)
    return _from(config, checkpoint)


def _auto(config: Config, own: Folder) -> Beginning:
    output = Path(absolute(config.trainer.output_dir))
    files = _require_own_output(config, own)
    found = Checkpoints(own, "", keep=0, best=None).newest()
    if found is not None:
        return _from(config, found)
    damaged = steps_in(own)
    require(
        not damaged,
        f"trainer.resume=auto: {own} holds {len(damaged)} checkpoints, all of them damaged; remove them to train from "
        "the start",
    )
    if not files:
        return Beginning(None, (f"trainer.resume=auto: {output} holds no run yet, so a new run starts",))
    require(
        MODEL not in files,
        f"trainer.resume=auto: {output} holds the model of a checkpoint, but {own} no longer holds a checkpoint; put "
        "the checkpoints back, or name a new trainer.output_dir",
    )
    return Beginning(None, (f"trainer.resume=auto: the run in {output} has no checkpoint yet; the run starts again",))


def _require_own_output(config: Config, own: Folder) -> list[str]:
    """Check that the output folder holds only files of the run whose checkpoint folder is `own`.

    Returns:
        The names of the run's files in the output folder.

    Raises:
        ConfigError: the output folder holds files that do not belong to the run.
    """
    output = Path(absolute(config.trainer.output_dir))
    files, config_file = [name for name in RUN_FILES if (output / name).exists()], output / "config.yaml"
    if config_file.is_file():
        try:
            text = config_file.read_text("utf-8")
        except ValueError:
            raise ConfigError(f"{config_file}: is not UTF-8, so no run wrote this file; name a new folder") from None
        _require_same(config, text, str(config_file))
        _require_same_place(_flat(_values(text, str(config_file))), config.trainer, own)
    elif own_only := [name for name in files if str(own) != str(output / name)]:
        raise ConfigError(
            f"trainer.resume={config.trainer.resume}: {output} holds {own_only[0]} and no config.yaml, so there is no "
            "run to continue; name a new folder"
        )
    return files


def _require_same_place(saved: Mapping[str, Any], trainer: TrainerConfig, own: Folder) -> None:
    """Check that `own`, the checkpoint folder in the config, is also the checkpoint folder of the saved run.

    If both the saved run and the config put the checkpoints into the folder `checkpoints` of their output folder, the
    paths of the two checkpoint folders may differ. The paths of the checkpoint folders differ if the output folder was
    moved, or if the config names the output folder by another path than the saved run.

    Raises:
        ConfigError: the saved run's checkpoint folder is not the checkpoint folder in the config.
    """
    there, output = (str(saved.get(f"trainer.{key}", "")) for key in ("checkpoint_dir", "output_dir"))
    beside = there == f"{output}/checkpoints" and str(own) == str(Path(absolute(trainer.output_dir)) / "checkpoints")
    require(
        beside or str(Folder(absolute(there))) == str(own),
        f"trainer.checkpoint_dir={own}: the run in {trainer.output_dir} has its checkpoints in {there}; use that "
        "folder",
    )


def _named(path: str) -> Checkpoint:
    """Return the checkpoint that the user named by a path.

    The path may be the folder of one checkpoint, the checkpoint folder of a run, or the output folder of a run. If a
    folder contains several checkpoints, the newest undamaged checkpoint is returned.

    Raises:
        ConfigError: the folder that the path names holds no checkpoint, or holds only damaged checkpoints.
    """
    where, folder = f"trainer.resume={path}", Folder(absolute(path))
    if folder.exists(MANIFEST):
        try:
            return read(folder)
        except CheckpointError as error:
            raise ConfigError(f"{where}: {error}; give another checkpoint, or trainer.resume=auto") from None
    for place in (folder, folder.at("checkpoints")):
        if steps_in(place):
            found = Checkpoints(place, "", keep=0, best=None).newest()
            require(found is not None, f"{where}: all checkpoints in {place} are damaged; give another folder")
            assert found is not None, "required above"
            return found
    raise ConfigError(
        f"{where}: holds no {MANIFEST}, so it is neither a finished checkpoint nor the folder of a run with a finished "
        "checkpoint; set trainer.resume to never, auto, or the folder of a checkpoint"
    )


def _from(config: Config, checkpoint: Checkpoint) -> Beginning:
    trainer = config.trainer
    _require_same(config, checkpoint.config, str(checkpoint.folder))
    output = Path(absolute(trainer.output_dir))
    if checkpoint.step >= trainer.total_steps and _is_published(checkpoint, output / MODEL):
        line = (
            f"nothing to do: {checkpoint.folder} is the checkpoint of step {checkpoint.step}, and "
            f"trainer.total_steps={trainer.total_steps}; the model is in {output / 'model'}"
        )
        return Beginning(checkpoint, (line,), over=True)
    said = [f"the run continues after step {checkpoint.step}, from the checkpoint {checkpoint.folder}"]
    before = _flat(_values(checkpoint.config, str(checkpoint.folder))).get("trainer.total_steps")
    if before != trainer.total_steps:
        schedules = {role: getattr(config, role).lr_schedule for role in ("actor", "critic")}
        moved = ", ".join(f"{role}.lr_schedule={kind}" for role, kind in schedules.items() if kind != "constant")
        hint = (
            f": {moved} now ends at the new last step, so learning rates differ from those of the first run"
            if moved
            else ""
        )
        said.append(f"trainer.total_steps={trainer.total_steps}, while the checkpoint has {before}{hint}")
    return Beginning(checkpoint, tuple(said))


def _is_published(checkpoint: Checkpoint, model: Path) -> bool:
    """Return whether the folder `model` holds every file of the checkpoint's model with the manifest's checksum."""
    files, there = read_manifest(checkpoint.folder)["files"], Folder(str(model))
    of_model = {name.removeprefix(f"{MODEL}/"): entry for name, entry in files.items() if name.startswith(f"{MODEL}/")}
    return all(there.exists(name) and list(there.checksum(name)) == entry for name, entry in of_model.items())


def _require_no_checkpoints(own: Folder) -> None:
    steps = steps_in(own)
    require(
        not steps,
        f"trainer.checkpoint_dir={own}: holds checkpoints of another run (step_{steps[-1] if steps else 0}); name a "
        "new folder, or continue that run with trainer.resume=auto",
    )


def _require_no_other_run(config: Config, own: Folder, checkpoint: Checkpoint) -> None:
    """Check that the folders of a resumed run contain no newer checkpoints and no files of another run.

    A run that is resumed from a checkpoint in its own checkpoint folder must be resumed from the newest checkpoint in
    that folder. A run that is resumed from a checkpoint outside of its own checkpoint folder needs an output folder and
    a checkpoint folder that hold no files of earlier runs.

    Raises:
        ConfigError: the output or checkpoint folder contains files of another run, or checkpoints that are newer than
            the one from which the run is resumed.
    """
    trainer, output = config.trainer, Path(absolute(config.trainer.output_dir))
    if str(checkpoint.folder) == str(own.at(f"step_{checkpoint.step}")):
        newer = [step for step in steps_in(own) if step > checkpoint.step]
        require(
            not newer,
            f"trainer.resume={trainer.resume}: {own} also holds newer checkpoints (step_{newer[-1] if newer else 0}), "
            "which would mix with those of this run; name a new trainer.output_dir",
        )
        _require_own_output(config, own)
        return
    _require_no_checkpoints(own)
    for name in RUN_FILES:
        require(
            not (output / name).exists(),
            f"trainer.output_dir={trainer.output_dir}: holds {name} of a run other than the resumed run; name a "
            "new folder, or use trainer.resume=auto to continue the run in this folder",
        )


def _require_same(config: Config, saved: str, where: str) -> None:
    """Check that the config equals the saved config in every key that the schema does not mark as changeable.

    The keys of the config section `trainer` are compared first, because a change of a `trainer` key can also change
    values in other sections. The error then names the `trainer` key that the user changed.

    Raises:
        ConfigError: a config key that must not change has another value than in the saved run.
    """
    old, new = _flat(_values(saved, where)), _flat(asdict(config))
    for key in sorted(old.keys() | new.keys(), key=lambda key: (not key.startswith("trainer."), key)):
        # The comparison of the `repr` texts is for NaN: `nan == nan` is False, but both have the same `repr`.
        same = old.get(key) == new.get(key) or repr(old.get(key)) == repr(new.get(key))
        if not same and not _is_changeable(key):
            raise ConfigError(
                f"{key}={_shown(new.get(key))}: the checkpoint has {_shown(old.get(key))}, and another value would "
                f"make this a different run ({where}); use the same value, or start a new run with the checkpoint's "
                "model as model.path"
            )


def _is_changeable(key: str) -> bool:
    """Return whether the schema allows a resumed run to change the given key or a section that contains the key."""
    return any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE)


class _NoAliases(yaml.SafeLoader):  # type: ignore[misc]
    """YAML loader that refuses aliases.

    Aliases are refused because `_flat` would visit an aliased part of a document once for every path to that part.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("the YAML text contains an alias, which no run writes")
        return super().compose_node(parent, index)


def _values(text: str, where: str) -> Mapping[str, Any]:
    try:
        found = _NoAliases(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = one_line(" ".join(str(error).split()), 120)
        raise ConfigError(f"{where}: its config.yaml cannot be read ({reason})") from None
    require(isinstance(found, Mapping), f"{where}: its config.yaml holds no config; give another checkpoint")
    return found  # type: ignore[no-any-return]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one mapping with dotted keys. Lists inside the nested mappings are not flattened."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def require_usable(config: Config, checkpoint: Checkpoint, prompts: PromptSet) -> list[str]:
    """Check, before any worker starts, that a run can continue from a checkpoint.

    The files of data, models and rewards must be unchanged, and the checkpoint's state must be loadable.

    If an error in a user's function ended the earlier run, the file that contains the function is allowed to have
    changed, because the user has to repair the function.

    Args:
        config: the whole config.
        checkpoint: checkpoint from which the run is resumed.
        prompts: training prompts, as they were loaded from the data set.

    Returns:
        Lines of text for the user: one line if the user has repaired the file whose error ended the earlier run, else
        none.

    Raises:
        ConfigError: a file of data, models or rewards has changed, or the checkpoint's state cannot be loaded. The
            message of the ConfigError says what has changed or cannot be loaded.
    """
    state, said = checkpoint.state, []
    kept, repairable = (state.get("sources"), state.get("repairable")) if isinstance(state, dict) else (None, None)
    for name, fingerprint in sources(config, prompts).items():
        same = not isinstance(kept, dict) or kept.get(name) == fingerprint
        if not same and name == repairable:
            said.append(f"{name}: has been repaired since its error ended the run after step {checkpoint.step}")
            continue
        require(
            same,
            f"{name}: has changed since {checkpoint.folder} was written, so a resumed run would differ from "
            "the saved run; restore the old content, or start a new run with the checkpoint's model as model.path",
        )
    try:
        _try(config, checkpoint, prompts)
    except Exception as error:  # Loading an invalid checkpoint state may raise any exception.
        raise ConfigError(
            f"{checkpoint.folder}: its state cannot be used to resume a run ({described(error, 200)}); give another "
            "checkpoint"
        ) from None
    return said


def _try(config: Config, checkpoint: Checkpoint, prompts: PromptSet) -> None:
    state = checkpoint.state
    nobody: Any = _Nobody()
    collector = Collector(config, rollout=nobody, rewards=nobody, prompts=prompts, tasks=BackgroundTasks())
    collector.load_state_dict(state["collector"])
    kl_controller(config.algorithm.kl_in_reward).load_state_dict(state["kl_controller"])
    entropy_controller(config.algorithm).load_state_dict(state["entropy_controller"])
    if not isinstance(state["sources"], dict):
        raise ValueError("the state has no fingerprints of the data, functions and weights that the run has read")
    if state["step"] != checkpoint.step or state["incarnation"] != checkpoint.incarnation:
        raise ValueError(
            "the step or the number of restores in the driver state differs from the checkpoint's manifest"
        )
    if not isinstance(state["engine_checked"], bool):
        raise ValueError("`engine_checked` in the driver state must be true or false")
    alarms = Alarms(config)
    for name, needed in ((METRICS, CURVES), (EVALUATIONS, ("step",))):
        for row in rows_of(checkpoint.history.get(name, b"")):
            if not all(isinstance(value, int | float) for value in row.values()) or not row.keys() >= set(needed):
                raise ValueError(f"a line of {name} lacks metrics, or contains a value that is not a number")
            if name == METRICS:
                alarms.look(int(row["step"]), row)
    algorithm = config.algorithm
    for role in ("actor", *["critic"] * needs_critic(algorithm), *["reference"] * algorithm.refreshes_reference):
        read_index(checkpoint.folder.at(f"{STATE}/{role}"))


class _Nobody:
    """Stand-in for the engines and the reward workers; the stand-in has no pending work and ignores all requests."""

    pending = 0

    def submit(self, requests: Any) -> None:
        """Ignore requests to generate answers or to compute rewards."""
