"""When files, disks and directories fail: a clear error for the one concerned, the others go on, repair is enough."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import trio
from commits import does_commit
from harness import MovableClock
from trio.testing import MockClock

from perdure.actors import Supervisor, open_supervisor
from perdure.storage import (
    BatchRefusedError,
    CatalogRow,
    CommitUnknownError,
    CorruptStoreError,
    FileStore,
    MemoryStore,
    NamespaceNotFoundError,
    StorageError,
    StoreLockedError,
    journal,
)
from perdure.storage import sqlite_image as image
from perdure.storage.sqlite_connection import connect_file
from perdure.workflow import Context, WorkflowState, workflow

PROGRAM = Path(__file__).with_name("program.py")
IOERR_FSYNC = sqlite3.SQLITE_IOERR | (4 << 8)
effects: list[str] = []
is_slow = False


@pytest.fixture(autouse=True)
def _fresh() -> None:
    global is_slow
    effects.clear()
    is_slow = False


@workflow(name="worker")
async def worker(ctx: Context, count: int) -> str:
    """A message between the first and the other steps; each step stores some bytes."""

    async def work(number: int) -> bytes:
        if is_slow and number == 1:
            await trio.sleep(1000)
        effects.append(f"{ctx.workflow_id}/{number}")
        return b"x" * 3000

    await ctx.step("0", work, 0)
    await ctx.queue.next("go")
    for number in range(1, count):
        await ctx.step(str(number), work, number)
    return f"{count} done"


async def hosted(supervisor: Supervisor, *workflow_ids: str, count: int = 3) -> None:
    """Start workers and let them come to their wait."""
    for workflow_id in workflow_ids:
        await supervisor.spawn(worker, workflow_id, count)
    await trio.sleep(1)


async def sent(supervisor: Supervisor, *workflow_ids: str) -> None:
    for workflow_id in workflow_ids:
        await (await supervisor.get(workflow_id)).message("go")


async def results(supervisor: Supervisor, *workflow_ids: str) -> list[Any]:
    return [await (await supervisor.get(workflow_id)).result() for workflow_id in workflow_ids]


def each_once(*workflow_ids: str, count: int = 3) -> list[str]:
    return sorted(f"{workflow_id}/{number}" for workflow_id in workflow_ids for number in range(count))


def _is_there(path: Path) -> bool:
    return path.exists()


class Directory:
    """A data directory in virtual time, whose connections can be made to fail.

    With a journal, new workflows have no files, and no connections, until they are closed or have grown.
    """

    def __init__(self, path: Path, *, journal: bool) -> None:
        self.path = path
        self.journal = journal
        self.clock = MovableClock()
        self.connect: Callable[[str], Any] = connect_file

    def open(self) -> Any:
        store = FileStore(self.path, commit_in="inline", connect=lambda path: self.connect(path), journal=self.journal)
        return open_supervisor(store, [worker], clock=self.clock, grace=1)


@pytest.fixture(params=[True, False], ids=["journal", "files"])
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Directory:
    return Directory(tmp_path / "data", journal=request.param)


def garbage(path: Path) -> None:
    path.write_bytes(b"This is not a database. " * 500)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


class TestFiles:
    """S41: a file replaced by garbage or cut short."""

    @pytest.mark.parametrize("is_due", [False, True])
    @pytest.mark.parametrize("damage", [garbage, cut, empty])
    async def test_a_damaged_file_is_named_set_aside_and_goes_on_once_put_back(
        self, directory: Directory, damage: Callable[[Path], None], is_due: bool, autojump_clock: MockClock
    ) -> None:
        global is_slow
        is_slow = is_due
        async with directory.open() as supervisor:
            await hosted(supervisor, "w-1", "w-2", "w-3")
            if is_due:
                await sent(supervisor, "w-1", "w-2", "w-3")
            path = Path(supervisor.describe("w-2"))
        is_slow = False
        copy = path.with_name("copy")
        shutil.copy(path, copy)
        damage(path)
        async with directory.open() as supervisor:
            await trio.sleep(1)
            handle = await supervisor.get("w-2")
            for ask in (handle.result, handle.get_state, lambda: handle.message("go"), handle.wake):
                with pytest.raises(CorruptStoreError) as caught:
                    await ask()
                assert str(path) in str(caught.value)
            assert not _is_there(path), "it is not made again"
            if is_due:
                assert isinstance(supervisor.troubles()["w-2"], CorruptStoreError)
            else:
                await sent(supervisor, "w-1", "w-3")
            assert await results(supervisor, "w-1", "w-3") == ["3 done"] * 2, "the others go on"
            row = await supervisor._store.get_row("w-2")
            assert row is not None
            assert str(path) in (row.problem or "")
            with pytest.raises(CorruptStoreError):
                await supervisor.spawn(worker, "w-2", 3)
            assert [effect for effect in effects if effect.startswith("w-2")] == ["w-2/0"]
            # Somebody brings the file back, while the supervisor runs.
            shutil.copy(copy, path)
            if is_due:
                await handle.wake()
            else:
                await handle.message("go")
            assert await handle.result() == "3 done"
            assert supervisor.troubles() == {}
            await trio.sleep(1)
            row = await supervisor._store.get_row("w-2")
            assert row is not None
            assert (row.problem, row.state) == (None, "completed")
        assert sorted(effects) == each_once("w-1", "w-2", "w-3")

    async def test_a_mended_file_is_taken_up_by_the_next_start(
        self, directory: Directory, autojump_clock: MockClock
    ) -> None:
        """S41: after repair the workflow continues, at its own time too."""
        async with directory.open() as supervisor:
            await hosted(supervisor, "w-1")
            path = Path(supervisor.describe("w-1"))
        copy = path.with_name("copy")
        shutil.copy(path, copy)
        garbage(path)
        async with directory.open() as supervisor:
            with pytest.raises(CorruptStoreError):
                await sent(supervisor, "w-1")
        shutil.copy(copy, path)
        for _ in range(2):
            async with directory.open() as supervisor:
                assert await (await supervisor.get("w-1")).get_state() is WorkflowState.SLEEPING
                assert supervisor.troubles() == {}
        async with directory.open() as supervisor:
            await sent(supervisor, "w-1")
            assert await results(supervisor, "w-1") == ["3 done"]
        assert sorted(effects) == each_once("w-1")

    async def test_a_file_that_was_taken_away_is_not_made_again(
        self, directory: Directory, autojump_clock: MockClock
    ) -> None:
        """S41: never recreated empty."""
        async with directory.open() as supervisor:
            await hosted(supervisor, "w-1", "w-2")
            path = Path(supervisor.describe("w-2"))
        elsewhere = path.with_name("elsewhere")
        os.rename(path, elsewhere)
        async with directory.open() as supervisor:
            for attempt in (sent(supervisor, "w-2"), supervisor.spawn(worker, "w-2", 3)):
                with pytest.raises(NamespaceNotFoundError, match=str(path)):
                    await attempt
            await sent(supervisor, "w-1")
            assert await results(supervisor, "w-1") == ["3 done"]
            assert not _is_there(path)
            os.rename(elsewhere, path)
            await sent(supervisor, "w-2")
            assert await results(supervisor, "w-2") == ["3 done"]
        assert sorted(effects) == each_once("w-1", "w-2")


class FailingConnection:
    """A connection whose commits fail on demand, before or after SQLite has done them."""

    def __init__(self, path: str) -> None:
        self.connection = connect_file(path)
        self.path = path
        self.commits_until_failure: int | None = None
        self.is_done_all_the_same = False

    @property
    def in_transaction(self) -> bool:
        return self.connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Any:
        if self.commits_until_failure is not None and does_commit(self.connection, sql):
            self.commits_until_failure -= 1
            if self.commits_until_failure < 0:
                self.commits_until_failure = None
                if self.is_done_all_the_same:
                    self.connection.execute(sql, parameters)
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = IOERR_FSYNC
                raise error
        return self.connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object:
        return self.connection.executemany(sql, parameters)

    def close(self) -> None:
        self.connection.close()


class TestDisks:
    """S41: a full disk, an I/O error; S21 in a supervisor."""

    async def test_a_full_disk_stops_the_workflow_and_with_room_it_continues(
        self, directory: Directory, autojump_clock: MockClock
    ) -> None:
        pages = {"small": 12}

        def connect(path: str) -> sqlite3.Connection:
            connection = connect_file(path)
            if Path(path).name.startswith("small"):
                connection.execute(f"PRAGMA max_page_count={pages['small']}").fetchall()
            return connection

        directory.connect = connect
        async with directory.open() as supervisor:
            await hosted(supervisor, "small", "other", count=30)
            await sent(supervisor, "small", "other")
            handle = await supervisor.get("small")
            assert await results(supervisor, "other") == ["30 done"], "the others go on"
            await trio.sleep(1)
            refusal = supervisor.troubles()["small"]
            assert isinstance(refusal, BatchRefusedError)
            assert supervisor.describe("small") in str(refusal)
            assert await handle.get_state() is WorkflowState.RUNNING
            with trio.move_on_after(24 * 3600) as waiting:
                await handle.result()
            assert waiting.cancelled_caught, "it is tried again and again, and not taken for a crash loop"
            pages["small"] = 1000
            assert await handle.result() == "30 done", "nobody had to ask"
            assert supervisor.troubles() == {}
        counts = sorted(effects.count(f"small/{number}") for number in range(30))
        assert counts[:-1] == [1] * 29, "only the step whose result had no room ran again"
        assert 24 * 60 <= counts[-1] <= 24 * 120 + 20, "after pauses of 30 to 60 seconds in the end"

    async def test_a_full_disk_is_survived_over_a_restart(
        self, directory: Directory, autojump_clock: MockClock
    ) -> None:
        pages = 12

        def connect(path: str) -> sqlite3.Connection:
            connection = connect_file(path)
            connection.execute(f"PRAGMA max_page_count={pages}").fetchall()
            return connection

        directory.connect = connect
        async with directory.open() as supervisor:
            await hosted(supervisor, "w-1", count=30)
            await sent(supervisor, "w-1")
            await trio.sleep(1)
            assert set(supervisor.troubles()) == {"w-1"}
        pages = 1000
        async with directory.open() as supervisor:
            await trio.sleep(1)
            row = await supervisor._store.get_row("w-1")
            assert row is not None
            assert row.state == "completed", "nobody had to ask"
        counts = sorted(effects.count(f"w-1/{number}") for number in range(30))
        assert (counts[:-1], counts[-1] > 1) == ([1] * 29, True), "only the step whose result had no room ran again"

    @pytest.mark.parametrize("is_done", [False, True])
    @pytest.mark.parametrize("number", range(7))
    @pytest.mark.parametrize("how", ["stay", "restart"])
    async def test_an_error_at_any_commit_stops_the_workflow_and_it_continues_as_if_never_stopped(
        self, tmp_path: Path, number: int, is_done: bool, how: str, autojump_clock: MockClock
    ) -> None:
        directory = Directory(tmp_path / "data", journal=False)
        connections: dict[str, FailingConnection] = {}

        def connect(path: str) -> FailingConnection:
            connection = connections[Path(path).name.split("-")[0]] = FailingConnection(path)
            return connection

        directory.connect = connect
        async with directory.open() as supervisor:
            await hosted(supervisor, "bad", "good")
            await trio.sleep(1)
            connections["bad"].is_done_all_the_same = is_done
            connections["bad"].commits_until_failure = number
            handle = await supervisor.get("bad")
            is_sent = True
            try:
                await handle.message("go", id="m-1")
            except CommitUnknownError:
                is_sent = False
            await sent(supervisor, "good")
            assert await results(supervisor, "good") == ["3 done"], "the others go on"
            await trio.sleep(0.05)
            failing = connections["bad"]
            did_fail = failing.commits_until_failure is None
            if did_fail and is_sent:
                assert isinstance(supervisor.troubles()["bad"], CommitUnknownError)
                assert supervisor.describe("bad") in str(supervisor.troubles()["bad"])
            if how == "stay":
                if not is_sent:
                    await handle.message("go", id="m-1")
                assert await handle.result() == "3 done", "it was restarted"
                assert supervisor.troubles() == {}
        if how == "restart":
            async with directory.open() as supervisor:
                await trio.sleep(1)
                handle = await supervisor.get("bad")
                if not is_sent and not is_done:
                    await handle.message("go", id="m-1")
                    await handle.result()
                assert await handle.get_state() is WorkflowState.COMPLETED, "nobody had to ask"
        assert did_fail == (number < 5), "message, taking, two steps, end"
        repeated = [effect for effect in set(effects) if effects.count(effect) > 1]
        assert set(effects) == set(each_once("bad", "good"))
        assert len(repeated) <= (0 if is_done else 1)

    @pytest.mark.parametrize("is_done", [False, True])
    @pytest.mark.parametrize("number", range(7))
    async def test_an_error_at_any_sync_of_the_journal_is_not_even_noticed(
        self,
        tmp_path: Path,
        number: int,
        is_done: bool,
        monkeypatch: pytest.MonkeyPatch,
        autojump_clock: MockClock,
    ) -> None:
        """S41: each new workflow goes on in a file of its own, and those that come later in another segment."""
        syncs = 0

        def sync_content(descriptor: int) -> None:
            nonlocal syncs
            syncs += 1
            if syncs - 1 == number and not is_done:
                raise OSError(EIO, os.strerror(EIO))
            image.sync_content(descriptor)
            if syncs - 1 == number:
                raise OSError(EIO, os.strerror(EIO))

        directory = Directory(tmp_path / "data", journal=True)
        async with directory.open() as supervisor:
            await hosted(supervisor, "w-1", "w-2")
            monkeypatch.setattr(journal, "sync_content", sync_content)
            await sent(supervisor, "w-1", "w-2")
            await supervisor.spawn(worker, "w-3", 3)
            await sent(supervisor, "w-3")
            assert await results(supervisor, "w-1", "w-2", "w-3") == ["3 done"] * 3
            assert supervisor.troubles() == {}
            assert syncs > number
        monkeypatch.undo()
        async with directory.open() as supervisor:
            assert await results(supervisor, "w-1", "w-2", "w-3") == ["3 done"] * 3
        assert sorted(effects) == each_once("w-1", "w-2", "w-3")


class FlakyCatalog(MemoryStore):
    """A store whose catalog fails while it is told to; its workflows' namespaces are well."""

    is_ill = False

    def _check(self) -> None:
        if self.is_ill:
            raise StorageError("the catalog's disk is full")

    async def put_rows(self, rows: Sequence[CatalogRow]) -> None:
        self._check()
        await super().put_rows(rows)

    async def find_due(
        self, now_ms: int, *, limit: int, since_ms: int = 0, after: str | None = None
    ) -> Sequence[CatalogRow]:
        self._check()
        return await super().find_due(now_ms, limit=limit, since_ms=since_ms, after=after)

    async def next_wake_ms(self, *, since_ms: int = 0) -> int | None:
        self._check()
        return await super().next_wake_ms(since_ms=since_ms)


