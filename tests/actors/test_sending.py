"""`ctx.send` under a supervisor: once, in order, refused, or waited for.

Deaths at every write are in `test_family_crashes.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import hosting
from perdure.storage import StorageError, layout
from perdure.workflow import (
    Context,
    HostRequiredError,
    StepCriticalError,
    WorkflowFailedError,
    WorkflowState,
    load_snapshot,
    run_workflow,
    workflow,
)


@workflow(name="reader")
async def reader(ctx: Context, count: int) -> list[Any]:
    return [(await ctx.queue.next(f"read-{number}", names=["item"])).body for number in range(count)]


@workflow(name="sender")
async def sender(ctx: Context, bodies: list[Any]) -> str:
    for number, body in enumerate(bodies):
        await ctx.send(f"send-{number}", "r", "item", body)
    return "sent"


class TestSend:
    async def test_messages_arrive_once_and_in_order(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(reader, sender) as supervisor:
            target = await supervisor.spawn(reader, "r", 5)
            handle = await supervisor.spawn(sender, "s", [1, "two", None, {"three": 3}, [4]])
            assert await handle.result() == "sent"
            assert await target.result() == [1, "two", None, {"three": 3}, [4]]

    async def test_a_dormant_target_is_brought_in(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(reader, sender) as supervisor:
            target = await supervisor.spawn(reader, "r", 1)
            await trio.sleep(1)
            await target.evict()
            await supervisor.spawn(sender, "s", ["x"])
            assert await target.result() == ["x"]

    async def test_a_replayed_send_sends_nothing(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="again")
        async def again(ctx: Context, input: Any) -> None:
            await ctx.send("send", "r", "item", "only")
            await ctx.sleep("nap", 100)

        async with disk.process(reader, again) as supervisor:
            target = await supervisor.spawn(reader, "r", 2)
            handle = await supervisor.spawn(again, "s", None)
            await trio.sleep(1)
            for _ in range(3):
                await handle.evict()
                await handle.wake()
            await handle.result()
            await target.message("item", "last")
            assert await target.result() == ["only", "last"]

    async def test_a_workflow_may_send_to_itself(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="selfish")
        async def selfish(ctx: Context, input: Any) -> Any:
            await ctx.send("send", ctx.workflow_id, "note", "to myself")
            return (await ctx.queue.next("read")).body

        async with disk.process(selfish) as supervisor:
            assert await (await supervisor.spawn(selfish, "s", None)).result() == "to myself"


class TestRefusal:
    @pytest.mark.parametrize(("state", "name"), [("unknown", "WorkflowNotFoundError"), ("ended", "WorkflowEndedError")])
    async def test_no_such_workflow_or_an_ended_one_is_the_same_failure_on_every_run(
        self, disk: Disk, autojump_clock: MockClock, state: str, name: str
    ) -> None:
        seen: list[Any] = []

        @workflow(name="caught")
        async def caught(ctx: Context, input: Any) -> int:
            try:
                await ctx.send("send", "r", "item", 1)
            except StepCriticalError as error:
                seen.append((error.error, error.kind, error.step_name, str(error), error.entry_id))
            await ctx.sleep("nap", 100)
            return len(seen)

        async with disk.process(reader, caught) as supervisor:
            if state == "ended":
                await (await supervisor.spawn(reader, "r", 0)).result()
            handle = await supervisor.spawn(caught, "s", None)
            await trio.sleep(1)
            await handle.evict()
            assert await handle.result() == 2
        assert seen[0] == seen[1]
        assert seen[0][0].name == name

    async def test_recovered_it_is_sent_once_the_target_is_there(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(reader, sender) as supervisor:
            handle = await supervisor.spawn(sender, "s", ["x"])
            with pytest.raises(WorkflowFailedError) as failed:
                await handle.result()
            assert failed.value.name == "WorkflowNotFoundError"
            target = await supervisor.spawn(reader, "r", 1)
            await handle.recover()
            assert await handle.result() == "sent"
            assert await target.result() == ["x"]

    async def test_a_body_that_cannot_be_stored(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="odd")
        async def odd(ctx: Context, input: Any) -> str:
            try:
                await ctx.send("send", "r", "item", object())
            except StepCriticalError as error:
                return error.error.name
            return "sent"

        async with disk.process(odd) as supervisor:
            assert await (await supervisor.spawn(odd, "s", None)).result() == "ValueEncodeError"

    async def test_without_a_supervisor_it_says_what_to_do(self, autojump_clock: MockClock) -> None:
        from perdure.storage import MemoryDriver

        driver = MemoryDriver()
        with pytest.raises(HostRequiredError, match="open_supervisor"):
            await run_workflow("s", sender, ["x"], driver)
        assert (await load_snapshot(driver)).entries == ()


class TestTrouble:
    async def test_the_storage_of_the_target_is_not_the_senders_failure(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """The sender waits, durably, and tries again."""
        async with disk.process(reader, sender) as supervisor:
            target = await supervisor.spawn(reader, "r", 1)
            await trio.sleep(1)
            await target.evict()
            opened, original = 0, disk.store.open_driver

            async def open_driver(workflow_id: str, *, create: bool = False) -> Any:
                nonlocal opened
                if workflow_id == "r":
                    opened += 1
                    if opened <= 3:
                        raise StorageError("not now")
                return await original(workflow_id, create=create)

            disk.store.open_driver = open_driver  # type: ignore[method-assign]
            handle = await supervisor.spawn(sender, "s", ["x"])
            assert await handle.result() == "sent"
            assert await target.result() == ["x"]
            assert opened > 3


class TestFull:
    async def test_a_full_mailbox_is_waited_for_and_nothing_is_lost_or_reordered(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S48: the sender is parked, and may leave memory; with room for one workflow only as well (S47)."""

        @workflow(name="slow")
        async def slow(ctx: Context, count: int) -> list[Any]:
            bodies: list[Any] = []
            for number in range(count):
                await ctx.sleep(f"work-{number}", 50)
                bodies.append((await ctx.queue.next(f"read-{number}")).body)
            return bodies

        for max_live in (1, 10):
            async with disk.process(slow, sender, mailbox_limit=2, max_live=max_live) as supervisor:
                target = await supervisor.spawn(slow, "r", 8)
                handle = await supervisor.spawn(sender, "s", list(range(8)))
                await trio.sleep(20)
                assert await handle.get_state() is WorkflowState.SLEEPING
                assert len(await target.undelivered()) == 2
                await handle.evict()
                assert await handle.result() == "sent"
                assert await target.result() == list(range(8))
            for workflow_id in ("r", "s"):
                await disk.next_store().acquire()
                await disk.store.delete(workflow_id)
                await disk.store.aclose()

    async def test_it_is_told_at_once_when_there_is_room(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S48"""
        sent_at: dict[int, float] = {}

        @workflow(name="timed")
        async def timed(ctx: Context, input: Any) -> None:
            for number in range(3):
                await ctx.send(f"send-{number}", "r", "item", number)
                sent_at.setdefault(number, trio.current_time())

        @workflow(name="later")
        async def later(ctx: Context, input: Any) -> Any:
            await ctx.sleep("nap", 1000)
            return [(await ctx.queue.next(f"read-{number}")).body for number in range(3)]

        async with disk.process(timed, later, mailbox_limit=2) as supervisor:
            began = trio.current_time()
            target = await supervisor.spawn(later, "r", None)
            await supervisor.spawn(timed, "s", None)
            assert await target.result() == [0, 1, 2]
        assert sent_at[1] - began < 1
        assert 1000 <= sent_at[2] - began < 1000.5

    async def test_senders_of_both_kinds_get_their_turn(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S48: those outside of workflows do not keep workflows waiting for ever, nor the other way round."""

        @workflow(name="reads")
        async def reads(ctx: Context, count: int) -> Any:
            await ctx.sleep("nap", 10)
            return [(await ctx.queue.next(f"read-{number}")).body for number in range(count)]

        async with disk.process(reads, sender, mailbox_limit=1) as supervisor:
            target = await supervisor.spawn(reads, "r", 16)
            for number in range(2):
                await supervisor.spawn(sender, f"s-{number}", [f"{number}-{each}" for each in range(4)])
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(target.message, "item", f"outside-{number}")
            bodies = await target.result()
        assert sorted(bodies) == sorted(
            [f"{number}-{each}" for number in range(2) for each in range(4)] + [f"outside-{n}" for n in range(8)]
        )
        for number in range(2):
            own = [body for body in bodies if body.startswith(f"{number}-")]
            assert own == sorted(own)

    @pytest.mark.parametrize("is_evicted", [False, True])
    async def test_room_that_its_workflow_does_not_take_goes_to_a_sender_outside(
        self, disk: Disk, autojump_clock: MockClock, is_evicted: bool
    ) -> None:
        """S48: the workflow whose turn it is gave up; by the time the other's turn comes, the target has left memory."""

        @workflow(name="naps")
        async def naps(ctx: Context, input: Any) -> Any:
            await ctx.sleep("nap", 20)
            await ctx.queue.next("read")
            return (await ctx.queue.next("again")).body

        @workflow(name="raced")
        async def raced(ctx: Context, input: Any) -> None:
            async def send(ctx: Context) -> None:
                await ctx.send("send", "r", "item", "never")

            async def give_up(ctx: Context) -> None:
                await ctx.sleep("soon", 5)

            await ctx.race("race", {"send": send, "give up": give_up})
            await ctx.sleep("on", 1e6)

        idle_timeout = None if is_evicted else 0.5
        async with disk.process(naps, raced, mailbox_limit=1, idle_timeout=idle_timeout) as supervisor:
            target = await supervisor.spawn(naps, "r")
            await target.message("item", "first")
            await supervisor.spawn(raced, "s")
            await trio.sleep(6)
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(target.message, "item", "outside")
                if is_evicted:
                    await trio.sleep(14.5)
                    await target.evict()
                nursery.cancel_scope.deadline = began + 60
            assert 14 < trio.current_time() - began < 17
            assert await target.result() == "outside"

    async def test_room_goes_to_a_sender_outside_where_the_target_is_in_memory(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S48: the workflow whose turn it is gave up, and nothing else happens to the target."""

        @workflow(name="naps")
        async def naps(ctx: Context, input: Any) -> Any:
            await ctx.sleep("nap", 20)
            await ctx.queue.next("read", names=["item"])
            await ctx.queue.next("end", names=["end"])

        @workflow(name="raced")
        async def raced(ctx: Context, input: Any) -> None:
            async def send(ctx: Context) -> None:
                await ctx.send("send", "r", "item", "never")

            async def give_up(ctx: Context) -> None:
                await ctx.sleep("soon", 5)

            await ctx.race("race", {"send": send, "give up": give_up})
            await ctx.sleep("on", 1e6)

        async with disk.process(naps, raced, mailbox_limit=1, idle_timeout=None) as supervisor:
            target = await supervisor.spawn(naps, "r")
            await target.message("item", "first")
            await supervisor.spawn(raced, "s")
            await trio.sleep(6)
            began = trio.current_time()
            with trio.fail_after(60):
                await target.message("item", "outside")
            assert 14 < trio.current_time() - began < 16

    @pytest.mark.parametrize("end", ["cancelled", "failed"])
    async def test_a_sender_that_has_ended_takes_nobodys_turn(
        self, disk: Disk, autojump_clock: MockClock, end: str
    ) -> None:
        """S45, S48: the next workflow is told of the room at once, and so is a sender outside."""

        @workflow(name="naps")
        async def naps(ctx: Context, input: Any) -> Any:
            await ctx.sleep("nap", 1000)
            return [(await ctx.queue.next(f"read-{number}")).body for number in range(3)]

        @workflow(name="dies")
        async def dies(ctx: Context, input: Any) -> None:
            await ctx.send("send", "r", "item", "never")

        async with disk.process(naps, dies, sender, mailbox_limit=1) as supervisor:
            began = trio.current_time()
            target = await supervisor.spawn(naps, "r")
            await target.message("item", "first")
            first = await supervisor.spawn(dies, "s-0", deadline=5 if end == "failed" else None)
            await trio.sleep(1)
            last = await supervisor.spawn(sender, "s-1", ["second"])
            await trio.sleep(1)
            if end == "cancelled":
                await first.cancel()
            else:
                with pytest.raises(WorkflowFailedError):
                    await first.result()
            assert await last.result() == "sent"
            assert 1000 <= trio.current_time() - began < 1000.5
            await target.message("item", "third")
            assert await target.result() == ["first", "second", "third"]

    async def test_a_target_that_ends_refuses_whoever_waits(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S48"""
        async with disk.process(reader, sender, mailbox_limit=1) as supervisor:
            target = await supervisor.spawn(reader, "r", 1, start_at=1e6)
            handle = await supervisor.spawn(sender, "s", [1, 2])
            await trio.sleep(5)
            await target.cancel()
            began = trio.current_time()
            with pytest.raises(WorkflowFailedError) as failed:
                await handle.result()
            assert failed.value.name == "WorkflowEndedError"
            assert trio.current_time() - began < 0.5


class TestMemory:
    async def test_senders_that_have_ended_are_forgotten_and_others_are_not(
        self, disk: Disk, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S27: what a target remembers is bounded by the senders that live."""
        monkeypatch.setattr(hosting, "SENDERS_BETWEEN", 10)

        @workflow(name="lives")
        async def lives(ctx: Context, input: Any) -> None:
            await ctx.send("send", "r", "item", "of one that lives")
            await ctx.sleep("nap", 10_000)

        @workflow(name="fails")
        async def fails(ctx: Context, input: Any) -> None:
            await ctx.send("send", "r", "item", "of one that fails")
            raise ValueError("no good")

        async with disk.process(reader, sender, lives, fails) as supervisor:
            target = await supervisor.spawn(reader, "r", 38)
            await supervisor.spawn(lives, "lives", None)
            with pytest.raises(WorkflowFailedError):
                await (await supervisor.spawn(fails, "fails", None)).result()
            for number in range(35):
                await (await supervisor.spawn(sender, f"s-{number}", [number])).result()
                await trio.sleep(1)
            remembered = {
                layout.parse_sent_key(key)[0] for key in disk.namespaces["r"] if key.startswith(layout.SENT_PREFIX)
            }
            assert {"lives", "fails"} < remembered
            assert len(remembered) <= 12
            await target.message("item", "last")
            assert len(await target.result()) == 38
