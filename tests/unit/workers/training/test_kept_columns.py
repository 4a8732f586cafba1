"""Tests that a column that ranks keep reaches the ranks that read its rows, without the driver."""

import pickle

import pytest
import ray
import torch

from rltrain.batch import data_proto
from rltrain.batch.data_proto import DataProto, jagged
from tests.fake_replicas import Reply
from workers.cluster.processes import LocalProcess, RayProcess, Role
from workers.cluster.worker_process import Host
from workers.training.dispatch import UpdateResult
from workers.training.kept_columns import KeptColumns
from workers.training.shared_columns import SharedColumns
from workers.training.worker_group import WorkerGroup

FORWARD = ["prompts", "responses"]
READ = [*FORWARD, "response_mask", "teacher_hidden"]
PLACE = "teacher_hidden_place"


def batch(rows: int = 6) -> DataProto:
    """Make a batch whose row n has n + 1 response tokens, each of which is n."""
    made = DataProto.from_dict(
        {"prompts": jagged([[9]] * rows, torch.int64), "responses": jagged([[n] * (n + 1) for n in range(rows)],
         torch.int64)}
    )  # fmt: skip
    return made.with_values("responses", response_mask=torch.ones(len(made.values("responses")), dtype=torch.bool))


class Teacher:
    """A role without a model, whose hidden states of a token are multiples of the token."""

    def __init__(self, width: int) -> None:
        self.width, self.kept = width, KeptColumns()

    def score(self, batch, microbatches, keep=None):
        part = batch[[row for rows in microbatches for row in rows]]
        tokens = part.values("responses").float()
        found = part.with_values(
            "responses", teacher_log_probs=-tokens, teacher_hidden=tokens[:, None].repeat(1, self.width)
        )
        return self.kept.keep(found.select(["teacher_log_probs", "teacher_hidden"]), "teacher_hidden", keep)

    def kept_rows(self, request):
        return self.kept.rows(request)

    def put_kept_rows(self, requests):
        return [ray.put(self.kept.rows(request)) for request in requests]

    def drop_kept(self):
        self.kept.drop()


class Reader:
    """A role without a model, which notes what it reads."""

    def __init__(self) -> None:
        self.read: list[DataProto] = []

    def compute(self, batch, microbatches):
        self.read.append(batch)
        part = batch[[row for rows in microbatches for row in rows]]
        assert set(READ) <= {*batch.keys()}
        sums = part.values("teacher_hidden").sum(1)
        return part.with_values("responses", old_log_probs=sums).select(["old_log_probs"])

    def update(self, batch, minibatches):
        self.read.append(batch)
        return UpdateResult({}, {}, 1, [{"lr": 1.0, "grad_norm": 2.0, "skipped": 0.0}])


class Stored:
    """A fake entry of Ray's object store, which pickles its value. `Stored.all` has all entries."""

    all: list["Stored"]

    def __init__(self, value) -> None:
        self.value, self.pickled = value, pickle.dumps(value)
        self.all.append(self)


class Method:
    """A fake method of a Ray actor: arguments and results are pickled, except references."""

    def __init__(self, method) -> None:
        self.method = method

    def remote(self, *args, **kwargs):
        values = [pickle.loads(one.pickled) if isinstance(one, Stored) else one for one in args]
        result = self.method(*values, **kwargs)
        return Reply.of(result if isinstance(result, list) else pickle.loads(pickle.dumps(result)))


class Rank(RayProcess):
    """A fake of a worker process. Its roles are ordinary objects in the process of the test."""

    def __init__(self, number: int, **roles) -> None:
        host = Host({}, verbose=True)
        host.roles |= roles
        self.host, self.call, self.call_joined = host, Method(host.call), Method(host.call_joined)
        super().__init__(self, f"rank {number}")

    def share(self, value):
        return Stored(value)


