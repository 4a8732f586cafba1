"""Tests that correction and rejection remove only a token's policy term from the actor's loss."""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

from rltrain.algorithms import (
    POLICY_LOSSES,
    TOKEN_SELECTORS,
    columns_of,
    correction_statistics,
    rollout_correction,
)
from rltrain.algorithms.aggregation import LOSS_AGG_MODES
from rltrain.settings.compose import compose
from workers.training.actor import actor_loss, policy_term

ROWS, TOKENS = 2, 4
COUNTS = {"num_tokens": ROWS * TOKENS, "num_sequences": ROWS, "max_response_length": 16}
# Weight of a kept token's loss in each mode of loss aggregation, for two answers of four tokens.
SHARE = {
    "token-mean": 1 / 8, "token-sum": 1.0, "seq-mean-token-sum": 1 / 2, "seq-mean-token-mean": 1 / 8,
    "seq-mean-token-sum-norm": 1 / 32,
}  # fmt: skip
# For each preset, log-ratios log(engine / actor) of the tokens of two rows, with which the preset drops some tokens.
# Icepop keeps tokens with weights in [0.5, 5], and decoupled_ppo keeps tokens with weights up to 5.
# A log-ratio of -2 gives a weight of 7.4, which is outside the limits of icepop and decoupled_ppo.
# Sequence masking drops a row with a negative advantage and a mean log-ratio above 0.5.
FAR = {
    "icepop": [[0, 0, -2, -2], [0, 0, -2, -2]],
    "decoupled_ppo": [[0, 0, 0, -2], [0, 0, 0, -2]],
    "sequence_masking": [[0, 0, 0, 0], [1, 1, 1, 1]],
}


@functools.cache
def algorithm_of(preset, *overrides):
    return compose([f"algorithm={preset}", *(f"algorithm.{text}" for text in overrides)])[0].algorithm


def columns_of_batch(far, *, advantage=1.0):
    """Return the columns of two answers whose policy ratio is 1.

    The argument `far` is the engine's log-probs minus the actor's log-probs.
    """
    far = torch.tensor(far, dtype=torch.float64)
    log_probs = torch.full((ROWS, TOKENS), -3.0, dtype=torch.float64, requires_grad=True)
    old = log_probs.detach()
    return {
        "response_mask": torch.ones(ROWS, TOKENS, dtype=torch.bool), "log_probs": log_probs, "old_log_probs": old,
        "rollout_log_probs": old + far, "ref_log_probs": old - 0.5,
        "advantages": torch.full_like(old, advantage),
        "entropy": torch.full_like(old, 0.7).requires_grad_(),
    }  # fmt: skip


def gradients(columns, algorithm, *, entropy_coef=0.0, names=("log_probs",)):
    loss, _, sums = actor_loss(columns, algorithm, entropy_coef=entropy_coef, **COUNTS)
    return torch.autograd.grad(loss, [columns[name] for name in names]), sums


def statistics_of(batch, algorithm):
    """Return the statistics of the importance weights of all rows, or None if the settings need none."""
    if not algorithm.correction.needs_statistics:
        return None
    columns = batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"]
    weights, kept, _ = rollout_correction(*columns, **algorithm.correction.weighting)
    return correction_statistics(weights, kept, batch["response_mask"], level=algorithm.correction.level)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("preset", FAR)
def test_A4_dropping_some_tokens_leaves_the_gradient_of_a_kept_token_as_it_was(preset, mode):
    columns = columns_of_batch(FAR[preset], advantage=-1.0)
    (gradient,), sums = gradients(columns, algorithm_of(preset, f"loss_agg_mode={mode}"))
    kept = torch.tensor(FAR[preset]) == 0
    assert torch.allclose(gradient, kept.double() * SHARE[mode], rtol=1e-12)
    name = "rejection" if preset == "sequence_masking" else "correction"
    # the metric is a sum over tokens, and dividing it by the number of trained tokens gives the fraction
    assert sums[f"{name}_dropped_fraction"].item() == (~kept).sum()
    assert sums["ratio_mean"].item() == ROWS * TOKENS  # the metrics of the loss itself include dropped tokens


