"""Advantages from rewards that are weighted by the policy's entropy (methods GTPO and GRPO-S of arXiv 2508.04349).

The rewards of correct answers are larger where the policy's entropy is high, and the rewards of wrong answers are more
negative where the policy's entropy is low.
"""

import math

import torch
from torch import Tensor

from rltrain.algorithms.advantages.outcome import counted_rows, known_successes, spread
from rltrain.algorithms.advantages.returns import from_left, places, to_left
from rltrain.algorithms.normalization import (
    group_index,
    group_sum,
    normalize_advantages,
    normalize_rewards,
    statistics_of,
)
from rltrain.algorithms.ratio import as_float, as_mask, masked, masked_row_mean
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS

EPS = 1e-8  # added to each entropy (in nats), so that 1 / entropy is finite for an entropy of 0


@ADVANTAGE_ESTIMATORS.register("gtpo", statistics="group")
def gtpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    valid: Tensor,
    successes: Tensor,
    entropies: Tensor,
    *,
    alpha_1: float = 1.0,
    alpha_2: float = 0.1,
    separate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = (r_{i,t} - mean(r)) / (std(r) + 1e-6) from entropy-weighted rewards; GTPO, arXiv 2508.04349.

        r_{i,t} =   alpha_1 + alpha_2 d_t H_{i,t} / sum_k H_{k,t}               correct answer i, eq. 3
        r_{i,t} = -(alpha_1 + alpha_2 h_t (1 / H_{i,t}) / sum_k (1 / H_{k,t}))  wrong answer i, eq. 5

    H_{i,t} is the policy's entropy at the t-th trained token of answer i, before the policy is updated; tool-output
    tokens are skipped. In eq. 3 of the GTPO paper, the sum over k runs over the d_t correct answers of the group (same
    `uid`) that have a t-th trained token. In eq. 5 of the GTPO paper, the sum over k runs over the h_t wrong answers of
    the group that have a t-th trained token. The knobs alpha_1 and alpha_2 set the mean of the token rewards r_{i,t}:
    at every token position t, the mean over the correct answers is alpha_1 + alpha_2, and the mean over the wrong
    answers is -(alpha_1 + alpha_2). Among correct answers, tokens with a higher entropy get larger rewards. Among wrong
    answers, tokens with a lower entropy get more negative rewards. The number 1e-8 is added to each entropy, so that
    tokens whose entropies are all 0 get equal rewards.

    The mean and the unbiased std of the token rewards r_{i,t} are computed over all trained tokens of the group. With
    `separate`, mean(r) and std(r) are computed separately for correct and wrong answers, as in eq. 6 of the GTPO paper.
    With `separate`, the mean advantage of the correct answers is 0, and so is the mean advantage of the wrong answers.
    With `separate`, the policy does not learn to prefer correct answers to wrong ones.

    A group whose answers are all correct or all wrong gets advantages of exactly 0, and so does a group with only one
    answer. The GTPO paper builds on DAPO, whose dynamic sampling drops groups in which all answers have the same
    outcome. `successes` is 1 for a correct answer, 0 for a wrong one, and NaN if no reward function decides whether the
    answer is correct. A row that is not `valid`, or whose entry in `successes` is NaN, is excluded from all sums and
    statistics and gets an advantage of 0. `gtpo` does not read `token_level_rewards`, so reward shaping and KL
    penalties in the reward have no effect.

    token_level_rewards, response_mask and entropies are (B, T); uid, valid and successes are (B,). The advantages and
    the returns are (B, T) and 0 in masked slots. `gtpo` returns the token rewards r_{i,t} as the returns, and not sums
    of later rewards.

    Raises:
        ValueError: if alpha_1 or alpha_2 is not finite and >= 0, if both are 0, or if `successes` is NaN for all valid
            rows.
    """
    _check_weights(alpha_1=alpha_1, alpha_2=alpha_2)
    learns, correct = _learning_rows(response_mask, uid, valid, successes)
    mask = as_mask(response_mask) & learns[:, None]
    place = places(mask)
    aligned = to_left(as_float(entropies.detach()).double(), mask, place)
    live = torch.arange(mask.shape[-1], device=mask.device) < mask.sum(-1, keepdim=True)
    outcome = _by_outcome(uid, correct)
    shares = _relative_shares(aligned, outcome, live, correct[:, None])
    rewards = from_left(masked(_signed(alpha_1 + alpha_2 * shares, correct[:, None]), live), mask, place)
    advantages = normalize_advantages(
        rewards, mask, outcome if separate else uid, mean_level="group", std_level="group"
    )
    dtype = as_float(token_level_rewards).dtype
    return advantages.to(dtype), rewards.to(dtype)


@ADVANTAGE_ESTIMATORS.register("grpo_s", statistics="group")
def grpo_s(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    valid: Tensor,
    successes: Tensor,
    entropies: Tensor,
    *,
    beta_1: float = 1.0,
    beta_2: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = (r_i - mean(r)) / (std(r) + 1e-6) from entropy-weighted rewards; GRPO-S, arXiv 2508.04349.

        r_i =   beta_1 + beta_2 n H_i / sum_k H_k                   correct answer i, eq. 9
        r_i = -(beta_1 + beta_2 m (1 / H_i) / sum_k (1 / H_k))      wrong answer i, eq. 9

    H_i is the entropy of the policy before the update, averaged over the trained tokens of answer i (eq. 8 of arXiv
    2508.04349). For a correct answer, the sum over k runs over the n correct answers of the group (same `uid`). For a
    wrong answer, the sum over k runs over the m wrong answers of the group. The mean and the unbiased std of the answer
    rewards r_i are computed over the answers of the group, and each answer counts once. The number 1e-8 is added to
    each entropy H_i.

    A group whose answers are all correct or all wrong gets advantages of exactly 0, and so does a group with only one
    answer. `successes` is 1 for a correct answer, 0 for a wrong one, and NaN if no reward function decides whether the
    answer is correct. A row that is not `valid`, or whose entry in `successes` is NaN, is excluded from all sums and
    statistics and gets an advantage of 0. `grpo_s` does not read `token_level_rewards`, so reward shaping and KL
    penalties in the reward have no effect.

    token_level_rewards, response_mask and entropies are (B, T); uid, valid and successes are (B,). The advantages are
    (B, T) and 0 in masked slots. The returns equal the advantages.

    Raises:
        ValueError: if beta_1 or beta_2 is not finite and >= 0, if both are 0, or if `successes` is NaN for all valid
            rows.
    """
    _check_weights(beta_1=beta_1, beta_2=beta_2)
    learns, correct = _learning_rows(response_mask, uid, valid, successes)
    mean = masked_row_mean(as_float(entropies.detach()).double(), as_mask(response_mask))
    shares = _relative_shares(mean, _by_outcome(uid, correct), learns[:, None], correct[:, None])
    rewards = _signed(beta_1 + beta_2 * shares, correct[:, None])[:, 0]
    advantages = normalize_rewards(rewards, uid, learns, mean_level="group", std_level="group")
    return spread(advantages.to(as_float(token_level_rewards).dtype), response_mask)


