"""Code that builds and calls the roles in a worker process, such as a training rank or a rollout replica.

This module imports no large packages such as torch. The class of a role (such as actor or critic) is imported only when
the role is built, because the number of threads and the environment of the process must be configured before the
import.
"""

import contextlib
import ctypes
import importlib
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rltrain.base import trace
from rltrain.base.home_folder import ensure_home
from rltrain.base.secret_values import hide_in_logs
from workers.cluster import node_settings, progress
from workers.cluster.gpu_cores import stay_near_gpus

if TYPE_CHECKING:
    import numpy as np

OFFLINE = "HF_HUB_OFFLINE"  # Environment variable that keeps huggingface_hub from using the network.
ALLOCATOR = "PYTORCH_ALLOC_CONF"  # Environment variable with settings of PyTorch's allocator of GPU memory.
OLDER_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}  # Older names of the same variable.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # Option numbers of the C function mallopt.


@dataclass(frozen=True)
class Join:
    """Rule for joining several arguments of a call, which are parts of a batch, into one argument.

    Attributes:
        rows_of_parts: For each part of the batch, an array with the indices that the rows of the part have in the whole
            batch.
        rows: Indices, in the whole batch, of the rows that the called method receives.
        columns: Names of the columns that the called method receives.
    """

    rows_of_parts: Sequence["np.ndarray"]
    rows: "np.ndarray"
    columns: Sequence[str]


