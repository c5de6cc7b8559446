"""Where a piece of blocking work runs: on Trio's own thread, or handed to another.

1. Handing work to a thread costs about what a commit on a quick disk takes (measured: through a thread a lone workflow
   commits at half the rate), and blocking Trio's thread costs everyone who could have run meanwhile. So work is done in
   place when it is known to be short and nobody would wait for it.
2. "Known to be short" is measured, on whichever thread the work ran. A disk that became slow is noticed after a few
   slow pieces of work, and one that became quick again too, because the work in threads is measured as well.
3. One long stall counts for no more than `_STALL_S`, so that it is forgotten after a few quick ones.

Rejected: to believe for a while that tasks wait, as asking costs some ten microseconds. Of two that take turns, a sender and
its workflow, one waits at every moment that counts: messages sent one at a time took twice the CPU.

Rejected: a fixed choice by durability. It is right for neither a laptop's disk (5 ms per sync) nor a server's (0.1 ms).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

__all__ = ["Pace", "storage_limiter", "tasks_waiting"]

_WEIGHT: Final = 0.2
_STALL_S: Final = 0.02
_TRUSTED: Final = 10
"""For how many more pieces of work it is believed that nobody waits: asking costs a third of a commit's own time."""
_THREADS_MAX: Final = 16
"""Beyond this, more threads sync no faster (measured: 5,800 commits/s from one thread, 10,900 from 16)."""


class Pace:
    """An average of how long one kind of work takes, and what follows from it.

    Args:
        alone_s: Work shorter than this many seconds runs in place when nobody would wait for it.
        crowded_s: Work shorter than this many seconds runs in place in any case; 0 means never.
        expected_s: What to assume before anything was measured.
    """

    __slots__ = ("_alone_s", "_crowded_s", "_trusted", "average_s")

    def __init__(self, *, alone_s: float, crowded_s: float, expected_s: float = 0.0) -> None:
        self._alone_s = alone_s
        self._crowded_s = crowded_s
        self._trusted = 0
        self.average_s: float = expected_s

    def runs_in_place(self, others_waiting: Callable[[], bool]) -> bool:
        """Whether to do the work on this thread. Asks `others_waiting` only if it matters, and not every time."""
        average_s = self.average_s
        if average_s < self._crowded_s:
            return True
        if average_s >= self._alone_s:
            return False
        if self._trusted:
            self._trusted -= 1
        elif others_waiting():
            return False
        else:
            self._trusted = _TRUSTED
        return True

    def record(self, elapsed_s: float) -> None:
        """Count one more piece of work, which took this many seconds."""
        self.average_s += _WEIGHT * (min(elapsed_s, _STALL_S) - self.average_s)


def tasks_waiting() -> bool:
    """Whether other Trio tasks could run right now. Costs some microseconds: Trio gathers all its statistics."""
    return trio.lowlevel.current_statistics().tasks_runnable > 0


_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("perdure.storage.limiter")


def storage_limiter() -> trio.CapacityLimiter:
    """The limit on storage's threads in this Trio run: its own, so that steps in threads never hold up a commit."""
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_THREADS_MAX)
        _limiter.set(limiter)
        return limiter
