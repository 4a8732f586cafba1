"""Tests of the actor's update in one process: correction weights, entropy bonus, token selectors and the exact KL."""

import math

import pytest
import torch
from transformers import AutoConfig

from rltrain.batch.data_proto import DataProto
from rltrain.settings.compose import compose
from tests.policy_weights import weights_of
from workers.cluster.processes import LocalProcess, Role
from workers.cluster.worker_process import Host
from workers.placement import ROLES
from workers.training.actor import ActorWorker
from workers.training.minibatch_statistics import in_epoch, with_selected
from workers.training.policy_update import update_policy
from workers.training.reference import ReferenceWorker
from workers.training.shared_columns import FORWARD, log_probs_columns
from workers.training.worker_group import WorkerGroup

pytestmark = pytest.mark.usefixtures("process_group")
ALL = [list(range(12))]
CONSTANT = ["actor.lr_schedule=constant", "trainer.prompts_per_step=3", "trainer.prompts_per_minibatch=3"]


class Run:
    """A newly started actor, with a reference model if the config needs one."""

    def __init__(self, path, *overrides):
        self.config = compose([*CONSTANT, *overrides])[0]
        self.process = LocalProcess(Host({}, verbose=True))
        for role in self.config.roles(needs_critic=False):
            self.process.build(role, ROLES[role], self.config, path)
        self.actor, self.reference = (WorkerGroup([Role(self.process, role)]) for role in ("actor", "reference"))
        self.worker = self.process.host.roles["actor"]

    async def referred(self, batch: DataProto) -> DataProto:
        """Return the columns that the reference model computes for a batch."""
        return await self.reference.rows(ReferenceWorker.compute_log_probs, batch, FORWARD, max_tokens=8192)

    async def log_probs(self, batch: DataProto) -> DataProto:
        """Return the columns that the actor computes for a batch before an update."""
        columns = log_probs_columns(self.config.algorithm)
        return await self.actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=8192)

    async def prepared(self, batch: DataProto) -> DataProto:
        if self.config.algorithm.needs_reference:
            batch = batch.union(await self.referred(batch))
        return batch.union(await self.log_probs(batch))

    async def update(self, batch: DataProto, entropy_coef=0.0, **options):
        plan = options.get("plan", ALL)
        return await update_policy(self.actor, batch, plan, self.config, max_tokens=8192, entropy_coef=entropy_coef)

    async def weights(self):
        weights = await weights_of(self.actor)
        return {name: tensor.clone() for name, tensor in weights.items()}


def apart(first, second) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def moved(batch: DataProto, by: float) -> DataProto:
    """Set the engine's log-probs to the old log-probs, plus `by` at even tokens and minus `by` at odd tokens."""
    sign = 1 - 2 * (torch.arange(len(batch.values("responses"))) % 2)
    return batch.with_values("responses", rollout_log_probs=batch.values("old_log_probs") + by * sign)


# Tests of the decoupled form of the policy loss


