"""Code of the actor, the causal language model that is trained: computation of log-probs and update of the weights."""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rltrain.algorithms import (
    POLICY_LOSSES,
    CorrectionStatistics,
    aggregate_loss,
    columns_of,
    kl_estimate,
    own_knobs,
    positive_nll,
    rollout_correction,
    rollout_diagnostics,
    rollout_rejection,
    sampled_teacher_kl,
    supervised_loss,
)
from rltrain.algorithms.ratio import safe_log_ratio
from rltrain.base import trace
from rltrain.base.errors import ConfigError, LogProbError
from rltrain.batch.contexts import experts_by_row
from rltrain.batch.data_proto import DataProto
from rltrain.settings.algorithm_config import AlgorithmConfig, KLLossConfig
from rltrain.settings.schema import Config
from workers.cluster.progress import tick
from workers.models.fsdp import Optimizer, averaged_ranks, device, full, shard, weights_device
from workers.models.fused_head import logit_cap, logit_scale
from workers.models.load_balance import RouterScores, mean_balance_loss
from workers.models.lora import adapt, first_adapter_values
from workers.models.packed_forward import Pack, TeacherStates, microbatch, policy_output, row_pass, unpack
from workers.models.router_replay import ExpertRecorder, replay_routers
from workers.models.row_isolation import load_policy
from workers.models.sequence_parallel import of_all_tokens, sequence_group_of
from workers.models.weight_shards import local_shard, weight_groups, whole_of
from workers.sync.buckets import Bucket
from workers.sync.process_group import GroupPlan
from workers.sync.sender import AdapterSender, Offer, Sender
from workers.training.dispatch import Minibatch, UpdateResult
from workers.training.minibatch_statistics import in_epoch
from workers.training.rank_state import RankState, Saved

# Largest accepted mean of |log-prob - old log-prob|, in nats, over the tokens of the first mini-batch. In the first
# mini-batch, log-probs and old log-probs are computed with the same weights, so any difference comes from rounding.
SAME_POLICY_NATS = {"float32": 1e-3, "bfloat16": 5e-2}


