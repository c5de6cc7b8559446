"""Order of durability: what is told to the outside, or runs, after what it rests on is on disk (promise 3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import trio
from harness import FaultyDriver, MovableClock, Namespace, SlowDriver, host
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import Driver, StorageError, layout
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    DuplicateNameError,
    HistoryDivergedError,
    MisuseError,
    RunMode,
    StepCriticalError,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowState,
    current_step,
    run_workflow,
    send_message,
    start_workflow,
)


async def work() -> int:
    return 42


async def test_a_cancelled_workflow_is_not_told_of_before_that_is_durable(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S32: whoever awaits the result learns of it once it is on disk."""

    async def sleeper(ctx: Context, _: None) -> None:
        await ctx.step("slow", trio.sleep, 1000, timeout=0)

    driver = SlowDriver(await namespace.driver(), batch_s=5.0)
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "w", sleeper, None, driver, mode=mode, clock=MovableClock())
        await trio.sleep(30)
        nursery.start_soon(handle.cancel)
        with pytest.raises(WorkflowCancelledError):
            await handle.result()
        assert (await namespace.snapshot()).state is WorkflowState.CANCELLED


async def test_a_cancel_that_the_storage_lost_is_not_told_as_one(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S32, S21: the result is the storage's error, and the workflow goes on when it is run again."""

    async def sleeper(ctx: Context, _: None) -> str:
        await ctx.step("slow", trio.sleep, 10, timeout=0)
        return "went on"

    failing = False
    driver = FaultyDriver(await namespace.driver(), "lost", lambda _: failing)
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "w", sleeper, None, driver, mode=mode, clock=MovableClock())
        await wait_all_tasks_blocked()
        failing = True
        with pytest.raises(StorageError):
            await handle.cancel()
        with pytest.raises(StorageError):
            await handle.result()
    await namespace.restart()
    async with host(namespace, mode, workflow_id="w") as process:
        assert await process.finish(sleeper) == "went on"


