"""Batches cut for drivers that are not atomic: nothing is lost, and every cut can be recovered from."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.storage import layout, split
from perdure.storage.driver import AlarmChange, Batch
from perdure.storage.errors import (
    BatchRefusedError,
    CommitUnknownError,
    DriverClosedError,
    ValueTooLargeError,
)
from perdure.storage.keys import pack, prefix_end
from perdure.storage.memory import MemoryDriver
from perdure.storage.schema import LoopIteration
from perdure.storage.split import (
    MAX_KV_BATCH_ENTRIES,
    MAX_KV_BATCH_PAYLOAD_BYTES,
    commit_batch,
    split_batch,
)

Data = dict[bytes, bytes]

LOOP = layout.entry_key((0,))
STEP = layout.entry_key((0, LoopIteration(0, 3), 1))
OLD_STEPS = [layout.entry_key((0, LoopIteration(0, iteration), 1)) for iteration in range(3)]


def apply(data: Data, batch: Batch) -> Data:
    """What a batch does to a namespace, by the contract's own words."""
    left = {
        key: value
        for key, value in data.items()
        if key not in batch.deletes
        and not any(key.startswith(prefix) for prefix in batch.delete_prefixes)
        and not any(start <= key < end for start, end in batch.delete_ranges)
    }
    left.update(batch.puts)
    if batch.alarm is not None:
        left.pop(layout.ALARM_KEY, None)
        if batch.alarm.wake_at_ms is not None:
            left[layout.ALARM_KEY] = layout.encode_u64(batch.alarm.wake_at_ms)
    return left


def cut(batch: Batch, entries_max: int = 1) -> list[Batch]:
    """The pieces as if no more than so many entries fitted into one."""
    with patch.object(split, "MAX_KV_BATCH_ENTRIES", entries_max):
        return list(split_batch(batch))


def cuts(before: Data, batch: Batch) -> Iterator[Data]:
    """The namespace after each piece, when every entry is a piece of its own."""
    data = before
    for piece in cut(batch):
        data = apply(data, piece)
        yield data


# --- all pieces together are the batch ------------------------------------------------------------------------------

_parts = st.one_of(
    st.tuples(st.sampled_from([1, 2, 3, 4, 5, 32, 33, 34, 35, 36]), st.integers(0, 4)),
    st.tuples(st.just(2), st.integers(0, 2), st.integers(0, 2)),
)
_keys = st.one_of(
    _parts.map(pack), st.binary(max_size=2).map(lambda raw: raw.translate(bytes([0, 0x15, 0x02, 0xFF] * 64)))
)
_prefixes = st.one_of(_keys, st.sampled_from([pack((kind,)) for kind in (1, 2, 3, 4, 32, 33)]))
_puts = st.dictionaries(_keys, st.binary(min_size=1, max_size=2), max_size=8).map(lambda puts: list(puts.items()))
_alarms = st.one_of(st.none(), st.builds(AlarmChange, st.just("w"), st.one_of(st.none(), st.integers(0, 9))))
_batches = st.builds(
    Batch,
    puts=_puts,
    deletes=st.lists(_keys, max_size=4),
    delete_prefixes=st.lists(_prefixes, max_size=3),
    delete_ranges=st.lists(st.tuples(_keys, _keys), max_size=3),
    alarm=_alarms,
)


@given(st.dictionaries(_keys, st.just(b"old"), max_size=20), _batches, st.integers(1, 5))
@settings(max_examples=400)
def test_all_pieces_together_do_what_the_batch_does(before, batch, entries_max):
    """S38: whatever overlaps whatever: deletions before puts, puts before the alarm."""
    data = before
    for piece in cut(batch, entries_max):
        data = apply(data, piece)
    assert data == apply(before, batch)


@given(st.dictionaries(_keys, st.just(b"old"), max_size=20), _batches)
@settings(max_examples=400)
def test_every_cut_shows_only_what_was_or_what_will_be(before, batch):
    """S38: nothing in between is in neither the old nor the new namespace, except what a wipe has yet to put back."""
    after = apply(before, batch)
    wipes = any(prefix_end(prefix) is None for prefix in batch.delete_prefixes)
    for data in cuts(before, batch):
        for key in before.keys() | after.keys() | data.keys():
            allowed = {before.get(key), after.get(key)} | ({None} if wipes else set())
            assert data.get(key) in allowed


