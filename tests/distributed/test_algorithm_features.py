"""Tests that features of algorithms give the same training for any number of ranks and any token budget."""

import pytest
import torch
from ranks import LOG_PROBS, built, processes_of, replayed
from transformers import AutoModelForCausalLM

from rltrain.algorithms import TOKEN_SELECTORS
from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_assignment import minibatches
from rltrain.settings.compose import compose
from rltrain.settings.schema import Config
from rltrain.trajectories.token_rewards import with_random_draws
from tests.policy_weights import weights_of
from workers.placement import ROLES
from workers.training.actor import ActorWorker
from workers.training.dispatch import OVERHEAD_METRICS
from workers.training.policy_update import update_policy
from workers.training.shared_columns import FORWARD, log_probs_columns
from workers.training.worker_group import WorkerGroup

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
SPLITS = [(1, 8192), (1, 40), (2, 8192), (2, 40)]  # pairs of (number of ranks, token budget)
# Settings with which a token selector chooses many but not all tokens. Other token selectors use their defaults.
KNOBS = {
    "clip_cov": ["clip_cov_ratio=0.2", "clip_cov_lb=0.0", "clip_cov_ub=99.0"],
    "kl_cov": ["kl_cov_ratio=0.2"],
}


def config_of(*overrides: str) -> Config:
    sizes = ["trainer.prompts_per_step=6", "trainer.prompts_per_minibatch=3", "actor.lr_schedule=constant"]
    return compose([*sizes, "rollout.temperature=0.8", *overrides])[0]


async def workers_of(ranks: int, config: Config, path: str, roles=("actor",)) -> dict[str, WorkerGroup]:
    """Build workers in the test process for 1 rank, or in two rank processes for 2 ranks.

    Tests with other configs may share the rank processes.
    """
    processes = await processes_of({1: 0, 2: 2}[ranks])
    return {role: WorkerGroup(await built(processes, role, ROLES[role], config, path)) for role in roles}


# Tests of token selectors


