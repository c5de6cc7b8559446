"""The driver that keeps a namespace in one SQLite file.

1. A batch is one transaction. At `durability="full"` it is on disk when `batch` returns; at `"normal"` it survives the
   death of the process, and a power cut may lose the most recent batches, never part of one nor one from the middle.
2. One operation at a time. An operation that goes to a thread holds the turn; one that runs in place has no point at
   which another could start, so the usual case takes no lock at all.
3. Waiting for the turn can be cancelled; an operation that has begun cannot, and its outcome is always learned.
4. Where an operation runs is `pace.py`'s decision, what its errors mean `sqlite_namespace.py`'s.
5. A small batch that is not committed in place costs one hop to a thread (`crew.py`). If it only puts, that thread does its one
   statement, which commits by itself. Any other has its statements done in place all the same, and only COMMIT, which syncs,
   is handed over. Nothing runs on the connection in between; should COMMIT not be tried, the driver is given up.

Rejected: one thread of its own per driver. Thousands of drivers are open at once, and through any thread a lone
workflow commits at half the rate.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

import trio

from perdure.storage.crew import Crew, crew_of, is_anyone_waiting
from perdure.storage.driver import VALUE_BYTES_MAX, Batch, SingleWrites
from perdure.storage.errors import StorageError
from perdure.storage.layout import ALARM_KEY, decode_u64
from perdure.storage.limits import check_batch
from perdure.storage.pace import Pace, storage_limiter
from perdure.storage.sqlite_connection import (
    ConnectionFactory,
    Durability,
    ErrorMapper,
    classify_error,
    connect_file,
)
from perdure.storage.sqlite_file import FoundFile, MissingFile, OpenFile, look_for_file, make_file, open_file
from perdure.storage.sqlite_namespace import Namespace, only_puts

if TYPE_CHECKING:
    from sqlite_utils import Database

__all__ = ["CommitIn", "SqliteDriver"]

CommitIn: TypeAlias = Literal["auto", "inline", "thread"]
"""Where blocking work runs: on Trio's thread, in another, or as it is quicker."""

_COMMIT_ALONE_S: Final = 0.002
_READ_ALONE_S: Final = 0.02
_READ_CROWDED_S: Final = 0.0002
_READ_BYTES_PER_S: Final = 200e6
"""A cautious guess for the first read of a file, which usually lists most of it."""

_SMALL_ROWS: Final = 64
_SMALL_BYTES: Final = 65536
"""Up to here the statements of a batch take less time than handing them to a thread (some 30 us for one of five rows)."""

_ArgT = TypeVar("_ArgT")
_ResultT = TypeVar("_ResultT")


