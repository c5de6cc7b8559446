"""Measuring commits: how many, how fast, how long they take.

1. A commit is noted where it became durable, by whoever waited for it: what is measured is what a workflow waits.
2. Noting one costs two readings of a clock and an entry of a ring, and never memory: the ring has a fixed size.
3. What a question costs (sorting some thousand numbers) is paid by who asks.

Rejected: histograms with fixed bounds. Commits take from 20 microseconds to seconds, and a quantile out of coarse bounds says
little; a ring of the latest ones says what is now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Final

__all__ = ["RECENT_MAX", "WINDOW_S", "CommitRate", "Meter"]

WINDOW_S: Final = 60.0
"""How far back the rate and the latencies reach, in seconds."""

RECENT_MAX: Final = 4096
"""How many commits they reach back at most."""


@dataclass(frozen=True, slots=True)
class CommitRate:
    """What the latest commits say.

    Attributes:
        per_second: Commits per second.
        p50_ms: Half of them took no longer, in milliseconds; 0 if there were none.
        p99_ms: 99 of 100 took no longer, likewise.
    """

    per_second: float
    p50_ms: float
    p99_ms: float


class Meter:
    """Counts the commits of one supervisor.

    Attributes:
        commits: How many there were.
    """

    __slots__ = ("_recent", "_started", "commits")

    def __init__(self) -> None:
        self.commits: int = 0
        self._started = perf_counter()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_MAX)

    def note(self, started: float) -> None:
        """A commit that was begun at this reading of `time.perf_counter` is durable."""
        ended = perf_counter()
        self.commits += 1
        self._recent.append((ended, ended - started))

    def rate(self, now: float | None = None) -> CommitRate:
        """What the latest commits say, at this reading of `time.perf_counter`, or now."""
        if now is None:
            now = perf_counter()
        since = max(self._started, now - WINDOW_S)
        if len(self._recent) == RECENT_MAX:
            since = max(since, self._recent[0][0])
        took = sorted(seconds for ended, seconds in self._recent if ended >= since)
        if not took:
            return CommitRate(0.0, 0.0, 0.0)
        return CommitRate(len(took) / max(now - since, 1e-6), _quantile_ms(took, 0.5), _quantile_ms(took, 0.99))


def _quantile_ms(ordered: list[float], part: float) -> float:
    return ordered[ceil(part * len(ordered)) - 1] * 1000
