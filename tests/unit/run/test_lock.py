"""Tests of two runs with one output folder.

The second run is refused, even if the second run names the folder through a symbolic link. When a process ends, its
locks are released.
"""

import os
import signal
import subprocess
import sys

import pytest

from rltrain.base.errors import ConfigError
from rltrain.run.lock import RunLock
from rltrain.settings.compose import compose

HOLD = """
import os, sys, time
from rltrain.settings.compose import compose
from rltrain.run.lock import RunLock
with RunLock(compose(sys.argv[1:])[0].trainer) as lock:
    lock.take()
    ready, started = os.pipe()
    if not os.fork():  # a child keeps nothing
        os.write(started, b".")
        time.sleep(300)
    os.read(ready, 1)  # the child has closed the files of the locks
    print("held", flush=True)
    time.sleep(300)
"""


def lock_of(*overrides) -> RunLock:
    return RunLock(compose(overrides)[0].trainer)


def refusal(*overrides) -> str:
    with pytest.raises(ConfigError) as caught, lock_of(*overrides) as lock:
        lock.take()
    return str(caught.value)


def test_a_second_process_in_a_folder_is_refused_until_the_first_has_died(tmp_path):
    words = [f"trainer.output_dir={tmp_path}/run", f"trainer.checkpoint_dir={tmp_path}/kept"]
    first = subprocess.Popen([sys.executable, "-c", HOLD, *words], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert first.stdout.readline() == b"held\n"
        (tmp_path / "link").symlink_to("run")
        for name in ("run", "link", "link/../run"):
            said = refusal(f"trainer.output_dir={tmp_path}/{name}")
            assert said.startswith(f"trainer.output_dir={tmp_path}/{name}: another run is using this folder")
            assert f"(process {first.pid} on " in said
            assert "\n" not in said
        said = refusal(f"trainer.output_dir={tmp_path}/other", f"trainer.checkpoint_dir=file://{tmp_path}/kept")
        assert said.startswith(f"trainer.checkpoint_dir=file://{tmp_path}/kept: another run is using this folder")
        (tmp_path / "linked").symlink_to("kept")
        said = refusal(f"trainer.output_dir={tmp_path}/other", f"trainer.checkpoint_dir={tmp_path}/linked")
        assert "linked: another run is using this folder" in said
        assert not (tmp_path / "other").exists()
        first.send_signal(signal.SIGKILL)
        first.wait()
        with lock_of(*words) as lock:
            lock.take()
    finally:
        os.killpg(first.pid, signal.SIGKILL)  # `killpg` also kills the child processes of the process.
        first.stdout.close()


def test_a_folder_is_made_only_when_it_is_taken(tmp_path):
    with lock_of(f"trainer.output_dir={tmp_path}/run") as lock:
        assert list(tmp_path.iterdir()) == []
        lock.take()
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".checkpoints.lock", ".lock"]


def test_folders_elsewhere_have_no_lock(tmp_path):
    with lock_of(f"trainer.output_dir={tmp_path}/run", "trainer.checkpoint_dir=memory://kept") as lock:
        lock.take()
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_folder_whose_lock_would_have_too_long_a_name_is_refused_and_nothing_is_made(tmp_path):
    said = refusal(f"trainer.output_dir={tmp_path}/run", f"trainer.checkpoint_dir={tmp_path}/{'x' * 250}")
    assert said.endswith("cannot be accessed (File name too long); give another path")
    assert not list(tmp_path.iterdir())