@given(_batches, st.integers(1, 5))
@settings(max_examples=200)
def test_a_piece_never_has_more_entries_than_the_limit(batch, entries_max):
    for piece in cut(batch, entries_max):
        count = len(piece.puts) + len(piece.deletes) + len(piece.delete_prefixes) + len(piece.delete_ranges)
        assert count + (piece.alarm is not None) <= entries_max


# --- what a reader concludes from each cut --------------------------------------------------------------------------

_ORDER = [
    ("identity", lambda key: key in (layout.FORMAT_VERSION_KEY, layout.COMPLETION_SEQUENCE_KEY, layout.INPUT_KEY)),
    ("names", lambda key: key.startswith(layout.NAMES_PREFIX)),
    ("mailbox", lambda key: key.startswith(layout.MAILBOX_PREFIX)),
    ("dedup", lambda key: key.startswith(layout.DEDUP_PREFIX)),
    ("replies", lambda key: key == layout.reply_key("m0")),
    ("requests", lambda key: key.startswith(layout.REQUEST_PREFIX)),
    ("details", lambda key: key.startswith((layout.DETAIL_PREFIX, layout.LOOP_START_PREFIX))),
    ("history", lambda key: key.startswith(layout.HISTORY_PREFIX)),
    ("metadata", lambda key: key.startswith(layout.METADATA_PREFIX)),
    ("outcome", lambda key: key in (layout.OUTPUT_KEY, layout.ERROR_KEY, layout.FAILURE_CAUSES_KEY)),
    ("state", lambda key: key == layout.STATE_KEY),
]
_engine_keys = st.sampled_from(
    [
        layout.FORMAT_VERSION_KEY,
        layout.COMPLETION_SEQUENCE_KEY,
        layout.INPUT_KEY,
        *[layout.name_key(index) for index in range(3)],
        *[layout.message_key(sequence) for sequence in range(3)],
        *[layout.dedup_key(f"m{number}") for number in range(3)],
        layout.reply_key("m0"),
        layout.open_request_key("m0"),
        layout.answered_request_key("m0"),
        *[layout.detail_key(f"e{number}") for number in range(3)],
        layout.loop_start_key("e0", 1),
        LOOP,
        STEP,
        *OLD_STEPS,
        *[layout.metadata_key(f"e{number}") for number in range(3)],
        layout.OUTPUT_KEY,
        layout.ERROR_KEY,
        layout.FAILURE_CAUSES_KEY,
        layout.STATE_KEY,
    ]
)


@given(
    st.dictionaries(_engine_keys, st.just(b"old")),
    st.dictionaries(_engine_keys, st.just(b"new")),
    st.lists(_engine_keys, max_size=6),
    _alarms,
)
@settings(max_examples=300)
def test_whatever_is_there_has_what_it_rests_on(before, puts, deletes, alarm):
    """S38: at every cut: referents before what refers to them, removals of history after all entries, state last."""
    batch = Batch(puts=list(puts.items()), deletes=[key for key in deletes if key not in puts], alarm=alarm)
    for data in cuts(before, batch):
        pending = [name for name, is_kind in _ORDER if any(is_kind(key) and data.get(key) != b"new" for key in puts)]
        first_pending = next((index for index, (name, _) in enumerate(_ORDER) if name in pending), len(_ORDER))
        for index, (name, is_kind) in enumerate(_ORDER):
            if index > first_pending:
                assert not any(is_kind(key) and data.get(key) == b"new" for key in puts), name
        removed = [key for key in batch.deletes if key in before and key not in data]
        if any(key.startswith(layout.HISTORY_PREFIX) for key in removed):
            assert not {"history", "metadata", "mailbox"} & set(pending)
        if puts.get(layout.STATE_KEY) and data.get(layout.STATE_KEY) == b"new":
            history = (layout.HISTORY_PREFIX, layout.METADATA_PREFIX, layout.MAILBOX_PREFIX)
            assert not [key for key in batch.deletes if key.startswith(history) and key in data]
            assert alarm is None or alarm.wake_at_ms is None or layout.ALARM_KEY in data


@given(st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=12), st.booleans())
def test_parents_come_before_children_and_go_after_them(locations, is_deletion):
    """S38: no entry is ever there without those above it."""
    locations = {location[:depth] for location in locations for depth in range(1, len(location) + 1)}
    keys = {layout.entry_key(location): location for location in locations}
    entries = dict.fromkeys(keys, b"entry")
    before, batch = (entries, Batch(deletes=list(keys))) if is_deletion else ({}, Batch(puts=list(entries.items())))
    for data in cuts(before, batch):
        there = {keys[key] for key in data}
        assert all(len(location) == 1 or location[:-1] in there for location in there)


