"""Run a job, kill or stop one of its processes with a signal, and check afterwards that no results were lost."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.chaos.processes import SHARED, below, left_behind, named_processes, state
from tests.chaos.strikes import DAEMONS, START, STEPS, Strike
from workers.cluster.process_tree import adopt_orphans, reap

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0  # Maximum seconds of a run, after which the run counts as hung.
LEFT_S = 10.0  # Maximum seconds until a run's processes and files disappear after the run's end.
ENDS_S = 60.0  # Maximum seconds until a run that lost a daemon of Ray ends. An idle machine needs 6 s.
PROMPTS = 8  # Number of prompts per training step.
JOB = [
    "rollout=hf", "trainer.deterministic=true",
    f"trainer.total_steps={STEPS}", f"trainer.prompts_per_step={PROMPTS}", "trainer.prompts_per_minibatch=4",
    "trainer.save_every=1", "trainer.eval_every=2", "trainer.sample_every=0", "trainer.hang_timeout_s=20",
    "data.val_size=8", "placement.threads_per_worker=1",
]  # fmt: skip
ALGORITHM = "algorithm="
# The algorithm of all runs whose overrides choose no algorithm: PPO with a critic and a reference model.
PPO = [f"{ALGORITHM}ppo", "algorithm.kl_loss.kl_loss_coef=0.01"]
# These overrides make the engines slower than the actor, so that answers are being generated in every phase.
ASYNCHRONOUS = ["trainer.deterministic=false", "trainer.max_staleness=1", "rollout.max_concurrent_sequences=2"]
# These overrides make each answer a conversation with an environment worker, over up to five turns.
CONVERSATIONS = ["data=higher_lower", "placement.environment_workers=2"]
# Roles that share the actor's process, unless the test sends a signal to the role's process.
OWN_PROCESSES = ("critic", "reference", "teacher")


@dataclass
class Life:
    """How a run ended: exit status, last output and leftover processes and files.

    Attributes:
        status: Exit status of the run, or None if the run did not end within `LIMIT_S` seconds.
        said: Last lines of the run's output.
        left: Processes and files that the run left behind.
    """

    status: int | None
    said: str
    left: list[str]


@dataclass
class Outcome:
    """The result of a run with an injected signal ("strike").

    Attributes:
        strike: The signal that was injected into the run.
        wrong: Descriptions of all failed checks of the run.
        detected_s: Seconds from the signal until the run reported the failure, or until the run ended if the signal
            ended it.
        serving_s: Seconds from the signal until the affected role works again. A rollout replica works again when it
            has received its weights. Any other role works again when its next phase begins.
        repeated: Number of times that a training step was restarted.
        seconds: Duration of the whole run.
        phase: Phase in which the signal was sent.
    """

    strike: Strike
    wrong: list[str] = field(default_factory=list)
    detected_s: float | None = None
    serving_s: float | None = None
    repeated: int = 0
    seconds: float = 0.0
    phase: str = ""


def run(strike: Strike, folder: Path, undisturbed: Path, usual_s: dict[str, float], *overrides: str) -> Outcome:
    """Run the job with an injected signal, and compare the results with the results of the undisturbed run.

    The final weights are not compared if the run is asynchronous.
    """
    outcome, began = Outcome(strike), time.monotonic()
    life = start(folder, strike, usual_s, *overrides)
    if life.status is None:
        outcome.wrong.append(f"hung: the run did not end within {LIMIT_S:.0f} s")
    elif life.status != strike.status:
        outcome.wrong.append(f"exit status {life.status} instead of {strike.status}: {life.said}")
    elif strike.role in DAEMONS:
        outcome.wrong += unnamed(strike.role, folder)
    outcome.wrong += life.left
    if strike.status and life.status == strike.status:
        again = start(folder, None, usual_s, "trainer.resume=auto", *overrides)
        if again.status:
            outcome.wrong.append(f"resumed run: exit status {again.status}: {again.said}")
        outcome.wrong += again.left
    outcome.seconds = time.monotonic() - began
    if not outcome.wrong:
        outcome.wrong += compare(folder / "out", undisturbed / "out", exact=not set(ASYNCHRONOUS) <= {*overrides})
    measure(outcome, folder / "events.jsonl")
    return outcome


def distillation(folder: Path) -> list[str]:
    """Save a random teacher in `folder`, and return the overrides of runs that learn from this teacher.

    The runs add the exact KL to the loss, so the actor has a copy of the teacher's output head.
    """
    from tests.made_teachers import make_teacher

    teacher = make_teacher(folder / "teacher", width=32, seed=1)
    return [f"{ALGORITHM}distill", f"algorithm.distillation.teachers=['{teacher}']"]


def start(folder: Path, strike: Strike | None, usual_s: dict[str, float], *overrides: str) -> Life:
    """Run the trainer's program until it ends, and look for processes and files that remain."""
    folder.mkdir(parents=True, exist_ok=True)
    output, job, events = folder / "out", folder / "job.json", folder / "events.jsonl"
    job.write_text(json.dumps({
        "strike": strike and dataclasses.asdict(strike), "usual_s": usual_s, "events": str(events),
        "output_dir": str(output),
    }))  # fmt: skip
    apart = strike is not None and strike.role in OWN_PROCESSES
    words = [f"trainer.output_dir={output}", f"placement.share_ranks={'false' if apart else 'true'}"]
    words.append(f"placement.rollout_replicas={strike.replicas if strike else 1}")
    if not any(override.startswith(ALGORITHM) for override in overrides):
        words += PPO
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with _adopting_orphans() as before, (folder / "log.txt").open("a") as log:
        files = list(SHARED.iterdir())
        command = [sys.executable, "-m", "tests.chaos.driver", str(job), *JOB, *words, *overrides]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_listen_to_hang_ups,
        )  # fmt: skip
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        with events.open("a") as file:
            file.write(json.dumps({"time": time.time(), "what": "ends", "step": 0}) + "\n")
        left = left_behind(process.pid, before, files, within_s=LEFT_S)
    said = " | ".join((folder / "log.txt").read_text().strip().splitlines()[-2:])[-300:]
    return Life(status, said, [f"left behind: {what}" for what in left])


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[list[int]]:
    """Make orphaned processes of a run children of the calling process, so that they can be found.

    Yields the pids of all descendants that the calling process had before the run.

    Orphans that have ended are reaped (waited for), because otherwise they would remain as zombies.
    """
    before = below(os.getpid())
    adopt_orphans()
    try:
        yield before
    finally:
        adopt_orphans(False)
        reap(before)


