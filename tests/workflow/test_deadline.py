"""`deadline=`: a workflow that has not ended in time fails, once and durably, and is rolled back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import trio
from harness import Crash, Namespace, crashes, host
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import layout
from perdure.workflow import (
    Context,
    InvalidArgumentError,
    RollbackContext,
    RunMode,
    WorkflowCancelledError,
    WorkflowDeadlineError,
    WorkflowFailedError,
    WorkflowState,
    replay_from_step,
    run_workflow,
)

calls: list[Any] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def work(name: str, seconds: float = 0) -> str:
    calls.append(name)
    try:
        await trio.sleep(seconds)
    except trio.Cancelled:
        calls.append(f"{name} cancelled")
        raise
    return name


async def undo(ctx: RollbackContext, output: str) -> None:
    calls.append(("undo", output, ctx.error.name))
    await trio.sleep(5)  # handlers take what time they take: the deadline is over


async def order(ctx: Context, input: Any) -> str:
    """Reserves, which can be undone, and then does what its input says for an hour."""
    await ctx.rollback_checkpoint("begin")
    await ctx.step("reserve", work, "reserve", rollback=undo)
    match input:
        case "step":
            await ctx.step("slow", work, "slow", 3600, timeout=0)
        case "sleep":
            await ctx.sleep("nap", 3600)
        case "queue":
            await ctx.queue.next("reply")
        case "retry":
            await ctx.step("shaky", fail, retry_backoff_base=3600, retry_backoff_max=3600)
        case "join":

            async def step(ctx: Context) -> None:
                await ctx.step("slow", work, "slow", 3600, timeout=0)

            async def nap(ctx: Context) -> None:
                await ctx.sleep("nap", 7200)

            await ctx.join("both", {"step": step, "nap": nap})
        case _:
            raise AssertionError(input)
    return "in time"


async def fail() -> None:
    calls.append("shaky")
    raise OSError("not now")


WAYS = ["step", "sleep", "queue", "retry", "join"]


async def failed(stop: Callable[[], Any]) -> WorkflowFailedError:
    """How the workflow fails."""
    with pytest.raises(WorkflowFailedError) as raised:
        await stop()
    return raised.value


class TestInTime:
    async def test_a_workflow_that_ends_before_its_deadline_is_as_any_other(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async def quick(ctx: Context, input: None) -> str:
            await ctx.sleep("nap", 5)
            return await ctx.step("work", work, "work", 1)

        async with host(namespace, mode, deadline=10) as process:
            assert await process.finish(quick) == "work"
            await process.advance(20)
            await process.restart()
            assert await process.finish(quick) == "work", "nor is it undone later"

    async def test_the_first_run_says_when(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with host(namespace, mode, deadline=10) as process:
            await process.stop(order, "sleep")
            await process.restart()
            process.deadline = 100_000
            error = await failed(lambda: process.finish(order, "sleep"))
            assert error.error.name == "WorkflowDeadlineError"
            assert trio.current_time() < 20

    async def test_what_waits_is_to_be_run_at_the_deadline_at_the_latest(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with host(namespace, mode, deadline=10) as process:
            for what in ("sleep", "queue"):
                result = await process.stop(order, what)
                assert result.sleep_until is not None or mode == "live"
            due_ms = layout.decode_u64((await namespace.dump())[layout.ALARM_KEY])
            assert due_ms == 10_000 + process.clock.now_ms() - round(trio.current_time() * 1000)


@pytest.mark.parametrize("way", WAYS)
class TestExpiry:
    """S32 and S35 for an end that comes by itself."""

    async def test_it_fails_and_is_rolled_back(
        self, namespace: Namespace, mode: RunMode, way: str, autojump_clock: MockClock
    ) -> None:
        async with host(namespace, mode, deadline=10) as process:
            error = await failed(lambda: process.finish(order, way))
            assert trio.current_time() == pytest.approx(15, abs=0.1), "at the deadline; the handler takes five seconds"
            assert error.error.name == "WorkflowDeadlineError"
            assert isinstance(error.__cause__, WorkflowDeadlineError | None)
            assert error.error.metadata["deadline_ms"] % 1000 == process.clock.now_ms() % 1000
        assert calls[0] == "reserve"
        assert calls[-1] == ("undo", "reserve", "WorkflowDeadlineError")
        assert ("slow cancelled" in calls) == (way in ("step", "join")), "the step is over before it is undone"
        dump = await namespace.dump()
        assert dump[layout.STATE_KEY] == b"failed"
        assert layout.ALARM_KEY not in dump

    async def test_down_at_that_time_it_fails_at_the_next_start(
        self, namespace: Namespace, mode: RunMode, way: str, autojump_clock: MockClock
    ) -> None:
        async with host(namespace, mode, deadline=10) as process:
            if mode == "live" or way not in ("step", "join"):
                await process.stop(order, way)
            else:
                with trio.move_on_after(5):
                    await process.stop(order, way)
            await process.restart()
            await process.advance(100)
            calls.clear()
            error = await failed(lambda: process.finish(order, way))
            assert error.error.name == "WorkflowDeadlineError"
        assert calls == [("undo", "reserve", "WorkflowDeadlineError")], "nothing else runs"

    async def test_a_death_at_any_write_changes_nothing(
        self, make_namespace: Callable[[], Namespace], mode: RunMode, way: str, autojump_clock: MockClock
    ) -> None:
        """S39: decided once; what the deadline has begun goes on, whatever dies."""

        async def scenario(namespace: Namespace) -> str:
            async with host(namespace, mode, deadline=10) as process:
                return (await failed(lambda: process.finish(order, way))).error.name

        async def check(outcome: str, namespace: Namespace, crash: Crash | None) -> None:
            assert outcome == "WorkflowDeadlineError"
            snapshot = await namespace.snapshot()
            assert snapshot.state is WorkflowState.FAILED
            entries = await namespace.entries()
            reserve = entries[("reserve",)].metadata
            assert reserve is not None
            assert reserve.rollback_completed_at_ms is not None
            assert calls.count(("undo", "reserve", "WorkflowDeadlineError")) in ((1,) if crash is None else (1, 2))
            calls.clear()

        exploration = await crashes(scenario, make_namespace, check)
        assert exploration.counted >= 4


async def test_without_a_checkpoint_nothing_is_undone(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    async def plain(ctx: Context, input: None) -> None:
        await ctx.step("first", work, "first")
        await ctx.sleep("nap", 3600)

    async with host(namespace, mode, deadline=10) as process:
        error = await failed(lambda: process.finish(plain))
        assert "deadline" in error.error.message
        assert trio.current_time() == pytest.approx(10, abs=0.1)
        await process.restart()
        assert (await failed(lambda: process.finish(plain))).error == error.error, "the same on every later run"
    assert calls == ["first"]


async def test_code_that_does_not_fit_is_not_run_after_the_deadline(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: a workflow without handlers fails in time, whatever its code has become."""

    async def before(ctx: Context, input: None) -> None:
        await ctx.step("first", work, "first")
        await ctx.sleep("nap", 3600)

    async def after(ctx: Context, input: None) -> None:
        await ctx.step("another", work, "another")

    async with host(namespace, mode, deadline=10) as process:
        await process.stop(before)
        await process.restart()
        await process.advance(11)
        assert (await failed(lambda: process.finish(after))).error.name == "WorkflowDeadlineError"
    assert calls == ["first"]


