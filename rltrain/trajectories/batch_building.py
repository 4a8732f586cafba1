"""Builds a batch from prompt groups: each trajectory becomes one row with its tokens, texts and scores."""

import json
from collections.abc import Mapping, Sequence

import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.images import joined
from rltrain.batch.sampled_tokens import sampled_tokens
from rltrain.batch.token_arrays import NOT_RECORDED
from rltrain.batch.trajectory import Trajectory
from rltrain.data.prompts import Prompt
from rltrain.environments.contract import valid_unicode
from rltrain.settings.reward_config import RewardFunctionConfig, RewardModelConfig
from rltrain.settings.schema import Config
from rltrain.trajectories.prompt_groups import Group
from rltrain.trajectories.scoring import component_matrix, successes, weighted_sum


def mean_score(groups: Sequence[Group], config: Config) -> float:
    """Return the mean score of all scored samples in the prompt groups `groups`, or 0 if no sample has a score."""
    batch = to_batch(groups, config.reward.components)
    scores = batch.batch["scores"][batch.batch["valid"]]
    return float(scores.mean()) if len(scores) else 0.0


def answers_of(groups: Sequence[Group], *, baseline: bool = False, experts: bool = False) -> DataProto:
    """Convert groups with finished answers to a batch whose rows are sorted by group number, then by sample number.

    If `baseline` is True, the batch contains only the greedy answers, one row per group. `experts` has the meaning that
    it has in `batch_of`.
    """
    rows = _rows(groups, baseline=baseline)
    batch = batch_of([group.trajectories[number] for group, number in rows], experts=experts)
    batch = with_images(batch, [group.prompt for group, _ in rows])
    texts = {"prompt_text": [group.prompt.text for group, _ in rows]}
    return batch.union(DataProto.from_dict(non_tensors=texts))


def with_images(batch: DataProto, prompts: Sequence[Prompt]) -> DataProto:
    """Add the columns of images to a batch, given the prompt of each row, if a prompt shows images."""
    if all(prompt.images is None for prompt in prompts):
        return batch
    numbers = [[0] * len(prompt.ids) if prompt.images is None else prompt.images.numbers for prompt in prompts]
    files = [joined(() if prompt.images is None else prompt.images.files) for prompt in prompts]
    columns = {"prompt_images": jagged(numbers, torch.int64), "image_files": jagged(files, torch.uint8)}
    return batch.union(DataProto.from_dict(columns))


def batch_of(trajectories: Sequence[Trajectory], *, experts: bool = False) -> DataProto:
    """Convert trajectories to a batch with one row per trajectory, in the order of the trajectories.

    The column `responses` contains the sampled tokens and the observations after the prompt. The column `response_mask`
    is True exactly at the sampled tokens. At observation tokens, `rollout_log_probs` is 0 and `policy_version` is
    `NOT_SAMPLED`. If `experts` is True and the engine recorded the experts of the tokens, the batch has the columns
    `prompt_experts` and `response_experts`. If the trajectories are from an environment, the batch also has columns for
    the numbers of turns, contexts and tool calls, the stop reason, the messages of the conversation, the turn of each
    token, and the starts of new contexts.
    """
    batch = DataProto.from_dict(
        {
            "prompts": jagged([t.prompt_ids for t in trajectories], torch.int64),
            "responses": jagged([t.response_ids() for t in trajectories], torch.int64),
            "rollout_log_probs": jagged([t.log_probs() for t in trajectories], torch.float32),
            "policy_version": jagged([t.versions() for t in trajectories], torch.int64),
            "uid": torch.tensor([t.uid for t in trajectories]),
        },
        {"finish_reason": [t.finish_reason for t in trajectories], "response_text": [t.text for t in trajectories]},
    )
    segments = [segment for t in trajectories for segment in t.segments()]
    lengths = torch.tensor([length for length, _ in segments], dtype=torch.int64)
    mask = torch.tensor([sampled for _, sampled in segments], dtype=torch.bool).repeat_interleave(lengths)
    batch = batch.with_values("responses", response_mask=mask)
    assert torch.equal(sampled_tokens(batch), mask), "the weight version of a sampled token must be 0 or above"
    if experts and any(turn.experts for t in trajectories for turn in t.turns):
        prompts, responses = _experts(trajectories)
        batch = batch.with_values("prompts", prompt_experts=prompts)
        batch = batch.with_values("responses", response_experts=responses)
    if not any(t.stop_reason for t in trajectories):
        return batch
    return batch.union(_environment_columns(trajectories)).with_values(
        "responses", **_turn_columns(trajectories, batch.offsets("responses"))
    )


