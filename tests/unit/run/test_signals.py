"""What the first and the second signal come to, before and after there is a safe place to stop at."""

import os
import signal
import subprocess
import sys

import pytest

from rltrain.base.errors import Stopped
from rltrain.run.signals import Signals
from workers.cluster.hangups import hangups_ignored


@pytest.fixture(autouse=True)
def _listening():
    """What a shell without job control starts in the background ignores SIGINT, and so might these tests."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_while_the_workers_start_ends_the_run_with_its_own_status(number, status):
    with pytest.raises(Stopped) as caught, Signals():
        os.kill(os.getpid(), number)
    assert caught.value.status == status


def send_twice(number) -> None:
    with Signals() as signals:
        signals.patient = True
        signals.check()
        os.kill(os.getpid(), number)
        with pytest.raises(Stopped):
            signals.check()
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_waits_for_a_safe_place_and_the_second_does_not(number, status):
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught:
        send_twice(number)
    assert caught.value.status == status
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_hangup_that_the_shell_sends_again_does_not_end_the_save(first):
    with Signals() as signals:
        signals.patient = True
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.status == 128 + first
        with pytest.raises(Stopped):
            signals.check()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_the_parent_ignores_as_under_nohup_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with Signals() as signals:
        os.kill(os.getpid(), number)
        signals.check()
    assert signal.getsignal(number) is signal.SIG_IGN


def test_what_is_started_while_hangups_are_ignored_outlives_one():
    script = "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"
    with hangups_ignored():
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
