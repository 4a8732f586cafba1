"""Finds the samples that a run has stored: the parquet tables in the subfolder `rollouts` of the run's output folder.

The module `rltrain.monitoring.sample_files` writes the samples of a run as parquet tables. Each parquet table has one
row per sample of a training step. The rows of a prompt group are adjacent, in the order of their sample numbers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow.parquet as pq

from rltrain.base.errors import ConfigError, described

ROLLOUTS = "rollouts"  # Name of the subfolder of a run's output folder that holds the sample tables.
_TABLE = re.compile(r"(step|failed)_(\d+)\.parquet")


@dataclass(frozen=True)
class SampleFile:
    """A parquet table with the samples of one training step.

    Attributes:
        path: path of the parquet file.
        step: number of the training step.
        failed: True if the training step made no optimizer step, because too many rewards could not be computed.
    """

    path: Path
    step: int
    failed: bool


def sample_files(folder: Path) -> list[SampleFile]:
    """Return the sample tables of a run, in the order of their steps; [] if the run has stored no samples."""
    rollouts = folder / ROLLOUTS
    names = [path.name for path in rollouts.iterdir()] if rollouts.is_dir() else []
    found = [match for name in names if (match := _TABLE.fullmatch(name))]
    files = [SampleFile(rollouts / match[0], int(match[2]), match[1] == "failed") for match in found]
    return sorted(files, key=lambda file: (file.step, file.failed))


@dataclass(frozen=True)
class StoredGroup:
    """The samples of one prompt group, which are adjacent rows of a table.

    Attributes:
        path: path of the parquet table.
        first: index of the group's first row in the table.
        size: number of samples in the prompt group.
    """

    path: Path
    first: int
    size: int


def stored_groups(folder: Path) -> Mapping[int, StoredGroup]:
    """Return a dict that maps group numbers (`uid`) to the prompt groups whose samples a run has stored.

    Raises:
        ConfigError: a sample table cannot be read.
    """
    groups: dict[int, StoredGroup] = {}
    # A training step that failed and was repeated after a resume has two sample tables. If a prompt group is in both
    # sample tables of a repeated training step, the samples of the successful attempt are used, because `sample_files`
    # lists the table of the successful attempt first.
    for file in sample_files(folder):
        try:
            uids: list[int] = pq.read_table(file.path, columns=["uid"])["uid"].to_pylist()
        except Exception as error:  # Pyarrow may raise any exception on a damaged file.
            raise ConfigError(
                f"{file.path}: cannot be read ({described(error, 120)}); copy the run's folder again"
            ) from None
        first = 0
        for uid, rows in groupby(uids):
            size = len(list(rows))
            groups.setdefault(uid, StoredGroup(file.path, first, size))
            first += size
    return groups
