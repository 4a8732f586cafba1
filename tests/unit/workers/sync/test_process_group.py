"""Tests of weight transfers through a process group, whose members are threads connected over the loopback device."""

import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import ProcessGroupGloo

from rltrain.base.errors import SyncError, SyncStopped
from workers.sync import process_group
from workers.sync.buckets import Bucket, Piece, Place, verify
from workers.sync.checks import checksum
from workers.sync.memory import FOLDER, PREFIX, Reader
from workers.sync.process_group import (
    GroupPlan,
    Member,
    decoded,
    encoded,
    packed,
    receive_buckets,
    send_parts,
    serve_store,
)

ROWS, WIDTH, BUCKETS = 6, 32, 5
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def store():
    return serve_store("127.0.0.1")


def expected_bytes(number, rows):
    return torch.cat([torch.full((WIDTH,), 10 * number + int(row), dtype=torch.uint8) for row in rows])


def part(number, rank, ranks):
    """Return one rank's rows of bucket `number`, which has a single matrix "w" of ROWS rows of WIDTH bytes."""
    rows = np.array_split(np.arange(ROWS), ranks)[rank]
    data = expected_bytes(number, rows)
    probe = np.array([number + row / 10 for row in rows], np.float32)
    piece = Piece("w", int(rows[0]) * WIDTH, len(data), checksum(data), probe)
    padded = torch.zeros(len(data) + -len(data) % 64, dtype=torch.uint8)
    padded[: len(data)] = data
    place = Place("w", (ROWS, WIDTH // 4), 0, ROWS * WIDTH)
    return Bucket(3, "float32", [place], {"tied": "w"}, [piece], padded)


def plan_of(store, ranks, engines, takes_part=None, **kwargs):
    takes_part = [[True] * BUCKETS] * ranks if takes_part is None else takes_part
    return GroupPlan("sync", store.host, store.port, ranks, engines, packed(takes_part), BUCKETS, **kwargs)


class Ranks:
    """Stands for the collective operations of the ranks, each of which runs in a thread of this process."""

    def __init__(self, count):
        self.barrier, self.failures = threading.Barrier(count, timeout=LIMIT_S), []

    def agree(self, failure):
        """Raise an exception in all threads if one passes a failure, as `sender.raise_on_all_ranks` does for ranks."""
        if failure is not None:
            self.failures.append(failure)
        self.barrier.wait()
        failed = bool(self.failures)
        self.barrier.wait()  # No rank adds a failure of the next round before all ranks have read this one.
        if failure is not None:
            raise failure
        if failed:
            raise SyncStopped("another rank gave up")


class Run:
    """Runs each member of a process group in a thread of this process.

    `outcomes` maps the number of each member to the member's result or error.
    """

    def __init__(self, plan, *, write=None, load=None, agree=None):
        self.plan, self.write, self.load, self.outcomes = plan, write or self.whole, load or (lambda *_: None), {}
        self.agree = agree
        self.threads = [threading.Thread(target=self.member, args=(n,), daemon=True) for n in range(plan.size)]

    def whole(self, number, rank):
        return part(number, rank, self.plan.ranks)

    def member(self, number):
        try:
            if number < self.plan.ranks:
                send_parts(self.plan, number, lambda bucket: self.write(bucket, number), agree=self.agree)
                self.outcomes[number] = None
                return
            place, found = number - self.plan.ranks, []

            def load(bucket):
                self.load(place, len(found))
                # A bucket that a rank lends is readable only until the engine has loaded it.
                found.append(replace(bucket, data=Reader().data(bucket).clone()))

            receive_buckets(self.plan, place, load)
            self.outcomes[number] = found
        except BaseException as error:
            self.outcomes[number] = error

    def done(self):
        """Run all members, and return their outcomes in the order of the members."""
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in self.threads), "a member waits forever"
        return [self.outcomes[number] for number in range(self.plan.size)]


@pytest.mark.parametrize(("ranks", "engines"), [(1, 1), (2, 3), (3, 1)])
def test_every_engine_receives_all_buckets_of_all_ranks(store, ranks, engines):
    outcomes = Run(plan_of(store, ranks, engines)).done()
    assert outcomes[:ranks] == [None] * ranks
    for found in outcomes[ranks:]:
        assert len(found) == BUCKETS
        for number, bucket in enumerate(found):
            assert torch.equal(bucket.data[: ROWS * WIDTH], expected_bytes(number, range(ROWS)))
            verify(bucket, bucket.data)
            want = [number + row / 10 for row in range(ROWS)]
            assert bucket.probes()["w"].tolist() == bucket.probes()["tied"].tolist() == pytest.approx(want)
            assert bucket.places == part(number, 0, ranks).places


def test_a_rank_sends_nothing_for_a_bucket_in_which_it_takes_no_part(store):
    takes_part = [[True, False, True, False, True], [False, True, False, True, False]]
    written = []

    def write(number, rank):
        written.append((number, rank))
        return part(number, 0, 1)

    outcomes = Run(plan_of(store, 2, 1, takes_part), write=write).done()
    assert sorted(written) == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]
    assert [int(bucket.data[0]) for bucket in outcomes[2]] == [0, 10, 20, 30, 40]