@pytest.mark.parametrize("preset", FAR)
def test_A4_the_presets_own_aggregation_gives_an_eighth_to_each_of_eight_tokens(preset):
    (gradient,), _ = gradients(columns_of_batch(FAR[preset], advantage=-1.0), algorithm_of(preset))
    assert sorted(set(gradient.flatten().tolist())) == [0, 0.125]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("preset", FAR)
def test_A4_dropped_tokens_keep_their_kl_and_entropy_terms(preset, mode):
    """With the k2 estimator and a gap of 0.5 nats to the reference, the gradient of a token's KL term is 0.5."""
    terms = ["kl_loss.kl_loss_coef=0.1", "kl_loss.kl_estimator=k2", f"loss_agg_mode={mode}"]
    columns = columns_of_batch(FAR[preset], advantage=-1.0)
    algorithm = algorithm_of(preset, *terms)
    (by_log_prob, by_entropy), sums = gradients(columns, algorithm, entropy_coef=0.3, names=("log_probs", "entropy"))
    kept = torch.tensor(FAR[preset]) == 0
    assert torch.allclose(by_log_prob, (kept.double() + 0.1 * 0.5) * SHARE[mode], rtol=1e-12)
    assert torch.allclose(by_entropy, torch.full_like(by_entropy, -0.3 * SHARE[mode]), rtol=1e-12)
    assert sums["entropy"].item() == pytest.approx(0.7 * ROWS * TOKENS)
    assert sums["ref_kl"].item() == pytest.approx(0.125 * ROWS * TOKENS)


def test_dropping_every_token_leaves_kl_and_entropy_alone():
    columns = columns_of_batch([[-2] * TOKENS] * ROWS)
    algorithm = algorithm_of("icepop", "kl_loss.kl_loss_coef=0.1", "kl_loss.kl_estimator=k2")
    (by_log_prob, by_entropy), _ = gradients(columns, algorithm, entropy_coef=0.3, names=("log_probs", "entropy"))
    assert torch.allclose(by_log_prob, torch.full_like(by_log_prob, 0.05 / 8), rtol=1e-12)
    assert torch.allclose(by_entropy, torch.full_like(by_entropy, -0.3 / 8), rtol=1e-12)


def test_a_dropped_token_whose_loss_is_not_a_number_adds_exactly_nothing():
    """A custom loss may divide by 0 where engine and actor differ a lot, and NaN times a weight of 0 is still NaN."""
    far = torch.tensor(FAR["icepop"]) != 0

    def broken(log_probs, old_log_probs, advantages, response_mask):
        return torch.where(far, torch.nan, -advantages * log_probs), {}

    POLICY_LOSSES.register("broken")(broken)
    try:
        (gradient,), _ = gradients(columns_of_batch(FAR["icepop"]), algorithm_of("icepop", "loss_mode=broken"))
    finally:
        del POLICY_LOSSES._entries["broken"]
    assert torch.equal(gradient, -(~far).double() / 8)


# Tests of the options that change the scale of the policy loss


def scaled_gradients(columns, algorithm):
    statistics = statistics_of(columns, algorithm)
    loss, _, sums = actor_loss(columns, algorithm, entropy_coef=0.3, statistics=statistics, **COUNTS)
    return torch.autograd.grad(loss, [columns["log_probs"], columns["entropy"]]), sums


