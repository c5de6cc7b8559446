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
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from perdure.actors.portal.awaitable import AsyncioSupervisor
from perdure.actors.portal.blocking import BlockingSupervisor
from perdure.actors.portal.thread import PortalThread, check_may_block
from perdure.actors.supervisor import check_signals, open_supervisor

__all__ = ["open_asyncio_portal", "open_portal"]

OptionsP = ParamSpec("OptionsP")
R = TypeVar("R")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


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
        self._signals = _Signals(thread) if check_signals(handle_signals) else None

    def __enter__(self) -> BlockingSupervisor:
        check_may_block()
        if self._signals is not None:
            self._signals.install()
        try:
            self._thread.start().result()
        except BaseException:
            self._leave()
            raise
        return BlockingSupervisor(self._thread)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread.is_here:
            self._leave()

    def _leave(self) -> None:
        if self._signals is not None:
            self._signals.is_leaving = True
        pressed: BaseException | None = None
        while True:
            try:
                ended = self._thread.stop()
                if pressed is not None:
                    self._thread.hurry()
                outcome = ended.exception()
                self._thread.join()
                break
            except BaseException as error:  # Ctrl-C, or what another handler of a signal raises
                if pressed is not None:
                    raise
                pressed = error
        if self._signals is not None:
            self._signals.uninstall()
        outcome = outcome or pressed
        if outcome is not None:
            raise outcome


class _Signals:
    """SIGINT and SIGTERM to a program that blocks: the first raises, the second hurries, the third ends the process."""

    def __init__(self, thread: PortalThread) -> None:
        self.is_leaving: bool = False
        self._thread = thread
        self._received: list[int] = []
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)

    def uninstall(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        match len(self._received):
            case 1 if not self.is_leaving:
                raise SystemExit(128 + number)
            case 1 | 2:
                self._thread.hurry()
            case _:
                os._exit(128 + number)


class _AsyncioBlock(AbstractAsyncContextManager[AsyncioSupervisor]):
    def __init__(self, thread: PortalThread, *, handle_signals: bool) -> None:
        self._thread = thread
        self._handles_signals = check_signals(handle_signals)
        self._received: list[int] = []
        self._previous: dict[int, Any] = {}
        self._is_leaving = False
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> AsyncioSupervisor:
        self._task = asyncio.current_task()
        if self._handles_signals:
            self._install()
        opened = self._thread.start()
        try:
            await _until_done(opened)
            opened.result()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return AsyncioSupervisor(self._thread)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._thread.is_here:
            return
        self._is_leaving = True
        ended = self._thread.stop()
        cancelled: asyncio.CancelledError | None = None
        while not ended.done():
            try:
                await _until_done(ended)
            except asyncio.CancelledError as again:
                cancelled = again
                self._thread.hurry()
        self._thread.join()
        self._uninstall()
        outcome = ended.exception()
        if outcome is None and self._received:
            outcome = SystemExit(128 + self._received[0])
            if isinstance(error, asyncio.CancelledError) and self._task is not None:
                self._task.uncancel()
        outcome = outcome or cancelled
        if outcome is not None:
            raise outcome

    def _install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._previous[number] = signal.getsignal(number)
            loop.add_signal_handler(number, self._receive, number)

    def _uninstall(self) -> None:
        loop = asyncio.get_running_loop()
        for number, handler in self._previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def _receive(self, number: int) -> None:
        self._received.append(number)
        match len(self._received):
            case 1 if not self._is_leaving and self._task is not None:
                self._task.cancel()
            case 1 | 2:
                self._thread.hurry()
            case _:
                os._exit(128 + number)


async def _until_done(future: Future[Any]) -> None:
    """Wait for another thread's future. Cancellation leaves that alone, and what it holds need not be asked for."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()
