"""The reference engine's recorded runs (tests/vectors), and the workflows that they are runs of, written for this engine.

The workflows are those of tests/vectors/README.md. `world` is all that they know of the outside: the effects of their steps,
in order, which a test can look at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dumps import Dump

from perdure.storage import decode_value, layout
from perdure.workflow import Break, Context, Continue, CriticalError, RollbackContext, StepFailure, current_step

VECTORS = Path(__file__).resolve().parents[1] / "vectors"

MESSAGE_ID = "11111111-2222-4333-8444-555555555555"
"""The id of every message that was sent in the recordings."""
SENT_AT_MS = 1_700_000_000_000
RECORDED_AT_MS = 1_795_956_873_699
"""A moment after the first attempt of the retried step was recorded and before its retry was due."""
YEAR_2100_S = 4_102_444_800

Workflow = Callable[[Context, Any], Awaitable[Any]]
Stop = dict[str, Any]
"""What was recorded when a run returned: `sent` before it, its `result`, all pairs (`kv`) and the armed `alarm`."""

effects: list[str] = []
"""What the steps of the workflows below did, in order."""


def stops_of(file: str) -> list[Stop]:
    """All stops of a recording."""
    stops: list[Stop] = json.loads((VECTORS / f"{file}.json").read_text(encoding="utf-8"))
    return stops


def dump_of(stop: Stop) -> Dump:
    """What was stored at a stop."""
    return {bytes.fromhex(key): bytes.fromhex(value) for key, value in stop["kv"]}


def input_of(file: str) -> Any:
    """The input of the recorded workflow."""
    return decode_value(dump_of(stops_of(file)[0])[layout.INPUT_KEY])


def plain(value: Any) -> Any:
    """A recorded result as JSON has it, with what JSON cannot hold in its place."""
    if isinstance(value, dict):
        if set(value) == {"$bytes"}:
            return bytes.fromhex(value["$bytes"])
        if set(value) == {"$bigint"}:
            return int(value["$bigint"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


async def give(name: str, value: Any) -> Any:
    """A step's function: notes its effect."""
    effects.append(name)
    return value


async def order(ctx: Context, order_id: str) -> dict[str, Any]:
    payment = await ctx.step("process-payment", give, "pay", {"id": f"pay-{order_id}", "cents": 1999})
    message = await ctx.queue.next("wait-shipping", names=["shipment-confirmed"])
    await ctx.step("notify-customer", give, "notify", None)
    return {"orderId": order_id, "payment": payment, "tracking": message.body}


class Error(Exception):
    """Named like JavaScript's."""


async def _flaky() -> int:
    attempt = current_step().attempt
    effects.append(f"attempt {attempt}")
    if attempt < 3:
        raise Error(f"boom {attempt}")
    return attempt


async def retry(ctx: Context, _: object) -> int:
    return await ctx.step("flaky", _flaky, max_retries=3, retry_backoff_base=0.001)


async def sleep(ctx: Context, given: dict[str, float]) -> str:
    await ctx.sleep_until("new-year-2100", given["at"] / 1000)
    return "woke"


def counting(pause_at: int | None) -> Workflow:
    async def workflow(ctx: Context, until: int) -> Any:
        async def body(inner: Context, state: dict[str, int]) -> Continue[dict[str, int]] | Break[dict[str, int]]:
            total = await inner.step("add", give, f"add {state['total']}", state["total"] + 1)
            if total == pause_at:
                await inner.sleep_until("pause", YEAR_2100_S)
            return Break({"total": total}) if total == until else Continue({"total": total})

        return await ctx.loop("count", body, {"total": 0})

    return workflow


