"""Tests that weight files are accepted only if transformers would load from them every tensor of the model in
config.json.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers.modeling_utils
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2ForCausalLM

from rltrain.base.errors import ConfigError
from rltrain.data.model_weights import (
    check_engine_files,
    check_weights,
    load_whole,
    parameter_count,
    stored_tensors,
    weight_files,
)
from rltrain.tasks.tiny_model import tiny_model

DOWN = "model.layers.1.mlp.down_proj.weight"
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OLDER = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
KINDS = {
    "llama": {}, "mistral": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {}, "gemma3_text": {}, "phi3": {},
    "phi": {}, "olmo2": {}, "granite": {}, "cohere": {}, "gpt_neox": {}, "gpt2": OLDER, "smollm3": {}, "glm4": {},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16}, "starcoder2": {}, "qwen3_moe": MIXTURE,
    "mixtral": {"num_local_experts": 4}, "bloom": {"n_layer": 2, "n_head": 4}, "gptj": OLDER | {"rotary_dim": 4},
    "qwen3_next": MIXTURE | {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    },
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 4, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Save a tiny model with two layers and an untied output head, and return its folder."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def made(kind: str, folder: Path):
    """Return a random model of the given type, and its tensors as `save_pretrained` wrote them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]}))
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the weight file by name, where the value None removes a tensor."""
    names = load_file(folder / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in names.items() if tensor is not None}, folder / "model.safetensors")


def refusal(folder: Path, **knobs) -> str:
    with pytest.raises(ConfigError) as error:
        check_weights(str(folder), "model.path=here", **knobs)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("model.path=here: ")
    return str(error.value).removeprefix("model.path=here: ")


def sharded(folder: Path, parts: int = 2) -> Path:
    """Split the model's weight file into several files with an index, and return the path of the index."""
    tensors, where = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for number in range(parts):
        name = f"model-{number + 1:05d}-of-{parts:05d}.safetensors"
        part = {one: tensors[one] for one in sorted(tensors)[number::parts]}
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return index


# Tests of files that are accepted, because transformers loads a whole model from them


@pytest.mark.parametrize("kind", KINDS)
def test_each_architecture_is_accepted_whole_and_refused_without_any_one_of_its_tensors(kind, tmp_path):
    _, tensors = made(kind, tmp_path)
    check_weights(str(tmp_path), "model.path=here")
    for name in list(tensors)[::3]:
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, tmp_path / "model.safetensors")
        assert refusal(tmp_path).startswith("its weights ")
        save_file(
            {f"{n}x" if n == name else n: tensor for n, tensor in tensors.items()}, tmp_path / "model.safetensors"
        )
        assert refusal(tmp_path).startswith("its weights ")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "mixtral", "gpt_neox"])
def test_a_whole_model_is_loaded_with_every_parameter_from_its_files(kind, tmp_path):
    model, _ = made(kind, tmp_path)
    loaded = load_whole(AutoModelForCausalLM, str(tmp_path), "model.path=here", dtype=torch.float32)
    for (name, one), other in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_may_be_absent_where_it_is_tied_and_only_there(tied, tmp_path):
    model = Qwen2ForCausalLM(AutoConfig.for_model("qwen2", **SIZES, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    check_weights(str(tmp_path), "model.path=here")
    if tied:
        assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
        changed(tmp_path, **{"lm_head.weight": model.lm_head.weight.detach().clone()})
        check_weights(str(tmp_path), "model.path=here")
        # Transformers ties weights in both directions, so the embedding may be missing instead of the output head.
        changed(tmp_path, **{"model.embed_tokens.weight": None})
        check_weights(str(tmp_path), "model.path=here")
    changed(tmp_path, **{"lm_head.weight": None})
    assert "lm_head.weight" in refusal(tmp_path)


def test_names_of_the_bare_base_model_and_buffers_of_older_versions_are_accepted(tmp_path):
    """The original GPT-2 files lack the output head and the prefix `transformer.`, but contain the causal mask."""
    _, tensors = made("gpt2", tmp_path)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8) for n in range(2)}
    old |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}
    save_file(old, tmp_path / "model.safetensors")
    check_weights(str(tmp_path), "model.path=here")
    load_whole(AutoModelForCausalLM, str(tmp_path), "model.path=here")
    made("llama", tmp_path / "llama")
    made("gptj", tmp_path / "gptj")
    changed(tmp_path / "gptj", **{f"transformer.h.{n}.attn.masked_bias": torch.tensor(-1e9) for n in range(2)})
    check_weights(str(tmp_path / "gptj"), "model.path=here")
    load_whole(AutoModelForCausalLM, str(tmp_path / "gptj"), "model.path=here")
    changed(tmp_path / "llama", **{f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(2)})
    check_weights(str(tmp_path / "llama"), "model.path=here")


