"""The whole trainer in one process, with the transformers engine, a tiny model and real rewards."""

import pytest
import torch

from rltrain.collector import Collector
from rltrain.compose import compose
from rltrain.data import load_prompts
from rltrain.scoring import zero_spread
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from rltrain.trainer import Trainer
from workers.placement import start as start_workers
from workers.weight_sync import tensors_of

BASE = [
    "placement=inprocess", "rollout=hf", "trainer.prompts_per_step=4", "rollout.samples_per_prompt=4",
    "trainer.prompts_per_minibatch=4", "rollout.max_response_length=12", "actor.lr=3e-4", "actor.lr_schedule=constant",
]  # fmt: skip


REWARD = """
def score(prompt, response):
    return 0.0 if int(prompt[0]) % 2 else float(sum(map(ord, response)) % 3)
"""


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """Prompts that open with an odd digit give every answer the same score."""
    file = tmp_path_factory.mktemp("rewards") / "parity.py"
    file.write_text(REWARD)
    return f"reward.functions=[{{name: parity, path: '{file}:score', weight: 1.0}}]"


def trainer(model, *overrides) -> Trainer:
    config = compose([*BASE, *overrides])[0]
    critic = config.algorithm.advantage_estimator == "gae"
    workers = start_workers(config, model, [EOS_ID], needs_critic=critic)
    prompts = load_prompts(
        config.data.train, char_tokenizer(), split="train", seed=0, max_prompt_length=16, overlong="refuse", limit=64
    )
    made = Trainer(
        config, collector=Collector(config, rollout=workers.rollout, rewards=workers.rewards, prompts=prompts),
        actor=workers.actor, reference=workers.reference, critic=workers.critic, tracker=None, exporter=None,
        val_prompts=[],
    )  # fmt: skip
    made.sync_weights()
    return made


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    buckets = made.actor.wait(made.actor.start("export", made.step, False))[0]
    return {name: tensor.clone() for bucket in buckets for name, tensor in tensors_of(bucket)}


def run(made: Trainer, steps: int):
    """Metrics and batches of the steps, and the weights after them."""
    history = [made.train_step() for _ in range(steps)]
    return [metrics for metrics, _ in history], [batch for _, batch in history], weights(made)


# One optimizer step on all

