"""A workflow's SQLite file: who may open it, what it must look like, and what happens to it when it is damaged.

1. A file has one opener. In this process the registry says so, before a second descriptor is opened: closing *any*
   descriptor of the file would drop the POSIX locks that SQLite holds on it. Other processes are kept out by SQLite's
   own exclusive lock, which is held from opening to closing.
2. A file is judged only while its lock is held and only by means that open no descriptor (SQL and `stat`), because half
   a checkpoint of another process looks like damage.
3. A damaged file is never recreated empty, nor changed: it is set aside with its write-ahead log, under names that
   still belong together for SQLite's own tools, and a note beside it keeps every later opening from starting afresh.
   It is renamed before its connection is closed: closing checkpoints, unless SQLite sees that the file was moved.
4. Opening costs the same whatever the file's size. Rejected: `PRAGMA quick_check` at every opening, which reads the
   whole file (1 ms for 10,000 rows) and finds nothing that SQLite does not report when it reads the same pages.
5. What cannot be looked at is not judged: running out of file descriptors is reported as just that.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from perdure.storage.descriptors import out_of_descriptors
from perdure.storage.errors import (
    CorruptStoreError,
    FormatVersionError,
    NamespaceNotFoundError,
    StorageError,
    StoreBusyError,
)
from perdure.storage.log_room import LogRoom
from perdure.storage.process_lock import keep_in_fork, release_from_fork
from perdure.storage.sqlite_connection import (
    Connection,
    ConnectionFactory,
    Durability,
    ErrorMapper,
    Fault,
    configure,
    read_setting,
    skip_checkpoint_on_close,
)
from perdure.storage.sqlite_image import (
    APPLICATION_ID,
    FILE_FORMAT,
    NEW_LOG_BYTES,
    create_file,
    sync_directory,
    write_synced,
)

__all__ = ["FoundFile", "MissingFile", "OpenFile", "close_file", "look_for_file", "make_file", "open_file", "set_aside"]

_COMPANIONS: Final = ("-wal", "-shm", "-journal")
_HEADER_BYTES: Final = 100

_open_files: dict[tuple[int, int], str] = {}
_registry_lock = threading.Lock()


@dataclass(slots=True, kw_only=True)
class OpenFile:
    """A file that this process holds.

    Attributes:
        path: As the caller gave it; errors carry it.
        real_path: Without symbolic links.
        identity: Device and inode.
        connection: Holds the exclusive lock.
        size_bytes: The file's size when it was opened.
        room: Of its log.
    """

    path: str
    real_path: str
    identity: tuple[int, int]
    connection: Connection
    size_bytes: int
    room: LogRoom


@dataclass(slots=True, kw_only=True)
class FoundFile:
    """A file that is there, and not opened yet.

    Attributes:
        path: As the caller gave it.
        real_path: Without symbolic links.
        status: What it was when it was found.
        is_new: Whether it was just made, so that what is in it is known.
    """

    path: str
    real_path: str
    status: os.stat_result
    is_new: bool


@dataclass(slots=True, kw_only=True)
class MissingFile:
    """A file that is not there, and may be made."""

    path: str
    real_path: str


def look_for_file(path: str, *, create: bool) -> FoundFile | MissingFile:
    """Look for a workflow's file, which may be missing if it is to be made. Reads no more than directories.

    Raises as `open_file` does.
    """
    real_path = os.path.realpath(path)
    with _errors(path):
        try:
            status = os.stat(real_path)
        except FileNotFoundError:
            _refuse_replacing(path, real_path)
            if not os.path.isdir(os.path.dirname(real_path)):
                raise StorageError(f"there is no directory to hold {path}; make it first", path=path) from None
            if not create:
                raise NamespaceNotFoundError(f"{path} does not exist; pass create=True to make it", path=path) from None
            return MissingFile(path=path, real_path=real_path)
    return _found(path, real_path, status, is_new=False)


def make_file(missing: MissingFile, *, has_log: bool = False) -> FoundFile:
    """Make a file that was not there, unless somebody else does. Blocks; it is durable on return.

    Args:
        missing: Where it is missing.
        has_log: Whether a log with room for the first commits is made with it.

    Raises as `open_file` does.
    """
    path, real_path = missing.path, missing.real_path
    with _errors(path):
        is_new = create_file(path, real_path, has_log=has_log)
        status = os.stat(real_path)
    return _found(path, real_path, status, is_new=is_new)


def open_file(
    found: FoundFile,
    *,
    durability: Durability,
    checkpoint_on_close: bool,
    connect: ConnectionFactory,
    map_error: ErrorMapper,
) -> OpenFile:
    """Open a workflow's file that was found. Blocks while it reads from the disk, hence not for a file that was just made.

    Raises:
        NamespaceNotFoundError: It does not exist, and was not to be made.
        StoreBusyError: It is open already, here or in another process.
        CorruptStoreError: It is damaged, and set aside now; or it was set aside earlier and not replaced since.
        FormatVersionError: A newer Perdure wrote it.
        OutOfDescriptorsError: The process has no file descriptor left; nothing is wrong with the file.
        StorageError: It is not Perdure's, or cannot be read, written or made.
    """
    path, real_path, status = found.path, found.real_path, found.status
    identity = (status.st_dev, status.st_ino)
    _claim(identity, path)
    connection: Connection | None = None
    try:
        try:
            connection = connect(real_path)
            _lock(connection, path)
        except StorageError:
            raise
        except Exception as error:
            _fail_open(error, map_error(error), connection, path, real_path)
        opened = OpenFile(
            path=path,
            real_path=real_path,
            identity=identity,
            connection=connection,
            size_bytes=status.st_size,
            room=LogRoom(
                real_path,
                identity,
                is_wanted=durability == "full",
                made_bytes=NEW_LOG_BYTES if found.is_new else 0,
            ),
        )
        try:
            _check(opened, is_new=found.is_new)
            configure(connection, durability=durability, path=path)
            if not found.is_new:
                _check_table(opened)
        except StorageError:
            raise
        except Exception as error:
            _fail_open(error, map_error(error), connection, path, real_path)
        if durability == "full" and not checkpoint_on_close:
            skip_checkpoint_on_close(connection)
    except BaseException:
        if connection is not None:
            with suppress(Exception):
                connection.close()
        _release(identity)
        raise
    keep_in_fork(connection)
    return opened


def close_file(opened: OpenFile) -> None:
    """Close the connection and give up the file. Blocks: closing may checkpoint, which syncs.

    Raises:
        Exception: Whatever closing raises. The file is given up all the same.
    """
    try:
        opened.connection.close()
    finally:
        release_from_fork(opened.connection)
        _release(opened.identity)


def set_aside(path: str, real_path: str, reason: str) -> StorageError:
    """Rename a damaged file and what belongs to it, durably, while its lock is still held.

    Returns:
        The error to raise, a `CorruptStoreError`. When renaming fails it says so, and the file stays where it is; when
        that is for want of a file descriptor, it is an `OutOfDescriptorsError`, and the next opening looks again.
    """
    now = datetime.now(UTC)
    target = f"{real_path}.corrupt-{now:%Y%m%dT%H%M%S.%fZ}"
    try:
        # The note comes first: from here on, no opening that finds the file gone makes a new one.
        write_synced(_note_path(real_path) + ".new", json.dumps({"file": target, "reason": reason}).encode() + b"\n")
        os.replace(_note_path(real_path) + ".new", _note_path(real_path))
        sync_directory(os.path.dirname(real_path))
        os.rename(real_path, target)
        sync_directory(os.path.dirname(real_path))
        moved = (target, *_move_companions(real_path, target))
    except OSError as error:
        what = f"cannot set aside {path}, which looks damaged ({reason})"
        return out_of_descriptors(what, error, path=path) or CorruptStoreError(
            f"{path} is damaged ({reason}) and could not be set aside: {error.strerror} ({error.filename})", path=path
        )
    return CorruptStoreError(
        f"{path} is damaged ({reason}); it was set aside as {target}; put a good copy back to go on",
        path=path,
        set_aside=moved,
    )


def _found(path: str, real_path: str, status: os.stat_result, *, is_new: bool) -> FoundFile:
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"{path} is not a regular file", path=path)
    if not is_new and not os.access(real_path, os.R_OK | os.W_OK):
        raise StorageError(f"{path} cannot be read and written by this user; change its permissions", path=path)
    return FoundFile(path=path, real_path=real_path, status=status, is_new=is_new)


@contextmanager
def _errors(path: str) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise out_of_descriptors(f"cannot open {path}", error, path=path) or StorageError(
            f"cannot open {path}: {error.strerror} ({error.filename})", path=path
        ) from error
    except sqlite3.Error as error:
        # Of making the image that new files are copies of.
        raise out_of_descriptors(f"cannot make {path}", error, path=path) or StorageError(
            f"cannot make {path}: {error}", path=path
        ) from error


def _refuse_replacing(path: str, real_path: str) -> None:
    """Refuse to put a new file in the place of one that was set aside.

    Raises:
        CorruptStoreError: One was.
        OSError: Whether one was cannot be told, as the note cannot be read.
    """
    try:
        with open(_note_path(real_path), "rb") as file:
            text = file.read()
    except FileNotFoundError:
        return
    target = _noted_target(real_path, text)
    moved: tuple[str, ...] = ()
    if target:
        # A crash may have come between the renames; a log left behind would be replayed into the repaired file.
        _move_companions(real_path, target)
        moved = tuple(name for suffix in ("", *_COMPANIONS) if os.path.exists(name := target + suffix))
    raise CorruptStoreError(
        f"{path} was damaged and set aside{f' as {target}' if target else ''}; put a good copy back to go on, or "
        f"remove the note {_note_path(real_path)} to start it afresh",
        path=path,
        set_aside=moved,
    )


def _noted_target(real_path: str, text: bytes) -> str:
    """Where a file was set aside, as its note says; if the note is spoilt, the latest beside it; if none is, `""`."""
    directory, name = os.path.split(real_path)
    try:
        note: Any = json.loads(text)
        # The directory may have been moved since.
        target = os.path.basename(str(note["file"]))
    except (ValueError, KeyError, TypeError):
        target = max((entry for entry in os.listdir(directory) if _is_set_aside(entry, name)), default="")
    return os.path.join(directory, target) if target else ""


def _is_set_aside(entry: str, name: str) -> bool:
    return entry.startswith(f"{name}.corrupt-") and entry.endswith("Z")


def _note_path(real_path: str) -> str:
    return f"{real_path}.corrupt-note"


def _move_companions(real_path: str, target: str) -> list[str]:
    moved: list[str] = []
    for suffix in _COMPANIONS:
        if os.path.lexists(real_path + suffix):
            os.rename(real_path + suffix, target + suffix)
            moved.append(target + suffix)
    sync_directory(os.path.dirname(real_path))
    return moved


def _claim(identity: tuple[int, int], path: str) -> None:
    with _registry_lock:
        if identity in _open_files:
            raise StoreBusyError(
                f"{path} is already open in this process (as {_open_files[identity]}); use that driver or close it",
                path=path,
            )
        _open_files[identity] = path


def _release(identity: tuple[int, int]) -> None:
    with _registry_lock:
        _open_files.pop(identity, None)


def _lock(connection: Connection, path: str) -> None:
    """Take the file's lock for good: SQLite does so at the first access after the mode is set."""
    mode = connection.execute("PRAGMA locking_mode=EXCLUSIVE").fetchone()[0]
    if mode != "exclusive":
        raise StorageError(f"SQLite did not accept locking_mode=EXCLUSIVE for {path} (it stayed {mode!r})", path=path)
    connection.execute("PRAGMA schema_version").fetchone()


