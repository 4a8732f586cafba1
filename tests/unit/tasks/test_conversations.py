import importlib
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

from rltrain import environments
from rltrain.environments.higher_lower import HigherLower
from rltrain.environments.lookup import Lookup
from rltrain.rewards.final_answer import exact_answer
from rltrain.tasks import TASKS, ConversationTask
from rltrain.tasks.base import split_of
from rltrain.tasks.chat_tokenizer import sampled, schemas
from rltrain.tasks.higher_lower import still_possible
from rltrain.tasks.lookup import path
from rltrain.tasks.tiny_model import IGNORED, make_start, messy_batch, start_path, tiny_model
from rltrain.tasks.tokenizer import EOS_ID, PAD_ID

NAMES = ["lookup", "higher_lower"]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": 3}}\n</tool_call>'


def conversation_task(name: str) -> ConversationTask:
    task = TASKS[name]
    assert isinstance(task, ConversationTask)
    return task


LOOKUP, HIGHER_LOWER = map(conversation_task, NAMES)


@pytest.fixture(params=NAMES)
def task(request: pytest.FixtureRequest) -> ConversationTask:
    return conversation_task(request.param)


def call(key: int) -> dict:
    function = {"name": "lookup", "arguments": {"key": key}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


CONVERSATION = [
    {"role": "user", "content": "Start at 3, hops: 1"},
    call(3),
    {"role": "tool", "name": "lookup", "content": "7"},
    {"role": "assistant", "content": "7"},
]


def rendered(task: ConversationTask, messages: list, *, prompt: bool = False) -> str:
    text = task.tokenizer().apply_chat_template(
        messages, tools=schemas(task.tools), tokenize=False, add_generation_prompt=prompt
    )
    return str(text)


# rows


@pytest.mark.parametrize(
    ("start", "hops", "digits"), [(0, 1, [0, 7]), (0, 3, [0, 7, 8, 4]), (3, 2, [3, 0, 7]), (4, 3, [4, 9, 6, 2])]
)
def test_following_pointers_by_hand(start, hops, digits):
    assert path("7150932846", start, hops) == digits[: hops + 1]


def test_the_answer_of_a_row_is_what_the_tool_shows_after_the_last_hop():
    for row in LOOKUP.prompts("train", 0, 300):
        assert row["question"] == f"Start at {row['start']}, hops: {row['hops']}"
        environment, digit = Lookup(), str(row["start"])
        environment.reset(row["table"])
        for _ in range(row["hops"]):
            digit = environment.lookup(int(digit))
        assert digit == row["answer"]


def test_before_the_last_call_each_digit_is_the_answer_with_probability_one_tenth():
    """No key is looked up twice, so the earlier calls do not restrict the entry that the last call returns."""
    for row in LOOKUP.prompts("train", 0, 300):
        *keys, _ = path(row["table"], row["start"], row["hops"])
        assert len(set(keys)) == row["hops"]
        answers = set()
        for digit in range(10):
            table = row["table"][: keys[-1]] + str(digit) + row["table"][keys[-1] + 1 :]
            *same, answer = path(table, row["start"], row["hops"])
            assert same == keys
            answers.add(answer)
        assert answers == set(range(10))


def test_starts_hops_and_answers_are_spread_evenly():
    rows = LOOKUP.prompts("val", 0, 3000)
    for column, kinds in [("start", 10), ("answer", 10)]:
        counts = Counter(row[column] for row in rows)
        assert len(counts) == kinds
        assert all(230 < count < 370 for count in counts.values())
    assert set(Counter(row["hops"] for row in rows)) == {1, 2, 3}


def test_no_lookup_can_be_in_both_splits():
    for split in ("train", "val"):
        for row in LOOKUP.prompts(split, 1, 200):
            assert split_of(f"{row['table']}/{row['start']}/{row['hops']}") == split


def test_the_same_seed_gives_the_same_rows(task):
    rows = task.prompts("train", 0, 60)
    assert task.prompts("train", 0, 60) == rows
    assert task.prompts("train", 0, 20) == rows[:20]


def test_another_seed_gives_other_tables():
    tables = {row["table"] for row in LOOKUP.prompts("train", 0, 100)}
    assert len(tables) == 100
    assert not tables & {row["table"] for row in LOOKUP.prompts("train", 1, 100)}


def test_an_unknown_split_and_a_negative_count_are_refused(task):
    with pytest.raises(ValueError, match=r"split='test'.*train, val"):
        task.prompts("test", 0, 1)
    with pytest.raises(ValueError, match="count=-1"):
        task.prompts("train", 0, -1)


def test_the_environment_of_a_task_exists(task):
    module, _, name = task.environment.partition(":")
    assert getattr(importlib.import_module(module), name) in (Lookup, HigherLower)


# Tests of the chat template and its tokens


def test_a_conversation_with_a_tool_is_chatml_with_calls_in_the_form_of_hermes():
    text = rendered(LOOKUP, CONVERSATION)
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nYou can call these functions:\n<tools>\n")
    assert '"name": "lookup"' in system
    assert "The key of the entry, from 0 to 9." in system
    assert rest == (
        "<|im_start|>user\nStart at 3, hops: 1<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n"
    )


def test_text_before_a_call_and_several_calls_and_results_keep_their_order():
    first, second = call(3)["tool_calls"][0], call(5)["tool_calls"][0]
    text = rendered(
        LOOKUP,
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "I look.", "tool_calls": [first, second]},
            {"role": "tool", "content": "7"},
            {"role": "tool", "content": "1"},
        ],
        prompt=True,
    )
    assert text.partition("<|im_start|>assistant\n")[2] == (
        f"I look.\n{CALL}\n{CALL.replace('3', '5')}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_system_message_stands_before_the_tools():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
    assert rendered(LOOKUP, messages).startswith(
        "<|im_start|>system\nBe brief.\n\nYou can call these functions:\n<tools>\n"
    )
    assert rendered(HIGHER_LOWER, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
    )


def test_a_longer_conversation_begins_with_the_text_of_a_shorter_one():
    for count in range(1, len(CONVERSATION)):
        assert rendered(LOOKUP, CONVERSATION).startswith(rendered(LOOKUP, CONVERSATION[:count]))
    assert rendered(LOOKUP, CONVERSATION).startswith(rendered(LOOKUP, CONVERSATION[:1], prompt=True))


def test_a_call_is_three_tokens_and_a_result_of_a_tool_ten():
    tokenizer = LOOKUP.tokenizer()
    assert len(tokenizer.encode(CALL)) == 3
    turn = "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer.encode(turn)) == 10


def test_prompts_have_at_most_the_promised_length(task):
    tokenizer = task.tokenizer()
    for row in task.prompts("val", 0, 50):
        text = rendered(task, [{"role": "user", "content": row["question"]}], prompt=True)
        assert len(tokenizer.encode(text)) <= task.max_prompt_length


def test_the_tokenizer_keeps_every_text_and_its_ids_also_after_saving(task, tmp_path: Path):
    tokenizer = task.tokenizer()
    tiny_model().config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [
        rendered(LOOKUP, CONVERSATION),
        "error: no entry 'x'",
        "higher lower",
        "user\n",
        "  a \n\t b",
        "<tool_call>{",
    ]
    for text in texts:
        ids = tokenizer.encode(text)
        assert loaded.encode(text) == ids
        assert tokenizer.decode(ids) == loaded.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<|im_start|>", "").replace(
            "<|im_end|>", ""
        )
    assert len(tokenizer) == len(loaded) == 128
    assert (loaded.eos_token, loaded.eos_token_id, loaded.pad_token_id) == ("<|im_end|>", EOS_ID, PAD_ID)
    assert loaded.get_chat_template() == tokenizer.get_chat_template()


