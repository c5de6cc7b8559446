"""A program that hosts workflows, for the tests of signals: `program.py DIRECTORY MODE [FACE [TOLD]]`. Says what happens.

FACE is `trio`, or `blocking` or `asyncio` for a portal. TOLD is a file descriptor, to which goes a byte for each signal that
has come to this program: the system makes one of two signals if the program had no time for the first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import trio

from perdure.actors import open_supervisor
from perdure.actors.portal import open_asyncio_portal, open_portal
from perdure.workflow import Context, Continue, workflow

SECONDS = {"quick": 0.3, "slow": 60.0, "stubborn": 60.0, "lingering": 2.0, "hot": 60.0}
"""How long the worker's step takes, by the mode's first word."""


def say(text: str) -> None:
    print(text, flush=True)


@workflow(name="worker")
async def worker(ctx: Context, mode: str) -> str:
    async def work() -> str:
        say("begun")
        if mode == "hot" and SECONDS[mode]:
            say("ready")
            while True:
                pass
        with trio.CancelScope(shield=mode in ("stubborn", "lingering")):
            await trio.sleep(SECONDS[mode])
        say("done")
        return mode

    worked = await ctx.step("work", work, timeout=0)
    await ctx.step("never-at-shutdown", say, "next")
    return worked


@workflow(name="waiter")
async def waiter(ctx: Context, input: None) -> Any:
    return (await ctx.queue.next("go")).body


@workflow(name="spinner")
async def spinner(ctx: Context, input: None) -> None:
    """Never rests: a step, and the next."""

    async def body(ctx: Context, state: int) -> Continue[int]:
        await ctx.step("turn", turn, state)
        return Continue(state + 1)

    await ctx.loop("turns", body, 0)


async def turn(number: int) -> int:
    return sum(range(2000)) + number


WORKFLOWS = [worker, waiter, spinner]


def tell_signals() -> None:
    """Tell the test of each signal that it has come; then it does what it did before. For the main thread, in the block."""
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler) and len(sys.argv) > 4:
            signal.signal(number, telling(int(sys.argv[4]), handler))


def telling(told: int, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
    def tell(number: int, frame: FrameType | None) -> None:
        os.write(told, b".")
        handler(number, frame)

    return tell


def what_to_spawn(what: str) -> list[tuple[Any, ...]]:
    if what == "busy":
        return [(spinner, f"spinner-{number}") for number in range(20)]
    return [(waiter, "waiter-1"), (worker, "worker-1", what)]


async def serve(directory: str, what: str, options: dict[str, Any]) -> None:
    async with open_supervisor(directory, WORKFLOWS, **options) as supervisor:
        tell_signals()
        for arguments in what_to_spawn(what):
            await supervisor.spawn(*arguments)
        await trio.sleep(0.2)
        say("ready")
        await trio.sleep_forever()


async def serve_asyncio(directory: str, what: str, options: dict[str, Any]) -> None:
    async with open_asyncio_portal(directory, WORKFLOWS, **options) as supervisor:
        tell_signals()
        for arguments in what_to_spawn(what):
            await supervisor.spawn(*arguments)
        await asyncio.sleep(0.2)
        say("ready")
        await asyncio.Event().wait()


def serve_blocking(directory: str, what: str, options: dict[str, Any]) -> None:
    with open_portal(directory, WORKFLOWS, **options) as supervisor:
        tell_signals()
        for arguments in what_to_spawn(what):
            supervisor.spawn(*arguments)
        threading.Event().wait(0.2)
        say("ready")
        threading.Event().wait()


def main() -> None:
    directory, mode, *rest = sys.argv[1:]
    what, _, how = mode.partition("-")
    options: dict[str, Any] = {"handle_signals": how == "handled", "grace": 60.0 if what == "slow" else 1.0}
    try:
        match rest[:1] or ["trio"]:
            case ["trio"]:
                trio.run(serve, directory, what, options)
            case ["asyncio"]:
                asyncio.run(serve_asyncio(directory, what, options))
            case ["blocking"]:
                serve_blocking(directory, what, options)
            case unknown:
                raise ValueError(unknown)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
