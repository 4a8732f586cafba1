"""One training step on one page, and the loop around it.

A step is: take the next groups of answers; compute log-probs under the reference and the actor, and values, while the
last scores come in; turn scores into token rewards and advantages, and say what is trained on; update critic and
actor over mini-batches; send the new weights to the engines. `Trainer` holds its workers by argument, so fakes, one
process and a cluster run the same code.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rltrain.base.errors import EstimatorError, LogProbError, NumericsError, RewardError, WorkerLost
from rltrain.batch.data_proto import DataProto
from rltrain.batch.row_assignment import minibatches
from rltrain.data.prompts import Prompt
from rltrain.monitoring.alarms import Alarms
from rltrain.monitoring.phase_timer import Timer
from rltrain.monitoring.step_metrics import entropy_estimate, log_prob_gap, sample_metrics, staleness_metrics
from rltrain.monitoring.tracking import Tracker
from rltrain.run.checkpoints import Checkpoint, Checkpoints
from rltrain.run.recovery import Restarts
from rltrain.settings.schema import Config
from rltrain.trajectories.collector import Collector
from rltrain.trajectories.token_rewards import (
    assign_rewards,
    choose_trained,
    entropy_controller,
    estimate_advantages,
    kl_controller,
    needs_actor_pass,
    states_to_value,
    with_critic_values,
    with_random_draws,
)
from workers.training.dispatch import PLAN_METRICS
from workers.training.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


class Trainer:
    """Drives the workers.

    Args:
        config: the whole config.
        collector: prompts in, scored groups out.
        actor, reference, critic: worker groups; without a KL term or a critic these are None.
        tracker: where metrics and samples go.
        checkpoints: where the state of the run goes.
        val_prompts: for evaluations.
        interrupted: asked wherever the run may stop without losing anything; raises to stop it.
        restart: ends all processes of the training ranks and starts them anew; None: they cannot be.

    Attributes:
        step: training steps taken, and the version of the weights.
        incarnation: how often the run was restored; with `step` it names a version of the weights for ever.
    """

    def __init__(
        self,
        config: Config,
        *,
        collector: Collector,
        actor: WorkerGroup,
        reference: WorkerGroup | None,
        critic: WorkerGroup | None,
        tracker: Tracker,
        checkpoints: Checkpoints,
        val_prompts: Sequence[Prompt],
        interrupted: Callable[[], None] = lambda: None,
        restart: Callable[[], None] | None = None,
    ) -> None:
        self.config, self.collector, self.tracker, self.checkpoints = config, collector, tracker, checkpoints
        self.interrupted, collector.meanwhile = interrupted, self.while_idle
        self.actor, self.reference, self.critic = actor, reference, critic
        self.val_prompts = val_prompts
        self.needs_actor_pass = needs_actor_pass(config)
        self.kl_controller = kl_controller(config.algorithm.kl_in_reward)
        self.entropy_controller = entropy_controller(config.algorithm)
        self.alarms = Alarms(config)
        self.restarts = Restarts(restart, config.trainer.max_restarts)
        self.step = self.incarnation = 0
        self.origin: Checkpoint | None = None  # that the run was restored to last
        self.beginning: dict[str, Any] | None = None  # its state before the first step, unless it began from another
        self.engine_checked = self.checked_before = False  # now, and before the step that is under way
        for group in (actor, reference, critic, *(model.group for model in collector.models)):
            if group is not None:
                group.meanwhile(collector.advance)

    def fit(self) -> None:
        """Train to the last step, going on from the last checkpoint where a training rank died."""
        if self.origin is None:
            self.beginning = self.state_dict()
        lost: WorkerLost | None = None
        while True:
            try:
                if lost is not None:
                    self.recover(lost)
                return self.train()
            except WorkerLost as error:
                lost = error

    def train(self) -> None:
        """Train from where the run stands, evaluating and saving as often as the config says."""
        self.sync_weights()
        self.between_steps()
        first = self.step + 1
        while self.step < self.config.trainer.total_steps:
            self.while_idle()
            metrics, batch = self.train_step()
            self.tracker.log_step(self.step, metrics, batch)
            if self.step == first:
                self.checkpoints.require_best(self.tracker.names())
            for alarm in self.alarms.look(self.step, metrics):
                self.tracker.log_alarm(self.step, alarm)
            self.between_steps()
        self.checkpoints.finish()

    def between_steps(self) -> None:
        """Evaluate and save, where it is time and not done yet: a restored run has done what its checkpoint has."""
        trainer, last = self.config.trainer, self.step >= self.config.trainer.total_steps
        self.checked_before = self.engine_checked
        if last or self.step == 0 or (trainer.eval_every and self.step % trainer.eval_every == 0):
            with self.saved_on_error():
                self.evaluate()
        if last or (self.step and trainer.save_every and self.step % trainer.save_every == 0):
            self.save()

    def while_idle(self) -> None:
        """While the training ranks have nothing to do: finish a save, and stop if that is asked for."""
        self.checkpoints.advance()
        self.interrupted()

    def save(self, *, repairable: str = "") -> None:
        """Begin to write a checkpoint of this moment between two steps, unless there is one.

        Args:
            repairable: a source that may have another content when the run goes on; where one is named, a checkpoint
                of this step is replaced.
        """
        if repairable or self.checkpoints.last != self.step:
            state = self.state_dict() | ({"repairable": repairable} if repairable else {})
            self.checkpoints.start(
                self.step,
                self.incarnation,
                self.trained(),
                state,
                history=self.tracker.state(),
                metrics=self.tracker.metrics_of(self.step),
            )

    def trained(self) -> dict[str, WorkerGroup]:
        """The groups that have a state to save, by role."""
        groups = {"actor": self.actor, "critic": self.critic}
        return {role: group for role, group in groups.items() if group is not None}

    def state_dict(self) -> dict[str, Any]:
        """The driver's own state between two steps, as plain values."""
        return {
            "step": self.step,
            "incarnation": self.incarnation,
            "engine_checked": self.checked_before,
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
            "collector": self.collector.state_dict(),
        }

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Put everything back to a checkpoint, or to the start of the run; its processes must be alive or fresh.

        What engines and reward workers have in hand then is of a future that does not count, and is dropped.
        """
        self.checkpoints.abandon()
        state = self.beginning if checkpoint is None else checkpoint.state
        assert state is not None, "a run that began from a checkpoint has that to go back to: `last_good`"
        for group in self.trained().values():
            group.wait(group.start("load_state", None if checkpoint is None else checkpoint.folder.url))
        self.collector.load_state_dict(state["collector"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.entropy_controller.load_state_dict(state["entropy_controller"])
        steps = self.tracker.restore(state["step"], {} if checkpoint is None else checkpoint.history)
        self.alarms = Alarms(self.config)
        for metrics in steps:
            self.alarms.look(int(metrics["step"]), metrics)
        self.step, self.engine_checked = state["step"], state["engine_checked"]
        self.checked_before = self.engine_checked
        self.incarnation = 1 + max(self.incarnation, state["incarnation"])
        self.checkpoints.restored(checkpoint)
        self.origin = checkpoint

    def last_good(self) -> Checkpoint | None:
        """The newest good checkpoint of this run, or else that which it began from; None: its start is all there is."""
        return self.checkpoints.newest() or self.origin

    def recover(self, error: WorkerLost) -> None:
        """Have new training ranks go on from the last good checkpoint. Raises WorkerError after too many restarts."""
        checkpoint = self.last_good()
        self.restarts.after(error, checkpoint.step if checkpoint else 0)
        self.restore(checkpoint)
        logger.warning("the training ranks are back; going on after step %d", self.step)

    def train_step(self) -> tuple[dict[str, float], DataProto]:
        """One step: metrics, and the batch that was trained on."""
        config, timer = self.config, Timer()
        with timer("generate"), self.saved_on_error():
            batch = self.collector.answers(version=self.step)
            self.collector.rollout.sleep()
        if self.reference is not None:
            with timer("ref_log_probs"):
                batch = batch.union(self.rows(self.reference, "compute_log_probs", batch))
        with timer("old_log_probs"):
            batch, gap_metrics = self.with_old_log_probs(batch)
        if self.critic is not None:
            with timer("values"):
                found = self.rows(self.critic, "compute_values", states_to_value(batch, config.algorithm))
                batch = with_critic_values(batch, found, config.algorithm)
        with timer("rewards"), self.saved_on_error():
            batch = self.collector.scored(batch)
        metrics = sample_metrics(batch, [component.name for component in config.reward.components])
        metrics |= staleness_metrics(batch, self.step) | {"rollout/entropy": entropy_estimate(batch)}
        with timer("advantages"), self.saved_on_error():
            batch, reward_metrics = assign_rewards(batch, config, self.kl_controller)
            batch, advantage_metrics = estimate_advantages(batch, config.algorithm)
            batch = choose_trained(batch, config.algorithm)
            batch = with_random_draws(batch, config, self.step)
            plan = minibatches(
                batch.batch["uid"].tolist(),
                config.minibatches_per_epoch,
                config.trainer.epochs_per_step,
                seed=config.trainer.seed,
                step=self.step,
            )
            self.collector.take()
        if self.critic is not None:
            with timer("update_critic"):
                metrics |= self.updated(self.critic, batch, plan)
        with timer("update_actor"):
            entropy_coef = self.entropy_controller.value
            metrics |= self.updated(self.actor, batch, plan, entropy_coef)
            if config.algorithm.entropy_target is not None:
                metrics["actor/entropy_coef"] = entropy_coef
                if batch.values("response_mask").any() and math.isfinite(metrics["actor/entropy"]):
                    self.entropy_controller.update(metrics["actor/entropy"])
        self.step += 1
        with timer("sync_weights"):
            self.sync_weights()
        return metrics | gap_metrics | reward_metrics | advantage_metrics | timer.metrics(batch), batch

    @contextlib.contextmanager
    def saved_on_error(self) -> Iterator[None]:
        """Where rewards, or what is computed of them before the update, end the run, saves what was learnt until then.

        The checkpoint has the step still ahead, so that a resumed run takes it again. The samples of rewards that
        failed are kept for a look at them.
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
                self.save(repairable=repairable)
                text += f"; step {self.step} is saved, and trainer.resume=auto goes on from it"
                if repairable:
                    text += ", also with that function repaired"
                elif isinstance(error, RewardError):
                    text += ", asking for failed rewards again, if what has to change is not in a reward file"
            raise type(error)(text) from None

    def budget(self, group: WorkerGroup) -> int:
        """Tokens of a role's micro-batch."""
        return (self.config.critic if group is self.critic else self.config.actor).max_tokens_per_microbatch

    def rows(self, group: WorkerGroup, method: str, batch: DataProto) -> DataProto:
        """A forward pass of one role over all rows."""
        return group.rows(method, batch, max_tokens=self.budget(group))

    def updated(
        self, group: WorkerGroup, batch: DataProto, plan: Sequence[list[int]], *arguments: float
    ) -> dict[str, float]:
        """Update one role; returns its metrics. The batch of a skipped update is kept for a look at it.

        Raises NumericsError where too many updates in a row were skipped.
        """
        step, role = self.step + 1, "critic" if group is self.critic else "actor"
        try:
            metrics = group.update(batch, plan, *arguments, max_tokens=self.budget(group))
        except NumericsError as error:
            raise NumericsError(f"{error}; the step's batch: {self.tracker.save_batch(step, batch)}") from None
        if skipped := int(metrics.get("skipped_updates", 0)):
            self.tracker.log_alarm(
                step,
                f"step {step}: {skipped} of {len(plan)} {role} updates skipped, as their loss or gradient is not "
                "finite: look at rewards, advantages and log-probs of the step's batch "
                f"({self.tracker.save_batch(step, batch)}), and lower {role}.lr or the loss's clip ranges",
            )
        return _named(role, metrics)

    def with_old_log_probs(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Adds `old_log_probs`, the proximal policy's: recomputed by the actor, or those of the engine.

        Where one optimizer step trains on the whole batch they are the current ones, and the column is left out.
        Returns the batch, and how far engine and actor are apart where the actor computed, as it does in the first step
        always. Raises LogProbError past the limit at the first step.
        """
        metrics: dict[str, float] = {}
        if self.needs_actor_pass or not self.engine_checked:
            batch = batch.union(self.rows(self.actor, "compute_log_probs", batch))
            metrics = log_prob_gap(batch)
            if batch.values("response_mask").any():  # a step without trained tokens says nothing of the engine
                self.check_engine(metrics["rollout/log_prob_gap"])
        if self.config.algorithm.old_log_probs == "rollout":
            batch = batch.with_values("responses", old_log_probs=batch.values("rollout_log_probs"))
        return batch, metrics

    def check_engine(self, gap: float) -> None:
        """Raise LogProbError if this mean gap in nats is past the limit and the first to be seen."""
        first, self.engine_checked = not self.engine_checked, True
        limit = self.config.rollout.max_log_prob_gap
        if first and not gap <= limit:
            raise LogProbError(
                f"engine and actor disagree by {gap:.3g} nats a token on average, above "
                f"rollout.max_log_prob_gap={limit:g}: the engine samples another distribution than "
                "the one trained; check model.dtype, or raise the limit"
            )

    def sync_weights(self) -> None:
        """Send the actor's weights to the engines as version `step`; raises SyncError unless they compute with them."""
        self.collector.rollout.load(self.actor, self.step, check=self.config.rollout.verify_sync)

    def evaluate(self) -> None:
        """Accuracy on the validation prompts, sampled and greedy, unless these weights were evaluated."""
        if not self.val_prompts or self.tracker.evaluated(self.step):
            return
        if self.collector.rollout.asleep:
            self.sync_weights()
        metrics = {}
        for kind in ("sampled", "greedy"):
            batch = self.collector.evaluate(self.val_prompts, greedy=kind == "greedy")
            samples = sample_metrics(batch, ())
            metrics[f"eval/{kind}_reward"] = samples["reward/mean"]
            metrics[f"eval/{kind}_accuracy"] = samples["reward/accuracy"]
            metrics[f"eval/{kind}_length"] = samples["rollout/length_mean"]
            metrics[f"eval/{kind}_failed_fraction"] = samples["reward/failed_fraction"]
        self.tracker.log_eval(self.step, metrics)


def _named(role: str, metrics: dict[str, float]) -> dict[str, float]:
    return {f"perf/{role}_{name}" if name in PLAN_METRICS else f"{role}/{name}": v for name, v in metrics.items()}
