"""Tests that masked slots have no effect, and that every function computes in the intended dtypes."""

import pytest
import torch

from rltrain.algorithms import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    aggregate_loss,
    apply_kl_in_reward,
    distilled_advantages,
    kl_estimate,
    normalize_advantages,
    positive_nll,
    rollout_correction,
    rollout_rejection,
    sampled_teacher_kl,
    supervised_loss,
    value_loss,
)
from rltrain.algorithms.ratio import safe_log_ratio

GARBAGE = (1e4, -1e4, torch.inf, -torch.inf, torch.nan)


def correct(batch, level, mode):
    weights, mask, metrics = rollout_correction(
        *(batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask", "advantages")),
        level=level,
        mode=mode,
        lower=0.5,
        upper=2.0,
    )
    return [weights, mask, *metrics.values()], None


def reject(batch, estimator, level):
    columns = (batch[name] for name in ("log_probs", "rollout_log_probs", "response_mask", "advantages"))
    mask, metrics = rollout_rejection(*columns, kl_estimator=estimator, level=level, upper=0.05)
    return [mask, *metrics.values()], None


def differentiable(name, batch, function):
    """Return all outputs of `function`, and the gradient with respect to the column `name`.

    The function must return (token_losses, metrics).
    """
    column = batch[name].clone().requires_grad_()
    losses, metrics = function({**batch, name: column})
    loss = aggregate_loss(losses, batch["response_mask"], "seq-mean-token-mean")
    return [loss.detach(), *metrics.values()], torch.autograd.grad(loss, column)[0]


def policy(name, call):
    return lambda batch: differentiable("log_probs", batch, lambda b: call(POLICY_LOSSES.get(name), b))


def kl(name, weighted):
    def loss(b):
        old = b["old_log_probs"] if weighted else None
        return kl_estimate(b["log_probs"], b["ref_log_probs"], name, old_log_probs=old), {}

    return lambda batch: differentiable("log_probs", batch, loss)


def value(batch):
    columns = ("values", "old_values", "returns", "response_mask")
    return differentiable("values", batch, lambda b: value_loss(*(b[name] for name in columns)))


def supervised(batch):
    return differentiable("log_probs", batch, lambda b: (supervised_loss(b["log_probs"], b["response_mask"]), {}))


def squared_log_ratio(batch):
    def squares(b):
        return safe_log_ratio(b["log_probs"], b["rollout_log_probs"], b["response_mask"] != 0).square(), {}

    return differentiable("log_probs", batch, squares)


def teacher_kl(batch):
    columns = ("log_probs", "old_log_probs", "teacher_log_probs", "taught")
    return differentiable("log_probs", batch, lambda b: (sampled_teacher_kl(*(b[name] for name in columns)), {}))


def nll_of_correct_answers(batch):
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss = positive_nll(log_probs, batch["response_mask"], batch["positive_mask"])
    return [loss.detach()], torch.autograd.grad(loss, log_probs)[0]


def distilled(batch):
    columns = ("advantages", "old_log_probs", "teacher_log_probs", "taught")
    advantages = distilled_advantages(*(batch[name] for name in columns))
    return [torch.where(batch["response_mask"] != 0, advantages, 0)], None


def advantage(name, call):
    return lambda batch: (list(call(ADVANTAGE_ESTIMATORS.get(name), batch)), None)


def kl_in_reward(batch):
    columns = ("token_level_rewards", "old_log_probs", "ref_log_probs", "response_mask")
    return [apply_kl_in_reward(*(batch[name] for name in columns), kl_coef=0.1, kl_estimator="k3")], None


def in_groups(batch):
    columns = (batch[name] for name in ("advantages", "response_mask", "uid", "valid"))
    return [normalize_advantages(*columns, mean_level="group", std_level="group")], None


@pytest.fixture
def functions(call):
    return {
        **{f"policy {name}": policy(name, call) for name in POLICY_LOSSES.names()},
        **{f"advantage {name}": advantage(name, call) for name in ADVANTAGE_ESTIMATORS.names()},
        **{f"kl {name}": kl(name, False) for name in KL_ESTIMATORS.names()},
        **{f"weighted kl {name}": kl(name, True) for name in KL_ESTIMATORS.names()},
        **{
            f"correction {level} {mode}": lambda batch, level=level, mode=mode: correct(batch, level, mode)
            for level in ("token", "sequence", "geometric")
            for mode in ("truncate", "mask")
        },
        **{
            f"rejection {estimator} {level}": lambda batch, e=estimator, level=level: reject(batch, e, level)
            for estimator in ("k1", "k2", "k3", "abs")
            for level in ("token", "sequence", "max")
        },
        "squared log-ratio": squared_log_ratio,
        "supervised": supervised,
        "sampled teacher KL": teacher_kl,
        "negative log-likelihood of correct answers": nll_of_correct_answers,
        "distilled advantages": distilled,
        "value": value,
        "kl in reward": kl_in_reward,
        "whitening": lambda batch: ([normalize_advantages(batch["advantages"], batch["response_mask"])], None),
        "normalisation in groups": in_groups,
    }


@pytest.mark.parametrize("garbage", GARBAGE)
def test_B2_what_masked_slots_hold_changes_no_bit(garbage, make_batch, functions):
    batch = make_batch()
    mask = batch["response_mask"]
    dirty = {
        name: column.masked_fill(~mask, garbage)
        if column.shape == mask.shape and column.is_floating_point()
        else column
        for name, column in batch.items()
    }
    for name, function in functions.items():
        (outputs, gradient), (expected, expected_gradient) = function(dirty), function(batch)
        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(output, wanted), name
            assert output.isfinite().all(), name
        if gradient is not None:
            assert torch.equal(gradient, expected_gradient), name
            assert (gradient[~mask] == 0).all(), name


def test_a_mask_of_ones_and_zeros_is_the_same_as_a_bool_one(make_batch, functions):
    batch = make_batch()
    for dtype in (torch.int64, torch.float32):
        same = {**batch, "response_mask": batch["response_mask"].to(dtype), "valid": batch["valid"].to(dtype)}
        for name, function in functions.items():
            for output, wanted in zip(function(same)[0], function(batch)[0], strict=True):
                assert torch.equal(output, wanted), name


def test_bfloat16_computes_in_float32_and_float64_stays(make_batch, functions):
    batch = make_batch()
    narrow = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    wide = {k: v.float() if v.is_floating_point() else v for k, v in narrow.items()}
    for name, function in functions.items():
        for output, wanted, double in zip(function(narrow)[0], function(wide)[0], function(batch)[0], strict=True):
            if output.dtype != torch.bool and not name.startswith(("correction", "rejection")):
                assert output.dtype == torch.float32, name
            assert torch.equal(output, wanted), name
            # a metric may be float32 only if it is a count
            assert double.dtype != torch.float32 or double == double.round(), name


def test_no_function_changes_its_arguments(make_batch, functions):
    batch, original = make_batch(), make_batch()
    for name, function in functions.items():
        function(batch)
        assert all(torch.equal(batch[column], original[column]) for column in batch), name


def test_every_output_of_every_loss_is_detached_but_the_losses(make_batch, call):
    batch = make_batch()
    for column in ("log_probs", "old_log_probs", "advantages"):
        batch[column].requires_grad_()
    for name in POLICY_LOSSES.names():
        losses, metrics = call(POLICY_LOSSES.get(name), batch)
        assert losses.shape == batch["response_mask"].shape
        assert all(metric.dim() == 0 and not metric.requires_grad for metric in metrics.values()), name
        gradients = torch.autograd.grad(losses.sum(), (batch["old_log_probs"], batch["advantages"]), allow_unused=True)
        assert gradients == (None, None), name


def test_B8_without_a_penalty_the_token_rewards_sum_to_the_score_on_the_last_trained_token():
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    scores = torch.tensor([[0.0, 0, 2, 7], [0, 0, 0, -1], [0, 0, 0, 7]])  # the two scores of 7 lie in masked slots
    log_probs = torch.randn(3, 4)
    rewards = apply_kl_in_reward(scores, log_probs, log_probs - 1, mask, kl_coef=0.0, kl_estimator="k1")
    assert torch.equal(rewards, torch.tensor([[0.0, 0, 2, 0], [0, 0, 0, -1], [0, 0, 0, 0]]))
    penalised = apply_kl_in_reward(scores, log_probs, log_probs - 1, mask, kl_coef=0.5, kl_estimator="k1")
    assert torch.allclose(penalised, torch.tensor([[-0.5, 0, 1.5, 0], [-0.5, -0.5, -0.5, -1.5], [0, 0, 0, 0]]))
