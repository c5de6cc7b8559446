"""The catalog: an index over all workflows of a data directory, in one SQLite file.

1. It is an index. All that it says can be read again from the workflow files, so it runs at `synchronous=NORMAL`: what
   was written survives the death of the process, and a power cut may take the last of it. Whether that can have
   happened is decided from `meta` (see `Meta`), and then the catalog is rebuilt (`rebuild.py`), never repaired.
2. Each method is one transaction. None of them opens a workflow's file.
3. Due rows, lists and counts are answered from indexes (`catalog_questions.py`); no question costs more than its answer,
   but for the count of all rows.
4. `files` says which file of a workflow is current. It is apart from `workflows` because the store owns the one and the
   supervisor the other: a row may come before its file and a file before its row.

Rejected: counters kept beside the rows. They make every write touch a row that all writers share, and can be wrong.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.storage import catalog_questions
from perdure.storage.catalog_rows import add_row, corrected, get_row, put_row, remove_row, row_of, select_rows, storable
from perdure.storage.catalog_schema import (
    APPLICATION_ID,
    FIND_DUE,
    FIND_ENDED,
    FIND_FILE,
    INTEGER_MAX,
    NEXT_WAKE,
    PAGE_BYTES,
    SCHEMA,
    SCHEMA_VERSION,
    SELECT_FILE,
    STORAGE_PROBLEM,
    WAL_BYTES_MAX,
)
from perdure.storage.descriptors import out_of_descriptors
from perdure.storage.errors import CorruptStoreError, StorageError, StoreBusyError
from perdure.storage.process_lock import keep_in_fork, release_from_fork
from perdure.storage.question import Question
from perdure.storage.store import CatalogRow

if TYPE_CHECKING:
    import sqlite_utils

__all__ = ["Catalog", "FileRecord", "Meta"]


@dataclass(frozen=True, slots=True)
class Meta:
    """Whether a catalog can be trusted.

    Attributes:
        session: The ownership that wrote it last; it must be the one that the lock file names.
        boot_id: The start of the machine in which it was opened; `None` when that could not be known.
        clean: Whether its owner closed it. A catalog that was not closed is trusted only while the machine runs on.
    """

    session: int
    boot_id: str | None
    clean: bool


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The current file of a workflow.

    Attributes:
        workflow_id: Whose file.
        file: Its name in `workflows/`.
        set_aside: Whether damaged copies of it may lie beside it.
        problem: The problem of its row, which is not kept here.
    """

    workflow_id: str
    file: str
    set_aside: bool = False
    problem: str | None = None


