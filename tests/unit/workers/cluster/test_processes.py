"""Tests of the handles of worker processes: how calls start, and what waits do when a call fails or a process dies."""

import asyncio
import math
import pickle
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, ObjectLostError, RayActorError, RayTaskError

from rltrain.base import errors
from tests.fake_replicas import Reply, of_worker, settled
from workers.cluster.liveness import Liveness
from workers.cluster.processes import LocalProcess, Pending, RayProcess, Role, results
from workers.cluster.progress import Process
from workers.cluster.worker_process import Host, InnerCall


class Greeter:
    """A role with sync and async methods, and a method that raises."""

    def greet(self, name, *, mark="."):
        return f"hello {name}{mark}"

    def fail(self, error):
        raise error

    def same(self, value):
        return value

    def nest(self):
        return asyncio.run(self.answer())

    async def answer(self):
        return 42


class Owner:
    """A role that stores values, and returns the value at a given place."""

    def __init__(self, values):
        self.values = values

    def value(self, place):
        return self.values[place]


class Remote:
    """A fake handle of a Ray actor.

    Each method call is recorded, and the call's reply stays pending until the test provides a result.
    """

    def __init__(self, number=0):
        self._actor_id, self.calls, self.introduction = bytes([number]), [], Reply()
        self.introduce = SimpleNamespace(remote=lambda: self.introduction)
        for name in ("build", "call", "address"):
            setattr(self, name, SimpleNamespace(remote=self._noted(name)))

    def _noted(self, name):
        def remote(*args, **kwargs):
            reply = Reply()
            self.calls.append((name, args, kwargs))
            return reply

        return remote


@pytest.fixture
async def liveness(tasks):
    return Liveness(hang_timeout_s=math.inf, start_timeout_s=math.inf, tasks=tasks, here="here")


def pending(*replies, liveness=None):
    """Return one pending call per reply, where each call belongs to a separate fake process."""
    ranks = [RayProcess(Remote(number), f"training rank {number}", liveness) for number in range(len(replies))]
    return [Pending(rank, reply) for rank, reply in zip(ranks, replies, strict=True)]


# Tests of roles in the driver's own process


async def test_a_role_in_this_process_is_called_at_once_and_values_are_passed_as_they_are():
    process, value = LocalProcess(Host({}, verbose=True)), object()
    assert process.share(value) is value
    process.host.roles["greeter"] = Greeter()
    role = Role(process, "greeter")
    assert role.start(Greeter.greet, "you").outcome == "hello you."
    assert await role.call(Greeter.greet, "you", mark="!") == "hello you!"
    assert await results([]) == []
    with pytest.raises(errors.SyncError, match="weights differ"):
        await role.call(Greeter.fail, errors.SyncError("weights differ"))
    with pytest.raises(errors.WorkerError, match=r"^greeter failed: ZeroDivisionError: by zero \(verbose=true"):
        await role.call(Greeter.fail, ZeroDivisionError("by zero"))


async def test_the_result_of_another_role_in_the_same_process_is_an_argument_without_a_copy():
    process, values = LocalProcess(Host({}, verbose=True)), ["me"]
    process.host.roles |= {"owner": Owner(values), "greeter": Greeter()}
    owner, greeter = Role(process, "owner"), Role(process, "greeter")
    argument = owner.argument_for(greeter, Owner.value, 0)
    values[0] = "you"  # the owner is called only when the greeter runs
    assert await greeter.call(Greeter.greet, argument) == "hello you."
    values[0] = object()
    assert await greeter.call(Greeter.same, argument) is values[0]


def test_the_result_of_a_role_in_another_process_does_not_pass_through_the_driver():
    here, there = (RayProcess(Remote(number), f"rank {number}") for number in range(2))
    argument = Role(there, "owner").argument_for(Role(here, "greeter"), Owner.value, 7)
    assert isinstance(argument, Reply)  # a reference to the result of the call
    assert there.actor.calls == [("call", ("owner", "value", 7), {})]
    inner = Role(here, "owner").argument_for(Role(here, "greeter"), Owner.value, 7)
    assert inner == InnerCall("owner", "value", (7,), {})
    assert here.actor.calls == []


async def test_a_role_in_this_process_may_run_event_loops_of_its_own():
    process = LocalProcess(Host({}, verbose=True))
    process.host.roles["greeter"] = Greeter()
    assert await Role(process, "greeter").call(Greeter.nest) == 42
    assert await asyncio.sleep(0, "and this one goes on") == "and this one goes on"


async def test_a_role_in_this_process_is_built_at_once():
    process = LocalProcess(Host({}, verbose=True))
    built = process.build("share", "fractions:Fraction", 3, denominator=4)
    assert process.host.roles["share"].as_integer_ratio() == (3, 4)
    assert await results([built]) == [None]


