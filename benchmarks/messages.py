"""How many messages does a live workflow of a supervisor handle, one at a time and from a backlog, beside the raw commits?

One at a time: each is sent once the one before was handled, which takes two commits, one in and one out. The backlog is in the
mailbox before the workflow reads, one message a read. Both at FULL; the raw side applies the same batches to one file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import trio
import trio.testing
from _common import RawTwin, RecordingDriver, in_turns, median, pragmas_of, report

from perdure.actors import open_supervisor
from perdure.storage import Batch, Driver, FileStore
from perdure.workflow import Context, workflow

_numbers = count()
_handled = trio.Event()


class RecordingStore(FileStore):
    """A directory whose drivers keep what is written."""

    drivers: list[RecordingDriver]

    async def open_driver(self, workflow_id: str, *, create: bool = False) -> Driver:
        """As `FileStore`."""
        driver = RecordingDriver(await super().open_driver(workflow_id, create=create))
        self.drivers.append(driver)
        return cast("Driver", driver)


@workflow
async def reader(ctx: Context, total: int) -> int:
    """Adds up as many messages as it is told, once it may begin."""
    await ctx.queue.next("start", names=["start"])
    added = 0
    for number in range(total):
        message = await ctx.queue.next(f"tick-{number}", names=["tick"])
        added += message.body
        _handled.set()
    return added


async def one_at_a_time(directory: Path, total: int, *, is_recorded: bool = False) -> tuple[float, Sequence[Batch]]:
    """Seconds for so many messages, and the batches that they took."""
    global _handled
    store = RecordingStore(directory) if is_recorded else FileStore(directory)
    if isinstance(store, RecordingStore):
        store.drivers = []
    async with open_supervisor(store, [reader], mailbox_limit=10_000) as supervisor:
        handle = await supervisor.spawn(reader, "reader", total)
        await handle.message("start")
        await trio.testing.wait_all_tasks_blocked()
        skipped = len(store.drivers[0].batches) if isinstance(store, RecordingStore) else 0
        begun = time.perf_counter()
        for _ in range(total):
            _handled = trio.Event()
            await handle.message("tick", 1)
            await _handled.wait()
        elapsed = time.perf_counter() - begun
        assert await handle.result() == total
    return elapsed, store.drivers[0].batches[skipped:] if isinstance(store, RecordingStore) else []


async def backlog(directory: Path, total: int, *, is_recorded: bool = False) -> tuple[float, Sequence[Batch]]:
    """Seconds for reading so many messages that are there, and the batches that it took."""
    store = RecordingStore(directory) if is_recorded else FileStore(directory)
    if isinstance(store, RecordingStore):
        store.drivers = []
    async with open_supervisor(store, [reader], mailbox_limit=10_000) as supervisor:
        handle = await supervisor.spawn(reader, "reader", total)
        for _ in range(total):
            await handle.message("tick", 1)
        skipped = len(store.drivers[0].batches) if isinstance(store, RecordingStore) else 0
        begun = time.perf_counter()
        await handle.message("start")
        assert await handle.result() == total
        elapsed = time.perf_counter() - begun
    return elapsed, store.drivers[0].batches[skipped:] if isinstance(store, RecordingStore) else []


async def measure(directory: Path, what: Any, total: int, rounds: int) -> dict[str, Any]:
    _, batches = await what(directory / f"recorded-{next(_numbers)}", total, is_recorded=True)
    pragmas = await pragmas_of(directory / f"pragmas-{next(_numbers)}.sqlite", "full")

    async def ours() -> float:
        elapsed, _ = await what(directory / f"ours-{next(_numbers)}", total)
        return cast("float", elapsed)

    async def raw() -> float:
        twin = RawTwin(directory / f"raw-{next(_numbers)}.sqlite", pragmas)
        elapsed = twin.apply(batches)
        twin.close()
        return elapsed

    ours_s, raw_s = await in_turns(rounds, ours, raw)
    return {
        "messages": total,
        "commits_per_message": round(len(batches) / total, 2),
        "ours_per_s": round(total / median(ours_s, 6)),
        "raw_per_s": round(total / median(raw_s, 6)),
        "ratio": median([raw_round / our_round for our_round, raw_round in zip(ours_s, raw_s, strict=True)]),
    }


async def main(quick: bool) -> None:
    total, waiting, rounds = (300, 500, 3) if quick else (1_000, 2_000, 5)
    with tempfile.TemporaryDirectory(dir=".") as name:
        directory = Path(name)
        report(
            "messages handled by one live workflow of a supervisor, at FULL",
            one_at_a_time=await measure(directory, one_at_a_time, total, rounds),
            backlog=await measure(directory, backlog, waiting, rounds),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer messages and rounds")
    trio.run(main, parser.parse_args().quick)
