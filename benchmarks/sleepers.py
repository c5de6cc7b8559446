"""How long does a supervisor take to start over 100,000 sleeping workflows, and how much memory do they take?

Beside it, the same over 1,000: what differs is what sleepers cost. In both some are due: they have files, and are activated and
finished. The others are rows of the catalog, as a sleeper's file is not looked at before it is due. Each measurement is made
in a process of its own, so that memory is its own, too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio
from _common import median, report

from perdure.actors import open_supervisor
from perdure.storage import CatalogRow, FileStore
from perdure.workflow import Context, SystemClock, workflow

FAR_MS = 4_000_000_000_000
_CHUNK = 5_000


@workflow
async def sleeper(ctx: Context, seconds: float) -> str:
    """Sleeps once."""
    return (await ctx.sleep("nap", seconds)).value


async def fill(directory: Path, total: int, due: int) -> None:
    """Sleeping workflows, of which so many are due by the time that this returns."""
    async with open_supervisor(directory, [sleeper], durability="normal") as supervisor:
        for number in range(due):
            await supervisor.spawn(sleeper, f"due-{number}", 2.0)
        await trio.sleep(1)  # they have parked
    store = FileStore(directory, durability="normal")
    await store.acquire()
    now_ms = SystemClock().now_ms()
    for first in range(0, total - due, _CHUNK):
        await store.put_rows(
            [
                CatalogRow(f"sleeper-{number}", "sleeper", "sleeping", FAR_MS + number, False, now_ms, now_ms)
                for number in range(first, min(first + _CHUNK, total - due))
            ]
        )
    await store.aclose()
    await trio.sleep(2)


def memory_kb() -> int:
    """What this process has in memory now, in KiB; where that is not told, the most that it had."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmRSS:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def start(directory: Path, total: int, due: int) -> dict[str, Any]:
    """Start over them once; seconds and bytes."""
    before_kb = memory_kb()
    begun = time.perf_counter()
    store = FileStore(directory)
    async with open_supervisor(store, [sleeper]) as supervisor:
        open_s = time.perf_counter() - begun
        for number in range(due):
            assert await (await supervisor.get(f"due-{number}")).result() == "completed"
        due_s = time.perf_counter() - begun
        after_kb = memory_kb()
        assert await store.count_rows() == total
    return {
        "open_s": open_s,
        "due_finished_s": due_s,
        "memory_kb": after_kb - before_kb,
    }


def measured(directory: Path, total: int, due: int) -> dict[str, Any]:
    """The same in a process of its own, over a directory of its own."""
    trio.run(fill, directory, total, due)
    done = subprocess.run(
        [sys.executable, __file__, "--start", str(directory), str(total), str(due)],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def main(quick: bool) -> None:
    many, few, due, rounds = (20_000, 1_000, 50, 1) if quick else (100_000, 1_000, 200, 3)
    with tempfile.TemporaryDirectory(dir=".") as name:
        found: dict[int, list[dict[str, Any]]] = {many: [], few: []}
        for round_number in range(rounds):
            for total, runs in found.items():
                runs.append(measured(Path(name) / f"{total}-{round_number}", total, due))
        report(
            f"starting over {many:,} sleeping workflows, of which {due} are due",
            **{
                f"over_{total}": {
                    "open_s": median([run["open_s"] for run in runs]),
                    "due_finished_s": median([run["due_finished_s"] for run in runs]),
                    "memory_mb": round(median([run["memory_kb"] for run in runs]) / 1024, 1),
                }
                for total, runs in found.items()
            },
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer workflows and rounds")
    parser.add_argument("--start", nargs=3, metavar=("DIRECTORY", "TOTAL", "DUE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        directory, total, due = arguments.start
        print(json.dumps(trio.run(start, Path(directory), int(total), int(due))))
    else:
        main(arguments.quick)
