"""Tests of misbehaving programs in both forms of the sandbox.

Each program must end in time with the right status, and must leave no processes or files behind.
"""

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rltrain.rewards import sandbox
from rltrain.rewards.sandbox import SandboxError, SandboxResult, run

WHY_NOT = sandbox.why_not_strong()
needs_strong = pytest.mark.skipif(bool(WHY_NOT), reason=f"the strong form of the sandbox does not work: {WHY_NOT}")
BOTH = [pytest.param("required", marks=needs_strong), "limits"]
SOON_S = 20.0  # Even on a slow machine, a program with a time limit of 1 s ends within this number of seconds.


def left(mark: str) -> list[str]:
    """Return the processes whose command line or environment contains `mark`, and the leftover sandbox folders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in text and state != "Z":
                found.append(entry.name)
    return found + [str(path) for path in Path(tempfile.gettempdir()).glob("rltrain-sandbox-*")]


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch, tmp_path):
    # Each test has its own temporary folder, because other runs on the machine use the default folder.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real = sandbox.environment
    monkeypatch.setattr(sandbox, "environment", lambda folder: {**real(folder), "MARK": str(tmp_path)})
    yield
    end = time.monotonic() + 2
    while left(str(tmp_path)) and time.monotonic() < end:
        time.sleep(0.02)
    assert left(str(tmp_path)) == []


def in_time(code: str, level: str, **limits) -> SandboxResult:
    begin = time.monotonic()
    result = run(code, level=level, **{"timeout_s": 1.0, **limits})
    assert time.monotonic() - begin < SOON_S
    return result


# Tests of ordinary programs in the sandbox


@pytest.mark.parametrize("level", BOTH)
def test_a_program_reads_writes_and_ends(level):
    code = "import sys, math\nprint(input() + '!', math.pi, __name__, sys.argv)\nprint('é', file=sys.stderr)"
    result = run(code, stdin="hello ü\n", level=level)
    written = "hello ü! 3.141592653589793 __main__ ['program.py']\n"
    assert (result.status, result.stdout, result.stderr) == ("ok", written, "é\n")
    assert (result.returncode, result.reason, result.judged) == (0, "", "")
    assert 0 < result.seconds < SOON_S


@pytest.mark.parametrize("level", BOTH)
def test_a_program_may_use_files_threads_and_children_within_its_limits(level):
    code = """
import multiprocessing.pool, pathlib, subprocess, tempfile, threading
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "a").write_text("text")
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(multiprocessing.pool.ThreadPool(4).map(abs, [-1, -2]))
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout)
"""
    result = run(code, level=level)
    assert (result.status, result.stdout) == ("ok", "thread\n[1, 2]\nchild\n\n"), result


@pytest.mark.parametrize("level", BOTH)
def test_sets_have_the_same_order_each_time(level):
    assert len({run("print({'a', 'b', 'c', 'd', 'e'})", level=level).stdout for _ in range(3)}) == 1


@pytest.mark.parametrize("level", BOTH)
def test_it_works_in_several_threads_at_once(level):
    results: dict[int, str] = {}

    def one(number):
        results[number] = run("print(input())", stdin=str(number), level=level).stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{number}\n" for number in range(6)}


# Tests of programs that misbehave

FORKS = """
import os, time
for _ in range(200):
    if not os.fork():
        time.sleep(600)
