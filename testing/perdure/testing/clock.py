"""A wall clock that runs on Trio's own time, outlives processes, and can be set.

1. Within one Trio run it advances with Trio's clock: under `trio.testing.MockClock` a year of sleep passes at once.
2. Each Trio run has another clock, which starts anywhere. A new run is noticed by its token, and the wall clock goes on from
   where it was last seen, as the clock of a machine does while a process is restarted.
3. Who waits looks again when the clock is set.

Rejected: patching `time.time`. What does not ask a `Clock` would be given virtual time too, libraries included.
"""

from __future__ import annotations

from math import isfinite

import trio

from perdure.workflow import InvalidArgumentError

__all__ = ["SimulatedClock"]

_LATEST_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, which `datetime` still knows."""


def _check_ms(time_ms: int, what: str, example: str) -> int:
    if isinstance(time_ms, bool) or not isinstance(time_ms, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError(
            f"{what} must be an integer of milliseconds, not {type(time_ms).__name__}; {example}"
        )
    if not 0 <= time_ms <= _LATEST_MS:
        raise InvalidArgumentError(f"{what} must lie between the years 1970 and 9999, not at {time_ms} ms; {example}")
    return time_ms


class SimulatedClock:
    """A `perdure.workflow.Clock` in virtual time; give it as `clock=` to whatever takes one.

    Args:
        start_ms: What it shows first, in milliseconds since the epoch.
    """

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._last_ms = _check_ms(start_ms, "start_ms", "write start_ms=1_700_000_000_000")
        self._base_ms = 0
        self._run: trio.lowlevel.TrioToken | None = None
        self._moved: trio.Event | None = None

    def __repr__(self) -> str:
        return f"<SimulatedClock {self.now_ms()} ms>"

    def now_ms(self) -> int:
        """Milliseconds since the epoch; outside of Trio, what it showed last."""
        try:
            run = trio.lowlevel.current_trio_token()
        except RuntimeError:
            return self._last_ms
        trio_ms = round(trio.current_time() * 1000)
        if run is not self._run:
            self._run, self._moved = run, None
            self._base_ms = self._last_ms - trio_ms
        self._last_ms = self._base_ms + trio_ms
        return self._last_ms

    def move(self, seconds: float) -> None:
        """Set the clock forward, or back with a negative number, as an operator or a time server does to a machine's.

        Nothing sleeps meanwhile: to let time pass, `await trio.sleep(seconds)`.

        Raises:
            InvalidArgumentError: It is no number of seconds, or leads out of the years 1970 to 9999.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isfinite(seconds):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(
                f"a clock is moved by a number of seconds, not {seconds!r:.80}; write clock.move(-3600.0) for an hour"
            )
        moved_ms = round(seconds * 1000)
        self._last_ms = _check_ms(
            self.now_ms() + moved_ms, "the time after move()", "write clock.move(-3600.0) for an hour"
        )
        self._base_ms += moved_ms
        if self._moved is not None:
            moved, self._moved = self._moved, None
            moved.set()

    async def wait_until_ms(self, deadline_ms: int) -> None:
        """Return once `now_ms() >= deadline_ms`, however the clock is set meanwhile. A checkpoint."""
        await trio.lowlevel.checkpoint()
        while (remaining_ms := deadline_ms - self.now_ms()) > 0:
            if self._moved is None:
                self._moved = trio.Event()
            with trio.move_on_after(remaining_ms / 1000):
                await self._moved.wait()