def _check_weights(**weights: float) -> None:
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"{name}={weight} must be finite and >= 0; leave it out to use the default")
    if not any(weights.values()):
        shown = ", ".join(f"{name}={weight}" for name, weight in weights.items())
        raise ValueError(f"{shown}: every reward would be 0, so nothing is learnt; set at least one weight above 0")


def _learning_rows(response_mask: Tensor, uid: Tensor, valid: Tensor, successes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask (B,) of the rows that are trained on, and the mask (B,) of the correct rows.

    A row is trained on if its outcome is known and its group has both correct and wrong answers.
    """
    decided = known_successes(successes, counted_rows(response_mask, valid))
    correct = decided & (successes > 0)
    mixed = statistics_of(correct.double(), group_index(uid), decided).varied
    return decided & mixed, correct


def _by_outcome(uid: Tensor, correct: Tensor) -> Tensor:
    """Return for each row (B,) an id of the row's group and outcome (correct or wrong).

    Rows of the same group with the same outcome have the same id, and all other pairs of rows have different ids.
    """
    return 2 * group_index(uid) + correct.long()


def _relative_shares(entropies: Tensor, outcome: Tensor, counted: Tensor, correct: Tensor) -> Tensor:
    """Compute n w / sum(w), with w = entropy for correct and w = 1 / entropy for wrong answers: (B, T) -> (B, T).

    A slot is one position (row, column) of a (B, T) tensor. For each slot, sum(w) adds up the weights w of n slots:
    those slots of the same column that are marked in `counted` (B, T) and whose rows have the same entry in `outcome`
    (B,). Because of the factor n, the mean of n w / sum(w) over these n slots is 1. The results in slots that are not
    marked in `counted` are meaningless.
    """
    # An entropy is clamped to at least 0, because rounding can make an entropy slightly negative.
    entropies = entropies.clamp(min=0) + EPS
    weights = masked(torch.where(correct, entropies, 1 / entropies), counted)
    members = group_index(outcome)
    return weights * group_sum(counted.double(), members) / group_sum(weights, members)


def _signed(rewards: Tensor, correct: Tensor) -> Tensor:
    return torch.where(correct, rewards, -rewards)
