"""When schedules are due: the clock set forward and back in several zones, and every wrong expression refused at once."""

from __future__ import annotations

import builtins
import itertools
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.actors import MissingExtraError, recurrence
from perdure.actors.recurrence import Cron, Every, make_cron, make_every, moment_text
from perdure.workflow import InvalidArgumentError

MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS

BERLIN, NEW_YORK, LORD_HOWE, KOLKATA = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"

# Days on which the clock is set: in Berlin by an hour at 2:00 and 3:00, in New York at 2:00, on Lord Howe Island by half an
# hour at 2:00; in Havana and Beirut at midnight; Apia left out a whole day; Kolkata knows none of this.
CHANGES = {
    BERLIN: ["2026-03-29T01:00", "2026-10-25T01:00"],
    NEW_YORK: ["2026-03-08T07:00", "2026-11-01T06:00"],
    LORD_HOWE: ["2026-10-03T15:30", "2026-04-04T15:00"],
    "America/Havana": ["2026-03-08T05:00", "2026-11-01T05:00"],
    "Asia/Beirut": ["2026-03-28T22:00", "2026-10-24T21:00"],
    "Pacific/Apia": ["2011-12-30T10:00"],
    KOLKATA: ["2026-03-29T01:00"],
}


def at(text: str, zone: str = "UTC", fold: int = 0) -> int:
    """A moment, from the wall-clock time in a zone."""
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp() * 1000)


def occurrences(cron: Cron, after_ms: int, until_ms: int) -> Iterator[int]:
    found = cron.next_after(after_ms)
    while found is not None and found <= until_ms:
        yield found
        found = cron.next_after(found)


def on_day(expression: str, zone: str, day: str) -> list[str]:
    """The occurrences of one calendar day, as wall-clock times with their offset."""
    start = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(zone))
    first, last = (round(moment.timestamp() * 1000) for moment in (start, start + timedelta(days=1)))
    return [
        datetime.fromtimestamp(found / 1000, ZoneInfo(zone)).strftime("%H:%M%z")
        for found in occurrences(make_cron(expression, zone), first - 1, last - 1)
    ]


class TestClockSetForward:
    @pytest.mark.parametrize(
        ("zone", "day", "missing", "change"),
        [
            (BERLIN, "2026-03-29", "30 2 * * *", "03:00+0200"),
            (NEW_YORK, "2026-03-08", "30 2 * * *", "03:00-0400"),
            (LORD_HOWE, "2026-10-04", "15 2 * * *", "02:30+1100"),
        ],
    )
    def test_a_time_that_is_missing_occurs_once_at_the_change(
        self, zone: str, day: str, missing: str, change: str
    ) -> None:
        assert on_day(missing, zone, day) == [change]

    def test_several_times_that_are_missing_together_occur_together_once(self) -> None:
        assert on_day("*/10 2,3 * * *", BERLIN, "2026-03-29") == [f"03:{minute:02}+0200" for minute in range(0, 60, 10)]

    def test_the_day_after_it_is_as_ever(self) -> None:
        assert on_day("30 2 * * *", BERLIN, "2026-03-30") == ["02:30+0200"]

    def test_what_is_hourly_goes_on_by_elapsed_time(self) -> None:
        assert on_day("30 * * * *", BERLIN, "2026-03-29")[:4] == [
            "00:30+0100",
            "01:30+0100",
            "03:30+0200",
            "04:30+0200",
        ]
        assert len(on_day("0 * * * *", BERLIN, "2026-03-29")) == 23
        assert len(on_day("* * * * *", BERLIN, "2026-03-29")) == 23 * 60
        assert len(on_day("* * * * *", LORD_HOWE, "2026-10-04")) == 23 * 60 + 30

    def test_a_midnight_that_is_missing_does_not_take_the_day_with_it(self) -> None:
        assert on_day("0 0 * * *", "America/Havana", "2026-03-08") == ["01:00-0400"]
        assert on_day("0 0 * * 0", "Asia/Beirut", "2026-03-29") == ["01:00+0300"]


