"""Workflows that use everything, and what a supervisor has stored of them at the moments at which the most is open.

1. Between them the namespaces of `recorded()` hold a key of every kind that the layout names (`tests/property/` asserts it), so
   what is done to each of their values is done to every kind of value.
2. `Guest` is one namespace, its neighbour beside it, and the owner's own namespace with a schedule and a limit's starts; each
   test works on copies.
3. All of it is the work of a real supervisor in virtual time; nothing is made by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import trio
from harness import MovableClock

from perdure.actors import Supervisor, WorkflowLimit, open_supervisor
from perdure.storage import CatalogRow, MemoryDriver, MemoryStore
from perdure.workflow import Break, Context, Continue, RollbackContext, load_snapshot, replay_from_step, workflow

__all__ = ["BYSTANDER", "GUEST", "MOMENTS", "NEIGHBOUR", "WORKFLOWS", "Guest", "hosted", "recorded"]

Moment = Literal[
    "waits", "races", "fails", "rolls back", "is rolled back", "ends", "is recovered", "is replayed", "is cancelled"
]
MOMENTS: Final[tuple[Moment, ...]] = (
    "waits",
    "races",
    "fails",
    "rolls back",
    "is rolled back",
    "ends",
    "is recovered",
    "is replayed",
    "is cancelled",
)
"""When the guest was left: in its first read; in a race between a message and a child's end; and so on."""

GUEST: Final = "guest"
NEIGHBOUR: Final = "neighbour"
"""Gets a message from the guest."""
BYSTANDER: Final = "bystander"
"""Has nothing to do with it."""


async def _give(value: Any) -> Any:
    return value


async def _fail() -> None:
    raise ValueError("it does not work")


async def _undo(context: RollbackContext, output: Any) -> None:
    """Works."""


async def _undo_badly(context: RollbackContext, output: Any) -> None:
    raise ValueError("it cannot be undone")


@workflow(name="child")
async def child(ctx: Context, input: Any) -> Any:
    return await ctx.step("work", _give, input)


@workflow(name="slow child")
async def slow_child(ctx: Context, input: Any) -> int:
    await ctx.sleep("long", 10**6)
    return 1


@workflow(name="neighbour")
async def neighbour(ctx: Context, input: Any) -> str:
    await ctx.queue.next("end", names=["end"])
    return "well"


async def _iterate(ctx: Context, state: Any) -> Any:
    await ctx.step("item", _give, state)
    return Break("broken") if state == 3 else Continue(state + 1 if isinstance(state, int) and state < 3 else 3)


async def _two_steps(ctx: Context) -> Any:
    await ctx.step("first", _give, 1)
    return await ctx.step("second", _give, "second")


async def _nap(ctx: Context) -> int:
    await ctx.sleep("nap", 10**5)
    return 1


async def _fails(ctx: Context) -> None:
    await ctx.step("fails", _fail, max_retries=0)


async def _wanted(ctx: Context) -> Any:
    return (await ctx.queue.next("word", names=["word"])).body


async def _called(ctx: Context) -> Any:
    return await ctx.call("slow", slow_child, None)


async def _tried(ctx: Context) -> Any:
    result = await ctx.join("tried", {"works": _two_steps, "fails": _fails})
    return result


async def _spin(ctx: Context, state: Any) -> Any:
    """Two iterations that can be undone, and a third that waits."""
    await ctx.step("undoable", _give, state, rollback=_undo)
    if state in (0, 1):
        return Continue(state + 1)
    return Break((await ctx.race("last", {"word": _wanted, "call": _called})).value)


@workflow(name="guest")
async def guest(ctx: Context, input: Any) -> str:
    """Nothing in it depends on what its steps return, as far as that can be."""
    await ctx.set_attributes("attributes", {"color": "red", "size": 3})
    await ctx.step("one", _give, [1, {"x": 2.5}])
    await ctx.sleep("nap", 0.01)
    await ctx.try_step("bad", _fail, max_retries=1, retry_backoff_base=0.001)
    await ctx.rollback_checkpoint("from here")
    await ctx.loop("loop", _iterate, 0)
    await ctx.join("join", {"x": _two_steps, "y": _two_steps})
    await ctx.try_block("block", _tried, catch=["join"])
    await ctx.race("race", {"x": _two_steps, "y": _nap})
    await ctx.get_version("version", 2)
    await ctx.removed("old", "step")
    await ctx.now("now")
    await ctx.call("call", child, 5)
    await ctx.send("send", NEIGHBOUR, "note", {"a": 1})
    await ctx.queue.next("first", names=["go"])
    request = await ctx.queue.next("request", names=["ask"], completable=True)
    await request.complete({"answer": 42})
    await ctx.queue.next_batch("both", names=["pair"], count=2, completable=True)
    await ctx.queue.next_batch("late", names=["never"], timeout=0.01)
    word = await ctx.loop("spin", _spin, 0)
    if word == "fail":
        await ctx.step("flop", _fail, max_retries=0)
    elif word == "roll back":
        await ctx.step("stubborn", _give, 1, rollback=_undo_badly, max_retries=2, retry_backoff_base=100.0)
        await ctx.step("flop", _fail, max_retries=0)
    return "end"


