"""Rules that find failing reward functions, rewards without a learning signal, and rewards that mislead the policy."""

import re
from collections import Counter
from math import sqrt
from typing import Any

from rltrain.base.errors import one_line
from rltrain.monitoring.alarms import LOST_SHARE, PERSISTENT_STEPS, WINDOW_STEPS
from rltrain.monitoring.doctor.history import Finding, History, Points, final_streak, last_mean, mean, shown, windows

# The rule `reward function fails` reports nothing if fewer than 1% of the rewards failed, because malformed answers may
# cause a few failures.
FAILED_SHARE = 0.01
UNSCORED_SHARE = 0.5  # The doctor reports missing scores only if at least half of the answers have no score.
# The rule `reward hacking` compares the first five training steps of a run with the last five training steps.
ENOUGH_FOR_TRENDS = 10
# A rise of the mean reward by less than half the standard deviation of the individual rewards counts as noise.
GAINED_SPREADS = 0.5
FLAT_SHARE = 0.02  # An accuracy that rises by less than 0.02 counts as constant.
LOST_ACCURACY = 0.05  # The doctor ignores a fall of the accuracy by less than 0.05 between two evaluations.
# The doctor ignores a fall of the mean evaluation reward by less than a quarter of the standard deviation of the
# individual rewards.
LOST_SPREADS = 0.25
UNCERTAIN = 2.0  # A difference of less than two standard errors between two evaluations may be due to chance.
_COUNTED = re.compile(r"eval/(?:[^/]+/)?(?:sampled|greedy)_(?:accuracy|reward)")


def reward_fails(history: History) -> Finding | None:
    """Find reward functions that fail.

    A reward function failed for at least 1% of the run's answers, or the run stopped because too many rewards of a step
    failed.
    """
    points = history.points("reward/failed_fraction")
    stopped = [file for file in history.run.samples if file.failed]
    if not stopped and (not points or mean(points) < FAILED_SHARE):
        return None
    evidence = []
    step = stopped[-1].step if stopped else 0
    if points and mean(points) > 0:
        step = next(step for step, value in points if value > 0)
        worst = max(points, key=lambda point: point[1])
        evidence.append(
            f"on average {mean(points):.0%} of a step's rewards failed; the largest share was {worst[1]:.0%}, in step "
            f"{worst[0]}"
        )
    if stopped:
        evidence.append(f"the run stopped at step {stopped[-1].step} because too many rewards failed")
    evidence += _messages(history, stopped[-1].step if stopped else worst[0])
    return Finding(
        step,
        evidence,
        ["the reward function raises an exception, takes longer than reward.timeout_s, or ends its process"],
        [
            "repair the reward function; the tables in rollouts/ have the answers and the errors (column reward_error)",
            "if the reward function is only slow, raise reward.timeout_s",
        ],
    )


def _messages(history: History, step: int) -> list[str]:
    """Return a list with a description of a step's most frequent reward error; [] if no reward of the step failed."""
    files = [file for file in history.run.samples if file.step == step]
    rows = [row for file in files for row in history.rows(file, ["reward_error"])]
    errors = Counter(str(row["reward_error"]) for row in rows if row.get("reward_error"))
    if not errors:
        return []
    (text, count), failed = errors.most_common(1)[0], sum(errors.values())
    return [f"in step {step}, {count} of {failed} failures have this error: {one_line(text, 200)}"]


def reward_never_applies(history: History) -> Finding | None:
    """Find reward functions that return None instead of a score for many answers.

    The doctor reports `reward never applies` if at least half of the answers of the last 5 steps have no score although
    no reward function failed for these answers. The doctor also reports `reward never applies` if one of the reward
    functions returned None for every answer of the last step.
    """
    failed = dict(history.points("reward/failed_fraction"))
    points = [(step, value - failed.get(step, 0.0)) for step, value in history.points("reward/unscored_fraction")]
    many = bool(points) and last_mean(points) >= UNSCORED_SHARE
    silent = _silent(history)
    if not many and not silent:
        return None
    evidence, step = [], history.first_step
    if many:
        evidence.append(
            f"{last_mean(points):.0%} of the latest answers have no score, although no reward function failed"
        )
        step = next(step for step, value in points if value >= UNSCORED_SHARE)
    evidence += [
        f"reward function '{name}' returned None for each answer of step {history.steps[-1]}" for name in silent
    ]
    return Finding(
        step,
        evidence,
        ["the reward function returns None, which means that the reward function does not judge the answer"],
        ["return a number for each answer that the reward function should judge"],
    )


def _silent(history: History) -> list[str]:
    """Return the names of the reward functions that returned None for every answer of the last step.

    Answers for which a reward function failed are ignored.
    """
    files = [file for file in history.run.samples if not file.failed]
    if not files or not history.steps:
        return []
    rows = history.rows(files[-1], ["reward_components", "reward_error"])
    scored = [row["reward_components"] or {} for row in rows if not row["reward_error"]]
    return [name for name in (scored[0] if scored else {}) if all(row.get(name) is None for row in scored)]


