"""Making what is pending durable: one batch at a time, and never interrupted.

1. `commit` returns once everything that was pending at the call is durable. Callers that ask while a batch is being
   written share the next one, so branches that finish together cost one commit.
2. A commit is shielded from cancellation: the record of work that was done is not lost to an eviction.
3. A batch that was refused goes back to pending. Any other failure means unknown: the committer is broken for good, every
   waiter gets that error, and the activation has to end and read again.
"""

from __future__ import annotations

import trio

from perdure.storage import BatchRefusedError, Driver, commit_batch
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
        self._writing: trio.Event | None = None
        self.durable_version = pending.version
        self.commits = 0
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
        if self.durable_version >= target:
            return
        with trio.CancelScope(shield=True):
            while self.durable_version < target:
                if self.broken is not None:
                    raise self.broken
                if self._writing is not None:
                    await self._writing.wait()
                    continue
                self._writing = trio.Event()
                try:
                    # One turn of the scheduler: whoever finishes in it joins this batch.
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    await self._write()
                finally:
                    self._writing.set()
                    self._writing = None

    async def _write(self) -> None:
        version = self._pending.version
        batch = self._pending.take()
        try:
            await commit_batch(self._driver, batch)
        except BatchRefusedError:
            self._pending.put_back(batch)
            raise
        except BaseException as error:
            self.broken = error
            raise
        self.commits += 1
        self.durable_version = version
