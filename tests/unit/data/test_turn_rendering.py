"""Tests that prompts and observations add exactly the text that the chat template writes between answers."""

import random
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from rltrain.data.chat_templates import ChatTemplates, TemplateError
from rltrain.data.turn_rendering import TurnRenderer
from rltrain.tasks.tokenizer import EOS_ID, char_tokenizer
from tests.made_templates import CHATML_TOOLS, NO_NEWLINE, PLAIN_TEXT, SHAPES, STRIPS_THINKING, shaped
from tests.made_tokenizers import BOS_TEMPLATE, CHATML, made


def add(a: int, b: int = 2) -> str:
    """Add two numbers.

    Args:
        a: a number.
        b: another number.
    """
    return str(a + b)


TOOLS = [get_json_schema(add)]
ASK = {"role": "user", "content": "ask"}
NAMES = ["<|im_end|>", "<|im_start|>", "</s>", "<s>", "<|user|>", "<|assistant|>", "<|observation|>"]


@pytest.fixture(scope="module")
def templates():
    with ChatTemplates() as made:
        yield made


@pytest.fixture(scope="module")
def renderer(templates):
    """Return a function that returns the renderer of a template shape, and creates each renderer only once."""
    made: dict[tuple[str, bool], TurnRenderer] = {}

    def get(shape, tools=True):
        if (shape, tools) not in made:
            tokenizer, stops = shaped(shape)
            given = TOOLS if tools else []
            made[shape, tools] = TurnRenderer(tokenizer, tools=given, stop_ids=stops, templates=templates)
        return made[shape, tools]

    return get


def of_template(templates, template, *, stops=("<|im_end|>",), tools=TOOLS, kind="byte_level") -> TurnRenderer:
    tokenizer = made(kind, chat_template=template)
    ids = tokenizer.convert_tokens_to_ids([*stops])
    return TurnRenderer(tokenizer, tools=tools, stop_ids=ids, templates=templates)


def tool(content, number=0):
    return {"role": "tool", "content": content, "name": "add", "tool_call_id": f"call0000{number}"}


def user(content):
    return {"role": "user", "content": content}


def says(renderer, messages, action):
    """Return the text of an observation."""
    return renderer.decoded(renderer.observation_ids(messages, action))


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_four_shapes_can_be_extended(renderer, shape, tools):
    assert renderer(shape, tools).probe() is None


def test_what_an_observation_of_chatml_is(renderer):
    chatml = renderer("chatml")
    end, other = chatml.tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    rest = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert says(chatml, [tool("4")], [65, end]) == rest
    assert says(chatml, [tool("4")], [65, other]) == rest, "another sampled end token replaces the template's end token"
    for cut in ([65], [], [end, 65]):
        assert says(chatml, [tool("4")], cut) == f"<|im_end|>{rest}"
    both = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    assert both in says(chatml, [tool("4"), tool("5", 1)], [end])
    assert says(chatml, [user("and?")], [end]) == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


def test_what_an_observation_without_a_newline_is(renderer):
    plain = renderer("no newline")
    end = plain.tokenizer.convert_tokens_to_ids("</s>")
    assert says(plain, [user("and?")], [end]) == "[INST] and?[/INST]"
    assert says(plain, [user("and?")], [65]) == "</s>[INST] and?[/INST]"
    assert says(plain, [tool("4")], [end]) == '[RESULT] {"content": "4", "id": "call00000"}[/RESULT]'


def test_an_opener_that_the_policy_sampled_is_not_added_again(renderer):
    opener = renderer("opener")
    asked, seen, end = opener.tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>", "</s>"])
    assert says(opener, [user("and?")], [65, asked]) == "\nand?<|assistant|>"
    assert says(opener, [tool("4")], [65, seen]) == "\n4<|assistant|>"
    assert says(opener, [user("and?")], [65]) == "<|user|>\nand?<|assistant|>"
    assert says(opener, [tool("4")], [65, asked]) == "<|observation|>\n4<|assistant|>", "the right opener is added"
    assert says(opener, [tool("4")], [65, end]) == "<|observation|>\n4<|assistant|>"


def strips_thinking(renderer):
    """Return whether the template removes `<think>...</think>` from an answer before a user's message."""
    answer = {"role": "assistant", "content": f"<think>\n{renderer.mark}\n</think>\n\nb"}
    return renderer.mark not in renderer.render([ASK, answer, ASK], opened=True)


def test_thoughts_are_kept_where_the_template_would_strip_them(renderer):
    assert strips_thinking(renderer("strips thinking"))
    assert not strips_thinking(renderer("chatml"))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_prompt_is_the_template_applied_once(renderer, shape):
    chosen = renderer(shape)
    for messages in ([ASK], [{"role": "system", "content": "be"}, ASK]):
        expected = chosen.tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)
        assert chosen.prompt_ids(messages) == expected["input_ids"]


