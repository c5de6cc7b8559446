"""Kill a process that hosts workflows, at random and again and again, until all have ended; then look whether all is right.

`python tests/crash/kill9.py --workflows 150 --seed 1` prints what it did, and fails with the seed in its message.

1. The killer is another process, the signal is SIGKILL, the store syncs (`durability="full"`), and what must have happened
   is known from the oracle (`worker.py`), not from the store.
2. Kills come while the process starts, while it recovers and while it works, at moments that the seed decides.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parent))

from worker import EFFECTS, MESSAGES, TURNS, Oracle, job

from perdure.actors import open_supervisor

_START_S = 60.0
"""A process that does nothing for longer than this, in seconds, hangs."""


@dataclass(slots=True)
class Report:
    """What a campaign did and found.

    Attributes:
        lives: How many processes there were; all but the last were killed.
        at_start: How many of them were killed before they had opened the supervisor.
        effects: How many effects there were, repetitions included.
        repeated: How many of those repeated one, since a death made their outcome unknown.
        interrupted: How many at-most-once steps were given up, their outcome unknown.
        seconds: How long it took.
        problems: What was not as it must be.
    """

    seed: int
    workflows: int
    lives: int = 0
    at_start: int = 0
    effects: int = 0
    repeated: int = 0
    interrupted: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list[str])


def campaign(directory: Path, *, workflows: int, seed: int, life_s: float = 0.6) -> Report:
    """Kill until all have ended, and check.

    Args:
        directory: An empty one.
        workflows: How many.
        seed: Decides when to kill.
        life_s: The longest time, in seconds, that a process gets once it has done something.
    """
    report = Report(seed, workflows)
    chance = random.Random(seed)
    began = time.monotonic()
    while not _live(directory, report, chance, life_s):
        pass
    results = trio.run(_results, directory, workflows)
    _check(report, results, Oracle(directory).lines())
    report.seconds = time.monotonic() - began
    return report


def _live(directory: Path, report: Report, chance: random.Random, life_s: float) -> bool:
    """One process, to its death or to the end of all workflows; says whether it was that."""
    report.lives += 1
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("worker.py")), str(directory)]
    with (
        (directory / "stderr").open("ab") as stderr,
        subprocess.Popen([*command, str(report.workflows)], stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        try:
            if chance.random() < 0.15:
                process.wait(chance.uniform(0.0, 0.3))
            else:
                _await_work(process, directory)
                # The first lives are too short for any workflow to end in one.
                process.wait(chance.uniform(0.0, life_s if report.lives > 3 else min(life_s, 0.1)))
        except subprocess.TimeoutExpired:
            if (directory / "stderr").stat().st_size:
                process.wait(_START_S)  # it fails by itself: let it say why
        finally:
            process.kill()
            assert process.stdout is not None
            report.at_start += not process.stdout.read()
    if process.returncode == 0:
        return True
    text = (directory / "stderr").read_text()
    if process.returncode != -9 or text:
        raise AssertionError(
            f"seed {report.seed}: a worker ended with {process.returncode} in life {report.lives}: {text}"
        )
    return False


def _await_work(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Wait until something new has happened, so that however slow the machine is, most lives get somewhere.

    (Ten lives in a row in which a workflow begins a step and records nothing are a crash loop, and rightly end it.)
    """
    oracle = directory / "oracle"
    known = oracle.stat().st_size if oracle.exists() else 0
    deadline = time.monotonic() + _START_S
    while process.poll() is None and not (oracle.exists() and oracle.stat().st_size > known):
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing happened for {_START_S} seconds")
        time.sleep(0.002)


async def _results(directory: Path, workflows: int) -> dict[str, Any]:
    async with open_supervisor(directory / "data", [job]) as supervisor:
        found: dict[str, Any] = {}
        for number in range(workflows):
            handle = await supervisor.get(f"job-{number}")
            found[f"job-{number}"] = await handle.result()
        assert supervisor.troubles() == {}
        return found


def _check(report: Report, results: dict[str, Any], lines: list[list[str]]) -> None:
    effects: dict[str, Counter[str]] = defaultdict(Counter)
    keys: dict[tuple[str, str], set[str]] = defaultdict(set)
    sent: dict[str, list[str]] = defaultdict(list)
    spawned: Counter[str] = Counter()
    for kind, workflow_id, *rest in lines:
        if kind == "effect":
            effects[workflow_id][rest[0]] += 1
            keys[workflow_id, rest[0]].add(rest[1])
        elif kind == "sent":
            sent[workflow_id].append(rest[0])
        else:
            spawned[workflow_id] += 1
    problems = report.problems
    for number in range(report.workflows):
        workflow_id = f"job-{number}"
        done = effects[workflow_id]
        charge = results[workflow_id].pop("charge")
        expected = {"number": number, "prepared": "prepare", "bodies": list(range(MESSAGES)), "turns": TURNS}
        if results[workflow_id] != expected:
            problems.append(f"{workflow_id}: the result is {results[workflow_id]}")
        problems += [f"{workflow_id}: the effect {name} is missing" for name in EFFECTS if not done[name]]
        problems += [f"{workflow_id}: nobody has the effect {name}" for name in set(done) - {*EFFECTS, "charge"}]
        if done["charge"] > 1 or charge not in ("charge", "interrupted") or (charge == "charge" and not done["charge"]):
            problems.append(f"{workflow_id}: charged {done['charge']} times, and says {charge!r}")
        if done["shaky"] < 2:
            problems.append(f"{workflow_id}: was not retried")
        if any(count > report.lives + (name == "shaky") for name, count in done.items()):
            problems.append(f"{workflow_id}: an effect was repeated more often than there were deaths: {done}")
        if sorted(sent[workflow_id]) != [f"{workflow_id}/{index}" for index in range(MESSAGES)]:
            problems.append(f"{workflow_id}: acknowledged were {sent[workflow_id]}")
        if spawned[workflow_id] != 1:
            problems.append(f"{workflow_id}: its start was acknowledged {spawned[workflow_id]} times")
        report.interrupted += charge == "interrupted"
        report.effects += sum(done.values())
        report.repeated += sum(done.values()) - len(done) - 1
    problems += [
        f"{workflow_id}: {name} had several keys" for (workflow_id, name), found in keys.items() if len(found) > 1
    ]
    if len({key for found in keys.values() for key in found}) != len(keys):
        problems.append("two steps had one idempotency key")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=150)
    parser.add_argument(
        "--seed", type=int, default=None, help="decides when to kill; random, and printed, unless given"
    )
    parser.add_argument("--life", type=float, default=0.6, help="the longest life of a process, in seconds")
    options = parser.parse_args()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        report = campaign(Path(directory), workflows=options.workflows, seed=seed, life_s=options.life)
    print(report)
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
