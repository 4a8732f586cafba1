"""Tests that each row of a batch is sent to exactly one rank, and that the results keep the order of the rows."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.base import errors
from rltrain.batch.contexts import row_tokens
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.partial_batches import joined_rows
from rltrain.batch.row_costs import RowWork
from tests.fake_replicas import Reply
from workers.cluster.processes import LocalProcess, RayProcess, Role
from workers.cluster.worker_process import Host
from workers.training.dispatch import OVERHEAD_METRICS, UpdateResult
from workers.training.shared_columns import FEW, SharedColumns
from workers.training.worker_group import WorkerGroup

FORWARD = ["prompts", "responses"]
UPDATE = [*FORWARD, "response_mask"]
ANSWERS = [[1, 2], [3], [4] * 4]


def batch(rows: int = 5) -> DataProto:
    made = DataProto.from_dict(
        {"prompts": jagged([[9] * (row % 2 + 1) for row in range(rows)], torch.int64),
         "responses": jagged([[row] * (row + 1) for row in range(rows)], torch.int64)}
    )  # fmt: skip
    return made.with_values("responses", response_mask=torch.ones(len(made.values("responses")), dtype=torch.bool))


class Worker:
    """A role without a model, which doubles token ids."""

    def __init__(self, rank=0):
        self.rank, self.seen = rank, []

    def double(self, batch, microbatches):
        """Return the doubled response tokens, with rows in the order of the micro-batches."""
        rows = [row for part in microbatches for row in part]
        self.seen.append((batch, microbatches))
        part = batch[rows]
        return part.with_values("responses", doubled=2 * part.values("responses")).select(["doubled"])

    def update(self, batch, minibatches):
        self.seen.append((batch, minibatches))
        tokens = [len(batch[rows].values("responses")) for m in minibatches for rows in m.microbatches if rows]
        total = sum(m.num_tokens for m in minibatches)
        steps = [{"lr": 1.0, "grad_norm": 2.0, "skipped": 0.0}] * len(minibatches)
        return UpdateResult({"tokens_share": float(sum(tokens))}, {}, total, steps)

    def update_with_supervised(self, batch, minibatches, answers, answer_minibatches, extra):
        self.seen.append((batch, minibatches, answers, answer_minibatches, extra))
        return UpdateResult({}, {}, 1, [{"lr": 1.0, "grad_norm": 2.0, "skipped": 0.0}], supervised_tokens=0)

    def greet(self, name):
        return f"{name} from {self.rank}"

    def fail(self):
        raise errors.SyncError("weights differ")


class Stored:
    """A fake entry of Ray's object store, which pickles its value."""

    def __init__(self, value):
        self.pickled = pickle.dumps(value)


class Method:
    """A fake method of a Ray actor, which replaces each argument that is a reference by the stored value."""

    def __init__(self, method):
        self.method = method

    def remote(self, *args):
        return Reply.of(self.method(*(pickle.loads(one.pickled) if isinstance(one, Stored) else one for one in args)))


class Rank(RayProcess):
    """A fake rank whose actor is an object in the same process."""

    def __init__(self, rank):
        host = Host({}, verbose=True)
        host.roles["actor"] = self.worker = Worker(rank)
        self.call, self.call_joined = Method(host.call), Method(host.call_joined)
        self.stored = []  # all batches that this process has put into the object store
        super().__init__(self, f"training rank {rank}")

    def share(self, value):
        self.stored.append(value)
        return Stored(value)


def stored_by(group):
    """Return all batches that the group has put into the object store."""
    return [part for rank in group.ranks for part in rank.process.stored]


def rows_of(part):
    """Return the row numbers in the whole batch of `batch()`, in which row n has the response tokens n, n, ..."""
    return [int(row[0]) for row in part.batch["responses"].unbind()] if len(part) else []


def group_of(size, work=None):
    """Return a worker group of `size` ranks, and the workers of the ranks."""
    ranks = [Rank(rank) for rank in range(size)]
    return WorkerGroup([Role(rank, "actor") for rank in ranks], work), [rank.worker for rank in ranks]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("max_tokens", [7, 100])
