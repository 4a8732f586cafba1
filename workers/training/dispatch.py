"""Pure functions, testable without Ray, that split the rows of a batch over ranks and collect the ranks' results."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rltrain.algorithms import effective_sample_size
from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_assignment import RowIndices, assign_minibatch
from rltrain.batch.shared_starts import SharedStarts, no_shared_starts

# Names of the metrics that `overhead_metrics` returns.
OVERHEAD_METRICS = ("filler_fraction", "idle_fraction")


@dataclass(frozen=True)
class Minibatch:
    """One rank's part of a mini-batch, with token and sequence counts of the whole mini-batch over all ranks.

    Attributes:
        microbatches: row indices for each forward and backward pass of this rank. For a micro-batch without rows, the
            rank still runs forward and backward, with a loss of weight zero.
        num_tokens: number of trained tokens in the whole mini-batch.
        num_sequences: number of rows in the whole mini-batch with at least one trained token.
        num_positive_tokens: number of trained tokens in correct answers of the whole mini-batch, or 0 if the batch has
            no column `positive_mask`. The language-model loss of correct answers is divided by `num_positive_tokens`.
    """

    microbatches: list[RowIndices]
    num_tokens: int
    num_sequences: int
    num_positive_tokens: int = 0


@dataclass
class UpdateResult:
    """Result of one update of the weights on one rank.

    Attributes:
        sums: for each metric, a sum over this rank's trained tokens. A metric's value is the total of the sums of all
            ranks, divided by `tokens`.
        losses: for each named term of the loss, its sum over the mini-batches. The loss of a mini-batch is normalized
            by the token or sequence count of the whole mini-batch.
        tokens: number of trained tokens on all ranks, in all mini-batches whose optimizer step was not skipped.
        steps: metrics of each optimizer step, which are the same on all ranks. The metric `skipped` is 1 if the
            optimizer step was skipped because of non-finite values.
        first: for each metric, a sum over this rank's trained tokens in the first mini-batch, computed before the first
            optimizer step.
        first_tokens: number of this rank's trained tokens in the first mini-batch.
        supervised_loss: sum of the supervised loss over this rank's tokens of supervised answers, in nats.
        supervised_tokens: number of tokens of supervised answers on all ranks, in all mini-batches whose optimizer step
            was not skipped; None if the update has no supervised loss.
    """

    sums: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    steps: list[dict[str, float]] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    first_tokens: int = 0
    supervised_loss: float = 0.0
    supervised_tokens: int | None = None

    @property
    def finite(self) -> bool:
        """Return whether all terms of the loss are finite."""
        return all(map(math.isfinite, (*self.losses.values(), self.supervised_loss)))

    def add(self, part: "UpdateResult", tokens: int, step: dict[str, float]) -> None:
        """Add the results of a mini-batch to the running totals of the whole update.

        If the optimizer step of the mini-batch was skipped, the sums, losses and token counts of `part` are ignored.

        Args:
            part: results of one mini-batch on this rank.
            tokens: number of trained tokens in the mini-batch, over all ranks.
            step: metrics of the mini-batch's optimizer step.
        """
        kept = not step["skipped"]
        for total, values in ((self.sums, part.sums), (self.losses, part.losses), (self.first, part.first)):
            for name, value in values.items():
                total[name] = total.get(name, 0.0) + (value if kept else 0.0)
        self.tokens += tokens if kept else 0
        self.first_tokens += part.first_tokens if kept else 0
        if part.supervised_tokens is not None:
            self.supervised_loss += part.supervised_loss if kept else 0.0
            self.supervised_tokens = (self.supervised_tokens or 0) + (part.supervised_tokens if kept else 0)
        self.steps.append(step)


def split_rows(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int,
    *,
    work: Sequence[int] | None = None,
    starts: SharedStarts | None = None,
) -> list[list[RowIndices]]:
    """Split all rows of a batch into micro-batches for each rank, and return the micro-batches.

    The docstring of `assign_minibatch` explains the arguments `work` and `starts`. The micro-batches of the last two
    splits are cached, because several roles split the same batch in each training step.
    """
    shared = None if starts is None else (tuple(starts.place), tuple(starts.tokens), tuple(starts.work))
    return _split_rows(tuple(lengths), ranks, max_tokens, None if work is None else tuple(work), shared)


@functools.lru_cache(maxsize=2)
def _split_rows(
    lengths: tuple[int, ...],
    ranks: int,
    max_tokens: int,
    work: tuple[int, ...] | None,
    shared: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None,
) -> list[list[RowIndices]]:
    starts = None if shared is None else SharedStarts(*shared)
    return assign_minibatch(lengths, list(range(len(lengths))), ranks, max_tokens, work=work, starts=starts)


def split_minibatches(
    batch: DataProto,
    lengths: Sequence[int],
    minibatches: Sequence[RowIndices],
    ranks: int,
    max_tokens: int,
    *,
    work: Sequence[int] | None = None,
    starts: SharedStarts | None = None,
) -> list[list[Minibatch]]:
    """Return, for each rank, the rank's part of each mini-batch.

    Besides the rank's rows, each `Minibatch` object holds three counts of the whole mini-batch over all ranks: the
    number of trained tokens, the number of rows with a trained token, and the number of trained tokens at which
    `positive_mask` is True.

    Rows without a trained token are in no micro-batch, because such rows would add exactly zero to the gradient. The
    docstring of `assign_minibatch` explains the arguments `work` and `starts`.
    """
    trained = _row_sums(batch, batch.values("response_mask"))
    positive = torch.zeros_like(trained)
    if "positive_mask" in batch:
        positive = _row_sums(batch, batch.values("positive_mask") & batch.values("response_mask"))
    by_rank: list[list[Minibatch]] = [[] for _ in range(ranks)]
    for rows in minibatches:
        counts = trained[rows]
        whole = int(counts.sum()), int((counts > 0).sum()), int(positive[rows].sum())
        needed = [row for row, count in zip(rows, counts.tolist(), strict=True) if count]
        parts = assign_minibatch(lengths, needed, ranks, max_tokens, work=work, starts=starts)
        for minibatches_of_rank, part in zip(by_rank, parts, strict=True):
            minibatches_of_rank.append(Minibatch(part, *whole))
    return by_rank


def _row_sums(batch: DataProto, mask: Tensor) -> Tensor:
    """Return, for each row of the batch, the number of response tokens at which `mask` is True.

    `mask` (N,) has one value for each of the N response tokens of all rows.
    """
    return torch.segment_reduce(mask.float(), "sum", offsets=batch.offsets("response_mask"))


def rows_read(ranks: Sequence[Sequence[RowIndices]], lengths: Sequence[int]) -> list[RowIndices]:
    """Return for each rank the indices of the rows that it reads to process its micro-batches, in ascending order.

    For an empty micro-batch, a rank processes the shortest row of the batch, so the rank must also read this row.

    Args:
        ranks: for each rank, the row indices of each of its micro-batches.
        lengths: number of tokens of each row of the batch.
    """
    stand_in = _shortest(lengths)
    found = []
    for microbatches in ranks:
        rows = {row for rows in microbatches for row in rows}
        if stand_in is not None and not all(microbatches):
            rows.add(stand_in)
        found.append(sorted(rows))
    return found


def _shortest(lengths: Sequence[int]) -> int | None:
    """Return the index of the shortest row, or None if there are no rows."""
    return min(range(len(lengths)), key=lambda row: lengths[row], default=None)


def renumbered(microbatches: Sequence[RowIndices], rows: RowIndices) -> list[RowIndices]:
    """Convert row indices of the whole batch to indices into `rows`, the list of rows that the rank reads."""
    place = {row: number for number, row in enumerate(rows)}
    return [[place[row] for row in some] for some in microbatches]


def overhead_metrics(
    by_rank: Sequence[Sequence[Minibatch]],
    lengths: Sequence[int],
    work: Sequence[int],
    starts: SharedStarts | None = None,
) -> dict[str, float]:
    """Return metrics of the overhead that is caused by splitting an update over ranks.

    Returns:
        `filler_fraction` and `idle_fraction`. `filler_fraction` is the fraction of processed tokens that belong to
        filler rows, which a rank processes if it has no rows of its own in a micro-batch. `idle_fraction` is the
        estimated fraction of time that the ranks spend waiting for the slowest rank of each micro-batch.
    """
    stand_in = _shortest(lengths)
    starts = starts or no_shared_starts(len(lengths))
    needed = filler = busy = elapsed = 0
    for ranks in zip(*by_rank, strict=True):
        for passes in zip(*(minibatch.microbatches for minibatch in ranks), strict=True):
            totals = [starts.total(rows, lengths, work) for rows in passes]
            needed += sum(total.tokens for total in totals)
            filler += sum(lengths[stand_in] for rows in passes if not rows) if stand_in is not None else 0
            costs = [total.cost for total in totals]
            busy, elapsed = busy + sum(costs), elapsed + len(costs) * max(costs)
    return {
        "filler_fraction": filler / max(needed + filler, 1),
        "idle_fraction": 1 - busy / elapsed if elapsed else 0.0,
    }


def collect_rows(parts: Sequence[DataProto], assigned: Sequence[Sequence[RowIndices]]) -> DataProto:
    """Concatenate the rows that the ranks return, in the row order of the original batch."""
    order = torch.tensor([row for rank in assigned for rows in rank for row in rows])
    return DataProto.concat(parts, rows=order.argsort())


def sum_updates(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Combine the results of all ranks into the metrics of one update, without timings.

    Token metrics are means over trained tokens, and `teacher_kl` is the mean over the trained tokens of answers that a
    teacher has scored. Losses, `grad_norm` and `lr` are means over optimizer steps, and `grad_norm_max` is the maximum
    over optimizer steps. `skipped_updates` is the number of skipped optimizer steps. Skipped optimizer steps are
    excluded from all means except the mean of `lr`. If all optimizer steps were skipped, losses, gradient norms and
    most token metrics are NaN.

    `sft_tokens` is the number of tokens of supervised answers, and `sft_loss` is the mean supervised loss of a token of
    a supervised answer. If `sft_tokens` is 0, the metric `sft_loss` is missing.
    """
    first = results[0]
    kept = [step for step in first.steps if not step["skipped"]]
    tokens, count = float(max(first.tokens, 1)), float(max(len(kept), 1))
    if first.steps and not kept:
        tokens = count = math.nan
    metrics = {name: sum(r.sums[name] for r in results) / tokens for name in first.sums}
    metrics |= {name: sum(r.losses[name] for r in results) / count for name in first.losses}
    # The KL to the teachers is averaged only over the tokens of answers that a teacher has scored.
    if "taught_fraction" in metrics:
        taught, kl = metrics.pop("taught_fraction"), metrics.pop("teacher_kl")
        metrics |= {"teacher_kl": kl / taught} if taught else {}
    first_tokens = sum(r.first_tokens for r in results)
    begun = {name: sum(r.first[name] for r in results) for name in first.first}
    if "same_policy" in begun:
        metrics["same_policy_gap"] = begun["same_policy"] / max(first_tokens, 1)
    if "weight" in begun:
        metrics |= {f"engine_{name}": value for name, value in divergence(begun, first_tokens).items()}
    if first.supervised_tokens is not None:
        metrics["sft_tokens"] = float(first.supervised_tokens)
    if first.supervised_tokens:
        metrics["sft_loss"] = sum(r.supervised_loss for r in results) / first.supervised_tokens
    if first.steps:
        metrics["grad_norm"] = sum(step["grad_norm"] for step in kept) / count
        metrics["grad_norm_max"] = max((step["grad_norm"] for step in kept), default=math.nan)
        metrics["lr"] = sum(step["lr"] for step in first.steps) / len(first.steps)
        metrics["skipped_updates"] = sum(step["skipped"] for step in first.steps)
    return metrics


def divergence(sums: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Return metrics of the difference between the actor's and the engine's log-probs.

    Args:
        sums: dictionary that `rollout_diagnostics` returned. Each value of `sums` is the sum, over tokens, of a
            quantity that compares the actor's log-prob of a token with the engine's log-prob of the token.
        tokens: number of tokens over which the values of `sums` were summed.

    Returns:
        A dictionary of four metrics: `gap` (mean absolute difference of the log-probs, in nats), `kl` and `k3` (two
        estimates of the mean KL(engine || actor), in nats), and `effective_sample_size`.
    """
    count = max(tokens, 1)
    return {
        "gap": float(sums["abs"]) / count,
        "kl": float(sums["kl"]) / count,
        "k3": float(sums["k3"]) / count,
        "effective_sample_size": float(effective_sample_size(sums["weight"], sums["weight_squared"], tokens)),
    }
