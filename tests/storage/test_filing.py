"""Files of young workflows: whole, durable, several with one sync of their directory, and each failure its own."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.storage import filing as filing_module
from perdure.storage.errors import StorageError
from perdure.storage.filing import Filing, NotWrittenError
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.sqlite_connection import PAGE_BYTES
from perdure.storage.sqlite_image import APPLICATION_ID, FILE_FORMAT, filled_image, sync_directory, write_whole

PAIRS = [(b"key", b"value"), (b"other", b"")]


@pytest.fixture(params=["inline", "thread"])
def filing(request: pytest.FixtureRequest, tmp_path: Path) -> Filing:
    return Filing(str(tmp_path), trio.CapacityLimiter(4), is_inline=request.param == "inline")


@pytest.fixture
def in_threads(tmp_path: Path) -> Filing:
    return Filing(str(tmp_path), trio.CapacityLimiter(4), is_inline=False)


class Disk:
    """What is asked of the disk for files, by name.

    Attributes:
        written: The files that were written, in order.
        syncs: How often the directory was synced.
        fail: Raises what an operation on a file, or on the directory, is to fail with, if anything.
        gate: While it is set to an event, writing waits for that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[str] = []
        self.syncs = 0
        self.fail: Callable[[str], None] = lambda _: None
        self.gate: threading.Event | None = None

        def write(path: str, data: bytes) -> None:
            if (gate := self.gate) is not None:
                assert gate.wait(10)
            self.fail(os.path.basename(path))
            write_whole(path, data)
            self.written.append(os.path.basename(path))

        def sync(path: str) -> None:
            self.fail("directory")
            self.syncs += 1
            sync_directory(path)

        monkeypatch.setattr(filing_module, "write_whole", write)
        monkeypatch.setattr(filing_module, "sync_directory", sync)

    def fail_for(self, *names: str, error: int = errno.ENOSPC) -> None:
        """Let what is asked of these fail, and nothing else."""

        def fail(name: str) -> None:
            if name in names:
                raise OSError(error, os.strerror(error))

        self.fail = fail


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def pairs_in(path: Path) -> list[tuple[bytes, bytes]]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return connection.execute("SELECT key, value FROM kv ORDER BY key").fetchall()


# --- the image -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "value_bytes"), [(0, 0), (1, 0), (1, 10), (1, 5000), (30, 40), (2000, 20), (100, 40_000), (5, 976 * 1024)]
)
async def test_an_image_opened_by_the_driver_holds_exactly_its_pairs(tmp_path, count, value_bytes):
    """From nothing to several MiB; and the driver can go on with it."""
    pairs = [(b"%05d" % number, bytes([number % 256]) * value_bytes) for number in range(count)]
    path = tmp_path / "workflow.sqlite"
    path.write_bytes(filled_image(pairs))
    driver = await SqliteDriver.open(path, commit_in="inline")
    assert await driver.list(b"") == pairs
    await driver.set(b"more", b"1")
    await driver.delete(b"00000")
    await driver.aclose()
    assert pairs_in(path) == [*pairs[1:], (b"more", b"1")]


async def test_an_image_is_ours_and_in_wal_mode(tmp_path):
    """As a file that the driver makes: the format of a young workflow's file is no other."""
    made, filled = tmp_path / "made.sqlite", tmp_path / "filled.sqlite"
    filled.write_bytes(filled_image([]))
    await (await SqliteDriver.open(made, create=True, commit_in="inline")).aclose()
    settings = ("application_id", "user_version", "journal_mode", "page_size", "auto_vacuum", "encoding")
    found: list[list[Any]] = []
    for path in (made, filled):
        with closing(sqlite3.connect(path)) as connection:
            values = [connection.execute(f"PRAGMA {setting}").fetchone()[0] for setting in settings]
            found.append([*values, connection.execute("SELECT * FROM sqlite_schema").fetchall()])
    assert found[0] == found[1]
    assert found[1][:4] == [APPLICATION_ID, FILE_FORMAT, "wal", PAGE_BYTES]


@given(st.dictionaries(st.binary(max_size=40), st.binary(max_size=3000), max_size=40))
@settings(max_examples=100)
def test_whatever_the_pairs_an_image_is_whole_and_lists_them_in_order(pairs):
    """In whichever order they are given."""
    with TemporaryDirectory() as directory:
        path = Path(directory, "workflow.sqlite")
        path.write_bytes(filled_image(pairs.items()))
        assert pairs_in(path) == sorted(pairs.items())


# --- files -----------------------------------------------------------------------------------------------------------


async def test_a_file_is_written_whole_and_its_name_is_durable_on_return(tmp_path, filing, disk):
    await filing.write(str(tmp_path / "a"), PAIRS)
    assert (disk.written, disk.syncs) == (["a"], 1)
    assert pairs_in(tmp_path / "a") == PAIRS
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


