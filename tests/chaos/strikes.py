"""Draw the injected signals ("strikes") from a seed: process, time and signal.

Together, the strikes cover every role in every phase.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 4
# With `placement.share_ranks=false`, each role has its own process. If a role shares the actor's process, a signal to
# that process counts as a signal to the actor.
WORKERS = ("rollout", "reward", "actor", "critic", "reference")
DAEMONS = ("gcs_server", "raylet")  # Names of the daemon processes of Ray.
ROLES = (*WORKERS, "driver", *DAEMONS)
# Roles whose processes hold unfinished conversations. Only runs with conversations have the role "environment".
CONVERSING = ("environment", "rollout", "driver")
# Roles of runs with distillation. Unless the signal is for the teacher, the actor's process also holds the teacher.
DISTILLING = ("teacher", "actor", "driver")
EVERY_ROLE = tuple(dict.fromkeys((*ROLES, *CONVERSING, *DISTILLING)))
START = "start"  # Name for the time before the first training step.
GENERATE = "generate"
PHASES = (
    GENERATE, "ref_log_probs", "old_log_probs", "values", "rewards", "advantages", "update_critic", "update_actor",
    "sync_weights", "checkpoint", "evaluate",
)  # fmt: skip
# Phases of a run with distillation, which has neither a critic nor a reference model.
DISTILLATION_PHASES = (
    GENERATE, "teacher_log_probs", "old_log_probs", "rewards", "advantages", "update_actor", "sync_weights",
    "checkpoint", "evaluate",
)  # fmt: skip
EVERY_PHASE = tuple(dict.fromkeys((*PHASES, *DISTILLATION_PHASES)))
SIGNALS = {"driver": ("KILL", "HUP")} | dict.fromkeys(DAEMONS, ("KILL",))  # Workers get KILL and STOP.
STARTS = 10  # Number of times that the driver is killed during start-up, per cycle through all kinds of strike.


@dataclass(frozen=True)
class Strike:
    """A signal sent to a process, which then ends (SIGKILL), hangs (SIGSTOP) or reacts to a lost terminal (SIGHUP).

    Attributes:
        role: Role to whose process the signal is sent.
        phase: Phase of the training step in which the signal is sent. `START` is the time before the first training
            step.
        signal: "KILL", "STOP" or "HUP".
        step: Number of training steps that are done before the signal is sent.
        share: Share of the phase's usual duration after which the signal is sent.
        replicas: Number of engine replicas.
        seed: Seed from which the strike was drawn.
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
        """Name of the strike in tables and in folder names."""
        return f"{self.seed:03d}-{self.role}-{self.phase}-{self.signal}"

    @property
    def kind(self) -> str:
        """Name of the row of the summary table that counts the strike.

        There is one row for each role, but the driver has a row for each signal and one for strikes during start-up.
        """
        if self.role != "driver":
            return self.role
        return "driver during start-up" if self.phase == START else f"driver ({self.signal})"

    @property
    def status(self) -> int:
        """Expected exit status of the run that gets the signal. A run with a status other than 0 is started again."""
        if self.role == "driver":
            return -9 if self.signal == "KILL" else 129
        return 1 if self.role in DAEMONS else 0


def kinds() -> list[tuple[str, str, str]]:
    """Return the (role, phase, signal) of all kinds of strike.

    For a worker, the returned signal is "". When a strike is drawn, "" becomes STOP with probability 1/3, otherwise
    KILL.
    """
    found = [(role, phase, "") for role in WORKERS for phase in PHASES]
    found += [(role, phase, signal) for role in SIGNALS for signal in SIGNALS[role] for phase in PHASES]
    return found + [("driver", START, "KILL")] * STARTS


def distillation_kinds() -> list[tuple[str, str, str]]:
    """Return the (role, phase, signal) of all kinds of strike on a run with distillation, in the form of `kinds`."""
    return [(role, phase, "KILL" if role == "driver" else "") for role in DISTILLING for phase in DISTILLATION_PHASES]


def draw(count: int, *, seed: int, of: Sequence[tuple[str, str, str]] = ()) -> list[Strike]:
    """Draw `count` strikes in random order.

    Every kind of strike is drawn once before any kind is drawn again. The kinds are those in `of`, in the form of
    `kinds`. If `of` is empty, the kinds are all that `kinds` returns.
    """
    every = list(of or kinds())
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


def draw_in_conversations(count: int, *, seed: int, phases: Sequence[str] = (GENERATE,)) -> list[Strike]:
    """Draw `count` strikes on the processes that hold unfinished conversations, in turn.

    The strikes are drawn evenly from whole phases, so that they come in every turn of a conversation.

    Args:
        count: Number of strikes.
        seed: Seed of the draws.
        phases: Phases in which the run has unfinished conversations. A run whose engines generate while the actor
            trains has unfinished conversations in all phases.
    """
    strikes = []
    for number in range(count):
        random_of, role = random.Random(f"{seed}/conversations/{number}"), CONVERSING[number % len(CONVERSING)]
        kind = "STOP" if role != "driver" and random_of.random() < 1 / 3 else "KILL"
        share, replicas = random_of.random(), 2 if random_of.random() < 0.25 else 1
        step, phase = random_of.randrange(STEPS), random_of.choice(phases)
        step = step if phase == GENERATE else _step(phase, max(step, 1))
        strikes.append(Strike(role, phase, kind, step, share, replicas, number))
    return strikes


def _step(phase: str, otherwise: int) -> int:
    """Return the training step of a strike in the given phase.

    Only some training steps have an evaluation: the run evaluates before the first step and after every second step.
    Every training step of the run has a checkpoint.
    """
    return {"evaluate": 2, START: 0}.get(phase, otherwise)


def is_strike(text: str) -> bool:
    """Return whether a text is "role:phase:signal" with an existing role, phase and signal."""
    role, phase, signal = (*text.split(":"), "", "")[:3]
    if text.count(":") != 2 or role not in EVERY_ROLE:
        return False
    if phase == START:
        return (role, signal) == ("driver", "KILL")
    return phase in EVERY_PHASE and signal in SIGNALS.get(role, ("KILL", "STOP"))


def named(texts: Sequence[str]) -> list[Strike]:
    """Parse texts of the form "role:phase:signal" into strikes that happen in the middle of the run."""
    return [
        Strike(role, phase, signal, _step(phase, 2), 0.5, replicas=1, seed=number)
        for number, (role, phase, signal) in enumerate(text.split(":") for text in texts)
    ]
