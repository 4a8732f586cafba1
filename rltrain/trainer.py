"""The training step of a run, and the training loop that repeats the training step.

A training step has five phases, or six phases if the reference model is due for an update:

1. Wait until the rollout engines have generated the answers of the next prompt groups.
2. Compute the log-probs of the teachers, the reference and the actor, and compute the critic's values. While log-probs
   and values are computed, reward workers compute the rewards of the step that are still missing.
3. Convert the scores of answers to token rewards and advantages, and choose the tokens to train on.
4. Update the critic and the actor on mini-batches. If the run has a supervised loss, each mini-batch of the actor also
   contains the supervised answers to the prompts of the mini-batch. During the critic's warm-up, update the critic
   alone.
5. Send the actor's new weights to the rollout engines.
6. Update the reference model with the weights of the actor.

The class `Trainer` gets its workers as arguments, so the same training code runs with fake workers in a test, with
workers in one process, and on a cluster.
"""

import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from rltrain.base import trace
from rltrain.base.background_tasks import BackgroundTasks
from rltrain.base.errors import EstimatorError, LogProbError, NumericsError, RewardError, WorkerLost
from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_assignment import minibatches
from rltrain.data.prompts import Prompt
from rltrain.monitoring.alarms import Alarms
from rltrain.monitoring.evaluation_metrics import KINDS, evaluation_metrics, prefix_of
from rltrain.monitoring.phase_timer import Timer
from rltrain.monitoring.step_metrics import entropy_estimate, log_prob_gap, sample_metrics, staleness_metrics
from rltrain.monitoring.timeline import Timeline
from rltrain.monitoring.tracking import Tracker
from rltrain.run.checkpoints import Checkpoint, Checkpoints, SavesState
from rltrain.run.recovery import Restarts
from rltrain.settings.schema import Config
from rltrain.trajectories.collector import Collector
from rltrain.trajectories.teachers import Teachers
from rltrain.trajectories.token_rewards import (
    assign_rewards,
    choose_trained,
    entropy_controller,
    estimate_advantages,
    held,
    kl_controller,
    rows_of_actor_pass,
    states_to_value,
    with_columns_of_rows,
    with_critic_values,
    with_positive_examples,
    with_random_draws,
)
from workers.training.actor import ActorWorker
from workers.training.critic import CriticWorker
from workers.training.dispatch import OVERHEAD_METRICS
from workers.training.policy_update import update_policy
from workers.training.reference import ReferenceWorker
from workers.training.reference_refresh import refresh_reference, send_reference_head
from workers.training.shared_columns import CRITIC_UPDATE, FORWARD, log_probs_columns
from workers.training.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


