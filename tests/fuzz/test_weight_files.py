"""However a model's files are damaged, a run trains exactly the parameters in the files or does not train at all."""

import contextlib
import functools
import io
import json
import os
import pickle
import shutil
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from harness import cases, check_refusal, command, nothing_written_over, read_once, refused
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rltrain.run.checks import check
from rltrain.settings.compose import compose
from workers.models.loading import load_model

ONE, PARTS, TORCH, TORCH_PARTS, TIED = "one file", "shards", "torch file", "torch shards", "tied"
FORMS = [ONE, PARTS, TORCH, TORCH_PARTS, TIED]
INDEX, TORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"


class Runs:
    """An object that, as an attack, runs a shell command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("was_run",)


def of_torch(content) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def of_tensors(tensors, suffix: str) -> bytes:
    if suffix == ".bin":
        return of_torch(tensors)
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})


def tensors_of(content: bytes, suffix: str):
    if suffix == ".bin":
        return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    return safetensors.torch.load(content)


class Forms(dict[str, dict[str, bytes]]):
    """One model in all file formats: a dictionary from the format's name to the files of the model's folder."""

    def __repr__(self) -> str:
        return "forms"  # A short text, because Hypothesis prints the arguments of a test.


@pytest.fixture(scope="module")
def forms(model) -> Forms:
    tensors = safetensors.torch.load_file(f"{model}/model.safetensors")
    small = {path.name: path.read_bytes() for path in Path(model).iterdir() if path.suffix != ".safetensors"}
    config = json.loads(small["config.json"])
    tied = small | {"config.json": json.dumps(config | {"tie_word_embeddings": True}).encode()}
    without_head = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    found = {
        ONE: small | {"model.safetensors": of_tensors(tensors, ".safetensors")},
        TIED: tied | {"model.safetensors": of_tensors(without_head, ".safetensors")},
        TORCH: small | {"pytorch_model.bin": of_tensors(tensors, ".bin")},
        PARTS: small | in_parts(tensors, "model", ".safetensors", INDEX),
        TORCH_PARTS: small | in_parts(tensors, "pytorch_model", ".bin", TORCH_INDEX),
    }
    return Forms(found)


def in_parts(tensors, stem: str, suffix: str, index: str, count: int = 3) -> dict[str, bytes]:
    files, where = {}, {}
    for number in range(count):
        name = f"{stem}-{number + 1:05d}-of-{count:05d}{suffix}"
        part = {one: tensors[one] for one in sorted(tensors)[number::count]}
        files[name] = of_tensors(part, suffix)
        where |= dict.fromkeys(part, name)
    return files | {index: json.dumps({"metadata": {}, "weight_map": where}).encode()}


# Each of the following functions corrupts `files` in place. The randomly drawn argument selects an existing name or
# position.

JUNK = [
    b"", b"{", b"[]", b"null", b"{}", b"\x00" * 100, b"\xff" * 100, b"[" * 100_000, b"PK\x03\x04", b"9" * 5000,
    (2).to_bytes(8, "little") + b"{}", (1 << 63).to_bytes(8, "little") + b"{}", (100_000_000).to_bytes(8, "little"),
    (100_000).to_bytes(8, "little") + b"[" * 100_000, b"version https://git-lfs.github.com/spec/v1\n",
    pickle.dumps(Runs()), of_torch([1]), of_torch({"model.norm.weight": 1}), of_torch({1: torch.zeros(1)}),
    of_torch(torch.nn.Linear(1, 1)), of_torch({}), safetensors.torch.save({}),
]  # fmt: skip
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn]
CONFIG = [
    ("vocab_size", 127), ("vocab_size", 129), ("hidden_size", 64), ("hidden_size", 0), ("num_hidden_layers", 1),
    ("num_hidden_layers", 3), ("tie_word_embeddings", True), ("tie_word_embeddings", False), ("model_type", "llama"),
    ("model_type", "gpt2"), ("intermediate_size", 8), ("num_key_value_heads", 1), ("num_labels", 3), ("dtype", "int8"),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}), ("transformers_weights", "other.safetensors"),
    ("transformers_weights", 3), ("architectures", None), ("num_attention_heads", 3),
]  # fmt: skip
HARMLESS = {"nothing", "width", "old buffer", "exchange", "index names more"}


def pick(things, place: int):
    found = sorted(things)
    return found[place % len(found)]


def weights_in(files) -> list[str]:
    return [name for name in files if name.endswith((".safetensors", ".bin"))]


def edited(files, place: int, change) -> None:
    """Apply `change` to the tensors of one file.

    If an earlier corruption has made the file unreadable, the file is not changed.
    """
    file = pick(weights_in(files), place)
    try:
        tensors = tensors_of(files[file], Path(file).suffix)
        change(tensors)
        files[file] = of_tensors(tensors, Path(file).suffix)
    except Exception:  # A broken file may cause any error.
        return


def rename(files, place, new):
    edited(files, place, lambda tensors: tensors.update({new: tensors.pop(pick(tensors, place))}))


def exchange_names(files, place, other):
    def change(tensors):
        first, second = pick(tensors, place), pick(tensors, other)
        tensors[first], tensors[second] = tensors[second], tensors[first]

    edited(files, place, change)


def drop(files, place, _):
    edited(files, place, lambda tensors: tensors.pop(pick(tensors, place)))


def extra(files, place, new):
    edited(files, place, lambda tensors: tensors.update({new: torch.zeros(place % 3, 2)}))


def old_buffer(files, place, _):
    name = f"model.layers.{place}.self_attn.rotary_emb.inv_freq"  # Tensor names must not repeat across files.
    edited(files, place, lambda tensors: tensors.update({name: torch.ones(4)}))


def shape(files, place, how):
    def change(tensors):
        name = pick(tensors, place)
        tensor = tensors[name]
        forms = [tensor.T, tensor.reshape(-1), tensor[:-1], tensor[:0], tensor[None], torch.cat([tensor, tensor])]
        tensors[name] = forms[how % len(forms)].clone()

    edited(files, place, change)


def dtype(files, place, how):
    def change(tensors):
        name = pick(tensors, place)
        tensors[name] = tensors[name].to(DTYPES[how % len(DTYPES)])

    edited(files, place, change)


def width(files, place, how):
    dtype(files, place, how % 3)


def cut(files, place, where):
    name = pick(files, place)
    files[name] = files[name][: where % max(len(files[name]), 1)]


def flip(files, place, what):
    name, (at, byte, early) = pick(weights_in(files), place), what
    at = at % max(min(len(files[name]), 2000 if early else len(files[name])), 1)
    files[name] = files[name][:at] + bytes([byte]) + files[name][at + 1 :]


def junk(files, place, content):
    name = pick(weights_in(files) + [name for name in files if name.endswith(".index.json")], place)
    files[name] = content if isinstance(content, bytes) else JUNK[content % len(JUNK)]


def remove(files, place, _):
    del files[pick(files, place)]


def copy_over(files, place, other):
    files[pick(weights_in(files), place)] = files[pick(weights_in(files), other)]


def exchange(files, place, other):
    first, second = pick(weights_in(files), place), pick(weights_in(files), other)
    files[first], files[second] = files[second], files[first]


def beside(files, place, what):
    name, content = what
    files[name] = files[pick(weights_in(files), place)] if content is None else content


def index(files, place, change):
    for name in (INDEX, TORCH_INDEX):
        with contextlib.suppress(KeyError, ValueError, AttributeError, TypeError, RecursionError, UnicodeDecodeError):
            content = json.loads(files[name])
            change(content, place)
            files[name] = json.dumps(content).encode()


def index_names_more(files, place, new):
    def change(content, place):
        content["weight_map"]["old.buffer"] = pick(set(content["weight_map"].values()), place)

    index(files, place, change)


def index_entry(files, place, value):
    index(files, place, lambda content, at: content["weight_map"].update({pick(content["weight_map"], at): value}))


def index_less(files, place, how):
    def change(content, at):
        if how % 3:
            del content[("metadata", "weight_map")[how % 3 - 1]]
        else:
            file = pick(set(content["weight_map"].values()), at)
            content["weight_map"] = {name: one for name, one in content["weight_map"].items() if one != file}

    index(files, place, change)


def config(files, place, how):
    key, value = CONFIG[how % len(CONFIG)]
    with contextlib.suppress(KeyError, ValueError):
        files["config.json"] = json.dumps(json.loads(files["config.json"]) | {key: value}).encode()


def nothing(files, place, _):
    return


place = st.integers(0, 10_000)
new_name = st.sampled_from(
    ["model.layers.1.mlp.down.weight", "lm_head.bias", "model.layers.7.mlp.down_proj.weight", "score.weight", "",
     "x" * 500,     "model.norm.weight", "norm.weight", "v_head.weight", "\x1b[2J", "\u202e",
     "model.layers.0.mlp.experts.1.w1.weight",
     "base_model.model.model.norm.weight", "a\nb", "model.layers.0.self_attn.q_proj.lora_A.weight"]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # fmt: skip
other_file = st.sampled_from([
    "", "nowhere.safetensors", "config.json", "../model/config.json", "/dev/null", "\x00.bin", "x" * 300 + ".bin",
    None, 1,    ["a"], "model-00001-of-00003.safetensors", "pytorch_model-00002-of-00003.bin", "\ud800.safetensors",
])  # fmt: skip
file_beside = st.sampled_from([
    ("model.safetensors", None), ("pytorch_model.bin", None), ("adapter_model.safetensors", None),
    ("adapter_config.json", b"{}"), (INDEX, b"{}"), ("model.safetensors", b""), ("consolidated.safetensors", None),
    ("training_args.bin", b"x"), ("other.safetensors", None),
])  # fmt: skip
HARMS = {
    "rename": (rename, new_name), "exchange names": (exchange_names, place), "drop": (drop, st.none()),
    "extra": (extra, new_name), "old buffer": (old_buffer, st.none()), "shape": (shape, place), "dtype": (dtype, place),
    "width": (width, place), "cut": (cut, place), "junk": (junk, place | st.binary(max_size=40)),
    "flip": (flip, st.tuples(place, st.integers(0, 255), st.booleans())), "remove": (remove, st.none()),
    "copy over": (copy_over, place), "exchange": (exchange, place), "beside": (beside, file_beside),
    "index names more": (index_names_more, st.none()), "index entry": (index_entry, other_file),
    "index less": (index_less, place), "config": (config, place), "nothing": (nothing, st.none()),
}  # fmt: skip
harm = st.one_of(*(st.tuples(st.just(name), place, what) for name, (_, what) in HARMS.items()))
harms = st.lists(harm, min_size=1, max_size=2)
CRITIC, LORA = ["algorithm=ppo"], ["model.lora={rank: 2}"]  # Engines merge adapters only into safetensors weights.
roles = st.sampled_from([[], CRITIC, LORA, ["rollout=vllm", "placement=colocated"]])


def spoiled(files, done, folder: Path) -> Path:
    """Write the model's folder, with all corruptions in `done` applied."""
    files = dict(files)
    for name, at, what in done:
        if weights_in(files):
            HARMS[name][0](files, at, what)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def in_the_files(folder: Path) -> dict[str, torch.Tensor]:
    """Read the model's tensors with code that is independent of transformers.

    If the folder has files in several formats, the function reads the format that transformers would load.
    """
    config = json.loads((folder / "config.json").read_text())
    own = config.get("transformers_weights")
    names = [own] if isinstance(own, str) else ["model.safetensors", INDEX, "pytorch_model.bin", TORCH_INDEX]
    first = next(folder / name for name in names if (folder / name).is_file())
    files = {first.name}
    if first.suffix == ".json":
        files = set(json.loads(first.read_text())["weight_map"].values())
    found = {}
    for name in sorted(files):
        found |= tensors_of((folder / name).read_bytes(), Path(name).suffix)
    return found


