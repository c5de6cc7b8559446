"""SQLite as it is shipped by `apsw`, over a VFS that tells a `Recording` what it does to files.

1. The VFS does everything through SQLite's own, on real files; so locks, sizes and the device's characteristics, such as
   "powersafe overwrite", are those of the shipped driver.
2. Within its own VFS, SQLite also syncs the directory: when it first syncs a log or a journal that it opened in order to
   make it, and when it deletes a file and is asked to make that safe. The first is not seen from here, so it is known.
3. A connection is used as the standard library's is, and its errors are that library's, with their codes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Protocol, TypeVar

import apsw

from perdure.storage.sqlite_connection import Fault, classify_error

__all__ = ["ApswConnection", "Notes", "Vfs", "map_error"]

_numbers = count(1)
_T = TypeVar("_T")

_NEW_JOURNALS = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL


class Notes(Protocol):
    """What a `Recording` is told."""

    def holds(self, path: str) -> bool: ...
    def file(self, path: str, *, create: bool = ...) -> Any: ...
    def wrote(self, file: Any, offset: int, data: bytes) -> None: ...
    def truncated(self, file: Any, size: int) -> None: ...
    def synced(self, node: Any) -> None: ...
    def synced_directory_of(self, path: str) -> None: ...
    def unlinked(self, path: str) -> None: ...


class Vfs(apsw.VFS):
    """SQLite's usual VFS, with everything noted that it does to the files of a recording."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.name = f"power-{next(_numbers)}"
        super().__init__(self.name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        if path is None or not self.notes.holds(path):
            return apsw.VFSFile("", name, flags)
        return _VfsFile(self.notes, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self.notes.unlinked(filename)
        if syncdir:
            self.notes.synced_directory_of(filename)


class _VfsFile(apsw.VFSFile):
    def __init__(self, notes: Notes, path: str, name: Any, flags: list[int]) -> None:
        asked = flags[0]
        super().__init__("", name, flags)
        self._notes = notes
        self._path = path
        creates = bool(asked & apsw.SQLITE_OPEN_CREATE)
        self._file = notes.file(path, create=creates)
        self._syncs_directory = creates and bool(asked & _NEW_JOURNALS)

    def xWrite(self, data: Any, offset: int) -> None:
        super().xWrite(data, offset)
        self._notes.wrote(self._file, offset, bytes(data))

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        self._notes.truncated(self._file, newsize)

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._notes.synced(self._file)
        if self._syncs_directory:
            self._syncs_directory = False
            self._notes.synced_directory_of(self._path)


def as_sqlite3(error: apsw.Error) -> sqlite3.Error:
    """The error that the standard library would have raised."""
    code = getattr(error, "extendedresult", apsw.SQLITE_ERROR)
    damaged = code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    translated = (sqlite3.DatabaseError if damaged else sqlite3.OperationalError)(str(error))
    translated.sqlite_errorcode = code
    return translated


def map_error(error: BaseException) -> Fault:
    """The `ErrorMapper` for connections of this module: what the shipped one makes of the same code."""
    return classify_error(as_sqlite3(error) if isinstance(error, apsw.Error) else error)


class ApswConnection:
    """A connection of `apsw` that is used like one of `sqlite3`, in autocommit mode.

    Args:
        path: The file.
        vfs: What its files go through.
        create: Whether a missing file is made.
        translates: Whether errors are those of `sqlite3`; else they are for `map_error`.

    Attributes:
        statements: What was executed.
    """

    def __init__(self, path: str, vfs: Vfs, *, create: bool = False, translates: bool = False) -> None:
        flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if create else 0)
        self._translates = translates
        self.statements: list[str] = []
        self._connection = self._run(lambda: apsw.Connection(path, flags, vfs.name))
        self._connection.setbusytimeout(0)

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> _Rows:
        self.statements.append(sql)
        return _Rows(self._run, self._run(lambda: self._connection.execute(sql, tuple(parameters))), self._connection)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object:
        self.statements.append(sql)
        return self._run(lambda: self._connection.executemany(sql, [tuple(each) for each in parameters]).fetchall())

    def setconfig(self, option: int, enable: bool = True, /) -> None:
        self._connection.config(option, int(enable))

    def close(self) -> None:
        self._run(self._connection.close)

    def _run(self, do: Callable[[], _T]) -> _T:
        try:
            return do()
        except apsw.Error as error:
            if self._translates:
                raise as_sqlite3(error) from error
            raise


class _Rows:
    def __init__(self, run: Callable[[Callable[[], Any]], Any], cursor: apsw.Cursor, connection: Any) -> None:
        self._run = run
        self._cursor = cursor
        self.rowcount: int = connection.changes()

    def fetchone(self) -> Any:
        return self._run(self._cursor.fetchone)

    def fetchall(self) -> list[Any]:
        rows: list[Any] = self._run(self._cursor.fetchall)
        return rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())