def test_only_the_two_marks_of_a_message_and_the_padding_are_control_tokens(task):
    special = {one.content for one in task.tokenizer().added_tokens_decoder.values() if one.special}
    assert special == {"<pad>", "<unk>", "<|im_start|>", "<|im_end|>"}


# flawed conversations


def test_the_trained_tokens_are_what_the_assistant_says_and_its_end_tokens():
    tokenizer = LOOKUP.tokenizer()
    ids = tokenizer.encode(rendered(LOOKUP, CONVERSATION))
    trained = sampled(ids, tokenizer)
    said = tokenizer.decode([token for token, one in zip(ids, trained, strict=True) if one])
    assert said == f"{CALL}<|im_end|>7<|im_end|>"


def test_supervised_rows_end_with_an_end_token_and_keep_the_limit_of_the_task(task):
    tokenizer = task.tokenizer()
    for rows in messy_batch(task, tokenizer, Random(0), 64):
        ids, labels = rows.ids, rows.labels
        assert (labels[:, -1] == EOS_ID).all()
        assert (labels[:, 0] == IGNORED).all()
        trained = labels != IGNORED
        assert torch.equal(labels[trained], ids[trained])
        first = trained[0].nonzero()[0].item()
        assert first <= task.max_prompt_length
        assert ids.shape[1] - first <= task.max_response_length


