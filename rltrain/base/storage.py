"""Folders on any file system that fsspec knows: local paths, `file://`, `s3://` and so on."""

import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from rltrain.base.errors import ConfigError

_CHUNK = 1 << 20  # bytes read at once; larger buffers leave holes in the memory of a process that lives for days


@dataclass(frozen=True)
class FileStart:
    """The first `size` bytes of a local file. They stay as they are while more is appended to the file."""

    path: Path
    size: int


class Folder:
    """A folder, which need not exist.

    Args:
        url: a local path, or protocol://path.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
        self.fs, root = url_to_fs(self.url)
        self.root: str = root.rstrip("/") or root
        self.local = "file" in ((self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol)

    def __str__(self) -> str:
        return self.root if self.local else self.url

    def at(self, name: str) -> "Folder":
        """A folder in this one."""
        return Folder(f"{self.url}/{name}")

    def path(self, name: str) -> str:
        """What the file system calls a file in this folder."""
        return f"{self.root}/{name}"

    def open(self, name: str, mode: str = "rb") -> Any:
        """Open a file; one to be written gets the folders that it lies in."""
        if "r" not in mode:
            self.fs.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        return self.fs.open(self.path(name), mode)

    def read(self, name: str) -> bytes:
        """All of a file."""
        with self.open(name) as stream:
            content: bytes = stream.read()
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file that is there as a whole or not at all, whenever this process is killed."""
        temporary = f"{name}.partial" if self.local else name  # an object store shows an object when it is complete
        with self.open(temporary, "wb") as stream:
            stream.write(content)
            if self.local:
                flush(stream)
        if self.local:
            os.replace(self.path(temporary), self.path(name))

    def copy(self, start: FileStart, name: str) -> tuple[int, int]:
        """Copy the start of a local file to `name`, in pieces; returns its size and CRC-32.

        Raises:
            OSError: the file has become shorter, or cannot be read or written.
        """
        left, crc = start.size, 0
        with start.path.open("rb") as source, self.open(name, "wb") as target:
            while left:
                chunk = source.read(min(left, _CHUNK))
                if not chunk:
                    raise OSError(f"{start.path} has lost its last {left:,} bytes")
                target.write(chunk)
                left, crc = left - len(chunk), zlib.crc32(chunk, crc)
            if self.local:
                flush(target)
        return start.size, crc

    def exists(self, name: str) -> bool:
        """Whether there is such a file or folder."""
        return bool(self.fs.exists(self.path(name)))

    def names(self) -> list[str]:
        """What lies directly in this folder; nothing where it does not exist."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def files(self) -> list[str]:
        """All files below, by their paths from here."""
        self.fs.invalidate_cache()
        found = self.fs.find(self.root) if self.fs.exists(self.root) else []
        return sorted(path[len(self.root) :].lstrip("/") for path in found)

    def remove(self, name: str) -> None:
        """Remove a file or a folder with all that is in it, if it is there."""
        if self.local and os.path.islink(self.path(name)):  # what it points to stays, if that is there at all
            os.unlink(self.path(name))
        elif self.exists(name):
            self.fs.rm(self.path(name), recursive=True)

    def checksum(self, name: str) -> tuple[int, int]:
        """Size and CRC-32 of a file, read to its end."""
        size = crc = 0
        with self.open(name) as stream:
            while chunk := stream.read(_CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return size, crc


def flush(stream: Any) -> None:
    """Let a local file's bytes reach the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def local_path(path: str, where: str) -> Path:
    """Return a path that the user named, with `~` replaced; nothing need be there.

    Args:
        path: as the user wrote it.
        where: what the error begins with.

    Raises:
        ConfigError: the system takes it for no path (a name is too long, links go round in a loop, it holds a NUL), the
            user may not look there, a name is not UTF-8, or there is no home folder that `~` could stand for.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{where}: '~' stands for no folder here, as HOME is not set or the user is unknown; write the whole path"
        ) from None
    _require_utf8(found, where)
    try:
        os.stat(found)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where}: is no path that can be looked at ({reason}); give another path") from None
    return found


def _require_utf8(path: Path, where: str) -> None:
    """Refuse a path that libraries in other languages, which write names in UTF-8, would look for elsewhere."""
    whole, encoding = os.path.abspath(path), sys.getfilesystemencoding()
    try:
        if os.fsencode(whole) == whole.encode("utf-8"):
            return
    except UnicodeEncodeError:  # bytes that the encoding does not know are halves of surrogate pairs
        pass
    if encoding == "utf-8":
        raise ConfigError(f"{where}: a name in {whole!a} is not UTF-8; rename it")
    raise ConfigError(
        f"{where}: {whole!a} is not plain ASCII, and other names cannot be used while the locale's encoding is "
        f"{encoding}; set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
    )


def absolute(url: str) -> str:
    """The same for processes that have another working directory."""
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))
