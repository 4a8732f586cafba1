"""Tests of the columns that become the prompt, the use of the chat template, and one-line errors for wrong data."""

import itertools

import pytest

from rltrain.data.prompt_form import template_parts
from tests.prompt_loading import PLAIN_TEMPLATE, error_of, jsonl, load, tokenizer

GSM8K = {"question": "2 + 3?", "answer": "2 + 3 is <<2+3=5>>5\n#### 5"}
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.fixture
def chat_model():
    return tokenizer(chat_template=PLAIN_TEMPLATE)


def texts(*rows, folder, chosen=None, **options):
    return [prompt.text for prompt in load(jsonl(folder, *rows), chosen, **options)]


# Tests of the prompt columns that are recognised


def test_a_question_is_a_user_message_for_a_chat_model_and_text_for_another(tmp_path, chat_model):
    path = jsonl(tmp_path, GSM8K)
    chat, text = load(path, chat_model), load(path)
    assert (chat[0].text, chat[0].messages) == ("[user]2 + 3?[bot]", [{"role": "user", "content": "2 + 3?"}])
    assert (text[0].text, text[0].messages) == ("2 + 3?", None)
    assert chat[0].columns == text[0].columns == GSM8K  # Reward functions also get the column `question`.
    assert chat.described == f"1 row of {path}; prompt = column question, as a user message"
    assert text.described == f"1 row of {path}; prompt = column question, as text"


def test_text_of_the_column_prompt_is_used_as_it_is_also_for_a_chat_model(tmp_path, chat_model):
    path = jsonl(tmp_path, {"prompt": "1+1=", "question": "what is 1+1?"})
    prompts = load(path, chat_model)
    assert [(prompt.text, prompt.messages) for prompt in prompts] == [("1+1=", None)]
    assert prompts.described.endswith("; prompt = column prompt, as text")


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_the_last_turn_of_the_assistant_is_left_out_and_becomes_the_completion(tmp_path, chat_model, name):
    more = [*TURNS, {"role": "user", "content": "?"}]
    prompts = load(jsonl(tmp_path, {name: TURNS}, {name: more}, {name: [*more, TURNS[1]]}), chat_model)
    assert [prompt.text for prompt in prompts] == ["[user]hi[bot]", *["[user]hi[assistant]yo[user]?[bot]"] * 2]
    assert [prompt.columns["completion"] for prompt in prompts] == ["yo", None, "yo"]
    assert prompts.columns == (name, "completion")
    assert prompts.described.endswith(
        f"prompt = column {name}, as chat messages; completion = the assistant's last turn"
    )


def test_sharegpt_speakers_become_roles(tmp_path, chat_model):
    said = [("system", "be brief"), ("human", "hi"), ("gpt", "yo"), ("human", "?"), ("gpt", "!")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in said]}
    (prompt,) = load(jsonl(tmp_path, row), chat_model)
    assert prompt.text == "[system]be brief[user]hi[assistant]yo[user]?[bot]"
    assert prompt.columns["completion"] == "!"


def test_an_instruction_is_followed_by_its_input_where_a_row_has_one(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Say a.", "input": "", "output": "a"},
    ]
    assert texts(*rows, folder=tmp_path) == ["Add.\n\n1 2", "Say a."]
    assert texts({"instruction": "Say a."}, folder=tmp_path) == ["Say a."]


@pytest.mark.parametrize("column", ["solution", "output"])
def test_a_solution_or_output_is_offered_as_answer_too_unless_the_data_has_one(tmp_path, column):
    prompts = load(jsonl(tmp_path, {"problem": "1+1?", column: "2"}))
    assert prompts[0].columns == {"problem": "1+1?", column: "2", "answer": "2"}
    assert prompts.described.endswith(f"; prompt = column problem, as text; answer = column {column}")
    prompts = load(jsonl(tmp_path, {"problem": "1+1?", column: "because", "answer": "2"}))
    assert prompts[0].columns == {"problem": "1+1?", column: "because", "answer": "2"}


def test_data_of_no_known_form_names_its_columns_and_the_way_out(tmp_path):
    path = jsonl(tmp_path, {"text": "a", "label": 1})
    assert error_of(path) == (
        f"data.train={path}: no column is called prompt, messages, conversations, question, problem, instruction; "
        "the columns are text, label; name the column with data.prompt=COLUMN, or write a template such as "
        "data.prompt='{COLUMN} Think step by step.'"
    )


