"""Tests that neither the split of a mini-batch into micro-batches nor masked rows affect its gradient.

The tests cover every combination of loss term and aggregation mode.
"""

import pytest
import torch

from rltrain.algorithms import (
    KL_ESTIMATORS,
    POLICY_LOSSES,
    aggregate_loss,
    full_kl,
    kl_estimate,
    positive_nll,
    sampled_teacher_kl,
    supervised_loss,
    value_loss,
)
from rltrain.algorithms.aggregation import LOSS_AGG_MODES
from rltrain.algorithms.ratio import safe_log_ratio

TERMS = (
    *(f"policy:{name}" for name in POLICY_LOSSES.names()),
    *(f"kl:{name}" for name in KL_ESTIMATORS.names()),
    *(f"weighted_kl:{name}" for name in KL_ESTIMATORS.names()),
    "entropy",
    "value",
    "supervised",
    "squared_log_ratio",
    "teacher_kl:sampled",
    "teacher_kl:full",
)
# The negative log-likelihood of correct answers is a mean over their tokens, whatever the aggregation mode is.
CASES = [*((term, mode) for term in TERMS for mode in LOSS_AGG_MODES), ("positive_nll", "token-mean")]
VOCABULARY = 5


@pytest.fixture
def batch(make_batch):
    """Return a batch with a column of logits, from which the tests compute the log-probs of the chosen tokens."""
    batch = make_batch(seed=1)
    generator = torch.Generator().manual_seed(2)
    batch["logits"] = torch.randn(*batch["response_mask"].shape, VOCABULARY, generator=generator, dtype=torch.float64)
    batch["responses"] = torch.randint(VOCABULARY, batch["response_mask"].shape, generator=generator)
    batch["teacher_logits"] = batch["logits"] + 0.5 * torch.cos(5 * batch["logits"])
    batch["old_log_probs"] = chosen(batch["logits"] + 0.3 * torch.sin(7 * batch["logits"]), batch["responses"])
    return batch


def chosen(logits, responses):
    return logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]


def token_terms(term, batch, call):
    """Return the token losses and the metrics of one loss term, computed from `batch["logits"]`.

    For the value loss, the predicted value of a token is the sum of its logits.
    """
    kind, _, name = term.partition(":")
    batch = {**batch, "log_probs": chosen(batch["logits"], batch["responses"])}
    if kind == "policy":
        return call(POLICY_LOSSES.get(name), batch)
    if kind == "kl":
        return kl_estimate(batch["log_probs"], batch["ref_log_probs"], name), {}
    if kind == "weighted_kl":
        ratio_from = batch["old_log_probs"]
        return kl_estimate(batch["log_probs"], batch["ref_log_probs"], name, old_log_probs=ratio_from), {}
    if kind == "entropy":
        log_softmax = batch["logits"].log_softmax(-1)
        return (log_softmax.exp() * log_softmax).sum(-1), {}
    if kind == "supervised":
        return supervised_loss(batch["log_probs"], batch["response_mask"]), {}
    if kind == "squared_log_ratio":
        return safe_log_ratio(batch["log_probs"], batch["rollout_log_probs"], batch["response_mask"]).square(), {}
    if term == "teacher_kl:sampled":
        columns = ("log_probs", "old_log_probs", "teacher_log_probs", "taught")
        return sampled_teacher_kl(*(batch[name] for name in columns)), {}
    if term == "teacher_kl:full":
        head = torch.eye(VOCABULARY, dtype=torch.float64)
        kl = full_kl(batch["logits"].flatten(0, 1), head, batch["teacher_logits"].flatten(0, 1), head)
        return torch.where(batch["taught"], kl.view(batch["taught"].shape), 0), {}
    return value_loss(batch["logits"].sum(-1), batch["old_values"], batch["returns"], batch["response_mask"])


def loss_and_metrics(term, mode, batch, call, num_positive_tokens=None, **counts):
    """Return the loss of one term and its metrics. Without counts, the loss is a mean over the rows of `batch`."""
    if term == "positive_nll":
        log_probs, masks = chosen(batch["logits"], batch["responses"]), (batch["response_mask"], batch["positive_mask"])
        return positive_nll(log_probs, *masks, num_positive_tokens=num_positive_tokens), {}
    losses, metrics = token_terms(term, batch, call)
    return aggregate_loss(losses, batch["response_mask"], mode, max_response_length=16, **counts), metrics


