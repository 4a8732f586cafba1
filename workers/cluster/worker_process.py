"""One process and the roles that live in it: a training rank, a rollout replica.

Importing this module imports nothing heavy; a role's class is imported when it is built, after the process's threads
and environment are set.
"""

import contextlib
import ctypes
import importlib
import logging
import os
import socket
from typing import Any

from rltrain.base.home_folder import ensure_home
from rltrain.base.secret_values import hide_in_logs
from workers.cluster import progress

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


class Host:
    """Builds roles by import path and calls their methods by name.

    Args:
        environment: variables set before anything heavy is imported.
        verbose: let libraries log.
    """

    def __init__(self, environment: dict[str, str], *, verbose: bool = False) -> None:
        os.environ.update(environment)
        ensure_home()
        keep_freed_memory()
        hide_in_logs()
        self.roles: dict[str, Any] = {}
        self.listener: socket.socket | None = None
        if not verbose:
            quiet()

    def build(self, role: str, path: str, *args: Any, **kwargs: Any) -> None:
        """Make `path` ("module:Class") with these arguments and keep it as `role`."""
        module, _, name = path.partition(":")
        with progress.call():
            self.roles[role] = getattr(importlib.import_module(module), name)(*args, **kwargs)

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a role."""
        with progress.call():
            return getattr(self.roles[role], method)(*args, **kwargs)

    def introduce(self) -> progress.Process | None:
        """Which process this is, for who watches it."""
        import ray

        return progress.announce(ray.get_runtime_context().get_node_id())

    def address(self, *, loopback: bool) -> tuple[str, int]:
        """Where this process listens for the ranks to meet: its node's address in the cluster, or the loopback one.

        Not on all addresses of the machine: who reaches that port reads and writes what the ranks tell each other.
        """
        host = "127.0.0.1"
        if not loopback:
            import ray

            host = ray.util.get_node_ip_address()
        self.listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return host, self.listener.getsockname()[1]

    def join(self, rank: int, world_size: int, address: tuple[str, int] | None, timeout_s: float) -> None:
        """Join the process group of these ranks (gloo, with nccl for GPUs); without an address it has one rank.

        Rank 0 is the one that gave the address.
        """
        from workers.cluster.torch_process_group import join

        listener, self.listener = self.listener, None
        join(rank, world_size, address, timeout_s, listener=listener)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next use, as a step allocates the same sizes again and again.

    Given back, each page costs a fault when it is touched again: a third of a small model's forward pass.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, size in ((_TRIM_THRESHOLD, 1 << 30), (_MMAP_THRESHOLD, 32 << 20), (_TOP_PAD, 64 << 20)):
            mallopt(option, size)


def quiet() -> None:
    """Only errors from libraries on this process's terminal."""
    os.environ.update(
        TRANSFORMERS_VERBOSITY="error",
        VLLM_LOGGING_LEVEL="ERROR",
        PYTHONWARNINGS="ignore",
        TQDM_DISABLE="1",
        GLOO_LOG_LEVEL="ERROR",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    import warnings

    warnings.simplefilter("ignore")
    for name in ("torch", "torch.fx._symbolic_trace", "transformers", "vllm", "ray", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
