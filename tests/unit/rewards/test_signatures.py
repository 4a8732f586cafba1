"""Tests that reward functions with the signatures of TRL, verl and OpenRLHF are called as those trainers call them."""

import asyncio
from dataclasses import replace

import pytest

from rltrain.base.errors import ConfigError
from rltrain.rewards.loading import call, check_columns, load_function
from rltrain.rewards.signatures import is_async, is_batched, trainer_of
from rltrain.settings.compose import compose
from rltrain.settings.reward_config import RewardFunctionConfig
from tests.reward_configs import reward_function
from workers.reward.messages import RewardRequest
from workers.reward.pool import RewardPool
from workers.reward.worker import RewardWorker

FILE = """
import asyncio, re

# TRL

def trl_text(completions, answer, **kwargs):
    return [float(text.endswith(right)) for text, right in zip(completions, answer, strict=True)]

def trl_chat(prompts, completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    asked = [prompt[-1]["content"] for prompt in prompts]
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [1.0 if content == question.upper() else 0.0 for question, content in zip(asked, contents, strict=True)]

def trl_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def trl_none(completions, task, **kwargs):
    return [1.0 if kind == "math" else None for kind in task]

def trl_metric(completions, log_metric=None, log_extra=None, **kwargs):
    if log_metric:
        log_metric("accuracy", 0.5)
    log_extra("length", [len(text) for text in completions])
    return [0.5] * len(completions)

def trl_kwargs(completions, **kwargs):
    return [float(len(kwargs)) if sorted(kwargs) == KWARGS else -1.0 for _ in completions]

KWARGS = ["answer", "completion_ids", "finish_reason", "log_extra", "log_metric", "prompts"]

def trl_state(completions, trainer_state):
    return [trainer_state.global_step for _ in completions]

def trl_objects(environments, **kwargs):
    return [one.reward for one in environments]

def trl_some_objects(completions, environments=None, **kwargs):
    return [0.0 if environments is None else one.reward for one in environments]

def trl_instead(completions, environment_reward, **kwargs):
    return environment_reward

async def trl_async(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [float(len(text)) for text in completions]

class TrlObject:
    def __call__(self, completions, **kwargs):
        return [float(text == "yes") for text in completions]

trl_object = TrlObject()

# verl

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    found = re.findall(r"#### (-?[0-9]+)", solution_str)
    return 1.0 if found and found[-1] == ground_truth else 0.0

def verl_dict(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.endswith(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}

def verl_share(solution_str, ground_truth):
    return {"score": 0.5, "acc": 0.5}

def verl_bad(solution_str, ground_truth):
    return {"reward": 1.0}

def verl_extra(data_source, solution_str, ground_truth, extra_info):
    return 10 * len(data_source) + extra_info.get("index", -1)

def verl_options(solution_str, ground_truth="none", format_score=0.25, **kwargs):
    return format_score + (ground_truth == "none")

async def verl_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.001)
    return float(solution_str == ground_truth)

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    assert data_sources == [""] * len(solution_strs)
    assert extra_infos == [{}] * len(solution_strs)
    return [
        {"score": len(text), "acc": int(text == truth)}
        for text, truth in zip(solution_strs, ground_truths, strict=True)
    ]

# OpenRLHF

def reward_func(queries, prompts, labels, **kwargs):
    import numpy
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = numpy.array([float(text == label) for text, label in zip(responses, labels, strict=True)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards.mean()}}

def openrlhf_plain(queries, prompts, labels):
    return [float(len(query) + len(label)) for query, label in zip(queries, labels, strict=True)]

def openrlhf_bad(queries, prompts, labels):
    return {"scores": [1.0]}

# rltrain

def own_lists(prompts, responses, completions):
    return [1.0] * len(responses)

def own_columns(prompt, response, **columns):
    return len(columns)

def own_facts(response, prompt_messages, response_ids):
    return len(prompt_messages) * 10 + len(response_ids)
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "foreign.py").write_text(FILE)
    return tmp_path / "foreign.py"


def function(path, name: str, **kwargs) -> RewardFunctionConfig:
    return reward_function(name, f"{path}:{name}", kwargs=kwargs)


def requests(*responses: str, messages=None, **columns) -> list[RewardRequest]:
    """Return requests with all columns that the driver sends, including columns that only some functions receive."""
    facts = {"finish_reason": "stop", "prompt_messages": messages}
    return [
        RewardRequest((0, n), "p", text, {**columns, **facts, "response_ids": [5] * len(text)})
        for n, text in enumerate(responses)
    ]


def scored(path, name: str, asked: list[RewardRequest], **kwargs) -> list:
    """Return the scores of the requests, after checking that a worker and an in-process pool give equal scores."""
    ours = RewardWorker([function(path, name, **kwargs)]).score(asked)
    reward = replace(compose([])[0].reward, functions=[function(path, name, **kwargs)])

    async def pooled():
        results = []
        with RewardPool.in_process(reward) as pool:
            pool.submit(asked)
            while pool.pending:
                results += await pool.poll()
        return sorted(results, key=lambda result: result.key)

    assert asyncio.run(pooled()) == ours
    return [result.error if result.failed else result.scores[0] for result in ours]


# Tests of reward functions with TRL's signature


def test_a_function_of_TRL_gets_lists_of_texts_where_prompts_are_text(path):
    assert scored(path, "trl_text", requests("is 7", "is 8", answer="7")) == [1.0, 0.0]


def test_a_function_of_TRL_gets_messages_where_prompts_are_chats(path):
    chat = [{"role": "system", "content": "Shout."}, {"role": "user", "content": "hello"}]
    assert scored(path, "trl_chat", requests("HELLO", "hello", messages=chat)) == [1.0, 0.0]


def test_a_function_of_TRL_cannot_change_the_messages_of_the_data(tmp_path):
    path = tmp_path / "changes.py"
    path.write_text("def pops(prompts, completions):\n    return [len(p.pop().pop('content')) for p in prompts]\n")
    chat = [{"role": "user", "content": "hello"}]
    assert scored(path, "pops", requests("a", "b", messages=chat)) == [5.0, 5.0]
    assert chat == [{"role": "user", "content": "hello"}]


def test_chats_and_texts_in_one_batch_each_get_their_own_form(path):
    mixed = [*requests("YES", messages=[{"role": "user", "content": "yes"}]), *requests("text")]
    mixed = [RewardRequest((0, n), r.prompt, r.response, r.columns) for n, r in enumerate(mixed)]
    first, second = scored(path, "trl_chat", mixed)
    assert first == 1.0
    # The function fails on the text prompt, because the function handles only lists of messages.
    assert "string indices must be integers" in second


def test_a_function_of_TRL_gets_the_token_ids_of_the_completions(path):
    assert scored(path, "trl_ids", requests("abc", "a")) == [3.0, 1.0]


def test_None_of_a_function_of_TRL_means_that_it_does_not_apply(path):
    assert scored(path, "trl_none", requests("a", task="math")) == [1.0]
    assert scored(path, "trl_none", requests("a", task="code")) == [None]


def test_metrics_that_a_function_of_TRL_logs_are_taken_and_dropped(path):
    assert scored(path, "trl_metric", requests("a", "b")) == [0.5, 0.5]


def test_kwargs_of_a_function_of_TRL_hold_what_TRL_passes_and_the_columns(path):
    assert scored(path, "trl_kwargs", requests("a", answer="7")) == [6.0]


def test_async_functions_and_objects_of_TRL_are_taken(path):
    assert scored(path, "trl_async", requests("abc", "a")) == [3.0, 1.0]
    assert scored(path, "trl_object", requests("yes", "no")) == [1.0, 0.0]


def test_a_function_that_needs_TRLs_trainer_state_is_refused_at_the_start(path):
    with pytest.raises(ConfigError) as caught:
        check_columns(load_function(f"{path}:trl_state"), "state", ["answer"])
    assert str(caught.value) == (
        "reward function 'state' needs a column 'trainer_state' that the data does not have; the columns are prompts, "
        "completions, completion_ids, log_metric, log_extra, finish_reason, answer; rename the parameter, give it a "
        "default, add the column to the data, or set it in kwargs"
    )


@pytest.mark.parametrize("name", ["trl_objects", "trl_some_objects"])
def test_a_function_that_needs_TRLs_environment_objects_is_told_what_to_use_instead(path, name):
    function = load_function(f"{path}:{name}")
    with pytest.raises(ConfigError) as caught:
        check_columns(function, "won", ["answer"])
    assert str(caught.value) == (
        "reward function 'won' has TRL's parameter 'environments', but the environment objects live in other "
        "processes; use the parameter environment_reward (the sum of the environment's rewards) or "
        "environment_messages (the conversation) instead, or let the environment give the reward and set "
        "reward.functions=[environment_reward]"
    )
    check_columns(function, "won", ["answer", "environments"])  # A column of the data may have this name.
    check_columns(load_function(f"{path}:trl_instead"), "won", ["answer"])


# Tests of reward functions with verl's signature


def test_the_right_answer_of_verls_functions_comes_from_each_of_three_places(path):
    source = {"data_source": "openai/gsm8k"}
    for truth in (
        {"ground_truth": "42"},
        {"reward_model": {"style": "rule", "ground_truth": "42"}},
        {"answer": "42"},
        {"ground_truth": None, "reward_model": {"ground_truth": "42"}, "answer": "wrong"},
    ):
        assert scored(path, "compute_score", requests("#### 42", "#### 41", **source, **truth)) == [1.0, 0.0]


def test_acc_of_a_function_of_verl_declares_whether_the_answer_is_correct(path):
    asked = requests("is 7", "is 8", ground_truth="7")
    assert scored(path, "verl_dict", asked) == [1.0, -1.0]
    results = RewardWorker([function(path, "verl_dict")]).score(asked)
    assert [result.success for result in results] == [True, False]
    (share,) = RewardWorker([function(path, "verl_share")]).score(requests("a", ground_truth="7"))
    assert (share.scores, share.success) == ((0.5,), None)


def test_a_dict_without_a_score_fails_the_sample_and_names_the_keys(path):
    (said,) = scored(path, "verl_bad", requests("a", ground_truth="7"))
    assert said == (
        "reward function 'verl_bad' returned a dict without 'score' (it has reward); verl's signature takes the score "
        "from that key"
    )


def test_data_source_and_extra_info_are_empty_where_the_data_has_no_such_column(path):
    assert scored(path, "verl_extra", requests("a", answer="7")) == [-1.0]
    asked = requests("a", answer="7", data_source="abc", extra_info={"index": 4})
    assert scored(path, "verl_extra", asked) == [34.0]


def test_the_functions_own_defaults_and_options_apply(path):
    assert scored(path, "verl_options", requests("a")) == [1.25]
    assert scored(path, "verl_options", requests("a"), format_score=2.0) == [3.0]
    assert scored(path, "verl_options", requests("a"), ground_truth="x") == [0.25]


def test_async_and_batched_functions_of_verl_are_taken(path):
    assert scored(path, "verl_async", requests("7", "8", answer="7")) == [1.0, 0.0]
    asked = requests("seven", "7", reward_model={"ground_truth": "7"})
    assert scored(path, "verl_batch", asked) == [5.0, 1.0]
    results = RewardWorker([function(path, "verl_batch")]).score(asked)
    assert [result.success for result in results] == [False, True]


def test_data_without_a_right_answer_is_refused_at_the_start(path):
    compute_score = load_function(f"{path}:compute_score")
    with pytest.raises(ConfigError) as caught:
        check_columns(compute_score, "gsm8k", ["level"])
    assert str(caught.value) == (
        "reward function 'gsm8k' needs one of the columns ground_truth, reward_model, answer, and the data has none of "
        "them; the available names are data_source, solution_str, extra_info, finish_reason, level; rename a column, "
        "or set ground_truth in kwargs"
    )
    for columns, kwargs in ((["answer"], {}), (["reward_model"], {}), ([], {"ground_truth": "7"})):
        check_columns(compute_score, "gsm8k", columns, kwargs)
    # No column is needed, because the parameter `ground_truth` has a default.
    check_columns(load_function(f"{path}:verl_options"), "options", [])


def test_a_row_without_a_right_answer_fails_alone(path):
    asked = [*requests("7", answer="7"), *requests("8", answer=None)]
    asked = [RewardRequest((0, n), r.prompt, r.response, r.columns) for n, r in enumerate(asked)]
    first, second = scored(path, "verl_async", asked)
    assert (first, second) == (
        1.0,
        "reward function 'verl_async' needs a value in one of the columns ground_truth, reward_model, answer, and this "
        "sample has none",
    )
    first, second = scored(path, "verl_batch", asked)
    assert first == 1.0
    assert "this sample has none" in second


# Tests of reward functions with OpenRLHF's signature


def test_a_function_of_OpenRLHF_gets_queries_that_are_prompts_and_responses(path):
    for column in ("label", "labels", "answer", "ground_truth"):
        assert scored(path, "reward_func", requests("7", "8", **{column: "7"})) == [1.0, 0.0]
    assert scored(path, "openrlhf_plain", requests("abc", "a", label="xy")) == [6.0, 4.0]
    (said,) = scored(path, "openrlhf_bad", requests("a", label="7"))
    assert "returned a dict without 'rewards' (it has scores)" in said


# Tests of which reward functions are recognised as functions of TRL, verl or OpenRLHF


@pytest.mark.parametrize(
    ("name", "trainer", "batched", "asynchronous"),
    [
        ("trl_text", "TRL", True, False),
        ("trl_ids", "TRL", True, False),
        ("trl_object", "TRL", True, False),
        ("trl_async", "TRL", True, True),
        ("compute_score", "verl", False, False),
        ("verl_async", "verl", False, True),
        ("verl_batch", "verl", True, False),
        ("reward_func", "OpenRLHF", True, False),
        ("own_lists", "", True, False),
        ("own_columns", "", False, False),
    ],
)
def test_functions_are_recognised_by_the_names_of_their_parameters(path, name, trainer, batched, asynchronous):
    found = load_function(f"{path}:{name}")
    assert (trainer_of(found), is_batched(found), is_async(found)) == (trainer, batched, asynchronous)


def test_a_function_with_rltrains_own_parameters_is_not_wrapped(path):
    found = load_function(f"{path}:own_lists")
    assert found is found.__globals__["own_lists"]


def test_messages_and_token_ids_reach_only_functions_that_name_them(path):
    chat = [{"role": "user", "content": "hello"}]
    # The function receives two columns: answer and finish_reason.
    assert scored(path, "own_columns", requests("abc", messages=chat, answer="7")) == [2.0]
    assert scored(path, "own_facts", requests("abc", messages=chat)) == [13.0]
    assert call(load_function(f"{path}:own_columns"), "p", "r", {"answer": "7"}) == 1.0
