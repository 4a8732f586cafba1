"""A reward model: a frozen, sharded sequence classifier whose one output at a row's last token is the row's score."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rltrain.base.errors import ConfigError
from rltrain.batch.data_proto import DataProto
from rltrain.settings.schema import Config
from workers.cluster.progress import tick
from workers.models.fsdp import device, forward_only, frozen
from workers.models.packed_forward import Pack, load_model, pack, stand_in, to_device
from workers.models.row_isolation import check_rows_apart


class RewardModelWorker:
    """One rank of a reward model; it never changes.

    Args:
        config: the whole config.
        path: the reward model's directory in Hugging Face form.

    Raises:
        ConfigError: its weights are not the whole model, its score is not a linear function of a causal model's last
            state, or packed rows see each other.
    """

    def __init__(self, config: Config, path: str) -> None:
        where = f"reward model {path}"
        model = load_model(AutoModelForSequenceClassification, path, where=where, num_labels=1)
        _check(model, where)
        check_rows_apart(model, score_head(model), functools.partial(row_scores, model), where)
        self.model = frozen(model, config)

    def compute_scores(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """`model_scores` of these rows, in the order of the micro-batches: their tokens are `prompts`, all of them."""
        scores = []
        with forward_only(self.model):
            for rows in microbatches:  # no rows: one that stands in, so that this rank takes part in the collectives
                tick()
                packed = to_device(pack(batch[rows or stand_in(batch)]), device())
                scores.append(row_scores(self.model, packed).cpu()[: len(rows)])
        return DataProto.from_dict({"model_scores": torch.cat(scores)})


def score_head(model: PreTrainedModel) -> nn.Module:
    """The model's last layer."""
    head: Any = model.score
    assert isinstance(head, nn.Module), "checked when the model was loaded"
    return head


def row_scores(model: PreTrainedModel, packed: Pack) -> Tensor:
    """The model's output at the last token of each packed row, float32."""
    outputs: list[Tensor] = []
    # The model itself would return one output for the pack, which it takes for one row.
    hook = score_head(model).register_forward_hook(lambda _, __, out: outputs.append(out))
    model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        attention_mask=None,
        use_cache=False,
        packed=packed,
    )
    hook.remove()
    begins = packed.position_ids[0] == 0
    return outputs[0][0, begins.roll(-1), 0].float()  # a row ends where the next begins, the last before the first


def _check(model: PreTrainedModel, where: str) -> None:
    head = getattr(model, "score", None)
    good = isinstance(head, nn.Linear) and head.out_features == 1
    causal = all(getattr(module, "is_causal", True) for module in model.modules())
    if not good or not causal:
        raise ConfigError(
            f"{where}: {type(model).__name__} is not a causal model with one linear output 'score'; choose one that is"
        )
