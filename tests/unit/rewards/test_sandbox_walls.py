"""Tests of escapes from the strong form of the sandbox, and of the messages if that form does not work."""

import logging
import os
import shutil
import socket
import sys

import pytest
from rich.console import Console

from rltrain import main
from rltrain.base.errors import ConfigError
from rltrain.monitoring.heartbeat import Heartbeat
from rltrain.rewards import sandbox
from rltrain.rewards.sandbox import run
from rltrain.run import checks
from rltrain.run.memory.facts import machine
from rltrain.settings.command_line import Args
from rltrain.settings.compose import compose

WHY_NOT = sandbox.why_not_strong()
needs_strong = pytest.mark.skipif(bool(WHY_NOT), reason=f"the strong form of the sandbox does not work: {WHY_NOT}")
BOTH = [pytest.param("required", marks=needs_strong), "limits"]
CODE = "reward.functions=[{name: code, path: code_tests, weight: 1.0, gate: false, kwargs: {tests: f}}]"


def outside(code: str, **more) -> str:
    result = run(code, level="required", **more)
    assert result.status == "ok", result
    return result.stdout


@needs_strong
def test_strong_only_links_and_paths_of_other_processes_lead_nowhere(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    code = f"""
import os
os.symlink({str(secret)!r}, "link")
os.symlink("/", "root")
tries = ["link", "root{secret}", "/tmp/../..{secret}", "/proc/self/root{secret}", "/proc/self/cwd/../..{secret}"]
tries += [f"/proc/{{pid}}/{{what}}{secret}" for pid in (1, 2, 3, "thread-self") for what in ("root", "cwd")]
for path in tries:
    for mode in ("r", "w", "a"):
        try:
            open(path, mode); print("IN", path, mode)
        except OSError:
            pass
for source in ({str(secret)!r}, "/usr/bin/env"):
    try:
        os.link(source, "hard", follow_symlinks=True); print("LINKED", source)
    except OSError:
        pass
"""
    assert outside(code) == ""
    assert secret.read_text() == "s3cret"


@needs_strong
def test_strong_only_sockets_of_this_machine_are_out_of_reach(tmp_path):
    abstract, path = f"\0rltrain-{os.getpid()}", str(tmp_path / "socket")
    servers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for server, address in zip(servers, (abstract, path), strict=True):
        server.bind(address)
        server.listen()
    code = f"""
import socket
for address in ({abstract!r}, {path!r}):
    try:
        socket.socket(socket.AF_UNIX).connect(address); print("IN", address)
    except OSError:
        pass
for family, address in [(socket.AF_INET, ("1.1.1.1", 53))]:
    try:
        socket.socket(family, socket.SOCK_DGRAM).connect(address); print("IN", address)
    except OSError:
        pass
for kind in (socket.SOCK_RAW, 10):
    try:
        socket.socket(socket.AF_INET, kind, 1); print("RAW")
    except OSError:
        pass
"""
    assert outside(code) == ""
    for server in servers:
        server.close()


@needs_strong
def test_strong_only_no_right_is_left_to_mount_to_trace_or_to_change_the_system():
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/tmp", 2), libc.chroot(b"/tmp"))
print(libc.ptrace(16, 1, None, None), libc.sethostname(b"x", 1))
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/overcommit_memory"):
    try:
        open(path, "w"); print("IN", path)
    except OSError:
        pass
for line in open("/proc/self/status"):
    if line.startswith(("CapEff", "CapPrm", "CapBnd", "NoNewPrivs")): print(line.split()[1])
"""
    first, second, *rest = outside(code).splitlines()
    assert (first, second) == ("-1 -1 -1", "-1 -1")
    assert [int(number, 16) for number in rest] == [0, 0, 0, 1]


@needs_strong
def test_strong_only_a_program_reaches_neither_memory_nor_files_of_its_watcher():
    code = """
import os
for what in ("mem", "environ", "fd/0", "fd/3", "maps", "cwd", "root"):
    try:
        os.open(f"/proc/1/{what}", os.O_RDWR if what == "mem" else os.O_RDONLY); print("IN", what)
    except OSError:
        pass
print(sorted(int(n) for n in os.listdir("/proc/self/fd"))[:3], max(int(n) for n in os.listdir("/proc/self/fd")) < 105)
"""
    assert outside(code) == "[0, 1, 2] True\n"


@needs_strong
def test_strong_only_links_that_a_program_leaves_delete_nothing_of_ours(tmp_path):
    (tmp_path / "keep").write_text("x")
    for level in ("required", "limits"):
        run(f"import os; os.symlink({str(tmp_path)!r}, 'link')", level=level)
    assert (tmp_path / "keep").read_text() == "x"


# Tests of machines on which the strong form of the sandbox does not work


@pytest.fixture
def without_bubblewrap(monkeypatch):
    monkeypatch.setattr(sandbox, "_why_not", [])
    monkeypatch.setattr(sandbox, "_warned", [])
    real = shutil.which
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None if name == "bwrap" else real(name))


def config_of(*overrides):
    return compose([CODE, *overrides])[0]


def test_required_is_refused_before_any_worker_where_only_the_weak_form_works(without_bubblewrap, tmp_path):
    config = config_of("reward.sandbox=required", f"trainer.output_dir={tmp_path}/out")
    with pytest.raises(ConfigError) as caught:
        checks.check(config)
    assert str(caught.value).startswith(
        "reward.sandbox=required: reward function 'code': sandbox: programs cannot be isolated on this machine"
    )
    assert "bwrap is not installed; install bubblewrap; or use reward.sandbox=auto" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_without_model_written_code_asks_for_no_sandbox(without_bubblewrap):
    assert checks.sandbox_warning(compose(["reward.sandbox=required"])[0]) == ""
    assert sandbox._why_not == []  # The check of the strong form has not run.


@pytest.mark.parametrize("placement", ["local", "inprocess"])
def test_the_driver_says_once_what_the_weak_form_allows(
    without_bubblewrap, placement, tmp_path, monkeypatch, capsys, caplog
):
    class Reached(Exception): ...

    class NoPrompts(list):
        notes = ()

    def stop(*_):
        raise Reached

    monkeypatch.setattr(main, "tokenizer_of", lambda config: (None, []))
    monkeypatch.setattr(main, "load_data", lambda config, tokenizer: (NoPrompts(), {}))
    monkeypatch.setattr(main, "plan", lambda *_: None)
    monkeypatch.setattr(main, "resolved_yaml", stop)
    config = config_of(f"placement={placement}", "rollout=hf", f"trainer.output_dir={tmp_path}/out")
    with caplog.at_level(logging.WARNING), pytest.raises(Reached):
        main.run(config, Args("run", []), [machine()], Heartbeat(Console(quiet=True)), None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: reward function 'code': sandbox: model-written code runs with limits")
    assert "because bwrap is not installed" in line
    assert run("print(1)", level="auto").stdout == "1\n"
    assert caplog.messages == []  # The warning is not logged a second time.


@needs_strong
def test_where_the_strong_form_works_there_is_no_warning():
    assert checks.sandbox_warning(config_of()) == ""


def test_another_system_than_linux_is_refused_at_every_level(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="this machine runs darwin, but sandboxes need Linux"):
        checks.sandbox_warning(config_of())