# Tokens whose log(engine / actor) is -2 are dropped. HALVES keeps two tokens of each row. ONE_ROW keeps three tokens of
# row 0 and none of row 1. Depending on the loss aggregation, the gradient of a kept token is 1 divided by the number of
# kept tokens, of kept rows, of kept tokens of the row times kept rows, or of kept rows times the maximum length of 16.
HALVES, ONE_ROW = [[0, 0, -2, -2], [0, 0, -2, -2]], [[0, 0, 0, -2], [-2, -2, -2, -2]]
SHARE_OF_KEPT = {
    "token-mean": (1 / 4, 1 / 3), "seq-mean-token-sum": (1 / 2, 1.0), "seq-mean-token-mean": (1 / 4, 1 / 3),
    "seq-mean-token-sum-norm": (1 / 32, 1 / 16),
}  # fmt: skip


@pytest.mark.parametrize("mode", SHARE_OF_KEPT)
@pytest.mark.parametrize("case", [0, 1])
def test_kept_tokens_alone_count_in_the_mean_of_the_policy_loss_and_all_in_that_of_kl_and_entropy(mode, case):
    far = (HALVES, ONE_ROW)[case]
    terms = ["kl_loss.kl_loss_coef=0.1", "kl_loss.kl_estimator=k2", f"loss_agg_mode={mode}"]
    columns = columns_of_batch(far, advantage=-1.0)
    (by_log_prob, by_entropy), _ = scaled_gradients(
        columns, algorithm_of("icepop", "correction.normalize=kept", *terms)
    )
    kept = (torch.tensor(far) == 0).double()
    expected = kept * SHARE_OF_KEPT[mode][case] + 0.1 * 0.5 * SHARE[mode]
    assert torch.allclose(by_log_prob, expected, rtol=1e-12)
    assert torch.allclose(by_entropy, torch.full_like(by_entropy, -0.3 * SHARE[mode]), rtol=1e-12)


def test_A6_with_kept_tokens_alone_in_the_mean_and_none_kept_the_policy_loss_is_zero():
    columns = columns_of_batch([[-2] * TOKENS] * ROWS)
    (by_log_prob, _), sums = scaled_gradients(columns, algorithm_of("icepop", "correction.normalize=kept"))
    assert torch.equal(by_log_prob, torch.zeros_like(by_log_prob))
    assert sums["correction_dropped_fraction"].item() == ROWS * TOKENS


def test_weights_divided_by_their_mean_on_a_case_worked_by_hand():
    """The weights are 1, 1/2, 1/4, 1 and 1, 2, 2 (truncated from 4), 1, so their mean is 8.75 / 8."""
    columns = columns_of_batch([[0, math.log(2), math.log(4), 0], [0, -math.log(2), -math.log(4), 0]])
    algorithm = algorithm_of("tis", "correction.batch_normalize=true")
    (gradient, _), sums = scaled_gradients(columns, algorithm)
    weights = torch.tensor([[1, 0.5, 0.25, 1], [1, 2, 2, 1]], dtype=torch.float64)
    assert torch.allclose(gradient, -weights / 8.75, rtol=1e-12)
    assert sums["correction_weight_mean"].item() == 8.75  # the metric uses the weights before the division


def test_rows_of_a_dropped_row_count_with_weight_0_in_the_mean_over_rows():
    """Row 0 has the weight 1.5 and row 1 is dropped, so the mean is 0.75 and the weight of row 0 becomes 2."""
    columns = columns_of_batch([[-math.log(1.5), 0, 0, 0], [-2, -2, 0, 0]])
    bounds = ["correction.level=sequence", "correction.mode=mask", "correction.upper=2"]
    algorithm = algorithm_of("grpo", *bounds, "correction.batch_normalize=true")
    (gradient, _), _ = scaled_gradients(columns, algorithm)
    assert torch.allclose(gradient, torch.tensor([[-2.0] * 4, [0.0] * 4], dtype=torch.float64) / 8, rtol=1e-12)


