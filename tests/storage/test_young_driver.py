"""The driver of a workflow that has no file yet: what it refuses, when it moves to a file, and how it ends."""
# ruff: noqa: ASYNC240 - these tests look at the disk between two awaits

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
import trio.testing
from file_stores import opened, spawn
from harness import scheduled
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import Desk, Watch, contents, desk, shrink

from perdure.storage import filing as filing_module
from perdure.storage import young_driver as young_driver_module
from perdure.storage.driver import VALUE_BYTES_MAX, AlarmChange, Batch
from perdure.storage.errors import (
    BatchRefusedError,
    CommitUnknownError,
    DriverClosedError,
    StorageError,
    ValueTooLargeError,
)
from perdure.storage.journal import RECORD_BYTES_MAX
from perdure.storage.memory import MemoryDriver
from perdure.storage.sqlite import CommitIn
from perdure.storage.young_driver import JOURNALED_BYTES_MAX, YoungDriver

MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(params=["inline", "thread", "auto"])
def commit_in(request: pytest.FixtureRequest) -> CommitIn:
    return request.param


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


class FullDisk:
    """A disk on which no file can be written while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        write_whole = filing_module.write_whole

        def write(path: str, data: bytes) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_whole(path, data)

        monkeypatch.setattr(filing_module, "write_whole", write)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


# --- young -----------------------------------------------------------------------------------------------------------


async def test_while_it_is_young_there_is_no_file_and_all_can_be_read(data, commit_in):
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        assert driver.path == str(at.path("a"))
        assert driver.atomic_batch
        assert not await driver.has_any(b"")
        await driver.batch(Batch(puts=[(b"a1", b"1"), (b"a2", b"2"), (b"b", b"3")], alarm=AlarmChange("a", 7)))
        await driver.delete_prefix(b"a1")
        await driver.delete_range(b"b", b"c")
        assert await driver.list(b"a") == [(b"a2", b"2")]
        assert await driver.get_alarm("a") == 7
        assert await driver.has_any(b"a2")
        assert not await driver.has_any(b"b")
        assert not os.path.exists(driver.path)
        assert "young" in repr(driver)


async def test_batch_nowait_is_applied_and_durable_when_it_returns(data):
    async with desk(data) as at:
        driver = at.born("a")
        with trio.testing.assert_no_checkpoints():
            assert driver.batch_nowait(Batch(puts=[(b"key", b"1")]))
        assert await driver.get(b"key") == b"1"
        assert at.left() == {at.name("a"): {b"key": b"1"}}
        await driver.move()
        assert driver.batch_nowait(Batch(puts=[(b"key", b"2")]))
        assert await driver.get(b"key") == b"2"


@pytest.mark.parametrize("why", ["large batch", "grown", "batch under way", "turn taken", "failed sync"])
async def test_batch_nowait_does_nothing_where_it_would_have_to_wait(data, monkeypatch, watch, why):
    """For a file, or for another batch: whoever asks then uses `batch`."""
    shrink(monkeypatch, 65536)
    async with desk(data, "thread" if why == "batch under way" else "inline") as at, trio.open_nursery() as nursery:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        batch = Batch(puts=[(b"key", b"2")])
        match why:
            case "large batch":
                batch.puts.append((b"large", bytes(RECORD_BYTES_MAX)))
            case "grown":
                monkeypatch.setattr(young_driver_module, "JOURNALED_BYTES_MAX", 30)
            case "batch under way":
                watch.gate = threading.Event()
                nursery.start_soon(driver.set, b"other", b"")
                await watch.until_waiting()
            case "turn taken":  # by whoever copies it, say
                driver._young.turn.acquire_nowait()
            case _:
                (segment,) = at.segments()

                def fail(what: str, name: str) -> None:
                    if (what, name) == ("sync", segment):
                        raise OSError(errno.EIO, os.strerror(errno.EIO))

                watch.fail = fail
        assert not driver.batch_nowait(batch)
        assert await driver.list(b"") == [(b"key", b"1")]
        if watch.gate is not None:
            watch.let_go()
        if why == "turn taken":
            driver._young.turn.release()
        await driver.batch(batch)
        assert await driver.get(b"key") == b"2"


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_value_over_the_limit_is_refused_with_its_size_and_nothing_is_written(data, is_moved):
    async with desk(data) as at:
        for name, limit in (("a", VALUE_BYTES_MAX), ("b", 100)):
            driver = at.born(name) if limit == VALUE_BYTES_MAX else at.born(name, value_bytes_max=limit)
            assert driver.value_bytes_max == limit
            if is_moved and limit == VALUE_BYTES_MAX:
                await driver.move()
            batch = Batch(puts=[(b"small", b""), (b"key", bytes(limit + 1))])
            for write in (driver.batch, nowait(driver)):
                with pytest.raises(ValueTooLargeError) as caught:
                    await write(batch)
                assert (caught.value.size, caught.value.limit) == (limit + 1, limit)
                assert caught.value.path == driver.path
            assert await driver.list(b"") == []


def nowait(driver: YoungDriver) -> Any:
    async def write(batch: Batch) -> None:
        driver.batch_nowait(batch)

    return write


# --- moving ----------------------------------------------------------------------------------------------------------


async def test_it_moves_to_a_file_once_it_has_written_much(data, monkeypatch, commit_in):
    """Thousands may be young at once, and what they hold is in memory."""
    monkeypatch.setattr(young_driver_module, "JOURNALED_BYTES_MAX", 1000)
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        written = 0
        while not at.path("a").exists():
            await driver.set(b"%d" % written, bytes(100))
            written += 1
        assert 1000 / 150 <= written - 1 <= 1000 / 100
        assert await driver.list(b"") == sorted((b"%d" % number, bytes(100)) for number in range(written))
        assert at.left() == {at.name("a"): dict(await driver.list(b""))}


async def test_a_batch_too_large_for_the_journal_goes_to_a_file_with_all_before_it(data, commit_in):
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        await driver.set(b"large", bytes(RECORD_BYTES_MAX))
        assert at.path("a").exists()
        assert at.left() == {at.name("a"): {b"key": b"1", b"large": bytes(RECORD_BYTES_MAX)}}
    assert JOURNALED_BYTES_MAX >= RECORD_BYTES_MAX


async def test_what_was_read_before_a_move_is_read_after_it(data, commit_in):
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        await driver.batch(Batch(puts=[(b"a", b"1"), (b"b", b"")], alarm=AlarmChange("a", 5)))
        before = await driver.list(b""), await driver.get_alarm("a"), await driver.has_any(b"b")
        for _ in range(2):
            await driver.move()
            assert (await driver.list(b""), await driver.get_alarm("a"), await driver.has_any(b"b")) == before
        assert "open" in repr(driver)


async def test_the_file_is_used_only_once_it_is_durable_that_it_was_written(data, watch):
    """Else a power cut could bring back the birth, and with it an old state, or a workflow that was deleted."""
    async with desk(data) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        watch.fail = fail_all_syncs
        with pytest.raises(CommitUnknownError, match="there or not"):
            await driver.set(b"key", b"2")
        assert driver.is_given_up
        assert contents(at.directory.workflows) == {at.name("a"): {b"key": b"1"}}
        for _ in range(2):
            with pytest.raises(StorageError, match="there or not"):
                await at.open("a")
        watch.fail = None
        reopened = await at.open("a")
        assert await reopened.get(b"key") == b"1"
        await reopened.aclose()


async def test_a_batch_that_finds_no_file_to_be_had_is_refused_and_the_next_tries_again(data, commit_in, full_disk):
    """S41: the workflow stays young, with all that was acknowledged."""
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        full_disk.is_full = True
        large = Batch(puts=[(b"large", bytes(RECORD_BYTES_MAX))])
        for number in (b"2", b"3"):
            with pytest.raises(BatchRefusedError, match="No space") as caught:
                await driver.batch(large)
            assert caught.value.path == driver.path
            await driver.set(b"key", number)  # which needs no file
            assert await driver.list(b"") == [(b"key", number)]
            assert at.left() == {at.name("a"): {b"key": number}}
        full_disk.is_full = False
        await driver.batch(large)
        assert at.left() == {at.name("a"): {b"key": b"3", b"large": bytes(RECORD_BYTES_MAX)}}


async def test_a_file_that_cannot_be_opened_is_tried_again(data, monkeypatch):
    """S41: out of descriptors, say. It is there, and is not written twice."""
    async with desk(data) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        open_file = driver._open_file

        async def fail(path: str) -> Any:
            raise StorageError("too many open files", path=path)

        monkeypatch.setattr(driver, "_open_file", fail)
        with pytest.raises(StorageError, match="too many"):
            await driver.move()
        with pytest.raises(BatchRefusedError, match="too many"):
            await driver.set(b"key", b"2")
        assert await driver.get(b"key") == b"1"
        monkeypatch.setattr(driver, "_open_file", open_file)
        await driver.set(b"key", b"3")
        assert at.left() == {at.name("a"): {b"key": b"3"}}


async def test_it_is_over_with_the_driver_of_its_file(data):
    """After a commit of unknown outcome, whoever has it is told to open another, and need not close it first."""
    async with desk(data) as at:
        driver = at.born("a")
        await driver.move()
        assert not driver.is_given_up
        assert driver._file is not None
        await driver._file.aclose()
        assert driver.is_given_up
        with pytest.raises(DriverClosedError):
            await driver.set(b"key", b"1")


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_closed_driver_does_nothing(data, commit_in, is_moved):
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        if is_moved:
            await driver.move()
        await driver.aclose()
        batch = Batch(puts=[(b"key", b"2")])
        calls: list[Any] = [
            lambda: driver.get(b"key"),
            lambda: driver.list(b""),
            lambda: driver.has_any(b""),
            lambda: driver.get_alarm("a"),
            lambda: driver.batch(batch),
            lambda: nowait(driver)(batch),
            lambda: driver.set(b"key", b"2"),
            lambda: driver.backup(data / "copy"),
        ]
        for call in calls:
            with pytest.raises(DriverClosedError, match="open"):
                await call()
        assert "closed" in repr(driver)
        assert contents(at.directory.workflows) == {at.name("a"): {b"key": b"1"}}
        assert not (data / "copy").exists()


async def test_closed_twice_and_at_once_it_writes_one_file_and_is_over_with_the_last(data, commit_in, monkeypatch):
    written: list[str] = []
    over: list[bool] = []
    write_whole = filing_module.write_whole

    def write(path: str, content: bytes) -> None:
        written.append(path)
        write_whole(path, content)

    monkeypatch.setattr(filing_module, "write_whole", write)
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        driver.when_closed = lambda: over.append(driver.is_given_up)
        await driver.set(b"key", b"1")
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(driver.aclose)
        await driver.aclose()
        assert driver.is_given_up
        assert over[-1]
        assert all(over)
    assert len(written) == 1
    assert contents(at.directory.workflows) == {at.name("a"): {b"key": b"1"}}


async def test_a_driver_is_not_over_before_its_file_is_written(data, monkeypatch):
    """Nobody else gets the workflow meanwhile."""
    gate = threading.Event()
    write_whole = filing_module.write_whole

    def write(path: str, content: bytes) -> None:
        assert gate.wait(10)
        write_whole(path, content)

    monkeypatch.setattr(filing_module, "write_whole", write)
    async with desk(data, "thread") as at, trio.open_nursery() as nursery:
        driver = at.born("a")
        nursery.start_soon(driver.aclose)
        await trio.testing.wait_all_tasks_blocked()
        assert not driver.is_given_up
        nursery.cancel_scope.cancel()  # which does not interrupt it
        gate.set()
    assert driver.is_given_up
    assert contents(at.directory.workflows) == {at.name("a"): {}}


async def test_closed_without_a_file_to_be_had_nothing_is_lost_and_another_driver_goes_on(data, commit_in, full_disk):
    """S41"""
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        full_disk.is_full = True
        with pytest.raises(StorageError, match="No space"):
            await driver.aclose()
        assert driver.is_given_up
        await driver.aclose()
        assert at.left() == {at.name("a"): {b"key": b"1"}}
        again = at.again("a")
        assert await again.list(b"") == [(b"key", b"1")]
        await again.set(b"key", b"2")
        assert at.left() == {at.name("a"): {b"key": b"2"}}
        full_disk.is_full = False
        await again.set(b"key", b"3")
        await again.aclose()
        reopened = await at.open("a")
        assert await reopened.list(b"") == [(b"key", b"3")]
        await reopened.aclose()


@pytest.mark.parametrize("is_settled", [True, False])
async def test_one_whose_file_cannot_be_written_can_be_deleted_all_the_same(data, full_disk, watch, is_settled):
    """S41: which needs no space; cut short, it is finished by the next call, or the next process."""
    async with opened(data, commit_in="inline") as store:
        await spawn(store, "order-0")
        full_disk.is_full = True
        with pytest.raises(StorageError, match="No space"):
            await spawn(store, "order-1")
        if not is_settled:
            watch.fail = fail_all_syncs
            with pytest.raises(StorageError, match="there or not"):
                await store.delete("order-1")
            watch.fail = None
            killed = shutil.copytree(data, data.with_name("killed"))
        await store.delete("order-1")
        assert [each.workflow_id for each in await store.list_rows()] == ["order-0"]
        left = shutil.copytree(data, data.with_name("left"))
        full_disk.is_full = False
    for each in [left] if is_settled else [left, killed]:
        for boot_id in ("boot-1", "boot-2"):
            async with opened(each, boot_id) as store:
                assert [each.workflow_id for each in await store.list_rows()] == ["order-0"]
                assert len(list((each / "workflows").iterdir())) == 1


def fail_all_syncs(what: str, name: str) -> None:
    if what == "sync":
        raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_a_file_whose_name_may_not_be_durable_is_not_used_before_it_is_written_anew(data, commit_in, monkeypatch):
    """S41: with its directory's sync failed it is no file yet, and there all the same."""

    def fail(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with desk(data, commit_in) as at:
        driver = at.born("a")
        await driver.set(b"key", b"1")
        with monkeypatch.context() as patched:
            patched.setattr(filing_module, "sync_directory", fail)
            with pytest.raises(StorageError, match="Input/output error"):
                await driver.move()
            with pytest.raises(BatchRefusedError, match="Input/output error"):
                await driver.set(b"key", b"2")
            assert at.left() == {at.name("a"): {b"key": b"1"}}
        await driver.set(b"key", b"3")
        assert at.left() == {at.name("a"): {b"key": b"3"}}


async def test_a_batch_once_begun_is_carried_through_whatever_is_cancelled(data, watch):
    watch.gate = threading.Event()
    async with desk(data, "thread") as at:
        driver = at.born("a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driver.set, b"key", b"1")
            await watch.until_waiting()
            nursery.start_soon(driver.set, b"key", b"2")  # waits for its turn, and is given up
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            watch.let_go()
        assert await driver.get(b"key") == b"1"
        assert at.left() == {at.name("a"): {b"key": b"1"}}
        await driver.set(b"key", b"3")
        assert await driver.get(b"key") == b"3"


async def test_what_never_came_to_be_leaves_nothing(data):
    """Its row could not be written."""
    async with desk(data) as at:
        driver = at.born("a")
        driver.discard()
        with pytest.raises(DriverClosedError):
            await driver.get(b"key")
        await driver.aclose()
        await at.born("b").set(b"key", b"1")
        assert at.left() == {at.name("b"): {b"key": b"1"}}
    assert contents(at.directory.workflows).keys() == {at.name("b")}


async def test_a_driver_that_nobody_closed_says_so(data):
    at = Desk(data, "inline", is_full=True)
    driver = at.born("a")
    await driver.set(b"key", b"1")
    del driver, at  # which know of each other
    with pytest.warns(ResourceWarning, match="was not closed"):
        gc.collect()


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_moved", [False, True])
async def test_a_backup_is_a_whole_file_with_all_that_was_acknowledged(data, tmp_path, commit_in, is_moved):
    """And changes nothing: a young workflow stays young."""
    async with desk(data, commit_in) as at:
        driver = at.born("a")
        await driver.batch(Batch(puts=[(b"key", b"1")], alarm=AlarmChange("a", 3)))
        expected = dict(await driver.list(b""))
        if is_moved:
            await driver.move()
        copies = tmp_path / "copies"
        copies.mkdir()
        await driver.backup(copies / "a.sqlite")
        await driver.set(b"key", b"2")
        assert contents(copies) == {"a.sqlite": expected}
        assert at.path("a").exists() == is_moved
        with pytest.raises(StorageError, match="exists already"):
            await driver.backup(copies / "a.sqlite")
        with pytest.raises(StorageError) as caught:
            await driver.backup(copies / "missing" / "a.sqlite")
        assert caught.value.path == str(copies / "missing" / "a.sqlite")
        assert contents(copies) == {"a.sqlite": expected}


# --- forks -----------------------------------------------------------------------------------------------------------


FORKER = """
import os, sys, trio
from pathlib import Path
from journals import Desk
from perdure.storage.driver import Batch
from perdure.storage.errors import DriverClosedError

data, is_moved = Path(sys.argv[1]), sys.argv[2] == "moved"

async def before():
    at = Desk(data, "inline", is_full=True)
    driver = at.born("a")
    await driver.set(b"key", b"before")
    if is_moved:
        await driver.move()
    return at, driver

async def in_child(driver):
    async def nowait():
        driver.batch_nowait(Batch(puts=[(b"key", b"child")]))

    uses = [
        lambda: driver.get(b"key"),
        lambda: driver.list(b""),
        lambda: driver.has_any(b""),
        lambda: driver.set(b"key", b"child"),
        nowait,
        lambda: driver.backup(data / "copy"),
    ]
    for use in uses:
        try:
            await use()
        except DriverClosedError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("the parent's driver worked in a fork")
    await driver.aclose()

at, driver = trio.run(before)
pid = os.fork()
if pid == 0:
    trio.run(in_child, driver)
    # Ends as a whole interpreter does, finalising everything, and not with os._exit.
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
trio.run(driver.set, b"key", b"after")
print("written", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("state", ["young", "moved"])
def test_a_fork_cannot_use_nor_harm_its_parents_workflow(data, state):
    """S42: not even by ending."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKER, str(data), state],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.path.dirname(sys.modules["journals"].__file__ or "")},
    )
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGKILL, "written\n", "")
    assert not (data / "copy").exists()

    async def left() -> dict[str, dict[bytes, bytes]]:
        return Desk(data, "inline", is_full=True).left()

    (held,) = trio.run(left).values()
    assert held == {b"key": b"after"}


