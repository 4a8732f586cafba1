"""Packed forward passes: log-probs, entropies and values of response tokens, without padding in any linear layer.

A row of the batch consists of one or more contexts, and a token sees only the earlier tokens of its own context. Almost
all rows have one context, but an agent program can start new contexts within a row. A pack is one sequence with the
tokens of all contexts. Contexts that begin with the same tokens, such as those of a prompt group, share these tokens in
the pack: each distinct token of the prefix tree (`rltrain.batch.prefix_tree`) is in the pack once. The pack consists of
the segments of the prefix tree, and a token attends to the earlier tokens of its segment and to its ancestors.

An attention function for packs is registered in transformers under the name `PACKED`. On GPUs and with 16-bit dtypes,
one call of an attention kernel (`workers.models.varlen_attention`) computes the attention of all segments. Without a
usable kernel, or with soft caps, sinks or dropout, `workers.models.attention_batches` computes it. All layers other
than attention process the pack's N tokens without padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rltrain.algorithms import full_kl
from rltrain.algorithms.ratio import as_float
from rltrain.base import trace
from rltrain.batch.column_families import COLUMNS
from rltrain.batch.contexts import contexts_of, experts_of
from rltrain.batch.data_proto import DataProto, positions
from rltrain.batch.images import shown_files
from rltrain.batch.jagged import ranges
from rltrain.batch.prefix_tree import distinct_tokens
from workers.cluster.progress import tick
from workers.models.attention_batches import SegmentLayout, attention_in_batches
from workers.models.fsdp import device, forward_only
from workers.models.fused_head import PROBE, check_probe, logit_cap, logit_scale, replaced_head, token_log_probs
from workers.models.images import images_shown
from workers.models.router_replay import set_experts
from workers.models.sequence_parallel import (
    Sequence,
    attention_inputs,
    gather,
    heads_of_rank,
    sequence_group_of,
    split,
    tokens_of_all_heads,
)
from workers.models.varlen_attention import kernel_for

PACKED = "rltrain_packed"
RECORDING = "rltrain_recording"  # Packed attention that records the sliding windows of the layers.
# Names of the batch columns that `microbatch` does not pad, because all code reads these columns without padding.
PACKED_COLUMNS = ("responses", "context_starts", "ref_hidden", "teacher_hidden", "response_experts")


@dataclass(frozen=True)
class Pack:
    """Rows that are concatenated into one sequence. A token that several contexts share is in the sequence once.

    Attributes:
        input_ids: (1, N) prompt and response ids. Each row's last response token is left out, because the model
            predicts no token after the last response token.
        position_ids: (1, N) position of each token in its contexts.
        layout: segments of the pack, and the segments to which each segment attends.
        predicting: (R,) position in the pack at which each of the R response tokens is predicted.
        targets: (R,) ids of the response tokens.
        ends: (B,) position in the pack of each row's last token.
        places: (M,) position in the pack of each of the M tokens of all contexts, on the CPU. M is larger than N if
            contexts share tokens.
        lengths: (C,) number of tokens of each of the C contexts, on the CPU.
        rows: (C,) index of each context's row, on the CPU.
        sequence: the ranks that split the pack's tokens (sequence or context parallelism), or None. If ranks split the
            pack, `input_ids`, `position_ids`, `predicting`, `targets` and `experts` hold only this rank's slice of the
            pack, and `layout` describes the queries of its chunk.
        experts: (N, E) int16 numbers of the recorded experts of each token, or None if none were recorded. A token that
            several contexts share has the experts of the first of these contexts.
        images: files of the images that the pack shows, in the order of their tokens. An image that several contexts
            share is in the pack once.
        image_places: (1, N) bool; True at tokens that show a part of an image. None if no row of the step's batch shows
            an image.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: SegmentLayout
    predicting: Tensor
    targets: Tensor
    ends: Tensor
    places: Tensor
    lengths: Tensor
    rows: Tensor
    sequence: Sequence | None = None
    experts: Tensor | None = None
    images: tuple[bytes, ...] = ()
    image_places: Tensor | None = None


