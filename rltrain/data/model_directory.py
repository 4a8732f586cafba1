"""Inspection of a model directory without loading the model: the model's config, length limits and end tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.data.hub import local_directory
from rltrain.data.model_json import read_json
from rltrain.data.model_weights import check_weights, weight_files
from rltrain.data.parallel_plans import divides_heads, tensor_plan
from rltrain.data.value_models import value_model
from rltrain.settings.schema import Config, PlacementConfig
from rltrain.settings.typed import require

# Keys of a model's config that may hold the maximum number of positions.
_POSITIONS = ("max_position_embeddings", "n_positions")
_LAYERS = ("layer_types", "layers_block_type")  # Keys of a model's config that may hold the layers' types.
_CHUNK = "attention_chunk_size"  # Key for the number of tokens in a chunk; no token attends beyond its own chunk.
# Names of the layer types with attention.
_ATTENTION = ("full_attention", "attention", "sliding_attention", "chunked_attention")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def check_directory(path: str, key: str = "model.path") -> None:
    """Raise an error unless `path` is a model directory in Hugging Face format.

    `check_weights`, and not `check_directory`, checks the contents of the weight files.

    Args:
        path: the model's directory.
        key: the config key that holds `path`, for the start of error messages.

    Raises:
        ConfigError: the directory is incomplete. The message of the ConfigError names what is missing from the model
            directory.
    """
    where, folder = f"{key}={path}", local_directory(path)
    other = ", or model.path=builtin" if where.startswith("model.path") else ""
    require(
        folder.exists(), f"{where}: no such directory; give the folder of a model, or its ORG/NAME on the hub{other}"
    )
    require(folder.is_dir(), f"{where}: not a directory; give the folder that holds config.json and the weights")
    require(
        (folder / "config.json").is_file(), f"{where}: holds no config.json; give the folder that holds config.json"
    )
    read_json(folder / "config.json")
    weight_files(folder, where)
    found = any((folder / name).is_file() for name in _TOKENIZER)
    require(
        found,
        f"{where}: holds no tokenizer (looked for {', '.join(_TOKENIZER)}); save the model's tokenizer in this folder",
    )


def check_reward_model(path: str, key: str) -> None:
    """Raise an error unless the directory holds a reward model, that is, a sequence classifier with one output.

    Args:
        path: the model's directory.
        key: the config key that holds `path`, for the start of error messages.

    Raises:
        ConfigError: the model is not a sequence classifier with one output, or tensors are missing from its weights.
            The message of the ConfigError names the kind of model, or the missing tensors.
    """
    from transformers import AutoModelForSequenceClassification

    check_directory(path, key)
    config = text_config(path)
    kind = str((config.get("architectures") or ["unknown"])[0])
    # If config.json does not give the number of labels, transformers assumes two.
    labels = config.get("num_labels", len(config.get("id2label", ("LABEL_0", "LABEL_1"))))
    require(
        kind.endswith("ForSequenceClassification"),
        f"{key}={path}: has the architecture {kind}; a reward model must be a ...ForSequenceClassification",
    )
    require(labels == 1, f"{key}={path}: has {labels} outputs; a reward model must have one output (num_labels=1)")
    _check_layers(f"{key}={path}", model_config(path, key))
    check_weights(path, f"{key}={path}", AutoModelForSequenceClassification)


def check_critic(path: str) -> None:
    """Raise an error if the model cannot be turned into a critic: the base model with a new head for values.

    Raises:
        ConfigError: transformers cannot build the base model, or the weights of the base model are incomplete. The
            message of the ConfigError names the missing tensors.
    """
    check_weights(path, f"model.path={path}", value_model(path), new_head=True)


def longest_row(path: str | Path) -> int | None:
    """Return the maximum number of tokens in a row (prompt and answer), or None if the model sets no limit.

    The maximum row length is the smallest of the following limits of the model: the number of positions, the size
    of attention chunks and the RoPE limit.
    """
    model = model_config(path)
    limits = [*(model.get(name) for name in _POSITIONS), model.get(_CHUNK), _rope_limit(model)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def check_limits(config: Config, model: Mapping[str, Any]) -> None:
    """Raise an error if the length limits or numbers of shards in the run's config do not fit the model, or if the
    model has layers that cannot be trained.

    Args:
        config: the complete config of the run.
        model: the model's own config, as returned by `model_config`.

    Raises:
        ConfigError: the run's config exceeds a limit of the model, or the model has layers that cannot be trained. The
            message of the ConfigError names the exceeded limit, or the layers that cannot be trained.
    """
    rollout = config.rollout
    longest = rollout.max_prompt_length + rollout.max_response_length
    name = next((name for name in _POSITIONS if isinstance(model.get(name), int)), _POSITIONS[0])
    positions = model.get(name)
    require(
        not isinstance(positions, int) or longest <= positions,
        f"rollout.max_prompt_length={rollout.max_prompt_length} + "
        f"rollout.max_response_length={rollout.max_response_length} = {longest} tokens: the model has {positions} "
        f"positions ({name}); lower their sum to at most {positions}",
    )
    limit = _rope_limit(model)
    require(
        limit is None or longest <= limit,
        f"rollout.max_response_length={rollout.max_response_length} + "
        f"rollout.max_prompt_length={rollout.max_prompt_length} = {longest} tokens: beyond {limit} tokens the model's "
        "RoPE (longrope) changes its frequencies, so one long row would change all rows packed with it; lower their "
        f"sum to at most {limit}",
    )
    shards, heads = rollout.shards, model.get("num_attention_heads")
    require(
        not isinstance(heads, int) or heads % shards == 0,
        f"{rollout.description.shards_key}={shards}: the model's {heads} attention heads cannot be divided evenly; "
        f"use a divisor of {heads}",
    )
    check_heads(config.placement, model, f"model.path={config.model.path}")
    _check_layers(f"model.path={config.model.path}", model)
    _check_attention(config.model.path, longest, model)


def check_teacher(config: Config, path: str, key: str) -> None:
    """Raise an error unless the directory holds a language model that can score the policy's answers.

    Args:
        config: the complete config of the run.
        path: the teacher's directory.
        key: the config key that holds `path`, for the start of error messages.

    Raises:
        ConfigError: the directory or the weights are incomplete, the rows of the run are too long for the model, or the
            model has layers that cannot keep packed rows apart.
    """
    where = f"{key}={path}"
    check_directory(path, key)
    check_vocabulary(path, load_tokenizer(path, key), where)
    model, limit = model_config(path, key), longest_row(path)
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    require(
        limit is None or longest <= limit,
        f"{where}: reads at most {limit} tokens, but rollout.max_prompt_length + rollout.max_response_length = "
        f"{longest}; lower their sum, or use another teacher",
    )
    check_heads(config.placement, model, where)
    _check_layers(where, model)
    check_weights(path, where)


def check_heads(placement: PlacementConfig, model: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if the ranks cannot divide a model's attention heads as configured.

    Args:
        placement: number of ranks for each kind of parallelism.
        model: the model's own config, as returned by `model_config`.
        where: the config key and path of the model, for the error messages.
    """
    shards = placement.tensor_ranks
    heads = model.get("num_attention_heads")
    pairs = model.get("num_key_value_heads") or heads
    if isinstance(heads, int) and isinstance(pairs, int):
        divided = shards > 1 and divides_heads(tensor_plan(model))
        _check_heads(heads, pairs, placement.sequence_ranks, shards if divided else 1, where)


