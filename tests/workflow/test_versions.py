"""Changing code under workflows that are under way: `get_version` and `removed`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from harness import Crash, Function, Host, Namespace, SimulatedCrashError, crashes, host
from trio.testing import MockClock

from perdure.workflow import (
    BlockOk,
    Break,
    Context,
    Continue,
    CriticalError,
    DuplicateNameError,
    HistoryDivergedError,
    InvalidArgumentError,
    RemovableKind,
    RollbackContext,
    RunMode,
    StepError,
    WorkflowFailedError,
    WorkflowState,
)

Operation = Callable[[Context], Awaitable[Any]]

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def effect(value: Any) -> Any:
    calls.append(str(value))
    return value


async def wait(ctx: Context, name: str = "wait") -> None:
    await ctx.queue.next(name, names=["go"])


async def count(ctx: Context, total: int) -> Continue[int] | Break[int]:
    await ctx.step("work", effect, "worked")
    return Continue(total + 1) if total < 2 else Break(total)


# get_version.


async def test_a_fresh_instance_takes_the_latest_version_and_keeps_it_under_newer_code(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2: a fresh instance keeps the latest version of its time."""

    def deployed(latest: int) -> Function:
        async def workflow(ctx: Context, _: object) -> int:
            version = await ctx.get_version("pricing", latest)
            await wait(ctx)
            return version

        return workflow

    async with host(namespace, mode) as process:
        await process.stop(deployed(2))
        await process.restart()
        await process.stop(deployed(3))
        await process.restart()
        await process.send("go")
        assert await process.finish(deployed(4)) == 2
    assert (await namespace.entries())["pricing",].data == {"resolved": 2, "latest": 2}


