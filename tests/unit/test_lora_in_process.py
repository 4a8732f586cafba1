"""Test of a whole run with LoRA adapters in one process.

The reward rises, the engine's log-probs follow the actor's log-probs, and a model is saved.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rltrain.base.storage import Folder
from rltrain.run.checkpoints import Checkpoints
from rltrain.settings.compose import compose
from rltrain.trainer import Trainer
from tests.in_process_trainer import in_process_trainer
from tests.policy_weights import weights_of

STEPS = 12
BASE = [
    "placement=inprocess", "rollout=hf", "trainer.prompts_per_step=8", "rollout.samples_per_prompt=8",
    "trainer.prompts_per_minibatch=8", "rollout.max_response_length=8", "actor.lr=3e-3", "actor.lr_schedule=constant",
    f"trainer.total_steps={STEPS}",
]  # fmt: skip
REWARD = """
def score(response):
    return sum(letter in "13579" for letter in response) / 8
"""


async def trainer(model, tmp_path, tasks, *overrides) -> Trainer:
    (tmp_path / "odd.py").write_text(REWARD)
    config = compose([*BASE, f"reward.functions=[{tmp_path / 'odd.py'}:score]", *overrides])[0]
    checkpoints = Checkpoints(Folder(str(tmp_path / "checkpoints")), "", keep=0, best=None)
    made = await in_process_trainer(config, model, tasks, checkpoints=checkpoints)
    await made.sync_weights()
    return made


@pytest.mark.parametrize("override", ["model.activation_checkpointing=false", "algorithm.kl_loss.kl_loss_coef=0.01"])
async def test_reward_rises_with_adapters_alone_and_engine_and_actor_agree_in_each_step(
    start, tmp_path, tasks, override
):
    made = await trainer(start, tmp_path, tasks, "model.lora={rank:4}", override)
    history = []
    for _ in range(STEPS):
        metrics, _ = await made.train_step()
        history.append(metrics)
    rewards = [metrics["reward/mean"] for metrics in history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    assert max(metrics["actor/engine_gap"] for metrics in history) < 1e-5
    if "kl_loss" in override:  # the reference model is the base model without adapters
        assert history[0]["actor/ref_kl"] < 1e-6 < history[-1]["actor/ref_kl"]
    await made.checkpoints.start(STEPS, 0, made.trained(), made.state_dict(), history={}, metrics={})
    await made.checkpoints.finish()
    folder = tmp_path / "checkpoints" / f"step_{STEPS}" / "model"
    assert sorted(file.name for file in folder.iterdir() if file.is_dir()) == ["adapter"]
    saved = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    base = dict(AutoModelForCausalLM.from_pretrained(Path(start)).named_parameters())
    weights = await weights_of(made.actor)
    assert all(torch.equal(saved[name], weights[name]) for name in base)
    moved = {name.rpartition(".")[0].rpartition(".")[2] for name in base if not torch.equal(saved[name], base[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
