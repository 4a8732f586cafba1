"""The kinds of sources that `data.train` and `data.val` may name, and how each kind is read.

The form of a source determines its kind. If a source fits several forms in this list, the first of these forms counts:

- `builtin:NAME` names a built-in task.
- An existing path names a data file, or a folder of data files.
- `package.module:function` or `file.py:function` names a Python function that gives rows.
- `ORG/NAME[:CONFIGURATION][:SPLIT][@REVISION]` names a data set of the Hugging Face hub.
- A source in no known form is treated as the path of a missing file or folder, and is refused.
"""

import re
from pathlib import Path
from typing import Literal

from rltrain.base.storage import local_path
from rltrain.data.hub_datasets import dataset_name, dataset_rows, require_library
from rltrain.data.row_files import ENDINGS, find_path, path_rows
from rltrain.data.row_functions import function_rows, load_row_function
from rltrain.data.rows import Rows
from rltrain.settings.typed import require
from rltrain.tasks import BUILTIN

BUILTIN_TRAIN_ROWS = 8192
BUILTIN_VAL_ROWS = 512
Split = Literal["train", "val"]
Kind = Literal["builtin", "path", "function", "hub"]
_FUNCTION = re.compile(r"(?:.*\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")


def kind_of(source: str, where: str) -> Kind:
    """Return the kind of a source of rows, such as a file or a Python function. The docstring of
    `rltrain.data.row_sources` lists the kinds of sources and their forms.

    Raises:
        ConfigError: the source is a path that cannot be accessed.
    """
    if source.startswith(BUILTIN):
        return "builtin"
    if local_path(source, where).exists():
        return "path"
    if _FUNCTION.fullmatch(source):
        return "function"
    return "hub" if dataset_name(source) is not None and not source.endswith(ENDINGS) else "path"


def check_source(source: str, where: str) -> None:
    """Check that a source of rows exists, as far as possible without reading rows or querying the hub.

    Raises:
        ConfigError: the file, folder or function does not exist, or the library for data sets of the hub is not
            installed.
    """
    match kind_of(source, where):
        case "function":
            load_row_function(source, where)
        case "path":
            find_path(source, where)
        case "hub":
            require_library(where)


def source_folder(source: str, where: str) -> Path:
    """Return the folder that a relative path in a row of the source starts from.

    For a data file, this is the file's folder, and for a folder of data files, the folder itself. For other sources, it
    is the working directory.
    """
    if kind_of(source, where) != "path":
        return Path()
    path = find_path(source, where)
    return path if path.is_dir() else path.parent


def load_rows(source: str, where: str, *, split: Split, seed: int, limit: int | None) -> Rows:
    """Read the rows of a file, function, built-in task or data set of the hub.

    Args:
        source: the source of the rows, in one of the forms that the docstring of `rltrain.data.row_sources` lists.
        where: the config key and the source of the rows, for the start of the error message.
        split: "train" or "val", the config key under `data` that names the source. Built-in tasks and functions may
            have different rows for training and for evaluation.
        seed: random seed of the run, for built-in tasks and functions.
        limit: number of rows to generate for a built-in task; None for the default, which is `BUILTIN_TRAIN_ROWS` or
            `BUILTIN_VAL_ROWS`.

    Raises:
        ConfigError: the source does not exist or cannot be read, or it has no rows.
    """
    match kind_of(source, where):
        case "builtin":
            rows = _builtin_rows(source, where, split, seed, limit)
        case "function":
            rows = function_rows(source, where, split=split, seed=seed)
        case "hub":
            rows = dataset_rows(source, where, key=split)
        case "path":
            rows = path_rows(source, where)
    require(len(rows) > 0, f"{where}: holds no rows; give the source at least one prompt")
    return rows


def _builtin_rows(source: str, where: str, split: Split, seed: int, limit: int | None) -> Rows:
    from rltrain.tasks import TASKS

    name = source.removeprefix(BUILTIN)
    require(
        name in TASKS, f"{where}: unknown built-in task; the tasks are {', '.join(BUILTIN + task for task in TASKS)}"
    )
    count = limit or (BUILTIN_TRAIN_ROWS if split == "train" else BUILTIN_VAL_ROWS)
    rows = TASKS[name].prompts(split, seed, count)
    return Rows.of_dicts(rows, lambda i: f"{where}, row {i + 1}", own_splits=True)
