"""Plain functions of steps, in worker threads.

1. A thread cannot be stopped. When its step is cancelled or times out, the thread is abandoned and its result ignored.
2. A later attempt of the same step, in this or a later activation of this process, waits until the abandoned thread has
   ended, so that two attempts never overlap.
3. Steps have a thread limiter of their own; storage never waits for a thread that a step holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import trio

__all__ = ["STEP_THREADS_MAX", "ThreadKey", "run_in_thread", "step_limiter", "wait_for_abandoned"]

STEP_THREADS_MAX: Final = 40
"""How many plain functions of steps run at once, unless a limiter is given."""

ThreadKey: TypeAlias = tuple[bytes, tuple[str | int, ...]]
"""Which step of which workflow: its seed, and the step's path."""


class _Thread:
    """One call in a thread, and whoever waits for its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_finished = False
        self._waiters: list[tuple[trio.lowlevel.TrioToken, trio.Event]] = []

    def finish(self) -> None:
        with self._lock:
            self._is_finished = True
            waiters, self._waiters = self._waiters, []
        for token, event in waiters:
            try:
                token.run_sync_soon(event.set)
            except trio.RunFinishedError:
                continue  # whoever waited is gone with its run

    async def wait(self) -> None:
        event = trio.Event()
        with self._lock:
            if self._is_finished:
                return
            self._waiters.append((trio.lowlevel.current_trio_token(), event))
        await event.wait()


class _Slot:
    """A limiter that notes whether the thread was begun: before that, cancellation leaves nothing behind."""

    def __init__(self, limiter: trio.CapacityLimiter, on_begun: Callable[[], None]) -> None:
        self._limiter = limiter
        self._on_begun = on_begun
        self.is_begun = False

    async def acquire_on_behalf_of(self, borrower: Any) -> None:
        await self._limiter.acquire_on_behalf_of(borrower)
        self.is_begun = True
        self._on_begun()

    def release_on_behalf_of(self, borrower: Any) -> None:
        self._limiter.release_on_behalf_of(borrower)


_abandoned: Final[dict[ThreadKey, _Thread]] = {}
_abandoned_lock: Final = threading.Lock()


_limiter: Final[trio.lowlevel.RunVar[trio.CapacityLimiter]] = trio.lowlevel.RunVar("perdure.workflow.step_limiter")


def step_limiter() -> trio.CapacityLimiter:
    """The limit on threads of steps in this Trio run, where no other was given."""
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(STEP_THREADS_MAX)
        _limiter.set(limiter)
        return limiter


async def run_in_thread(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    key: ThreadKey,
    limiter: trio.CapacityLimiter | None,
    on_begun: Callable[[], None],
) -> Any:
    """Call the function in a worker thread. Cancellation returns at once and abandons the thread.

    Args:
        fn: A plain function.
        args: Its arguments.
        key: Which step it is for.
        limiter: How many such threads there may be; `step_limiter()` unless given.
        on_begun: Called when a thread was free: until then the step has not begun.
    """
    thread = _Thread()

    def call() -> tuple[Any]:
        try:
            return (fn(*args),)  # wrapped, since Trio refuses a coroutine with an error of its own
        finally:
            with _abandoned_lock:
                if _abandoned.get(key) is thread:
                    del _abandoned[key]
            thread.finish()

    slot = _Slot(limiter or step_limiter(), on_begun)
    with _abandoned_lock:
        _abandoned[key] = thread
    try:
        return (await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=slot))[0]  # type: ignore[arg-type]
    finally:
        if not slot.is_begun:
            with _abandoned_lock:
                if _abandoned.get(key) is thread:
                    del _abandoned[key]


async def wait_for_abandoned(key: ThreadKey) -> None:
    """Return once no thread of an earlier attempt of this step runs any more."""
    while (thread := _abandoned.get(key)) is not None:
        await thread.wait()
