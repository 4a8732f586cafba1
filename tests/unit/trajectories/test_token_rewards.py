import dataclasses

import pytest
import torch

from rltrain.algorithms import (
    ADVANTAGE_ESTIMATORS,
    AdaptiveEntropyController,
    FixedEntropyController,
    FixedKLController,
    columns_of,
)
from rltrain.base.errors import EstimatorError, NumericsError, RewardError
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.settings.compose import compose
from rltrain.trajectories.token_rewards import (
    assign_rewards,
    entropy_controller,
    estimate_advantages,
    held,
    kl_controller,
    penalize_kl,
    states_to_value,
    with_all_knobs,
    with_critic_values,
    with_positive_examples,
)


def config_of(*overrides):
    return compose(overrides)[0]


def algorithm(*overrides):
    return config_of(*overrides).algorithm


def batch(scores, *, uid=None, valid=None, lengths=None, reasons=None) -> DataProto:
    """Return a batch of rows with the given scores on the last tokens, where all tokens of invalid rows are masked."""
    rows = len(scores)
    lengths = lengths or [2] * rows
    made = DataProto.from_dict(
        {"responses": jagged([[1] * length for length in lengths], torch.int64), "scores": torch.tensor(scores),
         "uid": torch.tensor(uid or [0] * rows), "valid": torch.tensor(valid or [True] * rows),
         "reward_components": torch.tensor(scores)[:, None]},
        {"finish_reason": reasons or ["stop"] * rows},
    )  # fmt: skip
    tokens = torch.zeros(sum(lengths))
    tokens[made.offsets("responses")[1:] - 1] = made.batch["scores"]
    mask = made.batch["valid"].repeat_interleave(torch.tensor(lengths))
    return made.with_values(
        "responses", response_mask=mask, token_level_rewards=tokens, policy_version=torch.zeros(sum(lengths)).long()
    )


def with_log_probs(made: DataProto, old: float, ref: float) -> DataProto:
    ones = torch.ones(len(made.values("responses")))
    return made.with_values("responses", old_log_probs=old * ones, ref_log_probs=ref * ones)


def assigned(made, *overrides):
    config = config_of(*overrides)
    return assign_rewards(made, config, kl_controller(config.algorithm.kl_in_reward))


# Tests of the KL penalty in the reward


def test_the_penalty_is_the_coefficient_times_the_kl_of_each_trained_token():
    made = with_log_probs(batch([1.0, 5.0], valid=[True, False]), -1.0, -1.5)
    config = algorithm("algorithm.kl_in_reward.kl_coef=0.2").kl_in_reward
    result, metrics = penalize_kl(made, config, kl_controller(config))
    assert result.padded("token_level_rewards").tolist() == [pytest.approx([-0.1, 0.9]), [0, 0]]
    assert metrics == pytest.approx({"reward/kl": 0.5, "reward/kl_coef": 0.2})
    assert "token_level_rewards" in result
    assert made.values("token_level_rewards").tolist() == [0, 1, 0, 5]


def test_B8_without_a_coefficient_the_rewards_are_the_scores():
    made, off = batch([1.0, 0.5]), algorithm().kl_in_reward
    for candidate in (with_log_probs(made, -1.0, -9.0), made):
        result, metrics = penalize_kl(candidate, off, kl_controller(off))
        assert result.values("token_level_rewards").tolist() == [0, 1, 0, 0.5]
        assert metrics == {}


def test_the_adaptive_controller_is_told_the_kl_and_the_number_of_sequences_and_acts_on_the_next_step():
    config = algorithm(
        "algorithm.kl_in_reward.kl_coef=0.2", "algorithm.kl_in_reward.controller=adaptive",
        "algorithm.kl_in_reward.target=0.1", "algorithm.kl_in_reward.horizon=10",
        "trainer.prompts_per_step=1", "trainer.prompts_per_minibatch=1",
    ).kl_in_reward  # fmt: skip
    controller = kl_controller(config)
    # a KL of 0.5 is five times the target of 0.1, so the controller's error is clipped to +0.2
    made = with_log_probs(batch([1.0, 0.0]), -1.0, -1.5)
    _, metrics = penalize_kl(made, config, controller)
    assert metrics["reward/kl_coef"] == 0.2
    assert controller.value == pytest.approx(0.2 * (1 + 0.2 * 2 / 10))
    assert penalize_kl(made, config, controller)[1]["reward/kl_coef"] == pytest.approx(0.208)
    assert type(kl_controller(algorithm().kl_in_reward)) is FixedKLController


