"""Tests that an update normalises importance weights with statistics of each whole mini-batch."""

import math

import pytest
import torch

from rltrain.algorithms import CorrectionStatistics
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from tests.unit.workers.training.test_actor import ALL, Run, moved
from workers.training.minibatch_statistics import weight_statistics

pytestmark = pytest.mark.usefixtures("process_group")
TOKEN = ["algorithm.correction.level=token"]
ROW = ["algorithm.correction.level=sequence"]
DIVIDED = "algorithm.correction.batch_normalize=true"
KEPT = ["algorithm.correction.mode=mask", "algorithm.correction.upper=2", "algorithm.correction.normalize=kept"]


def settings_of(*overrides):
    return compose(list(overrides))[0].algorithm.correction


def batch_of():
    """Return rows of 2, 1 and 3 tokens with the weights 2, 4 | 1 | 0.5, 3, 9, where the last token is not trained."""
    weights = torch.tensor([2.0, 4.0, 1.0, 0.5, 3.0, 9.0], dtype=torch.float64)
    batch = DataProto.from_dict({"responses": jagged([[1, 1], [1], [1, 1, 1]], torch.int64)})
    old = torch.full((6,), -3.0, dtype=torch.float64)
    return batch.with_values(
        "responses", response_mask=torch.tensor([True] * 5 + [False]), old_log_probs=old,
        rollout_log_probs=old - weights.log(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "rows", "expected"),
    [
        ([*TOKEN, DIVIDED], [0, 1, 2], (10.5 / 5, 5, 3)),
        ([*TOKEN, DIVIDED], [2, 0], (9.5 / 4, 4, 2)),
        ([*TOKEN, DIVIDED, "algorithm.correction.upper=2"], [0, 1, 2], (7.5 / 5, 5, 3)),
        ([*ROW, DIVIDED], [0, 1, 2], (10.5 / 3, 5, 3)),  # the rows have the weights 8, 1 and 1.5
        ([*TOKEN, *KEPT], [0, 1, 2], (3.5 / 5, 3, 3)),  # the weights 4 and 3 are dropped
        ([*ROW, *KEPT], [0, 1, 2], (2.5 / 3, 3, 2)),  # row 0 is dropped
        ([*ROW, *KEPT], [0], (1.0, 0, 0)),
        ([*ROW, *KEPT], [], (1.0, 0, 0)),
    ],
)
def test_statistics_are_those_of_the_rows_of_the_mini_batch(overrides, rows, expected):
    found = weight_statistics(batch_of(), rows, settings_of(*overrides))
    assert found.weight_mean == pytest.approx(expected[0], rel=1e-12)
    assert (found.num_tokens, found.num_sequences) == expected[1:]
    assert isinstance(found, CorrectionStatistics)


def test_without_an_option_that_needs_statistics_none_are_computed():
    assert weight_statistics(batch_of().select(["responses"]), [0, 1, 2], settings_of(*TOKEN)) is None
    assert weight_statistics(batch_of().select(["responses"]), [0, 1, 2], settings_of()) is None


async def test_the_loss_of_an_update_is_divided_by_the_mean_weight_of_each_mini_batch(start, sampled_batch):
    """At a learning rate near 0, both mini-batches see the same policy, so the plain run gives each expected loss."""
    slow, found = [*TOKEN, "actor.lr=1e-30"], {}
    plans = {"first": [list(range(6))], "second": [list(range(6, 12))], "both": [list(range(6)), list(range(6, 12))]}
    for name, options in (("plain", []), ("divided", [DIVIDED])):
        for plan, rows in plans.items():
            run = Run(start, *slow, *options)
            found[name, plan] = await run.update(moved(await run.prepared(sampled_batch), 0.7), plan=rows)
    for plan in ("first", "second"):
        mean = found["plain", plan]["correction_weight_mean"]
        assert abs(mean - 1) > 0.05
        for metric in ("policy_loss", "grad_norm"):
            assert found["divided", plan][metric] == pytest.approx(found["plain", plan][metric] / mean, rel=1e-4)
    both = (found["divided", "first"]["policy_loss"] + found["divided", "second"]["policy_loss"]) / 2
    assert found["divided", "both"]["policy_loss"] == pytest.approx(both, rel=1e-4)


async def test_the_loss_of_an_update_is_divided_by_the_number_of_kept_tokens(start, sampled_batch):
    bounds = ["algorithm.correction.mode=mask", "algorithm.correction.upper=1.5"]
    found = {}
    for name, options in (("all", []), ("kept", ["algorithm.correction.normalize=kept"])):
        run = Run(start, *TOKEN, *bounds, *options)
        found[name] = await run.update(moved(await run.prepared(sampled_batch), 0.7), plan=ALL)
    kept = 1 - found["all"]["correction_dropped_fraction"]
    assert 0.3 < kept < 0.7
    for metric in ("policy_loss", "grad_norm"):
        assert found["kept"][metric] == pytest.approx(found["all"][metric] / kept, rel=1e-4)
    assert math.isfinite(found["kept"]["policy_loss"])