def _check(opened: OpenFile, *, is_new: bool) -> None:
    """Whether it is a whole file of ours. Cheap, whatever the file's size: its pages are checked as they are read.

    Of a file that was just made it is known, once it is known to be still the same.
    """
    path, connection = opened.path, opened.connection
    status = os.stat(opened.real_path)
    if (status.st_dev, status.st_ino) != opened.identity:
        raise StoreBusyError(f"{path} was replaced while it was being opened; open it again", path=path)
    if is_new and status.st_size == opened.size_bytes:
        return
    if status.st_size < _HEADER_BYTES:
        # SQLite takes a file as short as that for a new one.
        raise set_aside(path, opened.real_path, f"cut short to {status.st_size} bytes")
    application_id = read_setting(connection, "application_id")
    if application_id != APPLICATION_ID:
        raise StorageError(f"{path} is a SQLite database of another program; it was left as it is", path=path)
    version = read_setting(connection, "user_version")
    if version > FILE_FORMAT:
        raise FormatVersionError(
            f"{path} has file format {version}, and this Perdure knows up to {FILE_FORMAT}; upgrade Perdure to open it",
            path=path,
            found=version,
            supported=FILE_FORMAT,
        )
    expected = read_setting(connection, "page_count") * read_setting(connection, "page_size")
    if status.st_size < expected and not _is_whole(opened):
        raise set_aside(path, opened.real_path, f"cut short to {status.st_size} of {expected} bytes")


def _is_whole(opened: OpenFile) -> bool:
    """Whether the log makes up for a file that is too short, as after a crash within a checkpoint."""
    try:
        log_bytes = os.stat(opened.real_path + "-wal").st_size
    except FileNotFoundError:
        log_bytes = 0
    return log_bytes > 0 and opened.connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"


def _check_table(opened: OpenFile) -> None:
    table = opened.connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'kv'").fetchone()
    if table is None:
        raise set_aside(opened.path, opened.real_path, "its table is gone")
    opened.connection.execute("SELECT 1 FROM kv LIMIT 1").fetchone()


def _fail_open(error: Exception, fault: Fault, connection: Connection | None, path: str, real_path: str) -> NoReturn:
    match fault:
        case Fault.BUSY:
            raise StoreBusyError(
                f"{path} is open in another process; a workflow's file has one opener at a time", path=path
            ) from error
        case Fault.CORRUPT if connection is not None:
            raise set_aside(path, real_path, str(error)) from error
        case _:
            raise out_of_descriptors(f"cannot open {path}", error, path=path) or StorageError(
                f"cannot open {path}: {error}", path=path
            ) from error
