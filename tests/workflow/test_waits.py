"""What parked branches wait for: merging waits, and parking places that leave nothing behind."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import permutations
from math import inf

import pytest
import trio
from harness import Namespace, host
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from perdure.workflow import Break, Context, Continue, RunMode, TrioClock, current_step
from perdure.workflow.activation import Activation
from perdure.workflow.waits import Parking, Wait, merge

# Merging.


def test_a_workflow_that_waits_for_nothing_has_no_deadline_and_no_names() -> None:
    """S26: the union of no waits."""
    assert merge([]) == Wait()
    assert merge([Wait(), Wait()]) == Wait()


def test_merged_waits_wake_at_the_earliest_deadline() -> None:
    """S26: in whatever order the branches parked; a wait without a deadline does not hide the others'."""
    waits = [Wait(30), Wait(10, frozenset({"a"})), Wait(None, frozenset({"b"})), Wait(20, wakeable=True)]
    for order in permutations(waits):
        assert merge(order).deadline_ms == 10
    assert merge(waits[2:3]).deadline_ms is None


def test_merged_waits_wake_for_the_union_of_their_names() -> None:
    """S26: each name counts once."""
    waits = [Wait(None, frozenset({"a", "b"})), Wait(5), Wait(None, frozenset({"b", "c"}))]
    for order in permutations(waits):
        assert merge(order).names == {"a", "b", "c"}


def test_any_message_absorbs_named_waits() -> None:
    """S26: a wait for any message beside one for "x" wakes for "y"."""
    waits = [Wait(None, frozenset({"x"})), Wait(7, None), Wait(None, frozenset({"z"}))]
    for order in permutations(waits):
        merged = merge(order)
        assert merged == Wait(7, None)
        assert merged.wants("y")


def test_a_merged_wait_wants_what_any_of_its_waits_wants() -> None:
    """S26: over all combinations of no names, some names and any."""
    kinds = [Wait(), Wait(None, frozenset({"x"})), Wait(None, frozenset({"y", ""})), Wait(None, None)]
    for first in kinds:
        for second in kinds:
            for name in ("x", "y", "", "z"):
                assert merge([first, second]).wants(name) == (first.wants(name) or second.wants(name))


def test_a_sleep_wants_no_message() -> None:
    """S26: not even one without a name."""
    assert not Wait(5, wakeable=True).wants("x")
    assert not Wait(5).wants("")


# Parking.


async def woken_after(parking: Parking, clock: TrioClock) -> float:
    begun_s = trio.current_time()
    await parking.until_woken(clock)
    return trio.current_time() - begun_s


async def test_a_parking_ends_at_its_deadline(autojump_clock: MockClock) -> None:
    """S26: without being marked as woken, which only `wake` does."""
    clock = TrioClock()
    parking = Parking(Wait(clock.now_ms() + 5000))
    assert await woken_after(parking, clock) == pytest.approx(5, abs=0.002)
    assert not parking.is_woken


async def test_a_parking_ends_when_it_is_woken_with_or_without_a_deadline(autojump_clock: MockClock) -> None:
    """S26: once is enough and twice is fine."""
    clock = TrioClock()
    for deadline_ms in (None, clock.now_ms() + 10_000_000):
        parking = Parking(Wait(deadline_ms, None))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(parking.until_woken, clock)
            await trio.sleep(3)
            assert len(nursery.child_tasks) == 1
            parking.wake()
            parking.wake()
            await wait_all_tasks_blocked()
            assert len(nursery.child_tasks) == 0
        assert parking.is_woken


async def test_a_parking_that_was_woken_before_it_waits_does_not_wait(autojump_clock: MockClock) -> None:
    """S26: a message that comes while the parking is being written is not slept through."""
    clock = TrioClock()
    for deadline_ms in (None, clock.now_ms() + 10_000):
        parking = Parking(Wait(deadline_ms))
        parking.wake()
        with trio.fail_after(60), assert_checkpoints():
            assert await woken_after(parking, clock) == 0


