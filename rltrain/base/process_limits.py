"""Resource limits that a process sets for itself."""

import contextlib
import resource
from pathlib import Path


def limit_memory(memory_mb: int) -> None:
    """Limit the private memory that the current process can allocate in addition to the memory that it already has.

    `limit_memory` has an effect only on Linux.
    """
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text("utf-8", "replace").splitlines()
        used_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        limit = (used_kb << 10) + (memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        # Core dumps are disabled, because a core dump could be as large as the memory of the process.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
