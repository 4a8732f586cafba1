"""How a call on a batch is split over ranks and its results are collected: pure, so that it is tested without Ray."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rltrain.algorithms import effective_sample_size
from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_assignment import Rows, plan_minibatch

PLAN_METRICS = ("filler_fraction", "idle_fraction")  # of `plan_metrics`: of planning, not of training


@dataclass(frozen=True)
class Minibatch:
    """One rank's part of a mini-batch, and the counts of the whole mini-batch over all ranks.

    Attributes:
        rows: all rows of the mini-batch, over all ranks.
        microbatches: rows of each forward and backward pass of this rank; an empty one still runs, with weight zero.
        num_tokens: trained tokens of the whole mini-batch.
        num_sequences: rows of the whole mini-batch with at least one trained token.
    """

    rows: Rows
    microbatches: list[Rows]
    num_tokens: int
    num_sequences: int


@dataclass
class UpdateResult:
    """What one rank's update came to.

    Attributes:
        sums: sums over this rank's trained tokens, by metric; over all ranks they are divided by `tokens`.
        losses: parts of the loss, already divided by the counts of the whole mini-batch, summed over mini-batches.
        tokens: trained tokens over all mini-batches and ranks, but those of skipped steps.
        steps: per optimizer step, values that are the same on all ranks; `skipped` is 1 if its numbers are not finite.
        first: sums over this rank's trained tokens of the first mini-batch, where the weights are still the old ones.
        first_tokens: trained tokens of the first mini-batch on this rank.
    """

    sums: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    steps: list[dict[str, float]] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    first_tokens: int = 0

    @property
    def finite(self) -> bool:
        """Whether all parts of the loss are."""
        return all(map(math.isfinite, self.losses.values()))

    def add(self, part: "UpdateResult", tokens: int, step: dict[str, float]) -> None:
        """Count in a mini-batch of `tokens` trained tokens. Of one whose step was skipped no number is believed."""
        kept = not step["skipped"]
        for total, values in ((self.sums, part.sums), (self.losses, part.losses), (self.first, part.first)):
            for name, value in values.items():
                total[name] = total.get(name, 0.0) + (value if kept else 0.0)
        self.tokens += tokens if kept else 0
        self.first_tokens += part.first_tokens if kept else 0
        self.steps.append(step)


def split_rows(
    lengths: Sequence[int], ranks: int, max_tokens: int, *, work: Sequence[int] | None = None
) -> list[list[Rows]]:
    """Micro-batches of each rank for a pass over all rows; `work` as in `plan_minibatch`."""
    return plan_minibatch(lengths, list(range(len(lengths))), ranks, max_tokens, work=work)


def split_minibatches(
    batch: DataProto,
    lengths: Sequence[int],
    minibatches: Sequence[Rows],
    ranks: int,
    max_tokens: int,
    *,
    work: Sequence[int] | None = None,
) -> list[list[Minibatch]]:
    """Each rank's mini-batches, all with the counts of the whole; `work` as in `plan_minibatch`.

    Rows without a trained token are in no micro-batch: they would add exactly zero.
    """
    trained = torch.segment_reduce(batch.values("response_mask").float(), "sum", offsets=batch.offsets("response_mask"))
    plans: list[list[Minibatch]] = [[] for _ in range(ranks)]
    for rows in minibatches:
        counts = trained[rows]
        needed = [row for row, count in zip(rows, counts.tolist(), strict=True) if count]
        parts = plan_minibatch(lengths, needed, ranks, max_tokens, work=work)
        for plan, part in zip(plans, parts, strict=True):
            plan.append(Minibatch(rows, part, int(counts.sum()), int((counts > 0).sum())))
    return plans


def plan_metrics(plans: Sequence[Sequence[Minibatch]], lengths: Sequence[int], work: Sequence[int]) -> dict[str, float]:
    """What a plan of an update costs beyond what is needed.

    `filler_fraction`: of the tokens that go through the model, those of rows that stand in where a rank has none.
    `idle_fraction`: of the ranks' time, by estimated work, what they wait for the slowest in each micro-batch.
    """
    stand_in = min(range(len(lengths)), key=lambda row: lengths[row], default=None)
    needed = filler = busy = elapsed = 0
    for ranks in zip(*plans, strict=True):
        for passes in zip(*(minibatch.microbatches for minibatch in ranks), strict=True):
            needed += sum(lengths[row] for rows in passes for row in rows)
            filler += sum(lengths[stand_in] for rows in passes if not rows) if stand_in is not None else 0
            costs = [sum(work[row] for row in rows) for rows in passes]
            busy, elapsed = busy + sum(costs), elapsed + len(costs) * max(costs)
    return {
        "filler_fraction": filler / max(needed + filler, 1),
        "idle_fraction": 1 - busy / elapsed if elapsed else 0.0,
    }


def collect_rows(parts: Sequence[DataProto], plan: Sequence[Sequence[Rows]]) -> DataProto:
    """The ranks' rows in the order of the batch that was split."""
    order = torch.tensor([row for rank in plan for rows in rank for row in rows])
    return DataProto.concat(parts, rows=order.argsort())


def sum_updates(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Metrics of an update over all ranks: means over trained tokens; of losses and step values over optimizer steps.

    The metrics are empty of the clock; `grad_norm_max` is the largest of the optimizer steps. Skipped steps are counted
    in `skipped_updates`, and in no mean; where all were skipped, means are NaN.
    """
    first = results[0]
    kept = [step for step in first.steps if not step["skipped"]]
    tokens, count = float(max(first.tokens, 1)), float(max(len(kept), 1))
    if first.steps and not kept:
        tokens = count = math.nan
    metrics = {name: sum(r.sums[name] for r in results) / tokens for name in first.sums}
    metrics |= {name: sum(r.losses[name] for r in results) / count for name in first.losses}
    first_tokens = sum(r.first_tokens for r in results)
    begun = {name: sum(r.first[name] for r in results) for name in first.first}
    if "same_policy" in begun:
        metrics["same_policy_gap"] = begun["same_policy"] / max(first_tokens, 1)
    if "weight" in begun:
        metrics |= {f"engine_{name}": value for name, value in divergence(begun, first_tokens).items()}
    if first.steps:
        metrics["grad_norm"] = sum(step["grad_norm"] for step in kept) / count
        metrics["grad_norm_max"] = max((step["grad_norm"] for step in kept), default=math.nan)
        metrics["lr"] = sum(step["lr"] for step in first.steps) / len(first.steps)
        metrics["skipped_updates"] = sum(step["skipped"] for step in first.steps)
    return metrics


def divergence(sums: Mapping[str, float], tokens: int) -> dict[str, float]:
    """What `rollout_diagnostics` summed over `tokens` tokens, as means in nats, and the effective sample size."""
    count = max(tokens, 1)
    return {
        "gap": float(sums["abs"]) / count,
        "kl": float(sums["kl"]) / count,
        "k3": float(sums["k3"]) / count,
        "effective_sample_size": float(effective_sample_size(sums["weight"], sums["weight_squared"], tokens)),
    }
