import logging
import threading

import pytest

from rltrain.monitoring.report import refresh
from rltrain.monitoring.report.refresh import FIRST_AFTER_S, SHARE, ReportFile
from tests.made_runs import data_of, made_run


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_run_leaves_a_page_of_all_its_steps_and_no_thread(tmp_path):
    folder = made_run(tmp_path / "run")
    assert data_of((folder / "report.html").read_text("utf-8"))["runs"][0]["steps"]["step"] == [1]
    assert not list(folder.glob("*.partial"))
    assert "report" not in {thread.name for thread in threading.enumerate()}


def test_the_page_is_written_again_only_when_that_costs_at_most_its_share_of_the_time(tmp_path, monkeypatch):
    folder, clock = made_run(tmp_path / "run"), Clock()
    file, written = ReportFile(folder, clock), []
    monkeypatch.setattr(refresh, "write_report", lambda folders, output: written.append(clock.now))
    monkeypatch.setattr(refresh.time, "thread_time", iter([0.0, 2.0, 5.0, 5.5]).__next__)

    def refreshed_at(now):
        clock.now = now
        file.refresh()
        if file.thread is not None:
            file.thread.join()

    for now in (0.0, FIRST_AFTER_S - 1, FIRST_AFTER_S + 1, FIRST_AFTER_S + 2 / SHARE, FIRST_AFTER_S + 2 + 2 / SHARE):
        refreshed_at(now)
    assert written == [FIRST_AFTER_S + 1, FIRST_AFTER_S + 2 + 2 / SHARE]


def test_a_page_that_takes_long_does_not_hold_up_the_run_and_is_not_begun_twice(tmp_path, monkeypatch):
    clock, going, done = Clock(), threading.Event(), threading.Event()
    file, begun = ReportFile(made_run(tmp_path / "run"), clock), []

    def slow(folders, output):
        begun.append(output)
        going.set()
        assert done.wait(30)

    monkeypatch.setattr(refresh, "write_report", slow)
    clock.now = FIRST_AFTER_S
    file.refresh()
    assert going.wait(30)
    file.refresh()  # the second refresh returns at once, because the first refresh is still running
    assert len(begun) == 1
    done.set()
    assert file.close() == tmp_path / "run" / "report.html"
    assert len(begun) == 2


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
