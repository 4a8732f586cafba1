"""A home folder for users who have none, as libraries keep their caches, settings and tokens there."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def ensure_home() -> None:
    """Let libraries write their caches and settings somewhere else where they cannot write to the home folder.

    HOME names a private folder among the temporary files if there is no home folder at all, as for a user id that the
    system does not know. A home folder that cannot be written to stays, for what can be read there, and new caches and
    settings go to the private folder. Set for this process and those that it starts.
    """
    home = _home()
    if home is None:
        os.environ["HOME"] = str(_private_folder())
    elif not _is_writable(home / ".cache"):
        private, hub = _private_folder(), Path(os.environ.get("XDG_CACHE_HOME", home / ".cache")) / "huggingface"
        for variable, folder in {
            "HF_HOME": hub,  # models are read from there
            "XDG_CACHE_HOME": private / ".cache",
            "XDG_CONFIG_HOME": private / ".config",
            "TRITON_CACHE_DIR": private / ".triton",
        }.items():
            os.environ.setdefault(variable, str(folder))


def _home() -> Path | None:
    """The user's home folder, if it is there or can be made."""
    try:
        home = Path.home()
    except RuntimeError:  # HOME is not set, and the system does not know the user
        return None
    return home if os.path.isdir(home) or _is_writable(home) else None


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _private_folder() -> Path:
    """A folder that only this user can write to: the same one each time, unless somebody else has taken its name."""
    folder = Path(tempfile.gettempdir()) / f"rltrain-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others:
        return folder
    return Path(tempfile.mkdtemp(prefix="rltrain-"))
