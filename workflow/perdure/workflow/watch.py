"""From one activation's batches to what hooks are told of them.

1. What a batch changes is read from the batch, and from memory at the moment when it was taken, where both say the same. So
   nothing is told that is not durable, whoever changed it: a branch, a wake-up from outside, a rollback.
2. Failures are noted when they are recorded, and told with the batch that makes them durable. A batch that was refused takes
   them along when it goes back; with records that are dropped (a fault, a race's loser), or of unknown outcome, they are
   dropped.
3. Only batches are looked at, never all of history, but for a change of metadata alone, of which only the entry's id is in the
   batch. Those are rare (wake-ups, rollback), and one look at history serves all until entries are forgotten.
4. Where nobody watches, the committer has no trace of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, cast

from perdure.storage import Batch, BatchRefusedError, Driver, commit_batch, layout
from perdure.storage.keys import unpack
from perdure.storage.schema import Entry, EntryMetadata, LoopIteration, decode_entry, decode_metadata
from perdure.workflow.history import History, Node, Path
from perdure.workflow.hooks import ChangedEntry, ErrorEvent, HistoryUpdated, Hooks

__all__ = ["Watch"]

_STATE_KEYS: Final = (layout.STATE_KEY, layout.OUTPUT_KEY, layout.ERROR_KEY)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure, and the key whose value records it."""

    event: ErrorEvent
    key: bytes


@dataclass(frozen=True, slots=True)
class _News:
    """What is to be told once a batch is durable."""

    update: HistoryUpdated | None
    failures: list[_Failure]


class Watch:
    """Tells an activation's hooks what its commits made durable."""

    def __init__(self, hooks: Hooks, history: History) -> None:
        self._hooks = hooks
        self._history = history
        self._failures: list[_Failure] = []
        self._nodes: dict[str, Node] | None = None

    def note(self, failure: ErrorEvent, entry_id: str | None = None) -> None:
        """Tell of this failure once that is durable; it was just recorded in this entry's metadata, or as the workflow's."""
        key = layout.ERROR_KEY if entry_id is None else layout.metadata_key(entry_id)
        self._failures.append(_Failure(failure, key))

    def forget_failures(self) -> None:
        """What was recorded since the last batch is dropped."""
        self._failures = []

    # What the committer does instead where somebody watches.

    def watched(self, batch_nowait: Callable[[Batch], bool]) -> Callable[[Batch], bool]:
        """A driver's `batch_nowait` that tells what it has written."""

        def write(batch: Batch) -> bool:
            news = self._take(batch)
            try:
                is_written = batch_nowait(batch)
            except BatchRefusedError:
                self._put_back(news)
                raise
            if is_written:
                self._tell(news)
            else:
                self._put_back(news)
            return is_written

        return write

    async def commit_batch(self, driver: Driver, batch: Batch) -> None:
        """`commit_batch` that tells what it has written."""
        news = self._take(batch)
        try:
            await commit_batch(driver, batch)
        except BatchRefusedError:
            self._put_back(news)
            raise
        self._tell(news)

    def _take(self, batch: Batch) -> _News:
        failures, self._failures = self._failures, []
        if failures:
            recorded = {key for key, _ in batch.puts}
            failures = [failure for failure in failures if failure.key in recorded]
        return _News(self._update(batch) if self._hooks.wants_updates else None, failures)

    def _put_back(self, news: _News) -> None:
        self._failures = [*news.failures, *self._failures]

    def _tell(self, news: _News) -> None:
        if news.update is not None:
            self._hooks.tell_update(news.update)
        for failure in news.failures:
            self._hooks.tell_error(failure.event)

    # Reading a batch.

    def _update(self, batch: Batch) -> HistoryUpdated | None:
        forgotten = list(self._forgotten(batch))
        if forgotten:
            self._nodes = None
        changed = list(self._changed(batch))
        if not changed and not forgotten and not any(key in _STATE_KEYS for key, _ in batch.puts):
            return None
        history = self._history
        return HistoryUpdated(history.workflow_id, history.state, changed, forgotten)

    def _changed(self, batch: Batch) -> Iterator[ChangedEntry]:
        history = self._history
        metadata = {key: value for key, value in batch.puts if key.startswith(layout.METADATA_PREFIX)}
        for key, value in batch.puts:
            if key.startswith(layout.HISTORY_PREFIX):
                entry = decode_entry(value)
                yield history.path_of(entry.location), entry, self._metadata(entry.id, metadata)
        for key in list(metadata):  # what is left has changed without its entry
            found = self._find(layout.parse_metadata_key(key))
            if found is not None:
                yield history.path_of(found.location), found, decode_metadata(metadata[key])

    def _metadata(self, entry_id: str, written: dict[bytes, bytes]) -> EntryMetadata | None:
        data = written.pop(layout.metadata_key(entry_id), None)
        if data is not None:
            return decode_metadata(data)
        kept = self._history.metadata(entry_id)
        return None if kept is None else replace(kept)

    def _find(self, entry_id: str) -> Entry | None:
        """The entry of an id, as it is now."""
        node = self._history.open_retries.get(entry_id)
        if node is not None:
            return node.entry
        if self._nodes is None or entry_id not in self._nodes:
            self._nodes = {node.entry.id: node for node in self._history.root.walk() if node.entry is not None}
        return self._nodes[entry_id].entry if entry_id in self._nodes else None

    def _forgotten(self, batch: Batch) -> Iterator[Path]:
        path_of = self._history.path_of
        for key in (*batch.deletes, *batch.delete_prefixes):
            if key.startswith(layout.HISTORY_PREFIX) and key != layout.HISTORY_PREFIX:
                yield path_of(layout.parse_entry_key(key))
        for start, end in batch.delete_ranges:
            if not start.startswith(layout.HISTORY_PREFIX):
                continue
            *loop, first = layout.parse_entry_key(start)
            after = unpack(end)[-1]
            if isinstance(first, LoopIteration) and isinstance(
                after, tuple
            ):  # the iterations of one loop, up to another
                path = path_of(tuple(loop))
                for iteration in range(first.iteration, cast("int", after[-1])):
                    yield (*path, iteration)
