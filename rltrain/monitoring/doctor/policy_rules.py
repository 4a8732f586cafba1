"""Rules that detect bad updates, a collapsed or drifting policy, and a critic that does not learn."""

from rltrain.monitoring.alarms import COLLAPSED_SHARE, PERSISTENT_STEPS, WINDOW_STEPS
from rltrain.monitoring.doctor.history import (
    ENOUGH_STEPS,
    Finding,
    History,
    Points,
    last_mean,
    mean,
    shown,
    start_mean,
)

HEALTHY_KL = 0.1  # The updates of one step usually move the policy by a KL of at most 0.1 nats per token.
# Updates that move the policy by a KL of at least 0.3 nats per token in a step count as too large if they occur in at
# least 3 steps.
LARGE_KL = 0.3
# Updates that move the policy by a KL of at least 0.5 nats per token in a single step count as too large if the reward
# then falls.
HUGE_KL = 0.5
HEALTHY_CLIPPED = 0.3  # Usually, at most 30% of the tokens of a step are clipped.
EXPLODED = 10.0  # A gradient norm counts as exploded if it is at least ten times the gradient norm of the first step.
# A fall of the mean reward by less than half the standard deviation of the individual rewards counts as noise.
LOST_SPREADS = 0.5
JUMP = 3.0  # At a usual learning rate, a policy's entropy never changes by a factor of 3 within `JUMP_STEPS` steps.
JUMP_STEPS = 2
FAR_KL = 1.0  # If the KL to the reference is 1 nat per token, the policy's text hardly resembles the reference's text.
# The rule `entropy grows` requires that the entropy has at least doubled since the start of the run.
GROWN_ENTROPY = 2.0
GROWN_BY = 0.5  # The rule `entropy grows` requires that the entropy has risen by at least 0.5 nats per token.
CRITIC_STEPS = 20  # The doctor does not judge a critic before 20 training steps.
JUDGED_STEPS = 10  # A critic's explained variance is noisy, so the doctor averages it over the last 10 steps.


def learning_rate_too_high(history: History) -> Finding | None:
    """Detect updates that are too large.

    The learning rate counts as too high if the updates of one step moved the policy by a KL of at least 0.5 nats
    per token, and the mean reward then fell. Even if the mean reward did not fall, the learning rate counts as too high
    if the updates of at least 3 steps each moved the policy by a KL of at least 0.3 nats per token. With one optimizer
    step per training step, the measured KL (`actor/ppo_kl`) is normally 0. If `actor/ppo_kl` is never above 0, the rule
    uses the entropy instead: the learning rate counts as too high if the entropy changed by a factor of at least 3
    within two steps, and the mean reward then fell.

    To detect a fall of the mean reward, the rule compares the 5 steps up to the large update (or up to the start of
    the entropy change) with the last 5 steps of the run. The mean reward counts as fallen if the mean reward of the
    last 5 steps is lower than the mean reward before the large update or entropy change, by at least half the
    standard deviation of the individual rewards.
    """
    kl = history.points("actor/ppo_kl")
    harmful = [step for step, value in kl if value >= HUGE_KL and _reward_after(history, step)]
    large = [point for point in kl if point[1] >= LARGE_KL]
    if harmful:
        step = harmful[0]
    elif len(large) >= ENOUGH_STEPS:
        step = large[0][0]
    elif not any(value > 0 for _, value in kl) and (jump := _jump(history)) is not None:
        step = jump
    else:
        return None
    evidence = _signs(history, step)
    if reward := _reward_after(history, step):
        evidence.append(reward)
    return Finding(
        step,
        evidence,
        [
            _rate(history),
            "the policy is updated too often with the same answers (trainer.epochs_per_step, small mini-batches)",
        ],
        [
            f"actor.lr={shown_rate(history)} or lower",
            "learning-rate warm-up (actor.lr_warmup_steps), a lower actor.max_grad_norm, or a larger "
            "trainer.prompts_per_minibatch",
        ],
    )


def shown_rate(history: History) -> str:
    """Return the learning rate that the doctor recommends, as text.

    If the presets in the run's config contain a learning rate of at most half the run's learning rate, the doctor
    recommends the learning rate of the presets. If the learning rate of the presets is higher than half the
    run's learning rate, or if the presets contain no learning rate, the doctor recommends a tenth of the run's learning
    rate.
    """
    rate, preset = history.number("actor.lr", 0.0), history.preset("actor.lr")
    lower = isinstance(preset, int | float) and 0 < preset <= rate / 2
    return f"{preset if lower else rate / 10:g}"


