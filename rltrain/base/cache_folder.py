"""The folder of files that rltrain makes once and uses again, such as the built-in model."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the path of the cache directory, which holds only files that can be created again.

    The cache directory is not created, and may not exist yet.
    """
    if own := os.environ.get("RLTRAIN_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "rltrain"
