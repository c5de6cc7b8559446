"""How a SQLite file comes into being: complete and synced under its name, or not there.

1. A file is written under a name that nothing reads (`*.new-*`), synced, and only then given its own. A crash in
   between leaves that, and nothing that looks usable.
2. A new file is a copy of an image made once per process. Rejected: running DDL in each new file, which costs 1.7 ms
   and more fsyncs where writing the image costs 0.4 ms and two (measured on ext4).
3. Giving a file its name never replaces another file, so two openers that both find it missing end up with one.
4. Its write-ahead log, if it gets one, is named after it: a log without its file would be taken for what is left of another.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from errno import EEXIST, EMFILE, ENOSYS, ENOTSUP, EOPNOTSUPP, EPERM
from functools import cache
from itertools import count
from typing import Final

from perdure.storage.descriptors import is_exhausted
from perdure.storage.errors import StorageError
from perdure.storage.sqlite_connection import PAGE_BYTES, Connection

__all__ = [
    "APPLICATION_ID",
    "FILE_FORMAT",
    "NEW_LOG_BYTES",
    "can_fill_images",
    "copy_file",
    "create_file",
    "filled_image",
    "sync_content",
    "sync_descriptor",
    "sync_directory",
    "write_synced",
    "write_whole",
]

APPLICATION_ID: Final = 0x50445552
"""`PDUR`: marks the file as ours in SQLite's header. Stored on disk; never change or reuse."""

FILE_FORMAT: Final = 1
"""Version of the table and its meaning (SQLite's `user_version`); a larger one is refused. Stored on disk."""

_NO_LINKS: Final = frozenset({EPERM, ENOTSUP, EOPNOTSUPP, ENOSYS})
"""What file systems without hard links answer."""

NEW_LOG_BYTES: Final = 65536
"""Fifteen small commits go into it: more than a short workflow makes. (Measured: to make it costs what 8 KiB would.)"""

_MODE: Final = slice(18, 20)
_ROLLBACK_MODE: Final = b"\x01\x01"
_WAL_MODE: Final = b"\x02\x02"

_numbers = count(1)


def create_file(path: str, real_path: str, *, has_log: bool = False) -> bool:
    """Put the image of an empty namespace at `real_path`, durably, unless another file is there by then.

    Args:
        path: As the user gave it; errors carry it.
        real_path: The same without symbolic links.
        has_log: Whether it gets a write-ahead log, too: an empty one, with room for the first commits (`log_room.py`). Where
            there is no space for it, it gets none.

    Returns:
        Whether the file is the image.

    Raises:
        StorageError: A write-ahead log without its database is there.
        OSError: The file cannot be written or named.
    """
    for suffix in ("-wal", "-journal"):
        # The log first: that of another opener, who has made the file meanwhile, is never there before its file.
        if os.path.lexists(real_path + suffix) and not os.path.lexists(real_path):
            if suffix == "-wal" and _is_unused(real_path + suffix):
                # A power cut took the file and left the log that was made with it.
                os.unlink(real_path + suffix)
                continue
            # SQLite would replay it into the new file.
            raise StorageError(
                f"{real_path + suffix} is there without its database; restore {path}, or remove what is left of it",
                path=path,
            )
    new = f"{real_path}.new-{os.getpid()}-{next(_numbers)}"
    new_log = f"{new}-wal"
    is_ours, is_log_made = True, False
    try:
        write_synced(new, _image())
        if has_log:
            with suppress(OSError):
                write_synced(new_log, bytes(NEW_LOG_BYTES))
                is_log_made = True
        try:
            # Unlike renaming, linking never replaces a file that another opener has just made.
            os.link(new, real_path)
        except FileExistsError:
            is_ours = False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(new, real_path)
        else:
            if is_log_made:
                # Another opener may have the file by now, and write to a log of its own.
                with suppress(OSError):
                    os.link(new_log, f"{real_path}-wal")
    finally:
        for each in (new, new_log) if has_log else (new,):
            with suppress(FileNotFoundError):
                os.unlink(each)
    sync_directory(os.path.dirname(real_path))
    return is_ours


