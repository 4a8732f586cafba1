"""Names that vLLM gives to the layers and tensors of a model, and the names of the same tensors in a checkpoint."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def output_heads(model: nn.Module) -> dict[str, Any]:
    """Return the modules that compute logits, by their checkpoint names.

    vLLM's implementations of some models, such as Gemma 2, have no output head of their own, and compute logits with
    the embedding. A weight sync names the weight of such a head `lm_head.weight`.
    """
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    heads = {name: module for name, module in modules.items() if isinstance(module, ParallelLMHead)}
    embedding = next((module for module in modules.values() if isinstance(module, VocabParallelEmbedding)), None)
    return heads or ({} if embedding is None else {"lm_head": embedding})


def checkpoint_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return a dictionary from the checkpoint name of each tensor to the name that vLLM gives to the tensor.

    If vLLM fuses several layers of the checkpoint into one layer, `checkpoint_names` still gives the tensors of each
    checkpoint layer a separate name. `checkpoint_names` leaves out the tensors that vLLM's name mapping drops.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {name: name for name in names}
    if hasattr(mapper, "orig_to_new_stacked"):
        mapper = replace(mapper, orig_to_new_stacked={})
    return {name: mapped for name in names if (mapped := mapper.map_name(name)) is not None}


def vllm_name(model: nn.Module, name: str) -> str | None:
    """Return the name that vLLM gives to a tensor of the checkpoint, or None (see `checkpoint_names`)."""
    return checkpoint_names(model, [name]).get(name)


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of a model, where a module with several names occurs under each of its names.

    vLLM's expert layers contain the router and the shared experts of the module around them. The names that the router
    and the shared experts have inside an expert layer are left out, because no checkpoint has such names.
    """
    named = list(model.named_modules(remove_duplicate=False))
    inside = tuple(f"{name}." for name, module in named if isinstance(module, MoERunner))
    outside = {id(module) for name, module in named if not name.startswith(inside)}
    return [(name, module) for name, module in named if not (name.startswith(inside) and id(module) in outside)]
