"""Kill a process that hosts workflows, at random and again and again, until all have ended; then look whether all is right.

    python tests/soak/soak.py                                  1,000 workflows, a new seed
    python tests/soak/soak.py --minutes 60                     rounds of them for an hour, each with a seed of its own
    python tests/soak/soak.py --seed 7 --workflows 150         a plan again: the kills come as near as timing allows
    python tests/soak/soak.py --incarnations 1000000           and then a million simulated processes (soak_incarnations.py)
    python tests/soak/soak.py --incarnations 1000000 --simulated           those alone

1. The killer is another process, the signal is SIGKILL (now and then SIGTERM, and sometimes SIGKILL during the shutdown that
   follows), the store syncs, and what must have happened is known from the oracle (`soak_worker.py`), not from the store.
2. Kills come while the process starts, while it recovers and while it works, at moments that the seed decides.
3. What is checked is in `soak_checks.py`, what each workflow and its clients do in `soak_plans.py`.
4. A round that finds something, or hangs, keeps its directory and says where it is.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parent))

from soak_checks import Picture, check_child, check_keys, check_sink, check_workflow, gather
from soak_plans import child_id, plan_of, sink_id, sinks_of, workflow_id
from soak_worker import Options, SoakCodec, read_lines

from perdure.storage import CodedStore, FileStore, NamespaceNotFoundError, Store, layout
from perdure.storage.schema import EntryStatus, decode_message
from perdure.workflow import HistoryEntry, load_snapshot

__all__ = ["Report", "SoakError", "campaign", "main"]

_PATIENCE_S = 60.0
"""A process that does nothing for longer than this, in seconds, hangs."""

_TERMINATED = 128 + signal.SIGTERM


class SoakError(Exception):
    """A process hung, or ended otherwise than by what was done to it."""


@dataclass(slots=True)
class Report:
    """What a round did and found.

    Attributes:
        lives: How many processes there were.
        killed: How many of them were killed, `killed_at_start` of these before they had opened the supervisor.
        stopped: How many were asked to end, and did.
        effects: How many effects there were, repetitions included.
        repeated: How many of those repeated one.
        interrupted: How many at-most-once steps were given up, their outcome unknown.
        cancelled: How many workflows were cancelled.
        expired: How many failed at their deadline.
        loops: How many crash loops ended, and were recovered from.
        seconds: How long it took.
        problems: What was not as it must be.
    """

    options: Options
    lives: int = 0
    killed: int = 0
    killed_at_start: int = 0
    stopped: int = 0
    effects: int = 0
    repeated: int = 0
    interrupted: int = 0
    cancelled: int = 0
    expired: int = 0
    loops: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list[str])


def campaign(directory: Path, options: Options, *, deaths: int, life_s: float) -> Report:
    """Kill until all have ended, and check.

    Args:
        directory: An empty one.
        options: What is in it.
        deaths: How many processes are killed or stopped at most; the one after that runs to the end.
        life_s: The longest time, in seconds, that a process gets once it has done something.

    Raises:
        SoakError: A process hung, or ended by itself with an error.
    """
    report = Report(options)
    chance = random.Random(options.seed)
    began = time.monotonic()
    while not _live(directory, report, chance, life_s if report.lives < deaths else None):
        pass
    pictures = trio.run(_pictures, directory, options)
    _check(report, pictures, directory)
    report.seconds = round(time.monotonic() - began, 1)
    return report


def _live(directory: Path, report: Report, chance: random.Random, life_s: float | None) -> bool:
    """One process, to its death or to the end of all workflows; says whether it was that."""
    report.lives += 1
    dies_at_start, is_asked, dies_in_shutdown = chance.random() < 0.15, chance.random() < 0.2, chance.random() < 0.5
    moment = chance.random()
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("soak_worker.py")), str(directory)]
    with (
        (directory / "stderr").open("ab") as stderr,
        subprocess.Popen(
            [*command, json.dumps(report.options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
        ) as process,
    ):
        try:
            if life_s is None:
                _await_end(process, directory)
            elif dies_at_start:
                process.wait(0.5 * moment)
            else:
                _await_work(process, directory)
                process.wait(moment * life_s)
        except subprocess.TimeoutExpired:
            if is_asked and not dies_at_start:
                process.send_signal(signal.SIGTERM)
                _wait(process, 0.5 * moment if dies_in_shutdown else _PATIENCE_S)
        finally:
            process.kill()
            assert process.stdout is not None
            printed = process.stdout.read()
            process.wait()
    text = (directory / "stderr").read_text()
    if text or process.returncode not in (0, -signal.SIGKILL, _TERMINATED):
        raise SoakError(f"process {report.lives} ended with {process.returncode}: {text}")
    report.killed += process.returncode == -signal.SIGKILL
    report.killed_at_start += process.returncode == -signal.SIGKILL and not printed
    report.stopped += process.returncode == _TERMINATED
    return process.returncode == 0


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        if seconds == _PATIENCE_S:
            raise SoakError(f"it did not end within {seconds} seconds of SIGTERM") from None


def _size(directory: Path) -> int:
    oracle = directory / "oracle"
    return oracle.stat().st_size if oracle.exists() else 0


def _await_work(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Wait until something new has happened, so that however slow the machine is, most lives get somewhere."""
    known = _size(directory)
    deadline = time.monotonic() + _PATIENCE_S
    while process.poll() is None and _size(directory) == known:
        if time.monotonic() > deadline:
            raise SoakError(f"nothing happened for {_PATIENCE_S} seconds")
        time.sleep(0.002)


