"""Code that verifies that a rollout engine computes with the weights that the actor has sent.

With each piece of a tensor, the sender sends a checksum of the bytes. With each matrix W, the sender also sends the
product W v, where v is a fixed random vector (the probe vector). An engine first verifies the received bytes with the
sender's checksums. After loading the weights, the engine runs its own linear layers on the probe vector v, and compares
the outputs with the products W v that the sender has computed. A comparison of outputs is necessary because an engine
on a CPU converts its weights to another memory layout, so the bytes of its weights differ from the bytes of the actor's
weights.
"""

import functools
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from rltrain.base.errors import SyncError

# Largest accepted difference between the engine's and the trainer's outputs of a layer, relative to the largest
# absolute output of that layer.
RELATIVE_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}
# Largest accepted difference, as in `RELATIVE_ERROR`, for a layer whose weights the engine quantizes. An fp8 number
# (e4m3) has 3 bits after the leading bit, so its relative error is up to 1/16. Many kernels quantize the inputs too,
# and an expert is a product of three matrices. Errors of up to 0.04 were seen with fp8 weights and bfloat16 inputs.
QUANTIZED_ERROR = 0.2


def checksum(data: Tensor) -> int:
    """Return the sum modulo 2**64 of the 64-bit words of `data` (n,) uint8 and of the bytes after the last whole word.

    The checksum takes one pass over the data and is as fast as reading the data from memory. If data are split into
    parts whose lengths are multiples of 8 bytes, the sum of the parts' checksums modulo 2**64 is the checksum of all
    data.
    """
    if data.device.type != "cpu":
        return checksum_on_gpu(data)
    # NumPy reads 64-bit words at any address, and PyTorch only at addresses that are multiples of 8.
    values, whole = data.numpy(), len(data) // 8 * 8
    words = int(values[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (words + int(values[whole:].sum(dtype=np.uint64))) % 2**64


def checksum_on_gpu(data: Tensor) -> int:
    """Return `checksum(data)`, computed by PyTorch on the device of `data`."""
    whole = len(data) // 8 * 8
    words = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
    # The same 64-bit words have the same sum modulo 2**64, whether they are read as int64 or as uint64.
    return int(words.view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)) % 2**64


def probe(tensor: Tensor) -> Tensor:
    """Return the products of all rows of a tensor and a fixed random vector, flattened, in float32.

    A tensor with more than two dimensions is a stack of matrices, for example the weights of all experts of a layer. A
    tensor with fewer than two dimensions is returned flattened.
    """
    if tensor.ndim < 2:
        return tensor.float().flatten()
    return tensor.flatten(0, -2).float() @ probe_vector(tensor.size(-1), tensor.dtype).to(tensor.device)


@functools.lru_cache(maxsize=32)  # A model's matrices have few different widths, so 32 cached vectors are enough.
@torch.inference_mode(False)
def probe_vector(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the probe vector (size,) in float32: fixed random values that `dtype` can represent exactly.

    `probe_vector` caches the probe vectors, so callers must not modify a probe vector.
    """
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator).to(dtype).float()


def check_outputs(
    outputs: Mapping[str, Tensor],
    probes: Mapping[str, np.ndarray],
    *,
    version: int,
    dtype: str,
    quantized: Collection[str] = (),
) -> None:
    """Check that, for the probe vector, the engine's layers give the same outputs as the trainer's weights.

    Args:
        outputs: maps each tensor name to the output of the engine's own layer for the probe vector, which holds fixed
            random values.
        probes: maps each tensor name to the output that the engine should give, which `probe` has computed from the
            trainer's weights.
        version: version number of the weights, for the error message.
        dtype: dtype of the engine's weights, which determines the tolerance (see `RELATIVE_ERROR`).
        quantized: names of tensors that the engine quantizes, whose tolerance is `QUANTIZED_ERROR`.

    Raises:
        SyncError: an output of the engine differs from the trainer's by more than the tolerance, or engine and trainer
            do not hold the same tensors. The error message names the tensor with the largest difference, or the tensors
            that only the engine or only the trainer holds.
    """
    unpaired = sorted(set(probes) ^ set(outputs))
    unpaired += [name for name in probes if name in outputs and outputs[name].numel() != probes[name].size]
    if unpaired:
        raise SyncError(
            f"weight sync {version}: {', '.join(unpaired[:3])}{' and more' if len(unpaired) > 3 else ''} could not be "
            "checked, because engine and actor do not hold the same tensors; set rollout.verify_sync=false to turn the "
            "check off"
        )
    limits = {name: QUANTIZED_ERROR if name in quantized else RELATIVE_ERROR[dtype] for name in probes}
    errors = {}
    for name, expected in probes.items():
        want = torch.as_tensor(expected)
        got = outputs[name].detach().float().cpu().flatten()
        scale = float(want.abs().max()) or 1.0
        errors[name] = float((got - want).abs().max()) / scale
    worst = max(errors, key=lambda name: errors[name] / limits[name] if errors[name] == errors[name] else float("inf"))
    if not errors[worst] <= limits[worst]:
        raise SyncError(
            f"weight sync {version}: the engine does not compute with the actor's '{worst}' (relative error "
            f"{errors[worst]:.2g}, limit {limits[worst]:g}): the engine still uses weights that differ from "
            "the actor's weights"
        )
