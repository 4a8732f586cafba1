import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain.base.cache_folder import cache_root
from rltrain.tasks import TASKS, tiny_model
from rltrain.tasks.tiny_model import IGNORED, cached_start, make_start, messy_batch
from rltrain.tasks.tokenizer import EOS_ID, PAD_ID

MEDIAN = TASKS["median"]
STEPS = 2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_the_model_has_the_promised_size() -> None:
    model = tiny_model.tiny_model()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2) == 0.41
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == 128
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        make_start(MEDIAN, tmp_path / name, seed=seed, steps=STEPS)
    first, again, other = (contents(tmp_path / name) for name in "abc")
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]


def test_the_callers_random_state_and_thread_count_neither_matter_nor_change(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for name, seed, count in [("a", 1, 1), ("b", 2, 2)]:
            torch.manual_seed(seed)
            torch.set_num_threads(count)
            before = torch.get_rng_state()
            make_start(MEDIAN, tmp_path / name, seed=0, steps=STEPS)
            assert torch.equal(torch.get_rng_state(), before)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_the_start_is_a_hugging_face_directory_without_sampling_surprises(tmp_path: Path) -> None:
    path = make_start(TASKS["sort"], tmp_path / "start", seed=0, steps=STEPS)
    defaults = json.loads((path / "generation_config.json").read_text())
    assert set(defaults) == {"eos_token_id", "pad_token_id", "transformers_version"}
    assert (defaults["eos_token_id"], defaults["pad_token_id"]) == (EOS_ID, PAD_ID)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.dtype == torch.float32
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    ids = model.generate(**tokenizer("371924>", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert ids[0, :7].tolist() == [ord(character) for character in "371924>"]


def test_progress_is_told_after_every_step(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_start(MEDIAN, tmp_path / "start", seed=0, steps=3, on_step=lambda done, steps: seen.append((done, steps)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_an_existing_path_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(FileExistsError, match="remove this path, or choose another"):
        make_start(MEDIAN, tmp_path / "mine", seed=0, steps=STEPS)
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_an_interrupted_start_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_start(MEDIAN, tmp_path / "start", seed=0, steps=STEPS, on_step=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_supervised_rows_are_prompt_answer_and_end() -> None:
    parts = messy_batch(MEDIAN, MEDIAN.tokenizer(), Random(0), 64)
    batch = [rows.ids for rows in parts]
    assert sum(len(ids) for ids in batch) == 64
    for rows in parts:
        assert (rows.labels[:, :8] == IGNORED).all()
        assert torch.equal(rows.labels[:, 8:], rows.ids[:, 8:])
        assert not rows.images
    # the three answers are a guess, an answer with a scratch pad, and an answer that never ends
    assert [ids.shape[1] for ids in batch] == [11, 18, 24]
    for ids in batch:
        assert (ids[:, 7] == ord("=")).all()
    for ids in batch[:2]:
        assert (ids[:, -1] == EOS_ID).all()
        assert (ids[:, :-1] != EOS_ID).all()
    assert (batch[2] != EOS_ID).all()


def test_the_loss_is_that_of_the_answers_tokens_alone() -> None:
    model = tiny_model.tiny_model()
    rows = messy_batch(MEDIAN, MEDIAN.tokenizer(), Random(0), 8)[0]
    ids = rows.ids
    with torch.no_grad():
        log_probs = model(input_ids=ids).logits.double().log_softmax(-1)
        loss = tiny_model._answer_loss(model, rows, None)
    expected = -sum(log_probs[row, t - 1, ids[row, t]] for row in range(len(ids)) for t in range(8, ids.shape[1]))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_a_cached_start_is_made_once(cache: Path) -> None:
    calls: list[int] = []
    paths = [cached_start(MEDIAN, steps=STEPS, on_step=lambda done, _: calls.append(done)) for _ in range(2)]
    assert calls == [1, 2]
    assert paths[0] == paths[1]
    assert paths[0].is_relative_to(cache)
    assert (paths[0] / "model.safetensors").is_file()


def test_the_task_the_seed_and_the_recipe_are_in_the_caches_key(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [
        cached_start(MEDIAN, steps=STEPS),
        cached_start(MEDIAN, seed=1, steps=STEPS),
        cached_start(MEDIAN, steps=1),
        cached_start(TASKS["sort"], steps=STEPS),
    ]
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    paths.append(cached_start(MEDIAN, steps=STEPS))
    assert len(set(paths)) == 5


def test_two_that_make_the_same_start_at_once_both_get_it(cache: Path) -> None:
    """A nested call stands for a second process, which finishes before the first process saves its model."""
    others: list[Path] = []
    whole: list[dict[str, bytes]] = []

    def overtake(done: int, steps: int) -> None:
        if done == steps:
            others.append(cached_start(MEDIAN, steps=STEPS))
            whole.append(contents(others[0]))

    path = cached_start(MEDIAN, steps=STEPS, on_step=overtake)
    assert others == [path]
    assert list(path.parent.iterdir()) == [path]  # no temporary folder is left behind
    assert contents(path) == whole[0]


def test_two_processes_that_make_the_same_start_at_once_both_get_it(cache: Path) -> None:
    imports = "from rltrain.tasks import TASKS; from rltrain.tasks.tiny_model import cached_start"
    script = f"{imports}; print(cached_start(TASKS['sort'], steps={STEPS}))"
    workers = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (worker.communicate(timeout=120)[0] for worker in workers)
    assert [worker.returncode for worker in workers] == [0, 0]
    assert first == second
    path = Path(first.strip())
    assert list(path.parent.iterdir()) == [path]
    AutoModelForCausalLM.from_pretrained(path)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RLTRAIN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "rltrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_root() == Path("/shared/rltrain")
    monkeypatch.setenv("RLTRAIN_CACHE", "/own")
    assert cache_root() == Path("/own")