class SqliteDriver(SingleWrites):
    """A `Driver` over one SQLite file. Make one with `await SqliteDriver.open(path)`.

    Methods are checkpoints only when their work goes to a thread, or when they wait for another operation.
    """

    def __init__(
        self,
        opened: OpenFile,
        *,
        durability: Durability,
        commit_in: CommitIn,
        limiter: trio.CapacityLimiter | None,
        others_waiting: Callable[[], bool],
        map_error: ErrorMapper,
        value_bytes_max: int,
    ) -> None:
        self._namespace = Namespace(opened, map_error)
        self._durability: Durability = durability
        self._inline = commit_in == "inline"
        self._is_split = commit_in == "auto"
        self._limiter = limiter
        self._others_waiting = others_waiting
        self._value_bytes_max = value_bytes_max
        self._turn = trio.Lock()
        if commit_in == "auto":
            # At NORMAL a commit syncs nothing, so it cannot block for long.
            self._commits = Pace(alone_s=_COMMIT_ALONE_S, crowded_s=inf if durability == "normal" else 0.0)
            expected_s = opened.size_bytes / _READ_BYTES_PER_S
            self._reads = Pace(alone_s=_READ_ALONE_S, crowded_s=_READ_CROWDED_S, expected_s=expected_s)
        else:
            always = inf if self._inline else 0.0
            self._commits = self._reads = Pace(alone_s=always, crowded_s=always)

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        durability: Durability = "full",
        commit_in: CommitIn = "auto",
        limiter: trio.CapacityLimiter | None = None,
        others_waiting: Callable[[], bool] | None = None,
        connect: ConnectionFactory | None = None,
        map_error: ErrorMapper | None = None,
        value_bytes_max: int = VALUE_BYTES_MAX,
        checkpoint_on_close: bool = True,
    ) -> SqliteDriver:
        """Open a workflow's file and hold it until `aclose`. No other process can open it meanwhile.

        Cancelling this has an effect only while it waits for a thread.

        Args:
            path: The file. SQLite keeps its write-ahead log beside it, under the same name with `-wal` added.
            create: Whether a missing file is made, empty and durable on return, instead of being an error.
            durability: `"full"`: a batch survives a power cut once `batch` returns. `"normal"`: it survives the death
                of the process at once, and a power cut after the next checkpoint (every 2 MiB or so, and `aclose`).
            commit_in: Where blocking work runs. `"auto"`: on Trio's thread when that is quick and nobody would wait
                (at `"normal"`, always), otherwise in a worker thread. `"inline"`: never in a thread, as virtual time
                needs. `"thread"`: always in one.
            limiter: Bounds the worker threads; by default one that all drivers of this Trio run share.
            others_waiting: Says whether blocking Trio's thread now would keep something waiting; asked before each
                commit in `"auto"`. By default whether other tasks are runnable, or wait for what threads do.
            connect: Opens the database, for tests on another build of SQLite. The file itself is made and checked
                through the operating system.
            map_error: Classifies the errors of what `connect` returns.
            value_bytes_max: Largest value in bytes, at least 1.
            checkpoint_on_close: False leaves the write-ahead log beside the file (64 KiB to 2 MiB), which spares `aclose`
                some syncs; it has an effect at `"full"` from Python 3.12 on. Nothing is lost either way.

        Raises:
            NamespaceNotFoundError: There is no file, and `create` is false. The error's `workflow_id` is empty.
            StoreBusyError: It is open already, here or in another process.
            CorruptStoreError: It is damaged and was set aside; or that happened earlier, and it was not put back.
            FormatVersionError: A newer Perdure wrote it.
            OutOfDescriptorsError: A `StorageError`: no file descriptor is left; nothing is wrong with the file.
            StorageError: It is another program's, or cannot be read, written or made.
        """
        if value_bytes_max < 1:
            raise ValueError(f"value_bytes_max must be at least 1, not {value_bytes_max}")
        map_error = map_error or classify_error
        path = os.fspath(path)
        open_found = partial(
            open_file,
            durability=durability,
            checkpoint_on_close=checkpoint_on_close,
            connect=connect or connect_file,
            map_error=map_error,
        )

        def find_or_make() -> FoundFile:
            found = look_for_file(path, create=create)
            return make_file(found, has_log=durability == "full") if isinstance(found, MissingFile) else found

        def work() -> OpenFile:
            return open_found(find_or_make())

        if commit_in == "inline":
            opened = work()
        elif commit_in == "auto" and create:
            found = await crew_of(limiter or storage_limiter()).run(find_or_make)
            if found.is_new:
                # Only making it syncs the disk; what is read after that was just written.
                opened = _open_here(open_found, found)
            else:
                opened = await _to_thread(partial(open_found, found), limiter)
        else:
            opened = await _to_thread(work, limiter)
        return cls(
            opened,
            durability=durability,
            commit_in=commit_in,
            limiter=limiter,
            others_waiting=others_waiting or (lambda: is_anyone_waiting(limiter or storage_limiter())),
            map_error=map_error,
            value_bytes_max=value_bytes_max,
        )

    def __repr__(self) -> str:
        return f"<SqliteDriver {self.path!r} {'open' if self._namespace.is_open else 'closed'}>"

    def __del__(self) -> None:
        namespace: Namespace | None = getattr(self, "_namespace", None)
        if namespace is not None and namespace.is_open:
            warnings.warn(f"{self!r} was not closed; await its aclose()", ResourceWarning, source=self, stacklevel=1)
            namespace.give_up("it was abandoned without aclose()")

    @property
    def path(self) -> str:
        """The file, as it was given to `open`."""
        return self._namespace.path

    @property
    def durability(self) -> Durability:
        """What a batch survives once `batch` has returned."""
        return self._durability

    @property
    def atomic_batch(self) -> bool:
        """True: a batch is one transaction."""
        return True

    @property
    def value_bytes_max(self) -> int:
        """Largest value in bytes."""
        return self._value_bytes_max

    async def get(self, key: bytes) -> bytes | None:
        """The value at `key`, or `None`.

        Raises:
            CorruptStoreError: The file turned out to be damaged; it was set aside and the driver is closed.
            DriverClosedError: The driver was closed before.
            StorageError: It could not be read.
        """
        return await self._run(self._namespace.get, key, self._reads)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Every pair whose key starts with `prefix`, in bytewise order of keys; an empty prefix lists everything.

        Raises as `get` does.
        """
        return await self._run(self._namespace.list, prefix, self._reads)

    async def has_any(self, prefix: bytes) -> bool:
        """Whether any key starts with `prefix`; an empty one asks for any key. Reads no value. Raises as `get` does."""
        return await self._run(self._namespace.has_any, prefix, self._reads)

    async def batch(self, batch: Batch) -> None:
        """Apply a batch in one transaction. Once begun it is carried through, whatever is cancelled.

        Raises:
            ValueTooLargeError: A value is over the limit; nothing was written.
            BatchRefusedError: Nothing was written (the disk is full, the file is read-only, the alarm is out of range).
            CommitUnknownError: It may have been written or not; the driver is closed. Open the file again and look.
            CorruptStoreError: The file turned out to be damaged; it was set aside and the driver is closed.
            DriverClosedError: The driver was closed before.
        """
        check_batch(batch, self._value_bytes_max, path=self.path)
        if not self._turn.locked() and self._in_place(self._commits):
            self._timed(self._namespace.commit, batch, self._commits)
        elif self._is_split and (puts := only_puts(batch)) is not None:
            async with self._turn:
                await self._put_by_crew(puts)
        elif self._is_split and _is_small(batch):
            async with self._turn:
                await self._commit_by_crew(batch)
        else:
            await self._run(self._namespace.commit, batch, self._commits)

    @trio.lowlevel.enable_ki_protection
    async def _put_by_crew(self, puts: Sequence[bytes]) -> None:
        """Do the one statement in a thread; without a thread nothing was begun."""
        await self._crew().run(partial(self._timed, self._namespace.put, puts, self._commits))

    @trio.lowlevel.enable_ki_protection
    async def _commit_by_crew(self, batch: Batch) -> None:
        """Do the statements here, which sync nothing, and only COMMIT in a thread: so it wants Python's lock once or twice."""
        self._namespace.begin(batch)
        try:
            await self._crew().run(self._finish)
        except BaseException:
            if self._namespace.is_open:  # COMMIT was not tried, as there is no thread to be had
                self._namespace.give_up("a commit could not be begun")
            raise

    def _finish(self) -> None:
        started = perf_counter()
        try:
            self._namespace.finish()
        finally:
            self._commits.record(perf_counter() - started)

    def _crew(self) -> Crew:
        return crew_of(self._limiter or storage_limiter())

    def batch_nowait(self, batch: Batch) -> bool:
        """Apply a batch here and now, if nobody else would wait for it; see `NowaitDriver`. Raises as `batch` does."""
        if self._turn.locked() or not self._in_place(self._commits):
            self._namespace.connection()  # a driver that is closed says so, however slow its disk was
            return False
        check_batch(batch, self._value_bytes_max, path=self._namespace.path)
        self._timed(self._namespace.commit, batch, self._commits)
        return True

    async def get_alarm(self, workflow_id: str) -> int | None:
        """When the workflow is to be woken, in milliseconds since the epoch, or `None`. Raises as `get` does.

        Raises:
            DecodeError: What is stored there is not an alarm.
        """
        stored = await self.get(ALARM_KEY)
        return None if stored is None else decode_u64(stored)

    async def backup(self, target: str | os.PathLike[str]) -> None:
        """Write a compact, consistent copy of the file to `target`: complete and durable on return, or not there.

        Raises as `get` does.

        Raises:
            StorageError: `target` exists already, or cannot be written.
        """
        await self._run(self._namespace.backup, os.fspath(target), None)

    def database(self) -> Database:
        """A sqlite-utils view over this driver's own connection, to inspect the file with.

        Use it without awaiting in between, as the connection serves the driver too, and do not close it.

        Raises:
            DriverClosedError: The driver is closed.
            StorageError: An operation is in progress in a thread, or the connection is not the standard library's.
        """
        import sqlite3

        from sqlite_utils import Database

        connection = self._namespace.connection()
        if self._turn.locked():
            raise StorageError(f"{self.path} is in use; wait for the operation in progress", path=self.path)
        if not isinstance(connection, sqlite3.Connection):
            kind = type(connection).__name__
            raise StorageError(f"sqlite-utils needs a sqlite3.Connection, {self.path} has a {kind}", path=self.path)
        # Plugins may change a connection's settings, on which durability rests.
        return Database(connection, recursive_triggers=False, execute_plugins=False)

    async def aclose(self) -> None:
        """Close the file, after the operation in progress. Not interrupted by cancellation; closing twice is fine.

        On return everything written is durable, at either durability, and another process can open the file.

        Raises:
            StorageError: Closing failed. What was durable still is, and the file is given up.
        """
        with trio.CancelScope(shield=True):
            async with self._turn:
                if self._inline or not self._namespace.is_open:
                    self._namespace.close()
                else:
                    await self._crew().run(self._namespace.close)

    async def _run(self, work: Callable[[_ArgT], _ResultT], argument: _ArgT, pace: Pace | None) -> _ResultT:
        """Do some work on the connection, here or in a thread; without a pace, in a thread unless all is inline."""
        if not self._turn.locked() and self._in_place(pace):
            return self._timed(work, argument, pace)
        async with self._turn:
            if self._in_place(pace):
                return self._timed(work, argument, pace)
            with trio.CancelScope(shield=True):
                return await trio.to_thread.run_sync(
                    self._timed, work, argument, pace, limiter=self._limiter or storage_limiter()
                )
        raise AssertionError("nobody cancels the shielding scope")

    def _in_place(self, pace: Pace | None) -> bool:
        return self._inline if pace is None else pace.runs_in_place(self._others_waiting)

    @trio.lowlevel.enable_ki_protection
    def _timed(self, work: Callable[[_ArgT], _ResultT], argument: _ArgT, pace: Pace | None) -> _ResultT:
        started = perf_counter()
        try:
            return work(argument)
        finally:
            if pace is not None:
                pace.record(perf_counter() - started)


def _is_small(batch: Batch) -> bool:
    """Whether the statements of a batch take microseconds, so that handing them to a thread would take longer."""
    return (
        len(batch.puts) + len(batch.deletes) <= _SMALL_ROWS
        and not batch.delete_prefixes
        and not batch.delete_ranges
        and sum([len(value) for _, value in batch.puts]) <= _SMALL_BYTES
    )


async def _to_thread(work: Callable[[], OpenFile], limiter: trio.CapacityLimiter | None) -> OpenFile:
    return await trio.to_thread.run_sync(work, limiter=limiter or storage_limiter())


@trio.lowlevel.enable_ki_protection
def _open_here(open_found: Callable[[FoundFile], OpenFile], found: FoundFile) -> OpenFile:
    return open_found(found)
