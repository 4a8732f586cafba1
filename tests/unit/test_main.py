"""Tests of the command line before a config exists, and of the handling of system errors."""

import asyncio
import bdb
import errno
import io
import os
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

import rltrain.main
from rltrain.main import main


def test_a_working_directory_that_is_gone_is_said_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["trainer.seed=1"]) == 2
    assert capsys.readouterr().err == "error: the working directory no longer exists; change to an existing directory\n"


def test_characters_that_the_encoding_of_stdout_lacks_are_shown_as_escapes(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert main(["--cfg", 'trainer.output_dir="büro"']) == 0
    assert b"output_dir: b\\xfcro\n" in shown.getvalue()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "No space left on device (/there/x): free space, or choose another trainer.output_dir"),
        (errno.EACCES, "Permission denied (/there/x): correct this error, or name another path"),
    ],
)
def test_an_error_of_the_system_names_its_path_and_its_own_remedy(monkeypatch, capsys, number, remedy):
    def fail(*_):
        raise OSError(number, os.strerror(number), "/there/x")

    monkeypatch.setattr(rltrain.main, "compose", fail)
    assert main(["trainer.seed=1"]) == 1
    assert capsys.readouterr().err == f"error: {remedy}\n"


class QuittedInTheDebugger:
    """A fake trainer that fails in step 4 as if the user had quit a debugger in a reward function."""

    def __init__(self) -> None:
        self.step, self.calls = 3, []
        self.tracker = SimpleNamespace(restore=lambda *_: None)
        self.collector = SimpleNamespace(drop_turns_after=lambda _: None)
        self.checkpoints = SimpleNamespace(finish=self.finish)

    async def fit(self) -> None:
        raise bdb.BdbQuit

    async def save(self) -> None:
        self.calls.append("save")

    async def finish(self) -> None:
        self.calls.append("finish")


def test_quitting_the_debugger_saves_a_checkpoint_and_ends_the_run_like_ctrl_c():
    trainer, shown = QuittedInTheDebugger(), io.StringIO()
    assert asyncio.run(rltrain.main.fit(trainer, None, Console(file=shown))) == 130
    assert (trainer.calls, shown.getvalue()) == (["save", "finish"], "stopping: saving a checkpoint of step 3\n")


def test_quitting_the_debugger_before_the_run_has_begun_is_no_error(monkeypatch, capsys):
    def quit_debugger(*_):
        raise bdb.BdbQuit

    monkeypatch.setattr(rltrain.main, "compose", quit_debugger)
    assert main(["trainer.seed=1"]) == 130
    assert capsys.readouterr().err == ""
