"""The actor: a sharded causal language model, its log-probs and its policy update."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from rltrain.algorithms import POLICY_LOSSES, aggregate_loss, columns_of, kl_estimate
from rltrain.errors import LogProbError
from rltrain.protocol import DataProto
from rltrain.schema import AlgorithmConfig, Config
from workers.dispatch import Minibatch, UpdateResult
from workers.forward import load_model, log_prob_pass, microbatch, response_log_probs, unpack
from workers.fsdp import Optimizer, named_tensors, shard, tied_names
from workers.weight_sync import Bucket, buckets_of

# Largest mean |log-prob - old log-prob| on the first mini-batch, where they are the same policy's (invariant D1).
SAME_POLICY_NATS = {"float32": 1e-3, "bfloat16": 5e-2}


class ActorWorker:
    """One rank of the actor.

    Args:
        config: the whole config.
        path: model directory in Hugging Face form.
    """

    def __init__(self, config: Config, path: str) -> None:
        self.config, self.path = config, Path(path)
        self.model = shard(load_model(AutoModelForCausalLM, path), dtype=config.model.dtype)
        self.model.eval()  # no dropout: the policy that is trained is the one that samples
        self.optimizer = Optimizer(list(self.model.parameters()), config.actor, config.optimizer_steps)

    def compute_log_probs(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """`old_log_probs` of these rows, in the order of the micro-batches."""
        return log_prob_pass(self.model, batch, microbatches, "old_log_probs", self.config.rollout.temperature)

    def update(self, batch: DataProto, minibatches: list[Minibatch]) -> UpdateResult:
        """One optimizer step a mini-batch. Raises LogProbError where the first mini-batch breaks invariant D1."""
        result = UpdateResult()
        for number, minibatch in enumerate(minibatches):
            for rows in minibatch.microbatches:
                columns = self._backward(batch, rows, minibatch, result)
                if number == 0:
                    _compare(columns, result)
            if number == 0:
                self._check_same_policy(result)
            result.tokens += minibatch.num_tokens
            result.steps.append(self.optimizer.step(trained=minibatch.num_tokens > 0))
        return result

    def _backward(
        self, batch: DataProto, rows: list[int], minibatch: Minibatch, result: UpdateResult
    ) -> dict[str, Tensor]:
        packed, columns = microbatch(batch, rows)
        mask = columns["mask"]
        entropy_on = self.config.algorithm.entropy_coef > 0
        log_probs, entropy = response_log_probs(
            self.model, packed, temperature=self.config.rollout.temperature, entropy=entropy_on
        )
        columns["log_probs"] = unpack(log_probs, mask)
        if entropy is not None:
            columns["entropy"] = unpack(entropy, mask)
        loss, parts, sums = actor_loss(
            columns, self.config.algorithm, num_tokens=minibatch.num_tokens, num_sequences=minibatch.num_sequences,
            max_response_length=self.config.rollout.max_response_length,
        )  # fmt: skip
        (loss * torch.distributed.get_world_size()).backward()  # FSDP averages over ranks; the loss is a part of a sum
        _add(result.losses, parts)
        _add(result.sums, sums)
        return columns

    def _check_same_policy(self, result: UpdateResult) -> None:
        if self.config.algorithm.old_log_probs != "actor" or not result.first_tokens:
            return
        gap, limit = result.first["same_policy_gap"] / result.first_tokens, SAME_POLICY_NATS[self.config.model.dtype]
        if not gap <= limit:
            raise LogProbError(
                f"before the first optimizer step the actor's log-probs moved by {gap:.2g} nats a token on average, "
                f"above {limit:g}: the same weights must give the same log-probs, so forward passes differ; report this"
            )

    def export(self, version: int, check: bool) -> list[Bucket] | None:
        """The weights as buckets for the engines, on rank 0; None on the others. A collective."""
        return buckets_of(
            named_tensors(self.model), aliases=tied_names(self.model), version=version, dtype=self.config.model.dtype,
            check=check,
        )  # fmt: skip

    def save(self, path: str) -> None:
        """Write the model in Hugging Face form (rank 0). A collective."""
        state = dict(named_tensors(self.model))
        if torch.distributed.get_rank() == 0:
            Path(path).mkdir(parents=True, exist_ok=True)
            self.model.config.dtype = "float32"
            # The model's own generation defaults are kept as they are; transformers refuses to write some of them.
            self.model.generation_config = GenerationConfig.from_model_config(self.model.config)
            self.model.save_pretrained(path, state_dict={name: tensor.cpu() for name, tensor in state.items()})
            if (self.path / "generation_config.json").is_file():
                shutil.copy(self.path / "generation_config.json", path)


def actor_loss(
    columns: Mapping[str, Tensor], algorithm: AlgorithmConfig, **counts: int
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Policy loss plus KL and minus entropy terms of one micro-batch.

    Args:
        columns: padded columns (B, T) by name; `response_mask`, `log_probs`, `advantages` and what the loss asks for.
        algorithm: which loss, aggregation and coefficients.
        counts: `num_tokens`, `num_sequences`, `max_response_length` of the whole mini-batch.

    Returns:
        (loss to differentiate, its parts, sums over trained tokens), parts and sums detached.
    """
    mask = columns["response_mask"]

    def aggregate(token_losses: Tensor) -> Tensor:
        return aggregate_loss(token_losses, mask, algorithm.loss_agg_mode, **counts)

    policy = POLICY_LOSSES.get(algorithm.loss_mode)
    token_losses, sums = policy(*(columns[name] for name in columns_of(policy)), **algorithm.loss)
    loss = aggregate(token_losses)
    parts = {"policy_loss": loss.detach()}
    if algorithm.kl_loss.kl_loss_coef > 0:
        kl = kl_estimate(columns["log_probs"], columns["ref_log_probs"], algorithm.kl_loss.kl_estimator)
        parts["kl_loss"] = aggregate(kl).detach()
        sums["ref_kl"] = torch.where(mask, kl.detach(), 0).sum()
        loss = loss + algorithm.kl_loss.kl_loss_coef * aggregate(kl)
    if algorithm.entropy_coef > 0:
        sums["entropy"] = torch.where(mask, columns["entropy"].detach(), 0).sum()
        loss = loss - algorithm.entropy_coef * aggregate(columns["entropy"])
    return loss, parts, sums


def _compare(columns: Mapping[str, Tensor], result: UpdateResult) -> None:
    """How far the actor's log-probs are, before its first step, from the old ones (D1) and the engine's (E1)."""
    mask = columns["response_mask"]
    for name, other in (("same_policy_gap", "old_log_probs"), ("engine_gap", "rollout_log_probs")):
        change = (columns["log_probs"].detach() - columns[other]).abs()
        _add(result.first, {name: torch.where(mask, change, 0).sum()})
    result.first_tokens += int(mask.sum())


def _add(totals: dict[str, float], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + float(value)