@dataclass(frozen=True)
class InnerCall:
    """Placeholder argument that stands for the result of a method of another role in the same process.

    Before a process calls a method, it replaces each `InnerCall` argument by the result of the method that the
    `InnerCall` names, without copying the result.

    Attributes:
        role: Name of the role whose method is called.
        method: Name of the called method.
        args: Positional arguments of the called method.
        kwargs: Keyword arguments of the called method.
    """

    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Host:
    """Object that builds the roles of this process from import paths, and calls methods of the roles by name.

    Args:
        environment: Environment variables to set before any large package, such as torch, is imported.
        verbose: Whether libraries may print log messages below the level of errors.
        sharing: How many processes share the CPU cores of a node. If `sharing` is None, the process gets no environment
            variables whose values depend on the node.
    """

    def __init__(
        self, environment: dict[str, str], *, verbose: bool = False, sharing: node_settings.Sharing | None = None
    ) -> None:
        self.offline = os.environ.get(OFFLINE)
        if OLDER_ALLOCATOR & os.environ.keys() or ALLOCATOR in os.environ:
            # The user's settings of PyTorch's allocator, from `placement.env_vars` or from this machine, are kept.
            environment = {name: value for name, value in environment.items() if name != ALLOCATOR}
        os.environ.update(environment | ({} if sharing is None else node_settings.settings_here(sharing)))
        if sharing is not None:
            # `settings_here` divides the cores of the node among its processes, so it must run before this process is
            # bound to some of the cores.
            stay_near_gpus()
        trace.start_from(environment)
        ensure_home()
        keep_freed_memory()
        hide_in_logs()
        self.roles: dict[str, Any] = {}
        self.listener: socket.socket | None = None
        if not verbose:
            quiet()

    def model_directory(self, path: str) -> str:
        """Return the directory of a model on this machine, and download the model first if necessary.

        See `directory_on_node`.

        The download of a model may use the network even if this process runs its libraries in offline mode. If the user
        has set HF_HUB_OFFLINE on this machine, the user's value applies to the download of a model.
        """
        from rltrain.data.hub import directory_on_node

        environment = {name: value for name, value in os.environ.items() if name != OFFLINE}
        if self.offline is not None:
            environment[OFFLINE] = self.offline
        with progress.call():
            return directory_on_node(path, on_progress=progress.tick, environment=environment)

    def build(self, role: str, path: str, *args: Any, **kwargs: Any) -> None:
        """Create the object of the role `role` from the class `path` ("module:Class"), `args` and `kwargs`."""
        module, _, name = path.partition(":")
        with progress.call(), trace.span(f"build {role}", trace.CALLS):
            self.roles[role] = getattr(importlib.import_module(module), name)(*args, **kwargs)

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a role, and record the call as a timeline event unless the role records its own events.

        Each `InnerCall` in `args` is replaced by the result of the inner call.
        """
        called = self.roles[role]
        own = getattr(called, "records_events", False)
        with progress.call(), contextlib.nullcontext() if own else trace.span(f"{role}.{method}", trace.CALLS):
            return getattr(called, method)(*map(self._argument, args), **kwargs)

    def _argument(self, given: Any) -> Any:
        """If `given` is an `InnerCall`, make the call and return its result; if not, return `given` unchanged."""
        inner = isinstance(given, InnerCall)
        return self.call(given.role, given.method, *given.args, **given.kwargs) if inner else given

    def take_events(self) -> trace.Recorded | None:
        """Return and delete the recorded timeline events of this process, or return None if the run has no timeline."""
        return trace.take()

    def call_joined(self, role: str, method: str, joins: Sequence[Join | None], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a role, after joining the batches that arrive in several parts.

        Args:
            role: Name of the role whose method is called.
            method: Name of the method to call.
            joins: One entry for each argument of the called method, in order: a `Join` if the argument arrives in
                several parts, None if the argument arrives whole.
            args: The arguments of the called method, in order. An argument that arrives in several parts takes up
                several elements of `args`, one for each part. A part can be an `InnerCall`.
            kwargs: Keyword arguments of the method.
        """
        from rltrain.batch.partial_batches import joined_rows

        rest, joined = list(args), []
        for join in joins:
            count = len(join.rows_of_parts) if join else 1
            parts, rest = rest[:count], rest[count:]
            if join:
                parts = [self._argument(part) for part in parts]
                joined.append(joined_rows(parts, join.rows_of_parts, join.rows, join.columns))
            else:
                joined.append(parts[0])
        return self.call(role, method, *joined, **kwargs)

    def introduce(self) -> progress.Process | None:
        """Let other processes observe this process, and return its identity, or None on a system without `/proc`."""
        import ray

        return progress.announce(ray.get_runtime_context().get_node_id())

    def address(self, *, loopback: bool) -> tuple[str, int]:
        """Open a socket for the rendezvous of the ranks, and return the socket's host and port.

        The socket listens only at one address: the loopback address, or the machine's address in the cluster. Listening
        at every address of the machine would be unsafe, because any program that reaches the port can read and write
        the ranks' messages.
        """
        host = "127.0.0.1"
        if not loopback:
            import ray

            host = ray.util.get_node_ip_address()
        self.listener = node_settings.listener_at(host)
        return host, self.listener.getsockname()[1]

    def join(self, rank: int, world_size: int, address: tuple[str, int] | None, timeout_s: float) -> None:
        """Join the torch.distributed process group of the training ranks (gloo for CPU tensors, nccl for GPU tensors).

        Rank 0 must be the process whose `Host.address` returned `address`. If `address` is None, the process group
        consists of this process alone.
        """
        from workers.cluster.torch_process_group import join

        listener, self.listener = self.listener, None
        join(rank, world_size, address, timeout_s, listener=listener)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for reuse, because each training step allocates blocks of the same sizes again.

    Each page of memory that glibc returns to the system costs a page fault when the page is used again. With glibc's
    default settings, page faults took a third of the time of a small model's forward pass.
    """
    with contextlib.suppress(OSError, AttributeError):  # On a system without glibc, nothing is done.
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, size in ((_TRIM_THRESHOLD, 1 << 30), (_MMAP_THRESHOLD, 32 << 20), (_TOP_PAD, 64 << 20)):
            mallopt(option, size)


def return_freed_memory() -> None:
    """Make glibc return the freed memory of all threads to the operating system.

    Writing a checkpoint temporarily needs as much memory as the training state. `return_freed_memory` is called after a
    checkpoint has been written, because glibc would keep most of the freed memory for later allocations.
    """
    with contextlib.suppress(OSError, AttributeError):  # On a system without glibc, nothing is done.
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def quiet() -> None:
    """Configure libraries so that they print only errors to the terminal of this process."""
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
