"""Pins each Hugging Face Hub data set of a run to a commit, before the data is read."""

from collections.abc import Mapping
from dataclasses import replace

from rltrain.data.hub_datasets import dataset_name, fetch_dataset
from rltrain.data.row_sources import kind_of
from rltrain.monitoring.heartbeat import Heartbeat
from rltrain.settings.schema import Config


def fetch_datasets(config: Config, heartbeat: Heartbeat) -> Config:
    """Download the config's Hugging Face Hub data sets, and return the config with each of them pinned to a commit.

    If the config names a data set without a revision, a resumed run uses the commit that the saved run used.

    Args:
        config: the whole config.
        heartbeat: heartbeat of the run, on whose console the progress of downloads is shown.

    Raises:
        ConfigError: a data set cannot be downloaded. The message of the ConfigError names the cause and a remedy.
    """
    sources = _sources(config.data.train, config.data.val, config.data.val_sets)
    named = {key: source for key, source in sources.items() if _is_on_hub(source, key)}
    kept: Mapping[str, str] = {}
    if named and config.trainer.resume != "never":
        # `rltrain.run.resume` is not imported at the start of the file, because `rltrain.run.resume` imports torch,
        # which is slow.
        from rltrain.run.resume import saved_values

        saved = saved_values(config.trainer).get("data") or {}
        kept = _sources(saved.get("train"), saved.get("val"), saved.get("val_sets") or {})
    for key, source in named.items():
        name, before = dataset_name(source), dataset_name(str(kept.get(key)))
        assert name is not None, "`named` contains only names of data sets on the hub"
        chosen = before if before is not None and name.may_mean(before) else name
        heartbeat.say(f"data.{key}: reading {chosen} from the hub")
        split = "train" if key == "train" else "val"
        with heartbeat.during(f"reading {chosen} from the hub"):
            sources[key] = str(fetch_dataset(chosen, f"data.{key}={source}", key=split))
    if not named:
        return config
    sets = {name: sources[f"val_sets.{name}"] for name in config.data.val_sets}
    data = replace(config.data, train=sources["train"], val=sources.get("val"), val_sets=sets)
    return replace(config, data=data)


def _sources(train: str | None, val: str | None, sets: Mapping[str, str]) -> dict[str, str]:
    """Return the data sources that the config names, as a dict indexed by the config key under `data`."""
    sources = {"train": train, "val": val} | {f"val_sets.{name}": source for name, source in sets.items()}
    return {key: source for key, source in sources.items() if source is not None}


def _is_on_hub(source: str, key: str) -> bool:
    return kind_of(source, f"data.{key}={source}") == "hub"
