"""Placement of a run: the run's worker processes, and the roles (such as actor or critic) in each process.

This module starts the worker processes, or puts all roles into the current process.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rltrain.base import trace
from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.cpu_threads import cpu_cores, openmp_settings
from rltrain.base.errors import WorkerError
from rltrain.batch.row_costs import RowWork, row_work
from rltrain.data.hub import portable
from rltrain.data.model_directory import text_config
from rltrain.settings.distillation_config import REFERENCE, TEACHER
from rltrain.settings.schema import REWARD_MODEL, Config
from workers.cluster.bundle_plan import ENVIRONMENT, REPLICA, TRAINING_RANK, bundle_groups, worker_resources
from workers.cluster.daemon_threads import in_daemon_thread
from workers.cluster.liveness import Liveness
from workers.cluster.node_settings import Sharing
from workers.cluster.processes import LocalProcess, Pending, RayProcess, Role, WorkerProcess, recorded_by, results
from workers.cluster.ray_connection import connected_daemons
from workers.cluster.ray_daemons import Daemons
from workers.cluster.reservation import Reservation
from workers.cluster.worker_process import ALLOCATOR, Host
from workers.environments.messages import Environments
from workers.environments.pool import EnvironmentPool, EnvironmentReplica
from workers.environments.worker import EnvironmentWorker
from workers.reward.pool import RewardPool
from workers.rollout.pool import RolloutPool
from workers.rollout.replica import Building, Replica
from workers.training.actor import ActorWorker
from workers.training.critic import CriticWorker
from workers.training.reference import ReferenceWorker
from workers.training.reward_model import RewardModelWorker
from workers.training.shared_columns import SharedColumns
from workers.training.teacher import TeacherWorker
from workers.training.worker_group import WorkerGroup

ROLES = {
    "actor": "workers.training.actor:ActorWorker",
    "reference": "workers.training.reference:ReferenceWorker",
    "critic": "workers.training.critic:CriticWorker",
    REWARD_MODEL: "workers.training.reward_model:RewardModelWorker",
    TEACHER: "workers.training.teacher:TeacherWorker",
}
ENGINE = "workers.rollout.worker:RolloutWorker"
ENVIRONMENT_WORKER = "workers.environments.worker:EnvironmentWorker"
ROOM_POLL_S = 5.0  # interval in seconds at which the driver looks for a machine with free resources for another engine
# Minimum timeout of collective operations in seconds. If several ranks run, the timeout is at least twice
# `trainer.hang_timeout_s`, so a hanging rank is detected before a collective operation times out.
COLLECTIVE_TIMEOUT_S = 600.0
# Environment variables that keep other machines from connecting to the workers' sockets in a run on a single machine.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def build_environment_worker(
    environments: Environments, spawn: Callable[[int], WorkerProcess], number: int, starts: int, *, threaded: bool
) -> tuple[Role[EnvironmentWorker], Pending[None]]:
    """Start a process for an environment worker, and begin to build the worker in the process.

    Args:
        environments: The environments and tools of the run.
        spawn: Function that takes the index of a worker and starts a process for the worker.
        number: Index of the environment worker.
        starts: Number of processes that were started for the worker before. The name of the worker ends with `starts`,
            so that each process that is started for the worker gets a different name.
        threaded: Whether the worker runs its trajectories in a separate thread.
    """
    process, name = spawn(number), f"{ENVIRONMENT} {number}.{starts}"
    # If `threaded` is False, the environment worker runs in the driver's process, so a memory limit for the worker
    # would limit the driver too.
    memory_mb = environments.memory_mb if threaded else None
    given = environments.source, environments.limits, environments.journal
    built = process.build(ENVIRONMENT, ENVIRONMENT_WORKER, name, *given, threaded=threaded, memory_mb=memory_mb)
    return Role(process, ENVIRONMENT), built


class Training:
    """The training ranks of a run: their processes, and one worker group for each role (such as actor or critic).

    Args:
        config: The run's whole config.
        paths: Mapping from each role to its model, which is an absolute directory or `name@revision` on the hub.
        spawns: Mapping from each role to a function that takes the number of a rank and starts the process of the rank.
            Roles with the same function in `spawns` share processes.

    Attributes:
        groups: Mapping from each role to the role's worker group.
    """

    def __init__(
        self, config: Config, paths: dict[str, str], spawns: Mapping[str, Callable[[int], WorkerProcess]]
    ) -> None:
        self.config, self.paths, self.spawns = config, paths, spawns
        self.shared = SharedColumns()
        self.groups: dict[str, WorkerGroup[Any]] = {
            role: group_of(role, path, config, self.shared) for role, path in paths.items()
        }
        self.processes: list[WorkerProcess] = []
        self._spawn()

    def _spawn(self) -> None:
        """Start one process for each rank or, if roles do not share processes, for each rank of each role."""
        started: dict[Callable[[int], WorkerProcess], list[WorkerProcess]] = {}
        for role, group in self.groups.items():
            spawn = self.spawns[role]
            if spawn not in started:
                started[spawn] = [spawn(rank) for rank in range(self.config.placement.actor_ranks)]
            group.ranks = [Role(process, role) for process in started[spawn]]
        self.processes = [process for processes in started.values() for process in processes]

    async def build(self) -> None:
        """Form the torch.distributed process groups of the training ranks, and build all roles of the ranks.

        Raises WorkerLost if the process of a training rank dies or hangs.
        """
        for processes in {tuple(rank.process for rank in group.ranks) for group in self.groups.values()}:
            await meet(processes, self.config)
        limit_s = self.config.placement.start_timeout_s
        ranks = [(role, rank.process) for role, group in self.groups.items() for rank in group.ranks]
        folders = await results([process.model_directory(self.paths[role]) for role, process in ranks], limit_s=limit_s)
        calls = [
            process.build(role, ROLES[role.partition(" ")[0]], self.config, folder)
            for (role, process), folder in zip(ranks, folders, strict=True)
        ]
        await results(calls, limit_s=limit_s)
        if self.config.algorithm.distillation.full:
            await self._send_teacher_heads(limit_s)

    async def _send_teacher_heads(self, limit_s: float) -> None:
        """Send the output head of each teacher model to all ranks of the actor."""
        for teacher in self.config.algorithm.distillation.models:
            heads = [rank.start(TeacherWorker.output_head) for rank in self.groups[teacher.role].ranks]
            # Only rank 0 of the teacher returns the output head. The driver passes the pending result of the teacher's
            # rank 0 to the actor's ranks without waiting for the result, so the driver never receives the output head.
            head: Any = heads[0].later
            taken = [
                rank.start(ActorWorker.set_teacher_head, teacher.name, head) for rank in self.groups["actor"].ranks
            ]
            calls: list[Pending[Any]] = [*heads[1:], *taken]
            await results(calls, depends_on=[heads[0].process], limit_s=limit_s)

    async def restart(self) -> None:
        """Kill all training ranks, and start new ranks with the run's initial weights."""
        for process in self.processes:
            process.kill()
        self.shared.kept.forget()
        self._spawn()
        await self.build()


