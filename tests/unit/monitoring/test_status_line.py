"""Tests of the progress bar, which is drawn by a real display on terminals of several widths, in a pipe and so on."""

import io
import re

import pytest
import torch
from rich.console import Console

from rltrain.batch.data_proto import DataProto
from rltrain.monitoring.console import ConsoleDisplay
from rltrain.monitoring.heartbeat import Heartbeat
from rltrain.monitoring.status_line import StatusLine

ONE = {
    "reward/mean": 0.5, "reward/right/mean": 0.5, "reward/accuracy": 0.25, "rollout/length_mean": 1012.3,
    "perf/tokens_per_s": 12345.6, "actor/ppo_kl": 0.01,
}  # fmt: skip
THREE = ONE | {"reward/right/mean": 0.5, "reward/format/mean": 0.75, "reward/length/mean": -1.25}
LONG = {name: value for name, value in ONE.items() if name != "reward/right/mean"} | {
    f"reward/{name}/mean": -1.25
    for name in (
        "the_answer_is_mathematically_equal",
        "the_answer_has_the_form_of_the_template",
        "Länge_der_Antwort",
    )
}
STEPS, TOTAL = 37, 1234
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")


class Clock:
    """A fake clock whose time advances by five minutes at each step."""

    now = 1000.0

    def monotonic(self):
        return self.now


def drawn(monkeypatch, metrics, *, width=80, terminal=True, **environment):
    """Return everything that a display writes during 37 steps of a run."""
    clock = Clock()
    for module in ("console", "heartbeat"):
        monkeypatch.setattr(f"rltrain.monitoring.{module}.time", clock)
    environment = {"TERM": "xterm-256color", **environment}
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, _environ=environment)
    batch = DataProto.from_dict({"x": torch.zeros(2)}, {"reward_error": ["", ""]})
    with ConsoleDisplay(TOTAL, 0, Heartbeat(console)) as display:
        for step in range(1, STEPS + 1):
            clock.now += 300
            display.step(step, metrics, batch)
    return console.file.getvalue()


def last_line(text):
    return [line for line in CONTROL.sub("", text).splitlines() if line][-1]


@pytest.mark.parametrize("metrics", [ONE, THREE, LONG], ids=["one", "three", "long"])
@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colour", "no_colour"])
def test_the_bar_fits_and_shows_counter_and_time_and_only_whole_parts(monkeypatch, metrics, width, environment):
    text = drawn(monkeypatch, metrics, width=width, **environment)
    last = last_line(text)
    assert re.match(r"step   37/1234\b", last)
    assert last.endswith("  99 h 45 min left")
    assert len(last) <= width
    middle = re.split(" {2,}", last.removesuffix("  99 h 45 min left"))[2:]
    whole = re.compile(r"reward 0\.50|\S+ -?\d\.\d\d|acc 25%|kl 0\.0100|len 1012\.3|12,346 tok/s")
    assert all(whole.fullmatch(part) for part in middle), middle
    assert ("reward 0.50" in last) == (width >= 60)
    assert bool(COLOUR.search(text)) == (not environment)


def test_the_parts_are_left_out_from_the_end(monkeypatch):
    shown = {width: last_line(drawn(monkeypatch, THREE, width=width)) for width in (80, 100, 140, 160)}
    assert "────────  reward 0.50  right 0.50  format 0.75  99 h" in shown[80]
    assert "reward 0.50  right 0.50  format 0.75  length -1.25  99 h" in shown[100]
    assert "length -1.25  acc 25%  kl 0.0100  len 1012.3  12,346 tok/s  99 h" in shown[140]
    assert "─" * 15 in shown[160]


def test_a_long_name_is_shortened_so_that_it_does_not_hide_the_rest(monkeypatch):
    last = last_line(drawn(monkeypatch, LONG, width=140))
    assert "the_ans..y_equal -1.25  the_ans..emplate -1.25  Länge_d..Antwort -1.25" in last
    assert "the_answer_is_mathematically_equal -1.25" in drawn(monkeypatch, LONG, terminal=False)


@pytest.mark.parametrize("metrics", [ONE, THREE, LONG], ids=["one", "three", "long"])
def test_a_pipe_gets_whole_lines_without_any_escape_sequence(monkeypatch, metrics):
    text = drawn(monkeypatch, metrics, terminal=False)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert len(lines) == STEPS  # every step of five minutes has a line
    assert lines[-1].startswith("step   37/1234  reward 0.50")
    assert lines[-1].endswith("12,346 tok/s  99 h 45 min left")


def test_a_terminal_that_cannot_redraw_a_line_gets_lines(monkeypatch):
    text = drawn(monkeypatch, ONE, TERM="dumb")
    assert len(text.splitlines()) == STEPS
    assert "━" not in text


def test_a_terminal_without_unicode_gets_a_bar_of_ascii_characters():
    line = StatusLine("step", 4)
    line.done = 1
    assert line.fitted(80, ascii_only=True).plain == "step 1/4 ====------------"


@pytest.mark.parametrize(("width", "text"), [
    (80, "making the weak starting model for 'higher_lower' (only once)  32/400 ────────"),
    (60, "making the weak starting model for 'higher_lower'...  32/400"),
    (14, "makin...  32/400"),
])  # fmt: skip
def test_a_long_label_is_shortened_and_a_counter_never(width, text):
    line = StatusLine("making the weak starting model for 'higher_lower' (only once)", 400)
    line.done = 32
    assert line.fitted(max(width, 16)).plain == text


def test_a_line_without_a_counter_has_no_bar():
    assert StatusLine("starting the workers", ending=lambda: "12 s").fitted(80).plain == "starting the workers  12 s"
