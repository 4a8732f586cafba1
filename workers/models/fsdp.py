"""Sharding with FSDP2, the optimizer, its schedule, and full tensors out of shards."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rltrain.base.errors import ConfigError, NumericsError
from rltrain.settings.schema import Config, ModelConfig, OptimizerConfig
from workers.models.sequence_parallel import sequence_group


def sharding_mesh(shard_ranks: int | None) -> DeviceMesh:
    """The ranks of this process group: parameters are sharded over `shard_ranks` of them and replicated over the rest.

    None shards over all.
    """
    ranks = dist.get_world_size()
    if shard_ranks is None or shard_ranks == ranks:
        return init_device_mesh(device().type, (ranks,))
    assert ranks % shard_ranks == 0, "checked with the config"
    return init_device_mesh(device().type, (ranks // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard"))


def device() -> torch.device:
    """This rank's device: its GPU, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def shard(model: PreTrainedModel, config: Config) -> PreTrainedModel:
    """Shard a model in place over the ranks, each decoder layer on its own, as `config.model` and placement say.

    Master weights, gradients and their reduction stay float32; with `model.dtype` bfloat16 matrix products use it.
    Where ranks share out the tokens of a pack, `model.sequence` is their group.
    Raises ConfigError for what these ranks cannot do.
    """
    compute = getattr(torch, config.model.dtype)
    for key in ("cpu_offload", "compile"):
        if getattr(config.model, key) and device().type == "cpu":
            raise ConfigError(f"model.{key}=true: it is for GPUs, and these ranks have none; use false")
    vars(model)["sequence"] = sequence_group(config.placement.sequence_ranks)
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for layer in layers:
        prepare(layer, config.model)
    if dist.get_world_size() == 1 and compute == torch.float32 and not config.model.cpu_offload:
        cast(nn.Module, model).to(device())  # there is nothing to share out, and nothing to convert
        return model
    options: dict[str, Any] = {
        "mesh": sharding_mesh(config.placement.shard_ranks),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
    }
    if config.model.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)  # in place
    return model


def frozen(model: PreTrainedModel, config: Config) -> PreTrainedModel:
    """Shard a model that is never trained: without gradients, and its weights in the dtype that it computes in."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(getattr(torch, config.model.dtype))
    shard(model, config).eval()
    return model


@contextlib.contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """Passes without gradients, and a sharded model in its shards afterwards.

    FSDP keeps what is not in a layer (embeddings, head) whole after a forward pass, in the dtype of the computation,
    for a backward pass to come. Without one it would take memory, and stand where weights to save are looked for.
    """
    with torch.no_grad():
        yield
    if isinstance(model, FSDPModule):
        model.reshard()


def prepare(layer: nn.Module, config: ModelConfig) -> None:
    """Compile a layer's forward pass, and have the backward pass compute it again, as the config says.

    FSDP's hooks stay outside both, and checkpointing outside what is compiled: nothing inside it would be.
    """
    if config.compile:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    if config.activation_checkpointing:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once (tied ones under their first name), gathered. A collective: all ranks must iterate."""
    for name, parameter in model.named_parameters():
        yield name, full(parameter.detach())


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, and the first name of each."""
    first: dict[int, str] = {}
    every = list(model.named_parameters(remove_duplicate=False))
    return {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor; a collective for DTensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Optimizer:
    """AdamW with gradient clipping and a schedule that ends at exactly `total_steps` optimizer steps.

    Args:
        parameters: those of the sharded model.
        config: rates and limits.
        total_steps: optimizer steps of the whole run.
        max_skipped: so many steps in a row may be skipped because their numbers are not finite.
    """

    def __init__(
        self, parameters: list[nn.Parameter], config: OptimizerConfig, total_steps: int, *, max_skipped: int
    ) -> None:
        self.parameters, self.config, self.total_steps, self.steps = parameters, config, total_steps, 0
        self.max_skipped, self.skipped = max_skipped, 0  # the latter: in a row, up to now
        self.adamw = torch.optim.AdamW(
            parameters, lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay, fused=True
        )

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of a parameter by name, zeros before its first step, as it would make them itself."""
        state = self.adamw.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return dict(state)

    def lr(self) -> float:
        """The rate of the next step: warm-up to `lr`, then constant, or down to 0 linearly or by a half cosine."""
        config, step = self.config, self.steps
        if step < config.lr_warmup_steps:
            return config.lr * (step + 1) / config.lr_warmup_steps
        done = (step - config.lr_warmup_steps) / max(1, self.total_steps - config.lr_warmup_steps)
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return config.lr * max(0.0, factor[config.lr_schedule])

    def step(self, *, trained: bool = True, finite: bool = True) -> dict[str, float]:
        """Clip, step, clear the gradients. Returns the norm of the full gradient before clipping, the rate, `skipped`.

        The weights stay where nothing was `trained` (AdamW's momentum would move them), and where the gradient or any
        rank's loss is not `finite`: then `skipped` is 1, on all ranks. The schedule goes on. A collective.
        Raises NumericsError, the weights as they were, when that is too often in a row.
        """
        norm = float(full(nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)))
        lr, skip = self.lr(), not (_on_all_ranks(finite) and math.isfinite(norm))
        self.skipped = self.skipped + 1 if skip else 0
        if trained and not skip:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.steps += 1
        if self.skipped > self.max_skipped:
            raise NumericsError(
                f"{self.skipped} updates in a row, up to optimizer step {self.steps}, had a loss or gradient that is "
                f"not finite (norm {norm}), more than trainer.max_skipped_updates={self.max_skipped}; look at rewards, "
                "advantages and log-probs of these samples, and lower the learning rate or the loss's clip ranges"
            )
        return {"grad_norm": norm, "lr": lr, "skipped": float(skip)}


def _on_all_ranks(good: bool) -> bool:
    """Whether this holds on every rank; a collective."""
    if dist.get_world_size() == 1:
        return good
    flag = torch.tensor(good, dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)
