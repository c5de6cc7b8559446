"""Measuring commits."""

from __future__ import annotations

from time import perf_counter

import pytest

from perdure.actors.meter import RECENT_MAX, WINDOW_S, CommitRate, Meter


def test_without_commits_everything_is_zero() -> None:
    assert Meter().rate() == CommitRate(0.0, 0.0, 0.0)


def test_quantiles_and_the_rate_are_of_the_latest_minute() -> None:
    meter = Meter()
    now = perf_counter()
    meter._started = now - 1_000
    meter._recent.extend((now - WINDOW_S - 5, 9.0) for _ in range(50))
    meter._recent.extend((now - 10, milliseconds / 1000) for milliseconds in range(1, 101))
    rate = meter.rate(now)
    assert rate.per_second == pytest.approx(100 / WINDOW_S)
    assert rate.p50_ms == pytest.approx(50)
    assert rate.p99_ms == pytest.approx(99)


def test_a_busy_supervisor_is_measured_over_what_is_kept() -> None:
    meter = Meter()
    now = perf_counter()
    meter._started = now - 1_000
    meter._recent.extend((now - 2 + 2 * number / RECENT_MAX, 0.001) for number in range(3 * RECENT_MAX))
    meter._recent.extend((now - 2 + 2 * number / RECENT_MAX, 0.001) for number in range(RECENT_MAX))
    assert len(meter._recent) == RECENT_MAX
    assert meter.rate(now).per_second == pytest.approx(RECENT_MAX / 2, rel=0.01)


def test_a_young_supervisor_is_measured_since_its_start() -> None:
    meter = Meter()
    now = perf_counter()
    meter._started = now - 2
    meter._recent.extend((now - 1, 0.001) for _ in range(10))
    assert meter.rate(now).per_second == pytest.approx(5)


def test_a_commit_is_counted_with_how_long_it_took() -> None:
    meter = Meter()
    meter.note(perf_counter() - 0.5)
    assert meter.commits == 1
    assert 500 <= meter.rate().p50_ms < 1_500
