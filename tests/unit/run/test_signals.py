"""Tests of stop signals: what a first and a second signal do, before and after the run can be stopped safely."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import Stopped
from rltrain.run.signals import Signals
from workers.cluster.hangups import hangups_ignored


@pytest.fixture(autouse=True)
def _listening():
    """Restore the default handlers of SIGINT and SIGHUP.

    If a shell without job control starts pytest in the background, pytest ignores SIGINT by default.
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_while_the_workers_start_ends_the_run_with_its_own_status(number, status):
    with pytest.raises(Stopped) as caught, Signals():
        os.kill(os.getpid(), number)
    assert caught.value.status == status


def send_twice(number, seen) -> None:
    async def run():
        async with BackgroundTasks() as tasks:
            signals.stop_with(tasks)
            tasks.check()
            os.kill(os.getpid(), number)
            # A signal interrupts waits in which no work can be lost, but a signal does not interrupt computation.
            seen.append("computing goes on")
            await asyncio.sleep(0)
            with pytest.raises(Stopped):
                tasks.check()
            with pytest.raises(Stopped) as stopped:
                await tasks.until(asyncio.Event().wait())
            seen.append(stopped.value.status)
            try:
                os.kill(os.getpid(), number)
                await asyncio.Event().wait()
            finally:
                seen.append("ended")

    with Signals() as signals:
        asyncio.run(run())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_waits_for_a_safe_place_and_the_second_does_not(number, status):
    before, seen = signal.getsignal(number), []
    with pytest.raises(Stopped) as caught:
        send_twice(number, seen)
    assert seen == ["computing goes on", status, "ended"]
    assert caught.value.status == status
    assert signal.getsignal(number) is before


SEND_TO_SLEEPING = """
import os, pathlib, sys, time
pid, thread, number = map(int, sys.argv[1:])
status = pathlib.Path(f"/proc/{pid}/task/{thread}/status")
while "State:\\tS" not in status.read_text():
    time.sleep(0.01)
os.kill(pid, number)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_also_ends_a_wait_when_nothing_else_happens_in_the_event_loop(number):
    """Another process sends the signal while the event loop sleeps.

    No timer can wake the event loop before the signal arrives.
    """
    senders = []

    async def run():
        async with BackgroundTasks() as tasks:
            signals.stop_with(tasks)
            words = [os.getpid(), threading.get_native_id(), int(number)]
            senders.append(subprocess.Popen([sys.executable, "-c", SEND_TO_SLEEPING, *map(str, words)]))
            await tasks.until(asyncio.Event().wait())

    with Signals() as signals, pytest.raises(Stopped) as caught:
        asyncio.run(run())
    assert [sender.wait() for sender in senders] == [0]
    assert caught.value.status == 128 + number


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
async def test_a_hangup_that_the_shell_sends_again_does_not_end_the_save(tasks, first):
    with Signals() as signals:
        signals.stop_with(tasks)
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.status == 128 + first
        with pytest.raises(Stopped):
            tasks.check()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
async def test_a_signal_that_the_parent_ignores_as_under_nohup_stays_ignored(tasks, number):
    signal.signal(number, signal.SIG_IGN)
    with Signals() as signals:
        signals.stop_with(tasks)
        os.kill(os.getpid(), number)
        tasks.check()
        assert signals.received is None
    assert signal.getsignal(number) is signal.SIG_IGN


def test_what_is_started_while_hangups_are_ignored_outlives_one():
    script = "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"
    with hangups_ignored():
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
