"""Run Python code that nobody has read: in processes of its own, limited, and cut off from this machine if it can be.

There are two forms. The strong one uses bubblewrap (`bwrap`): the program sees no file but those that Python needs, no
process but its own, and no network; it can write only to a folder in memory that ends with it. It works where bwrap is
installed and the kernel lets this user make namespaces, which is tried once in each process. The weak form has the same
limits of time, memory, output, processes and file size, the same empty environment and a folder that is removed, and
that is all: there a program can read and write whatever this user can, use the network, and signal this user's
processes, this one too: end a reward process, keep its own start from being noticed so that the sample fails instead of
earning 0, read tests and verdicts where this user is root. It holds back mistakes, and nobody who means harm.

What the strong form leaves open: where this user is root, a program can change the mode of the five devices it sees
(null, zero, full, random, urandom), which are this machine's. Run rltrain as another user to close that too.

Bounds in both: memory is bounded as address space per process, and summed over processes fifty times a second, as the
number of processes and threads is; so for an instant both can be passed. Not counted: what the kernel keeps for pipes
and memfds. Linux only.
"""

import contextlib
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rltrain.base.errors import RLTrainError
from rltrain.rewards.sandbox_command import command, counts_processes_per_namespace, environment

logger = logging.getLogger(__name__)

Status = Literal["ok", "error", "timeout", "killed", "output_limit"]
LEVELS = ("auto", "required", "limits")
_START_LIMIT_S = 60.0  # for an interpreter on a machine that has much to do
_END_LIMIT_S = 2.0  # for the watcher to end everything, before it is ended itself
_DRAIN_LIMIT_S = 0.5  # for output that is still on its way; longer only if somebody keeps the other end open
_lock = threading.Lock()
_why_not: list[str] = []  # once tried: why the strong form does not work here, "" if it does
_warned: list[str] = []


class SandboxError(RLTrainError, RuntimeError):
    """No sandbox of the level asked for works here. It says nothing about the program."""


@dataclass(frozen=True)
class SandboxResult:
    """What became of a program.

    Attributes:
        status: "ok": exit code 0. "error": any other, as after an exception, MemoryError among them. "timeout": the
            seconds (wall clock or CPU) were used up. "killed": by a signal, its own crash included, or because all its
            processes together passed a limit. "output_limit": it wrote more than allowed.
        stdout: what it wrote, cut at the limit; bytes that are no UTF-8 are replaced.
        stderr: the same.
        returncode: its exit code, minus the signal's number if a signal ended it; None if it was stopped from outside.
        seconds: wall clock, from its start to the end of its last process.
        reason: in words, unless the status says it all.
        judged: what the judge wrote to its standard output.
    """

    status: Status
    stdout: str
    stderr: str
    returncode: int | None
    seconds: float
    reason: str = ""
    judged: str = ""