def pack(batch: DataProto, *, share: bool = True) -> Pack:
    """Put all rows of a batch into one sequence, and return the sequence as a `Pack`.

    The first context of a row begins with the row's prompt. The column `context_starts` marks the first token of the
    second and of each further context of a row; a batch without the column `context_starts` has exactly one context per
    row. The policy did not sample the first token of a row's second or further context, so log-probs, entropies and
    values of this token are meaningless and must not be used.

    If a row has no response tokens, the pack contains the row's prompt tokens, but no token is predicted for the row.

    Args:
        batch: the rows.
        share: whether tokens at the start of several contexts are in the pack only once.
    """
    contexts = contexts_of(batch)
    ids, lengths, places = contexts.ids, contexts.lengths, torch.arange(len(contexts.ids))
    experts = experts_of(batch) if "response_experts" in batch else None
    images = contexts.images
    if share:
        tokens = distinct_tokens(contexts.keys, lengths, contexts.prompts)
        images = None if images is None else images[tokens.kept]
        experts = None if experts is None else experts[tokens.kept]
        ids, places, position_ids = ids[tokens.kept], tokens.places, ranges(tokens.depths, tokens.lengths)
        layout = SegmentLayout(tokens.lengths, ids.device, tokens.depths, tokens.keys)
    else:
        position_ids, layout = positions(lengths), SegmentLayout(lengths, ids.device)
    return Pack(
        ids[None],
        position_ids[None],
        layout,
        places[contexts.predicting],
        batch.values("responses"),
        places[contexts.ends],
        places,
        lengths,
        torch.searchsorted(contexts.first, torch.arange(len(lengths)), right=True) - 1,
        experts=experts,
        images=() if images is None else shown_files(batch, images),
        image_places=None if images is None else (images > 0)[None],
    )


