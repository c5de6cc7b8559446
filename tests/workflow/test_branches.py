"""What joins and races have in common: branches in any nesting, on every run and in both modes, to every kind of end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from harness import (
    Crash,
    DriverKind,
    MovableClock,
    Namespace,
    SimulatedCrashError,
    SlowDriver,
    host,
    scheduled,
)
from moments import MomentDriver, Moments
from trio.testing import MockClock, wait_all_tasks_blocked
from worlds import World, explore, outline, run_in_world

from perdure.storage import layout
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    DuplicateNameError,
    FaultError,
    HistoryDivergedError,
    JoinError,
    MisuseError,
    OperationInProgressError,
    RunMode,
    SuspendSignal,
    UserCancellationError,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowHandle,
    WorkflowState,
    current_step,
    run_workflow,
    start_workflow,
)

YEAR = 365 * 86400.0

Part = Callable[[Context], Awaitable[Any]]


async def _noop() -> None: ...


async def fork(ctx: Context, how: str, name: str, branches: dict[str, Part]) -> dict[str, Any]:
    """A join or a race of these branches, and the values that it gives."""
    if how == "join":
        return dict(await ctx.join(name, branches))
    result = await ctx.race(name, branches)
    return {result.winner: result.value}


# S1: every nesting.

KINDS = ["join", "race", "loop", "block"]
TRIPLES = [
    ("join", "race", "loop"),
    ("race", "join", "block"),
    ("loop", "race", "join"),
    ("block", "loop", "race"),
    ("race", "race", "race"),
    ("join", "join", "join"),
    ("loop", "loop", "join"),
    ("race", "loop", "block"),
    ("block", "join", "race"),
]


async def nested(world: World, ctx: Context, kinds: tuple[str, ...]) -> Any:
    """Something of each kind inside the one before, each finished, and followed by a sleep and a step."""
    if not kinds:
        await world.step(ctx, "first")
        await ctx.sleep("pause", 2)
        return await world.step(ctx, "last", "bottom")
    kind = kinds[0]

    async def inside(ctx: Context) -> Any:
        value = await nested(world, ctx, kinds[1:])
        await ctx.sleep("after", 3)
        await world.step(ctx, "after that")
        return value

    async def other(ctx: Context) -> str:
        await world.step(ctx, "other")
        await ctx.sleep("long", 20 * 10 ** len(kinds))  # longer the further out
        return "other"

    async def body(ctx: Context, number: int) -> Any:
        value = await inside(ctx)
        return Break(value) if number == 1 else Continue(number + 1)

    if kind == "join":
        return [value for _, value in sorted((await ctx.join("join", {"in": inside, "other": other})).items())]
    if kind == "race":
        return (await ctx.race("race", {"other": other, "in": inside})).value
    if kind == "loop":
        return await ctx.loop("loop", body, 0, history_prune_interval=1, history_size=0)
    return (await ctx.try_block("block", inside)).value  # type: ignore[union-attr]


def value_of(kinds: tuple[str, ...]) -> Any:
    if not kinds:
        return "bottom"
    value = value_of(kinds[1:])
    return [value, "other"] if kinds[0] == "join" else value


@pytest.mark.parametrize("kinds", [*product(KINDS, KINDS), *TRIPLES], ids=" > ".join)
async def test_what_has_finished_inside_another_resumes_after_a_sleep_and_a_restart(
    namespace: Namespace, mode: RunMode, kinds: tuple[str, ...], autojump_clock: MockClock
) -> None:
    """S1: with restarts at every stop, no divergence, no effect twice."""

    async def function(world: World, ctx: Context) -> Any:
        value = await nested(world, ctx, kinds)
        world.acknowledge(kinds[0])
        await ctx.sleep("rest", 10)
        await world.step(ctx, "end")
        return value

    output, world = await run_in_world(namespace, mode, function, restarts=True)
    assert output == value_of(kinds)
    assert world.recurred == []
    assert len(world.effects) == len(set(world.effects))


@pytest.mark.parametrize("kinds", [("join", "race", "loop"), ("race", "block", "join")], ids=" > ".join)
async def test_a_crash_at_any_write_of_a_nesting_ends_like_a_run_without_one(
    make_quick_namespace: Callable[[], Namespace],
    mode: RunMode,
    kinds: tuple[str, ...],
    driver_kind: DriverKind,
    autojump_clock: MockClock,
) -> None:
    """S1, S29, S30, S39: the same output and the same history."""
    outlines: list[Any] = []

    async def function(world: World, ctx: Context) -> Any:
        value = await nested(world, ctx, kinds)
        world.acknowledge(kinds[0])
        await ctx.sleep("rest", 10)
        await world.step(ctx, "end")
        return value

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == value_of(kinds)
        outlines.append(await outline(namespace, with_losers=False))

    await explore(make_quick_namespace, mode, function, check)
    assert all(found == outlines[0] for found in outlines)


@pytest.mark.parametrize("kinds", [*product(["join", "race"], KINDS), ("loop", "race")], ids=" > ".join)
async def test_both_modes_write_the_same_history(
    kinds: tuple[str, ...], driver_kind: DriverKind, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """S16, S29, S30: the same entries, statuses and values, ids and times aside; however it was run."""

    async def function(world: World, ctx: Context) -> Any:
        value = await nested(world, ctx, kinds)
        await ctx.sleep("rest", 10)
        return value

    outlines: list[Any] = []
    for mode, restarts, is_prompt in product(("live", "yield"), (False, True), (False, True)):
        namespace = Namespace(driver_kind, tmp_path, durability="normal", is_prompt=is_prompt)
        await run_in_world(namespace, cast("RunMode", mode), function, restarts=restarts)
        outlines.append(await outline(namespace))
        await namespace.close()
    assert all(found == outlines[0] for found in outlines)


@pytest.mark.parametrize("how", ["join", "race"])
@pytest.mark.parametrize("batch_s", [0, 1])
async def test_the_parent_is_durable_before_a_step_of_any_branch_begins(
    namespace: Namespace, mode: RunMode, how: str, batch_s: float, autojump_clock: MockClock
) -> None:
    """S29, S30: with all its branches' names; also of branches that begin while that batch is on its way, at any depth."""
    seen: list[bool] = []

    async def workflow(ctx: Context, _: object) -> Any:
        async def look() -> None:
            stored = set(await namespace.entries())
            seen.append(all(current_step().path[:depth] in stored for depth in range(1, len(current_step().path), 2)))

        async def branch(ctx: Context, wait_s: float) -> None:
            await trio.sleep(wait_s)
            await ctx.step("look", look)
            await trio.sleep(10)

        async def deep(ctx: Context) -> None:
            branches: dict[str, Part] = {f"b{wait_s}": partial(branch, wait_s=wait_s) for wait_s in (0, 0.5, 1.5)}
            await fork(ctx, how, "inner", branches)

        await ctx.step("before", _noop)  # later steps of an activation do not wait for anything by themselves
        await fork(ctx, how, "fork", {"a": partial(branch, wait_s=0), "b": partial(branch, wait_s=0.5), "deep": deep})

    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        if batch_s:
            driver.inner = SlowDriver(driver.inner, batch_s)  # type: ignore[assignment]
        await process.finish(workflow)
    assert seen == [True] * 5


