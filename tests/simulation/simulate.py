"""Simulate whole supervisors: many workflows and their clients, processes that die at any write, disks and clocks that fail.

    python tests/simulation/simulate.py 7                 the simulation of seed 7, and what it did
    python tests/simulation/simulate.py 7 --count 1000    those of 7 to 1006
    python tests/simulation/simulate.py 7 --sqlite        on SQLite files

What is checked is in `tests/support/simulation/run.py`. A seed that finds something prints what happened.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from simulation.run import Figures, simulate


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="simulate whole supervisors")
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--sqlite", action="store_true", help="on SQLite files, in a directory that is removed")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    total, failed = Figures(), list[int]()
    begun = time.monotonic()
    for seed in range(options.seed, options.seed + options.count):
        if time.monotonic() - begun > options.seconds:
            break
        try:
            with tempfile.TemporaryDirectory() as directory:
                total.add(simulate(seed, Path(directory) / "disk" if options.sqlite else None))
        except Exception:
            traceback.print_exc()
            failed.append(seed)
    seconds = time.monotonic() - begun
    print(f"{total.runs} runs, {total.incarnations} incarnations, {total.killed} killed with new history")
    print(f"{total.writes} writes, {total.effects} effects, {total.replays} replays, {seconds:.1f} s")
    print("died at:", dict(total.points.most_common(40)))
    print("faults:", dict(total.faults))
    if failed:
        print("FAILED:", *failed)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
