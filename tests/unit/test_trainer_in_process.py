"""The whole trainer in one process, with the transformers engine, a tiny model and real rewards."""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from rltrain.algorithms import ADVANTAGE_ESTIMATORS
from rltrain.base.random_streams import stream_seed
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.row_assignment import minibatches
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from rltrain.trainer import Trainer
from rltrain.trajectories.scoring import zero_spread
from tests.in_process_trainer import in_process_trainer, train_prompts
from tests.policy_weights import weights_of
from workers.models.fsdp import full
from workers.placement import start as start_workers
from workers.rollout.messages import Request
from workers.training.actor import ActorWorker
from workers.training.policy_update import update_policy
from workers.training.shared_columns import log_probs_columns
from workers.training.worker_group import WorkerGroup

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
    """Return the config override that selects a reward function in a file.

    The reward function gives the same score to all answers to a prompt that begins with an odd digit.
    """
    file = tmp_path_factory.mktemp("rewards") / "parity.py"
    file.write_text(REWARD)
    return f"reward.functions=[{{name: parity, path: '{file}:score', weight: 1.0}}]"


async def trainer(tasks, model, *overrides) -> Trainer:
    made = await in_process_trainer(compose([*BASE, *overrides])[0], model, tasks)
    await made.sync_weights()
    return made


async def weights(made: Trainer) -> dict[str, torch.Tensor]:
    weights = await weights_of(made.actor)
    return {name: tensor.clone() for name, tensor in weights.items()}


async def run(made: Trainer, steps: int):
    """Train for `steps` steps, and return the metrics and batch of each step, and the final weights."""
    history = [await made.train_step() for _ in range(steps)]
    return [metrics for metrics, _ in history], [batch for _, batch in history], await weights(made)


# Tests of one optimizer step on the whole batch

VARIANTS = {
    "grpo": [],
    "kl and entropy": ["algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.entropy_coef=0.01"],
    "weighted kl": ["algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.kl_loss.ratio_weighted=true"],
    "gspo": ["algorithm=gspo"],
    "ppo": ["algorithm=ppo"],
}


@pytest.mark.parametrize("name", VARIANTS)
async def test_D1_one_step_on_policy_learns_the_same_with_and_without_the_actors_pass(
    tasks, start, reward, name, monkeypatch
):
    asked = []
    rows = WorkerGroup.rows

    async def counted(self, method, *arguments, **named):
        asked.append(self is made.actor)
        return await rows(self, method, *arguments, **named)

    monkeypatch.setattr(WorkerGroup, "rows", counted)
    found = []
    for forced in (False, True):
        made = await trainer(tasks, start, reward, *VARIANTS[name])
        before = await weights(made)
        if forced:
            monkeypatch.setattr(made, "rows_of_actor_pass", lambda batch: list(range(len(batch))))
        asked.clear()
        metrics, batches, after = await run(made, 3)
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


@pytest.mark.parametrize("name", ["grpo", "corrected", "ppo"])
async def test_D1_the_first_mini_batch_learns_the_same_with_and_without_the_actors_pass(
    tasks, start, reward, name, monkeypatch
):
    settings = {"grpo": [], "corrected": ["algorithm=tis"], "ppo": ["algorithm=ppo"]}[name]
    found = []
    for forced in (False, True):
        made = await trainer(tasks, start, reward, "trainer.prompts_per_minibatch=1", *settings)
        if forced:
            monkeypatch.setattr(made, "rows_of_actor_pass", lambda batch: list(range(len(batch))))
        found.append(await run(made, 3))
    (metrics, batches, after), (forced_metrics, forced_batches, forced_after) = found
    # In step 1, the actor computes the log-probs of all rows, because they are compared with the engine's.
    assert ["has_old_log_probs" in batch for batch in batches] == [False, True, True]
    assert ["actor/same_policy_gap" in step for step in metrics] == [True, False, False]
    for batch, forced_batch in zip(batches[1:], forced_batches[1:], strict=True):
        assert torch.equal(batch.values("responses"), forced_batch.values("responses"))
        known = batch.batch["has_old_log_probs"]
        assert [len(batch.batch["uid"][rows].unique()) for rows in (known, ~known)] == [3, 1]
        tokens = known.repeat_interleave(batch.lengths("responses"))
        for column in ("old_log_probs", "entropies"):
            expected = forced_batch.values(column).where(tokens, 0)
            assert torch.allclose(batch.values(column), expected, atol=1e-5)
    for step, forced_step in zip(metrics, forced_metrics, strict=True):
        for metric in ("actor/ratio_mean", "actor/ppo_kl", "actor/policy_loss", "actor/grad_norm"):
            assert step[metric] == pytest.approx(forced_step[metric], rel=1e-4, abs=1e-6), metric
    for key, tensor in after.items():
        assert (tensor - forced_after[key]).abs().max() <= 1e-6, key


