"""Families of workflows at random: trees of calls, shared children, races, failures, messages, with few places, small
mailboxes, evictions, cancellations, recoveries and deaths in between.

1. In the end every workflow has ended, nobody owes anything, and no call is open.
2. No message came twice. (Which ones were sent depends on what was cancelled when.)
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import Supervisor, WorkflowNotFoundError
from perdure.storage import StorageError, layout
from perdure.workflow import (
    Break,
    Context,
    Continue,
    StepError,
    WorkflowCancelledError,
    WorkflowFailedError,
    workflow,
)

Spec = dict[str, Any]


@workflow(name="node")
async def node(ctx: Context, spec: Spec) -> int:
    """Does what its input says; the number of workflows below it that completed, and itself."""
    await ctx.sleep("nap", spec.get("nap", 0))
    total = 1
    if children := spec.get("children"):
        branches: dict[str, Any] = {str(number): partial(call, child) for number, child in enumerate(children)}
        if "race" in spec:
            total += (await ctx.race("race", {**branches, "time": partial(pass_time, spec["race"])})).value
        else:
            total += sum((await ctx.join("join", branches)).values())
    for number in range(spec.get("sends", 0)):
        await ctx.try_block(f"send-{number}", partial(send, number))
    if spec.get("fails"):
        raise ValueError("no good")
    return total


async def call(spec: Spec, ctx: Context) -> int:
    try:
        return await ctx.call(
            "call", node, spec, workflow_id=spec.get("id"), on_parent_end=spec.get("on_parent_end", "cancel")
        )
    except StepError:
        return 0


async def pass_time(seconds: float, ctx: Context) -> int:
    await ctx.sleep("time", seconds)
    return 0


async def send(number: int, ctx: Context) -> None:
    await ctx.send("send", "sink", "item", [ctx.workflow_id, number])


@workflow(name="sink")
async def sink(ctx: Context, _: Any) -> list[Any]:
    async def read(ctx: Context, seen: list[Any]) -> Continue[list[Any]] | Break[list[Any]]:
        message = await ctx.queue.next("next")
        if message.body == "end":
            return Break(seen)
        await ctx.sleep("work", 0.05)
        return Continue([*seen, message.body])

    return await ctx.loop("read", read, [])


def make_spec(random: Random, depth: int) -> Spec:
    spec: Spec = {"nap": random.choice([0, 1, 5]), "sends": random.choice([0, 1, 3]), "fails": random.random() < 0.15}
    if depth and random.random() < 0.8:
        children = [make_spec(random, depth - 1) for _ in range(random.randint(1, 3))]
        for number, child in enumerate(children):
            if random.random() < 0.2:
                children[number] = child = {"nap": 3, "id": f"shared-{random.randint(0, 2)}"}
            child["on_parent_end"] = "cancel" if "id" in child else random.choice(["cancel", "cancel", "leave"])
        spec["children"] = children
        if random.random() < 0.3:
            spec["race"] = random.choice([0.5, 2, 6])
    return spec


async def disturb(supervisor: Supervisor, disk: Disk, random: Random) -> None:
    """Do something to somebody, now and then."""
    for _ in range(random.randint(0, 10)):
        await trio.sleep(2 * random.random())
        disk.store.check()
        workflow_id = random.choice(sorted(disk.rows))
        what = random.choice(["evict", "evict", "wake", "recover", "cancel"])
        try:
            handle = await supervisor.get(workflow_id)
            await getattr(handle, "wake" if (workflow_id, what) == ("sink", "cancel") else what)()
        except WorkflowNotFoundError:  # only its row is there yet
            continue


async def finish(supervisor: Supervisor, count: int) -> list[Any]:
    """Wait for the end of all; what came to the sink."""
    with trio.fail_after(100_000):
        for number in range(count):
            try:
                await (await supervisor.get(f"root-{number}")).result()
            except (WorkflowFailedError, WorkflowCancelledError):
                continue
        await trio.sleep(3000)
        collecting = await supervisor.get("sink")
        await collecting.message("item", "end")
        seen: list[Any] = await collecting.result()
        await trio.sleep(100)
        return seen


@pytest.mark.parametrize("seed", range(12))
async def test_families_come_to_their_end_whatever_happens(
    autojump_clock: MockClock, tmp_path: Path, seed: int
) -> None:
    """S29, S39, S45, S47, S48"""
    random = Random(seed)
    disk = Disk("memory" if seed % 3 else "sqlite", tmp_path)
    specs = [make_spec(random, 3) for _ in range(4)]
    options = {
        "max_live": random.choice([1, 2, 5, 100]),
        "mailbox_limit": random.choice([1, 3, 1000]),
        "idle_timeout": random.choice([0.5, 60.0]),
    }
    seen: list[Any] | None = None
    deaths = random.choice([0, 2, 5])
    while seen is None:
        if deaths:
            store = disk.next_store() if disk.lives else disk.store
            store.die_at = (random.randint(5, 120), random.choice(["before", "after"]))
            deaths -= 1
        try:
            async with disk.process(node, sink, **options) as supervisor:
                await supervisor.spawn(sink, "sink", None)
                for number, spec in enumerate(specs):
                    await supervisor.spawn(node, f"root-{number}", spec)
                await disturb(supervisor, disk, random)
                seen = await finish(supervisor, len(specs))
        except* (StorageError, trio.TooSlowError):  # nobody who waits is told that the process is dead
            assert disk.store.is_dead
            seen = None
    keys = [tuple(body) for body in seen]
    assert len(keys) == len(set(keys)), "a message came twice"
    assert {row.state for row in disk.rows.values()} <= {"completed", "failed", "cancelled"}
    for workflow_id, namespace in disk.namespaces.items():
        left = [key for key in namespace if key == layout.DUTIES_KEY or key.startswith(layout.CALLS_PREFIX)]
        assert left == [], workflow_id
