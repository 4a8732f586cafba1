import asyncio
from types import MappingProxyType

import pytest
import torch

from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import LogProbError
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.data.prompts import Prompt
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from rltrain.trainer import Trainer
from rltrain.trajectories.collector import Collector, Finished
from rltrain.trajectories.prompt_groups import GroupState
from rltrain.trajectories.reward_models import RewardModel
from tests.fakes import FakeCheckpoints, Waiting
from workers.cluster.processes import LocalProcess, Role
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion


def answered(version: int) -> DataProto:
    """Return two groups of two answers, where each group has one right and one wrong answer of a single token."""
    return DataProto.from_dict(
        {"prompts": jagged([[1]] * 4, torch.int64), "responses": jagged([[2]] * 4, torch.int64),
         "response_mask": jagged([[True]] * 4, torch.bool),
         "rollout_log_probs": jagged([[-1.0]] * 4, torch.float32),
         "policy_version": jagged([[version]] * 4, torch.int64),
         "uid": torch.tensor([0, 0, 1, 1]), "valid": torch.ones(4, dtype=torch.bool),
         "failed": torch.zeros(4, dtype=torch.bool),
         "failed_function": torch.full((4,), -1),
         "scores": torch.tensor([1.0, 0.0, 1.0, 0.0]), "successes": torch.tensor([1.0, 0.0, 1.0, 0.0]),
         "reward_components": torch.tensor([[1.0], [0.0], [1.0], [0.0]])},
        {"finish_reason": ["stop"] * 4},
    )  # fmt: skip


class FakeCollector:
    """A fake that serves as collector and rollout pool, and logs the version of the weights at each call."""

    def __init__(self, log):
        self.log, self.rollout, self.asleep = log, self, False
        self.generated, self.counts = {}, []
        self.state_dict = lambda: {"waiting": len(log)}

    def drop_turns_after(self, version):
        pass

    async def answers(self, version):
        self.log.append(f"answers {version}")
        return answered(version)

    async def scored(self, batch):
        self.log.append("scored")
        return batch, self.generated

    def take(self):
        return Finished(dropped=[7], reused=[3])

    async def evaluate(self, prompts, *, greedy, samples=1):
        self.log.append(f"evaluate {'greedy' if greedy else 'sampled'}")
        self.counts.append(samples)
        return answered(0)

    async def sleep(self):
        """Do nothing, because the fake holds no device memory."""

    async def hold_weights(self):
        """Do nothing, because the fake answers do not wait for weights."""

    async def load(self, ranks, version, *, check):
        assert len(ranks) == 1
        self.log.append(f"load {ranks[0].name} as {version}, checked: {check}")


class FakeGroup:
    """A fake worker group of one role, which adds the constant columns `columns` to each batch."""

    def __init__(self, role, log, **columns):
        self.role, self.log, self.columns = role, log, columns
        self.ranks = [Role(LocalProcess(None), role)]
        self.updates, self.arguments, self.entropies = [], [], []

    async def rows(self, method, batch, columns, *, max_tokens, only=None, keep=None):
        self.log.append(f"{self.role} {method.__name__} {max_tokens}")
        batch = batch if only is None else batch[only]
        values = {name: torch.full((len(batch),), value) for name, value in self.columns.items()}
        return batch.with_values("responses", **values).select(list(values))

    async def drop_kept(self):
        """Free nothing, because this group keeps no columns."""

    async def update(self, method, batch, columns, plan, max_tokens, *arguments):
        self.log.append(f"{self.role} {method.__name__} {max_tokens}")
        self.updates.append((batch, plan))
        self.arguments.append(arguments)
        return {"loss": 0.5, "entropy": self.entropies.pop(0) if self.entropies else 0.0}


class FakeTracker:
    def __init__(self, log):
        self.log, self.steps, self.evals = log, [], []
        self.log_failed = lambda step, batch: f"/run/{step}"
        self.state, self.metrics_of = lambda: {"lines": b""}, lambda step: {"step": step}
        self.evaluated, self.names = lambda step: step in dict(self.evals), lambda: {"step"}

    def log_step(self, step, metrics, batch, dropped, reused):
        self.log.append(f"log {step}")
        self.dropped, self.reused = dropped, reused
        self.steps.append((metrics, batch))

    def log_eval(self, step, metrics, batches):
        self.evals.append((step, metrics))


