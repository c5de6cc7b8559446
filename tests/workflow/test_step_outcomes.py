"""What becomes of a step's outcome: evictions, storage that fails, `at_most_once` and `ephemeral`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from harness import Fault, FaultyDriver, Host, Namespace, SimulatedCrashError, SlowDriver, host
from trio.testing import MockClock

from perdure.storage import Batch, BatchRefusedError, CommitUnknownError, StorageError, layout
from perdure.storage.schema import EntryStatus, StepEntry, decode_entry, decode_metadata
from perdure.workflow import (
    Context,
    HistoryEntry,
    RunMode,
    StepExhaustedError,
    StepInterruptedError,
    StepTimeoutError,
    WorkflowFailedError,
    WorkflowState,
    current_step,
)

Function = Callable[[Context, Any], Awaitable[Any]]


async def entries(namespace: Namespace) -> dict[tuple[str | int, ...], HistoryEntry]:
    return {entry.path: entry for entry in (await namespace.snapshot()).entries}


async def status(namespace: Namespace, *path: str | int) -> tuple[EntryStatus, int]:
    metadata = (await entries(namespace))[path].metadata
    assert metadata is not None
    return metadata.status, metadata.attempts


async def run_and_leave(process: Host, fn: Function, after_s: float) -> float:
    """Run the workflow, evict it (in yield mode: cancel whoever runs it) after a time; how long that took, in seconds."""
    async with trio.open_nursery() as runner:
        runner.start_soon(process.stop, fn)
        await process.advance(after_s)
        left_s = trio.current_time()
        await process.evict()
        runner.cancel_scope.cancel()
    return trio.current_time() - left_s


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
        assert await run_and_leave(process, workflow, 1) == 5
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
        await run_and_leave(process, workflow, 0.5 if mode == "yield" else 1.5)
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
        assert await run_and_leave(process, workflow, 1) == 3
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
            await run_and_leave(process, workflow, 1)
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
        assert set(await entries(namespace)) == ({("first",), ("second",)} if fault == "applied" else {("first",)})
        assert (await namespace.snapshot()).state is WorkflowState.RUNNING
        assert await process.finish(workflow) == "done"
        assert calls == ["first 1", "second 1", *(["second 1"] if fault != "applied" else []), "finally 1"]
        assert await status(namespace, "second") == (EntryStatus.COMPLETED, 1)
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
        assert await status(namespace, "failing") == (EntryStatus.COMPLETED, attempts[-1])


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


# S22: at most once.


async def test_an_at_most_once_step_is_durable_as_running_before_its_function_begins(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S22: also when it is not the first step of its activation; afterwards it is an ordinary completed step."""
    seen: list[tuple[EntryStatus, int]] = []

    async def look(name: str) -> str:
        driver = await namespace.driver()
        stored = [decode_metadata(value) for _, value in await driver.list(layout.METADATA_PREFIX)]
        seen.extend((metadata.status, metadata.attempts) for metadata in stored if metadata.completed_at_ms is None)
        return name

    async def workflow(ctx: Context, _: None) -> list[str]:
        return [await ctx.step(name, look, name, at_most_once=True) for name in ("a", "b")]

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == ["a", "b"]
        await process.restart()
        assert await process.finish(workflow) == ["a", "b"]
    assert seen == [(EntryStatus.RUNNING, 1), (EntryStatus.RUNNING, 1)]
    assert await status(namespace, "a") == (EntryStatus.COMPLETED, 1)


@pytest.mark.parametrize("ending", ["death", "eviction"])
async def test_an_at_most_once_step_of_unknown_outcome_raises_and_never_runs_again(
    namespace: Namespace, mode: RunMode, ending: str, autojump_clock: MockClock
) -> None:
    """S22: killed or evicted during the function; the same StepInterruptedError on every later run."""
    calls: list[int] = []
    caught: list[StepInterruptedError] = []

    async def pay() -> str:
        calls.append(current_step().attempt)
        await trio.sleep(10)
        if ending == "death":
            namespace.kill()
        return "paid"

    async def workflow(ctx: Context, _: None) -> str:
        try:
            return await ctx.step("pay", pay, at_most_once=True)
        except StepInterruptedError as error:
            caught.append(error)
        await ctx.sleep("pause", 1)
        return "ask a person"

    if ending == "death":
        with pytest.raises(SimulatedCrashError):
            async with host(namespace, mode) as process:
                await process.finish(workflow)
    else:
        async with host(namespace, mode) as process:
            await run_and_leave(process, workflow, 1)
    assert caught == []
    assert await status(namespace, "pay") == (EntryStatus.RUNNING, 1)
    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        assert await process.finish(workflow) == "ask a person"
    assert calls == [1]
    for error in (caught[0], caught[-1]):
        assert (error.step_name, error.attempts, error.kind) == ("pay", 1, "interrupted")
    assert str(caught[0]) == str(caught[-1])
    assert caught[0] is not caught[-1]


