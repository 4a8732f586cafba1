"""Compares the bytes of a step's batch that hosts receive over the network with the bytes that the ranks read.

The program runs on the head of a cluster of several hosts, with two ranks without a model on each host. The ranks take
part in the passes of one step: log-probs of the reference, log-probs of the actor, and an update with several
mini-batches. The program prints how many bytes each host received on its network interface during the step, and how
many bytes of rows and columns the ranks of the host read, where a rank counts each value once.

python tests/cluster/batch_bytes.py ADDRESS
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.row_assignment import minibatches
from rltrain.settings.compose import compose
from workers.cluster.processes import RayProcess, Role, results
from workers.cluster.worker_process import Host
from workers.training.dispatch import UpdateResult
from workers.training.shared_columns import FORWARD, log_probs_columns, update_columns
from workers.training.worker_group import WorkerGroup

ROWS, GROUP, LONGEST, RANKS_OF_A_HOST, MINIBATCHES, EPOCHS = 1024, 8, 512, 2, 4, 1
CONFIG = ("algorithm=grpo", "algorithm.kl_loss.kl_loss_coef=0.1")


class Reader:
    """A rank without a model, which counts the bytes that it reads."""

    def __init__(self) -> None:
        self.read: dict[tuple[str, int], int] = {}

    def compute_log_probs(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Return the column `old_log_probs` of zeros, with rows in the order of the micro-batches."""
        return self.column("old_log_probs", batch, microbatches)

    def compute_ref_log_probs(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Return the column `ref_log_probs` of zeros, with rows in the order of the micro-batches."""
        return self.column("ref_log_probs", batch, microbatches)

    def column(self, name: str, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        part = self.look(batch, microbatches)
        return part.with_values("responses", **{name: torch.zeros(len(part.values("responses")))}).select([name])

    def update(self, batch: DataProto, minibatches: list) -> UpdateResult:
        """Read the rows of all mini-batches."""
        self.look(batch, [rows for one in minibatches for rows in one.microbatches])
        return UpdateResult()

    def look(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Return the rows of the micro-batches, and count their bytes.

        The first token of a prompt is the number of the row.
        """
        part = batch[[row for rows in microbatches for row in rows]]
        numbers = [int(prompt[0]) for prompt in part.batch["prompts"].unbind()]
        for name in part.keys():  # noqa: SIM118 (iterating a batch gives its rows)
            for number, values in zip(numbers, part.batch[name].unbind(), strict=True):
                self.read[name, number] = values.nbytes
        return part

    def counted(self) -> tuple[int, int]:
        """Return the bytes that this rank has read, and the bytes that its host has received on its interface."""
        line = next(one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith("eth0:"))
        return sum(self.read.values()), int(line.split(":")[1].split()[0])


def make_batch() -> DataProto:
    source = torch.Generator().manual_seed(0)
    lengths = torch.randint(LONGEST // 8, LONGEST, (ROWS,), generator=source).tolist()
    prompts = [[row, *[1] * 63] for row in range(ROWS)]
    made = DataProto.from_dict(
        {"prompts": jagged(prompts, torch.int64), "responses": jagged([[2] * n for n in lengths], torch.int64),
         "uid": torch.arange(ROWS) // GROUP}
    )  # fmt: skip
    tokens = sum(lengths)
    return made.with_values(
        "responses",
        response_mask=torch.ones(tokens, dtype=torch.bool),
        rollout_log_probs=torch.rand(tokens, generator=source),
        advantages=torch.rand(tokens, generator=source),
    )


async def ranks_on_every_node() -> dict[str, list[Role[Reader]]]:
    """Start the ranks, and return the ranks of each node."""
    made: dict[str, list[Role[Reader]]] = {}
    for node in sorted((one for one in ray.nodes() if one["Alive"]), key=lambda one: one["NodeManagerAddress"]):
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for _ in range(RANKS_OF_A_HOST):
            actor = ray.remote(Host).options(num_cpus=0, scheduling_strategy=where).remote({}, verbose=True)
            process = RayProcess(actor, f"rank on {node['NodeManagerAddress']}")
            await results([process.build("reader", f"{Path(__file__).stem}:Reader")])
            made.setdefault(node["NodeManagerAddress"], []).append(Role(process, "reader"))
    return made


async def step(group: WorkerGroup[Reader]) -> None:
    """Make the passes of one step."""
    config, batch = compose(CONFIG)[0], make_batch()
    batch = batch.union(await group.rows(Reader.compute_ref_log_probs, batch, FORWARD, max_tokens=8192))
    batch = batch.union(
        await group.rows(Reader.compute_log_probs, batch, log_probs_columns(config.algorithm), max_tokens=8192)
    )
    plan = minibatches(batch.batch["uid"].tolist(), MINIBATCHES, EPOCHS, seed=0, step=0)
    await group.update(Reader.update, batch, update_columns(config.algorithm), plan, 8192)


async def counts(ranks: dict[str, list[Role[Reader]]]) -> dict[str, tuple[int, int]]:
    """Return for each node the bytes that its ranks have read, and the bytes that it has received."""
    found = {node: await results([one.start(Reader.counted) for one in own]) for node, own in ranks.items()}
    return {node: (sum(read for read, _ in each), each[0][1]) for node, each in found.items()}


async def measure() -> dict[str, object]:
    ranks = await ranks_on_every_node()
    group = WorkerGroup([one for own in ranks.values() for one in own])
    before = await counts(ranks)
    await step(group)
    after = await counts(ranks)
    own = ray.util.get_node_ip_address()
    return {
        "driver": own,
        "read": {node: read - before[node][0] for node, (read, _) in after.items()},
        "received": {node: received - before[node][1] for node, (_, received) in after.items()},
    }


if __name__ == "__main__":
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(sys.argv[1], runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}, log_to_driver=False)
    print(json.dumps(asyncio.run(measure())))  # noqa: T201
