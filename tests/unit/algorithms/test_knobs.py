"""Tests that every hyperparameter ("knob") of every registered function has an effect."""

import pytest
import torch

from rltrain.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    combine_rewards,
    knobs_of,
    normalize_advantages,
    normalize_rewards,
    rollout_correction,
    rollout_rejection,
    value_loss,
)

CASES = [
    (registry, name, knob)
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES)
    for name in registry.names()
    for knob in knobs_of(registry.get(name))
]


def another(default):
    """Return a value with the type of `default` that differs from `default`."""
    if isinstance(default, tuple):
        return (1.0, 3.0)  # one weight for each of the two reward components
    return (not default) if isinstance(default, bool) else 0.8 * default


@pytest.mark.parametrize(("registry", "name", "knob"), CASES, ids=[f"{n}-{k}" for _, n, k in CASES])
def test_H1_every_knob_of_every_registered_function_changes_its_output(registry, name, knob, make_batch, call):
    function, batch = registry.get(name), make_batch(length=64, spread=1.0)
    # the log-probs of every second row are close to those of the old policy
    batch["log_probs"][::2] = batch["old_log_probs"][::2] + 1e-2 * batch["values"][::2]
    batch["log_probs"][0] = batch["old_log_probs"][0] - 0.5  # the mean of this row's ratios is below 1
    output = 1 if knob == "lam_critic" else 0  # the critic's lambda changes the returns, but not the advantages
    before = call(function, batch)[output]
    after = call(function, batch, **{knob: another(knobs_of(function)[knob])})[output]
    assert not torch.allclose(before, after, rtol=1e-9, atol=1e-12)


def differs(function, columns, base, **changed):
    def outputs(knobs):
        result = function(*columns, **knobs)
        return result[0] if isinstance(result, tuple) else result

    return not torch.equal(outputs(base), outputs({**base, **changed}))


@pytest.mark.parametrize("knob", [{"mean_level": "batch"}, {"std_level": None}, {"unbiased": False}, {"eps": 0.1}])
def test_H1_normalize_rewards(knob, make_batch):
    batch = make_batch()
    columns = batch["baseline_rewards"], batch["uid"], batch["valid"]
    assert differs(normalize_rewards, columns, {"mean_level": "group", "std_level": "group"}, **knob)


def test_H1_leave_one_out(make_batch):
    batch = make_batch()
    columns = batch["baseline_rewards"], batch["uid"], batch["valid"]
    assert differs(normalize_rewards, columns, {"mean_level": "group", "std_level": None}, leave_one_out=True)


@pytest.mark.parametrize(
    "knob", [{"weights": [1.0, 3.0]}, {"gates": [True, False]}, {"aggregation": "normalize_then_sum"}]
)
def test_H1_combine_rewards(knob, make_batch):
    batch = make_batch()
    columns = batch["reward_components"], batch["uid"], batch["valid"]
    assert differs(combine_rewards, columns, {"weights": [1.0, 2.0]}, **knob)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("knob", [{"lower": 0.9}, {"upper": 1.1}])
def test_H1_rollout_correction(level, mode, knob, make_batch):
    batch = make_batch(seed=1, spread=0.5, length=5)
    columns = batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"]
    assert differs(rollout_correction, columns, {"level": level, "mode": mode, "lower": 0.1, "upper": 10.0}, **knob)


@pytest.mark.parametrize(
    "knob", [{"upper": 0.02}, {"lower": -0.02}, {"level": "token"}, {"level": "max"}, {"kl_estimator": "k2"}]
)
def test_H1_rollout_rejection(knob, make_batch):
    batch = make_batch(seed=1, spread=0.5, length=5)
    columns = batch["log_probs"], batch["rollout_log_probs"], batch["response_mask"]
    base = {"kl_estimator": "k1", "level": "sequence", "upper": 0.3}
    assert differs(rollout_rejection, columns, base, **knob)
    assert differs(rollout_rejection, columns, base, advantages=batch["advantages"])


def test_H1_value_loss_and_whitening(make_batch):
    batch = make_batch()
    columns = batch["values"], batch["old_values"], batch["returns"], batch["response_mask"]
    assert differs(value_loss, columns, {}, clip_range_value=0.3)
    assert differs(normalize_advantages, (batch["advantages"], batch["response_mask"]), {}, eps=0.1)


@pytest.mark.parametrize(
    "knob", [{"mean_level": "group"}, {"std_level": None}, {"unbiased": False}, {"counted": torch.arange(8) % 2}]
)
def test_H1_normalize_advantages(knob, make_batch):
    batch = make_batch()
    columns = batch["advantages"], batch["response_mask"], batch["uid"]
    assert differs(normalize_advantages, columns, {}, **knob)
    alone = {"mean_level": "batch", "std_level": None}
    assert differs(normalize_advantages, columns, alone, leave_one_out=True)
