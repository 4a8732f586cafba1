"""Tests of the language-model loss of correct answers in the actor's update, VAPO, arXiv 2504.05118 section 4.3."""

import pytest
import torch

from rltrain.algorithms.aggregation import LOSS_AGG_MODES
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from tests.unit.workers.training.test_actor import ALL, Run, apart
from workers.training.actor import actor_loss
from workers.training.dispatch import split_minibatches
from workers.training.shared_columns import update_columns

CORRECT = torch.tensor([True, False, True, True, False, True])
MASK = torch.tensor(  # row 3 is a correct answer without trained tokens
    [[1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool
)


def algorithm_of(*overrides):
    return compose([f"algorithm.{text}" for text in overrides])[0].algorithm


def batch_of(seed=0):
    """Return the columns of six answers in float64, with advantages of 0, so that the loss is the NLL term alone."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(MASK.shape, generator=generator, dtype=torch.float64) - 0.1
    return {
        "response_mask": MASK, "positive_mask": MASK & CORRECT[:, None], "log_probs": log_probs,
        "old_log_probs": log_probs, "rollout_log_probs": log_probs, "advantages": torch.zeros_like(log_probs),
    }  # fmt: skip


def oracle(log_probs, mask, correct):
    """Compute, token by token, the mean of -log pi over all trained tokens of correct answers."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(mask)):
        for t in range(mask.shape[1]):
            if correct[row] and mask[row, t]:
                total, count = total - log_probs[row, t], count + 1
    return total / max(count, 1)


def gradient_of(batch, algorithm, parts, count):
    """Return the gradient by all log-probs, the NLL and the metric sums, each summed over the micro-batches `parts`."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    counts = {"num_tokens": int(MASK.sum()), "num_sequences": int(MASK.any(-1).sum()), "max_response_length": 16}
    nll = fraction = 0.0
    for rows in parts:
        columns = {name: column[rows] for name, column in {**batch, "log_probs": log_probs}.items()}
        loss, terms, sums = actor_loss(columns, algorithm, entropy_coef=0.0, num_positive_tokens=count, **counts)
        loss.backward()
        nll, fraction = nll + terms["positive_nll"].item(), fraction + sums["positive_fraction"].item()
    return log_probs.grad, nll, fraction


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_term_has_value_and_gradient_of_a_loop_over_tokens_whatever_the_aggregation(mode):
    batch, algorithm = batch_of(), algorithm_of("positive_nll_coef=0.3", f"loss_agg_mode={mode}")
    log_probs = batch["log_probs"].clone().requires_grad_()
    expected = oracle(log_probs, MASK, CORRECT)
    (wanted,) = torch.autograd.grad(expected, log_probs)
    for count in (6, None):  # rows 0, 2 and 5 have 3, 1 and 2 trained tokens
        gradient, nll, fraction = gradient_of(batch, algorithm, [torch.arange(6)], count)
        assert torch.allclose(gradient, 0.3 * wanted, rtol=1e-12)
        assert nll == pytest.approx(expected.item(), rel=1e-12)
        assert fraction == 6


def test_A1_any_split_into_micro_batches_gives_the_gradient_of_the_whole():
    batch, algorithm = batch_of(), algorithm_of("positive_nll_coef=0.3")
    batch["advantages"] = torch.linspace(-1, 1, MASK.numel(), dtype=torch.float64).view(MASK.shape)
    whole, *sums = gradient_of(batch, algorithm, [torch.arange(6)], 6)
    assert whole.abs().max() > 1e-2
    for parts in (
        torch.arange(6).split(1),
        torch.arange(6).split(2),
        torch.tensor([5, 0, 4, 2, 1, 3]).split([2, 3, 1]),
    ):
        gradient, *others = gradient_of(batch, algorithm, parts, 6)
        assert (gradient - whole).abs().max() <= 1e-10 * whole.abs().max()
        assert others == pytest.approx(sums, rel=1e-10)


def test_A5_duplicated_rows_change_nothing_and_B2_masked_slots_may_hold_anything():
    batch, algorithm = batch_of(), algorithm_of("positive_nll_coef=0.3")
    whole, nll, _ = gradient_of(batch, algorithm, [torch.arange(6)], 6)
    twice, same, _ = gradient_of(batch, algorithm, [torch.tensor([*range(6), *range(6)])], 12)
    assert torch.allclose(twice, whole, rtol=1e-12)
    assert same == pytest.approx(nll, rel=1e-12)
    for garbage in (1e4, float("inf"), float("nan")):
        spoilt = {name: column.masked_fill(~MASK, garbage) if column.is_floating_point() else column
                  for name, column in batch.items()}  # fmt: skip
        spoilt["positive_mask"] = CORRECT[:, None].expand(MASK.shape)
        gradient, value, _ = gradient_of(spoilt, algorithm, [torch.arange(6)], 6)
        assert torch.equal(gradient, whole)
        assert value == nll


def test_A6_without_correct_answers_the_term_is_exactly_zero():
    batch, algorithm = batch_of(), algorithm_of("positive_nll_coef=0.3")
    for rows, count in (([1, 4], 0), ([3], 6)):
        gradient, nll, fraction = gradient_of(batch, algorithm, [torch.tensor(rows)], count)
        assert torch.equal(gradient, torch.zeros_like(gradient))
        assert (nll, fraction) == (0, 0)


def test_A4_a_token_that_the_correction_drops_keeps_the_term():
    overrides = ["correction.level=token", "correction.mode=mask", "correction.upper=2.0"]
    batch, algorithm = batch_of(), algorithm_of("positive_nll_coef=0.3", *overrides)
    kept, _, _ = gradient_of(batch, algorithm, [torch.arange(6)], 6)
    batch["rollout_log_probs"] = batch["old_log_probs"] - 5
    dropped, _, _ = gradient_of(batch, algorithm, [torch.arange(6)], 6)
    assert torch.equal(kept, dropped)


# Tests of the counts of a mini-batch


def rows_of(correct, masks):
    made = DataProto.from_dict({"responses": jagged([[1] * len(mask) for mask in masks], torch.int64)})
    flat = torch.tensor([bit for mask in masks for bit in mask], dtype=torch.bool)
    row = torch.tensor(correct).repeat_interleave(torch.tensor([len(mask) for mask in masks]))
    return made.with_values("responses", response_mask=flat, positive_mask=row)


def test_every_rank_gets_the_number_of_correct_tokens_of_the_whole_mini_batch():
    batch = rows_of([True, False, True, True], [[1, 0, 1], [1, 1], [0, 0], [1]])
    plans = split_minibatches(batch, [3, 2, 2, 1], [[0, 1, 2], [1], [3, 0]], 2, 10)
    for plan in plans:
        assert [part.num_positive_tokens for part in plan] == [2, 0, 3]
    without = batch.pop(["positive_mask"])[1]
    assert {part.num_positive_tokens for part in split_minibatches(without, [3, 2, 2, 1], [[0, 3]], 1, 10)[0]} == {0}


# Tests of the actor's update


def marked(batch, rows):
    """Return the batch with the answers of the given rows marked as correct, and advantages of 0."""
    lengths = batch.lengths("responses")
    correct = torch.isin(torch.arange(12), torch.tensor(rows)).repeat_interleave(lengths)
    zeros = torch.zeros_like(batch.values("advantages"))
    return batch.with_values("responses", positive_mask=correct, advantages=zeros)


@pytest.mark.usefixtures("process_group")
async def test_D4_D5_updates_make_correct_answers_likelier_and_the_coefficient_scales_the_gradient(
    start, sampled_batch
):
    batch, norms = marked(sampled_batch, [0, 4, 7]), {}
    for coefficient in (0.1, 0.3):
        run = Run(start, f"algorithm.positive_nll_coef={coefficient}")
        found = [await run.update(batch) for _ in range(4)]
        norms[coefficient] = found[0]["grad_norm"]
        nll = [metrics["positive_nll"] for metrics in found]
        assert nll == sorted(nll, reverse=True)
        assert nll[0] > nll[-1]
        tokens = batch.values("positive_mask").sum() / batch.values("response_mask").sum()
        assert found[0]["positive_fraction"] == pytest.approx(float(tokens))
    assert norms[0.3] == pytest.approx(3 * norms[0.1], rel=1e-4)


@pytest.mark.usefixtures("process_group")
async def test_without_the_coefficient_correct_answers_change_nothing(start, sampled_batch):
    batch = marked(sampled_batch, [0, 4, 7]).with_values("responses", advantages=sampled_batch.values("advantages"))
    runs = [Run(start), Run(start)]
    metrics = [await run.update(one) for run, one in zip(runs, (batch, sampled_batch), strict=True)]
    assert not [name for name in metrics[0] if "positive" in name]
    assert apart(await runs[0].weights(), await runs[1].weights()) == 0
    assert "positive_mask" not in update_columns(runs[0].config.algorithm)


@pytest.mark.usefixtures("process_group")
async def test_A7_the_term_of_a_mini_batch_is_divided_by_its_own_correct_tokens(start, sampled_batch):
    """Only the first mini-batch has correct answers (0 and 4), so the second mini-batch does not change the update."""
    batch = marked(sampled_batch, [0, 4])
    run = Run(start, "algorithm.positive_nll_coef=0.1")
    halves = await run.update(batch, plan=[list(range(6)), list(range(6, 12))])
    alone = await Run(start, "algorithm.positive_nll_coef=0.1").update(batch, plan=[list(range(6))])
    assert 2 * halves["positive_nll"] == pytest.approx(alone["positive_nll"], rel=1e-6)
    assert halves["grad_norm_max"] == pytest.approx(alone["grad_norm"], rel=1e-6)
    whole = await Run(start, "algorithm.positive_nll_coef=0.1").update(batch, plan=ALL)
    assert whole["positive_nll"] == pytest.approx(alone["positive_nll"], rel=1e-6)
