"""Tests of the lines that say what a run waits for."""

import io
import threading
import time

import pytest
from rich.console import Console

from rltrain.monitoring import heartbeat as module
from rltrain.monitoring.heartbeat import Heartbeat


class Lines(io.StringIO):
    """A file that tells how many lines it has got, so that a test can wait for lines."""

    def until(self, count: int) -> list[str]:
        deadline = time.monotonic() + 30
        while len(lines := self.getvalue().splitlines()) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        return lines


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)


@pytest.mark.usefixtures("short")
def test_lines_name_the_innermost_phase_although_the_main_thread_is_blocked():
    file = Lines()
    with Heartbeat(Console(file=file)) as heartbeat, heartbeat.during("loading the data"):
        assert file.until(2)[:2] == ["still loading the data after 0 s"] * 2
        with heartbeat.during(lambda: "downloading [b]it[/b]: 3 of 4"):
            count = len(file.getvalue().splitlines())
            assert file.until(count + 2)[count + 1] == "downloading [b]it[/b]: 3 of 4"
        count = len(file.getvalue().splitlines())
        assert file.until(count + 2)[count + 1] == "still loading the data after 0 s"
    ended = file.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    assert file.getvalue() == ended


@pytest.mark.usefixtures("short")
def test_an_error_ends_its_phase():
    file = Lines()
    with Heartbeat(Console(file=file)) as heartbeat, heartbeat.during("outer"):
        with pytest.raises(ValueError, match="bad"), heartbeat.during("inner"):
            raise ValueError("bad")
        count = len(file.getvalue().splitlines())
        assert file.until(count + 2)[count + 1] == "still outer after 0 s"


@pytest.mark.usefixtures("short")
def test_a_terminal_gets_no_lines_because_it_has_a_live_display():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, _environ={"TERM": "xterm"})
    with Heartbeat(console) as heartbeat, heartbeat.during("loading the data"):
        time.sleep(0.05)
    assert file.getvalue() == ""


def test_a_line_that_was_printed_postpones_the_next(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    heartbeat = Heartbeat(Console(file=file))
    with heartbeat.during("waiting"):
        for now[0] in range(1, 130):
            if now[0] == 50:
                heartbeat.say("progress")
            heartbeat.beat()
    assert file.getvalue().splitlines() == ["progress", "still waiting after 2 min"]
