"""Prompts in, finished batches out: ships groups to the engines, answers to the reward workers, and waits for both.

One driver for synchronous and asynchronous runs: `answers` ships what the staleness bound allows and waits for the
oldest groups only, `scored` waits for their scores, and `advance`, called while the training ranks compute, keeps
answers and scores moving meanwhile.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rltrain.algorithms import required_columns
from rltrain.base.errors import RewardError
from rltrain.base.poll_interval import pause
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.data.prompts import Prompt, PromptOrder, PromptSet
from rltrain.settings.reward_config import RewardFunctionConfig, RewardModelConfig
from rltrain.settings.schema import Config
from rltrain.trajectories.prompt_groups import Group, PromptGroups, State, requests_of
from rltrain.trajectories.reward_models import RewardModel, with_model_scores
from rltrain.trajectories.scoring import flat_rows, of_outcome, on_last_token, shaped_scores, weighted_sum
from workers.reward.messages import RewardResult
from workers.reward.pool import RewardPool
from workers.rollout.pool import RolloutPool

PATIENCE_S = 10.0  # after the first failed reward of a step; what fails fast is seen as a whole
EVAL_SEED = 0x5EED  # added to the run's seed, so that an evaluation never replays a training stream


@dataclass(frozen=True)
class _Flight:
    """Groups in flight together, and how their answers are sampled."""

    groups: PromptGroups
    temperature: float
    seed: int


@dataclass
class _Step:
    """One step, `open` until its batch is whole: groups it will have, replacements left, all seen, and uids dropped."""

    places: int
    refills: int
    open: bool = True
    seen: dict[int, Group] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)


class Collector:
    """Everything between the prompts and the trainer.

    Consumes prompts in the order of the run; produces batches of finished groups; waits for engines and reward workers;
    is unblocked by their answers.

    Args:
        config: the whole config.
        rollout: the engines.
        rewards: the reward workers.
        prompts: those to train on.
        models: the reward models, which score a group when all else of it is there.
    """

    def __init__(
        self,
        config: Config,
        *,
        rollout: RolloutPool,
        rewards: RewardPool,
        prompts: PromptSet,
        models: Sequence[RewardModel] = (),
    ) -> None:
        self.config, self.rollout, self.rewards, self.prompts = config, rollout, rewards, prompts
        self.models = models
        self.order = PromptOrder(len(prompts), config.trainer.seed, config.data.shuffle)
        algorithm = config.algorithm
        self.groups = PromptGroups(
            samples_per_prompt=config.rollout.samples_per_prompt,
            prompts_per_step=config.trainer.prompts_per_step,
            max_staleness=config.trainer.max_staleness,
            steps=config.trainer.total_steps,
            whole=config.trainer.deterministic,
            greedy_baseline="baseline_rewards" in required_columns(algorithm.advantage_estimator, algorithm.loss_mode),
        )
        self.training = _Flight(self.groups, config.rollout.temperature, config.trainer.seed)
        self.in_flight = [self.training]
        self.step = _Step(places=0, refills=0, open=False)
        self.first_failure = 0.0  # of this step, by the clock; 0: none
        self.last_shipped = 0.0  # anything at all to the engines, by the clock
        rollout.beside = lambda: rewards.calls  # whose workers are given more by `_pump` alone
        self.meanwhile: Callable[[], None] = lambda: None  # called while it waits; may raise, and then nothing is lost

    def collect(self, version: int) -> DataProto:
        """Answers with their scores, taken at once, where there is nothing to do in between."""
        batch = self.scored(self.answers(version))
        self.take()
        return batch

    def answers(self, version: int) -> DataProto:
        """The next `prompts_per_step` groups, sampled with weights at most `max_staleness` versions before `version`.

        Their scores may still be under way: `scored` adds them. With dynamic sampling, groups of one outcome are
        replaced while the step may generate more, and left out after that; so there may be fewer groups.
        """
        wanted, batches = self.config.trainer.prompts_per_step, self.config.algorithm.dynamic_sampling
        if not self.step.open:  # else it goes on where a stopped run left it
            self.step = _Step(places=wanted, refills=max(0, batches - 1) * wanted)
        self._draw(version)
        while True:
            if batches:
                self._drop_flat(self.step)
                self._draw(version)
            groups = self.groups.answered(self.step.places)
            if groups and (not batches or all(group.state is State.READY for group in groups)):
                break
            self._pump()
        oldest = min(group.shipped for group in groups)
        assert version - oldest <= self.groups.max_staleness, f"a group of version {oldest} is too old for {version}"
        return answers_of(groups)

    def scored(self, batch: DataProto) -> DataProto:
        """Adds to a batch from `answers` its scores, as soon as all are there; `take` ends the step.

        With dynamic sampling a batch that is a single group of one outcome trains nothing, and `meta_info` has metrics
        of all groups that were generated. Raises RewardError when more samples failed than `reward.max_failed_fraction`
        allows.
        """
        step, components = self.step, self.config.reward.components
        while not (groups := self.groups.ready(step.places)):
            self._pump()
        with_model_scores(groups, self.models)
        batch = with_scores(batch, groups, components)
        if self.groups.greedy_baseline:
            batch = self._with_baselines(batch, groups)
        generated = list((step.seen | {group.uid: group for group in groups}).values())
        self._check_failures(generated, batch)
        if self.config.algorithm.dynamic_sampling:
            batch = self._without_flat(batch)
            batch.meta_info["reward/mean_generated"] = _mean_score(generated, self.config)
            batch.meta_info["rollout/groups_dropped"] = float(len(step.dropped))
            batch.meta_info["rollout/groups_missing"] = float(self.config.trainer.prompts_per_step - step.places)
        batch.meta_info["dropped"] = sorted(step.dropped)
        return batch

    def take(self) -> None:
        """Count the step's groups as used; until then, a checkpoint has the step still ahead."""
        self.groups.take(self.step.places)
        self.step.open = False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values: where the order of prompts is, and the groups in flight."""
        step = self.step
        unfinished = {
            "places": step.places,
            "refills": step.refills,
            "dropped": sorted(step.dropped),
            "seen": [group.state_dict() for group in step.seen.values()],
        }
        return {
            "order": self.order.state_dict(),
            "groups": self.groups.state_dict(),
            "step": unfinished if step.open else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: what engines and reward workers have in hand now is never taken."""
        self.rollout.abort()
        self.rewards.abort()
        self.order.load_state_dict(state["order"])
        self.in_flight, self.first_failure = [self.training], 0.0
        self.rewards.submit(self.groups.load_state_dict(state["groups"], self._prompt))
        self.step = _Step(places=0, refills=0, open=False)
        if (kept := state["step"]) is not None:
            self.step = _Step(kept["places"], kept["refills"], dropped=set(kept["dropped"]))
            for one in kept["seen"]:
                group = self.groups.restored(one, self._prompt)
                if group.state is State.READY:  # else a failed score is asked for again, and it is looked at anew
                    self.step.seen[group.uid] = group

    def _prompt(self, uid: int) -> Prompt:
        """The prompt of a group: uids count through the order of the run."""
        return self.prompts[self.order.at(uid)]

    def advance(self) -> None:
        """Pass on what there is, without waiting, and see that the engines are alive."""
        if self.rollout.pending or self.rewards.pending:
            self._pump(wait=False)
        else:
            self.rollout.look()

    def _draw(self, version: int) -> None:
        """Add and ship as many new groups as the state allows."""
        self.groups.add([self.prompts[index] for index in self.order.next(self.groups.wanted(version))])
        self._ship(self.training, version)

    def _drop_flat(self, step: "_Step") -> None:
        """Drop the finished groups whose answers all have one outcome, unless the step would have none at all."""
        while fresh := self._unseen(step):
            with_model_scores(fresh, self.models)
            for group in fresh:
                stays = (step.places == 1 and not step.refills) or self._fails(step, group)
                flat = not stays and flat_rows(to_batch([group], self.config.reward.components), self.config).all()
                step.seen[group.uid] = group  # not before, as a function of the user's may have raised
                if not flat:
                    continue
                replaced = step.refills > 0
                self.groups.drop(group.uid, replace=replaced)
                step.dropped.add(group.uid)
                step.refills, step.places = step.refills - replaced, step.places - (not replaced)
                if replaced and not step.refills:
                    break  # from here on all must be finished

    def _fails(self, step: "_Step", group: Group) -> bool:
        """Whether all rewards of this group failed and more fail than may: a resumed run asks for them again."""
        if not all(result.failed for result in group.results.values()):
            return False
        failed = sum(result.failed for one in (*step.seen.values(), group) for result in one.results.values())
        return failed > self.config.reward.max_failed_fraction * self.config.trainer.prompts_per_step * group.size

    def _unseen(self, step: "_Step") -> list[Group]:
        """Finished groups that this step would use, and that were not looked at; later steps look at their own."""
        oldest = self.groups.oldest(step.places)
        ready = [group for group in oldest if group.state is State.READY]
        if not step.refills and len(ready) < len(oldest):  # if all lack spread, timing must not say which one is left
            return []
        return [group for group in ready if group.uid not in step.seen]

    def _with_baselines(self, batch: DataProto, groups: Sequence[Group]) -> DataProto:
        """Adds `baseline_rewards`: the greedy answer's score, shaped like the others. No score: rows are not valid."""
        greedy = to_batch(groups, self.config.reward.components, baseline=True)
        scored, samples = greedy.batch["valid"], self.config.rollout.samples_per_prompt
        valid = batch.batch["valid"] & scored.repeat_interleave(samples)
        columns = {
            "valid": valid,
            "failed": batch.batch["failed"] | greedy.batch["failed"].repeat_interleave(samples),
            "baseline_rewards": shaped_scores(greedy, self.config).scores.repeat_interleave(samples),
        }
        return place_scores(batch.pop(["valid", "failed"])[1].union(DataProto.from_dict(columns)))

    def _without_flat(self, batch: DataProto) -> DataProto:
        """Masks a group of one outcome: the step's last one, where there was no other."""
        trained = ~flat_rows(batch, self.config).repeat_interleave(batch.lengths("responses"))
        return batch.with_values("responses", response_mask=batch.values("response_mask") & trained)

    def evaluate(self, prompts: Sequence[Prompt], *, greedy: bool) -> DataProto:
        """One answer to each prompt, at the run's temperature or greedy, beside whatever is in flight for training."""
        count = len(prompts)
        once = PromptGroups(samples_per_prompt=1, prompts_per_step=count, max_staleness=0, steps=1, first_uid=-count)
        once.add(prompts)
        temperature = 0.0 if greedy else self.config.rollout.temperature
        flight = _Flight(once, temperature, self.config.trainer.seed + EVAL_SEED)
        self.in_flight.append(flight)
        self._ship(flight, 0)
        while not (groups := once.take(count)):
            self._pump()
        self.in_flight.remove(flight)
        with_model_scores(groups, self.models)
        batch = to_batch(groups, self.config.reward.components)
        self._check_failures(groups, batch)
        return batch

    def _ship(self, flight: _Flight, version: int | None) -> None:
        limit, whole = self.config.rollout.max_response_length, self.config.trainer.deterministic
        if shipped := flight.groups.ship(version):
            self.last_shipped = time.monotonic()
            self.rollout.submit(
                [
                    requests_of(group, temperature=flight.temperature, max_tokens=limit, seed=flight.seed, whole=whole)
                    for group in shipped
                ]
            )

    def _pump(self, *, wait: bool = True) -> None:
        """Pass finished answers on to be scored, and scores on to their groups.

        `wait`: for what comes next, while the training ranks have nothing to do.
        """
        assert self.rollout.pending or self.rewards.pending, "groups are unfinished, and nobody works on them"
        if wait:
            self.meanwhile()  # it may wait for training ranks, which calls `advance`: all may have arrived after it
            self.rollout.mend()
        wait_s = pause(self.last_shipped, 0.05) if wait else 0.0
        answers = self.rollout.poll(wait_s) if self.rollout.pending else []
        requests = [flight.groups.generated(answer) for answer in answers for flight in self.in_flight]
        self.rewards.submit([request for request in requests if request is not None])
        if lost := self.rollout.take_lost():
            self._reissue(lost)
        for result in self.rewards.poll(0.5 if wait and not self.rollout.pending else 0.0):
            for flight in self.in_flight:
                flight.groups.scored(result)
                if wait and result.failed and result.key[0] in flight.groups.groups:
                    self._stop_early(flight.groups)

    def _reissue(self, uids: set[int]) -> None:
        """Ask again for what died with an engine; the answers are the same, as each request has its own seed."""
        for flight in self.in_flight:
            flight.groups.reissue(uids)
            self._ship(flight, None)

    def _stop_early(self, groups: PromptGroups) -> None:
        """Do not wait for the rest for long where more have failed already than the whole step may."""
        self.first_failure = self.first_failure or time.monotonic()
        if time.monotonic() < self.first_failure + PATIENCE_S or self.config.algorithm.dynamic_sampling:
            return
        there = groups.groups.values()
        failures = [result for group in there for result in group.results.values() if result.failed]
        total = sum(group.size for group in there)
        if len(failures) > self.config.reward.max_failed_fraction * total:
            raise self._too_many(failures, total)

    def _too_many(self, failures: Sequence[RewardResult], total: int) -> RewardError:
        """An error that shows each kind of failure once, the most frequent first."""
        kinds = Counter(result.error for result in failures).most_common(3)
        first = {result.error: result.key for result in reversed(failures)}
        shown = "; ".join(
            f"{error} ({count} x, first in prompt group {uid}, sample {number})"
            for error, count, (uid, number) in ((error, count, first[error]) for error, count in kinds)
        )
        limit = self.config.reward.max_failed_fraction
        return RewardError(
            f"{len(failures) / total:.0%} of the rewards failed, {len(failures)} of {total}, above "
            f"reward.max_failed_fraction={limit:g}: {shown}"
        )

    def _check_failures(self, groups: Sequence[Group], batch: DataProto) -> None:
        self.first_failure = 0.0
        results = [group.results[number] for group in groups for number in range(group.size)]
        failures = [result for result in results if result.failed]
        if not failures and all(score is None for result in results for score in result.scores):
            raise RewardError(
                f"no reward function applied to any of {len(results)} samples: all returned None; return a "
                "number for the samples that a function judges"
            )
        if len(failures) > self.config.reward.max_failed_fraction * len(results):
            error = self._too_many(failures, len(results))
            error.batch = batch
            raise error


