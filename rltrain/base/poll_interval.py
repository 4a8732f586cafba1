"""How often to look at what goes on beside: the longer it has, the more rarely."""

import time

MOST_S, SHARE = 0.1, 0.02


def pause(began: float, least_s: float) -> float:
    """Seconds until the next look at what began at this `time.monotonic()`: a fiftieth of its time, within bounds.

    A look takes a millisecond of processors that others work on. So what is short is hardly delayed, and what is long
    hardly disturbed.

    Args:
        began: when it did.
        least_s: never less than this, though it be more than `MOST_S`, the most otherwise.
    """
    return max(least_s, min(MOST_S, SHARE * (time.monotonic() - began)))
