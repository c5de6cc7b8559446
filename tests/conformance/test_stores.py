"""Every store under one suite: what a supervisor may rely on, whichever store it was given."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import trio

from perdure.storage import layout
from perdure.storage.attributes import InvalidAttributeError, encode_attributes
from perdure.storage.driver import Batch, NowaitDriver
from perdure.storage.errors import (
    DriverClosedError,
    NamespaceNotFoundError,
    PerdureError,
    StorageError,
    StoreBusyError,
    StoreLockedError,
)
from perdure.storage.file_store import FileStore
from perdure.storage.memory import MemoryDriver
from perdure.storage.memory_store import MemoryStore
from perdure.storage.naming import WorkflowIdError
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.store import CatalogRow, Store, create_driver

STRANGE_IDS = ["../x", "a/b", "a\\b", "nul\0byte", "\0", ".", "..", "x" * 10_000, "📦 paket", "ab", "Ab", "AB", "é", "e\u0301",
               "con", "-", " ", "?", "a.sqlite", "a-wal"]  # fmt: skip


def row(workflow_id: str, **changes: object) -> CatalogRow:
    return replace(CatalogRow(workflow_id, "order", "pending", 0, False, 1_000, 2_000), **changes)  # type: ignore[arg-type]


class Bench:
    """Stores of one kind over the same bytes, one after the other."""

    def __init__(self, kind: Literal["memory", "sqlite"], directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.store = self.another()

    def another(self) -> Store:
        """A second store over the same bytes."""
        if self.kind == "sqlite":
            return FileStore(self.directory / "data")
        return MemoryStore(shared_with=self.store if hasattr(self, "store") else None)  # type: ignore[arg-type]

    async def reopen(self) -> Store:
        """Close the store in good order and open the next."""
        await self.store.aclose()
        self.store = self.another()
        await self.store.acquire()
        return self.store


@pytest.fixture
async def bench(driver_kind: Literal["memory", "sqlite"], tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(driver_kind, tmp_path)
    await bench.store.acquire()
    yield bench
    await bench.store.aclose()


async def put(store: Store, workflow_id: str, value: bytes) -> None:
    driver = await store.open_driver(workflow_id, create=True)
    await driver.set(b"key", value)
    await driver.aclose()


async def read(store: Store, workflow_id: str) -> bytes | None:
    driver = await store.open_driver(workflow_id)
    try:
        return await driver.get(b"key")
    finally:
        await driver.aclose()


async def test_it_is_a_store(bench: Bench) -> None:
    assert isinstance(bench.store, Store)


async def test_a_namespace_outlives_its_driver_and_the_store(bench: Bench) -> None:
    await put(bench.store, "order-1", b"1")
    assert await read(bench.store, "order-1") == b"1"
    store = await bench.reopen()
    assert await read(store, "order-1") == b"1"


async def test_a_batch_can_be_applied_without_waiting_while_the_driver_is_open(bench: Bench) -> None:
    driver = await bench.store.open_driver("order-1", create=True)
    assert isinstance(driver, NowaitDriver)
    batch = Batch(puts=[(b"key", b"1")])
    if not driver.batch_nowait(batch):  # Somebody else would have waited.
        await driver.batch(batch)
    assert await driver.get(b"key") == b"1"
    await driver.aclose()
    with pytest.raises(DriverClosedError):
        driver.batch_nowait(Batch(puts=[(b"key", b"2")]))
    assert await read(bench.store, "order-1") == b"1"


async def test_a_row_is_written_and_its_namespace_made_by_one_call(bench: Bench) -> None:
    """What is said to be empty is; whoever sent a message first is not forgotten, and the row is there in any case."""
    for number, is_there in enumerate((False, True)):
        if is_there:
            await put(bench.store, "order-1", b"1")
        driver, is_empty = await create_driver(bench.store, row("order-1", created_at_ms=number))
        assert await driver.get(b"key") == (b"1" if is_there else None)
        assert not (is_empty and is_there)
        assert is_empty is (bench.kind == "sqlite" and not is_there)
        assert await bench.store.get_row("order-1") == row("order-1", created_at_ms=number)
        with pytest.raises(StoreBusyError):
            await create_driver(bench.store, row("order-1"))
        await driver.aclose()
        await bench.reopen()
        assert await bench.store.get_row("order-1") is not None


async def test_a_missing_namespace_is_an_error_and_is_not_made(bench: Bench) -> None:
    for _ in range(2):
        with pytest.raises(NamespaceNotFoundError, match="order-1") as caught:
            await bench.store.open_driver("order-1")
        assert caught.value.workflow_id == "order-1"
        assert caught.value.path is None


async def test_a_row_that_came_before_its_namespace_is_kept_and_names_no_file(bench: Bench) -> None:
    await bench.store.put_rows([row("order-1")])
    store = await bench.reopen()
    with pytest.raises(NamespaceNotFoundError) as caught:
        await store.open_driver("order-1")
    assert caught.value.path is None
    assert await store.get_row("order-1") == row("order-1")
    await put(store, "order-1", b"1")
    assert await store.get_row("order-1") == row("order-1")


async def test_a_workflow_has_one_driver_at_a_time(bench: Bench) -> None:
    driver = await bench.store.open_driver("order-1", create=True)
    for create in (False, True):
        with pytest.raises(StoreBusyError, match="already open"):
            await bench.store.open_driver("order-1", create=create)
    await driver.set(b"key", b"1")
    await driver.aclose()
    await driver.aclose()
    assert await read(bench.store, "order-1") == b"1"


async def test_of_two_openings_at_once_one_is_refused(bench: Bench) -> None:
    """S44: the store's part of concurrent spawns of one id."""
    opened, refused = [], []

    async def open_it() -> None:
        try:
            opened.append(await bench.store.open_driver("order-1", create=True))
        except StoreBusyError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(open_it)
    assert len(opened) == 1
    assert len(refused) == 49
    await opened[0].aclose()


