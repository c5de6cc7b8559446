"""When disks fail and files are damaged: what the SQLite driver says, what it leaves, and that the others go on."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from commits import does_commit

from perdure.storage import sqlite_file, sqlite_image
from perdure.storage.driver import AlarmChange, Batch
from perdure.storage.errors import (
    BatchRefusedError,
    CommitUnknownError,
    CorruptStoreError,
    DriverClosedError,
    NamespaceNotFoundError,
    StorageError,
    StoreBusyError,
)
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.sqlite_connection import (
    PAGE_BYTES,
    Fault,
    classify_error,
    connect_file,
    skip_checkpoint_on_close,
)

ERROR, PERM, BUSY, LOCKED, NOMEM, READONLY, IOERR, CORRUPT, FULL, CANTOPEN = 1, 3, 5, 6, 7, 8, 10, 11, 13, 14
TOOBIG, CONSTRAINT, MISMATCH, NOTADB = 18, 19, 20, 26
IOERR_FSYNC = IOERR | (4 << 8)


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(f"injected error {code}")
    error.sqlite_errorcode = code
    return error


class FaultyConnection:
    """A real connection whose statements fail on demand, before or after SQLite has run them.

    `answers` replaces what a statement returns.
    """

    def __init__(self, path: str, answers: dict[str, object] | None = None) -> None:
        self.connection = connect_file(path)
        self.faults: dict[str, tuple[BaseException, bool, bool]] = {}
        self.answers = answers or {}
        self.closed = False

    def fail(
        self, statement: str, error: BaseException | int, *, after: bool = False, if_it_commits: bool = False
    ) -> None:
        """Let statements that begin so fail: all of them, or those that make a batch durable."""
        self.faults[statement] = (sqlite_error(error) if isinstance(error, int) else error, after, if_it_commits)

    @property
    def in_transaction(self) -> bool:
        return self.connection.in_transaction

    def execute(self, sql: str, parameters=(), /):
        return self._run(sql, lambda: self.connection.execute(sql, parameters))

    def executemany(self, sql: str, parameters, /) -> object:
        return self._run(sql, lambda: self.connection.executemany(sql, parameters))

    def close(self) -> None:
        self.closed = True
        self.connection.close()

    def _run(self, sql: str, run: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        error, after, if_it_commits = next(
            (fault for text, fault in self.faults.items() if sql.startswith(text)), (None, False, False)
        )
        if if_it_commits and not does_commit(self.connection, sql):
            error = None
        if error is not None and not after:
            raise error
        if sql in self.answers:
            return self.connection.execute("SELECT ?", (self.answers[sql],))
        cursor = run()
        if error is not None:
            raise error
        return cursor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workflow.sqlite"


@pytest.fixture(params=["inline", "thread", "auto"])
def commit_in(request: pytest.FixtureRequest) -> str:
    return request.param


@asynccontextmanager
async def opened(path: Path, **options):
    driver = await SqliteDriver.open(path, **{"create": True, "commit_in": "inline", **options})
    try:
        yield driver
    finally:
        await driver.aclose()


async def faulty(path: Path, **options) -> tuple[SqliteDriver, FaultyConnection]:
    connections: list[FaultyConnection] = []

    def connect(name: str) -> FaultyConnection:
        connections.append(FaultyConnection(name))
        return connections[0]

    # At "auto" the threads of the crew commit, as somebody waits.
    driver = await SqliteDriver.open(
        path, **{"create": True, "connect": connect, "others_waiting": lambda: True, **options}
    )
    await driver.batch(Batch(puts=[(b"a", b"old"), (b"b", b"old")], alarm=AlarmChange("w", 1)))
    return driver, connections[0]


CHANGE = Batch(puts=[(b"a", b"new")], deletes=[b"b"], alarm=AlarmChange("w", 2))
OLD = ([b"a", b"b"], b"old", 1)
NEW = ([b"a"], b"new", 2)

PUTS = Batch(puts=[(b"a", b"new"), (b"b", b"new")], alarm=AlarmChange("w", 2))
FORMS = {"one statement": (PUTS, "REPLACE", ([b"a", b"b"], b"new", 2)), "statements": (CHANGE, "COMMIT", NEW)}
"""How a batch is written: one that is, with which statement that commits, and the state it makes of `OLD`."""


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> tuple[Batch, str, object]:
    return FORMS[request.param]


async def state_of(driver: SqliteDriver) -> object:
    keys = [key for key, _ in await driver.list(b"") if key in (b"a", b"b")]
    return keys, await driver.get(b"a"), await driver.get_alarm("w")


# --- refusals: nothing was written, and the driver goes on ---------------------------------------------------------------


@pytest.mark.parametrize("code", [BUSY, READONLY, CANTOPEN, FULL, IOERR, NOMEM])
async def test_an_error_of_begin_is_a_refusal(path, commit_in, code):
    """And the same batch is taken afterwards."""
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail("BEGIN", code)
    with pytest.raises(BatchRefusedError, match="nothing was written") as caught:
        await driver.batch(CHANGE)
    assert caught.value.path == str(path)
    connection.faults.clear()
    assert await state_of(driver) == OLD
    await driver.batch(CHANGE)
    assert await state_of(driver) == NEW
    await driver.aclose()


@pytest.mark.parametrize("statement", ["DELETE", "REPLACE"])
@pytest.mark.parametrize("code", [FULL, READONLY, NOMEM])
async def test_an_error_of_a_statement_is_a_refusal_once_it_was_rolled_back(path, commit_in, statement, code):
    """S41: what the batch had done before is undone."""
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail(statement, code, after=True)
    with pytest.raises(BatchRefusedError):
        await driver.batch(CHANGE)
    assert not connection.in_transaction
    connection.faults.clear()
    assert await state_of(driver) == OLD
    await driver.batch(CHANGE)
    assert await state_of(driver) == NEW
    await driver.aclose()


@pytest.mark.parametrize(
    "error",
    [
        *(ERROR, PERM, BUSY, LOCKED, READONLY, TOOBIG, CONSTRAINT, MISMATCH),
        TypeError("not bytes"),
        sqlite3.ProgrammingError("cannot bind"),
    ],
)
async def test_what_is_only_found_before_a_commit_is_a_refusal_of_the_one_statement_too(path, commit_in, error):
    """S41: nothing was written, and the same batch is taken afterwards."""
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail("REPLACE", error)
    with pytest.raises(BatchRefusedError, match="nothing was written") as caught:
        await driver.batch(PUTS)
    assert caught.value.path == str(path)
    connection.faults.clear()
    assert await state_of(driver) == OLD
    await driver.batch(PUTS)
    assert await state_of(driver) == ([b"a", b"b"], b"new", 2)
    await driver.aclose()


async def test_a_full_disk_refuses_the_one_statement_if_it_has_no_room_within_a_transaction_either(path, commit_in):
    """S41: so it was not its commit that met the full disk."""
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail("REPLACE", FULL)
    with pytest.raises(BatchRefusedError):
        await driver.batch(PUTS)
    assert not connection.in_transaction
    connection.faults.clear()
    assert await state_of(driver) == OLD
    await driver.aclose()


async def test_a_full_disk_refuses_the_batch_and_takes_it_once_there_is_room(path, form):
    """S41: a real SQLITE_FULL, which SQLite rolls back by itself or not; another workflow goes on meanwhile."""
    async with opened(path) as driver, opened(path.with_name("other.sqlite")) as other:
        await driver.batch(Batch(puts=[(b"a", b"old"), (b"b", b"old")], alarm=AlarmChange("w", 1)))
        database = driver.database()
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count={pages + 2}")
        batch, _, new = form
        large = replace(batch, puts=[*batch.puts, (b"large", os.urandom(20 * PAGE_BYTES))])
        for _ in range(3):
            with pytest.raises(BatchRefusedError, match="full") as caught:
                await driver.batch(large)
            assert caught.value.path == str(path)
            assert await state_of(driver) == OLD
            await other.set(b"key", b"1")
        await driver.set(b"small", b"fits")
        database.execute(f"PRAGMA max_page_count={pages + 100}")
        await driver.batch(large)
        assert await state_of(driver) == new
        assert database.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


async def test_a_large_batch_that_was_spilled_to_disk_is_undone_too(path, form):
    """S41: more than the cache holds, so parts of it are in the log before COMMIT."""
    async with opened(path) as driver:
        await driver.batch(Batch(puts=[(b"a", b"old"), (b"b", b"old")], alarm=AlarmChange("w", 1)))
        database = driver.database()
        database.execute("PRAGMA max_page_count=400")
        spilled = [(b"large%03d" % index, os.urandom(55 * PAGE_BYTES)) for index in range(9)]
        batch, _, new = form
        with pytest.raises(BatchRefusedError, match="full"):
            await driver.batch(replace(batch, puts=[*batch.puts, *spilled]))
        assert path.with_name(path.name + "-wal").stat().st_size > 100 * PAGE_BYTES
        assert await state_of(driver) == OLD
        await driver.batch(batch)
    async with opened(path, create=False) as again:
        assert await state_of(again) == new
        assert again.database().execute("PRAGMA integrity_check").fetchone()[0] == "ok"


# --- unknown outcomes: the driver is closed, and reading again tells ----------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("code", [IOERR_FSYNC, FULL, BUSY, READONLY, CORRUPT, 99])
async def test_any_error_of_commit_is_of_unknown_outcome(path, commit_in, code, after):
    """The connection is closed at once and never used again; reopening shows the old state or the new, whole."""
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail("COMMIT", code, after=after)
    with pytest.raises(CommitUnknownError, match="may have happened or not") as caught:
        await driver.batch(CHANGE)
    assert caught.value.path == str(path)
    assert connection.closed
    with pytest.raises(DriverClosedError, match="outcome of a commit is unknown"):
        await driver.get(b"a")
    await driver.aclose()
    async with opened(path, create=False) as again:
        assert await state_of(again) == (NEW if after else OLD)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [IOERR_FSYNC, FULL, NOMEM, CANTOPEN, 99, MemoryError("none left")])
async def test_an_error_of_the_one_statement_that_may_be_its_commits_is_of_unknown_outcome(
    path, commit_in, error, after
):
    """As one of COMMIT; a full disk is, unless the statement meets it within a transaction too."""
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail("REPLACE", error, after=after, if_it_commits=True)
    with pytest.raises(CommitUnknownError, match="may have happened or not") as caught:
        await driver.batch(PUTS)
    assert caught.value.path == str(path)
    assert connection.closed
    with pytest.raises(DriverClosedError, match="outcome of a commit is unknown"):
        await driver.get(b"a")
    await driver.aclose()
    async with opened(path, create=False) as again:
        assert await state_of(again) == (([b"a", b"b"], b"new", 2) if after else OLD)


async def test_an_io_error_of_a_statement_is_of_unknown_outcome(path, commit_in, form):
    """S41: the log may have been synced in vain."""
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail("REPLACE", IOERR)
    with pytest.raises(CommitUnknownError):
        await driver.batch(form[0])
    assert connection.closed
    async with opened(path, create=False) as again:
        assert await state_of(again) == OLD


async def test_a_failed_rollback_is_of_unknown_outcome(path, commit_in, form):
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail("REPLACE", FULL)
    connection.fail("ROLLBACK", IOERR)
    with pytest.raises(CommitUnknownError):
        await driver.batch(form[0])
    assert connection.closed
    async with opened(path, create=False) as again:
        assert await state_of(again) == OLD


async def test_an_interrupt_within_a_batch_leaves_no_transaction_open(path):
    """It comes out as what it is."""
    driver, connection = await faulty(path, commit_in="inline")
    connection.fail("REPLACE", KeyboardInterrupt(), after=True)
    with pytest.raises(KeyboardInterrupt):
        await driver.batch(CHANGE)
    connection.faults.clear()
    assert await state_of(driver) == OLD
    connection.fail("COMMIT", KeyboardInterrupt(), after=True)
    with pytest.raises(KeyboardInterrupt):
        await driver.batch(CHANGE)
    with pytest.raises(DriverClosedError):
        await driver.get(b"a")


@pytest.mark.parametrize("after", [False, True])
async def test_after_an_interrupt_within_the_one_statement_the_driver_is_closed(path, after):
    """It may have come from the commit."""
    driver, connection = await faulty(path, commit_in="inline")
    connection.fail("REPLACE", KeyboardInterrupt(), after=after)
    with pytest.raises(KeyboardInterrupt):
        await driver.batch(PUTS)
    assert connection.closed
    with pytest.raises(DriverClosedError, match="unknown"):
        await driver.get(b"a")


async def test_after_an_interrupt_while_a_full_disk_is_looked_into_the_driver_is_closed(path):
    """No transaction that was left open is used on."""
    driver, connection = await faulty(path, commit_in="inline")
    connection.fail("REPLACE", FULL)
    connection.fail("BEGIN", KeyboardInterrupt(), after=True)
    with pytest.raises(KeyboardInterrupt):
        await driver.batch(PUTS)
    assert connection.closed
    with pytest.raises(DriverClosedError, match="unknown"):
        await driver.get(b"a")


async def test_an_error_of_closing_after_a_failed_commit_changes_nothing(path, form):
    driver, connection = await faulty(path)
    batch, commit, _ = form
    connection.fail(commit, IOERR)
    real_close = connection.close

    def close() -> None:
        real_close()
        raise sqlite_error(IOERR)

    connection.close = close
    with pytest.raises(CommitUnknownError):
        await driver.batch(batch)
    async with opened(path, create=False) as again:
        assert await state_of(again) == OLD


async def test_an_error_of_closing_is_reported_and_the_file_given_up(path, commit_in):
    driver, connection = await faulty(path, commit_in=commit_in)
    real_close = connection.close

    def close() -> None:
        real_close()
        raise sqlite_error(IOERR)

    connection.close = close
    with pytest.raises(StorageError, match="cannot close") as caught:
        await driver.aclose()
    assert caught.value.path == str(path)
    await driver.aclose()
    async with opened(path, create=False) as again:
        assert await state_of(again) == OLD


# --- reading ---------------------------------------------------------------------------------------------------------


async def test_an_error_of_reading_names_the_file_and_the_driver_goes_on(path, commit_in):
    """S41: a read may be tried again."""
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail("SELECT", IOERR)
    for read in (
        lambda: driver.get(b"a"),
        lambda: driver.list(b"a"),
        lambda: driver.list(b""),
        lambda: driver.get_alarm("w"),
    ):
        with pytest.raises(StorageError, match="cannot read") as caught:
            await read()
        assert type(caught.value) is StorageError
        assert caught.value.path == str(path)
    connection.faults.clear()
    assert await state_of(driver) == OLD
    await driver.aclose()


# --- damaged files ---------------------------------------------------------------------------------------------------


def companions(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if entry.name.startswith(path.name))


def content(name: str | Path) -> bytes:
    return Path(name).read_bytes()


def move(source: str, target: Path) -> None:
    Path(source).rename(target)


async def filled(path: Path, rows: int = 500) -> bytes:
    """Make a file of many pages; its bytes."""
    async with opened(path) as driver:
        await driver.batch(Batch(puts=[(b"%05d" % index, b"x" * 200) for index in range(rows)]))
    return content(path)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda raw: b"\x5a" * len(raw),
    "text": lambda raw: b"this is not a database\n" * 200,
    "zeros": lambda raw: bytes(len(raw)),
    "empty": lambda raw: b"",
    "one byte": lambda raw: raw[:1],
    "within the header": lambda raw: raw[:50],
    "after the header": lambda raw: raw[:100],
    "within the first page": lambda raw: raw[:2000],
    "after the first page": lambda raw: raw[:PAGE_BYTES],
    "within a page": lambda raw: raw[: len(raw) - PAGE_BYTES // 2],
    "by a byte": lambda raw: raw[:-1],
    "by a page": lambda raw: raw[:-PAGE_BYTES],
    "garbage after the header": lambda raw: raw[:100] + b"\x5a" * (len(raw) - 100),
    "garbage in the table's root": lambda raw: raw[:PAGE_BYTES] + b"\x5a" * PAGE_BYTES + raw[2 * PAGE_BYTES :],
}


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_file_is_set_aside_unchanged_and_never_replaced_by_an_empty_one(path, damage, create):
    """S41: garbage, or cut short anywhere; after putting a good copy back the workflow continues."""
    good = await filled(path)
    damaged = DAMAGE[damage](good)
    path.write_bytes(damaged)
    with pytest.raises(CorruptStoreError, match="set aside") as caught:
        await SqliteDriver.open(path, create=create, commit_in="inline")
    assert caught.value.path == str(path)
    aside = caught.value.set_aside[0]
    assert aside in str(caught.value)
    assert aside.startswith(f"{path}.corrupt-")
    assert content(aside) == damaged
    assert not path.exists()
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match="put a good copy back") as again:
            await SqliteDriver.open(path, create=create, commit_in="inline")
        assert again.value.set_aside[0] == aside
    path.write_bytes(good)
    async with opened(path, create=create) as driver:
        assert len(await driver.list(b"")) == 500
        await driver.set(b"more", b"1")
    async with opened(path, create=False) as driver:
        assert await driver.get(b"more") == b"1"


async def test_removing_the_note_allows_a_fresh_start(path):
    """S41: as the error says."""
    path.write_bytes(b"garbage" * 100)
    with pytest.raises(CorruptStoreError):
        await SqliteDriver.open(path, create=True)
    note = path.with_name(path.name + ".corrupt-note")
    with pytest.raises(CorruptStoreError) as caught:
        await SqliteDriver.open(path, create=True)
    assert str(note) in str(caught.value)
    note.unlink()
    with pytest.raises(NamespaceNotFoundError):
        await SqliteDriver.open(path)
    async with opened(path) as driver:
        assert await driver.list(b"") == []


@pytest.mark.parametrize("note", [b"", b"[]", b"{}", b"\xff\xfe"])
async def test_an_unreadable_note_counts_all_the_same(path, note):
    path.with_name(path.name + ".corrupt-note").write_bytes(note)
    with pytest.raises(CorruptStoreError) as caught:
        await SqliteDriver.open(path, create=True)
    assert caught.value.set_aside == ()
    assert not path.exists()


async def test_damage_met_while_reading_sets_the_file_aside_and_others_go_on(path, commit_in):
    """S41: in the middle of a large file, where opening does not look."""
    good = await filled(path)
    middle = 10 * PAGE_BYTES
    damaged = good[:middle] + b"\x5a" * PAGE_BYTES * 5 + good[middle + 5 * PAGE_BYTES :]
    path.write_bytes(damaged)
    async with opened(path.with_name("other.sqlite")) as other, opened(path, commit_in=commit_in) as driver:
        with pytest.raises(CorruptStoreError) as caught:
            await driver.list(b"")
        assert content(caught.value.set_aside[0]) == damaged
        with pytest.raises(DriverClosedError, match="damaged"):
            await driver.get(b"00001")
        await other.set(b"key", b"1")
        assert await other.get(b"key") == b"1"
    path.write_bytes(good)
    async with opened(path, create=False) as driver:
        assert len(await driver.list(b"")) == 500


async def test_damage_met_while_writing_sets_the_file_aside(path, commit_in, form):
    """S41"""
    driver, connection = await faulty(path, commit_in=commit_in)
    connection.fail("REPLACE", CORRUPT)
    with pytest.raises(CorruptStoreError) as caught:
        await driver.batch(form[0])
    assert connection.closed
    assert not path.exists()
    aside = caught.value.set_aside
    assert [name.removeprefix(aside[0]) for name in aside] == ["", "-wal"]
    with pytest.raises(DriverClosedError):
        await driver.get(b"a")


WRITER = """
import os, sys, trio
from perdure.storage.sqlite import SqliteDriver

