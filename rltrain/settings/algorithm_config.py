"""The names, types and rules of the keys under `algorithm`, which define what is learned from a batch.

Each class is one feature. The value 0, null or false turns a feature off. This module refuses settings that contradict
each other. `rltrain.settings.algorithm_rules` refuses settings that the selected functions cannot use.
"""

from dataclasses import dataclass
from typing import Any, Literal

from rltrain.settings.typed import at_least, require

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Level = Literal["batch", "group"]
FULL_KL = "full"  # the exact KL over the vocabulary, as an alternative to the sample-based estimators


@dataclass(frozen=True, kw_only=True)
class RewardShapingConfig:
    """Shaping of each single score: min(max((score + bias) * scale, -clip), clip), then the length penalty."""

    bias: float
    scale: float
    clip: float | None
    overlong_buffer: int  # number of tokens before the length limit over which the penalty grows; 0: no penalty
    overlong_penalty: float  # penalty at the length limit

    def __post_init__(self) -> None:
        at_least(self, 0, "overlong_buffer")
        require(self.scale != 0, "scale=0.0: every score would become 0; use another factor")
        require(self.clip is None or self.clip > 0, f"clip must be > 0 or null, got {self.clip}")
        require(self.overlong_penalty > 0, f"overlong_penalty must be > 0, got {self.overlong_penalty}")


@dataclass(frozen=True, kw_only=True)
class NormalizationConfig:
    """Normalization (x - mean) / std, with the statistics of the batch or of each prompt group.

    A level of null leaves out the mean or the std.
    """

    mean_level: Level | None
    std_level: Level | None
    leave_one_out: bool  # whether the mean for a sample leaves out that sample
    unbiased: bool  # whether the std divides the sum of squares by n - 1

    def __post_init__(self) -> None:
        require(
            not self.leave_one_out or (self.mean_level is not None and self.std_level is None),
            "leave_one_out=true is for a mean alone: set mean_level, and std_level=null, since what is left out of the "
            "mean is not left out of the std",
        )

    @property
    def on(self) -> bool:
        """Whether the normalization changes anything."""
        return self.mean_level is not None or self.std_level is not None


@dataclass(frozen=True, kw_only=True)
class KLInRewardConfig:
    """KL penalty that is subtracted from the rewards. `kl_coef` 0 with a fixed controller turns it off."""

    kl_coef: float
    kl_estimator: str
    controller: Literal["fixed", "adaptive"]
    target: float  # target KL of the adaptive controller, in nats per token
    horizon: int  # number of sequences over which the adaptive controller reacts

    def __post_init__(self) -> None:
        at_least(self, 0, "kl_coef", "target")
        at_least(self, 1, "horizon")
        require(
            self.controller == "fixed" or (self.kl_coef > 0 and self.target > 0),
            f"controller=adaptive with kl_coef={self.kl_coef}, target={self.target}: the adaptive controller "
            "multiplies the coefficient, so both must be > 0; set them, or use controller=fixed",
        )

    @property
    def full(self) -> bool:
        """Whether the exact KL is subtracted from the rewards."""
        return self.kl_coef > 0 and self.kl_estimator == FULL_KL


