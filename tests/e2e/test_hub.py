"""Training a model given by its hub name, which is downloaded once, used offline, and keeps its commit on resume."""

import os
import re
import shutil

import pytest
import yaml
from runs import Run, train

from rltrain.tasks import TASKS
from rltrain.tasks.tiny_model import make_start
from tests.hub_server import Hub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
QUICK = [
    "profile=demo",
    "placement=inprocess", "rollout=hf", "trainer.prompts_per_step=4", "trainer.prompts_per_minibatch=2",
    "rollout.samples_per_prompt=4", "data.val=null", "algorithm.kl_loss.kl_loss_coef=0.1",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a folder with the built-in tiny model after a few training steps."""
    return make_start(TASKS["median"], tmp_path_factory.mktemp("models") / "start", seed=0, steps=12)


@pytest.fixture
def hub(made, tmp_path, monkeypatch):
    """Serve a local hub with the model org/tiny.

    All processes that the test starts use the local hub and a download cache of their own.
    """
    with Hub(tmp_path / "store") as server:
        server.push("org/tiny", made)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        for name, value in server.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        yield server


def moved(hub: Hub, made, tmp_path) -> str:
    """Move the branch `main` of org/tiny to a new commit, and return the commit's hash."""
    shutil.copytree(made, tmp_path / "next")
    (tmp_path / "next" / "README.md").write_text("next")
    return hub.push("org/tiny", tmp_path / "next")


def model_of(run: Run) -> str:
    return yaml.safe_load((run.output / "config.yaml").read_text())["model"]["path"]


def test_a_model_by_name_trains_and_is_pinned_in_every_run_that_goes_on_with_it(hub, made, tmp_path, monkeypatch):
    first = train(tmp_path / "run", *QUICK, "model.path=org/tiny", "trainer.total_steps=1")
    assert first.status == 0, first.stderr
    pinned = model_of(first)
    assert re.fullmatch("org/tiny@[0-9a-f]{40}", pinned)
    assert "downloading org/tiny\n" in first.stdout
    assert f"model      {pinned}; 411k parameters" in first.stdout
    weights = [request for request in hub.requests if request.path.startswith("/cdn") and request.method == "GET"]
    assert len(weights) == 1, "downloaded more than once"

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    offline = train(tmp_path / "offline", *QUICK, "model.path=org/tiny", "trainer.total_steps=1")
    assert offline.status == 0, offline.stderr
    assert model_of(offline) == pinned
    monkeypatch.delenv("HF_HUB_OFFLINE")

    commit = moved(hub, made, tmp_path)
    more = [*QUICK, "trainer.resume=auto", "trainer.total_steps=2"]
    other = train(tmp_path / "run", *more, "model.path=org/tiny@main")
    assert other.status == 2
    assert f"model.path=org/tiny@{commit}: the checkpoint has {pinned}, and another value" in other.stderr
    hub.requests.clear()
    resumed = train(tmp_path / "run", *more, "model.path=org/tiny")
    assert resumed.status == 0, resumed.stderr
    assert model_of(resumed) == pinned
    assert len(resumed.metrics()) == 2
    assert hub.requests == []


def test_a_model_that_cannot_be_had_ends_the_start_in_one_line(hub, tmp_path):
    refused = train(tmp_path / "run", *QUICK, "model.path=outputs/x")
    assert (refused.status, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: model.path=outputs/x: no such directory, and no model of that name on {hub.url}; ")
    assert not (tmp_path / "run").exists()


@pytest.mark.broad
def test_ranks_and_engines_in_processes_of_their_own_use_the_downloaded_model(hub, tmp_path):
    under_ray = [option for option in QUICK if option != "placement=inprocess"]
    run = train(tmp_path / "run", *under_ray, "placement=local", "model.path=org/tiny", "trainer.total_steps=1")
    assert run.status == 0, run.stderr
    assert run.survivors == []
    weights = [request for request in hub.requests if request.path.startswith("/cdn") and request.method == "GET"]
    assert len(weights) == 1, "downloaded more than once"
    assert os.listdir(tmp_path / "cache" / "hub")
