"""Tests that a supervised loss gives the same updates for any number of ranks, sequence groups and token budgets."""

import pytest
import pytest_asyncio
from ranks import LORA, config_of, group, replayed, with_log_probs
from test_training_ranks import same

from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_assignment import minibatches
from rltrain.data.prompts import Prompt
from rltrain.trajectories.batch_building import supervised_batch
from tests.policy_weights import weights_of
from workers.training.policy_update import update_policy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
COEF, STEPS = "algorithm.sft_coef=0.5", 4
SPLITS = {
    "two ranks": (2, []),
    "two ranks and small packs": (2, ["actor.max_tokens_per_microbatch=40"]),
    "four ranks, more than answers": (4, []),
    "ranks that share packs": (2, ["placement.sequence_ranks=2"]),
    "ranks that share small packs in pairs": (4, ["placement.sequence_ranks=2", "actor.max_tokens_per_microbatch=20"]),
    "small packs": (0, ["actor.max_tokens_per_microbatch=40"]),
}


def answers_of(batch: DataProto, step: int) -> DataProto:
    """Return answers of 1, 3, 7 and 9 tokens to the prompts of the groups 1, 2, 4 and 5; groups 0 and 3 have none."""
    prompts = {}
    for uid in (1, 2, 4, 5):
        ids = batch[batch.batch["uid"] == uid][0].values("prompts").tolist()
        answer = [48 + (uid + step + place) % 10 for place in range(2 * uid - 1)]
        prompts[uid] = Prompt(uid, "", ids, {}, None, answer)
    return supervised_batch(prompts)


async def train(start: str, ranks: int, *overrides: str):
    """Train on replayed rollouts and supervised answers, and return the metrics of every step and the final weights."""
    config = config_of(COEF, f"placement.actor_ranks={ranks or 1}", *overrides)
    workers, history = await group(config, start, ranks), []
    budget, actor = config.actor.max_tokens_per_microbatch, workers["actor"]
    for step in range(STEPS):
        batch = await with_log_probs(workers, replayed(step), max_tokens=budget)
        plan = minibatches(batch.batch["uid"].tolist(), 2, 1, seed=0, step=step)
        answers = answers_of(batch, step)
        history.append(
            await update_policy(actor, batch, plan, config, max_tokens=budget, entropy_coef=0.001, supervised=answers)
        )
    return history, await weights_of(actor)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_rank(ray_here, start):
    return await train(start, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_rank_with_adapters(ray_here, start):
    return await train(start, 0, LORA)


@pytest.mark.parametrize("name", SPLITS)
async def test_A2_A3_F2_any_split_over_ranks_gives_the_metrics_and_weights_of_one_rank(one_rank, start, name):
    ranks, overrides = SPLITS[name]
    same(await train(start, ranks, *overrides), one_rank)


@pytest.mark.parametrize("name", ["two ranks", "ranks that share packs"])
async def test_A2_A3_adapters_learn_the_same_answers_on_any_number_of_ranks(one_rank_with_adapters, start, name):
    ranks, overrides = SPLITS[name]
    same(await train(start, ranks, LORA, *overrides), one_rank_with_adapters)


def test_the_answers_of_every_step_are_counted_and_learned(one_rank, one_rank_with_adapters):
    for history, _ in (one_rank, one_rank_with_adapters):
        assert [step["sft_tokens"] for step in history] == [1 + 3 + 7 + 9] * STEPS
        assert all(step["sft_loss"] > 0 for step in history)
