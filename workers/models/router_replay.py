"""Code that records which experts a mixture-of-experts model chooses, and that makes a model use recorded experts.

For each token and each sparse layer, a router scores all experts and chooses the k experts with the highest scores. The
engine and the trainer round differently, so two almost equal scores can be ordered differently in the two. The trainer
then computes a token with other experts than the engine did, and the token's log-prob differs by much more than
rounding explains. Rollout routing replay (R3, arXiv:2510.11370) records the engine's choice for each token.
The trainer computes the token with the recorded experts. The weights of the experts are still computed from the
trainer's own scores, so gradients flow into the router.

The choice also changes between the mini-batches of a training step, because each update changes the scores. Routing
replay R2 (arXiv:2512.01374) keeps the experts that the actor chose before the step's first update.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rltrain.base.errors import ConfigError
from rltrain.batch.token_arrays import NOT_RECORDED
from rltrain.data.model_weights import skeleton
from workers.models.fsdp import decoder_layers

_NAMES = "TopKRouter"  # In transformers, the names of the routers' classes end with these letters.
_KNOWN = "Qwen3-MoE, Mixtral, OLMoE or gpt-oss"


def routers_of(
    model: nn.Module, where: str, *, key: str = "actor.router_replay", off: str = "null"
) -> dict[int, nn.Module]:
    """Return the routers of a model, in a dict whose keys are the indices of the routers' decoder layers.

    Args:
        model: the model.
        where: start of the error message, such as `model.path=PATH`.
        key: the setting that needs the routers, for the error message.
        off: value of `key` with which no routers are needed.

    Raises:
        ConfigError: the model has no router of a known kind, or a layer has several routers.
    """
    found = dict[int, nn.Module]()
    for number, layer in enumerate(decoder_layers(model)):
        routers = [module for module in layer.modules() if type(module).__name__.endswith(_NAMES)]
        if len(routers) > 1:
            raise ConfigError(
                f"{where}: {key} does not support {type(model).__name__}, which has {len(routers)} "
                f"routers in a layer; use {key}={off}"
            )
        if routers:
            found[number] = routers[0]
    if not found:
        raise ConfigError(
            f"{where}: {key} needs a mixture-of-experts model such as {_KNOWN}, but "
            f"{type(model).__name__} has no router of a known kind; use {key}={off}"
        )
    return found


def experts_in(output: Sequence[Tensor], router: nn.Module, where: str, *, key: str, off: str) -> Tensor:
    """Return the numbers (N, k) of the experts that a router chose, which are the only integers in its output.

    Args:
        output: the tensors that the router returned for N tokens.
        router: the router.
        where: start of the error message, such as `model.path=PATH`.
        key: the setting that needs the experts, for the error message.
        off: value of `key` with which no experts are needed.

    Raises:
        ConfigError: the output has no tensor of integers, or several.
    """
    experts = [tensor for tensor in output if not tensor.is_floating_point()]
    if len(experts) != 1:
        raise ConfigError(
            f"{where}: {key} does not support {type(router).__name__}, which returns "
            f"{len(experts)} integer tensors instead of one; use {key}={off}"
        )
    return experts[0]


def check_routers(path: str, *, key: str = "actor.router_replay", off: str = "null") -> None:
    """Raise ConfigError if the routers of the model in the directory `path` are of no known kind.

    `key` and `off` are passed on to `routers_of`.
    """
    routers_of(skeleton(path), f"model.path={path}", key=key, off=off)


class ExpertRecorder:
    """Records the experts that a model's routers choose in forward passes without gradients.

    Args:
        model: the model, to whose routers forward hooks are added.
        where: start of error messages, such as `model.path=PATH`.

    Raises:
        ConfigError: the model has no router of a known kind.
    """

    def __init__(self, model: nn.Module, where: str) -> None:
        self._layers, self._where, self._chosen = len(decoder_layers(model)), where, dict[int, Tensor]()
        for number, router in routers_of(model, where).items():
            router.register_forward_hook(functools.partial(self._record, number))

    def _record(self, number: int, router: nn.Module, inputs: Any, output: Sequence[Tensor]) -> None:
        if torch.is_grad_enabled():
            return
        self._chosen[number] = experts_in(output, router, self._where, key="actor.router_replay", off="null")

    def take(self) -> Tensor:
        """Return the experts chosen in the last forward pass, and forget them.

        Returns:
            (N, L * k) int16: for each of the pass's N tokens, the numbers of the k experts of each of the model's L
            decoder layers, layer by layer. The experts of dense layers are `NOT_RECORDED`.
        """
        first = next(iter(self._chosen.values()))
        shape = (len(first), self._layers, first.size(1))
        found = torch.full(shape, NOT_RECORDED, dtype=torch.int16, device=first.device)
        for number, experts in self._chosen.items():
            found[:, number] = experts
        self._chosen = {}
        return found.flatten(1)


def replay_routers(model: nn.Module, where: str) -> None:
    """Prepare a model, in place, for `set_experts`. Without a call of `set_experts`, the model stays as it was.

    Args:
        model: the model, before it is sharded. It may be on the meta device.
        where: start of error messages, such as `model.path=PATH`.

    Raises:
        ConfigError: the model has no router of a known kind.
    """
    routers = routers_of(model, where)
    for router in routers.values():
        vars(router)["forward"] = functools.partial(_replayed, router, router.forward, where)
    vars(model)["replayed_routers"] = routers
    vars(model)["replayed_layers"] = len(decoder_layers(model))


def set_experts(model: nn.Module, experts: Tensor | None) -> None:
    """Set the experts that the routers choose in the next forward pass, and in its recomputation in the backward pass.

    Args:
        model: a model that `replay_routers` has prepared. For other models, `experts` is ignored.
        experts: (N, L * k) as `ExpertRecorder.take` returns it, for the N tokens of the next forward pass. A router
            makes its own choice for tokens whose experts are `NOT_RECORDED`, and for all tokens if `experts` is None.

    Raises:
        ConfigError: the number of experts of a token is not a multiple of the model's number of layers.
    """
    routers: dict[int, nn.Module] = vars(model).get("replayed_routers", {})
    if not routers:
        return
    layers = vars(model)["replayed_layers"]
    if experts is not None and experts.size(1) % layers:
        raise ConfigError(
            f"actor.router_replay: each token has {experts.size(1)} recorded experts, which is not a multiple of "
            f"the model's {layers} layers; use actor.router_replay=null"
        )
    by_layer = None if experts is None else experts.unflatten(1, (layers, -1)).long()
    for number, router in routers.items():
        vars(router)["chosen_experts"] = None if by_layer is None else by_layer[:, number]


def _replayed(router: nn.Module, forward: Any, where: str, *args: Any, **kwargs: Any) -> Any:
    """Run the forward function of a router, with the experts of the last call of `set_experts`."""
    chosen = vars(router).get("chosen_experts")
    if chosen is None:
        return forward(*args, **kwargs)
    with _Choice(chosen) as choice:
        output = forward(*args, **kwargs)
    if len(choice.shapes) != 1:
        raise ConfigError(
            f"{where}: actor.router_replay does not support {type(router).__name__}, which does not choose its "
            "experts by a single call of torch.topk; use actor.router_replay=null"
        )
    if choice.shapes != [chosen.shape]:
        raise ConfigError(
            f"{where}: actor.router_replay: {type(router).__name__} chooses {choice.shapes[0][1]} experts for each of "
            f"{choice.shapes[0][0]} tokens, but {chosen.size(1)} experts of {len(chosen)} tokens are recorded"
        )
    return output


class _Choice(TorchFunctionMode):
    """Makes `torch.topk` return the scores of given experts instead of the highest scores.

    Args:
        chosen: (N, k) int64 numbers of the experts, or `NOT_RECORDED`.

    Attributes:
        shapes: the shape of the result of each call of `torch.topk`. Results of other shapes than (N, k) are not
            replaced.
    """

    def __init__(self, chosen: Tensor) -> None:
        super().__init__()
        self._chosen = chosen
        self.shapes: list[torch.Size] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a PyTorch function, but let `torch.topk` return the given experts, whatever their scores are."""
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        self.shapes.append(result.indices.shape)
        if result.indices.shape != self._chosen.shape:
            return result
        experts = torch.where(self._chosen == NOT_RECORDED, result.indices, self._chosen)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))
