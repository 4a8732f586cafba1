"""Generalised advantage estimation (GAE), computed in parallel over time."""

import torch
from torch import Tensor

from rltrain.algorithms.advantages.returns import check_discount, discounted_suffix_sum, from_left, places, to_left
from rltrain.algorithms.ratio import as_float, as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("gae", statistics="none")
def gae(
    token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantages from token rewards and a critic's values; GAE, arXiv 1506.02438 eq. 11 and 16.

        A_t = sum_l (gamma lam)^l delta_{t+l},    delta_t = r_t + gamma V_{t+1} - V_t

    The index t counts only trained tokens: t + 1 is the next trained token. No discount is applied over tool-output
    tokens, and the critic's values at tool-output tokens are not used. The critic's value V is 0 after the last trained
    token. The returns are A + V (advantages plus values).

    All tensors have the shape (B, T). Inputs in masked slots are ignored, and the results are 0 in masked slots.
    The returned advantages and returns have no gradient. To whiten the advantages, pass the advantages to
    `normalize_advantages`.
    """
    check_discount("gamma", gamma)
    check_discount("lam", lam)
    mask = as_mask(response_mask)
    rewards, baseline = as_float(token_level_rewards.detach()), as_float(values.detach())
    place = places(mask)
    aligned_rewards, aligned_values = to_left(rewards, mask, place), to_left(baseline, mask, place)
    next_values = torch.nn.functional.pad(aligned_values[:, 1:], (0, 1))
    delta = aligned_rewards + gamma * next_values - aligned_values
    advantages = from_left(discounted_suffix_sum(delta, gamma * lam), mask, place)
    return advantages, masked(advantages + baseline, mask)
