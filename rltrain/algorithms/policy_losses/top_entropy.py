"""PPO's clipped loss, restricted to the tokens of highest entropy (the forking tokens of a response)."""

from torch import Tensor

from rltrain.algorithms.policy_losses.selection import check_share, smallest
from rltrain.algorithms.policy_losses.vanilla import vanilla
from rltrain.algorithms.ratio import as_float, as_mask, masked, metric_sum
from rltrain.algorithms.registry import POLICY_LOSSES, TOKEN_SELECTORS


@POLICY_LOSSES.register("top_entropy", selected="kept")
def top_entropy(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    selected: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped loss (`vanilla`) on the selected tokens, and 0 on all other tokens.

    The loss l of a token is the loss of the paper "Beyond the 80/20 Rule" (arXiv 2506.01939):

        l = 1[H_t >= tau] (-min(r A, clip(r, 1-low, 1+high) A)), with the dual clip of `vanilla`

    r = pi(y_t) / pi_old(y_t), and A is the advantage. H_t is the entropy of the distribution that y_t was sampled from,
    and tau is the entropy threshold of the selector. Tokens that are not selected have a loss of exactly 0 and no
    gradient, but still count in the denominators of the aggregation, as in the objective of arXiv 2506.01939.

    All tensors have the shape (B, T), and `selected` is bool. Masked slots have loss 0 and no gradient. `top_entropy`
    returns the metric sums `clip_fraction` and `clip_fraction_c` over the selected tokens, `selected_fraction`, and
    `ratio_mean` and `ppo_kl` over all trained tokens.
    """
    mask = as_mask(response_mask)
    trained = as_mask(selected)
    kept = masked(advantages, trained)  # a token with advantage 0 has no loss and no gradient
    bounds = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high, "clip_ratio_c": clip_ratio_c}
    losses, metrics = vanilla(log_probs, old_log_probs, kept, mask, **bounds)
    return losses, metrics | {"selected_fraction": metric_sum(trained, mask)}


@TOKEN_SELECTORS.register("top_entropy")
def select_top_entropy(entropies: Tensor, response_mask: Tensor, *, entropy_fraction: float = 0.2) -> Tensor:
    """Select the trained tokens of highest entropy from a whole mini-batch; arXiv 2506.01939.

        selected = H_t >= tau,    tau: the (1 - entropy_fraction) quantile of the entropies of the N trained tokens

    The quantile is interpolated linearly, so 1 + floor(entropy_fraction (N - 1)) tokens have an entropy of at least
    tau. Tokens whose entropy equals the smallest selected entropy are also selected, so the order of rows does not
    matter. If all entropies are equal, every trained token is selected.

    All tensors have the shape (B, T). Returns a bool mask (B, T), which is False in masked slots.
    """
    check_share(entropy_fraction=entropy_fraction)
    mask = as_mask(response_mask)
    return smallest(-as_float(entropies), mask, 1 + int(entropy_fraction * (int(mask.sum()) - 1)))
