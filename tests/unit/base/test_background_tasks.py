"""Tests of background tasks, of waits that end when a task fails, and of waits for a change of state."""

import asyncio
import contextvars

import pytest

from rltrain.base.background_tasks import BackgroundTasks, Changes, cancelled, outside_event_loop
from tests.fakes import turns


async def fails(error):
    raise error


async def fails_after(event, error):
    await event.wait()
    raise error


async def value(found):
    return found


# Tests of waits in the main coroutine


async def test_a_wait_returns_the_result_though_tasks_run_beside_it(tasks):
    tasks.start(asyncio.Event().wait(), "endless")
    assert await tasks.until(value(5)) == 5
    found = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(found.set_result, 6)
    assert await tasks.until(found) == 6


async def test_the_error_of_what_is_waited_for_is_raised_and_no_failure_of_a_task(tasks):
    with pytest.raises(KeyError, match="the result"):
        await tasks.until(fails(KeyError("the result")))
    tasks.check()
    assert await tasks.until(value(5)) == 5


async def test_the_failure_of_a_task_ends_the_wait_and_cancels_what_was_waited_for(tasks):
    began, broken, ends = asyncio.Event(), asyncio.Event(), []

    async def endless():
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # The awaited coroutine can clean up before the caller gets the error.
            ends.append("cancelled")

    async def main():
        try:
            await tasks.until(endless())
        finally:
            ends.append("raised")

    tasks.start(fails_after(broken, OSError("an engine died")), "engine")
    waiting = asyncio.create_task(main())
    await began.wait()
    broken.set()
    with pytest.raises(OSError, match="an engine died"):
        await waiting
    assert ends == ["cancelled", "raised"]


async def test_a_failure_ends_all_waits_and_the_later_ones_too_and_the_first_failure_is_raised(tasks):
    broken = asyncio.Event()
    waiting = [asyncio.create_task(tasks.until(asyncio.Event().wait())) for _ in range(3)]
    await turns()
    tasks.start(fails_after(broken, OSError("the first")), "one")
    broken.set()
    await turns()
    tasks.start(fails(OSError("the second")), "two")
    await turns()
    for wait in waiting:
        with pytest.raises(OSError, match="the first"):
            await wait
    with pytest.raises(OSError, match="the first"):
        await tasks.until(asyncio.Event().wait())
    with pytest.raises(OSError, match="the first"):
        tasks.check()


async def test_a_result_that_is_there_is_returned_in_spite_of_a_failure_and_no_data_is_lost(tasks):
    there = asyncio.get_running_loop().create_future()
    there.set_result("answers")
    tasks.interrupt(OSError("an engine died"))
    assert await tasks.until(there) == "answers"
    assert await tasks.until(value("scores")) == "scores"


async def test_an_interruption_ends_present_and_later_waits_and_is_raised_between_them(tasks):
    waiting = asyncio.create_task(tasks.until(asyncio.Event().wait()))
    await turns()
    tasks.check()
    tasks.interrupt(RuntimeError("stop"))
    with pytest.raises(RuntimeError, match="stop"):
        await waiting
    with pytest.raises(RuntimeError, match="stop"):
        await tasks.until(asyncio.Event().wait())
    with pytest.raises(RuntimeError, match="stop"):
        tasks.check()


async def test_a_wait_that_begins_after_an_interruption_ends_without_another_notification(tasks):
    tasks.interrupt(RuntimeError("stop"))
    with pytest.raises(RuntimeError, match="stop"):
        await asyncio.wait_for(tasks.until(asyncio.Event().wait()), 10.0)


async def test_cancelling_a_wait_cancels_what_it_waits_for_and_leaves_the_tasks_alone(tasks):
    other = tasks.start(asyncio.Event().wait(), "other")
    inner = asyncio.ensure_future(asyncio.Event().wait())
    waiting = asyncio.create_task(tasks.until(inner))
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert inner.cancelled()
    assert not other.done()
    tasks.check()


async def test_a_wait_leaves_no_task_behind(tasks):
    before = asyncio.all_tasks()
    await tasks.until(value(5))
    tasks.interrupt(RuntimeError("stop"))
    with pytest.raises(RuntimeError):
        await tasks.until(asyncio.Event().wait())
    assert asyncio.all_tasks() == before


# Tests of the lifetime of background tasks


async def test_a_task_has_its_name_and_one_that_ends_or_is_cancelled_is_no_failure(tasks):
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    ends, endless = tasks.start(asyncio.sleep(0), "ends"), tasks.start(asyncio.Event().wait(), "endless")
    assert (ends.get_name(), endless.get_name()) == ("ends", "endless")
    await ends
    endless.cancel()
    await turns()
    assert endless.cancelled()
    tasks.check()
    assert errors == []


async def test_the_end_of_the_block_cancels_the_tasks_and_waits_for_their_end():
    log = []

    async def slow_to_end(name):
        try:
            await asyncio.Event().wait()
        finally:
            await turns(3)
            log.append(name)

    async with BackgroundTasks() as tasks:
        running = [tasks.start(slow_to_end(name), name) for name in ("a", "b")]
        await turns()
        assert log == []
    assert sorted(log) == ["a", "b"]
    assert all(task.cancelled() for task in running)