def dead_reward(history: History) -> Finding | None:
    """Find a reward that does not distinguish the answers to a prompt.

    In at least the last 5 steps, all answers to each prompt had the same outcome, although the task is not solved. In a
    run with one answer per prompt or with GAE, the reward counts as dead if all answers of a step had the same score in
    each of at least the last 5 steps, although the task is not solved. If the policy learns from teachers alone, a
    reward that does not distinguish answers is no problem.
    """
    if history.setting("algorithm.distillation.outcome_coef") == 0:
        return None
    grouped = history.number("rollout.samples_per_prompt", 2) > 1
    grouped = grouped and history.setting("algorithm.advantage_estimator") != "gae"
    same, spread = history.points("reward/same_outcome_fraction"), history.points("reward/std")
    streak = final_streak(same, lambda value: value >= 1) if grouped else []
    streak = streak or final_streak(spread, lambda value: value <= 1e-6)
    if not streak or history.solved:
        return None
    step = streak[0][0]
    rewards = [point for point in history.points("reward/mean") if point[0] >= step]
    evidence = [f"all answers to each prompt had the same outcome in each of the last {len(streak)} steps"]
    if rewards:
        evidence.append(
            "the mean reward of the steps in which all answers to each prompt had the same outcome is "
            f"{shown(mean(rewards))}"
        )
    if step == history.first_step:
        causes = [
            "the reward function gives every answer the same score",
            "the prompts are far too hard or far too easy for the model",
        ]
    else:
        causes = [
            "the policy has begun to give only one kind of answer",
            "the prompts became too hard or too easy",
        ]
    return Finding(
        step,
        evidence,
        causes,
        [
            "look at the scores in rollouts/, and change the reward function so that different answers get "
            "different scores",
            "use easier or harder prompts in data.train, or raise rollout.samples_per_prompt",
        ],
    )


def reward_hacking(history: History) -> Finding | None:
    """Find a training reward that rises while the share of correct answers stays flat.

    The rule compares the first 5 steps with the last 5 steps of a run of at least 10 steps. The mean reward rose by at
    least half the standard deviation of the individual rewards, but the share of correct answers rose by less than
    0.02. If a run does not measure the share of correct answers, the rule uses the summed scores of the reward
    functions and reward models whose `outcome` is true, provided that `outcome` is false for at least one reward
    function or reward model.
    """
    rewards, spread = windows(history.points("reward/mean")), history.points("reward/std")
    right, what = _correctness(history)
    if len(history.steps) < ENOUGH_FOR_TRENDS or len(rewards) < 2 or len(right) < 2 or not spread:
        return None
    gained, learnt = rewards[-1][1] - rewards[0][1], right[-1][1] - right[0][1]
    if gained < GAINED_SPREADS * mean(spread[:WINDOW_STEPS]) or gained <= 0 or learnt >= FLAT_SHARE:
        return None
    lengths = windows(history.points("rollout/length_mean"))
    evidence = [
        f"the mean reward rose from {shown(rewards[0][1])} to {shown(rewards[-1][1])} by step {rewards[-1][0]}",
        f"{what} changed from {shown(right[0][1])} to {shown(right[-1][1])}",
    ]
    if lengths:
        evidence.append(f"the mean length of answers changed from {lengths[0][1]:.0f} to {lengths[-1][1]:.0f} tokens")
    return Finding(
        rewards[0][0],
        evidence,
        ["the policy earns reward by the form of its answers, such as their length, instead of solving the task"],
        [
            "lower the weight of the functions with outcome: false in reward.functions, or set gate: true for the "
            "function that says whether the answer is correct",
            "read answers in rollouts/ that have a high score",
        ],
    )


def _correctness(history: History) -> tuple[Points, str]:
    """Return the moving average of a measure of correctness over five steps, and a description of the measure.

    In a run with the metric `reward/accuracy`, the measure of correctness is `reward/accuracy`. In a run without
    `reward/accuracy`, the measure of correctness is the sum of the scores of the reward functions and reward models
    whose `outcome` is true, provided that `outcome` is false for at least one reward function or reward model. For a
    run without a measure of correctness, return an empty list and an empty description.
    """
    accuracy = history.points("reward/accuracy")
    if accuracy:
        return windows(accuracy), "the share of correct answers"
    outcome = [part["name"] for part in history.reward_parts if part.get("outcome", True)]
    if not outcome or len(outcome) == len(history.reward_parts):
        return [], ""
    series = [dict(history.points(f"reward/{name}/mean")) for name in outcome]
    steps = [step for step in history.steps if all(step in one for one in series)]
    return windows([(step, sum(one[step] for one in series)) for step in steps]), f"the score of {', '.join(outcome)}"


