"""Functions of the driver that save checkpoints, remove old checkpoints, and read a checkpoint to resume a run.

A checkpoint is a folder named `step_N` with these parts:

- `state/ROLE/`: tensors, written by the ranks;
- `model/`: the exported policy, in Hugging Face format;
- `driver.json`: all other state of the run;
- `history/`: copies of the run's JSON-lines files, such as metrics and ledger;
- `config.yaml`: the config of the run;
- `manifest.json`: size and CRC-32 of every file; the file `manifest.json` is written last.

A folder without the file `manifest.json` is not a checkpoint. A checkpoint is damaged if any file does not match the
manifest.
"""

import asyncio
import difflib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rltrain.base import trace
from rltrain.base.background_tasks import cancelled
from rltrain.base.errors import CheckpointError, RLTrainError, described
from rltrain.base.storage import FileStart, Folder
from rltrain.settings.typed import require
from workers.training.rank_state import MODEL, STATE, Saved, reason
from workers.training.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

MANIFEST, DRIVER, CONFIG, HISTORY = "manifest.json", "driver.json", "config.yaml", "history"
_NAME = re.compile(r"step_(0|[1-9]\d*)")
_PARTS = {MANIFEST, DRIVER, CONFIG, HISTORY, MODEL, STATE}
# Shortest and longest pause, in seconds, between two polls of the training ranks. The driver polls the ranks until all
# ranks have written their checkpoint files. The pause between two polls doubles after each poll, up to the longest
# pause. The driver polls because a training rank runs one method call at a time: a method call that waited until the
# checkpoint files are written would delay training.
_ASK_AFTER_S, _ASK_AT_MOST_AFTER_S = 0.02, 0.5


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files all match its manifest.

    Attributes:
        folder: location of the checkpoint.
        step: training step after which the checkpoint was taken.
        incarnation: number of times that the run had been restored when the checkpoint was taken.
        state: state of the driver.
        config: config of the run, as YAML text.
        history: dict that maps the name of each of the run's JSON-lines files to the contents of the file.
        metric: value of the metric that selects the best checkpoint; None if the metric was not measured.
    """

    folder: Folder
    step: int
    incarnation: int
    state: dict[str, Any]
    config: str
    history: dict[str, bytes]
    metric: float | None


def read(folder: Folder) -> Checkpoint:
    """Read a checkpoint and check the size and CRC-32 of every file.

    Raises:
        CheckpointError: a file of the checkpoint is missing, unreadable or damaged, or the training step in the
            folder's name is wrong.
    """
    manifest = read_manifest(folder)
    step, name = manifest["step"], str(folder).rpartition("/")[2]
    if _NAME.fullmatch(name) and name != f"step_{step}":
        raise CheckpointError(f"{folder}: is the checkpoint of step {step}, but the folder's name gives another step")
    for name, (size, crc) in manifest["files"].items():
        try:
            found = folder.checksum(name)
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: {name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read ({error.strerror or error})") from None
        if found[0] != size:
            raise CheckpointError(f"{folder}: {name} has {found[0]:,} bytes instead of {size:,}")
        if found[1] != crc:
            raise CheckpointError(f"{folder}: {name} is damaged (CRC-32 {found[1]:08x} instead of {crc:08x})")
    try:
        state = json.loads(folder.read(DRIVER))
        history = [name for name in manifest["files"] if name.startswith(f"{HISTORY}/")]
        return Checkpoint(
            folder,
            manifest["step"],
            manifest["incarnation"],
            state,
            folder.read(CONFIG).decode(),
            {name.removeprefix(f"{HISTORY}/"): folder.read(name) for name in history},
            manifest["metric"],
        )
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {DRIVER} or {CONFIG} cannot be read ({error})") from None


def read_manifest(folder: Folder) -> dict[str, Any]:
    """Read, check and return the manifest of a checkpoint, without reading the other files of the checkpoint.

    Raises:
        CheckpointError: the manifest is missing, unreadable or invalid.
    """
    try:
        content = folder.read(MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: holds no {MANIFEST}, so the folder is not a checkpoint, or its save was never finished"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {MANIFEST} cannot be read ({error.strerror or error})") from None
    try:
        sealed = json.loads(content)
        manifest = sealed["manifest"]
        if sealed["crc"] != _seal(manifest):
            raise ValueError("the checksum of the manifest does not match")
        kinds = {"step": int, "incarnation": int, "files": dict, "metric": float | int | None, "best": str | None}
        if not all(isinstance(manifest[key], kind) for key, kind in kinds.items()):
            raise ValueError("the manifest has a value of the wrong type")
        if manifest["step"] < 0 or manifest["incarnation"] < 0:
            raise ValueError("the manifest has a negative step or a negative number of restores (`incarnation`)")
        if not all(_is_entry(name, entry) for name, entry in manifest["files"].items()):
            raise ValueError("an entry of the manifest has an invalid file name, or lacks the size or the checksum")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged ({described(error, 200)})") from None
    found: dict[str, Any] = manifest
    return found


def _seal(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _is_entry(name: str, entry: Any) -> bool:
    inside = bool(name) and not name.startswith("/") and not {"..", ".", ""} & set(name.split("/"))
    return inside and isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)


class SavesState(Protocol):
    """Interface of a training rank whose state is saved, such as `workers.training.actor.ActorWorker`."""

    def save_state(self, url: str) -> None:
        """Start writing the rank's state to the checkpoint folder `url`, and return once the tensors are copied."""

    def saved_state(self) -> Saved | None:
        """Return the result of the last `save_state` call, or None while checkpoint files are still being written."""

    def load_state(self, url: str | None) -> None:
        """Load the rank's state from the checkpoint folder `url`; if `url` is None, restore the initial state."""