def _check_heads(heads: int, pairs: int, size: int, shards: int, where: str) -> None:
    """Raise ConfigError if attention heads cannot be divided by `shards` and then among `size` ranks.

    Args:
        heads: number of attention heads.
        pairs: number of key-value heads.
        size: number of ranks that exchange tokens for heads.
        shards: number of ranks that divide the matrices of attention.
        where: the config key and path of the model.
    """
    require(
        heads % shards == 0 and pairs % shards == 0,
        f"placement.tensor_ranks={shards}: the {heads} attention heads and {pairs} key-value heads of {where} cannot "
        "be divided evenly; use a divisor of both",
    )
    heads, pairs = heads // shards, pairs // shards
    of_rank = "" if shards == 1 else f" of each of placement.tensor_ranks={shards} ranks"
    require(
        heads % size == 0 and (pairs % size == 0 or size % pairs == 0),
        f"placement.sequence_ranks={size}: the {heads} attention heads and {pairs} key-value heads{of_rank} of {where} "
        "cannot be divided evenly; use a divisor of both, or divide the tokens with placement.context_ranks",
    )


def _check_layers(where: str, model: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model has layers that mix tokens by means other than attention.

    Training packs several rows into one sequence and separates the rows only in attention. In a layer that mixes tokens
    without attention, packed rows would affect each other.
    """
    kinds = {kind for name in _LAYERS for kind in model.get(name) or ()}
    other = ", ".join(sorted(kinds - {*_ATTENTION}))
    require(
        not other,
        f"{where}: has layers of the kind {other}, and training can keep packed rows apart only in attention layers; "
        "use a model that has only attention layers",
    )


def _check_attention(path: str, longest: int, model: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model's attention works in chunks of tokens, and a row can be longer than a chunk.

    Training would attend to the tokens of earlier chunks, and compute the log-probs of a different model.
    """
    size = model.get(_CHUNK)
    require(
        not isinstance(size, int) or longest <= size,
        f"model.path={path}: its {_CHUNK}={size} is shorter than rollout.max_prompt_length + "
        f"rollout.max_response_length = {longest}, but training attends to all chunks; lower their sum to at most "
        f"{size}, or use another model",
    )


def _rope_limit(model: Mapping[str, Any]) -> int | None:
    """Return the row length up to which RoPE uses the same frequencies for all rows; None if RoPE sets no limit.

    If RoPE limits the row length, the limit applies to training and to rollout engines. Among the RoPE types, only
    `longrope` limits the row length. The RoPE type `dynamic` changes its frequencies only in rows that are longer than
    the model's number of positions. `check_limits` forbids rows that are longer than the model's number of positions.
    """
    rope = model.get("rope_parameters") or {}
    # Some configs hold one dict of RoPE parameters per layer type.
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    limits = [part.get("original_max_position_embeddings") for part in parts if part.get("rope_type") == "longrope"]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def load_tokenizer(path: str | Path, key: str = "model.path") -> Any:
    """Load the tokenizer of a model directory without network access.

    Args:
        path: the model's directory.
        key: the config key that holds `path`, for the start of error messages.

    Raises:
        ConfigError: the tokenizer does not load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(local_directory(path)), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Broken tokenizer files cause exceptions of many types.
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{key}={path}: the tokenizer does not load ({type(error).__name__}: {reason}); save it again with "
            "tokenizer.save_pretrained"
        ) from error


def check_vocabulary(path: str | Path, tokenizer: Any, where: str) -> None:
    """Raise an error if the tokenizer has ids for which the model has no embeddings.

    Added tokens are not checked, because some models have no embeddings for the added tokens of images and other inputs
    that are not text.

    Args:
        path: the model's directory.
        tokenizer: the model's tokenizer.
        where: the config key and the model's path, for the start of the error message.

    Raises:
        ConfigError: a token id is too large for the model's embeddings. The message of the ConfigError names the
            tokenizer's largest token id and the model's vocabulary size.
    """
    size, words = text_config(path).get("vocab_size"), tokenizer.get_vocab()
    largest = max((words[word] for word in words.keys() - tokenizer.get_added_vocab().keys()), default=0)
    require(
        not isinstance(size, int) or largest < size,
        f"{where}: its tokenizer has ids up to {largest}, but the model has embeddings for only {size} (vocab_size); "
        "use the tokenizer that belongs to the model",
    )


def check_prompt_ids(path: str | Path, largest: int, where: str) -> None:
    """Raise an error if a prompt has a token id for which the model has no embedding.

    A token id has no embedding if the token was added to the tokenizer but not to the model.

    Args:
        path: the model's directory.
        largest: the largest token id in all prompts.
        where: the config key and the source of the prompts, for the start of the error message.

    Raises:
        ConfigError: the largest token id has no embedding. The message of the ConfigError names the largest token id in
            the prompts and the model's vocabulary size.
    """
    size = text_config(path).get("vocab_size")
    require(
        not isinstance(size, int) or largest < size,
        f"{where}: has token id {largest}, but the model has embeddings for only {size} (vocab_size): the token was "
        "added only to the tokenizer; use the tokenizer that belongs to the model, or call resize_token_embeddings "
        "and train the new embeddings",
    )


def end_token_ids(path: str | Path, tokenizer: Any) -> list[int]:
    """Return the token ids that end an answer.

    The ids of the end tokens come from generation_config.json, the model's config and the tokenizer.

    Raises:
        ConfigError: an end token is not in the model's vocabulary, or the model has no end token. Without an end token,
            no answer would ever stop.
    """
    folder, model = local_directory(path), text_config(path)
    sources = [read_json(folder / "generation_config.json"), model]
    found = {tokenizer.eos_token_id, *(id for source in sources for id in _as_list(source.get("eos_token_id")))}
    ids = sorted(id for id in found if isinstance(id, int) and id >= 0)
    require(
        bool(ids),
        f"model.path={path}: no end token, so no answer would ever stop; set eos_token_id in generation_config.json, "
        "or the tokenizer's eos_token",
    )
    size = model.get("vocab_size")
    require(
        not isinstance(size, int) or ids[-1] < size,
        f"model.path={path}: the end token's id {ids[-1]} must be below the model's vocab_size={size}; correct "
        "eos_token_id in generation_config.json and config.json, or use the tokenizer that belongs to the model",
    )
    return ids


def model_config(path: str | Path, key: str = "model.path") -> dict[str, Any]:
    """Return the config of the language model in a model directory.

    If config.json leaves out a value, transformers' default value is used.

    Args:
        path: the model's directory.
        key: the config key that holds `path`, for the start of error messages.

    Raises:
        ConfigError: transformers cannot read the config.
    """
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(str(local_directory(path)), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises an exception, for example, for an unknown model type.
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"{key}={path}: config.json does not load ({type(error).__name__}: {reason}); use a model of a type "
            "that the installed transformers knows"
        ) from error
    model = whole.get_text_config()
    values: dict[str, Any] = model.to_dict()
    return values | {name: getattr(model, name, None) for name in _LAYERS}


def text_config(path: str | Path) -> dict[str, Any]:
    """Return the contents of a model's config.json.

    If config.json has a section `text_config` for the language model, the values of that section take precedence.
    """
    whole = read_json(local_directory(path) / "config.json")
    return whole | (whole.get("text_config") or {})


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
