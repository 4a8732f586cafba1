"""Resolves the name of a model on the Hugging Face hub to a commit and to local files.

The name of a model has the form `NAME` or `ORG/NAME`, optionally followed by `@REVISION` for a branch, a tag or a
commit. The name of a model is *pinned* if the revision is a complete commit hash of 40 digits. Before any worker
starts, the driver changes the name of each model to a pinned name with the commit hash, so that all processes read the
same files, even after the run is resumed.

A separate process (`rltrain.data.hub_download`) downloads the files of a model. Ctrl-C ends the download process at
once, even in the middle of a large file, and deletes the files that are not complete. When the download process starts,
it reads the environment variables of `huggingface_hub` (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) anew.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from rltrain.base.errors import ConfigError
from rltrain.data.download_process import run_download

_COMMIT = re.compile(r"[0-9a-f]{40}")
_START = "import sys; sys.path[:] = {path!r}; from rltrain.data.hub_download import main; main({model!r}, {revision!r})"
# Maps pinned model names (NAME@COMMIT) to snapshot folders, for all models that `fetch` has found or downloaded in this
# process.
_snapshots: dict[str, Path] = {}


@dataclass(frozen=True)
class HubName:
    """Name of a model on the Hugging Face hub.

    Attributes:
        model: name of the model without its revision: `ORG/NAME`, or `NAME` for a few old models.
        revision: branch, tag or commit of the model; None for the main branch.
    """

    model: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a complete commit hash of 40 digits."""
        return self.revision is not None and bool(_COMMIT.fullmatch(self.revision))


def hub_name(path: str) -> HubName | None:
    """Parse `path` as the name of a model on the hub; return None if `path` cannot be the name of a model.

    A path that exists on this machine is never read as the name of a model, even if the path has the form of a model's
    name on the hub.
    """
    if os.path.lexists(path) or path.startswith("~"):
        return None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    model, at, revision = path.partition("@")
    try:
        validate_repo_id(model)
    except HFValidationError:
        return None
    usable = not at or (bool(revision.strip()) and not revision.startswith(("/", "-")) and ".." not in revision)
    return HubName(model, revision or None) if usable else None


def local_directory(path: str | Path) -> Path:
    """Return the directory of a model on this machine.

    Args:
        path: path of a directory, or a pinned model name (NAME@COMMIT) that `fetch` has returned earlier in this
            process.
    """
    return _snapshots.get(str(path)) or Path(path).expanduser()


def portable(path: str) -> str:
    """Return a model's path in a form that is also valid on other machines and in other working directories.

    For a model from the hub, return the model's pinned name (NAME@COMMIT). For a model in a folder, return the
    folder's absolute path.
    """
    return path if path in _snapshots else str(Path(path).expanduser().absolute())


def directory_on_node(path: str, *, on_progress: Callable[[], None], environment: Mapping[str, str]) -> str:
    """Return the directory of a model on the machine on which this process runs.

    Model files that the machine does not have are downloaded.

    Args:
        path: the model's path, as `portable` returned it on this machine or on another machine.
        on_progress: function that is called from time to time during the download.
        environment: environment variables of the download process.

    Raises:
        ConfigError: the model is not on this machine and cannot be downloaded.
    """
    if os.path.isabs(path):
        return path
    model, _, revision = path.partition("@")
    where = f"{path} on {socket.gethostname()}"
    name = HubName(model, revision)
    return str(local_directory(fetch(name, where, on_bytes=lambda *_: on_progress(), environment=environment)))


def fetch(
    name: HubName,
    where: str,
    *,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Find the files of a model in the cache of this machine, or download them.

    Return the pinned name of the model (NAME@COMMIT).

    No network is needed if the model's name includes a commit and all files are in the cache. If the model's name
    includes no commit, or files are missing from the cache, the commit and the missing files are fetched from the hub.

    Args:
        name: name of the model on the hub.
        where: the config key and its value, for the start of error messages.
        on_bytes: function that is called during the download with the number of bytes received so far and the total
            number of bytes.
        environment: environment variables of the download process.

    Raises:
        ConfigError: the model can be neither found nor downloaded. The message of the ConfigError names the cause and a
            remedy.
    """
    if str(name) in _snapshots:
        return str(name)
    folder = _in_cache(name) or _download(name, where, on_bytes, environment)
    pinned = str(HubName(name.model, folder.name))
    _snapshots[pinned] = folder
    return pinned


def _in_cache(name: HubName) -> Path | None:
    """Return the snapshot folder of a model if the model's name includes a commit and all files are in the cache;
    otherwise return None.
    """
    if not name.pinned:
        return None
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    from rltrain.data.hub_download import snapshot

    try:
        # `get_cached_repo_tree` raises an error if the cache has no list of the commit's files. Without a list of the
        # commit's files, `snapshot` would accept any cached folder as complete.
        get_cached_repo_tree(name.model, revision=name.revision)
        return snapshot(name.model, name.revision, local_files_only=True)
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        return None


def _download(name: HubName, where: str, on_bytes: Callable[[int, int], None], environment: Mapping[str, str]) -> Path:
    code = _START.format(path=sys.path, model=name.model, revision=name.revision)
    result = run_download(code, environment, partial(_last_message, on_bytes=on_bytes))
    if "folder" not in result:
        raise ConfigError(f"{where}: {result['error']}")
    return Path(result["folder"])


def _last_message(lines: IO[str], on_bytes: Callable[[int, int], None]) -> dict[str, Any]:
    """Read the messages of the download process, and call `on_bytes` with the numbers of bytes in each progress
    message.

    Return the last message of the download process, which says how the download ended; {} if the download process ended
    without a message about its result.
    """
    for line in lines:
        if not line.startswith('{"'):
            continue  # Other libraries in the download process can print lines that are not messages.
        message: dict[str, Any] = json.loads(line)
        if "bytes" not in message:
            return message
        on_bytes(*message["bytes"])
    return {}
