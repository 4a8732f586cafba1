"""F4 in one process: N steps are k steps, a restart from the checkpoint, and N-k steps, to the last bit."""

import json
import logging
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from rltrain.base.errors import RewardError, Stopped
from rltrain.base.storage import Folder
from rltrain.data.prompts import load_prompts
from rltrain.monitoring.tracking import Tracker
from rltrain.run.checkpoints import Checkpoints
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from rltrain.trainer import Trainer
from rltrain.trajectories.collector import Collector
from tests.unit.test_trainer_in_process import BASE, REWARD
from workers.placement import start as start_workers

COMMON = ["trainer.prompts_per_minibatch=2", "rollout.max_response_length=8", "trainer.save_every=1"]


class Silent:
    def __getattr__(self, name):
        return lambda *_: None


OPEN = []


@pytest.fixture(autouse=True)
def _close_files():
    yield
    while OPEN:
        OPEN.pop().close()


class Run:
    """A run in a folder of its own; a new object is what a new process would be."""

    def __init__(self, model, folder, *overrides, prompts=64, steps=4, interrupted=lambda: None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "parity.py").write_text(REWARD)
        reward = f"reward.functions=[{{name: parity, path: '{folder}/parity.py:score', weight: 1.0}}]"
        config = compose([*BASE, *COMMON, reward, f"trainer.total_steps={steps}", *overrides])[0]
        critic = config.algorithm.advantage_estimator == "gae"
        workers = start_workers(config, model, [EOS_ID], needs_critic=critic)
        loaded = load_prompts(
            config.data.train, char_tokenizer(), split="train", seed=0, max_prompt_length=16, overlong="refuse",
            limit=prompts,
        )  # fmt: skip
        OPEN.append(tracker := Tracker(folder, Silent(), ["parity"]))
        self.folder, self.checkpoints = folder, Checkpoints(Folder(str(folder / "checkpoints")), "", keep=0, best=None)
        self.trainer = Trainer(
            config, collector=Collector(config, rollout=workers.rollout, rewards=workers.rewards, prompts=loaded),
            actor=workers.actor, reference=workers.reference, critic=workers.critic,
            tracker=tracker, checkpoints=self.checkpoints, val_prompts=[],
            interrupted=interrupted,
        )  # fmt: skip

    def steps(self, count):
        """Take steps and save after each; the run is then dropped, as by a kill."""
        if self.trainer.origin is None:
            self.trainer.beginning = self.trainer.state_dict()
        self.trainer.sync_weights()
        for _ in range(count):
            metrics, batch = self.trainer.train_step()
            self.trainer.tracker.log_step(self.trainer.step, metrics, batch)
            self.trainer.between_steps()
        self.checkpoints.finish()
        return self

    def resume(self):
        self.trainer.restore(self.checkpoints.newest())
        return self

    def resume_or_start(self):
        return self.resume() if self.checkpoints.newest() else self

    def fit(self):
        self.trainer.fit()
        return self

    def result(self):
        """Everything that must be equal: tensors of the last checkpoint, driver's state, ledger, metrics."""
        found = {}
        for role, group in self.trainer.trained().items():
            tensors = group.hosts.host.roles[role].state.tensors()
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
    """Whoever draws from a global stream would now draw something else."""
    seed = random.SystemRandom().randrange(1 << 31)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


