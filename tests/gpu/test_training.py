"""Tests of training on a GPU: kernels, 16-bit products with 32-bit sums, and memory use."""

import copy
import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from workers.models.attention_batches import attention_in_batches
from workers.models.fsdp import Optimizer, device, full, shard
from workers.models.fused_head import token_log_probs
from workers.models.packed_forward import PACKED, pack, policy_output, to_device
from workers.models.varlen_attention import kernel_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("process_group"),
]
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
LENGTHS = [(5, 90), (1, 1), (40, 200), (17, 64), (3, 0)]  # Each pair is (tokens of the prompt, tokens of the answer).
ROUNDING = 2e-2  # Relative rounding error that bfloat16 causes in a few layers.


def small(kind=LlamaConfig):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES), dtype=torch.float32)
    model.set_attn_implementation(PACKED)
    return model.eval()


def batch_of(seed: int = 0, edited: int | None = None) -> DataProto:
    source = torch.Generator().manual_seed(seed)
    rows = [[torch.randint(512, (n,), generator=source).tolist() for n in pair] for pair in LENGTHS]
    if edited is not None:
        rows[edited][1] = [(token + 1) % 512 for token in rows[edited][1]]
    columns = zip(*rows, strict=True)
    return DataProto.from_dict(
        {name: jagged(ids, torch.int64) for name, ids in zip(("prompts", "responses"), columns, strict=True)}
    )


def apart(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of two tensors, divided by the norm of the expected tensor."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of the batch's log-probs, as unsharded tensors on the host."""
    packed = to_device(pack(batch_of()), device())
    found = policy_output(model, packed, temperature=0.7).log_probs
    (found * torch.linspace(-1, 1, len(found), device=found.device)).sum().backward()
    return {name.replace("_orig_mod.", ""): full(p.grad).cpu() for name, p in model.named_parameters()}


def sharded(*overrides: str):
    config, _ = compose(["model.dtype=bfloat16", *overrides])
    return shard(small(), config)


# Tests of attention.


def group() -> DataProto:
    """Return answers to one prompt, which share the prompt's tokens in a pack."""
    rows = batch_of()
    prompts = jagged([list(range(40))] * len(rows), torch.int64)
    return DataProto.from_dict({"prompts": prompts, "responses": rows.batch["responses"]})


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("made", [batch_of, group])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (14, 2)])
@pytest.mark.parametrize("width", [64, 128])
def test_B6_the_kernel_of_all_rows_gives_what_buckets_give_in_float64(heads, width, made, window):
    packed, source = pack(made()), torch.Generator().manual_seed(1)
    assert (packed.layout.keys is not None) is (made is group)
    tokens = packed.input_ids.size(1)
    shapes = [(tokens, heads[0], width), (tokens, heads[1], width), (tokens, heads[1], width)]
    exact = [torch.randn(shape, generator=source, dtype=torch.float64).bfloat16().double() for shape in shapes]
    inputs = [tensor.to(device(), torch.bfloat16).requires_grad_() for tensor in exact]
    exact = [tensor.requires_grad_() for tensor in exact]
    kernel = kernel_for(inputs[0], inputs[2])
    assert kernel is not None, "no attention kernel for this GPU and this version of torch"
    layout = packed.layout.to(device())
    got = kernel(inputs[0], *layout.keys_of_segments(*inputs[1:]), layout.bounds, 0.1, window)
    wanted = attention_in_batches(*exact, packed.layout, scaling=0.1, window=window)
    weights = torch.randn(wanted.shape, generator=source, dtype=torch.float64)
    (got * weights.to(got)).sum().backward()
    (wanted * weights).sum().backward()
    assert apart(got, wanted) < ROUNDING
    for ours, theirs in zip(inputs, exact, strict=True):
        assert apart(ours.grad, theirs.grad) < ROUNDING


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_B6_packed_on_the_gpu_in_bfloat16_is_packed_on_the_cpu_in_float32(kind):
    expected = policy_output(small(kind), pack(batch_of()), temperature=0.7, entropies=True)
    model = small(kind).to(device(), torch.bfloat16)
    got = policy_output(model, to_device(pack(batch_of()), device()), temperature=0.7, entropies=True)
    assert got.log_probs.dtype == torch.float32
    assert apart(got.log_probs, expected.log_probs) < ROUNDING
    assert apart(got.entropies, expected.entropies) < ROUNDING