# S4: changed code.

CHANGES = [
    "it is gone",
    "all is gone",
    "it is the other kind",
    "a step is in its place",
    "a block is in its place",
    "a loop is in its place",
    "it is renamed",
    "a branch is added",
    "a branch is gone",
    "a branch is renamed",
    "an operation of a branch is gone",
    "a branch has a new operation first",
    "something new comes first",
]


async def changed(ctx: Context, how: str, change: str, is_finished: bool) -> Any:
    """A fork, and what follows; changed in one way, or not (an empty change)."""

    async def one(ctx: Context) -> str:
        if change == "a branch has a new operation first":
            await ctx.step("new", _noop)
        await ctx.step("work", _noop)
        if change != "an operation of a branch is gone" and not is_finished:
            await ctx.sleep("pause", 10)
        return "value"

    async def two(ctx: Context) -> str:
        await ctx.step("work", _noop)
        await ctx.sleep("pause", 0 if is_finished and how == "join" else 20)
        return "value"

    async def body(ctx: Context, _: None) -> Any:
        return Break(await one(ctx))

    if change == "all is gone":
        return "value"
    branches: dict[str, Part] = {"one": one, "two": two}
    if change == "a branch is added":
        branches["three"] = two
    elif change == "a branch is gone":
        del branches["two"]
    elif change == "a branch is renamed":
        branches["zwei"] = branches.pop("two")
    if change == "something new comes first":
        await ctx.step("new", _noop)
    if change == "it is the other kind":
        await fork(ctx, "race" if how == "join" else "join", "fork", branches)
    elif change == "a step is in its place":
        await ctx.step("fork", _noop)
    elif change == "a block is in its place":
        await ctx.try_block("fork", one)
    elif change == "a loop is in its place":
        await ctx.loop("fork", body)
    elif change != "it is gone":
        await fork(ctx, how, "other" if change == "it is renamed" else "fork", branches)
    await ctx.step("after", _noop)
    await ctx.sleep("rest", 30)
    return "value"


def is_allowed(how: str, change: str, is_finished: bool) -> bool:
    """What has finished is visited as a unit: its branches' operations do not matter, nor do the losers of a race."""
    if not is_finished:
        return False
    inner = ("an operation of a branch is gone", "a branch has a new operation first")
    return change in inner or (how == "race" and change.startswith("a branch is"))


@pytest.mark.parametrize("where", ["root", "loop", "branch", "loser", "block"])
@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("how", ["join", "race"])
async def test_changed_code_is_a_divergence_that_writes_nothing_and_the_old_code_goes_on(
    make_quick_namespace: Callable[[], Namespace],
    mode: RunMode,
    how: str,
    is_finished: bool,
    where: str,
    autojump_clock: MockClock,
) -> None:
    """S4: a recorded join or race that is missing, another, or other inside, at the root or deeper."""
    change = ""

    async def workflow(ctx: Context, _: object) -> Any:
        async def part(ctx: Context) -> Any:
            return await changed(ctx, how, change, is_finished)

        async def body(ctx: Context, _: None) -> Any:
            return Break(await part(ctx))

        async def slow(ctx: Context) -> None:
            await ctx.sleep("long", YEAR)

        if where == "loop":
            return await ctx.loop("outer", body)
        if where == "branch":
            return (await ctx.join("outer", {"in": part}))["in"]
        if where == "loser":
            return (await ctx.race("outer", {"in": part, "slow": slow})).value
        if where == "block":
            return (await ctx.try_block("outer", part)).value  # type: ignore[union-attr]
        return await part(ctx)

    namespace = make_quick_namespace()
    async with host(namespace, mode) as process:
        await process.stop(workflow)
        before = await namespace.dump()
        for number, new in enumerate(CHANGES):
            await process.restart()
            change = new
            if is_allowed(how, change, is_finished):
                assert (await process.stop(workflow)).state is WorkflowState.SLEEPING
            else:
                with pytest.raises(HistoryDivergedError) as caught:
                    await process.stop(workflow)
                assert caught.value.location, CHANGES[number]
                await process.restart()
                assert await namespace.dump() == before, change
        change = ""
        await process.restart()
        assert await process.finish(workflow) == "value"


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("how", ["join", "race"])
async def test_a_fork_that_was_taken_out_is_retired_with_removed(
    namespace: Namespace, mode: RunMode, how: str, is_finished: bool, autojump_clock: MockClock
) -> None:
    """S4: as one, with all that is below it."""
    is_new = False

    async def workflow(ctx: Context, _: object) -> Any:
        if not is_new:
            return await changed(ctx, how, "", is_finished)
        await ctx.removed("fork", cast("Any", how))
        await ctx.step("after", _noop)
        await ctx.sleep("rest", 30)
        return "new"

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        is_new = True
        await process.restart()
        assert await process.finish(workflow) == "new"


