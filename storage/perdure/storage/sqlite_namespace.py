"""The synchronous half of the SQLite driver: the statements, and what their errors mean.

1. A batch is one transaction. A batch that only puts some rows is one statement, which SQLite commits by itself; anything
   else is its statements between BEGIN and COMMIT.
2. What an error means follows from when it came. Before COMMIT, and after a clean rollback, nothing was written
   (`BatchRefusedError`). From COMMIT on, or when the connection itself is in doubt (an I/O error, a failed rollback),
   the outcome is unknown: the connection is closed there and then and never used again (`CommitUnknownError`).
3. Of the one statement an error says itself when it came, by its kind. What SQLite only finds before it commits is an
   error of the statement: a read-only file, too big a value, damage (committing reads no page of the database). Whatever
   may come from the commit is one of COMMIT: an I/O error, a lack of memory, an interrupt, what nobody knows.
4. A full disk is met in the statement or in its commit, and then it may be that the log holds the whole batch (measured:
   with `psow=0`, a process that dies after that error leaves it to the next). So the statement is done again, in a
   transaction that is rolled back: if it meets the full disk there too, it came to no commit the first time.
5. An error that says "damaged" sets the file aside while its lock is still held.
6. A forked child never touches its parent's connection, not even to close it.

An I/O error of a statement counts as unknown although no COMMIT was tried: SQLite may have been syncing the log's
header, and a sync that failed is not reported again, so a later commit here could be acknowledged and lost.

Rejected: SQLite's own waiting (`busy_timeout`). A file has one opener here, so a lock that is taken is a mistake to be
reported, not waited out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Final, NoReturn

from perdure.storage.descriptors import out_of_descriptors
from perdure.storage.driver import Batch
from perdure.storage.errors import BatchRefusedError, CommitUnknownError, DriverClosedError, StorageError
from perdure.storage.keys import prefix_end
from perdure.storage.layout import ALARM_KEY
from perdure.storage.limits import alarm_value
from perdure.storage.sqlite_connection import Connection, ErrorMapper, Fault
from perdure.storage.sqlite_file import OpenFile, close_file, set_aside
from perdure.storage.sqlite_image import copy_file

__all__ = ["Namespace", "only_puts"]

_GET: Final = "SELECT value FROM kv WHERE key = ?"
_LIST: Final = "SELECT key, value FROM kv WHERE key >= ? AND key < ? ORDER BY key"
_LIST_FROM: Final = "SELECT key, value FROM kv WHERE key >= ? ORDER BY key"
_ANY: Final = "SELECT 1 FROM kv WHERE key >= ? AND key < ? LIMIT 1"
_ANY_FROM: Final = "SELECT 1 FROM kv WHERE key >= ? LIMIT 1"
_PUT: Final = "REPLACE INTO kv (key, value) VALUES (?, ?)"
_PUTS_MAX: Final = 12
_PUTS: Final = {2 * rows: _PUT + ", (?, ?)" * (rows - 1) for rows in range(1, _PUTS_MAX + 1)}
"""The same for one row and more, by their parameters: the key and the value of each."""
_DELETE: Final = "DELETE FROM kv WHERE key = ?"
_DELETE_RANGE: Final = "DELETE FROM kv WHERE key >= ? AND key < ?"
_DELETE_FROM: Final = "DELETE FROM kv WHERE key >= ?"


class _Phase(Enum):
    BEGIN = "begin"
    STATEMENT = "statement"
    COMMIT = "commit"


class Namespace:
    """The table of one open file. One thread at a time; every method blocks.

    Args:
        file: The open file; it is closed by `close`, or by an error that makes it unusable.
        map_error: Classifies the errors of its connection.
    """

    def __init__(self, file: OpenFile, map_error: ErrorMapper) -> None:
        self.path: str = file.path
        self._file = file
        self._map_error = map_error
        self._connection: Connection | None = file.connection
        self._closed_why = "it was closed"
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, and it is this process's."""
        return self._connection is not None and self._pid == os.getpid()

    def connection(self) -> Connection:
        """The connection, for use on this thread.

        Raises:
            DriverClosedError: It is closed, or it belongs to the process that this one was forked from.
        """
        connection = self._connection
        if connection is None:
            raise DriverClosedError(
                f"the driver of {self.path} cannot be used: {self._closed_why}; open it again", path=self.path
            )
        if self._pid != os.getpid():
            raise DriverClosedError(
                f"the driver of {self.path} belongs to process {self._pid}, of which this is a fork; open files in the "
                "process that uses them",
                path=self.path,
            )
        return connection

    def get(self, key: bytes) -> bytes | None:
        """The value at `key`, or `None`."""
        connection = self.connection()
        try:
            row = connection.execute(_GET, (key,)).fetchone()
        except Exception as error:
            self._read_failed(error, f"cannot read {self.path}")
        return None if row is None else row[0]

    def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Every pair whose key starts with `prefix`, in order of keys."""
        connection = self.connection()
        end = prefix_end(prefix)
        try:
            if end is None:
                return connection.execute(_LIST_FROM, (prefix,)).fetchall()
            return connection.execute(_LIST, (prefix, end)).fetchall()
        except Exception as error:
            self._read_failed(error, f"cannot read {self.path}")

    def has_any(self, prefix: bytes) -> bool:
        """Whether any key starts with `prefix`."""
        connection = self.connection()
        end = prefix_end(prefix)
        try:
            if end is None:
                return connection.execute(_ANY_FROM, (prefix,)).fetchone() is not None
            return connection.execute(_ANY, (prefix, end)).fetchone() is not None
        except Exception as error:
            self._read_failed(error, f"cannot read {self.path}")

    def backup(self, target: str) -> None:
        """Write a compact copy to `target`, durable on return."""
        connection = self.connection()
        target = os.path.abspath(target)
        try:
            copy_file(connection, target)
        except StorageError:
            raise
        except Exception as error:
            if self._map_error(error) is Fault.CORRUPT:
                self._set_aside(error)
            what = f"cannot copy {self.path} to {target}"
            raise out_of_descriptors(what, error, path=target) or StorageError(
                f"{what}: {error}", path=target
            ) from error

    def commit(self, batch: Batch) -> None:
        """Apply a checked batch in one transaction; it is as durable on return as the connection makes it."""
        puts = only_puts(batch)
        if puts is None:
            self.begin(batch)
            self.finish()
        else:
            self.put(puts)

    def put(self, puts: Sequence[bytes]) -> None:
        """Apply a batch that `only_puts` has taken, in one statement; it is as durable on return as the connection makes it."""
        connection = self.connection()
        try:
            connection.execute(_PUTS[len(puts)], puts)
        except BaseException as error:
            self._write_failed(error, self._phase_of(error, puts, connection), connection)
        self._file.room.note_commit()

    def begin(self, batch: Batch) -> None:
        """Put a checked batch into a transaction that is left open; `finish` has to follow, and nothing else may come before.

        Syncs nothing, and reads only the pages that it changes.
        """
        connection = self.connection()
        phase = _Phase.BEGIN
        try:
            execute = connection.execute
            execute("BEGIN IMMEDIATE")
            phase = _Phase.STATEMENT
            if batch.deletes:
                _delete(connection, batch.deletes)
            for prefix in batch.delete_prefixes:
                end = prefix_end(prefix)
                if end is None:
                    execute(_DELETE_FROM, (prefix,))
                else:
                    execute(_DELETE_RANGE, (prefix, end))
            if batch.delete_ranges:
                connection.executemany(_DELETE_RANGE, batch.delete_ranges)
            if batch.puts:
                _put(connection, batch.puts)
            if batch.alarm is not None:
                stored = alarm_value(batch.alarm)
                if stored is None:
                    execute(_DELETE, (ALARM_KEY,))
                else:
                    execute(_PUT, (ALARM_KEY, stored))
        except BaseException as error:
            self._write_failed(error, phase, connection)

    def finish(self) -> None:
        """Commit what `begin` has put into the transaction; it is as durable on return as the connection makes it."""
        connection = self.connection()
        try:
            connection.execute("COMMIT")
        except BaseException as error:
            self._write_failed(error, _Phase.COMMIT, connection)
        self._file.room.note_commit()

    def close(self) -> None:
        """Close the connection and give up the file. Closing twice is fine; a forked child only forgets it.

        Raises:
            StorageError: Closing failed; the file is given up all the same.
        """
        is_open = self.is_open
        self._connection = None
        if not is_open:
            return
        try:
            close_file(self._file)
        except Exception as error:
            raise StorageError(f"cannot close {self.path} cleanly: {error}", path=self.path) from error

    def give_up(self, why: str) -> None:
        """Close a connection that is not to be used again; what closing it says about that is of no interest."""
        self._connection = None
        self._closed_why = why
        with suppress(Exception):
            close_file(self._file)

    def _phase_of(self, error: BaseException, puts: Sequence[bytes], connection: Connection) -> _Phase:
        """When an error came of the one statement that commits too; in doubt, in its commit."""
        if not isinstance(error, Exception):
            return _Phase.COMMIT
        match self._map_error(error):
            case Fault.REFUSED | Fault.BUSY | Fault.CORRUPT:
                return _Phase.STATEMENT
            case Fault.FULL:
                return _Phase.STATEMENT if self._is_full_for(puts, connection) else _Phase.COMMIT
            case Fault.EXHAUSTED | Fault.UNKNOWN:
                return _Phase.COMMIT

    def _is_full_for(self, puts: Sequence[bytes], connection: Connection) -> bool:
        """Whether the disk is full for the statement itself, too. May leave a transaction open, for `_write_failed` to end."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_PUTS[len(puts)], puts)
        except Exception as error:
            return self._map_error(error) is Fault.FULL
        except BaseException:
            self.give_up("the outcome of a commit is unknown")
            raise
        return False

    def _write_failed(self, error: BaseException, phase: _Phase, connection: Connection) -> NoReturn:
        """Bring the connection to a known state, or close it; raise what the error means."""
        fault = self._map_error(error)
        if fault is Fault.CORRUPT and phase is not _Phase.COMMIT:
            self._set_aside(error)
        doubtful = phase is _Phase.COMMIT or (phase is _Phase.STATEMENT and fault is Fault.UNKNOWN)
        if doubtful or not _undo(connection):
            self.give_up("the outcome of a commit is unknown")
            if not isinstance(error, Exception):
                raise error
            raise CommitUnknownError(
                f"a commit to {self.path} failed ({error}) and may have happened or not; open the file again and read",
                path=self.path,
            ) from error
        if not isinstance(error, Exception):
            raise error
        raise BatchRefusedError(f"nothing was written to {self.path}: {error}", path=self.path) from error

    def _read_failed(self, error: Exception, what: str) -> NoReturn:
        if self._map_error(error) is Fault.CORRUPT:
            self._set_aside(error)
        raise out_of_descriptors(what, error, path=self.path) or StorageError(
            f"{what}: {error}", path=self.path
        ) from error

    def _set_aside(self, error: BaseException) -> NoReturn:
        corrupt = set_aside(self._file.path, self._file.real_path, str(error))
        self.give_up("its file is damaged")
        raise corrupt from error


