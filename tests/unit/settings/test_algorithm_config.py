"""Tests of rules that relate keys under `algorithm`, and of the columns and roles that a config needs."""

import pytest

from rltrain.base.errors import ConfigError
from rltrain.settings.compose import compose

KEPT = ["correction.level=token", "correction.mode=mask", "correction.upper=2", "correction.normalize=kept"]


def algorithm(*overrides):
    return compose([f"algorithm.{text}" for text in overrides])[0].algorithm


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["entropy_coef=-0.1"], "algorithm.entropy_coef must be >= 0, got -0.1"),
        (["dynamic_sampling=-1"], "algorithm.dynamic_sampling must be >= 0, got -1"),
        (["entropy_target=0"], "algorithm.entropy_target must be > 0 nats or null, got 0.0"),
        (["entropy_target=-1"], "algorithm.entropy_target must be > 0 nats or null, got -1.0"),
        (["entropy_coef_step=0"], "algorithm.entropy_coef_step must be > 0, got 0.0"),
        (["entropy_coef_max=0"], "algorithm.entropy_coef_max must be > 0, got 0.0"),
        (
            ["entropy_target=0.2", "entropy_coef=0.01"],
            "algorithm.entropy_coef=0.01 with entropy_target=0.2: the coefficient starts above "
            "algorithm.entropy_coef_max=0.005; lower entropy_coef, or raise entropy_coef_max",
        ),
        (["reward_shaping.overlong_buffer=-1"], "algorithm.reward_shaping.overlong_buffer must be >= 0, got -1"),
        (["reward_shaping.scale=0"], "reward_shaping.scale=0.0: every score would become 0; use another factor"),
        (["reward_shaping.clip=0"], "algorithm.reward_shaping.clip must be > 0 or null, got 0.0"),
        (["advantage_clip=0"], "algorithm.advantage_clip must be > 0 or null, got 0.0"),
        (["reward_shaping.clip=-1"], "algorithm.reward_shaping.clip must be > 0 or null, got -1.0"),
        (["reward_shaping.overlong_penalty=0"], "reward_shaping.overlong_penalty must be > 0, got 0.0"),
        (["kl_in_reward.kl_coef=-1"], "algorithm.kl_in_reward.kl_coef must be >= 0, got -1.0"),
        (["kl_in_reward.target=-1"], "algorithm.kl_in_reward.target must be >= 0, got -1.0"),
        (["kl_in_reward.horizon=0"], "algorithm.kl_in_reward.horizon must be >= 1, got 0"),
        (["kl_in_reward.controller=adaptive"], "controller=adaptive with kl_coef=0.0, target=0.1: "),
        (
            ["kl_in_reward.controller=adaptive", "kl_in_reward.kl_coef=0.1", "kl_in_reward.target=0"],
            "algorithm.kl_in_reward.controller=adaptive with kl_coef=0.1, target=0.0: the adaptive controller "
            "multiplies kl_coef by a function of KL / target, so both must be > 0; set both, or use controller=fixed",
        ),
        (["kl_loss.kl_loss_coef=-1"], "algorithm.kl_loss.kl_loss_coef must be >= 0, got -1.0"),
        (
            ["kl_loss.ratio_weighted=true", "kl_loss.kl_estimator=full"],
            "algorithm.kl_loss.ratio_weighted=true with kl_estimator=full: the exact KL is not an estimate from samples"
            "; use ratio_weighted=false",
        ),
        (["correction.lower=-0.1"], "algorithm.correction.lower=-0.1, upper=None: 0 <= lower <= 1 <= upper must hold"),
        (["correction.lower=1.1"], "algorithm.correction.lower=1.1, upper=None: 0 <= lower <= 1 <= upper must hold"),
        (["correction.upper=0.9"], "algorithm.correction.lower=None, upper=0.9: 0 <= lower <= 1 <= upper must hold"),
        (
            ["correction.level=token", "correction.mode=mask"],
            "algorithm.correction.mode=mask with lower=None, upper=None: no weight could ever be outside the "
            "bounds; set a bound",
        ),
        (
            ["correction.level=token", "correction.mode=mask", "correction.lower=0"],
            "algorithm.correction.mode=mask with lower=0.0, upper=None: no weight could ever be outside the bounds; "
            "set a bound",
        ),
        (
            ["correction.upper=2.0"],
            "algorithm.correction.lower=None, upper=2.0 with level=null: there are no importance weights; set "
            "level=token, for example",
        ),
        (
            ["correction.lower=0.5"],
            "algorithm.correction.lower=0.5, upper=None with level=null: there are no importance weights",
        ),
        (["correction.lower=0"], "correction.lower=0.0, upper=None with level=null: there are no importance weights"),
        (["correction.mode=mask", "correction.upper=2"], "upper=2.0 with level=null: there are no importance weights"),
        (
            ["rejection.upper=0.1"],
            "algorithm.rejection.lower=None, upper=0.1, only_negative=False with kl_estimator=null: nothing is "
            "rejected; set kl_estimator=k3, for example",
        ),
        (
            ["rejection.lower=-0.1"],
            "algorithm.rejection.lower=-0.1, upper=None, only_negative=False with kl_estimator=nu",
        ),
        (
            ["rejection.only_negative=true"],
            "lower=None, upper=None, only_negative=True with kl_estimator=null: nothing",
        ),
        (
            ["reference.refresh_coef=0.5"],
            "algorithm.reference.refresh_coef=0.5 with refresh_every=0: the reference model is never updated, so the "
            "coefficient has no effect; set refresh_every=1, for example, or refresh_coef=1",
        ),
        (["reference.refresh_every=-1"], "algorithm.reference.refresh_every must be >= 0, got -1"),
        (["reference.refresh_every=1", "reference.refresh_coef=0"], "refresh_coef must be in (0, 1], got 0"),
        (["reference.refresh_every=1", "reference.refresh_coef=1.5"], "refresh_coef must be in (0, 1], got 1.5"),
        (
            ["correction.batch_normalize=true"],
            "algorithm.correction.batch_normalize=true with level=null: there are no importance weights; set",
        ),
        (
            ["correction.normalize=kept", "correction.mode=mask"],
            "algorithm.correction.normalize=kept with level=null: there are no importance weights; set level=token",
        ),
        (
            ["correction.normalize=kept", "correction.level=token", "correction.upper=2"],
            "algorithm.correction.normalize=kept with mode=truncate: no token is dropped, so all tokens would be "
            "counted; use mode=mask, or normalize=all",
        ),
        (
            [*KEPT, "correction.batch_normalize=true"],
            "algorithm.correction.normalize=kept with batch_normalize=true: both compensate for dropped tokens; use "
            "only one of them",
        ),
        (
            [*KEPT, "loss_agg_mode=token-sum"],
            "algorithm.loss_agg_mode=token-sum with correction.normalize=kept: token-sum does not divide by a "
            "number of tokens, so correction.normalize would have no effect; use another loss_agg_mode, or "
            "correction.normalize=all",
        ),
        (["correction.normalize=some"], "algorithm.correction.normalize=some: unknown choice; use one of all, kept"),
        (
            ["correction.level=row"],
            "algorithm.correction.level=row: unknown choice; use one of token, sequence, geometric, null",
        ),
        (
            ["rejection.kl_estimator=k1"],
            "algorithm.rejection.kl_estimator=k1 without lower and upper: nothing would be rejected; set upper",
        ),
        (["rejection.kl_estimator=k1+"], "algorithm.rejection.kl_estimator=k1+: unknown choice; use one of k1, k2"),
        (["loss_agg_mode=mean"], "algorithm.loss_agg_mode=mean: unknown choice; use one of token-mean, token-sum"),
        (["old_log_probs=engine"], "algorithm.old_log_probs=engine: unknown choice; use one of actor, rollout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_setting_that_contradicts_itself_or_another_is_refused_in_one_line(overrides, message):
    with pytest.raises(ConfigError) as error:
        algorithm(*overrides)
    assert "\n" not in str(error.value)
    assert message in str(error.value)
    assert str(error.value).startswith("algorithm.")


@pytest.mark.parametrize(
    "settings",
    [[], ["mean_level=group", "std_level=group"], ["mean_level=batch", "std_level=batch"], ["std_level=batch"]],
)
@pytest.mark.parametrize("section", ["reward_normalization", "advantage_normalization"])
def test_C6_leave_one_out_is_for_a_mean_alone(section, settings):
    with pytest.raises(ConfigError, match=rf"^algorithm.{section}.leave_one_out=true needs a mean and no std, because"):
        algorithm(*(f"{section}.{text}" for text in [*settings, "leave_one_out=true"]))
    for level in ("group", "batch"):
        assert algorithm(f"{section}.leave_one_out=true", f"{section}.mean_level={level}")


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_with_the_engines_log_probs_there_is_nothing_to_weigh(level):
    message = rf"^algorithm.old_log_probs=rollout with correction.level={level}: .* use old_log_probs=actor$"
    with pytest.raises(ConfigError, match=message):
        algorithm("old_log_probs=rollout", f"correction.level={level}")
    assert algorithm(f"correction.level={level}")


def test_with_the_engines_log_probs_the_update_may_still_move_too_far_from_them():
    assert algorithm("old_log_probs=rollout", "rejection.kl_estimator=k1", "rejection.upper=0.1")


@pytest.mark.parametrize(
    "settings",
    [
        ["correction.level=token", "correction.lower=0", "correction.upper=1"],
        ["correction.level=token", "correction.lower=1"],
        ["correction.level=token"],  # truncation without a bound is plain importance sampling
        ["correction.level=token", "correction.lower=0"],
        ["correction.level=token", "correction.mode=mask", "correction.lower=0.5"],
        ["correction.level=token", "correction.mode=mask", "correction.lower=0", "correction.upper=2"],
        ["correction.level=sequence", "correction.mode=mask", "correction.upper=1"],
        ["correction.mode=mask"],  # off
        ["rejection.level=token"],  # off
        ["rejection.kl_estimator=k3", "rejection.upper=0", "rejection.only_negative=true"],
        ["rejection.kl_estimator=k1", "rejection.lower=0"],
        ["reward_shaping.scale=-1"],
        ["reward_shaping.bias=-3"],
        ["entropy_target=0.001"],
        ["entropy_target=0.2", "entropy_coef=0.005"],
        ["entropy_coef=0.5"],  # without an entropy target, the entropy coefficient stays constant
    ],
    ids=" ".join,
)
def test_what_is_on_the_border_or_off_is_accepted(settings):
    algorithm(*settings)


def test_a_correction_has_the_bounds_that_it_is_given_and_no_others():
    for settings in ([], ["correction.level=token"]):
        assert (algorithm(*settings).correction.lower, algorithm(*settings).correction.upper) == (None, None)


@pytest.mark.parametrize("section", ["reward_normalization", "advantage_normalization"])
def test_a_normalisation_is_on_with_either_part(section):
    assert not getattr(algorithm(), section).on
    assert getattr(algorithm(f"{section}.mean_level=batch"), section).on
    assert getattr(algorithm(f"{section}.std_level=group"), section).on
    assert not getattr(algorithm(f"{section}.unbiased=false"), section).on


REWARD, LOSS, FULL = "kl_in_reward.kl_coef=0.1", "kl_loss.kl_loss_coef=0.1", "kl_estimator=full"


@pytest.mark.parametrize(
    ("overrides", "reference", "full", "log_probs"),
    [
        ([], False, False, False),
        # the exact KL needs no forward pass of the reference model if the coefficient of the KL is 0
        ([f"kl_in_reward.{FULL}", f"kl_loss.{FULL}"], False, False, False),
        ([REWARD], True, False, True),
        ([LOSS], True, False, True),
        ([REWARD, f"kl_in_reward.{FULL}"], True, True, False),
        ([LOSS, f"kl_loss.{FULL}"], True, True, False),
        ([REWARD, LOSS, f"kl_loss.{FULL}"], True, True, True),
        ([REWARD, LOSS, f"kl_in_reward.{FULL}"], True, True, True),
        ([REWARD, LOSS, f"kl_in_reward.{FULL}", f"kl_loss.{FULL}"], True, True, False),
    ],
)
def test_the_reference_ships_what_the_kl_terms_read(overrides, reference, full, log_probs):
    made = algorithm(*overrides)
    assert (made.needs_reference, made.needs_full_kl, made.needs_ref_log_probs) == (reference, full, log_probs)