def _rate(history: History) -> str:
    rate, preset = history.number("actor.lr", 0.0), history.preset("actor.lr")
    if isinstance(preset, int | float) and 0 < preset <= rate / 2:
        return f"actor.lr={rate:g} is {rate / preset:.0f} times the preset's {preset:g}"
    return f"actor.lr={rate:g} is too high for this model and algorithm"


def _jump(history: History) -> int | None:
    """Return the first step of the earliest entropy jump that was followed by a fall of the mean reward.

    An entropy jump is a change of the entropy by a factor of at least `JUMP` within `JUMP_STEPS` steps. If the mean
    reward did not fall after any entropy jump, `_jump` returns None.
    """
    entropy = [point for point in history.points("rollout/entropy") if point[1] > 0]
    for number, (step, _) in enumerate(entropy):
        if _largest_change(entropy[number:])[0] >= JUMP and _reward_after(history, step):
            return step
    return None


def _largest_change(entropy: Points) -> tuple[float, float]:
    """Return the largest factor by which the entropy rose or fell, and the entropy after this change.

    The first value in `entropy` is compared with the values of the next `JUMP_STEPS` steps. If `entropy` has only one
    value, the entropy counts as unchanged (factor 1).
    """
    before = max(entropy[0][1], 1e-9)
    after = [max(value, 1e-9) for _, value in entropy[: JUMP_STEPS + 1]]
    return max((max(before / value, value / before), value) for value in after)


def _signs(history: History, step: int) -> list[str]:
    """Describe unusual values of KL, clip fraction, gradient norm and entropy in the given step and all later steps."""
    kl, clipped, norms, entropy = (
        [point for point in history.points(name) if point[0] >= step]
        for name in ("actor/ppo_kl", "actor/clip_fraction", "actor/grad_norm_max", "rollout/entropy")
    )
    texts = []
    if kl and (worst := max(kl, key=lambda point: point[1]))[1] >= HEALTHY_KL:
        texts.append(
            f"the updates of step {worst[0]} moved the policy by {shown(worst[1])} nats per token (healthy: below 0.1)"
        )
    if clipped and (worst := max(clipped, key=lambda point: point[1]))[1] >= HEALTHY_CLIPPED:
        texts.append(f"{worst[1]:.0%} of the tokens of step {worst[0]} were clipped (healthy: below 30%)")
    first = history.points("actor/grad_norm_max")[:1]
    if first and norms and (worst := max(norms, key=lambda point: point[1]))[1] >= EXPLODED * first[0][1] > 0:
        texts.append(f"the gradient norm grew from {shown(first[0][1])} to {shown(worst[1])} in step {worst[0]}")
    if entropy and (change := _largest_change(entropy))[0] >= JUMP:
        texts.append(
            f"the entropy changed from {shown(entropy[0][1])} to {shown(change[1])} nats per token within "
            f"{JUMP_STEPS} steps"
        )
    return texts


def _reward_after(history: History, step: int) -> str:
    """Describe how the mean reward fell after the given step; return "" if the mean reward did not clearly fall."""
    points, spread = history.points("reward/mean"), dict(history.points("reward/std"))
    before = [point for point in points if point[0] <= step][-WINDOW_STEPS:]
    after = [point for point in points if point[0] > step][-WINDOW_STEPS:]
    deviation = max((spread.get(one, 0.0) for one, _ in before), default=0.0)
    if not before or len(after) < 2 or mean(before) - mean(after) < max(LOST_SPREADS * deviation, 1e-6):
        return ""
    return (
        f"the mean reward fell from {shown(mean(before))} (mean of the steps up to step {step}) to "
        f"{shown(mean(after))} (mean of the last steps)"
    )


def skipped_updates(history: History) -> Finding | None:
    """Detect optimizer updates that were skipped.

    The rule reports a finding if at least one optimizer step of the actor or the critic was skipped because the loss or
    the gradient was not finite.
    """
    counts = {role: history.points(f"{role}/skipped_updates") for role in ("actor", "critic")}
    skipped = {role: [point for point in points if point[1] > 0] for role, points in counts.items()}
    if not any(skipped.values()):
        return None
    texts = [
        f"{sum(value for _, value in points):.0f} updates of the {role} were skipped in {len(points)} steps, the first "
        f"in step {points[0][0]}"
        for role, points in skipped.items()
        if points
    ]
    return Finding(
        min(points[0][0] for points in skipped.values() if points),
        texts,
        ["the rewards, advantages or log-probs of the batch are huge or not finite", "the learning rate is too high"],
        [
            "inspect the saved batch in the folder failed/, which DataProto.load reads",
            "lower actor.lr or the clip ranges in algorithm.loss, or use model.dtype=float32",
        ],
    )