def only_puts(batch: Batch) -> list[bytes] | None:
    """What `Namespace.put` writes for a checked batch: keys and values in turn. `None` if one statement cannot write it.

    An alarm that is set is one more row.
    """
    if batch.deletes or batch.delete_prefixes or batch.delete_ranges or len(batch.puts) > _PUTS_MAX:
        return None
    puts = [part for pair in batch.puts for part in pair]
    if batch.alarm is not None:
        stored = alarm_value(batch.alarm)
        if stored is None:
            return None
        puts += (ALARM_KEY, stored)
    return puts if len(puts) in _PUTS else None


def _put(connection: Connection, pairs: Sequence[tuple[bytes, bytes]]) -> None:
    if len(pairs) > _PUTS_MAX:
        connection.executemany(_PUT, pairs)
    else:
        # In one statement: SQLite's module gives up Python's lock some three times in each, and each time may wait for it.
        connection.execute(_PUTS[2 * len(pairs)], [part for pair in pairs for part in pair])


def _delete(connection: Connection, keys: Sequence[bytes]) -> None:
    if len(keys) > 1:
        connection.executemany(_DELETE, [(key,) for key in keys])
    else:
        connection.execute(_DELETE, keys)


def _undo(connection: Connection) -> bool:
    """Roll back, unless SQLite has done so by itself; whether nothing is left of the transaction."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except Exception:
        return False
    return not connection.in_transaction
