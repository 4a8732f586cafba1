"""The report of one benchmark: a ratio of two things run in turn on the same machine."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """A line of the benchmark table.

    Attributes:
        name: What was compared, in a few words.
        ratio: Ratio of the two figures, as `unit` explains.
        unit: Meaning of the ratio, for instance "times faster than a padded batch".
        target: Aim for the ratio, for instance ">= 2"; "" if there is none.
        ours, theirs: The two figures behind the ratio, with their units.
        notes: Sizes, peak memory, versions and all else that a reader needs to judge the ratio.
        command: Command that reproduces the row from the repository root.
    """

    name: str
    ratio: float
    unit: str
    target: str
    ours: str
    theirs: str
    notes: str
    command: str
    extra: dict[str, float] = field(default_factory=dict)