class TestClockSetBack:
    @pytest.mark.parametrize(
        ("zone", "day", "twice", "first"),
        [
            (BERLIN, "2026-10-25", "30 2 * * *", "02:30+0200"),
            (NEW_YORK, "2026-11-01", "30 1 * * *", "01:30-0400"),
            (LORD_HOWE, "2026-04-05", "45 1 * * *", "01:45+1100"),
        ],
    )
    def test_a_time_that_comes_twice_occurs_the_first_time_only(
        self, zone: str, day: str, twice: str, first: str
    ) -> None:
        assert on_day(twice, zone, day) == [first]

    def test_asked_in_the_second_of_the_two_hours_the_next_is_no_earlier_one(self) -> None:
        cron = make_cron("30,45 2 * * *", BERLIN)
        assert cron.next_after(at("2026-10-25T02:40", BERLIN, fold=1)) == at("2026-10-26T02:30", BERLIN)

    def test_what_is_hourly_runs_through_both_hours(self) -> None:
        assert on_day("30 * * * *", BERLIN, "2026-10-25")[1:5] == [
            "01:30+0200",
            "02:30+0200",
            "02:30+0100",
            "03:30+0100",
        ]
        assert len(on_day("0 0-23 * * *", BERLIN, "2026-10-25")) == 25, "whichever way every hour is written"
        assert len(on_day("*/5 * * * *", NEW_YORK, "2026-11-01")) == 25 * 12
        assert on_day("45 * * * *", LORD_HOWE, "2026-04-05")[1:4] == ["01:45+1100", "01:45+1030", "02:45+1030"]

    def test_an_hour_after_the_one_that_is_half_repeated_is_whole(self) -> None:
        expected = [f"02:{minute:02}+1030" for minute in range(0, 60, 10)]
        assert on_day("*/10 2 * * *", LORD_HOWE, "2026-04-05") == expected


class TestZones:
    def test_a_time_of_the_day_keeps_its_wall_clock_time_all_year(self) -> None:
        cron = make_cron("0 9 * * *", BERLIN)
        year = list(occurrences(cron, at("2026-01-01T00:00", BERLIN), at("2027-01-01T00:00", BERLIN)))
        assert len(year) == 365
        assert {datetime.fromtimestamp(found / 1000, ZoneInfo(BERLIN)).strftime("%H:%M") for found in year} == {"09:00"}
        assert {datetime.fromtimestamp(found / 1000, UTC).hour for found in year} == {7, 8}

    def test_a_zone_that_never_sets_its_clock_has_equal_days(self) -> None:
        cron = make_cron("30 2 * * *", KOLKATA)
        year = list(occurrences(cron, at("2026-01-01T00:00", KOLKATA), at("2027-01-01T00:00", KOLKATA)))
        assert {later - earlier for earlier, later in itertools.pairwise(year)} == {DAY_MS}

    @pytest.mark.parametrize("zone", ["UTC", UTC, ZoneInfo("UTC")])
    def test_utc_is_known_by_each_of_its_names(self, zone: Any) -> None:
        cron = make_cron("0 9 * * *", zone)
        assert (cron.zone_name, cron.next_after(at("2026-01-01T00:00"))) == ("UTC", at("2026-01-01T09:00"))

    def test_weekdays_and_days_of_the_month_are_those_of_the_zone(self) -> None:
        assert make_cron("0 1 * * 1", BERLIN).next_after(at("2026-06-13T00:00")) == at("2026-06-14T23:00")
        assert make_cron("0 0 L * *", BERLIN).next_after(at("2026-06-01T00:00")) == at("2026-06-29T22:00")

    def test_rare_days_are_found_however_far(self) -> None:
        assert make_cron("0 0 29 2 *", "UTC").next_after(at("2097-01-01T00:00")) == at("2104-02-29T00:00")
        assert make_cron("30 * 29 2 *", BERLIN).next_after(at("2026-01-01T00:00")) == at("2028-02-29T00:30", BERLIN)


FIELD = st.integers(0, 2**30)


