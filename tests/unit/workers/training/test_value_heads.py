"""Tests of critics for models that transformers has no token classifier for: a value head on the base model."""

import time

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.data.value_models import value_model
from rltrain.settings.compose import compose
from tests.attention_families import FAMILIES
from workers.models.loading import load_model
from workers.models.packed_forward import pack, response_values
from workers.training.critic import CriticWorker
from workers.training.dispatch import Minibatch

pytestmark = pytest.mark.usefixtures("process_group")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
# The hidden states of OPT are wider than the states that the value head sees.
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": True}
KINDS = {
    "olmo": {}, "olmo2": {}, "granite": {"logits_scaling": 4.0}, "cohere": {"logit_scale": 0.1},
    "gemma3_text": FAMILIES["gemma3_text"], "olmoe": FAMILIES["olmoe"], "opt": OPT,
}  # fmt: skip


def saved(folder, kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES | KINDS[kind]))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=KINDS)
def path(request, tmp_path):
    return saved(tmp_path / "model", request.param)


def critic(path):
    return CriticWorker(compose(["placement=inprocess", "rollout=hf", "algorithm=ppo", "critic.lr=1e-2"])[0], path)


def taught(made, batch, steps=2):
    """Let a critic learn returns of 1."""
    tokens = int(batch.lengths("responses").sum())
    batch = batch.with_values("responses", values=torch.zeros(tokens), returns=torch.ones(tokens))
    plan = [Minibatch([[0, 1, 2, 3, 4], list(range(5, 12))], tokens, 12)]
    return [made.update(batch, plan).losses["value_loss"] for _ in range(steps)]


def values_one_at_a_time(made, path, batch):
    """Return the values (R,), computed row by row from transformers' own base model and the critic's weights."""
    base = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    prefix = f"{made.model.base_model_prefix}."
    state = {name.removeprefix(prefix): one for name, one in made.model.state_dict().items() if name.startswith(prefix)}
    base.load_state_dict(state)
    found = []
    for prompt, response in rows_of(batch):
        states = base(torch.tensor([prompt + response]), use_cache=False).last_hidden_state[0]
        found.append((states @ made.model.score.weight[0])[len(prompt) - 1 : -1])
    return torch.cat(found).detach()


def rows_of(batch):
    for row in range(len(batch)):
        yield batch[[row]].values("prompts").tolist(), batch[[row]].values("responses").tolist()


def test_values_are_a_linear_function_of_the_base_models_states(path, sampled_batch):
    made, plan = critic(path), [[0, 5, 2], [1, 3, 4, 6, 7], [8, 9, 10, 11]]
    assert not made.compute_values(sampled_batch, plan).values("values").any()
    losses = taught(made, sampled_batch)
    assert losses[1] < losses[0]
    found = made.compute_values(sampled_batch, plan).values("values")
    expected = values_one_at_a_time(made, path, sampled_batch[[row for rows in plan for row in rows]])
    assert found.abs().max() > 1e-3
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_F4_a_critic_comes_back_bitwise_from_a_checkpoint_and_goes_on_bitwise(path, sampled_batch, tmp_path):
    made = critic(path)
    taught(made, sampled_batch, 1)
    before = {name: tensor.clone() for name, tensor in made.state.tensors().items()}
    made.save_state(str(tmp_path))
    while (written := made.saved_state()) is None:
        time.sleep(0.01)
    assert written.error == ""
    other = critic(path)
    other.load_state(str(tmp_path))
    assert "model.score.weight" in before
    assert same(other.state.tensors(), before)
    assert taught(made, sampled_batch) == taught(other, sampled_batch)
    assert same(other.state.tensors(), made.state.tensors())
    other.load_state(None)
    assert not other.model.score.weight.any()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "olmoe"])
def test_B6_the_values_and_gradients_of_a_pack_are_those_of_its_rows_in_float64(kind, share, tmp_path):
    """OLMoE is left out, because transformers cannot compute experts in float64."""
    path = saved(tmp_path, kind)
    model = load_model(value_model(path), path, new_head=True, first_value=some_head).double()
    apart, together = gradients(model, [[row] for row in BATCH], share), gradients(model, [BATCH], share)
    # All families but OPT compute their norms in float32 even if the model is in float64.
    tolerance = 1e-10 if kind == "opt" else 1e-5
    for one, other in zip(apart, together, strict=True):
        assert one.dtype == torch.float64
        assert (one - other).abs().max() <= tolerance * one.abs().max().clamp(min=1e-3)


# Two rows begin with the same tokens, and one response is empty.
BATCH = [([5, 6, 7, 8], [20, 21, 22]), ([9], [30]), ([5, 6, 7, 8], [23, 24, 25, 26, 27]), ([3, 4], [])]


def some_head(name, shape):
    return torch.linspace(-1, 1, shape.numel()).view(shape)


def gradients(model, packs, share):
    """Return the values of all rows, which are computed in the given packs, and the gradients of a function of them."""
    values = []
    for rows in packs:
        columns = {"prompts": [prompt for prompt, _ in rows], "responses": [response for _, response in rows]}
        batch = DataProto.from_dict({name: jagged(ids, torch.int64) for name, ids in columns.items()})
        values.append(response_values(model, pack(batch, share=share)))
    found = torch.cat(values)
    loss = (found * torch.linspace(-1, 1, len(found))).sum()
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, used, allow_unused=True)
    return [found.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("kind", ["mistral", "qwen3_moe"])
def test_families_with_a_token_classifier_in_transformers_keep_it(kind, tmp_path):
    CONFIG_MAPPING[kind](**SIZES).save_pretrained(tmp_path)
    assert value_model(str(tmp_path)) is AutoModelForTokenClassification