async def test_in_this_process_nothing_is_lost():
    process = LocalProcess(Host({}, verbose=True))
    assert (process.how_lost, process.concurrent) == ("", False)
    assert await process.unless_lost(asyncio.sleep(0, 7)) == 7


def test_a_host_builds_a_role_from_its_path_and_calls_it_by_name():
    host = Host({}, verbose=True)
    host.build("share", "fractions:Fraction", 3, denominator=4)
    assert host.call("share", "as_integer_ratio") == (3, 4)
    assert host.call("share", "limit_denominator", max_denominator=1) == 1


# Errors of Ray workers, with Ray's own exceptions but no Ray running


async def raised_by_wait(error: Exception) -> Exception:
    reply = Reply()
    reply.fail(error)
    with pytest.raises(errors.RLTrainError) as caught:
        await results(pending(reply))
    return caught.value


@pytest.mark.parametrize("kind", [errors.SyncError, errors.LogProbError, errors.ConfigError, errors.RewardError])
async def test_an_error_of_the_project_reaches_the_caller_as_itself(kind):
    error = await raised_by_wait(of_worker(kind("value, rule, way out")))
    assert type(error) is kind
    assert str(error) == "value, rule, way out"
    assert error.__suppress_context__


async def test_any_other_error_of_a_worker_is_a_worker_error_of_one_line_whose_cause_has_the_traceback():
    error = await raised_by_wait(of_worker(ZeroDivisionError("the worker's traceback\ndivision by zero")))
    assert type(error) is errors.WorkerError
    assert str(error) == "a worker failed: ZeroDivisionError: division by zero (verbose=true shows its traceback)"
    assert error.__cause__ is not None


@pytest.mark.parametrize(
    ("ray_says", "where"),
    [
        ("ray::Host.call() (pid=12, ip=10.0.0.2, actor_id=00, repr=<a>)\nValueError: x", "training rank 0 (pid 12 on "),
        ("ray::Host.call() (pid=12, ip=10.0.0.2, actor_id=ff, repr=<a>)\nValueError: x", "a worker (pid 12 on "),
        (
            "ray::Host.call() (pid=9, ip=10.0.0.1, actor_id=ff)\n  an argument failed: ray::Host.call() (pid=12, "
            "ip=10.0.0.2, actor_id=00)\nValueError: x",
            "training rank 0 (pid 12 on ",
        ),
    ],
)
async def test_the_error_of_a_worker_names_the_process_and_its_node(ray_says, where):
    error = RayTaskError("Host.call", ray_says, ValueError("x")).as_instanceof_cause()
    raised = await raised_by_wait(error)
    assert str(raised) == f"{where}10.0.0.2) failed: ValueError: x (verbose=true shows its traceback)"


async def test_a_dead_worker_and_a_lost_object_are_worker_errors():
    died = await raised_by_wait(ActorDiedError())
    assert type(died) is errors.WorkerLost
    assert "a worker process died" in str(died)
    lost = await raised_by_wait(ObjectLostError("ab" * 28, None, "call site"))
    assert type(lost) is errors.WorkerError
    assert str(lost).startswith("ObjectLostError: ")


async def test_a_worker_that_ray_reports_as_dead_is_named_and_lost(liveness):
    replies = [Reply(), Reply()]
    calls = pending(*replies, liveness=liveness)
    calls[1].process.phase = "actor.update"
    replies[1].fail(RayActorError(actor_id="01"))
    with pytest.raises(errors.WorkerLost, match=r"^actor\.update: training rank 1 \(starting\) is gone \(killed"):
        await results(calls)
    assert calls[0].process.how_lost == ""
    assert calls[1].process.how_lost == "is gone (killed, crashed, out of memory, or its machine lost)"


async def test_an_error_of_one_worker_that_the_death_of_another_has_caused_is_that_death(liveness):
    replies = [Reply(), Reply()]
    calls = pending(*replies, liveness=liveness)
    replies[0].fail(of_worker(ConnectionError("connection closed by peer")))
    waiting = asyncio.ensure_future(results(calls))
    await settled()
    assert not waiting.done()
    calls[1].process.lose("is gone")
    with pytest.raises(errors.WorkerLost, match=r"training rank 1 \(starting\) is gone$"):
        await waiting


async def test_a_worker_that_reports_itself_as_unusable_is_lost_for_its_own_reason(liveness, monkeypatch):
    killed = []
    monkeypatch.setattr(liveness, "kill", killed.extend)
    (call,) = pending(Reply(), liveness=liveness)
    call.process.identity = Process(7, 0, "elsewhere", "two", 0, 0)
    error = errors.WorkerLost("its GPU has fallen off the bus")
    error.process = call.process.identity
    call.outcome.fail(of_worker(error))
    with pytest.raises(errors.WorkerLost, match=r"^starting: training rank 0 \(pid 7 on two\) its GPU has"):
        await results([call])
    assert (call.process.how_lost, killed) == ("its GPU has fallen off the bus", [call.process.identity])


