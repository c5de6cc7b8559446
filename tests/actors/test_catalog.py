"""The rule that keeps dormant workflows from being forgotten: the catalog's wake is never later than the workflow's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk, When
from harness import MovableClock
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors.catalog import DELAY_MAX_S, DELAY_S, NEVER, CatalogedDriver, CatalogKeeper
from perdure.storage import CatalogRow, MemoryStore, StorageError, decode_value, layout
from perdure.storage.schema import SleepEntry, SleepState, decode_entry, decode_message
from perdure.testing import run_virtual
from perdure.workflow import Context, QueueTimeoutError, WorkflowEndedError, WorkflowState, workflow

TERMINAL = {"completed", "failed", "cancelled"}


def wish_ms(namespace: dict[bytes, bytes]) -> int:
    """When a workflow wants to be activated, from nothing but what is stored of it."""
    if layout.INPUT_KEY not in namespace:
        return NEVER  # its creation was not finished, and nobody was told of it
    state = namespace[layout.STATE_KEY].decode()
    if state in TERMINAL:
        return NEVER
    alarm = namespace.get(layout.ALARM_KEY)
    if state == "pending" and alarm is not None:
        return layout.decode_u64(alarm)  # it is to start then
    if state != "sleeping":
        return 0
    names = {decode_message(value).name for key, value in namespace.items() if key.startswith(layout.MAILBOX_PREFIX)}
    if "go" in names and not _sleeps(namespace):
        return 0  # it waits for a message that is there
    return NEVER if alarm is None else layout.decode_u64(alarm)


def _sleeps(namespace: dict[bytes, bytes]) -> bool:
    """Whether what it waits for is the end of a `nap`."""
    registry = {layout.parse_name_key(k): v.decode() for k, v in namespace.items() if k.startswith(layout.NAMES_PREFIX)}
    for key, value in namespace.items():
        if key.startswith(layout.HISTORY_PREFIX):
            entry = decode_entry(value)
            last = entry.location[-1]
            if isinstance(entry.kind, SleepEntry) and entry.kind.state is SleepState.PENDING:
                return isinstance(last, int) and not registry[last].endswith(":deadline")
    return False


class Rule:
    """Holds the catalog against the namespaces around every write; also counts how early it is."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.looks = 0
        self.spurious: Counter[str] = Counter()

    def watch(self, when: When) -> None:
        """Called by the store."""
        for workflow_id, namespace in self.disk.namespaces.items():
            wish = wish_ms(namespace)
            row = self.disk.rows.get(workflow_id)
            assert row is not None or wish == NEVER, f"{when}: {workflow_id} is not in the catalog"
            if row is not None:
                known = NEVER if row.next_wake_ms is None else row.next_wake_ms
                assert known <= wish, f"{when} {self.disk.store.written[-1:]}: {workflow_id} wants {wish}, and {row}"
                self.looks += 1

    def settled(self) -> None:
        """Once all is quiet, the catalog is not merely early enough, but right."""
        for workflow_id, namespace in self.disk.namespaces.items():
            row = self.disk.rows[workflow_id]
            assert (NEVER if row.next_wake_ms is None else row.next_wake_ms) == wish_ms(namespace), row
            assert row.state == namespace[layout.STATE_KEY].decode()


@workflow(name="script")
async def script(ctx: Context, operations: list[list[Any]]) -> list[Any]:
    """Does what its input says."""
    done: list[Any] = []
    for number, (what, argument) in enumerate(operations):
        name = f"{number}-{what}"
        match what:
            case "step":
                done.append(await ctx.step(name, trio.sleep, argument))
            case "ephemeral":
                done.append(await ctx.step(name, trio.sleep, 0, ephemeral=True))
            case "nap":
                done.append((await ctx.sleep(name, argument)).value)
            case "read":
                try:
                    done.append((await ctx.queue.next(name, names=["go"], timeout=argument)).body)
                except QueueTimeoutError:
                    done.append("timeout")
            case _:
                raise AssertionError(what)
    return done


async def test_the_rule_holds_around_every_write_of_a_life(disk: Disk, autojump_clock: MockClock) -> None:
    rule = Rule(disk)
    async with disk.process(script) as supervisor:
        disk.store.watch = rule.watch
        operations = [
            ["step", 1],
            ["nap", 5],
            ["read", None],
            ["ephemeral", 0],
            ["read", 50],
            ["nap", 0.001],
            ["read", 3],
        ]
        handle = await supervisor.spawn(script, "s-1", operations)
        await trio.sleep(3)
        await handle.message("unrelated", 0)
        await handle.evict()
        await trio.sleep(10)
        rule.settled()
        assert disk.rows["s-1"].next_wake_ms is None, "it waits for a message"
        assert disk.rows["s-1"].mail_waiting
        await handle.message("go", 1)
        await handle.message("go", 2)
        assert await handle.result() == [None, "completed", 1, None, 2, "completed", "timeout"]
        await trio.sleep(1)
        rule.settled()
    assert rule.looks > 30
    assert disk.rows["s-1"].next_wake_ms is None


