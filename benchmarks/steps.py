"""How many sequential durable steps does one workflow make, beside the raw commits of the same bytes?

Also: is a step at 20,000 as quick as one at 1,000, at FULL and at NORMAL? Run with `--quick` for fewer steps.
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


async def steps(ctx: Context, total: int) -> None:
    for number in range(total):
        await ctx.step(f"step-{number}", work, number)


async def record(directory: Path, total: int) -> list[Batch]:
    driver = await SqliteDriver.open(directory / "recorded.sqlite", create=True, durability="normal")
    recording = RecordingDriver(driver)
    await run_workflow("bench", steps, total, cast("Any", recording))
    await driver.aclose()
    return recording.batches


async def measure(directory: Path, durability: Any, total: int, rounds: int) -> dict[str, Any]:
    batches = await record(directory, total)
    (directory / "recorded.sqlite").unlink()
    pragmas = await pragmas_of(directory / f"pragmas-{durability}.sqlite", durability)

    async def ours() -> float:
        path = directory / f"ours-{next(_numbers)}.sqlite"
        driver = await SqliteDriver.open(path, create=True, durability=durability)
        begun = time.perf_counter()
        await run_workflow("bench", steps, total, driver)
        elapsed = time.perf_counter() - begun
        await driver.aclose()
        return elapsed

    async def raw() -> float:
        twin = RawTwin(directory / f"raw-{next(_numbers)}.sqlite", pragmas)
        elapsed = twin.apply(batches)
        twin.close()
        return elapsed

    ours_s, raw_s = await in_turns(rounds, ours, raw)
    ratios = [raw_round / our_round for our_round, raw_round in zip(ours_s, raw_s, strict=True)]
    return {
        "steps": total,
        "commits": len(batches),
        "ours_per_s": round(total / median(ours_s, 6)),
        "raw_commits_per_s": round(len(batches) / median(raw_s, 6)),
        "ratio": median(ratios),
        "pragmas": pragmas,
    }


async def flatness(directory: Path, durability: Any, total: int) -> dict[str, Any]:
    """Time of the steps around 1,000 and around the end of one long workflow.

    Our own cost shows most at NORMAL; what syncing a larger file costs shows only at FULL.
    """
    stamps: list[float] = []

    async def stamped(ctx: Context, total: int) -> None:
        for number in range(total):
            await ctx.step(f"step-{number}", work, number)
            stamps.append(time.perf_counter())

    driver = await SqliteDriver.open(directory / f"flat-{durability}.sqlite", create=True, durability=durability)
    await run_workflow("bench", stamped, total, driver)
    await driver.aclose()
    window = min(1000, total // 4)
    early = (stamps[window + window - 1] - stamps[window]) / (window - 1)
    late = (stamps[-1] - stamps[-window]) / (window - 1)
    return {
        "steps": total,
        "early_us": round(early * 1e6, 1),
        "late_us": round(late * 1e6, 1),
        "late_to_early": round(late / early, 2),
    }


async def main(quick: bool) -> None:
    total, long_total, rounds = (500, 4_000, 3) if quick else (2_000, 20_000, 5)
    with tempfile.TemporaryDirectory(dir=".") as name:
        directory = Path(name)
        report(
            "sequential durable steps of one workflow",
            full=await measure(directory, "full", total, rounds),
            normal=await measure(directory, "normal", total, rounds),
            full_long=await measure(directory, "full", long_total, 1),
            flatness_full=await flatness(directory, "full", long_total),
            flatness_normal=await flatness(directory, "normal", long_total),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    trio.run(main, parser.parse_args().quick)
