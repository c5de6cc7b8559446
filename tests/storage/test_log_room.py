"""Room in the write-ahead log is made ahead of what is written to it, and changes nothing but how long a commit takes."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.storage import StorageError, log_room
from perdure.storage.log_room import LogRoom
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.sqlite_connection import PAGE_BYTES, WAL_PAGES_MAX
from perdure.storage.sqlite_image import NEW_LOG_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workflow.sqlite"


@pytest.fixture
def lengthened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """From where to where logs are made longer."""
    done: list[tuple[int, int]] = []
    lengthen: Callable[[int, int, int], None] = log_room._lengthen

    def note(descriptor: int, start: int, end: int) -> None:
        done.append((start, end))
        lengthen(descriptor, start, end)

    monkeypatch.setattr(log_room, "_lengthen", note)
    return done


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncGenerator[SqliteDriver]:
    driver = await SqliteDriver.open(path, **({"create": True, "commit_in": "inline"} | options))
    try:
        yield driver
    finally:
        await driver.aclose()


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


async def test_a_new_file_has_room_for_the_commits_of_a_short_workflow(path, lengthened):
    """A commit makes its log no longer, which would have to be synced too."""
    async with opened(path) as driver:
        assert log_of(path).stat().st_size == NEW_LOG_BYTES
        for number in range(12):
            await driver.set(b"key", b"%d" % number)
        assert log_of(path).stat().st_size == NEW_LOG_BYTES
        assert not lengthened
        assert await driver.get(b"key") == b"11"


async def test_at_normal_where_commits_sync_nothing_no_room_is_made(path, lengthened):
    async with opened(path, durability="normal") as driver:
        for number in range(40):
            await driver.set(b"key", b"%d" % number)
        assert log_of(path).stat().st_size == 32 + 40 * (PAGE_BYTES + 24)
    assert not lengthened


async def test_a_log_that_proves_too_short_is_made_longer_up_to_its_bound(path, lengthened):
    """So that room is made a few times in all, however many commits come."""
    async with opened(path) as driver:
        for number in range(2_000):
            await driver.set(b"key", b"%d" % number)
        assert log_of(path).stat().st_size <= WAL_PAGES_MAX * (PAGE_BYTES + 24) + 32
    ends = [end for _, end in lengthened]
    assert ends[-1] == WAL_PAGES_MAX * PAGE_BYTES
    assert len(ends) <= 4
    assert all(end >= 4 * start or end == ends[-1] for start, end in lengthened)


async def test_a_file_that_is_opened_again_gets_room_once_it_is_at_work(path, lengthened):
    """One message, of two commits or so, is not worth it."""
    async with opened(path):
        pass
    assert not log_of(path).exists()
    async with opened(path) as driver:
        for number in range(7):
            await driver.set(b"key", b"%d" % number)
        assert not lengthened
        await driver.set(b"key", b"7")
        assert [end for _, end in lengthened] == [131_968]
        assert log_of(path).stat().st_size == 131_968


@pytest.mark.parametrize("commits", [0, 1, 15, 16, 17, 60, 600])
async def test_killed_with_room_left_all_that_was_written_is_there(path, tmp_path, commits):
    """Whoever opens the file next reads the log up to where the room begins: here, and with SQLite alone."""
    left = tmp_path / "left"
    left.mkdir()
    async with opened(path) as driver:
        for number in range(commits):
            await driver.set(b"key%d" % (number % 5), b"%d" % number)
        expected = await driver.list(b"")
        for file in (path, log_of(path)):
            shutil.copy(file, left)
    copy = left / path.name
    connection = sqlite3.connect(shutil.copytree(left, tmp_path / "alone") / path.name)
    assert connection.execute("SELECT key, value FROM kv ORDER BY key").fetchall() == expected
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    async with opened(copy, create=False) as driver:
        assert await driver.list(b"") == expected


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
async def test_without_room_to_be_had_commits_go_on_and_what_was_made_of_it_is_given_back(path, monkeypatch, error):
    """A disk that is nearly full, say: what is left of it is for what is written."""
    tried: list[int] = []
    pwrite = os.pwrite

    def fail(descriptor: int, data: bytes, at: int) -> int:
        if tried:
            raise error
        tried.append(at)
        return pwrite(descriptor, data[:1000], at)

    monkeypatch.setattr(log_room.os, "pwrite", fail)
    async with opened(path) as driver:
        for number in range(60):
            await driver.set(b"key", b"%d" % number)
        assert await driver.get(b"key") == b"59"
        assert log_of(path).stat().st_size == 32 + 60 * (PAGE_BYTES + 24)
    assert len(tried) == 1, "it is not tried with every commit"


async def test_on_a_disk_that_is_nearly_full_no_room_is_taken(path, monkeypatch, lengthened):
    """S41: other workflows need what is left."""
    written: list[int] = []
    monkeypatch.setattr(log_room.os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=4096))
    monkeypatch.setattr(log_room.os, "pwrite", lambda *arguments: written.append(len(arguments)))
    async with opened(path) as driver:
        for number in range(60):
            await driver.set(b"key", b"%d" % number)
    assert len(lengthened) == 1
    assert not written


async def test_a_new_file_is_made_without_a_log_where_there_is_no_space_for_one(path, monkeypatch):
    """It is a help and nothing else."""
    write = os.write

    def no_space(descriptor: int, data: bytes) -> int:
        if len(data) >= NEW_LOG_BYTES:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", no_space)
    async with opened(path) as driver:
        await driver.set(b"key", b"1")
        assert log_of(path).stat().st_size == 32 + PAGE_BYTES + 24
        assert not [entry for entry in path.parent.iterdir() if ".new-" in entry.name]


async def test_a_log_of_zeros_that_a_power_cut_left_without_its_file_is_in_nobodys_way(path):
    """The names of both are made durable together, so one may be lost; a log that was written to is another matter."""
    log_of(path).write_bytes(bytes(NEW_LOG_BYTES))
    async with opened(path) as driver:
        await driver.set(b"key", b"1")
    async with opened(path, create=False) as driver:
        assert await driver.get(b"key") == b"1"
    path.unlink()
    log_of(path).write_bytes(b"\x37\x7f\x06\x82" + bytes(60))
    with pytest.raises(StorageError, match="without its database"):
        await SqliteDriver.open(path, create=True, commit_in="inline")


async def test_the_log_at_the_path_of_a_file_that_was_moved_away_is_left_alone(path, tmp_path, lengthened):
    """A data directory that was replaced while a process still has it: what lies there now is of somebody else."""
    away = tmp_path / "away"
    here = tmp_path / "here"
    here.mkdir()
    async with opened(here / path.name) as driver:
        here.rename(away)
        here.mkdir()
        async with opened(here / path.name) as other:
            for _ in range(20):
                await other.set(b"key", b"other")
            before = log_of(here / path.name).read_bytes()
            lengthened.clear()
            for number in range(60):
                await driver.set(b"key", b"%d" % number)
            assert not lengthened
            assert log_of(here / path.name).read_bytes() == before
        assert await driver.get(b"key") == b"59"


async def test_the_log_of_another_opener_is_never_replaced(path, monkeypatch):
    """One who opened the file between its naming and the naming of its log writes to a log of its own."""
    link = os.link
    other: list[sqlite3.Connection] = []

    def link_and_open(source: str, target: str) -> None:
        link(source, target)
        if target.endswith(".sqlite"):
            connection = sqlite3.connect(target, isolation_level=None)
            connection.execute("REPLACE INTO kv VALUES (x'01', x'02')")
            other.append(connection)

    monkeypatch.setattr(os, "link", link_and_open)
    async with opened(path, connect=lambda name: other.pop() if other else sqlite3.connect(name)) as driver:
        assert await driver.get(b"\x01") == b"\x02"
        assert log_of(path).stat().st_size == 32 + PAGE_BYTES + 24


def test_a_log_that_is_gone_is_not_looked_for_again(tmp_path):
    room = LogRoom(str(tmp_path / "none"), (0, 0), is_wanted=True)
    for _ in range(20):
        room.note_commit()
    assert not any(tmp_path.iterdir())
