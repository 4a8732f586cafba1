"""FSDP2 sharding of models, the gathering of full tensors from shards, and the optimizer."""

import contextlib
import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rltrain.base.errors import ConfigError, NumericsError
from rltrain.settings.schema import Config, ModelConfig, OptimizerConfig
from workers.models.device_meshes import Meshes, device_meshes
from workers.models.expert_parallel import divide_experts
from workers.models.sequence_parallel import sequence_group
from workers.models.tensor_parallel import divide_layers
from workers.models.varlen_attention import GPU, resolved_kernel
from workers.models.weight_shards import local_shard


def device() -> torch.device:
    """Return this rank's GPU, or the CPU if there is no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def weights_device(config: ModelConfig) -> torch.device:
    """Return the device that holds this rank's shards of a model's weights."""
    return torch.device("cpu") if config.cpu_offload else device()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers, which are the modules whose classes the model lists in `_no_split_modules`.

    Layers that process images are not decoder layers.
    """
    text: Any = model.get_decoder() if hasattr(getattr(model, "config", None), "vision_config") else model  # type: ignore[operator]
    names = set(getattr(text, "_no_split_modules", None) or ())
    return [module for module in text.modules() if type(module).__name__ in names]


def shard(model: PreTrainedModel, config: Config, *, same_rows: bool = True) -> PreTrainedModel:
    """Divide and shard a model over the ranks in place, with each decoder layer as a separate FSDP unit.

    The model may be on the meta device if the caller loads the model's weights after the sharding. A model that needs
    neither sharding nor a change of dtype is not moved to another device. The sharding settings come from
    `config.model` and `config.placement`. Master weights, gradients and the gradient reduction stay in float32. If the
    setting `model.dtype` is bfloat16, matrix products use bfloat16. The model's attribute `sequence` is set to the
    group of ranks that split the tokens of a pack, or to None if no ranks split a pack.

    Args:
        model: the model.
        config: the complete config of the run.
        same_rows: whether each group of `placement.ranks_per_pack` neighbouring ranks processes the same rows. If each
            rank processes different rows, the ranks do not divide the matrices of layers.

    Raises:
        ConfigError: the config enables CPU offload or compilation, but the ranks have no GPU.
    """
    compute, placement = getattr(torch, config.model.dtype), config.placement
    for key in ("cpu_offload", "compile"):
        if getattr(config.model, key) and device().type == "cpu":
            raise ConfigError(f"model.{key}=true: needs GPUs, but these ranks have none; use model.{key}=false")
    tensor_ranks = placement.tensor_ranks if same_rows else 1
    vars(model)["sequence"] = sequence_group(placement.sequence_ranks, placement.context_ranks, placement.tensor_ranks)
    layers = decoder_layers(model)
    for layer in layers:
        prepare(layer, config.model)
    if dist.get_world_size() == 1 and compute == torch.float32 and not config.model.cpu_offload:
        return model  # on a single rank in float32, nothing needs to be sharded or converted
    meshes = device_meshes(placement, device().type, tensor_ranks=tensor_ranks)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)}
    if config.model.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if meshes.tensor is not None:
        divide_layers(model, meshes.tensor)
    if meshes.experts is not None:
        _shard_experts(model, meshes, options)
    for layer in layers:
        fully_shard(layer, mesh=meshes.data, **options)
    fully_shard(model, mesh=meshes.data, **options)  # `fully_shard` changes `model` in place
    return model


def _shard_experts(model: PreTrainedModel, meshes: Meshes, options: dict[str, Any]) -> None:
    """Divide the experts of a model over the ranks in place, and shard each rank's experts."""
    assert meshes.experts is not None, "this mesh has no ranks that divide experts"
    # The inputs of experts already have the dtype in which the model computes. Some models keep the weights of the
    # chosen experts in float32, and FSDP must not round them.
    policy = replace(options["mp_policy"], cast_forward_inputs=False)
    for experts in divide_experts(model, meshes.experts):
        fully_shard(experts, mesh=meshes.expert_data, **options | {"mp_policy": policy})


