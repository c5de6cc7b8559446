"""The SQLite driver: its file, its one opener, where its work runs, and how it ends."""

import itertools
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from commits import does_commit

from perdure.storage import crew, sqlite, sqlite_file, sqlite_image
from perdure.storage.driver import VALUE_BYTES_MAX, AlarmChange, Batch
from perdure.storage.errors import (
    BatchRefusedError,
    DriverClosedError,
    FormatVersionError,
    NamespaceNotFoundError,
    StorageError,
    StoreBusyError,
    ValueTooLargeError,
)
from perdure.storage.layout import ALARM_KEY
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.sqlite_connection import PAGE_BYTES, WAL_PAGES_MAX, connect_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workflow.sqlite"


@asynccontextmanager
async def opened(path, **options):
    driver = await SqliteDriver.open(path, **{"create": True, "commit_in": "inline", **options})
    try:
        yield driver
    finally:
        await driver.aclose()


@contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run some code in another process, killed at the end at the latest; `print` answers and `input()` waits."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            # Its whole session: a fork of it may be left.
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


HOLDER = """
import sys, trio
from perdure.storage.sqlite import SqliteDriver

async def main():
    driver = await SqliteDriver.open(sys.argv[1], create=True)
    await driver.set(b"key", b"held")
    print("holding", flush=True)
    input()
    await driver.aclose()

trio.run(main)
"""

OPENER = """
import sys, trio
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.errors import StorageError

async def main():
    try:
        driver = await SqliteDriver.open(sys.argv[1])
    except StorageError as error:
        print(type(error).__name__)
    else:
        print(await driver.get(b"key"))
        await driver.aclose()

trio.run(main)
"""


def open_elsewhere(path: Path) -> str:
    with python(OPENER, path) as process:
        answer, _ = process.communicate(timeout=60)
    return answer.strip()


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("durability", "synchronous"), [("full", 2), ("normal", 1)])
async def test_the_connection_is_what_durability_and_exclusion_rest_on(path, durability, synchronous):
    async with opened(path, durability=durability) as driver:
        database = driver.database()
        settings = {
            name: database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "locking_mode", "synchronous", "page_size", "wal_autocheckpoint")
        }
        assert settings == {
            "journal_mode": "wal",
            "locking_mode": "exclusive",
            "synchronous": synchronous,
            "page_size": PAGE_BYTES,
            "wal_autocheckpoint": WAL_PAGES_MAX,
        }
        assert driver.durability == durability


async def test_a_new_file_is_complete_when_open_returns(path):
    """The table is in the file itself, not in a log beside it."""
    async with opened(path):
        raw = path.read_bytes()
        assert len(raw) == 2 * PAGE_BYTES
        assert raw.startswith(b"SQLite format 3\x00")
        assert raw[68:72] == b"PDUR"
        assert b"CREATE TABLE kv" in raw
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["workflow.sqlite"]


