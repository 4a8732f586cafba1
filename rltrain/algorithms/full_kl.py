"""The exact KL divergence over the vocabulary, without ever holding all logits."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.algorithms.chunks import GradientSums, RunningSoftmax, chunks, default_chunk_size, logits


def full_kl(
    hidden: Tensor,
    head: Tensor,
    ref_hidden: Tensor,
    ref_head: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """KL(pi || pi_ref) at each of N positions, the reverse divergence that the estimators of `kl` estimate.

        KL = sum_v pi_v (log pi_v - log pi_ref_v),   pi = softmax(z / temperature),  z = hidden @ head^T
        dKL / dz_v = pi_v (log pi_v - log pi_ref_v - KL) / temperature

    hidden (N, H) and head (V, H) of the policy; ref_hidden (N, H') and ref_head (V, H') of the reference, which gets no
    gradient. Returns (N,), never negative. A word of probability 0 under the policy adds exactly 0 and has no gradient,
    so both models may put -inf on the logits of the same words; where the reference alone does, the KL is inf.

    At most `chunk_size` logits (positions times words; None: what suits the device) are alive of each model at a time,
    in the backward pass too, which computes them again; how many does not change the result. Each product is in the
    type of its factors, as the models have it; from there on float64 stays float64, and anything else is float32.

    There is no mask: select the trained positions before. It takes whole distributions, so their mean over sampled
    contexts needs no ratio for the token itself.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be finite and > 0: logits are divided by it; use 1.0, say")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be >= 1: so many logits are held at once; use None, say")
    if (len(hidden), len(head)) != (len(ref_hidden), len(ref_head)):
        raise ValueError(
            f"N={len(hidden)}, V={len(head)} of the policy and N={len(ref_hidden)}, V={len(ref_head)} of the reference "
            "must agree; take both at the same positions, with the same vocabulary"
        )
    size = default_chunk_size(hidden.device) if chunk_size is None else chunk_size
    result: Tensor = _FullKL.apply(  # type: ignore[no-untyped-call]
        hidden, head, ref_hidden.detach(), ref_head.detach(), float(temperature), size
    )
    return result


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, ref_hidden: Tensor, ref_head: Tensor, *knobs: Any) -> Tensor:
        """Keep of the logits three numbers a position."""
        temperature, size = knobs
        policy = RunningSoftmax(hidden, with_mean=True)
        reference = RunningSoftmax(ref_hidden, with_mean=False)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, columns in chunks(len(hidden), len(head), size):
                chunk = logits(hidden[rows], head[columns], None, temperature)
                ref_chunk = logits(ref_hidden[rows], ref_head[columns], None, temperature)
                policy.add(rows, chunk, chunk - ref_chunk)
                reference.add(rows, ref_chunk)
        # The difference of the sums' logarithms, without the rounding of each.
        kl = policy.mean - (policy.top - reference.top) - (policy.total / reference.total).log()
        ctx.save_for_backward(hidden, head, ref_hidden, ref_head, policy.log_sum, reference.log_sum, kl)
        ctx.temperature, ctx.size = temperature, size
        return kl.clamp(min=0)  # rounding alone can take it below

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and head, summed over chunks."""
        hidden, head, ref_hidden, ref_head, log_sum, ref_log_sum, kl = ctx.saved_tensors
        weights = gradients[0] / ctx.temperature
        sums = GradientSums(hidden, head, None, ctx.needs_input_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, columns in chunks(len(hidden), len(head), ctx.size):
                log_pi = logits(hidden[rows], head[columns], None, ctx.temperature).sub_(log_sum[rows, None])
                difference = logits(ref_hidden[rows], ref_head[columns], None, ctx.temperature)
                difference.sub_(ref_log_sum[rows, None]).neg_().add_(log_pi).sub_(kl[rows, None])
                pi = log_pi.exp_()
                to_logits = difference.mul_(pi).mul_(weights[rows, None])
                sums.add(rows, columns, to_logits.masked_fill_(pi == 0, 0))
        return *sums.gradients[:2], None, None, None, None
