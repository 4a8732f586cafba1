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
from rltrain.base.errors import WorkerError
from rltrain.tasks.tokenizer import EOS_ID
from workers import placement
from workers.placement import connect, shared_devices, spawner

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
devices = shared_devices(config)
new_replica = spawner(config, "rollout replica", 2, devices=devices)
new_rank = spawner(config, "training rank", 2, devices=devices)
replicas, ranks = [[spawn(number) for number in range(2)] for spawn in (new_replica, new_rank)]
said["replicas"], said["ranks"] = gpus(replicas), gpus(ranks)
for processes, spawn, killed in ((ranks, new_rank, [1]), (replicas, new_replica, [0, 1]), (ranks, new_rank, [1, 0])):
    for number in killed:
        processes[number].kill()
    for number in killed:
        processes[number] = spawn(number)
said["replicas later"], said["ranks later"] = gpus(replicas), gpus(ranks)
devices.free()
said["free"] = free()
"""
FEW = """
config = compose([*TWO, "placement.rollout_replicas=3", "placement.start_timeout_s=1"])[0]
try:
    shared_devices(config)
except WorkerError as error:
    said["error"] = str(error)
said["groups"] = [group["state"] for group in ray.util.placement_group_table().values()]
said["own"] = shared_devices(compose([*TWO, "placement.share_ranks=false"])[0])
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
def test_gpus_that_are_not_free_in_time_are_an_error_and_nothing_stays_reserved():
    said = told(FEW)
    assert said["error"].startswith("starting: 3 GPUs were not free within placement.start_timeout_s=1 s; use fewer")
    assert said["groups"] == ["REMOVED"]
    assert said["own"] is None


@pytest.mark.broad
def test_a_run_shares_gpus_in_pairs_and_gives_them_back_also_when_it_cannot_start(start):
    said = told(RUN, start)
    assert re.match(r"[a-z ]+ \d+ \(pid \d+ on [\d.]+\) failed: OSError", said["error"])
    assert said["free after an error"] == said["free"] == 2
    assert said["replicas"] == said["ranks"] == said["ranks later"]
    assert sorted(said["ranks"]) == [0, 1]
