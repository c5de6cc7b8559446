"""Out of file descriptors: it is said, nothing is judged by it, and nothing is left of it once there are some again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.storage.errors import CorruptStoreError
from perdure.storage.sqlite import SqliteDriver

PRELUDE = """
import json, os, resource, sys, trio
from contextlib import contextmanager
from pathlib import Path
from perdure.storage import sqlite_image
from perdure.storage.errors import CorruptStoreError, StorageError
from perdure.storage.file_store import FileStore
from perdure.storage.sqlite import SqliteDriver

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

@contextmanager
def only(left):
    # As if a new process began here: nothing is cached.
    sqlite_image._image.cache_clear()
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    for _ in range(left):
        os.close(taken.pop())
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)

def say(*fields):
    print(json.dumps(fields), flush=True)

path = sys.argv[1]
"""

ENOUGH = 8
"""Descriptors with which anything here can be opened."""


def run(code: str, path: Path) -> list[list[object]]:
    """What the code said, one list per line, in a process of its own with few descriptors and `path` as an argument."""
    temporary = path.parent / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + code + "\ntrio.run(main)", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(temporary.iterdir()) == []
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_exhausted(kind: object, text: object) -> None:
    assert kind == "OutOfDescriptorsError"
    assert isinstance(text, str)
    assert "has run out of file descriptors" in text
    assert "each live workflow takes two" in text
    assert "`ulimit -n`" in text
    assert "fewer workflows live" in text


def failures(said: list[list[object]]) -> list[object]:
    """The numbers of descriptors that were too few, of lines `[number, kind, text]` or `[number, "fine"]`."""
    failed: list[object] = []
    for number, kind, *text in said:
        if kind != "fine":
            assert_exhausted(kind, *text)
            failed.append(number)
    return failed


@pytest.mark.parametrize("commit_in", ["inline", "thread"])
def test_a_new_file_is_made_or_nothing_is_wrong_with_it(tmp_path, commit_in):
    """S41: whichever descriptor is the one too many, no file counts as damaged, and the same name can be used later."""
    said = run(
        f"""
async def main():
    for left in range({ENOUGH} + 1):
        name = f"{{path}}-{{left}}"
        async def use():
            driver = await SqliteDriver.open(name, create=True, commit_in={commit_in!r})
            try:
                await driver.set(b"key", b"value")
                return await driver.get(b"key")
            finally:
                await driver.aclose()
        # Worker threads take no descriptors.
        with only(left):
            try:
                await use()
                say(left, "fine")
            except StorageError as error:
                say(left, type(error).__name__, str(error))
        assert await use() == b"value"
""",
        tmp_path / "workflow.sqlite",
    )
    failed = failures(said)
    assert {0, 1} <= set(failed) < set(range(ENOUGH))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "temporary",
        *(f"workflow.sqlite-{left}" for left in range(ENOUGH + 1)),
    ]


async def test_a_file_with_a_log_keeps_both(tmp_path):
    """S41: what only the log holds is there once the file can be opened."""
    path = tmp_path / "crashed.sqlite"
    driver = await SqliteDriver.open(tmp_path / "source.sqlite", create=True, commit_in="inline")
    await driver.set(b"key", b"in the log")
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{driver.path}{suffix}", f"{path}{suffix}")
    await driver.aclose()
    said = run(
        """
async def main():
    for left in (0, 1):
        with only(left):
            try:
                await SqliteDriver.open(path, commit_in="inline")
            except StorageError as error:
                say(left, type(error).__name__, str(error))
    with only(2):
        driver = await SqliteDriver.open(path, commit_in="inline")
        say((await driver.get(b"key")).decode())
        await driver.aclose()
""",
        path,
    )
    assert failures(said[:2]) == [0, 1]
    assert said[2:] == [["in the log"]]


def test_a_damaged_file_stays_until_it_can_be_set_aside(tmp_path):
    """S41: half of setting aside would be worse than none."""
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(b"garbage" * 100)
    said = run(
        """
async def main():
    for left in (0, 1):
        with only(left):
            try:
                await SqliteDriver.open(path, commit_in="inline")
            except StorageError as error:
                failed = error
        say(left, type(failed).__name__, str(failed), os.listdir(os.path.dirname(path)))
    try:
        await SqliteDriver.open(path, commit_in="inline")
    except CorruptStoreError as error:
        say(error.set_aside)
""",
        path,
    )
    assert len(said) == 3
    for _, kind, text, names in said[:2]:
        assert_exhausted(kind, text)
        assert set(names) == {"damaged.sqlite", "temporary"}
    [[moved]] = said[2]
    assert Path(moved).read_bytes() == b"garbage" * 100


def test_a_store_marks_no_workflow_and_leaves_no_file(tmp_path):
    """S41: the rows of workflows that could not be opened have no problem, and each file is some workflow's."""
    said = run(
        f"""
async def main():
    store = FileStore(path)
    await store.acquire()
    await (await store.open_driver("old", create=True)).aclose()
    for left in range({ENOUGH} + 1):
        for id in ("old", f"new-{{left}}"):
            with only(left):
                try:
                    driver = await store.open_driver(id, create=True)
                    await driver.aclose()
                    say(left, "fine")
                except StorageError as error:
                    say(left, type(error).__name__, str(error))
        assert store._files is not None
        assert (await store._files.find("old")).problem is None
        say(left, "fine", len(os.listdir(os.path.join(path, "workflows"))))
        await (await store.open_driver(f"new-{{left}}", create=True)).aclose()
    await store.aclose()
""",
        tmp_path / "data",
    )
    assert {0, 1} <= set(failures(said)) < set(range(ENOUGH))
    made = {number: count for number, kind, *rest in said for count in rest if kind == "fine"}
    too_few = set(failures(said[1::3]))
    assert made == {left: 1 + left + (left not in too_few) for left in range(ENOUGH + 1)}


