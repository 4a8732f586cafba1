"""The life of a prompt group: pending, generating, scoring, ready, then used or dropped.

Pure bookkeeping, without Ray and without clocks. The unit in flight is the group: the G samples of one prompt. Groups
are numbered by `uid` in the order in which they will be trained on, so the step that uses a group is known when it is
shipped: group n is used at step n // prompts_per_step, counted without dropped groups that were replaced. That makes
the staleness bound hard at ship time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rltrain.data.prompts import Prompt
from workers.reward.messages import RewardRequest, RewardResult
from workers.rollout.messages import Completion, Request


class State(StrEnum):
    """Where a group is in its life."""

    PENDING = "pending"
    GENERATING = "generating"
    SCORING = "scoring"
    READY = "ready"


@dataclass
class Group:
    """One prompt and its answers by number; `shipped` is the weight version current when it was shipped.

    The first `samples` answers are sampled and trained on; one more, if `size` asks for it, is the greedy baseline.
    """

    uid: int
    prompt: Prompt
    samples: int
    size: int
    state: State = State.PENDING
    shipped: int = -1
    completions: dict[int, Completion] = field(default_factory=dict)
    results: dict[int, RewardResult] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: what is finished. The prompt is known by the uid."""
        answers: dict[str, Mapping[int, Any]] = {"completions": self.completions, "results": self.results}
        return {"uid": self.uid, "shipped": self.shipped} | {
            name: [asdict(answer) for answer in kept.values()] for name, kept in answers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], *, whole: bool) -> None:
        """Continue from a `state_dict`; who was generating is pending, with the answers that it has unless `whole`."""
        self.shipped = state["shipped"]
        if whole and len(state["completions"]) < self.size:
            return
        for one in state["completions"]:
            self.completions[one["key"][1]] = Completion(**one | {"key": tuple(one["key"])})
        for one in state["results"]:
            plain = {"key": tuple(one["key"]), "scores": tuple(one["scores"])}
            self.results[one["key"][1]] = RewardResult(**one | plain)
        if len(self.completions) == self.size:
            self.state = State.READY if len(self.results) == self.size else State.SCORING

    def request(self, number: int) -> RewardRequest:
        """What to score of an answer."""
        completion = self.completions[number]
        columns = {**self.prompt.columns, "finish_reason": completion.finish_reason}
        return RewardRequest(completion.key, self.prompt.text, completion.text, columns)


