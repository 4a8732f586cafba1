"""Extension of vLLM's worker, which receives weights through vLLM's weight-transfer protocol and checks the weights.

vLLM imports this module by name (`worker_extension_cls`) before vLLM loads the model. Importing this module registers
the weight-transfer backend.
"""

import pickle
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.conv import ConvLayerBase
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rltrain.base.errors import SyncError, described
from rltrain.data.model_weights import skeleton
from workers.models.checkpoint_form import in_checkpoint_form, products_in_checkpoint_form
from workers.rollout.engines.vllm import adapters
from workers.rollout.engines.vllm.experts import ExpertChecks, has_quantized_experts
from workers.rollout.engines.vllm.names import checkpoint_names, named_layers, output_heads, vllm_name
from workers.sync.adapters import Adapters
from workers.sync.buckets import Bucket, tensors_of, verify
from workers.sync.checks import check_outputs, probe, probe_vector
from workers.sync.device_memory import wait_for_gpu
from workers.sync.memory import Reader

BACKEND = "rltrain"
# Layers of vision encoders that compute with their weights as they are stored, without another memory layout.
PLAIN = (nn.Embedding, ConvLayerBase)
SCALE = "weight_scale"  # End of the names of the scales that vLLM adds to quantized experts.
EMBEDDING_ROWS = 2048  # Number of rows per lookup when the weights of an embedding are checked.


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Message that sets up vLLM's weight transfer.

    The message `InitInfo` is empty, because every bucket describes its own contents.
    """


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Message that contains one bucket of weights, or the description of a bucket whose bytes are in a shared file.

    If vLLM runs in the rollout worker's process, an `UpdateInfo` message contains the bucket itself. If vLLM runs in
    other processes, an `UpdateInfo` message contains the pickled bucket, whose bytes are in a shared file or in shared
    GPU memory.
    """

    bucket: Bucket | None = None
    pickled: bytes | None = None

    def read(self) -> Bucket:
        """Return the bucket of weights that the message contains or describes."""
        if self.bucket is not None:
            return self.bucket
        assert self.pickled is not None, "an UpdateInfo message must contain a bucket or a pickled bucket"
        bucket: Bucket = pickle.loads(self.pickled)  # Unpickling is safe, because the parent process has sent the data.
        return bucket


class BucketTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Object that loads received buckets of weights through vLLM's layerwise reload, and checks the layers' outputs.

    On a CPU, those parts of the layer checks that use only torch run in a second thread. vLLM's own kernels never run
    in the second thread, because vLLM's kernels share scratch memory. Two kernels of vLLM that run at the same time
    silently compute wrong numbers.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Create the reader of weight buckets, and the thread in which parts of the weight checks run.

        `source` is the actor's model without its weights, whose names of tensors differ from those in the checkpoint,
        which vLLM knows.

        The transfer engine opens no connection to the sender of the weights.
        """
        # vLLM runs some models, such as OLMo 2, with transformers' classes. vLLM changes these classes so that a model
        # can be built only while vLLM's config is set.
        with set_current_vllm_config(self.vllm_config):
            self.source = skeleton(str(self.model_config.model))
        self.reader = Reader()
        self.helper = ThreadPoolExecutor(1, thread_name_prefix="weight-checks")

    def start_weight_update(self) -> None:
        """Discard the state of an interrupted weight update, and start vLLM's layerwise reload of all layers.

        With `rollout.vllm.adapters=separate`, no layer is reloaded, because the base weights do not change.
        """
        self.probes: dict[str, np.ndarray] = {}
        self.lookups: Future[dict[str, Tensor]] | None = None
        self.adapters, self.experts = Adapters(self.model_config.model), ExpertChecks(self.model)
        self.beside = hasattr(self.model, "lora_manager")
        if self.beside:
            return
        if self.device.type == "cpu":
            self.experts.forget_kernels()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Verify the bytes of a bucket of weights, and load the tensors of the bucket.

        If the bucket is in the host's memory, vLLM's loaders copy only those parts of a tensor to this rank's GPU that
        the rank needs.
        """
        bucket = update_info.read()
        data = self._bytes(bucket)
        self.version, self.dtype = bucket.version, str(self.model_config.dtype).removeprefix("torch.")
        wait_for_gpu(data)  # Another thread, whose work on the GPU is not ordered after this thread's work, verifies.
        verified = self.helper.submit(verify, bucket, data)
        try:
            self._expect(bucket)
            if bucket.scale is not None:
                self.adapters.take(bucket, data)
            else:
                self._load(in_checkpoint_form(self.source, dict(tensors_of(bucket, data))).items())
                keep_unfinished(self.model, data)
        finally:
            verified.result()  # As soon as `receive_weights` returns, the sender is free to overwrite the bucket.
            wait_for_gpu(data)

    def _bytes(self, bucket: Bucket) -> Tensor:
        """Return the bytes (n,) of a bucket.

        Only the first tensor-parallel rank uses the GPU whose memory holds a bucket, so it sends the bucket's bytes to
        the other ranks.
        """
        if bucket.handle is None or get_tensor_model_parallel_world_size() == 1:
            return self.reader.data(bucket)
        error, group = "", get_tp_group()
        try:
            first = get_tensor_model_parallel_rank() == 0
            data = (
                self.reader.data(bucket) if first else torch.empty(bucket.size, dtype=torch.uint8, device=self.device)
            )
        except Exception as raised:
            error = described(raised)
        # If one rank cannot take part in the broadcast, all ranks raise an exception before the broadcast.
        errors = [group.broadcast_object(error, src=rank) for rank in range(group.world_size)]
        if any(errors):
            raise SyncError(f"weight sync {bucket.version}: {next(filter(None, errors))}")
        received: Tensor = group.broadcast(data, src=0)
        return received

    def _expect(self, bucket: Bucket) -> None:
        """Store the matrix products that the actor has sent, under the names that vLLM gives to the tensors."""
        probes = {name: torch.tensor(value) for name, value in bucket.probes().items()}
        products = products_in_checkpoint_form(self.source, probes)
        names = checkpoint_names(self.model, products)
        self.probes |= {names[name]: value.numpy() for name, value in products.items() if name in names}

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        load: Any = self.model.load_weights
        load(self.experts.observed(tensors, self.probes, partial(vllm_name, self.model)))

    def finish_weight_update(self) -> None:
        """Finish vLLM's layerwise reload, so that all layers, including the output heads, compute with the new weights.

        With `rollout.vllm.adapters=separate`, no layer was reloaded, and the method `adapt` replaces the adapters.

        On a CPU, an output head computes with a packed copy of its weights. vLLM's reload does not renew the packed
        copy of a head that is tied to the embedding, so `repack_heads` renews this copy.
        """
        self.reader.close()
        if self.beside:
            return
        if self.adapters.parts:
            # vLLM's sleep mode may discard all weights of the engine. The weights without a LoRA adapter are therefore
            # loaded again from the model's files, together with the matrices into which the adapters are merged.
            merged = self.adapters.merged(everything=True)
            self._load((name, tensor.to(self.device)) for name, tensor in merged)
        finalize_layerwise_reload(self.model, self.model_config)
        if self.probes and self.device.type == "cpu" and get_tensor_model_parallel_world_size() == 1:
            self.lookups = self.helper.submit(layer_outputs, self.model, products=False)
        repack_heads(self.model)

    def adapt(self) -> None:
        """Replace vLLM's adapters by the received adapters.

        `adapt` must be called after the end of the weight update, because vLLM removes all adapters at that time.
        """
        adapters.load_adapters(self.model, self.adapters, version=self.version)

    def check_layers(self) -> None:
        """Raise SyncError unless every layer computes with the weights of the last weight update.

        If the weight update contained no expected outputs of the layers, `check_layers` does nothing.
        """
        if self.probes:
            try:
                outputs = layer_outputs(self.model, products=True)
                outputs |= self.lookups.result() if self.lookups else layer_outputs(self.model, products=False)
                outputs |= self.experts.outputs()
            # The computation of the outputs fails if a layer of the model cannot be run on its own.
            except Exception as error:
                raise SyncError(
                    f"weight sync {self.version}: the weights cannot be checked, because a layer of this model cannot "
                    f"be run on its own ({described(error)}); rollout.verify_sync=false turns the check off"
                ) from error
            probes = self.experts.probes(self.probes)
            quantized = quantized_weights(self.model) | self.experts.quantized()
            check_outputs(outputs, probes, version=self.version, dtype=self.dtype, quantized=quantized)
            if self.beside:
                self._check_adapters()

    def _check_adapters(self) -> None:
        """Raise SyncError unless vLLM's kernels use the adapters that the actor has sent.

        This check is needed because `check_layers` compares only outputs of the base weights.
        """
        wanted = adapters.expected_products(self.model, self.adapters, getattr(torch, self.dtype))
        found = {name: output for name, output in adapter_outputs(self.model).items() if name in wanted}
        expected = {name: value.numpy() for name, value in wanted.items()}
        check_outputs(found, expected, version=self.version, dtype=self.dtype)

    def shutdown(self) -> None:
        """Do nothing; vLLM's interface requires the method `shutdown`."""


