"""When a schedule is due: plain functions of its expression, its time zone and a moment.

1. A moment is milliseconds since the epoch, so every occurrence is one moment and has one name, whatever the zone does.
2. An expression whose hour field takes every hour goes by elapsed time: it runs through both of two equal hours in
   autumn, and what falls into the hour that is missing in spring does not exist, since no time passes in it.
3. Every other expression names times of the day, and each of them occurs once: one that is missing at the moment at
   which the clock is set forward, one that comes twice at the first of the two. Several that are missing together
   occur together, once.
4. Occurrences ascend strictly: what comes after one of them is later than it.

The cron library is asked about wall-clock time only, and the zone's rules are applied here. Rejected: its own handling of
zones (cronsim's leaves out half an hour of Lord Howe Island's autumn day; croniter's runs `30 2 * * *` twice in Berlin's).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final, Protocol
from zoneinfo import ZoneInfo

from perdure.actors.errors import MissingExtraError
from perdure.workflow import InvalidArgumentError
from perdure.workflow.checks import check_duration, ms_ceil

__all__ = ["PERIOD_MIN_S", "Cron", "Every", "Recurrence", "check_zone", "make_cron", "make_every", "moment_text"]

PERIOD_MIN_S: Final = 0.1
"""The shortest period, in seconds."""

_CRON_CHARACTERS_MAX: Final = 512
_HOURS: Final = frozenset(range(24))
_DAY_MS: Final = 24 * 60 * 60 * 1000
_EXAMPLE: Final = 'cron="0 9 * * 1-5" (minute, hour, day of month, month, day of week: at 9:00 from Monday to Friday)'
_EPOCH: Final = datetime(1970, 1, 1)
_MS: Final = timedelta(milliseconds=1)
_SECOND: Final = timedelta(seconds=1)


class Recurrence(Protocol):
    """When something is due."""

    def next_after(self, moment_ms: int) -> int | None:
        """The first occurrence later than this, or `None` if there is none within 50 years."""
        ...

    def latest(self, first_ms: int, until_ms: int, count: int) -> list[int]:
        """The latest occurrences from `first_ms` to `until_ms` (both included), at most `count` (1 or more), ascending."""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """One period after the other, in elapsed time, from an anchor that is no occurrence itself.

    Attributes:
        period_ms: Length of a period, at least 100.
        anchor_ms: Where the first one begins.
    """

    period_ms: int
    anchor_ms: int

    def next_after(self, moment_ms: int) -> int | None:
        """See `Recurrence`; there always is one."""
        return self.anchor_ms + self.period_ms * max(1, (moment_ms - self.anchor_ms) // self.period_ms + 1)

    def latest(self, first_ms: int, until_ms: int, count: int) -> list[int]:
        """See `Recurrence`."""
        last = (until_ms - self.anchor_ms) // self.period_ms
        first = max(1, -((self.anchor_ms - first_ms) // self.period_ms), last - count + 1)
        return [self.anchor_ms + self.period_ms * number for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone; made by `make_cron`, which checks it.

    Attributes:
        text: Its five fields, with single spaces.
        zone_name: The zone's name, as in `Europe/Berlin`.
        zone: The zone.
        is_elapsed: Whether it goes by elapsed time, as its hour field takes every hour.
    """

    text: str
    zone_name: str
    zone: tzinfo = field(compare=False, repr=False)
    is_elapsed: bool = field(compare=False, repr=False)

    def next_after(self, moment_ms: int) -> int | None:
        """See `Recurrence`."""
        return self._next_elapsed(moment_ms) if self.is_elapsed else self._next_named(moment_ms)

    def latest(self, first_ms: int, until_ms: int, count: int) -> list[int]:
        """See `Recurrence`. What it costs is in what it finds, not in the time that it looks back."""
        last_ms = self._last(first_ms, until_ms)
        if last_ms is None or count == 1:
            return [] if last_ms is None else [last_ms]
        window_ms = 60_000
        while True:
            start_ms = max(first_ms, last_ms - window_ms)
            found: deque[int] = deque(maxlen=count)
            occurrence_ms = self._first(start_ms, last_ms)
            while occurrence_ms is not None:
                found.append(occurrence_ms)
                occurrence_ms = self._first(occurrence_ms + 1, last_ms)
            if len(found) == count or start_ms == first_ms:
                return list(found)
            window_ms *= 2

    def _last(self, first_ms: int, until_ms: int) -> int | None:
        """The last occurrence from `first_ms` to `until_ms`: found in windows that double, then by halving."""
        window_ms = 60_000
        while True:
            start_ms = max(first_ms, until_ms - window_ms)
            last_ms = self._first(start_ms, until_ms)
            if last_ms is not None:
                break
            if start_ms <= first_ms:
                return None
            window_ms *= 2
        high_ms = until_ms
        while last_ms < high_ms:
            middle_ms = (last_ms + high_ms + 1) // 2
            later_ms = self._first(middle_ms, high_ms)
            if later_ms is None:
                high_ms = middle_ms - 1
            else:
                last_ms = later_ms
        return last_ms

    def _first(self, first_ms: int, until_ms: int) -> int | None:
        found = self.next_after(first_ms - 1)
        return found if found is not None and found <= until_ms else None

    def _next_named(self, moment_ms: int) -> int | None:
        for wall in _walls(self.text, self._wall(moment_ms, self._offset_ms(moment_ms))):
            occurrence_ms = self._moment(wall)
            if occurrence_ms > moment_ms:
                return occurrence_ms
        return None

    def _next_elapsed(self, moment_ms: int) -> int | None:
        from_ms = moment_ms
        offset_ms = self._offset_ms(from_ms)
        wall = self._wall(from_ms, offset_ms)
        while True:
            found = next(_walls(self.text, wall), None)
            if found is None:
                return None
            occurrence_ms = (found - _EPOCH) // _MS - offset_ms
            change_ms = self._change(from_ms, occurrence_ms)
            if change_ms is None:
                return occurrence_ms
            # The clock is set before that: look on from the moment at which it is, that moment included.
            from_ms = change_ms
            offset_ms = self._offset_ms(from_ms)
            wall = self._wall(from_ms, offset_ms) - _SECOND

    def _moment(self, wall: datetime) -> int:
        """When a wall-clock time occurs."""
        first_ms, second_ms = (
            (wall - _EPOCH) // _MS - _milliseconds(wall.replace(tzinfo=self.zone, fold=fold)) for fold in (0, 1)
        )
        if second_ms >= first_ms:  # once, or twice: the first time
            return first_ms
        # Never: by the offset before the change it lies after the change, and the other way round.
        change_ms = self._change(second_ms - 1, first_ms)
        return first_ms if change_ms is None else change_ms

    def _change(self, from_ms: int, until_ms: int) -> int | None:
        """The first moment with another offset, later than `from_ms` and at most `until_ms`.

        Looks once a day: no zone sets its clock twice within one.
        """
        offset_ms = self._offset_ms(from_ms)
        low = from_ms
        while low < until_ms:
            high = min(low + _DAY_MS, until_ms)
            if self._offset_ms(high) != offset_ms:
                while high - low > 1:
                    middle = (low + high) // 2
                    if self._offset_ms(middle) == offset_ms:
                        low = middle
                    else:
                        high = middle
                return high
            low = high
        return None

    def _offset_ms(self, moment_ms: int) -> int:
        return _milliseconds((_EPOCH + moment_ms * _MS).replace(tzinfo=UTC).astimezone(self.zone))

    def _wall(self, moment_ms: int, offset_ms: int) -> datetime:
        return (_EPOCH + (moment_ms + offset_ms) * _MS).replace(microsecond=0)


