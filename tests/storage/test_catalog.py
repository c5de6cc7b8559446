"""The catalog: one transaction per call, answers from indexes, and no trust in what is not whole."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.storage.blocking import Blocking
from perdure.storage.catalog import Catalog, FileRecord, Meta
from perdure.storage.catalog_access import CatalogAccess
from perdure.storage.catalog_schema import WAL_BYTES_MAX
from perdure.storage.errors import CorruptStoreError, StorageError, StoreBusyError
from perdure.storage.store import CatalogRow

ROW = CatalogRow("order-1", "order", "pending", 0, False, 1, 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite"


def begin(path: Path) -> Catalog:
    catalog = Catalog.open(path)
    assert not catalog.is_whole()
    catalog.start()
    catalog.finish()
    assert catalog.is_whole()
    return catalog


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    catalog = begin(path)
    yield catalog
    catalog.close()


def rows(count: int) -> list[CatalogRow]:
    states = ["pending", "running", "sleeping", "completed", "failed"]
    return [
        CatalogRow(
            f"order-{number:05}",
            f"type-{number % 7}",
            states[number % 5],
            number if number % 3 else None,
            number % 2 == 0,
            number,
            number,
            "storage: gone" if number % 50 == 1 else None,
        )
        for number in range(count)
    ]


class Plans:
    """Runs the catalog's own statements and collects how SQLite would answer each."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.plans: list[str] = []

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        self.plans += [row[3] for row in self._connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
        return self._connection.execute(statement, values)


@pytest.mark.parametrize("state", [None, "completed"])
@pytest.mark.parametrize("workflow_type", [None, "type-3"])
@pytest.mark.parametrize("after", [None, "order-02500"])
def test_lists_and_counts_come_from_indexes(
    catalog: Catalog, state: str | None, workflow_type: str | None, after: str | None
) -> None:
    """5,000 rows: nothing is scanned but to count all of them, and nothing is sorted."""
    everything = rows(5_000)
    catalog.put_rows(everything)
    expected = [
        row
        for row in everything
        if (state is None or row.state == state)
        and (workflow_type is None or row.workflow_type == workflow_type)
        and (after is None or row.workflow_id > after)
    ]
    watch = Plans(catalog._connection)
    catalog._connection = watch  # type: ignore[assignment]
    listed = catalog.list_rows(state=state, workflow_type=workflow_type, after=after, limit=30)
    assert listed == expected[:30]
    paged = state is None and workflow_type is None and after is None
    assert [plan for plan in watch.plans if "SEARCH" not in plan] == (["SCAN workflows"] if paged else [])
    watch.plans.clear()
    counted = catalog.count_rows(state=state, workflow_type=workflow_type)
    assert counted == sum(
        (state is None or row.state == state) and (workflow_type is None or row.workflow_type == workflow_type)
        for row in everything
    )
    assert all("COVERING INDEX" in plan for plan in watch.plans)
    if state is not None or workflow_type is not None:
        assert all(plan.startswith("SEARCH") for plan in watch.plans)
    catalog._connection = watch._connection


def test_due_rows_problems_and_files_come_from_indexes(catalog: Catalog) -> None:
    everything = rows(5_000)
    catalog.put_rows(everything)
    for row in everything[:200]:
        catalog.put_file(FileRecord(row.workflow_id, f"{row.workflow_id}.sqlite"))
    watch = Plans(catalog._connection)
    catalog._connection = watch  # type: ignore[assignment]
    due = catalog.find_due(1_000, 20)
    assert [row.next_wake_ms for row in due] == sorted(
        row.next_wake_ms for row in everything if row.problem is None and row.next_wake_ms is not None
    )[:20]
    assert catalog.next_wake_ms() == due[0].next_wake_ms
    assert catalog.get_row("order-00004") == everything[4]
    assert catalog.file("order-00004") == FileRecord("order-00004", "order-00004.sqlite")
    assert catalog.file_of_stem("order-00051") == FileRecord(
        "order-00051", "order-00051.sqlite", problem="storage: gone"
    )
    assert catalog.has_file("order-00004.sqlite")
    assert not catalog.has_file("order-00300.sqlite")
    assert [record.workflow_id for record in catalog.storage_problems()] == [
        row.workflow_id for row in everything[:200] if row.problem
    ]
    # A scan of a partial index reads only what belongs to it.
    assert {plan for plan in watch.plans if "SEARCH" not in plan} <= {
        "SCAN workflows USING INDEX workflows_due",
        "SCAN w USING INDEX workflows_problem",
    }
    assert not any("TEMP B-TREE" in plan for plan in watch.plans)
    catalog._connection = watch._connection


def test_all_rows_of_a_call_are_written_or_none(catalog: Catalog) -> None:
    bad = replace(ROW, workflow_id="order-2", created_at_ms=None)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="NOT NULL"):
        catalog.put_rows([ROW, bad])
    assert catalog.get_row("order-1") is None
    catalog.put_rows([ROW])
    assert catalog.get_row("order-1") == ROW


