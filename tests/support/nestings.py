"""The table of primitives, and of the containers that they can be in: what tests/crash/test_nestings.py enumerates.

1. A row is a small piece of workflow code around one way to use one primitive. It uses whatever context it is given, and its
   own names in it, so that every row fits into every container. What it returns is data.
2. A container is code that runs a row in a scope of its own, once or in two iterations. Whatever the container adds to that
   (a sibling, a sleep that a race decides) takes longer or shorter by far than any row, so that no outcome is a matter of chance.
3. Containers are primitives too: those are rows as well, with a step inside. So all nestings of two are the product.
4. Every row says which methods it is about. `tests/crash/test_nestings.py` holds that against `Context`: a method without a row
   is red.

Rejected: drawing nestings at random (tests/property/test_branching.py does that, three deep). A table of two leaves nothing out,
and names what broke.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from worlds import World

from perdure.workflow import (
    BlockFailure,
    BlockOk,
    Branch,
    Break,
    Context,
    Continue,
    CriticalError,
    JoinError,
    QueueTimeoutError,
    RaceError,
    StepError,
    StepFailure,
    StepInterruptedError,
    StepOk,
    current_step,
)

__all__ = ["CONTAINERS", "HOSTED_ROWS", "ROWS", "SHORT_S", "Container", "Row", "nested"]

Code: TypeAlias = "Callable[[World, Context], Awaitable[Any]]"

LONG_S: Final = 10_000.0
"""Longer than any row takes."""

SHORT_S: Final = 1_000.0
"""Shorter than that, and longer than any row takes, too."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to use a primitive.

    Attributes:
        code: Does it once.
        methods: What of `Context` it is about.
        kinds: The kinds of the entries that it leaves in history.
        mail: The names of the messages that it takes, in order.
        at_most_once: Names of its steps that begin once at most, and whose outcome may be unknown.
    """

    code: Code
    methods: Sequence[str]
    kinds: Sequence[str]
    mail: Sequence[str] = ()
    at_most_once: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """Code around a row.

    Attributes:
        code: Given the world, the context and the row's code.
        times: How often it runs the row.
        keeps: Whether what the row recorded is in history in the end.
    """

    code: Callable[[World, Context, Code], Awaitable[Any]]
    times: int = 1
    keeps: bool = True


@dataclass
class _Failing:
    """Fails until an attempt."""

    until: int
    error: Exception = field(default_factory=lambda: ConnectionError("down"))

    def __call__(self, attempt: int) -> Any:
        return f"attempt {attempt}" if attempt >= self.until else self.error


async def _caught(what: Awaitable[Any], *errors: type[Exception]) -> Any:
    try:
        return await what
    except errors as error:
        return [type(error).__name__, str(error)]


# Steps.


async def step(world: World, ctx: Context) -> Any:
    return await world.step(ctx, "step", {"value": 1}, 1)


async def retried(world: World, ctx: Context) -> Any:
    return await world.step(ctx, "retried", _Failing(3), retry_backoff_base=5)


async def exhausted(world: World, ctx: Context) -> Any:
    return await _caught(world.step(ctx, "exhausted", _Failing(9), max_retries=1), StepError)


async def critical(world: World, ctx: Context) -> Any:
    return await _caught(world.step(ctx, "critical", CriticalError("no")), StepError)


async def timed_out(world: World, ctx: Context) -> Any:
    return await _caught(world.step(ctx, "timed out", "late", 50, timeout=5), StepError)


async def timed_out_once(world: World, ctx: Context) -> Any:
    async def effect() -> Any:
        return await world.effect("in time", 50 if current_step().attempt == 1 else 1)()

    return await ctx.step("timed out once", effect, timeout=5, retry_on_timeout=True)


async def ephemeral(world: World, ctx: Context) -> Any:
    noted = await world.step(ctx, "noted", "noted", ephemeral=True)
    return [noted, await world.step(ctx, "kept", "kept")]


async def at_most_once(world: World, ctx: Context) -> Any:
    """Paid or not: which of them is for nobody to see here, so that the end is one."""
    with suppress(StepInterruptedError):
        await world.step(ctx, "once", "paid", at_most_once=True)
    return await world.step(ctx, "after", "after")


async def tried(world: World, ctx: Context) -> Any:
    fine = await ctx.try_step("fine", world.effect("fine"))
    broken = await ctx.try_step("broken", world.effect(CriticalError("no")))
    assert isinstance(fine, StepOk)
    assert isinstance(broken, StepFailure)
    return [fine.value, broken.kind, broken.error.message]


async def undoable(world: World, ctx: Context) -> Any:
    await ctx.rollback_checkpoint("checkpoint")
    first = await world.step(ctx, "first", 1, rollback=world.undo)
    return [first, await world.step(ctx, "second", 2, rollback=world.undo)]


# Waits.


async def sleep(world: World, ctx: Context) -> Any:
    return (await ctx.sleep("sleep", 10)).value


async def sleep_until(world: World, ctx: Context) -> Any:
    past = await ctx.sleep_until("past", 1)
    return [past.value, (await ctx.sleep_until("soon", await ctx.now("now") + 10)).value]


async def message(world: World, ctx: Context) -> Any:
    return (await ctx.queue.next("read", names=["mail"])).body


async def message_in_time(world: World, ctx: Context) -> Any:
    return (await ctx.queue.next("read", names=["mail"], timeout=SHORT_S * LONG_S)).body


async def no_message(world: World, ctx: Context) -> Any:
    return await _caught(ctx.queue.next("read", names=["never"], timeout=10), QueueTimeoutError)


async def batch(world: World, ctx: Context) -> Any:
    """Both are there before it asks: how many it gets is no matter of chance."""
    await ctx.queue.next("begin", names=["begin"])
    read = await ctx.queue.next_batch("read", names=["mail"], count=2)
    nothing = await ctx.queue.next_batch("nothing", names=["never"], timeout=10)
    return [[message.body for message in read], nothing]


async def completable(world: World, ctx: Context) -> Any:
    message = await ctx.queue.next("read", names=["mail"], completable=True)
    done = await world.step(ctx, "work", "done")
    await message.complete()
    return [message.body, done]


async def completed_in_step(world: World, ctx: Context) -> Any:
    message = await ctx.queue.next("read", names=["mail"], completable=True)

    async def work() -> Any:
        world.begin()
        await message.complete()
        return message.body

    return await ctx.step("work", work)


# Containers, with a step inside.


async def _named_step(world: World, ctx: Context) -> Any:
    return await world.step(ctx, "inner", "inner", 1)


async def loop(world: World, ctx: Context) -> Any:
    async def body(ctx: Context, done: list[Any]) -> Continue[list[Any]] | Break[list[Any]]:
        done = [*done, await _named_step(world, ctx)]
        return Break(done) if len(done) == 2 else Continue(done)

    return await ctx.loop("loop", body, [])


async def join(world: World, ctx: Context) -> Any:
    async def napping(ctx: Context) -> Any:
        return (await ctx.sleep("nap", 5)).value

    step, nap = Branch("step", lambda ctx: _named_step(world, ctx)), Branch("nap", napping)
    return dict(await ctx.join("join", [step, nap]))


async def failing_join(world: World, ctx: Context) -> Any:
    async def failing(ctx: Context) -> Any:
        await world.step(ctx, "failing", CriticalError("no"))

    branches = {"step": lambda ctx: _named_step(world, ctx), "failing": failing}
    try:
        await ctx.join("join", branches)
    except JoinError as error:
        return sorted(error.errors)
    raise AssertionError("a branch fails")


async def race(world: World, ctx: Context) -> Any:
    async def slow(ctx: Context) -> Any:
        return (await ctx.sleep("slow", SHORT_S)).value

    result = await ctx.race("race", {"step": lambda ctx: _named_step(world, ctx), "slow": slow})
    return [result.winner, result.value]


async def failing_race(world: World, ctx: Context) -> Any:
    async def failing(ctx: Context) -> Any:
        await ctx.sleep("nap", 5)
        await world.step(ctx, "failing", CriticalError("no"))

    try:
        await ctx.race("race", {"one": failing, "two": failing})
    except RaceError as error:
        return sorted(error.errors)
    raise AssertionError("all branches fail")


async def block(world: World, ctx: Context) -> Any:
    outcome = await ctx.try_block("block", lambda ctx: _named_step(world, ctx))
    assert isinstance(outcome, BlockOk)
    return outcome.value


async def failing_block(world: World, ctx: Context) -> Any:
    async def failing(ctx: Context) -> Any:
        await _named_step(world, ctx)
        await world.step(ctx, "failing", CriticalError("no"))

    outcome = await ctx.try_block("block", failing)
    assert isinstance(outcome, BlockFailure)
    return [outcome.source, outcome.name]


# What is decided or noted.


async def version(world: World, ctx: Context) -> Any:
    return [await ctx.get_version("version", 3), await world.step(ctx, "step", 1)]


async def removed(world: World, ctx: Context) -> Any:
    await ctx.removed("gone", "step")
    return await world.step(ctx, "step", 1)


async def checkpoint(world: World, ctx: Context) -> Any:
    await ctx.rollback_checkpoint("checkpoint")
    return await world.step(ctx, "step", 1)


async def now(world: World, ctx: Context) -> Any:
    """The time is another in each play, as the recorded end of a play is not: it is recorded once, and nothing else is said."""
    noted = await ctx.now("now")
    await ctx.sleep("sleep", 10)
    return noted > 0


async def derived(world: World, ctx: Context) -> Any:
    """What is drawn is another in each play; within one it is what the first run drew that came past a step."""
    drawn = [str(ctx.uuid("uuid")), ctx.random("random").random()]

    async def effect() -> Any:
        return list(world.begin())

    place = await ctx.step("step", effect)
    return world.facts.setdefault(f"drawn at {place}", drawn) == drawn


async def attributes(world: World, ctx: Context) -> Any:
    before = await ctx.attributes("before")
    after = await ctx.set_attributes("change", {"place": "here", "count": 1})
    last = await ctx.set_attributes("change again", {"count": 2}, remove=["place"])
    return [before.get("place"), after["place"], last["count"], await world.step(ctx, "step", 1)]


ROWS: Final[dict[str, Row]] = {
    "step": Row(step, ["step"], ["step"]),
    "step that is retried": Row(retried, ["step"], ["step"]),
    "step that is exhausted": Row(exhausted, ["step"], ["step"]),
    "critical step": Row(critical, ["step"], ["step"]),
    "step that times out": Row(timed_out, ["step"], ["step"]),
    "step that times out and is retried": Row(timed_out_once, ["step"], ["step"]),
    "ephemeral step": Row(ephemeral, ["step"], ["step"]),
    "at-most-once step": Row(at_most_once, ["step"], ["step"], at_most_once=["once"]),
    "try_step": Row(tried, ["try_step"], ["step"]),
    "steps with handlers": Row(undoable, ["rollback_checkpoint", "step"], ["rollback_checkpoint", "step"]),
    "sleep": Row(sleep, ["sleep"], ["sleep"]),
    "sleep_until": Row(sleep_until, ["sleep_until", "now"], ["sleep", "step"]),
    "message": Row(message, ["queue.next"], ["message"], mail=["mail"]),
    "message in time": Row(message_in_time, ["queue.next"], ["message", "sleep"], mail=["mail"]),
    "no message in time": Row(no_message, ["queue.next"], ["sleep"]),
    "batch of messages": Row(batch, ["queue.next_batch"], ["message", "sleep"], mail=["mail", "mail", "begin"]),
    "completable message": Row(completable, ["queue.next"], ["message", "step"], mail=["mail"]),
    "message completed in a step": Row(completed_in_step, ["queue.next"], ["message", "step"], mail=["mail"]),
    "loop": Row(loop, ["loop"], ["loop", "step"]),
    "join": Row(join, ["join"], ["join", "step", "sleep"]),
    "join that fails": Row(failing_join, ["join"], ["join", "step"]),
    "race": Row(race, ["race"], ["race", "step"]),
    "race that fails": Row(failing_race, ["race"], ["race", "step", "sleep"]),
    "try_block": Row(block, ["try_block"], ["step"]),
    "try_block that fails": Row(failing_block, ["try_block"], ["step"]),
    "get_version": Row(version, ["get_version"], ["version_check", "step"]),
    "removed": Row(removed, ["removed"], ["removed", "step"]),
    "rollback_checkpoint": Row(checkpoint, ["rollback_checkpoint"], ["rollback_checkpoint", "step"]),
    "now": Row(now, ["now"], ["step", "sleep"]),
    "uuid and random": Row(derived, ["uuid", "random"], ["step"]),
    "attributes": Row(attributes, ["attributes", "set_attributes"], ["step"]),
}


# What needs a supervisor. The workflow `child` is registered beside.


async def sent(world: World, ctx: Context) -> Any:
    await ctx.send("send", ctx.workflow_id, "note", "to itself")
    return (await ctx.queue.next("read", names=["note"])).body


async def called(world: World, ctx: Context) -> Any:
    return await ctx.call("call", "child", "input")


async def call_that_fails(world: World, ctx: Context) -> Any:
    """Its id is another in each play, and is not told."""
    outcome = await _caught(ctx.call("call", "child", "fail"), StepError)
    return outcome[0]


async def replied(world: World, ctx: Context) -> Any:
    request = await ctx.queue.next("read", names=["question"], completable=True)
    await request.complete(["answer to", request.body])
    return await world.step(ctx, "step", request.body)


HOSTED_ROWS: Final[dict[str, Row]] = {
    "send": Row(sent, ["send"], ["step", "message"]),
    "call": Row(called, ["call"], ["step"]),
    "call that fails": Row(call_that_fails, ["call"], ["step"]),
    "request": Row(replied, ["queue.next"], ["message", "step"], mail=["question"]),
}


# Containers.


async def nothing_around(world: World, ctx: Context, row: Code) -> Any:
    return await row(world, ctx)


async def in_join(world: World, ctx: Context, row: Code) -> Any:
    async def beside(ctx: Context) -> Any:
        first = await world.step(ctx, "first beside", "beside", 1)
        await ctx.sleep("nap", SHORT_S)
        return [first, await world.step(ctx, "beside", "beside")]

    return dict(await ctx.join("around", {"row": lambda ctx: row(world, ctx), "beside": beside}))


async def in_winner(world: World, ctx: Context, row: Code) -> Any:
    async def beside(ctx: Context) -> Any:
        return (await ctx.sleep("long", LONG_S)).value

    result = await ctx.race("around", {"row": lambda ctx: row(world, ctx), "beside": beside})
    return [result.winner, result.value]


async def in_loser(world: World, ctx: Context, row: Code) -> Any:
    """What the loser recorded is gone in the end; but what it did, it did once."""

    async def losing(ctx: Context) -> Any:
        await row(world, ctx)
        await ctx.sleep("for ever", LONG_S * LONG_S)

    async def beside(ctx: Context) -> Any:
        return (await ctx.sleep("long", LONG_S)).value

    result = await ctx.race("around", {"row": losing, "beside": beside})
    return [result.winner, result.value]


async def in_loop(world: World, ctx: Context, row: Code) -> Any:
    return await _looped(world, ctx, row, prune=20, keep=20)


async def in_pruned_loop(world: World, ctx: Context, row: Code) -> Any:
    return await _looped(world, ctx, row, prune=1, keep=0)


async def _looped(world: World, ctx: Context, row: Code, *, prune: int, keep: int) -> Any:
    async def body(ctx: Context, done: list[Any]) -> Continue[list[Any]] | Break[list[Any]]:
        done = [*done, await row(world, ctx)]
        return Break(done) if len(done) == 2 else Continue(done)

    return await ctx.loop("around", body, [], history_prune_interval=prune, history_size=keep)


async def in_block(world: World, ctx: Context, row: Code) -> Any:
    outcome = await ctx.try_block("around", lambda ctx: row(world, ctx))
    assert isinstance(outcome, BlockOk)
    return outcome.value


async def in_failed_block(world: World, ctx: Context, row: Code) -> Any:
    async def failing(ctx: Context) -> Any:
        await row(world, ctx)
        await ctx.step("fail", world.effect(CriticalError("no")))

    outcome = await ctx.try_block("around", failing)
    assert isinstance(outcome, BlockFailure)
    return [outcome.source, outcome.name]


async def in_kept_scope(world: World, ctx: Context, row: Code) -> Any:
    """Below a checkpoint, and nothing is rolled back."""
    await ctx.rollback_checkpoint("around")
    return [await row(world, ctx), await world.step(ctx, "end", "end", rollback=world.undo)]


async def in_undone_scope(world: World, ctx: Context, row: Code) -> Any:
    """Below a checkpoint; then the workflow fails, and what has a handler is undone."""
    await ctx.rollback_checkpoint("around")
    await world.step(ctx, "booked", "booked", rollback=world.undo)
    await row(world, ctx)
    raise ValueError("failed")


CONTAINERS: Final[dict[str, Container]] = {
    "nothing": Container(nothing_around),
    "branch of a join": Container(in_join),
    "winner of a race": Container(in_winner),
    "loser of a race": Container(in_loser, keeps=False),
    "loop": Container(in_loop, times=2),
    "loop that forgets": Container(in_pruned_loop, times=2, keeps=False),
    "try block": Container(in_block),
    "try block that fails": Container(in_failed_block),
    "rollback scope": Container(in_kept_scope),
    "rollback scope that is undone": Container(in_undone_scope),
}


def nested(container: Container, row: Row) -> Code:
    """The workflow of a nesting."""

    async def workflow(world: World, ctx: Context) -> Any:
        return await container.code(world, ctx, row.code)

    return workflow
