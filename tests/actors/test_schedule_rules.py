"""What a schedule does next: misfires, overlaps, pauses and new definitions, on plain data."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.actors import schedule_rules as rules
from perdure.actors.recurrence import make_cron, make_every, moment_text
from perdure.actors.schedule_handle import define
from perdure.actors.schedule_record import (
    Cursor,
    Definition,
    Misfire,
    Overlap,
    Run,
    RunStatus,
    Standing,
    make_definition,
)
from perdure.workflow import InvalidArgumentError

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000 - 1_700_000_000_000 % HOUR_MS


def hourly(overlap: Overlap = "allow", misfire: Misfire = "once", *, template: str = "{name}@{time}") -> Definition:
    return make_definition("report", make_every(3600, START_MS), overlap, misfire, template)


def standing(definition: Definition, *, last: int = 0, **runs: RunStatus) -> Standing:
    """A schedule with some runs, as in `h1=ACTIVE` for that of the first hour; its cursor is after the `last`."""
    found = {START_MS + int(key[1:]) * HOUR_MS: Run(status, key) for key, status in runs.items()}
    last = max([last, *((key - START_MS) // HOUR_MS for key in found)])
    return Standing("s", definition, Cursor(START_MS + (last + 1) * HOUR_MS, START_MS + last * HOUR_MS), found)


def hours(change: Any) -> dict[int, str]:
    return {(key - START_MS) // HOUR_MS: run.status.value for key, run in change.puts.items()}


ACTIVE, STARTING, QUEUED = RunStatus.ACTIVE, RunStatus.STARTING, RunStatus.QUEUED


class TestMisfire:
    def test_an_occurrence_on_time_is_run_whatever_is_said_of_those_that_are_not(self) -> None:
        for misfire in ("once", "skip", "all"):
            schedule = standing(hourly(misfire=misfire))
            for late_s in (0, 59, 60):
                change = rules.advance(schedule, START_MS + HOUR_MS + late_s * 1000)
                assert hours(change) == {1: "starting"}
                assert change.cursor == Cursor(START_MS + 2 * HOUR_MS, START_MS + HOUR_MS)

    @pytest.mark.parametrize(
        ("misfire", "expected"),
        [("once", {5: "starting"}), ("skip", {}), ("all", dict.fromkeys(range(1, 6), "starting"))],
    )
    def test_what_was_missed_is_run_once_not_at_all_or_each(self, misfire: Misfire, expected: dict[int, str]) -> None:
        change = rules.advance(standing(hourly(misfire=misfire)), START_MS + 5 * HOUR_MS + HOUR_MS // 2)
        assert hours(change) == expected
        assert change.cursor is not None
        assert change.cursor.next_ms == START_MS + 6 * HOUR_MS
        assert change.cursor.last_ms == START_MS + max(expected, default=0) * HOUR_MS

    def test_of_several_that_are_due_the_latest_is_not_missed_if_it_is_on_time(self) -> None:
        now_ms = START_MS + 5 * HOUR_MS + 1000
        assert hours(rules.advance(standing(hourly(misfire="skip")), now_ms)) == {5: "starting"}
        assert hours(rules.advance(standing(hourly(misfire="once")), now_ms)) == {5: "starting"}

    def test_catching_up_has_a_bound_and_takes_the_latest(self) -> None:
        change = rules.advance(standing(hourly(misfire="all")), START_MS + 5_000 * HOUR_MS)
        assert list(hours(change)) == list(range(5_001 - rules.CATCH_UP_MAX, 5_001))

    def test_nothing_is_due_before_its_time(self) -> None:
        assert not rules.advance(standing(hourly()), START_MS + HOUR_MS - 1)


class TestOverlap:
    def test_allow_starts_beside_what_runs(self) -> None:
        schedule = standing(hourly("allow"), h1=ACTIVE, h2=STARTING)
        assert hours(rules.advance(schedule, START_MS + 3 * HOUR_MS)) == {3: "starting"}

    @pytest.mark.parametrize("status", [ACTIVE, STARTING, QUEUED])
    def test_skip_drops_the_occurrence_while_a_run_has_not_ended(self, status: RunStatus) -> None:
        change = rules.advance(standing(hourly("skip"), h1=status), START_MS + 2 * HOUR_MS)
        assert hours(change) == {}
        assert change.cursor == Cursor(START_MS + 3 * HOUR_MS, START_MS + HOUR_MS), "which is decided for good"
        assert change.dropped == 1

    def test_skip_runs_the_first_of_those_caught_up_with(self) -> None:
        assert hours(rules.advance(standing(hourly("skip", "all")), START_MS + 4 * HOUR_MS)) == {1: "starting"}

    def test_queue_starts_the_first_and_keeps_the_others_in_order(self) -> None:
        change = rules.advance(standing(hourly("queue", "all")), START_MS + 4 * HOUR_MS)
        assert hours(change) == {1: "starting", 2: "queued", 3: "queued", 4: "queued"}

    def test_the_queue_has_a_bound_and_keeps_the_earliest(self) -> None:
        full = {f"h{hour}": QUEUED for hour in range(2, rules.QUEUE_MAX + 1)}
        schedule = standing(hourly("queue", "all"), h1=ACTIVE, **full)
        change = rules.advance(schedule, START_MS + (rules.QUEUE_MAX + 3) * HOUR_MS)
        assert hours(change) == {rules.QUEUE_MAX + 1: "queued"}
        assert change.dropped == 2
        assert change.cursor is not None
        assert change.cursor.last_ms == START_MS + (rules.QUEUE_MAX + 1) * HOUR_MS

    def test_when_the_run_ends_the_earliest_that_waits_is_started(self) -> None:
        schedule = standing(hourly("queue"), h1=ACTIVE, h2=QUEUED, h3=QUEUED)
        change = rules.ended(schedule, START_MS + HOUR_MS)
        assert (hours(change), change.removes) == ({2: "starting"}, (START_MS + HOUR_MS,))
        change.apply(schedule)
        assert list(schedule.runs.values()) == [Run(STARTING, "h2"), Run(QUEUED, "h3")]

    def test_while_another_run_has_not_ended_nothing_that_waits_is_started(self) -> None:
        schedule = standing(hourly("queue"), h1=ACTIVE, h2=ACTIVE, h3=QUEUED)
        assert hours(rules.ended(schedule, START_MS + HOUR_MS)) == {}

    def test_runs_that_end_together_are_noted_together(self) -> None:
        schedule = standing(hourly("queue"), h1=ACTIVE, h2=ACTIVE, h3=QUEUED)
        change = rules.ended(schedule, START_MS + HOUR_MS, START_MS + 2 * HOUR_MS, START_MS + 9 * HOUR_MS)
        assert (hours(change), len(change.removes)) == ({3: "starting"}, 2)

    def test_an_end_that_is_told_twice_changes_nothing_more(self) -> None:
        assert not rules.ended(standing(hourly("queue"), h2=ACTIVE), START_MS + HOUR_MS)

    @given(
        overlap=st.sampled_from(["skip", "queue"]),
        misfire=st.sampled_from(["once", "skip", "all"]),
        events=st.lists(
            st.tuples(st.sampled_from(["tick", "long", "started", "ended"]), st.integers(0, 5)), max_size=40
        ),
    )
    def test_at_most_one_run_is_active_and_each_occurrence_is_run_once_in_order(
        self, overlap: Overlap, misfire: Misfire, events: list[tuple[str, int]]
    ) -> None:
        schedule = standing(hourly(overlap, misfire))
        now_ms = START_MS
        begun: list[int] = []
        for event, which in events:
            change = None
            running = [key for key, run in schedule.runs.items() if run.status is not QUEUED]
            if event in ("tick", "long"):
                now_ms += HOUR_MS * (1 if event == "tick" else 7) + which * 1000
                change = rules.advance(schedule, now_ms)
            elif running and event == "started":
                change = rules.started(schedule, running[0])
            elif running:
                change = rules.ended(schedule, running[0])
            if change is not None:
                change.apply(schedule)
                begun += [key for key, run in change.puts.items() if run.status is STARTING]
            running = [key for key, run in schedule.runs.items() if run.status is not QUEUED]
            assert len(running) <= 1
            assert bool(running) == bool(schedule.runs), "nothing waits for nothing"
            assert list(schedule.runs) == sorted(schedule.runs)
        assert begun == sorted(set(begun))


class TestPause:
    def test_a_paused_schedule_starts_nothing_and_keeps_what_waits(self) -> None:
        schedule = standing(hourly("queue"), h1=ACTIVE, h2=QUEUED)
        rules.pause(schedule).apply(schedule)
        assert not rules.advance(schedule, START_MS + 9 * HOUR_MS)
        rules.ended(schedule, START_MS + HOUR_MS).apply(schedule)
        assert list(schedule.runs.values()) == [Run(QUEUED, "h2")]
        assert not rules.pause(schedule)
        change = rules.resume(schedule, START_MS + 9 * HOUR_MS)
        assert hours(change) == {2: "starting"}
        assert change.cursor == Cursor(START_MS + 10 * HOUR_MS, START_MS + 2 * HOUR_MS), (
            "what occurred meanwhile is left out"
        )
        change.apply(schedule)
        assert not rules.resume(schedule, START_MS + 9 * HOUR_MS)


class TestAnotherDefinition:
    def test_the_same_times_keep_their_next_occurrence_missed_ones_included(self) -> None:
        schedule = standing(hourly())
        later = make_definition("summary", make_every(3600, START_MS + 5), "skip", "all", "{time}").going_on_from(
            schedule.definition
        )
        assert later.recurrence == schedule.definition.recurrence, "and their anchor"
        assert rules.redefine(schedule, later, START_MS + 7 * HOUR_MS).cursor == schedule.cursor

    def test_other_times_begin_after_now_and_after_what_has_occurred(self) -> None:
        schedule = standing(hourly(), last=3)
        cron = make_definition("report", make_cron("30 * * * *", "UTC"), "skip", "once", "{name}@{time}")
        for now_ms in (START_MS + 3 * HOUR_MS, START_MS + HOUR_MS):
            change = rules.redefine(schedule, cron, now_ms)
            assert change.cursor == Cursor(START_MS + 3 * HOUR_MS + HOUR_MS // 2, START_MS + 3 * HOUR_MS)

    def test_what_waits_is_started_if_it_may_now(self) -> None:
        schedule = standing(hourly("queue"), h1=ACTIVE, h2=QUEUED, h3=QUEUED)
        assert hours(rules.redefine(schedule, hourly("allow"), START_MS)) == {2: "starting", 3: "starting"}
        assert hours(rules.redefine(schedule, hourly("skip"), START_MS)) == {}


class TestIds:
    def test_an_occurrence_has_one_id(self) -> None:
        moment_ms = START_MS + HOUR_MS
        text = moment_text(moment_ms)
        assert rules.run_id("{name}@{time}", "nightly", moment_ms) == f"nightly@{text}"
        assert rules.run_id("r/{time}", "nightly", moment_ms) == f"r/{text}"
        assert rules.run_id("{name}@{time}", "{time}", moment_ms) == f"{{time}}@{text}"


class TestDefine:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({}, "either cron= or every="),
            ({"cron": "* * * * *", "every": 60}, "either cron= or every="),
            ({"every": 60, "timezone": "Europe/Berlin"}, "leave out timezone="),
            ({"every": 60, "overlap": "wait"}, 'write overlap="skip"'),
            ({"every": 60, "misfire": True}, 'write misfire="once"'),
            ({"every": 60, "workflow_id": "report"}, r'workflow_id="report-\{time\}"'),
            ({"every": 60, "workflow_id": ""}, "must not be empty"),
            ({"every": 60, "workflow_id": 7}, "must be text"),
        ],
    )
    def test_what_is_wrong_is_refused_with_what_to_write(self, options: dict[str, Any], match: str) -> None:
        defaults = {
            "cron": None,
            "every": None,
            "timezone": "UTC",
            "overlap": "skip",
            "misfire": "once",
            "workflow_id": None,
        }
        with pytest.raises(InvalidArgumentError, match=match):
            define("report", START_MS, **(defaults | options))
