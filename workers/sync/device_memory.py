"""GPU memory that two processes of one machine share, and the identity of a process's GPU.

A handle describes GPU memory so that another process can map it. PyTorch's public functions return handles only in
pickled form. Handles travel through network connections, and unpickling such data can run arbitrary code. Therefore
this module calls functions of PyTorch that are not public.
"""

import base64
import json
from typing import Any

import torch
from torch import Tensor

_BYTES = "bytes"  # JSON has no bytes, so bytes are written as a JSON object with this key.


def own_gpu() -> str | None:
    """Return the unique identifier of the first GPU that this process may use, or None without a GPU."""
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None


def wait_for_gpu(data: Tensor) -> None:
    """Wait until the GPU has done all work that this thread has started. If `data` is in CPU memory, return at once."""
    if data.device.type == "cuda":
        torch.cuda.current_stream(data.device).synchronize()


def free_cached() -> None:
    """Give GPU memory that PyTorch keeps for later allocations back, because another process needs it."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def handle_of(data: Tensor) -> str:
    """Return a description (JSON) of the GPU memory of a tensor, with which another process can map the memory.

    The memory must not be freed or overwritten while another process reads it.

    Args:
        data: a uint8 tensor (n,) that starts at the beginning of its storage.
    """
    assert data.storage_offset() == 0, "a shared tensor must start at the beginning of its storage"
    # `_share_cuda_` returns a tuple of integers, booleans and bytes objects. The last element says whether the other
    # process must wait for an event, which it would never free.
    *shared, _ = data.untyped_storage()._share_cuda_()
    wait_for_gpu(data)
    return json.dumps([_encoded(value) for value in (*shared, False)])


def mapped(handle: str) -> Tensor:
    """Map the GPU memory that `handle_of` described in another process, and return it as a uint8 tensor (n,)."""
    values = [_decoded(value) for value in json.loads(handle)]
    storage: Any = torch.UntypedStorage._new_shared_cuda(*values)  # type: ignore[no-untyped-call, unused-ignore]
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _encoded(value: Any) -> Any:
    return {_BYTES: base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decoded(value: Any) -> Any:
    return base64.b64decode(value[_BYTES]) if isinstance(value, dict) else value