async def test_strange_ids_are_kept_apart(bench: Bench) -> None:
    """S44: no two ids meet, whatever they are made of, and rows give them back unchanged."""
    for number, workflow_id in enumerate(STRANGE_IDS):
        await bench.store.put_rows([row(workflow_id, updated_at_ms=number)])
        await put(bench.store, workflow_id, b"%d" % number)
    store = await bench.reopen()
    for number, workflow_id in enumerate(STRANGE_IDS):
        assert await read(store, workflow_id) == b"%d" % number
        assert await store.get_row(workflow_id) == row(workflow_id, updated_at_ms=number)
    assert [found.workflow_id for found in await store.list_rows()] == sorted(STRANGE_IDS)


@pytest.mark.parametrize("workflow_id", ["", "half \ud83d"])
async def test_an_id_that_cannot_be_kept_is_refused(bench: Bench, tmp_path: Path, workflow_id: str) -> None:
    """S44: empty is refused, and is never taken for the owner's own namespace."""
    own = await bench.store.open_own()
    await own.batch(Batch(puts=[(b"key", b"1")]))
    with pytest.raises(WorkflowIdError):
        await bench.store.delete(workflow_id)
    with pytest.raises(WorkflowIdError):
        await bench.store.backup(workflow_id, tmp_path / "copy.sqlite")
    assert await own.get(b"key") == b"1"
    await own.aclose()
    for create in (False, True):
        with pytest.raises(WorkflowIdError) as caught:
            await bench.store.open_driver(workflow_id, create=create)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, PerdureError)
    assert bench.store.describe(workflow_id)


