"""From scores to what each token is worth: KL-in-reward and advantages on whole batches, by the pure functions of
`rltrain.algorithms`. The only place where batch columns meet algorithm parameters on the driver."""

import dataclasses

import torch

from rltrain.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_in_reward,
    columns_of,
    kl_estimate,
    knobs_of,
    normalize_advantages,
)
from rltrain.protocol import COLUMNS, DataProto
from rltrain.schema import AlgorithmConfig, Config, KLInRewardConfig


def with_all_knobs(config: Config) -> Config:
    """The config with every knob of the chosen loss and estimator, defaults included; unknown names are left alone."""
    algorithm = config.algorithm
    loss, advantage = algorithm.loss, algorithm.advantage
    if algorithm.loss_mode in POLICY_LOSSES.names():
        loss = knobs_of(POLICY_LOSSES.get(algorithm.loss_mode)) | loss
    if algorithm.advantage_estimator in ADVANTAGE_ESTIMATORS.names():
        advantage = knobs_of(ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)) | advantage
    return dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, loss=loss, advantage=advantage))


def kl_controller(config: KLInRewardConfig) -> FixedKLController:
    """The controller of the coefficient of KL-in-reward."""
    if config.controller == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target, config.horizon)
    return FixedKLController(config.kl_coef)


def penalize_kl(
    batch: DataProto, config: KLInRewardConfig, controller: FixedKLController
) -> tuple[DataProto, dict[str, float]]:
    """Adds `token_level_rewards`: the scores minus the KL to the reference times the controller's coefficient.

    The controller is told the mean KL a trained token. Without `ref_log_probs` the rewards are the scores.
    """
    if config.kl_coef == 0 or "ref_log_probs" not in batch:
        return batch.with_values("responses", token_level_rewards=batch.values("token_level_scores")), {}
    mask = batch.padded("response_mask")
    old, ref = batch.padded("old_log_probs"), batch.padded("ref_log_probs")
    rewards = apply_kl_in_reward(
        batch.padded("token_level_scores"), old, ref, mask, kl_coef=controller.value, kl_estimator=config.kl_estimator
    )
    kl = kl_estimate(old, ref, config.kl_estimator)[mask]
    metrics = {"reward/kl": float(kl.mean()) if len(kl) else 0.0, "reward/kl_coef": controller.value}
    if len(kl):
        controller.update(metrics["reward/kl"], int(batch.batch["valid"].sum()))
    return batch.with_padded("responses", token_level_rewards=rewards), metrics


def estimate_advantages(batch: DataProto, config: AlgorithmConfig) -> tuple[DataProto, dict[str, float]]:
    """Adds `advantages` and `returns` by the configured estimator; whitened where the config says so."""
    estimator = ADVANTAGE_ESTIMATORS.get(config.advantage_estimator)
    columns = [
        batch.padded(name) if COLUMNS[name][0] == "response" else batch.batch[name] for name in columns_of(estimator)
    ]
    mask = batch.padded("response_mask")
    advantages, returns = estimator(*columns, **config.advantage)
    if config.normalize_advantages:
        advantages = normalize_advantages(advantages, mask)
    trained = advantages[mask]
    metrics = {
        "reward/zero_spread_fraction": zero_spread_fraction(batch),
        "actor/advantage_abs_mean": float(trained.abs().mean()) if len(trained) else 0.0,
    }
    if "values" in batch and len(trained):
        values, targets = batch.padded("values")[mask], returns[mask]
        spread = float(targets.var(unbiased=False))
        metrics["critic/explained_variance"] = (
            1 - float((targets - values).var(unbiased=False)) / spread if spread else 0.0
        )
    return batch.with_padded("responses", advantages=advantages, returns=returns), metrics


def zero_spread_fraction(batch: DataProto) -> float:
    """Share of prompt groups whose valid rows all have one score: they teach group-relative estimators nothing."""
    uids, scores = batch.batch["uid"], torch.where(batch.batch["valid"], batch.batch["scores"], torch.nan)
    groups, which = uids.unique(return_inverse=True)
    low = torch.full((len(groups),), torch.inf).scatter_reduce(0, which, scores.nan_to_num(torch.inf), "amin")
    high = torch.full((len(groups),), -torch.inf).scatter_reduce(0, which, scores.nan_to_num(-torch.inf), "amax")
    return float((high <= low).float().mean())
