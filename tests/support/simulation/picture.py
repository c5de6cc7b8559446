"""What is on the disk, known from the writes alone, and the oracles that look at each of them.

1. The picture is made of what was written, batch by batch, so it is there for every kind of disk, and at the moment of each
   write, which is when these oracles look.
2. What is recorded for good stays byte for byte as it is: a replay that came to another result would write it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perdure.storage import Batch, layout
from perdure.storage.schema import (
    Entry,
    EntryKind,
    EntryStatus,
    JoinEntry,
    LoopEntry,
    MessageEntry,
    RaceEntry,
    SleepEntry,
    SleepState,
    StepEntry,
    decode_entry,
    decode_message,
    decode_metadata,
)
from perdure.storage.values import decode_value
from perdure.storage.wake import TERMINAL_STATES, wake_of
from perdure.testing import CrashPoint, SimulatedDisk, WritePoint
from perdure.testing.faults import When
from simulation.world import World

__all__ = ["Picture", "about"]

_FINAL_BRANCH = ("COMPLETED", "FAILED", "CANCELLED")


class Picture:
    """What every namespace holds.

    Args:
        world: Whom to tell what is wrong.
        disk: What is written to.

    Attributes:
        namespaces: The pairs of each workflow.
        is_new: Whether the process that runs has begun new history.
        dies_at: At which write of a kind the process is to die; see `LifePlan`.
    """

    def __init__(self, world: World, disk: SimulatedDisk) -> None:
        self.world = world
        self.disk = disk
        self.namespaces: dict[str, dict[bytes, bytes]] = {}
        self.is_new = False
        self.dies_at: tuple[str, int, When] | None = None

    def watch(self, point: WritePoint, when: str) -> None:
        """A write begins or is done; for `WriteGate.on_write`."""
        if when == "before":
            self._die_if_told(point)
            return
        if self.disk.gate.faults.get(point.number) == "lost":
            self.world.note(f"write {point.number} of {point.workflow_id or 'all'} is lost")
            return
        self.world.note(f"write {point.number}: {point.workflow_id or 'all'}, {about(point)}")
        match point.kind:
            case "batch":
                assert point.batch is not None, "it is a batch"
                self._apply(point.workflow_id, point.batch)
            case "delete":
                self.namespaces.pop(point.workflow_id, None)
            case _:
                pass
        if point.workflow_id:
            self._check_wake(point.workflow_id)

    def _die_if_told(self, point: WritePoint) -> None:
        if self.dies_at is None:
            return
        kind, count, when = self.dies_at
        if kind not in about(point).split("+"):
            return
        if count:
            self.dies_at = kind, count - 1, when
            return
        self.dies_at, gate = None, self.disk.gate
        gate.crash_at = CrashPoint(point.number, when)
        if when == "before":
            gate.died_at = point
            gate.die()

    def _apply(self, workflow_id: str, batch: Batch) -> None:
        pairs = self.namespaces.setdefault(workflow_id, {})
        self._check_state(workflow_id, pairs, batch)
        for key, value in batch.puts:
            if key.startswith(layout.HISTORY_PREFIX):
                self.is_new = self.is_new or key not in pairs
                if (old := pairs.get(key)) is not None and old != value:
                    self._check_entry(workflow_id, pairs, key, decode_entry(old), decode_entry(value))
        for prefix in batch.delete_prefixes:
            for key in [key for key in pairs if key.startswith(prefix)]:
                del pairs[key]
        for start, end in batch.delete_ranges:
            for key in [key for key in pairs if start <= key < end]:
                del pairs[key]
        for key in batch.deletes:
            pairs.pop(key, None)
        pairs.update(batch.puts)
        if batch.alarm is not None:
            if batch.alarm.wake_at_ms is None:
                pairs.pop(layout.ALARM_KEY, None)
            else:
                pairs[layout.ALARM_KEY] = layout.encode_u64(batch.alarm.wake_at_ms)

    def state(self, workflow_id: str) -> str | None:
        """Where a workflow stands, durably; `None` if it is not there."""
        value = self.namespaces.get(workflow_id, {}).get(layout.STATE_KEY)
        return None if value is None else value.decode()

    def wake_ms(self, workflow_id: str) -> int | None:
        """When a workflow wants to be activated, messages aside."""
        pairs = self.namespaces[workflow_id]
        alarm = pairs.get(layout.ALARM_KEY)
        return wake_of(
            pairs[layout.STATE_KEY].decode(),
            None if alarm is None else layout.decode_u64(alarm),
            wants_mail=False,
            has_duties=layout.DUTIES_KEY in pairs,
        )

    def kept(self, workflow_id: str) -> set[str]:
        """The ids of the messages that are in a workflow's mailbox or history."""
        ids: set[str] = set()
        for key, value in self.namespaces.get(workflow_id, {}).items():
            if key.startswith(layout.MAILBOX_PREFIX):
                ids.add(decode_message(value).id)
            elif key.startswith(layout.HISTORY_PREFIX) and isinstance(kind := decode_entry(value).kind, MessageEntry):
                body = decode_value(kind.body)
                if isinstance(body, dict):
                    ids.add(body["id"])
        return ids

    # Oracles.

    def _check_state(self, workflow_id: str, pairs: Mapping[bytes, bytes], batch: Batch) -> None:
        before = self.state(workflow_id)
        for key, value in batch.puts:
            if key == layout.STATE_KEY and before in TERMINAL_STATES and value.decode() != before:
                if workflow_id in self.world.recovering and before == "failed":
                    continue
                self.world.blame("an end is final", f"{workflow_id} was {before} and is {value.decode()} now")

    def _check_entry(self, workflow_id: str, pairs: Mapping[bytes, bytes], key: bytes, old: Entry, new: Entry) -> None:
        if workflow_id in self.world.recovering:
            return
        metadata = pairs.get(layout.metadata_key(old.id))
        status = None if metadata is None else decode_metadata(metadata).status
        if not _may_become(old.kind, new.kind, status) or old.id != new.id:
            self.world.blame(
                "replay identical",
                f"{workflow_id} had {old} ({status}) at {layout.parse_entry_key(key)}, and writes {new}",
            )

    def _check_wake(self, workflow_id: str) -> None:
        """The catalog never says a later time than the workflow wants."""
        if self.disk.path is not None or self.state(workflow_id) is None:
            return
        wake_ms, row = self.wake_ms(workflow_id), self.disk._memory._disk.rows.get(workflow_id)
        if wake_ms is None:
            return
        if row is None or row.next_wake_ms is None or row.next_wake_ms > wake_ms:
            self.world.blame(
                "no overdue wake unarmed", f"{workflow_id} wants to be woken at {wake_ms}, its row is {row}"
            )

    def differing(self) -> list[str]:
        """The workflows of which the disk holds something else; only of a disk in memory."""
        stored = self.disk._memory._disk.namespaces
        return [
            workflow_id
            for workflow_id in {*stored, *self.namespaces}
            if stored.get(workflow_id, {}) != self.namespaces.get(workflow_id, {})
        ]


