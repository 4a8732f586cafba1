"""A teacher: a frozen, sharded language model that scores the tokens of the policy's answers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rltrain.base.errors import ConfigError
from rltrain.batch.data_proto import DataProto
from rltrain.settings.schema import Config
from workers.models.fsdp import frozen, full, weights_device
from workers.models.fused_head import logit_cap, logit_scale
from workers.models.packed_forward import Pack, policy_output, row_pass
from workers.models.row_isolation import load_policy
from workers.training.kept_columns import KeptColumns, Request


class TeacherWorker:
    """One rank of a frozen teacher model.

    Args:
        config: the run's whole config.
        path: model directory in Hugging Face format.
        where: text with which error messages begin, `teacher PATH` by default.
    """

    def __init__(self, config: Config, path: str, where: str = "") -> None:
        self.config, self.where, self.kept = config, where or f"teacher {path}", KeptColumns()
        self.model = load_policy(
            path, self.where, arrange=partial(frozen, config=config), device=weights_device(config.model)
        )

    def score_responses(self, batch: DataProto, microbatches: list[list[int]], keep: int | None = None) -> DataProto:
        """Score the responses of a batch with the teacher, and return rows in the order of `microbatches`.

        The column `prompts` contains the teacher's own context, which may differ from the policy's prompt.

        Args:
            batch: the rows that this rank reads.
            microbatches: row indices of each forward pass.
            keep: number under which this rank keeps the hidden states; None to return them.

        Returns:
            A batch with the column `teacher_log_probs`, the log-probs of the response tokens, normalized over the
            teacher's whole vocabulary. If the exact KL to the teacher is added to the loss, the batch has a second
            column: `teacher_hidden`, with the teacher's last hidden states, or the places of the kept hidden states.
        """
        temperature, exact = self.config.rollout.temperature, self.config.algorithm.distillation.full

        def columns(_: DataProto, packed: Pack) -> dict[str, Tensor]:
            output = policy_output(self.model, packed, temperature=temperature, hidden=exact)
            found = {"teacher_log_probs": output.log_probs}
            return found if output.hidden is None else found | {"teacher_hidden": output.hidden}

        found = row_pass(self.model, columns, batch, microbatches, share=self.config.actor.share_prefixes)
        return self.kept.keep(found, "teacher_hidden", keep)

    def kept_rows(self, request: Request) -> DataProto:
        """Return rows of kept hidden states, to a role in the same process."""
        return self.kept.rows(request)

    def put_kept_rows(self, requests: Sequence[Request]) -> list[Any]:
        """Put rows of kept hidden states into Ray's object store, and return one reference for each request."""
        import ray

        return [ray.put(self.kept.rows(request)) for request in requests]

    def drop_kept(self) -> None:
        """Free the memory of all kept hidden states."""
        self.kept.drop()

    def output_head(self) -> Tensor | None:
        """Return the weight (V, H) of the last layer, times the factor by which the model multiplies its logits.

        All ranks must call `output_head`, because the weight is sharded and is gathered from all ranks. Only rank 0
        returns the weight of the last layer; all other ranks return None.

        Raises:
            ConfigError: the last layer has a bias or a soft cap, which the exact KL to a teacher does not support.
        """
        head = self.model.get_output_embeddings()
        if head.bias is not None or logit_cap(self.model) is not None:
            what = "last layer has a bias" if head.bias is not None else "logits have a soft cap"
            raise ConfigError(
                f"{self.where}: the exact KL does not support this model, because its {what}; use "
                "algorithm.distillation.kl=sampled"
            )
        weight, scale = full(head.weight.detach()), logit_scale(self.model)
        if torch.distributed.get_rank() != 0:
            return None
        return (weight if scale == 1 else weight * scale).cpu()
