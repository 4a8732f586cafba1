"""Tests of weight buckets, checksums and probes: what training ranks write, and what an engine reads."""

import dataclasses
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from rltrain.base.errors import SyncError
from workers.sync import buckets, memory
from workers.sync.buckets import Bucket, join, layout, tensors_of, verify
from workers.sync.checks import check_outputs, checksum, checksum_on_gpu, probe, probe_vector
from workers.sync.memory import Reader, SharedFile, new_path, readable_elsewhere, remove_stale
from workers.sync.sender import Sender, own_rows

ROOT = Path(__file__).resolve().parents[4]

pytestmark = pytest.mark.usefixtures("process_group")


class Model(nn.Module):
    """A model with two matrices of odd sizes and a vector, where the second matrix may have two names."""

    def __init__(self, tied: bool = False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 7, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        if tied:
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.b.weight


def sent(dtype="float32", check=True, model=None, path=None) -> list[Bucket]:
    """Return all buckets that a single rank sends."""
    sender = Sender(model or Model(), version=3, dtype=dtype, check=check)
    sender.offer(path)
    return [join([sender.write(number, path)]) for number in range(len(sender.layout))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "FOLDER", tmp_path)
    return tmp_path


# Tests of buckets


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [False, True])
def test_tensors_come_out_as_they_went_in(folder, dtype, shared):
    made, reader = sent(dtype, path=new_path() if shared else None), Reader()
    out = {name: tensor for bucket in made for name, tensor in tensors_of(bucket, reader.data(bucket))}
    expected = dict(Model().named_parameters())
    assert list(out) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(out[name], tensor.detach().to(getattr(torch, dtype)))
    assert [bucket.data is None for bucket in made] == [shared]


def test_a_tensor_that_is_larger_than_a_bucket_has_one_of_its_own(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 130)
    shapes = [("a", (5, 3)), ("b", (5,)), ("c", (100, 9)), ("d", (2, 2))]
    cut = layout(shapes, itemsize=4)
    assert [[(place.name, place.start, place.size) for place in bucket] for bucket in cut] == [
        [("a", 0, 60), ("b", 64, 20)], [("c", 0, 3600)], [("d", 0, 16)]
    ]  # fmt: skip


def test_the_file_holds_two_buckets_in_turn(folder, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 70)
    path = new_path()
    sender = Sender(Model(), version=3, dtype="float32", check=True)
    assert len(sender.offer(path).takes_part) == 3
    # a slot holds the largest tensor, 7 x 5 numbers of 4 bytes, rounded up to 192 bytes
    assert os.path.getsize(path) == 2 * sender.slot == 2 * 192
    written = [sender.write(number, path) for number in range(2)]
    assert [bucket.offset for bucket in written] == [0, 192]
    assert os.path.exists(path)
    third = sender.write(2, path)
    assert third.offset == 0
    # the file's name is already removed, because sender and readers have opened the file
    assert not os.path.exists(path)
    reader = Reader()
    reader.file = sender.file
    (name, tensor), = tensors_of(third, reader.data(third))  # fmt: skip
    assert name == "b.weight"
    assert torch.equal(tensor, Model().b.weight)


# Tests of several ranks


def of_ranks(size: int, shared: bool) -> tuple[Bucket, dict[str, torch.Tensor]]:
    """Return a bucket that `size` ranks have written, and the unsharded tensors that the bucket contains.

    The rows of each tensor are split over ranks as torch.chunk splits them.
    """
    path, parts, whole = new_path() if shared else None, [], dict(Model().named_parameters())
    for rank in range(size):
        sender = Sender(Model(), version=3, dtype="float32", check=True)
        sender.first = rank == 0
        sender.offer(path)
        chunks = {name: list(p.detach().chunk(size)) for name, p in whole.items()}
        held = {name: cut[rank] if rank < len(cut) else p.detach()[:0] for (name, p), cut in
                zip(whole.items(), chunks.values(), strict=True)}  # fmt: skip
        first = {name: sum(map(len, cut[:rank])) for name, cut in chunks.items()}
        sender.parameters = {name: (held[name], first[name]) if len(held[name]) else None for name in held}
        parts.append(sender.write(0, path))
    return join(parts), whole


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_rows_of_all_ranks_make_whole_tensors_checksums_and_probes(folder, monkeypatch, size, shared):
    monkeypatch.setattr("workers.sync.sender.own_rows", lambda own, first: own)
    bucket, whole = of_ranks(size, shared)
    data = Reader().data(bucket)
    verify(bucket, data)
    for name, tensor in tensors_of(bucket, data):
        assert torch.equal(tensor, whole[name])
        assert torch.allclose(torch.from_numpy(bucket.probes()[name]), probe(whole[name]), rtol=1e-6)


