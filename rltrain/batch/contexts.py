"""The contexts of a batch: the token sequences on which a model runs.

A row consists of one or more contexts. Almost all rows have one context: the prompt, and all response tokens but the
last one. The column `context_starts` marks the first token of the second and of each further context of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.batch.data_proto import DataProto
from rltrain.batch.jagged import offsets_of, positions, ranges
from rltrain.batch.token_arrays import NOT_RECORDED

# Names of the two columns of recorded experts: one for the prompt tokens, and one for the response tokens.
EXPERTS = ("prompt_experts", "response_experts")


@dataclass(frozen=True)
class Contexts:
    """The tokens of all contexts of B rows, one after another.

    Attributes:
        ids: (N,) int64 tokens of all C contexts. Each row's last response token is left out, because the model predicts
            no token after the last response token.
        images: (N,) int64 number of the image that each token shows a part of, or 0; None if no row shows an image.
        lengths: (C,) number of tokens in each context.
        prompts: (C,) number of prompt tokens at the start of each context. Only a row's first context has a prompt.
        predicting: (R,) index into `ids` of the token before each of the R response tokens.
        ends: (B,) index into `ids` of each row's last token.
        first: (B,) index, among the C contexts, of each row's first context.
    """

    ids: Tensor
    lengths: Tensor
    prompts: Tensor
    predicting: Tensor
    ends: Tensor
    first: Tensor
    images: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """(N,) int64 keys of the tokens. Two contexts that begin with equal keys begin with the same inputs.

        The key of a token is its id. The key of a token that shows a part of an image is minus the image's number. All
        tokens of an image have the same key, because each context contains an image as a whole.
        """
        return self.ids if self.images is None else torch.where(self.images > 0, -self.images, self.ids)


def row_tokens(batch: DataProto) -> Tensor:
    """Return the number of tokens of each row (B,) on which a model runs: all but the last response token."""
    return batch.lengths("prompts") + batch.lengths("responses").clamp(min=1) - 1


def experts_of(batch: DataProto) -> Tensor:
    """Return the recorded experts (N, E) of the N tokens of all contexts, in the order of `contexts_of`.

    The batch has the columns `prompt_experts` and `response_experts`, with E experts for each token.
    """
    prompts, responses = batch.lengths("prompts"), batch.lengths("responses")
    rows = zip(
        batch.values("prompt_experts").split(prompts.tolist()),
        batch.values("response_experts").split(responses.tolist()),
        strict=True,
    )
    return torch.cat([part for prompt, response in rows for part in (prompt, response[:-1])])


def experts_by_row(batch: DataProto, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of all prompt tokens (P, E) and of all response tokens (R, E): the inverse of `experts_of`.

    Args:
        batch: the rows.
        experts: (N, E) experts of the N tokens of all contexts, in the order of `contexts_of`.

    The experts of the last token of each response are `NOT_RECORDED`, because the model never processes this token.
    """
    prompts, responses = batch.lengths("prompts").tolist(), batch.lengths("responses").tolist()
    filler = experts.new_full((1, experts.size(1)), NOT_RECORDED)
    parts = experts.split([n for row in zip(prompts, responses, strict=True) for n in (row[0], max(row[1] - 1, 0))])
    of_responses = [(part, filler[: min(length, 1)]) for part, length in zip(parts[1::2], responses, strict=True)]
    return torch.cat(parts[::2]), torch.cat([part for row in of_responses for part in row])


def contexts_of(batch: DataProto) -> Contexts:
    """Return the contexts of the rows of a batch. If a row has no response tokens, its context is the prompt."""
    prompts, responses = batch.lengths("prompts"), batch.lengths("responses")
    starts = offsets_of(row_tokens(batch))
    ids = torch.empty(int(starts[-1]), dtype=torch.int64)
    ids[ranges(starts[:-1], prompts)] = batch.values("prompts")
    at = ranges(starts[:-1] + prompts, responses)
    is_input = positions(responses) < (responses - 1).repeat_interleave(responses)
    ids[at[is_input]] = batch.values("responses")[is_input]
    ends, first = starts[1:] - 1, torch.arange(len(responses))
    images = None
    if "prompt_images" in batch:
        images = torch.zeros_like(ids)
        images[ranges(starts[:-1], prompts)] = batch.values("prompt_images")
    if "context_starts" not in batch:
        return Contexts(ids, starts.diff(), prompts, at - 1, ends, first, images)
    begins = at[is_input & batch.values("context_starts")]
    all_starts, order = torch.cat([starts[:-1], begins, starts[-1:]]).sort(stable=True)
    prompts = torch.cat([prompts, torch.zeros_like(begins)])[order[:-1]]
    return Contexts(ids, all_starts.diff(), prompts, at - 1, ends, order.argsort()[: len(responses)], images)
