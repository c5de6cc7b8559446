"""What parked branches wait for, as plain data, and the parking place itself.

1. A `Wait` says what ends it: a deadline, messages of some names, or both, or what the host tells. "Any message" absorbs
   named waits.
2. A workflow wakes at the earliest deadline of its waits and for the union of their names.
3. One parked branch costs no task: one without a deadline is put to rest and rescheduled when it is woken, one with a
   deadline waits on the clock in a little scope of its own, which is cancelled then. A scope for both would cost a
   cancellation, and so an exception through all that is parked, for each message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import trio

from perdure.workflow.clock import Clock

__all__ = ["Parking", "Signal", "Wait", "merge"]

Signal: TypeAlias = tuple[Literal["child", "room"], str]
"""That a workflow of this id has ended, or that there is room in its mailbox."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a parked branch waits for.

    Attributes:
        deadline_ms: When it ends by itself (milliseconds since the epoch), or `None`.
        names: The message names that end it: empty for none, `None` for any.
        wakeable: Whether `wake()` ends it (sleeps and retries, not the deadlines of queue reads).
        signal: What the host tells of and ends it by (`Activation.signal`), or `None`.
    """

    deadline_ms: int | None = None
    names: frozenset[str] | None = frozenset()
    wakeable: bool = False
    signal: Signal | None = None

    def wants(self, name: str) -> bool:
        """Whether a message of this name ends the wait."""
        return self.names is None or name in self.names


def merge(waits: Iterable[Wait]) -> Wait:
    """What a workflow waits for whose branches wait for these."""
    deadline_ms: int | None = None
    names: set[str] = set()
    is_any = False
    for wait in waits:
        if wait.deadline_ms is not None:
            deadline_ms = wait.deadline_ms if deadline_ms is None else min(deadline_ms, wait.deadline_ms)
        if wait.names is None:
            is_any = True
        else:
            names.update(wait.names)
    return Wait(deadline_ms, None if is_any else frozenset(names))


class Parking:
    """A parked branch: what it waits for, and how it is woken."""

    __slots__ = ("_scope", "_task", "is_woken", "wait")

    def __init__(self, wait: Wait) -> None:
        self.wait: Wait = wait
        self.is_woken: bool = False
        self._scope: trio.CancelScope | None = None
        self._task: trio.lowlevel.Task | None = None

    def wake(self) -> None:
        """End the wait; waking twice is fine."""
        self.is_woken = True
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)
        elif self._scope is not None:
            self._scope.cancel()

    async def until_woken(self, clock: Clock) -> None:
        """Wait until `wake` was called or the deadline has passed. Cancellation from outside comes first."""
        if self.is_woken:
            await trio.lowlevel.checkpoint()
        elif self.wait.deadline_ms is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            with trio.CancelScope() as self._scope:
                await clock.wait_until_ms(self.wait.deadline_ms)

    def _abort(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
