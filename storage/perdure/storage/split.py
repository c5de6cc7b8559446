"""Writing a batch through a driver that takes only small ones, so that a crash between the pieces can be recovered.

A piece of up to 128 entries and 976 KiB is taken to be all or nothing, as it is in the stores this is for. A batch that
fits into one piece is passed on as it is. A larger one is cut, and its parts are written in the order of `_Turn`, which
follows from what a reader would conclude if the writing ended after any of them:

1. What is referred to comes before what refers to it: the layout's version, the counters and the seed, then names, then
   details and starting states, then entries. A counter that is ahead leaves a gap; one that is behind would hand out a
   number twice. Parents come before children; siblings keep the batch's order, in which what counts entries (a queue
   read's `:count`) comes after them.
2. An entry comes before its metadata. Metadata that says "completed" beside an absent output means "returned nothing".
   It also comes before the record that its call is open: an open entry without one is called anew.
3. A message is put into the mailbox before its id is remembered, or sending it again would be taken for a repetition.
   It is removed from the mailbox only after the entry that records it is there. So for what other workflows sent. A reply
   comes before what says that there is one (the shorter key first), and both come before the entry that records its message
   as completed.
4. Removing history comes after every entry: the loop state that no longer needs an iteration, the race's winner that
   rules out the losers. Entries go before their metadata and details, children before parents.
5. The alarm is armed before the state (a wake-up too many does no harm) and cleared after it (one too few does).
6. What the state vouches for (output, error, causes of a failure) comes before it, and is removed after it. The state
   is written last: until then the workflow is what it was, and does the transition again.

What this asks of a reader: a waiting message whose id an entry of live history holds is consumed; history under a
branch that lost its race, or of iterations that the loop's state has left behind, is dead as if it were removed, its
hold on messages included; metadata, details and starting states without their entry mean nothing.

Deletions never meet a put of the same batch: keys that are put are cut out of the ranges to be deleted, which is why
the order can be chosen freely. One thing cannot be expressed so, a prefix without an upper bound (empty, or all 0xff)
that covers a put; it is deleted first of all. The engine writes no such batch.

Rejected: a journal of the whole batch in the namespace itself, replayed on opening. It doubles what is written, and the
reference engine, which reads these bytes too, would not replay it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import trio

from perdure.storage.driver import AlarmChange, Batch, Driver
from perdure.storage.errors import BatchRefusedError, CommitUnknownError
from perdure.storage.keys import KeyDecodeError, pack, prefix_end, unpack
from perdure.storage.layout import (
    ALARM_KEY,
    CALLS_PREFIX,
    DEDUP_PREFIX,
    DETAIL_PREFIX,
    ERROR_KEY,
    FAILURE_CAUSES_KEY,
    HISTORY_PREFIX,
    IDLE_ACTIVATIONS_KEY,
    LOOP_START_PREFIX,
    MAILBOX_PREFIX,
    METADATA_PREFIX,
    NAMES_PREFIX,
    OUTPUT_KEY,
    REPLIES_PREFIX,
    SENT_PREFIX,
    STATE_KEY,
)
from perdure.storage.limits import MAX_KV_BATCH_ENTRIES, MAX_KV_BATCH_PAYLOAD_BYTES, batch_entries, check_batch

__all__ = ["MAX_KV_BATCH_ENTRIES", "MAX_KV_BATCH_PAYLOAD_BYTES", "commit_batch", "split_batch"]


class _Turn(IntEnum):
    """The order of writing."""

    WIPE = 0
    PUT_IDENTITY = 1
    PUT_NAME = 2
    PUT_MESSAGE = 3
    PUT_DEDUP = 4
    PUT_DETAIL = 5
    PUT_ENTRY = 6
    PUT_METADATA = 7
    DELETE_MESSAGE = 8
    DELETE_DEDUP = 9
    DELETE_ENTRY = 10
    DELETE_METADATA = 11
    DELETE_DETAIL = 12
    DELETE_OTHER = 13
    ARM = 14
    PUT_OUTCOME = 15
    PUT_STATE = 16
    DELETE_OUTCOME = 17
    DISARM = 18


_BY_PREFIX: Final = {
    NAMES_PREFIX: (_Turn.PUT_NAME, _Turn.DELETE_OTHER),
    HISTORY_PREFIX: (_Turn.PUT_ENTRY, _Turn.DELETE_ENTRY),
    METADATA_PREFIX: (_Turn.PUT_METADATA, _Turn.DELETE_METADATA),
    MAILBOX_PREFIX: (_Turn.PUT_MESSAGE, _Turn.DELETE_MESSAGE),
    DEDUP_PREFIX: (_Turn.PUT_DEDUP, _Turn.DELETE_DEDUP),
    REPLIES_PREFIX: (_Turn.PUT_DEDUP, _Turn.DELETE_DEDUP),
    DETAIL_PREFIX: (_Turn.PUT_DETAIL, _Turn.DELETE_DETAIL),
    LOOP_START_PREFIX: (_Turn.PUT_DETAIL, _Turn.DELETE_DETAIL),
    CALLS_PREFIX: (_Turn.PUT_METADATA, _Turn.DELETE_METADATA),
    SENT_PREFIX: (_Turn.PUT_DEDUP, _Turn.DELETE_DEDUP),
    pack((3,)): (_Turn.PUT_IDENTITY, _Turn.DELETE_OUTCOME),
    pack((32,)): (_Turn.PUT_IDENTITY, _Turn.DELETE_OUTCOME),
}
_BY_KEY: Final = {
    STATE_KEY: _Turn.PUT_STATE,
    OUTPUT_KEY: _Turn.PUT_OUTCOME,
    ERROR_KEY: _Turn.PUT_OUTCOME,
    FAILURE_CAUSES_KEY: _Turn.PUT_OUTCOME,
    IDLE_ACTIVATIONS_KEY: _Turn.PUT_OUTCOME,
}
_PREFIX_BYTES: Final = 2
"""The encoding of every first part, 1 to 255."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Keys to delete, `start <= key < end`; `end` None is no upper bound."""

    start: bytes
    end: bytes | None


