"""Tests that a rank loads the state that the rank has saved, and that no code in a file of unknown origin runs."""

import io
import os
import pickle
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltrain import export
from rltrain.base.errors import CheckpointError
from rltrain.base.storage import Folder
from rltrain.run.checkpoints import Checkpoints
from rltrain.settings.compose import compose
from tests.policy_weights import merged_weights
from workers.models import policy_export
from workers.models.fsdp import full
from workers.models.policy_export import Share, export_model
from workers.models.state_files import INDEX, StateFiles, _Unpickler, read_index
from workers.training.actor import ActorWorker
from workers.training.critic import CriticWorker

pytestmark = pytest.mark.usefixtures("process_group")
LORA = "model.lora={rank:4,targets:[q_proj,down_proj]}"


def actor(start, *overrides) -> ActorWorker:
    return ActorWorker(compose(["placement=inprocess", "rollout=hf", *overrides])[0], start)


def learn(made, steps=2):
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in made.optimizer.parameters:
            parameter.grad = torch.randn_like(parameter)
        made.optimizer.step()


def write(made, url) -> dict:
    """Save the state, wait until the save ends, and return the written files."""
    made.save_state(str(url))
    while (found := made.saved_state()) is None:
        time.sleep(0.01)
    assert found.error == ""
    return found.files


class Alone:
    """A fake worker group of one rank."""

    def __init__(self, worker):
        self.worker = worker

    async def call(self, method, *arguments):
        return [getattr(self.worker, method.__name__)(*arguments)]


