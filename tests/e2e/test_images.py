"""Runs whose prompts show images: the built-in task, models of one's own, several ranks, resuming, and refusals."""

import io
import json

import pytest
from PIL import Image
from runs import SMALL, train
from transformers import AutoModelForImageTextToText, AutoProcessor

from rltrain.tasks import TASKS
from rltrain.tasks.tiny_model import start_path
from tests.image_models import picture, save

pytestmark = pytest.mark.slow
DIGIT = ["data=digit", "trainer.total_steps=2", *SMALL]


def write_data(folder, *, text_only=0, width=None):
    """Write a data file with rows that show one or two pictures, and `text_only` rows without one."""
    rows = []
    for number in range(12):
        (folder / f"{number}.png").write_bytes(picture(number, width=width or 20 + number, height=width or 28))
        images = ["0.png", f"{number}.png"][: 1 + number % 2]
        marks = "<image>" * len(images)
        rows.append({"messages": [{"role": "user", "content": f"{marks} number {number}"}], "images": images})
    for row in rows[:text_only]:
        row["images"], row["messages"][0]["content"] = [], "no picture"
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_reward.py").write_text("def letters(response):\n    return len(set(response)) / 16\n")
    return [
        "profile=demo", f"data.train={folder}/data.jsonl", "data.val=null", "rollout.max_prompt_length=64",
        "rollout.max_response_length=8", f"reward.functions=[{folder}/my_reward.py:letters]",
        "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=2", "rollout.samples_per_prompt=4",
    ]  # fmt: skip


def test_the_built_in_task_trains_with_vllm_on_two_ranks_and_keeps_its_pictures(tmp_path):
    overrides = [*DIGIT, "placement.actor_ranks=2", "algorithm.kl_loss.kl_loss_coef=0.01", "trainer.eval_every=1"]
    run = train(tmp_path / "run", *overrides, "trainer.prompts_per_minibatch=8")
    assert run.status == 0, run.stderr
    metrics = run.metrics()
    assert max(row["actor/engine_gap"] for row in metrics) < 1e-5
    assert metrics[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6), "the reference sees the same pictures"
    assert all(row["actor/grad_norm"] > 0 for row in metrics)
    assert "<global-img><image><fake_token_around_image>?" in run.stdout, "an image is shown as one token"
    table = run.samples()["step_000001.parquet"].to_pydict()
    assert [len(images) for images in table["images"]] == [1] * 32
    files = {uid: images[0]["bytes"] for uid, images in zip(table["uid"], table["images"], strict=True)}
    assert len(set(files.values())) == 8, "each prompt has its own picture"
    assert Image.open(io.BytesIO(table["images"][0][0]["bytes"])).size == (28, 28)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model", local_files_only=True)
    processor = AutoProcessor.from_pretrained(tmp_path / "run" / "model", local_files_only=True)
    picture = Image.open(io.BytesIO(table["images"][0][0]["bytes"])).convert("RGB")
    inputs = processor(text="<image>?", images=[picture], return_tensors="pt", add_special_tokens=False)
    assert inputs["input_ids"][0].tolist() == table["prompt_ids"][0]
    answer = table["response_ids"][0][0]
    log_prob = model(**inputs).logits[0, -1].log_softmax(-1)[answer].item()
    first = AutoModelForImageTextToText.from_pretrained(start_path(TASKS["digit"]), local_files_only=True)
    before = first(**inputs).logits[0, -1].log_softmax(-1)[answer].item()
    assert before == pytest.approx(table["rollout_log_probs"][0][0], abs=1e-4)
    assert log_prob != pytest.approx(before, abs=1e-4), "the exported model is the trained one"


