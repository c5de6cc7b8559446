"""What a user's type checker sees of the context. Checked by mypy and pyright (test_typing.py), never run.

`assert_type` says what must be inferred. A line that must be refused carries both tools' comments: each warns about a comment
that it does not need.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from random import Random
from typing import Any, assert_type
from uuid import UUID

from perdure.workflow import (
    BlockFailure,
    BlockOk,
    Branch,
    Break,
    Context,
    Continue,
    JoinResult,
    Message,
    RaceResult,
    RollbackContext,
    SleepOutcome,
    StepFailure,
    StepOk,
    workflow,
)


@dataclass
class Order:
    sku: str


async def fetch(sku: str, count: int) -> Order:
    return Order(sku * count)


async def fetch_all(*skus: str) -> list[Order]:
    return [Order(sku) for sku in skus]


async def nothing() -> None: ...


def parse(text: str) -> int:
    return int(text)


def begin() -> Awaitable[bool]:
    raise NotImplementedError


class Shop:
    async def find(self, sku: str, limit: int = 1) -> Order | None:
        return Order(sku * limit)


async def steps(ctx: Context, shop: Shop) -> None:
    assert_type(await ctx.step("fetch", fetch, "a", 1), Order)
    assert_type(await ctx.step("fetch", fetch, "a", 1, max_retries=5, timeout=1.0), Order)
    assert_type(await ctx.step("fetch-all", fetch_all, "a", "b"), list[Order])
    assert_type(await ctx.step("nothing", nothing), None)
    assert_type(await ctx.step("parse", parse, "1"), int)
    assert_type(await ctx.step("begin", begin), bool)
    assert_type(await ctx.step("find", shop.find, "a"), Order | None)
    assert_type(await ctx.step("partial", partial(fetch, count=2), "a"), Order)
    assert_type(await ctx.step("class", Order, "a"), Order)
    assert_type(await ctx.step("lambda", lambda: 1), int)
    assert_type(await ctx.try_step("try", fetch, "a", 1), StepOk[Order] | StepFailure)

    await ctx.step("type", fetch, "a", "1")  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await ctx.step("too few", fetch, "a")  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await ctx.step("too many", parse, "1", 2)  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await ctx.step("no such option", parse, "1", retries=2)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await ctx.step("called", fetch("a", 1))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


async def count_down(ctx: Context, left: int) -> Continue[int] | Break[Order]:
    return Continue(left - 1) if left else Break(Order("done"))


async def poll(ctx: Context, _: None) -> Break[str] | None:
    return None


async def loops(ctx: Context) -> None:
    assert_type(await ctx.loop("count-down", count_down, 3), Order)
    assert_type(await ctx.loop("poll", poll), str)
    await ctx.loop("wrong state", count_down, "3")  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await ctx.loop("no state", count_down)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def messages(ctx: Context) -> None:
    assert_type(await ctx.queue.next("any"), Message[Any])
    assert_type((await ctx.queue.next("order", type=Order)).body, Order)
    assert_type((await ctx.queue.next("orders", type=list[Order], names=["a"], timeout=1.0)).body, list[Order])
    maybe: Order | None = (await ctx.queue.next("maybe", type=Order | None)).body  # a union is no `type[T]`: `Any`
    assert_type(await ctx.queue.next_batch("many", count=3), list[Message[Any]])
    assert_type(await ctx.queue.next_batch("orders", type=Order, count=3), list[Message[Order]])
    bare: Message = await ctx.queue.next("bare", type=Order)
    assert_type(bare.body, Any)
    wrong: Message[int] = await ctx.queue.next("wrong", type=Order)  # type: ignore[arg-type]  # pyright: ignore[reportAssignmentType]
    print(maybe, wrong)


async def get_user(ctx: Context) -> Order:
    return Order("user")


async def get_count(ctx: Context) -> int:
    return 1


async def branches(ctx: Context) -> None:
    user, count = Branch("user", get_user), Branch("count", get_count)
    joined = await ctx.join("both", [user, count])
    assert_type(joined[user], Order)
    assert_type(joined[count], int)
    # mypy joins what the values of a dict have in common, which is `object` here.
    assert_type(await ctx.join("dict", {"user": get_user, "count": get_count}), JoinResult[Order | int])  # type: ignore[assert-type]
    assert_type(await ctx.join("same", {"a": get_count, "b": get_count}), JoinResult[int])
    assert_type(await ctx.race("race", {"a": get_count, "b": get_count}), RaceResult[int])
    print(joined[user].missing)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


async def block(ctx: Context, sku: str) -> Order:
    return Order(sku)


async def blocks(ctx: Context) -> None:
    assert_type(await ctx.try_block("block", block, "a"), BlockOk[Order] | BlockFailure)
    await ctx.try_block("block", block, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def cancel_order(ctx: RollbackContext, order: Order) -> None: ...


def forget_number(ctx: RollbackContext, number: int) -> None: ...


async def rollbacks(ctx: Context) -> None:
    assert_type(await ctx.rollback_checkpoint("from here"), None)
    assert_type(await ctx.step("fetch", fetch, "a", 1, rollback=cancel_order), Order)
    assert_type(await ctx.step("parse", parse, "1", rollback=forget_number), int)
    assert_type(await ctx.try_step("try", fetch, "a", 1, rollback=cancel_order), StepOk[Order] | StepFailure)
    await ctx.step("wrong output", parse, "1", rollback=cancel_order)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]


async def the_rest(ctx: Context, tomorrow: datetime) -> None:
    assert_type(await ctx.now("now"), float)
    assert_type(await ctx.attributes("found by"), dict[str, str | int | float | bool | None])
    assert_type(
        await ctx.set_attributes("found by other", {"customer": 7}, remove=["tier"]),
        dict[str, str | int | float | bool | None],
    )
    await ctx.set_attributes("wrong", {"customer": []})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    assert_type(ctx.uuid("id"), UUID)
    assert_type(ctx.random("dice"), Random)
    assert_type(await ctx.get_version("format", 2), int)
    assert_type(await ctx.removed("old", "step"), None)
    assert_type(await ctx.sleep_until("tomorrow", tomorrow), SleepOutcome)
    await ctx.removed("old", "stepp")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await ctx.try_step("try", parse, "1", catch=("exhaustion",))  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await ctx.try_block("block", block, "a", catch=("steps",))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@workflow
async def ship(ctx: Context, order: Order) -> int:
    return len(order.sku)


@workflow
async def sweep(ctx: Context, _: None) -> str:
    return "swept"


async def children(ctx: Context) -> None:
    assert_type(await ctx.call("ship", ship, Order("a")), int)
    assert_type(await ctx.call("sweep", sweep, workflow_id="sweep", on_parent_end="leave"), str)
    assert_type(await ctx.call("by name", "ship", {"sku": "a"}), Any)
    assert_type(await ctx.send("tell", "order-1", "shipped", Order("a")), None)
    await ctx.call("wrong input", ship, "a")  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