def copies(made):
    return {name: tensor.clone() for name, tensor in made.state.tensors().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_each_tensor_that_is_loaded_counts_as_progress(start, tmp_path, monkeypatch):
    made, ticks = actor(start), []
    write(made, tmp_path)
    monkeypatch.setattr("workers.training.rank_state.tick", lambda: ticks.append(1))
    made.load_state(str(tmp_path))
    assert len(ticks) >= len(made.state.tensors()) > 100


@pytest.mark.parametrize("overrides", [[], [LORA]])
@pytest.mark.parametrize("steps", [0, 2])
def test_F4_weights_moments_and_schedule_come_back_bitwise_and_the_next_update_is_the_same(
    start, tmp_path, overrides, steps
):
    made = actor(start, *overrides)
    learn(made, steps)
    before = copies(made)
    write(made, tmp_path)
    learn(made, 3)
    other = actor(start, *overrides)
    learn(other, 1)
    other.load_state(str(tmp_path))
    assert other.optimizer.steps == steps
    assert same(copies(other), before)
    learn(other, 3)
    assert same(copies(other), copies(made))


@pytest.mark.parametrize(("kind", "method"), [(ActorWorker, "compute_log_probs"), (CriticWorker, "compute_values")])
def test_F4_after_a_forward_pass_alone_the_state_is_that_of_before(start, sampled_batch, kind, method):
    made = kind(compose(["placement=inprocess", "rollout=hf", "model.dtype=bfloat16"])[0], start)
    for parameter in made.optimizer.parameters:
        parameter.grad = parameter.detach() + 1
    made.optimizer.step()
    before = {name: full(tensor).clone() for name, tensor in made.state.tensors().items()}
    getattr(made, method)(sampled_batch, [[0, 1], [2]])
    after = {name: full(tensor) for name, tensor in made.state.tensors().items()}
    assert all(after[name].dtype == tensor.dtype for name, tensor in before.items())
    assert same(after, before)


def test_weights_gathered_for_a_pass_are_never_saved_for_those_that_are_trained(start):
    made = actor(start, "model.dtype=bfloat16")
    made.model.unshard()
    with pytest.raises(AssertionError, match="is not sharded"):
        made.state.tensors()


def test_without_a_checkpoint_a_rank_goes_back_to_its_start(start):
    made = actor(start)
    before = copies(made)
    learn(made)
    made.load_state(None)
    assert same(copies(made), before)


def test_what_is_saved_is_the_moment_of_the_call_however_the_weights_move_while_it_is_written(start, tmp_path):
    made = actor(start)
    before = copies(made)
    made.save_state(str(tmp_path))
    learn(made)
    while made.saved_state() is None:
        time.sleep(0.01)
    saved = StateFiles(Folder(str(tmp_path / "state/actor")))
    assert all(torch.equal(saved.tensor(name), tensor) for name, tensor in before.items())


@pytest.mark.parametrize("shard_bytes", [4 << 30, 200_000])
@pytest.mark.parametrize("overrides", [[], [LORA]])
def test_the_export_is_the_model_for_transformers_in_one_file_or_several(
    start, tmp_path, overrides, shard_bytes, monkeypatch
):
    monkeypatch.setattr(policy_export, "SHARD_BYTES", shard_bytes)
    made = actor(start, *overrides)
    learn(made)
    files = write(made, tmp_path)
    assert len([name for name in files if name.startswith("model/model")]) > 1 or shard_bytes > 1 << 30
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32
    weights = merged_weights(made.model)
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in weights.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("12=")["input_ids"] == AutoTokenizer.from_pretrained(start)("12=")["input_ids"]
    assert {name: Folder(str(tmp_path)).checksum(name) for name in files} == files
    if overrides:
        from peft import PeftModel

        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), tmp_path / "model/adapter")
        for name, tensor in peft.merge_and_unload().named_parameters():
            assert (tensor - weights[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize("overrides", [[], [LORA]])
def test_the_shares_of_several_ranks_together_are_the_export_of_one_rank(start, tmp_path, overrides, monkeypatch):
    monkeypatch.setattr(policy_export, "SHARD_BYTES", 100_000)
    made = actor(start, *overrides)
    write(made, tmp_path)
    state, folder = StateFiles(Folder(str(tmp_path / "state/actor"))), Folder(str(tmp_path / "shares"))
    written = [export_model(state, made.state.small, made.model, folder, Share(rank, 3)) for rank in range(3)]
    assert all(len(names) > 1 for names in written)
    names = [name for one in written for name in one]
    whole = tmp_path / "model"
    assert sorted(names) == sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    assert len(set(names)) == len(names)
    assert all((tmp_path / "shares" / name).read_bytes() == (whole / name).read_bytes() for name in names)


def test_a_checkpoint_of_another_model_is_refused(start, tmp_path):
    write(actor(start, LORA), tmp_path)
    with pytest.raises(CheckpointError, match="is from another model, where 'model"):
        actor(start).load_state(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        actor(start).load_state(str(tmp_path / "nowhere"))


def test_any_file_system_will_do(start):
    made = actor(start)
    learn(made)
    before = copies(made)
    files = write(made, "memory://rank/state")
    assert "model/model.safetensors" in files
    made.load_state(None)
    made.load_state("memory://rank/state")
    assert same(copies(made), before)


def test_a_full_disk_is_told_in_one_line(start):
    made = actor(start)
    made.save_state("/dev/full/x")
    while (found := made.saved_state()) is None:
        time.sleep(0.01)
    assert "Not a directory" in found.error
    assert "\n" not in found.error


@pytest.fixture
def small_disk(tmp_path):
    """Mount a separate disk of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"cannot mount a disk: {error}")
    if done.returncode:
        pytest.skip(f"cannot mount a disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_on_a_full_disk_the_run_goes_on_the_checkpoint_before_stays_and_the_reason_is_said(
    start, small_disk, caplog
):
    made = actor(start)
    checkpoints = Checkpoints(Folder(str(small_disk)), "a: 1", keep=0, best=None)
    for step in (1, 2):  # one checkpoint takes 7 MB of the 8 MB disk
        await checkpoints.start(step, 0, {"actor": Alone(made)}, {}, history={}, metrics={})
        await checkpoints.finish()
        learn(made)
    assert os.listdir(small_disk) == ["step_1"]
    assert checkpoints.newest().step == 1
    (said,) = (record.message for record in caplog.records if record.name.startswith("rltrain"))
    assert said.startswith(f"{small_disk}/step_2: not saved, ")
    assert "No space left on device" in said or "the disk seems to be full" in said


# Tests of files of unknown origin


class Evil:
    """An object that runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.system, (f"touch {self.mark}",))


def index(folder: Path, content) -> Folder:
    (folder / INDEX).write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return Folder(str(folder))


def test_a_hostile_index_is_refused_in_one_line_and_runs_nothing(tmp_path):
    mark = tmp_path / "ran"
    for content in (Evil(mark), Metadata({}, planner_data=Evil(mark), storage_data={})):
        with pytest.raises(CheckpointError, match=r"\.metadata: refused, the pickle asks for posix.system") as caught:
            read_index(index(tmp_path, content))
        assert "\n" not in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", b"\x80\x04.", {"a": 1}, Metadata({"x": BytesStorageMetadata()}, storage_data={}),
     Metadata({}), Metadata({}, storage_data={MetadataIndex("x"): _StorageInfo("../../secret", 0, 1)}),
     Metadata({}, storage_data={MetadataIndex("x"): _StorageInfo("__0_0.distcp", -1, 1)})],
)  # fmt: skip
def test_an_index_of_anything_but_tensors_beside_it_is_refused(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"\.metadata: refused"):
        read_index(index(tmp_path, content))


