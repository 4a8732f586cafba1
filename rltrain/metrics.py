"""Measuring a step: what the samples looked like, and where the time went."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from rltrain.protocol import DataProto


class Timer:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time inside the block to `timing/<phase>`."""
        start = time.perf_counter()
        yield
        key = f"timing/{phase}"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start

    def metrics(self, batch: DataProto) -> dict[str, float]:
        """Phases, the whole step, and tokens (prompt and response) a second over it."""
        step = time.perf_counter() - self.began
        tokens = len(batch.values("prompts")) + len(batch.values("responses"))
        return {**self.seconds, "timing/step": step, "perf/tokens_per_s": tokens / step}


def sample_metrics(batch: DataProto, functions: Sequence[str]) -> dict[str, float]:
    """Rewards, lengths and endings of a batch; means over valid rows, fractions of all rows.

    `reward/accuracy` is the share of valid rows with a positive score.
    """
    valid, scores = batch.batch["valid"], batch.batch["scores"]
    lengths = batch.lengths("responses").float()
    reasons = list(batch.non_tensor_batch["finish_reason"])
    kept = scores[valid]
    metrics = {
        "reward/mean": float(kept.mean()) if len(kept) else 0.0,
        "reward/std": float(kept.std(unbiased=False)) if len(kept) else 0.0,
        "reward/accuracy": float((kept > 0).float().mean()) if len(kept) else 0.0,
        "reward/failed_fraction": float(batch.batch["failed"].float().mean()),
        "reward/unscored_fraction": 1 - float(valid.float().mean()),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated_fraction": reasons.count("length") / len(reasons),
    }
    for number, name in enumerate(functions):
        component = batch.batch["reward_components"][:, number][valid]
        component = component[~component.isnan()]
        metrics[f"reward/{name}/mean"] = float(component.mean()) if len(component) else 0.0
    return metrics


def log_prob_gap(batch: DataProto) -> dict[str, float]:
    """How far the engine's log-probs are from the actor's for the same tokens and weights (invariant E1).

    Mean and largest absolute difference in nats, and the k3 estimate of KL(engine || actor).
    """
    mask = batch.values("response_mask")
    ratio = (batch.values("old_log_probs") - batch.values("rollout_log_probs"))[mask]
    if not len(ratio):
        return {"rollout/log_prob_gap": 0.0, "rollout/log_prob_gap_max": 0.0, "rollout/kl": 0.0}
    return {
        "rollout/log_prob_gap": float(ratio.abs().mean()),
        "rollout/log_prob_gap_max": float(ratio.abs().max()),
        "rollout/kl": float(torch.expm1(ratio).sub(ratio).mean()),
    }
