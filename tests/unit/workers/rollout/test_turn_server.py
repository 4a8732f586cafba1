"""Tests of the part of a rollout worker that samples turns for environment processes."""

import threading

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.chat_model import TEMPLATE, save_chat_model
from tests.made_tokenizers import byte_level
from workers.rollout.messages import Completion
from workers.rollout.turn_server import turn_server
from workers.rollout.turns import TurnFormat, TurnRequest


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_chat_model(tmp_path_factory.mktemp("model") / "chat"))


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "f"}</tool_call>'


def serving(tokenizer, tools):
    made = turn_server(tokenizer, TurnFormat(tools, "hermes"), [tokenizer.eos_token_id])
    yield made
    made.renderer.close()


@pytest.fixture
def server(tokenizer):
    yield from serving(tokenizer, [])


@pytest.fixture
def server_with_tools(tokenizer):
    yield from serving(tokenizer, [TOOL])


def turn(number, text, **changed):
    values = {
        "key": (number, 0, 0), "context_ids": [], "action_ids": [], "messages": [{"role": "user", "content": text}],
        "room": 50, "max_prompt_tokens": 40, "max_tokens": 10, "max_message_tokens": 4, "temperature": 1.0, "seed": 0,
    }  # fmt: skip
    return TurnRequest(**(values | changed))


def completion(request, tokenizer, text):
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Completion(request.key, ids, [0.0] * len(ids), "stop", [0] * len(ids))


def test_environment_workers_in_different_threads_get_the_turns_of_their_own_messages(server, tokenizer):
    def ask(client):
        for n in range(8):
            (request,), ended = server.begin(f"client {client}", [turn(client * 100 + n, f"{client} {n}")])
            assert ended == []
            server.deliver([completion(request, tokenizer, f"{client}/{n}")])

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for client in range(4):
        found = server.take(f"client {client}")
        assert [one.text for one in found] == [f"{client}/{n}" for n in range(8)]
        assert all(f"{client} {n}" in tokenizer.decode(one.observation_ids) for n, one in enumerate(found))


def test_a_prompt_is_rendered_once_for_all_trajectories_of_its_group(server, monkeypatch):
    rendered, render = [], server.renderer.prompt_ids
    monkeypatch.setattr(server.renderer, "prompt_ids", lambda messages: rendered.append(messages) or render(messages))
    texts = ["one", "two", *(f"text {number}" for number in range(64))]
    for sample in range(3):
        for number, text in enumerate(texts[:2]):
            (request,), _ = server.begin("client", [turn(number, text, key=(number, sample, 0))])
            assert list(request.prompt_ids) == render([{"role": "user", "content": text}])
    assert len(rendered) == 2
    # A prompt that was not needed for long is forgotten, and a prompt with other tools is another prompt.
    server.begin("client", [turn(9, text) for text in texts[2:]])
    server.begin("client", [turn(0, "one", key=(0, 3, 0))])
    assert len(rendered) == 2 + 64 + 1
    (request,), _ = server.begin("client", [turn(0, "one", key=(0, 4, 0), tools=[TOOL], max_prompt_tokens=999)])
    assert "f()" in server.tokenizer.decode(request.prompt_ids)


def test_an_answer_to_a_turn_that_was_aborted_is_dropped(server, tokenizer):
    (request,), _ = server.begin("a", [turn(1, "old")])
    server.abort()
    (other,), _ = server.begin("a", [turn(2, "new")])
    server.deliver([completion(request, tokenizer, "late"), completion(other, tokenizer, "on time")])
    assert [(one.key, one.text) for one in server.take("a")] == [((2, 0, 0), "on time")]


def test_a_prompt_above_its_limit_and_messages_without_room_get_no_action(server):
    first, later = turn(1, "x" * 60), turn(2, "more", context_ids=[1] * 20, action_ids=[1], room=5, key=(2, 0, 1))
    requests, ended = server.begin("a", [first, later])
    assert requests == []
    assert "above rollout.max_prompt_length=40" in ended[0].error
    assert (ended[1].full, ended[1].error) == (True, "")