def test_a_step_never_says_completed_while_its_output_is_missing():
    """S38: absent output beside "completed" would mean that it returned nothing."""
    metadata = layout.metadata_key("e1")
    batch = Batch(puts=[(metadata, b"completed"), (STEP, b"output"), (layout.name_key(1), b"charge")])
    seen = [(data.get(STEP), data.get(metadata)) for data in cuts({metadata: b"running"}, batch)]
    assert seen == [(None, b"running"), (b"output", b"running"), (b"output", b"completed")]


def test_a_message_is_at_no_time_neither_in_the_mailbox_nor_in_history():
    """Consumption is recorded before the mailbox forgets the message."""
    message = layout.message_key(7)
    for data in cuts({message: b"hello"}, Batch(puts=[(STEP, b"received hello")], deletes=[message])):
        assert message in data or STEP in data


def test_a_message_is_remembered_only_once_it_is_in_the_mailbox():
    """Sending it again after a cut delivers it; its number is taken before it, so no other message gets it."""
    message, seen = layout.message_key(8), layout.dedup_key("evt-1")
    sequence = layout.MAILBOX_SEQUENCE_KEY
    puts = [(seen, b""), (message, b"hello"), (sequence, layout.encode_u64(8))]
    order = [set(data) for data in cuts({}, Batch(puts=puts))]
    assert order == [{sequence}, {sequence, message}, {sequence, message, seen}]


def test_iterations_are_pruned_only_after_the_loop_has_left_them_behind():
    """Before that, they would run again."""
    before = {LOOP: b"at 2", **dict.fromkeys(OLD_STEPS, b"done")}
    pruned = layout.loop_iterations_range((0,), 0, 3)
    for data in cuts(before, Batch(puts=[(LOOP, b"at 3")], delete_ranges=[pruned])):
        assert data[LOOP] == b"at 3" or all(key in data for key in OLD_STEPS)


def test_an_end_shows_only_with_all_that_belongs_to_it():
    """Output first, then the state, then the alarm goes; until the state is there the workflow still wakes."""
    state, output, alarm = layout.STATE_KEY, layout.OUTPUT_KEY, layout.ALARM_KEY
    batch = Batch(puts=[(state, b"completed"), (output, b"42"), (STEP, b"last")], alarm=AlarmChange("w", None))
    for data in cuts({state: b"sleeping", alarm: b"soon"}, batch):
        assert data[state] == b"sleeping" or (data[output] == b"42" and data[STEP] == b"last")
        assert alarm in data or data[state] == b"completed"


def test_a_workflow_never_sleeps_without_its_alarm():
    """The alarm is armed before the state says sleeping."""
    batch = Batch(puts=[(layout.STATE_KEY, b"sleeping")], alarm=AlarmChange("w", 5))
    assert [set(data) for data in cuts({}, batch)] == [{layout.ALARM_KEY}, {layout.ALARM_KEY, layout.STATE_KEY}]


def test_the_alarms_own_change_wins_over_a_put_under_its_key():
    """S38: at no cut is the other value there."""
    batch = Batch(puts=[(layout.ALARM_KEY, b"other"), (STEP, b"1")], alarm=AlarmChange("w", 5))
    seen = [data.get(layout.ALARM_KEY) for data in cuts({}, batch)]
    assert seen == [None, layout.encode_u64(5)]


def test_recovery_forgets_the_failure_after_the_state():
    """A failed workflow keeps its error and causes until it is no longer failed."""
    state, error, causes = layout.STATE_KEY, layout.ERROR_KEY, layout.FAILURE_CAUSES_KEY
    batch = Batch(puts=[(state, b"pending"), (layout.metadata_key("e1"), b"reset")], deletes=[error, causes])
    for data in cuts({state: b"failed", error: b"boom", causes: b"e1"}, batch):
        assert data[state] == b"pending" or (error in data and causes in data)


# --- committing ------------------------------------------------------------------------------------------------------