def _await_end(process: subprocess.Popen[bytes], directory: Path) -> None:
    while process.poll() is None:
        known = _size(directory)
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            if _size(directory) == known:
                raise SoakError(f"nothing happened for {_PATIENCE_S} seconds") from None


# What is stored at the end, read without a supervisor.


async def _pictures(directory: Path, options: Options) -> dict[str, Picture]:
    store: Store = FileStore(directory / "data")
    if options.is_coded:
        store = CodedStore(store, SoakCodec())
    await store.acquire()
    try:
        found: dict[str, Picture] = {}
        sinks = [sink_id(number) for number in range(sinks_of(options.workflows))]
        numbers = range(options.workflows)
        for name in (*map(workflow_id, numbers), *map(child_id, numbers), *sinks):
            try:
                found[name] = await _picture(store, name)
            except NamespaceNotFoundError:
                continue
        return found
    finally:
        await store.aclose()


async def _picture(store: Store, name: str) -> Picture:
    driver = await store.open_driver(name)
    try:
        snapshot = await load_snapshot(driver)
        waiting = [decode_message(value).id for _, value in await driver.list(layout.MAILBOX_PREFIX)]
    finally:
        await driver.aclose()
    reads = sorted(
        (entry for entry in snapshot.entries if entry.kind == "message" and not str(entry.path[-1]).endswith(":count")),
        key=_read_number,
    )
    steps = [entry for entry in snapshot.entries if entry.kind == "step"]
    return Picture(
        state=snapshot.state.value,
        output=snapshot.output,
        steps={entry.path: entry.data["output"] for entry in steps if not _is_between(entry)},
        reads=[(entry.data["body"]["id"], entry.data["body"]["body"]) for entry in reads],
        waiting=waiting,
        sent=sum(_is_between(entry) and _is_completed(entry) and str(entry.path[0]) != "call" for entry in steps),
    )


def _is_between(entry: HistoryEntry) -> bool:
    """Whether it records a message to another workflow, or a call of one."""
    return str(entry.path[0]) == "call" or str(entry.path[0]).startswith("send-")


def _is_completed(entry: HistoryEntry) -> bool:
    return entry.metadata is not None and entry.metadata.status is EntryStatus.COMPLETED


def _read_number(entry: HistoryEntry) -> int:
    return int(str(entry.path[0]).partition(":")[0].removeprefix("m"))


def _check(report: Report, pictures: dict[str, Picture], directory: Path) -> None:
    options = report.options
    seen = gather(read_lines(directory))
    senders: dict[str, dict[int, Picture]] = {}
    for number in range(options.workflows):
        plan = plan_of(options.seed, number, options.workflows)
        name = workflow_id(number)
        report.problems += check_workflow(plan, seen[name], pictures.get(name), deaths=report.lives)
        child = child_id(number)
        report.problems += check_child(plan, seen[child], pictures.get(child), pictures.get(name), deaths=report.lives)
        if plan.sink is not None and name in pictures:
            senders.setdefault(plan.sink, {})[number] = pictures[name]
        report.effects += len(seen[name].effects)
        report.repeated += len(seen[name].effects) - len({effect.name for effect in seen[name].effects})
        report.expired += seen[name].told["expired"]
        report.loops += seen[name].told["looped"]
    for number in range(sinks_of(options.workflows)):
        name = sink_id(number)
        report.problems += check_sink(name, seen[name], pictures.get(name), senders.get(name, {}))
    report.problems += check_keys(seen.values())
    report.cancelled = sum(picture.state == "cancelled" for picture in pictures.values())
    outputs = [picture.output for picture in pictures.values() if isinstance(picture.output, dict)]
    report.interrupted = sum(output["tokens"]["charge"] == "interrupted" for output in outputs)


# The command.


def _round(options: Options, *, deaths: int, life_s: float) -> bool:
    """One round in a directory of its own; says whether all was right."""
    print(f"seed {options.seed}: {options.workflows} workflows", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="perdure-soak-"))
    try:
        report = campaign(directory, options, deaths=deaths, life_s=life_s)
    except SoakError as error:
        print(f"seed {options.seed}: {error}\nkept: {directory}", flush=True)
        return False
    print(report, flush=True)
    if report.problems:
        print(f"seed {options.seed}: {len(report.problems)} problems\nkept: {directory}", flush=True)
        return False
    shutil.rmtree(directory)
    return True


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, help="of the first round; the next ones follow. Random, and printed, unless given"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="begin another round until so much time has passed")
    parser.add_argument("--deaths", type=int, default=40, help="how many processes die in a round")
    parser.add_argument("--life", type=float, default=3.0, help="the longest life of a process, in seconds")
    parser.add_argument("--incarnations", type=int, default=0, help="kill so many simulated processes afterwards")
    parser.add_argument("--simulated", action="store_true", help="these alone, and no real process")
    parser.add_argument("--max-live", type=int, default=50)
    parser.add_argument("--idle-timeout", type=float, default=0.05)
    given = parser.parse_args()
    if given.simulated and (not given.incarnations or given.minutes):
        parser.error("--simulated goes with --incarnations, how many there are to be, and without --minutes")
    seed: int = random.randrange(1_000_000) if given.seed is None else given.seed
    until = time.monotonic() + 60 * given.minutes
    is_right = True
    while is_right and not given.simulated:
        options = Options(given.workflows, seed, given.max_live, given.idle_timeout, is_coded=seed % 2 == 1)
        is_right = _round(options, deaths=given.deaths, life_s=given.life)
        seed += 1
        if time.monotonic() >= until:
            break
    if is_right and given.incarnations:
        from soak_incarnations import run  # which needs what the tests need

        is_right = run(given.incarnations, seed)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
