"""Script of the watcher, the process that supervises a program inside the sandbox and ends the program's processes.

Only `rltrain.rewards.sandbox` uses `sandbox_inside`. The program and the judge (an optional second program) run in
forks of the watcher, so a sandbox starts only one Python interpreter. The watcher reads no source code before it forks,
so the memory of the program's process contains no data of the judge. The watcher's Python interpreter runs without
site-packages, so psutil is not available.
"""

import os
import resource
import select
import sys
import time

# The program in the sandbox and the judge (a second program) exchange data through two pipes. The program and the judge
# each read from the file descriptor LINK[0] and write to the file descriptor LINK[1].
LINK = (100, 101)
_POLL_S = 0.02
_MAX_FILES = 10_000
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36


def start(given: dict[str, int]) -> int:
    """Fork a process for the program and, if there is a judge (a second program), a process for the judge.

    `start` returns only in the forked processes.

    Args:
        given: settings of the watcher (the process that supervises the program), by name.
            `rltrain.rewards.sandbox` passes the watcher's settings as command-line arguments.

    Returns:
        The file descriptor from which the forked process can read the source code that it must run.
    """
    has_judge, alone = given["has_judge"], os.getpid() == 1
    if not alone:
        # Orphaned processes of the sandbox become child processes of the watcher, even if they called setsid.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Other processes cannot access the memory and the open files of a process that is not dumpable.
    _prctl(_PR_SET_DUMPABLE, 0)
    pipes: list[tuple[int, ...]] = [os.pipe() if has_judge else () for _ in range(2)]
    there, back = pipes
    program = os.fork()
    if not program:
        _prctl(_PR_SET_DUMPABLE, 1)
        return _become(given, given["program"], links=(there[0], back[1]) if has_judge else ())
    watched = program
    if has_judge:
        watched = os.fork()
        if not watched:
            os.dup2(given["verdicts"], 1)
            return _become(given, given["judge"], links=(back[0], there[1]))
    for descriptor in (0, 1, 2, given["program"], given["judge"], given["verdicts"], *there, *back):
        os.close(descriptor)
    os.write(given["control"], b"started\n")
    said = _watch(watched, given, alone=alone)
    _end_all(alone=alone)
    os.write(given["control"], said.encode())
    os._exit(0)


def _become(given: dict[str, int], text: int, *, links: tuple[int, ...]) -> int:
    """Detach the forked process with setsid, set its limits, and close all descriptors that it must not use.

    Return the file descriptor from which the forked process can read the source code that it must run.
    """
    os.setsid()
    last = LINK[1] + 1
    os.dup2(text, last)
    for link, number in zip(links, LINK, strict=False):
        os.dup2(link, number, inheritable=False)
    os.closerange(3, LINK[0] if links else last)
    # Highest file descriptor that the forked process has inherited.
    highest = max(given[name] for name in ("control", "program", "judge", "verdicts"))
    os.closerange(last + 1, max(highest + 1, 1024))
    mebibyte = 1 << 20
    _limit(resource.RLIMIT_AS, given["memory_mb"] * mebibyte)
    _limit(resource.RLIMIT_FSIZE, given["max_file_mb"] * mebibyte)
    _limit(resource.RLIMIT_NOFILE, 256)
    _limit(resource.RLIMIT_CORE, 0)
    if given["nproc"]:
        _limit(resource.RLIMIT_NPROC, given["nproc"])
    if given["cpu_s"]:
        _limit(resource.RLIMIT_CPU, given["cpu_s"])
    return last


