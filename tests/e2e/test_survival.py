"""Whichever process of a run dies, the run ends with the weights of an undisturbed run."""

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from runs import SMALL, finish, marked, start, train

pytestmark = pytest.mark.slow
STEPS = 5
# With two ranks and two engines, the tests cover sums over ranks, answers from any free engine, and the replacement of
# process groups.
RUN = [
    *SMALL, "rollout=hf", f"trainer.total_steps={STEPS}", "trainer.deterministic=true", "placement.actor_ranks=2",
    "placement.rollout_replicas=2", "placement.reward_workers=2", "algorithm.dynamic_sampling=2",
    "algorithm.kl_in_reward.kl_coef=0.01", "algorithm.kl_in_reward.controller=adaptive",
]  # fmt: skip


def struck(process, output, name: str, number: int, *, after: int) -> int:
    """After `after` training steps, send the signal `number` to the run's process `name`, and return the pid."""
    metrics, deadline = output / "metrics.jsonl", time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count("\n") < after:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run takes no steps"
        time.sleep(0.01)
    pid = pid_of(output, name)
    os.kill(pid, number)
    return pid


def pid_of(output, name: str) -> int:
    return json.loads((output / "processes.json").read_text())[name]["pid"]


def test_E7_F4_deaths_of_an_engine_a_reward_worker_and_a_rank_change_nothing_to_the_last_bit(tmp_path):
    """Compare samples, metrics and final weights with those of an undisturbed run.

    The compared samples include log-probs, scores and advantages. Metrics that measure time are not compared.
    """
    undisturbed, output = train(tmp_path / "undisturbed", *RUN), tmp_path / "run"
    assert undisturbed.status == 0, undisturbed.stderr
    process = start(output, *RUN)
    pids = {
        name: struck(process, output, name, number, after=after)
        for name, number, after in (
            ("rollout replica 0", signal.SIGSTOP, 1),
            ("reward worker 0", signal.SIGSTOP, 2),
            ("training rank 1", signal.SIGKILL, 3),
        )
    }
    run = finish(process, output)
    assert run.status == 0, run.stderr
    assert [name for name, pid in pids.items() if pid_of(output, name) == pid] == [], "not replaced"
    assert run.survivors == []
    stopped = (
        rf"rollout replica 0 \(pid {pids['rollout replica 0']} on \S+\) has been stopped \(SIGSTOP\) for 3 s: another"
    )
    assert re.search(stopped, run.stderr)
    assert "the training ranks start again" in run.stderr
    assert "the training ranks were restarted; training continues after step 0" in run.stderr
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
    assert len(run.samples()) == STEPS
    assert run.samples() == undisturbed.samples()
    assert run.timeless() == undisturbed.timeless()
    model = "model/model.safetensors"
    assert (output / model).read_bytes() == (undisturbed.output / model).read_bytes()
    assert "Traceback" not in run.stderr


@pytest.mark.broad
def test_a_run_whose_connection_drops_saves_a_checkpoint_though_nobody_reads_its_output(tmp_path):
    """The terminal sends SIGHUP to all processes of the run, and then the shell sends SIGHUP again."""
    output = tmp_path / "run"
    process = start(output, *SMALL, "rollout=hf", "trainer.total_steps=1000", "data.val=null", "trainer.sample_every=1")
    process.stdout.close()
    process.stderr.close()
    metrics, deadline = output / "metrics.jsonl", time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < deadline, "the run takes no steps"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGHUP)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(60) == 129
    steps = metrics.read_text().count("\n")
    assert (output / "checkpoints" / f"step_{steps}" / "manifest.json").exists()
    assert (output / "model" / "model.safetensors").exists()
    assert marked(output) == []


@pytest.mark.broad
def test_a_run_whose_training_ranks_may_not_restart_ends_with_one_line(tmp_path):
    output = tmp_path / "run"
    process = start(output, *RUN, "trainer.max_restarts=0", "trainer.total_steps=1000")
    struck(process, output, "training rank 1", signal.SIGKILL, after=1)
    run = finish(process, output)
    assert (run.status, run.survivors) == (1, [])
    (line,) = [one for one in run.stderr.splitlines() if one.startswith("error: ")]
    assert "training rank 1 (pid" in line
    assert "trainer.max_restarts=0" in line


def mapped(processes: list[psutil.Process]) -> set[Path]:
    """Return the shared-memory files of vLLM that `processes` have mapped, including deleted files."""
    maps = [line for process in processes for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    names = {line.partition("/dev/shm/")[2].removesuffix(" (deleted)") for line in maps if "/dev/shm/" in line}
    return {Path("/dev/shm") / name for name in names if name.startswith(("psm_", "vllm_dist_"))}


@pytest.mark.broad
def test_an_engine_of_several_processes_is_replaced_as_a_whole_whichever_of_them_dies(tmp_path):
    """The replica under test has two tensor-parallel workers.

    First the test kills the replica's own process, and then one of the two workers.
    """
    output, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    short = ["rollout.vllm.tensor_parallel_size=2", "rollout.max_response_length=4", "data.val=null"]
    process = start(output, *SMALL, *short, "trainer.total_steps=400")

    def steps() -> int:
        assert process.poll() is None, process.communicate()
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for(count: int) -> list[psutil.Process]:
        """Wait for `count` training steps, and return the child processes of the engine."""
        deadline = time.monotonic() + 200
        while steps() < count and time.monotonic() < deadline:
            time.sleep(0.05)
        return psutil.Process(pid_of(output, "rollout replica 0")).children(recursive=True)

    cores = wait_for(1)
    files = mapped(cores)
    assert files
    os.kill(pid_of(output, "rollout replica 0"), signal.SIGKILL)
    others = wait_for(steps() + 2)
    assert psutil.wait_procs(cores, timeout=10)[1] == [], "processes of the engine outlived their replica"
    files |= mapped(others)
    worker = next(one for one in others if one.cmdline()[0] == "VLLM::Worker_TP1")
    worker.kill()
    wait_for(steps() + 2)
    assert psutil.wait_procs(others, timeout=10)[1] == []
    process.send_signal(signal.SIGTERM)
    run = finish(process, output)
    assert run.status == 143, run.stderr
    assert run.survivors == []
    assert [file for file in files if file.exists()] == []
    for how in ("is gone", rf"lost its engine: VLLM::Worker_TP1 \(pid {worker.pid}\)"):
        assert len(re.findall(rf"rollout replica 0 \(pid \d+ on \S+\) {how}", run.stderr)) == 1
    assert run.stderr.count("rollout replica 0 serves again") == 2
