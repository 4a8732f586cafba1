"""Generalised advantage estimation over turns (turn-level GAE)."""

import torch
from torch import Tensor

from rltrain.algorithms.advantages.returns import check_discount, discounted_suffix_sum
from rltrain.algorithms.advantages.turns import Turns
from rltrain.algorithms.ratio import as_float
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("turn_gae", statistics="none")
def turn_gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    turn_index: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute GAE (arXiv 1506.02438 eq. 11 and 16), where each turn is one action.

        A_k = sum_l (gamma lam)^l delta_{k+l},    delta_k = r_k + gamma V_{k+1} - V_k

    r_k is the sum of the rewards in turn k. V_k is the critic's value of the state in which turn k begins; V_k is read
    at the first trained token of turn k. The critic's value V is 0 after the last turn. Each trained token of turn k
    gets the turn's advantage A_k, and the return A_k + V_k. If `lam` is 1, the critic's values only reduce the variance
    of the gradient. If `lam` is below 1, errors of the critic make the expected gradient biased.

    All tensors have the shape (B, T). Inputs in masked slots are ignored, and the results are 0 in masked slots. No
    gradient flows through the advantages and the returns.
    """
    check_discount("gamma", gamma)
    check_discount("lam", lam)
    turns = Turns(response_mask, turn_index)
    rewards = turns.rewards(token_level_rewards)
    start_values = turns.in_order(turns.first(as_float(values.detach())))
    next_values = torch.nn.functional.pad(start_values[:, 1:], (0, 1))
    delta = rewards + gamma * next_values - start_values
    advantages = discounted_suffix_sum(delta, gamma * lam)
    returns = turns.out_of_order(advantages + start_values)
    return turns.at_tokens(turns.out_of_order(advantages)), turns.at_tokens(returns)
