"""What the first and the second signal come to, before and after there is a safe place to stop at."""

import os
import signal

import pytest

from rltrain.errors import Stopped
from rltrain.signals import Signals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
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
