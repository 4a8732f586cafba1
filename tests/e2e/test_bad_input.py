"""Given bad input, the program prints one line on stderr and ends with exit status 2 before any worker starts.

Most tests call `main` in the test process. A few tests run the real command.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.main import main

ROOT = Path(__file__).parents[2]
BAD = 2  # Exit status for bad input.

# Each entry maps the name of a test case to (overrides, texts that the error line must contain). {files} stands for the
# folder of the fixture `files`.
CASES = {
    "unknown key": (
        ["trainer.totl_steps=3"],
        ["'trainer.totl_steps'", "unknown config key", "nearest known key is 'trainer.total_steps'"],
    ),
    "unknown key with a plus": (["+new.key=1"], ["'new.key'", "unknown config key", "--cfg prints all keys"]),
    "unknown choice": (
        ["algorithm=grop"],
        ["algorithm=grop", "unknown choice", "the nearest is 'grpo'", "all choices are aspo, ce_gppo, cispo, clip_cov"],
    ),
    "unknown flag": (["--rseume"], ["'--rseume'", "unknown flag", "--help, --cfg, --plan"]),
    "flag of another trainer": (["--learning_rate", "1e-6"], ["'--learning_rate'", "as in actor.lr=1e-6"]),
    "own data without a reward": (
        ["profile=demo", "model.path={files}/model", "data.train={files}/good.jsonl"],
        ["data.train={files}/good.jsonl without a reward", "set reward.functions=[exact_match]"],
    ),
    "sweep of a key with no values": (["-m", "trainer.seed=["], ["--multirun: ", "write several values as KEY=A,B"]),
    "own file that is not there": (["--config", "{files}/no.yaml"], ["--config {files}/no.yaml", "no such file"]),
    "syntax": (["trainer.seed=["], ["'trainer.seed=['", "cannot read the value", "quote"]),
    "changing the folder": (
        ["hydra.job.chdir=true"],
        ["'hydra.job.chdir=true'", "apply only to a sweep", "leave the argument out"],
    ),
    "wrong type": (["trainer.total_steps=many"], ["trainer.total_steps='many'", "must be a whole number"]),
    "batch sizes": (
        ["trainer.prompts_per_step=60"],
        ["trainer.prompts_per_step=60", "is not a multiple", "try trainer.prompts_per_minibatch=15"],
    ),
    "unknown loss mode": (
        ["algorithm.loss_mode=vanila"],
        ["algorithm.loss_mode=vanila", "unknown policy loss", "gspo", "vanilla"],
    ),
    "unknown estimator": (
        ["algorithm.advantage_estimator=gea"],
        ["algorithm.advantage_estimator=gea", "unknown advantage estimator", "gae", "grpo", "rloo"],
    ),
    "unknown KL estimator": (
        ["algorithm.kl_loss.kl_estimator=k9"],
        ["kl_estimator=k9", "unknown KL estimator", "k1, "],
    ),
    "unknown engine": (["rollout=tgi"], ["rollout=tgi", "unknown choice", "hf, sglang, stored, vllm"]),
    "unknown engine by key": (["rollout.engine=tgi"], ["rollout.engine=tgi", "unknown engine", "rollout=hf"]),
    "knob of another loss": (
        ["algorithm.loss.tau_pos=1.0"],
        ["algorithm.loss.tau_pos=1.0", "'vanilla' has no such knob", "it takes clip_ratio_low"],
    ),
    "knob that the loss refuses": (
        ["algorithm.loss.clip_ratio_c=0.5"],
        ["algorithm.loss.clip_ratio_c=0.5", "must be > 1", "use 3.0"],
    ),
    "horizon that a step outruns": (
        [f"algorithm.kl_in_reward.{pair}" for pair in ("kl_coef=0.1", "controller=adaptive", "horizon=9")],
        ["algorithm.kl_in_reward.horizon=9", "the 512 sequences of a training step", "use a horizon above 102"],
    ),
    "number that is not finite": (["actor.lr=inf"], ["actor.lr=inf", "must be a finite number"]),
    "missing model": (
        ["profile=demo", "model.path={files}/no"],
        ["model.path={files}/no", "no such directory", "give the folder"],
    ),
    "model without weights": (
        ["profile=demo", "model.path={files}/empty"],
        ["{files}/empty", "holds no weights", "save the model's"],
    ),
    "model that lacks a tensor": (
        ["profile=demo", "reward=median", "model.path={files}/lacking", "data.train={files}/good.jsonl"],
        [
            "model.path={files}/lacking: its weights lack model.layers.1.mlp.down_proj.weight",
            "the extra tensors mlp.down, so they",
            "copy or download",
        ],
    ),
    "critic of a model that lacks a tensor": (
        [
            "profile=demo",
            "reward=median",
            "model.path={files}/lacking",
            "data.train={files}/good.jsonl",
            "algorithm=ppo",
            "rollout=hf",
        ],
        ["model.path={files}/lacking: its weights lack model.layers.1.mlp.down_proj.weight", "copy or download"],
    ),
    "weights that were cut short": (
        ["profile=demo", "reward=median", "model.path={files}/cut", "data.train={files}/good.jsonl"],
        [
            "model.path={files}/cut: model.safetensors is not a complete safetensors file (",
            "copy or download the model's files again",
        ],
    ),
    "weights whose header is garbage": (
        ["profile=demo", "reward=median", "model.path={files}/garbage", "data.train={files}/good.jsonl", "rollout=hf"],
        [
            "model.path={files}/garbage: model.safetensors is not a complete safetensors file (",
            "copy or download the model's files again",
        ],
    ),
    "weights that are garbage to torch": (
        ["profile=demo", "reward=median", "model.path={files}/pickle", "data.train={files}/good.jsonl"],
        [
            "model.path={files}/pickle: pytorch_model.bin is not a complete torch file of plain tensors",
            "writes safetensors",
        ],
    ),
    "tokenizer of another model": (
        ["profile=demo", "reward=median", "model.path={files}/small", "data.train={files}/good.jsonl"],
        [
            "model.path={files}/small: its tokenizer has ids up to 127, but the model has embeddings for only 100",
            "belongs to",
        ],
    ),
    "token that the model has no embedding for": (
        ["profile=demo", "reward=median", "model.path={files}/added", "data.train={files}/added.jsonl"],
        [
            "data.train={files}/added.jsonl: has token id 128, but the model has embeddings for only 128",
            "resize_token_embeddings",
        ],
    ),
    "missing data": (["data.train={files}/no.jsonl"], ["{files}/no.jsonl", "no such file", "did you mean"]),
    "data without a model": (["data.train={files}/good.jsonl"], ["good.jsonl", "only the built-in", "model.path=DIR"]),
    "malformed JSONL": (
        ["profile=demo", "reward=median", "model.path={files}/model", "data.train={files}/malformed.jsonl"],
        ["{files}/malformed.jsonl:2", "not valid JSON", "put one JSON object on each line"],
    ),
    "row without a prompt": (
        ["profile=demo", "reward=median", "model.path={files}/model", "data.train={files}/promptless.jsonl"],
        ["{files}/promptless.jsonl:2", "no prompt", "give each row"],
    ),
    "prompt too long": (
        ["profile=demo", "reward=median", "model.path={files}/model", "data.train={files}/long.jsonl"],
        ["{files}/long.jsonl:1", "17 tokens", "rollout.max_prompt_length=16", "raise rollout.max_prompt_length"],
    ),
    "lengths beyond the model": (
        ["profile=demo", "model.path={files}/model", "rollout.max_response_length=2000"],
        ["rollout.max_response_length=2000", "1024 positions", "to at most 1024"],
    ),
    "column that is no Unicode": (
        ["profile=demo", "reward=median", "model.path={files}/model", "data.train={files}/surrogate.jsonl"],
        ["{files}/surrogate.jsonl:2", "not valid Unicode", "remove the invalid character"],
    ),
    "model with chunked attention": (
        ["profile=demo", "model.path={files}/chunked"],
        ["model.path={files}/chunked", "attention_chunk_size=8 is shorter than", "use another model"],
    ),
    "model without an end token": (
        ["profile=demo", "reward=median", "model.path={files}/endless", "data.train={files}/good.jsonl"],
        ["model.path={files}/endless", "no end token", "set eos_token_id"],
    ),
    "reward function that is not there": (
        ["reward.functions=[{files}/no.py:score]"],
        ["{files}/no.py:score", "there is no file", "check the path"],
    ),
    "reward function that does not import": (
        ["reward.functions=[{files}/broken.py:score]"],
        ["{files}/broken.py", "does not import (ModuleNotFoundError", "fix that error first"],
    ),
    "reward function that wants a column": (
        ["profile=demo", "reward=median", "model.path={files}/model", "data.train={files}/good.jsonl"],
        [
            "'final_answer' needs a column 'answer' that data.train={files}/good.jsonl does not have",
            "the columns are prompt",
            "add the column",
        ],
    ),
    "two reward functions of one name": (
        ["reward.functions=[{files}/simplest.py:score,{files}/simplest.py:score]"],
        ["reward.functions", "'score'", "name"],
    ),
    "reward weight that is no number": (
        ["reward.functions=[{{path:{files}/simplest.py:score,weight:heavy}}]"],
        ["reward.functions[0].weight='heavy'", "must be a finite number"],
    ),
    "gate that is no bool": (
        ["reward.functions=[{{path:{files}/simplest.py:score,gate:2}}]"],
        ["reward.functions[0].gate=2", "must be true or false"],
    ),
    "key of a reward function that is not there": (
        ["reward.functions=[{{path:{files}/simplest.py:score,wieght:2}}]"],
        ["'reward.functions[0].wieght'", "the nearest known key is 'reward.functions[0].weight'"],
    ),
    "option that the reward function does not take": (
        ["reward.functions=[{{path:{files}/simplest.py:score,kwargs:{{levle:2}}}}]"],
        ["reward function 'score': kwargs.levle", "it takes response, level"],
    ),
    "aggregation that is not there": (
        ["reward.aggregation={files}/simplest.py:sum"],
        ["{files}/simplest.py has no function 'sum'", "the nearest is"],
    ),
    "aggregation that cannot be called": (
        ["reward.aggregation={files}/simplest.py:score"],
        ["reward.aggregation={files}/simplest.py:score", "components, uid, valid, weights by name", "**others"],
    ),
    "another run's folder": (
        ["trainer.output_dir={files}/finished"],
        ["trainer.output_dir={files}/finished", "holds another run", "name a new folder"],
    ),
    "more ranks than devices": (
        ["placement.actor_ranks=100000"],
        ["placement.actor_ranks=100000", "more than the", "use fewer ranks"],
    ),
}
REAL_COMMANDS = ["unknown key", "unknown loss mode", "malformed JSONL", "more ranks than devices"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    _write_data(folder)
    _write_models(folder)
    (folder / "simplest.py").write_text("def score(response, level=1):\n    return 1.0\n")
    (folder / "broken.py").write_text("import no_such_module\n")
    (folder / "finished").mkdir()
    (folder / "finished" / "metrics.jsonl").touch()
    return folder


def _write_data(folder):
    good = '{"prompt": "12="}\n'
    (folder / "good.jsonl").write_text(good)
    (folder / "malformed.jsonl").write_text(good + '{"prompt": "12="\n')
    (folder / "promptless.jsonl").write_text(good + '{"question": "12="}\n')
    (folder / "surrogate.jsonl").write_text(good + '{"prompt": "12=", "answer": "\\ud800"}\n')
    (folder / "added.jsonl").write_text(json.dumps({"prompt": "12<new>"}) + "\n")
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "1" * 17}) + "\n")


def _write_models(folder):
    from transformers import GenerationConfig

    from rltrain.tasks.tiny_model import tiny_model
    from rltrain.tasks.tokenizer import char_tokenizer

    model, tokenizer = tiny_model(), char_tokenizer()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "chunked")
    changed = json.loads((folder / "model" / "config.json").read_text()) | {"attention_chunk_size": 8}
    (folder / "chunked" / "config.json").write_text(json.dumps(changed))
    model.config.eos_token_id, model.generation_config = None, GenerationConfig()
    tokenizer.eos_token = None
    model.save_pretrained(folder / "endless")
    tokenizer.save_pretrained(folder / "endless")
    for name in ("lacking", "cut", "garbage", "pickle", "small", "added"):
        shutil.copytree(folder / "model", folder / name)
    _spoil_weights(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder / "added")
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text("{}")


def _spoil_weights(folder):
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    name = "model.safetensors"
    content, tensors = (folder / "model" / name).read_bytes(), load_file(folder / "model" / name)
    tensors["mlp.down"] = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, folder / "lacking" / name)
    (folder / "cut" / name).write_bytes(content[:-1])
    (folder / "garbage" / name).write_bytes(b"\xff" * 8 + content[8:])
    (folder / "pickle" / name).unlink()
    (folder / "pickle" / "pytorch_model.bin").write_bytes(b"garbage")
    small = AutoConfig.from_pretrained(folder / "model", vocab_size=100)
    AutoModelForCausalLM.from_config(small).save_pretrained(folder / "small")


@pytest.fixture
def ray_folder(tmp_path, monkeypatch):
    """Make an empty folder in which Ray would create its files if a test started Ray."""
    folder = tmp_path / "ray"
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return folder


def assert_no_ray(ray_folder):
    assert list(ray_folder.iterdir()) == []
    assert _processes_with(f"RAY_TMPDIR={ray_folder}") == []


def _processes_with(variable):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # The process has ended, or belongs to another user.
            continue
        if variable.encode() in environment:
            found.append(process.name)
    return found


def assert_one_line(err, fragments, files):
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for fragment in fragments:
        assert fragment.format(files=files) in err


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("settings_restored")
def test_bad_input_is_one_line_before_anything_starts(case, files, ray_folder, tmp_path, monkeypatch, capsys):
    overrides, fragments = CASES[case]
    monkeypatch.chdir(tmp_path)
    status = main([text.format(files=files) for text in overrides])
    out, err = capsys.readouterr()
    assert (status, out) == (BAD, "")
    assert_one_line(err, fragments, files)
    assert_no_ray(ray_folder)
    assert list(tmp_path.iterdir()) == [ray_folder]  # The run wrote no file.


@pytest.mark.parametrize(
    "case", ["unknown loss mode", "unknown estimator", "knob of another loss", "knob that the loss refuses"]
)
@pytest.mark.usefixtures("settings_restored")
def test_showing_a_config_refuses_what_a_run_would_refuse(case, files, capsys):
    overrides, fragments = CASES[case]
    status = main([*overrides, "--cfg"])
    out, err = capsys.readouterr()
    assert (status, out) == (BAD, "")
    assert_one_line(err, fragments, files)


@pytest.mark.parametrize("case", REAL_COMMANDS)
def test_the_real_command_says_the_same(case, files, ray_folder, tmp_path):
    overrides, fragments = CASES[case]
    command = [sys.executable, "-m", "rltrain.main", *(text.format(files=files) for text in overrides)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert (done.returncode, done.stdout) == (BAD, "")
    assert_one_line(done.stderr, fragments, files)
    assert_no_ray(ray_folder)
    assert list(tmp_path.iterdir()) == [ray_folder]
