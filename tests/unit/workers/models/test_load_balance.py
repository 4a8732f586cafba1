"""Tests of `actor.load_balance_coef`: the load-balancing loss of a mixture of experts, for each sequence."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.base.errors import ConfigError
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from rltrain.tasks.tiny_model import tiny_model
from tests.attention_families import FAMILIES
from workers.models.fsdp import prepare
from workers.models.load_balance import RouterScores, balance_loss, mean_balance_loss
from workers.models.packed_forward import PACKED, pack, policy_output

MIXTURES = ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
PROMPT = [5, 6, 7, 8, 9]
PROMPTS = [PROMPT, [9], PROMPT, [3, 4, 5]]
RESPONSES = [[20, 21, 22, 23], [30, 31], [40, 41, 42], []]
TRAINED = torch.tensor([True, True, True, False])


def made(family):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model, RouterScores(model, "model.path=M")


def batch_of(rows):
    columns = {
        "prompts": jagged([PROMPTS[row] for row in rows], torch.int64),
        "responses": jagged([RESPONSES[row] for row in rows], torch.int64),
    }
    return DataProto.from_dict(columns)


def loss_of(model, scores, rows, *, share=True):
    packed = pack(batch_of(rows), share=share)
    with scores.kept() as kept:
        policy_output(model, packed, temperature=1.0)
    return mean_balance_loss(kept, packed, TRAINED[rows], num_sequences=3)


def by_hand(logits, experts):
    """Return the loss of one sequence, with one term for each expert and token."""
    tokens, count = logits.shape
    total = torch.zeros((), dtype=torch.float64)
    for expert in range(count):
        used = sum(1 for token in range(tokens) if expert in experts[token].tolist())
        share = count * used / (experts.size(1) * tokens)
        mass = sum(torch.exp(logits[token, expert]) / torch.exp(logits[token]).sum() for token in range(tokens))
        total = total + share * mass / tokens
    return total


def test_the_loss_and_its_gradient_are_those_of_the_papers_formula():
    torch.manual_seed(0)
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    experts = logits.detach().topk(2).indices
    places, lengths = torch.tensor([0, 1, 2, 0, 1, 3, 4, 5, 6]), torch.tensor([3, 4, 2])
    found = balance_loss(logits, experts, places, lengths)
    expected = [by_hand(logits[part], experts[part]) for part in places.split(lengths.tolist())]
    assert torch.allclose(found, torch.stack(expected), atol=1e-12)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(found @ weights, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(torch.stack(expected) @ weights, logits)
    assert torch.allclose(gradient, wanted, atol=1e-12)


def test_the_loss_is_one_for_equal_use_and_larger_if_all_tokens_use_the_same_experts():
    places, lengths = torch.arange(4), torch.tensor([4])
    equal = balance_loss(torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]), places, lengths)
    assert equal.item() == pytest.approx(1)
    collapsed = torch.tensor([[50.0, 50.0, 0.0, 0.0]]).repeat(4, 1)
    assert balance_loss(collapsed, torch.tensor([[0, 1]]).repeat(4, 1), places, lengths).item() == pytest.approx(4 / 2)


@pytest.mark.parametrize("family", MIXTURES)
def test_A1_any_micro_batches_and_shared_prefixes_give_the_same_gradient(family):
    model, scores = made(family)
    parameters = [one for name, one in model.named_parameters() if "gate.weight" in name or "router.weight" in name]
    assert parameters
    wanted = torch.autograd.grad(loss_of(model, scores, [0, 1, 2, 3]), parameters)
    for split, share in (([[0, 1], [2, 3]], True), ([[0], [1], [2], [3]], True), ([[0, 1, 2, 3]], False)):
        total = sum(loss_of(model, scores, rows, share=share) for rows in split)
        for found, expected in zip(torch.autograd.grad(total, parameters), wanted, strict=True):
            assert expected.abs().max() > 0
            assert torch.allclose(found, expected, atol=1e-5, rtol=1e-3)


def test_recomputed_activations_give_the_same_gradient_and_are_not_kept():
    plain, recomputed = made("qwen3_moe"), made("qwen3_moe")
    config = compose(["model.activation_checkpointing=true"])[0].model
    for layer in recomputed[0].model.layers:
        prepare(layer, config)
    grads = []
    for model, scores in (plain, recomputed):
        (loss_of(model, scores, [0, 1, 2, 3]) + loss_of(model, scores, [1, 2])).backward()
        grads.append([layer.mlp.gate.weight.grad for layer in model.model.layers])
        with scores.kept() as kept:
            pass
        assert kept == []
    for found, expected in zip(*grads, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement.actor_ranks=2", "placement.context_ranks=2"], "2 ranks that split the tokens of a row"),
        (["model.compile=true"], "a compiled layer does not give the scores"),
        (["actor.load_balance_coef=-1"], "load_balance_coef"),
    ],
)
def test_settings_with_which_the_loss_cannot_be_computed_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(["actor.load_balance_coef=0.01", *overrides])


def test_a_model_without_routers_is_refused():
    with pytest.raises(
        ConfigError, match=r"^model.path=M: actor.load_balance_coef needs .* use actor.load_balance_coef=0"
    ):
        RouterScores(tiny_model(), "model.path=M")
