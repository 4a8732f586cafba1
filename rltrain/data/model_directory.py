"""What a model directory holds, looked at without loading the model: its config, its limits, its end tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.data.model_weights import check_weights, read_json, weight_files
from rltrain.settings.schema import Config
from rltrain.settings.typed import require

_POSITIONS = ("max_position_embeddings", "n_positions")  # what architectures call it
_LAYERS = ("layer_types", "layers_block_type")  # what configs call the kinds of their layers, and the kinds that attend
_ATTENTION = ("full_attention", "attention", "sliding_attention", "chunked_attention")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def check_directory(path: str, key: str = "model.path") -> None:
    """Refuse a path, the value of `key`, that is no directory of a model in Hugging Face form.

    What is in the weights is for `check_weights`.

    Raises:
        ConfigError: naming what is missing from it.
    """
    where, folder = f"{key}={path}", Path(path).expanduser()
    other = ", or model.path=builtin" if where.startswith("model.path") else ""
    require(folder.exists(), f"{where}: no such directory; give the folder of a model{other}")
    require(folder.is_dir(), f"{where}: not a directory; give the folder that holds config.json and the weights")
    require((folder / "config.json").is_file(), f"{where}: holds no config.json; give a model's own folder")
    read_json(folder / "config.json")
    weight_files(folder, where)
    found = any((folder / name).is_file() for name in _TOKENIZER)
    require(found, f"{where}: holds no tokenizer (looked for {', '.join(_TOKENIZER)}); save the model's there")


def check_reward_model(path: str, key: str) -> None:
    """Refuse a directory that holds no sequence classifier with one output, which is what a reward model is.

    Raises:
        ConfigError: naming what it is instead, or the tensors that its weights lack.
    """
    from transformers import AutoModelForSequenceClassification

    check_directory(path, key)
    config = text_config(Path(path).expanduser())
    kind = str((config.get("architectures") or ["unknown"])[0])
    labels = config.get("num_labels", len(config.get("id2label", ("LABEL_0", "LABEL_1"))))  # two by default
    require(
        kind.endswith("ForSequenceClassification"),
        f"{key}={path}: is of the architecture {kind}; a reward model is a ...ForSequenceClassification",
    )
    require(labels == 1, f"{key}={path}: has {labels} outputs; a reward model has one (num_labels=1)")
    _check_layers(f"{key}={path}", model_config(path, key))
    check_weights(path, f"{key}={path}", AutoModelForSequenceClassification)


def check_critic(path: str) -> None:
    """Refuse a model that no critic can be made of: transformers has no form of it with one output a token.

    Raises:
        ConfigError: naming the type, and the algorithms that need no critic; or tensors that its body lacks.
    """
    from transformers import AutoModelForTokenClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES as known

    kind = read_json(Path(path).expanduser() / "config.json").get("model_type")
    require(
        kind in known,
        f"model.path={path}: models of the type {kind} have no critic (transformers has no token classifier of them); "
        "use an algorithm without one (algorithm=grpo, rloo or reinforce_plus_plus), or another model",
    )
    check_weights(path, f"model.path={path}", AutoModelForTokenClassification, new_head=True)


def longest_row(path: str | Path) -> int | None:
    """Return how many tokens a row may have so that the model reads all of it as it was trained; None: any number."""
    model = model_config(path)
    limits = [*(model.get(name) for name in _POSITIONS), *_windows(model).values(), _rope_limit(model)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def check_limits(config: Config, model: Mapping[str, Any]) -> None:
    """Refuse lengths that the model has no positions for, layers that cannot be trained, and too many shards.

    Args:
        config: the whole config.
        model: the model's own config, as from `model_config`.

    Raises:
        ConfigError: naming the model's limit.
    """
    rollout = config.rollout
    longest = rollout.max_prompt_length + rollout.max_response_length
    name = next((name for name in _POSITIONS if isinstance(model.get(name), int)), _POSITIONS[0])
    positions = model.get(name)
    require(
        not isinstance(positions, int) or longest <= positions,
        f"rollout.max_prompt_length={rollout.max_prompt_length} + rollout.max_response_length="
        f"{rollout.max_response_length} = {longest} tokens: the model has {positions} positions "
        f"({name}); use at most {positions} together",
    )
    limit = _rope_limit(model)
    require(
        limit is None or longest <= limit,
        f"rollout.max_response_length={rollout.max_response_length} + rollout.max_prompt_length="
        f"{rollout.max_prompt_length} = {longest} tokens: beyond {limit} the model's RoPE (longrope) has other "
        f"frequencies, and one long row would change all rows packed with it; use at most {limit} together",
    )
    shards, heads = rollout.shards, model.get("num_attention_heads")
    require(
        not isinstance(heads, int) or heads % shards == 0,
        f"rollout.vllm.tensor_parallel_size={shards}: the model's {heads} attention heads cannot be shared out evenly; "
        f"use a divisor of {heads}",
    )
    size, pairs = config.placement.sequence_ranks, model.get("num_key_value_heads") or heads
    require(
        not isinstance(heads, int)
        or not isinstance(pairs, int)
        or (heads % size == 0 and (pairs % size == 0 or size % pairs == 0)),
        f"placement.sequence_ranks={size}: the model's {heads} attention heads over {pairs} key-value heads cannot be "
        "shared out evenly; use a divisor of both, or 1",
    )
    _check_layers(f"model.path={config.model.path}", model)
    _check_attention(config.model.path, longest, model)


def _check_layers(where: str, model: Mapping[str, Any]) -> None:
    """Refuse layers that mix tokens by other means than attention: rows of a pack would see each other."""
    kinds = {kind for name in _LAYERS for kind in model.get(name) or ()}
    other = ", ".join(sorted(kinds - {*_ATTENTION}))
    require(
        not other,
        f"{where}: has layers of the kind {other}, and training keeps rows apart in attention alone; use a model whose "
        "layers all are attention",
    )


def _check_attention(path: str, longest: int, model: Mapping[str, Any]) -> None:
    """Refuse attention and logits that training does not compute: its log-probs would be another model's."""
    for key, window in _windows(model).items():
        require(
            longest <= window,
            f"model.path={path}: its {key}={window} is shorter than rollout.max_prompt_length + "
            f"rollout.max_response_length = {longest}, and training attends to everything; use at most {window} "
            "together, or another model",
        )
    for key, what in (("attn_logit_softcapping", "attention"), ("final_logit_softcapping", "logits")):
        cap = model.get(key)
        require(cap is None, f"model.path={path}: its {key}={cap}, and training does not cap {what}; use another model")