def test_what_is_written_is_what_is_read(catalog: Catalog) -> None:
    catalog.put_rows([ROW])
    changed = replace(ROW, workflow_type="refund", state="sleeping", mail_waiting=True, problem="x", updated_at_ms=9)
    catalog.put_rows([changed])
    assert catalog.get_row("order-1") == changed
    assert catalog.count_rows(state=None, workflow_type="order") == 0


def test_an_alarm_past_what_sqlite_holds_wakes_earlier(catalog: Catalog) -> None:
    catalog.put_rows([replace(ROW, next_wake_ms=2**64 - 1)])
    assert catalog.next_wake_ms() == 2**63 - 1
    assert catalog.find_due(2**64 - 1, 1) == [replace(ROW, next_wake_ms=2**63 - 1)]


def test_a_problem_may_quote_anything_and_an_id_may_not(catalog: Catalog) -> None:
    catalog.put_rows([replace(ROW, problem="file \udcff\0")])
    found = catalog.get_row("order-1")
    assert found is not None
    assert found.problem == "file \\udcff\0"
    with pytest.raises(StorageError, match="UTF-8"):
        catalog.put_rows([replace(ROW, workflow_id="\udcff")])
    with pytest.raises(StorageError, match="UTF-8"):
        catalog.get_row("\udcff")


def test_a_row_and_its_file_move_to_another_id(catalog: Catalog) -> None:
    catalog.put_rows([ROW, replace(ROW, workflow_id="known", state="sleeping")])
    catalog.put_file(FileRecord("order-1", "a.sqlite", set_aside=True))
    assert catalog.move(FileRecord("order-1", "a.sqlite", set_aside=True), "new") == FileRecord(
        "new", "a.sqlite", set_aside=True
    )
    assert catalog.get_row("new") == replace(ROW, workflow_id="new")
    assert catalog.get_row("order-1") is None
    catalog.move(FileRecord("new", "a.sqlite"), "known")
    assert catalog.file("known") == FileRecord("known", "a.sqlite", set_aside=True)
    assert catalog.get_row("known") == replace(ROW, workflow_id="known", state="sleeping")
    assert catalog.get_row("new") is None


def test_a_problem_is_marked_and_settled(catalog: Catalog) -> None:
    catalog.put_rows([ROW])
    record = FileRecord("order-1", "a.sqlite")
    catalog.put_file(record)
    catalog.mark(record, "damaged", set_aside=True)
    marked = catalog.file("order-1")
    assert marked == FileRecord("order-1", "a.sqlite", set_aside=True, problem="storage: damaged")
    assert catalog.storage_problems() == [marked]
    catalog.settle(replace(ROW, state="sleeping", next_wake_ms=5, created_at_ms=77), record)
    assert catalog.get_row("order-1") == replace(ROW, state="sleeping", next_wake_ms=5)
    catalog.put_rows([replace(ROW, problem="diverged", next_wake_ms=None)])
    assert catalog.storage_problems() == []
    catalog.clear_problem("order-1")
    assert catalog.get_row("order-1") == ROW


def test_meta_says_who_wrote_it(catalog: Catalog, path: Path) -> None:
    assert catalog.meta() is None
    for meta in (Meta(1, "boot", clean=False), Meta(2, None, clean=True)):
        catalog.set_meta(meta)
        assert catalog.meta() == meta
        assert catalog._connection.execute("PRAGMA synchronous").fetchone() == (1,)
    catalog.close()
    again = Catalog.open(path)
    assert again.meta() == Meta(2, None, clean=True)
    again.close()


