"""The process that downloads a data set from the hub for `rltrain.data.hub_datasets`.

The download process writes one JSON object to its standard output. If the download succeeds, the JSON object on the
standard output holds the commit, the configuration, the split and the paths of the split's Arrow files. If the download
fails, the download process writes the JSON object {"error": reason and remedy}. Progress bars of the library `datasets`
go to the standard error of the download process.
"""

import difflib
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rltrain.base.errors import ConfigError, described, one_line
from rltrain.data.download_process import causes, is_of_disk, remove_unfinished_files_at_sigterm

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Maps the config key of a data set (`train` or `val`) to the names of splits that are tried, in this order, if the user
# names no split.
_SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "dev", "test")}
_ATTEMPTS, _PAUSE_S = 3, 1.0
_QUERY = re.compile(r"\?[^\s'\"]*")  # Matches the query string of a URL, which may contain a signature.
_SHOWN = 8  # An error message lists at most `_SHOWN` configurations or splits.


def main(repository: str, config: str | None, split: str | None, revision: str | None, *, key: str) -> None:
    """Download a data set, and write the result or the error to the standard output as JSON.

    The argument `key` is the config key, `train` or `val`. The arguments `repository`, `config`, `split` and
    `revision` are the parts of the data set's name.
    """
    remove_unfinished_files_at_sigterm()
    result, sys.stdout = sys.stdout, sys.stderr
    try:
        from datasets.utils import logging

        logging.set_verbosity_error()
        found = _cached(repository, config, split, revision, key) or _from_hub(repository, config, split, revision, key)
    except ConfigError as error:
        found = {"error": str(error)}
    except Exception as error:
        found = {"error": _explained(error, repository, revision)}
    result.write(json.dumps(found) + "\n")
    result.flush()


def _cached(
    repository: str, config: str | None, split: str | None, revision: str | None, key: str
) -> dict[str, Any] | None:
    """Return a split that an earlier run has downloaded and prepared, or None if the cache does not contain the split.

    If the data set's name has a configuration, a split and a commit, no network is needed. If the data set's name has
    no revision, the cache is used only in offline mode, in which any cached version of the data set is accepted.
    """
    from datasets.packaged_modules.cache.cache import Cache
    from huggingface_hub import is_offline_mode

    pinned = revision is not None and bool(_COMMIT.fullmatch(revision))
    if not (pinned and config and split) and not is_offline_mode():
        return None
    version = {"version": "0.0.0", "hash": revision} if pinned else {"version": "auto", "hash": "auto"}
    if revision is not None and not pinned:
        return None  # The cache of data sets identifies versions by commit, and not by branch or tag.
    readings = [(config, split)] if split or config is None else [(config, None), (None, config)]
    for name, wanted in readings:
        try:
            builder = Cache(repo_id=repository, dataset_name=repository.partition("/")[2], config_name=name, **version)
            builder.download_and_prepare()
        except ValueError:  # `Cache` raises ValueError if the cache does not hold the data set.
            continue
        return _result(builder, _chosen(list(builder.info.splits or ()), wanted, repository, name, key))
    return None


def _from_hub(repository: str, config: str | None, split: str | None, revision: str | None, key: str) -> dict[str, Any]:
    """Download and prepare all splits of a data set's configuration with the library `datasets`.

    The data set is downloaded at the commit that `revision` names; None stands for the newest commit.
    """
    import datasets
    from huggingface_hub import HfApi

    commit = _persistently(lambda: HfApi().dataset_info(repository, revision=revision).sha)
    configs = _persistently(lambda: datasets.get_dataset_config_names(repository, revision=commit))
    if config is not None and config not in configs and split is None:
        config, split = None, config
    if config is None and len(configs) > 1 and "default" not in configs:
        raise ConfigError(
            f"{repository} has several configurations: {_listed(configs)}; name one, as in {repository}:{configs[0]}"
            f"{f':{split}' if split else ''}"
        )
    if config is not None and config not in configs:
        raise ConfigError(
            f"{repository} has no configuration '{config}'; the configurations are "
            f"{_listed(configs)}{_near(config, configs)}"
        )
    config = config or ("default" if "default" in configs else configs[0])
    builder = _persistently(lambda: datasets.load_dataset_builder(repository, config, revision=commit))
    splits = [str(name) for name in (builder.config.data_files or builder.info.splits or ())]
    chosen = _chosen(splits, split, repository, config, key)
    _persistently(lambda: builder.download_and_prepare())
    return _result(builder, chosen)


