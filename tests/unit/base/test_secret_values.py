import base64
import json
import logging
import random

import pytest

from rltrain.base.errors import ConfigError, described, one_line
from rltrain.base.secret_values import hide_in_logs, redacted, secret_in
from rltrain.main import fail
from rltrain.settings.compose import compose

KEY = "sk-" + "a1B2" * 6
ENVIRONMENT = {
    "JUDGE_API_KEY": "correct-horse", "HF_TOKEN": "battery-staple", "TOKENIZERS_PARALLELISM": "perfectly-true",
    "RAY_AUTH_TOKEN_PATH": "/root/.ray/auth_token", "MY_KEY": "short", "HOME": "somewhere-else",
}  # fmt: skip
BODY = base64.encodebytes(random.Random(0).randbytes(1200)).decode()
# Each marker of a private key is written in two parts, so that secret scanners do not report this file.
BEGIN, END = "-----BEGIN " + "PRIVATE KEY-----", "-----END " + "PRIVATE KEY-----"
PASSWORD = 'p@ss/w0rd "\\ü!'
PEM = f"{BEGIN}\n{BODY}{END}\n"
ACCOUNT = json.dumps({"type": "service_account", "private_key": PEM}, indent=1)


@pytest.mark.parametrize(
    "secret",
    [KEY, "sk-proj-" + "x" * 20, "ghp_" + "a" * 36, "hf_" + "b" * 30, "AKIA" + "ABCD" * 4, "glpat-" + "c" * 20,
     "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2"],
)  # fmt: skip
def test_what_looks_like_a_key_is_hidden_and_found(secret):
    assert redacted(f"401: {secret} is not known", {}) == "401: [hidden] is not known"
    assert secret_in({"a": {"b": ["x", f"Bearer {secret}"]}}, {}) == "a.b[1]"


def test_what_a_variable_with_a_telling_name_holds_is_hidden_and_found():
    assert redacted("correct-horse, battery-staple", ENVIRONMENT) == "[hidden], [hidden]"
    kept = "perfectly-true /root/.ray/auth_token short somewhere-else"
    assert redacted(kept, ENVIRONMENT) == kept
    assert secret_in({"kept": kept}, ENVIRONMENT) is None
    assert secret_in({"kept": kept, "url": "https://user:correct-horse@host"}, ENVIRONMENT) == "url"
    assert secret_in({"kept": {"correct-horse": KEY}}, ENVIRONMENT) == "kept.[hidden]"


FORMS = {
    "as it is": lambda text: text,
    "on one line": lambda text: " ".join(text.split()),
    "without whitespace": lambda text: "".join(text.split()),
    "other line ends": lambda text: text.replace("\n", "\r\n"),
    "indented": lambda text: text.replace("\n", "\n    "),
    "repr": repr,
    "repr of bytes": lambda text: repr(text.encode()),
    "JSON": lambda text: json.dumps({"key": text}),
    "JSON in JSON": lambda text: json.dumps(json.dumps([text])),
    "repr of an exception": lambda text: repr(ValueError(repr(ValueError(text)))),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "held", [PEM, PEM.strip(), repr(PEM)[1:-1], ACCOUNT], ids=["PEM", "bare", "escaped", "account"]
)
def test_a_key_of_many_lines_is_hidden_however_its_line_breaks_are_written(form, held):
    shown = redacted(f"refused: {FORMS[form](PEM)} is not known", {"DEPLOY_KEY": held})
    assert shown.startswith("refused: ")
    assert shown.endswith(" is not known")
    assert len(shown) < 70
    assert not any(line in shown for line in BODY.split())


def test_a_single_line_of_a_key_of_many_lines_is_hidden_too():
    lines = BODY.splitlines()
    assert redacted(f"bad line: {lines[3]}", {"DEPLOY_KEY": PEM}) == "bad line: [hidden]"
    assert redacted(f"bad lines: {lines[3:5]}", {"DEPLOY_KEY": PEM}) == "bad lines: ['[hidden]', '[hidden]']"


def test_a_private_key_is_hidden_wherever_it_came_from():
    assert redacted(f"cannot read {PEM!r}: no such key", {}) == "cannot read '[hidden]\\n': no such key"
    assert redacted(f"cannot read {PEM[:300]}", {}) == "cannot read [hidden]"


@pytest.mark.parametrize(
    "written",
    [PASSWORD, json.dumps(PASSWORD)[1:-1], repr(PASSWORD + "'")[1:-3], repr(PASSWORD.encode("latin-1"))[2:-1],
     "p%40ss%2Fw0rd%20%22%5C%C3%BC!", "p%40ss%2fw0rd%20%22%5c%c3%bc!", "p@ss\\/w0rd \\\"\\\\\\xfc!"],
)  # fmt: skip
def test_a_password_is_hidden_as_it_is_and_as_python_json_and_urls_spell_it(written):
    assert redacted(f"https://me:{written}@host", {"PASSWORD": PASSWORD}) == "https://me:[hidden]@host"


