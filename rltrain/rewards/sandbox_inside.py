"""Script inside the sandbox that starts a program, watches it and leaves no process running.

Only `rltrain.rewards.sandbox` uses this file. The watcher never reads the program's text, and the program runs in a
fork of the watcher. So a start costs only one interpreter, and the program's memory contains nothing that the judge
knows. The interpreter runs without site-packages, so there is no psutil here.
"""

import os
import resource
import select
import sys
import time

LINK = (100, 101)  # descriptors that join program and judge, one end in each: to read from, to write to
_POLL_S = 0.02
_MAX_FILES = 10_000
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36


def start(given: dict[str, int]) -> int:
    """Fork the program, and the judge if there is one; only they return.

    Args:
        given: numbers by name, as `sandbox` lists them.

    Returns:
        In a child, the descriptor of the text that it has to run.
    """
    has_judge, alone = given["has_judge"], os.getpid() == 1
    if not alone:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what calls setsid and loses its parent comes to us
    _prctl(_PR_SET_DUMPABLE, 0)  # of a process that cannot be dumped, others reach neither memory nor files
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
    """Turn this fork into a program: a session and limits of its own, and no descriptor but those meant for it."""
    os.setsid()
    last = LINK[1] + 1
    os.dup2(text, last)
    for link, number in zip(links, LINK, strict=False):
        os.dup2(link, number, inheritable=False)
    os.closerange(3, LINK[0] if links else last)
    highest = max(given[name] for name in ("control", "program", "judge", "verdicts"))  # all but what was made here
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
    # Past the soft limit of CPU time comes a signal that says what happened; past the hard one, death without a word.
    hard = value + (kind == resource.RLIMIT_CPU)
    hard = hard if there == resource.RLIM_INFINITY else min(hard, there)
    resource.setrlimit(kind, (min(value, hard), hard))


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _watch(first: int, given: dict[str, int], *, alone: bool) -> str:
    """Wait until the process `first` has ended, a limit is passed or our parent asks for the end; say which."""
    control = given["control"]
    wake = [control]
    try:
        wake.append(os.pidfd_open(first))  # before anybody reaps it
        pause = _POLL_S
    except OSError:  # an old kernel
        pause = _POLL_S / 4
    while True:
        ready = select.select(wake, [], [], pause)[0]
        code = _reap(first)
        if code is not None:
            return f"exit {code}"
        if control in ready:
            return "stopped"
        if excess := _excess(given, alone=alone):
            return excess


def _reap(first: int) -> int | None:
    """Collect ended children, orphans among them; return the exit code of `first` if it is one of them."""
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
    """Say which limit all processes together have passed, or nothing."""
    tasks = memory = 0
    for pid in _others(alone=alone):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                tasks += int(file.read().rpartition(b")")[2].split()[17])
            with open(f"/proc/{pid}/statm", "rb") as file:
                pages = file.read().split()
        except (OSError, IndexError):  # it has ended
            continue
        memory += (int(pages[1]) - int(pages[2])) * resource.getpagesize()
    if tasks > given["max_processes"] + given["has_judge"]:
        return f"more than {given['max_processes']} processes and threads"
    if memory > given["memory_mb"] << 20:
        return f"more than {given['memory_mb']} MB in all its processes"
    if alone:  # then the folder is a file system of its own, in memory
        folder = os.statvfs("/tmp")
        if (folder.f_blocks - folder.f_bfree) * folder.f_frsize > given["memory_mb"] << 20:
            return f"more than {given['memory_mb']} MB in files"
        if folder.f_files - folder.f_ffree > _MAX_FILES:
            return f"more than {_MAX_FILES} files"
    return ""


def _others(*, alone: bool) -> list[int]:
    """List the processes of the sandbox, this one left out."""
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
        except OSError:  # it has ended
            continue
    return found


def _end_all(*, alone: bool) -> None:
    """Kill every process of the sandbox and wait until none is left."""
    while True:
        for pid in [-1] if alone else _others(alone=False):  # the first process of a namespace reaches nobody outside
            try:  # without contextlib, which takes longer to import than all of this file
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
