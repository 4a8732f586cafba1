"""A file in shared memory that exists during one sync and that all processes of a host map.

The file is accessible to this user only. It is removed as soon as all processes have opened it, or when the sync ends,
even if the sync fails. If every process that knows the file is killed earlier, a file with two buckets is left over.
The next sync on this host removes every such file that no process has open. Each process holds a lock on a file that
it maps, and the lock ends with the process.

Python's `SharedMemory` does not preallocate, so a full folder would kill its writer. The filelock library can lock an
open file only exclusively.
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

import numpy as np

from rltrain.base.errors import SyncError
from workers.sync.buckets import Bucket

FOLDER = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
PREFIX = "rltrain-weights-"


def new_path() -> str:
    """Return a path that no other sync uses."""
    return str(FOLDER / f"{PREFIX}{secrets.token_hex(8)}")


def whereabouts() -> str | None:
    """Return a string that two processes share if and only if they can map each other's files.

    Returns None if the string cannot be determined.
    """
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{kernel} {os.stat(FOLDER).st_dev} {os.getuid()}"
    except OSError:
        return None


class SharedFile:
    """A file that this process has mapped.

    Args:
        path: path of the file.
        size: size in bytes of a file to create; None opens an existing file.

    Raises:
        OSError: there is no room for the file, or no such file exists.
    """

    def __init__(self, path: str, size: int | None = None) -> None:
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if size is not None else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if size is not None:
                # Without preallocation, a full folder would kill the writing process (SIGBUS) instead of raising.
                os.posix_fallocate(descriptor, 0, max(size, 1))
            self.memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)  # the mapping keeps the file locked
        except BaseException:
            if size is not None:
                self.unlink()
            raise
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Remove the name of the file. Processes that have mapped the file keep their mapping."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class Reader:
    """Access to the bytes of buckets, whether they are in the bucket object or in a shared file."""

    def __init__(self) -> None:
        self.file: SharedFile | None = None

    def data(self, bucket: Bucket) -> np.ndarray:
        """Return the bytes (n,) of a bucket that all ranks wrote.

        Raises:
            SyncError: the bucket's file cannot be opened.
        """
        if bucket.data is not None:
            return bucket.data
        assert bucket.path is not None, "data, or a file"
        if self.file is None or self.file.path != bucket.path:
            try:
                self.file = SharedFile(bucket.path)
            except OSError as error:
                raise SyncError(
                    f"weight sync {bucket.version}: {bucket.path} cannot be opened ({error.strerror}); actor and "
                    "engine seemed to share this folder"
                ) from None
        return self.file.memory[bucket.offset : bucket.offset + bucket.size]

    def close(self) -> None:
        """Release the shared file."""
        self.file = None


@contextlib.contextmanager
def as_file(bucket: Bucket) -> Iterator[Bucket]:
    """Provide the bucket with its bytes in a file, for the processes of an engine, while the block runs.

    A bucket whose bytes are already in a file is yielded unchanged.

    Raises:
        SyncError: there is no room for the file.
    """
    if bucket.data is None:
        yield bucket
        return
    try:
        file = SharedFile(new_path(), len(bucket.data))
    except OSError as error:
        raise SyncError(
            f"weight sync {bucket.version}: no room for a bucket of {len(bucket.data)} bytes in {FOLDER} "
            f"({error.strerror}); make it larger (docker: --shm-size)"
        ) from None
    try:
        file.memory[:] = bucket.data
        yield replace(bucket, data=None, path=file.path, offset=0)
    finally:
        file.unlink()


def remove_stale() -> None:
    """Remove files of syncs whose processes died.

    These are non-empty files with our name prefix that belong to this user and that no process has open.
    """
    for path in FOLDER.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and os.fstat(descriptor).st_size:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)
