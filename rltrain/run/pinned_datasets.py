"""Pins the data sets of a run that come from the hub to commits, before the data is read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from rltrain.data.hub_datasets import dataset_name, fetch_dataset
from rltrain.data.row_sources import kind_of
from rltrain.settings.schema import Config


def fetch_datasets(config: Config, console: Console) -> Config:
    """Download the data sets on the hub, and return the config with pinned names of the data sets.

    A pinned name contains the commit of the data set.

    A resumed run keeps the commit of each data set whose name has no revision.

    Args:
        config: the whole config.
        console: shows the progress of downloads.

    Raises:
        ConfigError: a data set cannot be downloaded. The error message names the cause and a remedy.
    """
    sources: dict[str, Any] = {"train": config.data.train, "val": config.data.val}
    named = {key: source for key, source in sources.items() if source is not None and _is_on_hub(source, key)}
    kept: Mapping[str, Any] = {}
    if named and config.trainer.resume != "never":
        from rltrain.run.resume import saved_values  # imported late, because importing torch takes seconds

        kept = saved_values(config.trainer).get("data") or {}
    for key, source in named.items():
        name, before = dataset_name(source), dataset_name(str(kept.get(key)))
        assert name is not None, "kind_of says that it is one"
        chosen = before if before is not None and name.may_mean(before) else name
        console.print(f"data.{key}: reading {chosen} of the hub", markup=False, highlight=False, soft_wrap=True)
        sources[key] = str(fetch_dataset(chosen, f"data.{key}={source}", key=key))
    return replace(config, data=replace(config.data, **sources)) if named else config


def _is_on_hub(source: str, key: str) -> bool:
    return kind_of(source, f"data.{key}={source}") == "hub"
