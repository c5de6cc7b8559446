"""The catalog: one transaction per call, answers from indexes, and no trust in what is not whole."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.storage.attributes import InvalidAttributeError
from perdure.storage.blocking import Blocking
from perdure.storage.catalog import Catalog, FileRecord, Meta
from perdure.storage.catalog_access import CatalogAccess
from perdure.storage.catalog_schema import WAL_BYTES_MAX
from perdure.storage.errors import CorruptStoreError, StorageError, StoreBusyError
from perdure.storage.question import Question
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
            {"number": number, "even": number % 2 == 0, "rest": number % 11, "none": None} if number % 4 else {},
            f"order-{number // 100:05}" if number % 3 else None,
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


QUESTIONS = [
    {},
    {"state": "completed"},
    {"state": ["completed", "running", "unheard of"]},
    {"state": []},
    {"workflow_type": "type-3"},
    {"state": "completed", "workflow_type": "type-3"},
    {"state": ["completed", "running"], "workflow_type": "type-3"},
    {"created_before_ms": 2_600},
    {"created_before_ms": 0},
    {"created_before_ms": 2**70},
    {"state": "completed", "created_before_ms": 2_600},
    {"attributes": {"number": 2_503}},
    {"attributes": {"number": "2503"}},
    {"attributes": {"even": True}},
    {"attributes": {"even": 1}},
    {"attributes": {"even": 1.0}},
    {"attributes": {"even": "true"}},
    {"attributes": {"even": False, "rest": 3}, "state": "running"},
    {"attributes": {"rest": 3, "even": True}, "workflow_type": "type-3", "created_before_ms": 3_000},
    {"attributes": {"none": None}},
    {"attributes": {"no such": None}},
    {"parent_id": "order-00001"},
    {"parent_id": "order-00001", "attributes": {"even": True}, "state": ["completed", "failed"]},
    {"parent_id": "nobody"},
    {"has_problem": True},
    {"has_problem": False, "state": "running"},
    {"has_problem": True, "state": "running", "attributes": {"even": False}},
]


@pytest.mark.parametrize("options", QUESTIONS)
@pytest.mark.parametrize("after", [None, (2_500, "order-02500"), (2_500, "order-02400"), (2**70, "x")])
def test_lists_and_counts_come_from_indexes(
    catalog: Catalog, options: dict[str, Any], after: tuple[int, str] | None
) -> None:
    """5,000 rows: nothing is scanned but to count all of them, and nothing is sorted."""
    everything = rows(5_000)
    catalog.put_rows(everything)
    question = Question.of(**options, after=after)
    expected = [row for row in everything if question.matches(row)]
    watch = Plans(catalog._connection)
    catalog._connection = watch  # type: ignore[assignment]
    assert catalog.list_rows(question, 30) == expected[:30]
    assert catalog.list_rows(question, 5_000) == expected
    assert catalog.list_rows(question, 0) == []
    assert catalog.count_rows(question) == len(expected)
    plans = [
        plan for plan in watch.plans if "SEARCH" not in plan and "SUBQUERY" not in plan and "CO-ROUTINE" not in plan
    ]
    # A scan of the subquery that is counted, and of an index for its first entry.
    allowed = {"SCAN w USING INDEX workflows_problem", "SCAN w USING COVERING INDEX workflows_problem"}
    allowed |= {"SCAN w USING INDEX workflows_created", "SCAN w USING COVERING INDEX workflows_created"}
    allowed |= {plan for plan in plans if re.fullmatch(r"SCAN (\(subquery-\d+\)|SUBQUERY \d+)", plan)}
    allowed |= {"SCAN workflows USING COVERING INDEX workflows_state_type"}
    assert set(plans) <= allowed, plans
    catalog._connection = watch._connection


@pytest.mark.parametrize(
    ("options", "steps_max"),
    [
        ({}, 2_000),
        ({"state": "completed"}, 4_000),
        ({"workflow_type": "type-3"}, 8_000),
        ({"attributes": {"number": 2_503}}, 500),
        ({"attributes": {"even": False, "number": 2_503, "none": None}}, 3_000),
        ({"attributes": {"none": None}, "parent_id": "order-00001", "state": "running"}, 6_000),
        ({"attributes": {"none": None}, "state": "rare"}, 6_000),
        ({"created_before_ms": 5}, 500),
        ({"has_problem": True}, 2_000),
    ],
)
def test_no_question_costs_more_than_its_answer(catalog: Catalog, options: dict[str, Any], steps_max: int) -> None:
    """The steps of SQLite's machine do not grow with the rows that are not part of the answer (100,000 would be 20 times)."""
    everything = rows(5_000)
    everything[77] = replace(everything[77], state="rare")
    catalog.put_rows(everything)
    question = Question.of(**options)
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 10
        return 0

    catalog._connection.set_progress_handler(step, 10)
    found = catalog.list_rows(question, 20)
    catalog._connection.set_progress_handler(None, 0)
    assert found == [row for row in everything if question.matches(row)][:20]
    assert found
    assert steps <= steps_max