Operation = st.one_of(
    st.tuples(st.just("step"), st.sampled_from([0, 0.004])),
    st.tuples(st.just("ephemeral"), st.just(0)),
    st.tuples(st.just("nap"), st.sampled_from([0, 0.003, 1, 100])),
    st.tuples(st.just("read"), st.sampled_from([None, 0, 0.003, 2, 100])),
)
Deed = st.sampled_from(["go", "other", "wake", "evict", "look", "cancel", "tick", "wait", "long", "die"])


@settings(max_examples=60)
@given(
    scripts=st.lists(st.lists(Operation, min_size=1, max_size=5), min_size=1, max_size=2),
    deeds=st.lists(st.tuples(Deed, st.integers(0, 1)), max_size=15),
    delay_s=st.sampled_from([0.0, 0.002]),
    seed=st.integers(0, 1000),
)
def test_the_rule_holds_whatever_is_done_to_whom_and_nobody_is_forgotten(
    scripts: list[list[tuple[str, Any]]], deeds: list[tuple[str, int]], delay_s: float, seed: int
) -> None:
    """S45 at random: messages, wakes, evictions, looks, cancellations and deaths at any moment."""
    run_virtual(_live, scripts, deeds, delay_s, seed=seed)


async def _live(scripts: list[list[tuple[str, Any]]], deeds: list[tuple[str, int]], delay_s: float) -> None:
    disk = Disk("memory", Path())
    rule = Rule(disk)
    todo = iter(deeds)
    sent: Counter[str] = Counter()
    is_over = False
    while not is_over:
        async with disk.process(script) as supervisor:
            disk.store.watch = rule.watch
            disk.store.delay_s = delay_s
            handles = [
                await supervisor.spawn(script, f"s-{number}", [list(operation) for operation in operations])
                for number, operations in enumerate(scripts)
            ]
            async with trio.open_nursery() as nursery:
                for deed, who in todo:
                    handle = handles[who % len(handles)]
                    match deed:
                        case "tick":
                            await trio.sleep(0.002)
                        case "wait":
                            await trio.sleep(0.5)
                        case "long":
                            await trio.sleep(60)
                        case "die":
                            break
                        case _:
                            nursery.start_soon(_do, handle, deed, sent)
                            await trio.lowlevel.checkpoint()
                else:
                    is_over = True
            if not is_over:
                disk.die()
                continue
            await trio.sleep(1)
            # From here on every workflow gets what it may be waiting for; but nobody wakes one that is not evicted.
            for number, handle in enumerate(handles):
                if await handle.get_state() is WorkflowState.RUNNING:
                    await handle.wake()  # evicted in a step: that is for its evictor to undo
                for _ in scripts[number]:
                    await _do(handle, "go", sent)
            await trio.sleep(2000)
            rule.settled()
            for handle in handles:
                assert (await handle.get_state()).is_terminal, await handle.history()
            assert supervisor.troubles() == {}
    for workflow_id, namespace in disk.namespaces.items():
        if namespace[layout.STATE_KEY] == b"completed":
            read = [body for body in decode_value(namespace[layout.OUTPUT_KEY]) if isinstance(body, int)]
            assert len(read) == len(set(read)), "each once"
            assert all(number <= sent[workflow_id] for number in read)


async def _do(handle: Any, deed: str, sent: Counter[str]) -> None:
    match deed:
        case "go":
            sent[handle.workflow_id] += 1
            try:
                await handle.message("go", sent[handle.workflow_id])
            except WorkflowEndedError:
                assert (await handle.get_state()).is_terminal
        case "other":
            try:
                await handle.message("other", "ignored")
            except WorkflowEndedError:
                assert (await handle.get_state()).is_terminal
        case "wake":
            await handle.wake()
        case "evict":
            await handle.evict()
        case "look":
            await handle.get_state()
        case "cancel":
            await handle.cancel()
        case _:
            raise AssertionError(deed)


