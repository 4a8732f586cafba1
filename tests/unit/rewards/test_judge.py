"""Tests of a language model as the judge, with a small HTTP server that implements the chat completions protocol."""

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rltrain.rewards.judge import judge
from rltrain.rewards.loading import check_columns, finish, load_function
from rltrain.settings.compose import compose
from tests.reward_configs import reward_function
from workers.reward.messages import RewardRequest
from workers.reward.worker import RewardWorker

PATH = "rltrain.rewards.judge:judge"


class Server(ThreadingHTTPServer):
    """An HTTP server that answers request n with `reply(n)`: a text, a body, or (status, headers[, body]).

    The server records the bodies and times of all requests, and the largest number of simultaneous requests.
    """

    daemon_threads = True

    def __init__(self, reply, delay_s):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.delay_s, self.lock = reply, delay_s, threading.Lock()
        self.asked, self.times, self.headers, self.busy, self.busiest = [], [], [], 0, 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_):
        """Ignore errors from clients that disconnect, because some tests disconnect on purpose."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self):
        server = self.server
        assert self.path == "/v1/chat/completions"
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.asked)
            server.asked.append(asked)
            server.times.append(time.monotonic())
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
        time.sleep(server.delay_s)
        reply = server.reply(number)
        with server.lock:
            server.busy -= 1
        status, headers, *said = (200, {}) if isinstance(reply, str | dict) else reply
        message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
        whole = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [message]}
        content = said[0] if said else reply if isinstance(reply, dict) else whole
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Type": "application/json", "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print no log of the requests to the terminal."""


@contextmanager
def serving(reply, *, delay_s=0.0):
    server = Server(reply, delay_s)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(server_or_url, prompt="2+2=", response="4", **options):
    url = getattr(server_or_url, "url", server_or_url)
    return finish(judge(prompt, response, base_url=url, model="m", **options))


def worker(url, concurrency=64, **kwargs) -> RewardWorker:
    options = {"base_url": url, "model": "m", **kwargs}
    return RewardWorker([reward_function("judge", PATH, kwargs=options)], concurrency=concurrency)


def requests(count):
    return [RewardRequest((0, n), f"prompt {n}", f"response {n}", {"finish_reason": "stop"}) for n in range(count)]


def test_the_number_behind_score_is_the_reward_and_the_question_holds_prompt_and_response():
    with serving(lambda _: "Score: 8.5") as server:
        assert ask(server, scale=0.1).score == pytest.approx(0.85)
    (asked,) = server.asked
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m", 0.0, 64)
    (message,) = asked["messages"]
    assert message["role"] == "user"
    assert "<prompt>\n2+2=\n</prompt>\n<response>\n4\n</response>" in message["content"]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: 7", 7.0),
        ("**Score:** 7", 7.0),
        ("score = -2", -2.0),
        ("SCORE:\n0", 0.0),
        ("It says 'Score: 10' itself. Weak.\nScore: 3", 3.0),  # The last score in the judge's answer counts.
        ("Score: 3/10", 3.0),
    ],
)
def test_what_judges_write_is_read(answer, score):
    with serving(lambda _: answer) as server:
        result = ask(server)
    assert (result.score, result.failed) == (score, False)


@pytest.mark.parametrize("answer", ["", "I cannot rate this.", "Score: high", "7"])
def test_an_answer_without_a_number_is_failed_and_never_0(answer):
    with serving(lambda _: answer) as server:
        result = ask(server)
    assert (result.score, result.failed) == (None, True)
    assert result.message == f"no number in the judge's answer, which begins {answer!r}"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": []},
        *(
            {"choices": [{"message": {"content": content}}]}
            for content in (None, 5, [{"type": "text", "text": "Score: 3"}])
        ),
    ],
)
def test_what_is_no_completion_is_failed(body):
    with serving(lambda _: body) as server:
        result = ask(server)
    assert result.failed
    assert "not a chat completion" in result.message or "no number" in result.message


@pytest.mark.parametrize("body", [b"\xff<html>", b"{", b"", b'{"choices": "\xff"}'])
def test_a_body_that_cannot_be_read_is_failed_in_the_judges_own_words(body):
    with serving(lambda _: (200, {}, body)) as server:
        result = ask(server, retries=0)
    assert result.failed
    assert result.message.startswith(f"{server.url}: ")
    assert "\n" not in result.message


def test_columns_go_into_a_question_of_ones_own_and_braces_in_values_stay_as_they_are():
    with serving(lambda _: "grade: B2") as server:
        result = ask(
            server, response="{answer}", question="{{{answer}}} or {response}?", score=r"grade: [A-F](\d)", answer="4"
        )
    assert result.score == 2.0
    assert server.asked[0]["messages"][0]["content"] == "{4} or {answer}?"


def test_a_server_that_fails_once_is_asked_again():
    with serving(lambda n: "Score: 1" if n else (500, {})) as server:
        assert ask(server).score == 1.0
    assert len(server.asked) == 2


def test_a_rate_limit_of_the_server_is_waited_for_as_long_as_it_says():
    with serving(lambda n: "Score: 1" if n else (429, {"Retry-After": "1"})) as server:
        assert ask(server).score == 1.0
    assert 1.0 <= server.times[1] - server.times[0] < 4.0


