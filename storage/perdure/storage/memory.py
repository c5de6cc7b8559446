"""The driver that keeps a namespace in a dict: for tests, and for workflows that need not outlive the process.

1. It behaves as the file driver does: bytewise order, deletions before puts, the alarm under the same key, the same
   refusals, nothing usable after `aclose`. What passes on it may rely on no mercy that a file would not show.
2. It never waits: every method runs to its end without a checkpoint, so a batch is atomic for every observer.
3. The dict is the "disk": a new driver over `old.data` is a restart.

Keys are kept in a sorted list beside the dict, brought up to date when an ordered operation needs it. Rejected: sorting
the dict in every `list`, which makes a scan of one prefix cost as much as the whole namespace.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TypeAlias

from perdure.storage.driver import VALUE_BYTES_MAX, AlarmChange, Batch
from perdure.storage.errors import BatchRefusedError, DriverClosedError
from perdure.storage.keys import prefix_end
from perdure.storage.layout import ALARM_KEY, decode_u64
from perdure.storage.limits import (
    MAX_KV_BATCH_ENTRIES,
    MAX_KV_BATCH_PAYLOAD_BYTES,
    alarm_value,
    batch_entries,
    check_batch,
    check_value,
)

__all__ = ["MemoryDriver"]

_Keys: TypeAlias = list[bytes]  # inside the class, `list` is the driver's method

_SORT_AGAIN_AFTER = 64
"""New keys from which sorting the list again (merging runs, nearly linear) beats inserting them one by one."""


class MemoryDriver:
    """A `Driver` over a dict. Nothing here is a checkpoint; everything is done when a method returns.

    Args:
        data: The namespace to work on, shared and not copied; `None` starts an empty one. Other code may change it
            while the driver is open only if it takes it from the `data` property each time.
        atomic_batch: False makes the driver claim to be a lesser one, which refuses batches of more than 128 entries
            or 976 KiB, so that callers are made to cut them (`commit_batch`).
        value_bytes_max: Largest value in bytes, at least 1.
    """

    def __init__(
        self,
        data: dict[bytes, bytes] | None = None,
        *,
        atomic_batch: bool = True,
        value_bytes_max: int = VALUE_BYTES_MAX,
    ) -> None:
        if value_bytes_max < 1:
            raise ValueError(f"value_bytes_max must be at least 1, not {value_bytes_max}")
        self._data: dict[bytes, bytes] = {} if data is None else data
        self._sorted: _Keys | None = None
        self._added: _Keys = []
        self._atomic_batch = atomic_batch
        self._value_bytes_max = value_bytes_max
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<MemoryDriver {state}, {len(self._data)} keys>"

    @property
    def data(self) -> dict[bytes, bytes]:
        """The namespace itself, also after `aclose`. Pass it to a new `MemoryDriver` to simulate a restart."""
        self._sorted = None
        return self._data

    @property
    def atomic_batch(self) -> bool:
        """Whether `batch` takes any size (it is all or nothing either way)."""
        return self._atomic_batch

    @property
    def value_bytes_max(self) -> int:
        """Largest value in bytes."""
        return self._value_bytes_max

    async def get(self, key: bytes) -> bytes | None:
        """The value at `key`, or `None`."""
        self._check_open()
        return self._data.get(key)

    async def set(self, key: bytes, value: bytes) -> None:
        """Put one value.

        Raises:
            ValueTooLargeError: It is over the limit; nothing was written.
        """
        self._check_open()
        check_value(key, value, self._value_bytes_max)
        self._put(key, value)

    async def delete(self, key: bytes) -> None:
        """Remove one key, if it is there."""
        self._check_open()
        self._delete(key)

    async def delete_prefix(self, prefix: bytes) -> None:
        """Remove every key that starts with `prefix`; an empty one removes everything."""
        self._check_open()
        self._delete_between(prefix, prefix_end(prefix))

    async def delete_range(self, start: bytes, end: bytes) -> None:
        """Remove every key with `start <= key < end`; none when `start >= end`."""
        self._check_open()
        self._delete_between(start, end)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Every pair whose key starts with `prefix`, in bytewise order of keys; an empty prefix lists everything."""
        self._check_open()
        keys, start, stop = self._slice(prefix, prefix_end(prefix))
        data = self._data
        return [(key, data[key]) for key in keys[start:stop]]

    async def batch(self, batch: Batch) -> None:
        """Apply a batch, all or nothing.

        Raises:
            ValueTooLargeError: A value is over the limit; nothing was written.
            BatchRefusedError: The driver was made with `atomic_batch=False` and the batch has more than 128 entries or
                976 KiB, or the alarm is out of range; nothing was written.
        """
        self._apply(batch)

    def batch_nowait(self, batch: Batch) -> bool:
        """Apply a batch; always does. Raises as `batch` does."""
        self._apply(batch)
        return True

    def _apply(self, batch: Batch) -> None:
        self._check_open()
        check_batch(batch, self._value_bytes_max)
        if not self._atomic_batch:
            _check_split(batch)
        for key in batch.deletes:
            self._delete(key)
        for prefix in batch.delete_prefixes:
            self._delete_between(prefix, prefix_end(prefix))
        for start, end in batch.delete_ranges:
            self._delete_between(start, end)
        for key, value in batch.puts:
            self._put(key, value)
        if batch.alarm is not None:
            self._change_alarm(batch.alarm)

    async def set_alarm(self, workflow_id: str, wake_at_ms: int) -> None:
        """Arm the alarm. The namespace has one, whatever the id.

        Raises:
            BatchRefusedError: `wake_at_ms` is not within 0 to 2**64 - 1; nothing was written.
        """
        self._check_open()
        self._change_alarm(AlarmChange(workflow_id, wake_at_ms))

    async def get_alarm(self, workflow_id: str) -> int | None:
        """When the workflow is to be woken, in milliseconds since the epoch, or `None`.

        Raises:
            DecodeError: What is stored there is not an alarm.
        """
        self._check_open()
        stored = self._data.get(ALARM_KEY)
        return None if stored is None else decode_u64(stored)

    async def clear_alarm(self, workflow_id: str) -> None:
        """Disarm the alarm."""
        self._check_open()
        self._change_alarm(AlarmChange(workflow_id, None))

    async def aclose(self) -> None:
        """Close the driver; `data` stays. Closing twice is fine."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise DriverClosedError("this MemoryDriver is closed; open another with MemoryDriver(old.data)")

    def _change_alarm(self, alarm: AlarmChange) -> None:
        stored = alarm_value(alarm)
        if stored is None:
            self._delete(ALARM_KEY)
        else:
            self._put(ALARM_KEY, stored)

    def _put(self, key: bytes, value: bytes) -> None:
        if key not in self._data:
            self._added.append(key)
        self._data[key] = value

    def _delete(self, key: bytes) -> None:
        if key in self._data:
            keys, index, _ = self._slice(key, None)
            del keys[index]
            del self._data[key]

    def _delete_between(self, start: bytes, end: bytes | None) -> None:
        keys, first, stop = self._slice(start, end)
        for key in keys[first:stop]:
            del self._data[key]
        del keys[first:stop]

    def _slice(self, start: bytes, end: bytes | None) -> tuple[_Keys, int, int]:
        """The sorted keys, and where in them those of `start <= key < end` are (`end` None: to the last)."""
        keys = self._index()
        first = bisect_left(keys, start)
        stop = len(keys) if end is None else max(first, bisect_left(keys, end))
        return keys, first, stop

    def _index(self) -> _Keys:
        """All keys, sorted; brings the list up to date with the dict."""
        keys = self._sorted
        if keys is None or len(keys) + len(self._added) != len(self._data):
            # First use, or the dict was changed from outside.
            self._sorted = keys = sorted(self._data)
        elif len(self._added) < _SORT_AGAIN_AFTER:
            for key in self._added:
                insort(keys, key)
        else:
            keys += self._added
            keys.sort()
        self._added.clear()
        return keys


def _check_split(batch: Batch) -> None:
    entries = batch_entries(batch)
    if entries > MAX_KV_BATCH_ENTRIES:
        raise BatchRefusedError(f"a batch of {entries} entries, at most {MAX_KV_BATCH_ENTRIES}; use commit_batch")
    size = batch.payload_bytes
    if size > MAX_KV_BATCH_PAYLOAD_BYTES:
        raise BatchRefusedError(f"a batch of {size} bytes, at most {MAX_KV_BATCH_PAYLOAD_BYTES}; use commit_batch")
