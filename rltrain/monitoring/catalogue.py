"""The catalogue of all metrics that a run writes, with name, meaning, unit and healthy range.

The following command generates `docs/metrics.md` from the list of metrics:

    python -m rltrain.monitoring.catalogue > docs/metrics.md

A placeholder in the name of a metric (`<name>`, `<phase>` or `<k>`) stands for one word or number. The metric names of
a named evaluation set contain the name of the set after `eval/`, as in `eval/aime/sampled_reward`.
"""

import re
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A catalogue entry for one metric, or for several metrics whose names differ in one word.

    Attributes:
        name: name of the metric in `metrics.jsonl` and `evaluations.jsonl`.
        meaning: description of what the metric measures.
        unit: unit of the metric's value; "share" means a number from 0 to 1.
        healthy: expected behaviour of the metric in a run that learns; "" if there is no expectation.
    """

    name: str
    meaning: str
    unit: str
    healthy: str = ""

    def matches(self, name: str) -> bool:
        """Return whether this catalogue entry describes the metric with the given name."""
        pattern = re.sub("<.*?>", r"[^\\s/]+", re.escape(self.name))
        pattern = pattern.replace("eval/", "eval/(?:[^/]+/)?", 1) if pattern.startswith("eval/") else pattern
        return re.fullmatch(pattern, name) is not None


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards": (
        Metric("reward/mean", "mean score of the step's answers without failed ones", "score", "rises"),
        Metric("reward/std", "standard deviation of these scores", "score", "above 0"),
        Metric(
            "reward/accuracy",
            "correct answers; only if a reward function decides which answers are correct (`success`)",
            "share",
            "rises",
        ),
        Metric("reward/failed_fraction", "answers whose reward function failed; not trained on", "share", "0"),
        Metric("reward/unscored_fraction", "answers without a score, failed ones included", "share", "near 0"),
        Metric("reward/<name>/mean", "mean score of one function or model before its weight", "score"),
        Metric("reward/<name>/std", "standard deviation of these scores", "score"),
        Metric("reward/<name>/failed_fraction", "answers on which this function or model failed", "share", "0"),
        Metric(
            "reward/zero_spread_fraction",
            "groups whose answers all have the same score, length penalty included; `grpo` learns nothing from them",
            "share",
            "below 0.8",
        ),
        Metric(
            "reward/same_outcome_fraction",
            "groups whose answers all have the same outcome, whatever their lengths",
            "share",
            "below 0.8",
        ),
        Metric(
            "reward/excluded_fraction",
            "scored answers that are left out of statistics because they were cut",
            "share",
            "near 0",
        ),
        Metric("reward/mean_generated", "mean score of all answers, including dropped groups", "score"),
        Metric("reward/kl", "mean KL to the reference, for the KL penalty in the reward", "nats a token"),
        Metric("reward/kl_coef", "coefficient of that KL", "number"),
    ),
    "Answers and the engine": (
        Metric("rollout/length_mean", "mean length of answers, in sampled tokens", "tokens"),
        Metric("rollout/length_max", "longest answer", "tokens"),
        Metric("rollout/truncated_fraction", "answers cut at the length limit", "share", "below 0.1"),
        Metric(
            "rollout/entropy",
            "estimate of the entropy: minus the mean log-prob of sampled tokens",
            "nats a token",
            "falls slowly, stays above 0",
        ),
        Metric("rollout/staleness_mean", "mean age of the weights that sampled a token", "versions"),
        Metric("rollout/staleness_max", "largest age", "versions", "at most `trainer.max_staleness`"),
        Metric(
            "rollout/log_prob_gap",
            "mean distance between the engine's and the actor's log-probs",
            "nats a token",
            "below `rollout.max_log_prob_gap`",
        ),
        Metric("rollout/log_prob_gap_max", "largest distance", "nats"),
        Metric("rollout/kl", "KL from the engine's policy to the actor's, estimator k1", "nats a token", "near 0"),
        Metric(
            "rollout/k3",
            "KL from the engine's policy to the actor's, estimator k3 without its bound",
            "nats a token",
            "near 0",
        ),
        Metric(
            "rollout/effective_sample_size",
            "effective share of the tokens when each is weighted by the ratio of actor to engine",
            "share",
            "near 1",
        ),
        Metric(
            "rollout/groups_dropped",
            "groups whose answers all have the same outcome, dropped by dynamic sampling",
            "groups",
        ),
        Metric("rollout/groups_missing", "groups still missing from the batch after dynamic sampling", "groups", "0"),
    ),
    "Actor": (
        Metric("actor/policy_loss", "loss without KL and entropy terms", "loss"),
        Metric(
            "actor/clip_fraction", "trained tokens whose gradient the loss's clipping removed", "share", "below 0.3"
        ),
        Metric("actor/clip_fraction_c", "trained tokens whose gradient the dual clip removed", "share", "near 0"),
        Metric(
            "actor/weight_clip_fraction",
            "`cispo`, `dppo_tv`, `dppo_kl`, `topr`, `ce_gppo`: tokens with a bounded weight, which keep their gradient",
            "share",
        ),
        Metric("actor/weight_mean", "`topr`, `vespo`: mean weight of a token's gradient", "number"),
        Metric("actor/gate_mean", "`sapo`: mean of the gate, 1 where the policy has not moved", "number"),
        Metric(
            "actor/selected_fraction",
            "tokens that the loss's selector chose: to drop (`clip_cov`, `m2po`), penalise (`kl_cov`) or keep "
            "(`top_entropy`)",
            "share",
        ),
        Metric(
            "actor/ratio_mean",
            "mean ratio of the new policy to the old one; for `gspo` and `geo_mean`, the ratio of the answer",
            "number",
            "near 1",
        ),
        Metric("actor/ppo_kl", "KL from the old policy to the new one, r - 1 - log r", "nats a token", "below 0.1"),
        Metric(
            "actor/same_policy_gap",
            "mean distance of the actor's log-probs from the old ones before its first optimizer step",
            "nats a token",
            "0",
        ),
        Metric(
            "actor/engine_gap",
            "as `rollout/log_prob_gap`, for the actor before its first optimizer step",
            "nats a token",
            "below `rollout.max_log_prob_gap`",
        ),
        Metric("actor/engine_kl", "as `rollout/kl`, for the actor before its first optimizer step", "nats a token"),
        Metric("actor/engine_k3", "as `rollout/k3`, for the actor before its first optimizer step", "nats a token"),
        Metric(
            "actor/engine_effective_sample_size",
            "as `rollout/effective_sample_size`, for the actor before its first optimizer step",
            "share",
            "near 1",
        ),
        Metric(
            "actor/correction_weight_mean",
            "mean importance weight of `correction`, counting 0 for dropped tokens",
            "number",
            "near 1",
        ),
        Metric("actor/correction_outside_fraction", "tokens outside the bounds of `correction`", "share", "near 0"),
        Metric("actor/correction_dropped_fraction", "tokens whose policy term `correction` drops", "share", "near 0"),
        Metric("actor/correction_rollout_kl", "as `rollout/k3`, over the updates of the step", "nats a token"),
        Metric(
            "actor/rejection_divergence", "mean of the KL estimate that decides what `rejection` drops", "nats a token"
        ),
        Metric("actor/rejection_outside_fraction", "tokens outside the bounds of `rejection`", "share", "near 0"),
        Metric("actor/rejection_dropped_fraction", "tokens whose policy term `rejection` drops", "share", "near 0"),
        Metric("actor/kl_loss", "KL term of the loss, aggregated as the loss", "nats"),
        Metric(
            "actor/squared_log_ratio", "squared log-ratio, policy over engine, aggregated as the loss", "nats squared"
        ),
        Metric("actor/ref_kl", "KL to the reference; `k3` counts at most 10 nats a token", "nats a token"),
        Metric("actor/entropy", "mean entropy; only with an entropy bonus or target", "nats a token"),
        Metric("actor/entropy_coef", "coefficient of the entropy bonus; only with a target", "number"),
        Metric("actor/advantage_abs_mean", "mean absolute advantage of trained tokens", "reward"),
        Metric("actor/grad_norm", "mean gradient norm before clipping", "number", "steady"),
        Metric("actor/grad_norm_max", "largest gradient norm before clipping", "number"),
        Metric("actor/lr", "mean learning rate of the step", "number"),
        Metric("actor/skipped_updates", "updates skipped because the loss or gradient was not finite", "updates", "0"),
    ),
    "Critic": (
        Metric("critic/value_loss", "the critic's loss", "reward squared", "falls"),
        Metric("critic/clip_fraction", "tokens where clipping decides the critic's loss", "share"),
        Metric("critic/value_mean", "mean value", "reward"),
        Metric("critic/return_mean", "mean return", "reward"),
        Metric(
            "critic/explained_variance",
            "1: values predict returns; 0: no better than a constant",
            "number",
            "rises towards 1",
        ),
        Metric("critic/grad_norm", "mean gradient norm before clipping", "number", "steady"),
        Metric("critic/grad_norm_max", "largest gradient norm before clipping", "number"),
        Metric("critic/lr", "mean learning rate of the step", "number"),
        Metric("critic/skipped_updates", "updates skipped because the loss or gradient was not finite", "updates", "0"),
    ),
    "Evaluations": (
        Metric("eval/sampled_reward", "mean score of sampled answers to the prompts of `data.val`", "score", "rises"),
        Metric("eval/sampled_reward/<name>", "mean score of one function or model before its weight", "score"),
        Metric(
            "eval/sampled_accuracy",
            "correct answers; only if a reward function decides which answers are correct (`success`)",
            "share",
            "rises",
        ),
        Metric(
            "eval/sampled_pass_at_<k>",
            "chance that at least one of k answers to a prompt is correct; with `trainer.eval_samples` above 1",
            "share",
            "rises",
        ),
        Metric("eval/sampled_length", "mean length of sampled answers", "tokens"),
        Metric("eval/sampled_failed_fraction", "sampled answers whose reward function failed", "share", "0"),
        Metric("eval/greedy_reward", "mean score of one greedy answer to each prompt", "score", "rises"),
        Metric("eval/greedy_reward/<name>", "mean score of one function or model before its weight", "score"),
        Metric(
            "eval/greedy_accuracy",
            "correct greedy answers; only if a reward function decides which answers are correct (`success`)",
            "share",
            "rises",
        ),
        Metric("eval/greedy_length", "mean length of greedy answers", "tokens"),
        Metric("eval/greedy_failed_fraction", "greedy answers whose reward function failed", "share", "0"),
    ),
    "Time": (
        Metric("timing/<phase>", "time of one phase; `timing/step` is the whole step", "seconds"),
        Metric(
            "perf/tokens_per_s",
            "prompt and response tokens, including the text of tools, per second of the whole step",
            "tokens a second",
        ),
        Metric("perf/actor_filler_fraction", "filler tokens, which a rank without rows processes", "share", "near 0"),
        Metric("perf/critic_filler_fraction", "the same for the critic", "share", "near 0"),
        Metric(
            "perf/actor_idle_fraction",
            "part of an update in which ranks wait for each other, estimated from their work",
            "share",
            "below 0.1",
        ),
        Metric("perf/critic_idle_fraction", "the same for the critic", "share", "below 0.1"),
    ),
}
METRICS = tuple(metric for metrics in SECTIONS.values() for metric in metrics)


def page() -> str:
    """Return the text of `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "This page is made from `rltrain/monitoring/catalogue.py`: `python -m rltrain.monitoring.catalogue`.",
        "",
        "`metrics.jsonl` has one line for each step, `evaluations.jsonl` one for each evaluation. Shares and means a",
        "token are over all trained tokens, including those that `correction` or `rejection` drop. Nothing under",
        "`reward/`, `actor/` or `critic/` depends on the clock. `kl` in the progress line is `actor/ppo_kl`, or the KL",
        "to the reference if there is a KL term. The metrics of a named evaluation set (`data.val_sets`) have the",
        "name of the set after `eval/`, as in `eval/aime/sampled_reward`.",
    ]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | meaning | unit | healthy |", "|---|---|---|---|"]
        lines += [f"| `{one.name}` | {one.meaning} | {one.unit} | {one.healthy} |" for one in metrics]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
