"""Making what is pending durable: one batch at a time, and never interrupted.

1. `commit` returns once everything that was pending at the call is durable. Callers that ask while a batch is being
   written share the next one, so branches that finish together cost one commit.
2. A commit is shielded from cancellation: the record of work that was done is not lost to an eviction.
3. A batch that was refused goes back to pending. Any other failure means unknown: the committer is broken for good, every
   waiter gets that error, and the activation has to end and read again.
"""

from __future__ import annotations

import trio

from perdure.storage import Batch, BatchRefusedError, Driver, NowaitDriver, commit_batch
from perdure.workflow.pending import Pending

__all__ = ["Committer"]


class Committer:
    """Writes one workflow's pending changes.

    Attributes:
        durable_version: The version of `pending` up to which everything is durable.
        commits: How many batches were written.
        broken: The error after which nothing more is written, if there was one.
    """

    def __init__(self, driver: Driver, pending: Pending) -> None:
        self._driver = driver
        self._pending = pending
        self._batch_nowait = driver.batch_nowait if isinstance(driver, NowaitDriver) and driver.atomic_batch else None
        self._writing: trio.Event | None = None
        self.durable_version: int = pending.version
        self.commits: int = 0
        self.broken: BaseException | None = None

    @property
    def is_clean(self) -> bool:
        """Whether everything recorded so far is durable."""
        return self.durable_version >= self._pending.version

    async def commit(self) -> None:
        """Return once everything recorded before the call is durable.

        A scheduling point, but cancellation does not interrupt it.

        Raises:
            BatchRefusedError: Nothing was written; everything is pending still.
            StorageError: Whether it was written is unknown.
        """
        target = self._pending.version
        while self.durable_version < target:
            if self.broken is not None:
                raise self.broken
            if self._writing is not None:
                with trio.CancelScope(shield=True):
                    await self._writing.wait()
                continue
            writing = self._writing = trio.Event()
            try:
                # One turn of the scheduler: whoever finishes in it joins this batch.
                await trio.lowlevel.cancel_shielded_checkpoint()
                await self._write()
            finally:
                self._writing = None
                writing.set()

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
            await self._hand_over(batch)
        except BatchRefusedError:
            self._pending.put_back(batch)
            raise
        self.durable_version = version

    async def _hand_over(self, batch: Batch) -> None:
        try:
            # Without waiting, there is nothing that a cancellation could interrupt, and no need for a scope against it.
            if self._batch_nowait is None or not self._batch_nowait(batch):
                with trio.CancelScope(shield=True):
                    await commit_batch(self._driver, batch)
        except BatchRefusedError:
            raise
        except BaseException as error:
            self.broken = error
            raise
        self.commits += 1