@dataclass
class Workers:
    """All started workers of a run.

    Attributes:
        rollout: Pool of the rollout replicas.
        rewards: Pool of the reward workers.
        training: Processes of the training ranks, and one worker group for each role (such as actor or critic).
        reward_models: Worker group of each reward model, in the config's order.
        reservation: CPUs and GPUs of the training ranks and engines, or None if nothing is reserved.
        liveness: Monitor of the worker processes, or None if all roles are in the current process.
    """

    rollout: RolloutPool
    rewards: RewardPool
    training: Training
    reward_models: list[WorkerGroup[RewardModelWorker]]
    reservation: Reservation | None
    liveness: Liveness | None

    @property
    def actor(self) -> WorkerGroup[ActorWorker]:
        """Return the worker group of the actor."""
        return self.training.groups["actor"]

    @property
    def reference(self) -> WorkerGroup[ReferenceWorker] | None:
        """Return the worker group of the reference model, or None if the run needs no reference model."""
        return self.training.groups.get(REFERENCE)

    @property
    def teachers(self) -> dict[str, WorkerGroup[TeacherWorker]]:
        """Return a dict that maps the name of each teacher on the training ranks to the teacher's worker group."""
        teachers = self.training.config.algorithm.distillation.teachers
        return {one.name: self.training.groups[one.role] for one in teachers if not one.is_endpoint}

    @property
    def critic(self) -> WorkerGroup[CriticWorker] | None:
        """Return the worker group of the critic, or None if the run needs no critic."""
        return self.training.groups.get("critic")

    @property
    def restart_training(self) -> Callable[[], Awaitable[None]] | None:
        """Return the function that restarts the training ranks, or None if the ranks are not separate processes."""
        if self.liveness is None:
            return None
        return functools.partial(self._restart_training, self.liveness)

    async def _restart_training(self, liveness: Liveness) -> None:
        await liveness.nodes_settled()
        self.rollout.make_room("the training ranks")
        await self.training.restart()

    def waited_for(self) -> str:
        """Return the names of the busy processes for which the driver waits; "" if all roles are in this process."""
        return "" if self.liveness is None else self.liveness.waited_for()

    @property
    def daemons(self) -> Daemons:
        """Return the Ray daemons that the workers need."""
        return Daemons() if self.liveness is None else self.liveness.daemons

    async def recorded(self) -> list[trace.Recorded]:
        """Return and delete the timeline events of all ready worker processes (see `rltrain.base.trace`)."""
        engines = [replica.role.process for replica in self.rollout.replicas if replica.ready]
        return [*await recorded_by([*self.training.processes, *engines]), *await self.rewards.recorded()]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt | asyncio.CancelledError):
            # the user has asked a second time to stop, so the workers are stopped even in the middle of a method call
            self.kill()
        else:
            await self.close()

    async def close(self) -> None:
        """Stop all workers of this run, after each rollout engine has finished the method call that it is executing."""
        if self.daemons.lost():
            # workers cannot answer without Ray's daemons, and all workers end when the driver disconnects from Ray
            return
        await self.rollout.close()
        self.kill()

    def kill(self) -> None:
        """Stop the workers of this run at once.

        When the driver disconnects from Ray, Ray ends all processes that `kill` does not reach.
        """
        with contextlib.suppress(WorkerError):
            self.rewards.close()
        if self.liveness is not None:
            self.liveness.kill_stopped()
        if self.reservation:
            self.reservation.free()
            self.reservation = None


