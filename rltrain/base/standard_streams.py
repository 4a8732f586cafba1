"""Standard streams for a program that must keep running when the terminal or pipe is gone or the disk is full."""

import contextlib
import io
import os
import sys
from typing import Any

_STREAMS = ("stdin", "stdout", "stderr")  # The index of a stream in `_STREAMS` is the stream's file descriptor.


class _Lasting(io.FileIO):
    """A file that silently drops written data if the reader or terminal is gone or the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data).cast("B"))


def open_closed_streams() -> None:
    """Open the null device in place of each standard stream that was already closed when the program started.

    If a standard stream stayed closed, the next file that the program opens would get the stream's file descriptor, and
    child processes would print into the file.
    """
    for descriptor, name in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            # `os.open` returns the lowest free file descriptor, which is `descriptor`, because all lower file
            # descriptors are in use.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def outlive_readers() -> None:
    """Make stdout and stderr drop data that they cannot write, instead of raising OSError.

    If a test or another caller has replaced sys.stdout or sys.stderr, the replacement is not changed.
    """
    for descriptor, name in list(enumerate(_STREAMS))[1:]:
        stream = getattr(sys, name)
        if not _is_own(stream, descriptor):
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        raw = _Lasting(descriptor, "w", closefd=False)
        whole = raw if stream.write_through else io.BufferedWriter(raw)
        lasting = io.TextIOWrapper(
            whole,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)


def _is_own(stream: Any, descriptor: int) -> bool:
    """Return whether `stream` is the process's original stream, which writes to the file descriptor `descriptor`."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
    except io.UnsupportedOperation:
        return False