def _experts(trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of all prompt tokens (P, E) and of all response tokens (R, E), in int16.

    The experts of a token are `NOT_RECORDED` if the engine recorded none, as for the last token of a response. All rows
    of a prompt group get the prompt experts of the group's first row that has some. A forward pass computes their
    common prompt only once, so it cannot use several choices.
    """
    turns = [trajectory.turns[0] for trajectory in trajectories]
    assert all(len(t.turns) == 1 for t in trajectories), "experts are recorded only for answers of one turn"
    sizes = [(len(turn.observation_ids), len(turn.action_ids)) for turn in turns]
    width = max(len(turn.experts) // (sum(size) - 1) for turn, size in zip(turns, sizes, strict=True) if turn.experts)
    experts = torch.full((sum(map(sum, sizes)), width), NOT_RECORDED, dtype=torch.int16)
    parts = experts.split([length for size in sizes for length in size])
    begin, known, of_prompts = 0, list[torch.Tensor](), dict[int, torch.Tensor]()
    for trajectory, turn, (prompt, _) in zip(trajectories, turns, sizes, strict=True):
        recorded = torch.frombuffer(turn.experts, dtype=torch.int16) if turn.experts else experts[:0]
        known.append(recorded.view(-1, width))
        if turn.experts:
            of_prompts.setdefault(trajectory.uid, known[-1][:prompt])
    for trajectory, own, (prompt, response) in zip(trajectories, known, sizes, strict=True):
        experts[begin : begin + len(own)] = own
        if trajectory.uid in of_prompts:
            experts[begin : begin + prompt] = of_prompts[trajectory.uid]
        begin += prompt + response
    return torch.cat(parts[::2]), torch.cat(parts[1::2])


def _turn_columns(trajectories: Sequence[Trajectory], offsets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the per-token columns (N,) of environment trajectories, for the N response tokens of all rows.

    Args:
        trajectories: the trajectories of all rows of the batch, one per row.
        offsets: tensor (B + 1,): the index at which each row's response begins among the N response tokens, followed by
            N.
    """
    context_starts = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    for begin, trajectory in zip(offsets.tolist(), trajectories, strict=False):
        for start in trajectory.context_starts():
            context_starts[begin + start] = True
    return {
        "context_starts": context_starts,
        "turn_index": torch.tensor([n for t in trajectories for n in t.turn_index()], dtype=torch.int64),
        "turn_states": torch.tensor([n for t in trajectories for n in t.turn_states()], dtype=torch.int64),
        "turn_rewards": torch.tensor([r for t in trajectories for r in t.turn_rewards()], dtype=torch.float32),
    }


def _environment_columns(trajectories: Sequence[Trajectory]) -> DataProto:
    """Return the columns that only trajectories in environments have, for metrics and for tables of rollouts."""
    # A trajectory whose environment has failed contains a turn without an action, which is not counted.
    counts = {
        "turns": torch.tensor([0 if t.error else len(t.turns) for t in trajectories]),
        "contexts": torch.tensor([0 if t.error else t.contexts for t in trajectories]),
        "tool_calls": torch.tensor([t.tool_calls for t in trajectories]),
    }
    return DataProto.from_dict(
        counts,
        {
            "stop_reason": [t.stop_reason for t in trajectories],
            "messages": [valid_unicode(json.dumps(list(t.messages), ensure_ascii=False)) for t in trajectories],
        },
    )


def supervised_batch(prompts: Mapping[int, Prompt]) -> DataProto:
    """Return a batch of the prompts' supervised answers; a prompt without a supervised answer gets no row.

    Args:
        prompts: dict that maps the group number (`uid`) of each prompt group to the group's prompt.
    """
    answered = {uid: prompt for uid, prompt in prompts.items() if prompt.supervised_ids is not None}
    batch = DataProto.from_dict(
        {
            "prompts": jagged([prompt.ids for prompt in answered.values()], torch.int64),
            "responses": jagged([prompt.supervised_ids or [] for prompt in answered.values()], torch.int64),
            "uid": torch.tensor([*answered], dtype=torch.int64),
        }
    )
    batch = with_images(batch, list(answered.values()))
    return batch.with_values("responses", response_mask=torch.ones(len(batch.values("responses")), dtype=torch.bool))


def with_scores(
    batch: DataProto,
    groups: Sequence[Group],
    components: Sequence[RewardFunctionConfig | RewardModelConfig],
    *,
    baseline: bool = False,
) -> DataProto:
    """Add the scores of prompt groups to a batch of the groups' answers.

    A row that has no score, or whose reward failed, is marked as not valid, so that the row's tokens are not trained
    on.
    """
    results = [group.results[number] for group, number in _rows(groups, baseline=baseline)]
    matrix = component_matrix(results)
    totals = weighted_sum(matrix, components)
    failed = torch.tensor([r.failed for r in results])
    columns = DataProto.from_dict(
        {
            "valid": ~totals.isnan() & ~failed,
            "failed": failed,
            "scores": totals.nan_to_num(0.0),
            "successes": successes(matrix, [None if r.failed else r.success for r in results], components),
            "reward_components": matrix,
            "failed_function": torch.tensor([r.failed_function for r in results]),
        },
        {"reward_error": [r.error for r in results]},
    )
    return without_invalid(batch.union(columns))


def to_batch(
    groups: Sequence[Group], components: Sequence[RewardFunctionConfig | RewardModelConfig], *, baseline: bool = False
) -> DataProto:
    """Convert finished groups to a batch with answers and scores, by calling `answers_of` and `with_scores`."""
    return with_scores(answers_of(groups, baseline=baseline), groups, components, baseline=baseline)


def _rows(groups: Sequence[Group], *, baseline: bool) -> list[tuple[Group, int]]:
    """Return (group, answer number) for each row of a batch, sorted by group number, then by answer number."""
    return [
        (group, number)
        for group in sorted(groups, key=lambda g: g.uid)
        for number in (range(group.samples, group.size) if baseline else range(group.samples))
    ]


def without_invalid(batch: DataProto) -> DataProto:
    """Set the column `response_mask` to False in all rows that are not valid."""
    valid = batch.batch["valid"].repeat_interleave(batch.lengths("responses"))
    return batch.with_values("responses", response_mask=batch.values("response_mask") & valid)
