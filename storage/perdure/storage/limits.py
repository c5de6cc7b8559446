"""What every driver checks before it writes.

1. A batch is checked whole before its first byte is written, so that a refusal always means "nothing was written".
2. A refusal names what was too large and by how much: the caller can tell which value to make smaller.

Rejected: leaving the checks to the database. SQLite takes blobs of a gigabyte, and a value that one driver takes and
another refuses would make a workflow unloadable after a move.
"""

from __future__ import annotations

from typing import Final

from perdure.storage.driver import AlarmChange, Batch
from perdure.storage.errors import BatchRefusedError, ValueTooLargeError
from perdure.storage.layout import U64_MAX

__all__ = [
    "MAX_KV_BATCH_ENTRIES",
    "MAX_KV_BATCH_PAYLOAD_BYTES",
    "alarm_value",
    "batch_entries",
    "check_batch",
    "check_value",
    "value_too_large",
]

MAX_KV_BATCH_ENTRIES: Final = 128
"""Most entries in one batch for a driver that is not atomic; the reference engine's number."""

MAX_KV_BATCH_PAYLOAD_BYTES: Final = 976 * 1024
"""Most bytes of keys and values in one batch for a driver that is not atomic; the reference engine's number."""


def check_value(key: bytes, value: bytes, value_bytes_max: int, *, path: str | None = None) -> None:
    """Refuse a value over the driver's limit.

    Raises:
        ValueTooLargeError: `value` has more than `value_bytes_max` bytes. Nothing was written.
    """
    if len(value) > value_bytes_max:
        raise value_too_large(key, value, value_bytes_max, path=path)


def check_batch(batch: Batch, value_bytes_max: int, *, path: str | None = None) -> None:
    """Refuse a batch that no driver with this limit could write.

    Raises:
        ValueTooLargeError: A value has more than `value_bytes_max` bytes. Nothing was written.
        BatchRefusedError: The alarm is not within 0 to 2**64 - 1. Nothing was written.
    """
    for key, value in batch.puts:
        if len(value) > value_bytes_max:
            raise value_too_large(key, value, value_bytes_max, path=path)
    if batch.alarm is not None:
        alarm_value(batch.alarm, path=path)


def alarm_value(alarm: AlarmChange, *, path: str | None = None) -> bytes | None:
    """What is stored for an alarm: eight bytes, little-endian; `None` when it is to be cleared.

    Raises:
        BatchRefusedError: `wake_at_ms` is not within 0 to 2**64 - 1. Nothing was written.
    """
    wake_at_ms = alarm.wake_at_ms
    if wake_at_ms is None:
        return None
    if not 0 <= wake_at_ms <= U64_MAX:
        raise BatchRefusedError(
            f"alarm at {wake_at_ms} ms is not within 0 to 2**64 - 1; pass milliseconds since the epoch", path=path
        )
    return wake_at_ms.to_bytes(8, "little")


def batch_entries(batch: Batch) -> int:
    """How many entries a batch counts as: every put, every deletion of any kind, and the alarm's change."""
    return (
        len(batch.puts)
        + len(batch.deletes)
        + len(batch.delete_prefixes)
        + len(batch.delete_ranges)
        + (batch.alarm is not None)
    )


def value_too_large(key: bytes, value: bytes, limit: int, *, path: str | None = None) -> ValueTooLargeError:
    """The error for a value over the limit, which the caller raises."""
    return ValueTooLargeError(
        f"the value of key {key[:40].hex()} has {len(value)} bytes, the limit is {limit}; store it elsewhere and keep "
        "a reference to it here",
        path=path,
        size=len(value),
        limit=limit,
    )
