"""What becomes of a step's outcome when the run is evicted or the storage fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from harness import Fault, FaultyDriver, Namespace, SlowDriver, host
from trio.testing import MockClock

from perdure.storage import Batch, BatchRefusedError, CommitUnknownError, StorageError, layout
from perdure.storage.schema import EntryStatus, StepEntry, decode_entry, decode_metadata
from perdure.workflow import (
    Context,
    RunMode,
    StepExhaustedError,
    WorkflowFailedError,
    WorkflowState,
    current_step,
)

Function = Callable[[Context, Any], Awaitable[Any]]


# S20: evicted while a step's function does not want to end.


async def test_an_eviction_waits_for_a_step_that_cleans_up_and_records_what_it_finished(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S20: the step shields its end, returns, and is recorded; the next one is not begun; a later run goes on from there."""
    calls: list[str] = []

    async def careful() -> str:
        calls.append("careful")
        try:
            await trio.sleep(10)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            return "finished all the same"  # swallows the cancellation, which Trio delivers again at the next chance
        return "undisturbed"

    async def following() -> None:
        calls.append("following")

    async def workflow(ctx: Context, _: None) -> str:
        output = await ctx.step("careful", careful)
        await ctx.step("following", following, at_most_once=True)
        return output

    async with host(namespace, mode) as process:
        assert await process.run_and_leave(workflow, 1) == 5
        assert calls == ["careful"]
        snapshot = await namespace.snapshot()
        assert snapshot.state is WorkflowState.RUNNING
        assert [(entry.path, entry.data["output"]) for entry in snapshot.entries] == [
            (("careful",), "finished all the same")
        ]
        await process.restart()
        assert await process.finish(workflow) == "finished all the same"
    assert calls == ["careful", "following"]


