"""Simulates a full disk in download processes, which are processes of their own."""

from pathlib import Path

# Writes to unfinished downloads fail after 1,000 bytes.
_DOWNLOAD = """
import errno, io, pathlib
class Full(io.FileIO):
    def write(self, content):
        if self.tell() + len(content) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(content)
opened = pathlib.Path.open
def open(self, mode="r", *rest, **options):
    return Full(self, "wb") if self.name.endswith(".incomplete") else opened(self, mode, *rest, **options)
pathlib.Path.open = open
"""
# The Arrow files, into which `datasets` converts downloaded files, are written to a device that is always full.
_CONVERSION = """
import builtins
opened = builtins.open
def open(file, mode="r", *rest, **options):
    return opened("/dev/full" if str(file).endswith(".arrow") and "w" in mode else file, mode, *rest, **options)
builtins.open = open
"""
FAULTS = {"download": _DOWNLOAD, "conversion": _CONVERSION}


def full_disk(folder: Path, during: str) -> str:
    """Write a module that makes the disk full for each Python process that has the returned folder in PYTHONPATH.

    Args:
        folder: Folder in which the module's folder is created.
        during: "download" or "conversion", the writes that fail.
    """
    fault = folder / "fault"
    fault.mkdir()
    (fault / "sitecustomize.py").write_text(FAULTS[during])
    return str(fault)
