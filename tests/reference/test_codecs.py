"""The reference engine's own libraries on whatever this engine can write: keys, entries, metadata and values."""

from __future__ import annotations

from typing import Any

from engines import ReferenceEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import shape, text, values_with

from perdure.storage import decode_value, encode_value, layout
from perdure.storage.schema import (
    Branch,
    BranchStatus,
    Entry,
    EntryMetadata,
    EntryStatus,
    JoinEntry,
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
    encode_entry,
    encode_metadata,
)

kept = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=200)

u32 = st.integers(0, 2**32 - 1)
times = st.integers(0, 2**53 - 1)
"""Milliseconds that a JavaScript number holds exactly."""
names = text.filter(lambda name: name != "" and not name.isdecimal())
"""Of branches. JavaScript puts those that look like numbers before the others."""
iterations = st.builds(LoopIteration, st.integers(0, 3), u32)
locations = st.lists(st.integers(0, 3) | iterations, min_size=1, max_size=5).map(tuple)
data = st.builds(encode_value, st.none() | st.booleans() | st.integers(-(2**31), 2**32 - 1) | text)
output = st.none() | data.filter(lambda encoded: encoded != b"\xf6")
error = st.none() | text
branches = st.dictionaries(names, st.builds(Branch, st.sampled_from(BranchStatus), output, error), max_size=4)
kinds = st.one_of(
    st.builds(StepEntry, output, error),
    st.builds(LoopEntry, data | st.just(b"\xf7"), u32, output),
    st.builds(SleepEntry, times, st.sampled_from(SleepState)),
    st.builds(MessageEntry, text, data),
    st.builds(RollbackCheckpointEntry, text),
    st.builds(JoinEntry, branches),
    st.builds(RaceEntry, st.none() | names, branches),
    st.builds(RemovedEntry, text, error),
    st.builds(VersionCheckEntry, u32, u32),
)
stamps = st.none() | times
metadata = st.builds(EntryMetadata, st.sampled_from(EntryStatus), error, u32, times, times, stamps, stamps, error)


@kept
@given(locations, kinds, metadata)
def test_entries_and_metadata_are_written_there_as_here(
    theirs: ReferenceEngine, location: Any, kind: Any, details: EntryMetadata
) -> None:
    """S16: read and written again, every entry, its metadata and the keys of both are the same bytes."""
    kv = {layout.name_key(index): f"name {index}".encode() for index in range(4)}
    kv[layout.entry_key(location)] = encode_entry(Entry("an id", location, kind))
    kv[layout.metadata_key("an id")] = encode_metadata(details)
    _, _, written = theirs.rewrite(kv=kv)
    assert written.pop(layout.STATE_KEY) == b"pending"
    assert written == kv


@kept
@given(st.lists(st.integers(0, 2**32 - 1) | iterations, max_size=6).map(tuple), text)
def test_keys_are_packed_there_as_here(theirs: ReferenceEngine, location: Any, entry_id: str) -> None:
    """S16: every place in history, and every entry's metadata."""
    parts = [part if isinstance(part, int) else list(part) for part in location]
    _, packed, _ = theirs.rewrite(keys=[[2, *parts], [4, entry_id]])
    assert packed == [layout.entry_key(location), layout.metadata_key(entry_id)]


@kept
@given(values_with(st.integers(100_000, 1_000_000)))
def test_every_value_is_read_there_and_what_is_written_again_is_read_here(
    theirs: ReferenceEngine, value: object
) -> None:
    """S8, S16: whatever may be lost on the way there is lost once: a second passage changes nothing."""
    (there,), _, _ = theirs.rewrite(values=[encode_value(value)])
    back = decode_value(bytes.fromhex(there))
    (again,), _, _ = theirs.rewrite(values=[encode_value(back)])
    assert shape(decode_value(bytes.fromhex(again))) == shape(back)
