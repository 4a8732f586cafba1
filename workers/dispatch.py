"""How a call on a batch is split over ranks and its results are collected: pure, so that it is tested without Ray."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rltrain.batching import Rows, plan_minibatch
from rltrain.protocol import DataProto


@dataclass(frozen=True)
class Minibatch:
    """One rank's part of a mini-batch, and the counts of the whole mini-batch over all ranks.

    Attributes:
        microbatches: rows of each forward and backward pass; an empty one still runs, with weight zero.
        num_tokens: trained tokens of the whole mini-batch.
        num_sequences: rows of the whole mini-batch with at least one trained token.
    """

    microbatches: list[Rows]
    num_tokens: int
    num_sequences: int


@dataclass
class UpdateResult:
    """What one rank's update came to.

    Attributes:
        sums: sums over this rank's trained tokens, by metric; over all ranks they are divided by `tokens`.
        losses: parts of the loss, already divided by the counts of the whole mini-batch, summed over mini-batches.
        tokens: trained tokens over all mini-batches and ranks.
        steps: per optimizer step, values that are the same on all ranks.
        first: sums over this rank's trained tokens of the first mini-batch, where the weights are still the old ones.
        first_tokens: trained tokens of the first mini-batch on this rank.
    """

    sums: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    steps: list[dict[str, float]] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    first_tokens: int = 0


def split_rows(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[Rows]]:
    """Micro-batches of each rank for a pass over all rows."""
    return plan_minibatch(lengths, list(range(len(lengths))), ranks, max_tokens)


def split_minibatches(
    batch: DataProto, lengths: Sequence[int], minibatches: Sequence[Rows], ranks: int, max_tokens: int
) -> list[list[Minibatch]]:
    """Each rank's mini-batches, all with the counts of the whole."""
    trained = torch.segment_reduce(batch.values("response_mask").float(), "sum", offsets=batch.offsets("response_mask"))
    plans: list[list[Minibatch]] = [[] for _ in range(ranks)]
    for rows in minibatches:
        counts = trained[rows]
        parts = plan_minibatch(lengths, rows, ranks, max_tokens)
        for plan, part in zip(plans, parts, strict=True):
            plan.append(Minibatch(part, int(counts.sum()), int((counts > 0).sum())))
    return plans


def collect_rows(parts: Sequence[DataProto], plan: Sequence[Sequence[Rows]]) -> DataProto:
    """The ranks' rows in the order of the batch that was split."""
    order = torch.tensor([row for rank in plan for rows in rank for row in rows])
    return DataProto.concat(parts).reorder(order.argsort())


def sum_updates(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Metrics of an update over all ranks: means over trained tokens; of losses and step values over optimizer steps.

    The metrics are empty of the clock; `grad_norm_max` is the largest of the optimizer steps.
    """
    first = results[0]
    tokens = max(first.tokens, 1)
    metrics = {name: sum(r.sums[name] for r in results) / tokens for name in first.sums}
    count = max(len(first.steps), 1)
    metrics |= {name: sum(r.losses[name] for r in results) / count for name in first.losses}
    first_tokens = max(sum(r.first_tokens for r in results), 1)
    metrics |= {name: sum(r.first.get(name, 0.0) for r in results) / first_tokens for name in first.first}
    for name in first.steps[0] if first.steps else ():
        metrics[name] = sum(step[name] for step in first.steps) / count
    if "grad_norm" in metrics:
        metrics["grad_norm_max"] = max(step["grad_norm"] for step in first.steps)
    return metrics
