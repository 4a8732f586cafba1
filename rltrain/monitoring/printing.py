"""Prints lines, and wraps them at the width of a terminal."""

import re

from rich.console import Console
from rich.text import Text

# The start of a line after which the continuation lines are aligned: a label such as "    prompt  ", or indentation.
_LABEL = re.compile(r" {4}\S+ {2,}| *")
_INDENT = 2
_NARROWEST = 10  # Text is wrapped at this number of columns or more.


def can_redraw(console: Console) -> bool:
    """Return whether the console is a terminal on which a live display can redraw its line."""
    return console.is_terminal and not console.is_dumb_terminal


def print_lines(console: Console, text: str | Text) -> None:
    """Print one or more lines without interpreting markup.

    A terminal gets lines that are wrapped between words, with indented continuation lines. Anything else, such as a
    file, gets each line whole, however long it is.
    """
    shown = Text(text) if isinstance(text, str) else text
    if can_redraw(console):
        shown = Text("\n").join(part for line in shown.split("\n") for part in _wrapped(line, console))
    console.print(shown, soft_wrap=True)


def _wrapped(line: Text, console: Console) -> list[Text]:
    """Wrap a line between words. A word that is wider than the terminal is broken."""
    if line.cell_len <= console.width:
        return [line]
    label = _LABEL.match(line.plain)
    start = label.end() if label is not None else 0
    indent = start if line.plain[:start].strip() else start + _INDENT
    head, rest = line.divide([start])
    parts = rest.wrap(console, max(_NARROWEST, console.width - indent))
    for part in parts:
        part.rstrip()
    return [(Text(" " * indent) if number else head) + part for number, part in enumerate(parts)]
