"""Rules that detect engines with wrong weights or wrong log-probs, outdated answers, and truncated answers."""

from rltrain.monitoring.alarms import WINDOW_STEPS
from rltrain.monitoring.doctor.history import (
    ENOUGH_STEPS,
    Finding,
    History,
    Points,
    final_streak,
    last_mean,
    mean,
    shown,
)

DEFAULT_GAP = 0.02  # Assumed value of `rollout.max_log_prob_gap`, in nats per token, if the run has no config.
# Rounding differences between engine and actor never make the log-prob gap grow tenfold during a run.
GROWN_GAP = 10.0
CUT_SHARE = 0.5  # If half of the answers are truncated, the length limit dominates what the policy learns.
# If the effective sample size of the importance weights is less than half the number of tokens, more than half of the
# batch is wasted.
SMALL_SAMPLE = 0.5


def _gaps(history: History) -> Points:
    """Return the pairs (step, mean gap between the log-probs of engine and actor).

    A step reports the mean log-prob gap of engine and actor as `rollout/log_prob_gap`, as `actor/engine_gap`, or as
    both. `rollout/log_prob_gap` is preferred.
    """
    found = dict(history.points("actor/engine_gap")) | dict(history.points("rollout/log_prob_gap"))
    return sorted(found.items())


def _asynchronous(history: History) -> bool:
    return any(value > 0 for _, value in history.points("rollout/staleness_max"))


def _above(history: History) -> Points:
    """Return the pairs (step, log-prob gap) of the last consecutive steps in which the gap is above the limit.

    `_above` returns [] unless the log-prob gap is above `rollout.max_log_prob_gap` in each of the last 3 steps.
    """
    limit = history.number("rollout.max_log_prob_gap", DEFAULT_GAP)
    return final_streak(_gaps(history), lambda value: value > limit, ENOUGH_STEPS)


def stale_weights(history: History) -> Finding | None:
    """Detect an engine that does not use the weights that the trainer sent.

    In at least the last 3 steps, the gap between the log-probs of engine and actor is above `rollout.max_log_prob_gap`.
    The mean log-prob gap of the last 5 steps is at least ten times the gap of the first step. According to the engine,
    all answers were sampled with current weights (`rollout/staleness_max` is always 0).
    """
    gaps, above = _gaps(history), _above(history)
    if not above or _asynchronous(history) or last_mean(gaps) < GROWN_GAP * gaps[0][1]:
        return None
    worst = max(gaps, key=lambda point: point[1])
    limit = history.number("rollout.max_log_prob_gap", DEFAULT_GAP)
    evidence = [
        f"the log-probs of engine and actor differ by {shown(worst[1])} nats per token in step {worst[0]}, and by "
        f"{shown(gaps[0][1])} in step {gaps[0][0]} (rollout.max_log_prob_gap={limit:g})",
        "according to the engine, all answers were sampled with the current weights (rollout/staleness_max=0)",
    ]
    checked = history.setting("rollout.verify_sync", True)
    if not checked:
        evidence.append("rollout.verify_sync=false: the run did not check that new weights arrive at the engine")
    return Finding(
        above[0][0],
        evidence,
        ["the engine computes with old weights: a weight sync fails, or the engine keeps a copy of old weights"],
        [
            "rollout.verify_sync=true, which stops the run at the first sync that fails",
            "if the engine is your own class, check how the engine loads new weights",
        ],
    )


def engine_differs(history: History) -> Finding | None:
    """Detect an engine whose log-probs differ from the actor's log-probs, although the engine has the actor's weights.

    In at least the last 3 steps, the gap between the log-probs of engine and actor is above `rollout.max_log_prob_gap`,
    although all answers were sampled with current weights. The mean log-prob gap of the last 5 steps is less than ten
    times the gap of the first step.
    """
    gaps, above = _gaps(history), _above(history)
    if not above or _asynchronous(history) or last_mean(gaps) >= GROWN_GAP * gaps[0][1]:
        return None
    limit = history.number("rollout.max_log_prob_gap", DEFAULT_GAP)
    return Finding(
        above[0][0],
        [
            f"the log-probs of engine and actor differ by {shown(last_mean(gaps))} nats per token in the last steps, "
            f"above {limit:g}"
        ],
        ["the engine uses other kernels or another precision than the actor, such as quantized weights"],
        ["check model.dtype, or correct for the log-prob gap (algorithm=tis or algorithm.correction.level=token)"],
    )


