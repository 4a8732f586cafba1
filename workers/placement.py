"""Decides which processes a run has and which roles each one holds.

This module starts Ray and the worker processes, or puts all roles into the current process.
"""

import contextlib
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltrain.base.cpu_threads import cpu_cores, openmp_settings
from rltrain.base.errors import ConfigError, WorkerError, one_line
from rltrain.batch.row_costs import RowWork, row_work
from rltrain.data.model_directory import text_config
from rltrain.settings.schema import REWARD_MODEL, Config
from workers.cluster import ray_daemons
from workers.cluster.hangups import hangups_ignored
from workers.cluster.host_groups import Hosts, LocalHosts, RayHosts
from workers.cluster.liveness import Watch
from workers.cluster.ray_daemons import Daemons
from workers.cluster.ray_guard import Guard
from workers.cluster.shared_devices import SharedDevices
from workers.cluster.worker_process import Host
from workers.reward.pool import RewardPool
from workers.rollout.pool import RolloutPool
from workers.training.worker_group import WorkerGroup

ROLES = {
    "actor": "workers.training.actor:ActorWorker",
    "reference": "workers.training.reference:ReferenceWorker",
    "critic": "workers.training.critic:CriticWorker",
    REWARD_MODEL: "workers.training.reward_model:RewardModelWorker",
}
_TOKEN = "RAY_AUTH_TOKEN"
_TMP, _LONGEST_TMPDIR = "/tmp", 30
_ANSWER_S = 10.0  # timeout in seconds of a connection to a cluster's port
_LAST_PORT = 65_535
COLLECTIVE_TIMEOUT_S = 600.0  # minimum timeout of collectives, so that a hang is detected before they time out
# Environment for processes that all run on this machine. No other machine can connect to them.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


@dataclass
class _Connection:
    """This process's connection to Ray. A process has at most one connection.

    Attributes:
        guard: Guard process, which outlives this process and kills the processes that it leaves behind.
        daemons: Ray daemons that the connection depends on.
    """

    guard: Guard | None = None
    daemons: Daemons = field(default_factory=Daemons)


_connection = _Connection()


@dataclass(frozen=True)
class Training:
    """The processes of the training ranks. Builds the roles in them.

    Attributes:
        config: The whole config.
        paths: Model directory of each role.
        hosts: Processes of each role. Several roles may share the same processes.
    """

    config: Config
    paths: dict[str, str]
    hosts: dict[str, Hosts]

    def build(self) -> None:
        """Form the process groups and build all roles. Raises WorkerLost if a process dies or hangs meanwhile."""
        pending, placement = [], self.config.placement
        for group in dict.fromkeys(self.hosts.values()):
            if isinstance(group, RayHosts):
                meet(group, self.config)
        for role, hosts in self.hosts.items():
            path = self.paths[role]
            pending.append((hosts, build(hosts, role, ROLES[role.partition(" ")[0]], self.config, path)))
        for hosts, calls in pending:
            hosts.wait(calls, limit_s=placement.start_timeout_s)

    def restart(self) -> None:
        """End all training ranks and start new ones in their places.

        The new ranks have the weights that the run began with.
        """
        for group in dict.fromkeys(self.hosts.values()):
            assert isinstance(group, RayHosts), "an object in this process is not restarted"
            group.renew(range(group.size))
        self.build()


@dataclass
class Workers:
    """The running workers of a run."""

    rollout: RolloutPool
    rewards: RewardPool
    actor: WorkerGroup
    reference: WorkerGroup | None
    critic: WorkerGroup | None
    reward_models: list[WorkerGroup]
    training: Training
    devices: SharedDevices | None
    daemons: Daemons = field(default_factory=Daemons)

    @property
    def restart_training(self) -> Callable[[], None] | None:
        """Return the function that restarts the training ranks, or None if the ranks are not separate processes."""
        return self.training.restart if isinstance(self.actor.hosts, RayHosts) else None

    def close(self) -> None:
        """Stop all workers of this run."""
        if self.daemons.lost():
            return  # the workers would not answer; disconnecting from Ray ends their processes
        with contextlib.suppress(WorkerError):
            self.rewards.close()
        with contextlib.suppress(WorkerError):
            self.rollout.close()
        for hosts in {self.rollout.hosts, *self.training.hosts.values()}:
            if isinstance(hosts, RayHosts):
                hosts.end()
        if self.devices:
            self.devices.free()


