"""Training ranks that several tests use: made once, as starting a process takes longer than what is tested in it."""

import functools
import itertools

import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from rltrain.settings.schema import Config
from workers.cluster.host_groups import Hosts, LocalHosts
from workers.cluster.worker_process import Host
from workers.placement import ROLES, build, meet, ray_hosts
from workers.training.worker_group import WorkerGroup

STEPS = 10
ENTROPY_COEF = 0.001
LORA = "model.lora={rank:4,targets:[q_proj,v_proj,gate_proj,down_proj]}"
SMALL = ["trainer.prompts_per_step=6", "trainer.prompts_per_minibatch=3", f"trainer.total_steps={STEPS}"]
NUMBERS = itertools.count()


@functools.cache
def hosts_of(ranks: int) -> Hosts:
    """This many ranks that have met, or this process for 0; roles of different configs live in them side by side."""
    if ranks:
        made = ray_hosts(config_of(), "training rank", ranks)
        meet(made, config_of())
        return made
    here = LocalHosts(Host({}, verbose=True))
    here.host.join(0, 1, None, 60.0)
    return here


def config_of(*overrides: str) -> Config:
    return compose(
        [*SMALL, "algorithm.kl_loss.kl_loss_coef=0.01", f"algorithm.entropy_coef={ENTROPY_COEF}", *overrides]
    )[0]


def replayed(step: int) -> DataProto:
    """A step's batch: 6 prompts x 4 samples of random tokens, one answer empty, one row not trained on."""
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


def group(config: Config, start: str, ranks: int, roles=("actor", "reference")) -> dict[str, WorkerGroup]:
    """New workers of these roles in ranks that may have others too."""
    hosts, made = hosts_of(ranks), {}
    for role in roles:
        name = f"{role} {next(NUMBERS)}"
        hosts.wait(build(hosts, name, ROLES[role], config, start))
        made[role] = WorkerGroup(hosts, name, sequence_ranks=config.placement.sequence_ranks)
    return made


def prepared(workers: dict[str, WorkerGroup], step: int = 0) -> DataProto:
    batch = replayed(step)
    for role in ("actor", "reference"):
        batch = batch.union(workers[role].rows("compute_log_probs", batch, max_tokens=8192))
    return batch