def repack_heads(model: nn.Module) -> None:
    """Make every output head compute with the weights that were loaded last."""
    for module in output_heads(model).values():
        module.quant_method.process_weights_after_loading(module)


def keep_unfinished(model: nn.Module, data: Tensor) -> None:
    """Copy the tensors of incomplete fused layers out of the memory `data`, in which a bucket of weights arrived.

    vLLM loads a fused layer only when all parts of the layer have arrived, and until then keeps references to the parts
    that have arrived. Later buckets overwrite the memory `data`, so these parts must be copied.
    """
    low, high = data.data_ptr(), data.data_ptr() + data.nbytes
    for layer in model.modules():
        for _, call in get_layerwise_info(layer).loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, Tensor) and low <= value.data_ptr() < high:
                    call.arguments[name] = value.clone()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketTransfer)


class WorkerExtension:
    """Methods that vLLM adds to its worker class.

    The attributes that `WorkerExtension` declares are set by vLLM's worker class.

    vLLM finds the class `WorkerExtension` through the engine argument `worker_extension_cls`.
    """

    vllm_config: Any
    weight_transfer_engine: Any

    def rltrain_call(self, method: str, arguments: dict[str, Any]) -> tuple[str, str] | None:
        """Call a method of this worker, and return the type and the text of the exception that the method raised.

        vLLM reads the workers' results only up to the first exception, and takes the unread results for those of the
        next call. Therefore this method returns exceptions instead of raising them.

        Returns:
            None if the method raised no exception.
        """
        try:
            getattr(self, method)(**arguments)
        except Exception as error:
            return type(error).__name__, str(error)
        return None

    def rltrain_reset(self) -> None:
        """Discard an interrupted weight update, because vLLM starts no update while another update is active."""
        self._weight_update_active = False

    def rltrain_quantization_problem(self) -> str:
        """Return why vLLM cannot generate with quantized weights of this model; "" if it can."""
        return quantization_problem(self.weight_transfer_engine.model)

    def rltrain_adapt(self) -> None:
        """Replace this rank's adapters by the adapters of the last weight sync."""
        self.weight_transfer_engine.adapt()

    def rltrain_check(self) -> None:
        """Check that the layers of this rank compute with the weights of the last sync.

        Under tensor parallelism, all ranks must call `rltrain_check`.
        """
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.check_layers()


