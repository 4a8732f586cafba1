import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rltrain.base.errors import ConfigError
from rltrain.data.model_directory import (
    check_directory,
    check_heads,
    check_limits,
    check_vocabulary,
    end_token_ids,
    load_tokenizer,
    longest_row,
    model_config,
    text_config,
)
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer

WITHOUT_END = SimpleNamespace(eos_token_id=None)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "config.json", {"max_position_embeddings": 64, "num_attention_heads": 4})
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


def refusal(function, *args):
    with pytest.raises(ConfigError) as error:
        function(*args)
    return str(error.value)


def test_a_whole_directory_is_accepted(folder):
    check_directory(str(folder))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "holds no config.json; give the folder that holds config.json"),
        ("model.safetensors", "holds no weights (looked for model.safetensors, model.safetensors.index.json, "),
        ("tokenizer.json", "holds no tokenizer (looked for tokenizer.json, "),
    ],
)
def test_what_a_directory_lacks_is_named(folder, missing, message):
    (folder / missing).unlink()
    assert f"model.path={folder}: {message}" in refusal(check_directory, str(folder))


def test_a_path_that_is_absent_or_a_file_is_refused(folder):
    assert "no such directory" in refusal(check_directory, f"{folder}/no")
    assert "not a directory" in refusal(check_directory, f"{folder}/config.json")


def test_a_config_that_is_no_json_is_named_by_its_file(folder):
    (folder / "config.json").write_text("{")
    assert f"{folder}/config.json: not readable JSON" in refusal(check_directory, str(folder))


def test_lengths_beyond_the_positions_are_refused(folder):
    check_limits(compose(["rollout.max_prompt_length=48"])[0], text_config(folder))
    assert refusal(check_limits, compose(["rollout.max_prompt_length=49"])[0], text_config(folder)) == (
        "rollout.max_prompt_length=49 + rollout.max_response_length=16 = 65 tokens: the model has 64 positions "
        "(max_position_embeddings); lower their sum to at most 64"
    )


def test_the_language_part_of_a_larger_model_decides(folder):
    write(folder, "config.json", {"max_position_embeddings": 9999, "text_config": {"max_position_embeddings": 31}})
    assert "has 31 positions" in refusal(check_limits, compose([])[0], text_config(folder))


def test_a_model_that_does_not_tell_its_positions_is_accepted(folder):
    write(folder, "config.json", {})
    check_limits(compose([])[0], text_config(folder))


def test_positions_may_have_their_older_name(folder):
    write(folder, "config.json", {"n_positions": 31})
    assert "has 31 positions (n_positions); lower their sum to at" in refusal(
        check_limits, compose([])[0], text_config(folder)
    )


def test_chunks_of_attention_shorter_than_a_row_are_refused():
    message = refusal(check_limits, compose([])[0], {"attention_chunk_size": 31})
    assert message.startswith("model.path=builtin: its attention_chunk_size=31 is shorter than rollout.max_prompt_")
    assert message.endswith("lower their sum to at most 31, or use another model")


@pytest.mark.parametrize(
    "model",
    [{"attention_chunk_size": 32}, {"attention_chunk_size": None}, {"sliding_window": 1},
     {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}],
)  # fmt: skip
def test_long_chunks_windows_and_soft_caps_are_accepted(model):
    check_limits(compose([])[0], model)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "conv"),
     ({"model_type": "qwen3_next"}, "linear_attention"), ({"model_type": "qwen3_5_text"}, "linear_attention"),
     ({"model_type": "qwen3_5"}, "linear_attention"), ({"model_type": "bamba"}, "linear_attention"),
     ({"model_type": "granitemoehybrid"}, "linear_attention"), ({"model_type": "mamba"}, "linear_attention"),
     ({"model_type": "falcon_h1"}, "hybrid"), ({"model_type": "recurrent_gemma"}, "recurrent"),
     ({"model_type": "deepseek_v32"}, "indexed_attention")],
)  # fmt: skip
def test_B6_layers_that_would_mix_the_rows_of_a_pack_are_refused(folder, model, kinds):
    write(folder, "config.json", model)
    message = refusal(check_limits, compose([])[0], model_config(folder))
    assert f"has layers of the kind {kinds}, and training can keep packed rows apart only in" in message


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "smollm3", "qwen3_moe", "cohere2", "olmo3", "gpt2"])
def test_layers_that_all_attend_are_accepted(folder, kind):
    write(folder, "config.json", {"model_type": kind})
    check_limits(compose([])[0], model_config(folder))


def test_a_chunk_of_attention_shorter_than_an_answer_is_refused():
    assert "its attention_chunk_size=31 is shorter" in refusal(
        check_limits, compose([])[0], {"attention_chunk_size": 31}
    )


def test_a_config_that_transformers_does_not_know_is_refused(folder):
    write(folder, "config.json", {"model_type": "unheard_of"})
    message = refusal(model_config, folder)
    assert message.startswith(f"model.path={folder}: config.json does not load (")
    assert message.endswith("; use a model of a type that the installed transformers knows")


LONG = {
    "model_type": "phi3", "original_max_position_embeddings": 32, "max_position_embeddings": 64, "hidden_size": 32,
    "num_attention_heads": 4,
}  # fmt: skip
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    "form",
    [{"rope_scaling": {"type": "longrope", **FACTORS}},
     {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}}],
)  # fmt: skip
def test_B6_rows_for_which_longrope_changes_its_frequencies_are_refused(folder, form):
    write(folder, "config.json", LONG | form)
    check_limits(compose(["rollout.max_prompt_length=16"])[0], model_config(folder))
    assert refusal(check_limits, compose(["rollout.max_prompt_length=17"])[0], model_config(folder)) == (
        "rollout.max_response_length=16 + rollout.max_prompt_length=17 = 33 tokens: beyond 32 tokens the model's "
        "RoPE (longrope) changes its frequencies, so one long row would change all rows packed with it; lower their "
        "sum to at most 32"
    )
    assert longest_row(folder) == 32


