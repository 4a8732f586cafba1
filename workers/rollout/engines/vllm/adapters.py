"""Use of vLLM's own support for low-rank adapters (LoRA), chosen by `rollout.vllm.adapters=separate`.

For an adapted layer, vLLM computes W x + B (A x), where W is the base matrix, and A and B are the matrices of the
adapter (arXiv 2106.09685). A weight sync replaces only A and B, and W stays as it was loaded from the model's files.
The alternative is to merge the adapters into W, as `workers.sync.adapters` does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import ModelRegistry, supports_lora

from rltrain.base.errors import ConfigError, SyncError
from rltrain.data.model_weights import skeleton
from rltrain.settings.schema import LoRAConfig
from workers.models.adapter_weights import A, B
from workers.models.expert_parallel import expert_modules
from workers.models.lora import adapted_layers
from workers.rollout.engines.vllm.names import vllm_name
from workers.sync.adapters import Adapters
from workers.sync.checks import probe_vector

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # Adapter ranks for which vLLM can reserve memory.
BASE = ".base_layer"  # vLLM replaces an adapted layer X by a layer that contains X under the name `X.base_layer`.
# `POLICY` names the adapter that the trainer sends. vLLM never opens `lora_path`, because each weight sync writes the
# adapter directly into vLLM's memory.
POLICY = LoRARequest(lora_name="policy", lora_int_id=1, lora_path="received from the trainer")


def adapter_arguments(path: str, lora: LoRAConfig) -> dict[str, Any]:
    """Return the engine arguments with which vLLM reserves memory for the adapters of `model.lora`.

    Args:
        path: Model directory.
        lora: Settings of the adapters.
    """
    targets = sorted({layer.rpartition(".")[2] for layer in adapted_layers(skeleton(path), lora)})
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        "lora_target_modules": targets,
    }


def check_adapters(path: str, dtype: str, lora: LoRAConfig) -> None:
    """Raise ConfigError if `rollout.vllm.adapters=separate` does not work with a model and its adapters.

    Args:
        path: Model directory.
        dtype: Data type of the weights, "float32" or "bfloat16".
        lora: Settings of the adapters.
    """
    model = skeleton(path)
    if (reason := _obstacle(model, dtype, lora)) is not None:
        raise ConfigError(f"rollout.vllm.adapters=separate: {reason}; use rollout.vllm.adapters=merged")


def _obstacle(model: PreTrainedModel, dtype: str, lora: LoRAConfig) -> str | None:
    """Return the reason why `rollout.vllm.adapters=separate` does not work with a model, or None if it works."""
    if torch.cuda.is_available() and dtype == "float32":
        return "on GPUs, vLLM's kernels for adapters need model.dtype=bfloat16"
    if lora.rank > RANKS[-1]:
        return f"vLLM applies adapters of at most rank {RANKS[-1]}, but model.lora.rank is {lora.rank}"
    # The weights of experts can be checked only while vLLM loads them. With separate adapters, a weight sync loads no
    # base weights.
    if next(expert_modules(model), None) is not None:
        return f"{type(model).__name__} has experts, whose weights cannot be checked without loading them"
    # vLLM has no layers for adapters in most image encoders.
    if hasattr(model.config, "vision_config"):
        return f"{type(model).__name__} reads images"
    # In multi-head latent attention, vLLM uses copies of the matrix `kv_b_proj`, to which adapters are not applied.
    if hasattr(model.config, "kv_lora_rank"):
        return f"vLLM does not apply adapters to all layers of {type(model).__name__}"
    registered = ModelRegistry.models.get(type(model).__name__)
    if registered is None or not supports_lora(registered.load_model_cls()):
        return f"vLLM applies no adapters to {type(model).__name__}"
    return None


def load_adapters(model: Any, received: Adapters, *, version: int) -> None:
    """Make vLLM's model compute with the adapters that were received in a weight sync.

    Args:
        model: vLLM's model, created with the arguments of `adapter_arguments`.
        received: The matrices of all adapters.
        version: Version of the weights, for error messages.

    Raises:
        SyncError: A matrix did not arrive, or vLLM has no layer to which it can apply a received adapter.
    """
    manager = model.lora_manager
    known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    tensors, rank = dict[str, Tensor](), 1
    for layer in _layers(received):
        a, b, own = received.parts.get(layer + A), received.parts.get(layer + B), _vllm_layer(model, layer)
        if a is None or b is None or own not in known:
            raise SyncError(
                f"weight sync {version}: vLLM cannot apply the adapter of the layer '{layer}', because the layer is "
                "missing in vLLM's model, or one of the adapter's matrices did not arrive; use "
                "rollout.vllm.adapters=merged"
            )
        # rltrain multiplies B by the scale, because vLLM would change the received matrix in place.
        tensors |= {own + A: a, own + B: b * received.scale}
        rank = len(a)
    # vLLM multiplies B by lora_alpha / r. Here, B already contains the scale, so the quotient must be 1.
    settings = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    adapter = LoRAModel.from_lora_tensors(
        POLICY.lora_int_id, tensors, settings, device="cpu", dtype=manager.lora_config.lora_dtype
    )
    manager.remove_adapter(adapter.id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter.id)


def expected_products(model: Any, received: Adapters, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute the product (s B) (A v) of each received adapter.

    s is the adapter's scale, and v is the probe vector of the adapted matrix (see `workers.sync.checks`). Before the
    multiplication, A and s B are rounded to the engine's data type. Without this rounding, the product of an adapter
    with a small rank can differ from the engine's product by more than the checks allow.

    Args:
        model: vLLM's model.
        received: The matrices of all adapters.
        dtype: Data type of the engine's weights.

    Returns:
        A dictionary from vLLM's name of each adapted matrix to the product in float32.
    """
    products = {}
    for layer in _layers(received):
        a = received.parts[layer + A].to(dtype).float()
        b = (received.scale * received.parts[layer + B]).to(dtype).float()
        products[f"{_vllm_layer(model, layer)}.weight"] = b @ (a @ probe_vector(a.size(1), dtype))
    return products


def product(layer: BaseLinearLayerWithLoRA, vector: Tensor) -> Tensor:
    """Return the product B (A v) for the matrices that vLLM's kernels use in a layer, in float32.

    Under tensor parallelism, the matrices are this rank's parts.

    Args:
        layer: Layer of vLLM's model that applies an adapter.
        vector: This rank's part of the vector v, of shape (inputs,).
    """
    halves = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
    return torch.cat([b[0, 0].float() @ (a[0, 0].float() @ vector.float()) for a, b in halves])


def _layers(received: Adapters) -> list[str]:
    return sorted({name.removesuffix(A).removesuffix(B) for name in received.parts})


def _vllm_layer(model: nn.Module, layer: str) -> str:
    """Return the name that vLLM gives to a layer, given the layer's name in the checkpoint."""
    return (vllm_name(model, f"{layer}.weight") or layer).removesuffix(".weight")