@pytest.fixture(autouse=True)
def stored(monkeypatch):
    """Replace Ray's object store, and return the list of all values that were put into it."""
    Stored.all = []
    monkeypatch.setattr(ray, "put", Stored)
    return Stored.all


@pytest.fixture
def received(monkeypatch):
    """Return the list of the names of all columns that were unpickled."""
    names, receive = [], data_proto.receive

    def noted(packet):
        names.extend(name for name, *_ in packet.tensors)
        return receive(packet)

    monkeypatch.setattr(data_proto, "receive", noted)
    return names


def groups(teacher_processes, reader_processes, *, ranks_per_pack=1):
    """Return a worker group of the teacher and one of the reader, which share a registry."""
    shared = SharedColumns()
    return [
        WorkerGroup([Role(one, role) for one in processes], ranks_per_pack=ranks_per_pack, shared=shared)
        for role, processes in (("teacher", teacher_processes), ("reader", reader_processes))
    ]


def hidden(stored) -> list[int]:
    """Return the numbers of rows of hidden states in each object of the store that has any."""
    return [len(one.value) for one in stored if isinstance(one.value, DataProto) and "teacher_hidden" in one.value]


def correct(part: DataProto, width: int) -> bool:
    tokens = part.values("responses").float()
    return torch.equal(part.values("teacher_hidden"), tokens[:, None].repeat(1, width))


@pytest.mark.parametrize(("teachers", "readers"), [(1, 1), (3, 2), (2, 5)])
async def test_the_rows_that_ranks_keep_reach_the_ranks_that_read_them_and_not_the_driver(stored, teachers, readers):
    sources = [Rank(number, teacher=Teacher(4)) for number in range(teachers)]
    targets = [Rank(number, reader=Reader()) for number in range(readers)]
    teacher, reader = groups(sources, targets)
    made = batch()
    found = await teacher.rows(Teacher.score, made, FORWARD, max_tokens=8, keep="teacher_hidden")
    assert sorted(found.keys()) == ["teacher_hidden_place", "teacher_log_probs"]
    assert found.meta_info == {}
    assert found.values("teacher_log_probs").tolist() == (-made.values("responses").float()).tolist()
    assert hidden(stored) == []
    made = made.union(found)
    result = await reader.rows(Reader.compute, made, READ, max_tokens=8)
    assert result.values("old_log_probs").tolist() == [4.0 * token for token in made.values("responses").tolist()]
    parts = [part for target in targets for part in target.host.roles["reader"].read]
    assert all(correct(part, 4) for part in parts)
    # each row goes only to its reader; a reader without rows of its own gets the shortest row
    assert sum(hidden(stored)) == sum(map(len, parts))
    await reader.drop_kept()
    assert not any(source.host.roles["teacher"].kept._kept for source in sources)


async def test_a_pass_without_a_kept_column_returns_the_column_itself(stored):
    teacher, reader = groups([Rank(0, teacher=Teacher(4))], [Rank(1, reader=Reader())])
    made = batch()
    made = made.union(await teacher.rows(Teacher.score, made, FORWARD, max_tokens=8))
    assert correct(made, 4)
    result = await reader.rows(Reader.compute, made, READ, max_tokens=8)
    assert result.values("old_log_probs").tolist() == [4.0 * token for token in made.values("responses").tolist()]
    await reader.drop_kept()


async def test_rows_may_be_dropped_and_reordered_between_the_passes():
    target = Rank(2, reader=Reader())
    teacher, reader = groups([Rank(number, teacher=Teacher(4)) for number in range(2)], [target])
    made = batch()
    made = made.union(await teacher.rows(Teacher.score, made, FORWARD, max_tokens=8, keep="teacher_hidden"))
    await reader.update(Reader.update, made[[5, 1, 3]], READ, [[0, 1, 2]], 8)
    (part,) = target.host.roles["reader"].read
    assert sorted({int(token) for token in part.values("responses")}) == [1, 3, 5]
    assert correct(part, 4)


