"""A terminal for tests: a program that runs in a pseudo-terminal of a given width, and the screen that a user sees."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from dataclasses import dataclass, field

_HEIGHT = 1000  # More lines than a test prints, so that the screen never scrolls.
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|\x1b\][^\x07]*\x07")


@dataclass
class Session:
    """The output of a program in a terminal, and the screen that a user sees.

    Attributes:
        status: exit status of the program.
        raw: everything that the program wrote, with its control sequences.
        lines: lines that the program wrote and did not erase. A line that is wider than the terminal is whole.
        drawn: every text of a line at the time at which the cursor left it, including erased lines.
    """

    status: int
    raw: str
    lines: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)


def session(command, *, width: int, timeout_s: float = 240, **options) -> Session:
    """Run a program in a pseudo-terminal, and return what a user sees. `options` are passed to `subprocess.Popen`."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _HEIGHT, width, 0, 0))
    deadline, said = time.monotonic() + timeout_s, b""
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, **options) as process:
        os.close(slave)
        try:
            while time.monotonic() < deadline:
                try:
                    chunk = os.read(master, 65536)
                except OSError:  # The program has closed the terminal.
                    break
                said += chunk
            status = process.wait(timeout=10)
        finally:
            process.kill()
            os.close(master)
    raw = said.decode()
    return Session(status, raw, *_screen(raw))


def _screen(raw: str) -> tuple[list[str], list[str]]:
    """Interpret the control sequences that rich writes: carriage return, cursor up, and erase line."""
    lines, row, column, drawn, place = [""], 0, 0, [], 0
    while place < len(raw):
        if control := _CONTROL.match(raw, place):
            place = control.end()
            if control[2] == "A":
                row = max(0, row - int(control[1] or 1))
            elif control[2] == "K":
                lines[row] = ""
            continue
        character, place = raw[place], place + 1
        if character == "\r":
            column = 0
        elif character == "\n":
            drawn.append(lines[row])
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row].ljust(column)[:column] + character + lines[row][column + 1 :]
            column += 1
        if character == "\r":
            drawn.append(lines[row])
    return [line.rstrip() for line in lines], [line for line in drawn if line]
