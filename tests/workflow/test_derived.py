"""What code would otherwise take from its surroundings: `uuid`, `random` and `now`, the same on every run."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from random import Random
from typing import Any
from uuid import UUID

import pytest
from harness import Crash, Function, MovableClock, Namespace, SimulatedCrashError, SlowDriver, crashes, host
from trio.testing import MockClock

from perdure.storage import encode_value, layout
from perdure.storage.schema import EntryMetadata, EntryStatus
from perdure.workflow import (
    Break,
    Context,
    Continue,
    DuplicateNameError,
    HistoryDivergedError,
    InvalidArgumentError,
    MisuseError,
    RunMode,
    StepExhaustedError,
    SuspendSignal,
    WorkflowState,
    current_step,
    run_workflow,
)

calls: list[Any] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def effect(value: Any = None) -> Any:
    calls.append(value)
    return value


# uuid and random.


async def draw(ctx: Context) -> list[Any]:
    """Everything that is derived for the name `x` in this scope."""
    random = ctx.random("x")
    return [str(ctx.uuid("x")), random.random(), random.randrange(10**9), random.sample(range(100), 5)]


async def test_uuids_and_random_numbers_are_the_same_on_every_run_and_differ_by_name_and_place(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: first run and replay see the same, at the root and in each iteration, around a restart and under a moved clock."""
    runs: list[dict[str, list[Any]]] = []

    async def workflow(ctx: Context, _: object) -> None:
        seen = {"root": await draw(ctx)}
        runs.append(seen)

        async def body(inner: Context, number: int) -> Continue[int] | Break[None]:
            seen[f"iteration {number}"] = await draw(inner)
            await inner.sleep("pause", 1)
            return Continue(number + 1) if number < 2 else Break(None)

        await ctx.loop("loop", body, 0)
        seen["another name"] = [str(ctx.uuid("y")), *(ctx.random("y").random() for _ in range(2))]
        await ctx.queue.next("wait", names=["go"])
        seen["root again"] = await draw(ctx)

    async with host(namespace, mode) as process:
        while (await process.stop(workflow)).sleep_until is not None:
            await process.advance(2)
        for _ in range(2):
            await process.restart()
            process.clock.move(3600)
            await process.stop(workflow)
        await process.send("go")
        await process.finish(workflow)
    assert len(runs) >= 3
    last = runs[-1]
    assert last["root"] == last["root again"]
    for run in runs:
        assert all(last.get(place, values) == values for place, values in run.items())
    distinct: dict[str, list[Any]] = {}
    for run in runs:
        distinct |= run
    assert set(distinct) == {"root", "iteration 0", "iteration 1", "iteration 2", "another name", "root again"}
    del distinct["root again"]
    assert len({values[0] for values in distinct.values()}) == len(distinct), "two places have one UUID"
    assert len({values[1] for values in distinct.values()}) == len(distinct), "two places have one stream"
    assert distinct["another name"][1] == distinct["another name"][2], "each call begins the stream anew"


