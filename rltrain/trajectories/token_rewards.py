"""From scores to what each token is worth, and which tokens are trained on: the pure functions of `rltrain.algorithms`
on whole batches. The only place where batch columns meet algorithm parameters on the driver."""

import dataclasses

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from rltrain.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    AdaptiveEntropyController,
    AdaptiveKLController,
    FixedEntropyController,
    FixedKLController,
    apply_kl_in_reward,
    columns_of,
    kl_estimate,
    knobs_of,
    loss_functions,
    normalize_advantages,
    normalize_rewards,
    required_columns,
    uniform_draws,
)
from rltrain.base.errors import EstimatorError, NumericsError, described
from rltrain.batch.data_proto import COLUMNS, DataProto, offsets_of, positions
from rltrain.settings.algorithm_config import AlgorithmConfig, KLInRewardConfig
from rltrain.settings.schema import Config
from rltrain.trajectories.scoring import flat_rows, on_last_token, shaped_scores, truncated_rows, zero_spread


def with_all_knobs(config: Config) -> Config:
    """The config with every knob of the chosen loss and estimator, defaults included; unknown names are left alone.

    An estimator that weighs the reward functions by itself gets their weights.
    """
    algorithm = config.algorithm
    loss, advantage = algorithm.loss, algorithm.advantage
    if algorithm.loss_mode in POLICY_LOSSES.names():
        for function in reversed(loss_functions(algorithm.loss_mode)):
            loss = knobs_of(function) | loss
    if algorithm.advantage_estimator in ADVANTAGE_ESTIMATORS.names():
        defaults = knobs_of(ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator))
        if "weights" in defaults:
            defaults["weights"] = [component.weight for component in config.reward.components]
        advantage = defaults | advantage
    return dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, loss=loss, advantage=advantage))


def needs_actor_pass(config: Config) -> bool:
    """Whether a step needs the actor's forward pass before its update.

    Not where one optimizer step trains on all: there the old log-probs are the current ones, detached.
    """
    algorithm = config.algorithm
    columns = set(columns_of(ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)))
    for selector in loss_functions(algorithm.loss_mode)[1:]:
        columns.update(columns_of(selector))
    everything = required_columns(algorithm.advantage_estimator, algorithm.loss_mode)
    if algorithm.kl_in_reward.full or "entropies" in everything:
        return True
    reads = algorithm.kl_in_reward.kl_coef > 0 or "old_log_probs" in columns
    return algorithm.old_log_probs == "actor" and (reads or config.optimizer_steps_per_step > 1)


def entropy_controller(algorithm: AlgorithmConfig) -> FixedEntropyController:
    """The controller of the coefficient of the entropy bonus."""
    if algorithm.entropy_target is None:
        return FixedEntropyController(algorithm.entropy_coef)
    return AdaptiveEntropyController(
        algorithm.entropy_coef, algorithm.entropy_target, algorithm.entropy_coef_step, algorithm.entropy_coef_max
    )


def kl_controller(config: KLInRewardConfig) -> FixedKLController:
    """The controller of the coefficient of KL-in-reward."""
    if config.controller == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target, config.horizon)
    return FixedKLController(config.kl_coef)


def assign_rewards(
    batch: DataProto, config: Config, controller: FixedKLController
) -> tuple[DataProto, dict[str, float]]:
    """Adds `token_level_rewards`: shaped and normalised scores on the last trained tokens, minus the KL penalty.

    `valid` is then False also in rows whose answer was cut and that are in no statistic. Such a row keeps its own score
    on the scale of the others.
    """
    scores, scored, counted = shaped_scores(batch, config)
    uid, normalization = batch.batch["uid"], config.algorithm.reward_normalization
    flat = zero_spread(uid, scores, counted)
    metrics = {
        "reward/zero_spread_fraction": len(uid[flat].unique()) / len(uid.unique()),
        "reward/same_outcome_fraction": len(uid[flat_rows(batch, config)].unique()) / len(uid.unique()),
        "reward/excluded_fraction": float((batch.batch["valid"] & ~counted).float().mean()),
    }
    if normalization.on:
        scores = normalize_rewards(scores, uid, scored, counted=counted, **dataclasses.asdict(normalization))
    batch = batch.pop(["valid"])[1].union(DataProto.from_dict({"valid": counted}))
    batch = batch.with_values("responses", token_level_rewards=on_last_token(batch, scores))
    batch, kl_metrics = penalize_kl(batch, config.algorithm.kl_in_reward, controller)
    rewards = batch.values("token_level_rewards")[batch.values("response_mask")]
    if not bool(rewards.isfinite().all()):
        raise NumericsError(
            f"{int((~rewards.isfinite()).sum())} of {len(rewards)} token rewards are not finite: scores or KL "
            "penalties too large, or broken log-probs; look at algorithm.reward_shaping and kl_in_reward.kl_coef"
        )
    return batch, metrics | kl_metrics


def penalize_kl(
    batch: DataProto, config: KLInRewardConfig, controller: FixedKLController
) -> tuple[DataProto, dict[str, float]]:
    """Subtracts the KL to the reference, times the controller's coefficient, from `token_level_rewards`.

    The controller is told the mean KL a trained token.
    """
    if config.kl_coef == 0:
        return batch, {}
    mask, estimator = batch.padded("response_mask"), config.kl_estimator
    if config.full:  # the exact KL of a token passes as its own k1: a difference to 0
        old = batch.padded("full_kl")
        ref, estimator = torch.zeros_like(old), "k1"
    else:
        old, ref = batch.padded("old_log_probs"), batch.padded("ref_log_probs")
    rewards = apply_kl_in_reward(
        batch.padded("token_level_rewards"), old, ref, mask, kl_coef=controller.value, kl_estimator=estimator
    )
    kl = kl_estimate(old, ref, estimator)[mask]
    metrics = {"reward/kl": float(kl.mean()) if len(kl) else 0.0, "reward/kl_coef": controller.value}
    if len(kl):
        controller.update(metrics["reward/kl"], int(mask.any(-1).sum()))
    return batch.with_padded("responses", token_level_rewards=rewards), metrics