@pytest.mark.parametrize("step", ["open", "write", "sync_descriptor", "link", "sync_directory"])
async def test_a_file_whose_making_failed_anywhere_is_missing_or_whole(path, monkeypatch, step):
    """And making it again succeeds."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    owner = sqlite_image if step.startswith("sync") else sqlite_image.os
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, fail)
        with pytest.raises(StorageError, match="No space left on device") as caught:
            await SqliteDriver.open(path, create=True, commit_in="inline")
        assert caught.value.path == str(path)
    left = sorted(entry.name for entry in path.parent.iterdir())
    assert left in ([], ["workflow.sqlite", "workflow.sqlite-wal"])  # never a log without its file
    async with opened(path) as driver:
        assert await driver.list(b"") == []


async def test_what_a_crash_leaves_of_making_a_file_harms_nothing(path):
    """Half an image under its temporary name."""
    path.with_name(f"{path.name}.new-1-1").write_bytes(b"SQLite for")
    async with opened(path) as driver:
        await driver.set(b"key", b"1")
        assert await driver.list(b"") == [(b"key", b"1")]


async def test_a_file_system_without_links_gets_its_file_too(path, monkeypatch):
    def no_links(*arguments: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(sqlite_image.os, "link", no_links)
    async with opened(path) as driver:
        assert await driver.list(b"") == []


async def test_two_openers_that_both_make_the_file_end_up_with_one(path):
    """The second is refused, and nothing is replaced under the first."""
    outcomes: list[object] = []

    async def make() -> None:
        try:
            outcomes.append(await SqliteDriver.open(path, create=True, commit_in="thread"))
        except StoreBusyError as error:
            outcomes.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(make)
    (driver,) = [outcome for outcome in outcomes if isinstance(outcome, SqliteDriver)]
    assert len(outcomes) == 8
    await driver.set(b"key", b"1")
    await driver.aclose()
    async with opened(path) as again:
        assert await again.get(b"key") == b"1"


async def test_a_missing_file_is_not_found_and_not_made(path):
    with pytest.raises(NamespaceNotFoundError, match="create=True") as caught:
        await SqliteDriver.open(path)
    assert caught.value.path == str(path)
    assert caught.value.workflow_id == ""
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("create", [True, False])
async def test_a_missing_directory_is_an_error_that_names_the_file(tmp_path, create):
    """S41: and it is told apart from a missing file."""
    path = tmp_path / "missing" / "workflow.sqlite"
    with pytest.raises(StorageError, match="no directory") as caught:
        await SqliteDriver.open(path, create=create)
    assert type(caught.value) is StorageError
    assert caught.value.path == str(path)


async def test_a_directory_in_place_of_the_file_is_an_error(path):
    """S41"""
    path.mkdir()
    with pytest.raises(StorageError, match="not a regular file"):
        await SqliteDriver.open(path, create=True)


async def test_a_log_without_its_database_is_not_replayed_into_a_new_one(path):
    """A deletion that a crash cut short leaves one."""
    log = path.with_name(path.name + "-wal")
    log.write_bytes(b"left over")
    with pytest.raises(StorageError, match="without its database"):
        await SqliteDriver.open(path, create=True)
    assert log.read_bytes() == b"left over"
    assert not path.exists()


async def test_a_newer_file_is_refused_and_left_as_it_is(path):
    async with opened(path) as driver:
        driver.database().execute("PRAGMA user_version=2")
    before = path.read_bytes()
    with pytest.raises(FormatVersionError, match="upgrade") as caught:
        await SqliteDriver.open(path)
    assert (caught.value.found, caught.value.supported, caught.value.path) == (2, 1, str(path))
    assert path.read_bytes() == before


async def test_another_programs_database_is_refused_and_left_as_it_is(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE kv (key, value)")
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(StorageError, match="another program"):
        await SqliteDriver.open(path, create=True)
    assert path.read_bytes() == before


async def test_odd_file_names_are_just_names(tmp_path, monkeypatch):
    """Nothing in a name means anything to SQLite."""
    monkeypatch.chdir(tmp_path)
    for name in (":memory:", "file:x?mode=memory", "a b#c%20d", "ü", "-"):
        async with opened(name) as driver:
            await driver.set(b"key", name.encode())
        async with opened(tmp_path / name, create=False) as driver:
            assert await driver.get(b"key") == name.encode()


async def test_the_log_stays_bounded(path):
    """About 2 MiB, however much is written, and after one batch that is larger too."""
    async with opened(path, durability="normal") as driver:
        log = path.with_name(path.name + "-wal")
        for index in range(300):
            await driver.batch(Batch(puts=[(b"%03d" % (index % 10), os.urandom(50_000))]))
        assert log.stat().st_size < 2 * WAL_PAGES_MAX * PAGE_BYTES
        await driver.batch(Batch(puts=[(b"%03d" % index, bytes(900_000)) for index in range(10)]))
        for index in range(100):
            await driver.batch(Batch(puts=[(b"%03d" % (index % 10), os.urandom(50_000))]))
        assert log.stat().st_size < 2 * WAL_PAGES_MAX * PAGE_BYTES


async def test_a_driver_may_allow_larger_values(path):
    async with opened(path, value_bytes_max=2 * VALUE_BYTES_MAX) as driver:
        await driver.set(b"key", bytes(2 * VALUE_BYTES_MAX))
        assert len(await driver.get(b"key") or b"") == 2 * VALUE_BYTES_MAX
        with pytest.raises(ValueTooLargeError) as caught:
            await driver.set(b"key", bytes(2 * VALUE_BYTES_MAX + 1))
        assert caught.value.path == str(path)
    with pytest.raises(ValueError, match="at least 1"):
        await SqliteDriver.open(path, value_bytes_max=0)


# --- one opener ------------------------------------------------------------------------------------------------------


async def test_a_second_opening_in_this_process_is_refused_by_any_name(path, tmp_path):
    """S42: and does not cost the first one its lock on the file."""
    symbolic, hard = tmp_path / "symbolic", tmp_path / "hard"
    async with opened(path) as driver:
        symbolic.symlink_to(path)
        hard.hardlink_to(path)
        for name in (path, symbolic, hard):
            with pytest.raises(StoreBusyError, match="already open in this process") as caught:
                await SqliteDriver.open(name)
            assert caught.value.path == str(name)
        await driver.set(b"key", b"1")
        assert open_elsewhere(path) == "StoreBusyError"
    async with opened(symbolic, create=False) as driver:
        assert await driver.get(b"key") == b"1"


def what_lies_at(name: str) -> tuple[Path, set[str]]:
    """Where a file really lies, and the names of all files there."""
    real = Path(name).resolve()
    return real, {entry.name for entry in real.parent.iterdir() if entry.is_file()}


@pytest.mark.parametrize(
    "name", ["workflow.sqlite", "link/workflow.sqlite", "link/../workflow.sqlite", "{}/link/../far.sqlite"]
)
async def test_a_file_is_made_and_found_by_any_path_that_leads_to_it(tmp_path, monkeypatch, name):
    """Relative, through a linked directory, or up from one: its log lies beside it, and the next opening finds both."""
    there = tmp_path / "far" / "away"
    there.mkdir(parents=True)
    here = tmp_path / "here"
    here.mkdir()
    (here / "link").symlink_to(there)
    monkeypatch.chdir(here)
    name = name.format(here)
    async with opened(name) as driver:
        await driver.set(b"key", b"1")
        real, files = what_lies_at(name)
        assert files == {real.name, f"{real.name}-wal"}
    async with opened(real, create=False) as driver:
        assert await driver.get(b"key") == b"1"


async def test_a_file_that_another_process_holds_is_refused_until_that_one_is_gone(path):
    """S42: the lock of a killed process does not block, and what it had committed is there."""
    with python(HOLDER, path) as process:
        assert process.stdout.readline() == "holding\n"
        before = path.read_bytes(), path.with_name(path.name + "-wal").read_bytes()
        with pytest.raises(StoreBusyError, match="another process") as caught:
            await SqliteDriver.open(path)
        assert caught.value.path == str(path)
        assert (path.read_bytes(), path.with_name(path.name + "-wal").read_bytes()) == before
        process.kill()
        process.wait()
    async with opened(path, create=False) as driver:
        assert await driver.get(b"key") == b"held"


async def test_the_file_is_locked_from_opening_to_closing(path):
    """S42: before the first write already, and free afterwards."""
    async with opened(path, create=True) as driver:
        assert open_elsewhere(path) == "StoreBusyError"
        await driver.set(b"key", b"1")
        assert open_elsewhere(path) == "StoreBusyError"
    assert open_elsewhere(path) == "b'1'"


FORKER = """
import os, sys, trio
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.errors import DriverClosedError, StoreBusyError

