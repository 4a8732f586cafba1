"""The trend of a series of measurements: its slope, and the standard error of that slope."""

import math
from dataclasses import dataclass

Points = list[tuple[float, float]]  # Pairs of (seconds, value).


@dataclass(frozen=True)
class Trend:
    """The least-squares line through a series.

    Attributes:
        slope: Slope of the line, in units of the value per hour.
        error: Standard error of the slope, in the same unit. It is infinite for fewer than three points.
    """

    slope: float
    error: float

    def differs_from(self, limit: float) -> bool:
        """Return whether the slope is at least two standard errors above or below `limit` (per hour)."""
        return abs(self.slope - limit) >= 2 * self.error


def trend(points: Points) -> Trend:
    """Return the trend of `points`. The standard error comes from the distances between the points and the line."""
    count = len(points)
    if count < 3:
        return Trend(0.0, math.inf)
    mean_x, mean_y = (sum(point[axis] for point in points) / count for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residuals = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return Trend(3600 * slope, 3600 * math.sqrt(residuals / (count - 2) / spread))


def minima(points: Points, seconds: float = 60.0) -> Points:
    """Return the smallest value in each interval of `seconds`, at the middle of the interval.

    A process takes memory in each training step and frees it again. The minimum in an interval leaves out most of this
    temporary memory. A leak raises the minimum as well.
    """
    lowest: dict[int, float] = {}
    for moment, value in points:
        interval = int(moment // seconds)
        lowest[interval] = min(value, lowest.get(interval, math.inf))
    return [((interval + 0.5) * seconds, value) for interval, value in sorted(lowest.items())]
