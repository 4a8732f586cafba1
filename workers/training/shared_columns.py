"""Code that shares batches through Ray's object store. Each rank receives only the rows and columns that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rltrain.algorithms import columns_of, loss_functions
from rltrain.batch.contexts import EXPERTS
from rltrain.batch.data_proto import DataProto
from rltrain.batch.images import IMAGES
from rltrain.batch.shared_starts import SharedStarts, shared_starts
from rltrain.settings.algorithm_config import AlgorithmConfig
from workers.cluster.processes import Shared, WorkerProcess
from workers.training.kept_columns import KeptPlaces

# Names of the columns that a forward pass reads. Only batches of conversations have the column `context_starts`, and
# only batches of prompts with images have the columns of images.
FORWARD = ("prompts", "responses", "context_starts", *IMAGES)
# Names of the columns that an update reads from a batch of supervised answers.
SUPERVISED = (*FORWARD, "response_mask")
CRITIC_UPDATE = (*FORWARD, "response_mask", "values", "returns")


def log_probs_columns(algorithm: AlgorithmConfig) -> list[str]:
    """Return the names of the columns that the actor reads to compute log-probs before the update."""
    return [*FORWARD, *EXPERTS, *["ref_hidden"] * algorithm.kl_in_reward.full]


def update_columns(algorithm: AlgorithmConfig) -> list[str]:
    """Return the names of all columns that the actor's update can read.

    A batch may lack some of the columns that `update_columns` returns. The loss function has one parameter for each
    column that it reads, with the same name as the column. The columns that only the loss's token selector reads are
    left out, because the driver selects the tokens.
    """
    columns = [
        *FORWARD,
        *EXPERTS,
        "response_mask",
        "advantages",
        "rollout_log_probs",
        "old_log_probs",
        "has_old_log_probs",
    ]
    columns += columns_of(loss_functions(algorithm.loss_mode)[0])
    if algorithm.kl_loss.kl_loss_coef > 0:
        columns.append("ref_hidden" if algorithm.kl_loss.full else "ref_log_probs")
    if algorithm.distillation.in_loss:
        columns += ["teacher", "teacher_hidden" if algorithm.distillation.full else "teacher_log_probs"]
    if algorithm.positive_nll_coef > 0:
        columns.append("positive_mask")
    return list(dict.fromkeys(columns))


# A rank that needs some rows of a column may have received a part of the needed rows earlier in the same training step.
# If the rank has received at most the fraction FEW of the needed rows, the driver puts all needed rows of the column
# into Ray's object store as one new object. Sending a few rows to the rank a second time costs the driver less than
# creating an additional object in Ray's object store.
FEW = 0.1


@dataclass(frozen=True)
class _Part:
    """Some rows and columns of the training step's batch, stored as one object in Ray's object store.

    Attributes:
        rows: indices, in the whole batch, of the rows that this part of the batch contains, in ascending order.
        columns: names of the columns that this part of the batch contains.
        reference: Ray reference to a batch that has only the rows `rows` and the columns `columns`.
    """

    rows: np.ndarray
    columns: frozenset[str]
    reference: Any

    def holds(self, rows: np.ndarray) -> np.ndarray | None:
        """Return a bool mask over the argument `rows`: True for each row that this part of the batch contains.

        If the argument `rows` lists exactly the rows of this part of the batch, `holds` returns None instead of a mask.
        """
        return None if np.array_equal(rows, self.rows) else np.isin(rows, self.rows)


class SharedColumns:
    """Registry of the rows and columns of the current training step that each rank has already received.

    Each rank reads only some rows of a batch. The batches of one training step have most columns in common. Only the
    rows and columns that a rank has not yet received in the step are put into Ray's object store. Exception: see
    `FEW`. The method `share` deletes the Ray references to all earlier data when a column has the name of an earlier
    column but lies in different memory, as in the first batch of the next training step.
    """

    def __init__(self) -> None:
        self._sources: dict[str, DataProto] = {}  # Maps each column to a batch with all rows of the column.
        self._parts: dict[int, list[_Part]] = {}  # Maps each receiver to the `_Part` objects stored for it.
        self.kept = KeptPlaces()  # The columns that the ranks keep instead of sending them to the driver.
        self._starts: tuple[DataProto, SharedStarts] | None = None  # The last result of `starts`, and its batch.

    def starts(self, batch: DataProto) -> SharedStarts:
        """Return the tokens that the rows of a batch share at their starts. The last result is kept for other roles."""
        names = [name for name in (*FORWARD, "uid") if name in batch]
        if self._starts is not None:
            known, found = self._starts
            if known.keys() == names and all(batch.shares(known, name) for name in names):
                return found
        read = batch.select(names)
        found = shared_starts(read)
        self._starts = read, found
        return found

    def share(
        self, batch: DataProto, columns: Sequence[str], rows: Sequence[Sequence[int]], process: WorkerProcess
    ) -> list[DataProto]:
        """Return one batch for each receiver, with the rows and columns that the receiver reads.

        Args:
            batch: the batch from which rows and columns are taken.
            columns: names of the requested columns. Columns that `batch` lacks are left out.
            rows: for each receiver, the row numbers of the rows that the receiver reads, in ascending order. Processes
                that read the same rows can count as one receiver, because the batch for a receiver can be passed to any
                number of processes.
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
        read = [np.array(some, dtype=np.int64) for some in rows]
        used: list[list[_Part]] = []
        missing: dict[tuple[str, ...], list[tuple[int, np.ndarray]]] = {}
        for receiver, own in enumerate(read):
            there, lacking = _divided(self._parts.setdefault(receiver, []), names, own)
            used.append(there)
            for lacked, some_rows in lacking:
                missing.setdefault(lacked, []).append((receiver, some_rows))
        for lacked, needs in missing.items():
            for (receiver, _), part in zip(needs, _put(wanted.select(lacked), needs, process), strict=True):
                self._parts[receiver].append(part)
                used[receiver].append(part)
        return [
            Shared([part.reference for part in parts], [part.rows for part in parts], own, names).as_batch()
            for own, parts in zip(read, used, strict=True)
        ]


