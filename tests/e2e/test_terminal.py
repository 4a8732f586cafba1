"""Runs in a terminal, in a terminal without colours, and with a log, read as users read them."""

import os
import re
import sys

import pytest
from runs import ROOT, SMALL, train_here
from terminal import session

from rltrain.monitoring import heartbeat

pytestmark = pytest.mark.slow
SHORT = [
    *SMALL, "placement=inprocess", "rollout=hf", "trainer.total_steps=6", "trainer.eval_every=3",
    "data.val_sets={a_second_set_with_a_long_name:builtin:median}",
]  # fmt: skip
REWARDS = """
def the_answer_is_equal_to_the_reference(response, answer):
    return float(response.endswith(str(answer)))

def the_answer_has_the_form_of_the_template(response):
    return float("#" in response)

def number_of_characters_of_the_answer(response):
    return -len(response) / 10
"""
NAMES = re.findall(r"def (\w+)", REWARDS)
COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7])\b")


@pytest.fixture
def three(tmp_path):
    """Return the setting of three reward functions with long names."""
    (tmp_path / "own.py").write_text(REWARDS)
    return f"reward.functions=[{','.join(f'{tmp_path}/own.py:{name}' for name in NAMES)}]"


@pytest.mark.parametrize(("width", "colour"), [(80, False), (140, True)])
def test_a_session_in_a_terminal_reads_well(tmp_path, three, width, colour):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    environment |= {} if colour else {"NO_COLOR": "1"}
    command = [sys.executable, "-m", "rltrain.main", *SHORT, three, f"trainer.output_dir={tmp_path / 'run'}"]
    run = session(command, width=width, cwd=tmp_path, env=environment)
    assert run.status == 0, run.raw
    assert bool(COLOUR.search(run.raw)) == colour

    end = next(number for number, line in enumerate(run.lines) if line.startswith("Done after 6 steps"))
    paths = next(number for number, line in enumerate(run.lines) if line.startswith("learning curve:"))
    laid_out = run.lines[:paths]  # Paths and commands are never broken, so that they can be copied.
    assert [line for line in laid_out if len(line) > width] == []
    assert len({len(line) for line in laid_out if line[:1] in "╭│╰" and line}) == 1
    assert sum(line.startswith("  sample of step") for line in laid_out) == 4
    whole = " ".join(" ".join(laid_out).replace("│", " ").split())
    assert all(whole.count(name) >= 12 for name in NAMES), "a name was broken"
    assert sum(line.split() == ["held-out", "before", "after"] for line in run.lines[end:paths]) == 1
    assert not any(re.match(r"step +\d+/6", line) for line in run.lines), "the bar stays on the screen"

    bars = [line for line in run.drawn if re.match(r"step \d/6 ", line)]
    assert {line[:8] for line in bars} >= {f"step {number}/6" for number in (1, 6)}
    assert [line for line in run.drawn if len(line) > width and line.rstrip() not in run.lines[paths:]] == []
    assert any("starting the workers  " in line for line in run.drawn)
    assert any(line.endswith(" s left") for line in bars)


@pytest.mark.usefixtures("settings_restored")
def test_a_log_has_lines_from_the_start_to_the_end_and_no_escape_sequence(tmp_path, three, monkeypatch):
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.002)
    run = train_here(tmp_path / "run", *SHORT, three)
    assert run.status == 0, run.stderr
    assert "\x1b" not in run.stdout
    lines = run.stdout.splitlines()
    phases = ("checking the config", "loading the data", "planning the memory", "starting the workers")
    begun = [lines.index(f"still {phase} after 0 s") for phase in (*phases, "writing the report")]
    assert begun == sorted(begun)
    steps = [line for line in lines if re.match(r"step    \d/6  for 0 s, now: ", line)]
    assert {line.partition("now: ")[2] for line in steps} >= {"generate", "update actor", "evaluate"}
    assert any(line == "after the last step  for 0 s, now: evaluate" for line in lines)