async def test_what_is_derived_is_written_nowhere(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: no entry, no name, no write: a workflow stores the same bytes with and without it."""

    def deployed(*, derive: bool) -> Function:
        async def workflow(ctx: Context, _: object) -> str:
            if derive:
                await draw(ctx)
                ctx.uuid("step")  # an operation's name is free for it, too
            await ctx.step("step", effect, 1)
            if derive:
                ctx.uuid("step")
            return "done"

        return workflow

    dumps: list[dict[bytes, bytes]] = []
    for derive in (False, True):
        namespace = make_namespace()
        async with host(namespace, mode) as process:
            assert await process.finish(deployed(derive=derive)) == "done"
            dumps.append(await namespace.dump())
    assert dumps[0] == dumps[1]


async def test_a_uuid_is_of_version_8_is_no_idempotency_key_and_differs_between_workflows(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: a step and a UUID of one name have different keys; so has another workflow."""
    keys: list[str] = []

    async def key() -> str:
        return current_step().idempotency_key

    async def workflow(ctx: Context, _: object) -> None:
        keys.append(await ctx.step("x", key))
        made = ctx.uuid("x")
        assert (type(made), made.version, made.variant) == (UUID, 8, UUID(keys[0]).variant)
        keys.append(str(made))

    for seed in (1, 2):
        async with host(make_namespace(), mode, seed=seed) as process:
            await process.finish(workflow)
    assert len(set(keys)) == len(keys) == 4


def version_8(data: bytes) -> UUID:
    number = int.from_bytes(data, "big")
    number = number & ~(0xF << 76) | 8 << 76
    return UUID(int=number & ~(0b11 << 62) | 0b10 << 62)


async def test_what_is_derived_depends_on_seed_and_path_alone(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: these values are part of what is promised over releases: a changed rule would change running workflows."""

    async def workflow(ctx: Context, _: object) -> list[Any]:
        async def body(inner: Context, _: None) -> Break[list[Any]]:
            return Break([str(inner.uuid("x")), inner.random("x").random()])

        return [str(ctx.uuid("x")), ctx.random("x").random(), *await ctx.loop("loop", body)]

    async with host(namespace, mode) as process:
        output = await process.finish(workflow)
        seed = (await namespace.dump())[layout.SEED_KEY]
    root, iteration = b"\x02x\x00", b"\x02loop\x00" + b"\x05\x14\x00" + b"\x02x\x00"
    expected: list[Any] = []
    for path in (root, iteration):
        for_uuid, for_random = (
            version_8(sha256(seed + path + purpose).digest()[:16]) for purpose in (b"\x15\x01", b"\x15\x02")
        )
        expected += [str(for_uuid), Random(for_random.int).random()]
    assert output == expected


async def test_uuids_and_random_numbers_may_be_made_while_a_step_runs(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: they are no operations, so none is in progress, and nothing waits for its turn."""

    async def workflow(ctx: Context, _: object) -> list[str]:
        async def inside() -> str:
            return str(ctx.uuid("x"))

        return [str(ctx.uuid("x")), await ctx.step("step", inside)]

    async with host(namespace, mode) as process:
        outside, inside = await process.finish(workflow)
    assert outside == inside


@pytest.mark.parametrize("method", ["uuid", "random"])
@pytest.mark.parametrize("name", ["", None, 3, "x" * 513, "\ud800"])
async def test_a_name_that_is_none_is_refused(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, method: str, name: Any
) -> None:
    """S5: the same names are legal as for operations; a wrong one is a fault, also when the code catches it."""

    async def workflow(ctx: Context, _: object) -> str:
        try:
            getattr(ctx, method)(name)
        except ValueError:
            return "caught"
        return "not refused"

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match=f"name given to {method}"):
            await process.stop(workflow)


@pytest.mark.parametrize("arguments", [(), ("a", "b")], ids=["none", "too many"])
@pytest.mark.parametrize("method", ["uuid", "random"])
async def test_arguments_that_do_not_fit_stop_the_workflow_and_fail_nothing(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, method: str, arguments: tuple[str, ...]
) -> None:
    """S5: as for `ctx.now()` and all others: a mistake in the code is no failure of the work, and can be mended."""

    async def workflow(ctx: Context, _: object) -> str:
        return str(getattr(ctx, method)(*arguments))

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match=rf"ctx\.{method} does not take these arguments"):
            await process.stop(workflow)


@pytest.mark.parametrize("method", ["uuid", "random"])
async def test_a_sealed_context_derives_nothing(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, method: str
) -> None:
    """S31, S33: once the workflow is parked (yield mode) or evicted, it raises the signal, like every operation."""

    async def workflow(ctx: Context, _: object) -> None:
        try:
            await ctx.queue.next("wait", names=["go"])
        finally:
            with pytest.raises(SuspendSignal):
                getattr(ctx, method)("x")
            calls.append("sealed")

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.evict()
    assert calls == ["sealed"]


@pytest.mark.parametrize("method", ["uuid", "random"])
async def test_the_context_of_an_iteration_that_is_over_derives_nothing(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, method: str
) -> None:
    """S6: a misuse, as of every operation: the next run could find that iteration forgotten."""

    async def workflow(ctx: Context, _: object) -> None:
        async def body(inner: Context, _: None) -> Break[None]:
            calls.append(inner)
            return Break(None)

        await ctx.loop("loop", body)
        getattr(calls[-1], method)("x")

    async with host(namespace, mode) as process:
        with pytest.raises(MisuseError, match="scope that is over"):
            await process.stop(workflow)


# now.