BASE = [
    "trainer.prompts_per_step=2", "trainer.prompts_per_minibatch=1", "rollout.samples_per_prompt=2",
    "actor.max_tokens_per_microbatch=1111", "critic.max_tokens_per_microbatch=2222", "trainer.total_steps=2",
    "rollout.max_prompt_length=10", "rollout.max_response_length=10",
]  # fmt: skip


def trainer(*overrides, reference=False, critic=False, old=-1.0, collector=None, val=MappingProxyType({})):
    """Return a trainer made of fakes, and the log to which all fakes write."""
    log: list[str] = []
    made = Trainer(
        compose([*BASE, *overrides])[0],
        collector=collector or FakeCollector(log),
        actor=FakeGroup("actor", log, old_log_probs=old),
        reference=FakeGroup("reference", log, ref_log_probs=-1.25) if reference else None,
        critic=FakeGroup("critic", log, values=0.25) if critic else None,
        tracker=FakeTracker(log), checkpoints=FakeCheckpoints(log), val_prompts=val, tasks=BackgroundTasks(),
    )  # fmt: skip
    return made, log


# Tests of work that continues while a role computes


class Engines(Waiting):
    """Fake engines that answer the groups of the first step at once, and all later groups when a role computes."""

    def __init__(self, computing):
        super().__init__()
        self.computing = computing

    def submit(self, groups):
        super().submit([request for group in groups for request in group])

    async def poll(self):
        done = [request for request in self.waiting if request.key[0] in (0, 1)]
        if not done:
            await self.computing.wait()
            done = self.waiting
        self.waiting = [request for request in self.waiting if request not in done]
        return [Completion(request.key, [2], [-1.0], "stop", [0], "2") for request in done]


class Judges(Waiting):
    """Fake reward workers that give every second answer the score 1.

    The event `second_step` is set when all answers of the second step have scores.
    """

    def __init__(self):
        super().__init__()
        self.second_step, self.scored = asyncio.Event(), set()

    async def poll(self):
        done, self.waiting = self.waiting, []
        self.scored |= {request.key for request in done}
        if {(uid, number) for uid in (2, 3) for number in (0, 1)} <= self.scored:
            self.second_step.set()
        return [SampleScores(request.key, (1.0 - request.key[1],)) for request in done]


class Slow(FakeGroup):
    """A fake role in which the method `slow` returns only when all answers of the second step have scores."""

    def __init__(self, role, computing, judges, slow, **columns):
        super().__init__(role, [], **columns)
        self.computing, self.judges, self.slow = computing, judges, slow

    async def compute(self, method):
        if f"{self.role}.{method.__name__}" == self.slow:
            self.computing.set()
            await self.judges.second_step.wait()

    async def rows(self, method, batch, columns, *, max_tokens, only=None, keep=None):
        await self.compute(method)
        if self.role == "judge":
            return DataProto.from_dict({"model_scores": torch.zeros(len(batch))})
        return await super().rows(method, batch, columns, max_tokens=max_tokens, only=only)

    async def update(self, method, batch, columns, plan, max_tokens, *arguments):
        await self.compute(method)
        return await super().update(method, batch, columns, plan, max_tokens, *arguments)


