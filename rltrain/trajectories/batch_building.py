"""Batches of prompt groups: one row per answer, with its tokens, texts and scores."""

from collections.abc import Sequence

import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.reward_config import RewardFunctionConfig, RewardModelConfig
from rltrain.settings.schema import Config
from rltrain.trajectories.prompt_groups import Group
from rltrain.trajectories.scoring import of_outcome, on_last_token, weighted_sum


def mean_score(groups: Sequence[Group], config: Config) -> float:
    """Compute the mean over all samples of these groups that have a score; 0 if there are none."""
    batch = to_batch(groups, config.reward.components)
    scores = batch.batch["scores"][batch.batch["valid"]]
    return float(scores.mean()) if len(scores) else 0.0


def answers_of(groups: Sequence[Group], *, baseline: bool = False) -> DataProto:
    """Convert groups with finished answers to a batch whose rows are sorted by (uid, sample).

    With `baseline`, the batch has only the greedy answers, one row per group.
    """
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
    """Add the scores of these groups to a batch of their answers.

    A failed or unscored row is not valid, and its tokens are not trained on.
    """
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
    """Convert finished groups to a batch with answers and scores; see `answers_of` and `with_scores`."""
    return with_scores(answers_of(groups, baseline=baseline), groups, components, baseline=baseline)


def _rows(groups: Sequence[Group], *, baseline: bool) -> list[tuple[Group, int]]:
    """Return the group and the answer number of each row, sorted by (uid, number)."""
    return [
        (group, number)
        for group in sorted(groups, key=lambda g: g.uid)
        for number in (range(group.samples, group.size) if baseline else range(group.samples))
    ]


def place_scores(batch: DataProto) -> DataProto:
    """Add `response_mask` and `token_level_scores`.

    `response_mask` is False in rows that are not valid. `token_level_scores` has the row's score on its last trained
    token and 0 elsewhere.
    """
    mask = batch.batch["valid"].repeat_interleave(batch.lengths("responses"))
    batch = batch.with_values("responses", response_mask=mask)
    return batch.with_values("responses", token_level_scores=on_last_token(batch, batch.batch["scores"].float()))
