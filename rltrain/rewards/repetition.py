"""Penalty for repeated n-grams of words."""


def repetition_penalty(prompt: str, response: str, *, ngram: int = 3, max_penalty: float = -1.0) -> float:
    """Penalize a response in proportion to its share of repeated n-grams of words.

        score = max_penalty * (1 - (number of distinct n-grams) / (number of all n-grams))

    Algorithm 1 of arXiv 2502.03373 penalizes each token of a repeated n-gram. Because a score is a single number,
    `repetition_penalty` penalizes the share of repeated n-grams instead of single tokens. Words are separated by white
    space, and upper and lower case are treated as equal. The penalty is 0 for a text of fewer than `ngram` words, and
    for a text without white space between words.

    Args:
        prompt: unused.
        response: the model's text.
        ngram: number of words in an n-gram.
        max_penalty: the score, below 0, that a response approaches as its share of repeated n-grams approaches 1.

    Returns:
        A score between `max_penalty` (which is negative) and 0.

    Raises:
        ValueError: `ngram` is below 1, or `max_penalty` is not below 0.
    """
    if ngram < 1:
        raise ValueError(f"ngram={ngram} must be >= 1; 3 is usual")
    if not max_penalty < 0:
        raise ValueError(
            f"max_penalty={max_penalty} must be < 0; use -1.0, and scale the penalty by the function's weight"
        )
    words = response.casefold().split()
    grams = list(zip(*(words[start:] for start in range(ngram)), strict=False))
    repeated = len(grams) - len(set(grams))
    return max_penalty * repeated / len(grams) if repeated else 0.0