async def in_child(driver):
    for use in (lambda: driver.get(b"key"), lambda: driver.set(b"key", b"child")):
        try:
            await use()
        except DriverClosedError as error:
            assert "fork" in str(error), error
        else:
            raise AssertionError("the parent's driver worked in a fork")
    try:
        await SqliteDriver.open(driver.path, commit_in="inline")
    except StoreBusyError:
        pass
    else:
        raise AssertionError("a fork opened its parent's file")
    await driver.aclose()

async def before():
    driver = await SqliteDriver.open(sys.argv[1], create=True, commit_in="inline")
    await driver.set(b"key", b"before")
    return driver

# Trio's own event loop is not to be forked, so each process runs one of its own after the fork.
driver = trio.run(before)
pid = os.fork()
if pid == 0:
    trio.run(in_child, driver)
    # Ends as a whole interpreter does, finalising everything, and not with os._exit.
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
trio.run(driver.set, b"key", b"after")
assert os.path.getsize(driver.path + "-wal") > 0
os.kill(os.getpid(), 9)
"""


async def test_a_fork_cannot_use_nor_harm_its_parents_file(path):
    """S42: not even by ending."""
    with python(FORKER, path) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    async with opened(path, create=False) as driver:
        assert await driver.get(b"key") == b"after"


# --- where work runs -------------------------------------------------------------------------------------------------


class Spy:
    """A connection that notes in which thread it is used, and can be made slow."""

    def __init__(self, path: str) -> None:
        self.connection = connect_file(path)
        self.threads: list[int] = []
        self.commits_in: list[int] = []
        self.hold: threading.Event | None = None
        self.holding = threading.Event()

    @property
    def in_transaction(self) -> bool:
        return self.connection.in_transaction

    def execute(self, sql: str, parameters=(), /):
        self.threads.append(threading.get_ident())
        if does_commit(self.connection, sql):
            self.commits_in.append(threading.get_ident())
            if self.hold is not None:
                self.holding.set()
                self.hold.wait()
        return self.connection.execute(sql, parameters)

    def executemany(self, sql: str, parameters, /) -> object:
        return self.connection.executemany(sql, parameters)

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.connection.close()


async def spied(path: Path, **options) -> tuple[SqliteDriver, Spy]:
    spies: list[Spy] = []

    def connect(name: str) -> Spy:
        spies.append(Spy(name))
        return spies[0]

    driver = await SqliteDriver.open(path, create=True, connect=connect, **options)
    spies[0].threads.clear()
    return driver, spies[0]


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation seems to take no time, however slow the disk under the tests is."""
    monkeypatch.setattr(sqlite, "perf_counter", lambda: 0.0)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation seems to take ten milliseconds."""
    ticks = itertools.count()
    monkeypatch.setattr(sqlite, "perf_counter", lambda: next(ticks) * 0.01)


async def use(driver: SqliteDriver, spy: Spy) -> bool:
    """Whether reading and writing stayed on this thread; it must be the same for both."""
    spy.threads.clear()
    await driver.batch(Batch(puts=[(b"key", b"1")]))
    await driver.get(b"key")
    here = {thread == threading.get_ident() for thread in spy.threads}
    assert len(here) == 1
    return here.pop()


@pytest.mark.parametrize(
    ("options", "in_place"),
    [
        ({"commit_in": "inline"}, True),
        ({"commit_in": "thread"}, False),
        ({"commit_in": "thread", "durability": "normal"}, False),
        ({"commit_in": "auto"}, True),
        ({"commit_in": "auto", "durability": "normal", "others_waiting": lambda: True}, True),
    ],
)
async def test_work_runs_where_it_was_told_to(path, quick_disk, options, in_place):
    driver, spy = await spied(path, **options)
    assert await use(driver, spy) is in_place
    await driver.aclose()


FORMS = {
    "one statement": Batch(puts=[(b"key", b"new"), (b"more", b"")]),
    "statements": Batch(puts=[(b"key", b"new"), (b"more", b"")], deletes=[b"less"]),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """How a small batch is written."""
    return request.param


async def test_auto_commits_in_a_thread_while_somebody_would_wait(path, quick_disk, form):
    """What syncs the disk does: statements before COMMIT take some microseconds."""
    waiting = True
    driver, spy = await spied(path, others_waiting=lambda: waiting)
    await driver.batch(FORMS[form])
    assert len(spy.commits_in) == 1
    assert threading.get_ident() not in spy.commits_in
    assert (threading.get_ident() in spy.threads) is (form == "statements")
    waiting = False
    assert await use(driver, spy)
    await driver.aclose()


@pytest.mark.parametrize(
    "batch",
    [
        Batch(puts=[(bytes([number]), b"") for number in range(100)]),
        Batch(puts=[(b"key", bytes(100_000))]),
        Batch(delete_prefixes=[b"k"]),
        Batch(delete_ranges=[(b"a", b"k")]),
    ],
    ids=["rows", "bytes", "prefix", "range"],
)
async def test_a_batch_whose_statements_may_take_long_is_in_a_thread_as_a_whole(path, batch):
    driver, spy = await spied(path, others_waiting=lambda: True)
    await driver.batch(batch)
    assert len(spy.commits_in) == 1
    assert threading.get_ident() not in spy.threads
    await driver.aclose()


async def test_a_new_file_is_made_in_a_thread_and_then_opened_in_place(path):
    """Making it syncs the disk; what opening reads was just written."""
    made_in: list[int] = []
    create = sqlite_file.create_file

    def make(*names: str, has_log: bool) -> bool:
        made_in.append(threading.get_ident())
        return create(*names, has_log=has_log)

    opened_in: list[int] = []

    def connect(name: str) -> sqlite3.Connection:
        opened_in.append(threading.get_ident())
        return connect_file(name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sqlite_file, "create_file", make)
        for _ in range(2):
            driver = await SqliteDriver.open(path, create=True, connect=connect)
            await driver.aclose()
    here = threading.get_ident()
    assert len(made_in) == 1
    assert here not in made_in
    assert [each == here for each in opened_in] == [True, False]


async def test_a_file_that_somebody_else_made_meanwhile_is_looked_at_as_any_other(path, monkeypatch):
    """Only of a file that was made here it is known what is in it."""
    create = sqlite_file.create_file

    def be_late(*names: str, has_log: bool) -> bool:
        sqlite3.connect(path).execute("CREATE TABLE t (x)").connection.close()
        return create(*names, has_log=has_log)

    monkeypatch.setattr(sqlite_file, "create_file", be_late)
    with pytest.raises(StorageError, match="another program"):
        await SqliteDriver.open(path, create=True)


ROW = (b"key", b"")
ALARM = AlarmChange("w", 1)


@pytest.mark.parametrize("durability", ["full", "normal"])
@pytest.mark.parametrize(
    ("batch", "statements"),
    [
        (Batch(puts=[ROW]), 1),
        (Batch(puts=[(b"%d" % number, b"") for number in range(12)]), 1),
        (Batch(puts=[(b"%d" % number, b"") for number in range(11)], alarm=ALARM), 1),
        (Batch(alarm=ALARM), 1),
        (Batch(puts=[(b"%d" % number, b"") for number in range(12)], alarm=ALARM), 4),
        (Batch(puts=[ROW], alarm=AlarmChange("w", None)), 4),
        (Batch(puts=[ROW], deletes=[b"a"]), 4),
        (Batch(puts=[ROW], delete_prefixes=[b"a"]), 4),
        (Batch(), 2),
    ],
)
async def test_a_batch_that_only_puts_some_rows_is_one_statement(path, durability, batch, statements):
    """Any other is a transaction of several; either way all of it is there, and the connection is in none afterwards."""
    driver, spy = await spied(path, commit_in="inline", durability=durability)
    await driver.batch(batch)
    assert len(spy.threads) == statements
    assert len(spy.commits_in) == 1
    assert not spy.in_transaction
    found = [key for key, _ in await driver.list(b"") if key != ALARM_KEY]
    assert found == sorted(key for key, _ in batch.puts)
    assert await driver.get_alarm("w") == (1 if batch.alarm == ALARM else None)
    await driver.aclose()


async def test_killed_before_commit_nothing_of_a_batch_is_there(path, tmp_path, form):
    """While a thread is about to commit, what was done of the batch is nothing to whoever opens the file next."""
    driver, spy = await spied(path, others_waiting=lambda: True)
    await driver.set(b"key", b"old")
    spy.hold = threading.Event()
    left = tmp_path / "left"
    left.mkdir()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.batch, FORMS[form])
        await trio.to_thread.run_sync(spy.holding.wait)
        for file in path.parent.glob(path.name + "*"):
            shutil.copy(file, left)
        spy.hold.set()
    assert await driver.list(b"") == [(b"key", b"new"), (b"more", b"")]
    await driver.aclose()
    async with opened(left / path.name, create=False) as found:
        assert await found.list(b"") == [(b"key", b"old")]


async def test_without_a_thread_to_commit_in_nothing_is_written(path, monkeypatch, form):
    """A driver is given up whose transaction was begun: no later batch may become part of it. Else it goes on."""
    driver, _ = await spied(path, others_waiting=lambda: True)

    async def no_thread(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(crew.Crew, "run", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            await driver.batch(FORMS[form])
    if form == "statements":
        with pytest.raises(DriverClosedError):
            await driver.set(b"second", b"2")
    else:
        await driver.set(b"second", b"2")
    await driver.aclose()
    async with opened(path, create=False) as found:
        assert await found.list(b"") == ([] if form == "statements" else [(b"second", b"2")])


async def test_auto_leaves_trios_thread_once_commits_are_slow_and_returns(path, slow_disk, monkeypatch):
    driver, spy = await spied(path, others_waiting=lambda: False)
    for _ in range(3):
        await driver.set(b"key", b"1")
    spy.commits_in.clear()
    await driver.set(b"key", b"2")
    assert len(spy.commits_in) == 1
    assert threading.get_ident() not in spy.commits_in
    monkeypatch.setattr(sqlite, "perf_counter", lambda: 0.0)
    for _ in range(20):
        await driver.set(b"key", b"3")
    assert spy.threads[-1] == threading.get_ident()
    await driver.aclose()


async def test_inline_never_takes_a_thread(path, tmp_path, monkeypatch):
    """As virtual time needs, from opening to closing."""

    def no_threads(*arguments: object, **options: object) -> None:
        raise AssertionError("a thread was asked for")

    monkeypatch.setattr(trio.to_thread, "run_sync", no_threads)
    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", no_threads)
    async with opened(path, others_waiting=lambda: True) as driver:
        await driver.batch(Batch(puts=[(b"key", b"1")], alarm=AlarmChange("w", 1)))
        await driver.backup(tmp_path / "copy.sqlite")
        assert await driver.get_alarm("w") == 1


async def test_threads_come_from_the_limiter_that_was_given(path):
    limiter = trio.CapacityLimiter(1)
    driver, spy = await spied(path, commit_in="thread", limiter=limiter)
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.set, b"key", b"1")
        await trio.to_thread.run_sync(spy.holding.wait)
        assert limiter.borrowed_tokens == 1
        spy.hold.set()
    assert limiter.borrowed_tokens == 0
    await driver.aclose()


async def test_a_commit_that_began_is_carried_through_whatever_is_cancelled(path):
    """Its outcome is always learned."""
    driver, spy = await spied(path, commit_in="thread")
    spy.hold = threading.Event()
    outcome: list[str] = []

    async def commit() -> None:
        await driver.set(b"key", b"1")
        outcome.append("returned")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(commit)
        await trio.to_thread.run_sync(spy.holding.wait)
        nursery.cancel_scope.cancel()
        spy.hold.set()
    assert outcome == ["returned"]
    assert await driver.get(b"key") == b"1"
    await driver.aclose()


async def test_waiting_for_another_operation_can_be_cancelled(path):
    """Nothing was begun, so nothing is written."""
    driver, spy = await spied(path, commit_in="auto", others_waiting=lambda: True)
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.set, b"first", b"1")
        await trio.to_thread.run_sync(spy.holding.wait)
        with trio.CancelScope() as scope:
            scope.cancel()
            await driver.set(b"second", b"2")
        assert scope.cancelled_caught
        spy.hold.set()
    assert await driver.list(b"") == [(b"first", b"1")]
    await driver.aclose()


async def test_operations_on_one_driver_take_turns_in_order(path):
    driver, spy = await spied(path, commit_in="thread")
    spy.hold = threading.Event()
    seen: list[object] = []

    async def read() -> None:
        seen.append(await driver.get(b"key"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.set, b"key", b"1")
        await trio.to_thread.run_sync(spy.holding.wait)
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(StorageError, match="in use"):
            driver.database()
        spy.hold.set()
    assert seen == [b"1"]
    await driver.aclose()


# --- inspection and backup -------------------------------------------------------------------------------------------


async def test_database_is_a_sqlite_utils_view_of_the_same_connection(path):
    async with opened(path) as driver:
        await driver.batch(Batch(puts=[(b"a", b"1"), (b"b", b"2")]))
        database = driver.database()
        assert database.table_names() == ["kv"]
        assert list(database["kv"].rows) == [{"key": b"a", "value": b"1"}, {"key": b"b", "value": b"2"}]
        assert "WITHOUT ROWID" in database.schema
    with pytest.raises(DriverClosedError):
        driver.database()


async def test_database_needs_the_standard_librarys_connection(path):
    driver, _ = await spied(path, commit_in="inline")
    with pytest.raises(StorageError, match="has a Spy"):
        driver.database()
    await driver.aclose()


def test_importing_the_driver_does_not_import_sqlite_utils():
    code = "import sys, perdure.storage.sqlite; print('sqlite_utils' in sys.modules)"
    with python(code) as process:
        assert process.communicate(timeout=60) == ("False\n", "")


@pytest.mark.parametrize("commit_in", ["inline", "thread"])
async def test_a_backup_is_a_whole_namespace_of_its_own(path, tmp_path, commit_in):
    copy = tmp_path / "copy.sqlite"
    async with opened(path, commit_in=commit_in) as driver:
        await driver.batch(Batch(puts=[(b"%03d" % index, b"x" * 500) for index in range(200)]))
        await driver.set_alarm("w", 7)
        expected = await driver.list(b"")
        await driver.backup(copy)
        await driver.set(b"later", b"1")
        async with opened(copy, create=False) as restored:
            assert await restored.list(b"") == expected
            assert await restored.get_alarm("w") == 7
            await restored.set(b"copy", b"2")
        assert await driver.get(b"copy") is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["copy.sqlite", "workflow.sqlite"]


async def test_a_backup_replaces_nothing_and_leaves_nothing_half_made(path, tmp_path):
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(b"precious")
    async with opened(path) as driver:
        with pytest.raises(StorageError, match="exists already") as caught:
            await driver.backup(copy)
        assert caught.value.path == str(copy)
        assert copy.read_bytes() == b"precious"
        with pytest.raises(StorageError, match="cannot copy"):
            await driver.backup(tmp_path / "missing" / "copy.sqlite")
        await driver.set(b"key", b"1")
        assert await driver.get(b"key") == b"1"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["copy.sqlite", "workflow.sqlite"]


# --- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit_in", ["inline", "thread"])
async def test_closing_leaves_one_file_with_everything_in_it(path, commit_in):
    """At "normal" too, what was written is durable once the driver is closed."""
    async with opened(path, commit_in=commit_in, durability="normal") as driver:
        await driver.set(b"key", b"1")
        assert path.with_name(path.name + "-wal").exists()
        assert repr(driver) == f"<SqliteDriver {str(path)!r} open>"
    assert repr(driver) == f"<SqliteDriver {str(path)!r} closed>"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert b"key1" in path.read_bytes()


async def test_the_log_can_be_left_for_the_next_opening(path):
    """What it holds is durable; whether it is left depends on the version of Python."""
    async with opened(path, checkpoint_on_close=False) as driver:
        await driver.set(b"key", b"1")
    assert path.with_name(path.name + "-wal").exists() is (sys.version_info >= (3, 12))
    async with opened(path, create=False) as driver:
        assert await driver.get(b"key") == b"1"


async def test_closing_is_not_interrupted_and_may_be_asked_for_by_many(path):
    driver, spy = await spied(path, commit_in="thread")
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.set, b"key", b"1")
        await trio.to_thread.run_sync(spy.holding.wait)
        for _ in range(3):
            nursery.start_soon(driver.aclose)
        nursery.cancel_scope.cancel()
        spy.hold.set()
    assert repr(driver).endswith("closed>")
    async with opened(path, create=False) as again:
        assert await again.get(b"key") == b"1"


async def test_an_operation_that_waited_for_its_turn_finds_the_driver_closed(path):
    driver, spy = await spied(path, commit_in="thread")
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.set, b"key", b"1")
        await trio.to_thread.run_sync(spy.holding.wait)
        nursery.start_soon(driver.aclose)
        await trio.testing.wait_all_tasks_blocked()

        async def late() -> None:
            with pytest.raises(DriverClosedError, match="it was closed"):
                await driver.set(b"late", b"1")

        nursery.start_soon(late)
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()


async def test_an_abandoned_driver_is_reported_and_its_file_is_free_again(path):
    driver = await SqliteDriver.open(path, create=True, commit_in="inline")
    await driver.set(b"key", b"1")
    with pytest.warns(ResourceWarning, match="was not closed"):
        del driver
    async with opened(path, create=False) as again:
        assert await again.get(b"key") == b"1"


async def test_a_batch_of_the_wrong_types_is_refused_and_changes_nothing(path):
    async with opened(path) as driver:
        batch = Batch(puts=[(b"a", b"1"), (b"b", ("not", "bytes"))])  # type: ignore[list-item]
        with pytest.raises(BatchRefusedError, match="nothing was written"):
            await driver.batch(batch)
        assert await driver.list(b"") == []
        await driver.set(b"a", b"1")
        assert await driver.list(b"") == [(b"a", b"1")]


async def test_a_new_file_has_the_permissions_of_any_new_file(path):
    umask = os.umask(0o027)
    try:
        async with opened(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(umask)


async def test_a_closed_driver_says_so_also_where_it_would_not_have_written_at_once(path: Path) -> None:
    """S38: whatever its disk's pace, on which it depends whether a batch can be applied without waiting."""
    driver, _ = await spied(path, commit_in="thread")
    assert not driver.batch_nowait(Batch(puts=[(b"key", b"1")]))
    await driver.aclose()
    with pytest.raises(DriverClosedError):
        driver.batch_nowait(Batch(puts=[(b"key", b"1")]))