async def test_a_pass_over_all_rows_comes_back_in_order_from_any_number_of_ranks(size, max_tokens):
    (group, workers), made = group_of(size), batch()
    result = await group.rows(Worker.double, made, FORWARD, max_tokens=max_tokens)
    assert result.keys() == ["doubled"]
    assert result.values("doubled").tolist() == [2 * token for token in made.values("responses").tolist()]
    assert made.union(result).offsets("doubled") is made.offsets("responses")
    # each rank receives the rows of its micro-batches, and row 0 if a micro-batch is empty
    assert len(stored_by(group)) == size
    for worker in workers:
        part, microbatches = worker.seen[0]
        assert rows_of(part) == sorted(
            {row for rows in microbatches for row in rows_of(part[rows])} | set(() if all(microbatches) else (0,))
        )
        sizes = [int(row_tokens(part)[rows].sum()) for rows in microbatches]
        assert max(sizes) <= max_tokens


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_an_update_covers_every_row_of_the_plan_once_over_all_ranks(size):
    (group, workers), made = group_of(size), batch()
    metrics = await group.update(Worker.update, made, UPDATE, [[0, 3], [1, 2, 4]], 100)
    planned = {name: metrics.pop(name) for name in OVERHEAD_METRICS}
    assert all(0 <= value < 0.5 for value in planned.values())
    assert (planned["idle_fraction"] == 0) == (size == 1)
    assert metrics == {"tokens_share": 1.0, "lr": 1.0, "grad_norm": 2.0, "grad_norm_max": 2.0, "skipped_updates": 0.0}
    for number, rows in enumerate([[0, 3], [1, 2, 4]]):
        given = [
            row for worker in workers for part in worker.seen[0][1][number].microbatches
            for row in rows_of(worker.seen[0][0][part])
        ]  # fmt: skip
        assert sorted(given) == rows


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_in_a_step_each_rank_receives_each_row_of_a_column_once(size):
    """A forward pass sends token ids. The update then sends the token ids of other rows, and a new column."""
    (group, workers), made = group_of(size), batch()
    for _ in range(2):
        await group.rows(Worker.double, made, FORWARD, max_tokens=7)
    for _ in range(2):
        await group.update(Worker.update, made, UPDATE, [[0, 3], [1, 2, 4]], 100)
    received = {
        (name, number): [row for part in parts if name in part.columns for row in part.rows.tolist()]
        for number, parts in group.shared._parts.items() for name in UPDATE
    }  # fmt: skip
    for (name, number), rows in received.items():
        parts = [part for part, _ in workers[number].seen if name in part]
        assert sorted(rows) == sorted({row for part in parts for row in rows_of(part)}), (name, number)
    for worker in workers:
        part, minibatches = worker.seen[-1]
        for one in minibatches:
            for rows in one.microbatches:
                assert part[rows].values("responses").tolist() == [
                    token for row in rows_of(part[rows]) for token in [row] * (row + 1)
                ]
    later = batch()
    before = len(stored_by(group))
    await group.rows(Worker.double, later, FORWARD, max_tokens=7)
    assert len(stored_by(group)) == before + size, "the columns of a new batch must be sent again"
    assert all(len(parts) == 1 for parts in group.shared._parts.values())


def received_by(shared, process):
    """Join the stored parts, as the process of a rank does."""
    parts = [pickle.loads(one.pickled) for one in shared.references]
    return joined_rows(parts, shared.rows_of_parts, shared.rows, shared.columns)


