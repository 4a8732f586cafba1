"""Kernels that compute causal attention within each of several concatenated sequences.

The kernel of flash-attn is used if the package flash-attn is installed, otherwise the kernel of torch. The kernels of
flash-attn and torch need 16-bit dtypes, and a GPU of compute capability 8.0 or higher. If no kernel is usable,
`workers.models.packed_forward` computes attention in batches of sequences of similar length.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
WIDEST, STEP = 256, 8  # the kernels need a head width that is a multiple of STEP and at most WIDEST
# Arguments of an attention kernel: queries (N, H, D), keys (N, K, D), values (N, K, D), row offsets (R + 1,) int32,
# number of tokens of the longest row, and the scale or None. Result of an attention kernel: attention output (N, H, D).
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], Tensor]


def kernel_for(query: Tensor, value: Tensor) -> Kernel | None:
    """Return an attention kernel with a backward pass for `query` and `value`, or None if no kernel is usable.

    `query` has the shape (N, H, D), with H query heads, and `value` has the shape (N, K, D), with K key heads.
    """
    width = query.size(-1)
    if query.device.type != "cuda" or query.dtype not in HALF or value.size(-1) != width:
        return None
    return kernel() if width <= WIDEST and width % STEP == 0 and _is_new(query.device) else None


@functools.cache
def kernel() -> Kernel | None:
    """Return the attention kernel that is installed in this environment, or None if no kernel is installed."""
    for module, make in (("flash_attn", of_flash_attn), ("torch.nn.attention.varlen", of_torch)):
        try:
            return make(importlib.import_module(module))
        except (ImportError, AttributeError, NotImplementedError):
            continue
    return None


def of_flash_attn(module: Any) -> Kernel:
    """Wrap the attention kernel of flash-attn version 2, which accepts fewer key heads than query heads."""
    function = module.flash_attn_varlen_func

    def attend(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None) -> Tensor:
        options = {"softmax_scale": scale, "causal": True}
        output: Tensor = function(query, key, value, offsets, offsets, longest, longest, **options)
        return output

    return attend


def of_torch(module: Any) -> Kernel:
    """Wrap `varlen_attn`, the attention kernel of torch 2.11 or newer.

    If `varlen_attn` does not support fewer key heads than query heads, the wrapper repeats the key and value heads.

    Raises:
        AttributeError, NotImplementedError: the installed torch is too old.
    """
    function = module.varlen_attn
    accepted = inspect.signature(function).parameters
    if not {"window_size", "scale"} <= accepted.keys():
        raise NotImplementedError("the installed torch's varlen_attn lacks the arguments `window_size` and `scale`")
    shares = "enable_gqa" in accepted

    def attend(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None) -> Tensor:
        copies = query.size(1) // key.size(1)
        if copies > 1 and not shares:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        sharing = {"enable_gqa": copies > 1} if shares else {}
        causal = (-1, 0)  # each token attends to itself and to all earlier tokens of its row
        output: Tensor = function(
            query, key, value, offsets, offsets, longest, longest, scale=scale, window_size=causal, **sharing
        )
        return output

    return attend


@functools.cache
def _is_new(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
