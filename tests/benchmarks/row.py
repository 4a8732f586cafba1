"""The report of one benchmark: the ratio of two measurements that were taken alternately on the same machine."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """A line of the benchmark table.

    Attributes:
        name: Short description of the comparison.
        ratio: Ratio of the two measured values, in the sense given by `unit`.
        unit: Meaning of the ratio, for instance "times faster than a padded batch".
        target: Target for the ratio, for instance ">= 2", or "" if the ratio has no target.
        ours, theirs: The two measured values behind the ratio, with their units.
        notes: Sizes, peak memory, versions and other facts needed to judge the ratio.
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