@given(
    passes=st.lists(st.lists(st.sets(st.integers(0, 29)), min_size=3, max_size=3), min_size=1, max_size=5),
    data=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_receivers_get_the_rows_that_they_read_and_at_most_a_tenth_of_them_twice(passes, data):
    made, registry, process = batch(30), SharedColumns(), Rank(0)
    for rows in passes:
        columns = data.draw(st.sampled_from([FORWARD, UPDATE, ["responses"]]))
        stored = len(process.stored)
        shares = registry.share(made, columns, [sorted(some) for some in rows], process)
        for share, some in zip(shares, rows, strict=True):
            found, expected = received_by(share, process), made[sorted(some)]
            assert found.keys() == columns
            for name in columns:
                assert found.values(name).tolist() == expected.values(name).tolist()
        sent = {name: sum(len(part) for part in process.stored[stored:] if name in part) for name in columns}
        assert all(count <= sum(map(len, rows)) for count in sent.values())
    for receiver, parts in registry._parts.items():
        for name in UPDATE:
            got = [row for part in parts if name in part.columns for row in part.rows.tolist()]
            read = [len(rows[receiver]) for rows in passes]
            assert len(got) - len(set(got)) <= sum(FEW * count for count in read)


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_each_supervised_answer_goes_to_one_rank_in_the_mini_batches_of_its_group(size):
    """The answers have 2, 1 and 4 tokens. No row of the second mini-batch belongs to a group with an answer."""
    (group, workers), made = group_of(size), batch().union(DataProto.from_dict({"uid": torch.tensor([7, 7, 8, 9, 6])}))
    answers = DataProto.from_dict(
        {"prompts": jagged([[9], [9, 9], [9]], torch.int64), "responses": jagged(ANSWERS, torch.int64),
         "uid": torch.tensor([9, 7, 6])}
    ).with_values("responses", response_mask=torch.ones(7, dtype=torch.bool))  # fmt: skip
    plan = [[0, 1, 3], [2], [4, 0, 1]]
    metrics = await group.update_with_supervised(
        Worker.update_with_supervised, made, UPDATE, plan, answers, 100, "extra"
    )
    assert metrics["sft_tokens"] == 0
    for number, (rows, tokens, sequences) in enumerate((([0, 1], 3, 2), ([], 0, 0), ([1, 2], 5, 2))):
        parts = [worker.seen[0][3][number] for worker in workers]
        found = [
            token for worker, part in zip(workers, parts, strict=True) for some in part.microbatches if some
            for token in worker.seen[0][2][some].values("responses").tolist()
        ]  # fmt: skip
        assert sorted(found) == sorted(token for row in rows for token in ANSWERS[row])
        assert {(part.num_tokens, part.num_sequences) for part in parts} == {(tokens, sequences)}
        policy = [
            row for worker in workers for one in worker.seen[0][1][number].microbatches
            for row in rows_of(worker.seen[0][0][one])
        ]  # fmt: skip
        assert sorted(policy) == sorted(plan[number])
    for worker in workers:
        policy, _, supervised, _, extra = worker.seen[0]
        assert (sorted(policy.keys()), extra) == (sorted(UPDATE), "extra")
        assert sorted(supervised.keys()) == ["prompts", "response_mask", "responses"]
    # the batch and the answers are put into the object store once for each rank
    assert len(stored_by(group)) == 2 * size


async def test_rows_go_to_ranks_by_the_work_of_the_groups_own_model():
    """If the cost of a row is the square of its number of tokens, the longest row gets a rank for itself.

    If the cost of a row is its number of tokens, the longest row shares a rank with other rows.
    """
    lengths, square = [9, 5, 5, 5], RowWork(token=0, attention=((None, 2),))
    made = DataProto.from_dict(
        {
            "prompts": jagged([[row] * n for row, n in enumerate(lengths)], torch.int64),
            "responses": jagged([[2]] * 4, torch.int64),
        }
    )
    sizes = []
    for work in (None, square):
        group, workers = group_of(2, work)
        await group.rows(Worker.double, made, FORWARD, max_tokens=100)
        sizes.append(sorted(sum(map(len, worker.seen[0][1])) for worker in workers))
    assert sizes == [[2, 2], [1, 3]]


async def test_a_call_on_every_rank_has_the_same_arguments():
    group, _ = group_of(2)
    assert await group.call(Worker.greet, "hello") == ["hello from 0", "hello from 1"]


def test_the_last_response_token_takes_no_place_in_a_pack_and_an_empty_answer_costs_its_prompt():
    made = DataProto.from_dict(
        {"prompts": jagged([[1, 2, 3], [1, 2], [1]], torch.int64), "responses": jagged([[4, 5], [], [6]], torch.int64)}
    )
    assert row_tokens(made).tolist() == [4, 2, 1]


async def test_a_rank_in_this_process_gets_values_as_they_are():
    host = Host({}, verbose=True)
    host.roles["actor"] = worker = Worker()
    process, made = LocalProcess(host), batch()
    assert process.share(made) is made
    group = WorkerGroup([Role(process, "actor")])
    assert group.size == 1
    result = await group.rows(Worker.double, made, FORWARD, max_tokens=7)
    assert result.values("doubled").tolist() == [2 * token for token in made.values("responses").tolist()]
    assert worker.seen[0][0].values("responses") is made.values("responses")
    assert await group.call(Worker.greet, "hi") == ["hi from 0"]
    with pytest.raises(errors.SyncError, match="weights differ"):
        await group.call(Worker.fail)
