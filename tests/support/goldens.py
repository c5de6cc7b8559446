"""Workflows whose histories are recorded with every release (tests/replay/record.py), and are replayed by every later one.

1. Between them they use every primitive, wait in every way there is, and end in every way.
2. They never change. A later release records what it has more of with more of them.
3. What they do to the outside is their `effects`; what comes from the outside, by `live_on`, is the same each time: mail by the
   name that is waited for, else time.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import trio
import trio.testing

from perdure.storage import Driver
from perdure.testing import SimulatedClock
from perdure.workflow import (
    BlockFailure,
    BlockOk,
    Break,
    Context,
    Continue,
    CriticalError,
    QueueTimeoutError,
    RollbackContext,
    RunMode,
    StepFailure,
    StepOk,
    Workflow,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowState,
    current_step,
    run_workflow,
    send_message,
    start_workflow,
    workflow,
)

GOLDEN: Final = Path(__file__).resolve().parents[1] / "replay" / "golden"
"""One directory for each release."""

RECORDED_AT_MS: Final = 1_700_000_000_000

MAIL: Final[dict[str, Any]] = {
    "one": {"text": "first", "bytes": b"\x00\xff"},
    "many": [1, 2.5, None],
    "join": "joined",
    "race": "raced",
    "go": 7,
}
"""What is sent when a message of that name is waited for."""

effects: list[str] = []
"""What steps and handlers did, in order."""


async def give(value: Any = None) -> Any:
    effects.append(current_step().name)
    return value


def give_in_thread(value: Any) -> Any:
    effects.append(current_step().name)
    return value


async def flaky() -> int:
    effects.append(f"{current_step().name} {current_step().attempt}")
    if current_step().attempt == 1:
        raise ConnectionError("not yet")
    return current_step().attempt


async def refuse() -> None:
    effects.append(current_step().name)
    raise CriticalError("refused")


async def undo(ctx: RollbackContext, output: Any) -> None:
    effects.append(f"undo {ctx.step_name}")


async def undo_later(ctx: RollbackContext, output: Any) -> None:
    effects.append(f"undo {ctx.step_name} {ctx.attempt}")
    if ctx.attempt == 1:
        raise ConnectionError("not yet")


@workflow(name="golden-everything")
async def everything(ctx: Context, given: dict[str, Any]) -> dict[str, Any]:
    """Every primitive that needs no host, and every wait."""
    seen: dict[str, Any] = {"given": given["text"], "version": await ctx.get_version("version", 3)}
    await ctx.removed("gone", "step")
    seen["derived"] = [str(ctx.uuid("id")), ctx.random("dice").randrange(1000)]
    await ctx.now("now")
    await ctx.set_attributes("attributes", {"customer": "Ada", "urgent": True})
    values = [
        None,
        True,
        -1,
        2**70,
        0.1,
        "\u00fc \U0001f600",
        b"\x00",
        datetime(2030, 1, 2, tzinfo=UTC),
        Decimal("1.10"),
        {"k": [1]},
    ]
    seen["values"] = len(await ctx.step("values", give, values))
    seen["thread"] = await ctx.step("thread", give_in_thread, "from a thread")
    seen["ephemeral"] = await ctx.step("ephemeral", give, 1, ephemeral=True)
    seen["once"] = await ctx.step("once", give, 2, at_most_once=True)
    seen["flaky"] = await ctx.step("flaky", flaky, retry_backoff_base=5.0)
    tried = await ctx.try_step("tried", refuse)
    assert isinstance(tried, StepFailure)
    seen["tried"] = [tried.kind, str(tried.error)]
    fine = await ctx.try_step("fine", give, 3)
    assert isinstance(fine, StepOk)

    async def good(ctx: Context) -> Any:
        return await ctx.step("inside", give, 4)

    async def bad(ctx: Context) -> Any:
        await ctx.step("inside", refuse)

    block = await ctx.try_block("good", good)
    assert isinstance(block, BlockOk)
    failure = await ctx.try_block("bad", bad)
    assert isinstance(failure, BlockFailure)
    seen["block"] = [block.value, failure.name, str(failure.error)]
    seen["nap"] = (await ctx.sleep("nap", 60)).value
    seen["until"] = (await ctx.sleep_until("until", RECORDED_AT_MS / 1000 + 600)).value
    seen["one"] = (await ctx.queue.next("read-one", names=["one", "other"])).body
    batch = await ctx.queue.next_batch("read-many", names=["many"], count=2, timeout=3600, completable=True)
    for message in batch:
        await message.complete()
    seen["many"] = [message.body for message in batch]
    try:
        await ctx.queue.next("read-late", names=["never"], timeout=10)
    except QueueTimeoutError:
        seen["late"] = True

    async def naps(ctx: Context) -> str:
        await ctx.sleep("nap", 30)
        return await ctx.step("after", give, "napped")

    async def reads(ctx: Context) -> Any:
        return (await ctx.queue.next("read", names=["join"])).body

    async def works(ctx: Context) -> Any:
        return await ctx.step("work", give, "worked")

    seen["join"] = dict(await ctx.join("join", {"naps": naps, "reads": reads, "works": works}))

    async def quick(ctx: Context) -> Any:
        return (await ctx.queue.next("read", names=["race"])).body

    async def slow(ctx: Context) -> None:
        await ctx.step("begin", give)
        await ctx.sleep("long", 1e6)

    raced = await ctx.race("race", {"slow": slow, "quick": quick})
    seen["race"] = [raced.winner, raced.value]

    async def turn(ctx: Context, total: int) -> Continue[int] | Break[int]:
        total += await ctx.step("add", give, 1)
        await ctx.sleep("pause", 1)
        return Break(total) if total == 4 else Continue(total)

    seen["loop"] = await ctx.loop("loop", turn, 0, history_prune_interval=2, history_size=1)
    seen["end"] = await ctx.step("end", give, "end")
    return seen


@workflow(name="golden-failing")
async def failing(ctx: Context, _: object) -> None:
    """Fails by a step."""
    await ctx.step("first", give, 1)
    await ctx.sleep("nap", 5)
    await ctx.step("refused", refuse)


@workflow(name="golden-raising")
async def raising(ctx: Context, _: object) -> None:
    """Fails by itself."""
    await ctx.step("first", give, 1)
    raise ValueError("on its own")


@workflow(name="golden-saga")
async def saga(ctx: Context, _: object) -> None:
    """Is rolled back, with a handler that has to be tried again."""
    await ctx.rollback_checkpoint("start")
    await ctx.step("first", give, 1, rollback=undo)
    await ctx.step("second", give, 2, rollback=undo_later, retry_backoff_base=5.0)

    async def branch(ctx: Context) -> None:
        await ctx.step("third", give, 3, rollback=undo)

    await ctx.join("all", {"a": branch, "b": branch})
    await ctx.step("refused", refuse)


@workflow(name="golden-deadline")
async def deadline(ctx: Context, _: object) -> None:
    """Is not done in time."""
    await ctx.rollback_checkpoint("start")
    await ctx.step("first", give, 1, rollback=undo)
    await ctx.sleep("long", 1e6)


@workflow(name="golden-answering")
async def answering(ctx: Context, _: object) -> list[Any]:
    """Answers requests."""
    asked: list[Any] = []
    for number in range(2):
        message = await ctx.queue.next(f"ask-{number}", names=["one"], completable=True)
        await message.complete({"answer": number})
        asked.append(message.body)
        await ctx.sleep(f"pause-{number}", 1)
    return asked


WORKFLOWS: Final[dict[str, Workflow[Any, Any]]] = {
    each.name.removeprefix("golden-"): each for each in (everything, failing, raising, saga, deadline, answering)
}
INPUTS: Final[dict[str, Any]] = {"everything": {"text": "gr\u00fc\u00dfe", "number": 5}}
DEADLINES: Final = {"deadline": 3600.0}

Ending = list[Any]
"""How a workflow ended: its state, and its output, or the name and text of its error."""


async def live_on(
    name: str,
    driver: Driver,
    clock: SimulatedClock,
    *,
    mode: RunMode = "yield",
    on_stop: Callable[[WorkflowState], Awaitable[None]] | None = None,
) -> Ending:
    """Run it to its end, letting mail arrive and time pass; `on_stop` is called wherever it stops, its end included."""
    play = _live if mode == "live" else _step_by_step
    try:
        return ["completed", await play(name, driver, clock, on_stop)]
    except WorkflowFailedError as error:
        if on_stop is not None:
            await on_stop(WorkflowState.FAILED)
        return ["failed", error.name, error.message]
    except WorkflowCancelledError:
        return ["cancelled"]


def _options(name: str, clock: SimulatedClock) -> dict[str, Any]:
    return {"clock": clock, "deadline": DEADLINES.get(name)}


async def _step_by_step(name: str, driver: Driver, clock: SimulatedClock, on_stop: Any) -> Any:
    while True:
        result = await run_workflow(name, WORKFLOWS[name], INPUTS.get(name), driver, **_options(name, clock))
        if on_stop is not None:
            await on_stop(result.state)
        if result.state is WorkflowState.COMPLETED:
            return result.output
        wanted = [each for each in result.waiting_for_messages or () if each in MAIL]
        if wanted:
            await send_message(driver, wanted[0], MAIL[wanted[0]], clock=clock)
            clock.move(1)
        else:
            assert result.sleep_until is not None, "it waits for nothing that comes"
            clock.move(max(0.001, result.sleep_until - clock.now_ms() / 1000))


async def _live(name: str, driver: Driver, clock: SimulatedClock, on_stop: Any) -> Any:
    async with trio.open_nursery() as nursery:
        handle: Any = await start_workflow(
            nursery, name, WORKFLOWS[name], INPUTS.get(name), driver, **_options(name, clock)
        )
        while True:
            await trio.testing.wait_all_tasks_blocked()
            activation = handle._activation
            if activation.history.state.is_terminal:
                break
            assert activation.is_at_rest, "it waits for something of its own"
            wanted = [each for each in MAIL if activation.waiting.wants(each)]
            if wanted:
                await handle.message(wanted[0], MAIL[wanted[0]])
                clock.move(1)
            else:
                clock.move(max(0.001, (activation.waiting.deadline_ms - clock.now_ms()) / 1000))
    return await handle.result()


# What needs a supervisor: the data directory of a release.


@workflow(name="golden-child")
async def child(ctx: Context, value: int) -> int:
    return value + (await ctx.queue.next("read", names=["go"])).body  # type: ignore[no-any-return]


@workflow(name="golden-parent")
async def parent(ctx: Context, child_id: str) -> int:
    await ctx.step("begin", give)
    await ctx.send("tell", "friend", "hello", {"from": ctx.workflow_id})
    return await ctx.call("call", child, 10, workflow_id=child_id)


@workflow(name="golden-friend")
async def friend(ctx: Context, count: int) -> list[str]:
    return [(await ctx.queue.next(f"read-{number}", names=["hello"])).body["from"] for number in range(count)]


@workflow(name="golden-short")
async def short(ctx: Context, value: int) -> int:
    return await ctx.step("only", give, value)


HOSTED: Final = (parent, child, friend, short, failing, saga)


def index_of(release: Path) -> dict[str, Any]:
    """What is beside the histories of a release: how each workflow ended, and what it did up to each stop."""
    found: dict[str, Any] = json.loads((release / "index.json").read_text(encoding="utf-8"))
    return found
