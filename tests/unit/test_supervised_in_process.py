"""Tests of runs with a supervised loss in one process, with the transformers engine and a tiny model."""

import json

import pytest
import torch

from rltrain.data.prompts import load_prompts
from rltrain.main import main, supervised_options
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from tests.in_process_trainer import in_process_trainer
from tests.unit.test_trainer_in_process import BASE, REWARD, weights

SUPERVISED = ["algorithm.sft_coef=0.5", "data.sft_response=#{answer}"]


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """Return the config override of a reward function that gives all answers to every second prompt the same score."""
    file = tmp_path_factory.mktemp("rewards") / "parity.py"
    file.write_text(REWARD)
    return f"reward.functions=[{{name: parity, path: '{file}:score', weight: 1.0}}]"


async def started(tasks, model, *overrides):
    made = await in_process_trainer(compose([*BASE, "trainer.deterministic=true", *overrides])[0], model, tasks)
    await made.sync_weights()
    return made


def watched(made):
    """Record the supervised answers of each step, as pairs (group, token ids)."""
    steps, supervised = [], made.collector.supervised

    def recording(batch):
        found = supervised(batch)
        rows = found.batch["responses"].unbind()
        steps.append([(uid, row.tolist()) for uid, row in zip(found.batch["uid"].tolist(), rows, strict=True)])
        return found

    made.collector.supervised = recording
    return steps


def timeless(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith(("timing/", "perf/"))}


