"""Tests that unsuitable teachers are refused with a one-line error before any worker starts."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from rltrain.base.errors import ConfigError
from rltrain.data.prompts import load_prompts
from rltrain.run.checks import check
from rltrain.run.teacher_checks import check_teachers
from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import char_tokenizer
from tests.made_teachers import make_teacher
from tests.teacher_server import TeacherServer

PATHS = "algorithm.distillation.teachers: path of"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("teachers") / "t", width=32, seed=1)


@pytest.fixture
def copy(teacher, tmp_path):
    """Return a copy of the teacher that a test may damage."""
    shutil.copytree(teacher, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def server(teacher):
    with TeacherServer(AutoModelForCausalLM.from_pretrained(teacher).eval()) as running:
        yield running


def config_of(teachers, *overrides):
    words = ["algorithm=mopd", "rollout=hf", "placement=inprocess", f"algorithm.distillation.teachers=[{teachers}]"]
    return compose([*words, "algorithm.distillation.retries=0", *overrides])[0]


def prompts_of(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1=", **row}) + "\n" for row in rows or [{"answer": "1"}]))
    return load_prompts(str(file), char_tokenizer(), split="train", seed=0, max_prompt_length=16, overlong="refuse")


def refusal(config, prompts):
    with pytest.raises(ConfigError) as error:
        check_teachers(config, char_tokenizer(), prompts)
    assert "\n" not in str(error.value)
    return str(error.value)


def edited(folder, file, change):
    path = folder / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# Tests of models on the training ranks


def test_a_teacher_with_the_policys_tokenizer_passes(teacher, tmp_path):
    config = config_of(teacher, f"trainer.output_dir={tmp_path / 'run'}")
    check_teachers(check(config), char_tokenizer(), prompts_of(tmp_path))


def test_a_teacher_with_another_tokenizer_is_refused_with_the_first_token_that_differs(copy, tmp_path):
    def swap(content):
        words = content["model"]["vocab"]
        words["7"], words["8"] = words["8"], words["7"]

    edited(copy, "tokenizer.json", swap)
    assert refusal(config_of(copy), prompts_of(tmp_path)) == (
        f"{PATHS} 'copy'={copy}: has another tokenizer than the policy: 2 of 128 tokens differ, the first is '7', with "
        "id 55 for the policy and id 56 for the teacher; use a teacher with the policy's tokenizer"
    )


def test_a_teacher_may_have_more_words_than_the_policy_and_not_fewer(teacher, tmp_path):
    large, small = (make_teacher(tmp_path / f"{n}", width=32, seed=1, words=n) for n in (140, 130))
    prompts = prompts_of(tmp_path)
    check_teachers(config_of(large, f"model.path={small}"), char_tokenizer(), prompts)
    assert "has vocab_size=130, below the policy's 140" in refusal(config_of(small, f"model.path={large}"), prompts)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "no such directory"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"1"), "is not a complete safetensors file"),
        (
            lambda folder: edited(folder, "config.json", lambda c: c.update(max_position_embeddings=20)),
            "reads at most 20 tokens, but rollout.max_prompt_length + rollout.max_response_length = 32; lower their",
        ),
        (
            lambda folder: edited(folder, "config.json", lambda c: c.update(layer_types=["mamba", "full_attention"])),
            "and training can keep packed rows apart only in attention layers",
        ),
    ],
)
def test_a_damaged_or_unsuitable_directory_is_refused_by_its_key(copy, tmp_path, damage, message):
    damage(copy)
    with pytest.raises(ConfigError) as error:
        check(config_of(copy, f"trainer.output_dir={tmp_path / 'run'}"))
    assert str(error.value).startswith(f"{PATHS} 'copy'={copy}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# Tests of the data


TWO = "{name: a, path: reference}, {name: b, path: reference, prompt_template: '{hint}{prompt}'}"
COLUMN = "algorithm.distillation.teacher_column=domain"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"domain": "a", "demonstration": "x"}, {"domain": "c"}], ".jsonl:3: the column 'domain' is 'c', but must"),
        ([{"domain": "a", "demonstration": "x"}, {"domain": None}], ".jsonl:3: the column 'domain' has no value, but"),
        ([{"domain": "a", "demonstration": "x"}, {}], ".jsonl:3: the column 'domain' has no value, but must name one "),
        ([{"domain": "a"}], ".jsonl:2: no value in column 'demonstration', which prompt_template of the teacher 'a' "),
        ([{"domain": "b", "hint": ["x"]}], ".jsonl:2: a value of type list in column 'hint', which prompt_template of"),
    ],
)
def test_a_row_without_a_teacher_or_without_what_its_template_inserts_is_refused_by_its_place(tmp_path, rows, message):
    every = [{"domain": "b", "hint": "y", "demonstration": "z"}, *rows]
    assert message in refusal(config_of(TWO, COLUMN), prompts_of(tmp_path, *every))


def test_rows_that_have_what_their_own_teacher_needs_pass(tmp_path):
    rows = [{"domain": "a", "demonstration": "x"}, {"domain": "b", "hint": 3}, {"domain": "a", "demonstration": ""}]
    check_teachers(config_of(TWO, COLUMN), char_tokenizer(), prompts_of(tmp_path, *rows))


@pytest.mark.parametrize(
    ("teachers", "overrides", "message"),
    [
        (TWO, [COLUMN], "teacher_column names the column 'domain', but "),
        ("reference", [], "prompt_template of the teacher 'reference' names the column 'demonstration', but "),
        (
            "{path: reference, prompt_template: '{prompt}{'}",
            [],
            "prompt_template of the teacher 'reference'={prompt}{: ",
        ),
    ],
)
def test_a_column_that_the_data_lacks_is_refused_with_the_columns_that_there_are(
    tmp_path, teachers, overrides, message
):
    found = refusal(config_of(teachers, *overrides), prompts_of(tmp_path))
    assert found.removeprefix("algorithm.distillation: ").startswith(message)


# Tests of endpoints


def test_an_endpoint_that_gives_the_log_probs_of_the_policys_tokens_passes(server, tmp_path):
    check_teachers(config_of(server.url), char_tokenizer(), prompts_of(tmp_path))
    (request,) = server.requests
    assert (request["model"], request["max_tokens"], request["prompt_logprobs"]) == ("tiny", 1, 0)
    assert request["prompt"][:2] == list(b"1=")
    assert set(b"0123456789") <= set(request["prompt"])


def without(key):
    def change(answer):
        del answer["choices"][0][key]
        return answer

    return change


def cut(answer):
    answer["choices"][0]["prompt_logprobs"].pop()
    return answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fails": lambda number: 500}, "does not answer a request with token ids (InternalServerError: "),
        ({"fails": lambda number: 404}, "does not answer a request with token ids (NotFoundError: "),
        ({"answer": without("prompt_logprobs")}, "the endpoint gave no prompt_logprobs for "),
        ({"answer": cut}, "prompt_logprobs for "),
        ({"answer": lambda answer: {"object": "error"}}, "the endpoint gave no prompt_logprobs for "),
        (
            {"max_model_len": 32},
            "the endpoint accepts 32 tokens (max_model_len), but a row may have 32 tokens and one more token is ",
        ),
        ({"decode": lambda token: chr(token + 1)}, "has another tokenizer than the policy (token 61 is "),
        ({"models": lambda: {"object": "list", "data": []}}, "serves no model"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_an_endpoint_that_cannot_teach_is_refused(server, tmp_path, change, message):
    vars(server).update(change)
    found = refusal(config_of(server.url), prompts_of(tmp_path))
    assert found.startswith(f"{PATHS} '{server.url[7:-3]}'={server.url}: ")
    if "another tokenizer" in message:
        message = "has another tokenizer than the policy (token "
    assert message in found


def test_an_endpoint_that_is_not_there_is_refused(tmp_path):
    assert "does not answer a request with token ids (APIConnectionError: " in refusal(
        config_of("http://127.0.0.1:9/v1"), prompts_of(tmp_path)
    )


def test_a_model_that_the_endpoint_lacks_is_refused_with_those_that_it_has(server, tmp_path):
    config = config_of(f"{{path: '{server.url}', model: large}}")
    assert "has no model large; its models are tiny" in refusal(config, prompts_of(tmp_path))


def test_a_key_is_sent_from_its_environment_variable_and_never_shown(server, tmp_path, monkeypatch):
    config = config_of(f"{{path: '{server.url}', api_key_env: MY_KEY}}")
    assert "api_key_env=MY_KEY: this environment variable is not set" in refusal(config, prompts_of(tmp_path))
    monkeypatch.setenv("MY_KEY", "verysecret1")
    check_teachers(config, char_tokenizer(), prompts_of(tmp_path))
    assert server.keys == ["Bearer verysecret1"]
    server.fails = lambda number: 401
    assert "verysecret1" not in refusal(config, prompts_of(tmp_path))


def test_a_piece_of_a_vocabulary_with_a_mark_for_a_space_is_the_same_token(server, tmp_path):
    server.decode = lambda token: "\u0120" + chr(token)
    check_teachers(config_of(server.url), char_tokenizer(), prompts_of(tmp_path))
