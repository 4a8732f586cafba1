"""Code that saves and loads one rank's part of a checkpoint: named parameters with AdamW's moments and step counts.

The tensors of a checkpoint have names that do not depend on the number of ranks. A checkpoint can be loaded by any
number of ranks, sharded or not, regardless of the number of ranks that saved the checkpoint. `RankState.save` copies
the tensors and returns, while a thread writes the copies. The thread that writes a checkpoint has its own process
group, so that its collective operations never mix with the collective operations of training.

PyTorch's library for distributed checkpoints writes and reads the tensors. PyTorch's `async_save` is not used, because
the thread that writes a checkpoint also exports the model and reads all files back to compute checksums, which PyTorch
does not compute.
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

from rltrain.base import trace
from rltrain.base.errors import CheckpointError, described
from rltrain.base.storage import Folder
from workers.cluster.progress import tick
from workers.cluster.worker_process import return_freed_memory
from workers.models.fsdp import Optimizer
from workers.models.policy_export import Share, export_model, small_files
from workers.models.state_files import INDEX, StateFiles, StateReader

STATE, MODEL = "state", "model"  # Names of folders in a checkpoint.
_SCHEDULE = "schedule"  # Name of the tensor that holds the number of optimizer steps taken.


@dataclass(frozen=True)
class Saved:
    """Result of saving one rank's part of a checkpoint.

    Attributes:
        files: maps the path of each written file in the checkpoint to the file's size and CRC-32. After a checkpoint
            file was written, it is read back to compute its size and its CRC-32.
        error: reason why saving failed, or "" if saving succeeded.
        seconds: time from the call of `save` until all files were written and read back.
    """

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


class _Ticking(DefaultLoadPlanner):
    """Load planner that reports progress, so that a rank does not count as hung while it loads a checkpoint."""

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Report progress after a tensor, or a part of a tensor, has been read."""
        tick()