async def test_the_error_of_the_block_is_raised_whatever_the_tasks_raise_when_they_are_cancelled():
    async def fails_at_the_end():
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("while it was cancelled")

    async def block():
        async with BackgroundTasks() as tasks:
            tasks.start(fails_at_the_end(), "bad")
            await turns()
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        await block()


async def test_futures_that_are_done_are_left_alone_and_their_errors_count_as_seen():
    loop, errors = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: errors.append(context["message"]))
    done, failed, waits = loop.create_future(), loop.create_future(), asyncio.ensure_future(asyncio.Event().wait())
    done.set_result(1)
    failed.set_exception(OSError("nobody asks for it"))
    await cancelled(done, failed, waits)
    assert (done.result(), waits.cancelled()) == (1, True)
    del failed
    assert errors == []


# Tests of waits until a condition holds


async def test_all_who_wait_check_again_and_each_goes_on_only_when_its_own_condition_holds():
    changes, state, log = Changes(), {"a": 0, "b": 0}, []

    async def wait(name, least):
        log.append((name, await changes.until(lambda: state[name] >= least and state[name])))

    waiting = [asyncio.create_task(wait(*one)) for one in (("a", 1), ("a", 1), ("b", 2))]
    await turns()
    changes.notify()
    await turns()
    assert log == []
    state["a"] = 1
    await turns()
    assert log == []  # The state has changed, but `changes.notify()` was not called yet.
    changes.notify()
    await turns()
    assert log == [("a", 1), ("a", 1)]
    state["b"] = 1
    changes.notify()
    await turns()
    assert len(log) == 2
    state["b"] = 2
    changes.notify()
    await asyncio.gather(*waiting)
    assert log[2:] == [("b", 2)]


async def test_a_condition_that_holds_is_not_waited_for():
    changes = Changes()
    waiting = changes.until(lambda: "there")
    with pytest.raises(StopIteration) as returned:
        waiting.send(None)  # The condition is already true, so the coroutine finishes in its first step.
    assert returned.value.value == "there"


async def test_one_who_is_cancelled_takes_nothing_from_the_others():
    changes, state = Changes(), []
    first, second = (asyncio.create_task(changes.until(lambda: state)) for _ in range(2))
    await turns()
    first.cancel()
    await turns()
    assert first.cancelled()
    state.append("news")
    changes.notify()
    await turns()
    assert second.result() == ["news"]


async def test_a_change_between_the_check_and_the_wait_is_not_missed():
    """A signal handler can run between any two instructions, e.g. between the check of a condition and the wait."""
    changes, state = Changes(), []

    def checked_just_before_the_change():
        found = list(state)
        if not state:
            state.append("news")
            changes.notify()
        return found

    assert await asyncio.wait_for(changes.until(checked_just_before_the_change), 10.0) == ["news"]


async def test_changes_that_follow_each_other_before_anybody_runs_are_all_seen():
    changes, queue, seen = Changes(), [], []

    async def consume():
        while len(seen) < 100:
            await changes.until(lambda: queue)
            seen.append(queue.pop(0))

    consumers = [asyncio.create_task(consume()) for _ in range(3)]
    # The consumers end after 100 items. Up to two consumers still wait at that time, and each takes one more item.
    for number in range(102):
        queue.append(number)
        changes.notify()
        if number % 7 == 0:
            await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*consumers), 10.0)
    assert seen == list(range(len(seen)))
    assert len(seen) >= 100


async def test_a_coroutine_that_goes_on_and_notifies_at_once_wakes_the_others_too():
    changes, turn, order = Changes(), [0], []

    async def wait(number):
        await changes.until(lambda: turn[0] == number)
        order.append(number)
        turn[0] += 1
        changes.notify()

    waiting = [asyncio.create_task(wait(number)) for number in (3, 2, 1)]
    await turns()
    turn[0] = 1
    changes.notify()
    await asyncio.wait_for(asyncio.gather(*waiting), 10.0)
    assert order == [1, 2, 3]


# Tests of event loops that user code creates


async def test_in_the_block_code_may_run_event_loops_of_its_own_and_the_running_one_goes_on_afterwards():
    loop, task, there = asyncio.get_running_loop(), asyncio.current_task(), contextvars.ContextVar("there")
    there.set("here")

    async def of_the_user():
        assert asyncio.get_running_loop() is not loop
        await asyncio.sleep(0)
        return there.get()

    with pytest.raises(RuntimeError, match="no running event loop"), outside_event_loop():
        asyncio.get_running_loop()
    for _ in range(2):
        with outside_event_loop():
            assert asyncio.run(of_the_user()) == "here"
        assert (asyncio.get_running_loop(), asyncio.current_task()) == (loop, task)
    assert await asyncio.wait_for(value(5), 10.0) == 5  # Timers and new tasks of the running event loop still work.


async def test_an_error_in_the_block_is_raised_and_the_running_loop_is_back():
    loop = asyncio.get_running_loop()
    with pytest.raises(OSError, match="of the user"), outside_event_loop():
        asyncio.run(fails(OSError("of the user")))
    assert asyncio.get_running_loop() is loop
    await asyncio.sleep(0)


def test_without_a_running_loop_the_block_changes_nothing():
    with outside_event_loop():
        assert asyncio.run(value(5)) == 5
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