# Dynamic sampling


@pytest.mark.parametrize(("batches", "groups"), [(1, range(1, 4)), (4, [4])])
async def test_no_group_without_spread_reaches_an_update(tasks, start, reward, batches, groups):
    made = await trainer(
        tasks, start, reward, f"algorithm.dynamic_sampling={batches}", "trainer.prompts_per_minibatch=2"
    )
    dropped = 0
    for _ in range(3):
        metrics, batch = await made.train_step()
        uid, valid = batch.batch["uid"], batch.batch["valid"]
        assert not bool(zero_spread(uid, batch.batch["scores"], valid).any())
        assert len(uid.unique()) in groups
        assert metrics["reward/zero_spread_fraction"] == 0.0
        assert metrics["rollout/groups_missing"] == 4 - len(uid.unique())
        assert not any(text[0] in "13579" for text in batch.non_tensor_batch["prompt_text"])
        assert bool((batch.padded("advantages").abs().amax(-1) > 0).any())
        dropped += metrics["rollout/groups_dropped"]
    assert dropped > 0


async def test_switched_off_groups_without_spread_are_among_the_batch(tasks, start, reward):
    _, batches, _ = await run(await trainer(tasks, start, reward), 3)
    assert any(bool(zero_spread(b.batch["uid"], b.batch["scores"], b.batch["valid"]).any()) for b in batches)


async def test_a_step_whose_groups_all_score_the_same_moves_no_weight(tasks, start, tmp_path):
    (tmp_path / "constant.py").write_text("def score(response):\n    return 1.0\n")
    constant = f"reward.functions=[{{name: c, path: '{tmp_path}/constant.py:score', weight: 1.0}}]"
    made = await trainer(tasks, start, constant, "algorithm.dynamic_sampling=2", "algorithm.entropy_coef=0.1")
    before = await weights(made)
    (metrics,), (batch,), after = await run(made, 1)
    assert len(batch) == 4
    assert not bool(batch.values("response_mask").any())
    assert metrics["rollout/groups_dropped"] == 7
    assert metrics["actor/grad_norm"] == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


# Tests of the training loop


