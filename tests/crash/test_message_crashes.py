"""A process that dies at any write between sending a message and finishing its handling, sender and workflow alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import Crash, Host, Namespace, crashes, host
from trio.testing import MockClock

from perdure.storage import decode_value, layout
from perdure.storage.schema import decode_message
from perdure.workflow import Break, Context, Continue, RunMode

COUNT = 3


@dataclass
class World:
    """What outlives the process: what was acknowledged to the sender, and which effects handling had."""

    acknowledged: list[str] = field(default_factory=list)
    attempted: list[str] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)


@dataclass
class Shop:
    """A workflow that takes `COUNT` messages and handles each in a step, and the sender that sends them."""

    mode: RunMode
    is_first_sent_early: bool = False
    worlds: dict[Namespace, World] = field(default_factory=dict)

    def world(self, namespace: Namespace) -> World:
        return self.worlds.setdefault(namespace, World())

    def order(self, world: World) -> Any:
        async def handle(body: str) -> str:
            world.effects.append(body)
            return f"handled {body}"

        async def workflow(ctx: Context, _: Any) -> list[Any]:
            handled: list[Any] = []
            for number in range(COUNT):
                message = await ctx.queue.next(f"read-{number}", names=["go"], timeout=3600)
                handled.append(await ctx.step(f"handle-{number}", handle, message.body))
            rest = await ctx.queue.next_batch("rest", count=100, timeout=1)
            return [handled, [message.body for message in rest]]

        return workflow

    async def send_all(self, namespace: Namespace) -> Any:
        """Sends every message with its id, again after a crash, since the sender does not know what arrived."""
        world = self.world(namespace)
        await check_consistent(namespace, world)
        order = self.order(world)
        async with host(namespace, self.mode) as process:
            if self.is_first_sent_early:
                await self.send(process, world, "m-0")
            await process.stop(order)
            for number in range(COUNT):
                await self.send(process, world, f"m-{number}")
                await process.stop(order)
            return await process.finish(order)

    async def send(self, process: Host, world: World, id: str) -> None:
        world.attempted.append(id)
        await process.send("go", id, id=id)
        world.acknowledged.append(id)
        await check_consistent(process.namespace, world)


async def check_consistent(namespace: Namespace, world: World) -> None:
    """At any time: each acknowledged message is in the mailbox or in history, and none is in both, or twice."""
    recorded, waiting = await recorded_and_waiting(namespace)
    assert max([*recorded.values(), *waiting.values()], default=1) == 1, "no message is there twice"
    assert not recorded.keys() & waiting.keys(), "what is recorded is not left in the mailbox"
    assert recorded.keys() | waiting.keys() >= set(world.acknowledged), "what was acknowledged is there"
    assert recorded.keys() | waiting.keys() <= set(world.attempted)


async def recorded_and_waiting(namespace: Namespace) -> tuple[Counter[str], Counter[str]]:
    """How often each body is in history, and in the mailbox."""
    entries = (await namespace.snapshot()).entries
    recorded = Counter(
        entry.data["body"]["body"]
        for entry in entries
        if entry.kind == "message" and isinstance(entry.data["body"], dict)
    )
    pairs = await (await namespace.driver()).list(layout.MAILBOX_PREFIX)
    waiting = Counter(decode_value(decode_message(value).body) for _, value in pairs)
    return recorded, waiting


@pytest.mark.parametrize("is_first_sent_early", [False, True])
async def test_a_message_with_an_id_is_neither_lost_nor_handled_twice(
    is_first_sent_early: bool, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S27: a crash at any write between sending and finishing the handling; sent again by its id after every crash."""
    shop = Shop(mode, is_first_sent_early)

    async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
        world = shop.world(namespace)
        assert outcome == [[f"handled m-{number}" for number in range(COUNT)], []], crash
        await check_consistent(namespace, world)
        recorded, waiting = await recorded_and_waiting(namespace)
        assert (len(recorded), len(waiting)) == (COUNT, 0), crash
        effects = Counter(world.effects)
        assert effects.keys() == set(world.acknowledged), crash
        assert max(effects.values()) <= (1 if crash is None else 2), crash
        assert sum(effects.values()) <= COUNT + (crash is not None), "one crash repeats one effect at most"

    explored = await crashes(shop.send_all, make_quick_namespace, check)
    assert explored.counted > 3 * COUNT


async def test_a_message_without_an_id_is_there_once_if_it_was_acknowledged(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S27: what was acknowledged is handled exactly once and in order; what was not, at most once for each sending."""
    worlds: dict[Namespace, World] = {}

    async def handle(body: str) -> None:
        return None

    async def body(ctx: Context, seen: list[str]) -> Continue[list[str]] | Break[list[str]]:
        message = await ctx.queue.next("read", timeout=3600)
        if message.name == "end":
            return Break(seen)
        await ctx.step("handle", handle, message.body)
        return Continue([*seen, message.body])

    async def order(ctx: Context, _: Any) -> list[str]:
        return await ctx.loop("loop", body, list[str](), history_prune_interval=2, history_size=1)

    async def scenario(namespace: Namespace) -> Any:
        world = worlds.setdefault(namespace, World())
        async with host(namespace, mode) as process:
            await process.stop(order)
            while len(world.acknowledged) < COUNT:
                token = f"{len(world.acknowledged)}, sending {len(world.attempted)}"
                world.attempted.append(token)
                await process.send("go", token)
                world.acknowledged.append(token)
                await process.stop(order)
            await process.send("end", id="end")
            return await process.finish(order)

    async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
        world = worlds[namespace]
        assert len(set(outcome)) == len(outcome), f"handled twice: {crash}"
        assert set(world.acknowledged) <= set(outcome) <= set(world.attempted), crash
        assert [token for token in outcome if token in world.acknowledged] == world.acknowledged, crash
        assert outcome == sorted(outcome, key=world.attempted.index), crash
        assert await (await namespace.driver()).list(layout.MAILBOX_PREFIX) == [], crash

    explored = await crashes(scenario, make_quick_namespace, check)
    assert explored.counted > 3 * COUNT


async def test_a_crash_after_an_early_message_leaves_it_for_the_workflow_to_come(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S27: a message that is sent before the workflow exists, and a crash at any write before the workflow ends."""
    acknowledged: dict[Namespace, bool] = {}

    async def order(ctx: Context, _: Any) -> list[Any]:
        return [message.body for message in await ctx.queue.next_batch("read", timeout=60, count=9)]

    async def scenario(namespace: Namespace) -> Any:
        async with host(namespace, mode) as process:
            if not acknowledged.get(namespace):
                await process.send("go", "early", id="m-1")
                acknowledged[namespace] = True
            return await process.finish(order)

    async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
        assert outcome == ["early"], crash

    explored = await crashes(scenario, make_quick_namespace, check)
    assert explored.counted >= 2
