"""Reloading and checking of vLLM's mixture-of-experts layers in a weight sync.

vLLM computes an expert, D (act(G x) * (U x)) for the matrices G (gate), U (up) and D (down), in one call, so G, U and D
cannot be checked one by one. The check runs every expert through vLLM's own kernel, with the probe vector v as input x.
The expected output is D h, where h = act(G v) * (U v) is made of the products G v and U v that the actor has sent. The
worker computes D h while it loads D. To show that this D is the actor's, the worker also compares D v with the actor's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

from workers.sync.checks import probe_vector

ACTIVATIONS: dict[MoEActivation, Callable[[Tensor], Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: partial(F.gelu, approximate="tanh"),
}
GATE, DOWN, UP = "w1", "w2", "w3"  # vLLM's names of an expert's matrices G, D and U.


@dataclass(frozen=True)
class Expert:
    """One expert of a layer.

    Attributes:
        name: name of the expert, such as model.layers.0.mlp.experts.3.
        layer: vLLM's layer, which holds all experts of a decoder layer.
        index: index of the expert in `layer`.
        matrices: maps `GATE`, `DOWN` and `UP` to the name of the expert's matrix, as vLLM names the checkpoint's
            tensors.
    """

    name: str
    layer: Any
    index: int
    matrices: dict[str, str]


def has_quantized_experts(layer: nn.Module) -> bool:
    """Return whether a layer holds experts whose weights vLLM quantizes."""
    return isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, OnlineMoEMethodBase)


class ExpertChecks:
    """Checks of all experts of a model in one weight sync.

    Args:
        model: vLLM's model, with or without experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Any] = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        self.experts = [expert for layer in self.layers for expert in _experts(layer)]
        self.by_down = {expert.matrices[DOWN]: expert for expert in self.experts}
        self.expected: dict[str, Tensor] = {}
        self.received: dict[str, Tensor] = {}

    def forget_kernels(self) -> None:
        """Make vLLM set up the kernels of all experts again when it has loaded their weights.

        On a CPU, a kernel computes with packed weights. If a layer already has a kernel, vLLM 0.32 copies the new
        weights over the packed ones without packing them.
        """
        for layer in self.layers:
            layer.quant_method.moe_kernel = None

    def observed(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        products: Mapping[str, np.ndarray],
        names: Callable[[str], str | None],
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the given tensors unchanged, and compute the expected output of each expert whose matrix D passes.

        Args:
            tensors: names and tensors of the checkpoint.
            products: maps vLLM's names of matrices W to the actor's products W v.
            names: function from a name in the checkpoint to vLLM's name; None if vLLM drops the tensor.
        """
        for name, tensor in tensors:
            expert = self.by_down.get(names(name) or "") if self.by_down else None
            if expert is not None and expert.matrices[GATE] in products and expert.matrices[UP] in products:
                self._expect(expert, tensor, products)
            yield name, tensor

    def _expect(self, expert: Expert, down: Tensor, products: Mapping[str, np.ndarray]) -> None:
        gate, up = (torch.from_numpy(products[expert.matrices[shard]]) for shard in (GATE, UP))
        hidden, dtype = ACTIVATIONS[expert.layer.activation](gate) * up, expert.layer.params_dtype
        vectors = torch.stack([hidden, probe_vector(len(hidden), dtype)], dim=1).to(down.device)
        outputs = (down.to(dtype).float() @ vectors).cpu()
        self.expected[expert.name], self.received[expert.matrices[DOWN]] = outputs[:, 0], outputs[:, 1]

    def quantized(self) -> set[str]:
        """Return the names of the experts whose weights vLLM quantizes."""
        return {one.name for one in self.experts if has_quantized_experts(one.layer)}

    def probes(self, products: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `products`, where the expected output of each expert replaces the products of its matrices G and U."""
        done = [expert for expert in self.experts if expert.name in self.expected]
        used = {expert.matrices[shard] for expert in done for shard in (GATE, UP)}
        kept = {name: product for name, product in products.items() if name not in used}
        return kept | {name: output.numpy() for name, output in self.expected.items()}

    @torch.inference_mode()
    def outputs(self) -> dict[str, Tensor]:
        """Return the output of each expert for the probe vector, and the product D v of each loaded matrix D.

        Under tensor parallelism, all ranks must call `outputs`.

        Raises:
            NotImplementedError: the model has experts of a kind that cannot be checked.
        """
        found = dict(self.received)
        for layer in self.layers:
            if not _checkable(layer):
                raise NotImplementedError(
                    f"experts with the activation {layer.activation.value}, with biases or with clamped activations"
                )
            rows = _run(layer)
            found |= {expert.name: rows[expert.index] for expert in self.experts if expert.layer is layer}
        return found


def _checkable(layer: Any) -> bool:
    return layer.activation in ACTIVATIONS and not layer.moe_config.has_bias and layer.swiglu_limit is None


def _experts(layer: Any) -> list[Expert]:
    """Return the experts of a layer, or an empty list if the experts cannot be checked."""
    if not _checkable(layer):
        return []
    before = layer.layer_name.removesuffix("experts")
    found: dict[int, Expert] = {}
    # Each `part` is the beginning of a name in the checkpoint, such as "experts.3.gate_proj.".
    for _, part, index, shard in layer.get_expert_mapping():
        name = before + part.rpartition(".")[0].rpartition(".")[0]
        found.setdefault(index, Expert(name, layer, index, {})).matrices[shard] = f"{before}{part}weight"
    return list(found.values())


def _run(layer: Any) -> Tensor:
    """Return the outputs (E, H) of a layer's E experts for the probe vector, with the kernel that inference uses."""
    count, width, device = layer.global_num_experts, layer.moe_config.hidden_dim_unpadded, layer.w2_weight.device
    vector = F.pad(probe_vector(width, layer.params_dtype), (0, layer.hidden_size - width))
    # Row e goes to expert e alone, with the weight 1.
    indices = torch.arange(count, device=device, dtype=layer.quant_method.topk_indices_dtype or torch.int32)
    output = layer.forward_modular(
        vector.to(device, layer.params_dtype).repeat(count, 1),
        torch.ones(count, 1, device=device),
        indices[:, None],
    )[:, :width].float()
    # Each rank has a part of every expert, or some of the experts, so the outputs of the ranks are summed.
    return output if get_tensor_model_parallel_world_size() == 1 else tensor_model_parallel_all_reduce(output)