VARIANTS = {
    "grpo": [],
    "kl and entropy": ["algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.entropy_coef=0.01"],
    "weighted kl": ["algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.kl_loss.ratio_weighted=true"],
    "gspo": ["algorithm=gspo"],
    "ppo": ["algorithm=ppo"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_D1_one_step_on_policy_learns_the_same_with_and_without_the_actors_pass(start, reward, name, monkeypatch):
    asked = []
    rows = Trainer.rows

    def counted(self, group, method, batch):
        asked.append(group is self.actor)
        return rows(self, group, method, batch)

    monkeypatch.setattr(Trainer, "rows", counted)
    found = []
    for forced in (False, True):
        made = trainer(start, reward, *VARIANTS[name])
        before = weights(made)
        assert made.needs_actor_pass is False
        made.needs_actor_pass = forced
        asked.clear()
        metrics, batches, after = run(made, 3)
        assert sum(asked) == (3 if forced else 1)
        found.append((metrics, batches, after))
        assert any(not torch.equal(before[key], tensor) for key, tensor in after.items())
    for metrics, batch, forced_metrics, forced_batch in zip(*found[0][:2], *found[1][:2], strict=True):
        assert torch.equal(batch.values("responses"), forced_batch.values("responses"))
        assert metrics["actor/ratio_mean"] == pytest.approx(forced_metrics["actor/ratio_mean"], abs=1e-6)
        assert metrics["actor/grad_norm"] == pytest.approx(forced_metrics["actor/grad_norm"], rel=1e-5)
    for later in found[0][0][1:]:
        assert (later["actor/ratio_mean"], later["actor/ppo_kl"], later["actor/clip_fraction"]) == (1.0, 0.0, 0.0)
    for key, tensor in found[0][2].items():
        assert (tensor - found[1][2][key]).abs().max() <= 1e-6, key


# Dynamic sampling


@pytest.mark.parametrize(("batches", "groups"), [(1, range(1, 4)), (4, [4])])
def test_no_group_without_spread_reaches_an_update(start, reward, batches, groups):
    made = trainer(start, reward, f"algorithm.dynamic_sampling={batches}", "trainer.prompts_per_minibatch=2")
    dropped = 0
    for _ in range(3):
        metrics, batch = made.train_step()
        uid, valid = batch.batch["uid"], batch.batch["valid"]
        assert not bool(zero_spread(uid, batch.batch["scores"], valid).any())
        assert len(uid.unique()) in groups
        assert metrics["reward/zero_spread_fraction"] == 0.0
        assert metrics["rollout/groups_missing"] == 4 - len(uid.unique())
        assert not any(text[0] in "13579" for text in batch.non_tensor_batch["prompt_text"])
        assert bool((batch.padded("advantages").abs().amax(-1) > 0).any())
        dropped += metrics["rollout/groups_dropped"]
    assert dropped > 0


def test_switched_off_groups_without_spread_are_among_the_batch(start, reward):
    _, batches, _ = run(trainer(start, reward), 3)
    assert any(bool(zero_spread(b.batch["uid"], b.batch["scores"], b.batch["valid"]).any()) for b in batches)


def test_a_step_whose_groups_all_score_the_same_moves_no_weight(start, tmp_path):
    (tmp_path / "constant.py").write_text("def score(response):\n    return 1.0\n")
    constant = f"reward.functions=[{{name: c, path: '{tmp_path}/constant.py:score', weight: 1.0}}]"
    made = trainer(start, constant, "algorithm.dynamic_sampling=2", "algorithm.entropy_coef=0.1")
    before = weights(made)
    (metrics,), (batch,), after = run(made, 1)
    assert len(batch) == 4
    assert not bool(batch.values("response_mask").any())
    assert metrics["rollout/groups_dropped"] == 7
    assert metrics["actor/grad_norm"] == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


# Every feature at once, and greedy baselines


def test_a_greedy_baseline_is_scored_for_each_prompt(start, reward):
    _, batches, _ = run(trainer(start, reward, "algorithm.advantage_estimator=remax"), 2)
    for batch in batches:
        assert len(batch) == 16
        baselines = batch.batch["baseline_rewards"].view(4, 4)
        assert bool((baselines == baselines[:, :1]).all())
        expected = batch.batch["scores"] - batch.batch["baseline_rewards"]
        assert torch.allclose(batch.padded("advantages")[:, 0], expected)


def test_features_go_together(start, reward):
    settings = [
        "loss_mode=top_entropy", "suppress_truncated=true", "mask_truncated=true", "dynamic_sampling=3",
        "entropy_target=0.1", "reward_normalization.std_level=batch", "advantage_normalization.std_level=group",
        "reward_shaping.overlong_buffer=2", "kl_loss.kl_loss_coef=0.1", "kl_loss.kl_estimator=full",
        "kl_in_reward.kl_coef=0.1", "kl_in_reward.kl_estimator=full", "correction.level=geometric",
        "rejection.kl_estimator=k3", "rejection.upper=1.0",
    ]  # fmt: skip
    updates = ["trainer.prompts_per_minibatch=2", "trainer.epochs_per_step=2"]
    made = trainer(start, reward, *(f"algorithm.{text}" for text in settings), *updates)
    metrics, batches, _ = run(made, 2)
    assert all(value == value and abs(value) < float("inf") for step in metrics for value in step.values())
    assert {"correction_weights", "full_kl", "ref_hidden", "entropies"} <= set(batches[0].keys())
    assert "ref_log_probs" not in batches[0]
    assert metrics[0]["actor/selected_fraction"] > 0
    assert metrics[0]["reward/kl"] == pytest.approx(0, abs=1e-6)  # D7: nothing is learnt yet
    assert metrics[1]["reward/kl"] > 0
    cut = torch.tensor([reason == "length" for reason in batches[0].non_tensor_batch["finish_reason"]])
    assert not bool(batches[0].padded("response_mask")[cut].any())