@dataclass(frozen=True, kw_only=True)
class KLLossConfig:
    """KL term that is added to the loss. `kl_loss_coef` 0 turns it off."""

    kl_loss_coef: float
    kl_estimator: str
    ratio_weighted: bool  # multiply by pi / pi_old, with gradient; k1 and k3 then have the gradient of the reverse KL

    def __post_init__(self) -> None:
        at_least(self, 0, "kl_loss_coef")
        require(
            not self.ratio_weighted or self.kl_estimator != FULL_KL,
            "ratio_weighted=true with kl_estimator=full: the exact KL is not an estimate from samples; use false",
        )

    @property
    def full(self) -> bool:
        """Whether the exact KL is added to the loss."""
        return self.kl_loss_coef > 0 and self.kl_estimator == FULL_KL


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Importance weights of the policy term: pi of the actor before the update / pi of the engine.

    `level` null turns the weights off.
    """

    level: Literal["token", "sequence", "geometric"] | None
    mode: Literal["truncate", "mask", "reject"]
    lower: float | None
    upper: float | None

    def __post_init__(self) -> None:
        low, high = self.lower or 0.0, self.upper
        require(
            0 <= low <= 1 and (high is None or high >= 1),
            f"lower={self.lower}, upper={high}: 0 <= lower <= 1 <= upper must hold, or data that agree would be "
            "corrected; use lower=0.5 upper=2.0, say, or null for no bound",
        )
        require(
            self.level is None or self.mode == "truncate" or low > 0 or high is not None,
            f"mode={self.mode} with lower={self.lower}, upper={high}: nothing would ever lie outside; set a bound",
        )
        require(
            self.level is not None or (self.lower is None and high is None),
            f"lower={self.lower}, upper={high} with level=null: there is no correction; set level=token, say",
        )


@dataclass(frozen=True, kw_only=True)
class RejectionConfig:
    """Removal of the policy term where the policy in the update is too far from the engine's policy.

    `kl_estimator` null turns the removal off.
    """

    kl_estimator: Literal["k1", "k2", "k3", "abs"] | None
    level: Literal["token", "sequence", "max"]
    lower: float | None
    upper: float | None
    only_negative: bool  # reject only where the advantage is negative

    def __post_init__(self) -> None:
        require(
            self.kl_estimator is None or self.lower is not None or self.upper is not None,
            f"kl_estimator={self.kl_estimator} without lower and upper: nothing would be rejected; set upper, in nats",
        )
        require(
            self.kl_estimator is not None or (self.lower is None and self.upper is None and not self.only_negative),
            f"lower={self.lower}, upper={self.upper}, only_negative={self.only_negative} with kl_estimator=null: "
            "nothing is rejected; set kl_estimator=k3, say",
        )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """All algorithm settings. `advantage` and `loss` hold the knobs that differ from the function's defaults."""

    advantage_estimator: str
    advantage: dict[str, Any]
    loss_mode: str
    loss: dict[str, Any]
    loss_agg_mode: AggMode
    old_log_probs: Literal["actor", "rollout"]
    # An answer truncated at the length limit scores as if every reward function gave 0, or its own score if that is
    # lower. It is excluded from statistics.
    suppress_truncated: bool
    exclude_truncated: bool  # a truncated answer is excluded from statistics, but keeps its score
    mask_truncated: bool  # the tokens of a truncated answer are not trained on
    # The critic's value of the state at the end of a truncated answer replaces the reward that it could still earn.
    bootstrap_truncated: bool
    # To replace groups of one outcome, a step may generate this many times prompts_per_step groups in all. 0: off.
    dynamic_sampling: int
    entropy_coef: float
    entropy_target: float | None  # target entropy in nats per token, towards which entropy_coef adapts; null: fixed
    entropy_coef_step: float  # change of entropy_coef in one training step
    entropy_coef_max: float  # upper bound of entropy_coef
    reward_shaping: RewardShapingConfig
    reward_normalization: NormalizationConfig
    advantage_normalization: NormalizationConfig
    kl_in_reward: KLInRewardConfig
    kl_loss: KLLossConfig
    correction: CorrectionConfig
    rejection: RejectionConfig

    def __post_init__(self) -> None:
        at_least(self, 0, "entropy_coef", "dynamic_sampling")
        target = self.entropy_target
        require(target is None or target > 0, f"entropy_target must be > 0 nats or null, got {target}")
        require(self.entropy_coef_step > 0, f"entropy_coef_step must be > 0, got {self.entropy_coef_step}")
        most = self.entropy_coef_max
        require(most > 0, f"entropy_coef_max must be > 0, got {most}")
        require(
            target is None or self.entropy_coef <= most,
            f"entropy_coef={self.entropy_coef} with entropy_target={target}: starts above algorithm.entropy_coef_max="
            f"{most}; lower it, or raise the maximum",
        )
        require(
            self.correction.level is None or self.old_log_probs == "actor",
            f"old_log_probs={self.old_log_probs} with correction.level={self.correction.level}: the weights are actor "
            "over engine, which are 1 where the engine's log-probs are the old ones; use old_log_probs=actor",
        )

    @property
    def needs_reference(self) -> bool:
        """Whether any KL term is on."""
        return self.kl_in_reward.kl_coef > 0 or self.kl_loss.kl_loss_coef > 0

    @property
    def needs_full_kl(self) -> bool:
        """Whether a KL term uses the exact KL, for which the reference sends hidden states."""
        return self.kl_in_reward.full or self.kl_loss.full

    @property
    def needs_ref_log_probs(self) -> bool:
        """Whether a KL term is estimated from samples."""
        reward, loss = self.kl_in_reward, self.kl_loss
        return (reward.kl_coef > 0 and not reward.full) or (loss.kl_loss_coef > 0 and not loss.full)
