"""REINFORCE++ with the group's mean as baseline."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import normalize_advantages, normalize_rewards
from rltrain.algorithms.ratio import as_mask
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus_baseline", statistics="batch")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """A_i,t = (d_i - mean(d)) / (std(d) + 1e-6), d_i = r_i - mean(r_group).

    REINFORCE++ with baseline, arXiv 2501.03262. r_i: sum of the row's token rewards; group: the valid rows with the
    same `uid`; mean(d) and the unbiased std(d) are over all trained tokens of the valid rows of the batch. A group of
    one, or with all rewards equal, enters with d = 0 exactly; that is no longer 0 once mean(d) is taken off, which
    differs from 0 where lengths do. All d equal: exactly 0. A row that is not `valid` is in no statistic and gets 0.

    token_level_rewards, response_mask (B, T); uid, valid (B,). Advantages (B, T) are 0 where masked; returns are equal.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    deviations = normalize_rewards(scores, uid, counted, mean_level="group", std_level=None)
    mask = as_mask(response_mask) & counted[:, None]
    advantages = normalize_advantages(spread(deviations, mask)[0], mask)
    return advantages, advantages.clone()
