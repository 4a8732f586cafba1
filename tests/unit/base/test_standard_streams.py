"""Tests of standard streams whose reader disappears, whose disk is full, or that are closed when the program starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LONG = """
import logging, sys
from rich.console import Console
from rltrain.base.standard_streams import open_closed_streams, outlive_readers
open_closed_streams()
outlive_readers()
for number in range(20_000):
    print("to stdout", number)
Console().print("[bold]by rich[/]")
logging.warning("to stderr")
print("to stderr", file=sys.stderr)
open(sys.argv[1], "w").write(f"{sys.stdout.isatty()} {sys.stdout.fileno()}")
"""


def python(*arguments, **options):
    """Run Python in a new process, wait until the process ends, and return its `Popen` object."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stderr=options.pop("stderr", subprocess.PIPE), text=True,
        **options,
    )  # fmt: skip
    process.said = process.communicate(timeout=100)[1]
    return process


@pytest.fixture
def nobody():
    """Yield the write end of a pipe whose read end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_a_program_whose_readers_have_left_runs_to_its_end(tmp_path, nobody, unbuffered):
    done = python(*unbuffered, "-c", LONG, tmp_path / "end", stdout=nobody, stderr=nobody)
    assert done.returncode == 0
    assert (tmp_path / "end").read_text() == "False 1"


def test_a_full_disk_below_stdout_loses_the_output_alone(tmp_path):
    with open("/dev/full", "w") as full:
        done = python("-c", LONG, tmp_path / "end", stdout=full)
    assert (done.returncode, done.said) == (0, "WARNING:root:to stderr\nto stderr\n")
    assert (tmp_path / "end").exists()


def test_a_program_that_starts_without_streams_opens_no_file_in_their_place(tmp_path):
    script = """
import os, subprocess, sys
from rltrain.base.standard_streams import open_closed_streams
open_closed_streams()
file = open(sys.argv[1], "w")
file.write(str(file.fileno() > 2))
file.flush()
print("lost")
print("lost", file=sys.stderr)
assert sys.stdin.read() == ""
subprocess.run(["sh", "-c", "echo lost; echo lost >&2"], check=True)
"""

    def close():
        for descriptor in range(3):
            os.close(descriptor)

    done = python("-c", script, tmp_path / "end", stderr=None, preexec_fn=close)
    assert done.returncode == 0
    assert (tmp_path / "end").read_text() == "True"


@pytest.mark.parametrize("flag", ["--help", "--cfg"])
def test_help_and_config_end_quietly_when_their_reader_has_seen_enough(nobody, flag):
    done = python("-m", "rltrain.main", flag, stdout=nobody)
    assert (done.returncode, done.said) == (0, "")


def test_a_config_that_cannot_be_written_out_is_an_error():
    with open("/dev/full", "w") as full:
        done = python("-m", "rltrain.main", "--cfg", stdout=full)
    assert done.returncode == 1
    assert done.said.startswith("error: No space left on device")
    assert len(done.said.splitlines()) == 1


def test_bad_input_has_its_status_where_nobody_reads_the_message(nobody):
    done = python("-m", "rltrain.main", "trainer.totl_steps=3", stdout=nobody, stderr=nobody)
    assert done.returncode == 2
