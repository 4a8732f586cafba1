"""Task: find a hidden digit with at most five guesses, each of which is answered with `higher`, `lower` or `right`.

A player who ignores the hints and never repeats a guess finds the digit in 50% of the games. A player who draws each
guess from the digits that are still possible finds the digit in 91% of the games. A player who always guesses the
middle of the digits that are still possible finds the digit in all games.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from rltrain.environments.higher_lower import GUESSES, HIGHER, INVALID, LOWER, NUMBERS, HigherLower
from rltrain.tasks.conversation import ConversationTask, Message, Row

QUESTION = "Guess my digit."
# The starting model imitates example games. CONSISTENT is the fraction of these games in which each guess agrees with
# all earlier hints.
CONSISTENT = 0.35
# In games whose guesses agree with all hints, a guess is the middle of the possible digits with probability MIDDLE, and
# otherwise a random possible digit.
MIDDLE = 0.5
STUBBORN = 0.5  # Probability that a guess repeats the last guess, in games whose guesses ignore the hints.
# Probability that a message of the player is "?" instead of a digit, in the games that the starting model imitates.
SPOILT = 0.05


def draw(split: str, rng: Random) -> Row:
    """Return the data row of a game.

    All games have the same row, because the hidden digit is not in the row: the environment draws the hidden digit.
    """
    return {"question": QUESTION}


def mess(row: Mapping[str, Any], rng: Random) -> list[Message]:
    """Return the messages of a game with a flawed player, as an example that the starting model learns to imitate.

    In most of the games that `mess` returns, the guesses ignore the hints and often repeat the last guess.
    """
    environment = HigherLower()
    environment.reset(rng.getrandbits(32))
    messages: list[Message] = [{"role": "user", "content": row["question"]}]
    consistent = rng.random() < CONSISTENT
    possible, guess, done = list(NUMBERS), rng.choice(NUMBERS), False
    while not done:
        if consistent:
            guess = possible[len(possible) // 2] if rng.random() < MIDDLE else rng.choice(possible)
        elif rng.random() >= STUBBORN:
            guess = rng.choice(NUMBERS)
        text = "?" if rng.random() < SPOILT else guess
        observation, _, done = environment.step(text)
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": observation})
        possible = still_possible(possible, guess, observation)
    return messages[:-1]


def still_possible(digits: list[str], guess: str, observation: str) -> list[str]:
    """Return the digits that are still possible after the environment's hint on a guess."""
    if observation == HIGHER:
        return [digit for digit in digits if digit > guess]
    if observation == LOWER:
        return [digit for digit in digits if digit < guess]
    return digits


HIGHER_LOWER = ConversationTask(
    name="higher_lower",
    environment="rltrain.environments.higher_lower:HigherLower",
    reward="rltrain.rewards.environment_reward:environment_reward",
    draw=draw,
    mess=mess,
    max_turns=GUESSES,
    max_prompt_length=16,
    max_response_length=64,
    phrases=(QUESTION, HIGHER, LOWER, INVALID),
)
