"""The contract between the engine and whatever keeps a workflow's bytes.

1. A driver holds the key-value namespace of one workflow. Keys order bytewise.
2. A `Batch` is one transition of one workflow: everything that becomes true together, its alarm included.
3. An atomic driver applies a batch all or nothing; it may refuse one (`BatchRefusedError`, nothing written) and never
   splits it. For any other driver `commit_batch` in `split.py` cuts the batch so that a cut between pieces is
   recoverable.
4. Whatever else goes wrong in a commit means *unknown* (`CommitUnknownError`): the driver is closed and the caller
   reads again from a new one. The rejected alternative, retrying on the same connection, writes twice when the first
   try had in fact reached the disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

__all__ = ["VALUE_BYTES_MAX", "AlarmChange", "Batch", "Driver", "NowaitDriver", "SingleWrites", "nowait_batch"]

VALUE_BYTES_MAX = 976 * 1024
"""Largest value, in bytes, that every driver takes; the reference engine's limit for one write."""


@dataclass(frozen=True, slots=True)
class AlarmChange:
    """A change of one workflow's alarm.

    Attributes:
        workflow_id: Whose alarm.
        wake_at_ms: Milliseconds since the epoch, 0 to 2**64 - 1; `None` clears the alarm.
    """

    workflow_id: str
    wake_at_ms: int | None


@dataclass(slots=True)
class Batch:
    """What one transition writes. Deletions are applied first, then the puts, then the alarm.

    Attributes:
        puts: Keys and their new values. A key appears at most once.
        deletes: Single keys to remove; a missing key is not an error.
        delete_prefixes: Every key that starts with one of these goes.
        delete_ranges: Every key with `start <= key < end` goes.
        alarm: The alarm's change, or `None` to leave it as it is.
    """

    puts: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    deletes: list[bytes] = field(default_factory=list[bytes])
    delete_prefixes: list[bytes] = field(default_factory=list[bytes])
    delete_ranges: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    alarm: AlarmChange | None = None

    def __bool__(self) -> bool:
        """Whether the batch changes anything."""
        return bool(self.puts or self.deletes or self.delete_prefixes or self.delete_ranges or self.alarm is not None)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all keys and values put."""
        return sum(len(key) + len(value) for key, value in self.puts)


@runtime_checkable
class Driver(Protocol):
    """The namespace of one workflow.

    What a method changed is durable when it returns, as far as the driver's durability setting promises. A method is
    not interrupted by cancellation once it has begun to write; it may or may not be a checkpoint.
    """

    @property
    def atomic_batch(self) -> bool:
        """Whether `batch` is all or nothing."""
        ...

    @property
    def value_bytes_max(self) -> int:
        """Largest value in bytes; a larger one is refused with `ValueTooLargeError`."""
        ...

    async def get(self, key: bytes) -> bytes | None:
        """The value at `key`, or `None`."""
        ...

    async def set(self, key: bytes, value: bytes) -> None:
        """Put one value."""
        ...

    async def delete(self, key: bytes) -> None:
        """Remove one key, if it is there."""
        ...

    async def delete_prefix(self, prefix: bytes) -> None:
        """Remove every key that starts with `prefix`."""
        ...

    async def delete_range(self, start: bytes, end: bytes) -> None:
        """Remove every key with `start <= key < end`."""
        ...

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Every pair whose key starts with `prefix`, in bytewise order of keys."""
        ...

    async def batch(self, batch: Batch) -> None:
        """Apply a batch.

        Raises:
            BatchRefusedError: Nothing was written.
            CommitUnknownError: It may have been written or not; the driver is closed.
        """
        ...

    async def set_alarm(self, workflow_id: str, wake_at_ms: int) -> None:
        """Arm the workflow's alarm, replacing an earlier one."""
        ...

    async def get_alarm(self, workflow_id: str) -> int | None:
        """When the workflow is to be woken, in milliseconds since the epoch, or `None`."""
        ...

    async def clear_alarm(self, workflow_id: str) -> None:
        """Disarm the workflow's alarm."""
        ...

    async def aclose(self) -> None:
        """Close the driver. Closing twice is fine; using it afterwards raises `DriverClosedError`."""
        ...


class SingleWrites(ABC):
    """The writes of a driver that change one thing, for those that apply each as a batch of one. They raise as `batch` does."""

    @abstractmethod
    async def batch(self, batch: Batch) -> None:
        """See `Driver.batch`."""

    async def set(self, key: bytes, value: bytes) -> None:
        """Put one value."""
        await self.batch(Batch(puts=[(key, value)]))

    async def delete(self, key: bytes) -> None:
        """Remove one key, if it is there."""
        await self.batch(Batch(deletes=[key]))

    async def delete_prefix(self, prefix: bytes) -> None:
        """Remove every key that starts with `prefix`; an empty one removes everything."""
        await self.batch(Batch(delete_prefixes=[prefix]))

    async def delete_range(self, start: bytes, end: bytes) -> None:
        """Remove every key with `start <= key < end`; none when `start >= end`."""
        await self.batch(Batch(delete_ranges=[(start, end)]))

    async def set_alarm(self, workflow_id: str, wake_at_ms: int) -> None:
        """Arm the alarm, replacing an earlier one. A namespace has one, whatever the id."""
        await self.batch(Batch(alarm=AlarmChange(workflow_id, wake_at_ms)))

    async def clear_alarm(self, workflow_id: str) -> None:
        """Disarm the alarm."""
        await self.batch(Batch(alarm=AlarmChange(workflow_id, None)))


@runtime_checkable
class NowaitDriver(Protocol):
    """What a driver may offer besides: a batch without waiting, which spares a lone workflow's commit half its own cost.

    It counts only where the driver's class has it: one that wraps another and delegates with `__getattr__` would
    otherwise pass on, unseen, what it watches.
    """

    def batch_nowait(self, batch: Batch) -> bool:
        """Apply the batch now, on this thread, if nobody would wait for it.

        Returns:
            Whether it was applied, and is as durable as after `Driver.batch`; if not, nothing happened: use that.

        Raises:
            BatchRefusedError, CommitUnknownError: As `Driver.batch`.
        """
        ...


def nowait_batch(driver: Driver) -> Callable[[Batch], bool] | None:
    """The driver's `batch_nowait`, if its class has one."""
    # Not by `isinstance`, which takes some 10 us with a protocol: this is asked for each workflow that is opened.
    return getattr(driver, "batch_nowait", None) if hasattr(type(driver), "batch_nowait") else None
