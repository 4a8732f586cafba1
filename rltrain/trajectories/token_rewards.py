"""Computes token rewards and advantages, and chooses the tokens that are trained on.

The module `token_rewards` applies the pure functions of `rltrain.algorithms` to whole batches.
"""

import dataclasses
from collections.abc import Sequence

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
    distilled_advantages,
    kl_estimate,
    knobs_of,
    loss_functions,
    normalize_advantages,
    normalize_rewards,
    required_columns,
    returns_to_go,
    turn_returns_to_go,
    uniform_draws,
)
from rltrain.algorithms.ratio import safe_log_ratio
from rltrain.base.errors import EstimatorError, NumericsError, described
from rltrain.batch.column_families import COLUMNS
from rltrain.batch.contexts import EXPERTS
from rltrain.batch.data_proto import DataProto, offsets_of, positions
from rltrain.batch.sampled_tokens import sampled_lengths, sampled_tokens
from rltrain.batch.token_arrays import NOT_RECORDED
from rltrain.settings.algorithm_config import AlgorithmConfig, KLInRewardConfig
from rltrain.settings.schema import Config
from rltrain.trajectories.scoring import (
    correct_rows,
    flat_rows,
    on_last_token,
    place_scores,
    shaped_scores,
    truncated_rows,
    zero_spread,
)

# Number of training steps between two checks that the update computes the same log-probs as a forward pass before it.
# The number is not a setting, because the forward pass of a check changes the rounding of the update.
SAME_POLICY_EVERY = 10


def with_all_knobs(config: Config) -> Config:
    """Return the config with all knobs (settings) of the chosen loss and estimator, including their defaults.

    If the name of the loss or the estimator is unknown, the knobs in the config stay unchanged. If an estimator has a
    setting `weights`, the estimator itself combines the reward components, so the default value of `weights` is the
    list of the components' weights in the config. If the policy learns from teachers alone, the estimator has no
    effect, so its knobs are left out.
    """
    algorithm = config.algorithm
    loss, advantage = algorithm.loss, algorithm.advantage
    if algorithm.loss_mode in POLICY_LOSSES.names():
        for function in reversed(loss_functions(algorithm.loss_mode)):
            loss = knobs_of(function) | loss
    if algorithm.advantage_estimator in ADVANTAGE_ESTIMATORS.names() and not algorithm.distillation.alone:
        defaults = knobs_of(ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator))
        if "weights" in defaults:
            defaults["weights"] = [component.weight for component in config.reward.components]
        advantage = defaults | advantage
    return dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, loss=loss, advantage=advantage))


def rows_of_actor_pass(config: Config, minibatches: Sequence[Sequence[int]], *, step: int) -> list[int]:
    """Return the rows whose log-probs the actor computes in a forward pass before a training step's update.

    The old log-probs of the first mini-batch equal the detached log-probs of the update itself. The forward pass of the
    first mini-batch's rows is therefore needed only if the actor's log-probs or entropies are read before the update,
    for example for the KL penalty in the reward, or if the rows are trained on again in a later epoch.

    The forward pass has all rows in the first step that updates the actor, and in every `SAME_POLICY_EVERY`-th step
    after it, so that the update can compare its log-probs with those of the forward pass.

    Args:
        config: the run's whole config.
        minibatches: row indices of each mini-batch of the step, in training order.
        step: number of finished training steps.

    Returns:
        The row indices in ascending order.
    """
    everything, updates = {row for rows in minibatches for row in rows}, step - config.critic.warmup_steps
    if reads_actor_pass(config):
        return sorted(everything)
    if config.algorithm.old_log_probs == "rollout" or updates < 0:
        return []
    if config.trainer.epochs_per_step > 1 or updates % SAME_POLICY_EVERY == 0:
        return sorted(everything)
    return sorted(everything - set(minibatches[0]))


