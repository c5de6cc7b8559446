"""Timeouts of steps: a coroutine function is cancelled for real, a thread that cannot be is abandoned, none overlaps the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from harness import Namespace, host
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage.schema import EntryStatus
from perdure.storage.sqlite import SqliteDriver
from perdure.workflow import (
    Context,
    RunMode,
    StepTimeoutError,
    WorkflowFailedError,
    WorkflowState,
    current_step,
    load_snapshot,
    run_workflow,
    start_workflow,
)
from perdure.workflow.activation import Activation
from perdure.workflow.threads import step_limiter

LONGER_S = 3600.0


class Overlaps:
    """Notes how often something begins and ends, and how many of it run at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running = 0
        self.most_at_once = 0
        self.log: list[str] = []

    def begin(self, attempt: int) -> None:
        with self._lock:
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
            self.log.append(f"begin {attempt}")

    def end(self, attempt: int) -> None:
        with self._lock:
            self.running -= 1
            self.log.append(f"end {attempt}")


# Coroutine functions.


async def test_a_step_that_takes_too_long_is_cancelled_and_fails_at_once(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S19: after 30 seconds, without a retry; the same StepTimeoutError on replay, where the function is not called."""
    overlaps = Overlaps()
    caught: list[StepTimeoutError] = []
    ended_after_s: list[float] = []

    async def slow() -> None:
        overlaps.begin(current_step().attempt)
        begun_s = trio.current_time()
        try:
            await trio.sleep(LONGER_S)
        finally:
            ended_after_s.append(trio.current_time() - begun_s)
            overlaps.end(1)

    async def workflow(ctx: Context, _: None) -> str:
        try:
            await ctx.step("slow", slow)
        except StepTimeoutError as error:
            caught.append(error)
        await ctx.sleep("pause", 1)
        return "went on"

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "went on"
        assert ended_after_s == [30.0]
        assert overlaps.log == ["begin 1", "end 1"]
        await process.restart()
        first = caught[0]
        assert await process.finish(workflow) == "went on"
    assert overlaps.log == ["begin 1", "end 1"]
    for error in (first, caught[-1]):
        assert (error.step_name, error.attempts, error.kind) == ("slow", 1, "timeout")
        assert "30 seconds" in str(error)


async def test_an_uncaught_timeout_fails_the_workflow(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S19: under the name StepTimeoutError, also after a restart; recover() gives the step another chance."""
    patience_s = [LONGER_S, 1.0]

    async def slow() -> str:
        await trio.sleep(patience_s.pop(0))
        return "in time"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("slow", slow, timeout=5)

    async with host(namespace, mode) as process:
        for _ in range(2):
            with pytest.raises(WorkflowFailedError) as failed:
                await process.finish(workflow)
            assert failed.value.name == "StepTimeoutError"
            await process.restart()
        (entry,) = (await namespace.snapshot()).entries
        assert entry.metadata is not None
        assert entry.metadata.status is EntryStatus.EXHAUSTED
        await process.control("recover")
        await process.restart()
        assert await process.finish(workflow) == "in time"


async def test_a_timeout_of_zero_is_no_limit(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S19: a step may take a day."""

    async def slow() -> str:
        await trio.sleep(86_400)
        return "at last"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("slow", slow, timeout=0)

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "at last"


async def test_with_retry_on_timeout_no_two_attempts_run_at_once(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S19: also when the cancelled attempt cleans up for longer than the pause before the next."""
    overlaps = Overlaps()

    async def slow() -> str:
        attempt = current_step().attempt
        overlaps.begin(attempt)
        try:
            if attempt < 4:
                await trio.sleep(LONGER_S)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(7)
            overlaps.end(attempt)
        return "the fourth"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("slow", slow, timeout=10, retry_on_timeout=True)

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "the fourth"
    assert overlaps.most_at_once == 1
    assert overlaps.log == [f"{what} {attempt}" for attempt in range(1, 5) for what in ("begin", "end")]
    (entry,) = (await namespace.snapshot()).entries
    assert entry.metadata is not None
    assert (entry.metadata.status, entry.metadata.attempts) == (EntryStatus.COMPLETED, 4)


async def test_timeouts_that_are_retried_are_exhausted_like_errors(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S19: after max_retries the step fails with its timeout, the same after restarts between the attempts."""
    attempts: list[int] = []

    async def slow() -> None:
        attempts.append(current_step().attempt)
        await trio.sleep(LONGER_S)

    async def workflow(ctx: Context, _: None) -> str:
        try:
            await ctx.step("slow", slow, timeout=10, retry_on_timeout=True, max_retries=2, retry_backoff_base=50)
        except StepTimeoutError as error:
            return f"{error.kind} {error.attempts}"
        return "never"

    async with host(namespace, mode) as process:
        output = None
        while output is None:
            with trio.move_on_after(15):
                output = await process.finish(workflow)
            await process.evict()
            await process.restart()
            await process.advance(200)
        assert output == "timeout 3"
        assert await process.finish(workflow) == output
    assert attempts == [1, 2, 3]


async def test_a_timeout_counts_as_one_also_when_the_cleaning_up_fails_in_a_nursery(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S19: an exception group of cancellations and errors is no error that escapes the record."""

    async def fail_in_cleanup() -> None:
        try:
            await trio.sleep(LONGER_S)
        finally:
            raise ConnectionError("already closed")

    async def slow() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_in_cleanup)
            nursery.start_soon(trio.sleep, LONGER_S)

    async def workflow(ctx: Context, _: None) -> str:
        try:
            await ctx.step("slow", slow)
        except StepTimeoutError as error:
            return error.kind
        return "never"

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "timeout"
        (entry,) = (await namespace.snapshot()).entries
        assert entry.metadata is not None
        assert entry.metadata.status is EntryStatus.EXHAUSTED
        await process.restart()
        assert await process.finish(workflow) == "timeout"


async def test_a_scope_of_the_steps_own_that_times_out_is_the_steps_own_matter(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S19: move_on_after and fail_after inside the function are neither the step's timeout nor a misuse."""

    async def careful() -> str:
        with trio.move_on_after(1):
            await trio.sleep(LONGER_S)
        try:
            with trio.fail_after(1):
                await trio.sleep(LONGER_S)
        except trio.TooSlowError:
            return "too slow"
        return "never"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("careful", careful)

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "too slow"


# Plain functions in threads. These have a clock that stands still until it is moved, since threads take real time.


class Stuck:
    """A plain function that holds its thread until it is released."""

    def __init__(self) -> None:
        self.overlaps = Overlaps()
        self._token = trio.lowlevel.current_trio_token()
        self._begun = [trio.Event() for _ in range(9)]
        self._ended = [trio.Event() for _ in range(9)]
        self._released = [threading.Event() for _ in range(9)]
        self._calls = 0

    def __call__(self) -> str:
        number = self._calls
        self._calls += 1
        self.overlaps.begin(number)
        self._token.run_sync_soon(self._begun[number].set)
        is_released = self._released[number].wait(60)
        self.overlaps.end(number)
        self._token.run_sync_soon(self._ended[number].set)
        assert is_released, "the test forgot it"
        return f"call {number}"

    @property
    def calls(self) -> int:
        return self._calls

    async def begun(self, number: int) -> None:
        await self._begun[number].wait()

    async def release(self, number: int) -> None:
        """Let a call end, and see that it has."""
        self._released[number].set()
        await self._ended[number].wait()

    def release_all(self) -> None:
        for released in self._released:
            released.set()


@pytest.fixture
async def stuck() -> Any:
    function = Stuck()
    yield function
    function.release_all()


async def collect(outputs: list[Any], fn: Callable[..., Any], *args: Any) -> None:
    outputs.append(await fn(*args))


async def settle() -> None:
    """Give threads that ought not to begin the time to do so."""
    await wait_all_tasks_blocked(0.01)


async def test_a_thread_that_cannot_be_stopped_is_abandoned_and_its_late_result_ignored(
    namespace: Namespace, mode: RunMode, mock_clock: MockClock, stuck: Stuck
) -> None:
    """S19: the workflow goes on at the timeout; when the thread ends, nothing is recorded of it."""
    gone_on = trio.Event()
    finish = trio.Event()

    async def wait() -> str:
        gone_on.set()
        await finish.wait()
        return "went on"

    async def workflow(ctx: Context, _: None) -> str:
        try:
            return await ctx.step("stuck", stuck, timeout=30)
        except StepTimeoutError:
            return await ctx.step("afterwards", wait, timeout=0)

    async with host(namespace, mode) as process:
        outputs: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, outputs, process.ended, workflow)
            await stuck.begun(0)
            mock_clock.jump(29)
            await settle()
            assert not gone_on.is_set()
            mock_clock.jump(2)
            await gone_on.wait()
            before = await namespace.dump()
            await stuck.release(0)
            await settle()
            assert await namespace.dump() == before
            finish.set()
        assert outputs == ["went on"]
    (first, _second) = (await namespace.snapshot()).entries
    assert first.data["output"] is None
    assert first.metadata is not None
    assert first.metadata.status is EntryStatus.EXHAUSTED
    assert stuck.calls == 1


async def test_a_retry_waits_for_the_abandoned_thread_of_the_earlier_attempt(
    namespace: Namespace, mode: RunMode, mock_clock: MockClock, stuck: Stuck
) -> None:
    """S19: however long ago the retry became due, and however long the thread takes."""

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("stuck", stuck, timeout=30, retry_on_timeout=True)

    async with host(namespace, mode) as process:
        outputs: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, outputs, process.ended, workflow)
            for attempt in range(2):
                await stuck.begun(attempt)
                mock_clock.jump(31)
                await settle()
                mock_clock.jump(1000)
                await settle()
                assert stuck.calls == attempt + 1
                await stuck.release(attempt)
            await stuck.begun(2)
            await stuck.release(2)
        assert outputs == ["call 2"]
    assert stuck.overlaps.most_at_once == 1
    (entry,) = (await namespace.snapshot()).entries
    assert entry.metadata is not None
    assert (entry.metadata.status, entry.metadata.attempts) == (EntryStatus.COMPLETED, 3)


async def test_a_new_activation_in_the_same_process_waits_for_the_abandoned_thread_of_an_evicted_one(
    namespace: Namespace, mode: RunMode, mock_clock: MockClock, stuck: Stuck
) -> None:
    """S19: eviction does not wait for the thread; whoever runs the step next does."""

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("stuck", stuck)

    async with host(namespace, mode) as process:
        for _ in range(3):
            async with trio.open_nursery() as activation:
                activation.start_soon(process.stop, workflow)
                await stuck.begun(0)
                await settle()
                await process.evict()
                activation.cancel_scope.cancel()
            assert stuck.calls == 1
            assert (await namespace.snapshot()).state is WorkflowState.RUNNING
        outputs: list[Any] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, outputs, process.ended, workflow)
            await settle()
            assert stuck.calls == 1
            await stuck.release(0)
            await stuck.begun(1)
            await stuck.release(1)
        assert outputs == ["call 1"], "the late result of the first call is ignored"
    assert stuck.overlaps.most_at_once == 1