async def test_a_deleted_workflow_is_gone_and_its_id_starts_empty(bench: Bench) -> None:
    """S52: the store's part."""
    await bench.store.put_rows([row("order-1"), row("order-2")])
    await put(bench.store, "order-1", b"old")
    await put(bench.store, "order-2", b"other")
    await bench.store.delete("order-1")
    assert await bench.store.get_row("order-1") is None
    with pytest.raises(NamespaceNotFoundError):
        await bench.store.open_driver("order-1")
    driver = await bench.store.open_driver("order-1", create=True)
    assert await driver.list(b"") == []
    await driver.set(b"key", b"new")
    await driver.aclose()
    store = await bench.reopen()
    assert await read(store, "order-1") == b"new"
    assert await read(store, "order-2") == b"other"


async def test_deleting_what_is_not_there_or_was_only_a_row_is_fine(bench: Bench) -> None:
    await bench.store.put_rows([row("order-1")])
    await bench.store.delete("order-1")
    await bench.store.delete("order-1")
    assert await bench.store.count_rows() == 0


async def test_an_open_workflow_is_not_deleted(bench: Bench) -> None:
    driver = await bench.store.open_driver("order-1", create=True)
    with pytest.raises(StoreBusyError):
        await bench.store.delete("order-1")
    await driver.set(b"key", b"1")
    await driver.aclose()
    assert await read(bench.store, "order-1") == b"1"


async def test_rows_are_replaced_whole(bench: Bench) -> None:
    await bench.store.put_rows([row("a"), row("b", problem="sick")])
    changed = CatalogRow("a", "refund", "sleeping", 2**63 - 1, True, 5, 6, "diverged")
    await bench.store.put_rows([changed, row("b")])
    assert await bench.store.get_row("a") == changed
    assert await bench.store.get_row("b") == row("b")
    assert await bench.store.get_row("c") is None
    assert await (await bench.reopen()).get_row("a") == changed


async def test_due_rows_come_earliest_first_and_without_the_sick(bench: Bench) -> None:
    await bench.store.put_rows(
        [
            row("late", next_wake_ms=30),
            row("never", next_wake_ms=None),
            row("first", next_wake_ms=10),
            row("sick", next_wake_ms=1, problem="storage: gone"),
            row("second", next_wake_ms=20),
        ]
    )
    assert [found.workflow_id for found in await bench.store.find_due(20, limit=10)] == ["first", "second"]
    assert [found.workflow_id for found in await bench.store.find_due(2**64, limit=2)] == ["first", "second"]
    assert await bench.store.find_due(9, limit=10) == []
    assert await bench.store.find_due(20, limit=0) == []
    assert [found.workflow_id for found in await bench.store.find_due(30, limit=10, since_ms=11)] == ["second", "late"]
    assert await bench.store.find_due(30, limit=10, since_ms=2**64 - 1) == []
    assert await bench.store.next_wake_ms() == 10
    assert await bench.store.next_wake_ms(since_ms=20) == 20
    assert await bench.store.next_wake_ms(since_ms=2**64 - 1) is None
    await bench.store.put_rows([row("first", next_wake_ms=None), row("second", next_wake_ms=None)])
    assert await bench.store.next_wake_ms() == 30
    await bench.store.delete("late")
    assert await bench.store.next_wake_ms() is None


ORDERS = [f"order-{number:02}" for number in range(10)]


def fill() -> list[CatalogRow]:
    return [
        row(
            f"{kind}-{number:02}",
            workflow_type=kind,
            state=("completed", "sleeping", "pending")[number % 3],
            created_at_ms=1_000 - number // 2,
            attributes={"customer": number % 4, "is_new": number % 2 == 0} if number else {},
            parent_id="order-00" if kind == "refund" else None,
            problem="storage: gone" if number == 5 else None,
        )
        for kind in ("refund", "order")
        for number in range(10)
    ]


async def test_rows_are_listed_in_order_of_creation_and_page_by_page(bench: Bench) -> None:
    rows = fill()
    expected = sorted(rows, key=lambda each: (each.created_at_ms, each.workflow_id))
    await bench.store.put_rows(rows)
    pages: list[CatalogRow] = []
    after: tuple[int, str] | None = None
    while page := await bench.store.list_rows(after=after, limit=7):
        pages += page
        after = (page[-1].created_at_ms, page[-1].workflow_id)
        await bench.store.delete(page[-1].workflow_id)  # paging goes on after a row that is gone
    assert pages == expected
    assert await bench.store.count_rows() == 20 - 3
    assert await bench.store.list_types() == ["order", "refund"]
    assert await bench.store.list_rows(limit=0) == []


