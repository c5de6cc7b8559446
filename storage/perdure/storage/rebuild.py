"""A catalog, read again from the workflow files.

1. Which row a namespace gets is decided by `rebuild_row`, from a few of its keys alone: a workflow that was active is
   due at once, a sleeping one at its alarm (at once when mail waits), a terminal one never. Too early is harmless.
2. Nothing that has content is removed. A file that cannot be read, or that names no workflow, becomes a row with a
   problem, under its own id where the old catalog still knows it, else under `?` and the file's name.
3. What is removed was never acknowledged or is already deleted: an empty namespace (its first batch never came), a
   half-made file, a write-ahead log without its database.
4. Two files with content for one id cannot come about by our own doing, since a deletion is durable before the id can
   be used again. Should an operator have made them, the later incarnation counts and the earlier is renamed, not
   removed: left in place, it would come back once the later is deleted.

Rejected: reading the files when the old catalog seems whole, and comparing. It costs the same and trusts more.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import trio

from perdure.storage.catalog import Catalog, FileRecord
from perdure.storage.catalog_schema import STORAGE_PROBLEM
from perdure.storage.descriptors import OutOfDescriptorsError, out_of_descriptors
from perdure.storage.directory import DataDirectory
from perdure.storage.errors import CorruptStoreError, DecodeError, PerdureError, StorageError
from perdure.storage.keys import prefix_end
from perdure.storage.layout import (
    ALARM_KEY,
    MAILBOX_PREFIX,
    STATE_KEY,
    WORKFLOW_ID_KEY,
    WORKFLOW_TYPE_KEY,
    decode_u64,
)
from perdure.storage.naming import FileName, name_stem, parse_file_name, unknown_id
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.store import CatalogRow

__all__ = ["OldCatalog", "OpenFile", "read_row", "rebuild_catalog", "rebuild_row", "sweep"]

TERMINAL_STATES = frozenset({"completed", "failed", "cancelled"})
_ROW_KEYS = (WORKFLOW_ID_KEY, WORKFLOW_TYPE_KEY, STATE_KEY, ALARM_KEY)
_ROWS_AT_ONCE = 200
_COMPANIONS = ("-wal", "-shm", "-journal")
_SET_ASIDE = ".corrupt-"
_NEW = ".new-"

OpenFile: TypeAlias = Callable[[str], Awaitable[SqliteDriver]]
"""Opens a workflow file by its name, for reading what it is about."""


def rebuild_row(
    pairs: Mapping[bytes, bytes], *, mail_waiting: bool, created_at_ms: int, updated_at_ms: int
) -> CatalogRow | None:
    """The catalog row that a namespace calls for.

    Args:
        pairs: What is stored at the workflow's id, type, state and alarm; missing keys are left out.
        mail_waiting: Whether there is any message in its mailbox.
        created_at_ms: When the file was made, as far as that is known.
        updated_at_ms: When it last changed.

    Returns:
        The row, or `None` when the namespace names no workflow.

    Raises:
        DecodeError: One of the values is not what its key says.
    """
    if WORKFLOW_ID_KEY not in pairs:
        return None
    # A workflow that was made and never ran has no state yet.
    state = _text(pairs, STATE_KEY) or "pending"
    alarm = decode_u64(pairs[ALARM_KEY]) if ALARM_KEY in pairs else None
    if state in TERMINAL_STATES:
        wake = None
    elif state == "sleeping":
        wake = 0 if mail_waiting else alarm
    else:
        wake = 0
    return CatalogRow(
        workflow_id=_text(pairs, WORKFLOW_ID_KEY),
        workflow_type=_text(pairs, WORKFLOW_TYPE_KEY),
        state=state,
        next_wake_ms=wake,
        mail_waiting=mail_waiting,
        created_at_ms=created_at_ms,
        updated_at_ms=updated_at_ms,
    )


def _text(pairs: Mapping[bytes, bytes], key: bytes) -> str:
    try:
        return pairs.get(key, b"").decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"the text at key {key.hex()} is not UTF-8: {error.reason}") from None


def problem_row(record: FileRecord, problem: str, *, at_ms: int) -> CatalogRow:
    """The row of a workflow whose file cannot be read."""
    return CatalogRow(record.workflow_id, "", "pending", None, False, at_ms, at_ms, STORAGE_PROBLEM + problem)


async def read_row(driver: SqliteDriver, path: Path) -> CatalogRow | None:
    """Read what `rebuild_row` needs; `None` when the namespace is empty.

    Raises:
        DecodeError: The namespace has content and names no workflow, or another than its file's name does.
        StorageError: It cannot be read.
    """
    pairs = {key: value for key in _ROW_KEYS if (value := await driver.get(key)) is not None}
    mail_waiting = await _has_any(driver, MAILBOX_PREFIX)
    changed_at_ms = _changed_at_ms(path)
    row = rebuild_row(pairs, mail_waiting=mail_waiting, created_at_ms=changed_at_ms, updated_at_ms=changed_at_ms)
    name = parse_file_name(path.name)
    if row is None:
        if await _has_any(driver, b""):
            raise DecodeError(f"{path} names no workflow")
    elif name is None or name_stem(row.workflow_id) != name.stem:
        raise DecodeError(
            f"{path} holds the workflow {row.workflow_id!r:.200}, to which this file name does not belong"
        )
    return row


def _changed_at_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


async def _has_any(driver: SqliteDriver, prefix: bytes) -> bool:
    """Whether any key starts with `prefix`, without reading what may be a mailbox of large messages."""
    try:
        connection = driver.database().conn
    except StorageError:
        # Another build of SQLite is under the driver; sqlite-utils cannot look through it.
        return bool(await driver.list(prefix))
    end = prefix_end(prefix)
    if end is None:
        return connection.execute("SELECT 1 FROM kv WHERE key >= ? LIMIT 1", (prefix,)).fetchone() is not None
    return (
        connection.execute("SELECT 1 FROM kv WHERE key >= ? AND key < ? LIMIT 1", (prefix, end)).fetchone() is not None
    )


@dataclass(slots=True)
class _Found:
    """What a listing of the directory found.

    Attributes:
        files: By stem, the databases of that stem.
        set_aside: Databases of which a set-aside copy is there.
        leftovers: Files that belong to no database.
        session: The largest session that any of their names holds, 0 when there are none.
    """

    files: dict[str, list[FileName]] = field(default_factory=dict[str, list[FileName]])
    set_aside: set[FileName] = field(default_factory=set[FileName])
    leftovers: list[Path] = field(default_factory=list[Path])
    session: int = 0


def _scan(workflows: Path) -> _Found:
    found = _Found()
    companions: list[tuple[FileName, Path]] = []
    with os.scandir(workflows) as entries:
        for entry in entries:
            base, kind = _split(entry.name)
            name = parse_file_name(base)
            if name is None:
                continue  # None of ours.
            found.session = max(found.session, name.session)
            if kind == "":
                found.files.setdefault(name.stem, []).append(name)
            elif kind == _SET_ASIDE:
                found.set_aside.add(name)
            elif kind == _NEW:
                found.leftovers.append(Path(entry.path))
            elif kind in _COMPANIONS:
                companions.append((name, Path(entry.path)))
    for name, path in companions:
        # The log of a set-aside database may be the half that was not moved before a crash: it is evidence too.
        if name not in found.files.get(name.stem, ()) and name not in found.set_aside:
            found.leftovers.append(path)
    return found


def _split(name: str) -> tuple[str, str]:
    """The name of the database that a file belongs to, and what of it the file is ("" for the database itself)."""
    for mark in (_SET_ASIDE, _NEW):
        base, found, _ = name.partition(mark)
        if found:
            return base, mark
    for suffix in _COMPANIONS:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""


def sweep(directory: DataDirectory, catalog: Catalog, session: int) -> None:
    """Remove the files that a killed process made and had not yet recorded. Lists the directory once.

    Nothing was ever written to such a file: its opener did not return before it was recorded.

    Args:
        directory: Where.
        catalog: The catalog that the process left behind.
        session: The session of the process that was killed; no other can have left anything.

    Raises:
        OSError: The directory cannot be read, or a file cannot be removed.
    """
    mark = f".{session:08x}"
    with os.scandir(directory.workflows) as entries:
        recent = [entry.name for entry in entries if mark in entry.name]
    for entry_name in recent:
        base, kind = _split(entry_name)
        name = parse_file_name(base)
        if name is None or name.session != session:
            continue
        if kind == _NEW:
            (directory.workflows / entry_name).unlink(missing_ok=True)
        elif kind in ("", *_COMPANIONS) and not catalog.has_file(base):
            directory.remove(base)


class OldCatalog:
    """The catalog that is being replaced: asked for what the files do not say, believed in nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        if path.exists():
            try:
                self._connection = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
            except sqlite3.Error as error:
                _check_descriptors(path, error)

    @staticmethod
    def is_legible(path: Path) -> bool:
        """Whether there is anything in the file to ask for."""
        if not path.exists():
            return False
        try:
            connection = sqlite3.connect(path, isolation_level=None, timeout=0)
        except sqlite3.Error as error:
            _check_descriptors(path, error)
            return False
        with closing(connection):
            try:
                return connection.execute("SELECT 1 FROM files LIMIT 1").fetchone() is not None
            except sqlite3.Error as error:
                _check_descriptors(path, error)
                return False

    def ask(self, file: str) -> CatalogRow | None:
        """The row it had for the workflow of this file; `None` when it had none or cannot be read."""
        if self._connection is None:
            return None
        try:
            found = self._connection.execute(
                "SELECT f.workflow_id, w.workflow_type, w.created_at_ms, w.updated_at_ms"
                " FROM files f JOIN workflows w USING (workflow_id) WHERE f.file = ?",
                (file,),
            ).fetchone()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            _check_descriptors(self._path, error)
            self.close()
            return None
        name = parse_file_name(file)
        match found:
            case (str(workflow_id), str(workflow_type), int(created), int(updated)) if (
                name is not None and name_stem(workflow_id) == name.stem
            ):
                return CatalogRow(workflow_id, workflow_type, "pending", None, False, created, updated)
            case _:
                return None

    def close(self) -> None:
        """Close it. Closing twice is fine."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _check_descriptors(path: Path, error: Exception) -> None:
    """Give up rather than go on without an old catalog that could be read if there were a descriptor for it."""
    if (exhausted := out_of_descriptors(f"cannot open {path}", error, path=str(path))) is not None:
        raise exhausted from error


@dataclass(frozen=True, slots=True)
class _Problem:
    text: str
    set_aside: bool


class _Rebuild:
    """One rebuild: what it reads from and what it asks."""

    def __init__(self, directory: DataDirectory, open_file: OpenFile, old: OldCatalog, now_ms: int) -> None:
        self._directory = directory
        self._open_file = open_file
        self._old = old
        self._now_ms = now_ms

    async def resolve(self, names: list[FileName], set_aside: set[FileName]) -> tuple[CatalogRow, FileRecord] | None:
        """Choose among the files of one stem, and clear away those that do not count."""
        chosen: tuple[CatalogRow, FileRecord] | None = None
        for name in sorted(names, reverse=True):
            found = await self._look(str(name))
            if found is None:
                self._directory.remove(str(name))
            elif chosen is None:
                chosen = self._entry(name, found, set_aside)
            elif isinstance(found, CatalogRow):
                self._directory.supersede(str(name))
        return chosen

    def missing(self, name: FileName) -> tuple[CatalogRow, FileRecord]:
        """What is known of a file of which only a set-aside copy is left."""
        text = f"{self._directory.workflows / str(name)} was damaged and set aside; put a good copy back to go on"
        return self._entry(name, _Problem(text, set_aside=True), set())

    def _entry(
        self, name: FileName, found: CatalogRow | _Problem, set_aside: set[FileName]
    ) -> tuple[CatalogRow, FileRecord]:
        file = str(name)
        known = self._old.ask(file)
        if isinstance(found, CatalogRow):
            row = found if known is None else replace(found, created_at_ms=known.created_at_ms)
            return row, FileRecord(row.workflow_id, file, name in set_aside)
        record = FileRecord(
            unknown_id(file) if known is None else known.workflow_id, file, found.set_aside or name in set_aside
        )
        row = problem_row(record, found.text, at_ms=self._now_ms)
        if known is not None:
            row = replace(row, workflow_type=known.workflow_type, created_at_ms=known.created_at_ms)
        return row, record

    async def _look(self, file: str) -> CatalogRow | _Problem | None:
        try:
            driver = await self._open_file(file)
            try:
                return await read_row(driver, self._directory.workflows / file)
            finally:
                await driver.aclose()
        except OutOfDescriptorsError:
            raise  # It is no problem of the workflow's.
        except PerdureError as error:
            return _Problem(str(error), isinstance(error, CorruptStoreError))


async def rebuild_catalog(
    catalog: Catalog, directory: DataDirectory, open_file: OpenFile, old: OldCatalog, *, now_ms: int
) -> int:
    """Fill an empty catalog from the workflow files, in one transaction: until it is over the file is no catalog.

    Opens every workflow's file in turn, with a checkpoint at each.

    Returns:
        The largest session that made one of the files, 0 when there is none.

    Raises:
        OSError: The directory cannot be read, or a leftover in it cannot be removed.
        StorageError: The catalog cannot be written.
    """
    found = _scan(directory.workflows)
    for path in found.leftovers:
        path.unlink(missing_ok=True)
    rebuild = _Rebuild(directory, open_file, old, now_ms)
    catalog.start()
    entries: list[tuple[CatalogRow, FileRecord]] = []
    seen: set[str] = set()
    for stem, names in found.files.items():
        await trio.lowlevel.checkpoint()
        if (entry := await rebuild.resolve(names, found.set_aside)) is not None:
            seen.add(stem)
            entries.append(entry)
        if len(entries) >= _ROWS_AT_ONCE:
            catalog.add(entries)
            entries.clear()
    for name in sorted(found.set_aside, reverse=True):
        if name.stem not in seen:
            seen.add(name.stem)
            entries.append(rebuild.missing(name))
    catalog.add(entries)
    catalog.finish()
    return found.session
