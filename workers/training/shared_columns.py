"""Sharing of batch columns through Ray's object store, into which each column of a step's batch is put only once."""

from collections.abc import Sequence
from typing import Any

from rltrain.algorithms import columns_of, loss_functions
from rltrain.batch.data_proto import DataProto
from rltrain.settings.algorithm_config import AlgorithmConfig
from workers.cluster.processes import Shared, WorkerProcess

FORWARD = ("prompts", "responses")  # columns that a forward pass reads
CRITIC_UPDATE = (*FORWARD, "response_mask", "values", "returns")


def log_probs_columns(algorithm: AlgorithmConfig) -> list[str]:
    """Return the names of the columns that the actor reads to compute log-probs before the update."""
    return [*FORWARD, *["ref_hidden"] * algorithm.kl_in_reward.full]


def update_columns(algorithm: AlgorithmConfig) -> list[str]:
    """Return the names of the columns that the actor's update reads. A batch may lack some of these columns.

    The parameters of the loss and of its token selector are named after the columns that these functions read.
    """
    columns = [*FORWARD, "response_mask", "advantages", "old_log_probs", "rollout_log_probs"]
    for function in loss_functions(algorithm.loss_mode):
        columns += columns_of(function)
    if algorithm.kl_loss.kl_loss_coef > 0:
        columns.append("ref_hidden" if algorithm.kl_loss.full else "ref_log_probs")
    return list(dict.fromkeys(columns))


class SharedColumns:
    """The columns of the current step's batch that are in Ray's object store.

    The batches of one step have most of their columns in common. A column is put into the store only if no earlier
    batch of the step had it. The columns of a step are forgotten when the first batch of the next step is shared.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[DataProto, Any]] = []  # columns, and the object reference to them

    def share(self, batch: DataProto, columns: Sequence[str], process: WorkerProcess) -> DataProto:
        """Return the named columns that the batch has, in a form that can be passed to several processes.

        Args:
            batch: the batch.
            columns: names of the columns.
            process: one of the processes. If the process is the driver, the columns are returned as they are.
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
