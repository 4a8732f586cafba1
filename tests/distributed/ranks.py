"""Training ranks that several tests share, because starting a process takes longer than most tests."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from rltrain.settings.schema import Config
from workers.cluster.processes import LocalProcess, Pending, RayProcess, Role, WorkerProcess, results
from workers.cluster.worker_process import Host
from workers.placement import ROLES, meet, spawner
from workers.rollout.worker import RolloutWorker
from workers.sync.buckets import Bucket
from workers.training.actor import ActorWorker
from workers.training.policy_update import update_policy
from workers.training.reference import ReferenceWorker
from workers.training.shared_columns import FORWARD
from workers.training.worker_group import WorkerGroup

STEPS = 10
ENTROPY_COEF = 0.001
LORA = "model.lora={rank:4,targets:[q_proj,v_proj,gate_proj,down_proj]}"
SMALL = ["trainer.prompts_per_step=6", "trainer.prompts_per_minibatch=3", f"trainer.total_steps={STEPS}"]
NUMBERS = itertools.count()
LOG_PROBS = {"actor": ActorWorker.compute_log_probs, "reference": ReferenceWorker.compute_log_probs}
MADE: dict[int, list[WorkerProcess]] = {}


async def processes_of(ranks: int) -> list[WorkerProcess]:
    """Return `ranks` connected worker processes, or the test process if `ranks` is 0.

    Tests with different configs share these processes.
    """
    if ranks not in MADE:
        if ranks:
            spawn = spawner(config_of(), "training rank", ranks)
            made: list[WorkerProcess] = [spawn(number) for number in range(ranks)]
            await meet(made, config_of())
        else:
            here = LocalProcess(Host({}, verbose=True))
            here.host.join(0, 1, None, 60.0)
            made = [here]
        MADE[ranks] = made
    return MADE[ranks]


def end_processes() -> None:
    """End the rank processes that distributed tests share.

    Each process group of a rank has threads that wake up a hundred times per second, also while the rank is idle. The
    shared ranks of all distributed tests together slow down other tests by a third or more.
    """
    for ranks in [ranks for ranks in MADE if ranks]:
        for process in MADE.pop(ranks):
            process.kill()


async def built(processes: Sequence[WorkerProcess], role: str, path: str, *args: Any, **kwargs: Any) -> list[Role[Any]]:
    """Build a new role in each of the given processes."""
    await results([process.build(role, path, *args, **kwargs) for process in processes])
    return [Role(process, role) for process in processes]


async def load(engine: Role[RolloutWorker], sent: list[Bucket]) -> None:
    """Sync weights, given as buckets, to an engine."""
    name = f"sync {next(NUMBERS)}"
    await engine.call(RolloutWorker.start_load, name, sent[0].version)
    for bucket in sent:
        await engine.call(RolloutWorker.load_bucket, name, None, bucket)
    await engine.call(RolloutWorker.finish_load, name, None)


async def on(processes: Sequence[RayProcess], function: Callable[[Host], Any]) -> list[Any]:
    """Call `function` in each of the given processes, with the process's `Host` as the argument."""
    return await results([Pending(process, process.actor.__ray_call__.remote(function)) for process in processes])


def config_of(*overrides: str) -> Config:
    return compose(
        [*SMALL, "algorithm.kl_loss.kl_loss_coef=0.01", f"algorithm.entropy_coef={ENTROPY_COEF}", *overrides]
    )[0]


def replayed(step: int) -> DataProto:
    """Make a step's batch of 24 rows of random tokens: 6 prompts with 4 samples each.

    The last row has an empty response, and the first row has no trained token.
    """
    generator = torch.Generator().manual_seed(step)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(48, 58, (length,), generator=generator).tolist()

    responses = [ids(1, 13) for _ in range(23)] + [[]]
    tokens = sum(map(len, responses))
    batch = DataProto.from_dict(
        {
            "prompts": jagged([ids(3, 9) for _ in range(24)], torch.int64),
            "responses": jagged(responses, torch.int64),
            "uid": torch.arange(24) // 4,
        }
    )
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[: len(responses[0])] = False
    noise = torch.randn(tokens, generator=generator)
    versions = torch.zeros(tokens, dtype=torch.int64)
    return batch.with_values(
        "responses", response_mask=mask, advantages=noise, rollout_log_probs=-noise.abs(), policy_version=versions
    )


async def group(config: Config, start: str, ranks: int, roles=("actor", "reference")) -> dict[str, WorkerGroup]:
    """Build new workers for `roles` in the rank processes that tests share.

    The rank processes may already contain workers of other tests.
    """
    processes, made = await processes_of(ranks), {}
    for role in roles:
        own = await built(processes, f"{role} {next(NUMBERS)}", ROLES[role], config, start)
        placement = config.placement
        made[role] = WorkerGroup(own, ranks_per_pack=placement.ranks_per_pack, token_ranks=placement.token_ranks)
    return made


async def prepared(workers: dict[str, WorkerGroup], step: int = 0) -> DataProto:
    return await with_log_probs(workers, replayed(step))


async def with_log_probs(workers: dict[str, WorkerGroup], batch: DataProto, *, max_tokens: int = 8192) -> DataProto:
    """Add the log-probs that each worker computes to a batch."""
    for role in workers:
        batch = batch.union(await workers[role].rows(LOG_PROBS[role], batch, FORWARD, max_tokens=max_tokens))
    return batch


async def updated(
    actor: WorkerGroup, batch: DataProto, plan: list[list[int]], *, max_tokens: int = 8192, config: Config | None = None
) -> dict[str, float]:
    """Update the actor with only the batch columns that the actor's config needs, and return the metrics."""
    config = config or config_of()
    return await update_policy(actor, batch, plan, config, max_tokens=max_tokens, entropy_coef=ENTROPY_COEF)
