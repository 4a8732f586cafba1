"""Tests of a reward model's scores over gloo ranks."""

import pytest
import torch
from ranks import built, processes_of
from transformers import AutoModelForSequenceClassification

from rltrain.data.prompts import Prompt
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from rltrain.trajectories.reward_models import reward_models
from workers.placement import ROLES, group_of
from workers.training.shared_columns import SharedColumns

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
SAMPLES = [(f"{n * 37}=", "x" * (n % 5) + str(n)) for n in range(13)]


@pytest.mark.parametrize(
    ("ranks", "divided"), [(0, []), (2, []), (2, ["placement.sequence_ranks=2"]), (2, ["placement.tensor_ranks=2"])]
)
async def test_scores_over_ranks_are_those_of_transformers_one_at_a_time(reward_model, ranks, divided):
    """Score thirteen rows, and then a single row, which leaves the second rank without any row.

    Sequence and tensor parallelism divide only the policy and its other models. Each rank of a reward model has rows
    and a token budget of its own.
    """
    placement = [f"placement.actor_ranks={max(1, ranks)}", *divided]
    config, _ = compose([f"reward.models=[{reward_model}]", *placement])
    role = "reward_model judge"
    group = group_of(role, reward_model, config, SharedColumns())
    group.ranks = await built(await processes_of(ranks), role, ROLES["reward_model"], config, reward_model)
    assert group.size == max(1, ranks)
    (made,) = reward_models(config, [group])
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(reward_model).eval(), char_tokenizer()
    with torch.no_grad():
        expected = [float(model(**tokenizer(p + r, return_tensors="pt")).logits[0, 0]) for p, r in SAMPLES]
    for count, budget in ((13, 8192), (13, 16), (1, 8192)):
        made.max_tokens = budget
        found = await made.scores([(Prompt(0, prompt, [1], {}), response) for prompt, response in SAMPLES[:count]])
        assert found == pytest.approx(expected[:count], abs=1e-5)
