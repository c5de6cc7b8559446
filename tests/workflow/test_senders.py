"""A full mailbox, without a supervisor: who waits, who is refused, and that nothing is dropped."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import trio
from harness import Fault, FaultyDriver, MovableClock, Namespace, host
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import Batch, Driver, StorageError, layout
from perdure.workflow import (
    Context,
    MailboxFullError,
    RunMode,
    WorkflowEndedError,
    WorkflowHandle,
    run_workflow,
    send_message,
    start_workflow,
    workflow,
)


@workflow(name="reader", mailbox_limit=2)
async def reader(ctx: Context, counts: list[int]) -> list[Any]:
    bodies: list[Any] = []
    for number, count in enumerate(counts):
        await ctx.sleep(f"pause-{number}", 60)
        bodies += [message.body for message in await ctx.queue.next_batch(f"read-{number}", count=count)]
    return bodies


async def mail(namespace: Namespace) -> int:
    return len(await (await namespace.driver()).list(layout.MAILBOX_PREFIX))


class Sent:
    """What became of senders that run besides."""

    def __init__(self, nursery: trio.Nursery, handle: WorkflowHandle) -> None:
        self._nursery = nursery
        self._handle = handle
        self.bodies: list[Any] = []
        self.errors: list[type[Exception]] = []

    async def send(self, *bodies: Any) -> None:
        for body in bodies:
            self._nursery.start_soon(self._send, body)
            await wait_all_tasks_blocked()

    async def _send(self, body: Any) -> None:
        try:
            await self._handle.message("item", body)
        except Exception as error:
            self.errors.append(type(error))
        else:
            self.bodies.append(body)


class TestNothingRuns:
    async def test_the_message_past_the_limit_is_refused_and_the_next_fits_once_some_were_read(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S48: nobody would make room, so nobody waits; over restarts, and a known id is no further message."""
        async with host(namespace, "yield") as process:
            driver = await namespace.driver()
            for number in range(3):
                await send_message(driver, "item", number, id=f"m-{number}", mailbox_limit=3, clock=process.clock)
            driver = await namespace.restart()
            before = await namespace.dump()
            with pytest.raises(MailboxFullError) as caught:
                await send_message(driver, "item", 3, id="m-3", mailbox_limit=3, clock=process.clock)
            await send_message(driver, "item", 2, id="m-2", mailbox_limit=3, clock=process.clock)
            assert await namespace.dump() == before
            assert (caught.value.limit, "is full" in str(caught.value)) == (3, True)
            again = pickle.loads(pickle.dumps(caught.value))
            assert (again.limit, again.workflow_id) == (caught.value.limit, caught.value.workflow_id)

            async def one(ctx: Context, _: Any) -> Any:
                return [(await ctx.queue.next(f"read-{number}")).body for number in range(4)]

            async def first(ctx: Context, _: Any) -> Any:
                await ctx.queue.next("read-0")
                await ctx.sleep("pause", 60)

            await process.stop(first)
            await send_message(driver, "item", 3, id="m-3", mailbox_limit=3, clock=process.clock)
            with pytest.raises(MailboxFullError):
                await send_message(driver, "item", 4, mailbox_limit=3, clock=process.clock)

    async def test_many_tasks_that_send_at_once_do_not_exceed_it_together(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S48: what is on its way takes up room as well."""
        driver = await namespace.driver()
        refused: list[int] = []

        async def send(number: int) -> None:
            try:
                await send_message(driver, "item", number, mailbox_limit=5, clock=MovableClock())
            except MailboxFullError:
                refused.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(send, number)
        assert (await mail(namespace), len(refused)) == (5, 7)


class TestHandle:
    async def test_senders_wait_while_the_workflow_runs_and_are_refused_once_nobody_reads(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S48: in yield mode the run is over as soon as it waits; in live mode the reads let the senders in."""
        async with trio.open_nursery() as nursery:
            handle = await start_workflow(
                nursery, "w-1", reader, [2, 1, 2], await namespace.driver(), mode=mode, clock=MovableClock()
            )
            await wait_all_tasks_blocked()
            sent = Sent(nursery, handle)
            await sent.send(*range(5))
            with pytest.raises(MailboxFullError) as caught:
                await handle.message_nowait("item", "late")
            assert (caught.value.workflow_id, caught.value.limit) == ("w-1", 2)
            if mode == "yield":
                assert (sent.bodies, sent.errors) == ([0, 1], [MailboxFullError] * 3)
            else:
                assert (sorted(sent.bodies), sent.errors) == ([0, 1], [])
                await trio.sleep(61)
                assert sorted(sent.bodies) == [0, 1, 2, 3]
                assert await mail(namespace) == 2
                assert await handle.result() == [0, 1, 2, 3, 4]
                assert (sorted(sent.bodies), sent.errors) == ([0, 1, 2, 3, 4], [])
            nursery.cancel_scope.cancel()
        await namespace.close()

    @pytest.mark.parametrize("how", ["evicted", "cancelled", "failed"])
    async def test_the_wait_is_over_with_the_run(
        self, how: str, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S48: an eviction leaves a workflow that takes messages, later; an end does not."""

        @workflow(name="deaf", mailbox_limit=1)
        async def deaf(ctx: Context, _: None) -> None:
            await ctx.sleep("pause", 60)
            raise ValueError("no")

        async with trio.open_nursery() as nursery:
            handle = await start_workflow(
                nursery, "w-1", deaf, None, await namespace.driver(), mode="live", clock=MovableClock()
            )
            sent = Sent(nursery, handle)
            await sent.send(*range(4))
            if how == "evicted":
                await handle.evict()
            elif how == "cancelled":
                await handle.cancel()
            else:
                await handle.wake()
            await wait_all_tasks_blocked()
            error = MailboxFullError if how == "evicted" else WorkflowEndedError
            assert (sent.bodies, sent.errors) == ([0], [error] * 3)
            with pytest.raises(error):
                await handle.message("item", "late")
            assert await mail(namespace) == 1
        await namespace.close()

    @pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
    async def test_a_storage_error_as_the_room_is_made_drops_and_repeats_nothing(
        self, fault: Fault, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S48, S21: whoever waited is told that it did not send; what was acknowledged is read once."""
        async with trio.open_nursery() as nursery:

            def is_due(batch: Batch) -> bool:
                return any(key.startswith(layout.MAILBOX_PREFIX) for key in batch.deletes)

            driver: Driver = FaultyDriver(await namespace.driver(), fault, is_due)  # type: ignore[assignment]
            handle = await start_workflow(nursery, "w-1", reader, [2, 2], driver, mode="live", clock=MovableClock())
            sent = Sent(nursery, handle)
            await sent.send(*range(4))
            await trio.sleep(61)
            with pytest.raises(StorageError):
                await handle.result()
            assert (sent.bodies, sent.errors) == ([0, 1], [MailboxFullError] * 2)
        async with host(namespace, "live") as process:
            await process.restart()
            await process.stop(reader, [2, 2])
            assert process.handle is not None
            await process.send("item", 2) if fault == "applied" else None
            result = await process.finish(reader, [2, 2]) if fault == "applied" else None
            read = await namespace.entries()
            if fault == "applied":
                assert result == [0, 1, 2]
            else:
                assert ("read-0:0",) in read

    async def test_a_waiting_sender_with_a_remembered_id_delivers_nothing_more(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S48, S27: two senders of one id wait; one message, and both are told."""
        async with trio.open_nursery() as nursery:
            handle = await start_workflow(
                nursery, "w-1", reader, [2, 2, 2], await namespace.driver(), mode="live", clock=MovableClock()
            )
            await handle.message("item", 0)
            await handle.message("item", 1)
            told: list[str] = []

            async def send(message_id: str) -> None:
                await handle.message("item", message_id, id=message_id)
                told.append(message_id)

            for message_id in ("a", "a", "b", "a", "b"):
                nursery.start_soon(send, message_id)
                await wait_all_tasks_blocked()
            await trio.sleep(61)
            assert sorted(told) == ["a", "a", "a", "b", "b"]
            await trio.sleep(61)
            await handle.message("item", "end")
            assert await handle.result() == [0, 1, "a", "b", "end"]
        await namespace.close()


async def test_a_limit_below_what_waits_refuses_until_enough_was_read(
    namespace: Namespace, autojump_clock: MockClock
) -> None:
    """S48: code with a smaller limit drops nothing of what the older code let in."""
    async with host(namespace, "live") as process:
        for number in range(5):
            await process.send("item", number)
        await process.stop(reader, [3, 1, 2])
        assert process.handle is not None
        for _ in range(3):
            with pytest.raises(MailboxFullError):
                await process.handle.message_nowait("item", "late")
            if await mail(namespace) == 2:
                break
            await process.advance(61)
        await process.advance(61)
        await process.handle.message_nowait("item", 5)
        assert await process.finish(reader, [3, 1, 2]) == [0, 1, 2, 3, 4, 5]


async def test_run_workflow_reads_what_waits_whatever_the_limit(
    namespace: Namespace, autojump_clock: MockClock
) -> None:
    """S48: the limit is for senders; what is there is read."""
    driver = await namespace.driver()
    clock = MovableClock()
    for number in range(6):
        await send_message(driver, "item", number, mailbox_limit=6, clock=clock)
    result = await run_workflow("w-1", reader, [6], driver, mode="live", clock=clock)
    assert result.output == list(range(6))
