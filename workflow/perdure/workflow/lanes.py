"""Lanes: sequences of operations that run beside each other, and that can be left behind one by one.

1. A workflow's own function is a lane; each branch of a join or race is one more, below the lane that asked for it.
2. A lane is open until its activation closes or, in a race, until another branch has won. From the moment at which the
   winner is chosen nothing of a loser is recorded, and none of its operations goes on; it is cancelled only once the
   winner is durable (promise 3). Until then whatever it asks for waits, hence the two steps `OUTRUN` and `SEALED`. It
   waits for an event and not for its cancellation alone, which a scope of the user's may hold off (`shield=True`).
3. What is below a lane shares its fate.
"""

from __future__ import annotations

import enum
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, NoReturn

import trio

from perdure.workflow.errors import SuspendSignal

if TYPE_CHECKING:
    from perdure.workflow.activation import Activation

__all__ = ["Lane", "enter_lane", "lane_of", "suspend"]

_current: Final[ContextVar[tuple[object, Lane] | None]] = ContextVar("perdure_lane", default=None)


def enter_lane(activation: Activation, lane: Lane) -> None:
    """Say that the task that calls this, with all that it starts, is this lane's."""
    _current.set((activation, lane))


def lane_of(activation: Activation) -> Lane | None:
    """The lane of this activation in which the caller runs; `None` in the workflow's own function.

    For what is not an operation of one scope. What a task of one workflow starts may belong to another, hence the argument.
    """
    current = _current.get()
    return None if current is None or current[0] is not activation else current[1]


async def suspend() -> NoReturn:
    """Raise the signal, after a turn for others: code that eats the signal and asks again must not keep them waiting.

    Raises:
        SuspendSignal: Always.
    """
    await trio.lowlevel.cancel_shielded_checkpoint()
    raise SuspendSignal


class _Stand(enum.IntEnum):
    OPEN = 1
    OUTRUN = 2
    SEALED = 3


class Lane:
    """One sequence of operations.

    Attributes:
        is_open: Whether operations may begin, go on and record.
        is_parked: Whether it waits durably.
        is_root: Whether it is the workflow's own function.
        is_raced: Whether it is a branch of a race, or below one: what it recorded may be taken back.
    """

    __slots__ = ("_below", "_sealed", "_stand", "is_open", "is_parked", "is_raced", "is_root")

    def __init__(self, above: Lane | None = None, *, is_raced: bool = False) -> None:
        self.is_open: bool = True
        self.is_parked: bool = False
        self.is_root: bool = above is None
        self.is_raced: bool = is_raced or (above is not None and above.is_raced)
        self._stand: _Stand = _Stand.OPEN
        self._sealed: trio.Event | None = None
        self._below: set[Lane] = set()
        if above is not None:
            above._below.add(self)

    def end(self, above: Lane) -> None:
        """Its function is over."""
        above._below.discard(self)

    def is_waiting(self) -> bool:
        """Whether nothing runs in it: it is parked, or all below it are."""
        return self.is_parked or (bool(self._below) and all(lane.is_waiting() for lane in self._below))

    def outrun(self) -> None:
        """Another branch has won; that is not durable yet."""
        self._set(_Stand.OUTRUN)

    def seal(self) -> None:
        """That another branch has won is durable: what is still asked for here gets the signal."""
        self._set(_Stand.SEALED)

    def _set(self, stand: _Stand) -> None:
        stack: list[Lane] = [self]
        while stack:
            lane = stack.pop()
            lane._stand = max(lane._stand, stand)  # what an inner race has sealed stays so
            lane.is_open = False
            if lane._sealed is not None and stand is _Stand.SEALED:
                lane._sealed.set()
            stack.extend(lane._below)

    async def leave(self) -> NoReturn:
        """Let nothing follow in a lane that is not open; the end is a cancellation or the signal.

        Raises:
            SuspendSignal: The lane is sealed.
        """
        if self._stand is _Stand.OUTRUN:
            if self._sealed is None:
                self._sealed = trio.Event()
            await self._sealed.wait()
            await trio.lowlevel.checkpoint_if_cancelled()
        await suspend()