def test_B6_longrope_of_one_kind_of_layer_counts_too(folder):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 31, **FACTORS}
    model = {"rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}}
    assert "beyond 31 tokens the model's RoPE" in refusal(check_limits, compose([])[0], model)


def test_B6_dynamic_frequencies_change_beyond_the_positions_alone(folder):
    """Up to the model's number of positions, dynamic RoPE frequencies equal the unscaled frequencies, as in vLLM.

    If the longest row of a packed batch exceeds the model's number of positions, transformers computes the frequencies
    from that row.
    """
    scaling = {"type": "dynamic", "factor": 4.0}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 32}
    write(folder, "config.json", {"model_type": "llama", "rope_scaling": scaling, **sizes})
    model = model_config(folder)
    check_limits(compose(["rollout.max_prompt_length=16"])[0], model)
    assert "has 32 positions" in refusal(check_limits, compose(["rollout.max_prompt_length=17"])[0], model)
    rope = LlamaRotaryEmbedding(LlamaConfig(**{**sizes, "rope_scaling": scaling}))
    plain = LlamaRotaryEmbedding(LlamaConfig(**sizes))
    tokens, within = torch.zeros(1, 1), torch.arange(32)[None]
    assert torch.equal(rope(tokens, within)[0], plain(tokens, within)[0])
    rope(tokens, torch.arange(33)[None])
    assert not torch.equal(rope(tokens, torch.arange(33)[None])[0][:, :32], plain(tokens, within)[0])


def test_heads_that_shards_cannot_share_are_refused(folder):
    config = compose(["rollout.vllm.tensor_parallel_size=3"])[0]
    assert "the model's 4 attention heads cannot be divided evenly" in refusal(
        check_limits, config, text_config(folder)
    )


def test_end_tokens_come_from_all_three_places(folder):
    write(folder, "config.json", {"eos_token_id": 7})
    write(folder, "generation_config.json", {"eos_token_id": [7, 9]})
    assert end_token_ids(folder, SimpleNamespace(eos_token_id=5)) == [5, 7, 9]


def test_a_model_without_an_end_token_is_refused(folder):
    write(folder, "config.json", {"eos_token_id": None})
    message = refusal(end_token_ids, folder, WITHOUT_END)
    assert message.startswith(f"model.path={folder}: no end token, so no answer would ever stop; set eos_token_id in ")


def test_an_end_token_that_the_model_does_not_have_is_refused(folder):
    write(folder, "config.json", {"eos_token_id": 7, "vocab_size": 8})
    assert end_token_ids(folder, WITHOUT_END) == [7]
    message = refusal(end_token_ids, folder, SimpleNamespace(eos_token_id=8))
    assert f"model.path={folder}: the end token's id 8 must be below the model's vocab_size=8; correct" in message


def test_a_tokenizer_with_more_words_than_the_model_has_embeddings_is_refused(folder):
    tokenizer = char_tokenizer()
    write(folder, "config.json", {"vocab_size": 128})
    check_vocabulary(folder, tokenizer, "model.path=here")
    write(folder, "config.json", {"vocab_size": 127})
    assert refusal(check_vocabulary, folder, tokenizer, "model.path=here") == (
        "model.path=here: its tokenizer has ids up to 127, but the model has embeddings for only 127 (vocab_size); "
        "use the tokenizer that belongs to the model"
    )


def test_a_token_that_was_added_for_other_inputs_than_text_needs_no_embedding(folder):
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    write(folder, "config.json", {"vocab_size": 128})
    assert tokenizer.convert_tokens_to_ids("<image>") == 128
    check_vocabulary(folder, tokenizer, "model.path=here")


def test_a_tokenizer_loads_and_a_broken_one_is_refused(folder):
    char_tokenizer().save_pretrained(folder)
    assert load_tokenizer(folder)("12", add_special_tokens=False)["input_ids"] == [ord("1"), ord("2")]
    (folder / "tokenizer.json").write_text("{")
    message = refusal(load_tokenizer, folder)
    assert f"model.path={folder}: the tokenizer does not load (" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ({}, {"tensor": 2, "sequence": 2}, ""),
        ({}, {"context": 16}, ""),
        ({}, {"tensor": 4}, "tensor_ranks=4: the 8 attention heads and 2 key-value heads of model.path=M"),
        ({}, {"tensor": 2, "sequence": 8}, "4 attention heads and 1 key-value heads of each of placement.ten"),
        ({}, {"sequence": 3}, "sequence_ranks=3: .* or divide the tokens with placement.context_ranks"),
        ({"model_type": "olmo2"}, {"tensor": 4}, ""),  # olmo2's plan does not divide heads
    ],
    ids=str,
)  # fmt: skip
def test_attention_heads_that_the_ranks_cannot_divide_are_refused(model, sizes, message):
    divided = [f"placement.{name}_ranks={size}" for name, size in sizes.items()]
    placement = compose([f"placement.actor_ranks={math.prod(sizes.values())}", *divided])[0].placement
    model = {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2} | model
    if message:
        with pytest.raises(ConfigError, match=message):
            check_heads(placement, model, "model.path=M")
    else:
        check_heads(placement, model, "model.path=M")
