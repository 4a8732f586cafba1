import pickle

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayTaskError

from rltrain.base import errors
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.row_costs import RowWork
from workers.cluster.host_groups import LOOK_S, Hosts, LocalHosts, RayHosts
from workers.cluster.worker_process import Host
from workers.training.dispatch import PLAN_METRICS, UpdateResult
from workers.training.worker_group import WorkerGroup, row_lengths


def batch(rows: int = 5) -> DataProto:
    made = DataProto.from_dict(
        {"prompts": jagged([[9] * (row % 2 + 1) for row in range(rows)], torch.int64),
         "responses": jagged([[row] * (row + 1) for row in range(rows)], torch.int64)}
    )  # fmt: skip
    return made.with_values("responses", response_mask=torch.ones(len(made.values("responses")), dtype=torch.bool))


class Worker:
    """A role without a model."""

    def __init__(self, rank=0):
        self.rank, self.seen = rank, []

    def double(self, batch, microbatches):
        """The tokens times two, rows in the order of the micro-batches."""
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

    def greet(self, name):
        return f"{name} from {self.rank}"

    def fail(self):
        raise errors.SyncError("weights differ")


class FakeHosts(Hosts):
    """Ranks as objects in this process; what crosses to them is pickled, as Ray would."""

    def __init__(self, size):
        self.size, self.workers, self.shared = size, [Worker(rank) for rank in range(size)], 0

    def share(self, value):
        self.shared += 1
        return pickle.loads(pickle.dumps(value))

    def start(self, role, method, arguments, *, ranks=None):
        assert role == "actor"
        workers = self.workers if ranks is None else [self.workers[rank] for rank in ranks]
        return [getattr(worker, method)(*own) for worker, own in zip(workers, arguments, strict=True)]

    def wait(self, pending, **_):
        return pending


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("max_tokens", [7, 100])
def test_a_pass_over_all_rows_comes_back_in_order_from_any_number_of_ranks(size, max_tokens):
    hosts, made = FakeHosts(size), batch()
    result = WorkerGroup(hosts, "actor").rows("double", made, max_tokens=max_tokens)
    assert result.keys() == ["doubled"]
    assert result.values("doubled").tolist() == [2 * token for token in made.values("responses").tolist()]
    assert made.union(result).offsets("doubled") is made.offsets("responses")
    assert hosts.shared == 1  # the batch is put into the store once, not once a rank
    for worker in hosts.workers:
        sizes = [sum(row_lengths(made)[row] for row in rows) for rows in worker.seen[0][1]]
        assert max(sizes) <= max_tokens


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_update_covers_every_row_of_the_plan_once_over_all_ranks(size):
    hosts, made = FakeHosts(size), batch()
    metrics = WorkerGroup(hosts, "actor").update(made, [[0, 3], [1, 2, 4]], max_tokens=100)
    planned = {name: metrics.pop(name) for name in PLAN_METRICS}
    assert all(0 <= value < 0.5 for value in planned.values())
    assert (planned["idle_fraction"] == 0) == (size == 1)
    assert metrics == {"tokens_share": 1.0, "lr": 1.0, "grad_norm": 2.0, "grad_norm_max": 2.0, "skipped_updates": 0.0}
    for number, rows in enumerate([[0, 3], [1, 2, 4]]):
        given = [row for worker in hosts.workers for part in worker.seen[0][1][number].microbatches for row in part]
        assert sorted(given) == rows


def test_rows_go_to_ranks_by_the_work_of_the_groups_own_model():
    """Where a row costs the square of its length, the longest has a rank of its own; by tokens it has company."""
    lengths, square = [9, 5, 5, 5], RowWork(token=0, attention=((None, 2),))
    made = DataProto.from_dict(
        {"prompts": jagged([[1] * n for n in lengths], torch.int64), "responses": jagged([[2]] * 4, torch.int64)}
    )
    sizes = []
    for work in (None, square):
        hosts = FakeHosts(2)
        WorkerGroup(hosts, "actor", work).rows("double", made, max_tokens=100)
        sizes.append(sorted(sum(map(len, worker.seen[0][1])) for worker in hosts.workers))
    assert sizes == [[2, 2], [1, 3]]


