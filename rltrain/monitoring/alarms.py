"""Alarms: one-line messages that appear when the metrics of a run show that something went wrong.

An alarm is reported when its condition begins to hold, and again only if the condition has ceased to hold in between.
Alarms depend only on the metrics of each step, so checkpoints do not store them: a resumed run restores the state of
`Alarms` by passing the metrics of all earlier steps in order.
"""

from collections import deque
from collections.abc import Callable, Mapping
from math import isfinite

from rltrain.settings.schema import Config

# Number of steps at the start of a run whose mean entropy counts as the starting entropy. The entropy of a single step
# is noisy, and after ten steps the policy has changed.
START_STEPS = 3
# Alarm threshold for the entropy, as a share of the starting entropy. The entropy of a policy that learns falls for a
# good reason: on the built-in tasks, the final entropy is 20 to 40% of the starting entropy. Below this threshold, the
# answers to one prompt are almost identical, so the policy has no alternatives left to choose from.
COLLAPSED_SHARE = 0.05
# Number of consecutive steps after which an alarm condition counts as persistent. One small batch may by chance contain
# many prompts that are too easy or too hard, but a whole series of such batches is not chance.
PERSISTENT_STEPS = 5
# Number of steps over which rewards are averaged for comparison, because the prompts of a single step may be harder.
WINDOW_STEPS = 5
# An alarm is raised if the mean reward falls by at least LOST_SHARE of its gain from the first window of steps to the
# best window. The fall must also be at least as large as the standard deviation of single rewards in the best window.
# The two conditions together prevent alarms from noise in the mean and from a reward curve that has become flat.
LOST_SHARE = 0.5


class Alarms:
    """Checks the metrics of each step for signs of failure.

    Args:
        config: the whole config of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rules: dict[str, Callable[[Mapping[str, float]], str]] = {
            "log_prob_gap": self._gap,
            "entropy": self._entropy,
            "same_outcome": self._same_outcome,
            "reward": self._reward,
        }
        self.sounding: set[str] = set()
        self.first_entropies: list[float] = []
        self.collapsed = self.flat = 0  # numbers of consecutive steps for which the alarm conditions have held
        # (mean, standard deviation) of the reward in each of the last steps
        self.window: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)
        self.first_reward: float | None = None
        self.best: tuple[float, float] = (float("-inf"), 0.0)

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[str]:
        """Check the metrics of one step, and return a line with value, limit and remedy for each newly raised alarm.

        Call `look` exactly once for each step, in order.
        """
        known = {name: value for name, value in metrics.items() if value is not None and isfinite(value)}
        begun = []
        for name, rule in self.rules.items():
            message = rule(known)
            if message and name not in self.sounding:
                begun.append(f"step {step}: {message}")
            (self.sounding.add if message else self.sounding.discard)(name)
        return begun

    def _gap(self, metrics: Mapping[str, float]) -> str:
        """Return an alarm message if engine and actor disagree too much on the log-probs of tokens; otherwise "".

        A batch with tokens that older weights sampled raises no alarm, because older weights give other log-probs. With
        top-p or top-k, the result is always "", because the engine's log-probs then describe a truncated distribution.
        """
        if self.config.rollout.is_restricted:
            return ""
        gap = metrics.get("rollout/log_prob_gap", metrics.get("actor/engine_gap", 0.0))
        limit = self.config.rollout.max_log_prob_gap
        if metrics.get("rollout/staleness_max", 0.0) > 0 or gap <= limit:
            return ""
        return (
            f"engine and actor differ by {gap:.3g} nats per token, above rollout.max_log_prob_gap={limit:g}: the "
            "policy that samples is not the policy that is trained; keep rollout.verify_sync on, check model.dtype, "
            "or correct for the difference (algorithm=tis)"
        )

    def _entropy(self, metrics: Mapping[str, float]) -> str:
        """Return an alarm message if the entropy has collapsed, so that samples hardly differ; otherwise ""."""
        if "rollout/entropy" not in metrics:
            return ""
        entropy = metrics["rollout/entropy"]
        if len(self.first_entropies) < START_STEPS:
            self.first_entropies.append(entropy)
            return ""
        limit = COLLAPSED_SHARE * sum(self.first_entropies) / START_STEPS
        self.collapsed = self.collapsed + 1 if entropy < limit else 0
        if self.collapsed < PERSISTENT_STEPS:
            return ""
        return (
            f"the entropy of answers is {entropy:.3g} nats per token, and has been below {limit:.3g} "
            f"({COLLAPSED_SHARE:.0%} of its initial value) for {self.collapsed} steps: answers hardly differ, so the "
            "policy no longer explores; lower actor.lr, raise algorithm.entropy_coef, or stop the run if the reward "
            "is already high enough"
        )

    def _same_outcome(self, metrics: Mapping[str, float]) -> str:
        """Return an alarm message if the answers to every prompt have had the same outcome for several steps; else "".

        If each prompt has only one answer, there is nothing to compare, so no alarm is raised.
        """
        all_flat = metrics.get("reward/same_outcome_fraction", 0.0) >= 1
        self.flat = self.flat + 1 if all_flat and self.config.rollout.samples_per_prompt > 1 else 0
        if self.flat < PERSISTENT_STEPS:
            return ""
        return (
            f"for {self.flat} steps, all answers to each prompt have had the same outcome "
            f"(reward/same_outcome_fraction=1; limit: {PERSISTENT_STEPS} steps): the reward does not tell good "
            "answers from bad ones; look in rollouts/ for a reward that never varies, use easier or harder prompts, "
            "or raise rollout.samples_per_prompt"
        )

    def _reward(self, metrics: Mapping[str, float]) -> str:
        """Return an alarm message if the mean reward of the last steps is far below its best value so far; else ""."""
        if "reward/mean" not in metrics:
            return ""
        self.window.append((metrics["reward/mean"], metrics.get("reward/std", 0.0)))
        if len(self.window) < WINDOW_STEPS:
            return ""
        mean, spread = (sum(values) / WINDOW_STEPS for values in zip(*self.window, strict=True))
        if self.first_reward is None:
            self.first_reward = mean
        self.best = max(self.best, (mean, spread))
        best, spread = self.best
        limit = best - max(LOST_SHARE * (best - self.first_reward), spread)
        if mean >= limit:
            return ""
        return (
            f"the mean reward of the last {WINDOW_STEPS} steps is {mean:.3g}, below {limit:.3g}, and its best value "
            f"was {best:.3g}: the policy has collapsed; start a new run from the model of a checkpoint before the "
            "collapse (model.path=RUN/checkpoints/step_N/model), with a lower actor.lr or a KL term "
            "(algorithm.kl_loss.kl_loss_coef)"
        )