def assert_each_parameter_is_the_files(model, folder: Path, *, body_alone: bool) -> None:
    stored = in_the_files(folder)
    tied = ("model.embed_tokens.weight", "lm_head.weight")
    for name, parameter in model.named_parameters():
        if body_alone and not name.startswith("model."):
            continue
        names = [name, *(tied if name in tied and model.config.tie_word_embeddings else ())]
        tensor = next((stored[one] for one in names if one in stored), None)
        assert tensor is not None, f"{name} is random"
        same = torch.allclose(parameter, tensor.to(parameter.dtype), rtol=0, atol=0, equal_nan=True)
        assert same, f"{name} differs from the tensor in the file"


def zero(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the value of a parameter that is not in the weight files."""
    return torch.zeros(shape)


@functools.cache
def usual(folder: str, role: tuple[str, ...]):
    words = [
        "rollout=hf",
        "placement=inprocess",
        "profile=demo",
        f"model.path={folder}",
        "data.val=null",
        "data.train=prompts.jsonl",
    ]
    with read_once():
        return compose([*words, "reward.functions=[my_reward.py:score]", "trainer.output_dir=new_run", *role])[0]


@pytest.mark.timeout(7200)
@given(form=st.sampled_from(FORMS), done=harms, role=roles)
@cases(0.10, 40)
def test_weights_are_loaded_whole_or_refused_in_one_line(here_once, forms, form, done, role):
    folder = spoiled(forms[form], done, here_once / "weights")
    kind, critic = AutoModelForCausalLM, role == CRITIC
    said = refused(lambda: check(usual(str(folder), tuple(role))))
    if all(name in HARMLESS for name, *_ in done):
        assert not said or (form in (TORCH, TORCH_PARTS) and role == LORA), said
    assert "weights_only" not in said
    assert "\n" not in said
    if not said:
        assert_each_parameter_is_the_files(load_model(kind, str(folder)), folder, body_alone=False)
        if critic:
            made = load_model(AutoModelForTokenClassification, str(folder), new_head=True, first_value=zero)
            assert_each_parameter_is_the_files(made, folder, body_alone=True)
    assert not Path("was_run").exists()


@pytest.mark.timeout(7200)
@given(form=st.sampled_from(FORMS), done=harms)
@cases(0.04, 12)
def test_a_loader_that_nothing_was_checked_for_takes_no_random_parameter_either(here_once, forms, form, done):
    folder = spoiled(forms[form], done, here_once / "weights")
    with mock.patch("workers.models.loading.check_weights"):
        try:
            model = load_model(AutoModelForCausalLM, str(folder))
        except Exception:  # A model that transformers cannot load is not trained.
            return
    assert_each_parameter_is_the_files(model, folder, body_alone=False)


@pytest.mark.timeout(7200)
@given(form=st.sampled_from(FORMS), done=harms, role=roles)
@cases(0.02, 6)
def test_a_run_on_spoiled_weights_is_refused_in_one_line_or_starts(here_once, forms, form, done, role):
    spoiled(forms[form], done, here_once / "weights")
    with nothing_written_over(here_once) as outcomes:
        outcomes.append(
            command([
                "rollout=hf", "placement=inprocess", "profile=demo", "model.path=weights",
                "data.train=prompts.jsonl", "data.val=null",
                "reward.functions=[my_reward.py:score]", "trainer.output_dir=new_run", *role,
            ])
        )  # fmt: skip
    check_refusal(outcomes[0])