class Catalog:
    """One open catalog file. Synchronous: the store decides in which thread. A call that comes meanwhile waits."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._log_path = f"{path}-wal"
        self._connection = connection
        self._lock = threading.RLock()
        keep_in_fork(connection)

    @classmethod
    def open(cls, path: Path, *, auto_checkpoint: bool = True) -> Catalog:
        """Open the file, or begin an empty one; `is_whole` tells whether it can be used as it is.

        Args:
            path: The file.
            auto_checkpoint: Whether a write may also bound the write-ahead log, which syncs the disk; otherwise
                `checkpoint` has to be called when `needs_checkpoint`.

        Raises:
            CorruptStoreError: It is not a database.
            StoreBusyError: Somebody else has it open.
            StorageError: It cannot be opened.
        """
        with _errors(path):
            connection = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
        try:
            # Judged before the connection gives its descriptors back.
            with _errors(path):
                connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_MAX}")
                connection.execute(
                    f"PRAGMA wal_autocheckpoint = {WAL_BYTES_MAX // PAGE_BYTES if auto_checkpoint else 0}"
                )
                connection.execute("PRAGMA fullfsync = ON")
                connection.execute("PRAGMA checkpoint_fullfsync = ON")
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except BaseException:
            connection.close()
            raise
        return cls(path, connection)

    def is_whole(self) -> bool:
        """Whether this is a catalog of ours, of this version and undamaged. Reads the whole file (1 ms per MB)."""
        try:
            if self._value("PRAGMA application_id") != APPLICATION_ID or self._value("PRAGMA user_version") != (
                SCHEMA_VERSION
            ):
                return False
            found = dict(self._connection.execute("SELECT name, sql FROM sqlite_schema").fetchall())
            return SCHEMA.items() <= found.items() and self._value("PRAGMA quick_check(1)") == "ok"
        except sqlite3.Error:
            return False

    def start(self) -> None:
        """Begin the transaction of a rebuild, in an empty file: until `finish` the file is no catalog."""
        with self._using():
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in SCHEMA.values():
                self._connection.execute(statement)

    def add(self, rows: Iterable[tuple[CatalogRow, FileRecord]]) -> None:
        """Add what a rebuild found, inside its transaction."""
        with self._using():
            for row, record in rows:
                put_row(self._connection, row)
                self._connection.execute(
                    "INSERT INTO files VALUES (?, ?, ?)", (record.workflow_id, record.file, record.set_aside)
                )

    def finish(self) -> None:
        """End the transaction of a rebuild."""
        with self._using():
            self._connection.execute("COMMIT")

    # What the store keeps.

    def meta(self) -> Meta | None:
        """Who wrote this catalog, or `None` when it does not say."""
        with self._using():
            pairs = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
        session, boot_id, clean = pairs.get("session"), pairs.get("boot_id"), pairs.get("clean")
        if not isinstance(session, int):
            return None
        return Meta(session, boot_id if isinstance(boot_id, str) else None, clean == 1)

    def set_meta(self, meta: Meta) -> None:
        """Write who owns the catalog; this, and all that was written before it, is durable on return."""
        with self._using():
            self._connection.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                self._connection.executemany(
                    "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                    [("session", meta.session), ("boot_id", meta.boot_id), ("clean", int(meta.clean))],
                )
            self._connection.execute("PRAGMA synchronous = NORMAL")

    def file(self, workflow_id: str) -> FileRecord | None:
        """The current file of a workflow, or `None` when none was made."""
        return self._record("f.workflow_id = ?", workflow_id)

    def file_of_stem(self, stem: str) -> FileRecord | None:
        """The record whose file has this stem, under whatever id it is kept."""
        return self._record("f.file >= ? AND f.file < ?", stem + ".", stem + "/")

    def find_file(self, workflow_id: str, stem: str) -> FileRecord | None:
        """The current file of a workflow; if none was made, the record whose file has this stem, if there is one."""
        records = self._records(FIND_FILE, (workflow_id, stem + ".", stem + "/"))
        return max(records, key=lambda record: record.workflow_id == workflow_id, default=None)

    def has_file(self, name: str) -> bool:
        """Whether a file of this name is current."""
        return self._record("f.file = ?", name) is not None

    def list_files(self, after: str, limit: int) -> list[FileRecord]:
        """The current files, in order of workflow id, those after the id `after`, at most `limit`."""
        return self._records(f"{SELECT_FILE} WHERE f.workflow_id > ? ORDER BY f.workflow_id LIMIT ?", (after, limit))

    def put_file(self, record: FileRecord, row: CatalogRow | None = None) -> None:
        """Say which file of a workflow is current, and put its row, if one is given."""
        with self._using(), self._transaction():
            if row is not None:
                add_row(self._connection, row)
            self._connection.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (record.workflow_id, record.file, record.set_aside)
            )

    def move(self, record: FileRecord, workflow_id: str) -> FileRecord:
        """Give a file, and its row unless there is one already, to another id."""
        with self._using(), self._transaction():
            self._connection.execute(
                "UPDATE OR IGNORE files SET workflow_id = ? WHERE workflow_id = ?", (workflow_id, record.workflow_id)
            )
            row, taken = (get_row(self._connection, each) for each in (record.workflow_id, workflow_id))
            if row is not None:
                remove_row(self._connection, row.workflow_id)
                if taken is None:
                    put_row(self._connection, replace(row, workflow_id=workflow_id))
        return replace(record, workflow_id=workflow_id)

    def settle(self, row: CatalogRow, record: FileRecord) -> None:
        """Replace a row with what its file turned out to say; when the workflow was made stays as it was known."""
        with self._using(), self._transaction():
            created = self._value("SELECT created_at_ms FROM workflows WHERE workflow_id = ?", record.workflow_id)
            put_row(self._connection, row if created is None else replace(row, created_at_ms=created))

    def correct(self, before: CatalogRow | None, read: CatalogRow, *, is_open: bool) -> bool:
        """Make a row what its namespace calls for, unless it changed since it was `before`; whether that changed it."""
        with self._using(), self._transaction():
            if get_row(self._connection, read.workflow_id) != before:
                return False
            row = corrected(before, storable(read), is_open=is_open)
            if row != before:
                put_row(self._connection, row)
            return row != before

    def clear_problem(self, workflow_id: str) -> None:
        """Clear the problem of a row, if there is one, and make the workflow due at once."""
        with self._using(), self._transaction():
            self._connection.execute(
                "UPDATE workflows SET problem = NULL, next_wake_ms = 0 WHERE workflow_id = ?", (workflow_id,)
            )

    def mark(self, record: FileRecord, problem: str, *, set_aside: bool) -> None:
        """Write that a workflow's file cannot be used, and whether a damaged copy of it was set aside."""
        with self._using(), self._transaction():
            self._connection.execute(
                "UPDATE workflows SET problem = ? WHERE workflow_id = ?",
                ((STORAGE_PROBLEM + problem).encode(errors="backslashreplace").decode(), record.workflow_id),
            )
            if set_aside:
                self._connection.execute("UPDATE files SET set_aside = 1 WHERE workflow_id = ?", (record.workflow_id,))

    def storage_problems(self) -> list[FileRecord]:
        """The files of the workflows that the store could not read."""
        return self._records(
            f"{SELECT_FILE} WHERE w.problem IS NOT NULL AND substr(w.problem, 1, ?) = ?",
            (len(STORAGE_PROBLEM), STORAGE_PROBLEM),
        )

    def begin_delete(self, record: FileRecord) -> None:
        """Note that a workflow's files are about to go."""
        with self._using(), self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO deletions VALUES (?, ?, ?)", (record.workflow_id, record.file, record.set_aside)
            )

    def deletions(self) -> list[FileRecord]:
        """The deletions that were begun and not finished."""
        return self._records("SELECT workflow_id, file, set_aside, NULL FROM deletions", ())

    def cancel_delete(self, workflow_id: str) -> None:
        """Forget a deletion that could not begin."""
        with self._using(), self._transaction():
            self._connection.execute("DELETE FROM deletions WHERE workflow_id = ?", (workflow_id,))

    def finish_delete(self, workflow_id: str) -> None:
        """Remove all that is known of a workflow."""
        with self._using(), self._transaction():
            remove_row(self._connection, workflow_id)
            for table in ("files", "deletions"):
                self._connection.execute(f"DELETE FROM {table} WHERE workflow_id = ?", (workflow_id,))

    # What the supervisor keeps: the methods of `Store`.

    def put_rows(self, rows: Sequence[CatalogRow]) -> None:
        """Insert or replace rows; all of them or none."""
        with self._using(), self._transaction():
            for row in rows:
                put_row(self._connection, row)

    def get_row(self, workflow_id: str) -> CatalogRow | None:
        """The row of one workflow, or `None`."""
        with self._using():
            return get_row(self._connection, workflow_id)

    def find_due(self, now_ms: int, limit: int, since_ms: int = 0, after: str | None = None) -> list[CatalogRow]:
        """Rows without a problem that are due, and were not before `since_ms`, earliest first, then in order of ids."""
        return self._rows(FIND_DUE, min(since_ms, INTEGER_MAX), after or "", min(now_ms, INTEGER_MAX), max(limit, 0))

    def find_ended(
        self, state: str, before_ms: int, limit: int, after: tuple[int, str] | None = None
    ) -> list[CatalogRow]:
        """Rows in a terminal state that have no duty and no problem and did not change since, longest unchanged first."""
        updated, workflow_id = after or (-INTEGER_MAX, "")
        return self._rows(FIND_ENDED, state, min(before_ms, INTEGER_MAX), updated, workflow_id, max(limit, 0))

    def next_wake_ms(self, since_ms: int = 0) -> int | None:
        """The earliest wake, from `since_ms` on, of all rows without a problem, or `None`."""
        with self._using():
            found: int | None = self._value(NEXT_WAKE, min(since_ms, INTEGER_MAX))
            return found

    def list_rows(self, question: Question, limit: int) -> list[CatalogRow]:
        """Rows in order of creation."""
        with self._using():
            found = catalog_questions.select(self._connection, question, limit)
        return [row_of(each) for each in found]

    def count_rows(self, question: Question) -> int:
        """How many rows there are."""
        with self._using():
            return catalog_questions.count(self._connection, question)

    def list_types(self) -> list[str]:
        """The types that there are rows of, in order."""
        with self._using():
            return catalog_questions.types(self._connection)

    # The file.

    def needs_checkpoint(self) -> bool:
        """Whether the write-ahead log has outgrown its bound."""
        try:
            return os.stat(self._log_path).st_size > WAL_BYTES_MAX
        except OSError:
            return False

    def checkpoint(self) -> None:
        """Move the write-ahead log's content into the file; syncs the disk twice."""
        with self._using():
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def database(self) -> sqlite_utils.Database:
        """This catalog through sqlite-utils, over the same connection: to look at, not to write to."""
        import sqlite_utils

        return sqlite_utils.Database(self._connection, execute_plugins=False)

    def close(self) -> None:
        """Close the file, checkpointing it. Closing twice is fine."""
        release_from_fork(self._connection)
        with self._using():
            self._connection.close()

    def _value(self, statement: str, *values: object) -> Any:
        found = self._connection.execute(statement, values).fetchone()
        return None if found is None else found[0]

    def _rows(self, statement: str, *values: object) -> list[CatalogRow]:
        with self._using():
            return select_rows(self._connection, statement, values)

    def _record(self, condition: str, *values: object) -> FileRecord | None:
        records = self._records(f"{SELECT_FILE} WHERE {condition}", values)
        return records[0] if records else None

    def _records(self, statement: str, values: tuple[object, ...]) -> list[FileRecord]:
        with self._using():
            found = self._connection.execute(statement, values).fetchall()
        return [
            FileRecord(workflow_id, file, set_aside != 0, problem) for workflow_id, file, set_aside, problem in found
        ]

    @contextmanager
    def _using(self) -> Generator[None, None, None]:
        """One thread at a time: `sqlite3` hands a statement that is being prepared to every thread that asks for the same one."""
        with self._lock, _errors(self._path):
            yield

    @contextmanager
    def _transaction(self) -> Generator[None, None, None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


@contextmanager
def _errors(path: Path) -> Generator[None, None, None]:
    try:
        yield
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise CorruptStoreError(
                f"the catalog {path} is damaged ({error}); reopen the store, which rebuilds it from the workflow files",
                path=str(path),
            ) from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreBusyError(f"the catalog {path} is open elsewhere; close that program", path=str(path)) from error
        what = f"the catalog {path} failed"
        raise out_of_descriptors(what, error, path=str(path)) or StorageError(
            f"{what}: {error}", path=str(path)
        ) from error
    except UnicodeEncodeError as error:
        raise StorageError(
            f"{error.object!r:.200} cannot be stored: it does not encode to UTF-8", path=str(path)
        ) from None