def _may_become(old: EntryKind, new: EntryKind, status: EntryStatus | None) -> bool:
    match old, new:
        case StepEntry(), StepEntry():
            return status is not EntryStatus.COMPLETED
        case SleepEntry(), SleepEntry():
            return old.state is SleepState.PENDING
        case LoopEntry(), LoopEntry():
            return old.output is None and status is not EntryStatus.COMPLETED and new.iteration >= old.iteration
        case RaceEntry(), RaceEntry():
            return old.winner in (None, new.winner) and _branches_go_on(old.branches, new.branches, is_race=True)
        case JoinEntry(), JoinEntry():
            return _branches_go_on(old.branches, new.branches, is_race=False)
        case MessageEntry(), MessageEntry():
            before, after = decode_value(old.body), decode_value(new.body)
            return isinstance(before, dict) and {**before, "completed": True} == after
        case _:
            return False


def _branches_go_on(old: Mapping[str, Any], new: Mapping[str, Any], *, is_race: bool) -> bool:
    return all(new[name] == branch or is_race for name, branch in old.items() if branch.status.name in _FINAL_BRANCH)


def _kinds(batch: Batch) -> Iterator[str]:
    for key, value in batch.puts:
        if key.startswith(layout.HISTORY_PREFIX):
            yield _kind_of(decode_entry(value).kind)


def _kind_of(kind: EntryKind) -> str:
    """What primitive an entry belongs to."""
    return type(kind).__name__.removesuffix("Entry").lower()


def about(point: WritePoint) -> str:
    """What a write is about: the primitives of which it writes history, or something else."""
    batch = point.batch
    if batch is None:
        return point.kind
    kinds = sorted(set(_kinds(batch)))
    if kinds:
        return "+".join(kinds)
    if any(key.startswith(layout.MAILBOX_PREFIX) for key, _ in batch.puts):
        return "arrival"
    if any(key == layout.STATE_KEY for key, _ in batch.puts):
        return "state"
    return "alarm" if batch.alarm is not None else "other"
