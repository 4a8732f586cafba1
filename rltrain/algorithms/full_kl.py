"""The exact KL divergence over the vocabulary, computed in chunks so that the full logits are never in memory."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.algorithms.chunks import GradientSums, RunningSoftmax, cap_slope, chunks, default_chunk_size, logits


def full_kl(
    hidden: Tensor,
    head: Tensor,
    ref_hidden: Tensor,
    ref_head: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute the exact reverse KL divergence KL(pi || pi_ref) at each of N positions.

        KL = sum_v pi_v (log pi_v - log pi_ref_v),   pi = softmax(z / temperature),  z = hidden @ head^T

    The gradient with respect to the logits z is

        dKL / dz_v = pi_v (log pi_v - log pi_ref_v - KL) / temperature

    `hidden` (N, H) holds the policy's last hidden states, and `head` (V, H) holds the weights of the policy's
    output layer. `ref_hidden` (N, H') and `ref_head` (V, H') are the hidden states and output weights of the
    reference model, which gets no gradient. `full_kl` returns one KL value per position, as a tensor (N,), and the KL
    is never negative. Estimators of the KL that need only the log-probs of sampled tokens are in the module
    `rltrain.algorithms.kl`.

    With a `softcap` c, both models replace each logit z by c * tanh(z / c) before the division by the temperature.

    A vocabulary entry of probability 0 under the policy adds exactly 0 to the KL and has no gradient. If both the
    policy and the reference have a logit of -inf for a vocabulary entry, the entry adds 0 to the KL. If only the
    reference has a logit of -inf for a vocabulary entry, the KL is inf.

    At most `chunk_size` logits (positions times vocabulary entries) of each model are in memory at a time. The backward
    pass recomputes the logits, with at most `chunk_size` logits of each model in memory. If `chunk_size` is None,
    `full_kl` uses a chunk size that suits the device. The chunk size changes the computed KL only by rounding. Each
    matrix product is computed in the dtype of the hidden states and output weights, as in the forward passes of the
    policy and of the reference model. All other operations of `full_kl` use float64 if the matrix products are float64,
    and float32 if the matrix products have a narrower dtype.

    `full_kl` takes no mask, so the caller must pass the hidden states of only the trained positions. The KL at a
    position is a sum over the whole vocabulary and does not depend on the token that was sampled there. Because the
    exact KL at a position does not depend on the token sampled there, the KL needs no importance ratio, even if
    another policy sampled the token.

    Raises:
        ValueError: if `temperature` is not finite and above 0, if `chunk_size` is below 1, or if policy and reference
            differ in the number of positions N or in the vocabulary size V.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature={temperature} must be finite and > 0: logits are divided by it; use 1.0, for example"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(
            f"chunk_size={chunk_size} must be >= 1: it is the number of logits in memory at once; use None for a size "
            "that suits the device"
        )
    if (len(hidden), len(head)) != (len(ref_hidden), len(ref_head)):
        raise ValueError(
            f"N={len(hidden)}, V={len(head)} of the policy and N={len(ref_hidden)}, V={len(ref_head)} of the reference "
            "must agree; give hidden states of both models at the same positions, and models with the same vocabulary"
        )
    size = default_chunk_size(hidden.device) if chunk_size is None else chunk_size
    result: Tensor = _FullKL.apply(  # type: ignore[no-untyped-call]
        hidden, head, ref_hidden.detach(), ref_head.detach(), float(temperature), size, softcap
    )
    return result


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, ref_hidden: Tensor, ref_head: Tensor, *knobs: Any) -> Tensor:
        """Compute the KL in chunks, and save three numbers per position instead of the logits for the backward pass."""
        temperature, size, softcap = knobs
        policy = RunningSoftmax(hidden, with_mean=True)
        reference = RunningSoftmax(ref_hidden, with_mean=False)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, columns in chunks(len(hidden), len(head), size):
                chunk = logits(hidden[rows], head[columns], None, temperature, softcap)
                ref_chunk = logits(ref_hidden[rows], ref_head[columns], None, temperature, softcap)
                policy.add(rows, chunk, chunk - ref_chunk)
                reference.add(rows, ref_chunk)
        # The KL is policy.mean - (policy.log_sum - reference.log_sum), where each `log_sum` is top + log(total).
        # The code below computes policy.log_sum - reference.log_sum as (policy.top - reference.top) +
        # log(policy.total / reference.total), to avoid the rounding error of adding `top` and log(total).
        kl = policy.mean - (policy.top - reference.top) - (policy.total / reference.total).log()
        ctx.save_for_backward(hidden, head, ref_hidden, ref_head, policy.log_sum, reference.log_sum, kl)
        ctx.temperature, ctx.size, ctx.softcap = temperature, size, softcap
        return kl.clamp(min=0)  # rounding can make the KL slightly negative

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients with respect to `hidden` and `head`, summed over chunks."""
        hidden, head, ref_hidden, ref_head, log_sum, ref_log_sum, kl = ctx.saved_tensors
        weights = gradients[0] / ctx.temperature
        sums = GradientSums(hidden, head, None, ctx.needs_input_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, columns in chunks(len(hidden), len(head), ctx.size):
                log_pi = logits(hidden[rows], head[columns], None, ctx.temperature, ctx.softcap)
                slope = None if ctx.softcap is None else cap_slope(log_pi, ctx.temperature, ctx.softcap)
                log_pi.sub_(log_sum[rows, None])
                difference = logits(ref_hidden[rows], ref_head[columns], None, ctx.temperature, ctx.softcap)
                difference.sub_(ref_log_sum[rows, None]).neg_().add_(log_pi).sub_(kl[rows, None])
                pi = log_pi.exp_()
                to_logits = difference.mul_(pi).mul_(weights[rows, None])
                to_logits.masked_fill_(pi == 0, 0)
                sums.add(rows, columns, to_logits if slope is None else to_logits.mul_(slope))
        return *sums.gradients[:2], None, None, None, None, None
