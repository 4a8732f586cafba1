"""Computes the seeds of random streams, so that each sample of a run has random numbers of its own."""

_MASK = (1 << 64) - 1


def stream_seed(*words: int) -> int:
    """Hash integers such as (seed, uid, sample) to a 63-bit seed, with the mixing function of SplitMix64."""
    state = 0
    for word in words:
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