async def test_an_instance_that_passed_the_place_under_older_code_gets_1_and_keeps_it(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2: an instance that passed that place under older code gets 1."""

    async def old(ctx: Context, _: object) -> None:
        await ctx.step("first", effect, "first")
        await ctx.queue.next("wait", names=["go"], timeout=3600)

    async def new(ctx: Context, _: object) -> list[int]:
        await ctx.step("first", effect, "first")
        before = await ctx.get_version("before the wait", 2)
        await wait(ctx)
        after = await ctx.get_version("after the wait", 2)
        await wait(ctx, "wait again")
        return [before, after]

    async with host(namespace, mode) as process:
        await process.stop(old)  # beyond the place, the deadline of its wait is recorded
        await process.restart()
        await process.send("go")
        await process.stop(new)
        await process.restart()
        await process.send("go")
        assert await process.finish(new) == [1, 2]
        entries = await namespace.entries()
    assert calls == ["first"]
    assert entries["before the wait",].data == {"resolved": 1, "latest": 2}
    assert entries["after the wait",].data == {"resolved": 2, "latest": 2}


async def test_a_version_first_met_after_a_finished_loop_is_the_latest_also_after_a_sleep_and_a_restart(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2: first met after a finished loop, then a sleep and a restart: a fresh instance keeps the latest version."""

    async def workflow(ctx: Context, _: object) -> list[int]:
        await ctx.loop("loop", count, 0)
        first = await ctx.get_version("v", 3)
        await ctx.sleep("sleep", 60)
        return [first, await ctx.get_version("w", 3)]

    async with host(namespace, mode) as process:
        stopped = await process.stop(workflow)
        assert stopped.state is WorkflowState.SLEEPING
        await process.restart()
        assert await process.finish(workflow) == [3, 3]
    assert calls == ["worked"] * 3


@pytest.mark.parametrize("kind", ["join", "race", "try_block"])
async def test_a_version_first_met_after_or_in_branches_is_the_latest_also_after_a_sleep_and_a_restart(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, kind: RemovableKind
) -> None:
    """S2: first met after a finished join, race or block, or in a branch beside one that is recorded: the latest."""

    async def quick(ctx: Context) -> int:
        return await ctx.step("work", effect, 1)

    async def deciding(ctx: Context) -> int:
        if kind != "race":
            await ctx.sleep("sleep", 10)
        return await ctx.get_version("v", 3)

    async def workflow(ctx: Context, _: object) -> list[int]:
        match kind:
            case "join":
                joined = await ctx.join("x", {"quick": quick, "deciding": deciding})
                inside = joined["deciding"]
            case "race":
                inside = (await ctx.race("x", {"deciding": deciding, "waiting": wait})).value or 0
            case _:
                block = await ctx.try_block("x", deciding)
                assert isinstance(block, BlockOk)
                inside = block.value
        after = await ctx.get_version("v", 3)
        await ctx.sleep("sleep", 60)
        return [inside, after, await ctx.get_version("w", 3)]

    async with host(namespace, mode) as process:
        for _ in range(3):
            if (result := await process.stop(workflow)).sleep_until is None:
                break
            await process.restart()
            await process.advance(result.sleep_until - process.clock.now_ms() / 1000)
        assert await process.finish(workflow) == [3, 3, 3]


@pytest.mark.parametrize("kind", ["join", "try_block"])
async def test_what_was_under_way_in_a_branch_or_block_gets_1_there(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, kind: RemovableKind
) -> None:
    """S2: each branch decides for itself; in a block, also by what is recorded behind the block."""

    def deployed(*, asks: bool) -> Function:
        async def passed(ctx: Context) -> int:
            version = await ctx.get_version("v", 2) if asks else 0
            await ctx.queue.next("wait", names=["go"], timeout=3600)
            return version

        async def fresh(ctx: Context) -> int:
            return await ctx.get_version("v", 2) if asks else await ctx.step("never", effect, 0)

        async def block(ctx: Context) -> int:
            return await ctx.get_version("v", 2) if asks else 0

        async def workflow(ctx: Context, _: object) -> list[int]:
            if kind == "join":
                branches = {"passed": passed, "fresh": fresh} if asks else {"passed": passed, "fresh": wait_branch}
                return list((await ctx.join("x", branches)).values())
            found = await ctx.try_block("x", block)
            assert isinstance(found, BlockOk)
            await ctx.queue.next("wait", names=["go"], timeout=3600)
            return [found.value]

        return workflow

    async with host(namespace, mode) as process:
        await process.stop(deployed(asks=False))
        await process.restart()
        await process.send("go")
        assert await process.finish(deployed(asks=True)) == ([1, 2] if kind == "join" else [1])


async def test_each_iteration_of_a_loop_decides_for_itself(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2: the iteration that older code had begun gets 1, those after it the latest; so for each newer code."""

    def deployed(latest: int | None) -> Function:
        async def body(ctx: Context, seen: list[int]) -> Continue[list[int]] | Break[list[int]]:
            version = 0 if latest is None else await ctx.get_version("v", latest)
            await ctx.queue.next("wait", names=["go"], timeout=3600)
            seen = [*seen, version]
            return Continue(seen) if len(seen) < 4 else Break(seen)

        async def workflow(ctx: Context, _: object) -> list[int]:
            return await ctx.loop("loop", body, [])

        return workflow

    async with host(namespace, mode) as process:
        await process.stop(deployed(None))
        for latest in (None, 2, 3):  # each finishes the iteration that waits, and begins the next
            await process.restart()
            await process.send("go")
            await process.stop(deployed(latest))
        await process.restart()
        await process.send("go")
        assert await process.finish(deployed(4)) == [0, 1, 2, 3]


async def test_removed_retires_a_version(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S2: once no instance needs version 1, `removed` takes the decision's place; in fresh instances too."""

    async def old(ctx: Context, _: object) -> int:
        version = await ctx.get_version("v", 2)
        await wait(ctx)
        return version

    async def new(ctx: Context, _: object) -> str:
        await ctx.removed("v", "version_check")
        await wait(ctx)
        return "done"

    async with host(namespace, mode) as process:
        await process.stop(old)
        before = await namespace.entries()
        await process.restart()
        await process.stop(new)
        assert await namespace.entries() == before
        await process.restart()
        await process.send("go")
        assert await process.finish(new) == "done"


async def test_a_version_is_durable_before_the_next_step_function_runs(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2: the process dies in the first step that acts on the version; newer code takes the same branch again."""
    stored: list[Any] = []

    def deployed(latest: int, *, die: bool) -> Function:
        async def act(version: int) -> int:
            stored.append((await namespace.entries())["v",].data)
            if die:
                namespace.kill()
            return version

        async def workflow(ctx: Context, _: object) -> int:
            await ctx.step("before", effect, "before")
            version = await ctx.get_version("v", latest)
            return await ctx.step("act", act, version)

        return workflow

    with pytest.raises(SimulatedCrashError):
        async with host(namespace, mode) as process:
            await process.stop(deployed(2, die=True))
    async with host(namespace, mode) as process:
        assert await process.finish(deployed(3, die=False)) == 2
    assert stored == [{"resolved": 2, "latest": 2}] * 2


async def test_a_version_costs_no_commit_of_its_own(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2: it goes with the park, or with what must be durable before the step anyway."""

    async def workflow(ctx: Context, _: object) -> int:
        version = await ctx.get_version("v", 2)
        await ctx.removed("gone", "step")
        await ctx.sleep("sleep", 60)
        await ctx.step("step", effect, 1)
        return version

    async with host(namespace, mode) as process:
        stopped = await process.stop(workflow)
        assert stopped.state is WorkflowState.SLEEPING
        # In live mode the workflow is created before it runs.
        assert (await namespace.driver()).writes == (1 if mode == "yield" else 2)
        assert set(await namespace.entries()) == {("v",), ("gone",), ("sleep",)}


async def test_a_crash_at_any_write_changes_no_version_that_was_acted_on(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2, S39: each deployment after a crash knows a newer version; what a step did and what is recorded agree."""
    deployments = 0

    async def workflow(ctx: Context, _: object) -> list[list[int]]:
        async def body(inner: Context, seen: list[int]) -> Continue[list[int]] | Break[list[int]]:
            version = await inner.get_version("v", deployments)
            acted = await inner.step("act", effect, version)
            await inner.sleep("pause", 1)
            return Continue([*seen, version, acted]) if len(seen) < 2 else Break([*seen, version, acted])

        await ctx.removed("gone", "sleep")
        first = await ctx.get_version("v", deployments)
        acted = await ctx.step("act", effect, first)
        in_loop = await ctx.loop("loop", body, [])
        last = await ctx.get_version("last", deployments)
        return [[first, acted], in_loop, [last, await ctx.step("act last", effect, last)]]

    async def scenario(namespace: Namespace) -> Any:
        nonlocal deployments
        deployments += 1
        async with host(namespace, mode) as process:
            return await process.finish(workflow)

    async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
        first, in_loop, last = outcome
        assert first[0] == first[1], crash
        assert last[0] == last[1], crash
        assert (in_loop[0], in_loop[2]) == (in_loop[1], in_loop[3]), crash
        # Nothing was recorded ahead of any of these places, so none is 1 (the first deployment of each run is larger).
        assert {value for pair in outcome for value in pair} <= {deployments - 1, deployments}, crash

    deployments = 10
    explored = await crashes(scenario, make_quick_namespace, check)
    assert explored.counted >= 8


@pytest.mark.parametrize("latest", [0, -1, 2**32, 1.0, "2", None, True])
async def test_a_latest_version_that_is_none_is_refused_and_nothing_is_written(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, latest: Any
) -> None:
    """S2: a typed error with what to write; a fault, so the workflow goes on with right code."""

    def deployed(latest: Any) -> Function:
        async def workflow(ctx: Context, _: object) -> int:
            return await ctx.get_version("v", latest)

        return workflow

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match="latest"):
            await process.stop(deployed(latest))
        await process.restart()
        assert await process.finish(deployed(2**32 - 1)) == 2**32 - 1


async def test_a_rollback_takes_the_recorded_way_and_decides_nothing(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S35, S2: run once more for its handlers, also by newer code, the function gets its versions, times and ids as they were."""

    def deployed(latest: int) -> Function:
        async def undo(ctx: RollbackContext, output: str) -> None:
            calls.append(f"undo {output}")
            if latest == 2:
                raise KeyError("not yet")

        async def fail() -> None:
            calls.append("failed")
            raise CriticalError("beyond repair")

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("checkpoint")
            await ctx.removed("gone", "step")
            version = await ctx.get_version("v", latest)
            did = f"{version} at {await ctx.now('time')} by {ctx.uuid('id')} and {ctx.random('chance').random()}"
            await ctx.step(f"do {version}", effect, did, rollback=undo, retry_backoff_base=60.0)
            await ctx.step("fail", fail)
            await ctx.removed("never met", "sleep")
            await ctx.get_version("never asked", latest)
            await ctx.now("never known")

        return workflow

    async with host(namespace, mode) as process:
        result = await process.stop(deployed(2))
        assert result.state is WorkflowState.ROLLING_BACK
        before = set(await namespace.entries())
        await process.restart()
        process.clock.move(86400)
        with pytest.raises(WorkflowFailedError, match="beyond repair"):
            await process.finish(deployed(3))
        assert set(await namespace.entries()) == before
    did = calls[0]
    assert calls == [did, "failed", f"undo {did}", f"undo {did}"]


# removed.


async def run_step(ctx: Context) -> object:
    return await ctx.step("x", effect, "stepped")


async def fail_step(ctx: Context) -> object:
    async def fail() -> None:
        calls.append("failed")
        raise KeyError("x")

    try:
        return await ctx.step("x", fail, max_retries=0)
    except StepError:
        return "failed"


async def run_sleep(ctx: Context) -> object:
    return (await ctx.sleep_until("x", 0)).value


async def run_loop(ctx: Context) -> object:
    return await ctx.loop("x", count, 0)


async def read(ctx: Context) -> object:
    return [message.body for message in await ctx.queue.next_batch("x", names=["early"], count=5, timeout=60)]


async def read_too_late(ctx: Context) -> object:
    return len(await ctx.queue.next_batch("x", names=["never"], timeout=0))


async def branch(ctx: Context) -> str:
    return await ctx.step("work", effect, "worked")


async def wait_branch(ctx: Context) -> None:
    await ctx.queue.next("for ever", names=["never"])


async def run_join(ctx: Context) -> object:
    return await ctx.join("x", {"a": branch, "b": branch})


async def run_race(ctx: Context) -> object:
    return (await ctx.race("x", {"a": branch, "b": wait_branch})).value


async def run_block(ctx: Context) -> object:
    return await ctx.try_block("x", branch)


async def check(ctx: Context) -> object:
    return await ctx.rollback_checkpoint("x")


async def decide(ctx: Context) -> object:
    return await ctx.get_version("x", 7)


RECORDED: dict[str, tuple[RemovableKind, Operation]] = {
    "step": ("step", run_step),
    "failed step": ("step", fail_step),
    "sleep": ("sleep", run_sleep),
    "loop": ("loop", run_loop),
    "read": ("message", read),
    "read too late": ("message", read_too_late),
    "version": ("version_check", decide),
    "join": ("join", run_join),
    "race": ("race", run_race),
    "block": ("try_block", run_block),
    "checkpoint": ("rollback_checkpoint", check),
}


def in_place(place: str, operation: Operation) -> Function:
    """The operation and then a wait, at the root or in the second iteration of a loop."""

    async def here(ctx: Context) -> str:
        await operation(ctx)
        await wait(ctx)
        return "done"

    async def workflow(ctx: Context, _: object) -> str:
        async def body(inner: Context, state: int) -> Continue[int] | Break[str]:
            return Continue(1) if state == 0 else Break(await here(inner))

        return await here(ctx) if place == "root" else await ctx.loop("outer", body, 0)

    return workflow


def removing(kind: RemovableKind, name: str = "x") -> Operation:
    async def operation(ctx: Context) -> None:
        await ctx.removed(name, kind)

    return operation


async def stop_after_mail(process: Host, fn: Function) -> None:
    for body in ("one", "two"):
        await process.send("early", body)
    assert (await process.stop(fn)).state is WorkflowState.SLEEPING


@pytest.mark.parametrize("place", ["root", "iteration"])
@pytest.mark.parametrize("recorded", RECORDED)
async def test_removed_makes_a_recorded_operation_acceptable_that_the_code_lacks(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, recorded: str, place: str
) -> None:
    """S4: of each kind, at the root or deeper, with all that is recorded below it; history stays as it was."""
    kind, operation = RECORDED[recorded]
    new = in_place(place, removing(kind))
    async with host(namespace, mode) as process:
        await stop_after_mail(process, in_place(place, operation))
        before = await namespace.entries()
        effects = list(calls)
        await process.restart()
        assert (await process.stop(new)).state is WorkflowState.SLEEPING
        assert await namespace.entries() == before
        await process.restart()
        await process.send("go")
        assert await process.finish(new) == "done"
        assert calls == effects
    assert (await namespace.snapshot()).state is WorkflowState.COMPLETED


@pytest.mark.parametrize("place", ["root", "iteration"])
@pytest.mark.parametrize("kind", ["step", "loop", "sleep", "message", "version_check", "join", "race", "try_block"])
async def test_removed_records_itself_where_nothing_is_recorded_and_is_found_again(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, kind: RemovableKind, place: str
) -> None:
    """S4: a fresh instance, again after a restart; whatever kind the code names then."""
    new = in_place(place, removing(kind))
    path = ("x",) if place == "root" else ("outer", 1, "x")
    async with host(namespace, mode) as process:
        await process.stop(new)
        entry = (await namespace.entries())[path]
        assert (entry.kind, entry.data) == ("removed", {"original_type": kind, "original_name": "x"})
        await process.restart()
        await process.stop(new)
        assert (await namespace.entries())[path] == entry
        await process.restart()
        await process.send("go")
        assert await process.finish(new) == "done"


@pytest.mark.parametrize("kind", ["join", "race", "loop", "try_block"])
async def test_what_is_still_at_work_can_be_removed_with_all_that_it_waits_for(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, kind: RemovableKind
) -> None:
    """S4: branches, an iteration or a block that wait: none of their waits is left."""

    async def waiting(ctx: Context) -> None:
        await ctx.step("work", effect, "worked")
        await ctx.sleep("for long", 86400)

    async def body(ctx: Context, _: None) -> None:
        await waiting(ctx)

    async def old(ctx: Context, _: object) -> None:
        match kind:
            case "join":
                await ctx.join("x", {"a": waiting, "b": branch})
            case "race":
                await ctx.race("x", {"a": waiting, "b": wait_branch})
            case "loop":
                await ctx.loop("x", body)
            case _:
                await ctx.try_block("x", waiting)

    async with host(namespace, mode) as process:
        assert (await process.stop(old)).sleep_until is not None
        effects = list(calls)
        await process.restart()
        stopped = await process.stop(in_place("root", removing(kind)))
        assert (stopped.sleep_until, stopped.waiting_for_messages) == (None, ("go",))
        await process.restart()
        await process.send("go")
        assert await process.finish(in_place("root", removing(kind))) == "done"
        assert calls == effects


@pytest.mark.parametrize("timeout", [None, 3600.0])
async def test_a_read_that_still_waits_can_be_removed_and_its_message_goes_elsewhere(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, timeout: float | None
) -> None:
    """S4: a waiting queue read of which only the deadline is recorded, or nothing at all."""

    async def old(ctx: Context, _: object) -> object:
        return (await ctx.queue.next("x", names=["go"], timeout=timeout)).body

    async def new(ctx: Context, _: object) -> object:
        await ctx.removed("x", "message")
        return (await ctx.queue.next("y", names=["go"])).body

    async with host(namespace, mode) as process:
        await process.stop(old)
        assert set(await namespace.entries()) == ({("x:deadline",)} if timeout else set())
        await process.restart()
        assert (await process.stop(new)).sleep_until is None
        await process.restart()
        await process.send("go", "body")
        assert await process.finish(new) == "body"
        assert (("x",) in await namespace.entries()) == (timeout is None)


@pytest.mark.parametrize("kind", ["step", "loop", "sleep", "message", "version_check", "join", "race", "try_block"])
@pytest.mark.parametrize("recorded", RECORDED)
async def test_removed_of_another_kind_is_divergence_and_the_old_code_goes_on(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, recorded: str, kind: RemovableKind
) -> None:
    """S4: what history holds is not what was said to be removed; nothing is written."""
    recorded_kind, operation = RECORDED[recorded]
    if kind == recorded_kind:
        kind = "rollback_checkpoint"
    old = in_place("root", operation)
    async with host(namespace, mode) as process:
        await stop_after_mail(process, old)
        before = await namespace.dump()
        await process.restart()
        with pytest.raises(HistoryDivergedError) as caught:
            await process.stop(in_place("root", removing(kind)))
        assert recorded_kind in str(caught.value)
        await process.restart()
        assert await namespace.dump() == before
        await process.send("go")
        assert await process.finish(old) == "done"


@pytest.mark.parametrize("recorded", RECORDED)
async def test_divergence_says_which_call_retires_what_is_recorded_and_where_it_has_to_stand(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, recorded: str
) -> None:
    """S4: `removed` has to come before new operations of its scope; the error shows the call, and that call works."""
    kind, operation = RECORDED[recorded]

    async def replaced(ctx: Context) -> None:
        await ctx.step("new", effect, "new")

    async def too_late(ctx: Context) -> None:
        await replaced(ctx)
        await ctx.removed("x", kind)

    async def in_time(ctx: Context) -> None:
        await ctx.removed("x", kind)

    async with host(namespace, mode) as process:
        await stop_after_mail(process, in_place("root", operation))
        for diverging in (replaced, too_late):
            await process.restart()
            with pytest.raises(HistoryDivergedError, match="before step 'new'") as caught:
                await process.stop(in_place("root", diverging))
            assert f"`await ctx.removed('x', {kind!r})`" in str(caught.value)
        await process.restart()
        await process.send("go")
        assert await process.finish(in_place("root", in_time)) == "done"
        assert "new" not in calls


async def test_code_that_takes_its_removal_back_diverges(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: a removal that was recorded is history like any other entry, until the workflow has ended."""

    async def nothing(ctx: Context) -> None:
        pass

    async with host(namespace, mode) as process:
        await process.stop(in_place("root", removing("step")))
        before = await namespace.dump()
        for code in (nothing, run_step):
            await process.restart()
            with pytest.raises(HistoryDivergedError, match="removed step 'x'"):
                await process.stop(in_place("root", code))
        await process.restart()
        assert await namespace.dump() == before
        await process.send("go")
        assert await process.finish(in_place("root", removing("sleep"))) == "done"


@pytest.mark.parametrize("kind", ["removed", "queue", "Step", "", None, 3, ["step"]])
async def test_a_kind_that_does_not_exist_is_refused_with_those_that_do(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, kind: Any
) -> None:
    """S4: a fault that lists the kinds; nothing is recorded."""
    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match=r"'step', 'loop', 'sleep', 'message', .*'try_block'"):
            await process.stop(in_place("root", removing(kind)))
        await process.restart()
        assert await namespace.entries() == {}


@pytest.mark.parametrize("removed_first", [True, False])
async def test_a_removed_read_keeps_its_derived_names_from_other_entries(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, removed_first: bool
) -> None:
    """S5: instances that hold the read hold it under these names; refused in every instance, not only in those."""

    async def workflow(ctx: Context, _: object) -> None:
        if removed_first:
            await ctx.removed("q", "message")
        await ctx.step("q:0", effect, "stepped")
        if not removed_first:
            await ctx.removed("q", "message")

    async with host(namespace, mode) as process:
        with pytest.raises(DuplicateNameError, match="'q:0'"):
            await process.stop(workflow)


async def test_a_sleep_named_like_a_reads_deadline_is_not_removed_with_the_read(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S5: no aliasing: `removed` of a read `x` passes over what a read `x` stored, and over nothing else."""

    async def old(ctx: Context) -> None:
        await ctx.sleep_until("x:deadline", 0)

    async with host(namespace, mode) as process:
        await process.stop(in_place("root", old))
        await process.restart()
        with pytest.raises(HistoryDivergedError, match=r"ctx\.removed\('x:deadline', 'sleep'\)"):
            await process.stop(in_place("root", removing("message")))
        await process.restart()
        await process.send("go")
        assert await process.finish(in_place("root", removing("sleep", "x:deadline"))) == "done"
