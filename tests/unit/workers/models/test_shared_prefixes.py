"""Tests that packs with shared tokens give the outputs and gradients of packs in which every row has its own tokens."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from rltrain.batch.data_proto import DataProto, jagged
from workers.models.packed_forward import PACKED, pack, policy_output, response_values

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
SYSTEM = list(range(2, 22))
PROMPT, OTHER = [*SYSTEM, 30, 31, 32, 33, 34], [*SYSTEM, 40, 41]


def answer(seed, length):
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


TURNS = answer(50, 120)  # actions and observations of 20 tokens in turn
KINDS = {
    "a group": [(PROMPT, answer(seed, length)) for seed, length in enumerate([9, 1, 40, 0, 12])],
    "equal answers": [(PROMPT, answer(seed, length)) for seed, length in [(1, 30), (1, 30), (1, 22), (2, 3)]],
    "prompts with a common beginning": [(PROMPT, answer(3, 8)), (OTHER, answer(4, 7)), (PROMPT, answer(5, 6))],
    "turns": [(PROMPT + TURNS[: 40 * turn], TURNS[40 * turn : 40 * turn + 20]) for turn in (1, 0, 2)],
    "groups among others": [([1], [2, 3]), (PROMPT, answer(6, 5)), ([9] * 30, answer(7, 50)), (PROMPT, answer(8, 5))],
}  # fmt: skip


def batch_of(rows):
    prompts, answers = zip(*rows, strict=True)
    return DataProto.from_dict(
        {"prompts": jagged(prompts, torch.int64), "responses": jagged(answers, torch.int64)}
    )  # fmt: skip


def with_contexts(rows):
    """Return the rows with a second context in each, which begins alike in all rows at the fourth response token."""
    made = batch_of([(prompt, [*found[:3], *SYSTEM, *found[3:], 5]) for prompt, found in rows])
    begins = torch.cat([torch.arange(len(found) + len(SYSTEM) + 1) == 3 for _, found in rows])
    return made.with_values("responses", context_starts=begins)


BATCHES = {name: batch_of(rows) for name, rows in KINDS.items()} | {
    "several contexts": with_contexts([(PROMPT, answer(seed, 10)) for seed in range(3)])
}


def made(config, kind=AutoModelForCausalLM):
    torch.manual_seed(0)
    return kind.from_config(config, attn_implementation=PACKED).double().eval()


def compare(batch, model, run, tolerance=1e-6):
    """Check that the outputs and the gradients of a pack with shared tokens equal those of a pack without."""
    found = []
    for share in (False, True):
        packed = pack(batch, share=share)
        assert (packed.layout.keys is not None) is share, "the batch must have tokens to share"
        outputs = run(packed)
        weights = [torch.linspace(-1, 1, len(output), dtype=torch.float64) for output in outputs]
        total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
        used = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append((outputs, torch.autograd.grad(total, used, allow_unused=True)))
    (expected, wanted), (got, grads) = found
    for output, want in zip(got, expected, strict=True):
        torch.testing.assert_close(output, want, rtol=tolerance, atol=tolerance)
    for grad, want in zip(grads, wanted, strict=True):
        if want is not None:
            # The gradient of the critic's last bias is the sum of the weights, which is 0 but for rounding.
            assert float((grad - want).abs().max()) <= tolerance * max(float(want.abs().max()), 1e-9)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, PhiConfig])
def test_A1_B6_shared_tokens_change_neither_log_probs_nor_entropies_nor_gradients(name, config):
    model, batch = made(config(**SIZES)), BATCHES[name]
    # Of these models, all in float64, Llama and Qwen2 compute their norms in float32.
    reference = torch.randn(len(batch.values("responses")), 32, dtype=torch.float64)
    head = torch.randn(64, 32, dtype=torch.float64)

    def run(packed):
        output = policy_output(
            model, packed, temperature=0.7, entropies=True, hidden=True, reference=(reference, head)
        )  # fmt: skip
        return output.log_probs, output.entropies, output.full_kl, output.hidden.sum(-1)

    compare(batch, model, run, 1e-10 if config is PhiConfig else 1e-6)


@pytest.mark.parametrize("name", BATCHES)
def test_shared_tokens_change_no_value_of_a_critic(name):
    model = made(Qwen3Config(**SIZES, num_labels=1), AutoModelForTokenClassification)
    compare(BATCHES[name], model, lambda packed: [response_values(model, packed).double()])


def test_shared_tokens_with_checkpointed_activations_give_the_same_gradients():
    model = made(LlamaConfig(**SIZES))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    compare(BATCHES["turns"], model, lambda packed: [policy_output(model, packed, temperature=1.0).log_probs])


def test_the_last_token_of_each_row_is_where_a_reward_model_reads_its_score():
    rows = [(PROMPT + found, [1]) for _, found in KINDS["a group"]]
    alone, shared = (pack(batch_of(rows), share=share) for share in (False, True))
    assert alone.input_ids[0, alone.ends].tolist() == shared.input_ids[0, shared.ends].tolist()
    assert shared.position_ids[0, shared.ends].tolist() == [len(prompt) - 1 for prompt, _ in rows]


def test_each_distinct_token_is_in_the_pack_once():
    packed = pack(BATCHES["a group"])
    assert packed.input_ids.size(1) == len(PROMPT) + 8 + 0 + 39 + 0 + 11
    assert pack(BATCHES["turns"]).input_ids.size(1) == len(PROMPT) + 5 * 20 - 1


@pytest.mark.parametrize("field", ["input_ids", "position_ids", "predicting", "targets", "ends"])
def test_editing_one_answer_of_a_group_moves_nothing_of_the_others(field):
    rows = KINDS["a group"]
    edited = [(prompt, [60, *found[1:]] if number == 2 else found) for number, (prompt, found) in enumerate(rows)]
    before, after = getattr(pack(batch_of(rows)), field), getattr(pack(batch_of(edited)), field)
    assert before.shape == after.shape
    assert int((before != after).sum()) == (1 if field in ("input_ids", "targets") else 0)


def test_packs_without_common_tokens_are_the_packs_that_do_not_share():
    batch = batch_of([([5, 6, 7, 8, 9], answer(1, 9)), ([15, 6, 7, 8, 9], answer(2, 9))])
    shared, alone = pack(batch), pack(batch, share=False)
    assert shared.layout.keys is None
    for field in ("input_ids", "position_ids", "predicting", "targets", "ends"):
        assert torch.equal(getattr(shared, field), getattr(alone, field))
    assert [b.queries.tolist() for b in shared.layout.attention_batches] == [
        b.queries.tolist() for b in alone.layout.attention_batches
    ]