def averaged_ranks(config: Config) -> int:
    """Return the number of ranks over which FSDP averages gradients.

    Ranks that divide the matrices of layers process the same rows and count once.
    """
    return dist.get_world_size() // config.placement.tensor_ranks


def frozen(
    model: PreTrainedModel, config: Config, dtype: torch.dtype | None = None, *, same_rows: bool = True
) -> PreTrainedModel:
    """Freeze and shard, in place, a model that is never trained.

    The frozen weights are stored in `dtype`. If `dtype` is None, the frozen weights are stored in the dtype
    `model.dtype`, in which the model computes. `same_rows` is passed on to `shard`.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype or getattr(torch, config.model.dtype))
    return shard(model, config, same_rows=same_rows)


@contextlib.contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """Run the `with` block without gradients, and then reshard the model if FSDP shards it.

    After a forward pass, FSDP keeps the parameters outside the layers (embeddings, head) gathered, in the compute
    dtype, for a later backward pass. No backward pass follows the `with` block, so `forward_only` frees the gathered
    copies of the parameters. If the gathered copies were not freed, the copies would waste memory, and checkpoints
    would contain the copies instead of the float32 shards.
    """
    with torch.no_grad():
        yield
    if isinstance(model, FSDPModule):
        model.reshard()


# Limit for the compiled graphs of a layer's code. Windows, shared tokens and gradients each double the number of
# graphs, and changed sizes can add further ones. Beyond the limit, torch.compile runs layers uncompiled, with only a
# warning.
GRAPHS = 32


def prepare(layer: nn.Module, config: ModelConfig) -> None:
    """Compile a layer's forward pass and enable activation checkpointing, each only if `config` enables it.

    `prepare` replaces only `layer.forward`, so FSDP's module hooks are neither compiled nor checkpointed. Activation
    checkpointing wraps the compiled function, because `torch.compile` does not compile code inside a checkpointed
    function.
    """
    if config.compile:
        if device().type == GPU:
            resolved_kernel(device())  # Imports the attention kernel; an import inside a traced layer breaks its graph.
        torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
        layer.forward = torch.compile(layer.forward, dynamic=True)
    if config.activation_checkpointing:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return a dictionary that maps each additional name of a tied parameter to the parameter's first name."""
    first: dict[int, str] = {}
    every = list(model.named_parameters(remove_duplicate=False))
    return {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}


