"""Tests of the soak: its trends of made series, and what it says of a process that leaks memory."""

import random

import pytest

from tests.chaos.soak import EVERY_S, decided, goes_on, report
from tests.chaos.trends import Trend, minima, trend

MINUTES = 20


def memory(mb_an_hour, jitter_mb, seed=0, minutes=MINUTES):
    """Return the measurements of a process that leaks, and takes up to `jitter_mb` more for a moment."""
    draw = random.Random(seed)
    moments = [EVERY_S * count for count in range(int(60 * minutes / EVERY_S))]
    return [(moment, 300 + mb_an_hour * moment / 3600 + draw.uniform(0, jitter_mb)) for moment in moments]


def test_the_trend_of_a_line_is_its_slope_per_hour_without_error():
    found = trend([(second, 7 + 2 * second / 3600) for second in range(0, 600, 5)])
    assert found.slope == pytest.approx(2)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_the_standard_error_is_the_spread_of_slopes_over_repeated_measurements():
    found = [trend(minima(memory(3, 4, seed))) for seed in range(200)]
    slopes = [line.slope for line in found]
    mean = sum(slopes) / len(slopes)
    spread = (sum((slope - mean) ** 2 for slope in slopes) / len(slopes)) ** 0.5
    assert mean == pytest.approx(3, abs=3 * spread / len(slopes) ** 0.5)
    assert sum(line.error for line in found) / len(found) == pytest.approx(spread, rel=0.15)


def test_two_points_have_no_standard_error():
    assert not trend([(0.0, 1.0), (60.0, 2.0)]).differs_from(5)


def test_the_minimum_of_each_minute_leaves_out_memory_of_a_moment():
    assert minima([(0, 5.0), (30, 3.0), (59, 9.0), (60, 4.0), (200, 8.0)]) == [(30, 3.0), (90, 4.0), (210, 8.0)]


def test_a_slope_differs_from_the_limit_beyond_two_standard_errors():
    assert Trend(slope=8.0, error=1.5).differs_from(5)
    assert Trend(slope=2.0, error=1.5).differs_from(5)
    assert not Trend(slope=8.0, error=1.6).differs_from(5)


@pytest.mark.parametrize(("mb_an_hour", "rising"), [(0, 0), (2, 0), (9, 1), (45, 1)])
def test_a_process_that_leaks_more_than_5_mb_an_hour_rises(mb_an_hour, rising, capsys):
    series = {"rank memory, MB": memory(mb_an_hour, jitter_mb=2)}
    assert decided(series, 60 * MINUTES)
    assert report(series, 60 * MINUTES) == rising
    assert ("rises" in capsys.readouterr().out) is bool(rising)


def test_a_run_goes_on_while_a_slope_is_within_its_error_of_the_limit_for_at_most_twice_its_time():
    series = {"rank memory, MB": memory(5, jitter_mb=20, minutes=2 * MINUTES)}
    flat = {"rank memory, MB": memory(0, jitter_mb=3, minutes=2 * MINUTES)}
    planned = 60 * MINUTES
    assert goes_on(flat, planned - 1, planned)
    assert goes_on(series, 2 * planned - 1, planned)
    assert not goes_on(series, 2 * planned, planned)
    assert not goes_on(flat, 2 * planned - 1, planned)


def test_a_process_that_ended_during_the_run_is_not_in_the_report(capsys):
    assert report({"rank memory, MB": memory(45, 0, minutes=MINUTES / 2)}, 60 * MINUTES) == 0
    assert "rank" not in capsys.readouterr().out
