"""What a file driver needs of SQLite, and what SQLite's errors mean for it.

1. The driver's hot path uses `execute`, `executemany`, the fetch methods, `in_transaction` and `close`, and nothing
   else, so that tests can put another build of SQLite, or one that fails on demand, under it (`ConnectionFactory`).
2. An error is classified by its code alone (`Fault`). What it finally means also depends on when it came: the same "disk
   full" is a refusal in a statement and an unknown outcome in COMMIT. Of a statement that commits too, the class has to say
   whether the error may have come from its commit.
3. Every setting that durability or exclusion rests on is read back. SQLite answers a setting it cannot apply with the
   old value and no error, as a build without WAL or a file system without locks would show.

Rejected: telling errors apart by exception class, as `sqlite3.OperationalError` covers a full disk, a locked file and a
failed fsync alike.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final, Literal, Protocol, TypeAlias
from urllib.parse import quote

from perdure.storage.errors import StorageError

__all__ = [
    "PAGE_BYTES",
    "WAL_PAGES_MAX",
    "Connection",
    "ConnectionFactory",
    "Durability",
    "ErrorMapper",
    "Fault",
    "Rows",
    "classify_error",
    "configure",
    "connect_file",
    "read_setting",
    "skip_checkpoint_on_close",
]

Durability: TypeAlias = Literal["full", "normal"]
"""What an acknowledged batch survives: a power cut, or only the death of the process."""

PAGE_BYTES: Final = 4096
"""Page size of new files. Rows of up to 1,002 bytes stay whole in a page of this size, as most step results do; with
1,024-byte pages anything over 230 bytes takes an overflow page of its own. Measured at FULL, sizes from 1,024 to 8,192
commit equally fast; at NORMAL 1,024 is a fifth faster and 8,192 a fifth slower."""

WAL_PAGES_MAX: Final = 512
"""Pages in the write-ahead log at which a commit also checkpoints. It bounds the log to about 2 MiB per open file, as
thousands are open at once, and costs two fsyncs per some 200 commits: not measurable at FULL, a tenth at NORMAL."""

_CACHE_KIB: Final = 256
"""A workflow writes at the right edge of a few key ranges; 64 pages hold those, and thousands of caches stay small."""


class Rows(Protocol):
    """What a query returns."""

    def fetchone(self) -> Any:
        """The next row, or `None`."""
        ...

    def fetchall(self) -> list[Any]:
        """All rows that are left."""
        ...


class Connection(Protocol):
    """The part of `sqlite3.Connection` that the driver uses."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Rows:
        """Run one statement."""
        ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object:
        """Run one statement for each row of parameters."""
        ...

    def close(self) -> None:
        """Close the connection; a transaction in progress is rolled back."""
        ...


ConnectionFactory: TypeAlias = Callable[[str], Connection]
"""Opens the database file at a path, which exists, in autocommit mode and usable from any thread, one at a time."""


class Fault(Enum):
    """What an error of SQLite lets the driver do."""

    REFUSED = "refused"
    """The statement did nothing and the connection is sound: a read-only file, too big a value. No commit fails so."""
    FULL = "full"
    """There is no room. A statement within a transaction did nothing; a commit may have been done or not."""
    EXHAUSTED = "exhausted"
    """Memory or descriptors ran out. A statement within a transaction did nothing; a commit may have been done or not."""
    BUSY = "busy"
    """Somebody else has the file; nothing was done, and no commit begun."""
    CORRUPT = "corrupt"
    """The file is not a database, or a damaged one. Found in reading it, as committing does not."""
    UNKNOWN = "unknown"
    """Anything else, such as an I/O error: what reached the disk cannot be told, and the connection is in doubt."""


ErrorMapper: TypeAlias = Callable[[BaseException], Fault]
"""Classifies an error that a connection raised."""

