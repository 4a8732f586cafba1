r"""The `\boxed{...}` of a response, found in one pass whatever the braces do."""

import re

_TOKEN = re.compile(r"\\boxed\s{0,4}\{|\\[\\{}]|[{}]")
_BOX = r"\boxed"


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` that is closed, the inner one of nested boxes; None without one.

    Braces are counted, and `\{`, `\}` are text. A box that is never closed, as at the end of a truncated response, is
    no statement. Takes time in proportion to the text.
    """
    if _BOX not in text:
        return None
    start, end = -1, -1
    open_braces: list[int] = []  # where a box's content starts; -1 for any other brace
    for token in _TOKEN.finditer(text):
        found = token[0]
        if found == "}":
            opened = open_braces.pop() if open_braces else -1
            if opened > start:
                start, end = opened, token.start()
        elif found == "{":
            open_braces.append(-1)
        elif found.startswith(_BOX):
            open_braces.append(token.end())
    return text[start:end].strip() if start >= 0 else None
