"""Group-relative advantages (GRPO)."""

from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores, spread
from rltrain.algorithms.normalization import normalize_rewards
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("grpo", statistics="group")
def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor, *, norm_by_std: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute A_{i,t} = (r_i - mean(r_group)) / (std(r_group) + 1e-6); GRPO, arXiv 2402.03300 section 4.1.2.

    r_i is the sum of the rewards over the trained tokens of row i. A group is the set of valid rows with the same
    `uid`. The std is unbiased (divisor n - 1). With `norm_by_std` False, the advantages are not divided by the std, as
    in Dr GRPO (arXiv 2503.20783). A group that has only one row, or whose rewards are all equal, gets advantages of
    exactly 0. A row that is not `valid` is excluded from the statistics and gets an advantage of 0.

    token_level_rewards and response_mask are (B, T); uid and valid are (B,). The advantages are (B, T) and 0 in masked
    slots. The returns equal the advantages.
    """
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    std_level = "group" if norm_by_std else None
    return spread(normalize_rewards(scores, uid, counted, mean_level="group", std_level=std_level), response_mask)
