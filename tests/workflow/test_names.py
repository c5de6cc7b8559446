"""Names: any non-empty text is one, none aliases another, and each is used once in its scope."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from harness import Host, Namespace, host
from trio.testing import MockClock

from perdure.workflow import (
    Break,
    Context,
    Continue,
    DuplicateNameError,
    FaultError,
    InvalidArgumentError,
    MisuseError,
    OperationInProgressError,
    RunMode,
    WorkflowState,
)
from perdure.workflow.activation import CRASH_LOOP_LIMIT

Operation = Callable[[Context], Awaitable[Any]]

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def effect(value: str) -> str:
    calls.append(value)
    return value


UNUSUAL = (
    "a/b",
    "a",
    "b",
    "~0",
    "~1",
    "0",
    "a~b",
    "a:b",
    ":",
    ":0",
    ":count",
    "q:count",
    "q:0",
    "q:deadline",
    " ",
    "\n",
    "\x00",
    "a\x00",
    "\x00\xff",
    "é",
    "e\u0301",
    "🎉",
    "👩‍👩‍👧",
    "שלום",
    "مرحبا:0",
    "a" * 300,
    "a" * 300 + "b",
    "漢" * 170 + "zz",
)


async def test_unusual_names_are_entries_of_their_own(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S5: no name aliases another, at the root or in a loop of such a name; each runs once and keeps its value."""
    seen: list[dict[str, str]] = []

    async def workflow(ctx: Context, _: object) -> None:
        values = {name: await ctx.step(name, effect, f"root {name}") for name in UNUSUAL}

        async def body(inner: Context, number: int) -> Continue[int] | Break[None]:
            for name in UNUSUAL:
                values[f"{number} {name}"] = await inner.step(name, effect, f"{number} {name}", ephemeral=True)
            if number == 0:
                return Continue(1)
            await inner.queue.next("wait", names=["go"])
            return Break(None)

        await ctx.loop("a/~0:count", body, 0)
        seen.append(values)

    expected = [(name,) for name in UNUSUAL]
    expected += [("a/~0:count", number, name) for number in (0, 1) for name in UNUSUAL]
    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        await process.finish(workflow)
        entries = (await namespace.snapshot()).entries
    assert sorted(entry.path for entry in entries if entry.kind == "step") == sorted(expected)
    assert all(entry.data["output"].endswith(str(entry.path[-1])) for entry in entries if entry.kind == "step")
    assert len(calls) == len(set(calls)) == len(expected)
    replayed = [value for value in calls if not value.startswith("0 ")]
    assert list(seen[0].values()) == replayed, "each got the value of the entry it asked for"


async def test_a_slash_in_a_name_is_not_a_place(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S5: `a/b` at the root and `b` in a loop `a`."""

    async def workflow(ctx: Context, _: object) -> list[str]:
        async def body(inner: Context, _: None) -> Break[str]:
            return Break(await inner.step("b", effect, "in the loop"))

        slash = await ctx.step("a/b", effect, "slash")
        inside = await ctx.loop("a", body)
        await ctx.queue.next("wait", names=["go"])
        return [slash, inside]

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == ["slash", "in the loop"]
        paths = [entry.path for entry in (await namespace.snapshot()).entries if entry.kind == "step"]
    assert paths == [("a/b",), ("a", 0, "b")]
    assert calls == ["slash", "in the loop"]


async def test_the_longest_name_works_and_one_byte_more_is_refused(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S5: 512 bytes of UTF-8."""
    too_long = "é" * 256 + "!"

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.step("é" * 256, effect, "fits")
        await ctx.step(too_long, effect, "does not")

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match=r"513 bytes.*512"):
            await process.stop(workflow)
        assert calls == ["fits"]


# A queue read `q` beside another entry by one of its derived names.


async def read_next(ctx: Context) -> object:
    return (await ctx.queue.next("q", names=["early"])).body


async def read_batch(ctx: Context) -> object:
    return len(await ctx.queue.next_batch("q", count=2, timeout=0))