class PromptGroups:
    """All groups in flight.

    Args:
        samples_per_prompt: G.
        prompts_per_step: P, groups that one training step uses.
        max_staleness: how many weight versions old a group may be when it is trained on.
        steps: training steps of the run: no group is added that none of them would use.
        greedy_baseline: whether each group has one greedy answer besides its samples.
        first_uid: number of the first group; collections whose groups are in flight together share no number.
        whole: a group is one generation batch, and its answers depend on it to the last bit: none is asked for alone.
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
    ) -> None:
        self.samples_per_prompt, self.prompts_per_step = samples_per_prompt, prompts_per_step
        self.max_staleness, self.steps, self.greedy_baseline = max_staleness, steps, greedy_baseline
        self.whole = whole
        self.groups: dict[int, Group] = {}
        self.used = self.dropped = 0
        self._next_uid = first_uid

    def wanted(self, version: int) -> int:
        """How many new groups may be added so that none will be older than `max_staleness` when it is used.

        At weight version v the next group used belongs to step v; groups up to step v + max_staleness may be in flight.
        """
        last = min(version + self.max_staleness + 1, self.steps)
        return max(0, last * self.prompts_per_step - self.used - len(self.groups))

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Add one pending group a prompt."""
        for prompt in prompts:
            self.groups[self._next_uid] = self.group(self._next_uid, prompt)
            self._next_uid += 1

    def group(self, uid: int, prompt: Prompt) -> Group:
        """A new group, not among these yet."""
        return Group(uid, prompt, self.samples_per_prompt, self.samples_per_prompt + self.greedy_baseline)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values."""
        counts = {"next_uid": self._next_uid, "used": self.used, "dropped": self.dropped}
        return counts | {"groups": [group.state_dict() for group in self.groups.values()]}

    def load_state_dict(self, state: Mapping[str, Any], prompt_of: Callable[[int], Prompt]) -> list[RewardRequest]:
        """Continue from a `state_dict`, given the prompt of each uid; returns what has an answer and no score.

        A failed score counts as none: what made it fail may be mended.
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
            for number in group.completions
            if number not in group.results
        ]

    def restored(self, state: Mapping[str, Any], prompt_of: Callable[[int], Prompt]) -> Group:
        """The group of one's `state_dict`, after `load_state_dict`: that in flight, or else a copy of one dropped."""
        if (group := self.groups.get(state["uid"])) is None:
            group = self.group(state["uid"], prompt_of(state["uid"]))
            group.load_state_dict(state, whole=False)
        return group

    def ship(self, version: int | None) -> list[Group]:
        """Pending groups, now generating with the weights `version`; None: only those that were shipped before."""
        pending = [group for group in self.groups.values() if group.state is State.PENDING]
        shipped = [group for group in pending if version is not None or group.shipped >= 0]
        for group in shipped:
            group.state = State.GENERATING
            if version is not None and group.shipped < 0:
                group.shipped = version
        return shipped

    def generated(self, completion: Completion) -> RewardRequest | None:
        """Take one finished answer and return what to score; None for a group that is gone, or a second copy."""
        uid, number = completion.key
        group = self.groups.get(uid)
        if group is None or number in group.completions or group.state is State.PENDING:
            return None
        group.completions[number] = completion
        if len(group.completions) == group.size:
            group.state = State.SCORING
        return group.request(number)

    def scored(self, result: RewardResult) -> None:
        """Take one score; the group is ready when all its samples are scored."""
        uid, number = result.key
        group = self.groups.get(uid)
        if group is None or number in group.results or number not in group.completions:
            return
        group.results[number] = result
        if len(group.results) == group.size:
            assert group.state is State.SCORING, f"group {uid} is scored while {group.state}"
            group.state = State.READY

    def reissue(self, uids: Iterable[int]) -> None:
        """Ask anew for what these groups still miss, for instance after the death of their engine.

        Finished answers and their scores stay, and so does the version that the group was first shipped with.
        """
        for uid in uids:
            group = self.groups.get(uid)
            if group is not None and group.state is State.GENERATING:
                group.state = State.PENDING

    def drop(self, uid: int, *, replace: bool) -> None:
        """Give a group up: it is counted. Another may take its place in the step, or the place stays empty."""
        del self.groups[uid]
        self.dropped += 1
        self.used += not replace

    def oldest(self, count: int) -> list[Group]:
        """The `count` groups that are next to be used, or as many as there are, whatever their state."""
        return [self.groups[uid] for uid in sorted(self.groups)[:count]]

    def answered(self, count: int) -> list[Group]:
        """The oldest `count` groups, when all their answers are there, scored or not. Else an empty list."""
        return self._oldest_in(count, {State.SCORING, State.READY})

    def ready(self, count: int) -> list[Group]:
        """The oldest `count` groups, when all of them are ready. Else an empty list."""
        return self._oldest_in(count, {State.READY})

    def take(self, count: int) -> list[Group]:
        """The oldest `count` groups, when all of them are ready; they are used from then on. Else an empty list."""
        taken = self.ready(count)
        self.used += len(taken)
        for group in taken:
            del self.groups[group.uid]
        return taken

    def _oldest_in(self, count: int, states: set[State]) -> list[Group]:
        found = self.oldest(count)
        return found if len(found) == count and all(group.state in states for group in found) else []


def requests_of(group: Group, *, temperature: float, max_tokens: int, seed: int, whole: bool = False) -> list[Request]:
    """One request a missing answer, each with a random stream of its own keyed by (seed, uid, sample).

    `whole`: one for every answer if any is missing, for an engine whose rounding depends on what it computes together.
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
        if whole or number not in group.completions
    ]


def stream_seed(seed: int, uid: int, sample: int) -> int:
    """A 63-bit seed that differs for every (seed, uid, sample): SplitMix64 steps over the three numbers."""
    state = 0
    for word in (seed, uid, sample):
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


_MASK = (1 << 64) - 1