@pytest.mark.parametrize("kind", ["idefics3", "llava"])
def test_a_model_of_ones_own_trains_with_the_transformers_engine_and_resumes(kind, tmp_path):
    save(kind, tmp_path / "model")
    overrides = [
        *write_data(tmp_path), f"model.path={tmp_path}/model", "rollout=hf", "placement=inprocess",
        "trainer.save_every=2", "trainer.deterministic=true",
    ]  # fmt: skip
    whole = train(tmp_path / "whole", *overrides, "trainer.total_steps=3")
    assert whole.status == 0, whole.stderr
    assert max(row["rollout/log_prob_gap_max"] for row in whole.metrics()) < 1e-4
    assert all(row["actor/grad_norm"] > 0 for row in whole.metrics())
    first = train(tmp_path / "run", *overrides, "trainer.total_steps=2")
    assert first.status == 0, first.stderr
    run = train(tmp_path / "run", *overrides, "trainer.total_steps=3", "trainer.resume=auto")
    assert run.status == 0, run.stderr
    # The learning rate depends on the number of steps, so only what was sampled before the last step is compared.
    name = "step_000002.parquet"
    assert run.samples()[name].equals(first.samples()[name])
    table = whole.samples()["step_000001.parquet"].to_pydict()
    assert {len(images) for images in table["images"]} == {1, 2}


def test_a_model_of_ones_own_trains_with_vllm_and_adapters(tmp_path):
    save("idefics3", tmp_path / "model")
    overrides = [*write_data(tmp_path, text_only=2, width=40), f"model.path={tmp_path}/model", "trainer.total_steps=2"]
    run = train(tmp_path / "run", *overrides, "model.lora={rank: 4}")
    assert run.status == 0, run.stderr
    # All rows show one common picture, so an engine that kept its features of the old weights would differ in step 2.
    assert max(row["rollout/log_prob_gap_max"] for row in run.metrics()) < 1e-4
    assert {len(images) for images in run.samples()["step_000001.parquet"]["images"].to_pylist()} >= {1, 2}


def test_one_and_two_ranks_learn_the_same_although_some_rows_show_no_image(tmp_path):
    save("idefics3", tmp_path / "model")
    overrides = [
        *write_data(tmp_path, text_only=5), f"model.path={tmp_path}/model", "rollout=hf", "trainer.total_steps=3",
        "trainer.deterministic=true", "actor.weight_decay=0.1",
    ]  # fmt: skip
    runs = [train(tmp_path / f"run{ranks}", *overrides, f"placement.actor_ranks={ranks}") for ranks in (1, 2)]
    assert [run.status for run in runs] == [0, 0], runs[1].stderr
    one, two = (run.metrics() for run in runs)
    for row, other in zip(one, two, strict=True):
        for name in ("reward/mean", "actor/grad_norm", "actor/policy_loss", "rollout/entropy"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
    images = [len(images) for images in runs[0].samples()["step_000001.parquet"]["images"].to_pylist()]
    assert 0 in images
    assert max(images) > 0


REFUSED = {
    "a critic": (["data=digit", "algorithm=ppo"], "models of the type idefics3 cannot have a critic"),
    "ranks that split tokens": (
        ["data=digit", "placement.actor_ranks=2", "placement.sequence_ranks=2"],
        "prompts with images cannot be used with ranks that split tokens or layers (2 ranks for a pack)",
    ),
    "another tiny model": (["data=digit", "model.path=builtin"], "use model.path=builtin-vision"),
    "LLaVA with vLLM": (["LLAVA", "rollout=vllm"], "of the type llava cannot be used with rollout.engine=vllm (vLLM)"),
    "LLaVA with adapters": (["LLAVA", "rollout=hf", "model.lora={rank: 4}"], "cannot be adapted; use model.lora=null"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_exclude_images_are_refused_before_the_run_starts(case, tmp_path):
    overrides, said = REFUSED[case]
    if "LLAVA" in overrides:
        save("llava", tmp_path / "model")
        overrides = [*write_data(tmp_path), f"model.path={tmp_path}/model", *overrides[1:]]
    run = train(tmp_path / "run", *overrides)
    assert run.status == 2
    assert said in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