class ActorWorker:
    """One training rank's part of the actor, which is the language model that is trained.

    Args:
        config: the run's whole config.
        path: model directory in Hugging Face format.
    """

    def __init__(self, config: Config, path: str) -> None:
        self.config, self.path = config, Path(path)
        self._load_start()
        algorithm = config.algorithm
        # For an exact KL, the actor needs the output head of the reference model, because the reference model sends
        # only hidden states. The actor starts with the weights of the reference model, so `ref_head` is initialized
        # with a copy of the actor's own output head. `ref_head` is rounded to the dtype in which the reference model
        # computes, so that the KL divergence of a policy from itself is 0. If the reference model is updated,
        # `set_reference_head` replaces the actor's copy of the reference model's output head.
        self.ref_head: Tensor | None = None
        self.teacher_heads: dict[str, Tensor] = {}  # maps the name of each teacher model to its output head
        head = self.model.get_output_embeddings()
        if head.bias is not None and (algorithm.needs_full_kl or algorithm.distillation.full):
            raise ConfigError(
                f"model.path={path}: the exact KL (full=true) does not support this model, because its last layer "
                "has a bias; use a KL estimator (full=false)"
            )
        if algorithm.needs_reference_head:
            self.ref_head = full(head.weight.detach()).to(device(), getattr(torch, config.model.dtype), copy=True)

    def _load_start(self) -> None:
        """Set up the state in which training starts: weights from the model directory, and a new optimizer."""
        config = self.config
        # The model is in evaluation mode, because dropout would make the trained policy differ from the policy that
        # generated the samples.
        self.model = load_policy(
            str(self.path),
            arrange=self._arrange,
            first_value=first_adapter_values(config.trainer.seed),
            device=weights_device(config.model),
        )
        self.optimizer = Optimizer(
            [p for p in self.model.parameters() if p.requires_grad],
            config.actor,
            config.actor_optimizer_steps,
            max_skipped=config.trainer.max_skipped_updates,
        )
        self.state = RankState("actor", self.model, self.optimizer, base=self.path)

    def _arrange(self, model: PreTrainedModel) -> None:
        """Change the model as the config requests, and shard it, before the model's weights are loaded.

        The model gets adapters, and routers that can replay recorded experts.
        """
        if self.config.model.lora:
            adapt(model, self.config.model.lora)
        replay, where = self.config.actor.router_replay, f"model.path={self.path}"
        if replay is not None:
            replay_routers(model, where)
        self.recorder = ExpertRecorder(model, where) if replay == "actor" else None
        self.router_scores = RouterScores(model, where) if self.config.actor.load_balance_coef else None
        shard(model, self.config)

    def compute_log_probs(self, batch: DataProto, microbatches: list[list[int]]) -> DataProto:
        """Compute the old log-probs, and other columns that the settings require, before the update changes the
        weights.

        `compute_log_probs` returns the rows in the order in which `microbatches` lists them.

        Returns:
            A batch with the columns `old_log_probs` and `entropies`. The batch also has the column `full_kl` if the
            exact KL to the reference model is subtracted from the reward. Entropies are always computed, because the
            report of the run shows them and they cost little besides the log-probs. If `actor.router_replay` is
            "actor", the batch also has the columns `prompt_experts` and `response_experts`.
        """
        in_reward, temperature = self.config.algorithm.kl_in_reward.full, self.config.rollout.temperature

        def columns(part: DataProto, packed: Pack) -> dict[str, Tensor]:
            output = policy_output(
                self.model,
                packed,
                temperature=temperature,
                entropies=True,
                reference=self._reference(part) if in_reward else None,
            )
            found = {"old_log_probs": output.log_probs, "entropies": output.entropies, "full_kl": output.full_kl}
            if self.recorder is not None:
                chosen = of_all_tokens(self.recorder.take(), packed, sequence_group_of(self.model))
                rows = experts_by_row(part, chosen.cpu()[packed.places])
                found["prompt_experts"], found["response_experts"] = rows
            return {name: values for name, values in found.items() if values is not None}

        return row_pass(self.model, columns, batch, microbatches, share=self.config.actor.share_prefixes)

    def _reference(self, part: DataProto) -> tuple[Tensor, Tensor]:
        """Return the hidden states (R, H) at the response tokens and the output head (V, H) of the reference model."""
        return part.values("ref_hidden").to(device()), self._reference_head()

    def _reference_head(self) -> Tensor:
        assert self.ref_head is not None, "the exact KL requires a copy of the reference model's output head"
        return self.ref_head

    def set_teacher_head(self, name: str, head: Tensor) -> None:
        """Keep a copy of a teacher's output head (V', H'), which `TeacherWorker.output_head` returned.

        The exact KL to a teacher needs the teacher's output head, because the teacher sends only hidden states. If the
        teacher's vocabulary is larger than the policy's, the teacher's distribution is restricted to the policy's
        vocabulary. A teacher that is the reference model has no copy of its own: its head is `ref_head`.

        Args:
            name: name of the teacher in the config.
            head: the teacher's output head, times the teacher's `logit_scale`.

        Raises:
            ConfigError: the policy's logits have a soft cap.
        """
        if logit_cap(self.model) is not None:
            raise ConfigError(
                f"model.path={self.path}: the exact KL to a teacher does not support this model, because its logits "
                "have a soft cap; use algorithm.distillation.kl=sampled"
            )
        words = self.model.get_output_embeddings().weight.size(0)
        assert len(head) >= words, "a teacher's vocabulary must not be smaller than the policy's"
        # The teacher's output head is divided by the policy's `logit_scale`, because `policy_output` multiplies the
        # teacher's logits by the policy's `logit_scale`.
        scaled = head[:words] / logit_scale(self.model)
        self.teacher_heads[name] = scaled.to(device(), getattr(torch, self.config.model.dtype))

    def _teachers(self, part: DataProto) -> TeacherStates:
        """Return the teachers' last hidden states at the response tokens of `part`, and the teachers' output heads."""
        numbers = part.batch["teacher"].repeat_interleave(part.lengths("responses"))
        heads = [
            self.teacher_heads[teacher.name] if teacher.is_model else self._reference_head()
            for teacher in self.config.algorithm.distillation.teachers
        ]
        return TeacherStates(numbers, part.values("teacher_hidden").to(device()), heads)

    def update(
        self,
        batch: DataProto,
        minibatches: list[Minibatch],
        entropy_coef: float,
        statistics: list[CorrectionStatistics | None],
    ) -> UpdateResult:
        """Take one optimizer step for each mini-batch.

        Args:
            batch: the rows of sampled answers that this rank reads.
            minibatches: this rank's parts of the mini-batches, in training order.
            entropy_coef: coefficient of the entropy bonus in this training step.
            statistics: for each mini-batch, the statistics of the importance weights of all its rows, or None if the
                settings need no statistics.

        Raises:
            LogProbError: before the first optimizer step, the actor's log-probs differ from `old_log_probs` by more
                than rounding explains.
        """
        result = UpdateResult()
        for number, (minibatch, found) in enumerate(zip(minibatches, statistics, strict=True)):
            part = self._policy_gradient(batch, number, minibatch, entropy_coef, found)
            self._step(result, part, minibatch.num_tokens, trained=minibatch.num_tokens > 0)
        self._end_update()
        return result

    def update_with_supervised(
        self,
        batch: DataProto,
        minibatches: list[Minibatch],
        supervised: DataProto,
        supervised_minibatches: list[Minibatch],
        entropy_coef: float,
        statistics: list[CorrectionStatistics | None],
    ) -> UpdateResult:
        """Take one optimizer step for each mini-batch, on the sum of the actor's loss and the supervised loss.

        Args:
            batch: the rows of sampled answers that this rank reads.
            minibatches: this rank's parts of the mini-batches of sampled answers, in training order.
            supervised: the supervised answers that this rank reads.
            supervised_minibatches: this rank's part of the supervised answers of each mini-batch. A mini-batch can be
                without supervised answers.
            entropy_coef: coefficient of the entropy bonus in this training step.
            statistics: for each mini-batch of sampled answers, the statistics of the importance weights of all its
                rows, or None if the settings need no statistics.

        Raises:
            LogProbError: before the first optimizer step, the actor's log-probs differ from `old_log_probs` by more
                than rounding explains.
        """
        result = UpdateResult()
        parts = zip(minibatches, supervised_minibatches, statistics, strict=True)
        for number, (minibatch, answers, found) in enumerate(parts):
            part = self._policy_gradient(batch, number, minibatch, entropy_coef, found)
            self._supervised_gradient(supervised, answers, part)
            trained = minibatch.num_tokens + answers.num_tokens > 0
            self._step(result, part, minibatch.num_tokens, trained=trained)
        self._end_update()
        return result

    def _policy_gradient(
        self,
        batch: DataProto,
        number: int,
        minibatch: Minibatch,
        entropy_coef: float,
        statistics: CorrectionStatistics | None,
    ) -> UpdateResult:
        """Accumulate the gradient of a mini-batch of sampled answers, and return the results of the mini-batch.

        In the first mini-batch of an update (when `number`, the index of the mini-batch, is 0), `_policy_gradient`
        compares the tokens' log-probs with the engine's log-probs and, if all rows of the batch have old log-probs,
        with the old log-probs.
        """
        first, part = number == 0, UpdateResult()
        partial = "has_old_log_probs" in batch
        if partial and not first:
            known = batch.select(["has_old_log_probs"]).batch["has_old_log_probs"]
            assert all(bool(known[rows].all()) for rows in minibatch.microbatches), (
                "only the first mini-batch may train on rows without old log-probs"
            )
        chosen = in_epoch(batch, number // self.config.minibatches_per_epoch)
        for rows in minibatch.microbatches:
            with trace.span("micro-batch", trace.CALLS, rows=len(rows)):
                columns = self._backward(chosen, rows, minibatch, part, entropy_coef, statistics)
                if first:
                    _compare(columns, part, with_old="old_log_probs" in batch and not partial)
        if first and part.finite:
            self._check_same_policy(part)
        return part

    def _supervised_gradient(self, supervised: DataProto, minibatch: Minibatch, result: UpdateResult) -> None:
        """Accumulate the gradient of a mini-batch's supervised loss, multiplied by `algorithm.sft_coef`.

        The supervised loss is the mean cross-entropy of the mini-batch's supervised answers. If the whole mini-batch
        has no supervised answers, no rank runs a forward pass. Every rank knows the number of supervised tokens of the
        whole mini-batch, so all ranks make the same decision whether to run a forward pass.
        """
        result.supervised_tokens = minibatch.num_tokens
        for rows in minibatch.microbatches if minibatch.num_tokens else ():
            with trace.span("supervised micro-batch", trace.CALLS, rows=len(rows)):
                _, packed, columns = microbatch(supervised, rows, share=self.config.actor.share_prefixes)
                output = policy_output(self.model, packed, temperature=self.config.rollout.temperature)
                mask = columns["response_mask"]
                losses = supervised_loss(unpack(output.log_probs, columns["mask"]), mask)
                mean = aggregate_loss(losses, mask, "token-mean", num_tokens=minibatch.num_tokens)
                (self.config.algorithm.sft_coef * mean * averaged_ranks(self.config)).backward()
                result.supervised_loss += float(losses.detach().sum())

    def _step(self, result: UpdateResult, part: UpdateResult, tokens: int, *, trained: bool) -> None:
        """Take an optimizer step with the gradient of a mini-batch, and add the mini-batch's results to `result`."""
        with trace.span("optimizer step", trace.CALLS):
            step = self.optimizer.step(trained=trained, finite=part.finite)
        result.add(part, tokens, step)

    def _end_update(self) -> None:
        self.optimizer.offload()
        if self.config.takes_turns:
            # The cache of PyTorch's allocator is emptied, because the rollout engine on the same GPU needs the memory.
            torch.cuda.empty_cache()

    def _backward(
        self,
        batch: DataProto,
        rows: list[int],
        minibatch: Minibatch,
        result: UpdateResult,
        entropy_coef: float,
        statistics: CorrectionStatistics | None,
    ) -> dict[str, Tensor]:
        part, packed, columns = microbatch(batch, rows, share=self.config.actor.share_prefixes)
        algorithm, mask = self.config.algorithm, columns["mask"]
        keeping: AbstractContextManager[list[tuple[Tensor, Tensor]]] = nullcontext([])
        if self.router_scores is not None:
            keeping = self.router_scores.kept()
        with keeping as kept:
            output = policy_output(
                self.model,
                packed,
                temperature=self.config.rollout.temperature,
                entropies=entropy_coef > 0 or algorithm.entropy_target is not None,
                reference=self._reference(part) if algorithm.kl_loss.full else None,
                teachers=self._teachers(part) if algorithm.distillation.full else None,
            )
        columns["log_probs"] = unpack(output.log_probs, mask)
        # Before the first optimizer step, the current log-probs are the old log-probs. The batch may therefore lack the
        # old log-probs of the first mini-batch.
        now = columns["log_probs"].detach()
        columns.setdefault("old_log_probs", now)
        if "has_old_log_probs" in part:
            known = part.select(["has_old_log_probs"]).batch["has_old_log_probs"].to(device())[:, None]
            columns["old_log_probs"] = torch.where(known, columns["old_log_probs"], now)
        if output.entropies is not None:
            columns["entropy"] = unpack(output.entropies, mask)
        if output.full_kl is not None:
            columns["full_kl"] = unpack(output.full_kl, mask)
        if algorithm.distillation.in_loss:
            columns["taught"] = mask & (part.batch["teacher"] >= 0).to(device())[:, None]
        if output.teacher_kl is not None:
            columns["teacher_kl"] = unpack(output.teacher_kl, mask)
        loss, parts, sums = actor_loss(
            columns,
            algorithm,
            entropy_coef=entropy_coef,
            statistics=statistics,
            num_positive_tokens=minibatch.num_positive_tokens,
            num_tokens=minibatch.num_tokens,
            num_sequences=minibatch.num_sequences,
            max_response_length=self.config.rollout.max_response_length,
        )
        if kept:
            trained = columns["response_mask"].any(1)
            balance = mean_balance_loss(kept, packed, trained, num_sequences=minibatch.num_sequences)
            loss = loss + self.config.actor.load_balance_coef * balance
            parts["load_balance_loss"] = balance.detach()
        # FSDP averages the gradients over ranks, but the gradient of the whole mini-batch is the sum over these ranks.
        # Multiplying the loss by their number turns the average of the gradients into the sum.
        (loss * averaged_ranks(self.config)).backward()
        _add(result.losses, parts)
        _add(result.sums, sums)
        return columns

    def _check_same_policy(self, result: UpdateResult) -> None:
        compared = "same_policy" in result.first and result.first_tokens > 0
        if self.config.algorithm.old_log_probs != "actor" or not compared:
            return
        gap, limit = result.first["same_policy"] / result.first_tokens, SAME_POLICY_NATS[self.config.model.dtype]
        if not gap <= limit:
            raise LogProbError(
                "before the first optimizer step, the actor's log-probs differ from the old log-probs by "
                f"{gap:.2g} nats per token on average; the limit is {limit:g}: with the same weights, two forward "
                "passes must give the same log-probs; please report this"
            )

    def shard_groups(self) -> int:
        """Return the number of weight groups. A call of `shards` returns this rank's shards of one weight group."""
        return len(weight_groups(self.model))

    def shards(self, number: int, to_host: bool, *_taken: None) -> list[Tensor]:
        """Return this rank's float32 shards of a group of weights.

        Args:
            number: index of the group of weights in the result of `weight_groups`.
            to_host: whether the shards are returned in CPU memory. If `to_host` is False, the shards are not copied.
            _taken: results (None) of earlier calls of `ReferenceWorker.refresh`. Ray waits for the results in `_taken`
                before it runs `shards`, so that Ray's object store holds few groups of shards at a time.
        """
        tick()
        parameters = dict(self.model.named_parameters())
        found = [local_shard(parameters[name]) for name in weight_groups(self.model)[number]]
        return [shard.cpu() for shard in found] if to_host else found

    def set_reference_head(self, shard: Tensor) -> None:
        """Gather the reference model's output head (V, H) for the exact KL. All training ranks must call this method.

        Args:
            shard: this rank's shard of the reference model's output head. The reference rank with the same rank number
                holds the same shard.
        """
        self.ref_head = whole_of(shard.to(device(), copy=True), self.model.get_output_embeddings().weight)

    def start_export(self, path: str | None, version: int, check: bool) -> Offer:
        """Prepare to send the weights to the engines, and return a description of what this rank will send.

        Args:
            path: path of the shared file for the weights, or None to send the weights without a file.
            version: version of the weights.
            check: whether to send the checksums and probes of `workers.sync.checks`, with which the engines verify the
                weights.
        """
        self.sender = self._new_sender(version, check=check)
        return self.sender.offer(path)

    def _new_sender(self, version: int, *, check: bool) -> Sender:
        config = self.config
        if not config.model.lora:
            return Sender(self.model, version=version, dtype=config.model.dtype, check=check)
        merged = not config.rollout.description.separate_adapters(config.rollout)
        return AdapterSender(self.model, version=version, dtype=config.model.dtype, check=check, merged=merged)

    def export(self, number: int, path: str | None, *_loaded: None) -> Bucket:
        """Write this rank's part of a bucket of weights, and return the bucket.

        If `path` is given, the bucket is written to the file at `path`, which ranks and engines share, and may
        overwrite an earlier bucket there. `_loaded` has one argument for each engine call that loads this earlier
        bucket: the result of the call, which is always None. Ray runs `export` only after these calls have ended, so no
        bucket is overwritten while an engine loads it.
        """
        return self.sender.write(number, path)

    def serve_store(self) -> tuple[str, int]:
        """Start the store (TCPStore) through which ranks and engines find each other, and return its host and port."""
        return self.sender.serve_store()

    def send_all(self, plan: GroupPlan, member: int) -> None:
        """Send this rank's parts of all buckets through a process group, in which the rank has the number `member`."""
        self.sender.send(plan, member)

    def end_export(self) -> None:
        """Free the memory that was used to send the weights, after the weight sync has succeeded or failed."""
        self.sender.close()
        # `self.sender` holds references to the model's parameters. If `self.sender` were not deleted, it would keep the
        # parameters in memory even after the model is replaced.
        del self.sender

    def save_state(self, url: str) -> None:
        """Start writing this rank's part of a checkpoint and of the exported model, in the background.

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


def actor_loss(
    columns: Mapping[str, Tensor],
    algorithm: AlgorithmConfig,
    *,
    entropy_coef: float,
    statistics: CorrectionStatistics | None = None,
    num_positive_tokens: int | None = None,
    **counts: int,
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Compute the loss of one micro-batch.

    The loss is the sum of the policy loss, the KL terms, the squared-log-ratio term and the language-model loss of
    correct answers, minus the entropy bonus.

    Args:
        columns: maps names to padded columns (B, T). `actor_loss` needs `response_mask`, `log_probs`, `advantages` and
            all other columns that the configured loss terms read.
        algorithm: settings of the loss, the aggregation and the coefficients.
        entropy_coef: coefficient of the entropy bonus in this training step.
        statistics: statistics of the importance weights of the whole mini-batch, or None if the settings need no
            statistics.
        num_positive_tokens: number of trained tokens in correct answers of the whole mini-batch. If
            `num_positive_tokens` is None, `actor_loss` counts the trained tokens in correct answers of this micro-batch
            instead.
        counts: keyword arguments for `aggregate_loss`: `num_tokens` and `num_sequences` of the whole mini-batch, and
            `max_response_length`.

    Returns:
        A tuple (loss, terms, sums). `loss` is the scalar to differentiate. `terms` maps the names of the loss terms to
        their detached values. `sums` maps the names of metrics to detached sums over the trained tokens.
    """
    mask = columns["response_mask"]

    def aggregate(token_losses: Tensor) -> Tensor:
        return aggregate_loss(token_losses, mask, algorithm.loss_agg_mode, **counts)

    token_losses, counted, sums = policy_term(columns, algorithm, statistics)
    if algorithm.correction.normalize == "kept":
        assert statistics is not None, "correction.normalize=kept needs the statistics of the whole mini-batch"
        of_kept = {"num_tokens": statistics.num_tokens, "num_sequences": statistics.num_sequences}
        loss = aggregate_loss(token_losses, counted, algorithm.loss_agg_mode, **counts | of_kept)
    else:
        loss = aggregate(token_losses)
    parts = {"policy_loss": loss.detach()}
    if algorithm.kl_loss.kl_loss_coef > 0:
        kl = reference_kl(columns, algorithm.kl_loss)
        term = aggregate(kl)
        parts["kl_loss"] = term.detach()
        sums["ref_kl"] = torch.where(mask, kl.detach(), 0).sum()
        loss = loss + algorithm.kl_loss.kl_loss_coef * term
    if algorithm.distillation.in_loss:
        kl, taught = teacher_kl(columns), mask & columns["taught"]
        term = aggregate(kl)
        parts["distillation_loss"] = term.detach()
        sums |= {"teacher_kl": torch.where(taught, kl.detach(), 0).sum(), "taught_fraction": taught.sum()}
        loss = loss + algorithm.distillation.coef * term
    if algorithm.squared_log_ratio_coef > 0:
        squares = safe_log_ratio(columns["log_probs"], columns["rollout_log_probs"], mask).square()
        term = aggregate(squares)
        parts["squared_log_ratio"] = term.detach()
        loss = loss + algorithm.squared_log_ratio_coef * term
    if algorithm.positive_nll_coef > 0:
        positive = columns["positive_mask"] & mask
        term = positive_nll(columns["log_probs"], mask, positive, num_positive_tokens=num_positive_tokens)
        parts["positive_nll"] = term.detach()
        sums["positive_fraction"] = positive.sum()
        loss = loss + algorithm.positive_nll_coef * term
    if "entropy" in columns:
        sums["entropy"] = torch.where(mask, columns["entropy"].detach(), 0).sum()
        loss = loss - entropy_coef * aggregate(columns["entropy"])
    return loss, parts, sums


def policy_term(
    columns: Mapping[str, Tensor], algorithm: AlgorithmConfig, statistics: CorrectionStatistics | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute the policy loss of each token, and the mask of the tokens that count in the mean policy loss.

    The setting `correction` multiplies token losses by weights and drops tokens, while the setting `rejection` only
    drops tokens. A dropped token has a policy loss of 0 but stays in `response_mask`, so the token keeps its KL and
    entropy terms. With `correction.normalize=kept`, a token that the correction drops does not count in the mean of the
    policy loss; otherwise every token of `response_mask` counts. The metrics of the policy loss function are computed
    before any token is dropped, so they also cover the dropped tokens.

    Args:
        columns: maps names to padded columns (B, T).
        algorithm: settings of the loss.
        statistics: statistics of the importance weights of the whole mini-batch, or None if the settings need no
            statistics.

    Returns:
        A tuple (losses, counted, sums). `losses` (B, T) holds the policy loss of each token. `counted` (B, T) is the
        mask of the tokens that count in the mean policy loss. `sums` maps the names of metrics to sums over tokens.
    """
    policy, mask = POLICY_LOSSES.get(algorithm.loss_mode), columns["response_mask"]
    losses, sums = policy(*(columns[name] for name in columns_of(policy)), **own_knobs(policy, algorithm.loss))
    correction, rejection, counted = algorithm.correction, algorithm.rejection, mask
    if correction.level is not None:
        policies = columns["old_log_probs"], columns["rollout_log_probs"]
        weights, kept, found = rollout_correction(*policies, mask, **correction.weighting)
        if correction.batch_normalize:
            assert statistics is not None, "the mean importance weight needs the statistics of the whole mini-batch"
            weights = weights / statistics.weight_mean
        losses = torch.where(kept, weights * losses, 0)
        counted = kept if correction.normalize == "kept" else mask
        sums |= {f"correction_{name}": value for name, value in found.items()}
    if rejection.kl_estimator is not None:
        settings = dataclasses.asdict(rejection)
        only = columns["advantages"] if settings.pop("only_negative") else None
        kept, found = rollout_rejection(columns["log_probs"], columns["rollout_log_probs"], mask, only, **settings)
        losses = torch.where(kept, losses, 0)
        sums |= {f"rejection_{name}": value for name, value in found.items()}
    return losses, counted, sums


def reference_kl(columns: Mapping[str, Tensor], config: KLLossConfig) -> Tensor:
    """Return KL(policy || reference) at each token (B, T), exact or estimated from the sampled token."""
    if config.full:
        return columns["full_kl"]
    old = columns["old_log_probs"] if config.ratio_weighted else None
    return kl_estimate(columns["log_probs"], columns["ref_log_probs"], config.kl_estimator, old_log_probs=old)


def teacher_kl(columns: Mapping[str, Tensor]) -> Tensor:
    """Return KL(policy || the row's teacher) at each token (B, T), exact or estimated from the sampled token.

    The KL is 0 in rows that no teacher has scored.
    """
    if "teacher_kl" in columns:
        return columns["teacher_kl"]
    policies = columns["log_probs"], columns["old_log_probs"], columns["teacher_log_probs"]
    return sampled_teacher_kl(*policies, columns["taught"])


def _compare(columns: Mapping[str, Tensor], result: UpdateResult, *, with_old: bool) -> None:
    """Compare the current log-probs with the engine's and, if `with_old` is True, also with the old log-probs.

    The sum of |log-prob - old log-prob| and the sums of `rollout_diagnostics`, all over the trained tokens, are added
    to `result.first`.

    `_compare` is called only for the first mini-batch, before the first optimizer step.
    """
    mask, now = columns["response_mask"], columns["log_probs"].detach()
    if with_old:
        change = (now - columns["old_log_probs"]).abs()
        _add(result.first, {"same_policy": torch.where(mask, change, 0).sum()})
    _add(result.first, rollout_diagnostics(now, columns["rollout_log_probs"], mask))
    result.first_tokens += int(mask.sum())


def _add(totals: dict[str, float], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + float(value)