def test_a_call_on_every_rank_has_the_same_arguments():
    group = WorkerGroup(FakeHosts(2), "actor")
    assert group.wait(group.start("greet", "hello")) == ["hello from 0", "hello from 1"]


def test_the_last_response_token_takes_no_place_in_a_pack_and_an_empty_answer_costs_its_prompt():
    made = DataProto.from_dict(
        {"prompts": jagged([[1, 2, 3], [1, 2], [1]], torch.int64), "responses": jagged([[4, 5], [], [6]], torch.int64)}
    )
    assert row_lengths(made) == [4, 2, 1]


def test_local_hosts_call_an_object_in_this_process_and_pass_values_as_they_are():
    host = Host({}, verbose=True)
    host.roles["actor"] = worker = Worker()
    hosts, made = LocalHosts(host), batch()
    assert hosts.size == 1
    assert hosts.share(made) is made
    group = WorkerGroup(hosts, "actor")
    result = group.rows("double", made, max_tokens=7)
    assert result.values("doubled").tolist() == [2 * token for token in made.values("responses").tolist()]
    assert worker.seen[0][0] is made
    assert hosts.call("actor", "greet", [("hi",)], ranks=[0]) == ["hi from 0"]
    assert hosts.call("actor", "greet", [], ranks=[]) == []
    with pytest.raises(errors.SyncError, match="weights differ"):
        group.start("fail")


def test_a_host_builds_a_role_from_its_path_and_calls_it_by_name():
    host = Host({}, verbose=True)
    host.build("share", "fractions:Fraction", 3, denominator=4)
    assert host.call("share", "as_integer_ratio") == (3, 4)
    assert host.call("share", "limit_denominator", max_denominator=1) == 1


# Errors of Ray workers, with Ray's own exceptions but no Ray running


def of_worker(error: Exception) -> Exception:
    """What `ray.get` raises where a method of an actor raised `error`."""
    return RayTaskError("Host.call", "the worker's traceback", error).as_instanceof_cause()


def raised_by_wait(monkeypatch, error: Exception) -> Exception:
    def get(pending, *, timeout):
        raise error

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(errors.RLTrainError) as caught:
        RayHosts([]).wait(["ref"])
    return caught.value


@pytest.mark.parametrize("kind", [errors.SyncError, errors.LogProbError, errors.ConfigError, errors.RewardError])
def test_an_error_of_the_project_reaches_the_caller_as_itself(monkeypatch, kind):
    error = raised_by_wait(monkeypatch, of_worker(kind("value, rule, way out")))
    assert type(error) is kind
    assert str(error) == "value, rule, way out"
    assert error.__suppress_context__


def test_any_other_error_of_a_worker_is_a_worker_error_of_one_line_whose_cause_has_the_traceback(monkeypatch):
    error = raised_by_wait(monkeypatch, of_worker(ZeroDivisionError("the worker's traceback\ndivision by zero")))
    assert type(error) is errors.WorkerError
    assert str(error) == "a worker failed: ZeroDivisionError: division by zero (verbose=true shows its traceback)"
    assert error.__cause__ is not None


def test_a_dead_worker_and_a_lost_object_are_worker_errors(monkeypatch):
    assert "a worker process died" in str(raised_by_wait(monkeypatch, ActorDiedError()))
    lost = raised_by_wait(monkeypatch, ObjectLostError("ab" * 28, None, "call site"))
    assert type(lost) is errors.WorkerError
    assert str(lost).startswith("ObjectLostError: ")


# What else is done while ranks compute


