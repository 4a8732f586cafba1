"""Code that shares batches through Ray's object store. Each rank receives only the rows and columns that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rltrain.algorithms import columns_of, loss_functions
from rltrain.batch.data_proto import DataProto
from rltrain.settings.algorithm_config import AlgorithmConfig
from workers.cluster.processes import Shared, WorkerProcess

# Names of the columns that a forward pass reads. A batch without conversations lacks `context_starts`.
FORWARD = ("prompts", "responses", "context_starts")
SUPERVISED = (*FORWARD, "response_mask")  # Names of the columns of supervised answers that an update reads.
CRITIC_UPDATE = (*FORWARD, "response_mask", "values", "returns")


def log_probs_columns(algorithm: AlgorithmConfig) -> list[str]:
    """Return the names of the columns that the actor reads to compute log-probs before the update."""
    return [*FORWARD, *["ref_hidden"] * algorithm.kl_in_reward.full]


def update_columns(algorithm: AlgorithmConfig) -> list[str]:
    """Return the names of the columns that the actor's update reads. A batch can lack some of the returned columns.

    The loss function has one parameter for each column that it reads, with the same name as the column. The columns
    that only the loss's token selector reads are left out, because the driver selects the tokens.
    """
    columns = [*FORWARD, "response_mask", "advantages", "old_log_probs", "rollout_log_probs"]
    columns += columns_of(loss_functions(algorithm.loss_mode)[0])
    if algorithm.kl_loss.kl_loss_coef > 0:
        columns.append("ref_hidden" if algorithm.kl_loss.full else "ref_log_probs")
    if algorithm.distillation.in_loss:
        columns += ["teacher", "teacher_hidden" if algorithm.distillation.full else "teacher_log_probs"]
    if algorithm.positive_nll_coef > 0:
        columns.append("positive_mask")
    return list(dict.fromkeys(columns))


@dataclass(frozen=True)
class _Part:
    """Some rows and columns of the step's batch, which are in Ray's object store.

    Attributes:
        rows: row numbers of the rows in the batch, in ascending order.
        columns: names of the columns.
        reference: Ray reference to a batch with only these rows and columns.
    """

    rows: np.ndarray
    columns: list[str]
    reference: Any


class SharedColumns:
    """Registry of the rows and columns of the current training step that each rank can already read.

    Each rank reads only some of the rows. The batches of one training step have most columns in common. Only the rows
    and columns that a rank has not yet received in the step are put into Ray's object store. When the first batch of a
    step is shared, the references of the previous step are deleted.
    """

    def __init__(self) -> None:
        self._sources: dict[str, DataProto] = {}  # for each column, a batch that has the column with all its rows
        self._parts: dict[int, list[_Part]] = {}  # for each receiver, the parts that were made for the receiver

    def share(
        self, batch: DataProto, columns: Sequence[str], rows: Sequence[Sequence[int]], process: WorkerProcess
    ) -> list[DataProto]:
        """Return for each receiver the rows and columns that it reads, in a form that can be passed to processes.

        Args:
            batch: the batch from which rows and columns are taken.
            columns: names of the requested columns. Columns that `batch` lacks are left out.
            rows: for each receiver, the row numbers of the rows that the receiver reads, in ascending order. Several
                processes can be one receiver, because the result can be passed to any number of processes.
            process: one of the processes that read the batch. If `process` is the driver itself, nothing is put into
                Ray's object store.
        """
        wanted = batch.select([name for name in columns if name in batch])
        if not process.concurrent:
            return [wanted if len(some) == len(wanted) else wanted[some] for some in rows]
        names = wanted.keys()
        if any(name in self._sources and not wanted.shares(self._sources[name], name) for name in names):
            self._sources, self._parts = {}, {}
        self._sources |= {name: wanted for name in names if name not in self._sources}
        return [
            self._shared_with(receiver, wanted, np.array(some, dtype=np.int64), process)
            for receiver, some in enumerate(rows)
        ]

    def _shared_with(self, receiver: int, wanted: DataProto, rows: np.ndarray, process: WorkerProcess) -> DataProto:
        """Put what the receiver lacks into Ray's object store, and return the rows of `wanted` for the receiver."""
        parts, names = self._parts.setdefault(receiver, []), wanted.keys()
        missing: dict[bytes, tuple[np.ndarray, list[str]]] = {}
        for name in names:
            there = [part.rows for part in parts if name in part.columns]
            lacking = rows[~np.isin(rows, np.concatenate(there))] if there else rows
            if len(lacking) or not there:
                missing.setdefault(lacking.tobytes(), (lacking, []))[1].append(name)
        for lacking, columns in missing.values():
            chosen = wanted.select(columns)
            part = chosen if len(lacking) == len(chosen) else chosen[lacking]
            parts.append(_Part(lacking, columns, process.share(part)))
        used = [part for part in parts if _reads(part, names, rows)]
        return Shared([part.reference for part in used], [part.rows for part in used], rows, names).as_batch()


def _reads(part: _Part, columns: Sequence[str], rows: np.ndarray) -> bool:
    """Return whether a receiver that reads the given columns and rows reads any value of the part."""
    return any(name in part.columns for name in columns) and (not len(rows) or bool(np.isin(rows, part.rows).any()))