def gradient_and_metrics(term, mode, batch, parts, call, take_rows):
    """Return the gradient with respect to all logits, and the metrics, summed over micro-batches.

    Each tensor of `parts` holds the row indices of one micro-batch.
    """
    logits = batch["logits"].clone().requires_grad_()
    mask = batch["response_mask"]
    counts = {"num_tokens": mask.sum(), "num_sequences": mask.any(-1).sum()}
    counts["num_positive_tokens"] = (mask & batch["positive_mask"]).sum()
    totals = {}
    for rows in parts:
        micro = take_rows({**batch, "logits": logits}, rows)
        loss, metrics = loss_and_metrics(term, mode, micro, call, **counts)
        loss.backward()
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0) + value
    return logits.grad, totals


def assert_equal(actual, expected):
    assert expected.abs().max() > 1e-3  # the check guards against comparing only gradients near 0
    assert (actual - expected).abs().max() <= 1e-10 * expected.abs().max()


def partitions(rows):
    yield from (torch.arange(rows).split(size) for size in range(1, rows))
    yield torch.arange(rows).split([1, 4, 3])
    yield torch.randperm(rows, generator=torch.Generator().manual_seed(0)).split([2, 5, 1])
    yield (torch.arange(rows), torch.arange(0))  # the second rank has no rows


@pytest.mark.parametrize(("term", "mode"), CASES)
def test_A1_any_partition_gives_the_gradient_and_the_metrics_of_the_whole(term, mode, batch, call, take_rows):
    rows = batch["response_mask"].shape[0]
    whole, metrics = gradient_and_metrics(term, mode, batch, [torch.arange(rows)], call, take_rows)
    for parts in partitions(rows):
        gradient, sums = gradient_and_metrics(term, mode, batch, parts, call, take_rows)
        assert_equal(gradient, whole)
        for name, value in metrics.items():
            assert sums[name].item() == pytest.approx(value.item(), rel=1e-10), name


@pytest.mark.parametrize(("term", "mode"), CASES)
def test_A4_rows_taken_out_of_the_mask_leave_numerator_and_denominator(term, mode, batch, call, take_rows):
    keep = torch.tensor([0, 2, 4, 5, 7])
    masked = {**batch, "response_mask": batch["response_mask"].clone()}
    masked["response_mask"][[1, 6]] = False  # row 3 never has a trained token
    alone = take_rows(batch, keep)
    with_masked, _ = gradient_and_metrics(term, mode, masked, [torch.arange(8)], call, take_rows)
    without, _ = gradient_and_metrics(term, mode, alone, [torch.arange(5)], call, take_rows)
    assert_equal(with_masked[keep], without)
    assert (with_masked[[1, 3, 6]] == 0).all()


@pytest.mark.parametrize(("term", "mode"), CASES)
def test_A5_permuting_rows_changes_nothing_and_duplicating_them_no_mean(term, mode, batch, call, take_rows):
    def loss(of):
        return loss_and_metrics(term, mode, of, call)[0].item()

    rows = torch.arange(8)
    expected = loss(batch)
    assert loss(take_rows(batch, rows.flip(0))) == pytest.approx(expected, rel=1e-10)
    twice = loss(take_rows(batch, torch.cat([rows, rows])))
    assert twice == pytest.approx(expected * (2 if mode == "token-sum" else 1), rel=1e-10)


@pytest.mark.parametrize(("term", "mode"), CASES)
def test_A6_a_fully_masked_micro_batch_adds_exactly_zero(term, mode, batch, call, take_rows):
    whole, metrics = gradient_and_metrics(term, mode, batch, [torch.arange(8)], call, take_rows)
    empty, zeros = gradient_and_metrics(term, mode, batch, [torch.tensor([3])], call, take_rows)
    assert torch.equal(empty, torch.zeros_like(whole))
    assert all(zeros[name].item() == 0 for name in metrics)


@pytest.mark.parametrize("term", [*TERMS, "positive_nll"])
def test_D5_every_term_moves_the_gradient(term, batch, call, take_rows):
    whole, _ = gradient_and_metrics(term, "token-mean", batch, [torch.arange(8)], call, take_rows)
    assert whole.abs().max() > 1e-3