def waiting(monkeypatch, *, looks, end):
    """What `meanwhile` was called with while Ray had no result for so many looks, and what `wait` did at the `end`."""
    timeouts, calls = [], []

    def get(pending, *, timeout):
        timeouts.append(timeout)
        if timeout and len(timeouts) <= looks:
            raise GetTimeoutError("not yet")
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(ray, "get", get)
    return RayHosts([]), timeouts, calls


def test_while_ranks_compute_the_driver_looks_at_what_else_there_is_again_and_again(monkeypatch):
    hosts, timeouts, calls = waiting(monkeypatch, looks=3, end=["a", "b"])
    WorkerGroup(hosts, "actor").meanwhile(lambda: calls.append(len(timeouts)))
    assert hosts.wait(["ref", "other"]) == ["a", "b"]
    assert (calls, timeouts) == ([1, 2, 3], [LOOK_S] * 4)


def test_with_nothing_else_to_do_it_waits_for_good(monkeypatch):
    hosts, timeouts, _ = waiting(monkeypatch, looks=3, end=["a"])
    assert hosts.wait(["ref"]) == ["a"]
    assert timeouts == [None]


@pytest.mark.parametrize("kind", [errors.RewardError, RuntimeError])
def test_what_is_raised_meanwhile_comes_out_of_the_wait_as_it_is(monkeypatch, kind):
    hosts, _, _ = waiting(monkeypatch, looks=9, end=["a"])

    def fail():
        raise kind("an engine died")

    hosts.meanwhile = fail
    with pytest.raises(kind, match=r"^an engine died$") as caught:
        hosts.wait(["ref"])
    assert caught.value.__context__ is None  # no talk of time-outs


def test_one_ranks_error_ends_the_wait_though_the_others_go_on(monkeypatch):
    """Ray's `get` raises as soon as one of the results is an error; its `wait` would wait for all."""
    hosts, _, calls = waiting(monkeypatch, looks=2, end=of_worker(errors.SyncError("weights differ")))
    hosts.meanwhile = lambda: calls.append("look")
    monkeypatch.setattr(ray, "wait", lambda *args, **kwargs: pytest.fail("asks for all results"))
    with pytest.raises(errors.SyncError, match="weights differ"):
        hosts.wait(["failed", "hangs"])
    assert calls == ["look"] * 2


def test_ray_is_asked_once_for_the_first_and_once_for_all_that_have_ended(monkeypatch):
    asked = []

    def wait(pending, *, num_returns, timeout):
        asked.append((num_returns, timeout))
        return (["b"], ["a", "c"]) if len(asked) == 1 else (["c", "b"], ["a"])

    monkeypatch.setattr(ray, "wait", wait)
    assert RayHosts([]).first(["a", "b", "c"], 0.25) == [1, 2]
    assert asked == [(1, 0.25), (3, 0)]
    assert RayHosts([]).first([], 0.25) == []
    assert LocalHosts(Host({}, verbose=True)).first(["a", "b"], 0.25) == [0, 1]


def test_every_error_of_the_project_survives_pickling():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RLTrainError)]
    assert len(kinds) >= 6
    for kind in kinds:
        copy = pickle.loads(pickle.dumps(kind("value, rule, way out")))
        assert (type(copy), str(copy)) == (kind, "value, rule, way out")


class Remote:
    """An actor's handle."""

    def __init__(self, rank):
        self.call = self
        self.remote = lambda role, method, *args: (rank, role, method, args)


def test_ray_hosts_start_on_all_ranks_or_on_those_named():
    hosts = RayHosts([Remote(0), Remote(1), Remote(2)])
    assert hosts.start("actor", "step", [(1,), (2,), (3,)]) == [(n, "actor", "step", (n + 1,)) for n in range(3)]
    assert hosts.start("actor", "step", [(7,)], ranks=[2]) == [(2, "actor", "step", (7,))]
    with pytest.raises(ValueError, match="zip"):
        hosts.start("actor", "step", [(1,)])
