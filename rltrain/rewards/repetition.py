"""A penalty for saying the same again."""


def repetition_penalty(prompt: str, response: str, *, ngram: int = 3, max_penalty: float = -1.0) -> float:
    """Take off a share of the penalty: that of the n-grams of words that the response has had before.

        max_penalty * (1 - distinct n-grams / n-grams)

    arXiv 2502.03373 punishes each token of an n-gram that came before (its algorithm 1); a score is one number, so here
    it is the share of such n-grams. Words are what stands between white space, in any case of letters; a text of fewer
    than `ngram` words repeats nothing, and so does one in a script without white space.

    Args:
        prompt: not looked at.
        response: the model's text.
        ngram: words that make one.
        max_penalty: below 0; what a response gets near that repeats one n-gram all the time.

    Returns:
        A score from `max_penalty` to 0.

    Raises:
        ValueError: an option out of its range.
    """
    if ngram < 1:
        raise ValueError(f"ngram={ngram} must be >= 1; 3 is usual")
    if not max_penalty < 0:
        raise ValueError(f"max_penalty={max_penalty} must be < 0; use -1.0, and the function's weight to scale it")
    words = response.casefold().split()
    grams = list(zip(*(words[start:] for start in range(ngram)), strict=False))
    repeated = len(grams) - len(set(grams))
    return max_penalty * repeated / len(grams) if repeated else 0.0