_Change = tuple[bytes, bytes] | bytes | _Range | AlarmChange
"""A put, a key to delete, a range to delete, or the alarm."""


async def commit_batch(driver: Driver, batch: Batch) -> None:
    """Write a batch through any driver: as one where the driver is atomic, cut in recoverable order where it is not.

    What the driver promises for one batch holds for this one when it returns. Once the first of several pieces is being
    written, cancellation has no effect.

    Raises:
        ValueTooLargeError: A value is larger than the driver, or one piece, can take. Nothing was written.
        BatchRefusedError: Nothing was written.
        CommitUnknownError: It may have been written, wholly or in part. The driver is closed.
    """
    if driver.atomic_batch:
        await driver.batch(batch)
        return
    pieces = split_batch(batch, value_bytes_max=driver.value_bytes_max)
    if len(pieces) == 1:
        await _write(driver, pieces[0])
        return
    with trio.CancelScope(shield=True):
        for number, piece in enumerate(pieces):
            try:
                await _write(driver, piece)
            except BatchRefusedError as error:
                if number == 0:
                    raise
                # Refused, but not the whole: what was asked for is partly there.
                await driver.aclose()
                raise CommitUnknownError(
                    f"piece {number + 1} of {len(pieces)} of a batch was refused ({error}); open the namespace again "
                    "and read",
                    path=error.path,
                ) from error


def split_batch(batch: Batch, *, value_bytes_max: int = MAX_KV_BATCH_PAYLOAD_BYTES) -> Sequence[Batch]:
    """Cut a batch into pieces to be written one after the other.

    Each piece has at most 128 entries and 976 KiB of keys and values, except that one put whose value alone is within
    that limit and together with its key is not has a piece of its own. All pieces together do what the batch does.

    Args:
        batch: What to cut; not changed. It is the only piece when it is small enough.
        value_bytes_max: Largest value, in bytes, that the driver takes.

    Raises:
        ValueTooLargeError: A value is larger than that, or than 976 KiB.
        BatchRefusedError: The alarm is not within 0 to 2**64 - 1.
    """
    check_batch(batch, min(value_bytes_max, MAX_KV_BATCH_PAYLOAD_BYTES))
    if batch_entries(batch) <= MAX_KV_BATCH_ENTRIES and batch.payload_bytes <= MAX_KV_BATCH_PAYLOAD_BYTES:
        return [batch]
    pieces = [Batch()]
    entries = size = 0
    for _, change in sorted(_changes(batch), key=_turn_of):
        change_size = len(change[0]) + len(change[1]) if isinstance(change, tuple) else 0
        if entries and (entries == MAX_KV_BATCH_ENTRIES or size + change_size > MAX_KV_BATCH_PAYLOAD_BYTES):
            pieces.append(Batch())
            entries = size = 0
        _add(pieces[-1], change)
        entries += 1
        size += change_size
    return pieces


