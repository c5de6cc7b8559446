"""What each method of a handle does to a workflow that is live, dormant, ended, failed, cancelled or faulted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import Supervisor, WorkflowNotFoundError
from perdure.storage import EncodeError
from perdure.workflow import (
    Context,
    CriticalError,
    HistoryDivergedError,
    InvalidArgumentError,
    SleepOutcome,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowHandle,
    WorkflowState,
    workflow,
)

STANDINGS = ["live", "dormant", "completed", "failed", "cancelled", "faulted"]
effects: list[str] = []
is_broken = False


@pytest.fixture(autouse=True)
def _fresh() -> None:
    global is_broken
    effects.clear()
    is_broken = False


async def charge(name: str) -> str:
    effects.append(name)
    if is_broken:
        raise CriticalError("the card was refused")
    return f"{name} charged"


@workflow(name="order")
async def order(ctx: Context, input: Any) -> Any:
    paid = await ctx.step("charge", charge, ctx.workflow_id)
    message = await ctx.queue.next("shipment")
    return {"paid": paid, "tracking": message.body}


@workflow(name="ceaseless")
async def ceaseless(ctx: Context, steps: int) -> int:
    for number in range(steps):
        await ctx.step(f"step-{number}", charge, "nothing")
    return steps


@workflow(name="order")
async def diverged(ctx: Context, input: Any) -> Any:
    await ctx.sleep("charge", 1)


@asynccontextmanager
async def standing(disk: Disk, what: str) -> AsyncIterator[tuple[Supervisor, WorkflowHandle]]:
    """A supervisor that hosts one order, which stands as asked; effects and openings before that are forgotten."""
    global is_broken
    if what == "faulted":
        async with disk.process(order) as supervisor:
            await supervisor.spawn(order, "o-1")
            await trio.sleep(1)
    is_broken = what == "failed"
    async with disk.process(diverged if what == "faulted" else order) as supervisor:
        handle = await supervisor.spawn("order", "o-1")
        await trio.sleep(1)
        if what == "dormant":
            await handle.evict()
        elif what == "completed":
            await handle.message("shipment", "T-1")
            await handle.result()
        elif what == "cancelled":
            await handle.cancel()
        elif what == "faulted":
            await handle.wake()  # a dormant waiter is not activated at start
        await trio.sleep(1)
        is_broken = False
        effects.clear()
        disk.store.opens.clear()
        yield supervisor, handle


STATES = {
    "live": WorkflowState.SLEEPING,
    "dormant": WorkflowState.SLEEPING,
    "completed": WorkflowState.COMPLETED,
    "failed": WorkflowState.FAILED,
    "cancelled": WorkflowState.CANCELLED,
    "faulted": WorkflowState.SLEEPING,
}


class TestLooking:
    @pytest.mark.parametrize("what", STANDINGS)
    async def test_looking_shows_what_is_stored_and_changes_nothing(
        self, disk: Disk, what: str, autojump_clock: MockClock
    ) -> None:
        async with standing(disk, what) as (supervisor, handle):
            written = len(disk.store.written)
            before = dict(disk.namespaces["o-1"])
            assert await handle.get_state() is STATES[what]
            output = {"paid": "o-1 charged", "tracking": "T-1"} if what == "completed" else None
            assert await handle.get_output() == output
            error = await handle.get_error()
            if what == "failed":
                assert error is not None
                assert (error.name, error.message) == ("CriticalError", "the card was refused")
            else:
                assert error is None
            paths = [entry.path for entry in await handle.history()]
            assert ("charge",) in paths
            assert all(path[0] in ("charge", "shipment:0", "shipment:count") for path in paths)
            assert (dict(disk.namespaces["o-1"]), len(disk.store.written)) == (before, written)
            assert effects == []
            assert set(supervisor.troubles()) == ({"o-1"} if what == "faulted" else set())
            assert (len(disk.store.opens) == 0) == (what == "live"), "a live workflow is not opened again"

    async def test_a_workflow_that_records_without_a_pause_can_be_looked_at(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """It is not waited for until it rests."""
        async with disk.process(ceaseless) as supervisor:
            handle = await supervisor.spawn(ceaseless, "c-1", 2000)
            while not await handle.history():
                await trio.lowlevel.checkpoint()
            for look in (handle.history, handle.get_output, handle.get_error, handle.children):
                await look()
                assert await handle.get_state() is WorkflowState.RUNNING
            assert len(await handle.history()) < 2000
            assert await handle.result() == 2000

    async def test_an_id_that_was_taken_away_is_not_found(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with standing(disk, "dormant") as (_, handle):
            await disk.store.delete("o-1")
            methods: list[Callable[[], Any]] = [
                handle.result,
                lambda: handle.message("x"),
                handle.wake,
                handle.recover,
                handle.evict,
                handle.cancel,
                handle.get_state,
                handle.history,
            ]
            for method in methods:
                with pytest.raises(WorkflowNotFoundError, match="there is no workflow 'o-1'"):
                    await method()


class TestResult:
    @pytest.mark.parametrize(
        ("what", "error"),
        [("failed", WorkflowFailedError), ("cancelled", WorkflowCancelledError), ("faulted", HistoryDivergedError)],
    )
    async def test_what_went_wrong_is_raised_now_and_in_the_next_process(
        self, disk: Disk, what: str, error: type[Exception], autojump_clock: MockClock
    ) -> None:
        async with standing(disk, what) as (_, handle):
            for _ in range(2):
                with pytest.raises(error):
                    await handle.result()
        async with disk.process(diverged if what == "faulted" else order) as supervisor:
            handle = await supervisor.get("o-1")
            if what == "faulted":
                await handle.wake()
            with pytest.raises(error):
                await handle.result()
        assert effects == []

    async def test_a_failure_carries_the_stored_error_and_here_the_original(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        global is_broken
        is_broken = True
        async with disk.process(order) as supervisor:
            handle = await supervisor.spawn(order, "o-1")
            with pytest.raises(WorkflowFailedError, match="the card was refused") as caught:
                await handle.result()
            assert (caught.value.name, caught.value.workflow_id) == ("CriticalError", "o-1")
            assert caught.value.__cause__ is not None

    @pytest.mark.parametrize("what", ["live", "dormant"])
    async def test_it_waits_for_the_end_over_an_eviction(
        self, disk: Disk, what: str, autojump_clock: MockClock
    ) -> None:
        async with standing(disk, what) as (_, handle):
            async with trio.open_nursery() as nursery:
                results: list[Any] = []

                async def wait() -> None:
                    results.append(await handle.result())

                nursery.start_soon(wait)
                await wait_all_tasks_blocked()
                await handle.evict()
                await trio.sleep(100)
                assert results == []
                await handle.message("shipment", "T-1")
            assert results == [{"paid": "o-1 charged", "tracking": "T-1"}]

    @pytest.mark.parametrize("what", ["live", "dormant"])
    async def test_it_hears_of_a_cancellation(self, disk: Disk, what: str, autojump_clock: MockClock) -> None:
        async with standing(disk, what) as (_, handle), trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(WorkflowCancelledError):
                    await handle.result()

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            await handle.cancel()

    async def test_a_waiter_that_is_cancelled_leaves_the_workflow_alone(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S51: a cancelled waiter of a live workflow, of a dormant one, and at any moment."""
        async with standing(disk, "live") as (_, handle):
            disk.store.delay_s = 0.001
            for delay_ms in range(12):
                with trio.move_on_after(delay_ms / 1000) as scope:
                    await handle.result()
                assert scope.cancelled_caught
            await handle.evict()
            for delay_ms in range(12):
                with trio.move_on_after(delay_ms / 1000) as scope:
                    await handle.result()
                assert scope.cancelled_caught
            await trio.sleep(1)
            assert await handle.get_state() is WorkflowState.SLEEPING
            await handle.message("shipment", "T-1")
            assert await handle.result() == {"paid": "o-1 charged", "tracking": "T-1"}
        assert effects == []

    async def test_whoever_is_cancelled_while_the_file_is_opened_leaves_it_closed(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S51: cancelled at the one moment at which the file is open and nobody's yet."""
        async with standing(disk, "dormant") as (supervisor, handle):
            for ask in (handle.result, handle.get_state, lambda: handle.message("shipment", "T-1", id="m-1")):
                with trio.CancelScope() as scope:
                    disk.store.when_opened = scope.cancel
                    await ask()
                disk.store.when_opened = None
                assert await handle.get_state() is WorkflowState.SLEEPING
            await handle.message("shipment", "T-1", id="m-1")
            assert await handle.result() == {"paid": "o-1 charged", "tracking": "T-1"}
            assert supervisor.troubles() == {}

    @pytest.mark.parametrize("what", ["live", "dormant", "completed", "faulted"])
    async def test_a_thousand_waiters_get_it_and_open_the_file_a_few_times(
        self, disk: Disk, what: str, autojump_clock: MockClock
    ) -> None:
        """S51: a thousand waiters on one workflow."""
        heard: list[Any] = []

        async def wait() -> None:
            try:
                heard.append(await (await supervisor.get("o-1")).result())
            except HistoryDivergedError as error:
                heard.append(type(error))

        async with standing(disk, what) as (supervisor, handle):
            async with trio.open_nursery() as nursery:
                for _ in range(1000):
                    nursery.start_soon(wait)
                await trio.sleep(1)
                if what in ("live", "dormant"):
                    assert heard == []
                    await handle.message("shipment", "T-1")
            expected = HistoryDivergedError if what == "faulted" else {"paid": "o-1 charged", "tracking": "T-1"}
            assert heard == [expected] * 1000
            assert len(disk.store.opens) <= 4
        assert effects == []


class TestMessage:
    @pytest.mark.parametrize("what", STANDINGS)
    async def test_it_reaches_who_waits_and_is_refused_by_who_ended(
        self, disk: Disk, what: str, autojump_clock: MockClock
    ) -> None:
        async with standing(disk, what) as (_, handle):
            if what in ("completed", "failed", "cancelled"):
                before = dict(disk.namespaces["o-1"])
                with pytest.raises(WorkflowEndedError) as caught:
                    await handle.message("shipment", "T-2")
                assert (caught.value.workflow_id, caught.value.state) == ("o-1", STATES[what].value)
                assert disk.namespaces["o-1"] == before
                return
            await handle.message("shipment", "T-2")
            if what == "faulted":
                with pytest.raises(HistoryDivergedError):
                    await handle.result()
                assert await handle.get_state() is WorkflowState.SLEEPING
        async with disk.process(order) as supervisor:  # by now with the right code
            handle = await supervisor.get("o-1")
            if what == "faulted":
                await trio.sleep(1)
            assert await handle.result() == {"paid": "o-1 charged", "tracking": "T-2"}
        assert effects == []

    async def test_an_id_sent_again_is_delivered_once_live_dormant_and_restarted(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S27: the same id sent again, also after a restart: one delivery."""

        @workflow(name="collector")
        async def collect(ctx: Context, input: None) -> list[Any]:
            bodies: list[Any] = []
            while not bodies or bodies[-1] != "end":
                bodies.append((await ctx.queue.next(f"m{len(bodies)}")).body)
            return bodies

        async with disk.process(collect) as supervisor:
            handle = await supervisor.spawn(collect, "c-1")
            await handle.message("m", 1, id="a")
            await handle.message("m", 2, id="a")
            await handle.evict()
            await handle.message("m", 3, id="a")
            await handle.message("m", 4, id="b")
            disk.die()
        async with disk.process(collect) as supervisor:
            handle = await supervisor.get("c-1")
            for message_id in ("a", "b", "c", "c"):
                await handle.message("m", message_id, id=message_id)
            await handle.message("m", "end")
            assert await handle.result() == [1, 4, "c", "end"]

    async def test_many_senders_at_once_are_all_heard_each_in_order(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        @workflow(name="collector")
        async def collect(ctx: Context, input: None) -> list[Any]:
            return [(await ctx.queue.next(f"m{number}")).body for number in range(100)]

        async def send(sender: int) -> None:
            for number in range(10):
                await handle.message("m", [sender, number])

        async with disk.process(collect) as supervisor:
            disk.store.delay_s = 0.001
            handle = await supervisor.spawn(collect, "c-1")
            async with trio.open_nursery() as nursery:
                for sender in range(10):
                    nursery.start_soon(send, sender)
                for _ in range(5):
                    await trio.sleep(0.004)
                    await handle.evict()
            await handle.wake()
            bodies = await handle.result()
        assert sorted(bodies) == [[sender, number] for sender in range(10) for number in range(10)]
        for sender in range(10):
            assert [number for who, number in bodies if who == sender] == list(range(10))

    async def test_a_sender_that_is_cancelled_has_sent_it_for_good_or_not_at_all(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S45: what was stored is delivered, also when nobody waits for the sending any more."""
        for delay_ms in range(0, 40, 2):
            workflow_id = f"o-{delay_ms}"
            async with disk.process(order) as supervisor:
                handle = await supervisor.spawn(order, workflow_id)
                await trio.sleep(1)
                disk.store.delay_s = 0.005
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(handle.evict)
                    with trio.move_on_after(delay_ms / 1000):
                        await handle.message("shipment", "T-1", id="m-1")
                disk.store.delay_s = 0
                await trio.sleep(5)
                state = await handle.get_state()
                was_sent = any(b"m-1" in key for key in disk.namespaces[workflow_id])
                assert state is (WorkflowState.COMPLETED if was_sent else WorkflowState.SLEEPING), delay_ms

    async def test_wrong_arguments_are_refused_and_nothing_is_written(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with standing(disk, "dormant") as (supervisor, handle):
            written = list(disk.store.written)
            wrong: list[tuple[Any, Any]] = [("", None), (5, None), (None, None), ("x" * 513, None), ("x", ""), ("x", 5)]
            for name, message_id in wrong:
                with pytest.raises(InvalidArgumentError, match=r"(write|shorten)"):
                    await handle.message(name, None, id=message_id)
            with pytest.raises(EncodeError):
                await handle.message("x", object())
            assert disk.store.written == written
            assert supervisor.troubles() == {}
            assert await handle.get_state() is WorkflowState.SLEEPING


class TestWake:
    @pytest.mark.parametrize("dormant", [False, True])
    async def test_it_ends_a_sleep(self, disk: Disk, dormant: bool, autojump_clock: MockClock) -> None:
        """S24: wake() ends a sleep at once and durably."""

        @workflow(name="sleeper")
        async def sleeper(ctx: Context, input: None) -> str:
            return (await ctx.sleep("nap", 3600)).value

        async with disk.process(sleeper) as supervisor:
            handle = await supervisor.spawn(sleeper, "s-1")
            await trio.sleep(1)
            if dormant:
                await handle.evict()
            began = trio.current_time()
            await handle.wake()
            assert await handle.result() == SleepOutcome.INTERRUPTED.value
            assert trio.current_time() - began < 1

    @pytest.mark.parametrize("dormant", [False, True])
    async def test_it_ends_a_backoff(self, disk: Disk, dormant: bool, autojump_clock: MockClock) -> None:
        """S24: wake() ends a retry's backoff."""
        attempts: list[float] = []

        @workflow(name="retrier")
        async def retrier(ctx: Context, input: None) -> int:
            async def attempt() -> int:
                attempts.append(trio.current_time())
                if len(attempts) == 1:
                    raise OSError("not now")
                return len(attempts)

            return await ctx.step("attempt", attempt, retry_backoff_base=1000, retry_backoff_max=1000)

        async with disk.process(retrier) as supervisor:
            handle = await supervisor.spawn(retrier, "r-1")
            await trio.sleep(1)
            if dormant:
                await handle.evict()
            await handle.wake()
            assert await handle.result() == 2
        assert attempts[1] - attempts[0] < 2

    @pytest.mark.parametrize("what", STANDINGS)
    async def test_it_is_harmless_where_nothing_sleeps(self, disk: Disk, what: str, autojump_clock: MockClock) -> None:
        """S24: wake of a workflow that is not sleeping is harmless."""
        async with standing(disk, what) as (_, handle):
            before = dict(disk.namespaces["o-1"])
            await handle.wake()
            await trio.sleep(1)
            assert disk.namespaces["o-1"] == before
            assert await handle.get_state() is STATES[what]
        assert effects == []


class TestRecover:
    async def test_a_failed_workflow_runs_again_on_a_live_supervisor(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S17: recover() lets the failed step run again."""
        async with standing(disk, "failed") as (_, handle):
            await handle.recover()
            await handle.message("shipment", "T-1")
            assert await handle.result() == {"paid": "o-1 charged", "tracking": "T-1"}
            assert await handle.get_error() is None
        assert effects == ["o-1"], "once more"

    async def test_it_can_fail_again_and_be_recovered_again(self, disk: Disk, autojump_clock: MockClock) -> None:
        global is_broken
        async with standing(disk, "failed") as (_, handle):
            is_broken = True
            for _ in range(3):
                await handle.recover()
                with pytest.raises(WorkflowFailedError):
                    await handle.result()
            is_broken = False
            await handle.recover()
            disk.die()
        async with disk.process(order) as supervisor:
            handle = await supervisor.get("o-1")
            await handle.message("shipment", "T-1")
            assert await handle.result() == {"paid": "o-1 charged", "tracking": "T-1"}

    async def test_a_recovery_survives_the_process(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with standing(disk, "failed") as (_, handle):
            await handle.recover()
            disk.die()
        async with disk.process(order) as supervisor:
            await trio.sleep(1)
            assert await (await supervisor.get("o-1")).get_state() is WorkflowState.SLEEPING
            assert "o-1" in disk.store.opens, "nobody had to ask"

    @pytest.mark.parametrize("what", ["live", "dormant", "completed", "cancelled", "faulted"])
    async def test_it_has_no_effect_on_what_did_not_fail(
        self, disk: Disk, what: str, autojump_clock: MockClock
    ) -> None:
        async with standing(disk, what) as (_, handle):
            before = dict(disk.namespaces["o-1"])
            await handle.recover()
            await trio.sleep(1)
            assert disk.namespaces["o-1"] == before
            assert await handle.get_state() is STATES[what]
        assert effects == []


class TestEvict:
    @pytest.mark.parametrize("what", STANDINGS)
    async def test_it_leaves_the_workflow_as_it_is(self, disk: Disk, what: str, autojump_clock: MockClock) -> None:
        """S33: the state stays resumable."""
        async with standing(disk, what) as (supervisor, handle):
            before = dict(disk.namespaces["o-1"])
            await handle.evict()
            await handle.evict()
            assert disk.namespaces["o-1"] == before
            assert await handle.get_state() is STATES[what]
            assert set(supervisor.troubles()) == ({"o-1"} if what == "faulted" else set())

    async def test_a_step_in_progress_is_cancelled_and_runs_again_later(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S33: the run resumes and ends as if never stopped."""

        @workflow(name="slow")
        async def slow(ctx: Context, input: None) -> str:
            async def work() -> str:
                effects.append("begun")
                await trio.sleep(10)
                effects.append("done")
                return "done"

            return await ctx.step("work", work)

        async with disk.process(slow) as supervisor:
            handle = await supervisor.spawn(slow, "s-1")
            await trio.sleep(5)
            await handle.evict()
            await trio.sleep(100)
            assert effects == ["begun"]
            assert await handle.get_state() is WorkflowState.RUNNING
            await handle.wake()
            assert await handle.result() == "done"
        assert effects == ["begun", "begun", "done"]


class TestCancel:
    @pytest.mark.parametrize("what", STANDINGS)
    async def test_it_ends_for_good_what_has_not_ended(self, disk: Disk, what: str, autojump_clock: MockClock) -> None:
        """S32: the state ends as cancelled, or stays what it already ended as."""
        async with standing(disk, what) as (supervisor, handle):
            await handle.cancel()
            ended = what in ("completed", "failed")
            final = STATES[what] if ended else WorkflowState.CANCELLED
            assert await handle.get_state() is final
            await trio.sleep(1)
            assert await handle.get_state() is final
            if not ended:
                with pytest.raises(WorkflowCancelledError, match="'o-1' was cancelled"):
                    await handle.result()
                with pytest.raises(WorkflowEndedError):
                    await handle.message("shipment")
            assert supervisor.troubles() == {}
            await trio.sleep(1)
            assert disk.rows["o-1"].next_wake_ms is None
        async with disk.process(order) as supervisor:
            await trio.sleep(1)
            assert disk.store.opens == [], "an ended workflow is not looked at"
            assert await (await supervisor.get("o-1")).get_state() is final
        assert effects == []

    async def test_it_stops_a_step_in_progress(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S32: during a step."""

        @workflow(name="slow")
        async def slow(ctx: Context, input: None) -> None:
            async def work() -> None:
                effects.append("begun")
                await trio.sleep(10)
                effects.append("done")

            await ctx.step("work", work)

        async with disk.process(slow) as supervisor:
            handle = await supervisor.spawn(slow, "s-1")
            await trio.sleep(5)
            await handle.cancel()
            with pytest.raises(WorkflowCancelledError):
                await handle.result()
            await trio.sleep(100)
        assert effects == ["begun"]
