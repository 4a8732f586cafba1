"""What a built-in task is: prompts with right answers, and deliberately messy answers for its weak start."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

SPLITS = ("train", "val")
VAL_SHARE = 10  # one prompt in ten is held out


@dataclass(frozen=True)
class Task:
    """A task on strings of decimal digits: the prompt is `digits` random digits and a closing mark.

    Lengths are in tokens; the built-in tokenizer makes one token of a character, and the end token counts.

    Attributes:
        name: key in `rltrain.tasks.TASKS`.
        digits: number of digits in a prompt.
        mark: the character that closes a prompt.
        solve: digits -> the right answer, as text.
        mess: (digits, rng) -> (answer text, whether the end token follows it).
        reward: import path `module:function` of the reward function that judges the task.
        max_response_length: suggested limit in tokens, the end token included.
    """

    name: str
    digits: int
    mark: str
    solve: Callable[[str], str]
    mess: Callable[[str, Random], tuple[str, bool]]
    reward: str
    max_response_length: int

    @property
    def max_prompt_length(self) -> int:
        """Length of every prompt, in tokens."""
        return self.digits + len(self.mark)

    def prompts(self, split: str, seed: int, count: int) -> list[dict[str, str]]:
        """Draw `count` distinct rows `{"prompt": ..., "answer": ...}`; fewer rows of one seed are a prefix of more.

        No prompt is in both splits whatever the seeds, since the prompt's own hash decides its split.

        Raises:
            ValueError: unknown split, or more rows than half the split's share of all prompts.
        """
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: a built-in task has the splits {', '.join(SPLITS)}")
        limit = 10**self.digits // (2 * VAL_SHARE)
        if not 0 <= count <= limit:
            raise ValueError(f"count={count}: task {self.name} gives between 0 and {limit} rows; ask for fewer")
        rng = Random(f"{self.name}/{split}/{seed}")
        rows: dict[str, dict[str, str]] = {}
        while len(rows) < count:
            row = self._draw(split, rng)
            rows[row["prompt"]] = row
        return list(rows.values())

    def messy_answer(self, row: dict[str, str], rng: Random) -> tuple[str, bool]:
        """Answer a row as the weak start shall: often wrong, sometimes without an end.

        Returns:
            The text and whether the end token follows it. Finished text is shorter than `max_response_length`, so that
            the end token fits; unfinished text fills it exactly.
        """
        return self.mess(row["prompt"].removesuffix(self.mark), rng)

    def _draw(self, split: str, rng: Random) -> dict[str, str]:
        """Draw one row of the split by rejection."""
        while True:
            digits = f"{rng.randrange(10**self.digits):0{self.digits}d}"
            prompt = digits + self.mark
            if split_of(prompt) == split:
                return {"prompt": prompt, "answer": self.solve(digits)}


def split_of(prompt: str) -> str:
    """Say which split a prompt belongs to, from a hash of its text that is the same on every machine."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") % VAL_SHARE == 0 else "train"
