"""How many workflows are live at once: places for those that run, and a few more for visits.

1. A live workflow holds an open file, which takes two descriptors and some memory; `max_live` bounds how many run.
2. A *visit* opens a dormant workflow to do one thing to it (to put a message in, to read its result) and closes it again; it
   runs no code of the user's, so it always ends. Visits have places of their own: a workflow whose step sends a message to a
   dormant one never waits for a place that only its own end would free, and what arrives is durable however full it is.
3. A step that waits for another workflow through a handle (for its result, for room in its mailbox) lends its place
   meanwhile, so that workflows which wait for each other do not hold all places. For that time more may be open than `max_live`,
   as far as there are descriptors: at most `lent_max`.
4. A place is given to whoever asks first (`dispatch.py`); whoever is refused here queues there.

Rejected: one pool with one place kept back. Two visitors that wait for each other's workflow to become live would share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

__all__ = ["LENT_LEAST", "MAX_LIVE_DEFAULT", "VISITS_MAX", "Place", "Slots", "default_max_live", "lent_max_of"]

VISITS_MAX: Final = 32
"""How many dormant workflows are open for visits at once."""

MAX_LIVE_DEFAULT: Final = 4096
"""The most workflows that run at once unless `max_live` says another number: some 300 MB of memory."""

LENT_LEAST: Final = 32
"""How many places may be lent at once however few descriptors there are."""

_DESCRIPTORS_EACH: Final = 2
_DESCRIPTORS_KEPT: Final = 256
"""For the program itself, the catalog, worker threads, visits and the least that is lent."""


def default_max_live(descriptors: int | None) -> int:
    """The cap for a process that may have this many descriptors (`None`: without a limit); at least 1."""
    if descriptors is None:
        return MAX_LIVE_DEFAULT
    return max(1, min(MAX_LIVE_DEFAULT, (descriptors - _DESCRIPTORS_KEPT) // _DESCRIPTORS_EACH))


def lent_max_of(descriptors: int | None, max_live: int) -> int:
    """How many places may be lent beside this many live workflows."""
    if descriptors is None:
        return MAX_LIVE_DEFAULT
    return max(LENT_LEAST, (descriptors - _DESCRIPTORS_KEPT) // _DESCRIPTORS_EACH - max_live)


class Place:
    """A place that is taken. Whoever took it gives it back, unless an actor owns it by then."""

    __slots__ = ("_give_back", "is_owned")

    def __init__(self, give_back: Callable[[], None]) -> None:
        self.is_owned: bool = False
        self._give_back: Callable[[], None] | None = give_back

    def give_back(self) -> None:
        """Give it back; twice is fine."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Slots:
    """The places of one supervisor.

    Args:
        max_live: How many workflows may run at once, at least 1.
        lent_max: How many places may be lent at once.

    Attributes:
        lent: How many are.
    """

    def __init__(self, max_live: int, lent_max: int = LENT_LEAST) -> None:
        self.max_live: int = max_live
        self.lent_max: int = lent_max
        self.lent: int = 0
        self._taken = 0
        self._visits = trio.Semaphore(VISITS_MAX, max_value=VISITS_MAX)
        self._changed = trio.Event()

    @property
    def taken(self) -> int:
        """How many workflows have a place to run in."""
        return self._taken

    def take_nowait(self) -> Place | None:
        """A place to run in, if one is free."""
        if self._taken >= self.max_live:
            return None
        self._taken += 1
        return Place(self._release)

    async def visit(self) -> Place:
        """A place for a visit; waits until one is free."""
        await self._visits.acquire()
        return Place(self._visits.release)

    def lend(self) -> bool:
        """Leave a place to others for a while, though whoever has it stays in memory; returns whether that may be."""
        if self.lent >= self.lent_max:
            return False
        self.lent += 1
        self._release()
        return True

    def take_back(self) -> None:
        """Have the place again that was lent, whether one is free or not."""
        self.lent -= 1
        self._taken += 1

    def _release(self) -> None:
        self._taken -= 1
        self.poke()

    def poke(self) -> None:
        """Something changed by which a place is free, or can be made so."""
        self._changed.set()

    async def until_changed(self) -> None:
        """Return once `poke` was called since the last time; only one task may wait."""
        await self._changed.wait()
        self._changed = trio.Event()
