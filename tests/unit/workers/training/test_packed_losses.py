"""Tests that for every loss, actor and critic give equal results whether contexts are packed or separate.

Each row of the batch has one context, except row 3, which has two.
"""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rltrain.algorithms import POLICY_LOSSES, TOKEN_SELECTORS, aggregate_loss, value_loss
from rltrain.algorithms.aggregation import LOSS_AGG_MODES
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from workers.models.packed_forward import PACKED, microbatch, pack, policy_output, response_values, unpack
from workers.training.actor import actor_loss
from workers.training.minibatch_statistics import in_epoch, with_selected

pytestmark = pytest.mark.usefixtures("process_group")
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [9], [3, 4, 5, 6, 7, 8], [11, 12], [30, 31]]
RESPONSES = [[20, 21, 22, 23], [30], [], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [1, 2, 3]]
TOKENS = sum(map(len, RESPONSES))
SECOND_CONTEXT = 3  # Position in the response of row 3 at which the row's second context starts.
TERMS = [
    "algorithm.kl_loss.kl_loss_coef=0.5", "algorithm.entropy_coef=0.3", "algorithm.squared_log_ratio_coef=0.2",
]  # fmt: skip
# names of all attention functions that rltrain registers in transformers
ATTENTIONS = [name for name in ALL_ATTENTION_FUNCTIONS if name.startswith("rltrain")]
# PACKS has one plan of a single micro-batch, and one plan of two micro-batches
PACKS = ([[0, 1, 2, 3, 4]], [[3, 0], [4, 2, 1]])


def model_of(kind):
    """Return a model in float64, except for norms, rotary embeddings and critic values, which are always float32."""
    torch.manual_seed(0)
    model = kind(LlamaConfig(**SIZES, num_labels=1, initializer_range=0.2, attn_implementation="eager"))
    return model.double().eval()


def batch_of() -> DataProto:
    """Return a batch with every column that a loss may read.

    The second context of row 3 starts with an observation of two tokens, which is not trained on.
    """
    generator = torch.Generator().manual_seed(1)

    def normal():
        return torch.randn(TOKENS, generator=generator, dtype=torch.float64)

    mask, starts = torch.ones(TOKENS, dtype=torch.bool), torch.zeros(TOKENS, dtype=torch.bool)
    begin = sum(map(len, RESPONSES[:3])) + SECOND_CONTEXT
    mask[begin : begin + 2], starts[begin] = False, True
    made = DataProto.from_dict(
        {"prompts": jagged(PROMPTS, torch.int64), "responses": jagged(RESPONSES, torch.int64)}
    ).with_values("responses", response_mask=mask, context_starts=starts)
    old = -3.5 + 0.5 * normal()
    columns = {name: old + 0.3 * normal() for name in ("ref_log_probs", "rollout_log_probs")}
    columns |= {"old_log_probs": old, "advantages": normal(), "entropies": normal().abs(), "values": normal()}
    draws = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    return made.with_values("responses", **columns, returns=normal(), random_draws=draws)


def alone(model, row):
    """Compute the logits that predict a row's response tokens. The model runs on each context of the row separately."""
    prompt, response = PROMPTS[row], RESPONSES[row]
    if row != 3:
        return model(torch.tensor([prompt + response]), use_cache=False).logits[0][len(prompt) - 1 : -1]
    contexts = prompt + response[:SECOND_CONTEXT], response[SECOND_CONTEXT:]
    first, second = (model(torch.tensor([ids]), use_cache=False).logits[0] for ids in contexts)
    # The first token of the second context is not trained on, so no loss reads the logits for this token. In their
    # place, the function returns the last logits of the first context.
    return torch.cat([first[len(prompt) - 1 :], second[:-1]])


def counts_of(batch):
    mask = batch.padded("response_mask")
    return {"num_tokens": int(mask.sum()), "num_sequences": int(mask.any(-1).sum()), "max_response_length": 16}


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def assert_equal(found, expected):
    # the comparison is meaningful only if some values are not near 0
    assert max(float(want.abs().max()) for want in expected) > 1e-3
    for got, want in zip(found, expected, strict=True):
        assert (got - want).abs().max() <= 3e-6 * max(float(want.abs().max()), 1e-3)


