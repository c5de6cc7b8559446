"""What is on disk: history entries, their metadata and mailbox messages, as versioned BARE.

The structs themselves are in `entries` and are exported from here too, so that one import serves both.

1. A value is a little-endian u16 schema version (1), then the BARE struct. A newer version is refused with
   `SchemaVersionError`; guessing at it would corrupt history on the next write.
2. Entries carry user data as opaque bytes, decoded when asked for, so that decoding and encoding an entry again gives
   the same bytes whatever wrote them.
3. This is the reference engine's format, byte for byte (`tests/vectors`). Mailbox messages are ours, in the same style.
4. Every number here is stored on disk. None is changed or reused; a retired one stays as a hole.

Steps are nearly all of a long history, and each is decoded once per replay and encoded once per run. What a completed
step looks like has a short cut in each direction, and the rest goes through `bare`; tests hold both equal. The rejected
alternative, the general reader for steps as well, took twice as long to replay them.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from struct import error as StructError
from typing import Final

from perdure.storage.bare import BareEncodeError, Reader, Writer
from perdure.storage.entries import (
    KIND_NAMES,
    U32_MAX,
    Branch,
    BranchStatus,
    Entry,
    EntryKind,
    EntryMetadata,
    EntryStatus,
    JoinEntry,
    Location,
    LoopEntry,
    LoopIteration,
    MailboxMessage,
    MessageEntry,
    RaceEntry,
    RemovedEntry,
    RollbackCheckpointEntry,
    Segment,
    SleepEntry,
    SleepState,
    StepEntry,
    VersionCheckEntry,
)
from perdure.storage.errors import DecodeError

__all__ = [
    "KIND_NAMES",
    "SCHEMA_VERSION",
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
    "SchemaVersionError",
    "Segment",
    "SleepEntry",
    "SleepState",
    "StepEntry",
    "VersionCheckEntry",
    "decode_entry",
    "decode_message",
    "decode_metadata",
    "encode_entry",
    "encode_message",
    "encode_metadata",
]

SCHEMA_VERSION: Final = 1
"""The version of every struct in this module. Stored on disk; never change or reuse."""


class SchemaVersionError(DecodeError):
    """A value was written by a newer Perdure; upgrade Perdure to read it."""

    found: int = 0
    supported: int = SCHEMA_VERSION


# Union tags of entry kinds: stored on disk; never change or reuse.
_STEP: Final = 0
_LOOP: Final = 1
_SLEEP: Final = 2
_MESSAGE: Final = 3
_ROLLBACK_CHECKPOINT: Final = 4
_JOIN: Final = 5
_RACE: Final = 6
_REMOVED: Final = 7
_VERSION_CHECK: Final = 8

# Union tags of location segments: stored on disk; never change or reuse.
_NAME_SEGMENT: Final = 0
_ITERATION_SEGMENT: Final = 1

_VERSION_BYTES: Final = SCHEMA_VERSION.to_bytes(2, "little")
_ONE_BYTE: Final = tuple(bytes([value]) for value in range(0x80))
_PACKED_NAME: Final = Struct("<BI")
_ONE_NAME: Final = Struct("<BBI")
_PACKED_ITERATION: Final = Struct("<BII")
_U32_PAIR: Final = Struct("<II")
_U32: Final = Struct("<I")

_SLEEP_STATES: Final = tuple(SleepState)
_BRANCH_STATUSES: Final = tuple(BranchStatus)
_ENTRY_STATUSES: Final = tuple(EntryStatus)

_STATUS_COUNT: Final = len(EntryStatus)

_COMPLETED: Final = Struct("<HBBIQQBQH")
"""Metadata of a step that completed without error: version, status, 0 for no error, attempts, last attempt, created, 1
and the completion time, 0 for no rollback time and no rollback error."""


def encode_entry(entry: Entry) -> bytes:
    """The stored form of a history entry.

    Raises:
        BareEncodeError: A number is out of its range, or text holds a lone surrogate.
    """
    entry_id, location, kind = entry
    raw_id = _text_bytes(entry_id)
    size = len(raw_id)
    try:
        if len(location) == 1 and type(name := location[0]) is int:
            place = _ONE_NAME.pack(1, _NAME_SEGMENT, name)
        else:
            place = _uint(len(location)) + b"".join(map(_segment_bytes, location))
    except StructError:
        raise BareEncodeError(f"location {location} holds a number outside 0 to 2**32 - 1") from None
    pieces = [_VERSION_BYTES, _ONE_BYTE[size] if size < 0x80 else _uint(size), raw_id, place]
    if type(kind) is StepEntry and kind.error is None:
        output = kind.output
        if output is None:
            pieces.append(b"\x00\x00\x00")
        else:
            size = len(output)
            pieces += (b"\x00\x01", _ONE_BYTE[size] if size < 0x80 else _uint(size), output, b"\x00")
    else:
        writer = Writer()
        _write_kind(writer, kind)
        pieces.append(writer.getvalue())
    return b"".join(pieces)


def decode_entry(data: bytes) -> Entry:
    """A history entry from its stored form.

    Raises:
        SchemaVersionError: A newer Perdure wrote it.
        BareDecodeError: The bytes are not an entry.
    """
    head = _read_plain_head(data)
    if head is None:
        reader = _versioned_reader(data)
        entry_id = reader.string()
        location = tuple(_read_segment(reader) for _ in range(reader.list_len(5)))
    else:
        entry_id, location, offset = head
        if data[offset : offset + 2] == b"\x00\x01" and len(data) > offset + 2 and data[offset + 2] < 0x80:
            end = offset + 3 + data[offset + 2]
            if len(data) == end + 1 and data[end] == 0:
                return Entry(entry_id, location, StepEntry(data[offset + 3 : end]))
        reader = Reader(data, offset)
    kind = _KIND_READERS[reader.tag(len(_KIND_READERS))](reader)
    reader.finish()
    return Entry(entry_id, location, kind)


def encode_metadata(metadata: EntryMetadata) -> bytes:
    """The stored form of an entry's metadata.

    Raises:
        BareEncodeError: A number is out of its range, or text holds a lone surrogate.
    """
    m = metadata
    has_error = m.error is not None or m.rollback_error is not None
    if not has_error and m.completed_at_ms is not None and m.rollback_completed_at_ms is None:
        tried_ms, created_ms, completed_ms = m.last_attempt_at_ms, m.created_at_ms, m.completed_at_ms
        try:
            return _COMPLETED.pack(SCHEMA_VERSION, m.status, 0, m.attempts, tried_ms, created_ms, 1, completed_ms, 0)
        except StructError:
            raise BareEncodeError(f"{m} holds a number outside its range") from None
    writer = _versioned_writer()
    writer.tag(m.status)
    writer.optional(writer.string, m.error)
    writer.u32(m.attempts)
    writer.u64(m.last_attempt_at_ms)
    writer.u64(m.created_at_ms)
    writer.optional(writer.u64, m.completed_at_ms)
    writer.optional(writer.u64, m.rollback_completed_at_ms)
    writer.optional(writer.string, m.rollback_error)
    return writer.getvalue()


def decode_metadata(data: bytes) -> EntryMetadata:
    """An entry's metadata from its stored form.

    Raises:
        SchemaVersionError: A newer Perdure wrote it.
        BareDecodeError: The bytes are not metadata.
    """
    if len(data) == _COMPLETED.size:
        status: int
        version, status, error, attempts, last, created, completed, completed_at_ms, rollback = _COMPLETED.unpack(data)
        if version == SCHEMA_VERSION and status < _STATUS_COUNT and error == rollback == 0 and completed == 1:
            return EntryMetadata(_ENTRY_STATUSES[status], None, attempts, last, created, completed_at_ms)
    reader = _versioned_reader(data)
    metadata = EntryMetadata(
        status=_ENTRY_STATUSES[reader.tag(_STATUS_COUNT)],
        error=reader.optional(reader.string),
        attempts=reader.u32(),
        last_attempt_at_ms=reader.u64(),
        created_at_ms=reader.u64(),
        completed_at_ms=reader.optional(reader.u64),
        rollback_completed_at_ms=reader.optional(reader.u64),
        rollback_error=reader.optional(reader.string),
    )
    reader.finish()
    return metadata


def encode_message(message: MailboxMessage) -> bytes:
    """The stored form of a mailbox message.

    Raises:
        BareEncodeError: The time is out of its range, or text holds a lone surrogate.
    """
    writer = _versioned_writer()
    writer.string(message.id)
    writer.string(message.name)
    writer.data(message.body)
    writer.u64(message.sent_at_ms)
    return writer.getvalue()


def decode_message(data: bytes) -> MailboxMessage:
    """A mailbox message from its stored form.

    Raises:
        SchemaVersionError: A newer Perdure wrote it.
        BareDecodeError: The bytes are not a message.
    """
    reader = _versioned_reader(data)
    message = MailboxMessage(id=reader.string(), name=reader.string(), body=reader.data(), sent_at_ms=reader.u64())
    reader.finish()
    return message


def _versioned_writer() -> Writer:
    writer = Writer()
    writer.u16(SCHEMA_VERSION)
    return writer


def _versioned_reader(data: bytes) -> Reader:
    reader = Reader(data)
    version = reader.u16()
    if version > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"stored with schema version {version}; this Perdure reads up to {SCHEMA_VERSION}: upgrade Perdure",
            found=version,
        )
    if version != SCHEMA_VERSION:
        raise reader.failure(f"schema version {version}, which never existed,")
    return reader


def _uint(value: int) -> bytes:
    if value < 0x80:
        return _ONE_BYTE[value]
    writer = Writer()
    writer.uint(value)
    return writer.getvalue()


def _text_bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BareEncodeError("text holds a lone surrogate, which UTF-8 cannot hold", type_name="str") from None


def _read_plain_head(data: bytes) -> tuple[str, Location, int] | None:
    """Id, location and the offset of the kind; `None` for anything unusual, which the general reader then judges."""
    try:
        if data[:2] != _VERSION_BYTES or (length := data[2]) >= 0x80:
            return None
        offset = 3 + length
        entry_id = data[3:offset].decode()
        count = data[offset]
        offset += 1
        segments: list[Segment] = []
        for _ in range(count):
            if data[offset] == _NAME_SEGMENT:
                segments.append(_U32.unpack_from(data, offset + 1)[0])
                offset += 5
            elif data[offset] == _ITERATION_SEGMENT:
                segments.append(LoopIteration(*_U32_PAIR.unpack_from(data, offset + 1)))
                offset += 9
            else:
                return None
    except (IndexError, StructError, UnicodeDecodeError):
        return None
    return (entry_id, tuple(segments), offset) if count < 0x80 else None


def _segment_bytes(segment: Segment) -> bytes:
    if isinstance(segment, LoopIteration):
        return _PACKED_ITERATION.pack(_ITERATION_SEGMENT, segment.loop, segment.iteration)
    return _PACKED_NAME.pack(_NAME_SEGMENT, segment)


def _read_segment(reader: Reader) -> Segment:
    if reader.tag(2) == _NAME_SEGMENT:
        return reader.u32()
    return LoopIteration(reader.u32(), reader.u32())


def _write_kind(writer: Writer, kind: EntryKind) -> None:
    match kind:
        case StepEntry():
            writer.tag(_STEP)
            writer.optional(writer.data, kind.output)
            writer.optional(writer.string, kind.error)
        case LoopEntry():
            writer.tag(_LOOP)
            writer.data(kind.state)
            writer.u32(kind.iteration)
            writer.optional(writer.data, kind.output)
        case SleepEntry():
            writer.tag(_SLEEP)
            writer.u64(kind.deadline_ms)
            writer.tag(kind.state)
        case MessageEntry():
            writer.tag(_MESSAGE)
            writer.string(kind.name)
            writer.data(kind.body)
        case RollbackCheckpointEntry():
            writer.tag(_ROLLBACK_CHECKPOINT)
            writer.string(kind.name)
        case JoinEntry():
            writer.tag(_JOIN)
            _write_branches(writer, kind.branches)
        case RaceEntry():
            writer.tag(_RACE)
            writer.optional(writer.string, kind.winner)
            _write_branches(writer, kind.branches)
        case RemovedEntry():
            writer.tag(_REMOVED)
            writer.string(kind.original_type)
            writer.optional(writer.string, kind.original_name)
        case VersionCheckEntry():
            writer.tag(_VERSION_CHECK)
            writer.u32(kind.resolved)
            writer.u32(kind.latest)


def _write_branches(writer: Writer, branches: dict[str, Branch]) -> None:
    writer.list_len(len(branches))
    for name, branch in branches.items():
        writer.string(name)
        writer.tag(branch.status)
        writer.optional(writer.data, branch.output)
        writer.optional(writer.string, branch.error)


def _read_branches(reader: Reader) -> dict[str, Branch]:
    branches: dict[str, Branch] = {}
    for _ in range(reader.list_len(4)):
        name = reader.string()
        if name in branches:
            raise reader.failure(f"branch {name!r} twice")
        status = _BRANCH_STATUSES[reader.tag(len(_BRANCH_STATUSES))]
        branches[name] = Branch(status, reader.optional(reader.data), reader.optional(reader.string))
    return branches


_KIND_READERS: Final[dict[int, Callable[[Reader], EntryKind]]] = {
    _STEP: lambda r: StepEntry(r.optional(r.data), r.optional(r.string)),
    _LOOP: lambda r: LoopEntry(r.data(), r.u32(), r.optional(r.data)),
    _SLEEP: lambda r: SleepEntry(r.u64(), _SLEEP_STATES[r.tag(len(_SLEEP_STATES))]),
    _MESSAGE: lambda r: MessageEntry(r.string(), r.data()),
    _ROLLBACK_CHECKPOINT: lambda r: RollbackCheckpointEntry(r.string()),
    _JOIN: lambda r: JoinEntry(_read_branches(r)),
    _RACE: lambda r: RaceEntry(r.optional(r.string), _read_branches(r)),
    _REMOVED: lambda r: RemovedEntry(r.string(), r.optional(r.string)),
    _VERSION_CHECK: lambda r: VersionCheckEntry(r.u32(), r.u32()),
}
