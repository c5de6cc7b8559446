"""Comparing two namespaces of one workflow, of which the reference engine may have written one.

What is compared is all that lies under the reference's own keys (1 to 4). This, and nothing else, is made alike first:

1. Entry ids, which are random: entries are told apart by their path, metadata belongs to its entry's path.
2. Times of metadata, of which only whether there is one is kept; and the deadline of a queue read, which counts from the read.
3. Name indices, which follow the order of first use, and concurrent branches use names in any order. The names
   themselves are compared as a set.
4. The stack of a workflow's error, of which only its presence is kept.
5. The spelling of CBOR: values are compared decoded, with their types. JavaScript's `undefined` and `null` are both `None`,
   and `None` as an output may be absent.

`same_bytes` undoes as little as it must: with ids, locations, times and the deadlines of point 2 taken from the other side,
each entry and each metadata must encode to the other side's bytes. So are user values that hold a CBOR map (their maps have
16-bit lengths, which nobody else writes), a byte string (theirs are tagged) or are `None`; all others must be the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from perdure.storage import decode_value, layout
from perdure.storage.keys import unpack
from perdure.storage.schema import (
    Branch,
    Entry,
    EntryKind,
    EntryMetadata,
    JoinEntry,
    LoopEntry,
    LoopIteration,
    MessageEntry,
    RaceEntry,
    SleepEntry,
    StepEntry,
    decode_entry,
    decode_metadata,
    encode_entry,
    encode_metadata,
)

Dump = dict[bytes, bytes]
"""All pairs of a namespace."""
Path = tuple["str | int", ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """A namespace, decoded.

    Attributes:
        names: The name registry, by index.
        entries: By path.
        metadata: By the path of the entry that it belongs to.
        fields: State, output, error and input as stored, by key.
        own: The first parts of all other keys.
    """

    names: list[str]
    entries: dict[Path, Entry]
    metadata: dict[Path, EntryMetadata]
    fields: dict[bytes, bytes]
    own: set[Any]


def contents_of(dump: Mapping[bytes, bytes]) -> Contents:
    """Decode a namespace; every key has to be known, and every metadata to have an entry."""
    names: list[str] = []
    entries: list[Entry] = []
    metadata: dict[str, EntryMetadata] = {}
    fields: dict[bytes, bytes] = {}
    own: set[Any] = set()
    for key, value in sorted(dump.items()):
        match unpack(key)[0]:
            case 1:
                assert layout.parse_name_key(key) == len(names), "the name registry has no gap"
                names.append(value.decode())
            case 2:
                entries.append(decode_entry(value))
                assert layout.entry_key(entries[-1].location) == key, "an entry lies at its own location"
            case 3:
                fields[key] = value
            case 4:
                metadata[layout.parse_metadata_key(key)] = decode_metadata(value)
            case first:
                own.add(first)
    paths = {entry.id: _path(entry, names) for entry in entries}
    assert len(paths) == len(entries), "ids are unique"
    return Contents(
        names,
        {paths[entry.id]: entry for entry in entries},
        {paths[entry_id]: found for entry_id, found in metadata.items()},
        fields,
        own,
    )


def _path(entry: Entry, names: list[str]) -> Path:
    path: list[str | int] = []
    for segment in entry.location:
        if isinstance(segment, LoopIteration):
            assert names[segment.loop] == path[-1], "an iteration's segment names its loop"
            path.append(segment.iteration)
        else:
            path.append(names[segment])
    return tuple(path)


def meaning_of(dump: Mapping[bytes, bytes]) -> dict[str, Any]:
    """What a namespace says, as plain data that is equal when two say the same."""
    found = contents_of(dump)
    error = decode_value(found.fields[layout.ERROR_KEY]) if layout.ERROR_KEY in found.fields else {}
    return {
        "names": set(found.names),
        "entries": {
            path: (type(entry.kind).__name__, _meaning(path, entry.kind)) for path, entry in found.entries.items()
        },
        "metadata": {path: timeless(metadata) for path, metadata in found.metadata.items()},
        "state": found.fields.get(layout.STATE_KEY, b"pending"),
        "input": _value(found.fields.get(layout.INPUT_KEY)),
        "output": _value(found.fields.get(layout.OUTPUT_KEY)),
        "error": {key: _comparable(value) for key, value in error.items() if key != "stack"},
        "has stack": "stack" in error,
    }


def timeless(metadata: EntryMetadata) -> EntryMetadata:
    """Metadata without its times, but with whether it has each."""
    return replace(
        metadata,
        last_attempt_at_ms=min(metadata.last_attempt_at_ms, 1),
        created_at_ms=min(metadata.created_at_ms, 1),
        completed_at_ms=None if metadata.completed_at_ms is None else 1,
        rollback_completed_at_ms=None if metadata.rollback_completed_at_ms is None else 1,
    )


def _comparable(value: Any) -> Any:
    """A decoded value as something that equals itself, NaN included, with its type."""
    if isinstance(value, dict):
        return {_comparable(key): _comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(_comparable(item)) for item in value)
    return type(value).__name__, repr(value)


def _value(data: bytes | None) -> Any:
    return _comparable(None if data is None else decode_value(data))


def _meaning(path: Path, kind: EntryKind) -> Any:
    match kind:
        case StepEntry():
            return kind.error, _value(kind.output)
        case LoopEntry():
            return kind.iteration, _value(kind.state), _value(kind.output)
        case MessageEntry():
            return kind.name, _value(kind.body)
        case SleepEntry() if _is_read_deadline(path):
            return kind.state
        case JoinEntry():
            return _branches(kind.branches)
        case RaceEntry():
            return kind.winner, _branches(kind.branches)
        case _:
            return kind


def _is_read_deadline(path: Path) -> bool:
    return isinstance(path[-1], str) and path[-1].endswith(":deadline")


def _branches(branches: Mapping[str, Branch]) -> dict[str, Any]:
    return {name: (branch.status.name, _value(branch.output), branch.error) for name, branch in branches.items()}


def same_bytes(ours: Mapping[bytes, bytes], theirs: Mapping[bytes, bytes]) -> set[str]:
    """Hold two namespaces that say the same against each other, byte by byte where no map, id, time or name index is.

    Returns:
        What was compared: the kinds of entries, "metadata", "name" and "field", so that a caller can see that something was.
    """
    here, there = contents_of(ours), contents_of(theirs)
    compared: set[str] = set()
    assert {name.encode() for name in here.names} == {name.encode() for name in there.names}
    if here.names:
        compared.add("name")
    assert here.entries.keys() == there.entries.keys()
    for path, entry in here.entries.items():
        their = there.entries[path]
        assert len(entry.id) == len(their.id) == 36, "ids are UUIDs"
        kind = _with_their_spelling(entry.kind, their.kind)
        if isinstance(kind, SleepEntry) and isinstance(their.kind, SleepEntry) and _is_read_deadline(path):
            kind = SleepEntry(their.kind.deadline_ms, kind.state)
        key = layout.entry_key(their.location)
        assert encode_entry(Entry(their.id, their.location, kind)) == theirs[key], f"{path} is other bytes"
        compared.add(type(kind).__name__)
    assert here.metadata.keys() == there.metadata.keys()
    for path, metadata in here.metadata.items():
        mine, other = encode_metadata(timeless(metadata)), encode_metadata(timeless(there.metadata[path]))
        assert mine == other, f"the metadata of {path} is other bytes"
        compared.add("metadata")
    assert here.fields.keys() == there.fields.keys()
    for key, data in here.fields.items():
        if key == layout.STATE_KEY or not (key == layout.ERROR_KEY or _is_spelled_otherwise(data)):
            assert data == there.fields[key], f"the field {unpack(key)} is other bytes"
            compared.add("field")
    return compared


def _with_their_spelling(kind: EntryKind, their: EntryKind) -> EntryKind:
    """The content of an entry, with the other side's bytes for user values that it writes in another form."""
    match kind, their:
        case StepEntry(), StepEntry():
            return StepEntry(_spelled(kind.output, their.output), kind.error)
        case LoopEntry(), LoopEntry():
            state = _spelled(kind.state, their.state)
            assert state is not None, "a loop has a state"
            return LoopEntry(state, kind.iteration, _spelled(kind.output, their.output))
        case MessageEntry(), MessageEntry():
            body = _spelled(kind.body, their.body)
            assert body is not None, "a message has a body"
            return MessageEntry(kind.name, body)
        case JoinEntry(), JoinEntry():
            return JoinEntry(_spelled_branches(kind.branches, their.branches))
        case RaceEntry(), RaceEntry():
            return RaceEntry(kind.winner, _spelled_branches(kind.branches, their.branches))
        case _:
            return kind


def _spelled_branches(ours: Mapping[str, Branch], theirs: Mapping[str, Branch]) -> dict[str, Branch]:
    return {
        name: Branch(branch.status, _spelled(branch.output, theirs[name].output), branch.error)
        for name, branch in ours.items()
    }


def _spelled(ours: bytes | None, theirs: bytes | None) -> bytes | None:
    return theirs if any(data is not None and _is_spelled_otherwise(data) for data in (ours, theirs)) else ours


def _is_spelled_otherwise(data: bytes) -> bool:
    """Whether a value holds something that the reference writes in another form."""
    if data in (b"\xf6", b"\xf7"):
        return data == b"\xf6"  # None is stored as absent, and as undefined where it cannot be
    pending = [decode_value(data)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return True  # a Map with other keys is written alike
        if isinstance(value, bytes):
            return True
        if isinstance(value, list | set):
            pending += value
    return False
