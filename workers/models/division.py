"""Checks whether ranks can divide the matrices and the experts of a model, before any worker starts."""

import inspect
from typing import Any

from torch import nn

from rltrain.data.model_weights import skeleton
from rltrain.data.parallel_plans import COLUMNS, OF_HEADS
from rltrain.settings.schema import PlacementConfig
from rltrain.settings.typed import require
from workers.models.expert_parallel import expert_modules
from workers.models.tensor_parallel import divided_matrices, planned_modules


def check_division(
    path: str, where: str, placement: PlacementConfig, kind: Any = None, *, tensor: bool = True, experts: bool = False
) -> None:
    """Raise ConfigError if the configured numbers of ranks cannot divide a model's matrices or experts.

    Args:
        path: the model's directory, or "builtin" for the built-in model.
        where: the config key and path of the model, for the error messages.
        placement: number of ranks for each kind of parallelism.
        kind: the transformers Auto class that builds the model; by default, `policy_class(path)`.
        tensor: whether the ranks divide the matrices of this model's layers.
        experts: whether the model must have experts if `expert_ranks` is above 1.
    """
    tensor_ranks = placement.tensor_ranks if tensor else 1
    if tensor_ranks == placement.expert_ranks == 1:
        return
    model = skeleton(path, kind)
    if tensor_ranks > 1:
        _check_matrices(model, where, tensor_ranks)
    if placement.expert_ranks > 1:
        _check_experts(model, where, placement.expert_ranks, needed=experts)


def _check_matrices(model: Any, where: str, size: int) -> None:
    start, kind = f"placement.tensor_ranks={size}: {where}", type(model).__name__
    matrices = {id(matrix): style for matrix, style in divided_matrices(model)}
    require(
        bool(matrices),
        f"{start} ({kind}) has no matrices that can be divided, because transformers publishes no plan for them; use "
        "placement.tensor_ranks=1",
    )
    of_heads = {id(module) for module, style in planned_modules(model) if style == OF_HEADS}
    for name, block in model.named_modules():
        if not any(id(child) in matrices for child in block.children()):
            continue
        for inner, module in block.named_modules():
            own = [one for one, _ in module.named_parameters(recurse=False)]
            parameter = ".".join([name, *filter(None, [inner]), *own[:1]])
            require(
                not own or id(module) in matrices or id(module) in of_heads,
                f"{start} ({kind}) has the parameter {parameter} beside matrices that would be divided, and "
                "transformers' plan does not say how ranks share it; use placement.tensor_ranks=1",
            )
            if isinstance(module, nn.Linear) and id(module) in matrices:
                width = module.out_features if matrices[id(module)] == COLUMNS else module.in_features
                require(
                    width % size == 0,
                    f"{start}: the {width} {'outputs' if matrices[id(module)] == COLUMNS else 'inputs'} of "
                    f"{name}.{inner} cannot be divided evenly; use a divisor of {width}",
                )


def _check_experts(model: Any, where: str, size: int, *, needed: bool) -> None:
    start, kind = f"placement.expert_ranks={size}: {where}", type(model).__name__
    found = list(expert_modules(model))
    require(
        bool(found) or not needed,
        f"{start} ({kind}) has no experts that can be divided; use placement.expert_ranks=1",
    )
    for module in found:
        count: Any = module.num_experts
        require(count % size == 0, f"{start} has {count} experts; use a divisor of this number")
        names = list(inspect.signature(type(module).forward).parameters)
        require(
            len(names) == 4,  # self, hidden states, chosen experts and their weights
            f"{start} ({kind}) has experts of the unknown kind {type(module).__name__}; use placement.expert_ranks=1",
        )
