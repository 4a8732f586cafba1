"""Tests of the numbers of correct answers of groups, which measure the difficulty of their prompts."""

import pytest

from rltrain.base.errors import RewardError
from rltrain.settings.compose import compose
from rltrain.trajectories.correct_answers import correct_answers
from rltrain.trajectories.prompt_groups import Group, trajectory_of
from tests.unit.trajectories.test_prompt_groups import prompt
from workers.reward.messages import SampleScores
from workers.rollout.messages import Completion

EXACT = "{name: exact, path: 'x.py:exact', success: 1.0}"
STYLE = "{name: style, path: 'x.py:style', weight: 5.0}"


def config(*overrides, functions=(EXACT, STYLE)):
    return compose([f"reward.functions=[{','.join(functions)}]", "rollout.max_response_length=8", *overrides])[0]


def group(uid, *answers, size=None):
    """Make a group from pairs (scores, finish reason); the scores are None if the reward failed."""
    made = Group(uid, prompt(uid), size or len(answers), len(answers))
    for number, (scores, reason) in enumerate(answers):
        answer = Completion((uid, number), [3] * 8, [-0.5] * 8, reason, [0] * 8, "")
        made.trajectories[number] = trajectory_of([1], answer)
        failed = scores is None
        made.results[number] = SampleScores((uid, number), scores or (None, None), failed=failed)
    return made


RIGHT, WRONG = ((1.0, 0.0), "stop"), ((0.0, 1.0), "stop")


def test_the_reward_functions_decide_which_answers_are_correct_and_weights_do_not_matter():
    groups = [group(7, RIGHT, WRONG, RIGHT), group(4, WRONG, WRONG), group(9, RIGHT)]
    assert correct_answers(groups, config()) == {7: (2, 3), 4: (0, 2), 9: (1, 1)}


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.reward_shaping.overlong_buffer=4", "algorithm.reward_shaping.bias=-3",
        "algorithm.reward_shaping.group_length_weight=1",
    ],
)  # fmt: skip
def test_C8_shaping_and_length_penalties_do_not_change_the_success_of_a_prompt(override):
    groups = [group(0, RIGHT, WRONG, RIGHT)]
    assert correct_answers(groups, config(override)) == correct_answers(groups, config()) == {0: (2, 3)}


def test_failed_and_undecided_answers_are_not_judged():
    undecided = ((None, 1.0), "stop")
    groups = [group(0, RIGHT, (None, "stop"), undecided), group(1, undecided, (None, "stop"))]
    assert correct_answers(groups, config()) == {0: (1, 1), 1: (0, 0)}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.seed=0", (2, 3)),
        ("algorithm.mask_truncated=true", (2, 3)),
        ("algorithm.suppress_truncated=true", (1, 3)),
        ("algorithm.exclude_truncated=true", (1, 2)),
    ],
)
def test_a_cut_answer_counts_as_the_algorithm_says(override, expected):
    groups = [group(0, RIGHT, ((1.0, 0.0), "length"), WRONG)]
    assert correct_answers(groups, config(override)) == {0: expected}


def test_a_greedy_baseline_is_not_counted():
    assert correct_answers([group(0, RIGHT, WRONG, RIGHT, size=2)], config()) == {0: (1, 2)}


def test_without_a_function_that_decides_there_is_an_error_with_the_way_out():
    with pytest.raises(RewardError, match=r"data\.difficulty: no reward function decides .*; set `success` for a rewa"):
        correct_answers([group(0, ((1.0,), "stop"), ((0.0,), "stop"))], config(functions=[STYLE]))
    assert correct_answers([group(0, ((None,), "stop"))], config(functions=[STYLE])) == {0: (0, 0)}
