"""Provides a folder for the caches, settings and tokens of libraries if the user has no writable home folder."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def ensure_home() -> None:
    """Redirect the caches and settings of libraries to a private folder if the home folder is not writable.

    If there is no home folder at all, for instance because the system does not know the user id, HOME is set to a
    private temporary folder. If the home folder exists but is not writable, HOME does not change, so that existing
    files can be read. If the home folder is not writable, libraries write new caches and settings to a private
    temporary folder. Environment variables, which child processes inherit, give libraries the path of the private
    folder. An environment variable that names a cache folder keeps its value if the variable is already set.
    """
    home = _home()
    if home is None:
        os.environ["HOME"] = str(_private_folder())
    elif not _is_writable(home / ".cache"):
        private, hub = _private_folder(), Path(os.environ.get("XDG_CACHE_HOME", home / ".cache")) / "huggingface"
        for variable, folder in {
            # The cache of the Hugging Face hub stays in its usual folder, so that models that are already downloaded
            # are found.
            "HF_HOME": hub,
            "XDG_CACHE_HOME": private / ".cache",
            "XDG_CONFIG_HOME": private / ".config",
            "TRITON_CACHE_DIR": private / ".triton",
        }.items():
            os.environ.setdefault(variable, str(folder))


def _home() -> Path | None:
    """Return the user's home folder, or None if the user has no home folder and none can be created."""
    try:
        home = Path.home()
    except RuntimeError:  # `Path.home` fails if HOME is not set and the system does not know the user.
        return None
    return home if os.path.isdir(home) or _is_writable(home) else None


def _is_writable(folder: Path) -> bool:
    """Return whether files can be created in a folder. If the folder does not exist, `_is_writable` creates it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _private_folder() -> Path:
    """Return a folder that only the current user can write to.

    Every call of `_private_folder` returns the folder `rltrain-UID` in the system's temporary folder. If
    `rltrain-UID` is not a folder, or is a folder that another user owns or can write to, each call instead creates
    and returns a new temporary folder.
    """
    folder = Path(tempfile.gettempdir()) / f"rltrain-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others:
        return folder
    return Path(tempfile.mkdtemp(prefix="rltrain-"))