class TestCatalog:
    """S41: the catalog's own disk."""

    async def test_a_catalog_that_fails_ends_no_supervisor_and_is_caught_up_with(
        self, autojump_clock: MockClock
    ) -> None:
        store = FlakyCatalog()
        clock = MovableClock()
        async with open_supervisor(store, [worker], clock=clock) as supervisor:
            await hosted(supervisor, "w-1", "w-2")
            store.is_ill = True
            with pytest.raises(StorageError, match="the catalog's disk is full"):
                await supervisor.spawn(worker, "w-3", 3)
            with pytest.raises(StorageError, match="the catalog's disk is full"):
                await sent(supervisor, "w-1")
            assert await (await supervisor.get("w-2")).get_state() is WorkflowState.SLEEPING
            await trio.sleep(300)
            store.is_ill = False
            await sent(supervisor, "w-1", "w-2")
            await supervisor.spawn(worker, "w-3", 1)
            await sent(supervisor, "w-3")
            assert await results(supervisor, "w-1", "w-2", "w-3") == ["3 done", "3 done", "1 done"]
            assert supervisor.troubles() == {}

    async def test_a_start_with_a_catalog_that_cannot_be_read_yet_recovers_later(
        self, autojump_clock: MockClock
    ) -> None:
        store = FlakyCatalog()
        clock = MovableClock()
        async with open_supervisor(store, [worker], clock=clock, grace=0) as supervisor:
            await hosted(supervisor, "w-1")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sent, supervisor, "w-1")
                await (await supervisor.get("w-1")).evict()
        store.is_ill = True
        async with open_supervisor(store, [worker], clock=clock) as supervisor:
            await trio.sleep(20)
            store.is_ill = False
            await trio.sleep(60)
            row = await store.get_row("w-1")
            assert row is not None
            assert row.state == "completed"