def _listen_to_hang_ups() -> None:
    """Restore the default action of SIGHUP, because nohup makes a program and its children ignore the signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def unnamed(daemon: str, folder: Path) -> list[str]:
    """Check the error message of a run that lost a daemon of Ray, and the time until the run ended.

    Returns descriptions of all problems that the check has found.
    """
    happened = lines(folder / "events.jsonl")
    times = {event["what"]: event for event in happened if event["what"] in ("strike", "ends")}
    if "strike" not in times:
        return []  # `measure` already reports that no signal was sent.
    wrong = []
    said = [line for line in (folder / "log.txt").read_text().splitlines() if line.startswith("error: ")]
    expected = rf"error: Ray's {daemon} on node \S+ \(pid {times['strike']['pid']}\) is gone .*trainer.resume=auto"
    if len(said) != 1 or not re.match(expected, said[0]):
        wrong.append(f"the run did not name the daemon in one line: {said}")
    if (seconds := times["ends"]["time"] - times["strike"]["time"]) > ENDS_S:
        wrong.append(f"the run ended {seconds:.0f} s after the daemon's death")
    return wrong


def compare(output: Path, undisturbed: Path, *, exact: bool) -> list[str]:
    """Compare the results of a run with those of an undisturbed run, and return descriptions of the differences."""
    wrong = []
    steps = [line["step"] for line in lines(output / "metrics.jsonl")]
    if steps != list(range(1, STEPS + 1)):
        wrong.append(f"steps {steps}")
    ledger = lines(output / "ledger.jsonl")
    used = sorted(uid for line in ledger for uid in line["used"] + line["dropped"])
    if used != list(range(STEPS * PROMPTS)) or [line["step"] for line in ledger] != steps:
        wrong.append(f"the ledger does not list each prompt group once: {used}")
    if exact and weights(output / "model") != weights(undisturbed / "model"):
        wrong.append("the final weights are not those of the undisturbed run")
    left = [name for name, process in named_processes(output).items() if state(process["pid"])]
    if left:
        wrong.append(f"processes left behind: {', '.join(left)}")
    return wrong


@cache
def weights(folder: Path) -> dict[str, bytes]:
    """Return the tensors of an exported model as bytes, by file and tensor name."""
    from safetensors import deserialize

    return {
        f"{path.name}/{name}": bytes(entry["data"])
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in deserialize(path.read_bytes())
    }


def lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON lines file, or return [] if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(outcome: Outcome, events: Path) -> None:
    """Set the measured fields of `outcome` from a run's events. Times are measured from the injected signal."""
    happened = lines(events)
    begun = [event for event in happened if event["what"] == "step begins"]
    outcome.repeated = len(begun) - len({event["step"] for event in begun})
    strike = next((event for event in happened if event["what"] == "strike"), None)
    if strike is None:
        missed = next((event["reason"] for event in happened if event["what"] == "missed"), None)
        outcome.wrong.append(f"no signal was sent: {missed or 'the phase did not come, or the run was over'}")
        return
    outcome.phase = strike["phase"]
    after = [event | {"after_s": event["time"] - strike["time"]} for event in happened]
    after = after[happened.index(strike) + 1 :]
    news = "ends" if outcome.strike.status else "said"
    detected = next((number for number, event in enumerate(after) if event["what"] == news), None)
    if detected is None:
        return
    outcome.detected_s = after[detected]["after_s"]
    for event in after[detected + 1 :]:
        serves = "serves again" in event.get("text", "")
        if serves if outcome.strike.role == "rollout" else event["what"] in ("step begins", "step ends"):
            outcome.serving_s = event["after_s"]
            return


def usual(folder: Path) -> dict[str, float]:
    """Return the median seconds of each phase of a run, and the seconds that the run took to start."""
    happened = lines(folder / "events.jsonl")
    first = {
        what: next(event["time"] for event in happened if event["what"] == what) for what in ("starts", "step begins")
    }
    steps = lines(folder / "out" / "metrics.jsonl")[1:]
    names = {name for step in steps for name in step if name.startswith("timing/")}
    medians = {name.removeprefix("timing/"): sorted(step[name] for step in steps)[len(steps) // 2] for name in names}
    return medians | {START: first["step begins"] - first["starts"]}