async def _write(driver: Driver, piece: Batch) -> None:
    if piece.payload_bytes > MAX_KV_BATCH_PAYLOAD_BYTES:
        # The limit is on a batch; a lone value of the largest size is not one.
        ((key, value),) = piece.puts
        await driver.set(key, value)
    else:
        await driver.batch(piece)


def _turn_of(entry: tuple[_Turn, _Change]) -> int:
    return entry[0]


def _add(piece: Batch, change: _Change) -> None:
    match change:
        case (key, value):
            piece.puts.append((key, value))
        case AlarmChange():
            piece.alarm = change
        case _Range(start, end):
            if end is None:
                piece.delete_prefixes.append(start)
            else:
                piece.delete_ranges.append((start, end))
        case key:
            piece.deletes.append(key)


def _depth(key: bytes) -> int:
    try:
        return len(unpack(key))
    except KeyDecodeError:  # not a key of the engine's
        return 0


def _changes(batch: Batch) -> Iterator[tuple[_Turn, _Change]]:
    """Everything the batch does, within one turn in the order to write it in; deletions and puts are disjoint."""
    alarm = batch.alarm
    puts = dict(batch.puts)
    kept = set(puts)
    if alarm is not None and alarm.wake_at_ms is not None:
        # A driver may keep the alarm under its key; deletions come first in a batch, so the alarm outlives them.
        kept.add(ALARM_KEY)
    if alarm is not None:
        puts.pop(ALARM_KEY, None)
        yield (_Turn.DISARM if alarm.wake_at_ms is None else _Turn.ARM), alarm
    for key in sorted(puts, key=_depth):
        yield _BY_KEY.get(key, _turns(key)[0]), (key, puts[key])
    ordered = sorted(kept)
    deletions: list[bytes | _Range] = [key for key in batch.deletes if key not in kept]
    for prefix in batch.delete_prefixes:
        deletions += _without(_Range(prefix, prefix_end(prefix)), ordered)
    for start, end in batch.delete_ranges:
        deletions += _without(_Range(start, end), ordered)
    for deletion in sorted(deletions, key=_first_key, reverse=True):
        yield _deletion_turn(deletion, ordered), deletion


def _first_key(deletion: bytes | _Range) -> bytes:
    return deletion.start if isinstance(deletion, _Range) else deletion


def _turns(key: bytes) -> tuple[_Turn, _Turn]:
    """When a key is put, and when it is deleted."""
    return _BY_PREFIX.get(key[:_PREFIX_BYTES], (_Turn.PUT_IDENTITY, _Turn.DELETE_OTHER))


def _deletion_turn(deletion: bytes | _Range, kept: list[bytes]) -> _Turn:
    if isinstance(deletion, bytes):
        return _turns(deletion)[1]
    if deletion.end is None:
        covers_put = bisect_left(kept, deletion.start) < len(kept)
        return _Turn.WIPE if covers_put else _Turn.DELETE_OTHER
    group_end = prefix_end(deletion.start[:_PREFIX_BYTES])
    if len(deletion.start) < _PREFIX_BYTES or (group_end is not None and deletion.end > group_end):
        # Over several kinds of keys, of which history is the one to be careful with.
        return _Turn.DELETE_ENTRY
    return _turns(deletion.start)[1]


def _without(deleted: _Range, kept: list[bytes]) -> Iterator[_Range]:
    """The parts of a range that hold none of the sorted keys `kept`."""
    start, end = deleted.start, deleted.end
    if end is None:
        yield deleted
        return
    for key in kept[bisect_left(kept, start) : bisect_left(kept, end)]:
        if start < key:
            yield _Range(start, key)
        start = key + b"\x00"
    if start < end:
        yield _Range(start, end)
