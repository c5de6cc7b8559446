"""Crashes of a store whose workflows are young: killed, or without power, at any moment.

1. Programs drawn from seeds (`support/young_lives.py`) work with several workflows at once, over a journal so small that all
   that it does, it does often.
2. Every moment counts: for power cuts each sync and each mark (`support/power_disk.py`), for deaths each change of a file
   (`support/deaths.py`); and all that once more in the recovery from it.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from errno import EIO, ENOSPC
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from deaths import Deaths
from file_stores import opened, row
from power_disk import PLANS, Plan, Recording
from power_sqlite import map_error
from young_lives import IDS, Lineage, Lives, Mark, allowed, batch_of, found, small_journal

from perdure.storage import filing, journal, young_driver
from perdure.storage.directory import Host
from perdure.storage.errors import CorruptStoreError, StorageError
from perdure.storage.file_store import FileStore
from perdure.storage.sqlite_connection import Durability


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where the system has one."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_journal(monkeypatch)


async def check(
    data: Path, boot_id: str, marks: Sequence[Mark], durability: Durability, where: object, *, is_power_lost: bool
) -> dict[str, Lineage | str | None]:
    """Open what a crash left, and see that each workflow is as it may be."""
    what: dict[str, Lineage | str | None] = {}
    async with opened(data, boot_id, commit_in="inline") as store:
        for workflow_id in IDS:
            may_be = allowed(marks, workflow_id, durability, is_power_lost=is_power_lost)
            try:
                what[workflow_id] = await found(store, workflow_id)
            except AssertionError as error:
                error.add_note(f"{workflow_id} at {where}, where it may be {may_be}")
                raise
            assert what[workflow_id] in may_be, (where, workflow_id)
        assert {each.workflow_id for each in await store.list_rows()} == {
            key for key, each in what.items() if each is not None
        }
    assert not list((data / "journal").glob("*.log")), where
    return what


async def live(recording: Recording, seed: int, durability: Durability) -> Lives:
    """A program in two processes, with a mark for all that it is told."""
    options: dict[str, Any] = {"commit_in": "inline", "connect": recording.connect, "map_error": map_error}
    lives = Lives(seed, recording.mark)
    with recording.on():
        for _ in range(2):
            async with opened(recording.directory, durability=durability, **options) as store:
                await lives.live(store, 40)
    recording.check()
    return lives


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_young_workflows_survive_a_power_cut(scratch: Path, durability: Durability, seed: int) -> None:
    """S40, S52: at full no batch that was acknowledged is lost, at normal only a suffix; no deleted workflow comes back."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    lives = await live(recording, seed, durability)
    draw = random.Random(seed)
    seen: set[int] = set()
    what: dict[str, Lineage | str | None] = {}
    for cut in recording.cuts():
        for plan in ("lost", draw.choice(PLANS)):
            image = scratch / "image"
            left = hash((cut.leave(image, plan, draw.randrange(2**32)), cut.marks))
            if left not in seen:
                seen.add(left)
                what = await check(image, "boot-2", cut.marks, durability, (cut.number, plan), is_power_lost=True)
            shutil.rmtree(image)
    lives.check(what)
    assert len(seen) > 150


