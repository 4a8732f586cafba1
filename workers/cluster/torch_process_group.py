"""Setup of the torch.distributed process group of the training ranks."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore


def join(
    rank: int,
    world_size: int,
    address: tuple[str, int] | None,
    timeout_s: float,
    *,
    listener: socket.socket | None = None,
) -> None:
    """Initialise torch.distributed for this rank, unless this process has initialised it before.

    Args:
        rank: Rank of this process, 0 to world_size - 1.
        world_size: Number of training ranks.
        address: Host and port at which rank 0 serves the rendezvous. If `address` is None, the group has one rank and
            opens no socket.
        timeout_s: Timeout in seconds of the rendezvous and of each collective.
        listener: On rank 0, the socket that listens at `address`, or None to open a new socket.
    """
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    timeout = timedelta(seconds=timeout_s)
    if address is None:
        store: Store = HashStore()
    else:
        # TCPStore receives an open socket, because a socket opened by TCPStore would listen at all addresses of the
        # machine.
        serving = None if listener is None else listener.detach()
        store = TCPStore(*address, world_size, rank == 0, timeout, master_listen_fd=serving)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
