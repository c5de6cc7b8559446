"""The journal: one log for the batches of all young workflows, synced for many of them at once.

A workflow is young until it has a file of its own. Its namespace is in memory, and what is durable of it is in the journal:
that it was born, and each of its batches. It gets its file when its driver is closed, or once it has become large
(`young_driver.py`); that the file has it all is recorded too, and from then on only the file counts. So a short workflow
costs its share of a few syncs, and one file that is written once.

1. Records are written in their order, so that what a killed process leaves of a segment is a prefix: a birth at once, as the
   catalog is told of it next, and what comes after it by whoever syncs. A sync makes all durable that was recorded when it began;
   those who come meanwhile share the next (`rounds.py`). At normal a segment is durable before the next is begun: else a power
   cut could leave a workflow's later batches without those between.
2. **While a workflow's birth is in the journal and no record says that it was filed, its file is as the journal says, or not
   there.** So `settle` comes before anybody else may write to the file, or remove it: a birth that came back after a power cut
   would bring back an old state, or a workflow that was deleted.
3. Segments are removed from the oldest on, each once all that were born in it are filed, and the removal of one is durable
   before the next is removed. So a birth is never there without a durable record of its filing, if there was one.
4. A sync that failed says nothing of what reached the disk, and is not tried again: the segment is left as it is, and who is
   young then writes no more to the journal, but gets its file with its next batch. The next ones are born in a new segment.

Rejected: a sync for each workflow's own log (measured, 100 workflows of five steps at a time: 300 workflows/s, and 780 so).
Kernel AIO, which syncs many files from one thread, gave no more than threads did: it is the syncs themselves that cost.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from errno import ENOSPC
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

import trio

from perdure.storage.crew import crew_of, is_anyone_waiting
from perdure.storage.driver import Batch
from perdure.storage.errors import StorageError
from perdure.storage.filing import Filing, NotWrittenError
from perdure.storage.journal_format import (
    SALT_BYTES,
    batch_record,
    born_record,
    filed_record,
    seed_of,
    segment_header,
)
from perdure.storage.memory import MemoryDriver
from perdure.storage.pace import Pace
from perdure.storage.rounds import Rounds
from perdure.storage.sqlite_image import sync_content, sync_directory, write_whole

if TYPE_CHECKING:
    from perdure.storage.directory import DataDirectory
    from perdure.storage.sqlite import CommitIn

__all__ = ["SEGMENT_BYTES", "Journal", "JournalError", "Young", "remove_segments", "segment_paths"]

SEGMENT_BYTES: Final = 1 << 20
"""Some 200 short workflows. It is written as zeros first, so that a sync changes nothing that the file system knows of it."""
RECORD_BYTES_MAX: Final = 32768
_SEGMENTS_MAX: Final = 8
"""With more, those young workflows are given their files that were born in the oldest."""
_RELIEVED_AT_ONCE: Final = 4
_SPARE: Final = 16
"""How many times a segment has to be free on the disk: the last of it is for files, and to record that they were written."""
_FILED_BYTES: Final = 13
"""Of the record that a workflow was filed. There is room for one for each: a full disk keeps nobody from being deleted."""
_ALONE_S: Final = 0.002
_SUFFIX: Final = ".log"


_logger = logging.getLogger("perdure.storage")


class JournalError(StorageError):
    """Whether a record of the journal is durable is not known, or it could not be written."""


@dataclass(eq=False, slots=True)
class Young:
    """A workflow that was born in the journal.

    Attributes:
        file: The name that its file has, or will have.
        number: What its records call it by.
        birth: The segment that it was born in.
        namespace: What it holds; of no use once it is filed.
        journaled_bytes: How much was written of it.
        is_failed: Whether it may write no more to the journal.
        is_doubtful: Whether a record of it was written, and is durable or not. Then nobody may read it before it has its file,
            which decides that.
        is_durable: Whether any of it was synced.
        is_tried: Whether its file was, or is being, written.
        is_discarded: Whether it is recorded to be gone, durably or not.
        is_filed: Whether it has its file, durably, or is gone for good.
        filed_at: Where the record that it was filed ends; `None` if there is none.
        turn: Held by whoever writes to the journal of it, or writes its file.
    """

    file: str
    number: int
    birth: _Segment
    namespace: MemoryDriver = field(default_factory=MemoryDriver)
    journaled_bytes: int = 0
    is_failed: bool = False
    is_doubtful: bool = False
    is_durable: bool = False
    is_tried: bool = False
    is_discarded: bool = False
    is_filed: bool = False
    filed_at: int | None = None
    turn: trio.Lock = field(default_factory=trio.Lock)


class _Segment:
    """A file of the journal.

    Attributes:
        seed: What the CRCs of its records are begun from.
        end: Where the next record goes.
        written_to: Up to where its records were handed to the system.
        unwritten: Those behind that, each of them once.
        born: The names of the files of those that were born in it.
        unfiled: Those of them that have no file yet, by number.
    """

    __slots__ = ("born", "descriptor", "end", "path", "seed", "unfiled", "unwritten", "written_to")

    def __init__(self, path: Path, descriptor: int, seed: int, end: int) -> None:
        self.path: Path = path
        self.descriptor: int = descriptor
        self.seed: int = seed
        self.end: int = end
        self.written_to: int = end
        self.unwritten: list[bytes] = []
        self.born: list[str] = []
        self.unfiled: dict[int, Young] = {}

    def __del__(self) -> None:
        self.close()

    def write(self, part: _Part) -> None:
        """Hand records to the system. Blocks.

        Raises:
            OSError: Not all of them were written.
        """
        if part.records and os.pwrite(self.descriptor, (data := b"".join(part.records)), part.offset) < len(data):
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(self.path))

    def part(self) -> _Part:
        """The records that were not handed over yet."""
        return _Part(self, self.written_to, self.unwritten.copy(), self.end)

    def close(self) -> None:
        """Close its file, if that is open."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Part:
    """Records of a segment, from an offset to an end."""

    segment: _Segment
    offset: int
    records: list[bytes]
    end: int

    def note_written(self) -> None:
        """Say that they were handed to the system, by whomever."""
        segment = self.segment
        if segment.written_to < self.end:  # else they were written again with later ones, at the same place
            segment.written_to = self.end
            del segment.unwritten[: len(self.records)]