def test_what_is_searched_for_must_be_an_attribute() -> None:
    with pytest.raises(InvalidAttributeError, match="list"):
        Question.of(attributes={"customer": [7]})  # type: ignore[dict-item]


def test_attributes_are_found_by_what_they_are_now(catalog: Catalog) -> None:
    """The index follows every change of a row: other values, another id, deletion."""
    catalog.put_rows([replace(ROW, attributes={"customer": 7, "region": "eu"})])
    assert catalog.count_rows(Question.of(attributes={"customer": 7})) == 1
    catalog.put_rows([replace(ROW, attributes={"region": "eu", "customer": True}, parent_id="p")])
    assert catalog.count_rows(Question.of(attributes={"customer": 7})) == 0
    assert catalog.count_rows(Question.of(attributes={"customer": True}, parent_id="p")) == 1
    catalog.put_rows([replace(ROW, state="running", attributes={"customer": True}, created_at_ms=9)])
    assert catalog.count_rows(Question.of(attributes={"region": "eu"})) == 0
    catalog.put_file(FileRecord("order-1", "a.sqlite"))
    catalog.move(FileRecord("order-1", "a.sqlite"), "new")
    (found,) = catalog.list_rows(Question.of(attributes={"customer": True}), 5)
    assert (found.workflow_id, found.created_at_ms, found.attributes) == ("new", 9, {"customer": True})
    catalog.finish_delete("new")
    assert catalog._connection.execute("SELECT count(*) FROM attributes").fetchone() == (0,)


def test_rows_of_ended_workflows_come_oldest_first_from_their_index(catalog: Catalog) -> None:
    """What has a duty (a wake) or a problem is not among them."""
    everything = [
        replace(
            ROW,
            workflow_id=f"w-{number:04}",
            state=state,
            updated_at_ms=9_000 - number,
            next_wake_ms=wake,
            problem=sick,
        )
        for number, (state, wake, sick) in enumerate(
            [
                ("completed", None, None),
                ("failed", None, None),
                ("completed", 0, None),
                ("completed", None, "storage: x"),
            ]
            * 500
        )
    ] + [replace(ROW, workflow_id="sleeping", state="sleeping", next_wake_ms=None)]
    catalog.put_rows(everything)
    watch = Plans(catalog._connection)
    catalog._connection = watch  # type: ignore[assignment]
    page = catalog.find_ended("completed", 8_000, 10)
    expected = sorted(
        (row for row in everything[0::4] if row.workflow_id != "sleeping" and row.updated_at_ms < 8_000),
        key=lambda row: row.updated_at_ms,
    )
    assert page == expected[:10]
    assert catalog.find_ended("completed", 8_000, 10, (page[-1].updated_at_ms, page[-1].workflow_id)) == expected[10:20]
    assert catalog.find_ended("sleeping", 2**70, 10) == []
    assert all(plan.startswith("SEARCH workflows USING INDEX workflows_ended") for plan in watch.plans)
    catalog._connection = watch._connection


