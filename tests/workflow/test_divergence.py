"""Code that no longer matches its history: named, written nowhere, and undone by putting the old code back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from harness import Function, Namespace, host
from trio.testing import MockClock

from perdure.workflow import Break, Context, Continue, HistoryDivergedError, RunMode, WorkflowState

Operation = Callable[[Context], Awaitable[Any]]

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def effect(value: str) -> str:
    calls.append(value)
    return value


async def step(ctx: Context, name: str) -> object:
    return await ctx.step(name, effect, "stepped")


async def sleep(ctx: Context, name: str) -> object:
    return (await ctx.sleep_until(name, 0)).value


async def read(ctx: Context, name: str) -> object:
    return (await ctx.queue.next(name, names=["early"])).body


async def read_in_time(ctx: Context, name: str) -> object:
    return (await ctx.queue.next(name, names=["early"], timeout=60)).body


async def read_too_late(ctx: Context, name: str) -> object:
    return len(await ctx.queue.next_batch(name, names=["never"], timeout=0))


async def loop(ctx: Context, name: str) -> object:
    async def body(inner: Context, total: int) -> Continue[int] | Break[int]:
        await inner.step("work", effect, "worked")
        return Continue(total + 1) if total < 2 else Break(total)

    return await ctx.loop(name, body, 0)


async def nothing(ctx: Context) -> None:
    """What is left when the operation was taken out of the code."""


NAMED: dict[str, Callable[[Context, str], Awaitable[Any]]] = {
    "step": step,
    "sleep": sleep,
    "read": read,
    "read in time": read_in_time,
    "read too late": read_too_late,
    "loop": loop,
}
OPERATIONS: dict[str, Operation] = {name: partial(operation, name="x") for name, operation in NAMED.items()}
KINDS = {
    "step": "step",
    "sleep": "sleep",
    "read": "message",
    "read in time": "message",
    "read too late": "message",
    "loop": "loop",
}
CALLS = {
    "step": "step",
    "sleep": "sleep_until",
    "read": "queue.next",
    "read in time": "queue.next",
    "read too late": "queue.next_batch",
    "loop": "loop",
}


def at_root(operation: Operation) -> Function:
    async def workflow(ctx: Context, _: object) -> object:
        got = await operation(ctx)
        await ctx.queue.next("wait", names=["go"])
        return got

    return workflow


def in_iteration(operation: Operation) -> Function:
    async def workflow(ctx: Context, _: object) -> object:
        async def body(inner: Context, state: int) -> Continue[int] | Break[object]:
            if state == 0:
                return Continue(1)
            got = await operation(inner)
            await inner.queue.next("wait", names=["go"])
            return Break(got)

        return await ctx.loop("outer", body, 0)

    return workflow


def ending_at_once(place: Callable[[Operation], Function], operation: Operation) -> Function:
    """The code with another operation in place of the old one, which ends (or breaks) without waiting."""

    async def workflow(ctx: Context, _: object) -> object:
        if place is at_root:
            return await operation(ctx)

        async def body(inner: Context, state: int) -> Continue[int] | Break[object]:
            return Continue(1) if state == 0 else Break(await operation(inner))

        return await ctx.loop("outer", body, 0)

    return workflow


PLACES = {"root": at_root, "iteration": in_iteration}
PATHS = {"root": "", "iteration": "'outer' > #1 > "}


async def check_divergence_is_harmless(
    namespace: Namespace, mode: RunMode, old: Function, new: Function
) -> HistoryDivergedError:
    """Record with old code, run the new code, see that it diverges and writes nothing, and finish with the old code."""
    async with host(namespace, mode) as process:
        await process.send("early", "message")
        stopped = await process.stop(old)
        assert stopped.state is WorkflowState.SLEEPING
        recorded = await namespace.dump()
        effects = list(calls)
        await process.restart()
        with pytest.raises(HistoryDivergedError) as caught:
            await process.stop(new)
        await process.restart()
        assert await namespace.dump() == recorded, "divergence wrote something"
        assert calls == effects, "divergence had an effect"
        assert (await namespace.snapshot()).state is WorkflowState.SLEEPING
        await process.send("go")
        await process.finish(old)
        assert calls == effects
    return caught.value


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recorded", OPERATIONS)
async def test_a_recorded_operation_that_the_new_code_lacks_is_named_and_the_old_code_goes_on(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, recorded: str, place: str
) -> None:
    """S4: missing from the new code, at the root or deeper."""
    old = PLACES[place](OPERATIONS[recorded])
    error = await check_divergence_is_harmless(namespace, mode, old, ending_at_once(PLACES[place], nothing))
    assert error.location.startswith(PATHS[place] + "'x")
    assert error.location in str(error) or all(part in str(error) for part in error.location.rsplit(" > ", 1))
    assert error.found is not None
    assert KINDS[recorded] in error.found or (recorded.startswith("read ") and "sleep" in error.found)
    assert error.asked is None


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("recorded", "asked"),
    [(old, new) for old in OPERATIONS for new in OPERATIONS if KINDS[old] != KINDS[new]],
)
async def test_another_kind_at_that_place_is_named_and_the_old_code_goes_on(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, recorded: str, asked: str, place: str
) -> None:
    """S4: another kind at that place, at the root or deeper; the new operation is not run."""
    old = PLACES[place](OPERATIONS[recorded])
    error = await check_divergence_is_harmless(namespace, mode, old, PLACES[place](OPERATIONS[asked]))
    assert error.location.startswith(PATHS[place] + "'x")
    assert error.found is not None
    assert KINDS[recorded] in error.found or (recorded.startswith("read ") and "sleep" in error.found)
    assert error.asked == f"{CALLS[asked]} 'x'"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("asked", OPERATIONS)
@pytest.mark.parametrize("recorded", OPERATIONS)
async def test_a_renamed_operation_is_divergence_before_it_runs_and_the_old_code_goes_on(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, recorded: str, asked: str, place: str
) -> None:
    """S4: nothing new begins while recorded entries are left: a renamed step would run, and be charged, twice."""

    async def renamed(ctx: Context) -> object:
        return await NAMED[asked](ctx, "y")

    old = PLACES[place](OPERATIONS[recorded])
    error = await check_divergence_is_harmless(namespace, mode, old, PLACES[place](renamed))
    assert error.location.startswith(PATHS[place] + "'x")
    assert error.found is not None
    assert KINDS[recorded] in error.found or (recorded.startswith("read ") and "sleep" in error.found)
    assert error.asked == f"{CALLS[asked]} 'y'"


async def test_a_read_that_still_waits_for_its_timeout_cannot_become_a_step(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: a queue read of which only the deadline is recorded."""

    async def old(ctx: Context, _: object) -> object:
        return (await ctx.queue.next("x", names=["go"], timeout=60)).body

    async def new(ctx: Context, _: object) -> object:
        return await ctx.step("x", effect, "stepped")

    error = await check_divergence_is_harmless(namespace, mode, old, new)
    assert error.location == "'x:deadline'"