def connect(config: Config) -> dict[str, float]:
    """Start or join a Ray cluster. Returns the cluster's resources.

    Raises:
        ConfigError: There is no cluster to join.
        WorkerError: Ray does not start.
    """
    local, address = config.placement.address == "local", config.placement.address
    if address == "auto":  # Ray's own "auto" could join the private cluster of another run on this machine
        address = os.environ.get("RAY_ADDRESS", "")
        if not address:
            raise ConfigError(
                "placement.address=auto: RAY_ADDRESS is not set, no cluster to join; start this with `ray job "
                "submit`, give placement.address=HOST:PORT, or use placement=local"
            )
    if not local:
        _require_answer(address)
    if "ray" not in sys.modules:  # Ray reads these variables when it is imported
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if local:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray's default; setting it avoids a warning
            os.environ.setdefault("RAY_worker_niceness", "0")  # workers need no lower priority
            os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # only a dashboard uses them
            # Each glibc arena keeps its peak memory forever, and each of Ray's many threads would have its own arena.
            os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    with _on_loopback() if local else contextlib.nullcontext():
        import ray

    options: dict[str, Any] = {"log_to_driver": config.verbose, "configure_logging": config.verbose}
    if local:
        options |= {"include_dashboard": False, "num_cpus": cpu_cores()} | _short_temporary_folder()
    if not config.verbose:
        _no_reports()
    _connection.guard = Guard(secrets.token_hex(8) if local else "")
    try:
        token = _own_token() if local else contextlib.nullcontext()
        with hangups_ignored(), token, _connection.guard.marking():
            ray.init(address=address, logging_level=logging.INFO if config.verbose else logging.ERROR, **options)
        session, found = ray_daemons.find()
    except BaseException as error:
        disconnect()
        if isinstance(error, Exception):
            raise _no_ray(address, error) from error
        raise
    _connection.daemons = Daemons(found)
    _connection.guard.tell(session, found)
    return dict(ray.cluster_resources())


def _no_ray(address: str, error: Exception) -> ConfigError | WorkerError:
    """Return the error to raise when Ray could not be started or joined."""
    if isinstance(error, ConnectionError):
        return _no_cluster(address, error)
    # Ray has no exception type for a daemon that does not start in time.
    return WorkerError(
        f"Ray did not start ({type(error).__name__}: {one_line(str(error), 200)}): this machine may be overloaded; "
        "try again, or use placement=inprocess"
    )


def _short_temporary_folder() -> dict[str, str]:
    """Return the `ray.init` option for a temporary folder with a short path.

    The path of a socket has at most 107 characters. Ray's own folder and file names take about 70 of them.

    Returns:
        {} if the default folder is short enough, if the user has set RAY_TMPDIR, or if /tmp is not writable.
    """
    if "RAY_TMPDIR" in os.environ or len(tempfile.gettempdir()) <= _LONGEST_TMPDIR or not os.access(_TMP, os.W_OK):
        return {}
    return {"_temp_dir": f"{_TMP}/ray"}


def _require_answer(address: str) -> None:
    """Raise ConfigError if no program listens at the address. Ray would try to connect for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in address:
        if int(port) > _LAST_PORT:  # the C library would use the port modulo 65,536, where another program may listen
            raise _no_cluster(address, OverflowError(f"the last port is {_LAST_PORT}"))
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        except (OSError, UnicodeError) as error:
            raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"placement.address={address}: no cluster answers there ({one_line(str(error), 200)}); give the HOST:PORT "
        "that `ray start --head` printed, or use placement=local"
    )


def _no_reports() -> None:
    """Keep Ray from printing a long report of each failed process or call. The run reports a failure in one line."""
    # Errors of further ranks stay unhandled, because the error of the first rank is raised.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    with contextlib.suppress(ImportError):
        from ray._private import worker

        worker.print_to_stdstream = lambda *_, **__: None


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray use the loopback address for this node, so that its daemons listen at no other address.

    Ray must be imported inside this block. Despite its name, the environment variable also works on Linux.
    `ray.init(_node_ip_address="127.0.0.1")` has no such effect, because Ray treats that value as a mistake. The block
    restores the variable at its end, because programs that start later may need a cluster.
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


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Give the Ray daemons that start in this block their own authentication token, unless the user has set one.

    By default, Ray uses one token for all clusters of a user. Ray writes that token into the home folder and leaves it
    there.
    """
    from ray import _raylet

    loader: Any = _raylet

    loader.AuthenticationTokenLoader.instance().reset_cache()  # it may hold the previous cluster's token
    if own := not {_TOKEN, f"{_TOKEN}_PATH"} & os.environ.keys():
        os.environ[_TOKEN] = secrets.token_hex(32)
    try:
        yield
    finally:
        if own:  # the token would be wrong for a cluster that this process joins later
            del os.environ[_TOKEN]


