"""Kernels that compute causal attention within the segments of a pack.

On Hopper GPUs, the kernel of FlashAttention 3 is used if its module `flash_attn_interface` is installed. Otherwise the
kernel of the package flash-attn is used if it is installed, and otherwise the kernel of torch. All kernels need 16-bit
dtypes, and a GPU of compute capability 8.0 or higher. If no kernel is usable, `workers.models.attention_batches`
computes attention in batches of segments of similar length.
"""

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
WIDEST, STEP = 256, 8  # the kernels need a head width that is a multiple of STEP and at most WIDEST
OLDEST, HOPPER = (8, 0), (9, 0)  # Compute capabilities: the lowest that all kernels need, and that of Hopper GPUs.


@dataclass(frozen=True)
class Bounds:
    """Where the segments of a pack begin and end.

    A segment has `n` queries and `m >= n` keys. Query i = 0, ..., n - 1 attends to the first m - n + 1 + i keys, if
    there is no sliding window.

    Attributes:
        query_offsets: (S + 1,) int32, the position of each segment's first query, and the number of queries.
        key_offsets: (S + 1,) int32, the position of each segment's first key, and the number of keys.
        most_queries: number of queries of the longest segment.
        most_keys: number of keys of the segment with the most keys.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    most_queries: int
    most_keys: int


GPU = "cuda"  # Attention kernels exist only for devices of this type.
# Arguments of an attention kernel: queries (N, H, D), keys (M, K, D), values (M, K, D), bounds of the segments, the
# scale or None, and the maximum number of keys to which a query attends or None. Result of an attention kernel:
# attention output (N, H, D).
Kernel = Callable[[Tensor, Tensor, Tensor, Bounds, float | None, int | None], Tensor]
_resolved: dict[torch.device, Kernel | None] = {}  # Maps a GPU to its attention kernel.


def kernel_for(query: Tensor, value: Tensor) -> Kernel | None:
    """Return an attention kernel with a backward pass for `query` and `value`, or None if no kernel is usable.

    `query` has the shape (N, H, D), with H query heads, and `value` has the shape (N, K, D), with K key heads.
    """
    width = query.size(-1)
    if query.device.type != GPU or query.dtype not in HALF or value.size(-1) != width:
        return None
    return resolved_kernel(query.device) if width <= WIDEST and width % STEP == 0 else None


def resolved_kernel(device: torch.device) -> Kernel | None:
    """Return the attention kernel for a GPU, or None if no kernel is usable.

    The first call for a GPU imports the kernel. torch.compile cannot trace an import without a graph break, so call
    this function once before a compiled layer runs.
    """
    if device not in _resolved:
        _resolved[device] = kernel(torch.cuda.get_device_capability(device))
    return _resolved[device]


def kernel(capability: tuple[int, int]) -> Kernel | None:
    """Return the fastest installed attention kernel for GPUs of a compute capability, or None if there is none."""
    if capability < OLDEST:
        return None
    third = [("flash_attn_interface", of_flash_attn)] if capability == HOPPER else []
    for module, make in (*third, ("flash_attn", of_flash_attn), ("torch.nn.attention.varlen", of_torch)):
        try:
            found = make(importlib.import_module(module))
        except (ImportError, AttributeError, NotImplementedError):
            continue
        except (OSError, RuntimeError) as error:  # For example, it was built for another torch.
            logger.warning("the attention kernel of %s does not load (%s); another kernel is used", module, error)
            continue
        return found
    return None


def of_flash_attn(module: Any) -> Kernel:
    """Wrap the attention kernel of FlashAttention 2 or 3, which accepts fewer key heads than query heads."""
    function = module.flash_attn_varlen_func

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None, window: int | None
    ) -> Tensor:
        options = {"softmax_scale": scale, "causal": True, "window_size": _near(window)}
        found = function(query, key, value, *_arguments(bounds), **options)
        # Early versions of FlashAttention 3 also return the log-sum-exp of the scores.
        output: Tensor = found[0] if isinstance(found, tuple) else found
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

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None, window: int | None
    ) -> Tensor:
        copies = query.size(1) // key.size(1)
        if copies > 1 and not shares:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        sharing = {"enable_gqa": copies > 1} if shares else {}
        near = _near(window)
        output: Tensor = function(query, key, value, *_arguments(bounds), scale=scale, window_size=near, **sharing)
        return output

    return attend


def _arguments(bounds: Bounds) -> tuple[Tensor, Tensor, int, int]:
    return bounds.query_offsets, bounds.key_offsets, bounds.most_queries, bounds.most_keys


def _near(window: int | None) -> tuple[int, int]:
    """Return how many keys before and after its own key a query attends to; -1 for no maximum."""
    return (-1 if window is None else window - 1), 0