def reads_actor_pass(config: Config) -> bool:
    """Return whether something needs the actor's log-probs or entropies before the update, such as a KL penalty."""
    algorithm = config.algorithm
    columns = set(columns_of(ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)))
    for selector in loss_functions(algorithm.loss_mode)[1:]:
        columns.update(columns_of(selector))
    everything = required_columns(algorithm.advantage_estimator, algorithm.loss_mode)
    if algorithm.kl_in_reward.full or "entropies" in everything:
        return True
    reads = (
        algorithm.kl_in_reward.kl_coef > 0
        or "old_log_probs" in columns
        or algorithm.correction.needs_statistics
        or algorithm.distillation.in_reward
    )
    return algorithm.old_log_probs == "actor" and reads


def with_columns_of_rows(batch: DataProto, found: DataProto, rows: Sequence[int]) -> DataProto:
    """Add the columns that the actor's forward pass computed for some rows of a batch.

    If the forward pass has computed all rows, the columns are added as they are. Otherwise, the added columns are 0 in
    all other rows, and the column `has_old_log_probs` tells the rows apart. The experts of these rows are
    `NOT_RECORDED`.

    Args:
        batch: the batch of the training step.
        found: the computed columns of prompts and responses, with one row for each index in `rows`.
        rows: indices in `batch` of the computed rows, in ascending order.
    """
    if len(rows) == len(batch):
        return batch.union(found)
    chosen = torch.zeros(len(batch), dtype=torch.bool)
    chosen[list(rows)] = True
    for name in found.keys():  # noqa: SIM118 (iterating a batch gives its rows)
        family = "prompts" if COLUMNS[name][0] == "prompt" else "responses"
        tokens, computed = chosen.repeat_interleave(batch.lengths(family)), found.values(name)
        missing = NOT_RECORDED if name in EXPERTS else 0
        values = computed.new_full((len(tokens), *computed.shape[1:]), missing)
        values[tokens] = computed
        batch = batch.with_values(family, **{name: values})
    return batch.union(DataProto.from_dict({"has_old_log_probs": chosen}))


def entropy_controller(algorithm: AlgorithmConfig) -> FixedEntropyController:
    """Create the controller for the coefficient of the entropy bonus."""
    if algorithm.entropy_target is None:
        return FixedEntropyController(algorithm.entropy_coef)
    return AdaptiveEntropyController(
        algorithm.entropy_coef, algorithm.entropy_target, algorithm.entropy_coef_step, algorithm.entropy_coef_max
    )


def kl_controller(config: KLInRewardConfig) -> FixedKLController:
    """Create the controller for the coefficient of the KL penalty in the reward."""
    if config.controller == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target, config.horizon)
    return FixedKLController(config.kl_coef)


def held(controller: FixedKLController) -> FixedKLController:
    """Return a controller that keeps the current coefficient of `controller` constant.

    While the actor is not trained, its KL does not react to the KL coefficient, so an adaptive controller would keep
    raising or lowering the coefficient.
    """
    return FixedKLController(controller.value)