@pytest.mark.parametrize(
    "slow",
    ["reference.compute_log_probs", "actor.compute_log_probs", "critic.compute_values", "judge.compute_scores",
     "critic.update", "actor.update"],
)  # fmt: skip
async def test_answers_and_scores_arrive_while_a_role_computes(tasks, slow):
    config = compose(
        [*BASE, "algorithm=ppo", "algorithm.kl_in_reward.kl_coef=0.1", "trainer.max_staleness=1",
         "reward.models=[{name: judge, path: /m, weight: 0.5}]"]
    )[0]  # fmt: skip
    computing, judges = asyncio.Event(), Judges()
    model = RewardModel(
        config.reward.models[0], Slow("judge", computing, judges, slow), number=1, tokenizer=char_tokenizer(),
        longest=None, pad=None, max_tokens=100,
    )  # fmt: skip
    prompts = [Prompt(number, "1", [1], {}) for number in range(8)]
    collector = Collector(
        config, rollout=Engines(computing), rewards=judges, prompts=prompts, tasks=tasks, models=[model]
    )
    collector.start()
    made = Trainer(
        config, collector=collector, actor=Slow("actor", computing, judges, slow, old_log_probs=-1.0),
        reference=Slow("reference", computing, judges, slow, ref_log_probs=-1.25),
        critic=Slow("critic", computing, judges, slow, values=0.25), tracker=FakeTracker([]),
        checkpoints=FakeCheckpoints([]), val_prompts={}, tasks=tasks,
    )  # fmt: skip
    async with asyncio.timeout(20):
        _, batch = await made.train_step()
    assert computing.is_set()
    assert batch.batch["uid"].tolist() == [0, 0, 1, 1]
    assert {uid: group.state for uid, group in collector.groups.groups.items()} == {
        2: GroupState.READY,
        3: GroupState.READY,
    }


SYNC = ["load actor as 1, checked: True"]


# Tests of the phases of a training step


async def test_a_grpo_step_without_reference_generates_asks_the_actor_and_only_then_for_scores_updates_and_syncs():
    made, log = trainer()
    await made.train_step()
    assert log == ["answers 0", "actor compute_log_probs 1111", "scored", "actor update 1111", *SYNC]


async def test_a_grpo_step_with_reference_asks_it_before_the_update():
    made, log = trainer("algorithm.kl_loss.kl_loss_coef=0.1", reference=True)
    await made.train_step()
    assert log == [
        "answers 0", "reference compute_log_probs 1111", "actor compute_log_probs 1111", "scored", "actor update 1111",
        *SYNC,
    ]  # fmt: skip


@pytest.mark.parametrize("reference", [False, True])
async def test_a_ppo_step_updates_the_critic_before_the_actor_each_with_its_own_budget(reference):
    kl = ["algorithm.kl_in_reward.kl_coef=0.1"] if reference else []
    made, log = trainer("algorithm=ppo", *kl, reference=reference, critic=True)
    metrics, _ = await made.train_step()
    asked = ["reference compute_log_probs 1111"] if reference else []
    assert log == [
        "answers 0", *asked, "actor compute_log_probs 1111", "critic compute_values 2222", "scored",
        "critic update 2222", "actor update 1111", *SYNC,
    ]  # fmt: skip
    assert metrics["critic/loss"] == metrics["actor/loss"] == 0.5
    assert ("reward/kl" in metrics) is reference


async def test_actor_and_critic_get_the_same_batch_and_plan_and_all_columns():
    kl = "algorithm.kl_in_reward.kl_coef=0.1"
    made, _ = trainer("algorithm=ppo", "trainer.epochs_per_step=3", kl, reference=True, critic=True)
    _, batch = await made.train_step()
    (actor_batch, plan), (critic_batch, critic_plan) = made.actor.updates[0], made.critic.updates[0]
    assert actor_batch is critic_batch is batch
    assert plan == critic_plan
    assert len(plan) == 6
    assert sorted(map(sorted, plan)) == [[0, 1]] * 3 + [[2, 3]] * 3
    assert {"old_log_probs", "ref_log_probs", "values", "token_level_rewards", "advantages", "returns"} <= {
        *batch.keys()
    }


async def test_grpo_advantages_reach_the_actor():
    made, _ = trainer("algorithm.advantage.norm_by_std=false")
    await made.train_step()
    assert made.actor.updates[0][0].values("advantages").tolist() == [0.5, -0.5, 0.5, -0.5]


async def test_kl_in_reward_lowers_the_rewards_of_the_actors_batch():
    made, _ = trainer("algorithm.kl_in_reward.kl_coef=0.5", reference=True)
    metrics, batch = await made.train_step()
    assert batch.values("token_level_rewards").tolist() == [0.875, -0.125, 0.875, -0.125]
    assert metrics["reward/kl"] == 0.25


async def test_minibatches_are_shuffled_anew_each_step():
    made, _ = trainer("trainer.epochs_per_step=8")
    await made.train_step()
    await made.train_step()
    assert made.actor.updates[0][1] != made.actor.updates[1][1]


