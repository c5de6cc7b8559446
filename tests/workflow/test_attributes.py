"""`ctx.set_attributes` and `ctx.attributes`: state that is changed once, and a history that never sets it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import Crash, Namespace, crashes, host
from trio.testing import MockClock

from perdure.storage import decode_value, layout
from perdure.storage.attributes import decode_attributes
from perdure.workflow import (
    Break,
    Context,
    Continue,
    HistoryDivergedError,
    InvalidArgumentError,
    RunMode,
    run_workflow,
)

told: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    told.clear()


async def effect(value: Any) -> Any:
    told.append(value)
    return value


async def stored(namespace: Namespace) -> dict[str, Any]:
    """What is durable of the attributes."""
    found = (await namespace.dump()).get(layout.ATTRIBUTES_KEY)
    return {} if found is None else decode_attributes(found)


async def upgrade(ctx: Context, input: Any) -> list[Any]:
    """Sets attributes, waits, changes them, waits, and tells what it was told."""
    first = await ctx.set_attributes("new", {"tier": "silver", "customer": 7})
    await ctx.sleep("a while", 10)
    second = await ctx.set_attributes("upgraded", {"tier": "gold"}, remove=["customer", "unknown"])
    await ctx.sleep("longer", 10)
    read = await ctx.attributes("now")
    return [first, second, read]


TOLD = [{"tier": "silver", "customer": 7}, {"tier": "gold"}, {"tier": "gold"}]


async def test_a_replay_does_not_set_back_what_came_later(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: what the code is told is the same on every run, and what is stored is what was set last."""
    async with host(namespace, mode) as process:
        await process.stop(upgrade)
        assert await stored(namespace) == TOLD[0]
        await process.restart()
        await process.stop(upgrade)
        await process.advance(11)
        await process.stop(upgrade)
        assert await stored(namespace) == TOLD[1]
        await process.restart()
        await process.stop(upgrade)
        assert await stored(namespace) == TOLD[1], "the first change is replayed, not made again"
        assert await process.finish(upgrade) == TOLD
        await process.restart()
        assert await process.finish(upgrade) == TOLD


async def test_a_death_at_any_write_leaves_the_change_and_its_record_together(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S39: before, after, and again during recovery."""

    async def scenario(namespace: Namespace) -> Any:
        async with host(namespace, mode) as process:
            return await process.finish(upgrade)

    async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
        assert outcome == TOLD
        assert await stored(namespace) == {"tier": "gold"}

    exploration = await crashes(scenario, make_namespace, check, is_twice=True)
    assert exploration.counted >= 3


async def test_durable_before_the_next_step_runs(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    async def look() -> None:
        told.append(await stored(namespace))

    async def workflow(ctx: Context, input: None) -> None:
        await ctx.set_attributes("new", {"state": "paying"})
        await ctx.step("pay", look)

    async with host(namespace, mode) as process:
        await process.finish(workflow)
    assert told == [{"state": "paying"}]


async def test_it_costs_no_commit_of_its_own(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    async def plain(ctx: Context, changes: int) -> None:
        for number in range(changes):
            await ctx.set_attributes(f"set-{number}", {"number": number})

    counts: list[int] = []
    for changes in (0, 20):
        driver = await namespace.restart()
        await run_workflow(f"w-{changes}", plain, changes, driver, mode=mode)
        counts.append(driver.writes)
        await driver.delete_prefix(b"")
    assert counts[0] == counts[1]


async def test_what_finished_units_have_set_stays_and_is_told(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S1, S12: a join that is not run again, and iterations that are forgotten."""

    async def workflow(ctx: Context, input: None) -> Any:
        async def left(ctx: Context) -> None:
            await ctx.set_attributes("set", {"left": 1})

        async def right(ctx: Context) -> None:
            await ctx.set_attributes("set", {"right": 2})

        await ctx.join("both", {"left": left, "right": right})

        async def body(ctx: Context, number: int) -> Continue[int] | Break[None]:
            await ctx.set_attributes("round", {"round": number})
            return Continue(number + 1) if number < 30 else Break(None)

        await ctx.loop("rounds", body, 0, history_prune_interval=5)
        await ctx.sleep("nap", 10)
        return await ctx.attributes("at last")

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        assert await process.finish(workflow) == {"left": 1, "right": 2, "round": 30}


async def test_what_a_loser_has_set_stays_set_and_is_not_set_again(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29: its history is forgotten, the state that it changed is not."""

    async def workflow(ctx: Context, input: None) -> Any:
        async def loser(ctx: Context) -> None:
            await ctx.set_attributes("set", {"by": "loser"})
            await ctx.sleep("long", 1000)

        async def winner(ctx: Context) -> None:
            await ctx.sleep("short", 10)

        await ctx.race("both", {"loser": loser, "winner": winner})
        await ctx.sleep("nap", 10)
        return await ctx.attributes("at last")

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == {"by": "loser"}


async def test_all_removed_leaves_nothing(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    async def workflow(ctx: Context, input: None) -> Any:
        await ctx.set_attributes("set", {"a": 1, "b": None})
        return await ctx.set_attributes("remove", {}, remove=["a", "b"])

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == {}
    assert layout.ATTRIBUTES_KEY not in await namespace.dump()


async def test_a_change_is_of_the_caller_and_not_of_history(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8: mutating what was returned changes no history."""

    async def workflow(ctx: Context, input: None) -> Any:
        first = await ctx.set_attributes("set", {"a": 1})
        first["a"] = 2
        return await ctx.attributes("read")

    async with host(namespace, mode) as process:
        assert await process.finish(workflow) == {"a": 1}
        entries = await namespace.entries()
        assert entries[("set",)].data["output"] == {"attributes": {"a": 1}}


@pytest.mark.parametrize(
    ("attributes", "remove", "says"),
    [
        ([], (), "mapping"),
        ({"a": []}, (), "text, a number"),
        ({"": 1}, (), "non-empty"),
        ({"a": "x" * 2000}, (), "1024|1,024"),
        ({f"a{number}": 1 for number in range(65)}, (), "64"),
        ({}, "a", "remove="),
        ({}, [1], "remove="),
    ],
)
async def test_what_cannot_be_kept_is_refused_and_nothing_is_written(
    namespace: Namespace, mode: RunMode, attributes: Any, remove: Any, says: str, autojump_clock: MockClock
) -> None:
    async def workflow(ctx: Context, input: None) -> None:
        await ctx.set_attributes("set", attributes, remove=remove)

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match=says):
            await process.finish(workflow)
    assert ("set",) not in await namespace.entries()


async def test_too_many_together_are_refused(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    async def workflow(ctx: Context, input: None) -> None:
        await ctx.set_attributes("first", {f"a{number}": 1 for number in range(40)})
        await ctx.set_attributes("second", {f"b{number}": 1 for number in range(40)})

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match="64"):
            await process.finish(workflow)


async def test_a_step_of_that_name_is_another_thing(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: another operation at that place is named, and writes nothing."""

    async def before(ctx: Context, input: None) -> None:
        await ctx.step("set", effect, {"a": 1})
        await ctx.sleep("nap", 100)

    async def after(ctx: Context, input: None) -> None:
        await ctx.set_attributes("set", {"a": 1})

    async with host(namespace, mode) as process:
        await process.stop(before)
        await process.restart()
        with pytest.raises(HistoryDivergedError, match="set_attributes"):
            await process.finish(after)
    assert layout.ATTRIBUTES_KEY not in await namespace.dump()
    assert decode_value((await namespace.dump())[layout.INPUT_KEY]) is None
