"""Tests that packed forward passes equal forward passes over one row at a time."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.tasks.tiny_model import tiny_model
from workers.models.packed_forward import PACKED, microbatch, pack, policy_output, row_pass, unpack

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [9], [3, 4, 5, 6, 7, 8], [11, 12]]
RESPONSES = [[20, 21, 22, 23], [30], [], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]]


def models():
    torch.manual_seed(0)
    return {
        "qwen2": tiny_model(),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    }


def batch_of(prompts, responses) -> DataProto:
    return DataProto.from_dict(
        {"prompts": jagged(prompts, torch.int64), "responses": jagged(responses, torch.int64)}
    )  # fmt: skip


class Counting(torch.nn.Module):
    """A fake model that predicts the current token id plus 1 with near certainty."""

    def __init__(self):
        super().__init__()
        self.config, self.head = LlamaConfig(**SIZES), torch.nn.Linear(128, 128, bias=False)
        self.head.weight.data = 50 * (2 * torch.eye(128) - 1)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, logits_to_keep, **_):
        hidden = torch.nn.functional.one_hot((input_ids + 1) % 128, 128).float()
        return type("Output", (), {"logits": self.head(hidden[:, logits_to_keep])})


def log_prob_pass(model, batch, microbatches) -> DataProto:
    def columns(_, packed):
        return {"old_log_probs": policy_output(model, packed, temperature=1.0).log_probs}

    return row_pass(model, columns, batch, microbatches)


def one_at_a_time(model, prompts, responses, temperature: float) -> torch.Tensor:
    """Compute the expected log-probs: each row separately, with eager attention."""
    model.set_attn_implementation("eager")
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        if response:
            logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0] / temperature
            predicting = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            found.append(predicting.gather(1, torch.tensor(response)[:, None])[:, 0])
    model.set_attn_implementation(PACKED)
    return torch.cat(found)


@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3"])
def test_B6_packed_log_probs_entropies_and_gradients_are_those_of_one_row_at_a_time(name):
    model = models()[name].double()
    model.set_attn_implementation(PACKED)
    expected = one_at_a_time(model, PROMPTS, RESPONSES, 0.7)
    weights = torch.randn(len(expected), dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    packed = pack(batch_of(PROMPTS, RESPONSES))
    output = policy_output(model, packed, temperature=0.7, entropies=True)
    got, entropy = output.log_probs, output.entropies
    assert torch.allclose(got.double(), expected, atol=2e-6)
    grads = torch.autograd.grad((got * weights).sum(), list(model.parameters()))
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad - want).abs().max() <= 1e-5 * want.abs().max()
    assert entropy is not None
    assert bool((entropy > 0).all())


def test_B6_editing_one_row_of_a_pack_changes_no_other():
    model = tiny_model()
    model.set_attn_implementation(PACKED)
    before = log_prob_pass(model, batch_of(PROMPTS, RESPONSES), [[0, 1, 2, 3]])
    edited = [*RESPONSES[:3], [7, *RESPONSES[3][1:]]]
    after = log_prob_pass(model, batch_of(PROMPTS, edited), [[0, 1, 2, 3]])
    assert torch.equal(before.padded("old_log_probs")[:3], after.padded("old_log_probs")[:3])
    assert not torch.equal(before.padded("old_log_probs")[3], after.padded("old_log_probs")[3])


def test_B1_B6_any_order_and_any_micro_batches_give_a_row_the_same_log_probs():
    model = tiny_model()
    model.set_attn_implementation(PACKED)
    batch = batch_of(PROMPTS, RESPONSES)
    whole = log_prob_pass(model, batch, [[0, 1, 2, 3]])
    for plan in ([[0], [1], [2], [3]], [[3, 0], [2, 1]], [[2], [], [1, 3, 0]]):
        order = torch.tensor([row for rows in plan for row in rows])
        parts = log_prob_pass(model, batch, plan).reorder(order.argsort())
        assert torch.allclose(parts.values("old_log_probs"), whole.values("old_log_probs"), atol=2e-6)


def test_B5_a_model_that_surely_counts_up_has_log_probs_near_zero():
    """If predictions and targets were shifted by one token, the log-probs would be about -100."""
    output = policy_output(Counting(), pack(batch_of([[1, 2], [50]], [[3, 4, 5], [51]])), temperature=1.0)
    assert bool((output.log_probs > -1e-6).all())
    assert (output.entropies, output.full_kl, output.hidden) == (None, None, None)


def test_hidden_states_are_those_that_the_tokens_are_predicted_from_and_leave_no_hook_behind():
    model = tiny_model()
    model.set_attn_implementation(PACKED)
    packed = pack(batch_of(PROMPTS, RESPONSES))
    output = policy_output(model, packed, temperature=0.7, hidden=True)
    again = output.hidden @ model.get_output_embeddings().weight.T / 0.7
    chosen = again.log_softmax(-1).gather(1, packed.targets[:, None])[:, 0]
    assert torch.allclose(chosen, output.log_probs, atol=1e-6)
    assert "forward" not in vars(model.get_output_embeddings())


def test_a_pass_gives_columns_of_any_width_from_the_rows_and_their_pack():
    batch = batch_of(PROMPTS, RESPONSES)

    def columns(part, packed):
        assert len(packed.targets) == len(part.values("responses"))
        ids = part.values("responses").float()
        return {"wide": torch.stack([ids, -ids], -1), "ids": ids}

    result = row_pass(torch.nn.Identity(), columns, batch, [[3, 0], [], [2, 1]])
    assert sorted(result.keys()) == ["ids", "wide"]
    flat = [float(token) for row in (3, 0, 2, 1) for token in RESPONSES[row]]
    assert result.values("ids").tolist() == flat
    assert result.values("wide").tolist() == [[token, -token] for token in flat]
    assert result.lengths("ids").tolist() == [11, 4, 0, 1]


def test_B3_an_empty_response_predicts_nothing_and_a_batch_of_them_runs():
    model = tiny_model()
    model.set_attn_implementation(PACKED)
    result = log_prob_pass(model, batch_of([[5], [6, 7]], [[], []]), [[0, 1]])
    assert len(result.values("old_log_probs")) == 0
    assert len(result) == 2


def test_A6_an_empty_micro_batch_still_runs_and_trains_nothing(process_group):
    batch = batch_of(PROMPTS, RESPONSES).with_values(
        "responses", response_mask=torch.ones(sum(map(len, RESPONSES)), dtype=torch.bool)
    )
    part, packed, columns = microbatch(batch, [])
    assert len(part) == 1
    assert packed.input_ids.numel() > 0
    assert not bool(columns["response_mask"].any())
    assert bool(columns["mask"].any())


def test_hidden_states_of_the_reference_are_never_padded(process_group):
    tokens = sum(map(len, RESPONSES))
    batch = batch_of(PROMPTS, RESPONSES).with_values(
        "responses", ref_hidden=torch.ones(tokens, 8), ref_log_probs=torch.ones(tokens)
    )
    part, _, columns = microbatch(batch, [3, 0])
    assert sorted(columns) == ["mask", "ref_log_probs"]
    assert part.values("ref_hidden").shape == (len(RESPONSES[3]) + len(RESPONSES[0]), 8)


def test_unpack_puts_values_at_real_slots_and_is_differentiable():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    padded = unpack(values, mask)
    assert padded.tolist() == [[1.0, 0.0], [2.0, 3.0]]
    padded.square().sum().backward()
    assert values.grad.tolist() == [2.0, 4.0, 6.0]


def test_rows_of_like_length_share_a_bucket_and_no_bucket_wastes_more_than_a_quarter():
    batch = batch_of([[1]] * 9, [[n] * n for n in (40, 39, 31, 30, 12, 11, 10, 3, 1)])
    for bucket in pack(batch).layout.attention_batches:
        assert float(bucket.real.float().mean()) >= 0.75


def test_models_load_with_packed_attention(start):
    from workers.models.loading import load_model

    assert load_model(AutoModelForCausalLM, start).config._attn_implementation == PACKED