async def test_the_ledger_gets_the_groups_that_the_step_dropped_or_trained_on_again():
    made, _ = trainer("trainer.total_steps=1")
    await made.train()
    assert (made.tracker.dropped, made.tracker.reused) == ([7], [3])


async def test_groups_that_were_dropped_or_are_missing_are_told_only_where_they_are_counted():
    made, _ = trainer()
    plain, _ = await made.train_step()
    assert not [name for name in plain if "groups" in name or "generated" in name]
    made.collector.generated = {"reward/mean_generated": 0.25, "rollout/groups_dropped": 5.0}
    metrics, _ = await made.train_step()
    assert {name: metrics[name] for name in metrics.keys() - plain.keys()} == made.collector.generated


async def test_metrics_name_their_role_and_every_phase_is_timed():
    made, _ = trainer("algorithm=ppo", "algorithm.kl_in_reward.kl_coef=0.1", reference=True, critic=True)
    metrics, _ = await made.train_step()
    phases = (
        "generate", "old_log_probs", "ref_log_probs", "values", "rewards", "advantages", "update_critic", "update_actor"
    )  # fmt: skip
    assert {f"timing/{phase}" for phase in (*phases, "sync_weights", "step")} == {k for k in metrics if "timing" in k}
    assert {
        "reward/mean", "reward/final_answer/mean", "reward/zero_spread_fraction", "rollout/log_prob_gap",
        "critic/explained_variance", "perf/tokens_per_s", "rollout/staleness_mean", "rollout/staleness_max",
    } <= metrics.keys()  # fmt: skip


# Tests of the training loop


async def test_weights_are_synced_before_the_first_step_and_after_each_update_with_the_next_version():
    made, log = trainer("rollout.verify_sync=false")
    await made.fit()
    assert [line for line in log if line.startswith(("answers", "load", "actor update", "log", "save "))] == [
        "load actor as 0, checked: False", "answers 0", "actor update 1111", "load actor as 1, checked: False", "log 1",
        "answers 1", "actor update 1111", "load actor as 2, checked: False", "log 2", "save actor 2",
    ]  # fmt: skip


async def test_synchronous_training_never_sees_tokens_of_older_weights():
    made, _ = trainer("trainer.total_steps=4")
    await made.fit()
    ages = [step - int(batch.values("policy_version").min()) for step, (_, batch) in enumerate(made.tracker.steps)]
    assert ages == [0, 0, 0, 0]


async def test_evaluations_come_before_after_and_as_often_as_asked_but_not_twice_at_the_end():
    made, log = trainer(
        "trainer.total_steps=4", "trainer.eval_every=2", "trainer.save_every=3", val={"": [Prompt(0, "", [1], {})]}
    )
    await made.fit()
    assert [step for step, _ in made.tracker.evals] == [0, 2, 4]
    assert [line for line in log if line.startswith("save ")] == ["save actor 3", "save actor 4"]
    assert made.tracker.evals[0][1] == {
        f"eval/{kind}_{name}": value
        for kind in ("sampled", "greedy")
        for name, value in (
            ("reward", 0.5),
            ("reward/final_answer", 0.5),
            ("accuracy", 0.5),
            ("length", 1.0),
            ("failed_fraction", 0.0),
            ("pass_at_2", 1.0),
        )
    }
    assert log.index("load actor as 0, checked: True") < log.index("evaluate sampled") < log.index("answers 0")


async def test_each_evaluation_set_has_metrics_of_its_own_name_and_pass_at_k():
    made, log = trainer("trainer.eval_samples=2", val={"": [Prompt(0, "", [1], {})], "aime": [Prompt(0, "", [1], {})]})
    await made.evaluate()
    metrics = made.tracker.evals[0][1]
    assert [line for line in log if line.startswith("evaluate")] == ["evaluate sampled", "evaluate greedy"] * 2
    assert made.collector.counts == [2, 1, 2, 1]
    # in each group, one of the two answers is correct
    assert metrics["eval/sampled_pass_at_2"] == metrics["eval/aime/sampled_pass_at_2"] == 1.0
    assert metrics["eval/aime/greedy_accuracy"] == 0.5


