"""`ctx.step`: retries, what is recorded of them, what a step's function may be, and who it thinks it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import pytest
import trio
from harness import Host, Namespace, SimulatedCrashError, host
from trio.testing import MockClock

from perdure.storage.schema import EntryStatus
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    HistoryEntry,
    InvalidArgumentError,
    MisuseError,
    RunMode,
    StepCriticalError,
    StepExhaustedError,
    StepInfo,
    WorkflowFailedError,
    WorkflowState,
    current_step,
)


async def entry_of(namespace: Namespace, *path: str | int) -> HistoryEntry:
    """The stored entry at a path, as another process reads it."""
    entries = {entry.path: entry for entry in (await namespace.snapshot()).entries}
    return entries[path]


async def stored_attempts(namespace: Namespace, *path: str | int) -> tuple[EntryStatus, int]:
    metadata = (await entry_of(namespace, *path)).metadata
    assert metadata is not None
    return metadata.status, metadata.attempts


class Flaky:
    """A step's function that fails a number of times, and notes when it was begun and as which attempt."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.begun_s: list[float] = []
        self.attempts: list[int] = []

    async def __call__(self) -> str:
        self.begun_s.append(trio.current_time())
        self.attempts.append(current_step().attempt)
        await trio.lowlevel.checkpoint()
        if len(self.begun_s) <= self.failures:
            raise ConnectionError(f"refused, time {len(self.begun_s)}")
        return "through"

    def begun_after_s(self) -> list[float]:
        """When each attempt was begun, in seconds since the first."""
        return [round(at - self.begun_s[0], 3) for at in self.begun_s]


# Retries.


