"""Export of a checkpoint's policy in Hugging Face format, from the checkpoint's files.

All ranks of a run write the export together: each rank writes some of the safetensors files. During the export, each
rank processes one tensor at a time, and the ranks need no collective communication. The model's config and
the tokenizer's files are small and are collected before the weights are written. The weights are streamed from the
checkpoint into safetensors files. Adapters are merged into the base weights, and are also saved separately in peft's
format.

The export does not use the safetensors library, because the library needs all tensors of a file at once and writes to
local paths only. PyTorch's own consolidation of safetensors files works only on local paths, and writes every tensor
twice.
"""

import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from rltrain.base.storage import Folder, flush
from workers.models.adapter_weights import A, B, BaseWeights, merge
from workers.models.checkpoint_form import in_checkpoint_form
from workers.models.lora import HALVES, NAME, is_adapter
from workers.models.state_files import StateFiles

SHARD_BYTES = 4 << 30
ADAPTER, ADAPTER_CONFIG = "adapter", "adapter/adapter_config.json"
_FLOAT_BYTES = 4
_BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "processor_config.json",
    "preprocessor_config.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class _Part:
    """One tensor of the exported model.

    Attributes:
        name: name of the tensor in the export.
        size: shape of the tensor in the export.
        make: function that reads or computes the tensor.
    """

    name: str
    size: tuple[int, ...]
    make: Callable[[], Tensor]


def small_files(model: nn.Module, base: Path) -> dict[str, bytes]:
    """Return a dictionary from paths in the export to the contents of all exported files except the weights.

    Args:
        model: the policy, with or without adapters.
        base: the directory from which the policy was loaded.
    """
    config: Any = copy.deepcopy(model.config)
    config.dtype, config.architectures = "float32", [type(model).__name__.removeprefix("FSDP")]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        # The generation_config.json made from the model's config is exported only if the folder `base` has no such
        # file. A generation_config.json in `base` is copied unchanged. It is not loaded and saved with transformers,
        # because transformers refuses to save some settings, for example a temperature without sampling.
        GenerationConfig.from_model_config(config).save_pretrained(folder)
        if NAME in getattr(model, "peft_config", {}):
            adapters: Any = model.peft_config
            settings = copy.copy(adapters[NAME])
            settings.base_model_name_or_path, settings.inference_mode = str(base), True
            settings.target_modules = sorted(settings.target_modules)
            settings.save_pretrained(f"{folder}/{ADAPTER}")
        made = {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}
    beside = {file.name: file.read_bytes() for pattern in _BESIDE for file in base.glob(pattern) if file.is_file()}
    return made | beside


@dataclass(frozen=True)
class Share:
    """The part of an export that one rank writes.

    Attributes:
        rank: index of the rank that writes this share of the export. Only rank 0 writes files other than safetensors
            files.
        ranks: number of ranks that write the export together.
    """

    rank: int = 0
    ranks: int = 1

    def of(self, shards: list[list[_Part]]) -> list[tuple[int, list[_Part]]]:
        """Return a pair (index of the file, tensors in the file) for each safetensors file that this rank writes."""
        return list(enumerate(shards))[self.rank :: self.ranks]


def export_model(
    state: StateFiles, small: Mapping[str, bytes], model: Any, folder: Folder, share: Share | None = None
) -> list[str]:
    """Write the policy, or one rank's share of the policy, in Hugging Face format.

    Args:
        state: checkpoint files that hold the actor's weights.
        small: paths and contents of the exported files other than the weights, as `small_files` returns them.
        model: the policy, with or without adapters. Only the parameter names of the model are used, to undo the
            renaming and reshaping of weights that transformers does when it loads a model.
        folder: target folder, which need not exist.
        share: the share of the export that this rank writes; by default, the whole export.

    Returns:
        The paths of the files that this rank wrote, relative to `folder`.
    """
    share = share or Share()
    written = list(small) if share.rank == 0 else []
    for name in written:
        _write(folder, name, small[name])
    if ADAPTER_CONFIG in small:
        settings = json.loads(small[ADAPTER_CONFIG])
        parts = list(_merged(state, settings))
        halves = [
            _Part(
                f"base_model.model.{name.replace(f'.{NAME}.', '.')}",
                tuple(state.size(f"model.{name}")),
                _reading(state, name),
            )
            for name in state.names("model")
        ]
        written += _write_tensors(folder, f"{ADAPTER}/adapter_model", halves, share)
    else:
        parts = [part for name in state.names("model") for part in _as_in_files(state, name, model)]
    return written + _write_tensors(folder, "model", parts, share)