def test_every_error_of_the_project_survives_pickling():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RLTrainError)]
    assert len(kinds) >= 6
    for kind in kinds:
        copy = pickle.loads(pickle.dumps(kind("value, rule, way out")))
        assert (type(copy), str(copy)) == (kind, "value, rule, way out")


# Tests that the driver can do other work while training ranks compute


async def test_while_ranks_compute_the_driver_does_what_else_there_is_to_do(tasks):
    replies, turns = [Reply(), Reply()], []

    async def other():
        for turn in range(3):
            turns.append(turn)
            await asyncio.sleep(0)

    waiting = asyncio.ensure_future(results(pending(*replies)))
    tasks.start(other(), "another task")
    await settled()
    assert (turns, waiting.done()) == ([0, 1, 2], False)
    replies[1].give("b")
    await settled()
    assert not waiting.done()
    replies[0].give("a")
    assert await waiting == ["a", "b"]  # the results are ordered by rank, not by arrival time


async def test_with_nothing_else_to_do_it_waits_for_good(monkeypatch):
    timers, reply = [], Reply()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_at", lambda *args, **_: timers.append(args))
    waiting = asyncio.ensure_future(results(pending(reply)))
    await settled()
    assert (waiting.done(), timers) == (False, [])
    reply.give("a")
    assert await waiting == ["a"]


@pytest.mark.parametrize("kind", [errors.RewardError, RuntimeError])
async def test_what_another_task_raises_meanwhile_comes_out_of_the_wait_as_it_is(tasks, kind):
    async def fail():
        raise kind("an engine died")

    tasks.start(fail(), "another task")
    with pytest.raises(kind, match=r"^an engine died$") as caught:
        await tasks.until(results(pending(Reply())))
    assert caught.value.__context__ is None  # the error does not mention the cancelled waits


async def test_one_ranks_error_ends_the_wait_though_the_others_go_on():
    failed, hangs = Reply(), Reply()
    waiting = asyncio.ensure_future(results(pending(failed, hangs)))
    await settled()
    assert not waiting.done()
    failed.fail(of_worker(errors.SyncError("weights differ")))
    with pytest.raises(errors.SyncError, match="weights differ"):
        await waiting
    assert hangs.open


async def test_the_death_of_a_process_on_which_the_results_depend_ends_the_wait(liveness):
    (call, other) = pending(Reply(), Reply(), liveness=liveness)
    waiting = asyncio.ensure_future(results([call], depends_on=[other.process]))
    await settled()
    assert not waiting.done()
    other.process.lose("is gone")
    with pytest.raises(errors.WorkerLost, match=r"training rank 1 \(starting\) is gone$"):
        await waiting


# Tests of method calls of Ray actors


async def test_a_call_reaches_the_method_of_the_role_and_its_phase_is_known():
    process = RayProcess(Remote(), "training rank 0")
    assert process.phase == "starting"
    process.build("greeter", "module:Greeter", 1, two=2)
    assert process.phase == "greeter.build"
    Role(process, "greeter").start(Greeter.greet, "you", mark="!")
    assert process.phase == "greeter.greet"
    process.begin(Host.address, loopback=True)
    assert process.actor.calls == [
        ("build", ("greeter", "module:Greeter", 1), {"two": 2}),
        ("call", ("greeter", "greet", "you"), {"mark": "!"}),
        ("address", (), {"loopback": True}),
    ]


async def test_a_pending_result_is_an_argument_as_it_is():
    first = Role(RayProcess(Remote(), "training rank 0"), "greeter").start(Greeter.answer)
    process = RayProcess(Remote(), "training rank 1")
    Role(process, "greeter").start(Greeter.greet, first.later)
    assert process.actor.calls[0][1][2] is first.outcome


async def test_without_its_daemons_ray_is_asked_nothing(liveness, monkeypatch):
    """A call to Ray after the death of a Ray daemon could end the driver without a message."""

    def check(**_):
        raise errors.ClusterLost("the raylet is gone")

    process = RayProcess(Remote(), "training rank 0", liveness)
    monkeypatch.setattr(liveness.daemons, "check", check)
    monkeypatch.setattr(ray, "put", lambda value: pytest.fail("Ray was called"))
    with pytest.raises(errors.ClusterLost):
        Role(process, "greeter").start(Greeter.greet, "you")
    with pytest.raises(errors.ClusterLost):
        process.share("value")
    assert process.actor.calls == []


async def test_a_process_that_is_killed_is_lost_and_is_watched_no_more(liveness, monkeypatch):
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    process = RayProcess(Remote(), "training rank 0", liveness)
    assert liveness.processes == [process]
    waiting = asyncio.ensure_future(process.unless_lost(asyncio.get_running_loop().create_future()))
    await settled()
    process.kill()
    with pytest.raises(errors.WorkerLost, match=r"^training rank 0 \(starting\) is being replaced$"):
        await waiting
    assert (killed, liveness.processes) == ([process.actor], [])