@dataclass
class _Save:
    """A checkpoint that is being saved: the ranks write their files first, and the driver then adds its own files.

    Attributes:
        step: number of the training step after which the checkpoint is saved.
        incarnation: number of times that the run has been restored.
        metric: value of the metric that selects the best checkpoint; None if the metric was not measured.
        files: dict that maps the name of each file that the driver writes to the contents of the file.
        history: dict that maps the name of each JSON-lines file of the run to a `FileStart`: the bytes that the driver
            copies from the start of the file into the checkpoint.
        groups: dict that maps each role to the worker group whose ranks write the role's state.
        saved: dict that maps a role to one `Saved` (written files or an error) per rank. A role is added to `saved`
            once all ranks of the role have written their files.
    """

    step: int
    incarnation: int
    metric: float | None
    files: dict[str, bytes]
    history: dict[str, FileStart]
    groups: dict[str, WorkerGroup[SavesState]]
    saved: dict[str, list[Saved]] = field(default_factory=dict)


class Checkpoints:
    """Saves, reads and removes the checkpoints of one run.

    Args:
        folder: folder that holds the checkpoints.
        config: config of the run, as YAML text.
        keep: number of latest checkpoints to keep; 0 keeps all checkpoints.
        best: name of the metric that selects the best checkpoint. The checkpoint with the highest value of the metric
            `best` is kept in addition to the latest checkpoints. If `best` is None, only the latest checkpoints are
            kept.
        sources: fingerprints (hash values) of the data, functions and weights that the run reads.

    Attributes:
        writing: the task that completes the save in progress; None if no save is in progress.
        last: step of the latest checkpoint, whose save may still be in progress; None if there is no checkpoint yet or
            if the latest save failed.
    """

    def __init__(
        self,
        folder: Folder,
        config: str,
        *,
        keep: int,
        best: str | None,
        sources: Mapping[str, int] | None = None,
    ) -> None:
        self.folder, self.config, self.keep, self.best, self.sources = folder, config, keep, best, dict(sources or {})
        self.writing: asyncio.Task[None] | None = None
        self.last: int | None = None

    def newest(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if there is none.

        A warning is logged for each damaged checkpoint that is newer than the newest undamaged checkpoint.
        """
        for step in reversed(steps_in(self.folder)):
            try:
                return read(self.folder.at(f"step_{step}"))
            except CheckpointError as error:
                logger.warning("%s; trying the previous checkpoint instead", error)
        return None

    def restored(self, checkpoint: Checkpoint | None) -> None:
        """Record that the run was restored to a checkpoint, or to the start of the run if `checkpoint` is None.

        If `checkpoint` lies in the run's own checkpoint folder, the run does not save this checkpoint again.
        """
        own = checkpoint is not None and str(checkpoint.folder) == str(self.folder.at(f"step_{checkpoint.step}"))
        self.last = checkpoint.step if checkpoint is not None and own else None

    def require_best(self, names: Collection[str]) -> None:
        """Check that `names` contains the name of the metric that `trainer.keep_best` selects.

        Raises:
            ConfigError: the name of the metric is misspelt, or the run does not compute the metric.
        """
        near = difflib.get_close_matches(self.best or "", sorted(names), n=5, cutoff=0.0)
        require(
            self.best is None or self.best in names,
            f"trainer.keep_best={self.best}: this run has no such metric; the nearest are {', '.join(near)}",
        )

    async def start(
        self,
        step: int,
        incarnation: int,
        groups: Mapping[str, WorkerGroup[SavesState]],
        state: Mapping[str, Any],
        *,
        history: Mapping[str, FileStart],
        metrics: Mapping[str, float],
    ) -> None:
        """Wait until the previous save has ended, and start saving a checkpoint.

        The method `start` returns when the training ranks have copied their tensors. A background task waits until the
        training ranks have written their checkpoint files, and then completes the checkpoint.

        Args:
            step: number of the training step after which the checkpoint is saved.
            incarnation: number of times that the run has been restored.
            groups: dict that maps each trained role to the role's worker group.
            state: state of the driver, as JSON-serializable values.
            history: dict that maps the name of each of the run's JSON-lines files to the content that the
                file has at the time of the call.
            metrics: all metrics that were measured for the weights in the checkpoint.
        """
        await self.finish()
        metric = metrics.get(self.best) if self.best else None
        if self.best and metric is None:
            logger.warning(
                "trainer.keep_best=%s: this metric has no value for step %d; for a metric of evaluations, "
                "trainer.eval_every must divide trainer.save_every",
                self.best,
                step,
            )
        files = {DRIVER: json.dumps({**state, "sources": self.sources}).encode(), CONFIG: self.config.encode()}
        self.last, name = step, f"step_{step}"
        save = _Save(step, incarnation, metric, files, dict(history), dict(groups))
        try:
            self._discard(name)
            url = self.folder.at(name).url
            await asyncio.gather(*(group.call(SavesState.save_state, url) for group in groups.values()))
        except RLTrainError:
            raise
        except Exception as error:  # A file system driver may raise any exception.
            self._failed(save, reason(error))
            return
        self.writing = asyncio.create_task(self._recorded(save), name=f"checkpoint of step {step}")
        # `sleep(0)` lets the new asyncio task, which completes the checkpoint, start. If the task were cancelled before
        # its start, its cleanup code would not run.
        await asyncio.sleep(0)

    async def finish(self) -> None:
        """If a checkpoint is being saved, wait until the save has ended.

        Raise WorkerLost if a training rank dies or stops responding while `finish` waits.
        """
        if self.writing is not None:
            await self.writing
            self.writing = None

    async def abandon(self) -> None:
        """Discard the checkpoint that is being saved, after training ranks have died."""
        writing, self.writing = self.writing, None
        if writing is not None:
            await cancelled(writing)

    async def _recorded(self, save: "_Save") -> None:
        """Complete a checkpoint, and record in the run's timeline (as a span) how long this took."""
        with trace.span(f"checkpoint of step {save.step}"):
            await self._complete(save)

    async def _complete(self, save: "_Save") -> None:
        """Wait until all training ranks have written their checkpoint files, then add the driver's files."""
        complete = False
        try:
            errors = [one.error for one in await self._written(save) if one.error]
            complete = True
            if errors:
                self._failed(save, errors[0])
            else:
                commit = asyncio.ensure_future(asyncio.to_thread(self._commit, save))
                try:
                    await asyncio.shield(commit)
                finally:
                    await commit  # A thread cannot be cancelled, so wait until the thread ends.
        except RLTrainError:
            raise
        except Exception as error:  # A file system driver may raise any exception.
            self._failed(save, reason(error))
        finally:
            if not complete:
                self._failed(save, "a training rank died before it had written its files")

    async def _written(self, save: "_Save") -> list[Saved]:
        """Wait until all training ranks have written their checkpoint files, and return the result of each rank."""
        for role, group in save.groups.items():
            pause_s = _ASK_AFTER_S
            while role not in save.saved:
                found = await group.call(SavesState.saved_state)
                if None not in found:
                    save.saved[role] = [one for one in found if one is not None]
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _ASK_AT_MOST_AFTER_S)
        return [one for ranks in save.saved.values() for one in ranks]

    def publish(self, path: Path) -> None:
        """Replace the folder `path` with the model of the latest checkpoint.

        Raises:
            CheckpointError: the latest checkpoint could not be saved.
        """
        if self.last is None:
            raise CheckpointError(
                f"{self.folder}: the latest checkpoint could not be written, so {path} was not created; free space "
                "in the checkpoint folder, and continue with trainer.resume=auto"
            )
        _publish(self.folder.at(f"step_{self.last}").at(MODEL), path)

    def _commit(self, save: _Save) -> None:
        """Complete the save of a checkpoint: write the driver's files and the manifest, and remove old checkpoints.

        The checkpoint becomes valid when its manifest is written.
        """
        folder = self.folder.at(f"step_{save.step}")
        files = {name: entry for ranks in save.saved.values() for one in ranks for name, entry in one.files.items()}
        for name, content in save.files.items():
            folder.write(name, content)
            files[name] = (len(content), zlib.crc32(content))
        for name, start in save.history.items():
            files[f"{HISTORY}/{name}"] = folder.copy(start, f"{HISTORY}/{name}")
        missing = sorted(files.keys() - set(folder.files()))
        if missing:
            raise OSError(f"{missing[0]} is not visible to the driver: all nodes must share the checkpoint folder")
        manifest = {
            "step": save.step,
            "incarnation": save.incarnation,
            "best": self.best,
            "metric": save.metric,
            "files": {name: list(entry) for name, entry in sorted(files.items())},
        }
        folder.write(MANIFEST, json.dumps({"manifest": manifest, "crc": _seal(manifest)}, indent=1).encode())
        try:
            self._prune(save.step)
        except Exception as error:  # A file system driver may raise any exception.
            logger.warning("%s: an old checkpoint cannot be removed (%s)", self.folder, reason(error))

    def _failed(self, save: _Save, why: str) -> None:
        """Warn that a checkpoint could not be saved, and remove its partial files. The run continues."""
        folder = self.folder.at(f"step_{save.step}")
        if self.last == save.step:
            self.last = None
        logger.warning("%s: not saved, %s; the run goes on, and earlier checkpoints are kept", folder, why)
        try:
            self._discard(f"step_{save.step}")
        except Exception as error:  # A file system driver may raise any exception.
            logger.warning("%s: the partial files of this checkpoint cannot be removed (%s)", folder, reason(error))

    def _prune(self, newest: int) -> None:
        """Remove all checkpoints except the latest `keep` checkpoints and the best checkpoint."""
        steps = [step for step in steps_in(self.folder) if step <= newest]
        kept = set(steps[-self.keep :])
        if self.best:
            scores: dict[int, float] = {}
            for step in steps:
                try:
                    manifest = read_manifest(self.folder.at(f"step_{step}"))
                except RLTrainError:
                    continue
                # A checkpoint that was saved with a different `trainer.keep_best` setting gets no score, because the
                # checkpoint stores the value of a different metric.
                score = manifest["metric"] if manifest["best"] == self.best else None
                if score is not None and score == score:  # The comparison `score == score` excludes NaN.
                    scores[step] = score
            if scores:
                kept.add(max(scores, key=lambda step: (scores[step], step)))
        for step in steps:
            if step not in kept:
                self._discard(f"step_{step}")

    def _discard(self, name: str) -> None:
        """Remove a checkpoint's folder, starting with its manifest.

        If the process is killed while it removes a checkpoint, the remaining files of the checkpoint have no manifest
        and do not count as a checkpoint.
        """
        self.folder.remove(f"{name}/{MANIFEST}")
        self.folder.remove(name)

    def clean(self) -> None:
        """Remove the unfinished checkpoints that a crash has left behind.

        The method `clean` must be called at the start of a run.
        """
        for name in _unfinished(self.folder):
            self._discard(name)


