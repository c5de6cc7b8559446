"""`ctx.queue`: which messages a read takes, when it gives up, and that ended waits leave nothing behind."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from harness import DriverKind, Namespace, host
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import Driver, MemoryDriver, layout
from perdure.storage.sqlite import SqliteDriver
from perdure.workflow import (
    Break,
    Context,
    Continue,
    Message,
    QueueTimeoutError,
    RunMode,
    TrioClock,
    WorkflowFailedError,
    WorkflowState,
    load_snapshot,
    run_workflow,
    send_message,
    start_workflow,
)

CLOCK_MS = 1_700_000_000_000


async def work(value: Any = "done") -> Any:
    return value


async def history(namespace: Namespace) -> dict[Any, Any]:
    return {entry.path[-1]: entry.data for entry in (await namespace.snapshot()).entries}


class TestWhichMessages:
    async def test_messages_come_in_the_order_in_which_they_were_sent(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26: FIFO, over a restart and over names when any will do."""

        async def reading(ctx: Context, _: Any) -> list[Any]:
            return [(await ctx.queue.next(f"read-{number}")).body for number in range(6)]

        async with host(namespace, mode) as process:
            for number in range(3):
                await process.send("ab"[number % 2], number)
            await process.stop(reading)
            await process.restart()
            for number in range(3, 6):
                await process.send("ab"[number % 2], number)
            assert await process.finish(reading) == list(range(6))

    async def test_a_read_takes_any_of_its_names_and_leaves_the_others(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26: any of several names; what it does not name waits for others, in its place."""

        async def reading(ctx: Context, _: Any) -> list[Any]:
            named = [await ctx.queue.next(f"named-{number}", names=["b", "c"]) for number in range(2)]
            rest = [await ctx.queue.next(f"rest-{number}") for number in range(2)]
            return [[message.name, message.body] for message in (*named, *rest)]

        async with host(namespace, mode) as process:
            for number, name in enumerate("aabc"):
                await process.send(name, number)
            assert await process.finish(reading) == [["b", 2], ["c", 3], ["a", 0], ["a", 1]]
        assert (await history(namespace))["named-0:count"] == {"name": "b|c:count", "body": 1}
        assert (await history(namespace))["rest-0:count"] == {"name": "*:count", "body": 1}
        await namespace.close()

    async def test_a_message_of_another_name_does_not_end_the_wait(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26: a wait for "x" is not ended by "y", and "y" is there for whoever asks."""

        async def reading(ctx: Context, _: Any) -> list[Any]:
            first = await ctx.queue.next("first", names=["x"])
            second = await ctx.queue.next("second", names=["y"])
            return [first.body, second.body]

        async with host(namespace, mode) as process:
            await process.stop(reading)
            await process.send("y", 1)
            stopped = await process.stop(reading)
            assert stopped.waiting_for_messages == ("x",)
            await process.send("x", 2)
            assert await process.finish(reading) == [2, 1]

    @pytest.mark.parametrize(("sent", "count", "taken"), [(0, 3, 1), (2, 3, 2), (3, 3, 3), (5, 3, 3), (5, 1, 1)])
    async def test_a_batch_takes_what_is_there_up_to_its_count(
        self, sent: int, count: int, taken: int, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26: count; it waits for the first message only."""

        async def reading(ctx: Context, _: Any) -> list[Any]:
            batch = await ctx.queue.next_batch("batch", count=count)
            rest = await ctx.queue.next_batch("rest", count=100, timeout=0)
            return [[message.body for message in messages] for messages in (batch, rest)]

        async with host(namespace, mode) as process:
            for number in range(sent):
                await process.send("go", number)
            stopped = await process.stop(reading)
            if sent == 0:
                assert stopped.state is WorkflowState.SLEEPING
                await process.send("go", 0)
            everything = list(range(max(sent, 1)))
            assert await process.finish(reading) == [everything[:taken], everything[taken:]]
            await process.restart()
            assert await process.finish(reading) == [everything[:taken], everything[taken:]]
        assert (await history(namespace))["batch:count"]["body"] == taken
        await namespace.close()

    async def test_a_message_tells_id_name_body_and_time_alike_on_replay(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S8: a message's fields, first run and replay."""
        seen: list[Message] = []

        async def reading(ctx: Context, _: Any) -> None:
            seen.append(await ctx.queue.next("first"))
            seen.extend(await ctx.queue.next_batch("batch"))
            await ctx.queue.next("gate", names=["gate"])

        async with host(namespace, mode) as process:
            await process.advance(1.5)
            await process.send("named", {"a": (1, b"x")}, id="m-1")
            await process.send("named", None)
            await process.stop(reading)
            await process.restart()
            await process.stop(reading)
        assert seen[:2] == seen[2:]
        assert seen[0] == Message("m-1", "named", {"a": [1, b"x"]}, CLOCK_MS / 1000 + 1.5)
        assert seen[1].body is None
        assert seen[1].id > ""
        await namespace.close()

    async def test_reading_a_message_takes_it_out_of_the_mailbox_in_the_batch_that_records_it(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27: consumption and record are one batch."""

        key = layout.message_key(0)
        on_return: list[bool] = []

        async def reading(ctx: Context, _: Any) -> Any:
            message = await ctx.queue.next("read", timeout=60)
            on_return.append(key in await namespace.dump())
            return message.body

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            await process.finish(reading)
            assert on_return == [False], "durable when the read returns"
            driver = await namespace.driver()
            (consuming,) = (batch for batch in driver.batches if key in batch.deletes)
            put = [key for key, _ in consuming.puts]
            assert len([key for key in put if key.startswith(layout.HISTORY_PREFIX)]) == 3
        stored = await history(namespace)
        assert set(stored) == {"read:0", "read:count", "read:deadline"}
        assert stored["read:deadline"]["state"] == "interrupted"
        await namespace.close()


class TestTimeout:
    async def test_a_read_gives_up_at_its_deadline_and_so_on_every_later_run(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26: a deadline; the same class and data on the first run and on replay."""
        seen: list[tuple[Any, ...]] = []

        async def reading(ctx: Context, _: Any) -> Any:
            try:
                await ctx.queue.next("read", names=["a", "b"], timeout=60)
            except QueueTimeoutError as error:
                seen.append((type(error), error.name, error.names, str(error)))
            seen.append(tuple(await ctx.queue.next_batch("batch", timeout=30)))
            return (await ctx.queue.next("gate")).body

        async with host(namespace, mode) as process:
            stopped = await process.stop(reading)
            assert stopped.sleep_until == CLOCK_MS / 1000 + 60
            for _ in range(4):
                await process.advance(30)
                await process.stop(reading)
            await process.restart()
            seen.clear()
            await process.stop(reading)
            (kind, name, names, text), batch = seen
            assert kind is QueueTimeoutError
            assert (name, names, batch) == ("read", ("a", "b"), ())
            assert "'a' or 'b'" in text
            await process.send("gate", "late")
            assert await process.finish(reading) == "late"
        assert seen[-2] == (kind, name, names, text)
        stored = await history(namespace)
        assert stored["read:deadline"] == {"deadline_ms": CLOCK_MS + 60_000, "state": "completed"}
        assert stored["read:count"]["body"] == 0
        await namespace.close()

    async def test_a_timeout_that_is_not_caught_fails_the_workflow(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async def reading(ctx: Context, _: Any) -> Any:
            await ctx.queue.next("read", timeout=60)

        async with host(namespace, mode) as process:
            with pytest.raises(WorkflowFailedError) as caught:
                await process.finish(reading)
        assert caught.value.name == "QueueTimeoutError"
        await namespace.close()

    @pytest.mark.parametrize("when", ["before", "after"])
    async def test_the_deadline_is_that_of_the_first_run(
        self, when: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26: the deadline survives a restart, before and after it passed, and whatever the code says then."""

        def reading(timeout: float | None) -> Any:
            async def workflow(ctx: Context, _: Any) -> Any:
                await ctx.queue.next_batch("read", timeout=timeout)
                return ctx.workflow_id

            return workflow

        async with host(namespace, mode) as process:
            await process.stop(reading(60))
            await process.restart()
            await process.advance(20 if when == "before" else 100)
            stopped = await process.stop(reading(7200))
            if when == "before":
                assert stopped.sleep_until == CLOCK_MS / 1000 + 60
                await process.restart()
                stopped = await process.stop(reading(None))
                assert stopped.sleep_until == CLOCK_MS / 1000 + 60
            else:
                assert stopped.state is WorkflowState.COMPLETED
            await process.finish(reading(None))
            assert process.clock.now_ms() <= CLOCK_MS + 100_001

    async def test_a_message_beats_the_timeout(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26: a message that is there when the deadline has passed is taken all the same."""

        async def reading(ctx: Context, _: Any) -> Any:
            return (await ctx.queue.next("read", timeout=60)).body

        async with host(namespace, mode) as process:
            await process.stop(reading)
            await process.restart()
            await process.advance(59)
            await process.send("go", "in time")
            await process.advance(3600)
            assert await process.finish(reading) == "in time"
        assert (await history(namespace))["read:deadline"]["state"] == "interrupted"
        await namespace.close()

    async def test_a_read_that_does_not_wait_takes_what_is_there(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26: with a timeout of 0 a message still beats the timeout."""

        async def reading(ctx: Context, _: Any) -> list[Any]:
            first = await ctx.queue.next("first", timeout=0)
            return [first.body, await ctx.queue.next_batch("second", timeout=0)]

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            stopped = await process.stop(reading)
        assert stopped.state is WorkflowState.COMPLETED
        assert stopped.output == [1, []]
        await namespace.close()

    async def test_a_read_that_timed_out_does_not_eat_the_next_message(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S26: a timed-out wait does not eat the next message, on this run or on a later one."""

        async def reading(ctx: Context, _: Any) -> list[Any]:
            early = await ctx.queue.next_batch("early", timeout=60)
            return [early, (await ctx.queue.next("late")).body]

        async with host(namespace, mode) as process:
            await process.stop(reading)
            await process.advance(61)
            await process.stop(reading)
            await process.send("go", "kept")
            await process.restart()
            assert await process.finish(reading) == [[], "kept"]
            await process.restart()
            assert await process.finish(reading) == [[], "kept"]

    async def test_wake_leaves_the_deadline_of_a_read_alone(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S24: `wake()` of a workflow that does not sleep is harmless; deadlines of queue reads stay."""

        async def reading(ctx: Context, _: Any) -> list[Any]:
            return await ctx.queue.next_batch("read", timeout=60)

        async with host(namespace, mode) as process:
            await process.stop(reading)
            stored = await namespace.dump()
            await process.control("wake")
            assert await namespace.dump() == stored
            assert (await process.stop(reading)).sleep_until == CLOCK_MS / 1000 + 60
            assert await process.finish(reading) == []


class TestManyWaits:
    COUNT = 10_000
    WARM = 1_000

    async def test_ten_thousand_waits_that_end_by_message_leave_nothing_behind(
        self, driver_kind: DriverKind, tmp_path: Path, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S25: 10,000 waits with a timeout that end by message: waiters, timers, tasks and memory are where they were."""
        driver: Driver = MemoryDriver()
        if driver_kind == "sqlite":
            path = tmp_path / "w-1.sqlite"
            driver = await SqliteDriver.open(path, create=True, durability="normal", commit_in="inline")
        clock = TrioClock()
        begun = 0

        async def body(ctx: Context, number: int) -> Continue[int] | Break[int]:
            nonlocal begun
            begun = number + 1
            message = await ctx.queue.next("read", names=["go"], timeout=3600)
            assert message.body == number
            return Break(number) if number == self.COUNT - 1 else Continue(number + 1)

        async def reading(ctx: Context, _: Any) -> Any:
            return await ctx.loop("loop", body, 0, history_prune_interval=1, history_size=0)

        used: list[tuple[Any, ...]] = []
        blocks: list[int] = []
        async with trio.open_nursery() as nursery:
            handle: Any = None
            if mode == "live":
                handle = await start_workflow(nursery, "w-1", reading, None, driver, clock=clock)
                await wait_all_tasks_blocked()
            for number in range(self.COUNT):
                if mode == "yield":
                    stopped = await run_workflow("w-1", reading, None, driver, clock=clock)
                    assert stopped.waiting_for_messages == ("go",)
                else:
                    while len(handle._activation._parked) == 0 or begun == number:
                        await trio.lowlevel.checkpoint()
                assert begun == number + 1, "it waits before the message comes"
                if number in (self.WARM, self.COUNT - 1):
                    await wait_all_tasks_blocked()
                    used.append(self._in_use(handle))
                    gc.collect()
                    blocks.append(sys.getallocatedblocks())
                if handle is not None:
                    await handle.message("go", number)
                else:
                    await send_message(driver, "go", number, clock=clock)
            last = await run_workflow("w-1", reading, None, driver, clock=clock) if handle is None else None
            assert (last.output if last is not None else await handle.result()) == self.COUNT - 1
            left = {entry.path[-1] for entry in (await load_snapshot(driver)).entries}
            await driver.aclose()
        assert trio.current_time() < 3600, "no wait ended by its timeout"
        assert used[0] == used[1]
        assert blocks[1] - blocks[0] < self.COUNT // 20, "memory does not grow with waits"
        assert left == {"loop"}

    def _in_use(self, handle: Any) -> tuple[Any, ...]:
        runner: Any = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        runner.deadlines._prune()  # Trio forgets ended timers now and then only
        statistics = trio.lowlevel.current_statistics()
        used = [statistics.tasks_living, statistics.tasks_runnable, statistics.run_sync_soon_queue_size]
        used.append(len(runner.deadlines._heap))
        if handle is not None:
            activation = handle._activation
            history = activation.history
            used += [len(activation._parked), len(activation.mailbox), len(activation.mailbox._by_name)]
            used += [len(history.open_sleeps), len(history.names), len(list(history.root.walk()))]
        return tuple(used)
