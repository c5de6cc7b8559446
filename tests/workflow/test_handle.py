"""The handle of `start_workflow`: what can be asked of a workflow from outside, and what that does."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from harness import MovableClock, Namespace, SlowDriver
from moments import MomentDriver, Moments
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import Driver
from perdure.workflow import (
    Context,
    RunMode,
    SleepOutcome,
    StepExhaustedError,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowHandle,
    WorkflowState,
    WorkflowSuspendedError,
    control,
    run_workflow,
    start_workflow,
)

CLOCK_MS = 1_700_000_000_000


async def work(value: str = "done") -> str:
    return value


async def asking(ctx: Context, question: Any) -> list[Any]:
    done = await ctx.step("work", work)
    message = await ctx.queue.next("answer", names=["answer"])
    return [question, done, message.body]


async def sleeping(ctx: Context, _: Any) -> str:
    outcome = await ctx.sleep("rest", 3600)
    return outcome.value


class Broken:
    """A step that fails until it is mended."""

    def __init__(self) -> None:
        self.calls = 0
        self.is_mended = False

    async def __call__(self) -> str:
        self.calls += 1
        if not self.is_mended:
            raise ConnectionError(f"no route, call {self.calls}")
        return "mended"


def failing(broken: Broken) -> Any:
    async def workflow(ctx: Context, _: Any) -> str:
        await ctx.step("before", work)
        return await ctx.step("broken", broken, max_retries=0)

    return workflow


@asynccontextmanager
async def started(namespace: Namespace, fn: Any, mode: RunMode, input: object = None) -> AsyncIterator[WorkflowHandle]:
    """A workflow running in a nursery, until the block is left."""
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(
            nursery, "w-1", fn, input, await namespace.driver(), mode=mode, clock=MovableClock()
        )
        await wait_all_tasks_blocked()
        yield handle
        nursery.cancel_scope.cancel()
    await namespace.close()


async def alarm(namespace: Namespace) -> int | None:
    return await (await namespace.driver()).get_alarm("w-1")


class TestWhatItTells:
    async def test_state_output_error_and_history_while_it_waits(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with started(namespace, asking, mode, "why?") as handle:
            assert handle.workflow_id == "w-1"
            assert await handle.get_state() is WorkflowState.SLEEPING
            assert await handle.get_output() is None
            assert await handle.get_error() is None
            assert [(entry.path, entry.kind) for entry in await handle.history()] == [(("work",), "step")]

    async def test_output_and_history_at_the_end_are_what_is_stored(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with started(namespace, asking, "live", "why?") as handle:
            await handle.message("answer", {"because": None}, id="m-1")
            assert await handle.result() == ["why?", "done", {"because": None}]
            assert await handle.get_state() is WorkflowState.COMPLETED
            assert await handle.get_output() == await handle.result()
            snapshot = await namespace.snapshot()
            assert await handle.history() == snapshot.entries
            assert snapshot.output == ["why?", "done", {"because": None}]
            first, second = await handle.get_output(), await handle.get_output()
            first.append("changed")
            assert second != first, "each caller has a value of its own"

    async def test_a_failure_tells_name_message_stack_and_cause(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with started(namespace, failing(Broken()), mode) as handle:
            with pytest.raises(WorkflowFailedError) as caught:
                await handle.result()
            error = caught.value
            assert error.workflow_id == "w-1"
            assert error.name == "StepExhaustedError"
            assert "no route, call 1" in error.message
            assert error.stack is not None
            assert "ConnectionError" in error.stack
            assert isinstance(error.__cause__, StepExhaustedError)
            assert "w-1" in str(error)
            assert await handle.get_error() == error.error
            assert await handle.get_output() is None
            copy = pickle.loads(pickle.dumps(error))
            assert (copy.name, copy.message, copy.workflow_id) == (error.name, error.message, "w-1")

    async def test_a_failure_does_not_cancel_the_nursery(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with started(namespace, failing(Broken()), mode):
            await trio.sleep(1)


class TestResult:
    async def test_a_thousand_waiters_all_get_the_result(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S51: a thousand waiters on one workflow: all get it."""
        got: list[Any] = []

        async def wait(handle: WorkflowHandle) -> None:
            try:
                got.append(await handle.result())
            except WorkflowSuspendedError as suspended:
                got.append(suspended.state)

        async with started(namespace, asking, mode, 1) as handle:
            async with trio.open_nursery() as waiters:
                for _ in range(1000):
                    waiters.start_soon(wait, handle)
                await wait_all_tasks_blocked()
                await handle.message("answer", 2)
            assert got == [[1, "done", 2] if mode == "live" else "sleeping"] * 1000

    async def test_a_thousand_waiters_all_get_the_failure(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S51: a thousand waiters on one workflow: all get it, a failure too."""
        got: list[str] = []

        async def wait(handle: WorkflowHandle) -> None:
            with pytest.raises(WorkflowFailedError) as caught:
                await handle.result()
            got.append(caught.value.name)

        async with started(namespace, failing(Broken()), mode) as handle, trio.open_nursery() as waiters:
            for _ in range(1000):
                waiters.start_soon(wait, handle)
        assert got == ["StepExhaustedError"] * 1000

    async def test_a_cancelled_waiter_leaves_the_workflow_alone(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S51: a waiter of `result()` is cancelled: the workflow goes on."""

        async def busy(ctx: Context, _: Any) -> str:
            return await ctx.step("long", long)

        async def long() -> str:
            await trio.sleep(10)
            return "done"

        async with started(namespace, busy, mode) as handle:
            with trio.move_on_after(5) as scope:
                await handle.result()
            assert scope.cancelled_caught
            assert await handle.result() == "done"

    async def test_the_result_of_a_workflow_that_waits_in_yield_mode_is_an_error_that_says_so(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        async with started(namespace, asking, "yield", 1) as handle:
            with pytest.raises(WorkflowSuspendedError, match="run it again when it is due") as caught:
                await handle.result()
            assert (caught.value.workflow_id, caught.value.state) == ("w-1", "sleeping")

    async def test_a_workflow_evicted_by_its_nursery_is_suspended_not_failed(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        async with started(namespace, asking, "live", 1) as handle:
            pass
        with pytest.raises(WorkflowSuspendedError):
            await handle.result()
        snapshot = await namespace.snapshot()
        await namespace.close()
        assert snapshot.state is WorkflowState.SLEEPING


class TestMutators:
    async def test_in_yield_mode_a_message_is_durable_and_arms_the_alarm_for_now(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        async with started(namespace, asking, "yield", 1) as handle:
            assert await alarm(namespace) is None
            await trio.sleep(5)
            await handle.message("answer", 2)
            assert await alarm(namespace) == CLOCK_MS + 5000
            assert await handle.get_state() is WorkflowState.SLEEPING

    async def test_in_yield_mode_wake_is_durable_and_arms_the_alarm_for_now(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S24: `wake()` ends a sleep at once and durably."""
        async with started(namespace, sleeping, "yield") as handle:
            assert await alarm(namespace) == CLOCK_MS + 3_600_000
            await trio.sleep(5)
            await handle.wake()
            assert await alarm(namespace) == CLOCK_MS + 5000
            (entry,) = (await namespace.snapshot()).entries
            assert entry.data["state"] == "interrupted"

    async def test_an_alarm_that_is_due_earlier_stays(self, namespace: Namespace, autojump_clock: MockClock) -> None:
        async with started(namespace, asking, "yield", 1) as handle:
            await handle.message("answer", 2)
            await trio.sleep(5)
            await handle.message("answer", 3)
            assert await alarm(namespace) == CLOCK_MS

    async def test_in_live_mode_a_message_goes_to_the_parked_function(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        async with started(namespace, asking, "live", 1) as handle:
            await handle.message("other", 1)
            await wait_all_tasks_blocked()
            assert await handle.get_state() is WorkflowState.SLEEPING, "nobody waits for that one"
            await handle.message("answer", 2)
            assert await handle.result() == [1, "done", 2]

    async def test_in_live_mode_wake_ends_the_sleep(self, namespace: Namespace, autojump_clock: MockClock) -> None:
        """S24: `wake()` ends a sleep at once and durably."""
        async with started(namespace, sleeping, "live") as handle:
            await handle.wake()
            assert await handle.result() == SleepOutcome.INTERRUPTED.value
            assert trio.current_time() < 3600

    async def test_wake_of_a_workflow_that_does_not_sleep_changes_nothing(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S24: wake of a workflow that is not sleeping is harmless."""
        async with started(namespace, asking, mode, 1) as handle:
            stored = await namespace.dump()
            await handle.wake()
            assert await namespace.dump() == stored
            await handle.cancel()
            await handle.wake()
            assert await handle.get_state() is WorkflowState.CANCELLED
            assert await alarm(namespace) is None

    async def test_recover_runs_what_failed_again_with_a_fresh_count(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S17: `recover()` lets an exhausted step run again with a fresh count; what was done stays done."""
        broken = Broken()
        async with started(namespace, failing(broken), mode) as handle:
            with pytest.raises(WorkflowFailedError):
                await handle.result()
            broken.is_mended = True
            await trio.sleep(7)
            await handle.recover()
            if mode == "live":
                assert await handle.result() == "mended"
                assert await handle.get_error() is None
            else:
                assert await handle.get_state() is WorkflowState.PENDING
                assert await alarm(namespace) == CLOCK_MS + 7000
                assert await handle.get_error() is None
            snapshot = await namespace.snapshot()
            assert snapshot.error is None
            steps = {entry.path[-1]: entry for entry in snapshot.entries}
            assert steps["before"].data["output"] == "done"
            metadata = steps["broken"].metadata
            assert metadata is not None
            assert metadata.attempts == (1 if mode == "live" else 0)
        assert broken.calls == (2 if mode == "live" else 1)

    async def test_recover_changes_nothing_on_a_workflow_that_did_not_fail(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with started(namespace, asking, mode, 1) as handle:
            stored = await namespace.dump()
            await handle.recover()
            assert await namespace.dump() == stored
            await handle.cancel()
            stored = await namespace.dump()
            await handle.recover()
            assert await namespace.dump() == stored

    async def test_evict_returns_once_the_function_has_unwound_and_leaves_it_resumable(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S33: `evict()`: the state stays resumable."""
        unwound: list[str] = []

        async def careful(ctx: Context, _: Any) -> None:
            try:
                await ctx.queue.next("go")
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(2)
                unwound.append("careful")

        async with started(namespace, careful, "live") as handle:
            await handle.evict()
            assert unwound == ["careful"]
            assert await handle.get_state() is WorkflowState.SLEEPING
            with pytest.raises(WorkflowSuspendedError):
                await handle.result()
            await handle.evict()

    @pytest.mark.parametrize("mutation", ["message", "wake"])
    async def test_what_arrives_while_the_function_unwinds_arms_the_alarm(
        self, mutation: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S33, S27: a run that is over does not look at its mailbox any more, so its alarm must bring another."""

        async def careful(ctx: Context, _: Any) -> str:
            try:
                await ctx.sleep("rest", 3600) if mutation == "wake" else await ctx.queue.next("go")
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(2)
            return "done"

        async with started(namespace, careful, mode) as handle:
            async with trio.open_nursery() as nursery:
                if mode == "live":
                    nursery.start_soon(handle.evict)
                await wait_all_tasks_blocked()
                await trio.sleep(1)
                if mutation == "wake":
                    await handle.wake()
                else:
                    await handle.message("go", 1)
                assert await alarm(namespace) == CLOCK_MS + 1000
            with pytest.raises(WorkflowSuspendedError):
                await handle.result()
            assert await alarm(namespace) == CLOCK_MS + 1000

    async def test_a_message_that_is_being_written_as_the_workflow_is_evicted_arms_the_alarm(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S33, S45: it was on its way before anybody knew that nobody would read it here."""

        async def waiting(ctx: Context, _: Any) -> Any:
            return (await ctx.queue.next("go")).body

        clock = MovableClock()
        async with trio.open_nursery() as nursery:
            driver: Driver = SlowDriver(await namespace.driver(), 1.0)  # type: ignore[assignment]
            handle = await start_workflow(nursery, "w-1", waiting, None, driver, mode="live", clock=clock)
            await trio.sleep(10)
            async with trio.open_nursery() as senders:
                senders.start_soon(handle.message, "go", 1)
                await trio.sleep(0.5)
                await handle.evict()
            nursery.cancel_scope.cancel()
        await namespace.close()
        wake_at_ms = await alarm(namespace)
        assert wake_at_ms is not None, "nothing brings it back"
        assert wake_at_ms <= clock.now_ms()
        assert (await run_workflow("w-1", waiting, None, await namespace.driver(), clock=clock)).output == 1

    async def test_cancel_is_for_good_and_every_waiter_hears_of_it(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S32: `cancel()`: it ends as cancelled, no alarm is left."""
        async with started(namespace, sleeping, mode) as handle:
            await handle.cancel()
            assert await handle.get_state() is WorkflowState.CANCELLED
            assert await alarm(namespace) is None
            for _ in range(2):
                with pytest.raises(WorkflowCancelledError) as caught:
                    await handle.result()
                assert caught.value.workflow_id == "w-1"
            assert (await namespace.snapshot()).state is WorkflowState.CANCELLED
            stored = await namespace.dump()
            await handle.cancel()
            assert await namespace.dump() == stored

    @pytest.mark.parametrize("ending", ["completed", "failed", "cancelled"])
    async def test_an_ended_workflow_takes_no_messages(
        self, ending: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S34: nothing is written to a workflow that has ended."""

        async def quick(ctx: Context, _: Any) -> str:
            return "done"

        fn = {"completed": quick, "failed": failing(Broken()), "cancelled": sleeping}[ending]
        async with started(namespace, fn, mode) as handle:
            if ending == "cancelled":
                await handle.cancel()
            stored = await namespace.dump()
            with pytest.raises(WorkflowEndedError, match=ending) as caught:
                await handle.message("go", 1)
            assert (caught.value.workflow_id, caught.value.state) == ("w-1", ending)
            assert await namespace.dump() == stored

    async def test_a_message_sent_again_after_its_sender_was_cancelled_is_delivered_once(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S27: same `id` sent again: one delivery; a cancelled send leaves nothing half done."""

        async def asking_twice(ctx: Context, _: Any) -> list[Any]:
            first = await ctx.queue.next_batch("first", count=5)
            second = await ctx.queue.next_batch("second", count=5, timeout=60)
            return [[message.body for message in batch] for batch in (first, second)]

        async with started(namespace, asking_twice, "live") as handle:
            with trio.CancelScope() as scope:
                scope.cancel()
                await handle.message("answer", 2, id="m-1")
            await handle.message("answer", 2, id="m-1")
            assert await handle.result() == [[2], []]

    async def test_a_wake_at_any_moment_ends_the_sleep_that_has_begun(
        self, make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S24: `wake()` ends a sleep at once and durably, also while the sleep's beginning is on its way to the disk."""
        names = await self._wake_at(make_namespace(), mode, None)
        ended = [await self._wake_at(make_namespace(), mode, at) for at in range(len(names))]
        assert ["ended"] in ended
        assert ["slept on"] in ended

    async def _wake_at(self, namespace: Namespace, mode: RunMode, at: int | None) -> list[str]:
        async with trio.open_nursery() as nursery:
            has_begun = False

            async def wake() -> None:
                nonlocal has_begun
                activation = handle._activation  # type: ignore[attr-defined]
                has_begun = bool(activation.history.open_sleeps)
                await control.wake(activation)  # as the handle does, without its checkpoint in between

            async def nap(ctx: Context, _: Any) -> str:
                await ctx.step("a", work)
                return await sleeping(ctx, _)

            moments = Moments(nursery, at, wake)
            moments.are_counted = False
            driver = MomentDriver(await namespace.driver(), moments)
            handle = await start_workflow(nursery, "w-1", nap, None, driver, mode=mode, clock=MovableClock())
            moments.are_counted = True
            await wait_all_tasks_blocked()
            names = list(moments.names)
            if at is not None:
                await moments.acted.wait()
                await wait_all_tasks_blocked()
                state = await handle.get_state()
                (sleep,) = (entry for entry in (await namespace.snapshot()).entries if entry.kind == "sleep")
                assert sleep.data["state"] == ("interrupted" if has_begun else "pending")
                if mode == "live":
                    assert state is (WorkflowState.COMPLETED if has_begun else WorkflowState.SLEEPING)
                    assert await alarm(namespace) == (None if has_begun else CLOCK_MS + 3_600_000)
                elif not state.is_terminal:
                    assert await alarm(namespace) == CLOCK_MS + (0 if has_begun else 3_600_000)
                names = ["ended" if has_begun else "slept on"]
            assert trio.current_time() < 3600
            nursery.cancel_scope.cancel()
        await namespace.close()
        return names
