"""Tests that `torch.compile` compiles a layer once for packs of all shapes.

A fake kernel that runs on the CPU replaces the attention kernel.
"""

import functools
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.distributed.utils import _apply_to_tensors
from transformers import AutoModelForCausalLM, LlamaConfig

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from workers.models import fsdp, varlen_attention
from workers.models.fsdp import prepare
from workers.models.packed_forward import PACKED, pack, policy_output

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@torch.library.custom_op("rltrain_tests::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, most: int) -> torch.Tensor:
    """Fake attention kernel that is opaque to the compiler, as real kernels are."""
    assert most == int(offsets.diff().max())
    return q + k.sum(0) + v.sum(0)


def backward(ctx, gradient):
    (keys,) = ctx.saved_tensors
    return gradient, *[gradient.sum(0).expand_as(keys)] * 2, None, None


attend.register_fake(lambda q, k, v, offsets, most: torch.empty_like(q))
attend.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]))


def of_lengths(lengths, prompt=(1,)):
    batch = {
        "prompts": [prompt] * len(lengths),
        "responses": [[8 + row] + [2] * (length - 1) for row, length in enumerate(lengths)],
    }
    return pack(DataProto.from_dict({name: jagged(ids, torch.int64) for name, ids in batch.items()}))


def gradients(model, packed):
    model.zero_grad()
    policy_output(model, packed, temperature=1.0).log_probs.sum().backward()
    return [parameter.grad for parameter in model.parameters()]


# the compiler reads `.grad` of a tensor that is not a leaf, which causes the ignored warning
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernel", [True, False])
def test_layers_are_compiled_once_for_packs_of_all_shapes(kernel, checkpointing, monkeypatch):
    """A compiled graph must not depend on the number of attention batches.

    If graphs depended on the number of attention batches, the compiler would compile layers for the first eight batch
    counts, and then silently run layers uncompiled.
    """
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    if kernel:
        monkeypatch.setattr(
            "workers.models.packed_forward.kernel_for",
            lambda *_: lambda q, k, v, bounds, *_: attend(q, k, v, bounds.query_offsets, bounds.most_queries),
        )
    model, plain = (AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation=PACKED) for _ in "12")
    model.load_state_dict(plain.state_dict())
    counter, graphs = CompileCounter(), {True: set(), False: set()}
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    config = replace(compose([])[0].model, compile=True, activation_checkpointing=checkpointing)
    with torch._dynamo.config.patch(disable=False):
        for layer in model.model.layers:
            prepare(layer, config)
        for count in range(4, 28):
            shares = count % 4 > 1
            lengths = [2 ** (row % 6) + count for row in range(count // 4)] + [3] * count
            packed = of_lengths(lengths, (1, 2, 3, 4, 5) if shares else (1,))
            before = counter.frame_count
            assert (packed.layout.keys is not None) is shares
            found = gradients(model, packed)
            assert ("attention_batches" in vars(packed.layout)) is not kernel, "the kernel needs no batches"
            if counter.frame_count > before:
                graphs[shares].add(count)
            for gradient, wanted in zip(found, gradients(plain, packed), strict=True):
                assert torch.allclose(gradient, wanted, atol=1e-5)
    assert all(len(compiled) <= 2 for compiled in graphs.values()), "layers were compiled again"
    assert counter.frame_count > 0
    if kernel:
        assert counter.frame_count <= 4, "with the kernel, a layer is one graph for each kind of pack"


# the compiler reads `.grad` of a tensor that is not a leaf, which causes the ignored warning
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_layer_that_finds_its_kernel_itself_is_compiled_without_a_graph_break(monkeypatch):
    """A layer calls `kernel_for`, which finds the attention kernel for a GPU.

    The test has no GPU, so it makes `kernel_for` accept tensors on the CPU.
    """
    calls = []

    def varlen(q, k, v, query_offsets, key_offsets, most_queries, most_keys, **options):
        calls.append(options)
        return attend(q, k, v, query_offsets, most_queries)

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for name, value in (("GPU", "cpu"), ("HALF", (torch.float32,)), ("_resolved", {})):
        monkeypatch.setattr(varlen_attention, name, value)
    monkeypatch.setattr(fsdp, "GPU", "cpu")
    monkeypatch.setattr(fsdp, "device", lambda: torch.device("cpu"))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation=PACKED)
    config = replace(compose([])[0].model, compile=True, activation_checkpointing=False)
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(disable=False):
        for layer in model.model.layers:
            prepare(layer, config)
        gradients(model, of_lengths([5, 6]))
    assert calls, "the layers must use the kernel"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]


def test_attention_batches_are_made_once_for_all_layers_of_a_sharded_model():
    """FSDP copies dataclass objects when it casts tensors.

    The attention batches of a pack must nevertheless be computed only once.
    """
    packed = of_lengths([3, 4])
    cast = _apply_to_tensors(lambda tensor: tensor, {"packed": packed})["packed"]
    assert cast is not packed
    assert cast.layout is packed.layout
    assert packed.layout.attention_batches is packed.layout.attention_batches