def stale_answers(history: History) -> Finding | None:
    """Detect off-policy answers for which no correction is configured.

    Some answers were sampled with weights older than the current weights (`rollout/staleness_max` is above 0). The gap
    between the log-probs of engine and actor, averaged over all steps, is above `rollout.max_log_prob_gap`. The run has
    no off-policy correction: `algorithm.correction.level` and `algorithm.rejection.kl_estimator` are null, and
    `algorithm.old_log_probs` is `actor`.
    """
    gaps = _gaps(history)
    corrected = (
        history.setting("algorithm.correction.level") is not None
        or history.setting("algorithm.rejection.kl_estimator") is not None
        or history.setting("algorithm.old_log_probs", "actor") != "actor"
    )
    limit = history.number("rollout.max_log_prob_gap", DEFAULT_GAP)
    if corrected or len(gaps) < ENOUGH_STEPS or not _asynchronous(history) or mean(gaps) <= limit:
        return None
    oldest = max(value for _, value in history.points("rollout/staleness_max"))
    return Finding(
        next(step for step, value in gaps if value > limit),
        [
            f"answers were sampled with weights up to {oldest:.0f} versions older than the trained weights",
            f"the log-probs of engine and actor differ by {shown(mean(gaps))} nats per token on average, "
            f"above {limit:g}",
            "algorithm.correction.level=null: the loss treats all answers as sampled from the current policy",
        ],
        ["the config, or a preset for synchronous training, switched the off-policy correction off"],
        ["algorithm.correction.level=auto", "a lower trainer.max_staleness"],
    )


def answers_too_old(history: History) -> Finding | None:
    """Detect answers that were sampled with weights too old for learning.

    Some answers were sampled with weights older than the current weights. The effective sample size of the importance
    weights, averaged over the last 5 steps, is less than half the number of tokens.
    """
    sizes = history.points("rollout/effective_sample_size") or history.points("actor/engine_effective_sample_size")
    if len(sizes) < ENOUGH_STEPS or not _asynchronous(history) or last_mean(sizes) >= SMALL_SAMPLE:
        return None
    oldest = max(value for _, value in history.points("rollout/staleness_max"))
    return Finding(
        next(step for step, value in sizes if value < SMALL_SAMPLE),
        [
            f"the effective sample size of the last {WINDOW_STEPS} steps is {last_mean(sizes):.0%} of the token count",
            f"answers are up to {oldest:.0f} weight versions old",
        ],
        ["the policy changes too much between the generation of an answer and the training on this answer"],
        ["a lower trainer.max_staleness, or a lower actor.lr"],
    )


def answers_cut(history: History) -> Finding | None:
    """Detect answers that are truncated at the length limit.

    In at least the last 3 steps, half or more of the answers are truncated at `rollout.max_response_length`.
    """
    streak = final_streak(history.points("rollout/truncated_fraction"), lambda value: value >= CUT_SHARE, ENOUGH_STEPS)
    if not streak:
        return None
    step, limit = streak[0][0], history.number("rollout.max_response_length", 0)
    evidence = [f"{mean(streak):.0%} of the answers were truncated from step {step} to step {streak[-1][0]}"]
    if limit:
        evidence.append(f"rollout.max_response_length={limit:.0f}")
    if step == history.first_step:
        causes = ["the length limit is shorter than the answers of this model"]
    else:
        causes = ["the policy has learnt to write longer answers, or has forgotten how to end an answer"]
    return Finding(
        step,
        evidence,
        [*causes, "the model does not end its answers: its chat template or its training data has no end token"],
        [
            "raise rollout.max_response_length",
            "penalise long answers (algorithm.reward_shaping.overlong_buffer=auto), or exclude truncated answers "
            "(algorithm.mask_truncated or algorithm.exclude_truncated)",
        ],
    )
