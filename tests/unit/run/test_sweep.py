"""Tests of sweeps without training.

Instead of starting a job, a fake function records the job's command and writes the job's metrics.
"""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rltrain.base.errors import ConfigError
from rltrain.run import sweep as module
from rltrain.run.sweep import Job, sweep
from rltrain.settings.overrides import from_command_line


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Return the list of commands that a sweep has started.

    The job with seed 3 fails, and all other jobs have an accuracy of seed / 10.
    """
    started: list[list[str]] = []

    def run(command):
        started.append(command)
        settings = dict(word.split("=", 1) for word in command if "=" in word)
        folder, seed = Path(settings["trainer.output_dir"]), int(settings.get("trainer.seed", 0))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(f"trainer: {{keep_best: {settings.get('trainer.keep_best', 'null')}}}")
        (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n')
        (folder / "evaluations.jsonl").write_text(json.dumps({"step": 1, "eval/sampled_accuracy": seed / 10}) + "\n")
        return 2 if seed == 3 else 0

    monkeypatch.setattr(module, "_run", run)
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


def test_config_files_apply_to_every_run_from_any_folder(jobs, tmp_path):
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


def test_hydras_own_settings_go_to_hydra(jobs, tmp_path):
    sweep(["trainer.seed=1", "hydra.sweep.dir=elsewhere", "hydra.sweep.subdir=job"], [], console())
    assert settings_of(jobs[0])[-1] == f"trainer.output_dir={tmp_path}/elsewhere/job"


def test_a_launcher_that_pickles_its_jobs_can_start_them(tmp_path):
    import pickle

    assert pickle.loads(pickle.dumps(Job(["/a.yaml"]))).files == ["/a.yaml"]