def test_data_of_several_questions_is_not_guessed(tmp_path):
    path = jsonl(tmp_path, {"problem": "a", "question": "b"})
    assert error_of(path) == (
        f"data.train={path}: several columns could be the prompt: question, problem; name one with data.prompt=question"
    )
    assert texts({"problem": "a", "question": "b"}, folder=tmp_path, prompt="problem") == ["a"]


# Tests of the config key data.prompt


def test_a_named_column_holds_text_or_messages(tmp_path, chat_model):
    rows = [{"prompt": "x", "text": "hi"}, {"prompt": "x", "text": TURNS}]
    prompts = load(jsonl(tmp_path, *rows), chat_model, prompt="text")
    assert [prompt.text for prompt in prompts] == ["[user]hi[bot]"] * 2
    assert prompts[1].columns == {"text": TURNS, "completion": "yo"}
    assert "; prompt = column text, as a user message or chat messages; completion" in prompts.described


def test_a_template_is_filled_from_the_row(tmp_path, chat_model):
    path = jsonl(tmp_path, {**GSM8K, "points": 2, "part": 0.5})
    template = "{question} ({points} points, {part}) {{x}}\nAnswer after ####."
    prompts = load(path, chat_model, prompt=template, max_prompt_length=90)
    assert prompts[0].text == "[user]2 + 3? (2 points, 0.5) {x}\nAnswer after ####.[bot]"
    assert prompts.described == (
        f'1 row of {path}; prompt = "{{question}} ({{points}} points, {{ ... rt}}) {{{{x}}}}\\nAnswer after ####.", '
        "as a user message"
    )
    assert load(path, prompt=template)[0].text == "2 + 3? (2 points, 0.5) {x}\nAnswer after ####."


def test_a_column_may_have_any_name_in_a_template(tmp_path):
    assert texts({"the question": "a", "0": "b", "x.y": "c"}, folder=tmp_path, prompt="{the question}{0}{x.y}") == [
        "abc"
    ]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{", "Single '{'"),
        ("{question", "expected '}' before end of string"),
        ("question}", "Single '}'"),
        (r"{question} in \boxed{}", "'{}' names no column"),
        ("{question!r}", "'{question!r}' names no column"),
        ("{question:>9}", "'{question:>9}' names no column"),
        ("{question:{question}}", "'{question:{question}}' names no column"),
        ("{{question}}", "a template without a column would give the same prompt for every row"),
    ],
)
def test_a_template_with_wrong_braces_is_refused(tmp_path, template, said):
    message = error_of(jsonl(tmp_path, GSM8K), prompt=template)
    assert message.startswith(f"data.prompt={template}: {said}")
    assert message.endswith("; write each column as {COLUMN}, and a brace that is text as {{ or }}")


def test_a_column_that_is_not_there_names_those_that_are(tmp_path):
    path = jsonl(tmp_path, GSM8K)
    assert error_of(path, prompt="qestion") == (
        f"data.prompt=qestion: data.train={path} has no column 'qestion'; the columns are question, answer (did "
        "you mean question?)"
    )
    assert error_of(path, prompt="Q: {qestion} A:") == (
        f"data.prompt=Q: {{qestion}} A:: data.train={path} has no column 'qestion'; the columns are question, "
        f"answer (did you mean question?); write each column as {{COLUMN}}, and a brace that is text as {{{{ or }}}}"
    )


