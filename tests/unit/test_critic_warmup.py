"""Tests of the critic's warm-up, in which training steps change only the critic, with the trainer in one process."""

import itertools
import json

import pytest
import torch

from rltrain.base.storage import Folder
from rltrain.monitoring.tracking import Tracker
from rltrain.run.checkpoints import Checkpoints
from rltrain.settings.compose import compose
from tests.chat_model import GAME, save_chat_model
from tests.in_process_trainer import in_process_trainer
from tests.policy_weights import weights_of
from tests.unit.test_resume_in_process import Silent
from tests.unit.test_trainer_in_process import BASE, REWARD

PPO = ["algorithm=ppo", "trainer.prompts_per_minibatch=2"]


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "parity.py").write_text(REWARD)
    return f"reward.functions=[{{name: parity, path: '{tmp_path}/parity.py:score', weight: 1.0, success: 1.0}}]"


async def trainer(tasks, model, *overrides, **parts):
    made = await in_process_trainer(compose([*BASE, *overrides])[0], model, tasks, **parts)
    await made.sync_weights()
    return made


async def tensors(made):
    """Return copies of the weights of actor and critic."""
    (critic,) = (rank.process.host.roles["critic"] for rank in made.critic.ranks)
    found = {f"actor.{name}": tensor.clone() for name, tensor in (await weights_of(made.actor)).items()}
    return found | {f"critic.{name}": tensor.detach().clone() for name, tensor in critic.model.state_dict().items()}


def changed(before, after, role):
    """Return whether each tensor of a role has changed."""
    return [not torch.equal(tensor, after[name]) for name, tensor in before.items() if name.startswith(f"{role}.")]


def optimizers(made):
    return [group.ranks[0].process.host.roles[role].optimizer for role, group in made.trained().items()]


async def test_a_warm_up_changes_only_the_critic_and_then_both_learn(tasks, start, reward):
    made = await trainer(tasks, start, reward, *PPO, "critic.warmup_steps=2", "trainer.total_steps=4")
    states = [await tensors(made)]
    history = []
    for _ in range(4):
        history.append(await made.train_step())
        states.append(await tensors(made))
    moved = [
        (any(changed(before, after, "actor")), any(changed(before, after, "critic")))
        for before, after in itertools.pairwise(states)
    ]
    assert moved == [(False, True), (False, True), (True, True), (True, True)]
    updates = {"actor/policy_loss", "actor/grad_norm", "actor/lr", "timing/update_actor"}
    assert [updates & metrics.keys() for metrics, _ in history] == [set(), set(), updates, updates]
    assert all("critic/value_loss" in metrics for metrics, _ in history)


async def test_a_step_of_the_warm_up_raises_the_version_of_the_weights_and_its_answers_are_not_stale(
    tasks, start, reward
):
    made = await trainer(tasks, start, reward, *PPO, "critic.warmup_steps=2", "trainer.total_steps=4")
    for step in range(4):
        metrics, batch = await made.train_step()
        assert set(batch.values("policy_version").tolist()) == {step}
        assert metrics["rollout/staleness_max"] == 0
        assert made.step == step + 1


async def test_with_stale_answers_a_warm_up_keeps_the_bound_and_uses_every_group_once(tasks, start, reward):
    settings = ["critic.warmup_steps=2", "trainer.max_staleness=1", "trainer.total_steps=4"]
    made = await trainer(tasks, start, reward, *PPO, *settings)
    history = [await made.train_step() for _ in range(4)]
    assert [uid for _, batch in history for uid in batch.batch["uid"].unique().tolist()] == list(range(16))
    assert max(metrics["rollout/staleness_max"] for metrics, _ in history) <= 1


@pytest.mark.parametrize("estimator", ["gae", "decoupled_gae", "length_adaptive_gae"])
async def test_in_the_warm_up_the_critic_learns_monte_carlo_returns_and_then_those_of_the_estimator(
    tasks, start, reward, estimator
):
    lam = "lam" if estimator == "gae" else "lam_critic"
    settings = [f"algorithm.advantage_estimator={estimator}", f"algorithm.advantage={{gamma: 0.9, {lam}: 0.0}}"]
    made = await trainer(tasks, start, reward, *settings, "critic.warmup_steps=2", "critic.lr=1e-2")
    for step in range(3):
        _, batch = await made.train_step()
        for row, score in enumerate(batch.batch["scores"].tolist()):
            values, returns = batch[[row]].values("values"), batch[[row]].values("returns")
            length = len(returns)
            expected = torch.tensor([score * 0.9 ** (length - 1 - t) for t in range(length)])
            if step == 2:  # with a lambda of 0, the return of a token is gamma times the next token's value
                expected = torch.cat([0.9 * values[1:], torch.tensor([score])])
            assert torch.allclose(returns, expected, rtol=1e-5, atol=1e-5), (step, row)
    assert batch.values("values").abs().max() > 1e-2