def worse_evaluation(history: History) -> Finding | None:
    """Find evaluations that get worse while the training reward rises.

    The accuracy of an evaluation fell from its best value to its last value by at least 0.05 and by at least two
    standard errors, while the mean training reward rose. For an evaluation without accuracy, the rule requires that the
    mean reward of the evaluation fell by at least a quarter of the standard deviation of the individual rewards and by
    at least two standard errors.
    """
    names = [name for name in history.names() if _COUNTED.fullmatch(name)]
    names = [name for name in names if name.replace("_reward", "_accuracy") == name or not _has_accuracy(history, name)]
    found = [one for name in names if (one := _lost(history, name)) is not None]
    if not found:
        return None
    step, evidence = min(found)
    return Finding(
        step,
        [*(text for _, texts in found for text in texts[:1]), evidence[1]],
        [
            "the policy memorises the training prompts",
            "the training reward function rewards something that the evaluation does not reward",
        ],
        [
            "end the run earlier, and keep the best checkpoint with trainer.keep_best, trainer.eval_every and "
            "trainer.save_every",
            "use more prompts in data.train, or a KL term (algorithm.kl_loss.kl_loss_coef)",
            "make the functions in reward.functions stricter",
        ],
    )


def _has_accuracy(history: History, name: str) -> bool:
    return bool(history.evaluated(name.replace("_reward", "_accuracy")))


def _lost(history: History, name: str) -> tuple[int, list[str]] | None:
    """Return the step after which an evaluation metric got worse, and two sentences of evidence.

    Return None if the evaluation metric did not get worse.
    """
    points, spread = history.evaluated(name), history.points("reward/std")
    best = max(points, key=lambda point: point[1], default=None)
    if best is None or not spread or points[-1][0] <= best[0]:
        return None
    before = [point for point in history.points("reward/mean") if point[0] <= best[0] + WINDOW_STEPS][-WINDOW_STEPS:]
    after = history.points("reward/mean")[-WINDOW_STEPS:]
    is_accuracy, lost = name.endswith("accuracy"), best[1] - points[-1][1]
    deviation = sqrt(max(best[1] * (1 - best[1]), 0.0)) if is_accuracy else max(value for _, value in spread)
    error = deviation * sqrt(2 / max(history.number("data.val_size", 100), 1))
    limit = max(LOST_ACCURACY if is_accuracy else LOST_SPREADS * deviation, UNCERTAIN * error)
    if lost < limit or not before or before[-1][0] >= after[-1][0] or mean(after) <= mean(before):
        return None
    return best[0], [
        f"{name} fell from {shown(best[1])} after step {best[0]} to {shown(points[-1][1])} after step {points[-1][0]}",
        f"the mean training reward rose from {shown(mean(before))} to {shown(mean(after))}",
    ]


def reward_fell(history: History) -> Finding | None:
    """Find a mean reward that rose and then fell again.

    The rule compares the mean reward over the last 5 steps with the best mean reward over 5 consecutive steps. The
    doctor reports a fall if the mean reward fell from the best value by more than half of the rise from the first 5
    steps to the best value, and by more than the standard deviation of the individual rewards.
    """
    found, spread = windows(history.points("reward/mean")), dict(windows(history.points("reward/std")))
    best = max(found, key=lambda point: point[1], default=None)
    if best is None or best[0] == found[-1][0]:
        return None
    limit = best[1] - max(LOST_SHARE * (best[1] - found[0][1]), spread.get(best[0], 0.0))
    if found[-1][1] >= limit:
        return None
    step = next(step for step, value in found if step > best[0] and value < limit)
    return Finding(
        step,
        [
            f"the mean reward over {WINDOW_STEPS} steps fell from {shown(best[1])} in step {best[0]} to "
            f"{shown(found[-1][1])} in step {found[-1][0]}"
        ],
        [
            "the updates are too large",
            "the engine does not sample from the trained policy",
        ],
        [
            "start a new run from the model of an earlier checkpoint (model.path=RUN/checkpoints/step_N/model) with a "
            "lower actor.lr or a KL term (algorithm.kl_loss.kl_loss_coef)",
            "set trainer.save_every=10 and trainer.keep_best=reward/mean, so that the best checkpoint is kept",
        ],
    )


def too_few_groups(history: History) -> Finding | None:
    """Detect that dynamic sampling does not fill the training batches.

    On average over the last 5 training steps, at least half of the prompt groups of a batch are missing, although the
    policy has not solved the task.
    """
    missing, wanted = history.points("rollout/groups_missing"), history.number("trainer.prompts_per_step", 0)
    low = [(step, value / wanted) for step, value in missing] if wanted else []
    if len(low) < PERSISTENT_STEPS or last_mean(low) < 0.5 or history.solved:
        return None
    first: Any = next(step for step, value in low if value >= 0.5)
    return Finding(
        first,
        [
            f"{last_mean(low):.0%} of the {wanted:.0f} prompt groups of a step are missing "
            f"(mean of the last {WINDOW_STEPS} steps)"
        ],
        ["almost all prompts are too easy or too hard, so all answers to a prompt have the same outcome"],
        [
            "use easier or harder prompts in data.train",
            "raise rollout.samples_per_prompt or algorithm.dynamic_sampling",
        ],
    )
