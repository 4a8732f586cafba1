"""Check that a model computes each row of a pack independently of the other rows.

Packed forward passes (`workers.models.packed_forward`) are correct only for models in which tokens interact only
through the registered packed attention, and positions come only from `position_ids`. A convolution, a recurrent
state or a custom attention would leak information from one packed row into the next without raising an error.
`check_rows_apart` detects information leaks between rows by running the model, because a list of supported
architectures would never be complete.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rltrain.base.errors import ConfigError, described
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.row_costs import attention_windows
from rltrain.data.model_weights import policy_class
from workers.models.images import show_images
from workers.models.loading import FirstValue, load_model, load_sample_layers
from workers.models.packed_forward import PACKED, RECORDING, Pack, pack, policy_output

LENGTHS = (4, 3, 4, 3)  # number of tokens in each test row
# Largest accepted change of a last hidden state when another row changes, relative to the state's norm.
# Rounding alone changes a last hidden state by less than 1e-5 times the state's norm.
# In small random models whose rows influence each other, replacing one row causes relative changes between 2e-4 and 1
# in the last hidden states of other rows.
TOLERANCE = 1e-4


def load_policy(
    path: str,
    where: str = "",
    *,
    arrange: Callable[[PreTrainedModel], object],
    first_value: FirstValue | None = None,
    device: torch.device,
) -> PreTrainedModel:
    """Load a causal language model, after a check that packed rows do not influence each other.

    Args:
        path: model directory in Hugging Face format.
        where: text with which error messages start, to name the config key; `model.path=PATH` by default.
        arrange: function that changes the model in place before the weights are read, as in `load_model`. For example,
            the function `arrange` can add LoRA adapters to the model and shard the model.
        first_value: function that returns the initial values of parameters that the weight files lack, as in
            `load_model`.
        device: device onto which the weights are loaded.

    Raises:
        ConfigError: the model cannot be loaded, or the model lets packed rows influence each other.
    """
    where = where or f"model.path={path}"
    check_policy_rows_apart(path, where)
    model = load_model(policy_class(path), path, where=where, arrange=arrange, first_value=first_value, device=device)
    show_images(model, path)
    return model


def check_policy_rows_apart(path: str, where: str) -> None:
    """Raise ConfigError if rows that are packed together influence each other in a causal language model.

    Args:
        path: model directory in Hugging Face format.
        where: start of error messages, such as `model.path=PATH`.
    """
    sample = load_sample_layers(policy_class(path), path, where=where)
    head = sample.get_output_embeddings()
    check_rows_apart(sample, head, lambda packed: policy_output(sample, packed, temperature=1.0), where)


@torch.no_grad()
def check_rows_apart(model: PreTrainedModel, head: nn.Module, run: Callable[[Pack], Any], where: str) -> None:
    """Raise ConfigError if packed rows influence each other, or if the model fails in a packed forward pass.

    `check_rows_apart` runs two forward passes without gradients, each over 11 random tokens. If the rows seem to
    influence each other, the check is repeated with other random tokens. `check_rows_apart` changes neither the model
    nor the global random state.

    Args:
        model: the unsharded model in evaluation mode, with at least one decoder layer of each kind, as
            `load_sample_layers` returns it.
        head: the model's last layer, whose inputs (1, N, H) are compared. Some forward passes call the last layer
            only on the tokens that predict a response token. In the packs of random tokens that `check_rows_apart`
            uses, every token predicts a response token, so the last layer's inputs for all tokens are compared.
        run: function that runs one forward pass of the model on a pack, such as a call of `response_values` for a
            critic.
        where: start of error messages, such as `model.path=PATH`.

    Raises:
        ConfigError: rows in the same pack influence each other, a layer's sliding window does not reach packed
            attention, or a forward pass failed. The message of the ConfigError names the model's architecture.
    """
    check_windows(model, run, where)
    # In a mixture-of-experts model, rounding can change which of two experts with almost equal scores is chosen. To
    # tolerate rounding, `check_rows_apart` raises an error only if rows influence each other with the first random
    # seed and also with the second.
    for seed in (0, 1):
        apart = _apart(model, head, run, seed, where)
        if apart <= TOLERANCE:
            return
    raise ConfigError(
        f"{where}: {type(model).__name__} lets rows that are packed together influence each other (the last hidden "
        f"states of a row change by {apart:.2g} times their norm when another row changes); use a model of another "
        "architecture"
    )


@torch.no_grad()
def check_windows(model: PreTrainedModel, run: Callable[[Pack], Any], where: str) -> None:
    """Raise ConfigError if a model's config has a sliding window that its layers do not pass to packed attention.

    Some models apply a sliding window only through the attention mask, which packed attention does not use. Windows
    that are as long as the model's longest row have no effect, and are not checked.

    Args:
        model: the unsharded model with at least one decoder layer of each kind.
        run: function that runs one forward pass of the model on a pack.
        where: start of error messages, such as `model.path=PATH`.
    """
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    windows = {one for one in attention_windows(config.to_dict(), config.num_hidden_layers) if one is not None}
    chunk = getattr(config, "attention_chunk_size", None)  # `check_limits` checks chunks.
    windows = {one for one in windows if one != chunk and (longest is None or one < longest)}
    if not windows:
        return
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding), f"unsupported type of input embedding: {type(embeddings).__name__}"
    model.set_attn_implementation(RECORDING)
    try:
        run(pack(_rows(embeddings.weight.size(0), 0)[[0]]))
    except Exception as error:  # a model can raise any exception
        raise ConfigError(
            f"{where}: {type(model).__name__} fails in a packed forward pass ({described(error, 240)}); use a "
            "model of another architecture"
        ) from error
    finally:
        model.set_attn_implementation(PACKED)
    found = {vars(module).pop("recorded_window", None) for module in model.modules()}
    if windows - found:
        raise ConfigError(
            f"{where}: {type(model).__name__} does not pass its sliding window of {min(windows - found)} tokens to the "
            "attention function, so training over packed rows would ignore it; use a model of another architecture"
        )


def _apart(model: PreTrainedModel, head: nn.Module, run: Callable[[Pack], Any], seed: int, where: str) -> float:
    """Return how much the last hidden states of two rows change when another row of their pack is replaced.

    Two packs of test rows are compared: the first pack has the rows 0, 1 and 2, and the second pack has the rows 3,
    0 and 2. For each token of the test rows 0 and 2, the last hidden state in the first pack is compared with the
    last hidden state in the second pack. `_apart` returns the largest norm of the difference between a token's
    hidden states in the two packs, relative to the norm of the token's hidden state in the first pack.
    """
    states, embeddings = list[Tensor](), model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding), f"unsupported type of input embedding: {type(embeddings).__name__}"
    rows = _rows(embeddings.weight.size(0), seed)
    try:
        with head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0])):
            run(pack(rows[[0, 1, 2]], share=False))
            run(pack(rows[[3, 0, 2]], share=False))
    except Exception as error:  # a model can raise any exception
        raise ConfigError(
            f"{where}: {type(model).__name__} fails in a packed forward pass ({described(error, 240)}); use a "
            "model of another architecture"
        ) from error
    first, _, last = states[0].split(LENGTHS[:3])
    before, after = torch.cat([first, last]), states[1][LENGTHS[3] :]
    return float(((after - before).norm(dim=-1) / before.norm(dim=-1)).max())


def _rows(words: int, seed: int) -> DataProto:
    """Return random test rows with prompts of one token, so that each position of a pack predicts a response token."""
    source = torch.Generator().manual_seed(seed)
    ids = [torch.randint(words, (length + 1,), generator=source).tolist() for length in LENGTHS]
    return DataProto.from_dict(
        {
            "prompts": jagged([row[:1] for row in ids], torch.int64),
            "responses": jagged([row[1:] for row in ids], torch.int64),
        }
    )