def test_grouped_heads_in_float32_never_hold_all_scores():
    length, heads = 8192, 8
    row = pack(
        DataProto.from_dict({"prompts": jagged([[1]], torch.int64), "responses": jagged([[1] * length], torch.int64)})
    )
    q, k, v = (torch.randn(length, n, 64, device=device(), requires_grad=True) for n in (heads, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention_in_batches(q, k, v, row.layout.to(device()), scaling=None, dropout=0.0).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * length**2 * 4 / 4


def test_B6_editing_one_row_of_a_pack_changes_no_other_on_the_gpu():
    model = small().to(device(), torch.bfloat16)
    with torch.no_grad():
        before, after = (
            policy_output(model, to_device(pack(batch_of(edited=edited)), device()), temperature=1.0).log_probs.cpu()
            for edited in (None, 2)
        )
    counts = [answer for _, answer in LENGTHS]
    for row, (old, new) in enumerate(zip(before.split(counts), after.split(counts), strict=True)):
        assert torch.equal(old, new) is (row != 2 or not counts[row])


# Tests of weights and gradients.


def test_F1_weights_and_sums_are_float32_where_products_are_bfloat16():
    """If weights of 0.02 were stored in bfloat16, updates of 1e-6 would be rounded away.

    The expected weight updates are computed by a float64 AdamW from the same gradients.
    """
    config, _ = compose(["model.dtype=bfloat16", "actor.lr=1e-6", "actor.lr_warmup_steps=0", "actor.max_grad_norm=1e9"])
    model = shard(small(), config)
    optimizer = Optimizer(list(model.parameters()), config.actor, 1000, max_skipped=0)
    reference = {name: full(p.detach()).double().cpu().clone() for name, p in model.named_parameters()}
    begin = copy.deepcopy(reference)
    exact = torch.optim.AdamW(
        list(reference.values()), lr=1e-6, betas=(config.actor.beta1, config.actor.beta2),
        weight_decay=config.actor.weight_decay,
    )  # fmt: skip
    for _ in range(20):
        found = gradients(model)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        for name, parameter in reference.items():
            parameter.grad = found[name].double()
        exact.step()
        optimizer.step()
    for name, parameter in model.named_parameters():
        moved, expected = full(parameter.detach()).cpu().double() - begin[name], reference[name] - begin[name]
        assert apart(moved, expected) < 5e-2  # Float32 weights near 1 are rounded to multiples of about 1e-7.


@pytest.mark.filterwarnings("ignore")  # torch.compile emits many warnings.
@pytest.mark.parametrize(
    "overrides",
    [["model.activation_checkpointing=true"], ["model.cpu_offload=true"], ["model.compile=true"],
     ["model.activation_checkpointing=true", "model.cpu_offload=true"]],
)  # fmt: skip
def test_what_saves_memory_or_time_leaves_the_gradients_as_they_are(overrides):
    expected, got = gradients(sharded()), gradients(sharded(*overrides))
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        assert apart(got[name], gradient) < ROUNDING, name


def test_activation_checkpointing_takes_less_memory_and_offload_keeps_weights_off_the_device():
    taken = {}
    for name, overrides in {"plain": [], "checkpointing": ["model.activation_checkpointing=true"]}.items():
        model = sharded(*overrides)
        gradients(model)  # The first call allocates the gradients before the measurement.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(model)
        taken[name] = torch.cuda.max_memory_allocated() - before
    assert taken["checkpointing"] < 0.9 * taken["plain"]
    model = sharded("model.cpu_offload=true")
    gradients(model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {p.grad.device.type for p in model.parameters()} == {"cpu"}


# Tests of the last layer.


def plain(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Compute log-probs from the full matrix of logits at once."""
    return F.log_softmax(F.linear(hidden, head).float(), dim=-1).gather(1, targets[:, None])[:, 0]


def in_chunks(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Compute log-probs as training does, without entropies."""
    return token_log_probs(hidden, head, targets)[0]


def measured(form, tokens: int) -> tuple[int, float, list[Tensor]]:
    """Run forward and backward passes.

    Return the peak additional bytes, the median seconds, the outputs and the gradients.
    """
    source = torch.Generator(device()).manual_seed(0)
    made = {"device": device(), "dtype": torch.bfloat16, "generator": source}
    hidden, head = torch.randn(tokens, 896, **made).requires_grad_(), torch.randn(151_936, 896, **made) * 0.07
    targets = torch.randint(151_936, (tokens,), device=device(), generator=source)
    head.requires_grad_()
    taken, found = [], []
    for _ in range(4):
        hidden.grad = head.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        values = form(hidden, head, targets)
        values.sum().backward()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
        found = [values.detach(), hidden.grad, head.grad]
        peak = torch.cuda.max_memory_allocated() - before - hidden.grad.nbytes - head.grad.nbytes
    return peak, statistics.median(taken[1:]), found


def test_log_probs_in_chunks_take_a_fraction_of_the_memory_and_about_the_time_of_the_plain_form():
    ours, theirs = measured(in_chunks, 8192), measured(plain, 8192)
    for got, wanted in zip(ours[2], theirs[2], strict=True):
        assert apart(got, wanted) < ROUNDING
    assert ours[0] <= theirs[0] / 8
    assert ours[1] <= 2 * theirs[1]
