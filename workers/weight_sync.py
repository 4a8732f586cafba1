"""Weights from the actor to the engines, and the proof that they arrived (invariant E5).

The actor's rank 0 packs full tensors into buckets. With each tensor goes a checksum of its bytes, and with each matrix
W the product W v with a fixed random vector v. An engine checks the checksum of what it received, and then runs its
own linear layers on the same v: on CPU the engine packs weights away, so only its own compute path shows what it uses.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import SyncError

BUCKET_BYTES = 256 << 20
ALIGNMENT = 64  # each tensor of a bucket starts at a multiple of so many bytes
RELATIVE_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}  # of the largest output, between engine and trainer


@dataclass
class Bucket:
    """Some tensors of one weight version, end to end in memory.

    Attributes:
        version: weight version.
        dtype: of all tensors, "float32" or "bfloat16".
        names, shapes, checksums: per tensor; names as in the Hugging Face checkpoint, sums as in `checksum`.
        data: uint8, the tensors one after the other, each at a multiple of `ALIGNMENT`.
        probes: W v per matrix, float32; one-dimensional tensors are their own probe. Empty without checks.
    """

    version: int
    dtype: str
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    data: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    probes: dict[str, np.ndarray] = field(default_factory=dict)


def buckets_of(
    named: Iterable[tuple[str, Tensor]], *, aliases: Mapping[str, str], version: int, dtype: str, check: bool
) -> list[Bucket] | None:
    """Pack tensors into buckets of about 256 MB. All ranks iterate (gathering is collective); only rank 0 packs.

    Args:
        named: (name, full tensor) pairs, in one order on all ranks.
        aliases: further names of tied tensors, and the name under which each is sent; they are checked too.
        version: of these weights.
        dtype: in which the engine holds them.
        check: add checksums and probes.
    """
    buckets: list[Bucket] = []
    parts: list[Tensor] = []
    for name, tensor in named:
        if dist.get_rank() != 0:
            continue
        sent = tensor.to(device="cpu", dtype=getattr(torch, dtype)).contiguous()
        if not buckets or sum(part.nbytes for part in parts) + sent.nbytes > BUCKET_BYTES:
            _close(buckets, parts)
            buckets.append(Bucket(version, dtype))
        bucket = buckets[-1]
        bucket.names.append(name)
        bucket.shapes.append(tuple(sent.shape))
        data = sent.view(-1).view(torch.uint8)
        parts += [data, data.new_zeros(-len(data) % ALIGNMENT)]
        if check:
            bucket.checksums.append(checksum(data))
            bucket.probes[name] = probe(sent).numpy()
            bucket.probes |= {alias: bucket.probes[name] for alias, target in aliases.items() if target == name}
    _close(buckets, parts)
    return buckets if dist.get_rank() == 0 else None


def _close(buckets: list[Bucket], parts: list[Tensor]) -> None:
    if buckets:
        buckets[-1].data = torch.cat(parts).numpy()
    parts.clear()


def checksum(data: Tensor) -> int:
    """Sum of the bytes' 32-bit words modulo 2**64, plus the rest: one pass at memory speed."""
    words = data[: data.numel() // 4 * 4].view(torch.int32)
    return int(words.sum(dtype=torch.int64)) + int(data[words.numel() * 4 :].sum(dtype=torch.int64))


def probe(tensor: Tensor) -> Tensor:
    """W v in float32 for a matrix W; any other tensor itself, flat."""
    if tensor.ndim != 2:
        return tensor.float().flatten()
    return tensor.float() @ probe_vector(tensor.size(1), tensor.dtype)


def probe_vector(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A fixed random vector (size,) as float32 that holds numbers `dtype` can represent exactly."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator).to(dtype).float()


def tensors_of(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors, without a copy. Raises SyncError for bytes that are not the sender's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given (buffer|NumPy array) is not writable")  # it is only read here
        data = torch.from_numpy(bucket.data)
    start = 0
    for number, (name, shape) in enumerate(zip(bucket.names, bucket.shapes, strict=True)):
        size = int(np.prod(shape, dtype=np.int64)) * getattr(torch, bucket.dtype).itemsize
        part = data[start : start + size]
        start += size + -size % ALIGNMENT
        if bucket.checksums and checksum(part) != bucket.checksums[number]:
            raise SyncError(
                f"weight sync {bucket.version}: the bytes of '{name}' are not those that the actor sent (checksum "
                f"{checksum(part)}, expected {bucket.checksums[number]}); the transport corrupted them"
            )
        yield name, part.view(getattr(torch, bucket.dtype)).view(shape)


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
