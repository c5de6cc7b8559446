"""A few threads that do the blocking work of many drivers, one piece after another.

1. A piece of work that was taken is carried through, whatever is cancelled, and its outcome is always told to who gave it.
2. Who gave a piece of work waits for it, so pieces of one driver never overlap: there is one at a time.
3. Pieces are begun in the order in which they came. A thread that has done one takes the next by itself; what is done is
   told to Trio together, as it comes to it.
4. A piece is to give up Python's lock seldom: each time it may have to wait for Trio's thread to give it up in turn. (Measured
   with 100 workflows at once: with a whole transaction of three statements and more in each hop the process switched between
   threads 340 times for a workflow of five steps, and that took more time than the work.) So of a transaction only COMMIT is a
   piece; a batch that one statement writes and commits is a piece as a whole (measured: some 100 times, as with COMMIT alone).

Rejected: `trio.to_thread` for each piece. It wakes Trio for each, and gives the thread a new name before and after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

import trio

from perdure.storage.pace import tasks_waiting

__all__ = ["SLOW_S", "THREADS_MAX", "THREADS_QUICK", "Crew", "crew_of", "is_anyone_waiting", "no_abort"]

THREADS_QUICK: Final = 4
"""How many pieces are done at once on a quick disk: syncs overlap, and each thread more wants Python's lock, too."""
THREADS_MAX: Final = 16
"""How many on one that takes `SLOW_S` or more for a piece: there the lock is free nearly always, and only overlap helps."""
SLOW_S: Final = 0.002
"""In seconds."""

_WEIGHT: Final = 0.1
_STALL_S: Final = 0.02

_T = TypeVar("_T")


class _Piece(Generic[_T]):
    __slots__ = ("_error", "_result", "_work", "tell")

    _result: _T

    def __init__(self, work: Callable[[], _T], tell: Callable[[_Piece[_T]], None]) -> None:
        self.tell = tell
        self._work = work
        self._error: BaseException | None = None

    def do(self) -> None:
        """Do it, and keep its outcome."""
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def fail(self, error: BaseException) -> None:
        """Keep that it is not done."""
        self._error = error

    def error(self) -> BaseException | None:
        """What went wrong, if anything did."""
        error, self._error = self._error, None  # it refers to this piece, by its traceback
        return error

    def outcome(self) -> _T:
        """What came of it."""
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            self._error = None  # which refers to this piece, by its traceback