def test_a_torch_file_of_plain_tensors_is_accepted_and_its_tensors_are_looked_at(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    check_weights(str(folder), "model.path=here")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in stored_tensors(folder, "here").items()
    }
    torch.save({name: tensor for name, tensor in tensors.items() if name != DOWN}, folder / "pytorch_model.bin")
    assert refusal(folder).startswith(
        f"its weights lack {DOWN}, so they do not match the Qwen2ForCausalLM in its config"
    )


def test_a_model_of_many_gigabytes_is_looked_at_without_reading_any_and_without_random_numbers(tmp_path):
    config = AutoConfig.for_model("llama", **SIZES | {"vocab_size": 2**24, "hidden_size": 1024})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text, state = json.dumps(header).encode(), torch.get_rng_state()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)  # The file is sparse, so it takes almost no space on disk.
    assert end > 2**37
    check_weights(str(tmp_path), "model.path=here")
    assert torch.equal(torch.get_rng_state(), state)


# Tests of files that are refused with the name of the offending tensor or file


def test_a_renamed_tensor_is_named_twice(folder):
    tensor = load_file(folder / "model.safetensors")[DOWN]
    changed(folder, **{DOWN: None, "model.layers.1.mlp.down.weight": tensor})
    assert refusal(folder) == (
        f"its weights lack {DOWN}, and hold the extra tensors model.layers.1.mlp.down.weight, so they do not "
        "match the Qwen2ForCausalLM in its config.json; copy or download all files of the model again, or save it "
        "again with save_pretrained"
    )


def test_many_names_are_counted(folder):
    changed(folder, **{f"extra.{n}": torch.zeros(1) for n in range(9)})
    assert "hold the extra tensors extra.0, extra.1, extra.2 and 6 more, so they do not match" in refusal(folder)


def test_a_tensor_of_another_shape_is_refused(folder):
    tensor = load_file(folder / "model.safetensors")[DOWN]
    changed(folder, **{DOWN: tensor.T.contiguous()})
    rows, columns = tensor.shape
    assert f"its weights have {DOWN} of the shape [{columns}, {rows}] instead of [{rows}, {columns}], so" in refusal(
        folder
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_point_weights_of_any_width_are_accepted(folder, dtype):
    changed(folder, **{DOWN: load_file(folder / "model.safetensors")[DOWN].to(dtype)})
    check_weights(str(folder), "model.path=here")


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL")]
)
def test_weights_that_are_no_plain_floating_point_numbers_are_refused(folder, dtype, name):
    changed(folder, **{DOWN: load_file(folder / "model.safetensors")[DOWN].to(dtype)})
    assert refusal(folder).startswith(f"stores {DOWN} as {name}, and only floating-point weights can be trained; use ")


