import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from rltrain.base.errors import ConfigError
from rltrain.batch.data_proto import DataProto
from rltrain.monitoring.report.page import names_of, write_report
from rltrain.tasks.tokenizer import EOS_ID
from tests.image_models import picture
from tests.made_runs import EVALUATION, batch, chunk_of, data_of, made_run, metrics, with_pictures


def report(*folders: Path, **options) -> tuple[str, list[str]]:
    output = folders[0] / "page.html"
    notes = write_report(folders, output, **options)
    return output.read_text("utf-8"), notes


def test_the_page_has_every_metric_of_every_step_and_of_every_evaluation(tmp_path):
    page, notes = report(made_run(tmp_path / "run", [batch(), batch()]))
    (run,) = data_of(page)["runs"]
    assert notes == []
    assert run["steps"] == {"step": [1, 2]} | {name: [metrics(1 / 8)[name], metrics(2 / 8)[name]] for name in metrics()}
    assert run["evaluations"] == {"step": [0]} | {name: [value] for name, value in EVALUATION.items()}


def test_metrics_that_belong_together_share_a_chart_and_each_metric_has_one(tmp_path):
    page, _ = report(made_run(tmp_path / "run"))
    data = data_of(page)
    charts = {chart["title"]: chart["metrics"] for chart in data["charts"]}
    assert charts["accuracy"] == ["eval/greedy_accuracy", "eval/sampled_accuracy"]
    assert charts["reward/right/mean"] == ["reward/right/mean"]
    drawn = [name for names in charts.values() for name in names]
    assert sorted(drawn) == sorted(name for name in {**metrics(), **EVALUATION} if not name.startswith("timing/"))
    assert data["descriptions"]["reward/mean"]["unit"] == "score"
    assert data["descriptions"]["reward/right/mean"]["name"] == "reward/right/mean"


def test_the_tokens_of_an_answer_have_the_values_of_the_batch(tmp_path):
    made = batch(["12", "9"], observed=[(0, 1)])
    page, _ = report(made_run(tmp_path / "run", [made]))
    header, columns = chunk_of(page)
    vocabulary = data_of(page)["runs"][0]["samples"]["vocabulary"]
    assert [vocabulary["ids"][token] for token in columns["tokens"]] == [ord("1"), ord("2"), EOS_ID, ord("9"), EOS_ID]
    assert [vocabulary["texts"][token] for token in columns["tokens"]] == ["1", "2", "<eos>", "9", "<eos>"]
    assert [vocabulary["ids"][number] for number in vocabulary["special"]] == [EOS_ID]
    assert header["lengths"] == [3, 2]
    assert columns["state"].tolist() == [2, 0, 2, 2, 2]
    assert (columns["version"] - 1).tolist() == [70_003, -1, 70_003, 70_003, 70_003]
    assert columns["log_prob"] == pytest.approx(made.values("rollout_log_probs").numpy(), rel=1e-3)
    assert columns["log_ratio"] == pytest.approx(np.full(5, 0.25), rel=1e-3)
    assert columns["kl"] == pytest.approx(np.full(5, 0.75), rel=1e-3)
    assert columns["advantage"] == pytest.approx(made.values("advantages").numpy(), rel=1e-3, abs=1e-6)


def test_answers_of_the_first_mini_batch_have_no_ratio_and_the_kl_of_the_engine(tmp_path):
    made = batch(["12", "9"])
    made = made.union(DataProto.from_dict({"has_old_log_probs": torch.tensor([False, True])}))
    folder = made_run(tmp_path / "run", [made])
    _, columns = chunk_of(report(folder)[0])
    assert np.isnan(columns["log_ratio"][:3]).all()
    assert columns["log_ratio"][3:] == pytest.approx(np.full(2, 0.25), rel=1e-3)
    assert columns["kl"] == pytest.approx([0.5] * 3 + [0.75] * 2, rel=1e-3)
    (file,) = (folder / "rollouts").iterdir()
    first, second = pq.read_table(file).column("old_log_probs").to_pylist()
    assert first == [None] * 3
    assert None not in second


def test_an_answer_that_its_tokens_spell_is_not_stored_twice(tmp_path):
    made = batch(["12", "9"])
    made.non_tensor_batch["response_text"][1] = "nine"
    header, _ = chunk_of(report(made_run(tmp_path / "run", [made]))[0])
    assert header["responses"] == [None, "nine"]


def test_a_group_has_its_prompt_once(tmp_path):
    header, columns = chunk_of(report(made_run(tmp_path / "run", [batch(["1", "2", "3"], uids=[7, 7, 8])]))[0])
    assert header["prompts"] == [{"text": "7=", "length": 2}, {"text": "8=", "length": 2}]
    assert header["prompt"] == [0, 0, 1]
    assert len(columns["prompt_tokens"]) == 4