async def test_a_step_that_fails_twice_and_then_works_is_tried_three_times_with_growing_pauses(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: three attempts, after 0, 0.2 and 0.2 + 0.4 seconds; the record holds the value, the count and the last error."""
    flaky = Flaky(failures=2)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("flaky", flaky)

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "through"
        assert flaky.begun_after_s() == [0.0, 0.2, 0.6]
        assert flaky.attempts == [1, 2, 3]
        await process.restart()
        assert await process.finish(workflow) == "through"
        assert len(flaky.attempts) == 3
        assert await stored_attempts(namespace, "flaky") == (EntryStatus.COMPLETED, 3)
        # As in the reference, the text of the last failure stays beside the output.
        entry = await entry_of(namespace, "flaky")
        assert entry.data == {"output": "through", "error": "ConnectionError: refused, time 2"}


async def test_the_pauses_between_attempts_are_capped_and_configurable(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: base and cap are the step's own; the pause is counted from the beginning of the failed attempt."""
    flaky = Flaky(failures=4)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("flaky", flaky, max_retries=4, retry_backoff_base=1.0, retry_backoff_max=5.0)

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "through"
    assert flaky.begun_after_s() == [0.0, 2.0, 6.0, 11.0, 16.0]


async def test_a_pause_between_attempts_is_a_durable_wait(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: while a retry is not due, the workflow sleeps with its alarm armed and the failure recorded."""
    flaky = Flaky(failures=1)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("flaky", flaky, retry_backoff_base=50.0, retry_backoff_max=100.0)

    async with host(namespace, mode) as process:
        begun_ms = process.clock.now_ms()
        stopped = await process.stop(workflow)
        assert stopped.state is WorkflowState.SLEEPING
        assert stopped.sleep_until == (begun_ms + 100_000) / 1000
        assert await (await namespace.driver()).get_alarm("workflow-1") == begun_ms + 100_000
        snapshot = await namespace.snapshot()
        assert snapshot.state is WorkflowState.SLEEPING
        assert await stored_attempts(namespace, "flaky") == (EntryStatus.FAILED, 1)
        await process.restart()
        assert (await process.stop(workflow)).sleep_until == (begun_ms + 100_000) / 1000
        assert len(flaky.attempts) == 1
        assert await process.finish(workflow) == "through"
    assert flaky.attempts == [1, 2]


async def test_exhausted_retries_end_the_workflow_with_the_last_error_also_after_a_restart(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: the last error's class and message are in the workflow's error, and stay there."""
    flaky = Flaky(failures=99)

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("flaky", flaky, max_retries=2)

    async with host(namespace, mode) as process:
        for _ in range(2):
            with pytest.raises(WorkflowFailedError) as failed:
                await process.finish(workflow)
            assert failed.value.name == "StepExhaustedError"
            assert "ConnectionError: refused, time 3" in str(failed.value)
            error = (await namespace.snapshot()).error
            assert error is not None
            assert "ConnectionError: refused, time 3" in error.message
            await process.restart()
        assert len(flaky.attempts) == 3
        assert await stored_attempts(namespace, "flaky") == (EntryStatus.EXHAUSTED, 3)
        assert (await namespace.snapshot()).state is WorkflowState.FAILED


async def test_an_exhausted_step_raises_the_same_error_on_replay_without_its_function(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: class, step, attempts, and the last error's name, message and stack are those of the first run."""
    flaky = Flaky(failures=99)
    caught: list[StepExhaustedError] = []

    async def workflow(ctx: Context, _: None) -> str:
        try:
            return await ctx.step("flaky", flaky, max_retries=1)
        except StepExhaustedError as error:
            caught.append(error)
        await ctx.sleep("pause", 10)
        return "without"

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        while not caught:
            await process.advance(0.2)
            await process.stop(workflow)
        await process.restart()
        assert await process.finish(workflow) == "without"
    assert len(flaky.attempts) == 2
    first, replayed = caught[0], caught[-1]
    assert first is not replayed
    assert type(replayed) is StepExhaustedError
    assert isinstance(first.__cause__, ConnectionError)
    assert replayed.__cause__ is None
    for error in (first, replayed):
        assert (error.step_name, error.attempts, error.kind) == ("flaky", 2, "exhausted")
        assert str(error.error) == "ConnectionError: refused, time 2"
    assert first.error == replayed.error
    assert str(first) == str(replayed)


async def test_recover_gives_the_exhausted_step_a_fresh_count(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: after recover() the step runs as attempt 1 again, with all its retries; what succeeded before does not."""
    flaky = Flaky(failures=5)
    calls: list[str] = []

    async def before() -> None:
        calls.append("before")

    async def workflow(ctx: Context, _: None) -> str:
        await ctx.step("before", before)
        return await ctx.step("flaky", flaky, max_retries=2)

    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError):
            await process.finish(workflow)
        await process.control("recover")
        assert (await namespace.snapshot()).error is None
        await process.restart()
        assert await process.finish(workflow) == "through"
    assert flaky.attempts == [1, 2, 3, 1, 2, 3]
    assert calls == ["before"]


async def test_a_critical_error_is_not_retried_and_ends_the_workflow_under_its_own_name(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: one attempt; the same after a restart."""
    calls: list[int] = []

    class CardDeclinedError(CriticalError):
        pass

    async def pay() -> None:
        calls.append(current_step().attempt)
        raise CardDeclinedError("no funds", cents=1999)

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.step("pay", pay)

    async with host(namespace, mode) as process:
        for _ in range(2):
            with pytest.raises(WorkflowFailedError) as failed:
                await process.finish(workflow)
            assert (failed.value.name, failed.value.error.message) == ("CardDeclinedError", "no funds")
            assert failed.value.metadata["cents"] == 1999
            await process.restart()
    assert calls == [1]


async def test_a_critical_error_can_be_caught_by_the_workflow(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: StepCriticalError on the first run and on replay; the workflow goes on."""
    caught: list[str] = []

    async def pay() -> None:
        raise CriticalError("no funds")

    async def workflow(ctx: Context, _: None) -> str:
        try:
            await ctx.step("pay", pay)
        except StepCriticalError as error:
            caught.append(f"{error.kind} {error.error}")
        await ctx.sleep("pause", 1)
        return "unpaid"

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        assert await process.finish(workflow) == "unpaid"
    assert len(caught) >= 2
    assert set(caught) == {"critical CriticalError: no funds"}


async def test_a_failing_attempt_that_took_longer_than_the_pause_is_durable_before_the_next_begins(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17, S18: also without a pause, a death during the second attempt leaves the first one counted."""
    attempts: list[int] = []

    async def slow() -> str:
        attempts.append(current_step().attempt)
        await trio.sleep(1)
        if len(attempts) == 1:
            raise ConnectionError("refused")
        if len(attempts) == 2:
            namespace.kill()
        return "through"

    async def workflow(ctx: Context, _: None) -> str:
        return await ctx.step("slow", slow, retry_backoff_base=0.0)

    with pytest.raises(SimulatedCrashError):
        async with host(namespace, mode) as process:
            await process.finish(workflow)
    assert await stored_attempts(namespace, "slow") == (EntryStatus.FAILED, 1)
    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == "through"
    assert attempts == [1, 2, 2]


# What a step's function may be.


def plainly(*args: Any) -> list[Any]:
    return [threading.current_thread().name, *args]


async def asynchronously(*args: Any, **options: Any) -> list[Any]:
    await trio.lowlevel.checkpoint()
    return [threading.current_thread().name, *args, *sorted(options.items())]


class Service:
    async def method(self, *args: Any) -> list[Any]:
        return await asynchronously(*args)

    async def __call__(self, *args: Any) -> list[Any]:
        return await asynchronously(*args)


class Callee(NamedTuple):
    fn: Callable[..., Any]
    expected: list[Any]


CALLEES = {
    "coroutine function": Callee(asynchronously, [1, "two"]),
    "bound method": Callee(Service().method, [1, "two"]),
    "object with an async call": Callee(Service(), [1, "two"]),
    "partial": Callee(partial(asynchronously, 0, key="word"), [0, 1, "two", ["key", "word"]]),
    "partial of a partial of an object": Callee(partial(partial(Service(), 0), 0.5), [0, 0.5, 1, "two"]),
}


async def test_every_kind_of_async_callable_gets_its_arguments_and_runs_in_trios_thread(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: coroutine functions, methods, partials and objects with an async `__call__` are awaited, not put in threads."""

    async def workflow(ctx: Context, _: None) -> None:
        for name, callee in CALLEES.items():
            here, *rest = await ctx.step(name, callee.fn, 1, "two")
            assert here == threading.current_thread().name
            assert rest == callee.expected, name

    async with host(namespace, mode) as process:
        await process.finish(workflow)
    assert len((await namespace.snapshot()).entries) == len(CALLEES)


async def test_plain_functions_run_in_a_worker_thread_with_their_arguments(namespace: Namespace, mode: RunMode) -> None:
    """S17: also partials and methods; their results and errors are recorded like those of coroutine functions."""
    calls: list[int] = []

    def failing_once(cents: int) -> int:
        calls.append(cents)
        if len(calls) == 1:
            raise ConnectionError("refused")
        return cents

    async def workflow(ctx: Context, _: None) -> list[Any]:
        first = await ctx.step("plain", plainly, 1)
        second = await ctx.step("partial", partial(plainly, 1), 2)
        third = await ctx.step("method", [7, 8].index, 8)
        fourth = await ctx.step("retried", failing_once, 5, retry_backoff_base=0.0)
        return [first, second, third, fourth]

    async with host(namespace, mode) as process:
        output = await process.ended(workflow)
        await process.restart()
        assert await process.ended(workflow) == output
    (first, second, third, fourth) = output
    here = threading.current_thread().name
    assert first[0] != here
    assert first[1:] == [1]
    assert second[0] != here
    assert second[1:] == [1, 2]
    assert third == 1
    assert fourth == 5
    assert calls == [5, 5]
    assert await stored_attempts(namespace, "retried") == (EntryStatus.COMPLETED, 2)


async def test_a_plain_function_that_returns_a_coroutine_is_a_fault_that_says_what_to_pass(
    namespace: Namespace, mode: RunMode
) -> None:
    """S17: nothing is recorded of it, so with right code the workflow goes on."""

    async def wrong(ctx: Context, _: None) -> Any:
        return await ctx.step("step", lambda: asynchronously(1))

    async def right(ctx: Context, _: None) -> Any:
        return await ctx.step("step", asynchronously, 1)

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match=r"ctx\.step\(name, fn, argument\)"):
            await process.ended(wrong)
        assert (await namespace.snapshot()).entries == ()
        await process.restart()
        assert (await process.ended(right))[1:] == [1]


# Who a step is.


async def test_a_step_knows_its_workflow_name_path_and_attempt(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: current_step() names the place, loop iterations included, and counts attempts over restarts."""
    seen: list[StepInfo] = []

    async def look() -> None:
        seen.append(current_step())
        if len(seen) == 1:
            raise ConnectionError("refused")

    async def body(ctx: Context, turn: int) -> Continue[int] | Break[None]:
        await ctx.step("look", look, retry_backoff_base=10.0)
        return Continue(1) if turn == 0 else Break(None)

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.step("look", look, retry_backoff_base=10.0)
        await ctx.loop("turns", body, 0)

    async with host(namespace, mode, workflow_id="wörk/flow") as process:
        await process.stop(workflow)
        await process.restart()
        await process.finish(workflow)
    assert [(info.path, info.attempt) for info in seen] == [
        (("look",), 1),
        (("look",), 2),
        (("turns", 0, "look"), 1),
        (("turns", 1, "look"), 1),
    ]
    assert {info.workflow_id for info in seen} == {"wörk/flow"}
    assert {info.name for info in seen} == {"look"}


async def test_an_idempotency_key_is_stable_over_attempts_and_restarts_and_no_other_step_has_it(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: one UUID per step of a workflow; names that only look alike give others, and so do other workflows."""
    keys: dict[tuple[str, ...], set[str]] = {}
    names = ["a", "b", "a/b", "turns/0/a", "0"]

    async def note(*place: str) -> None:
        known = keys.setdefault(place, set())
        known.add(current_step().idempotency_key)
        if len(attempts[place]) < 2:
            attempts[place].append(current_step().attempt)
            raise ConnectionError("refused")

    attempts: dict[tuple[str, ...], list[int]] = {}

    async def body(ctx: Context, turn: int) -> Continue[int] | Break[None]:
        for name in names:
            place = (ctx.workflow_id, "turns", str(turn), name)
            attempts.setdefault(place, [])
            await ctx.step(name, note, *place)
        return Continue(1) if turn == 0 else Break(None)

    async def workflow(ctx: Context, _: None) -> None:
        for name in names:
            place = (ctx.workflow_id, name)
            attempts.setdefault(place, [])
            await ctx.step(name, note, *place)
        await ctx.loop("turns", body, 0)

    for number in range(2):
        async with host(make_namespace(), mode, workflow_id=f"workflow-{number}", seed=100 * number) as process:
            for _ in range(4):
                await process.stop(workflow)
                await process.restart()
            await process.finish(workflow)
    assert all(tried == [1, 2] for tried in attempts.values())
    assert len(keys) == 2 * 3 * len(names)
    assert all(len(found) == 1 for found in keys.values())
    assert len({key for found in keys.values() for key in found}) == len(keys)
    assert all(UUID(key).version == 8 for found in keys.values() for key in found)


async def test_a_plain_function_in_a_thread_knows_which_step_it_is(namespace: Namespace, mode: RunMode) -> None:
    """S17: the worker thread, and tasks that a step starts, see the same current_step()."""
    seen: dict[str, str] = {}

    def in_thread() -> None:
        seen["thread"] = f"{current_step().name} {current_step().attempt}"

    async def in_task() -> None:
        seen["task"] = current_step().name

    async def with_tasks() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_task)

    async def workflow(ctx: Context, _: None) -> None:
        await ctx.step("in a thread", in_thread)
        await ctx.step("with tasks", with_tasks)

    async with host(namespace, mode) as process:
        await process.ended(workflow)
    assert seen == {"thread": "in a thread 1", "task": "with tasks"}


async def test_current_step_outside_of_a_step_says_where_to_call_it(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: before, between and after steps there is none."""
    raised: list[str] = []

    def ask() -> None:
        try:
            current_step()
        except MisuseError as error:
            raised.append(str(error))

    async def nothing() -> None:
        return None

    async def failing() -> None:
        raise CriticalError("no")

    async def workflow(ctx: Context, _: None) -> None:
        ask()
        await ctx.step("fine", nothing)
        ask()
        with pytest.raises(StepCriticalError):
            await ctx.step("failing", failing)
        ask()

    ask()
    async with host(namespace, mode) as process:
        await process.finish(workflow)
    assert len(raised) == 4
    assert "call it in the function that you give to ctx.step" in raised[0]


async def test_a_step_of_a_workflow_that_ended_is_not_run_again(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: a success is written once, in one batch with the end of what it was; replay writes nothing at all."""
    calls: list[int] = []

    async def count() -> int:
        calls.append(1)
        return len(calls)

    async def workflow(ctx: Context, _: None) -> int:
        return await ctx.step("count", count) + await ctx.step("again", count)

    process: Host
    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == 3
        before = await namespace.dump()
        await process.restart()
        assert await process.finish(workflow) == 3
        assert await namespace.dump() == before
        assert (await namespace.driver()).writes == 0
    assert len(calls) == 2
