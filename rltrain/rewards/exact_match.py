"""Reward for exact answers: 1 if the whole response is the expected answer."""

import unicodedata


def exact_match(
    prompt: str,
    response: str,
    *,
    answer: str | float | None,
    ignore_case: bool = False,
    ignore_whitespace: bool = False,
) -> float | None:
    """Compare the whole response with the expected answer, character by character.

    The response and the answer are normalized to Unicode NFC, so that two encodings of the same character (such as e
    with an accent) are equal. White space around the response is significant, unless `ignore_whitespace` is set.

    Args:
        prompt: unused.
        response: the model's text.
        answer: the expected text. An answer that is a number is converted with Python's `str`.
        ignore_case: treat upper-case and lower-case letters as equal, in every writing system.
        ignore_whitespace: remove all white space before the comparison, so that "x = 1" equals "x=1".

    Returns:
        1.0 if the response equals the answer, else 0.0; None if `answer` is None.
    """
    if answer is None:
        return None
    options = {"ignore_case": ignore_case, "ignore_whitespace": ignore_whitespace}
    return float(_plain(response, **options) == _plain(str(answer), **options))


def _plain(text: str, *, ignore_case: bool, ignore_whitespace: bool) -> str:
    if ignore_case:
        text = text.casefold()
    if ignore_whitespace:
        text = "".join(text.split())
    return unicodedata.normalize("NFC", text)
