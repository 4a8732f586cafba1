"""The steps that install the images' packages, run in new virtual environments. `make image-test` runs these tests."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.dockerfiles import ROOT, ImageFolder, install_steps, instructions

UV = os.environ.get("RLTRAIN_IMAGE_TEST", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.broad,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not UV, reason="the test downloads two gigabytes: run `make image-test`"),
]
TINY = [
    "placement=inprocess", "rollout=hf", "trainer.total_steps=1", "trainer.prompts_per_step=4",
    "trainer.prompts_per_minibatch=4", "rollout.samples_per_prompt=4", "data.val_size=4",
]  # fmt: skip


@pytest.fixture
def environment():
    """Yield a new virtual environment in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True, timeout=300)
        yield Path(folder) / "venv"


def test_the_cpu_image_installs_its_packages_and_runs(environment):
    image = ImageFolder(ROOT / "docker" / "Dockerfile.cpu", environment.parent / "image", environment / "bin")
    image.build()
    (command,) = [json.loads(text) for name, text in instructions(image.dockerfile) if name == "CMD"]
    output = image.inside("/outputs/run")
    image.run([*command, *TINY, f"trainer.output_dir={output}"], timeout=600, env={"OMP_NUM_THREADS": "1"})
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 1
    assert image.run(["python", "-c", "import rltrain; print(rltrain.__file__)"], timeout=60).startswith(
        str(image.inside("/opt/rltrain"))
    )


def test_the_packages_of_the_gpu_image_are_complete_and_agree_with_each_other(environment):
    (step,) = install_steps(ROOT / "docker" / "Dockerfile.gpu")
    lock = ROOT / step.partition(" -r ")[2].split()[0]
    planned = subprocess.run(
        [UV, "pip", "install", "--dry-run", "--python", environment / "bin" / "python", "--requirement", lock],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    locked = [line for line in lock.read_text().splitlines() if "==" in line]
    # uv would add a package that other packages need and that the lock lacks.
    assert f"Resolved {len(locked)} packages" in planned.stderr


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.gpu"])
def test_the_system_packages_of_an_image_exist(name):
    if shutil.which("apt-get") is None:
        pytest.skip("apt-get is not installed")
    (step,) = [text for kind, text in instructions(ROOT / "docker" / name) if kind == "RUN" and "apt-get" in text]
    packages = step.partition("--no-install-recommends")[2].partition("&&")[0].split()
    done = subprocess.run(["apt-get", "install", "--simulate", *packages], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