def test_a_prompt_has_its_images_as_small_pictures(tmp_path):
    """Small PNG and JPEG files are stored as they are. Others become JPEG files of at most 192 pixels."""
    small, large, tiff = picture(1), picture(2, width=600, height=300), picture(3, kind="TIFF")
    made = with_pictures(batch(["1", "2", "3"], uids=[7, 7, 8]), [[small], [small], [large, tiff]])
    run = made_run(tmp_path / "run", [made])
    header, _ = chunk_of(report(run)[0])
    assert [len(prompt["images"]) for prompt in header["prompts"]] == [1, 2]
    uris = [uri for prompt in header["prompts"] for uri in prompt["images"]]
    kinds = [uri.partition(";")[0] for uri in uris]
    assert kinds == ["data:image/png", "data:image/jpeg", "data:image/jpeg"]
    files = [base64.b64decode(uri.partition(",")[2]) for uri in uris]
    assert files[0] == small
    assert [Image.open(io.BytesIO(file)).size for file in files] == [(28, 28), (192, 96), (28, 28)]
    stored = pq.read_table(run / "rollouts" / "step_000001.parquet")["images"].to_pylist()
    assert [[image["bytes"] for image in row] for row in stored] == [[small], [small], [large, tiff]]


def test_the_index_has_scores_components_and_errors_of_each_sample(tmp_path):
    page, _ = report(made_run(tmp_path / "run", [batch(["1", "2"], scores=[0.5, 0.0], errors=["", "it broke"])]))
    (chunk,) = data_of(page)["runs"][0]["samples"]["chunks"]
    assert (chunk["step"], chunk["score"], chunk["valid"]) == (1, [0.5, 0], [1, 0])
    assert (chunk["components"], chunk["errors"]) == ({"right": [0.5, None]}, {"1": "it broke"})


def test_text_of_a_model_cannot_leave_its_place_in_the_page(tmp_path):
    evil = "</script><script>alert(1)</script><!--"
    made = batch([evil, "<img src=x onerror=alert(1)>"], prompts=[evil, evil])
    page, _ = report(made_run(tmp_path / "<b>run", [made]))
    assert "alert(1)" not in page
    assert "<b>run" not in page
    assert "&lt;b&gt;run" in page
    # The page has three scripts: the data, one chunk of samples, and the JavaScript program.
    assert page.count("</script>") == 3


def test_the_page_loads_nothing(tmp_path):
    page, _ = report(made_run(tmp_path / "run"))
    assert "default-src 'none'" in page
    assert not any(word in page for word in ("src=", "@import", "url(", "<link"))


def test_the_config_differs_from_its_presets_in_what_the_command_set(tmp_path):
    (run,) = data_of(report(made_run(tmp_path / "run"))[0])["runs"]
    assert run["presets"] == "algorithm=dapo"
    assert run["command"] == "algorithm=dapo actor.lr=0.5"
    assert run["differences"] == [["actor.lr", "0.1", "0.5"]]


def test_several_runs_have_names_and_the_keys_in_which_they_differ(tmp_path):
    one, two = made_run(tmp_path / "a" / "run"), made_run(tmp_path / "b" / "run")
    (two / "config.yaml").write_text("actor:\n  lr: 0.25\n")
    data = data_of(report(one, two)[0])
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
    assert data["between"] == [
        ["actor.lr", ["0.5", "0.25"]], ["trainer.output_dir", ['"somewhere"', None]], ["trainer.seed", ["0", None]],
    ]  # fmt: skip


def test_folders_of_one_name_are_told_apart_and_the_same_folder_too(tmp_path):
    assert names_of([tmp_path / "x/a", tmp_path / "y/b"]) == ["a", "b"]
    assert names_of([tmp_path / "x/a", tmp_path / "y/a"]) == ["x/a", "y/a"]
    assert names_of([tmp_path / "a", tmp_path / "a"]) == ["a (1)", "a (2)"]


def test_secrets_are_hidden_in_config_alarms_errors_and_samples(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "abcdefgh-secret")
    made = batch(["fine", "my abcdefgh-secret key"], errors=["", "refused abcdefgh-secret"])
    folder = made_run(tmp_path / "run", [made])
    (folder / "config.yaml").write_text("note: abcdefgh-secret\n")
    (folder / "alarms.jsonl").write_text('{"step": 1, "alarm": "abcdefgh-secret"}\n')
    page, _ = report(folder)
    header, columns = chunk_of(page)
    assert "abcdefgh" not in json.dumps([data_of(page), header])
    assert header["responses"] == [None, "my [hidden] key"]
    # The page contains no tokens of a response with a secret, because the tokens would spell the secret.
    assert header["lengths"] == [5, 0]
    assert len(columns["advantage"]) == 5
    assert data_of(page)["runs"][0]["samples"]["chunks"][0]["hidden"] == [1]