async def start(
    config: Config,
    path: str,
    stop_ids: Sequence[int],
    tasks: BackgroundTasks,
    *,
    needs_critic: bool,
    environments: Environments | None = None,
) -> Workers:
    """Start all workers of a run and wait until they are ready.

    Args:
        config: The run's whole config. Unless `placement.launcher` is `inprocess`, the function `connect` must
            have been called before `start`.
        path: The policy's model, which is an absolute directory or `name@revision` on the hub.
        stop_ids: Ids of the model's end-of-sequence tokens.
        tasks: Collection of the run's background tasks, to which the workers add tasks.
        needs_critic: Whether the advantage estimator needs the critic's values.
        environments: The environments and tools of the run; None if each answer is a trajectory of only one turn.

    Raises:
        ConfigError: The training ranks and engines do not fit on the nodes of the cluster.
        WorkerError: A worker process does not start within `placement.start_timeout_s` seconds, or its CPUs and GPUs do
            not become free within that time.
    """
    roles = config.roles(needs_critic=needs_critic)
    reservation = reserve(config, roles)
    engine = _Engine(path, stop_ids, environments)
    try:
        return await _start(config, engine, roles, tasks, reservation)
    except BaseException:
        if reservation:
            reservation.free()
        raise


async def _start(
    config: Config,
    engine: "_Engine",
    roles: Sequence[str],
    tasks: BackgroundTasks,
    reservation: Reservation | None,
) -> Workers:
    judges = {f"{REWARD_MODEL} {model.name}": model.path for model in config.reward.models}
    models = judges | {teacher.role: teacher.path for teacher in config.algorithm.distillation.models}
    paths = {role: portable(models[role]) if role in models else engine.path for role in roles}
    start_all = _start_here if config.placement.launcher == "inprocess" else _start_on_ray
    rewards, pool, training, liveness = await start_all(config, engine, paths, tasks, reservation)
    await training.build()
    await pool.start()
    return Workers(pool, rewards, training, [training.groups[role] for role in judges], reservation, liveness)


