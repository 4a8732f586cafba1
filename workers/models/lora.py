"""Low-rank adapters on the actor's linear layers, through peft: only they are trained, and only they go to engines.

peft puts a layer of its own in the place of each adapted one: W x + alpha / rank B (A x), arXiv 2106.09685 section 4.1.
Here `X.weight` is the name of its matrix with and without an adapter.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rltrain.base.errors import ConfigError
from rltrain.data.model_weights import BUILTIN_MODEL, skeleton
from rltrain.settings.schema import ALL_LINEAR, LoRAConfig
from workers.models.adapter_weights import A, B, BaseWeights, merge
from workers.models.fsdp import full, named_tensors

NAME = "default"  # of the only adapter; peft's own
WRAPPED, HALVES = ".base_layer.", (".lora_A.", ".lora_B.")


@dataclass(frozen=True)
class Adapter:
    """The parameters of one adapter, maybe sharded: a (rank, in), b (out, rank)."""

    a: Tensor
    b: Tensor
    scale: float


def adapt(model: PreTrainedModel, config: LoRAConfig, *, seed: int) -> PreTrainedModel:
    """Freeze a causal language model and put adapters on its targets, in place; B is 0, so that nothing changes yet.

    A is drawn from `seed`, the same on every rank. Raises ConfigError as `adapted_layers` does.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = adapted_layers(model, config)
    whole = config.alpha.is_integer()
    names = sorted({layer.rpartition(".")[2] for layer in layers}) if config.targets == [ALL_LINEAR] else config.targets
    alpha: Any = int(config.alpha) if whole else config.alpha  # peft takes fractions too
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=names,
        task_type="CAUSAL_LM",
        inference_mode=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model)  # in place
    found = {name.removesuffix(".weight") for name in adapters_of(model)}
    assert found == set(layers), f"peft adapted {found ^ set(layers)} otherwise than was checked"
    return model


def adapted_layers(model: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """The names of the layers that get an adapter.

    Raises:
        ConfigError: a target that is no plain linear layer of this model, or is its last one.
    """
    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if name}
    linear = [name for name, module in modules.items() if is_linear(module) and module is not head]
    if config.targets == [ALL_LINEAR]:
        if not linear:
            raise ConfigError(
                f"model.lora.targets={ALL_LINEAR}: {type(model).__name__} has no nn.Linear but its last layer; use "
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
    """Why a target cannot be adapted."""
    known = sorted({name.rpartition(".")[2] for name in linear})
    if bad is None:
        near = difflib.get_close_matches(target, known, n=1, cutoff=0.0)
        hint = f"the nearest is '{near[0]}', and all" if near else "there"
        return f"model.lora.targets: no layer is called '{target}'; {hint} are {', '.join(known)}"
    if modules[bad] is head:
        return f"model.lora.targets: '{target}' is the last layer, whose log-probs have no adapter; leave it out"
    kind = type(modules[bad]).__name__
    return f"model.lora.targets: '{target}' is of the kind {kind}, not nn.Linear; use some of {', '.join(known)}"


def is_linear(module: nn.Module) -> bool:
    """Whether a layer is a plain linear one."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def adapter_parameters(path: str, config: LoRAConfig) -> int:
    """How many parameters are trained: rank times inputs and outputs of every target.

    Raises:
        ConfigError: as `adapted_layers`, or where engines would not find the matrices that are adapted.
    """
    model = skeleton(path)
    names = adapted_layers(model, config)
    if path != BUILTIN_MODEL:
        BaseWeights(Path(path).expanduser()).require([f"{name}.weight" for name in names])
    layers = [model.get_submodule(name) for name in names]
    return sum(config.rank * (layer.in_features + layer.out_features) for layer in layers)


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """The adapters by the names of their matrices; none of a model that has none."""
    return {
        f"{name}.weight": Adapter(module.lora_A[NAME].weight, module.lora_B[NAME].weight, module.scaling[NAME])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A and B of every adapter, maybe sharded, by the names under which they travel."""
    halves = ((name.removesuffix(".weight"), adapter) for name, adapter in adapters_of(model).items())
    return {
        name + half: tensor.detach() for name, adapter in halves for half, tensor in ((A, adapter.a), (B, adapter.b))
    }


def plain_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter that is no adapter's, maybe sharded, as the checkpoint calls it; tied ones once."""
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {plain_name(name): parameter for name, parameter in named if not is_adapter(name)}


def is_adapter(name: str) -> bool:
    """Whether this parameter is one of an adapter."""
    return any(half in name for half in HALVES)


def plain_name(name: str) -> str:
    """The name that a parameter has without adapters."""
    return name.replace(WRAPPED, ".")


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once, whole, adapters merged into their matrices. A collective: all ranks must iterate."""
    adapters = adapters_of(model)
    for name, tensor in named_tensors(model):
        adapter = None if is_adapter(name) else adapters.get(plain_name(name))
        if adapter is not None:
            yield plain_name(name), merge(tensor, full(adapter.b.detach()), full(adapter.a.detach()), adapter.scale)
        elif not is_adapter(name):
            yield plain_name(name), tensor