def run(
    code: str,
    *,
    stdin: str = "",
    judge: str | None = None,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    cpu_s: float | None = None,
    max_output_bytes: int = 1 << 20,
    max_processes: int = 32,
    max_file_mb: int = 16,
    level: str = "auto",
) -> SandboxResult:
    """Run a program to its end, or to a limit; when this returns, all its processes and files are gone.

    The program is the main module of an isolated Python like this one, with the standard library and nothing else. Can
    be called from any thread, and from several at once. Standard input is a file.

    Args:
        code: Python source.
        stdin: what the program can read from standard input.
        judge: source of a second program that runs beside the first. They are joined by two pipes, of which each has
            `sandbox_inside.LINK`, (read, write); the first program can reach neither the judge's memory, nor its text
            or output (in the weak form: unless it is root). The end, the exit code and the status are then the judge's.
        timeout_s: wall-clock seconds, without those that an interpreter takes to start.
        memory_mb: address space of each process; memory of all together; in the strong form all files together.
        cpu_s: CPU seconds of each process, rounded up to whole ones; None: bounded by `timeout_s` alone.
        max_output_bytes: of standard output and standard error, each.
        max_processes: processes and threads at a time, the first one included.
        max_file_mb: size of each file.
        level: "auto": the strong form, or with one warning the weak one. "required": the strong one or a SandboxError.
            "limits": the weak one.

    Raises:
        SandboxError: no such form works here, or Python does not start in it; says what to do.
        ValueError: a limit is not positive, or the level has no such name.
    """
    _check(locals())
    files = ("memory_mb", memory_mb), ("max_file_mb", max_file_mb), ("max_processes", max_processes)
    limits = {**dict(files), "cpu_s": 0 if cpu_s is None else -int(-cpu_s // 1)}
    return _run(
        (code, stdin, judge), limits, strong=_strong(level), timeout_s=timeout_s, max_output_bytes=max_output_bytes
    )


def why_not_strong() -> str:
    """Try the strong form, once per process; say in one line why it does not work here, "" if it does."""
    with _lock:
        if not _why_not:
            _why_not.append(_try_strong())
        return _why_not[0]


def _check(given: dict[str, Any]) -> None:
    for name in ("timeout_s", "memory_mb", "cpu_s", "max_output_bytes", "max_processes", "max_file_mb"):
        if given[name] is not None and not given[name] > 0:
            raise ValueError(f"sandbox: {name} is {given[name]} and must be positive; give a number above 0")
    if given["level"] not in LEVELS:
        raise ValueError(f"sandbox: level is '{given['level']}'; choose one of {', '.join(LEVELS)}")


def weakness(level: str) -> str:
    """Say in one line what programs could do here at this level, "" if nothing; `run` will not say it again.

    Raises:
        SandboxError: no such form works here.
    """
    if sys.platform != "linux":
        raise SandboxError(f"sandbox: this is {sys.platform}, and it needs Linux; score code on a Linux machine")
    if level == "limits" or not (why := why_not_strong()):
        return ""
    if level == "required":
        raise SandboxError(f"sandbox: the strong form does not work here: {why}")
    with _lock:
        _warned.append(why)
    return (
        "sandbox: model-written code runs with limits on time, memory and output only: it can read and write this "
        f"user's files, use the network and signal this user's processes, because {why}"
    )


def _strong(level: str) -> bool:
    said_before = bool(_warned)
    weak = weakness(level)
    if weak and not said_before:
        logger.warning("%s", weak)
    return level != "limits" and not weak


def _try_strong() -> str:
    if shutil.which("bwrap") is None:
        return "bwrap is not installed; install bubblewrap"
    limits = {"memory_mb": 512, "max_file_mb": 1, "max_processes": 8, "cpu_s": 0}
    try:
        result = _run(("pass", "", None), limits, strong=True, timeout_s=10.0, max_output_bytes=1 << 16)
        why = "" if result.status == "ok" else f"a program that does nothing ended with '{result.status}'"
    except (SandboxError, OSError) as error:
        why = str(error)
    if why:
        return (
            f"{why}; allow user namespaces and /proc mounts (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container --privileged, or seccomp, apparmor and "
            "systempaths unconfined)"
        )
    return ""


def _run(
    texts: tuple[str, str, str | None], limits: dict[str, int], *, strong: bool, timeout_s: float, max_output_bytes: int
) -> SandboxResult:
    code, stdin, judge = texts
    with contextlib.ExitStack() as stack:
        folder = "/tmp" if strong else stack.enter_context(_folder())
        control, theirs = (stack.enter_context(end) for end in socket.socketpair())
        program, given_input = (stack.enter_context(_memory_file(text)) for text in (code, stdin))
        rules = stack.enter_context(_memory_file(judge or ""))
        verdicts, verdicts_in = (
            stack.enter_context(os.fdopen(*end, 0)) for end in zip(os.pipe(), ("rb", "wb"), strict=True)
        )
        passed = {"control": theirs, "program": program, "judge": rules, "verdicts": verdicts_in}
        numbers = {
            **{name: file.fileno() for name, file in passed.items()},
            "has_judge": judge is not None,
            "nproc": limits["max_processes"] + 64 if strong and counts_processes_per_namespace() else 0,
            **limits,
        }
        process = subprocess.Popen(
            [*command(strong=strong), *(f"{name}={value:d}" for name, value in numbers.items())],
            stdin=given_input,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[numbers[name] for name in passed],
            env=environment(folder),
            cwd="/" if strong else folder,
            start_new_session=True,
            bufsize=0,
        )
        stack.callback(_bury, process, control, None if strong else folder)
        theirs.close()
        verdicts_in.close()
        watched = _Watched(control, [process.stdout, process.stderr, verdicts], timeout_s, max_output_bytes)
        watched.until_end()
    return watched.result()


class _Watched:
    """One running sandbox: what it has written so far, and why it was stopped."""

    def __init__(self, control: socket.socket, pipes: list[Any], timeout_s: float, max_output_bytes: int) -> None:
        self._control, self._timeout_s, self._max_bytes = control, timeout_s, max_output_bytes
        self._written = {pipe: bytearray() for pipe in pipes}
        self._said = b""  # by the watcher: "started", and when all has ended, why
        self._stopped: Status | None = None
        self._started = self._ended = time.monotonic()
        self._deadline = self._started + _START_LIMIT_S

    def until_end(self) -> None:
        """Read until the watcher has gone and the pipes are empty; have it end everything when a limit is passed."""
        with selectors.DefaultSelector() as selector:
            for source in (self._control, *self._written):
                selector.register(source, selectors.EVENT_READ)
            while selector.get_map():
                ready = [key.fileobj for key, _ in selector.select(max(0.0, self._deadline - time.monotonic()))]
                if time.monotonic() >= self._deadline:
                    if self._stopped or self._control not in selector.get_map():
                        return  # nobody listens any more
                    self._stop("timeout")
                for source in ready:
                    if not (data := _read(source)):
                        selector.unregister(source)
                    self._hear(data) if source is self._control else self._keep(source, data)

    def _hear(self, data: bytes) -> None:
        self._ended = time.monotonic()
        if not data:
            self._deadline = self._ended + _DRAIN_LIMIT_S
        elif not self._said:
            self._started = self._ended
            self._deadline = self._started + self._timeout_s
        self._said += data

    def _keep(self, pipe: Any, data: bytes) -> None:
        written = self._written[pipe]
        written += data[: self._max_bytes + 1 - len(written)]
        if len(written) > self._max_bytes and self._stopped is None:
            self._stop("output_limit")

    def _stop(self, status: Status) -> None:
        self._stopped = status
        self._deadline = time.monotonic() + _END_LIMIT_S
        with contextlib.suppress(OSError):  # it has gone by itself
            self._control.shutdown(socket.SHUT_WR)

    def result(self) -> SandboxResult:
        """Say what happened.

        Raises:
            SandboxError: nothing did: no interpreter came up.
        """
        texts = [bytes(text[: self._max_bytes]).decode(errors="replace") for text in self._written.values()]
        if not self._said:
            words = texts[1].strip().splitlines() or [f"it did not start within {_START_LIMIT_S:g} s"]
            raise SandboxError(f"sandbox: no Python came up in it: {words[-1]}")
        last = self._said.decode().partition("\n")[2]
        code = int(last.split()[1]) if last.startswith("exit ") else None
        status, reason = _verdict(code, last)
        if self._stopped == "output_limit" or (self._stopped and code is None):
            status, reason, code = self._stopped, "", None
        return SandboxResult(status, texts[0], texts[1], code, self._ended - self._started, reason, texts[2])


def _verdict(code: int | None, last: str) -> tuple[Status, str]:
    if code is None:
        return "killed", last if last and last != "stopped" else "something killed its watcher"
    if code == -signal.SIGXCPU:
        return "timeout", "it used up its CPU time"
    if code < 0:
        return "killed", f"signal {-code}"
    return ("error", f"exit code {code}") if code else ("ok", "")


def _read(source: Any) -> bytes:
    try:
        return os.read(source.fileno(), 1 << 16)
    except ConnectionResetError:  # the watcher was killed with our word unread
        return b""


def _bury(process: subprocess.Popen[bytes], control: socket.socket, mark: str | None) -> None:
    """End what may still run, whatever way we came here; `mark` is the weak form's folder."""
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    if mark is not None and process.returncode:  # the watcher did not come to its end
        _kill_marked(mark.encode())


def _kill_marked(mark: bytes) -> None:
    """Kill the processes that were started with `mark` in their environment; one that cleared it gets away."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Make a folder, and remove it however deep or locked what was put there is."""
    folder = tempfile.mkdtemp(prefix="rltrain-sandbox-")
    try:
        yield folder
    finally:
        for words in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
            subprocess.run(words, stderr=subprocess.DEVNULL, check=False)


def _memory_file(text: str) -> Any:
    """Hold text in a file without a name, to be read from its beginning."""
    file = os.fdopen(os.memfd_create("text"), "w+b", 0)
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file
