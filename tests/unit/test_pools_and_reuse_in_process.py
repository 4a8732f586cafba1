"""Whole runs in one process that sample prompts by difficulty, and train again on groups of earlier steps.

The tests cover exact resumption, the staleness bound, and the ledger.
"""

import json

import pytest
import torch

from rltrain.base.errors import Stopped
from rltrain.trajectories.scoring import zero_spread
from tests.unit.test_resume_in_process import (
    _end_runs,  # noqa: F401 (the fixture ends the runs of each test)
    assert_same,
    fitted,
    new_run,
    reseed,
    resumed_run,
    stop_after,
)

# Prompts that begin with an odd digit are never solved. Answers to other prompts are correct by chance.
REWARD = """
def score(prompt, response):
    return 0.0 if int(prompt[0]) % 2 else float(sum(map(ord, response)) % 3 > 0)
"""
POOLS = "data.difficulty={}"
SAMPLING = "algorithm.dynamic_sampling=3"
REUSE = ["trainer.max_staleness=2", "trainer.reuse={groups:2}"]
VARIANTS = {
    "pools": [POOLS],
    "pools and dynamic sampling": [POOLS, SAMPLING, "trainer.prompts_per_minibatch=4"],
    "reuse": REUSE,
    "everything": [POOLS, SAMPLING, *REUSE, "trainer.prompts_per_minibatch=4"],
    "reuse with greedy baselines": [*REUSE, "algorithm.advantage_estimator=remax"],
}


@pytest.fixture
def reward(tmp_path):
    """Return the config override that selects a reward function that declares which answers are correct."""
    file = tmp_path / "even.py"
    file.write_text(REWARD)
    return f"reward.functions=[{{name: parity, path: '{file}:score', success: 1.0}}]"


@pytest.mark.parametrize("name", VARIANTS)
async def test_F4_a_restart_from_a_checkpoint_changes_nothing_to_the_last_bit(start, tmp_path, reward, name):
    overrides = [reward, *VARIANTS[name], "trainer.deterministic=true"]
    whole = await fitted(start, tmp_path / "whole", *overrides, steps=5)
    await (await new_run(start, tmp_path / "parts", *overrides, steps=5)).steps(3)
    reseed()
    resumed = await resumed_run(start, tmp_path / "parts", *overrides, steps=5)
    assert (resumed.trainer.step, resumed.trainer.incarnation) == (3, 1)
    assert_same(await resumed.fit(), whole)
    if "reuse" in name or name == "everything":
        assert all(line["reused"] for line in whole.ledger()[1:])


@pytest.mark.parametrize("arrived", [1, 20, 40, 60, 90])
async def test_a_run_stopped_while_it_waits_goes_on_as_if_it_had_not_stopped(start, tmp_path, reward, arrived):
    overrides = [reward, *VARIANTS["everything"], "trainer.deterministic=true", "trainer.save_every=0"]
    whole = await fitted(start, tmp_path / "whole", *overrides, steps=4)
    stopped = await new_run(start, tmp_path / "parts", *overrides, steps=4)
    stop_after(stopped, arrived)
    with pytest.raises(Stopped):
        await stopped.fit()
    state = json.loads(json.dumps(stopped.trainer.state_dict()["collector"]))
    await stopped.trainer.save()
    await stopped.checkpoints.finish()
    resumed = await resumed_run(start, tmp_path / "parts", *overrides, steps=4)
    kept = json.loads((tmp_path / f"parts/checkpoints/step_{stopped.trainer.step}/driver.json").read_text())
    assert kept["collector"] == state
    assert_same(await resumed.fit(), whole)


async def test_a_discarded_future_is_forgotten_by_the_pools_and_the_buffer(start, tmp_path, reward):
    overrides = [reward, *VARIANTS["everything"], "trainer.deterministic=true"]
    whole = await fitted(start, tmp_path / "whole", *overrides)
    run = await (await new_run(start, tmp_path / "run", *overrides)).steps(2)
    kept = run.checkpoints.newest()

    async def save_nothing(*_, **__):
        pass

    run.checkpoints.start = save_nothing
    await run.steps(1)
    del run.checkpoints.start
    await run.trainer.restore(kept)
    assert_same(await run.fit(), whole)


async def batches_of(run, steps):
    """Take the given number of steps, and return the batch, the reused uids and the metrics of each step."""
    await run.trainer.sync_weights()
    found = []
    for _ in range(steps):
        metrics, batch = await run.trainer.train_step()
        found.append((batch, run.trainer.reused, metrics))
    return found