def test_flawed_lookups_are_mostly_wrong_and_mostly_have_a_wrong_number_of_calls():
    rng, outcomes, rows = Random(0), Counter(), LOOKUP.prompts("train", 0, 3000)
    for row in rows:
        messages = LOOKUP.mess(row, rng)
        calls = sum("tool_calls" in message for message in messages)
        outcomes["right"] += exact_answer("", messages[-1]["content"], answer=row["answer"], finish_reason="stop")
        outcomes["calls"] += calls == row["hops"]
        assert calls <= LOOKUP.max_turns - 1
    assert 0.15 < outcomes["right"] / len(rows) < 0.3
    assert 0.25 < outcomes["calls"] / len(rows) < 0.4


def test_a_seventh_to_a_half_of_the_flawed_games_are_won():
    rng, won, rows = Random(0), 0, HIGHER_LOWER.prompts("train", 0, 3000)
    for row in rows:
        messages = HIGHER_LOWER.mess(row, rng)
        guesses = [message for message in messages if message["role"] == "assistant"]
        assert 1 <= len(guesses) <= 5
        assert messages[-1] is guesses[-1]
        won += len(guesses) < 5
    assert 1 / 7 < won / len(rows) < 1 / 2


@pytest.mark.parametrize(
    ("observation", "left"), [("higher", "89"), ("lower", "3456"), ("right", "3456789"), ("one digit", "3456789")]
)
def test_an_answer_leaves_the_digits_that_fit(observation, left):
    assert "".join(still_possible(list("3456789"), "7", observation)) == left


# starting models


def test_a_starting_model_is_the_same_every_time_and_is_saved_with_its_chat_template(task, tmp_path: Path):
    paths = [make_start(task, tmp_path / name, seed=seed, steps=2) for name, seed in [("a", 0), ("b", 0), ("c", 1)]]
    first, again, other = [(one / "model.safetensors").read_bytes() for one in paths]
    assert first == again != other
    assert AutoTokenizer.from_pretrained(paths[0]).get_chat_template() == task.tokenizer().get_chat_template()


def test_a_changed_environment_leads_to_a_new_starting_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = start_path(LOOKUP)
    for source in Path(environments.__path__[0]).glob("*.py"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(environments, "__path__", [str(tmp_path)])
    assert start_path(LOOKUP) == before
    (tmp_path / "lookup.py").write_text((tmp_path / "lookup.py").read_text() + "# changed\n")
    assert start_path(LOOKUP) != before