@pytest.mark.parametrize(
    ("options", "belongs"),
    [
        ({"state": "completed"}, lambda each: each.state == "completed"),
        ({"state": ["pending", "sleeping"]}, lambda each: each.state in ("pending", "sleeping")),
        ({"state": []}, lambda each: False),
        ({"workflow_type": "order"}, lambda each: each.workflow_type == "order"),
        (
            {"state": {"pending", "failed"}, "workflow_type": "refund"},
            lambda each: each.state == "pending" and each.workflow_type == "refund",
        ),
        ({"created_before_ms": 998}, lambda each: each.created_at_ms < 998),
        ({"parent_id": "order-00"}, lambda each: each.parent_id == "order-00"),
        ({"has_problem": True}, lambda each: each.problem is not None),
        (
            {"has_problem": False, "workflow_type": "order"},
            lambda each: each.workflow_id in ORDERS and not each.problem,
        ),
        ({"attributes": {"customer": 1}}, lambda each: each.attributes.get("customer") == 1),
        ({"attributes": {"customer": True}}, lambda each: False),
        ({"attributes": {"customer": "1"}}, lambda each: False),
        ({"attributes": {"is_new": True}}, lambda each: each.attributes.get("is_new") is True),
        ({"attributes": {"is_new": 1}}, lambda each: False),
        ({"attributes": {}}, lambda each: True),
        (
            {"attributes": {"customer": 2, "is_new": True}, "state": "sleeping", "created_before_ms": 999},
            lambda each: (
                each.attributes == {"customer": 2, "is_new": True}
                and each.state == "sleeping"
                and each.created_at_ms < 999
            ),
        ),
    ],
)
async def test_rows_are_found_by_all_that_is_asked_for(
    bench: Bench, options: dict[str, Any], belongs: Callable[[CatalogRow], bool]
) -> None:
    """Values of attributes are compared with their types: 1, True and "1" are three."""
    rows = fill()
    await bench.store.put_rows(rows)
    expected = [each for each in sorted(rows, key=lambda each: (each.created_at_ms, each.workflow_id)) if belongs(each)]
    assert await bench.store.list_rows(**options) == expected
    assert await bench.store.count_rows(**options) == len(expected)
    first = expected[:1]
    if first:
        after = (first[0].created_at_ms, first[0].workflow_id)
        assert await bench.store.list_rows(**options, after=after, limit=3) == expected[1:4]
    assert await (await bench.reopen()).list_rows(**options) == expected


async def test_what_can_be_no_attribute_is_not_searched_for(bench: Bench) -> None:
    with pytest.raises(InvalidAttributeError, match="customer"):
        await bench.store.list_rows(attributes={"customer": [7]})  # type: ignore[dict-item]
    with pytest.raises(InvalidAttributeError, match="customer"):
        await bench.store.count_rows(attributes={"customer": b"7"})  # type: ignore[dict-item]


