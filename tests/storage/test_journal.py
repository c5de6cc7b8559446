"""The journal: what of a young workflow is durable, when its syncs are shared, and in which order its segments come and go."""
# ruff: noqa: ASYNC240 - these tests look at the disk between two awaits

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from file_stores import opened, row
from journals import Desk, Watch, desk, shrink

from perdure.storage import filing as filing_module
from perdure.storage import journal as journal_module
from perdure.storage.driver import Batch
from perdure.storage.errors import BatchRefusedError, StorageError
from perdure.storage.journal import Young, segment_paths
from perdure.storage.journal_format import Born, Changed, Filed, Record, read_segment
from perdure.storage.sqlite import CommitIn, SqliteDriver
from perdure.storage.sqlite_image import sync_content, sync_directory
from perdure.storage.young_driver import YoungDriver


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, 16384)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture(params=["inline", "thread", "auto"])
def commit_in(request: pytest.FixtureRequest) -> CommitIn:
    return request.param


@pytest.fixture(params=["full", "normal"])
def is_full(request: pytest.FixtureRequest) -> bool:
    return request.param == "full"


def no_space(what: str = "", name: str = "") -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def records(at: Desk) -> list[Record]:
    """All records of the segments that are there, in the order in which a replay reads them."""
    paths = segment_paths(at.directory.journal)
    return [record for path in paths for record in read_segment(path.read_bytes(), str(path))]


async def fill(driver: YoungDriver, count: int, *, size: int = 200) -> None:
    """Write some batches."""
    for number in range(count):
        await driver.set(b"filling", bytes([number % 256]) * size)


# --- what is durable -------------------------------------------------------------------------------------------------


async def test_a_birth_is_there_for_the_next_run_at_once(data):
    """The catalog is told of it next, so it must not be later than that; the process may be killed in between (S50)."""
    async with desk(data) as at:
        for name in ("a", "b"):
            at.born(name)
        assert at.left() == {at.name("a"): {}, at.name("b"): {}}
        assert not list(at.directory.workflows.iterdir())


async def test_what_was_acknowledged_is_there_for_the_next_run(data, commit_in, is_full):
    """S1: whatever the durability, wherever commits run."""
    async with desk(data, commit_in, is_full=is_full) as at:
        a, b = at.born("a"), at.born("b")
        await a.set(b"key", b"1")
        await b.set(b"key", b"2")
        await a.batch(Batch(puts=[(b"other", b"3")], deletes=[b"key"]))
        assert at.left() == {at.name("a"): {b"other": b"3"}, at.name("b"): {b"key": b"2"}}


async def test_at_full_each_batch_is_synced_before_it_is_acknowledged(data, watch):
    async with desk(data) as at:
        driver = at.born("a")
        assert watch.count("sync") == 0
        for number in range(1, 4):
            await driver.set(b"key", b"%d" % number)
            assert watch.count("sync") == number
            assert watch.done[-1][0] == "sync"


async def test_at_normal_the_first_batch_is_synced_and_the_others_are_handed_to_the_system(data, commit_in, watch):
    """A workflow that was told to run exists after a power cut, and each batch after a kill."""
    async with desk(data, commit_in, is_full=False) as at:
        driver = at.born("a")
        await driver.set(b"key", b"0")
        assert watch.count("sync") == 1
        for number in range(1, 5):
            await driver.set(b"key", b"%d" % number)
            assert watch.done[-1][0] == "write"
            assert at.left() == {at.name("a"): {b"key": b"%d" % number}}
        assert watch.count("sync") == 1
        await at.born("b").set(b"key", b"")
        assert watch.count("sync") == 2


async def test_at_normal_a_segment_is_durable_before_there_is_anything_in_the_next(data, monkeypatch, watch):
    """A power cut takes the last batches of a workflow there, but never one in the middle, whichever segment it spares."""
    shrink(monkeypatch, 2048)
    async with desk(data, is_full=False) as at:
        driver = at.born("a")
        await fill(driver, 25)
        assert len(set(watch.names("write"))) >= 3
    unsynced = set[str]()
    for what, name in watch.done:
        if what == "write":
            assert not unsynced - {name}, f"{name} was written to while {unsynced} could still be lost"
            unsynced.add(name)
        elif what == "sync":
            unsynced.discard(name)