def _is_unused(log: str) -> bool:
    with open(log, "rb") as file:
        return not any(file.read(32))


def can_fill_images() -> bool:
    """Whether this build of Python's `sqlite3` has what `filled_image` needs, which is optional."""
    return hasattr(sqlite3.Connection, "deserialize")


def filled_image(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The bytes of a namespace that holds these pairs, each key once. They need no write-ahead log.

    Raises:
        sqlite3.Error: There is no memory for it.
    """
    image = bytearray(_image())
    # A database in memory cannot be in WAL mode, which these two bytes say (https://www.sqlite.org/fileformat2.html, 1.3.3).
    image[_MODE] = _ROLLBACK_MODE
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.deserialize(image)
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO kv VALUES (?, ?)", pairs)
        connection.execute("COMMIT")
        image = bytearray(connection.serialize())
    finally:
        connection.close()
    image[_MODE] = _WAL_MODE
    return bytes(image)


def copy_file(connection: Connection, target: str) -> None:
    """Write a compact copy of the connection's database to `target`; complete and durable on return, or not there.

    Raises:
        StorageError: `target` exists already.
        OSError: The copy cannot be synced or named.
        Exception: Whatever the connection raises.
    """
    new = f"{target}.new-{os.getpid()}-{next(_numbers)}"
    if os.path.lexists(target):
        raise StorageError(f"{target} exists already; back up to a new name", path=target)
    try:
        connection.execute("VACUUM INTO ?", (new,)).fetchall()
        # SQLite has closed the copy, so this descriptor shares its locks with nobody. It did not sync it.
        descriptor = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sync_descriptor(descriptor)
        finally:
            os.close(descriptor)
        os.rename(new, target)
    finally:
        if os.path.lexists(new):
            os.unlink(new)
    sync_directory(os.path.dirname(target))


def write_whole(path: str, data: bytes) -> None:
    """Write a file that is not there, complete and synced under its name or not there; the name is not durable on return.

    Raises:
        OSError: Something is there, or it cannot be written.
    """
    new = f"{path}.new-{os.getpid()}-{next(_numbers)}"
    try:
        write_synced(new, data)
        if os.path.lexists(path):
            raise FileExistsError(EEXIST, os.strerror(EEXIST), path)
        os.rename(new, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(new)
        raise


def write_synced(path: str, data: bytes) -> None:
    """Write a file, replacing its content; the content is durable on return, its name is not."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Make a file's content durable, past the drive's own cache where the system needs to be asked for that."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def sync_content(descriptor: int) -> None:
    """`sync_descriptor` for a file of which only the content changed: what the file system knows of it may be older."""
    if sys.platform == "linux":
        os.fdatasync(descriptor)
    else:
        sync_descriptor(descriptor)


def sync_directory(path: str) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


@cache
def _image() -> bytes:
    """The bytes of an empty namespace, in WAL mode."""
    # Not a `TemporaryDirectory`, as emptying that takes a descriptor, which may just have run out.
    directory = tempfile.mkdtemp(prefix="perdure-")
    file = os.path.join(directory, "image.sqlite")
    try:
        connection = sqlite3.connect(file, isolation_level=None)
        try:
            for setting in (
                "synchronous=OFF",
                "locking_mode=EXCLUSIVE",
                f"page_size={PAGE_BYTES}",
                f"application_id={APPLICATION_ID}",
                f"user_version={FILE_FORMAT}",
                "journal_mode=WAL",
            ):
                connection.execute(f"PRAGMA {setting}").fetchall()
            connection.execute("CREATE TABLE kv (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
            # Closing does so as well, and is silent about an error: the image would be one without a table.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            # Asked before the connection gives its descriptors back.
            if is_exhausted(error):
                raise OSError(EMFILE, os.strerror(EMFILE), file) from error
            raise
        finally:
            connection.close()
        with open(file, "rb") as image:
            return image.read()
    finally:
        for suffix in ("", "-wal", "-journal"):
            with suppress(FileNotFoundError):
                os.unlink(file + suffix)
        os.rmdir(directory)
