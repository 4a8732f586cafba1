"""Reward for multiple choice: 1 if a response chooses the right letter."""

import functools
import re
from collections import deque

_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathsf|mbox)\s{0,4}(?=\{)")
_WRAP = r"[\s*_$({\[]{0,8}"  # Characters that may stand between "Answer:" and the letter of the choice.
_UNWRAP = r"[\s*_$)}\]]{0,8}"
_HEAD = (
    r"(?:\\boxed\s{0,4}\{|(?:\b(?i:answer|choice|option)|答案)[\s*_]{0,4}"
    r"(?:(?i:is|would\ be|should\ be)[\s*_]{0,4}:?|[:：=>是为])[\s*_]{0,4}(?:(?i:option|choice|letter)\s{1,4})?)"
)


def multiple_choice(prompt: str, response: str, *, answer: str | int | None, choices: str = "ABCDE") -> float | None:
    r"""Compare the letter that the response chooses with the right letter.

    A response states a choice as `the answer is (B)`, as `\boxed{B}`, as the word `Answer` with a colon and a letter,
    or as a line that contains only a letter. If a response states several choices, the last statement counts. A
    statement that names several letters, such as `the answer is A or B`, chooses no letter. If a response contains no
    statement of a choice, a letter in round brackets or at the start of a line, as in `(B) north` or `B. north`, counts
    as the chosen letter. If a response contains no statement of a choice and has several different letters in round
    brackets or at the start of a line, the response chooses no letter. A response that only lists all options scores 0.

    Args:
        prompt: unused.
        response: the model's text.
        answer: the right letter, which may be written as `(B)` or in lower case; or the index of that letter in
            `choices` as an int, starting at 0.
        choices: all possible choices, as capital letters.

    Returns:
        1.0 if the response chooses the right letter, else 0.0; None if `answer` is None.

    Raises:
        ValueError: the answer is not one of the choices, or the choices are not capital letters.
    """
    if answer is None:
        return None
    return float(_chosen(response, choices) == _right(answer, choices))


def _right(answer: str | int, choices: str) -> str:
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return choices[answer]
    letter = str(answer).strip().strip("().").upper()
    if isinstance(answer, int) or len(letter) != 1 or letter not in choices:
        raise ValueError(
            f"answer {str(answer)[:80]!r} is not one of the choices {choices}; give one of these letters or its index "
            "in choices (counted from 0), or list all letters in choices"
        )
    return letter


def _chosen(response: str, choices: str) -> str | None:
    """Return the letter that the response chooses, or None if the response chooses no letter or several letters."""
    statement, mention = _patterns(choices)
    text = _STYLE.sub("", response)
    last = next(iter(deque(statement.finditer(text), maxlen=1)), None)
    if last is not None:
        named = last["letters"] or last["alone"]
    else:
        named = " ".join(found["round"] or found["first"] for found in mention.finditer(text))
    letters = set(_letters(named, choices))
    return letters.pop() if len(letters) == 1 else None


def _letters(text: str, choices: str) -> list[str]:
    return [letter.upper() for letter in re.findall(rf"(?<![A-Za-z])[{choices}{choices.lower()}](?![A-Za-z])", text)]


@functools.lru_cache(maxsize=16)
def _patterns(choices: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return a regular expression for statements of a choice (`Answer: B`), and one for option labels (`(B) north`).

    The number of repetitions in the regular expressions is bounded, so that matching a long response is fast.
    """
    if not re.fullmatch("[A-Z]+", choices):
        raise ValueError(f"choices={choices!r} must be capital letters, such as ABCD")
    # A lower-case letter counts as a choice only before a closing bracket, a punctuation mark or the end of the line.
    # Within a sentence, a lower-case letter can be a word, as in "the answer is a dog".
    one = rf"(?:[{choices}](?![\w'’-])|[{choices.lower()}](?=[*_$ ]{{0,4}}(?:[)\]}}.,;:\n/]|\Z)))"
    join = r"(?:\s{0,2}(?:,|/|&|\b(?i:or|and)\b)\s{0,2}){1,2}"
    group = rf"{one}(?:{_UNWRAP}{join}{_WRAP}{one}){{0,25}}"
    alone = rf"^[ \t*_$({{\[]{{0,6}}(?P<alone>[{choices}{choices.lower()}])[*_$)}}\].]{{0,6}}[ \t]{{0,4}}$"
    statement = re.compile(rf"{_HEAD}{_WRAP}(?P<letters>{group})|{alone}", re.MULTILINE)
    mention = re.compile(
        rf"\((?P<round>[{choices}{choices.lower()}])\)|^[ \t*]{{0,4}}(?P<first>[{choices}])[*]{{0,2}}[.):][ \t*]",
        re.MULTILINE,
    )
    return statement, mention
