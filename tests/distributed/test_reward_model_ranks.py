"""A reward model over gloo ranks."""

import pytest
import torch
from ranks import hosts_of
from transformers import AutoModelForSequenceClassification

from rltrain.compose import compose
from rltrain.data import Prompt
from rltrain.reward_models import reward_models
from rltrain.tasks.tokenizer import char_tokenizer
from workers.group import WorkerGroup
from workers.placement import ROLES, build

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]
SAMPLES = [(f"{n * 37}=", "x" * (n % 5) + str(n)) for n in range(13)]


@pytest.mark.parametrize("ranks", [0, 2])
def test_scores_over_ranks_are_those_of_transformers_one_at_a_time(reward_model, ranks):
    """Thirteen rows, and then one, for which the second rank has nothing to compute."""
    config, _ = compose([f"reward.models=[{reward_model}]"])
    hosts = hosts_of(ranks)
    role = "reward_model judge"
    hosts.wait(build(hosts, role, ROLES["reward_model"], config, reward_model))
    (made,) = reward_models(config, [WorkerGroup(hosts, role)])
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(reward_model).eval(), char_tokenizer()
    with torch.no_grad():
        expected = [float(model(**tokenizer(p + r, return_tensors="pt")).logits[0, 0]) for p, r in SAMPLES]
    for count, budget in ((13, 8192), (13, 16), (1, 8192)):
        made.max_tokens = budget
        found = made.scores([(Prompt(0, prompt, [1], {}), response) for prompt, response in SAMPLES[:count]])
        assert found == pytest.approx(expected[:count], abs=1e-5)