@torch.inference_mode()
def layer_outputs(model: nn.Module, *, products: bool) -> dict[str, Tensor]:
    """Compute the product W v for each weight matrix W of the model, where v is the fixed random probe vector of W.

    Under tensor parallelism, all ranks must call `layer_outputs`, and each rank gets the outputs of the unsharded
    layers.

    Args:
        model: The model.
        products: If True, `layer_outputs` returns only the products W v of the linear layers and the output heads, and
            the biases of the linear layers. If `products` is False, `layer_outputs` returns the products W v of the
            embeddings, and the one-dimensional parameters (such as norm weights) of all layers that are neither linear
            layers nor output heads nor embeddings.

    Returns:
        A dictionary from checkpoint names to the products W v in float32, with one entry for each part of a fused
        layer. The products of adapters beside W are not included. Biases and norm weights are returned unchanged,
        except for the conversion to float32.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    outputs: dict[str, Tensor] = {}
    if products:
        for name, module in output_heads(model).items():
            outputs[f"{name}.weight"] = gather([_apply(module)], module.tp_size)[0][: module.org_vocab_size]
    for name, module in named_layers(model):
        if isinstance(module, ParallelLMHead) or isinstance(module, LinearBase) != products:
            continue
        if isinstance(module, VocabParallelEmbedding):
            outputs[f"{name}.weight"] = _embedding(module)
        elif isinstance(module, LinearBase):
            outputs |= _named(name, "weight", _linear(module, _apply(module)), fused)
            bias: Any = module.bias
            if bias is not None:
                outputs |= _named(name, "bias", _linear(module, bias.float(), is_bias=True), fused)
        else:
            matrices = isinstance(module, PLAIN)
            outputs |= {
                f"{name}.{n}": probe(p)
                for n, p in module.named_parameters(recurse=False)
                if (p.ndim == 1 and not n.endswith(SCALE)) or (matrices and p.ndim > 1)
            }
    return outputs


@torch.inference_mode()
def adapter_outputs(model: nn.Module) -> dict[str, Tensor]:
    """Compute the product B (A v) of each adapter of vLLM's model.

    A and B are the matrices of the adapter that vLLM's kernels use. v is the probe vector of the adapted matrix. Under
    tensor parallelism, all ranks must call `adapter_outputs`, and each rank gets the outputs of the unsharded layers.

    Returns:
        A dictionary from the checkpoint name of each adapted matrix to the product in float32.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    manager: Any = model.lora_manager
    outputs: dict[str, Tensor] = {}
    for name, layer in manager.modules.items():
        output = adapters.product(layer, _probe(layer.base_layer))
        outputs |= _named(name, "weight", _linear(layer.base_layer, output), fused)
    return outputs


def _embedding(module: VocabParallelEmbedding) -> Tensor:
    """Return the product of an embedding's weight matrix and the probe vector, with one value for each token id.

    All rows of the weight matrix are obtained by calling the embedding layer, so that the check of the weights also
    covers the layer's lookup.
    """
    weight: Any = module.weight
    vector = probe_vector(module.embedding_dim, weight.dtype).to(weight.device)
    every = torch.arange(module.org_vocab_size, device=weight.device)
    return torch.cat([module(rows).float() @ vector for rows in every.split(EMBEDDING_ROWS)])


def _named(name: str, kind: str, parts: Sequence[Tensor], fused: dict[str, list[str]]) -> dict[str, Tensor]:
    """Return the outputs of the parts of a layer by their checkpoint names.

    Args:
        name: vLLM's name of the layer.
        kind: "weight" or "bias".
        parts: The outputs of the parts that vLLM has fused into the layer.
        fused: vLLM's dict from the last part of a fused layer's name to the names of the layers in the checkpoint.
    """
    names = _part_names(name, fused)
    # If the checkpoint, like vLLM, stores a fused layer as one tensor, the layer has only one checkpoint name, so the
    # outputs of the layer's parts are concatenated.
    parts = [torch.cat(list(parts))] if len(names) == 1 else parts
    return {f"{n}.{kind}": part for n, part in zip(names, parts, strict=True)}


def _part_names(name: str, fused: dict[str, list[str]]) -> list[str]:
    """Return the names in the checkpoint of all layers that vLLM has joined into its one layer `name`."""
    parent, _, last = name.removesuffix(adapters.BASE).rpartition(".")
    return [f"{parent}.{part}" for part in fused.get(last, [last])]