def _divided(
    parts: Sequence[_Part], columns: Sequence[str], rows: np.ndarray
) -> tuple[list[_Part], list[tuple[tuple[str, ...], np.ndarray]]]:
    """Find out which rows and columns a receiver has already received, and which rows and columns are missing.

    Args:
        parts: parts of the batch that were put into Ray's object store for the receiver earlier in this training step.
        columns: names of the columns that the receiver reads.
        rows: row numbers of the rows that the receiver reads.

    Returns:
        Two lists. The first list contains the parts that hold some of the rows and columns that the receiver reads. The
        second list describes the data that must still be sent to the receiver: each element is a pair of column names
        and the numbers of the rows that the receiver lacks in these columns.
    """
    used, lacks = set[int](), dict[tuple[str, ...], np.ndarray]()
    held = [part.holds(rows) for part in parts]
    by_parts: dict[tuple[int, ...], list[str]] = {}
    for name in columns:
        by_parts.setdefault(tuple(k for k, part in enumerate(parts) if name in part.columns), []).append(name)
    # Names of the columns of which all rows that the receiver reads are sent, even rows that it already has, because it
    # has at most the fraction `FEW` of them.
    whole: list[str] = []
    for numbers, names in by_parts.items():
        if any(held[number] is None for number in numbers):
            used.update(number for number in numbers if held[number] is None)
            continue
        masks = [mask for number in numbers if (mask := held[number]) is not None]
        there = np.logical_or.reduce(masks) if masks else np.zeros(len(rows), bool)
        if not len(rows) or there.mean() <= FEW:
            whole += names
        else:
            used.update(number for number, mask in zip(numbers, masks, strict=True) if mask.any())
            if not there.all():
                lacks[tuple(names)] = rows[~there]
    if whole:
        lacks[tuple(whole)] = rows
    return [parts[number] for number in sorted(used)], list(lacks.items())


def _put(batch: DataProto, needs: Sequence[tuple[int, np.ndarray]], process: WorkerProcess) -> list[_Part]:
    """Put rows of a batch into Ray's object store, and return one `_Part` for each receiver.

    The rows of all receivers are copied in one operation, because a separate copy for each receiver would traverse the
    whole batch each time.

    Args:
        batch: the batch, with only the columns that the receivers need.
        needs: for each receiver, a pair of the receiver's index and the indices of the rows that the receiver needs.
        process: one of the processes that will read the rows.
    """
    parts = batch[np.concatenate([rows for _, rows in needs])].ranges([len(rows) for _, rows in needs])
    columns = frozenset(batch.keys())
    return [_Part(rows, columns, process.share(part)) for (_, rows), part in zip(needs, parts, strict=True)]