def test_a_batch_without_trained_tokens_has_no_kl():
    made = with_log_probs(batch([1.0], valid=[False]), -1.0, -9.0)
    config = algorithm("algorithm.kl_in_reward.kl_coef=0.2").kl_in_reward
    result, metrics = penalize_kl(made, config, kl_controller(config))
    assert metrics["reward/kl"] == 0.0
    assert result.values("token_level_rewards").tolist() == [0, 0]


def test_the_exact_kl_is_subtracted_as_it_is_and_needs_no_log_probs():
    made = batch([1.0, 5.0], valid=[True, False])
    made = made.with_values("responses", full_kl=torch.tensor([0.25, 0.75, 9.0, 9.0]))
    config = algorithm("algorithm.kl_in_reward.kl_coef=0.2", "algorithm.kl_in_reward.kl_estimator=full").kl_in_reward
    result, metrics = penalize_kl(made, config, kl_controller(config))
    assert result.padded("token_level_rewards").tolist() == [pytest.approx([-0.05, 0.85]), [0, 0]]
    assert metrics == pytest.approx({"reward/kl": 0.5, "reward/kl_coef": 0.2})


# Rewards


def test_rewards_are_the_shaped_scores_on_the_last_tokens_minus_the_kl():
    made = with_log_probs(batch([1.0, 3.0]), -1.0, -1.5)
    result, metrics = assigned(
        made, "algorithm.reward_shaping.bias=1", "algorithm.reward_shaping.clip=2.5", "algorithm.kl_in_reward.kl_coef=2"
    )
    assert result.padded("token_level_rewards").tolist() == [[-1, 1.0], [-1, 1.5]]
    assert metrics == pytest.approx(
        {
            "reward/zero_spread_fraction": 0.0,
            "reward/same_outcome_fraction": 0.0,
            "reward/excluded_fraction": 0.0,
            "reward/kl": 0.5,
            "reward/kl_coef": 2.0,
        }
    )
    assert result.batch["scores"].tolist() == [1.0, 3.0]


def test_a_token_reward_that_is_not_finite_stops_the_run():
    kl, trained = "algorithm.kl_in_reward.kl_coef=0.1", batch([1.0, 0.0, 5.0], valid=[True, True, False])
    made = with_log_probs(trained, -1.0, -1.5)
    assigned(made, kl)
    ref = made.values("ref_log_probs").clone()
    ref[4:] = float("nan")  # masked
    assigned(made.with_values("responses", ref_log_probs=ref), kl)
    ref[0] = float("nan")
    with pytest.raises(
        NumericsError, match=r"^1 of 4 token rewards are not finite: .*reward_shaping and algorithm\.kl_in_reward"
    ):
        assigned(made.with_values("responses", ref_log_probs=ref), kl)


def test_scores_that_are_scaled_out_of_range_stop_the_run():
    huge = "algorithm.reward_shaping.scale=1e300"
    for scores in ([1.0, -1.0], [1.0, 0.0]):
        with pytest.raises(NumericsError, match=r"^2 of 4 token rewards are not finite"):
            assigned(batch(scores), huge)
    assigned(batch([1.0, 0.0], valid=[False, True]), "algorithm.reward_shaping.scale=1e30")


