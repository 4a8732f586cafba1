"""Finds the weight files of a model directory, and checks that the files hold the complete model.

If the weight files lack a parameter, transformers initializes the parameter with random numbers and only logs a
message. To find missing parameters, this module passes the tensor names and shapes in the file headers through
transformers' own loading code, which renames, ties and merges tensors. The loading code of transformers runs on the
meta device, so the check of the weight files reads no weights and allocates no memory for weights. The check of the
weight files finds the name of every tensor that is missing, unexpected or of the wrong shape.
"""

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.base.errors import ConfigError, one_line
from rltrain.data.builtin_models import is_builtin
from rltrain.data.hub import local_directory
from rltrain.data.model_json import read_json
from rltrain.settings.typed import require

SAFETENSORS, TORCH, INDEX = ".safetensors", ".bin", ".index.json"
IMAGE_MODELS = ("idefics3", "llava")  # Types of models whose images training supports.
NAMES = (f"model{SAFETENSORS}", f"model{SAFETENSORS}{INDEX}", f"pytorch_model{TORCH}", f"pytorch_model{TORCH}{INDEX}")
NOT_FOR_ENGINES = ("training_args.bin", "optimizer.bin")  # Names of files that vLLM does not read as weights.
AGAIN = "copy or download the model's files again, or save the model again with save_pretrained"
_FLOATS = ("F64", "F32", "F16", "BF16", "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16")
_EXPERT = re.compile(r"^(.*\.experts\.)(\d+)(\..*)$")
# Matches a line of transformers' loading report about a failed conversion of tensors.
_CONVERSION = re.compile(r"^(\S+) +\| +\S*CONVERSION", re.MULTILINE)
# Matches names of buffers with causal masks, positions or RoPE frequencies, which older versions of transformers saved.
# Buffers with masks, positions or RoPE frequencies are optional in weight files, because transformers computes them.
_OLD_BUFFER = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|attn\.(attention\.)?(masked_)?bias)$")
_SHOWN = 3  # Maximum number of tensor names in one list of an error message.


@dataclass(frozen=True)
class StoredTensor:
    """Description of one stored tensor, read from the header of a weight file.

    Attributes:
        file: the file that holds the tensor.
        dtype: name of the data type in the notation of the file format, such as F32 in safetensors files or torch.int8
            in torch files.
        shape: the tensor's shape.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path, where: str) -> list[Path]:
    """Return the files from which transformers reads a model's weights.

    The list of weight files is complete: transformers reads the model's weights from no other file.

    Args:
        folder: the model's directory.
        where: the config key and the model's path, for the start of error messages.

    Raises:
        ConfigError: the directory has no weight files, or an index file is broken or names a file that does not exist.
    """
    own = read_json(folder / "config.json").get("transformers_weights")
    require(
        own is None or (isinstance(own, str) and own.endswith((SAFETENSORS, SAFETENSORS + INDEX)) and ".." not in own),
        f"{where}: transformers_weights in its config.json is {one_line(str(own))}, which is not the name of a "
        "safetensors file in the folder; remove this entry",
    )
    names = NAMES if own is None else (own,)
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise ConfigError(
            f"{where}: holds no weights (looked for {', '.join(names)}); save the model's weights in this folder"
        )
    return shards(found, where) if found.name.endswith(INDEX) else [found]


def shards(index: Path, where: str) -> list[Path]:
    """Return the weight files that an index file names, in the order in which the weight files are read.

    Raises:
        ConfigError: the file is not an index file, or the index file names a weight file that does not exist.
    """
    content = read_json(index)
    named = content.get("weight_map")
    good = isinstance(named, dict) and named and all(isinstance(name, str) for name in named.values())
    require(
        bool(good) and isinstance(content.get("metadata"), dict),
        f"{where}: {index.name} must hold the objects 'metadata' and 'weight_map' (which maps tensors to files); "
        f"{AGAIN}",
    )
    suffix, names = Path(index.name.removesuffix(INDEX)).suffix, sorted(set(named.values())) if named else []
    for name in names:
        require(
            name.endswith(suffix),
            f"{where}: {index.name} names {one_line(name)}, which is not a {suffix} file; {AGAIN}",
        )
        require(
            (index.parent / name).is_file(),
            f"{where}: {index.name} names {one_line(name)}, which does not exist; copy or download that file too",
        )
    return [index.parent / name for name in names]


def stored_tensors(folder: Path, where: str) -> dict[str, StoredTensor]:
    """Return a dict that maps the name of each tensor in a model's weight files to the tensor's description.

    Only the headers of the weight files are read.

    Raises:
        ConfigError: a weight file is broken, or two files hold the same tensor.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder, where):
        for name, tensor in (_safetensors if file.suffix == SAFETENSORS else _torch_file)(file, where).items():
            require(
                name not in found,
                f"{where}: {file.name} and {found[name].file.name if name in found else ''} both hold "
                f"{one_line(name)}; save the model again with save_pretrained",
            )
            found[name] = tensor
    return found