@functools.cache
def _checkpoint_group(role: str, world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create the gloo process group through which the ranks of a role coordinate their checkpoints.

    Roles save at the same time, so each role needs a process group of its own. A process keeps the threads and sockets
    of each process group, so a process that trains several times reuses its process groups.

    Args:
        role: name of the role.
        world: the process group of all ranks. After torch.distributed has been set up again, `world` is another object.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


class RankState:
    """Object that saves and loads this rank's part of the training state of one role.

    Args:
        role: name of the role, and of the role's folder in the checkpoint.
        model: the model, possibly sharded. If `optimizer` is not None, only the trained parameters are saved.
        optimizer: optimizer of the trained parameters, or None for a model that has no optimizer.
        base: directory from which the model was loaded; some files of the exported model are copied from `base`. If
            `base` is None, checkpoints contain no exported model.
    """

    def __init__(self, role: str, model: nn.Module, optimizer: Optimizer | None, *, base: Path | None = None) -> None:
        self.role, self.model, self.optimizer, self.base = role, model, optimizer, base
        self.thread: threading.Thread | None = None
        self.result: Saved | None = None

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        """Return the process group for the collective operations of the role's checkpoints.

        All ranks must access `group` for the first time together, because the first access creates the process group.
        """
        return _checkpoint_group(self.role, dist.group.WORLD)

    @functools.cached_property
    def small(self) -> dict[str, bytes]:
        """Return a dictionary from names to contents of the exported model's small files, such as the config."""
        assert self.base is not None, "small files such as the config are written only together with an exported model"
        return small_files(self.model, self.base)

    def tensors(self) -> dict[str, Tensor]:
        """Return, without copying, all tensors that a checkpoint must hold to continue the training of this role."""
        optimizer, sharded = self.optimizer, isinstance(self.model, FSDPModule)
        found = {} if optimizer is None else {_SCHEDULE: torch.tensor(optimizer.steps)}
        for name, parameter in self.model.named_parameters():
            if optimizer is None or parameter.requires_grad:
                # An unsharded parameter of a sharded model must not be saved, because it may be a copy that FSDP has
                # rounded to the compute dtype.
                assert not sharded or isinstance(parameter, DTensor), f"parameter {name} is not sharded"
                found[f"model.{name}"] = parameter.detach()
            if optimizer is not None and parameter.requires_grad:
                found |= {f"{kind}.{name}": tensor for kind, tensor in optimizer.moments(parameter).items()}
        return found

    def save(self, url: str) -> None:
        """Copy the tensors, start writing the copies into a checkpoint's folder in the background, and return.

        All training ranks must call this method. If the previous save is still running, `save` first waits until the
        previous save has ended.
        """
        if self.thread is not None:
            self.thread.join()  # Wait for the end of the previous save.
        began, folder = time.perf_counter(), Folder(url)
        url = folder.at(f"{STATE}/{self.role}").url
        # The tensors are already on the CPU when they are written, so the writer need not copy some of them ahead.
        writer = FsspecWriter(url, sync_files=folder.local, per_thread_copy_ahead=0)
        # The exported model's small files are created in the calling thread, because the transformers library is not
        # thread-safe.
        small = self.small if self.base is not None else None
        # The writer's own method `stage` copies sharded tensors twice.
        copies = [{name: tensor.to("cpu", copy=True) for name, tensor in self.tensors().items()}]
        if self.optimizer is not None:
            self.optimizer.offload()  # `tensors` may have created moments.
        group = self.group

        def write() -> None:
            # After `pop`, `copies` no longer holds the copied tensors, so their memory is freed when PyTorch's function
            # `save` returns.
            save(copies.pop(), storage_writer=writer, process_group=group)

        self.result = None
        self.thread = threading.Thread(
            target=self._work, args=(write, small, folder, began), name=f"save-{self.role}", daemon=True
        )
        self.thread.start()

    def saved(self) -> Saved | None:
        """Return the result of the last save, or None while the save is running."""
        return self.result

    def _work(self, write: Callable[[], Any], small: dict[str, bytes] | None, folder: Folder, began: float) -> None:
        files: dict[str, tuple[int, int]] = {}
        try:
            with trace.span(f"write {self.role}", "checkpoint"):
                write()
            return_freed_memory()
            rank, own = dist.get_rank(), f"{STATE}/{self.role}"
            state = folder.at(own)
            names = [
                f"{own}/{name}"
                for name in state.names()
                if name.startswith(f"__{rank}_") or (name == INDEX and not rank)
            ]
            if small is not None:
                share = Share(rank, dist.get_world_size())
                exported = export_model(StateFiles(state), small, self.model, folder.at(MODEL), share)
                names += [f"{MODEL}/{name}" for name in exported]
            files = {name: folder.checksum(name) for name in names}
            self.result = Saved(files, seconds=time.perf_counter() - began)
        except BaseException as error:  # Every failure to save is reported to the driver, and the run continues.
            self.result = Saved(files, reason(error), time.perf_counter() - began)

    def load(self, url: str) -> None:
        """Load this rank's part of all tensors from a checkpoint's folder. All training ranks must call this method.

        Raises:
            CheckpointError: the checkpoint belongs to another model, or cannot be read.
        """
        folder = Folder(url).at(f"{STATE}/{self.role}")
        tensors = self.tensors()
        there = StateFiles(folder)
        for name, tensor in tensors.items():
            if name not in there.index.state_dict_metadata or there.size(name) != tensor.shape:
                raise CheckpointError(
                    f"{folder}: the checkpoint is from another model, where '{name}' is missing or has another "
                    f"shape than {tuple(tensor.shape)}"
                )
        try:
            load(tensors, storage_reader=StateReader(folder), planner=_Ticking(), process_group=self.group)
        except (CheckpointException, OSError) as error:
            raise CheckpointError(f"{folder}: {reason(error)}") from error
        if self.optimizer is not None:
            self.optimizer.steps = int(tensors[_SCHEDULE])
            self.optimizer.offload()


def reason(error: BaseException) -> str:
    """Return one line that says what caused an error.

    If several ranks failed, return the cause of one rank's failure.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    below: BaseException | None = error
    while below is not None and not isinstance(below, OSError):
        below = below.__cause__ or below.__context__
    error = below or error  # If the disk is full, only the OSError among the chained exceptions says so.
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    text = described(error)
    return f"the disk seems to be full ({text})" if "unexpected pos" in text else text
