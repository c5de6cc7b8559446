"""A mailbox at its limit: senders wait in order, can be cancelled, and keep nothing from happening; nothing is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from disks import Disk, When, scheduled
from harness import DriverKind
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import SupervisorClosedError, WorkflowNotFoundError
from perdure.storage import StorageError, layout
from perdure.workflow import (
    Break,
    Context,
    Continue,
    InvalidArgumentError,
    MailboxFullError,
    WorkflowEndedError,
    WorkflowHandle,
    WorkflowState,
    workflow,
)

HOUR = 3600.0
WHENS: tuple[When, ...] = ("before", "after")


@workflow(name="reader")
async def reader(ctx: Context, counts: list[int]) -> list[Any]:
    """Sleeps before each read of so many messages, so that a test says by `wake` when it reads."""
    bodies: list[Any] = []
    for number, count in enumerate(counts):
        await ctx.sleep(f"pause-{number}", HOUR)
        messages = await ctx.queue.next_batch(f"read-{number}", count=count)
        bodies.extend(message.body for message in messages)
    return bodies


class Crowd:
    """Senders that all want to send to one workflow, each one message."""

    def __init__(self, nursery: trio.Nursery, handle: WorkflowHandle) -> None:
        self.nursery = nursery
        self.handle = handle
        self.sent: list[Any] = []
        self.refused: list[type[Exception]] = []
        self.scopes: dict[Any, trio.CancelScope] = {}

    async def add(self, *bodies: Any, name: str = "item", id: str | None = None) -> None:
        """Let a sender for each come, one after the other."""
        for body in bodies:
            self.nursery.start_soon(self._send, body, name, id)
            await wait_all_tasks_blocked()

    async def _send(self, body: Any, name: str, id: str | None) -> None:
        with trio.CancelScope() as self.scopes[body]:
            try:
                await self.handle.message(name, body, id=id)
            except Exception as error:
                self.refused.append(type(error))
            else:
                self.sent.append(body)


def waiting(disk: Disk, workflow_id: str = "r-1") -> int:
    """How many messages are durably in the mailbox."""
    return sum(key.startswith(layout.MAILBOX_PREFIX) for key in disk.namespaces[workflow_id])


async def test_senders_wait_while_it_is_full_and_are_let_in_in_their_order_as_many_as_were_read(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S48: senders wait, nothing is dropped, and whoever comes first goes first."""
    async with disk.process(reader, mailbox_limit=3) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(reader, "r-1", [1, 2, 3, 3, 3])
        crowd = Crowd(nursery, handle)
        await crowd.add(*range(10))
        for sent, left in ((3, 10), (4, 9), (6, 7), (9, 4), (10, 1)):
            assert sorted(crowd.sent) == list(range(sent))
            assert waiting(disk) == min(3, left)
            if left >= 3:
                with pytest.raises(MailboxFullError) as caught:
                    await handle.message_nowait("item", "late")
                assert (caught.value.workflow_id, caught.value.limit) == ("r-1", 3)
            await handle.wake()
            await wait_all_tasks_blocked()
        assert await handle.result() == list(range(10))
        assert sorted(crowd.sent) == list(range(10))
    assert waiting(disk) == 0


async def test_who_comes_while_others_wait_goes_behind_them(disk: Disk, autojump_clock: MockClock) -> None:
    """S48: first come, first served, though there be room by then; `message_nowait` does not overtake either."""
    disk.store.delay_s = 0.01
    async with disk.process(reader, mailbox_limit=1) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(reader, "r-1", [1] * 6)
        crowd = Crowd(nursery, handle)
        await crowd.add("a", "b", "c")
        await trio.sleep(1)
        nursery.start_soon(handle.wake)
        for step in range(60):
            with pytest.raises(MailboxFullError):
                await handle.message_nowait("item", "late")
            if step == 3:
                await crowd.add("d", "e", "f")
            await trio.sleep(0.001)
        for _ in range(5):
            await handle.wake()
            await trio.sleep(1)
        assert await handle.result() == ["a", "b", "c", "d", "e", "f"]


