"""A file store killed at any point of making, deleting and making again: the old result never comes back.

Each copy (`deaths.py`) is opened on the same start of the machine, where the catalog is trusted, and on another, where it is
read again from the files; and all that once more for a process killed while it recovered.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from deaths import Deaths
from file_stores import opened, read, spawn

from perdure.storage import layout
from perdure.storage.errors import NamespaceNotFoundError
from perdure.storage.file_store import FileStore


async def life(deaths: Deaths, *, in_one: bool, journal: bool) -> None:
    """Two workflows are made, one ends, is deleted and made again, and ends differently."""
    deaths.phase = "making"
    async with opened(deaths.data, commit_in="inline", journal=journal) as store:
        await spawn(store, "order-2", in_one=in_one)
        deaths.phase = "spawning"
        await spawn(store, "order-1", state="completed", in_one=in_one)
        deaths.phase = "made"
        deaths.point()
        driver = await store.open_driver("order-1")
        await driver.set(b"more", b"1")
        deaths.point()
        await driver.aclose()
        deaths.phase = "deleting"
        await store.delete("order-1")
        deaths.phase = "deleted"
        deaths.point()
        deaths.phase = "remaking"
        await spawn(store, "order-1", state="failed", in_one=in_one)
        deaths.phase = "remade"
        deaths.point()


ALLOWED = {
    "making": {"no file"},
    "spawning": {"no file", "empty", "completed"},
    "made": {"completed"},
    "deleting": {"completed", "no file"},
    "deleted": {"no file"},
    "remaking": {"no file", "empty", "failed"},
    "remade": {"failed"},
}


async def look(store: FileStore) -> str:
    try:
        driver = await store.open_driver("order-1")
    except NamespaceNotFoundError as error:
        # A path says that a file was lost, which no crash may do.
        return "no file" if error.path is None else "lost"
    state = await driver.get(layout.STATE_KEY)
    await driver.aclose()
    return "empty" if state is None else state.decode()


async def check(phase: str, data: Path, boot_id: str, *, go_on: bool = True, in_one: bool = False) -> str:
    """What a new process finds is what the phase allows, and (`go_on`) it can make, delete and rebuild from there.

    With `in_one` no row came before its file, so there is neither without the other.
    """
    async with opened(data, boot_id, commit_in="inline") as store:
        found = await look(store)
        assert found in ALLOWED[phase], (phase, data)
        row = await store.get_row("order-1")
        if in_one or phase in ("made", "deleting", "deleted", "remade"):
            # Neither without the other.
            assert (row is None) == (found == "no file"), (phase, data, row)
        if phase != "making":
            assert await read(store, "order-2") == b"order-2"
        due = [each.workflow_id for each in await store.find_due(10_000, limit=10)]
        assert ("order-1" in due) <= (row is not None and found in ("no file", "empty", "completed", "failed"))
        files = {Path(store.path_of(each)).name for each in ("order-1", "order-2") if _has(store, each)}
        # What a dead process had open has its log, until it is opened again.
        assert {name.removesuffix("-wal") for name in os.listdir(data / "workflows")} == files, (phase, data)
        if not go_on:
            return found
        if found == "no file":
            await spawn(store, "order-1", state="running", in_one=in_one)
            assert await look(store) == "running"
        await store.delete("order-1")
    (data / "catalog.sqlite").unlink()
    async with opened(data, boot_id, commit_in="inline") as store:
        assert await look(store) == "no file"
        assert await store.get_row("order-1") is None
    return found


def _has(store: FileStore, workflow_id: str) -> bool:
    return not store.describe(workflow_id).endswith("*.sqlite")


@pytest.mark.parametrize(("in_one", "journal"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
async def test_an_old_result_never_comes_back(tmp_path: Path, boot_id: str, in_one: bool, journal: bool) -> None:
    """S52: killed at any point, and after a power cut: the workflow is there whole, or gone for good.

    Made in one with its row, it never has a row without a file, nor a file without a row.
    """
    deaths = Deaths(tmp_path / "data", tmp_path / "copies")
    with deaths.watched():
        await life(deaths, in_one=in_one, journal=journal)
    found = Counter([(phase, await check(phase, copy, boot_id, in_one=in_one)) for phase, copy in deaths.found])
    assert {phase for phase, _ in found} == set(ALLOWED)
    assert found["deleting", "completed"]
    assert found["deleting", "no file"]
    assert found["remaking", "failed"]
    assert found["spawning", "completed"]
    assert sum(found.values()) > 25


@pytest.mark.parametrize(("in_one", "journal"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
async def test_nor_after_a_second_death_while_recovering(
    tmp_path: Path, boot_id: str, in_one: bool, journal: bool
) -> None:
    """S52: recovery is killed at any point too, and what it began is finished by the next."""
    deaths = Deaths(tmp_path / "data", tmp_path / "copies")
    with deaths.watched():
        await life(deaths, in_one=in_one, journal=journal)
    checked = 0
    for number, (phase, copy) in enumerate(deaths.found):
        if phase in ("making", "made", "remade"):
            continue
        again = Deaths(copy, tmp_path / f"again-{number}")
        again.phase = phase
        with again.watched():
            async with opened(copy, boot_id, commit_in="inline"):
                pass
        for _, later in again.found:
            await check(phase, later, boot_id, go_on=False, in_one=in_one)
            checked += 1
    assert checked > 50
