"""Turns prompts into scored batches by sending prompts to the inference engines, and answers to the reward workers.

Synchronous and asynchronous training use the same class `Collector`. The method `answers` sends as many prompt groups
to the engines as the staleness bound allows, but waits only for the answers of the oldest groups. The method `scored`
waits for the scores of the groups that `answers` returned. Two background tasks receive finished answers and scores,
even while the training ranks compute.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltrain.algorithms import required_columns
from rltrain.base import trace
from rltrain.base.background_tasks import BackgroundTasks, Changes
from rltrain.base.errors import RewardError
from rltrain.batch.data_proto import DataProto
from rltrain.batch.trajectory import Trajectory
from rltrain.data.prompt_order import PromptOrder
from rltrain.data.prompt_pools import PromptPools
from rltrain.data.prompts import Prompt, PromptSet
from rltrain.rewards.loading import is_environment_reward
from rltrain.settings.schema import Config
from rltrain.trajectories.batch_building import (
    answers_of,
    mean_score,
    supervised_batch,
    to_batch,
    with_scores,
    without_invalid,
)
from rltrain.trajectories.correct_answers import correct_answers
from rltrain.trajectories.prompt_groups import Group, GroupState, PromptGroups, episodes_of, requests_of
from rltrain.trajectories.reuse_buffer import ReuseBuffer
from rltrain.trajectories.reward_models import RewardModel, with_model_scores
from rltrain.trajectories.scoring import flat_rows, shaped_scores
from workers.environments.turn_journal import TurnJournal
from workers.reward.messages import SampleScores
from workers.reward.pool import RewardPool
from workers.rollout.pool import RolloutPool

# Minimum number of seconds between a step's first failed reward and an early stop of the run. The wait of PATIENCE_S
# seconds lets the error message cover failures that follow shortly after the first failure.
PATIENCE_S = 10.0
# Offset that is added to the run's seed in evaluations, so that an evaluation never reuses the random stream of a
# training sample.
EVAL_SEED = 0x5EED


@dataclass(frozen=True)
class _Flight:
    """Prompt groups in flight, and the temperature and the seed with which their answers are sampled."""

    groups: PromptGroups
    temperature: float
    seed: int


@dataclass
class _Step:
    """State of the collector in one training step.

    Attributes:
        places: number of new prompt groups that the training step will train on.
        refills: number of dropped prompt groups that may still be replaced by new groups.
        open: True while the training step is unfinished. The collector's method `answers` begins the step, and
            the collector's method `take` ends the step.
        seen: finished prompt groups whose answers have already been checked for equal outcomes, as a dict indexed by
            uid.
        dropped: uids of the prompt groups that the training step has dropped.
        reused: groups of earlier training steps on which the step trains again, in addition to `places` new groups.
        version: version of the policy weights before the training step.
        outcomes: with `data.difficulty`, a dict that maps the uid of each group that the step has generated to (number
            of correct answers, number of judged answers).
        useful: with `trainer.reuse`, the uids of the step's groups whose answers have different outcomes.
        prompts: dict that maps the uid of each group that the step trains on to the group's prompt.
    """

    places: int
    refills: int
    open: bool = True
    version: int = 0
    seen: dict[int, Group] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    reused: list[Group] = field(default_factory=list)
    outcomes: dict[int, tuple[int, int]] = field(default_factory=dict)
    useful: set[int] = field(default_factory=set)
    prompts: dict[int, Prompt] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """The groups that a training step has dropped, and the groups of earlier steps on which the step trained again.

    Attributes:
        dropped: uids of the prompt groups that the training step has dropped.
        reused: uids of the prompt groups of earlier training steps on which the training step has trained again.
    """

    dropped: list[int]
    reused: list[int]


class Collector:
    """Turns prompts into scored batches for the trainer.

    The collector reads prompts in the prompt order of the run, and produces batches of finished groups.

    Args:
        config: the complete config of the run.
        rollout: pool of rollout engines.
        rewards: pool of reward workers.
        prompts: training prompts.
        tasks: the run's background tasks. If a background task fails or the run is interrupted, the collector stops
            waiting and loses no data.
        models: reward models, which score a group after all answers of the group are finished and scored by the reward
            functions.
        journal: recorded turns of unfinished conversations; None if the run has no environment.
    """

    def __init__(
        self,
        config: Config,
        *,
        rollout: RolloutPool,
        rewards: RewardPool,
        prompts: PromptSet,
        tasks: BackgroundTasks,
        models: Sequence[RewardModel] = (),
        journal: TurnJournal | None = None,
    ) -> None:
        self.journal = journal
        self.config, self.rollout, self.rewards, self.prompts = config, rollout, rewards, prompts
        self.tasks, self.models = tasks, models
        seed, difficulty, reuse = config.trainer.seed, config.data.difficulty, config.trainer.reuse
        self.pools = PromptPools(len(prompts), seed, difficulty) if difficulty else None
        self.order = self.pools or PromptOrder(len(prompts), seed, config.data.shuffle)
        self.buffer = ReuseBuffer(reuse.groups, reuse.steps) if reuse else None
        algorithm = config.algorithm
        self.groups = PromptGroups(
            samples_per_prompt=config.rollout.samples_per_prompt,
            prompts_per_step=config.trainer.prompts_per_step,
            max_staleness=config.trainer.steps_ahead,
            steps=config.trainer.total_steps,
            whole=config.trainer.deterministic,
            reused=config.trainer.reused_groups,
            components=len(config.reward.functions),
            greedy_baseline="baseline_rewards" in required_columns(algorithm.advantage_estimator, algorithm.loss_mode),
        )
        self.training = _Flight(self.groups, config.rollout.temperature, config.trainer.seed)
        self.in_flight = [self.training]
        self.step = _Step(places=0, refills=0, open=False)
        self.first_failure = 0.0  # `time.monotonic()` at the step's first failed reward; 0 without failed rewards
        self._arrived = 0  # Number of times that answers or scores have arrived.
        self._failures_arrived = False  # True if failed rewards have arrived that `_stop_early` has not counted.
        # `_changes` wakes waiting tasks when groups change, or when engines or reward workers get work.
        self._changes = Changes()

    def start(self) -> None:
        """Start the background tasks that receive finished answers and scores."""
        self.tasks.start(self._receive_answers(), "answers")
        self.tasks.start(self._receive_scores(), "scores")

    async def answers(self, version: int) -> DataProto:
        """Wait for the answers of the next `prompts_per_step` groups, and return the answers as a batch.

        The answers are sampled with weights that are at most `max_staleness` versions older than version `version`.
        The scores of the answers may still be missing; the method `scored` adds the scores.

        With dynamic sampling, a group whose answers all have the same outcome is replaced by a new group. When the step
        has reached its limit of generated groups, a group whose answers all have the same outcome is left out without a
        replacement, and the batch has fewer than `prompts_per_step` groups.

        With `trainer.reuse`, the batch of a step may contain groups on which earlier steps have already trained.
        """
        batches = self.config.algorithm.dynamic_sampling
        # A step that was unfinished when the checkpoint was saved continues with its saved state after a resume.
        if not self.step.open:
            self._open_step()
        self.step.version = version
        self._draw(version)
        while True:
            if batches:
                await self._drop_flat(self.step)
                self._draw(version)
            groups = self.groups.answered(self.step.places)
            if groups and (not batches or all(group.state is GroupState.READY for group in groups)):
                break
            await self._news()
        self._require_fresh(version, groups, self.groups.max_staleness)
        self._require_fresh(version, self.step.reused, self.config.trainer.max_staleness)
        experts = self.config.actor.router_replay == "engine"
        return answers_of([*groups, *self.step.reused], experts=experts)

    def _open_step(self) -> None:
        """Begin a training step, and choose the groups of earlier steps on which the step trains again."""
        trainer, batches = self.config.trainer, self.config.algorithm.dynamic_sampling
        reused = self.buffer.choose() if self.buffer else []
        self.groups.reuse(len(reused))
        places, refills = trainer.prompts_per_step - len(reused), max(0, batches - 1) * trainer.prompts_per_step
        self.step = _Step(places=places, refills=refills, reused=reused)

    @staticmethod
    def _require_fresh(version: int, groups: Sequence[Group], limit: int) -> None:
        oldest = min((group.shipped for group in groups), default=version)
        assert version - oldest <= limit, (
            f"answers requested at weight version {oldest} are too old for training at weight version {version}"
        )

    async def scored(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Wait for all scores of a batch that `answers` returned, and add the scores to the batch.

        After `scored`, the method `take` must be called to end the training step. With dynamic sampling, no token is
        trained on if the batch has only one group and all answers of the group have the same outcome.

        Returns:
            The batch with scores, and metrics of dynamic sampling, prompt pools and reused groups. `scored` returns no
            metrics if dynamic sampling, `data.difficulty` and `trainer.reuse` are off.

        Raises:
            RewardError: more samples failed than `reward.max_failed_fraction` allows, or no reward function applied to
                any sample, or `data.difficulty` is set and no reward function decides whether an answer is correct.
        """
        step, components = self.step, self.config.reward.components
        while not (new := self.groups.ready(step.places)):
            await self._news()
        await with_model_scores(new, self.models)
        groups = [*new, *step.reused]
        step.prompts = {group.uid: group.prompt for group in groups}
        batch = with_scores(batch, groups, components)
        if self.groups.greedy_baseline:
            batch = self._with_baselines(batch, groups)
        generated = list((step.seen | {group.uid: group for group in new}).values())
        self._check_failures(generated, batch)
        metrics = self._measure(step, generated, batch)
        if not self.config.algorithm.dynamic_sampling:
            return batch, metrics
        return self._without_flat(batch), metrics | {
            "reward/mean_generated": mean_score(generated, self.config),
            "rollout/groups_dropped": float(len(step.dropped)),
            "rollout/groups_missing": float(self.config.trainer.prompts_per_step - len(groups)),
        }

    def _measure(self, step: _Step, generated: Sequence[Group], batch: DataProto) -> dict[str, float]:
        """Store in `step` the outcomes that later steps need to choose prompts and groups, and return metrics.

        Args:
            step: the current training step.
            generated: all prompt groups that the training step has generated, including dropped groups.
            batch: the training step's batch of scored answers.
        """
        metrics: dict[str, float] = {}
        if self.pools is not None:
            step.outcomes = correct_answers(generated, self.config)
            metrics |= self.pools.metrics()
        if self.buffer is not None:
            uid = batch.batch["uid"]
            step.useful = set(uid[~flat_rows(batch, self.config)].tolist())
            metrics["rollout/reused_fraction"] = len(step.reused) / len(uid.unique())
        return metrics

    def supervised(self, batch: DataProto) -> DataProto:
        """Return the supervised answers to the prompts of a step's batch as a new batch.

        A prompt without a supervised answer gets no row in the batch of supervised answers. Groups that dynamic
        sampling has dropped are not in the step's batch, so their prompts get no supervised answers. If no group has
        answers with different outcomes, dynamic sampling keeps one group in the step's batch. With dynamic sampling, a
        prompt whose answers all have the same outcome gets no supervised answer.
        """
        uids = batch.batch["uid"]
        if self.config.algorithm.dynamic_sampling:
            uids = uids[~flat_rows(batch, self.config)]
        return supervised_batch({uid: self.step.prompts[uid] for uid in uids.unique().tolist()})

    def take(self) -> Finished:
        """End the training step, and take the step's new prompt groups out of the groups in flight.

        A run that is resumed from a checkpoint continues a training step that `take` had not ended when the checkpoint
        was saved.

        Returns:
            The uids of the prompt groups that the training step has dropped, and the uids of the prompt groups of
            earlier training steps on which the step has trained again.
        """
        step = self.step
        new = self.groups.take(step.places)
        if self.pools is not None:
            self.pools.give_back(step.outcomes)
        if self.buffer is not None:
            self.buffer.finish(step.version, [*new, *step.reused], step.useful)
        step.open = False
        self._forget([*(group.uid for group in new), *step.dropped])
        return Finished(sorted(step.dropped), sorted(group.uid for group in step.reused))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the collector for a checkpoint, as plain values.

        The state of the collector consists of the position in the prompt order (or the state of the prompt pools), the
        prompt groups in flight, the reuse buffer and the unfinished step.
        """
        step = self.step
        unfinished: dict[str, Any] = {
            "places": step.places,
            "refills": step.refills,
            "dropped": sorted(step.dropped),
            "seen": [group.state_dict() for group in step.seen.values()],
        }
        state: dict[str, Any] = {"order": self.order.state_dict(), "groups": self.groups.state_dict()}
        if self.buffer is not None:
            state["reuse"] = self.buffer.state_dict()
            unfinished["reused"] = [group.uid for group in step.reused]
        return state | {"step": unfinished if step.open else None}

    async def abort(self) -> None:
        """Discard all groups, and the results of all requests that the engines and reward workers are processing now.

        After `abort`, the only method of the collector that may be called is `load_state_dict`.
        """
        # if an engine dies during the abort, `_reissue` must not request that engine's groups again
        self.in_flight = []
        await self.rollout.abort()
        self.rewards.abort()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the collector from a state that `state_dict` returned.

        Before `load_state_dict` is called, the engines and reward workers must be idle; `abort` makes them idle.
        """
        self.order.load_state_dict(state["order"])
        self.in_flight, self.first_failure, self._failures_arrived = [self.training], 0.0, False
        self.rewards.submit(self.groups.load_state_dict(state["groups"], self._prompt))
        if self.buffer is not None:
            self.buffer.load_state_dict(state["reuse"], lambda uid, index: self.groups.group(uid, self.prompts[index]))
        self.step = _Step(places=0, refills=0, open=False)
        if (kept := state["step"]) is not None:
            reused = self.buffer.of(kept["reused"]) if self.buffer else []
            self.step = _Step(kept["places"], kept["refills"], dropped=set(kept["dropped"]), reused=reused)
            for one in kept["seen"]:
                group = self.groups.restored(one, self._prompt)
                # If a restored group has failed rewards or conversations, the failed rewards and conversations are
                # requested again, and the group is not in the state READY. A restored group that is not READY is
                # checked for equal outcomes again later, because the repeated requests can change the outcomes.
                if group.state is GroupState.READY:
                    self.step.seen[group.uid] = group
        self._changes.notify()

    def drop_turns_after(self, version: int) -> None:
        """Drop the recorded turns of unfinished conversations that were sampled with weights after version `version`.

        A run that continues from a checkpoint computes the later weights again.
        """
        if self.journal is not None:
            self.journal.keep_until(version)

    def _forget(self, uids: Iterable[int]) -> None:
        if self.journal is not None:
            self.journal.forget(uids)

    def prompts_of(self, batch: DataProto) -> list[Prompt]:
        """Return the prompt of each row of a batch that `answers` returned."""
        uids = batch.batch["uid"].tolist()
        prompts = {uid: self._prompt(uid) for uid in dict.fromkeys(uids)}
        return [prompts[uid] for uid in uids]

    def _prompt(self, uid: int) -> Prompt:
        """Return the prompt of the prompt group `uid`, which must be in flight.

        The uid of a group is the group's position in the prompt order of the run.
        """
        return self.prompts[self.order.at(uid)]

    def _draw(self, version: int) -> None:
        """Add as many new prompt groups as the staleness bound allows, and send all pending groups to the engines."""
        self.groups.add([self.prompts[index] for index in self.order.next(self.groups.wanted(version))])
        self._ship(self.training, version)

    async def _drop_flat(self, step: "_Step") -> None:
        """Drop the finished groups whose answers all have the same outcome, but keep at least one group of the step."""
        while fresh := self._unseen(step):
            await with_model_scores(fresh, self.models)
            for group in fresh:
                stays = (step.places == 1 and not step.refills) or self._fails(step, group)
                flat = not stays and flat_rows(to_batch([group], self.config.reward.components), self.config).all()
                # A group is recorded as seen only after the check for equal outcomes, because the user's aggregation
                # function may raise an exception during the check.
                step.seen[group.uid] = group
                if not flat:
                    continue
                replaced = step.refills > 0
                self.groups.drop(group.uid, replace=replaced)
                step.dropped.add(group.uid)
                step.refills, step.places = step.refills - replaced, step.places - (not replaced)
                # After the step has used up its replacements, the step may drop groups only when all groups of the step
                # are finished. Until all groups of the step are finished, `_unseen` returns no groups.
                if replaced and not step.refills:
                    break

    def _fails(self, step: "_Step", group: Group) -> bool:
        """Return whether all rewards of a group failed and the step has too many failed rewards.

        The setting `reward.max_failed_fraction` limits the failed rewards. A prompt group for which `_fails` returns
        True is not dropped, so that a resumed run requests the group's rewards again.
        """
        if not all(result.failed for result in group.results.values()):
            return False
        failed = sum(result.failed for one in (*step.seen.values(), group) for result in one.results.values())
        return failed > self.config.reward.max_failed_fraction * self.config.trainer.prompts_per_step * group.size

    def _unseen(self, step: "_Step") -> list[Group]:
        """Return the step's finished groups whose answers have not yet been checked for equal outcomes.

        A prompt group of a later step is checked for equal outcomes only in that later step.
        """
        oldest = self.groups.oldest(step.places)
        ready = [group for group in oldest if group.state is GroupState.READY]
        # After the last replacement that the step may make, answers are checked for equal outcomes only when all groups
        # of the step are finished. If in every group all answers have the same outcome, the step drops all groups but
        # one. Which group the step keeps must not depend on the order in which groups finish.
        if not step.refills and len(ready) < len(oldest):
            return []
        return [group for group in ready if group.uid not in step.seen]

    def _with_baselines(self, batch: DataProto, groups: Sequence[Group]) -> DataProto:
        """Add the column `baseline_rewards`: for each row, the shaped score of the greedy answer in the row's group.

        If the greedy answer of a group has no score, the rows of the group are marked as not valid.
        """
        greedy = to_batch(groups, self.config.reward.components, baseline=True)
        scored, samples = greedy.batch["valid"], self.config.rollout.samples_per_prompt
        valid = batch.batch["valid"] & scored.repeat_interleave(samples)
        columns = {
            "valid": valid,
            "failed": batch.batch["failed"] | greedy.batch["failed"].repeat_interleave(samples),
            "baseline_rewards": shaped_scores(greedy, self.config).scores.repeat_interleave(samples),
        }
        return without_invalid(batch.pop(["valid", "failed"])[1].union(DataProto.from_dict(columns)))

    def _without_flat(self, batch: DataProto) -> DataProto:
        """Set `response_mask` to False for the tokens of groups whose answers all have the same outcome.

        The batch can still contain a group whose answers all have the same outcome, because `_drop_flat` never drops
        the last new group of a step.
        """
        trained = ~flat_rows(batch, self.config).repeat_interleave(batch.lengths("responses"))
        return batch.with_values("responses", response_mask=batch.values("response_mask") & trained)

    async def evaluate(self, prompts: Sequence[Prompt], *, greedy: bool, samples: int = 1) -> DataProto:
        """Generate and score answers to each prompt, with greedy decoding or at the run's sampling temperature.

        The generation and the scoring of training groups continue during an evaluation.

        Args:
            prompts: prompts of the evaluation.
            greedy: whether the likeliest token is chosen at each position.
            samples: number of answers to each prompt.

        Raises:
            RewardError: more samples failed than `reward.max_failed_fraction` allows, or no reward function applied to
                any sample.
        """
        count = len(prompts)
        once = PromptGroups(
            samples_per_prompt=samples,
            prompts_per_step=count,
            max_staleness=0,
            steps=1,
            first_uid=-count,
            components=len(self.config.reward.functions),
        )
        once.add(prompts)
        temperature = 0.0 if greedy else self.config.rollout.temperature
        flight = _Flight(once, temperature, self.config.trainer.seed + EVAL_SEED)
        self.in_flight.append(flight)
        self._ship(flight, 0)
        try:
            while not (groups := once.take(count)):
                await self._news()
        finally:
            self.in_flight.remove(flight)
            self._forget(range(-count, 0))
        await with_model_scores(groups, self.models)
        batch = to_batch(groups, self.config.reward.components)
        self._check_failures(groups, batch)
        return batch

    def _ship(self, flight: _Flight, version: int | None) -> None:
        limit, whole = self.config.rollout.max_response_length, self.config.trainer.deterministic
        if shipped := flight.groups.ship(version):
            temperature, seed = flight.temperature, flight.seed
            self.rollout.submit(
                [
                    episodes_of(group, temperature=temperature, seed=seed)
                    if self.config.rollout.has_environment
                    else requests_of(group, temperature=temperature, max_tokens=limit, seed=seed, whole=whole)
                    for group in shipped
                ]
            )
            self._changes.notify()

    async def _news(self) -> None:
        """Wait until the next answer or score arrives at the collector."""
        assert self.rollout.pending or self.rewards.pending, (
            "prompt groups are unfinished, but no engine or reward worker has work"
        )
        arrived = self._arrived
        with trace.span("wait: answers or scores", merged=True, waits=1):
            await self.tasks.until(self._changes.until(lambda: self._arrived != arrived))
        if self._failures_arrived:
            self._failures_arrived = False
            for flight in self.in_flight:
                self._stop_early(flight.groups)

    async def _receive_answers(self) -> None:
        """Pass finished answers to their groups and to the reward workers, until the task is cancelled."""
        while True:
            await self._changes.until(lambda: self.rollout.pending)
            answers = await self.rollout.poll()
            requests = [flight.groups.generated(answer) for answer in answers for flight in self.in_flight]
            self._failures_arrived |= any(isinstance(one, Trajectory) and bool(one.error) for one in answers)
            self.rewards.submit([request for request in requests if request is not None])
            if lost := self.rollout.take_lost():
                self._reissue(lost)
            self._arrived += 1
            self._changes.notify()

    async def _receive_scores(self) -> None:
        """Record each score in its prompt group when the score arrives, until the task is cancelled."""
        while True:
            await self._changes.until(lambda: self.rewards.pending)
            for result in await self.rewards.poll():
                for flight in self.in_flight:
                    flight.groups.scored(result)
                    self._failures_arrived |= result.failed and result.key[0] in flight.groups.groups
            self._arrived += 1
            self._changes.notify()

    def _reissue(self, uids: set[int]) -> None:
        """Request again the answers that were lost when an engine died.

        A repeated request has the same seed as the lost request, and so gets the same answer from the same weights.
        """
        for flight in self.in_flight:
            flight.groups.reissue(uids)
            self._ship(flight, None)

    def _stop_early(self, groups: PromptGroups) -> None:
        """Stop the run early if too many rewards of the prompt groups `groups` have already failed.

        The run is stopped only if at least `PATIENCE_S` seconds have passed since the first failed reward of the step.
        With dynamic sampling, failed rewards can stop the run only at the end of the step.

        Raises:
            RewardError: too many rewards have failed.
        """
        self.first_failure = self.first_failure or time.monotonic()
        if time.monotonic() < self.first_failure + PATIENCE_S or self.config.algorithm.dynamic_sampling:
            return
        there = [*groups.groups.values()]
        failures = [result for group in there for result in group.results.values() if result.failed]
        total = sum(group.size for group in there)
        if len(failures) > self.config.reward.max_failed_fraction * total:
            raise self._too_many(there, failures, total)

    def _too_many(self, groups: Sequence[Group], failures: Sequence[SampleScores], total: int) -> RewardError:
        """Return a RewardError whose message lists the three most frequent kinds of failure, most frequent first.

        No reward function is called for a failed conversation. If all failures are failed conversations, the message
        therefore counts failed conversations and not failed rewards. If only some failures are failed conversations,
        the message counts failed rewards and adds the number of failed conversations.
        """
        kinds = Counter(result.error for result in failures).most_common(3)
        first = {result.error: result.key for result in reversed(failures)}
        shown = "; ".join(
            f"{error} ({count} x, first in {_name_of(uid)}, sample {number})"
            for error, count, (uid, number) in ((error, count, first[error]) for error, count in kinds)
        )
        limit = self.config.reward.max_failed_fraction
        broken = {one.key for group in groups for one in group.trajectories.values() if one.error}
        conversations = sum(result.key in broken for result in failures)
        what, note = "rewards", ""
        if conversations == len(failures):
            what, note = "conversations", " (the limit for failed rewards applies to failed conversations too)"
        elif conversations:
            note = f" ({conversations} of the rewards failed because their conversations failed)"
        return RewardError(
            f"{len(failures) / total:.0%} of the {what} failed, {len(failures)} of {total}, above "
            f"reward.max_failed_fraction={limit:g}{note}: {shown}"
        )

    def _check_failures(self, groups: Sequence[Group], batch: DataProto) -> None:
        self.first_failure, self._failures_arrived = 0.0, False
        results = [group.results[number] for group in groups for number in range(group.size)]
        failures = [result for result in results if result.failed]
        scores = [score for result in results for score in result.scores]
        if scores and not failures and all(score is None for score in scores):
            environments = any(is_environment_reward(one.path) for one in self.config.reward.functions)
            advice = "return a number for the samples that a function judges"
            if environments:
                advice = (
                    "the environment gave no reward: return a number from its method `step` or `reward`, or from the "
                    "agent program"
                )
            raise RewardError(
                f"no reward function applied to any of {len(results)} samples: all returned None; {advice}"
            )
        if len(failures) > self.config.reward.max_failed_fraction * len(results):
            error = self._too_many(groups, failures, len(results))
            error.batch = batch
            raise error


def _name_of(uid: int) -> str:
    """Return the name of a prompt group for messages. The groups of evaluations have negative uids."""
    return f"prompt group {uid}" if uid >= 0 else "an evaluation"
