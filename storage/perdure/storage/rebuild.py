"""A catalog, read again from the workflow files.

1. Which row a namespace gets is decided by `rebuild_row`, from a few of its keys alone; when it is woken, by the same
   function (`wake.py`) as while it runs. Too early is harmless.
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
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

import trio

from perdure.storage.attributes import decode_attributes
from perdure.storage.catalog import Catalog, FileRecord
from perdure.storage.catalog_schema import STORAGE_PROBLEM
from perdure.storage.descriptors import OutOfDescriptorsError
from perdure.storage.directory import DataDirectory
from perdure.storage.errors import CorruptStoreError, DecodeError, PerdureError
from perdure.storage.layout import (
    ALARM_KEY,
    ATTRIBUTES_KEY,
    CREATED_AT_KEY,
    DUTIES_KEY,
    MAILBOX_PREFIX,
    PARENT_KEY,
    STATE_KEY,
    WORKFLOW_ID_KEY,
    WORKFLOW_TYPE_KEY,
    decode_u64,
)
from perdure.storage.naming import FileName, name_stem, parse_file_name, unknown_id
from perdure.storage.old_catalog import OldCatalog
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.store import CatalogRow
from perdure.storage.values import decode_value
from perdure.storage.wake import wake_of

__all__ = ["ROW_KEYS", "OpenFile", "parent_id_of", "problem_row", "read_row", "rebuild_catalog", "rebuild_row", "sweep"]

ROW_KEYS = (
    WORKFLOW_ID_KEY,
    WORKFLOW_TYPE_KEY,
    STATE_KEY,
    ALARM_KEY,
    ATTRIBUTES_KEY,
    PARENT_KEY,
    CREATED_AT_KEY,
    DUTIES_KEY,
)
"""What of a namespace, beside its mailbox, a row says something of."""
_ROWS_AT_ONCE = 200
_COMPANIONS = ("-wal", "-shm", "-journal")
_SET_ASIDE = ".corrupt-"
_NEW = ".new-"


class Namespace(Protocol):
    """The part of a driver that `read_row` needs."""

    async def get(self, key: bytes) -> bytes | None:
        """The value at `key`, or `None`."""
        ...

    async def has_any(self, prefix: bytes) -> bool:
        """Whether any key starts with `prefix`."""
        ...


OpenFile: TypeAlias = Callable[[str], Awaitable[SqliteDriver]]
"""Opens a workflow file by its name, for reading what it is about."""


def rebuild_row(
    pairs: Mapping[bytes, bytes], *, mail_waiting: bool, created_at_ms: int, updated_at_ms: int
) -> CatalogRow | None:
    """The catalog row that a namespace calls for.

    Args:
        pairs: What is stored at `ROW_KEYS`; missing keys are left out.
        mail_waiting: Whether there is any message in its mailbox.
        created_at_ms: When it was made, as far as that is known, should it not say so itself.
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
    alarm_ms = decode_u64(pairs[ALARM_KEY]) if ALARM_KEY in pairs else None
    return CatalogRow(
        workflow_id=_text(pairs, WORKFLOW_ID_KEY),
        workflow_type=_text(pairs, WORKFLOW_TYPE_KEY),
        state=state,
        next_wake_ms=wake_of(state, alarm_ms, wants_mail=mail_waiting, has_duties=DUTIES_KEY in pairs),
        mail_waiting=mail_waiting,
        created_at_ms=decode_u64(pairs[CREATED_AT_KEY]) if CREATED_AT_KEY in pairs else created_at_ms,
        updated_at_ms=updated_at_ms,
        attributes=decode_attributes(pairs[ATTRIBUTES_KEY]) if ATTRIBUTES_KEY in pairs else {},
        parent_id=parent_id_of(pairs[PARENT_KEY]) if PARENT_KEY in pairs else None,
    )


def parent_id_of(data: bytes) -> str:
    """The id in what is stored at `PARENT_KEY`.

    Raises:
        DecodeError: It is no reference of a workflow.
    """
    match decode_value(data):
        case {"id": str(parent_id)}:
            return parent_id
        case _:
            raise DecodeError("the stored reference of the parent names no workflow")


def _text(pairs: Mapping[bytes, bytes], key: bytes) -> str:
    try:
        return pairs.get(key, b"").decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"the text at key {key.hex()} is not UTF-8: {error.reason}") from None


def problem_row(record: FileRecord, problem: str, *, at_ms: int) -> CatalogRow:
    """The row of a workflow whose file cannot be read."""
    return CatalogRow(record.workflow_id, "", "pending", None, False, at_ms, at_ms, STORAGE_PROBLEM + problem)


async def read_row(driver: Namespace, path: Path, *, created_at_ms: int | None = None) -> CatalogRow | None:
    """Read what `rebuild_row` needs; `None` when the namespace is empty.

    Args:
        driver: The open file.
        path: The file.
        created_at_ms: When the workflow was made, as others know it; `None` takes the time of the file.

    Raises:
        DecodeError: The namespace has content and names no workflow, or another than its file's name does.
        StorageError: It cannot be read.
    """
    pairs = {key: value for key in ROW_KEYS if (value := await driver.get(key)) is not None}
    mail_waiting = await driver.has_any(MAILBOX_PREFIX)
    changed_at_ms = _changed_at_ms(path)
    if created_at_ms is None:
        created_at_ms = changed_at_ms
    row = rebuild_row(pairs, mail_waiting=mail_waiting, created_at_ms=created_at_ms, updated_at_ms=changed_at_ms)
    name = parse_file_name(path.name)
    if row is None:
        if await driver.has_any(b""):
            raise DecodeError(f"{path} names no workflow")
    elif name is None or name_stem(row.workflow_id) != name.stem:
        raise DecodeError(
            f"{path} holds the workflow {row.workflow_id!r:.200}, to which this file name does not belong"
        )
    return row


def _changed_at_ms(path: Path) -> int:
    """When a namespace changed last, as far as its files say; never earlier than its last commit."""
    try:
        changed_ns = path.stat().st_mtime_ns
    except FileNotFoundError:
        changed_ns = time.time_ns()  # it is young (`journal.py`), and has no file yet
    # What was committed since the last checkpoint has changed the log only.
    with suppress(FileNotFoundError):
        changed_ns = max(changed_ns, Path(f"{path}-wal").stat().st_mtime_ns)
    return changed_ns // 1_000_000


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
        if isinstance(found, CatalogRow):
            return found, FileRecord(found.workflow_id, file, name in set_aside)
        known = self._old.ask(file)
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
                known = self._old.ask(file)
                created_at_ms = None if known is None else known.created_at_ms
                return await read_row(driver, self._directory.workflows / file, created_at_ms=created_at_ms)
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
