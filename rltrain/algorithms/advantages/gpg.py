"""Advantages of group policy gradient (GPG)."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import group_index, normalize_rewards, statistics_of
from rltrain.algorithms.ratio import check_positive, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("gpg", statistics="batch")
def gpg(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor, *, norm_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = alpha (r_i - mean(r_group)) / norm_factor, alpha = n / n_varied; GPG, arXiv 2504.02546.

    In the factor alpha, n is the number of valid rows in the batch, and n_varied is the number of valid rows whose
    group has differing rewards. Rows of a group with equal rewards add nothing to the gradient, but count in the
    divisor of a mean over the batch. The factor alpha changes the divisor of the mean from n to n_varied, the number of
    rows that can add to the gradient. `norm_factor` is F_norm of the GPG paper; only a constant F_norm is supported.
    The reward r_i is the sum of the rewards over the trained tokens of row i. A group is the set of valid rows with the
    same `uid`. A group that has only one row, or whose rewards are all equal, gets advantages of exactly 0. A row that
    is not `valid` is excluded from the statistics and gets an advantage of 0.

    token_level_rewards and response_mask are (B, T); uid and valid are (B,). The advantages are (B, T) and 0 in masked
    slots. The returns equal the advantages.
    """
    check_positive(norm_factor=norm_factor)
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    varied = statistics_of(masked(scores, counted), group_index(uid), counted).varied & counted
    # the counts are converted to float64, because dividing two int tensors would give float32
    alpha = counted.sum().double() / varied.sum().clamp(min=1)
    deviations = normalize_rewards(scores, uid, counted, mean_level="group", std_level=None)
    return spread(alpha.to(scores.dtype) * deviations / norm_factor, response_mask)
