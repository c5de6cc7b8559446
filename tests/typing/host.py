"""What a user's type checker sees of workflows from outside. Checked by mypy and pyright (test_typing.py), never run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, assert_type

import trio

from perdure.actors import ScheduleHandle, Supervisor
from perdure.storage import Driver
from perdure.workflow import (
    Context,
    Workflow,
    WorkflowHandle,
    WorkflowResult,
    run_workflow,
    start_workflow,
    workflow,
)


@dataclass
class Order:
    sku: str


@workflow
async def order(ctx: Context, given: Order) -> int:
    return len(given.sku)


@workflow(name="named")
async def named(ctx: Context, given: Order) -> list[Order]:
    return [given]


async def plain(ctx: Context, _: None) -> str:
    return ctx.workflow_id


async def anything(ctx: Context, _: object) -> None: ...


@workflow  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def not_async(ctx: Context, _: None) -> int:
    return 1


async def host(supervisor: Supervisor) -> None:
    assert_type(order, Workflow[Order, int])
    assert_type(named, Workflow[Order, list[Order]])
    assert_type(await supervisor.spawn(order, "order-1", Order("a")), WorkflowHandle[int])
    assert_type(await supervisor.spawn(plain, "plain-1"), WorkflowHandle[str])
    assert_type(await supervisor.spawn(plain, "plain-1", None), WorkflowHandle[str])
    assert_type(
        await supervisor.spawn(plain, "plain-2", start_at=60, deadline=datetime.now(UTC), attributes={"customer": 7}),
        WorkflowHandle[str],
    )
    assert_type(await supervisor.spawn(anything, "anything-1", 5), WorkflowHandle[None])
    assert_type(await supervisor.spawn("order", "order-2", {"sku": "a"}), WorkflowHandle[Any])
    assert_type(await supervisor.get("order-1"), WorkflowHandle[Any])
    assert_type(await supervisor.schedule("daily", order, Order("a"), cron="0 9 * * *"), ScheduleHandle)
    assert_type(await supervisor.schedule("hourly", plain, every=3600, overlap="queue"), ScheduleHandle)
    assert_type(await supervisor.schedule("hourly", "order", {"sku": "a"}, every=3600), ScheduleHandle)
    await supervisor.schedule("daily", order, 7, every=60)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await supervisor.schedule("daily", plain, every=60, misfire="never")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]

    handle = await supervisor.spawn(named, "named-1", Order("a"))
    assert_type(await handle.result(), list[Order])
    assert_type(await handle.get_output(), list[Order] | None)
    bare: WorkflowHandle = handle
    assert_type(await bare.result(), Any)

    await supervisor.spawn(order, "order-3", {"sku": "a"})  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await supervisor.spawn(order, "order-4")  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]


async def local(nursery: trio.Nursery, driver: Driver) -> None:
    result = await run_workflow("order-1", order, Order("a"), driver)
    assert_type(result, WorkflowResult[int])
    assert_type(result.output, int | None)
    assert_type(await start_workflow(nursery, "order-1", order, Order("a"), driver), WorkflowHandle[int])
    await run_workflow("order-1", order, 1, driver)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
