"""Rollout engine that returns the answers of an earlier run instead of generating new ones.

The engine reads the answers from the tables of samples in the earlier run's output folder, with the tokens, log-probs
and weight versions of that run. A run with the settings, data and seed of the earlier run repeats all updates of the
earlier run. The stored answers are used even if the loss, the reward or the learning rate differs from the earlier run.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.base.errors import ConfigError
from rltrain.data.stored_samples import stored_groups
from rltrain.settings.schema import Config
from workers.rollout.messages import Completion, Request
from workers.sync.buckets import Bucket

_COLUMNS = ["prompt_ids", "response_ids", "rollout_log_probs", "policy_version", "finish_reason"]
# Maximum number of sample tables in memory. Requests that are queued together can belong to several training steps, and
# each training step has its own sample table.
_OPEN_TABLES = 4


def _read(path: Path) -> pa.Table:
    """Read the needed columns of a table of samples. The column `images` is missing if no prompt shows an image."""
    names = pq.read_schema(path).names
    return pq.read_table(path, columns=[*_COLUMNS, *(name for name in ("images",) if name in names)])


class StoredEngine:
    """Engine that looks up answers in the tables of samples of an earlier run.

    An answer is found by the uid of its prompt group and by the index of the answer in the group.

    Args:
        folder: Output folder of the earlier run whose stored answers the engine returns.

    Raises:
        ConfigError: A table of samples cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.groups = folder, stored_groups(folder)
        self.waiting: list[Request] = []
        self._table = functools.lru_cache(_OPEN_TABLES)(_read)

    @property
    def busy(self) -> bool:
        """Return whether the engine has an unfinished request."""
        return bool(self.waiting)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self.waiting += requests

    def step(self) -> list[Completion]:
        """Return the stored answers to all queued requests.

        Raises:
            ConfigError: The earlier run has stored no answer to a request, or the stored answer does not fit the
                request. An answer does not fit if its prompt differs from the request's prompt, or if the answer is
                longer than the request allows.
        """
        requests, self.waiting = self.waiting, []
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Completion:
        (uid, sample), where = request.key, f"rollout.run={self.folder}"
        group = self.groups.get(uid)
        if group is None or sample >= group.size:
            raise ConfigError(
                f"{where}: the stored run has no sample {sample} of prompt group {uid}; use fewer training steps "
                "or samples per prompt, and turn evaluations off"
            )
        table: pa.Table = self._table(group.path)
        (row,) = table.slice(group.first + sample, 1).to_pylist()
        shown = [] if request.images is None else [file for _, file in request.images.files]
        if row["prompt_ids"] != request.prompt_ids or [one["bytes"] for one in row.get("images") or ()] != shown:
            raise ConfigError(
                f"{where}: prompt group {uid} has another prompt in the stored run; use the data settings, "
                "trainer.seed and tokenizer of the stored run"
            )
        if len(row["response_ids"]) > request.max_tokens:
            raise ConfigError(
                f"{where}: a stored answer has {len(row['response_ids'])} tokens, but rollout.max_response_length is "
                f"{request.max_tokens}; raise the setting to its value in the stored run"
            )
        return Completion(
            request.key,
            row["response_ids"],
            row["rollout_log_probs"],
            row["finish_reason"],
            row["policy_version"],
        )

    def abort(self) -> None:
        """Drop all unfinished requests of the engine."""
        self.waiting = []

    def start_load(self) -> None:
        """Do nothing, because stored answers do not depend on the current weights."""

    def load_bucket(self, bucket: Bucket) -> None:
        """Ignore the weights."""

    def finish_load(self, version: int) -> None:
        """Ignore the version of the synced weights, because stored answers keep the weight versions of their run."""

    def sleep(self) -> bool:
        """Return False, because the engine holds no device memory."""
        return False

    def close(self) -> None:
        """Do nothing, because the engine has no processes or threads to end."""


def make(config: Config, path: str, stop_ids: Sequence[int]) -> StoredEngine:
    """Return the engine of stored answers for a config.

    The arguments `path` and `stop_ids` are ignored, because the engine of stored answers needs neither the model nor
    the model's end tokens.
    """
    assert config.rollout.run is not None, "`rltrain.run.checks` must refuse rollout=stored without rollout.run"
    return StoredEngine(Path(config.rollout.run))
