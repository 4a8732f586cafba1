"""Which processes there are and what lives in each: starts Ray and the workers, or puts all into this process."""

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
_ANSWER_S = 10.0  # for a cluster's port to be open
_LAST_PORT = 65_535
COLLECTIVE_TIMEOUT_S = 600.0  # at least; a hang is to be found before
# For processes that all are on this machine: nobody else can connect to them.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


@dataclass
class _Connection:
    """This process's connection to Ray, of which there is one at most.

    Attributes:
        guard: outlives this process, and ends what it leaves.
        daemons: that the connection depends on.
    """

    guard: Guard | None = None
    daemons: Daemons = field(default_factory=Daemons)


_connection = _Connection()


@dataclass(frozen=True)
class Training:
    """The training ranks' processes, and how their roles are built.

    Attributes:
        config: the whole config.
        paths: model directory of each role.
        hosts: of each role, which may share them.
    """

    config: Config
    paths: dict[str, str]
    hosts: dict[str, Hosts]

    def build(self) -> None:
        """Form the process groups and build all roles. Raises WorkerLost when a process dies or hangs meanwhile."""
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
        """End all training ranks and start them anew, in place: with the weights that the run began with."""
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
        """Ends the training ranks' processes and starts them anew; None where they are not processes."""
        return self.training.restart if isinstance(self.actor.hosts, RayHosts) else None

    def close(self) -> None:
        """End what this run started."""
        if self.daemons.lost():
            return  # nobody would answer; leaving Ray ends the processes
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
    """Start or join Ray; returns the cluster's resources. Raises ConfigError when there is none to join."""
    local, address = config.placement.address == "local", config.placement.address
    if address == "auto":  # Ray's own would also join the private cluster of another run on this machine
        address = os.environ.get("RAY_ADDRESS", "")
        if not address:
            raise ConfigError(
                "placement.address=auto: RAY_ADDRESS is not set, no cluster to join; start this with `ray job "
                "submit`, give placement.address=HOST:PORT, or use placement=local"
            )
    if not local:
        _require_answer(address)
    if "ray" not in sys.modules:  # it reads these when it is imported
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if local:
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # the default, but said aloud it needs no warning
            os.environ.setdefault("RAY_worker_niceness", "0")  # workers are all there is to run
            os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # for a dashboard alone
            # Each of glibc's arenas keeps its largest use for ever, and Ray's many threads would have one each.
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
    """What to raise when Ray could not be started or joined."""
    if isinstance(error, ConnectionError):
        return _no_cluster(address, error)
    # Ray has no type of its own for a daemon that is not there in time.
    return WorkerError(
        f"Ray did not start ({type(error).__name__}: {one_line(str(error), 200)}): this machine may be overloaded; "
        "try again, or use placement=inprocess"
    )


def _short_temporary_folder() -> dict[str, str]:
    """The option of `ray.init` for a place where its sockets have short names; none where its own choice will do.

    A socket's path has at most 107 characters, of which Ray's names for session and socket take some 70.
    """
    if "RAY_TMPDIR" in os.environ or len(tempfile.gettempdir()) <= _LONGEST_TMPDIR or not os.access(_TMP, os.W_OK):
        return {}
    return {"_temp_dir": f"{_TMP}/ray"}


def _require_answer(address: str) -> None:
    """Refuse an address where nothing listens: Ray would try it for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in address:
        if int(port) > _LAST_PORT:  # the C library would take it modulo 65,536, and find whoever listens there
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
    """Keep Ray from printing a paragraph for each process or call that failed: what comes of it is said in one line."""
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of a second rank: the first one's is raised
    with contextlib.suppress(ImportError):
        from ray._private import worker

        worker.print_to_stdstream = lambda *_, **__: None


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


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Started in here, Ray's daemons know a token of their own, unless the user has set one.

    Ray's own default is one token for all clusters of a user, which it writes into the home folder and leaves there.
    """
    from ray import _raylet

    loader: Any = _raylet

    loader.AuthenticationTokenLoader.instance().reset_cache()  # it keeps that of the cluster before
    if own := not {_TOKEN, f"{_TOKEN}_PATH"} & os.environ.keys():
        os.environ[_TOKEN] = secrets.token_hex(32)
    try:
        yield
    finally:
        if own:  # for a cluster that this process joins later it would be the wrong one
            del os.environ[_TOKEN]


def disconnect() -> None:
    """Leave Ray; ends all processes of a local one."""
    import ray

    ray.shutdown()
    _connection.daemons = Daemons()
    guard, _connection.guard = _connection.guard, None
    if guard is not None:
        guard.close()


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
            pool.start()  # an engine measures what is free on its device: nobody else takes any meanwhile
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
    """Rollout replicas in processes of their own, whose engines begin to be built; `engine` is what `build` takes."""
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
    """The ranks of a role as one. Reward models run packs whole, so each of their ranks gets rows of its own."""
    shares = 1 if role.startswith(REWARD_MODEL) else config.placement.sequence_ranks
    return WorkerGroup(hosts, role, work_of(role, path), sequence_ranks=shares)


def work_of(role: str, path: str) -> RowWork:
    """What this role's model computes for a row; only policies have a head over the vocabulary."""
    return row_work(text_config(path), head=role in ("actor", "reference"))


def build(hosts: Hosts, role: str, path: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
    """Start building a role on these ranks (all by default); an engine has its own thread where it has a process."""
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
    """What watches the processes of this run."""
    folder = Path(config.trainer.output_dir).expanduser().absolute()
    return Watch(
        hang_timeout_s=config.trainer.hang_timeout_s,
        start_timeout_s=config.placement.start_timeout_s,
        folder=folder,
        daemons=_connection.daemons,
    )


def shared_devices(config: Config) -> SharedDevices | None:
    """The GPUs for ranks and replicas that share them; None without GPUs, or where each process has its own.

    Raises WorkerError where too few are free within `placement.start_timeout_s`.
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
    """Ray actors for one group of ranks or replicas, each called `name` in messages, and each on its own of `devices`.

    Without `devices` Ray chooses among all that have enough left.
    """
    import ray

    engines = name.startswith("rollout")
    # Synchronous groups take turns; others compute while the engines do.
    beside = (
        count if not config.trainer.max_staleness else config.placement.actor_ranks + config.placement.rollout_replicas
    )
    threads = config.placement.threads_per_worker or max(1, cpu_cores() // beside)
    has_gpus = _has_gpus()
    share = 0.5 if config.placement.share_ranks else 1.0  # engine and trainer of a shared device get half of it each
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
    # A training rank does one thing at a time, in the order of the calls; an engine listens while it generates.
    make: Any = ray.remote  # whose types name no options
    remote = make(max_concurrency=8 if engines else 1, **resources)(Host)

    def spawn(number: int) -> Any:
        actor = remote.options(**devices.options(number)) if devices else remote
        return actor.remote(environment, verbose=config.verbose)

    return RayHosts([spawn(number) for number in range(count)], name=name, spawn=spawn, watch=watch)


def meet(hosts: RayHosts, config: Config) -> None:
    """Form one process group of these ranks."""
    limit_s = config.placement.start_timeout_s
    loopback = config.placement.address == "local"
    address = hosts.wait([hosts.actors[0].address.remote(loopback=loopback)], limit_s=limit_s)[0]
    timeout_s = max(COLLECTIVE_TIMEOUT_S, 2 * config.trainer.hang_timeout_s)
    calls = [actor.join.remote(rank, hosts.size, address, timeout_s) for rank, actor in enumerate(hosts.actors)]
    hosts.wait(calls, limit_s=limit_s)


def _has_gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))