async def test_a_step_that_was_cancelled_while_it_waited_for_a_thread_leaves_nothing_to_wait_for(
    namespace: Namespace, mode: RunMode, mock_clock: MockClock, stuck: Stuck
) -> None:
    """S19: its function never began, so the next activation may begin it as soon as there is a thread."""
    step_limiter().total_tokens = 1

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("starved", stuck)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.to_thread.run_sync, stuck, limiter=step_limiter()))
        await stuck.begun(0)
        async with host(namespace, mode) as process:
            async with trio.open_nursery() as activation:
                activation.start_soon(process.stop, workflow)
                await settle()
                assert stuck.calls == 1
                await process.evict()
                activation.cancel_scope.cancel()
            await stuck.release(0)
            async with trio.open_nursery() as activation:
                outputs: list[Any] = []
                activation.start_soon(collect, outputs, process.ended, workflow)
                await stuck.begun(1)
                await stuck.release(1)
            assert outputs == ["call 1"]


async def test_threads_of_steps_do_not_starve_the_storage(
    tmp_path: Path, mode: RunMode, mock_clock: MockClock, stuck: Stuck
) -> None:
    """S19: with every thread for steps stuck, workflows whose commits go through threads still run to their ends."""
    limiter = step_limiter()
    limiter.total_tokens = 3

    async def blocked(ctx: Context, _: None) -> str:
        return await ctx.step("stuck", stuck, timeout=0)

    async def work() -> str:
        await trio.lowlevel.checkpoint()
        return "done"

    async def lively(ctx: Context, _: None) -> str:
        for number in range(5):
            await ctx.step(f"step {number}", work)
        return "done"

    async with trio.open_nursery() as nursery:
        drivers = [
            await SqliteDriver.open(tmp_path / f"{number}.sqlite", create=True, commit_in="thread")
            for number in range(4)
        ]
        for number in range(3):
            await start_workflow(nursery, f"blocked-{number}", blocked, None, drivers[number])
            await stuck.begun(number)
        assert limiter.available_tokens == 0
        if mode == "yield":
            assert (await run_workflow("lively", lively, None, drivers[3])).output == "done"
        else:
            handle = await start_workflow(nursery, "lively", lively, None, drivers[3])
            assert await handle.result() == "done"
        assert len((await load_snapshot(drivers[3])).entries) == 5
        stuck.release_all()
    states = [(await load_snapshot(driver)).state for driver in drivers]
    assert states == [WorkflowState.COMPLETED] * 4
    for driver in drivers:
        await driver.aclose()


async def test_waiting_for_a_free_thread_is_no_part_of_a_steps_timeout(namespace: Namespace, mode: RunMode) -> None:
    """S19: a step that has not begun cannot have timed out."""
    limiter = trio.CapacityLimiter(1)
    release = threading.Event()
    begun = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def hold() -> None:
        token.run_sync_soon(begun.set)
        release.wait()

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("plain", lambda: "ran", timeout=0.05)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.to_thread.run_sync, hold, limiter=limiter))
        await begun.wait()
        activation = await Activation.load("w", await namespace.driver(), step_limiter=limiter)
        activation.create("workflow", None)
        nursery.start_soon(partial(activation.run, workflow, mode=mode))
        with trio.move_on_after(0.2):
            await trio.sleep_forever()
        assert activation.history.state is WorkflowState.RUNNING
        release.set()
    assert activation.history.state is WorkflowState.COMPLETED