def disconnect() -> None:
    """Disconnect from Ray. This ends all processes of a local cluster."""
    import ray

    ray.shutdown()
    _connection.daemons = Daemons()
    guard, _connection.guard = _connection.guard, None
    if guard is not None:
        guard.close()


def start(config: Config, path: str, stop_ids: Sequence[int], *, needs_critic: bool) -> Workers:
    """Start all workers of a run and wait until they are ready.

    Args:
        config: The whole config. Ray must be connected unless the launcher is `inprocess`.
        path: Model directory.
        stop_ids: Ids of the model's end tokens.
        needs_critic: Whether the advantage estimator needs values.

    Raises:
        WorkerError: A process does not start within `placement.start_timeout_s`.
    """
    devices = shared_devices(config)
    try:
        return _start(config, path, stop_ids, needs_critic=needs_critic, devices=devices)
    except BaseException:
        if devices:
            devices.free()
        raise


def _start(
    config: Config, path: str, stop_ids: Sequence[int], *, needs_critic: bool, devices: SharedDevices | None
) -> Workers:
    roles, placement = config.roles(needs_critic=needs_critic), config.placement
    models = {f"{REWARD_MODEL} {model.name}": model.path for model in config.reward.models}
    paths = {role: str(Path(models[role]).expanduser().absolute()) if role in models else path for role in roles}
    engine = ("workers.rollout.worker:RolloutWorker", config, path, list(stop_ids))
    if placement.launcher == "inprocess":
        threads = placement.threads_per_worker
        hosts = LocalHosts(Host(openmp_settings(threads) if threads else {}, verbose=True))
        hosts.host.join(0, 1, None, COLLECTIVE_TIMEOUT_S)
        training = Training(config, paths, dict.fromkeys(roles, hosts))
        rewards = RewardPool.in_process(config.reward)
        build(hosts, "rollout", *engine)
        pool = RolloutPool(hosts)
    else:
        watch = watch_of(config)
        rewards = RewardPool.on_ray(
            config.reward,
            workers=placement.reward_workers,
            spares=placement.reward_spares,
            start_timeout_s=placement.start_timeout_s,
            watch=watch,
        )
        pool = _engines_on_ray(config, engine, watch, devices)
        shared = None
        if placement.share_ranks:
            shared = ray_hosts(config, "training rank", placement.actor_ranks, watch=watch, devices=devices)
        training = Training(
            config,
            paths,
            {role: shared or ray_hosts(config, f"{role} rank", placement.actor_ranks, watch=watch) for role in roles},
        )
        if devices:
            pool.start()  # an engine measures the free memory of its device, so the ranks must not allocate any yet
    training.build()
    pool.start()
    groups = {role: group_of(hosts, role, paths[role], config) for role, hosts in training.hosts.items()}
    return Workers(
        pool,
        rewards,
        groups["actor"],
        groups.get("reference"),
        groups.get("critic"),
        [groups[role] for role in models],
        training,
        devices,
        _connection.daemons,
    )


def _engines_on_ray(
    config: Config, engine: tuple[Any, ...], watch: Watch, devices: SharedDevices | None
) -> RolloutPool:
    """Start the rollout replicas in separate processes, and start to build their engines.

    Args:
        config: The whole config.
        engine: Arguments of `build`, beginning with the import path of the role.
        watch: Monitor of the processes.
        devices: GPUs that replicas share with training ranks. None: Ray chooses the devices.
    """
    replicas = ray_hosts(config, "rollout replica", config.placement.rollout_replicas, watch=watch, devices=devices)

    def replace(replica: int) -> Any:
        replicas.renew([replica])
        return build(replicas, "rollout", *engine, ranks=[replica])[0]

    return RolloutPool(
        replicas,
        sleeps=config.takes_turns,
        replace=replace,
        start_timeout_s=config.placement.start_timeout_s,
        building=build(replicas, "rollout", *engine),
    )


def group_of(hosts: Hosts, role: str, path: str, config: Config) -> WorkerGroup:
    """Return the ranks of a role as one group.

    Reward models do not split packs over ranks, so each of their ranks gets its own rows.
    """
    shares = 1 if role.startswith(REWARD_MODEL) else config.placement.sequence_ranks
    return WorkerGroup(hosts, role, work_of(role, path), sequence_ranks=shares)


