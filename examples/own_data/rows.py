"""A data function, which generates its rows instead of reading them from a file."""

import random


def sums(split, seed):
    """Yield 2,000 random sums for training, or 200 for evaluation."""
    draws = random.Random(f"{split}/{seed}")
    for _ in range(2000 if split == "train" else 200):
        a, b = draws.randrange(100), draws.randrange(100)
        yield {"question": f"{a}+{b}=", "answer": str(a + b)}
