"""The critic: a model with the policy's architecture that outputs one estimated value per token."""

import functools

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rltrain.algorithms import aggregate_loss, value_loss
from rltrain.base import trace
from rltrain.batch.data_proto import DataProto
from rltrain.data.value_models import value_model
from rltrain.settings.schema import Config
from workers.models.fsdp import Optimizer, averaged_ranks, shard, weights_device
from workers.models.loading import load_model, load_sample_layers
from workers.models.packed_forward import Pack, microbatch, response_values, row_pass, unpack
from workers.models.row_isolation import check_rows_apart
from workers.training.dispatch import Minibatch, UpdateResult
from workers.training.rank_state import RankState, Saved


class CriticWorker:
    """One rank of the critic, which starts with the policy's weights and a value head of zeros.

    Args:
        config: the run's whole config.
        path: model directory in Hugging Face format.
    """

    def __init__(self, config: Config, path: str) -> None:
        self.config, self.path = config, path
        self._load_start()

    def _load_start(self) -> None:
        """Set up the initial state: weights from the model directory, a value head of zeros, and a new optimizer."""
        config, path = self.config, self.path
        kind = value_model(path)
        sample = load_sample_layers(kind, path, new_head=True)
        check_rows_apart(sample, _head(sample)[1], functools.partial(response_values, sample), f"model.path={path}")
        del sample  # frees the memory of `sample` before the weights of the whole model are read
        # The model is in evaluation mode, because dropout would make the critic's values random.
        self.model = load_model(
            kind,
            path,
            new_head=True,
            arrange=self._arrange,
            # The value head, the only parameter that is not read from the weight files, starts with zeros.
            first_value=lambda _, shape: torch.zeros(shape),
            device=weights_device(config.model),
        )
        self.optimizer = Optimizer(
            list(self.model.parameters()),
            config.critic,
            config.optimizer_steps,
            max_skipped=config.trainer.max_skipped_updates,
        )
        self.state = RankState("critic", self.model, self.optimizer)

    def _arrange(self, model: PreTrainedModel) -> None:
        """Replace the last layer of the model by a value head without a bias, and shard the model.

        The weights of the model must not have been loaded yet.
        """
        name, head = _head(model)
        setattr(model, name, nn.Linear(head.in_features, 1, bias=False, device="meta"))
        shard(model, self.config)

    def compute_values(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Return a batch whose column `values` contains the critic's estimate for each response token.

        The rows of the batch with the column `values` are in the order of `microbatches`.
        """

        def columns(_: DataProto, packed: Pack) -> dict[str, Tensor]:
            return {"values": response_values(self.model, packed)}

        return row_pass(self.model, columns, batch, microbatches, share=self.config.actor.share_prefixes)

    def update(self, batch: DataProto, minibatches: list[Minibatch]) -> UpdateResult:
        """Take one optimizer step for each mini-batch.

        The column `returns` contains the values that the critic is trained to predict. Predicted values are clipped to
        a range around the critic's estimates from before the update, which are in the column `values`.
        """
        result = UpdateResult(losses={"value_loss": 0.0})
        for minibatch in minibatches:
            part = UpdateResult(losses={"value_loss": 0.0})
            for rows in minibatch.microbatches:
                with trace.span("micro-batch", trace.CALLS, rows=len(rows)):
                    self._backward(batch, rows, minibatch, part)
            with trace.span("optimizer step", trace.CALLS):
                step = self.optimizer.step(trained=minibatch.num_tokens > 0, finite=part.finite)
            result.add(part, minibatch.num_tokens, step)
        self.optimizer.offload()
        if self.config.takes_turns:
            # The cache of PyTorch's allocator is emptied, because the rollout engine on the same GPU needs the cached
            # memory. The critic empties the allocator's cache itself, because the actor has no update that would empty
            # the cache during the critic's warm-up.
            torch.cuda.empty_cache()
        return result

    def _backward(self, batch: DataProto, rows: list[int], minibatch: Minibatch, result: UpdateResult) -> None:
        _, packed, columns = microbatch(batch, rows, share=self.config.actor.share_prefixes)
        mask = columns["response_mask"]
        values = unpack(response_values(self.model, packed), columns["mask"])
        token_losses, sums = value_loss(
            values, columns["values"], columns["returns"], mask, clip_range_value=self.config.critic.clip_range_value
        )
        loss = aggregate_loss(token_losses, mask, "token-mean", num_tokens=minibatch.num_tokens)
        # The loss is multiplied by the number of ranks over which FSDP averages the gradients, because the gradient of
        # the whole mini-batch is the sum of these ranks' gradients.
        (loss * averaged_ranks(self.config)).backward()
        result.losses["value_loss"] += float(loss.detach())
        for name, value in sums.items():
            result.sums[name] = result.sums.get(name, 0.0) + float(value)

    def save_state(self, url: str) -> None:
        """Start writing this rank's part of a checkpoint in the background.

        All training ranks must call this method.
        """
        self.state.save(url)

    def saved_state(self) -> Saved | None:
        """Return the result of the last `save_state` call, or None while the save is running."""
        return self.state.saved()

    def load_state(self, url: str | None) -> None:
        """Load a checkpoint, or restore the initial state if `url` is None.

        All training ranks must call this method.
        """
        if url is not None:
            self.state.load(url)
        elif self.optimizer.steps:
            self._load_start()


def _head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Return the name and the module of a token classifier's last layer, which has one output per token."""
    return next((n, m) for n, m in model.named_children() if isinstance(m, nn.Linear) and m.out_features == 1)