def _mean_score(groups: Sequence[Group], config: Config) -> float:
    """Mean score of all these groups' samples that have one."""
    batch = to_batch(groups, config.reward.components)
    scores = batch.batch["scores"][batch.batch["valid"]]
    return float(scores.mean()) if len(scores) else 0.0


def answers_of(groups: Sequence[Group], *, baseline: bool = False) -> DataProto:
    """Answered groups as a batch, rows by (uid, sample); or, with `baseline`, their greedy answers, one row a group."""
    rows = [(group, group.completions[number]) for group, number in _rows(groups, baseline=baseline)]
    responses = jagged([completion.token_ids for _, completion in rows], torch.int64)
    batch = DataProto.from_dict(
        {
            "prompts": jagged([group.prompt.ids for group, _ in rows], torch.int64),
            "responses": responses,
            "rollout_log_probs": jagged([c.log_probs for _, c in rows], torch.float32),
            "policy_version": jagged([c.versions for _, c in rows], torch.int64),
            "uid": torch.tensor([group.uid for group, _ in rows]),
        },
        {
            "finish_reason": [c.finish_reason for _, c in rows],
            "prompt_text": [group.prompt.text for group, _ in rows],
            "response_text": [c.text for _, c in rows],
        },
    )
    return batch.with_values("responses", response_mask=torch.ones(len(batch.values("responses")), dtype=torch.bool))


