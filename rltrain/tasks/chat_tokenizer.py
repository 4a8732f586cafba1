"""The tokenizer of the built-in tasks with several turns, with a chat template in ChatML form.

Each character is a token, as in `rltrain.tasks.tokenizer`. Some long texts are one token each: the texts that the chat
template writes around messages, the description of the tools, and phrases of the task. Because each long text is one
token, a conversation has few tokens, although the conversation's text has the chat format of large models.
"""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import Qwen2Tokenizer
from transformers.utils.chat_template_utils import get_json_schema

from rltrain.tasks.tokenizer import EOS_ID, PAD_ID, UNK_ID, byte_tokenizer

START_ID, START_TOKEN = 2, "<|im_start|>"  # The id of `<|im_start|>` is the ASCII code STX (start of text).
END_TOKEN = "<|im_end|>"  # The token `<|im_end|>` has the id EOS_ID.
ROLES = ("system\n", "user\n", "assistant\n")
RESULT = ("<tool_response>\n", "\n</tool_response>")
# The tokenizer encodes certain long texts, such as the description of the tools, as one token each. The token ids of
# these texts are the ASCII control codes (0 to 31) that are neither white space nor the id of a special token.
PHRASE_IDS = sorted(set(range(32)) - {PAD_ID, START_ID, EOS_ID, UNK_ID} - {ord(space) for space in "\t\n\r"})

# The chat template describes the tools in a system message. The chat template writes consecutive tool results as one
# user message, with `<tool_response>` marks around each result.
CHAT_TEMPLATE = """\
{%- set first = 1 if messages and messages[0].role == 'system' else 0 %}
{%- if tools or first %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if first else '' }}
    {{- '\\n\\n' if tools and first else '' }}
    {%- if tools %}
        {{- 'You can call these functions:\\n<tools>\\n' }}
        {%- for tool in tools %}
            {{- (tool | tojson) ~ '\\n' }}
        {%- endfor %}
        {{- '</tools>\\nA call has the form\\n' }}
        {{- '<tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[first:] %}
    {%- if message.role == 'tool' %}
        {{- '\\n' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user\\n' }}
        {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {{- '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '' if loop.first and not message.content else '\\n' }}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def chat_tokenizer(tools: Sequence[Callable[..., Any]] = (), phrases: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Build the tokenizer of a task with several turns, with 128 token ids and without a beginning-of-sequence token.

    The end token is `<|im_end|>`. Tool calls are written in the Hermes format: a JSON object between `<tool_call>` and
    `</tool_call>`.

    Args:
        tools: functions that the policy can call, each with type hints and a docstring in Google style. The text with
            which the chat template describes all tools is one token.
        phrases: texts of the task that the tokenizer encodes as one token each.
    """
    texts = [*ROLES, *phrases]
    if tools:
        texts += [*RESULT, tools_text(tools)]
    control, ids = {START_ID: START_TOKEN}, dict(zip(PHRASE_IDS, texts, strict=False))
    tokenizer = byte_tokenizer(eos_token=END_TOKEN, control=control, phrases=ids)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def schemas(tools: Sequence[Callable[..., Any]]) -> list[Any] | None:
    """Return the schemas of tools in the form that a chat template reads, or None if there are no tools."""
    return [get_json_schema(tool) for tool in tools] or None


def tools_text(tools: Sequence[Callable[..., Any]]) -> str:
    """Return the content of the system message with which the chat template describes the tools."""
    plain = byte_tokenizer(eos_token=END_TOKEN)
    plain.chat_template = CHAT_TEMPLATE
    text = plain.apply_chat_template([{"role": "user", "content": ""}], tools=schemas(tools), tokenize=False)
    return str(text).partition(ROLES[0])[2].partition(END_TOKEN)[0]


def sampled(ids: Sequence[int], tokenizer: Qwen2Tokenizer) -> list[bool]:
    """Return for each token of a conversation whether the policy samples the token.

    The policy samples the tokens after the opening of an assistant's message, up to and including the end token.
    """
    opening = [START_ID, tokenizer.convert_tokens_to_ids(ROLES[2])]
    found, inside = [], False
    for position, token in enumerate(ids):
        found.append(inside)
        inside = (inside and token != EOS_ID) or ids[max(position - 1, 0) : position + 1] == opening
    return found
