"""Defines the names, types and rules of the config keys under `algorithm`, which select advantages and loss terms.

Each config class describes the settings of one feature of the algorithm. A feature of the algorithm is off if its main
key, such as `kl_loss_coef` for the KL term in the loss, is 0, null or false. This module refuses settings under
`algorithm` that contradict each other. The module `rltrain.settings.algorithm_rules` refuses settings that the selected
loss or advantage estimator cannot use.
"""

from typing import Any, Literal

from rltrain.settings.distillation_config import DistillationConfig
from rltrain.settings.key import key, section
from rltrain.settings.typed import require

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Level = Literal["batch", "group"]
# The value of `kl_estimator` that selects the exact KL over the vocabulary instead of an estimate from samples.
FULL_KL = "full"


@section
class RewardShapingConfig:
    """Settings that shape the score of each answer.

    The shaped score is clamp((score + bias) * scale, -clip, clip), minus the length penalty, plus the length reward.
    """

    bias: float = key("Number that is added to the score of each answer.")
    scale: float = key(
        "Number by which the score of each answer is multiplied, after reward_shaping.bias is added.",
        values="any number except 0",
    )
    clip: float | None = key(
        "Maximum absolute value of an answer's score. Scores are clamped after bias and scale are applied. null: "
        "scores are not clamped.",
        above=0,
    )
    overlong_buffer: int = key(
        "Number of tokens over which the length penalty rises linearly from 0. The penalty reaches overlong_penalty at "
        "rollout.max_response_length tokens. 0: no length penalty. auto: a fifth of rollout.max_response_length.",
        values="whole number >= 0, or `auto`",
    )
    overlong_penalty: float = key(
        "Length penalty that is subtracted from the score of an answer with rollout.max_response_length tokens.",
        above=0,
    )
    group_length_weight: float = key(
        "Weight of the length reward, which compares the lengths of the answers in a prompt group (Kimi k1.5, "
        "arXiv:2501.12599). The score of a short correct answer rises by up to group_length_weight / 2. The score of a "
        "long answer falls by up to group_length_weight / 2, whether the answer is correct or not. 0: no length "
        "reward.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        require(self.overlong_buffer >= 0, f"overlong_buffer must be >= 0, got {self.overlong_buffer}")
        require(self.scale != 0, "scale=0.0: every score would become 0; use another factor")


@section
class NormalizationConfig:
    """Settings that normalize rewards or advantages: each value x is replaced with (x - mean) / std.

    The mean and the standard deviation are taken over the batch or over each prompt group.

    If `mean_level` is null, no mean is subtracted. If `std_level` is null, the values are not divided by a standard
    deviation.
    """

    mean_level: Level | None = key(
        "Scope of the mean that is subtracted from each value. batch: all values of the batch. group: the values of "
        "the prompt group. null: subtract no mean."
    )
    std_level: Level | None = key(
        "Scope of the standard deviation by which each value is divided. batch: all values of the batch. group: the "
        "values of the prompt group. null: do not divide by a standard deviation."
    )
    leave_one_out: bool = key("Leave-one-out: leave each value out of the mean that is subtracted from the value.")
    unbiased: bool = key("Compute the standard deviation of n samples with divisor n - 1. false: use divisor n.")

    def __post_init__(self) -> None:
        require(
            not self.leave_one_out or (self.mean_level is not None and self.std_level is None),
            "leave_one_out=true needs a mean and no std, because leave-one-out is defined for the mean and not for the "
            "std; set mean_level, and std_level=null",
        )

    @property
    def on(self) -> bool:
        """Whether a mean is subtracted from the values, or the values are divided by a standard deviation, or both."""
        return self.mean_level is not None or self.std_level is not None


@section
class KLInRewardConfig:
    """Settings of the KL penalty that is subtracted from the rewards.

    If `controller` is `fixed`, setting `kl_coef` to 0 turns off the KL penalty in the reward.
    """

    kl_coef: float = key(
        "Coefficient of the KL penalty that is subtracted from the token rewards. 0: no KL penalty.", at_least=0
    )
    kl_estimator: str = key(
        "Estimator of the KL divergence from the reference model. full: the exact KL over the vocabulary. An estimate "
        "with k3 is clamped to at most 10 nats per token.",
        values="`k1`, `k2`, `k3`, `abs` or `full`",
    )
    controller: Literal["fixed", "adaptive"] = key(
        "Controller of kl_coef. fixed: kl_coef stays constant. adaptive: kl_coef changes so that the measured KL "
        "approaches kl_in_reward.target."
    )
    target: float = key("Target KL of the adaptive controller of kl_coef.", unit="nats per token", at_least=0)
    horizon: int = key(
        "Time constant of the adaptive controller, in sequences. The larger the time constant, the more slowly the "
        "adaptive controller changes kl_coef.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        require(
            self.controller == "fixed" or (self.kl_coef > 0 and self.target > 0),
            f"controller=adaptive with kl_coef={self.kl_coef}, target={self.target}: the adaptive controller "
            "multiplies kl_coef by a function of KL / target, so both must be > 0; set both, or use controller=fixed",
        )

    @property
    def full(self) -> bool:
        """Whether the KL penalty in the reward is on and uses the exact KL instead of an estimate from samples."""
        return self.kl_coef > 0 and self.kl_estimator == FULL_KL


@section
class KLLossConfig:
    """Settings of the KL term that is added to the policy loss. Setting `kl_loss_coef` to 0 turns the KL term off."""

    kl_loss_coef: float = key("Coefficient of the KL term in the loss. 0: no KL term.", at_least=0)
    kl_estimator: str = key(
        "Estimator of the KL divergence from the reference model. full: the exact KL over the vocabulary. A + after "
        "the name of an estimator, as in k1+, keeps the value of the KL estimate, but replaces the gradient of the "
        "estimate with the gradient of the reverse KL.",
        values="`k1`, `k2`, `k3`, `abs`, one of these with `+`, or `full`",
    )
    ratio_weighted: bool = key(
        "Multiply the KL estimate by the ratio pi / pi_old. Except with an estimator whose name ends with +, the "
        "gradient of the KL term also flows through the ratio pi / pi_old. With ratio_weighted=true, the estimators k1 "
        "and k3 have the gradient of the reverse KL."
    )

    def __post_init__(self) -> None:
        require(
            not self.ratio_weighted or self.kl_estimator != FULL_KL,
            "ratio_weighted=true with kl_estimator=full: the exact KL is not an estimate from samples; use "
            "ratio_weighted=false",
        )

    @property
    def full(self) -> bool:
        """Whether the KL term in the loss is on and uses the exact KL instead of an estimate from samples."""
        return self.kl_loss_coef > 0 and self.kl_estimator == FULL_KL


@section
class ReferenceConfig:
    """Settings of the updates of the reference model during training (TR-DPO, arXiv 2404.09656).

    Setting `refresh_every` to 0 freezes the reference model.
    """

    refresh_every: int = key(
        "Number of training steps between two updates of the reference model (TR-DPO, arXiv:2404.09656). 0: the "
        "reference model is never updated.",
        at_least=0,
    )
    refresh_coef: float = key(
        "Coefficient a of an update, which replaces each weight of the reference model by a * actor + (1 - a) * "
        "reference. 1: the reference model becomes a copy of the actor.",
        above=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        require(
            self.refresh_every > 0 or self.refresh_coef == 1,
            f"refresh_coef={self.refresh_coef} with refresh_every=0: the reference model is never updated, so the "
            "coefficient has no effect; set refresh_every=1, for example, or refresh_coef=1",
        )


@section
class CorrectionConfig:
    """Settings of the importance weights of the policy-loss term. An importance weight is a token's probability under
    the actor before the update, divided by the token's probability under the inference engine.

    Setting `level` to null turns the importance weights off.
    """

    level: Literal["token", "sequence", "geometric"] | None = key(
        "Kind of importance weight of a token. token: the actor's probability of the token, divided by the engine's "
        "probability. sequence: the product of the token ratios in the row. geometric: the geometric mean of the token "
        "ratios in the row. null: no weights. auto: `token` if trainer.max_staleness is above 0 or the engine "
        "quantizes its weights, and null in other runs. If auto selects `token` and no bound is set, the upper bound "
        "becomes 2. auto is always null with algorithm.rejection, with old_log_probs=rollout, and if the loss has only "
        "a distillation term.",
        values="`token`, `sequence`, `geometric`, `auto` or `null`",
    )
    mode: Literal["truncate", "mask"] = key(
        "Treatment of importance weights outside the bounds. truncate: clamp the weight to the bound. mask: drop the "
        "token's policy-loss term."
    )
    lower: float | None = key(
        "Lower bound of the importance weights. null: no lower bound.", values="number in [0, 1], or `null`"
    )
    upper: float | None = key(
        "Upper bound of the importance weights. null: no upper bound.", values="number >= 1, or `null`"
    )
    batch_normalize: bool = key(
        "Rescale the importance weights of a mini-batch to a mean of 1 after the bounds are applied (self-normalised "
        "importance sampling). The mean of the importance weights is taken over tokens if level=token, and over "
        "answers if level is sequence or geometric. A token or answer that mode=mask drops counts as 0 in the mean of "
        "the importance weights."
    )
    normalize: Literal["all", "kept"] = key(
        "Tokens that loss_agg_mode counts when it averages the policy loss. all: all trained tokens, as in IcePop and "
        "INTELLECT-3. kept: only the tokens that mode=mask has not dropped, as with verl's rejection sampling."
    )

    def __post_init__(self) -> None:
        self._check_bounds()
        for name, value, off in (
            ("batch_normalize", self.batch_normalize, False),
            ("normalize", self.normalize, "all"),
        ):
            require(
                value == off or self.level is not None,
                f"{name}={str(value).lower()} with level=null: there are no importance weights; set level=token, for "
                "example",
            )
        require(
            self.normalize == "all" or self.mode == "mask",
            f"normalize={self.normalize} with mode={self.mode}: no token is dropped, so all tokens would be counted; "
            "use mode=mask, or normalize=all",
        )
        require(
            self.normalize == "all" or not self.batch_normalize,
            f"normalize={self.normalize} with batch_normalize=true: both compensate for dropped tokens; use only one "
            "of them",
        )

    @property
    def weighting(self) -> dict[str, Any]:
        """The keyword arguments of the function `rollout_correction`, which computes the importance weights."""
        return {"level": self.level, "mode": self.mode, "lower": self.lower, "upper": self.upper}

    @property
    def needs_statistics(self) -> bool:
        """Whether the loss needs statistics of the importance weights of the whole mini-batch."""
        return self.batch_normalize or self.normalize != "all"

    def _check_bounds(self) -> None:
        """Raise ConfigError if the bounds of the importance weights are invalid or have no effect."""
        low, high = self.lower or 0.0, self.upper
        require(
            0 <= low <= 1 and (high is None or high >= 1),
            f"lower={self.lower}, upper={high}: 0 <= lower <= 1 <= upper must hold, because otherwise even "
            "a weight of 1 would be corrected; use lower=0.5 and upper=2.0, for example, or null for no bound",
        )
        require(
            self.level is None or self.mode == "truncate" or low > 0 or high is not None,
            f"mode={self.mode} with lower={self.lower}, upper={high}: no weight could ever be outside the bounds; set "
            "a bound",
        )
        require(
            self.level is not None or (self.lower is None and high is None),
            f"lower={self.lower}, upper={high} with level=null: there are no importance weights; set level=token, for "
            "example",
        )


@section
class RejectionConfig:
    """Settings for dropping the policy-loss term of tokens or answers on which the policy differs too much from the
    engine's policy.

    Setting `kl_estimator` to null turns off the removal of policy-loss terms.
    """

    kl_estimator: Literal["k1", "k2", "k3", "abs"] | None = key(
        "Estimator of the KL divergence between the engine's policy and the policy that is being updated. Tokens or "
        "answers whose KL estimate is outside the bounds are dropped from the policy loss. null: no tokens or answers "
        "are dropped."
    )
    level: Literal["token", "sequence", "max"] = key(
        "What is dropped if a KL estimate is outside the bounds. token: each token whose estimate is outside the "
        "bounds. sequence: the whole row, if the mean of the estimates of its tokens is outside the bounds. max: the "
        "whole row, if the estimate of at least one of its tokens is outside the bounds."
    )
    lower: float | None = key(
        "Lower bound of the KL estimate. A lower bound is valid only with kl_estimator=k1. null: no lower bound.",
        values="number <= 0, or `null`",
        unit="nats per token",
    )
    upper: float | None = key(
        "Upper bound of the KL estimate. null: no upper bound.", values="number >= 0, or `null`", unit="nats per token"
    )
    only_negative: bool = key("Drop only tokens or rows with a negative advantage.")

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
    """All settings in the config section `algorithm`.

    The mapping `advantage` sets parameters of the selected advantage estimator, and the mapping `loss` sets parameters
    of the selected policy loss. Each parameter that the config does not set keeps its default value.
    """

    advantage_estimator: str = key(
        "Name of the function that computes the advantages.", values="name of an advantage estimator"
    )
    advantage: dict[str, Any] = key(
        "Parameters of the advantage estimator. A parameter that is left out has its default value."
    )
    loss_mode: str = key("Name of the policy loss.", values="name of a policy loss")
    loss: dict[str, Any] = key(
        "Parameters of the policy loss, and of the function that selects the tokens for the policy loss, if there is "
        "such a function. A parameter that is left out has its default value."
    )
    loss_agg_mode: AggMode = key(
        "How the losses of the tokens in a mini-batch are combined. token-mean: mean over tokens. token-sum: sum over "
        "tokens. seq-mean-token-sum: mean over answers of the sum over tokens. seq-mean-token-mean: mean over answers "
        "of the mean over tokens. seq-mean-token-sum-norm: seq-mean-token-sum divided by rollout.max_response_length."
    )
    old_log_probs: Literal["actor", "rollout"] = key(
        "Source of the old log-probs, which are in the denominator of the policy loss's probability ratio. actor: the "
        "actor before the update. rollout: the inference engine."
    )
    suppress_truncated: bool = key(
        "Limit the score of each answer that was cut at the length limit (truncated). A truncated answer gets at most "
        "the score of an answer whose rewards are all 0. The length penalty still applies to truncated answers. "
        "Truncated answers do not count in score statistics."
    )
    exclude_truncated: bool = key(
        "Leave answers that were cut at the length limit out of the score statistics. exclude_truncated does not "
        "change the score of a truncated answer."
    )
    mask_truncated: bool = key("Do not train on the tokens of an answer that was cut at the length limit.")
    bootstrap_truncated: bool = key(
        "For each answer that was cut at the length limit, add gamma times the critic's value of the final state to "
        "the reward of the last token. The critic's value estimates the reward that a truncated answer could still "
        "have earned."
    )
    dynamic_sampling: int = key(
        "Maximum number of prompt groups that one training step generates, as a multiple of trainer.prompts_per_step. "
        "0: no dynamic sampling. Dynamic sampling replaces prompt groups whose answers all have the same outcome. The "
        "outcome of an answer is its score from the reward functions and models with outcome=true, before reward "
        "shaping.",
        at_least=0,
    )
    entropy_coef: float = key("Coefficient of the entropy bonus in the loss. 0: no entropy bonus.", at_least=0)
    entropy_target: float | None = key(
        "Target entropy of the policy. entropy_coef grows while the entropy is below the target, and shrinks while "
        "the entropy is above the target. null: entropy_coef stays constant.",
        unit="nats per token",
        above=0,
        refusal="{name} must be > 0 nats or null, got {value}",
    )
    entropy_coef_step: float = key(
        "Amount by which entropy_coef changes in one training step if entropy_target is set.", above=0
    )
    entropy_coef_max: float = key(
        "Upper limit of entropy_coef if entropy_target is set. Skywork-OR1's training script limits entropy_coef to at "
        "most 0.005.",
        above=0,
    )
    reward_shaping: RewardShapingConfig = key(
        "Changes to the score of each answer: bias, scale, clipping, length penalty and length reward."
    )
    reward_normalization: NormalizationConfig = key("Normalisation of the scores before the advantages are estimated.")
    advantage_normalization: NormalizationConfig = key(
        "Normalisation of the estimated advantages of the tokens that are trained on."
    )
    advantage_clip: float | None = key(
        "Maximum absolute value of an advantage. After normalisation, advantages are clamped to the range from "
        "-advantage_clip to advantage_clip. null: advantages are not clamped.",
        above=0,
    )
    kl_in_reward: KLInRewardConfig = key(
        "KL penalty for the distance from the reference model, subtracted from the token rewards."
    )
    kl_loss: KLLossConfig = key("KL term for the distance from the reference model, added to the loss.")
    reference: ReferenceConfig = key("Updates of the reference model during training.")
    squared_log_ratio_coef: float = key(
        "Coefficient of a loss term: the squared log-ratio of the policy to the engine's policy (Kimi K2.5, "
        "arXiv:2602.02276 eq. 1). The squared log-ratio is added for every token, even if the token's policy-loss "
        "term is dropped. 0: the loss has no squared log-ratio.",
        at_least=0,
    )
    sft_coef: float = key(
        "Coefficient of the supervised loss, which is added to the loss of every mini-batch. The supervised loss is "
        "the mean cross-entropy over the tokens of the supervised answers (data.sft_response) to the mini-batch's "
        "prompts. 0: no supervised loss.",
        at_least=0,
    )
    positive_nll_coef: float = key(
        "Coefficient of a loss term: the mean negative log-likelihood of the tokens of correct answers (VAPO, "
        "arXiv:2504.05118 section 4.3). An answer is correct if a reward function or model judges it as correct "
        "(success). With suppress_truncated, an answer that was cut at the length limit never counts as correct. "
        "Tokens whose policy-loss term is dropped keep their negative log-likelihood in the loss. 0: no loss term for "
        "correct answers.",
        at_least=0,
    )
    correction: CorrectionConfig = key(
        "Importance weights of the policy-loss term: a token's probability under the actor before the update, divided "
        "by its probability under the inference engine. The KL and entropy terms of the loss are not multiplied by "
        "importance weights."
    )
    rejection: RejectionConfig = key(
        "Drops the policy-loss term of tokens or answers on which the updated policy differs too much from the "
        "engine's policy. The loss keeps the KL and entropy terms of dropped tokens."
    )
    distillation: DistillationConfig = key(
        "Distillation on the policy's own answers: the policy learns to match the distributions of teachers."
    )

    def __post_init__(self) -> None:
        target, most = self.entropy_target, self.entropy_coef_max
        require(
            target is None or self.entropy_coef <= most,
            f"entropy_coef={self.entropy_coef} with entropy_target={target}: the coefficient starts above "
            f"algorithm.entropy_coef_max={most}; lower entropy_coef, or raise entropy_coef_max",
        )
        require(
            self.correction.level is None or self.old_log_probs == "actor",
            f"old_log_probs={self.old_log_probs} with correction.level={self.correction.level}: all importance weights "
            "(actor probability / engine probability) would be 1, because the old log-probs come from the engine; use "
            "old_log_probs=actor",
        )
        require(
            self.correction.normalize == "all" or self.loss_agg_mode != "token-sum",
            f"loss_agg_mode={self.loss_agg_mode} with correction.normalize={self.correction.normalize}: token-sum "
            "does not divide by a number of tokens, so correction.normalize would have no effect; use another "
            "loss_agg_mode, or correction.normalize=all",
        )

    @property
    def has_reference_kl(self) -> bool:
        """Whether the run has a KL penalty in the reward or a KL term in the loss.

        The KL penalty and the KL term compare the policy with the reference model.
        """
        return self.kl_in_reward.kl_coef > 0 or self.kl_loss.kl_loss_coef > 0

    @property
    def refreshes_reference(self) -> bool:
        """Whether the reference model is updated during training.

        Checkpoints contain the weights of a reference model only if the reference model is updated.
        """
        return self.reference.refresh_every > 0

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs a reference model for the KL penalty in the reward, for the KL term in the loss, or as
        a teacher.
        """
        return self.has_reference_kl or self.distillation.has_reference

    @property
    def needs_full_kl(self) -> bool:
        """Whether the KL penalty in the reward or the KL term in the loss uses the exact KL.

        The exact KL needs the hidden states of the reference model.
        """
        return self.kl_in_reward.full or self.kl_loss.full

    @property
    def needs_reference_head(self) -> bool:
        """Whether the actor keeps a copy of the reference model's output head, from which it computes exact KLs.

        The exact KL is a KL term, or the distillation term of a teacher that is the reference model.
        """
        return self.needs_full_kl or (self.distillation.full and self.distillation.has_reference)

    @property
    def needs_ref_log_probs(self) -> bool:
        """Whether the KL penalty in the reward or the KL term in the loss is estimated from samples.

        Estimating the KL divergence from samples needs the log-probs of the reference model.
        """
        reward, loss = self.kl_in_reward, self.kl_loss
        return (reward.kl_coef > 0 and not reward.full) or (loss.kl_loss_coef > 0 and not loss.full)
