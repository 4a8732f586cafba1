"""Group-relative advantages."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import normalize_rewards
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("grpo", statistics="group")
def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor, *, norm_by_std: bool = True
) -> tuple[Tensor, Tensor]:
    """A_i,t = (r_i - mean(r_group)) / (std(r_group) + 1e-6); GRPO, arXiv 2402.03300 section 4.1.2.

    r_i: sum of the row's token rewards; group: the valid rows with the same `uid`; std: unbiased. `norm_by_std` False
    leaves the division out (Dr. GRPO, arXiv 2503.20783). A group of one, or with all rewards equal, gets exactly 0; so
    does a row that is not `valid`, and it is in no statistic.

    token_level_rewards, response_mask (B, T); uid, valid (B,). Advantages (B, T) are 0 where masked; returns are equal.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    std_level = "group" if norm_by_std else None
    return spread(normalize_rewards(scores, uid, counted, mean_level="group", std_level=std_level), response_mask)
