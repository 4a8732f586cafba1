"""Run untrusted Python code in separate processes with resource limits, isolated from the machine if possible.

The sandbox has a strong form (isolation and resource limits) and a weak form (resource limits only). The strong form
and the weak form of the sandbox both need Linux.

The strong form of the sandbox isolates the program with bubblewrap (`bwrap`). An isolated program sees only the files
that Python needs and only its own processes, and has no network access. An isolated program can write only to an
in-memory folder that disappears when the program ends. Isolation requires that bwrap is installed and that the kernel
allows the current user to create namespaces. Each Python process tests only once whether isolation works.

The weak form of the sandbox has the same limits as the strong form on time, memory, output, processes and file size.
The strong form and the weak form of the sandbox set the same minimal environment variables. The weak form of the
sandbox runs the program in a temporary folder that is removed after the run. The weak form of the sandbox does not
isolate the program from the machine. A program without isolation can read and write every file that the current user
can, use the network, and send signals to all processes of the current user, including the process that started the
sandbox. A program without isolation can kill a reward process, for example. A program without isolation can also kill
the sandbox's supervising process before the supervising process reports the start of the program. If the supervising
process does not report the start of the program, `run` raises SandboxError. A sample whose scoring raises SandboxError
counts as failed and is excluded from training, instead of scoring 0. If the current user is root, a program without
isolation can read the tests that check the program and the results of the tests. The weak form of the sandbox protects
against mistakes in programs but not against malicious programs.

The isolation of the sandbox has one gap: if the current user is root, a program can change the file mode of the five
device files of the machine that are visible in the sandbox (null, zero, full, random, urandom). If rltrain runs as a
user other than root, a program in the sandbox cannot change the file mode of the machine's device files.

The strong form and the weak form of the sandbox limit the address space of each process. The total memory and the
number of the program's processes and threads are checked about fifty times a second, so a program can exceed the memory
limit and the process limit for a moment. The sandbox's memory limit does not count memory that the kernel holds for
pipes and memfds.
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
# Time limit for starting a Python interpreter; the limit is generous because the machine may be busy.
_START_LIMIT_S = 60.0
# Time limit for the watcher (the supervising process) to kill all processes of the sandbox. A supervising process that
# does not finish within `_END_LIMIT_S` seconds is killed itself.
_END_LIMIT_S = 2.0
# Time limit for reading the rest of the program's output after the watcher (the supervising process) has ended. The
# time limit `_DRAIN_LIMIT_S` is reached only if a process keeps a pipe open.
_DRAIN_LIMIT_S = 0.5
_lock = threading.Lock()
# `_why_not` is empty until the isolation of sandboxes has been tested on the local machine. After the isolation test,
# `_why_not` has one item: the reason why isolation does not work, or "" if isolation works.
_why_not: list[str] = []
_warned: list[str] = []


class SandboxError(RLTrainError, RuntimeError):
    """Raised if no sandbox of the requested level works on the local machine, or if Python does not start in time."""


@dataclass(frozen=True)
class SandboxResult:
    """The outcome of one run of a program in a sandbox.

    Attributes:
        status: "ok": exit code 0. "error": an exit code other than 0, for example after an exception such as
            MemoryError. "timeout": the limit on wall-clock or CPU time was reached. "output_limit": the program wrote
            more output than allowed. "killed": a signal ended the program, for example after a crash, or the program's
            processes together exceeded a limit.
        stdout: the program's standard output, cut after `max_output_bytes` bytes. Bytes that are not valid UTF-8 become
            the character U+FFFD.
        stderr: the program's standard error, cut and decoded like `stdout`.
        returncode: the exit code; the negative signal number if a signal ended the program; None if the sandbox stopped
            the program.
        seconds: wall-clock time from the start of the program to the end of its last process.
        reason: a text that explains the status, or "" if the status needs no explanation.
        judged: the text that the judge, the second program of `run`, wrote to its standard output.
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
    """Run a program until it ends or reaches a limit, and then kill all its processes and remove its files.

    The program is the main module of a separate process with the same Python interpreter as the calling process. The
    sandboxed program can import only modules of Python's standard library. `run` can be called from any thread and from
    several threads at once. The sandboxed program's standard input is a file, not a pipe.

    Args:
        code: Python source of the program.
        stdin: text that the program can read from standard input.
        judge: Python source of a second program, the judge, that runs at the same time as the first program. Two pipes
            connect the program and the judge. The program and the judge each read from the file descriptor LINK[0] and
            write to the file descriptor LINK[1]; the module `sandbox_inside` defines LINK. The program cannot access
            the judge's memory, source or output, unless the sandbox has no isolation and the current user is root. With
            a judge, the sandbox run ends when the judge ends, and the result has the exit code and the status of the
            judge.
        timeout_s: limit on the wall-clock seconds of the run, without the start-up time of the interpreter.
        memory_mb: limit on the address space of each process, on the memory of all processes together and, with
            isolation, on the size of all files together.
        cpu_s: limit on the CPU seconds of each process, rounded up to whole seconds; None for no limit on CPU time.
        max_output_bytes: largest number of bytes on standard output, and separately on standard error.
        max_processes: largest number of simultaneous processes and threads, including the first process.
        max_file_mb: largest size of each file in MB.
        level: "auto": isolation and resource limits, or, if isolation does not work, resource limits and one warning.
            "required": isolation and resource limits, or, if isolation does not work, a SandboxError. "limits":
            resource limits without isolation.

    Raises:
        SandboxError: no sandbox of the requested level works on the local machine, or Python does not start in the
            sandbox. The message of the SandboxError says how to make the sandbox work.
        ValueError: a limit is not positive, or the sandbox level is unknown.
    """
    _check(locals())
    files = ("memory_mb", memory_mb), ("max_file_mb", max_file_mb), ("max_processes", max_processes)
    limits = {**dict(files), "cpu_s": 0 if cpu_s is None else -int(-cpu_s // 1)}
    return _run(
        (code, stdin, judge), limits, strong=_strong(level), timeout_s=timeout_s, max_output_bytes=max_output_bytes
    )


def why_not_strong() -> str:
    """Return one line that says why programs cannot be isolated on the local machine, or "" if isolation works.

    Only the first call in a process tests whether isolation works; later calls return the stored result.
    """
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
    """Return a one-line warning if a sandbox of the level "auto" has to run without isolation, otherwise "".

    The warning lists what a program without isolation can do to the machine. After `weakness` has returned a warning,
    `run` does not log the warning again.

    Raises:
        SandboxError: no sandbox of the requested level works on the local machine.
    """
    if sys.platform != "linux":
        raise SandboxError(
            f"sandbox: this machine runs {sys.platform}, but sandboxes need Linux; score code on a Linux machine"
        )
    if level == "limits" or not (why := why_not_strong()):
        return ""
    if level == "required":
        raise SandboxError(f"sandbox: programs cannot be isolated on this machine: {why}")
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
        why = (
            "" if result.status == "ok" else f"a test program that does nothing ended with the status '{result.status}'"
        )
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
    """State of one running sandbox: the output read so far, and, if the sandbox was stopped, the reason."""

    def __init__(self, control: socket.socket, pipes: list[Any], timeout_s: float, max_output_bytes: int) -> None:
        self._control, self._timeout_s, self._max_bytes = control, timeout_s, max_output_bytes
        self._written = {pipe: bytearray() for pipe in pipes}
        # Messages from the watcher (the supervising process): "started", and finally the reason why the program ended.
        self._said = b""
        self._stopped: Status | None = None
        self._started = self._ended = time.monotonic()
        self._deadline = self._started + _START_LIMIT_S

    def until_end(self) -> None:
        """Read all output until the watcher (the supervising process) has ended and the pipes are empty.

        When a limit is reached, make the watcher kill all processes of the sandbox.
        """
        with selectors.DefaultSelector() as selector:
            for source in (self._control, *self._written):
                selector.register(source, selectors.EVENT_READ)
            while selector.get_map():
                ready = [key.fileobj for key, _ in selector.select(max(0.0, self._deadline - time.monotonic()))]
                if time.monotonic() >= self._deadline:
                    if self._stopped or self._control not in selector.get_map():
                        return  # The watcher (the supervising process) has ended or does not respond.
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
        with contextlib.suppress(OSError):  # `shutdown` may fail if the watcher has ended.
            self._control.shutdown(socket.SHUT_WR)

    def result(self) -> SandboxResult:
        """Return the outcome of the program that ran in the sandbox.

        Raises:
            SandboxError: the Python interpreter did not start in the sandbox.
        """
        texts = [bytes(text[: self._max_bytes]).decode(errors="replace") for text in self._written.values()]
        if not self._said:
            words = texts[1].strip().splitlines() or [f"Python sent no start message within {_START_LIMIT_S:g} s"]
            raise SandboxError(f"sandbox: Python did not start inside the sandbox: {words[-1]}")
        last = self._said.decode().partition("\n")[2]
        code = int(last.split()[1]) if last.startswith("exit ") else None
        status, reason = _verdict(code, last)
        if self._stopped == "output_limit" or (self._stopped and code is None):
            status, reason, code = self._stopped, "", None
        return SandboxResult(status, texts[0], texts[1], code, self._ended - self._started, reason, texts[2])


def _verdict(code: int | None, last: str) -> tuple[Status, str]:
    if code is None:
        return "killed", last if last and last != "stopped" else "the supervising process was killed"
    if code == -signal.SIGXCPU:
        return "timeout", "the program used up its CPU time"
    if code < 0:
        return "killed", f"signal {-code}"
    return ("error", f"exit code {code}") if code else ("ok", "")


def _read(source: Any) -> bytes:
    try:
        return os.read(source.fileno(), 1 << 16)
    except ConnectionResetError:
        # The supervising process was killed before it had read all data from the socket. The connection has ended, so
        # there is nothing more to read.
        return b""


def _bury(process: subprocess.Popen[bytes], control: socket.socket, mark: str | None) -> None:
    """Kill all processes of the sandbox that may still be running.

    `mark` is the path of the temporary folder of a sandbox without isolation, or None for a sandbox with isolation.
    """
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
    if mark is not None and process.returncode:  # The supervising process died and may have left processes running.
        _kill_marked(mark.encode())


def _kill_marked(mark: bytes) -> None:
    """Kill all processes with `mark` in their environment variables.

    `_kill_marked` does not find a process that has cleared its environment variables.
    """
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Context manager for a temporary folder, which is removed even if it is deeply nested or read-only."""
    folder = tempfile.mkdtemp(prefix="rltrain-sandbox-")
    try:
        yield folder
    finally:
        for words in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
            subprocess.run(words, stderr=subprocess.DEVNULL, check=False)


def _memory_file(text: str) -> Any:
    """Return an in-memory file that contains `text`, positioned at the beginning."""
    file = os.fdopen(os.memfd_create("text"), "w+b", 0)
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file
