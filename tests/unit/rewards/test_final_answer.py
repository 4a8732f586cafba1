import subprocess
import sys

import pytest

from rltrain.rewards.final_answer import exact_answer, final_answer

PROMPT = "2299907="


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("#7", 1.0),
        ("0227999#7", 1.0),
        ("0027999#7", 1.0),  # The text before the mark # is not judged.
        ("#1#2#7", 1.0),
        (" # 7 ", 1.0),
        ("#7#2", 0.0),
        ("#2", 0.0),
        ("#77", 0.0),
        ("#7.", 0.0),
        ("0227999#", 0.0),
        ("7", 0.0),  # This answer lacks the mark #.
        ("0227999", 0.0),
        ("", 0.0),
    ],
)
def test_only_what_follows_the_last_mark_counts(response: str, reward: float) -> None:
    assert final_answer(PROMPT, response, answer="7", finish_reason="stop") == reward


@pytest.mark.parametrize("finish_reason", ["length", "abort", ""])
def test_an_answer_that_did_not_stop_earns_nothing(finish_reason: str) -> None:
    assert final_answer(PROMPT, "#7", answer="7", finish_reason=finish_reason) == 0.0
    assert exact_answer("371924>", "123479", answer="123479", finish_reason=finish_reason) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [("123479", 1.0), (" 123479\n", 1.0), ("12347", 0.0), ("1234799", 0.0), ("#123479", 0.0), ("371924", 0.0)],
)
def test_the_whole_response_must_be_the_answer(response: str, reward: float) -> None:
    assert exact_answer("371924>", response, answer="123479", finish_reason="stop") == reward


def test_an_empty_answer_is_not_right_without_the_mark() -> None:
    assert final_answer(PROMPT, "", answer="", finish_reason="stop") == 0.0


def test_a_reward_is_a_float() -> None:
    assert type(final_answer(PROMPT, "#7", answer="7", finish_reason="stop")) is float
    assert type(exact_answer("1>", "1", answer="1", finish_reason="stop")) is float


def test_the_rewards_import_no_torch() -> None:
    script = "import sys, rltrain.rewards.final_answer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
