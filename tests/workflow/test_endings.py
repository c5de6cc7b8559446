"""Endings: cancel and evict at every moment of a run, and what the user's own code can and cannot swallow.

The moments are counted in a first run: before it starts, before and after each batch, in each step's function, parked in
a sleep, in a wait for a message and in a retry's backoff, inside a loop, and after the end.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from harness import MovableClock, Namespace, host
from moments import MomentDriver, Moments
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.workflow import (
    Break,
    Context,
    Continue,
    QueueTimeoutError,
    RunMode,
    StepError,
    SuspendSignal,
    UserCancellationError,
    WorkflowCancelledError,
    WorkflowHandle,
    WorkflowState,
    WorkflowSuspendedError,
    run_workflow,
    start_workflow,
)

OUTPUT = ["paid", "completed", "shipped", [], 12, "at last"]
EFFECTS = ["pay", "pay", "ship", "count 0", "count 1", "count 2", "flaky", "flaky", "flaky"]


@dataclass
class Shop:
    """An order workflow with one of everything, the effects it had, and a moment inside each."""

    moments: Moments
    effects: list[str] = field(default_factory=list)

    async def effect(self, name: str, result: Any) -> Any:
        self.effects.append(name)
        await self.moments.reached(f"in {name}")
        return result

    async def flaky(self) -> str:
        await self.effect("flaky", None)
        if self.effects.count("flaky") < 3:
            raise ConnectionError("not yet")
        return "at last"

    async def order(self, ctx: Context, _: Any) -> list[Any]:
        paid = await ctx.step("pay", self.effect, "pay", "paid")
        outcome = await ctx.sleep("rest", 60)
        message = await ctx.queue.next("shipment", names=["shipped"], timeout=3600)
        await ctx.step("ship", self.effect, "ship", None, ephemeral=True)
        nothing = await ctx.queue.next_batch("nothing", names=["never"], timeout=5)
        counted = await ctx.loop("loop", self.count, 0, history_prune_interval=2)
        last = await ctx.step("flaky", self.flaky, max_retries=20)
        return [paid, outcome.value, message.name, nothing, counted, last]

    async def count(self, ctx: Context, total: int) -> Continue[int] | Break[int]:
        number = total // 4
        await ctx.step("count", self.effect, f"count {number}", None)
        await ctx.sleep("pause", 1)
        return Break(total + 4) if number == 2 else Continue(total + 4)


@dataclass
class Run:
    """What one run of the shop came to."""

    namespace: Namespace
    mode: RunMode
    shop: Shop
    handle: WorkflowHandle
    moments: Moments

    @property
    def clock(self) -> Any:
        return self.handle._activation.clock  # type: ignore[attr-defined]


Act = Callable[[WorkflowHandle], Awaitable[None]]


async def until_over(
    namespace: Namespace, mode: RunMode, at: int | None, act: Act, check: Callable[[Run], Awaitable[None]]
) -> list[str]:
    """Run the shop to its end, or until something was done to it at the given moment; then check.

    In yield mode this starts it again whenever it is due, as a host would.
    """
    clock = MovableClock()
    async with trio.open_nursery() as nursery:
        handle: Any = None
        moments = Moments(nursery, at, lambda: act(handle))
        shop = Shop(moments)
        driver = MomentDriver(await namespace.driver(), moments)
        was_sent = False
        while not moments.was_reached:
            moments.are_counted = handle is not None
            handle = await start_workflow(nursery, "w-1", shop.order, None, driver, mode=mode, clock=clock)
            moments.are_counted = True
            await moments.reached("started")
            while not moments.was_reached:
                await wait_all_tasks_blocked()
                await moments.reached("parked")
                state = await handle.get_state()
                if state.is_terminal or moments.was_reached:
                    break
                waiting = handle._activation.waiting
                if waiting is not None and not was_sent and "shipped" in (waiting.names or ()):
                    was_sent = True
                    await handle.message("shipped", None)
                    if mode == "yield":
                        break
                    continue
                alarm_ms = await driver.get_alarm("w-1")
                assert alarm_ms is not None, "something brings it back"
                await trio.sleep(max(0.001, (alarm_ms - clock.now_ms()) / 1000))
                if mode == "yield":
                    break
            if (await handle.get_state()).is_terminal and not moments.was_reached:
                await moments.reached("ended")
                break
        if at is not None:
            assert moments.was_reached
            await moments.acted.wait()
            await wait_all_tasks_blocked()
        await check(Run(namespace, mode, shop, handle, moments))
        nursery.cancel_scope.cancel()
    return moments.names


async def nothing(handle: WorkflowHandle) -> None:
    raise AssertionError("nothing is done in a run that only counts")


class TestCancelAtEveryMoment:
    async def test_it_ends_as_cancelled_or_as_it_had_ended_with_no_alarm_and_no_more_work(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S32: `cancel()` during a step, at its commit, while sleeping, waiting and backing off, in a loop, after the end."""
        names = await _count_moments(make_quick_namespace, mode)
        ended: list[WorkflowState] = []
        for at, name in enumerate(names):
            state = await self._cancel(make_quick_namespace(), mode, at)
            if name == "ended":
                assert state is WorkflowState.COMPLETED
            ended.append(state)
        assert len(ended) == len(names), "explored equals counted"
        first_completed = ended.index(WorkflowState.COMPLETED)
        assert set(ended[:first_completed]) == {WorkflowState.CANCELLED}
        assert set(ended[first_completed:]) == {WorkflowState.COMPLETED}
        assert names[first_completed] in ("before a batch", "after a batch"), (
            "only the last batch, or later, is too late"
        )

    async def _cancel(self, namespace: Namespace, mode: RunMode, at: int) -> WorkflowState:
        at_cancel: dict[str, Any] = {}

        async def cancel(handle: WorkflowHandle) -> None:
            await handle.cancel()
            stored = await namespace.snapshot()
            assert stored.state.is_terminal, "durable once it returns"
            at_cancel["effects"] = None

        async def check(run: Run) -> None:
            where = run.moments.names[at]
            state = await run.handle.get_state()
            assert (await namespace.snapshot()).state is state, where
            assert await (await namespace.driver()).get_alarm("w-1") is None, where
            stored = await namespace.dump()
            effects = list(run.shop.effects)
            await trio.sleep(10_000)
            with pytest.raises(WorkflowCancelledError) if state is WorkflowState.CANCELLED else _returns():
                assert await run.handle.result() == OUTPUT
            assert run.shop.effects == effects, f"work goes on after it was cancelled {where}"
            assert await namespace.dump() == stored, f"something is written after it was cancelled {where}"
            driver = await namespace.restart()
            with pytest.raises(WorkflowCancelledError) if state is WorkflowState.CANCELLED else _returns():
                await run_workflow("w-1", run.shop.order, None, driver, mode=run.mode)
            assert run.shop.effects == effects
            assert await namespace.dump() == stored

        states: list[WorkflowState] = []

        async def check_and_keep(run: Run) -> None:
            await check(run)
            states.append(await run.handle.get_state())

        await until_over(namespace, mode, at, cancel, check_and_keep)
        await namespace.close()
        return states[0]

    async def test_a_message_or_a_wake_after_it_brings_nothing_back(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S32: no alarm is left."""

        async def resting(ctx: Context, _: Any) -> None:
            await ctx.sleep("rest", 3600)

        async with host(namespace, mode) as process:
            await process.stop(resting)
            await process.control("cancel")
            stored = await namespace.dump()
            await process.control("wake")
            await process.control("recover")
            assert await namespace.dump() == stored
            assert await (await namespace.driver()).get_alarm("workflow-1") is None


class _returns:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


async def _count_moments(make_namespace: Callable[[], Namespace], mode: RunMode) -> list[str]:
    namespace = make_namespace()

    async def check(run: Run) -> None:
        assert await run.handle.result() == OUTPUT
        assert sorted(run.shop.effects) == sorted(EFFECTS[1:])

    names = await until_over(namespace, mode, None, nothing, check)
    await namespace.close()
    for kind in ("started", "before a batch", "after a batch", "in pay", "in count 1", "in flaky", "parked", "ended"):
        assert kind in names
    return names


class TestEvictAtEveryMoment:
    async def test_it_stays_resumable_and_ends_elsewhere_as_if_never_stopped(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S33: `evict()` at every point of a run: the run resumes elsewhere and ends as if never stopped."""
        names = await _count_moments(make_quick_namespace, mode)
        expected = await self._uninterrupted(make_quick_namespace(), mode)
        for at in range(len(names)):
            await self._evict(make_quick_namespace(), mode, at, expected)

    async def _uninterrupted(self, namespace: Namespace, mode: RunMode) -> list[Any]:
        found: list[Any] = []

        async def check(run: Run) -> None:
            found.extend(await _outline(namespace))

        await until_over(namespace, mode, None, nothing, check)
        await namespace.close()
        return found

    async def _evict(self, namespace: Namespace, mode: RunMode, at: int, expected: list[Any]) -> None:
        at_eviction: list[Any] = []

        async def evict(handle: WorkflowHandle) -> None:
            await handle.evict()
            at_eviction.append(handle._activation.is_running)  # type: ignore[attr-defined]

        async def check(run: Run) -> None:
            where = run.moments.names[at]
            assert at_eviction == [False], "it has unwound once evict() returns"
            stored = await namespace.dump()
            state = (await namespace.snapshot()).state
            effects = list(run.shop.effects)
            if state is not WorkflowState.COMPLETED:
                assert not state.is_terminal, where
                with pytest.raises(WorkflowSuspendedError):
                    await run.handle.result()
                assert not _counts_as_crash(stored), where
                waits_for_message = run.handle._activation.waiting is not None  # type: ignore[attr-defined]
                alarm_ms = await (await namespace.driver()).get_alarm("w-1")
                is_recovered_at_start = state in (WorkflowState.PENDING, WorkflowState.RUNNING)
                assert is_recovered_at_start or alarm_ms is not None or waits_for_message, where
            await trio.sleep(0.0001)
            assert run.shop.effects == effects, f"work goes on after it was evicted {where}"
            assert await namespace.dump() == stored, f"something is written after it was evicted {where}"
            await self._resume_elsewhere(run, where, expected)

        await until_over(namespace, mode, at, evict, check)
        await namespace.close()

    async def _resume_elsewhere(self, run: Run, where: str, expected: list[Any]) -> None:
        namespace = run.namespace
        await namespace.restart()
        done = {entry.path[-1] for entry in (await namespace.snapshot()).entries if _is_done(entry)}
        before = list(run.shop.effects)
        async with host(namespace, run.mode, workflow_id="w-1", clock=run.clock) as process:
            stopped = await process.stop(run.shop.order)
            while stopped.state is not WorkflowState.COMPLETED:
                if "shipped" in (stopped.waiting_for_messages or ()):
                    await process.send("shipped")
                else:
                    assert stopped.sleep_until is not None
                    await process.advance(max(0.001, stopped.sleep_until - process.clock.now_ms() / 1000))
                stopped = await process.stop(run.shop.order)
            assert stopped.output == OUTPUT, where
            assert await _outline(namespace) == expected, where
            again = run.shop.effects[len(before) :]
            assert not {name for name in again if name in done}, f"done once, then evicted {where}, and done again"

    async def test_a_step_that_finishes_in_spite_of_its_eviction_is_recorded(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S33, S20: the result of a step that shields itself is recorded, and it does not run again."""
        calls: list[str] = []

        async def stubborn() -> str:
            calls.append("begin")
            with trio.CancelScope(shield=True):
                await trio.sleep(5)
            return "finished"

        async def order(ctx: Context, _: Any) -> str:
            return await ctx.step("stubborn", stubborn)

        async with trio.open_nursery() as nursery:
            driver = await namespace.driver()
            handle = await start_workflow(nursery, "w-1", order, None, driver, mode=mode, clock=MovableClock())
            await wait_all_tasks_blocked()
            await handle.evict()
        assert (await namespace.snapshot()).entries[0].data["output"] == "finished"
        result = await run_workflow("w-1", order, None, await namespace.restart(), mode=mode)
        assert result.output == "finished"
        assert calls == ["begin"]
        await namespace.close()

    @pytest.mark.parametrize("act", ["evict", "cancel"])
    async def test_an_error_that_comes_out_of_being_stopped_is_not_the_steps(
        self, act: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S32, S33: a step that turns its cancellation into an error has not failed."""

        async def wrapping() -> None:
            try:
                await trio.sleep(20)
            except BaseException as cancelled:
                raise ConnectionError("the connection broke") from cancelled

        async def order(ctx: Context, _: Any) -> str:
            await ctx.step("wrapping", wrapping, max_retries=0)
            return "done"

        async with trio.open_nursery() as nursery:
            driver = await namespace.driver()
            handle = await start_workflow(nursery, "w-1", order, None, driver, mode=mode, clock=MovableClock())
            await wait_all_tasks_blocked()
            await (handle.evict() if act == "evict" else handle.cancel())
        snapshot = await namespace.snapshot()
        assert snapshot.entries == ()
        assert snapshot.error is None
        assert snapshot.state is (WorkflowState.RUNNING if act == "evict" else WorkflowState.CANCELLED)
        if act == "evict":
            result = await run_workflow("w-1", order, None, await namespace.restart(), mode=mode)
            assert result.output == "done"

    async def test_a_plain_function_is_abandoned_and_its_late_result_ignored(
        self, namespace: Namespace, mode: RunMode
    ) -> None:
        """S33: eviction does not wait for a thread; the step runs again, after that thread has ended."""
        begun, release = threading.Event(), threading.Event()
        calls: list[str] = []

        def slow() -> str:
            calls.append("slow")
            begun.set()
            release.wait()
            return f"result {len(calls)}"

        async def order(ctx: Context, _: Any) -> str:
            return await ctx.step("slow", slow)

        async with trio.open_nursery() as nursery:
            driver = await namespace.driver()
            handle = await start_workflow(nursery, "w-1", order, None, driver, mode=mode)
            await trio.to_thread.run_sync(begun.wait)
            await handle.evict()
        assert (await namespace.snapshot()).entries == ()
        async with trio.open_nursery() as nursery:
            handle = await start_workflow(nursery, "w-1", order, None, await namespace.restart(), mode=mode)
            await wait_all_tasks_blocked(0.01)
            assert calls == ["slow"], "two attempts never overlap"
            release.set()
            assert await handle.result() == "result 2"
        await namespace.close()


def _counts_as_crash(stored: dict[bytes, bytes]) -> bool:
    from perdure.storage import layout

    return layout.IDLE_ACTIVATIONS_KEY in stored


def _is_done(entry: Any) -> bool:
    return entry.kind == "step" and entry.metadata is not None and entry.metadata.status.name == "COMPLETED"


async def _outline(namespace: Namespace) -> list[Any]:
    """History without ids and times, which differ from run to run, and without how often a flaky step was begun."""
    outline = []
    for entry in (await namespace.snapshot()).entries:
        data = {key: value for key, value in entry.data.items() if key != "deadline_ms"}
        if isinstance(data.get("body"), dict):
            data["body"] = {key: data["body"][key] for key in ("name", "body", "completed")}
        status = None if entry.metadata is None else entry.metadata.status
        outline.append((entry.path, entry.kind, data, status))
    return outline


class TestUserCode:
    @pytest.mark.parametrize("operation", ["sleep", "queue.next", "backoff", "step"])
    async def test_a_cancel_scope_of_the_users_around_a_durable_wait_is_a_typed_error(
        self, operation: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S31: a user's scope that fires around a durable wait: the typed error, in both modes, nothing recorded."""
        reached: list[str] = []

        async def failing() -> None:
            raise ConnectionError("not yet")

        operations: dict[str, Callable[[Context], Awaitable[Any]]] = {
            "sleep": lambda ctx: ctx.sleep("op", 100),
            "queue.next": lambda ctx: ctx.queue.next("op", timeout=100),
            "backoff": lambda ctx: ctx.step("op", failing, retry_backoff_base=100, retry_backoff_max=1000),
            "step": lambda ctx: ctx.step("op", trio.sleep, 100, timeout=0),
        }

        async def right(ctx: Context, _: Any) -> str:
            await ctx.step("before", trio.sleep, 0)
            return "right"

        async def order(ctx: Context, _: Any) -> str:
            await ctx.step("before", trio.sleep, 0)
            with trio.CancelScope() as scope:
                if operation != "step":
                    scope.cancel()
                else:
                    scope.deadline = trio.current_time() + 1
                await operations[operation](ctx)
            reached.append("after the scope")
            await ctx.step("after", trio.sleep, 0)
            return "not recorded"

        async with host(namespace, mode) as process:
            for _ in range(12):
                with pytest.raises(
                    UserCancellationError, match=r"timeout= of the operation, or ctx\.race with a ctx\.sleep$"
                ) as caught:
                    await process.finish(order)
                assert caught.value.name == "op"
                await process.restart()
            snapshot = await namespace.snapshot()
            assert not snapshot.state.is_terminal
            assert [entry.path for entry in snapshot.entries if entry.path != ("op",)] == [("before",)]
            assert reached == [], "the run is over there and then"
            if operation != "backoff":
                assert await process.finish(right) == "right"
        await namespace.close()

    @pytest.mark.parametrize("operation", ["sleep", "queue.next", "backoff"])
    async def test_a_scope_with_a_deadline_around_a_durable_wait_is_the_same_typed_error_in_both_modes(
        self, operation: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S31: at once, whether or not it would fire; nothing is recorded, and code without it goes on."""

        async def failing() -> None:
            raise ConnectionError("not yet")

        async def wait(ctx: Context) -> Any:
            if operation == "sleep":
                return await ctx.sleep("op", 100)
            if operation == "queue.next":
                return await ctx.queue.next_batch("op", timeout=100)
            return await ctx.step("op", failing, retry_backoff_base=100, retry_backoff_max=1000)

        async def order(ctx: Context, _: Any) -> str:
            with trio.move_on_after(1000):
                await wait(ctx)
            return "not recorded"

        async def mended(ctx: Context, _: Any) -> str:
            if operation != "backoff":
                await wait(ctx)
            return "mended"

        async with host(namespace, mode) as process:
            begun = trio.current_time()
            with pytest.raises(UserCancellationError, match="'op'"):
                await process.finish(order)
            assert trio.current_time() == begun
            assert [entry.path for entry in (await namespace.snapshot()).entries] == []
            await process.restart()
            assert await process.finish(mended) == "mended"

    async def test_a_scope_around_the_run_may_have_a_deadline_and_move_it(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S31: only the workflow's own scopes count, not those of whoever runs it."""

        async def order(ctx: Context, _: Any) -> str:
            await ctx.sleep("rest", 100)
            return "done"

        async def shorten(scope: trio.CancelScope) -> None:
            await trio.sleep(1)
            scope.deadline = trio.current_time() + 500

        async with host(namespace, mode) as process, trio.open_nursery() as nursery:
            with trio.move_on_after(1000) as scope:
                nursery.start_soon(shorten, scope)
                assert await process.finish(order) == "done"

    async def test_a_scope_of_whoever_runs_the_workflow_is_an_eviction(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S31, S33: a scope around the run is not the workflow's own."""

        async def order(ctx: Context, _: Any) -> str:
            await ctx.step("slow", trio.sleep, 10, timeout=0)
            await ctx.sleep("rest", 100)
            return "done"

        driver = await namespace.driver()
        for seconds in (0, 5):
            with trio.move_on_after(seconds) as scope:
                await run_workflow("workflow-1", order, None, driver, mode=mode, clock=MovableClock())
            assert scope.cancelled_caught
            assert not _counts_as_crash(await namespace.dump())
        async with host(namespace, mode) as process:
            assert await process.finish(order) == "done"

    @pytest.mark.parametrize("operation", ["sleep", "queue.next", "step", "backoff", "loop"])
    async def test_except_exception_around_an_operation_swallows_nothing(
        self, operation: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S31: a user's `except Exception` around a sleep, a wait, a step: nothing is swallowed when it is stopped there."""
        calls: list[str] = []

        async def slow() -> str:
            calls.append("slow")
            await trio.sleep(10)
            return "done"

        async def flaky() -> str:
            calls.append("flaky")
            if len(calls) < 2:
                raise ConnectionError("not yet")
            return "done"

        async def body(ctx: Context, _: None) -> Break[str]:
            await ctx.sleep("inner", 10)
            return Break("done")

        operations: dict[str, Callable[[Context], Awaitable[Any]]] = {
            "sleep": lambda ctx: ctx.sleep("op", 10),
            "queue.next": lambda ctx: ctx.queue.next("op"),
            "step": lambda ctx: ctx.step("op", slow),
            "backoff": lambda ctx: ctx.step("op", flaky, retry_backoff_base=10),
            "loop": lambda ctx: ctx.loop("op", body),
        }
        swallowed: list[BaseException] = []

        async def order(ctx: Context, _: Any) -> str:
            try:
                await operations[operation](ctx)
            except Exception as error:
                swallowed.append(error)
            return "end"

        async with trio.open_nursery() as nursery:
            driver = await namespace.driver()
            handle = await start_workflow(nursery, "w-1", order, None, driver, mode=mode, clock=MovableClock())
            await wait_all_tasks_blocked()
            await handle.evict()
            with pytest.raises(WorkflowSuspendedError):
                await handle.result()
        assert swallowed == []
        assert not (await namespace.snapshot()).state.is_terminal
        async with host(namespace, mode, workflow_id="w-1") as process:
            await process.restart()
            await process.send("go")
            assert await process.finish(order) == "end"
        assert swallowed == []
        await namespace.close()

    async def test_finally_blocks_that_await_operations_record_nothing_when_it_is_stopped(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S31: `finally` blocks that await a step during eviction do not record anything."""
        ran: list[str] = []
        signals: list[BaseException] = []

        async def clean_up() -> None:
            ran.append("clean up")

        async def order(ctx: Context, _: Any) -> str:
            try:
                return (await ctx.queue.next("go")).body
            finally:
                for name, operate in (
                    ("step", lambda: ctx.step("clean-up", clean_up)),
                    ("sleep", lambda: ctx.sleep("pause", 0)),
                    ("queue", lambda: ctx.queue.next_batch("rest", timeout=0)),
                ):
                    try:
                        await operate()
                        ran.append(name)
                    except BaseException as signal:
                        signals.append(signal)

        async with host(namespace, mode) as process:
            await process.stop(order)
            before = await namespace.dump()
            if process.handle is not None:
                await process.handle.evict()
            assert ran == []
            assert [type(signal) for signal in signals] == [SuspendSignal] * 3
            assert await namespace.dump() == before
            await process.restart()
            await process.send("go", "went")
            assert await process.finish(order) == "went"
        assert ran == ["clean up", "step", "sleep", "queue"]
        await namespace.close()

    async def test_what_the_function_returns_or_raises_once_it_is_stopped_does_not_count(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S31, S33: even code that catches everything cannot end a workflow that is being stopped."""

        def swallowing(then: str) -> Any:
            async def order(ctx: Context, _: Any) -> str:
                try:
                    return (await ctx.queue.next("go")).body
                except BaseException as signal:
                    if then == "return":
                        return "swallowed"
                    raise ValueError("swallowed") from signal

            return order

        for then in ("return", "raise"):
            async with host(namespace, mode) as process:
                await process.stop(swallowing(then))
                if process.handle is not None:
                    await process.handle.evict()
                snapshot = await namespace.snapshot()
                assert (snapshot.state, snapshot.output, snapshot.error) == (WorkflowState.SLEEPING, None, None)
        async with host(namespace, mode) as process:
            await process.send("go", "went")
            assert await process.finish(swallowing("return")) == "went"

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
    async def test_an_interrupt_of_the_process_in_a_step_is_no_outcome_of_it(
        self, interrupt: type[BaseException], namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S33: a KeyboardInterrupt in a step is not recorded; the workflow goes on in the next process."""
        calls: list[str] = []

        async def interrupted() -> str:
            calls.append("call")
            if len(calls) == 1:
                raise interrupt
            return "done"

        async def order(ctx: Context, _: Any) -> str:
            await ctx.step("before", interrupted_not)
            return await ctx.step("interrupted", interrupted)

        async def interrupted_not() -> None:
            return None

        driver = await namespace.driver()
        with pytest.raises(interrupt):
            await run_workflow("workflow-1", order, None, driver, mode=mode)
        snapshot = await namespace.snapshot()
        assert snapshot.state is WorkflowState.RUNNING
        assert [entry.path for entry in snapshot.entries] == [("before",)]
        assert not _counts_as_crash(await namespace.dump())
        async with host(namespace, mode) as process:
            await process.restart()
            assert await process.finish(order) == "done"
        assert calls == ["call", "call"]

    @pytest.mark.parametrize("is_grouped", [False, True])
    async def test_finally_blocks_record_nothing_when_the_process_is_interrupted(
        self, is_grouped: bool, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S31, S33: what they recorded would come before the interrupted step, and be a divergence ever after."""
        calls: list[str] = []

        async def effect(name: str) -> str:
            calls.append(name)
            if calls == ["step"]:
                if is_grouped:
                    raise BaseExceptionGroup("of a nursery in the step", [KeyboardInterrupt(), ValueError()])
                raise KeyboardInterrupt
            return name

        async def order(ctx: Context, _: Any) -> str:
            try:
                return await ctx.step("step", effect, "step")
            finally:
                await ctx.step("cleanup", effect, "cleanup")

        with pytest.raises(BaseExceptionGroup if is_grouped else KeyboardInterrupt):
            await run_workflow("workflow-1", order, None, await namespace.driver(), mode=mode)
        assert calls == ["step"]
        assert (await namespace.snapshot()).entries == ()
        async with host(namespace, mode) as process:
            await process.restart()
            assert await process.finish(order) == "step"
        assert calls == ["step", "step", "cleanup"]

    async def test_failures_that_the_users_code_catches_are_its_own_business(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S31: what can be caught is caught, on the first run and on replay: outcomes, not signals."""

        async def failing() -> None:
            raise ValueError("broken")

        async def order(ctx: Context, _: Any) -> list[str]:
            caught: list[str] = []
            try:
                await ctx.step("failing", failing, max_retries=1)
            except StepError as error:
                caught.append(error.error.name)
            try:
                await ctx.queue.next("read", timeout=1)
            except QueueTimeoutError as error:
                caught.append(error.name)
            await ctx.queue.next("gate")
            return caught

        async with host(namespace, mode) as process:
            stopped = await process.stop(order)
            while stopped.waiting_for_messages != ("*",) or stopped.sleep_until is not None:
                assert stopped.sleep_until is not None
                await process.advance(max(0.001, stopped.sleep_until - process.clock.now_ms() / 1000))
                stopped = await process.stop(order)
            await process.restart()
            await process.send("gate")
            assert await process.finish(order) == ["ValueError", "read"]