async def test_nothing_is_written_once_a_branch_has_diverged(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: what another branch completes after that is not recorded, though its function cannot be stopped."""
    is_new = False
    done: list[str] = []

    async def workflow(ctx: Context, _: object) -> Any:
        async def diverges(ctx: Context) -> None:
            await trio.sleep(1)
            await ctx.step("new" if is_new else "old", _noop)
            await ctx.sleep("rest", 50)

        async def works(ctx: Context) -> None:
            async def work() -> None:
                with trio.CancelScope(shield=True):
                    await trio.sleep(5)
                done.append("work")

            await ctx.sleep("pause", 10)
            await ctx.step("work", work)

        await ctx.join("join", {"diverges": diverges, "works": works})

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.advance(9.5)
        await process.restart()
        is_new = True
        await process.advance(1)
        with pytest.raises(HistoryDivergedError):
            await process.finish(workflow)
        assert ("join", "works", "work") not in await namespace.entries()
        assert (await namespace.snapshot()).state is WorkflowState.RUNNING
    assert done == ["work"]


# S5, S6: names and contexts.

NAMES = [
    "a/b",
    "a",
    "b",
    "~0",
    "~",
    "0",
    "🦆",
    "q",
    "q:0",
    "q:count",
    "q:deadline",
    "x" * 300,
    " ",
    "\x00",
    "\n",
    "ü",
    "u\u0308",
]


@pytest.mark.parametrize("how", ["join", "race"])
async def test_unusual_branch_names_never_alias(
    namespace: Namespace, mode: RunMode, how: str, autojump_clock: MockClock
) -> None:
    """S5: as names of branches, and of what is in them, those that a queue read derives included."""

    async def function(world: World, ctx: Context) -> Any:
        async def branch(ctx: Context, name: str) -> str:
            if name == "q":
                await ctx.queue.next_batch("q", timeout=1)
            elif name.startswith("q:"):
                await ctx.sleep(name, 1)
            value = await world.step(ctx, "b" if name == "a" else name + "!", name)
            await ctx.sleep("long", 5 if name == "a/b" else 10)
            return value

        branches: dict[str, Part] = {name: partial(branch, name=name) for name in NAMES}
        result = await fork(ctx, how, "a/b", branches)
        world.acknowledge("a/b")
        await ctx.sleep("rest", 10)
        return [[name, value] for name, value in result.items()]

    output, world = await run_in_world(namespace, mode, function, restarts=True)
    winners = NAMES if how == "join" else ["a/b"]
    assert output == [[name, name] for name in winners]
    assert world.recurred == []
    assert len(world.effects) == len(set(world.effects)) == len(NAMES)
    steps = {path for path, entry in (await namespace.entries()).items() if entry.kind == "step"}
    assert steps == {("a/b", name, "b" if name == "a" else name + "!") for name in winners}


async def test_names_that_a_queue_read_derives_are_a_branchs_own(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S5: a clash in one branch is an error at once; in two branches there is none."""

    def workflow_of(clashes: bool) -> Any:
        async def workflow(ctx: Context, _: object) -> Any:
            async def reads(ctx: Context) -> None:
                await ctx.queue.next_batch("q", timeout=0)
                if clashes:
                    await ctx.step("q:0", _noop)

            async def works(ctx: Context) -> None:
                await ctx.step("q:0", _noop)
                await ctx.step("q:count", _noop)

            await ctx.join("join", {"reads": reads, "works": works})

        return workflow

    async with host(make_namespace(), mode) as process:
        await process.finish(workflow_of(clashes=False))
    async with host(make_namespace(), mode) as process:
        with pytest.raises(DuplicateNameError):
            await process.stop(workflow_of(clashes=True))


async def _outer_context(ctx: Context) -> None:
    async def branch(inner: Context) -> None:
        await ctx.step("work", _noop)

    await ctx.join("join", {"a": branch})


async def _ended_context(ctx: Context) -> None:
    kept: list[Context] = []

    async def branch(inner: Context) -> None:
        kept.append(inner)

    await ctx.join("join", {"a": branch})
    await kept[0].step("work", _noop)


async def _siblings_context(ctx: Context) -> None:
    kept: list[Context] = []

    async def one(inner: Context) -> None:
        kept.append(inner)
        await inner.sleep("pause", 5)

    async def two(inner: Context) -> None:
        await inner.sleep("pause", 1)
        await kept[0].step("work", _noop)

    await ctx.join("join", {"one": one, "two": two})


async def _forgotten_await(ctx: Context) -> None:
    async def branch(ctx: Context) -> None:
        ctx.step("work", _noop)  # type: ignore[unused-coroutine]

    async def other(ctx: Context) -> None:
        await ctx.sleep("pause", 5)

    await ctx.race("race", {"a": branch, "b": other})


async def _same_name_twice(ctx: Context) -> None:
    async def branch(ctx: Context) -> None:
        await ctx.step("work", _noop)
        await ctx.step("work", _noop)

    await ctx.race("race", {"a": branch, "b": branch})


async def _two_at_once(ctx: Context) -> None:
    async def branch(ctx: Context) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ctx.sleep, "a", 1)
            nursery.start_soon(ctx.sleep, "b", 1)

    await ctx.join("join", {"a": branch})