def full(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all ranks, and return any other tensor unchanged.

    If the tensor is sharded, all ranks must call `full`.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's names of the moments of a parameter.


class Optimizer:
    """AdamW with gradient clipping and a learning-rate schedule that ends after `total_steps` optimizer steps.

    Args:
        parameters: the parameters to train, possibly sharded.
        config: learning rate, schedule and clipping limit.
        total_steps: number of optimizer steps in the whole run.
        max_skipped: maximum number of consecutive optimizer steps that are skipped because of non-finite values.
    """

    def __init__(
        self, parameters: list[nn.Parameter], config: OptimizerConfig, total_steps: int, *, max_skipped: int
    ) -> None:
        self.parameters, self.config, self.total_steps, self.steps = parameters, config, total_steps, 0
        self.max_skipped, self.skipped = max_skipped, 0  # `skipped` counts the consecutive skipped optimizer steps
        self.by_mesh = _by_mesh(parameters)
        self.adamw = torch.optim.AdamW(
            [{"params": group} for group in self.by_mesh],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        # CPU memory for moments, which is kept so that it is allocated and pinned only once.
        self.cpu_moments: dict[tuple[Tensor, str], Tensor] = {}

    def offload(self) -> None:
        """Move AdamW's moments to CPU memory until the next optimizer step, if `config.offload_optimizer` is true."""
        if not self.config.offload_optimizer:
            return
        for parameter, state in self.adamw.state.items():
            for kind in MOMENTS:
                local = local_shard(state[kind])
                if (parameter, kind) not in self.cpu_moments:
                    self.cpu_moments[parameter, kind] = pinned_like(local)
                kept = self.cpu_moments[parameter, kind]
                if local.data_ptr() != kept.data_ptr():
                    state[kind] = _with_local(state[kind], kept.copy_(local))

    def _reload(self) -> None:
        """Copy the moments that are in CPU memory to the device of the parameters."""
        for (parameter, kind), kept in self.cpu_moments.items():
            state = self.adamw.state[parameter]
            if local_shard(state[kind]).data_ptr() == kept.data_ptr():
                state[kind] = _with_local(state[kind], torch.empty_like(kept, device=parameter.device).copy_(kept))

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a dictionary with AdamW's state of a parameter: the step count and the two moments.

        If the parameter has no state yet, `moments` first creates a state of zeros, as AdamW does before its first
        step.
        """
        state = self.adamw.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return dict(state)

    def lr(self) -> float:
        """Return the learning rate of the next optimizer step.

        During warmup, the learning rate increases linearly to `config.lr`. After the warmup, the learning rate is
        constant, or decays to 0 linearly or along half a cosine wave.
        """
        config, step = self.config, self.steps
        if step < config.lr_warmup_steps:
            return config.lr * (step + 1) / config.lr_warmup_steps
        done = (step - config.lr_warmup_steps) / max(1, self.total_steps - config.lr_warmup_steps)
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return config.lr * max(0.0, factor[config.lr_schedule])

    def step(self, *, trained: bool = True, finite: bool = True) -> dict[str, float]:
        """Clip the gradient, take an optimizer step and clear the gradient.

        All training ranks must call `step` together.

        If no token contributes to the loss, AdamW takes no step, because AdamW's momentum would move the weights even
        with a gradient of 0. If the gradient or any rank's loss is not finite, all ranks skip the step, and the weights
        stay unchanged. The learning-rate schedule advances even if AdamW takes no step.

        Args:
            trained: whether any token of the mini-batch contributes to the loss.
            finite: whether this rank's loss is finite.

        Returns:
            `grad_norm`, the norm of the full gradient before clipping; `lr`, the learning rate; and `skipped`, which is
            1 if the step was skipped because of non-finite values, otherwise 0.

        Raises:
            NumericsError: more than `max_skipped` consecutive optimizer steps were skipped. When `step` raises
                NumericsError, the model still has the weights of the last optimizer step that was not skipped.
        """
        norm = self._clip()
        lr, skip = self.lr(), not (on_all_ranks(finite) and math.isfinite(norm))
        self.skipped = self.skipped + 1 if skip else 0
        if trained and not skip:
            self._reload()
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.steps += 1
        if self.skipped > self.max_skipped:
            raise NumericsError(
                f"{self.skipped} updates in a row, up to optimizer step {self.steps}, had a loss or gradient that is "
                f"not finite (last gradient norm: {norm}), but the limit is "
                f"trainer.max_skipped_updates={self.max_skipped}; look at the rewards, advantages and log-probs of "
                "these samples, and lower the learning rate or the loss's clip ranges"
            )
        return {"grad_norm": norm, "lr": lr, "skipped": float(skip)}

    def _clip(self) -> float:
        """Scale the gradient down if its norm exceeds `config.max_grad_norm`, and return the norm before scaling."""
        norms = []
        for group in self.by_mesh:
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            norms.append(full(nn.utils.get_total_norm(gradients)))
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for group in self.by_mesh:
            nn.utils.clip_grads_with_norm_(group, self.config.max_grad_norm, norm)
        return float(norm)


def pinned_like(tensor: Tensor) -> Tensor:
    """Return a new tensor in CPU memory with the shape and dtype of `tensor`. If `tensor` is on a GPU, pin the memory.

    PyTorch's own allocator of pinned memory would round the size up to a power of two.
    """
    made = torch.empty_like(tensor, device="cpu")
    if tensor.device.type == "cuda" and made.nbytes:
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(made.data_ptr(), made.nbytes, 0))
        weakref.finalize(made, runtime.cudaHostUnregister, made.data_ptr())
    return made


def _with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor that is sharded like `tensor`, and whose shard on this rank is `local`."""
    # `DTensor.from_local` would move `local` to the device of the mesh.
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


def _by_mesh(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by the ranks that hold them. PyTorch cannot combine tensors of different device meshes."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def on_all_ranks(good: bool) -> bool:
    """Return whether `good` is True on every rank. All training ranks must call `on_all_ranks` together."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return good
    flag = torch.tensor(good, dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)
