"""Power cuts: a disk loses or tears whatever was not synced, at every moment at which that makes a difference.

1. A program runs over a recorded disk (`support/power_disk.py`), with another build of SQLite under the shipped driver. Every
   cut of the recording is then made in several ways, and what it leaves is opened as it is shipped, by the standard library.
2. Every state that the program went through is known, so what is found after a cut is one of them or is wrong.
3. A disk that only pretends to sync fails these tests, which says that they would find a sync that is missing.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from power_disk import PLANS, Cut, Plan, Recording
from power_sqlite import map_error

from perdure.storage import log_room, sqlite_image
from perdure.storage.driver import AlarmChange, Batch
from perdure.storage.errors import CorruptStoreError, NamespaceNotFoundError
from perdure.storage.layout import ALARM_KEY, encode_u64
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.sqlite_connection import (
    Connection,
    ConnectionFactory,
    Durability,
    connect_file,
    read_setting,
)

State = dict[bytes, bytes]
LARGE_BYTES = 900_000


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where the system has one: thousands of files are made here."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


_DRAWN: Sequence[Plan] = ("scattered", "torn")
"""Drawn twice, as they are many."""


class Images:
    """Makes what cuts leave, one at a time, each once."""

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        self._scratch = scratch
        self._seed = seed
        self._seen: set[int] = set()
        self.made = 0

    async def each(
        self, cuts: Iterator[Cut], check: Callable[[Cut, Plan, Path], Awaitable[None]], plans: Sequence[Plan] = PLANS
    ) -> None:
        """Check what each cut leaves, in each way."""
        for cut in cuts:
            for plan in (*plans, *_DRAWN):
                self._seed += 1
                target = self._scratch / f"image-{self._seed}"
                found = hash((cut.leave(target, plan, self._seed), cut.marks))
                if found not in self._seen:
                    self._seen.add(found)
                    self.made += 1
                    await check(cut, plan, target)
                shutil.rmtree(target)


def program(seed: int) -> list[Batch]:
    """Batches of every kind; some are so large that a few of them make a checkpoint. Each leads to another state."""
    draw = random.Random(seed)
    batches: list[Batch] = []
    for number in range(24):
        keys = [b"k%d" % draw.randrange(12) for _ in range(draw.randrange(1, 4))]
        batch = Batch(puts=[(key, draw.randbytes(draw.randrange(3000))) for key in dict.fromkeys(keys)])
        batch.puts.append((b"number", b"%d" % number))
        if number % 6 == 2:
            batch.puts.append((b"large", draw.randbytes(LARGE_BYTES)))
        if number % 5 == 1:
            batch.deletes.append(b"k%d" % draw.randrange(12))
        if number % 7 == 3:
            batch.delete_prefixes.append(b"k1")
        if number % 8 == 5:
            batch.delete_ranges.append((b"k2", b"k5"))
        if number % 3 == 0:
            batch.alarm = AlarmChange("w", None if number % 2 else number)
        batches.append(batch)
    return batches


def states(batches: list[Batch]) -> list[State]:
    """What there is before the first batch, and after each."""
    now: State = {}
    found = [dict(now)]
    for batch in batches:
        for key in list(now):
            if (
                key in batch.deletes
                or any(key.startswith(prefix) for prefix in batch.delete_prefixes)
                or any(start <= key < end for start, end in batch.delete_ranges)
            ):
                del now[key]
        now.update(batch.puts)
        if batch.alarm is not None:
            now.pop(ALARM_KEY, None)
            if batch.alarm.wake_at_ms is not None:
                now[ALARM_KEY] = encode_u64(batch.alarm.wake_at_ms)
        found.append(dict(now))
    return found


async def live(
    recording: Recording,
    batches: list[Batch],
    durability: Durability,
    *,
    lives: Sequence[int] = (5, 15),
    checkpoint_on_close: bool = True,
    has_checkpoint: bool = True,
) -> None:
    """Write the batches, closing and opening again after some numbers of them. Marks: ("acknowledged" or "closed", number)."""
    path = recording.directory / "w.sqlite"
    with recording.on():
        for begin, end in zip((0, *lives), (*lives, len(batches)), strict=True):
            driver = await SqliteDriver.open(
                path,
                create=True,
                durability=durability,
                commit_in="inline",
                connect=recording.connect,
                map_error=map_error,
                checkpoint_on_close=checkpoint_on_close,
            )
            recording.mark(("closed", begin))
            for number, batch in enumerate(batches[begin:end], begin):
                recording.mark(("begun", number + 1))
                await driver.batch(batch)
                recording.mark(("acknowledged", number + 1))
            if end == len(batches) and has_checkpoint:
                assert path.stat().st_size > LARGE_BYTES, "there was a checkpoint"
            await driver.aclose()
            recording.mark(("closed", end))
    recording.check()


def last(cut: Cut, *what: str) -> int | None:
    """The number of the last of such marks."""
    return max((number for name, number in cut.marks if name in what), default=None)


async def read(path: Path, durability: Durability) -> State | None:
    """What the shipped driver finds, which is sound, and goes on from; `None` if there is no file."""
    try:
        driver = await SqliteDriver.open(path, durability=durability, commit_in="inline")
    except NamespaceNotFoundError:
        return None
    try:
        found = dict(await driver.list(b""))
        assert driver.database().execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        await driver.set(b"after", b"1")
    finally:
        await driver.aclose()
    driver = await SqliteDriver.open(path, durability=durability, commit_in="inline")
    assert dict(await driver.list(b"")) == found | {b"after": b"1"}
    await driver.aclose()
    return found


class Check:
    """Whether what a cut leaves is right; `lost` are those where something that was acknowledged was not there."""

    def __init__(self, batches: list[Batch], durability: Durability) -> None:
        self._numbers = {frozenset(state.items()): number for number, state in enumerate(states(batches))}
        assert len(self._numbers) == len(batches) + 1
        self._durability: Durability = durability
        self.lost = 0

    async def __call__(self, cut: Cut, plan: Plan, image: Path) -> None:
        found = await read(image / "w.sqlite", self._durability)
        safe = last(cut, "closed")
        if found is None:
            assert safe is None, "the file was there"
            return
        number = self._numbers.get(frozenset(found.items()))
        where = (cut.number, plan, number, cut.marks[-1:])
        assert number is not None, f"{where}: a state that never was"
        assert number <= (last(cut, "begun") or 0), where
        acknowledged = last(cut, "acknowledged", "closed") or 0
        self.lost += number < acknowledged
        assert number >= (acknowledged if self._durability == "full" else safe or 0), where


@pytest.mark.parametrize("checkpoint_on_close", [True, False])
async def test_at_full_nothing_that_was_acknowledged_is_lost(scratch: Path, checkpoint_on_close: bool) -> None:
    """S40: at every cut, with checkpoints in between and the file closed and opened again; and nothing is there in part."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    batches = program(1)
    await live(recording, batches, "full", checkpoint_on_close=checkpoint_on_close)
    images, check = Images(scratch), Check(batches, "full")
    await images.each(recording.cuts(), check)
    assert check.lost == 0
    assert images.made > 150