def open_safetensors(file: Path, where: str, framework: str = "pt") -> Any:
    """Open a file with `safetensors.safe_open`, which reads the header but not the tensors.

    Args:
        file: the safetensors file.
        where: the config key and the model's path, for the start of error messages.
        framework: framework of the tensors that `safe_open` returns, such as "pt" for PyTorch.

    Raises:
        ConfigError: the file is truncated, corrupt or unreadable.
    """
    from safetensors import safe_open

    try:
        return safe_open(file, framework)
    except Exception as error:  # For a broken file, safetensors raises SafetensorError or OSError.
        reason = one_line(" ".join(str(error).split()), 160)
        raise ConfigError(f"{where}: {file.name} is not a complete safetensors file ({reason}); {AGAIN}") from None


def _safetensors(file: Path, where: str) -> dict[str, StoredTensor]:
    # With the framework "pt", `safe_open` would create a writable memory map of the whole weight file. A writable
    # memory map fails on a machine whose memory is smaller than the file.
    with open_safetensors(file, where, "numpy") as content:
        parts = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 (`content` is not a mapping)
        return {name: StoredTensor(file, part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}


def _torch_file(file: Path, where: str) -> dict[str, StoredTensor]:
    import torch

    try:
        content = torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:  # Loading a corrupt pickle can raise many exception types.
        # The error message omits torch's own text, which advises the user to load the pickle with `weights_only=False`
        # and thus to run code in the pickle.
        raise ConfigError(
            f"{where}: {file.name} is not a complete torch file of plain tensors ({type(error).__name__}); copy or "
            "download it again, or save the model again with save_pretrained, which writes safetensors"
        ) from None
    good = isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    )
    require(good, f"{where}: {file.name} must contain only a dict that maps names to tensors; {AGAIN}")
    return {name: StoredTensor(file, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in content.items()}


def policy_class(path: str) -> Any:
    """Return the transformers Auto class that builds the language model in a directory."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = read_json(local_directory(path) / "config.json").get("model_type")
    return AutoModelForImageTextToText if kind in IMAGE_MODELS else AutoModelForCausalLM


def text_attention(config: Any, attention: str) -> str | dict[str, str]:
    """Return the value of `attn_implementation` that selects an attention function for the layers that process text.

    Layers that process images keep the attention of torch (`sdpa`).

    Args:
        config: config of transformers of the whole model.
        attention: name of an attention function in transformers.
    """
    if getattr(config, "vision_config", None) is None:
        return attention
    return {"text_config": attention, "vision_config": "sdpa"}


def skeleton(path: str, kind: Any = None, where: str | None = None, *, attention: str = "eager") -> Any:
    """Build a transformers model on the meta device, in float32 and without allocating memory for weights.

    Args:
        path: the model's directory, or "builtin" for the built-in model.
        kind: the transformers Auto class that builds the model; by default, `policy_class(path)`. A classification
            model is built with one output.
        where: the config key and the model's path, for the start of error messages; by default, the key `model.path`
            and the value of `path`.
        attention: name of the model's attention function in transformers, such as "eager".

    Raises:
        ConfigError: transformers cannot build a model of the class `kind` from config.json.
    """
    import torch
    from transformers import AutoConfig

    from rltrain.tasks.tiny_model import MODELS

    with torch.device("meta"):
        if is_builtin(path):
            return MODELS[path]()
        kind = kind or policy_class(path)
        try:
            folder, heads = local_directory(path), {"num_labels": 1} if "Classification" in kind.__name__ else {}
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **heads)
            options = {"attn_implementation": text_attention(config, attention), "dtype": torch.float32}
            return kind.from_config(config, trust_remote_code=False, **options)
        except Exception as error:  # transformers raises an exception, for example, for an unknown model type.
            raise ConfigError(
                f"{where or f'model.path={path}'}: transformers cannot create {kind.__name__} from its config.json "
                f"({type(error).__name__}: {one_line(' '.join(str(error).split()), 160)}); use a model of a type that "
                "the installed transformers knows"
            ) from error


def parameter_count(path: str, kind: Any = None) -> int:
    """Return the number of parameters in the model that a directory's config.json describes.

    Parameters that several layers share (tied parameters) count once.
    """
    return sum(parameter.numel() for parameter in skeleton(path, kind).parameters())


def check_weights(path: str, where: str, kind: Any = None, *, new_head: bool = False) -> None:
    """Raise an error unless the weight files hold exactly the tensors of the model that config.json describes.

    The check of the weight files reads only the headers of the files, and not the weights.

    Args:
        path: the model's directory.
        where: the config key and the model's path, for the start of error messages.
        kind: the transformers Auto class of the model to check; by default, `policy_class(path)`.
        new_head: whether training initializes the head (the parameters outside the base model) with new random values.
            If `new_head` is true, the check accepts weight files that lack the head, or that hold the head of another
            model.

    Raises:
        ConfigError: the weights do not fit the model, or belong to an adapter or a quantized model. The message of the
            ConfigError names the broken file, or the tensors that are missing, unexpected, or have the wrong shape or
            dtype.
    """
    folder = local_directory(path)
    require(
        not (folder / "adapter_config.json").is_file(),
        f"{where}: holds adapter_config.json, an adapter that engines would not apply; merge it into the model "
        "(merge_and_unload in peft) and save the merged model",
    )
    require(
        not read_json(folder / "config.json").get("quantization_config"),
        f"{where}: its config.json has a quantization_config; only plain weights can be trained: use the original "
        "model without quantisation",
    )
    tensors = stored_tensors(folder, where)
    _check_experts(tensors, where)
    model = skeleton(path, kind, where)
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    other = [n for n, t in tensors.items() if t.dtype not in _FLOATS and n.rpartition(".")[2] not in buffers]
    other = sorted(name for name in other if not _OLD_BUFFER.search(name))
    require(
        not other,
        f"{where}: stores {_some(f'{name} as {tensors[name].dtype}' for name in other)}, and only floating-point "
        "weights can be trained; use the original model without quantisation, or save the model again with "
        "save_pretrained",
    )
    require_whole(model, _loaded_without_weights(model, tensors, where), where, new_head=new_head)


def _check_experts(tensors: Mapping[str, StoredTensor], where: str) -> None:
    """Raise ConfigError unless the experts of a mixture-of-experts model are numbered 0, 1, 2, ... without a gap.

    Expert numbers are checked because transformers stacks all experts that it finds, even if some numbers are missing.
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    for match in filter(None, map(_EXPERT.match, tensors)):
        numbers.setdefault((match[1], match[3]), []).append(int(match[2]))
    for (before, after), found in numbers.items():
        missing = sorted(set(range(max(found) + 1)) - set(found)) if max(found) < 2 * len(found) + 8 else found
        require(
            not missing,
            f"{where}: its weights lack {_some(f'{before}{number}{after}' for number in missing)}, although the "
            f"experts are numbered up to {max(found)}; {AGAIN}",
        )


def _loaded_without_weights(model: Any, tensors: Mapping[str, StoredTensor], where: str) -> dict[str, Any]:
    """Return transformers' loading report for tensors with the given names and shapes, without reading weights."""
    import torch

    state = {name: torch.empty(tensor.shape, dtype=torch.float32, device="meta") for name, tensor in tensors.items()}
    with reported(where):
        found: dict[str, Any] = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=state,
            device_map={"": "meta"},
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )[1]
    return found


