"""Tests that text from tools changes no statistic, score, penalty or advantage of the sampled tokens."""

import functools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rltrain.algorithms import ADVANTAGE_ESTIMATORS, columns_of
from rltrain.base.errors import EstimatorError
from rltrain.batch.data_proto import DataProto
from rltrain.batch.sampled_tokens import sampled_lengths, sampled_tokens
from rltrain.batch.trajectory import Trajectory, Turn
from rltrain.data.prompts import Prompt
from rltrain.monitoring.step_metrics import entropy_estimate, log_prob_gap, sample_metrics, staleness_metrics
from rltrain.settings.compose import compose
from rltrain.trajectories.batch_building import batch_of, with_scores
from rltrain.trajectories.prompt_groups import Group, GroupState
from rltrain.trajectories.scoring import on_last_token, shaped_scores
from rltrain.trajectories.token_rewards import (
    assign_rewards,
    choose_trained,
    estimate_advantages,
    kl_controller,
    states_to_value,
    with_critic_values,
    with_random_draws,
)
from workers.reward.messages import SampleScores

SAMPLES, LIMIT, STEP = 3, 16, 5
JUNK = 1e4  # the value that columns have at tokens that must not be read
SETTINGS = [
    "algorithm.loss_mode=kl_cov", "algorithm.kl_in_reward.kl_coef=0.1", "algorithm.reward_shaping.overlong_buffer=12",
    "algorithm.exclude_truncated=true", "algorithm.mask_truncated=true", f"rollout.max_response_length={LIMIT}",
    "reward.functions=[x:y, x:z]",
]  # fmt: skip
CRITIC = ["algorithm=ppo", "algorithm.bootstrap_truncated=true"]

turns = st.lists(
    st.tuples(
        st.integers(0, 5),  # Number of sampled tokens.
        st.integers(0, 4),  # Number of tokens in the tool's reply to the sampled tokens.
    ),
    min_size=1,
    max_size=3,
)
score = st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 1.0]))
row = st.fixed_dictionaries({
    "turns": turns, "scores": st.tuples(score, score), "failed": st.booleans(),
    "reason": st.sampled_from(["stop", "stop", "length"]),
})  # fmt: skip
groups = st.lists(st.lists(row, min_size=SAMPLES, max_size=SAMPLES), min_size=1, max_size=2)


@functools.cache
def config_of(*overrides):
    return compose([*overrides, *SETTINGS])[0]


def trajectory(uid, number, row, *, tools) -> Trajectory:
    """Return a trajectory with the turns of a row.

    Without `tools`, the sampled tokens of all turns form a single turn.
    """
    token, made, observation = 0, [], [1, 2]
    for sampled, observed in row["turns"]:
        spots = range(token, token + sampled)
        token += sampled
        log_probs = [-0.125 * (1 + (7 * uid + 3 * number + spot) % 5) for spot in spots]
        versions = [(uid + spot) % STEP for spot in spots]
        made.append(Turn(observation, [10 + spot for spot in spots], log_probs, versions, row["reason"], f"{sampled} "))
        observation = [99] * observed
    if tools:
        return Trajectory(uid, number, (*made, Turn(observation, [], [], [], row["reason"])))
    actions, log_probs, versions = (
        [value for turn in made for value in getattr(turn, name)] for name in ("action_ids", "log_probs", "versions")
    )
    text = "".join(turn.text for turn in made)
    return Trajectory(uid, number, (Turn([1, 2], actions, log_probs, versions, row["reason"], text),))


def result(key, row) -> SampleScores:
    first = row["scores"][0]
    success = None if first is None else first > 0
    return SampleScores(key, row["scores"], row["failed"], "it broke" * row["failed"], success=success)


def scored(rows, config, *, tools) -> DataProto:
    """Return the scored batch with the columns that actor, reference and critic would add."""
    found = [
        Group(uid, Prompt(uid, "p", [1, 2], {}), SAMPLES, SAMPLES, GroupState.READY,
              results={n: result((uid, n), row) for n, row in enumerate(group)})
        for uid, group in enumerate(rows)
    ]  # fmt: skip
    trajectories = [trajectory(u, n, row, tools=tools) for u, group in enumerate(rows) for n, row in enumerate(group)]
    batch = batch_of(trajectories)
    assert torch.equal(batch.values("response_mask"), sampled_tokens(batch))
    batch = with_scores(batch, found, config.reward.components)
    for name, factor in (("old_log_probs", 1.5), ("ref_log_probs", 1.25), ("entropies", -2.0)):
        values = (factor * batch.values("rollout_log_probs")).where(sampled_tokens(batch), -JUNK)
        batch = batch.with_values("responses", **{name: values})
    numbers = [
        n for group in rows for row in group for n, (sampled, _) in enumerate(row["turns"]) for _ in range(sampled)
    ]
    index = torch.full((len(batch.values("responses")),), -1)
    index[sampled_tokens(batch)] = torch.tensor(numbers, dtype=torch.int64)
    batch = batch.with_values("responses", turn_index=index, turn_states=index)
    return batch.union(DataProto.from_dict({"baseline_rewards": torch.linspace(0, 1, len(batch))}))


