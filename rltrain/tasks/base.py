"""A built-in task: prompts with correct answers, and flawed answers on which the task's starting model is trained."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

SPLITS = ("train", "val")
VAL_SHARE = 10  # One prompt in ten is held out for evaluation.


@dataclass(frozen=True)
class Example:
    """A token sequence for the supervised training of a task's starting model.

    Attributes:
        ids: token ids of the prompt, followed by the token ids of the flawed answer or of the flawed conversation.
        trained: for each token, whether the model learns to predict it.
        image: content of the image file that the prompt shows; None if it shows none.
    """

    ids: Sequence[int]
    trained: Sequence[bool]
    image: bytes | None = None


class Imitated(Protocol):
    """Interface of a task for which a starting model can be trained."""

    @property
    def name(self) -> str:
        """Name of the built-in task."""

    @property
    def model(self) -> str:
        """Value of the config key `model.path` that names the task's starting model."""

    @property
    def examples_per_step(self) -> int:
        """Number of examples in one optimizer step when the starting model is trained."""

    def tokenizer(self) -> "Qwen2Tokenizer":
        """Build the tokenizer of the task."""

    def examples(self, tokenizer: "Qwen2Tokenizer", rng: Random, size: int) -> list[Example]:
        """Draw `size` random prompts with flawed answers, as training examples."""


@dataclass(frozen=True)
class Task:
    """A task whose prompts consist of `digits` random decimal digits, followed by the character `mark`.

    The lengths of prompts and answers are counted in tokens. The built-in tokenizer encodes each character as one
    token, and the length of an answer includes the end token.

    Attributes:
        name: name of the task, which is the task's key in `rltrain.tasks.TASKS`.
        digits: number of digits in a prompt.
        mark: the character that ends a prompt.
        solve: function that takes the digits of a prompt and returns the correct answer, as text.
        mess: function that takes the digits of a prompt and a random generator, and returns a flawed answer and whether
            the end token follows the answer.
        reward: import path `module:function` of the task's reward function.
        max_response_length: suggested limit on the length of a response in tokens, including the end token.
        examples_per_step: number of flawed answers in one optimizer step when the starting model is trained.
        model: value of the config key `model.path` that names the task's starting model.
    """

    name: str
    digits: int
    mark: str
    solve: Callable[[str], str]
    mess: Callable[[str, Random], tuple[str, bool]]
    reward: str
    max_response_length: int
    examples_per_step: int = 64
    model: str = "builtin"

    @property
    def max_prompt_length(self) -> int:
        """Number of tokens in a prompt, which is the same for all prompts of the task."""
        return self.digits + len(self.mark)

    def prompts(self, split: str, seed: int, count: int) -> list[dict[str, str]]:
        """Draw `count` distinct rows `{"prompt": ..., "answer": ...}`.

        With the same seed, a call with a smaller `count` returns the first rows of a call with a larger `count`. The
        two splits never share a prompt, even with different seeds, because a hash of a prompt decides the prompt's
        split.

        Raises:
            ValueError: the split is unknown, or `count` is below 0 or above 1/20 of the number of possible prompts.
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
        """Return an answer for the starting model to imitate: often a wrong answer, and sometimes one without an end
        token.

        Returns:
            A possibly wrong answer, and whether the end token follows the answer. A finished answer is shorter than
            `max_response_length`, so that the end token fits; an unfinished answer has exactly `max_response_length`
            tokens.
        """
        return self.mess(row["prompt"].removesuffix(self.mark), rng)

    def tokenizer(self) -> "Qwen2Tokenizer":
        """Build the task's tokenizer, which encodes each character as one token."""
        from rltrain.tasks.tokenizer import char_tokenizer

        return char_tokenizer()

    def examples(self, tokenizer: "Qwen2Tokenizer", rng: Random, size: int) -> list[Example]:
        """Draw `size` random prompts with flawed answers for supervised training.

        Each example contains the token ids of a prompt and of its flawed answer. If `messy_answer` says that the end
        token follows the answer, the example ends with the end token. The model is not trained to predict the tokens of
        the prompt.
        """
        found = []
        for row in self.prompts("train", rng.getrandbits(64), size):
            text, finished = self.messy_answer(row, rng)
            end = [tokenizer.eos_token_id] if finished else []
            ids = [*tokenizer.encode(row["prompt"] + text, add_special_tokens=False), *end]
            found.append(Example(ids, [position >= self.max_prompt_length for position in range(len(ids))]))
        return found

    def _draw(self, split: str, rng: Random) -> dict[str, str]:
        """Draw one random prompt of the given split, with its answer, by rejection sampling."""
        while True:
            digits = f"{rng.randrange(10**self.digits):0{self.digits}d}"
            prompt = digits + self.mark
            if split_of(prompt) == split:
                return {"prompt": prompt, "answer": self.solve(digits)}


def split_of(prompt: str) -> str:
    """Return the split ("train" or "val") to which a hash of the prompt's text assigns the prompt.

    The hash of a prompt's text is the same on every machine.
    """
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "big") % VAL_SHARE == 0 else "train"