def _windows(model: Mapping[str, Any]) -> dict[str, int]:
    """How many tokens back the model's layers look where that is limited, by the config's word for it."""
    found = {"attention_chunk_size": model.get("attention_chunk_size")}
    if model.get("use_sliding_window", True):
        found["sliding_window"] = model.get("sliding_window")
    return {key: window for key, window in found.items() if isinstance(window, int)}


def _rope_limit(model: Mapping[str, Any]) -> int | None:
    """How long rows may be for RoPE to have the same frequencies for all of them, in engines too; None: any length.

    Of the types that change them, dynamic does so beyond the model's positions, where no row is.
    """
    rope = model.get("rope_parameters") or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for each kind of layer, maybe
    limits = [part.get("original_max_position_embeddings") for part in parts if part.get("rope_type") == "longrope"]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def load_tokenizer(path: str | Path, key: str = "model.path") -> Any:
    """Load the tokenizer of a model directory, the value of `key`, without network access.

    Raises:
        ConfigError: there is none that loads.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # broken files raise whatever their parser raises
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"{key}={path}: its tokenizer does not load ({type(error).__name__}: {reason}); save it again with "
            "tokenizer.save_pretrained"
        ) from error


def check_vocabulary(path: str | Path, tokenizer: Any, where: str) -> None:
    """Refuse a tokenizer with ids that the model has no embeddings for.

    Added tokens do not count: some models have one more of them than embeddings, for inputs that are no text.

    Args:
        path: the model's directory.
        tokenizer: its tokenizer.
        where: the key and the path, which the error begins with.

    Raises:
        ConfigError: naming the sizes of both vocabularies.
    """
    size, words = text_config(path).get("vocab_size"), tokenizer.get_vocab()
    largest = max((words[word] for word in words.keys() - tokenizer.get_added_vocab().keys()), default=0)
    require(
        not isinstance(size, int) or largest < size,
        f"{where}: its tokenizer has ids up to {largest}, and the model embeddings for {size} (vocab_size); use the "
        "tokenizer that belongs to the model",
    )


def check_prompt_ids(path: str | Path, largest: int, where: str) -> None:
    """Refuse prompts with a token that the model has no embedding for: one that was added to the tokenizer alone.

    Args:
        path: the model's directory.
        largest: the largest id of all prompts.
        where: the key and the prompts' source, which the error begins with.

    Raises:
        ConfigError: naming the id and the size of the vocabulary.
    """
    size = text_config(path).get("vocab_size")
    require(
        not isinstance(size, int) or largest < size,
        f"{where}: has token id {largest}, and the model embeddings for {size} (vocab_size): the token was added to "
        "the tokenizer alone; use the tokenizer that belongs to the model, or resize_token_embeddings and train them",
    )


def end_token_ids(path: str | Path, tokenizer: Any) -> list[int]:
    """Return the ids that end an answer: those of the generation defaults, the model's config and the tokenizer.

    Raises:
        ConfigError: there is none, so that no answer could ever stop, or the model has no such token.
    """
    folder, model = Path(path), text_config(path)
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
        f"model.path={path}: end token {ids[-1]} is not below the model's vocab_size={size}; correct eos_token_id in "
        "generation_config.json and config.json, or use the tokenizer that belongs to the model",
    )
    return ids


def model_config(path: str | Path, key: str = "model.path") -> dict[str, Any]:
    """Return the language model's config of a directory, the value of `key`, as transformers completes it.

    Raises:
        ConfigError: transformers cannot read it.
    """
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(str(Path(path).expanduser()), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # configs of a kind that it does not know, or that do not fit their kind
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"{key}={path}: its config.json does not load ({type(error).__name__}: {reason}); use a model of a type "
            "that the installed transformers knows"
        ) from error
    model = whole.get_text_config()
    values: dict[str, Any] = model.to_dict()
    return values | {name: getattr(model, name, None) for name in _LAYERS}


def text_config(path: str | Path) -> dict[str, Any]:
    """Return a model's own config; where it has several parts, the values of the language model's come first."""
    whole = read_json(Path(path) / "config.json")
    return whole | (whole.get("text_config") or {})


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