async def _plain_function(ctx: Context) -> None:
    def branch(ctx: Context) -> None: ...

    await ctx.join("join", {"a": branch})  # type: ignore[dict-item]


async def _current_step_outside(ctx: Context) -> None:
    async def branch(ctx: Context) -> None:
        current_step()

    await ctx.join("join", {"a": branch})


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (_outer_context, OperationInProgressError),
        (_ended_context, MisuseError),
        (_siblings_context, OperationInProgressError),
        (_forgotten_await, OperationInProgressError),
        (_same_name_twice, DuplicateNameError),
        (_two_at_once, OperationInProgressError),
        (_plain_function, MisuseError),
        (_current_step_outside, MisuseError),
    ],
)
async def test_a_misuse_in_a_branch_is_a_fault_and_no_failure_of_it(
    namespace: Namespace, mode: RunMode, misuse: Part, error: type[FaultError], autojump_clock: MockClock
) -> None:
    """S6: it leaves as itself, the state stays, and nobody's `except Exception` keeps it."""

    async def workflow(ctx: Context, _: object) -> Any:
        try:
            await misuse(ctx)
        except Exception:
            return "swallowed"

    async with host(namespace, mode) as process:
        with pytest.raises(FaultError) as caught:
            await process.finish(workflow)
        assert isinstance(caught.value, error)
        assert not (await namespace.snapshot()).state.is_terminal


# S15: names, while a flush is in progress.