async def test_the_time_is_that_of_the_first_run(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: recorded, in seconds with whole milliseconds, whatever the clock says later."""

    async def workflow(ctx: Context, _: object) -> float:
        time = await ctx.now("began")
        await ctx.queue.next("wait", names=["go"])
        return time

    async with host(namespace, mode, clock=MovableClock(1_700_000_000_123)) as process:
        await process.stop(workflow)
        for _ in range(2):
            await process.restart()
            process.clock.move(-86400)
            await process.stop(workflow)
        await process.send("go")
        assert await process.finish(workflow) == 1_700_000_000.123


async def test_the_time_is_stored_as_a_step_that_the_reference_engine_reads(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16: a completed step with a double-precision number, which is never read as a big integer there."""

    async def workflow(ctx: Context, _: object) -> float:
        return await ctx.now("began")

    async with host(namespace, mode, clock=MovableClock(1_700_000_000_000)) as process:
        time = await process.finish(workflow)
        assert (type(time), time) == (float, 1_700_000_000.0)
        entry = (await namespace.entries())["began",]
    assert encode_value(entry.data["output"])[0] == 0xFB
    assert (entry.kind, entry.data) == ("step", {"output": 1_700_000_000.0, "error": None})
    at_ms = 1_700_000_000_000
    assert entry.metadata == EntryMetadata(EntryStatus.COMPLETED, None, 1, at_ms, at_ms, at_ms)


async def test_the_time_is_durable_before_the_next_step_function_runs(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18: the process dies in the step that was told the time; the step is told the same again."""
    told: list[float] = []

    def deployed(*, die: bool) -> Function:
        async def tell(time: float) -> None:
            assert (await namespace.entries())["began",].data["output"] == time
            told.append(time)
            if die:
                namespace.kill()

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.step("before", effect)
            await ctx.step("tell", tell, await ctx.now("began"))

        return workflow

    with pytest.raises(SimulatedCrashError):
        async with host(namespace, mode) as process:
            await process.stop(deployed(die=True))
    async with host(namespace, mode, clock=MovableClock(1_800_000_000_000)) as process:
        await process.finish(deployed(die=False))
    assert len(told) == 2
    assert told[0] == told[1]


async def test_the_time_costs_no_commit_of_its_own(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S23: it goes with the park."""

    async def workflow(ctx: Context, _: object) -> None:
        for number in range(10):
            await ctx.now(f"time {number}")
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        assert (await process.stop(workflow)).state is WorkflowState.SLEEPING
        assert (await namespace.driver()).writes == (1 if mode == "yield" else 2)
        assert len(await namespace.entries()) == 10


async def test_a_time_has_a_name_like_any_operation(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: used twice, it is an error at once."""

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.now("x")
        await ctx.step("x", effect)

    async with host(namespace, mode) as process:
        with pytest.raises(DuplicateNameError, match="earlier now"):
            await process.stop(workflow)
        await process.restart()
        assert await namespace.entries() == {}


@pytest.mark.parametrize("recorded", ["text", "none", "failed", "sleep"])
async def test_a_time_where_history_holds_something_else_is_divergence(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, recorded: str
) -> None:
    """S4: a step that recorded no time, a step that failed, another kind; the old code goes on."""

    async def old(ctx: Context, _: object) -> str:
        async def fail() -> None:
            raise KeyError("x")

        match recorded:
            case "text":
                await ctx.step("x", effect, "text")
            case "none":
                await ctx.step("x", effect, None)
            case "failed":
                with pytest.raises(StepExhaustedError):
                    await ctx.step("x", fail, max_retries=0)
            case _:
                await ctx.sleep_until("x", 0)
        await ctx.queue.next("wait", names=["go"])
        return "done"

    async def new(ctx: Context, _: object) -> None:
        await ctx.now("x")

    async def newer(ctx: Context, _: object) -> None:
        await ctx.now("y")

    async with host(namespace, mode) as process:
        await process.stop(old)
        before = await namespace.dump()
        for code in (new, newer):
            await process.restart()
            with pytest.raises(HistoryDivergedError) as caught:
                await process.stop(code)
            assert caught.value.found == ("a sleep" if recorded == "sleep" else "a step")
            await process.restart()
            assert await namespace.dump() == before
        await process.send("go")
        assert await process.finish(old) == "done"


async def test_a_crash_at_any_write_changes_nothing_that_was_acted_on(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S39: what steps were given, before a crash and after it, and what the workflow ends with, agree."""
    lives = 0

    async def workflow(ctx: Context, _: object) -> dict[str, list[Any]]:
        async def body(inner: Context, seen: list[Any]) -> Continue[list[Any]] | Break[list[Any]]:
            made = [await inner.now("time"), str(inner.uuid("id")), inner.random("chance").random()]
            assert await inner.step("act", effect, made) == made
            await inner.sleep("pause", 1)
            seen = [*seen, made]
            return Continue(seen) if len(seen) < 2 else Break(seen)

        first = [await ctx.now("time"), str(ctx.uuid("id")), ctx.random("chance").random()]
        assert await ctx.step("act", effect, first) == first
        return {"root": first, "loop": await ctx.loop("loop", body, [])}

    async def scenario(namespace: Namespace) -> Any:
        nonlocal lives
        lives += 1
        clock = MovableClock(1_700_000_000_000 + lives * 86_400_000)
        async with host(namespace, mode, clock=clock) as process:
            return await process.finish(workflow)

    async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
        ended_with = [outcome["root"], *outcome["loop"]]
        assert [made for made in calls if made in ended_with] == list(calls), f"{crash}: a step acted on something else"
        assert len({repr(made) for made in calls}) == 3
        calls.clear()

    explored = await crashes(scenario, make_quick_namespace, check)
    assert explored.counted >= 6


async def test_the_time_is_durable_before_a_step_of_any_branch_runs(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S30: also while another branch's step waits for just that commit, on a storage that takes its time."""
    driver = await namespace.driver()

    async def act(time: float) -> float:
        stored = await namespace.entries()
        assert stored["time",].data["output"] == time
        assert stored["join",].kind == "join"
        return time

    async def workflow(ctx: Context, _: object) -> list[float]:
        await ctx.step("before", effect)
        time = await ctx.now("time")

        async def branch(inner: Context) -> float:
            return await inner.step("act", act, time, max_retries=0)

        return list((await ctx.join("join", {"a": branch, "b": branch, "c": branch})).values())

    slow: Any = SlowDriver(driver)
    result = await run_workflow("w", workflow, None, slow, mode=mode, clock=MovableClock())
    assert len(result.output) == 3
