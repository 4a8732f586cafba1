"""Tests of the processes that download from the hub: their results, and how they are ended."""

import errno
import os
import time

import pytest

from rltrain.data import download_process
from rltrain.data.download_process import is_of_disk, run_download

# Writes a line when it is ready, and then waits for a long time.
WAITING = "import sys, time; {before}; print('ready', flush=True); time.sleep(600)"
DEAF = WAITING.format(before="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
CLEANING = WAITING.format(
    before=(
        f"sys.path[:0] = {[os.getcwd()]!r}; from rltrain.data import download_process; "
        "download_process.remove_unfinished_files_at_sigterm(); files = [open(name, 'w') for name in sys.argv[1:]]"
    )
)


def interrupted(lines):
    assert lines.readline() == "ready\n"
    raise KeyboardInterrupt


def with_files(code: str, *files) -> str:
    return f"import sys; sys.argv[1:] = {[str(file) for file in files]!r}; {code}"


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(download_process, "_GRACE_S", 0.2)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_download(DEAF, os.environ, interrupted)
    assert time.monotonic() - began < 300  # Without SIGKILL, the process would run for 600 s.


def test_an_interrupted_process_deletes_only_what_it_has_open_and_has_not_finished(tmp_path):
    (tmp_path / "split.incomplete").mkdir()
    names = ["mine.incomplete", "split.incomplete/rows.arrow", "complete"]
    (tmp_path / "split.incomplete" / "earlier.arrow").touch()
    (tmp_path / "other.incomplete").touch()
    with pytest.raises(KeyboardInterrupt):
        run_download(with_files(CLEANING, *(tmp_path / name for name in names)), os.environ, interrupted)
    assert sorted(os.listdir(tmp_path)) == ["complete", "other.incomplete"]


def test_a_process_without_a_result_is_told_with_its_status_and_last_words():
    def read(lines):
        said = lines.read()
        return {"read": said} if said else {}

    died = run_download("import sys; sys.exit('first\\nno luck')", os.environ, read)
    assert died == {"error": "the download ended with status 1 (no luck); try again"}
    assert run_download("print('7')", os.environ, read) == {"read": "7\n"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_an_error_of_the_disk_is_known_however_deep_it_is(number):
    outer = ValueError("no data")
    outer.__cause__ = OSError(number, os.strerror(number))
    assert is_of_disk(outer)
    assert not is_of_disk(OSError(errno.ENOENT, "missing"))
    assert not is_of_disk(ValueError("Not enough disk space"))