async def test_at_normal_a_segment_that_cannot_be_made_durable_is_the_last(data, monkeypatch, watch):
    """What it holds is then in the workflow's file, and nothing goes into the next that would need it."""
    shrink(monkeypatch, 2048)
    async with desk(data, is_full=False) as at:
        driver = at.born("a")
        await driver.set(b"first", b"1")
        watch.fail = lambda what, name: no_space() if (what, name) == ("sync", watch.done[0][1]) else None
        await fill(driver, 25)
        assert at.path("a").exists()
        assert await driver.get(b"first") == b"1"
        assert [record for record in records(at) if isinstance(record, Filed)] == [Filed(0)]


# --- shared syncs ----------------------------------------------------------------------------------------------------


async def test_those_who_write_during_a_sync_share_the_next(data, watch):
    """Thirty-one batches, two syncs."""
    watch.gate = threading.Event()
    async with desk(data, "thread") as at, trio.open_nursery() as nursery:
        drivers = [at.born(str(number)) for number in range(31)]
        nursery.start_soon(drivers[0].set, b"key", b"0")
        await watch.until_waiting()
        for driver in drivers[1:]:
            nursery.start_soon(driver.set, b"key", b"1")
        await trio.testing.wait_all_tasks_blocked()
        assert [await driver.get(b"key") for driver in drivers] == [None] * 31, "nothing is read that is not durable"
        watch.let_go()
        nursery.cancel_scope.cancel()  # which interrupts none of them
    assert watch.count("sync") == 2
    assert all(len(data) == 1 for data in at.left().values())


async def test_alone_on_a_quick_disk_a_sync_is_made_in_place(data, monkeypatch):
    """Handing it to a thread would cost more."""
    monkeypatch.setattr(journal_module, "perf_counter", lambda: 0.0)
    threads: list[int] = []

    def sync(descriptor: int) -> None:
        threads.append(threading.get_ident())
        sync_content(descriptor)

    monkeypatch.setattr(journal_module, "sync_content", sync)
    async with desk(data, "auto") as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        assert driver.batch_nowait(Batch(puts=[(b"key", b"2")]))
        assert at.left() == {at.name("a"): {b"key": b"2"}}
    assert threads == [threading.get_ident()] * 2


async def test_with_commits_in_threads_no_sync_is_made_in_place(data):
    async with desk(data, "thread") as at:
        driver = at.born("a")
        assert not driver.batch_nowait(Batch(puts=[(b"key", b"1")]))
        assert at.left() == {at.name("a"): {}}


async def chores_done(at: Desk) -> None:
    """Wait until segments that are to be made or removed are."""
    while at.journal._chores_over is not None:
        await at.journal._chores_over.wait()


# --- segments --------------------------------------------------------------------------------------------------------


async def test_records_go_on_in_the_next_segment_and_are_read_in_their_order(
    data, monkeypatch, commit_in, is_full, watch
):
    """However the segments switch, each of several workflows that write at once has all its batches, in order."""
    shrink(monkeypatch, 2048)
    async with desk(data, commit_in, is_full=is_full) as at:

        async def write(name: str) -> None:
            driver = at.born(name)
            for number in range(12):
                await driver.batch(Batch(puts=[(b"%d" % number, bytes(100)), (b"last", b"%d" % number)]))

        async with trio.open_nursery() as nursery:
            for name in ("a", "b", "c"):
                nursery.start_soon(write, name)
        await chores_done(at)
        assert len(at.segments()) >= 3
        assert set(at.segments()) <= set(watch.names("make"))
        expected = {b"%d" % number: bytes(100) for number in range(12)} | {b"last": b"11"}
        assert at.left() == {at.name(name): expected for name in ("a", "b", "c")}
        for number in range(3):
            mine = [record for record in records(at) if isinstance(record, Born | Changed) and record.number == number]
            assert isinstance(mine[0], Born)
            lasts = [dict(record.batch.puts)[b"last"] for record in mine if isinstance(record, Changed)]
            assert lasts == [b"%d" % each for each in range(12)]


async def test_a_sync_takes_in_all_segments_that_were_written_to_in_their_order(data, monkeypatch, watch):
    """What was acknowledged is nothing without what is before it: a batch without the birth."""
    shrink(monkeypatch, 2048)
    async with desk(data) as at:
        drivers = [at.born(str(number)) for number in range(40)]
        segments = at.segments()
        assert len(segments) >= 2
        assert watch.count("sync") == 0
        await drivers[0].set(b"key", b"1")
        assert watch.names("sync") == segments[: watch.count("sync")]
        assert set(watch.names("sync")) == set(watch.names("write"))


