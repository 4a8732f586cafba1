"""The RayJob in docker/ has the fields and types of KubeRay, and its sizes fit together."""

import copy
import re
import shlex
from pathlib import Path

import msgspec
import pytest
import yaml
from lightkube.models.core_v1 import PersistentVolumeClaim
from lightkube.utils.quantity import parse_quantity

from rltrain.run.checks import check_cluster
from rltrain.settings.command_line import parse_args
from rltrain.settings.compose import compose
from tests.unit.kuberay_types import RayJob

DOCKER = Path(__file__).parents[2] / "docker"
ENTRY = "python -m rltrain.main "


@pytest.fixture
def job() -> dict:
    return yaml.safe_load((DOCKER / "kuberay.yaml").read_text())


def groups(job: dict) -> list[dict]:
    """Return the head's group, and then the groups of workers."""
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def limits(group: dict) -> dict[str, str]:
    (container,) = group["template"]["spec"]["containers"]
    return container["resources"]["limits"]


def accepted(document: dict, kind: type) -> bool:
    """Return whether `kind` has all fields of the document; a field of another type raises an error."""
    return kind.from_dict(document).to_dict() == document


def test_the_job_has_only_fields_that_kuberay_and_kubernetes_know(job):
    assert accepted(job, RayJob)


def changed(job: dict, *place: str | int, value: object) -> dict:
    """Return a copy of the job in which `value` is at `place`."""
    copied = copy.deepcopy(job)
    *outer, last = place
    target = copied
    for name in outer:
        target = target[name]
    target[last] = value
    return copied


def test_a_field_that_nobody_knows_is_noticed(job):
    containers = ["spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers"]
    assert not accepted(changed(job, "spec", "backoffLimits", value=3), RayJob)
    assert not accepted(changed(job, *containers, 0, "shmSize", value="16Gi"), RayJob)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("submissionMode",), "JobMode"),
        (("rayClusterSpec", "headGroupSpec", "rayStartParams", "object-store-memory"), 8_000_000_000),
        (("rayClusterSpec", "workerGroupSpecs", 0, "replicas"), "2"),
        (("rayClusterSpec", "headGroupSpec", "template", "spec", "volumes", 1, "emptyDir"), "Memory"),
    ],
)
def test_a_field_of_a_wrong_type_is_noticed(job, place, value):
    with pytest.raises(msgspec.ValidationError):
        accepted(changed(job, "spec", *place, value=value), RayJob)


def test_each_pod_has_room_for_the_object_store_beside_the_weight_sync_in_shared_memory(job):
    for group in groups(job):
        shared = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}["shm"]["emptyDir"]
        room, store = parse_quantity(shared["sizeLimit"]), int(group["rayStartParams"]["object-store-memory"])
        assert shared["medium"] == "Memory"
        assert store <= room * 3 / 4
        assert room <= parse_quantity(limits(group)["memory"]) / 4  # the pod's memory includes its /dev/shm


def test_each_mounted_volume_exists_and_outputs_are_shared(job):
    for group in groups(job):
        pod = group["template"]["spec"]
        mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {"outputs": "/outputs", "shm": "/dev/shm"}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes.keys() == mounted.keys()
        assert volumes["outputs"]["persistentVolumeClaim"] == {"claimName": "rltrain-outputs"}


def test_the_run_uses_all_gpus_of_the_workers_and_continues_after_a_retry(job):
    _, workers = groups(job)
    gpus = workers["replicas"] * int(limits(workers)["nvidia.com/gpu"])
    cpus = workers["replicas"] * int(limits(workers)["cpu"])
    command = job["spec"]["entrypoint"]
    assert command.startswith(ENTRY)
    config, _ = compose(parse_args(shlex.split(command.removeprefix(ENTRY))).overrides)
    check_cluster(config, {"GPU": float(gpus), "CPU": float(cpus)})
    assert config.placement.actor_ranks == config.placement.rollout_replicas == gpus
    assert config.trainer.resume == "auto"
    assert config.trainer.save_every > 0
    assert job["spec"]["backoffLimit"] > 0
    assert config.trainer.output_dir.startswith("/outputs/")


def test_ray_is_the_version_of_the_lock(job):
    lock = (DOCKER / "requirements-cpu.txt").read_text()
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == re.search(r"^ray==(.*)$", lock, re.M)[1]


def test_the_token_comes_from_a_secret_that_the_instructions_create(job):
    auth = job["spec"]["rayClusterSpec"]["authOptions"]
    assert auth["mode"] == "token"
    create = f"kubectl create secret generic {auth['secretName']} --from-literal=auth_token="
    assert create in (DOCKER / "README.md").read_text()


def test_the_claim_of_the_instructions_can_be_mounted_by_many_nodes():
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (DOCKER / "README.md").read_text(), re.S | re.M)
    claim = yaml.safe_load(text)
    assert accepted(claim, PersistentVolumeClaim)
    assert claim["metadata"]["name"] == "rltrain-outputs"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
