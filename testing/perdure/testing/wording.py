"""What a write holds, in words: entries by name, results, messages; no keys and no bytes.

1. Writes are read in the order in which they were made: names and entries are known from the writes before.
2. A write that was not made (the process died before it) is read the same, and then forgotten.
3. What cannot be read, as a codec wrapped it or a value is damaged, is shown as such: a story is told in any case.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

from perdure.storage import Batch, DecodeError, decode_value, layout
from perdure.storage.schema import (
    Branch,
    BranchStatus,
    Entry,
    EntryMetadata,
    EntryStatus,
    JoinEntry,
    Location,
    LoopEntry,
    LoopIteration,
    MessageEntry,
    RaceEntry,
    RemovedEntry,
    RollbackCheckpointEntry,
    SleepEntry,
    SleepState,
    StepEntry,
    VersionCheckEntry,
    decode_entry,
    decode_message,
    decode_metadata,
)
from perdure.testing.faults import WritePoint
from perdure.testing.outline import shown, shown_path

__all__ = ["Wording"]

_UNREADABLE: Final = "(what cannot be read here)"
_SILENT_STATES: Final = ("running", "sleeping")
_OTHERS: Final = {
    "rows": "the catalog's note on {}",
    "create": "a place for {} is made",
    "delete": "{} is removed",
    "own": "a note of the supervisor's",
    "batch": "bookkeeping of {}",
}


@dataclass
class _Known:
    """What earlier writes said of one workflow."""

    names: dict[int, str] = field(default_factory=dict[int, str])
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])


class Wording:
    """Puts the writes of a run into words, one after the other.

    Args:
        tells_workflow: Whether to say whose each is, as there are several.
    """

    def __init__(self, *, tells_workflow: bool) -> None:
        self._tells_workflow = tells_workflow
        self._known: dict[str, _Known] = {}

    def of(self, point: WritePoint) -> list[str]:
        """What it says that a user knows of; nothing if it is bookkeeping."""
        if point.batch is None or point.kind != "batch":
            return []
        known = self._known.setdefault(point.workflow_id, _Known())
        phrases = list(_phrases(point.workflow_id, point.batch, known))
        if self._tells_workflow:
            return [f"{phrase} [{point.workflow_id}]" for phrase in phrases]
        return phrases

    def unmade(self, point: WritePoint) -> str:
        """What it would have said."""
        known = self._known.get(point.workflow_id)
        self._known[point.workflow_id] = copy.deepcopy(known) if known is not None else _Known()
        try:
            return self.named(point)
        finally:
            if known is None:
                del self._known[point.workflow_id]
            else:
                self._known[point.workflow_id] = known

    def named(self, point: WritePoint) -> str:
        """What it says, bookkeeping included."""
        whose = f"workflow {point.workflow_id!r}" if point.workflow_id else "several workflows"
        return "; ".join(self.of(point)) or _OTHERS[point.kind].format(whose)


def _phrases(workflow_id: str, batch: Batch, known: _Known) -> Iterator[str]:
    try:
        puts = dict(batch.puts)
        for key, value in puts.items():
            if key.startswith(layout.NAMES_PREFIX):
                known.names[layout.parse_name_key(key)] = value.decode(errors="replace")
        if layout.INPUT_KEY in puts:
            yield f"workflow {workflow_id!r} is made, with input {_value(puts[layout.INPUT_KEY])}"
        yield from _arrivals(puts)
        metadata = {
            layout.parse_metadata_key(key): decode_metadata(value)
            for key, value in puts.items()
            if key.startswith(layout.METADATA_PREFIX)
        }
        written = [decode_entry(value) for key, value in puts.items() if key.startswith(layout.HISTORY_PREFIX)]
        known.entries.update((entry.id, entry) for entry in written)
        for entry in sorted(written, key=lambda entry: entry.id):
            yield from _entry(_path(entry.location, known), entry, metadata.get(entry.id))
        yield from _undone(metadata, {entry.id for entry in written}, known)
        yield from _end(workflow_id, puts)
    except (DecodeError, ValueError, KeyError):
        yield _UNREADABLE


def _arrivals(puts: dict[bytes, bytes]) -> Iterator[str]:
    for key, value in puts.items():
        if key.startswith(layout.MAILBOX_PREFIX):
            message = decode_message(value)
            yield f"message {message.name!r} arrives: {_value(message.body)}"


def _undone(metadata: dict[str, EntryMetadata], written: set[str], known: _Known) -> Iterator[str]:
    for entry_id, each in metadata.items():
        entry = known.entries.get(entry_id)
        if entry is None or entry_id in written:
            continue
        name = shown_path(_path(entry.location, known))
        if each.rollback_completed_at_ms is not None:
            yield f"step {name!r} is undone"
        elif each.rollback_error is not None:
            yield f"undoing step {name!r} fails: {each.rollback_error}"


def _end(workflow_id: str, puts: dict[bytes, bytes]) -> Iterator[str]:
    state = puts.get(layout.STATE_KEY, b"").decode(errors="replace")
    if not state or state in _SILENT_STATES or layout.INPUT_KEY in puts:
        return
    reason = ""
    if layout.ERROR_KEY in puts:
        error = cast("dict[str, Any]", _decoded(puts[layout.ERROR_KEY]))
        reason = f": {error.get('name')}: {error.get('message')}"
    if state == "rolling_back":
        yield f"workflow {workflow_id!r} begins to roll back{reason}"
    else:
        output = puts.get(layout.OUTPUT_KEY)
        yield f"workflow {workflow_id!r} ends as {state}{reason}{'' if output is None else f': {_value(output)}'}"


def _entry(path: tuple[str | int, ...], entry: Entry, metadata: EntryMetadata | None) -> Iterator[str]:
    name, kind = repr(shown_path(path)), entry.kind
    match kind:
        case StepEntry():
            yield _step(name, kind, metadata)
        case LoopEntry():
            if kind.output is not None or (metadata is not None and metadata.status is EntryStatus.COMPLETED):
                yield f"loop {name} ends: {_value(kind.output)}"
            elif kind.iteration:
                yield f"loop {name} goes on with iteration {kind.iteration}, state {_value(kind.state)}"
            else:
                yield f"loop {name} begins"
        case SleepEntry():
            word = {
                SleepState.PENDING: "begins",
                SleepState.COMPLETED: "ends",
                SleepState.INTERRUPTED: "is ended early",
            }
            yield f"sleep {name} {word[kind.state]}"
        case MessageEntry():
            message = _decoded(kind.body)
            if isinstance(message, dict) and "createdAt" in message:
                read = cast("dict[str, Any]", message)
                verb = "is done with" if read.get("completed") else "reads"
                yield f"queue {name} {verb} message {read.get('name')!r}: {shown(read.get('body'))}"
        case RollbackCheckpointEntry():
            yield f"rollback checkpoint {name}"
        case JoinEntry():
            yield f"join {name}: {_branches(kind.branches)}"
        case RaceEntry() if kind.winner is not None:
            yield f"race {name} is won by {kind.winner!r}"
        case RaceEntry():
            yield f"race {name}: {_branches(kind.branches)}"
        case VersionCheckEntry():
            yield f"version of {name} is {kind.resolved}"
        case RemovedEntry():
            yield f"{kind.original_type} {name} is removed"


def _step(name: str, kind: StepEntry, metadata: EntryMetadata | None) -> str:
    if metadata is not None and metadata.status is EntryStatus.COMPLETED:
        return f"step {name} is recorded{'' if kind.output is None else f': {_value(kind.output)}'}"
    if kind.error is not None:
        attempts = 0 if metadata is None else metadata.attempts
        return f"step {name} fails: {kind.error} (attempt {attempts})"
    return f"step {name} begins"


def _branches(branches: dict[str, Branch]) -> str:
    return ", ".join(
        f"{name!r} {branch.status.name.lower()}"
        for name, branch in branches.items()
        if branch.status is not BranchStatus.PENDING or len(branches) < 5
    )


def _path(location: Location, known: _Known) -> tuple[str | int, ...]:
    path: list[str | int] = []
    for segment in location:
        if isinstance(segment, LoopIteration):
            path.append(segment.iteration)
        else:
            path.append(known.names.get(segment, f"name {segment}"))
    return tuple(path)


def _decoded(data: bytes | None) -> object:
    return None if data is None else decode_value(data)


def _value(data: bytes | None) -> str:
    try:
        return shown(_decoded(data))
    except DecodeError:
        return _UNREADABLE
