"""Compares the transports of a weight sync: a shared file, a process group, device handles, and Ray's object store.

The first part times weight syncs of 120M parameters from two FSDP2 ranks to two engines: on one host with each
transport, and on two hosts with the transports that work between hosts. The two hosts are simulated on one machine by
network namespaces, which need root privileges. If the namespaces cannot be created, only one host is measured.

The second part measures the driver's CPU time for one weight sync, and how many references to objects in Ray's object
store the driver passes to calls. In the second part, the ranks and engines are fake processes that do nothing. With a
process group, the driver starts a fixed number of calls in each process, and the weight sync has as many buckets as for
a model with 8 billion parameters in bfloat16. With the object store, the driver passes each rank's part of each bucket
to each engine, so only 8 buckets and smaller numbers of processes are measured.

    python -m tests.benchmarks.transports
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.settings.compose import compose
from rltrain.settings.schema import WeightTransport
from tests.benchmarks.row import Row
from tests.benchmarks.sync import engines, make_model, on, seconds
from workers.cluster.processes import Pending, Role
from workers.cluster.ray_connection import connect, disconnect
from workers.placement import Workers
from workers.placement import start as start_workers
from workers.sync.sender import Offer
from workers.sync.weight_sync import sync

COMMAND = "python -m tests.benchmarks.transports"
ROUNDS, FAKE_ROUNDS = 9, 5
BUCKETS = 8_000_000_000 * 2 // (64 << 20)
SIZES = {"process_group": ((64, 64), (512, 512)), "object_store": ((16, 16), (64, 64))}
ONE_HOST: tuple[WeightTransport, ...] = ("shared_memory", "process_group", "device_handles", "object_store")
TWO_HOSTS: tuple[WeightTransport, ...] = ("process_group", "object_store")
SETTINGS = [
    "rollout=hf", "placement.actor_ranks=2", "placement.rollout_replicas=2", "placement.reward_workers=1",
    "placement.threads_per_worker=1", "model.dtype=float32",
]  # fmt: skip


def node_of(_: Any) -> str:
    """Return the address of the node of the calling process."""
    import ray

    return str(ray.util.get_node_ip_address())


async def measure(workers: Workers, transports: tuple[WeightTransport, ...]) -> dict[str, Any]:
    """Return the seconds that each transport took in each round, and the nodes of the ranks and engines.

    Each round measures every transport once.
    """

    def send(transport: WeightTransport) -> Callable[[], Awaitable[None]]:
        return lambda: sync(workers.actor.ranks, engines(workers), 1, check=True, transport=transport)

    found: dict[str, list[float]] = {transport: [] for transport in transports}
    for number in range(ROUNDS + 1):  # The first round is a warm-up and is not recorded.
        for transport in transports:
            taken = await seconds(send(transport))
            if number:
                found[transport].append(taken)
    nodes = {"ranks": await on(workers.actor.ranks, node_of), "engines": await on(engines(workers), node_of)}
    return {"seconds": found, "nodes": nodes}


async def measured(folder: str, address: str) -> dict[str, Any]:
    """Start ranks and engines, and measure the transports that work between them."""
    cluster = ["placement=disaggregated", f"placement.address={address}"] if address else []
    config, _ = compose([*cluster, *SETTINGS])
    connect(config)
    try:
        async with (
            BackgroundTasks() as tasks,
            await start_workers(config, folder, [1], tasks, needs_critic=False) as workers,
        ):
            await workers.rollout.start()
            return await measure(workers, TWO_HOSTS if address else ONE_HOST)
    finally:
        disconnect()


def on_two_hosts(folder: str) -> dict[str, Any] | str:
    """Measure the transports on a cluster of two hosts, or return the reason why they cannot be measured."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
    from hosts import Cluster, hosts, namespaces_work  # type: ignore[import-not-found,unused-ignore]

    if why := namespaces_work():
        return str(why)
    with hosts(2, shm_mb={1: 4096, 2: 4096}) as made:
        cluster = Cluster(made, {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
        cluster.start(cpus=3)
        done = made[0].run(
            [sys.executable, "-m", "tests.benchmarks.transports", folder, cluster.address], cluster.env, timeout=900
        )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else " ".join(done.stderr.split())[-300:]


class Fake:
    """A fake worker process that does nothing, and counts the references among the arguments of its calls."""

    concurrent, how_lost = True, ""
    references = 0

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets

    def start(self, role: str, method: str, *args: Any) -> Pending[Any]:
        """Return a fake result of the method `method` of a rank or an engine."""
        Fake.references += sum(isinstance(arg, Reference) for arg in args)
        if method == "start_export":
            return Pending(self, Offer([True] * self.buckets, None))  # type: ignore[arg-type]
        if method == "serve_store":
            return Pending(self, ("10.0.0.1", 29500))  # type: ignore[arg-type]
        return Pending(self, "a node" if method == "start_load" else Reference())  # type: ignore[arg-type]

    def share(self, value: Any) -> Any:
        """Return a fake reference to the value."""
        return Reference()


class Reference:
    """Stands for a reference to a result in Ray's object store."""


def driver_costs(transport: WeightTransport, ranks: int, receivers: int, buckets: int) -> tuple[float, int]:
    """Return the driver's CPU seconds for one weight sync, and the number of references that the driver passes."""
    found, processes = [], [Role[Any](Fake(buckets), "actor") for _ in range(ranks + receivers)]  # type: ignore[arg-type]
    for _ in range(FAKE_ROUNDS):
        Fake.references, begin = 0, time.process_time()
        asyncio.run(sync(processes[:ranks], processes[ranks:], 1, check=True, transport=transport))
        found.append(time.process_time() - begin)
    return statistics.median(found), Fake.references


def costs() -> list[Row]:
    """Measure the driver's CPU time with fake processes, and return one row for each transport and cluster size."""
    made: list[Row] = []
    for transport, sizes in SIZES.items():
        for ranks, receivers in sizes:
            buckets = BUCKETS if transport == "process_group" else 8
            cpu, references = driver_costs(transport, ranks, receivers, buckets)  # type: ignore[arg-type]
            name = f"weight sync: driver, {transport}, {ranks} ranks + {receivers} engines"
            target = "<= 50 at 512 + 512" if transport == "process_group" else ""
            notes = f"{buckets} buckets; fake processes; median of {FAKE_ROUNDS} syncs"
            shown = f"{cpu * 1e3:.1f} ms", f"{references:,} references"
            made.append(Row(name, cpu * 1e3, "ms of CPU time", target, *shown, notes, COMMAND))
    return made


def times(found: dict[str, Any], where: str) -> list[Row]:
    """Return one row for each transport, with its median time relative to the first transport's median time."""
    middle = {transport: statistics.median(values) for transport, values in found["seconds"].items()}
    base, first = next(iter(middle.items()))
    notes = (
        f"479 MB, float32, 2 FSDP2 ranks to 2 engines (transformers), medians of {ROUNDS} rounds in turn; nodes of the "
        f"ranks {', '.join(found['nodes']['ranks'])}, of the engines {', '.join(found['nodes']['engines'])}; "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    return [
        Row(f"weight sync through {transport}, {where}", value / first, f"of {base}", "", f"{value:.2f} s",
            f"{first:.2f} s", notes, COMMAND)
        for transport, value in middle.items()
    ]  # fmt: skip


def run() -> list[Row]:
    """Measure the driver's CPU time, and all transports on one host and on two hosts."""
    made = costs()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        # The transports on one host are measured in a subprocess, like the transports on two hosts.
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.transports", folder, ""],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        made += times(json.loads(done.stdout.splitlines()[-1]), "one host")
        two = on_two_hosts(folder)
    if isinstance(two, str):
        return [*made, Row("weight sync between two hosts", float("nan"), "", "", "not run", "", two, COMMAND)]
    return made + times(two, "two hosts")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.stdout.write(json.dumps(asyncio.run(measured(*sys.argv[1:]))) + "\n")
    else:
        for row in run():
            sys.stdout.write(f"{row}\n")