def other(kind: str, name: str) -> Operation:
    async def step(ctx: Context) -> object:
        return await ctx.step(name, effect, "stepped")

    async def sleep(ctx: Context) -> object:
        return (await ctx.sleep_until(name, 0)).value

    async def loop(ctx: Context) -> object:
        async def body(inner: Context, _: None) -> Break[str]:
            return Break(await inner.step("work", effect, "looped"))

        return await ctx.loop(name, body)

    return {"step": step, "sleep": sleep, "loop": loop}[kind]


def in_sequence(*operations: Operation) -> Callable[[Context, object], Awaitable[list[Any]]]:
    async def workflow(ctx: Context, _: object) -> list[Any]:
        got = [await operation(ctx) for operation in operations]
        await ctx.queue.next("wait", names=["go"])
        return got

    return workflow


async def check_fault_records_nothing(
    process: Host, wrong: Any, right: Any, error_type: type[FaultError], *, again: int = 1
) -> FaultError:
    """Run wrong code, more than once, see that nothing of the wrong operation is recorded, and finish with right code."""
    await process.send("early", "message")
    with pytest.raises(error_type) as caught:
        await process.stop(wrong)
    recorded = (await process.namespace.snapshot()).entries
    for _ in range(again):
        await process.restart()
        with pytest.raises(error_type):
            await process.stop(wrong)
    await process.restart()
    await process.stop(right)
    snapshot = await process.namespace.snapshot()
    assert snapshot.state is WorkflowState.SLEEPING, "right code goes on"
    assert snapshot.entries == recorded, "the wrong operation was recorded"
    await process.send("go")
    await process.finish(right)
    return caught.value


@pytest.mark.parametrize("order", ["read first", "read last"])
@pytest.mark.parametrize(
    ("read", "kind", "name"),
    [
        (read_next, "step", "q:count"),
        (read_next, "step", "q:0"),
        (read_next, "step", "q:7"),
        (read_next, "loop", "q:0"),
        (read_batch, "sleep", "q:deadline"),
        (read_batch, "step", "q:deadline"),
        (read_batch, "loop", "q:count"),
    ],
)
async def test_a_queue_read_beside_an_entry_of_its_derived_names_is_refused_at_once(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, read: Operation, kind: str, name: str, order: str
) -> None:
    """S5: an error that names both, whichever comes first."""
    operations = [read, other(kind, name)]
    if order == "read last":
        operations.reverse()
    async with host(namespace, mode) as process:
        error = await check_fault_records_nothing(
            process, in_sequence(*operations), in_sequence(operations[0]), DuplicateNameError
        )
    assert "'q'" in str(error)
    assert repr(name) in str(error)


async def test_derived_names_are_free_where_no_such_read_is(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S5: the same names without that queue read, with it in another scope, and as the names of reads themselves."""

    async def workflow(ctx: Context, _: object) -> list[Any]:
        got: list[Any] = [await other("step", "q:count")(ctx), await other("sleep", "q:deadline")(ctx)]
        got.append(await other("loop", "q:0")(ctx))

        async def body(inner: Context, _: None) -> Break[list[Any]]:
            first = await inner.queue.next("q", names=["early"])
            nested = await inner.queue.next_batch("q:count", names=["early"], timeout=0)
            return Break([first.body, [message.body for message in nested]])

        got += await ctx.loop("scope", body)
        await ctx.queue.next("wait", names=["go"])
        return got

    async with host(namespace, mode) as process:
        await process.send("early", 1)
        await process.send("early", 2)
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == ["stepped", "completed", "looped", 1, [2]]
    assert calls == ["stepped", "looped"]


# A name used twice; operations that overlap.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (other("step", "n"), other("step", "n")),
        (other("step", "n"), other("sleep", "n")),
        (other("sleep", "n"), other("step", "n")),
        (other("loop", "n"), other("step", "n")),
        (other("step", "n"), other("loop", "n")),
        (read_next, read_next),
        (read_next, other("step", "q")),
        (other("step", "q"), read_batch),
    ],
)
async def test_a_second_entry_of_one_name_is_an_error_on_the_first_run_too(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, first: Operation, second: Operation
) -> None:
    """S6: two entries of one name in one scope."""
    async with host(namespace, mode) as process:
        error = await check_fault_records_nothing(
            process, in_sequence(first, second), in_sequence(first), DuplicateNameError
        )
        assert isinstance(error, DuplicateNameError)
        assert error.name in ("n", "q")


async def test_one_name_in_several_scopes_and_iterations_is_several_entries(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: names are unique within a scope, not beyond it."""

    async def workflow(ctx: Context, _: object) -> None:
        async def body(inner: Context, number: int) -> Continue[int] | Break[None]:
            await inner.step("n", effect, f"iteration {number}")
            return Continue(number + 1) if number < 2 else Break(None)

        await ctx.step("n", effect, "root")
        await ctx.loop("one", body, 0)
        await ctx.loop("two", body, 1)

    async with host(namespace, mode) as process:
        await process.stop(workflow)
    assert calls == ["root", *(f"iteration {number}" for number in (0, 1, 2, 1, 2))]


async def overlapping_tasks(ctx: Context, _: object) -> None:
    started = trio.Event()

    async def long() -> None:
        calls.append("long began")
        started.set()
        await trio.sleep(5)
        calls.append("long ended")

    async def second() -> None:
        await started.wait()
        await ctx.step("second", effect, "second ran")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ctx.step, "long", long)
        nursery.start_soon(second)