HANDLES = {"transport": "device_handles"}


def whole_bucket(number, rank):
    """Return bucket `number` with all rows, as a rank writes it when the ranks gather whole tensors."""
    return part(number, 0, 1)


@pytest.mark.parametrize("partners", [(0, 1), (1, 0), (1, 1), (2, 0)])
def test_with_device_handles_each_engine_reads_all_buckets_in_the_memory_of_its_partner(store, partners):
    files = set(FOLDER.glob(f"{PREFIX}*"))
    plan, ranks = plan_of(store, 3, 2, partners=partners, **HANDLES), Ranks(3)
    outcomes = Run(plan, write=whole_bucket, agree=ranks.agree).done()
    assert outcomes[:3] == [None] * 3
    for found in outcomes[3:]:
        assert all(bucket.path is not None for bucket in found)
        for number, bucket in enumerate(found):
            assert torch.equal(bucket.data[: ROWS * WIDTH], expected_bytes(number, range(ROWS)))
            verify(bucket, bucket.data)
    assert set(FOLDER.glob(f"{PREFIX}*")) == files


def test_a_rank_does_not_free_a_bucket_before_each_engine_has_loaded_it(store):
    """While the engines load a bucket, the rank may already write the next bucket."""
    written, loaded = [], {0: 0, 1: 0}

    def write(number, rank):
        written.append(number)
        assert min(loaded.values()) >= number - 1
        return whole_bucket(number, rank)

    def load(place, number):
        time.sleep(0.02 * (place + 1))
        loaded[place] = number + 1

    outcomes = Run(plan_of(store, 1, 2, partners=(0, 0), **HANDLES), write=write, load=load).done()
    assert outcomes[0] is None
    assert written == list(range(BUCKETS))


@pytest.mark.parametrize("failing", [0, 1])
def test_if_an_engine_fails_all_ranks_give_up_before_the_same_bucket(store, failing):
    """If only one rank went on, it would wait in a collective operation for ranks that have given up."""
    written = {0: [], 1: [], 2: []}

    def write(number, rank):
        written[rank].append(number)
        return whole_bucket(number, rank)

    def load(place, number):
        if (place, number) == (failing, 1):
            raise SyncError("cannot load")

    plan = plan_of(store, 3, 2, partners=(0, 1), **HANDLES)
    outcomes = Run(plan, write=write, load=load, agree=Ranks(3).agree).done()
    assert str(outcomes[3 + failing]) == "cannot load"
    assert all(isinstance(one, SyncStopped) for one in outcomes[:3])
    assert written[0] == written[1] == written[2]
    assert len(written[0]) < BUCKETS


def test_a_failure_of_one_rank_stops_the_others_before_the_next_bucket(store):
    def write(number, rank):
        if (number, rank) == (2, 1):
            raise ValueError("a bug")
        return whole_bucket(number, rank)

    outcomes = Run(plan_of(store, 2, 2, partners=(0, 1), **HANDLES), write=write, agree=Ranks(2).agree).done()
    assert str(outcomes[1]) == "a bug"
    assert all(isinstance(outcomes[member], SyncStopped) for member in (0, 2, 3))


@pytest.mark.parametrize("failure", [SyncError("the file is gone"), RuntimeError("invalid device pointer")])
def test_an_engine_that_fails_after_a_rank_gave_up_is_not_reported_as_the_cause(store, failure):
    """A rank that gives up removes the file, or frees the memory, that an engine may be about to read."""
    run = None

    def write(number, rank):
        if (number, rank) == (2, 1):
            raise ValueError("a bug")
        return whole_bucket(number, rank)

    def load(place, number):
        if (place, number) == (0, 1):
            run.threads[1].join(LIMIT_S)
            raise failure

    run = Run(plan_of(store, 2, 2, partners=(0, 1), **HANDLES), write=write, load=load, agree=Ranks(2).agree)
    assert [type(outcome) for outcome in run.done()] == [SyncStopped, ValueError, SyncStopped, SyncStopped]