def test_a_correction_gives_way_to_a_change_and_wakes_an_open_workflow_no_later(catalog: Catalog) -> None:
    """S50: the rule of the catalog holds while it is read again."""
    read = replace(ROW, state="sleeping", next_wake_ms=50, updated_at_ms=99)
    assert catalog.correct(None, read, is_open=False)
    assert catalog.get_row("order-1") == read
    assert not catalog.correct(None, replace(read, state="failed"), is_open=False)
    assert not catalog.correct(read, replace(read, updated_at_ms=5), is_open=False)
    early = replace(read, next_wake_ms=0)
    catalog.put_rows([early])
    assert not catalog.correct(read, replace(read, state="completed"), is_open=False)
    assert not catalog.correct(early, read, is_open=True)
    assert catalog.correct(early, replace(read, state="completed", next_wake_ms=None), is_open=True)
    assert catalog.get_row("order-1") == replace(early, state="completed")
    before = replace(early, state="completed")
    assert catalog.correct(before, replace(read, next_wake_ms=2**64 - 1), is_open=False)
    found = catalog.get_row("order-1")
    assert found == replace(read, next_wake_ms=2**63 - 1)
    assert not catalog.correct(found, replace(read, next_wake_ms=2**64 - 1), is_open=False)


def test_due_rows_problems_and_files_come_from_indexes(catalog: Catalog) -> None:
    """No question of the store's scans a table; a workflow's own file comes before one whose name only fits its id."""
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
    assert catalog.find_file("order-00004", "order-00004") == FileRecord("order-00004", "order-00004.sqlite")
    assert catalog.find_file("order-9", "order-00004") == FileRecord("order-00004", "order-00004.sqlite")
    assert catalog.find_file("order-00004", "order-00005") == FileRecord("order-00004", "order-00004.sqlite")
    assert catalog.find_file("order-9", "order-9") is None
    assert catalog.has_file("order-00004.sqlite")
    assert not catalog.has_file("order-00300.sqlite")
    assert [record.workflow_id for record in catalog.storage_problems()] == [
        row.workflow_id for row in everything[:200] if row.problem
    ]
    # A scan of a partial index reads only what belongs to it.
    assert {plan for plan in watch.plans if "SEARCH" not in plan} <= {
        "SCAN workflows USING INDEX workflows_due",
        "SCAN w USING INDEX workflows_problem",
        "COMPOUND QUERY",
        "LEFT-MOST SUBQUERY",
        "UNION ALL",
    }
    assert not any("TEMP B-TREE" in plan for plan in watch.plans)
    catalog._connection = watch._connection


def test_a_new_row_comes_with_its_file_whatever_was_there_before(catalog: Catalog) -> None:
    """All of it or nothing: the row, its attributes and the record; a row of an earlier try is replaced whole."""
    bad = replace(ROW, attributes={"a": 1}, created_at_ms=None)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="NOT NULL"):
        catalog.put_file(FileRecord("order-1", "a.sqlite"), bad)
    assert catalog.file("order-1") is None
    assert catalog.get_row("order-1") is None
    for name, row in (("a", replace(ROW, attributes={"a": 1})), ("b", replace(ROW, attributes={"b": 2}, state="new"))):
        catalog.put_file(FileRecord("order-1", f"{name}.sqlite"), row)
        assert catalog.file("order-1") == FileRecord("order-1", f"{name}.sqlite")
        assert catalog.get_row("order-1") == row
        assert catalog.list_rows(Question.of(attributes=row.attributes), 10) == [row]
    assert catalog.list_rows(Question.of(attributes={"a": 1}), 10) == []


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
    assert catalog.count_rows(Question.of(workflow_type="order")) == 0


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
        "PRAGMA user_version = 1",
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
        again.list_rows(Question(), 5_000)
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
    assert again.count_rows(Question()) == 240
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
            await access.ask(Catalog.list_rows, Question(), 5_000)
    assert reports == ["damaged"]
    await access.aclose(Meta(1, None, clean=True))


def test_threads_may_ask_at_once(catalog: Catalog) -> None:
    """As where somebody asks for the path of a file while the catalog is at work in a thread."""
    catalog.put_file(FileRecord("order-1", "order-1.sqlite"))

    def ask(_: int) -> set[str]:
        found = {catalog.file("order-1") for _ in range(1000)}
        return {record.file for record in found if record is not None}

    with ThreadPoolExecutor(4) as threads:
        assert set().union(*threads.map(ask, range(4))) == {"order-1.sqlite"}
