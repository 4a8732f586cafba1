"""Tests that a worker process loads the model that its roles need."""

import os
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from rltrain.base.errors import ConfigError
from rltrain.data import hub as hub_module
from tests.hub_server import Hub
from workers.cluster.worker_process import ALLOCATOR, OLDER_ALLOCATOR, Host

OFFLINE = {"HF_HUB_OFFLINE": "1"}  # environment variables that every worker process sets for its libraries


@pytest.fixture
def pinned(tmp_path, monkeypatch):
    """Return the name of a model that is pinned to a commit on a fake hub, which replaces the real hub in the test.

    The local model cache is empty at first.
    """
    (tmp_path / "commit").mkdir()
    (tmp_path / "commit" / "config.json").write_text("{}")
    (tmp_path / "commit" / "model.safetensors").write_bytes(b"w")
    monkeypatch.setattr(hub_module, "_snapshots", {})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("HF_HUB_OFFLINE", None)
    with Hub(tmp_path / "store") as server:
        os.environ.update(server.environment(tmp_path / "cache"))
        yield f"org/model@{server.push('org/model', tmp_path / 'commit')}"


def test_a_process_downloads_a_model_that_its_machine_does_not_have_although_its_libraries_are_offline(pinned):
    host = Host(OFFLINE, verbose=True)
    folder = Path(host.model_directory(pinned))
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_process_downloads_nothing_where_the_user_has_turned_the_network_off(pinned):
    os.environ.update(OFFLINE)
    host = Host(OFFLINE, verbose=True)
    with pytest.raises(ConfigError, match=f"^{pinned} on {socket.gethostname()}: no such directory, and .* forbids a"):
        host.model_directory(pinned)


@pytest.mark.parametrize("name", [ALLOCATOR, *sorted(OLDER_ALLOCATOR)])
def test_settings_of_the_allocator_that_the_user_has_made_are_kept(name, monkeypatch):
    monkeypatch.setattr(os, "environ", {other: value for other, value in os.environ.items() if "ALLOC" not in other})
    Host({ALLOCATOR: "expandable_segments:True"}, verbose=True)
    assert os.environ[ALLOCATOR] == "expandable_segments:True"
    del os.environ[ALLOCATOR]
    os.environ[name] = "max_split_size_mb:512"
    Host({ALLOCATOR: "expandable_segments:True"}, verbose=True)
    assert {key: value for key, value in os.environ.items() if "ALLOC" in key} == {name: "max_split_size_mb:512"}


def test_a_directory_is_itself():
    assert Host({}, verbose=True).model_directory("/models/mine") == "/models/mine"