async def test_those_who_come_meanwhile_are_written_together_with_one_sync_of_the_directory(tmp_path, in_threads, disk):
    """Twenty-one files, two syncs; cancellation interrupts none of them."""
    disk.gate = threading.Event()
    async with trio.open_nursery() as nursery:
        for number in range(21):
            nursery.start_soon(in_threads.write, str(tmp_path / str(number)), [(b"number", b"%d" % number)])
            if number == 0:
                await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        disk.gate.set()
    assert disk.syncs == 2
    assert disk.written[0] == "0"
    assert sorted(disk.written, key=int) == [str(number) for number in range(21)]
    for number in range(21):
        assert pairs_in(tmp_path / str(number)) == [(b"number", b"%d" % number)]


async def write_each(filing: Filing, directory: Path, names: str, **options: Any) -> dict[str, StorageError | None]:
    """Write several files at once; what came of each."""
    outcomes: dict[str, StorageError | None] = {}

    async def write(name: str) -> None:
        outcomes[name] = None
        try:
            await filing.write(str(directory / name), PAIRS, **options)
        except StorageError as error:
            outcomes[name] = error

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(write, name)
    return outcomes


async def test_a_file_that_cannot_be_written_fails_for_whom_it_was_written_alone(tmp_path, filing, disk):
    """S41: and is not there, nor anything of it."""
    disk.fail_for("b", "d")
    outcomes = await write_each(filing, tmp_path, "abcde")
    for name, error in outcomes.items():
        if name in "bd":
            assert error is not None
            assert "No space left" in str(error)
            assert error.path == str(tmp_path / name)
        else:
            assert error is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "e"]


async def test_a_namespace_that_no_image_can_be_made_of_fails_alone(tmp_path, filing, monkeypatch):
    """Out of memory, for one."""

    def image(pairs: Any) -> bytes:
        if dict(pairs) == {b"large": b""}:
            raise MemoryError
        return filled_image(pairs)

    monkeypatch.setattr(filing_module, "filled_image", image)
    with pytest.raises(StorageError, match="cannot write"):
        await filing.write(str(tmp_path / "a"), [(b"large", b"")])
    await filing.write(str(tmp_path / "b"), PAIRS)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


async def test_a_failed_sync_of_the_directory_fails_all_and_trying_again_writes_them_anew(tmp_path, filing, disk):
    """S41: the files are there, but their names may not be durable, of which another sync says nothing."""
    disk.fail_for("directory", error=errno.EIO)
    outcomes = await write_each(filing, tmp_path, "abc")
    assert all(error is not None and "Input/output error" in str(error) for error in outcomes.values())
    disk.fail_for()
    assert await write_each(filing, tmp_path, "abc", is_tried=True) == {"a": None, "b": None, "c": None}
    assert sorted(disk.written) == [*"aabbcc"]
    assert disk.syncs >= 1
    assert pairs_in(tmp_path / "a") == PAIRS


async def test_what_was_tried_and_is_not_there_is_written(tmp_path, filing, disk):
    disk.fail_for("a")
    with pytest.raises(StorageError, match="No space"):
        await filing.write(str(tmp_path / "a"), PAIRS)
    disk.fail_for()
    await filing.write(str(tmp_path / "a"), PAIRS, is_tried=True)
    assert pairs_in(tmp_path / "a") == PAIRS


async def test_nothing_that_is_there_is_replaced(tmp_path, filing):
    """Not even a link that leads nowhere."""
    (tmp_path / "a").write_bytes(b"somebody's")
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    for name in "ab":
        with pytest.raises(StorageError, match="File exists") as caught:
            await filing.write(str(tmp_path / name), PAIRS)
        assert caught.value.path == str(tmp_path / name)
        with pytest.raises(StorageError, match="exists already"):
            await filing.copy(str(tmp_path / name), PAIRS)
    assert (tmp_path / "a").read_bytes() == b"somebody's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


async def test_without_a_thread_to_be_had_those_who_wait_are_told_and_the_next_may_have_one(
    tmp_path, in_threads, monkeypatch
):
    def no_thread(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(trio.lowlevel, "start_thread_soon", no_thread)
        with pytest.raises(StorageError, match="new thread"):
            await in_threads.write(str(tmp_path / "a"), PAIRS)
    await in_threads.write(str(tmp_path / "a"), PAIRS, is_tried=True)
    assert pairs_in(tmp_path / "a") == PAIRS


async def test_running_out_of_descriptors_is_said(tmp_path, filing, disk):
    """Nothing is wrong with the file."""
    disk.fail_for("a", error=errno.EMFILE)
    with pytest.raises(NotWrittenError, match="ulimit"):
        await filing.write(str(tmp_path / "a"), PAIRS)


async def test_a_copy_goes_anywhere_and_is_durable(tmp_path, filing, disk, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    await filing.copy("copy.sqlite", PAIRS)
    assert pairs_in(elsewhere / "copy.sqlite") == PAIRS
    assert disk.syncs == 1
    with pytest.raises(StorageError, match="cannot write"):
        await filing.copy(str(tmp_path / "missing" / "copy.sqlite"), PAIRS)