@workflow(name="joiner")
async def joiner(ctx: Context, input: Any) -> Any:
    return await ctx.call("guest", guest, {"in": 1}, workflow_id=GUEST)


WORKFLOWS: Final = (child, slow_child, neighbour, guest, joiner)


@dataclass(frozen=True, slots=True)
class Guest:
    """What is stored when the process dies.

    Attributes:
        namespaces: All pairs of each workflow, by id.
        rows: The catalog.
        own: All pairs of the supervisor's own namespace.
        now_ms: The time then.
    """

    namespaces: dict[str, dict[bytes, bytes]]
    rows: dict[str, CatalogRow]
    own: dict[bytes, bytes]
    now_ms: int

    def changed(self, workflow_id: str, key: bytes, value: bytes | None) -> MemoryStore:
        """A store that holds all this, but another value (or none) under a key of one workflow; "" is the supervisor itself."""
        store = MemoryStore()
        disk = store._disk
        disk.namespaces = {name: dict(stored) for name, stored in self.namespaces.items()}
        disk.rows = dict(self.rows)
        disk.own = dict(self.own)
        pairs = disk.namespaces[workflow_id] if workflow_id else disk.own
        if value is None:
            del pairs[key]
        else:
            pairs[key] = value
        return store


def hosted(store: MemoryStore, clock: MovableClock) -> Any:
    """A supervisor over a store; use it with `async with`."""
    limits: Any = {child: WorkflowLimit(concurrency=50, rate=100, per=3600.0)}
    return open_supervisor(store, WORKFLOWS, clock=clock, grace=0, limits=limits)


async def recorded(moment: Moment) -> Guest:
    """Let the guest come to a moment, and its process die there."""
    store, clock = MemoryStore(), MovableClock()
    async with hosted(store, clock) as supervisor:
        await supervisor.schedule("nightly", child, "scheduled", every=3600.0)
        await supervisor.schedule("weekly", child, None, cron="0 3 * * 1", overlap="queue")
        await supervisor.spawn(neighbour, NEIGHBOUR, None)
        handle = await supervisor.spawn(guest, GUEST, {"in": 1}, attributes={"size": 2, "who": "me"}, deadline=10.0**7)
        await supervisor.spawn(joiner, "joiner", None)
        await supervisor.spawn(neighbour, BYSTANDER, None)
        await trio.sleep(4000)
        if moment != "waits":
            await _advance(supervisor, handle)
        match moment:
            case "fails" | "is recovered" | "is replayed":
                await handle.message("word", "fail")
            case "rolls back" | "is rolled back":
                await handle.message("word", "roll back")
            case "ends":
                await handle.message("word", "end")
            case "is cancelled":
                await handle.cancel()
            case _:
                pass
        await trio.sleep(5 if moment != "is rolled back" else 1000)
        if moment == "is recovered":
            await handle.recover()
            await trio.sleep(0.001)
        if moment in ("waits", "races", "rolls back"):
            await handle.message("other", "waits in the mailbox", id="m-other")
        now_ms = clock.now_ms()
        found = store.restart()
    disk = found._disk
    if moment == "is replayed":
        driver = MemoryDriver(disk.namespaces[GUEST])
        (undoable,) = (
            entry for entry in (await load_snapshot(driver)).entries if entry.path == ("spin", 0, "undoable")
        )
        await replay_from_step(driver, undoable.id, clock=clock)
    return Guest(disk.namespaces, disk.rows, disk.own, now_ms)


async def _advance(supervisor: Supervisor, handle: Any) -> None:
    """Through its reads, up to its last race."""
    await handle.message("go", {"b": 1}, id="m-go")
    assert await handle.request("ask", "what", id="m-ask", timeout=100.0) == {"answer": 42}
    await handle.message("pair", 1)
    await handle.message("pair", 2)
    await trio.sleep(5)
