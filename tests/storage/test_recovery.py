"""Which catalog is trusted, and how one that is lost, stale or damaged is read again from the workflow files."""
# ruff: noqa: ASYNC240 - these tests look at the disk between two awaits

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from file_stores import damage, opened, read, row, spawn

from perdure.storage.catalog import Meta
from perdure.storage.errors import CorruptStoreError, NamespaceNotFoundError, StorageError
from perdure.storage.file_store import FileStore
from perdure.storage.recovery import is_trusted
from perdure.storage.store import CatalogRow


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("meta", "session", "boot_id", "trusted"),
    [
        (Meta(4, "a", clean=True), 4, "a", True),
        (Meta(4, "a", clean=True), 4, "b", True),
        (Meta(4, None, clean=True), 4, None, True),
        (Meta(4, "a", clean=False), 4, "a", True),
        (Meta(4, "a", clean=False), 4, "b", False),
        (Meta(4, "a", clean=False), 4, None, False),
        (Meta(4, None, clean=False), 4, "a", False),
        (Meta(4, None, clean=False), 4, None, False),
        (Meta(3, "a", clean=True), 4, "a", False),
        (Meta(5, "a", clean=True), 4, "a", False),
        (Meta(4, "a", clean=True), None, "a", False),
        (None, 4, "a", False),
        (None, None, None, False),
    ],
)
def test_only_what_can_have_lost_nothing_is_trusted(
    meta: Meta | None, session: int | None, boot_id: str | None, trusted: bool
) -> None:
    """S50: closed in good order or the same start of the machine, and the catalog of the last owner."""
    assert is_trusted(meta, session=session, boot_id=boot_id) is trusted


WORKFLOWS: dict[str, dict[str, Any]] = {
    "active": {"state": "running"},
    "asleep": {"state": "sleeping", "alarm": 77},
    "called": {"state": "sleeping", "alarm": 77, "mail": True},
    "waiting": {"state": "sleeping"},
    "ended": {"state": "completed"},
    "nul\0 ü/..": {"state": "running"},
}


async def fill(store: FileStore) -> list[CatalogRow]:
    rows = [await spawn(store, workflow_id, **options) for workflow_id, options in WORKFLOWS.items()]
    rows[2] = replace(rows[2], next_wake_ms=0)
    return sorted(rows, key=lambda row: row.workflow_id)


def lose(data: Path) -> None:
    (data / "catalog.sqlite").unlink()


def truncate(data: Path) -> None:
    os.truncate(data / "catalog.sqlite", 1_500)


def spoil(data: Path) -> None:
    damage(data / "catalog.sqlite", "garbage")


def empty(data: Path) -> None:
    damage(data / "catalog.sqlite", "empty")


def forget_session(data: Path) -> None:
    (data / "lock").unlink()


def change_schema(data: Path) -> None:
    connection = sqlite3.connect(data / "catalog.sqlite")
    connection.execute("DROP INDEX workflows_due")
    connection.close()


@pytest.mark.parametrize("harm", [lose, truncate, spoil, empty, forget_session, change_schema])
async def test_a_lost_catalog_is_read_again_from_the_files(data: Path, harm: Callable[[Path], None]) -> None:
    """S50: every workflow is there, and due when it has to be."""
    async with opened(data) as store:
        expected = await fill(store)
    harm(data)
    for _ in range(2):
        async with opened(data) as store:
            found = await store.list_rows()
            # When it was made is in the file; when it changed last is what the file's time says.
            assert [replace(each, updated_at_ms=2_000) for each in found] == expected
            for workflow_id in WORKFLOWS:
                assert await read(store, workflow_id) == workflow_id.encode()
        assert sorted(name.name for name in data.iterdir()) == [
            "catalog.sqlite",
            "format",
            "journal",
            "lock",
            "workflows",
        ]


async def test_an_older_catalog_put_back_is_not_believed(data: Path) -> None:
    """S50: it was closed in good order, and yet it is not the last one."""
    async with opened(data) as store:
        await spawn(store, "order-1")
    shutil.copy(data / "catalog.sqlite", data.parent / "older")
    async with opened(data) as store:
        await spawn(store, "order-2")
        await store.delete("order-1")
    shutil.copy(data.parent / "older", data / "catalog.sqlite")
    async with opened(data) as store:
        assert [found.workflow_id for found in await store.list_rows()] == ["order-2"]


