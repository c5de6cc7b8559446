"""Drivers that are not atomic: a batch is cut, and a crash between the pieces is made good by the next run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Crash, Host, MovableClock, Namespace, crashes
from trio.testing import MockClock

from perdure.storage import Driver, MemoryDriver
from perdure.workflow import Break, Context, Continue, RunMode, send_message
from perdure.workflow.activation import Activation

MESSAGES = 150


class CutNamespace(Namespace):
    """In memory, behind a driver that takes 128 entries at once; it starts with these bytes."""

    def __init__(self, directory: Path, data: dict[bytes, bytes]) -> None:
        super().__init__("memory", directory)
        self._data = dict(data)

    async def open_driver(self) -> Driver:
        return MemoryDriver(self._data, atomic_batch=False)


async def reader(ctx: Context, _: None) -> list[Any]:
    messages = await ctx.queue.next_batch("all", count=MESSAGES)

    async def body(ctx: Context, state: int) -> Continue[int] | Break[int]:
        for part in range(70):
            await ctx.step(f"part-{part}", echo, state, ephemeral=True)
        await ctx.step("end", echo, state)
        return Break(state) if state == 1 else Continue(state + 1)

    await ctx.loop("rounds", body, 0, history_prune_interval=1, history_size=0)
    return [message.body for message in messages]


async def echo(value: int) -> int:
    return value


async def test_a_crash_between_the_pieces_of_a_batch_loses_no_message_and_reads_none_twice(
    mode: RunMode, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """S27, for the batches of a driver that is not atomic: the mailbox is empty at the end, and each message in history once."""
    filled = MemoryDriver(atomic_batch=False)
    for number in range(MESSAGES):
        await send_message(filled, "work", number, clock=MovableClock())

    async def scenario(namespace: Namespace) -> tuple[list[Any], int]:
        async with Host(namespace, mode) as process:
            output = await process.finish(reader)
            left = await Activation.load("workflow-1", await namespace.driver(), clock=process.clock)
            return output, len(left.mailbox)

    async def check(outcome: tuple[list[Any], int], namespace: Namespace, crash: Crash | None) -> None:
        output, left = outcome
        assert output == list(range(MESSAGES)), crash
        assert left == 0, crash

    exploration = await crashes(scenario, lambda: CutNamespace(tmp_path, filled.data), check)
    pieces_of_the_read = (2 * MESSAGES + 10) // 128
    assert exploration.counted >= pieces_of_the_read + 4


async def racer(ctx: Context, _: None) -> list[Any]:
    async def loser(ctx: Context) -> None:
        first = await ctx.queue.next_batch("all", names=["work"], count=5)
        for part in range(140):
            await ctx.step(f"part-{part}", echo, len(first), ephemeral=True)
        await ctx.sleep("long", 1e6)

    async def winner(ctx: Context) -> int:
        await ctx.sleep("pause", 10)
        return await ctx.step("work", echo, 1)

    result = await ctx.race("race", {"loser": loser, "winner": winner})
    await ctx.sleep("rest", 10)
    messages = await ctx.queue.next_batch("all", count=MESSAGES, timeout=0)
    return [result.winner, *(message.body for message in messages)]


async def test_a_crash_between_the_pieces_of_a_winners_batch_gives_back_every_message_that_a_loser_had_taken(
    mode: RunMode, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """S27, S29, for a driver that is not atomic: the removal of the loser's history is cut, and none of it comes back."""
    filled = MemoryDriver(atomic_batch=False)
    for number in range(5):
        await send_message(filled, "work", number, clock=MovableClock())

    async def scenario(namespace: Namespace) -> Any:
        async with Host(namespace, mode) as process:
            return await process.finish(racer)

    async def check(output: Any, namespace: Namespace, crash: Crash | None) -> None:
        assert output == ["winner", *range(5)], crash

    exploration = await crashes(scenario, lambda: CutNamespace(tmp_path, filled.data), check)
    assert exploration.counted >= 8
