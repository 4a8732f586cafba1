"""Tests of folders with row files, of CSV files, and of one-line errors for wrong files."""

import json
import os

import pyarrow
import pytest
from pyarrow import parquet

from tests.prompt_loading import error_of, jsonl, load


def csv_of(folder, text, name="p.csv"):
    (folder / name).write_text(text, "utf-8")
    return folder / name


def test_the_values_of_a_csv_file_are_text_as_they_are_written(tmp_path):
    path = csv_of(tmp_path, 'prompt,answer,note\n1+1=,02,\n"a,b\nc",1e3,"say ""hi"""\n')
    first, second = load(path)
    assert (first.text, first.columns) == ("1+1=", {"answer": "02", "note": ""})
    assert (second.text, second.columns) == ("a,b\nc", {"answer": "1e3", "note": 'say "hi"'})


def test_a_csv_file_may_begin_with_a_byte_order_mark(tmp_path):
    assert [prompt.text for prompt in load(csv_of(tmp_path, "\ufeffprompt\na\n"))] == ["a"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", ": not a readable CSV file (Empty CSV file); write the column names into the first line"),
        ("prompt,answer\na,1\nb\n", ": not a readable CSV file (CSV parse error: Expected 2 columns, got 1: b)"),
        ("prompt,prompt\na,1\n", ": several columns are called 'prompt'; rename all but one of them"),
        ("prompt\n", ": holds no rows"),
        ("text,label\na,1\n", "; the columns are text, label; name the column with data.prompt=COLUMN"),
    ],
)
def test_a_bad_csv_file_is_refused_in_one_line(tmp_path, content, said):
    message = error_of(csv_of(tmp_path, content))
    assert message.startswith(f"data.train={tmp_path}/p.csv: ")
    assert said in message


def test_a_csv_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "p.csv").write_bytes(b"prompt\n\xff\xfe\n")
    assert "not a readable CSV file" in error_of(tmp_path / "p.csv")


# Tests of folders of row files


def test_the_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path):
    jsonl(tmp_path, {"prompt": "c"}, name="part-10.jsonl")
    jsonl(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": "b"}, name="part-02.jsonl")
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / ".hidden.jsonl").write_text("no data")
    (tmp_path / "cache").mkdir()
    prompts = load(tmp_path)
    assert [prompt.text for prompt in prompts] == ["a", "b", "c"]
    assert [prompt.columns for prompt in prompts] == [{"answer": 1}, {"answer": None}, {"answer": None}]
    assert prompts.described == f"3 rows of {tmp_path}; prompt = column prompt, as text"


def test_a_bad_row_of_a_folder_is_named_with_its_file(tmp_path):
    jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"}, name="1.jsonl")
    jsonl(tmp_path, {"prompt": "c"}, {"prompt": 5}, name="2.jsonl")
    message = error_of(f"{tmp_path}/")
    assert message.startswith(f"data.train={tmp_path}/2.jsonl:2: the prompt is neither text nor chat messages")


def test_parquet_files_of_a_folder_may_have_different_columns(tmp_path):
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "x": [1, 2]}), tmp_path / "1.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["c", None], "y": ["z", "z"]}), tmp_path / "2.parquet")
    assert error_of(tmp_path).startswith(f"data.train={tmp_path}/2.parquet, row 2: no prompt")
    parquet.write_table(pyarrow.table({"prompt": ["c"], "y": ["z"]}), tmp_path / "2.parquet")
    assert [(prompt.text, prompt.columns) for prompt in load(tmp_path)] == [
        ("a", {"x": 1, "y": None}),
        ("b", {"x": 2, "y": None}),
        ("c", {"x": None, "y": "z"}),
    ]


def test_parquet_files_whose_columns_have_different_types_are_refused(tmp_path):
    parquet.write_table(pyarrow.table({"prompt": ["a"], "x": [1]}), tmp_path / "1.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["b"], "x": ["y"]}), tmp_path / "2.parquet")
    assert f"data.train={tmp_path}: the files have columns of different types (" in error_of(tmp_path)


def test_a_folder_without_data_files_is_refused_and_its_folders_are_named(tmp_path):
    endings = ".jsonl, .json, .parquet, .csv"
    assert error_of(tmp_path) == (
        f"data.train={tmp_path}: a folder without data files (their names end in {endings}); name another folder, or "
        "a file"
    )
    (tmp_path / "main").mkdir()
    (tmp_path / "README.md").write_text("no data")
    assert error_of(tmp_path).endswith("; name one of its folders: main")


def test_a_folder_with_two_kinds_of_files_is_refused(tmp_path):
    jsonl(tmp_path, {"prompt": "a"}, name="1.jsonl")
    (tmp_path / "2.json").write_text(json.dumps([{"prompt": "b"}]))
    assert error_of(tmp_path) == (
        f"data.train={tmp_path}: a folder with several kinds of data files, such as 1.jsonl and 2.json; name one file, "
        "or a folder with one kind"
    )


def test_a_file_of_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "p.txt").write_text("a")
    assert "unknown kind of file; it must end in .jsonl, .json, .parquet, .csv" in error_of(tmp_path / "p.txt")
    os.mkfifo(tmp_path / "p.jsonl")
    assert "is not a regular file" in error_of(tmp_path / "p.jsonl")
    message = error_of(tmp_path / "gsm8k")
    assert "no such file; check the path" in message
    assert (
        "a data set of the Hugging Face hub is written as ORG/NAME, and a function is written as "
        "package.module:function or file.py:function" in message
    )
