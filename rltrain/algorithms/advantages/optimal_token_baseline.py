"""Advantages with a baseline for each token.

The baseline at token t is a weighted mean of the group's returns. The weight of a row at token t approximates the
squared gradient of the log-prob of the row's first t tokens.
"""

import torch
from torch import Tensor

from rltrain.algorithms.advantages.outcome import counted_rows
from rltrain.algorithms.advantages.returns import discounted_suffix_sum, from_left, places, to_left
from rltrain.algorithms.normalization import group_index, group_sum, statistics_of
from rltrain.algorithms.ratio import as_float, as_mask, masked
from rltrain.algorithms.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("optimal_token_baseline", statistics="group")
def optimal_token_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Tensor, valid: Tensor, old_log_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the advantages A_{i,t} = G_{i,t} - B_t: return minus optimal token baseline B_t; arXiv 2602.07078.

        B_t      =  sum_i W_{i,t} G_{i,t} / sum_i W_{i,t}
        G_{i,t}  =  sum_{j >= t} r_{i,j}
        W_{i,t}  =  sum_{j <= t} e_{i,j}
        e_{i,j}  =  1 - pi(y_j) >= 0

    The return G_{i,t} is the undiscounted sum of the rewards of row i from token t on. The weight W_{i,t} is the sum of
    the energies e_{i,j} of the tokens up to t, and approximates the squared gradient of log pi(y_1..t). The index t
    counts the trained tokens of a row, so tool-output tokens are skipped. The sums over i in the formula of the
    baseline B_t run over the valid rows of the group (same `uid`) that have a t-th trained token. If the weights
    W_{i,t} of all rows are 0 (for example, under a deterministic policy), the baseline B_t is the unweighted mean of
    the returns G_{i,t}.

    The advantage A_{i,t} is exactly 0 at every token t at which all rows of the group have the same return G_{i,t}. If
    only one row of the group has a t-th trained token, the baseline at t is that row's own return. The advantages of a
    group's longest row are exactly 0 at the tokens beyond the end of all other rows. A row whose entry in `valid` is
    False does not count in the baselines, and gets an advantage of 0.

    The energy e_{i,j} of `optimal_token_baseline` differs from the energy in arXiv 2602.07078. In arXiv 2602.07078, the
    energy e_{i,j} is the squared gradient of log pi(y_j) with respect to the logits, which equals 1 - 2 pi(y_j) + sum_v
    pi_v^2, where pi_v is the probability of vocabulary entry v. `optimal_token_baseline` cannot compute sum_v pi_v^2,
    because the batch contains log-probs of the sampled tokens only. `optimal_token_baseline` replaces sum_v pi_v^2 by
    pi(y_j), because the expectation of pi(y_j) for a token y_j sampled from pi is sum_v pi_v^2.

    token_level_rewards, response_mask and old_log_probs are (B, T); uid and valid are (B,). The advantages and the
    returns are (B, T) and 0 in masked slots. The returns are the undiscounted reward sums G_{i,t}.
    """
    mask = as_mask(response_mask) & counted_rows(response_mask, valid)[:, None]
    place, group = places(mask), group_index(uid)
    rewards, log_probs = as_float(token_level_rewards.detach()).double(), as_float(old_log_probs.detach()).double()
    returns = discounted_suffix_sum(to_left(rewards, mask, place), 1.0)
    # The log-probs are clamped because rounding can make a log-prob positive, which would give a negative weight.
    energy = to_left(-torch.expm1(log_probs.clamp(max=0)), mask, place).cumsum(-1)
    live = torch.arange(mask.shape[-1], device=mask.device) < mask.sum(-1, keepdim=True)
    energy = masked(energy, live)
    weight = torch.where(group_sum(energy, group) > 0, energy, live)
    # Past the end of a group's longest row, the baseline is 0 / 0 = NaN. Because `varied` is False past the end of the
    # longest row, `masked` replaces NaN by an advantage of 0.
    baseline = group_sum(weight * returns, group) / group_sum(weight, group)
    varied = statistics_of(returns, group, live).varied
    dtype = as_float(token_level_rewards).dtype
    advantages = from_left(masked(returns - baseline, varied), mask, place)
    return advantages.to(dtype), from_left(returns, mask, place).to(dtype)