async def test_a_handle_tells_only_what_is_durable(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S21, S32: state, output and history, and that a message comes too late, while the end is on its way to the disk."""

    async def quick(ctx: Context, _: None) -> int:
        return await ctx.step("work", work)

    told: list[object] = []

    async def look(handle: Any, ask: Callable[[], Awaitable[object]]) -> None:
        try:
            answer = await ask()
        except WorkflowEndedError:
            answer = "ended"
        stored = await namespace.snapshot()
        if answer in (WorkflowState.COMPLETED, 42, "ended"):
            assert stored.state is WorkflowState.COMPLETED
        told.append(answer)

    driver = SlowDriver(await namespace.driver(), batch_s=2.0)
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "w", quick, None, driver, mode=mode, clock=MovableClock())
        for _ in range(12):
            await trio.sleep(0.5)
            for ask in (handle.get_state, handle.get_output, lambda: handle.message("late")):
                nursery.start_soon(look, handle, cast("Callable[[], Awaitable[object]]", ask))
    assert WorkflowState.COMPLETED in told
    assert "ended" in told


async def test_a_loop_is_durable_before_the_steps_inside_it_run(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S12: parents before children (promise 3)."""
    seen: list[list[tuple[str | int, ...]]] = []

    async def look() -> None:
        seen.append([entry.path for entry in (await namespace.snapshot()).entries])

    async def body(ctx: Context, state: int) -> Continue[int] | Break[int]:
        await ctx.step("look", look)
        return Break(state)

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.step("before", work)
        await ctx.loop("rounds", body, 0)

    async with host(namespace, mode) as process:
        await process.finish(workflow)
    assert ("rounds",) in seen[0]


async def test_a_message_that_was_taken_leaves_a_state_that_brings_the_workflow_back(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S27: after a restart too: killed right behind the batch that took it, the workflow is found running, not asleep."""
    states: list[bytes | None] = []

    async def look() -> None:
        states.append(await (await namespace.driver()).get(layout.STATE_KEY))
        states.append(str(len(await (await namespace.driver()).list(layout.MAILBOX_PREFIX))).encode())

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.step("first", work)
        await ctx.queue.next("go")
        await look()

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        await process.restart()
        await process.finish(workflow)
    assert states == [b"running", b"0"]


async def test_an_at_most_once_step_that_was_stopped_before_it_ran_is_not_taken_for_interrupted(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S22, S33: evicted while its beginning was on its way to the disk, it is known not to have run."""
    ran = 0

    async def count() -> int:
        nonlocal ran
        ran += 1
        return ran

    async def workflow(ctx: Context, _: None) -> int:
        return await ctx.step("once", count, at_most_once=True)

    driver = SlowDriver(await namespace.driver(), batch_s=5.0)
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "w", workflow, None, driver, mode=mode, clock=MovableClock())
        await trio.sleep(2)
        await handle.evict()
    assert ran == 0
    await namespace.restart()
    async with host(namespace, mode, workflow_id="w") as process:
        assert await process.finish(workflow) == 1


async def test_a_message_on_its_way_does_not_carry_what_faulty_code_recorded(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4, S6: the message is kept, what was recorded before the fault is not, and the right code goes on."""

    async def faulty(ctx: Context, _: None) -> None:
        await ctx.step("first", work)
        await ctx.step("wrong", work, ephemeral=True)
        await ctx.step("wrong", work)

    async def right(ctx: Context, _: None) -> object:
        await ctx.step("first", work)
        return (await ctx.queue.next("go")).body

    slow = SlowDriver(await namespace.driver(), batch_s=5.0)
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(nursery, "w", faulty, None, slow, mode=mode, clock=MovableClock())
        for number in range(4):
            nursery.start_soon(handle.message, "go", number)
            await trio.sleep(3)
        with pytest.raises(DuplicateNameError):
            await handle.result()
    entries = [entry.path for entry in (await namespace.snapshot()).entries]
    assert entries == [("first",)]
    await namespace.restart()
    async with host(namespace, mode, workflow_id="w") as process:
        assert await process.finish(right) == 0


async def test_a_queue_read_does_not_overwrite_a_step_by_one_of_its_derived_names(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4, S5: a recorded step `q:0` that became a read `q` is divergence, and the old code goes on."""

    async def old(ctx: Context, _: None) -> object:
        number = await ctx.step("q:0", work)
        return [number, (await ctx.queue.next("wait", names=["go"])).body]

    async def new(ctx: Context, _: None) -> object:
        return len(await ctx.queue.next_batch("q"))

    async with host(namespace, mode) as process:
        await process.stop(old)
        await process.send("go", "on")
        await process.restart()
        with pytest.raises(HistoryDivergedError):
            await process.stop(new)
        await process.restart()
        assert await process.finish(old) == [42, "on"]


async def test_sending_a_message_costs_the_same_whatever_the_length_of_the_history(
    namespace: Namespace, autojump_clock: MockClock
) -> None:
    """S11: only the workflow's own fields are read."""

    async def workflow(ctx: Context, _: None) -> None:
        for number in range(50):
            await ctx.step(f"step-{number}", work, ephemeral=True)
        await ctx.queue.next("never")

    driver = await namespace.driver()
    await run_workflow("w", workflow, None, driver, clock=MovableClock())

    class Reads:
        def __init__(self, inner: Driver) -> None:
            self._inner = inner
            self.prefixes: set[bytes] = set()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def list(self, prefix: bytes) -> Any:
            self.prefixes.add(prefix)
            return await self._inner.list(prefix)

    reads = Reads(driver)
    await send_message(cast("Driver", reads), "go", 1, id="m-1", clock=MovableClock())
    assert reads.prefixes.isdisjoint({layout.HISTORY_PREFIX, layout.METADATA_PREFIX, layout.NAMES_PREFIX, b""})


async def test_a_critical_error_takes_any_arguments_and_is_not_retried(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10, S17: as every exception of Python does; a declined card is not charged four times."""
    calls = 0

    class Declined(CriticalError):
        pass

    async def decline() -> None:
        nonlocal calls
        calls += 1
        raise Declined("no money", 5)

    async def bare() -> None:
        raise CriticalError

    async def workflow(ctx: Context, _: None) -> list[str]:
        messages: list[str] = []
        for name, fn in (("declined", decline), ("bare", bare)):
            try:
                await ctx.step(name, fn)
            except StepCriticalError as error:
                messages.append(str(error.error))
        return messages

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == ["Declined: no money, 5", "CriticalError"]
    assert calls == 1


async def test_a_misuse_outside_of_an_operation_keeps_the_state_too(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4, S6: a fault fails nothing, wherever in the workflow's code it comes from."""

    async def wrong(ctx: Context, _: None) -> str:
        await ctx.step("first", work)
        return current_step().idempotency_key

    async def right(ctx: Context, _: None) -> int:
        return await ctx.step("first", work)

    async with host(namespace, mode) as process:
        with pytest.raises(MisuseError):
            await process.stop(wrong)
        await process.restart()
        assert await process.finish(right) == 42


async def test_evictions_from_outside_count_no_crash_and_keep_what_was_recorded(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18, S33: cancelled from outside as often as one likes, also behind an ephemeral step, the workflow goes on."""
    runs = 0

    async def once() -> int:
        nonlocal runs
        runs += 1
        return runs

    async def workflow(ctx: Context, _: None) -> int:
        number = await ctx.step("ephemeral", once, ephemeral=True)
        await ctx.step("long", trio.sleep, 100, timeout=0)
        return number

    for _ in range(12):
        with trio.move_on_after(1):
            await run_workflow("w", workflow, None, await namespace.driver(), mode=mode, clock=MovableClock())
        assert await (await namespace.driver()).get(layout.IDLE_ACTIVATIONS_KEY) is None
        await namespace.restart()
    async with host(namespace, mode, workflow_id="w") as process:
        assert await process.finish(workflow) == 1
    assert runs == 1
