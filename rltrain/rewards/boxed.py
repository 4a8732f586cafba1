r"""Find the last `\boxed{...}` of a response in one pass, even if braces are unbalanced."""

import re

_TOKEN = re.compile(r"\\boxed\s{0,4}\{|\\[\\{}]|[{}]")
_BOX = r"\boxed"


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}`, or None if there is no closed box.

    If `\boxed{...}` expressions are nested, the expression that begins last is used. Opening and closing braces are
    paired with a stack. The escaped braces `\{` and `\}` are treated as text. A `\boxed{` that is never closed, as at
    the end of a truncated response, is ignored. The running time of `last_boxed` is linear in the length of the text.
    """
    if _BOX not in text:
        return None
    start, end = -1, -1
    # `open_braces` has one entry per unclosed brace: the index where the content of `\boxed{` starts, or -1 for a plain
    # `{`.
    open_braces: list[int] = []
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
