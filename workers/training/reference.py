"""The reference model for KL terms and self-distillation: a sharded copy of the initial policy."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rltrain.batch.data_proto import DataProto
from rltrain.settings.schema import Config
from workers.cluster.progress import tick
from workers.models.fsdp import frozen, weights_device
from workers.models.packed_forward import Pack, policy_output, row_pass
from workers.models.row_isolation import load_policy
from workers.models.weight_shards import local_shard, move_weights, weight_groups
from workers.training.kept_columns import KeptColumns
from workers.training.rank_state import RankState, Saved
from workers.training.teacher import TeacherWorker


class ReferenceWorker(TeacherWorker):
    """One rank of the reference model, which can also be a teacher.

    The weights of the reference model never change, unless `algorithm.reference.refresh_every` is above 0.

    Args:
        config: the run's whole config.
        path: model directory in Hugging Face format.
    """

    def __init__(self, config: Config, path: str) -> None:
        self.config, self.path, self.where, self.kept = config, path, f"model.path={path}", KeptColumns()
        self._load_start()

    def _load_start(self) -> None:
        """Load the weights with which training starts.

        A moving average of weights is kept in float32, because bfloat16 would round small updates away.
        """
        averages = self.config.algorithm.reference.refresh_coef < 1
        self.model = load_policy(
            self.path,
            self.where,
            arrange=partial(frozen, config=self.config, dtype=torch.float32 if averages else None),
            device=weights_device(self.config.model),
        )
        self.groups = weight_groups(self.model)
        self.state = RankState("reference", self.model, None)
        self.changed = False

    def compute_log_probs(self, batch: DataProto, microbatches: list[list[int]], keep: int | None = None) -> DataProto:
        """Compute the outputs of the reference model that the KL terms need.

        Args:
            batch: the rows that this rank reads.
            microbatches: row indices of each forward pass.
            keep: number under which this rank keeps the hidden states; None to return them.

        Returns:
            A batch whose rows are in the order of `microbatches`. The batch has the column `ref_log_probs` if the KL is
            estimated from samples. If the KL is exact, the batch has the column `ref_hidden` (the last hidden states),
            or the places of the kept hidden states.
        """
        algorithm, temperature = self.config.algorithm, self.config.rollout.temperature

        def columns(_: DataProto, packed: Pack) -> dict[str, Tensor]:
            output = policy_output(self.model, packed, temperature=temperature, hidden=algorithm.needs_full_kl)
            found = {"ref_log_probs": output.log_probs} if algorithm.needs_ref_log_probs else {}
            return found if output.hidden is None else found | {"ref_hidden": output.hidden}

        found = row_pass(self.model, columns, batch, microbatches, share=self.config.actor.share_prefixes)
        return self.kept.keep(found, "ref_hidden", keep)

    def refresh(self, number: int, shards: Sequence[Tensor]) -> None:
        """Set a group of this rank's weights to a * actor + (1 - a) * reference (TR-DPO, arXiv 2404.09656, section 3).

        The coefficient a is `algorithm.reference.refresh_coef`.

        Args:
            number: index of the group of weights in the result of `weight_groups`.
            shards: the actor's shards of the weights in group `number`. Rank i of the reference model gets the shards
                of rank i of the actor.
        """
        tick()
        parameters = dict(self.model.named_parameters())
        own = [local_shard(parameters[name]) for name in self.groups[number]]
        move_weights(own, shards, self.config.algorithm.reference.refresh_coef)
        self.changed = True

    def head_shard(self, to_host: bool) -> Tensor:
        """Return this rank's shard of the output head (V, H), in the dtype in which the reference model computes.

        If `to_host` is True, the shard of the output head is returned in CPU memory.
        """
        shard = local_shard(self.model.get_output_embeddings().weight)
        shard = shard.to(getattr(torch, self.config.model.dtype))
        return shard.cpu() if to_host else shard

    def save_state(self, url: str) -> None:
        """Start writing this rank's part of a checkpoint in the background.

        All training ranks must call this method.
        """
        self.state.save(url)

    def saved_state(self) -> Saved | None:
        """Return the result of the last `save_state` call, or None while the save is running."""
        return self.state.saved()

    def load_state(self, url: str | None) -> None:
        """Load a checkpoint. If `url` is None, restore the weights with which training starts.

        All training ranks must call this method.
        """
        if url is not None:
            self.state.load(url)
            self.changed = True
        elif self.changed:
            self._load_start()
