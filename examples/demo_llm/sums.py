"""Data set of the sums of two digits, which asks for instance `What is 3 + 4?`."""

from collections.abc import Iterator


def rows(split: str) -> Iterator[dict[str, str]]:
    """Yield the questions and answers of a split.

    Every fifth sum is for evaluation, and all other sums are for training.

    Args:
        split: The name of the split, `train` or `val`.
    """
    for number in range(100):
        first, second = divmod(number, 10)
        if (split == "val") == ((first + 3 * second) % 5 == 0):
            question = f"What is {first} + {second}? Answer with the number only."
            yield {"question": question, "answer": str(first + second)}
