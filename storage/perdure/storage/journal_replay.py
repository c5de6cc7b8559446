"""What a killed process left in its journal: each workflow that was young gets its file.

1. Before anything else is looked at: afterwards every workflow has its file, or never had a batch that was acknowledged.
2. A file that is there is left alone. Nobody has written to it since it was made, as its record came first (`Journal.settle`).
3. A segment of which something cannot be read is kept beside (`.torn`), as evidence: a power cut leaves that, and a failing disk.
4. The journal is removed once all files are durable. Killed in between, the next replay finds some files there, and goes on.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from pathlib import Path

from perdure.storage.directory import DataDirectory
from perdure.storage.errors import StorageError
from perdure.storage.journal import remove_segments, segment_paths
from perdure.storage.journal_format import Born, Changed, Filed, is_torn, read_segment
from perdure.storage.memory import MemoryDriver
from perdure.storage.naming import parse_file_name
from perdure.storage.sqlite_image import can_fill_images, filled_image, sync_directory, write_whole

__all__ = ["replay_journal"]

_logger = logging.getLogger("perdure.storage")


def replay_journal(directory: DataDirectory) -> int:
    """Give their files to those that were young, and remove the journal; durable on return. Blocks.

    Args:
        directory: Owned, and prepared.

    Returns:
        How many files were made.

    Raises:
        FormatVersionError: A newer Perdure wrote the journal; nothing was changed.
        CorruptStoreError: A segment is damaged; nothing was changed.
        StorageError: A file cannot be made; the journal stays.
        OSError: The directory cannot be read, or the journal cannot be removed; the next replay goes on.
    """
    for half_made in directory.journal.glob("*.new-*"):
        half_made.unlink(missing_ok=True)
    paths = segment_paths(directory.journal)
    if not paths:
        return 0
    if not can_fill_images():
        raise StorageError(
            f"{directory.journal} holds workflows that were new, and Python's sqlite3 cannot write their files as its build has "
            "no Connection.deserialize; open the directory with another",
            path=str(directory.journal),
        )
    made = 0
    for file, namespace in _read(paths):
        path = directory.workflows / file
        if not os.path.lexists(path):
            pairs = sorted(namespace.data.items())
            try:
                write_whole(str(path), filled_image(pairs))
            except sqlite3.Error as error:
                raise StorageError(f"cannot make {path}: {error}", path=str(path)) from error
            made += 1
    sync_directory(str(directory.workflows))
    for path in paths:
        if is_torn(path.read_bytes()):
            _put_aside(path)
        else:
            remove_segments([path])
    return made


def _put_aside(path: Path) -> None:
    """Keep a segment where it is not read any more; durable on return, as the next must not go before it."""
    torn = path.with_name(f"{path.name}.{time.time_ns() // 1_000_000}.torn")
    _logger.warning("%s ends in what cannot be read, as after a power cut or damage; it is kept as %s", path, torn.name)
    path.rename(torn)
    sync_directory(str(path.parent))


def _read(paths: list[Path]) -> list[tuple[str, MemoryDriver]]:
    """The files of those that have none as far as the journal says, and what belongs into them."""
    young: dict[int, tuple[str, MemoryDriver]] = {}
    for path in paths:
        for record in read_segment(path.read_bytes(), str(path)):
            match record:
                case Born(number, file):
                    if parse_file_name(file) is None:
                        raise StorageError(f"{path} names a file {file!r:.200}, which is none of ours", path=str(path))
                    young[number] = (file, MemoryDriver())
                case Changed(number, batch):
                    # Of one whose birth was in a segment that is gone, the file has it all.
                    if number in young:
                        young[number][1].batch_nowait(batch)
                case Filed(number):
                    young.pop(number, None)
    return list(young.values())
