"""`trainer.deterministic=true`: what a run samples, scores and learns is the same again, however its processes race."""

import pyarrow.parquet as pq
import pytest
from runs import SMALL, Run, train
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
STEPS = 3
COMMON = [*SMALL, f"trainer.total_steps={STEPS}", "trainer.deterministic=true", "placement.reward_workers=2"]


def timeless(run: Run) -> list[dict[str, float]]:
    rows = run.metrics() + run.lines("evaluations.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(("timing/", "perf/"))} for row in rows]


def tables(run: Run) -> dict[str, object]:
    return {file.name: pq.read_table(file) for file in sorted((run.output / "rollouts").glob("*.parquet"))}


def test_E7_with_the_transformers_engine_two_runs_are_bitwise_the_same(tmp_path):
    """Samples with their log-probs, scores and advantages, metrics outside of timing, and the final weights.

    Two ranks beside two engines: sums over ranks, answers from whichever engine is free, and groups that are replaced.
    """
    settings = [
        "rollout=hf", "placement.rollout_replicas=2", "placement.actor_ranks=2", "algorithm.dynamic_sampling=2",
        "algorithm.kl_in_reward.kl_coef=0.01", "algorithm.kl_in_reward.controller=adaptive",
    ]  # fmt: skip
    first, again = (train(tmp_path / name, *COMMON, *settings) for name in ("first", "again"))
    for run in (first, again):
        assert run.status == 0, run.stderr
    assert len(tables(first)) == STEPS
    assert tables(first) == tables(again)
    assert timeless(first) == timeless(again)
    weights, others = (load_file(run.output / "model" / "model.safetensors") for run in (first, again))
    assert weights.keys() == others.keys()
    assert all(tensor.equal(others[name]) for name, tensor in weights.items())


def test_with_vllm_two_synchronous_runs_have_the_same_samples(tmp_path):
    first, again = (train(tmp_path / name, *COMMON, "rollout=vllm") for name in ("first", "again"))
    for run in (first, again):
        assert run.status == 0, run.stderr
    for one, other in zip(tables(first).values(), tables(again).values(), strict=True):
        for column in ("uid", "prompt_ids", "response_ids", "response", "score", "finish_reason"):
            assert one[column] == other[column], column
