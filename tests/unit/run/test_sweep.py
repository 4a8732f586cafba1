"""Tests of sweeps without training.

Instead of starting a job, a fake function records the job's command and writes the job's metrics.
tests/e2e/test_sweep.py runs sweeps with real jobs.
"""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rltrain.base.errors import ConfigError
from rltrain.run import sweep as module
from rltrain.run.sweep import Job, sweep
from rltrain.settings.command_line import parse_args
from rltrain.settings.compose import compose
from rltrain.settings.overrides import TEXT_KEYS, from_command_line


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Return the list of commands that a sweep has started.

    The job with seed 3 fails, and all other jobs have an accuracy of seed / 10. The settings may name files that do not
    exist.
    """
    started: list[list[str]] = []

    def run(command):
        started.append(command)
        settings = dict(word.split("=", 1) for word in command if "=" in word)
        folder = Path(from_command_line(command[-1]).value)
        seed = int(settings.get("trainer.seed", 0))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(f"trainer: {{keep_best: {settings.get('trainer.keep_best', 'null')}}}")
        (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n')
        (folder / "evaluations.jsonl").write_text(json.dumps({"step": 1, "eval/sampled_accuracy": seed / 10}) + "\n")
        return 2 if seed == 3 else 0

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.setattr(module, "check_without_models", lambda config: None)
    monkeypatch.chdir(tmp_path)
    return started


def console():
    return Console(width=200, record=True)


def settings_of(command):
    assert command[:3] == [sys.executable, "-m", "rltrain.main"]
    return command[3:]


def test_each_combination_is_one_run_in_a_folder_of_its_own(jobs, tmp_path):
    words = ["algorithm=ppo,grpo", "trainer.seed=1,2", "algorithm.loss.clip_ratio_high=0.3", "trainer.output_dir=out"]
    assert sweep(words, [], console()) == 0
    same = "algorithm.loss.clip_ratio_high=0.3"
    assert [settings_of(command) for command in jobs] == [
        [f"algorithm={algorithm}", f"trainer.seed={seed}", same, f"trainer.output_dir={tmp_path}/out/{number}"]
        for number, (algorithm, seed) in enumerate([("ppo", 1), ("ppo", 2), ("grpo", 1), ("grpo", 2)])
    ]


def test_values_with_brackets_and_quotes_mean_the_same_to_each_run(jobs):
    sweep(["reward.functions=[a.py:f,b.py:g]", "model.path='a b','c,d'", "trainer.seed=range(1,3)"], [], console())
    read = [[from_command_line(word).value for word in settings_of(command)[:3]] for command in jobs]
    assert read == [[["a.py:f", "b.py:g"], path, seed] for path in ("a b", "c,d") for seed in (1, 2)]


def config_of(command):
    """Return the config that a job of a sweep composes from its command."""
    args = parse_args(settings_of(command))
    return compose(args.overrides, args.files)[0]


@pytest.mark.parametrize(
    "text",
    [
        "Be brief.", "{question} Think.", "a,b", "a, {b}", "choice(a,b)", "'quoted'", 'say "yes"', "it's", "# x",
        "x: y # z", "a=b", "[/INST]", "{{", "${trainer.seed} ${", " two  spaces ", r"\boxed{{}} \\", r"a\nb", r"a\\neq",
        "null", "1e3", "é 🙂", "\n", "\t", "range(1,3)",
    ],
)  # fmt: skip
def test_each_run_of_a_sweep_has_the_free_text_that_a_single_run_has(jobs, text):
    words = [f"{key}={text}" for key in sorted(TEXT_KEYS)]
    sweep([*words, "trainer.seed=1,2", "actor.lr=1e-5"], [], console())
    alone = compose(words)[0].data
    assert [config_of(command).trainer.seed for command in jobs] == [1, 2]
    assert [config_of(command).data for command in jobs] == [alone, alone]


def test_free_text_of_the_command_line_overrides_a_config_file_in_each_run_and_the_last_text_counts(jobs, tmp_path):
    (tmp_path / "my.yaml").write_text("data: {prompt: '{q}', system_prompt: old}")
    words = ["trainer.seed=1,2", "data.system_prompt=Be brief.", "+data.system_prompt=Be {very} brief."]
    sweep(words, ["my.yaml"], console())
    assert [config_of(command).data.prompt for command in jobs] == ["{q}"] * 2
    assert [config_of(command).data.system_prompt for command in jobs] == ["Be {very} brief."] * 2


def test_the_free_text_of_a_run_is_in_its_record_and_in_the_table(jobs, tmp_path):
    shown, words = console(), ["trainer.seed=1", "data.system_prompt=[bold] {x} [/INST]", "trainer.output_dir=out"]
    assert sweep(words, [], shown) == 0
    assert json.loads((tmp_path / "out/0/sweep_job.json").read_text())["overrides"] == words[:2]
    assert " ".join(words[:2]) in shown.export_text()


@pytest.mark.parametrize("word", ["trainer.output_dir='my, (runs)'", "hydra.sweep.dir='my, (runs)'"])
def test_the_folder_of_a_sweep_may_contain_any_character(jobs, tmp_path, monkeypatch, word):
    (tmp_path / "it's {here}").mkdir()
    monkeypatch.chdir(tmp_path / "it's {here}")
    assert sweep(["trainer.seed=1,2", word], [], console()) == 0
    folders = [f"{tmp_path}/it's {{here}}/my, (runs)/{number}" for number in (0, 1)]
    assert [config_of(command).trainer.output_dir for command in jobs] == folders


def test_config_files_apply_to_every_run_from_any_folder(jobs, tmp_path):
    (tmp_path / "my.yaml").write_text("actor: {lr: 1e-5}")
    sweep(["trainer.seed=1,2"], ["my.yaml"], console())
    assert [settings_of(command)[:2] for command in jobs] == [["--config", str(tmp_path / "my.yaml")]] * 2


def test_the_table_shows_what_differs_and_the_status_says_whether_all_runs_ended_well(jobs):
    shown = console()
    assert sweep(["trainer.seed=2,3", "rollout=hf", "trainer.output_dir=out"], [], shown) == 1
    lines = [line.split() for line in shown.export_text().splitlines()]
    assert lines[1][:3] == ["trainer.seed=2", "0", "0.2"]
    assert lines[2][:2] == ["trainer.seed=3", "2"]


def test_the_result_of_a_run_is_the_metric_that_keep_best_names(jobs, tmp_path):
    sweep(["trainer.seed=1", "trainer.keep_best=reward/mean", "trainer.output_dir=out"], [], console())
    assert json.loads((tmp_path / "out/0/sweep_job.json").read_text())["objective"] == 0.25


def test_a_run_that_fails_has_no_result_and_does_not_end_the_sweep(jobs, tmp_path):
    sweep(["trainer.seed=3,4", "trainer.output_dir=out"], [], console())
    results = [json.loads((tmp_path / f"out/{n}/sweep_job.json").read_text())["objective"] for n in (0, 1)]
    assert results == [None, 0.4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.seed=1,2", "hydra/launcher=nonesuch"], "--multirun: .*nonesuch"),
        (["trainer.seed=["], "--multirun: "),
        (["~algorithm.loss.clip_ratio_c"], "a sweep takes settings of the form KEY=VALUE"),
        (["trainer.lr=interval(0,1)"], "--multirun: .*does not support sweep type"),
    ],
)
def test_what_hydra_cannot_sweep_is_refused_in_one_line(jobs, words, message):
    with pytest.raises(ConfigError, match=message) as error:
        sweep(words, [], console())
    assert "\n" not in str(error.value)
    assert "__" not in str(error.value)
    assert jobs == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.seed=1,-1"], r"job 1 of the sweep \(trainer.seed=-1\): trainer.seed must be >= 0, got -1"),
        (["algorithm=grpo,grop", "trainer.seed=1"], r"job 1 of the sweep \(algorithm=grop\): algorithm=grop: unknown"),
        (["algorithm=grpo,ppo", "trainer.lr=1"], r"job 0 of the sweep \(algorithm=grpo\): unknown config key"),
        (["trainer.lr=1"], r"job 0 of the sweep: unknown config key 'trainer.lr'"),
        (
            ["model.path=mine", "reward=median", "data.train=train.jsonl,missing.jsonl"],
            r"job 1 of the sweep .*data.train=missing.jsonl: no such file",
        ),
        (["trainer.seed=1,2", "algorithm.loss.clip=0.2"], r"job 0 of the sweep .*clip"),
        (["data.overlong_prompts=refuse,filter", "data.prompt={question"], r"job 0 of the sweep .*data.prompt"),
    ],
)
def test_before_the_first_job_starts_the_config_of_each_job_is_checked(tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(module, "_run", lambda command: pytest.fail(f"started {command}"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=f"{message}.*; no job was started") as error:
        sweep([*words, "rollout=hf", "trainer.output_dir=out"], [], console())
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


def test_a_sweep_whose_configs_are_all_valid_starts_its_jobs(jobs, tmp_path, monkeypatch):
    monkeypatch.undo()
    started = []
    monkeypatch.setattr(module, "_run", lambda command: started.append(command) or 1)
    monkeypatch.chdir(tmp_path)
    assert sweep(["algorithm=grpo,ppo", "rollout=hf", "trainer.output_dir=out"], [], console()) == 1
    assert len(started) == 2


def test_hydras_own_settings_go_to_hydra(jobs, tmp_path):
    sweep(["trainer.seed=1", "hydra.sweep.dir=elsewhere", "hydra.sweep.subdir=job"], [], console())
    assert settings_of(jobs[0])[-1] == f"trainer.output_dir={tmp_path}/elsewhere/job"


def test_a_launcher_that_pickles_its_jobs_can_start_them(tmp_path):
    import pickle

    job = pickle.loads(pickle.dumps(Job(["/a.yaml"], ["data.prompt={q}"])))
    assert (job.files, job.texts) == (["/a.yaml"], ["data.prompt={q}"])
