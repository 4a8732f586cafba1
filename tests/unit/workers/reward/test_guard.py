"""Tests of the reward guard, a separate process that ends all descendants of a reward process."""

import subprocess
import sys

SCRIPT = """
import sys
from rltrain.settings.reward_config import RewardFunctionConfig
from workers.reward.guard import GuardedWorker
from workers.reward.messages import RewardRequest

function = RewardFunctionConfig(
    name="score", path=sys.argv[1], weight=1.0, gate=False, outcome=True, success=None, kwargs={}
)
guard = GuardedWorker([function], memory_mb=64)
guard.ping()
for response in sys.argv[2:]:
    print(guard.score([RewardRequest((0, 0), "p", response, {})], deadline_s=float(response.partition(" ")[0])))
    guard.ping()
guard.stop()
"""
REWARDS = """
import mmap, os, time
KEPT = []

def score(response):
    if "share" in response:
        KEPT.append(mmap.mmap(-1, 1 << 30))
        for start in range(0, 256 << 20, 4096):
            KEPT[-1][start] = 1
        time.sleep(3600)
    for descriptor in range(3, 64):
        try:
            if "half" in response:
                os.write(descriptor, bytes([0, 1, 0, 0]))
            if "forged" in response:
                os.write(descriptor, bytes([0, 0, 0, 2]) + b"N.")  # None
        except OSError:
            pass
    if "half" in response:
        time.sleep(3600)
    return 1.0
"""


BESIDE = """
import sys, threading
from rltrain.settings.reward_config import RewardFunctionConfig
from workers.reward.guard import Guard
from workers.reward.messages import RewardRequest

function = RewardFunctionConfig(
    name="score", path=sys.argv[1], weight=1.0, gate=False, outcome=True, success=None, kwargs={}
)
guard = Guard([function], memory_mb=64)
for lane in range(2):
    guard.ping(lane)
found = []
asked = [RewardRequest((0, 0), "p", "30 program", {})]
beside = threading.Thread(target=lambda: found.extend(guard.score(1, asked, deadline_s=30.0)))
beside.start()
for number in range(4):
    asked = [RewardRequest((0, n), "p", "fine" if n < 2 else "sleep", {}) for n in range(5)]
    late = guard.score(0, asked, deadline_s=0.6, hold_s=0.3, stepwise=True)
    print(len(late.results), guard.rest(0))
    guard.ping(0)
beside.join()
print([result.scores for result in found])
guard.stop()
"""


def test_a_process_that_is_ended_takes_nothing_along_of_the_one_beside_it(tmp_path):
    """While one reward process is ended, another reward process starts programs, none of which may be killed."""
    (tmp_path / "own.py").write_text(
        "import subprocess, time\n"
        "def score(response):\n"
        "    if 'sleep' in response:\n        time.sleep(3600)\n"
        "    count = 800 if 'program' in response else 0\n"
        "    return float(sum(subprocess.call(['true']) for _ in range(count)))\n"
    )
    command = [sys.executable, "-c", BESIDE, f"{tmp_path}/own.py:score"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=110)
    *late, beside = done.stdout.splitlines()
    assert late == ["2 Ended(timed_out=True, reason='did not answer in time')"] * 4
    assert beside == "[(0.0,)]"


def test_G2_shared_memory_forged_answers_and_half_of_one_cost_only_the_process(tmp_path):
    (tmp_path / "own.py").write_text(REWARDS)
    command = [sys.executable, "-c", SCRIPT, f"{tmp_path}/own.py:score", "60 share", "60 forged", "1 half", "60 fine"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=110)
    good = "[SampleScores(key=(0, 0), scores=(1.0,), failed=False, error='', failed_function=-1, success=None)]"
    assert done.stdout.splitlines() == [
        "Ended(timed_out=False, reason='ended its process (its shared memory exceeded reward.memory_mb)')",
        "Ended(timed_out=False, reason='wrote into the socket that carries the results of its process')",
        "Ended(timed_out=True, reason='did not answer in time')",
        good,
    ]
