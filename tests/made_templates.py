"""Chat templates for tests, in the shapes that real models use, and tokenizers that have their control tokens."""

from tokenizers import AddedToken

from tests.made_tokenizers import made

_SYSTEM_TOOLS = """{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{% else %}{{- 'Be brief.\n' }}{% endif %}
{{- 'Tools:' }}{% for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}{{- '<|im_start|>system\nBe brief.<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}"""
_CALLS = """{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}
{%- endfor %}"""
_CHATML_TURNS = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}CONTENTCALLS{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}"""
_CHATML_OPEN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"


def _chatml(content: str) -> str:
    return _SYSTEM_TOOLS + _CHATML_TURNS.replace("CONTENT", content).replace("CALLS", _CALLS) + _CHATML_OPEN


CHATML_TOOLS = _chatml("{{- message.content }}")
# A ChatML template that keeps thoughts after the last question, and writes an empty thought before the last answer.
STRIPS_THINKING = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}"
    + ("{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}")
    + _chatml("""{%- set said = message.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- if loop.index0 > ns.last and (loop.last or '</think>' in message.content) %}
{{- '<think>\n' + (thought if '</think>' in message.content else '') + '\n</think>\n\n' + said }}
{%- else %}{{- said }}{% endif %}""")
)
NO_NEWLINE = """{{- bos_token }}{%- if tools %}[TOOLS]{{- tools | tojson }}[/TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'system' %}{{- '[SYS]' + m.content + '[/SYS]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[RESULT] {"content": ' + m.content | tojson + ', "id": "' + m.tool_call_id + '"}[/RESULT]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}, {% endif %}{% endfor %}{{- ']' + eos_token }}
{%- else %}{{- ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""
OPENER = """{{- '<|head|>' }}{%- if tools %}{{- '<|system|>\n' }}{{- tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- for call in m.tool_calls %}
{{- '<|assistant|>' + call.function.name + '\n' + call.function.arguments | tojson }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{- '<|observation|>\n' + m.content }}
{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
PLAIN_TEXT = """{%- for m in messages %}{{- m.role | capitalize + ': ' + m.content + '\n\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- 'Assistant: ' }}{% endif %}"""

SHAPES = {"chatml": CHATML_TOOLS, "no newline": NO_NEWLINE, "strips thinking": STRIPS_THINKING, "opener": OPENER}
ENDS = {
    "chatml": ["<|im_end|>", "</s>"],
    "no newline": ["</s>"],
    "strips thinking": ["<|im_end|>"],
    "opener": ["<|user|>", "<|observation|>", "</s>"],
}


def shaped(shape: str, kind: str = "byte_level"):
    """Return a tokenizer with a template of the given shape, and the ids at which its answers end."""
    tokenizer = made(kind, chat_template=SHAPES[shape])
    bars = ["<|head|>", "<|system|>", "<|assistant|>", "<|observation|>"]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in bars])
    words = ["</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in words])
    return tokenizer, tokenizer.convert_tokens_to_ids(ENDS[shape])
