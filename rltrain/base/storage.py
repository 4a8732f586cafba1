"""Folders on any file system that fsspec supports: local paths, `file://`, `s3://` and so on.

The library universal-pathlib could replace only the methods `at`, `path`, `open`, `read` and `exists` of `Folder`.
universal-pathlib lacks atomic writes, checksums and listings that bypass fsspec's cache. A transaction of fsspec is not
atomic, because fsspec first writes a local file to the system's temporary folder, which can be on another disk, and
then copies the file.
"""

import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from rltrain.base.errors import ConfigError

# Number of bytes per read of a file. Buffers larger than 1 MiB fragment the memory of a long-running process.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileStart:
    """The first `size` bytes of a local file.

    The first `size` bytes stay the same when data is appended to the file.
    """

    path: Path
    size: int


class Folder:
    """A local or remote folder, which does not have to exist.

    Args:
        url: location of the folder: a local path, or protocol://path.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") or url
        self.fs, root = url_to_fs(self.url)
        self.root: str = root.rstrip("/") or root
        self.local = "file" in ((self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol)

    def __str__(self) -> str:
        return self.root if self.local else self.url

    def at(self, name: str) -> "Folder":
        """Return the subfolder with the given name."""
        return Folder(f"{self.url}/{name}")

    def path(self, name: str) -> str:
        """Return the path of a file in the folder, in the form that the fsspec file system expects."""
        return f"{self.root}/{name}"

    def open(self, name: str, mode: str = "rb") -> Any:
        """Open the file `name` in the folder. If a file is opened for writing, its parent folders are created."""
        if "r" not in mode:
            self.fs.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        return self.fs.open(self.path(name), mode)

    def read(self, name: str) -> bytes:
        """Return the content of the file `name` in the folder."""
        content: bytes = self.fs.cat_file(self.path(name))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically: even if the process is killed, the file is either complete or not written at all."""
        # An object store shows a new object only when the object is complete, so only local files are first written
        # under a temporary name.
        temporary = f"{name}.partial" if self.local else name
        with self.open(temporary, "wb") as stream:
            stream.write(content)
            if self.local:
                flush(stream)
        if self.local:
            os.replace(self.path(temporary), self.path(name))

    def copy(self, start: FileStart, name: str) -> tuple[int, int]:
        """Copy the first `start.size` bytes of the local file `start.path` to the file `name` in this folder.

        The bytes are copied in chunks. Return the size and the CRC-32 of the copied bytes.

        Raises:
            OSError: the local file has become shorter than `start.size` bytes, or a file cannot be read or written.
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
        """Return whether a file or folder with the given name exists."""
        return bool(self.fs.exists(self.path(name)))

    def names(self) -> list[str]:
        """Return the names of all files and subfolders directly in the folder.

        If the folder does not exist, `names` returns an empty list.
        """
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def files(self) -> list[str]:
        """Return the paths of all files in the folder and its subfolders, relative to the folder."""
        self.fs.invalidate_cache()
        found = self.fs.find(self.root) if self.fs.exists(self.root) else []
        return sorted(path[len(self.root) :].lstrip("/") for path in found)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all its content; do nothing if no file or folder has the given name."""
        # If the path is a symbolic link, only the link is removed, and not the link's target.
        if self.local and os.path.islink(self.path(name)):
            os.unlink(self.path(name))
        elif self.exists(name):
            self.fs.rm(self.path(name), recursive=True)

    def checksum(self, name: str) -> tuple[int, int]:
        """Return the size and the CRC-32 of a file."""
        size = crc = 0
        with self.open(name) as stream:
            while chunk := stream.read(_CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return size, crc


def flush(stream: Any) -> None:
    """Flush a local file's content to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def local_path(path: str, where: str) -> Path:
    """Return a path that the user wrote, with `~` expanded, even if the path does not exist.

    Args:
        path: the path as the user wrote it.
        where: start of the error message, such as the config key that holds the path.

    Raises:
        ConfigError: the path is invalid (a name is too long, symbolic links form a loop, or the path contains a NUL
            character), the user has no permission to access the path, a name in the path is not UTF-8, or there is no
            home folder for `~`.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{where}: '~' cannot be expanded, because HOME is not set or the user is unknown; write the full path"
        ) from None
    _require_utf8(found, where)
    try:
        os.stat(found)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where}: the path cannot be accessed ({reason}); give another path") from None
    return found


def _require_utf8(path: Path, where: str) -> None:
    """Raise ConfigError if the path's bytes are not UTF-8.

    Libraries in other programming languages encode file names in UTF-8, so such libraries would not find a path that is
    not UTF-8.
    """
    whole, encoding = os.path.abspath(path), sys.getfilesystemencoding()
    try:
        if os.fsencode(whole) == whole.encode("utf-8"):
            return
    except UnicodeEncodeError:  # Python represents undecodable bytes as lone surrogates, which UTF-8 cannot encode
        pass
    if encoding == "utf-8":
        raise ConfigError(f"{where}: a name in {whole!a} is not UTF-8; rename that file or folder")
    raise ConfigError(
        f"{where}: {whole!a} is not plain ASCII, and such names cannot be used while the locale's encoding is "
        f"{encoding}; set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
    )


def absolute(url: str) -> str:
    """Return `url`, with a local path made absolute so that the path is valid in any working directory."""
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))
