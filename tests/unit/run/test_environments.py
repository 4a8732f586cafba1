"""Tests of the checks of environments and tools before any worker starts."""

import dataclasses
import json

import pytest

from rltrain.base.errors import ConfigError
from rltrain.data.prompt_form import PromptOptions
from rltrain.data.prompts import load_prompts
from rltrain.run.environments import environments_for, tools_of_run, turn_format, unread_rewards
from rltrain.settings.compose import compose
from tests.chat_model import chat_tokenizer

FILE = '''
def price(fruit: str) -> int:
    """Look up a price.

    Args:
        fruit: A fruit.
    """


class Shop:
    def reset(self, answer): ...

    def price(self, fruit: str) -> int:
        """Look up a price.

        Args:
            fruit: A fruit.
        """


class Demanding(Shop):
    def __init__(self, url, retries=3): ...


class Game(Shop):
    def step(self, text): ...

    def helper(self, undescribed): ...


class Rewarding(Shop):
    def reward(self): ...


def own(prompt, response, *, environment_reward): ...


class Silent:
    def half(self, a: int): ...
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_env.py"
    path.write_text(FILE)
    return path


def rollout(*overrides):
    return compose(list(overrides))[0].rollout


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        tools_of_run(rollout(*overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_class_whose_init_needs_arguments_is_refused_before_any_worker_starts(file):
    assert refusal(f"rollout.environment={file}:Demanding") == (
        f"rollout.environment={file}:Demanding: the __init__ of the class needs url, but rltrain creates each object "
        "without arguments; give each parameter a default, or make it a parameter of reset, which gets columns of the "
        "data"
    )
    source, schemas = tools_of_run(rollout(f"rollout.environment={file}:Shop"))
    assert (source.environment, [one["function"]["name"] for one in schemas]) == (f"{file}:Shop", ["price"])


def test_a_class_among_the_tools_belongs_in_another_key(file):
    assert refusal(f"rollout.tools=[{file}:Shop]") == (
        f"rollout.tools: '{file}:Shop': names a class, and a tool is a function; the class of an environment, whose "
        f"methods are tools, belongs in rollout.environment={file}:Shop"
    )


def test_the_methods_of_a_game_are_no_tools_and_functions_may_be_tools_beside_it(file):
    game = f"rollout.environment={file}:Game"
    assert tools_of_run(rollout(game))[1] == []
    source, schemas = tools_of_run(rollout(game, f"rollout.tools=[{file}:price]"))
    assert ([one["function"]["name"] for one in schemas], list(source.tools)) == (["price"], ["price"])


# The template cannot add a user's message to a conversation, but it can add the results of tools.
NO_USER_LATER = (
    "{%- for m in messages[1:] %}{% if m.role == 'user' %}{{ raise_exception('only one question') }}{% endif %}"
    "{% endfor -%}\n"
)
# The template cannot add the results of tools to a conversation.
NO_RESULTS = (
    "{%- for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no results') }}{% endif %}{% endfor -%}\n"
)


@pytest.mark.parametrize(
    ("environment", "tools", "template", "refused"),
    [
        ("Shop", "", NO_USER_LATER, ""), ("Shop", "", NO_RESULTS, "no results"),
        ("Game", "", NO_USER_LATER, "only one question"), ("Game", "", NO_RESULTS, ""),
        ("Game", "price", NO_USER_LATER, "only one question"), ("Game", "price", NO_RESULTS, "no results"),
        ("Game", "price", "", ""),
    ],
)  # fmt: skip
def test_the_template_is_probed_with_each_role_whose_messages_can_follow_an_answer(
    file, environment, tools, template, refused
):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template + tokenizer.chat_template
    config = rollout(
        f"rollout.environment={file}:{environment}", *([f"rollout.tools=[{file}:{tools}]"] if tools else [])
    )
    schemas = tools_of_run(config)[1]
    if refused:
        with pytest.raises(ConfigError, match=refused):
            turn_format(config, schemas, tokenizer, [tokenizer.eos_token_id])
    else:
        assert turn_format(config, schemas, tokenizer, [tokenizer.eos_token_id]).tools == schemas


def test_a_method_without_a_docstring_is_named_with_its_class_its_file_and_its_line(file):
    line = FILE.splitlines().index("    def half(self, a: int): ...") + 1
    assert refusal(f"rollout.environment={file}:Silent").startswith(
        f"rollout.environment: the method half of the class Silent ({file}:{line}): no schema can be made for the model"
    )


@pytest.mark.parametrize(
    ("name", "functions", "warned"),
    [
        ("Rewarding", "exact_answer", True),
        ("Game", "exact_answer", True),
        ("Rewarding", "exact_answer,environment_reward", False),
        ("Rewarding", "{file}:own", False),
        ("Shop", "exact_answer", False),
    ],
)
def test_rewards_of_an_environment_that_no_reward_function_reads_are_pointed_out(file, name, functions, warned):
    functions = functions.format(file=file)
    config = compose([f"rollout.environment={file}:{name}", f"reward.functions=[{functions}]"])[0]
    assert unread_rewards(config).endswith("add environment_reward to reward.functions") == warned


@pytest.mark.parametrize("form", ["Game", "file.Game"])
def test_a_path_without_a_colon_is_refused_with_the_form_of_a_path(form):
    assert "use file.py:Class or package.module:Class" in refusal(f"rollout.environment={form}")
    assert "use file.py:function or package.module:function" in refusal(f"rollout.tools=[{form}]")


def test_prompts_that_are_too_long_with_the_tools_are_refused_with_the_length_that_would_do(file, tmp_path):
    tokenizer = chat_tokenizer()
    config = rollout(f"rollout.environment={file}:Shop", "rollout.tool_format=hermes")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": "a" * size, "answer": "7"}) + "\n" for size in (5, 8, 12)))
    options = PromptOptions(chat="always")
    prompts = load_prompts(
        str(data), tokenizer, options=options, split="train", seed=0, max_prompt_length=50, overlong="refuse"
    )

    def checked(length):
        limited = dataclasses.replace(config, max_prompt_length=length)
        return environments_for(
            limited, tokenizer, [tokenizer.eos_token_id], [prompts], tmp_path / "turns", deterministic=False
        )

    system = '<|im_start|>system\nprice(fruit)Call: <tool_call>{"name": NAME, "arguments": {}}</tool_call><|im_end|>\n'
    added = len(tokenizer.encode(system, add_special_tokens=False))
    sizes = prompts.token_counts()
    with pytest.raises(ConfigError) as caught:
        checked(min(sizes) + added - 1)
    assert str(caught.value) == (
        f"rollout.max_prompt_length={min(sizes) + added - 1}: the descriptions of the tools add {added} tokens to each "
        f"prompt, so even the shortest prompt of {prompts.where} has {min(sizes) + added} tokens; set "
        f"rollout.max_prompt_length={max(sizes) + added}, which is enough for the longest prompt, or use fewer tools "
        "or shorter descriptions of the tools"
    )
    assert checked(min(sizes) + added).limits.max_prompt_tokens == min(sizes) + added
    assert max(sizes) - min(sizes) == 7
