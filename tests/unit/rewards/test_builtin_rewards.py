"""Tests of the built-in reward functions: golden sets in the main and another thread, options, errors, and run time."""

import json
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rltrain.rewards import math_answer as answers
from rltrain.rewards.boxed import last_boxed
from rltrain.rewards.exact_match import exact_match
from rltrain.rewards.json_schema import json_schema
from rltrain.rewards.length import length_penalty, overlong_penalty
from rltrain.rewards.loading import bind, load_function
from rltrain.rewards.math_answer import math_answer
from rltrain.rewards.multiple_choice import multiple_choice
from rltrain.rewards.numeric_match import numeric_match
from rltrain.rewards.regex_format import regex_format
from rltrain.rewards.repetition import repetition_penalty

GOLDEN = Path(__file__).parent / "golden"
MODULES = {
    "exact_match": "exact_match",
    "json_schema": "json_schema",
    "length_penalty": "length",
    "math_answer": "math_answer",
    "multiple_choice": "multiple_choice",
    "numeric_match": "numeric_match",
    "overlong_penalty": "length",
    "regex_format": "regex_format",
    "repetition_penalty": "repetition",
}
# Reward functions that need no data column, so that they apply to every sample.
NEVER_NONE = {"overlong_penalty", "regex_format", "repetition_penalty"}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALLS = {  # Typical arguments of each built-in reward function.
    "exact_match": {"answer": "7", "ignore_case": True, "ignore_whitespace": True},
    "json_schema": {"schema": OBJECT},
    "length_penalty": {"target": 100, "unit": "words"},
    "math_answer": {"answer": "7"},
    "multiple_choice": {"answer": "B"},
    "numeric_match": {"answer": "7"},
    "overlong_penalty": {"max_length": 100, "buffer": 10},
    "regex_format": {"pattern": r".*\(B\).*", "flags": "s"},
    "repetition_penalty": {},
}
HUGE = 100_000
HOSTILE = {
    piece: (piece * (HUGE // len(piece)))
    for piece in (
        *"({[}9 \n*$\\-^",
        "1,",
        ",111",
        "1 ",
        "1/",
        "1e",
        "A,",
        "(A)",
        "A or ",
        r"\(",
        r"\boxed{",
        r"\boxed{}",
        r"\frac{1}",
        r"1\times 10^{",
        r"\text{",
        "answer: ",
        "final answer is ",
        "答案",
        "```json\n",
        "1 1/2 ",
        "-$",
    )
}


def load(name):
    return load_function(f"rltrain.rewards.{MODULES[name]}:{name}")


def cases(name):
    """Yield (reason for the case, response, arguments, expected score) for each line of the golden set of a function.

    A golden set stores a very long response as a string and a repeat count.
    """
    for line in (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        response = case["response"]
        if isinstance(response, dict):
            response = response["repeat"] * response["times"]
        yield case["why"], response, case["arguments"], case["score"]


def differences(name):
    """Return the cases of a golden set whose computed score differs from the expected score.

    The reward function is called in the same way as the reward workers call it.
    """
    function, wrong = bind(load(name)), []
    for why, response, arguments, score in cases(name):
        got = function("a prompt", response, arguments | {"finish_reason": "stop", "uid": 3})
        if (got is None) != (score is None) or (score is not None and abs(got - score) > 1e-9):
            wrong.append((why, got, score))
    return wrong


# Tests with golden sets of responses and expected scores


@pytest.mark.parametrize("name", MODULES)
def test_G1_a_golden_set_scores_as_it_says_in_the_main_thread(name):
    assert differences(name) == []


@pytest.mark.parametrize("name", MODULES)
def test_G1_a_golden_set_scores_the_same_in_another_thread(name):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(differences, name).result() == []


@pytest.mark.parametrize("name", MODULES)
def test_a_golden_set_has_zero_and_other_scores_and_samples_it_does_not_apply_to(name):
    scores = [score for _, _, _, score in cases(name)]
    assert len(scores) >= 10
    assert 0.0 in scores
    assert any(score for score in scores)
    assert (None in scores) != (name in NEVER_NONE)


def test_every_golden_file_is_of_a_function():
    # The function `code_tests` has its own test file.
    assert {path.stem for path in GOLDEN.glob("*.jsonl")} == {*MODULES, "code_tests"}


def test_the_table_of_the_package_names_every_function():
    import rltrain.rewards

    named = rltrain.rewards.__doc__
    assert [name for name, module in MODULES.items() if f"| `{module}.{name}` |" not in named] == []


def test_a_module_imports_no_library_before_it_is_called():
    heavy = ["torch", "sympy", "math_verify", "jsonschema", "numpy"]
    modules = ", ".join(f"rltrain.rewards.{module}" for module in sorted(set(MODULES.values())))
    code = f"import sys, {modules}; sys.exit(' '.join(m for m in {heavy} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Tests of finding the last `\boxed{...}`


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{a{b}{c{d}}}", "a{b}{c{d}}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"{ \boxed {5}", "5"),
        (r"}} \boxed{5}", "5"),
        (r"\boxed{5} \boxed{6", "5"),
        (r"\boxed{6", None),
        (r"\boxed{}", ""),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_closed_box_is_found_whatever_the_braces_do(text, content):
    assert last_boxed(text) == content


# Tests that error messages state the wrong value, the violated rule and a remedy


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (numeric_match, {"answer": "(3, 5)"}, ["'(3, 5)'", "one number", "2 were found"]),
        (numeric_match, {"answer": "many"}, ["'many'", "one number", "exact_match"]),
        (numeric_match, {"answer": "1/0"}, ["'1/0'", "one number"]),
        (numeric_match, {"answer": "1", "rel_tol": -1.0}, ["rel_tol=-1.0", ">= 0"]),
        (math_answer, {"answer": r"\frac{"}, [r"\\frac{", "does not parse", "exact_match"]),
        (math_answer, {"answer": ""}, ["''", "does not parse"]),
        (multiple_choice, {"answer": "F"}, ["'F'", "ABCDE", "choices"]),
        (multiple_choice, {"answer": 5}, ["'5'", "ABCDE"]),
        (multiple_choice, {"answer": -1}, ["'-1'", "ABCDE"]),
        (multiple_choice, {"answer": "AB"}, ["'AB'", "ABCDE"]),
        (multiple_choice, {"answer": "a", "choices": "a-z"}, ["'a-z'", "capital"]),
        (regex_format, {"pattern": "(a"}, ["'(a'", "regular expression"]),
        (regex_format, {"pattern": "a", "flags": "q"}, ["'q'", "flag"]),
        (length_penalty, {"target": 0}, ["target=0", "> 0"]),
        (length_penalty, {"target": 5, "unit": "tokens"}, ["'tokens'", "characters or words"]),
        (overlong_penalty, {"max_length": 4, "buffer": 5}, ["buffer=5", "max_length=4"]),
        (overlong_penalty, {"max_length": 4, "buffer": -1}, ["buffer=-1"]),
        (repetition_penalty, {"ngram": 0}, ["ngram=0", ">= 1"]),
        (repetition_penalty, {"max_penalty": 0.5}, ["max_penalty=0.5", "< 0"]),
        (json_schema, {"schema": "{"}, ["'{'", "JSON"]),
        (json_schema, {"schema": "[]"}, ["'[]'", "list"]),
        (json_schema, {"schema": {"type": "text"}}, ["not a valid JSON Schema", "text"]),
        (json_schema, {"schema": {"$ref": "http://127.0.0.1:9/x.json"}}, ["127.0.0.1", "does not contain"]),
    ],
)
def test_what_a_user_got_wrong_is_one_line_that_says_it(function, arguments, words):
    with pytest.raises(ValueError) as caught:
        function("p", "7", **arguments)
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


