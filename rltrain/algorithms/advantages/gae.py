"""Generalised advantage estimation, in parallel over time."""

import torch
from torch import Tensor

from rltrain.algorithms.advantages.returns import check_discount, discounted_suffix_sum, pack, places, unpack
from rltrain.algorithms.ratio import as_float, as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("gae", statistics="none")
def gae(
    token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A_t = sum_l (gamma lam)^l delta_t+l, delta_t = r_t + gamma V_t+1 - V_t; arXiv 1506.02438 eq. 11 and 16.

    Time counts trained tokens only: t + 1 is the next trained token, so the tool tokens between two trained ones cost
    no discount and lend no value. After the last trained token V is 0. Returns are A + V.

    All (B, T); masked slots are ignored and give 0. Nothing is whitened: see `normalize_advantages`. No gradient.
    """
    check_discount("gamma", gamma)
    check_discount("lam", lam)
    mask = as_mask(response_mask)
    rewards, baseline = as_float(token_level_rewards.detach()), as_float(values.detach())
    place = places(mask)
    packed_rewards, packed_values = pack(rewards, mask, place), pack(baseline, mask, place)
    next_values = torch.nn.functional.pad(packed_values[:, 1:], (0, 1))
    delta = packed_rewards + gamma * next_values - packed_values
    advantages = unpack(discounted_suffix_sum(delta, gamma * lam), mask, place)
    return advantages, masked(advantages + baseline, mask)