@pytest.mark.parametrize("upper", [1.3, 3.0])
def test_the_loss_of_self_normalised_weights_is_the_weighted_mean_in_float64(upper):
    """With token-mean, the loss is sum w l / sum w with l = -A r, so its gradient is -w A r / sum w."""
    generator = torch.Generator().manual_seed(5)
    columns = columns_of_batch((0.4 * torch.randn(ROWS, TOKENS, generator=generator)).tolist())
    columns["response_mask"][1, 2] = False
    columns["advantages"] = torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)
    columns["old_log_probs"] = columns["old_log_probs"] + 0.1
    columns["rollout_log_probs"] = columns["rollout_log_probs"] + 0.1
    wide = ["loss.clip_ratio_low=1.0", "loss.clip_ratio_high=100.0"]
    algorithm = algorithm_of("tis", f"correction.upper={upper}", "correction.batch_normalize=true", *wide)
    loss, _, _ = actor_loss(
        columns, algorithm, entropy_coef=0.0, statistics=statistics_of(columns, algorithm),
        **COUNTS | {"num_tokens": 7},
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, columns["log_probs"])
    expected, total, weighted = {}, 0.0, 0.0
    for row, token in itertools.product(range(ROWS), range(TOKENS)):
        if not columns["response_mask"][row, token]:
            continue
        old, rollout, now, advantage = (
            columns[name][row, token].item()
            for name in ("old_log_probs", "rollout_log_probs", "log_probs", "advantages")
        )
        weight = min(math.exp(old - rollout), upper)
        expected[row, token] = -weight * advantage * math.exp(now - old)
        total, weighted = total + weight, weighted + expected[row, token]
    assert loss.item() == pytest.approx(weighted / total, rel=1e-12)
    for (row, token), value in expected.items():
        assert gradient[row, token].item() == pytest.approx(value / total, rel=1e-12)
    assert gradient[1, 2].item() == 0


@pytest.mark.parametrize("option", ["batch_normalize=true", "normalize=kept"])
def test_statistics_of_a_micro_batch_never_stand_in_for_those_of_the_mini_batch(option):
    columns = columns_of_batch(HALVES)
    with pytest.raises(AssertionError, match="of the whole mini-batch"):
        actor_loss(columns, algorithm_of("icepop", f"correction.{option}"), entropy_coef=0.0, **COUNTS)


# Tests of the squared log-ratio of Kimi K2.5, arXiv 2602.02276 eq. 1


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_squared_log_ratio_pulls_every_token_to_the_engine_also_dropped_ones(mode):
    """The derivative of `coef * (log_pi - log_pi_engine)**2` by `log_pi` is `2 * coef * (log_pi - log_pi_engine)`."""
    algorithm = algorithm_of("icepop", "squared_log_ratio_coef=0.1", f"loss_agg_mode={mode}")
    far = torch.tensor(FAR["icepop"], dtype=torch.float64)
    columns = columns_of_batch(FAR["icepop"], advantage=-1.0)
    loss, parts, _ = actor_loss(columns, algorithm, entropy_coef=0.0, **COUNTS)
    (gradient,) = torch.autograd.grad(loss, columns["log_probs"])
    assert torch.allclose(gradient, ((far == 0).double() - 0.2 * far) * SHARE[mode], rtol=1e-12)
    assert parts["squared_log_ratio"].item() == pytest.approx((far.square() * SHARE[mode]).sum().item())


def test_the_squared_log_ratio_ignores_masked_tokens_and_has_no_gradient_beyond_20_nats():
    algorithm = algorithm_of("grpo", "squared_log_ratio_coef=1.0", "loss_agg_mode=token-sum")
    columns = columns_of_batch([[1.0] * TOKENS, [-25.0] * TOKENS], advantage=0.0)
    columns["response_mask"][0, 1:] = False
    columns["rollout_log_probs"][0, 1:] = torch.nan
    loss, parts, _ = actor_loss(columns, algorithm, entropy_coef=0.0, **COUNTS)
    (gradient,) = torch.autograd.grad(loss, columns["log_probs"])
    assert gradient.tolist() == [[-2.0] + [0.0] * (TOKENS - 1), [0.0] * TOKENS]
    assert parts["squared_log_ratio"].item() == pytest.approx(1 + 400 * TOKENS)


