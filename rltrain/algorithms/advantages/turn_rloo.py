"""Returns to go per turn, with a leave-one-out baseline over the trajectories of a group."""

import torch
from torch import Tensor

from rltrain.algorithms.advantages.outcome import counted_rows
from rltrain.algorithms.advantages.turns import Turns
from rltrain.algorithms.normalization import group_index, normalize_rewards
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("turn_rloo", statistics="group")
def turn_rloo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Tensor,
    valid: Tensor,
    turn_index: Tensor,
    *,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute returns to go per turn, minus the leave-one-out baseline of RLOO (arXiv 2402.14740 eq. 8) for each turn.

        A_{i,k} = G_{i,k} - mean_{j != i} G_{j,k},    G_{i,k} = sum_l gamma^l r_{i,k+l}

    r_{i,k} is the sum of the rewards in turn k of trajectory i. The return G_{i,k} of turn k is 0 if trajectory i ends
    before turn k. The baseline of G_{i,k} is the mean of G_{j,k} over all other trajectories j of the group, including
    trajectories that end before turn k. All tokens of a turn get the turn's advantage. The baseline of a trajectory
    does not depend on the trajectory itself, so with gamma 1 the expected gradient is the true gradient of the expected
    sum of rewards. If the baseline for turn k of a trajectory were a mean over only the trajectories that reach turn k,
    including the trajectory itself, the gradient of the policy's decision to take another turn would be biased.

    A group is the set of valid rows with the same `uid`. A group with only one row gets advantages of exactly 0. If all
    rows of a group have the same return G_{i,k} for turn k, turn k gets advantages of exactly 0. A row that is not
    `valid` is excluded from the statistics and gets an advantage of 0.

    token_level_rewards, response_mask and turn_index are (B, T); uid and valid are (B,). The advantages are (B, T) and
    0 in masked slots. The returns equal the advantages.
    """
    turns, counted = Turns(response_mask, turn_index), counted_rows(response_mask, valid)
    to_go = turns.returns_to_go(token_level_rewards, gamma)
    number = torch.arange(to_go.shape[1], device=to_go.device)
    # The leave-one-out mean for a turn is computed over the turns that have the same turn index, in the rows that have
    # the same `uid`.
    group = (group_index(uid)[:, None] * len(number) + number).flatten()
    rows = counted[:, None].expand(to_go.shape).flatten()
    found = normalize_rewards(to_go.flatten(), group, rows, mean_level="group", std_level=None, leave_one_out=True)
    advantages = turns.at_tokens(turns.out_of_order(found.view(to_go.shape)))
    return advantages, advantages.clone()