async def _start_here(
    config: Config, engine: "_Engine", paths: dict[str, str], tasks: BackgroundTasks, _: Reservation | None
) -> "_Started":
    """Build all roles of a run in the current process."""
    threads = config.placement.threads_per_worker
    environment = dict(config.rollout.description.environment) | (openmp_settings(threads) if threads else {})
    process = LocalProcess(Host(environment, verbose=True))
    process.host.join(0, 1, None, COLLECTIVE_TIMEOUT_S)
    training = Training(config, paths, dict.fromkeys(paths, lambda _: process))
    rewards = RewardPool.in_process(config.reward)

    def start_engine() -> Building:
        return engine.build(process, config, threaded=False)

    replica = Replica(0, start_engine)
    if engine.environments is not None:
        build_worker = functools.partial(
            build_environment_worker, engine.environments, lambda _: process, threaded=False
        )
        replica = EnvironmentReplica(0, start_engine, EnvironmentPool(build_worker, 1, tasks))
    return rewards, RolloutPool([replica], tasks, replaces=False), training, None


async def _start_on_ray(
    config: Config,
    engine: "_Engine",
    paths: dict[str, str],
    tasks: BackgroundTasks,
    reservation: Reservation | None,
) -> "_Started":
    """Start all worker processes of a run as Ray actors.

    Args:
        config: The run's whole config.
        engine: Model and end-of-sequence tokens of the rollout engines.
        paths: Mapping from each role of the training ranks to its model, which is an absolute directory or
            `name@revision` on the hub.
        tasks: Collection of the run's background tasks, to which the workers add tasks.
        reservation: CPUs and GPUs of the training ranks and engines, or None if nothing is reserved.
    """
    placement, liveness = config.placement, liveness_of(config, tasks)
    rewards = RewardPool.on_ray(
        config.reward,
        workers=placement.reward_workers,
        spares=placement.reward_spares,
        start_timeout_s=placement.start_timeout_s,
        liveness=liveness,
    )
    spawn_engine = spawner(config, REPLICA, placement.most_replicas, liveness=liveness, reservation=reservation)

    def start_engine(number: int) -> Building:
        return engine.build(spawn_engine(number), config, threaded=True)

    make_replica: Callable[..., Replica] = Replica
    if engine.environments is not None:
        count = placement.environment_workers
        spawn_environment = spawner(config, ENVIRONMENT, count, liveness=liveness)
        build = functools.partial(build_environment_worker, engine.environments, spawn_environment, threaded=True)

        def build_worker(number: int, starts: int) -> Any:
            if starts:
                pool.make_room(f"{ENVIRONMENT} {number}")
            return build(number, starts)

        make_replica = functools.partial(EnvironmentReplica, environments=EnvironmentPool(build_worker, count, tasks))
    room = functools.partial(room_for, worker_resources(config, REPLICA, on_gpus=_has_gpus()), liveness)
    pool = RolloutPool(
        [
            make_replica(
                number,
                functools.partial(start_engine, number),
                start_timeout_s=placement.start_timeout_s,
                room=None if number < placement.rollout_replicas else room,
            )
            for number in range(placement.most_replicas)
        ],
        tasks,
        sleeps=config.takes_turns,
        transport=config.rollout.weight_transport,
        settled=liveness.nodes_settled,
    )
    if placement.share_ranks and _has_gpus():
        await pool.start()  # engines must measure free GPU memory before training ranks allocate GPU memory
    shared = TRAINING_RANK if placement.share_ranks else ""
    spawns = {
        name: spawner(config, name, placement.actor_ranks, liveness=liveness, reservation=reservation)
        for name in dict.fromkeys(shared or f"{role} rank" for role in paths)
    }
    return rewards, pool, Training(config, paths, {r: spawns[shared or f"{r} rank"] for r in paths}), liveness


