"""The names, types and rules of the keys under `algorithm`, which define what is learned from a batch.

Each config class describes the settings of one feature of the algorithm. A feature of the algorithm is off if its main
key is 0, null or false. This module refuses settings under `algorithm` that contradict each other. The module
`rltrain.settings.algorithm_rules` refuses settings that the selected loss or advantage estimator cannot use.
"""

from typing import Any, Literal

from rltrain.settings.key import key, section
from rltrain.settings.typed import require

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Level = Literal["batch", "group"]
# value of `kl_estimator` for the exact KL over the vocabulary, as an alternative to the sample-based estimators
FULL_KL = "full"


@section
class RewardShapingConfig:
    """Shaping of the score of each answer: min(max((score + bias) * scale, -clip), clip), followed by the length
    penalty.
    """

    bias: float = key("Number that is added to each score.")
    scale: float = key(
        "Number by which each score is multiplied, after the bias is added.", values="any number except 0"
    )
    clip: float | None = key(
        "Limit of the absolute value of a score, after the scale is applied. null: no limit.", above=0
    )
    overlong_buffer: int = key(
        "Number of tokens before rollout.max_response_length over which the length penalty grows. 0: no penalty. "
        "auto: a fifth of rollout.max_response_length.",
        values="whole number >= 0, or `auto`",
    )
    overlong_penalty: float = key("Length penalty of an answer that reaches rollout.max_response_length.", above=0)

    def __post_init__(self) -> None:
        require(self.overlong_buffer >= 0, f"overlong_buffer must be >= 0, got {self.overlong_buffer}")
        require(self.scale != 0, "scale=0.0: every score would become 0; use another factor")


@section
class NormalizationConfig:
    """Normalization (x - mean) / std of rewards or advantages, with the statistics of the batch or of each prompt
    group.

    If `mean_level` is null, no mean is subtracted. If `std_level` is null, the values are not divided by a standard
    deviation.
    """

    mean_level: Level | None = key(
        "Subtract the mean over the batch or over the prompt's group. null: subtract nothing."
    )
    std_level: Level | None = key(
        "Divide the values by the standard deviation over the batch or over the prompt's group. null: do not divide."
    )
    leave_one_out: bool = key("Leave each sample out of the mean that is subtracted from its own value.")
    unbiased: bool = key("Compute the standard deviation of n samples with divisor n - 1. false: with divisor n.")

    def __post_init__(self) -> None:
        require(
            not self.leave_one_out or (self.mean_level is not None and self.std_level is None),
            "leave_one_out=true applies only to the mean, because no sample is left out of the std; set mean_level, "
            "and std_level=null",
        )

    @property
    def on(self) -> bool:
        """Whether the normalization subtracts a mean or divides by a std."""
        return self.mean_level is not None or self.std_level is not None


@section
class KLInRewardConfig:
    """KL penalty that is subtracted from the rewards.

    Setting `kl_coef` to 0 with a fixed controller turns the KL penalty in the reward off.
    """

    kl_coef: float = key("Coefficient of the KL penalty in the reward. 0: no penalty.", at_least=0)
    kl_estimator: str = key(
        "Estimator of the KL to the reference. full: the exact KL over the vocabulary. k3 is limited to 10 nats per "
        "token.",
        values="`k1`, `k2`, `k3`, `abs` or `full`",
    )
    controller: Literal["fixed", "adaptive"] = key(
        "fixed: kl_coef stays constant. adaptive: kl_coef changes so that the measured KL approaches the target."
    )
    target: float = key("Target KL of the adaptive controller.", unit="nats per token", at_least=0)
    horizon: int = key(
        "Number of sequences over which the adaptive controller reacts. A larger number means slower changes.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        require(
            self.controller == "fixed" or (self.kl_coef > 0 and self.target > 0),
            f"controller=adaptive with kl_coef={self.kl_coef}, target={self.target}: the adaptive controller "
            "multiplies the coefficient, so both must be > 0; set them, or use controller=fixed",
        )

    @property
    def full(self) -> bool:
        """Whether the KL that is subtracted from the rewards is exact, and not estimated from samples."""
        return self.kl_coef > 0 and self.kl_estimator == FULL_KL