def to_device(packed: Pack, device: torch.device) -> Pack:
    """Return the pack with its tensors on `device`."""
    if device.type == "cpu":
        return packed
    return Pack(
        packed.input_ids.to(device),
        packed.position_ids.to(device),
        packed.layout.to(device),
        packed.predicting.to(device),
        packed.targets.to(device),
        packed.ends.to(device),
        packed.places,
        packed.lengths,
        packed.rows,
        experts=None if packed.experts is None else packed.experts.to(device),
        images=packed.images,
        image_places=None if packed.image_places is None else packed.image_places.to(device),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Pack,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,  # arguments that transformers passes to every attention function, but packed attention does not use
) -> tuple[Tensor, None]:
    """Compute causal attention of each segment of a pack to itself and to its ancestors in the prefix tree.

    The shape of `query` is (1, H, N, D), with H heads of width D for N tokens. The shape of `key` and `value` is
    (1, K, N, D), where the number K of key heads divides the number H of query heads. The shape of the attention
    output is (1, N, H, D). A token of a layer with a sliding window attends to at most `sliding_window` tokens,
    including itself. `softcap` is the soft cap of the scores or None, and `s_aux` (H,) are the scores of the attention
    sinks or None (`workers.models.capped_attention`).
    """
    assert attention_mask is None, "a packed forward pass must not be given an attention mask"
    if packed.sequence is not None:
        query, key, value = attention_inputs(query, key, value, packed.sequence)
        s_aux = None if s_aux is None else heads_of_rank(s_aux, packed.sequence)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # q, k and v have the shape (N, heads, D)
    kernel = None if dropout or softcap is not None or s_aux is not None else kernel_for(q, v)
    if kernel is not None:
        out = kernel(q, *packed.layout.keys_of_segments(k, v), packed.layout.bounds, scaling, sliding_window)
    else:
        out = attention_in_batches(
            q,
            k,
            v,
            packed.layout,
            scaling=scaling,
            dropout=dropout,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
    return out[None] if packed.sequence is None else tokens_of_all_heads(out[None], packed.sequence), None


def recording_attention(
    module: nn.Module, *tensors: Tensor, sliding_window: int | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Compute packed attention, and keep the layer's sliding window as the attribute `recorded_window` of `module`."""
    vars(module)["recorded_window"] = sliding_window
    return packed_attention(module, *tensors, sliding_window=sliding_window, **options)


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(RECORDING, recording_attention)
AttentionMaskInterface.register(RECORDING, lambda *args, **kwargs: None)
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)


@dataclass(frozen=True)
class TeacherStates:
    """Outputs of the teachers, from which the exact KL is computed for the R response tokens of a pack.

    Attributes:
        numbers: (R,) int64, on the CPU: index of each token's teacher; -1 for a token without a teacher.
        hidden: (R, H') last hidden state of the teacher at each token. H' is the largest hidden size of all teachers.
        heads: output head (V, H_k) of each teacher, where H_k is the hidden size of teacher k. The logits of teacher k
            are computed from the first H_k of the H' entries of a hidden state.
    """

    numbers: Tensor
    hidden: Tensor
    heads: list[Tensor]

    def at(self, tokens: Tensor) -> "TeacherStates":
        """Return the teachers' outputs for the response tokens that a bool mask (R,) selects."""
        return TeacherStates(self.numbers[tokens.cpu()], self.hidden[tokens], self.heads)

    def kl(self, states: Tensor, head: Tensor, **knobs: Any) -> Tensor:
        """Return the exact KL(policy || teacher) at each token (R,), which is 0 at a token without a teacher.

        Args:
            states: (R, H) last hidden states of the policy.
            head: (V, H) output head of the policy.
            knobs: keyword arguments that are passed on to `full_kl`.
        """
        kl = torch.zeros(len(states), dtype=as_float(states).dtype, device=states.device)
        for number, own in enumerate(self.heads):
            here = (self.numbers == number).nonzero()[:, 0].to(states.device)
            if len(here):
                found = full_kl(states[here], head, self.hidden[here, : own.size(1)], own, **knobs)
                kl = kl.index_copy(0, here, found)
        return kl


@dataclass(frozen=True)
class PolicyOutput:
    """Outputs of a policy for the R response tokens of a pack, in float32, or float64 if the model is in float64.

    Attributes:
        log_probs: (R,) log-prob of each token under the policy's distribution softmax(logits / temperature), in nats.
        entropies: (R,) entropy of the policy's distribution, or None if not requested.
        full_kl: (R,) exact KL(policy || reference) over the vocabulary at each token, or None if not requested.
        teacher_kl: (R,) exact KL(policy || teacher) over the vocabulary at each token, or None if not requested.
        hidden: (R, H) hidden states from which the last layer predicts the response tokens, or None if not requested.
    """

    log_probs: Tensor
    entropies: Tensor | None
    full_kl: Tensor | None
    teacher_kl: Tensor | None
    hidden: Tensor | None


def policy_output(
    model: PreTrainedModel,
    packed: Pack,
    *,
    temperature: float,
    entropies: bool = False,
    hidden: bool = False,
    reference: tuple[Tensor, Tensor] | None = None,
    teachers: TeacherStates | None = None,
) -> PolicyOutput:
    """Run one forward pass of a causal language model over a pack.

    Entropies, hidden states and the exact KL cost extra time and are computed only on request. A function that computes
    logits in chunks replaces the model's last layer, so that the full logits are never in memory.

    Args:
        model: the language model, possibly sharded.
        packed: the pack (packed forward-pass input), with the tokens of all ranks of the sequence-parallel group.
        temperature: sampling temperature, by which the logits are divided.
        entropies: whether to compute the entropy of the policy's distribution at each response token.
        hidden: whether to return the last hidden states.
        reference: last hidden states (R, H') and head (V, H') of the reference model for the exact KL, or None.
        teachers: outputs of the teachers for the exact KL(policy || teacher), or None.
    """
    whole, sequence = packed, sequence_group_of(model)
    if sequence is not None:
        packed, here = split(whole, sequence)
        reference = None if reference is None else (reference[0][here], reference[1])
        teachers = None if teachers is None else teachers.at(here)
    set_experts(model, packed.experts)
    scale, states = logit_scale(model), list[Tensor]()
    knobs: dict[str, Any] = {"temperature": temperature / scale, "softcap": logit_cap(model)}

    def columns(of_all: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        states.append(of_all[0])
        found = token_log_probs(states[0], weight, packed.targets, bias=bias, entropies=entropies, **knobs)
        kl = None if reference is None else full_kl(states[0], weight, *reference, **knobs)
        teacher_kl = None if teachers is None else teachers.kl(states[0], weight, **knobs)
        probe = torch.full_like(found[0], PROBE)
        return torch.stack([column / scale for column in (*found, kl, teacher_kl, probe) if column is not None])

    with replaced_head(model, columns), images_shown(model, packed.images, packed.image_places):
        out = model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=packed.predicting,
            packed=packed,
        ).logits
    log_probs, *others, probe = out.unbind()
    check_probe(probe, model)
    kept = states[0] if hidden else None
    if packed.sequence is not None:
        log_probs, *others = (gather(column, whole, packed.sequence) for column in (log_probs, *others))
        kept = None if kept is None else gather(kept, whole, packed.sequence)
    rest = iter(others)
    return PolicyOutput(
        log_probs,
        entropies=next(rest) if entropies else None,
        full_kl=None if reference is None else next(rest),
        teacher_kl=None if teachers is None else next(rest),
        hidden=kept,
    )


def response_values(model: PreTrainedModel, packed: Pack) -> Tensor:
    """Return the critic's value (R,) of the state before each response token.

    The values are in float32, or in float64 if the model is in float64.
    """
    whole, sequence = packed, sequence_group_of(model)
    if sequence is not None:
        packed, _ = split(whole, sequence)
    logits = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        attention_mask=None,
        use_cache=False,
        packed=packed,
    ).logits[0]
    values = logits[packed.predicting, 0]
    values = values if values.dtype == torch.float64 else values.float()
    return values if packed.sequence is None else gather(values, whole, packed.sequence)