async def test_every_name_that_branches_register_during_a_flush_reaches_the_store(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S15: and a restart in the middle finds each at its number."""
    namespace = make_quick_namespace()

    async def function(world: World, ctx: Context) -> Any:
        async def branch(ctx: Context, number: int) -> None:
            for part in range(4):
                await world.step(ctx, f"step {number} {part}", None, 0.3 * (number + 1))
            await ctx.sleep(f"sleep {number}", 5)
            await world.step(ctx, f"last {number}")

        await ctx.join("join", {f"branch {number}": partial(branch, number=number) for number in range(5)})

    world = World(function)
    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        driver.inner = SlowDriver(driver.inner, 0.5)  # type: ignore[assignment]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.stop, world.workflow)
            await trio.sleep(3.1)
            await process.evict()
            nursery.cancel_scope.cancel()
        await process.restart()
        await world.live_on(process)
    assert world.recurred == []
    expected = {f"step {number} {part}" for number in range(5) for part in range(4)}
    expected |= {f"{what} {number}" for number in range(5) for what in ("sleep", "last", "branch")} | {"join"}
    names = [value.decode() for _, value in await (await namespace.driver()).list(layout.NAMES_PREFIX)]
    assert set(names) == expected
    assert len(names) == len(expected)
    for path, entry in (await namespace.entries()).items():
        assert len(path) == 1 or path[1].split()[1] == path[2].split()[1], entry  # type: ignore[union-attr]


# S31: scopes and clauses of the user's.


@pytest.mark.parametrize("how", ["join", "race"])
@pytest.mark.parametrize("where", ["around the fork", "in a branch", "around everything"])
async def test_a_cancel_scope_of_the_users_around_durable_waits_of_branches_is_the_typed_error(
    namespace: Namespace, mode: RunMode, how: str, where: str, autojump_clock: MockClock
) -> None:
    """S31: in both modes, with nothing recorded beyond what was before it."""

    def scope(here: str) -> AbstractContextManager[Any]:
        return trio.move_on_after(5) if where == here else nullcontext()

    async def workflow(ctx: Context, _: object) -> Any:
        async def waits(ctx: Context) -> None:
            with scope("in a branch"):
                await ctx.sleep("long", 100)

        async def deep(ctx: Context) -> None:
            await ctx.join("deep", {"waits": waits})

        with scope("around everything"):
            await ctx.step("before", _noop)
            with scope("around the fork"):
                await fork(ctx, how, "fork", {"deep": deep, "waits": waits})

    async with host(namespace, mode) as process:
        with pytest.raises(UserCancellationError, match="cancel scope"):
            await process.finish(workflow)
        assert not (await namespace.snapshot()).state.is_terminal
        assert set(await namespace.entries()) == {("before",)}


async def test_a_scope_that_fires_in_a_step_of_a_branch_is_the_typed_error_too(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S31: no branch records anything after it."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def works(ctx: Context, seconds: float) -> None:
            await ctx.step("work", trio.sleep, seconds)

        with trio.move_on_after(5):
            await ctx.join("join", {"short": partial(works, seconds=4), "long": partial(works, seconds=50)})

    async with host(namespace, mode) as process:
        with pytest.raises(UserCancellationError):
            await process.finish(workflow)
        assert set(await namespace.entries()) == {("join",), ("join", "short", "work")}


@pytest.mark.parametrize("where", ["root", "join", "race"])
@pytest.mark.parametrize("what", ["a sleep", "a read", "a backoff"])
async def test_a_shield_of_the_users_keeps_no_durable_wait_from_being_left(
    namespace: Namespace, mode: RunMode, where: str, what: str, autojump_clock: MockClock
) -> None:
    """S31, S33: the run returns, or is evicted, at once, not when the wait ends; it goes on where it was."""

    async def flaky() -> str:
        if current_step().attempt == 1:
            raise ConnectionError("once")
        return "done"

    async def waits(ctx: Context) -> Any:
        with trio.CancelScope(shield=True):
            if what == "a sleep":
                await ctx.sleep("nap", 1000)
            elif what == "a read":
                await ctx.queue.next("read")
            else:
                await ctx.step("flaky", flaky, retry_backoff_base=500, retry_backoff_max=1000)
        return "done"

    async def workflow(ctx: Context, _: object) -> Any:
        async def long(ctx: Context) -> Any:
            with trio.CancelScope(shield=True):
                await ctx.sleep("long", 1000 if where == "join" else YEAR)
            return "done"

        if where == "root":
            return await waits(ctx)
        return (await fork(ctx, where, "fork", {"waits": waits, "long": long}))["waits"]

    began_s = trio.current_time()
    async with host(namespace, mode) as process:
        with trio.fail_after(10):
            assert (await process.stop(workflow)).state is WorkflowState.SLEEPING
            await process.evict()
            await process.restart()
        assert trio.current_time() == began_s
        if what == "a read":
            await process.send("mail")
        assert await process.finish(workflow) == "done"


async def test_a_shield_of_the_users_keeps_no_drained_workflow(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S31, S33: what would begin below it is left as well."""

    async def function(world: World, ctx: Context) -> Any:
        async def works(ctx: Context) -> None:
            with trio.CancelScope(shield=True):
                await world.step(ctx, "one", None, 5.0)
                await world.step(ctx, "two")

        await ctx.join("join", {"a": works, "b": works})

    world = World(function)
    clock = MovableClock()
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            driver = await namespace.driver()
            handle = await start_workflow(nursery, "workflow-1", world.workflow, None, driver, mode=mode, clock=clock)
            await trio.sleep(1)
            cast("Any", handle)._activation.drain()
    assert world.count("two") == 0
    async with host(namespace, mode, clock=clock) as process:
        await process.finish(world.workflow)
    assert (world.count("one"), world.count("two")) == (2, 2)


@pytest.mark.parametrize("how", ["join", "race"])
async def test_except_exception_in_a_branch_swallows_nothing(
    namespace: Namespace, mode: RunMode, how: str, autojump_clock: MockClock
) -> None:
    """S31: neither a park, nor an eviction, nor that the branch has lost."""

    async def function(world: World, ctx: Context) -> Any:
        async def stubborn(ctx: Context) -> Any:
            tries = 0
            while tries < 3:
                try:
                    await ctx.sleep(f"nap {tries}", 10)
                    await world.step(ctx, f"step {tries}", None, 2.0)
                except Exception:
                    return "swallowed"
                tries += 1
            return "done"

        async def slow(ctx: Context) -> Any:
            try:
                await ctx.sleep("long", 60)
            except Exception:
                return "swallowed"
            return "slow"

        return await fork(ctx, how, "fork", {"stubborn": stubborn, "slow": slow})

    output, world = await run_in_world(namespace, mode, function, restarts=True)
    assert output == ({"stubborn": "done", "slow": "slow"} if how == "join" else {"stubborn": "done"})
    assert len(world.effects) == 3


@pytest.mark.parametrize("how", ["join", "race"])
async def test_finally_blocks_of_branches_that_await_a_step_record_nothing_when_stopped(
    namespace: Namespace, mode: RunMode, how: str, autojump_clock: MockClock
) -> None:
    """S31, S33: whether the branch waits or works, at any depth."""
    asked: list[str] = []

    async def function(world: World, ctx: Context) -> Any:
        async def waits(ctx: Context) -> str:
            try:
                await ctx.sleep("nap", 50)
            except BaseException:
                asked.append("waits")
                await world.step(ctx, "clean up")
                raise
            return "slept"

        async def works(ctx: Context) -> str:
            try:
                await world.step(ctx, "work", None, 40.0, timeout=0)
            except BaseException:
                asked.append("works")
                await world.step(ctx, "clean up")
                raise
            return "worked"

        async def deep(ctx: Context) -> Any:
            try:
                return await fork(ctx, how, "inner", {"waits": waits, "works": works})
            except BaseException:
                asked.append("deep")
                await world.step(ctx, "clean up")
                raise

        return await fork(ctx, how, "outer", {"deep": deep, "waits": waits})

    world = World(function)
    async with host(namespace, mode) as process:
        await process.run_and_leave(world.workflow, 10)
        assert sorted(asked) == ["deep", "waits", "waits", "works"]
        assert world.count("clean up") == 0
        paths = set(await namespace.entries())
        assert not any("clean up" in path for path in paths)
        assert ("outer", "deep", "inner", "waits", "nap") in paths
        await process.restart()
        await world.live_on(process)
    assert world.count("clean up") == 0


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, SimulatedCrashError])
@pytest.mark.parametrize("in_step", [True, False], ids=["in a step", "in its code"])
@pytest.mark.parametrize("how", ["join", "race"])
async def test_what_ends_the_process_leaves_a_branch_as_itself(
    namespace: Namespace,
    mode: RunMode,
    how: str,
    in_step: bool,
    interrupt: type[BaseException],
    autojump_clock: MockClock,
) -> None:
    """S33: not in a group, and it is no outcome; the workflow goes on in the next process."""
    calls: list[int] = []

    async def workflow(ctx: Context, _: object) -> Any:
        async def once() -> None:
            calls.append(1)
            await trio.sleep(1)
            if len(calls) == 1:
                raise interrupt

        async def dies(ctx: Context) -> str:
            await (ctx.step("once", once) if in_step else once())
            return "lived"

        async def works(ctx: Context) -> str:
            await ctx.step("work", trio.sleep, 5)
            return "worked"

        async def waits(ctx: Context) -> str:
            await ctx.sleep("nap", 6)
            return "slept"

        async def deep(ctx: Context) -> Any:
            return await fork(ctx, how, "inner", {"dies": dies, "works": works})

        result = await fork(ctx, how, "outer", {"deep": deep, "waits": waits})
        return result["deep"]["dies"]

    driver = await namespace.driver()
    with pytest.raises(interrupt):
        await run_workflow("workflow-1", workflow, None, driver, mode=mode, clock=MovableClock())
    snapshot = await namespace.snapshot()
    assert snapshot.state is WorkflowState.RUNNING
    async with host(namespace, mode) as process:
        await process.restart()
        assert await process.finish(workflow) == "lived"
    assert len(calls) == 2


