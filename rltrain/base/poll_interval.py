"""Poll interval that grows with the elapsed time."""

import time

MOST_S, SHARE = 0.1, 0.02


def pause(began: float, least_s: float) -> float:
    """Return the seconds to wait before the next poll: a fiftieth of the elapsed time, within bounds.

    One poll takes about a millisecond of CPU time that other processes need. The growing interval delays short tasks
    only slightly, and disturbs long tasks only slightly.

    Args:
        began: value of `time.monotonic()` when the task began.
        least_s: lower bound in seconds. The upper bound is `MOST_S`, unless `least_s` is larger.
    """
    return max(least_s, min(MOST_S, SHARE * (time.monotonic() - began)))