def test_rows_that_no_rank_sent_are_missed(monkeypatch):
    (bucket,) = sent()
    with pytest.raises(SyncError, match=r"shards of 'a\.bias' from all ranks have gaps or overlaps \(0 bytes"):
        join([dataclasses.replace(bucket, pieces=[p for p in bucket.pieces if p.name != "a.bias"])])
    with pytest.raises(SyncError, match="have gaps or overlaps"):
        join([bucket, bucket])


def test_what_is_cut_by_rows_is_sent_by_who_holds_it_and_the_rest_by_the_first_rank():
    mesh, matrix = init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards")), torch.ones(4, 2)

    def rows(*placements):
        return own_rows(DTensor.from_local(matrix, mesh, placements), False)

    assert torch.equal(rows(Replicate(), Shard(0))[0], matrix)
    assert rows(Replicate(), Shard(0))[1] == 0
    # a tensor that is not sharded by rows is gathered, and only the first rank sends the tensor
    assert rows(Replicate(), Shard(1)) is None
    assert rows(Shard(0), Shard(1)) is None
    assert rows(Shard(0), Shard(0))[1] == 0
    assert own_rows(matrix, False) is None
    assert own_rows(matrix, True) == (matrix, 0)


RANGES = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from workers.sync.sender import is_gathered, row_range

for rank in range(4):
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    def sharded(rows, dim=0):
        local = torch.ones(*[(3, 2), (2, 2)][rank % 2]) if rows == 5 else torch.ones(1 - rank % 2, 2)
        shape = torch.Size([rows, 2])
        return DTensor.from_local(local, mesh, (Replicate(), Shard(dim)), run_check=False, shape=shape, stride=(2, 1))
    many, one, columns = sharded(5), sharded(1), sharded(5, dim=1)
    print(rank, row_range(many, rank == 0), row_range(one, rank == 0), is_gathered(many), is_gathered(columns))
    dist.destroy_process_group()