async def values(ctx: Context, given: dict[str, Any]) -> dict[str, Any]:
    await ctx.step("undefined", give, "undefined", None)
    nothing = await ctx.step("null", give, "null", None)
    await ctx.step("bigint", give, "bigint", 123456789012345678901234567890)
    await ctx.step("date", give, "date", datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=UTC))
    await ctx.step("set", give, "set", {1, 2, 3})
    await ctx.step("map", give, "map", {"k": 1, 2: "v"})
    numbers = await ctx.step("nan", give, "nan", [math.nan, math.inf, -math.inf, 0, 0.1, 1e300])
    text = await ctx.step("long", give, "long", "x" * 300)
    return {"input": given, "b": nothing, "g": len(numbers), "h": len(text)}


class PaymentError(Exception):
    """An error with properties, one of them plain."""

    def __init__(self) -> None:
        super().__init__("custom")
        self.code = 402
        self.details = {"card": "x"}


async def errmeta(ctx: Context, _: object) -> None:
    raise PaymentError


async def migrate(ctx: Context, _: object) -> int:
    await ctx.removed("old-validation", "step")
    version = await ctx.get_version("pricing", 2)
    return await ctx.step("price", give, "price", version * 10)


async def join(ctx: Context, _: object) -> dict[str, Any]:
    async def user(branch: Context) -> Any:
        return await branch.step("get", give, "get", {"name": "Ada"})

    async def posts(branch: Context) -> Any:
        return (await branch.queue.next("posts-ready", names=["posts"])).body

    async def stats(branch: Context) -> int:
        await branch.step("one", give, "one", 1)
        await branch.step("two", give, "two", 2)
        return 2

    return await ctx.join("fetch-all", {"user": user, "posts": posts, "stats": stats})


async def race(ctx: Context, _: object) -> dict[str, Any]:
    async def slow(branch: Context) -> None:
        await branch.sleep_until("wait", YEAR_2100_S)

    async def fast(branch: Context) -> Any:
        return await branch.step("work", give, "work", "fast")

    result = await ctx.race("first", {"slow": slow, "fast": fast})
    return {"winner": result.winner, "value": result.value}


async def refuse(name: str, message: str) -> None:
    """A step's function: notes its effect, and fails for good."""
    effects.append(name)
    raise CriticalError(message)


def undo(name: str) -> Callable[[RollbackContext, Any], Awaitable[None]]:
    """A rollback handler: notes its effect."""

    async def handler(ctx: RollbackContext, output: Any) -> None:
        effects.append(f"undo {name} {output}")

    return handler


async def rollback(ctx: Context, _: object) -> None:
    await ctx.rollback_checkpoint("billing")
    await ctx.step("reserve", give, "reserve", "r1", rollback=undo("reserve"))
    await ctx.step("charge", give, "charge", "c1", rollback=undo("charge"))
    await ctx.step("ship", refuse, "ship", "out of stock")


async def tried(ctx: Context, _: object) -> dict[str, Any]:
    result = await ctx.try_step("charge", refuse, "charge", "declined", max_retries=0)
    assert isinstance(result, StepFailure)
    return {"kind": result.kind, "message": result.error.message, "attempts": result.attempts}


WORKFLOWS: dict[str, Workflow] = {
    "order": order,
    "retry": retry,
    "sleep": sleep,
    "loop": counting(25),
    "loopdone": counting(None),
    "values": values,
    "errmeta": errmeta,
    "migrate": migrate,
    "join": join,
    "race": race,
    "rollback": rollback,
    "tried": tried,
}
"""By the name of their recording."""

OUTCOMES: dict[str, Any] = {"sleep": "woke", "loop": {"total": 45}}
"""Of those whose recording ends before the workflow does; the others' are in the recording."""

EFFECTS: dict[str, list[list[str]]] = {
    "order": [["notify"], []],
    "retry": [["attempt 2", "attempt 3"], ["attempt 3"], []],
    "sleep": [[]],
    "loop": [[f"add {total}" for total in range(25, 45)]],
    "loopdone": [[]],
    "values": [[]],
    "errmeta": [[]],
    "migrate": [[]],
    "join": [[], []],
    "race": [[]],
    "rollback": [[]],
    "tried": [[]],
}
"""What runs after resuming each stop."""