SECOND = """
import sys, trio
from perdure.actors import open_supervisor
from perdure.storage import StoreLockedError

async def main():
    try:
        async with open_supervisor(sys.argv[1]):
            print("opened")
    except StoreLockedError as error:
        print("locked by", error.holder_pid)
        print(error)

trio.run(main)
"""


def _start(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(PROGRAM), str(directory), "slow"], stdout=subprocess.PIPE, text=True)


class TestOwnership:
    """S42: one process owns a data directory."""

    async def test_a_second_supervisor_is_refused_with_the_holders_pid_and_the_first_goes_on(
        self, tmp_path: Path
    ) -> None:
        async with open_supervisor(tmp_path / "data", [worker]) as supervisor:
            await supervisor.spawn(worker, "w-1", 3)
            with pytest.raises(StoreLockedError, match=f"this process \\(pid {os.getpid()}\\)") as caught:
                async with open_supervisor(tmp_path / "data", [worker]):
                    raise AssertionError("it was opened")
            assert caught.value.holder_pid == os.getpid()
            other = await trio.run_process(
                [sys.executable, "-W", "error", "-c", SECOND, str(tmp_path / "data")], capture_stdout=True
            )
            lines = other.stdout.decode().splitlines()
            assert lines[0] == f"locked by {os.getpid()}"
            assert str(tmp_path / "data") in lines[1]
            await sent(supervisor, "w-1")
            assert await results(supervisor, "w-1") == ["3 done"]
        free = await trio.run_process([sys.executable, "-c", SECOND, str(tmp_path / "data")], capture_stdout=True)
        assert free.stdout == b"opened\n"

    async def test_the_lock_of_a_killed_process_does_not_block_nor_does_its_unfinished_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S42: the lock of a killed process."""
        monkeypatch.syspath_prepend(str(PROGRAM.parent))
        from program import SECONDS, waiter
        from program import worker as program_worker

        with _start(tmp_path / "data") as process:
            assert process.stdout is not None
            while process.stdout.readline() != "ready\n":
                assert process.poll() is None
            with pytest.raises(StoreLockedError) as caught:
                async with open_supervisor(tmp_path / "data", [waiter]):
                    raise AssertionError("it was opened")
            assert caught.value.holder_pid == process.pid
            process.send_signal(signal.SIGKILL)
        monkeypatch.setitem(SECONDS, "slow", 0.0)
        async with open_supervisor(tmp_path / "data", [waiter, program_worker]) as supervisor:
            handle = await supervisor.get("waiter-1")
            await handle.message("go", 1)
            assert [await handle.result(), *await results(supervisor, "worker-1")] == [1, "slow"]
