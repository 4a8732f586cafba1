"""Tests of variable-length attention, in which one kernel call handles all rows of a pack.

A slow function that runs on the CPU and has the kernel's signature replaces the kernel.
"""

import itertools
import sys
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from rltrain.batch.data_proto import DataProto, jagged
from workers.models import varlen_attention
from workers.models.packed_forward import PACKED, pack, policy_output

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
ROWS = [([5, 6, 7], [20, 21, 22, 23]), ([9], [30]), ([3, 4, 5, 6, 7, 8], []), ([11, 12], list(range(40, 51)))]
GROUP = [([3, 4, 5, 6, 7, 8], [20, 21, 22]), ([3, 4, 5, 6, 7, 8], [30]), ([3, 4, 5, 6, 7, 8], list(range(40, 51)))]


def slow(query, key, value, cu_q, cu_k, max_q, max_k, scale, near=-1):
    """Compute attention segment by segment and head by head. The last query of a segment attends to all its keys.

    The function requires as many key heads as query heads. `near` is the maximum number of keys before a query's own
    key to which it attends, or -1.
    """
    assert cu_q.dtype == cu_k.dtype == torch.int32, "kernels take 32-bit offsets"
    bounds, key_bounds = cu_q.tolist(), cu_k.tolist()
    assert max_q == max(end - begin for begin, end in itertools.pairwise(bounds))
    assert max_k == max(end - begin for begin, end in itertools.pairwise(key_bounds))
    assert (bounds[-1], key_bounds[-1]) == (len(query), len(key)), "every token must be in a segment"
    rows = []
    for (begin, end), (first, last) in zip(itertools.pairwise(bounds), itertools.pairwise(key_bounds), strict=True):
        q, k, v = (tensor.transpose(0, 1) for tensor in (query[begin:end], key[first:last], value[first:last]))
        above = (last - first) - (end - begin)
        past = torch.ones(end - begin, last - first, dtype=torch.bool).tril(above)
        past = past if near < 0 else past.triu(above - near)
        weights = (q @ k.mT * (scale or q.size(-1) ** -0.5)).masked_fill(~past, -torch.inf).softmax(-1)
        rows.append((weights @ v).transpose(0, 1))
    return torch.cat(rows)


def flash_attn_varlen_func(
    q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    assert causal
    assert window_size[1] == 0
    copies = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    return slow(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, window_size[0])


def new_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa == (query.size(1) != key.size(1)), "torch needs enable_gqa for fewer key heads"
    copies = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    return old_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def old_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert window_size[1] == 0, "not causal"
    assert query.size(1) == key.size(1)
    return slow(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size[0])


KERNELS = {
    "flash-attn": varlen_attention.of_flash_attn(types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)),
    "torch": varlen_attention.of_torch(types.SimpleNamespace(varlen_attn=new_varlen_attn)),
    "torch that shares no heads": varlen_attention.of_torch(types.SimpleNamespace(varlen_attn=old_varlen_attn)),
}


def outputs(model, rows):
    """Return the log-probs of a pack, shape (R,), and the parameter gradients of a weighted sum of the log-probs."""
    batch = {"prompts": [row[0] for row in rows], "responses": [row[1] for row in rows]}
    packed = pack(DataProto.from_dict({name: jagged(ids, torch.int64) for name, ids in batch.items()}))
    found = policy_output(model, packed, temperature=0.7).log_probs
    weights = torch.linspace(-1, 1, len(found), dtype=torch.float64)
    return found, torch.autograd.grad((found * weights).sum(), list(model.parameters()))


def windowed(**sizes):
    return Qwen3Config(
        **sizes, use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config, windowed])
