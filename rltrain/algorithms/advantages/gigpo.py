"""Group-in-group advantages (GiGPO), which compare trajectories of a group, and turns that start in the same state."""

import torch
from torch import Tensor

from rltrain.algorithms.advantages.outcome import response_scores
from rltrain.algorithms.advantages.turns import Turns
from rltrain.algorithms.normalization import normalize_rewards
from rltrain.algorithms.ratio import as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("gigpo", statistics="group")
def gigpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    valid: Tensor,
    turn_index: Tensor,
    turn_states: Tensor,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    norm_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute A_{i,k} = A^E_i + step_weight A^S_{i,k}; GiGPO, arXiv 2505.10978 eq. 3, 7 and 8.

        A^E_i = (R_i - mean(R)) / F(R),    A^S_{i,k} = (G_{i,k} - mean(G)) / F(G),    G_{i,k} = sum_l gamma^l r_{i,k+l}

    R_i is the sum of all rewards of trajectory i, and mean(R) is computed over the valid rows with the same `uid`. The
    value r_{i,k} is the sum of the rewards in turn k of trajectory i. The mean of the discounted returns G is computed
    over the turns that start in the same state (the same value in `turn_states`) and belong to valid rows with the same
    `uid`. If `norm_by_std` is True, the divisor F(R) is 1e-6 plus the unbiased std of the reward sums in mean(R), and
    the divisor F(G) is 1e-6 plus the unbiased std of the returns in mean(G). If `norm_by_std` is False, F(R) and F(G)
    are 1. All tokens of a turn get the turn's advantage. The trajectory advantage A^E is exactly 0 if the group has
    only one trajectory. The turn advantage A^S is exactly 0 for a turn if no other turn of the group starts in the same
    state.

    The mean that is subtracted from a trajectory's reward sum includes this reward sum, and the mean that is subtracted
    from a turn's return includes this return. The gradient is biased, because each value is compared with a mean that
    includes this value. With gamma 1 and `norm_by_std` False, the expected gradient for an action is the true gradient
    multiplied by the factor f = 1 - 1/n + step_weight E[(m - 1)/m]. In the factor f, n is the number of trajectories in
    a group, and m is the number of turns of the group that start in the action's state. Because GiGPO multiplies the
    true gradient by a factor that differs between states, the direction of the gradient summed over all states is
    biased.

    token_level_rewards, response_mask, turn_index and turn_states are (B, T); uid and valid are (B,). The advantages
    are (B, T) and 0 in masked slots. The returns equal the advantages.
    """
    turns, mask = Turns(response_mask, turn_index), as_mask(response_mask)
    scores, counted = response_scores(token_level_rewards, response_mask, valid)
    std_level = "group" if norm_by_std else None
    episode = normalize_rewards(scores, uid, counted, mean_level="group", std_level=std_level)
    to_go = turns.out_of_order(turns.returns_to_go(token_level_rewards, gamma))
    states = torch.stack((uid[:, None].expand(to_go.shape), turns.first(turn_states.long())), -1).flatten(0, 1)
    members = torch.unique(states, dim=0, return_inverse=True)[1]
    acting = (turns.present & counted[:, None]).flatten()
    step = normalize_rewards(to_go.flatten(), members, acting, mean_level="group", std_level=std_level)
    total = masked(episode[:, None], mask) + step_weight * turns.at_tokens(step.view(to_go.shape))
    return total, total.clone()