def _limit(kind: int, value: int) -> None:
    there = resource.getrlimit(kind)[1]
    # At the soft limit of CPU time, the process gets SIGXCPU, which shows that the CPU time was used up. At the hard
    # limit, the process gets SIGKILL, which can have other causes too. So the hard limit of CPU time is one second
    # above the soft limit.
    hard = value + (kind == resource.RLIMIT_CPU)
    hard = hard if there == resource.RLIM_INFINITY else min(hard, there)
    resource.setrlimit(kind, (min(value, hard), hard))


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _watch(first: int, given: dict[str, int], *, alone: bool) -> str:
    """Wait until the process `first` ends, a limit is exceeded or the parent asks to stop.

    Return "exit CODE" if `first` has ended, "stopped" if the parent asked to stop, or else a text that names the
    exceeded limit.
    """
    control = given["control"]
    wake = select.poll()  # Unlike select(), poll() takes file descriptors of 1024 and above.
    wake.register(control, select.POLLIN)
    try:
        wake.register(os.pidfd_open(first), select.POLLIN)  # The pidfd must be opened before `_reap` reaps the process.
        pause = _POLL_S
    except OSError:  # Linux versions before 5.3 have no pidfd_open, so the watcher polls more often.
        pause = _POLL_S / 4
    while True:
        ready = [fd for fd, _ in wake.poll(pause * 1000)]
        code = _reap(first)
        if code is not None:
            return f"exit {code}"
        if control in ready:
            return "stopped"
        if excess := _excess(given, alone=alone):
            return excess


def _reap(first: int) -> int | None:
    """Reap all ended child processes of the watcher, including adopted orphans.

    Return the exit code of the process `first` if that process has ended, else None.
    """
    code = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return code
            if pid == first:
                code = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return code


def _excess(given: dict[str, int], *, alone: bool) -> str:
    """Return a text that names a limit that the sandbox's processes together exceed, or "" if no limit is exceeded."""
    tasks = memory = 0
    for pid in _others(alone=alone):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                tasks += int(file.read().rpartition(b")")[2].split()[17])
            with open(f"/proc/{pid}/statm", "rb") as file:
                pages = file.read().split()
        except (OSError, IndexError):  # A process that ended before its /proc files were read is skipped.
            continue
        memory += (int(pages[1]) - int(pages[2])) * resource.getpagesize()
    if tasks > given["max_processes"] + given["has_judge"]:
        return f"more than {given['max_processes']} processes and threads"
    if memory > given["memory_mb"] << 20:
        return f"more than {given['memory_mb']} MB in all processes together"
    if alone:  # If the sandbox is isolated, /tmp is an in-memory file system, so files in /tmp use memory.
        folder = os.statvfs("/tmp")
        if (folder.f_blocks - folder.f_bfree) * folder.f_frsize > given["memory_mb"] << 20:
            return f"more than {given['memory_mb']} MB in files"
        if folder.f_files - folder.f_ffree > _MAX_FILES:
            return f"more than {_MAX_FILES} files"
    return ""


def _others(*, alone: bool) -> list[int]:
    """Return the ids of all processes of the sandbox except the watcher."""
    if alone:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    found: list[int] = []
    fresh = [os.getpid()]
    while fresh:
        parent = fresh.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                    children = [int(pid) for pid in file.read().split()]
                found += children
                fresh += children
        except OSError:  # A process that ended before its /proc files were read is skipped.
            continue
    return found


def _end_all(*, alone: bool) -> None:
    """Kill all processes of the sandbox except the watcher, and wait until they have ended."""
    while True:
        # From the first process of a PID namespace, kill(-1) reaches only the processes of that namespace.
        for pid in [-1] if alone else _others(alone=False):
            try:  # contextlib.suppress is not used, because importing contextlib would slow down every sandbox.
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.001)
        except ChildProcessError:
            return


def _text(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8", errors="surrogatepass") as file:
        return file.read()


def _without_our_frame(kind: type, error: BaseException, trace: object) -> None:
    shown = error.with_traceback(getattr(trace, "tb_next", None))
    sys.__excepthook__(kind, shown, shown.__traceback__)


if __name__ == "__main__":
    _descriptor = start({name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])})
    sys.excepthook = _without_our_frame
    sys.argv = ["program.py"]
    _main = type(sys)("__main__")
    sys.modules["__main__"] = _main
    exec(compile(_text(_descriptor), "program.py", "exec"), vars(_main))
