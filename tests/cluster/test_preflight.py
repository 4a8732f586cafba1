"""The pre-flight check on a cluster of three hosts, one of which has a fault."""

import shutil
import sys
import time
from pathlib import Path

import pytest
from hosts import Cluster, hosts
from refusals import SMALL, check, refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Return a folder that all hosts share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared):
    """Start Ray on three hosts, the last of which has another version of vLLM."""
    fake = shared / "python" / "vllm-0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1\n")
    with hosts(3) as made:
        cluster = Cluster(made, {"OMP_NUM_THREADS": "1"})
        cluster.join(made[0], cpus=3)
        cluster.join(made[1], cpus=3)
        yield cluster


def test_a_healthy_cluster_passes_and_each_node_is_named(cluster, shared):
    done = check(cluster, shared)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for host in cluster.hosts[:2]:
        assert f"{host.name} ({host.address})" in done.stdout
    assert "interface eth0" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("all ")
    assert not (shared / "run").exists()
    assert not list(shared.glob(".rltrain-check-*"))


def test_an_output_folder_that_one_node_does_not_share_is_refused(cluster, shared):
    second = cluster.hosts[1]
    folder = shared / "unshared"
    folder.mkdir()
    second.mount_tmpfs(folder)
    line = refused(check(cluster, shared, f"trainer.output_dir={folder / 'run'}"))
    assert line.startswith(f"error: {second.name} ({second.address}): trainer.output_dir={folder / 'run'}: a file that")
    assert "name a folder on a file system that all nodes share" in line


def test_a_model_that_is_missing_on_one_node_is_refused(cluster, shared, start):
    second, folder = cluster.hosts[1], shared / "models"
    shutil.copytree(start, folder / "tiny")
    overrides = [f"model.path={folder / 'tiny'}", "profile=demo"]
    assert check(cluster, shared, *overrides).returncode == 0
    second.mount_tmpfs(folder)
    line = refused(check(cluster, shared, *overrides))
    assert line.startswith(f"error: {second.name} ({second.address}): model.path={folder / 'tiny'}: is missing; copy")


def test_a_reward_file_that_differs_on_one_node_is_refused(cluster, shared):
    second, folder = cluster.hosts[1], shared / "rewards"
    folder.mkdir()
    text = "def score(response):\n    return 1.0\n"
    (folder / "mine.py").write_text(text)
    second.mount_tmpfs(folder)
    second.run([sys.executable, "-c", f"open({str(folder / 'mine.py')!r}, 'w').write({text!r} + '# old\\n')"])
    line = refused(check(cluster, shared, f"reward.functions=[{folder / 'mine.py'}:score]"))
    assert line.startswith(f"error: {second.name} ({second.address}): reward function score: differs from the")


def test_a_full_shared_memory_is_refused(cluster, shared):
    second = cluster.hosts[1]
    fill = "import shutil; n = shutil.disk_usage('/dev/shm').free - (50 << 20); open('/dev/shm/fill', 'wb').write("
    fill += "bytes(n))"
    second.run([sys.executable, "-c", fill])
    try:
        line = refused(check(cluster, shared))
    finally:
        second.run(["rm", "/dev/shm/fill"])
    assert line.startswith(f"error: {second.name} ({second.address}): /dev/shm: ")
    assert "weight syncs need 128 MiB; remove old files from /dev/shm, or make /dev/shm larger" in line


def test_an_engine_that_is_larger_than_each_node_is_refused(cluster, shared):
    line = refused(check(cluster, shared, "rollout=vllm", "rollout.vllm.tensor_parallel_size=4"))
    assert line.startswith("error: cluster: placement: rollout.vllm.tensor_parallel_size=4, but the largest node, ")
    assert "has 3 CPUs; use at most 3" in line


def test_another_version_of_a_package_and_a_node_without_cpus_are_refused(cluster, shared):
    third = cluster.hosts[2]
    cluster.join(third, cpus=0, env={"PYTHONPATH": str(shared / "python")})
    done = check(cluster, shared)
    line = refused(done)
    assert line.startswith(f"error: {third.name} ({third.address}): versions: vllm 0.1, but ")
    assert f"on the driver's node {cluster.hosts[0].name}" in line
    assert line.endswith("(1 more failed check: --check lists all)")
    assert "Ray has no CPU on this node" in done.stdout
    # A run makes the same pre-flight check before it starts workers.
    began = time.monotonic()
    assert refused(cluster.main(*SMALL, f"trainer.output_dir={shared / 'run'}")) == line
    print(f"the run was refused after {time.monotonic() - began:.1f} s")  # noqa: T201
    assert not (shared / "run").exists()