_FAULTS: Final = {
    sqlite3.SQLITE_BUSY: Fault.BUSY,
    sqlite3.SQLITE_LOCKED: Fault.BUSY,
    sqlite3.SQLITE_CORRUPT: Fault.CORRUPT,
    sqlite3.SQLITE_NOTADB: Fault.CORRUPT,
    sqlite3.SQLITE_FULL: Fault.FULL,
    sqlite3.SQLITE_READONLY: Fault.REFUSED,
    sqlite3.SQLITE_CANTOPEN: Fault.EXHAUSTED,
    sqlite3.SQLITE_PERM: Fault.REFUSED,
    sqlite3.SQLITE_TOOBIG: Fault.REFUSED,
    sqlite3.SQLITE_NOMEM: Fault.EXHAUSTED,
    sqlite3.SQLITE_CONSTRAINT: Fault.REFUSED,
    sqlite3.SQLITE_MISMATCH: Fault.REFUSED,
    sqlite3.SQLITE_ERROR: Fault.REFUSED,
}


def classify_error(error: BaseException) -> Fault:
    """The `ErrorMapper` for the standard library's `sqlite3`."""
    if not isinstance(error, sqlite3.Error):
        # A TypeError for a value of the wrong type is raised before SQLite sees the statement, a MemoryError at any time.
        return Fault.EXHAUSTED if isinstance(error, MemoryError) else Fault.REFUSED
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        # Raised by the Python module itself: a parameter that cannot be bound.
        return Fault.REFUSED
    return _FAULTS.get(code & 0xFF, Fault.UNKNOWN)


def connect_file(path: str) -> sqlite3.Connection:
    """The `ConnectionFactory` for the standard library's `sqlite3`. Never creates the file, never waits for a lock."""
    return sqlite3.connect(
        f"file:{quote(os.path.abspath(path))}?mode=rw",
        uri=True,
        timeout=0,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=32,
    )


def read_setting(connection: Connection, name: str) -> Any:
    """The value of a PRAGMA, `None` when it has none."""
    row = connection.execute(f"PRAGMA {name}").fetchone()
    return None if row is None else row[0]


def configure(connection: Connection, *, durability: Durability, path: str) -> None:
    """Make the connection what the driver relies on, and check that it is. Its lock on the file is held already.

    Raises:
        StorageError: SQLite did not take a setting.
        Exception: Whatever the connection raises.
    """
    _require(connection, "journal_mode=WAL", "wal", path)
    if sys.platform == "darwin":
        # There, a plain fsync leaves the data in the drive's own cache.
        _require(connection, "fullfsync=1", 1, path)
        _require(connection, "checkpoint_fullfsync=1", 1, path)
    level = 2 if durability == "full" else 1
    if read_setting(connection, "synchronous") != level:  # most builds of SQLite begin with FULL
        _require(connection, f"synchronous={level}", level, path)
    _require(connection, f"wal_autocheckpoint={WAL_PAGES_MAX}", WAL_PAGES_MAX, path)
    # A single large batch can grow the log past its bound; it is cut back when it starts over.
    connection.execute(f"PRAGMA journal_size_limit={WAL_PAGES_MAX * PAGE_BYTES}").fetchall()
    connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}").fetchall()


def skip_checkpoint_on_close(connection: Connection) -> None:
    """Have `close` leave the write-ahead log as it is, where Python can (3.12 and later); otherwise nothing changes."""
    set_config = getattr(connection, "setconfig", None)
    option = getattr(sqlite3, "SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE", None)
    if set_config is not None and option is not None:
        set_config(option, True)


def _require(connection: Connection, assignment: str, wanted: object, path: str) -> None:
    answer = connection.execute(f"PRAGMA {assignment}").fetchone()
    # Some settings answer with what they are now, the others have to be asked.
    found = read_setting(connection, assignment.partition("=")[0]) if answer is None else answer[0]
    if found != wanted:
        raise StorageError(
            f"SQLite did not accept PRAGMA {assignment} for {path} (it stayed {found!r}); use a local disk and a "
            "complete build of SQLite",
            path=path,
        )
