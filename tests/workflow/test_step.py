"""`ctx.step`: retries, and what is recorded of them."""

from __future__ import annotations

import pytest
import trio
from harness import Namespace, SimulatedCrashError, host
from trio.testing import MockClock

from perdure.storage.schema import EntryStatus
from perdure.workflow import (
    Context,
    CriticalError,
    RunMode,
    StepCriticalError,
    StepExhaustedError,
    WorkflowFailedError,
    WorkflowState,
    current_step,
)


class Flaky:
    """A step's function that fails a number of times, and notes when it was begun and as which attempt."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.begun_s: list[float] = []
        self.attempts: list[int] = []

    async def __call__(self) -> str:
        self.begun_s.append(trio.current_time())
        self.attempts.append(current_step().attempt)
        await trio.lowlevel.checkpoint()
        if len(self.begun_s) <= self.failures:
            raise ConnectionError(f"refused, time {len(self.begun_s)}")
        return "through"

    def begun_after_s(self) -> list[float]:
        """When each attempt was begun, in seconds since the first."""
        return [round(at - self.begun_s[0], 3) for at in self.begun_s]


# Retries.


async def test_a_step_that_fails_twice_and_then_works_is_tried_three_times_with_growing_pauses(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: three attempts, after 0, 0.2 and 0.2 + 0.4 seconds; the record holds the value, the count and the last error."""
    flaky = Flaky(failures=2)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("flaky", flaky)

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "through"
        assert flaky.begun_after_s() == [0.0, 0.2, 0.6]
        assert flaky.attempts == [1, 2, 3]
        await process.restart()
        assert await process.finish(workflow) == "through"
        assert len(flaky.attempts) == 3
        assert await namespace.attempts("flaky") == (EntryStatus.COMPLETED, 3)
        # As in the reference, the text of the last failure stays beside the output.
        entry = (await namespace.entries())[("flaky",)]
        assert entry.data == {"output": "through", "error": "ConnectionError: refused, time 2"}