def _milliseconds(moment: datetime) -> int:
    offset = moment.utcoffset()
    assert offset is not None, "it has a zone"
    return offset // _MS


def _walls(text: str, after: datetime) -> Iterator[datetime]:
    """The wall-clock times later than this one that an expression takes, in a world without zones."""
    cron_sim, _ = _library()
    try:
        yield from cron_sim(text, after)
    except OverflowError:  # the end of the calendar
        return


@lru_cache(maxsize=1)
def _library() -> tuple[type[_CronSim], type[Exception]]:
    """The cron library, imported on first use."""
    try:
        from cronsim import CronSim, CronSimError
    except ImportError as error:
        raise MissingExtraError(
            'cron expressions need the package cronsim; install it with `pip install "perdure[schedules]"`, or use every=',
            extra="schedules",
        ) from error
    return CronSim, CronSimError


class _CronSim(Protocol):
    """What is used of the library's class."""

    hours: set[int]

    def __init__(self, expr: str, dt: datetime) -> None: ...

    def __iter__(self) -> Iterator[datetime]: ...


def make_cron(text: object, zone: object) -> Cron:
    """A checked expression.

    Args:
        text: Five fields: minute, hour, day of month, month, day of week.
        zone: The name of a time zone, or a `ZoneInfo`.

    Raises:
        InvalidArgumentError: Either is wrong, or no time matches within 50 years.
        MissingExtraError: The cron library is not installed.
    """
    if not isinstance(text, str):
        raise InvalidArgumentError(f"cron= takes text, not {type(text).__name__}; write for example {_EXAMPLE}")
    zone_name, zone_info = check_zone(zone)
    fields = text.split()
    if len(fields) != 5 or len(text) > _CRON_CHARACTERS_MAX:
        hint = "; for seconds there is every=" if len(fields) == 6 else ""
        raise InvalidArgumentError(
            f"a cron expression has five fields, and {text[:80]!r} has {len(fields)}{hint}; write for example {_EXAMPLE}"
        )
    cron_sim, cron_sim_error = _library()
    normal = " ".join(fields)
    try:
        parsed = cron_sim(normal, _EPOCH)
    except (cron_sim_error, ValueError, TypeError, AssertionError) as error:
        raise InvalidArgumentError(
            f"{text[:80]!r} is no cron expression ({error}); write for example {_EXAMPLE}"
        ) from None
    cron = Cron(normal, zone_name, zone_info, is_elapsed=parsed.hours >= _HOURS)
    if cron.next_after(0) is None:
        raise InvalidArgumentError(
            f"no time matches {text[:80]!r}, such a day does not come; write for example {_EXAMPLE}"
        )
    return cron