async def test_hidden_states_of_several_teachers_are_filled_up_to_the_widest():
    shared, target = SharedColumns(), Rank(2, reader=Reader())
    made, places = batch(), torch.full((6,), -1)
    for number, rows in enumerate([[0, 2, 3], [1, 4, 5]]):
        group = WorkerGroup([Role(Rank(number, teacher=Teacher(2 + number)), "teacher")], shared=shared)
        found = await group.rows(Teacher.score, made, FORWARD, max_tokens=8, only=rows, keep="teacher_hidden")
        places[rows] = found.batch[PLACE]
    reader = WorkerGroup([Role(target, "reader")], shared=shared)
    with pytest.raises(AssertionError, match="rows without a place"):
        await reader.rows(Reader.compute, made.union(DataProto.from_dict({PLACE: places - 1})), READ, max_tokens=8)
    made = made.union(DataProto.from_dict({PLACE: places}))
    result = await reader.rows(Reader.compute, made, READ, max_tokens=8)
    widths = torch.tensor([2.0, 3.0, 2.0, 2.0, 3.0, 3.0]).repeat_interleave(made.lengths("responses"))
    assert result.values("old_log_probs").tolist() == (widths * made.values("responses")).tolist()
    assert target.host.roles["reader"].read[0].values("teacher_hidden").size(1) == 3


async def test_a_reader_in_the_same_process_gets_rows_without_the_object_store(stored, received):
    processes = [Rank(number, teacher=Teacher(4), reader=Reader()) for number in range(2)]
    teacher, reader = groups(processes, processes)
    made = batch()
    made = made.union(await teacher.rows(Teacher.score, made, FORWARD, max_tokens=99, keep="teacher_hidden"))
    read = [len(one.host.roles["teacher"].kept._kept[1]) for one in processes]
    assert sum(read) == 6
    await reader.rows(Reader.compute, made, READ, max_tokens=99)
    # both passes divide the rows in the same way, so no row leaves its process
    assert hidden(stored) == []
    assert "teacher_hidden" not in received
    assert all(correct(one.host.roles["reader"].read[0], 4) for one in processes)


async def test_ranks_that_share_sequences_fetch_the_same_object(stored):
    sources = [Rank(number, teacher=Teacher(4)) for number in range(2)]
    targets = [Rank(number, reader=Reader()) for number in range(2)]
    teacher, reader = groups(sources, targets, ranks_per_pack=2)
    made = batch()
    made = made.union(await teacher.rows(Teacher.score, made, FORWARD, max_tokens=8, keep="teacher_hidden"))
    await reader.rows(Reader.compute, made, READ, max_tokens=8)
    assert hidden(stored) == [6]
    assert all(correct(target.host.roles["reader"].read[0], 4) for target in targets)


async def test_the_drivers_own_process_keeps_nothing():
    host = Host({}, verbose=True)
    host.roles["teacher"] = worker = Teacher(4)
    group = WorkerGroup([Role(LocalProcess(host), "teacher")])
    found = await group.rows(Teacher.score, batch(), FORWARD, max_tokens=8, keep="teacher_hidden")
    assert sorted(found.keys()) == ["teacher_hidden", "teacher_log_probs"]
    assert not worker.kept._kept
    await group.drop_kept()


async def test_places_of_an_earlier_step_are_forgotten():
    teacher, reader = groups([Rank(0, teacher=Teacher(4))], [Rank(1, reader=Reader())])
    for _ in range(2):
        made = batch()
        found = await teacher.rows(Teacher.score, made, FORWARD, max_tokens=8, keep="teacher_hidden")
        assert sorted(found.batch[PLACE].tolist()) == [0, 1, 2, 3, 4, 5]
        await reader.rows(Reader.compute, made.union(found), READ, max_tokens=8)
        await reader.drop_kept()
    assert teacher.shared.kept.processes == []