@section
class KLLossConfig:
    """KL term that is added to the policy loss. Setting `kl_loss_coef` to 0 turns the KL term in the loss off."""

    kl_loss_coef: float = key("Coefficient of the KL term in the loss. 0: no KL term.", at_least=0)
    kl_estimator: str = key(
        "Estimator of the KL to the reference. full: the exact KL over the vocabulary. A + after the name keeps the "
        "value and gives the term the gradient of the reverse KL.",
        values="`k1`, `k2`, `k3`, `abs`, one of these with `+`, or `full`",
    )
    ratio_weighted: bool = key(
        "Multiply the KL term by pi / pi_old, with gradient. k1 and k3 then have the gradient of the reverse KL."
    )

    def __post_init__(self) -> None:
        require(
            not self.ratio_weighted or self.kl_estimator != FULL_KL,
            "ratio_weighted=true with kl_estimator=full: the exact KL is not an estimate from samples; use "
            "ratio_weighted=false",
        )

    @property
    def full(self) -> bool:
        """Whether the KL that is added to the loss is exact, and not estimated from samples."""
        return self.kl_loss_coef > 0 and self.kl_estimator == FULL_KL


@section
class CorrectionConfig:
    """Importance weights of the policy term: probability under the actor before the update, divided by the probability
    under the engine.

    Setting `level` to null turns the importance weights off.
    """

    level: Literal["token", "sequence", "geometric"] | None = key(
        "Importance ratio that weights a token. token: its own ratio. sequence: the product over the row. geometric: "
        "the geometric mean over the row. null: no weights. auto: token with an upper bound of 2 if "
        "trainer.max_staleness > 0, unless rejection or old_log_probs=rollout handles stale answers; otherwise null.",
        values="`token`, `sequence`, `geometric`, `auto` or `null`",
    )
    mode: Literal["truncate", "mask"] = key(
        "What happens to weights outside the bounds. truncate: clamp the weight. mask: drop the policy term of the "
        "token."
    )
    lower: float | None = key("Lower bound of the weights. null: no bound.", values="number in [0, 1], or `null`")
    upper: float | None = key("Upper bound of the weights. null: no bound.", values="number >= 1, or `null`")

    def __post_init__(self) -> None:
        low, high = self.lower or 0.0, self.upper
        require(
            0 <= low <= 1 and (high is None or high >= 1),
            f"lower={self.lower}, upper={high}: 0 <= lower <= 1 <= upper must hold, or even a weight of 1 would be "
            "corrected; use lower=0.5 and upper=2.0, for example, or null for no bound",
        )
        require(
            self.level is None or self.mode == "truncate" or low > 0 or high is not None,
            f"mode={self.mode} with lower={self.lower}, upper={high}: no weight could ever be outside the bounds; set "
            "a bound",
        )
        require(
            self.level is not None or (self.lower is None and high is None),
            f"lower={self.lower}, upper={high} with level=null: there is no correction; set level=token, for example",
        )


@section
class RejectionConfig:
    """Removal of the policy term from the loss where the policy has moved too far from the engine's policy.

    The policy term is removed for single tokens or for whole answers. Setting `kl_estimator` to null turns off the
    removal of policy terms.
    """

    kl_estimator: Literal["k1", "k2", "k3", "abs"] | None = key(
        "Estimator of the KL from the engine's policy to the policy of the update. null: drop nothing."
    )
    level: Literal["token", "sequence", "max"] = key(
        "What is dropped. token: each token whose estimate is outside the bounds. sequence: each row whose mean "
        "estimate is outside. max: each row that has a token whose estimate is outside."
    )
    lower: float | None = key(
        "Lower bound of the estimate. Only for k1. null: no bound.",
        values="number <= 0, or `null`",
        unit="nats per token",
    )
    upper: float | None = key(
        "Upper bound of the estimate. null: no bound.", values="number >= 0, or `null`", unit="nats per token"
    )
    only_negative: bool = key("Drop only tokens and rows whose advantage is negative.")

    def __post_init__(self) -> None:
        require(
            self.kl_estimator is None or self.lower is not None or self.upper is not None,
            f"kl_estimator={self.kl_estimator} without lower and upper: nothing would be rejected; set upper, in nats",
        )
        require(
            self.kl_estimator is not None or (self.lower is None and self.upper is None and not self.only_negative),
            f"lower={self.lower}, upper={self.upper}, only_negative={self.only_negative} with kl_estimator=null: "
            "nothing is rejected; set kl_estimator=k3, for example",
        )