class Recorder(MemoryDriver):
    """A driver that is not atomic, says what was asked of it, and can refuse one of its batches."""

    def __init__(self, *, refuse: int | None = None) -> None:
        super().__init__(atomic_batch=False)
        self.calls: list[object] = []
        self.refuse = refuse

    async def batch(self, batch: Batch) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(batch)
        if len(self.calls) - 1 == self.refuse:
            raise BatchRefusedError("the disk is full", path="x")
        await super().batch(batch)

    async def set(self, key: bytes, value: bytes) -> None:
        self.calls.append(key)
        await super().set(key, value)


def numbered(count: int, value: bytes = b"v") -> list[tuple[bytes, bytes]]:
    return [(layout.name_key(index), value) for index in range(count)]


async def test_an_atomic_driver_gets_the_batch_as_it_is():
    """S38: of any size."""
    driver = MemoryDriver()
    batch = Batch(puts=numbered(1000))
    await commit_batch(driver, batch)
    assert len(driver.data) == 1000


async def test_a_batch_that_fits_is_not_cut():
    """S38: 128 entries, the alarm among them."""
    driver = Recorder()
    batch = Batch(puts=numbered(MAX_KV_BATCH_ENTRIES - 1), alarm=AlarmChange("w", 1))
    await commit_batch(driver, batch)
    assert driver.calls == [batch]


@pytest.mark.parametrize(("count", "size"), [(1000, 1), (40, 100_000), (129, 10_000)])
async def test_no_piece_is_over_a_limit(count, size):
    """S38: neither 128 entries nor 976 KiB; the driver would refuse it."""
    driver = Recorder()
    await commit_batch(driver, Batch(puts=numbered(count, bytes(size)), alarm=AlarmChange("w", 1)))
    assert len(driver.data) == count + 1
    assert len(driver.calls) > 1
    assert all(isinstance(call, Batch) and call.payload_bytes <= MAX_KV_BATCH_PAYLOAD_BYTES for call in driver.calls)


async def test_the_largest_value_is_written_by_itself():
    """S38: with its key it is over the limit of a batch, and still every driver takes it."""
    driver = Recorder()
    largest = bytes(MAX_KV_BATCH_PAYLOAD_BYTES)
    await commit_batch(driver, Batch(puts=[(b"a", b"1"), (b"b", largest), (b"c", b"3")]))
    assert driver.data == {b"a": b"1", b"b": largest, b"c": b"3"}
    assert driver.calls.count(b"b") == 1


async def test_a_value_over_the_limit_is_refused_before_anything_is_written():
    """S38: as the last of a thousand."""
    driver = Recorder()
    puts = [*numbered(1000), (layout.STATE_KEY, bytes(MAX_KV_BATCH_PAYLOAD_BYTES + 1))]
    with pytest.raises(ValueTooLargeError) as caught:
        await commit_batch(driver, Batch(puts=puts))
    assert (caught.value.size, caught.value.limit) == (MAX_KV_BATCH_PAYLOAD_BYTES + 1, MAX_KV_BATCH_PAYLOAD_BYTES)
    assert driver.calls == []


async def test_the_drivers_own_limit_counts_too():
    """S38: a driver may take less than a piece could hold."""
    driver = MemoryDriver(atomic_batch=False, value_bytes_max=10)
    with pytest.raises(ValueTooLargeError):
        await commit_batch(driver, Batch(puts=[*numbered(200), (b"a", bytes(11))]))
    assert driver.data == {}


async def test_a_refusal_of_the_first_piece_is_a_refusal():
    """Nothing was written, the driver goes on."""
    driver = Recorder(refuse=0)
    with pytest.raises(BatchRefusedError):
        await commit_batch(driver, Batch(puts=numbered(300)))
    assert await driver.list(b"") == []


async def test_a_refusal_of_a_later_piece_is_of_unknown_outcome():
    """Something was written, so the caller must read again, from another driver."""
    driver = Recorder(refuse=1)
    with pytest.raises(CommitUnknownError, match="piece 2 of 3") as caught:
        await commit_batch(driver, Batch(puts=numbered(300)))
    assert caught.value.path == "x"
    assert len(driver.data) == MAX_KV_BATCH_ENTRIES
    with pytest.raises(DriverClosedError):
        await driver.get(b"a")


async def test_cancellation_does_not_cut_a_batch():
    """Only a crash leaves pieces."""
    driver = Recorder()
    with trio.CancelScope() as scope:
        scope.cancel()
        await commit_batch(driver, Batch(puts=numbered(300)))
    assert len(driver.data) == 300