# --- moving while others are at work ---------------------------------------------------------------------------------


_keys = st.sampled_from([b"", b"\x00", b"a", b"aa", b"\xff"])
_changes = st.one_of(
    st.tuples(st.just("set"), _keys, st.binary(max_size=30)),
    st.tuples(st.just("set large"), _keys),
    st.tuples(st.just("delete"), _keys),
    st.tuples(st.just("delete_prefix"), _keys),
    st.tuples(st.just("nowait"), _keys, st.binary(max_size=30)),
)
_others = st.sampled_from([("move",), ("fail", "sync"), ("fail", "write"), ("look",), ("relieve",)])
_scripts = st.lists(st.lists(_changes | _changes | _others, min_size=1, max_size=8), min_size=1, max_size=4)


@given(
    seed=st.integers(0, 2**32 - 1),
    scripts=_scripts,
    commit_in=st.sampled_from(["inline", "thread", "auto"]),
    is_full=st.booleans(),
    journaled_bytes_max=st.sampled_from([0, 150, JOURNALED_BYTES_MAX]),
)
@settings(max_examples=100)
def test_whoever_moves_it_meanwhile_each_reads_what_it_wrote(seed, scripts, commit_in, is_full, journaled_bytes_max):
    """Tasks on one driver, each with keys of its own, against a dict for each; any segment of the journal may fail.

    What is refused for that is taken when it is written again. At the end the next process would find all of it, were this
    one killed before it closes the driver, and after.
    """

    async def persist(
        watch: Watch, act: Callable[[], Awaitable[None]], is_unchanged: Callable[[], Awaitable[bool]]
    ) -> None:
        """Do it until it is not refused: each segment fails once at most."""
        while True:
            try:
                return await act()
            except StorageError:
                assert watch.fail is not None
                assert await is_unchanged()

    async def follow(at: Desk, driver: YoungDriver, watch: Watch, own: bytes, script: list[Any]) -> MemoryDriver:
        model = MemoryDriver()

        async def is_as_expected() -> bool:
            return await driver.list(own) == await model.list(own)

        for name, *arguments in script:
            if name == "set large":
                name, arguments = "set", [*arguments, bytes(RECORD_BYTES_MAX)]
            match name, arguments:
                case "nowait", [key, value]:
                    batch = Batch(puts=[(own + key, value)])
                    if not driver.batch_nowait(batch):
                        await persist(watch, partial(driver.batch, batch), is_as_expected)
                    await model.batch(batch)
                case "move", _:
                    await persist(watch, driver.move, is_as_expected)
                case "relieve", _:
                    await at.journal.relieve()
                case "fail", [what]:
                    fail_next(at, watch, what)
                case "look", _:
                    left = at.left()[at.name("a")]
                    assert [pair for pair in sorted(left.items()) if pair[0].startswith(own)] == await model.list(own)
                case _, [key, *value]:
                    await persist(watch, partial(getattr(driver, name), own + key, *value), is_as_expected)
                    await getattr(model, name)(own + key, *value)
                case _:
                    pass
            assert await is_as_expected()
        return model

    async def main(data: Path) -> None:
        watch = Watch(patched)
        models: list[MemoryDriver] = []
        async with desk(data, commit_in, is_full=is_full) as at:
            driver = at.born("a")

            async def run(own: bytes, script: list[Any]) -> None:
                models.append(await follow(at, driver, watch, own, script))

            async with trio.open_nursery() as nursery:
                for number, script in enumerate(scripts):
                    nursery.start_soon(run, b"%d-" % number, script)
            watch.fail = None
            expected = {key: value for model in models for key, value in model.data.items()}
            assert at.left() == {at.name("a"): expected}
            await driver.aclose()
            assert at.left() == {at.name("a"): expected}
        assert contents(at.directory.workflows) == {at.name("a"): expected}
        assert at.segments() == []

    with (
        TemporaryDirectory(dir=MEMORY_DISK) as directory,
        pytest.MonkeyPatch.context() as patched,
        scheduled(seed),
    ):
        shrink(patched, 4096)
        patched.setattr(young_driver_module, "JOURNALED_BYTES_MAX", journaled_bytes_max)
        trio.run(main, Path(directory, "data"))


def fail_next(at: Desk, watch: Watch, operation: str) -> None:
    """Let the segment in use be one that cannot be synced, or written to."""
    segment = at.journal._open
    name = None if segment is None else segment.path.name

    def fail(what: str, where: str) -> None:
        if (what, where) == (operation, name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    watch.fail = fail
