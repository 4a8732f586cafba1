"""One rank's part of a checkpoint: parameters, AdamW's moments and its steps, by the names of the parameters.

Only tensors are saved, each under a name that does not depend on the number of ranks, so that any number of them, also
one without shards, loads what any other has saved. A save copies the tensors and returns; a thread writes them, with a
process group of its own, so that its collectives never meet those of the training.
"""

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rltrain.base.errors import CheckpointError, described
from rltrain.base.storage import Folder
from workers.cluster.progress import tick
from workers.models.fsdp import Optimizer
from workers.models.policy_export import export_model, small_files
from workers.models.state_files import INDEX, StateFiles, StateReader

STATE, MODEL = "state", "model"  # folders of a checkpoint
_SCHEDULE = "schedule"  # optimizer steps taken


@dataclass(frozen=True)
class Saved:
    """What one rank has written.

    Attributes:
        files: size and CRC-32 by path in the checkpoint, as they were read back.
        error: why the rest is missing; empty if nothing is.
        seconds: from the call to the last byte.
    """

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


class _Ticking(DefaultLoadPlanner):
    """A rank that loads for long does not hang."""

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """A tensor, or a part of one, has been read."""
        tick()


class RankState:
    """Saves and loads the state of one role on this rank.

    Args:
        role: its name, and that of its folder.
        model: maybe sharded; parameters that are not trained are not saved.
        optimizer: of the others.
        base: where the model came from, if it is to be exported with each checkpoint.
    """

    def __init__(self, role: str, model: nn.Module, optimizer: Optimizer, *, base: Path | None = None) -> None:
        self.role, self.model, self.optimizer, self.base = role, model, optimizer, base
        self.thread: threading.Thread | None = None
        self.result: Saved | None = None

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the role, for the thread: a collective when it is first asked for."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group

    @functools.cached_property
    def small(self) -> dict[str, bytes]:
        """The small files of the export."""
        assert self.base is not None, "only asked for where there is an export"
        return small_files(self.model, self.base)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that decides this role's future, as it is now, not copied."""
        found, sharded = {_SCHEDULE: torch.tensor(self.optimizer.steps)}, isinstance(self.model, FSDPModule)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                assert not sharded or isinstance(parameter, DTensor), f"{name} is whole: a copy, maybe rounded"
                found[f"model.{name}"] = parameter.detach()
                found |= {f"{kind}.{name}": tensor for kind, tensor in self.optimizer.moments(parameter).items()}
        return found

    def save(self, url: str) -> None:
        """Begin to write into a checkpoint's folder; returns when the tensors are copied. All ranks must call it."""
        if self.thread is not None:
            self.thread.join()  # nobody has waited for the one before
        began, folder = time.perf_counter(), Folder(url)
        writer = FsspecWriter(folder.at(f"{STATE}/{self.role}").url, sync_files=folder.local)
        # The export's small files are made here and now: transformers is not for two threads.
        small = self.small if self.base is not None and dist.get_rank() == 0 else None
        write = functools.partial(save, writer.stage(self.tensors()), storage_writer=writer, process_group=self.group)
        self.result = None
        self.thread = threading.Thread(
            target=self._work, args=(write, small, folder, began), name=f"save-{self.role}", daemon=True
        )
        self.thread.start()

    def saved(self) -> Saved | None:
        """What the save has come to, None while it is under way."""
        return self.result

    def _work(self, write: Callable[[], Any], small: dict[str, bytes] | None, folder: Folder, began: float) -> None:
        files: dict[str, tuple[int, int]] = {}
        try:
            write()
            rank, own = dist.get_rank(), f"{STATE}/{self.role}"
            state = folder.at(own)
            names = [
                f"{own}/{name}"
                for name in state.names()
                if name.startswith(f"__{rank}_") or (name == INDEX and not rank)
            ]
            if small is not None:
                exported = export_model(StateFiles(state), small, self.model, folder.at(MODEL))
                names += [f"{MODEL}/{name}" for name in exported]
            files = {name: folder.checksum(name) for name in names}
            self.result = Saved(files, seconds=time.perf_counter() - began)
        except BaseException as error:  # whatever it is: the run goes on, and its driver is told
            self.result = Saved(files, reason(error), time.perf_counter() - began)

    def load(self, url: str) -> None:
        """Take everything from a checkpoint's folder. All ranks must call it.

        Raises:
            CheckpointError: it is of another model, or cannot be read.
        """
        folder = Folder(url).at(f"{STATE}/{self.role}")
        tensors = self.tensors()
        there = StateFiles(folder)
        for name, tensor in tensors.items():
            if name not in there.index.state_dict_metadata or there.size(name) != tensor.shape:
                raise CheckpointError(f"{folder}: is of another model, its '{name}' is not {tuple(tensor.shape)}")
        try:
            load(tensors, storage_reader=StateReader(folder), planner=_Ticking(), process_group=self.group)
        except (CheckpointException, OSError) as error:
            raise CheckpointError(f"{folder}: {reason(error)}") from error
        self.optimizer.steps = int(tensors[_SCHEDULE])


def reason(error: BaseException) -> str:
    """Why, in one line: where several ranks failed, the first one's."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    below: BaseException | None = error
    while below is not None and not isinstance(below, OSError):
        below = below.__cause__ or below.__context__
    error = below or error  # torch.save says of a full disk only that its own position is wrong
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    text = described(error)
    return f"the disk is full, it seems ({text})" if "unexpected pos" in text else text
