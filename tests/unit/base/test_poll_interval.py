"""How often a wait is broken off to look at something else."""

import time

import pytest

from rltrain.base import poll_interval


@pytest.mark.parametrize(
    ("took", "least", "expected"),
    [(0.0, 0.02, 0.02), (0.4, 0.02, 0.02), (2.0, 0.02, 0.04), (60.0, 0.02, poll_interval.MOST_S), (60.0, 5.0, 5.0)],
)
def test_what_has_taken_long_is_looked_at_more_rarely(monkeypatch, took, least, expected):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + took)
    assert poll_interval.pause(100.0, least) == pytest.approx(expected)
