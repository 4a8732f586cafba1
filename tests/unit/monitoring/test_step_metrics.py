import math

import pytest
import torch

from rltrain.batch.data_proto import DataProto, jagged
from rltrain.monitoring.step_metrics import entropy_estimate, log_prob_gap, sample_metrics, staleness_metrics

NAN = math.nan


def samples(scores, valid, components, successes=None) -> DataProto:
    return DataProto.from_dict(
        {"responses": jagged([[1], [1, 2, 3], [1, 2], [1, 2]], torch.int64), "prompts": jagged([[1]] * 4, torch.int64),
         "policy_version": jagged([[0], [0] * 3, [0] * 2, [0] * 2], torch.int64),
         "scores": torch.tensor(scores), "successes": torch.tensor(successes or [NAN] * 4),
         "valid": torch.tensor(valid),
         "failed": ~torch.tensor(valid), "reward_components": torch.tensor(components),
         "failed_function": torch.where(torch.tensor(valid), -1, len(components[0]) - 1)},
        {"finish_reason": ["stop", "length", "stop", "abort"]},
    )  # fmt: skip


def test_means_are_over_valid_rows_and_fractions_over_all():
    components = [[1, 0], [0, NAN], [1, 2], [NAN, NAN]]
    made = samples([1.0, 0.0, 3.0, 0.0], [True, True, True, False], components, [1.0, 0.0, 1.0, NAN])
    metrics = sample_metrics(made, ["exact", "style"])
    assert metrics == pytest.approx({
        "reward/mean": 4 / 3, "reward/std": (14 / 9) ** 0.5, "reward/accuracy": 2 / 3, "reward/failed_fraction": 0.25,
        "reward/unscored_fraction": 0.25,
        "rollout/length_mean": 2.0, "rollout/length_max": 3.0, "rollout/truncated_fraction": 0.25,
        "reward/exact/mean": 2 / 3, "reward/exact/std": (2 / 9) ** 0.5, "reward/exact/failed_fraction": 0.0,
        "reward/style/mean": 1.0, "reward/style/std": 1.0, "reward/style/failed_fraction": 0.25,
    })  # fmt: skip


def test_the_accuracy_is_the_share_of_correct_answers_where_a_function_decides():
    """The accuracy does not depend on the scores, so a correct answer may have a negative score."""
    made = samples([-0.5, 0.0, 1.0, 0.5], [True] * 4, [[1.0], [0.0], [1.0], [NAN]], [1.0, 0.0, 1.0, NAN])
    metrics = sample_metrics(made, ["exact"])
    assert (metrics["reward/accuracy"], metrics["reward/mean"]) == (pytest.approx(2 / 3), 0.25)


def test_without_a_function_that_decides_there_is_no_accuracy():
    made = samples([1.0, 1.0, 1.0, 1.0], [True] * 4, [[1.0]] * 4)
    assert "reward/accuracy" not in sample_metrics(made, ["format"])


def test_C4_what_a_failed_row_holds_is_in_no_mean():
    base = sample_metrics(samples([1.0, 0.0, 3.0, 0.0], [True] * 3 + [False], [[1.0], [0.0], [1.0], [NAN]]), ["exact"])
    other = sample_metrics(
        samples([1.0, 0.0, 3.0, 99.0], [True] * 3 + [False], [[1.0], [0.0], [1.0], [7.0]]), ["exact"]
    )
    assert base == other


def test_without_a_valid_row_every_metric_is_finite():
    metrics = sample_metrics(samples([0.0] * 4, [False] * 4, [[NAN]] * 4), ["exact"])
    assert metrics["reward/failed_fraction"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


def gap_of(old, rollout, mask) -> dict[str, float]:
    made = DataProto.from_dict({"responses": jagged([[1, 2], [3]], torch.int64)}).with_values(
        "responses",
        old_log_probs=torch.tensor(old),
        rollout_log_probs=torch.tensor(rollout),
        response_mask=torch.tensor(mask),
    )
    return log_prob_gap(made)


def test_E1_the_gap_is_the_mean_difference_over_trained_tokens():
    metrics = gap_of([-1.0, -2.0, -50.0], [-1.5, -1.9, 0.0], [True, True, False])
    assert metrics == pytest.approx({
        "rollout/log_prob_gap": 0.3, "rollout/log_prob_gap_max": 0.5,
        "rollout/kl": (-0.5 + 0.1) / 2,
        "rollout/k3": ((math.exp(0.5) - 1 - 0.5) + (math.exp(-0.1) - 1 + 0.1)) / 2,
        "rollout/effective_sample_size": (math.exp(0.5) + math.exp(-0.1)) ** 2 / (2 * (math.exp(1.0) + math.exp(-0.2))),
    })  # fmt: skip
    none = {"log_prob_gap": 0.0, "log_prob_gap_max": 0.0, "kl": 0.0, "k3": 0.0, "effective_sample_size": 1.0}
    none = {f"rollout/{name}": value for name, value in none.items()}
    assert gap_of([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], [True] * 3) == none
    assert gap_of([-1.0, -2.0, -3.0], [-9.0, -9.0, -9.0], [False] * 3) == none


def test_E1_the_kl_is_that_of_the_engine_from_the_actor():
    engine, actor = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.5, 0.2, 0.3]).double()
    counts = [7, 2, 1]  # The batch contains each token in proportion to the engine's probability of the token.
    old, rollout = ([float(p.log()[t]) for t, n in enumerate(counts) for _ in range(n)] for p in (actor, engine))
    made = DataProto.from_dict({"responses": jagged([[1] * 10], torch.int64)}).with_values(
        "responses", old_log_probs=torch.tensor(old), rollout_log_probs=torch.tensor(rollout),
        response_mask=torch.ones(10, dtype=torch.bool),
    )  # fmt: skip
    metrics, exact = log_prob_gap(made), float((engine * (engine / actor).log()).sum())
    assert metrics["rollout/kl"] == pytest.approx(exact, rel=1e-5)
    assert metrics["rollout/k3"] == pytest.approx(exact, rel=1e-5)
    weights = actor / engine  # The importance weights have the mean 1 under the engine's distribution.
    expected = 1 / float((engine * weights.square()).sum())
    assert metrics["rollout/effective_sample_size"] == pytest.approx(expected, rel=1e-5)


def test_the_age_of_tokens_is_counted_in_versions_behind_the_one_that_is_trained():
    responses = jagged([[7, 7, 7], [], [7]], torch.int64)
    made = DataProto.from_dict({"responses": responses}).with_values(
        "responses", policy_version=torch.tensor([3, 4, 5, 2])
    )
    assert staleness_metrics(made, 5) == {"rollout/staleness_mean": 1.5, "rollout/staleness_max": 3.0}
    empty = DataProto.from_dict({"responses": jagged([[]], torch.int64)}).with_values(
        "responses", policy_version=torch.zeros(0, dtype=torch.int64)
    )
    assert staleness_metrics(empty, 5) == {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0.0}


def test_a_nan_shows_in_the_gap():
    assert math.isnan(gap_of([NAN, -2.0, -3.0], [-1.0, -2.0, -3.0], [True] * 3)["rollout/log_prob_gap"])


def test_entropy_is_estimated_from_what_the_engine_drew():
    log_probs, versions = jagged([[-1.0, -2.0], [], [-6.0]], torch.float32), jagged([[0, 0], [], [0]], torch.int64)
    made = DataProto.from_dict({"rollout_log_probs": log_probs, "policy_version": versions})
    assert entropy_estimate(made) == 3.0
    assert math.isnan(entropy_estimate(made[1:2]))