async def test_the_next_segment_is_made_before_it_is_needed(data, monkeypatch, watch):
    """Once the one in use is half full, in a thread, while nobody waits for it."""
    shrink(monkeypatch, 2048)
    async with desk(data, "thread") as at:
        driver = at.born("a")
        while watch.count("make") == 1:
            await fill(driver, 1)
            await chores_done(at)
        assert set(watch.names("write")) == {watch.names("make")[0]}


@pytest.mark.parametrize("fails", [False, True])
async def test_a_segment_that_was_made_too_late_is_not_used(data, monkeypatch, watch, fails):
    """They are read in the order of their names: a later name for what was written first would bring back what is gone."""
    shrink(monkeypatch, 2048)
    async with desk(data, "thread") as at, trio.open_nursery() as nursery:
        first, second = at.born("a"), at.born("b")
        await fill(first, 3)
        assert watch.count("make") == 1
        watch.gate = threading.Event()
        nursery.start_soon(fill, first, 1)
        await watch.until_waiting()  # with the order to make the second segment
        nursery.start_soon(fill, second, 1)
        await trio.testing.wait_all_tasks_blocked()
        number = 0
        while watch.count("make") == 1:  # until another is made, meanwhile
            at.born(f"more-{number}")
            number += 1
        if fails:
            watch.fail = lambda what, name: no_space() if what == "write" else None
            with pytest.raises(OSError, match="No space"):
                at.journal.bear(at.name("none"))
            watch.fail = None
        watch.let_go()
        while at.journal._syncs.is_busy:
            await trio.testing.wait_all_tasks_blocked(0.001)
        await chores_done(at)
        at.born("late")
        used = list(dict.fromkeys(watch.names("write")))
        assert len(used) >= 2
        assert used == sorted(used)
        assert at.segments()[-1] == used[-1]
    assert at.segments() == []


async def test_segments_are_removed_from_the_oldest_on_once_all_that_were_born_in_them_have_files(
    data, monkeypatch, watch
):
    """So no birth is ever there without the record that follows it."""
    shrink(monkeypatch, 2048)
    async with desk(data) as at:
        keeper = at.born("keeper")
        await fill(keeper, 10)
        later = at.born("later")
        await fill(later, 10)
        first, *_, last = at.segments()
        await later.aclose()
        await fill(keeper, 1)
        assert watch.count("remove") == 0
        await keeper.aclose()
        fresh = at.born("fresh")
        await fresh.set(b"key", b"1")
        assert watch.names("remove") == watch.names("make")[: watch.count("remove")]
        assert first in watch.names("remove")
        assert last not in watch.names("remove")
        for name in ("keeper", "later"):
            assert at.journal.find(at.name(name)) is None
        assert at.left()[at.name("fresh")] == {b"key": b"1"}
        assert {at.name("keeper"), at.name("later")} <= at.left().keys()


async def test_the_removal_of_a_segment_is_durable_before_the_next_is_removed(data, monkeypatch):
    done: list[str] = []
    unlink = Path.unlink

    def sync(path: str) -> None:
        done.append("sync")
        sync_directory(path)

    def remove(self: Path, missing_ok: bool = False) -> None:
        done.append(self.name)
        unlink(self, missing_ok=missing_ok)

    shrink(monkeypatch, 2048)
    async with desk(data) as at:
        driver = at.born("a")
        await fill(driver, 20)
        names = at.segments()
        assert len(names) >= 3
        await driver.aclose()
        monkeypatch.setattr(journal_module, "sync_directory", sync)
        monkeypatch.setattr(Path, "unlink", remove)
        await at.journal.aclose()
    assert done[: 2 * len(names)] == [each for name in names for each in (name, "sync")]


async def test_a_removal_that_failed_is_left_to_the_end(data, monkeypatch, watch):
    shrink(monkeypatch, 2048)
    async with desk(data) as at:
        driver = at.born("a")
        await fill(driver, 10)
        await driver.aclose()
        oldest = at.segments()[0]
        watch.fail = lambda what, name: no_space() if what == "remove" else None
        other = at.born("b")
        await other.set(b"key", b"1")
        assert at.segments()[0] == oldest
        watch.fail = None
        await other.set(b"key", b"2")
        assert at.left() == {at.name("a"): {b"filling": bytes([9]) * 200}, at.name("b"): {b"key": b"2"}}
    assert at.segments() == []