class Crew:
    """The threads of one Trio run.

    Args:
        limiter: Bounds them, together with the other threads that it counts. A place is taken for each piece in progress.
    """

    def __init__(self, limiter: trio.CapacityLimiter) -> None:
        self._limiter = limiter
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: deque[_Piece[Any]] = deque()
        self._done: deque[_Piece[Any]] = deque()
        self._is_told = False
        self._pieces = 0
        self._places: list[object] = []
        self._threads = 0
        self._average_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a piece of work is being done, or waits for a thread."""
        return self._pieces > 0

    async def run(self, work: Callable[[], _T]) -> _T:
        """Do the work in a thread. A checkpoint; cancellation does not interrupt it, nor the wait for its turn.

        Raises:
            Exception: Whatever the work raises.
        """
        if not self._has_place():
            with trio.CancelScope(shield=True):
                return await trio.to_thread.run_sync(work, limiter=self._limiter)
            raise AssertionError("nobody cancels the shielding scope")
        task = trio.lowlevel.current_task()
        piece = _Piece(work, lambda _: trio.lowlevel.reschedule(task))
        self._take_up(piece)
        await trio.lowlevel.wait_task_rescheduled(no_abort)
        return piece.outcome()

    def start(self, work: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        """Have the work done in a thread, and tell in Trio's thread when it is over; waits for nothing.

        Args:
            work: The work.
            then: Told with the error of the work, or of getting a thread, if there was one. Raises nothing.
        """
        piece = _Piece(work, lambda piece: then(piece.error()))
        try:
            has_place = self._has_place()
        except Exception as error:
            piece.fail(error)
            self._token.run_sync_soon(piece.tell, piece)
            return
        if has_place:
            self._take_up(piece)
        else:
            trio.lowlevel.spawn_system_task(self._by_thread, piece)

    async def _by_thread(self, piece: _Piece[None]) -> None:
        """Do a piece as the others do who are bounded by the limiter."""
        try:
            await trio.to_thread.run_sync(piece.do, limiter=self._limiter)
        except Exception as error:
            piece.fail(error)
        piece.tell(piece)

    def _take_up(self, piece: _Piece[Any]) -> None:
        self._pieces += 1
        self._waiting.append(piece)

    def _has_place(self) -> bool:
        """See that there are a place and a thread for one more piece, or others whose turn it can wait for; whether there are."""
        if self._pieces < (THREADS_QUICK if self._average_s < SLOW_S else THREADS_MAX):
            place = object()
            try:
                self._limiter.acquire_on_behalf_of_nowait(place)
            except trio.WouldBlock:
                return bool(self._places)
            self._places.append(place)
        try:
            self._see_to_threads()
        except BaseException:
            self._give_back_places()
            raise
        return True

    def _see_to_threads(self) -> None:
        """See that there is a thread for each place; fewer are enough if the system gives no more."""
        while self._threads < len(self._places):
            try:
                trio.lowlevel.start_thread_soon(self._work, self._tell_left, "perdure storage")
            except Exception:
                if self._threads:
                    return
                raise
            self._threads += 1

    # In the threads.

    def _work(self) -> None:
        waiting, done = self._waiting, self._done
        while True:
            try:
                piece = waiting.popleft()
            except IndexError:
                return
            started = perf_counter()
            piece.do()
            # Threads may overwrite each other's: it is an average all the same. One long stall is soon forgotten.
            self._average_s += _WEIGHT * (min(perf_counter() - started, _STALL_S) - self._average_s)
            done.append(piece)
            del piece
            if not self._is_told:
                self._is_told = True
                self._token.run_sync_soon(self._deliver)

    def _tell_left(self, _: object) -> None:
        with suppress(trio.RunFinishedError):  # nobody waits any more
            self._token.run_sync_soon(self._left)

    # In Trio's thread.

    def _deliver(self) -> None:
        self._is_told = False  # first: what is done from here on tells again
        while self._done:
            self._end(self._done.popleft())

    def _left(self) -> None:
        self._threads -= 1
        if self._waiting:  # what came after the thread had found nothing more
            try:
                self._see_to_threads()
            except Exception as error:
                while self._waiting:
                    piece = self._waiting.popleft()
                    piece.fail(error)
                    self._end(piece)

    def _end(self, piece: _Piece[Any]) -> None:
        self._pieces -= 1
        self._give_back_places()
        piece.tell(piece)

    def _give_back_places(self) -> None:
        while len(self._places) > self._pieces:
            self._limiter.release_on_behalf_of(self._places.pop())


_crews: trio.lowlevel.RunVar[dict[trio.CapacityLimiter, Crew]] = trio.lowlevel.RunVar("perdure.storage.crews")


def crew_of(limiter: trio.CapacityLimiter) -> Crew:
    """The crew that this limiter bounds, in this Trio run."""
    try:
        crews = _crews.get()
    except LookupError:
        crews = dict[trio.CapacityLimiter, Crew]()
        _crews.set(crews)
    crew = crews.get(limiter)
    if crew is None:
        crew = crews[limiter] = Crew(limiter)
    return crew


def is_anyone_waiting(limiter: trio.CapacityLimiter) -> bool:
    """Whether to block Trio's thread would hold somebody up: one who could run, or will once this limiter's crew is done."""
    return crew_of(limiter).is_busy or tasks_waiting()


def no_abort(_: object) -> trio.lowlevel.Abort:
    """Keeps cancellation from interrupting `wait_task_rescheduled`: who waits is always rescheduled by whoever does the work."""
    return trio.lowlevel.Abort.FAILED