async def test_a_sender_that_is_cancelled_while_it_waits_has_sent_nothing(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S48: the wait is cancellable; those behind it move up."""
    async with disk.process(reader, mailbox_limit=2) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(reader, "r-1", [2, 2, 2])
        crowd = Crowd(nursery, handle)
        await crowd.add(*range(7))
        for body in (2, 5):
            crowd.scopes[body].cancel()
        await wait_all_tasks_blocked()
        assert crowd.sent == [0, 1]
        for _ in range(3):
            await handle.wake()
            await wait_all_tasks_blocked()
        assert await handle.result() == [0, 1, 3, 4, 6]
        assert sorted(crowd.sent) == [0, 1, 3, 4, 6]


@pytest.mark.parametrize("delay_ms", range(0, 60, 3))
async def test_a_sender_cancelled_at_any_moment_has_sent_once_or_not_at_all(
    delay_ms: int, disk: Disk, autojump_clock: MockClock
) -> None:
    """S48: cancelled while it waits, while it is let in and after: no message twice, the others in order, all delivered."""
    async with disk.process(reader, mailbox_limit=1) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(reader, "r-1", [1, 1, 1, 1])
        disk.store.delay_s = 0.01
        crowd = Crowd(nursery, handle)
        await crowd.add("a", "b", "c", "d")
        await trio.sleep(1)
        nursery.start_soon(handle.wake)
        await trio.sleep(delay_ms / 1000)
        crowd.scopes["b"].cancel()
        await trio.sleep(1)
        while await handle.get_state() is not WorkflowState.COMPLETED and waiting(disk):
            await handle.wake()
            await trio.sleep(1)
        bodies = [entry.data.get("body") for entry in await handle.history()]
        read = [body["body"] for body in bodies if isinstance(body, dict)]
        assert read == (["a", "b", "c", "d"] if "b" in read else ["a", "c", "d"])
        assert "b" in read or "b" not in crowd.sent
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("has_ids", [False, True])
async def test_waiting_senders_hold_nothing_and_come_in_when_the_workflow_is_back(
    has_ids: bool, disk: Disk, autojump_clock: MockClock
) -> None:
    """S48, S45: an eviction is not held off by those who wait, and whoever reads later lets them in."""
    async with disk.process(reader, mailbox_limit=2) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(reader, "r-1", [2, 2, 2])
        crowd = Crowd(nursery, handle)
        for number in range(6):
            await crowd.add(number, id=f"m-{number}" if has_ids else None)
        for read in (2, 4, 6):
            await handle.evict()
            assert supervisor._residents.live == {}
            await handle.wake()
            await wait_all_tasks_blocked()
            assert sorted(crowd.sent) == list(range(min(6, read + 2)))
        assert await handle.result() == list(range(6))


async def test_an_evicted_workflow_is_brought_back_by_a_sender_that_has_to_wait(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S48: a message is an evicted workflow's wake-up, and one that has to wait is as well."""

    @workflow(name="taker")
    async def taker(ctx: Context, input: None) -> list[Any]:
        await ctx.step("hold", trio.sleep, 5)
        return [(await ctx.queue.next(f"read-{number}")).body for number in range(3)]

    async with disk.process(taker, mailbox_limit=1) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(taker, "r-1")
        await handle.message("item", 0)
        await handle.evict()
        crowd = Crowd(nursery, handle)
        await crowd.add(1, 2)
        assert await handle.result() == [0, 1, 2]


async def test_control_and_looking_are_not_behind_senders(disk: Disk, autojump_clock: MockClock) -> None:
    """S48: control still works: state, history, wake, recover, eviction, cancellation; a known id returns at once."""
    async with disk.process(reader, mailbox_limit=1) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(reader, "r-1", [5, 5])
        crowd = Crowd(nursery, handle)
        await handle.message("item", "first", id="m-1")
        await crowd.add(*range(3))
        with trio.fail_after(1):
            await handle.message("item", "first again", id="m-1")
            await handle.message_nowait("item", "first again", id="m-1")
            assert await handle.get_state() is WorkflowState.SLEEPING
            assert await handle.get_output() is None
            assert [entry.path for entry in await handle.history()] == [("pause-0",)]
            await handle.recover()
            await handle.evict()
            await handle.cancel()
        await wait_all_tasks_blocked()
        assert crowd.refused == [WorkflowEndedError] * 3
        assert await handle.get_state() is WorkflowState.CANCELLED


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled", "cancelled dormant", "deleted", "left"])
async def test_the_wait_ends_with_the_workflow_and_with_the_supervisor(
    how: str, disk: Disk, autojump_clock: MockClock
) -> None:
    """S48, S45: whoever waits is told, and nothing of it is in the mailbox."""

    @workflow(name="deaf")
    async def deaf(ctx: Context, input: str) -> None:
        await ctx.sleep("pause", HOUR)
        if input == "failed":
            raise ValueError("no")

    error: type[Exception] = WorkflowEndedError
    async with trio.open_nursery() as nursery, disk.process(deaf, mailbox_limit=1) as supervisor:
        handle = await supervisor.spawn(deaf, "r-1", how)
        crowd = Crowd(nursery, handle)
        await crowd.add(*range(20))
        match how:
            case "completed" | "failed":
                await handle.wake()
            case "cancelled":
                await handle.cancel()
            case "cancelled dormant":
                await handle.evict()
                await handle.cancel()
            case "deleted":
                error = WorkflowNotFoundError
                await handle.evict()
                await disk.store.delete("r-1")
                with pytest.raises(WorkflowNotFoundError):
                    await handle.wake()
            case _:
                error = SupervisorClosedError
        await wait_all_tasks_blocked()
    assert (crowd.sent, crowd.refused) == ([0], [error] * 19)
    if how != "deleted":
        assert waiting(disk) == 1


async def test_who_comes_as_the_supervisor_leaves_is_refused_and_not_forgotten(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S48, S49: a sender that finds it full in the last moment does not hold the block open."""
    async with trio.open_nursery() as nursery:
        async with disk.process(reader, mailbox_limit=1) as supervisor:
            handle = await supervisor.spawn(reader, "r-1", [1])
            await handle.message("item", 0)
            await handle.evict()
            disk.store.delay_s = 0.1
            crowd = Crowd(nursery, handle)
            nursery.start_soon(crowd.add, 1)
            await trio.lowlevel.checkpoint()
        await trio.sleep(1)
    assert (crowd.sent, crowd.refused) == ([], [SupervisorClosedError])


async def test_what_a_races_loser_gives_back_may_exceed_the_limit_and_nobody_comes_in_before_there_is_room(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S48, S29: it was inside before, and goes back to its place."""

    @workflow(name="racer")
    async def racer(ctx: Context, input: None) -> list[Any]:
        async def loser(ctx: Context) -> None:
            await ctx.queue.next_batch("taken", names=["item"], count=2)
            await ctx.sleep("long", 2 * HOUR)

        async def winner(ctx: Context) -> None:
            await ctx.sleep("short", HOUR)

        await ctx.race("race", {"loser": loser, "winner": winner})
        await ctx.sleep("pause", HOUR)
        bodies: list[Any] = []
        for number in range(4):
            bodies += [message.body for message in await ctx.queue.next_batch(f"read-{number}", count=1)]
        return bodies

    async with disk.process(racer, mailbox_limit=2) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(racer, "r-1")
        crowd = Crowd(nursery, handle)
        await handle.message_nowait("other", "x")
        await crowd.add(0)  # read at once
        await crowd.add(1, name="other")
        await crowd.add(2)
        assert (crowd.sent, waiting(disk)) == ([0, 1], 2)
        await trio.sleep(HOUR + 1)
        assert (crowd.sent, waiting(disk)) == ([0, 1], 3)
        assert await handle.result() == ["x", 0, 1, 2]
        assert crowd.sent == [0, 1, 2]


async def test_the_limit_is_the_workflows_own_where_it_has_one(disk: Disk, autojump_clock: MockClock) -> None:
    """S48: `@workflow(mailbox_limit=)` before `open_supervisor(mailbox_limit=)` before 1,000."""

    @workflow(name="small", mailbox_limit=2)
    async def small(ctx: Context, input: None) -> None:
        await ctx.sleep("pause", HOUR)

    @workflow(name="other")
    async def other(ctx: Context, input: None) -> None:
        await ctx.sleep("pause", HOUR)

    async def fill(handle: WorkflowHandle) -> int:
        for number in range(2000):
            try:
                await handle.message_nowait("item", number)
            except MailboxFullError as error:
                return error.limit
        raise AssertionError("it is never full")

    async with disk.process(small, other, mailbox_limit=5) as supervisor:
        assert (await fill(await supervisor.spawn(small, "r-1")), waiting(disk, "r-1")) == (2, 2)
        assert (await fill(await supervisor.spawn(other, "r-2")), waiting(disk, "r-2")) == (5, 5)
    async with disk.process(small, other) as supervisor:
        assert (await fill(await supervisor.spawn(other, "r-3")), waiting(disk, "r-3")) == (1000, 1000)
        assert (await fill(await supervisor.get("r-1")), waiting(disk, "r-1")) == (2, 2)


@pytest.mark.parametrize("limit", [0, -1, 1.5, "10", True, None])
async def test_a_limit_that_is_none_is_refused(limit: Any, disk: Disk) -> None:
    with pytest.raises(InvalidArgumentError, match="mailbox_limit"):
        async with disk.process(reader, mailbox_limit=limit):
            raise AssertionError("it was accepted")
    if limit is not None:
        with pytest.raises(InvalidArgumentError, match="mailbox_limit"):
            workflow(name="x", mailbox_limit=limit)(reader.function)


async def test_ten_thousand_senders_wait_and_come_in_as_room_is_made(disk: Disk, autojump_clock: MockClock) -> None:
    """S48: each costs the same, however many wait, also where the workflow was dormant as they came."""
    count = 10_000
    read: set[int] = set()

    @workflow(name="drain")
    async def drain(ctx: Context, input: int) -> int:
        await ctx.sleep("pause", HOUR)

        async def body(ctx: Context, total: int) -> Continue[int] | Break[int]:
            messages = await ctx.queue.next_batch("read", count=1000)
            read.update(message.body for message in messages)
            total += len(messages)
            return Continue(total) if total < input else Break(total)

        return await ctx.loop("all", body, 0)

    async with disk.process(drain, mailbox_limit=500) as supervisor, trio.open_nursery() as nursery:
        handle = await supervisor.spawn(drain, "r-1", count)
        await handle.evict()
        sent: list[int] = []

        async def come(number: int) -> None:
            await handle.message("item", number)
            sent.append(number)

        for number in range(count):
            nursery.start_soon(come, number)
            if number == 0 or number % 100 == 99:
                await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked()
        await trio.sleep(HOUR)
        assert await handle.result() == count
        assert sorted(sent) == sorted(read) == list(range(count))
        assert len(disk.store.opens) <= 6


class Life:
    """Senders that are told what was sent, over any number of processes."""

    COUNT = 5

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.acknowledged: list[int] = []
        self.result: list[int] = []

    async def live(self) -> None:
        async with self.disk.process(reader, mailbox_limit=2) as supervisor, trio.open_nursery() as nursery:
            handle = await supervisor.spawn(reader, "r-1", [1] * self.COUNT)
            for number in range(self.COUNT):
                if number not in self.acknowledged:
                    nursery.start_soon(self._send, handle, number)
            for _ in range(self.COUNT + 1):
                await trio.sleep(HOUR + 1)
                self.disk.store.check()
                if "r-1" in self.disk.namespaces:
                    assert waiting(self.disk) <= 2
            self.result = await handle.result()

    async def _send(self, handle: WorkflowHandle, number: int) -> None:
        await handle.message("item", number, id=f"m-{number}")
        self.disk.store.check()
        self.acknowledged.append(number)

    def check(self) -> None:
        assert Counter(self.result) == Counter(range(self.COUNT)), "each once, however often it was sent"
        assert sorted(self.acknowledged) == list(range(self.COUNT))
        assert waiting(self.disk) == 0


@pytest.fixture
def make_disk(driver_kind: DriverKind, tmp_path: Path) -> Callable[[], Disk]:
    """Makes empty disks."""
    made: list[Disk] = []

    def make() -> Disk:
        made.append(Disk(driver_kind, tmp_path / str(len(made))))
        return made[-1]

    return make


async def test_a_death_at_every_write_loses_nothing_acknowledged_and_delivers_nothing_twice(
    make_disk: Callable[[], Disk], autojump_clock: MockClock
) -> None:
    """S48, S39: before and after every write while senders wait; explored equals counted."""
    life = Life(make_disk())
    with scheduled(1):
        await life.live()
    life.check()
    counted, explored = len(life.disk.store.written), 0
    assert counted >= 15
    for number in range(counted):
        for when in WHENS:
            life = Life(make_disk())
            life.disk.store.die_at = (number, when)
            try:
                with scheduled(1):
                    await life.live()
            except* (StorageError, SupervisorClosedError):
                pass
            assert life.disk.lives == 1, f"it did not die {when} write {number}"
            await life.live()
            life.check()
            explored += 1
    assert explored == 2 * counted, "explored equals counted"
