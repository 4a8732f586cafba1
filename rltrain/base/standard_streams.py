"""Standard streams of a program that goes on when the terminal, pipe or disk behind them does not."""

import contextlib
import io
import os
import sys
from typing import Any

_STREAMS = ("stdin", "stdout", "stderr")  # by descriptor


class _Lasting(io.FileIO):
    """A file that drops what cannot be written: its reader has left, its terminal is gone, or its disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data).cast("B"))


def open_closed_streams() -> None:
    """Connect standard streams that were closed when the program started to the null device.

    The next file to be opened would get the number of a closed one, and with it whatever child processes print.
    """
    for descriptor, name in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this descriptor
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def outlive_readers() -> None:
    """From now on, drop what cannot be written to stdout and stderr instead of raising OSError.

    Streams that were replaced before, for instance by a test, stay as they are.
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
    """Whether this is the process's own stream, which writes to the descriptor."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor
    except io.UnsupportedOperation:
        return False
