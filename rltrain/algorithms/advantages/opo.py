"""On-policy optimisation with the length-weighted baseline."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import group_index, group_sum, statistics_of
from rltrain.algorithms.ratio import as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("opo", statistics="group")
def opo(token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """A_i,t = r_i - b, b = sum_j l_j r_j / sum_j l_j over the group; OPO, arXiv 2505.23585.

    The baseline of least variance if the squared gradient of log pi(y) grows with the length of y. r_i: sum of the
    row's token rewards; l_i: its trained tokens; group: the valid rows with the same `uid`. A group of one, or with
    all rewards equal, gets exactly 0; so does a row that is not `valid`, and it is in no statistic.

    token_level_rewards, response_mask (B, T); uid, valid (B,). Advantages (B, T) are 0 where masked; returns are equal.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    raw, group = masked(scores, counted).double(), group_index(uid)
    lengths = masked(as_mask(response_mask).sum(-1), counted).double()
    baseline = group_sum(lengths * raw, group) / group_sum(lengths, group).clamp(min=1)
    varied = statistics_of(raw, group, counted).varied
    return spread(masked(raw - baseline, varied & counted).to(scores.dtype), response_mask)