# Tests of options that the golden sets do not cover


def test_letters_are_matched_by_their_order_only_if_not_strict():
    assert math_answer("p", r"\boxed{y+1}", answer="x+1") == 0.0
    assert math_answer("p", r"\boxed{y+1}", answer="x+1", strict=False) == 1.0


def test_fewer_decimal_places_let_a_rounded_number_pass():
    assert math_answer("p", r"\boxed{0.33}", answer="1/3", float_rounding=2) == 1.0


def test_the_math_library_says_nothing_of_its_timeouts(capfd, caplog):
    assert math_answer("p", r"\boxed{5}", answer="5.0") == 1.0
    assert "imeout" not in caplog.text + "".join(capfd.readouterr())


def test_math_leaves_the_alarm_of_the_process_alone():
    before = signal.getsignal(signal.SIGALRM)
    # The timer may already run, because the test itself has a time limit.
    running = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert math_answer("p", r"\boxed{\frac{2}{4}}", answer="1/2") == 1.0
    assert signal.getsignal(signal.SIGALRM) is before
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == running


def test_large_whole_numbers_differ_without_a_tolerance():
    assert numeric_match("p", "12345678902", answer="12345678901") == 1.0
    assert numeric_match("p", "12345678902", answer="12345678901", rel_tol=0.0) == 0.0


