"""Tests of the buffer of prompt groups that later training steps train on again."""

import json

import pytest

from rltrain.trajectories.prompt_groups import Group, GroupState, trajectory_of
from rltrain.trajectories.reuse_buffer import ReuseBuffer
from tests.unit.trajectories.test_prompt_groups import completion, prompt, score


def group(uid, *, answers=2, shipped=0):
    made = Group(uid, prompt(uid), 2, 2, shipped=shipped)
    made.trajectories = {number: trajectory_of([1], completion(uid, number, shipped)) for number in range(answers)}
    made.results = {number: score(uid, number, float(number)) for number in range(answers)}
    made.state = GroupState.READY
    return made


def uids(groups):
    return [one.uid for one in groups]


def test_a_worked_example_with_two_groups_a_step_for_two_steps():
    buffer, new = ReuseBuffer(groups=2, steps=2), {n: group(n) for n in range(9)}
    assert buffer.choose() == []
    buffer.finish(0, [new[0], new[1], new[2], new[3]], useful={0, 1, 3})  # all answers of group 2 are equal
    assert uids(buffer.choose()) == [3, 1]  # the newest groups first
    buffer.finish(1, [new[4], new[5], new[3], new[1]], useful={1, 3, 4})
    # Groups 0 and 4 were trained on once, and group 4 is newer. Groups 1 and 3 were trained on twice.
    assert uids(buffer.choose()) == [4, 0]
    buffer.finish(2, [new[6], new[4], new[0]], useful={0, 4})
    assert uids(buffer.choose()) == [4]  # groups 0, 1 and 3 were trained on first in step 0, three steps ago
    buffer.finish(3, [new[7], new[8], new[4]], useful=set())
    assert buffer.choose() == []


def test_a_group_that_was_reused_keeps_the_step_in_which_it_was_new():
    buffer, only = ReuseBuffer(groups=1, steps=3), group(0)
    found = []
    for version in range(6):
        chosen = buffer.choose()
        found.append(uids(chosen))
        buffer.finish(version, chosen or [only] * (version == 0), useful={0})
    assert found == [[], [0], [0], [0], [], []]


def test_the_state_passes_through_json_and_names_each_group_by_its_prompt():
    buffer = ReuseBuffer(groups=2, steps=3)
    buffer.finish(4, [group(uid, shipped=3) for uid in (5, 6)], useful={5, 6})
    buffer.finish(5, buffer.choose()[:1], useful=set())
    state = json.loads(json.dumps(buffer.state_dict()))
    assert [(one["uid"], one["prompt"], one["first"], one["times"]) for one in state] == [(5, 5, 4, 1), (6, 6, 4, 2)]
    again = ReuseBuffer(groups=2, steps=3)
    again.load_state_dict(state, lambda uid, index: Group(uid, prompt(index), 2, 2))
    assert json.loads(json.dumps(again.state_dict())) == state
    assert uids(again.choose()) == uids(buffer.choose()) == [5, 6]
    assert uids(again.of([6, 5])) == [6, 5]
    assert again.choose()[0].shipped == 3


def test_a_group_that_lacks_answers_is_refused():
    buffer = ReuseBuffer(groups=2, steps=3)
    buffer.finish(0, [group(5, answers=1)], useful={5})
    with pytest.raises(ValueError, match="prompt group 5 of the reuse buffer is not complete"):
        buffer.load_state_dict(buffer.state_dict(), lambda uid, index: Group(uid, prompt(index), 2, 2))
