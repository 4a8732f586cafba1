"""Fixtures for tests of command lines: a model, a reward function and a working directory."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """Save a tiny random language model with the built-in tokenizer."""
    import torch

    from rltrain.tasks.tiny_model import tiny_model
    from rltrain.tasks.tokenizer import char_tokenizer

    path = tmp_path_factory.mktemp("models") / "model"
    with torch.random.fork_rng(devices=[]):
        tiny_model().save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Make a new working directory for one test."""
    from harness import furnished

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Tests compare the files in the folder.
    return furnished(tmp_path)


@pytest.fixture(scope="module")
def here_once(tmp_path_factory):
    """Make one working directory for all cases of a test."""
    from harness import furnished

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("here")
        patch.chdir(folder)
        patch.setattr(sys, "dont_write_bytecode", True)  # Tests compare the files in the folder.
        yield furnished(folder)
