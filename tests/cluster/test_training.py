"""Runs on a cluster of three hosts, whose hostnames resolve to a loopback address or not at all."""

import json
import sys
import time
from pathlib import Path

import pytest
from hosts import Cluster, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).parent / "ray")
SMALL = [
    "trainer.total_steps=2", "trainer.prompts_per_step=8", "trainer.prompts_per_minibatch=4",
    "rollout.samples_per_prompt=4", "data.val_size=16", "trainer.deterministic=true",
]  # fmt: skip
# Host 2 has the line that Debian writes, and host 3 cannot resolve its own hostname.
NAMES = {2: "127.0.1.1 rlthost2\n", 3: ""}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Return a folder that all hosts share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster():
    with hosts(3, names=NAMES) as made:
        cluster = Cluster(made, {"OMP_NUM_THREADS": "1"})
        # A rank, an engine and a critic each need one CPU, so they spread over the hosts.
        cluster.start(cpus=2)
        yield cluster


def submit(cluster: Cluster, output: Path, *overrides: str) -> None:
    """Submit a run with `ray job submit` from the head's host, and assert that the run succeeds."""
    host, address = cluster.hosts[0], "http://127.0.0.1:8265"
    for _ in range(60):
        if host.run([RAY, "job", "list", "--address", address], cluster.env).returncode == 0:
            break
        time.sleep(0.5)
    done = host.run(
        [RAY, "job", "submit", "--address", address, "--", sys.executable, "-m", "rltrain.main",
         f"trainer.output_dir={output}", *SMALL, *overrides],
        cluster.env,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def rows(output: Path) -> list[dict[str, float]]:
    """Read the metrics of all steps, without times and without metrics that depend on the number of ranks."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(("timing/", "perf/"))}
        for line in lines
    ]


def nodes_of(output: Path, *starts: str) -> set[str]:
    """Return the nodes on which the processes whose names begin with one of `starts` ran."""
    table = json.loads((output / "processes.json").read_text())
    return {one["node"] for name, one in table.items() if name.startswith(starts)}


@pytest.fixture(scope="module")
def alone(cluster, shared) -> list[dict[str, float]]:
    """Do the run in a single process, and return its metrics."""
    output = shared / "alone"
    done = cluster.hosts[0].run(
        [sys.executable, "-m", "rltrain.main", f"trainer.output_dir={output}", *SMALL, "placement=inprocess",
         "rollout=hf"],
        cluster.env,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return rows(output)


def equal(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for one, other in zip(found, expected, strict=True):
        # The reward and the lengths of the first step depend only on the sampled tokens.
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)
        assert one["actor/policy_loss"] == pytest.approx(other["actor/policy_loss"], abs=1e-4)
        assert one["reward/mean"] == other["reward/mean"]
        assert one["rollout/length_mean"] == other["rollout/length_mean"]


def test_a_submitted_job_on_three_hosts_equals_the_run_in_one_process(cluster, shared, alone):
    output = shared / "disaggregated"
    submit(
        cluster, output, "placement=disaggregated", "rollout=hf", "placement.actor_ranks=4", "placement.shard_ranks=2",
        "placement.reward_workers=2",
    )  # fmt: skip
    equal(rows(output), alone)
    # The ranks that share a copy of the model are on one host.
    first, second = (nodes_of(output, *(f"actor rank {rank}" for rank in ranks)) for ranks in ((0, 1), (2, 3)))
    assert len(first) == len(second) == 1
    assert len(first | second | nodes_of(output, "rollout")) == 3
    assert (output / "model" / "config.json").is_file()


@pytest.mark.broad
def test_colocated_ranks_that_share_sequences_equal_the_run_in_one_process(cluster, shared, alone):
    output = shared / "colocated"
    submit(
        cluster, output, "placement=colocated", "rollout=hf", "placement.actor_ranks=4", "placement.sequence_ranks=2",
        "placement.rollout_replicas=2",
    )  # fmt: skip
    equal(rows(output), alone)
    first, second = (nodes_of(output, *(f"training rank {rank}" for rank in ranks)) for ranks in ((0, 1), (2, 3)))
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.broad
def test_an_engine_of_two_shards_gets_the_weights_of_ranks_on_other_hosts(cluster, shared):
    output = shared / "sharded_engine"
    submit(
        cluster, output, "placement=disaggregated", "rollout=vllm", "rollout.vllm.tensor_parallel_size=2",
        "placement.actor_ranks=2",
    )  # fmt: skip
    found = rows(output)
    assert [row["step"] for row in found] == [1, 2]
    # The engine samples with the weights of the actor, so both compute the same log-probs.
    assert all(row["actor/engine_gap"] < 1e-5 for row in found)
