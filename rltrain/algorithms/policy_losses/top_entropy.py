"""PPO's clipped loss on the tokens of highest entropy, the forks of a response."""

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
    """`vanilla` where selected, and 0 elsewhere; arXiv 2506.01939 (Beyond the 80/20 Rule).

        l = 1[H_t >= tau] (-min(r A, clip(r, 1-low, 1+high) A)), with the dual clip of `vanilla`

    r = pi(y_t) / pi_old(y_t), A advantage, H_t entropy of the distribution that y_t was drawn from, tau the threshold
    of the selector. The other tokens have exactly no loss and no gradient, and stay in the denominators, as they do in
    the paper's objective.

    All (B, T), `selected` bool; masked slots give 0 and no gradient. Metrics, as sums: `clip_fraction` and
    `clip_fraction_c` (of selected tokens), `selected_fraction`, `ratio_mean`, `ppo_kl` (of all).
    """
    mask = as_mask(response_mask)
    trained = as_mask(selected)
    kept = masked(advantages, trained)  # a token of advantage 0 has no loss and no gradient
    bounds = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high, "clip_ratio_c": clip_ratio_c}
    losses, metrics = vanilla(log_probs, old_log_probs, kept, mask, **bounds)
    return losses, metrics | {"selected_fraction": metric_sum(trained, mask)}


@TOKEN_SELECTORS.register("top_entropy")
def select_top_entropy(entropies: Tensor, response_mask: Tensor, *, entropy_fraction: float = 0.2) -> Tensor:
    """The trained tokens of highest entropy, from a whole mini-batch; arXiv 2506.01939.

        selected = H_t >= tau,    tau: the (1 - entropy_fraction) quantile of the H of the N trained tokens

    The quantile is interpolated linearly, so that 1 + floor(entropy_fraction (N - 1)) tokens reach it. Tokens that tie
    with the last of these are in, so the order of rows does not matter; when all entropies are equal, every token is.

    All (B, T); returns bool, False where masked.
    """
    check_share(entropy_fraction=entropy_fraction)
    mask = as_mask(response_mask)
    return smallest(-as_float(entropies), mask, 1 + int(entropy_fraction * (int(mask.sum()) - 1)))