async def test_a_step_does_not_begin_when_the_run_is_stopped_while_its_beginning_is_committed(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S20: nor does an effect that has no scheduling point slip through; a later run begins it."""
    calls: list[str] = []

    async def instant() -> None:
        calls.append("instant")

    async def workflow(ctx: Context, _: None) -> str:
        await ctx.step("instant", instant)
        return "done"

    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        driver.inner = SlowDriver(driver.inner)  # type: ignore[assignment]
        # In live mode the workflow's creation is a commit of its own, before it runs.
        await process.run_and_leave(workflow, 0.5 if mode == "yield" else 1.5)
        assert calls == []
        assert (await namespace.snapshot()).entries == ()
        assert await process.finish(workflow) == "done"
    assert calls == ["instant"]


async def test_a_step_that_was_evicted_before_it_finished_runs_again_as_the_same_attempt(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S20: its shielded clean-up is waited for, and nothing of it is recorded."""
    log: list[str] = []

    async def work() -> str:
        log.append(f"begin {current_step().attempt}")
        try:
            await trio.sleep(10)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(3)
            log.append("cleaned up")
        return "done"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("work", work)

    async with host(namespace, mode) as process:
        assert await process.run_and_leave(workflow, 1) == 3
        assert log == ["begin 1", "cleaned up"]
        snapshot = await namespace.snapshot()
        assert (snapshot.state, snapshot.entries) == (WorkflowState.RUNNING, ())
        assert await process.finish(workflow) == "done"
    assert log == ["begin 1", "cleaned up", "begin 1", "cleaned up"]


async def test_an_error_out_of_the_unwinding_is_not_recorded_as_the_steps(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S20: a clean-up that fails during an eviction is no failed attempt, alone or in a nursery's group."""
    calls: list[int] = []

    async def fail_in_cleanup() -> None:
        try:
            await trio.sleep(10)
        finally:
            if len(calls) < 2:
                raise ConnectionError("already closed")

    async def alone() -> str:
        calls.append(current_step().attempt)
        await fail_in_cleanup()
        return "done"

    async def grouped() -> str:
        calls.append(current_step().attempt)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_in_cleanup)
            nursery.start_soon(trio.sleep, 10)
        return "done"

    for fn in (alone, grouped):
        calls.clear()

        async def workflow(ctx: Context, _: None, fn: Callable[[], Awaitable[str]] = fn) -> str:
            return await ctx.step("work", fn)

        await namespace.close()
        fresh = namespace if fn is alone else Namespace(namespace.kind, namespace.path.parent)
        async with host(fresh, mode) as process:
            await process.run_and_leave(workflow, 1)
            snapshot = await fresh.snapshot()
            assert (snapshot.state, snapshot.entries) == (WorkflowState.RUNNING, ())
            assert await process.finish(workflow) == "done"
        assert calls == [1, 1]


# S21: the storage fails.


def steps_in(batch: Batch) -> list[StepEntry]:
    kinds = [decode_entry(value).kind for key, value in batch.puts if key.startswith(layout.HISTORY_PREFIX)]
    return [kind for kind in kinds if isinstance(kind, StepEntry)]


def statuses_in(batch: Batch) -> list[EntryStatus]:
    return [decode_metadata(value).status for key, value in batch.puts if key.startswith(layout.METADATA_PREFIX)]


async def break_storage(namespace: Namespace, fault: Fault, is_due: Callable[[Batch], bool]) -> FaultyDriver:
    driver = await namespace.driver()
    driver.inner = faulty = FaultyDriver(driver.inner, fault, is_due)  # type: ignore[assignment]
    return faulty


def error_of(fault: Fault) -> type[StorageError]:
    return BatchRefusedError if fault == "refused" else CommitUnknownError


@pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
async def test_a_storage_error_while_a_result_is_committed_is_no_failure_of_the_step(
    namespace: Namespace, mode: RunMode, fault: Fault, autojump_clock: MockClock
) -> None:
    """S21: not re-run in that activation, not seen by the user's code, not counted; later the result is there, or it runs."""
    calls: list[str] = []
    seen: list[str] = []

    async def work(name: str) -> str:
        calls.append(f"{name} {current_step().attempt}")
        return name

    async def workflow(ctx: Context, _: None) -> str:
        try:
            await ctx.step("first", work, "first")
            await ctx.step("second", work, "second")
        except Exception as error:
            seen.append(repr(error))
            raise
        finally:
            await ctx.step("finally", work, "finally")
        return "done"

    async with host(namespace, mode) as process:
        faulty = await break_storage(namespace, fault, lambda batch: len(calls) == 2 and bool(steps_in(batch)))
        with pytest.raises(error_of(fault)):
            await process.finish(workflow)
        assert faulty.has_failed
        assert calls == ["first 1", "second 1"]
        assert seen == []
        await process.restart()
        assert set(await namespace.entries()) == ({("first",), ("second",)} if fault == "applied" else {("first",)})
        assert (await namespace.snapshot()).state is WorkflowState.RUNNING
        assert await process.finish(workflow) == "done"
        assert calls == ["first 1", "second 1", *(["second 1"] if fault != "applied" else []), "finally 1"]
        assert await namespace.attempts("second") == (EntryStatus.COMPLETED, 1)
    assert seen == []


@pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
async def test_a_storage_error_while_a_failed_attempt_is_recorded_counts_it_once_or_not_at_all(
    namespace: Namespace, mode: RunMode, fault: Fault, autojump_clock: MockClock
) -> None:
    """S21: what is stored decides; the attempts that count are at most those that were made."""
    attempts: list[int] = []

    async def failing() -> str:
        attempts.append(current_step().attempt)
        if len(attempts) < 3:
            raise ConnectionError("refused")
        return "through"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("failing", failing)

    async with host(namespace, mode) as process:
        await break_storage(namespace, fault, lambda batch: EntryStatus.FAILED in statuses_in(batch))
        with pytest.raises(error_of(fault)):
            await process.finish(workflow)
        assert attempts == [1]
        await process.restart()
        assert await process.finish(workflow) == "through"
        assert attempts == ([1, 2, 3] if fault == "applied" else [1, 1, 2])
        assert await namespace.attempts("failing") == (EntryStatus.COMPLETED, attempts[-1])


@pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
async def test_a_storage_error_before_a_step_begins_keeps_its_function_from_running(
    namespace: Namespace, mode: RunMode, fault: Fault, autojump_clock: MockClock
) -> None:
    """S21, S22: an at_most_once step whose start may not be durable does not run, and is not run twice for it."""
    calls: list[str] = []

    async def work() -> str:
        calls.append("work")
        return "done"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("work", work, at_most_once=True)

    async with host(namespace, mode) as process:
        await break_storage(namespace, fault, lambda batch: EntryStatus.RUNNING in statuses_in(batch))
        with pytest.raises(error_of(fault)):
            await process.finish(workflow)
        assert calls == []
        await process.restart()
        if fault == "applied":  # nobody can know any more that it did not run
            with pytest.raises(WorkflowFailedError, match="StepInterruptedError"):
                await process.finish(workflow)
            assert calls == []
        else:
            assert await process.finish(workflow) == "done"
            assert calls == ["work"]


async def test_a_storage_error_while_a_final_failure_is_recorded_does_not_fail_the_workflow(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S21: the workflow is running still, and its next run learns the step's outcome anew."""
    attempts: list[int] = []

    async def failing() -> str:
        attempts.append(current_step().attempt)
        if len(attempts) == 1:
            raise ConnectionError("refused")
        return "through"

    async def workflow(ctx: Context, _: None) -> str:
        try:
            return await ctx.step("failing", failing, max_retries=0)
        except StepExhaustedError:
            return "exhausted"

    async with host(namespace, mode) as process:
        await break_storage(namespace, "lost", lambda batch: EntryStatus.EXHAUSTED in statuses_in(batch))
        with pytest.raises(CommitUnknownError):
            await process.finish(workflow)
        await process.restart()
        assert (await namespace.snapshot()).state is WorkflowState.RUNNING
        assert await process.finish(workflow) == "through"
    assert attempts == [1, 1]