async def test_without_a_coefficient_a_run_is_bitwise_the_run_without_answers_and_without_further_metrics(
    tasks, start, reward
):
    found = []
    for answers in (False, True):
        made = await started(tasks, start, reward, "trainer.prompts_per_minibatch=2")
        if answers:  # the check of the config refuses supervised answers without a coefficient
            config = compose([*BASE, *SUPERVISED])[0]
            chosen = supervised_options(config, char_tokenizer())
            given = {"split": "train", "seed": 0, "max_prompt_length": 16, "overlong": "refuse", "limit": 64}
            made.collector.prompts = load_prompts("builtin:median", char_tokenizer(), supervised=chosen, **given)
        history = [timeless((await made.train_step())[0]) for _ in range(2)]
        found.append((history, await weights(made)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())
    assert not [name for name in found[0][0][0] if "sft" in name]


async def test_the_statistics_and_the_batch_of_a_step_do_not_see_supervised_answers(tasks, start, reward):
    """The first steps of two runs have the same answers and one optimizer step, so the policy's metrics are equal."""
    found = {}
    terms = ["algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.entropy_coef=0.01", "algorithm.squared_log_ratio_coef=1"]
    for name, overrides in (("plain", []), ("supervised", SUPERVISED)):
        made = await started(tasks, start, reward, *terms, *overrides)
        metrics, batch = await made.train_step()
        found[name] = timeless(metrics), batch
    (plain, batch), (metrics, other) = found["plain"], found["supervised"]
    assert len(other) == len(batch) == 16
    assert batch.keys() == other.keys()
    assert all(torch.equal(batch.values(name), other.values(name)) for name in ("responses", "advantages"))
    own = {"actor/sft_loss", "actor/sft_tokens"}
    assert metrics.keys() - plain.keys() == own
    changed = {name for name, value in plain.items() if metrics[name] != value}
    assert changed == {"actor/grad_norm", "actor/grad_norm_max"}
    assert metrics["actor/sft_tokens"] == 4 * 3
    assert metrics["actor/sft_loss"] > 0


async def test_each_group_of_a_step_brings_its_own_answer_once_and_each_epoch_trains_on_it(tasks, start, reward):
    made = await started(
        tasks, start, reward, *SUPERVISED, "trainer.epochs_per_step=2", "trainer.prompts_per_minibatch=1"
    )
    steps = watched(made)
    for number in range(2):
        metrics, batch = await made.train_step()
        prompts = dict(zip(batch.batch["uid"].tolist(), batch.non_tensor_batch["prompt_text"].tolist(), strict=True))
        medians = {uid: sorted(text.removesuffix("="))[3] for uid, text in prompts.items()}
        assert steps[number] == [(uid, [35, ord(medians[uid]), EOS_ID]) for uid in sorted(prompts)]
        assert metrics["actor/sft_tokens"] == 2 * 4 * 3


async def test_groups_that_dynamic_sampling_drops_bring_no_answers(tasks, start, reward):
    made = await started(tasks, start, reward, *SUPERVISED, "algorithm.dynamic_sampling=2")
    steps, dropped = watched(made), set()
    for number in range(3):
        _, batch = await made.train_step()
        dropped.update(made.dropped)
        assert [uid for uid, _ in steps[number]] == batch.batch["uid"].unique().tolist()
    assert dropped
    assert dropped.isdisjoint(uid for step in steps for uid, _ in step)


async def test_a_step_whose_groups_are_all_dropped_moves_no_weight(tasks, start, tmp_path):
    (tmp_path / "constant.py").write_text("def score(response):\n    return 1.0\n")
    constant = f"reward.functions=[{{name: c, path: '{tmp_path}/constant.py:score', weight: 1.0}}]"
    made = await started(tasks, start, constant, *SUPERVISED, "algorithm.dynamic_sampling=2")
    before = await weights(made)
    metrics, _ = await made.train_step()
    after = await weights(made)
    assert (metrics["actor/sft_tokens"], metrics["actor/grad_norm"]) == (0, 0)
    assert "actor/sft_loss" not in metrics
    assert all(torch.equal(before[name], after[name]) for name in before)


async def test_stale_groups_and_groups_without_an_answer_are_trained_on_too(tasks, start, reward, tmp_path):
    rows = [{"prompt": f"{n:07d}=", "answer": "1", "solution": "#1" if n % 2 else None} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["trainer.deterministic=false", "trainer.max_staleness=1", "trainer.total_steps=4"]
    data = [f"data.train={tmp_path}/rows.jsonl", "data.shuffle=false"]
    made = await started(
        tasks, start, reward, "algorithm.sft_coef=0.5", "data.sft_response=solution", *overrides, *data
    )
    steps, history = watched(made), [await made.train_step() for _ in range(4)]
    assert [uid for step in steps for uid, _ in step] == [n for n in range(16) if n % 2]
    assert [metrics["actor/sft_tokens"] for metrics, _ in history] == [2 * 3] * 4
    assert max(metrics["rollout/staleness_max"] for metrics, _ in history) == 1


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_the_policy_learns_answers_that_it_never_samples(tasks, start, tmp_path, seed):
    """No sampled answer contains the reference answer, so all groups earn 0, and RL alone has no gradient."""
    (tmp_path / "z.py").write_text("def score(response):\n    return float(response == 'zz')\n")
    rows = [{"prompt": f"{n:07d}=", "solution": "zz"} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"reward.functions=[{tmp_path}/z.py:score]", f"data.train={tmp_path}/rows.jsonl", f"trainer.seed={seed}"]
    rewards = {}
    for coef in (0, 1):
        answers = ["data.sft_response=solution"] * coef
        made = await started(tasks, start, *own, f"algorithm.sft_coef={coef}", *answers, "actor.lr=3e-3")
        rewards[coef] = [(await made.train_step())[0]["reward/mean"] for _ in range(10)]
    assert rewards[0] == [0.0] * 10
    assert rewards[1][0] == 0
    assert sum(rewards[1][-2:]) / 2 > 0.2


def test_the_command_line_shows_the_answers_in_the_plan_and_trains_on_them(tmp_path, capsys, monkeypatch):
    words = [
        "placement=inprocess", "rollout=hf", "trainer.total_steps=1", "trainer.prompts_per_step=4",
        "trainer.prompts_per_minibatch=2", "rollout.samples_per_prompt=2", "data.val=null",
        f"trainer.output_dir={tmp_path / 'run'}", *SUPERVISED,
    ]  # fmt: skip
    assert main([*words, "--plan"]) == 0
    assert (
        'supervised cross-entropy of supervised answers, coefficient 0.5; "#{answer}" has answers to 8,192 of 8,192 '
        "prompts, 24,576 tokens\n"
    ) in capsys.readouterr().out
    assert main([word.replace("#{answer}", "{solution}") for word in words]) == 2
    assert (
        "data.sft_response={solution}: data.train=builtin:median has no column 'solution'; the columns are prompt, "
        "answer"
    ) in capsys.readouterr().err
