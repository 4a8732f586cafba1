"""F4 across ranks: what any number of them saved, any other number loads and goes on from."""

import time

import pytest
import torch
from ranks import ENTROPY_COEF, LORA, config_of, group, replayed
from safetensors.torch import load_file

from rltrain.batch.row_assignment import minibatches
from tests.policy_weights import weights_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
SAVED_AFTER, STEPS = 2, 4


def learn(actor, steps, config):
    for step in steps:
        batch = replayed(step)
        noise = batch.values("advantages")
        batch = batch.with_values("responses", ref_log_probs=-noise.abs())
        batch = batch.union(actor.rows("compute_log_probs", batch, max_tokens=8192))
        plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
        actor.update(batch, plan, ENTROPY_COEF, max_tokens=8192)
    return weights_of(actor)


def save(actor, folder):
    actor.wait(actor.start("save_state", str(folder)))
    while None in (found := actor.wait(actor.start("saved_state"))):
        time.sleep(0.02)
    assert [one.error for one in found] == [""] * len(found)
    return [one.files for one in found]


@pytest.fixture(scope="module", params=[[], [LORA]], ids=["all weights", "adapters"])
def undisturbed(request, ray_here, start):
    config = config_of(*request.param)
    return request.param, learn(group(config, start, 0, roles=("actor",))["actor"], range(STEPS), config)


@pytest.mark.parametrize(
    ("before", "after", "overrides"), [(2, 0, []), (0, 2, []), (2, 4, ["placement.shard_ranks=2"]), (2, 2, [])]
)
def test_F4_another_number_of_ranks_goes_on_as_if_nothing_had_happened(
    undisturbed, start, tmp_path, before, after, overrides
):
    own, expected = undisturbed
    config = config_of(*own)
    first = group(config, start, before, roles=("actor",))["actor"]
    weights = learn(first, range(SAVED_AFTER), config)
    files = save(first, tmp_path)
    assert len(files) == max(before, 1)
    assert "model/model.safetensors" in files[0]
    exported = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    ranks = [f"placement.actor_ranks={after}"] if after else []
    other = group(config_of(*own, *ranks, *overrides), start, after, roles=("actor",))["actor"]
    other.wait(other.start("load_state", str(tmp_path)))
    found = learn(other, range(SAVED_AFTER, STEPS), config)
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-5, name


def test_a_save_goes_on_while_the_ranks_train(start, tmp_path):
    config = config_of()
    actor = group(config, start, 2, roles=("actor",))["actor"]
    before = learn(actor, range(1), config)
    actor.wait(actor.start("save_state", str(tmp_path)))
    learn(actor, range(1, 3), config)  # collectives of both at once
    while None in (found := actor.wait(actor.start("saved_state"))):
        time.sleep(0.02)
    assert [one.error for one in found] == ["", ""]
    exported = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in before.items())