class TestKeeper:
    """The writer of rows, by itself."""

    @pytest.fixture
    async def store(self) -> MemoryStore:
        store = MemoryStore()
        await store.acquire()
        return store

    @staticmethod
    def row(wake_ms: int | None, workflow_id: str = "w-1") -> CatalogRow:
        return CatalogRow(workflow_id, "order", "sleeping", wake_ms, False, 1, 1)

    async def test_a_row_that_waits_is_overtaken_by_one_that_is_put(self, store: MemoryStore) -> None:
        keeper = CatalogKeeper(store, MovableClock())
        keeper.put_later(self.row(5000))
        assert await keeper.get("w-1") == self.row(5000)
        await keeper.put(self.row(0))
        await keeper.flush()
        assert await store.get_row("w-1") == self.row(0)
        assert await keeper.get("w-1") == self.row(0)

    async def test_rows_that_wait_are_written_together_and_the_last_counts(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        store = disk.store
        await store.acquire()
        keeper = CatalogKeeper(store, disk.clock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            for wake_ms in range(1, 50):
                keeper.put_later(self.row(wake_ms, f"w-{wake_ms % 10}"))
            await trio.sleep(DELAY_S / 2)
            assert store.written == []
            await trio.sleep(DELAY_S)
            assert store.written == ["rows"]
            assert {row.next_wake_ms for row in disk.rows.values()} == set(range(40, 50))
            nursery.cancel_scope.cancel()
        await store.aclose()

    async def test_a_row_that_waits_for_a_workflow_that_is_gone_is_forgotten(self, store: MemoryStore) -> None:
        keeper = CatalogKeeper(store, MovableClock())
        keeper.put_later(self.row(1))
        await keeper.delete("w-1")
        await keeper.delete("w-2")
        await keeper.flush()
        assert await store.count_rows() == 0

    async def test_a_catalog_that_fails_is_tried_again_less_and_less_often(
        self, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        tries: list[float] = []
        is_well = False

        class Failing(MemoryStore):
            async def put_rows(self, rows: Any) -> None:
                tries.append(trio.current_time())
                if not is_well:
                    raise StorageError("disk full")
                await super().put_rows(rows)

        store = Failing()
        await store.acquire()
        keeper = CatalogKeeper(store, MovableClock())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            keeper.put_later(self.row(1))
            await trio.sleep(600)
            assert 10 < len(tries) < 40
            pauses = [later - earlier for earlier, later in pairwise(tries)]
            assert pauses == sorted(pauses)
            assert pauses[-1] == pytest.approx(DELAY_MAX_S)
            assert "disk full" in caplog.text
            is_well = True
            keeper.put_later(self.row(2, "w-2"))
            await trio.sleep(2 * DELAY_MAX_S)
            assert await store.count_rows() == 2, "nothing was lost meanwhile"
            tries.clear()
            keeper.put_later(self.row(3))
            began = trio.current_time()
            await wait_all_tasks_blocked(DELAY_S)
            await trio.sleep(2 * DELAY_S)
            assert tries[0] - began <= 2 * DELAY_S, "it is quick again"
            nursery.cancel_scope.cancel()


@workflow(name="nap")
async def nap(ctx: Context, seconds: float) -> str:
    await ctx.sleep("nap", seconds)
    return "rested"


@workflow(name="goer")
async def goer(ctx: Context, input: None) -> Any:
    return (await ctx.queue.next("go")).body


@workflow(name="late-goer")
async def late_goer(ctx: Context, input: None) -> Any:
    await trio.sleep(3 * DELAY_S)
    return (await ctx.queue.next("go")).body


async def test_the_rule_holds_while_the_catalog_is_read_again_beside_work(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S50: again and again, around every write of both; nothing is lost or late."""
    async with disk.process(nap, goer) as supervisor, trio.open_nursery() as nursery:
        rule = Rule(disk)
        disk.store.watch = rule.watch

        async def reindex() -> None:
            while True:
                await supervisor.reindex()
                await trio.sleep(0.1)

        nursery.start_soon(reindex)
        naps = [await supervisor.spawn(nap, f"nap-{number}", number) for number in range(10)]
        goers = [await supervisor.spawn(goer, f"goer-{number}") for number in range(5)]
        await trio.sleep(2)
        for number, handle in enumerate(goers):
            if number % 2:
                await handle.evict()
            await handle.message("go", number)
            assert await handle.result() == number
        for handle in naps:
            assert await handle.result() == "rested"
        nursery.cancel_scope.cancel()
    assert rule.looks > 100
    assert {row.state for row in disk.rows.values()} == {"completed"}


async def test_a_message_to_a_workflow_that_is_just_being_started_does_not_move_its_row_back(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S24: it runs, and its row, which was being moved to "at once" when the message came, says so all the same."""
    rule = Rule(disk)
    put_rows = disk.store.put_rows

    async def put_slowly(rows: Sequence[CatalogRow]) -> None:
        if rows[0].next_wake_ms == 0:
            await trio.sleep(DELAY_S)
        await put_rows(rows)

    async with disk.process(late_goer) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(late_goer, "goer-1", start_at=3600)
        await trio.sleep(1)
        disk.store.put_rows = put_slowly  # type: ignore[method-assign]
        disk.store.watch = rule.watch
        nursery.start_soon(handle.wake)
        await trio.sleep(DELAY_S / 2)
        nursery.start_soon(handle.message, "go", 1)
        assert await handle.result() == 1
        await trio.sleep(1)
        rule.settled()
    assert rule.looks > 3


async def test_two_who_move_a_row_earlier_at_once_leave_it_at_the_earlier_time() -> None:
    """S24: whichever was the last to write."""
    store = MemoryStore()
    await store.acquire()
    row = CatalogRow("w-1", "goer", "sleeping", 9_000, False, 0, 0)
    for first, second in ((0, 1_000), (1_000, 0)):
        keeper = CatalogKeeper(store, MovableClock())
        driver = CatalogedDriver(await store.open_driver("w-1", create=True), keeper, row)
        async with trio.open_nursery() as nursery:
            for wake_ms in (first, second):
                nursery.start_soon(driver.move_earlier, wake_ms)
        await keeper.flush()
        found = await store.get_row("w-1")
        assert found is not None
        assert found.next_wake_ms == driver.row.next_wake_ms == 0
        await driver.aclose()
    await store.aclose()
