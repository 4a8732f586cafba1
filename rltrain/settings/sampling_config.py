"""Defines the config sections `data.difficulty` and `trainer.reuse`: how prompts are sampled by difficulty, and how
prompt groups are reused.
"""

from rltrain.settings.key import key, section
from rltrain.settings.typed import require

# Default values of the keys of `data.difficulty`.
DIFFICULTY_DEFAULTS = {
    "easy_threshold": 1.0,
    "hard_threshold": 0.0,
    "easy_fraction": 0.1,
    "hard_fraction": 0.1,
    "unseen_fraction": 0.3,
}


def _default(name: str) -> str:
    return f"`{DIFFICULTY_DEFAULTS[name]:g}`"


@section
class DifficultyConfig:
    """Settings for sampling training prompts from pools of prompts with similar difficulty.

    `rltrain.data.prompt_pools` defines the pools of prompts, and how prompts are sampled from the pools.
    """

    given_whole = True  # The function `keys` counts `data.difficulty` as one key, whose value is a mapping or null.

    easy_threshold: float = key(
        "A prompt is easy if its success rate is at least this value. The success rate of a prompt is the share of "
        "correct answers in its most recent group.",
        if_left_out=_default("easy_threshold"),
        above=0,
        at_most=1,
    )
    hard_threshold: float = key(
        "A prompt is hard if its success rate is at most this value. A prompt whose success rate is between "
        "hard_threshold and easy_threshold is normal.",
        if_left_out=_default("hard_threshold"),
        at_least=0,
        below=1,
    )
    easy_fraction: float = key(
        "Fraction of the sampled prompts that is taken from the easy prompts.",
        if_left_out=_default("easy_fraction"),
        above=0,
        below=1,
    )
    hard_fraction: float = key(
        "Fraction of the sampled prompts that is taken from the hard prompts.",
        if_left_out=_default("hard_fraction"),
        above=0,
        below=1,
    )
    unseen_fraction: float = key(
        "Fraction of the sampled prompts that is taken from the prompts that have no measured success rate yet. "
        "The fraction 1 - easy_fraction - hard_fraction - unseen_fraction is taken from the normal prompts.",
        if_left_out=_default("unseen_fraction"),
        above=0,
        below=1,
    )

    def __post_init__(self) -> None:
        require(
            self.hard_threshold < self.easy_threshold,
            f"hard_threshold={self.hard_threshold:g} is not below easy_threshold={self.easy_threshold:g}: a prompt "
            "would be hard and easy at once; lower hard_threshold, or raise easy_threshold",
        )
        require(
            self.normal_fraction > 0,
            f"easy_fraction={self.easy_fraction:g}, hard_fraction={self.hard_fraction:g}, unseen_fraction="
            f"{self.unseen_fraction:g}: these fractions leave nothing for the normal prompts; use fractions whose "
            "sum is below 1",
        )

    @property
    def normal_fraction(self) -> float:
        """Fraction of the sampled prompts that is taken from normal prompts (neither easy nor hard nor unseen)."""
        return 1 - self.easy_fraction - self.hard_fraction - self.unseen_fraction


@section
class ReuseConfig:
    """Settings for training again on a prompt group of an earlier training step, if the answers of the group have
    different outcomes.

    `rltrain.trajectories.reuse_buffer` defines which prompt groups are trained on again.
    """

    given_whole = True  # The function `keys` counts `trainer.reuse` as one key, whose value is a mapping or null.

    groups: int = key(
        "Maximum number of prompt groups from earlier training steps that one training step reuses.",
        if_left_out="required",
        at_least=1,
    )
    steps: int = key(
        "Number of training steps, after the first use of a prompt group, in which the group may be used again. The "
        "engines run at most trainer.max_staleness - trainer.reuse.steps training steps ahead of training.",
        if_left_out="trainer.max_staleness",
        at_least=1,
    )
