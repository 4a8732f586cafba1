"""Tests of reward functions that take options, return a reason, are batched or async, or mix these forms."""

import asyncio
import time
from dataclasses import replace

import pytest

from rltrain.base.errors import ConfigError
from rltrain.rewards import loading
from rltrain.rewards.result import RewardResult, ScoreError
from rltrain.settings.compose import compose
from rltrain.settings.reward_config import RewardFunctionConfig
from tests.reward_configs import reward_function
from workers.reward.messages import RewardRequest, SampleScores
from workers.reward.pool import RewardPool
from workers.reward.worker import RewardWorker

FILE = """
import asyncio, sys
from rltrain.rewards.result import RewardResult

def options(response, scale=1.0, answer="none"):
    return scale * len(response) + (answer == "mine")

def result(response):
    if response == "none":
        return RewardResult(score=None)
    return RewardResult(failed=True, message="no judge") if response == "fail" else RewardResult(score=len(response))

def lists(prompts, responses, answer):
    sizes.append(len(responses))
    if "short" in responses:
        return [1.0]
    if "bad" in responses:
        raise ValueError("bad one")
    return [len(r) + (a == "x") if r != "none" else None for r, a in zip(responses, answer, strict=True)]

sizes = []

async def async_lists(prompts, responses):
    await asyncio.sleep(0.001)
    return [float("nan") if r == "nan" else len(r) for r in responses]

running, most = 0, 0

async def nap(response):
    global running, most
    running += 1
    most = max(most, running)
    try:
        await asyncio.sleep(60 if response == "long" else 0.05)
    finally:
        running -= 1
    if response == "raise":
        raise ValueError("not today")
    if response == "exit":
        sys.exit(4)
    return len(response)

def plain(response):
    return 10 * len(response)
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "forms.py").write_text(FILE)
    return tmp_path / "forms.py"


def function(path, name: str, **kwargs) -> RewardFunctionConfig:
    return reward_function(name, f"{path}:{name}", kwargs=kwargs)


def requests(*responses: str, **columns) -> list[RewardRequest]:
    return [RewardRequest((0, n), "p", text, columns) for n, text in enumerate(responses)]


def scores(results) -> list:
    return ["failed" if r.failed else r.scores[0] if len(r.scores) == 1 else r.scores for r in results]


def module_of(path):
    return vars(__import__("sys").modules[loading.load_function(f"{path}:plain").__module__])


# Tests of options of reward functions


def test_options_are_bound_and_a_column_of_their_name_gives_way(path):
    (plain,) = RewardWorker([function(path, "options", scale=2.0)]).score(requests("abc", answer="mine"))
    (bound,) = RewardWorker([function(path, "options", scale=2.0, answer="other")]).score(
        requests("abc", answer="mine")
    )
    assert (plain.scores, bound.scores) == ((7.0,), (6.0,))


def test_an_option_that_is_no_parameter_is_refused_unless_the_function_takes_any():
    def few(response, level=1): ...
    def any_option(response, **others): ...

    with pytest.raises(ConfigError) as caught:
        loading.check_columns(few, "mine", [], {"levle": 2})
    assert str(caught.value) == (
        "reward function 'mine': kwargs.levle: the function has no such parameter (did you mean level?); "
        "it takes response, level"
    )
    loading.check_columns(any_option, "mine", [], {"levle": 2})


def test_an_option_stands_in_for_a_column_that_the_data_lacks():
    def wants(response, answer): ...

    loading.check_columns(wants, "mine", [], {"answer": "7"})
    with pytest.raises(ConfigError, match="needs a column 'answer'"):
        loading.check_columns(wants, "mine", [])


def test_settings_of_the_run_reach_functions_that_have_such_a_parameter_and_options_win(tmp_path):
    path = tmp_path / "settings.py"
    path.write_text("def score(sandbox='none'):\n    return {'none': 0, 'auto': 1, 'required': 2}[sandbox]\n")
    made = [function(path, "score"), replace(function(path, "score", sandbox="none"), name="own")]
    (result,) = RewardWorker(made, settings={"sandbox": "required"}).score(requests("a"))
    assert result.scores == (2.0, 0.0)


# Tests of results that contain a reason


def test_a_result_may_be_a_score_or_not_applicable_or_failed_with_a_reason(path):
    results = RewardWorker([function(path, "result")]).score(requests("abc", "none", "fail"))
    assert scores(results) == [3.0, None, "failed"]
    assert results[2].error == "reward function 'result' reported a failure: no judge"
    with pytest.raises(ScoreError, match="no reason given"):
        loading.as_score(RewardResult(failed=True))


def test_a_result_whose_score_is_no_score_is_an_error():
    with pytest.raises(ScoreError, match="returned nan"):
        loading.as_score(RewardResult(score=float("nan")))


FORMS_OF_SUCCESS = """
import numpy as np
from rltrain.rewards.result import RewardResult

def declared(response):
    return RewardResult(score=0.25, success={"right": True, "wrong": False, "numpy": np.bool_(True)}.get(response))

def also(response):
    return RewardResult(score=1.0, success=response == "right")

def number(response):
    return RewardResult(score=1.0, success=1)

def batch(prompts, responses):
    return [declared(response) for response in responses]

async def awaited(response):
    return declared(response)