async def test_once_a_removal_may_not_be_durable_no_later_segment_is_removed(data, monkeypatch, caplog):
    """S52: the oldest may come back after a power cut, and what is recorded of those that were born in it is in later ones."""
    shrink(monkeypatch, 2048)

    def fail(path: str) -> None:
        if path.endswith("journal"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_directory(path)

    at = Desk(data, "inline", is_full=True)
    keeper, driver = at.born("keeper"), at.born("a")
    await keeper.set(b"key", b"1")
    await fill(driver, 20)
    await driver.aclose()
    other = at.born("b")
    await other.set(b"key", b"1")
    before = at.segments()
    assert len(before) > 2
    await keeper.aclose()
    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "sync_directory", fail)
        await other.set(b"key", b"2")
    await other.set(b"key", b"3")
    await other.aclose()
    with pytest.raises(StorageError, match="cannot be removed"):
        await at.journal.aclose()
    assert at.segments()[: len(before) - 1] == before[1:]
    assert at.left() == {at.name(each): {b"key": value} for each, value in (("keeper", b"1"), ("b", b"3"))} | {
        at.name("a"): {b"filling": bytes([19]) * 200}
    }
    assert "grows until it is closed" in caplog.text


async def test_who_keeps_the_oldest_segment_gets_a_file_when_there_are_too_many(data, monkeypatch, commit_in):
    """Be it in use or not; so the journal stays bounded while some are young for long."""
    shrink(monkeypatch, 2048)
    monkeypatch.setattr(journal_module, "_SEGMENTS_MAX", 3)
    async with desk(data, commit_in) as at:
        keepers = [at.born(f"keeper-{number}") for number in range(6)]
        for keeper in keepers:
            await keeper.set(b"kept", b"1")
        await unfilable(at, monkeypatch, keepers[0])
        for number in range(10):
            await fill(at.born(str(number)), 6)
            assert len(at.segments()) <= 3 + 4
        assert all(at.path(f"keeper-{number}").exists() for number in range(6))
        for keeper in keepers[1:]:
            await keeper.set(b"more", b"2")
            assert dict(await keeper.list(b"")) == {b"kept": b"1", b"more": b"2"}
        reopened = await at.open("keeper-0")
        assert await reopened.list(b"") == [(b"kept", b"1")]
        await reopened.aclose()


async def unfilable(at: Desk, monkeypatch: pytest.MonkeyPatch, driver: YoungDriver) -> None:
    """Close a driver while its file cannot be written, so that its workflow stays young."""
    with monkeypatch.context() as patched:
        patched.setattr("perdure.storage.filing.write_whole", lambda *_: no_space())
        with pytest.raises(StorageError, match="No space"):
            await driver.aclose()


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["sync", "write"])
async def test_a_failed_sync_fails_what_was_not_durable_and_each_goes_on_in_its_own_file(
    data, commit_in, watch, operation
):
    """S41: nothing that was acknowledged is lost, and nothing of what was not is there besides what was written again."""
    async with desk(data, commit_in) as at:
        drivers = [at.born(str(number)) for number in range(3)]
        for driver in drivers:
            await driver.set(b"key", b"1")
        positions = [at.journal._written]
        failed: list[str] = []

        (segment,) = at.segments()

        def fail(what: str, name: str) -> None:
            if (what, name) == (operation, segment):
                failed.append(what)
                no_space()

        watch.fail = fail
        async with trio.open_nursery() as nursery:
            for driver in drivers[:2]:
                nursery.start_soon(driver.set, b"key", b"2")
            await trio.testing.wait_all_tasks_blocked()
            positions.append(at.journal._written)
            while len(failed) < 1:
                await trio.testing.wait_all_tasks_blocked(0.001)
            watch.fail = None
        assert at.path("0").exists()
        assert at.path("1").exists()
        await at.journal.sync(positions[0])
        with pytest.raises(StorageError, match="there or not"):
            await at.journal.sync(positions[0] + 1)
        assert [await driver.get(b"key") for driver in drivers] == [b"2", b"2", b"1"]
        expected = {at.name("0"): {b"key": b"2"}, at.name("1"): {b"key": b"2"}, at.name("2"): {b"key": b"1"}}
        assert at.left() == expected
        await drivers[2].set(b"key", b"3")
        assert at.path("2").exists()
        newborn = at.born("3")
        await newborn.set(b"key", b"4")
        assert not at.path("3").exists()
        expected |= {at.name("2"): {b"key": b"3"}, at.name("3"): {b"key": b"4"}}
        assert at.left() == expected


