import pytest

from rltrain.compose import compose
from rltrain.errors import ConfigError
from rltrain.main import fail
from rltrain.secret_values import redacted, refuse_secrets

KEY = "sk-" + "a1B2" * 6
ENVIRONMENT = {
    "JUDGE_API_KEY": "correct-horse", "HF_TOKEN": "battery-staple", "TOKENIZERS_PARALLELISM": "perfectly-true",
    "RAY_AUTH_TOKEN_PATH": "/root/.ray/auth_token", "MY_KEY": "short", "HOME": "somewhere-else",
}  # fmt: skip


@pytest.mark.parametrize(
    "secret",
    [KEY, "sk-proj-" + "x" * 20, "ghp_" + "a" * 36, "hf_" + "b" * 30, "AKIA" + "ABCD" * 4, "glpat-" + "c" * 20,
     "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2"],
)  # fmt: skip
def test_what_looks_like_a_key_is_hidden_and_refused(secret):
    assert redacted(f"401: {secret} is not known", {}) == "401: [hidden] is not known"
    with pytest.raises(ConfigError, match=r"^a\.b\[1\]: holds a key, .*api_key_env=NAME$") as error:
        refuse_secrets({"a": {"b": ["x", f"Bearer {secret}"]}}, {})
    assert secret not in str(error.value)


def test_what_a_variable_with_a_telling_name_holds_is_hidden_and_refused():
    assert redacted("correct-horse, battery-staple", ENVIRONMENT) == "[hidden], [hidden]"
    kept = "perfectly-true /root/.ray/auth_token short somewhere-else"
    assert redacted(kept, ENVIRONMENT) == kept
    refuse_secrets({"kept": kept}, ENVIRONMENT)
    with pytest.raises(ConfigError, match=r"^url: holds a key"):
        refuse_secrets({"url": "https://user:correct-horse@host"}, ENVIRONMENT)


@pytest.mark.parametrize("name", ["api_key", "apikey", "openai_api_key", "client_secret", "password", "auth_token"])
def test_an_option_whose_name_says_so_is_a_secret_whatever_it_holds(name):
    with pytest.raises(ConfigError, match=f"kwargs.{name}: holds"):
        refuse_secrets({"kwargs": {name: "hunter2"}}, {})
    refuse_secrets({"kwargs": {name: "", f"{name}_env": "MY_KEY"}}, {})


def test_ordinary_settings_are_none():
    ordinary = {"stop_token": "</answer>", "key": "answer", "path": "hf_models/sk-learn", "pad_token": "<pad>", "n": 3}
    refuse_secrets(ordinary, {})
    assert redacted("the task-oriented model hf_tiny asks", {}) == "the task-oriented model hf_tiny asks"


def test_a_key_among_a_rewards_options_is_refused_before_it_is_written_anywhere(monkeypatch):
    function = "{path:a.b:judge,kwargs:{api_key:%s}}"
    with pytest.raises(ConfigError, match=r"^reward\.functions\[0\]\.kwargs\.api_key: holds a key, token or password"):
        compose([f"reward.functions=[{function % KEY}]"])
    monkeypatch.setenv("MY_API_KEY", "correct-horse")
    with pytest.raises(ConfigError, match=r"^trainer\.output_dir: holds a key") as error:
        compose(["trainer.output_dir=${oc.env:MY_API_KEY}"])
    assert "correct-horse" not in str(error.value)


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