NORMALIZE = "algorithm.reward_normalization."


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["mean_level=batch"], [-2.0, 0.0, -1.0, 3.0]),
        (["mean_level=group"], [-1.0, 1.0, -2.0, 2.0]),
        (["std_level=group", "unbiased=false"], [1.0, 3.0, 1.0, 3.0]),
        (["std_level=group"], [1 / 2**0.5, 3 / 2**0.5, 2 / 8**0.5, 6 / 8**0.5]),
        (["mean_level=group", "leave_one_out=true"], [-2.0, 2.0, -4.0, 4.0]),
        (["mean_level=batch", "std_level=group", "unbiased=false"], [-2.0, 0.0, -0.5, 1.5]),
    ],
)
def test_scores_are_normalised_as_the_config_says_before_they_become_rewards(settings, expected):
    made = batch([1.0, 3.0, 2.0, 6.0], uid=[0, 0, 1, 1])
    result, _ = assigned(made, *(NORMALIZE + text for text in settings))
    assert result.padded("token_level_rewards")[:, 1].tolist() == pytest.approx(expected, abs=1e-4)


def test_C4_a_failed_row_is_in_no_normalisation():
    made = batch([1.0, 3.0, 99.0], valid=[True, True, False])
    result, metrics = assigned(made, NORMALIZE + "mean_level=batch")
    assert result.padded("token_level_rewards")[:, 1].tolist() == [-1.0, 1.0, 0.0]
    assert metrics["reward/excluded_fraction"] == 0.0  # a row that was already invalid does not count as excluded


@pytest.mark.parametrize(("how", "cut"), [("suppress", 0.0 - 2.0), ("exclude", 99.0 - 2.0)])
def test_C5_a_cut_row_is_in_no_statistic_from_here_on_and_keeps_its_tokens_and_its_score_on_their_scale(how, cut):
    made = batch([1.0, 3.0, 99.0, 5.0], reasons=["stop", "stop", "length", "length"], valid=[True, True, True, False])
    result, metrics = assigned(made, NORMALIZE + "mean_level=batch", f"algorithm.{how}_truncated=true")
    assert result.padded("token_level_rewards")[:, 1].tolist() == [-1.0, 1.0, cut, 0.0]
    assert result.batch["valid"].tolist() == [True, True, False, False]
    assert made.batch["valid"].tolist() == [True, True, True, False]
    assert metrics["reward/excluded_fraction"] == 0.25  # a failed row does not count as excluded
    assert result.padded("response_mask").tolist() == made.padded("response_mask").tolist()


@pytest.mark.parametrize("how", ["suppress", "exclude"])
def test_C9_under_gae_and_normalisation_a_wrong_answer_is_worth_no_more_for_being_cut(how):
    """The four answers are right, wrong, right but truncated, and wrong but truncated.

    An advantage of 0 for an excluded wrong answer would exceed the advantage of -0.5 of a finished wrong answer.
    """
    made = batch([1.0, 0.0, 1.0, 0.0], reasons=["stop", "stop", "length", "length"])
    config = config_of(
        "algorithm.advantage_estimator=gae", NORMALIZE + "mean_level=batch", f"algorithm.{how}_truncated=true"
    )
    made, _ = assign_rewards(made, config, kl_controller(config.algorithm.kl_in_reward))
    made = made.with_values("responses", values=torch.zeros(8))
    result, _ = estimate_advantages(made, config.algorithm)
    cut_and_right = 0.5 if how == "exclude" else -0.5
    assert result.padded("advantages")[:, 0].tolist() == [0.5, -0.5, cut_and_right, -0.5]


@pytest.mark.parametrize("levels", [["mean_level=batch"], ["mean_level=group", "std_level=group", "unbiased=false"]])
def test_a_suppressed_answer_pays_for_its_length_under_normalisation_too(levels):
    made = batch([1.0, 0.0, 1.0], lengths=[2, 2, 16], reasons=["stop", "stop", "length"])
    settings = [*(NORMALIZE + text for text in levels), "algorithm.suppress_truncated=true"]
    free = assigned(made, *settings)[0].padded("token_level_rewards").sum(-1)
    priced = assigned(made, *settings, "algorithm.reward_shaping.overlong_buffer=4")[0]
    # the scores 1 and 0 have a standard deviation of 1/2, so normalisation doubles the length penalty
    unit = 1.0 if len(levels) == 1 else 2.0
    assert free.tolist() == pytest.approx([unit / 2, -unit / 2, -unit / 2], abs=1e-5)
    assert (priced.padded("token_level_rewards").sum(-1) - free).tolist() == pytest.approx([0, 0, -unit], abs=1e-5)


