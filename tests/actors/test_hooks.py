"""A supervisor's hooks: told of all its workflows, and changing none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import open_supervisor
from perdure.workflow import (
    Context,
    ErrorEvent,
    HistoryEntry,
    HistoryUpdated,
    InvalidArgumentError,
    StepErrorEvent,
    WorkflowErrorEvent,
    WorkflowFailedError,
    WorkflowState,
    workflow,
)


@workflow(name="waiter")
async def waiter(ctx: Context, _: object) -> Any:
    await ctx.step("first", give, 1)
    return (await ctx.queue.next("wait", names=["go"])).body


@workflow(name="failing")
async def failing(ctx: Context, _: object) -> None:
    await ctx.step("fail", fail, max_retries=1, retry_backoff_base=0.5)


async def give(value: int) -> int:
    return value


async def fail() -> None:
    raise KeyError("always")


class Mirrors:
    """Follows workflows by what a hook is told alone."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[Any, HistoryEntry]] = {}
        self.states: dict[str, list[WorkflowState]] = {}

    def __call__(self, event: HistoryUpdated) -> None:
        entries = self.entries.setdefault(event.workflow_id, {})
        entries |= {entry.path: entry for entry in event.entries}
        states = self.states.setdefault(event.workflow_id, [])
        if states[-1:] != [event.state]:
            states.append(event.state)


async def test_hooks_are_told_of_all_workflows_from_their_creation_over_restarts(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """S37: one pair of hooks for a supervisor, whoever changes a workflow, and whichever process runs it."""
    mirrors, errors = Mirrors(), list[ErrorEvent]()
    hooks: dict[str, Any] = {"on_history_updated": mirrors, "on_error": errors.append}
    async with disk.process(waiter, failing, **hooks) as supervisor:
        for number in range(3):
            await supervisor.spawn(waiter, f"waiter-{number}")
        handle = await supervisor.spawn(failing, "failing-1")
        with pytest.raises(WorkflowFailedError):
            await handle.result()
        await trio.testing.wait_all_tasks_blocked()
    async with disk.process(waiter, failing, **hooks) as supervisor:
        for number in range(2):
            handle = await supervisor.get(f"waiter-{number}")
            await handle.message("go", number)
            assert await handle.result() == number
            assert mirrors.entries[f"waiter-{number}"] == {entry.path: entry for entry in await handle.history()}
        await (await supervisor.get("waiter-2")).cancel()
        with pytest.raises(WorkflowFailedError):
            await (await supervisor.get("failing-1")).result()
    s = WorkflowState
    for number in range(2):
        states = mirrors.states[f"waiter-{number}"]
        assert (states[0], states[-2:]) == (s.RUNNING, [s.RUNNING, s.COMPLETED])
    assert mirrors.states["waiter-2"][-1] is s.CANCELLED
    assert mirrors.states["failing-1"][-1] is s.FAILED
    assert [(type(event), event.workflow_id) for event in errors] == [
        (StepErrorEvent, "failing-1"),
        (StepErrorEvent, "failing-1"),
        (WorkflowErrorEvent, "failing-1"),
    ]


async def test_hooks_that_raise_stop_no_workflow(
    disk: Disk, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """S37: logged; every workflow ends as it would."""

    def raising(event: object) -> None:
        raise RuntimeError("a bug in the hook")

    async def raising_later(event: object) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("a bug in the hook")

    async with disk.process(waiter, failing, on_history_updated=raising_later, on_error=raising) as supervisor:
        handles = [await supervisor.spawn(waiter, f"waiter-{number}") for number in range(5)]
        failed = await supervisor.spawn(failing, "failing-1")
        for number, handle in enumerate(handles):
            await handle.message("go", number)
            assert await handle.result() == number
        with pytest.raises(WorkflowFailedError):
            await failed.result()
        assert supervisor.troubles() == {}
    logged = [record.message for record in caplog.records if "raised" in record.message]
    assert len([message for message in logged if message.startswith("on_error")]) == 3
    assert len([message for message in logged if message.startswith("on_history_updated")]) >= 15


@pytest.mark.parametrize("ends", [True, False])
async def test_a_slow_hook_may_end_within_grace_and_holds_the_end_of_the_block_no_longer(
    disk: Disk, autojump_clock: MockClock, ends: bool
) -> None:
    """S37, S49: it delays no workflow; at the end it gets what is left of `grace`, and is cancelled then."""
    seen: list[str] = []

    async def slow(event: HistoryUpdated) -> None:
        if event.workflow_id == "waiter-2":
            return
        try:
            await trio.sleep(0.9 if ends else 100)
            seen.append("told")
        except trio.Cancelled:
            seen.append("cancelled")
            raise

    async with disk.process(waiter, grace=10, on_history_updated=slow) as supervisor:
        handle = await supervisor.spawn(waiter, "waiter-1")
        await handle.message("go", 1)
        begun_s = trio.current_time()
        assert await handle.result() == 1
        assert trio.current_time() == begun_s, "the hook delayed the workflow"
        left_s = trio.current_time()
    took_s = trio.current_time() - left_s
    if ends:
        assert len(seen) >= 3
        assert set(seen) == {"told"}
        assert took_s == pytest.approx(0.9 * len(seen))
    else:
        assert seen == ["cancelled"]
        assert took_s == pytest.approx(10)
    async with disk.process(waiter, grace=10) as supervisor:
        assert await (await supervisor.get("waiter-1")).result() == 1


class Interruption(BaseException):
    """Stands for Ctrl-C and the like."""


def interrupting(event: HistoryUpdated) -> None:
    if event.state is WorkflowState.SLEEPING:
        raise Interruption


async def interrupting_later(event: HistoryUpdated) -> None:
    await trio.lowlevel.checkpoint()
    if event.state is WorkflowState.SLEEPING:
        raise Interruption


@pytest.mark.parametrize("hook", [interrupting, interrupting_later])
async def test_ctrl_c_in_a_hook_ends_the_block_in_order(
    disk: Disk, autojump_clock: MockClock, hook: Callable[[HistoryUpdated], Any]
) -> None:
    """S37, S49: it is for the program, and comes out of the block as itself; what was durable stays."""

    async def host() -> None:
        async with disk.process(waiter, on_history_updated=hook) as supervisor:
            await supervisor.spawn(waiter, "waiter-1")
            await trio.sleep_forever()

    with pytest.raises(Interruption):
        await host()
    async with disk.process(waiter) as supervisor:
        handle = await supervisor.get("waiter-1")
        await handle.message("go", "body")
        assert await handle.result() == "body"
        assert {entry.path for entry in await handle.history()} >= {("first",), ("wait:count",)}


@pytest.mark.parametrize("argument", ["on_history_updated", "on_error"])
async def test_what_is_no_function_is_refused_before_the_store_is_opened(disk: Disk, argument: str) -> None:
    """S37: a typed error that names the argument."""
    with pytest.raises(InvalidArgumentError, match=argument):
        async with open_supervisor(disk.store, [waiter], **{argument: "text"}):  # type: ignore[arg-type]
            raise AssertionError("not refused")
