"""What a user's type checker sees of a portal's two faces. Checked by mypy and pyright (test_typing.py), never run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

from perdure.actors.portal import (
    AsyncioHandle,
    AsyncioSupervisor,
    BlockingHandle,
    BlockingSupervisor,
    open_asyncio_portal,
    open_portal,
)
from perdure.workflow import Context, WorkflowHandle, workflow


@dataclass
class Order:
    sku: str


@workflow
async def order(ctx: Context, given: Order) -> int:
    return len(given.sku)


async def plain(ctx: Context, _: None) -> str:
    return ctx.workflow_id


def blocking() -> None:
    with open_portal("data", [order, plain], grace=1.0) as supervisor:
        assert_type(supervisor, BlockingSupervisor)
        assert_type(supervisor.asyncio, AsyncioSupervisor)
        handle = supervisor.spawn(order, "order-1", Order("a"))
        assert_type(handle, BlockingHandle[int])
        assert_type(handle.result(timeout=5), int)
        assert_type(handle.get_output(), int | None)
        assert_type(supervisor.spawn(plain, "plain-1"), BlockingHandle[str])
        assert_type(supervisor.spawn("order", "order-2", {"sku": "a"}), BlockingHandle[Any])
        assert_type(supervisor.get("order-1"), BlockingHandle[Any])
        supervisor.spawn(order, "order-3", {"sku": "a"})  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
        supervisor.spawn(order, "order-4")  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    open_portal("data", gracious=1.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def awaited() -> None:
    async with open_asyncio_portal("data", [order, plain], grace=1.0) as supervisor:
        assert_type(supervisor, AsyncioSupervisor)
        assert_type(supervisor.blocking, BlockingSupervisor)
        handle = await supervisor.spawn(order, "order-1", Order("a"))
        assert_type(handle, AsyncioHandle[int])
        assert_type(await handle.result(), int)
        common: WorkflowHandle[int] = handle
        assert_type(await common.get_output(), int | None)
        assert_type(await supervisor.spawn(plain, "plain-1"), AsyncioHandle[str])
        assert_type(await supervisor.get("order-1"), AsyncioHandle[Any])
        await supervisor.spawn(order, "order-3", {"sku": "a"})  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    open_asyncio_portal("data", durability="some")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