async def test_a_step_that_cleans_up_for_long_is_waited_for_and_does_not_count(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S20: nothing is undone beside a step that still runs."""

    async def stubborn() -> str:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(30)
            calls.append("cleaned up")

    async def workflow(ctx: Context, input: None) -> str:
        await ctx.rollback_checkpoint("begin")
        await ctx.step("reserve", work, "reserve", rollback=undo)
        try:
            return await ctx.step("stubborn", stubborn, timeout=0)
        except Exception:
            return await ctx.step("never", work, "never")

    async with host(namespace, mode, deadline=10) as process:
        await failed(lambda: process.finish(workflow))
    assert calls == ["reserve", "cleaned up", ("undo", "reserve", "WorkflowDeadlineError")]
    assert ("stubborn",) not in await namespace.entries()


async def test_handlers_may_take_longer_than_the_deadline_and_are_retried(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S35: while the workflow is rolled back its deadline is over."""

    async def shaky_undo(ctx: RollbackContext, output: str) -> None:
        calls.append(f"undo {ctx.attempt}")
        if ctx.attempt < 3:
            raise OSError("not yet")

    async def workflow(ctx: Context, input: None) -> None:
        await ctx.rollback_checkpoint("begin")
        await ctx.step("reserve", work, "reserve", rollback=shaky_undo, retry_backoff_base=60, retry_backoff_max=60)
        await ctx.sleep("nap", 3600)

    async with host(namespace, mode, deadline=10) as process:
        error = await failed(lambda: process.finish(workflow))
        assert "rollback_error" not in error.error.metadata
    assert calls == ["reserve", "undo 1", "undo 2", "undo 3"]


class TestOtherEnds:
    async def test_a_cancellation_while_the_step_unwinds_wins(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S32: `cancel()` wins against anything in flight."""

        async def stubborn() -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(30)

        async def workflow(ctx: Context, input: None) -> None:
            await ctx.step("stubborn", stubborn, timeout=0)

        async with host(namespace, "live", deadline=10) as process:
            await process.stop(workflow)
            await process.advance(20)
            await process.control("cancel")
            assert process.handle is not None
            with pytest.raises(WorkflowCancelledError):
                await process.handle.result()
        assert (await namespace.snapshot()).state is WorkflowState.CANCELLED

    async def test_an_eviction_while_the_step_unwinds_leaves_the_rollback_to_the_next_run(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S33: the workflow has failed; it is undone elsewhere."""

        async def stubborn() -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(30)

        async def workflow(ctx: Context, input: None) -> None:
            await ctx.rollback_checkpoint("begin")
            await ctx.step("reserve", work, "reserve", rollback=undo)
            await ctx.step("stubborn", stubborn, timeout=0)

        async with host(namespace, mode, deadline=10) as process:
            if mode == "live":
                await process.stop(workflow)
                await process.advance(20)
                await process.evict()
                assert calls == ["reserve"]
                assert (await namespace.snapshot()).state is WorkflowState.ROLLING_BACK
            error = await failed(lambda: process.finish(workflow))
            assert error.error.name == "WorkflowDeadlineError"
        assert calls == ["reserve", ("undo", "reserve", "WorkflowDeadlineError")]

    async def test_a_clock_set_forward_expires_and_one_set_back_waits(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S24: the deadline is a time of the wall clock."""
        async with host(namespace, mode, deadline=3600) as process:
            await process.stop(order, "queue")
            process.clock.move(-1800)
            await process.advance(3700)
            result = await process.stop(order, "queue")
            assert result.state is WorkflowState.SLEEPING
            process.clock.move(3600)
            await wait_all_tasks_blocked()
            assert (await failed(lambda: process.finish(order, "queue"))).error.name == "WorkflowDeadlineError"


class TestRunningOn:
    async def test_recover_lets_it_go_on_without_a_deadline(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: it would fail again at once; undone steps run again."""
        async with host(namespace, mode, deadline=10) as process:
            await failed(lambda: process.finish(order, "sleep"))
            await process.control("recover")
            assert layout.DEADLINE_KEY not in await namespace.dump()
            assert await process.finish(order, "sleep") == "in time"
        assert calls == ["reserve", ("undo", "reserve", "WorkflowDeadlineError"), "reserve"]

    async def test_recover_keeps_a_deadline_that_is_still_to_come(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: a failure of another kind says nothing about the time that is left."""
        is_mended = False

        async def workflow(ctx: Context, input: None) -> None:
            await ctx.step("shaky", shaky, max_retries=0)
            await ctx.sleep("nap", 3600)

        async def shaky() -> None:
            if not is_mended:
                raise OSError("not yet")

        async with host(namespace, mode, deadline=100) as process:
            assert (await failed(lambda: process.finish(workflow))).error.name == "StepExhaustedError"
            is_mended = True
            await process.control("recover")
            assert (await failed(lambda: process.finish(workflow))).error.name == "WorkflowDeadlineError"
            assert trio.current_time() == pytest.approx(100, abs=0.1)

    async def test_replayed_from_a_step_it_has_no_deadline_that_is_over(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: an operator's act makes it runnable, not fail."""
        async with host(namespace, mode, deadline=10) as process:

            async def plain(ctx: Context, input: None) -> str:
                await ctx.sleep("nap", 20)
                return await ctx.step("last", work, "last")

            await failed(lambda: process.finish(plain))
            await process.restart()
            await replay_from_step(await namespace.driver(), clock=process.clock)
            assert await process.finish(plain) == "last"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (-1, "deadline"),
        ("tomorrow", "deadline"),
        (True, "deadline"),
        (1_700_000_000.0, "seconds from now"),
        (datetime(2030, 1, 1), "timezone"),
        (datetime(1969, 1, 1, tzinfo=UTC), "1970"),
    ],
)
async def test_what_is_no_time_is_refused_before_anything_is_written(
    namespace: Namespace, mode: RunMode, wrong: Any, says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        await run_workflow("w-1", order, "sleep", await namespace.driver(), mode=mode, deadline=wrong)
    assert await namespace.dump() == {}


async def test_a_datetime_is_a_time(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    async with host(namespace, mode) as process:
        process.deadline = datetime.fromtimestamp(process.clock.now_ms() / 1000 + 10, UTC)
        error = await failed(lambda: process.finish(order, "sleep"))
        assert datetime.fromtimestamp(error.error.metadata["deadline_ms"] / 1000, UTC) == process.deadline
