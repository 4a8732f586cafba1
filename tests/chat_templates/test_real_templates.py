"""Conversations with the chat templates of real model families, which the package trl contains.

`make template-test` installs the package. Only the template files are read; trl itself is not imported. Each template
gets a small tokenizer that has the template's control tokens.
"""

import os
import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rltrain.data.chat_templates import ChatTemplates
from rltrain.data.turn_rendering import TurnRenderer
from tests.made_tokenizers import byte_level

INSTALLED = Path(os.environ.get("RLTRAIN_TEMPLATES", "build/templates"))
FOLDER = INSTALLED / "trl" / "chat_templates"
SMOLLM2 = Path(os.environ.get("RLTRAIN_SMOLLM2", "build/smollm2/model"))
CONTROL = re.compile(
    r"<[|｜][^<>\s{}'\"]{1,40}[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_turn>|<(?:bos|eos|sop)>|\[gMASK\]"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add one.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}},
    },
}
WRITES_TOOLS, NO_TOOLS = "", "does not show the tool"
# For each template: the tokens at which an engine stops, and why conversations with tools are refused ("" if accepted).
TEMPLATES = {
    "qwen2_5": (["<|im_end|>"], WRITES_TOOLS),
    "qwen3": (["<|im_end|>"], WRITES_TOOLS),
    "qwen3_instruct_2507": (["<|im_end|>"], WRITES_TOOLS),
    "qwen3_5_think": (["<|im_end|>"], WRITES_TOOLS),
    "qwen3_5_nothink": (["<|im_end|>"], WRITES_TOOLS),
    "llama3": (["<|eot_id|>"], NO_TOOLS),
    "llama3_1": (["<|eot_id|>", "<|eom_id|>"], WRITES_TOOLS),
    "llama3_2": (["<|eot_id|>", "<|eom_id|>"], WRITES_TOOLS),
    "glm4moe": (["<|user|>", "<|observation|>", "<|endoftext|>"], WRITES_TOOLS),
    "lfm2": (["<|im_end|>"], WRITES_TOOLS),
    "nemotron_3_nano": (["<|im_end|>"], WRITES_TOOLS),
    "nemotron_3_super": (["<|im_end|>"], WRITES_TOOLS),
    "gemma": (["<end_of_turn>"], NO_TOOLS),
    "gemma3": (["<end_of_turn>"], NO_TOOLS),
    "phi3": (["<|end|>"], NO_TOOLS),
    "phi3_5": (["<|end|>"], NO_TOOLS),
    "cohere": (["<|END_OF_TURN_TOKEN|>"], NO_TOOLS),
    "deepseek_r1_distill": (["<｜end▁of▁sentence｜>"], NO_TOOLS),
}
# Templates that cannot be extended turn by turn, and the reason that the user reads.
REFUSED = {"gptoss": (["<|return|>", "<|call|>"], "does not open the assistant's next answer")}

needs_trl = pytest.mark.skipif(
    not FOLDER.is_dir() and "RLTRAIN_TEMPLATES" not in os.environ, reason="make template-test installs the templates"
)


@pytest.fixture(scope="module")
def templates():
    with ChatTemplates() as made:
        yield made


def tokenizer_of(name, stops):
    """Return a byte-level tokenizer with a template and the control tokens that the template writes."""
    template = (FOLDER / f"{name}.jinja").read_text("utf-8")
    found = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    names = sorted({*CONTROL.findall(template), *stops} - {stops[0]})
    found.add_special_tokens({"eos_token": stops[0], "bos_token": "<bos>", "additional_special_tokens": names})
    found.chat_template = template
    return found


def renderer_of(templates, name, stops, tools):
    tokenizer = tokenizer_of(name, stops)
    ids = tokenizer.convert_tokens_to_ids(stops)
    return TurnRenderer(tokenizer, tools=[ADD] if tools else [], stop_ids=ids, templates=templates)


def plain(text):
    """Remove white space and thoughts from a text, because templates add and remove them."""
    return re.sub(r"\s+", "", re.sub(r"<think>.*?</think>|<think>", "", text, flags=re.DOTALL))


def check_rows(renderer, seed):
    """Compare a conversation that is built turn by turn with the template's rendering of the whole conversation."""
    rng, messages = random.Random(seed), [{"role": "user", "content": "first question"}]
    row = list(renderer.prompt_ids(messages))
    for turn in range(3):
        said = "".join(rng.choices("abc xyz 123", k=rng.randint(1, 12))).strip() or "a"
        sampled = [*renderer.encoded(said), *([] if renderer.end_id is None else [renderer.end_id])]
        new = [{"role": "user", "content": f"question {turn}"}]
        messages += [{"role": "assistant", "content": said}, *new]
        row += [*sampled, *renderer.observation_ids(new, sampled)]
    whole = renderer.prompt_ids(messages)
    controls = [[id for id in ids if id in renderer.special_ids] for ids in (row, whole)]
    assert controls[0] == controls[1]
    built, rendered = (plain(renderer.decoded(ids)) for ids in (row, whole))
    assert built == rendered


@needs_trl
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_with_users_are_those_that_the_template_writes(templates, name):
    renderer = renderer_of(templates, name, TEMPLATES[name][0], tools=False)
    assert renderer.probe(["user"]) is None
    for seed in range(3):
        check_rows(renderer, seed)


@needs_trl
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_with_tools_work_or_are_refused_in_one_line(templates, name):
    stops, said = TEMPLATES[name]
    refusal = renderer_of(templates, name, stops, tools=True).probe(["tool", "user"])
    assert (refusal is None) == (said == WRITES_TOOLS), refusal
    assert said in (refusal or "")
    assert "\n" not in (refusal or "")


@needs_trl
@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_be_extended_is_refused_in_one_line(templates, name):
    stops, said = REFUSED[name]
    refusal = renderer_of(templates, name, stops, tools=False).probe(["user"])
    assert said in refusal
    assert "\n" not in refusal


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="make demo-llm installs SmolLM2")
def test_smollm2_with_its_own_tokenizer(templates):
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    renderer = TurnRenderer(tokenizer, stop_ids=[tokenizer.eos_token_id], templates=templates)
    assert renderer.probe(["user"]) is None
    for seed in range(3):
        check_rows(renderer, seed)
