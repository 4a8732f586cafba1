"""Tests of weight transfers through a process group, whose members are threads connected over the loopback device."""

import socket
import threading
import time

import numpy as np
import pytest

from rltrain.base.errors import SyncError, SyncStopped
from workers.sync import process_group
from workers.sync.buckets import Bucket, Piece, Place, verify
from workers.sync.checks import checksum
from workers.sync.process_group import Chain, Member, decoded, encoded, packed, receive_buckets, send_parts, serve_store

ROWS, WIDTH, BUCKETS = 6, 32, 5
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def store():
    return serve_store("127.0.0.1")


def part(number, rank, ranks):
    """Return one rank's rows of bucket `number`, which has a single matrix "w" of ROWS rows of WIDTH bytes."""
    rows = np.array_split(np.arange(ROWS), ranks)[rank]
    data = np.concatenate([np.full(WIDTH, 10 * number + row, np.uint8) for row in rows])
    probe = np.array([number + row / 10 for row in rows], np.float32)
    piece = Piece("w", int(rows[0]) * WIDTH, len(data), checksum(data), probe)
    padded = np.zeros(len(data) + -len(data) % 64, np.uint8)
    padded[: len(data)] = data
    place = Place("w", (ROWS, WIDTH // 4), 0, ROWS * WIDTH)
    return Bucket(3, "float32", [place], {"tied": "w"}, [piece], padded)


def chain_of(store, ranks, engines, takes_part=None):
    takes_part = [[True] * BUCKETS] * ranks if takes_part is None else takes_part
    return Chain("sync", store.host, store.port, ranks, engines, packed(takes_part), BUCKETS)


class Run:
    """Runs each member of a process group in a thread of this process.

    `outcomes` maps the number of each member to the member's result or error.
    """

    def __init__(self, chain, *, write=None, load=None):
        self.chain, self.write, self.load, self.outcomes = chain, write or self.whole, load or (lambda *_: None), {}
        self.threads = [threading.Thread(target=self.member, args=(n,), daemon=True) for n in range(chain.size)]

    def whole(self, number, rank):
        return part(number, rank, self.chain.ranks)

    def member(self, number):
        try:
            if number < self.chain.ranks:
                send_parts(self.chain, number, lambda bucket: self.write(bucket, number))
                self.outcomes[number] = None
                return
            place, found = number - self.chain.ranks, []

            def load(bucket):
                self.load(place, len(found))
                found.append(bucket)

            receive_buckets(self.chain, place, load)
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
        return [self.outcomes[number] for number in range(self.chain.size)]


@pytest.mark.parametrize(("ranks", "engines"), [(1, 1), (2, 3), (3, 1)])
def test_every_engine_receives_all_buckets_of_all_ranks(store, ranks, engines):
    outcomes = Run(chain_of(store, ranks, engines)).done()
    assert outcomes[:ranks] == [None] * ranks
    for found in outcomes[ranks:]:
        assert len(found) == BUCKETS
        for number, bucket in enumerate(found):
            expected = np.concatenate([np.full(WIDTH, 10 * number + row, np.uint8) for row in range(ROWS)])
            assert np.array_equal(bucket.data[: ROWS * WIDTH], expected)
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

    outcomes = Run(chain_of(store, 2, 1, takes_part), write=write).done()
    assert sorted(written) == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]
    assert [int(bucket.data[0]) for bucket in outcomes[2]] == [0, 10, 20, 30, 40]


def test_a_description_keeps_all_fields_of_a_bucket():
    pieces = [Piece("a", 0, 8, 2**64 - 1, np.array([1.5], np.float32)), Piece("b", 64, 4), Piece("c", 3, 0, None, None)]
    places = [Place("a", (2, 4), 0, 8), Place("b", (), 64, 4)]
    bucket = Bucket(7, "bfloat16", places, {"head": "a"}, pieces, np.arange(128, dtype=np.uint8), scale=0.5)
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

    outcomes = Run(chain_of(store, 2, 3), load=load, write=slowly).done()
    assert str(outcomes[2 + failing]) == "cannot load"
    others = [one for number, one in enumerate(outcomes) if number != 2 + failing]
    assert all(isinstance(one, SyncStopped) for one in others)


def test_if_a_rank_fails_all_engines_stop(store):
    def write(number, rank):
        if (number, rank) == (2, 1):
            raise ValueError("a bug")
        return part(number, rank, 2)

    outcomes = Run(chain_of(store, 2, 2), write=write).done()
    assert str(outcomes[1]) == "a bug"
    assert all(isinstance(one, SyncStopped) for one in outcomes[2:])


def slowly(number, rank):
    """Return a part that is larger than the sockets' buffers, so that sending it to a member that has ended fails."""
    bucket = part(number, rank, 2)
    bucket.data = np.concatenate([bucket.data, np.zeros(32 << 20, np.uint8)])
    return bucket


def test_parts_that_do_not_fit_together_are_an_error_of_the_first_engine(store):
    outcomes = Run(chain_of(store, 2, 2), write=lambda number, rank: part(number, 0, 2)).done()
    assert "the shards of 'w' from all ranks have gaps or overlaps" in str(outcomes[2])
    assert not isinstance(outcomes[2], SyncStopped)
    assert isinstance(outcomes[3], SyncStopped)


def test_members_that_wait_for_a_lost_machine_stop_when_the_driver_gives_the_sync_up(store):
    """The lost machine is simulated by a member that never starts, so that nobody closes its connections."""
    run = Run(chain_of(store, 2, 2), write=slowly)
    lost = run.threads.pop(2)
    assert lost.ident is None
    for thread in run.threads:
        thread.start()
    time.sleep(1)
    assert all(thread.is_alive() for thread in run.threads)
    process_group.give_up(run.chain, "rollout 0 is gone")
    for thread in run.threads:
        thread.join(LIMIT_S)
    errors = [str(run.outcomes[number]) for number in (0, 1, 3)]
    assert errors == ["the weight sync was given up: rollout 0 is gone"] * 3


def test_a_store_that_cannot_be_reached_is_named_with_a_remedy(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(process_group, "CONNECT_S", 0.5)
    chain = Chain("sync", "127.0.0.1", port, 1, 1, packed([[True]]), 1)
    with pytest.raises(SyncError, match=rf"cannot connect to 127.0.0.1:{port}.*weight_transport=object_store"):
        Member(chain, 0)
    process_group.give_up(chain, "nobody needs to know")
