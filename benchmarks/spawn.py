"""How many five-step workflows does a supervisor spawn and finish, 100 at a time, beside making as many SQLite files?

All at FULL. Two raw sides are measured in turn with ours: files made naively (connect, WAL, one table, one row, close), which is
what a program without a template does, and a ready image that is written and synced, below which nothing durable goes.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import time
from itertools import count
from pathlib import Path

import trio
from _common import in_turns, median, report

from perdure.actors import open_supervisor
from perdure.workflow import Context, workflow

_numbers = count()


async def work(number: int) -> int:
    return number


@workflow
async def five_steps(ctx: Context, start: int) -> int:
    """Five steps, one after another."""
    total = start
    for number in range(5):
        total += await ctx.step(f"step-{number}", work, number)
    return total


async def spawn_and_finish(directory: Path, total: int, at_once: int) -> float:
    """Seconds for so many workflows, from the first spawn to the last result."""
    async with open_supervisor(directory, [five_steps]) as supervisor:
        numbers = iter(range(total))

        async def one_after_another() -> None:
            for number in numbers:
                handle = await supervisor.spawn(five_steps, f"workflow-{number}", number)
                assert await handle.result() == number + 10

        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(at_once):
                nursery.start_soon(one_after_another)
        return time.perf_counter() - begun


def make_naively(directory: Path, total: int) -> float:
    """Seconds for so many files, each made, written to and closed as the standard library's documentation does it."""
    directory.mkdir()
    begun = time.perf_counter()
    for number in range(total):
        connection = sqlite3.connect(directory / f"{number}.sqlite", isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE kv(key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        connection.execute("INSERT INTO kv VALUES (?, ?)", (b"key", b"value"))
        connection.close()
    return time.perf_counter() - begun


def write_image(directory: Path, total: int) -> float:
    """Seconds for so many files, each written as one image and synced, with its directory entry."""
    directory.mkdir()
    image = bytes(8192)
    folder = os.open(directory, os.O_RDONLY)
    begun = time.perf_counter()
    for number in range(total):
        file = os.open(directory / f"{number}.sqlite", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(file, image)
        os.fsync(file)
        os.close(file)
        os.fsync(folder)
    elapsed = time.perf_counter() - begun
    os.close(folder)
    return elapsed


async def main(quick: bool) -> None:
    total, rounds = (200, 3) if quick else (1_000, 5)
    with tempfile.TemporaryDirectory(dir=".") as name:
        directory = Path(name)

        async def ours() -> float:
            return await spawn_and_finish(directory / f"ours-{next(_numbers)}", total, 100)

        async def naive() -> float:
            return make_naively(directory / f"naive-{next(_numbers)}", total)

        async def image() -> float:
            return write_image(directory / f"image-{next(_numbers)}", total)

        ours_s, naive_s, image_s = await in_turns(rounds, ours, naive, image)
        report(
            "five-step workflows spawned and finished, 100 at a time, at FULL",
            workflows=total,
            ours_per_s=round(total / median(ours_s, 6)),
            naive_files_per_s=round(total / median(naive_s, 6)),
            images_per_s=round(total / median(image_s, 6)),
            ours_to_naive=median([naive / ours for naive, ours in zip(naive_s, ours_s, strict=True)]),
            ours_to_images=median([image / ours for image, ours in zip(image_s, ours_s, strict=True)]),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer workflows and rounds")
    trio.run(main, parser.parse_args().quick)