def states_to_value(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """What the critic is asked about: the batch, and with `bootstrap_truncated` the states in which answers were cut.

    The critic's value of a token is that of the state before it, and the last token of a row is not read. So a cut
    answer gets one slot more, of any token: its value is that of the state after the answer's last token.
    """
    if not algorithm.bootstrap_truncated:
        return batch
    lengths = batch.lengths("responses") + truncated_rows(batch).long()
    tokens = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    tokens[_own_slots(batch, lengths)] = batch.values("responses")
    longer = DataProto.from_dict({"responses": nested_tensor_from_jagged(tokens, offsets_of(lengths))})
    return batch.select(["prompts"]).union(longer)


def with_critic_values(batch: DataProto, found: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Adds what the critic said of `states_to_value`: `values`, and with `bootstrap_truncated` `bootstrap_values`."""
    if not algorithm.bootstrap_truncated:
        return batch.union(found)
    values, lengths, cut = found.values("values"), found.lengths("values"), truncated_rows(batch)
    at_the_end = torch.zeros(len(batch), dtype=values.dtype)
    at_the_end[cut] = values[found.offsets("values")[1:][cut] - 1]
    batch = batch.union(DataProto.from_dict({"bootstrap_values": at_the_end}))
    return batch.with_values("responses", values=values[_own_slots(batch, lengths)])


def _own_slots(batch: DataProto, lengths: Tensor) -> Tensor:
    """(N,) bool: which slots of rows of these lengths (B,) are those of the responses, which come first."""
    return positions(lengths) < batch.lengths("responses").repeat_interleave(lengths)


def estimate_advantages(batch: DataProto, algorithm: AlgorithmConfig) -> tuple[DataProto, dict[str, float]]:
    """Adds `advantages` and `returns` by the configured estimator; normalised where the config says so.

    With `bootstrap_values` the estimator sees gamma times them as a part of the rewards of the last trained tokens,
    which is what the value after a last token is to gae (arXiv 1712.00378): delta = r + gamma V(end) - V. The column
    `token_level_rewards` stays.

    Raises EstimatorError where the estimator raises anything.
    """
    estimator = ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)
    seen = batch
    if algorithm.bootstrap_truncated:
        gamma = (knobs_of(estimator) | algorithm.advantage).get("gamma", 1.0)
        rewards = batch.values("token_level_rewards") + on_last_token(batch, gamma * batch.batch["bootstrap_values"])
        seen = batch.with_values("responses", token_level_rewards=rewards)
    columns = [
        seen.padded(name) if COLUMNS[name][0] == "response" else seen.batch[name] for name in columns_of(estimator)
    ]
    try:
        advantages, returns = estimator(*columns, **algorithm.advantage)
    except Exception as error:
        name = algorithm.advantage_estimator
        raise EstimatorError(f"algorithm.advantage_estimator={name} raised {described(error)}") from error
    mask = batch.padded("response_mask")
    if algorithm.advantage_normalization.on:
        advantages = _normalized(batch, advantages, algorithm)
    trained = advantages[mask]
    metrics = {"actor/advantage_abs_mean": float(trained.abs().mean()) if len(trained) else 0.0}
    if "values" in batch and len(trained):
        values, targets = batch.padded("values")[mask], returns[mask]
        spread = float(targets.var(unbiased=False))
        metrics["critic/explained_variance"] = (
            1 - float((targets - values).var(unbiased=False)) / spread if spread else 0.0
        )
    return batch.with_padded("responses", advantages=advantages, returns=returns), metrics


def _normalized(batch: DataProto, advantages: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Advantages normalised over the tokens that will be trained on; 0 stays 0 in rows that an estimator leaves out."""
    mask, valid = batch.padded("response_mask"), batch.batch["valid"]
    if algorithm.mask_truncated:
        mask = mask & ~truncated_rows(batch)[:, None]
    if "valid" in columns_of(ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)):
        mask = mask & valid[:, None]
    settings = dataclasses.asdict(algorithm.advantage_normalization)
    return normalize_advantages(advantages, mask, batch.batch["uid"], valid, **settings)


def choose_trained(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Takes cut answers out of `response_mask` where the config says so; they leave every count.

    This comes after the statistics of advantages and before the mini-batches. What correction and rejection drop stays
    in `response_mask`: the update takes only its policy term away.
    """
    if not algorithm.mask_truncated:
        return batch
    mask = batch.padded("response_mask") & ~truncated_rows(batch)[:, None]
    return batch.with_padded("responses", response_mask=mask)


def with_random_draws(batch: DataProto, config: Config, step: int) -> DataProto:
    """Adds `random_draws` where the loss's token selector chooses by chance."""
    if "random_draws" not in required_columns(config.algorithm.advantage_estimator, config.algorithm.loss_mode):
        return batch
    draws = uniform_draws(batch.lengths("responses"), seed=config.trainer.seed, step=step)
    return batch.with_values("responses", random_draws=draws)
