"""Tests of the chaos harness, which sends signals to processes of training runs.

The tests check the random choice of signals, and the report on a run in which no process received a signal.
"""

import json
from collections import Counter

import pytest

from tests.chaos.driver import Watcher
from tests.chaos.processes import victim
from tests.chaos.runs import Outcome, measure, unnamed
from tests.chaos.strikes import (
    CONVERSING,
    DAEMONS,
    DISTILLATION_PHASES,
    DISTILLING,
    PHASES,
    ROLES,
    START,
    STARTS,
    distillation_kinds,
    draw,
    draw_in_conversations,
    is_strike,
    kinds,
    named,
)


def test_every_role_is_struck_in_every_phase_before_any_kind_of_strike_comes_again():
    strikes = draw(len(kinds()), seed=3)
    assert {(strike.role, strike.phase) for strike in strikes} == {
        ("driver", START), *((role, phase) for role in ROLES for phase in PHASES)
    }  # fmt: skip
    signals = Counter((strike.role, strike.signal) for strike in strikes)
    assert signals["driver", "HUP"] == len(PHASES)
    assert signals["driver", "KILL"] == len(PHASES) + STARTS
    assert [signals[daemon, "KILL"] for daemon in DAEMONS] == [len(PHASES)] * 2
    assert all(is_strike(f"{strike.role}:{strike.phase}:{strike.signal}") for strike in strikes)
    assert len({strike.role for strike in draw(6, seed=0)}) > 2  # the strikes of six runs cover more than two roles


def test_strikes_in_conversations_come_in_turn_and_at_any_moment_of_generation():
    strikes = draw_in_conversations(60, seed=0)
    assert Counter(strike.role for strike in strikes) == {"environment": 20, "rollout": 20, "driver": 20}
    assert {strike.phase for strike in strikes} == {"generate"}
    assert {int(strike.share * 5) for strike in strikes} == set(range(5))
    assert all(is_strike(f"{strike.role}:{strike.phase}:{strike.signal}") for strike in strikes)


def test_strikes_in_conversations_that_go_on_during_training_come_in_every_phase():
    strikes = draw_in_conversations(120, seed=0, phases=PHASES)
    assert {(strike.role, strike.phase) for strike in strikes} == {(role, p) for role in CONVERSING for p in PHASES}
    # Only some steps have an evaluation, and the first checkpoint is that of step 1.
    assert {strike.step for strike in strikes if strike.phase == "evaluate"} == {2}
    assert {strike.step for strike in strikes if strike.phase == "checkpoint"} == {1, 2, 3}


def test_strikes_on_runs_with_a_teacher_cover_each_role_in_each_phase():
    strikes = draw(len(distillation_kinds()), seed=0, of=distillation_kinds())
    expected = {(role, phase) for role in DISTILLING for phase in DISTILLATION_PHASES}
    assert {(strike.role, strike.phase) for strike in strikes} == expected
    assert all(is_strike(f"{strike.role}:{strike.phase}:{strike.signal}") for strike in strikes)


@pytest.mark.parametrize(
    ("own", "pid"), [({"teacher": 7, "teacher tiny rank 0": 2}, 2), ({"teacher tiny rank 1": 2}, 1)]
)
def test_the_victim_of_a_strike_on_a_teacher_is_its_first_rank_or_the_rank_that_holds_all_roles(own, pid, tmp_path):
    table = {"training rank 0": 1, "actor rank 0": 3, **own}
    (tmp_path / "processes.json").write_text(json.dumps({name: {"pid": number} for name, number in table.items()}))
    assert victim("teacher", tmp_path) == pid


@pytest.mark.parametrize(
    "text",
    ["driver:generate:STOP", "raylet:generate:STOP", "actor:start:KILL", "driver:start:HUP", "actor:KILL", "a:b:c"],
)
def test_what_is_no_strike_is_refused(text):
    assert not is_strike(text)


def test_a_strike_that_finds_no_process_of_its_role_is_told_with_what_there_was(tmp_path):
    (strike,) = named(["reference:generate:KILL"])
    (tmp_path / "processes.json").write_text(json.dumps({"critic rank 0": {"pid": 1, "node": "a"}}))
    events = tmp_path / "events.jsonl"
    job = {"strike": vars(strike), "usual_s": {}, "events": str(events)}
    watcher = Watcher(job, tmp_path)
    watcher.step = strike.step
    watcher.enter("generate")
    outcome = Outcome(strike)
    measure(outcome, events)
    assert outcome.wrong == [
        "no signal was sent: role reference has no process; processes.json has critic rank 0"
    ]  # fmt: skip


def test_a_run_that_does_not_name_the_daemon_that_died_is_wrong(tmp_path):
    good = (
        "error: Ray's raylet on node 127.0.0.1 (pid 7) is gone (killed): start the run again with trainer.resume=auto"
    )
    events = [{"what": "strike", "time": 0.0, "pid": 7}, {"what": "ends", "time": 5.0}]
    for line, seconds, count in ((good, 5.0, 0), (good.replace("pid 7", "pid 8"), 5.0, 1), ("", 500.0, 2)):
        events[1]["time"] = seconds
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        (tmp_path / "log.txt").write_text(f"starting\n{line}\n")
        assert len(unnamed("raylet", tmp_path)) == count
