"""Opening and leaving a portal, from a plain thread and from an asyncio task.

1. Leaving is in order, and waits until the thread is gone: nothing of the portal outlives its block.
2. Whoever is pressed while it leaves (a second Ctrl-C, a cancellation of the task that waits for it) ends the grace of running
   steps, and waits on: what was acknowledged is durable, what is evicted goes on at the next start. A third Ctrl-C gives
   up waiting; the process can end then, which is a crash to the store.
3. With `handle_signals` SIGINT and SIGTERM do the same on either face, and the third ends the process at once.
4. What came out of the supervisor's block (it could not be opened; a workflow's code ended the program) comes out here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from perdure.actors.portal.awaitable import AsyncioSupervisor
from perdure.actors.portal.blocking import BlockingSupervisor
from perdure.actors.portal.thread import PortalThread, check_may_block
from perdure.actors.signals import Signals, check_signals
from perdure.actors.supervisor import open_supervisor

__all__ = ["open_asyncio_portal", "open_portal"]

OptionsP = ParamSpec("OptionsP")
R = TypeVar("R")


def _with_options_of(template: Callable[OptionsP, object]) -> Callable[[Callable[..., R]], Callable[OptionsP, R]]:
    """Give a function the arguments of another one, for type checkers, editors and `help`."""

    def decorate(function: Callable[..., R]) -> Callable[OptionsP, R]:
        parameters = inspect.signature(template).parameters.values()
        function.__signature__ = inspect.signature(function).replace(parameters=list(parameters))  # type: ignore[attr-defined]
        return function

    return decorate


@_with_options_of(open_supervisor)
def open_portal(*args: Any, handle_signals: bool = False, **options: Any) -> AbstractContextManager[BlockingSupervisor]:
    """Host workflows in a background thread, for a plain program.

        with open_portal("data/", workflows=[order]) as supervisor:
            handle = supervisor.spawn(order, "order-123", {"sku": 7})
            print(handle.result(timeout=60))

    It takes what `open_supervisor` takes, and raises the same when it is entered. Leaving the block, however that happens,
    ends the supervisor in order, and waits for it. Ctrl-C meanwhile ends the `grace` of running steps.

    Raises:
        MisuseError: An event loop runs in this thread; entering would stop it.
    """
    return _BlockingBlock(PortalThread(open_supervisor(*args, **options)), handle_signals=handle_signals)


@_with_options_of(open_supervisor)
def open_asyncio_portal(
    *args: Any, handle_signals: bool = False, **options: Any
) -> AbstractAsyncContextManager[AsyncioSupervisor]:
    """Host workflows in a background thread, for an asyncio program.

        async with open_asyncio_portal("data/", workflows=[order]) as supervisor:
            handle = await supervisor.spawn(order, "order-123", {"sku": 7})
            print(await handle.result())

    It takes what `open_supervisor` takes, and raises the same when it is entered. Leaving the block, however that happens,
    ends the supervisor in order, and waits for it while the loop goes on. Cancelled meanwhile, it ends the `grace` of
    running steps, and waits on.
    """
    return _AsyncioBlock(PortalThread(open_supervisor(*args, **options)), handle_signals=handle_signals)


class _BlockingBlock(AbstractContextManager[BlockingSupervisor]):
    def __init__(self, thread: PortalThread, *, handle_signals: bool) -> None:
        self._thread = thread
        self._signals = Signals(self._end, thread.hurry) if check_signals(handle_signals) else None
        self._is_leaving = False

    def __enter__(self) -> BlockingSupervisor:
        check_may_block()
        if self._signals is not None:
            self._signals.__enter__()
        try:
            self._thread.start().result()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return BlockingSupervisor(self._thread)

    def _end(self, number: int) -> None:
        if not self._is_leaving:
            raise SystemExit(128 + number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_leaving = True
        if not self._thread.is_here:
            return
        pressed: BaseException | None = None
        while True:
            try:
                ended = self._thread.stop()
                if pressed is not None:
                    self._thread.hurry()
                outcome = ended.exception()
                self._thread.join()
                break
            except BaseException as again:  # Ctrl-C, or what another handler of a signal raises
                if pressed is not None:
                    raise
                pressed = again
        if self._signals is not None:
            self._signals.__exit__(None, None, None)
            pressed = self._signals.exit or pressed
        outcome = outcome or pressed
        if outcome is not None:
            raise outcome


class _AsyncioBlock(AbstractAsyncContextManager[AsyncioSupervisor]):
    def __init__(self, thread: PortalThread, *, handle_signals: bool) -> None:
        self._thread = thread
        self._signals = Signals(self._end, thread.hurry) if check_signals(handle_signals) else None
        self._is_leaving = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> AsyncioSupervisor:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._signals is not None:
            self._signals.__enter__()
        opened = self._thread.start()
        try:
            await _until_done(opened)
            opened.result()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return AsyncioSupervisor(self._thread)

    def _end(self, number: int) -> None:
        assert self._loop is not None, "it was entered"
        self._loop.call_soon_threadsafe(self._cancel_block)

    def _cancel_block(self) -> None:
        if not self._is_leaving and self._task is not None:
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_leaving = True
        if not self._thread.is_here:
            return
        ended = self._thread.stop()
        pressed: BaseException | None = None
        while not ended.done():
            try:
                await _until_done(ended)
            except asyncio.CancelledError as again:
                pressed = again
                self._thread.hurry()
        self._thread.join()
        if self._signals is not None:
            self._signals.__exit__(None, None, None)
            pressed = self._signals.exit or pressed
            if isinstance(pressed, SystemExit) and isinstance(error, asyncio.CancelledError) and self._task is not None:
                self._task.uncancel()
        outcome = ended.exception() or pressed
        if outcome is not None:
            raise outcome


async def _until_done(future: Future[Any]) -> None:
    """Wait for another thread's future. Cancellation leaves that alone, and what it holds need not be asked for."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()
