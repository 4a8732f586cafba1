"""Which processes there are and what lives in each: starts Ray and the workers, or puts all into this process."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.errors import ConfigError, WorkerError
from rltrain.model_files import text_config
from rltrain.schema import REWARD_MODEL, Config
from rltrain.work import RowWork, row_work
from workers.group import Hosts, LocalHosts, RayHosts, WorkerGroup
from workers.host import Host
from workers.reward.pool import RewardPool
from workers.rollout.pool import RolloutPool

ROLES = {
    "actor": "workers.actor:ActorWorker",
    "reference": "workers.reference:ReferenceWorker",
    "critic": "workers.critic:CriticWorker",
    REWARD_MODEL: "workers.reward_model:RewardModelWorker",
}
COLLECTIVE_TIMEOUT_S = 600.0
# For processes that all are on this machine: nobody else can connect to them.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


@dataclass
class Workers:
    """The running workers of a run."""

    rollout: RolloutPool
    rewards: RewardPool
    actor: WorkerGroup
    reference: WorkerGroup | None
    critic: WorkerGroup | None
    reward_models: list[WorkerGroup]

    def close(self) -> None:
        """End what this run started; Ray takes its actors along."""
        with contextlib.suppress(WorkerError):
            self.rewards.close()
        with contextlib.suppress(WorkerError):
            self.rollout.close()


def connect(config: Config) -> dict[str, float]:
    """Start or join Ray; returns the cluster's resources. Raises ConfigError when there is none to join."""
    local, address = config.placement.address == "local", config.placement.address
    if address == "auto":  # Ray's own would also join the private cluster of another run on this machine
        address = os.environ.get("RAY_ADDRESS", "")
        if not address:
            raise ConfigError(
                "placement.address=auto: RAY_ADDRESS is not set, no cluster to join; start this with `ray job "
                "submit`, give placement.address=HOST:PORT, or use placement=local"
            )
    if "ray" not in sys.modules:  # it reads these when it is imported
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if local:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # the default, but said aloud it needs no warning
            os.environ.setdefault("RAY_worker_niceness", "0")  # workers are all there is to run
    with _on_loopback() if local else contextlib.nullcontext():
        import ray

    options: dict[str, Any] = {"log_to_driver": config.verbose, "configure_logging": config.verbose}
    if local:
        options |= {"include_dashboard": False, "num_cpus": os.cpu_count()}
    ray.init(address=address, logging_level="info" if config.verbose else "error", **options)
    return dict(ray.cluster_resources())


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Imported in here, Ray takes the loopback address for that of this node, and its daemons listen nowhere else.

    Despite its name the variable counts on Linux too. `ray.init(_node_ip_address="127.0.0.1")` does not do it: Ray
    takes that for a mistake. Programs started later may well want a cluster, so it is not left behind.
    """
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def disconnect() -> None:
    """Leave Ray; ends the processes of a local one."""
    import ray

    ray.shutdown()


def start(config: Config, path: str, stop_ids: Sequence[int], *, needs_critic: bool) -> Workers:
    """Start all workers of a run and wait until they are ready.

    Args:
        config: the whole config; Ray is connected unless the launcher is `inprocess`.
        path: model directory.
        stop_ids: the model's end tokens.
        needs_critic: whether the advantage estimator asks for values.

    Raises:
        WorkerError: if a process does not come up within `placement.start_timeout_s`.
    """
    roles = config.roles(needs_critic=needs_critic)
    models = {f"{REWARD_MODEL} {model.name}": model.path for model in config.reward.models}
    paths = {role: str(Path(own).expanduser().absolute()) for role, own in models.items()}
    if config.placement.launcher == "inprocess":
        hosts: Hosts = LocalHosts(Host({}, verbose=True))
        hosts.host.join(0, 1, None, COLLECTIVE_TIMEOUT_S)
        training, rollout = dict.fromkeys(roles, hosts), hosts
        rewards = RewardPool.in_process(config.reward)
    else:
        rewards = RewardPool.on_ray(
            config.reward, workers=config.placement.reward_workers, start_timeout_s=config.placement.start_timeout_s
        )
        ranks = config.placement.actor_ranks
        rollout = ray_hosts(config, config.placement.rollout_replicas, gpus=_gpus_of_engine(config), concurrency=8)
        shared = ray_hosts(config, ranks, gpus=1) if config.placement.share_ranks else None
        training = {role: shared or ray_hosts(config, ranks, gpus=1) for role in roles}
    pending = [
        (rollout, build(rollout, "rollout", "workers.rollout.worker:RolloutWorker", config, path, list(stop_ids)))
    ]
    if config.takes_turns and _has_gpus():
        rollout.wait(pending.pop()[1])  # an engine measures what is free on its device: nobody else takes any meanwhile
    for group in dict.fromkeys(training.values()):
        if isinstance(group, RayHosts):
            meet(group, loopback=config.placement.address == "local")
    for role, hosts in training.items():
        pending.append((hosts, build(hosts, role, ROLES[role.partition(" ")[0]], config, paths.get(role, path))))
    for hosts, calls in pending:
        hosts.wait(calls)
    groups = {
        role: WorkerGroup(
            hosts, role, work_of(role, paths.get(role, path)), sequence_ranks=config.placement.sequence_ranks
        )
        for role, hosts in training.items()
    }
    return Workers(
        RolloutPool(rollout, sleeps=config.takes_turns), rewards, groups["actor"], groups.get("reference"),
        groups.get("critic"), [groups[role] for role in models],
    )  # fmt: skip


def work_of(role: str, path: str) -> RowWork:
    """What this role's model computes for a row; only policies have a head over the vocabulary."""
    return row_work(text_config(path), head=role in ("actor", "reference"))


