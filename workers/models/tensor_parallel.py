"""Tensor parallelism: ranks divide the matrices of each layer (Megatron-LM, arXiv:1909.08053).

The ranks process the same rows. Transformers publishes for each model family which matrices are divided by rows and
which by columns. Between such a pair of matrices, each rank has some of the attention heads, or some of the entries of
the feed-forward layer. The product with the second matrix is added up over the ranks. Embeddings, norms and the output
head are computed by each rank in full.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from rltrain.data.parallel_plans import COLUMNS, OF_HEADS, ROWS
from workers.models.collectives import gradients_summed


def divide_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the matrices of all layers over the ranks of `mesh`, in place, as the model's published plan says.

    The model can be on the meta device.
    """
    for matrix, style in list(divided_matrices(model)):
        parallelize_module(matrix, mesh, ColwiseParallel() if style == COLUMNS else RowwiseParallel())
    for module, style in planned_modules(model):
        if style == OF_HEADS:
            _add_up_gradients(module, mesh.get_group())


def divided_matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Linear, str]]:
    """Yield the linear layers whose matrices tensor parallelism divides, and the style of each: COLUMNS or ROWS."""
    for module, style in planned_modules(model):
        if isinstance(module, nn.Linear) and style in (COLUMNS, ROWS):
            yield module, style


def planned_modules(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that the model's published plan names, and their styles."""
    plan: Mapping[str, str] = model.tp_plan
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            yield module, style


@contextmanager
def replaced_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the module's own parameters by other tensors inside the `with` block."""
    kept: Any = dict(module._parameters)
    module._parameters.update(tensors)  # type: ignore[arg-type]  # the tensors need not be parameters
    try:
        yield
    finally:
        module._parameters.update(kept)


def _add_up_gradients(module: nn.Module, group: Any) -> None:
    """Add up the gradients of the module's parameters over the ranks of a group, in each backward pass.

    Each rank applies such a module, for example the norm of queries, to its own heads.
    """
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        summed = {name: gradients_summed(tensor, group) for name, tensor in module.named_parameters(recurse=False)}
        with replaced_parameters(module, summed):
            return inner(*args, **kwargs)

    module.forward = forward
