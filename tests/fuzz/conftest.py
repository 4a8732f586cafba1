"""A model, a reward and a working directory for command lines."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A tiny random language model with the built-in tokenizer."""
    import torch

    from rltrain.tasks.tiny_model import tiny_model
    from rltrain.tasks.tokenizer import char_tokenizer

    path = tmp_path_factory.mktemp("models") / "model"
    with torch.random.fork_rng(devices=[]):
        tiny_model().save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return str(path)


def furnished(folder: Path) -> Path:
    """A run, a file of prompts and a reward in a folder."""
    run = folder / "old_run"
    (run / "rollouts").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "config.yaml").write_text("trainer: {}\n")
    (run / "rollouts" / "step_000001.parquet").write_bytes(b"PAR1")
    (folder / "afile").write_text("text\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "1 2 3", "answer": "2"}\n')
    (folder / "my_reward.py").write_text("def score(prompt, response):\n    return 1.0\n")
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working directory of one test."""
    monkeypatch.chdir(tmp_path)
    return furnished(tmp_path)


@pytest.fixture(scope="module")
def here_once(tmp_path_factory):
    """The working directory of all cases of a test."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("here")
        patch.chdir(folder)
        yield furnished(folder)
