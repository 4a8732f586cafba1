"""The metric catalogue describes exactly the metrics that runs write."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.monitoring.catalogue import METRICS, page
from rltrain.tasks.tokenizer import char_tokenizer
from tests.attention_families import FAMILIES
from tests.chat_model import save_chat_model

ROOT = Path(__file__).parents[2]
TINY = [
    "placement=inprocess", "rollout=hf", "trainer.total_steps=2", "trainer.prompts_per_step=4",
    "trainer.prompts_per_minibatch=2", "rollout.samples_per_prompt=4", "data.val_size=4", "trainer.sample_every=0",
]  # fmt: skip
HINT = "path: reference, prompt_template: '{answer}{prompt}'"
# Each row of the built-in task has the teacher whose name is the row's answer, a digit.
TEACHERS = ", ".join(f"{{name: '{digit}', {HINT}}}" for digit in range(10))
RUNS = {
    "ppo": ["trainer.eval_samples=2", "algorithm.kl_in_reward.kl_coef=0.01", "algorithm.kl_loss.kl_loss_coef=0.01"],
    "grpo": ["algorithm.entropy_target=1.0"],
    "vapo": [],
    "reinforce_plus_plus_baseline": ["algorithm.reference.refresh_every=1"],
    "cispo": [
        "algorithm.sft_coef=0.1",
        "data.sft_response=#{answer}",
        "data.difficulty={}",
        "trainer.max_staleness=1",
        "trainer.reuse={groups: 1}",
    ],
    "topr": ["algorithm.squared_log_ratio_coef=0.001"],
    "sapo": [],
    "gspo": ["model.path={folder}/mixture", "profile=demo", "actor.load_balance_coef=0.01"],
    "kl_cov": [],
    "dapo": [],
    "icepop": [],
    "sequence_masking": [],
    "mopd": [f"algorithm.distillation.teachers=[{TEACHERS}]", "algorithm.distillation.teacher_column=answer"],
    "distill": [f"algorithm.distillation.teachers=[{{{HINT}}}]"],
    "dr_grpo": [
        "model.path={folder}/chat",
        "data=higher_lower",
        "rollout.max_prompt_length=100",
        "rollout.max_response_length=150",
    ],
}
EACH = """
import json, sys
from rltrain.main import main
sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""


def save_mixture(folder: Path) -> None:
    """Save a tiny random mixture of experts with the tokenizer of the built-in tasks."""
    tokenizer = char_tokenizer()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = CONFIG_MAPPING["qwen3_moe"](vocab_size=len(tokenizer), **sizes, **FAMILIES["qwen3_moe"])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Do several short runs, and collect the names of the metrics that they write."""
    folder = tmp_path_factory.mktemp("runs")
    save_chat_model(folder / "chat")
    save_mixture(folder / "mixture")
    every = [
        [
            f"algorithm={name}",
            *(word.replace("{folder}", str(folder)) for word in words),
            *TINY,
            f"trainer.output_dir={folder / name}",
        ]
        for name, words in RUNS.items()
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", EACH, json.dumps(every)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    files = [folder / name / file for name in RUNS for file in ("metrics.jsonl", "evaluations.jsonl")]
    return {name for file in files for line in file.read_text().splitlines() for name in json.loads(line)} - {"step"}


@pytest.mark.slow
def test_every_metric_that_runs_write_is_in_the_catalogue(written):
    assert [name for name in sorted(written) if not any(metric.matches(name) for metric in METRICS)] == []


@pytest.mark.slow
def test_every_metric_of_the_catalogue_is_written_by_some_run(written):
    assert [metric.name for metric in METRICS if not any(metric.matches(name) for name in written)] == []


def test_no_two_entries_of_the_catalogue_describe_the_same_metric():
    names = [metric.name for metric in METRICS if "<" not in metric.name]
    assert [name for name in names if sum(metric.matches(name) for metric in METRICS) != 1] == []


def test_the_page_of_metrics_is_the_catalogue():
    assert (ROOT / "docs/metrics.md").read_text() == page()