time.sleep(600)
"""
RUNS_AWAY = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.environ.clear()
        time.sleep(600)
    os._exit(0)
os.wait()
"""
CASES = {  # Maps the name of each case to (program, status, return code, text in the reason or in the standard error).
    "sleeps": ("import time; time.sleep(600)", "timeout", None, ""),
    "spins": ("while True: pass", "timeout", None, ""),
    "spins in C": ("sum(range(10**12))", "timeout", None, ""),
    "one huge power": ("7 ** 10**10", "timeout", None, ""),
    "ignores signals": (
        "import signal, time\nfor s in range(1, 32):\n  s not in (9, 19) and signal.signal(s, signal.SIG_IGN)\n"
        "while True: time.sleep(1)",
        "timeout",
        None,
        "",
    ),
    "runs away from its session and sleeps": (RUNS_AWAY + "time.sleep(600)", "timeout", None, ""),
    "leaves somebody behind": (RUNS_AWAY, "ok", 0, ""),
    "crashes": ("import faulthandler; faulthandler._sigsegv()", "killed", -11, "signal 11"),
    "ends itself": ("import os; os._exit(3)", "error", 3, "exit code 3"),
    "8 GB": ("x = b'a' * (8 << 30)", "error", 1, "MemoryError"),
    "8 GB in pieces": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "error", 1, "MemoryError"),
    "200 forks": (FORKS, "killed", None, "more than 32 processes and threads"),
    "100 MB of output": ("for _ in range(100): print('x' * 10**6)", "output_limit", None, ""),
    "100 MB of errors": ("import os\nfor _ in range(100): os.write(2, b'x' * 10**6)", "output_limit", None, ""),
    "raises": ("def f(): raise ValueError('no')\nf()", "error", 1, "ValueError: no"),
    "is no Python": ("1 +", "error", 1, "SyntaxError"),
    "a file too large": ("open('f', 'wb').write(b'x' * (17 << 20))", "error", 1, "File too large"),
    "too many files at once": ("x = [open('f', 'w') for _ in range(300)]", "error", 1, "Too many open files"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", BOTH)
def test_G2_each_misdeed_has_its_status_within_its_limit(level, name):
    code, status, returncode, said = CASES[name]
    result = in_time(code, level, timeout_s=1.0 if status == "timeout" else SOON_S)
    assert (result.status, result.returncode) == (status, returncode), result.stderr[-500:]
    assert said in result.reason + result.stderr
    assert max(len(result.stdout), len(result.stderr)) <= 1 << 20


@pytest.mark.parametrize("level", BOTH)
def test_memory_is_bounded_over_all_processes_too(level):
    code = "import os, time\nfor _ in range(8): os.fork() or (globals().update(x=bytearray(40 << 20)), time.sleep(600))"
    result = in_time(code + "\ntime.sleep(600)", level, memory_mb=128, timeout_s=20.0)
    assert (result.status, result.reason) == ("killed", "more than 128 MB in all processes together")


@pytest.mark.parametrize("level", BOTH)
def test_cpu_time_has_a_limit_of_its_own(level):
    result = in_time("while True: pass", level, cpu_s=0.5, timeout_s=8.0)
    assert (result.status, result.returncode, result.reason) == ("timeout", -24, "the program used up its CPU time")


@pytest.mark.parametrize("level", BOTH)
def test_output_is_cut_at_its_bound_and_not_before(level):
    assert run("print('x' * 99)", max_output_bytes=100, level=level).status == "ok"
    result = run("print('x' * 100)", max_output_bytes=100, level=level)
    assert (result.status, result.stdout) == ("output_limit", "x" * 100)


@pytest.mark.parametrize("level", BOTH)
def test_a_program_finds_nothing_of_ours_in_its_environment(level, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    code = "import os; print(dict(os.environ), open('/proc/self/environ').read(), open('/proc/self/cmdline').read())"
    result = run(code, level=level)
    assert result.status == "ok"
    assert "s3cret" not in result.stdout


@pytest.mark.parametrize("level", BOTH)
def test_a_program_cannot_import_ours(level):
    result = run("import sys\nprint(sys.path)\nimport rltrain", level=level)
    assert "ModuleNotFoundError: No module named 'rltrain'" in result.stderr
    assert "site-packages" not in result.stdout


def test_the_weak_form_ends_by_the_death_of_its_watcher_and_what_it_watched_goes_too():
    code = "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)"
    result = in_time(code, "limits", timeout_s=20.0)
    assert (result.status, result.returncode, result.reason) == ("killed", None, "the supervising process was killed")


@pytest.mark.parametrize("level", BOTH)
def test_nothing_runs_on_when_we_are_killed(level, tmp_path):
    call = f"sandbox.run('import time; time.sleep(60)', timeout_s=60, level={level!r})"
    (tmp_path / "gone").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path / "gone")}
    process = subprocess.Popen([sys.executable, "-c", f"from rltrain.rewards import sandbox\n{call}"], env=environment)
    end = time.monotonic() + SOON_S
    while len(started := children(process.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert len(started) >= 2
    process.kill()
    process.wait()
    end = time.monotonic() + SOON_S
    while any(alive(pid) for pid in started) and time.monotonic() < end:
        time.sleep(0.02)
    assert [pid for pid in started if alive(pid)] == []


def children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *children(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Tests of protection that only the strong form of the sandbox gives


@needs_strong
def test_strong_only_files_outside_cannot_be_read(tmp_path):
    for folder in (tmp_path, Path.home()):
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".secret") as file:
            file.write("s3cret")
            file.flush()
            result = run(f"print(open({file.name!r}).read())", level="required")
            assert (result.status, result.stdout) == ("error", "")
            assert "No such file" in result.stderr


@needs_strong
def test_strong_only_the_working_directory_and_the_home_are_not_there():
    paths = [os.getcwd(), str(Path(sandbox.__file__).parent), "/etc/passwd", "/sys", "/var"]
    result = run(f"import os\nprint([p for p in {paths} if os.path.exists(p)], os.listdir('.'))", level="required")
    assert result.stdout == "[] []\n"


@needs_strong
def test_strong_only_nothing_can_be_written_outside_the_folder(tmp_path):
    paths = ["/x", "/usr/x", "/dev/x", f"{tmp_path}/x", f"{sys.base_prefix}/x", f"{sys.base_prefix}/lib/x"]
    code = f"""
for path in {paths}:
    try:
        open(path, "w"); print(path)
    except OSError:
        pass
open("/tmp/x", "w"); open("/dev/shm/y", "w")
"""
    result = run(code, level="required")
    assert (result.status, result.stdout) == ("ok", "")
    assert list(tmp_path.iterdir()) == []


@needs_strong
def test_strong_only_installed_packages_are_not_there_even_by_path():
    code = "import glob, sys\nprint([p for p in glob.glob(sys.base_prefix + '/lib/python3*/*-packages/*')])"
    assert run(code, level="required").stdout == "[]\n"


@needs_strong
def test_strong_only_there_is_no_network_not_even_to_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1); print('in')"
        result = run(code, level="required")
        assert (result.status, result.stdout) == ("error", "")
        with pytest.raises(TimeoutError):
            server.accept()


@needs_strong
def test_strong_only_no_process_of_ours_can_be_seen_or_signalled():
    code = f"""
import os
print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()) == [1, os.getpid()])
os.kill(os.getppid(), 9)
for pid in (os.getpid(), 1, {os.getpid()}, {os.getppid()}):
    try:
        pid != os.getpid() and os.kill(pid, 9)
    except OSError as error:
        print(type(error).__name__)
print("still here")
"""
    result = run(code, level="required")
    assert result.status == "ok"
    assert result.stdout.splitlines()[0] == "True"
    assert result.stdout.splitlines()[-1] == "still here"
    assert os.getpid()  # The test process itself was not killed.


@needs_strong
def test_strong_only_files_are_bounded_in_sum_and_in_number():
    code = "import time\nfor n in range(40): open(str(n), 'wb').write(b'x' * (8 << 20)); time.sleep(0.01)"
    assert in_time(code, "required", memory_mb=64, timeout_s=20).reason == "more than 64 MB in files"
    code = "import os, time\nfor n in range(11_000): os.mknod(str(n))\ntime.sleep(600)"
    assert in_time(code, "required", timeout_s=20).reason == "more than 10000 files"


@needs_strong
def test_strong_only_no_further_namespaces_can_be_made():
    if "--disable-userns" not in subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("bwrap is older than 0.8")
    code = "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"
    assert run(code, level="required").stdout == "-1\n"


# Tests of two programs that run at the same time


@pytest.mark.parametrize("level", BOTH)
def test_a_judge_talks_with_the_program_and_its_word_is_kept_apart(level):
    # The run ends when the judge ends, so the program must not leave its line in a buffer until the program ends.
    program = "import os\nprint('1', flush=True)\nos.write(101, os.read(100, 9).upper())"
    judge = "import os\nos.write(101, b'question')\nprint(os.read(100, 9).decode())"
    result = run(program, judge=judge, level=level)
    assert (result.status, result.stdout, result.judged) == ("ok", "1\n", "QUESTION\n")


@needs_strong
def test_strong_only_the_program_can_read_neither_the_judge_nor_the_watcher():
    program = """
import glob, os
for pid in (1, *range(3, 12)):
    for what in ("mem", "environ", "fd/1", "fd/7", "maps"):
        try:
            if pid != os.getpid() and open(f"/proc/{pid}/{what}", "rb").read(1):
                print("READ", pid, what)
        except OSError as error:
            pass
print("tried")
os.write(101, b"x")
"""
    result = run(program, judge="import os\nos.read(100, 1)", level="required")
    assert result.stdout == "tried\n", result


# Tests of the sandbox levels "auto", "required" and "limits"


def test_an_unknown_level_or_a_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="level is 'strong'; choose one of auto, required, limits"):
        run("", level="strong")
    for name in ("timeout_s", "memory_mb", "cpu_s", "max_output_bytes", "max_processes", "max_file_mb"):
        with pytest.raises(ValueError, match=f"{name} is 0 and must be positive; give"):
            run("", **{name: 0})