@pytest.mark.parametrize("name", KERNELS)
def test_B6_a_kernel_of_all_rows_gives_the_log_probs_and_gradients_of_the_buckets(name, config, monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES)).double()
    model.set_attn_implementation(PACKED)
    rows = [*ROWS, *GROUP]
    expected, wanted = outputs(model, rows)
    used = []
    monkeypatch.setattr(
        "workers.models.packed_forward.kernel_for", lambda query, value: used.append(query.shape) or KERNELS[name]
    )
    got, grads = outputs(model, rows)
    assert len(used) == SIZES["num_hidden_layers"]
    assert torch.allclose(got, expected, atol=1e-6)
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad - want).abs().max() <= 1e-5 * want.abs().max()


def on(device, dtype, width):
    """Return a fake tensor with the attributes that `kernel_for` reads, because the test has no GPU."""
    return types.SimpleNamespace(device=torch.device(device), dtype=dtype, size=lambda axis: width)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "fits"),
    [("cuda", torch.bfloat16, 64, True), ("cuda", torch.float16, 256, True), ("cpu", torch.bfloat16, 64, False),
     ("cuda", torch.float32, 64, False), ("cuda", torch.bfloat16, 288, False), ("cuda", torch.bfloat16, 60, False)],
)  # fmt: skip
def test_only_what_the_kernels_take_goes_to_them(device, dtype, width, fits, monkeypatch):
    monkeypatch.setattr(varlen_attention, "resolved_kernel", lambda device: slow)
    heads = on(device, dtype, width)
    assert (varlen_attention.kernel_for(heads, heads) is slow) is fits
    assert varlen_attention.kernel_for(heads, on(device, dtype, width + 8)) is None


def test_a_kernel_is_imported_only_once_for_a_gpu(monkeypatch):
    made = []
    monkeypatch.setattr(varlen_attention, "_resolved", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    monkeypatch.setattr(varlen_attention, "kernel", lambda capability: made.append(capability) or slow)
    for index in (0, 1, 0):
        assert varlen_attention.resolved_kernel(torch.device("cuda", index)) is slow
    assert made == [(9, 0), (9, 1)]


def test_this_torchs_own_kernel_has_the_signature_that_is_used():
    assert varlen_attention.kernel((8, 0)) is not None
    assert varlen_attention.kernel((7, 5)) is None


@pytest.mark.parametrize(
    ("capability", "installed", "used"),
    [((9, 0), ("flash_attn_interface", "flash_attn"), "flash_attn_interface"), ((9, 0), ("flash_attn",), "flash_attn"),
     ((8, 0), ("flash_attn_interface", "flash_attn"), "flash_attn"), ((10, 0), ("flash_attn_interface",), None)],
)  # fmt: skip
def test_only_hopper_gpus_use_flash_attention_3(capability, installed, used, monkeypatch):
    calls = []
    for name in ("flash_attn_interface", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)  # An import of the module fails.
    for name in installed:

        def attend(q, *args, name=name, **options):
            assert options == {"softmax_scale": 0.1, "causal": True, "window_size": (3, 0)}
            calls.append(name)
            return (q, None) if name == "flash_attn_interface" else q

        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(flash_attn_varlen_func=attend))
    monkeypatch.setattr(varlen_attention, "of_torch", lambda module: None)
    found, query = varlen_attention.kernel(capability), torch.ones(2, 1, 8)
    if used is None:
        assert found is None
        return
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    assert found(query, query, query, varlen_attention.Bounds(offsets, offsets, 2, 2), 0.1, 4) is query
    assert calls == [used]


def test_a_kernel_that_does_not_load_is_left_out_with_a_warning(monkeypatch, caplog):
    def broken(name):
        raise OSError(f"{name}: undefined symbol")

    monkeypatch.setattr(varlen_attention.importlib, "import_module", broken)
    assert varlen_attention.kernel((9, 0)) is None
    assert caplog.messages[0].startswith("the attention kernel of flash_attn_interface does not load (flash_attn_inter")


def test_a_torch_that_is_too_old_has_no_kernel():
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        """Fake attention kernel of an older torch version, which has no argument for attention windows."""

    with pytest.raises(NotImplementedError, match="lacks the arguments `window_size`"):
        varlen_attention.of_torch(types.SimpleNamespace(varlen_attn=varlen_attn))