async def test_a_segment_that_takes_only_a_part_of_what_is_written_counts_as_failed(data, monkeypatch):
    """As where the disk is full in spite of the room that was made."""
    pwrite = os.pwrite
    async with desk(data) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        cut = [5]
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: cut.pop() if cut else None], at))
        await driver.set(b"key", b"2")
        assert at.path("a").exists()
        assert at.left() == {at.name("a"): {b"key": b"2"}}
        assert at.born("b") is not None


async def test_a_failed_segment_is_left_as_it_is(data, watch):
    """Nothing is written to it or synced again: what of it reached the disk is not known."""
    async with desk(data) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        (name,) = at.segments()
        content = (at.directory.journal / name).read_bytes()
        done_before = len(watch.done)
        watch.fail = lambda what, where: no_space() if (what, where) == ("write", name) else None
        await fill(driver, 3)
        await at.born("b").set(b"key", b"1")
        assert name not in {each for what, each in watch.done[done_before:] if what != "remove"}
        assert not (at.directory.journal / name).exists() or (at.directory.journal / name).read_bytes() == content


async def test_a_birth_that_cannot_be_written_is_none(data, watch):
    """And the next is born in another segment."""
    async with desk(data) as at:
        watch.fail = lambda what, name: no_space() if what == "write" else None
        with pytest.raises(OSError, match="No space"):
            at.journal.bear(at.name("a"))
        watch.fail = None
        assert at.journal.find(at.name("a")) is None
        at.born("b")
        assert at.left() == {at.name("b"): {}}


async def test_what_was_filed_is_recorded_anew_after_a_failure(data, watch):
    """`settle` returns once the record is durable, in whichever segment; until then the file may not be used."""
    async with desk(data) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        await driver.aclose()
        young = at.journal.find(at.name("a"))
        assert young is not None
        watch.fail = lambda what, name: no_space() if what in ("write", "make") else None
        for _ in range(2):
            with pytest.raises(StorageError):
                await at.journal.settle(young)
        watch.fail = None
        assert [record for record in records(at) if isinstance(record, Filed)] == []
        await at.journal.settle(young)
        assert [record for record in records(at) if isinstance(record, Filed)] == [Filed(0)]
        syncs = watch.count("sync")
        await at.journal.settle(young)
        assert watch.count("sync") == syncs
        at.path("a").unlink()
        assert at.left() == {}


# --- a disk that is nearly full --------------------------------------------------------------------------------------


def nearly_full(monkeypatch: pytest.MonkeyPatch, segments: int) -> None:
    """Let the disk have room for so many segments."""
    free = SimpleNamespace(f_bavail=segments, f_frsize=journal_module.SEGMENT_BYTES)
    monkeypatch.setattr(os, "statvfs", lambda path: free)


async def test_on_a_disk_that_is_nearly_full_a_new_workflow_has_its_file_at_once(data, monkeypatch):
    """S41: what is left is for files."""
    nearly_full(monkeypatch, 15)
    async with opened(data) as store:
        driver, is_new = await store.create_driver(row("order-1"))
        assert isinstance(driver, SqliteDriver)
        assert is_new
        await driver.set(b"key", b"1")
        assert Path(store.path_of("order-1")).exists()
        assert list((data / "journal").iterdir()) == []
        await driver.aclose()


async def test_once_the_disk_is_nearly_full_those_that_are_young_go_on_in_their_files(data, monkeypatch):
    """S41: that they have them is still recorded, for which a segment may be needed."""
    shrink(monkeypatch, 2048)
    async with desk(data) as at:
        drivers = [at.born(str(number)) for number in range(3)]
        for driver in drivers:
            await driver.set(b"key", b"1")
        nearly_full(monkeypatch, 2)
        segment = at.journal._open
        assert segment is not None
        room = at.journal._room() - segment.end
        await drivers[0].set(b"key", bytes(room - 45))
        assert 0 < at.journal._room() - segment.end < 10
        for driver in drivers:
            await driver.set(b"more", b"2")
        assert at.path("0").exists()
        assert at.left() == {
            at.name(str(number)): dict(await driver.list(b"")) for number, driver in enumerate(drivers)
        }