async def test_without_validation_prompts_nothing_is_evaluated():
    made, log = trainer()
    await made.fit()
    assert made.tracker.evals == []
    assert not [line for line in log if line.startswith("evaluate")]


async def test_a_failed_reward_of_an_evaluation_is_not_read_as_a_wrong_answer():
    class OneFails(FakeCollector):
        async def evaluate(self, prompts, *, greedy, samples=1):
            batch = answered(0)
            batch.batch["valid"][1] = False
            batch.batch["failed"][1] = True
            return batch

    made, _ = trainer(collector=OneFails([]), val={"": [Prompt(0, "", [1], {})]})
    await made.evaluate()
    assert made.tracker.evals[0][1]["eval/greedy_accuracy"] == pytest.approx(2 / 3)
    assert made.tracker.evals[0][1]["eval/greedy_reward"] == pytest.approx(2 / 3)


# Tests of errors that stop a run


@pytest.mark.parametrize("old", [-1.5, float("nan")])
@pytest.mark.parametrize("source", ["actor", "rollout"])
async def test_E1_engine_and_actor_that_disagree_stop_the_run_at_step_one(old, source):
    made, log = trainer("rollout.max_log_prob_gap=0.4", f"algorithm.old_log_probs={source}", old=old)
    gap = "0.5" if old == -1.5 else "nan"
    with pytest.raises(
        LogProbError, match=f"disagree by {gap} nats .* above rollout.max_log_prob_gap=0.4: .* check model"
    ):
        await made.train_step()
    assert log == ["answers 0", "actor compute_log_probs 1111"]  # the log has no update, so nothing was trained


async def test_E1_a_gap_above_the_limit_names_the_quantized_weights():
    quantized = ["model.dtype=bfloat16", "rollout.vllm.quantization=fp8_per_block"]
    made, _ = trainer("rollout=vllm", *quantized, "rollout.max_log_prob_gap=0.4", old=-1.5)
    with pytest.raises(LogProbError, match=r"; use rollout\.vllm\.quantization=null, or raise the limit"):
        await made.train_step()


async def test_E1_at_later_steps_the_gap_is_only_shown():
    made, _ = trainer("rollout.max_log_prob_gap=0.4")
    await made.train_step()
    made.actor.columns["old_log_probs"] = -3.0
    metrics, _ = await made.train_step()
    assert metrics["rollout/log_prob_gap"] == pytest.approx(2.0)
    assert made.step == 2


async def test_a_gap_below_the_limit_passes():
    made, _ = trainer("rollout.max_log_prob_gap=0.6", old=-1.5)
    assert (await made.train_step())[0]["rollout/log_prob_gap"] == 0.5


@pytest.mark.parametrize("restriction", ["rollout.top_p=0.9", "rollout.top_k=5"])
async def test_with_top_p_or_top_k_the_engine_is_not_compared_with_the_actor(restriction):
    made, log = trainer("rollout.max_log_prob_gap=0.4", restriction, old=-1.5)
    assert (await made.train_step())[0]["rollout/log_prob_gap"] == 0.5
    one_step, log = trainer(ONE_STEP, "rollout.max_log_prob_gap=0.4", restriction, old=-1.5)
    await one_step.train_step()
    await one_step.train_step()
    # In the first step, the update compares its log-probs with those of the forward pass.
    assert log.count("actor compute_log_probs 1111") == 1


async def test_old_log_probs_of_the_engine_save_the_actors_pass_after_the_first_step():
    made, log = trainer("algorithm.old_log_probs=rollout", old=-1.001)
    await made.train_step()
    _, batch = await made.train_step()
    assert log.count("actor compute_log_probs 1111") == 1
    assert batch.values("old_log_probs").tolist() == [-1.0] * 4


# Tests of one optimizer step on the whole batch, where the old log-probs equal the current log-probs

ONE_STEP = "trainer.prompts_per_minibatch=2"


async def test_with_one_optimizer_step_on_all_the_actor_is_asked_in_the_first_step_only_to_check_the_engine():
    made, log = trainer(ONE_STEP, "rollout.max_log_prob_gap=1", old=-1.25)
    first, batch = await made.train_step()
    second, later = await made.train_step()
    assert log.count("actor compute_log_probs 1111") == 1
    assert log.index("actor compute_log_probs 1111") < log.index("actor update 1111")
    assert batch.values("old_log_probs").tolist() == [-1.25] * 4
    assert "old_log_probs" not in later
    assert first["rollout/log_prob_gap"] == 0.25
    assert not [name for name in second if name.startswith("rollout/log_prob_gap")]