# Tests of off-policy sequence masking, arXiv 2512.02556


def test_the_sequence_mask_compares_the_engine_with_the_policy_of_each_update():
    """The policy update moves row 0 towards the engine and row 1 away from the engine.

    Row 0 differs too much from the engine only before the update, and row 1 only after the update.
    """
    algorithm = algorithm_of("sequence_masking")
    columns = columns_of_batch([[0.6] * TOKENS, [0.4] * TOKENS], advantage=-1.0)
    assert gradients(columns, algorithm)[0][0].abs().sum(-1).tolist() == pytest.approx([0, 0.5])
    moved = columns["log_probs"].detach() + torch.tensor([[0.15], [-0.15]], dtype=torch.float64)
    (gradient,), sums = gradients({**columns, "log_probs": moved.requires_grad_()}, algorithm)
    assert gradient[0].abs().sum() > 0
    assert gradient[1].abs().sum() == 0
    assert sums["rejection_divergence"].item() == pytest.approx(4 * 0.45 + 4 * 0.55)


def test_the_sequence_mask_never_drops_a_good_answer():
    columns = columns_of_batch([[9.0] * TOKENS, [0.0] * TOKENS])
    assert bool((gradients(columns, algorithm_of("sequence_masking"))[0][0] != 0).all())


def test_the_sequence_mask_goes_with_the_engines_log_probs_as_the_old_ones():
    """As in arXiv 2512.02556, the ratio is relative to the policy that sampled the tokens."""
    algorithm = algorithm_of("sequence_masking", "old_log_probs=rollout")
    columns = columns_of_batch([[0.1] * TOKENS, [0.6] * TOKENS], advantage=-1.0)
    columns["old_log_probs"] = columns["rollout_log_probs"]
    (gradient,), _ = gradients(columns, algorithm)
    assert gradient[0].tolist() == pytest.approx([torch.tensor(-0.1).exp().item() / 8] * TOKENS)
    assert gradient[1].tolist() == [0.0] * TOKENS


# Tests of stale answers


def test_stale_answers_weigh_by_how_likely_the_actor_still_finds_them_up_to_two():
    """With a single optimizer step, the policy ratio is 1, and only the correction depends on the sampling policy."""
    stale = compose(["trainer.max_staleness=4"])[0].algorithm
    columns = columns_of_batch([[0, math.log(2), math.log(4), 0], [0, -math.log(1.5), -math.log(4), 0]])
    (gradient,), sums = gradients(columns, stale)
    expected = torch.tensor([[1, 0.5, 0.25, 1], [1, 1.5, 2, 1]], dtype=torch.float64) / -8
    assert torch.allclose(gradient, expected, rtol=1e-12)
    assert sums["correction_outside_fraction"].item() == 1
    (uncorrected,), _ = gradients(columns, algorithm_of("grpo"))
    assert torch.equal(uncorrected, torch.full_like(expected, -1 / 8))


# Tests of every loss with every split into micro-batches


SETTINGS = {
    "icepop": ["correction.level=token", "correction.mode=mask", "correction.lower=0.8", "correction.upper=1.3"],
    "masked rows": ["correction.level=geometric", "correction.mode=mask", "correction.upper=1.05"],
    "weights and rejection": [
        "correction.level=sequence", "correction.upper=2.0", "rejection.kl_estimator=k1", "rejection.upper=0.02",
        "rejection.only_negative=true",
    ],
    "kept tokens": [
        "correction.level=token", "correction.mode=mask", "correction.upper=1.1", "correction.normalize=kept",
    ],
    "kept rows": [
        "correction.level=sequence", "correction.mode=mask", "correction.upper=1.1", "correction.normalize=kept",
    ],
    "self-normalised tokens": [
        "correction.level=token", "correction.mode=mask", "correction.upper=1.1", "correction.batch_normalize=true",
    ],
    "self-normalised rows": [
        "correction.level=sequence", "correction.mode=mask", "correction.upper=1.1", "correction.batch_normalize=true",
    ],
    "rejected answers, and the squared log-ratio": [
        "rejection.kl_estimator=k3", "rejection.level=max", "rejection.upper=0.2", "squared_log_ratio_coef=0.3",
    ],
    "rejected tokens": ["rejection.kl_estimator=abs", "rejection.level=token", "rejection.upper=0.3"],
}  # fmt: skip


