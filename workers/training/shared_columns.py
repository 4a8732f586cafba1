"""Code that shares batch columns through Ray's object store, which gets each column of a training step only once."""

from collections.abc import Sequence
from typing import Any

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

    The loss function and its token selector have one parameter for each column that they read, with the same name as
    the column.
    """
    columns = [*FORWARD, "response_mask", "advantages", "old_log_probs", "rollout_log_probs"]
    for function in loss_functions(algorithm.loss_mode):
        columns += columns_of(function)
    if algorithm.kl_loss.kl_loss_coef > 0:
        columns.append("ref_hidden" if algorithm.kl_loss.full else "ref_log_probs")
    if algorithm.distillation.in_loss:
        columns += ["teacher", "teacher_hidden" if algorithm.distillation.full else "teacher_log_probs"]
    if algorithm.positive_nll_coef > 0:
        columns.append("positive_mask")
    return list(dict.fromkeys(columns))


class SharedColumns:
    """Registry of the columns of the current training step that are already in Ray's object store.

    The batches of one training step have most columns in common. A column is put into the store only if no earlier
    batch of the same step contained the column. When the first batch of a step is shared, the references to the
    previous step's columns are deleted.
    """

    def __init__(self) -> None:
        # Each entry of `_parts` is a pair: a batch of stored columns, and the batch's reference in Ray's object store.
        self._parts: list[tuple[DataProto, Any]] = []

    def share(self, batch: DataProto, columns: Sequence[str], process: WorkerProcess) -> DataProto:
        """Return the requested columns of the batch, in a form that can be passed to several processes.

        Args:
            batch: the batch from which columns are taken.
            columns: names of the requested columns. The returned batch leaves out columns that `batch` lacks.
            process: one of the processes that will read the columns. If `process` is the driver itself, the columns are
                returned without a copy in Ray's object store.
        """
        wanted = batch.select([name for name in columns if name in batch])
        if not process.concurrent:
            return wanted
        if any(not wanted.shares(part, name) for part, _ in self._parts for name in part.keys() if name in wanted):  # noqa: SIM118
            self._parts = []
        there = {name for part, _ in self._parts for name in part.keys()}  # noqa: SIM118 (iterating a batch gives rows)
        if missing := [name for name in wanted.keys() if name not in there]:  # noqa: SIM118
            part = wanted.select(missing)
            self._parts.append((part, process.share(part)))
        used = [reference for part, reference in self._parts if any(name in wanted for name in part.keys())]  # noqa: SIM118
        return Shared.of(used, wanted.keys())