async def main():
    driver = await SqliteDriver.open(sys.argv[1], create=True, commit_in="inline")
    await driver.set(b"in the log", b"x" * int(sys.argv[2]))
    os.kill(os.getpid(), 9)

trio.run(main)
"""


def crash_with_a_log(path: Path, *, value_bytes: int = 8) -> bytes:
    """Let a process die whose only commit is in the write-ahead log and nowhere else; the log's bytes."""
    process = subprocess.run([sys.executable, "-c", WRITER, str(path), str(value_bytes)], check=False, timeout=60)
    assert process.returncode == -signal.SIGKILL
    return path.with_name(path.name + "-wal").read_bytes()


async def test_the_log_is_set_aside_with_its_file_unchanged_and_still_belongs_to_it(path):
    """S41: no closing checkpoints it away; SQLite's own tools find it beside the file."""
    log = crash_with_a_log(path)
    good = path.read_bytes()
    path.write_bytes(b"\x5a" * len(good))
    with pytest.raises(CorruptStoreError) as caught:
        await SqliteDriver.open(path)
    main, wal = caught.value.set_aside
    assert wal == main + "-wal"
    assert content(wal) == log
    assert companions(path) == sorted([Path(main).name, Path(wal).name, path.name + ".corrupt-note"])
    # Repair: the database as it was, with its log.
    move(main, path)
    move(wal, path.with_name(path.name + "-wal"))
    path.write_bytes(good)
    async with opened(path, create=False) as driver:
        assert await driver.get(b"in the log") == b"x" * 8


