"""Is replay linear in the length of history, and how many recorded steps a second does it return, loading included?"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import trio
from _common import median, report, timed

from perdure.storage import SqliteDriver
from perdure.workflow import Context, run_workflow


async def work(number: int) -> dict[str, int]:
    return {"number": number}


async def steps(ctx: Context, total: int) -> None:
    for number in range(total):
        await ctx.step(f"step-{number}", work, number, ephemeral=True)
    await ctx.queue.next("never")


async def replays(directory: Path, total: int, rounds: int) -> float:
    """Seconds to load and replay a history of `total` steps (median)."""
    path = directory / f"{total}.sqlite"
    driver = await SqliteDriver.open(path, create=True, durability="normal")
    await run_workflow("bench", steps, total, driver)
    await driver.aclose()
    seconds: list[float] = []
    for _ in range(rounds):
        driver = await SqliteDriver.open(path)
        seconds.append(await timed(run_workflow("bench", steps, total, driver)))
        await driver.aclose()
    return median(seconds, 6)


async def main(quick: bool) -> None:
    sizes, rounds = ((1_000, 5_000), 3) if quick else ((1_000, 5_000, 20_000, 100_000), 5)
    with tempfile.TemporaryDirectory(dir=".") as name:
        measured = {size: await replays(Path(name), size, rounds) for size in sizes}
    per_step = {size: round(seconds / size * 1e6, 1) for size, seconds in measured.items()}
    report(
        "replay of recorded steps, loading included",
        us_per_step=per_step,
        steps_per_s={size: round(size / seconds) for size, seconds in measured.items()},
        longest_to_shortest=round(per_step[sizes[-1]] / per_step[sizes[0]], 2),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller histories")
    trio.run(main, parser.parse_args().quick)
