"""Helpers for low-rank adapters (LoRA): tensor names, reading base weights from files, and merging adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltrain.base.errors import ConfigError
from rltrain.data.model_weights import SAFETENSORS, open_safetensors, weight_files

# Suffixes that are appended to a layer's name to form the names of its adapter matrices A and B.
A, B = ".lora_A.weight", ".lora_B.weight"


def merge(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """Return W + scale * B @ A in float32, where W is `weight` (out, in), B is `b` (out, rank) and A is `a` (rank, in).

    `weight`, `b` and `a` must be on the same device.
    """
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


class BaseWeights:
    """Reader that finds the tensors of a model directory by their names.

    Tensors are read directly from the safetensors files. A safetensors file stays open as long as the `BaseWeights`
    object exists.

    Args:
        path: model directory with the safetensors files.

    Raises:
        ConfigError: a safetensors file is missing or broken.
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
        """Return the tensor `name` on the CPU, in the dtype that the tensor has in its safetensors file."""
        found: Tensor = self._file(name).get_tensor(name)
        return found

    def size(self, name: str) -> list[int]:
        """Return the shape of the tensor `name`."""
        found: list[int] = self._file(name).get_slice(name).get_shape()
        return found

    def _file(self, name: str) -> Any:
        file = self.files[name]
        if file not in self.opened:
            self.opened[file] = open_safetensors(file, f"model.path={self.path}")
        return self.opened[file]

    def require(self, names: Sequence[str]) -> None:
        """Raise ConfigError unless the model's safetensors files contain a tensor for every name in `names`."""
        missing = [name for name in names if name not in self.files]
        if missing:
            raise ConfigError(
                f"model.path={self.path}: its safetensors files hold no tensor '{missing[0]}', which engines need "
                "to merge the adapters of model.lora; save the model again with save_pretrained, or use model.lora=null"
            )
