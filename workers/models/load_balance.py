"""Load-balancing loss of a mixture of experts, computed for each sequence (DeepSeek-V3, arXiv:2412.19437).

Without such a loss, routers can learn to choose a few experts for all tokens. The usual loss (arXiv:2101.03961) is a
product of two means over a batch, so its value depends on how the batch is divided into micro-batches. The loss of a
sequence does not.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rltrain.algorithms.ratio import as_float
from workers.models.packed_forward import Pack
from workers.models.router_replay import experts_in, routers_of

KEY = "actor.load_balance_coef"


class RouterScores:
    """Keeps the scores and the choices of a model's routers in a forward pass.

    Args:
        model: the model, to whose routers forward hooks are added.
        where: start of error messages, such as `model.path=PATH`.

    Raises:
        ConfigError: the model has no router of a known kind.
    """

    def __init__(self, model: nn.Module, where: str) -> None:
        self._where, self._kept, self._keeping = where, dict[int, tuple[Tensor, Tensor]](), False
        for number, router in routers_of(model, where, key=KEY, off="0").items():
            router.register_forward_hook(functools.partial(self._keep, number))

    @contextmanager
    def kept(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Return a list that the forward pass in the `with` block fills.

        The list has the logits (N, E) and the chosen experts (N, k) of each router, for the pass's N tokens. Forward
        passes outside the block, such as those that recompute activations, keep nothing.
        """
        found: list[tuple[Tensor, Tensor]] = []
        self._keeping = True
        try:
            yield found
        finally:
            found += self._kept.values()
            self._kept, self._keeping = {}, False

    def _keep(self, number: int, router: nn.Module, inputs: Any, output: Sequence[Tensor]) -> None:
        if self._keeping:
            experts = experts_in(output, router, self._where, key=KEY, off="0")
            # The weights of the chosen experts have k entries for each token, and the logits have one for each expert.
            logits = max((tensor for tensor in output if tensor.is_floating_point()), key=lambda one: one.size(-1))
            self._kept[number] = logits, experts


def balance_loss(logits: Tensor, experts: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    """Compute the loss sum_i f_i P_i of each sequence, for one router; arXiv:2412.19437, eq. 17 to 20.

        f_i = E / (k T) sum_t [token t uses expert i]        P_i = 1/T sum_t softmax(logits_t)_i

    The sequence has T tokens, each of which uses k of the E experts. The loss is 1 if all experts are used equally, and
    at most E / k. Gradients flow through P_i. DeepSeek-V3's own routers use sigmoids, and its loss normalises the
    sigmoid scores; `balance_loss` uses a softmax for every router.

    Args:
        logits: (N, E) scores of the N tokens of a pack, before the softmax.
        experts: (N, k) int64 numbers of the experts of each token.
        places: (M,) position in the pack of each token of all sequences. M is larger than N if sequences share tokens.
        lengths: (C,) number of tokens of each sequence.

    Returns:
        (C,) loss of each sequence, in float32, or float64 for logits in float64.
    """
    count, chosen = logits.size(1), experts.size(1)
    probabilities = as_float(logits).softmax(-1)
    used = torch.zeros_like(probabilities).scatter_add(1, experts, torch.ones_like(probabilities[:, :chosen]))
    owners = torch.arange(len(lengths), device=logits.device).repeat_interleave(lengths)
    both = torch.stack([used, probabilities]).index_select(1, places)
    used, mass = both.new_zeros(2, len(lengths), count).index_add(1, owners, both).unbind()
    return count / chosen * (used * mass).sum(-1) / as_float(lengths.to(mass.dtype)) ** 2


def mean_balance_loss(
    kept: Sequence[tuple[Tensor, Tensor]], packed: Pack, trained: Tensor, *, num_sequences: int
) -> Tensor:
    """Return this micro-batch's part of the mini-batch's mean balance loss: a scalar.

    The loss of a row is the mean over the routers, and over the row's contexts. Each context is a sequence.

    Args:
        kept: logits and chosen experts of each router, as from `RouterScores.kept`.
        packed: the pack of the micro-batch's B rows.
        trained: (B,) bool, whether a row has trained tokens. Other rows do not count.
        num_sequences: number of sequences with trained tokens in the whole mini-batch, over all ranks.
    """
    counts = packed.rows.bincount(minlength=len(trained)).to(trained.device)
    places, lengths, rows = (tensor.to(trained.device) for tensor in (packed.places, packed.lengths, packed.rows))
    losses = torch.stack([balance_loss(logits, experts, places, lengths) for logits, experts in kept]).mean(0)
    weights = trained.to(losses.dtype) / counts
    return (losses * weights[rows]).sum() / max(1, num_sequences)