@pytest.mark.parametrize(
    ("before", "after", "rebuilt"), [("a", "a", False), ("a", "b", True), (None, None, True), ("a", None, True)]
)
async def test_after_a_power_cut_the_catalog_is_read_again(
    data: Path, before: str | None, after: str | None, rebuilt: bool
) -> None:
    """S50: not closed, and the machine was started since; when only the process died, nothing is lost."""
    copy = data.parent / "copy"
    async with opened(data, before) as store:
        await spawn(store, "order-1")
        await store.put_rows([row("order-1", state="of the catalog only")])
        shutil.copytree(data, copy)
    async with opened(copy, after) as store:
        found = await store.get_row("order-1")
        assert found is not None
        assert found.state == ("running" if rebuilt else "of the catalog only")
        # When it was made is in no file; a catalog that cannot be trusted for more is good enough for that.
        assert found.created_at_ms == 1_000
    async with opened(data, "another boot") as store:
        found = await store.get_row("order-1")
        assert found is not None
        assert found.state == "of the catalog only"


async def test_a_catalog_damaged_while_in_use_is_read_again_at_the_next_start(data: Path) -> None:
    """S50: even if this process is killed before it closes."""
    copy = data.parent / "copy"
    async with opened(data) as store:
        await spawn(store, "order-1")
        catalog = store._access().catalog
        catalog.checkpoint()
        damage_after_header(data / "catalog.sqlite")
        catalog._connection.execute("PRAGMA shrink_memory")
        with pytest.raises(CorruptStoreError, match="reopen the store"):
            await store.list_rows()
        shutil.copytree(data, copy)
    for directory in (data, copy):
        async with opened(directory) as store:
            assert [found.workflow_id for found in await store.list_rows()] == ["order-1"]


def damage_after_header(path: Path) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(1_024)
        file.write(b"\xff" * (size - 1_024))


@pytest.mark.parametrize("known", [True, False])
async def test_a_damaged_file_has_a_row_after_a_rebuild_too(data: Path, known: bool) -> None:
    """S41, S50: under its id while the old catalog knows it, else under its file's name, until the file is mended."""
    async with opened(data) as store:
        await spawn(store, "order-1", state="sleeping", alarm=70)
        await spawn(store, "order-2")
        path = store.path_of("order-1")
    good = damage(path, "garbage")
    (data / "lock").unlink() if known else (data / "catalog.sqlite").unlink()
    name = "order-1" if known else "?" + Path(path).name
    for _ in range(2):
        async with opened(data) as store:
            assert {found.workflow_id for found in await store.list_rows()} == {name, "order-2"}
            sick = await store.get_row(name)
            assert sick is not None
            assert sick.problem is not None
            assert sick.problem.startswith("storage: ")
            assert path in sick.problem
            assert await read(store, "order-2") == b"order-2"
            with pytest.raises(CorruptStoreError, match="put a good copy back"):
                await store.open_driver(name)
        (data / "catalog.sqlite").unlink()  # The second time, only the set-aside copy tells.
        name = "?" + Path(path).name
    async with opened(data) as store:
        for create in (False, True):
            with pytest.raises(CorruptStoreError):
                await store.open_driver("order-1", create=create)
        assert {found.workflow_id for found in await store.list_rows()} == {"order-1", "order-2"}
        Path(path).write_bytes(good)
        assert await read(store, "order-1") == b"order-1"
        well = await store.get_row("order-1")
        assert well is not None
        assert (well.workflow_type, well.state, well.next_wake_ms, well.problem) == ("order", "sleeping", 70, None)