# S32, S33: at every moment.


class Everything:
    """A workflow with branches of every kind at several depths, a moment inside each step, and a count of what lives."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments
        self.world = World(self._function)
        self.alive = 0

    def _living(self, part: Callable[[Context], Awaitable[Any]]) -> Part:
        async def living(ctx: Context) -> Any:
            self.alive += 1
            try:
                return await part(ctx)
            finally:
                self.alive -= 1

        return living

    async def _step(self, ctx: Context, name: str, seconds: float) -> str:
        async def effect() -> str:
            path = self.world.begin()
            await self.moments.reached(f"in {path}")
            await trio.sleep(seconds)
            return name

        value = await ctx.step(name, effect, timeout=0)
        self.world.acknowledge(*ctx._scope.activation.history.path_of(ctx._scope.location), name)
        return value

    async def _function(self, world: World, ctx: Context) -> Any:
        async def works(ctx: Context) -> str:
            await self._step(ctx, "one", 1)
            await ctx.sleep("pause", 4)
            return await self._step(ctx, "two", 1)

        async def long(ctx: Context) -> str:
            await ctx.sleep("long", YEAR)
            return "never"

        async def forks(ctx: Context) -> Any:
            return await fork(ctx, "join", "deep", {"works": self._living(works), "long": self._living(long)})

        async def races(ctx: Context) -> Any:
            branches = {"works": self._living(works), "forks": self._living(forks)}
            return (await ctx.race("inner", branches)).value

        async def reads(ctx: Context) -> int:
            return len(await ctx.queue.next_batch("read", timeout=8))

        async def fails(ctx: Context) -> None:
            await ctx.sleep("pause", 1)
            raise ValueError("no")

        branches = {"races": races, "reads": reads, "fails": fails, "works": works}
        try:
            await ctx.join("outer", {name: self._living(part) for name, part in branches.items()})
        except JoinError as error:
            failed = [str(info) for info in error.errors.values()]
        world.acknowledge("outer")
        await ctx.sleep("rest", 5)
        await self._step(ctx, "end", 1)
        return failed


async def until_over(
    namespace: Namespace,
    mode: RunMode,
    at: int | None,
    act: Callable[[WorkflowHandle], Awaitable[None]],
    check: Callable[[Everything, WorkflowHandle], Awaitable[None]],
) -> list[str]:
    """Run it to its end, or until something was done to it at a moment; then check. Returns the moments."""
    clock = MovableClock()
    async with trio.open_nursery() as nursery:
        handle: Any = None
        moments = Moments(nursery, at, lambda: act(handle))
        everything = Everything(moments)
        driver = MomentDriver(await namespace.driver(), moments)
        while not moments.was_reached:
            moments.are_counted = handle is not None
            handle = await start_workflow(
                nursery, "w-1", everything.world.workflow, None, driver, mode=mode, clock=clock
            )
            moments.are_counted = True
            while not moments.was_reached:
                await wait_all_tasks_blocked()
                await moments.reached("parked")
                if (await handle.get_state()).is_terminal or moments.was_reached:
                    break
                await trio.sleep(0.5)
                if mode == "yield" and not handle._activation.is_running:
                    alarm_ms = await driver.get_alarm("w-1")
                    assert alarm_ms is not None, "something brings it back"
                    await trio.sleep(max(0.001, (alarm_ms - clock.now_ms()) / 1000))
                    break
            if (await handle.get_state()).is_terminal and not moments.was_reached:
                break
        if at is not None:
            assert moments.was_reached
            await moments.acted.wait()
            await wait_all_tasks_blocked()
        await check(everything, handle)
        nursery.cancel_scope.cancel()
    return moments.names


async def count_moments(namespace: Namespace, mode: RunMode) -> list[str]:
    async def nothing(handle: WorkflowHandle) -> None:
        raise AssertionError("nothing is done in a run that only counts")

    async def check(everything: Everything, handle: WorkflowHandle) -> None:
        assert await handle.result() == ["ValueError: no"]
        assert everything.alive == 0

    with scheduled(1):
        names = await until_over(namespace, mode, None, nothing, check)
    assert {"before a batch", "after a batch", "parked"} <= set(names)
    assert sum(name.startswith("in (") for name in names) == 7
    return names


async def test_cancel_at_every_moment_reaches_every_branch_and_ends_as_cancelled(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29, S32: at any depth; no work goes on, nothing is written any more, no alarm is left."""
    names = await count_moments(make_quick_namespace(), mode)
    states: list[WorkflowState] = []
    for at in range(len(names)):
        namespace = make_quick_namespace()

        async def cancel(handle: WorkflowHandle) -> None:
            await handle.cancel()

        async def check(
            everything: Everything, handle: WorkflowHandle, namespace: Namespace = namespace, at: int = at
        ) -> None:
            states.append(state := await handle.get_state())
            assert everything.alive == 0, names[at]
            assert await (await namespace.driver()).get_alarm("w-1") is None
            stored, effects = await namespace.dump(), list(everything.world.effects)
            await trio.sleep(10_000)
            if state is WorkflowState.CANCELLED:
                with pytest.raises(WorkflowCancelledError):
                    await handle.result()
            assert (everything.world.effects, await namespace.dump()) == (effects, stored), names[at]

        with scheduled(1):
            await until_over(namespace, mode, at, cancel, check)
        await namespace.close()
    assert len(states) == len(names), "explored equals counted"
    assert set(states) == {WorkflowState.CANCELLED, WorkflowState.COMPLETED}
    assert set(states[: states.index(WorkflowState.COMPLETED)]) == {WorkflowState.CANCELLED}
    assert states.index(WorkflowState.COMPLETED) > len(names) - 5


