"""Restarts of actors that a fault of the runtime stopped.

1. What the workflow's own code does wrong never comes here: its failures are outcomes, and code that does not fit its
   history (divergence, misuse, an unregistered type) waits for right code.
2. What only a repair can mend (a damaged or missing file, a newer format) waits for that: for the next message, `wake()`,
   `recover()` or start.
3. Everything else (an error of the storage, too few descriptors, a bug of ours) may be over by itself: the actor is
   restarted after a pause that doubles from `BASE_S` to `CAP_S`, each cut at random by up to a half, so that many that were
   stopped by one cause do not come back at one moment.
4. The pause is forgotten once a run of the workflow came to an end of its own (it ended, waited until it left memory, or was
   evicted). Restarts that record nothing are counted durably by the engine, whose crash-loop rule ends them; those after an
   error of the storage are not, as a disk that is full for a day is not the workflow's failure.
5. One task keeps the time for all. Nothing of this needs to be durable: at a start everything is tried at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Final

import trio

from perdure.storage import (
    CorruptStoreError,
    DecodeError,
    FormatVersionError,
    NamespaceNotFoundError,
    PerdureError,
    StorageError,
)

__all__ = ["BASE_S", "CAP_S", "Restarts", "is_passing", "pause_s"]

BASE_S: Final = 0.2
"""The first pause, in seconds."""

CAP_S: Final = 60.0
"""The longest pause, in seconds."""

_NEEDS_REPAIR: Final = (CorruptStoreError, DecodeError, FormatVersionError, NamespaceNotFoundError)


def is_passing(error: BaseException) -> bool:
    """Whether a fault may be over by itself, so that a restart makes sense."""
    if isinstance(error, StorageError):
        return not isinstance(error, _NEEDS_REPAIR)
    return isinstance(error, Exception) and not isinstance(error, PerdureError)


def pause_s(restarts: int, random: Random) -> float:
    """The pause before the next restart, in seconds, after this many (0 or more)."""
    longest = min(CAP_S, BASE_S * 2.0 ** min(restarts, 32))
    return longest * random.uniform(0.5, 1.0)


class Restarts:
    """Restarts actors of one supervisor.

    Args:
        want: Queues the activation of a workflow.
        random: Where the pauses' jitter comes from.

    Attributes:
        count: How many restarts there were.
    """

    def __init__(self, want: Callable[[str], None], *, random: Random | None = None) -> None:
        self.count: int = 0
        self._want = want
        self._random = random or Random()
        self._tried: dict[str, int] = {}
        self._by_storage: set[str] = set()
        self._due: list[tuple[float, str]] = []
        self._has_due = trio.Event()
        self._waiting = trio.CancelScope()

    def seed(self, seed: int) -> None:
        """Draw the pauses' jitter from a seed from here on, so that a simulated process can be repeated."""
        self._random.seed(seed)

    def is_coming(self, workflow_id: str) -> bool:
        """Whether the workflow was stopped by a fault, and is or will be restarted."""
        return workflow_id in self._tried

    def is_by_storage(self, workflow_id: str) -> bool:
        """Whether it was the storage that stopped the workflow last: that is not counted against the workflow."""
        return workflow_id in self._by_storage

    def note_fault(self, workflow_id: str, error: BaseException) -> bool:
        """A fault stopped the workflow; returns whether it is going to be restarted."""
        if not is_passing(error):
            self.forget(workflow_id)
            return False
        restarts = self._tried.get(workflow_id, 0)
        self._tried[workflow_id] = restarts + 1
        if isinstance(error, StorageError):
            self._by_storage.add(workflow_id)
        else:
            self._by_storage.discard(workflow_id)
        heapq.heappush(self._due, (trio.current_time() + pause_s(restarts, self._random), workflow_id))
        self._has_due.set()
        self._waiting.cancel()
        return True

    def forget(self, workflow_id: str) -> None:
        """A run of the workflow came to an end of its own."""
        self._tried.pop(workflow_id, None)
        self._by_storage.discard(workflow_id)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Restart what is due, for ever."""
        while True:
            if not self._due:
                self._has_due = trio.Event()
                await self._has_due.wait()
            with trio.CancelScope() as self._waiting:
                await trio.sleep_until(self._due[0][0])
            now = trio.current_time()
            while self._due and self._due[0][0] <= now:
                _, workflow_id = heapq.heappop(self._due)
                if workflow_id in self._tried:  # else it has run meanwhile
                    self.count += 1
                    self._want(workflow_id)
