"""Tests that a run ends with the right scores and advantages although one of twenty reward calls misbehaves."""

import importlib.util

import pyarrow.parquet as pq
import pytest
from runs import ROOT, train

FILE = ROOT / "tests" / "distributed" / "torture_rewards.py"
SPEC = importlib.util.spec_from_file_location("torture_rewards", FILE)
TORTURE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TORTURE)
STEPS, WEIGHT = 3, 0.5


def expected(prompt: str, response: str) -> float | None:
    """Return the score that `one_in_twenty` is expected to give a sample, or None if the sample must fail."""
    value = TORTURE.hash_of(prompt, response)
    if value % 20:
        return float("7" in response)
    fails = list(TORTURE.DEEDS.values())[value // 20 % len(TORTURE.DEEDS)][1]
    return None if fails else float(len(response))


@pytest.mark.slow
@pytest.mark.broad
def test_a_run_finishes_while_one_call_in_twenty_does_something_bad(tmp_path):
    run = train(
        tmp_path / "run", "rollout=hf", f"trainer.total_steps={STEPS}", "trainer.prompts_per_step=8",
        "trainer.prompts_per_minibatch=8", "rollout.samples_per_prompt=8", "data.val=null", "trainer.save_every=0",
        f"reward.functions=[{{name: bad, path: '{FILE}:one_in_twenty', weight: 1.0}}, "
        f"{{name: tail, path: '{FILE}:tail', weight: {WEIGHT}}}]",
        "reward.timeout_s=1", "reward.memory_mb=512", "reward.max_failed_fraction=0.5", "placement.reward_workers=2",
        "algorithm.suppress_truncated=true", "algorithm.reward_normalization.mean_level=batch",
        "algorithm.advantage_estimator=reinforce", "trainer.deterministic=true",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert run.survivors == []
    failures = []
    for step, metrics in enumerate(run.metrics(), start=1):
        rows = pq.read_table(run.output / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        bad = [row for row in rows if expected(row["prompt"], row["response"]) is None]
        assert metrics["reward/failed_fraction"] == metrics["reward/bad/failed_fraction"] == len(bad) / len(rows)
        assert metrics["reward/tail/failed_fraction"] == 0.0
        failures += bad
        for row in rows:
            check(row)
        check_advantages(rows)
    assert len(run.metrics()) == STEPS
    assert len(failures) >= 3
    assert any("did not return within 1 s" in row["reward_error"] for row in failures)


def check(row: dict) -> None:
    """Check that a sample has the scores of its own text, even if the sample was scored several times."""
    first, components = expected(row["prompt"], row["response"]), row["reward_components"]
    if first is None:
        assert "reward function 'bad' " in row["reward_error"]
        assert (row["valid"], row["score"], set(row["advantages"])) == (False, 0.0, {0.0})
        return
    applies, tail = len(row["response"]) % 2 == 0, float(row["response"][-1:].isdigit())
    assert row["reward_error"] == ""
    assert components == {"bad": first, "tail": tail if applies else None}
    # If the reward function `tail` returns None for a sample, the sample's score is the reward of `bad` alone.
    assert row["score"] == first + (WEIGHT * tail if applies else 0.0)


def check_advantages(rows: list[dict]) -> None:
    """Check that an advantage is the answer's score minus the mean score of valid, untruncated answers."""
    counted = [row for row in rows if row["valid"] and row["finish_reason"] != "length"]
    assert 0 < len(counted) < len(rows)
    mean = sum(row["score"] for row in counted) / len(counted)
    for row in counted:
        assert row["advantages"] == pytest.approx([row["score"] - mean] * len(row["response_ids"]), abs=1e-5)
