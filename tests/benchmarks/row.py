"""What one benchmark reports: a ratio of two things run in turn on the same machine."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what was compared, in a few words.
        ratio: of the two figures, as `unit` says.
        unit: what the ratio means, "times faster than a padded batch" for instance.
        target: what is aimed at, ">= 2" for instance; "" where there is none.
        ours, theirs: the two figures behind the ratio, with their units.
        notes: sizes, peak memory, versions and whatever else a reader needs to judge it.
        command: reproduces it from the repository root.
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
