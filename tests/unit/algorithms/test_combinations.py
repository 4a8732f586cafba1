"""Tests of advantage estimators combined with normalisations, and of estimators combined with policy losses."""

import itertools

import pytest
import torch

from rltrain.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    aggregate_loss,
    columns_of,
    normalize_advantages,
    normalize_rewards,
)
from rltrain.algorithms.aggregation import LOSS_AGG_MODES

LEVELS = tuple(itertools.product(("batch", "group", None), repeat=2))
PAIRS = sorted({*((e, "vanilla") for e in ADVANTAGE_ESTIMATORS.names()), *(("grpo", n) for n in POLICY_LOSSES.names())})
ROWS = 8
LAST = 4  # the token that carries the score
INVALID = 6


def scored(batch, scores):
    """Return the batch with each score as the reward of token LAST of its row, and with two reward components per row.

    The components of a row are its score and sin(score). Every trained token also keeps 0.01 times its old reward.
    """
    mask = batch["response_mask"].clone()
    mask[mask.any(-1), LAST] = True
    rewards = 0.01 * batch["token_level_rewards"]
    rewards[:, LAST] += scores
    rewards[~mask] = torch.nan
    components = torch.stack([scores, scores.sin()], -1)
    return {**batch, "response_mask": mask, "token_level_rewards": rewards, "reward_components": components}


def estimate(name, batch, call, reward_levels, advantage_levels):
    """Return the estimator's raw advantages, and the advantages after normalisation.

    A row that the estimator sets to 0 as invalid does not enter the statistics of the normalisation.
    """
    mean, std = reward_levels
    scores = normalize_rewards(batch["scores"], batch["uid"], batch["valid"], mean_level=mean, std_level=std)
    batch, function = scored(batch, scores), ADVANTAGE_ESTIMATORS.get(name)
    raw, _ = call(function, batch)
    mask, counted = batch["response_mask"], batch["valid"]
    if "valid" in columns_of(function):
        mask, counted = mask & batch["valid"][:, None], None
    mean, std = advantage_levels
    return raw, normalize_advantages(raw, mask, batch["uid"], counted, mean_level=mean, std_level=std)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
def test_C1_C4_C7_every_estimator_under_every_normalisation(name, make_batch, call, take_rows):
    batch = make_batch(seed=15)
    batch["scores"] = torch.tensor([1.0, 0.0, 2.0, 5.0, 0.5, 3.0, torch.nan, 1.5], dtype=torch.float64)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    mask = scored(batch, batch["scores"])["response_mask"]
    results = []
    # The config refuses normalised rewards, which may be negative, with an estimator that requires rewards >= 0.
    from_zero = ADVANTAGE_ESTIMATORS.metadata(name).get("scores_from_zero", False)
    of_rewards = [(mean, std) for mean, std in LEVELS if mean is None or not from_zero]
    for levels in itertools.product(of_rewards, LEVELS):
        raw, advantages = estimate(name, batch, call, *levels)
        permuted = estimate(name, take_rows(batch, order), call, *levels)[1]
        assert torch.allclose(permuted, advantages[order], rtol=1e-9, atol=1e-11), levels
        assert advantages.isfinite().all(), levels
        for outcome in (raw, advantages):
            assert (outcome[~mask] == 0).all(), levels
            if "valid" in columns_of(ADVANTAGE_ESTIMATORS.get(name)):
                assert (outcome[INVALID] == 0).all(), levels
        assert (advantages != 0).any(), levels
        results.append(advantages)
    assert any(not torch.allclose(results[0], other) for other in results[1:])


def loss_inputs(estimator, batch, call):
    """Return the batch with an additional column of advantages, estimated over all rows at once."""
    advantages, _ = call(ADVANTAGE_ESTIMATORS.get(estimator), batch)
    return {**batch, "advantages": advantages}


def gradient_of(loss, mode, batch, parts, call, take_rows):
    """Return the gradient of the loss with respect to the log-probs of all rows, summed over micro-batches."""
    log_probs, mask = batch["log_probs"].clone().requires_grad_(), batch["response_mask"]
    counts = {"num_tokens": mask.sum(), "num_sequences": mask.any(-1).sum(), "max_response_length": 16}
    for rows in torch.arange(ROWS).chunk(parts):
        micro = take_rows({**batch, "log_probs": log_probs}, rows)
        losses, _ = call(POLICY_LOSSES.get(loss), micro)
        aggregate_loss(losses, micro["response_mask"], mode, **counts).backward()
    return log_probs.grad


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize(("estimator", "loss"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_A1_micro_batches_give_the_gradient_of_the_whole(estimator, loss, mode, make_batch, call, take_rows):
    batch = loss_inputs(estimator, make_batch(seed=16, spread=0.1), call)
    whole = gradient_of(loss, mode, batch, 1, call, take_rows)
    assert whole.isfinite().all()
    assert whole.abs().max() > 1e-4
    assert (whole[~batch["response_mask"]] == 0).all()
    for parts in (2, 4):
        split = gradient_of(loss, mode, batch, parts, call, take_rows)
        assert (split - whole).abs().max() <= 1e-10 * whole.abs().max()


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_D1_on_policy_the_gradient_of_every_estimator_is_minus_its_advantage(estimator, make_batch, call, take_rows):
    batch = make_batch(seed=17)
    batch["log_probs"] = batch["old_log_probs"]
    batch = loss_inputs(estimator, batch, call)
    gradient = gradient_of("vanilla", "token-sum", batch, 2, call, take_rows)
    assert torch.allclose(gradient, -batch["advantages"], rtol=1e-12)