def _publish(model: Folder, path: Path) -> None:
    """Replace the folder `path` with a copy of the folder `model`.

    The weight files in `path` are hard links to the files in `model` if possible; all other files are copies. While
    `_publish` runs, the folder `path` may be missing for a moment, but the folder is never incomplete.
    """
    partial, old = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.old")
    for leftover in (partial, old):
        _remove(leftover)
    for name in model.files():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            # Only weight files become hard links. Config and tokenizer files are small, and are copied, because users
            # may edit them.
            if not model.local or not name.endswith(".safetensors"):
                raise OSError
            os.link(model.path(name), partial / name)
        except OSError:
            # Creating a hard link fails if the target is on another disk or on a file system without hard links.
            model.fs.get_file(model.path(name), str(partial / name))
    if os.path.lexists(path):
        path.rename(old)
    partial.rename(path)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def require_own(folder: Folder) -> None:
    """Check that each folder `step_N` in a checkpoint folder contains only files that a run writes.

    Without `require_own`, saving a checkpoint could overwrite a folder of the user that happens to be named `step_N`.

    Raises:
        ConfigError: a folder `step_N` contains files that a run does not write. The error message names the folder with
            the unexpected files.
    """
    for name in _unfinished(folder):
        strange = sorted({part.removesuffix(".partial") for part in folder.at(name).names()} - _PARTS)
        require(
            not strange,
            f"trainer.checkpoint_dir={folder}: holds {name}, which no run has written ({', '.join(strange[:3])}); "
            "name another folder",
        )


def _unfinished(folder: Folder) -> list[str]:
    """Return the names of folders that are named like a checkpoint but have no manifest."""
    return [name for name in folder.names() if _NAME.fullmatch(name) and not folder.exists(f"{name}/{MANIFEST}")]


def steps_in(folder: Folder) -> list[int]:
    """Return the steps of all finished checkpoints in a folder, oldest first, including damaged checkpoints."""
    found = [int(match[1]) for name in folder.names() if (match := _NAME.fullmatch(name))]
    return sorted(step for step in found if folder.exists(f"step_{step}/{MANIFEST}"))
