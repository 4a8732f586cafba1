"""A fused last layer, which computes log-probs and entropies of tokens without storing all logits.

With a vocabulary of 152 thousand tokens, the logits of 2,048 positions take 1.2 GB in float32. In the backward pass, a
last layer that does not work in chunks keeps several tensors in memory, each as large as the tensor of all logits. The
fused layer computes the logits in chunks of bounded size, keeps only a few chunks in memory, and recomputes the chunks
in the backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from rltrain.algorithms.chunks import (
    LEAST_LOG,
    GradientSums,
    RunningSoftmax,
    cap_slope,
    chunks,
    default_chunk_size,
    logits,
)
from rltrain.algorithms.ratio import as_float

PROBE = 64.0  # test logit that reveals how a model transforms the output of its last layer

HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def token_log_probs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropies: bool = False,
    chunk_size: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of tokens and, on request, entropies of the tokens' distributions, both in nats.

        log pi_y = z_y - L,   L = log sum_v exp(z_v),   z = (hidden @ head^T + bias) / temperature
        entropy = -sum_v pi_v log pi_v
        d log pi_y / dz_v = [v = y] - pi_v,   d entropy / dz_v = -pi_v (log pi_v + entropy)

    In the formulas for log-probs, entropies and their gradients, y is the id of a token, v runs over the vocabulary, z
    is the vector of logits, and pi is softmax(z).

    A vocabulary entry with probability 0, such as an entry whose logit is -inf, adds exactly 0 to the entropy and has
    no gradient.

    If the logits do not fit into one chunk, only a few chunks of logits are in memory at a time, and the backward pass
    recomputes the chunks. If the logits fit into one chunk, the logits are kept for the backward pass.

    The logits have the dtype of `hidden` and `head`, for example bfloat16. All computations that follow the logits use
    at least float32.

    Args:
        hidden: (R, H) hidden states, the input of the last layer.
        head: (V, H) weight of the last layer.
        targets: (R,) int64 ids of the tokens whose log-probs are computed.
        bias: (V,) bias of the last layer, or None.
        temperature: sampling temperature, by which the logits are divided.
        entropies: whether to compute the entropy of each token's distribution.
        chunk_size: maximum number of logits in a chunk; the default depends on the device.
        softcap: soft cap c of the logits, which replaces z by c * tanh(z / c) before the division by the temperature;
            None for no soft cap.

    Returns:
        Log-probs (R,), and entropies (R,) or None. Log-probs and entropies are at least float32 and have gradients
        with respect to hidden, head and bias.
    """
    size = chunk_size or default_chunk_size(hidden.device)
    if len(hidden) * len(head) > size:
        found: tuple[Tensor, Tensor | None] = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, head, bias, targets, temperature, entropies, size, softcap
        )
        return found
    product = as_float(F.linear(hidden, head, bias))
    capped = product if softcap is None else softcap * torch.tanh(product / softcap)
    log_softmax = F.log_softmax(capped / temperature, dim=-1)
    chosen = log_softmax.gather(1, targets[:, None])[:, 0]
    return chosen, _entropy(log_softmax) if entropies else None


