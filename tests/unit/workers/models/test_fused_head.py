"""Tests of the fused head, which takes the place of a model's last layer.

The log-probs, entropies and exact KL of the fused head must equal the values computed from all logits at once.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rltrain.algorithms.chunks import CHUNK_SIZES, MAX_ROWS, chunks
from rltrain.batch.data_proto import DataProto, jagged
from workers.models.fused_head import replaced_head, token_log_probs
from workers.models.packed_forward import PACKED, pack, policy_output

ROOT = Path(__file__).parents[4]
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "initializer_range": 0.3, "attn_implementation": PACKED,
}  # fmt: skip


def inputs(r=7, v=11, h=4, *, dtype=torch.float64, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((r, h), (v, h), (v,))]
    hidden, head, offset = (tensor.requires_grad_() for tensor in made)
    return hidden, head, offset if bias else None, torch.randint(v, (r,), generator=generator)


def oracle(hidden, head, bias, targets, temperature):
    """Compute log-probs and entropies by definition, from all logits at once."""
    logits = torch.nn.functional.linear(hidden, head, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    log_pi = logits.log_softmax(-1)
    return log_pi.gather(1, targets[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)


def values_and_gradients(log_probs, entropies, leaves):
    # each token has a different weight in the loss
    weights = torch.linspace(-1, 2, len(log_probs), dtype=torch.float64)
    outputs = [log_probs] if entropies is None else [log_probs, entropies]
    loss = sum((weights.roll(n) * output).sum() for n, output in enumerate(outputs))
    return [
        *(output.detach() for output in outputs),
        *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]),
    ]


def furthest(actual, expected) -> float:
    """Return the largest difference between actual and expected tensors, relative to the largest expected value."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a - e).abs().max()) / max(float(e.abs().max()), 1e-30) for a, e in pairs)


@pytest.mark.parametrize("chunk_size", [1, 3, 20, 77, 10**6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_any_chunk_gives_the_values_and_gradients_of_all_logits_at_once(temperature, entropies, bias, chunk_size):
    hidden, head, offset, targets = inputs(bias=bias)
    found = token_log_probs(
        hidden, head, targets, bias=offset, temperature=temperature, entropies=entropies, chunk_size=chunk_size
    )
    expected = oracle(hidden, head, offset, targets, temperature)
    wanted = values_and_gradients(expected[0], expected[1] if entropies else None, (hidden, head, offset))
    assert furthest(values_and_gradients(*found, (hidden, head, offset)), wanted) < 1e-12


@pytest.mark.parametrize("chunk_size", [1, 3, 20, 77, 10**6])
@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("unused", [[2], [0, 1, 2, 3, 4, 8, 9, 10]], ids=["one word", "whole chunks"])
def test_words_with_a_logit_of_minus_infinity_are_as_if_they_were_not_there(unused, entropies, chunk_size):
    """Vocabulary entries of probability 0 do not change values or gradients, because 0 log 0 counts as 0."""
    hidden, head, bias, _ = inputs()
    with torch.no_grad():
        bias[unused] = -torch.inf
    used = [word for word in range(11) if word not in unused]
    place = torch.arange(7) % len(used)
    targets = torch.tensor(used)[place]
    found = token_log_probs(hidden, head, targets, bias=bias, entropies=entropies, chunk_size=chunk_size)
    *actual, to_hidden, to_head, to_bias = values_and_gradients(*found, (hidden, head, bias))
    small_head, small_bias = head.detach()[used].requires_grad_(), bias.detach()[used].requires_grad_()
    expected = oracle(hidden, small_head, small_bias, place, 1.0)
    wanted = values_and_gradients(expected[0], expected[1] if entropies else None, (hidden, small_head, small_bias))
    assert furthest([*actual, to_hidden, to_head[used], to_bias[used]], wanted) < 1e-12
    assert (to_head[unused] == 0).all()
    assert (to_bias[unused] == 0).all()


def test_more_rows_than_a_chunk_is_high_add_up(monkeypatch):
    monkeypatch.setattr("rltrain.algorithms.chunks.MAX_ROWS", 3)
    for dtype, limit in ((torch.float64, 1e-12), (torch.bfloat16, 0.02)):
        hidden, head, bias, targets = inputs(r=8, dtype=dtype)
        found = token_log_probs(hidden, head, targets, bias=bias, entropies=True, chunk_size=12)
        wanted = values_and_gradients(*oracle(hidden, head, bias, targets, 1.0), (hidden, head, bias))
        assert furthest(values_and_gradients(*found, (hidden, head, bias)), wanted) < limit


def test_gradients_pass_gradcheck_in_float64():
    hidden, head, bias, targets = inputs(r=3, v=5, h=2)

    def function(x, w, b):
        return token_log_probs(x, w, targets, bias=b, temperature=0.7, entropies=True, chunk_size=4)

    assert torch.autograd.gradcheck(function, (hidden, head, bias))


def test_in_float32_values_and_gradients_are_within_1e_5():
    hidden, head, _, targets = inputs(r=50, v=3000, h=32, dtype=torch.float32, bias=False)
    found = token_log_probs(hidden, head, targets, temperature=0.7, entropies=True, chunk_size=2048)
    wide = [hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()]
    wanted = values_and_gradients(*oracle(*wide, None, targets, 0.7), wide)
    assert furthest(values_and_gradients(*found, (hidden, head)), wanted) < 1e-5


def test_E1_bfloat16_log_probs_are_those_of_bfloat16_logits_in_float32():
    hidden, head, bias, targets = inputs(r=50, v=300, h=32, dtype=torch.bfloat16)
    found = token_log_probs(hidden, head, targets, bias=bias, temperature=0.7, entropies=True, chunk_size=1024)
    wanted = oracle(hidden, head, bias, targets, 0.7)
    assert found[0].dtype == torch.float32
    assert furthest([part.detach() for part in found], [part.detach() for part in wanted]) < 1e-5
    gradients = values_and_gradients(*found, (hidden, head, bias))[2:]
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 3
    assert furthest(gradients, values_and_gradients(*wanted, (hidden, head, bias))[2:]) < 0.02


def test_an_entropy_near_zero_beside_large_logits_keeps_its_digits():
    generator = torch.Generator().manual_seed(0)
    logits = 100 + 15 * torch.randn(20, 60, generator=generator)
    targets = torch.zeros(20, dtype=torch.int64)
    _, entropies = token_log_probs(logits, torch.eye(60), targets, entropies=True, chunk_size=64)
    _, expected = oracle(logits.double(), torch.eye(60).double(), None, targets, 1.0)
    assert expected.min() < 1e-4  # the test is meaningful only if some entropies are low
    assert torch.allclose(entropies.double(), expected, rtol=1e-5, atol=5e-7)


def test_only_the_part_that_a_loss_uses_needs_a_gradient():
    hidden, head, bias, targets = inputs()
    for part in (0, 1):
        found = token_log_probs(hidden, head, targets, bias=bias, entropies=True, chunk_size=20)[part]
        expected = oracle(hidden, head, bias, targets, 1.0)[part]
        got, want = (torch.autograd.grad(x.sum(), (hidden, head, bias)) for x in (found, expected))
        assert furthest(got, want) < 1e-12
    (got,) = torch.autograd.grad(token_log_probs(hidden, head.detach(), targets, chunk_size=20)[0].sum(), hidden)
    (want,) = torch.autograd.grad(oracle(hidden, head, None, targets, 1.0)[0].sum(), hidden)
    assert furthest([got], [want]) < 1e-12


def test_B3_no_token_gives_empty_results_and_zero_gradients():
    hidden, head, bias, targets = inputs(r=0)
    found = token_log_probs(hidden, head, targets, bias=bias, entropies=True, chunk_size=4)
    assert [part.shape for part in found] == [(0,), (0,)]
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), (hidden, head, bias))
    assert [bool((gradient == 0).all()) for gradient in gradients] == [True] * 3


