"""The driver of a young workflow: its namespace is in memory, its batches in the journal, until it gets a file of its own.

1. A batch is applied to the namespace once it is as durable as it has to be, so what is read was acknowledged.
2. The workflow gets its file (`move`) when it has written `JOURNALED_BYTES_MAX` to the journal, with a batch that is too large
   for that, when the journal cannot be written, and when it keeps an old segment. From then on this driver passes all on to
   the file's. A driver that is closed while its workflow is young writes the file, too.
3. The file is used only once it is durable that it was written (`Journal.settle`): see there what else would come back.
4. If the file cannot be written, nothing is lost: the workflow stays young, and the next batch, or the next driver, tries again.
   A batch whose record may be durable or not goes into the file, which decides that; without a file, it is of unknown outcome,
   the driver is closed, and nobody reads before the file is there.
5. One operation at a time, as with `SqliteDriver`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from perdure.storage.driver import VALUE_BYTES_MAX, Batch, SingleWrites
from perdure.storage.errors import BatchRefusedError, CommitUnknownError, DriverClosedError, StorageError
from perdure.storage.journal import Journal, Young
from perdure.storage.layout import ALARM_KEY, decode_u64
from perdure.storage.limits import check_batch
from perdure.storage.memory import MemoryDriver
from perdure.storage.stored_driver import StoredDriver

__all__ = ["YoungDriver"]

JOURNALED_BYTES_MAX: Final = 65536
"""What a young workflow may have written before its last record, which bounds its namespace: it is written to a file in one go,
and thousands may be young at once."""


class YoungDriver(SingleWrites):
    """A `Driver` of a workflow that was born in the journal.

    Args:
        young: What is known of it; no other driver uses it.
        journal: Where its batches go.
        open_file: Opens its file.
        value_bytes_max: Largest value in bytes.

    Attributes:
        when_closed: Called when the driver is closed.
    """

    def __init__(
        self,
        young: Young,
        journal: Journal,
        open_file: Callable[[str], Awaitable[StoredDriver]],
        *,
        value_bytes_max: int = VALUE_BYTES_MAX,
    ) -> None:
        self.when_closed: Callable[[], None] | None = None
        self._path = journal.path(young)
        self._young = young
        self._journal = journal
        self._open_file = open_file
        self._value_bytes_max = value_bytes_max
        self._file: StoredDriver | None = None
        self._turn = young.turn
        self._is_closed = False
        self._closings = 0
        self._pid = os.getpid()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "young" if self._file is None else "open"
        return f"<YoungDriver {self._path!r} {state}>"

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and self._file is None and self._pid == os.getpid():
            warnings.warn(f"{self!r} was not closed; await its aclose()", ResourceWarning, source=self, stacklevel=1)

    @property
    def path(self) -> str:
        """Its file, which may not be there yet."""
        return self._path

    @property
    def atomic_batch(self) -> bool:
        """True: a batch is one record, or one transaction."""
        return True

    @property
    def value_bytes_max(self) -> int:
        """Largest value in bytes."""
        return self._value_bytes_max

    @property
    def is_given_up(self) -> bool:
        """Whether the workflow is free for another driver: closed, or given up after a commit of unknown outcome."""
        return not self._closings and (self._is_closed or (self._file is not None and self._file.is_given_up))

    async def get(self, key: bytes) -> bytes | None:
        """The value at `key`, or `None`. Raises as `SqliteDriver.get` does."""
        self._check_owned()
        return await (self._file or self._young.namespace).get(key)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Every pair whose key starts with `prefix`, in bytewise order of keys. Raises as `get` does."""
        self._check_owned()
        return await (self._file or self._young.namespace).list(prefix)

    async def has_any(self, prefix: bytes) -> bool:
        """Whether any key starts with `prefix`. Raises as `get` does."""
        self._check_owned()
        if self._file is not None:
            return await self._file.has_any(prefix)
        return bool(await self._young.namespace.list(prefix))

    async def get_alarm(self, workflow_id: str) -> int | None:
        """When the workflow is to be woken, in milliseconds since the epoch, or `None`. Raises as `get` does.

        Raises:
            DecodeError: What is stored there is not an alarm.
        """
        stored = await self.get(ALARM_KEY)
        return None if stored is None else decode_u64(stored)

    @trio.lowlevel.enable_ki_protection
    async def batch(self, batch: Batch) -> None:
        """Apply a batch, all or nothing. Once begun it is carried through, whatever is cancelled.

        Raises:
            ValueTooLargeError: A value is over the limit; nothing was written.
            BatchRefusedError: Nothing was written: the disk is full, the workflow's file cannot be made, or as
                `SqliteDriver.batch` says.
            CommitUnknownError: It may have been written or not, as the journal failed and then the file; or as
                `SqliteDriver.batch` says. The driver is closed; open another.
            CorruptStoreError: Of its file; see `SqliteDriver.batch`.
            DriverClosedError: The driver was closed before.
        """
        if self._file is None:
            self._check_owned()
            check_batch(batch, self._value_bytes_max, path=self._path)
            if self._turn.locked():
                await self._turn.acquire()
            else:
                self._turn.acquire_nowait()  # which is no checkpoint
            try:
                self._check_open()
                is_done = self._file is None and await self._journal_it(batch)
            finally:
                self._turn.release()
            if is_done:
                # Not while the turn is held: of two that wait for each other's, none would go on.
                await self._journal.relieve()
                return
        self._check_open()
        await (await self._own_file()).batch(batch)

    def batch_nowait(self, batch: Batch) -> bool:
        """Apply a batch here and now, if nobody else would wait for it; see `NowaitDriver`. Raises as `batch` does."""
        if self._file is not None:
            return self._file.batch_nowait(batch)
        self._check_owned()
        if self._turn.locked() or not self._is_for_journal():
            return False
        if self._journal.is_long or not self._journal.can_sync_here():
            return False
        check_batch(batch, self._value_bytes_max, path=self._path)
        return self._journal_here(batch)

    @trio.lowlevel.enable_ki_protection
    async def move(self) -> None:
        """Give the workflow its file, and go on with that; durable on return. Not interrupted by cancellation.

        Raises:
            StorageError: The file cannot be made or opened, and the workflow stays as it is.
        """
        with trio.CancelScope(shield=True):
            async with self._turn:
                if self._file is None and not self._is_closed:
                    await self._move()

    @trio.lowlevel.enable_ki_protection
    async def backup(self, target: str | os.PathLike[str]) -> None:
        """Write a consistent copy to `target`; see `SqliteDriver.backup`."""
        self._check_owned()
        if self._file is None:
            with trio.CancelScope(shield=True):
                async with self._turn:
                    if self._file is None:
                        self._check_open()
                        await self._journal.copy(self._young, os.fspath(target))
                        return
        assert self._file is not None
        await self._file.backup(target)

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """Close the driver; the file of a young workflow is written, and durable on return. Not interrupted by cancellation;
        closing twice is fine.

        Raises:
            StorageError: The file cannot be written, or not be closed. What was acknowledged is durable all the same.
        """
        self._closings += 1
        try:
            with trio.CancelScope(shield=True):
                async with self._turn:
                    await self._close()
        finally:
            self._closings -= 1
            if self.when_closed is not None and self.is_given_up:
                self.when_closed()

    # The journal.

    def _is_for_journal(self) -> bool:
        young = self._young
        return not young.is_failed and young.journaled_bytes < JOURNALED_BYTES_MAX

    @trio.lowlevel.enable_ki_protection
    async def _journal_it(self, batch: Batch) -> bool:
        """Write a batch to the journal and apply it; whether that was done, or else it is to go to the file."""
        if not self._is_for_journal():
            return False
        position = self._record(batch)
        if position is None:
            return False
        try:
            await self._journal.make_durable(self._young, position)
        except Exception:
            self._doubt()
            return False
        self._apply(batch)
        return True

    @trio.lowlevel.enable_ki_protection
    def _journal_here(self, batch: Batch) -> bool:
        """`_journal_it`, in place, for a batch that is for the journal."""
        position = self._record(batch)
        if position is None:
            return False
        try:
            self._journal.make_durable_nowait(self._young, position)
        except Exception:
            self._doubt()
            return False
        self._apply(batch)
        return True

    def _record(self, batch: Batch) -> int | None:
        """The position to be synced; `None` if the batch was not written, as it is too large or there is no room for it."""
        try:
            return self._journal.write(self._young, batch)
        except OSError:
            return None

    def _doubt(self) -> None:
        """A record was written, and is durable or not; whatever went wrong, the file has to decide that."""
        self._young.is_doubtful = self._young.is_failed = True

    def _apply(self, batch: Batch) -> None:
        self._young.namespace.batch_nowait(batch)

    # The file.

    async def _own_file(self) -> StoredDriver:
        """The driver of the file, which is made if need be.

        Raises:
            BatchRefusedError: It cannot be had.
            CommitUnknownError: Nor is it known what the journal has.
        """
        if self._file is None:
            try:
                await self.move()
            except StorageError as error:
                if self._young.is_doubtful:
                    self._is_closed = True
                    raise CommitUnknownError(
                        f"what was written to the journal of {self._path} may be there or not, and its file cannot be had "
                        f"({error}); open it again and read",
                        path=self._path,
                    ) from error
                raise BatchRefusedError(f"nothing was written to {self._path}: {error}", path=self._path) from error
        self._check_open()
        assert self._file is not None
        return self._file

    def discard(self) -> None:
        """Close the driver of a workflow that never came to be: nothing was written, and it gets no file."""
        self._is_closed = True
        self._journal.note_filed(self._young)
        self._forget()

    async def _move(self) -> None:
        await self._journal.file(self._young)
        await self._journal.settle(self._young)
        self._file = await self._open_file(self._path)
        self._forget()

    def _forget(self) -> None:
        """Have what is in memory no longer, unless that is not in the file yet."""
        if self._young.is_filed:
            self._young.namespace = MemoryDriver()

    @trio.lowlevel.enable_ki_protection
    async def _close(self) -> None:
        if self._is_closed or self._pid != os.getpid():
            return
        try:
            if self._file is not None:
                await self._file.aclose()
            else:
                self._is_closed = True
                await self._journal.file(self._young)
        finally:
            # A file is still open if there was no thread to be had.
            self._is_closed = self._file is None or self._file.is_given_up
            self._forget()

    def _check_open(self) -> None:
        if self._is_closed:
            raise DriverClosedError(f"the driver of {self._path} is closed; open it again", path=self._path)

    def _check_owned(self) -> None:
        self._check_open()
        if self._pid != os.getpid():
            raise DriverClosedError(
                f"the driver of {self._path} belongs to process {self._pid}, of which this is a fork; open files in the "
                "process that uses them",
                path=self._path,
            )