@pytest.mark.parametrize(
    ("scores", "uid", "valid", "share"),
    [
        ([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [True] * 4, 0.5),
        # one group has three scores that are equal in float32, and the other group has one row
        ([0.3, 0.3, 0.3, 0.1], [4, 4, 4, 2], [True] * 4, 1.0),
        ([1.0, 0.0, 1.0, 0.0], [0, 1, 0, 1], [True] * 4, 1.0),  # groups are found by uid, not by position
        # a failed row does not add spread to its group
        ([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [True, False, True, True], 0.5),
        ([-1.0, 0.0, -1.0, 0.0], [0, 0, 1, 1], [True, False, False, True], 1.0),
        ([1.0, 0.0], [0, 0], [False, False], 1.0),
        ([1.0, 0.0, 1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 1, 1], [True] * 6, 0.5),  # the fraction counts groups, not rows
    ],
)
def test_C3_the_share_of_groups_without_spread(scores, uid, valid, share):
    made = batch(scores, uid=uid, valid=valid)
    for name in ("zero_spread_fraction", "same_outcome_fraction"):
        assert assigned(made)[1][f"reward/{name}"] == share


def test_C8_an_all_wrong_group_of_unequal_lengths_has_one_outcome_and_more_than_one_score():
    made = batch([0.0, 0.0, 1.0, 0.0], uid=[0, 0, 1, 1], lengths=[2, 16, 2, 16])
    metrics = assigned(made, "algorithm.reward_shaping.overlong_buffer=4")[1]
    assert (metrics["reward/zero_spread_fraction"], metrics["reward/same_outcome_fraction"]) == (0.0, 0.5)


# Advantages


def test_grpo_compares_within_groups_and_leaves_failed_rows_out():
    made = batch([1.0, 0.0, 8.0, 4.0, 0.0, 4.0], uid=[3, 3, 3, 9, 9, 9], valid=[True, True, False, True, True, True])
    config = algorithm("algorithm.advantage.norm_by_std=false")
    result, metrics = estimate_advantages(made, config)
    thirds = [4 / 3, -8 / 3, 4 / 3]
    assert result.padded("advantages")[:, 0].tolist() == pytest.approx([0.5, -0.5, 0, *thirds])
    assert result.padded("returns").tolist() == result.padded("advantages").tolist()
    assert metrics["actor/advantage_abs_mean"] == pytest.approx((0.5 + 0.5 + sum(map(abs, thirds))) / 5)
    assert "critic/explained_variance" not in metrics
    assert result.offsets("advantages") is made.offsets("responses")


def test_C7_whitening_uses_trained_tokens_only():
    made = batch([3.0, 1.0, 100.0], valid=[True, True, False], lengths=[1, 1, 3])
    made = made.with_values("responses", values=torch.tensor([0.0, 0.0, 50, 50, 50]))
    result, metrics = estimate_advantages(made, algorithm("algorithm=ppo"))
    assert result.values("advantages").tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0, 0], abs=1e-5)
    assert result.values("returns").tolist()[:2] == [3.0, 1.0]  # not whitened
    assert metrics["critic/explained_variance"] == 0.0


NORMALIZE_ADVANTAGES, MEAN_STD = "algorithm.advantage_normalization.", ("mean", "std")


def test_C4_normalising_leaves_a_row_that_an_outcome_estimator_left_out_at_zero_and_out_of_the_statistics():
    """Row 1 is not valid although its tokens are trained, as happens with `exclude_truncated`."""
    made = batch([3.0, 100.0, 1.0, 2.0], lengths=[2, 3, 1, 1])
    made = made.pop(["valid"])[1].union(DataProto.from_dict({"valid": torch.tensor([True, False, True, True])}))
    config = algorithm(NORMALIZE_ADVANTAGES + "mean_level=batch", NORMALIZE_ADVANTAGES + "std_level=batch")
    result, _ = estimate_advantages(made, config)
    spread = (2.75 / 3) ** 0.5  # the advantages 1, 1, -1 and 0 have mean 0.25
    expected = [0.75 / spread, 0.75 / spread, 0, 0, 0, -1.25 / spread, -0.25 / spread]
    assert result.values("advantages").tolist() == pytest.approx(expected, abs=1e-5)


