"""Shared memory through which the processes of one host exchange weights during one sync: files, or memory of a GPU.

Only the user who runs the process can access a shared file. A shared file's name is removed as soon as all processes
have opened the file, and at the latest at the end of the sync, even if the sync fails. If all processes that use a
shared file are killed before the file's name is removed, the file (as large as two buckets) stays in memory. In a run
on one machine, a guard process outlives the driver, and removes leftover shared files when the run ends. On a cluster,
the next weight sync on the same host removes leftover shared files. A process holds a lock on each shared file that it
has mapped, to show that the file is in use. The operating system releases a lock when the process that holds the lock
ends.

Python's `SharedMemory` is not used, because it does not preallocate memory. Writing to memory that is not preallocated
kills the process if the shared-memory folder is full. The filelock library is not used, because it cannot take a shared
lock on an open file.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rltrain.base.errors import SyncError, described
from workers.cluster import leftovers
from workers.sync.buckets import Bucket
from workers.sync.device_memory import handle_of, mapped

FOLDER = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
PREFIX = leftovers.WEIGHTS_PREFIX


def new_path() -> str:
    """Return a new random path for a shared file, which no other weight sync uses."""
    return str(FOLDER / f"{PREFIX}{secrets.token_hex(8)}")


def whereabouts() -> str | None:
    """Return a string that is equal in two processes if and only if the processes can map each other's shared files.

    Return None if the identity of the host or of the shared-memory folder cannot be read.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{kernel} {os.stat(FOLDER).st_dev} {os.getuid()}"
    except OSError:
        return None


class SharedFile:
    """A shared file that this process has mapped into its memory.

    Args:
        path: path of the shared file.
        size: size in bytes of the file to create. If `size` is None, an existing file at `path` is opened.

    Raises:
        OSError: the shared-memory folder has no room for a new file, or the file to open does not exist.
    """

    def __init__(self, path: str, size: int | None = None) -> None:
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if size is not None else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if size is not None:
                # If the memory were not preallocated and the shared-memory folder became full, SIGBUS would kill the
                # writing process.
                os.posix_fallocate(descriptor, 0, max(size, 1))
            # `descriptor` can be closed, because the memory map keeps the file open, and the open file keeps its
            # advisory lock.
            self.memory = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        except BaseException:
            if size is not None:
                self.unlink()
            raise
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Remove the shared file's name from the shared-memory folder.

        A process that has mapped the shared file can continue to use the file.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class Reader:
    """Reader of the bytes of buckets, which are in the bucket object, in a shared file, or in shared GPU memory."""

    def __init__(self) -> None:
        self.file: SharedFile | None = None

    def data(self, bucket: Bucket) -> Tensor:
        """Return the bytes (n,) of a whole bucket, after all ranks have written their parts of the bucket.

        Raises:
            SyncError: the bucket's file cannot be opened.
        """
        if bucket.data is not None:
            return bucket.data
        if bucket.handle is not None:
            return mapped(bucket.handle)
        assert bucket.path is not None, "a bucket with neither data nor a handle must have the path of a shared file"
        if self.file is None or self.file.path != bucket.path:
            try:
                self.file = SharedFile(bucket.path)
            except OSError as error:
                raise SyncError(
                    f"weight sync {bucket.version}: {bucket.path} cannot be opened ({error.strerror}), although actor "
                    "and engine seemed to share this folder"
                ) from None
        return self.file.memory[bucket.offset : bucket.offset + bucket.size]

    def close(self) -> None:
        """Release the mapped shared file."""
        self.file = None


@contextlib.contextmanager
def readable_elsewhere(bucket: Bucket) -> Iterator[Bucket]:
    """Yield a bucket without `data` that names the memory of its bytes.

    Other processes of this machine can read this memory until the `with` block ends. Bytes in the memory of a GPU stay
    there, and other processes map this memory. Bytes in the host's memory are copied to a shared file. If `bucket.data`
    is None, `bucket` itself is yielded.

    Raises:
        SyncError: there is no room for the shared file.
    """
    if bucket.data is None:
        yield bucket
        return
    if bucket.data.device.type != "cpu":
        try:
            handle = handle_of(bucket.data)
        except RuntimeError as error:
            raise SyncError(f"weight sync {bucket.version}: cannot share GPU memory ({described(error)})") from error
        yield replace(bucket, data=None, handle=handle)
        return
    try:
        file = SharedFile(new_path(), len(bucket.data))
    except OSError as error:
        raise SyncError(
            f"weight sync {bucket.version}: no room for a bucket of {len(bucket.data)} bytes in {FOLDER} "
            f"({error.strerror}); make this folder larger (in Docker, with --shm-size)"
        ) from None
    try:
        file.memory[: len(bucket.data)].copy_(bucket.data)
        yield replace(bucket, data=None, path=file.path, offset=0)
    finally:
        file.unlink()


def remove_stale() -> None:
    """Remove the shared files of this user that are left over from processes that have died."""
    leftovers.remove_unlocked(FOLDER.glob(f"{PREFIX}*"))
