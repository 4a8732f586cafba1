"""Which process is struck, when and how: every role in every phase, drawn from a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 4
# Roles that live in a process of their own with placement.share_ranks=false; a shared rank is struck as the actor.
ROLES = ("rollout", "reward", "actor", "critic", "reference", "driver")
PHASES = (
    "generate", "ref_log_probs", "old_log_probs", "values", "rewards", "advantages", "update_critic", "update_actor",
    "sync_weights", "checkpoint", "evaluate",
)  # fmt: skip


@dataclass(frozen=True)
class Strike:
    """One process killed, or stopped as if it hung.

    Attributes:
        role: whose process.
        phase: of the step, in which it is struck.
        signal: "KILL" or "STOP"; the driver is only killed, as nobody watches it.
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


def draw(count: int, *, seed: int) -> list[Strike]:
    """`count` strikes: each role in each phase before any comes a second time, every third a hang."""
    pairs = [(role, phase) for role in ROLES for phase in PHASES]
    strikes = []
    for number in range(count):
        random_of = random.Random(f"{seed}/{number}")
        role, phase = pairs[number % len(pairs)]
        stops = role != "driver" and (number + number // len(pairs)) % 3 == 2
        # An evaluation comes before the first step and after each second one, a checkpoint after each.
        step = 2 if phase == "evaluate" else random_of.randrange(1, STEPS)
        strikes.append(
            Strike(
                role, phase, "STOP" if stops else "KILL", step, random_of.random(),
                replicas=2 if random_of.random() < 0.25 else 1, seed=number,
            )
        )  # fmt: skip
    return strikes


def is_strike(text: str) -> bool:
    """Whether this is "role:phase:signal"; the driver is not stopped, since nobody would see it."""
    role, phase, signal = (*text.split(":"), "", "")[:3]
    known = text.count(":") == 2 and role in ROLES and phase in PHASES and signal in ("KILL", "STOP")
    return known and (role, signal) != ("driver", "STOP")


def named(texts: Sequence[str]) -> list[Strike]:
    """Strikes as "role:phase:signal" says, in the middle of the run."""
    return [
        Strike(role, phase, signal, 2, 0.5, replicas=1, seed=number)
        for number, (role, phase, signal) in enumerate(text.split(":") for text in texts)
    ]
