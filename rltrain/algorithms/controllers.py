"""Controllers that adapt the coefficients of the KL penalty and of the entropy bonus to measurements.

The attribute `value` of a KL or entropy controller is the current coefficient. The method `update` changes the current
coefficient after a measurement of the KL or entropy. The method `state_dict` returns the part of the controller's state
that a checkpoint saves.
"""

import math
from typing import Any

from torch import Tensor


class FixedKLController:
    """A constant KL coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, kl: float | Tensor, n_steps: int) -> None:
        """Do nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        """Return the part of the controller's state that a checkpoint saves."""
        return {"kl_coef": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the controller from a `state_dict`."""
        self.value = float(state["kl_coef"])


class AdaptiveKLController(FixedKLController):
    """An adaptive coefficient that steers the KL towards `target`; arXiv 1909.08593, section 2.2.

    e = clip(KL / target - 1, -0.2, 0.2);   kl_coef <- kl_coef * (1 + e * n_steps / horizon)

    KL is the divergence measured since the last update, in the unit of `target`. The number n_steps counts the
    sequences that were processed since the last update. The time constant `horizon` is measured in sequences, like
    n_steps.
    """

    def __init__(self, kl_coef: float, target: float, horizon: int) -> None:
        super().__init__(kl_coef)
        if not (kl_coef > 0 and target > 0 and horizon > 0):
            raise ValueError(
                f"kl_coef={kl_coef}, target={target}, horizon={horizon}: each must be > 0, because the adaptive "
                "controller computes kl / target and n_steps / horizon; set positive values, or use a fixed coefficient"
            )
        self.target, self.horizon = float(target), horizon

    def update(self, kl: float | Tensor, n_steps: int) -> None:
        """Multiply the coefficient by a factor within 1 +- 0.2 * n_steps / horizon.

        Raises:
            ValueError: if `kl` is not finite, or `n_steps` is at least 5 * horizon.
        """
        kl = float(kl)
        if not math.isfinite(kl):
            raise ValueError(f"kl={kl}: the controller needs a finite KL; look for broken log-probs before this step")
        if n_steps >= 5 * self.horizon:
            raise ValueError(
                f"n_steps={n_steps} with horizon={self.horizon}: n_steps must be under 5 * horizon, or one update "
                f"could turn the coefficient negative; use a horizon above {n_steps // 5}"
            )
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedEntropyController:
    """A constant entropy coefficient."""

    def __init__(self, entropy_coef: float) -> None:
        if not 0 <= entropy_coef < math.inf:
            raise ValueError(
                f"entropy_coef={entropy_coef} must be finite and >= 0: it scales the entropy bonus; use 0 for no bonus"
            )
        self.value = float(entropy_coef)

    def update(self, entropy: float | Tensor) -> None:
        """Do nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, float]:
        """Return the part of the controller's state that a checkpoint saves."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the controller from a `state_dict`."""
        self.value = float(state["value"])


class AdaptiveEntropyController(FixedEntropyController):
    """A coefficient that keeps the entropy from falling below `target`; Skywork-OR1, arXiv 2505.22312, section 3.2.5.

        c <- min(c + step, maximum) where e < target,  max(c - step, 0) where e > target
        value = c where e <= target,                   0 where e > target

    e is the mean entropy of the policy over trained tokens, in nats. The coefficient c is the attribute `entropy_coef`.
    The coefficient c starts at the constructor argument `entropy_coef` (at 0 in the Skywork-OR1 paper). Until the first
    measurement of the entropy, the attribute `value` equals the constructor argument `entropy_coef`.

    `AdaptiveEntropyController` differs from the method of Skywork-OR1 in three ways:

    - The coefficient c is never below 0. A negative c would turn the entropy bonus into a penalty when the entropy next
      falls below the target.
    - The coefficient c has the upper bound `maximum`, which is 0.005 in the training script of Skywork-OR1. Without an
      upper bound on c, an unreachable target makes the entropy bonus outweigh the reward. `load_state_dict` reduces a
      saved coefficient above `maximum` to `maximum`.
    - If `update` is called after each training step, the entropy of the previous training step, not of the current
      training step, decides whether the entropy bonus is on.
    """

    def __init__(self, entropy_coef: float, target: float, step: float, maximum: float) -> None:
        super().__init__(entropy_coef)
        for name, number in (("target", target), ("step", step)):
            if not 0 < number < math.inf:
                raise ValueError(
                    f"{name}={number} must be finite and > 0, or the coefficient would never change; use, for example, "
                    "target=0.2 and step=0.0001, or a fixed coefficient"
                )
        if not entropy_coef <= maximum < math.inf:
            raise ValueError(
                f"maximum={maximum} must be finite and at least entropy_coef={entropy_coef}, where the coefficient "
                "starts; use maximum=0.005, for example"
            )
        self.entropy_coef, self.target, self.step = self.value, float(target), float(step)
        self.maximum = float(maximum)

    def update(self, entropy: float | Tensor) -> None:
        """Move the coefficient c one step to bring the entropy to `target`, and switch the entropy bonus on or off.

        Raises:
            ValueError: if `entropy` is not finite.
        """
        entropy = float(entropy)
        if not math.isfinite(entropy):
            raise ValueError(
                f"entropy={entropy}: the controller needs a finite entropy; look for broken logits before this step"
            )
        if entropy < self.target:
            self.entropy_coef = min(self.entropy_coef + self.step, self.maximum)
        elif entropy > self.target:
            self.entropy_coef = max(self.entropy_coef - self.step, 0.0)
        self.value = self.entropy_coef if entropy <= self.target else 0.0

    def state_dict(self) -> dict[str, float]:
        """Return the part of the controller's state that a checkpoint saves."""
        return {**super().state_dict(), "entropy_coef": self.entropy_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the controller from a `state_dict`, with coefficients reduced to at most `maximum`."""
        self.value = min(float(state["value"]), self.maximum)
        self.entropy_coef = min(float(state["entropy_coef"]), self.maximum)
