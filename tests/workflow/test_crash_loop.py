"""Promise 9: a workflow that ends its process every time ends itself; one that merely is restarted often does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from harness import Namespace, SimulatedCrashError, host
from trio.testing import MockClock

from perdure.storage import layout
from perdure.storage.schema import EntryStatus
from perdure.workflow import (
    Context,
    CrashLoopError,
    RunMode,
    WorkflowFailedError,
    WorkflowState,
    current_step,
    run_workflow,
    start_workflow,
)
from perdure.workflow.activation import CRASH_LOOP_LIMIT

Function = Callable[[Context, Any], Awaitable[Any]]


async def idle_activations(namespace: Namespace) -> int:
    """The stored count of activations without progress; 0 when there is none."""
    stored = (await namespace.dump()).get(layout.IDLE_ACTIVATIONS_KEY)
    return 0 if stored is None else layout.decode_u64(stored)


async def one_life(namespace: Namespace, mode: RunMode, fn: Function) -> Any:
    """A process opens the namespace, and runs the workflow until it ends or the process dies."""
    async with host(namespace, mode) as process:
        return await process.finish(fn)


async def dies(namespace: Namespace, mode: RunMode, fn: Function) -> None:
    with pytest.raises(SimulatedCrashError):
        await one_life(namespace, mode, fn)


async def lives_until_crash_loop(namespace: Namespace, mode: RunMode, fn: Function) -> int:
    """How often the process dies before the workflow is ended for it."""
    lives = 0
    while True:
        try:
            await one_life(namespace, mode, fn)
        except SimulatedCrashError:
            lives += 1
        except WorkflowFailedError as error:
            if error.name != CrashLoopError.__name__:
                raise
            return lives


class Killer:
    """A step's function that ends its process, unless it was mended."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.is_mended = False
        self.attempts: list[int] = []

    async def __call__(self) -> str:
        self.attempts.append(current_step().attempt)
        await trio.lowlevel.checkpoint()
        if not self.is_mended:
            self.namespace.kill()
        return "alive"


async def succeed() -> str:
    return "done"


