"""Time as the engine sees it: the wall clock, because deadlines outlive the process.

1. Deadlines are wall-clock milliseconds since the epoch, since a monotonic clock means nothing after a restart.
2. The wall clock can be set, and a machine can be suspended, while we wait; `SystemClock` therefore looks again at least
   every `POLL_S` seconds. The rejected alternative, one Trio sleep to the deadline, sleeps through both.
3. Whoever tests with virtual time injects a clock that runs on Trio's (`TrioClock` under `trio.testing.MockClock`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

import trio

__all__ = ["POLL_S", "Clock", "SystemClock", "TrioClock"]

POLL_S: Final = 10.0
"""How long `SystemClock` trusts the monotonic clock, in seconds."""


class Clock(Protocol):
    """Where the engine gets the time from."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        ...

    async def wait_until_ms(self, deadline_ms: int) -> None:
        """Return once `now_ms() >= deadline_ms`. A checkpoint; cancellation ends the wait."""
        ...


class SystemClock:
    """The machine's wall clock.

    Args:
        time_s: Seconds since the epoch; `time.time` unless a test brings another.
    """

    def __init__(self, time_s: Callable[[], float] = time.time) -> None:
        self._time_s = time_s

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return int(self._time_s() * 1000)

    async def wait_until_ms(self, deadline_ms: int) -> None:
        """Return within `POLL_S` seconds of the wall clock's reaching the deadline, however it was moved."""
        await trio.lowlevel.checkpoint()
        while (remaining_ms := deadline_ms - self.now_ms()) > 0:  # noqa: ASYNC110 - nothing tells when a clock is set
            await trio.sleep(min(remaining_ms / 1000, POLL_S))


class TrioClock:
    """A clock that runs on Trio's own time, for virtual time under `trio.testing.MockClock`.

    Args:
        epoch_ms: The wall-clock time at which Trio's clock reads 0.
    """

    def __init__(self, epoch_ms: int = 1_700_000_000_000) -> None:
        self._epoch_ms = epoch_ms

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return self._epoch_ms + round(trio.current_time() * 1000)

    async def wait_until_ms(self, deadline_ms: int) -> None:
        """Return once Trio's clock has reached the deadline."""
        await trio.lowlevel.checkpoint()
        while (remaining_ms := deadline_ms - self.now_ms()) > 0:  # noqa: ASYNC110 - once, but for rounding
            await trio.sleep(remaining_ms / 1000)
