"""Facts about the nodes of a Ray cluster, from which the driver decides whether a run can use the nodes.

The driver starts one Ray task on every node at the same time. Each Ray task returns the facts about its node.
"""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rltrain.base.cpu_threads import cpu_cores
from rltrain.base.errors import one_line
from workers.cluster.node_settings import interface_of

PACKAGES = ("ray", "torch", "transformers")
SHARED_MEMORY = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")
# Files of the Linux kernel that contain the memory limit of a container, in bytes.
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_ROOT = Path(__file__).resolve().parents[2]  # The folder with the packages `rltrain` and `workers`.


@dataclass(frozen=True)
class Questions:
    """Additional facts that the driver requests from each node of a run.

    Attributes:
        paths: Maps the description of a file or folder, such as "model.path=/models/a", to its path. Every file or
            folder in `paths` must have the same content on all nodes.
        probes: Maps the description of a folder that all nodes must share to the path of a file that the driver has
            just written in this folder.
        disks: Maps the description of a folder to the path of an existing folder on the same disk.
        engine_packages: Names of the Python packages of each engine (see `versions`).
    """

    paths: Mapping[str, str] = field(default_factory=dict)
    probes: Mapping[str, str] = field(default_factory=dict)
    disks: Mapping[str, str] = field(default_factory=dict)
    engine_packages: Sequence[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """Facts about one node.

    Attributes:
        name: Hostname and address of the node, for messages.
        interface: Name of the network interface with the node's address; "" if no interface has this address.
        versions: Maps "Python", "rltrain" and the names of packages to versions; "" for a package that is not
            installed. The version of rltrain is a checksum of its source files.
        cores: Number of CPU cores that a process may use.
        cpus, gpus: Numbers of CPUs and GPUs that the node offers to Ray.
        torch_gpus: Number of GPUs that torch can use.
        gpu_driver: Text for messages that gives the version of the GPU driver, and the CUDA version for which torch was
            built.
        memory: Bytes of memory that the processes of the node may use.
        gpu_memory: Bytes of memory of the node's smallest GPU; None if torch can use no GPU on the node.
        shm_free: Free bytes of /dev/shm; None on a machine without /dev/shm.
        clock: Time of the node's clock, in seconds since 1970, when the node replied.
        contents: Maps each key of `Questions.paths` to a checksum of the file or folder; None if the file or folder
            cannot be read.
        sees: The keys of `Questions.probes` whose file exists on the node.
        disk_free: Maps each key of `Questions.disks` to the free bytes of the folder's disk; None if the folder does
            not exist.
    """

    name: str
    interface: str
    versions: Mapping[str, str]
    cores: int
    cpus: float
    gpus: float
    torch_gpus: int
    gpu_driver: str
    memory: int
    gpu_memory: int | None
    shm_free: int | None
    clock: float
    contents: Mapping[str, int | None]
    sees: Sequence[str]
    disk_free: Mapping[str, int | None]


@dataclass(frozen=True)
class Silent:
    """A node of the Ray cluster that did not send its facts to the driver.

    Attributes:
        name: Address of the node.
        why: Why the node did not send its facts, for a message.
    """

    name: str
    why: str


def facts_here(questions: Questions, address: str, resources: Mapping[str, float]) -> NodeFacts:
    """Return the facts about the machine of this process.

    Args:
        questions: Files and folders about which each node reports facts, such as checksums and free disk space.
        address: IP address of the node.
        resources: Maps resources of Ray, such as "CPU", to the amounts that the node offers.
    """
    gpus = resources.get("GPU", 0.0)
    torch_gpus, gpu_driver = _gpus_of_torch() if gpus else (0, "")
    return NodeFacts(
        name=f"{socket.gethostname()} ({address})",
        interface=interface_of(address),
        versions=versions(questions.engine_packages),
        cores=cpu_cores(),
        cpus=resources.get("CPU", 0.0),
        gpus=gpus,
        torch_gpus=torch_gpus,
        gpu_driver=gpu_driver,
        memory=memory_here(),
        gpu_memory=gpu_memory_here() if torch_gpus else None,
        shm_free=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        clock=time.time(),
        contents={what: content_of(Path(path)) for what, path in questions.paths.items()},
        sees=[what for what, path in questions.probes.items() if os.path.exists(path)],
        disk_free={what: _free(path) for what, path in questions.disks.items()},
    )


def devices_here() -> dict[str, float]:
    """Return this machine's numbers of CPU cores and GPUs, under Ray's resource names "CPU" and "GPU"."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"CPU": float(cpu_cores()), "GPU": float(gpus)}


def memory_here() -> int:
    """Return the bytes of memory that the processes of this machine, or of this container, may use."""
    memory = int(psutil.virtual_memory().total)
    for file in _CONTAINER_LIMITS:
        # A file in `_CONTAINER_LIMITS` may be missing, or may contain "max" instead of a number.
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int(file.read_text("utf-8")))
    return memory


def gpu_memory_here() -> int | None:
    """Return the bytes of memory of this machine's smallest GPU, or None if torch can use no GPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min((int(torch.cuda.get_device_properties(n).total_memory) for n in range(count)), default=None)


def versions(engine_packages: Sequence[tuple[str, ...]] = ()) -> dict[str, str]:
    """Return the versions of Python, of rltrain, and of the packages that rltrain uses; "" for a missing package.

    Args:
        engine_packages: For each engine, the names of the packages of which one is installed. In the result, the first
            name stands for the installed package.
    """
    found = {"Python": platform.python_version(), "rltrain": f"{_checksum(_sources()):08x}"}
    return found | {names[0]: _version(names) for names in [*((name,) for name in PACKAGES), *engine_packages]}


def _version(names: Sequence[str]) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _sources() -> Iterator[bytes]:
    for package in ("rltrain", "workers"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            yield path.relative_to(_ROOT).as_posix().encode()
            yield path.read_bytes()


def content_of(path: Path) -> int | None:
    """Return a checksum of a file, or of the names and sizes of a folder's files; None if `path` cannot be read."""
    try:
        if path.is_dir():
            files = sorted(path.iterdir())
            return _checksum(f"{one.name} {one.stat().st_size}".encode() for one in files if one.is_file())
        return _checksum([path.read_bytes()])
    except OSError:
        return None


def _checksum(parts: Iterator[bytes] | Sequence[bytes]) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _gpus_of_torch() -> tuple[int, str]:
    import torch

    driver = "none"
    if _DRIVER.exists():
        driver = one_line(_DRIVER.read_text("utf-8", "replace").splitlines()[0], 120)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, f"GPU driver: {driver}; torch {torch.__version__} was built for CUDA {torch.version.cuda}"


def facts_of_nodes(questions: Questions, timeout_s: float) -> tuple[list[NodeFacts], list[Silent], float]:
    """Collect the facts about all nodes of the Ray cluster to which this process is connected.

    Args:
        questions: Files and folders about which each node reports facts, such as checksums and free disk space.
        timeout_s: Seconds within which a node must send its facts.

    Returns:
        A tuple (facts, silent, seconds). `facts` lists the facts about each node that replied, beginning with the
        driver's own node. `silent` lists the nodes that did not send their facts. `seconds` is the time from the first
        request until all nodes have replied or the timeout has passed. Even if the clocks of all nodes agree, the
        `NodeFacts.clock` values of two nodes can differ by up to `seconds`, because the nodes reply at different times.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = sorted(alive, key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))
    make: Any = ray.remote
    asked = time.monotonic()
    answers = []
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        remote = make(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(facts_here)
        answers.append(remote.remote(questions, node["NodeManagerAddress"], node["Resources"]))
    done, _ = ray.wait(answers, num_returns=len(answers), timeout=timeout_s)
    facts: list[NodeFacts] = []
    silent: list[Silent] = []
    for node, answer in zip(nodes, answers, strict=True):
        address = node["NodeManagerAddress"]
        if answer not in done:
            silent.append(Silent(address, f"no Ray process answered on this node in {timeout_s:g} s"))
            continue
        try:
            facts.append(ray.get(answer))
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            silent.append(Silent(address, one_line(lines[-1], 200)))
    return facts, silent, time.monotonic() - asked
