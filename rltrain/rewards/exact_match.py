"""1 where the whole response is the answer."""

import unicodedata


def exact_match(
    prompt: str,
    response: str,
    *,
    answer: str | float | None,
    ignore_case: bool = False,
    ignore_whitespace: bool = False,
) -> float | None:
    """Compare the whole response with the answer, character by character.

    Two ways in which Unicode writes one character (e with an accent, say) are the same. White space around the text
    counts too, unless `ignore_whitespace`.

    Args:
        prompt: not looked at.
        response: the model's text.
        answer: the right text; a number is compared as Python writes it.
        ignore_case: small and capital letters are the same, in every script.
        ignore_whitespace: white space does not count anywhere: "x = 1" is "x=1".

    Returns:
        1.0 or 0.0; None without an answer.
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