def test_a_secret_is_found_before_a_text_is_cut(monkeypatch):
    monkeypatch.setenv("DEPLOY_KEY", PEM)
    assert described(ValueError(f"{'x' * 190} {PEM}"), 200) == f"ValueError: {'x' * 190} [hidden]"
    assert one_line(f"{'x' * 90} {PEM} {'y' * 90}", 300) == f"{'x' * 90} [hidden]\\n {'y' * 90}"


def test_a_text_without_secrets_is_looked_through_in_no_time(monkeypatch):
    assert redacted("\\" * 20_000 + "!", {"PASSWORD": "\\" * 40 + "?"}) == "\\" * 20_000 + "!"


def test_warnings_of_loggers_hide_keys_in_the_message_and_in_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("DEPLOY_KEY", PEM)
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    hide_in_logs()
    try:
        raise ValueError(PEM)
    except ValueError:
        record = logging.LogRecord("rltrain", logging.WARNING, "f.py", 1, "not saved: %r", (PEM,), None)
        record.exc_info = logging.sys.exc_info()
        logging.lastResort.handle(record)
    shown = capsys.readouterr().err
    assert "not saved: '[hidden]" in shown
    assert "ValueError: [hidden]" in shown
    assert not any(line in shown for line in BODY.split())


@pytest.mark.parametrize("name", ["api_key", "apikey", "openai_api_key", "client_secret", "password", "auth_token"])
def test_an_option_whose_name_says_so_is_a_secret_whatever_it_holds(name):
    assert secret_in({"kwargs": {name: "hunter2"}}, {}) == f"kwargs.{name}"
    assert secret_in({"kwargs": {name: "", f"{name}_env": "MY_KEY"}}, {}) is None


def test_ordinary_settings_are_none():
    ordinary = {"stop_token": "</answer>", "key": "answer", "path": "hf_models/sk-learn", "pad_token": "<pad>", "n": 3}
    assert secret_in(ordinary, {}) is None
    assert redacted("the task-oriented model hf_tiny asks", {}) == "the task-oriented model hf_tiny asks"


def test_a_key_among_a_rewards_options_is_refused_before_it_is_written_anywhere(monkeypatch):
    function = "{path:a.b:judge,kwargs:{api_key:%s}}"
    with pytest.raises(ConfigError, match=r"^reward\.functions\[0\]\.kwargs\.api_key: holds a key, token or password"):
        compose([f"reward.functions=[{function % KEY}]"])
    monkeypatch.setenv("MY_API_KEY", "correct-horse")
    with pytest.raises(ConfigError, match=r"^trainer\.output_dir: holds a key") as error:
        compose(["trainer.output_dir=${oc.env:MY_API_KEY}"])
    assert "correct-horse" not in str(error.value)
    monkeypatch.setenv("MY_API_KEY", PEM)
    with pytest.raises(ConfigError, match=r"^trainer\.output_dir: holds a key, .*api_key_env=NAME$"):
        compose(["trainer.output_dir=${oc.env:MY_API_KEY}"])


def test_errors_on_the_terminal_hide_keys(capsys, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "correct-horse")
    try:
        raise ValueError(f"the server refuses {KEY} and correct-horse")
    except ValueError as error:
        fail(str(error), 1, verbose=True)
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("error: the server refuses [hidden] and [hidden]\n")
    assert KEY not in shown


def test_errors_on_the_terminal_hide_keys_of_many_lines_whatever_the_traceback_makes_of_them(capsys, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", PEM)
    try:
        raise ValueError(f"the server refuses {PEM}")
    except ValueError as error:
        fail(str(error), 1, verbose=True)
        fail(f"unexpected {described(error)}", 1, verbose=False)
    shown = capsys.readouterr().err
    assert "ValueError: the server refuses [hidden]" in shown
    assert shown.endswith(
        "error: the server refuses [hidden]\nerror: unexpected ValueError: the server refuses [hidden]\n"
    )
    assert not any(line in shown for line in BODY.split())


def test_an_error_out_of_code_with_an_impossible_file_name_is_shown_without_its_traceback(capsys):
    def broken():
        raise ValueError("no luck")

    broken.__code__ = broken.__code__.replace(co_filename="strange\0name")
    try:
        broken()
    except ValueError as error:
        fail(str(error), 1, verbose=True)
    shown = capsys.readouterr().err
    assert shown.startswith("The traceback cannot be shown (ValueError: ")
    assert shown.endswith("error: no luck\n")