def expression(seed: int) -> tuple[str, set[int], set[int]]:
    """An expression, with the minutes and hours that it takes."""
    source = random.Random(seed)

    def some(end: int, low: int) -> tuple[str, set[int]]:
        kind = source.random()
        if kind < 0.3:
            return "*", set(range(end))
        if kind < 0.6:
            step = source.randint(2, 7)
            return f"*/{step}", set(range(0, end, step))
        chosen = set(source.sample(range(low), source.randint(1, 4)))
        return ",".join(map(str, sorted(chosen))), chosen

    minute_text, minutes = some(60, 60)
    hour_text, hours = some(24, 5)
    return f"{minute_text} {hour_text} * * *", minutes, hours


def expected(zone: str, minutes: set[int], hours: set[int], from_ms: int, until_ms: int) -> list[int]:
    """The rule, minute by minute: walk through time, and through the wall-clock times that the clock leaves out."""
    found: set[int] = set()
    seen: set[datetime] = set()
    before: datetime | None = None
    for moment_ms in range(from_ms, until_ms, MINUTE_MS):
        wall = datetime.fromtimestamp(moment_ms / 1000, ZoneInfo(zone)).replace(tzinfo=None)
        walls = [wall]
        if hours != set(range(24)) and before is not None:
            walls = [] if wall in seen else [wall]
            while (before := before + timedelta(minutes=1)) < wall:
                walls.append(before)
        if any(each.minute in minutes and each.hour in hours for each in walls):
            found.add(moment_ms)
        seen.add(wall)
        before = wall
    return sorted(found)


@given(
    zone=st.sampled_from(sorted(CHANGES)),
    which=st.integers(0, 1),
    seed=FIELD,
    starts=st.lists(st.integers(-DAY_MS, DAY_MS), max_size=5),
    count=st.integers(1, 40),
)
def test_around_every_change_of_the_clock_each_occurrence_is_that_of_the_rule(
    zone: str, which: int, seed: int, starts: list[int], count: int
) -> None:
    change_ms = at(CHANGES[zone][which % len(CHANGES[zone])])
    text, minutes, hours = expression(seed)
    cron = make_cron(text, zone)
    first_ms, last_ms = change_ms - DAY_MS, change_ms + DAY_MS
    # The rule needs to know what the days before were like, and the last start looks a day ahead.
    rule = expected(zone, minutes, hours, first_ms - DAY_MS, last_ms + DAY_MS)
    within = [moment_ms for moment_ms in rule if first_ms < moment_ms <= last_ms]
    assert list(occurrences(cron, first_ms, last_ms)) == within
    assert cron.latest(first_ms + 1, last_ms, count) == within[-count:]
    for start in starts:
        later = [moment_ms for moment_ms in rule if moment_ms > change_ms + start]
        if later:
            assert cron.next_after(change_ms + start) == later[0]


class TestLatest:
    def test_a_year_that_was_missed_costs_what_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = 0
        original = Cron.next_after

        def counted(self: Cron, moment_ms: int) -> int | None:
            nonlocal asked
            asked += 1
            return original(self, moment_ms)

        monkeypatch.setattr(Cron, "next_after", counted)
        cron = make_cron("* * * * *", BERLIN)
        until_ms = at("2027-01-01T00:00")
        assert cron.latest(at("2026-01-01T00:00"), until_ms, 1) == [until_ms]
        assert cron.latest(at("2026-01-01T00:00"), until_ms, 3) == [
            until_ms - 2 * MINUTE_MS,
            until_ms - MINUTE_MS,
            until_ms,
        ]
        assert asked < 100
        rare = make_cron("* * 1 1 *", BERLIN)
        last = at("2027-01-01T23:59", BERLIN)
        assert rare.latest(at("2020-01-01T00:00"), at("2027-12-01T00:00"), 1) == [last]
        assert rare.latest(at("2020-01-01T00:00"), at("2027-12-01T00:00"), 2) == [last - MINUTE_MS, last]
        assert asked < 500, "a day with an occurrence each minute, a year ago"

    def test_there_may_be_fewer_than_asked_for(self) -> None:
        cron = make_cron("0 0 29 2 *", "UTC")
        assert cron.latest(at("2020-01-01T00:00"), at("2026-01-01T00:00"), 9) == [
            at("2020-02-29T00:00"),
            at("2024-02-29T00:00"),
        ]
        assert cron.latest(at("2025-01-01T00:00"), at("2026-01-01T00:00"), 9) == []

    @given(
        period=st.integers(100, 10**6),
        first=st.integers(-(10**6), 10**7),
        length=st.integers(0, 10**7),
        count=st.integers(1, 50),
    )
    def test_periods_are_counted_and_not_walked(self, period: int, first: int, length: int, count: int) -> None:
        every = Every(period, 1_000)
        walked: list[int] = []
        moment_ms = every.next_after(first - 1)
        while moment_ms is not None and moment_ms <= first + length and len(walked) < 2_000:
            walked.append(moment_ms)
            moment_ms = every.next_after(moment_ms)
        if len(walked) < 2_000:
            assert every.latest(first, first + length, count) == walked[-count:]
        far = every.latest(first, first + 10**15, count)
        assert len(far) == count
        assert far[-1] <= first + 10**15 < far[-1] + period
        assert all(later - earlier == period for earlier, later in itertools.pairwise(far))


