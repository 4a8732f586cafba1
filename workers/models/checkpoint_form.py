"""Names and shapes of a model's weights in Hugging Face files, which can differ from those in the model's memory.

When transformers loads a model, it renames some tensors and merges others. For example, the weights of all experts of a
mixture-of-experts layer become one tensor. The functions of this module undo the renaming and merging with
transformers' own table of conversions.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion


def in_checkpoint_form(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that represent a model's parameters in Hugging Face files.

    Args:
        model: the model. Only its config and the names of its modules and parameters are used.
        tensors: maps names of parameters of `model` to whole tensors.
    """
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return found


def products_in_checkpoint_form(model: Any, products: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return for each matrix W in Hugging Face files the product W v, where v is a vector that depends on W's width.

    A merged parameter is a stack of such matrices. `products_in_checkpoint_form` is only correct for models whose
    matrices have the same rows in memory as in the files, and not, for example, if the matrices are transposed.

    Args:
        model: the model, as in `in_checkpoint_form`.
        products: maps names of parameters to flat tensors. For a parameter with at least two dimensions, the tensor
            holds the products of all rows of the parameter and v. For another parameter, the tensor holds the
            parameter itself.
    """
    columns = {}
    for name, product in products.items():
        shape = model.get_parameter(name).shape
        columns[name] = product.view(*shape[:-1], 1) if len(shape) > 1 else product
    return {name: column.flatten() for name, column in in_checkpoint_form(model, columns).items()}
