"""Figures of a run that mean that something went wrong, each said in one line: pure, from the metrics of each step.

An alarm is told when it begins, and again only after it had stopped. Nothing is stored: the metrics of the steps before
a restart, looked at again in order, put `Alarms` back to where it was.
"""

from collections import deque
from collections.abc import Callable, Mapping
from math import isfinite

from rltrain.settings.schema import Config

START_STEPS = 3  # whose mean entropy is the start's: one step is noisy, and after ten a policy has moved
# A policy that learns loses entropy and has cause to: the built-in tasks end at 20 to 40% of their start. Below this
# share of it answers to one prompt are all but the same, and nothing is left to choose between.
COLLAPSED_SHARE = 0.05
# Many prompts that are too easy or too hard for one batch are chance in a small one; in so many batches they are not.
PERSISTENT_STEPS = 5
# Rewards are compared as means of so many steps: one step's prompts may be harder.
WINDOW_STEPS = 5
# How much of what was learnt, from the first window to the best, must be lost, and this fall must be as large as the
# spread of single rewards was at the best. Then it is no noise of the mean, nor a curve that has become flat.
LOST_SHARE = 0.5


class Alarms:
    """Looks at each step's metrics.

    Args:
        config: the whole config.
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
        self.collapsed = self.flat = 0  # steps in a row
        self.window: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)  # (mean, spread) of the last steps
        self.first_reward: float | None = None
        self.best: tuple[float, float] = (float("-inf"), 0.0)

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[str]:
        """One line for each alarm that begins with this step: value, limit, what to do. Steps come in order."""
        known = {name: value for name, value in metrics.items() if value is not None and isfinite(value)}
        begun = []
        for name, rule in self.rules.items():
            message = rule(known)
            if message and name not in self.sounding:
                begun.append(f"step {step}: {message}")
            (self.sounding.add if message else self.sounding.discard)(name)
        return begun

    def _gap(self, metrics: Mapping[str, float]) -> str:
        """Engine and actor differ for the same weights; with older ones in the batch they should."""
        gap = metrics.get("rollout/log_prob_gap", metrics.get("actor/engine_gap", 0.0))
        limit = self.config.rollout.max_log_prob_gap
        if metrics.get("rollout/staleness_max", 0.0) > 0 or gap <= limit:
            return ""
        return (
            f"engine and actor differ by {gap:.3g} nats a token, above rollout.max_log_prob_gap={limit:g}: what is "
            "sampled is not what is trained; keep rollout.verify_sync on, check model.dtype, or correct for it "
            "(algorithm=tis)"
        )

    def _entropy(self, metrics: Mapping[str, float]) -> str:
        """The policy says the same whatever is drawn."""
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
            f"the entropy of answers is {entropy:.3g} nats a token, for {self.collapsed} steps below {limit:.3g}, "
            f"{COLLAPSED_SHARE:.0%} of its start: answers no longer differ, so nothing new is tried; lower actor.lr, "
            "raise algorithm.entropy_coef, or stop here if the reward is where it should be"
        )

    def _same_outcome(self, metrics: Mapping[str, float]) -> str:
        """Answers to one prompt all have the same outcome: of one answer, that means nothing."""
        all_flat = metrics.get("reward/same_outcome_fraction", 0.0) >= 1
        self.flat = self.flat + 1 if all_flat and self.config.rollout.samples_per_prompt > 1 else 0
        if self.flat < PERSISTENT_STEPS:
            return ""
        return (
            f"for {self.flat} steps all answers to each prompt had one outcome (reward/same_outcome_fraction=1; limit: "
            f"{PERSISTENT_STEPS} steps): nothing tells good answers from bad ones; look at rollouts/ for a reward "
            "that cannot vary, use easier or harder prompts, or raise rollout.samples_per_prompt"
        )

    def _reward(self, metrics: Mapping[str, float]) -> str:
        """The mean of the last steps has fallen back."""
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
            f"the reward is {mean:.3g} over the last {WINDOW_STEPS} steps, below {limit:.3g}, and was {best:.3g} at "
            "its best: the policy has come apart; start a new run from the model of a checkpoint before that "
            "(model.path=RUN/checkpoints/step_N/model), with a lower actor.lr or a KL term "
            "(algorithm.kl_loss.kl_loss_coef)"
        )
