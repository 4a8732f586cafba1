"""A reward model: a frozen, sharded model whose only output, at the last token of a row, is the row's score."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rltrain.base.errors import ConfigError
from rltrain.batch.data_proto import DataProto
from rltrain.settings.schema import Config
from workers.cluster.progress import tick
from workers.models.fsdp import device, forward_only, frozen, weights_device
from workers.models.loading import load_model, load_sample_layers
from workers.models.packed_forward import Pack, pack, stand_in, to_device
from workers.models.row_isolation import check_rows_apart


class RewardModelWorker:
    """One rank of a reward model, whose weights never change.

    Args:
        config: the run's whole config.
        path: the reward model's directory in Hugging Face format.

    Raises:
        ConfigError: the weights are incomplete, the model is not causal, its score is not one linear function of the
            last hidden state, or rows that are packed together influence each other.
    """

    def __init__(self, config: Config, path: str) -> None:
        self.config, where = config, f"reward model {path}"
        sample = load_sample_layers(AutoModelForSequenceClassification, path, where=where)
        _check(sample, where)
        check_rows_apart(sample, score_head(sample), functools.partial(row_scores, sample), where)
        del sample  # frees the memory of `sample` before the weights of the whole model are read
        self.model = load_model(
            AutoModelForSequenceClassification,
            path,
            where=where,
            arrange=functools.partial(frozen, config=config, same_rows=False),
            device=weights_device(config.model),
        )

    def compute_scores(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Compute the score of each row as the column `model_scores`, with rows in the order of `microbatches`.

        The column `prompts` of `batch` must contain all tokens of a row, including the response.
        """
        scores = []
        with forward_only(self.model):
            # If a micro-batch has no rows, the model runs on a filler row, so that this rank joins all collective
            # operations.
            for rows in microbatches:
                tick()
                part = batch[rows or stand_in(batch)]
                packed = to_device(pack(part, share=self.config.actor.share_prefixes), device())
                scores.append(row_scores(self.model, packed).cpu()[: len(rows)])
        return DataProto.from_dict({"model_scores": torch.cat(scores)})


def score_head(model: PreTrainedModel) -> nn.Module:
    """Return the model's last layer, which is a linear layer that computes the score."""
    head: Any = model.score
    assert isinstance(head, nn.Module), "`_check` requires a linear layer `score`"
    return head


def row_scores(model: PreTrainedModel, packed: Pack) -> Tensor:
    """Return the model's output at the last token of each packed row, in float32."""
    outputs: list[Tensor] = []
    # The model treats all packed rows as a single row, and returns only one score. To get the scores of all rows, a
    # forward hook on the score layer collects the layer's output for every token.
    hook = score_head(model).register_forward_hook(lambda _, __, out: outputs.append(out))
    model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        attention_mask=None,
        use_cache=False,
        packed=packed,
    )
    hook.remove()
    return outputs[0][0, packed.ends, 0].float()


def _check(model: PreTrainedModel, where: str) -> None:
    head = getattr(model, "score", None)
    good = isinstance(head, nn.Linear) and head.out_features == 1
    causal = all(getattr(module, "is_causal", True) for module in model.modules())
    if not good or not causal:
        raise ConfigError(
            f"{where}: {type(model).__name__} is not a causal model with one linear output 'score'; choose a "
            "causal reward model whose linear layer 'score' has one output"
        )
