"""Which process is struck, when and how: every role in every phase, drawn from a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 4
# Roles that live in a process of their own with placement.share_ranks=false; a shared rank is struck as the actor.
WORKERS = ("rollout", "reward", "actor", "critic", "reference")
DAEMONS = ("gcs_server", "raylet")  # of Ray
ROLES = (*WORKERS, "driver", *DAEMONS)
START = "start"  # of the program, until the first step begins
PHASES = (
    "generate", "ref_log_probs", "old_log_probs", "values", "rewards", "advantages", "update_critic", "update_actor",
    "sync_weights", "checkpoint", "evaluate",
)  # fmt: skip
SIGNALS = {"driver": ("KILL", "HUP")} | dict.fromkeys(DAEMONS, ("KILL",))  # of workers: KILL and STOP
STARTS = 10  # moments of the start that a driver is killed at before any other strike comes a second time


@dataclass(frozen=True)
class Strike:
    """One process killed, stopped as if it hung, or hung up on (SIGHUP).

    Attributes:
        role: whose process.
        phase: of the step, in which it is struck; `START`: before the first one.
        signal: "KILL", "STOP" or "HUP".
        step: training steps done by then.
        share: of the phase's usual time that has passed by then.
        replicas: of the engine.
        seed: that it was drawn from.
    """

    role: str
    phase: str
    signal: str
    step: int
    share: float
    replicas: int
    seed: int

    @property
    def name(self) -> str:
        """For tables and folders."""
        return f"{self.seed:03d}-{self.role}-{self.phase}-{self.signal}"

    @property
    def kind(self) -> str:
        """The rows of the summary: roles, and what becomes of the driver."""
        if self.role != "driver":
            return self.role
        return "driver in its start" if self.phase == START else f"driver ({self.signal})"

    @property
    def status(self) -> int:
        """Exit status of the run; where it is not 0, the run is started again."""
        if self.role == "driver":
            return -9 if self.signal == "KILL" else 129
        return 1 if self.role in DAEMONS else 0


def kinds() -> list[tuple[str, str, str]]:
    """(role, phase, signal) of all strikes; "" for a worker's signal, of which each third is a STOP."""
    found = [(role, phase, "") for role in WORKERS for phase in PHASES]
    found += [(role, phase, signal) for role in SIGNALS for signal in SIGNALS[role] for phase in PHASES]
    return found + [("driver", START, "KILL")] * STARTS


def draw(count: int, *, seed: int) -> list[Strike]:
    """`count` strikes in a random order: each of `kinds` before any comes a second time."""
    every = kinds()
    random.Random(str(seed)).shuffle(every)
    strikes = []
    for number in range(count):
        random_of = random.Random(f"{seed}/{number}")
        role, phase, signal = every[number % len(every)]
        signal = signal or ("STOP" if random_of.random() < 1 / 3 else "KILL")
        strikes.append(
            Strike(
                role, phase, signal, _step(phase, random_of.randrange(1, STEPS)), random_of.random(),
                replicas=2 if random_of.random() < 0.25 else 1, seed=number,
            )
        )  # fmt: skip
    return strikes


def _step(phase: str, otherwise: int) -> int:
    """An evaluation comes before the first step and after each second one, a checkpoint after each."""
    return {"evaluate": 2, START: 0}.get(phase, otherwise)


def is_strike(text: str) -> bool:
    """Whether this is "role:phase:signal", of those that there are."""
    role, phase, signal = (*text.split(":"), "", "")[:3]
    if text.count(":") != 2 or role not in ROLES:
        return False
    if phase == START:
        return (role, signal) == ("driver", "KILL")
    return phase in PHASES and signal in SIGNALS.get(role, ("KILL", "STOP"))


def named(texts: Sequence[str]) -> list[Strike]:
    """Strikes as "role:phase:signal" says, in the middle of the run."""
    return [
        Strike(role, phase, signal, _step(phase, 2), 0.5, replicas=1, seed=number)
        for number, (role, phase, signal) in enumerate(text.split(":") for text in texts)
    ]