@pytest.mark.parametrize("filler", ["many words and no number. ", "step x2 in m^2. ", "a" * 399 + " "])
@pytest.mark.parametrize("number", ["-1,234,567.5", "3/4", r"1.5 \times 10^{3}", "5" * 900])
def test_the_last_number_is_found_wherever_it_lies(number, filler):
    for before in (0, 5, 40):
        for after in (0, 5, 40):
            text = f"7 apples, {filler * before}{number} {filler * after}"
            assert numeric_match("p", text, answer="7") == 0.0
            if len(number) < 300:
                assert numeric_match("p", text, answer=number) == 1.0


def test_the_share_of_repeated_ngrams_agrees_with_counting_them():
    words = list("abcabcabd")
    seen, again = [], 0
    for start in range(len(words) - 1):
        pair = words[start : start + 2]
        again += pair in seen
        seen.append(pair)
    assert repetition_penalty("p", " ".join(words), ngram=2) == pytest.approx(-again / len(seen), rel=1e-12)


def test_a_schema_may_refer_to_the_metaschema_and_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schema = {"$ref": "https://json-schema.org/draft/2020-12/schema"}
        assert json_schema("p", '{"type": "object"}', schema=schema) == 1.0
        assert json_schema("p", '{"type": 3}', schema=schema) == 0.0


def test_an_old_draft_is_read_by_its_own_rules():
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 5, "exclusiveMaximum": True}
    assert json_schema("p", "5", schema=old) == 0.0
    assert json_schema("p", "4", schema=old) == 1.0


def test_scores_are_floats():
    assert type(exact_match("p", "7", answer="7")) is float
    assert type(math_answer("p", "7", answer="7")) is float
    assert type(overlong_penalty("p", "7", max_length=4, buffer=0)) is float
    assert str(repetition_penalty("p", "a b c")) == "0.0"


def test_a_schema_without_end_is_the_datas_fault_and_deep_nesting_the_responses():
    for schema, response in (
        ({"$ref": "#"}, "null"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, '{"a": [1]}'),
    ):
        with pytest.raises(ValueError, match="contains an endless reference to itself; remove that reference"):
            json_schema("p", response, schema=schema)
    nested = {"type": "array", "items": {"$ref": "#"}}
    assert json_schema("p", "[" * 9 + "]" * 9, schema=nested) == 1.0
    assert json_schema("p", "[" * 600 + "]" * 600, schema=nested) == 0.0


def test_a_number_beyond_a_float_cannot_make_a_sample_failed():
    assert json_schema("p", "1" + "0" * 400, schema={"multipleOf": 0.5}) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        r"\prod_{k=1}^{9999} k!", r"\int_0^1 \sin(x^x) dx", r"\sum_{n=1}^{10000000} n^{n}", r"\lim_{x\to 0} x^x",
        r"(9^{9999})^{9999}", r"(a+b+c+d+e+f)^{999}", r"2^{99!}", r"3^{9999\cdot 9999}", r"(\binom{9999}{4999})^{9999}",
    ],
)  # fmt: skip
def test_what_would_take_for_ever_is_right_only_as_it_is_written(text, monkeypatch):
    monkeypatch.setattr(answers, "_library", lambda: pytest.fail("the math library must not parse it"))
    monkeypatch.setattr(answers, "_right", lambda *_: ())
    assert math_answer("p", rf"\boxed{{{text}}}", answer="5") == 0.0
    assert math_answer("p", rf"\boxed{{{text} }}", answer=text) == 1.0


