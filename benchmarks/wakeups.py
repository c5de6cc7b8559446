"""Does a live wake-up cost the same whatever the history's length? And beside two raw commits (message in, message out)?"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import trio
import trio.testing
from _common import RawTwin, RecordingDriver, median, pragmas_of, report

from perdure.storage import Batch, SqliteDriver
from perdure.workflow import Context, start_workflow


async def work(number: int) -> int:
    return number


async def waiter(ctx: Context, plan: dict[str, int]) -> int:
    for number in range(plan["steps"]):
        await ctx.step(f"step-{number}", work, number, ephemeral=True)
    total = 0
    for number in range(plan["messages"]):
        message = await ctx.queue.next(f"read-{number}", names=["tick"])
        total += message.body
        if message.body in handled:
            handled[message.body].set()
    return total


handled: dict[int, trio.Event] = {}


async def wakeups(path: Path, durability: Any, steps: int, messages: int) -> tuple[float, list[Batch]]:
    """Seconds for `messages` wake-ups, each sent once the one before was handled; and the batches they wrote."""
    handled.clear()
    driver = await SqliteDriver.open(path, create=True, durability=durability)
    recording: Any = RecordingDriver(driver)
    async with trio.open_nursery() as nursery:
        plan = {"steps": steps, "messages": messages}
        handle = await start_workflow(nursery, "bench", waiter, plan, recording)
        await trio.testing.wait_all_tasks_blocked(0.05)
        before = len(recording.batches)
        begun = time.perf_counter()
        for number in range(messages):
            event = handled[number] = trio.Event()
            await handle.message("tick", number)
            await event.wait()
        elapsed = time.perf_counter() - begun
        await handle.result()
    await driver.aclose()
    return elapsed, recording.batches[before:]


async def main(quick: bool) -> None:
    messages, rounds = (200, 3) if quick else (500, 5)
    with tempfile.TemporaryDirectory(dir=".") as name:
        directory = Path(name)
        pragmas = await pragmas_of(directory / "pragmas.sqlite", "full")
        short_s: list[float] = []
        long_s: list[float] = []
        raw_s: list[float] = []
        commits = 0
        for number in range(rounds):
            elapsed, batches = await wakeups(directory / f"short-{number}.sqlite", "full", 10, messages)
            short_s.append(elapsed)
            commits = len(batches)
            elapsed, _ = await wakeups(directory / f"long-{number}.sqlite", "full", 10_000, messages)
            long_s.append(elapsed)
            twin = RawTwin(directory / f"raw-{number}.sqlite", pragmas)
            raw_s.append(twin.apply(batches))
            twin.close()
        report(
            "a live wake-up by message, at FULL",
            messages=messages,
            commits_per_message=round(commits / messages, 2),
            at_10_entries_us=round(median(short_s, 6) / messages * 1e6),
            at_10000_entries_us=round(median(long_s, 6) / messages * 1e6),
            long_to_short=median([long / short for long, short in zip(long_s, short_s, strict=True)]),
            raw_to_ours=median([raw / ours for raw, ours in zip(raw_s, short_s, strict=True)]),
            messages_per_s=round(messages / median(short_s, 6)),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer messages and rounds")
    trio.run(main, parser.parse_args().quick)
