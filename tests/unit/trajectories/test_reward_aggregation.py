"""Tests of how gates, weights and `reward.aggregation` combine several reward functions into one score."""

import asyncio
import math

import pytest
import torch

from rltrain.base.errors import ConfigError, RewardError
from rltrain.data.prompts import Prompt
from rltrain.monitoring.step_metrics import sample_metrics
from rltrain.rewards.loading import check_aggregation
from rltrain.settings.compose import compose
from rltrain.trajectories.batch_building import to_batch
from rltrain.trajectories.prompt_groups import Group, GroupState, trajectory_of
from rltrain.trajectories.scoring import on_last_token, shaped_scores
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion

OWN = """
import asyncio

import torch

def largest(components, uid, valid, weights):
    return (components.nan_to_num(-1e9) * weights).amax(-1)

def some(components, **others):
    return torch.where(components[:, 0] > 1, torch.nan, components[:, 0])

def columns(components, uid, valid, weights):
    return components

def infinite(components, **others):
    return components[:, 0] / 0

def a_list(components, **others):
    return [1.0] * len(components)

def raises(components, **others):
    raise KeyError("level")

def exits(components, **others):
    raise SystemExit(0)

class Mute(Exception):
    def __str__(self):
        raise RuntimeError

def mute(components, **others):
    raise Mute

def nothing(components, **others):
    return torch.full((len(components),), torch.nan)

def large(components, **others):
    return torch.full((len(components),), 1e300, dtype=torch.float64)

def without_values(components, **_):
    return torch.zeros(len(components), device="meta")

def sparse(components, **_):
    return torch.zeros(len(components)).to_sparse()

def imaginary(components, **others):
    return torch.zeros(len(components), dtype=torch.complex64)

def changes_all(components, uid, valid, weights):
    for tensor in (components, uid, valid, weights):
        tensor.zero_()
    return torch.ones(len(uid)).requires_grad_()

def demanding(components, level):
    return components

async def asked_for(components):
    await asyncio.sleep(0)
    return components.nansum(-1)

def asynchronous(components, **others):
    return asyncio.run(asked_for(components))
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def config_of(*overrides, gate="false"):
    first = f"{{name: format, path: 'x:y', weight: 1.0, gate: {gate}}}"
    return compose([f"reward.functions=[{first}, {{name: right, path: 'x:z', weight: 2.0}}]", *overrides])[0]


def batch(config, *groups, failed=()):
    """Return a batch of groups whose rows have the scores of two reward functions.

    A score of None means that the function does not apply to the row.
    """
    made = []
    for uid, rows in enumerate(groups):
        keys = [(uid, n) for n in range(len(rows))]
        answers = [Completion(key, [5, 6], [-1.0] * 2, "stop", [0] * 2) for key in keys]
        trajectories = {n: trajectory_of([1], answer) for n, answer in enumerate(answers)}
        results = {n: SampleScores(key, row) for n, (key, row) in enumerate(zip(keys, rows, strict=True))}
        for number in range(len(rows)):
            if (uid, number) in failed:
                results[number] = SampleScores((uid, number), (None, None), failed=True, failed_function=1)
        made.append(
            Group(uid, Prompt(uid, "p", [1], {}), len(rows), len(rows), GroupState.READY, 0, trajectories, results)
        )
    return to_batch(made, config.reward.functions)


def shaped(config, *groups, failed=()):
    scores, _, valid = shaped_scores(batch(config, *groups, failed=failed), config)
    return [round(score, 4) for score in scores.tolist()], valid.tolist()


def test_a_gate_at_or_below_0_silences_the_others_and_one_that_does_not_apply_is_open():
    rows = [(1.0, 3.0), (0.0, 3.0), (-1.0, 3.0), (None, 3.0)]
    assert shaped(config_of(gate="true"), rows)[0] == [7.0, 0.0, -1.0, 6.0]
    assert shaped(config_of(), rows)[0] == [7.0, 6.0, 5.0, 6.0]
    made = batch(config_of(gate="true"), rows)
    # the components keep the values that the reward functions returned
    assert made.batch["reward_components"][:, 1].tolist() == [3.0] * 4
    assert on_last_token(made, made.batch["scores"]).tolist() == [0.0, 7.0, 0.0, 0.0, 0.0, -1.0, 0.0, 6.0]


def test_normalize_then_sum_takes_each_function_in_units_of_its_own_group():
    config = config_of("reward.aggregation=normalize_then_sum")
    scores, valid = shaped(config, [(0.0, 10.0), (1.0, 30.0)], [(5.0, 1.0), (5.0, 3.0)])
    # two values at a distance d are d/2 from their mean, and their standard deviation is d * sqrt(1/2)
    unit = round(1 / math.sqrt(2), 4)
    assert scores == pytest.approx([-3 * unit, 3 * unit, -2 * unit, 2 * unit], abs=1e-3)
    assert valid == [True] * 4


def test_C4_a_failed_row_is_in_no_statistic_of_any_aggregation(own):
    for aggregation in ("sum", "normalize_then_sum", f"{own}:largest"):
        config = config_of(f"reward.aggregation={aggregation}")
        rows = [(0.0, 10.0), (1.0, 30.0), (9.0, 99.0)]
        scores, valid = shaped(config, rows, failed=[(0, 2)])
        alone, _ = shaped(config, rows[:2])
        assert (scores, valid) == ([*alone, 0.0], [True, True, False])


def test_an_aggregation_of_ones_own_gets_components_and_says_the_scores(own):
    config = config_of(f"reward.aggregation={own}:largest")
    assert shaped(config, [(1.0, 3.0), (9.0, None), (None, -1.0)])[0] == [6.0, 9.0, -2.0]


async def test_in_the_event_loop_of_a_run_it_may_run_one_of_its_own(own):
    config = config_of(f"reward.aggregation={own}:asynchronous")
    assert shaped(config, [(1.0, 3.0), (9.0, None), (None, -1.0)])[0] == [4.0, 9.0, -1.0]
    await asyncio.sleep(0)


def test_an_edit_of_its_file_is_for_another_run(tmp_path):
    file, rows = tmp_path / "sums.py", [(1.0, 3.0)]
    file.write_text("def total(components, **_): return components.sum(-1)")
    config = config_of(f"reward.aggregation={file}:total")
    assert shaped(config, rows)[0] == [4.0]
    file.write_text("def total(components, **_): return -components.sum(-1)")
    assert shaped(config, rows)[0] == [4.0]


def test_a_row_for_which_it_says_nan_is_in_no_statistic(own):
    scores, valid = shaped(config_of(f"reward.aggregation={own}:some"), [(1.0, 3.0), (9.0, 1.0)])
    assert (scores, valid) == ([1.0, 0.0], [True, False])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("columns", "returned (2, 2): the function must return one finite number or NaN per row, in the shape (2,)"),
        ("infinite", "returned (2,): the function must return one finite number or NaN per row"),
        ("a_list", "returned list: the function must return one finite number or NaN per row"),
        ("raises", "raised KeyError: 'level'"),
        ("exits", "raised SystemExit: 0"),
        ("mute", "raised Mute: no text"),
        ("large", "returned (2,): the function must return one finite number or NaN per row"),
        ("without_values", "returned (2,): the function must return one finite number or NaN per row"),
        ("sparse", "returned (2,): the function must return one finite number or NaN per row"),
        ("imaginary", "returned (2,) of torch.complex64: the function must return one finite number or NaN per row"),
    ],
)
def test_an_aggregation_that_returns_something_else_stops_the_run_in_one_line(own, name, said):
    with pytest.raises(RewardError) as caught:
        shaped(config_of(f"reward.aggregation={own}:{name}"), [(1.0, 3.0), (9.0, 1.0)])
    assert str(caught.value).startswith(f"reward.aggregation={own}:{name} {said}")
    assert caught.value.repairable == f"reward.aggregation: {own}:{name}"


def test_an_aggregation_that_says_nan_for_every_row_of_several_groups_stops_the_run(own):
    config = config_of(f"reward.aggregation={own}:nothing")
    assert shaped(config, [(1.0, 3.0), (9.0, 1.0)])[1] == [False, False]  # a single group without any score is allowed
    with pytest.raises(RewardError, match=r"own\.py:nothing returned NaN for every row, so nothing is learnt"):
        shaped(config, [(1.0, 3.0), (9.0, 1.0)], [(1.0, 3.0), (9.0, 1.0)])


def test_an_aggregation_cannot_change_the_batch(own):
    config = config_of(f"reward.aggregation={own}:changes_all")
    made = batch(config, [(1.0, 3.0)], [(9.0, 1.0)])
    scores, _, valid = shaped_scores(made, config)
    assert (scores.tolist(), valid.tolist(), scores.requires_grad) == ([1.0, 1.0], [True, True], False)
    assert made.batch["reward_components"].tolist() == [[1.0, 3.0], [9.0, 1.0]]
    assert (made.batch["uid"].tolist(), made.batch["valid"].tolist()) == ([0, 1], [True, True])


@pytest.mark.parametrize("rows", [[(1e38, 1e38), (1.0, 1.0)], [(-3e38, -3e38)]])
def test_C4_a_weighted_sum_beyond_float32_is_an_error_and_never_not_applicable(rows):
    with pytest.raises(RewardError, match=r"is -?inf: outside float32's range \(3.4e38\)"):
        batch(config_of(), [(2 * row[0], 2 * row[1]) if row[0] == 1e38 else row for row in rows])


def test_an_aggregation_that_cannot_be_called_is_refused_at_the_start(own):
    with pytest.raises(ConfigError) as caught:
        check_aggregation(f"{own}:demanding")
    assert str(caught.value).startswith(
        f"reward.aggregation={own}:demanding: the function is called with components, uid, valid"
    )
    check_aggregation(f"{own}:largest")
    check_aggregation(f"{own}:some")


def test_each_function_has_its_mean_spread_and_share_of_failures():
    config = config_of()
    made = batch(config, [(1.0, None), (3.0, 2.0), (7.0, 7.0), (5.0, None)], failed=[(0, 2)])
    metrics = sample_metrics(made, ["format", "right"])
    assert metrics["reward/format/mean"] == 3.0
    assert metrics["reward/format/std"] == pytest.approx((8 / 3) ** 0.5)
    assert (metrics["reward/right/mean"], metrics["reward/right/std"]) == (2.0, 0.0)
    assert (metrics["reward/format/failed_fraction"], metrics["reward/right/failed_fraction"]) == (0.0, 0.25)
    assert torch.equal(made.batch["failed_function"], torch.tensor([-1, -1, 1, -1]))
