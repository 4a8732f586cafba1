"""Tests of reward functions given by import path or file path: loading, calling, and one-line errors."""

import asyncio
import math
import subprocess
import sys
import threading
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy
import pytest

from rltrain.base.errors import ConfigError
from rltrain.rewards.loading import BUILTIN as BUILTIN_NAMES
from rltrain.rewards.loading import (
    absolute,
    bind,
    call,
    check_aggregation,
    check_columns,
    import_function,
    load_function,
)
from rltrain.rewards.result import ScoreError
from tests.reward_configs import reward_function
from workers.reward.messages import RewardRequest
from workers.reward.worker import RewardWorker

BUILTIN = "rltrain.rewards.final_answer"
COLUMNS = {"answer": "7", "finish_reason": "stop"}


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # Loading a reward file adds the file's folder to sys.path.


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_of(path: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_function(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Tests of finding reward functions


def test_a_column_that_is_null_in_every_row_is_refused_if_the_function_needs_it():
    def needs(response, answer):
        return response == answer

    def may_use(response, answer=""):
        return response == answer

    message = "reward function 'f' needs the column 'answer', which is null in every row of data.val=x.jsonl"
    with pytest.raises(ConfigError, match=message):
        check_columns(needs, "f", ["answer"], nulls=["answer"], where="data.val=x.jsonl")
    check_columns(needs, "f", ["answer"], nulls=["level"])
    check_columns(needs, "f", ["answer"], {"answer": "7"}, nulls=["answer"])
    check_columns(may_use, "f", ["answer"], nulls=["answer"])


def test_one_of_the_columns_that_may_hold_the_right_answer_needs_a_value(tmp_path):
    (tmp_path / "verl.py").write_text("def score(data_source, solution_str, ground_truth): return 1.0")
    function = load_function(f"{tmp_path}/verl.py:score")
    with pytest.raises(ConfigError, match=r"needs one of the columns .* and the data has none of them with a value"):
        check_columns(function, "f", ["answer"], nulls=["answer"])
    check_columns(function, "f", ["answer"])


@pytest.mark.parametrize("path", [f"{BUILTIN}:final_answer", f"{BUILTIN}.final_answer"])
def test_an_import_path_may_use_a_colon_or_a_dot(path):
    assert call(load_function(path), "2299907=", "0227999#7", COLUMNS) == 1.0


def test_a_file_may_be_named_absolutely_or_from_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path, "def score(response):\n    return len(response)\n")
    monkeypatch.chdir(tmp_path)
    functions = [load_function(path) for path in ("mine.py:score", "./mine.py:score", f"{tmp_path}/mine.py:score")]
    assert [call(function, "p", "abc", {}) for function in functions] == [3.0] * 3
    assert functions[0] is functions[2]  # A file is loaded only once, so that its functions share their state.
    assert absolute("mine.py:score") == f"{tmp_path}/mine.py:score"
    assert absolute("package.module:score") == "package.module:score"


def test_a_package_may_lie_in_the_working_directory_of_an_installed_command(tmp_path, monkeypatch):
    write(tmp_path, "def score():\n    return 1\n", "rltrain_test_beside.py")
    monkeypatch.chdir(tmp_path)
    # The `sys.path` of an installed console command does not contain the working directory.
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    for _ in range(2):
        assert call(load_function("rltrain_test_beside:score"), "p", "r", {}) == 1
    assert sys.path.count(str(tmp_path)) == 1
    # The folder is appended to sys.path, so that files in the folder cannot hide installed packages.
    assert sys.path[-1] == str(tmp_path)


def test_a_file_that_changed_is_read_again(tmp_path):
    path = write(tmp_path, "def score():\n    return 1\n")
    assert call(load_function(f"{path}:score"), "p", "r", {}) == 1
    write(tmp_path, "def score():\n    return 1 + 1\n")
    assert call(load_function(f"{path}:score"), "p", "r", {}) == 2


def test_a_file_may_import_its_neighbours_and_hold_dataclasses(tmp_path):
    write(tmp_path, "HALF = 0.5\n", "rltrain_test_neighbour.py")
    path = write(
        tmp_path,
        "from dataclasses import dataclass\nfrom rltrain_test_neighbour import HALF\n"
        "@dataclass\nclass Score:\n    value: float\n"
        "def score(prompt):\n    return Score(HALF).value\n",
    )
    assert call(load_function(f"{path}:score"), "p", "r", {}) == 0.5


def test_what_does_not_exist_is_named_with_its_nearest_neighbour(tmp_path):
    path = write(tmp_path, "import math\ndef score_length(response): return 1\ndef other(): return 2\n")
    assert error_of(f"{path}:score_lenght").endswith("has no function 'score_lenght'; the nearest is 'score_length'")
    assert f"there is no file {tmp_path}/mime.py; did you mean {path}?" in error_of(f"{tmp_path}/mime.py:score")
    assert "there is no module 'no_such_package'" in error_of("no_such_package.rewards:score")
    assert "there is no module 'rltrain.rewardz'" in error_of("rltrain.rewardz:score")
    assert error_of(f"{BUILTIN}:final_anwser").endswith("the nearest is 'final_answer'")


@pytest.mark.parametrize("path", ["score", "mine.py", ":score", "package.module:", ""])
def test_a_path_without_a_function_is_refused(path):
    found = error_of(path)
    assert "neither a built-in function nor a function of a file or module; use package.module:function, " in found
    assert "file.py:function, or one of" in found


def test_what_comes_with_rltrain_has_a_short_name():
    assert load_function("exact_answer") is load_function(f"{BUILTIN}:exact_answer")
    assert {load_function(name).__name__ for name in BUILTIN_NAMES} == set(BUILTIN_NAMES)
    assert "did you mean math_answer?" in error_of("math_anser")


def test_a_directory_is_no_function_and_its_place_is_named(tmp_path):
    assert f"reward.models=[{tmp_path}]" in error_of(str(tmp_path))


def test_an_aggregation_of_no_known_name_gets_the_nearest():
    with pytest.raises(
        ConfigError, match=r"reward\.aggregation=normalise_then_sum.* \(did you mean normalize_then_sum\?"
    ):
        check_aggregation("normalise_then_sum")
    with pytest.raises(ConfigError, match=r"^reward\.aggregation 'no\.py:f'"):
        check_aggregation("no.py:f")


def test_a_file_without_functions_says_so(tmp_path):
    assert "the module contains no functions" in error_of(f"{write(tmp_path, 'x = 1')}:score")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def score(:\n", "SyntaxError: "),
        ("import not_installed_here\n", "ModuleNotFoundError: No module named 'not_installed_here'"),
        ("raise ValueError('first\\nsecond')\n", "ValueError: first second"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_file_that_does_not_import_says_why(tmp_path, text, reason):
    path = write(tmp_path, text)
    assert f"{path} does not import ({reason}" in error_of(f"{path}:score")
    # A module whose import has failed is imported again at the next call.
    assert f"{path} does not import ({reason}" in error_of(f"{path}:score")


def test_a_package_that_lacks_another_says_so_and_is_not_called_missing(tmp_path, monkeypatch):
    write(tmp_path, "import not_installed_here\n", "rltrain_test_lacking.py")
    monkeypatch.syspath_prepend(tmp_path)
    message = error_of("rltrain_test_lacking:score")
    assert "rltrain_test_lacking does not import (ModuleNotFoundError: No module named 'not_installed_here')" in message


def test_a_class_that_is_not_there_is_named_with_the_nearest_class_and_all_classes(tmp_path):
    text = "from random import Random\ndef reset(): ...\nclass ResetRaises: ...\nclass Other: ...\nhalf = 0.5\n"
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        import_function(f"{path}:ResetRaise", "rollout.environment=x", "class")
    assert str(caught.value) == (
        f"rollout.environment=x: {path} has no class 'ResetRaise'; the nearest is 'ResetRaises'; its classes are "
        "ResetRaises, Other"
    )
    with pytest.raises(ConfigError, match="'half' is of type float, not a class; name a class"):
        import_function(f"{path}:half", "x", "class")
    with pytest.raises(ConfigError, match="the module contains no classes"):
        import_function(f"{write(tmp_path, 'x = 1', 'empty.py')}:Game", "x", "class")
    with pytest.raises(ConfigError, match=r"there is no module 'no_such'; .* path/to/file\.py:Class"):
        import_function("no_such:Game", "x", "class")


@pytest.mark.parametrize("path", ["my_env.Game", "my_env.py", "game", "my_env.py:", ":Game", ""])
def test_a_path_without_a_colon_is_refused_with_the_form_of_a_path(path):
    with pytest.raises(ConfigError) as caught:
        import_function(path, f"rollout.environment={path}", "class")
    assert str(caught.value) == (
        f"rollout.environment={path}: no class name is given after a colon; use file.py:Class or package.module:Class"
    )
    with pytest.raises(ConfigError, match=r"^x: no function .* use file\.py:function or package\.module:function$"):
        import_function(path, "x")


def test_what_is_no_function_is_refused(tmp_path):
    assert "'score' is of type float, not a function" in error_of(f"{write(tmp_path, 'score = 0.5')}:score")


# Tests of the columns that reward functions take


def test_a_function_that_needs_a_column_that_is_not_there_is_refused():
    def wants(prompt, response, anwser, *, weight=1.0): ...

    with pytest.raises(ConfigError) as caught:
        check_columns(wants, "mine", ["answer", "level"])
    assert str(caught.value) == (
        "reward function 'mine' needs a column 'anwser' that the data does not have; the columns are prompt, response, "
        "finish_reason, answer, level (did you mean answer?); rename the parameter, give it a default, add the "
        "column to the data, or set it in kwargs"
    )


def test_functions_that_need_only_what_is_there_pass():
    def everything(prompt, response, *, answer, finish_reason, missing=None, **others): ...
    def positional(prompt, response, answer, /): ...
    def nothing(*args, **kwargs): ...

    for function in (everything, positional, nothing, load_function(f"{BUILTIN}:final_answer")):
        check_columns(function, "f", ["answer"])


def test_a_builtin_that_hides_its_parameters_is_refused():
    with pytest.raises(ConfigError, match="has no signature that Python can read; wrap the function in a"):
        check_columns(min, "f", [])


# Tests of calling reward functions


def test_a_function_gets_only_what_its_signature_takes():
    seen = []

    def few(response, answer, *, level=3):
        seen.append((response, answer, level))

    def everything(prompt, **others):
        seen.append((prompt, others))

    def positional(answer, response, other="none", /):
        seen.append((answer, response, other))

    for function in (few, everything, positional):
        call(function, "p", "r", COLUMNS)
    assert seen == [("r", "7", 3), ("p", {"response": "r", **COLUMNS}), ("7", "r", "none")]


def test_the_columns_that_a_caller_hands_in_stay_as_they_are():
    columns = dict(COLUMNS)
    call(lambda **everything: everything.clear(), "p", "r", columns)
    assert columns == COLUMNS


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (-3, -3.0),
        (float(numpy.finfo(numpy.float32).max), 3.4028234663852886e38),
        (numpy.float32(0.5), 0.5),
        (numpy.bool_(True), 1.0),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        (numpy.array(True), 1.0),
    ],
)
def test_numbers_and_bools_are_scores(result, score):
    returned = call(lambda: result, "p", "r", {})
    assert (returned, type(returned)) == (score, float)
    assert call(lambda: numpy.array(2.5), "p", "r", {}) == 2.5


def test_G4_none_means_not_applicable_and_stays_none():
    assert call(lambda: None, "p", "r", {}) is None


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("0.5", "returned '0.5' of type str: a score must be a number, a bool or None"),
        ([1.0], "of type list"),
        (1j, "of type complex"),
        (math.nan, "returned nan: a score must be finite"),
        (-math.inf, "returned -inf: a score must be finite"),
        (numpy.array([1.0]), "of type ndarray"),
        (-1e39, "returned -1e+39: a score outside float32's range"),
        (10**400, "returned a number of type int: a score outside float32's range"),
        (Fraction(10**400), "returned a number of type Fraction: a score outside float32's range"),
        (Decimal("inf"), "returned inf: a score must be finite"),
        (numpy.complex64(1 + 2j), "of type complex"),  # float() would drop the imaginary part of the number.
        (numpy.array("0.5"), "returned '0.5' of type str"),
    ],
)
def test_what_is_no_score_is_an_error_and_never_0(result, said):
    with pytest.raises(ScoreError) as caught:
        call(lambda: result, "p", "r", {})
    assert said in str(caught.value)