def test_quantised_weights_and_adapters_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert refusal(folder).startswith("its config.json has a quantization_config; only plain weights can be trained: ")
    (folder / "adapter_config.json").write_text("{}")
    assert refusal(folder).startswith("holds adapter_config.json, an adapter that engines would not apply; merge it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: None}, "its weights lack model.layers.0.mlp.experts.1.down_proj.weight, although the experts are"),
        (
            {1: 4},
            "its weights lack model.layers.0.mlp.experts.1.down_proj.weight, although the experts are numbered up to 4",
        ),
        ({1: 10**9}, "although the experts are numbered up to 1000000000; "),
        ({3: None}, "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_an_expert_that_is_missing_or_has_another_number_is_not_replaced_by_its_neighbour(tmp_path, change, message):
    """When an expert is missing, transformers stacks the remaining experts in the order of their numbers."""
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    _, tensors = made("qwen3_moe", tmp_path)
    for old, new in change.items():
        tensor = tensors[name.format(old)]
        changed(tmp_path, **{name.format(old): None} | ({} if new is None else {name.format(new): tensor}))
    assert message in refusal(tmp_path)


def test_an_expert_of_another_shape_is_refused_by_the_name_of_what_it_is_part_of(tmp_path):
    _, tensors = made("qwen3_moe", tmp_path)
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    changed(tmp_path, **{name: tensors[name].T.contiguous()})
    said = refusal(tmp_path)
    assert said.startswith("its weights for model.layers.0.mlp.experts.gate_up_proj cannot be combined: one of ")


def test_a_critic_has_its_head_made_anew_and_its_body_must_be_whole(folder):
    critic = {"kind": AutoModelForTokenClassification, "new_head": True}
    check_weights(str(folder), "model.path=here", **critic)
    changed(folder, **{"score.weight": torch.zeros(5, 5)})
    check_weights(str(folder), "model.path=here", **critic)
    changed(folder, **{DOWN: None})
    assert refusal(folder, **critic).startswith(f"its weights lack {DOWN}, so they do not match the Qwen2ForTokenCl")


@pytest.mark.parametrize("name", [3, "config.json", "../model.safetensors", ["model.safetensors"], "", False])
def test_a_config_that_names_no_file_of_weights_is_refused(folder, name):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
    assert refusal(folder).startswith(f"transformers_weights in its config.json is {name}, which is not")
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "own.safetensors"}))
    (folder / "model.safetensors").rename(folder / "own.safetensors")
    check_weights(str(folder), "model.path=here")
    load_whole(AutoModelForCausalLM, str(folder), "model.path=here")


def test_a_config_of_which_no_model_can_be_made_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": -1}))
    assert refusal(folder).startswith("transformers cannot create AutoModelForCausalLM from its config.json (")


