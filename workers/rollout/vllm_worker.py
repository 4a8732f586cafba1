"""What runs inside vLLM's own worker: receiving weights through its weight-transfer protocol, and checking them.

vLLM imports this module by name (`worker_extension_cls`) before it loads the model; that registers the back end.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rltrain.errors import SyncError
from workers.weight_sync import Bucket, check_outputs, probe_vector, tensors_of

BACKEND = "rltrain"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on: every bucket describes itself."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket: itself in the same process, or the name of a file in shared memory that holds it."""

    bucket: Bucket | None = None
    shared: str | None = None

    def read(self) -> Bucket:
        """The bucket."""
        if self.bucket is None:
            assert self.shared is not None, "a bucket, or where it lies"
            self.bucket = pickle.loads(Path(self.shared).read_bytes())  # written by this run, readable by its user only
        assert self.bucket is not None
        return self.bucket


class BucketTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives buckets, loads them layer by layer through vLLM's reload, and checks what the layers then compute."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No rendezvous."""

    def start_weight_update(self) -> None:
        """Put the layers into their loading form."""
        self.probes: dict[str, np.ndarray] = {}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check the bytes and load them."""
        bucket = update_info.read()
        self.version, self.dtype = bucket.version, bucket.dtype
        self.probes |= bucket.probes
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors_of(bucket))

    def finish_weight_update(self) -> None:
        """Bring the layers into their computing form, output heads included.

        vLLM's reload passes over a head that is tied to the embedding, and on CPU a head computes with a packed copy of
        its weights: without the second step it keeps the old ones.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)

    def check_layers(self) -> None:
        """Raise SyncError unless every layer computes with the weights of the last update, where probes came along."""
        if self.probes:
            try:
                with torch.inference_mode():
                    outputs = layer_outputs(self.model)
            except Exception as error:  # layers of kinds that were not foreseen
                raise SyncError(
                    f"weight sync {self.version}: a layer of this model could not be run by itself to be checked "
                    f"({type(error).__name__}: {error}); rollout.verify_sync=false turns the check off"
                ) from error
            check_outputs(outputs, self.probes, version=self.version, dtype=self.dtype)

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
    """Added to vLLM's worker; naming this class makes the worker import this module."""

    def rltrain_check(self) -> None:
        """Check the last update on this rank; under tensor parallelism all ranks call it."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.check_layers()


def layer_outputs(model: nn.Module) -> dict[str, Tensor]:
    """Run every linear layer, head and embedding on its probe vector; fused layers are cut into their parts.

    Under tensor parallelism all ranks call it, and each gets the outputs of the whole layers.

    Returns:
        W v in float32 per checkpoint name; biases and norms as they are.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    outputs: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ParallelLMHead):
            outputs[f"{name}.weight"] = gather([_apply(module)], module.tp_size)[0][: module.org_vocab_size]
        elif isinstance(module, VocabParallelEmbedding):
            rows = module(torch.arange(module.org_vocab_size, device=module.weight.device))
            outputs[f"{name}.weight"] = rows.float() @ probe_vector(rows.size(-1), rows.dtype).to(rows.device)
        elif isinstance(module, LinearBase):
            parent, _, last = name.rpartition(".")
            names = [f"{parent}.{part}" for part in fused.get(last, [last])]
            wholes = {"weight": _linear(module, _apply(module))}
            if module.bias is not None:
                wholes["bias"] = _linear(module, module.bias.float(), is_bias=True)
            for kind, parts in wholes.items():
                parts = [torch.cat(parts)] if len(names) == 1 else parts  # a checkpoint that is fused already
                outputs |= {f"{n}.{kind}": part for n, part in zip(names, parts, strict=True)}
        else:
            outputs |= {f"{name}.{n}": p.float() for n, p in module.named_parameters(recurse=False) if p.ndim == 1}
    return outputs


def _linear(module: LinearBase, output: Tensor, *, is_bias: bool = False) -> list[Tensor]:
    """A layer's output (or bias) on this rank as the whole outputs of its fused parts."""
    size = module.tp_size
    if isinstance(module, RowParallelLinear):  # each rank has a part of the inputs; the bias is whole
        return [output if is_bias or size == 1 else tensor_model_parallel_all_reduce(output)]
    if not isinstance(module, ColumnParallelLinear):
        return [output]
    parts = list(output.split(_part_sizes(module)))
    whole = gather(parts, size)
    if isinstance(module, QKVParallelLinear) and (copies := module.num_kv_head_replicas) > 1:
        # Ranks that share a key-value head hold copies of it; keep one of each.
        whole[1:] = [part.unflatten(0, (size // copies, copies, -1))[:, 0].flatten() for part in whole[1:]]
    return whole


def gather(parts: Sequence[Tensor], size: int) -> list[Tensor]:
    """Each part from all ranks, end to end."""
    return list(parts) if size == 1 else [tensor_model_parallel_all_gather(part.contiguous(), dim=0) for part in parts]


def _apply(module: nn.Module) -> Tensor:
    """This rank's part of the layer's W v, without bias, through the kernel that inference uses."""
    is_head = isinstance(module, ParallelLMHead)
    whole = module.embedding_dim if is_head else module.input_size
    size = whole if is_head else getattr(module, "input_size_per_partition", whole)
    dtype = module.params_dtype
    vector = probe_vector(whole, dtype).to(dtype=dtype, device=next(module.parameters()).device)
    if size != whole:
        vector = vector.split(size)[get_tensor_model_parallel_rank()]
    return module.quant_method.apply(module, vector[None].contiguous())[0].float()


def _part_sizes(module: ColumnParallelLinear) -> list[int]:
    """Output sizes of a layer's fused parts on this rank."""
    if isinstance(module, QKVParallelLinear):
        values = module.num_kv_heads * module.v_head_size
        return [module.num_heads * module.head_size, module.num_kv_heads * module.head_size, values]
    return list(module.output_partition_sizes)