@pytest.mark.parametrize("name", TOKEN_SELECTORS.names())
async def test_A1_A2_a_selector_chooses_from_the_whole_mini_batch_whatever_ranks_and_budget(start, name):
    """The old policy differs slightly from the current policy.

    The penalty |log r| of kl_cov has a kink at 0, so the gradient of the penalty would depend on rounding if the
    policies were equal.
    """
    knobs = [f"algorithm.loss.{text}" for text in KNOBS.get(name, [])]
    config = config_of(f"algorithm.loss_mode={name}", "algorithm.old_log_probs=rollout", *knobs)
    found = []
    for ranks, budget in SPLITS:
        actor, history = (await workers_of(ranks, config, start))["actor"], []
        for step in range(2):
            batch = replayed(step)
            columns = log_probs_columns(config.algorithm)
            batch = batch.union(await actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=budget))
            assert "entropies" in batch
            moved = batch.values("old_log_probs") + 0.05 * batch.values("advantages").sign()
            batch = with_random_draws(batch.with_values("responses", old_log_probs=moved), config, step)
            plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
            history.append(await update_policy(actor, batch, plan, config, max_tokens=budget, entropy_coef=0.0))
        found.append((history, await weights_of(actor)))
    first, weights = found[0]
    assert all(0 < step["selected_fraction"] < 1 for step in first)
    for history, others in found[1:]:
        for got, expected in zip(history, first, strict=True):
            assert got["selected_fraction"] == expected["selected_fraction"]
            for key, value in expected.items():
                assert key in OVERHEAD_METRICS or got[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
        for key, tensor in weights.items():
            assert (others[key] - tensor).abs().max() < 1e-4, key


# Tests of the language-model loss of correct answers


async def test_A1_A2_the_loss_of_correct_answers_is_that_of_one_process_whatever_ranks_and_budget(start):
    """The correct answers are unevenly distributed over ranks and micro-batches: one prompt has most of them."""
    config = config_of("algorithm.positive_nll_coef=0.5")
    correct = torch.isin(torch.arange(24), torch.tensor([1, 4, 5, 6, 7, 13, 23]))
    found = []
    for ranks, budget in SPLITS:
        actor, history = (await workers_of(ranks, config, start))["actor"], []
        for step in range(2):
            batch = replayed(step)
            row = correct.repeat_interleave(batch.lengths("responses"))
            batch = batch.with_values("responses", positive_mask=row)
            plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
            history.append(await update_policy(actor, batch, plan, config, max_tokens=budget, entropy_coef=0.0))
        found.append((history, await weights_of(actor)))
    first, weights = found[0]
    assert all(step["positive_nll"] > 0 and 0 < step["positive_fraction"] < 1 for step in first)
    for history, others in found[1:]:
        for got, expected in zip(history, first, strict=True):
            for key, value in expected.items():
                assert key in OVERHEAD_METRICS or got[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
        for key, tensor in weights.items():
            assert (others[key] - tensor).abs().max() < 1e-4, key


# Tests of the exact KL


def logits_of(model, batch: DataProto, row: int) -> torch.Tensor:
    """Return the logits of a row's response tokens, divided by the temperature."""
    prompt, response = batch[row].values("prompts"), batch[row].values("responses")
    logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
    return logits[len(prompt) - 1 : len(prompt) + len(response) - 1] / 0.8


def plain_kl(model, reference, batch: DataProto, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each response token's log-prob, and the exact KL: the sum over the vocabulary of `p * (log p - log q)`."""
    log_p = logits_of(model, batch, row).log_softmax(-1)
    log_q = logits_of(reference, batch, row).log_softmax(-1).detach()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return log_p.gather(1, batch[row].values("responses")[:, None])[:, 0], kl


def plain_training(path: str, config: Config, batch: DataProto, steps: int):
    """Train with REINFORCE plus 0.5 times the exact KL, computing each row from its full logits.

    Return the KL and the gradient norm of each step, and the trained model.
    """
    model, reference = (AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager") for _ in range(2))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.actor.lr, betas=(config.actor.beta1, config.actor.beta2),
        weight_decay=config.actor.weight_decay,
    )  # fmt: skip
    mask, advantages = batch.padded("response_mask"), batch.padded("advantages")
    kls, norms = [], []
    for _ in range(steps):
        total, divergence = 0.0, 0.0
        for row in range(23):
            log_probs, kl = plain_kl(model, reference, batch, row)
            trained = mask[row, : len(kl)]
            total = total - (log_probs * advantages[row, : len(kl)])[trained].sum() + 0.5 * kl[trained].sum()
            divergence += float(kl[trained].detach().sum())
        optimizer.zero_grad()
        (total / mask.sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.actor.max_grad_norm)))
        optimizer.step()
        kls.append(divergence / int(mask.sum()))
    return kls, norms, model, reference


FULL = ["algorithm.kl_loss.kl_estimator=full", "algorithm.kl_loss.kl_loss_coef=0.5", "algorithm.loss_mode=reinforce"]


@pytest.fixture(scope="module")
def expected(start):
    return plain_training(start, config_of(*FULL), replayed(0), 2)


@pytest.mark.parametrize(("ranks", "budget"), SPLITS)
async def test_A2_the_exact_kl_in_the_loss_is_that_of_all_logits_in_one_process(start, expected, ranks, budget):
    kls, norms, model, _ = expected
    config = config_of(*FULL)
    workers = await workers_of(ranks, config, start, ("actor", "reference"))
    batch = replayed(0)
    batch = batch.union(await workers["reference"].rows(LOG_PROBS["reference"], batch, FORWARD, max_tokens=budget))
    assert "ref_log_probs" not in batch  # the exact KL needs no log-probs of the reference
    actor, rows = workers["actor"], [list(range(24))]
    updates = [await update_policy(actor, batch, rows, config, max_tokens=budget, entropy_coef=0.0) for _ in range(2)]
    assert kls[0] == pytest.approx(0, abs=1e-9)
    assert kls[1] > 1e-5
    for update, kl, norm in zip(updates, kls, norms, strict=True):
        assert update["ref_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-8)
        assert update["kl_loss"] == pytest.approx(update["ref_kl"], rel=1e-6, abs=1e-12)  # both: means over tokens
        assert update["grad_norm"] == pytest.approx(norm, rel=1e-4)
    weights, plain = await weights_of(workers["actor"]), dict(model.named_parameters())
    for key, tensor in weights.items():
        assert (tensor - plain[key].detach()).abs().max() < 1e-5, key


@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_exact_kl_in_the_reward_is_that_of_all_logits(start, ranks):
    """The KL to the reference is measured after an update, so that it is not 0."""
    config = config_of("algorithm.kl_in_reward.kl_estimator=full", "algorithm.kl_in_reward.kl_coef=0.1", FULL[2])
    workers = await workers_of(ranks, config, start, ("actor", "reference"))
    actor = workers["actor"]
    await update_policy(actor, replayed(0), [list(range(24))], config, max_tokens=40, entropy_coef=0.0)
    batch = replayed(1)
    batch = batch.union(await workers["reference"].rows(LOG_PROBS["reference"], batch, FORWARD, max_tokens=40))
    assert "ref_log_probs" not in batch
    columns = log_probs_columns(config.algorithm)
    found = await actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=40)
    assert sorted(found.keys()) == ["entropies", "full_kl", "old_log_probs"]
    model, reference = (AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager") for _ in range(2))
    model.load_state_dict(await weights_of(workers["actor"]), strict=False)
    kl = batch.union(found).padded("full_kl")
    assert float(kl.max()) > 1e-4
    for row in range(23):
        _, plain = plain_kl(model, reference, batch, row)
        assert kl[row, : len(plain)].tolist() == pytest.approx(plain.tolist(), rel=1e-3, abs=1e-7)