# Tests of broken weight files


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 7, b"\xff" * 64, b"\xff" * 8 + b"{}", (1 << 62).to_bytes(8, "little") + b"{", b"\x02" + b"\x00" * 7,
     (2).to_bytes(8, "little") + b"[]", (99_999_999).to_bytes(8, "little"), b"version https://git-lfs.github.com/spec/v1",
     (100_000).to_bytes(8, "little") + b"[" * 100_000],
)  # fmt: skip
def test_a_safetensors_file_with_a_broken_header_is_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    said = refusal(folder)
    assert said.startswith("model.safetensors is not a complete safetensors file (")
    assert said.endswith("; copy or download the model's files again, or save the model again with save_pretrained")


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_a_safetensors_file_that_is_cut_short_is_refused(folder, share):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: int(share * len(content))])
    assert refusal(folder).startswith("model.safetensors is not a complete safetensors file (")


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\x80\x04K\x01.", b"PK\x03\x04 and no more", b"\x80\x05cos\nsystem\n"]
)
def test_a_torch_file_that_is_garbage_is_refused_without_advice_to_run_it(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    said = refusal(folder)
    assert said.startswith("pytorch_model.bin ")
    assert "weights_only" not in said
    assert said.endswith(
        "save the model again with save_pretrained" + ", which writes safetensors" * ("not a complete" in said)
    )


def test_a_torch_file_of_something_else_is_refused(folder):
    (folder / "model.safetensors").unlink()
    torch.save([torch.zeros(1)], folder / "pytorch_model.bin")
    assert refusal(folder).startswith("pytorch_model.bin must contain only a dict that maps names to tensors; ")


def test_shards_are_accepted_in_any_order_and_refused_when_one_is_missing(folder):
    index = sharded(folder)
    check_weights(str(folder), "model.path=here")
    first, second = weight_files(folder, "here")
    first.rename(folder / "aside")
    second.rename(first)
    # Transformers reads each tensor from the file that contains the tensor, even if the index names another file.
    (folder / "aside").rename(second)
    check_weights(str(folder), "model.path=here")
    second.unlink()
    assert refusal(folder) == (
        f"{index.name} names {second.name}, which does not exist; copy or download that file too"
    )  # fmt: skip


def test_a_shard_in_the_place_of_another_is_refused(folder):
    sharded(folder)
    first, second = weight_files(folder, "here")
    shutil.copy(first, second)
    assert refusal(folder).startswith(f"{second.name} and {first.name} both hold ")


def test_an_index_may_name_a_tensor_that_is_in_no_file_only_if_the_model_has_none(folder):
    index = sharded(folder)
    content = json.loads(index.read_text())
    content["weight_map"]["old.buffer"] = content["weight_map"][DOWN]
    index.write_text(json.dumps(content))
    check_weights(str(folder), "model.path=here")
    file = folder / content["weight_map"][DOWN]
    save_file({name: tensor for name, tensor in load_file(file).items() if name != DOWN}, file)
    assert refusal(folder).startswith(f"its weights lack {DOWN}, so they do not match ")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", "[" * 100_000, "{}", '{"metadata": {}, "weight_map": {}}',
     '{"metadata": {}, "weight_map": {"a": 1}}',
     '{"metadata": {}, "weight_map": []}', '{"metadata": {}, "weight_map": {"a": "config.json"}}',
     '{"metadata": {}, "weight_map": {"a": "\\ud800.safetensors"}}', '{"weight_map": {"a": "a.safetensors"}}',
     '{"metadata": {}, "weight_map": {"a": "\\u0000.safetensors"}}'],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(folder, content):
    index = sharded(folder)
    index.write_text(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json") as error:
        check_weights(str(folder), "model.path=here")
    assert str(error.value).isprintable()


def test_vllm_must_read_the_files_that_transformers_reads(folder):
    check_engine_files(str(folder), "model.path=here")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    with pytest.raises(ConfigError, match=r"\(only one of them reads consolidated\.safetensors\); keep"):
        check_engine_files(str(folder), "model.path=here")
    (folder / "consolidated.safetensors").rename(folder / "aside")
    sharded(folder)
    # vLLM ignores weight files that the index does not name.
    shutil.copy(folder / "aside", folder / "consolidated.safetensors")
    check_engine_files(str(folder), "model.path=here")
    # Transformers loads model.safetensors, whereas vLLM loads the files that the index names.
    shutil.copy(folder / "aside", folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"model-00001-of-00002\.safetensors, model-00002-of-00002\.safetensors, model"
    ):
        check_engine_files(str(folder), "model.path=here")
    check_weights(str(folder), "model.path=here")


# Tests that the function that loads a model refuses weight files that changed after the check


def test_what_the_loader_did_not_find_is_refused_by_name_too(folder, monkeypatch):
    monkeypatch.setattr("rltrain.data.model_weights.check_weights", lambda *_, **__: None)
    tensor = load_file(folder / "model.safetensors")[DOWN]
    changed(folder, **{DOWN: None, "extra": tensor, "model.norm.weight": torch.ones(3)})
    with pytest.raises(ConfigError) as error:
        load_whole(AutoModelForCausalLM, str(folder), "model.path=here")
    said = (
        f"lack {DOWN}, and have model.norm.weight of the shape [3] instead of [{tensor.size(0)}], and hold the "
        "extra tensors extra"
    )
    assert said in str(error.value)


def test_transformers_logs_and_draws_its_progress_as_before(folder, capfd):
    logger = transformers.modeling_utils.logger
    before = logger.level, list(logger.filters)
    changed(folder, **{DOWN: None})
    refusal(folder)
    assert (logger.level, list(logger.filters)) == before
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")


def test_parameters_are_counted_once_by_the_config(folder, tmp_path):
    expected = sum(parameter.numel() for parameter in tiny_model().parameters())
    assert parameter_count(str(folder)) == parameter_count("builtin") == expected
    model = Qwen2ForCausalLM(AutoConfig.for_model("qwen2", **SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "tied")
    assert parameter_count(str(tmp_path / "tied")) == sum(parameter.numel() for parameter in model.parameters())