def actor_columns(batch, rows, model, *, packed):
    """Return the columns of a micro-batch, with log-probs and entropies of the current policy."""
    _, pack, columns = microbatch(batch, rows)
    if packed:
        output = policy_output(model, pack, temperature=0.7, entropies=True)
        log_probs, entropies = output.log_probs, output.entropies
    else:
        log_softmax = torch.cat([alone(model, row) / 0.7 for row in rows]).log_softmax(-1)
        log_probs = log_softmax.gather(1, pack.targets[:, None])[:, 0]
        entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    return columns | {
        "log_probs": unpack(log_probs, columns["mask"]), "entropy": unpack(entropies, columns["mask"])
    }  # fmt: skip


@pytest.fixture(scope="module", params=ATTENTIONS)
def forwards(request):
    """Return (model, columns row by row, columns pack by pack, token counts) for a batch, with autograd graphs."""
    model, batch = model_of(LlamaForCausalLM), batch_of()
    for name in TOKEN_SELECTORS.names():
        algorithm = compose([f"algorithm.loss_mode={name}"])[0].algorithm
        batch = in_epoch(with_selected(batch, [[0, 1, 2, 3, 4]], 1, algorithm), 0)
    single = [actor_columns(batch, [row], model, packed=False) for row in range(5)]
    model.set_attn_implementation(request.param)
    packs = [[actor_columns(batch, rows, model, packed=True) for rows in plan] for plan in PACKS]
    return model, single, packs, counts_of(batch)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("edited", [0, 1, 3, 4])
def test_B6_editing_one_row_of_a_pack_leaves_every_other_as_it_was_bit_for_bit(edited, attention):
    model = model_of(LlamaForCausalLM).float()
    model.set_attn_implementation(attention)
    row_of = torch.tensor([row for row, response in enumerate(RESPONSES) for _ in response])
    changed = ([list(row) for row in PROMPTS], [list(row) for row in RESPONSES])
    changed[0][edited][0], changed[1][edited][0] = 38, 39
    found = []
    for prompts, responses in ((PROMPTS, RESPONSES), changed):
        batch = DataProto.from_dict(
            {"prompts": jagged(prompts, torch.int64), "responses": jagged(responses, torch.int64)}
        )
        output = policy_output(model, pack(batch), temperature=0.7, entropies=True)
        output.log_probs[row_of != edited].sum().backward()
        gradient = [parameter.grad for parameter in model.parameters()]
        found.append((output.log_probs.detach(), output.entropies.detach(), gradient))
        model.zero_grad(set_to_none=True)
    for before, after in zip(found[0][:2], found[1][:2], strict=True):
        assert torch.equal(before[row_of != edited], after[row_of != edited])
        assert not torch.equal(before[row_of == edited], after[row_of == edited])
    for before, after in zip(found[0][2], found[1][2], strict=True):
        # editing one row does not change the gradients of any other row
        assert torch.allclose(before, after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_B6_every_loss_of_a_pack_has_the_gradient_of_its_rows_one_at_a_time(name, forwards):
    model, single, packs, counts = forwards
    chosen = compose([f"algorithm.loss_mode={name}", *TERMS])[0].algorithm

    def loss_of(micro, algorithm):
        return sum(actor_loss(columns, algorithm, entropy_coef=0.3, **counts)[0] for columns in micro)

    for mode in LOSS_AGG_MODES:
        algorithm = replace(chosen, loss_agg_mode=mode)
        expected = gradients(loss_of(single, algorithm), model)
        for micro in packs:
            assert_equal(gradients(loss_of(micro, algorithm), model), expected)


def test_B6_the_critics_loss_of_a_pack_has_the_gradient_of_its_rows_one_at_a_time():
    model, batch = model_of(LlamaForTokenClassification), batch_of()

    def loss_of(plan, *, packed):
        total = torch.zeros((), dtype=torch.float64)
        for rows in plan:
            _, pack, columns = microbatch(batch, rows)
            values = response_values(model, pack) if packed else torch.cat([alone(model, row)[:, 0] for row in rows])
            values, mask = unpack(values, columns["mask"]), columns["response_mask"]
            losses, _ = value_loss(values, columns["values"], columns["returns"], mask, clip_range_value=9.0)
            total = total + aggregate_loss(losses, mask, "token-mean", num_tokens=counts_of(batch)["num_tokens"])
        return total

    expected = gradients(loss_of([[row] for row in range(5)], packed=False), model)
    model.set_attn_implementation(PACKED)
    for plan in PACKS:
        assert_equal(gradients(loss_of(plan, packed=True), model), expected)