@pytest.mark.parametrize(
    ("value", "prompt", "said"),
    [
        (None, "{question}", ":2: no value in column 'question', which data.prompt inserts as text"),
        (TURNS, "{question}", ":2: a value of type list in column 'question'"),
        (True, "{question}", ":2: a value of type bool in column 'question'"),
        (None, None, ":2: no prompt in column 'question'; give each row text or a list of messages in that column"),
        ("", None, ":2: the prompt is empty"),
        (5, None, ":2: the prompt is neither text nor chat messages"),
        ([], None, ":2: the prompt is empty"),
        ([TURNS[1]], None, ":2: the prompt is empty"),
        (
            [{"from": "alien", "value": "hi"}],
            None,
            ":2: a message is from 'alien', but must be from one of human, user, gpt",
        ),
        ([{"from": ["x"], "value": "hi"}], None, ":2: a message is from ['x'], but must be from one of"),
        ([{"from": "human"}], None, ":2: the content of the message with role 'user' is None; write the content"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            None,
            ":2: the content of the message with role 'user' is a list of parts; write the content as one text",
        ),
        (
            [{"role": "usr", "content": "hi"}],
            None,
            ":2: the role 'usr' of a chat message is unknown; use system, developer, user, assistant, tool, or a role",
        ),
        ([{"role": "us\ner", "content": "hi"}], None, r":2: the role 'us\ner' of a chat message is unknown"),
    ],
)
def test_a_row_without_a_usable_prompt_is_named(tmp_path, chat_model, value, prompt, said):
    path = jsonl(tmp_path, GSM8K, {"question": value})
    assert error_of(path, chat_model, prompt=prompt).startswith(f"data.train={path}{said}")


# Tests of the settings data.system_prompt and data.chat


def test_a_system_prompt_comes_before_the_user_and_before_messages(tmp_path, chat_model):
    rows = [{"prompt": "hi"}, {"prompt": TURNS[:1]}]
    prompts = load(jsonl(tmp_path, *rows), chat_model, system_prompt="be brief")
    assert [prompt.text for prompt in prompts] == ["[system]be brief[user]hi[bot]"] * 2
    assert prompts.described.endswith(
        "; prompt = column prompt, as a user message or chat messages after data.system_prompt"
    )


def test_two_system_prompts_are_refused(tmp_path, chat_model):
    path = jsonl(tmp_path, {"messages": [{"role": "system", "content": "x"}, *TURNS]})
    message = error_of(path, chat_model, system_prompt="be brief")
    assert message.startswith(f"data.train={path}:1: the chat messages begin with a system message, but data.")


COMPLETE, QUESTION, TEMPLATE = ("prompt", None), ("question", None), ("question", "{question}")
# Maps each pair (column, data.prompt) to the values of data.chat with which a chat model gets the prompt as a user
# message.
CASES = {
    COMPLETE: ["always"],
    QUESTION: ["auto", "always"],
    TEMPLATE: ["auto", "always"],
    ("prompt", "prompt"): ["always"],
    ("prompt", "{prompt}"): ["auto", "always"],
}


@pytest.mark.parametrize(("case", "chat"), [*itertools.product(CASES, ["auto", "always", "never"])])
def test_data_chat_decides_whether_text_goes_through_the_chat_template(tmp_path, chat_model, case, chat):
    column, prompt = case
    expected = "[user]hi[bot]" if chat in CASES[case] else "hi"
    assert texts({column: "hi"}, folder=tmp_path, chosen=chat_model, prompt=prompt, chat=chat) == [expected]


def test_what_needs_a_chat_template_says_so_without_one(tmp_path):
    path = jsonl(tmp_path, {"prompt": "hi"})
    way_out = "the model's tokenizer has no chat template; use a chat model, or write the text around the question"
    assert error_of(path, chat="always").startswith(f"data.chat=always: {way_out}")
    assert error_of(path, system_prompt="be brief").startswith(f"data.system_prompt: {way_out}")


def test_chat_messages_are_refused_where_the_chat_template_is_forbidden(tmp_path, chat_model):
    path = jsonl(tmp_path, {"messages": TURNS})
    assert error_of(path, chat_model, chat="never") == (
        f"data.train={path}:1: the row has chat messages, which data.chat=never forbids; use data.chat=auto or "
        "a text column"
    )


def test_the_parts_of_a_template_are_its_text_and_its_columns():
    assert template_parts("Q: {q}{{}} {a}.") == [("Q: ", "q"), ("{", None), ("}", None), (" ", "a"), (".", None)]


def test_the_fingerprint_follows_the_values_that_reward_functions_get(tmp_path):
    def fingerprint(**row):
        return load(jsonl(tmp_path, {"question": "1?", **row})).fingerprint()

    assert fingerprint(solution="1") == fingerprint(solution="1")
    assert fingerprint(solution="1") != fingerprint(solution="2")
    assert (
        load(jsonl(tmp_path, GSM8K), prompt="{question}").fingerprint()
        != load(jsonl(tmp_path, GSM8K), prompt="{question} ").fingerprint()
    )
