"""Rewards of the built-in tasks: 1 for a right answer in a finished response, else 0."""

ANSWER_MARK = "#"


def final_answer(prompt: str, response: str, *, answer: str, finish_reason: str) -> float:
    """Compare the text after the last `#` with the expected answer. A response without the character `#` scores 0.

    Args:
        prompt: the prompt, which is not used.
        response: the model's text, without special tokens.
        answer: the right answer.
        finish_reason: the engine's finish reason. Only a response with the finish reason "stop" can earn a reward; a
            truncated response gets 0.

    Returns:
        1.0 if the answer is right and the response is finished, else 0.0. White space around the answer in the response
        is ignored.
    """
    _, mark, last = response.rpartition(ANSWER_MARK)
    return float(bool(mark) and finish_reason == "stop" and last.strip() == answer)


def exact_answer(prompt: str, response: str, *, answer: str, finish_reason: str) -> float:
    """Compare the whole response with the expected answer.

    The arguments and the result have the same meaning as in the function `final_answer`.
    """
    return float(finish_reason == "stop" and response.strip() == answer)