async def test_on_a_disk_that_is_full_what_is_refused_is_not_written_and_all_goes_on_with_space(data, monkeypatch):
    """S41"""
    shrink(monkeypatch, 2048)
    async with desk(data) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        with monkeypatch.context() as full:
            nearly_full(full, 0)
            full.setattr("perdure.storage.filing.write_whole", lambda *_: no_space())
            await fill(driver, 5)
            for _ in range(2):
                with pytest.raises(BatchRefusedError, match="No space"):
                    await driver.set(b"key", bytes(2000))
            assert await driver.get(b"key") == b"1"
            assert at.left()[at.name("a")].keys() == {b"key", b"filling"}
        await driver.set(b"key", b"2")
        assert at.left()[at.name("a")][b"key"] == b"2"


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_with_all_filed_nothing_of_the_journal_is_left(data, commit_in):
    async with desk(data, commit_in) as at:
        for name in ("a", "b"):
            await at.born(name).set(b"key", name.encode())
    assert at.segments() == []
    assert at.left() == {at.name("a"): {b"key": b"a"}, at.name("b"): {b"key": b"b"}}


async def test_with_one_that_has_no_file_the_journal_stays_for_the_next_run(data, monkeypatch, commit_in, is_full):
    """S41: its file could not be written, and that is said; the others' are there."""
    at = Desk(data, commit_in, is_full=is_full)
    a, b = at.born("a"), at.born("b")
    for driver in (a, b):
        await driver.set(b"key", b"1")
        await driver.set(b"key", b"2")
    await b.aclose()
    await unfilable(at, monkeypatch, a)
    with monkeypatch.context() as patched:
        patched.setattr("perdure.storage.filing.write_whole", lambda *_: no_space())
        with pytest.raises(StorageError, match="No space"):
            await at.journal.aclose()
    assert len(at.segments()) == 1
    assert at.left() == {at.name("a"): {b"key": b"2"}, at.name("b"): {b"key": b"2"}}


async def test_one_whose_file_could_not_be_written_has_it_at_the_end(data, monkeypatch, commit_in):
    """S41: if there is space by then."""
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        await unfilable(at, monkeypatch, driver)
        assert not at.path("a").exists()
    assert at.segments() == []
    assert at.left() == {at.name("a"): {b"key": b"1"}}


async def test_a_journal_that_cannot_be_removed_is_said_and_removed_by_the_next_run(data, watch):
    at = Desk(data, "inline", is_full=True)
    driver = at.born("a")
    await driver.set(b"key", b"1")
    await driver.aclose()
    watch.fail = lambda what, name: no_space() if what == "remove" else None
    with pytest.raises(StorageError, match="cannot remove") as caught:
        await at.journal.aclose()
    assert caught.value.path == str(at.directory.journal)
    assert at.left() == {at.name("a"): {b"key": b"1"}}


async def test_a_sync_that_fails_while_a_file_is_written_in_vain_is_not_forgotten(data, monkeypatch):
    """S41: the birth may be lost with it, so the workflow writes no more to the journal, although its file is not there."""
    async with desk(data) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")

        def write(path: str, content: bytes) -> None:
            at.journal._fail()
            no_space()

        with monkeypatch.context() as patched:
            patched.setattr(filing_module, "write_whole", write)
            with pytest.raises(StorageError):
                await driver.move()
        await driver.set(b"key", b"2")
        assert at.path("a").exists()
        assert await driver.get(b"key") == b"2"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
async def test_whatever_keeps_a_record_from_being_synced_the_file_decides(data, monkeypatch, error):
    """S21, S41: the record may be there after a kill, so the batch is in the file, and acknowledged."""

    async def fail(young: Young, position: int) -> None:
        raise error

    async with desk(data, "thread") as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        monkeypatch.setattr(at.journal, "make_durable", fail)
        await driver.set(b"key", b"2")
        assert at.path("a").exists()
        assert at.left() == {at.name("a"): {b"key": b"2"}}
        assert await driver.get(b"key") == b"2"


async def test_room_for_who_is_filed_is_given_back_with_their_segments(data, watch, monkeypatch):
    """Syncs that fail do not make segments smaller for good."""
    shrink(monkeypatch, 2048)

    def fail_once(what: str, name: str) -> None:
        if what == "sync":
            watch.fail = None
            no_space()

    async with desk(data) as at:
        for number in range(20):
            driver = at.born(str(number))
            await driver.set(b"key", bytes(300))
            watch.fail = fail_once
            await driver.set(b"key", bytes(301))
            await driver.aclose()
        last = at.born("last")
        await fill(last, 20)
        await last.aclose()
        assert at.journal._unrecorded <= sum(len(segment.born) for segment in at.journal._segments)
