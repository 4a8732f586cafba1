"""The folders in which Python finds the modules that users name in the config."""

import os
import sys


def search_working_directory() -> None:
    """Let `import` find modules in the working directory.

    `python -m` adds the working directory to `sys.path`, but an installed console command does not. Ray passes
    `sys.path` to its workers, so the workers can import modules from the working directory, too.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
