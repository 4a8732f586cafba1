"""One role on all training ranks: a batch goes out in parts, and columns or metrics come back."""

from collections.abc import Callable, Sequence
from typing import Any

from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_costs import RowWork
from workers.cluster.host_groups import Hosts
from workers.training.dispatch import collect_rows, plan_metrics, split_minibatches, split_rows, sum_updates


class WorkerGroup:
    """One role on all ranks of a group of hosts.

    Args:
        hosts: the processes.
        role: which of their roles.
        work: what its model computes for a row; without it, ranks are balanced by tokens.
        sequence_ranks: neighbouring ranks that share out the tokens of each pack: they get the same rows and give the
            same results, and a pack may have so many times the tokens.
    """

    def __init__(self, hosts: Hosts, role: str, work: RowWork | None = None, *, sequence_ranks: int = 1) -> None:
        self.hosts, self.role, self.work = hosts, role, work or RowWork()
        self.sequence_ranks, self.size = sequence_ranks, hosts.size // sequence_ranks

    def meanwhile(self, function: Callable[[], None]) -> None:
        """Call this again and again while a call of this group is waited for."""
        self.hosts.meanwhile = function

    def start(self, method: str, *args: Any) -> list[Any]:
        """Start a call on every rank with the same arguments; `wait` for the results, or pass them on."""
        return self.hosts.start(self.role, method, [args] * self.hosts.size)

    def wait(self, pending: list[Any], *, beside: Sequence[Hosts] = ()) -> list[Any]:
        """Results by rank of `start`, which may depend on calls of the groups `beside` too."""
        return self.hosts.wait(pending, beside=beside)

    def rows(self, method: str, batch: DataProto, *, max_tokens: int) -> DataProto:
        """A pass over all rows, shared out over the ranks; the new columns come back in the batch's order."""
        lengths, work = self.costs(batch)
        plan = split_rows(lengths, self.size, max_tokens * self.sequence_ranks, work=work)
        shared = self.hosts.share(batch)
        return collect_rows(self._call(method, [(shared, part) for part in plan]), plan)

    def update(
        self, batch: DataProto, minibatches: Sequence[list[int]], *arguments: Any, max_tokens: int
    ) -> dict[str, float]:
        """Train on the mini-batches in order, with further arguments of the role; returns metrics over all ranks."""
        lengths, work = self.costs(batch)
        tokens = max_tokens * self.sequence_ranks
        plans = split_minibatches(batch, lengths, minibatches, self.size, tokens, work=work)
        shared = self.hosts.share(batch)
        results = self._call("update", [(shared, plan, *arguments) for plan in plans])
        return sum_updates(results) | plan_metrics(plans, lengths, work)

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Each of these arguments for all ranks that share a pack's tokens; one result of each such group."""
        every = [own for own in arguments for _ in range(self.sequence_ranks)]
        return self.hosts.call(self.role, method, every)[:: self.sequence_ranks]

    def costs(self, batch: DataProto) -> tuple[list[int], list[int]]:
        """Tokens in a pack, and estimated work, of each row."""
        lengths = row_lengths(batch)
        return lengths, self.work.of_rows(lengths, batch.lengths("responses").tolist())


def row_lengths(batch: DataProto) -> list[int]:
    """Tokens that each row takes in a pack: the last response token predicts nothing and is left out."""
    return (batch.lengths("prompts") + batch.lengths("responses").clamp(min=1) - 1).tolist()
