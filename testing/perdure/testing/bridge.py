"""Runs a long synchronous job for an async caller, whatever it runs under, and lets go of it when it is cancelled.

1. The job is in a worker thread, with the caller's context variables and Trio runs of its own, so the caller's clock and event
   loop are no matter to it. A caller in virtual time waits without time passing.
2. A cancelled caller ends the Trio run in progress, and waits until the thread has ended: nothing goes on behind its back.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import trio
from trio.testing import MockClock

from perdure.testing.virtual import holding

__all__ = ["JobCancelled", "Link", "in_thread"]

T = TypeVar("T")


class JobCancelled(BaseException):
    """Whoever waits for the job does so no more. Never leaves `in_thread`."""


class Link:
    """What connects a job to whoever waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._run: tuple[trio.lowlevel.TrioToken, trio.CancelScope] | None = None
        self.is_begun: bool = False
        self.ended: threading.Event = threading.Event()

    def begin(self) -> bool:
        """In the job's thread: whether there is still somebody who waits for it."""
        with self._lock:
            self.is_begun = not self._is_cancelled
            return self.is_begun

    def check(self) -> None:
        """Between runs.

        Raises:
            JobCancelled: The caller is cancelled.
        """
        if self._is_cancelled:
            raise JobCancelled

    def cancel(self) -> None:
        """The caller is cancelled; from its thread."""
        with self._lock:
            self._is_cancelled = True
            run = self._run
        if run is not None:
            token, scope = run
            try:
                token.run_sync_soon(scope.cancel)
            except trio.RunFinishedError:
                return  # the check between runs sees it

    async def run(self, main: Callable[[], Awaitable[T]]) -> T:
        """In a Trio run of the job: `main`, until the caller is cancelled.

        Raises:
            JobCancelled: It is.
        """
        with trio.CancelScope() as scope:
            with self._lock:
                self._run = (trio.lowlevel.current_trio_token(), scope)
            try:
                self.check()
                return await main()
            finally:
                with self._lock:
                    self._run = None
        raise JobCancelled


async def in_thread(job: Callable[[Link], T]) -> T:
    """Call `job` in a worker thread and wait for it. Works under Trio, and under asyncio as far as anyio does.

    Cancelled, it ends the job, waits for that, and is cancelled then.
    """
    import anyio
    import anyio.to_thread

    link = Link()

    def work() -> T:
        if not link.begin():
            raise JobCancelled  # to nobody
        try:
            return job(link)
        finally:
            link.ended.set()

    with _standing_still():
        try:
            return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        except BaseException:
            link.cancel()
            if link.is_begun and not link.ended.is_set():
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(link.ended.wait, limiter=anyio.CapacityLimiter(1))
            raise


def _standing_still() -> AbstractContextManager[None]:
    try:
        clock = trio.lowlevel.current_clock()
    except RuntimeError:
        return nullcontext()
    return holding(clock) if isinstance(clock, MockClock) else nullcontext()
