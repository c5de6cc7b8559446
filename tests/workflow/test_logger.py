"""`ctx.logger` and `ctx.is_replaying`: silent, and true, exactly while recorded history is ahead."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Namespace, host
from trio.testing import MockClock

from perdure.workflow import Break, Context, Continue, RunMode, WorkflowState

LOGGER = "perdure.workflow.user"


async def work() -> str:
    return "done"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What was logged, as it comes; a list that fills."""
    caplog.set_level(logging.DEBUG, LOGGER)
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Collector()
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


async def test_a_line_before_a_recorded_entry_is_logged_once(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, lines: list[str]
) -> None:
    async def order(ctx: Context, _: Any) -> None:
        ctx.logger.info("begin %s", ctx.workflow_id)
        await ctx.step("first", work)
        ctx.logger.warning("before the sleep")
        await ctx.sleep("rest", 60)
        ctx.logger.debug("after the sleep")
        await ctx.step("last", work)
        ctx.logger.error("end")

    async with host(namespace, mode) as process:
        await process.stop(order)
        await process.restart()
        await process.stop(order)
        await process.restart()
        await process.finish(order)
        await process.restart()
        await process.finish(order)
    assert lines == ["begin workflow-1", "before the sleep", "after the sleep", "end"]


async def test_is_replaying_turns_false_at_the_first_new_operation(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    seen: list[list[bool]] = []

    async def order(ctx: Context, _: Any) -> None:
        run: list[bool] = []
        seen.append(run)
        run.append(ctx.is_replaying)
        await ctx.step("first", work)
        run.append(ctx.is_replaying)
        await ctx.queue.next_batch("read", timeout=60)
        run.append(ctx.is_replaying)
        await ctx.queue.next("gate")
        run.append(ctx.is_replaying)

    async with host(namespace, mode) as process:
        await process.stop(order)
        await process.restart()
        await process.stop(order)
        assert seen[0] == [False, False]
        assert seen[1] == [True, True], "the read's deadline is recorded, and it is not over"
        await process.advance(60)
        await process.stop(order)
        await process.restart()
        await process.send("gate")
        await process.finish(order)
    assert seen[-1] == [True, True, False, False]


async def test_lines_in_a_loop_are_logged_once_per_iteration(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, lines: list[str]
) -> None:
    outer: list[Context] = []

    async def body(ctx: Context, number: int) -> Continue[int] | Break[int]:
        outer[-1].logger.info("outer sees %d", number)
        ctx.logger.info("begin %d", number)
        await ctx.step("work", work)
        ctx.logger.info("worked %d", number)
        await ctx.sleep("rest", 10)
        ctx.logger.info("rested %d", number)
        outer[-1].logger.info("outer sees the end of %d", number)
        return Break(number) if number == 3 else Continue(number + 1)

    async def order(ctx: Context, _: Any) -> None:
        outer.append(ctx)
        ctx.logger.info("before the loop")
        await ctx.loop("loop", body, 0, history_prune_interval=2)
        ctx.logger.info("after the loop")
        await ctx.queue.next("gate")
        ctx.logger.info("end")

    async with host(namespace, mode) as process:
        for _ in range(12):
            stopped = await process.stop(order)
            if stopped.sleep_until is None:
                break
            await process.restart()
            await process.stop(order)
            await process.advance(10)
        assert stopped.state is WorkflowState.SLEEPING
        await process.send("gate")
        await process.finish(order)
        await process.restart()
        await process.finish(order)
    expected = ["before the loop"]
    for number in range(4):
        expected += [f"outer sees {number}", f"begin {number}", f"worked {number}", f"rested {number}"]
        expected += [f"outer sees the end of {number}"]
    # What follows the last recorded entry is new on every run that gets there, until something is recorded after it.
    assert list(dict.fromkeys(lines)) == [*expected, "after the loop", "end"]
    for line in [*expected[:4], "worked 1", "worked 2", "worked 3"]:
        assert lines.count(line) == 1, line


async def test_inside_a_loop_is_replaying_is_true_for_recorded_operations_only(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    seen: list[tuple[str, bool, bool]] = []
    outer: list[Context] = []

    async def body(ctx: Context, _: None) -> Break[None]:
        seen.append(("begin", ctx.is_replaying, outer[-1].is_replaying))
        await ctx.step("work", work)
        seen.append(("worked", ctx.is_replaying, outer[-1].is_replaying))
        await ctx.queue.next("gate")
        seen.append(("end", ctx.is_replaying, outer[-1].is_replaying))
        return Break(None)

    async def order(ctx: Context, _: Any) -> None:
        outer.append(ctx)
        seen.append(("before", ctx.is_replaying, ctx.is_replaying))
        await ctx.loop("loop", body)

    async with host(namespace, mode) as process:
        await process.stop(order)
        assert seen == [("before", False, False), ("begin", False, False), ("worked", False, False)]
        await process.restart()
        seen.clear()
        await process.send("gate")
        await process.finish(order)
    assert seen == [("before", True, True), ("begin", True, True), ("worked", False, False), ("end", False, False)]


async def test_records_carry_the_workflows_id_and_the_callers_extra(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)

    async def order(ctx: Context, _: Any) -> None:
        ctx.logger.info("one", extra={"sku": 7})
        ctx.logger.debug("below the level")
        assert ctx.logger.isEnabledFor(logging.INFO)
        assert not ctx.logger.isEnabledFor(logging.DEBUG)

    async with host(namespace, mode) as process:
        await process.finish(order)
    (record,) = (record for record in caplog.records if record.name == LOGGER)
    facts: Any = record
    assert (facts.workflow_id, facts.sku, record.getMessage()) == ("workflow-1", 7, "one")
