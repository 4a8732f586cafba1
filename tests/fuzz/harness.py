"""Run command lines in the test process up to the start of the workers, and check which files are left behind."""

import contextlib
import copy
import functools
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hypothesis import HealthCheck, settings

import rltrain.data.row_sources
import rltrain.main
from rltrain.base.errors import ConfigError
from rltrain.run.memory.parts import Node
from rltrain.run.sweep import Job

# Total number of cases in all fuzz tests together. Each test gets a fixed share of the cases.
COUNT = int(os.environ.get("FUZZ_COUNT", "0"))
ROWS = 32  # Number of prompts of a built-in task.


def cases(share: float, by_default: int) -> Any:
    """Return Hypothesis's settings.

    The test cases are the same in every test run, unless `make fuzz` sets the number of cases.
    """
    return settings(
        max_examples=max(1, round(share * COUNT)) if COUNT else by_default, derandomize=not COUNT, deadline=None,
        database=None, suppress_health_check=list(HealthCheck), print_blob=True,
    )  # fmt: skip


_load_config = FileConfigSource.load_config


@functools.cache
def _loaded(root: str, name: str) -> Any:
    return _load_config(FileConfigSource("file", root), name)


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Load each YAML file only once for all cases, because Hydra would parse every file again for each case."""

    def load_config(self: FileConfigSource, config_path: str) -> Any:
        return copy.deepcopy(_loaded(self.path, config_path))

    with (
        mock.patch.object(FileConfigSource, "load_config", load_config),
        mock.patch.object(rltrain.data.row_sources, "BUILTIN_TRAIN_ROWS", ROWS),
    ):
        yield


class Started(BaseException):
    """Exception that is raised at the point where a run would start its workers."""


@dataclass(frozen=True)
class Outcome:
    """The result of a command line.

    Attributes:
        status: Exit status of the program, or None if the program reached the start of the workers.
        out, err: Text that the program wrote to stdout and stderr.
    """

    status: int | None
    out: str
    err: str


def status_of(overrides: Sequence[str]) -> int | None:
    """Run the program with `overrides`, and return its exit status, or None if it reaches the start of the workers."""

    def train(*_: Any, **__: Any) -> None:
        raise Started

    with (
        mock.patch.object(rltrain.main, "train", train),
        mock.patch.object(rltrain.main, "join_cluster", return_value=None),
        mock.patch.object(rltrain.main, "nodes_for", return_value=[Node("this machine", None)]),
        mock.patch.object(Job, "__call__", train),  # A sweep of several runs calls a `Job` for each run.
        read_once(),
    ):
        try:
            return rltrain.main.main(list(overrides))
        except Started:
            return None


def command(overrides: Sequence[str]) -> Outcome:
    """Run the program with `overrides`. The program ends at the point where a real run would start the workers."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = status_of(overrides)
    return Outcome(status, out.getvalue(), err.getvalue())


def refused(call: Callable[[], object]) -> str:
    """Return the message of the ConfigError that `call` raises, or "" if `call` raises no error.

    If `call` raises another error than ConfigError, the test fails.
    """
    try:
        with read_once():
            call()
    except ConfigError as error:
        return str(error) or "nothing"
    return ""


# Names of the files that a run writes before its first step.
WRITTEN_AT_START = ("config.yaml", "command.json", "tokens.parquet", "multirun.yaml")


def furnished(folder: Path) -> Path:
    """Fill a folder with an old run, a file of prompts and a reward function."""
    run = folder / "old_run"
    (run / "rollouts").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "config.yaml").write_text("trainer: {}\n")
    (run / "rollouts" / "step_000001.parquet").write_bytes(b"PAR1")
    (folder / "afile").write_text("text\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "1 2 3", "answer": "2"}\n')
    (folder / "my_reward.py").write_text("def score(prompt, response):\n    return 1.0\n")
    return folder


def files(folder: Path) -> dict[str, bytes | None]:
    """Return the content of every file below a folder, by path. The content of a subfolder is None."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@contextlib.contextmanager
def nothing_written_over(folder: Path) -> Iterator[list[Outcome]]:
    """Check that the `with` block changes no existing files, and creates files only if the program would start workers.

    The `with` block must append the outcome of its command line to the yielded list. One change is allowed: a run that
    is resumed in its own folder writes its config again.
    """
    before, outcomes = files(folder), []
    yield outcomes
    after = files(folder)
    (outcome,) = outcomes
    started, again = outcome.status is None, set()
    for name, content in before.items():
        assert name in after, f"{name} is gone"
        if started and name.endswith(WRITTEN_AT_START) and after[name] != content:
            again.add(name)
            (folder / name).write_bytes(content or b"")
        else:
            assert after[name] == content, f"{name} was overwritten"
    new = sorted(after.keys() - before.keys())
    if started:
        assert sum(name.endswith("config.yaml") for name in {*again, *new}) <= 1, (again, new)
        assert all(after[name] is None or name.endswith((*WRITTEN_AT_START, ".lock")) for name in new), new
    else:
        assert not new, new
    for name in sorted(new, reverse=True):  # The new files are deleted before the next case.
        path = folder / name
        path.rmdir() if path.is_dir() else path.unlink()


def check_refusal(outcome: Outcome) -> None:
    """Check that a refused command prints a one-line error message without a traceback."""
    if outcome.status is None:
        return
    shown = f"status {outcome.status}\n{outcome.err}"
    assert outcome.status in (0, 2), shown
    assert "Traceback" not in outcome.err, shown
    assert "unexpected" not in outcome.err, shown
    if outcome.status == 2:
        assert outcome.err.startswith("error: "), shown
        assert outcome.err.count("\n") == 1, shown
        assert outcome.err.endswith("\n"), shown
        assert len(outcome.err) < rltrain.main.LONGEST + 100, shown
        assert outcome.err.isprintable() or outcome.err[:-1].isprintable(), ascii(outcome.err)
    else:
        assert outcome.err == "", shown
