"""Runs of the recipes in examples/recipes, as they are written, with a local hub of small models and data sets.

The tests add overrides that make the recipes' runs small. The data sets have the columns of the real data sets. The
recipes for several GPUs keep their kind of placement: their ranks and engines are processes of their own.
tests/unit/test_recipes.py tests the recipes without these overrides.
"""

import re
from pathlib import Path

import pyarrow
import pytest
import yaml
from own_models import save_model
from pyarrow import parquet
from runs import ROOT, train

from tests.hub_server import Hub

pytestmark = [pytest.mark.broad, pytest.mark.slow, pytest.mark.timeout(900)]
RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
SMALL = [
    "trainer.total_epochs=null", "trainer.total_steps=1", "trainer.prompts_per_step=2",
    "trainer.prompts_per_minibatch=2", "trainer.eval_samples=1", "rollout.samples_per_prompt=2",
    "rollout.max_response_length=12", "data.val_size=2",
]  # fmt: skip
ONE_PROCESS = [
    "placement=inprocess", "rollout=hf", "placement.actor_ranks=1",
    "placement.rollout_replicas=1", "placement.reward_workers=1", "reward.sandbox=auto",
]  # fmt: skip
GSM8K = {"question": "What is 2 + {n}?", "answer": "2 + {n} = <<2+{n}=5>>5\n#### 5"}
DATA_SETS = {
    "openai/gsm8k": ("main", {"train": GSM8K, "test": GSM8K}),
    "open-r1/DAPO-Math-17k-Processed": (
        "en",
        {"train": {"prompt": "Find {n} + 1.", "solution": "34", "data_source": "math_dapo", "ability": "MATH"}},
    ),
    "HuggingFaceH4/aime_2024": (
        "default",
        {"train": {"id": "{n}", "problem": "Find {n} + 2.", "solution": "It is 204.", "answer": "204", "year": "2024"}},
    ),
}
SPREAD = ("async_two_nodes", "colocated_8gpu")  # Recipes for ranks and engines on several GPUs.
MBPP = {
    "text": "Write a function that adds {n} to a number.",
    "code": "def add(x):\n    return x + {n}",
    "test_list": ["assert add(1) == 1 + {n}", "assert add(2) == 2 + {n}"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
MBPP_COMMIT = re.search('COMMIT = "([0-9a-f]{40})"', (RECIPES / "mbpp.py").read_text())[1]


def rows(form: dict, count: int = 6) -> pyarrow.Table:
    """Return a table in which each row is `form` with the row's number filled in."""

    def filled(value, n):
        return [filled(one, n) for one in value] if isinstance(value, list) else value.replace("{n}", str(n))

    return pyarrow.Table.from_pylist([{name: filled(value, n) for name, value in form.items()} for n in range(count)])


def data_set(folder: Path, config: str, splits: dict[str, dict]) -> Path:
    (folder / config).mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    for split, form in splits.items():
        parquet.write_table(rows(form), folder / config / f"{split}-00000-of-00001.parquet")
    return folder


def settings(name: str) -> dict:
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text())


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Serve a hub with small models under the names of the recipes' models, and with small data sets."""
    folder = tmp_path_factory.mktemp("hub")
    model = save_model(folder / "model", "llama", positions=2048)
    with Hub(folder / "store") as server, pytest.MonkeyPatch.context() as patch:
        for path in {settings(name)["model"]["path"] for name in NAMES}:
            server.push(path, model)
        sets = DATA_SETS | {"google-research-datasets/mbpp": ("full", {"train": MBPP, "validation": MBPP})}
        for name, (config, splits) in sets.items():
            server.push(name, data_set(folder / name, config, splits), kind="dataset")
        server.tag("google-research-datasets/mbpp", MBPP_COMMIT, kind="dataset")
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        for name, value in server.environment(folder / "cache").items():
            patch.setenv(name, value)
        yield server


def recipe(name: str, output: Path, *overrides: str):
    return train(output, "--config", str(RECIPES / f"{name}.yaml"), *SMALL, *overrides)


def components(name: str) -> list[str]:
    paths = [one if isinstance(one, str) else one["path"] for one in settings(name)["reward"]["functions"]]
    return [path.rpartition(":")[2] for path in paths]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gsm8k", *SPREAD)])
def test_a_recipe_trains(hub, tmp_path, name):
    run = recipe(name, tmp_path / "run", *ONE_PROCESS, "model.dtype=float32")
    assert run.status == 0, run.stderr
    (metrics,) = run.metrics()
    assert {f"reward/{one}/mean" for one in components(name)} <= metrics.keys()
    assert [row["step"] for row in run.lines("evaluations.jsonl")] == [0, 1]


def test_ranks_and_engines_of_the_colocated_recipe_take_turns(hub, tmp_path):
    run = recipe(
        "colocated_8gpu", tmp_path / "run", "placement.actor_ranks=2", "placement.rollout_replicas=2",
        "placement.reward_workers=1", "rollout.vllm.kv_cache_mb=64", "trainer.total_steps=2",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert run.survivors == []
    assert "processes  2 training ranks (actor) + 2 engines + 1 reward worker; Ray on this machine" in run.stdout
    metrics = run.metrics()
    assert [row["rollout/staleness_max"] for row in metrics] == [0, 0]
    assert all(row["sync/verified"] == 1 for row in metrics if "sync/verified" in row)


def test_the_engine_of_the_asynchronous_recipe_runs_ahead_of_the_rank(hub, tmp_path):
    run = recipe(
        "async_two_nodes", tmp_path / "run", "placement.address=local", "placement.actor_ranks=1",
        "placement.rollout_replicas=1", "placement.reward_workers=1", "rollout.vllm.kv_cache_mb=64",
        "trainer.max_staleness=1", "trainer.total_steps=4",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert run.survivors == []
    assert "processes  1 rank each for actor + 1 engine + 1 reward worker; Ray on this machine" in run.stdout
    metrics = run.metrics()
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert max(row["rollout/staleness_max"] for row in metrics) == 1


def test_the_gsm8k_recipe_trains_with_vllm_and_again_from_the_cache_without_a_network(hub, tmp_path, monkeypatch):
    run = recipe("gsm8k", tmp_path / "run", "rollout.vllm.kv_cache_mb=64")
    assert run.status == 0, run.stderr
    assert run.survivors == []
    config = yaml.safe_load((run.output / "config.yaml").read_text())
    assert re.fullmatch("Qwen/Qwen2.5-0.5B-Instruct@[0-9a-f]{40}", config["model"]["path"])
    assert re.fullmatch("openai/gsm8k:main:train@[0-9a-f]{40}", config["data"]["train"])
    prompts = run.samples()["step_000001.parquet"]["prompt"].to_pylist()
    assert all("Think step by step, and write the answer after ####." in prompt for prompt in prompts)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    again = recipe("gsm8k", tmp_path / "again", *ONE_PROCESS)
    assert again.status == 0, again.stderr
    offline = yaml.safe_load((again.output / "config.yaml").read_text())
    assert offline["model"]["path"] == config["model"]["path"]
    assert offline["data"]["train"] == config["data"]["train"]
