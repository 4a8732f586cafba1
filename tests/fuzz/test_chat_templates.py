"""For any chat template and prompt text, a prompt is encoded as written or refused with an error that names its row."""

import functools
import json

import pytest
from harness import cases, refused
from hypothesis import given
from hypothesis import strategies as st

import rltrain.data.prompts
from rltrain.data.chat_templates import ChatTemplates
from rltrain.data.prompts import load_prompts
from tests.made_tokenizers import BOS_TEMPLATE, CHATML, KINDS, made

OPAQUE = [
    CHATML, BOS_TEMPLATE, "{{ bos_token }}" + BOS_TEMPLATE, "{{ messages | tojson }}<|im_end|>",
    "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}</s>",
    "{{ messages[0]['content'] }}", "{% for m in messages %}<|user|>{{ m.content | trim }}<think>{% endfor %}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}<|im_start|>",
]  # fmt: skip
OTHERS = [
    "", "   ", "no content", "{{ messages[0].content.split('<|im_end|>')[-1] }}", "{{ messages[0].content | upper }}",
    "{{ messages[0].content | length }}x", "{{ messages[0].content[1:-1] }}x", "{{ messages | string }}", "{{ x. }}",
    "{{ raise_exception('no') }}", "{{ messages[7].content }}", "{{ messages[7].content.x }}", "{{ '\ud800' }}",
    "{{ 1 / 0 }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}", "{% for %}",
    "{{ strftime_now('%Y') }}", "{{ messages.append(1) }}", "{{ range(10 ** 9) | list }}", "{{ self.__init__ }}",
    "{% macro f(n) %}{{ f(n) ~ f(n) }}{% endmacro %}{{ f(1) }}", "{{" + "(" * 3000 + ")" * 3000 + "}}", "{{ x\x00 }}",
    "{{ lipsum(n=1) }}", "{{ cycler.__init__.__globals__ }}", "{% set messages = [] %}{{ messages }}",
]  # fmt: skip
BOMBS = [
    "{{ 'a' * 2000000000 }}", "{{ messages[0].content | center(10 ** 10) }}", "{{ '%2000000000d' % 1 }}",
    "{{ '{:>2000000000}'.format(1) }}", "{{ ['a' * 1000] * 10 ** 9 }}", "{{ messages | tojson(indent=10 ** 9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "{{ lipsum(n=10 ** 8) }}", "{{ 7 ** (10 ** 9) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% if '12' in messages[0].content %}{{ 'a' * 2000000000 }}{% endif %}x", "{{ 'x'.replace('', 'y' * 10 ** 9) }}",
]  # fmt: skip
KEPT = {"text", "refuse"}

NAMES = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>"]
OTHER_WORDS = ["hello", "world", " ", "\n", "12", "é", "<", ">", "\U0001f642", "\U000f0000", "\ue000", "\x00", "日"]
token = st.sampled_from([*NAMES, "<unk>", "[UNK]", "<think>", "</S>", "<|im_"])
word = st.sampled_from(OTHER_WORDS)
content = st.lists(st.one_of(word, token), max_size=6).map("".join)
role = st.one_of(st.sampled_from(["user", "system", "assistant"]), content)
message = st.fixed_dictionaries({"role": role, "content": content}, optional={"tools": st.lists(content, max_size=2)})
prompt = st.one_of(st.lists(message, min_size=1, max_size=3), content)
flags = st.sampled_from([{}, {}, {"lstrip": True, "rstrip": True}, {"normalized": True}, {"single_word": True}])
opaque, other = st.sampled_from(OPAQUE), st.sampled_from(OTHERS)
template = st.one_of(opaque, opaque, opaque, opaque, other, other, other, st.sampled_from(BOMBS), st.text(max_size=20))


class Kept(ChatTemplates):
    """Renders the prompts of all cases in one process, because a new process for each case would be slow."""

    def __enter__(self):
        self._lost = 0
        return self

    def __exit__(self, *_):
        """Do nothing, so that the rendering process stays alive."""


@pytest.fixture(scope="module", autouse=True)
def kept_templates():
    with pytest.MonkeyPatch.context() as patch:
        kept = Kept(chat_seconds=1, memory_mb=100)
        patch.setattr(rltrain.data.prompts, "ChatTemplates", lambda: kept)
        yield
        kept.close()


@functools.cache
def tokenizer_of(kind: str, adds_bos: bool, flags: tuple):
    return made(kind, adds_bos=adds_bos, **dict(flags))


@pytest.mark.timeout(7200)
@given(
    kind=st.sampled_from(sorted(KINDS)), adds_bos=st.booleans(), flags=flags, template=template,
    prompts=st.lists(prompt, min_size=1, max_size=3), special=st.sampled_from(["text", "text", "refuse", "allow"]),
)  # fmt: skip
@cases(0.06, 40)
def test_prompts_are_encoded_as_the_template_writes_them_or_refused(
    here_once, kind, adds_bos, flags, template, prompts, special
):
    tokenizer = tokenizer_of(kind, adds_bos, tuple(sorted(flags.items())))
    tokenizer.chat_template = template
    (here_once / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    loaded = []

    def load():
        loaded.extend(
            load_prompts(
                "p.jsonl", tokenizer, split="train", seed=0, max_prompt_length=10_000, overlong="refuse",
                special_tokens=special, lossy_tokenizer="allow",
            )
        )  # fmt: skip

    said = refused(load)
    assert said.startswith("data.train=p.jsonl:") if said else len(loaded) == len(prompts), said
    assert "\n" not in said
    if template in BOMBS[:8] and any(isinstance(prompt, list) for prompt in prompts):
        assert said
    for prompt, encoded in zip(prompts, loaded, strict=False):
        check(tokenizer, prompt, encoded, special, known=template in OPAQUE and "single_word" not in flags)


def check(tokenizer, prompt, encoded, special, *, known: bool) -> None:
    """Check the token ids of a prompt that was not refused.

    `known` says that the template always writes the same control tokens.
    """
    bos = tokenizer.bos_token_id
    assert encoded.ids[:2] != [bos, bos]
    control = set(tokenizer.convert_tokens_to_ids(NAMES))
    found = [id for id in encoded.ids if id in control]
    spells = any(name in json.dumps(prompt).lower() for name in (*NAMES, "<unk>", "[unk]"))
    if isinstance(prompt, str):
        if special in KEPT:
            assert found == [bos] * (encoded.ids[:1] == [bos]), "a plain prompt has a control token"
            assert encoded.text == prompt
    elif not spells or special == "allow":
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        while ids[:2] == [bos, bos]:
            ids = ids[1:]
        assert encoded.ids == ids
    elif known:
        harmless = [{"role": "user", "content": "x"} for _ in prompt]
        own = tokenizer.apply_chat_template(harmless, add_generation_prompt=True, return_dict=False)
        own = [id for id in own if id in control]
        assert [id for id in found if id != bos] == [id for id in own if id != bos], "not those of the template"
