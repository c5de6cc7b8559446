"""What is kept of a schedule, and its stored form.

1. What does not change from one occurrence to the next (`Definition`, and the input, which may be large) is apart from what
   does (`Cursor`, `Run`), so that an occurrence writes a few bytes.
2. A run is kept from the moment at which its occurrence is decided until it has ended; what is kept says which runs are
   to be started, so a decision that is durable is carried out, whatever happens to the process.
3. Everything is a CBOR map of plain data. Names of its members and of states are stored on disk; never change or reuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Literal, cast

from perdure.actors.recurrence import Cron, Every, Recurrence, make_cron
from perdure.storage import Batch, DecodeError, decode_value, encode_value
from perdure.storage.own_layout import (
    schedule_cursor_key,
    schedule_definition_key,
    schedule_input_key,
    schedule_run_key,
    schedule_runs_prefix,
)

__all__ = [
    "MISFIRES",
    "OVERLAPS",
    "Change",
    "Cursor",
    "Definition",
    "Misfire",
    "Overlap",
    "Run",
    "RunStatus",
    "Standing",
    "decode_cursor",
    "decode_definition",
    "decode_run",
    "make_definition",
    "put_change",
    "put_definition",
    "put_removal",
]

Overlap = Literal["skip", "queue", "allow"]
"""What becomes of an occurrence while an earlier run has not ended."""

Misfire = Literal["once", "skip", "all"]
"""What becomes of occurrences that were missed."""

OVERLAPS: Final[tuple[Overlap, ...]] = ("skip", "queue", "allow")
"""All of them, the usual one first."""

MISFIRES: Final[tuple[Misfire, ...]] = ("once", "skip", "all")
"""All of them, the usual one first."""


class RunStatus(StrEnum):
    """How far a run is."""

    QUEUED = "queued"
    STARTING = "starting"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Definition:
    """What a schedule was asked to do.

    Attributes:
        workflow: The registered name of what it runs.
        recurrence: When; `None` if that cannot be known here, as the cron library or the zone is missing.
        overlap: What becomes of an occurrence while an earlier run has not ended.
        misfire: What becomes of occurrences that were missed.
        id_template: What the ids of its runs look like.
        stored: Its stored form.
    """

    workflow: str
    recurrence: Recurrence | None
    overlap: Overlap
    misfire: Misfire
    id_template: str
    stored: dict[str, Any] = field(compare=False, repr=False)

    @property
    def spec(self) -> str:
        """When it is due, as text."""
        stored = self.stored
        return (
            f"every {stored['every_ms'] / 1000:g} s"
            if "every_ms" in stored
            else f"{stored['cron']} {stored['timezone']}"
        )

    def is_same(self, other: Definition) -> bool:
        """Whether both ask for the same; the anchor of periods does not count."""
        return _but_anchor(self.stored) == _but_anchor(other.stored)

    def recurs_as(self, other: Definition) -> bool:
        """Whether both are due at the same times, but for the anchor of periods."""
        return all(self.stored.get(key) == other.stored.get(key) for key in ("cron", "timezone", "every_ms"))

    def going_on_from(self, other: Definition) -> Definition:
        """The same, with its periods counted on from those of the other, if they are equally long."""
        if "every_ms" not in self.stored or not self.recurs_as(other):
            return self
        stored = self.stored | {"anchor_ms": other.stored["anchor_ms"]}
        return replace(self, recurrence=other.recurrence, stored=stored)


def _but_anchor(stored: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in stored.items() if key != "anchor_ms"}


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a schedule has got.

    Attributes:
        next_ms: Its next occurrence, or `None` when there is none any more.
        last_ms: The last one for which a run was started or queued.
        is_paused: Whether it is paused.
    """

    next_ms: int | None
    last_ms: int | None = None
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has not ended."""

    status: RunStatus
    workflow_id: str


@dataclass(slots=True)
class Standing:
    """A schedule as it is.

    Attributes:
        name: Its name.
        definition: What it was asked to do.
        cursor: How far it has got.
        runs: Its runs that have not ended, by occurrence, ascending.
        problem: Why nothing is started, or `None`.
    """

    name: str
    definition: Definition
    cursor: Cursor
    runs: dict[int, Run] = field(default_factory=dict[int, Run])
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What one transition changes of a schedule.

    Attributes:
        cursor: The new cursor, or `None` to leave it.
        puts: Runs that are new or have another status, by occurrence.
        removes: Occurrences whose runs have ended.
        dropped: How many occurrences are left out as an earlier run has not ended; to be told, not stored.
    """

    cursor: Cursor | None = None
    puts: dict[int, Run] = field(default_factory=dict[int, Run])
    removes: tuple[int, ...] = ()
    dropped: int = 0

    def __bool__(self) -> bool:
        """Whether anything changes."""
        return self.cursor is not None or bool(self.puts) or bool(self.removes)

    def apply(self, standing: Standing) -> None:
        """Make the change, once it is durable."""
        if self.cursor is not None:
            standing.cursor = self.cursor
        for occurrence_ms in self.removes:
            standing.runs.pop(occurrence_ms, None)
        latest_ms = max(standing.runs, default=None) if self.puts else None
        standing.runs |= self.puts
        if latest_ms is not None and any(occurrence_ms < latest_ms for occurrence_ms in self.puts):
            standing.runs = dict(sorted(standing.runs.items()))