async def test_due_rows_of_one_time_are_paged_by_id(bench: Bench) -> None:
    """S46: however many are due at once, a page costs what it holds."""
    await bench.store.put_rows([row(f"w-{number}", next_wake_ms=number // 5) for number in range(10)])
    seen: list[str] = []
    since_ms, after = 0, None
    while page := await bench.store.find_due(1, limit=3, since_ms=since_ms, after=after):
        seen += [each.workflow_id for each in page]
        since_ms, after = page[-1].next_wake_ms or 0, page[-1].workflow_id
    assert seen == [f"w-{number}" for number in range(10)]


async def test_ended_rows_come_longest_unchanged_first(bench: Bench) -> None:
    """What still has a duty (a wake), or cannot be read, is not among them."""
    await bench.store.put_rows(
        [
            row("young", state="completed", next_wake_ms=None, updated_at_ms=50),
            row("old", state="completed", next_wake_ms=None, updated_at_ms=10),
            row("oldest", state="completed", next_wake_ms=None, updated_at_ms=5),
            row("failed", state="failed", next_wake_ms=None, updated_at_ms=1),
            row("owing", state="completed", next_wake_ms=0, updated_at_ms=1),
            row("sick", state="completed", next_wake_ms=None, updated_at_ms=1, problem="storage: gone"),
            row("asleep", state="sleeping", next_wake_ms=None, updated_at_ms=1),
        ]
    )
    found = await bench.store.find_ended("completed", 50, limit=9)
    assert [each.workflow_id for each in found] == ["oldest", "old"]
    assert [each.workflow_id for each in await bench.store.find_ended("completed", 50, limit=1)] == ["oldest"]
    rest = await bench.store.find_ended("completed", 51, limit=9, after=(5, "oldest"))
    assert [each.workflow_id for each in rest] == ["old", "young"]
    assert await bench.store.find_ended("sleeping", 50, limit=9) == []


async def test_the_owner_has_a_namespace_of_its_own(bench: Bench) -> None:
    """It is no workflow: not listed, not counted, and there from the first use on."""
    with pytest.raises(NamespaceNotFoundError):
        await bench.store.open_own(create=False)
    own = await bench.store.open_own()
    assert await own.list(b"") == []
    with pytest.raises(StoreBusyError):
        await bench.store.open_own()
    await own.batch(Batch(puts=[(b"key", b"1")]))
    await own.aclose()
    assert await bench.store.count_rows() == 0
    store = await bench.reopen()
    own = await store.open_own(create=False)
    assert await own.get(b"key") == b"1"
    await bench.reopen()  # closing the store closes it
    with pytest.raises(DriverClosedError):
        await own.get(b"key")


async def test_a_second_owner_is_refused_and_harms_nothing(bench: Bench) -> None:
    """S42: in this process too; the holder goes on."""
    await put(bench.store, "order-1", b"1")
    another = bench.another()
    with pytest.raises(StoreLockedError) as caught:
        await another.acquire()
    assert caught.value.holder_pid is not None
    with pytest.raises(StoreLockedError):
        await bench.store.acquire()
    with pytest.raises(StorageError):
        await another.open_driver("order-1")
    await another.aclose()
    assert await read(bench.store, "order-1") == b"1"
    await bench.store.aclose()
    await another.acquire()
    assert await read(another, "order-1") == b"1"
    await another.aclose()


async def test_closing_closes_the_drivers_and_ends_all_use(bench: Bench) -> None:
    driver = await bench.store.open_driver("order-1", create=True)
    await driver.set(b"key", b"1")
    with trio.CancelScope() as scope:
        scope.cancel()
        await bench.store.aclose()
    await bench.store.aclose()
    with pytest.raises(DriverClosedError):
        await driver.get(b"key")
    await driver.aclose()
    for use in (
        bench.store.open_driver("order-1"),
        bench.store.put_rows([row("order-1")]),
        bench.store.get_row("order-1"),
        bench.store.next_wake_ms(),
        bench.store.delete("order-1"),
    ):
        with pytest.raises(StorageError, match="acquire"):
            await use
    await bench.store.acquire()
    assert await read(bench.store, "order-1") == b"1"


async def test_a_backup_is_a_namespace_of_its_own(bench: Bench, tmp_path: Path) -> None:
    pairs = [(layout.WORKFLOW_ID_KEY, b"order-1"), (b"\xff" * 20, b""), (b"x", bytes(100_000))]
    driver = await bench.store.open_driver("order-1", create=True)
    await driver.batch(Batch(puts=pairs))
    await bench.store.backup("order-1", tmp_path / "open.sqlite")
    await driver.set(b"x", b"later")
    await driver.aclose()
    await bench.store.backup("order-1", str(tmp_path / "closed.sqlite"))
    for name, last in (("open.sqlite", bytes(100_000)), ("closed.sqlite", b"later")):
        copy = await SqliteDriver.open(tmp_path / name)
        assert dict(await copy.list(b"")) == {**dict(pairs), b"x": last}
        await copy.aclose()
    with pytest.raises(StorageError, match=r"open\.sqlite"):
        await bench.store.backup("order-1", tmp_path / "open.sqlite")
    with pytest.raises(NamespaceNotFoundError):
        await bench.store.backup("order-2", tmp_path / "none.sqlite")
    assert set(os.listdir(tmp_path)) - {"data"} == {"closed.sqlite", "open.sqlite"}
    assert await read(bench.store, "order-1") is None


async def test_backups_openings_and_closings_do_not_get_in_each_others_way(bench: Bench, tmp_path: Path) -> None:
    await put(bench.store, "order-1", b"1")

    async def use() -> None:
        for _ in range(20):
            assert await read(bench.store, "order-1") == b"1"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(use)
        for number in range(10):
            nursery.start_soon(bench.store.backup, "order-1", tmp_path / f"{number}.sqlite")
    for number in range(10):
        copy = await SqliteDriver.open(tmp_path / f"{number}.sqlite")
        assert await copy.get(b"key") == b"1"
        await copy.aclose()


def namespace(workflow_id: str, state: str, **more: bytes) -> Batch:
    pairs = [
        (layout.WORKFLOW_ID_KEY, workflow_id.encode()),
        (layout.WORKFLOW_TYPE_KEY, b"order"),
        (layout.STATE_KEY, state.encode()),
        (layout.CREATED_AT_KEY, layout.encode_u64(77)),
        (layout.ATTRIBUTES_KEY, encode_attributes({"customer": 7})),
        *((name.encode(), value) for name, value in more.items()),
    ]
    return Batch(puts=pairs)


async def make(store: Store, workflow_id: str, state: str = "running", **more: bytes) -> None:
    driver = await store.open_driver(workflow_id, create=True)
    await driver.batch(namespace(workflow_id, state, **more))
    await driver.aclose()


async def test_a_backup_of_everything_is_a_store_of_its_own(bench: Bench, tmp_path: Path) -> None:
    """Workflows and the owner's own namespace, open or not; the catalog is read again from them."""
    for workflow_id in STRANGE_IDS:
        await make(bench.store, workflow_id, "sleeping", key=workflow_id.encode())
    held = await bench.store.open_driver("ab")
    own = await bench.store.open_own()
    await own.batch(Batch(puts=[(b"key", b"own")]))
    assert await bench.store.backup_all(tmp_path / "copy") == {}
    await held.set(b"key", b"later")
    await own.set(b"key", b"later")
    await held.aclose()
    await own.aclose()
    for _ in range(2):
        copy = FileStore(tmp_path / "copy")
        await copy.acquire()
        rows = await copy.list_rows()
        assert sorted(found.workflow_id for found in rows) == sorted(STRANGE_IDS)
        assert {(found.state, found.created_at_ms, found.problem) for found in rows} == {("sleeping", 77, None)}
        assert await copy.count_rows(attributes={"customer": 7}) == len(STRANGE_IDS)
        for workflow_id in STRANGE_IDS:
            assert await read(copy, workflow_id) == workflow_id.encode()
        own = await copy.open_own()
        assert await own.get(b"key") == b"own"
        await copy.aclose()
    with pytest.raises(StorageError, match="copy") as caught:
        await bench.store.backup_all(str(tmp_path / "copy"))
    assert caught.value.path == str(tmp_path / "copy")
    with pytest.raises(StorageError, match="missing"):
        await bench.store.backup_all(tmp_path / "missing" / "copy")
    assert set(os.listdir(tmp_path)) - {"data"} == {"copy"}


async def test_a_backup_that_is_cancelled_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    await make(bench.store, "order-1")
    with trio.CancelScope() as scope:
        scope.cancel()
        await bench.store.backup_all(tmp_path / "copy")
    if scope.cancelled_caught:
        assert set(os.listdir(tmp_path)) - {"data"} == set()
    else:
        assert set(os.listdir(tmp_path)) - {"data"} == {"copy"}


@pytest.mark.parametrize("is_open", [True, False])
async def test_rows_are_read_again_while_the_store_is_in_use(bench: Bench, is_open: bool) -> None:
    """S50: a row that is missing, stale or wrong is right afterwards; a right one is left as it is."""
    await make(bench.store, "lost", "sleeping")
    await make(bench.store, "stale", "completed")
    await make(bench.store, "right", "running")
    await bench.store.put_rows(
        [
            row("stale", state="running", updated_at_ms=3, created_at_ms=5),
            row("right", state="running", created_at_ms=77, attributes={"customer": 7}),
            row("never made"),
        ]
    )
    drivers = [await bench.store.open_driver(name) for name in ("lost", "stale", "right")] if is_open else []
    assert await bench.store.reindex() == 2
    lost, stale = await bench.store.get_row("lost"), await bench.store.get_row("stale")
    assert lost is not None
    assert stale is not None
    # What is open may be about to want a wake that its user believes to be in the catalog.
    assert (lost.state, lost.next_wake_ms, lost.attributes) == ("sleeping", 0 if is_open else None, {"customer": 7})
    assert (stale.state, stale.next_wake_ms, stale.created_at_ms) == ("completed", 0 if is_open else None, 77)
    assert await bench.store.get_row("right") == row(
        "right", state="running", created_at_ms=77, attributes={"customer": 7}
    )
    assert await bench.store.get_row("never made") == row("never made")
    assert await bench.store.count_rows(attributes={"customer": 7}) == 3
    assert await bench.store.reindex() == 0
    for driver in drivers:
        await driver.aclose()
    assert await bench.store.reindex() == (2 if is_open else 0)


async def test_it_says_where_a_workflow_lies(bench: Bench) -> None:
    before = bench.store.describe("order-1")
    await put(bench.store, "order-1", b"1")
    assert "order-1" in before
    assert "order-1" in bench.store.describe("order-1")


async def test_a_restarted_memory_store_leaves_the_old_one_dead() -> None:
    """The bytes and rows are there, the old drivers are not, and what they do reaches nothing."""
    store = MemoryStore()
    await store.acquire()
    await store.put_rows([row("order-1")])
    driver = await store.open_driver("order-1", create=True)
    await driver.set(b"key", b"1")
    successor = store.restart()
    await successor.acquire()
    with pytest.raises(DriverClosedError):
        await driver.set(b"key", b"2")
    with pytest.raises(StorageError):
        await store.put_rows([row("order-2")])
    await store.aclose()
    assert await read(successor, "order-1") == b"1"
    assert await successor.list_rows() == [row("order-1")]
    with pytest.raises(StoreLockedError):
        await MemoryStore(shared_with=successor).acquire()


async def test_a_memory_store_makes_its_drivers_as_it_is_told() -> None:
    """A factory's drivers die with the store, and write only into their own copy afterwards."""
    made: list[tuple[str, MemoryDriver]] = []

    def make(workflow_id: str, data: dict[bytes, bytes]) -> MemoryDriver:
        driver = MemoryDriver(data, atomic_batch=False)
        made.append((workflow_id, driver))
        return driver

    store = MemoryStore(driver_factory=make)
    await store.acquire()
    driver = await store.open_driver("order-1", create=True)
    assert not driver.atomic_batch
    await driver.set(b"key", b"1")
    successor = store.restart()
    await made[0][1].set(b"key", b"from the grave")
    await successor.acquire()
    assert await read(successor, "order-1") == b"1"
    assert [workflow_id for workflow_id, _ in made] == ["order-1", "order-1"]
