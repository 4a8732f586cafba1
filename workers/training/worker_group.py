"""One role on all training ranks: the group splits a batch over the ranks and collects columns or metrics."""

from collections.abc import Callable, Sequence
from typing import Any

from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_costs import RowWork
from workers.cluster.host_groups import Hosts
from workers.training.dispatch import collect_rows, plan_metrics, split_minibatches, split_rows, sum_updates


class WorkerGroup:
    """One role on all ranks of a group of hosts.

    Args:
        hosts: the processes of the ranks.
        role: name of the role in these processes.
        work: estimates the work of the role's model for a row. Without it, ranks are balanced by tokens.
        sequence_ranks: number of neighbouring ranks that split the tokens of each pack. These ranks get the same rows
            and return the same results. A pack may hold `sequence_ranks` times as many tokens.
    """

    def __init__(self, hosts: Hosts, role: str, work: RowWork | None = None, *, sequence_ranks: int = 1) -> None:
        self.hosts, self.role, self.work = hosts, role, work or RowWork()
        self.sequence_ranks, self.size = sequence_ranks, hosts.size // sequence_ranks

    def meanwhile(self, function: Callable[[], None]) -> None:
        """Set a function that is called repeatedly while the driver waits for a call of this group."""
        self.hosts.meanwhile = function

    def start(self, method: str, *args: Any) -> list[Any]:
        """Start a call on every rank with the same arguments.

        The result can be passed to `wait`, or its elements can be used as arguments of other calls.
        """
        return self.hosts.start(self.role, method, [args] * self.hosts.size)

    def wait(self, pending: list[Any], *, beside: Sequence[Hosts] = ()) -> list[Any]:
        """Return the results of `start` by rank. The calls may also depend on calls of the groups in `beside`."""
        return self.hosts.wait(pending, beside=beside)

    def rows(self, method: str, batch: DataProto, *, max_tokens: int) -> DataProto:
        """Run a pass over all rows, split over the ranks, and return the new columns in the batch's row order."""
        lengths, work = self.costs(batch)
        plan = split_rows(lengths, self.size, max_tokens * self.sequence_ranks, work=work)
        shared = self.hosts.share(batch)
        return collect_rows(self._call(method, [(shared, part) for part in plan]), plan)

    def update(
        self, batch: DataProto, minibatches: Sequence[list[int]], *arguments: Any, max_tokens: int
    ) -> dict[str, float]:
        """Train on the mini-batches in order and return metrics over all ranks.

        `arguments` are further arguments of the role's `update` method.
        """
        lengths, work = self.costs(batch)
        tokens = max_tokens * self.sequence_ranks
        plans = split_minibatches(batch, lengths, minibatches, self.size, tokens, work=work)
        shared = self.hosts.share(batch)
        results = self._call("update", [(shared, plan, *arguments) for plan in plans])
        return sum_updates(results) | plan_metrics(plans, lengths, work)

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method with each element of `arguments` on all ranks that split a pack's tokens together.

        Returns:
            One result for each group of `sequence_ranks` ranks.
        """
        every = [own for own in arguments for _ in range(self.sequence_ranks)]
        return self.hosts.call(self.role, method, every)[:: self.sequence_ranks]

    def costs(self, batch: DataProto) -> tuple[list[int], list[int]]:
        """Return the number of tokens in a pack, and the estimated work, of each row."""
        lengths = row_lengths(batch)
        return lengths, self.work.of_rows(lengths, batch.lengths("responses").tolist())


def row_lengths(batch: DataProto) -> list[int]:
    """Return the number of tokens that each row takes in a pack.

    The last response token of a row is left out because it predicts nothing.
    """
    return (batch.lengths("prompts") + batch.lengths("responses").clamp(min=1) - 1).tolist()
