"""Tests of which GPU each training rank and each engine gets.

The Ray cluster reports GPUs that the test machine does not have.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BEGIN = """
import asyncio, functools, json, os, sys, time
import ray
from rltrain.settings.compose import compose
from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import ConfigError, WorkerError
from rltrain.tasks.tokenizer import EOS_ID
from workers import placement
from workers.cluster.ray_connection import connect
from workers.placement import reserve, spawner

ray.init = functools.partial(ray.init, num_gpus=2)
TWO = ["rollout=hf", "placement.actor_ranks=2", "placement.rollout_replicas=2"]

def gpus(processes):
    ask = lambda host: (ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"])
    answers = ray.get([process.actor.__ray_call__.remote(ask) for process in processes], timeout=100)
    assert all(len(ids) == 1 and visible == str(ids[0]) for ids, visible in answers), answers
    return [ids[0] for ids, _ in answers]

def free():
    deadline = time.monotonic() + 20
    while (found := ray.available_resources().get("GPU", 0)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    return found

config = compose(TWO)[0]
connect(config)
said = {}
"""
PAIRS = """
reservation = reserve(config, ["actor"])
new_replica = spawner(config, "rollout replica", 2, reservation=reservation)
new_rank = spawner(config, "training rank", 2, reservation=reservation)
replicas, ranks = [[spawn(number) for number in range(2)] for spawn in (new_replica, new_rank)]
said["replicas"], said["ranks"] = gpus(replicas), gpus(ranks)
for processes, spawn, killed in ((ranks, new_rank, [1]), (replicas, new_replica, [0, 1]), (ranks, new_rank, [1, 0])):
    for number in killed:
        processes[number].kill()
    for number in killed:
        processes[number] = spawn(number)
said["replicas later"], said["ranks later"] = gpus(replicas), gpus(ranks)
reservation.free()
said["free"] = free()
"""
FEW = """
try:
    reserve(compose([*TWO, "placement.rollout_replicas=3"])[0], ["actor"])
except ConfigError as error:
    said["refusal"] = str(error)
other = reserve(config, ["actor"])
try:
    reserve(compose([*TWO, "placement.start_timeout_s=1"])[0], ["actor"])
except WorkerError as error:
    said["error"] = str(error)
said["groups"] = sorted({group["state"] for group in ray.util.placement_group_table().values()})
"""
APART = """
config = compose(["rollout=hf", "placement.share_ranks=false", "placement.actor_ranks=1"])[0]
reservation = reserve(config, ["actor"])
deadline = time.monotonic() + 20
while ray.available_resources().get("GPU", 0) and time.monotonic() < deadline:
    time.sleep(0.1)
said["left"] = ray.available_resources().get("GPU", 0)
said["groups"] = [group["state"] for group in ray.util.placement_group_table().values()]
names = ("rollout replica", "actor rank")
processes = [spawner(config, name, 1, reservation=reservation)(0) for name in names]
said["gpus"] = gpus(processes)
processes[1].kill()
processes[1] = spawner(config, "actor rank", 1, reservation=reservation)(0)
said["gpus later"] = gpus(processes)
reservation.free()
said["free"] = free()
"""
LOST = """
import json, time
import ray
from ray.cluster_utils import Cluster
from rltrain.settings.compose import compose
from workers.placement import reserve, spawner

def node_of(process):
    return ray.get(process.actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=100)

cluster = Cluster()
for cpus in (1, 2, 2):
    last = cluster.add_node(num_cpus=cpus, object_store_memory=80_000_000)
ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
words = ["placement=disaggregated", f"placement.address={cluster.address}", "rollout=hf"]
config = compose([*words, "placement.actor_ranks=2", "placement.rollout_replicas=2"])[0]
reservation = reserve(config, ["actor"])
spawns = {name: spawner(config, name, 2, reservation=reservation) for name in ("actor rank", "rollout replica")}
ranks, engines = ([spawns[name](number) for number in range(2)] for name in spawns)
said = {"ranks": [node_of(one) for one in ranks], "engines": [node_of(one) for one in engines]}
lost = next(node for node in cluster.list_all_nodes() if node.node_id == said["ranks"][0])
cluster.remove_node(lost, allow_graceful=False)
while any(node["NodeID"] == lost.node_id and node["Alive"] for node in ray.nodes()):
    time.sleep(0.1)
joined = cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
ranks = [spawns["actor rank"](number) for number in range(2)]
said["joined"], said["ranks later"] = joined.node_id, [node_of(one) for one in ranks]
engines[0].kill()
engines[0] = spawns["rollout replica"](0)
said["engines later"] = [node_of(one) for one in engines]
reservation.free()
print(json.dumps(said))
"""
RUN = """
start = sys.argv[1]

async def run():
    async with BackgroundTasks() as tasks:
        try:
            await placement.start(config, start + ".none", [EOS_ID], tasks, needs_critic=False)
        except WorkerError as error:
            said["error"] = str(error)
    said["free after an error"] = free()
    async with BackgroundTasks() as tasks:
        async with await placement.start(config, start, [EOS_ID], tasks, needs_critic=False) as workers:
            said["replicas"] = gpus([replica.role.process for replica in workers.rollout.replicas])
            said["ranks"] = gpus([rank.process for rank in workers.actor.ranks])
            await workers.restart_training()
            said["ranks later"] = gpus([rank.process for rank in workers.actor.ranks])
    said["free"] = free()

asyncio.run(run())
"""


def told(code: str, *arguments: str) -> dict:
    """Run `code` in a new process, and return the value that `code` assigns to the variable `said`."""
    command = [sys.executable, "-c", f"{BEGIN}{code}\nray.shutdown()\nprint(json.dumps(said))", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.broad
def test_a_rank_shares_its_gpu_with_its_replica_and_with_no_other_rank_whoever_is_replaced():
    said = told(PAIRS)
    assert sorted(said["ranks"]) == [0, 1]
    assert said["replicas"] == said["replicas later"] == said["ranks"] == said["ranks later"]
    assert said["free"] == 2


@pytest.mark.broad
def test_gpus_that_do_not_exist_or_are_not_free_in_time_are_an_error_and_nothing_stays_reserved():
    said = told(FEW)
    assert said["refusal"].startswith("placement: rollout replica 2 needs 1 GPU on one node; beside the other ranks")
    assert said["error"].startswith(
        "starting: the training ranks and engines had no room within placement.start_timeout_s=1 s: training rank 0 "
        "and rollout replica 0 need 1 GPU on one node; beside the other ranks and engines, "
    )
    assert said["groups"] == ["CREATED", "REMOVED"]


def test_roles_with_devices_of_their_own_are_reserved_in_one_group_too():
    said = told(APART)
    assert said["groups"] == ["CREATED"]
    assert (said["left"], said["free"]) == (0, 2)
    assert sorted(said["gpus"]) == [0, 1]
    assert said["gpus"] == said["gpus later"]


@pytest.mark.broad
def test_ranks_of_a_lost_node_start_again_together_on_another_node_and_engines_stay_where_they_are():
    done = subprocess.run(
        [sys.executable, "-c", LOST], capture_output=True, text=True, cwd=ROOT, timeout=280,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(set(said["ranks"])) == 1
    assert not {*said["ranks"]} & {*said["engines"]}
    assert said["ranks later"] == [said["joined"]] * 2
    assert said["engines later"] == said["engines"]


@pytest.mark.broad
def test_a_run_shares_gpus_in_pairs_and_gives_them_back_also_when_it_cannot_start(start):
    said = told(RUN, start)
    assert re.match(r"[a-z ]+ \d+ \(pid \d+ on [\d.]+\) failed: OSError", said["error"])
    assert said["free after an error"] == said["free"] == 2
    assert said["replicas"] == said["ranks"] == said["ranks later"]
    assert sorted(said["ranks"]) == [0, 1]
