"""Two training steps of each preset of single answers, with the trainer in one process and a tiny model."""

import itertools
import math

import pytest
import torch

from rltrain.settings.algorithm_rules import check_algorithm
from rltrain.settings.compose import compose
from rltrain.settings.config_groups import choices
from tests.in_process_trainer import in_process_trainer
from tests.policy_weights import weights_of
from tests.presets import GAME, NEEDED, TEACHERS, preset

SMALL = [
    "placement=inprocess", "rollout=hf", "trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=1",
    "rollout.samples_per_prompt=4", "rollout.max_response_length=6", "trainer.total_steps=2", "critic.warmup_steps=0",
    "actor.lr=1e-3", "actor.lr_schedule=constant",
]  # fmt: skip
# The reference model sees the answer before the prompt, so it differs from the policy.
HINT = ["algorithm.distillation.teachers=[{path: reference, prompt_template: '{answer}{prompt}'}]"]
REWARD = """
def score(response):
    return float(sum(map(ord, response)) % 2)
"""


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "parity.py"
    file.write_text(REWARD)
    return f"reward.functions=[{{name: parity, path: '{file}:score', weight: 1.0, success: 1.0}}]"


@pytest.mark.parametrize("name", [name for name in choices("algorithm") if NEEDED.get(name) != GAME])
async def test_two_steps_of_a_preset_change_the_weights_and_have_finite_metrics(tasks, start, reward, name):
    needed = HINT if NEEDED.get(name) == TEACHERS else []
    config = compose([*preset(name), *SMALL, *needed, reward])[0]
    check_algorithm(config)
    made = await in_process_trainer(config, start, tasks)
    await made.sync_weights()
    seen = [{key: tensor.clone() for key, tensor in (await weights_of(made.actor)).items()}]
    for _ in range(2):
        metrics, _ = await made.train_step()
        assert {key: value for key, value in metrics.items() if not math.isfinite(value)} == {}
        assert metrics["actor/grad_norm"] > 0
        seen.append({key: tensor.clone() for key, tensor in (await weights_of(made.actor)).items()})
    for before, after in itertools.pairwise(seen):
        assert any(not torch.equal(before[key], tensor) for key, tensor in after.items())
        assert all(bool(tensor.isfinite().all()) for tensor in after.values())