def test_C4_under_gae_a_row_in_no_statistic_is_moved_and_scaled_by_the_others():
    made = batch([3.0, 7.0, 1.0], lengths=[1, 1, 1])
    made = made.pop(["valid"])[1].union(DataProto.from_dict({"valid": torch.tensor([True, False, True])}))
    made = made.with_values("responses", values=torch.zeros(3))
    result, _ = estimate_advantages(made, algorithm("algorithm=ppo"))
    assert result.values("advantages").tolist() == pytest.approx([0.5**0.5, 5 / 2**0.5, -(0.5**0.5)], abs=1e-4)


def test_advantages_are_clipped_on_both_sides_and_returns_are_not():
    made = batch([9.0, 1.0, 2.0, 0.0], uid=[0, 0, 0, 0])
    config = algorithm("algorithm.advantage.norm_by_std=false", "algorithm.advantage_clip=2.5")
    result, metrics = estimate_advantages(made, config)
    assert result.padded("advantages")[:, 0].tolist() == [2.5, -2.0, -1.0, -2.5]
    assert result.padded("returns")[:, 0].tolist() == [6.0, -2.0, -1.0, -3.0]
    assert metrics["actor/advantage_abs_mean"] == 2.0


def test_advantages_are_clipped_after_they_are_normalised():
    made = batch([30.0, 10.0], uid=[0, 0])
    levels = [NORMALIZE_ADVANTAGES + "std_level=batch", "algorithm.advantage.norm_by_std=false"]
    found = [
        estimate_advantages(made, algorithm(*levels, f"algorithm.advantage_clip={clip}"))[0].padded("advantages")[:, 0]
        for clip in ("null", 0.5, 8)
    ]
    assert found[0].tolist() == found[2].tolist()  # advantages are +-10 before normalisation, and below 8 after it
    assert 0.5 < float(found[0][0]) < 8
    assert found[1].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_row_that_will_not_be_trained_on_is_in_no_statistic_of_the_advantages(name):
    found = []
    for last in (5.0, 50.0):
        made = batch([3.0, 1.0, last], lengths=[1, 1, 1], uid=[0, 0, 1], reasons=["stop", "stop", "length"])
        made = made.with_values("responses", values=torch.tensor([0.0, 0.0, -last]))
        levels = [NORMALIZE_ADVANTAGES + "mean_level=batch", NORMALIZE_ADVANTAGES + "std_level=batch"]
        config = algorithm(f"algorithm={name}", *levels, "algorithm.mask_truncated=true")
        found.append(estimate_advantages(made, config)[0].values("advantages").tolist())
    assert found[0] == found[1] == pytest.approx([0.5**0.5, -(0.5**0.5), 0], abs=1e-5)


# Tests of truncated answers whose return ends with the critic's value

BOOTSTRAP = "algorithm.bootstrap_truncated=true"


