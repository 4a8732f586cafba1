"""How often a wait is broken off to look at something else."""

import time

import pytest

from rltrain import pace


@pytest.mark.parametrize(
    ("took", "least", "expected"),
    [(0.0, 0.02, 0.02), (0.4, 0.02, 0.02), (2.0, 0.02, 0.04), (60.0, 0.02, pace.MOST_S), (60.0, 5.0, 5.0)],
)
def test_what_has_taken_long_is_looked_at_more_rarely(monkeypatch, took, least, expected):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + took)
    assert pace.pause(100.0, least) == pytest.approx(expected)