def _result(builder: Any, split: str) -> dict[str, Any]:
    files = [file["filename"] for file in builder.as_dataset(split=split).cache_files]
    return {"commit": builder.hash, "config": builder.config.name, "split": split, "files": files}


def _chosen(splits: Sequence[str], split: str | None, repository: str, config: str | None, key: str) -> str:
    """Return the split that the user named, or a default split.

    The default split is the first split in `_SPLITS[key]` that the data set has, for example `validation` if `key` is
    `val`. If a data set has only one split, this split is the default split.

    Raises:
        ConfigError: the data set lacks the split that the user named, or the user named no split and the data set has
            no default split.
    """
    if split in splits:
        return str(split)
    usual = next((name for name in _SPLITS[key] if name in splits), None)
    if split is None and (usual or len(splits) == 1):
        return usual or splits[0]
    where = f"{repository}:{config or ''}"
    if split is None:
        raise ConfigError(f"{where} has several splits: {_listed(splits)}; name one, as in {where}:{splits[0]}")
    raise ConfigError(f"{where} has no split '{split}'; the splits are {_listed(splits)}{_near(split, splits)}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _persistently(call: Callable[[], Any]) -> Any:
    """Call a download function, and repeat the call if the connection breaks.

    Files that an earlier call has downloaded are not downloaded again.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return call()
        except (HfHubHTTPError, OfflineModeIsEnabled, FileNotFoundError, ValueError):
            # HTTP errors, offline mode, missing files and ValueErrors are treated as permanent, so the call is not
            # repeated.
            raise
        except Exception as error:
            if attempt == _ATTEMPTS or is_of_disk(error):
                raise
            time.sleep(_PAUSE_S * attempt)
    raise AssertionError("the last download attempt neither returned a result nor raised an error")


def _explained(error: Exception, repository: str, revision: str | None) -> str:
    """Return a one-line description of a download error and its remedy."""
    from datasets import config
    from huggingface_hub import constants, errors, get_token, is_offline_mode

    chain, page = causes(error), f"{constants.ENDPOINT}/datasets/{repository}"

    def has(*kinds: type) -> bool:
        return any(isinstance(one, kinds) for one in chain)

    if has(errors.GatedRepoError) or "is a gated dataset" in str(error):
        token = "HF_TOKEN belongs to an account without access" if get_token() else "no HF_TOKEN is set"
        return (
            f"the data set is gated, and {token}; ask for access on {page}, and set HF_TOKEN to a token of the account "
            "that has access"
        )
    if has(errors.RevisionNotFoundError):
        return f"{repository} has no branch, tag or commit '{revision}'; {page}/tree/main lists the branches and tags"
    if is_offline_mode() or has(errors.OfflineModeIsEnabled):
        return (
            f"{config.HF_DATASETS_CACHE} does not hold the data set, and HF_HUB_OFFLINE forbids a download; unset "
            "HF_HUB_OFFLINE, or load the data set once on a machine with a network"
        )
    if has(errors.RepositoryNotFoundError):
        return (
            f"no such file or folder, and no data set of that name on {constants.ENDPOINT}; check the name, and set "
            "HF_TOKEN if the data set is private"
        )
    return _other(error, chain)


def _other(error: Exception, chain: Sequence[BaseException]) -> str:
    from datasets import config
    from huggingface_hub import constants, errors

    reason = one_line(_QUERY.sub("", described(chain[-1], 400)), 200)
    status = next((one.response.status_code for one in chain if isinstance(one, errors.HfHubHTTPError)), None)
    if status in (401, 403):
        return f"{constants.ENDPOINT} refuses the token ({reason}); set HF_TOKEN to a token that may read the data set"
    if is_of_disk(error):
        cache = config.HF_DATASETS_CACHE
        return (
            f"the data set cannot be stored in {cache} ({reason}); free space there, or set HF_HOME to another folder"
        )
    kinds = [type(one).__name__ for one in chain if type(one).__module__.startswith(("httpx", "httpcore", "requests"))]
    if status is None and kinds and not any(kind.startswith("Connect") for kind in kinds):
        return f"the download broke off ({reason}); start again: complete files are kept"
    if status is not None or kinds or isinstance(error, ConnectionError):
        return (
            f"no such file or folder, and {constants.ENDPOINT} cannot be reached ({reason}); try again later, check "
            "the network and HF_ENDPOINT, or give a file"
        )
    return (
        f"the library `datasets` cannot read the data set ({reason}); give the path of the data set's files, or a "
        "function that reads the files"
    )
