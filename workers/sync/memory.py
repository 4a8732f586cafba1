"""One file in shared memory for the length of a sync, which all processes of a host map.

It is created for this user only and removed when the sync ends, however it ends, or as soon as everybody has it open.
What survives is a file of two buckets, if every process that knew it is killed before that: the next sync on this host
removes files that no process has open (each holds a lock on what it maps, and locks end with their process).
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
    """A name that no other sync has."""
    return str(FOLDER / f"{PREFIX}{secrets.token_hex(8)}")


def whereabouts() -> str | None:
    """What two processes have in common if and only if they can map each other's files; None where it is unknown."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{kernel} {os.stat(FOLDER).st_dev} {os.getuid()}"
    except OSError:
        return None


class SharedFile:
    """A file that this process has mapped.

    Args:
        path: the file.
        size: bytes to create it with; None opens the one that is there.

    Raises:
        OSError: when there is no room for it, or no such file.
    """

    def __init__(self, path: str, size: int | None = None) -> None:
        self.path = path
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if size is not None else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if size is not None:
                # Without it a full folder would end the process that writes (SIGBUS) instead of raising.
                os.posix_fallocate(descriptor, 0, max(size, 1))
            self.memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)  # the map keeps the descriptor and its lock
        except BaseException:
            if size is not None:
                self.unlink()
            raise
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Remove its name; those who have it mapped keep it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class Reader:
    """The bytes of buckets, wherever they lie."""

    def __init__(self) -> None:
        self.file: SharedFile | None = None

    def data(self, bucket: Bucket) -> np.ndarray:
        """The bytes (n,) of a bucket that all ranks wrote. Raises SyncError when its file cannot be opened."""
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
        """Let go of the file."""
        self.file = None


@contextlib.contextmanager
def as_file(bucket: Bucket) -> Iterator[Bucket]:
    """The bucket with its bytes in a file, for the processes of an engine, for as long as the block runs."""
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
    """Remove the files of syncs that died: ours by name and owner, and open in no process."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and os.fstat(descriptor).st_size:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)