async def test_an_interrupted_step_that_nobody_catches_fails_the_workflow_until_recover(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S22: recover() is a person's word that it may run again."""
    calls: list[int] = []

    async def pay() -> str:
        calls.append(current_step().attempt)
        if len(calls) == 1:
            namespace.kill()
        return "paid"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("pay", pay, at_most_once=True)

    with pytest.raises(SimulatedCrashError):
        async with host(namespace, mode) as process:
            await process.finish(workflow)
    async with host(namespace, mode) as process:
        for _ in range(2):
            with pytest.raises(WorkflowFailedError) as failed:
                await process.finish(workflow)
            assert failed.value.name == "StepInterruptedError"
            await process.restart()
        assert calls == [1]
        await process.control("recover")
        await process.restart()
        assert await process.finish(workflow) == "paid"
    assert calls == [1, 1]


async def test_an_at_most_once_step_is_not_retried(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S22: an error or a timeout that was seen is its outcome, after one call."""
    calls: list[str] = []

    async def failing() -> None:
        calls.append("failing")
        raise ConnectionError("refused")

    async def slow() -> None:
        calls.append("slow")
        await trio.sleep(3600)

    async def workflow(ctx: Context, _: None) -> list[str]:
        outcomes: list[str] = []
        for name, fn in (("failing", failing), ("slow", slow)):
            try:
                await ctx.step(name, fn, at_most_once=True)
            except (StepExhaustedError, StepTimeoutError) as error:
                outcomes.append(f"{error.kind} after {error.attempts}: {error.error.name}")
        return outcomes

    async with host(namespace, mode) as process:
        expected = ["exhausted after 1: ConnectionError", "timeout after 1: StepTimeoutError"]
        assert await process.finish(workflow) == expected
        await process.restart()
        assert await process.finish(workflow) == expected
    assert calls == ["failing", "slow"]


# S23: ephemeral.


async def test_an_ephemeral_step_joins_the_next_durable_write(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S23: however many there are, they cost no write of their own, and lie in one batch with what follows them."""

    async def work(name: str) -> str:
        return name

    async def workflow(ctx: Context, _: None) -> None:
        for number in range(50):
            await ctx.step(f"ephemeral {number}", work, "e", ephemeral=True)
        await ctx.step("durable", work, "d")
        await ctx.step("last", work, "l", ephemeral=True)

    async with host(namespace, mode) as process:
        await process.finish(workflow)
        batches = [len(steps_in(batch)) for batch in (await namespace.driver()).batches]
        # What precedes is the beginning of the workflow and of its first step; what follows, its end.
        assert [count for count in batches if count] == [51, 1]
        assert len(batches) <= 4
        recorded = [entry.path for entry in sorted((await entries(namespace)).values(), key=lambda entry: entry.id)]
    assert recorded == [*((f"ephemeral {number}",) for number in range(50)), ("durable",), ("last",)]


async def test_an_ephemeral_step_runs_again_after_a_crash_unless_something_durable_followed(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S23: its value on the way is the stored one all the same; nothing after it is ever stored without it."""
    calls: list[str] = []

    async def work(name: str) -> tuple[str, int]:
        calls.append(name)
        return name, len(calls)

    async def fatal(*, when: int) -> None:
        calls.append("fatal")
        if calls.count("fatal") == when:
            namespace.kill()

    async def fatal_first() -> None:
        await fatal(when=1)

    async def fatal_second() -> None:
        await fatal(when=3)

    async def workflow(ctx: Context, _: None) -> list[Any]:
        first = await ctx.step("ephemeral", work, "ephemeral", ephemeral=True)
        assert first == ["ephemeral", first[1]], "tuples come back as lists on the first run too"
        await ctx.step("fatal first", fatal_first)
        await ctx.step("fatal second", fatal_second)
        return first

    for expected in (set(), {("ephemeral",), ("fatal first",)}):
        with pytest.raises(SimulatedCrashError):
            async with host(namespace, mode) as process:
                await process.finish(workflow)
        assert set(await entries(namespace)) == expected
    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == ["ephemeral", 3]
    assert calls == ["ephemeral", "fatal", "ephemeral", "fatal", "fatal", "fatal"]


async def test_whatever_must_be_durable_takes_earlier_ephemeral_steps_with_it(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S23: a wait, the start of an at_most_once step, and a failed attempt never overtake them."""
    seen: dict[str, set[str]] = {}
    flaky: list[int] = []

    async def work() -> None:
        return None

    async def look(name: str) -> None:
        driver = await namespace.driver()
        seen[name] = {value.decode() for _, value in await driver.list(layout.NAMES_PREFIX)}

    async def fail_once() -> None:
        flaky.append(1)
        if len(flaky) == 1:
            raise ConnectionError("refused")
        await look("retry")

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.step("one", work, ephemeral=True)
        await ctx.step("at most once", look, "at most once", at_most_once=True)
        await ctx.step("two", work, ephemeral=True)
        await ctx.step("retry", fail_once, ephemeral=True)
        await ctx.step("three", work, ephemeral=True)
        await ctx.sleep("pause", 60)

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.advance(1)
        stopped = await process.stop(workflow)
        assert stopped.state is WorkflowState.SLEEPING
        assert set(await entries(namespace)) == {
            (name,) for name in ("one", "at most once", "two", "retry", "three", "pause")
        }
    assert "one" in seen["at most once"]
    assert "two" in seen["retry"]