@dataclass(frozen=True)
class _Engine:
    """The model that every rollout engine runs, and the ids of the model's end-of-sequence tokens."""

    path: str
    stop_ids: Sequence[int]
    environments: Environments | None = None

    def build(self, process: WorkerProcess, config: Config, *, threaded: bool) -> Building:
        """Start building a rollout engine in a worker process.

        The worker process builds the engine as soon as the model's files are on the machine of the worker process.
        """
        folder = process.model_directory(self.path)
        turns = None if self.environments is None else self.environments.turn_format
        built = process.build(
            "rollout", ENGINE, config, folder.later, list(self.stop_ids), threaded=threaded, turn_format=turns
        )
        return Building(Role(process, "rollout"), [built], [folder])


_Started = tuple[RewardPool, RolloutPool, Training, Liveness | None]


def group_of(role: str, path: str, config: Config, shared: SharedColumns) -> WorkerGroup[Any]:
    """Return a new worker group for a role.

    A worker group from `group_of` has no ranks until the caller sets `WorkerGroup.ranks`. Reward models do not use
    sequence parallelism, so each rank of a reward model gets different rows. The batches of a reward model have no
    columns in common with the batches of other roles, so the worker group of a reward model does not use the registry
    `shared`. The batches of all roles except reward models have columns in common. The registry `shared` puts each
    column that several roles use into Ray's object store only once.
    """
    if role.startswith(REWARD_MODEL):
        return WorkerGroup([], work_of(role, path), share_prefixes=config.actor.share_prefixes)
    return WorkerGroup(
        [],
        work_of(role, path),
        ranks_per_pack=config.placement.ranks_per_pack,
        token_ranks=config.placement.token_ranks,
        shared=shared,
        share_prefixes=config.actor.share_prefixes,
    )


def work_of(role: str, path: str) -> RowWork:
    """Return the numbers of multiply-adds that a role's model needs in the forward pass, per token and per token pair.

    The cost of a row in a role's forward pass is estimated from the `RowWork` object that `work_of` returns. Only the
    actor, the reference model and the teachers have an output head over the vocabulary.
    """
    return row_work(text_config(path), head=role in ("actor", REFERENCE) or role.startswith(TEACHER))


def liveness_of(config: Config, tasks: BackgroundTasks) -> Liveness:
    """Return a new monitor for the processes of this run."""
    import ray

    return Liveness(
        hang_timeout_s=config.trainer.hang_timeout_s,
        start_timeout_s=config.placement.start_timeout_s,
        tasks=tasks,
        here=ray.get_runtime_context().get_node_id(),
        folder=Path(config.trainer.output_dir).expanduser().absolute(),
        daemons=connected_daemons(),
    )


def reserve(config: Config, roles: Sequence[str]) -> Reservation | None:
    """Reserve the CPUs and GPUs of all training ranks and engines that the run needs, in one Ray placement group.

    Args:
        config: The run's whole config.
        roles: The roles of the training ranks, such as "actor".

    Returns:
        The reservation, or None if the processes of the run need no resources of Ray.

    Raises:
        ConfigError: The training ranks and engines do not fit on the nodes.
        WorkerError: The resources do not become free within `placement.start_timeout_s` seconds.
    """
    if config.placement.launcher == "inprocess":
        return None
    groups = bundle_groups(config, roles, on_gpus=_has_gpus())
    return Reservation(groups, limit_s=config.placement.start_timeout_s) if groups else None