async def test_a_crash_while_setting_aside_is_made_up_for(path, monkeypatch):
    """S41: the log that stayed behind is not replayed into the repaired file."""
    log = crash_with_a_log(path)
    path.write_bytes(b"\x5a" * PAGE_BYTES)
    real_rename = os.rename

    def rename(source: str, target: str) -> None:
        if source.endswith("-wal"):
            raise KeyboardInterrupt
        real_rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(sqlite_file.os, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            await SqliteDriver.open(path, commit_in="inline")
    assert not path.exists()
    with pytest.raises(CorruptStoreError) as caught:
        await SqliteDriver.open(path, create=True)
    assert [content(name) for name in caught.value.set_aside] == [b"\x5a" * PAGE_BYTES, log]
    assert not path.with_name(path.name + "-wal").exists()


async def test_a_file_that_cannot_be_set_aside_stays_and_the_error_says_so(path, monkeypatch):
    """S41: on a disk that became read-only, say."""
    path.write_bytes(b"\x5a" * PAGE_BYTES)

    def rename(source: str, target: str) -> None:
        raise OSError(30, "Read-only file system", source)

    monkeypatch.setattr(sqlite_file.os, "rename", rename)
    with pytest.raises(CorruptStoreError, match="could not be set aside: Read-only file system") as caught:
        await SqliteDriver.open(path, commit_in="inline")
    assert caught.value.set_aside == ()
    assert path.read_bytes() == b"\x5a" * PAGE_BYTES


async def test_a_file_whose_table_is_gone_is_damaged(path):
    async with opened(path) as driver:
        driver.database().execute("DROP TABLE kv")
    with pytest.raises(CorruptStoreError, match="its table is gone"):
        await SqliteDriver.open(path)


async def test_a_file_that_only_its_log_completes_is_whole(path):
    """A crash within a checkpoint leaves the end of the file unwritten, and everything in the log."""
    crash_with_a_log(path, value_bytes=40_000)
    with path.open("ab") as file:
        file.write(bytes(PAGE_BYTES // 2))
    for _ in range(2):
        async with opened(path, create=False) as driver:
            assert await driver.get(b"in the log") == b"x" * 40_000


# --- files that cannot be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CANTOPEN, StorageError),
        (IOERR, StorageError),
        (READONLY, StorageError),
        (BUSY, StoreBusyError),
        (NOTADB, CorruptStoreError),
    ],
)
async def test_an_error_of_opening_means_what_sqlite_says(path, commit_in, error, expected):
    """S41: names the file, and the file can be opened once the trouble is over."""
    good = await filled(path)

    def connect(name: str) -> FaultyConnection:
        connection = FaultyConnection(name)
        connection.fail("PRAGMA schema_version", error)
        return connection

    with pytest.raises(StorageError) as caught:
        await SqliteDriver.open(path, commit_in=commit_in, connect=connect)
    assert type(caught.value) is expected
    assert caught.value.path == str(path)
    path.write_bytes(good)
    async with opened(path, create=False) as driver:
        assert len(await driver.list(b"")) == 500


async def test_a_connection_that_cannot_be_made_is_an_error_that_names_the_file(path):
    """S41: too many open files, say."""
    await filled(path)

    def connect(name: str) -> FaultyConnection:
        raise sqlite_error(CANTOPEN)

    with pytest.raises(StorageError, match="cannot open") as caught:
        await SqliteDriver.open(path, connect=connect)
    assert caught.value.path == str(path)
    async with opened(path, create=False) as driver:
        assert len(await driver.list(b"")) == 500


async def test_a_file_without_permission_is_an_error_that_names_it(path, monkeypatch):
    """S41: tests may run as root, for whom everything is permitted, so the answer of the system is replaced."""
    await filled(path)
    with monkeypatch.context() as patched:
        patched.setattr(sqlite_file.os, "access", lambda *arguments: False)
        with pytest.raises(StorageError, match="permissions") as caught:
            await SqliteDriver.open(path, commit_in="inline")
    assert caught.value.path == str(path)
    async with opened(path, create=False) as driver:
        assert len(await driver.list(b"")) == 500


async def test_a_directory_in_which_no_log_can_be_made_is_an_error_that_names_the_file(path):
    """S41: as in a read-only directory, SQLite cannot open its log."""
    await filled(path)
    log = path.with_name(path.name + "-wal")
    log.mkdir()
    with pytest.raises(StorageError, match="unable to open database file") as caught:
        await SqliteDriver.open(path)
    assert type(caught.value) is StorageError
    assert caught.value.path == str(path)
    log.rmdir()
    async with opened(path, create=False) as driver:
        assert len(await driver.list(b"")) == 500


async def test_a_directory_that_cannot_be_written_to_is_an_error_that_names_the_file(path, monkeypatch):
    """S41: a new file cannot be made in it."""

    def refuse(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(StorageError, match="Permission denied") as caught:
            await SqliteDriver.open(path, create=True, commit_in="inline")
    assert caught.value.path == str(path)
    async with opened(path) as driver:
        assert await driver.list(b"") == []


@pytest.mark.parametrize(
    ("statement", "answer"),
    [
        ("PRAGMA locking_mode=EXCLUSIVE", "normal"),
        ("PRAGMA journal_mode=WAL", "delete"),
        ("PRAGMA synchronous", 1),
    ],
)
async def test_a_setting_that_sqlite_does_not_take_is_an_error(path, statement, answer):
    """What durability and exclusion rest on is read back."""
    with pytest.raises(StorageError, match="did not accept") as caught:
        await SqliteDriver.open(path, create=True, connect=lambda name: FaultyConnection(name, {statement: answer}))
    assert caught.value.path == str(path)
    async with opened(path, create=False) as driver:
        assert await driver.list(b"") == []


async def test_a_file_replaced_while_it_is_opened_is_refused(path):
    await filled(path)

    def connect(name: str) -> FaultyConnection:
        connection = FaultyConnection(name)
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.rename(path)
        return connection

    with pytest.raises(StoreBusyError, match="replaced while"):
        await SqliteDriver.open(path, connect=connect)


# --- classification --------------------------------------------------------------------------------------------------


class OtherBuildError(Exception):
    """What another build of SQLite raises."""


async def test_another_builds_errors_are_classified_by_its_own_mapper(path):
    """Simulated disks bring their own SQLite."""
    faults = {"full": Fault.REFUSED, "torn": Fault.CORRUPT, "gone": Fault.UNKNOWN}
    driver, connection = await faulty(path, map_error=lambda error: faults[str(error)])
    connection.fail("REPLACE", OtherBuildError("full"))
    with pytest.raises(BatchRefusedError):
        await driver.batch(CHANGE)
    connection.faults.clear()
    assert await state_of(driver) == OLD
    connection.fail("REPLACE", OtherBuildError("gone"))
    with pytest.raises(CommitUnknownError):
        await driver.batch(CHANGE)
    driver, connection = await faulty(path, map_error=lambda error: faults[str(error)])
    connection.fail("SELECT", OtherBuildError("torn"))
    with pytest.raises(CorruptStoreError):
        await driver.get(b"a")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (sqlite_error(BUSY), Fault.BUSY),
        (sqlite_error(BUSY | (2 << 8)), Fault.BUSY),
        (sqlite_error(CORRUPT | (1 << 8)), Fault.CORRUPT),
        (sqlite_error(NOTADB), Fault.CORRUPT),
        (sqlite_error(FULL), Fault.FULL),
        (sqlite_error(NOMEM), Fault.EXHAUSTED),
        (sqlite_error(CANTOPEN), Fault.EXHAUSTED),
        (MemoryError("none left"), Fault.EXHAUSTED),
        (sqlite_error(READONLY), Fault.REFUSED),
        (sqlite_error(IOERR_FSYNC), Fault.UNKNOWN),
        (sqlite_error(250), Fault.UNKNOWN),
        (sqlite3.ProgrammingError("cannot bind"), Fault.REFUSED),
        (TypeError("not bytes"), Fault.REFUSED),
    ],
)
def test_errors_of_the_standard_librarys_sqlite_are_classified_by_their_code(error, fault):
    assert classify_error(error) is fault


