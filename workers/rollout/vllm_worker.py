"""What runs inside vLLM's own worker: receiving weights through its weight-transfer protocol, and checking them.

vLLM imports this module by name (`worker_extension_cls`) before it loads the model; importing it registers the back end.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from workers.weight_sync import Bucket, check_outputs, probe_vector, tensors_of

BACKEND = "rltrain"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on: every bucket describes itself."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket: itself in the same process, or the name of a shared-memory file that holds its bytes."""

    bucket: Bucket
    shared: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class BucketTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives buckets and loads them layer by layer through vLLM's reload."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No rendezvous."""

    def start_weight_update(self) -> None:
        """Put the layers into their loading form."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check the bytes and load them."""
        bucket = update_info.bucket
        if update_info.shared is not None:
            bucket.data = np.fromfile(update_info.shared, dtype=np.uint8)
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors_of(bucket))

    def finish_weight_update(self) -> None:
        """Bring the layers into their computing form, output heads included.

        vLLM's reload passes over a head that is tied to the embedding, and on CPU a head computes with a packed copy of
        its weights: without the second step it keeps the old ones.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def repack_heads(model: nn.Module) -> None:
    """Make every output head compute with the weights that it now holds."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketTransfer)


class WorkerExtension:
    """Methods added to vLLM's worker, called on every tensor-parallel rank."""

    def rltrain_outputs(self) -> dict[str, Tensor]:
        """W v per tensor of the checkpoint, through this engine's own layers (this rank's part of it)."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.inference_mode():
            return layer_outputs(model)

    def rltrain_check(self, probes: dict[str, np.ndarray], version: int, dtype: str) -> None:
        """Raise SyncError unless every layer computes with the weights behind these probes."""
        check_outputs(self.rltrain_outputs(), probes, version=version, dtype=dtype)


def layer_outputs(model: nn.Module) -> dict[str, Tensor]:
    """Run every linear layer, head and embedding on its probe vector; fused layers are cut into their parts.

    Returns:
        W v in float32 per checkpoint name; biases and norms as they are.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    outputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead):
            outputs[f"{name}.weight"] = _apply(module)[: module.org_vocab_size]
        elif isinstance(module, VocabParallelEmbedding):
            rows = module(torch.arange(module.org_vocab_size, device=module.weight.device))
            outputs[f"{name}.weight"] = rows.float() @ probe_vector(rows.size(-1), rows.dtype).to(rows.device)
        elif isinstance(module, LinearBase):
            parent, _, last = name.rpartition(".")
            names = [f"{parent}.{part}" for part in fused.get(last, [last])]
            sizes = _part_sizes(module, len(names))
            parts = [("weight", _apply(module))] + ([("bias", module.bias)] if module.bias is not None else [])
            for kind, whole in parts:
                outputs |= {f"{n}.{kind}": piece for n, piece in zip(names, whole.split(sizes), strict=True)}
        else:
            outputs |= {f"{name}.{n}": p.float() for n, p in module.named_parameters(recurse=False) if p.ndim == 1}
    return outputs


def _apply(module: nn.Module) -> Tensor:
    """This layer's W v, without bias, through the kernel that inference uses."""
    size = module.embedding_dim if isinstance(module, ParallelLMHead) else module.input_size_per_partition
    like = next(module.parameters())
    vector = probe_vector(size, like.dtype).to(dtype=like.dtype, device=like.device)
    return module.quant_method.apply(module, vector[None])[0].float()


def _part_sizes(module: nn.Module, parts: int) -> list[int]:
    """Output sizes of a layer's fused parts."""
    if parts == 1:
        return [module.output_size_per_partition]
    if hasattr(module, "num_kv_heads"):  # query, key, value
        key_value = module.num_kv_heads * module.head_size
        return [module.num_heads * module.head_size, key_value, module.num_kv_heads * module.v_head_size]
    return list(module.output_partition_sizes)