def test_a_target_outside_the_vocabulary_has_no_log_prob():
    hidden, head, _, targets = inputs()
    assert bool(token_log_probs(hidden, head, targets + 11, chunk_size=20)[0].isnan().all())


class Largest(TorchDispatchMode):
    """Dispatch mode that records the number of elements in the largest tensor that any operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf))])
        return out


@pytest.mark.parametrize("entropies", [False, True])
def test_nothing_larger_than_a_chunk_is_made_however_many_tokens_there_are(entropies):
    for tokens in (256, 1024):
        hidden, head, _, targets = inputs(r=tokens, v=512, h=4, dtype=torch.float32)
        with Largest() as seen:
            found = token_log_probs(hidden, head, targets, entropies=entropies, chunk_size=8192)
            sum(part.sum() for part in found if part is not None).backward()
        assert seen.numbers == 8192
    assert oracle(hidden, head, None, targets, 1.0)[0].shape == (1024,)


def test_chunks_cover_every_logit_once_and_none_is_too_large():
    for positions, words, size in ((7, 11, 5), (1, 1, 1), (MAX_ROWS * 2 + 1, 9, 4 * MAX_ROWS), (3, 10, 100), (0, 4, 8)):
        seen = torch.zeros(positions, words)
        for rows, columns in chunks(positions, words, size):
            assert seen[rows, columns].numel() <= size
            seen[rows, columns] += 1
        assert bool((seen == 1).all())


# Tests of the fused head inside a model, where it replaces the last layer


def batch_of(rows=6, seed=0) -> DataProto:
    generator = torch.Generator().manual_seed(seed)

    def ids(length):
        return torch.randint(1, 40, (length,), generator=generator).tolist()

    prompts, responses = [ids(2 + n % 3) for n in range(rows)], [ids(n % 5) for n in range(rows)]
    return DataProto.from_dict({"prompts": jagged(prompts, torch.int64), "responses": jagged(responses, torch.int64)})


def plain(model, packed, temperature):
    """Compute log-probs and entropies by definition, from all logits of the model's own forward pass."""
    logits = model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, attention_mask=None, use_cache=False,
        logits_to_keep=packed.predicting, packed=packed,
    ).logits[0]  # fmt: skip
    log_pi = (logits / temperature).log_softmax(-1)
    return log_pi.gather(1, packed.targets[:, None])[:, 0], -(log_pi.exp() * log_pi).sum(-1)


