"""Simulate processes and kill them at their writes, as many as are asked for, on every processor there is.

    python tests/soak/soak_incarnations.py                            50,000, a new seed
    python tests/soak/soak_incarnations.py --incarnations 1000000     a million
    python tests/soak/soak_incarnations.py --again 123456             what seed 123456 is, once more

1. A seed is a random program (support/programs.py) that is run once undisturbed and once by processes that die, one after the
   other, at random writes; both have to end alike. Now and then one is a whole supervisor with its clients (support/simulation).
2. Everything comes from the seed, the scheduler's order included, so a seed that found something finds it again.
3. What counts as an incarnation is in support/incarnations.py: killed at a write, after it had made new history itself.
4. Most deaths come where they count. But some come before anything new, and never so many in a row that the workflow is
   ended by the limit on activations without progress, which is what it would deserve.

Rejected: Hypothesis, as in tests/property. It shrinks, and remembers; most of its time goes there, and a soak wants many.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import incarnations
from incarnations import Tally
from programs import Block, Disturbance, Join, Loop, Program, Race, Read, Sleep, Step, check_disturbed
from simulation.run import simulate

__all__ = ["Campaign", "disturbance_of", "play", "play_chunk", "program_of", "run", "soak"]

_SUPERVISOR_EVERY = 200
_CHUNK = 20
"""How many seeds a worker takes at once."""

_ENDINGS: Final = ("works", "fails once", "fails", "is tried")

_FRUITLESS_MAX = 6
"""How many deaths in a row may come before anything new; the limit of the engine is 10."""


def program_of(rng: random.Random) -> Program:
    """A random program of some parts, up to three deep: large enough that one seed is good for many deaths."""
    return tuple(_part(rng, 3) for _ in range(rng.randint(2, 8)))


def _part(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.4:
        match rng.randrange(4):
            case 0:
                return Sleep(rng.randint(0, 5))
            case 1:
                return Read()
            case _:
                return Step(rng.choice([0, 0, 3]), rng.choices(_ENDINGS, weights=(12, 3, 1, 3))[0])

    def body() -> Program:
        return tuple(_part(rng, depth - 1) for _ in range(rng.randint(1, 2)))

    match rng.randrange(4):
        case 0:
            return Loop(body(), rng.randint(1, 3), rng.randint(0, 1))
        case 1:
            return Block(body())
        case 2:
            return Join(tuple(body() for _ in range(rng.randint(1, 3))))
        case _:
            return Race(tuple(body() for _ in range(rng.randint(1, 3))), rng.random() < 0.5)


def disturbance_of(rng: random.Random) -> Disturbance:
    """Restarts at some stops, and deaths at writes, of one process after the other."""
    crashes: list[tuple[int, Literal["before", "after"]]] = []
    fruitless = 0
    for _ in range(rng.choice([2, 20, 100, 100])):
        write, when = rng.choice([0, 1, 1, 1, 1, 2, 2, 3, 5]), rng.choice(["before", "after"])
        fruitless = fruitless + 1 if (write, when) in ((0, "before"), (0, "after"), (1, "before")) else 0
        if fruitless == _FRUITLESS_MAX:
            write, when, fruitless = 2, "after", 0
        crashes.append((write, "before" if when == "before" else "after"))
    restarts = tuple(rng.random() < 0.5 for _ in range(rng.choice([0, 3, 12])))
    return Disturbance(rng.random() < 0.5, restarts, tuple(crashes))


def play(seed: int) -> None:
    """All that a seed is.

    Raises:
        Exception: It has found something.
    """
    if seed % _SUPERVISOR_EVERY == 0:
        simulate(seed)
        return
    rng = random.Random(seed)
    program, disturbance = program_of(rng), disturbance_of(rng)
    check_disturbed(
        program, disturbance, rng.randrange(2**32), rng.choice(["yield", "live"]), "memory", Path(tempfile.gettempdir())
    )


def play_chunk(first: int) -> tuple[list[Any], dict[int, str]]:
    """A worker's share: what it counted, and what it found, by seed."""
    incarnations.tally.clear()
    found: dict[int, str] = {}
    for seed in range(first, first + _CHUNK):
        try:
            play(seed)
        except BaseException as error:
            if not isinstance(error, Exception | BaseExceptionGroup):
                raise
            found[seed] = traceback.format_exc()
    return incarnations.tally.pack(), found


def _begin_worker() -> None:
    logging.disable(logging.ERROR)
    incarnations.watch_kit()


@dataclass(slots=True)
class Campaign:
    """What came of a soak.

    Attributes:
        tally: What was counted.
        seeds: How many seeds were played.
        found: What went wrong, by seed.
        seconds: How long it took.
    """

    tally: Tally = field(default_factory=Tally)
    seeds: int = 0
    found: dict[int, str] = field(default_factory=dict[int, str])
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """What there is to print."""
        for seed, text in self.found.items():
            yield f"{text}\nagain: python tests/soak/soak_incarnations.py --again {seed}"
        yield from self.tally.lines()
        rate = self.tally.counted / max(self.seconds, 0.001)
        yield f"{self.seeds:,} seeds in {self.seconds:.0f} s, {rate:,.0f} incarnations a second, {len(self.found)} problems"


def soak(least: int, first: int, workers: int) -> Campaign:
    """Play seeds from `first` on, until so many processes were killed or something was found."""
    campaign = Campaign()
    begun = told = time.monotonic()
    chunks = (first + _CHUNK * number for number in count())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker) as pool:
        running = {pool.submit(play_chunk, next(chunks)) for _ in range(2 * workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for chunk in done:
                packed, found = chunk.result()
                campaign.tally.add(Tally.unpack(packed))
                campaign.found |= found
                campaign.seeds += _CHUNK
                if campaign.tally.counted < least and not campaign.found:
                    running.add(pool.submit(play_chunk, next(chunks)))
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"{campaign.tally.counted:,} after {told - begun:.0f} s", flush=True)
    campaign.seconds = time.monotonic() - begun
    return campaign


def run(least: int, first: int, workers: int | None = None) -> bool:
    """A soak on every processor, printed; whether all was right."""
    print(f"seeds from {first}: {least:,} simulated processes", flush=True)
    campaign = soak(least, first, workers or os.cpu_count() or 1)
    for line in campaign.lines():
        print(line, flush=True)
    return not campaign.found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--incarnations", type=int, default=50_000)
    parser.add_argument("--seed", type=int, help="the first seed. Random, and printed, unless given")
    parser.add_argument("--workers", type=int, help="as many as processors unless given")
    parser.add_argument("--again", type=int, metavar="SEED", help="play this seed alone")
    given = parser.parse_args()
    if given.again is not None:
        play(given.again)
        print(f"seed {given.again} found nothing")
        return
    seed: int = random.randrange(1_000_000_000) if given.seed is None else given.seed
    sys.exit(not run(given.incarnations, seed, given.workers))


if __name__ == "__main__":
    main()