@pytest.mark.parametrize("text", [r"\prod_{k=1}^{9999} k!", r"\sum_{k=1}^{99} k!", r"\int_0^1 \sin(x^x) dx"])
def test_work_is_bounded_where_the_answer_or_the_prose_has_an_operator_too(text, monkeypatch):
    monkeypatch.setattr(answers, "_WORK", 200_000)
    before = sys.getprofile()
    assert math_answer("p", rf"The value is ${text}$", answer="5") == 0.0
    assert math_answer("p", rf"\boxed{{{text}}}", answer=r"\sum_{k=1}^{3} k") == 0.0
    assert sys.getprofile() is before


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{6}", r"\sum_{k=1}^{3} k"), (r"\boxed{\frac{n(n+1)}{2}}", r"\sum_{k=1}^{n} k"),
        (r"\boxed{\sum_{k=1}^n k}", r"\sum_{k=1}^{n} k"), (r"\boxed{\frac{1}{3}}", r"\int_0^1 x^2 dx"),
        (r"As $\sum_{k=1}^{9} k = 45$, the answer is 45.", "45"),
        (r"\boxed{\left(\frac{1}{2}\right)^{100}}", "2^{-100}"),
        (r"\boxed{2^{2024}-2^{2023}}", "2^{2023}"), (r"\boxed{(x+1)^{10}}", "(1+x)^{10}"),
    ],
)  # fmt: skip
def test_ordinary_sums_and_powers_are_still_compared_as_mathematics(response, answer):
    assert math_answer("p", response, answer=answer) == 1.0


# Tests of the run time of reward functions


def seconds(call, repeats):
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"math_answer"}))
def test_ten_kilobytes_take_about_a_millisecond(name):
    prose = "We add 3 apples and 4 pears, which is 7 pieces of fruit in all. " * 155 + "\nThe answer is (B) 7."
    text = json.dumps({"a": 1, "b": prose}) if name == "json_schema" else prose
    function = load(name)
    # A call takes about 1 ms; the limit of 3 ms leaves room for a busy machine.
    assert seconds(lambda: function("p", text, **CALLS[name]), repeats=30) < 0.003


@pytest.mark.parametrize("name", MODULES)
def test_no_text_makes_a_function_take_more_than_linear_time(name):
    function, slow = load(name), []
    function("p", "7", **CALLS[name])
    for piece, text in HOSTILE.items():
        for response in (text, f"{text}\nAnswer: 7 x", f"Answer: {text}"):
            took = seconds(lambda r=response: function("p", r, **CALLS[name]), repeats=1)
            if took > 1.0:
                slow.append((piece, took))
    assert slow == []


# Tests with solutions in the format of GSM8K


GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"


def test_the_solutions_of_gsm8k_are_read_after_their_marker():
    assert numeric_match("", "So 48 + 24 = 72.\n#### 72", answer=GSM8K, marker="####") == 1
    # If `marker` is given, the response must also contain the marker.
    assert numeric_match("", "So 48 + 24 = 72.", answer=GSM8K, marker="####") == 0
    assert numeric_match("", "So 48 + 24 = 72.", answer=GSM8K, answer_marker="####") == 1
    assert numeric_match("", "I give it 24.", answer=GSM8K, answer_marker="####") == 0
    assert numeric_match("", r"The answer: \boxed{1200}", answer="x = 3\n#### 1,200", answer_marker="####") == 1
    with pytest.raises(ValueError, match="or set answer_marker to the text before the number, such as ####"):
        numeric_match("", "72", answer=GSM8K)
    assert [math_answer("", rf"\boxed{{{said}}}", answer=GSM8K, answer_marker="####") for said in (72, 24)] == [1, 0]
    assert math_answer("", r"\boxed{x}", answer="x", answer_marker="####") == 1
