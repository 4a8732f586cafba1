"""Resource limits that a process sets for itself."""

import contextlib
import resource
import threading
from pathlib import Path

STACK_BYTES = 8 << 20  # Size of the stack of a thread that `start_thread` starts.
_lock = threading.Lock()


def limit_memory(memory_mb: int, *, beside_stacks: bool = False) -> None:
    """Limit the private memory that the current process can allocate in addition to the memory that it already has.

    `limit_memory` has an effect only on Linux.

    Args:
        memory_mb: maximum memory that the process can allocate after the call of `limit_memory`, in MB.
        beside_stacks: True if the stacks of threads that `start_thread` starts do not count towards `memory_mb`. The
            kernel counts the whole stack of a thread as memory of the process, although a thread uses only a small part
            of its stack.
    """
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text("utf-8", "replace").splitlines()
        used_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        limit = (used_kb << 10) + (memory_mb << 20)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most if beside_stacks else limit))
        # Core dumps are disabled, because a core dump could be as large as the memory of the process.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def start_thread(thread: threading.Thread) -> None:
    """Start a thread with a stack of `STACK_BYTES`, and raise the memory limit of this process by `STACK_BYTES`.

    A thread that `start_thread` started must call `thread_ends` when it ends. The memory limit is raised only if
    `limit_memory` was called with `beside_stacks=True`.

    Raises:
        RuntimeError: the thread cannot be started.
    """
    with _lock:
        _shift_limit(STACK_BYTES)
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except BaseException:
            _shift_limit(-STACK_BYTES)
            raise
        finally:
            threading.stack_size(before)


def thread_ends() -> None:
    """Lower the memory limit of this process by `STACK_BYTES`, because a thread from `start_thread` is ending."""
    with _lock:
        _shift_limit(-STACK_BYTES)


def _shift_limit(size: int) -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    if limit not in (resource.RLIM_INFINITY, most):
        resource.setrlimit(resource.RLIMIT_DATA, (limit + size, most))