async def test_an_exception_before_the_recorded_operation_is_divergence_and_not_a_failure(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: divergence never fails the workflow, also when the new code raises first."""

    async def new(ctx: Context, _: object) -> None:
        raise KeyError("a bug of the new code")

    error = await check_divergence_is_harmless(namespace, mode, at_root(OPERATIONS["step"]), new)
    assert error.found == "a step"
    assert isinstance(error.__cause__, KeyError)


async def test_an_exception_in_an_iteration_before_its_recorded_operation_is_divergence(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: the same in a loop, where the new code even catches what its body raised."""

    async def new(ctx: Context, _: object) -> str:
        async def body(inner: Context, state: int) -> Continue[int]:
            if state == 0:
                return Continue(1)
            raise KeyError("a bug of the new code")

        try:
            await ctx.loop("outer", body, 0)
        except Exception:
            return "caught"
        return "not reached"

    error = await check_divergence_is_harmless(namespace, mode, in_iteration(OPERATIONS["step"]), new)
    assert error.location == "'outer' > #1 > 'x'"


async def test_divergence_cannot_be_caught_by_the_workflow(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: an `except Exception` around the diverging operation does not turn it into a result, or into more effects."""

    async def new(ctx: Context, _: object) -> str:
        try:
            await sleep(ctx, "x")
        except Exception:
            await ctx.step("on-error", effect, "compensated")
        return "caught"

    error = await check_divergence_is_harmless(namespace, mode, at_root(OPERATIONS["step"]), new)
    assert (error.found, error.asked) == ("a step", "sleep_until 'x'")


async def test_what_diverging_code_had_not_committed_is_not_written_by_a_later_message(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: divergence writes nothing, not even with the next message's batch; the old code takes the message and ends."""
    old = at_root(OPERATIONS["step"])

    async def new(ctx: Context, _: object) -> None:
        await ctx.step("extra", effect, "ephemeral", ephemeral=True)
        await sleep(ctx, "x")

    async with host(namespace, mode) as process:
        await process.stop(old)
        before = await namespace.snapshot()
        await process.restart()
        with pytest.raises(HistoryDivergedError):
            await process.stop(new)
        await process.send("go")
        after = await namespace.snapshot()
        assert after.entries == before.entries
        await process.restart()
        assert await process.finish(old) == "stepped"