class Trainer:
    """Training loop of a run, including recovery from lost training ranks.

    Args:
        config: the whole config of the run.
        collector: produces batches of scored answers.
        actor, reference, critic: worker groups of the actor, the reference and the critic. The reference is None if the
            run needs no reference model, and the critic is None if the advantage estimator needs no values.
        teachers: the teachers of the distillation; None without distillation.
        tracker: records the metrics and samples of the run.
        checkpoints: saves and reads the checkpoints of the run.
        val_prompts: maps the name of each evaluation set to the prompts of the set; the evaluation set of `data.val`
            has the name "".
        tasks: the run's background tasks. If the user interrupts the run, the run ends only at points where no results
            can be lost.
        restart: function that ends all processes of the training ranks and starts new processes; None if the ranks
            cannot be restarted.
        timeline: collects the timeline events of all processes after each step; None records no timeline.

    Attributes:
        step: number of finished training steps, which is also the version number of the current weights.
        incarnation: number of times that the run was restored; `incarnation` and `step` together identify the weights.
        origin: checkpoint to which the run was last restored; None if the run was never restored to a checkpoint.
        beginning: state of the driver process before the first training step; None if the run began from a checkpoint.
        engine_checked: whether the engine's log-probs have been compared with the actor's log-probs since the run
            began. With top-p or top-k sampling, `engine_checked` is True from the start, because the engine's log-probs
            belong to a restricted distribution.
        checked_before: value of `engine_checked` before the current training step; checkpoints store this value.
        dropped: uids of the prompt groups that the most recent training step dropped.
        reused: uids of the prompt groups of earlier training steps on which the most recent step trained again.
    """

    def __init__(
        self,
        config: Config,
        *,
        collector: Collector,
        actor: WorkerGroup[ActorWorker],
        reference: WorkerGroup[ReferenceWorker] | None,
        critic: WorkerGroup[CriticWorker] | None,
        tracker: Tracker,
        checkpoints: Checkpoints,
        val_prompts: Mapping[str, Sequence[Prompt]],
        tasks: BackgroundTasks,
        teachers: Teachers | None = None,
        restart: Callable[[], Awaitable[None]] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.config, self.collector, self.tracker, self.checkpoints = config, collector, tracker, checkpoints
        self.tasks, self.timeline = tasks, timeline or Timeline()
        self.actor, self.reference, self.critic, self.teachers = actor, reference, critic, teachers
        self.val_prompts = val_prompts
        self.kl_controller = kl_controller(config.algorithm.kl_in_reward)
        self.entropy_controller = entropy_controller(config.algorithm)
        self.alarms = Alarms(config)
        self.restarts = Restarts(restart, config.trainer.max_restarts)
        self.step = self.incarnation = 0
        self.origin: Checkpoint | None = None
        self.beginning: dict[str, Any] | None = None
        self.engine_checked = self.checked_before = config.rollout.is_restricted
        self.dropped: list[int] = []
        self.reused: list[int] = []
        self.timer = Timer()  # The timer measures the phases of the current training step.

    async def fit(self) -> None:
        """Train until the last training step of the run has ended.

        If a training rank dies or hangs, training continues from the last undamaged checkpoint.
        """
        if self.origin is None:
            self.beginning = self.state_dict()
        lost: WorkerLost | None = None
        while True:
            try:
                if lost is not None:
                    await self.recover(lost)
                return await self.train()
            except WorkerLost as error:
                lost = error

    async def train(self) -> None:
        """Train from the current step to the run's last step, with the configured evaluations and checkpoints."""
        self.collector.drop_turns_after(self.step)
        with trace.span("sync_weights"):
            await self.sync_weights()
        await self.between_steps()
        first = self.step + 1
        while self.step < self.config.trainer.total_steps:
            self.tasks.check()
            with trace.span(f"step {self.step + 1}"):
                metrics, batch = await self.train_step()
            self.tracker.log_step(self.step, metrics, batch, self.dropped, self.reused)
            # `require_best` checks that the metric that selects the best checkpoint exists. `require_best` is called
            # only after the critic's warm-up, because the steps of the warm-up have no actor metrics.
            if self.step == max(first, self.config.critic.warmup_steps + 1):
                self.checkpoints.require_best(self.tracker.names())
            for alarm in self.alarms.look(self.step, metrics):
                self.tracker.log_alarm(self.step, alarm)
            await self.between_steps()
            await self.timeline.update()
        await self.checkpoints.finish()

    async def between_steps(self) -> None:
        """Evaluate the policy and save a checkpoint, if the config asks for either of them at the current step.

        A restored run does not repeat an evaluation or a checkpoint that already exists for the current step.
        """
        trainer, last = self.config.trainer, self.step >= self.config.trainer.total_steps
        self.checked_before = self.engine_checked
        if last or self.step == 0 or (trainer.eval_every and self.step % trainer.eval_every == 0):
            with self.timer("evaluate"):
                async with self.saved_on_error():
                    await self.evaluate()
        if last or (self.step and trainer.save_every and self.step % trainer.save_every == 0):
            await self.save()

    async def save(self, *, repairable: str = "") -> None:
        """Start saving a checkpoint of the current step, unless the step already has a checkpoint.

        `save` must be called between two training steps.

        Args:
            repairable: name of a user's file, such as a Python file with a function, that the user is allowed to repair
                before resuming the run; "" if there is no such file. If `repairable` names a file, an existing
                checkpoint of the current step is replaced, so that the new checkpoint contains the name of the file.
        """
        if repairable or self.checkpoints.last != self.step:
            state = self.state_dict() | ({"repairable": repairable} if repairable else {})
            with self.timer("start checkpoint"):
                await self.checkpoints.start(
                    self.step,
                    self.incarnation,
                    self.trained(),
                    state,
                    history=self.tracker.state(),
                    metrics=self.tracker.metrics_of(self.step),
                )

    def trained(self) -> dict[str, WorkerGroup[SavesState]]:
        """Return a dict that maps each role to the worker group whose state is saved in checkpoints.

        The roles with a saved state are the actor, the critic, and a reference model that is updated during training.
        """
        reference = self.reference if self.config.algorithm.refreshes_reference else None
        groups: dict[str, WorkerGroup[SavesState] | None] = {
            "actor": self.actor,
            "critic": self.critic,
            "reference": reference,
        }
        return {role: group for role, group in groups.items() if group is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the driver process between two steps, as JSON-serializable values."""
        return {
            "step": self.step,
            "incarnation": self.incarnation,
            "engine_checked": self.checked_before,
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
            "collector": self.collector.state_dict(),
        }

    async def restore(self, checkpoint: Checkpoint | None) -> None:
        """Restore the run to a checkpoint, or to the start of the run if `checkpoint` is None.

        All training ranks must be running when `restore` is called. Requests that rollout engines and reward workers
        are still processing are dropped, because the requests belong to discarded training steps.
        """
        await self.checkpoints.abandon()
        state = self.beginning if checkpoint is None else checkpoint.state
        assert state is not None, "a run that began from a checkpoint has no state of step 0 to restore"
        for group in self.trained().values():
            await group.call(SavesState.load_state, None if checkpoint is None else checkpoint.folder.url)
        await self.follow_reference_head()
        await self.collector.abort()
        self.collector.load_state_dict(state["collector"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.entropy_controller.load_state_dict(state["entropy_controller"])
        steps = self.tracker.restore(state["step"], {} if checkpoint is None else checkpoint.history)
        self.alarms = Alarms(self.config)
        for metrics in steps:
            self.alarms.look(int(metrics["step"]), metrics)
        self.step = state["step"]
        self.engine_checked = state["engine_checked"] or self.config.rollout.is_restricted
        self.checked_before = self.engine_checked
        self.incarnation = 1 + max(self.incarnation, state["incarnation"])
        self.checkpoints.restored(checkpoint)
        self.origin = checkpoint

    @property
    def trains_actor(self) -> bool:
        """Whether the current step updates the actor. During the critic's warm-up, a step updates only the critic.

        A step of the critic's warm-up raises the version number of the weights and ends with a weight sync, although
        the actor's weights stay the same.
        """
        return self.step >= self.config.critic.warmup_steps

    def last_good(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint in the run's own checkpoint folder.

        If the folder has no undamaged checkpoint, return the checkpoint from which the run was last restored, which may
        be in another folder. If the run was never restored from a checkpoint, return None.
        """
        return self.checkpoints.newest() or self.origin

    async def recover(self, error: WorkerLost) -> None:
        """Restart all training ranks, and restore the run to the last undamaged checkpoint.

        Raise WorkerError if the run has already had too many restarts.
        """
        checkpoint = self.last_good()
        with self.timer("restart training ranks"):
            await self.collector.rollout.hold_weights()
            await self.restarts.after(error, checkpoint.step if checkpoint else 0)
            await self.restore(checkpoint)
        logger.warning("the training ranks were restarted; training continues after step %d", self.step)

    async def train_step(self) -> tuple[dict[str, float], DataProto]:
        """Run one training step. Return the metrics of the training step, and the batch on which the step trained."""
        config, timer = self.config, Timer()
        self.timer = timer
        async with self.saved_on_error():
            with timer("generate"):
                batch = await self.collector.answers(version=self.step)
                await self.collector.rollout.sleep()
        teacher_metrics: dict[str, float] = {}
        if self.teachers is not None:
            with timer("teacher_log_probs"):
                batch, teacher_metrics = await self.teachers.scored(batch, self.collector.prompts_of(batch))
        if self.reference is not None and config.algorithm.has_reference_kl:
            with timer("ref_log_probs"):
                batch = await self.with_reference_log_probs(batch, self.reference)
        with timer("old_log_probs"):
            batch, gap_metrics = await self.with_old_log_probs(batch)
        if self.critic is not None:
            with timer("values"):
                batch = await self.with_values(batch, self.critic)
        async with self.saved_on_error():
            with timer("rewards"):
                batch, generated_metrics = await self.collector.scored(batch)
        metrics = sample_metrics(batch, config.reward.names)
        metrics |= generated_metrics | teacher_metrics | staleness_metrics(batch, self.step)
        metrics["rollout/entropy"] = entropy_estimate(batch)
        async with self.saved_on_error():
            with timer("advantages"):
                controller = self.kl_controller if self.trains_actor else held(self.kl_controller)
                batch, reward_metrics = assign_rewards(batch, config, controller)
                batch, advantage_metrics = estimate_advantages(
                    batch, config.algorithm, monte_carlo=not self.trains_actor
                )
                batch = choose_trained(batch, config.algorithm)
                batch = with_positive_examples(batch, config.algorithm)
                batch = with_random_draws(batch, config, self.step)
                minibatches = self.minibatches(batch)
                finished = self.collector.take()
                self.dropped, self.reused = finished.dropped, finished.reused
        if self.critic is not None:
            with timer("update_critic"):
                metrics |= await self.update_critic(batch, minibatches, self.critic)
        if self.trains_actor:
            with timer("update_actor"):
                await self.collector.rollout.hold_weights()
                metrics |= await self.update_actor(batch, minibatches)
        await self.actor.drop_kept()
        self.step += 1
        with timer("sync_weights"):
            await self.sync_weights()
        if self.reference is not None and config.algorithm.refreshes_reference:
            with timer("refresh_reference"):
                metrics |= await self.refresh_reference(self.reference)
        return metrics | gap_metrics | reward_metrics | advantage_metrics | timer.metrics(batch), batch

    @contextlib.asynccontextmanager
    async def saved_on_error(self) -> AsyncIterator[None]:
        """Save a checkpoint if the `with` block raises an error about rewards or about values computed from rewards.

        The checkpoint contains the state before the current training step, so a resumed run repeats the step. If too
        many rewards failed, the samples of the step are also written to a file.
        """
        kl_controller = self.kl_controller.state_dict()
        try:
            yield
        except (RewardError, EstimatorError, NumericsError) as error:
            self.kl_controller.load_state_dict(kl_controller)
            batch, repairable = getattr(error, "batch", None), getattr(error, "repairable", "")
            text = str(error)
            if batch is not None:
                text += f"; all samples: {self.tracker.log_failed(self.step + 1, batch)}"
            if self.step > (self.origin.step if self.origin and not repairable else 0):
                await self.save(repairable=repairable)
                text += f"; step {self.step} is saved, and trainer.resume=auto continues from it"
                if repairable:
                    text += "; the file with the failed function may be repaired before the run is resumed"
                elif isinstance(error, RewardError):
                    text += "; the resumed run requests the failed rewards again, if no reward file is changed"
            raise type(error)(text) from None

    def minibatches(self, batch: DataProto) -> list[list[int]]:
        """Return the row indices of each mini-batch of the current step.

        The mini-batches are in the order of the optimizer steps.
        """
        trainer, uid = self.config.trainer, batch.batch["uid"].tolist()
        return minibatches(
            uid, self.config.minibatches_per_epoch, trainer.epochs_per_step, seed=trainer.seed, step=self.step
        )

    async def with_reference_log_probs(self, batch: DataProto, reference: WorkerGroup[ReferenceWorker]) -> DataProto:
        """Compute the log-probs of the reference model, and add the column `ref_log_probs` to the batch.

        The reference's hidden states for the exact KL stay on the ranks; the batch gets the places of its rows.
        """
        budget = self.config.actor.max_tokens_per_microbatch
        keep = "ref_hidden" if self.config.algorithm.needs_full_kl else None
        method = ReferenceWorker.compute_log_probs
        return batch.union(await reference.rows(method, batch, FORWARD, max_tokens=budget, keep=keep))

    async def with_values(self, batch: DataProto, critic: WorkerGroup[CriticWorker]) -> DataProto:
        """Compute the critic's values, and add the values to the batch."""
        states, budget = states_to_value(batch, self.config.algorithm), self.config.critic.max_tokens_per_microbatch
        found = await critic.rows(CriticWorker.compute_values, states, FORWARD, max_tokens=budget)
        return with_critic_values(batch, found, self.config.algorithm)

    async def update_critic(
        self, batch: DataProto, minibatches: Sequence[list[int]], critic: WorkerGroup[CriticWorker]
    ) -> dict[str, float]:
        """Update the critic on all mini-batches, and return the metrics of the update.

        Raise NumericsError if too many consecutive optimizer steps were skipped.
        """
        with self.saved_batch(batch):
            budget = self.config.critic.max_tokens_per_microbatch
            metrics = await critic.update(CriticWorker.update, batch, CRITIC_UPDATE, minibatches, budget)
        return self.checked_update("critic", metrics, batch, minibatches)

    async def update_actor(self, batch: DataProto, minibatches: Sequence[list[int]]) -> dict[str, float]:
        """Update the actor on all mini-batches, then update the entropy coefficient, and return the update's metrics.

        If the run has a supervised loss, each mini-batch of the actor also contains the supervised answers to the
        prompts of the mini-batch.

        Raise NumericsError if too many consecutive optimizer steps were skipped.
        """
        algorithm, entropy_coef = self.config.algorithm, self.entropy_controller.value
        supervised = self.collector.supervised(batch) if algorithm.sft_coef > 0 else None
        with self.saved_batch(batch):
            found = await update_policy(
                self.actor,
                batch,
                minibatches,
                self.config,
                max_tokens=self.config.actor.max_tokens_per_microbatch,
                entropy_coef=entropy_coef,
                supervised=supervised,
            )
        metrics = self.checked_update("actor", found, batch, minibatches)
        if self.config.algorithm.entropy_target is not None:
            metrics["actor/entropy_coef"] = entropy_coef
            if batch.values("response_mask").any() and math.isfinite(metrics["actor/entropy"]):
                self.entropy_controller.update(metrics["actor/entropy"])
        return metrics

    @contextlib.contextmanager
    def saved_batch(self, batch: DataProto) -> Iterator[None]:
        """Write the batch of the current step to a file if the `with` block raises NumericsError."""
        try:
            yield
        except NumericsError as error:
            path = self.tracker.save_batch(self.step + 1, batch)
            raise NumericsError(f"{error}; file with the step's batch: {path}") from None

    def checked_update(
        self, role: str, metrics: dict[str, float], batch: DataProto, minibatches: Sequence[list[int]]
    ) -> dict[str, float]:
        """Return the metrics of an update under names that contain the role, such as `actor/policy_loss`.

        If optimizer steps were skipped, an alarm reports the number of skipped optimizer steps and the file with the
        batch of the training step.
        """
        step = self.step + 1
        if skipped := int(metrics.get("skipped_updates", 0)):
            self.tracker.log_alarm(
                step,
                f"step {step}: {skipped} of {len(minibatches)} {role} updates skipped, as their loss or gradient is "
                "not finite: look at rewards, advantages and log-probs of the step's batch "
                f"({self.tracker.save_batch(step, batch)}), and lower {role}.lr or the loss's clip ranges",
            )
        return _named(role, metrics)

    async def with_old_log_probs(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Add the column `old_log_probs`: log-probs that the actor or the engine computed before this step's updates.

        The old log-probs of the first mini-batch equal the log-probs of its update, so the actor usually computes only
        the log-probs of the other rows. The column `has_old_log_probs` tells which rows these are. If one optimizer
        step trains on the whole batch, both columns are usually left out.

        Returns:
            The batch, and metrics of the gap between the log-probs of engine and actor; the metrics are {} if the actor
            did not compute log-probs.

        Raises:
            LogProbError: in the first comparison of a run, the mean gap between the log-probs of engine and actor
                exceeds `rollout.max_log_prob_gap`.
        """
        metrics: dict[str, float] = {}
        if rows := self.rows_of_actor_pass(batch):
            budget = self.config.actor.max_tokens_per_microbatch
            columns, only = log_probs_columns(self.config.algorithm), rows if len(rows) < len(batch) else None
            found = await self.actor.rows(ActorWorker.compute_log_probs, batch, columns, max_tokens=budget, only=only)
            computed = (batch if only is None else batch[rows]).union(found)
            batch = with_columns_of_rows(batch, found, rows)
            # Without trained tokens, the engine's log-probs cannot be compared with the actor's log-probs.
            if computed.values("response_mask").any():
                metrics = log_prob_gap(computed)
                self.check_engine(metrics["rollout/log_prob_gap"])
        if self.config.algorithm.old_log_probs == "rollout":
            batch = batch.with_values("responses", old_log_probs=batch.values("rollout_log_probs"))
        return batch, metrics

    def rows_of_actor_pass(self, batch: DataProto) -> list[int]:
        """Return the rows whose log-probs the actor computes before this step's updates, in ascending order.

        While `engine_checked` is False, which is usual only in the first training step, the actor computes all rows, so
        that the engine's log-probs can be compared with the actor's.
        """
        if not self.engine_checked:
            return list(range(len(batch)))
        return rows_of_actor_pass(self.config, self.minibatches(batch), step=self.step)

    def check_engine(self, gap: float) -> None:
        """Raise LogProbError if the first mean log-prob gap of the run exceeds `rollout.max_log_prob_gap`.

        `gap` is a step's mean gap between the log-probs of engine and actor, in nats. Only the first call of
        `check_engine` in a run compares `gap` with the limit.
        """
        first, self.engine_checked = not self.engine_checked, True
        limit = self.config.rollout.max_log_prob_gap
        if first and not gap <= limit:
            quantization = self.config.rollout.quantization
            advice = "check model.dtype" if quantization is None else "use rollout.vllm.quantization=null"
            raise LogProbError(
                f"engine and actor disagree by {gap:.3g} nats per token on average, above "
                f"rollout.max_log_prob_gap={limit:g}: the engine samples from a different distribution than the one "
                f"that is trained; {advice}, or raise the limit"
            )

    async def sync_weights(self) -> None:
        """Send the actor's weights to the rollout engines, with the version number `step`.

        Raise SyncError if an engine does not use the new weights after the weight sync.
        """
        await self.collector.rollout.load(self.actor.ranks, self.step, check=self.config.rollout.verify_sync)

    async def refresh_reference(self, reference: WorkerGroup[ReferenceWorker]) -> dict[str, float]:
        """Update the reference model if an update is due after the current step, and return the metrics of the update.

        From the next training step on, the reference log-probs are computed with the updated weights of the reference
        model.
        """
        due = self.step % self.config.algorithm.reference.refresh_every == 0
        if due:
            await refresh_reference(self.actor, reference)
            await self.follow_reference_head()
        return {"reference/refreshed": float(due)}

    async def follow_reference_head(self) -> None:
        """Give the actor the output head of an updated reference model, which the actor needs for the exact KL."""
        algorithm = self.config.algorithm
        if self.reference is not None and algorithm.refreshes_reference and algorithm.needs_reference_head:
            await send_reference_head(self.actor, self.reference)

    async def evaluate(self) -> None:
        """Evaluate sampled and greedy answers to all evaluation prompts, unless the current step has been evaluated."""
        if not self.val_prompts or self.tracker.evaluated(self.step):
            return
        if self.collector.rollout.asleep:
            await self.sync_weights()
        metrics: dict[str, float] = {}
        batches: dict[str, DataProto] = {}
        for (name, prompts), kind in itertools.product(self.val_prompts.items(), KINDS):
            samples = 1 if kind == "greedy" else self.config.trainer.eval_samples
            batch = await self.collector.evaluate(prompts, greedy=kind == "greedy", samples=samples)
            prefix = prefix_of(name, kind)
            metrics |= evaluation_metrics(batch, self.config.reward.names, prefix)
            batches[prefix] = batch
        self.tracker.log_eval(self.step, metrics, batches)


def _named(role: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"perf/{role}_{name}" if name in OVERHEAD_METRICS else f"{role}/{name}": v for name, v in metrics.items()}
