"""Counting beginnings: never more than the rate in any span, nobody held longer than that needs, and wrong limits refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.actors import WorkflowLimit
from perdure.actors.limits import Beginnings
from perdure.workflow import InvalidArgumentError


@given(
    rate=st.integers(1, 6),
    per_ms=st.integers(1, 50),
    pauses=st.lists(st.integers(0, 40), max_size=60),
    restarts=st.sets(st.integers(0, 60)),
)
def test_in_no_span_begin_more_than_the_rate_and_nobody_waits_longer_than_that_needs(
    rate: int, per_ms: int, pauses: list[int], restarts: set[int]
) -> None:
    """Over restarts too: what is stored is what counts, and nothing else is kept."""
    stored: dict[int, int] = {}
    beginnings = Beginnings(rate, per_ms, [])
    begun: list[int] = []
    now_ms = 1_000
    for number, pause in enumerate(pauses):
        now_ms += pause
        free = beginnings.free(now_ms)
        assert free == max(0, rate - sum(time > now_ms - per_ms for time in begun))
        next_ms = beginnings.next_ms(now_ms)
        assert (next_ms <= now_ms) == (free > 0)
        if not free:
            assert beginnings.free(next_ms) > 0
            assert beginnings.free(next_ms - 1) == 0
        take = min(free, 1 + number % 3)
        kept = beginnings.expired(now_ms)
        stored = {key: time for key, time in stored.items() if key >= kept}
        stored |= {beginnings.next_number + offset: now_ms for offset in range(take)}
        beginnings.add(take, now_ms)
        beginnings.forget_before(kept)
        begun += [now_ms] * take
        assert len(stored) <= rate
        if number in restarts:
            beginnings = Beginnings(rate, per_ms, sorted(stored.items()))
    for time in begun:
        assert sum(time <= other < time + per_ms for other in begun) <= rate


def test_a_clock_that_was_set_back_holds_nobody_for_longer_than_a_span() -> None:
    beginnings = Beginnings(2, 1_000, [(7, 100_000), (8, 100_500)])
    assert beginnings.free(50_000) == 0
    assert beginnings.next_ms(50_000) == 51_000
    assert beginnings.free(51_000) == 2


def test_beginnings_stored_before_the_clock_was_set_back_count_no_longer_than_those_after_them() -> None:
    beginnings = Beginnings(2, 1_000, [(7, 100_000), (8, 50_000)])
    assert beginnings.free(50_999) == 0
    assert beginnings.free(51_000) == 2


def test_a_look_costs_about_the_same_whatever_the_rate() -> None:
    class Counted(list[int]):
        looks = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.looks += 1
            return super().__getitem__(index)

        def __iter__(self) -> Any:
            raise AssertionError("all were looked at")

    beginnings = Beginnings(100_000, 1_000, [])
    beginnings.add(50_000, 5)
    beginnings._times = Counted(beginnings._times)  # pyright: ignore[reportPrivateUsage]
    assert beginnings.free(10) == 50_000
    assert beginnings.free(1_005) == 100_000


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, r"write WorkflowLimit\(concurrency=5\)"),
        ({"per": 5.0}, "limits nothing"),
        ({"concurrency": 0}, r"WorkflowLimit\(concurrency=5\)"),
        ({"concurrency": True}, "concurrency must be a whole number"),
        ({"concurrency": 2.5}, "concurrency must be a whole number"),
        ({"rate": 0}, r"WorkflowLimit\(rate=10, per=60\.0\)"),
        ({"rate": "10"}, "rate must be a whole number"),
        ({"rate": 1, "per": 0}, "more than 0 seconds"),
        ({"rate": 1, "per": -1}, "0 or more"),
        ({"rate": 1, "per": float("inf")}, "finite"),
        ({"rate": 1, "per": "minute"}, "must be a number of seconds"),
    ],
)
def test_a_limit_that_cannot_be_meant_is_refused_with_what_to_write(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        WorkflowLimit(**options)
