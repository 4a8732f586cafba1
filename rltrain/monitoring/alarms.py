"""Alarms: one-line messages that appear when the metrics of a run show that something went wrong.

An alarm is reported when its condition begins to hold. An alarm is reported again only if its condition stops holding
and then begins to hold again. The state of `Alarms` depends only on the metrics of the earlier steps, so
checkpoints do not store the state. A resumed run restores the state of `Alarms` by passing the metrics of all earlier
steps, in order, to `Alarms.look`.
"""

from collections import deque
from collections.abc import Callable, Mapping
from math import isfinite

from rltrain.settings.schema import Config

# The starting entropy of a run is the mean entropy of the run's first START_STEPS steps. The entropy of a single step
# is too noisy to serve as the starting entropy. A mean entropy over ten or more steps would include steps in which
# training has already changed the policy.
START_STEPS = 3
# The entropy alarm's threshold is the starting entropy times COLLAPSED_SHARE. A moderate fall of the entropy is normal
# in training: on the built-in tasks, the final entropy is 20 to 40% of the starting entropy. Below 5% of the starting
# entropy, the answers to one prompt are almost identical, so the policy no longer explores.
COLLAPSED_SHARE = 0.05
# Two alarms are raised only after their condition has held for PERSISTENT_STEPS consecutive steps: the entropy alarm,
# and the alarm that all answers to each prompt have the same outcome. A single small batch may by chance contain only
# prompts that are too easy or too hard, but several consecutive batches rarely do.
PERSISTENT_STEPS = 5
# The alarm about teachers is raised if more than MISSING_SHARE of a step's answers have no distillation term. A smaller
# share of answers without a distillation term is normal: some answers are too long for a teacher's context, and some
# requests fail while a teacher's endpoint restarts.
MISSING_SHARE = 0.05
# The reward alarm compares mean rewards over windows of WINDOW_STEPS steps, because the prompts of a single step may be
# unusually hard.
WINDOW_STEPS = 5
# The rise of the mean reward is the best value of the mean reward minus its first value. The reward alarm is raised
# only if the mean reward falls below its best value by more than LOST_SHARE times the rise of the mean reward. A second
# condition of the reward alarm is that the mean reward has fallen by more than the standard deviation of the individual
# rewards in the window with the best mean reward, because a smaller fall may be noise.
LOST_SHARE = 0.5


class Alarms:
    """Checker that looks for signs of failure in the metrics of each training step.

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
            "teachers": self._teachers,
        }
        self.sounding: set[str] = set()
        self.first_entropies: list[float] = []
        # `collapsed` counts the most recent consecutive steps with collapsed entropy. `flat` counts the most recent
        # consecutive steps in which all answers to each prompt had the same outcome.
        self.collapsed = self.flat = 0
        # The pairs (mean reward, standard deviation of rewards) of the last WINDOW_STEPS steps.
        self.window: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)
        self.first_reward: float | None = None
        self.best: tuple[float, float] = (float("-inf"), 0.0)

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[str]:
        """Check the metrics of one step, and return one line of text for each newly raised alarm.

        The text of an alarm contains the value of a metric, the limit of the metric, and a remedy. Call the method
        `look` exactly once for each training step, in order.
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
        """Return an alarm message if the log-probs of the engine and of the actor differ too much; otherwise return "".

        No alarm is raised if some tokens were sampled with weights older than the actor's, because different weights
        give different log-probs. No alarm is raised with top-p or top-k sampling, because the engine's log-probs
        describe the truncated distribution.
        """
        if self.config.rollout.is_restricted:
            return ""
        gap = metrics.get("rollout/log_prob_gap", metrics.get("actor/engine_gap", 0.0))
        limit = self.config.rollout.max_log_prob_gap
        if metrics.get("rollout/staleness_max", 0.0) > 0 or gap <= limit:
            return ""
        return (
            f"the log-probs of engine and actor differ by {gap:.3g} nats per token, above "
            f"rollout.max_log_prob_gap={limit:g}: the policy that samples is not the policy that is trained; keep "
            f"rollout.verify_sync on, and {self._way()}"
        )

    def _way(self) -> str:
        """Return what a user can do about a gap between the log-probs of engine and actor."""
        if self.config.rollout.quantization is not None:
            return "either use rollout.vllm.quantization=null or raise the limit"
        return "check model.dtype or correct for the difference (algorithm=tis)"

    def _entropy(self, metrics: Mapping[str, float]) -> str:
        """Return an alarm message if the entropy has collapsed, so that answers hardly differ; otherwise return ""."""
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
        """Return an alarm message if all answers to each prompt had the same outcome for several steps; else "".

        No alarm is raised if each prompt has only one answer, because there are no answers to compare. No alarm is
        raised if the policy learns only from teachers, because training then does not use the rewards.
        """
        all_flat = metrics.get("reward/same_outcome_fraction", 0.0) >= 1
        compared = self.config.rollout.samples_per_prompt > 1 and not self.config.algorithm.distillation.alone
        self.flat = self.flat + 1 if all_flat and compared else 0
        if self.flat < PERSISTENT_STEPS:
            return ""
        return (
            f"for {self.flat} steps, all answers to each prompt have had the same outcome "
            f"(reward/same_outcome_fraction=1; limit: {PERSISTENT_STEPS} steps): the reward does not tell good "
            "answers from bad ones; look in rollouts/ for a reward that never varies, use easier or harder prompts, "
            "or raise rollout.samples_per_prompt"
        )

    def _teachers(self, metrics: Mapping[str, float]) -> str:
        """Return an alarm message if too many answers of the step were not scored by a teacher; otherwise return ""."""
        missing = metrics.get("actor/teacher_missing_fraction", 0.0)
        if missing <= MISSING_SHARE:
            return ""
        effect = (
            "the training step leaves out answers without a distillation term"
            if self.config.algorithm.distillation.alone
            else "for answers without a distillation term, the training step uses only rewards"
        )
        return (
            f"{missing:.0%} of the answers have no distillation term, above {MISSING_SHARE:.0%}, and {effect}: a "
            "teacher's endpoint fails, or its context is too short; the log names the reason (verbose=true), and "
            "algorithm.distillation.retries and timeout_s may help"
        )

    def _reward(self, metrics: Mapping[str, float]) -> str:
        """Return an alarm message if the mean reward has fallen far below its best value; otherwise return "".

        Both the current and the best mean reward are means over 5 consecutive steps.
        """
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