class Journal:
    """The journal of one owned data directory. Not for use from several threads.

    Args:
        directory: Owned and prepared, and no segment is in it.
        filing: Writes the files of those that were young.
        limiter: Bounds the threads.
        is_full: Whether each batch is synced; if not, only the first of each workflow is.
        commit_in: See `SqliteDriver.open`.
    """

    def __init__(
        self,
        directory: DataDirectory,
        filing: Filing,
        limiter: trio.CapacityLimiter,
        *,
        is_full: bool,
        commit_in: CommitIn,
    ) -> None:
        self._directory = directory.journal
        self._workflows = directory.workflows
        self._filing = filing
        self._limiter = limiter
        self._is_full = is_full
        self._is_inline = commit_in == "inline"
        always = float("inf") if self._is_inline else 0.0
        self._pace = (
            Pace(alone_s=_ALONE_S, crowded_s=0.0) if commit_in == "auto" else Pace(alone_s=always, crowded_s=always)
        )
        self._segments: deque[_Segment] = deque()
        self._open: _Segment | None = None
        self._dirty: list[_Segment] = []
        self._spare: _Segment | None = None
        self._segments_made = 0
        self._numbers = 0
        self._unrecorded = 0
        self._by_file: dict[str, Young] = {}
        # Positions count the bytes of all records.
        self._written = 0
        self._synced = 0
        self._failures: list[tuple[int, int]] = []
        self._syncs = Rounds(limiter, self._begin_round, self._end_round)
        self._round = _Sync(0, [])
        self._may_remove = True
        self._chores_over: trio.Event | None = None
        self._is_closing = False

    # What is young.

    def bear(self, file: str) -> Young:
        """Record that a workflow is born; what a killed process leaves has that, and a sync makes it durable.

        Raises:
            OSError: It cannot be recorded.
        """
        segment = self._segment_for(64 + len(file))
        young = Young(file, self._numbers, segment)
        self._numbers += 1
        self._append(born_record(segment.seed, young.number, file))
        self._flush()
        segment.born.append(file)
        segment.unfiled[young.number] = young
        self._unrecorded += 1
        self._by_file[file] = young
        return young

    def find(self, file: str) -> Young | None:
        """The workflow whose file has this name, if it was born here, and its birth may still be in the journal."""
        return self._by_file.get(file)

    def write(self, young: Young, batch: Batch) -> int | None:
        """Write a record of a batch; returns the position that is to be synced, or `None` if it is too large for one.

        Raises:
            OSError: It was not written.
        """
        segment = self._open or self._segment_for(0)
        record = batch_record(segment.seed, young.number, batch)
        if len(record) > RECORD_BYTES_MAX:
            return None
        if segment.end + len(record) > self._room():
            segment = self._segment_for(len(record))
            record = batch_record(segment.seed, young.number, batch)
        young.journaled_bytes += len(record)
        return self._append(record)

    async def make_durable(self, young: Young, position: int) -> None:
        """Return once what was written of a workflow is as durable as it has to be. Not interrupted by cancellation.

        Raises:
            JournalError: Whether it is durable is not known.
            OSError: The same.
        """
        if self._is_full or not young.is_durable:
            await self.sync(position)
            young.is_durable = True
        else:
            self._flush()

    def make_durable_nowait(self, young: Young, position: int) -> None:
        """`make_durable`, in place. Raises as that does."""
        if self._is_full or not young.is_durable:
            self._sync_here()
            self._check(position)
            young.is_durable = True
        else:
            self._flush()

    def can_sync_here(self) -> bool:
        """Whether a sync would be short, and keep nobody waiting."""
        return self._is_inline or (not self._syncs.is_busy and self._is_quick())

    def path(self, young: Young) -> str:
        """Where its file is, or will be."""
        return os.path.join(self._workflows, young.file)

    async def file(self, young: Young) -> None:
        """Write the file of a workflow, if that was not done; durable on return. Not interrupted by cancellation.

        The caller has its turn. From here on nothing more is written of it to the journal, as its file counts once it is there.

        Raises:
            StorageError: The file cannot be written. If it is surely not there, all is as before; else nothing more is written
                of the workflow to the journal until a later call succeeds.
        """
        if young.is_filed:
            return
        is_tried, is_failed, failures = young.is_tried, young.is_failed, len(self._failures)
        young.is_tried = young.is_failed = True
        pairs = await young.namespace.list(b"")
        try:
            await self._filing.write(self.path(young), pairs, is_tried=is_tried)
        except NotWrittenError as error:
            young.is_tried = is_tried
            young.is_failed = is_failed or len(self._failures) > failures  # a sync may have failed meanwhile
            raise error.reason from None
        self.note_filed(young)

    async def copy(self, young: Young, target: str) -> None:
        """Write a copy of what a workflow holds to a file; complete and durable on return, or not there.

        Raises:
            StorageError: Something is there, or it cannot be written.
        """
        await self._filing.copy(target, await young.namespace.list(b""))

    def note_filed(self, young: Young) -> None:
        """Record that a workflow has a file, which is durable, or that it never came to be."""
        young.is_filed = True
        young.birth.unfiled.pop(young.number, None)
        with suppress(OSError):  # `settle` tries again
            self._record_filed(young)

    async def discard(self, young: Young) -> None:
        """Record that a workflow that has no file is gone for good; durable on return. Not interrupted by cancellation.

        If it got its file meanwhile, that may be removed on return.

        Raises:
            JournalError: It is not known whether that is durable: nobody may open the workflow until this was done again.
            StorageError: It cannot be recorded; all is as before.
        """
        async with young.turn:
            if not young.is_filed:
                young.is_failed = young.is_discarded = True
                try:
                    await self.settle(young)
                except JournalError:
                    raise
                except StorageError:
                    young.is_discarded = False
                    raise
                young.is_filed = True
                young.namespace = MemoryDriver()
                young.birth.unfiled.pop(young.number, None)
        await self.settle(young)

    async def settle(self, young: Young) -> None:
        """Return once it is durable that a workflow was filed. Not interrupted by cancellation.

        Raises:
            StorageError: It cannot be made durable.
        """
        if self.find(young.file) is not young:
            return  # its birth is gone
        try:
            position = self._record_filed(young) if young.filed_at is None else young.filed_at
        except OSError as error:
            raise StorageError(
                f"cannot write to {self._directory}: {error.strerror}; the file {young.file} is not used until that can be done",
                path=str(self._directory),
            ) from error
        await self.sync(position)

    @property
    def is_long(self) -> bool:
        """Whether there are too many segments, so that `relieve` has something to do."""
        return len(self._segments) > _SEGMENTS_MAX and self._may_remove

    async def relieve(self) -> None:
        """Write the files of some of those that keep the oldest segment, if there are too many segments."""
        if not self.is_long:
            return
        for young in list(self._segments[0].unfiled.values())[:_RELIEVED_AT_ONCE]:
            if not self.is_long:
                return  # it was closed meanwhile, say
            with suppress(StorageError), trio.CancelScope(shield=True):  # its own user will meet the error
                async with young.turn:
                    await self.file(young)

    async def aclose(self) -> None:
        """Write the files of those that are still young, and remove the journal; nobody uses it any longer. What cannot have its
        file is durable in the journal. Not interrupted by cancellation.

        Raises:
            StorageError: A file cannot be written, or the journal not be removed, which the next `acquire` does; or it cannot
                be made durable.
        """
        self._is_closing = True
        if self._chores_over is not None:
            await self._chores_over.wait()
        problem: StorageError | None = None
        for young in [young for segment in self._segments for young in segment.unfiled.values()]:
            try:
                async with young.turn:
                    await self.file(young)
            except StorageError as error:
                problem = error
        if not self._may_remove:
            problem = StorageError(f"a part of {self._directory} cannot be removed", path=str(self._directory))
        try:
            if problem is not None:
                await self.sync(self._written)
                raise problem
            await self._run(partial(remove_segments, [segment.path for segment in self._all_segments()]))
        except OSError as error:
            raise StorageError(
                f"cannot remove {error.filename or self._directory}: {error.strerror}", path=str(self._directory)
            ) from error
        finally:
            for segment in self._all_segments():
                segment.close()
            self._segments.clear()

    async def _run(self, work: Callable[[], None]) -> None:
        if self._is_inline:
            work()
        else:
            await crew_of(self._limiter).run(work)

    def _all_segments(self) -> list[_Segment]:
        return [*self._segments, *([] if self._spare is None else [self._spare])]

    # Records.

    def _record_filed(self, young: Young) -> int:
        """Record that it was filed; on a disk that is nearly full, too, as else nobody could go on in a file."""
        segment = self._open
        if segment is None or segment.end + _FILED_BYTES > SEGMENT_BYTES:
            segment = self._next_segment(1)
        young.filed_at = self._append(filed_record(segment.seed, young.number))
        self._unrecorded -= 1
        return young.filed_at

    def _room(self) -> int:
        """Where records end that leave room for those of who was filed."""
        return SEGMENT_BYTES - min(_FILED_BYTES * self._unrecorded, SEGMENT_BYTES // 4)

    def _append(self, record: bytes) -> int:
        segment = self._open
        assert segment is not None
        segment.unwritten.append(record)
        segment.end += len(record)
        self._written += len(record)
        if not self._dirty or self._dirty[-1] is not segment:
            self._dirty.append(segment)
        return self._written

    @trio.lowlevel.enable_ki_protection
    def _flush(self) -> None:
        """Hand all records to the system, in their order: what a killed process leaves.

        A sync in a thread may be about to write the same, to the same place.
        """
        try:
            for segment in self._dirty:
                part = segment.part()
                segment.write(part)
                part.note_written()
        except BaseException:
            self._fail()
            raise

    def _segment_for(self, size: int) -> _Segment:
        """The segment that takes the next record.

        Raises:
            OSError: It cannot be made, or what is in the one before cannot be made durable.
        """
        segment = self._open
        return segment if segment is not None and segment.end + size <= self._room() else self._next_segment(_SPARE)

    def _next_segment(self, spare: int) -> _Segment:
        segment = self._open
        following = self._spare = self._spare or _make_segment(self._next_path(), spare)
        if segment is not None and not self._is_full:
            self._seal(segment)
        self._open, self._spare = following, None
        self._segments.append(following)
        return following

    @trio.lowlevel.enable_ki_protection
    def _seal(self, segment: _Segment) -> None:
        """Make all of a segment durable before there is anything in the next.

        Where not each batch is synced, a power cut could otherwise leave a later one of a workflow without an earlier one.
        """
        try:
            part = segment.part()
            segment.write(part)
            sync_content(segment.descriptor)
            part.note_written()
        except BaseException:
            self._fail()
            raise

    def _next_path(self) -> Path:
        self._segments_made += 1
        return self._directory / f"{self._segments_made:08x}{_SUFFIX}"

    # Syncs.

    async def sync(self, position: int) -> None:
        """Return once everything up to a position is durable. Not interrupted by cancellation.

        Raises:
            JournalError: Whether it is durable is not known.
        """
        if not self._check(position):
            if self.can_sync_here():
                self._sync_here()
            await self._syncs.wait(partial(self._check, position))

    def _check(self, position: int) -> bool:
        """Whether everything up to a position is durable. Raises as `sync` does."""
        for start, end in self._failures:
            if start < position <= end:
                raise JournalError(
                    f"a sync of {self._directory} failed, and what was written last may be there or not",
                    path=str(self._directory),
                )
        return position <= self._synced

    @trio.lowlevel.enable_ki_protection
    def _sync_here(self) -> None:
        sync = self._begin_sync()
        try:
            sync.do()
        except BaseException as error:
            self._fail()
            if not isinstance(error, Exception):  # else those who wait for it are told
                raise
        else:
            self._end_sync(sync)

    def _begin_round(self) -> Callable[[], None]:
        self._round = self._begin_sync()
        return self._round.do

    def _end_round(self, error: BaseException | None) -> None:
        if error is None:
            self._end_sync(self._round)
        else:
            self._fail()  # those who wait for it are told

    def _begin_sync(self) -> _Sync:
        sync = _Sync(self._written, [segment.part() for segment in self._dirty])
        self._dirty = []
        return sync

    def _end_sync(self, sync: _Sync) -> None:
        self._pace.record(sync.elapsed_s)
        self._synced = sync.target
        for part in sync.parts:
            part.note_written()
        for segment in self._segments:
            if segment is not self._open and segment not in self._dirty:
                segment.close()
        self._begin_chores()

    def _begin_chores(self) -> None:
        """Have done what else blocks, if there is anything and nobody is at it: nobody waits for that."""
        removable, wants_spare = self._removable(), self._wants_spare()
        if self._is_closing or self._chores_over is not None or not (removable or wants_spare):
            return
        chores = _Chores([segment.path for segment in removable], self._next_path() if wants_spare else None)
        if self._is_inline:
            chores.do()
            self._end_chores(chores, None)
            return
        with suppress(Exception):  # with no memory for them, they come with a later sync
            over = trio.Event()
            crew_of(self._limiter).start(chores.do, partial(self._end_chores, chores))
            self._chores_over = over

    def _end_chores(self, chores: _Chores, error: BaseException | None) -> None:
        for _ in range(chores.removed):
            segment = self._segments.popleft()
            segment.close()
            for file in segment.born:
                self._unrecorded -= self._by_file.pop(file).filed_at is None
        if chores.stuck_by is not None and self._may_remove:
            self._may_remove = False
            _logger.warning(
                "the journal in %s grows until it is closed, as a part cannot be removed: %s",
                self._directory,
                chores.stuck_by,
            )
        if chores.spare is not None:
            if self._segments and chores.spare.path < self._segments[-1].path:
                # Another was needed and made meanwhile; they are read in the order of their names.
                with suppress(OSError):
                    chores.spare.path.unlink()
            else:
                self._spare = chores.spare
        if self._chores_over is not None:
            self._chores_over.set()
            self._chores_over = None

    def _fail(self) -> None:
        """Trust nothing that is not durable yet, and use this segment no more."""
        self._failures.append((self._synced, self._written))
        self._open = None
        self._dirty = []
        for young in self._by_file.values():
            young.is_failed = True
            if young.filed_at is not None and young.filed_at > self._synced:
                young.filed_at = None
                self._unrecorded += 1

    def _is_quick(self) -> bool:
        return self._pace.runs_in_place(partial(is_anyone_waiting, self._limiter))

    def _wants_spare(self) -> bool:
        segment = self._open
        return segment is not None and self._spare is None and segment.end > self._room() // 2

    def _removable(self) -> list[_Segment]:
        """The oldest segments that nobody needs any more."""
        found: list[_Segment] = []
        for segment in self._segments:
            if segment is self._open or segment.unfiled or not self._may_remove:
                break
            found.append(segment)
        return found


class _Sync:
    """A sync.

    Args:
        target: The position that it makes durable.
        parts: What to write, and then to sync.

    Attributes:
        elapsed_s: How long it took.
    """

    def __init__(self, target: int, parts: list[_Part]) -> None:
        self.target: int = target
        self.parts: list[_Part] = parts
        self.elapsed_s: float = 0.0

    def do(self) -> None:
        """Do it. Blocks.

        Raises:
            OSError: It cannot be written, or the sync failed.
        """
        started = perf_counter()
        for part in self.parts:
            part.segment.write(part)
            sync_content(part.segment.descriptor)
        self.elapsed_s = perf_counter() - started


class _Chores:
    """What is to be done now and then.

    Args:
        removable: Segments to remove, the oldest first.
        spare_path: Where to make one that will be needed soon, if anywhere.

    Attributes:
        removed: How many were removed.
        stuck_by: Why it is not known if the removal of one is durable: then no later one may be removed.
        spare: The one that was made.
    """

    def __init__(self, removable: list[Path], spare_path: Path | None) -> None:
        self.removed: int = 0
        self.stuck_by: OSError | None = None
        self.spare: _Segment | None = None
        self._removable = removable
        self._spare_path = spare_path

    def do(self) -> None:
        """Do it. Blocks; raises nothing."""
        for path in self._removable:
            try:
                remove_segments([path])
            except OSError as error:
                if not path.exists():
                    self.stuck_by = error
                break  # else it is tried again with a later sync
            self.removed += 1
        if self._spare_path is not None:
            with suppress(OSError):  # it is made when it is needed
                self.spare = _make_segment(self._spare_path, _SPARE)


def segment_paths(directory: Path) -> list[Path]:
    """The segments that are in a directory, the oldest first.

    Raises:
        OSError: It cannot be listed.
    """
    return sorted(path for path in directory.iterdir() if path.suffix == _SUFFIX)


def _make_segment(path: Path, spare: int) -> _Segment:
    """Make an empty segment, durably, unless the disk is so full that it had not been free this many times.

    Raises:
        OSError: It cannot be made.
    """
    disk = os.statvfs(path.parent)
    if disk.f_bavail * disk.f_frsize < spare * SEGMENT_BYTES:
        raise OSError(ENOSPC, os.strerror(ENOSPC), str(path))
    salt = os.urandom(SALT_BYTES)
    header = segment_header(salt)
    write_whole(str(path), header.ljust(SEGMENT_BYTES, b"\0"))
    try:
        sync_directory(str(path.parent))
        return _Segment(path, os.open(path, os.O_WRONLY | os.O_CLOEXEC), seed_of(salt), len(header))
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def remove_segments(paths: Iterable[Path]) -> None:
    """Remove segments, each for good before the next.

    Raises:
        OSError: One cannot be removed.
    """
    for path in paths:
        path.unlink(missing_ok=True)
        sync_directory(str(path.parent))
