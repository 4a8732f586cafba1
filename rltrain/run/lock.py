"""Lock that allows one run at a time in a folder.

A second run would overwrite the files of the first one and remove its checkpoints.
"""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO, Self

from rltrain.base.errors import ConfigError
from rltrain.base.storage import Folder, absolute, local_path
from rltrain.settings.schema import TrainerConfig

_HELD = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """Context manager that locks a run's output folder and, if it is local, its checkpoint folder.

    The locks last until the context exits or the process ends. They are POSIX record locks: they end with the process
    however it dies, and a forked child does not keep them. The filelock library uses flock, whose locks a forked child
    would keep.

    Entering the context creates no files, but raises ConfigError if another run holds one of the folders. The method
    `take` creates the lock files.

    Args:
        trainer: the config section that names the folders.
    """

    def __init__(self, trainer: TrainerConfig) -> None:
        output, checkpoints = Path(_real(trainer.output_dir)), Folder(absolute(trainer.checkpoint_dir))
        self.files = {f"trainer.output_dir={trainer.output_dir}": output / ".lock"}
        if checkpoints.local:
            folder = Path(_real(checkpoints.root))
            self.files[f"trainer.checkpoint_dir={trainer.checkpoint_dir}"] = folder.parent / f".{folder.name}.lock"
        self.held: list[IO[str]] = []

    def __enter__(self) -> Self:
        for where, file in self.files.items():
            if local_path(str(file), where).is_file():
                self._hold(where, file)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.held:
            file.close()

    def take(self) -> None:
        """Create the output folder and the lock files, and lock both folders.

        Raises:
            ConfigError: another run holds one of the folders.
        """
        self.__exit__()
        self.held = []
        for where, file in self.files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._hold(where, file)
        for stream in self.held:
            stream.truncate(0)
            stream.write(f"{os.getpid()} on {socket.gethostname()}\n")
            stream.flush()

    def _hold(self, where: str, file: Path) -> None:
        try:
            stream = file.open("a", encoding="utf-8")
        except OSError:  # no write access: the code that later writes to the folder reports that
            return
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.close()
            if error.errno not in _HELD:
                return  # the file system does not support locks
            holder = " ".join(file.read_text("utf-8", "replace").split())[:80]
            raise ConfigError(
                f"{where}: another run is at work there (process {holder}, {file}); wait for its end, or name a new "
                "folder"
            ) from None
        self.held.append(stream)


def _real(path: str) -> str:
    """Return the path without symbolic links, so that all names of a folder give the same lock file."""
    return os.path.realpath(absolute(path))