def test_the_critic_is_asked_for_one_state_more_of_each_cut_answer_and_of_no_other():
    made = batch([1.0, 0.0, 0.0], lengths=[2, 1, 0], reasons=["length", "stop", "length"])
    prompts = jagged([[7], [8, 9], [6]], torch.int64)
    made = made.union(DataProto.from_dict({"prompts": prompts}))
    asked = states_to_value(made, algorithm("algorithm=ppo", BOOTSTRAP))
    assert asked.lengths("responses").tolist() == [3, 1, 1]
    assert asked.values("responses").tolist()[:2] == [1, 1]
    assert asked.values("responses").tolist()[3] == 1
    assert asked.values("prompts").tolist() == [7, 8, 9, 6]
    said = DataProto.from_dict({"values": asked.batch["responses"]})
    said = said.with_values("values", values=torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
    result = with_critic_values(made, said, algorithm("algorithm=ppo", BOOTSTRAP))
    assert result.values("values").tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert result.offsets("values") is made.offsets("responses")
    assert result.batch["bootstrap_values"].tolist() == pytest.approx([0.3, 0.0, 0.5])
    assert states_to_value(made, algorithm("algorithm=ppo")) is made


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_cut_answer_goes_on_with_gamma_times_the_value_of_its_end_and_a_finished_one_with_0(score):
    """The two tokens have the values 0.5 and 0.25, the last state has the value 0.8, gamma is 0.9, and lambda is 0.5.

    For the finished answer, the TD errors are delta_2 = score - 0.25 and delta_1 = 0.9 x 0.25 - 0.5 = -0.275, and the
    first advantage is A_1 = delta_1 + 0.45 delta_2. For the truncated answer, the TD error delta_2 is higher by 0.9 x
    0.8 = 0.72, so the first advantage A_1 is higher by 0.45 x 0.72 = 0.324.
    """
    made = batch([score, score], lengths=[2, 2], reasons=["stop", "length"])
    made = made.with_values("responses", values=torch.tensor([0.5, 0.25, 0.5, 0.25]))
    made = made.union(DataProto.from_dict({"bootstrap_values": torch.tensor([0.0, 0.8])}))
    knobs = ["algorithm.advantage.gamma=0.9", "algorithm.advantage.lam=0.5"]
    ppo = algorithm("algorithm=ppo", BOOTSTRAP, *knobs, *(NORMALIZE_ADVANTAGES + f"{x}_level=null" for x in MEAN_STD))
    result, _ = estimate_advantages(made, ppo)
    first, second = -0.275 + 0.45 * (score - 0.25), score - 0.25
    cut = first + 0.324, second + 0.72
    assert result.padded("advantages").tolist() == [pytest.approx([first, second]), pytest.approx(list(cut))]
    assert result.padded("returns")[1].tolist() == pytest.approx([cut[0] + 0.5, cut[1] + 0.25])
    # the critic's value of the last state is not added to the token rewards
    assert torch.equal(result.values("token_level_rewards"), made.values("token_level_rewards"))


def test_a_user_estimator_without_a_gamma_gets_the_value_undiscounted(monkeypatch):
    def plain(token_level_rewards, response_mask, values, *, scale=1.0):
        return scale * token_level_rewards, token_level_rewards

    monkeypatch.setitem(ADVANTAGE_ESTIMATORS._entries, "plain", (plain, {"statistics": "none"}))
    made = batch([1.0], reasons=["length"]).with_values("responses", values=torch.zeros(2))
    made = made.union(DataProto.from_dict({"bootstrap_values": torch.tensor([0.25])}))
    result, _ = estimate_advantages(made, algorithm("algorithm.advantage_estimator=plain", BOOTSTRAP))
    assert result.values("advantages").tolist() == [0.0, 1.25]


@pytest.mark.parametrize(("values", "explained"), [([3.0, 1.0], 1.0), ([2.0, 2.0], 0.0), ([1.0, 3.0], -3.0)])
def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one(values, explained):
    made = batch([3.0, 1.0], lengths=[1, 1]).with_values("responses", values=torch.tensor(values))
    config = dataclasses.replace(algorithm("algorithm=ppo"), advantage={"gamma": 1.0, "lam": 1.0})
    assert estimate_advantages(made, config)[1]["critic/explained_variance"] == pytest.approx(explained)


def test_equal_targets_explain_nothing():
    made = batch([2.0, 2.0], lengths=[1, 1]).with_values("responses", values=torch.tensor([0.0, 1.0]))
    assert estimate_advantages(made, algorithm("algorithm=ppo"))[1]["critic/explained_variance"] == 0.0


def test_every_row_failed_gives_zero_advantages_and_finite_metrics():
    made = batch([1.0, 2.0], valid=[False, False])
    result, metrics = estimate_advantages(made, algorithm())
    assert result.values("advantages").tolist() == [0] * 4
    assert metrics == {"actor/advantage_abs_mean": 0.0}
    assert assigned(made)[1] == {
        "reward/zero_spread_fraction": 1.0,
        "reward/same_outcome_fraction": 1.0,
        "reward/excluded_fraction": 0.0,
    }


# Tests of entropy coefficients and of options of algorithm functions


def test_the_coefficient_of_the_entropy_bonus_is_fixed_without_a_target():
    fixed = entropy_controller(algorithm("algorithm.entropy_coef=0.01"))
    assert (type(fixed), fixed.value) == (FixedEntropyController, 0.01)
    moving = entropy_controller(
        algorithm("algorithm.entropy_coef=0.001", "algorithm.entropy_target=0.5", "algorithm.entropy_coef_step=0.002")
    )
    assert type(moving) is AdaptiveEntropyController
    assert (moving.value, moving.target, moving.step, moving.maximum) == (0.001, 0.5, 0.002, 0.005)


def test_the_config_that_is_kept_has_every_knob_of_loss_selector_and_estimator():
    config = with_all_knobs(config_of("algorithm.loss_mode=clip_cov", "algorithm.loss.clip_cov_lb=0.5"))
    assert config.algorithm.loss == {
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_cov_ratio": 2e-4, "clip_cov_lb": 0.5, "clip_cov_ub": 5.0,
    }  # fmt: skip
    assert config.algorithm.advantage == {"norm_by_std": True}
    unknown = config_of("algorithm.loss_mode=no", "algorithm.advantage_estimator=no", "algorithm.loss.x=1")
    assert with_all_knobs(unknown) == unknown


def test_an_estimator_that_weighs_the_reward_functions_gets_their_weights_unless_it_has_its_own():
    functions = "reward.functions=[{name: a, path: 'x:y', weight: 2.0}, {name: b, path: 'x:z', weight: 0.5}]"
    gdpo = ["algorithm.advantage_estimator=gdpo", functions]
    assert with_all_knobs(config_of(*gdpo)).algorithm.advantage == {"weights": [2.0, 0.5]}
    own = with_all_knobs(config_of(*gdpo, "algorithm.advantage.weights=[1.0,1.0]"))
    assert own.algorithm.advantage == {"weights": [1.0, 1.0]}


def test_an_estimator_that_raises_is_named(monkeypatch):
    def broken(token_level_rewards, response_mask, *, norm_by_std=True):
        raise KeyError("baseline")

    monkeypatch.setitem(ADVANTAGE_ESTIMATORS._entries, "grpo", (broken, {"statistics": "group"}))
    with pytest.raises(EstimatorError, match=r"^algorithm.advantage_estimator=grpo raised KeyError: 'baseline'$"):
        estimate_advantages(batch([1.0, 0.0]), algorithm())


# Tests of Monte-Carlo returns, on which the critic is warmed up


# The discount of turn_gae is per turn: in the first row, the first two tokens are one turn, and the third is another.
TO_GO = {
    "gae": [[1, 2, 4], [1, 0, 0]],
    "decoupled_gae": [[1, 2, 4], [1, 0, 0]],
    "length_adaptive_gae": [[1, 2, 4], [1, 0, 0]],
    "turn_gae": [[2, 2, 4], [1, 0, 0]],
}


def test_the_monte_carlo_returns_of_every_estimator_with_a_critic_are_tested():
    names = [name for name in ADVANTAGE_ESTIMATORS.names() if "values" in columns_of(ADVANTAGE_ESTIMATORS.get(name))]
    assert sorted(TO_GO) == sorted(names)


@pytest.mark.parametrize("estimator", TO_GO)
def test_monte_carlo_returns_are_discounted_rewards_and_the_advantages_stay_those_of_the_estimator(estimator):
    made = batch([4.0, 1.0], lengths=[3, 1])
    made = made.with_values("responses", values=torch.tensor([0.3, 0.2, 0.9, 0.5]))
    made = made.with_values("responses", turn_index=torch.tensor([0, 0, 1, 0]))
    chosen = algorithm(f"algorithm.advantage_estimator={estimator}", "algorithm.advantage={gamma: 0.5}")
    plain, metrics = estimate_advantages(made, chosen)
    warm, found = estimate_advantages(made, chosen, monte_carlo=True)
    assert warm.padded("returns").tolist() == TO_GO[estimator]
    assert torch.equal(warm.values("advantages"), plain.values("advantages"))
    lower = "lam" if estimator in ("gae", "turn_gae") else "lam_critic"
    other = algorithm(f"algorithm.advantage_estimator={estimator}", f"algorithm.advantage={{gamma: 0.5, {lower}: 0.5}}")
    assert not torch.equal(estimate_advantages(made, other)[0].values("returns"), warm.values("returns"))
    assert torch.equal(estimate_advantages(made, other, monte_carlo=True)[0].values("returns"), warm.values("returns"))
    targets, values = warm.values("returns"), made.values("values")
    expected = 1 - (targets - values).var(unbiased=False) / targets.var(unbiased=False)
    assert found["critic/explained_variance"] == pytest.approx(float(expected))
    assert metrics.keys() == found.keys()


def test_a_monte_carlo_return_of_a_cut_answer_ends_with_the_critics_value():
    made = batch([4.0, 1.0], lengths=[2, 1], reasons=["length", "stop"])
    made = made.with_values("responses", values=torch.zeros(3))
    made = made.union(DataProto.from_dict({"bootstrap_values": torch.tensor([2.0, 0.0])}))
    chosen = algorithm("algorithm=ppo", "algorithm.bootstrap_truncated=true", "algorithm.advantage.gamma=0.5")
    warm, _ = estimate_advantages(made, chosen, monte_carlo=True)
    assert warm.padded("returns").tolist() == [[2.5, 5], [1, 0]]


def test_a_held_controller_keeps_the_coefficient_of_the_adaptive_one():
    config = algorithm("algorithm.kl_in_reward.kl_coef=0.2", "algorithm.kl_in_reward.controller=adaptive").kl_in_reward
    adaptive = kl_controller(config)
    adaptive.update(5.0, 100)
    constant = held(adaptive)
    constant.update(5.0, 100)
    assert constant.value == adaptive.value > 0.2


# Tests of the answers whose negative log-likelihood is added to the loss


def judged(successes, **options):
    made = batch([1.0] * len(successes), **options)
    return made.union(DataProto.from_dict({"successes": torch.tensor(successes)}))


NLL = "algorithm.positive_nll_coef=0.1"


def test_the_trained_tokens_of_correct_answers_are_positive_examples():
    made = judged([1.0, 0.0, torch.nan, 1.0], lengths=[2, 1, 2, 3])
    mask = torch.tensor([True, False, True, True, True, True, False, True])
    made = made.with_values("responses", response_mask=mask)
    found = with_positive_examples(made, algorithm(NLL)).values("positive_mask")
    assert found.tolist() == [True, False, False, False, False, True, False, True]
    assert with_positive_examples(made, algorithm()) is made


def test_a_cut_answer_is_a_positive_example_unless_it_counts_as_wrong():
    made = judged([1.0, 1.0], reasons=["length", "stop"])
    cut = {
        name: with_positive_examples(made, algorithm(NLL, f"algorithm.{name}_truncated=true")).padded("positive_mask")
        for name in ("suppress", "exclude")
    }
    assert cut["suppress"].any(-1).tolist() == [False, True]
    assert cut["exclude"].any(-1).tolist() == [True, True]


def test_where_no_reward_function_says_which_answers_are_correct_the_run_ends():
    said = r"^algorithm\.positive_nll_coef=0\.1: this loss term depends on which answers are correct, but no reward"
    with pytest.raises(RewardError, match=said):
        with_positive_examples(judged([torch.nan, torch.nan]), algorithm(NLL))
    nothing = judged([torch.nan, torch.nan], valid=[False, False])
    assert not bool(with_positive_examples(nothing, algorithm(NLL)).values("positive_mask").any())
