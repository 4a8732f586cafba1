"""Tests of exact resumption with whole runs in one process.

Training for k steps, restarting from the checkpoint, and training for N-k steps must give the results of N steps bit
for bit.
"""

import asyncio
import json
import logging
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import RewardError, Stopped
from rltrain.base.storage import Folder
from rltrain.monitoring.tracking import Tracker
from rltrain.run.checkpoints import Checkpoints
from rltrain.settings.compose import compose
from tests.in_process_trainer import in_process_trainer
from tests.unit.test_trainer_in_process import BASE, REWARD
from workers.training.rank_state import RankState

COMMON = ["trainer.prompts_per_minibatch=2", "rollout.max_response_length=8", "trainer.save_every=1"]


class Silent:
    def __getattr__(self, name):
        return lambda *_: None


OPEN = []


@pytest.fixture(autouse=True)
async def _end_runs():
    yield
    await end_runs()
    while OPEN:
        OPEN.pop().trainer.tracker.close()


async def end_runs():
    """Cancel the background tasks of all earlier runs, as if the runs had been killed."""
    for run in OPEN:
        await run.tasks.cancel()


async def new_run(model, folder, *overrides, prompts=64, steps=4):
    """End all earlier runs, and make a new run that writes to `folder`.

    A new `Run` object stands for a new process.
    """
    await end_runs()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parity.py").write_text(REWARD)
    reward = f"reward.functions=[{{name: parity, path: '{folder}/parity.py:score', weight: 1.0, success: 1.0}}]"
    config = compose([*BASE, *COMMON, reward, f"trainer.total_steps={steps}", *overrides])[0]
    checkpoints = Checkpoints(Folder(str(folder / "checkpoints")), "", keep=0, best=None)
    tracker = Tracker(folder, Silent(), ["parity"])
    trainer = await in_process_trainer(
        config, model, BackgroundTasks(), prompts=prompts, tracker=tracker, checkpoints=checkpoints
    )
    OPEN.append(run := Run(folder, trainer))
    return run


async def fitted(*arguments, **named):
    """Start a new run, take all its steps, and return the run."""
    return await (await new_run(*arguments, **named)).fit()


async def resumed_run(*arguments, **named):
    """Make a run that resumes from the newest checkpoint, and return the run."""
    return await (await new_run(*arguments, **named)).resume()


class Run:
    """A training run, with methods for the actions that tests take."""

    def __init__(self, folder, trainer):
        self.folder, self.trainer, self.tasks, self.checkpoints = folder, trainer, trainer.tasks, trainer.checkpoints

    async def steps(self, count):
        """Take `count` steps, and save a checkpoint after each step."""
        if self.trainer.origin is None:
            self.trainer.beginning = self.trainer.state_dict()
        await self.trainer.sync_weights()
        for _ in range(count):
            metrics, batch = await self.trainer.train_step()
            trainer = self.trainer
            trainer.tracker.log_step(trainer.step, metrics, batch, trainer.dropped, trainer.reused)
            await self.trainer.between_steps()
        await self.checkpoints.finish()
        return self

    async def resume(self):
        await self.trainer.restore(self.checkpoints.newest())
        return self

    async def resume_or_start(self):
        return await self.resume() if self.checkpoints.newest() else self

    async def fit(self):
        await self.trainer.fit()
        return self

    def result(self):
        """Return the results that tests compare: tensors, driver's state, ledger, and metrics without timings."""
        found = {}
        for role, group in self.trainer.trained().items():
            tensors = group.ranks[0].process.host.roles[role].state.tensors()
            found |= {f"{role}.{name}": tensor.clone() for name, tensor in tensors.items()}
        state = self.trainer.state_dict() | {"incarnation": None}
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        timeless = [{k: v for k, v in row.items() if not k.startswith(("timing/", "perf/"))} for row in lines]
        return found, state, (self.folder / "ledger.jsonl").read_text(), timeless

    def ledger(self):
        return [json.loads(line) for line in (self.folder / "ledger.jsonl").read_text().splitlines()]


def assert_same(one, other):
    (tensors, *rest), (others, *rest_of_other) = one.result(), other.result()
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    assert rest == rest_of_other


def reseed():
    """Reseed all global random number generators with a random seed.

    Code that draws from a global generator gives different results after each call of `reseed`.
    """
    seed = random.SystemRandom().randrange(1 << 31)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


