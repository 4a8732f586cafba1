"""What token selectors share: covariances over a mini-batch, and the first few of its tokens."""

from torch import Tensor

from rltrain.algorithms.ratio import as_float, masked


def check_share(**knobs: float) -> None:
    """Raise ValueError for a share of tokens that is not above 0 and at most 1."""
    for name, value in knobs.items():
        if not 0 < value <= 1:
            raise ValueError(f"{name}={value} must be > 0 and <= 1, a share of the trained tokens; use 0.01, say")


def token_covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log pi - mean) (A - mean) per token (B, T), means over all tokens in `mask`; arXiv 2505.22617 eq. 10."""
    count = mask.sum().clamp(min=1)
    log_probs, advantages = masked(log_probs.detach(), mask), masked(advantages.detach(), mask)
    return (log_probs - log_probs.sum() / count) * (advantages - advantages.sum() / count)


def smallest(values: Tensor, candidates: Tensor, count: int) -> Tensor:
    """The `count` candidates (B, T) with the smallest values, all of them if they are fewer, as bool.

    Tokens that tie with the last one picked are picked too: which rows come first must not matter.
    """
    values = as_float(values.detach())
    found = values[candidates]
    count = min(count, found.numel())
    if count == 0:
        return candidates & False
    return candidates & (values <= found.kthvalue(count).values)