def assign_rewards(
    batch: DataProto, config: Config, controller: FixedKLController
) -> tuple[DataProto, dict[str, float]]:
    """Add the column `token_level_rewards`: the reward of each token, computed from scores and KL penalties.

    The reward of a turn is placed on the last token of the turn. A row's score minus the rewards of the row's turns is
    placed on the last trained token of the row, as `place_scores` describes. The KL penalty of each token is subtracted
    from the token's reward. The scores in `token_level_rewards` include reward shaping and, if configured,
    normalisation.

    If the config excludes answers that were cut at the length limit from the score statistics (means and standard
    deviations), `assign_rewards` sets the column `valid` to False in the rows of these answers. The score of a
    truncated answer that is excluded from the score statistics is still shaped and normalised like the scores of all
    other rows.

    Returns:
        The batch with the columns `token_level_rewards` and `valid`, and metrics of the rewards.

    Raises:
        NumericsError: a token reward is not finite.
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
    batch = batch.with_values("responses", token_level_rewards=place_scores(batch, scores, config))
    batch, kl_metrics = penalize_kl(batch, config.algorithm.kl_in_reward, controller)
    rewards = batch.values("token_level_rewards")[batch.values("response_mask")]
    if not bool(rewards.isfinite().all()):
        raise NumericsError(
            f"{int((~rewards.isfinite()).sum())} of {len(rewards)} token rewards are not finite: scores or KL "
            "penalties are too large, or log-probs are not finite; look at algorithm.reward_shaping and "
            "algorithm.kl_in_reward.kl_coef"
        )
    return batch, metrics | kl_metrics


def penalize_kl(
    batch: DataProto, config: KLInRewardConfig, controller: FixedKLController
) -> tuple[DataProto, dict[str, float]]:
    """Subtract from each token's reward the actor's KL from the reference model, times the controller's coefficient.

    The controller of the KL coefficient is updated with the mean KL per trained token.
    """
    if config.kl_coef == 0:
        return batch, {}
    mask, estimator = batch.padded("response_mask"), config.kl_estimator
    if config.full:
        # `apply_kl_in_reward` expects the old log-probs and the reference log-probs. The KL estimator "k1" subtracts
        # the reference log-probs from the old log-probs. The exact KL is passed to `apply_kl_in_reward` in place of
        # the old log-probs, and 0 in place of the reference log-probs, so that the estimator returns the exact KL.
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
    """Return the batch on which the critic computes the state values.

    With `bootstrap_truncated`, the critic computes, besides the values of the response tokens, the value of the state
    after the last token of each answer that was cut at the length limit. The critic's value of a token is the value of
    the state before the token, and the critic does not read the last token of a row. With `bootstrap_truncated`, one
    arbitrary token is appended to each truncated answer, so that the critic reads the answer's last token. The critic's
    value of a token that was appended to a truncated answer is the value of the state after the answer's last token.
    """
    if not algorithm.bootstrap_truncated:
        return batch
    lengths = batch.lengths("responses") + truncated_rows(batch).long()
    own = _own_slots(batch, lengths)

    def longer(name: str) -> Tensor:
        values = torch.zeros(len(own), dtype=batch.values(name).dtype)
        values[own] = batch.values(name)
        return nested_tensor_from_jagged(values, offsets_of(lengths))

    names = [name for name in ("responses", "context_starts") if name in batch]
    return batch.select(["prompts"]).union(DataProto.from_dict({name: longer(name) for name in names}))


def with_critic_values(batch: DataProto, found: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Add the critic's values to `batch` as the column `values`.

    `found` contains the values that the critic has computed on the batch returned by `states_to_value`. With
    `bootstrap_truncated`, `with_critic_values` adds a second column, `bootstrap_values` (B,): the value of the state in
    which an answer was cut at the length limit, and 0 for answers that were not cut.
    """
    if not algorithm.bootstrap_truncated:
        return batch.union(found)
    values, lengths, cut = found.values("values"), found.lengths("values"), truncated_rows(batch)
    at_the_end = torch.zeros(len(batch), dtype=values.dtype)
    at_the_end[cut] = values[found.offsets("values")[1:][cut] - 1]
    batch = batch.union(DataProto.from_dict({"bootstrap_values": at_the_end}))
    return batch.with_values("responses", values=values[_own_slots(batch, lengths)])


def _own_slots(batch: DataProto, lengths: Tensor) -> Tensor:
    """Return a bool mask over all N tokens of the rows: True at response tokens, and False at appended tokens.

    `lengths` (B,) is the number of tokens in each row. In each row, the response tokens come first, followed by at most
    one appended token.
    """
    return positions(lengths) < batch.lengths("responses").repeat_interleave(lengths)