"""


@pytest.mark.parametrize("name", ["declared", "batch", "awaited"])
def test_every_form_of_function_may_say_which_answers_are_correct(tmp_path, name):
    (tmp_path / "success.py").write_text(FORMS_OF_SUCCESS)
    results = RewardWorker([function(tmp_path / "success.py", name)]).score(requests("right", "wrong", "numpy", "?"))
    assert [result.success for result in results] == [True, False, True, None]
    assert [result.scores for result in results] == [(0.25,)] * 4


def test_an_answer_is_correct_if_no_function_says_otherwise_and_success_is_a_bool(tmp_path):
    (tmp_path / "success.py").write_text(FORMS_OF_SUCCESS)
    made = [function(tmp_path / "success.py", name) for name in ("declared", "also")]
    assert [r.success for r in RewardWorker(made).score(requests("right", "numpy", "?"))] == [True, False, False]
    (result,) = RewardWorker([function(tmp_path / "success.py", "number")]).score(requests("a"))
    assert (result.failed, result.success) == (True, None)
    assert "returned success=1 of type int: success must be True, False or None" in result.error


# Tests of batched reward functions


def test_a_batched_function_gets_all_samples_of_a_call_at_once_and_columns_as_lists(path):
    results = RewardWorker([function(path, "lists")]).score(requests("abc", "a", "none", answer="x"))
    assert scores(results) == [4.0, 2.0, None]
    assert module_of(path)["sizes"] == [3]


def test_one_bad_sample_of_a_batch_fails_alone(path):
    results = RewardWorker([function(path, "lists")]).score(requests("abc", "bad", "a", answer="x"))
    assert scores(results) == [4.0, "failed", 2.0]
    assert results[1].error.startswith("reward function 'lists' raised ValueError: bad one (")
    assert (results[0].failed_function, results[1].failed_function) == (-1, 0)


def test_a_batch_that_returns_another_number_of_scores_is_an_error(path):
    results = RewardWorker([function(path, "lists")]).score(requests("a", "short", answer="x"))
    # Both samples fail, because the number of scores differs from the number of samples.
    assert scores(results) == ["failed", "failed"]
    assert {r.error for r in results} == {
        "reward function 'lists' returned 1 scores for 2 samples; return one score per sample, in the same order"
    }
    # The batched function was called only once with the 2 samples, although the call failed.
    assert module_of(path)["sizes"] == [2]
    for wrong, said in (([1.0], "returned 1 scores for 2 samples"), (1.0, "returned float: a batched function")):
        with pytest.raises(ScoreError, match=said):
            loading.as_scores(wrong, 2)


def test_a_batched_function_may_be_async(path):
    results = RewardWorker([function(path, "async_lists")]).score(requests("abc", "nan", "a"))
    assert scores(results) == [3.0, "failed", 1.0]


# Tests of async reward functions


def test_async_calls_of_a_process_run_at_the_same_time(path):
    worker = RewardWorker([function(path, "nap")], concurrency=64)
    worker.score(requests("warm"))
    start = time.monotonic()
    results = worker.score(requests(*("abc"[: n % 4] for n in range(64))))
    seconds = time.monotonic() - start
    assert scores(results) == [float(n % 4) for n in range(64)]
    assert module_of(path)["most"] == 64
    assert seconds < 0.8  # Sequential calls would take 3.2 s.


async def scored_by_a_pool(reward, asked):
    """Score the requests with an in-process pool, and return the results in the order of the request keys."""
    results = []
    with RewardPool.in_process(reward) as pool:
        pool.submit(asked)
        while pool.pending:
            results += await pool.poll()
    return sorted(results, key=lambda r: r.key)


def test_no_more_async_calls_run_than_concurrency_allows(path):
    reward = replace(compose([])[0].reward, functions=[function(path, "nap")], concurrency=3, timeout_s=5.0)
    results = asyncio.run(scored_by_a_pool(reward, requests(*"abcdefgh")))
    assert results == [SampleScores((0, n), (1.0,)) for n in range(8)]
    assert module_of(path)["most"] == 3


def test_an_async_call_that_takes_too_long_is_cancelled_alone(path):
    worker = RewardWorker([function(path, "nap")])
    start = time.monotonic()
    results = worker.score(requests("abc", "long", "raise", "exit", "a"), limit_s=0.3)
    assert time.monotonic() - start < 30  # The slow call would take 60 s.
    assert scores(results) == [3.0, "failed", "failed", "failed", 1.0]
    errors = [r.error for r in results]
    assert errors[1] == "reward function 'nap' did not return within 0.3 s"
    assert "raised ValueError: not today" in errors[2]
    assert "raised SystemExit: 4" in errors[3]
    assert module_of(path)["running"] == 0  # Calls that were still running are cancelled.


def test_a_timeout_of_the_functions_own_is_not_taken_for_the_limit(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("async def own():\n    raise TimeoutError('the server is slow')\n")
    (result,) = RewardWorker([function(path, "own")]).score(requests("a"), limit_s=5.0)
    assert result.error.startswith("reward function 'own' raised TimeoutError: the server is slow")


# Tests of runs that mix sync, async and batched reward functions


def test_G3_forms_mix_and_scores_stay_in_the_order_of_the_config(path):
    made = [function(path, name) for name in ("nap", "plain", "lists", "async_lists", "result")]
    results = RewardWorker(made).score(requests("abc", "bad", "a", answer="y"))
    assert scores(results) == [(3.0, 30.0, 3.0, 3.0, 3.0), "failed", (1.0, 10.0, 1.0, 1.0, 1.0)]
    assert results[1].failed_function == 2


def test_G1_every_form_scores_the_same_here_in_a_running_loop_and_in_the_pool(path):
    made = [function(path, name) for name in ("nap", "plain", "async_lists", "result")]
    worker, asked = RewardWorker(made), requests("abc", "", "ab")

    async def notebook():
        return worker.score(asked)

    in_pool = asyncio.run(scored_by_a_pool(replace(compose([])[0].reward, functions=made), asked))
    assert worker.score(asked) == asyncio.run(notebook()) == in_pool
    assert worker.score(asked)[0].scores == (3.0, 30.0, 3.0, 3.0)