async def test_the_pauses_between_attempts_are_capped_and_configurable(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: base and cap are the step's own; the pause is counted from the beginning of the failed attempt."""
    flaky = Flaky(failures=4)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("flaky", flaky, max_retries=4, retry_backoff_base=1.0, retry_backoff_max=5.0)

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "through"
    assert flaky.begun_after_s() == [0.0, 2.0, 6.0, 11.0, 16.0]


async def test_a_pause_between_attempts_is_a_durable_wait(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: while a retry is not due, the workflow sleeps with its alarm armed and the failure recorded."""
    flaky = Flaky(failures=1)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("flaky", flaky, retry_backoff_base=50.0, retry_backoff_max=100.0)

    async with host(namespace, mode) as process:
        begun_ms = process.clock.now_ms()
        stopped = await process.stop(workflow)
        assert stopped.state is WorkflowState.SLEEPING
        assert stopped.sleep_until == (begun_ms + 100_000) / 1000
        assert await (await namespace.driver()).get_alarm("workflow-1") == begun_ms + 100_000
        snapshot = await namespace.snapshot()
        assert snapshot.state is WorkflowState.SLEEPING
        assert await namespace.attempts("flaky") == (EntryStatus.FAILED, 1)
        await process.restart()
        assert (await process.stop(workflow)).sleep_until == (begun_ms + 100_000) / 1000
        assert len(flaky.attempts) == 1
        assert await process.finish(workflow) == "through"
    assert flaky.attempts == [1, 2]


async def test_exhausted_retries_end_the_workflow_with_the_last_error_also_after_a_restart(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: the last error's class and message are in the workflow's error, and stay there."""
    flaky = Flaky(failures=99)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("flaky", flaky, max_retries=2)

    async with host(namespace, mode) as process:
        for _ in range(2):
            with pytest.raises(WorkflowFailedError) as failed:
                await process.finish(workflow)
            assert failed.value.name == "StepExhaustedError"
            assert "ConnectionError: refused, time 3" in str(failed.value)
            error = (await namespace.snapshot()).error
            assert error is not None
            assert "ConnectionError: refused, time 3" in error.message
            await process.restart()
        assert len(flaky.attempts) == 3
        assert await namespace.attempts("flaky") == (EntryStatus.EXHAUSTED, 3)
        assert (await namespace.snapshot()).state is WorkflowState.FAILED


async def test_an_exhausted_step_raises_the_same_error_on_replay_without_its_function(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: class, step, attempts, and the last error's name, message and stack are those of the first run."""
    flaky = Flaky(failures=99)
    caught: list[StepExhaustedError] = []

    async def workflow(ctx: Context, _: None) -> str:
        try:
            return await ctx.step("flaky", flaky, max_retries=1)
        except StepExhaustedError as error:
            caught.append(error)
        await ctx.sleep("pause", 10)
        return "without"

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        while not caught:
            await process.advance(0.2)
            await process.stop(workflow)
        await process.restart()
        assert await process.finish(workflow) == "without"
    assert len(flaky.attempts) == 2
    first, replayed = caught[0], caught[-1]
    assert first is not replayed
    assert type(replayed) is StepExhaustedError
    assert isinstance(first.__cause__, ConnectionError)
    assert replayed.__cause__ is None
    for error in (first, replayed):
        assert (error.step_name, error.attempts, error.kind) == ("flaky", 2, "exhausted")
        assert str(error.error) == "ConnectionError: refused, time 2"
    assert first.error == replayed.error
    assert str(first) == str(replayed)


async def test_recover_gives_the_exhausted_step_a_fresh_count(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: after recover() the step runs as attempt 1 again, with all its retries; what succeeded before does not."""
    flaky = Flaky(failures=5)
    calls: list[str] = []

    async def before() -> None:
        calls.append("before")

    async def workflow(ctx: Context, _: None) -> str:
        await ctx.step("before", before)
        return await ctx.step("flaky", flaky, max_retries=2)

    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError):
            await process.finish(workflow)
        await process.control("recover")
        assert (await namespace.snapshot()).error is None
        await process.restart()
        assert await process.finish(workflow) == "through"
    assert flaky.attempts == [1, 2, 3, 1, 2, 3]
    assert calls == ["before"]


async def test_a_critical_error_is_not_retried_and_ends_the_workflow_under_its_own_name(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: one attempt; the same after a restart."""
    calls: list[int] = []

    class CardDeclinedError(CriticalError):
        pass

    async def pay() -> None:
        calls.append(current_step().attempt)
        raise CardDeclinedError("no funds", cents=1999)

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.step("pay", pay)

    async with host(namespace, mode) as process:
        for _ in range(2):
            with pytest.raises(WorkflowFailedError) as failed:
                await process.finish(workflow)
            assert (failed.value.name, failed.value.error.message) == ("CardDeclinedError", "no funds")
            assert failed.value.metadata["cents"] == 1999
            await process.restart()
    assert calls == [1]


async def test_a_critical_error_can_be_caught_by_the_workflow(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: StepCriticalError on the first run and on replay; the workflow goes on."""
    caught: list[str] = []

    async def pay() -> None:
        raise CriticalError("no funds")

    async def workflow(ctx: Context, _: None) -> str:
        try:
            await ctx.step("pay", pay)
        except StepCriticalError as error:
            caught.append(f"{error.kind} {error.error}")
        await ctx.sleep("pause", 1)
        return "unpaid"

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        assert await process.finish(workflow) == "unpaid"
    assert len(caught) >= 2
    assert set(caught) == {"critical CriticalError: no funds"}


async def test_a_failing_attempt_that_took_longer_than_the_pause_is_durable_before_the_next_begins(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17, S18: also without a pause, a death during the second attempt leaves the first one counted."""
    attempts: list[int] = []

    async def slow() -> str:
        attempts.append(current_step().attempt)
        await trio.sleep(1)
        if len(attempts) == 1:
            raise ConnectionError("refused")
        if len(attempts) == 2:
            namespace.kill()
        return "through"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("slow", slow, retry_backoff_base=0.0)

    with pytest.raises(SimulatedCrashError):
        async with host(namespace, mode) as process:
            await process.finish(workflow)
    assert await namespace.attempts("slow") == (EntryStatus.FAILED, 1)
    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "through"
    assert attempts == [1, 2, 2]