VARIANTS = {
    "grpo": [],
    "ppo with an adaptive kl": [
        "algorithm=ppo", "algorithm.kl_in_reward.kl_coef=0.05", "algorithm.kl_in_reward.controller=adaptive",
    ],
    "dynamic sampling, entropy target, kl": [
        "algorithm.dynamic_sampling=3", "algorithm.entropy_target=0.5", "algorithm.entropy_coef=0.003",
        "algorithm.kl_loss.kl_loss_coef=0.01", "trainer.prompts_per_minibatch=4",
    ],
    "lora and a greedy baseline": ["model.lora={rank:4}", "algorithm.advantage_estimator=remax"],
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_F4_a_restart_from_a_checkpoint_changes_nothing_to_the_last_bit(start, tmp_path, name):
    overrides = [*VARIANTS[name], "trainer.deterministic=true"]
    whole = Run(start, tmp_path / "whole", *overrides).fit()
    Run(start, tmp_path / "parts", *overrides).steps(2)
    reseed()
    resumed = Run(start, tmp_path / "parts", *overrides).resume()
    assert (resumed.trainer.step, resumed.trainer.incarnation) == (2, 1)
    assert_same(resumed.fit(), whole)


def test_F4_also_across_the_edge_of_an_epoch_where_each_prompt_is_used_once_an_epoch(start, tmp_path):
    whole = Run(start, tmp_path / "whole", prompts=6).fit()  # 4 prompts a step: step 2 lies over the edge
    for count in (1, 1, 1):
        Run(start, tmp_path / "parts", prompts=6).resume_or_start().steps(count)
    resumed = Run(start, tmp_path / "parts", prompts=6).resume().fit()
    assert_same(resumed, whole)
    assert [uid for line in resumed.ledger() for uid in line["used"]] == list(range(16))


def test_a_discarded_future_leaves_no_trace(start, tmp_path):
    """What came after the checkpoint is taken back in the same process, engines and files included."""
    whole = Run(start, tmp_path / "whole").fit()
    run = Run(start, tmp_path / "run").steps(2)
    kept = run.checkpoints.newest()
    run.checkpoints.start = lambda *_, **__: None
    run.steps(2)
    run.trainer.collector.answers(version=4) if run.trainer.step < 4 else None
    del run.checkpoints.start
    run.trainer.restore(kept)
    assert [line["step"] for line in run.ledger()] == [1, 2]
    assert sorted(file.name for file in (tmp_path / "run/rollouts").iterdir()) == [
        "step_000001.parquet", "step_000002.parquet",
    ]  # fmt: skip
    assert_same(run.fit(), whole)
    assert run.trainer.incarnation == 1


def test_without_a_checkpoint_the_run_goes_back_to_its_start(start, tmp_path):
    whole = Run(start, tmp_path / "whole").fit()
    run = Run(start, tmp_path / "run", "trainer.save_every=0").steps(2)
    run.trainer.restore(run.trainer.last_good())
    assert (run.trainer.step, run.ledger()) == (0, [])
    assert_same(run.fit(), whole)


@pytest.mark.parametrize("staleness", [1, 2])
def test_groups_in_flight_are_kept_or_issued_again_and_each_is_trained_on_once(start, tmp_path, staleness):
    overrides = [f"trainer.max_staleness={staleness}"]
    for count in (1, 2):
        run = Run(start, tmp_path, *overrides, steps=6).resume_or_start().steps(count)
        assert run.trainer.collector.groups.groups  # some were in flight
    run = Run(start, tmp_path, *overrides, steps=6).resume().fit()
    assert [uid for line in run.ledger() for uid in line["used"]] == list(range(24))
    assert [line["step"] for line in run.ledger()] == [1, 2, 3, 4, 5, 6]
    assert run.trainer.collector.groups.groups == {}


@pytest.mark.parametrize("override", ["trainer.seed=0", "algorithm.dynamic_sampling=3"])
@pytest.mark.parametrize("pumps", [1, 5, 12, 20, 31])
def test_a_run_stopped_while_it_waits_keeps_what_is_finished_and_goes_on_as_if_it_had_not(
    start, tmp_path, override, pumps
):
    overrides = [override, "trainer.deterministic=true", "trainer.save_every=0", "trainer.prompts_per_minibatch=4"]
    whole = Run(start, tmp_path / "whole", *overrides, steps=2).fit()
    left = pumps

    def stop():
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped(143)

    stopped = Run(start, tmp_path / "parts", *overrides, steps=2, interrupted=stop)
    try:
        stopped.fit()
    except Stopped:
        stopped.trainer.save()
        stopped.checkpoints.finish()
    resumed = Run(start, tmp_path / "parts", *overrides, steps=2).resume()
    kept = json.loads((tmp_path / f"parts/checkpoints/step_{stopped.trainer.step}/driver.json").read_text())
    assert kept["collector"] == json.loads(json.dumps(stopped.trainer.state_dict()["collector"]))
    assert_same(resumed.fit(), whole)


def out_of_order(run, *, after: int = 0, of=range(1000)):
    """From this step on the rewards of these groups fail."""
    rewards = run.trainer.collector.rewards
    poll = rewards.poll

    def failing(timeout_s):
        return [
            replace(result, scores=(None,), failed=True, error="the judge is down")
            if run.trainer.step >= after and result.key[0] in of else result
            for result in poll(timeout_s)
        ]  # fmt: skip

    rewards.poll = failing


@pytest.mark.parametrize("save_every", [0, 2])
@pytest.mark.parametrize("sampling", [0, 3])
def test_a_run_that_ends_because_rewards_fail_goes_on_when_they_work_again_as_if_they_had(
    start, tmp_path, sampling, save_every
):
    overrides = ["trainer.deterministic=true", f"algorithm.dynamic_sampling={sampling}"]
    failed = Run(start, tmp_path / "parts", *overrides, f"trainer.save_every={save_every}")
    out_of_order(failed, after=2)
    with pytest.raises(RewardError, match=r"the judge is down.*step 2 is saved, and trainer\.resume=auto goes on"):
        failed.fit()
    failed.checkpoints.finish()
    resumed = Run(start, tmp_path / "parts", *overrides, "trainer.save_every=0").resume()
    assert resumed.trainer.step == 2
    assert_same(resumed.fit(), Run(start, tmp_path / "whole", *overrides, "trainer.save_every=0").fit())


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
def test_a_run_that_ends_in_the_users_aggregation_goes_on_when_it_is_repaired_as_if_it_had_worked(
    start, tmp_path, overrides, save_every
):
    (tmp_path / "own.py").write_text(AGGREGATION)
    words = ["trainer.deterministic=true", f"reward.aggregation={tmp_path}/own.py:total", *overrides]
    whole = Run(start, tmp_path / "whole", *words).fit()
    failed = Run(start, tmp_path / "parts", *words, f"trainer.save_every={save_every}")
    between = failed.trainer.between_steps

    def breaks_after_2():
        between()
        if failed.trainer.step == 2:
            (tmp_path / "broken").touch()

    failed.trainer.between_steps = breaks_after_2
    said = r"KeyError: 'level'; step 2 is saved, and trainer\.resume=auto goes on from it, also with that function"
    with pytest.raises(RewardError, match=said):
        failed.fit()
    failed.checkpoints.finish()
    (tmp_path / "broken").unlink()
    resumed = Run(start, tmp_path / "parts", *words).resume()
    assert resumed.trainer.step == 2
    assert failed.checkpoints.newest().state["repairable"] == f"reward.aggregation: {tmp_path}/own.py:total"
    assert_same(resumed.fit(), whole)


def test_failed_rewards_of_a_step_that_is_prefetched_are_asked_for_again_by_who_resumes(start, tmp_path):
    """They are in the checkpoint that was made before anybody missed them."""
    overrides = ["trainer.max_staleness=1", "trainer.save_every=2"]
    failed = Run(start, tmp_path, *overrides)
    out_of_order(failed, of=range(8, 12))
    between, collector = failed.trainer.between_steps, failed.trainer.collector

    def when_all_has_arrived():
        while collector.rollout.pending or collector.rewards.pending:
            collector._pump()
        between()

    failed.trainer.between_steps = when_all_has_arrived
    with pytest.raises(RewardError, match="the judge is down"):
        failed.fit()
    failed.checkpoints.finish()
    kept = json.loads((tmp_path / "checkpoints/step_2/driver.json").read_text())["collector"]["groups"]["groups"]
    assert [result["failed"] for group in kept if group["uid"] in range(8, 12) for result in group["results"]]
    resumed = Run(start, tmp_path, *overrides).resume()
    assert resumed.trainer.step == 2
    resumed.fit()
    assert [uid for line in resumed.ledger() for uid in line["used"]] == list(range(16))


def test_where_rewards_fail_before_anything_is_learnt_nothing_is_saved(start, tmp_path):
    run = Run(start, tmp_path)
    out_of_order(run, after=0)
    with pytest.raises(RewardError, match="the judge is down") as caught:
        run.fit()
    assert "resume" not in str(caught.value)
    assert run.checkpoints.newest() is None


def test_a_run_that_takes_over_in_another_folder_has_the_checkpoint_there_too_and_whole_curves(start, tmp_path):
    old = Run(start, tmp_path / "old", steps=2).fit()
    new = Run(start, tmp_path / "new", steps=2)
    new.trainer.restore(old.checkpoints.newest())
    new.fit()
    assert new.checkpoints.newest().step == 2
    new.checkpoints.publish(tmp_path / "new/model")
    files = [(tmp_path / name / "checkpoints/step_2/model/model.safetensors").read_bytes() for name in ("old", "new")]
    assert files[0] == files[1] == (tmp_path / "new/model/model.safetensors").read_bytes()
    assert (tmp_path / "new/metrics.jsonl").read_text() == (tmp_path / "old/metrics.jsonl").read_text()
    assert new.ledger() == old.ledger()


def test_a_save_blocks_the_step_only_while_tensors_are_copied(start, tmp_path, monkeypatch):
    """The next step runs while the files are written: its metrics are there before the checkpoint is current."""
    run = Run(start, tmp_path)
    run.trainer.sync_weights()
    run.trainer.step = 1
    run.trainer.save()
    state = run.trainer.actor.hosts.host.roles["actor"].state
    assert state.thread is not None
    assert run.checkpoints.under_way is not None
    run.checkpoints.finish()
    assert run.checkpoints.newest().step == 1


def test_a_second_checkpoint_of_the_same_step_is_not_made(start, tmp_path, caplog):
    run = Run(start, tmp_path).steps(1)
    before = (tmp_path / "checkpoints/step_1/manifest.json").stat()
    run.trainer.save()
    run.checkpoints.finish()
    assert (tmp_path / "checkpoints/step_1/manifest.json").stat() == before
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
