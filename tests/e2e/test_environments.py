"""Runs in unusual environments: no home folder, the C locale, non-ASCII names, a long TMPDIR, a secret."""

import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from runs import ROOT

pytestmark = pytest.mark.slow
KEY = "-----BEGIN RSA PRIVATE " + "KEY-----\n" + "\n".join(f"{n:x}bcdefghijklmnopqrst+/{n}" for n in range(30)) + "\n"
REWARD = """
import os

def größe(prompt, response):
    if len(response) % 2:
        raise ValueError(f"schön: {os.environ['DEPLOY_KEY']}")
    return 0.5
"""


@pytest.fixture
def folder(tmp_path, start):
    """Make a folder with prompts, a reward function and a model, all under non-ASCII names."""
    made = tmp_path / "büro 数据"
    made.mkdir()
    rows = [{"prompt": f"{n}729=", "answer": "ü"} for n in range(8)]
    (made / "prömpts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (made / "größe.py").write_text(REWARD, "utf-8")
    (made / "modèle").symlink_to(start)
    return made


def test_a_run_with_ray_needs_no_home_no_locale_and_no_short_ascii_names_and_shows_no_key(folder, tmp_path):
    temporary = tmp_path / ("t" * 60)  # The path of the folder is too long for Ray's sockets.
    temporary.mkdir()
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LC_ALL": "C",
        "HOME": "/proc/no/such/folder", "TMPDIR": str(temporary), "DEPLOY_KEY": KEY,
    }  # fmt: skip
    command = [
        sys.executable, "-m", "rltrain.main", "rollout=hf", "profile=demo", 'model.path="modèle"',
        'data.train="prömpts.jsonl"',
        "data.val=null", 'reward.functions=["größe.py:größe"]', "reward.max_failed_fraction=1", "trainer.total_steps=1",
        "trainer.prompts_per_step=8", "trainer.prompts_per_minibatch=8", "rollout.samples_per_prompt=4",
        'trainer.output_dir="läufe/1"',
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"of 32 rewards failed" in done.stdout
    (rollouts,) = (folder / "läufe" / "1" / "rollouts").glob("*.parquet")
    errors = {error for error in pq.read_table(rollouts)["reward_error"].to_pylist() if error}
    assert len(errors) == 1
    assert "raised ValueError: schön: [hidden]" in errors.pop()
    written = [path for path in folder.rglob("*") if path.is_file() and path.name != "model.safetensors"]
    for shown in (done.stdout, done.stderr, *(path.read_bytes() for path in written)):
        assert b"bcdefghijk" not in shown
    private = temporary / f"rltrain-{os.getuid()}"
    assert private.stat().st_mode & 0o777 == 0o700
    assert not list(private.rglob("*token*"))