@pytest.mark.parametrize("how", ["at the start", "under the file's name", "deleted"])
async def test_a_file_of_an_unknown_workflow_gets_its_id_back(data: Path, how: str) -> None:
    """S41: three ways out of a row whose workflow was not known."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        path = store.path_of("order-1")
    good = damage(path, "garbage")
    (data / "catalog.sqlite").unlink()
    unknown = "?" + Path(path).name
    async with opened(data) as store:
        if how == "deleted":
            await store.delete(unknown)
            assert os.listdir(data / "workflows") == []
            await spawn(store, "order-1")
        elif how == "under the file's name":
            Path(path).write_bytes(good)
            with pytest.raises(NamespaceNotFoundError, match="'order-1'"):
                await store.open_driver(unknown)
    Path(path).write_bytes(good) if how == "at the start" else None
    async with opened(data) as store:
        assert [found.workflow_id for found in await store.list_rows()] == ["order-1"]
        assert await read(store, "order-1") == b"order-1"
        assert await store.get_row(unknown) is None


async def test_foreign_files_among_the_workflows_do_no_harm(data: Path) -> None:
    """S50: what names no workflow, or another one than its file's name, is kept as a problem; the rest is left alone."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        await spawn(store, "order-2")
        driver = await store.open_driver("nameless", create=True)
        await driver.set(b"key", b"from elsewhere")
        await driver.aclose()
        nameless = store.path_of("nameless")
        first, second = store.path_of("order-1"), store.path_of("order-2")
    shutil.copy(first, second)
    (data / "workflows" / "README").write_text("ours?")
    (data / "catalog.sqlite").unlink()
    async with opened(data) as store:
        problems = {found.workflow_id: found.problem or "" for found in await store.list_rows()}
        assert set(problems) == {"order-1", "?" + Path(second).name, "?" + Path(nameless).name}
        assert problems["order-1"] == ""
        assert "does not belong" in problems["?" + Path(second).name]
        assert "names no workflow" in problems["?" + Path(nameless).name]
        with pytest.raises(StorageError, match="does not belong"):
            await store.open_driver("order-2")
        assert await read(store, "order-1") == b"order-1"
    assert (data / "workflows" / "README").read_text() == "ours?"


async def test_of_two_files_of_one_workflow_the_later_counts(data: Path) -> None:
    """S52: an earlier one that somebody put back does not return when the later is deleted, either."""
    async with opened(data) as store:
        await spawn(store, "order-1", state="completed")
        earlier = store.path_of("order-1")
        shutil.copy(earlier, data.parent / "kept")
        await store.delete("order-1")
        await spawn(store, "order-1", state="running")
        later = store.path_of("order-1")
    shutil.copy(data.parent / "kept", earlier)
    for _ in range(2):
        (data / "catalog.sqlite").unlink()
        async with opened(data) as store:
            assert store.path_of("order-1") == later
            found = await store.get_row("order-1")
            assert found is not None
            assert found.state == "running"
    assert Path(earlier + ".superseded").exists()
    async with opened(data) as store:
        await store.delete("order-1")
    (data / "catalog.sqlite").unlink()
    async with opened(data) as store:
        assert await store.list_rows() == []


async def test_leftovers_are_removed_by_a_rebuild(data: Path) -> None:
    """S50: a half-made file, an empty namespace, and a log without its database."""
    async with opened(data) as store:
        await spawn(store, "order-1")
        await (await store.open_driver("empty", create=True)).aclose()
        path = store.path_of("order-1")
    directory = data / "workflows"
    for suffix in ("-wal", "-shm", ".new-1-1"):
        (directory / f"gone-{'0' * 32}.0000000100000009.sqlite{suffix}").write_bytes(b"x")
    (data / "catalog.sqlite").unlink()
    async with opened(data) as store:
        assert [found.workflow_id for found in await store.list_rows()] == ["order-1"]
    assert os.listdir(directory) == [Path(path).name]


async def test_a_rebuild_that_was_interrupted_begins_anew(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S50: whether by an error or by cancellation; the lock is free afterwards."""
    async with opened(data) as store:
        await fill(store)
    (data / "lock").unlink()
    with trio.CancelScope() as scope:
        scope.cancel()
        await FileStore(data, commit_in="inline").acquire()
    assert scope.cancelled_caught
    with monkeypatch.context() as patch:
        patch.setattr("perdure.storage.catalog.Catalog.finish", lambda self: os.stat("/does/not/exist"))
        with pytest.raises(StorageError, match="/does/not/exist"):
            await FileStore(data).acquire()
    async with opened(data) as store:
        rows = await store.list_rows()
        assert [found.workflow_id for found in rows] == sorted(WORKFLOWS)
        assert {found.created_at_ms for found in rows} == {1_000}


async def test_what_was_never_checkpointed_is_not_taken_for_old(data: Path) -> None:
    """S50: when a workflow changed last is when it was committed last, not when its file was made."""
    copy = data.parent / "copy"
    async with opened(data, commit_in="inline") as store:
        await spawn(store, "order-1")
        path = Path(store.path_of("order-1"))
        os.utime(path, (1_000, 1_000))
        driver = await store.open_driver("order-1")
        os.utime(path, (1_000, 1_000))
        await driver.set(b"key", b"1")
        shutil.copytree(data, copy)
        await driver.aclose()
    (copy / "catalog.sqlite").unlink()
    async with opened(copy) as store:
        found = await store.get_row("order-1")
        assert found is not None
        assert found.updated_at_ms > 1_600_000_000_000
