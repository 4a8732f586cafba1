"""Verification that weights arrived, by checksums of bytes and by products with a fixed random vector.

Each piece of a tensor carries a checksum of its bytes, and each matrix W carries the product W v. An engine verifies
the bytes that it received, and then runs its own linear layers on the same v. On a CPU, the engine repacks its weights,
so only its own compute path shows which weights it uses.
"""

import functools
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rltrain.base.errors import SyncError

RELATIVE_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}  # engine-trainer tolerance, relative to the largest output


def checksum(data: np.ndarray) -> int:
    """Return the sum modulo 2**64 of the 64-bit words of bytes (n,) uint8, plus the leftover bytes.

    The checksum takes one pass over the data, at memory speed. If the lengths of parts are multiples of 8, the
    checksums of the parts sum to the checksum of the whole.
    """
    whole = len(data) // 8 * 8
    words = int(data[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + int(data[whole:].sum(dtype=np.uint64))) % 2**64


def probe(tensor: Tensor) -> Tensor:
    """Return the product of a matrix and a fixed random vector, in float32.

    Any other tensor is returned flattened, in float32.
    """
    if tensor.ndim != 2:
        return tensor.float().flatten()
    return tensor.float() @ probe_vector(tensor.size(1), tensor.dtype)


@functools.lru_cache(maxsize=32)  # models have few widths, and every chunk of about 1 MB reuses one
@torch.inference_mode(False)
def probe_vector(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a fixed random vector (size,) in float32 with values that `dtype` can represent exactly.

    The result is cached, so callers must not modify it.
    """
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator).to(dtype).float()


def check_outputs(outputs: Mapping[str, Tensor], probes: Mapping[str, np.ndarray], *, version: int, dtype: str) -> None:
    """Compare the outputs of the engine's layers with the outputs that the trainer's weights give.

    Args:
        outputs: probes by tensor name, computed by the engine's own compute path.
        probes: probes by tensor name, computed by the trainer.
        version: version of the weights, for the error message.
        dtype: dtype of the engine's weights, which determines the tolerance relative to the largest output.

    Raises:
        SyncError: an output differs, or the two sides hold different tensors. The message names the worst tensor, or
            the tensors that only one side has.
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
