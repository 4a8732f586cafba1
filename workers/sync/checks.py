"""The proof that weights arrived: checksums of bytes, and products with a fixed random vector.

With each piece of a tensor goes a checksum of its bytes, and with each matrix W the product W v. An engine checks the
bytes that it received, and then runs its own linear layers on the same v: on CPU the engine packs weights away, so only
its own compute path shows what it uses.
"""

import functools
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rltrain.base.errors import SyncError

RELATIVE_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}  # of the largest output, between engine and trainer


def checksum(data: np.ndarray) -> int:
    """Sum modulo 2**64 of the 64-bit words of bytes (n,) uint8, plus the bytes that are left over.

    One pass at memory speed. Parts whose lengths are multiples of 8 may be summed one by one.
    """
    whole = len(data) // 8 * 8
    words = int(data[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + int(data[whole:].sum(dtype=np.uint64))) % 2**64


def probe(tensor: Tensor) -> Tensor:
    """W v in float32 for a matrix W; any other tensor itself, flat."""
    if tensor.ndim != 2:
        return tensor.float().flatten()
    return tensor.float() @ probe_vector(tensor.size(1), tensor.dtype)


@functools.lru_cache(maxsize=32)  # models have few widths, and each is asked for with every megabyte
@torch.inference_mode(False)
def probe_vector(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A fixed random vector (size,) as float32 that holds numbers `dtype` can represent exactly; not to be changed."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator).to(dtype).float()


def check_outputs(outputs: Mapping[str, Tensor], probes: Mapping[str, np.ndarray], *, version: int, dtype: str) -> None:
    """Compare what the engine's layers compute with what the trainer's weights give.

    Args:
        outputs: W v per tensor name, by the engine's own compute path.
        probes: the same by the trainer.
        version: of the weights, for the message.
        dtype: of the engine's weights; sets the tolerance, relative to the largest output.

    Raises:
        SyncError: naming the worst tensor, or those that only one side has.
    """
    unpaired = sorted(set(probes) ^ set(outputs))
    unpaired += [name for name in probes if name in outputs and outputs[name].numel() != probes[name].size]
    if unpaired:
        raise SyncError(
            f"weight sync {version}: {', '.join(unpaired[:3])}{' and more' if len(unpaired) > 3 else ''} could not be "
            "checked: engine and actor do not hold the same tensors; rollout.verify_sync=false turns the check off"
        )
    errors = {}
    for name, expected in probes.items():
        want = torch.as_tensor(expected)
        got = outputs[name].detach().float().cpu().flatten()
        scale = float(want.abs().max()) or 1.0
        errors[name] = float((got - want).abs().max()) / scale
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    if not errors[worst] <= RELATIVE_ERROR[dtype]:
        raise SyncError(
            f"weight sync {version}: the engine does not compute with the actor's '{worst}' (relative error "
            f"{errors[worst]:.2g}, limit {RELATIVE_ERROR[dtype]:g}): it still uses other weights there"
        )
