"""Print the number of memory arenas of glibc in a Ray worker after 16 threads of the worker have allocated memory."""

import sys

from rltrain.settings.compose import compose
from workers.cluster.ray_connection import connect, disconnect

config, _ = compose(["placement.address=local"])
connect(config)

import ray  # noqa: E402 - `connect` sets environment variables that Ray reads when it is imported.


@ray.remote
def arenas() -> int:
    import ctypes
    import os
    import tempfile
    import threading

    barrier = threading.Barrier(16)

    def allocate() -> None:
        barrier.wait()
        kept = [bytes(100_000) for _ in range(100)]
        barrier.wait()  # All threads hold their memory at the same time.
        del kept

    threads = [threading.Thread(target=allocate) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
        libc.malloc_info(0, stream)  # The XML has one `heap` element for each arena.
        libc.fclose(stream)
        file.seek(0)
        return file.read().count(b"<heap nr=")


sys.stdout.write(f"{ray.get(arenas.remote())}\n")
disconnect()