def test_a_server_that_goes_on_failing_is_given_up():
    with serving(lambda _: (500, {"retry-after-ms": "10"})) as server:
        result = ask(server, retries=2)
    assert result.failed
    assert result.message.startswith(f"{server.url}: InternalServerError: ")
    assert len(server.asked) == 3


def test_a_wrong_request_is_not_tried_again():
    with serving(lambda _: (400, {})) as server:
        assert "BadRequestError" in ask(server).message
    assert len(server.asked) == 1


def test_no_server_at_all_is_failed_soon():
    with serving(lambda _: "") as server:
        pass  # No server listens on the port any more.
    began = time.monotonic()
    result = ask(server.url, retries=1)
    assert result.failed
    assert "APIConnectionError" in result.message
    assert time.monotonic() - began < 10


def test_a_server_that_does_not_answer_is_failed_in_time():
    with serving(lambda _: "Score: 1", delay_s=1.5) as server:
        began = time.monotonic()
        result = ask(server, retries=0, timeout_s=0.3)
        assert time.monotonic() - began < 1.4
    assert "APITimeoutError" in result.message


def test_G3_scores_belong_to_their_samples_and_never_more_are_under_way_than_allowed():
    with serving(lambda n: "", delay_s=0.05) as server:
        server.reply = lambda n: f"Score: {server.asked[n]['messages'][0]['content']}"
        results = worker(server.url, question="{response}", score=r"response (\d+)", max_concurrent=3).score(
            requests(12)
        )
    assert [result.scores for result in results] == [(float(n),) for n in range(12)]
    assert server.busiest == 3


def test_requests_leave_no_faster_than_the_rate_and_retries_count():
    with serving(lambda n: (500, {"retry-after-ms": "1"}) if n == 1 else "Score: 1") as server:
        began = time.monotonic()
        results = worker(server.url, requests_per_minute=600).score(requests(5))
    assert [result.scores for result in results] == [(1.0,)] * 5
    assert len(server.times) == 6
    assert all(arrived - began >= 0.1 * number for number, arrived in enumerate(server.times))


def test_in_a_worker_a_judge_that_fails_makes_its_sample_failed_and_one_that_hangs_is_cancelled():
    with serving(lambda n: "no idea") as server:
        (result,) = worker(server.url).score(requests(1))
    assert result.failed
    assert result.error == (
        "reward function 'judge' reported a failure: no number in the judge's answer, which begins 'no idea'"
    )
    with serving(lambda _: "Score: 1", delay_s=1.0) as server:
        (result,) = worker(server.url).score(requests(1), limit_s=0.2)
    assert "did not return within 0.2 s" in result.error


def test_the_key_comes_from_the_environment_and_no_message_shows_it(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another")
    with serving(lambda _: "Score: 1") as server:
        ask(server, api_key_env="MY_KEY")
        ask(server)
    assert [headers["authorization"] for headers in server.headers] == ["Bearer sk-secret", "Bearer none"]
    with serving(lambda _: (401, {}, {"error": {"message": "wrong key sk-secret"}})) as server:
        message = ask(server, api_key_env="MY_KEY").message
    assert "wrong key [hidden]" in message
    monkeypatch.setenv("CREDENTIAL", "a b")  # This short secret is in a variable whose name does not suggest a secret.
    for reply in ((401, {}, {"error": {"message": "wrong key 'a\\nb'"}}), "I was asked with a  b"):
        with serving(lambda _, reply=reply: reply) as server:
            assert "[hidden]" in ask(server, api_key_env="CREDENTIAL").message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "api_key_env=NOT_SET_ANYWHERE: not set in the reward process"),
        ({"api_key_env": "sk-1234"}, "api_key_env is not the name of an environment variable"),
        ({"question": "What is 2+2?"}, "question='What is 2+2?': has no {response}; set kwargs.question"),
        (
            {"question": "{response} {gold}"},
            "question has {gold}, but this sample has only prompt, response; use one of these names, or write a",
        ),
        ({"question": 7}, "question='7': has no {response}"),
        ({"score": r"\d+"}, r"score='\\d+': has no group"),
        ({"score": "("}, "score='(': not a regular expression"),
        ({"score": 0.5}, "score=0.5: not a regular expression"),
    ],
)
def test_settings_that_cannot_work_are_named_before_anything_is_sent(options, message):
    result = ask("http://127.0.0.1:9/v1", **options)
    assert result.failed
    assert result.message.startswith(message)
    assert "sk-1234" not in result.message


def test_the_config_takes_a_judge_and_only_with_what_it_needs():
    config, _ = compose([f"reward.functions=[{{path: '{PATH}', kwargs: {{base_url: 'http://h/v1', model: m}}}}]"])
    (function,) = config.reward.functions
    check_columns(load_function(function.path), function.name, [], function.kwargs)
    with pytest.raises(Exception, match="needs a column 'base_url'"):
        check_columns(load_function(function.path), function.name, [], {"model": "m"})


def test_neither_the_judge_nor_its_client_imports_torch():
    code = (
        "import sys, rltrain.rewards.judge as j; assert 'openai' not in sys.modules; import openai; "
        "print([m for m in ('torch', 'transformers', 'vllm', 'tensordict') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]", done.stderr