def test_a_prompt_has_one_begin_token_and_control_token_names_in_it_are_text(templates):
    twice = of_template(templates, "<s>" + BOS_TEMPLATE + "[assistant]", stops=["</s>"], tools=[])
    assert twice.prompt_ids([ASK]).count(twice.tokenizer.bos_token_id) == 1
    chatml = of_template(templates, CHATML_TOOLS)
    text = chatml.decoded(chatml.prompt_ids([user("</s><s>")]))
    assert "user\n</s><s><|im_end|>" in text
    assert chatml.tokenizer.bos_token_id not in chatml.prompt_ids([user("</s><s>")])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_control_token_that_a_tool_spells_is_text(renderer, shape, name):
    chosen = renderer(shape)
    for messages in ([tool(f"a{name}b")], [tool(name), tool(name, 1)], [{**tool("x"), "name": name}]):
        safe = [{**message, "content": message["content"].replace(name, "x")} for message in messages]
        ids, plain = chosen.observation_ids(messages, [65]), chosen.observation_ids(safe, [65])
        assert skeleton(chosen, ids) == skeleton(chosen, plain)
        assert chosen.decoded(ids).count(name) - chosen.decoded(plain).count(name) == sum(
            message["content"].count(name) for message in messages
        )


def test_text_that_no_tokenizer_reads_is_replaced(renderer):
    chatml = renderer("chatml")
    assert "a\ufffdb\ufffd<|im_end|>" in says(chatml, [user("a\ud800b\U000f0000<|im_end|>")], [65])
    assert "a\ufffdb" in chatml.decoded(chatml.prompt_ids([user("a\ud800b")]))
    assert "a\U000f0000b" in says(chatml, [user("a\U000f0000b")], [65])


def test_the_text_of_an_action_keeps_calls_and_drops_its_end(renderer):
    chatml = renderer("chatml")
    end = chatml.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = chatml.encoded("<think>x</think><tool_call>\n{}\n</tool_call><|im_start|>")
    assert chatml.action_text([*ids, end]) == "<think>x</think><tool_call>\n{}\n</tool_call><|im_start|>"
    assert chatml.action_text(ids) == chatml.action_text([*ids, end])
    assert chatml.action_text([]) == chatml.action_text([end]) == ""


def test_an_observation_has_messages_and_none_of_the_assistant(renderer):
    for messages in ([], [{"role": "assistant", "content": "x"}]):
        with pytest.raises(ValueError, match="at least one message, and no message of the assistant"):
            renderer("chatml").observation_ids(messages, [65])


REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{% endfor %}"
)


def test_a_template_that_refuses_tools_says_so(templates):
    refusing = of_template(templates, REFUSES_TOOLS + CHATML_TOOLS)
    with pytest.raises(TemplateError, match="no tools"):
        refusing.observation_ids([tool("4")], [65])
    assert "no tools" in refusing.probe()
    assert refusing.probe(roles=["user"]) is None


def test_a_template_that_refuses_two_calls_writes_two_results(templates):
    one = of_template(templates, ONE_CALL + CHATML_TOOLS)
    both = of_template(templates, CHATML_TOOLS)
    results = [tool("4"), tool("5", 1)]
    assert one.observation_ids(results, [65]) == both.observation_ids(results, [65])
    assert one.probe() is None


def test_arguments_are_text_where_the_template_wants_that(templates):
    wants_text = CHATML_TOOLS.replace("(call.function.arguments | tojson)", "call.function.arguments")
    chosen = of_template(templates, wants_text)
    assert isinstance(chosen.anchor([tool("4")]).message["tool_calls"][0]["function"]["arguments"], str)
    assert chosen.probe() is None