def with_scores(
    batch: DataProto,
    groups: Sequence[Group],
    components: Sequence[RewardFunctionConfig | RewardModelConfig],
    *,
    baseline: bool = False,
) -> DataProto:
    """Adds to the answers of these groups their scores. A failed or unscored row is not valid and trains nothing."""
    results = [group.results[number] for group, number in _rows(groups, baseline=baseline)]
    nan = float("nan")
    matrix = torch.tensor(
        [[nan if s is None or r.failed else s for s in r.scores] for r in results], dtype=torch.float32
    )
    totals = weighted_sum(matrix, components)
    columns = DataProto.from_dict(
        {
            "valid": ~totals.isnan(),
            "failed": torch.tensor([r.failed for r in results]),
            "scores": totals.nan_to_num(0.0),
            "outcomes": weighted_sum(of_outcome(matrix, components), components),
            "reward_components": matrix,
            "failed_function": torch.tensor([r.failed_function for r in results]),
        },
        {"reward_error": [r.error for r in results]},
    )
    return place_scores(batch.union(columns))


def to_batch(
    groups: Sequence[Group], components: Sequence[RewardFunctionConfig | RewardModelConfig], *, baseline: bool = False
) -> DataProto:
    """Finished groups as a batch; see `answers_of` and `with_scores`."""
    return with_scores(answers_of(groups, baseline=baseline), groups, components, baseline=baseline)


def _rows(groups: Sequence[Group], *, baseline: bool) -> list[tuple[Group, int]]:
    """The (group, number of an answer) of each row, by (uid, number)."""
    return [
        (group, number)
        for group in sorted(groups, key=lambda g: g.uid)
        for number in (range(group.samples, group.size) if baseline else range(group.samples))
    ]


def place_scores(batch: DataProto) -> DataProto:
    """Adds `response_mask`, False in rows that are not valid, and `token_level_scores`, on the last trained token."""
    mask = batch.batch["valid"].repeat_interleave(batch.lengths("responses"))
    batch = batch.with_values("responses", response_mask=mask)
    return batch.with_values("responses", token_level_scores=on_last_token(batch, batch.batch["scores"].float()))