class SilentlyClosed:
    """A connection whose closing does not bring its log into the file, as where that fails: SQLite does not say so then."""

    def __init__(self, connection: sqlite3.Connection, file: Path) -> None:
        self._connection = connection
        self._file = file

    def execute(self, sql: str) -> sqlite3.Cursor:
        return self._connection.execute(sql)

    def close(self) -> None:
        before = self._file.read_bytes()
        self._connection.close()
        self._file.write_bytes(before)


async def test_an_image_whose_making_failed_as_it_was_closed_is_not_one_without_a_table(path, monkeypatch):
    """S41: the disk of the temporary files is full, say; every workflow made from then on would be damaged from the start."""
    real_connect = sqlite3.connect

    def connect(file: str, **options) -> SilentlyClosed:
        return SilentlyClosed(real_connect(file, **options), Path(file))

    sqlite_image._image.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(sqlite_image.sqlite3, "connect", connect)
            sqlite_image._image()
        async with opened(path) as driver:
            await driver.set(b"key", b"1")
            assert await driver.get(b"key") == b"1"
    finally:
        sqlite_image._image.cache_clear()


# --- the order of syncs ----------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the disk, in order, by name and kind of file."""
    done: list[str] = []

    def note(owner: object, name: str, describe: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def wrapper(*arguments, **options):
            done.append(f"{name} {describe(*arguments)}".strip())
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, wrapper)

    def kind(path: str, *_: object) -> str:
        return next(
            (suffix for suffix in ("-wal", ".corrupt-note") if path.removesuffix(".new").endswith(suffix)), "file"
        )

    for module in (sqlite_image, sqlite_file):
        note(module, "write_synced", kind)
        note(module, "sync_directory", lambda *_: "")
    note(sqlite_image, "sync_descriptor", lambda *_: "")
    for name in ("link", "rename", "replace"):
        note(os, name, kind)
    return done