async def outer_context_in_a_body(ctx: Context, _: object) -> None:
    async def body(inner: Context, state: None) -> Break[None]:
        calls.append("long began")
        await ctx.step("second", effect, "second ran")
        return Break(None)

    await ctx.loop("long", body)


async def right_code(ctx: Context, _: object) -> str:
    await ctx.queue.next("wait", names=["go"])
    return "done"


async def test_a_step_started_while_another_is_in_progress_is_an_error_and_nothing_is_recorded(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: two tasks share one context. However often it is tried, such a mistake is not a crash and fails nothing."""
    async with host(namespace, mode) as process:
        error = await check_fault_records_nothing(
            process, overlapping_tasks, right_code, OperationInProgressError, again=CRASH_LOOP_LIMIT + 1
        )
        assert isinstance(error, OperationInProgressError)
        assert error.name == "second"
        assert "'long'" in error.in_progress
    assert set(calls) == {"long began"}


async def test_the_outer_context_inside_a_loops_body_is_an_error(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: an operation on the context of a scope whose loop is in progress; the step is neither run nor recorded."""
    async with host(namespace, mode) as process:
        with pytest.raises(OperationInProgressError) as caught:
            await process.stop(outer_context_in_a_body)
        assert caught.value.name == "second"
        assert calls == ["long began"]
        assert all(entry.kind != "step" for entry in (await namespace.snapshot()).entries)


async def test_a_task_left_behind_makes_the_end_an_error(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: a forgotten await: the function ends while its step is in progress, in a task of somebody else's nursery."""
    caught: list[BaseException] = []

    async with trio.open_nursery() as strangers:

        async def workflow(ctx: Context, _: object) -> str:
            started = trio.Event()

            async def long() -> None:
                started.set()
                await trio.sleep(5)

            async def left_behind() -> None:
                try:
                    await ctx.step("long", long)
                except BaseException as error:
                    caught.append(error)

            strangers.start_soon(left_behind)
            await started.wait()
            return "ended too early"

        async with host(namespace, mode) as process:
            with pytest.raises(OperationInProgressError, match="'long'"):
                await process.stop(workflow)
            await trio.sleep(10)
            snapshot = await namespace.snapshot()
            assert snapshot.entries == ()
            assert snapshot.state is WorkflowState.RUNNING
            assert snapshot.output is None
    assert [type(error).__name__ for error in caught] == ["SuspendSignal"]


async def test_the_context_of_a_finished_iteration_is_refused(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: an operation on a scope that is over could not be replayed there."""

    async def workflow(ctx: Context, _: object) -> None:
        kept: list[Context] = []

        async def body(inner: Context, _: None) -> Break[None]:
            kept.append(inner)
            await inner.step("inside", effect, "inside")
            return Break(None)

        await ctx.loop("loop", body)
        await kept[0].step("after", effect, "after")

    async with host(namespace, mode) as process:
        with pytest.raises(MisuseError, match="over"):
            await process.stop(workflow)
        paths = [entry.path for entry in (await namespace.snapshot()).entries]
    assert paths == [("loop",), ("loop", 0, "inside")]
    assert calls == ["inside"]
