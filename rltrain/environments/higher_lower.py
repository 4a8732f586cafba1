"""Environment of the task `higher_lower`: the policy guesses a hidden digit, and gets a hint for each guess."""

from random import Random

GUESSES = 5
NUMBERS = "0123456789"
HIGHER, LOWER, RIGHT, INVALID = "higher", "lower", "right", "one digit"


class HigherLower:
    """A game with a hidden digit and five guesses.

    The game is over after the right guess or after the fifth guess. The right guess has reward 1, and each wrong guess
    has reward 0, so the rewards of a game sum to 1 if the policy found the digit, and to 0 otherwise.
    """

    def reset(self, seed: int, number: int | None = None) -> None:
        """Start a game.

        Args:
            seed: seed of the hidden digit. Each game of a prompt group has its own seed, so the games of a group can
                have different digits.
            number: the hidden digit, from 0 to 9; None to draw the digit at random.

        Raises:
            ValueError: `number` is not a digit.
        """
        if number is None:
            number = Random(seed).randrange(len(NUMBERS))
        if str(number) not in tuple(NUMBERS):
            raise ValueError(f"number={number!r}: the hidden number must be a digit from 0 to 9")
        self._number, self._left = int(number), GUESSES

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answer a guess.

        Args:
            text: the policy's guess: one digit. White space around the digit is ignored. A text that is not one digit
                counts as a wrong guess.

        Returns:
            Three values: the observation, the reward of the guess, and whether the game is over. The observation is
            "right" if the guess is the hidden digit, "higher" if the hidden digit is higher than the guess, "lower" if
            the hidden digit is lower than the guess, or "one digit" if the text is not a digit.
        """
        self._left -= 1
        guess = text.strip()
        if guess not in tuple(NUMBERS):
            return INVALID, 0.0, self._left == 0
        if int(guess) == self._number:
            return RIGHT, 1.0, True
        return HIGHER if self._number > int(guess) else LOWER, 0.0, self._left == 0