def with_values(batch, algorithm) -> DataProto:
    """Add critic values to a batch.

    The final state has the value 0.75, each sampled token has a value computed from its token id, and all other tokens
    have junk values.
    """
    seen = states_to_value(batch, algorithm)
    lengths, mask = batch.lengths("responses"), sampled_tokens(batch)
    values = torch.full((len(seen.values("responses")),), 0.75)
    own = torch.arange(int(seen.lengths("responses").max()))[None] < lengths[:, None]
    tokens = own[seen.padding_mask("responses")]
    values[tokens] = (batch.values("responses") / 20).where(mask, JUNK)
    return with_critic_values(batch, seen.with_values("responses", values=values).select(["values"]), algorithm)


def outcome_of(rows, name, *, tools) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return all metrics of a step before the update, and the columns for sampled tokens and for rows."""
    needs_values = "values" in columns_of(ADVANTAGE_ESTIMATORS.get(name))
    discount = ["algorithm.advantage.gamma=0.9"] if name in ("gae", "turn_gae", "turn_rloo") else []
    config = config_of(*(CRITIC if needs_values else []), *discount, f"algorithm.advantage_estimator={name}")
    batch = scored(rows, config, tools=tools)
    if needs_values:
        batch = with_values(batch, config.algorithm)
    metrics = sample_metrics(batch, ["y", "z"]) | staleness_metrics(batch, STEP) | log_prob_gap(batch)
    metrics["entropy"] = entropy_estimate(batch)
    by_row = {"lengths": sampled_lengths(batch), **shaped_scores(batch, config)._asdict()}
    placed = on_last_token(batch, batch.batch["scores"])
    batch, reward_metrics = assign_rewards(batch, config, kl_controller(config.algorithm.kl_in_reward))
    batch, advantage_metrics = estimate_advantages(batch, config.algorithm)
    batch = with_random_draws(choose_trained(batch, config.algorithm), config, STEP)
    batch = batch.with_values("responses", placed=placed)
    assert not bool((batch.values("response_mask") & ~sampled_tokens(batch)).any())
    names = ("response_mask", "placed", "token_level_rewards", "advantages", "returns", "random_draws")
    by_token = {column: batch.values(column)[sampled_tokens(batch)] for column in names}
    return metrics | reward_metrics | advantage_metrics, by_row | by_token


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
@settings(deadline=None, max_examples=25)
@given(rows=groups)
def test_B9_tool_text_changes_no_metric_score_penalty_or_advantage(name, rows):
    try:
        metrics, columns = outcome_of(rows, name, tools=False)
    except EstimatorError as error:  # w_reinforce refuses a batch in which no answer is known to be right or wrong
        assume("successes=NaN in all rows" not in str(error))
        raise
    others, theirs = outcome_of(rows, name, tools=True)
    assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6, nan_ok=True)
    for column, values in columns.items():
        assert torch.allclose(theirs[column].double(), values.double(), rtol=1e-5, atol=1e-6, equal_nan=True), column


# Tests of a worked example with text from tools

ROWS = [
    {"turns": [(2, 3), (2, 0)], "scores": (1.0, 0.0), "failed": False, "reason": "stop"},
    {"turns": [(1, 4)], "scores": (None, None), "failed": True, "reason": "stop"},
    {"turns": [(5, 4), (5, 4), (3, 1)], "scores": (0.0, 0.5), "failed": False, "reason": "stop"},
]


def test_lengths_age_and_entropy_are_of_sampled_tokens_also_in_a_row_whose_reward_failed():
    batch = scored([ROWS], config_of(), tools=True)
    assert batch.lengths("responses").tolist() == [7, 5, 22]
    metrics = sample_metrics(batch, [])
    assert (metrics["rollout/length_mean"], metrics["rollout/length_max"]) == (6.0, 13.0)
    ages = [STEP - spot % STEP for length in (4, 1, 13) for spot in range(length)]
    assert staleness_metrics(batch, STEP) == {
        "rollout/staleness_mean": pytest.approx(sum(ages) / 18), "rollout/staleness_max": 5.0
    }  # fmt: skip
    drawn = [0.125 * (1 + (3 * n + spot) % 5) for n, length in enumerate((4, 1, 13)) for spot in range(length)]
    assert entropy_estimate(batch) == pytest.approx(sum(drawn) / 18)


def test_the_penalty_of_length_is_of_sampled_tokens_also_in_rows_that_are_no_longer_trained():
    """The length penalty grows over the last 12 of 16 allowed tokens, so 13 sampled tokens give a penalty of 9/12."""
    config = config_of()
    batch = scored([ROWS], config, tools=True)
    cleared = batch.with_values("responses", response_mask=torch.zeros(34, dtype=torch.bool))
    for made in (batch, cleared):
        assert shaped_scores(made, config).scores.tolist() == [1.0, 0.0, -0.25]


def test_B8_the_score_sits_on_the_last_sampled_token_and_not_on_what_a_tool_wrote_after_it():
    batch = scored([ROWS], config_of(), tools=True)
    placed = on_last_token(batch, batch.batch["scores"]).tolist()
    assert [(spot, value) for spot, value in enumerate(placed) if value] == [(6, 1.0), (7 + 5 + 20, 0.5)]
    assert math.fsum(placed) == 1.5
