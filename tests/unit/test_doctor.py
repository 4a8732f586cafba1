import io

import pytest
from rich.console import Console

from rltrain.doctor import main
from rltrain.monitoring.doctor.diagnosis import diagnose
from rltrain.monitoring.doctor.output import show
from rltrain.monitoring.report.run_files import read_run
from tests.doctor_runs import run_with

CUT = {"rollout/truncated_fraction": 1.0}


def test_a_healthy_run_has_one_line_and_status_0(tmp_path, capsys):
    folder = run_with(tmp_path / "run")
    assert main([str(folder)]) == 0
    assert (
        capsys.readouterr().out
        == f"{folder}: no cause found: no rule of the doctor found a problem in the run's 20 steps\n"
    )


def test_a_run_that_has_just_started_is_not_judged(tmp_path, capsys):
    assert main([str(run_with(tmp_path, steps=0))]) == 0
    assert "no training step has ended, so there is nothing to judge" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_gives_status_1(tmp_path, capsys):
    folder = run_with(tmp_path / "run")
    (folder / "config.yaml").write_text("a: [")
    assert main([str(folder)]) == 1
    assert "config.yaml" in capsys.readouterr().out


def test_findings_are_plain_lines_in_a_pipe_and_status_1_whichever_run_has_them(tmp_path, capsys):
    healthy, cut = run_with(tmp_path / "healthy"), run_with(tmp_path / "cut", CUT)
    assert main([str(cut), str(healthy)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        f"{cut}: 1 finding in 20 steps", "1. answers cut, from step 1",
        "   evidence: 100% of the answers were truncated from step 1 to step 20",
        "   evidence: rollout.max_response_length=16",
    ]  # fmt: skip
    assert {line.partition(":")[0].strip() for line in lines[4:-1]} == {"likely cause", "change"}
    assert lines[-1] == f"{healthy}: no cause found: no rule of the doctor found a problem in the run's 20 steps"


def test_on_a_terminal_each_finding_has_a_frame_as_wide_as_the_terminal(tmp_path):
    run = read_run(run_with(tmp_path, CUT), texts=False)
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    show(run, diagnose(run), console)
    lines = console.file.getvalue().splitlines()
    assert any(line.startswith("╭─ 1. answers cut, from step 1 ─") for line in lines)
    framed = [line for line in lines if line[:1] in "╭│╰"]
    assert {len(line) for line in framed} == {60}
    assert sum("likely cause" in line for line in framed) == 1


def test_text_of_a_file_is_shown_as_it_is_without_control_characters(tmp_path, capsys):
    folder = run_with(tmp_path, CUT | {"reward/\x1b[31m[red]/mean": 1.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\x1b[2J no json\n")
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "note: metrics.jsonl: line 21 is not a JSON object with a step" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: "),
        ([""], "usage: "),
        (["--json", "run"], "unknown flag '--json': the only flag is --help"),
        (["nowhere"], "nowhere: no such folder; give the output folder of a run"),
        (["."], ".: holds neither metrics.jsonl nor config.yaml, so it is not the output folder of a run"),
    ],
)
def test_bad_input_is_one_line_with_the_way_out_and_status_2(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_help_names_the_exit_statuses(capsys):
    assert main(["--help"]) == 0
    assert "0: no findings, 1: findings" in capsys.readouterr().out
