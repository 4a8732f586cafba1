"""Tests that a separate process renders chat templates like the test process, and that hostile templates do no harm."""

import gc
import os

import pytest

from rltrain.data.chat_templates import ChatTemplates, TemplateError
from tests.made_tokenizers import BOS_TEMPLATE, CHATML, made

CHATS = [
    [
        {"role": "user", "content": f" hello {n} é\n"},
        {"role": "assistant", "content": "\ud800 \x00", "tools": [{"a": n}]},
    ]
    for n in range(600)
]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def tokenizer(template):
    return made("byte_level", chat_template=template)


@pytest.fixture(scope="module")
def templates():
    with ChatTemplates() as made:
        yield made


def refusal(templates, template, chats=CHATS[:1]) -> TemplateError:
    with pytest.raises(TemplateError) as caught:
        list(templates.render(tokenizer(template), chats, add_generation_prompt=True))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, BOS_TEMPLATE, "{{ messages | tojson }}{{ add_generation_prompt }}"])
def test_chats_are_rendered_as_the_tokenizer_renders_them(templates, template, prompt):
    chosen = tokenizer(template)
    expected = chosen.apply_chat_template(CHATS, add_generation_prompt=prompt, tokenize=False)
    assert list(templates.render(chosen, CHATS, add_generation_prompt=prompt)) == expected
    assert list(templates.render(chosen, [], add_generation_prompt=prompt)) == []


@pytest.mark.parametrize(
    "template",
    ["{{ tools | tojson }}", {"default": "no", "tool_use": "{{ tools | tojson }}"}, {"default": "a", "rag": "b"}],
)
def test_tools_are_rendered_as_the_tokenizer_renders_them(templates, template):
    chosen, tools = tokenizer(template), [{"type": "function", "function": {"name": "add"}}]
    expected = chosen.apply_chat_template(CHATS[:1], tools=tools, tokenize=False)
    assert list(templates.render(chosen, CHATS[:1], add_generation_prompt=False, tools=tools)) == expected
    without = chosen.apply_chat_template(CHATS[:1], tokenize=False)
    assert list(templates.render(chosen, CHATS[:1], add_generation_prompt=False)) == without


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for %}", "Expected an expression"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth exceeded"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "maximum recursion depth exceeded"),
        ({"a": "x", "b": "y"}, "multiple chat templates"),
    ],
)
def test_a_template_that_raises_says_so_and_its_process_goes_on(templates, template, said):
    assert said in str(refusal(templates, template))
    assert next(templates.render(tokenizer("hi"), CHATS[:1], add_generation_prompt=True)) == "hi"


def test_a_refused_chat_is_told_by_its_number_and_those_before_it_have_their_text(templates):
    chosen = tokenizer("{% if '457' in messages[0].content %}{{ raise_exception('no') }}{% endif %}ok")
    rendered = templates.render(chosen, CHATS, add_generation_prompt=True)
    assert [next(rendered) for _ in range(457)] == ["ok"] * 457
    with pytest.raises(TemplateError, match=r"^the chat template refuses these messages \(no\)") as caught:
        next(rendered)
    assert caught.value.chat == 457


def test_a_template_that_eats_memory_is_refused_and_after_three_no_process_is_started():
    bombs = [
        "{{ 'a' * 2000000000 }}",  # Jinja evaluates constant expressions while it compiles a template.
        "{{ messages[0].content | center(10 ** 10) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ]
    with ChatTemplates(memory_mb=100) as templates:
        for bomb in bombs:
            assert str(refusal(templates, bomb)).startswith(
                "the chat template takes more than 100 MB of memory for these messages; use text prompts, or another"
            )
        assert str(refusal(templates, "hi")).startswith("the chat template has made 3 rendering processes fail")


def test_a_template_that_loops_for_one_chat_is_refused_with_that_chat_and_others_are_rendered():
    template = "{% if '300' in messages[0].content %}" + LOOPS + "{% endif %}ok"
    with ChatTemplates(chat_seconds=1) as templates:
        error = refusal(templates, template, CHATS)
        assert str(error).startswith("the chat template takes more than 1 s of processor time for these messages")
        assert error.chat == 300
        assert next(templates.render(tokenizer("hi"), CHATS[:1], add_generation_prompt=True)) == "hi"


def test_the_process_is_gone_when_nobody_needs_it_any_more():
    templates = ChatTemplates()
    assert next(templates.render(tokenizer("hi"), CHATS[:1], add_generation_prompt=True)) == "hi"
    pid = templates._process.pid
    os.kill(pid, 0)
    del templates
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