@pytest.mark.parametrize(
    "harm",
    [
        "DROP INDEX workflows_due",
        "DROP TABLE deletions",
        "ALTER TABLE workflows ADD COLUMN more",
        "PRAGMA user_version = 2",
        "PRAGMA application_id = 5",
    ],
)
def test_an_unknown_schema_is_not_whole(catalog: Catalog, path: Path, harm: str) -> None:
    catalog.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(harm)
    connection.close()
    again = Catalog.open(path)
    assert not again.is_whole()
    again.close()


def test_an_index_of_the_users_own_does_no_harm(catalog: Catalog) -> None:
    """People look at it with sqlite-utils, and may want it faster for their questions."""
    catalog.put_rows([ROW])
    catalog.put_file(FileRecord("order-1", "a.sqlite"))
    database = catalog.database()
    assert database["workflows"].pks == ["workflow_id"]
    assert [found["file"] for found in database["catalog"].rows] == ["a.sqlite"]
    database["workflows"].create_index(["updated_at_ms"])  # type: ignore[union-attr]
    assert catalog.is_whole()


def test_a_damaged_page_is_found(catalog: Catalog, path: Path) -> None:
    catalog.put_rows(rows(2_000))
    catalog.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * 8_192)
    again = Catalog.open(path)
    assert not again.is_whole()
    with pytest.raises(CorruptStoreError, match=str(path)):
        again.list_rows(state=None, workflow_type=None, after=None, limit=5_000)
    again.close()


def test_another_opener_is_refused(catalog: Catalog, path: Path) -> None:
    with pytest.raises(StoreBusyError, match=str(path)):
        Catalog.open(path)


def test_what_is_not_a_database_is_named(path: Path) -> None:
    path.write_bytes(b"garbage " * 1_000)
    with pytest.raises(CorruptStoreError, match=str(path)):
        Catalog.open(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match=str(path)):
        Catalog.open(path)


@pytest.mark.parametrize("commit_in", ["auto", "inline", "thread"])
async def test_the_log_is_bounded_and_no_write_is_lost(path: Path, commit_in: str) -> None:
    catalog = Catalog.open(path, auto_checkpoint=commit_in != "auto")
    catalog.start()
    catalog.finish()
    access = CatalogAccess(
        catalog,
        Blocking(trio.CapacityLimiter(2), inline=commit_in == "inline"),
        in_place=commit_in != "thread",
        checkpoints=commit_in == "auto",
        on_damage=lambda: pytest.fail("damaged"),
    )
    largest = 0

    async def write(worker: int) -> None:
        nonlocal largest
        for number in range(60):
            row = replace(ROW, workflow_id=f"{worker}-{number}", problem="x" * 50_000)
            await access.write(Catalog.put_rows, [row])
            largest = max(largest, Path(f"{path}-wal").stat().st_size)  # noqa: ASYNC240
            assert await access.ask(Catalog.get_row, row.workflow_id) == row

    async with trio.open_nursery() as nursery:
        for worker in range(4):
            nursery.start_soon(write, worker)
    assert 1_000_000 < largest < 2 * WAL_BYTES_MAX
    await access.aclose(Meta(1, None, clean=True))
    again = Catalog.open(path)
    assert again.count_rows(state=None, workflow_type=None) == 240
    assert again.meta() == Meta(1, None, clean=True)
    again.close()


async def test_damage_is_reported_to_the_owner_once(path: Path) -> None:
    catalog = begin(path)
    catalog.put_rows(rows(2_000))
    catalog.checkpoint()
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(4_096)
        file.write(b"\xff" * (size - 4_096))
    catalog._connection.execute("PRAGMA shrink_memory")
    reports: list[str] = []
    access = CatalogAccess(
        catalog,
        Blocking(trio.CapacityLimiter(1), inline=False),
        in_place=True,
        checkpoints=True,
        on_damage=lambda: reports.append("damaged"),
    )
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match="rebuilds it"):
            await access.ask(Catalog.list_rows, state=None, workflow_type=None, after=None, limit=5_000)
    assert reports == ["damaged"]
    await access.aclose(Meta(1, None, clean=True))