def test_samples_that_do_not_fit_are_left_out_by_whole_groups_of_every_step(tmp_path):
    rng = np.random.default_rng(0)

    def texts():
        return ["".join(map(chr, rng.integers(33, 127, 200))) for _ in range(64)]

    batches = [batch(texts(), uids=[row // 4 for row in range(64)]) for _ in range(4)]
    folder = made_run(tmp_path / "run", batches)
    whole, _ = report(folder)
    limit = len(whole) - sum(len(text) for text in re.findall(r'id="chunk-[^>]*>(.*?)<', whole)) // 2
    page, _ = report(folder, max_bytes=limit)
    samples = data_of(page)["runs"][0]["samples"]
    assert len(page) <= limit
    assert [chunk["step"] for chunk in samples["chunks"]] == [1, 2, 3, 4]
    assert samples["total"] == 256
    assert 64 <= samples["shown"] == sum(len(chunk["uid"]) for chunk in samples["chunks"]) < 256
    assert all(chunk["uid"].count(uid) == 4 for chunk in samples["chunks"] for uid in chunk["uid"])


def test_numbers_are_rounded_to_what_the_page_says(tmp_path):
    folder = made_run(tmp_path / "run", [batch(["".join(map(chr, range(33, 127)))] * 8)])
    whole, _ = report(folder)
    for limit in (len(whole), len(whole) - 1200, len(whole) - 2200):
        page, _ = report(folder, max_bytes=limit)
        _, columns = chunk_of(page)
        samples = data_of(page)["runs"][0]["samples"]
        stored = columns["log_prob"]
        exact = pq.read_table(folder / "rollouts/step_000001.parquet")["rollout_log_probs"].combine_chunks().flatten()
        error = np.abs(stored / exact.to_numpy()[: len(stored)] - 1).max()
        assert error <= samples["rounding"] * 1.05


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        (
            "metrics.jsonl",
            b'{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew',
            "metrics.jsonl: line 2 is not a JSON object",
        ),
        ("evaluations.jsonl", b"[1]\n", "evaluations.jsonl: line 1 is not a JSON object with a step"),
        ("config.yaml", b"actor: [\n", "config.yaml: is not valid YAML"),
        ("config.yaml", b"\xff\xfe", "config.yaml: holds no config"),
        ("command.json", b'{"arguments": 3}', "command.json: cannot be read"),
        ("tokens.parquet", b"PAR1", "tokens.parquet: cannot be read"),
        ("rollouts/step_000001.parquet", b"PAR1 cut", "rollouts/step_000001.parquet: cannot be read"),
    ],
)
def test_a_damaged_file_is_a_note_and_the_rest_is_shown(tmp_path, name, content, note):
    folder = made_run(tmp_path / "run", [batch(), batch()])
    (folder / name).write_bytes(content)
    page, notes = report(folder)
    (run,) = data_of(page)["runs"]
    assert len(notes) == 1
    assert note in notes[0]
    assert [note in one for one in run["notes"]] == [True]
    assert run["steps"]["step"] == ([1] if name == "metrics.jsonl" else [1, 2])
    assert len(run["samples"]["chunks"]) == (1 if name.startswith("rollouts") else 2)


def test_a_table_whose_lists_do_not_fit_together_is_left_out_with_a_note(tmp_path):
    folder = made_run(tmp_path / "run", [batch(["12"]), batch(["34"])])
    path = folder / "rollouts/step_000002.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("advantages")
    pq.write_table(table.set_column(place, "advantages", [[[0.5]]]), path)
    page, notes = report(folder)
    assert "the columns advantages and response_ids have lists of different lengths" in notes[0]
    assert [chunk["step"] for chunk in data_of(page)["runs"][0]["samples"]["chunks"]] == [1]


def test_a_run_without_a_step_has_a_page_that_says_so(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("actor: {lr: 1}\n")
    (folder / "metrics.jsonl").touch()
    (folder / "evaluations.jsonl").touch()
    page, _ = report(folder)
    (run,) = data_of(page)["runs"]
    assert run["notes"] == ["no training step has ended yet, so there are no curves"]
    assert run["differences"] is None


def test_a_run_of_before_this_page_shows_the_ids_of_its_tokens(tmp_path):
    page, notes = report(made_run(tmp_path / "run", tokens=False))
    assert "tokens.parquet: is missing" in notes[0]
    assert "<id 49>" in data_of(page)["runs"][0]["samples"]["vocabulary"]["texts"]


def test_a_folder_that_no_run_wrote_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="so it is not the output folder of a run"):
        report(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        write_report([tmp_path / "file"], tmp_path / "page.html")
