"""Steps that run at most once, and steps that are written with what follows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from harness import Namespace, SimulatedCrashError, host
from trio.testing import MockClock

from perdure.storage import Batch, layout
from perdure.storage.schema import EntryStatus, StepEntry, decode_entry, decode_metadata
from perdure.workflow import (
    Context,
    RunMode,
    StepExhaustedError,
    StepInterruptedError,
    StepTimeoutError,
    WorkflowFailedError,
    WorkflowState,
    current_step,
)

Function = Callable[[Context, Any], Awaitable[Any]]


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
    assert await namespace.attempts("a") == (EntryStatus.COMPLETED, 1)


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
            await process.run_and_leave(workflow, 1)
    assert caught == []
    assert await namespace.attempts("pay") == (EntryStatus.RUNNING, 1)
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


def steps_in(batch: Batch) -> list[StepEntry]:
    kinds = [decode_entry(value).kind for key, value in batch.puts if key.startswith(layout.HISTORY_PREFIX)]
    return [kind for kind in kinds if isinstance(kind, StepEntry)]


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
        recorded = [entry.path for entry in sorted((await namespace.entries()).values(), key=lambda entry: entry.id)]
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
        assert first == ("ephemeral", first[1]), "it is read back by its annotation on the first run too"
        await ctx.step("fatal first", fatal_first)
        await ctx.step("fatal second", fatal_second)
        return first

    for expected in (set(), {("ephemeral",), ("fatal first",)}):
        with pytest.raises(SimulatedCrashError):
            async with host(namespace, mode) as process:
                await process.finish(workflow)
        assert set(await namespace.entries()) == expected
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
        assert set(await namespace.entries()) == {
            (name,) for name in ("one", "at most once", "two", "retry", "three", "pause")
        }
    assert "one" in seen["at most once"]
    assert "two" in seen["retry"]
