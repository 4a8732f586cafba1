"""Tests that a separate process rewrites the report of an active run, not too often, and that failures are logged."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from rltrain.monitoring.report import refresh
from rltrain.monitoring.report.refresh import FIRST_AFTER_S, SHARE, ReportFile
from tests.made_runs import data_of, made_run


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def started(monkeypatch):
    """Replace each report process with a process that runs the given Python code, and count these processes."""
    codes, processes = [], []

    def start(folder):
        words = [sys.executable, "-c", codes[len(processes)]]
        processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    monkeypatch.setattr(refresh, "_started", start)
    yield codes, processes
    for process in processes:
        with process:
            process.kill()


def ended(process):
    """Wait until a process has ended, without reading the exit status of the process."""
    if process.returncode is None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_run_leaves_a_page_of_all_its_steps(tmp_path):
    folder = made_run(tmp_path / "run")
    assert data_of((folder / "report.html").read_text("utf-8"))["runs"][0]["steps"]["step"] == [1]
    assert not list(folder.glob("*.partial"))


def test_a_process_writes_the_page_while_the_run_goes_on(tmp_path, monkeypatch):
    folder, clock = made_run(tmp_path / "run"), Clock()
    (folder / "report.html").unlink()
    file = ReportFile(folder, clock)
    clock.now = FIRST_AFTER_S
    monkeypatch.chdir(tmp_path)
    file.refresh()
    ended(file.process)
    assert data_of((folder / "report.html").read_text("utf-8"))["runs"][0]["steps"]["step"] == [1]
    file.refresh()
    assert file.process is None
    assert file.next_at > FIRST_AFTER_S


def test_the_page_is_written_again_only_when_that_costs_at_most_its_share_of_the_time(tmp_path, started):
    clock, (codes, processes) = Clock(), started
    codes += ["print(2.0)", "print(0.5)"]
    file = ReportFile(tmp_path, clock)
    first, second = FIRST_AFTER_S + 1, FIRST_AFTER_S + 3 + 2 / SHARE
    for now, count in ((0, 0), (FIRST_AFTER_S - 1, 0), (first, 1), (first + 1, 1), (second - 2, 1), (second, 2)):
        clock.now = now
        file.refresh()
        assert len(processes) == count, now
        if processes:
            ended(processes[-1])


def test_a_page_that_takes_long_is_not_begun_twice_and_is_given_up_at_the_end_of_the_run(tmp_path, started):
    clock, (codes, processes) = Clock(), started
    codes.append("import time; time.sleep(1000)")
    folder = made_run(tmp_path / "run")
    file = ReportFile(folder, clock)
    for now in (FIRST_AFTER_S, 100 * FIRST_AFTER_S):
        clock.now = now
        file.refresh()
    assert len(processes) == 1
    assert file.close() == folder / "report.html"
    assert processes[0].returncode == -signal.SIGKILL


def test_the_process_ends_with_the_run_that_started_it(tmp_path):
    made_run(tmp_path / "run")
    code = (
        "from pathlib import Path; from rltrain.monitoring.report import refresh; refresh._START = "
        "'from workers.cluster.process_tree import end_with_parent; end_with_parent({parent}); import time; "
        "print(flush=True); time.sleep(1000)'\n"
        f"process = refresh._started(Path({str(tmp_path / 'run')!r})); process.stdout.readline(); print(process.pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and alive(pid):
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('OSError: No space left on device')", "OSError: No space left on device"),
        ("import os; os._exit(3)", "the report process ended with status 3"),
    ],
)
def test_a_process_that_fails_is_one_warning_and_is_tried_again_much_later(tmp_path, started, caplog, code, reason):
    clock, (codes, processes) = Clock(), started
    codes += [code, code]
    file = ReportFile(tmp_path, clock)
    for now in (FIRST_AFTER_S, FIRST_AFTER_S + 1, FIRST_AFTER_S + 2, 200 * FIRST_AFTER_S, 201 * FIRST_AFTER_S):
        clock.now = now
        file.refresh()
        ended(processes[-1])
    assert len(processes) == 2
    assert [record.message for record in caplog.records] == [f"report.html is not written: {reason}"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), ValueError("broken")])
def test_a_page_that_cannot_be_written_is_one_warning_and_the_run_goes_on(tmp_path, monkeypatch, caplog, error):
    def fails(folders, output):
        raise error

    monkeypatch.setattr(refresh, "write_report", fails)
    file = ReportFile(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert file.close() is None
        assert file.close() is None
    assert [record.message[:26] for record in caplog.records] == ["report.html is not written"]