def test_a_template_that_writes_no_calls_still_writes_results(templates):
    chosen = of_template(templates, CHATML, tools=[])
    assert chosen.anchor([tool("4")]) is chosen.answer_anchor
    assert says(chosen, [tool("4")], [65]) == "<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    assert chosen.probe() is None


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, "does not show the tool add to the model"),
        (CHATML_TOOLS.replace("{%- elif message.role == 'tool' %}", "{%- elif message.role == 'tool' %}{%- elif 0 %}"),
         "leaves out messages of the role tool"),
        (CHATML_TOOLS.replace("add_generation_prompt", "false"), "does not open the assistant's"),
        (CHATML_TOOLS.replace("message in messages", "message in messages[-4:]"),
         "leaves out messages of the role user"),
        ("{{- messages | length }}" + CHATML_TOOLS, "the built conversation contains"),
        ("{% for m in messages[:-1] %}<s>{% endfor %}" + CHATML_TOOLS, "control token"),
        ("{% if x %}", "Unexpected end of template"),
        (None, "no chat template"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_extended_is_refused_in_one_line(templates, template, said):
    chosen = of_template(templates, template)
    line = chosen.probe()
    assert said in line
    assert "\n" not in line


class Wrong(TurnRenderer):
    """A renderer that applies the function `change` to the token ids of each observation."""

    change = staticmethod(lambda renderer, ids: ids)

    def observation_ids(self, messages, action_ids):
        return self.change(self, super().observation_ids(messages, action_ids))


@pytest.mark.parametrize(
    "change",
    [
        lambda renderer, ids: [renderer.tokenizer.bos_token_id, *ids],
        lambda renderer, ids: [*renderer.prompt_ids([ASK])[:5], *ids],
        lambda renderer, ids: ids[1:],
        lambda renderer, ids: ids[:-1],
        lambda renderer, ids: [renderer.end_id, *ids],
        lambda renderer, ids: [id for id in ids if id != renderer.encoded("\n")[0]],
    ],
    ids=["begin token", "system prompt", "no newline", "not open", "end twice", "no newlines"],
)
@pytest.mark.parametrize("shape", ["chatml", "strips thinking"])
def test_a_renderer_that_is_wrong_is_found_out(templates, shape, change):
    tokenizer, stops = shaped(shape)
    wrong = Wrong(tokenizer, tools=TOOLS, stop_ids=stops, templates=templates)
    assert wrong.probe() is None
    wrong.change = change
    assert wrong.probe() is not None


def test_an_end_token_at_which_the_engine_does_not_stop_is_refused(templates):
    assert "ends an answer with <|im_end|>" in of_template(templates, CHATML_TOOLS, stops=["</s>"]).probe()
    tokenizer, stops = shaped("opener")
    assert "ends an answer with <|observation|>" in (
        TurnRenderer(tokenizer, tools=TOOLS, stop_ids=stops[:1], templates=templates).probe()
    )


def test_tools_that_move_to_the_last_question_are_refused_only_if_users_write(templates):
    moving = NO_NEWLINE.replace(
        "{%- if m.role == 'user' %}",
        "{%- if m.role == 'user' %}"
        "{% if not (messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list) %}"
        "[TOOLS]{{ tools | tojson }}{% endif %}",
    ).replace("{%- if tools %}[TOOLS]{{- tools | tojson }}[/TOOLS]{% endif %}", "")
    chosen = of_template(templates, moving, stops=["</s>"])
    assert "if a user's message follows an answer" in chosen.probe()
    assert chosen.probe(roles=["tool"]) is None


@pytest.mark.parametrize("opened", ["<think>\n", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("template", [CHATML_TOOLS, STRIPS_THINKING])
def test_a_template_may_open_or_close_a_thought_for_the_model(templates, template, opened):
    literal = opened.replace("\n", "\\n")
    thinks = template.replace(
        "'<|im_start|>assistant\n' }}{% endif %}", f"'<|im_start|>assistant\n{literal}' }}}}{{% endif %}}"
    )
    assert thinks != template
    chosen = of_template(templates, thinks)
    assert says(chosen, [user("x")], [65]).endswith(f"assistant\n{opened}")
    assert chosen.probe() is None


def test_a_template_may_keep_the_white_space_of_a_thought_that_it_strips(templates):
    said = "{%- set said = message.content.split('</think>')[-1] %}{{- said }}"
    strips = CHATML_TOOLS.replace("{{- message.content }}", said).replace("\n<tool_call>\n", "<|user|>")
    assert "<|user|>{" in strips
    chosen = of_template(templates, strips)
    assert strips_thinking(chosen)
    assert chosen.probe() is None


@pytest.mark.parametrize("kind", ["metaspace", "legacy_llama"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokenizers_of_other_kinds(templates, shape, kind):
    tokenizer, stops = shaped(shape, kind)
    assert TurnRenderer(tokenizer, tools=TOOLS, stop_ids=stops, templates=templates).probe() is None


def test_the_built_in_tokenizer_with_a_template_of_text(templates):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = PLAIN_TEXT
    chosen = TurnRenderer(tokenizer, stop_ids=[EOS_ID], templates=templates)
    assert chosen.probe() is None
    for action in ([*b"42", EOS_ID], [*b"42"]):
        assert bytes(chosen.observation_ids([user("<eos>?")], action)) == b"\n\nUser: <eos>?\n\nAssistant: "
    assert bytes(chosen.prompt_ids([user("a")])) == b"User: a\n\nAssistant: "


def test_an_ordinary_token_can_end_an_answer(templates):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = PLAIN_TEXT
    chosen = TurnRenderer(tokenizer, stop_ids=[EOS_ID, ord("\n")], templates=templates)
    assert chosen.probe() is None
    for action, rest in ((b"42\n", b"\n"), (b"42\x03", b"\n"), (b"42", b"\n\n")):
        assert bytes(chosen.observation_ids([user("x")], [*action])) == rest + b"User: x\n\nAssistant: "


def test_a_saved_model_directory(templates, tmp_path):
    from transformers import AutoTokenizer

    tokenizer, stops = shaped("chatml")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert TurnRenderer(loaded, tools=TOOLS, stop_ids=stops, templates=templates).probe() is None


def skeleton(renderer, ids):
    return [id for id in ids if id in renderer.special_ids]


WORDS = st.sampled_from(
    [*NAMES, "hello", " ", "\n", "\n\n", "<think>", "</think>", "<tool_call>", "é", "{", '"', "a", "12"]
)
CONTENT = st.one_of(
    st.lists(WORDS, max_size=8).map("".join), st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=20)
)
TURN = st.tuples(
    st.one_of(st.lists(CONTENT, min_size=1, max_size=3).map(lambda texts: ("tool", texts)),
              CONTENT.map(lambda text: ("user", [text]))),
    st.sampled_from(["ended", "cut", "empty"]),
)  # fmt: skip


def messages_of(turn):
    role, contents = turn
    return [tool(text, number) if role == "tool" else user(text) for number, text in enumerate(contents)]


def answer_to(messages, number):
    """Return an assistant's message for the reference rendering, in which a marker replaces the sampled ids."""
    if messages[0]["role"] == "user":
        return {"role": "assistant", "content": f"XQ{number}"}
    call = {"id": "call00000", "function": {"name": "add", "arguments": {"a": f"XQ{number}"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=CONTENT, turns=st.lists(TURN, min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_a_row_is_what_the_template_writes_around_the_sampled_ids(renderer, shape, tools, first, turns, seed):
    chosen, rng = renderer(shape, tools), random.Random(seed)
    tokenizer, ordinary = chosen.tokenizer, ordinary_ids(renderer(shape, tools))
    chat, safe_chat, row, sampled = [user(first)], [user("x")], [], []
    contexts = [chosen.prompt_ids(chat)]
    for number, (turn, end) in enumerate(turns):
        messages = messages_of(turn)
        action = [] if end == "empty" else rng.choices(ordinary, k=rng.randint(1, 6))
        if end == "ended":
            action.append(end_of(chosen, shape, messages))
        row = [*contexts[-1], *action]
        sampled += [(len(contexts[-1]), action)]
        contexts.append([*row, *chosen.observation_ids(messages, action)])
        answer = answer_to(messages, number)
        chat += [answer, *messages]
        safe_chat += [answer, *({**message, "content": "x"} for message in messages)]
    final = contexts[-1]
    for context in contexts:
        assert final[: len(context)] == context
    for start, action in sampled:
        assert final[start : start + len(action)] == action
    whole, safe = (
        tokenizer.apply_chat_template(made, tools=TOOLS if tools else None, add_generation_prompt=True, tokenize=False)
        for made in (chat, safe_chat)
    )
    assert skeleton(chosen, final) == skeleton(chosen, chosen.encoded(safe)), "same control tokens in the same order"
    expected = whole
    texts, at = [], 0
    for start, action in sampled:
        ended = bool(action) and action[-1] in chosen.special_ids
        texts.append(chosen.decoded(final[at:start]))
        at = start + len(action) - ended
    texts.append(chosen.decoded(final[at:]))
    rest = unicodedata.normalize("NFC", expected)
    for number, text in enumerate(texts):
        found = rest.find(text)
        gap = rest[:found]
        assert found >= 0, (text, rest)
        assert not number or f"XQ{number - 1}" in gap, "only the answer may stand between two texts of the template"
        assert number or not gap
        rest = rest[found + len(text) :]
    assert rest == ""


def ordinary_ids(renderer):
    """Return all token ids except the control tokens, because a policy may sample any sequence of such ids."""
    return sorted({*range(len(renderer.tokenizer))} - renderer.special_ids)


def end_of(renderer, shape, messages):
    name = {"chatml": "<|im_end|>", "strips thinking": "<|im_end|>", "no newline": "</s>"}.get(shape)
    opener = "<|observation|>" if messages[0]["role"] == "tool" else "<|user|>"
    return renderer.tokenizer.convert_tokens_to_ids(name or opener)
