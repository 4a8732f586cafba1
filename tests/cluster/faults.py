"""Training runs on a cluster of three hosts, with one fault per run in a chosen phase of a training step.

Two training ranks and two engines spread over all hosts. If a host other than the head's host is lost, its processes
fit on the remaining hosts.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts import Cluster, Host

STEPS, PROMPTS = 4, 8
STRUCK = 1  # number of finished training steps at the time of the fault
CPUS = (1, 3, 3)  # CPUs of each host in Ray
JOB = [
    "placement=disaggregated", "rollout=hf", "placement.actor_ranks=2", "placement.rollout_replicas=2",
    f"trainer.total_steps={STEPS}", f"trainer.prompts_per_step={PROMPTS}", "trainer.prompts_per_minibatch=4",
    "rollout.samples_per_prompt=4", "trainer.save_every=1", "trainer.resume=auto", "trainer.deterministic=true",
    "trainer.sample_every=0", "data.val_size=8", "placement.threads_per_worker=1",
]  # fmt: skip
LIMIT_S = 900.0  # seconds after which a run counts as hung
LEFT_S = 300.0  # seconds until a run's processes must be gone; without the head, a node ends after minutes
# Words in the titles of a run's processes. Ray's daemons and idle workers, which outlive a run, have none of the words.
_OF_A_RUN = re.compile(r"^ray::(Host|Guard|Observer)|\b(rltrain|workers|tests\.chaos)\.")


@dataclass(frozen=True)
class Fault:
    """A fault of one host.

    Attributes:
        name: name of the fault in tables.
        phase: phase of the training step in which the fault begins, as the chaos driver names it.
        strike: function that causes the fault on a host, and returns when the fault is over or permanent.
        of_head: True for a fault of the host of Ray's head, False for a fault of another host with a training rank.
        driver: index of the host on which the driver runs; the head's host is host 0.
        ends: whether the fault ends the run, so that the job is submitted again after the hosts have been repaired.
        overrides: overrides of the run's config.
    """

    name: str
    phase: str
    strike: Callable[[Host], None]
    of_head: bool = False
    driver: int = 0
    ends: bool = False
    overrides: tuple[str, ...] = ()


def _link_down(seconds: float) -> Callable[[Host], None]:
    def strike(host: Host) -> None:
        host.link("down")
        time.sleep(seconds)
        host.link("up")

    return strike


def _kill_raylet(host: Host) -> None:
    host.kill("raylet")


LINK_5, LINK_60 = (Fault(f"link down for {s} s", "generate", _link_down(s)) for s in (5, 60))
RAYLET = {
    phase: Fault("raylet killed", phase, _kill_raylet)
    for phase in ("generate", "old_log_probs", "update_actor", "sync_weights", "checkpoint")
}
POWER = Fault("power loss", "update_actor", Host.power_off)
# The ranks need 5 CPUs, and the loss of a host leaves 4.
NO_ROOM = Fault(
    "power loss without room elsewhere", "update_actor", Host.power_off, ends=True,
    overrides=(
        "placement.actor_ranks=5", "placement.rollout_replicas=1", "placement.start_timeout_s=120",
        "trainer.max_restarts=1",
    ),
)  # fmt: skip
HEAD = Fault("power loss of head and driver", "update_actor", Host.power_off, of_head=True, ends=True)
HEAD_ALONE = Fault("power loss of the head", "update_actor", Host.power_off, of_head=True, ends=True, driver=1)
FAULTS = (LINK_5, LINK_60, *RAYLET.values(), POWER, NO_ROOM, HEAD, HEAD_ALONE)


@dataclass
class Outcome:
    """The outcome of a run with a fault.

    Attributes:
        status: exit status of the run; if the job was submitted again, the exit status of the second run.
        first_status: exit status of the run that the fault ended; None if the job was not submitted again.
        host: name of the host on which the fault struck.
        said: log messages and error lines of the run after the fault.
        detected_s: seconds from the fault until the first log message of the run, or until the run ended if the fault
            ended it; None if there was no message.
        trains_s: seconds from the fault, or from the moment of the second submission, until the end of the first
            training step that was begun or continued after the fault; None if no step ended.
        repeated: number of training steps that were begun more than once.
        steps: step numbers in the run's metrics.
        used: uids of the prompt groups on which the run trained, in ascending order.
        left: processes of the run that remained on the hosts after its end.
    """

    status: int
    host: str
    said: list[str] = field(default_factory=list)
    first_status: int | None = None
    detected_s: float | None = None
    trains_s: float | None = None
    repeated: int = 0
    steps: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Run:
    """A training run whose driver records its phases (see `tests.chaos.driver`).

    Args:
        cluster: the cluster of the run.
        folder: folder of the run's files, which all hosts see.
        overrides: overrides of the run's config.
        driver: index of the host on which the driver runs.
    """

    def __init__(self, cluster: Cluster, folder: Path, *overrides: str, driver: int = 0) -> None:
        self.cluster, self.folder, self.output = cluster, folder, folder / "out"
        self.overrides, self.driver = overrides, driver
        self.process: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        job = {"strike": None, "usual_s": {}, "events": str(folder / "events.jsonl"), "output_dir": str(self.output)}
        (folder / "job.json").write_text(json.dumps(job))

    def start(self) -> None:
        """Start the driver."""
        with (self.folder / "log.txt").open("a") as log:
            self.process = self.cluster.hosts[self.driver].popen(
                [sys.executable, "-m", "tests.chaos.driver", str(self.folder / "job.json"), *JOB,
                 f"placement.address={self.cluster.address}", f"trainer.output_dir={self.output}",
                 *self.overrides],
                self.cluster.env, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def end(self) -> int:
        """Wait until the driver ends, and return its exit status."""
        assert self.process is not None
        return self.process.wait(LIMIT_S)

    def events(self) -> list[dict[str, Any]]:
        """Return the events that the driver has recorded so far."""
        return lines(self.folder / "events.jsonl")

    def reach(self, phase: str, step: int) -> None:
        """Wait until a phase begins after `step` finished training steps."""
        assert self.process is not None
        deadline, wanted = time.monotonic() + LIMIT_S, ("phase begins", phase, step)
        while not any((one["what"], one.get("phase"), one["step"]) == wanted for one in self.events()):
            assert self.process.poll() is None, (self.folder / "log.txt").read_text()[-2000:]
            assert time.monotonic() < deadline, f"the phase {phase} of step {step + 1} did not begin in time"
            time.sleep(0.005)

    def host_of_a_rank(self) -> Host:
        """Return a host other than the head's host on which a training rank runs."""
        table = json.loads((self.output / "processes.json").read_text())
        nodes = {one["node"] for name, one in table.items() if name.startswith("actor rank")}
        return next(host for host in self.cluster.hosts[1:] if nodes & {node_of(host)})

    def errors(self) -> list[str]:
        """Return the error lines that the driver has printed."""
        return [line for line in (self.folder / "log.txt").read_text().splitlines() if line.startswith("error: ")]

    def left(self) -> list[str]:
        """Return the processes of runs that remain on the hosts `LEFT_S` seconds after the driver's end."""
        deadline = time.monotonic() + LEFT_S
        while True:
            words = [(host.name, text) for host in self.cluster.hosts for text in host.processes().values()]
            found = [f"{name}: {text[:100]}" for name, text in words if _OF_A_RUN.search(text)]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.5)


