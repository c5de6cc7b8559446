"""Making what is pending durable: one batch at a time, and never interrupted.

1. `commit` returns once everything that was pending at the call is durable. Callers that ask while a batch is being
   written share the next one, so branches that finish together cost one commit.
2. A commit is shielded from cancellation: the record of work that was done is not lost to an eviction.
3. Who reads what is recorded and tells it to the outside waits until nothing of it is pending (`settle`). Whoever has committed
   goes on only after those who waited then have looked: a workflow that records without a pause would else never be seen at
   rest. Those who come later wait for the next commit, so that nobody who looks again and again holds the workflow up.
4. A batch that was refused goes back to pending. Any other failure means unknown: the committer is broken for good, every
   waiter gets that error, and the activation has to end and read again.
"""

from __future__ import annotations

from typing import Final

import trio

from perdure.storage import Batch, BatchRefusedError, Driver, commit_batch
from perdure.storage.driver import nowait_batch
from perdure.workflow.pending import Pending
from perdure.workflow.watch import Watch

__all__ = ["COMMITS_PER_TURN", "Committer"]

COMMITS_PER_TURN: Final = 16
"""How many commits a lone branch makes before it lets others run: a turn of the scheduler costs about half a step."""


class _Round:
    """Those who wait together for a moment at which nothing is pending: how many they are, and whether all have looked."""

    __slots__ = ("over", "size")

    def __init__(self) -> None:
        self.size: int = 0
        self.over: trio.Event = trio.Event()


class Committer:
    """Writes one workflow's pending changes.

    Args:
        driver: Where to.
        pending: What.
        is_alone: Whether only one branch records: then there is nobody to share a batch with.
        watch: Is told what became durable.

    Attributes:
        durable_version: The version of `pending` up to which everything is durable.
        commits: How many batches were written.
        broken: The error after which nothing more is written, if there was one.
    """

    def __init__(self, driver: Driver, pending: Pending, *, is_alone: bool = False, watch: Watch | None = None) -> None:
        self.is_alone: bool = is_alone
        self._commits_in_turn = 0
        self._declined_version = -1
        self._driver = driver
        self._pending = pending
        self._batch_nowait = nowait_batch(driver) if driver.atomic_batch else None
        self._commit_batch = commit_batch if watch is None else watch.commit_batch
        if watch is not None and self._batch_nowait is not None:
            self._batch_nowait = watch.watched(self._batch_nowait)
        self._writing: trio.Event | None = None
        self._round: _Round | None = None
        self._held: _Round | None = None
        self.durable_version: int = pending.version
        self.commits: int = 0
        self.broken: BaseException | None = None

    @property
    def is_clean(self) -> bool:
        """Whether everything recorded so far is durable."""
        return self.durable_version >= self._pending.version

    @property
    def is_writing(self) -> bool:
        """Whether a batch is on its way, so that it is not known yet what is durable."""
        return self._writing is not None

    def commit_nowait(self) -> bool:
        """`commit`, where it can be done without waiting; returns whether it was."""
        version = self._pending.version
        if self.durable_version >= version:
            return True
        if self._round is not None or self._held is not None:
            return False
        return self.is_alone and self._declined_version != version and self._write_nowait()

    async def commit(self) -> None:
        """Return once everything recorded before the call is durable.

        A scheduling point, for a lone branch at least every `COMMITS_PER_TURN` times. Cancellation does not interrupt it.

        Raises:
            BatchRefusedError: Nothing was written; everything is pending still.
            StorageError: Whether it was written is unknown.
        """
        if self.commit_nowait():
            return
        await self._commit()
        if self._round is not None and self.is_clean:
            self._held, self._round = self._round, None
        if self._held is not None:
            with trio.CancelScope(shield=True):
                await self._held.over.wait()

    async def settle(self) -> None:
        """Return once nothing is pending; until the caller gives others a turn, it stays so. Raises as `commit` does.

        Cancellation does not interrupt a batch that is being written.
        """
        while not self.is_clean:
            if self._round is None:
                self._round = _Round()
            waiting = self._round
            waiting.size += 1
            try:
                await self._commit()
            finally:
                waiting.size -= 1
                if not waiting.size:
                    self._end_round(waiting)

    def _end_round(self, waiting: _Round) -> None:
        waiting.over.set()
        if self._round is waiting:
            self._round = None
        if self._held is waiting:
            self._held = None

    async def _commit(self) -> None:
        """Write until what was pending at the call is durable, and hold nobody up after it."""
        target = self._pending.version
        while self.durable_version < target:
            if self.broken is not None:
                raise self.broken
            if self._writing is not None:
                with trio.CancelScope(shield=True):
                    await self._writing.wait()
                continue
            writing = self._writing = trio.Event()
            self._commits_in_turn = 0
            try:
                # One turn of the scheduler: whoever finishes in it joins this batch.
                await trio.lowlevel.cancel_shielded_checkpoint()
                await self._write()
            finally:
                self._writing = None
                writing.set()

    def _write_nowait(self) -> bool:
        """Write what is pending here and now, if nothing speaks against it; returns whether it did."""
        if self._batch_nowait is None or self._writing is not None or self.broken is not None:
            return False
        self._commits_in_turn += 1
        if self._commits_in_turn >= COMMITS_PER_TURN:
            return False
        version = self._pending.version
        batch = self._pending.take()
        is_written = False
        try:
            is_written = self._batch_nowait(batch)
        except BatchRefusedError:
            raise
        except BaseException as error:
            self.broken = error
            raise
        finally:
            if not is_written and self.broken is None:
                self._pending.put_back(batch)
                self._declined_version = self._pending.version
        if is_written:
            self.commits += 1
            self.durable_version = version
        return is_written

    async def commit_alone(self, batch: Batch) -> None:
        """Write this batch, and nothing of what is pending; for what is to be said of a run whose records are not to be kept.

        Cancellation does not interrupt it.

        Raises:
            BatchRefusedError: Nothing was written.
            StorageError: Whether it was written is unknown.
        """
        while self._writing is not None:
            with trio.CancelScope(shield=True):
                await self._writing.wait()
        if self.broken is not None:
            raise self.broken
        writing = self._writing = trio.Event()
        try:
            await self._hand_over(batch)
        finally:
            self._writing = None
            writing.set()

    async def _write(self) -> None:
        version = self._pending.version
        batch = self._pending.take()
        try:
            await self._hand_over(batch, is_declined=self._declined_version == version)
        except BatchRefusedError:
            self._pending.put_back(batch)
            raise
        self.durable_version = version

    async def _hand_over(self, batch: Batch, *, is_declined: bool = False) -> None:
        """Write it; `is_declined` if the driver was just asked to do so at once, and did not: that is not free."""
        try:
            # Without waiting, there is nothing that a cancellation could interrupt, and no need for a scope against it.
            if is_declined or self._batch_nowait is None or not self._batch_nowait(batch):
                with trio.CancelScope(shield=True):
                    await self._commit_batch(self._driver, batch)
        except BatchRefusedError:
            raise
        except BaseException as error:
            self.broken = error
            raise
        self.commits += 1
