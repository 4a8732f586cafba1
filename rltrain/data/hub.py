"""Models by their names on the Hugging Face hub: which commit a name means, and where its files are on this machine.

A name is `NAME` or `ORG/NAME`, with `@REVISION` for a branch, a tag or a commit. A *pinned* name has the 40 digits of a
commit. The driver pins each name once, before any worker starts, so all processes of a run and of its resumption read
the same files.

A process of its own downloads (`rltrain.data.hub_download`). Ctrl-C ends it at once, in the middle of a large file, and
it reads the environment variables of `huggingface_hub` (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) afresh.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rltrain.base.errors import ConfigError, one_line

_COMMIT = re.compile(r"[0-9a-f]{40}")
_START = "import sys; sys.path[:] = {path!r}; from rltrain.data.hub_download import main; main({model!r}, {revision!r})"
# Snapshots of pinned names that `fetch` has found or downloaded for this process.
_snapshots: dict[str, Path] = {}


@dataclass(frozen=True)
class HubName:
    """Name of a model on the hub.

    Attributes:
        model: `ORG/NAME`, or `NAME` for a few old models.
        revision: branch, tag or commit; None for the main branch.
    """

    model: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a whole commit hash."""
        return self.revision is not None and bool(_COMMIT.fullmatch(self.revision))


def hub_name(path: str) -> HubName | None:
    """Return the name of a model on the hub, or None if `path` cannot be one.

    What exists on this machine is always a directory, whatever it is called.
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
        path: a directory, or a pinned name that `fetch` has returned in this process.
    """
    return _snapshots.get(str(path)) or Path(path).expanduser()


def portable(path: str) -> str:
    """Return a model's path in a form that is valid in processes with another working directory and on other machines.

    That is the pinned name, or the absolute directory.
    """
    return path if path in _snapshots else str(Path(path).expanduser().absolute())


def directory_on_node(path: str, *, on_progress: Callable[[], None], environment: Mapping[str, str]) -> str:
    """Return the directory of a model on the machine of this process, which downloads it unless the machine has it.

    Args:
        path: result of `portable`, perhaps on another machine.
        on_progress: called now and then during the download.
        environment: see `fetch`.

    Raises:
        ConfigError: the model cannot be had on this machine.
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
    """Find the files of a model in the cache of this machine, or download them. Returns the pinned name.

    A pinned name whose files are all in the cache needs no network. Another name asks the hub for its commit.

    Args:
        name: the name.
        where: the config key and its value. Error messages start with it.
        on_bytes: called during the download with the number of bytes so far and in total.
        environment: environment variables of the process that downloads.

    Raises:
        ConfigError: the model cannot be had. The message says why and what to do.
    """
    if str(name) in _snapshots:
        return str(name)
    folder = _in_cache(name) or _download(name, where, on_bytes, environment)
    pinned = str(HubName(name.model, folder.name))
    _snapshots[pinned] = folder
    return pinned


def _in_cache(name: HubName) -> Path | None:
    """Return the snapshot of a pinned name if all its files are in the cache."""
    if not name.pinned:
        return None
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    from rltrain.data.hub_download import snapshot

    try:
        # Without the list of the commit's files, the client would take any folder for the whole snapshot.
        get_cached_repo_tree(name.model, revision=name.revision)
        return snapshot(name.model, name.revision, local_files_only=True)
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        return None


def _download(name: HubName, where: str, on_bytes: Callable[[int, int], None], environment: Mapping[str, str]) -> Path:
    code = _START.format(path=sys.path, model=name.model, revision=name.revision)
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=dict(environment),
        ) as process:
            assert process.stdout is not None
            try:
                result = _last_message(process.stdout, on_bytes)
            finally:
                process.kill()
        complaints.seek(0)
        last = (complaints.read().strip().splitlines() or ["no message"])[-1]
    if "folder" in result:
        return Path(result["folder"])
    reason = result.get("error") or f"the download ended with status {process.returncode} ({one_line(last)}); try again"
    raise ConfigError(f"{where}: {reason}")


def _last_message(lines: IO[str], on_bytes: Callable[[int, int], None]) -> dict[str, Any]:
    """Pass the download's progress on. Returns its last message, which says how it ended; {} if there is none."""
    for line in lines:
        if not line.startswith('{"'):
            continue  # something else in the process has printed it
        message: dict[str, Any] = json.loads(line)
        if "bytes" not in message:
            return message
        on_bytes(*message["bytes"])
    return {}