@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_young_workflows_survive_a_power_cut_while_they_get_their_files(
    scratch: Path, durability: Durability
) -> None:
    """S40: the power goes again at each moment at which the journal is replayed and the catalog rebuilt; nothing more is lost."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    await live(recording, 1, durability)
    draw = random.Random(2)
    again = 0
    for cut in recording.cuts():
        image = scratch / "image"
        cut.leave(image, draw.choice(PLANS), draw.randrange(2**32))
        if list(image.glob("journal/*.log")) and draw.random() < 0.08:
            # What is there is safe from here on.
            recovery = Recording(image)
            before = {workflow_id: await peek(image, workflow_id, scratch / "peek") for workflow_id in IDS}
            with recovery.on():
                async with opened(
                    image, "boot-2", commit_in="inline", connect=recovery.connect, map_error=map_error
                ) as store:
                    assert {workflow_id: await found(store, workflow_id) for workflow_id in IDS} == before
            recovery.check()
            for second in recovery.cuts():
                last = scratch / "last"
                second.leave(last, draw.choice(PLANS), draw.randrange(2**32))
                where = (cut.number, second.number)
                what = await check(last, "boot-3", cut.marks, durability, where, is_power_lost=True)
                assert what == before, where
                shutil.rmtree(last)
                again += 1
        shutil.rmtree(image)
    assert again > 100


async def peek(image: Path, workflow_id: str, scratch: Path) -> Lineage | str | None:
    """What is found of a workflow in a copy of a directory."""
    shutil.copytree(image, scratch)
    async with opened(scratch, "boot-2", commit_in="inline") as store:
        what = await found(store, workflow_id)
    shutil.rmtree(scratch)
    return what


async def die(deaths: Deaths, seed: int, durability: Durability) -> list[Mark]:
    """A program in two processes; its phase is how many marks there were."""
    marks: list[Mark] = []

    def note(mark: Mark) -> None:
        deaths.point()
        marks.append(mark)
        deaths.phase = str(len(marks))

    deaths.phase = "0"
    lives = Lives(seed, note)
    with deaths.watched():
        for _ in range(2):
            async with opened(deaths.data, durability=durability, commit_in="inline") as store:
                await lives.live(store, 40)
    return marks


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_young_workflows_survive_the_death_of_the_process(
    scratch: Path, durability: Durability, boot_id: str
) -> None:
    """S39, S52: killed at any point, each batch that was acknowledged is there, and a row is if and only if its workflow is."""
    deaths = Deaths(scratch / "data", scratch / "copies", commits=True)
    marks = await die(deaths, 3, durability)
    for phase, copy in deaths.found:
        await check(copy, boot_id, marks[: int(phase)], durability, phase, is_power_lost=False)
    assert len(deaths.found) > 200


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
async def test_young_workflows_survive_a_second_death_while_they_get_their_files(scratch: Path, boot_id: str) -> None:
    """S39, S52: killed while the journal is replayed, the next replay goes on."""
    deaths = Deaths(scratch / "data", scratch / "copies", commits=True)
    marks = await die(deaths, 4, "full")
    checked = 0
    for number, (phase, copy) in enumerate(deaths.found):
        if number % 7 or not list(copy.glob("journal/*.log")):
            continue
        again = Deaths(copy, scratch / "again")
        with again.watched():
            async with opened(copy, boot_id, commit_in="inline"):
                pass
        for _, later in again.found:
            await check(later, boot_id, marks[: int(phase)], "full", phase, is_power_lost=False)
            checked += 1
        shutil.rmtree(scratch / "again")
    assert checked > 200


@pytest.mark.parametrize("has_batches", [True, False])
@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_what_could_not_be_filed_is_safe_once_the_store_was_closed(
    scratch: Path, durability: Durability, has_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S40, S41: a closed store's catalog is trusted after a power cut, so what is still young is durable, at normal too."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    options: dict[str, Any] = {"commit_in": "inline", "connect": recording.connect, "map_error": map_error}
    marks: list[Mark] = []
    with recording.on():
        store = FileStore(recording.directory, durability=durability, host=host("boot-1"), **options)
        await store.acquire()
        lineage: Lineage = (1,)
        driver, _ = await store.create_driver(row("a"))
        for number in range(2, 5 if has_batches else 2):
            lineage = (*lineage, number)
            await driver.batch(batch_of("a", lineage))
        with monkeypatch.context() as patched:
            patched.setattr(filing, "write_whole", failing(ENOSPC))
            with pytest.raises(StorageError, match="No space left"):
                await store.aclose()
        recording.mark("closed")
    recording.check()
    marks.append(Mark("a", "safe", lineage))
    *_, cut = recording.cuts()
    cut.leave(scratch / "image", "lost", 1)
    await check(scratch / "image", "boot-2", marks, durability, "closed", is_power_lost=True)


@pytest.mark.parametrize("plan", ["lost", "kept"])
async def test_a_journal_that_could_not_be_synced_as_the_store_was_closed_leaves_no_row_alone(
    scratch: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S40, S41: a workflow that was made, and of which nothing was ever durable, is there after a power cut or is not known."""
    (scratch / "data").mkdir()
    recording = Recording(scratch / "data")
    options: dict[str, Any] = {"commit_in": "inline", "connect": recording.connect, "map_error": map_error}
    with recording.on():
        store = FileStore(recording.directory, host=host("boot-1"), **options)
        await store.acquire()
        await store.create_driver(row("a"))
        with monkeypatch.context() as patched:
            patched.setattr(filing, "write_whole", failing(EIO))
            patched.setattr(journal, "sync_content", failing(EIO))
            with pytest.raises(StorageError, match="Input/output error"):
                await store.aclose()
    *_, cut = recording.cuts()
    cut.leave(scratch / "image", plan, 1)
    await check(scratch / "image", "boot-2", [Mark("a", "begun", (1,))], "full", "closed", is_power_lost=True)


