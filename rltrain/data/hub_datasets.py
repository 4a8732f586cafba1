"""Resolves the name of a data set on the Hugging Face hub to a commit, and reads the rows of one split.

The name of a data set has the form `ORG/NAME[:CONFIGURATION][:SPLIT][@REVISION]`. In the name `ORG/NAME:WORD`, WORD
means a configuration if the data set has a configuration of that name, and otherwise a split. The form
`ORG/NAME::SPLIT` gives a split but no configuration. The name of a data set is *pinned* if the name has all parts and
the revision is a complete commit hash of 40 digits. The driver adds the missing parts, such as the commit, to the name
of each data set once, so that a resumed run reads the same rows again.

A separate process (`rltrain.data.hub_dataset_download`) downloads data sets with the library `datasets`. Ctrl-C ends
the download process at once, and deletes the files that are not complete. When the download process starts, it reads
the environment variables HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE anew. Because the library `datasets`, which
imports pandas, runs in a separate process, the driver does not have to import pandas.
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from rltrain.base.errors import ConfigError, one_line
from rltrain.data.arrow_rows import table_rows
from rltrain.data.download_process import run_download
from rltrain.data.rows import Rows
from rltrain.settings.typed import require

# The name of a data set on the hub: ORG/NAME[:CONFIGURATION][:SPLIT][@REVISION].
_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?::(?P<config>[^:@/]*))?(?::(?P<split>[^:@/]+))?(?:@(?P<revision>[^:@]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_START = (
    "import sys; sys.path[:] = {path!r}; from rltrain.data.hub_dataset_download import main; "
    "main({repository!r}, {config!r}, {split!r}, {revision!r}, key={key!r})"
)
_QUIET = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
# Maps the pinned name of a data set to the paths of the data set's Arrow files, for all data sets that this process has
# fetched.
_files: dict[str, list[str]] = {}


@dataclass(frozen=True)
class DatasetName:
    """Name of a data set on the Hugging Face hub.

    Attributes:
        repository: name of the data set without configuration, split and revision: `ORG/NAME`.
        config: name of the configuration; None for the data set's configuration "default" or its only configuration. In
            the name `ORG/NAME:WORD`, `config` is WORD and `split` is None, even if WORD is the name of a split.
        split: name of the split in `ORG/NAME:CONFIG:SPLIT` or `ORG/NAME::SPLIT`; None if the data set's name has
            neither of these two forms.
        revision: branch, tag or commit of the data set; None for the main branch.
    """

    repository: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        parts = [self.repository, *([self.config or ""] if self.config or self.split else [])]
        parts += [self.split] if self.split else []
        return ":".join(parts) + (f"@{self.revision}" if self.revision else "")

    @property
    def pinned(self) -> bool:
        """Whether the data set's name has a configuration, a split and a complete commit hash as its revision."""
        return bool(self.config and self.split and self.revision and _COMMIT.fullmatch(self.revision))

    def may_mean(self, pinned: "DatasetName") -> bool:
        """Return True if the name `self` has no revision and may be a shorter name of the split that `pinned` names."""
        if self.repository != pinned.repository or self.revision is not None or not pinned.pinned:
            return False
        if self.split is not None:
            return self.split == pinned.split and self.config in (None, pinned.config)
        return self.config in (None, pinned.config, pinned.split)


def dataset_name(source: str) -> DatasetName | None:
    """Parse `source` as the name of a data set on the hub; return None if `source` cannot be the name of a data set."""
    found = _NAME.fullmatch(source)
    if found is None or source.endswith(":"):
        return None
    config, split, revision = (found[part] or None for part in ("config", "split", "revision"))
    return DatasetName(found["repository"], config, split, revision)


def require_library(where: str) -> None:
    """Raise ConfigError if the library `datasets` is not installed."""
    require(
        importlib.util.find_spec("datasets") is not None,
        f"{where}: no such file or folder, and data sets of the hub need the library `datasets`; check the path, or "
        "run pip install 'rltrain[datasets]'",
    )


def fetch_dataset(name: DatasetName, where: str, *, key: str) -> DatasetName:
    """Find a split of a data set in the cache of this machine, or download and prepare the split.

    Return the data set's name with the configuration, the split and the commit.

    No network is needed if the data set's name contains a configuration, a split and a commit, and the split is in the
    cache. The hub is queried if the data set's name lacks a configuration, a split or a commit, or if the split is not
    in the cache. In offline mode, the hub is never queried, so the split must be in the cache.

    Args:
        name: name of the data set on the hub.
        where: the config key and its value, for the start of error messages.
        key: the config key, `train` or `val`, which determines the split if the data set's name has no split.

    Raises:
        ConfigError: the data set can be neither found nor downloaded. The message of the ConfigError names the cause
            and a remedy.
    """
    if str(name) in _files:
        return name
    require_library(where)
    result = _download(name, where, key)
    pinned = DatasetName(name.repository, result["config"], result["split"], result["commit"])
    _files[str(pinned)] = result["files"]
    return pinned


def dataset_rows(source: str, where: str, *, key: str) -> Rows:
    """Return the rows of a data set.

    The values of each row stay on disk until the row is read. The arguments `where` and `key` and the raised errors are
    the same as those of `fetch_dataset`.
    """
    name = dataset_name(source)
    assert name is not None, "`source` must be the name of a data set on the hub"
    return table_rows(_table(_files[str(fetch_dataset(name, where, key=key))], where), where)


def _table(files: Sequence[str], where: str) -> Any:
    import pyarrow

    try:
        parts = [pyarrow.ipc.open_stream(pyarrow.memory_map(file)).read_all() for file in files]
        return pyarrow.concat_tables(parts)
    except Exception as error:  # Pyarrow raises many exception types for a damaged file.
        folder = os.path.dirname(files[0]) if files else "the cache"
        raise ConfigError(
            f"{where}: the files in {folder} cannot be read ({one_line(str(error))}); remove the files, and start again"
        ) from None


def _download(name: DatasetName, where: str, key: str) -> dict[str, Any]:
    parts = {"repository": name.repository, "config": name.config, "split": name.split, "revision": name.revision}
    code = _START.format(path=sys.path, key=key, **parts)
    shown = sys.stderr.isatty()  # Progress bars are shown only if stderr is a terminal.
    environment = {**os.environ, **({} if shown else _QUIET)}
    environment.pop("TQDM_DISABLE", None)
    result = run_download(code, environment, _last_line, show_progress=shown)
    if "files" not in result:
        raise ConfigError(f"{where}: {result['error']}")
    return result


def _last_line(lines: IO[str]) -> dict[str, Any]:
    """Return the result of the download process, which is the last line of its output; {} if there is no output."""
    said = lines.read().splitlines()
    result: dict[str, Any] = json.loads(said[-1]) if said else {}
    return result
