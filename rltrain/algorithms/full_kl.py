"""The exact KL divergence over the vocabulary, without ever holding all logits."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rltrain.algorithms.ratio import as_float


def full_kl(
    hidden: Tensor,
    head: Tensor,
    ref_hidden: Tensor,
    ref_head: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
) -> Tensor:
    """KL(pi || pi_ref) at each of N positions, the reverse divergence that the estimators of `kl` estimate.

        KL = sum_v pi_v (log pi_v - log pi_ref_v),   pi = softmax(z / temperature),  z = hidden @ head^T
        dKL / dz_v = pi_v (log pi_v - log pi_ref_v - KL) / temperature

    hidden (N, H) and head (V, H) of the policy; ref_hidden (N, H') and ref_head (V, H') of the reference, which gets no
    gradient. Returns (N,), never negative. `chunk_size` positions at a time have their logits alive, in the backward
    pass too, which computes them again; how many does not change the result. float64 stays, anything else, and both
    matrix products, are computed in float32, with a float32 copy of a narrower head.

    There is no mask: select the trained positions before. It takes whole distributions, so their mean over sampled
    contexts needs no ratio for the token itself.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be finite and > 0: logits are divided by it; use 1.0, say")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be >= 1: so many positions are computed at once; use 1024, say")
    if (len(hidden), len(head)) != (len(ref_hidden), len(ref_head)):
        raise ValueError(
            f"N={len(hidden)}, V={len(head)} of the policy and N={len(ref_hidden)}, V={len(ref_head)} of the reference "
            "must agree; take both at the same positions, with the same vocabulary"
        )
    policy, reference = (as_float(hidden), as_float(head)), (as_float(ref_hidden.detach()), as_float(ref_head.detach()))
    result: Tensor = _FullKL.apply(*policy, *reference, float(temperature), chunk_size)  # type: ignore[no-untyped-call]
    return result


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Keep the inputs, and of the logits nothing."""
        ctx.save_for_backward(*inputs[:4])
        ctx.knobs = inputs[4:]
        kl: Tensor = inputs[0].new_empty(len(inputs[0]))
        with torch.autocast(kl.device.type, enabled=False):
            for rows, log_pi, difference in _chunks(*inputs):
                kl[rows] = (log_pi.exp() * difference).sum(-1).clamp(min=0)  # rounding alone can take it below
        return kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and head, summed over chunks."""
        hidden, head = ctx.saved_tensors[:2]
        hidden_gradient, head_gradient = torch.zeros_like(hidden), torch.zeros_like(head)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, log_pi, difference in _chunks(*ctx.saved_tensors, *ctx.knobs):
                pi = log_pi.exp()
                centred = difference - (pi * difference).sum(-1, keepdim=True)
                to_logits = pi * centred * (gradients[0][rows, None] / ctx.knobs[0])
                hidden_gradient[rows] = to_logits @ head
                head_gradient += to_logits.T @ hidden[rows]
        return hidden_gradient, head_gradient, None, None, None, None


def _chunks(
    hidden: Tensor, head: Tensor, ref_hidden: Tensor, ref_head: Tensor, temperature: float, size: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Positions, log pi and log pi - log pi_ref of one chunk after another, each (chunk, V)."""
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        log_pi = (hidden[rows] @ head.T / temperature).log_softmax(-1)
        log_ref = (ref_hidden[rows] @ ref_head.T / temperature).log_softmax(-1)
        yield rows, log_pi, log_pi - log_ref
