"""Decoupled generalised advantage estimation: separate lambdas for the critic's returns and the policy's advantages.

VC-PPO uses one lambda for the advantages of all answers; VAPO's lambda grows with the length of the answer.
"""

import math

import torch
from torch import Tensor

from rltrain.algorithms.advantages.returns import (
    check_discount,
    discounted_suffix_sum_by_row,
    from_left,
    places,
    to_left,
)
from rltrain.algorithms.ratio import as_float, as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("decoupled_gae", statistics="none")
def decoupled_gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_critic: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute GAE with one lambda for the advantages and another for the returns; VC-PPO, arXiv 2503.01491 section 4.2.

        A_t = sum_l (gamma lam)^l delta_{t+l},    R_t = V_t + sum_l (gamma lam_critic)^l delta_{t+l},
        delta_t = r_t + gamma V_{t+1} - V_t

    With `lam_critic` 1, the returns R are Monte-Carlo returns: in the critic's targets at early tokens, late rewards
    are discounted only by gamma. If `lam` is below 1, the advantages have less variance than with a `lam` of 1.

    The index t counts only trained tokens, so no discount is applied over tool-output tokens. The critic's value V is 0
    after the last trained token. All tensors have the shape (B, T). Inputs in masked slots are ignored. The returned
    advantages and returns are 0 in masked slots, and have no gradient.

    Raises:
        ValueError: if gamma, lam or lam_critic is outside [0, 1].
    """
    check_discount("lam", lam)
    rows = values.new_full((len(values),), lam, dtype=torch.float64)
    return _decoupled(token_level_rewards, response_mask, values, gamma=gamma, lam=rows, lam_critic=lam_critic)


@ADVANTAGE_ESTIMATORS.register("length_adaptive_gae", statistics="none")
def length_adaptive_gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    *,
    gamma: float = 1.0,
    alpha: float = 0.05,
    lam_critic: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute `decoupled_gae` with a lambda that depends on the answer's length; VAPO, arXiv 2504.05118 section 4.2.

        lam = max(0, 1 - 1 / (alpha l))

    l is the number of trained tokens of the answer. In an answer of l tokens, the weights lam^0, lam^1, ... of the TD
    errors delta add up to 1 / (1 - lam) = alpha l. The advantage of a token depends mostly on the TD errors of the next
    alpha * l tokens (for example, of the next 50 tokens in an answer of l = 1000 tokens if alpha is 0.05), because the
    TD errors of later tokens have small weights. For an answer of at most 1 / alpha tokens (20 tokens by default), the
    formula 1 - 1 / (alpha l) of the VAPO paper is 0 or negative, and `length_adaptive_gae` uses a lambda of 0. With a
    lambda of 0, the advantage A_t is the TD error delta_t, which depends only on the critic's values and on the reward
    of token t.

    The returns R use the lambda `lam_critic`, which does not depend on the answer length l. Tensor shapes, masks and
    gradients are handled as in `decoupled_gae`.

    Raises:
        ValueError: if alpha is not finite and above 0, or if gamma or lam_critic is outside [0, 1].
    """
    if not 0 < alpha < math.inf:
        raise ValueError(
            f"alpha={alpha} must be finite and > 0: lambda is 1 - 1 / (alpha * length); use 0.05, or decoupled_gae for "
            "a lambda that does not depend on the length"
        )
    lengths = as_mask(response_mask).sum(-1).double()
    lam = (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0)
    return _decoupled(token_level_rewards, response_mask, values, gamma=gamma, lam=lam, lam_critic=lam_critic)


def _decoupled(
    token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, *, gamma: float, lam: Tensor, lam_critic: float
) -> tuple[Tensor, Tensor]:
    """Compute GAE advantages with one lambda per row, `lam` (B,), and returns with the lambda `lam_critic`."""
    check_discount("gamma", gamma)
    check_discount("lam_critic", lam_critic)
    mask = as_mask(response_mask)
    baseline = as_float(values.detach())
    place = places(mask)
    aligned_rewards = to_left(as_float(token_level_rewards.detach()), mask, place)
    aligned_values = to_left(baseline, mask, place)
    next_values = torch.nn.functional.pad(aligned_values[:, 1:], (0, 1))
    delta = aligned_rewards + gamma * next_values - aligned_values
    # One scan computes the discounted sums for the policy's advantages (the first B rows) and for the critic's returns
    # (the last B rows).
    discounts = gamma * torch.cat((lam, torch.full_like(lam, lam_critic)))
    for_policy, for_critic = discounted_suffix_sum_by_row(torch.cat((delta, delta)), discounts).chunk(2)
    returns = masked(from_left(for_critic, mask, place) + baseline, mask)
    return from_left(for_policy, mask, place), returns
