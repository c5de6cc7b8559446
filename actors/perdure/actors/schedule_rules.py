"""What a schedule does next: decided here, on plain data, without I/O.

1. An occurrence is decided once: the batch that puts its run (or none) also moves the cursor past it.
2. Of several occurrences that are due together, all but the latest were missed; the latest was, when it is more than
   `TOLERANCE_S` late. `misfire` says what becomes of the missed: `once` runs the latest occurrence, however late, and no
   other; `skip` runs the latest unless it was missed; `all` runs each in its order, the latest `CATCH_UP_MAX` at most.
3. A run counts as active from its decision until it has ended. While one is, `skip` drops an occurrence and `queue` keeps it,
   `QUEUE_MAX` at most; what is over that is dropped. Queued runs are started one at a time, the earliest first.
4. A paused schedule starts nothing, and what occurs meanwhile is dropped when it is resumed.
"""

from __future__ import annotations

from typing import Final

from perdure.actors.recurrence import moment_text
from perdure.actors.schedule_record import Change, Cursor, Definition, Run, RunStatus, Standing

__all__ = ["CATCH_UP_MAX", "QUEUE_MAX", "TOLERANCE_S", "advance", "ended", "pause", "redefine", "resume", "started"]

TOLERANCE_S: Final = 60.0
"""How late, in seconds, an occurrence may be found and still count as on time."""

CATCH_UP_MAX: Final = 1_000
"""How many missed occurrences `misfire="all"` runs at most: the latest ones."""

QUEUE_MAX: Final = 1_000
"""How many occurrences `overlap="queue"` keeps waiting at most: the earliest ones."""


def advance(standing: Standing, now_ms: int) -> Change:
    """Decide on all that has become due by now."""
    definition, cursor = standing.definition, standing.cursor
    recurrence = definition.recurrence
    if cursor.is_paused or recurrence is None or cursor.next_ms is None or cursor.next_ms > now_ms:
        return Change()
    count = CATCH_UP_MAX if definition.misfire == "all" else 1
    chosen = recurrence.latest(cursor.next_ms, now_ms, count)
    if definition.misfire == "skip" and now_ms - chosen[-1] > TOLERANCE_S * 1000:
        chosen = []
    puts: dict[int, Run] = {}
    last_ms = cursor.last_ms
    for occurrence_ms in chosen:
        status = _admit(definition, standing.runs | puts)
        if status is not None:
            puts[occurrence_ms] = Run(status, run_id(definition.id_template, standing.name, occurrence_ms))
            last_ms = occurrence_ms
    return Change(Cursor(recurrence.next_after(now_ms), last_ms), puts, dropped=len(chosen) - len(puts))


def _admit(definition: Definition, runs: dict[int, Run]) -> RunStatus | None:
    """What an occurrence becomes, `None` for nothing."""
    if definition.overlap == "allow" or not runs:
        return RunStatus.STARTING
    if definition.overlap == "skip":
        return None
    queued = sum(run.status is RunStatus.QUEUED for run in runs.values())
    return RunStatus.QUEUED if queued < QUEUE_MAX else None


def run_id(template: str, name: str, occurrence_ms: int) -> str:
    """The id of the run for an occurrence: always the same one."""
    return template.replace("{time}", moment_text(occurrence_ms)).replace("{name}", name)


def started(standing: Standing, occurrence_ms: int) -> Change:
    """Note that a run was started."""
    run = standing.runs.get(occurrence_ms)
    if run is None or run.status is not RunStatus.STARTING:
        return Change()
    return Change(puts={occurrence_ms: Run(RunStatus.ACTIVE, run.workflow_id)})


def ended(standing: Standing, *occurrences_ms: int) -> Change:
    """Note that runs have ended, and start what waited for that."""
    removes = tuple(occurrence_ms for occurrence_ms in occurrences_ms if occurrence_ms in standing.runs)
    if not removes:
        return Change()
    runs = {key: run for key, run in standing.runs.items() if key not in removes}
    is_paused = standing.cursor.is_paused
    return Change(puts=_promoted(standing.definition, runs, is_paused=is_paused), removes=removes)


def _promoted(definition: Definition, runs: dict[int, Run], *, is_paused: bool) -> dict[int, Run]:
    """The queued runs that are to be started now."""
    queued = [key for key, run in runs.items() if run.status is RunStatus.QUEUED]
    if is_paused or not queued:
        return {}
    if definition.overlap != "allow":
        queued = queued[:1] if len(queued) == len(runs) else []
    return {key: Run(RunStatus.STARTING, runs[key].workflow_id) for key in queued}


def pause(standing: Standing) -> Change:
    """Start nothing until it is resumed."""
    cursor = standing.cursor
    return Change() if cursor.is_paused else Change(Cursor(cursor.next_ms, cursor.last_ms, is_paused=True))


def resume(standing: Standing, now_ms: int) -> Change:
    """Go on with what is queued, and with the first occurrence after now."""
    cursor = standing.cursor
    if not cursor.is_paused:
        return Change()
    next_ms = _next(standing.definition, cursor.last_ms, now_ms)
    puts = _promoted(standing.definition, standing.runs, is_paused=False)
    return Change(Cursor(next_ms, cursor.last_ms), puts)


def redefine(standing: Standing, definition: Definition, now_ms: int) -> Change:
    """Do something else from now on, keeping what has occurred; runs that wait are started as the new definition says."""
    cursor = standing.cursor
    next_ms = cursor.next_ms
    if not definition.recurs_as(standing.definition):
        next_ms = _next(definition, cursor.last_ms, now_ms)
    puts = _promoted(definition, standing.runs, is_paused=cursor.is_paused)
    return Change(Cursor(next_ms, cursor.last_ms, cursor.is_paused), puts)


def _next(definition: Definition, last_ms: int | None, now_ms: int) -> int | None:
    # A clock that was set back shows a time that was lived through already.
    recurrence = definition.recurrence
    return None if recurrence is None else recurrence.next_after(max(now_ms, last_ms or 0))