def entropy_collapsed(history: History) -> Finding | None:
    """Detect a policy whose answers to a prompt are almost identical.

    The rule reports a finding if the mean entropy of the last 5 steps is below 5% of the mean entropy of the first 3
    steps, and the task is not solved.
    """
    points = history.points("rollout/entropy")
    if len(points) <= PERSISTENT_STEPS or history.solved:
        return None
    start = start_mean(points)
    limit = COLLAPSED_SHARE * start
    if start <= 0 or last_mean(points) >= limit:
        return None
    step, value = next(point for point in points if point[1] < limit)
    evidence = [f"the entropy fell from {shown(points[0][1])} to {shown(value)} nats per token by step {step}"]
    rewards = history.points("reward/mean")
    if rewards:
        evidence.append(f"the mean reward of the last steps is {shown(last_mean(rewards))}")
    return Finding(
        step,
        evidence,
        [
            "too large or too many updates made one answer certain before the policy tried other answers "
            f"(actor.lr={history.number('actor.lr', 0.0):g}, "
            f"trainer.epochs_per_step={history.number('trainer.epochs_per_step', 1):g})",
            "the sampled answers to a prompt differ too little "
            f"(rollout.temperature={history.number('rollout.temperature', 1.0):g})",
        ],
        [
            "lower actor.lr or trainer.epochs_per_step",
            "raise algorithm.entropy_coef, set algorithm.entropy_target, or raise algorithm.loss.clip_ratio_high "
            "(algorithm=dapo)",
            "rollout.temperature=1",
        ],
    )


def entropy_grows(history: History) -> Finding | None:
    """Detect a policy that becomes random.

    The rule reports a finding if the mean entropy of the last 5 steps is at least twice the mean entropy of the first 3
    steps and at least 0.5 nats per token higher, and the mean reward has not risen.
    """
    points, rewards = history.points("rollout/entropy"), history.points("reward/mean")
    if len(points) <= PERSISTENT_STEPS or not rewards:
        return None
    start, last = start_mean(points), last_mean(points)
    if last < GROWN_ENTROPY * start or last < start + GROWN_BY or last_mean(rewards) > start_mean(rewards):
        return None
    step = next(step for step, value in points if value >= max(GROWN_ENTROPY * start, start + GROWN_BY))
    return Finding(
        step,
        [
            f"the entropy rose from {shown(start)} to {shown(last)} nats per token",
            f"the mean reward changed from {shown(start_mean(rewards))} to {shown(last_mean(rewards))}",
        ],
        ["the entropy bonus outweighs the reward", "the updates are too large, or the advantages are mostly noise"],
        ["lower algorithm.entropy_coef or algorithm.entropy_target", "lower actor.lr, or add a KL term"],
    )


def far_from_reference(history: History) -> Finding | None:
    """Detect a policy that has moved far away from the reference policy.

    The rule reports a finding if the KL to the reference (`actor/ref_kl` or `reward/kl`), averaged over the last 5
    steps, is at least 1 nat per token.
    """
    names = ("actor/ref_kl", "reward/kl")
    points: Points = next((found for name in names if (found := history.points(name))), [])
    if len(points) < ENOUGH_STEPS or last_mean(points) < FAR_KL:
        return None
    return Finding(
        next(step for step, value in points if value >= FAR_KL),
        [f"the KL to the reference rose from {shown(points[0][1])} to {shown(last_mean(points))} nats per token"],
        ["the KL term is too weak for this learning rate and reward"],
        ["raise algorithm.kl_loss.kl_loss_coef or algorithm.kl_in_reward.kl_coef, or lower actor.lr"],
    )


def critic_explains_nothing(history: History) -> Finding | None:
    """Detect a critic that does not learn.

    The finding is reported if the run has at least 20 steps, the rewards are not all equal, and the critic's explained
    variance is at most 0 on average over the last 10 steps.
    """
    points, spread = history.points("critic/explained_variance"), history.points("reward/std")
    judged = points[-JUDGED_STEPS:]
    if len(points) < CRITIC_STEPS or mean(judged) > 0 or not spread or last_mean(spread) <= 1e-6:
        return None
    return Finding(
        judged[0][0],
        [
            f"the mean of critic/explained_variance over the last {JUDGED_STEPS} steps is {shown(mean(judged))} "
            "(1: the values predict the returns exactly, 0: no better than a constant)"
        ],
        [f"critic.lr={history.number('critic.lr', 0.0):g} is too low or far too high", "the returns are mostly noise"],
        [
            "change critic.lr, or critic.clip_range_value if critic/clip_fraction is high",
            "use an algorithm without a critic (algorithm=grpo)",
        ],
    )
