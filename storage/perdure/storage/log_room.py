"""Room in a write-ahead log, made ahead of what is written to it.

1. A commit that overwrites what is there syncs in some 0.6 of the time of one that makes the log longer (measured on ext4: 83 us
   beside 141), as nothing that the file system knows of the log changes. So a new file gets a log that holds a few commits,
   and one that proved too short is made four times as long, up to the size that it keeps once it starts over.
2. The room is zeros. SQLite takes a frame of the log for valid only if it bears the salts of the log's header and its checksum
   fits (https://www.sqlite.org/fileformat2.html, 4.1), and a log whose header is zeros for an empty one.
3. Room is only ever added behind the end, by the one who holds the database's lock, between two commits, and only while the
   file that is open still lies at its path. SQLite locks the database, and never its log, so that another descriptor of the
   log may be closed.
4. It is a help and nothing else: if there is none to be had, commits make the log longer as they come.

Rejected: `posix_fallocate`. It is quicker, but the first write to each block of it changes what the file system knows.

Rejected: to ask for the log's size after each commit, which takes a microsecond: it is looked at after every few.
"""

from __future__ import annotations

import os
from errno import ENOSPC
from typing import Final

from perdure.storage.sqlite_connection import PAGE_BYTES, WAL_PAGES_MAX
from perdure.storage.sqlite_image import NEW_LOG_BYTES, sync_descriptor

__all__ = ["LogRoom"]

_MOST_BYTES: Final = WAL_PAGES_MAX * PAGE_BYTES
"""What is left of a log that starts over."""
_SPARE: Final = 16
"""How many times the room has to be free on the disk: the last of it is for what is written."""
_LOOK_AFTER: Final = 8
"""Commits between two looks, while the log is short."""


class LogRoom:
    """The room of one open file's log. Blocking; one thread at a time.

    Args:
        path: The file; its log lies beside it.
        identity: Its device and inode: if something else lies there by now, the log there is not ours.
        is_wanted: Whether commits sync the log; if they do not, room in it saves nothing.
        made_bytes: How long the log was made when the file was.
    """

    __slots__ = ("_bytes", "_commits_left", "_identity", "_path")

    def __init__(self, path: str, identity: tuple[int, int], *, is_wanted: bool, made_bytes: int = 0) -> None:
        self._path = path
        self._identity = identity
        self._bytes = made_bytes
        self._commits_left = _LOOK_AFTER if is_wanted else -1  # it counts down past zero for ever

    def note_commit(self) -> None:
        """A commit was made: now and then look at the log, and make it longer if it has become so by itself."""
        self._commits_left -= 1
        if self._commits_left == 0:
            try:
                self._look()
            except (OSError, MemoryError):  # the disk is full, say: if it is at fault, the next commit says so
                self._commits_left = -1

    def _look(self) -> None:
        descriptor = os.open(f"{self._path}-wal", os.O_WRONLY | os.O_CLOEXEC)
        try:
            status = os.stat(self._path)
            if (status.st_dev, status.st_ino) != self._identity:
                return  # the directory was moved away, and another is in its place
            size = os.fstat(descriptor).st_size
            if size > self._bytes:
                self._bytes = min(max(4 * size, NEW_LOG_BYTES), _MOST_BYTES)
                if size < self._bytes:
                    _lengthen(descriptor, size, self._bytes)
        finally:
            os.close(descriptor)
        if self._bytes < _MOST_BYTES:
            self._commits_left = max(_LOOK_AFTER, (self._bytes - size) // (4 * PAGE_BYTES))


def _lengthen(descriptor: int, start: int, end: int) -> None:
    """Write zeros behind the end and sync them: all of them, or none, and none where the disk is nearly full.

    Raises:
        OSError: They cannot be written.
    """
    disk = os.fstatvfs(descriptor)
    if disk.f_bavail * disk.f_frsize < _SPARE * (end - start):
        raise OSError(ENOSPC, os.strerror(ENOSPC))
    try:
        at = start
        while at < end:
            at += os.pwrite(descriptor, bytes(min(end - at, NEW_LOG_BYTES)), at)
        sync_descriptor(descriptor)
    except BaseException:
        os.ftruncate(descriptor, start)
        raise