async def test_in_the_warm_up_with_turns_as_actions_the_critic_learns_the_discounted_rewards_of_turns(tasks, tmp_path):
    """The discount is per turn, and all tokens of a turn have the turn's return, as after the warm-up."""
    (tmp_path / "game.py").write_text(GAME)
    chat = str(save_chat_model(tmp_path / "chat"))
    rows = "".join(json.dumps({"prompt": f"guess {n}", "answer": str(n)}) + "\n" for n in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    made = await trainer(
        tasks, chat, "algorithm=turn_ppo", "algorithm.advantage={gamma: 0.5, lam: 0.0}", "critic.warmup_steps=2",
        "critic.lr=1e-2", f"model.path={chat}", f"rollout.environment={tmp_path}/game.py:Game", "data.val=null",
        f"data.train={tmp_path}/rows.jsonl", "reward.functions=[environment_reward]", "rollout.max_prompt_length=100",
        "rollout.max_response_length=150", "rollout.max_turn_length=12",
    )  # fmt: skip
    batches = [(await made.train_step())[1] for _ in range(3)]
    await made.collector.rollout.close()  # closes the event loop of the environments
    turns_seen = set()
    for step, batch in enumerate(batches):
        for row in range(len(batch)):
            part = batch[[row]]
            columns = ("turn_index", "token_level_rewards", "values", "returns")
            tokens = zip(*(part.values(name).tolist() for name in columns), strict=True)
            turns = [
                [one[1:] for one in own] for turn, own in itertools.groupby(tokens, key=lambda one: one[0]) if turn >= 0
            ]
            following, turns_seen = 0.0, turns_seen | {len(turns)}
            for own in reversed(turns):
                rewards, values, returns = zip(*own, strict=True)
                to_go = sum(rewards) + 0.5 * following
                assert returns == pytest.approx([to_go] * len(own), rel=1e-5, abs=1e-5), (step, row)
                following = to_go if step < 2 else values[0]  # after the warm-up, lambda is 0
    assert max(turns_seen) == 3
    assert batch.values("values").abs().max() > 1e-2


async def test_F3_each_schedule_ends_at_the_last_optimizer_step_of_its_role(tasks, start, reward):
    """With 2 mini-batches per step, the critic takes 10 optimizer steps in 5 steps, and the actor 6 in 3 steps."""
    schedules = [f"{role}.{key}" for role in ("actor", "critic") for key in ("lr=1e-3", "lr_schedule=linear")]
    made = await trainer(tasks, start, reward, *PPO, *schedules, "critic.warmup_steps=2", "trainer.total_steps=5")
    metrics = [(await made.train_step())[0] for _ in range(5)]
    actor, critic = optimizers(made)
    assert (actor.steps, actor.total_steps, actor.lr()) == (6, 6, 0)
    assert (critic.steps, critic.total_steps, critic.lr()) == (10, 10, 0)
    assert [step["actor/lr"] for step in metrics[2:]] == pytest.approx([1e-3 * n / 12 for n in (11, 7, 3)])
    assert [step["critic/lr"] for step in metrics] == pytest.approx([1e-3 * n / 20 for n in (19, 15, 11, 7, 3)])


async def test_the_coefficients_of_kl_and_entropy_are_held_during_the_warm_up(tasks, start, reward):
    settings = [
        "algorithm.kl_in_reward.kl_coef=0.05", "algorithm.kl_in_reward.controller=adaptive",
        "algorithm.kl_in_reward.horizon=100", "algorithm.entropy_target=9.0",
    ]  # fmt: skip
    made = await trainer(tasks, start, reward, *PPO, *settings, "critic.warmup_steps=2")
    found = []
    for _ in range(3):
        metrics, _ = await made.train_step()
        assert metrics["reward/kl_coef"] == 0.05
        found.append((made.kl_controller.value, made.entropy_controller.value))
    assert found[:2] == [(0.05, 0.0)] * 2
    assert found[2][0] < 0.05
    assert found[2][1] > 0


async def test_D1_the_checks_of_log_probs_pass_in_the_warm_up_and_after_it(tasks, start, reward):
    made = await trainer(tasks, start, reward, *PPO, "critic.warmup_steps=1")
    first, second = [(await made.train_step())[0] for _ in range(2)]
    assert made.engine_checked
    assert first["rollout/log_prob_gap"] < 1e-4
    assert "actor/same_policy_gap" not in first
    assert second["actor/same_policy_gap"] == pytest.approx(0, abs=1e-6)


async def test_the_metric_of_the_best_checkpoint_may_come_from_updates_of_the_actor(tasks, start, reward, tmp_path):
    """Warm-up steps lack actor metrics, so the check of the metric's name must wait until the warm-up is over."""
    (tmp_path / "run").mkdir()
    settings = ["critic.warmup_steps=2", "trainer.total_steps=3", "trainer.save_every=1"]
    parts = {
        "tracker": Tracker(tmp_path / "run", Silent(), ["parity"]),
        "checkpoints": Checkpoints(Folder(str(tmp_path / "checkpoints")), "", keep=0, best="actor/grad_norm"),
    }
    made = await trainer(tasks, start, reward, *PPO, *settings, **parts)
    await made.fit()
    parts["tracker"].close()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert ["actor/grad_norm" in line for line in lines] == [False, False, True]


async def test_vapo_trains_the_policy_with_its_loss_of_correct_answers_after_the_warm_up(tasks, start, reward):
    settings = ["algorithm=vapo", "critic.warmup_steps=1", "trainer.total_steps=3"]
    made = await trainer(tasks, start, reward, *settings)
    history = [await made.train_step() for _ in range(3)]
    for _, batch in history:
        correct = batch.batch["successes"] > 0
        mask = batch.padded("response_mask")
        assert torch.equal(batch.padded("positive_mask"), mask & correct[:, None])
    for metrics, batch in history[1:]:
        share = batch.values("positive_mask").sum() / batch.values("response_mask").sum()
        assert metrics["actor/positive_fraction"] == pytest.approx(float(share), rel=1e-5)
        assert metrics["actor/positive_nll"] > 0
