"""Tests of the recipes in examples/recipes as they are written: settings, hardware, comments and pinned data.

No model is downloaded. tests/e2e/test_recipes.py trains with smaller settings.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pyarrow
import pytest
from pyarrow import parquet

from rltrain.data.model_weights import skeleton
from rltrain.run.checks import check
from rltrain.run.epochs import with_epochs_as_steps
from rltrain.run.memory.facts import model_facts, planned_nodes
from rltrain.run.memory.plan import memory_plan, require_room
from rltrain.settings.compose import compose
from tests.documents import ROOT
from tests.hub_server import Hub

RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
TRAINING_ROWS = {"openai/gsm8k:main:train": 7473, "examples/recipes/mbpp.py:rows": 374}
MODELS = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "vocab_size": 151_936,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
MBPP = "google-research-datasets/mbpp"
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the library datasets is not installed: make setup"
)


class Reached(Exception):
    """Raised when all checks before the download of the model have passed."""


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    """Run each test in the checkout, because a recipe names its files relative to the checkout."""
    monkeypatch.chdir(ROOT)


def composed(name: str, *overrides: str):
    """Compose a recipe for a cluster, so that the devices of this machine do not matter."""
    file = str(RECIPES / f"{name}.yaml")
    placement = compose([], [file])[0].placement
    cluster = [] if placement.on_cluster else ["placement=colocated"]
    return compose([*cluster, *overrides], [file])[0]


def comment(name: str) -> dict[str, str]:
    """Return the labelled parts of the comment at the start of a recipe, each as one line."""
    text = (RECIPES / f"{name}.yaml").read_text().partition("\nprofile:")[0]
    parts = re.findall(r"^# (\w+): +(.*(?:\n#  .*)*)", text, re.M)
    return {label: re.sub(r"\s*\n#\s+", " ", part) for label, part in parts}


@needs_library
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_passes_all_checks_before_its_model_is_downloaded(name, tmp_path):
    def reached(config):
        raise Reached

    # The machine that runs the tests may lack bubblewrap.
    config = composed(name, f"trainer.output_dir={tmp_path}/run", "reward.sandbox=auto")
    with pytest.raises(Reached):
        check(config, fetch=reached)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_the_hardware_that_it_names(name, tmp_path):
    hardware = comment(name)["Hardware"]
    nodes, gpus = 2 if "two machines" in hardware else 1, 8 if "8 GPUs" in hardware else 1
    gb = re.findall(r"(\d+) GB", hardware)
    path = composed(name).model.path
    shape = next(sizes for size, sizes in MODELS.items() if f"-{size}" in path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | shape))
    config = composed(
        name, f"model.path={tmp_path}", f"placement.nodes={nodes}", f"placement.gpus_per_node={gpus}",
        f"placement.gpu_memory_gb={gb[0]}",
    )  # fmt: skip
    facts = model_facts(replace(config, model=replace(config.model, lora=None)), on_gpu=True)
    if config.model.lora is not None:
        facts = replace(facts, adapters=adapter_parameters(str(tmp_path), config.model.lora.rank))
    require_room(config, memory_plan(config, facts, planned_nodes(config.placement)))


def adapter_parameters(path: str, rank: int) -> int:
    """Return the number of parameters of adapters for all linear layers except the output head."""
    from torch import nn

    layers = [(name, one) for name, one in skeleton(path).named_modules() if isinstance(one, nn.Linear)]
    return rank * sum(one.in_features + one.out_features for name, one in layers if name != "lm_head")


@pytest.mark.parametrize("name", NAMES)
def test_the_comment_of_a_recipe_says_what_to_expect(name):
    said = comment(name)
    assert {"Hardware", "Length", "Time", "Curve"} <= said.keys()
    config = composed(name)
    rows = TRAINING_ROWS.get(config.data.train)
    assert rows is not None or config.trainer.total_epochs is None
    assert said["Length"].startswith(f"{with_epochs_as_steps(config, rows or 0).trainer.total_steps} steps")
    assert "estimated as in examples/README.md" in said["Time"]
    assert "not measured" in said["Time"]
    assert "not measured" in said["Curve"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_in_the_tables_of_the_examples(name):
    text = (ROOT / "examples" / "README.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `recipes/{name}.yaml` |")]
    assert f"| {comment(name)['Time'].partition(' on ')[0]} |" in row
    (steps,) = re.findall(rf"^\| `{name}` \| ([\d,]+) \|", text, re.M)
    assert comment(name)["Length"].startswith(f"{steps} steps")


@needs_library
def test_the_programs_of_mbpp_come_from_one_commit_wherever_the_branch_is(tmp_path):
    with Hub(tmp_path / "store") as hub:
        push_mbpp(hub, tmp_path / "first", "Add 1.")
        hub.tag(MBPP, "4bb6404fdc6cacfda99d4ac4205087b89d32030c", kind="dataset")
        push_mbpp(hub, tmp_path / "second", "Add 2.")
        environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
        code = "import json, mbpp; print(json.dumps([row['question'] for row in mbpp.rows('train')]))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=RECIPES, env=environment | hub.environment(tmp_path / "cache"),
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (question,) = json.loads(done.stdout.splitlines()[-1])
    assert question.startswith("Add 1.\n\nThe program must pass these tests:\n\n```python\nassert add(1) == 2\n")


def push_mbpp(hub: Hub, folder, text: str) -> None:
    (folder / "full").mkdir(parents=True)
    row = {"text": text, "code": "", "test_list": ["assert add(1) == 2"], "test_setup_code": ""}
    parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "full" / "train-00000-of-00001.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: full\n  data_files:\n  - split: train\n    path: full/train-*\n---\n"
    )
    hub.push(MBPP, folder, kind="dataset")