def estimate_advantages(
    batch: DataProto, algorithm: AlgorithmConfig, *, monte_carlo: bool = False
) -> tuple[DataProto, dict[str, float]]:
    """Add the columns `advantages` and `returns`, which the configured estimator computes.

    With `monte_carlo`, the estimator's returns are replaced by `monte_carlo_returns`. During the critic's warm-up, the
    critic is trained on Monte-Carlo returns.

    If configured, the advantages are normalised, then the log-ratio of teacher to policy is added to the advantages
    (see `with_distillation`), and then the advantages are clamped to [-c, c], with c = `advantage_clip`.
    Normalisation, distillation and clamping change only the advantages and not the returns.

    With `bootstrap_truncated`, gamma times `bootstrap_values` is added to the reward of each row's last trained token
    before the estimator runs. With `bootstrap_truncated`, GAE's TD error of a row's last token is delta = r + gamma
    V(end) - V (arXiv 1712.00378). In the TD error, r is the reward of the token, V(end) is the value of the state after
    the token, and V is the value of the state before the token. The batch that `estimate_advantages` returns contains
    the original rewards in the column `token_level_rewards`, without the added term gamma times `bootstrap_values`.

    Returns:
        The batch with the columns `advantages` and `returns`, and metrics of the advantages.

    Raises:
        EstimatorError: the advantage estimator raised an exception.
    """
    estimator = ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)
    seen, gamma = batch, (knobs_of(estimator) | algorithm.advantage).get("gamma", 1.0)
    if algorithm.bootstrap_truncated:
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
    if monte_carlo:
        returns = monte_carlo_returns(seen, columns_of(estimator), gamma)
    if algorithm.advantage_normalization.on:
        advantages = _normalized(batch, advantages, algorithm)
    advantages, metrics = with_distillation(batch, advantages, algorithm)
    if algorithm.advantage_clip is not None:
        advantages = advantages.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
    trained = advantages[mask]
    metrics["actor/advantage_abs_mean"] = float(trained.abs().mean()) if len(trained) else 0.0
    if "values" in batch and len(trained):
        values, targets = batch.padded("values")[mask], returns[mask]
        spread = float(targets.var(unbiased=False))
        metrics["critic/explained_variance"] = (
            1 - float((targets - values).var(unbiased=False)) / spread if spread else 0.0
        )
    return batch.with_padded("responses", advantages=advantages, returns=returns), metrics