VARIANTS = {
    "grpo": [],
    "ppo with an adaptive kl": [
        "algorithm=ppo", "algorithm.kl_in_reward.kl_coef=0.05", "algorithm.kl_in_reward.controller=adaptive",
    ],
    "ppo that resumes in the critic's warm-up": [
        "algorithm=ppo", "critic.warmup_steps=3", "algorithm.kl_in_reward.kl_coef=0.05",
        "algorithm.kl_in_reward.controller=adaptive",
    ],
    "ppo that resumes at the end of the critic's warm-up": ["algorithm=ppo", "critic.warmup_steps=2"],
    "vapo": ["algorithm=vapo", "critic.warmup_steps=1"],
    "ppo whose moments are in cpu memory": [
        "algorithm=ppo", "actor.offload_optimizer=true", "critic.offload_optimizer=true",
    ],
    "dynamic sampling, entropy target, kl": [
        "algorithm.dynamic_sampling=3", "algorithm.entropy_target=0.5", "algorithm.entropy_coef=0.003",
        "algorithm.kl_loss.kl_loss_coef=0.01", "trainer.prompts_per_minibatch=4",
    ],
    "a reference that becomes the actor every 2 steps": [
        "algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.reference.refresh_every=2",
    ],
    "a reference that moves in every step, exact kl": [
        "algorithm.kl_loss.kl_loss_coef=0.1", "algorithm.kl_loss.kl_estimator=full",
        "algorithm.kl_in_reward.kl_coef=0.05", "algorithm.reference.refresh_every=1",
        "algorithm.reference.refresh_coef=0.3", "actor.lr=3e-3",
    ],
    "a reference in bfloat16": [
        "algorithm.kl_in_reward.kl_coef=0.05", "algorithm.kl_in_reward.kl_estimator=full", "model.dtype=bfloat16",
        "algorithm.reference.refresh_every=1", "actor.lr=3e-3",
    ],
    "supervised answers": [
        "algorithm.sft_coef=0.5", "data.sft_response=#{answer}", "algorithm.dynamic_sampling=2",
        "trainer.epochs_per_step=2",
    ],
    "lora and a greedy baseline": ["model.lora={rank:4}", "algorithm.advantage_estimator=remax"],
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
async def test_F4_a_restart_from_a_checkpoint_changes_nothing_to_the_last_bit(start, tmp_path, name):
    overrides = [*VARIANTS[name], "trainer.deterministic=true"]
    whole = await fitted(start, tmp_path / "whole", *overrides)
    await (await new_run(start, tmp_path / "parts", *overrides)).steps(2)
    reseed()
    resumed = await resumed_run(start, tmp_path / "parts", *overrides)
    assert (resumed.trainer.step, resumed.trainer.incarnation) == (2, 1)
    assert_same(await resumed.fit(), whole)


async def test_moments_in_cpu_memory_change_nothing_to_the_last_bit(start, tmp_path):
    overrides = ["algorithm=ppo", "trainer.deterministic=true"]
    usual = await fitted(start, tmp_path / "usual", *overrides)
    offload = ["actor.offload_optimizer=true", "critic.offload_optimizer=true"]
    assert_same(await fitted(start, tmp_path / "offloaded", *overrides, *offload), usual)


async def test_F4_also_across_the_edge_of_an_epoch_where_each_prompt_is_used_once_an_epoch(start, tmp_path):
    # with 4 prompts per step, step 2 crosses the end of an epoch of 6 prompts
    whole = await fitted(start, tmp_path / "whole", prompts=6)
    for count in (1, 1, 1):
        part = await new_run(start, tmp_path / "parts", prompts=6)
        await (await part.resume_or_start()).steps(count)
    resumed = await (await resumed_run(start, tmp_path / "parts", prompts=6)).fit()
    assert_same(resumed, whole)
    assert [uid for line in resumed.ledger() for uid in line["used"]] == list(range(16))


async def test_a_discarded_future_leaves_no_trace(start, tmp_path):
    """A rollback in the same process undoes everything after the checkpoint, including changes to engines and files."""
    whole = await fitted(start, tmp_path / "whole")
    run = await (await new_run(start, tmp_path / "run")).steps(2)
    kept = run.checkpoints.newest()

    async def save_nothing(*_, **__):
        pass

    run.checkpoints.start = save_nothing
    await run.steps(2)
    del run.checkpoints.start
    await run.trainer.restore(kept)
    assert [line["step"] for line in run.ledger()] == [1, 2]
    assert sorted(file.name for file in (tmp_path / "run/rollouts").iterdir()) == [
        "step_000001.parquet", "step_000002.parquet",
    ]  # fmt: skip
    assert_same(await run.fit(), whole)
    assert run.trainer.incarnation == 1


async def test_without_a_checkpoint_the_run_goes_back_to_its_start(start, tmp_path):
    whole = await fitted(start, tmp_path / "whole")
    run = await (await new_run(start, tmp_path / "run", "trainer.save_every=0")).steps(2)
    await run.trainer.restore(run.trainer.last_good())
    assert (run.trainer.step, run.ledger()) == (0, [])
    assert_same(await run.fit(), whole)


@pytest.mark.parametrize("staleness", [1, 2])
async def test_groups_in_flight_are_kept_or_issued_again_and_each_is_trained_on_once(start, tmp_path, staleness):
    overrides = [f"trainer.max_staleness={staleness}"]
    for count in (1, 2):
        run = await new_run(start, tmp_path, *overrides, steps=6)
        await (await run.resume_or_start()).steps(count)
        assert run.trainer.collector.groups.groups  # some groups are in flight when the run is interrupted
    run = await (await resumed_run(start, tmp_path, *overrides, steps=6)).fit()
    assert [uid for line in run.ledger() for uid in line["used"]] == list(range(24))
    assert [line["step"] for line in run.ledger()] == [1, 2, 3, 4, 5, 6]
    assert run.trainer.collector.groups.groups == {}


def stop_after(run, count):
    """Interrupt a run as a stop signal does, once `count` answers and scores have arrived."""
    collector, left = run.trainer.collector, count

    def counted(poll):
        async def polled():
            nonlocal left
            found = await poll()
            before, left = left, left - len(found)
            if left <= 0 < before:
                run.tasks.interrupt(Stopped(143))
            return found

        return polled

    for pool in (collector.rollout, collector.rewards):
        pool.poll = counted(pool.poll)


@pytest.mark.parametrize("override", ["trainer.seed=0", "algorithm.dynamic_sampling=3"])
@pytest.mark.parametrize("arrived", [1, 10, 20, 40, 60])
async def test_a_run_stopped_while_it_waits_keeps_what_is_finished_and_goes_on_as_if_it_had_not(
    start, tmp_path, override, arrived
):
    overrides = [override, "trainer.deterministic=true", "trainer.save_every=0", "trainer.prompts_per_minibatch=4"]
    whole = await fitted(start, tmp_path / "whole", *overrides, steps=3)
    stopped = await new_run(start, tmp_path / "parts", *overrides, steps=3)
    stop_after(stopped, arrived)
    # each step has at least 32 answers and scores in total, so the signal arrives before the last step
    with pytest.raises(Stopped):
        await stopped.fit()
    state = json.loads(json.dumps(stopped.trainer.state_dict()["collector"]))
    await stopped.trainer.save()
    await stopped.checkpoints.finish()
    resumed = await resumed_run(start, tmp_path / "parts", *overrides, steps=3)
    kept = json.loads((tmp_path / f"parts/checkpoints/step_{stopped.trainer.step}/driver.json").read_text())
    assert kept["collector"] == state
    assert_same(await resumed.fit(), whole)


def out_of_order(run, *, after: int = 0, of=range(1000)):
    """Make the rewards fail for all groups whose uid is in `of`, in step `after` and all later steps."""
    rewards = run.trainer.collector.rewards
    poll = rewards.poll

    async def failing():
        return [
            replace(result, scores=(None,), failed=True, error="the judge is down")
            if run.trainer.step >= after and result.key[0] in of else result
            for result in await poll()
        ]  # fmt: skip

    rewards.poll = failing


@pytest.mark.parametrize("save_every", [0, 2])
@pytest.mark.parametrize("sampling", [0, 3])
async def test_a_run_that_ends_because_rewards_fail_goes_on_when_they_work_again_as_if_they_had(
    start, tmp_path, sampling, save_every
):
    overrides = ["trainer.deterministic=true", f"algorithm.dynamic_sampling={sampling}"]
    failed = await new_run(start, tmp_path / "parts", *overrides, f"trainer.save_every={save_every}")
    out_of_order(failed, after=2)
    with pytest.raises(RewardError, match=r"the judge is down.*step 2 is saved, and trainer\.resume=auto continues"):
        await failed.fit()
    await failed.checkpoints.finish()
    resumed = await resumed_run(start, tmp_path / "parts", *overrides, "trainer.save_every=0")
    assert resumed.trainer.step == 2
    await resumed.fit()
    assert_same(resumed, await fitted(start, tmp_path / "whole", *overrides, "trainer.save_every=0"))


AGGREGATION = """
from pathlib import Path

def total(components, **_):
    if Path(__file__).with_name("broken").exists():
        raise KeyError("level")
    return components.nan_to_num(0.0).sum(-1)
"""
ADAPTIVE_KL = ["algorithm.kl_in_reward.kl_coef=0.05", "algorithm.kl_in_reward.controller=adaptive"]


@pytest.mark.parametrize("save_every", [0, 1])
@pytest.mark.parametrize("overrides", [ADAPTIVE_KL, ["algorithm.dynamic_sampling=3"]])
async def test_a_run_that_ends_in_the_users_aggregation_goes_on_when_it_is_repaired_as_if_it_had_worked(
    start, tmp_path, overrides, save_every
):
    (tmp_path / "own.py").write_text(AGGREGATION)
    words = ["trainer.deterministic=true", f"reward.aggregation={tmp_path}/own.py:total", *overrides]
    whole = await fitted(start, tmp_path / "whole", *words)
    failed = await new_run(start, tmp_path / "parts", *words, f"trainer.save_every={save_every}")
    between = failed.trainer.between_steps

    async def breaks_after_2():
        await between()
        if failed.trainer.step == 2:
            (tmp_path / "broken").touch()

    failed.trainer.between_steps = breaks_after_2
    said = r"KeyError: 'level'; step 2 is saved, and trainer\.resume=auto continues from it; the file with the"
    with pytest.raises(RewardError, match=said):
        await failed.fit()
    await failed.checkpoints.finish()
    (tmp_path / "broken").unlink()
    resumed = await resumed_run(start, tmp_path / "parts", *words)
    assert resumed.trainer.step == 2
    assert failed.checkpoints.newest().state["repairable"] == f"reward.aggregation: {tmp_path}/own.py:total"
    assert_same(await resumed.fit(), whole)


async def test_failed_rewards_of_a_step_that_is_prefetched_are_asked_for_again_by_who_resumes(start, tmp_path):
    """The checkpoint with the failed rewards was saved before any step waited for the rewards."""
    overrides = ["trainer.max_staleness=1", "trainer.save_every=2"]
    failed = await new_run(start, tmp_path, *overrides)
    out_of_order(failed, of=range(8, 12))
    between, collector = failed.trainer.between_steps, failed.trainer.collector

    async def when_all_has_arrived():
        while collector.rollout.pending or collector.rewards.pending:
            await asyncio.sleep(0)
        await between()

    failed.trainer.between_steps = when_all_has_arrived
    with pytest.raises(RewardError, match="the judge is down"):
        await failed.fit()
    await failed.checkpoints.finish()
    kept = json.loads((tmp_path / "checkpoints/step_2/driver.json").read_text())["collector"]["groups"]["groups"]
    assert [result["failed"] for group in kept if group["uid"] in range(8, 12) for result in group["results"]]
    resumed = await resumed_run(start, tmp_path, *overrides)
    assert resumed.trainer.step == 2
    await resumed.fit()
    assert [uid for line in resumed.ledger() for uid in line["used"]] == list(range(16))


async def test_where_rewards_fail_before_anything_is_learnt_nothing_is_saved(start, tmp_path):
    run = await new_run(start, tmp_path)
    out_of_order(run, after=0)
    with pytest.raises(RewardError, match="the judge is down") as caught:
        await run.fit()
    assert "resume" not in str(caught.value)
    assert run.checkpoints.newest() is None


async def test_a_run_that_takes_over_in_another_folder_has_the_checkpoint_there_too_and_whole_curves(start, tmp_path):
    old = await fitted(start, tmp_path / "old", steps=2)
    new = await new_run(start, tmp_path / "new", steps=2)
    await new.trainer.restore(old.checkpoints.newest())
    await new.fit()
    assert new.checkpoints.newest().step == 2
    new.checkpoints.publish(tmp_path / "new/model")
    files = [(tmp_path / name / "checkpoints/step_2/model/model.safetensors").read_bytes() for name in ("old", "new")]
    assert files[0] == files[1] == (tmp_path / "new/model/model.safetensors").read_bytes()
    assert (tmp_path / "new/metrics.jsonl").read_text() == (tmp_path / "old/metrics.jsonl").read_text()
    assert new.ledger() == old.ledger()


async def test_a_save_blocks_the_step_only_while_tensors_are_copied(start, tmp_path, monkeypatch):
    """The metrics of the next step exist before the checkpoint is completely written."""
    go_on, work = threading.Event(), RankState._work

    def held(self, *arguments):
        assert go_on.wait(60)
        work(self, *arguments)

    monkeypatch.setattr(RankState, "_work", held)
    run = await new_run(start, tmp_path)
    await run.trainer.sync_weights()
    await run.trainer.train_step()
    await run.trainer.save()
    try:
        metrics, _ = await run.trainer.train_step()
        assert "actor/grad_norm" in metrics
        assert (run.checkpoints.writing.done(), run.checkpoints.newest()) == (False, None)
    finally:
        go_on.set()
    await run.checkpoints.finish()
    assert run.checkpoints.newest().step == 1


async def test_a_second_checkpoint_of_the_same_step_is_not_made(start, tmp_path, caplog):
    run = await (await new_run(start, tmp_path)).steps(1)
    before = (tmp_path / "checkpoints/step_1/manifest.json").stat()
    await run.trainer.save()
    await run.checkpoints.finish()
    assert (tmp_path / "checkpoints/step_1/manifest.json").stat() == before
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
