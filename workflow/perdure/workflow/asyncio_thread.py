"""An asyncio loop in a thread of its own, for what runs under asyncio only; Trio tasks await what they have run there.

1. The loop is made when it is first needed, and stays until it is closed: connection pools and the like belong to one loop.
2. A call is a task of that loop. Cancelled in Trio, it is cancelled there, and waited for until it has unwound; what it
   returns or raises all the same is its outcome, as for code that runs in Trio. Nothing is abandoned.
3. A call has the context variables of its caller.
4. A task that ends the program (`SystemExit`, Ctrl-C) ends the call with that; the loop goes on.
5. Closing cancels the tasks that are left in the loop, and waits for them, for asynchronous generators and for the loop's
   own worker threads. No call may be in progress then.

Rejected: `asyncio.run` in a worker thread for each call, which a pool of connections does not outlive; and running asyncio
inside Trio, as a guest or by translation, which the libraries in question do not expect.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import trio

from perdure.workflow.errors import InvalidArgumentError, MisuseError

if TYPE_CHECKING:
    import asyncio

__all__ = ["AsyncioThread", "asyncio_home"]

_ENDS_PROGRAM: Final = (SystemExit, KeyboardInterrupt)
"""What asyncio lets out of its loop, besides making it the task's outcome."""


class AsyncioThread:
    """A loop that is started on its first use. Used in one Trio run."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = trio.Event()
        self._is_closed = False

    async def run(self, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        """Await `fn(*args)` in the loop. A checkpoint.

        Raises:
            concurrent.futures.CancelledError: It was cancelled by something else than this task's cancellation.
            MisuseError: The loop is closed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        return await _Call(self._started(), fn, args).wait()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._is_closed:
            raise MisuseError(
                "the supervisor has ended, and its asyncio loop with it; await to_asyncio inside of a step"
            )
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            token = trio.lowlevel.current_trio_token()
            # A daemon, so that a task that ignores its cancellation does not keep a program that exits hard.
            self._thread = threading.Thread(
                target=self._serve, args=(self._loop, token), name="perdure-asyncio", daemon=True
            )
            self._thread.start()
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop, token: trio.lowlevel.TrioToken) -> None:
        import asyncio

        try:
            with suppress(*_ENDS_PROGRAM), asyncio.Runner(loop_factory=lambda: loop) as runner:
                while not self._is_closed:
                    with suppress(*_ENDS_PROGRAM):  # raised by a task, whose outcome it is, too
                        runner.get_loop().run_forever()
        finally:
            _tell(token, self._ended.set)

    async def aclose(self) -> None:
        """End the loop and its thread. Not interrupted by cancellation."""
        self._is_closed = True
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            with trio.CancelScope(shield=True):
                await self._ended.wait()
            self._thread.join()


asyncio_home: Final[ContextVar[AsyncioThread]] = ContextVar("perdure_asyncio_home")
"""The loop of the supervisor whose workflow runs."""


class _Call:
    """One call: made and awaited in a Trio task, run in the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
    ) -> None:
        self._loop = loop
        self._fn = fn
        self._args = args
        self._waiter = trio.lowlevel.current_task()
        self._token = trio.lowlevel.current_trio_token()
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[Any] | None = None
        self._raise_cancel: trio.lowlevel.RaiseCancelT | None = None

    async def wait(self) -> Any:
        self._loop.call_soon_threadsafe(self._begin)
        await trio.lowlevel.wait_task_rescheduled(self._abort)
        task = self._task
        assert task is not None, "it has ended"
        if not task.cancelled():
            return task.result()
        if self._raise_cancel is not None:
            self._raise_cancel()
        raise concurrent.futures.CancelledError("what to_asyncio ran was cancelled from inside of its asyncio loop")

    def _abort(self, raise_cancel: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        self._raise_cancel = raise_cancel
        self._loop.call_soon_threadsafe(self._cancel)
        return trio.lowlevel.Abort.FAILED  # it is waited for

    # In the loop.

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run(), context=self._context)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None, "it was begun before"
        self._task.cancel()

    async def _run(self) -> Any:
        answer: object = self._fn(*self._args)
        if not inspect.isawaitable(answer):
            raise InvalidArgumentError(
                f"to_asyncio takes a coroutine function, not one that returns {type(answer).__name__}; give a plain function "
                "to ctx.step itself"
            )
        return await answer

    def _end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # asked for here, since a Trio run that is gone does not
        _tell(self._token, lambda: trio.lowlevel.reschedule(self._waiter))


def _tell(token: trio.lowlevel.TrioToken, function: Callable[[], object]) -> None:
    try:
        token.run_sync_soon(function)
    except trio.RunFinishedError:
        return  # nobody waits any more
