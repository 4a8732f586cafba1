from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import pytest

from rltrain.environments.higher_lower import GUESSES, HigherLower

Strategy = Callable[[int, int, tuple[int, ...]], dict[int, Fraction]]


def game(number):
    made = HigherLower()
    made.reset(seed=0, number=number)
    return made


def test_a_game_by_hand():
    hidden = game(6)
    assert hidden.step("4") == ("higher", 0.0, False)
    assert hidden.step(" 8\n") == ("lower", 0.0, False)
    assert hidden.step("6") == ("right", 1.0, True)


def test_the_fifth_wrong_guess_ends_the_game():
    hidden = game(9)
    assert [hidden.step("0") for _ in range(4)] == [("higher", 0.0, False)] * 4
    assert hidden.step("0") == ("higher", 0.0, True)


def test_the_fifth_guess_may_be_right():
    hidden = game(9)
    for _ in range(4):
        hidden.step("3")
    assert hidden.step("9") == ("right", 1.0, True)


@pytest.mark.parametrize("text", ["", "12", "-1", "five", "5.", "٣", "5 6", "<tool_call>"])
def test_a_text_that_is_no_digit_costs_a_guess(text):
    hidden = game(5)
    assert [hidden.step(text) for _ in range(4)] == [("one digit", 0.0, False)] * 4
    assert hidden.step(text) == ("one digit", 0.0, True)


def test_a_seed_always_hides_the_same_digit_and_seeds_hide_all_digits_equally_often():
    def hidden(seed):
        for digit in range(10):
            made = HigherLower()
            made.reset(seed=seed)
            if made.step(str(digit))[0] == "right":
                return digit
        raise AssertionError

    digits = [hidden(seed) for seed in range(2000)]
    assert digits[:200] == [hidden(seed) for seed in range(200)]
    assert all(140 < count < 260 for count in Counter(digits).values())
    assert len(set(digits)) == 10


@pytest.mark.parametrize("number", [-1, 10, "", "12", 1.5])
def test_a_number_that_is_no_digit_is_refused(number):
    with pytest.raises(ValueError, match="must be a digit from 0 to 9"):
        game(number)


def accuracy(strategy: Strategy) -> Fraction:
    """Return the exact probability that a strategy finds a uniformly random digit, by enumerating all games.

    A strategy maps (lowest possible digit, highest possible digit, guesses so far) to the probabilities of the next
    guess. Each observation comes from a new game in which the earlier guesses are repeated.
    """

    def won(number: int, low: int, high: int, guesses: tuple[int, ...]) -> Fraction:
        total = Fraction(0)
        for guess, probability in strategy(low, high, guesses).items():
            hidden = game(number)
            for earlier in guesses:
                hidden.step(str(earlier))
            observation, reward, done = hidden.step(str(guess))
            if done:
                total += probability * int(reward)
                continue
            below = max(low, guess + 1) if observation == "higher" else low
            above = min(high, guess - 1) if observation == "lower" else high
            total += probability * won(number, below, above, (*guesses, guess))
        return total

    return sum((won(number, 0, 9, ()) for number in range(10)), Fraction(0)) / 10


def middle(low: int, high: int, guesses: tuple[int, ...]) -> dict[int, Fraction]:
    return {(low + high) // 2: Fraction(1)}


def consistent(low: int, high: int, guesses: tuple[int, ...]) -> dict[int, Fraction]:
    return {guess: Fraction(1, high - low + 1) for guess in range(low, high + 1)}


def blind(low: int, high: int, guesses: tuple[int, ...]) -> dict[int, Fraction]:
    """Guess 0, 1, 2 and so on.

    Every order of guesses without repetitions has the same accuracy, because all digits are equally likely.
    """
    return {len(guesses): Fraction(1)}


def test_guesses_in_the_middle_find_every_digit():
    assert accuracy(middle) == 1


def test_guesses_that_ignore_the_answers_find_half_of_the_digits():
    assert accuracy(blind) == Fraction(GUESSES, 10)


def test_random_consistent_guesses_find_91_percent():
    assert round(float(accuracy(consistent)), 3) == 0.913