def uneven_batch(name):
    """Return six rows with masked tokens between trained tokens, where row 4 has no trained token.

    The batch has every column that the loss and its token selector read.
    """
    generator = torch.Generator().manual_seed(3)

    def normal(scale=1.0):
        return scale * torch.randn(6, 5, generator=generator, dtype=torch.float64)

    mask = torch.rand(6, 5, generator=generator) < 0.8
    mask[:, 0], mask[4] = True, False
    old = normal() - 3
    batch = {
        "response_mask": mask, "old_log_probs": old, "log_probs": old + normal(0.1),
        "rollout_log_probs": old + normal(0.3), "advantages": normal(), "entropies": normal().abs(),
        "random_draws": torch.rand(6, 5, generator=generator, dtype=torch.float64),
    }  # fmt: skip
    if name in TOKEN_SELECTORS.names():
        selector = TOKEN_SELECTORS.get(name)
        batch["selected"] = selector(*(batch[column] for column in columns_of(selector)))
    return batch


def split_gradient(batch, algorithm, parts):
    """Return the gradient with respect to all rows' log-probs, and the metrics, both summed over micro-batches."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    mask, totals, statistics = batch["response_mask"], {}, statistics_of(batch, algorithm)
    counts = {"num_tokens": int(mask.sum()), "num_sequences": int(mask.any(-1).sum()), "max_response_length": 16}
    for rows in parts:
        columns = {name: column[rows] for name, column in {**batch, "log_probs": log_probs}.items()}
        loss, _, sums = actor_loss(columns, algorithm, entropy_coef=0.0, statistics=statistics, **counts)
        loss.backward()
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value
    return log_probs.grad, totals


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_A1_what_is_dropped_does_not_depend_on_the_split_into_micro_batches(name, settings):
    batch, chosen = uneven_batch(name), algorithm_of("grpo", f"loss_mode={name}", *SETTINGS[settings])
    for mode in LOSS_AGG_MODES:
        if mode == "token-sum" and chosen.correction.normalize == "kept":
            continue  # a sum has no count, so this combination is refused
        algorithm = replace(chosen, loss_agg_mode=mode)
        whole, expected = split_gradient(batch, algorithm, [torch.arange(6)])
        assert whole.abs().max() > 1e-4
        for parts in (torch.arange(6).split(1), torch.tensor([5, 0, 4, 2, 1, 3]).split([2, 3, 1])):
            gradient, sums = split_gradient(batch, algorithm, parts)
            assert (gradient - whole).abs().max() <= 1e-10 * whole.abs().max()
            assert all(sums[key].item() == pytest.approx(value.item(), rel=1e-10) for key, value in expected.items())
        dropped = sum(value.item() for key, value in expected.items() if key.endswith("dropped_fraction"))
        assert 0 < dropped < batch["response_mask"].sum()


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_A4_a_kept_token_has_the_term_that_it_has_without_rejection(name):
    """A sequence-level loss, such as gspo, still covers all trained tokens of a row."""
    batch = uneven_batch(name)
    plain, _, _ = policy_term(batch, algorithm_of("grpo", f"loss_mode={name}"))
    some, _, sums = policy_term(batch, algorithm_of("grpo", f"loss_mode={name}", *SETTINGS["rejected tokens"]))
    far = batch["response_mask"] & ((batch["log_probs"] - batch["rollout_log_probs"]).abs() > 0.3)
    assert sums["rejection_dropped_fraction"].item() == far.sum() > 0
    assert torch.equal(some, torch.where(far, 0, plain))
