"""Low-rank adapters, made by peft, on the actor's linear layers.

If a model has adapters, only the adapters are trained and sent to the rollout engines.

peft replaces each adapted layer by a layer that computes W x + (alpha / rank) B (A x), where A and B are the adapter's
matrices (arXiv 2106.09685, section 4.1). In this module, `X.weight` is the name of the matrix W of layer X, whether or
not layer X has an adapter.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rltrain.base.errors import ConfigError
from rltrain.data.builtin_models import is_builtin
from rltrain.data.hub import local_directory
from rltrain.data.model_weights import skeleton
from rltrain.settings.schema import ALL_LINEAR, LoRAConfig
from workers.models.adapter_weights import A, B, BaseWeights

NAME = "default"  # peft's default adapter name; each adapted layer has exactly one adapter, which has this name
WRAPPED, HALVES = ".base_layer.", (".lora_A.", ".lora_B.")


@dataclass(frozen=True)
class Adapter:
    """The parameters of one adapter, possibly sharded.

    Attributes:
        a: the adapter's matrix A, of shape (rank of the adapter, inputs of the layer).
        b: the adapter's matrix B, of shape (outputs of the layer, rank of the adapter).
        scale: factor by which the product B A of the adapter's matrices is multiplied.
    """

    a: Tensor
    b: Tensor
    scale: float


def adapt(model: PreTrainedModel, config: LoRAConfig) -> None:
    """Freeze a causal language model in place, and add an adapter to each target layer.

    The parameters of the adapters are on the meta device, so they have no values yet. `first_adapter_values` returns a
    function that computes initial values for the adapters' parameters.

    Raises:
        ConfigError: `adapted_layers` rejects one of the target layers in the config.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = adapted_layers(model, config)
    whole = config.alpha.is_integer()
    names = sorted({layer.rpartition(".")[2] for layer in layers}) if config.targets == [ALL_LINEAR] else config.targets
    # peft accepts a fractional `lora_alpha`, although its type annotation is int.
    alpha: Any = int(config.alpha) if whole else config.alpha
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=names,
        task_type="CAUSAL_LM",
        inference_mode=False,
    )
    inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)  # peft changes `model` in place
    found = {name.removesuffix(".weight") for name in adapters_of(model)}
    assert found == set(layers), f"peft must adapt exactly the target layers; differences: {found ^ set(layers)}"


def first_adapter_values(seed: int) -> Callable[[str, torch.Size], Tensor]:
    """Return a function that maps the name and shape of an adapter's parameter to the parameter's initial value.

    The matrix A of each adapter is random, as in peft. The random values depend only on `seed`, and on the order and
    the shapes of the parameters for which values are computed. The matrix B is 0, so the adapters do not change the
    model's outputs before training.
    """
    source = torch.Generator().manual_seed(seed)

    def value(name: str, shape: torch.Size) -> Tensor:
        whole = torch.zeros(shape)
        if HALVES[0] in name:
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=source)
        return whole

    return value


def adapted_layers(model: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """Return the names of the layers that get an adapter.

    Raises:
        ConfigError: a target layer in the config is not a plain linear layer of the model, or is the model's last
            layer.
    """
    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if name}
    linear = [name for name, module in modules.items() if is_linear(module) and module is not head]
    if config.targets == [ALL_LINEAR]:
        if not linear:
            raise ConfigError(
                f"model.lora.targets={ALL_LINEAR}: {type(model).__name__} has no nn.Linear except its last layer; use "
                "model.lora=null"
            )
        return linear
    chosen = []
    for target in config.targets:
        found = [name for name in modules if name == target or name.endswith(f".{target}")]
        bad = next((name for name in found if name not in linear), None)
        if bad is not None or not found:
            raise ConfigError(_refusal(target, bad, modules, linear, head))
        chosen += found
    return list(dict.fromkeys(chosen))


def _refusal(target: str, bad: str | None, modules: Mapping[str, nn.Module], linear: list[str], head: nn.Module) -> str:
    """Return the error message for a target of `model.lora.targets` that cannot be adapted."""
    known = sorted({name.rpartition(".")[2] for name in linear})
    if bad is None:
        near = difflib.get_close_matches(target, known, n=1, cutoff=0.0)
        hint = f"the nearest is '{near[0]}', and all names" if near else "there"
        return f"model.lora.targets: no layer is called '{target}'; {hint} are {', '.join(known)}"
    if modules[bad] is head:
        return (
            f"model.lora.targets: '{target}' is the last layer, where log-probs are computed without an adapter; "
            "remove this target"
        )
    kind = type(modules[bad]).__name__
    return f"model.lora.targets: '{target}' is of the kind {kind}, not nn.Linear; use some of {', '.join(known)}"


def is_linear(module: nn.Module) -> bool:
    """Return whether a layer is an nn.Linear with the original forward method."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def adapter_parameters(path: str, config: LoRAConfig) -> int:
    """Return the number of trained parameters: adapter rank times (inputs + outputs), summed over all target layers.

    Raises:
        ConfigError: `adapted_layers` rejects one of the target layers in the config, or the model's safetensors files
            lack a matrix that gets an adapter.
    """
    model = skeleton(path)
    names = adapted_layers(model, config)
    if not is_builtin(path):
        BaseWeights(local_directory(path)).require([f"{name}.weight" for name in names])
    layers = [model.get_submodule(name) for name in names]
    return sum(config.rank * (layer.in_features + layer.out_features) for layer in layers)


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return a dict from the name of each adapted matrix to its adapter, or {} for a model without adapters."""
    return {
        f"{name}.weight": Adapter(module.lora_A[NAME].weight, module.lora_B[NAME].weight, module.scaling[NAME])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all matrices A and B, possibly sharded, in a dict whose keys are the names that the weight sync uses."""
    halves = ((name.removesuffix(".weight"), adapter) for name, adapter in adapters_of(model).items())
    return {
        name + half: tensor.detach() for name, adapter in halves for half, tensor in ((A, adapter.a), (B, adapter.b))
    }


def plain_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict that maps Hugging Face checkpoint names to parameters, possibly sharded; adapters are left out.

    Tied parameters appear only once, under the first of their names.
    """
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {name.replace(WRAPPED, "."): parameter for name, parameter in named if not is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Return whether the parameter `name` is part of an adapter."""
    return any(half in name for half in HALVES)
