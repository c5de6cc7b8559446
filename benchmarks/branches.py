"""What do joins and races cost, in commits and beside the raw commits of the same bytes?

A join of 100 one-step branches has to cost a few commits, since branches that finish together share one; a join of 1,000
ten times as much; a race with a sleeping loser three commits. Run with `--quick` for fewer rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any, cast

import trio
from _common import RawTwin, RecordingDriver, in_turns, median, pragmas_of, report

from perdure.storage import Batch, SqliteDriver
from perdure.workflow import Context, run_workflow

_numbers = count()


async def work(number: int) -> dict[str, int]:
    return {"number": number}


def branch(number: int) -> Any:
    async def run(ctx: Context) -> dict[str, int]:
        return await ctx.step("work", work, number)

    return run


async def join(ctx: Context, branches: int) -> None:
    await ctx.join("join", {f"branch-{number}": branch(number) for number in range(branches)})


async def asleep(ctx: Context) -> None:
    await ctx.sleep("a day", 86_400)


async def races(ctx: Context, total: int) -> None:
    for number in range(total):
        await ctx.race(f"race-{number}", {"slow": asleep, "fast": branch(number)})


async def record(directory: Path, workflow: Any, size: int) -> list[Batch]:
    driver = await SqliteDriver.open(directory / f"recorded-{next(_numbers)}.sqlite", create=True, durability="normal")
    recording = RecordingDriver(driver)
    await run_workflow("bench", workflow, size, cast("Any", recording))
    await driver.aclose()
    return recording.batches


async def measure(directory: Path, workflow: Any, size: int, rounds: int) -> dict[str, Any]:
    batches = await record(directory, workflow, size)
    pragmas = await pragmas_of(directory / f"pragmas-{next(_numbers)}.sqlite", "full")

    async def ours() -> float:
        driver = await SqliteDriver.open(directory / f"ours-{next(_numbers)}.sqlite", create=True, durability="full")
        begun = time.perf_counter()
        await run_workflow("bench", workflow, size, driver)
        elapsed = time.perf_counter() - begun
        await driver.aclose()
        return elapsed

    async def raw() -> float:
        twin = RawTwin(directory / f"raw-{next(_numbers)}.sqlite", pragmas)
        elapsed = twin.apply(batches)
        twin.close()
        return elapsed

    ours_s, raw_s = await in_turns(rounds, ours, raw)
    return {
        "size": size,
        "commits": len(batches),
        "ours_per_s": round(size / median(ours_s, 6)),
        "raw_commits_per_s": round(len(batches) / median(raw_s, 6)),
        "ours_us_each": round(median(ours_s, 6) / size * 1e6, 1),
    }


async def main(quick: bool) -> None:
    rounds = 3 if quick else 7
    with tempfile.TemporaryDirectory(dir=".") as name:
        directory = Path(name)
        report(
            "joins and races",
            join_of_100=await measure(directory, join, 100, rounds),
            join_of_1000=await measure(directory, join, 1000, rounds),
            races_with_a_sleeping_loser=await measure(directory, races, 100 if quick else 300, rounds),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    trio.run(main, parser.parse_args().quick)
