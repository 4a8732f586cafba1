"""The program ends with status 2 and one line on stderr for every bad command line, before any worker starts."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
from harness import cases, check_refusal, command, nothing_written_over, read_once, refused
from hypothesis import given
from hypothesis import strategies as st

from rltrain.settings.compose import compose
from rltrain.settings.config_groups import choices, group_names
from rltrain.settings.schema import Config
from rltrain.settings.typed import keys, parse

QUICK = ["rollout=hf", "placement=inprocess", "data.val=null", "trainer.output_dir=new_run"]
KEYS = sorted(keys(Config))
# Options that name output folders get no random values, because a run could write outside the test's folder.
PLACES = {"trainer.output_dir", "trainer.checkpoint_dir"}

plain = st.sampled_from(
    ["", "null", "true", "false", "True", "0", "1", "2", "-1", "0.5", "1e-3", "1e999", "-0.0", "nan", "inf",
     "-inf", "[]",
     "{}", "[1,2]", "{a:1}", "[[[]]]", "{a:{b:{c:[null]}}}", "a,b", "1,2,3", "'quoted'", '"quoted"', "'",
     '"', "[", "{", "}",
     "${", "${}", "${trainer.seed}", "${trainer.nothing}", "${oc.env:NOT_THERE}", "${oc.env:HOME}", "${oc.decode:'[1'}",
     "${oc.select:trainer,1}", "${oc.dict.keys:trainer}", "${oc.create:{a:1}}", "${now:%Y}", "${now}",
     "${hydra:run.dir}",
     "${trainer}", "${.seed}", "${..seed}", "${oc.deprecated:trainer.seed}", "\\", "\\'", "a\\=b", "a=b", "=",
     "==", "???",
     "choice(1,2)", "range(1,3)", "range(1,1000000000)", "glob(*)", "sort(3,1)", "shuffle(1,2)", "int(3)", "float(x)",
     "str(1)", "bool(maybe)", "json_str('{}')", "interval(0,1)", "tag(a,1)", "cast(1)", "extend_list(1)",
     "0x10", "1_000",
     "1__0", "٣", "½", "∞", "é", "\u202e", "\x00", "\n", "a\nb", "\t", " ", "🙂", "\ud800", "%s", "{0}",
     "$HOME", "~", "../x",
     "/dev/null", "afile", "prompts.jsonl", "my_reward.py:score", "my_reward.py:nothing", "nothing.py:score",
     "os:getcwd",
     "[my_reward.py:score]", "[{path:my_reward.py:score,weight:nan}]", "[{path:my_reward.py:score,kwargs:{1:2}}]",
     "builtin", "builtin:median", "builtin:", "hf", "vllm", "9" * 30, "9" * 5000, "-" + "9" * 400, "1e" + "9" * 30,
     "x" * 3000, "[" * 60 + "]" * 60, "[" * 3000, "{a:" * 40 + "1" + "}" * 40],
)  # fmt: skip
text = st.text(st.characters(), max_size=12)
number = st.one_of(st.integers(), st.integers(-(2**70), 2**70), st.floats()).map(str)
value = st.one_of(plain, number, text, st.lists(plain, max_size=3).map(lambda parts: f"[{','.join(parts)}]"))
odd_key = st.one_of(
    text,
    st.sampled_from(
        ["trainer", "hydra.run.dir", "hydra/launcher", "algorithm.loss", "algorithm.advantage", "algorithm.loss.x",
         "algorithm.loss.clip_ratio_low", "model.lora", "model.lora.rank", "reward.functions", "reward.functions.0",
         "reward.functions[0].path", "reward.models", "rollout.vllm", "rollout.vllm.process", "a.b.c", ".",
         "..", "a..b",
         "defaults", "_self_", "algorithm@x", "data@_global_", "/data", "data/x", "trainer.seed.x", "trainer.", ".seed"]
    ),
)  # fmt: skip
sign = st.sampled_from(["", "", "", "", "+", "++", "~", "+++", "~~", "-", "--", " "])
known = st.builds(
    lambda sign, key, value: f"{sign}{key}={value}",
    sign,
    st.sampled_from([key for key in KEYS if key not in PLACES]),
    value,
)
unknown = st.builds(lambda sign, key, value: f"{sign}{key}={value}", sign, odd_key, value)
group = st.builds(
    lambda sign, name, choice: f"{sign}{name}={choice}",
    sign,
    st.sampled_from(group_names()),
    st.one_of(value, st.sampled_from(sorted({choice for name in group_names() for choice in choices(name)}))),
)
flag = st.sampled_from(
    ["--cfg", "--help", "-h", "--cfg=job", "job", "--cfg=all", "-x", "--", "-", "--multirun", "~trainer.seed"]
)
places = ["old_run", "afile", "afile/x", "old_run/", "./old_run", "''", "null", "[]", "1", "new_run/../old_run",
          "${trainer.seed}", "${data}", "a\\=b", "s3x://a", "\x00", "\ud800", "x" * 300, "a::b"]  # fmt: skip
place = st.builds("{}={}".format, st.sampled_from(sorted(PLACES)), st.sampled_from(places))
word = st.one_of(known, known, known, unknown, group, flag, place, text)


def check(folder, overrides: list[str]) -> None:
    with nothing_written_over(folder) as outcomes:
        outcomes.append(command(overrides))
        check_refusal(outcomes[0])


@pytest.mark.timeout(7200)
@given(words=st.lists(word, min_size=1, max_size=3), first=st.booleans())
@cases(0.09, 30)
def test_a_command_line_runs_or_is_refused_in_one_line(here_once, words, first):
    check(here_once, [*words, *QUICK] if first else [*QUICK, *words])


@pytest.mark.timeout(7200)
@given(words=st.lists(word, min_size=1, max_size=3))
@cases(0.08, 40)
def test_words_become_a_config_or_are_refused(words):
    refused(lambda: compose([*QUICK, *words]))


@functools.cache
def plain_values() -> dict[str, Any]:
    with read_once():
        return dataclasses.asdict(compose(QUICK)[0])


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-(10**400), 10**400), st.floats(), text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6,
)  # fmt: skip


@pytest.mark.timeout(7200)
@given(key=st.sampled_from([*KEYS, "trainer", "rollout.vllm", "algorithm", "x.y"]), value=anything)
@cases(0.08, 80)
def test_any_value_of_a_key_is_taken_or_refused(key, value):
    values = copy.deepcopy(plain_values())
    *sections, name = key.split(".")
    section = values
    for one in sections:
        section = section.setdefault(one, {}) if isinstance(section.get(one, {}), dict) else {}
    section[name] = value
    refused(lambda: parse(Config, values))


@pytest.mark.parametrize("key", ["trainer.seed", "reward.functions", "rollout.vllm", "algorithm.loss"])
@pytest.mark.parametrize("content", ["null", "[]", "1e999", "${trainer}", "'", "\x00"])
def test_each_kind_of_key_with_each_kind_of_junk(here, key, content):
    check(here, [*QUICK, f"{key}={content}"])


def test_the_command_line_that_the_others_are_changed_from_would_start(here):
    with nothing_written_over(here) as outcomes:
        outcomes.append(command(QUICK))
    assert outcomes[0].status is None, outcomes[0].err
    assert "optimizer steps" in outcomes[0].out
