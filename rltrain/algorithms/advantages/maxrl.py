"""Advantages of maximum-likelihood RL (MaxRL): deviation from the group's mean reward, divided by the mean reward."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import group_index, statistics_of
from rltrain.algorithms.ratio import masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("maxrl", statistics="group", scores_from_zero=True)
def maxrl(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = (r_i - mean(r_group)) / mean(r_group); MaxRL, arXiv 2602.02710, Algorithm 1.

    r_i is the sum of the rewards over the trained tokens of row i. A group is the set of valid rows with the same
    `uid`. The rewards in the MaxRL paper are 1 for a correct answer and 0 for a wrong one. With k correct answers among
    the N answers of a group, a correct answer gets the advantage (N - k) / k, and a wrong answer gets the advantage -1.
    A prompt that is rarely solved weighs more under MaxRL than under GRPO. In expectation, MaxRL's policy gradient is
    the gradient of a truncated power series of log p, where p is the probability of a correct answer.

    The formula of MaxRL has no meaning for a group whose mean reward is below 0. A group whose mean reward is 0 or
    below gets advantages of exactly 0, and so does a group that has only one row, or whose rewards are all equal. A row
    that is not `valid` is excluded from the statistics and gets an advantage of 0. In contrast to the code of MaxRL's
    authors, which adds 1e-6 to the mean, `maxrl` divides by the exact mean.

    token_level_rewards and response_mask are (B, T); uid and valid are (B,). The advantages are (B, T) and 0 in masked
    slots. The returns equal the advantages.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    raw = masked(scores, counted).double()
    of = statistics_of(raw, group_index(uid), counted)
    # A group with a NaN or inf reward gets advantages that are not finite, so that the group is not mistaken for a
    # group with equal rewards.
    learns = counted & of.varied & ((of.mean > 0) | ~of.mean.isfinite())
    return spread(masked((raw - of.mean) / of.mean, learns).to(scores.dtype), response_mask)