async def test_a_new_file_is_synced_before_it_gets_its_name_and_the_name_before_open_returns(path, disk):
    """A power cut leaves no file, or a whole one."""
    async with opened(path):
        assert disk == [
            "write_synced file",
            "sync_descriptor",
            "write_synced -wal",
            "sync_descriptor",
            "link file",
            "link -wal",
            "sync_directory",
            "sync_descriptor",
        ]


async def test_setting_aside_is_durable_step_by_step(path, disk):
    """S41: the note before the file goes, the file before its log: never an unmarked gap, nor a file without its log."""
    crash_with_a_log(path)
    path.write_bytes(b"\x5a" * PAGE_BYTES)
    with pytest.raises(CorruptStoreError):
        await SqliteDriver.open(path, commit_in="inline")
    synced = ["sync_directory", "sync_descriptor"]
    assert disk == [
        "write_synced .corrupt-note",
        "sync_descriptor",
        "replace .corrupt-note",
        *synced,
        "rename file",
        *synced,
        "rename -wal",
        *synced,
    ]


async def test_a_backup_is_synced_before_it_gets_its_name_and_the_name_before_backup_returns(path, disk, tmp_path):
    async with opened(path) as driver:
        disk.clear()
        await driver.backup(tmp_path / "copy.sqlite")
        assert disk == ["sync_descriptor", "rename file", "sync_directory", "sync_descriptor"]


def test_the_log_is_left_at_closing_where_python_can_say_so(monkeypatch):
    """`setconfig` came with Python 3.12; without it closing checkpoints, which is right too."""
    calls: list[tuple[int, bool]] = []

    class Configurable:
        def setconfig(self, option: int, value: bool) -> None:
            calls.append((option, value))

    monkeypatch.setattr(sqlite3, "SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE", 1006, raising=False)
    skip_checkpoint_on_close(Configurable())
    skip_checkpoint_on_close(object())
    assert calls == [(1006, True)]
