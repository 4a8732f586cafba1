"""Pre-flight check of a Ray cluster: check, before any worker starts, that each node can take part in the run.

`--check` prints the results of all checks. In its first seconds, a run on a cluster makes the same checks as `--check`.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rltrain.base.cache_folder import cache_root
from rltrain.base.errors import ConfigError
from rltrain.base.storage import Folder
from rltrain.base.storage import absolute as absolute_url
from rltrain.data.builtin_models import is_builtin
from rltrain.data.hub import hub_name, portable
from rltrain.rewards.loading import absolute
from rltrain.run.checks import output_folder
from rltrain.settings.algorithm_rules import needs_critic
from rltrain.settings.engine_description import engine_description, engine_folder, engine_names
from rltrain.settings.schema import Config
from workers.cluster.bundle_plan import MORE_ROOM, NoRoomError, bundle_groups, plan
from workers.cluster.node_facts import NodeFacts, Questions, Silent, devices_here, facts_here, facts_of_nodes

# Maximum number of seconds that a node may take to reply. Ray needs some seconds to start a process on a busy node.
ANSWER_S = 60.0
# Seconds by which the clocks of two nodes may differ, in addition to the time that the nodes took to answer.
CLOCK_S = 5.0
# Free memory that a run needs in /dev/shm: two buckets of a weight sync, each at least 64 MiB.
SHM_BYTES = 128 << 20
DISK_BYTES = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class CheckResult:
    """Result of one check on one node, or on the whole cluster.

    Attributes:
        node: name of the node; "cluster" for a check of all nodes together.
        what: what was checked, such as "versions".
        found: what the check found, such as "interface eth0".
        remedy: what the user can do if the check has failed; "" if the check has passed.
    """

    node: str
    what: str
    found: str
    remedy: str = ""

    @property
    def passed(self) -> bool:
        """Whether the finding is the result of a passed check. A failed check prevents the run from starting."""
        return not self.remedy

    def __str__(self) -> str:
        """Return the finding as one line: node, check, result and remedy."""
        return f"{self.node}: {self.what}: {self.found}" + (f"; {self.remedy}" if self.remedy else "")


Answers = tuple[list[NodeFacts], list[Silent], float]


def ask_nodes(config: Config) -> Answers:
    """Ask all nodes for facts, and return the facts, the nodes that did not answer, and the duration in seconds.

    In the list of the nodes' facts that `ask_nodes` returns, the facts of the driver's node come first.

    `ask_nodes` creates an empty temporary file in each folder that all nodes must share, or in the folder's nearest
    existing parent. Each node reports whether it sees the temporary files of `ask_nodes`.
    """
    probes: dict[str, str] = {}
    disks: dict[str, str] = {}
    for what, folder in _shared_folders(config).items():
        existing = next(path for path in (folder, *folder.parents) if path.is_dir())
        disks[what] = str(existing)
        probes[what] = str(existing / f".rltrain-check-{secrets.token_hex(8)}")
    try:
        for path in probes.values():
            Path(path).write_bytes(b"")
        questions = Questions(_same_everywhere(config), probes, disks, _engine_packages(config))
        if config.placement.on_cluster:
            return facts_of_nodes(questions, ANSWER_S)
        return [facts_here(questions, "127.0.0.1", devices_here())], [], 0.0
    finally:
        for path in probes.values():
            Path(path).unlink(missing_ok=True)


def _engine_packages(config: Config) -> list[tuple[str, ...]]:
    """Return the names of the Python packages of each engine (see `EngineDescription.packages`)."""
    names = dict.fromkeys([*engine_names(), config.rollout.engine])
    return [packages for name in names if (packages := engine_description(name).packages)]


def require_passed(found: Sequence[CheckResult]) -> None:
    """Raise ConfigError with the first failed check, if any check has failed."""
    failed = [one for one in found if not one.passed]
    if failed:
        rest = len(failed) - 1
        more = f" ({rest} more failed check{'s' if rest > 1 else ''}: --check lists all)" if rest else ""
        raise ConfigError(f"{failed[0]}{more}")


def findings(config: Config, facts: Sequence[NodeFacts], silent: Sequence[Silent], took_s: float) -> list[CheckResult]:
    """Check the facts about the nodes, and return the results of all checks.

    Args:
        config: the whole config.
        facts: facts that each node has reported about itself, such as software versions, with the driver's node first.
        silent: nodes that did not answer the request to report facts about themselves.
        took_s: seconds from the first request for facts to the last reply of a node.
    """
    found = [
        CheckResult(
            node.name,
            "answer",
            node.why,
            "install the same Python environment on this node, or take the node out of the cluster",
        )
        for node in silent
    ]
    for node in facts:
        for check in (_network, _versions, _gpus, _shared_memory, _contents, _shared, _disks):
            found += check(node, facts[0])
        found += _clock(node, facts[0], took_s)
    if facts:
        fit = list(_fit(config, facts))
        # If a node has too few CPUs or GPUs by itself, only that finding is reported.
        found += [*fit, *(_room(config, facts) if all(one.passed for one in fit) else ())]
    return found


def report(found: Sequence[CheckResult]) -> list[str]:
    """Return the lines that `--check` prints: the findings of each node below the name of the node."""
    lines: list[str] = []
    width = max((len(one.what) for one in found), default=0)
    for node in dict.fromkeys(one.node for one in found):
        lines.append(node)
        for one in found:
            if one.node == node:
                lines.append(f"  {'ok    ' if one.passed else 'FAILED'}  {one.what:<{width}}  {one.found}")
                lines += [f"          {'':<{width}}  -> {one.remedy}"] if one.remedy else []
    failed = sum(not one.passed for one in found)
    return [*lines, f"{failed} of {len(found)} checks failed" if failed else f"all {len(found)} checks passed"]


def _network(node: NodeFacts, _: NodeFacts) -> Iterator[CheckResult]:
    if node.interface:
        yield CheckResult(node.name, "network", f"interface {node.interface}")
    else:
        yield CheckResult(
            node.name,
            "network",
            "no network interface has the address that Ray uses for the node",
            "start Ray on this node with --node-ip-address=ADDRESS, where ADDRESS is an address of this node",
        )


def _versions(node: NodeFacts, driver: NodeFacts) -> Iterator[CheckResult]:
    other = [name for name, version in driver.versions.items() if node.versions.get(name) != version]
    if not other:
        yield CheckResult(
            node.name, "versions", ", ".join(f"{name} {version}" for name, version in node.versions.items())
        )
    for name in other:
        yield CheckResult(
            node.name,
            "versions",
            f"{name} {node.versions.get(name) or 'is not installed'}, but {driver.versions[name] or 'none'} on the "
            f"driver's node {driver.name}",
            "install the same versions on all nodes (for rltrain: the same checkout)",
        )


def _gpus(node: NodeFacts, driver: NodeFacts) -> Iterator[CheckResult]:
    if node.torch_gpus < node.gpus:
        yield CheckResult(
            node.name,
            "GPUs",
            f"Ray counts {node.gpus:g} GPUs, but torch can use {node.torch_gpus} ({node.gpu_driver})",
            "update the GPU driver, or install the torch build for this driver; otherwise ranks would train on the CPU",
        )
    elif node.gpus:
        yield CheckResult(node.name, "GPUs", f"{node.gpus:g}; {node.gpu_driver}")


def _shared_memory(node: NodeFacts, _: NodeFacts) -> Iterator[CheckResult]:
    if node.shm_free is None:
        return
    free = f"{node.shm_free // _MIB:,} MiB free"
    if node.shm_free < SHM_BYTES:
        yield CheckResult(
            node.name,
            "/dev/shm",
            f"{free}, and weight syncs need {SHM_BYTES // _MIB} MiB",
            "remove old files from /dev/shm, or make /dev/shm larger (in Docker: --shm-size)",
        )
    else:
        yield CheckResult(node.name, "/dev/shm", free)


def _contents(node: NodeFacts, driver: NodeFacts) -> Iterator[CheckResult]:
    for what, content in node.contents.items():
        if content is None:
            yield CheckResult(
                node.name,
                what,
                "is missing",
                "copy the file or folder to the same path on every node, or to a shared file system",
            )
        elif content != driver.contents[what]:
            yield CheckResult(
                node.name, what, f"differs from the copy on the driver's node {driver.name}", "copy it again"
            )
        else:
            yield CheckResult(node.name, what, "is the same" if node is not driver else "is there")


def _shared(node: NodeFacts, driver: NodeFacts) -> Iterator[CheckResult]:
    for what in driver.sees:
        if what in node.sees:
            yield CheckResult(node.name, what, "is shared" if node is not driver else "can be written")
        else:
            yield CheckResult(
                node.name,
                what,
                f"a file that the driver's node {driver.name} wrote is not visible on this node",
                "name a folder on a file system that all nodes share, or mount the file system on this node",
            )


def _disks(node: NodeFacts, _: NodeFacts) -> Iterator[CheckResult]:
    for what, free in node.disk_free.items():
        if free is not None and free < DISK_BYTES:
            yield CheckResult(
                node.name,
                what,
                f"the disk has {free // _MIB:,} MiB left",
                "free space, or name a folder on another disk",
            )


def _clock(node: NodeFacts, driver: NodeFacts, took_s: float) -> Iterator[CheckResult]:
    difference = abs(node.clock - driver.clock)
    if difference > took_s + CLOCK_S:
        yield CheckResult(
            node.name,
            "clock",
            f"differs by {difference:.0f} s from the clock of the driver's node {driver.name}",
            "set the clocks of all nodes by NTP, because the timeline and the tokens of the Hugging Face hub need "
            "correct clocks",
        )


def _fit(config: Config, facts: Sequence[NodeFacts]) -> Iterator[CheckResult]:
    """Check that one node has a device for each shard of an engine, and that each node has enough CPUs."""
    on_gpus = any(node.gpus for node in facts)
    device: Callable[[NodeFacts], float] = (lambda node: node.gpus) if on_gpus else (lambda node: node.cpus)
    name = "GPUs" if on_gpus else "CPUs"
    largest = max(facts, key=device)
    shards = config.rollout.shards
    if shards > device(largest):
        yield CheckResult(
            "cluster",
            "placement",
            f"{config.rollout.description.shards_key}={shards}, but the largest node, {largest.name}, has "
            f"{device(largest):g} {name}",
            f"use at most {device(largest):g}, because all shards of an engine run on one node",
        )
    short = [node for node in facts if on_gpus and node.cpus < node.gpus]
    for node in short:
        yield CheckResult(
            node.name,
            "CPUs",
            f"{node.cpus:g} CPUs for {node.gpus:g} GPUs, and each process on a GPU needs a CPU",
            f"start Ray on this node with --num-cpus={node.gpus:g} or more",
        )
    for node in facts:
        if not on_gpus and node.cpus < 1:
            yield CheckResult(
                node.name,
                "CPUs",
                "Ray has no CPU on this node, so no rank and no engine can run on it",
                f"start Ray on this node with --num-cpus={node.cores}",
            )
        elif node not in short:
            yield CheckResult(node.name, "CPUs", f"Ray counts {node.cpus:g} CPUs; the node has {node.cores} cores")


def _room(config: Config, facts: Sequence[NodeFacts]) -> Iterator[CheckResult]:
    """Check that the nodes have room for all training ranks and engines, if the nodes run nothing else."""
    on_gpus = any(node.gpus for node in facts)
    groups = bundle_groups(config, config.roles(needs_critic=needs_critic(config.algorithm)), on_gpus=on_gpus)
    names = {str(number): node.name for number, node in enumerate(facts)}
    nodes = {str(number): {"GPU": node.gpus, "CPU": node.cpus} for number, node in enumerate(facts)}
    try:
        plan(groups, nodes)
    except NoRoomError as error:
        yield CheckResult("cluster", "placement", error.described(names), MORE_ROOM)


def _shared_folders(config: Config) -> dict[str, Path]:
    """Return the folders that all nodes must share, in a dict with keys such as `trainer.output_dir=PATH`."""
    trainer = config.trainer
    folders = {f"trainer.output_dir={trainer.output_dir}": output_folder(trainer)}
    checkpoints = Folder(absolute_url(trainer.checkpoint_dir))
    if checkpoints.local:
        folders[f"trainer.checkpoint_dir={trainer.checkpoint_dir}"] = Path(checkpoints.root)
    if is_builtin(config.model.path):
        folders[f"RLTRAIN_CACHE={cache_root()}"] = cache_root().absolute()
    return folders


def _same_everywhere(config: Config) -> Mapping[str, str]:
    """Return the paths whose content must be the same on each node, in a dict with keys such as `model.path=PATH`.

    `_same_everywhere` leaves out models that are named by a hub id, because each node downloads these models by itself.
    """
    models = {"model.path": config.model.path} | {model.key: model.path for model in config.reward.models}
    models |= {teacher.key: teacher.path for teacher in config.algorithm.distillation.models}
    found = {
        f"{key}={path}": portable(path)
        for key, path in models.items()
        if not is_builtin(path) and hub_name(path) is None
    }
    if "." in config.rollout.engine:
        found[f"rollout.engine={config.rollout.engine}"] = str(engine_folder(config.rollout.engine))
    for function in config.reward.functions:
        file = Path(absolute(function.path).rpartition(":")[0])
        if file.is_file():
            found[f"reward function {function.name}"] = str(file)
    return found