def _entropy(log_pi: Tensor) -> Tensor:
    """Return the entropies (R,) of R distributions over the vocabulary, given their log-probs (R, V).

    The entropy of a distribution pi is -sum pi log pi, where 0 log 0 counts as 0.
    """
    return -(log_pi.exp() * log_pi.clamp(min=LEAST_LOG)).sum(-1)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, *knobs: Any) -> Any:
        """Compute log-probs and entropies in chunks of logits.

        For the backward pass, save the inputs and one or two numbers per token, but not the logits.
        """
        temperature, entropies, size, softcap = knobs
        softmax = RunningSoftmax(hidden, with_mean=entropies)
        chosen = torch.full_like(softmax.top, torch.nan)  # targets outside the vocabulary get the log-prob NaN
        for rows, columns in chunks(len(hidden), len(head), size):
            chunk = logits(hidden[rows], head[columns], _part(bias, columns), temperature, softcap)
            inside, at = _targets_in(columns, targets[rows])
            chosen[rows] = torch.where(inside, chunk.gather(1, at)[:, 0], chosen[rows])
            softmax.add(rows, chunk)
        entropy = softmax.total.log() - softmax.mean if entropies else None
        ctx.save_for_backward(hidden, head, bias, targets, softmax.log_sum, entropy)
        ctx.temperature, ctx.size, ctx.softcap = temperature, size, softcap
        ctx.set_materialize_grads(False)
        return chosen - softmax.top - softmax.total.log(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        """Recompute the chunks of logits, and return the gradients with respect to hidden, head and bias."""
        if of_log_probs is None and of_entropies is None:
            return (None,) * 8
        hidden, head, bias, targets, log_sum, entropy = ctx.saved_tensors
        sums = GradientSums(hidden, head, bias, ctx.needs_input_grad)
        for rows, columns in chunks(len(hidden), len(head), ctx.size):
            chunk = logits(hidden[rows], head[columns], _part(bias, columns), ctx.temperature, ctx.softcap)
            slope = None if ctx.softcap is None else cap_slope(chunk, ctx.temperature, ctx.softcap)
            log_pi = chunk.sub_(log_sum[rows, None])
            to_logits = _minus_softmax(
                log_pi, _part(of_log_probs, rows), _part(of_entropies, rows), _part(entropy, rows)
            )
            if of_log_probs is not None:
                inside, at = _targets_in(columns, targets[rows])
                to_logits.scatter_add_(1, at, torch.where(inside, of_log_probs[rows], 0)[:, None])
            if slope is not None:
                to_logits.mul_(slope)
            sums.add(rows, columns, to_logits if ctx.temperature == 1 else to_logits.div_(ctx.temperature))
        return *sums.gradients, None, None, None, None, None


def _minus_softmax(
    log_pi: Tensor, of_log_probs: Tensor | None, of_entropies: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """Return the part of the loss's gradient with respect to a chunk of logits that depends on the softmax.

        gradient = -pi * (g + e * (log_pi + entropy)),   pi = exp(log_pi)

    `g` is the gradient of the loss with respect to the log-probs, and `e` is the gradient of the loss with respect to
    the entropies. The memory of `log_pi` is overwritten.
    """
    if of_entropies is None:
        assert of_log_probs is not None, "autograd must pass a gradient of the log-probs or of the entropies"
        return log_pi.exp_().mul_(-of_log_probs[:, None])
    assert entropy is not None, "the forward pass must save the entropies if it returns them"
    factor = log_pi.clamp(min=LEAST_LOG).add_(entropy[:, None]).mul_(-of_entropies[:, None])
    if of_log_probs is not None:
        factor.sub_(of_log_probs[:, None])
    return factor.mul_(log_pi.exp_())


def _targets_in(columns: slice, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return which targets lie in the range `columns` of the vocabulary, and the position of each target in the range.

    The first returned tensor is a bool mask with one value for each target: True if the target lies in the range
    `columns` of the vocabulary. The second returned tensor has the shape (number of targets, 1) and contains the
    position of each target, counted from the start of the range `columns`. The position of a target outside the range
    `columns` is clamped to the first or last column of the range.
    """
    at = targets - columns.start
    width = columns.stop - columns.start
    return (at >= 0) & (at < width), at.clamp(0, width - 1)[:, None]


def _part(tensor: Tensor | None, at: slice) -> Tensor | None:
    return None if tensor is None else tensor[at]


def logit_scale(model: PreTrainedModel) -> float:
    """Return the factor by which a model multiplies the output of its last layer, according to the model's config."""
    config = model.config.get_text_config()
    return float(getattr(config, "logit_scale", None) or 1) / float(getattr(config, "logits_scaling", None) or 1)


def logit_cap(model: PreTrainedModel) -> float | None:
    """Return the soft cap of a model's logits, according to the model's config, or None (Gemma 2, arXiv:2408.00118)."""
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return None if cap is None else float(cap)


@contextmanager
def replaced_head(model: PreTrainedModel, function: HeadFunction) -> Iterator[None]:
    """Make a causal language model return `function(hidden, weight, bias)` as its logits inside the `with` block.

    `hidden` has shape (1, R, H), and the result of `function` can have any shape. `function` is called inside the
    model's own forward pass, while the weights of a sharded model are gathered. The result of `function` is returned as
    the model's output, so that FSDP's hooks on the model's output see the gradient. Inside the `with` block, the model
    does not apply its soft cap (`logit_cap`), so `function` must apply it to its logits.

    Raises:
        ValueError: the model's last layer is not a plain nn.Linear.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"{type(model).__name__}: its last layer is {type(head).__name__}, but log-probs can be computed only from "
            "a plain nn.Linear; use a model that ends in an nn.Linear, without an adapter on this layer"
        )
    vars(head)["forward"] = lambda hidden: function(hidden, head.weight, head.bias)
    config, cap = model.config.get_text_config(), logit_cap(model)
    if cap is not None:
        config.final_logit_softcapping = None
    try:
        yield
    finally:
        del vars(head)["forward"]
        if cap is not None:
            config.final_logit_softcapping = cap


def check_probe(probes: Tensor, model: nn.Module) -> None:
    """Raise ValueError if the model does anything to its last layer's output except multiply it by `logit_scale`.

    Args:
        probes: (R,) values of a test logit in the model's output. To produce the test logit, the function that
            `replaced_head` installs as the last layer must return PROBE / `logit_scale`. If the model multiplies the
            output of its last layer by `logit_scale` and does nothing else to this output, each element of `probes`
            equals the constant PROBE.
        model: the model, whose class the error message names.
    """
    if not bool(torch.isclose(probes, torch.full_like(probes, PROBE), rtol=1e-4).all()):
        raise ValueError(
            f"{type(model).__name__} turns a logit of {PROBE:g} into {float(probes.detach()[0]):g} after its last "
            "layer, which training does not support: its log-probs would be wrong; use another model"
        )