def quantized_layers(model: nn.Module) -> list[tuple[str, LinearBase]]:
    """Return the linear layers that vLLM quantizes, as pairs (vLLM's name of the layer, layer)."""
    return [
        (name, module)
        for name, module in named_layers(model)
        if isinstance(module, LinearBase) and isinstance(module.quant_method, OnlineLinearBase)
    ]


def quantized_weights(model: nn.Module) -> set[str]:
    """Return the checkpoint names of the linear layers' weights that vLLM quantizes."""
    fused = getattr(model, "packed_modules_mapping", {})
    return {f"{part}.weight" for name, _ in quantized_layers(model) for part in _part_names(name, fused)}


def quantization_problem(model: nn.Module) -> str:
    """Return why vLLM cannot generate with the quantized weights of a model; "" if it can."""
    layers = quantized_layers(model)
    if not layers and not any(map(has_quantized_experts, model.modules())):
        return "vLLM quantizes no layer of this model"
    biased = [name for name, layer in layers if getattr(layer, "bias", None) is not None]
    if biased and current_platform.is_cpu():
        return f"on CPUs, vLLM cannot add the bias of the quantized layer {biased[0]}"
    return ""


def _linear(module: LinearBase, output: Tensor, *, is_bias: bool = False) -> list[Tensor]:
    """Sum or concatenate a layer's outputs (or biases) over all tensor-parallel ranks.

    Outputs of row-parallel layers are summed, and outputs of column-parallel layers are concatenated. The returned list
    has one unsharded output (or bias) for each part of the fused layer `module`.
    """
    size = module.tp_size
    # In a row-parallel layer, each rank has only a part of the inputs, so the ranks' outputs are summed. Biases of a
    # row-parallel layer are not summed, because each rank has the whole bias.
    if isinstance(module, RowParallelLinear):
        return [output if is_bias or size == 1 else tensor_model_parallel_all_reduce(output)]
    if not isinstance(module, ColumnParallelLinear):
        return [output]
    parts = list(output.split(_part_sizes(module)))
    whole = gather(parts, size)
    if isinstance(module, QKVParallelLinear) and (copies := module.num_kv_head_replicas) > 1:
        # Ranks that share a key-value head hold copies of the head, so the output of only one copy of each key-value
        # head is kept.
        whole[1:] = [part.unflatten(0, (size // copies, copies, -1))[:, 0].flatten() for part in whole[1:]]
    return whole


def gather(parts: Sequence[Tensor], size: int) -> list[Tensor]:
    """Concatenate each part of a fused layer over all tensor-parallel ranks."""
    return list(parts) if size == 1 else [tensor_model_parallel_all_gather(part.contiguous(), dim=0) for part in parts]


def _apply(module: Any) -> Tensor:
    """Multiply this rank's part of a layer's matrix by the probe vector, with the kernel that inference uses.

    The bias of the layer is not added to the product of matrix and probe vector.
    """
    output: Tensor = module.quant_method.apply(module, _probe(module)[None].contiguous())
    return output[0].float()


def _probe(module: Any) -> Tensor:
    """Return the values of the probe vector that belong to this rank's inputs of a layer, in the layer's dtype."""
    is_head = isinstance(module, VocabParallelEmbedding)
    whole = module.embedding_dim if is_head else module.input_size
    size = whole if is_head else getattr(module, "input_size_per_partition", whole)
    dtype = module.params_dtype
    vector = probe_vector(whole, dtype).to(dtype=dtype, device=next(module.parameters()).device)
    return vector if size == whole else vector.split(size)[get_tensor_model_parallel_rank()]


def _part_sizes(module: ColumnParallelLinear) -> list[int]:
    """Return the number of outputs that each fused part of a layer has on this rank."""
    if isinstance(module, QKVParallelLinear):
        values = module.num_kv_heads * module.v_head_size
        return [module.num_heads * module.head_size, module.num_kv_heads * module.head_size, values]
    return list(module.output_partition_sizes)