def spawner(
    config: Config,
    name: str,
    count: int,
    *,
    liveness: Liveness | None = None,
    reservation: Reservation | None = None,
) -> Callable[[int], RayProcess]:
    """Return a function that takes the index of a worker (such as a training rank) and starts the worker's Ray actor.

    Args:
        config: The run's whole config.
        name: Kind of the workers, such as "training rank". In messages, a worker is called by its kind and its index,
            such as "training rank 0".
        count: Largest number of workers of the kind `name` that run at the same time. Each worker is one Ray actor.
        liveness: Monitor that observes the processes of the Ray actors.
        reservation: CPUs and GPUs of the run. For a worker without a reserved bundle, Ray chooses a node with enough
            free CPUs and GPUs.
    """
    import ray

    concurrent = name in (REPLICA, ENVIRONMENT)
    # If engines do not generate ahead of training, training ranks and engines compute at different times, so the active
    # processes may use all CPU cores. If engines generate ahead of training, training ranks and engines compute at the
    # same time and share the CPU cores.
    beside = count if not config.trainer.steps_ahead else config.placement.actor_ranks + config.placement.most_replicas
    has_gpus, local = _has_gpus(), config.placement.address == "local"
    reserved = worker_resources(config, name, on_gpus=has_gpus)
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if name == REPLICA:
        environment |= config.rollout.description.environment
    if not has_gpus:
        environment["TORCHDYNAMO_DISABLE"] = "1"
    elif not concurrent:
        environment |= allocator_settings(config)
    threads = config.placement.threads_per_worker
    if local:
        environment |= LOOPBACK | openmp_settings(threads or max(1, cpu_cores() // beside))
    sharing = None
    if not local:
        gpus = reserved.get("GPU")
        shards = config.rollout.shards if name == REPLICA else 1
        cpus = reserved["CPU"] / (1 if has_gpus else shards)
        sharing = Sharing("GPU", gpus, beside, threads) if gpus else Sharing("CPU", cpus, beside, threads)
    # A training rank runs one call at a time, in the order of the calls. An engine must accept further calls while the
    # engine generates, and each environment worker may have one pending call to each engine.
    calls = 8 + config.placement.environment_workers if concurrent else 1
    make: Any = ray.remote  # `make` has the type `Any`, because Ray's type annotations lack some options
    resources = {f"num_{kind.lower()}s": amount for kind, amount in reserved.items()}
    remote = make(max_concurrency=calls, **resources)(Host)

    def spawn(number: int) -> RayProcess:
        label = f"{name} {number}"
        if liveness is not None:
            liveness.daemons.check()  # if gcs_server has died, Ray's calls block for minutes
        actor = remote.options(**reservation.options(label)) if reservation else remote
        host = actor.remote(environment | trace.environment(label), verbose=config.verbose, sharing=sharing)
        return RayProcess(host, label, liveness)

    return spawn


def allocator_settings(config: Config) -> dict[str, str]:
    """Return the environment variables of PyTorch's allocator for a training rank with GPUs.

    The micro-batches of a step differ in size, which fragments GPU memory. PyTorch's expandable segments reduce the
    fragmentation. Expandable segments are not used with the weight transport `device_handles`, because the two have not
    been tried together.
    """
    mapped = config.rollout.weight_transport == "device_handles"
    return {} if mapped else {ALLOCATOR: "expandable_segments:True"}


async def room_for(resources: Mapping[str, float], liveness: Liveness) -> None:
    """Wait until a machine of the Ray cluster has the given resources free.

    Raises ClusterLost if a Ray daemon has died.
    """
    from ray._private.state import available_resources_per_node

    while True:
        liveness.daemons.check()
        nodes: Mapping[str, Mapping[str, float]] = {}
        # Ray has no public function that says which resources of a machine are free. If Ray's private function
        # `available_resources_per_node` raises an error, no machine counts as free.
        with contextlib.suppress(Exception):
            nodes = await in_daemon_thread(available_resources_per_node)
        if any(all(free.get(name, 0.0) >= needed for name, needed in resources.items()) for free in nodes.values()):
            return
        await asyncio.sleep(ROOM_POLL_S)


async def meet(processes: Sequence[WorkerProcess], config: Config) -> None:
    """Make the given processes join one torch.distributed process group, in which each process is a rank.

    If roles run in the driver's own process, the driver's process joins no new process group, because it has already
    joined a torch.distributed process group with one rank.
    """
    ranks = [process for process in processes if isinstance(process, RayProcess)]
    if ranks:
        limit_s = config.placement.start_timeout_s
        loopback = config.placement.address == "local"
        (address,) = await results([ranks[0].begin(Host.address, loopback=loopback)], limit_s=limit_s)
        timeout_s = max(COLLECTIVE_TIMEOUT_S, 2 * config.trainer.hang_timeout_s)
        calls = [process.begin(Host.join, n, len(ranks), address, timeout_s) for n, process in enumerate(ranks)]
        await results(calls, limit_s=limit_s)


def _has_gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))