@pytest.mark.parametrize("loss", ["vanilla", "reinforce", "gspo"])
async def test_D8_a_correction_multiplies_the_loss_of_each_token_by_its_weight(start, sampled_batch, loss):
    """If the loss is linear in the advantage, weighting the loss is equivalent to weighting the advantage."""
    run = Run(start, f"algorithm.loss_mode={loss}", "algorithm.correction.level=token")
    batch = moved(await run.prepared(sampled_batch), 0.3)
    weighted = await run.update(batch)
    assert weighted["correction_weight_mean"] != 1
    plain = Run(start, f"algorithm.loss_mode={loss}")
    weights = (batch.values("old_log_probs") - batch.values("rollout_log_probs")).exp()
    advantages = batch.values("advantages") * weights
    prepared = await plain.prepared(sampled_batch)
    expected = await plain.update(prepared.with_values("responses", advantages=advantages))
    assert weighted["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert weighted["policy_loss"] == pytest.approx(expected["policy_loss"], rel=1e-5)
    assert apart(await run.weights(), await plain.weights()) < 1e-5


async def test_D8_without_correction_what_the_engine_said_changes_nothing(start, sampled_batch):
    found = []
    for by in (0.0, 0.3):
        run = Run(start)
        metrics = await run.update(moved(await run.prepared(sampled_batch), by))
        assert not [name for name in metrics if name.startswith(("correction", "rejection"))]
        found.append((metrics, await run.weights()))
    assert apart(found[0][1], found[1][1]) == 0
    assert found[0][0]["engine_gap"] == pytest.approx(0, abs=1e-6)
    assert found[1][0]["engine_gap"] == pytest.approx(0.3, abs=1e-5)
    assert found[1][0]["engine_effective_sample_size"] < 1


async def test_D8_with_correction_it_changes_the_update_and_weights_of_one_do_not(start, sampled_batch):
    found = []
    for by in (0.0, 0.3):
        run = Run(start, "algorithm.correction.level=token")
        await run.update(moved(await run.prepared(sampled_batch), by))
        found.append(await run.weights())
    plain = Run(start)
    await plain.update(moved(await plain.prepared(sampled_batch), 0.0))
    assert apart(found[0], await plain.weights()) < 1e-6
    assert apart(found[1], await plain.weights()) > 1e-5


async def test_D8_one_optimizer_step_on_all_weighs_by_its_own_log_probs_without_a_pass_before(start, sampled_batch):
    settings = ["algorithm.correction.level=token", "algorithm.correction.upper=1.2"]
    passed = Run(start, *settings)
    batch = moved(await passed.prepared(sampled_batch), 0.3)
    expected = await passed.update(batch)
    assert 0 < expected["correction_outside_fraction"] < 1
    alone = Run(start, *settings)
    found = await alone.update(batch.pop(["old_log_probs"])[1])
    for name in ("correction_weight_mean", "correction_outside_fraction", "policy_loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert apart(await alone.weights(), await passed.weights()) < 1e-6


async def test_A4_an_update_counts_dropped_tokens_in_its_metrics_and_keeps_their_entropy(start, sampled_batch):
    nothing = ["algorithm.rejection.kl_estimator=abs", "algorithm.rejection.level=token", "algorithm.rejection.upper=0"]
    run = Run(start, *nothing, "algorithm.entropy_coef=0.1")
    metrics = await run.update(moved(await run.prepared(sampled_batch), 0.3), 0.1)
    assert (metrics["rejection_dropped_fraction"], metrics["policy_loss"]) == (1, 0)
    assert metrics["rejection_divergence"] == pytest.approx(0.3, rel=1e-4)
    plain = Run(start, "algorithm.entropy_coef=0.1")
    no_advantage = sampled_batch.with_values("responses", advantages=0 * sampled_batch.values("advantages"))
    expected = await plain.update(await plain.prepared(no_advantage), 0.1)
    assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


async def test_the_rejection_looks_at_the_policy_again_in_each_optimizer_step(start, sampled_batch):
    """In two optimizer steps on the same rows, the second step uses the policy that the first step has changed."""
    found = []
    for plan in (ALL, ALL * 2):
        run = Run(start, "algorithm.rejection.kl_estimator=k1", "algorithm.rejection.upper=9", "actor.lr=1e-2")
        metrics = await run.update(moved(await run.prepared(sampled_batch), 0.0), plan=plan)
        found.append(metrics["rejection_divergence"])
    assert found[0] == pytest.approx(0, abs=1e-5)
    assert abs(found[1]) > 1e-3


# Tests of the entropy bonus


async def test_D5_the_bonus_is_multiplied_by_the_coefficient_that_the_actor_is_given(start, sampled_batch):
    """With advantages of 0, the gradient comes from the bonus alone, so its norm is linear in the coefficient."""
    nothing = torch.zeros_like(sampled_batch.values("advantages"))
    batch = sampled_batch.with_values("responses", advantages=nothing)
    norms = {}
    for coef in (0.0, 0.01, 0.03):
        # with an entropy target, 0.005 is only the initial entropy coefficient
        run = Run(start, "algorithm.entropy_target=0.5", "algorithm.entropy_coef=0.005")
        metrics = await run.update(await run.prepared(batch), coef)
        norms[coef] = metrics["grad_norm"]
        assert metrics["entropy"] > 0
    assert norms[0.0] == 0
    assert norms[0.01] > 0
    assert norms[0.03] == pytest.approx(3 * norms[0.01], rel=1e-4)


async def test_a_positive_coefficient_raises_the_entropy(start, sampled_batch):
    nothing = torch.zeros_like(sampled_batch.values("advantages"))
    run = Run(start, "algorithm.entropy_coef=0.1")
    batch = sampled_batch.with_values("responses", advantages=nothing)
    entropies = [(await run.update(await run.prepared(batch), 0.1))["entropy"] for _ in range(3)]
    assert entropies == sorted(entropies)
    assert entropies[0] < entropies[-1]


async def test_entropy_is_measured_only_where_something_reads_it(start, sampled_batch):
    run = Run(start)
    assert "entropy" not in await run.update(await run.prepared(sampled_batch), 0.0)


# Tests of the log-probs of the old policy


async def test_D1_without_the_column_the_old_policy_is_the_current_one(start, sampled_batch):
    run = Run(start)
    metrics = await run.update(sampled_batch)
    assert (metrics["ratio_mean"], metrics["ppo_kl"]) == (1.0, 0.0)
    assert "same_policy_gap" not in metrics  # the batch has no old log-probs to compare with
    other = Run(start)
    again = await other.update(await other.prepared(sampled_batch))
    assert metrics["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-5)
    assert apart(await run.weights(), await other.weights()) < 1e-6


async def test_the_pass_before_the_update_gives_the_entropies_of_the_old_policy(start, sampled_batch):
    found = await Run(start).log_probs(sampled_batch)
    assert sorted(found.keys()) == ["entropies", "old_log_probs"]
    entropies = found.values("entropies")
    assert bool((entropies > 0).all())
    assert float(entropies.max()) <= math.log(AutoConfig.from_pretrained(start).vocab_size) + 1e-5


# Tests of token selectors


def test_a_selector_sees_the_rows_of_its_mini_batch_and_no_others():
    """The two trained tokens of highest entropy in rows 0 and 2 are selected, although row 1 has more entropy."""
    from rltrain.batch.data_proto import jagged

    config = compose(["algorithm.loss_mode=top_entropy", "algorithm.loss.entropy_fraction=0.4"])[0].algorithm
    batch = DataProto.from_dict({"responses": jagged([[1, 1], [1], [1, 1, 1]], torch.int64)}).with_values(
        "responses", response_mask=torch.tensor([True] * 5 + [False]),
        entropies=torch.tensor([0.5, 0.1, 9.0, 0.2, 0.4, 8.0]),
    )  # fmt: skip

    def chosen(minibatches, per_epoch, epoch=0):
        return in_epoch(with_selected(batch, minibatches, per_epoch, config), epoch).values("selected").tolist()

    assert chosen([[2, 0]], 1) == [True, False, False, False, True, False]
    assert chosen([[1]], 1) == [False, False, True, False, False, False]
    assert chosen([[]], 1) == [False] * 6
    assert chosen([], 1) == [False] * 6
    assert chosen([[2, 0], [1]], 2) == [True, False, True, False, True, False]
    plain = compose([])[0].algorithm
    assert with_selected(batch, [[0]], 1, plain) is batch
    assert in_epoch(batch, 0) is batch


def test_a_token_is_selected_in_each_epoch_by_the_mini_batch_of_that_epoch():
    from rltrain.batch.data_proto import jagged

    config = compose(["algorithm.loss_mode=top_entropy", "algorithm.loss.entropy_fraction=0.5"])[0].algorithm
    batch = DataProto.from_dict({"responses": jagged([[1], [1], [1], [1]], torch.int64)}).with_values(
        "responses", response_mask=torch.tensor([True] * 4), entropies=torch.tensor([0.1, 0.2, 0.3, 0.4])
    )
    made = with_selected(batch, [[0, 1], [2, 3], [0, 2], [1, 3]], 2, config)
    assert made.values("selected").shape == (4, 2)
    assert in_epoch(made, 0).values("selected").tolist() == [False, True, False, True]
    assert in_epoch(made, 1).values("selected").tolist() == [False, False, True, True]
    assert in_epoch(made[[3, 1]], 1).values("selected").tolist() == [True, False]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [2, 9]])
async def test_a_mini_batch_has_its_share_selected_whatever_the_rest_of_the_batch_holds(start, sampled_batch, rows):
    run = Run(start, "algorithm.loss_mode=top_entropy", "algorithm.loss.entropy_fraction=0.5")
    batch = await run.prepared(sampled_batch)
    rest = torch.ones(12, dtype=torch.bool)
    rest[rows] = False
    higher = batch.values("entropies") + 9.0 * rest.repeat_interleave(batch.lengths("responses"))
    metrics = await run.update(batch.with_values("responses", entropies=higher), plan=[rows])
    tokens = int(batch.lengths("responses")[rows].sum())
    assert metrics["selected_fraction"] == pytest.approx((1 + int(0.5 * (tokens - 1))) / tokens)


# Tests of the KL to the reference policy

KL_LOSS = "algorithm.kl_loss.kl_loss_coef=0.5"
FULL = [KL_LOSS, "algorithm.kl_loss.kl_estimator=full"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_D7_at_the_start_the_exact_kl_is_zero_with_zero_gradient(start, sampled_batch, dtype):
    nothing = torch.zeros_like(sampled_batch.values("advantages"))
    run = Run(start, *FULL, f"model.dtype={dtype}")
    metrics = await run.update(await run.prepared(sampled_batch.with_values("responses", advantages=nothing)))
    assert metrics["ref_kl"] == pytest.approx(0, abs=1e-10)
    assert metrics["grad_norm"] == pytest.approx(0, abs=1e-5)
    reward = Run(
        start, "algorithm.kl_in_reward.kl_coef=1", "algorithm.kl_in_reward.kl_estimator=full", f"model.dtype={dtype}"
    )
    assert float((await reward.prepared(sampled_batch)).values("full_kl").abs().max()) < 1e-9


async def test_a_reference_in_bfloat16_holds_no_more_and_agrees_with_the_actor_to_the_last_bit(start, sampled_batch):
    run = Run(start, "algorithm.kl_loss.kl_loss_coef=1", "model.dtype=bfloat16")
    batch = await run.prepared(sampled_batch)
    assert torch.equal(batch.values("ref_log_probs"), batch.values("old_log_probs"))
    reference = run.process.host.roles["reference"].model
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in run.worker.model.parameters()} == {torch.float32}


async def test_D5_the_exact_kl_pulls_back_to_the_reference(start, sampled_batch):
    """A policy far from the reference moves back towards the reference when the KL is the only loss term."""
    run = Run(start, *FULL, "actor.lr=3e-4")
    for _ in range(3):
        await run.update(await run.prepared(sampled_batch))
    nothing = torch.zeros_like(sampled_batch.values("advantages"))
    batch = sampled_batch.with_values("responses", advantages=nothing)
    kls = [(await run.update(await run.prepared(batch)))["ref_kl"] for _ in range(4)]
    assert kls[0] > 1e-4
    assert kls[-1] < kls[0]


@pytest.mark.parametrize(
    ("overrides", "columns"),
    [
        ([KL_LOSS], ["ref_log_probs"]),
        (FULL, ["ref_hidden"]),
        ([*FULL, "algorithm.kl_in_reward.kl_coef=0.1"], ["ref_hidden", "ref_log_probs"]),
        (["algorithm.kl_in_reward.kl_coef=0.1", "algorithm.kl_in_reward.kl_estimator=full"], ["ref_hidden"]),
    ],
)
async def test_the_reference_ships_only_what_the_kl_terms_read(start, sampled_batch, overrides, columns):
    run = Run(start, *overrides)
    found = await run.referred(sampled_batch)
    assert sorted(found.keys()) == columns
    if "ref_hidden" in columns:
        width = run.worker.model.config.hidden_size
        assert found.values("ref_hidden").shape == (len(sampled_batch.values("responses")), width)


async def test_the_head_of_the_reference_is_kept_only_for_the_exact_kl_and_stays_as_it_was(start, sampled_batch):
    assert Run(start, KL_LOSS).worker.ref_head is None
    run = Run(start, *FULL)
    before = run.worker.ref_head.clone()
    await run.update(await run.prepared(sampled_batch))
    assert torch.equal(run.worker.ref_head, before)


async def test_teachers_that_are_the_reference_have_no_output_heads_of_their_own(start):
    hints = ", ".join(f"{{name: {name}, path: reference, prompt_template: '{name}{{prompt}}'}}" for name in "ab")
    teachers = [f"algorithm.distillation.teachers=[{hints}]", "algorithm.distillation.teacher_column=x"]
    worker = Run(start, "algorithm=distill", *teachers).worker
    assert worker.teacher_heads == {}
    assert torch.equal(worker.ref_head, worker.model.get_output_embeddings().weight)
    sampled = Run(start, "algorithm=distill", *teachers, "algorithm.distillation.kl=sampled").worker
    assert (sampled.ref_head, sampled.teacher_heads) == (None, {})
