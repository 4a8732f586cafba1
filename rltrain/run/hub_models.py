"""Pins each Hugging Face Hub model of a run to a commit, and downloads the files of the model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rltrain.data.builtin_models import is_builtin
from rltrain.data.hub import HubName, fetch, hub_name
from rltrain.monitoring.heartbeat import Heartbeat
from rltrain.settings.distillation_config import TEACHER_KEY
from rltrain.settings.reward_config import REWARD_MODEL_KEY
from rltrain.settings.schema import Config


def fetch_models(config: Config, heartbeat: Heartbeat) -> Config:
    """Download the Hugging Face Hub models of a run, and return the config with each model pinned to a commit.

    If the config names a model without a revision, a resumed run uses the commit that the saved run used.

    Args:
        config: the whole config.
        heartbeat: heartbeat of the run, on whose console the progress of downloads is shown.

    Raises:
        ConfigError: a model cannot be downloaded. The message of the ConfigError names the cause and a remedy.
    """
    distillation = config.algorithm.distillation
    paths = {"model.path": config.model.path}
    paths |= {model.key: model.path for model in config.reward.models}
    paths |= {teacher.key: teacher.path for teacher in distillation.models}
    names = {key: hub_name(path) for key, path in paths.items() if not is_builtin(path)}
    wanted = {key: name for key, name in names.items() if name is not None}
    kept: dict[tuple[str, str], str] = {}
    if config.trainer.resume != "never" and any(name.revision is None for name in wanted.values()):
        from rltrain.run.resume import saved_values  # Importing `rltrain.run.resume` also imports torch, which is slow.

        kept = _commits(saved_values(config.trainer))
    for key, name in wanted.items():
        from rltrain.monitoring.console import downloading  # This import is slow, and most runs download no model.

        commit = kept.get((key, name.model))
        chosen = name if name.revision or commit is None else HubName(name.model, commit)
        with downloading(heartbeat, str(chosen)) as on_bytes:
            paths[key] = fetch(chosen, f"{key}={paths[key]}", on_bytes=on_bytes)
    models = [replace(model, path=paths[model.key]) for model in config.reward.models]
    teachers = [replace(teacher, path=paths.get(teacher.key, teacher.path)) for teacher in distillation.teachers]
    algorithm = replace(config.algorithm, distillation=replace(distillation, teachers=teachers))
    return replace(
        config,
        model=replace(config.model, path=paths["model.path"]),
        reward=replace(config.reward, models=models),
        algorithm=algorithm,
    )


def _commits(saved: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return the commit of each pinned model in a run's config, in a dict with keys (config key, model name).

    The key of the model `ORG/NAME@COMMIT` contains the name `ORG/NAME`, without the commit.
    """
    model = saved.get("model")
    found = {"model.path": model.get("path")} if isinstance(model, Mapping) else {}
    for form, entry in _entries(saved):
        found[form.format(entry.get("name"))] = entry.get("path")
    parts = {key: str(path).partition("@") for key, path in found.items()}
    return {(key, model): revision for key, (model, _, revision) in parts.items() if HubName(model, revision).pinned}


def _entries(saved: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (format string of the config key, config entry) for each reward model and teacher in a run's config.

    A yielded format string becomes a config key when the name of the reward model or teacher is inserted.
    """
    for form, path in (
        (REWARD_MODEL_KEY, ("reward", "models")),
        (TEACHER_KEY, ("algorithm", "distillation", "teachers")),
    ):
        entries: Any = saved
        for name in path:
            entries = entries.get(name) if isinstance(entries, Mapping) else None
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, Mapping):
                yield form, entry