async def test_a_step_that_kills_the_process_every_time_ends_the_workflow_after_ten_activations(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: the count is durable, with state running, before the function begins; then CrashLoopError, never an endless loop."""
    killer = Killer(namespace)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("killer", killer)

    for life in range(1, CRASH_LOOP_LIMIT + 1):
        await dies(namespace, mode, workflow)
        assert await idle_activations(namespace) == life
        snapshot = await namespace.snapshot()
        assert snapshot.state is WorkflowState.RUNNING
        assert snapshot.entries == ()
    assert CRASH_LOOP_LIMIT == 10
    for _ in range(2):  # and it stays failed
        with pytest.raises(WorkflowFailedError) as failed:
            await one_life(namespace, mode, workflow)
        assert failed.value.name == CrashLoopError.__name__
    snapshot = await namespace.snapshot()
    assert snapshot.state is WorkflowState.FAILED
    assert snapshot.error is not None
    assert snapshot.error.name == "CrashLoopError"
    assert "activated 10 times" in snapshot.error.message
    assert await (await namespace.driver()).get_alarm("workflow-1") is None
    assert killer.attempts == [1] * 10, "an attempt whose outcome nobody saw is not counted as one"


async def test_recover_resets_a_crash_loop_and_the_mended_step_runs(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: recover() clears error and count; a step that still kills gets ten activations more, a mended one finishes."""
    killer = Killer(namespace)

    async def workflow(ctx: Context, _: None) -> str:
        await ctx.step("before", succeed)
        return await ctx.step("killer", killer)

    # The first activation recorded the step before, so it does not count.
    assert await lives_until_crash_loop(namespace, mode, workflow) == 1 + CRASH_LOOP_LIMIT
    for mended in (False, True):
        killer.is_mended = mended
        async with host(namespace, mode) as process:
            await process.control("recover")
        snapshot = await namespace.snapshot()
        assert snapshot.state is WorkflowState.PENDING
        assert snapshot.error is None
        assert await idle_activations(namespace) == 0
        if not mended:
            assert await lives_until_crash_loop(namespace, mode, workflow) == CRASH_LOOP_LIMIT
    assert await one_life(namespace, mode, workflow) == "alive"
    assert len(killer.attempts) == 1 + 2 * CRASH_LOOP_LIMIT + 1


async def test_recording_something_clears_the_count(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: a workflow that dies in every activation, but gets further in each, finishes."""
    steps = 3 * CRASH_LOOP_LIMIT
    killer = Killer(namespace)
    done: list[int] = []

    async def work(number: int) -> int:
        done.append(number)
        return number

    async def workflow(ctx: Context, _: None) -> int:
        progress = len(done)
        for number in range(steps):
            if number == progress + 1:
                await ctx.step(f"killer {number}", killer)
            await ctx.step(f"step {number}", work, number)
        return steps

    for life in range(steps - 1):
        await dies(namespace, mode, workflow)
        # This life's batch of the first step cleared what its beginning had written.
        assert await idle_activations(namespace) == 0
        assert len(done) == life + 1
    killer.is_mended = True
    assert await one_life(namespace, mode, workflow) == steps
    assert done == list(range(steps))


async def test_an_ephemeral_step_before_the_fatal_one_is_no_progress(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18, S23: only what is durable counts, so this loop ends too."""
    killer = Killer(namespace)

    async def workflow(ctx: Context, _: None) -> str:
        await ctx.step("ephemeral", succeed, ephemeral=True)
        return await ctx.step("killer", killer)

    for life in range(1, CRASH_LOOP_LIMIT + 1):
        await dies(namespace, mode, workflow)
        assert await idle_activations(namespace) == life
    with pytest.raises(WorkflowFailedError, match="CrashLoopError"):
        await one_life(namespace, mode, workflow)


async def test_a_crash_loop_that_begins_after_progress_in_the_same_activation_ends_too(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: a wait that ended is recorded, and counts once, not in every later activation."""
    killer = Killer(namespace)

    async def workflow(ctx: Context, _: None) -> str:
        await ctx.sleep("pause", 5)
        return await ctx.step("killer", killer)

    # The activation that recorded the end of the sleep does not count.
    lives = await lives_until_crash_loop(namespace, mode, workflow)
    assert lives == CRASH_LOOP_LIMIT + 1


async def test_an_idle_waiter_survives_fifty_restarts(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: deployments and crashes while it waits do not count; its step ran once and its message arrives."""
    calls: list[str] = []

    async def work() -> None:
        calls.append("work")

    async def workflow(ctx: Context, _: None) -> Any:
        await ctx.step("work", work)
        return (await ctx.queue.next("wait")).body

    async with host(namespace, mode) as process:
        for _ in range(50):
            stopped = await process.stop(workflow)
            assert stopped.waiting_for_messages == ("*",)
            assert await idle_activations(namespace) == 0
            await process.restart()
        await process.send("go", "at last")
        assert await process.finish(workflow) == "at last"
    assert calls == ["work"]


async def test_parking_clears_the_count(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S18: an activation that came as far as a wait did not crash, also when it recorded nothing new."""
    killer = Killer(namespace)

    async def workflow(ctx: Context, _: None) -> str:
        await ctx.step("killer", killer)
        return "never"

    async def mended(ctx: Context, _: None) -> Any:
        return (await ctx.queue.next("wait")).body

    for _ in range(CRASH_LOOP_LIMIT - 1):
        await dies(namespace, mode, workflow)
    assert await idle_activations(namespace) == CRASH_LOOP_LIMIT - 1
    async with host(namespace, mode) as process:
        await process.stop(mended)
        assert await idle_activations(namespace) == 0
        await process.restart()
        await process.send("go", "went")
        assert await process.finish(mended) == "went"


async def test_fifty_shutdowns_during_a_step_do_not_end_the_workflow(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: cancelling whoever runs it, which is what a deployment does, clears the count."""
    begun: list[int] = []

    async def long() -> str:
        begun.append(current_step().attempt)
        if len(begun) <= 50:
            await trio.sleep(20)
        return "done"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("long", long)

    for life in range(50):
        async with host(namespace, mode) as process:
            await process.run_and_leave(workflow, 1)
        assert len(begun) == life + 1
        assert await idle_activations(namespace) == 0
        assert (await namespace.snapshot()).state is WorkflowState.RUNNING
    assert await one_life(namespace, mode, workflow) == "done"
    assert begun == [1] * 51


async def test_leaving_the_nursery_that_runs_the_workflow_clears_the_count(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: the orderly shutdown of a whole process, in which nobody calls evict()."""
    killer = Killer(namespace)
    is_fatal = True

    async def work() -> str:
        if is_fatal:
            return await killer()
        await trio.sleep_forever()
        return ""

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("work", work)

    for _ in range(CRASH_LOOP_LIMIT - 1):
        await dies(namespace, mode, workflow)
    assert await idle_activations(namespace) == CRASH_LOOP_LIMIT - 1
    is_fatal = False
    assert await state_after_shutdown(namespace, mode, workflow) is WorkflowState.RUNNING
    assert await idle_activations(namespace) == 0


async def state_after_shutdown(namespace: Namespace, mode: RunMode, fn: Function) -> WorkflowState:
    """A process runs the workflow for a second and is shut down in good order; the state it leaves."""
    driver = await namespace.restart()
    async with trio.open_nursery() as nursery:
        if mode == "yield":
            nursery.start_soon(run_workflow, "workflow-1", fn, None, driver)
        else:
            await start_workflow(nursery, "workflow-1", fn, None, driver)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    return (await namespace.snapshot()).state


async def test_a_death_between_a_failure_and_its_retry_keeps_the_attempts(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: restarted in every pause, the step has its four attempts in all, not four per process; pauses keep their length."""
    attempts: list[int] = []
    begun_s: list[float] = []

    async def failing() -> None:
        attempts.append(current_step().attempt)
        begun_s.append(trio.current_time())
        raise ConnectionError("refused")

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.step("failing", failing, retry_backoff_base=10.0, retry_backoff_max=60.0)

    async with host(namespace, mode) as process:
        for life in range(1, 4):
            stopped = await process.stop(workflow)
            assert stopped.sleep_until is not None
            (entry,) = (await namespace.snapshot()).entries
            assert entry.metadata is not None
            assert (entry.metadata.status, entry.metadata.attempts) == (EntryStatus.FAILED, life)
            assert await idle_activations(namespace) == 0
            await process.restart()
            assert (await process.stop(workflow)).sleep_until == stopped.sleep_until
            await process.restart()
            await process.advance(stopped.sleep_until - process.clock.now_ms() / 1000)
        with pytest.raises(WorkflowFailedError, match="StepExhaustedError"):
            await process.finish(workflow)
    assert attempts == [1, 2, 3, 4]
    assert [round(at - begun_s[0], 3) for at in begun_s] == [0, 20, 60, 120]


async def test_a_death_during_an_attempt_repeats_that_attempt(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: it was not seen to fail, so it neither counts as a failure nor loses the ones before."""
    attempts: list[int] = []

    async def work() -> str:
        attempts.append(current_step().attempt)
        if len(attempts) == 1:
            raise ConnectionError("refused")
        if len(attempts) in (2, 3):
            namespace.kill()
        return "done"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("work", work, max_retries=1)

    for idle in range(1, 3):
        await dies(namespace, mode, workflow)
        (entry,) = (await namespace.snapshot()).entries
        assert entry.metadata is not None
        assert (entry.metadata.status, entry.metadata.attempts) == (EntryStatus.FAILED, 1)
        # In live mode the first activation had recorded the failure, so only the second one was idle.
        assert await idle_activations(namespace) == (idle if mode == "yield" else idle - 1)
    assert await one_life(namespace, mode, workflow) == "done"
    assert attempts == [1, 2, 2, 2]