async def test_a_cancellation_from_outside_is_not_taken_for_a_wake(autojump_clock: MockClock) -> None:
    """S26: it goes on to whoever cancelled, also when the parking is woken at the same moment."""
    clock = TrioClock()
    for is_woken in (False, True):
        parking = Parking(Wait(None, None))
        went_on = False
        with trio.CancelScope() as outside:
            outside.cancel()
            if is_woken:
                parking.wake()
            await parking.until_woken(clock)
            went_on = True
        assert outside.cancelled_caught
        assert not went_on


async def test_ten_thousand_parkings_that_were_woken_leave_no_timer_and_no_memory(autojump_clock: MockClock) -> None:
    """S25: waiters, timers and tasks return to where they were, at the same time and one after another."""
    clock = TrioClock()
    before = trio.lowlevel.current_statistics()
    assert before.seconds_to_next_deadline == inf

    def live_parkings() -> int:
        gc.collect()
        return sum(type(thing) is Parking for thing in gc.get_objects())

    async def one(parking: Parking) -> None:
        await parking.until_woken(clock)

    for _ in range(10):
        parkings = [Parking(Wait(clock.now_ms() + 3_600_000, frozenset({"x"}))) for _ in range(1000)]
        async with trio.open_nursery() as nursery:
            for parking in parkings:
                nursery.start_soon(one, parking)
            await wait_all_tasks_blocked()
            assert trio.lowlevel.current_statistics().seconds_to_next_deadline < inf
            for parking in parkings:
                parking.wake()
    del parkings, parking
    after = trio.lowlevel.current_statistics()
    assert after.tasks_living == before.tasks_living
    assert after.seconds_to_next_deadline == inf
    assert live_parkings() == 0


async def test_sleeps_that_end_early_leave_nothing_behind_in_the_workflow(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S25: hundreds of sleeps and retries ended by wake(): open waits, timers, tasks and the namespace do not grow."""
    turns = 200

    async def flaky() -> str:
        if current_step().attempt == 1:
            raise ConnectionError("refused")
        return "through"

    async def body(ctx: Context, turn: int) -> Continue[int] | Break[int]:
        if turn % 2:
            await ctx.sleep("nap", 3600)
        else:
            await ctx.step("flaky", flaky, retry_backoff_base=1000.0, retry_backoff_max=3600.0)
        return Continue(turn + 1) if turn < turns else Break(turn)

    async def workflow(ctx: Context, _: None) -> int:
        return await ctx.loop("turns", body, 0, history_prune_interval=5, history_size=0)

    keys: list[int] = []
    memory: list[int] = []
    tasks: list[int] = []
    async with host(namespace, mode) as process:
        tracemalloc.start()
        try:
            for turn in range(turns):
                stopped = await process.stop(workflow)
                assert stopped.sleep_until is not None
                if turn % 20 == 0:
                    keys.append(len(await namespace.dump()))
                    (await namespace.driver()).batches.clear()
                    gc.collect()
                    memory.append(tracemalloc.get_traced_memory()[0])
                    tasks.append(trio.lowlevel.current_statistics().tasks_living)
                if process.handle is not None:
                    activation: Activation = process.handle._activation  # type: ignore[attr-defined]
                    assert len(activation._parked) == 1
                    assert len(activation.history.open_sleeps) + len(activation.history.open_retries) == 1
                await process.control("wake")
        finally:
            tracemalloc.stop()
        await process.finish(workflow)
        assert len(set(tasks)) == 1
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == inf
        if process.handle is not None:
            activation = process.handle._activation  # type: ignore[attr-defined]
            assert not activation._parked
            assert not activation.history.open_sleeps
            assert not activation.history.open_retries
    assert len(set(keys[1:])) == 1, "pruning keeps the namespace as small as it was"
    assert memory[-1] - memory[2] < 100_000, memory
