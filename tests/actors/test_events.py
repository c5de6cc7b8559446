"""The stream of changes of state: durable before it is told, bounded, and never in anybody's way."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import EventStream, SupervisorClosedError, WorkflowStateChanged, open_supervisor
from perdure.actors.events import EventHub
from perdure.storage import MemoryDriver, MemoryStore, StorageError, layout
from perdure.workflow import Context, InvalidArgumentError, TrioClock, WorkflowState, workflow

S = WorkflowState


@workflow(name="nap")
async def nap(ctx: Context, seconds: float) -> str:
    await ctx.sleep("nap", seconds)
    return "rested"


@workflow(name="bad")
async def bad(ctx: Context, input: None) -> None:
    raise ValueError("no")


@workflow(name="big")
async def big(ctx: Context, input: str) -> int:
    return len(input)


async def collect(events: EventStream, told: list[WorkflowStateChanged]) -> None:
    async for event in events:
        told.append(event)  # noqa: PERF401 - what came until it was stopped is of interest


def changes(told: list[WorkflowStateChanged], workflow_id: str) -> list[tuple[Any, Any]]:
    return [(event.old, event.new) for event in told if event.workflow_id == workflow_id]


async def test_each_change_is_told_in_order_from_the_making_to_the_deletion(
    disk: Disk, autojump_clock: MockClock
) -> None:
    told: list[WorkflowStateChanged] = []
    async with disk.process(nap, bad) as supervisor, trio.open_nursery() as nursery:
        async with supervisor.events() as events:
            nursery.start_soon(collect, events, told)
            began = disk.clock.now_ms() / 1000
            await supervisor.spawn(bad, "bad-1")
            handle = await supervisor.spawn(nap, "nap-1", 50)
            assert await handle.result() == "rested"
            await trio.sleep(1)
            await supervisor.delete("nap-1")
            await wait_all_tasks_blocked()
        assert changes(told, "bad-1") == [(None, S.PENDING), (S.PENDING, S.RUNNING), (S.RUNNING, S.FAILED)]
        states = changes(told, "nap-1")
        assert states[0] == (None, S.PENDING)
        assert states[-1] == (S.COMPLETED, None)
        assert all(one[1] is other[0] for one, other in pairwise(states))
        assert (S.SLEEPING, S.COMPLETED) in states or (S.RUNNING, S.COMPLETED) in states
        assert {event.workflow for event in told} == {"nap", "bad"}
        assert all(event.missed == 0 for event in told)
        assert told[0].at == pytest.approx(began, abs=1)
        assert [event.at for event in told] == sorted(event.at for event in told)


async def test_a_change_is_durable_when_it_is_told(disk: Disk, autojump_clock: MockClock) -> None:
    """S39: whoever acts on it finds it true after any crash; that it was made comes with that it runs, which follows at once."""
    checked = 0
    async with disk.process(nap, bad) as supervisor, trio.open_nursery() as nursery:
        hub = supervisor._keeper.events
        tell = EventHub.tell

        def check(workflow_id: str, workflow: str, old: str | None, new: str | None) -> None:
            nonlocal checked
            stored = disk.namespaces.get(workflow_id, {}).get(layout.STATE_KEY)
            is_both = old is None and stored == b"running"
            assert (None if stored is None else stored.decode()) == new or (is_both and new == "pending")
            checked += 1
            tell(hub, workflow_id, workflow, old, new)

        hub.tell = check  # type: ignore[method-assign]
        for number in range(5):
            nursery.start_soon(supervisor.spawn, nap, f"nap-{number}", number)
        await supervisor.spawn(bad, "bad-1")
        await trio.sleep(20)
        await supervisor.delete("bad-1")
    assert checked > 15


async def test_a_commit_that_failed_is_not_told(disk: Disk, autojump_clock: MockClock) -> None:
    """S21: what is not known to have happened is not said to have."""
    told: list[WorkflowStateChanged] = []
    async with disk.process(nap) as supervisor, supervisor.events() as events:
        disk.store.die_at = (len(disk.store.written) + 2, "before")
        with pytest.raises(StorageError):
            await supervisor.spawn(nap, "nap-1", 50)
        with trio.move_on_after(1):
            await collect(events, told)
    assert told == []


async def test_a_making_that_had_to_be_cut_into_pieces_is_told_once(autojump_clock: MockClock) -> None:
    """S38: a driver that is not atomic is given a large first batch piece by piece."""
    store = MemoryStore(driver_factory=lambda _, data: MemoryDriver(data, atomic_batch=False))
    told: list[WorkflowStateChanged] = []
    async with open_supervisor(store, [big], clock=TrioClock(0)) as supervisor, supervisor.events() as events:
        attributes = {f"name-{number:03}" * 40: "x" * 1_000 for number in range(64)}
        handle = await supervisor.spawn(big, "big-1", "x" * 960_000, attributes=attributes)
        assert await handle.result() == 960_000
        with trio.move_on_after(1):
            await collect(events, told)
    assert changes(told, "big-1") == [(None, S.PENDING), (S.PENDING, S.RUNNING), (S.RUNNING, S.COMPLETED)]


async def test_a_slow_reader_loses_the_oldest_and_is_told_how_many(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap) as supervisor, supervisor.events(buffer=3) as slow, supervisor.events() as quick:
        for number in range(20):
            await supervisor.spawn(nap, f"nap-{number}", 10_000)
        await trio.sleep(5)
        everything = list(quick._waiting)
        assert len(everything) >= 40
        found = [await anext(slow) for _ in range(3)]
        assert [event.missed for event in found] == [len(everything) - 3, 0, 0]
        assert [event.workflow_id for event in found] == [event.workflow_id for event in everything[-3:]]
        with trio.move_on_after(1) as scope:
            await anext(slow)
        assert scope.cancelled_caught
        await supervisor.spawn(nap, "nap-x", 10_000)
        assert (await anext(slow)).missed == 0, "nothing was lost since"


async def test_the_stream_ends_with_the_supervisor_and_what_was_told_can_still_be_read(
    disk: Disk, autojump_clock: MockClock
) -> None:
    told: list[WorkflowStateChanged] = []
    async with trio.open_nursery() as nursery:
        started = trio.Event()

        async def listen(supervisor: Any) -> None:
            async with supervisor.events() as events:
                started.set()
                await trio.sleep(500)
                await collect(events, told)

        async with disk.process(nap) as supervisor:
            nursery.start_soon(listen, supervisor)
            await started.wait()
            await supervisor.spawn(nap, "nap-1", 100)
        with pytest.raises(SupervisorClosedError):
            async with supervisor.events():
                pass
    assert changes(told, "nap-1")[0] == (None, S.PENDING)


async def test_a_reader_that_was_cancelled_is_forgotten(disk: Disk, autojump_clock: MockClock) -> None:
    async with disk.process(nap) as supervisor:
        with trio.move_on_after(1):
            async with supervisor.events() as events:
                await anext(events)
        assert supervisor._keeper.events._streams == []
        with pytest.raises(InvalidArgumentError, match="buffer"):
            async with supervisor.events(buffer=0):
                pass


async def test_a_state_of_a_later_version_is_no_error(autojump_clock: MockClock) -> None:
    hub = EventHub(TrioClock(0))
    stream = await EventStream(hub, 5).__aenter__()
    hub.tell("a", "b", "a state of tomorrow", None)
    hub.end()
    event = await anext(stream)
    assert (event.old, event.new) == (None, None)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(await EventStream(hub, 5).__aenter__())