@pytest.mark.parametrize("sampling", [0, 2])
@pytest.mark.parametrize(("staleness", "reuse_steps"), [(1, 1), (2, 1), (2, 2), (3, 2)])
async def test_reused_groups_have_different_outcomes_and_are_never_older_than_the_bound(
    start, tmp_path, reward, staleness, reuse_steps, sampling
):
    overrides = [
        reward, f"trainer.max_staleness={staleness}", f"trainer.reuse={{groups:2,steps:{reuse_steps}}}",
        f"algorithm.dynamic_sampling={sampling}",
    ]  # fmt: skip
    run = await new_run(start, tmp_path, *overrides, steps=8)
    first, ages = {}, set()
    for version, (batch, reused, metrics) in enumerate(await batches_of(run, 8)):
        uid, valid = batch.batch["uid"], batch.batch["valid"]
        behind = version - batch.values("policy_version")
        assert 0 <= int(behind.min()) <= int(behind.max()) <= staleness
        ages.add(int(behind.max()))
        assert len(reused) <= 2
        assert set(reused) <= set(first) & set(uid.tolist())
        assert all(version - first[one] <= reuse_steps for one in reused)
        flat = set(uid[zero_spread(uid, batch.batch["scores"], valid)].tolist())
        assert not flat & set(reused)
        assert metrics["rollout/reused_fraction"] == len(reused) / len(uid.unique())
        first |= {one: version for one in uid.tolist() if one not in first}
        if version < 7:
            assert len(uid.unique()) + metrics.get("rollout/groups_missing", 0) == 4
    if not sampling:  # with dynamic sampling, groups that replace dropped groups are used earlier
        assert max(ages) == staleness  # the bound is reached, so a bound that is too loose would be noticed
    assert run.trainer.collector.groups.groups == {}


async def test_the_ledger_counts_each_group_as_used_once_and_names_those_that_were_trained_on_again(
    start, tmp_path, reward
):
    run = await fitted(start, tmp_path, reward, *REUSE, steps=6)
    ledger = run.ledger()
    used = [uid for line in ledger for uid in line["used"]]
    assert used == list(range(len(used)))
    assert [len(line["used"]) + len(line["reused"]) for line in ledger] == [4] * 6
    assert [bool(line["reused"]) for line in ledger] == [False] + [True] * 5
    for number, line in enumerate(ledger):
        earlier = {uid for one in ledger[max(0, number - 2) : number] for uid in one["used"]}
        assert set(line["reused"]) <= earlier


async def test_stale_answers_of_reused_groups_are_corrected_and_change_the_update(start, tmp_path, reward):
    metrics = {}
    for level in ("auto", "null"):
        run = await new_run(
            start, tmp_path / level, reward, *REUSE, f"algorithm.correction.level={level}", "actor.lr=0.01"
        )
        metrics[level] = [one for _, _, one in await batches_of(run, 3)]
    assert metrics["auto"][0]["actor/correction_weight_mean"] == pytest.approx(1.0, abs=1e-3)
    assert abs(metrics["auto"][1]["actor/correction_weight_mean"] - 1) > 1e-3  # half of the groups are stale
    assert "actor/correction_weight_mean" not in metrics["null"][1]
    assert metrics["auto"][1]["actor/grad_norm"] != metrics["null"][1]["actor/grad_norm"]


async def test_prompts_that_are_never_solved_are_soon_sampled_less_often(start, tmp_path, reward):
    shares = {}
    for name, overrides in (("plain", []), ("pools", [POOLS])):
        run = await new_run(start, tmp_path / name, reward, *overrides, steps=24, prompts=32)
        odd = [
            int(text[0]) % 2
            for batch, _, _ in (await batches_of(run, 24))[8:]
            for text in batch.non_tensor_batch["prompt_text"]
        ]
        shares[name] = sum(odd) / len(odd)
    assert shares["pools"] < 0.7 * shares["plain"]


async def test_a_step_has_no_prompt_twice_and_the_pools_are_measured(start, tmp_path, reward):
    run = await new_run(start, tmp_path, reward, POOLS, SAMPLING, steps=10, prompts=12)
    unseen = []
    for batch, _, metrics in await batches_of(run, 10):
        texts = batch.non_tensor_batch["prompt_text"].tolist()[::4]
        assert len(set(texts)) == len(texts)
        shares = [metrics[f"difficulty/{name}_fraction"] for name in ("unseen", "easy", "normal", "hard")]
        assert sum(shares) == pytest.approx(1.0)
        assert 0 <= metrics["difficulty/fallback_fraction"] <= 1
        unseen.append(shares[0])
    assert (unseen[0], unseen[-1]) == (1.0, 0.0)
    assert torch.all(torch.tensor(unseen).diff() <= 0)
