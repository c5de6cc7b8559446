"""History entries, their metadata and mailbox messages, as the engine holds them.

1. These are plain data. What they look like on disk is `schema`, which is also where to import them from.
2. Entries and messages are frozen: a change of history is a new entry, so that what waits to be written cannot change
   under the writer. Metadata alone is mutable, for it is replaced as a whole by every write of it.
3. User data is opaque bytes here, decoded by whoever wants the value.

Every number of an enum and every name in `KIND_NAMES` is stored on disk; never change or reuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

__all__ = [
    "KIND_NAMES",
    "U32_MAX",
    "Branch",
    "BranchStatus",
    "Entry",
    "EntryKind",
    "EntryMetadata",
    "EntryStatus",
    "JoinEntry",
    "Location",
    "LoopEntry",
    "LoopIteration",
    "MailboxMessage",
    "MessageEntry",
    "RaceEntry",
    "RemovedEntry",
    "RollbackCheckpointEntry",
    "Segment",
    "SleepEntry",
    "SleepState",
    "StepEntry",
    "VersionCheckEntry",
]

U32_MAX: Final = 2**32 - 1
"""Largest name index, iteration, attempt count and version."""


class LoopIteration(NamedTuple):
    """A segment of a location: one iteration (0 to 2**32 - 1) of the loop whose name has this index."""

    loop: int
    iteration: int


Segment: TypeAlias = int | LoopIteration
"""One step of a location: the index of a name (0 to 2**32 - 1), or a loop's iteration."""

Location: TypeAlias = tuple[Segment, ...]
"""Where an entry is in the workflow, from the root down."""


class SleepState(IntEnum):
    """How a sleep stands. Stored on disk; never change or reuse."""

    PENDING = 0
    COMPLETED = 1
    INTERRUPTED = 2


class BranchStatus(IntEnum):
    """How a branch of a join or race stands. Stored on disk; never change or reuse."""

    PENDING = 0
    RUNNING = 1
    COMPLETED = 2
    FAILED = 3
    CANCELLED = 4


class EntryStatus(IntEnum):
    """How a step or loop stands. Stored on disk; never change or reuse."""

    PENDING = 0
    RUNNING = 1
    COMPLETED = 2
    FAILED = 3
    EXHAUSTED = 4


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A step's outcome.

    Attributes:
        output: CBOR of what it returned; `None` when it returned nothing or has no result yet (its metadata tells).
        error: `ClassName: message` of its last failure.
    """

    output: bytes | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LoopEntry:
    """A loop's progress.

    Attributes:
        state: CBOR of the state that the next iteration starts with.
        iteration: Number of that iteration, 0 to 2**32 - 1.
        output: CBOR of the value it broke with, or `None`.
    """

    state: bytes
    iteration: int
    output: bytes | None = None


@dataclass(frozen=True, slots=True)
class SleepEntry:
    """A sleep, or the deadline of a queue read.

    Attributes:
        deadline_ms: When it ends, in milliseconds since the epoch, 0 to 2**64 - 1.
        state: Whether it has ended, and how.
    """

    deadline_ms: int
    state: SleepState = SleepState.PENDING


@dataclass(frozen=True, slots=True)
class MessageEntry:
    """Part of a queue read: the count of its messages, or one of them.

    Attributes:
        name: The message's name, or the awaited names and `:count`.
        body: CBOR of the message, or of the count.
    """

    name: str
    body: bytes


@dataclass(frozen=True, slots=True)
class RollbackCheckpointEntry:
    """The place from which steps may carry rollback handlers."""

    name: str


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of a join or race.

    Attributes:
        status: How it stands.
        output: CBOR of what it returned, or `None`.
        error: `ClassName: message` of its failure, or `None`.
    """

    status: BranchStatus = BranchStatus.PENDING
    output: bytes | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class JoinEntry:
    """A join: its branches by name, in the order they were given."""

    branches: dict[str, Branch]


@dataclass(frozen=True, slots=True)
class RaceEntry:
    """A race: the winning branch's name, if there is one yet, and its branches in the order they were given."""

    winner: str | None
    branches: dict[str, Branch]


@dataclass(frozen=True, slots=True)
class RemovedEntry:
    """A place whose code was removed.

    Attributes:
        original_type: What was there, one of the names in `KIND_NAMES`.
        original_name: What it was called, or `None`.
    """

    original_type: str
    original_name: str | None = None


@dataclass(frozen=True, slots=True)
class VersionCheckEntry:
    """A version decision: the version this workflow keeps, and the latest when it was made; 0 to 2**32 - 1 each."""

    resolved: int
    latest: int


EntryKind: TypeAlias = (
    StepEntry
    | LoopEntry
    | SleepEntry
    | MessageEntry
    | RollbackCheckpointEntry
    | JoinEntry
    | RaceEntry
    | RemovedEntry
    | VersionCheckEntry
)
"""What an entry records."""

KIND_NAMES: Final[dict[type, str]] = {
    StepEntry: "step",
    LoopEntry: "loop",
    SleepEntry: "sleep",
    MessageEntry: "message",
    RollbackCheckpointEntry: "rollback_checkpoint",
    JoinEntry: "join",
    RaceEntry: "race",
    RemovedEntry: "removed",
    VersionCheckEntry: "version_check",
}
"""The name of each kind, in the order of their union tags. Stored on disk; never change or reuse."""


class Entry(NamedTuple):
    """One recorded effect of a workflow. A tuple, since one is made for each effect, and that is quickest.

    Attributes:
        id: Unique in the workflow.
        location: Where it is; also its key.
        kind: What it records.
    """

    id: str
    location: Location
    kind: EntryKind


@dataclass(slots=True)
class EntryMetadata:
    """The course of a step or loop. Mutable, because the engine updates it in place between flushes.

    Attributes:
        status: How it stands.
        error: `ClassName: message` of the last failure, or `None`.
        attempts: How often it was tried, 0 to 2**32 - 1.
        last_attempt_at_ms: When it was last tried, in milliseconds since the epoch; 0 lets a retry run at once.
        created_at_ms: When the entry was made.
        completed_at_ms: When it completed, or `None`.
        rollback_completed_at_ms: When its rollback handler completed, or `None`.
        rollback_error: `ClassName: message` of the rollback handler's failure, or `None`.
    """

    status: EntryStatus = EntryStatus.PENDING
    error: str | None = None
    attempts: int = 0
    last_attempt_at_ms: int = 0
    created_at_ms: int = 0
    completed_at_ms: int | None = None
    rollback_completed_at_ms: int | None = None
    rollback_error: str | None = None


@dataclass(frozen=True, slots=True)
class MailboxMessage:
    """A message that waits in the mailbox.

    Attributes:
        id: Unique in the workflow; what deduplication goes by.
        name: What queue reads select by.
        body: CBOR of what was sent.
        sent_at_ms: When it was sent, in milliseconds since the epoch.
    """

    id: str
    name: str
    body: bytes
    sent_at_ms: int