def work_of(role: str, path: str) -> RowWork:
    """Return the cost model of a role's work per row. Only policies have an output head over the vocabulary."""
    return row_work(text_config(path), head=role in ("actor", "reference"))


def build(hosts: Hosts, role: str, path: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
    """Start to build a role on these ranks (all by default). An engine in its own process also gets its own thread."""
    if isinstance(hosts, LocalHosts):
        extra = {"threaded": False} if role == "rollout" else {}
        hosts.host.build(role, path, *arguments, **extra)
        return [None]
    assert isinstance(hosts, RayHosts)
    extra = {"threaded": True} if role == "rollout" else {}
    chosen = range(hosts.size) if ranks is None else ranks
    hosts.phase = f"{role}.build"
    return [hosts.actors[rank].build.remote(role, path, *arguments, **extra) for rank in chosen]


def watch_of(config: Config) -> Watch:
    """Return the monitor of this run's processes."""
    folder = Path(config.trainer.output_dir).expanduser().absolute()
    return Watch(
        hang_timeout_s=config.trainer.hang_timeout_s,
        start_timeout_s=config.placement.start_timeout_s,
        folder=folder,
        daemons=_connection.daemons,
    )


def shared_devices(config: Config) -> SharedDevices | None:
    """Reserve the GPUs that ranks and replicas share. Returns None without GPUs, or if each process has its own GPU.

    Raises:
        WorkerError: Too few GPUs become free within `placement.start_timeout_s`.
    """
    placement = config.placement
    if placement.launcher == "inprocess" or not placement.share_ranks or not _has_gpus():
        return None
    cpus = 0.0 if placement.address == "local" else 1.0
    count = max(placement.actor_ranks, placement.rollout_replicas)
    return SharedDevices(count, cpus=cpus, limit_s=placement.start_timeout_s)


def ray_hosts(
    config: Config, name: str, count: int, *, watch: Watch | None = None, devices: SharedDevices | None = None
) -> RayHosts:
    """Start the Ray actors of one group of ranks or replicas.

    Args:
        config: The whole config.
        name: Name of one actor in messages.
        count: Number of actors.
        watch: Monitor of the actors' processes.
        devices: GPUs of the actors, one per actor. None: Ray chooses among all devices with enough capacity left.
    """
    import ray

    engines = name.startswith("rollout")
    # Without staleness, ranks and engines take turns. Otherwise they compute at the same time and share the cores.
    beside = (
        count if not config.trainer.max_staleness else config.placement.actor_ranks + config.placement.rollout_replicas
    )
    threads = config.placement.threads_per_worker or max(1, cpu_cores() // beside)
    has_gpus = _has_gpus()
    share = 0.5 if config.placement.share_ranks else 1.0  # an engine and a rank that share a GPU get half of it each
    resources: dict[str, Any] = {"num_cpus": 0 if config.placement.address == "local" else share}
    if has_gpus:
        resources["num_gpus"] = share * (config.rollout.shards if engines else 1)
    environment = {
        **openmp_settings(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    } | ({} if has_gpus else {"TORCHDYNAMO_DISABLE": "1"})
    if config.placement.address == "local":
        environment |= LOOPBACK
    # A training rank runs one call at a time, in order. An engine must accept calls while it generates.
    make: Any = ray.remote  # Any, because Ray's type annotations lack these options
    remote = make(max_concurrency=8 if engines else 1, **resources)(Host)

    def spawn(number: int) -> Any:
        actor = remote.options(**devices.options(number)) if devices else remote
        return actor.remote(environment, verbose=config.verbose)

    return RayHosts([spawn(number) for number in range(count)], name=name, spawn=spawn, watch=watch)


def meet(hosts: RayHosts, config: Config) -> None:
    """Join these ranks into one torch.distributed process group."""
    limit_s = config.placement.start_timeout_s
    loopback = config.placement.address == "local"
    address = hosts.wait([hosts.actors[0].address.remote(loopback=loopback)], limit_s=limit_s)[0]
    timeout_s = max(COLLECTIVE_TIMEOUT_S, 2 * config.trainer.hang_timeout_s)
    calls = [actor.join.remote(rank, hosts.size, address, timeout_s) for rank, actor in enumerate(hosts.actors)]
    hosts.wait(calls, limit_s=limit_s)


def _has_gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))