async def test_evict_at_every_moment_reaches_every_branch_and_the_run_ends_as_if_never_stopped(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29, S33: at any depth; the same history, and no acknowledged effect twice."""
    first = make_quick_namespace()
    names = await count_moments(first, mode)
    expected = await outline(first, with_losers=False)
    for at in range(len(names)):
        namespace = make_quick_namespace()

        async def evict(handle: WorkflowHandle) -> None:
            await handle.evict()

        async def check(
            everything: Everything, handle: WorkflowHandle, namespace: Namespace = namespace, at: int = at
        ) -> None:
            assert everything.alive == 0, names[at]
            async with host(namespace, mode, workflow_id="w-1") as process:
                everything.moments.are_counted = False
                assert await process.finish(everything.world.workflow) == ["ValueError: no"]
                assert everything.world.recurred == []
                assert await outline(namespace, with_losers=False) == expected, names[at]

        with scheduled(1):
            await until_over(namespace, mode, at, evict, check)
        await namespace.close()


async def test_a_running_step_of_one_branch_finishes_while_another_may_begin_nothing_more(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S20, S33: a workflow that is drained, as at shutdown: evicted as soon as no step function runs, at once if none does."""

    async def function(world: World, ctx: Context) -> Any:
        async def works(ctx: Context) -> int:
            await world.step(ctx, "long", None, 10.0)
            return await world.step(ctx, "next", 1)

        async def begins(ctx: Context) -> int:
            await world.step(ctx, "short", None, 5.0)
            return await world.step(ctx, "new", 2)

        async def waits(ctx: Context) -> int:
            await ctx.sleep("nap", 6)
            return await world.step(ctx, "after", 3)

        async def loses(ctx: Context) -> None:
            await world.step(ctx, "long", None, 10.0)
            await ctx.sleep("nap", YEAR)

        async def deep(ctx: Context) -> Any:
            return (await ctx.race("race", {"waits": waits, "loses": loses})).value

        return dict(await ctx.join("join", {"works": works, "begins": begins, "deep": deep}))

    world = World(function)
    clock = MovableClock()
    async with trio.open_nursery() as nursery:
        handle = await start_workflow(
            nursery, "workflow-1", world.workflow, None, await namespace.driver(), mode=mode, clock=clock
        )
        activation = cast("Any", handle)._activation
        await trio.sleep(3)
        activation.drain()
        await trio.sleep(6.5)
        assert activation.is_running
        await trio.sleep(1)
        assert not activation.is_running
    assert sorted(path[-1] for path in world.effects) == ["long", "long", "short"]
    entries = await namespace.entries()
    assert {path[-1] for path, entry in entries.items() if entry.kind == "step"} == {"long", "short"}
    async with host(namespace, mode, clock=clock) as process:
        assert await process.finish(world.workflow) == {"works": 1, "begins": 2, "deep": 3}
    assert world.recurred == []
    assert world.count("long") == 2


async def test_a_drained_workflow_of_which_every_branch_waits_leaves_at_once(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S33: also when the last of them has only just parked."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def waits(ctx: Context) -> None:
            await ctx.queue.next("read")

        async def works(ctx: Context) -> None:
            await ctx.step("work", trio.sleep, 5)
            await ctx.sleep("nap", YEAR)

        await ctx.join("join", {"waits": waits, "works": works})

    async with trio.open_nursery() as nursery:
        handle = await start_workflow(
            nursery, "workflow-1", workflow, None, await namespace.driver(), mode=mode, clock=MovableClock()
        )
        activation = cast("Any", handle)._activation
        await trio.sleep(1)
        activation.drain()
        await trio.sleep(4.5)
        assert not activation.is_running
        nursery.cancel_scope.cancel()
    assert ("join", "works", "work") in await namespace.entries()


@pytest.mark.parametrize("how", ["join", "race"])
async def test_a_branch_that_ends_the_process_every_time_ends_the_workflow_and_not_its_siblings_record(
    namespace: Namespace, mode: RunMode, how: str, autojump_clock: MockClock
) -> None:
    """S18, S36: as CrashLoopError, though another branch waits; once the step is mended, recover() lets both go on."""
    is_mended = False
    lives = 0

    async def function(world: World, ctx: Context) -> Any:
        async def kills(ctx: Context) -> str:
            await world.step(ctx, "before")
            if is_mended:
                return await world.step(ctx, "kill", "done")

            async def kill() -> None:
                await trio.sleep(1)
                namespace.kill()

            return await ctx.step("kill", kill)

        async def waits(ctx: Context) -> str:
            await world.step(ctx, "before")
            await ctx.sleep("nap", 1000)
            return "slept"

        return await fork(ctx, how, "fork", {"kills": kills, "waits": waits})

    world = World(function)
    while True:
        assert lives < 20
        try:
            async with host(namespace, mode) as process:
                await process.finish(world.workflow)
        except SimulatedCrashError:
            lives += 1
        except WorkflowFailedError as error:
            assert error.name == "CrashLoopError"  # noqa: PT017
            break
    is_mended = True
    async with host(namespace, mode) as process:
        await process.control("recover")
        output = await process.finish(world.workflow)
    assert output == ({"kills": "done", "waits": "slept"} if how == "join" else {"kills": "done"})
    assert world.count("before") == 2
    assert world.recurred == []


# What a branch knows of itself.


async def test_idempotency_keys_differ_between_branches_and_are_stable(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S1: for each attempt, after a restart, at any depth; the path names the branch."""
    keys: dict[tuple[Any, ...], set[str]] = {}

    async def workflow(ctx: Context, _: object) -> Any:
        async def work() -> None:
            step = current_step()
            keys.setdefault(step.path, set()).add(step.idempotency_key)
            if step.attempt == 1:
                raise ConnectionError("once")

        async def branch(ctx: Context) -> None:
            await ctx.step("work", work, retry_backoff_base=5)

        async def deep(ctx: Context) -> None:
            await ctx.join("join", {"a": branch, "b": branch})

        await ctx.join("join", {"a": branch, "b": branch, "deep": deep})

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.finish(workflow)
    assert set(keys) == {
        ("join", "a", "work"),
        ("join", "b", "work"),
        ("join", "deep", "join", "a", "work"),
        ("join", "deep", "join", "b", "work"),
    }
    assert all(len(found) == 1 for found in keys.values())
    assert len(set.union(*keys.values())) == 4


async def test_each_branch_knows_by_itself_whether_it_replays(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """S1: its logger is silent exactly while recorded entries of its own are ahead; the workflow's, while any are."""
    caplog.set_level(logging.INFO, "perdure.workflow.user")

    async def workflow(ctx: Context, _: object) -> Any:
        async def branch(inner: Context, name: str, seconds: float) -> None:
            inner.logger.info("%s begins", name)
            await inner.step("work", _noop)
            inner.logger.info("%s worked", name)
            await inner.sleep("nap", seconds)
            inner.logger.info("%s slept", name)
            if name == "a":
                assert not inner.is_replaying

        await ctx.join("join", {"a": partial(branch, name="a", seconds=5), "b": partial(branch, name="b", seconds=9)})
        ctx.logger.info("joined")
        await ctx.sleep("rest", 5)

    async with host(namespace, mode) as process:
        for _ in range(3):
            stopped = await process.stop(workflow)
            await process.restart()
            assert stopped.sleep_until is not None
            await process.advance(max(0.001, stopped.sleep_until - process.clock.now_ms() / 1000))
        await process.finish(workflow)
    lines = [record.getMessage() for record in caplog.records if record.name == "perdure.workflow.user"]
    assert sorted(lines[:4]) == ["a begins", "a worked", "b begins", "b worked"]
    assert lines[4:] == ["a slept", "b slept", "joined"]


async def test_joins_in_a_long_loop_leave_nothing_behind(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S12, S25: tasks, parkings, lanes and history are what they were after each iteration."""
    rounds = 150 if mode == "live" else 30
    counts: list[tuple[int, ...]] = []

    async def workflow(ctx: Context, _: object) -> int:
        activation = ctx._scope.activation

        async def body(ctx: Context, number: int) -> Any:
            async def sleeps(ctx: Context) -> None:
                await ctx.sleep("nap", 1)

            async def fails(ctx: Context) -> None:
                raise ValueError("no")

            async def block(ctx: Context) -> None:
                await ctx.join("join", {"a": sleeps, "b": sleeps, "fails": fails})

            await ctx.try_block("block", block)
            counts.append(
                (
                    trio.lowlevel.current_statistics().tasks_living,
                    len(activation._parked),
                    activation.busy,
                    activation.lanes,
                    len(activation.history.open_sleeps),
                    len(list(activation.history.entries())),
                    len(activation.history._details),
                )
            )
            return Break(number) if number == rounds - 1 else Continue(number + 1)

        return await ctx.loop("loop", body, 0, history_prune_interval=1, history_size=0)

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == rounds - 1
    assert len(set(counts[1:])) == 1
    assert counts[-1][1:5] == (0, 1, 1, 0)


async def test_suspension_passes_through_nurseries_and_groups_of_the_users(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S31: a branch that runs its one wait in a nursery of its own parks, resumes and ends like any other."""
    seen: list[str] = []

    async def function(world: World, ctx: Context) -> Any:
        async def branch(ctx: Context) -> str:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ctx.sleep, "nap", 10)
            except* SuspendSignal:
                seen.append("signal")
                raise
            return await world.step(ctx, "work", "done")

        async def fails(ctx: Context) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(world.step, ctx, "fails", CriticalError("in a group")))

        try:
            return await fork(ctx, "join", "join", {"a": branch, "b": branch, "fails": fails})
        except JoinError as error:
            return [str(info) for info in error.errors.values()]

    output, _ = await run_in_world(namespace, mode, function, restarts=True)
    assert output == ["CriticalError: in a group"]
