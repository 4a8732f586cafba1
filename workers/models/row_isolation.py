"""Checks that a model keeps the rows of a pack apart, by running it: no list of architectures is complete.

Packed forward passes (`workers.models.packed_forward`) are right for models whose tokens meet in our attention alone
and whose positions come from `position_ids`. A convolution, a recurrent state or an attention of the model's own would
carry one row over into the next, without an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rltrain.base.errors import ConfigError, described
from rltrain.batch.data_proto import DataProto, jagged
from workers.models.packed_forward import Pack, load_model, pack, policy_output

LENGTHS = (4, 3, 4, 3)  # of the rows, in tokens
TOLERANCE = 1e-4  # of the length of a last hidden state; rounding is below 1e-5; small random models leak 2e-4 to 1


def load_policy(path: str) -> PreTrainedModel:
    """The causal language model of a directory, found to keep packed rows apart. Raises ConfigError for any other."""
    model = load_model(AutoModelForCausalLM, path)
    check_rows_apart(
        model,
        model.get_output_embeddings(),
        lambda packed: policy_output(model, packed, temperature=1.0),
        f"model.path={path}",
    )
    return model


@torch.no_grad()
def check_rows_apart(model: PreTrainedModel, head: nn.Module, run: Callable[[Pack], Any], where: str) -> None:
    """Refuse a model whose rows see each other in a pack, or that has no packed forward pass at all.

    Two passes over 11 random tokens, without gradients: on a CPU and in float32, as models are loaded, some seconds
    for 10^10 parameters. Random streams and the model stay as they are.

    Args:
        model: in evaluation, not sharded yet.
        head: its last layer, whose inputs are compared: (1, N, H) of all tokens, or of the predicting ones, here all.
        run: the forward pass that its worker makes of a pack.
        where: the key and the path, which the error begins with.

    Raises:
        ConfigError: naming the architecture.
    """
    # Rounding may make a mixture choose another expert where two are as good: what is found once is looked for again.
    for seed in (0, 1):
        apart = _apart(model, head, run, seed, where)
        if apart <= TOLERANCE:
            return
    raise ConfigError(
        f"{where}: {type(model).__name__} lets rows that are packed together see each other (last hidden states change "
        f"by {apart:.2g} of their length when another row does); use a model of another architecture"
    )


def _apart(model: PreTrainedModel, head: nn.Module, run: Callable[[Pack], Any], seed: int, where: str) -> float:
    """How far the states of two rows change, at most, when a third is exchanged and goes first."""
    states, embeddings = list[Tensor](), model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding), f"{type(embeddings).__name__} in the place of an embedding"
    rows = _rows(embeddings.weight.size(0), seed)
    try:
        with head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0])):
            run(pack(rows[[0, 1, 2]]))
            run(pack(rows[[3, 0, 2]]))
    except Exception as error:  # models raise whatever they like
        raise ConfigError(
            f"{where}: {type(model).__name__} fails in a packed forward pass ({described(error, 240)}); use a "
            "model of another architecture"
        ) from error
    first, _, last = states[0].split(LENGTHS[:3])
    before, after = torch.cat([first, last]), states[1][LENGTHS[3] :]
    return float(((after - before).norm(dim=-1) / before.norm(dim=-1)).max())


def _rows(words: int, seed: int) -> DataProto:
    """Rows of random words whose tokens all predict."""
    source = torch.Generator().manual_seed(seed)
    ids = [torch.randint(words, (length + 1,), generator=source).tolist() for length in LENGTHS]
    return DataProto.from_dict(
        {
            "prompts": jagged([row[:1] for row in ids], torch.int64),
            "responses": jagged([row[1:] for row in ids], torch.int64),
        }
    )