async def test_an_opener_that_finds_the_file_made_meanwhile_is_refused_as_the_second(path, monkeypatch):
    """Its log is there too by then, which is not one that was left behind."""
    first: list[SqliteDriver] = []
    exists = sqlite_image.os.path.isdir

    def make_meanwhile(name: str) -> bool:  # between the look for the file and its making
        monkeypatch.setattr(sqlite_image.os.path, "isdir", exists)
        first.append(trio.run(partial(SqliteDriver.open, path, create=True)))
        return exists(name)

    monkeypatch.setattr(sqlite_image.os.path, "isdir", make_meanwhile)
    with pytest.raises(StoreBusyError):
        await SqliteDriver.open(path, create=True, commit_in="thread")
    (driver,) = first
    await driver.aclose()


@pytest.mark.parametrize("commit_in", ["inline", "thread"])
async def test_whether_there_is_anything_under_a_prefix_is_known_without_reading_it(path, commit_in):
    driver = await SqliteDriver.open(path, create=True, commit_in=commit_in)
    assert not await driver.has_any(b"")
    await driver.set(b"\x15\x21\x14", bytes(500_000))
    assert await driver.has_any(b"")
    assert await driver.has_any(b"\x15\x21")
    assert not await driver.has_any(b"\x15\x22")
    assert not await driver.has_any(b"\xff\xff")
    await driver.aclose()
    with pytest.raises(DriverClosedError):
        await driver.has_any(b"")
