"""Tests that the workers of a reward model, run in one process, give the scores of the transformers library."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import ConfigError
from rltrain.data.prompts import Prompt
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from rltrain.trainer import Trainer
from rltrain.trajectories.reward_models import RewardModel, reward_models
from tests.in_process_trainer import in_process_trainer
from workers.cluster.processes import LocalProcess, Role
from workers.cluster.worker_process import Host
from workers.placement import ROLES
from workers.training.worker_group import WorkerGroup

pytestmark = pytest.mark.usefixtures("process_group")
# Samples of several lengths as (prompt, answer).
# The last sample's answer contains the text of the padding token, which the reward model must treat as text.
SAMPLES = [(f"{n * 37}=", "x" * (n % 5) + str(n)) for n in range(12)] + [("~", ""), ("", "~"), ("1", "<pad><pad>")]


def one_at_a_time(path: str, samples=SAMPLES, *, end: str = "") -> list[float]:
    """Return the scores that the transformers library gives to the samples.

    Texts of control tokens become control tokens only in `end`, the end of the template.
    """
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1).eval(), char_tokenizer()
    with torch.no_grad():
        last = tokenizer(end)["input_ids"] if end else []
        rows = [tokenizer(p + r, split_special_tokens=True)["input_ids"] + last for p, r in samples]
        return [float(model(torch.tensor([row])).logits[0, 0]) for row in rows]


def model_of(path: str, max_tokens: int = 8192) -> RewardModel:
    config, _ = compose([f"reward.models=[{path}]"])
    role = Role(LocalProcess(Host({}, verbose=True)), "reward_model judge")
    role.process.build(role.name, ROLES["reward_model"], config, path)
    (made,) = reward_models(config, [WorkerGroup([role])])
    made.max_tokens = max_tokens
    return made


def prompts_of(samples=SAMPLES):
    return [(Prompt(0, prompt, [1], {}), response) for prompt, response in samples]


@pytest.mark.parametrize("budget", [8192, 20])
async def test_B6_packed_scores_are_those_of_transformers_one_at_a_time(reward_model, budget):
    found, expected = await model_of(reward_model, budget).scores(prompts_of()), one_at_a_time(reward_model)
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1  # the scores differ between samples, so the comparison is meaningful


async def test_behind_padding_tokens_at_the_end_nobody_looks_as_in_transformers(reward_model):
    made = model_of(reward_model)
    made.config = dataclasses.replace(made.config, prompt_template="{prompt}{response}<pad><pad>")
    expected = one_at_a_time(reward_model, SAMPLES[:6], end="<pad><pad>")
    assert await made.scores(prompts_of(SAMPLES[:6])) == pytest.approx(expected, abs=1e-5)


async def test_editing_one_sample_of_a_pack_changes_no_other(reward_model):
    made = model_of(reward_model)
    before, edited = await made.scores(prompts_of()), [("9", "9"), *SAMPLES[1:]]
    after = await made.scores(prompts_of(edited))
    assert after[1:] == pytest.approx(before[1:], abs=1e-5)
    assert abs(after[0] - before[0]) > 1e-3


async def test_E10_its_positions_are_its_limit(reward_model):
    made = model_of(reward_model)
    assert made.longest == 64
    fits, too_long = await made.scores(prompts_of([("p", "x" * 63), ("p", "x" * 64)]))
    assert isinstance(fits, float)
    assert too_long == "cannot read 65 tokens, because the model's limit is 64; lower rollout.max_response_length"


def test_a_model_that_is_no_linear_function_of_a_causal_state_is_refused(start, reward_model, tmp_path):
    with pytest.raises(ConfigError, match=r"its weights lack score\.weight"):
        model_of(start)  # a language model has no score head, so a score head would have random weights
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=128, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="BertForSequenceClassification is not a causal model"):
        model_of(str(tmp_path))


async def test_dropout_in_its_config_is_off(reward_model, tmp_path):
    shutil.copytree(reward_model, tmp_path / "m")
    file = Path(tmp_path / "m" / "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.5}))
    made = model_of(str(tmp_path / "m"))
    assert await made.scores(prompts_of()) == await made.scores(prompts_of())


async def trainer(start: str, tasks: BackgroundTasks, *overrides: str) -> Trainer:
    config, _ = compose(
        ["placement=inprocess", "rollout=hf", "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=4",
         "rollout.samples_per_prompt=4", "rollout.max_response_length=12", *overrides]
    )  # fmt: skip
    made = await in_process_trainer(config, start, tasks)
    await made.sync_weights()
    return made


async def test_a_model_alone_is_reward_enough(start, reward_model, tasks):
    made = await trainer(start, tasks, "reward.functions=[]", f"reward.models=[{reward_model}]")
    metrics, batch = await made.train_step()
    assert batch.batch["reward_components"].shape == (16, 1)
    assert torch.equal(batch.batch["reward_components"][:, 0], batch.batch["scores"])
    assert metrics["actor/grad_norm"] > 0


async def test_a_run_with_a_function_and_a_model_reports_and_trains_on_both(start, reward_model, tasks):
    made = await trainer(start, tasks, f"reward.models=[{{name: judge, path: {reward_model}, weight: 0.25}}]")
    for _ in range(2):
        metrics, batch = await made.train_step()
        components, objects = batch.batch["reward_components"], batch.non_tensor_batch
        samples = list(zip(objects["prompt_text"], objects["response_text"], strict=True))
        assert components[:, 1].tolist() == pytest.approx(one_at_a_time(reward_model, samples), abs=1e-5)
        assert torch.allclose(batch.batch["scores"], components[:, 0] + 0.25 * components[:, 1])
        assert metrics["reward/judge/mean"] == pytest.approx(float(components[:, 1].mean()))
        assert metrics["reward/final_answer/mean"] == pytest.approx(float(components[:, 0].mean()))
        assert metrics["reward/judge/failed_fraction"] == 0.0
        assert metrics["actor/grad_norm"] > 0
    evaluated = await made.collector.evaluate(made.collector.prompts[:3], greedy=True)
    assert evaluated.batch["reward_components"].shape == (3, 2)
    assert not evaluated.batch["reward_components"].isnan().any()


async def test_rows_come_back_in_their_order_whoever_computed_them(reward_model):
    made = model_of(reward_model, 20)
    shuffled = [*SAMPLES[7:], *SAMPLES[:7]]
    assert await made.scores(prompts_of(shuffled)) == pytest.approx(one_at_a_time(reward_model, shuffled), abs=1e-5)
