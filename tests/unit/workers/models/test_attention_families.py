"""Tests of packs of models with sliding windows, soft caps and attention sinks, against transformers' own attention."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rltrain.algorithms import full_kl
from rltrain.batch.data_proto import DataProto, jagged
from tests.attention_families import EXPERTS, FAMILIES
from workers.models.attention_batches import attention_in_batches
from workers.models.fused_head import token_log_probs
from workers.models.packed_forward import PACKED, pack, policy_output, response_values

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
# The models with experts are in float32, because transformers cannot compute experts in float64. The other models are
# in float64, but compute their norms in float32.
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-5}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
PROMPTS = [PROMPT, [9], PROMPT, [3, 4, 5], PROMPT]
RESPONSES = [[20, 21, 22, 23], [30, 31], list(range(40, 55)), [], [33] * 7]


# Small caps change small scores clearly.
CAPS = {"gemma2": {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.1}}


def made(family, kind=AutoModelForCausalLM, attention="eager", **options):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES[family] | CAPS.get(family, {}) | options)
    dtype = torch.float32 if set(EXPERTS) & set(FAMILIES[family]) else torch.float64
    model = kind.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name or parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def batch_of(prompts, responses):
    columns = {"prompts": jagged(prompts, torch.int64), "responses": jagged(responses, torch.int64)}
    return DataProto.from_dict(columns)


def one_at_a_time(model):
    """Return log-probs and entropies (R,) of the rows, each computed by itself with eager attention."""
    log_probs, entropies = [], []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        if response:
            logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0] / 0.7
            found = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            log_probs.append(found.gather(1, torch.tensor(response)[:, None])[:, 0])
            entropies.append(-(found.exp() * found).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def close(found, expected):
    apart = (found - expected).detach().abs().max()
    return float(apart) <= TOLERANCES[found.dtype] * float(expected.detach().abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_B6_packed_attention_gives_the_log_probs_and_gradients_of_the_models_own_attention(family, share):
    model = made(family)
    expected = one_at_a_time(model)
    weights = [torch.linspace(-1, 1, len(expected[0])), torch.ones(len(expected[0]))]
    wanted = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(expected, weights, strict=True)), list(model.parameters()), allow_unused=True
    )
    model.set_attn_implementation(PACKED)
    output = policy_output(model, pack(batch_of(PROMPTS, RESPONSES), share=share), temperature=0.7, entropies=True)
    found = output.log_probs, output.entropies
    assert close(found[0], expected[0])
    assert close(found[1], expected[1])
    grads = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(found, weights, strict=True)), list(model.parameters()), allow_unused=True
    )
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad is None) == (want is None)
        assert grad is None or close(grad, want)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"softcap": 0.5}, {"sinks": torch.linspace(-1, 1, 4).double(), "window": 5}],
    ids=["plain", "window", "soft cap", "sinks and window"],
)
def test_A3_queries_of_any_part_of_a_pack_attend_as_in_the_whole_pack(options, share):
    """A part can begin and end within a segment, and be as short as one token."""
    torch.manual_seed(0)
    layout = (packed := pack(batch_of(PROMPTS, RESPONSES), share=share)).layout
    count = packed.input_ids.size(1)
    q, k, v = (torch.randn(count, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    whole = attention_in_batches(q, k, v, layout, **options)
    gradients = torch.autograd.grad((whole**2).sum(), (q, k, v))
    for size in (1, 2, 5, 7, count):
        bounds = [(begin, min(begin + size, count)) for begin in range(0, count, size)]
        parts = [attention_in_batches(q[begin:end], k, v, layout.part(begin, end), **options) for begin, end in bounds]
        assert close(torch.cat(parts), whole)
        found = torch.autograd.grad((torch.cat(parts) ** 2).sum(), (q, k, v))
        assert all(close(one, wanted) for one, wanted in zip(found, gradients, strict=True))


def test_a_part_without_tokens_has_one_query_that_attends_to_the_first_token():
    packed = pack(batch_of(PROMPTS, RESPONSES))
    count = packed.input_ids.size(1)
    value = torch.randn(count, 2, 8)
    out = attention_in_batches(torch.randn(1, 4, 8), value, value, packed.layout.part(count, count))
    assert torch.allclose(out[0], value[0].repeat_interleave(2, 0))


def test_padded_queries_of_an_attention_batch_give_no_nan_gradients():
    """Answers of different lengths follow prompts of different lengths, and the window is shorter than the padding."""
    model = made("gemma2", attention=PACKED, sliding_window=2)
    prompts = [[1] * 20, [1] * 20, [2] * 5, [2] * 5]
    batch = batch_of(prompts, [[30] * 2, [31] * 3, [32] * 14, [33] * 16])
    shared, alone = (
        policy_output(model, pack(batch, share=share), temperature=1.0).log_probs for share in (True, False)
    )
    assert close(shared, alone)
    for found, wanted in zip(
        *(torch.autograd.grad(one.sum(), list(model.parameters()), allow_unused=True) for one in (shared, alone)),
        strict=True,
    ):
        assert found is None or close(found, wanted)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
def test_attention_scores_in_parts_give_the_same(family, monkeypatch):
    monkeypatch.setattr("workers.models.capped_attention.SCORES", 60)
    test_B6_packed_attention_gives_the_log_probs_and_gradients_of_the_models_own_attention(family, True)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
def test_the_setting_of_the_family_changes_the_log_probs(family):
    """Check that the tests of this module would notice a missing window, cap or sink."""
    changed = {
        "gemma2": [{"final_logit_softcapping": None}, {"attn_logit_softcapping": None}, {"sliding_window": 64}],
        "gpt_oss": [{"sliding_window": 64}],
        "mistral": [{"sliding_window": None}],
    }
    packed = pack(batch_of(PROMPTS, RESPONSES))
    usual = policy_output(made(family, attention=PACKED), packed, temperature=1.0).log_probs
    for setting in changed[family]:
        other = policy_output(made(family, attention=PACKED, **setting), packed, temperature=1.0).log_probs
        assert float((other - usual).detach().abs().max()) > 1e-3, setting
    if family == "gpt_oss":
        model = made(family, attention=PACKED)
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.data.fill_(-1e4)
        assert float((policy_output(model, packed, temperature=1.0).log_probs - usual).detach().abs().max()) > 1e-3


def test_a_critic_of_a_model_with_a_sliding_window_has_the_values_of_its_own_attention():
    model = made("mistral", AutoModelForTokenClassification, num_labels=1)
    rows = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    expected = [
        model(torch.tensor([row]), use_cache=False).logits[0, len(prompt) - 1 : -1, 0]
        for row, prompt in zip(rows, PROMPTS, strict=True)
        if len(row) > len(prompt)
    ]
    model.set_attn_implementation(PACKED)
    assert close(response_values(model, pack(batch_of(PROMPTS, RESPONSES))), torch.cat(expected).float())


@pytest.mark.parametrize("chunk_size", [None, 40])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_soft_cap_of_the_logits_acts_before_the_temperature(chunk_size, temperature):
    torch.manual_seed(1)
    hidden, head, other, ref = (torch.randn(9, 8), torch.randn(30, 8), torch.randn(9, 8), torch.randn(30, 8))
    hidden, head, other, ref = (tensor.double() for tensor in (hidden, head, other, ref))
    hidden.requires_grad_()
    head.requires_grad_()
    targets, cap = torch.randint(30, (9,)), 1.5

    def log_softmax(states, weight):
        return (cap * torch.tanh(states @ weight.T / cap) / temperature).log_softmax(-1)

    own = log_softmax(hidden, head)
    expected = (
        own.gather(1, targets[:, None])[:, 0],
        -(own.exp() * own).sum(-1),
        (own.exp() * (own - log_softmax(other, ref))).sum(-1),
    )
    options = {"temperature": temperature, "chunk_size": chunk_size, "softcap": cap}
    found = (
        *token_log_probs(hidden, head, targets, entropies=True, **options),
        full_kl(hidden, head, other, ref, **options),
    )
    weight = torch.linspace(-1, 2, 9, dtype=torch.float64)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        wanted = torch.autograd.grad((want * weight).sum(), (hidden, head), retain_graph=True)
        grads = torch.autograd.grad((got * weight).sum(), (hidden, head), retain_graph=True)
        for one, two in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)
