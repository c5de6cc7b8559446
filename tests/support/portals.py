"""What the portal's tests share: workflows, and a look at the threads that are left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio

from perdure.workflow import Context, CriticalError, workflow

__all__ = ["adder", "failing", "living_tasks", "no_thread_left", "sleeper", "waiter", "wait_until"]


@workflow(name="adder")
async def adder(ctx: Context, numbers: list[int]) -> int:
    return await ctx.step("add", sum, numbers)


@workflow(name="waiter")
async def waiter(ctx: Context, _: None) -> Any:
    return (await ctx.queue.next("go")).body


@workflow(name="sleeper")
async def sleeper(ctx: Context, seconds: float) -> str:
    return await ctx.sleep("sleep", seconds)


async def _refuse() -> None:
    raise CriticalError("no")


@workflow(name="failing")
async def failing(ctx: Context, _: None) -> None:
    await ctx.step("refuse", _refuse)


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Check that the block leaves no thread. Those that Trio keeps for reuse end by themselves, and are nobody's leak."""
    before = set(threading.enumerate())
    yield
    left = {thread for thread in threading.enumerate() if not thread.name.startswith("Trio thread")} - before
    assert left == set()


async def living_tasks() -> int:
    """How many tasks there are in the Trio run that this is called in."""
    return trio.lowlevel.current_statistics().tasks_living


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    """Wait, in a plain thread, until something is so; it is what another thread is about to do."""
    ready = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        ready.wait(0.005)
    raise AssertionError("it did not come to be so")