class TestEvery:
    def test_the_first_period_ends_one_period_after_its_anchor_whatever_the_clock_says(self) -> None:
        every = make_every(60, 1_000)
        assert every.next_after(1_000) == 61_000
        assert every.next_after(61_000) == 121_000
        assert every.next_after(60_999) == 61_000
        assert every.next_after(-(10**12)) == 61_000, "a clock that was set back"

    @pytest.mark.parametrize("seconds", [0, 0.05, -1, float("nan"), float("inf"), "60", None, True])
    def test_a_wrong_period_is_refused_with_a_right_one(self, seconds: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=r"every=60\.0|workflow with ctx\.loop"):
            make_every(seconds, 0)


class TestRefusals:
    @pytest.mark.parametrize(
        "text",
        ["", "* * * *", "@daily", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8", "a b c d e", "5-1 * * * *",
         "*/0 * * * *", "١ * * * *", "9" * 6000 + " * * * *", "* * * * MON#6", "0 0 * * L"],
    )  # fmt: skip
    def test_a_wrong_expression_is_refused_with_a_right_one(self, text: str) -> None:
        with pytest.raises(InvalidArgumentError, match=r'cron="0 9 \* \* 1-5"'):
            make_cron(text, "UTC")

    def test_seconds_are_told_of_every(self) -> None:
        with pytest.raises(InvalidArgumentError, match="for seconds there is every="):
            make_cron("*/10 * * * * *", "UTC")

    @pytest.mark.parametrize("text", ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "* * */20 * 1L"])
    def test_a_day_that_never_comes_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidArgumentError, match=r'cron="0 9 \* \* 1-5"'):
            make_cron(text, BERLIN)

    @pytest.mark.parametrize("text", [None, 5, b"* * * * *", ["*"] * 5])
    def test_another_type_is_refused(self, text: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="cron= takes text"):
            make_cron(text, "UTC")

    @pytest.mark.parametrize(
        "zone", ["Mars/Olympus", "", "../../etc/passwd", "/etc/passwd", "Europe/Berlin\0", None, 2, timedelta(hours=1)]
    )
    def test_a_wrong_zone_is_refused_with_a_right_one(self, zone: Any) -> None:
        with pytest.raises(InvalidArgumentError, match='timezone="Europe/Berlin"'):
            make_cron("0 9 * * *", zone)

    def test_without_the_library_the_error_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = builtins.__import__

        def without(name: str, *arguments: Any, **options: Any) -> Any:
            if name == "cronsim":
                raise ImportError(name)
            return original(name, *arguments, **options)

        recurrence._library.cache_clear()
        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(MissingExtraError, match=r'pip install "perdure\[schedules\]"') as caught:
            make_cron("0 9 * * *", "UTC")
        assert caught.value.extra == "schedules"
        assert make_every(60, 0).next_after(0) == 60_000, "which needs nothing"


def test_moments_are_written_in_utc_and_in_full_seconds_where_they_are() -> None:
    assert moment_text(at("2026-11-29T08:00")) == "2026-11-29T08:00:00Z"
    assert moment_text(at("2026-11-29T08:00") + 250) == "2026-11-29T08:00:00.250Z"
    assert moment_text(at("2026-11-29T08:00") + 7) == "2026-11-29T08:00:00.007Z"