async def test_at_full_room_made_ahead_in_the_log_is_never_taken_for_what_was_written(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S40: with room made so often that cuts fall before, in and after the making of it."""
    monkeypatch.setattr(sqlite_image, "NEW_LOG_BYTES", 6_000)
    monkeypatch.setattr(log_room, "NEW_LOG_BYTES", 6_000)
    monkeypatch.setattr(log_room, "_LOOK_AFTER", 1)
    lengthened: list[int] = []
    lengthen = log_room._lengthen

    def note(descriptor: int, start: int, end: int) -> None:
        lengthened.append(end)
        lengthen(descriptor, start, end)

    monkeypatch.setattr(log_room, "_lengthen", note)
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    batches = program(4)
    for batch in batches:
        batch.puts = [(key, value[:2_000]) for key, value in batch.puts]
    await live(recording, batches, "full", lives=(), has_checkpoint=False)
    assert len(lengthened) > 1
    images, check = Images(scratch), Check(batches, "full")
    await images.each(recording.cuts(), check)
    assert check.lost == 0
    assert images.made > 100


async def test_at_normal_only_the_latest_are_lost(scratch: Path) -> None:
    """S40: what is there is what some of the batches made, from the first on, without a gap and without a part of one.

    What was closed is safe at either durability.
    """
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    batches = program(2)
    await live(recording, batches, "normal")
    images, check = Images(scratch), Check(batches, "normal")
    await images.each(recording.cuts(), check)
    assert check.lost > 20, "a cut at normal loses something, or nothing was cut"
    assert images.made > 150


@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_a_second_cut_while_a_file_recovers_changes_nothing(scratch: Path, durability: Durability) -> None:
    """S40: what the first opening found is there after a cut at any moment of it, and what is written after it is safe."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    batches = program(3)
    await live(recording, batches, durability)
    again = 0

    async def recover(cut: Cut, plan: Plan, image: Path) -> None:
        nonlocal again
        if last(cut, "closed") is None or (cut.number + len(plan)) % 23:
            return
        second = Recording(image)
        with second.on():
            driver = await SqliteDriver.open(
                image / "w.sqlite",
                durability=durability,
                commit_in="inline",
                connect=second.connect,
                map_error=map_error,
            )
            found = dict(await driver.list(b""))
            second.mark(("found", 0))
            await driver.set(b"again", b"1")
            second.mark(("acknowledged", 1))
            await driver.aclose()
            second.mark(("closed", 1))
        second.check()

        async def check(cut: Cut, plan: Plan, image: Path) -> None:
            nonlocal again
            again += 1
            there = await read(image / "w.sqlite", durability)
            safe = last(cut, "closed") if durability == "normal" else last(cut, "acknowledged")
            assert there == found | {b"again": b"1"} or (safe is None and there == found), (cut.number, plan)

        (scratch / "second").mkdir(exist_ok=True)
        await Images(scratch / "second").each(second.cuts(), check, ("kept", "lost", "logs kept", "logs lost"))

    await Images(scratch).each(recording.cuts(), recover)
    assert again > 40


@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_a_disk_that_does_not_sync_is_found_out(scratch: Path, durability: Durability) -> None:
    """S40: what these tests are worth: with syncs that are none, something acknowledged is lost, or a file is damaged."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    batches = program(1)
    await live(recording, batches, durability)
    check = Check(batches, durability)
    wrong: set[str] = set()

    async def find(cut: Cut, plan: Plan, image: Path) -> None:
        if cut.number % 11:
            return
        try:
            await check(cut, plan, image)
        except (AssertionError, CorruptStoreError) as error:
            wrong.add(type(error).__name__)

    await Images(scratch).each(recording.cuts(syncs=False), find, ("lost", "logs kept", "logs lost"))
    assert wrong == {"AssertionError", "CorruptStoreError"}


async def test_files_that_were_made_are_there_whole_and_no_other_is(scratch: Path) -> None:
    """S40: the image of a new file is written and synced before it has its name, and its name is safe when it is opened."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    with recording.on():
        for number in range(4):
            driver = await SqliteDriver.open(
                recording.directory / f"{number}.sqlite",
                create=True,
                commit_in="inline",
                connect=recording.connect,
                map_error=map_error,
            )
            recording.mark(("made", number + 1))
            await driver.aclose()
    recording.check()
    there: set[int] = set()

    async def check(cut: Cut, plan: Plan, image: Path) -> None:
        made = last(cut, "made") or 0
        for number in range(4):
            found = await read(image / f"{number}.sqlite", "full")
            assert found == {} or (found is None and number >= made), (cut.number, plan)
            if found is not None:
                there.add(number - made)

    for seed in range(10):
        await Images(scratch, seed * 10_000).each(recording.cuts(), check)
    assert 0 in there, "a file may be there before it was acknowledged"


def copies(image: Path) -> list[bytes]:
    """The contents of what was set aside."""
    return [each.read_bytes() for each in image.glob("w.sqlite*Z")]


async def test_a_damaged_file_is_never_begun_afresh(scratch: Path) -> None:
    """S40, S41: it is set aside so that each later opening says so, and nothing of it is lost, whenever the power goes."""
    (scratch / "data").mkdir()
    path = scratch / "data" / "w.sqlite"
    driver = await SqliteDriver.open(path, create=True, commit_in="inline")
    await driver.batch(Batch(puts=[(b"k%d" % number, bytes(500)) for number in range(40)]))
    await driver.aclose()
    damaged = path.read_bytes()[:4096] + bytes(4096) + path.read_bytes()[8192:]
    path.write_bytes(damaged)
    recording = Recording(scratch / "data")
    with recording.on():
        with pytest.raises(CorruptStoreError):
            await SqliteDriver.open(
                path, create=True, commit_in="inline", connect=recording.connect, map_error=map_error
            )
        recording.mark(("told", 1))
    recording.check()

    async def check(cut: Cut, plan: Plan, image: Path) -> None:
        for _ in range(2):
            with pytest.raises(CorruptStoreError):
                await SqliteDriver.open(image / "w.sqlite", create=True, commit_in="inline")
        assert copies(image) == [damaged], (cut.number, plan)

    made = 0
    for seed in range(10):
        images = Images(scratch, seed * 10_000)
        await images.each(recording.cuts(), check)
        made += images.made
    assert made > 50


async def test_a_copy_is_complete_or_not_there(scratch: Path) -> None:
    """S40: a backup that is told of is safe, and there is never a part of one under its name."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    batches = program(4)[:4]
    with recording.on():
        driver = await SqliteDriver.open(
            recording.directory / "w.sqlite",
            create=True,
            commit_in="inline",
            connect=recording.connect,
            map_error=map_error,
        )
        for batch in batches:
            await driver.batch(batch)
        recording.mark(("begun", 1))
        await driver.backup(recording.directory / "copy.sqlite")
        recording.mark(("acknowledged", 1))
        await driver.aclose()
    recording.check()
    expected = states(batches)[-1]
    found: set[bool] = set()

    async def check(cut: Cut, plan: Plan, image: Path) -> None:
        if last(cut, "begun") is None:
            assert not (image / "copy.sqlite").exists()
            return
        copy = await read(image / "copy.sqlite", "full")
        found.add(copy is not None)
        assert copy == expected or (copy is None and last(cut, "acknowledged") is None), (cut.number, plan)

    await Images(scratch).each(recording.cuts(), check)
    assert found == {True, False}


class Listening:
    """A connection that notes what is executed on it."""

    def __init__(self, connection: Any, heard: list[str]) -> None:
        self.connection: Any = connection
        self._heard = heard

    @property
    def in_transaction(self) -> bool:
        return bool(self.connection.in_transaction)

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Any:
        self._heard.append(sql)
        return self.connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any, /) -> object:
        self._heard.append(sql)
        return self.connection.executemany(sql, parameters)

    def close(self) -> None:
        self.connection.close()


@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_what_is_cut_is_what_is_shipped(scratch: Path, durability: Durability) -> None:
    """S40: the disk's SQLite is given the statements that the standard library's is given, and takes the same settings."""
    heard: dict[str, list[str]] = {"shipped": [], "cut": []}
    settings: dict[str, list[Any]] = {"shipped": [], "cut": []}
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    factories: dict[str, Callable[[str], Connection]] = {"shipped": connect_file, "cut": recording.connect}

    def listening(name: str) -> ConnectionFactory:
        def connect(path: str) -> Listening:
            connections.append(Listening(factories[name](path), heard[name]))
            return connections[-1]

        return connect

    for name in heard:
        connections: list[Listening] = []
        directory = recording.directory if name == "cut" else scratch
        with recording.on():
            for _ in range(2):
                driver = await SqliteDriver.open(
                    directory / "w.sqlite",
                    create=True,
                    durability=durability,
                    commit_in="inline",
                    connect=listening(name),
                    map_error=map_error,
                )
                for batch in program(5)[:12]:
                    await driver.batch(batch)
                await driver.get(b"number")
                await driver.list(b"k")
                settings[name] += [
                    read_setting(connections[-1].connection, setting)
                    for setting in ("journal_mode", "synchronous", "locking_mode", "wal_autocheckpoint", "page_size")
                ]
                await driver.aclose()
    recording.check()
    assert heard["cut"] == heard["shipped"]
    assert len(heard["cut"]) > 80
    assert (
        settings["cut"] == settings["shipped"] == 2 * ["wal", 2 if durability == "full" else 1, "exclusive", 512, 4096]
    )
