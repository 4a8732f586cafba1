"""An engine's side of low-rank adapters: it puts what arrives on its own copy of the base weights.

Only A and B of each adapted matrix travel. What the engine then computes with is made anew from the model's files each
time, so that an adapter is applied exactly once however many syncs there were. The files are mapped, not kept.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rltrain.errors import ConfigError, SyncError
from rltrain.model_weights import SAFETENSORS, open_safetensors, weight_files
from workers.sync.buckets import Bucket, tensors_of

A, B = ".lora_A.weight", ".lora_B.weight"  # after the name of the layer


def merge(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """W + scale B A in float32: weight (out, in), b (out, rank), a (rank, in), all on one device."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


class BaseWeights:
    """The tensors of a model directory by name, read where they lie; the files stay open as long as this lives.

    Args:
        path: the directory, with safetensors files.

    Raises:
        ConfigError: a file is missing or broken.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, where = Path(path), f"model.path={path}"
        self.opened: dict[Path, Any] = {}
        self.files: dict[str, Path] = {}
        for file in weight_files(self.path, where):
            if file.suffix == SAFETENSORS:
                with open_safetensors(file, where, "numpy") as content:
                    self.files |= dict.fromkeys(content.keys(), file)

    def tensor(self, name: str) -> Tensor:
        """As it is in its file, on the CPU."""
        found: Tensor = self._file(name).get_tensor(name)
        return found

    def size(self, name: str) -> list[int]:
        """Its shape."""
        found: list[int] = self._file(name).get_slice(name).get_shape()
        return found

    def _file(self, name: str) -> Any:
        file = self.files[name]
        if file not in self.opened:
            self.opened[file] = open_safetensors(file, f"model.path={self.path}")
        return self.opened[file]

    def require(self, names: Sequence[str]) -> None:
        """Raise ConfigError unless all these tensors are there."""
        missing = [name for name in names if name not in self.files]
        if missing:
            raise ConfigError(
                f"model.path={self.path}: its safetensors files hold no '{missing[0]}', from which engines make the "
                "weights that model.lora adapts; save the model again with save_pretrained, or use model.lora=null"
            )


class Adapters:
    """The adapters of one sync, as they come.

    Args:
        path: model directory of the base weights.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.scale, self.parts = path, 1.0, dict[str, Tensor]()

    def take(self, bucket: Bucket, data: np.ndarray) -> None:
        """Keep these; the bytes that they lie in are written again."""
        assert bucket.scale is not None, "a bucket of adapters"
        self.scale = bucket.scale
        self.parts |= {name: tensor.clone() for name, tensor in tensors_of(bucket, data)}

    def merged(self, *, everything: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The merged matrices by name, float32, one at a time; with `everything`, all other tensors of the files too.

        Raises SyncError for an adapter whose base or other half is not there.
        """
        base, layers = BaseWeights(self.path), {name.removesuffix(A).removesuffix(B) for name in self.parts}
        needed = {layer: {layer + A, layer + B, f"{layer}.weight"} for layer in sorted(layers)}
        missing = [layer for layer, names in needed.items() if not names <= self.parts.keys() | base.files.keys()]
        if missing:
            raise SyncError(
                f"the adapter of '{missing[0]}' came without its other half, or {self.path} has no such matrix; engine "
                "and actor do not start from the same files"
            )
        for name in base.files:
            layer, _, last = name.rpartition(".")
            if last == "weight" and layer in layers:
                yield name, merge(base.tensor(name), self.parts[layer + B], self.parts[layer + A], self.scale)
            elif everything:
                yield name, base.tensor(name)
