"""Run the program in given environments. Each run is in a forked process, so that libraries are imported only once.

Each server process has one locale, because a process cannot change the locale with which it started. The server's
command-line argument is the file descriptor of a socket. The server reads `Case` objects from the socket, and writes
their outcomes to the socket.
"""

import io
import os
import pwd
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from harness import Outcome, read_once, status_of

from rltrain.main import tokenizer_of
from rltrain.settings.compose import compose
from rltrain.tasks.tiny_model import tiny_model


@dataclass(frozen=True)
class Case:
    """A command line and the environment in which it runs.

    Attributes:
        words: Words of the command line, as a shell would pass them.
        variables: Environment variables to set. A variable with the value None is unset.
        folder: Working directory of the run, or None for a working directory that has been deleted.
        known: Whether the user database has an entry for the current user.
        stdout, stderr: Encoding of the stream, or None if the stream is closed.
    """

    words: tuple[bytes, ...]
    variables: dict[str, bytes | None]
    folder: bytes | None
    known: bool
    stdout: str | None
    stderr: str | None


def unknown(uid: int) -> None:
    raise KeyError(f"uid not found: {uid}")


def enter(case: Case) -> None:
    """Give the current process the environment that the case describes."""
    for name, value in case.variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environb[name.encode()] = value
    tempfile.tempdir = None  # With None, Python's tempfile chooses its folder again.
    if case.folder is None:
        gone = tempfile.mkdtemp(dir="/tmp")
        os.chdir(gone)
        os.rmdir(gone)
    else:
        os.chdir(case.folder)
    if not case.known:
        pwd.getpwuid = unknown


def text_to(stream: io.BytesIO, encoding: str | None, errors: str) -> io.TextIOWrapper | None:
    return encoding and io.TextIOWrapper(stream, encoding=encoding, errors=errors, write_through=True)


def outcome_of(case: Case) -> Outcome:
    enter(case)
    out, err = io.BytesIO(), io.BytesIO()
    sys.stdout, sys.stderr = text_to(out, case.stdout, "strict"), text_to(err, case.stderr, "backslashreplace")
    status = status_of([os.fsdecode(word) for word in case.words])
    return Outcome(status, out.getvalue().decode("latin-1"), err.getvalue().decode(case.stderr or "ascii"))


def serve(connection: Connection) -> None:
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        if child := os.fork():
            if os.waitpid(child, 0)[1]:
                connection.send("the process ended")
            continue
        try:
            connection.send(outcome_of(case))
        except BaseException as error:
            connection.send(f"{type(error).__name__}: {error}")
        os._exit(0)


if __name__ == "__main__":
    with read_once():
        # Loading a tokenizer imports modules that a run imports late.
        tokenizer_of(compose(["rollout=hf", "placement=inprocess"])[0])
        tiny_model()
    serve(Connection(int(sys.argv[1])))
