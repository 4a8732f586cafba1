"""Rewards of the built-in tasks: 1 for a right answer that was finished, else 0."""

ANSWER_MARK = "#"


def final_answer(prompt: str, response: str, *, answer: str, finish_reason: str) -> float:
    """Judge what follows the last `#`; a response without one is wrong.

    Args:
        prompt: not looked at; every reward function gets it.
        response: the model's text, without special tokens.
        answer: the right answer.
        finish_reason: the engine's word: only "stop" earns a reward, a truncated answer never does.

    Returns:
        1.0 if right and finished, else 0.0. White space around the answer does not count.
    """
    _, mark, last = response.rpartition(ANSWER_MARK)
    return float(bool(mark) and finish_reason == "stop" and last.strip() == answer)


def exact_answer(prompt: str, response: str, *, answer: str, finish_reason: str) -> float:
    """Judge the whole response; arguments and result as of `final_answer`."""
    return float(finish_reason == "stop" and response.strip() == answer)