async def sequential(tasks, model, steps, *overrides):
    """Sample, score, train and send weights strictly one after the other, as an oracle.

    The oracle does not use the trainer, the collector, the pools or the credit assignment.
    """
    config = compose([*BASE, *overrides])[0]
    workers = await start_workers(config, model, [EOS_ID], tasks, needs_critic=False)
    engine = workers.rollout.replicas[0].role.process.host.roles["rollout"].engine
    samples, budget = 4, config.actor.max_tokens_per_microbatch
    prompts = train_prompts(config)
    trained = []
    for step in range(steps):
        current = await weights_of(workers.actor)
        with torch.no_grad():
            for name, parameter in engine.model.named_parameters():
                parameter.copy_(current[name])
        uids, answers = range(4 * step, 4 * step + 4), {}
        for uid in uids:
            engine.add([Request((uid, n), prompts[uid].ids, 1.0, 12, stream_seed(0, uid, n)) for n in range(samples)])
            while engine.busy:
                answers |= {answer.key: answer for answer in engine.step()}
        keys = sorted(answers)
        texts = char_tokenizer().batch_decode([list(answers[key].token_ids) for key in keys], skip_special_tokens=True)
        scores = torch.tensor(
            [
                0.0 if int(prompts[k[0]].text[0]) % 2 else sum(map(ord, t)) % 3.0
                for k, t in zip(keys, texts, strict=True)
            ]
        )
        batch = DataProto.from_dict(
            {"prompts": jagged([prompts[uid].ids for uid, _ in keys], torch.int64),
             "responses": jagged([list(answers[key].token_ids) for key in keys], torch.int64),
             "rollout_log_probs": jagged([answers[key].log_probs for key in keys], torch.float32),
             "uid": torch.tensor([uid for uid, _ in keys])}
        )  # fmt: skip
        batch = batch.with_values(
            "responses", response_mask=torch.ones(len(batch.values("responses")), dtype=torch.bool)
        )
        mask = batch.padded("response_mask")
        if step == 0:  # in a step that checks the engine, the actor's forward pass computes the old log-probs
            columns = log_probs_columns(config.algorithm)
            batch = batch.union(
                await workers.actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=budget)
            )
        at_the_end = torch.nn.functional.one_hot(mask.sum(-1) - 1, mask.size(1)) * scores[:, None]
        valid = torch.ones(len(keys), dtype=torch.bool)
        advantages, _ = ADVANTAGE_ESTIMATORS.get("grpo")(at_the_end, mask, batch.batch["uid"], valid)
        batch = batch.with_values("responses", advantages=advantages[mask])
        plan = minibatches(batch.batch["uid"].tolist(), 1, 1, seed=0, step=step)
        await update_policy(workers.actor, batch, plan, config, max_tokens=budget, entropy_coef=0.0)
        trained.append((batch, scores))
    return trained, await weights_of(workers.actor)


async def test_E7_at_staleness_zero_a_run_is_bitwise_a_plain_sequential_loop(tasks, start, reward):
    settings = [reward, "trainer.deterministic=true", "trainer.seed=0", "data.shuffle=false", "rollout.temperature=1.0"]
    _, batches, after = await run(await trainer(tasks, start, *settings), 3)
    expected, weights_after = await sequential(tasks, start, 3, *settings)
    for step, (batch, (plain, scores)) in enumerate(zip(batches, expected, strict=True)):
        assert torch.equal(batch.values("responses"), plain.values("responses"))
        assert torch.equal(batch.batch["scores"], scores)
        assert torch.equal(batch.values("advantages"), plain.values("advantages"))
        assert set(batch.values("policy_version").tolist()) == {step}
    assert set(after) == set(weights_after)
    assert all(torch.equal(tensor, weights_after[name]) for name, tensor in after.items())
    untrained = await weights(await trainer(tasks, start, *settings))
    assert any(not torch.equal(tensor, other) for tensor, other in zip(after.values(), untrained.values(), strict=True))


async def test_with_staleness_one_every_group_is_trained_on_once_and_none_is_older_than_a_version(tasks, start, reward):
    made = await trainer(tasks, start, reward, "trainer.max_staleness=1", "trainer.total_steps=4")
    metrics, batches, _ = await run(made, 4)
    assert [uid for batch in batches for uid in batch.batch["uid"].unique().tolist()] == list(range(16))
    ages = [step - batch.values("policy_version") for step, batch in enumerate(batches)]
    assert all(0 <= int(age.min()) <= int(age.max()) <= 1 for age in ages)
    assert [step["rollout/staleness_max"] for step in metrics] == [float(age.max()) for age in ages]
    assert max(step["rollout/staleness_max"] for step in metrics) == 1
    assert (made.collector.groups.groups, made.collector.rollout.pending) == ({}, 0)


# Tests of runs with every feature at once, and of runs with greedy baselines


async def test_a_greedy_baseline_is_scored_for_each_prompt(tasks, start, reward):
    _, batches, _ = await run(await trainer(tasks, start, reward, "algorithm.advantage_estimator=remax"), 2)
    for batch in batches:
        assert len(batch) == 16
        baselines = batch.batch["baseline_rewards"].view(4, 4)
        assert bool((baselines == baselines[:, :1]).all())
        expected = batch.batch["scores"] - batch.batch["baseline_rewards"]
        assert torch.allclose(batch.padded("advantages")[:, 0], expected)