@pytest.mark.parametrize("commit_in", ["inline", "thread"])
def test_a_new_workflow_keeps_what_was_acknowledged_and_gets_its_file_later(tmp_path, commit_in):
    """S41: whichever descriptor is the one too many, when it is made, written to, or given its file."""
    said = run(
        f"""
from perdure.storage.store import CatalogRow

async def main():
    acknowledged = {{}}

    async def use(left):
        driver, _ = await store.create_driver(CatalogRow(f"new-{{left}}", "order", "pending", 0, False, 1, 1))
        acknowledged[left] = None
        try:
            await driver.set(b"key", b"value")
            acknowledged[left] = "value"
        finally:
            await driver.aclose()

    async def found(left):
        driver = await store.open_driver(f"new-{{left}}")
        value = await driver.get(b"key")
        await driver.aclose()
        return value and value.decode()

    for is_first in (True, False):
        store = FileStore(path + str(is_first), commit_in={commit_in!r})
        await store.acquire()
        if not is_first:
            await use("old")  # so there is a segment of the journal
        for left in range({ENOUGH} + 1):
            with only(left):
                try:
                    await use(left)
                    say(left, "fine")
                except StorageError as error:
                    say(left, type(error).__name__, str(error))
        for left, value in acknowledged.items():
            assert await found(left) == value
        await store.aclose()
        assert os.listdir(os.path.join(path + str(is_first), "journal")) == []
        store = FileStore(path + str(is_first), commit_in={commit_in!r})
        await store.acquire()
        for left, value in acknowledged.items():
            assert await found(left) == value
        await store.aclose()
        acknowledged.clear()
""",
        tmp_path / "data",
    )
    assert len(said) == 2 * (ENOUGH + 1)
    for part in (said[: ENOUGH + 1], said[ENOUGH + 1 :]):
        assert 0 in failures(part)
        assert ENOUGH not in failures(part)


def test_a_rebuild_fails_as_a_whole_and_succeeds_later(tmp_path):
    """S41, S42: no workflow gets a problem because descriptors were short while the catalog was read again."""
    said = run(
        """
from perdure.storage.catalog import Catalog

async def main():
    store = FileStore(path)
    await store.acquire()
    for id in "abc":
        driver = await store.open_driver(id, create=True)
        await driver.set(b"key", b"value")
        await driver.aclose()
    expected = [(row.workflow_id, row.problem) for row in await store.list_rows()]
    await store.aclose()
    async def again():
        store = FileStore(path)
        await store.acquire()
        try:
            return [(row.workflow_id, row.problem) for row in await store.list_rows()]
        finally:
            await store.aclose()
    os.unlink(os.path.join(path, "catalog.sqlite"))
    whole = await again()
    say(whole)
    for left in range(13):
        # A session that the lock file does not name: the catalog is not trusted, and the old one is asked.
        Path(path, "lock").write_text("{}")
        with only(left):
            try:
                say(left, "fine", await again() == whole)
            except StorageError as error:
                say(left, type(error).__name__, str(error))
        assert await again() == whole
""",
        tmp_path / "data",
    )
    [whole] = said[0]
    assert len(whole) == 3
    failed = failures(said[1:])
    assert {0, 1, 2} <= set(failed) < set(range(12))
    assert all(rest == [True] for _, kind, *rest in said[1:] if kind == "fine")


async def test_a_spoilt_note_still_leads_to_the_file(tmp_path):
    """S41: an error about a file that was set aside earlier names that file, not the note."""
    path = tmp_path / "workflow.sqlite"
    path.write_bytes(b"garbage" * 100)
    with pytest.raises(CorruptStoreError) as first:
        await SqliteDriver.open(path, commit_in="inline")
    [moved] = first.value.set_aside
    note = path.with_name(path.name + ".corrupt-note")
    for text in (note.read_bytes(), b"", b"[]", b"\xff"):
        note.write_bytes(text)
        with pytest.raises(CorruptStoreError) as later:
            await SqliteDriver.open(path, commit_in="inline")
        assert f"set aside as {moved};" in str(later.value)
        assert later.value.set_aside == (moved,)


async def test_a_note_holds_in_a_directory_that_was_moved(tmp_path):
    """S41: the file that was set aside is looked for beside its note."""
    (tmp_path / "before").mkdir()
    path = tmp_path / "before" / "workflow.sqlite"
    path.write_bytes(b"garbage" * 100)
    with pytest.raises(CorruptStoreError) as first:
        await SqliteDriver.open(path, commit_in="inline")
    (tmp_path / "before").rename(tmp_path / "after")
    moved = tmp_path / "after" / Path(first.value.set_aside[0]).name
    with pytest.raises(CorruptStoreError) as later:
        await SqliteDriver.open(tmp_path / "after" / path.name, commit_in="inline")
    assert f"set aside as {moved};" in str(later.value)
    assert later.value.set_aside == (str(moved),)
