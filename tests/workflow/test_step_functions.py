"""What a step's function may be, and who it thinks it is: `current_step()`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import pytest
import trio
from harness import Host, Namespace, host
from trio.testing import MockClock

from perdure.storage.schema import EntryStatus
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    InvalidArgumentError,
    MisuseError,
    RunMode,
    StepCriticalError,
    StepInfo,
    current_step,
)


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
    assert await namespace.attempts("retried") == (EntryStatus.COMPLETED, 2)


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