def load_whole(kind: Any, path: str, where: str, *, new_head: bool = False, **kwargs: Any) -> Any:
    """Load the model in a directory, and check that every parameter of the model was read from the weight files.

    Rollout engines that generate with transformers load their model with `load_whole`. Training ranks load their shards
    with `read_weights`.

    Args:
        kind: the transformers Auto class that loads the model.
        path: the model's directory.
        where: the config key and the model's path, for the start of error messages.
        new_head: whether weight files without the model's head are accepted, as in `check_weights`.
        **kwargs: keyword arguments that are passed on to `from_pretrained`.

    Raises:
        ConfigError: `check_weights` rejects the weight files, or transformers reports missing, unexpected or mismatched
            tensors.
    """
    check_weights(path, where, kind, new_head=new_head)
    with reported(where):
        model, found = kind.from_pretrained(
            path,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **kwargs,
        )
    require_whole(model, found, where, new_head=new_head)
    return model


def read_weights(model: Any, path: str, where: str, *, device: Any, new_head: bool = False) -> None:
    """Read the weights of a model that `skeleton` built on the meta device.

    If a parameter is a DTensor, only this process's shard of the parameter is read from the weight files. A tensor in
    the weight files for which the model has no parameter is not read.

    Args:
        model: the model, whose parameters and buffers are replaced in place.
        path: the model's directory, which `check_weights` has accepted.
        where: the config key and the model's path, for the start of error messages.
        device: device of the loaded weights.
        new_head: whether weight files without the model's head are accepted, as in `check_weights`.

    Raises:
        ConfigError: transformers could not load some of the model's parameters from the weight files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    from rltrain.data.safetensors_rows import stored_rows

    files = weight_files(local_directory(path), where)
    state = None
    if files[0].suffix == SAFETENSORS:
        state = {name: tensor for file in files for name, tensor in stored_rows(file).items()}
    mapping: Any = get_model_conversion_mapping(model)
    # Because `from_pretrained` cannot load shards for a device mesh that the caller has chosen, `read_weights` calls
    # two private methods that `from_pretrained` uses: `_load_pretrained_model` and `_finalize_model_loading`.
    how = LoadStateDictConfig(
        pretrained_model_name_or_path=path,
        ignore_mismatched_sizes=True,
        device_map={"": device},
        weight_mapping=mapping,
    )
    with reported(where):
        found, _ = model._load_pretrained_model(model, state, [str(file) for file in files], how)
        found = model._finalize_model_loading(model, how, found)
    report = found.to_dict() | {"unexpected_keys": []}
    require_whole(model, report, where, new_head=new_head)


def require_whole(model: Any, found: Mapping[str, Any], where: str, *, new_head: bool = False) -> None:
    """Raise an error unless the loading report says that every tensor was loaded with its exact shape.

    Args:
        model: the loaded model.
        found: the loading report, as returned by `from_pretrained(output_loading_info=True)`.
        where: the config key and the model's path, for the start of error messages.
        new_head: whether weight files without the model's head are accepted, as in `check_weights`.

    Raises:
        ConfigError: tensors are missing, unexpected or of the wrong shape. The message of the ConfigError names the
            affected tensors.
    """
    body = f"{model.base_model_prefix}."

    def counts(name: str) -> bool:
        return not new_head or name.startswith(body)

    missing = sorted(filter(counts, found["missing_keys"]))
    shapes = sorted(
        f"{name} of the shape {list(stored)} instead of {list(wanted)}"
        for name, stored, wanted in found["mismatched_keys"]
        if counts(name)
    )
    unexpected = [] if new_head else sorted(name for name in found["unexpected_keys"] if not _OLD_BUFFER.search(name))
    kinds = (("lack", missing), ("have", shapes), ("hold the extra tensors", unexpected))
    said = ", and ".join(f"{verb} {_some(names)}" for verb, names in kinds if names)
    require(
        not said,
        f"{where}: its weights {said}, so they do not match the {type(model).__name__} in its config.json; copy or "
        "download all files of the model again, or save it again with save_pretrained",
    )


@contextlib.contextmanager
def reported(where: str) -> Iterator[None]:
    """Suppress transformers' log messages and progress bar while a model is loaded.

    Raises:
        ConfigError: transformers failed to merge tensors. The message of the ConfigError names the affected tensors.
    """
    from transformers.utils import logging as progress

    said: list[str] = []
    logger, bar = logging.getLogger("transformers.modeling_utils"), progress.is_progress_bar_enabled()
    level = logger.level

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    logger.addFilter(keep)
    logger.setLevel(logging.INFO)
    progress.disable_progress_bar()
    try:
        yield
    except RuntimeError as error:
        names = [name for text in said for name in _CONVERSION.findall(text)]
        if not names:
            raise
        raise ConfigError(
            f"{where}: its weights for {_some(names)} cannot be combined: one of their parts is missing or has the "
            "wrong shape; copy or download all files of the model again, or save it again with save_pretrained"
        ) from error
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)
        if bar:
            progress.enable_progress_bar()


def check_engine_files(path: str, where: str, title: str = "vLLM") -> None:
    """Raise an error if an engine and transformers would read a model's weights from different files of a directory.

    The files that vLLM reads count as those of the engine.

    Args:
        path: the model's directory.
        where: config key and path for the start of error messages.
        title: name of the engine in messages.

    Raises:
        ConfigError: the engine and transformers would read the weights from different files. The message of the
            ConfigError names the files that only one of them reads.
    """
    folder = local_directory(path)
    read, index = set(weight_files(folder, where)), folder / NAMES[1]
    engine = next((found for end in (SAFETENSORS, TORCH) if (found := set(folder.glob(f"*{end}")))), set())
    if any(file.suffix == SAFETENSORS for file in engine):
        engine &= set(shards(index, where)) if index.is_file() else engine
    else:
        engine = {file for file in engine if file.name not in NOT_FOR_ENGINES}
    other = _some(sorted(one_line(file.name) for file in engine ^ read))
    require(
        engine == read,
        f"{where}: {title} and transformers would read different weight files (only one of them reads {other}); keep "
        "the weights in files of only one format and remove index files of other formats, or use rollout=hf",
    )


def _some(names: Any) -> str:
    """Return the first few of the given names as text, followed by the number of omitted names."""
    names = [one_line(str(name)) for name in names]
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
