"""Lock that lets only one run at a time use a folder.

A second run in the same folder would overwrite the files of the first run and remove the first run's checkpoints.
"""

import os
import socket
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from rltrain.base.errors import ConfigError
from rltrain.base.storage import Folder, absolute, local_path
from rltrain.settings.schema import TrainerConfig


class RunLock:
    """Context manager that locks the output folder of a run, and also the checkpoint folder if that folder is local.

    The file locks last until the `with` block ends or the process ends, even if the process is killed. A forked child
    process does not hold the file locks of its parent process.

    Entering the context creates no files. If the lock file of a folder already exists, entering the context locks the
    folder, or raises ConfigError if another run has locked the folder. The method `take` creates the lock files and
    takes the locks.

    Args:
        trainer: section `trainer` of the config, which names the output folder and the checkpoint folder.
    """

    def __init__(self, trainer: TrainerConfig) -> None:
        output, checkpoints = Path(_real(trainer.output_dir)), Folder(absolute(trainer.checkpoint_dir))
        self.files = {f"trainer.output_dir={trainer.output_dir}": output / ".lock"}
        if checkpoints.local:
            folder = Path(_real(checkpoints.root))
            self.files[f"trainer.checkpoint_dir={trainer.checkpoint_dir}"] = folder.parent / f".{folder.name}.lock"
        self.held: list[FileLock] = []

    def __enter__(self) -> Self:
        for where, file in self.files.items():
            if local_path(str(file), where).is_file():
                self._hold(where, file)
        return self

    def __exit__(self, *_: object) -> None:
        for lock in self.held:
            lock.release()
        self.held = []

    def take(self) -> None:
        """Create the output folder and the lock files, and lock the output folder and a local checkpoint folder.

        Raises:
            ConfigError: another run has locked the output folder or the checkpoint folder.
        """
        self.__exit__()
        for where, file in self.files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._hold(where, file)
        for lock in self.held:
            Path(lock.lock_file).write_text(f"{os.getpid()} on {socket.gethostname()}\n", "utf-8")

    def _hold(self, where: str, file: Path) -> None:
        # On a file system without locks, filelock would by default use a soft lock (`fallback_to_soft=True`), which
        # is held as long as the lock file exists. A soft lock would outlive a killed run, because a killed run does
        # not remove its lock file.
        lock = FileLock(file, blocking=False, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            holder = " ".join(file.read_text("utf-8", "replace").split())[:80]
            raise ConfigError(
                f"{where}: another run is using this folder (process {holder}, {file}); wait until that run ends, or "
                "name a new folder"
            ) from None
        # If the file system has no locks or the user has no write access, the run goes on without a lock. If write
        # access is missing, a later write to the folder reports an error.
        except OSError:
            return
        self.held.append(lock)


def _real(path: str) -> str:
    """Return the path without symbolic links, so that all paths to the same folder lead to one lock file."""
    return os.path.realpath(absolute(path))
