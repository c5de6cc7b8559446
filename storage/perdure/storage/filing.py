"""Files of young workflows, written whole: a few at a time in one thread, with one sync of their directory.

1. A file is complete and synced before it has its name, and has it durably on return. What is there is never replaced.
2. Those who come while some are being written are written together next.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from perdure.storage.crew import crew_of
from perdure.storage.descriptors import out_of_descriptors
from perdure.storage.errors import StorageError
from perdure.storage.rounds import Rounds
from perdure.storage.sqlite_image import filled_image, sync_directory, write_whole

__all__ = ["Filing", "NotWrittenError"]


class NotWrittenError(StorageError):
    """A file cannot be written, and is not there.

    Attributes:
        reason: What there is to say of it otherwise.
    """

    reason: StorageError


@dataclass(eq=False, slots=True)
class _File:
    path: str
    pairs: Sequence[tuple[bytes, bytes]]
    is_tried: bool
    error: StorageError | None = None
    is_done: bool = False


class Filing:
    """Writes the files of one directory.

    Args:
        directory: Its path.
        limiter: Bounds the threads.
        is_inline: Whether all is done in place.
    """

    def __init__(self, directory: str, limiter: trio.CapacityLimiter, *, is_inline: bool) -> None:
        self._directory = directory
        self._limiter = limiter
        self._is_inline = is_inline
        self._waiting: list[_File] = []
        self._writing: list[_File] = []
        self._rounds = Rounds(limiter, self._begin, self._end)

    async def write(self, path: str, pairs: Sequence[tuple[bytes, bytes]], *, is_tried: bool = False) -> None:
        """Write the file of a namespace; durable on return. Not interrupted by cancellation.

        Args:
            path: Where nothing is yet.
            pairs: What the namespace holds, each key once.
            is_tried: Whether that was tried before, and nobody has used the file since: it may be there, or come back after a
                power cut. It is written anew, as a sync that failed says nothing when it is tried again.

        Raises:
            NotWrittenError: It cannot be written, and is not there.
            StorageError: It is there or not: its name could not be made durable, or that was so with an earlier try.
        """
        file = _File(path, pairs, is_tried)
        self._waiting.append(file)
        if self._is_inline:
            self._begin()()
            self._end(None)
        await self._rounds.wait(lambda: file.is_done)
        if file.error is not None:
            raise file.error

    async def copy(self, target: str, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        """Write a namespace to a file anywhere; complete and durable on return, or not there. Raises as `write` does."""
        work = partial(_copy, target, pairs)
        if self._is_inline:
            work()
        else:
            await crew_of(self._limiter).run(work)

    def _begin(self) -> Callable[[], None]:
        self._writing, self._waiting = self._waiting, []
        return partial(self._do, self._writing)

    def _end(self, error: BaseException | None) -> None:
        for file in self._writing:
            if error is not None and file.error is None:  # no thread was to be had, say
                file.error = _cannot_write(file.path, error)
            file.is_done = True

    def _do(self, files: Sequence[_File]) -> None:
        for file in files:
            try:
                if file.is_tried:
                    with suppress(FileNotFoundError):
                        os.unlink(file.path)
                write_whole(file.path, filled_image(file.pairs))
            except (OSError, sqlite3.Error, MemoryError) as error:
                reason = _cannot_write(file.path, error)
                is_absent = not file.is_tried
                file.error = NotWrittenError(str(reason), path=file.path, reason=reason) if is_absent else reason
        try:
            sync_directory(self._directory)
        except OSError as error:
            for file in files:
                file.error = file.error or _cannot_write(file.path, error)


def _copy(target: str, pairs: Sequence[tuple[bytes, bytes]]) -> None:
    target = os.path.abspath(target)
    try:
        write_whole(target, filled_image(pairs))
        sync_directory(os.path.dirname(target))
    except FileExistsError:
        raise StorageError(f"{target} exists already; back up to a new name", path=target) from None
    except (OSError, sqlite3.Error, MemoryError) as error:
        raise _cannot_write(target, error) from error


def _cannot_write(path: str, error: BaseException) -> StorageError:
    what = f"cannot write {path}"
    why = error.strerror if isinstance(error, OSError) else error
    return out_of_descriptors(what, error, path=path) or StorageError(f"{what}: {why}", path=path)
