"""No step of a branch begins before what must precede it is durable, however many branches begin at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any

from harness import Crash, Namespace, crashes, host
from trio.testing import MockClock

from perdure.storage import layout
from perdure.workflow import Context, RunMode, current_step


async def test_branches_that_begin_together_begin_after_their_parent_is_durable(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S39: each function, whichever branch comes first, finds the parent, the state and the seed in the bytes."""
    missing: list[tuple[str, str]] = []

    async def look(branch: str) -> None:
        driver = await namespace.driver()
        stored = dict(await driver.inner.list(b""))
        for what, key in {"state": layout.STATE_KEY, "seed": layout.SEED_KEY, "parent": layout.entry_key((0,))}.items():
            if key not in stored:
                missing.append((branch, what))

    async def workflow(ctx: Context, _: object) -> None:
        def branch(name: str) -> Callable[[Context], Any]:
            async def run(ctx: Context) -> None:
                await ctx.step("look", look, name)

            return run

        await ctx.join("all", {name: branch(name) for name in "abcde"})

    async with host(namespace, mode) as running:
        await running.finish(workflow)
    assert missing == []


async def test_a_branch_killed_at_any_write_keeps_its_idempotency_key(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S39: a service that honours keys sees one per step, though the process dies in the very first write."""
    keys: dict[str, set[str]] = defaultdict(set)
    processes = count(1)

    async def charge(branch: str) -> str:
        keys[branch].add(current_step().idempotency_key)
        return branch

    async def workflow(ctx: Context, _: object) -> list[str]:
        async def left(ctx: Context) -> str:
            return await ctx.step("charge", charge, "left")

        async def right(ctx: Context) -> str:
            return await ctx.step("charge", charge, "right")

        return list((await ctx.join("both", {"left": left, "right": right})).values())

    async def scenario(namespace: Namespace) -> Any:
        async with host(namespace, mode, seed=1000 * next(processes)) as running:  # each draws a seed of its own
            return await running.finish(workflow)

    async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
        assert outcome == ["left", "right"]
        assert {branch: len(found) for branch, found in keys.items()} == {"left": 1, "right": 1}, crash
        keys.clear()

    explored = await crashes(scenario, make_quick_namespace, check)
    assert explored.counted >= 3
