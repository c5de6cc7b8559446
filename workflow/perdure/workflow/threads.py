"""Plain functions of steps, in worker threads.

1. A thread cannot be stopped. When its step is cancelled or times out, the thread is abandoned and its result ignored.
2. A later attempt of the same step, in this or a later activation of this process, waits until the abandoned thread has
   ended, so that two attempts never overlap.
3. Steps have a thread limiter of their own; storage never waits for a thread that a step holds.
4. In virtual time there are no threads: an autojump clock would pass on while one works. Plain functions run in place there, and
   what cannot (an asyncio loop) holds the clock (`virtual_time`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias

import trio

__all__ = [
    "HoldClock",
    "STEP_THREADS_MAX",
    "ThreadKey",
    "holding_clock",
    "run_in_thread",
    "step_limiter",
    "virtual_time",
    "wait_for_abandoned",
]

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


HoldClock: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes what lets no virtual time pass inside it."""

_hold_clock: Final[trio.lowlevel.RunVar[HoldClock | None]] = trio.lowlevel.RunVar("perdure.workflow.hold_clock", None)


@contextmanager
def virtual_time(hold_clock: HoldClock) -> Generator[None]:
    """Inside, this Trio run is one in virtual time: plain functions of steps run in place; for `perdure.testing`.

    Args:
        hold_clock: For what has to wait for a thread all the same.
    """
    token = _hold_clock.set(hold_clock)
    try:
        yield
    finally:
        _hold_clock.reset(token)


def holding_clock() -> AbstractContextManager[None]:
    """Inside, a thread is waited for: where time is virtual, none passes."""
    hold_clock = _hold_clock.get()
    return nullcontext() if hold_clock is None else hold_clock()


async def run_in_thread(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    key: ThreadKey,
    limiter: trio.CapacityLimiter | None,
    on_begun: Callable[[], None],
) -> Any:
    """Call the function in a worker thread. Cancellation returns at once and abandons the thread.

    In virtual time it is called in place, and nothing can interrupt it.

    Args:
        fn: A plain function.
        args: Its arguments.
        key: Which step it is for.
        limiter: How many such threads there may be; `step_limiter()` unless given.
        on_begun: Called when a thread was free: until then the step has not begun.
    """
    if _hold_clock.get() is not None:
        await trio.lowlevel.checkpoint()
        on_begun()
        return fn(*args)
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
