"""Counter-based random numbers: each number is a function of (seed, step, row, token), not of earlier numbers."""

import torch
from torch import Tensor


def uniform_draws(lengths: Tensor, *, seed: int, step: int) -> Tensor:
    """Return one random number in [0, 1) for each token of each row, ordered by row and token, as (N,) float64.

        u = h(h(h(h(seed) + step) + row) + token) / 2^64, rounded down to 53 bits

    The hash function h(x) is the output of SplitMix64 at state x (doi 10.1145/2660193.2660195), a bijection on 64 bits.
    `lengths` (B,) int64 holds the number of tokens of each row, which can be 0. N is the sum of `lengths`.
    `uniform_draws` does not read or change the state of any random number generator. The random number of a (row,
    token) pair does not depend on the lengths of other rows, and is the same on every device and after a run is
    resumed.
    """
    rows = torch.arange(len(lengths), device=lengths.device)
    row = rows.repeat_interleave(lengths)
    token = torch.arange(len(row), device=lengths.device) - (lengths.cumsum(0) - lengths)[row]
    key = _hash(torch.tensor(_signed(seed), device=lengths.device)) + _signed(step)
    return _shift(_hash(_hash(_hash(key) + row) + token), 11).double() * 2.0**-53


def stream_draws(streams: Tensor, tokens: Tensor) -> Tensor:
    """Return one random number in [0, 1) for each pair of a stream and a token index, as (N,) float64.

    `streams` (N,) holds the seeds of the streams, and `tokens` (N,) holds the token indices. The random number is
    h(h(stream) + token) / 2^64, where h is the hash function defined in `uniform_draws`.
    """
    return _shift(_hash(_hash(streams) + tokens), 11).double() * 2.0**-53


def _hash(state: Tensor) -> Tensor:
    """Return the SplitMix64 output at each int64 state; products wrap around as in unsigned arithmetic."""
    mixed = state + _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shift(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift(mixed, 27)) * _signed(0x94D049BB133111EB)
    return mixed ^ _shift(mixed, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift `bits` right and fill with zeros, because the >> operator on int64 fills with the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """Return the signed int64 whose bits are the lowest 64 bits of `number`."""
    return (number + 2**63) % 2**64 - 2**63