def test_a_long_message_is_cut_off_with_a_mark(server, tokenizer):
    action = tokenizer.encode("hi", add_special_tokens=False)
    asked = turn(1, "0123456789", key=(1, 0, 1), context_ids=[1], action_ids=action, room=200)
    (request,), _ = server.begin("a", [asked])
    server.deliver([completion(request, tokenizer, "ok")])
    (found,) = server.take("a")
    assert [message["content"] for message in found.messages] == ["0123\n[cut off after 4 tokens]"]
    assert "0123\n[cut off" in tokenizer.decode(found.observation_ids)


def test_a_message_with_more_tokens_than_characters_is_cut_off_too():
    specials = ["<|im_start|>", "<tool_call>", "</tool_call>"]
    byte_pairs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|im_end|>", additional_special_tokens=specials
    )
    byte_pairs.chat_template = TEMPLATE
    assert len(byte_pairs.encode("ßßß", add_special_tokens=False)) == 6  # Each of the 6 bytes is one token.
    made = turn_server(byte_pairs, TurnFormat([], "hermes"), [byte_pairs.eos_token_id])
    asked = turn(1, "ßßß", key=(1, 0, 1), context_ids=[1], action_ids=[1], room=200)
    (request,), _ = made.begin("a", [asked])
    made.deliver([completion(request, byte_pairs, "ok")])
    made.renderer.close()
    (found,) = made.take("a")
    assert [message["content"] for message in found.messages] == ["ßß\n[cut off after 4 tokens]"]


def test_a_new_context_renders_the_whole_conversation_and_cuts_no_prompt_and_no_answer(server, tokenizer):
    messages = [
        {"role": "system", "content": "a long text of the system"},
        {"role": "user", "content": "a long question"},
        {"role": "assistant", "content": "a long answer"},
        {"role": "user", "content": "0123456789"},
    ]
    asked = turn(1, "", key=(1, 0, 3), messages=messages, room=300, max_prompt_tokens=1)
    (request,), ended = server.begin("a", [asked])
    assert ended == []
    seen = [*messages[:3], {"role": "user", "content": "0123\n[cut off after 4 tokens]"}]
    assert list(request.prompt_ids) == tokenizer.apply_chat_template(
        seen, add_generation_prompt=True, return_dict=False
    )
    assert request.max_tokens == 10
    _, (full,) = server.begin("a", [turn(2, "", key=(2, 0, 3), messages=messages, room=20)])
    assert full.full


def test_only_an_action_with_a_malformed_call_comes_with_its_text_as_the_model_wrote_it(server_with_tools, tokenizer):
    server, texts = server_with_tools, ["hello", CALL, '<tool_call>{"k": }</tool_call> end']
    requests, _ = server.begin("a", [turn(number, "hi", max_prompt_tokens=200) for number in range(3)])
    server.deliver([completion(*one) for one in zip(requests, [tokenizer] * 3, texts, strict=True)])
    assert [one.written for one in server.take("a")] == ["", "", texts[2]]


@pytest.mark.parametrize(
    ("tools", "of_turn", "calls"), [([], None, 0), ([TOOL], None, 1), ([], [TOOL], 1), ([TOOL], [], 0)]
)
def test_a_text_is_read_as_a_call_only_if_the_turn_has_tools(tokenizer, tools, of_turn, calls):
    for server in serving(tokenizer, tools):
        (request,), _ = server.begin("a", [turn(1, "hi", tools=of_turn, max_prompt_tokens=200)])
        server.deliver([completion(request, tokenizer, f" {CALL}\n")])
        (found,) = server.take("a")
        assert len(found.action.calls) == calls
        assert found.action.content == ("" if calls else CALL)
