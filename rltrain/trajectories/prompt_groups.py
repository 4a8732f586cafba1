"""Tracks prompt groups through the stages pending, generating, scoring, ready, and finally used or dropped.

The module `prompt_groups` only does bookkeeping, and uses neither Ray nor a clock. A prompt group consists of the G
samples of one prompt. A group is in flight from the time when it is added until it is used or dropped. To ship a group
means to send the requests for the group's answers to the engines.

The trainer uses prompt groups in the order of their numbers (`uid`). When a group is shipped to the engines, the
training step that will use the group is already known. Group n is used at training step n // prompts_per_step, where n
counts the groups from 0 and leaves out dropped groups that were replaced. Because the step that will use a group is
known in advance, the number of shipped groups can be limited so that no group exceeds the staleness bound. If training
steps may reuse groups of earlier steps, the number of groups to ship is computed as if each later step reused as many
groups as the config allows. Even if training steps reuse groups of earlier steps, no group is used later than the
staleness bound allows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from rltrain.base.random_streams import stream_seed
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.data.prompts import Prompt
from workers.environments.messages import EpisodeRequest
from workers.reward.messages import RewardRequest, SampleScores
from workers.rollout.messages import Completion, Request


class GroupState(StrEnum):
    """The stages in the lifecycle of a prompt group."""

    PENDING = "pending"
    GENERATING = "generating"
    SCORING = "scoring"
    READY = "ready"


@dataclass
class Group:
    """A prompt group: one prompt and the prompt's answers, which are numbered from 0.

    The first `samples` answers of a group are sampled, and the training step trains on them. If `size` is `samples` +
    1, the last answer is the greedy baseline.

    Attributes:
        uid: number of the group.
        prompt: prompt of the group.
        samples: number of the group's answers that are trained on.
        size: number of all answers of the group, including the greedy baseline.
        state: stage of the group in the lifecycle.
        shipped: weight version at the time when the requests for the group's answers were first sent to the engines; -1
            if no request was sent yet.
        trajectories: dict that maps sample numbers to finished trajectories. An answer that was sampled without an
            environment is a trajectory with one turn.
        results: dict that maps the sample number of each scored answer to the answer's scores.
    """

    uid: int
    prompt: Prompt
    samples: int
    size: int
    state: GroupState = GroupState.PENDING
    shipped: int = -1
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    results: dict[int, SampleScores] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the group, including the finished answers and the scores.

        The state of a group does not contain the prompt, which is identified by the uid of the group.
        """
        return {
            "uid": self.uid,
            "shipped": self.shipped,
            "trajectories": [one.state_dict(self.prompt.ids) for one in self.trajectories.values()],
            "results": [asdict(result) for result in self.results.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, whole: bool) -> None:
        """Restore the group from a state that `state_dict` returned.

        A group whose answers were being generated when the state was saved becomes pending, and keeps its finished
        answers unless `whole` is True. Trajectories whose environment failed are generated again.
        """
        self.shipped = state["shipped"]
        finished = [one for one in state["trajectories"] if not one["error"]]
        if whole and len(finished) < self.size:
            return
        for one in finished:
            self.trajectories[one["sample"]] = Trajectory.from_state(one, self.prompt.ids)
        for one in state["results"]:
            plain = {"key": tuple(one["key"]), "scores": tuple(one["scores"])}
            self.results[one["key"][1]] = SampleScores(**one | plain)
        if len(self.trajectories) == self.size:
            self.state = GroupState.READY if len(self.results) == self.size else GroupState.SCORING

    def request(self, number: int) -> RewardRequest:
        """Return the request to score the answer with the sample number `number`."""
        trajectory = self.trajectories[number]
        columns = {
            **self.prompt.columns,
            "finish_reason": trajectory.finish_reason,
            "prompt_messages": self.prompt.messages,
            "response_ids": trajectory.sampled_ids(),
        }
        if trajectory.stop_reason:
            columns |= {
                "environment_messages": list(trajectory.messages),
                "stop_reason": trajectory.stop_reason,
                "environment_reward": trajectory.environment_reward,
            }
        return RewardRequest(trajectory.key, self.prompt.text, trajectory.answer, columns)


class PromptGroups:
    """The prompt groups in flight: all groups that have been added but not yet used or dropped.

    Args:
        samples_per_prompt: number of samples in a group (G).
        prompts_per_step: number of groups that one training step uses (P).
        max_staleness: maximum age of a group when it is trained on, in weight versions.
        steps: number of training steps of the run. `PromptGroups` never adds more groups than `steps` training steps
            use.
        greedy_baseline: whether each group has one greedy answer in addition to its samples.
        first_uid: uid of the first group. Two `PromptGroups` that are in use at the same time must not share uids.
        whole: whether all answers of a group are generated as one batch. The composition of a batch can change answers,
            because the composition affects rounding. If `whole` is True, all answers of a group are always requested
            together.
        reused: maximum number of groups of earlier steps that one training step reuses.
        components: number of reward functions, which is the number of scores in the result of a failed trajectory.
    """

    def __init__(
        self,
        *,
        samples_per_prompt: int,
        prompts_per_step: int,
        max_staleness: int,
        steps: int,
        greedy_baseline: bool = False,
        first_uid: int = 0,
        whole: bool = False,
        reused: int = 0,
        components: int = 0,
    ) -> None:
        self.samples_per_prompt, self.prompts_per_step = samples_per_prompt, prompts_per_step
        self.max_staleness, self.steps, self.greedy_baseline = max_staleness, steps, greedy_baseline
        self.whole, self.reused, self.components = whole, reused, components
        self.groups: dict[int, Group] = {}
        self.used = self.dropped = 0
        self._next_uid = first_uid

    def wanted(self, version: int) -> int:
        """Return the number of groups that may be added without exceeding `max_staleness` for any group.

        At weight version v, the next group to be used belongs to training step v. At weight version v, groups of all
        steps up to v + max_staleness may be in flight, and each step after step v may reuse `reused` groups.
        """
        last = min(version + self.max_staleness + 1, self.steps)
        places = last * self.prompts_per_step - max(0, last - version - 1) * self.reused
        return max(0, places - self.used - len(self.groups))

    def reuse(self, count: int) -> None:
        """Increase the number of used groups by `count`, because the current step reuses `count` earlier groups."""
        self.used += count

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Add one pending prompt group for each prompt."""
        for prompt in prompts:
            self.groups[self._next_uid] = self.group(self._next_uid, prompt)
            self._next_uid += 1

    def group(self, uid: int, prompt: Prompt) -> Group:
        """Return a new group with the number `uid`, without adding the group to the groups in flight."""
        return Group(uid, prompt, self.samples_per_prompt, self.samples_per_prompt + self.greedy_baseline)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all groups, as plain values that a checkpoint can store."""
        counts = {"next_uid": self._next_uid, "used": self.used, "dropped": self.dropped}
        return counts | {"groups": [group.state_dict() for group in self.groups.values()]}

    def load_state_dict(self, state: Mapping[str, Any], prompt_of: Callable[[int], Prompt]) -> list[RewardRequest]:
        """Restore the groups from a state that `state_dict` returned.

        If the scoring of an answer failed, the answer is scored again, because the user has possibly fixed the cause of
        the failure.

        Args:
            state: a state that `state_dict` returned.
            prompt_of: function that returns the prompt of the group with a given uid.

        Returns:
            The requests to score the answers that have no score.
        """
        self._next_uid, self.used, self.dropped = state["next_uid"], state["used"], state["dropped"]
        self.groups = {}
        for one in state["groups"]:
            self.groups[one["uid"]] = group = self.group(one["uid"], prompt_of(one["uid"]))
            scored = [result for result in one["results"] if not result["failed"]]
            group.load_state_dict(one | {"results": scored}, whole=self.whole)
        return [
            group.request(number)
            for group in self.groups.values()
            for number in group.trajectories
            if number not in group.results
        ]

    def restored(self, state: Mapping[str, Any], prompt_of: Callable[[int], Prompt]) -> Group:
        """Return the group that a state from `Group.state_dict` describes.

        A dropped group is no longer in flight. `restored` creates a dropped group again from the state, but does not
        add the group to the groups in flight. Call `PromptGroups.load_state_dict` before `restored`.
        """
        if (group := self.groups.get(state["uid"])) is None:
            group = self.group(state["uid"], prompt_of(state["uid"]))
            group.load_state_dict(state, whole=False)
        return group

    def ship(self, version: int | None) -> list[Group]:
        """Mark the pending groups as being generated with the weights of version `version`, and return the groups.

        A group that was shipped before keeps the weight version of its first shipment. If `version` is None, `ship`
        ships only pending groups that were already shipped before.
        """
        pending = [group for group in self.groups.values() if group.state is GroupState.PENDING]
        shipped = [group for group in pending if version is not None or group.shipped >= 0]
        for group in shipped:
            group.state = GroupState.GENERATING
            if version is not None and group.shipped < 0:
                group.shipped = version
        return shipped

    def generated(self, answer: Completion | Trajectory) -> RewardRequest | None:
        """Record one finished answer or trajectory, and return the request to score the answer or trajectory.

        Return None if the group no longer exists, if the group is pending, if the answer is a duplicate, or if the
        environment of the trajectory failed. A trajectory whose environment failed gets the same result as an answer
        whose reward function failed.
        """
        uid, number = answer.key
        group = self.groups.get(uid)
        if group is None or number in group.trajectories or group.state is GroupState.PENDING:
            return None
        trajectory = answer if isinstance(answer, Trajectory) else trajectory_of(group.prompt.ids, answer)
        if trajectory.error:  # The row of a failed trajectory consists of the prompt alone.
            trajectory = replace(trajectory, turns=[Turn(group.prompt.ids, (), (), (), "abort")])
        group.trajectories[number] = trajectory
        if len(group.trajectories) == group.size:
            group.state = GroupState.SCORING
        if not trajectory.error:
            return group.request(number)
        failed = SampleScores(trajectory.key, (None,) * self.components, failed=True, error=trajectory.error)
        self.scored(failed)
        return None

    def scored(self, result: SampleScores) -> None:
        """Record the scores of one answer. A group becomes ready when all its answers are scored."""
        uid, number = result.key
        group = self.groups.get(uid)
        if group is None or number in group.results or number not in group.trajectories:
            return
        group.results[number] = result
        if len(group.results) == group.size:
            assert group.state is GroupState.SCORING, f"group {uid} has all scores but is in the stage {group.state}"
            group.state = GroupState.READY

    def reissue(self, uids: Iterable[int]) -> None:
        """Make the given groups pending again, so that their missing answers are requested again.

        For example, `reissue` is called after an engine has died. A reissued group keeps its finished answers, their
        scores, and the weight version of its first shipment.
        """
        for uid in uids:
            group = self.groups.get(uid)
            if group is not None and group.state is GroupState.GENERATING:
                group.state = GroupState.PENDING

    def drop(self, uid: int, *, replace: bool) -> None:
        """Remove a prompt group and count it as dropped.

        Args:
            uid: number of the group.
            replace: whether a new group may replace the removed group in its training step. If `replace` is False, the
                training step has one group fewer.
        """
        del self.groups[uid]
        self.dropped += 1
        self.used += not replace

    def oldest(self, count: int) -> list[Group]:
        """Return the next `count` groups in training order, regardless of their stage.

        If there are fewer than `count` groups, return all groups.
        """
        return [self.groups[uid] for uid in sorted(self.groups)[:count]]

    def answered(self, count: int) -> list[Group]:
        """Return the oldest `count` groups if all their answers are finished, else an empty list.

        The answers of the returned groups may still lack scores.
        """
        return self._oldest_in(count, {GroupState.SCORING, GroupState.READY})

    def ready(self, count: int) -> list[Group]:
        """Return the oldest `count` groups if all of them are ready; otherwise an empty list."""
        return self._oldest_in(count, {GroupState.READY})

    def take(self, count: int) -> list[Group]:
        """Remove and return the oldest `count` groups if all of them are ready; otherwise return an empty list.

        Groups that `take` removes count as used.
        """
        taken = self.ready(count)
        self.used += len(taken)
        for group in taken:
            del self.groups[group.uid]
        return taken

    def _oldest_in(self, count: int, states: set[GroupState]) -> list[Group]:
        found = self.oldest(count)
        return found if len(found) == count and all(group.state in states for group in found) else []


def episodes_of(group: Group, *, temperature: float, seed: int) -> list[EpisodeRequest]:
    """Return, for each missing trajectory of a group, a request to run the trajectory in an environment."""
    prompt = group.prompt
    return [
        EpisodeRequest(
            (group.uid, number), prompt.chat, prompt.columns, temperature if number < group.samples else 0.0, seed
        )
        for number in range(group.size)
        if number not in group.trajectories
    ]


def requests_of(group: Group, *, temperature: float, max_tokens: int, seed: int, whole: bool = False) -> list[Request]:
    """Return one generation request for each missing answer of a group.

    Each request has its own random stream, keyed by (seed, uid, sample). If `whole` is True, `requests_of` requests all
    answers, including finished ones, because the rounding of an engine may depend on the composition of the batch.
    """
    return [
        Request(
            (group.uid, number),
            group.prompt.ids,
            temperature if number < group.samples else 0.0,
            max_tokens,
            stream_seed(seed, group.uid, number),
        )
        for number in range(group.size)
        if whole or number not in group.trajectories
    ]


def trajectory_of(prompt_ids: Sequence[int], completion: Completion) -> Trajectory:
    """Convert a prompt and a finished answer to a trajectory with a single turn."""
    c, (uid, sample) = completion, completion.key
    turn = Turn(prompt_ids, c.token_ids, c.log_probs, c.versions, c.finish_reason, c.text)
    return Trajectory(uid, sample, (turn,))
