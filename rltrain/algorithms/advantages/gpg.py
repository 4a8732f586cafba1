"""Group policy gradient."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import group_index, normalize_rewards, statistics_of
from rltrain.algorithms.ratio import check_positive, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("gpg", statistics="batch")
def gpg(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor, *, norm_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A_i,t = alpha (r_i - mean(r_group)) / norm_factor, alpha = n / n_varied; GPG, arXiv 2504.02546.

    n: valid rows of the batch; n_varied: those in a group whose rewards differ. Groups without spread have no gradient,
    and alpha makes up for the rows of theirs that a mean over the batch divides by. `norm_factor` is the paper's
    F_norm, here a constant. r_i: sum of the row's token rewards; group: the valid rows with the same `uid`. A group of
    one, or with all rewards equal, gets exactly 0; so does a row that is not `valid`, and it is in no statistic.

    token_level_rewards, response_mask (B, T); uid, valid (B,). Advantages (B, T) are 0 where masked; returns are equal.
    """
    check_positive(norm_factor=norm_factor)
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    varied = statistics_of(masked(scores, counted), group_index(uid), counted).varied & counted
    alpha = counted.sum().double() / varied.sum().clamp(min=1)  # an int by an int would be float32
    deviations = normalize_rewards(scores, uid, counted, mean_level="group", std_level=None)
    return spread(alpha.to(scores.dtype) * deviations / norm_factor, response_mask)