def test_tensors_are_read_without_running_what_is_in_them(start, tmp_path):
    made, mark = actor(start), tmp_path / "ran"
    write(made, tmp_path)
    folder = Folder(str(tmp_path / "state/actor"))
    files = StateFiles(folder)
    evil = tmp_path / "evil.pt"
    torch.save(Evil(mark), evil)
    for place in files.index.storage_data.values():
        place.relative_path, place.offset, place.length = "evil.pt", 0, evil.stat().st_size
    evil.rename(tmp_path / "state/actor/evil.pt")
    (tmp_path / "state/actor" / INDEX).write_bytes(pickle.dumps(files.index))
    with pytest.raises(pickle.UnpicklingError):
        StateFiles(folder).tensor("schedule")
    with pytest.raises(CheckpointError):
        made.load_state(str(tmp_path))
    assert not mark.exists()


# Tests of the export with `python -m rltrain.export`


async def test_the_command_exports_a_checkpoint_and_refuses_others(start, tmp_path, capsys):
    made = actor(start)
    learn(made)
    checkpoints = Checkpoints(Folder(str(tmp_path / "checkpoints")), "a: 1", keep=0, best=None)
    await checkpoints.start(3, 0, {"actor": Alone(made)}, {}, history={}, metrics={})
    await checkpoints.finish()
    folder, out = tmp_path / "checkpoints/step_3", tmp_path / "out"
    assert export.main([str(folder), str(out)]) == 0
    weights = merged_weights(made.model)
    for name, tensor in AutoModelForCausalLM.from_pretrained(out).named_parameters():
        assert torch.equal(tensor, weights[name])
    assert export.main([str(folder), str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert export.main([str(tmp_path), str(tmp_path / "new")]) == 1
    assert "holds no manifest.json" in capsys.readouterr().err
    assert export.main([]) == 2
    assert "usage:" in capsys.readouterr().err


async def test_adapters_are_not_exported_onto_a_model_that_is_not_whole_any_more(start, tmp_path, capsys):
    base, name = Path(shutil.copytree(start, tmp_path / "base")), "model.layers.0.mlp.up_proj.weight"
    made = actor(str(base), "model.lora={rank:2,alpha:4,targets:[q_proj]}")
    checkpoints = Checkpoints(Folder(str(tmp_path / "checkpoints")), "a: 1", keep=0, best=None)
    await checkpoints.start(1, 0, {"actor": Alone(made)}, {}, history={}, metrics={})
    await checkpoints.finish()
    tensors = load_file(base / "model.safetensors")
    save_file({one: tensor for one, tensor in tensors.items() if one != name}, base / "model.safetensors")
    assert export.main([str(tmp_path / "checkpoints/step_1"), str(tmp_path / "out")]) == 2
    assert f"its weights lack {name}, so they do not match the Qwen2ForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_index_as_other_releases_of_python_pickle_it_is_read_and_no_other_attribute_is_given(tmp_path):
    layout = _MEM_FORMAT_ENCODING

    class Asks:
        def __init__(self, *what):
            self.what = what

        def __reduce__(self):
            return getattr, self.what

    assert _Unpickler(io.BytesIO(pickle.dumps(Asks(layout, "TORCH_CONTIGUOUS_FORMAT")))).load() is next(iter(layout))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused, the pickle asks for an attribute"):
        read_index(index(tmp_path, Asks(torch.Size, "mro")))
