"""What users say of schedules and see of them: arguments checked, a handle, and what is known.

1. Everything wrong is refused before anything is written, with what to write instead.
2. A handle holds nothing but a name: it may be kept, and made again with `supervisor.get_schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, TypedDict, TypeVar
from zoneinfo import ZoneInfo

from perdure.actors import schedule_rules as rules
from perdure.actors.recurrence import Cron, Every, make_cron, make_every
from perdure.actors.schedule_record import (
    MISFIRES,
    OVERLAPS,
    Definition,
    Misfire,
    Overlap,
    RunStatus,
    Standing,
    make_definition,
)
from perdure.actors.schedules import Schedules
from perdure.workflow import Clock, InvalidArgumentError
from perdure.workflow.checks import check_workflow_id

__all__ = ["ScheduleHandle", "ScheduleInfo", "ScheduleOptions", "define", "describe"]

_ID_DEFAULT: Final = "{name}@{time}"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

ChoiceT = TypeVar("ChoiceT", bound=str)


class ScheduleOptions(TypedDict, total=False):
    """The keyword arguments of `Supervisor.schedule`."""

    cron: str
    every: float
    timezone: str | ZoneInfo
    overlap: Overlap
    misfire: Misfire
    workflow_id: str


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A schedule as it is.

    Attributes:
        name: Its name.
        workflow: The registered name of what it runs.
        spec: When it is due: the cron expression and its time zone, or `every 60 s`.
        next_at: Its next occurrence, in its time zone; `None` when there is none within 50 years.
        last_at: The last occurrence for which a run was started or queued, or `None`.
        is_paused: Whether it is paused.
        active: The ids of its runs that have not ended, the earliest first.
        queued: How many occurrences wait for an earlier run to end.
        problem: Why it stands still (its workflow is not registered here, for example), or `None`.
    """

    name: str
    workflow: str
    spec: str
    next_at: datetime | None
    last_at: datetime | None
    is_paused: bool
    active: tuple[str, ...]
    queued: int
    problem: str | None


class ScheduleHandle:
    """A schedule of a supervisor."""

    __slots__ = ("_clock", "_name", "_schedules")

    def __init__(self, schedules: Schedules, clock: Clock, name: str) -> None:
        self._schedules = schedules
        self._clock = clock
        self._name = name

    def __repr__(self) -> str:
        return f"<schedule {self._name!r}>"

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self._name

    async def info(self) -> ScheduleInfo:
        """What is known of it.

        Raises:
            ScheduleNotFoundError: It was removed.
        """
        return describe(await self._schedules.standing(self._name))

    async def pause(self) -> None:
        """Start nothing from now on, what is queued included; durable on return. Runs that began go on.

        Raises:
            ScheduleNotFoundError: It was removed.
        """
        await self._schedules.change(self._name, rules.pause)

    async def resume(self) -> None:
        """Go on with what is queued and with the next occurrence; durable on return. What occurred meanwhile is left out.

        Raises:
            ScheduleNotFoundError: It was removed.
        """
        await self._schedules.change(self._name, lambda standing: rules.resume(standing, self._clock.now_ms()))


def describe(standing: Standing) -> ScheduleInfo:
    """What users see of a schedule."""
    recurrence = standing.definition.recurrence
    zone = recurrence.zone if isinstance(recurrence, Cron) else UTC
    cursor = standing.cursor
    return ScheduleInfo(
        name=standing.name,
        workflow=standing.definition.workflow,
        spec=standing.definition.spec,
        next_at=_datetime(cursor.next_ms, zone),
        last_at=_datetime(cursor.last_ms, zone),
        is_paused=cursor.is_paused,
        active=tuple(run.workflow_id for run in standing.runs.values() if run.status is not RunStatus.QUEUED),
        queued=sum(run.status is RunStatus.QUEUED for run in standing.runs.values()),
        problem=standing.problem,
    )


def _datetime(moment_ms: int | None, zone: tzinfo) -> datetime | None:
    if moment_ms is None:
        return None
    try:
        return (_EPOCH + timedelta(milliseconds=moment_ms)).astimezone(zone)
    except OverflowError:  # after the year 9999
        return None


def define(
    workflow: str,
    now_ms: int,
    *,
    cron: object,
    every: object,
    timezone: object,
    overlap: object,
    misfire: object,
    workflow_id: object,
) -> Definition:
    """A checked definition.

    Raises:
        InvalidArgumentError: An argument is wrong; nothing was written.
        MissingExtraError: A cron expression needs a package that is not installed.
    """
    recurrence: Cron | Every
    if (cron is None) == (every is None):
        raise InvalidArgumentError(
            'a schedule has either cron= or every=; write for example cron="0 9 * * 1-5", or every=3600.0'
        )
    if cron is not None:
        recurrence = make_cron(cron, timezone)
    else:
        if timezone != "UTC":
            raise InvalidArgumentError("every= counts elapsed time, which has no time zone; leave out timezone=")
        recurrence = make_every(every, now_ms)
    return make_definition(
        workflow,
        recurrence,
        _choice(overlap, OVERLAPS, "overlap"),
        _choice(misfire, MISFIRES, "misfire"),
        _check_template(workflow_id),
    )


def _choice(given: Any, choices: tuple[ChoiceT, ...], what: str) -> ChoiceT:
    for choice in choices:
        if given == choice:
            return choice
    known = ", ".join(f'"{choice}"' for choice in choices)
    raise InvalidArgumentError(f'{what} must be one of {known}, not {given!r}; write {what}="{choices[0]}"')


def _check_template(workflow_id: object) -> str:
    if workflow_id is None:
        return _ID_DEFAULT
    template = check_workflow_id(workflow_id)
    if "{time}" not in template:
        raise InvalidArgumentError(
            f"workflow_id={template[:80]!r} would give all runs one id; put the occurrence's time into it, as in "
            'workflow_id="report-{time}"'
        )
    return template