def test_without_bubblewrap_auto_warns_once_and_required_says_what_to_do(monkeypatch, caplog):
    monkeypatch.setattr(sandbox, "_why_not", [])
    monkeypatch.setattr(sandbox, "_warned", [])
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert [run("print(1)", level="auto").stdout for _ in range(2)] == ["1\n", "1\n"]
    (warning,) = caplog.messages
    assert "it can read and write this user's files, use the network" in warning
    with pytest.raises(
        SandboxError, match=r"cannot be isolated on this machine: bwrap is not installed; install bubblewrap$"
    ):
        run("", level="required")


def test_a_bubblewrap_that_the_kernel_forbids_is_found_out_by_trying(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sandbox, "_why_not", [])
    monkeypatch.setattr(sandbox, "command", lambda strong: [str(fake)])
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: str(fake))
    why = sandbox.why_not_strong()
    assert "No permissions to create new namespace; allow user namespaces" in why
    assert "\n" not in why
    assert shutil.which("bwrap") == str(fake)


def test_an_interpreter_that_does_not_start_is_no_verdict_on_the_program(monkeypatch):
    monkeypatch.setattr(sandbox, "command", lambda strong: ["/bin/sh", "-c", "echo no libpython >&2; exit 127"])
    with pytest.raises(SandboxError, match="Python did not start inside the sandbox: no libpython"):
        run("print(1)", level="limits")
