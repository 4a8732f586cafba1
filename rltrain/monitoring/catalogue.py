"""The catalogue of all metrics that a run writes, with the name, meaning, unit and healthy range of each metric.

The following command generates `docs/metrics.md` from the catalogue of metrics:

    python -m rltrain.monitoring.catalogue > docs/metrics.md

A placeholder in the name of a metric (`<name>`, `<phase>` or `<k>`) stands for one word or number. The metric names of
a named evaluation set contain the set's name after `eval/`: `eval/aime/sampled_reward` is a metric of the evaluation
set `aime`.
"""

import re
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A catalogue entry for one metric, or for all metrics that differ only in a placeholder such as `<name>`.

    Attributes:
        name: name of the metric in `metrics.jsonl` and `evaluations.jsonl`.
        meaning: description of what the metric measures.
        unit: unit of the metric's value; "share" means a number from 0 to 1.
        healthy: expected value or trend of the metric in a healthy run; "" if nothing is expected.
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
        Metric("reward/mean", "mean score of the step's answers, excluding answers without a score", "score", "rises"),
        Metric("reward/std", "standard deviation of the scores whose mean is `reward/mean`", "score", "above 0"),
        Metric(
            "reward/accuracy",
            "share of correct answers; present only if a reward function reports correctness (the field `success`)",
            "share",
            "rises",
        ),
        Metric(
            "reward/failed_fraction",
            "share of answers whose reward function failed; the step does not train on such answers",
            "share",
            "0",
        ),
        Metric(
            "reward/unscored_fraction",
            "share of answers without a score, including answers whose reward function failed",
            "share",
            "near 0",
        ),
        Metric(
            "reward/<name>/mean",
            "mean score, before weighting, of the reward function or reward model `<name>`",
            "score",
        ),
        Metric("reward/<name>/std", "standard deviation of the scores whose mean is `reward/<name>/mean`", "score"),
        Metric(
            "reward/<name>/failed_fraction",
            "share of answers on which the reward function or reward model `<name>` failed",
            "share",
            "0",
        ),
        Metric(
            "reward/zero_spread_fraction",
            "share of prompt groups whose answers all have the same score, so that their GRPO advantages are 0",
            "share",
            "below 0.8",
        ),
        Metric(
            "reward/same_outcome_fraction",
            "share of prompt groups whose answers all have the same outcome (the score without the length penalty)",
            "share",
            "below 0.8",
        ),
        Metric(
            "reward/excluded_fraction",
            "share of answers that have a score but are excluded from score statistics because they were truncated",
            "share",
            "near 0",
        ),
        Metric(
            "reward/mean_generated",
            "mean score of all answers, including the answers of dropped prompt groups",
            "score",
        ),
        Metric(
            "reward/kl",
            "mean KL from the policy to the reference policy, as used by the KL penalty in the reward",
            "nats per token",
        ),
        Metric("reward/kl_coef", "coefficient of the KL penalty in the reward", "number"),
    ),
    "Answers and the engine": (
        Metric("rollout/length_mean", "mean number of sampled tokens per answer", "tokens"),
        Metric("rollout/length_max", "number of sampled tokens of the longest answer", "tokens"),
        Metric(
            "rollout/truncated_fraction",
            "share of answers that were truncated at the length limit",
            "share",
            "below 0.1",
        ),
        Metric(
            "rollout/entropy",
            "estimate of the policy's entropy: the mean of -log p over the sampled tokens",
            "nats per token",
            "the entropy falls slowly and stays above 0",
        ),
        Metric(
            "rollout/staleness_mean",
            "mean age, in weight versions, of the weights with which a token was sampled",
            "versions",
        ),
        Metric(
            "rollout/staleness_max",
            "largest age, in weight versions, of the weights with which a token was sampled",
            "versions",
            "at most `trainer.max_staleness`",
        ),
        Metric(
            "rollout/log_prob_gap",
            "mean absolute difference between the log-probs of the rollout engine and the actor, before the update; "
            "like the four metrics below, over the answers whose log-probs the actor computes before the update",
            "nats per token",
            "below `rollout.max_log_prob_gap`",
        ),
        Metric(
            "rollout/log_prob_gap_max",
            "largest absolute difference between the log-probs of the rollout engine and the actor",
            "nats",
        ),
        Metric("rollout/kl", "KL(engine || actor), estimated with the estimator k1", "nats per token", "near 0"),
        Metric(
            "rollout/k3",
            "KL(engine || actor), estimated with the estimator k3; the estimate of a token is not capped",
            "nats per token",
            "near 0",
        ),
        Metric(
            "rollout/effective_sample_size",
            "effective sample size of the token importance weights p_actor / p_engine, divided by the number of tokens",
            "share",
            "near 1",
        ),
        Metric(
            "rollout/groups_dropped",
            "number of prompt groups that dynamic sampling dropped because all their answers have the same outcome",
            "groups",
        ),
        Metric(
            "rollout/groups_missing",
            "number of prompt groups that are still missing from the batch after dynamic sampling",
            "groups",
            "0",
        ),
        Metric(
            "rollout/reused_fraction",
            "share of the step's prompt groups that an earlier step has already trained on (`trainer.reuse`)",
            "share",
        ),
    ),
    "Conversations with an environment or tools": (
        Metric(
            "rollout/turns_mean", "mean number of turns in a conversation; a turn is one answer of the model", "turns"
        ),
        Metric("rollout/turns_max", "largest number of turns in a conversation", "turns"),
        Metric(
            "rollout/contexts_mean",
            "mean number of contexts in a trajectory; above 1 if agent programs start further conversations",
            "contexts",
        ),
        Metric("rollout/tool_calls_mean", "mean number of well-formed tool calls in a conversation", "calls"),
        Metric(
            "rollout/observation_length_mean",
            "mean number of tokens per conversation that tools and the environment added after the prompt",
            "tokens",
        ),
        Metric(
            "rollout/stop_answer_fraction",
            "share of conversations that ended because an answer contained no tool call",
            "share",
        ),
        Metric("rollout/stop_done_fraction", "share of conversations that the environment ended", "share"),
        Metric("rollout/stop_error_fraction", "share of conversations whose environment failed", "share", "0"),
        Metric(
            "rollout/stop_max_turns_fraction",
            "share of conversations that ended at the limit `rollout.max_turns`",
            "share",
            "low",
        ),
        Metric(
            "rollout/stop_max_response_length_fraction",
            "share of conversations that ended at a limit on the number of tokens",
            "share",
            "low",
        ),
        Metric(
            "rollout/stop_deadline_fraction",
            "share of conversations that ended at the time limit `rollout.trajectory_timeout_s`",
            "share",
            "0",
        ),
    ),
    "Difficulty of the prompts": (
        Metric(
            "difficulty/unseen_fraction",
            "share of the training prompts whose success rate has not been measured yet (`data.difficulty`)",
            "share",
            "falls",
        ),
        Metric(
            "difficulty/easy_fraction",
            "share of training prompts whose success rate in their last prompt group was at least `easy_threshold`",
            "share",
            "rises",
        ),
        Metric(
            "difficulty/normal_fraction",
            "share of training prompts whose success rate in their last prompt group was between `hard_threshold` and "
            "`easy_threshold`",
            "share",
            "above 0",
        ),
        Metric(
            "difficulty/hard_fraction",
            "share of training prompts whose success rate in their last prompt group was at most `hard_threshold`",
            "share",
            "falls",
        ),
        Metric(
            "difficulty/fallback_fraction",
            "share of the step's prompts that came from another difficulty pool because the intended pool was empty",
            "share",
        ),
    ),
    "Actor": (
        Metric("actor/policy_loss", "policy loss without the KL and entropy terms", "loss"),
        Metric(
            "actor/clip_fraction",
            "share of trained tokens whose gradient was removed by the clipping of the policy loss",
            "share",
            "below 0.3",
        ),
        Metric(
            "actor/clip_fraction_c",
            "share of trained tokens that the dual clip affects: tokens with negative advantage and a very large ratio",
            "share",
            "near 0",
        ),
        Metric(
            "actor/weight_clip_fraction",
            "share of tokens whose gradient weight the loss clips (`cispo`, `dppo_tv`, `dppo_kl`, `topr`, `ce_gppo`, "
            "`aspo`)",
            "share",
        ),
        Metric(
            "actor/weight_mean",
            "for the losses `topr` and `vespo`: mean factor by which the loss multiplies a token's gradient",
            "number",
        ),
        Metric(
            "actor/gate_mean",
            "for the loss `sapo`: mean gradient weight of a token; the weight is 1 if the ratio p_new / p_old is 1",
            "number",
        ),
        Metric(
            "actor/selected_fraction",
            "share of tokens that the policy loss drops (`clip_cov`, `m2po`), penalises (`kl_cov`) or keeps "
            "(`top_entropy`)",
            "share",
        ),
        Metric(
            "actor/ratio_mean",
            "mean token ratio p_new / p_old (for the losses `gspo`, `geo_mean` and `mean_ratio`, the ratio of the "
            "whole answer)",
            "number",
            "near 1",
        ),
        Metric(
            "actor/ppo_kl",
            "KL(old policy || new policy), estimated as the mean of r - 1 - log r with r = p_new / p_old",
            "nats per token",
            "below 0.1",
        ),
        Metric(
            "actor/same_policy_gap",
            "mean absolute difference between the actor's log-probs and the old log-probs before the first optimizer "
            "step of a training step, in steps that compute all old log-probs",
            "nats per token",
            "0",
        ),
        Metric(
            "actor/engine_gap",
            "mean absolute log-prob difference of engine and actor in the first optimizer step's forward pass",
            "nats per token",
            "below `rollout.max_log_prob_gap`",
        ),
        Metric(
            "actor/engine_kl",
            "KL(engine || actor), estimated with the estimator k1 in the first optimizer step's forward pass",
            "nats per token",
        ),
        Metric(
            "actor/engine_k3",
            "KL(engine || actor), estimated with the estimator k3 in the first optimizer step's forward pass",
            "nats per token",
        ),
        Metric(
            "actor/engine_effective_sample_size",
            "effective sample size of the token importance weights p_actor / p_engine in the first optimizer step, "
            "divided by the number of tokens",
            "share",
            "near 1",
        ),
        Metric(
            "actor/correction_weight_mean",
            "mean importance weight from `algorithm.correction`, before `batch_normalize`; a dropped token counts as 0",
            "number",
            "near 1",
        ),
        Metric(
            "actor/correction_outside_fraction",
            "share of tokens whose importance weight is outside the bounds of `algorithm.correction`",
            "share",
            "near 0",
        ),
        Metric(
            "actor/correction_dropped_fraction",
            "share of tokens that `algorithm.correction` excludes from the policy loss",
            "share",
            "near 0",
        ),
        Metric(
            "actor/correction_rollout_kl",
            "KL(engine || actor), estimated with the estimator k3, averaged over the tokens of all updates of the step",
            "nats per token",
        ),
        Metric(
            "actor/rejection_divergence",
            "mean of the KL estimate that `algorithm.rejection` compares with its bounds",
            "nats per token",
        ),
        Metric(
            "actor/rejection_outside_fraction",
            "share of tokens whose KL estimate is outside the bounds of `algorithm.rejection`",
            "share",
            "near 0",
        ),
        Metric(
            "actor/rejection_dropped_fraction",
            "share of tokens that `algorithm.rejection` excludes from the policy loss",
            "share",
            "near 0",
        ),
        Metric(
            "actor/kl_loss",
            "KL term of the loss without its coefficient, averaged over tokens in the same way as the policy loss",
            "nats",
        ),
        Metric(
            "actor/load_balance_loss",
            "load-balancing loss of the experts without its coefficient (`actor.load_balance_coef`), averaged over "
            "sequences; 1 if all experts are used equally",
            "",
            "near 1",
        ),
        Metric(
            "actor/teacher_kl",
            "mean KL from the policy to the teachers, over the tokens of answers that a teacher has scored; estimated "
            "before the update with `algorithm.distillation.mode=reward`, and during the update with `mode=loss`",
            "nats per token",
            "falls",
        ),
        Metric(
            "actor/teacher_kl/<name>",
            "KL from the policy to the teacher `<name>`, estimated from the sampled tokens before the update; present "
            "with several teachers",
            "nats per token",
            "falls",
        ),
        Metric(
            "actor/teacher_missing_fraction",
            "share of answers that no teacher has scored, so that they have no distillation term",
            "share",
            "0",
        ),
        Metric(
            "actor/distillation_loss",
            "distillation term of the loss without its coefficient, averaged in the same way as the policy loss",
            "nats",
            "falls",
        ),
        Metric(
            "actor/squared_log_ratio",
            "squared difference of policy and engine log-probs, averaged in the same way as the policy loss",
            "nats squared",
        ),
        Metric(
            "actor/sft_loss",
            "mean cross-entropy of the tokens of supervised answers, not multiplied by `algorithm.sft_coef`; present "
            "only in steps with supervised answers",
            "nats per token",
            "falls",
        ),
        Metric(
            "actor/positive_nll",
            "mean negative log-likelihood of the trained tokens of correct answers, not multiplied by "
            "`algorithm.positive_nll_coef`; a mini-batch without correct answers counts as 0",
            "nats per token",
            "falls",
        ),
        Metric(
            "actor/sft_tokens",
            "number of tokens of supervised answers in all optimizer steps of the training step; present only with "
            "`algorithm.sft_coef`",
            "tokens",
            "above 0",
        ),
        Metric(
            "actor/positive_fraction",
            "share of trained tokens that belong to correct answers; present only with `algorithm.positive_nll_coef`",
            "share",
            "rises",
        ),
        Metric(
            "actor/ref_kl",
            "mean KL from the policy to the reference policy; the estimator `k3` is limited to 10 nats per token",
            "nats per token",
        ),
        Metric(
            "actor/entropy",
            "mean entropy of the policy; present only with an entropy bonus or an entropy target",
            "nats per token",
        ),
        Metric("actor/entropy_coef", "coefficient of the entropy bonus; present only with an entropy target", "number"),
        Metric("actor/advantage_abs_mean", "mean absolute value of the advantages of trained tokens", "reward"),
        Metric(
            "actor/grad_norm",
            "mean gradient norm of the actor before clipping, over the optimizer steps of a training step",
            "number",
            "steady",
        ),
        Metric(
            "actor/grad_norm_max",
            "largest gradient norm of the actor before clipping, over the optimizer steps of a training step",
            "number",
        ),
        Metric("actor/lr", "mean of the actor's learning rate over the optimizer steps of a training step", "number"),
        Metric(
            "actor/skipped_updates",
            "number of actor updates that were skipped because the loss or gradient was not finite",
            "updates",
            "0",
        ),
    ),
    "Critic": (
        Metric("critic/value_loss", "the critic's loss", "reward squared", "falls"),
        Metric("critic/clip_fraction", "share of tokens for which value clipping increases the critic's loss", "share"),
        Metric("critic/value_mean", "mean value that the critic predicts", "reward"),
        Metric("critic/return_mean", "mean return, which is the critic's target", "reward"),
        Metric(
            "critic/explained_variance",
            "share of the returns' variance that the critic explains: 1 is perfect, 0 is no better than a constant",
            "number",
            "rises towards 1",
        ),
        Metric(
            "critic/grad_norm",
            "mean gradient norm of the critic before clipping, over the optimizer steps of a training step",
            "number",
            "steady",
        ),
        Metric(
            "critic/grad_norm_max",
            "largest gradient norm of the critic before clipping, over the optimizer steps of a training step",
            "number",
        ),
        Metric("critic/lr", "mean of the critic's learning rate over the optimizer steps of a training step", "number"),
        Metric(
            "critic/skipped_updates",
            "number of critic updates that were skipped because the loss or gradient was not finite",
            "updates",
            "0",
        ),
    ),
    "Reference": (
        Metric(
            "reference/refreshed",
            "1 if the reference model was updated at the end of the step, otherwise 0; present only with "
            "`algorithm.reference.refresh_every` above 0",
            "0 or 1",
        ),
    ),
    "Evaluations": (
        Metric("eval/sampled_reward", "mean score of sampled answers to the prompts of `data.val`", "score", "rises"),
        Metric(
            "eval/sampled_reward/<name>",
            "mean score, before weighting, that the reward function `<name>` gives to sampled answers",
            "score",
        ),
        Metric(
            "eval/sampled_accuracy",
            "share of correct sampled answers; present only if a reward function reports correctness (`success`)",
            "share",
            "rises",
        ),
        Metric(
            "eval/sampled_pass_at_<k>",
            "probability that one or more of k answers to a prompt are correct; present if `trainer.eval_samples` > 1",
            "share",
            "rises",
        ),
        Metric("eval/sampled_length", "mean number of tokens per sampled answer", "tokens"),
        Metric("eval/sampled_failed_fraction", "share of sampled answers whose reward function failed", "share", "0"),
        Metric(
            "eval/greedy_reward",
            "mean score of greedy answers to the prompts of `data.val`, with one answer per prompt",
            "score",
            "rises",
        ),
        Metric(
            "eval/greedy_reward/<name>",
            "mean score, before weighting, that the reward function `<name>` gives to greedy answers",
            "score",
        ),
        Metric(
            "eval/greedy_accuracy",
            "share of correct greedy answers; present only if a reward function reports correctness (`success`)",
            "share",
            "rises",
        ),
        Metric("eval/greedy_length", "mean number of tokens per greedy answer", "tokens"),
        Metric("eval/greedy_failed_fraction", "share of greedy answers whose reward function failed", "share", "0"),
    ),
    "Time": (
        Metric(
            "timing/<phase>",
            "wall-clock time of the phase `<phase>` of a training step; `timing/step` is the time of the whole step",
            "seconds",
        ),
        Metric(
            "perf/tokens_per_s",
            "number of prompt and response tokens of the step, including tool outputs, divided by the time of the step",
            "tokens per second",
        ),
        Metric(
            "perf/actor_filler_fraction",
            "share of filler tokens among all tokens of the actor update; ranks without samples process filler tokens",
            "share",
            "near 0",
        ),
        Metric(
            "perf/critic_filler_fraction",
            "share of filler tokens among all tokens of the critic update; ranks without samples process filler tokens",
            "share",
            "near 0",
        ),
        Metric(
            "perf/actor_idle_fraction",
            "share of the actor update's time in which ranks wait for slower ranks, estimated from the work per rank",
            "share",
            "below 0.1",
        ),
        Metric(
            "perf/critic_idle_fraction",
            "share of the critic update's time in which ranks wait for slower ranks, estimated from the work per rank",
            "share",
            "below 0.1",
        ),
    ),
}
METRICS = tuple(metric for metrics in SECTIONS.values() for metric in metrics)


def page() -> str:
    """Return the text of `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "The command `python -m rltrain.monitoring.catalogue` prints this page from `rltrain/monitoring/catalogue.py`.",
        "",
        "The file `metrics.jsonl` has one line per training step, and `evaluations.jsonl` has one per evaluation.",
        "Shares and means over tokens count all trained tokens, even tokens that `correction` or `rejection` drops.",
        "No metric under `reward/`, `actor/` or `critic/` depends on the duration of a step.",
        (
            "The progress line's `kl` is the first existing metric of `actor/ref_kl`, `reward/kl`, "
            "`actor/teacher_kl`, `actor/ppo_kl`."
        ),
        "The metrics of a named evaluation set (`data.val_sets`) have names such as `eval/aime/sampled_reward`.",
        "A placeholder in a metric's name (`<name>`, `<phase>` or `<k>`) stands for one word or number.",
    ]
    for title, metrics in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | meaning | unit | healthy |", "|---|---|---|---|"]
        lines += [f"| `{one.name}` | {one.meaning} | {one.unit} | {one.healthy} |" for one in metrics]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