"""


def test_only_the_ranks_of_one_copy_that_hold_rows_take_part_in_a_bucket():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RANGES], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "0 (0, 3) (0, 1) False True", "1 (3, 2) None False True", "2 None None False True", "3 None None False True",
    ]  # fmt: skip


def test_a_sender_takes_part_in_the_buckets_in_which_it_has_rows_or_must_gather(monkeypatch):
    sender = Sender(Model(), version=3, dtype="float32", check=True)
    assert sender.offer(None).takes_part == [True] * len(sender.layout)
    sender.first = False
    assert sender.offer(None).takes_part == [False] * len(sender.layout)
    monkeypatch.setattr("workers.sync.sender.is_gathered", lambda parameter: True)
    assert sender.offer(None).takes_part == [True] * len(sender.layout)


# Tests of the checksums and probes that detect wrong weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_E5_any_flipped_bit_is_seen_also_after_a_trip_through_pickle(dtype):
    (bucket,) = sent(dtype)
    verify(bucket, bucket.data)
    places = [place.start + byte for place in bucket.places for byte in range(0, place.size, 3)]
    for byte in places:
        broken = pickle.loads(pickle.dumps(bucket))
        broken.data = broken.data.clone()
        broken.data[byte] ^= 1
        with pytest.raises(SyncError, match="are not those that the actor sent"):
            verify(broken, broken.data)


def test_E5_checksum_and_probe_are_those_of_the_whole_whatever_is_copied_at_once(monkeypatch):
    model = nn.Linear(3, 101)  # each row of the weight has 3 numbers of 4 bytes, which is 12 bytes
    (whole,) = sent(model=model)
    monkeypatch.setattr("workers.sync.sender.CHUNK_BYTES", 100)
    (chunked,) = sent(model=model)
    assert [p.checksum for p in chunked.pieces] == [p.checksum for p in whole.pieces]
    for name, value in whole.probes().items():
        assert np.allclose(chunked.probes()[name], value, rtol=1e-6, atol=1e-6)


def test_a_stack_of_matrices_has_the_products_of_all_its_matrices(monkeypatch):
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(5, 7, 3))
    monkeypatch.setattr("workers.sync.sender.CHUNK_BYTES", 100)
    (bucket,) = sent(model=model)
    verify(bucket, bucket.data)
    expected = torch.cat([probe(matrix.detach()) for matrix in model.experts])
    assert torch.allclose(torch.from_numpy(bucket.probes()["experts"]), expected, rtol=1e-6, atol=1e-6)
    ((_, tensor),) = tensors_of(bucket, bucket.data)
    assert torch.equal(tensor, model.experts)


def test_without_checks_nothing_is_computed_for_them():
    (bucket,) = sent(check=False)
    assert {(piece.checksum, piece.probe) for piece in bucket.pieces} == {(None, None)}
    assert bucket.probes() == {}


@pytest.mark.parametrize("function", [checksum, checksum_on_gpu])
def test_the_checksum_is_the_sum_of_words_and_counts_odd_bytes(function):
    def of(values):
        return function(torch.tensor(values, dtype=torch.uint8))

    assert of([1, *[0] * 7, 2, *[0] * 7, 5, 6]) == 14
    assert of([7]) == 7
    assert of([255] * 16) == 2**64 - 2
    # The first tensor does not begin at an aligned address.
    assert function(torch.arange(17, dtype=torch.uint8)[1:]) == of(list(range(1, 17)))


def test_a_probe_is_the_matrix_times_a_vector_that_the_dtype_represents():
    matrix = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    v = probe_vector(2)
    assert torch.allclose(probe(matrix), torch.stack([v[0] + 2 * v[1], -v[1]]))
    coarse = probe_vector(64, torch.bfloat16)
    assert torch.equal(coarse, coarse.to(torch.bfloat16).float())


def test_tied_names_are_checked_under_both_names():
    (bucket,) = sent(model=Model(tied=True))
    probes = bucket.probes()
    assert [place.name for place in bucket.places] == ["a.weight", "a.bias", "b.weight"]
    assert np.array_equal(probes["head.weight"], probes["b.weight"])
    outputs = {name: torch.as_tensor(value) for name, value in probes.items()}
    check_outputs(outputs, probes, version=1, dtype="float32")
    stale = outputs | {"head.weight": outputs["head.weight"] * 1.001}
    with pytest.raises(SyncError, match=r"'head.weight'"):
        check_outputs(stale, probes, version=1, dtype="float32")


def test_quantized_tensors_have_a_larger_tolerance_of_their_own():
    (bucket,) = sent()
    probes = bucket.probes()
    exact = {name: torch.as_tensor(value) for name, value in probes.items()}

    def check(name, factor):
        changed = exact | {name: exact[name] * factor}
        check_outputs(changed, probes, version=1, dtype="bfloat16", quantized={"a.weight"})

    check("a.weight", 1.19)
    check("b.weight", 1.01)
    with pytest.raises(SyncError, match=r"'a.weight' \(relative error 0.22, limit 0.2\)"):
        check("a.weight", 1.22)
    with pytest.raises(SyncError, match=r"'b.weight' \(relative error 0.09, limit 0.02\)"):
        check("b.weight", 1.09)


@pytest.mark.parametrize("change", ["missing", "extra", "nan", "shape"])
def test_an_engine_that_shows_other_layers_or_nonsense_is_refused(change):
    (bucket,) = sent()
    probes = bucket.probes()
    outputs = {name: torch.as_tensor(value).clone() for name, value in probes.items()}
    if change == "missing":
        del outputs["a.bias"]
    elif change == "extra":
        outputs["c.weight"] = torch.zeros(2)
    elif change == "nan":
        outputs["a.bias"][0] = torch.nan
    else:
        outputs["a.bias"] = torch.zeros(2)
    with pytest.raises(SyncError):
        check_outputs(outputs, probes, version=1, dtype="float32")


# Tests of the file in shared memory


def test_the_file_is_this_users_alone_and_goes_with_its_sender(folder):
    path = new_path()
    sender = Sender(Model(), version=3, dtype="float32", check=True)
    made = sender.offer(path)
    assert (made.where, made.has_file) == (memory.whereabouts(), True)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(FileExistsError):
        SharedFile(path, 10)
    sender.close()
    assert list(folder.iterdir()) == []


def test_a_file_whose_processes_died_is_removed_by_the_next_sync_and_one_in_use_is_not(folder):
    used, dead, other = new_path(), new_path(), folder / "somebody-elses"
    other.write_text("kept")
    holder = SharedFile(used, 100)
    code = f"from workers.sync.memory import SharedFile; import os; SharedFile({dead!r}, 100); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert os.path.exists(dead)
    remove_stale()
    assert sorted(map(str, folder.iterdir())) == sorted([used, str(other)])
    del holder
    remove_stale()
    assert list(folder.iterdir()) == [other]


def test_without_room_for_the_file_the_bytes_go_with_the_calls(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender = Sender(Model(), version=3, dtype="float32", check=True)
    assert not sender.offer(new_path()).has_file
    assert list(folder.iterdir()) == []
    (bucket,) = sent()
    with pytest.raises(SyncError, match=r"no room for a bucket of \d+ bytes"), readable_elsewhere(bucket):
        pass


def test_the_processes_of_an_engine_read_a_bucket_from_a_file_that_goes_afterwards(folder):
    (bucket,) = sent()
    with readable_elsewhere(bucket) as lent:
        assert len(list(folder.iterdir())) == 1
        assert torch.equal(Reader().data(pickle.loads(pickle.dumps(lent))), bucket.data)
        assert len(pickle.dumps(lent)) < len(pickle.dumps(bucket))
    assert list(folder.iterdir()) == []
    with pytest.raises(SyncError, match="cannot be opened"):
        Reader().data(lent)