def test_a_sample_without_a_needed_column_is_an_error():
    with pytest.raises(ScoreError, match="needs the column 'answer', but this sample has only level, prompt, response"):
        call(lambda answer: 1.0, "p", "r", {"level": 1})


def test_what_a_function_raises_goes_through():
    def bad(response):
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        call(bad, "p", "r", {})


def test_what_a_failed_sample_says_can_be_written_to_a_file(tmp_path):
    path = write(tmp_path, "def score():\n    raise ValueError('bad \\ud800')\n")
    worker = RewardWorker([reward_function("mine", f"{path}:score")])
    (result,) = worker.score([RewardRequest((0, 0), "p", "r", {})])
    assert result.error.encode().startswith(b"reward function 'mine' raised ValueError: bad \\ud800 (")


def test_async_functions_run_to_their_end_on_one_loop_that_stays():
    loops = []

    async def slow(response):
        await asyncio.sleep(0.001)
        loops.append(asyncio.get_running_loop())
        return len(response)

    assert [call(slow, "p", "r" * n, {}) for n in (1, 2)] == [1.0, 2.0]
    # Both calls use the same event loop, so that a function can keep its connections between calls.
    assert loops[0] is loops[1]


def test_async_functions_work_where_a_loop_is_running_and_survive_an_exit():
    async def exits():
        sys.exit(2)

    async def fine():
        return 0.5

    async def notebook():
        with pytest.raises(ScoreError, match=r"called sys.exit\(2\)"):
            call(exits, "p", "r", {})
        return call(fine, "p", "r", {})

    assert asyncio.run(notebook()) == 0.5


def test_an_object_that_can_be_called_is_a_function_too():
    @dataclass
    class Length:  # Instances of a dataclass with __eq__ are not hashable.
        per: float

        def __call__(self, response):
            return self.per * len(response)

    check_columns(Length(0.5), "length", [])
    assert bind(Length(0.5))("p", "abcd", {}) == 2.0


# Tests of the scores of final answers


GOLDEN = [
    ("0227999#7", "7", "stop", 1.0),
    ("#7", "7", "stop", 1.0),
    ("#7", "7", "length", 0.0),
    ("#8", "7", "stop", 0.0),
]


def test_G1_a_golden_set_scores_the_same_in_the_main_thread_and_in_another():
    function = load_function(f"{BUILTIN}:final_answer")

    def scores() -> list:
        return [call(function, "p", r, {"answer": a, "finish_reason": f}) for r, a, f, _ in GOLDEN]

    elsewhere: list = []
    thread = threading.Thread(target=lambda: elsewhere.extend(scores()))
    thread.start()
    thread.join()
    assert scores() == elsewhere == [expected for *_, expected in GOLDEN]


def test_importing_it_does_not_import_torch():
    script = "import sys, rltrain.rewards.loading, rltrain.rewards.final_answer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
