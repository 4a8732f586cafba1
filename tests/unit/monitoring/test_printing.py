"""Tests of lines that are longer than a terminal is wide."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from rltrain.monitoring.printing import print_lines

SAMPLE = "  sample of step 1\n    prompt  how many words are on the line\n    answer  [b]" + "7" * 30


def printed(text, *, width=24, terminal=True) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    print_lines(console, text)
    return console.file.getvalue().splitlines()


def test_a_terminal_gets_lines_that_are_wrapped_between_words_under_their_label():
    assert printed(SAMPLE) == [
        "  sample of step 1",
        "    prompt  how many",
        "            words are on",
        "            the line",
        "    answer  [b]777777777",
        "            777777777777",
        "            777777777",
    ]
    assert printed("held-out accuracy after 3 steps: sampled 50.0%", width=40) == [
        "held-out accuracy after 3 steps:",
        "  sampled 50.0%",
    ]


@pytest.mark.parametrize("width", range(1, 60))
def test_no_line_is_wider_than_the_terminal(width):
    text = SAMPLE + "\n" + "日本語" * 20
    lines = printed(text, width=width)
    if width >= 22:  # a label of 12 columns, and 10 columns of text
        assert all(Text(line).cell_len <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_a_file_gets_each_line_whole():
    assert printed(SAMPLE, terminal=False) == SAMPLE.splitlines()