def build(hosts: Hosts, role: str, path: str, *arguments: Any) -> list[Any]:
    """Start building a role on every rank; a rollout engine has its own thread where it has its own process."""
    if isinstance(hosts, LocalHosts):
        extra = {"threaded": False} if role == "rollout" else {}
        return [hosts.host.build(role, path, *arguments, **extra)]
    assert isinstance(hosts, RayHosts)
    extra = {"threaded": True} if role == "rollout" else {}
    return [actor.build.remote(role, path, *arguments, **extra) for actor in hosts.actors]


def ray_hosts(config: Config, count: int, *, gpus: int, concurrency: int = 1) -> RayHosts:
    """Ray actors for one group of ranks or replicas."""
    import ray

    cores = os.cpu_count() or 1
    # Synchronous groups take turns; others compute while the engines do.
    beside = (
        count if not config.trainer.max_staleness else config.placement.actor_ranks + config.placement.rollout_replicas
    )
    threads = config.placement.threads_per_worker or max(1, cores // beside)
    has_gpus = _has_gpus()
    share = 0.5 if config.placement.share_ranks else 1.0  # engine and trainer of a shared device get half of it each
    resources: dict[str, Any] = {"num_cpus": 0 if config.placement.address == "local" else share}
    if has_gpus:
        resources["num_gpus"] = gpus * share
    environment = {
        "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    } | ({} if has_gpus else {"TORCHDYNAMO_DISABLE": "1"})  # fmt: skip
    if config.placement.address == "local":
        environment |= LOOPBACK
    remote = ray.remote(max_concurrency=concurrency, **resources)(Host)
    return RayHosts([remote.remote(environment, verbose=config.verbose) for _ in range(count)])


def meet(hosts: RayHosts, *, loopback: bool) -> None:
    """Form one process group of these ranks."""
    address = hosts.wait([hosts.actors[0].address.remote(loopback=loopback)])[0]
    calls = [
        actor.join.remote(rank, hosts.size, address, COLLECTIVE_TIMEOUT_S) for rank, actor in enumerate(hosts.actors)
    ]
    hosts.wait(calls)


def _has_gpus() -> bool:
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def _gpus_of_engine(config: Config) -> int:
    return config.rollout.vllm.tensor_parallel_size if config.rollout.vllm else 1
