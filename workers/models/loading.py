"""Loads models; each rank of a sharded model reads only its own shards of the weights.

A model is first built on the meta device, which allocates no memory for weights. The caller of `load_model` can change
the model before any weights are read, for example add adapters and shard the model. After the caller has changed the
model, transformers' own loading code reads this rank's shards of the weights from the weight files.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from rltrain.base.errors import ConfigError
from rltrain.data.model_weights import check_weights, read_weights, skeleton
from workers.models.fsdp import decoder_layers
from workers.models.lora import WRAPPED, is_adapter
from workers.models.packed_forward import PACKED

# Function of a parameter's name and shape that returns the initial value of the parameter, unsharded. `load_model`
# calls a `FirstValue` function for each parameter that is missing from the weight files.
FirstValue = Callable[[str, torch.Size], Tensor]


def load_model(
    kind: Any,
    path: str,
    *,
    where: str | None = None,
    new_head: bool = False,
    arrange: Callable[[PreTrainedModel], object] | None = None,
    first_value: FirstValue | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Load a Hugging Face model directory with packed attention, by default in float32 and unsharded.

    Args:
        kind: Auto class of transformers that builds the model.
        path: the model directory.
        where: config key and path for the start of error messages, `model.path=PATH` by default.
        new_head: whether parameters outside the base model get initial values, instead of being read from the weight
            files.
        arrange: function that changes the model in place before the weights are read. `arrange` can shard the model,
            convert its parameters to another dtype, and add or replace modules.
        first_value: function that returns the initial values of parameters that are not read from the weight files,
            such as adapters. All ranks call `first_value` for the same parameters in the same order. `first_value` is
            None if all parameters are read from the weight files.
        device: device on which the loaded weights are stored.

    Returns:
        The loaded model, in evaluation mode.

    Raises:
        ConfigError: the weights are incomplete, or the model's attention function cannot be replaced.
    """
    where = where or f"model.path={path}"
    check_weights(path, where, kind, new_head=new_head)
    model = empty_model(kind, path, where)
    if arrange is not None:
        arrange(model)
    source = empty_model(kind, path, where)
    lent = _lend(model, source, body=f"{source.base_model_prefix}." if new_head else "")
    read_weights(source, path, where, device=device, new_head=new_head)
    _take_back(model, source, lent)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            assert first_value is not None, f"{name} is not in the weight files, and `first_value` is None"
            whole = first_value(name, parameter.shape).to(device, parameter.dtype)
            _set_parameter(model, name, nn.Parameter(_sharded_like(whole, parameter), parameter.requires_grad))
    model.eval()
    return model


def empty_model(kind: Any, path: str, where: str) -> PreTrainedModel:
    """Build a model with packed attention on the meta device, without allocating memory for weights.

    Raises:
        ConfigError: transformers cannot build the model, or the model's attention function cannot be replaced.
    """
    try:
        model: PreTrainedModel = skeleton(path, kind, where, attention=PACKED)
        return model
    except ConfigError as error:
        # Some models look up their attention function in a table of their own, which has no entry for `PACKED`, the
        # name of rltrain's packed attention.
        if isinstance(error.__cause__, KeyError) and PACKED in error.__cause__.args:
            raise ConfigError(
                f"{where}: this model implements its own attention, which cannot be replaced by attention over packed "
                "rows; use a model of another architecture"
            ) from error
        raise


def load_sample_layers(kind: Any, path: str, *, where: str | None = None, new_head: bool = False) -> PreTrainedModel:
    """Load a model with only one decoder layer of each kind, on the CPU in float32, with packed attention.

    Two layers are of the same kind if their modules, the shapes of their parameters and the settings of their modules
    are the same.

    Raises:
        ConfigError: the weights are incomplete, or the model's attention function cannot be replaced.
    """
    where = where or f"model.path={path}"
    check_weights(path, where, kind, new_head=new_head)
    model = empty_model(kind, path, where)
    kept = _one_of_each_kind(model)
    for stack, layers in kept.items():
        for number in set(range(len(stack))) - set(layers):
            stack[number] = nn.Module()  # the loader skips tensors for which the model has no parameter
    read_weights(model, path, where, device="cpu", new_head=new_head)
    for stack, layers in kept.items():
        chosen = [stack[number] for number in layers]
        del stack[:]
        stack.extend(chosen)
    model.eval()
    return model


def _one_of_each_kind(model: nn.Module) -> dict[nn.ModuleList, list[int]]:
    """Return, for each list of decoder layers, the index of the first layer of each kind."""
    layers = {id(layer) for layer in decoder_layers(model)}
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and m and all(id(one) in layers for one in m)]
    kept: dict[nn.ModuleList, list[int]] = {}
    for stack in stacks:
        first: dict[tuple[object, ...], int] = {}
        for number, layer in enumerate(stack):
            first.setdefault(_description(layer), number)
        kept[stack] = list(first.values())
    return kept


def _description(layer: nn.Module) -> tuple[object, ...]:
    """Return a hashable description of a layer, which is equal only for layers of the same kind."""
    modules = tuple((name, type(module).__name__, _settings(module)) for name, module in layer.named_modules())
    return (*modules, *((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()))


def _settings(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """Return a module's attributes that are numbers, strings or None, except attributes that hold a layer's index."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | float | str | None)
        or (isinstance(value, int) and "layer" not in name and "idx" not in name)
    )


def _lend(model: nn.Module, source: nn.Module, body: str) -> dict[str, str]:
    """Register the parameters of `model` in `source`, under the parameter names that the weight files use.

    Args:
        model: the model whose parameters will be loaded.
        source: a second instance of the model, without adapters, into which transformers loads the weights.
        body: prefix of parameter names; only parameters whose names start with `body` are read from the weight files.

    Returns:
        A dict that maps the name of each registered parameter in `model` to the parameter's name in `source`.
    """
    lent = {
        name: name.replace(WRAPPED, ".")
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not is_adapter(name) and name.startswith(body)
    }
    for name, other in lent.items():
        _set_parameter(source, other, model.get_parameter(name))
    return lent


def _take_back(model: nn.Module, source: nn.Module, lent: dict[str, str]) -> None:
    """Put the loaded buffers and parameters of `source` into `model`.

    The argument `lent` is the dict that `_lend` returned. Parameters that `lent` does not contain are left out.
    """
    for name, other in lent.items():
        loaded = source.get_parameter(other)
        loaded.requires_grad_(model.get_parameter(name).requires_grad)
        _set_parameter(model, name, loaded)
    for name, buffer in source.named_buffers():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, buffer)


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, parameter)


def _sharded_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return the tensor `whole`, which every rank holds in full, as a DTensor that is sharded like `like`.

    If `like` is not a DTensor, return `whole` unchanged.
    """
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, like.placements)