def test_with_nccl_the_bytes_of_buckets_go_only_through_the_group_of_the_gpus(store, monkeypatch):
    """A second gloo group stands for the group of the GPUs, which a machine without GPUs cannot form."""
    moved = []

    def gpu_group(meeting, number, size):
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=LIMIT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
        group = ProcessGroupGloo(meeting, number, size, options)

        def ended(work):
            work.wait()
            # Unlike NCCL, gloo never says that a transfer has ended.
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

        def send(tensors, *args):
            moved.append(tensors[0].numel())
            return ended(group.send(tensors, *args))

        def recv(*args):
            return ended(group.recv(*args))

        return SimpleNamespace(send=send, recv=recv, shutdown=lambda: None, abort=lambda: None)

    monkeypatch.setattr(process_group, "nccl_group", gpu_group)
    monkeypatch.setattr(process_group, "GPU", "cpu")
    outcomes = Run(plan_of(store, 2, 2, transport="nccl")).done()
    assert outcomes[:2] == [None] * 2
    for found in outcomes[2:]:
        for number, bucket in enumerate(found):
            assert torch.equal(bucket.data[: ROWS * WIDTH], expected_bytes(number, range(ROWS)))
            verify(bucket, bucket.data)
    rows = {part(0, rank, 2).data.numel() for rank in range(2)}
    assert set(moved) == rows | {ROWS * WIDTH}
    assert len(moved) == 3 * BUCKETS


def test_a_description_keeps_all_fields_of_a_bucket():
    pieces = [Piece("a", 0, 8, 2**64 - 1, np.array([1.5], np.float32)), Piece("b", 64, 4), Piece("c", 3, 0, None, None)]
    places = [Place("a", (2, 4), 0, 8), Place("b", (), 64, 4)]
    bucket = Bucket(7, "bfloat16", places, {"head": "a"}, pieces, torch.arange(128, dtype=torch.uint8), scale=0.5)
    header, probes = encoded(bucket)
    found = decoded(header, bucket.data, probes)
    assert found.pieces[0].probe.tolist() == [1.5]
    assert [(p.name, p.start, p.size, p.checksum) for p in found.pieces] == [
        (p.name, p.start, p.size, p.checksum) for p in pieces
    ]
    assert found.pieces[1].probe is None
    assert (found.version, found.dtype, found.places, found.aliases, found.scale) == (
        7, "bfloat16", places, {"head": "a"}, 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_if_an_engine_fails_all_members_stop(store, failing):
    def load(place, number):
        if place == failing and number == 1:
            raise SyncError("cannot load")

    outcomes = Run(plan_of(store, 2, 3), load=load, write=slowly).done()
    assert str(outcomes[2 + failing]) == "cannot load"
    others = [one for number, one in enumerate(outcomes) if number != 2 + failing]
    assert all(isinstance(one, SyncStopped) for one in others)


def test_if_a_rank_fails_all_engines_stop(store):
    def write(number, rank):
        if (number, rank) == (2, 1):
            raise ValueError("a bug")
        return part(number, rank, 2)

    outcomes = Run(plan_of(store, 2, 2), write=write).done()
    assert str(outcomes[1]) == "a bug"
    assert all(isinstance(one, SyncStopped) for one in outcomes[2:])


def slowly(number, rank):
    """Return a part that is larger than the sockets' buffers, so that sending it to a member that has ended fails."""
    bucket = part(number, rank, 2)
    bucket.data = torch.cat([bucket.data, torch.zeros(32 << 20, dtype=torch.uint8)])
    return bucket


def test_parts_that_do_not_fit_together_are_an_error_of_the_first_engine(store):
    outcomes = Run(plan_of(store, 2, 2), write=lambda number, rank: part(number, 0, 2)).done()
    assert "the shards of 'w' from all ranks have gaps or overlaps" in str(outcomes[2])
    assert not isinstance(outcomes[2], SyncStopped)
    assert isinstance(outcomes[3], SyncStopped)


def test_members_that_wait_for_a_lost_machine_stop_when_the_driver_gives_the_sync_up(store):
    """The lost machine is simulated by a member that never starts, so that nobody closes its connections."""
    run = Run(plan_of(store, 2, 2), write=slowly)
    lost = run.threads.pop(2)
    assert lost.ident is None
    for thread in run.threads:
        thread.start()
    time.sleep(1)
    assert all(thread.is_alive() for thread in run.threads)
    process_group.give_up(run.plan, "rollout 0 is gone")
    for thread in run.threads:
        thread.join(LIMIT_S)
    errors = [str(run.outcomes[number]) for number in (0, 1, 3)]
    assert errors == ["the weight sync was given up: rollout 0 is gone"] * 3


def test_a_store_that_cannot_be_reached_is_named_with_a_remedy(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(process_group, "CONNECT_S", 0.5)
    plan = GroupPlan("sync", "127.0.0.1", port, 1, 1, packed([[True]]), 1)
    with pytest.raises(SyncError, match=rf"cannot connect to 127.0.0.1:{port}.*weight_transport=object_store"):
        Member(plan, 0)
    process_group.give_up(plan, "nobody needs to know")
