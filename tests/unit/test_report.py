import pytest

from rltrain.report import main
from tests.made_runs import data_of, made_run


def test_the_page_of_a_run_is_in_its_folder_or_where_output_says(tmp_path, capsys):
    folder = made_run(tmp_path / "run")
    (folder / "report.html").unlink()
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert main([str(folder), str(folder), f"--output={tmp_path / 'both.html'}"]) == 0
    assert len(data_of((tmp_path / "both.html").read_text("utf-8"))["runs"]) == 2


def test_a_run_that_did_not_record_its_command_is_compared_with_the_defaults(tmp_path):
    folder = made_run(tmp_path / "run")
    (folder / "command.json").unlink()
    assert main([str(folder)]) == 0
    (run,) = data_of((folder / "report.html").read_text("utf-8"))["runs"]
    assert run["command"] is None
    assert ["actor.lr", "0.0004", "0.5"] in run["differences"]


def test_a_damaged_file_is_a_note_on_stderr(tmp_path, capsys):
    folder = made_run(tmp_path / "run")
    (folder / "rollouts/step_000001.parquet").write_bytes(b"PAR1")
    assert main([str(folder)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {folder}: rollouts/step_000001.parquet: cannot be read")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: "),
        (["--output", "x"], "usage: "),
        (["run", "--output"], "usage: "),
        (["--outptu", "x"], "unknown flag '--outptu'"),
        (["nowhere"], "nowhere: no such folder; give the output folder of a run"),
        (["."], ".: holds neither metrics.jsonl nor config.yaml, so it is not the output folder of a run"),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, capsys):
    folder = made_run(tmp_path / "run")
    assert main([str(folder), "--output", str(tmp_path)]) == 2
    assert main([str(folder), "--output", str(tmp_path / "no/page.html")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "is a folder; give the path of the page" in first
    assert f"/no/page.html: there is no folder {tmp_path}/no; name another file" in second
