"""Read Dockerfiles, and run their steps in a folder of this machine instead of a container."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each as its name and its text on one line."""
    lines = [line for line in dockerfile.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, text) for name, _, text in (line.partition(" ") for line in joined.splitlines())]


def install_steps(dockerfile: Path) -> list[str]:
    """Return the commands of a Dockerfile that install Python packages."""
    return [text for name, text in instructions(dockerfile) if name == "RUN" and "pip install" in text]


class ImageFolder:
    """A folder that stands for the file system of an image.

    Args:
        dockerfile: the Dockerfile.
        folder: the folder, which is the root of the image's absolute paths.
        programs: folder at the start of PATH, such as the `bin` of a virtual environment.
    """

    def __init__(self, dockerfile: Path, folder: Path, programs: Path) -> None:
        self.dockerfile, self.folder, self.programs = dockerfile, folder, programs
        self.env: dict[str, str] = {}
        self.directory = folder

    def build(self) -> None:
        """Copy the image's files, and run the steps that install Python packages. Other steps are skipped."""
        steps = install_steps(self.dockerfile)
        for name, text in instructions(self.dockerfile):
            if name == "WORKDIR":
                self.directory = self.inside(text)
                self.directory.mkdir(parents=True, exist_ok=True)
            elif name == "COPY":
                self._copy(*text.split())
            elif name == "ENV":
                self.env.update(pair.split("=", 1) for pair in shlex.split(text))
            elif name == "RUN" and text in steps:
                self.run(["bash", "-euo", "pipefail", "-c", text], timeout=1500)

    def inside(self, path: str) -> Path:
        """Return the path below the folder that stands for an absolute path in the image."""
        return self.folder / path.removeprefix("/")

    def _copy(self, source: str, target: str) -> None:
        place = self.directory / target
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, place)

    def run(self, command: list[str], *, timeout: float, env: Mapping[str, str] | None = None) -> str:
        """Run a command in the image's working directory with the image's environment, and return its stdout."""
        own = {name: str(self.inside(value)) if value.startswith("/") else value for name, value in self.env.items()}
        path = f"{self.programs}:{os.environ['PATH']}"
        variables = {**os.environ, "PYTHONPATH": "", **own, "PATH": path, **(env or {})}
        done = subprocess.run(
            command, cwd=self.directory, env=variables, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout
