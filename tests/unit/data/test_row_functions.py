"""Tests of user functions that return rows, and of one-line errors for wrong functions."""

import datetime
import decimal
from pathlib import Path

import numpy
import pytest

from tests.prompt_loading import error_of, load

ROOT = Path(__file__).parents[3]


@pytest.fixture
def function(tmp_path):
    """Return a helper that writes Python code to a file, and returns the source name of the file's function `rows`."""

    def function(text: str) -> str:
        (tmp_path / "made.py").write_text(text)
        return f"{tmp_path}/made.py:rows"

    return function


def test_a_function_may_return_a_list_or_yield_rows(function):
    for text in (
        "def rows():\n    return [{'prompt': 'a', 'answer': 1}, {'prompt': 'b'}]",
        "def rows():\n    yield {'prompt': 'a', 'answer': 1}\n    yield {'prompt': 'b'}",
    ):
        prompts = load(function(text))
        assert [(prompt.text, prompt.columns) for prompt in prompts] == [("a", {"answer": 1}), ("b", {"answer": None})]
        assert not prompts.own_splits


def test_a_function_gets_split_and_seed_if_it_has_such_parameters(function):
    source = function(
        "def rows(split, *, seed, size=3):\n    return [{'prompt': f'{split}{seed}{n}'} for n in range(size)]"
    )
    assert [prompt.text for prompt in load(source, seed=7)] == ["train70", "train71", "train72"]
    val = load(source, split="val")
    assert (val[0].text, val.own_splits) == ("val00", True)


def test_a_function_of_an_installed_module_is_named_by_its_path():
    assert error_of("json.decoder:nothing") == (
        "data.train=json.decoder:nothing: json.decoder has no function 'nothing'; the nearest is 'py_scanstring'"
    )


def test_a_row_that_is_changed_after_it_was_yielded_stays_as_it_was(function):
    source = function(
        "def rows():\n    row = {}\n    for text in 'ab':\n        row['prompt'] = text\n        yield row\n"
    )
    assert [prompt.text for prompt in load(source)] == ["a", "b"]


def test_values_of_numpy_become_plain_and_other_plain_values_stay(function):
    source = function(
        "import numpy, datetime, decimal\n"
        "def rows():\n"
        "    yield {'prompt': 'a', 'n': numpy.int64(3), 'x': numpy.arange(2), 'f': numpy.float32(0.5), 't': (1, 'é'),\n"
        "           'd': datetime.date(2026, 1, 2), 'm': decimal.Decimal('0.10'), 'b': b'x', 'o': {1: None}}\n"
    )
    columns = load(source)[0].columns
    assert columns == {
        "n": 3, "x": [0, 1], "f": 0.5, "t": [1, "é"], "d": datetime.date(2026, 1, 2), "m": decimal.Decimal("0.10"),
        "b": b"x", "o": {1: None},
    }  # fmt: skip
    assert not any(isinstance(value, numpy.generic) for value in columns.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def rows():\n    raise KeyError('x')", ": the function raised KeyError: 'x'; fix the function first"),
        ("def rows():\n    yield {'prompt': 'a'}\n    raise SystemExit(3)", ": the function raised SystemExit: 3"),
        ("def rows():\n    raise ValueError('two\\nlines')", ": the function raised ValueError: two lines; fix"),
        ("def rows():\n    return []", ": holds no rows; give the source at least one prompt"),
        ("def rows():\n    return iter(())", ": holds no rows"),
        ("def rows():\n    pass", ": the function returned NoneType where rows were expected; return or yield dicts"),
        ("def rows():\n    return {'prompt': ['a']}", ": the function returned dict where rows were expected"),
        ("def rows():\n    return 'abc'", ": the function returned str where rows were expected"),
        (
            "def rows():\n    yield {'prompt': 'a'}\n    yield 'b'",
            ", row 2: found str where a dict of columns was expected",
        ),
        ("def rows():\n    yield {1: 'a'}", ", row 1: found dict where a dict of columns was expected"),
        ("def rows():\n    yield {'prompt': 'a', 'x': object()}", ", row 1, column 'x': an object of type object; use"),
        ("def rows():\n    yield {'prompt': 'a', 'x': {1, 2}}", ", row 1, column 'x': an object of type set; use text"),
        (
            "def rows():\n    yield {'prompt': 'a', 'x': 10**5000}",
            ", row 1, column 'x': a number with thousands of digits",
        ),
        (
            "def rows():\n    yield {'prompt': 'a', 'x': '\\ud800'}",
            ", row 1, column 'x': the value is not valid Unicode",
        ),
        (
            "def rows():\n    x = []\n    x.append(x)\n    yield {'prompt': 'a', 'x': x}",
            ", row 1, column 'x': the value has lists or dicts that contain themselves or are nested too deeply",
        ),
        ("def rows(size):\n    return []", ": the function needs 'size', but rltrain passes only split and seed, by"),
        ("def rows(split, /):\n    return []", ": the function needs 'split', but rltrain passes only split and seed"),
        ("async def rows():\n    return []", ": is an async function; write 'def' instead of 'async def'"),
        ("rows = 3", ": 'rows' is of type int, not a function"),
        ("def row():\n    pass", "made.py has no function 'rows'; the nearest is 'row'"),
        ("def rows(:", "made.py does not import (SyntaxError"),
    ],
)
def test_a_bad_function_is_refused_in_one_line(function, text, said):
    source = function(text)
    message = error_of(source)
    assert message.startswith(f"data.train={source}")
    assert said in message


def test_a_function_that_never_ends_is_stopped_at_a_number_of_rows(function):
    source = function("import itertools\ndef rows():\n    return ({'prompt': 'a'} for n in itertools.count())")
    assert error_of(source) == (
        f"data.train={source}: gives more than 1,000,000 rows; return fewer rows, for example with 'return "
        "itertools.islice(..., N)' in rows"
    )


def test_a_missing_file_of_a_function_names_its_neighbour(function, tmp_path):
    function("def rows():\n    return []")
    assert f"did you mean {tmp_path}/made.py?" in error_of(f"{tmp_path}/mode.py:rows")
    assert "there is no module 'nowhere'" in error_of("nowhere.data:rows")


def test_the_function_of_the_guide_gives_other_rows_for_evaluation():
    source = "examples/own_data/rows.py"
    assert (ROOT / source).read_text() in (ROOT / "docs" / "models-and-data.md").read_text()
    train, val = (load(f"{ROOT}/{source}:sums", split=split) for split in ("train", "val"))
    assert (len(train), len(val), train[0].text == val[0].text) == (2000, 200, False)
    a, b = map(int, train[0].text.rstrip("=").split("+"))
    assert train[0].columns["answer"] == str(a + b)
