"""Keeps prompt groups that a training step has trained on, so that later steps can train on them again.

A group is kept if its answers have different outcomes, because a group with a single outcome gives no learning signal.
RePO (arXiv 2506.09340) mixes replayed answers of a prompt into the prompt's new group. The reuse buffer replays whole
groups, so the advantages of a replayed group are computed from the group's own answers alone.

A training step takes at most `trainer.reuse.groups` groups from the reuse buffer, and the other groups of the step are
new. A group that was first trained on in step f can be taken from the buffer in the steps f + 1 to f +
`trainer.reuse.steps`. The engines run at most `trainer.max_staleness` - `trainer.reuse.steps` steps ahead of training,
so no answer is ever older than `trainer.max_staleness` allows. Groups that were trained on least often are taken first.
Among groups that were trained on equally often, the newest groups are taken first. The choice of groups depends only on
finished training steps, and not on the order in which engines finish answers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltrain.trajectories.prompt_groups import Group, GroupState


@dataclass
class _Kept:
    """A prompt group in the reuse buffer, with the weight version at its first use in training and its number of uses.

    Attributes:
        group: the prompt group, with its answers and scores.
        first: version of the policy weights just before the first training step that trained on the prompt group.
        times: number of training steps that have trained on the prompt group so far.
    """

    group: Group
    first: int
    times: int = 1


class ReuseBuffer:
    """The groups that later training steps may train on again.

    Args:
        groups: maximum number of prompt groups that a training step takes from the buffer.
        steps: number of training steps in which a prompt group may be taken from the buffer, counted from the step
            after the first step that trained on the prompt group.
    """

    def __init__(self, groups: int, steps: int) -> None:
        self.groups, self.steps = groups, steps
        self._kept: dict[int, _Kept] = {}

    def choose(self) -> list[Group]:
        """Return the groups that the next step trains on again, without removing the groups from the buffer."""
        ordered = sorted(self._kept.values(), key=lambda one: (one.times, -one.group.uid))
        return [one.group for one in ordered[: self.groups]]

    def finish(self, version: int, trained: Sequence[Group], useful: Collection[int]) -> None:
        """Record the groups on which a step has trained, and remove the groups that the next step may no longer take.

        Args:
            version: version of the policy weights just before the training step that has ended.
            trained: all prompt groups on which the step has trained, including those that were taken from the buffer.
            useful: uids of the prompt groups whose answers have different outcomes. A prompt group that is not yet in
                the buffer is kept for later steps only if its uid is in `useful`.
        """
        for group in trained:
            if group.uid in self._kept:
                self._kept[group.uid].times += 1
            elif group.uid in useful:
                self._kept[group.uid] = _Kept(group, version)
        self._kept = {uid: one for uid, one in self._kept.items() if version + 1 - one.first <= self.steps}

    def of(self, uids: Sequence[int]) -> list[Group]:
        """Return the buffer's groups with the given uids, in the order of `uids`."""
        return [self._kept[uid].group for uid in uids]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of the buffer as plain values.

        In the returned state, a prompt group is stored with the index of its prompt instead of the prompt itself.
        """
        return [
            one.group.state_dict() | {"prompt": one.group.prompt.index, "first": one.first, "times": one.times}
            for one in self._kept.values()
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], group: Callable[[int, int], Group]) -> None:
        """Restore the buffer from a state that `state_dict` returned.

        Args:
            state: a state of the buffer that `state_dict` returned.
            group: function that takes a uid and a prompt index, and creates the prompt group.

        Raises:
            ValueError: a prompt group in `state` lacks answers or scores.
        """
        self._kept = {}
        for one in state:
            kept = _Kept(group(one["uid"], one["prompt"]), int(one["first"]), int(one["times"]))
            kept.group.load_state_dict(one, whole=False)
            if kept.group.state is not GroupState.READY:
                raise ValueError(f"prompt group {one['uid']} of the reuse buffer is not complete")
            self._kept[kept.group.uid] = kept