def _reading(state: StateFiles, name: str) -> Callable[[], Tensor]:
    return lambda: state.tensor(f"model.{name}")


def _as_in_files(state: StateFiles, name: str, model: Any) -> Iterator[_Part]:
    """Yield the tensors that represent a parameter in Hugging Face files.

    In Hugging Face files, a parameter can have a different name than in the model, or can be split into several
    tensors.
    """

    def reverted(tensor: Tensor) -> dict[str, Tensor]:
        return in_checkpoint_form(model, {name: tensor})

    def reverted_part(other: str) -> Tensor:
        return reverted(state.tensor(f"model.{name}"))[other]

    for other, shape in reverted(torch.empty(state.size(f"model.{name}"), device="meta")).items():
        yield _Part(other, tuple(shape.shape), partial(reverted_part, other))


def _merged(state: StateFiles, settings: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield all tensors of the base model, with the adapters merged into the matrices of the adapted layers."""
    base, scale = BaseWeights(settings["base_model_name_or_path"]), settings["lora_alpha"] / settings["r"]
    names = {name.replace(f".{NAME}.", "."): name for name in state.names("model") if is_adapter(name)}
    layers = {name.partition(half)[0] for name in names.values() for half in HALVES if half in name}
    base.require([f"{layer}.weight" for layer in sorted(layers)])

    def merged(name: str, layer: str) -> Tensor:
        a, b = (state.tensor(f"model.{names[layer + half]}") for half in (A, B))
        return merge(base.tensor(name), b, a, scale)

    for name in base.files:
        layer, _, last = name.rpartition(".")
        adapted = last == "weight" and layer in layers
        make = partial(merged, name, layer) if adapted else partial(base.tensor, name)
        yield _Part(name, tuple(base.size(name)), make)


def _write_tensors(folder: Folder, stem: str, parts: list[_Part], share: Share) -> list[str]:
    """Write this rank's share of the tensors into safetensors files, and return the names of the written files.

    If the tensors need several safetensors files, rank 0 writes an index of the tensors in each file.
    """
    shards = _in_files(parts)
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    else:
        names = [f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    written = []
    for number, shard in share.of(shards):
        _write_shard(folder, names[number], shard)
        written.append(names[number])
    if len(shards) > 1 and share.rank == 0:
        where = {part.name: Path(name).name for name, shard in zip(names, shards, strict=True) for part in shard}
        total = sum(_FLOAT_BYTES * math.prod(part.size) for part in parts)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        written.append(f"{stem}.safetensors.index.json")
        _write(folder, written[-1], json.dumps(index, indent=2).encode())
    return written


def _in_files(parts: list[_Part]) -> list[list[_Part]]:
    """Divide tensors in order into files of at most `SHARD_BYTES` bytes.

    A tensor with more than `SHARD_BYTES` bytes gets its own file.
    """
    shards: list[list[_Part]] = [[]]
    room = SHARD_BYTES
    for part in parts:
        size = _FLOAT_BYTES * math.prod(part.size)
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(part)
        room -= size
    return shards


def _write_shard(folder: Folder, name: str, parts: list[_Part]) -> None:
    """Write one safetensors file: the length of the header, the header, then the tensor bytes in header order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in parts:
        begin, end = end, end + _FLOAT_BYTES * math.prod(part.size)
        header[part.name] = {"dtype": "F32", "shape": list(part.size), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with folder.open(name, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            tensor = part.make().float().contiguous()
            assert tensor.shape == part.size, f"{part.name} has the shape {tuple(tensor.shape)}, not {part.size}"
            stream.write(memoryview(tensor.numpy().data).cast("B") if tensor.numel() else b"")
        if folder.local:
            flush(stream)


def _write(folder: Folder, name: str, content: bytes) -> None:
    with folder.open(name, "wb") as stream:
        stream.write(content)
