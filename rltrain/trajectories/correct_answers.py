"""Counts the correct answers of prompt groups, in order to measure the difficulty of prompts."""

from collections.abc import Sequence

import torch

from rltrain.base.errors import RewardError
from rltrain.settings.schema import Config
from rltrain.trajectories.prompt_groups import Group
from rltrain.trajectories.scoring import component_matrix, successes


def correct_answers(groups: Sequence[Group], config: Config) -> dict[int, tuple[int, int]]:
    """Return a dict that maps each group's uid to (number of correct answers, number of judged answers).

    The setting `success` in a reward function's config, or the function's `RewardResult.success`, decides whether an
    answer is correct. An answer is judged if at least one reward function decides whether the answer is correct.
    Shaping and length penalties do not affect whether an answer is correct. With `algorithm.suppress_truncated`, a
    judged answer that was cut at the length limit counts as wrong. With `algorithm.exclude_truncated`, answers that
    were cut at the length limit are not included in the number of judged answers. The greedy baseline answers of ReMax
    are included neither in the number of correct answers nor in the number of judged answers.

    Raises:
        RewardError: answers have scores, but no reward function decides whether any answer is correct.
    """
    rows = [(group, number) for group in groups for number in range(group.samples)]
    results = [group.results[number] for group, number in rows]
    matrix = component_matrix(results)
    correct = successes(matrix, [None if r.failed else r.success for r in results], config.reward.components)
    if bool(correct.isnan().all()) and not bool(matrix.isnan().all()):
        raise RewardError(
            "data.difficulty: no reward function decides whether an answer is correct, so no prompt has a success "
            "rate; set `success` for a reward function, or return RewardResult.success"
        )
    cut = torch.tensor([group.trajectories[number].finish_reason == "length" for group, number in rows])
    if config.algorithm.suppress_truncated:
        correct = torch.where(cut & ~correct.isnan(), 0.0, correct)
    elif config.algorithm.exclude_truncated:
        correct = correct.masked_fill(cut, torch.nan)
    counts = {group.uid: (0, 0) for group in groups}
    for (group, _), value in zip(rows, correct.tolist(), strict=True):
        right, judged = counts[group.uid]
        counts[group.uid] = (right + (value == 1), judged + (value == value))
    return counts
