"""Tests for users without a home folder, or with a home folder that they cannot write to."""

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rltrain.base.home_folder import ensure_home

VARIABLES = ("HOME", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TRITON_CACHE_DIR")
NOT_WRITABLE = "/proc/self"  # Not even root can write to this folder.
NOT_THERE = "/proc/no/such/folder"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Unset the home-folder variables, and use the test's own folder for temporary files."""
    for variable in VARIABLES:
        # After `setenv`, monkeypatch restores the variable at the end of the test, even if the tested code sets it.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def changed() -> dict[str, str]:
    before = {name: os.environ.get(name) for name in VARIABLES}
    ensure_home()
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name) != before[name]}


def test_a_home_folder_that_can_be_written_to_is_used_and_may_still_have_to_be_made(temporary, monkeypatch):
    for home in (temporary, temporary / "new" / "home"):
        monkeypatch.setenv("HOME", str(home))
        assert changed() == {}
    assert not list(temporary.glob("rltrain-*"))


def test_a_user_whom_the_system_does_not_know_gets_a_private_folder(temporary, monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(RuntimeError):
        Path.home()
    private = temporary / f"rltrain-{os.getuid()}"
    assert changed() == {"HOME": str(private)}
    assert private.stat().st_mode & 0o777 == 0o700
    assert Path.home() == private
    monkeypatch.delenv("HOME")
    # The second call returns the same private folder, because the folder holds caches.
    assert changed() == {"HOME": str(private)}


@pytest.mark.parametrize("home", [NOT_THERE, "/" + "x" * 300, "/dev/null"])
def test_a_home_folder_that_cannot_be_made_is_replaced(temporary, monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    assert changed() == {"HOME": str(temporary / f"rltrain-{os.getuid()}")}


def test_a_home_folder_that_cannot_be_written_to_stays_and_caches_go_elsewhere(temporary, monkeypatch):
    monkeypatch.setenv("HOME", NOT_WRITABLE)
    monkeypatch.setenv("TRITON_CACHE_DIR", "chosen")
    private = temporary / f"rltrain-{os.getuid()}"
    assert changed() == {
        "HF_HOME": f"{NOT_WRITABLE}/.cache/huggingface", "XDG_CACHE_HOME": str(private / ".cache"),
        "XDG_CONFIG_HOME": str(private / ".config"),
    }  # fmt: skip


def test_a_folder_that_others_can_write_to_or_have_put_there_is_not_taken_for_ones_own(temporary, monkeypatch):
    taken = temporary / f"rltrain-{os.getuid()}"
    for spoil in (
        lambda: taken.mkdir(mode=0o700) or taken.chmod(0o777),
        lambda: taken.symlink_to(temporary),
        taken.touch,
    ):
        monkeypatch.setenv("HOME", NOT_THERE)
        spoil()
        chosen = Path(changed()["HOME"])
        assert chosen != taken
        assert (chosen.parent, chosen.stat().st_mode & 0o777) == (temporary, 0o700)
        taken.unlink() if taken.is_symlink() or taken.is_file() else taken.rmdir()


def test_what_is_started_afterwards_finds_the_folder(temporary, monkeypatch):
    monkeypatch.setenv("HOME", NOT_THERE)
    ensure_home()
    told = subprocess.run(
        [sys.executable, "-c", "import pathlib; print(pathlib.Path.home())"], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == os.environ["HOME"]