def suffer(cluster: Cluster, fault: Fault, folder: Path) -> Outcome:
    """Do a run with a fault, and return the outcome. If the fault ends the run, submit the job again.

    The hosts of the cluster are repaired before the run, and not after it.
    """
    mend(cluster)
    run = Run(cluster, folder, *fault.overrides, driver=fault.driver)
    run.start()
    run.reach(fault.phase, STRUCK + (fault.phase == "checkpoint"))
    host = cluster.hosts[0] if fault.of_head else run.host_of_a_rank()
    struck = resumed = time.time()
    fault.strike(host)
    outcome = Outcome(run.end(), host.name)
    if fault.ends:
        outcome.first_status, outcome.detected_s = outcome.status, time.time() - struck
        outcome.left = run.left()
        mend(cluster, anew=fault.of_head)
        resumed = time.time()
        run.start()
        outcome.status = run.end()
    outcome.left += run.left()
    _measure(outcome, run, struck, resumed)
    return outcome


def _measure(outcome: Outcome, run: Run, struck: float, resumed: float) -> None:
    """Set the attributes of `outcome` that come from the files of the run."""
    happened = run.events()
    begun = [one["step"] for one in happened if one["what"] == "step begins"]
    said = [one for one in happened if one["what"] == "said" and one["time"] >= struck]
    news = said[0]["time"] if said else resumed
    ended = [one["time"] for one in happened if one["what"] == "step ends" and one["time"] >= max(news, resumed)]
    outcome.said = [one["text"] for one in said] + run.errors()
    if outcome.first_status is None:
        outcome.detected_s = said[0]["time"] - struck if said else None
    outcome.trains_s = ended[0] - resumed if ended else None
    outcome.repeated = len(begun) - len(set(begun))
    outcome.steps = [line["step"] for line in lines(run.output / "metrics.jsonl")]
    outcome.used = sorted(uid for one in lines(run.output / "ledger.jsonl") for uid in one["used"] + one["dropped"])


def mend(cluster: Cluster, *, anew: bool = False) -> None:
    """Switch on the hosts without power, and start Ray on each host without Ray, or on all hosts if `anew` is true."""
    for host in cluster.hosts:
        if anew or not node_of(host):
            host.kill()
            if host.holder.poll() is not None:
                host.power_on()
    for host, cpus in zip(cluster.hosts, CPUS, strict=True):
        if not node_of(host):
            cluster.join(host, cpus)


def node_of(host: Host) -> str:
    """Return Ray's id of the node on a host, or "" if Ray does not run there."""
    words = " ".join(text for text in host.processes().values() if "/raylet " in text)
    found = re.search(r"--node_id=(\w+)", words)
    return found[1] if found else ""


def lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON lines file, or return [] if the file does not exist."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
