"""Statistics of the samples of one training step.

The statistics describe rewards, answer lengths, entropy, staleness, and the differences between the log-probs of the
engine and the log-probs of the actor.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from rltrain.algorithms import rollout_diagnostics
from rltrain.batch.data_proto import DataProto
from rltrain.batch.sampled_tokens import sampled_lengths, sampled_tokens
from rltrain.batch.trajectory import STOP_REASONS
from workers.training.dispatch import divergence


def sample_metrics(batch: DataProto, components: Sequence[str]) -> dict[str, float]:
    """Compute metrics of a batch: statistics of its rewards, answer lengths and finish reasons.

    Means and standard deviations of rewards include only rows whose column `valid` is True, so they exclude rows
    without a score. Statistics of lengths, turns and tool calls, and the share of truncated answers, include all rows
    but those of failed conversations, which have no answer. All other metrics whose name ends in `_fraction` include
    all rows. The length of an answer is its number of sampled tokens.

    The metric `reward/accuracy` is the share of correct answers among the valid rows that a reward function has judged
    as correct or wrong. The metric `reward/accuracy` is missing if no valid row has been judged as correct or wrong.
    """
    valid, scores = batch.batch["valid"], batch.batch["scores"]
    answered = _without_failed_conversations(batch)
    lengths = sampled_lengths(answered).float()
    reasons = list(answered.non_tensor_batch["finish_reason"])
    kept, successes = scores[valid], batch.batch["successes"][valid]
    successes = successes[~successes.isnan()]
    metrics = {
        "reward/mean": _mean(kept),
        "reward/std": float(kept.std(unbiased=False)) if len(kept) else 0.0,
        "reward/failed_fraction": float(batch.batch["failed"].float().mean()),
        "reward/unscored_fraction": 1 - float(valid.float().mean()),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": _max(lengths),
        "rollout/truncated_fraction": reasons.count("length") / max(1, len(reasons)),
    }
    if len(successes):
        metrics["reward/accuracy"] = float(successes.mean())
    for number, name in enumerate(components):
        component = batch.batch["reward_components"][:, number][valid]
        component = component[~component.isnan()]
        metrics |= {
            f"reward/{name}/mean": _mean(component),
            f"reward/{name}/std": float(component.std(unbiased=False)) if len(component) else 0.0,
            f"reward/{name}/failed_fraction": float((batch.batch["failed_function"] == number).float().mean()),
        }
    return metrics | (environment_metrics(batch) if "turns" in batch else {})


def environment_metrics(batch: DataProto) -> dict[str, float]:
    """Compute the metrics of conversations with an environment, such as numbers of turns and shares of stop reasons.

    Failed conversations are only in the shares of stop reasons.
    """
    reasons = Counter(batch.non_tensor_batch["stop_reason"])
    answered = _without_failed_conversations(batch)
    return {
        "rollout/turns_mean": _mean(answered.batch["turns"]),
        "rollout/turns_max": _max(answered.batch["turns"]),
        "rollout/contexts_mean": _mean(answered.batch["contexts"]),
        "rollout/tool_calls_mean": _mean(answered.batch["tool_calls"]),
        "rollout/observation_length_mean": float((~sampled_tokens(answered)).sum()) / max(1, len(answered)),
        **{f"rollout/stop_{reason}_fraction": reasons[reason] / len(batch) for reason in STOP_REASONS},
    }


def _without_failed_conversations(batch: DataProto) -> DataProto:
    """Return the rows of a batch without those whose conversation ended with an error, and so has no answer."""
    if "stop_reason" not in batch:
        return batch
    return batch[torch.tensor([reason != "error" for reason in batch.non_tensor_batch["stop_reason"]])]


def _mean(values: torch.Tensor) -> float:
    return float(values.float().mean()) if len(values) else 0.0


def _max(values: torch.Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


def entropy_estimate(batch: DataProto) -> float:
    """Estimate the entropy of the sampling policy, at the sampling temperature, in nats per token.

    The estimate is the mean of -log p over the sampled tokens, where p is the probability of a sampled token. The
    entropy estimate is NaN if no token was sampled.
    """
    sampled = batch.values("rollout_log_probs")[sampled_tokens(batch)]
    return -float(sampled.mean()) if len(sampled) else float("nan")


def staleness_metrics(batch: DataProto, version: int) -> dict[str, float]:
    """Compute the mean and the maximum staleness of the sampled tokens.

    The staleness of a token is the weight version `version` minus the version of the weights that sampled the token.
    """
    behind = version - batch.values("policy_version")[sampled_tokens(batch)]
    return {
        "rollout/staleness_mean": float(behind.float().mean()) if len(behind) else 0.0,
        "rollout/staleness_max": float(behind.max()) if len(behind) else 0.0,
    }


def log_prob_gap(batch: DataProto) -> dict[str, float]:
    """Compare the engine's and the actor's log-probs of the tokens that `response_mask` selects.

    Returns:
        A dict of metrics: the mean and the largest absolute difference of the log-probs in nats, two estimates of
        KL(engine || actor), and the effective sample size of the importance weights divided by the number of tokens.
    """
    mask = batch.values("response_mask")
    old, engine = batch.values("old_log_probs"), batch.values("rollout_log_probs")
    sums = {name: float(value) for name, value in rollout_diagnostics(old, engine, mask).items()}
    means = divergence(sums, int(mask.sum()))
    largest = (old - engine)[mask].abs()
    return {
        "rollout/log_prob_gap": means.pop("gap"),
        "rollout/log_prob_gap_max": float(largest.max()) if len(largest) else 0.0,
        **{f"rollout/{name}": value for name, value in means.items()},
    }
