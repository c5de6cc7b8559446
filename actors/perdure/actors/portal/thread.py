"""The thread of a portal: Trio, and in it a supervisor; calls of other threads come in through anyio's blocking portal.

1. All that the supervisor does, it does in this thread. Callers wait elsewhere: a plain thread at a future, an asyncio task
   in its loop, which goes on meanwhile. Neither side can hold the other up.
2. A call that its caller gives up (Ctrl-C, a cancelled task, a timeout) is cancelled in Trio; the workflow goes on.
3. To stop is to cancel the supervisor's block, which ends in order. Calls that wait are told so by the supervisor; whatever
   waits still after that is cancelled, and told that the supervisor is closed.
4. What comes out of the supervisor's block comes out of the portal's.
5. A fork does not have the thread, so there every call is refused, and the block's end does nothing.

Rejected: anyio's `start_blocking_portal`, which would start the thread as well. In a fork it waits for that thread for ever,
when the portal is closed or, at the latest, when the process ends.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, NoReturn, TypeVar

import anyio
import trio
from anyio.from_thread import BlockingPortal

from perdure.actors.errors import SupervisorClosedError
from perdure.actors.supervisor import Supervisor
from perdure.workflow import MisuseError

__all__ = ["PortalThread", "check_may_block"]

T = TypeVar("T")


class PortalThread:
    """A supervisor in a thread of its own.

    Args:
        opening: The supervisor's block, to be entered in the thread.
    """

    def __init__(self, opening: AbstractAsyncContextManager[Supervisor]) -> None:
        self._opening = opening
        self._pid = os.getpid()
        self._block = trio.CancelScope()
        self._begun: Future[tuple[trio.lowlevel.TrioToken, BlockingPortal]] = _promise()
        self._opened: Future[Supervisor] = _promise()
        self._ended: Future[None] = _promise()
        # A daemon, so that a program which never leaves the block ends all the same; for the store that is a crash.
        self._thread = threading.Thread(target=self._run, name="perdure-portal", daemon=True)

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor once it is open; used inside of `call` and `call_async` only."""
        return self._opened.result()

    @property
    def is_here(self) -> bool:
        """Whether this process has the thread; a fork has not."""
        return os.getpid() == self._pid

    # In the thread.

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend="trio")
        except BaseException as error:
            outcome: BaseException | None = error
        else:
            outcome = None
        if not self._begun.done():
            self._begun.set_exception(outcome or self._closed_error())
        if not self._opened.done():
            self._opened.set_exception(outcome or self._closed_error())
        if outcome is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(outcome)

    async def _main(self) -> None:
        outcome: BaseException | None = None
        async with BlockingPortal() as portal:
            self._begun.set_result((trio.lowlevel.current_trio_token(), portal))
            try:
                with self._block:
                    async with self._opening as supervisor:
                        self._opened.set_result(supervisor)
                        await trio.sleep_forever()
            except BaseException as error:  # comes out below: in here, the portal would wrap it in a group
                outcome = error
            await portal.stop(cancel_remaining=True)
        if outcome is not None:
            raise outcome

    # Its beginning and its end.

    def start(self) -> Future[Supervisor]:
        """Begin to open the supervisor; the future is done once it is open, or cannot be opened."""
        self._thread.start()
        return self._opened

    def stop(self) -> Future[None]:
        """Begin to end the supervisor's block; the future is done when the thread is, and has what came out of the block."""
        self._soon(self._block.cancel)
        return self._ended

    def hurry(self) -> None:
        """Give steps that still run no more grace; does nothing while it has not begun to stop."""
        if self._opened.done() and self._opened.exception() is None:
            self._soon(self.supervisor.hurry)

    def join(self) -> None:
        """Wait for the last moment of the thread, whose future is done."""
        self._thread.join()

    def _soon(self, function: Callable[[], object]) -> None:
        if self._begun.exception() is None:
            try:
                self._begun.result()[0].run_sync_soon(function)
            except trio.RunFinishedError:
                return  # it has ended, which is what those who call this are after

    # Calls.

    def call(self, function: Callable[[], Awaitable[T]], *, timeout: float | None = None) -> T:
        """Have a coroutine function run in the thread, and block until it is done.

        Args:
            function: It.
            timeout: Seconds; it is cancelled then.

        Raises:
            TimeoutError: It was not done in time.
            SupervisorClosedError: The supervisor has ended, or is about to.
            MisuseError: This thread runs an event loop, which would stand still meanwhile.
        """
        check_may_block()
        portal = self._reach()
        call = _Call(function, timeout)
        try:
            done = portal.start_task_soon(call.run)
            done.result()
        except (RuntimeError, CancelledError):  # of the portal: those of the function are in `answer`
            self._refuse()
        except BaseException:  # Ctrl-C
            self._soon(call.given_up.cancel)
            raise
        return call.answer.result()

    async def call_async(self, function: Callable[[], Awaitable[T]]) -> T:
        """Have a coroutine function run in the thread, and await it in an asyncio task.

        Cancelled, it is cancelled in the thread, and waited for until it has unwound there.

        Raises:
            SupervisorClosedError: The supervisor has ended, or is about to.
        """
        portal = self._reach()
        call = _Call(function, None)
        try:
            await portal.call_async(call.run)
        except (RuntimeError, CancelledError):
            self._refuse()
        return call.answer.result()

    def _closed_error(self) -> SupervisorClosedError:
        if not self.is_here:
            return SupervisorClosedError(
                "this process was forked from the one that has the supervisor, which cannot be reached from here; open the "
                "portal after the fork, in each process that is to have a supervisor of its own"
            )
        return SupervisorClosedError(
            "the supervisor of this portal has ended, or is about to, and takes nothing more; open another"
        )

    def _refuse(self) -> NoReturn:
        """Say that calls are not taken any more, and what the supervisor ended with, if it ended with something."""
        raise self._closed_error() from (self._ended.exception() if self._ended.done() else None)

    def _reach(self) -> BlockingPortal:
        if not self.is_here:
            self._refuse()
        if threading.current_thread() is self._thread:
            raise MisuseError(
                "this is called in the portal's own thread, by code of a workflow or a hook, and would wait for itself; call "
                "it in a step whose function is a plain one, which runs in another thread"
            )
        return self._begun.result()[1]


class _Call(Generic[T]):
    """A call on its way: what it is, and what became of it."""

    def __init__(self, function: Callable[[], Awaitable[T]], timeout: float | None) -> None:
        self.given_up = trio.CancelScope()
        self.answer: Future[T] = _promise()
        self._function = function
        self._timeout = timeout

    async def run(self) -> None:
        """Find the answer. What is raised here is not the function's: it is a cancellation."""
        with self.given_up:
            try:
                self.answer.set_result(await self._find())
            except Exception as error:
                self.answer.set_exception(error)

    async def _find(self) -> T:
        if self._timeout is None:
            return await self._function()
        with trio.move_on_after(self._timeout):
            return await self._function()
        raise TimeoutError(f"it was not done within {self._timeout:g} seconds, and is not waited for any more")


def check_may_block() -> None:
    """Refuse to block a thread in which an event loop runs.

    Raises:
        MisuseError: One does.
    """
    if trio.lowlevel.in_trio_run():
        raise MisuseError(
            "a blocking call would stop the Trio program that runs in this thread; use open_supervisor in it, which awaits"
        )
    if _is_in_asyncio():
        raise MisuseError(
            "a blocking call would stop the asyncio loop that runs in this thread; open the portal with "
            "open_asyncio_portal, or await the methods of supervisor.asyncio"
        )


def _is_in_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _promise() -> Future[Any]:
    """A future that those who wait for it cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
