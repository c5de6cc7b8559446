"""What Hypothesis makes for several tests: all kinds of values and structs that can be stored, and what compares values."""

from __future__ import annotations

from datetime import UTC, date, timedelta, timezone
from typing import Any

from cbor2 import frozendict
from hypothesis import strategies as st

from perdure.storage.schema import (
    Branch,
    BranchStatus,
    Entry,
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
    SleepEntry,
    SleepState,
    StepEntry,
    VersionCheckEntry,
)
from perdure.storage.values import ErrorValue, TaggedValue

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
offsets = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
aware = st.datetimes(timezones=offsets).map(lambda moment: moment.replace(fold=0))  # no meaning in a fixed offset
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers() | st.integers(-(2**70), 2**70),
    st.floats(),
    text,
    st.binary(max_size=30),
    aware,
    aware.map(lambda moment: moment.astimezone(UTC) if 1 < moment.year < 9999 else moment.replace(tzinfo=UTC)),
    st.dates(date.min),
    st.decimals(),
    st.fractions(),
    st.uuids(),
)
_hashable = scalars.filter(lambda value: not (hasattr(value, "is_snan") and value.is_snan()))
_frozen = st.recursive(
    _hashable,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


def values_with(tags: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    """Values of every kind, with tagged ones of these tags among them."""
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(text, inner, max_size=4),
            st.dictionaries(_frozen, inner, max_size=4),
            st.sets(_frozen, max_size=4),
            st.builds(ErrorValue, text, text, inner),
            st.builds(TaggedValue, tags, inner),
        ),
        max_leaves=12,
    )


values = values_with(st.integers(100_000, 2**64 - 1))


def shape(value: object) -> object:
    """Value and type of everything in it, comparable: NaNs equal each other, and sets have an order."""
    match value:
        case dict() | frozendict():
            return (type(value).__name__, [(shape(key), shape(item)) for key, item in value.items()])
        case list() | tuple():
            return (type(value).__name__, [shape(item) for item in value])
        case set() | frozenset():
            return (type(value).__name__, sorted(repr(shape(item)) for item in value))
        case ErrorValue():
            return ("error", value.name, value.message, shape(value.cause))
        case TaggedValue():
            return ("tag", value.tag, shape(value.value))
        case _:
            return (type(value).__name__, repr(value))


# Structs

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
segments = u32 | st.builds(LoopIteration, u32, u32)
output = st.none() | st.binary(max_size=150)
error = st.none() | text
branches = st.dictionaries(text, st.builds(Branch, st.sampled_from(BranchStatus), output, error), max_size=4)
kinds = st.one_of(
    st.builds(StepEntry, output, error),
    st.builds(LoopEntry, st.binary(max_size=9), u32, output),
    st.builds(SleepEntry, u64, st.sampled_from(SleepState)),
    st.builds(MessageEntry, text, st.binary(max_size=9)),
    st.builds(RollbackCheckpointEntry, text),
    st.builds(JoinEntry, branches),
    st.builds(RaceEntry, st.none() | text, branches),
    st.builds(RemovedEntry, text, st.none() | text),
    st.builds(VersionCheckEntry, u32, u32),
)
entries = st.builds(Entry, text, st.lists(segments, max_size=5).map(tuple), kinds)
stamps = st.none() | u64
metadata = st.builds(EntryMetadata, st.sampled_from(EntryStatus), error, u32, u64, u64, stamps, stamps, error)
messages = st.builds(MailboxMessage, text, text, st.binary(max_size=9), u64)
