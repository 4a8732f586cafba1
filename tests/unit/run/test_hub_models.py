"""Tests of models given by hub name, whose commits are pinned in the config and kept when the run is resumed."""

import io

import pytest
from huggingface_hub import constants
from rich.console import Console

from rltrain.base.errors import ConfigError
from rltrain.data import hub as hub_module
from rltrain.monitoring.heartbeat import Heartbeat
from rltrain.run.hub_models import fetch_models
from rltrain.settings.compose import compose, to_yaml
from tests.hub_server import Hub

STEP = "run/checkpoints/step_2"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Yield a local hub server that stores the models that tests push.

    All downloads of the test process go to the local hub.
    """
    monkeypatch.setattr(hub_module, "_snapshots", {})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with Hub(tmp_path / "store") as server:
        for name, value in server.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        yield server


def push(hub, tmp_path, weights: bytes, name: str = "org/model") -> str:
    (tmp_path / "commit").mkdir(exist_ok=True)
    (tmp_path / "commit" / "config.json").write_text("{}")
    (tmp_path / "commit" / "model.safetensors").write_bytes(weights)
    return hub.push(name, tmp_path / "commit")


def fetched(*overrides: str):
    """Return the config after downloading the models, and the text printed on the console."""
    console = Console(file=io.StringIO(), width=200)
    config = fetch_models(compose(overrides)[0], Heartbeat(console))
    return config, console.file.getvalue()


def test_the_config_gets_the_pinned_names_of_the_model_and_of_reward_models(hub, tmp_path):
    policy, judge = push(hub, tmp_path, b"1"), push(hub, tmp_path, b"2", "org/judge")
    config, said = fetched("model.path=org/model", f"reward.models=[org/judge@main,{tmp_path}/own]")
    assert config.model.path == f"org/model@{policy}"
    assert [model.path for model in config.reward.models] == [f"org/judge@{judge}", f"{tmp_path}/own"]
    assert [model.name for model in config.reward.models] == ["judge", "own"]
    assert said == "downloading org/model\ndownloading org/judge@main\n"


def test_teachers_are_pinned_too_and_endpoints_and_the_reference_are_left_alone(hub, tmp_path):
    math, url = push(hub, tmp_path, b"1", "org/math"), "http://127.0.0.1:1/v1"
    teachers = f"algorithm.distillation.teachers=[org/math,reference,{url}]"
    words = ["algorithm=mopd", teachers, "algorithm.distillation.teacher_column=domain"]
    config, said = fetched(*words)
    assert [one.path for one in config.algorithm.distillation.teachers] == [f"org/math@{math}", "reference", url]
    assert [one.name for one in config.algorithm.distillation.teachers] == ["math", "reference", "127.0.0.1:1"]
    assert said == "downloading org/math\n"
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(config))
    push(hub, tmp_path, b"2", "org/math")
    again, _ = fetched(*words, f"trainer.output_dir={run}", "trainer.resume=auto")
    assert again.algorithm.distillation.teachers[0].path == f"org/math@{math}"


def test_a_config_without_names_is_left_alone_and_asks_nobody(hub, tmp_path):
    config, said = fetched("model.path=builtin")
    assert config == compose(["model.path=builtin", f"trainer.output_dir={config.trainer.output_dir}"])[0]
    assert said == ""
    assert fetched(f"model.path={tmp_path}/no")[0].model.path == f"{tmp_path}/no"
    assert hub.requests == []


def test_a_model_that_cannot_be_had_is_refused_by_its_key(hub):
    with pytest.raises(
        ConfigError, match=r"^reward.models: path of 'judge'=org/judge: no such directory, and no model"
    ):
        fetched("reward.models=[org/judge]")


@pytest.mark.parametrize(
    ("place", "resume"),
    [("run", "auto"), ("run", "{run}"), *((STEP, resume) for resume in ("auto", "{run}", "{run}/checkpoints", STEP))],
)
def test_a_resumed_run_keeps_the_commit_of_a_name_without_a_revision(hub, tmp_path, place, resume):
    old, judge = push(hub, tmp_path, b"old"), push(hub, tmp_path, b"judge", "org/judge")
    run, names = tmp_path / "run", ["model.path=org/model", "reward.models=[org/judge]"]
    options = [*names, f"trainer.output_dir={run}"]
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "config.yaml").write_text(to_yaml(fetched(*options)[0]))
    (run / "checkpoints" / "step_2").mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / "step_2" / "manifest.json").write_text("{}")
    new, judges_next = push(hub, tmp_path, b"new"), push(hub, tmp_path, b"next", "org/judge")
    hub_module._snapshots.clear()
    hub.requests.clear()
    again, _ = fetched(*options, f"trainer.resume={resume.format(run=run) if resume != STEP else tmp_path / STEP}")
    assert (again.model.path, again.reward.models[0].path) == (f"org/model@{old}", f"org/judge@{judge}")
    assert hub.requests == []
    named, _ = fetched("model.path=org/model@main", f"trainer.output_dir={run}", "trainer.resume=auto")
    assert named.model.path == f"org/model@{new}"
    fresh, _ = fetched(*options)
    assert fresh.reward.models[0].path == f"org/judge@{judges_next}"


def test_a_resumed_run_without_a_readable_config_takes_the_branch(hub, tmp_path):
    commit = push(hub, tmp_path, b"1")
    options = ["model.path=org/model", f"trainer.output_dir={tmp_path}/run", "trainer.resume=auto"]
    assert fetched(*options)[0].model.path == f"org/model@{commit}"
    (tmp_path / "run").mkdir()
    for content in ("{", "[1]", "model: 3", "model: {path: 3}", "reward: {models: 3}", "reward: {models: [3, {}]}"):
        (tmp_path / "run" / "config.yaml").write_text(content)
        assert fetched(*options)[0].model.path == f"org/model@{commit}"