def failing(number: int) -> Any:
    """What fails with an error of the system."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def host(boot_id: str) -> Host:
    return Host(boot_id=lambda: boot_id, now_ms=lambda: 5_000)


async def test_a_torn_segment_is_put_aside_in_its_turn(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S52: killed while it replays, a store has the record that a workflow is gone for as long as it has its birth."""
    monkeypatch.setattr(young_driver, "JOURNALED_BYTES_MAX", 10_000)
    deaths = Deaths(scratch / "image", scratch / "copies")
    async with opened(scratch / "data", commit_in="inline") as store:
        keeper, _ = await store.create_driver(row("b"))
        driver, _ = await store.create_driver(row("a"))
        await driver.batch(batch_of("a", (1, 2)))
        lineage: Lineage = (3,)
        for number in range(14, 26):  # none of them too large for the journal
            lineage = (*lineage, number)
            await keeper.batch(batch_of("b", lineage))
        await driver.aclose()
        await store.delete("a")
        shutil.copytree(scratch / "data", deaths.data)
        await keeper.aclose()
    _, segment, *_ = segments_of(deaths.data)
    segment.write_bytes(segment.read_bytes()[:-4] + b"torn")
    deaths.phase = "replay"
    with deaths.watched():
        async with opened(deaths.data, "boot-2", commit_in="inline"):
            pass
    assert len(deaths.found) > 10
    for _, copy in deaths.found:
        async with opened(copy, "boot-3", commit_in="inline") as store:
            assert await found(store, "a") is None, copy
            assert await found(store, "b") == lineage


def segments_of(data: Path) -> list[Path]:
    """The segments that are there."""
    return sorted((data / "journal").glob("*.log"))


@pytest.mark.parametrize("catalog", ["deleted", "garbage", "older"])
async def test_what_the_journal_has_is_there_whatever_became_of_the_catalog(scratch: Path, catalog: str) -> None:
    """S50: killed with young workflows, and the catalog is gone, damaged, or from before they were made."""
    marks: list[Mark] = []
    lives = Lives(5, marks.append)
    killed = scratch / "killed"
    async with opened(scratch / "data", commit_in="inline") as store:
        await store.put_rows([row("other")])
    older = (scratch / "data" / "catalog.sqlite").read_bytes()
    async with opened(scratch / "data", commit_in="inline") as store:
        await lives.live(store, 40)
        shutil.copytree(scratch / "data", killed)
    assert segments_of(killed)
    for left in killed.glob("catalog.sqlite*"):
        left.unlink()
    if catalog != "deleted":
        (killed / "catalog.sqlite").write_bytes(older if catalog == "older" else b"garbage " * 1_000)
    await check(killed, "boot-1", marks, "full", catalog, is_power_lost=True)


async def test_a_damaged_segment_is_refused_by_name_and_nothing_is_changed(scratch: Path) -> None:
    """S41: no crash damages its header, so it is not passed over; put right, the store opens with all that it has."""
    async with opened(scratch / "data", commit_in="inline") as store:
        driver, _ = await store.create_driver(row("a"))
        await driver.batch(batch_of("a", (1, 2)))
        shutil.copytree(scratch / "data", scratch / "killed")
        await driver.aclose()
    first, *_ = segments_of(scratch / "killed")
    content = first.read_bytes()
    first.write_bytes(b"X" + content[1:])
    with pytest.raises(CorruptStoreError, match=first.name):
        async with opened(scratch / "killed", commit_in="inline"):
            pass
    assert not list((scratch / "killed" / "workflows").iterdir())
    first.write_bytes(content)
    async with opened(scratch / "killed", commit_in="inline") as store:
        assert await found(store, "a") == (1, 2)