@section
class AlgorithmConfig:
    """All settings under `algorithm`.

    The mappings `advantage` and `loss` hold the knobs (extra parameters) of the selected estimator and loss that shall
    differ from their defaults.
    """

    advantage_estimator: str = key(
        "Name of the function that computes the advantages.", values="name of an advantage estimator"
    )
    advantage: dict[str, Any] = key("Knobs of the advantage estimator that differ from its defaults.")
    loss_mode: str = key("Name of the policy loss.", values="name of a policy loss")
    loss: dict[str, Any] = key("Knobs of the policy loss and of its token selector that differ from their defaults.")
    loss_agg_mode: AggMode = key(
        "How the losses of the tokens in a mini-batch are combined. token-mean: mean over tokens. token-sum: sum over "
        "tokens. seq-mean-token-sum: mean over answers of the sum over tokens. seq-mean-token-mean: mean over answers "
        "of the mean over tokens. seq-mean-token-sum-norm: seq-mean-token-sum divided by rollout.max_response_length."
    )
    old_log_probs: Literal["actor", "rollout"] = key(
        "Source of the old log-probs (proximal policy). actor: the actor before the update. rollout: the engine."
    )
    suppress_truncated: bool = key(
        "Score an answer that was cut at the length limit as if each reward function had given 0, or with its own "
        "score if that is lower. The length penalty still applies. The answer is left out of statistics."
    )
    exclude_truncated: bool = key(
        "Leave an answer that was cut at the length limit out of statistics. It keeps its score."
    )
    mask_truncated: bool = key("Do not train on the tokens of an answer that was cut at the length limit.")
    bootstrap_truncated: bool = key(
        "Add the critic's value of the state at the end of a cut answer, times gamma, to the reward of its last "
        "token. This value estimates the reward that the answer could still have earned."
    )
    dynamic_sampling: int = key(
        "Maximum number of groups that a step generates, as a multiple of trainer.prompts_per_step, to replace groups "
        "whose answers all have the same outcome. The outcome is the score of the functions and models with "
        "outcome=true, before shaping. 0: replace no groups.",
        at_least=0,
    )
    entropy_coef: float = key("Coefficient of the entropy bonus in the loss. 0: no bonus.", at_least=0)
    entropy_target: float | None = key(
        "Entropy below which entropy_coef grows and above which it shrinks. null: entropy_coef stays constant.",
        unit="nats per token",
        above=0,
        refusal="{name} must be > 0 nats or null, got {value}",
    )
    entropy_coef_step: float = key("Change of entropy_coef in one training step, with an entropy_target.", above=0)
    entropy_coef_max: float = key(
        "Upper limit of entropy_coef with an entropy_target. Skywork-OR1's training script uses 0.005.", above=0
    )
    reward_shaping: RewardShapingConfig = key("Shaping of each single score.")
    reward_normalization: NormalizationConfig = key("Normalisation of the scores, before the advantage estimator.")
    advantage_normalization: NormalizationConfig = key(
        "Normalisation of the advantages of trained tokens, after the advantage estimator."
    )
    advantage_clip: float | None = key(
        "Limit of the absolute value of an advantage, after the normalisation. null: no limit.", above=0
    )
    kl_in_reward: KLInRewardConfig = key("Penalty in the reward for the KL to the reference.")
    kl_loss: KLLossConfig = key("Term of the loss for the KL to the reference.")
    squared_log_ratio_coef: float = key(
        "Coefficient of the squared log-ratio of the policy to the engine's policy, added to the loss of every "
        "token, also of dropped tokens (Kimi K2.5, arXiv:2602.02276 eq. 1). 0: no term.",
        at_least=0,
    )
    correction: CorrectionConfig = key(
        "Importance weights of the policy term: the actor's policy before the update over the engine's. KL and entropy "
        "terms have no weights."
    )
    rejection: RejectionConfig = key(
        "Removal of the policy term where the policy of the update is too far from the engine's. KL and entropy terms "
        "stay."
    )

    def __post_init__(self) -> None:
        target, most = self.entropy_target, self.entropy_coef_max
        require(
            target is None or self.entropy_coef <= most,
            f"entropy_coef={self.entropy_coef} with entropy_target={target}: the coefficient starts above "
            f"algorithm.entropy_coef_max={most}; lower it, or raise the maximum",
        )
        require(
            self.correction.level is None or self.old_log_probs == "actor",
            f"old_log_probs={self.old_log_probs} with correction.level={self.correction.level}: the weights (actor "
            "over engine) would all be 1, because the engine's log-probs are the old ones; use old_log_probs=actor",
        )

    @property
    def needs_reference(self) -> bool:
        """Whether any KL term is turned on, so that the run needs a reference model."""
        return self.kl_in_reward.kl_coef > 0 or self.kl_loss.kl_loss_coef > 0

    @property
    def needs_full_kl(self) -> bool:
        """Whether a KL term is exact, so that the reference model must send its hidden states."""
        return self.kl_in_reward.full or self.kl_loss.full

    @property
    def needs_ref_log_probs(self) -> bool:
        """Whether a KL term is estimated from samples, so that the reference model must send log-probs."""
        reward, loss = self.kl_in_reward, self.kl_loss
        return (reward.kl_coef > 0 and not reward.full) or (loss.kl_loss_coef > 0 and not loss.full)
