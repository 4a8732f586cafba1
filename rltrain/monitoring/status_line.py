"""The line that a live display redraws while a run works: label, counter, bar, state and time."""

from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_BARS = (16, 8)  # Widths of the bar in columns. The narrow bar is used if the state does not fit beside the wide bar.
# The characters of the finished and of the other part of the bar.
_UNICODE, _ASCII = ("━", "─"), ("=", "-")
_GAP, _ELLIPSIS = "  ", "..."
_SHORTEST_LABEL = 8  # columns


class StatusLine:
    """A line such as `step  37/120 ━━━━━───────────  reward 0.66  acc 66%  12 min left`, which fits its terminal.

    If the terminal is too narrow, the bar becomes shorter first. Then parts of the state are left out, beginning with
    the last. Next, the bar, the end of a long label and finally the time are left out. A number is never cut.

    Args:
        label: what is counted or waited for.
        total: number of things to do; 0 if nothing is counted, so that the line has no counter and no bar.
        ending: function that returns the text about the time, or "" if nothing is known about the time.
        unit: function that formats a number for the counter.

    Attributes:
        done: number of things that are done.
        parts: the state, as texts each of which is shown as a whole or not at all.
    """

    def __init__(
        self, label: str, total: int = 0, ending: Callable[[], str] = lambda: "", unit: Callable[[int], str] = str
    ) -> None:
        self.label, self.total, self.ending, self.unit = label, total, ending, unit
        self.done, self.parts = 0, list[str]()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.fitted(options.max_width, ascii_only=options.ascii_only)

    def fitted(self, width: int, *, ascii_only: bool = False) -> Text:
        """Return the line as text that is at most `width` columns wide, or as wide as the counter if that is wider."""
        total = self.unit(self.total)
        counter = f" {self.unit(self.done):>{len(total)}}/{total}" if self.total else ""
        ending = f"{_GAP}{told}" if (told := self.ending()) else ""
        if len(counter) + cell_len(ending) + min(cell_len(self.label), _SHORTEST_LABEL) > width:
            ending = ""
        head = _shortened(self.label, width - len(counter) - cell_len(ending)) + counter
        bar, parts = self._chosen(width - cell_len(head) - cell_len(ending))
        text = Text(head, no_wrap=True, overflow="ignore")
        if bar:
            full, (done, left) = bar * min(self.done, self.total) // self.total, _ASCII if ascii_only else _UNICODE
            text.append(" ").append(done * full, "bar.complete").append(left * (bar - full), "bar.back")
        return text.append("".join(_GAP + part for part in parts)).append(ending, "progress.remaining")

    def _chosen(self, room: int) -> tuple[int, list[str]]:
        """Return the width of the bar (0 for no bar) and the shown parts, which need at most `room` columns."""
        parts, bars = list(self.parts), [bar for bar in _BARS if self.total and bar < room]
        needed = _width(parts)
        for bar in bars:
            if bar + 1 + needed <= room:
                return bar, parts
        # The first part of the state is more important than the bar.
        bar = bars[-1] if bars and bars[-1] + 1 + _width(parts[:1]) <= room else 0
        while _width(parts) > room - bar - bool(bar):
            parts.pop()
        return bar, parts


def _width(parts: Sequence[str]) -> int:
    return sum(len(_GAP) + cell_len(part) for part in parts)


def _shortened(text: str, width: int) -> str:
    """Return `text`, in which "..." replaces the end if the text is wider than `width` columns."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - len(_ELLIPSIS))).rstrip() + _ELLIPSIS