def make_every(seconds: object, anchor_ms: int) -> Every:
    """Checked periods that begin at an anchor.

    Raises:
        InvalidArgumentError: It is no number of seconds, or too few.
    """
    checked = check_duration(seconds, "every", "every=60.0")
    if checked < PERIOD_MIN_S:
        raise InvalidArgumentError(
            f"every must be {PERIOD_MIN_S} seconds or more, not {seconds!r}; for what never pauses write a workflow with ctx.loop"
        )
    return Every(ms_ceil(checked), anchor_ms)


def check_zone(zone: object) -> tuple[str, tzinfo]:
    """A time zone and its name.

    Raises:
        InvalidArgumentError: There is none of this name, or it has none.
    """
    example = 'timezone="Europe/Berlin" or timezone=ZoneInfo("Europe/Berlin")'
    if zone == "UTC" or zone is UTC:
        return "UTC", UTC  # which needs no data of zones
    if isinstance(zone, ZoneInfo):
        if not zone.key:
            raise InvalidArgumentError(f"a ZoneInfo without a key cannot be found again; write for example {example}")
        return zone.key, zone
    if not isinstance(zone, str):
        raise InvalidArgumentError(f"timezone= takes a zone's name, not {zone!r}; write for example {example}")
    try:
        return zone, ZoneInfo(zone)
    except (OSError, ValueError) as error:  # ZoneInfoNotFoundError is a KeyError
        raise InvalidArgumentError(f"{zone[:80]!r} is no time zone; write for example {example}") from error
    except KeyError as error:
        raise InvalidArgumentError(
            f"no time zone {zone[:80]!r} is known here; write for example {example}, or install the package tzdata if the "
            "system has no data of time zones"
        ) from error


def moment_text(moment_ms: int) -> str:
    """A moment as text, in UTC: `2026-11-29T08:00:00Z`, with milliseconds if there are any."""
    seconds, rest_ms = divmod(moment_ms, 1000)
    text = (_EPOCH + seconds * _SECOND).isoformat()
    return f"{text}.{rest_ms:03}Z" if rest_ms else f"{text}Z"
