"""Entries, metadata and messages: each kind in hex, versions, ranges, and damage."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from perdure.storage import schema
from perdure.storage.bare import BareDecodeError, BareEncodeError
from perdure.storage.schema import (
    KIND_NAMES,
    Branch,
    BranchStatus,
    Entry,
    EntryKind,
    EntryMetadata,
    EntryStatus,
    JoinEntry,
    LoopEntry,
    LoopIteration,
    MailboxMessage,
    MessageEntry,
    RaceEntry,
    RemovedEntry,
    RollbackCheckpointEntry,
    SchemaVersionError,
    SleepEntry,
    SleepState,
    StepEntry,
    VersionCheckEntry,
    decode_entry,
    decode_message,
    decode_metadata,
    encode_entry,
    encode_message,
    encode_metadata,
)

KINDS: list[tuple[EntryKind, str]] = [
    (StepEntry(), "00 00 00"),
    (StepEntry(b"\x01"), "00 01 01 01 00"),
    (StepEntry(None, "E: x"), "00 00 01 04 453a2078"),
    (StepEntry(b"", "é"), "00 01 00 01 02 c3a9"),
    (LoopEntry(b"\xf7", 300), "01 01 f7 2c010000 00"),
    (LoopEntry(b"", 2**32 - 1, b"\x07"), "01 00 ffffffff 01 01 07"),
    (SleepEntry(1, SleepState.PENDING), "02 0100000000000000 00"),
    (SleepEntry(2**64 - 1, SleepState.INTERRUPTED), "02 ffffffffffffffff 02"),
    (MessageEntry("q:count", b"\x01"), "03 07 713a636f756e74 01 01"),
    (RollbackCheckpointEntry("billing"), "04 07 62696c6c696e67"),
    (JoinEntry({}), "05 00"),
    (
        JoinEntry({"b": Branch(BranchStatus.COMPLETED, b"\x01"), "a": Branch()}),
        "05 02 0162 02 01 01 01 00 0161 00 00 00",
    ),
    (RaceEntry(None, {}), "06 00 00"),
    (RaceEntry("f", {"f": Branch(BranchStatus.FAILED, None, "E")}), "06 01 0166 01 0166 03 00 01 01 45"),
    (RemovedEntry("step", "old"), "07 04 73746570 01 03 6f6c64"),
    (RemovedEntry("sleep"), "07 05 736c656570 00"),
    (VersionCheckEntry(1, 2), "08 01000000 02000000"),
]
HEAD = bytes.fromhex("0100 0161 01 00 03000000")  # version 1, id "a", location (3,)


@pytest.mark.parametrize(("kind", "encoded"), KINDS, ids=[encoded for _, encoded in KINDS])
def test_every_kind_of_entry(kind: EntryKind, encoded: str) -> None:
    entry = Entry("a", (3,), kind)
    data = HEAD + bytes.fromhex(encoded)
    assert encode_entry(entry) == data
    assert decode_entry(data) == entry


def test_branches_keep_the_order_they_were_given_in() -> None:
    kind = decode_entry(encode_entry(Entry("a", (0,), JoinEntry({"z": Branch(), "a": Branch()})))).kind
    assert isinstance(kind, JoinEntry)
    assert list(kind.branches) == ["z", "a"]


def test_locations_hold_names_and_iterations() -> None:
    entry = Entry("", (7, LoopIteration(7, 2**32 - 1), 0), StepEntry())
    data = encode_entry(entry)
    assert data.hex() == "0100" + "00" + "03" + "0007000000" + "0107000000ffffffff" + "0000000000" + "000000"
    decoded = decode_entry(data)
    assert decoded == entry
    assert isinstance(decoded.location[1], LoopIteration)


def test_long_ids_and_locations_and_outputs_take_the_general_path_to_the_same_result() -> None:
    entry = Entry("x" * 200, tuple(range(200)), StepEntry(b"y" * 70_000, "z" * 200))
    assert decode_entry(encode_entry(entry)) == entry


def test_shortcut_for_steps_agrees_with_the_general_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        Entry("a" * size, (1, LoopIteration(2, 3)) * (size // 60), StepEntry(output, error))
        for size in (0, 36, 127, 128)
        for output in (None, b"", b"x" * 127, b"x" * 128)
        for error in (None, "", "e" * 127, "e" * 128)
    ]
    encoded = [encode_entry(entry) for entry in entries]
    short = [decode_entry(data) for data in encoded]

    def no_shortcut(data: bytes) -> None:
        return None

    monkeypatch.setattr(schema, "_read_plain_head", no_shortcut)
    assert [decode_entry(data) for data in encoded] == short == entries


METADATA: list[tuple[EntryMetadata, str]] = [
    (EntryMetadata(), "0100 00 00 00000000" + "00" * 8 + "00" * 8 + "00 00 00"),
    (
        EntryMetadata(EntryStatus.COMPLETED, None, 1, 2, 3, 4),
        "0100 02 00 01000000 0200000000000000 0300000000000000 01 0400000000000000 00 00",
    ),
    (
        EntryMetadata(EntryStatus.EXHAUSTED, "E", 2**32 - 1, 2**64 - 1, 0, None, 5, "R"),
        "0100 04 01 01 45 ffffffff ffffffffffffffff 0000000000000000 00 01 0500000000000000 01 01 52",
    ),
    (
        EntryMetadata(EntryStatus.COMPLETED, None, 1, 2, 3, 4, 5, None),
        "0100 02 00 01000000 0200000000000000 0300000000000000 01 0400000000000000 01 0500000000000000 00",
    ),
]


@pytest.mark.parametrize(("metadata", "encoded"), METADATA, ids=["new", "completed", "all", "rolled back"])
def test_metadata_examples(metadata: EntryMetadata, encoded: str) -> None:
    assert encode_metadata(metadata).hex() == encoded.replace(" ", "")
    assert decode_metadata(bytes.fromhex(encoded)) == metadata


def test_metadata_as_long_as_a_completed_step_but_of_other_shape_is_read_by_shape() -> None:
    same_length = [
        EntryMetadata(EntryStatus.FAILED, "1234567", 1, 2, 3),
        EntryMetadata(EntryStatus.FAILED, None, 1, 2, 3, None, 4),
        EntryMetadata(EntryStatus.COMPLETED, None, 1, 2, 3, 4),
    ]
    encoded = [encode_metadata(metadata) for metadata in same_length]
    assert {len(data) for data in encoded} == {35}
    assert [decode_metadata(data) for data in encoded] == same_length


def test_message_example() -> None:
    message = MailboxMessage("m1", "paid", b"\xf5", 1_700_000_000_000)
    data = bytes.fromhex("0100 02 6d31 04 70616964 01 f5 0068e5cf8b010000")
    assert encode_message(message) == data
    assert decode_message(data) == message


@pytest.mark.parametrize("decode", [decode_entry, decode_metadata, decode_message])
def test_newer_version_is_refused_and_says_to_upgrade(decode: Any) -> None:
    with pytest.raises(SchemaVersionError, match="upgrade Perdure") as raised:
        decode(b"\x02\x00" + HEAD[2:] + b"\x00\x00\x00")
    assert (raised.value.found, raised.value.supported) == (2, 1)


@pytest.mark.parametrize("decode", [decode_entry, decode_metadata, decode_message])
@pytest.mark.parametrize("data", [b"", b"\x01", b"\x01\x00", b"\x00\x00" + HEAD[2:] + b"\x00\x00\x00"])
def test_no_version_or_version_zero_is_damage(decode: Any, data: bytes) -> None:
    with pytest.raises(BareDecodeError):
        decode(data)


@pytest.mark.parametrize(
    "encoded",
    [
        "09 00",  # kind that does not exist
        "00 00",  # cut short
        "00 00 00 00",  # a byte too many
        "00 02 00",  # optional that is neither
        "00 01 05 00 00",  # output longer than the entry
        "02 0000000000000000 03",  # sleep state that does not exist
        "05 01 0161 05 00 00",  # branch status that does not exist
        "05 02 0161 00 00 00 0161 00 00 00",  # branch name twice
        "05 ffffffff0f",  # more branches than bytes
        "04 01 ff",  # name that is not UTF-8
    ],
)
def test_damaged_kinds_are_refused(encoded: str) -> None:
    with pytest.raises(BareDecodeError):
        decode_entry(HEAD + bytes.fromhex(encoded))


@pytest.mark.parametrize(
    "encoded",
    [
        "0100 0161 01 02 03000000 000000",  # segment of a kind that does not exist
        "0100 0161 01 00 0300",  # location cut short
        "0100 8000 00 000000",  # id length in more bytes than it needs
        "0100 01ff 00 000000",  # id that is not UTF-8
        "0100 ffffffff0f",  # id longer than the entry
    ],
)
def test_damaged_heads_are_refused(encoded: str) -> None:
    with pytest.raises(BareDecodeError):
        decode_entry(bytes.fromhex(encoded))


def test_damaged_metadata_is_refused() -> None:
    data = encode_metadata(EntryMetadata(EntryStatus.COMPLETED, None, 1, 2, 3, 4))
    for position, value in ((2, 5), (3, 2), (24, 2), (33, 3), (34, 3)):
        damaged = bytearray(data)
        damaged[position] = value
        with pytest.raises(BareDecodeError):
            decode_metadata(bytes(damaged))


@pytest.mark.parametrize(
    "entry",
    [
        Entry("\ud800", (0,), StepEntry()),
        Entry("a", (-1,), StepEntry()),
        Entry("a", (2**32,), StepEntry()),
        Entry("a", (LoopIteration(0, 2**32),), StepEntry()),
        Entry("a", (0,), StepEntry(None, "\ud800")),
        Entry("a", (0,), LoopEntry(b"", 2**32)),
        Entry("a", (0,), SleepEntry(-1)),
        Entry("a", (0,), VersionCheckEntry(-1, 0)),
    ],
)
def test_entries_out_of_range_are_refused(entry: Entry) -> None:
    with pytest.raises(BareEncodeError):
        encode_entry(entry)


@pytest.mark.parametrize(
    "metadata",
    [
        EntryMetadata(attempts=2**32),
        EntryMetadata(created_at_ms=-1),
        EntryMetadata(completed_at_ms=2**64),
        EntryMetadata(completed_at_ms=1, attempts=-1),
        EntryMetadata(rollback_error="\ud800"),
    ],
)
def test_metadata_out_of_range_is_refused(metadata: EntryMetadata) -> None:
    with pytest.raises(BareEncodeError):
        encode_metadata(metadata)


def test_every_kind_has_its_stored_name() -> None:
    assert set(KIND_NAMES) == set(get_args(EntryKind))
    assert list(KIND_NAMES.values()) == [
        *("step", "loop", "sleep", "message", "rollback_checkpoint", "join", "race", "removed", "version_check")
    ]


def test_entries_are_frozen_and_metadata_is_not() -> None:
    entry = Entry("a", (0,), StepEntry())
    with pytest.raises(AttributeError):
        entry.id = "b"  # type: ignore[misc]
    metadata = EntryMetadata()
    metadata.attempts += 1
    assert metadata.attempts == 1
    assert not hasattr(metadata, "__dict__")
