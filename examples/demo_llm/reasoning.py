"""A data set of problems from the package reasoning-gym, which makes problems of about a hundred kinds."""

from collections.abc import Iterator

TASK, SETTINGS = "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def rows(split: str) -> Iterator[dict[str, str]]:
    """Yield the problems and answers of the split `train` or `val`.

    The problems are sums and differences of two digits. A problem for evaluation is never used for training.
    """
    import reasoning_gym

    known = set[str]()
    for entry in reasoning_gym.create_dataset(TASK, size=1000, seed=0, **SETTINGS):
        if entry["question"] not in known and (split == "val") == (len(known) % 5 == 0):
            yield {"question": entry["question"], "answer": entry["answer"]}
        known.add(entry["question"])