def qwen(*, tied, bias=False):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied))
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(40))
    return model


MODELS = {
    "tied": lambda: qwen(tied=True),
    "untied": lambda: qwen(tied=False),
    "bias": lambda: qwen(tied=False, bias=True),
    "granite, which divides its logits": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    "cohere, which multiplies its logits": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_log_probs_entropies_and_gradients_of_its_own_logits(name, monkeypatch):
    monkeypatch.setitem(CHUNK_SIZES, "cpu", 64)
    torch.manual_seed(0)
    model, packed = MODELS[name]().double(), pack(batch_of())
    output = policy_output(model, packed, temperature=0.7, entropies=True)
    leaves = list(model.parameters())
    wanted = values_and_gradients(*plain(model, packed, 0.7), leaves)
    assert furthest(values_and_gradients(output.log_probs, output.entropies, leaves), wanted) < 1e-10


class Shifted(Qwen2ForCausalLM):
    """A model that adds a constant to its logits, without a config setting that says so."""

    def forward(self, *arguments, **options):
        found = super().forward(*arguments, **options)
        found.logits = found.logits + 3
        return found


def test_what_a_model_does_to_its_logits_and_we_do_not_know_is_refused():
    model = Shifted(Qwen2Config(**SIZES))
    model.set_attn_implementation(PACKED)
    with pytest.raises(ValueError, match=r"Shifted turns a logit of 64 into 67 after its last layer, which training"):
        policy_output(model, pack(batch_of()), temperature=1.0)
    assert "forward" not in vars(model.lm_head)


def test_a_last_layer_that_is_not_linear_is_refused():
    model = qwen(tied=False)
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(16, 40))
    message = "its last layer is Sequential, but log-probs can be computed only from a plain nn.Linear"
    with pytest.raises(ValueError, match=message), replaced_head(model, lambda *_: None):
        pass


def test_the_exact_kl_to_another_model_comes_from_the_same_pass(monkeypatch):
    monkeypatch.setitem(CHUNK_SIZES, "cpu", 64)
    model, other, packed = qwen(tied=True).double(), qwen(tied=False).double(), pack(batch_of())
    with torch.no_grad():
        reference = policy_output(other, packed, temperature=0.7, hidden=True).hidden, other.lm_head.weight
        own = policy_output(model, packed, temperature=0.7, hidden=True).hidden, model.lm_head.weight.clone()
    logits, ref_logits = own[0] @ own[1].T / 0.7, reference[0] @ reference[1].T / 0.7
    expected = (logits.softmax(-1) * (logits.log_softmax(-1) - ref_logits.log_softmax(-1))).sum(-1)
    output = policy_output(model, packed, temperature=0.7, reference=reference)
    # the tolerance is this large because Qwen2's norm layers compute in float32
    assert furthest([output.full_kl.detach()], [expected.detach()]) < 1e-6
    assert output.entropies is None
    same = policy_output(model, packed, temperature=0.7, reference=own).full_kl
    assert bool((same == 0).all())


# Tests of models that are sharded over ranks, where each rank runs this test file as a program


def sharded_gradients(name, batch, plan):
    """Return the full gradients of a sharded model after one rank's micro-batches.

    Before the micro-batches, the model computes log-probs without gradients.
    """
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with torch.no_grad():
        before = policy_output(model, pack(batch[plan[0]]), temperature=0.7).log_probs
    for rows in plan:
        output = policy_output(model, pack(batch[rows]), temperature=0.7, entropies=True)
        if rows is plan[0]:
            assert torch.equal(before, output.log_probs.detach())
        loss = (output.log_probs.square() + 0.5 * output.entropies).sum()
        (loss * dist.get_world_size()).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def run_rank(rank, ranks, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    CHUNK_SIZES["cpu"] = 64
    batch = batch_of()
    # Rows 0 and 5 have no response token.
    # With two ranks, the second micro-batch of each rank has no response token.
    plans = {1: [[[0, 1, 2, 3], [4, 5]]], 2: [[[1, 4, 2], [0]], [[3], [5, 0]]]}[ranks]
    covered = [[row for plan in plans for rows in plan for row in rows]][0]
    for name in MODELS:
        found = sharded_gradients(name, batch, plans[rank])
        torch.manual_seed(0)
        model = MODELS[name]().double()
        log_probs, entropies = plain(model, pack(batch[covered]), 0.7)
        (log_probs.square() + 0.5 * entropies).sum().backward()
        for parameter, value in model.named_parameters():
            # the tolerance is this large because Cohere's norm layers compute in float32
            assert furthest([found[parameter]], [value.grad]) < 1e-6, (name, parameter)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_A2_sharded_over_ranks_the_gradients_are_those_of_one_process_and_all_logits(ranks, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, __file__, str(rank), str(ranks), str(tmp_path)] for rank in range(ranks)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) for command in commands]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