async def test_a_cut_answer_ends_with_the_critics_value_of_its_last_state(tasks, start, reward):
    """The expected value of the last state comes from transformers' own forward pass over the whole answer.

    The test computes the expected value with the critic's weights from before the training step.
    """
    settings = [
        "algorithm=ppo",
        "algorithm.bootstrap_truncated=true",
        "algorithm.advantage.gamma=0.9",
        "critic.lr=1e-2",
        "algorithm.advantage_normalization.mean_level=null",
        "algorithm.advantage_normalization.std_level=null",
        "rollout.max_response_length=4",
    ]
    made = await trainer(tasks, start, reward, *settings)
    await made.train_step()  # after the first step, the critic's values differ from 0
    (critic,) = (rank.process.host.roles["critic"] for rank in made.critic.ranks)
    copy = AutoModelForTokenClassification.from_pretrained(start, num_labels=1)
    copy.score = torch.nn.Linear(copy.config.hidden_size, 1, bias=False)
    copy.load_state_dict({name: full(tensor.detach()).clone() for name, tensor in critic.model.state_dict().items()})
    copy.eval()
    _, batch = await made.train_step()
    reasons = batch.non_tensor_batch["finish_reason"].tolist()
    assert set(reasons) == {"length", "stop"}
    for row, reason in enumerate(reasons):
        prompt, response = batch[[row]].values("prompts"), batch[[row]].values("responses")
        with torch.no_grad():
            states = copy(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 :, 0]
        assert torch.allclose(batch[[row]].values("values"), states[:-1], rtol=1e-4, atol=1e-5)
        end = batch.batch["bootstrap_values"][row]
        assert torch.isclose(end, states[-1] if reason == "length" else torch.tensor(0.0), rtol=1e-4, atol=1e-5)
        after = 0.9 * end + batch.batch["scores"][row]
        assert torch.isclose(batch[[row]].values("returns")[-1], after, rtol=1e-4, atol=1e-5)
    assert batch.batch["bootstrap_values"].abs().max() > 0.01


async def test_features_go_together(tasks, start, reward):
    settings = [
        "loss_mode=top_entropy", "suppress_truncated=true", "mask_truncated=true", "dynamic_sampling=3",
        "entropy_target=0.1", "reward_normalization.std_level=batch", "advantage_normalization.std_level=group",
        "reward_shaping.overlong_buffer=2", "kl_loss.kl_loss_coef=0.1", "kl_loss.kl_estimator=full",
        "kl_in_reward.kl_coef=0.1", "kl_in_reward.kl_estimator=full", "correction.level=geometric",
        "rejection.kl_estimator=k3", "rejection.upper=1.0",
    ]  # fmt: skip
    updates = ["trainer.prompts_per_minibatch=2", "trainer.epochs_per_step=2"]
    made = await trainer(tasks, start, reward, *(f"algorithm.{text}" for text in settings), *updates)
    metrics, batches, _ = await run(made, 2)
    assert all(value == value and abs(value) < float("inf") for step in metrics for value in step.values())
    assert {"full_kl", "ref_hidden", "entropies"} <= set(batches[0].keys())
    # importance weights are near 1, because the log-probs of engine and actor agree
    assert metrics[0]["actor/correction_weight_mean"] == pytest.approx(1, abs=0.1)
    assert metrics[0]["actor/rejection_dropped_fraction"] == 0
    assert "ref_log_probs" not in batches[0]
    assert metrics[0]["actor/selected_fraction"] > 0
    # Before the first update, the actor equals the reference model, so the KL divergence between the two models is 0.
    assert metrics[0]["reward/kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[1]["reward/kl"] > 0
    cut = torch.tensor([reason == "length" for reason in batches[0].non_tensor_batch["finish_reason"]])
    assert not bool(batches[0].padded("response_mask")[cut].any())