def put_definition(batch: Batch, name: str, definition: Definition, input_data: bytes) -> None:
    """Add a new or another definition to a batch."""
    batch.puts.append((schedule_definition_key(name), encode_value(definition.stored)))
    batch.puts.append((schedule_input_key(name), input_data))


def put_change(batch: Batch, name: str, change: Change) -> None:
    """Add a change to a batch."""
    batch.deletes += [schedule_run_key(name, occurrence_ms) for occurrence_ms in change.removes]
    for occurrence_ms, run in change.puts.items():
        value = encode_value({"status": run.status.value, "workflow_id": run.workflow_id})
        batch.puts.append((schedule_run_key(name, occurrence_ms), value))
    if (cursor := change.cursor) is not None:
        stored = {"next_ms": cursor.next_ms, "last_ms": cursor.last_ms, "is_paused": cursor.is_paused}
        batch.puts.append((schedule_cursor_key(name), encode_value(stored)))


def put_removal(batch: Batch, name: str) -> None:
    """Add the removal of a schedule to a batch."""
    batch.deletes += [schedule_definition_key(name), schedule_input_key(name), schedule_cursor_key(name)]
    batch.delete_prefixes.append(schedule_runs_prefix(name))


_MOMENT_MIN_MS: Final = -2_208_988_800_000
"""The year 1900: what is before is no time of a schedule, and is soon no date."""


def decode_definition(data: bytes) -> tuple[Definition, Exception | None]:
    """A definition, and why its times cannot be known here if they cannot.

    Raises:
        DecodeError: The bytes are no definition.
    """
    stored = _map(data)
    problem: Exception | None = None
    recurrence: Recurrence | None = None
    if "every_ms" in stored:
        recurrence = Every(_whole(stored, "every_ms", least=1), _moment(stored, "anchor_ms"))
    else:
        try:
            recurrence = make_cron(_text(stored, "cron"), _text(stored, "timezone"))
        except DecodeError:
            raise
        except Exception as error:  # another machine knows other zones, or has no cron library
            problem = error
    overlap, misfire = _text(stored, "overlap"), _text(stored, "misfire")
    if overlap not in OVERLAPS or misfire not in MISFIRES:
        raise DecodeError(
            f"a schedule's definition says overlap {overlap!r} and misfire {misfire!r}, which are unknown here"
        )
    definition = Definition(
        _text(stored, "workflow"),
        recurrence,
        overlap,
        misfire,
        _text(stored, "workflow_id"),
        stored,
    )
    return definition, problem


def make_definition(
    workflow: str, recurrence: Cron | Every, overlap: Overlap, misfire: Misfire, id_template: str
) -> Definition:
    """A new definition."""
    if isinstance(recurrence, Every):
        when: dict[str, Any] = {"every_ms": recurrence.period_ms, "anchor_ms": recurrence.anchor_ms}
    else:
        when = {"cron": recurrence.text, "timezone": recurrence.zone_name}
    stored = {"workflow": workflow, **when, "overlap": overlap, "misfire": misfire, "workflow_id": id_template}
    return Definition(workflow, recurrence, overlap, misfire, id_template, stored)


def decode_cursor(data: bytes) -> Cursor:
    """A cursor from its stored form.

    Raises:
        DecodeError: The bytes are no cursor.
    """
    stored = _map(data)
    next_ms, last_ms = (None if stored.get(key) is None else _moment(stored, key) for key in ("next_ms", "last_ms"))
    return Cursor(next_ms, last_ms, stored.get("is_paused") is True)


def decode_run(data: bytes) -> Run:
    """A run from its stored form.

    Raises:
        DecodeError: The bytes are no run.
    """
    stored = _map(data)
    try:
        return Run(RunStatus(_text(stored, "status")), _text(stored, "workflow_id"))
    except ValueError:
        raise DecodeError(f"a schedule's run has the status {stored['status']!r}, which is unknown here") from None


def _map(data: bytes) -> dict[str, Any]:
    stored = decode_value(data)
    if not isinstance(stored, dict):
        raise DecodeError(f"a map belongs where a schedule has {type(stored).__name__}")
    return cast("dict[str, Any]", stored)


def _text(stored: dict[str, Any], key: str) -> str:
    value = stored.get(key)
    if not isinstance(value, str):
        raise DecodeError(f"a schedule has {value!r} where text belongs, as its {key}")
    return value


def _moment(stored: dict[str, Any], key: str) -> int:
    """A time in milliseconds since the epoch. It may be after the year 9999, as that of a period of a million years."""
    return _whole(stored, key, least=_MOMENT_MIN_MS)


def _whole(stored: dict[str, Any], key: str, *, least: int) -> int:
    value = stored.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DecodeError(f"a schedule has {value!r} where a whole number belongs, as its {key}")
    return value