@pytest.mark.parametrize(
    "setting", ["trainer.epochs_per_step=2", "algorithm.advantage_estimator=optimal_token_baseline"]
)
async def test_where_the_old_policy_is_read_the_actor_is_asked_in_every_step(setting):
    made, log = trainer(ONE_STEP, setting)
    await made.train_step()
    await made.train_step()
    assert log.count("actor compute_log_probs 1111") == 2


async def test_E1_one_optimizer_step_a_step_does_not_save_the_engine_its_check():
    made, log = trainer(ONE_STEP, "rollout.max_log_prob_gap=0.1", old=-1.25)
    with pytest.raises(LogProbError, match=r"disagree by 0\.25 nats"):
        await made.train_step()
    assert log == ["answers 0", "actor compute_log_probs 1111"]


# The coefficient of the entropy bonus


async def test_the_entropy_coefficient_moves_step_by_step_towards_the_target():
    made, _ = trainer(
        "algorithm.entropy_target=0.5",
        "algorithm.entropy_coef=0.01",
        "algorithm.entropy_coef_step=0.004",
        "algorithm.entropy_coef_max=0.02",
    )
    made.actor.entropies = [0.4, 0.3, 0.6, 0.4, 0.4]
    shown = [(await made.train_step())[0]["actor/entropy_coef"] for _ in range(6)]
    # the metric shows the entropy coefficient that the actor received
    assert [coef for coef, _ in made.actor.arguments] == shown
    # the entropy bonus is off while the entropy is above the target
    assert shown == pytest.approx([0.01, 0.014, 0.018, 0.0, 0.018, 0.02])


async def test_without_a_target_the_entropy_coefficient_stays_and_is_not_shown():
    made, _ = trainer("algorithm.entropy_coef=0.01")
    made.actor.entropies = [0.4, 9.0]
    assert not [name for _ in range(2) for name in (await made.train_step())[0] if name == "actor/entropy_coef"]
    assert [coef for coef, _ in made.actor.arguments] == [0.01, 0.01]


async def test_only_the_actor_is_given_an_entropy_coefficient():
    made, _ = trainer("algorithm=ppo", "algorithm.entropy_coef=0.02", critic=True)
    await made.train_step()
    assert ([coef for coef, _ in made.actor.arguments], made.critic.arguments) == ([0.02], [()])


# Tests of the data of a training step


async def test_what_leaves_the_mask_leaves_the_actors_batch_after_the_statistics():
    collector = FakeCollector([])
    cut = answered(0)
    cut.non_tensor_batch["finish_reason"][0] = "length"

    async def answers(version):
        return cut

    collector.answers = answers
    made, _ = trainer("algorithm.mask_truncated=true", collector=collector)
    _, batch = await made.train_step()
    trained = made.actor.updates[0][0].padded("response_mask").any(-1).tolist()
    assert trained == [False, *cut.padded("response_mask").any(-1).tolist()[1:]]
    assert batch.padded("advantages")[0].abs().sum() > 0


async def test_A4_what_correction_and_rejection_drop_goes_to_the_actor_in_the_mask():
    rejection = ["algorithm.rejection.kl_estimator=abs", "algorithm.rejection.upper=0.1"]
    made, _ = trainer(*rejection, "rollout.max_log_prob_gap=1", old=-1.25)
    _, batch = await made.train_step()
    assert bool(made.actor.updates[0][0].values("response_mask").any())
    assert torch.equal(made.actor.updates[0][0].values("response_mask"), batch.values("response_mask"))


async def test_a_selector_that_chooses_by_chance_gets_new_draws_each_step():
    made, _ = trainer("algorithm.loss_mode=clip_cov")
    draws = [(await made.train_step())[1].values("random_draws").tolist() for _ in range(2)]
    assert draws[0] != draws[1]
    assert (await trainer("algorithm.loss_mode=clip_cov")[0].train_step())[1].values("random_draws").tolist() == draws[
        0
    ]