def unpack(values: Tensor, mask: Tensor) -> Tensor:
    """Copy one value per response token from `values` (R,) into a padded tensor (B, T) with one row per response.

    `mask` (B, T) is True at response tokens. The padded tensor is 0 where `mask` is False. Gradients flow from the
    padded tensor to `values`.
    """
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def stand_in(batch: DataProto) -> list[int]:
    """Return a micro-batch for a rank that has no rows of its own: the index of the batch's shortest row, in a list."""
    return [int((batch.lengths("prompts") + batch.lengths("responses")).argmin())]


def microbatch(batch: DataProto, rows: list[int], *, share: bool = True) -> tuple[DataProto, Pack, dict[str, Tensor]]:
    """Return the rows of the batch with the indices `rows`, and the rows' packed model input and response columns.

    Each response column is padded to the shape (B, T). `microbatch` moves the packed input and the padded columns to
    this rank's device. The padded response columns include `mask`, which is True at response tokens, and
    `response_mask`, which is True at trained tokens.

    If `rows` is empty, the micro-batch is the shortest row of the batch, and no token of the row counts as trained. A
    rank to which no rows are assigned still runs the batch's shortest row, so that the rank takes part in the
    collectives and adds exactly zero to the gradient.

    `share` says whether tokens at the start of several contexts are in the pack only once.
    """
    tick()
    part = batch[rows or stand_in(batch)]
    mask = part.padding_mask("responses")
    names = [
        name
        for name in part.keys()  # noqa: SIM118 (iterating a batch gives its rows)
        if COLUMNS.get(name, ("",))[0] == "response" and name not in PACKED_COLUMNS
    ]
    columns = {name: part.padded(name).to(device()) for name in names} | {"mask": mask.to(device())}
    if not rows:
        columns["response_mask"] = torch.zeros_like(columns["mask"])
    return part, to_device(pack(part, share=share), device()), columns


def row_pass(
    model: PreTrainedModel,
    function: Callable[[DataProto, Pack], dict[str, Tensor]],
    batch: DataProto,
    microbatches: list[list[int]],
    *,
    share: bool = True,
) -> DataProto:
    """Run a function on each micro-batch without gradients, and collect the columns that the function returns.

    Args:
        model: the model that `function` uses.
        function: function that is called with the rows of a micro-batch and the pack (packed forward-pass input) of
            these rows. `function` must return columns (R, ...) with one value for each of the R response tokens, or
            columns of prompts (P, ...) with one value for each of the P prompt tokens of the rows. `COLUMNS` decides
            which of the two a column is.
        batch: the batch whose rows are split into micro-batches.
        microbatches: row indices of each forward pass. If a list of row indices is empty, the shortest row of the batch
            is processed, and the results are dropped.
        share: whether tokens at the start of several contexts are in a pack only once.

    Returns:
        A batch with the columns that `function` returned, and with rows in the order of `microbatches`.
    """
    parts, names = [], set[str]()
    with forward_only(model):
        for rows in microbatches:
            tick()
            part = batch[rows or stand_in(batch)]
            with trace.span("micro-batch", trace.CALLS, rows=len(rows)):
                found = function(part, to_device(pack(part, share=share), device()))
                columns = {name: values.cpu() for name, values in found.items()}
            kept = columns if rows else {name: values[:0] for name, values in columns.items()}
            of_prompts = {name for name in kept if COLUMNS.get(name, ("",))[0] == "prompt"}
            own = batch.select(["prompts", "responses"] if of_prompts else ["responses"])[rows]
            for family, some in (("prompts", of_prompts), ("responses", kept.keys() - of_prompts)):
                own = own.with_values(family, **{name: kept[name] for name in some}) if some else own
            parts.append(own)
            names.update(columns)
    return DataProto.concat(parts).select(sorted(names))
