"""Backups of a whole directory: complete or not there, and what one bad file does not spoil."""
# ruff: noqa: ASYNC240 - these tests look at the disk between two awaits

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from file_stores import damage, opened, read, row, spawn

from perdure.storage import sqlite_image as image
from perdure.storage.driver import Batch
from perdure.storage.errors import CorruptStoreError, NamespaceNotFoundError, StorageError
from perdure.storage.file_store import FileStore


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def test_a_backup_has_no_catalog_and_is_read_again_when_it_is_opened(data: Path, tmp_path: Path) -> None:
    """Nothing in it can disagree; ids that were used again stay apart there too."""
    async with opened(data) as store:
        await spawn(store, "order-1", state="completed")
        await store.delete("order-1")
        await spawn(store, "order-1", state="sleeping", alarm=70)
        await store.put_rows([row("never made")])
        assert await store.backup_all(tmp_path / "copy") == {}
        name = Path(store.path_of("order-1")).name
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["format", "journal", "workflows"]
    assert os.listdir(tmp_path / "copy" / "workflows") == [name]
    async with opened(tmp_path / "copy") as copy:
        (found,) = await copy.list_rows()
        assert (found.workflow_id, found.state, found.next_wake_ms, found.created_at_ms) == (
            "order-1",
            "sleeping",
            70,
            1_000,
        )
        await spawn(copy, "order-2")
        assert Path(copy.path_of("order-2")).name > name[-24:]
        await copy.delete("order-1")
        await spawn(copy, "order-1", state="running")
        assert await read(copy, "order-1") == b"order-1"


@pytest.mark.parametrize("how", ["garbage", "gone"])
async def test_a_workflow_that_cannot_be_copied_is_named_and_the_others_are_there(
    data: Path, tmp_path: Path, how: str
) -> None:
    """S41: one bad file does not keep the rest from being safe."""
    async with opened(data) as store:
        for number in range(3):
            await spawn(store, f"order-{number}")
        path = store.path_of("order-1")
        Path(path).unlink() if how == "gone" else damage(path, how)
        missing = await store.backup_all(tmp_path / "copy")
        assert set(missing) == {"order-1"}
        assert path in missing["order-1"]
        with pytest.raises((CorruptStoreError, NamespaceNotFoundError)):
            await store.open_driver("order-1")
    async with opened(tmp_path / "copy") as copy:
        assert [found.workflow_id for found in await copy.list_rows()] == ["order-0", "order-2"]


async def test_a_workflow_that_is_deleted_meanwhile_is_not_missed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(data) as store:
        for number in range(3):
            await spawn(store, f"order-{number}")
        backup = FileStore.backup

        async def backup_one(self: FileStore, workflow_id: str, target: str) -> None:
            if workflow_id == "order-0":
                await store.delete("order-1")
            await backup(self, workflow_id, target)

        monkeypatch.setattr(FileStore, "backup", backup_one)
        assert await store.backup_all(tmp_path / "copy") == {}
    async with opened(tmp_path / "copy") as copy:
        assert [found.workflow_id for found in await copy.list_rows()] == ["order-0", "order-2"]


async def test_a_full_disk_ends_it_and_leaves_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S41: a backup of which parts are missing for want of room is none."""
    async with opened(data) as store:
        for number in range(3):
            await spawn(store, f"order-{number}")
        calls = 0
        sync = image.sync_descriptor

        def fail(descriptor: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise OSError(28, "No space left on device")
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(image, "sync_descriptor", fail)
            with pytest.raises(StorageError, match="No space left"):
                await store.backup_all(tmp_path / "copy")
        assert calls >= 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
        assert await store.backup_all(tmp_path / "copy") == {}


async def test_it_is_durable_before_it_has_its_name(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S40: a backup that is there is complete, whatever happens to the machine."""
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        sync(descriptor)
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def note_rename(self: Path, target: Path) -> Path:
        events.append(f"rename to {Path(target).name}")
        return rename(self, target)

    async with opened(data, commit_in="inline") as store:
        await spawn(store, "order-1")
        own = await store.open_own()
        await own.batch(Batch(puts=[(b"key", b"1")]))
        monkeypatch.setattr(os, "fsync", note_sync)
        monkeypatch.setattr(Path, "rename", note_rename)
        await store.backup_all(tmp_path / "copy")
        await own.aclose()
    last = events.index("rename to copy")
    before = [event.split(".new")[0] for event in events[:last]]
    assert {"format", "workflows", "own.sqlite", "copy"} <= set(before)
    assert before.index("workflows") < len(before) - 1
    assert before[-2:] == ["workflows", "copy"]
    assert events[last + 1] == tmp_path.name


async def test_cancellation_leaves_nothing_of_it(data: Path, tmp_path: Path) -> None:
    async with opened(data) as store:
        for number in range(20):
            await spawn(store, f"order-{number}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.backup_all, tmp_path / "copy")
            while not any(path.name.startswith("copy.new-") for path in tmp_path.iterdir()):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
        assert await read(store, "order-0") == b"order-0"