def monte_carlo_returns(batch: DataProto, columns: Sequence[str], gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each trained token on: (B, T), 0 in masked slots.

    `gamma` is a discount per turn if the advantage estimator, which reads the columns named `columns`, treats a turn as
    one action. All tokens of a turn then have the return of the turn. Otherwise, `gamma` is a discount per token.
    """
    rewards, mask = batch.padded("token_level_rewards"), batch.padded("response_mask")
    if "turn_index" in columns:
        return turn_returns_to_go(rewards, mask, batch.padded("turn_index"), gamma=gamma)
    return returns_to_go(rewards, mask, gamma=gamma)


def with_distillation(
    batch: DataProto, advantages: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, dict[str, float]]:
    """Multiply the advantages (B, T) by `outcome_coef`, and add the log-ratio of teacher to policy if configured.

    If `algorithm.distillation.mode` is `reward`, the log-ratio log(pi_teacher / pi_old) times `coef` is added to the
    advantage of each token that a teacher has scored. If `algorithm.distillation.mode` is None, the advantages are
    returned unchanged.

    Returns:
        The resulting advantages, and metrics of the KL from the policy to the teachers, estimated from the sampled
        tokens. If `algorithm.distillation.mode` is `reward`, the metrics contain `actor/teacher_kl`. With several
        teachers, the metrics contain `actor/teacher_kl/NAME` for each teacher. If the batch has the actor's log-probs
        from before the update for all rows, the KL metrics use these log-probs as the policy's log-probs. Otherwise,
        the KL metrics use the engine's log-probs.
    """
    config = algorithm.distillation
    if config.mode is None:
        return advantages, {}
    teacher, mask = batch.batch["teacher"], batch.padded("response_mask")
    taught, scores = mask & (teacher >= 0)[:, None], batch.padded("teacher_log_probs")
    complete = "old_log_probs" in batch and "has_old_log_probs" not in batch
    known = "old_log_probs" if complete else "rollout_log_probs"
    gap = safe_log_ratio(batch.padded(known), scores, taught)
    groups = {f"actor/teacher_kl/{one.name}": teacher == n for n, one in enumerate(config.teachers)}
    found = groups if len(groups) > 1 else {}
    if config.in_reward:
        found = found | {"actor/teacher_kl": teacher >= 0}
        coefs = {"coef": config.coef, "outcome_coef": config.outcome_coef}
        advantages = distilled_advantages(advantages, batch.padded("old_log_probs"), scores, taught, **coefs)
    else:
        advantages = config.outcome_coef * advantages
    counted = {name: gap[taught & rows[:, None]] for name, rows in found.items()}
    return advantages, {name: float(values.mean()) for name, values in counted.items() if len(values)}


def _normalized(batch: DataProto, advantages: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Normalise the advantages over all tokens that will be trained on.

    The advantages of rows that the estimator excludes stay 0.
    """
    mask, valid = batch.padded("response_mask"), batch.batch["valid"]
    if algorithm.mask_truncated:
        mask = mask & ~truncated_rows(batch)[:, None]
    if "valid" in columns_of(ADVANTAGE_ESTIMATORS.get(algorithm.advantage_estimator)):
        mask = mask & valid[:, None]
    settings = dataclasses.asdict(algorithm.advantage_normalization)
    return normalize_advantages(advantages, mask, batch.batch["uid"], valid, **settings)


def choose_trained(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Set `response_mask` to False at all tokens of the answers on which the update must not train.

    With `algorithm.mask_truncated`, the update ignores the tokens of truncated answers. If the policy learns only from
    teachers, the update ignores the tokens of answers that no teacher has scored.

    `choose_trained` must be called after the advantages are computed and before the batch is split into mini-batches.
    Tokens that rollout correction or rejection drops stay in `response_mask`: the update only removes the policy-loss
    term of these tokens.
    """
    if not (algorithm.mask_truncated or algorithm.distillation.alone):
        return batch
    mask = batch.padded("response_mask")
    if algorithm.mask_truncated:
        mask = mask & ~truncated_rows(batch)[:, None]
    if algorithm.distillation.alone:
        mask = mask & (batch.batch["teacher"] >= 0)[:, None]
    return batch.with_padded("responses", response_mask=mask)


def with_positive_examples(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Add the column `positive_mask` if the loss contains the negative log-likelihood of correct answers.

    Raises:
        RewardError: no reward function has judged any of the trained answers as correct or wrong.
    """
    if algorithm.positive_nll_coef == 0:
        return batch
    mask = batch.padded("response_mask")
    setting = f"algorithm.positive_nll_coef={algorithm.positive_nll_coef:g}"
    correct = correct_rows(batch, mask.any(-1), algorithm, setting=setting, user="this loss term")
    return batch.with_padded("responses", positive_mask=mask & correct[:, None])


def with_random_draws(batch: DataProto, config: Config, step: int) -> DataProto:
    """Add the column `random_draws` if the token selector of the loss chooses tokens at random.

    The random draw of a token depends on the token's index among the sampled tokens of the row, so observation tokens
    do not change the draw.
    """
    if "random_draws" not in required_columns(config.algorithm.advantage_estimator, config.algorithm.loss_mode):
        return batch
    draws = torch.zeros(len(batch.values("responses")), dtype=torch.float64)
    draws[sampled_tokens(batch)] = uniform_draws(sampled_lengths(batch), seed=config.trainer.seed, step=step)
    return batch.with_values("responses", random_draws=draws)
