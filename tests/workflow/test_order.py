"""The smallest whole: an order workflow, begun, parked, restarted, finished."""

from __future__ import annotations

from typing import Any

from harness import Namespace, host
from trio.testing import MockClock

from perdure.workflow import Context, RunMode, WorkflowState


async def order(ctx: Context, order_id: str) -> dict[str, Any]:
    calls.append("workflow")
    payment = await ctx.step("process-payment", pay, order_id)
    message = await ctx.queue.next("wait-shipping", names=["shipment-confirmed"])
    await ctx.step("notify-customer", notify)
    return {"orderId": order_id, "payment": payment, "tracking": message.body}


calls: list[str] = []


async def pay(order_id: str) -> dict[str, Any]:
    calls.append("pay")
    return {"id": f"pay-{order_id}", "cents": 1999}


async def notify() -> None:
    calls.append("notify")


async def test_an_order_survives_a_restart_while_it_waits(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    calls.clear()
    async with host(namespace, mode) as process:
        stopped = await process.stop(order, "order-123")
        assert stopped.state is WorkflowState.SLEEPING
        assert stopped.waiting_for_messages == ("shipment-confirmed",)
        await process.restart()
        await process.send("shipment-confirmed", "TRACK-456")
        output = await process.finish(order, "order-123")
    assert output == {
        "orderId": "order-123",
        "payment": {"id": "pay-order-123", "cents": 1999},
        "tracking": "TRACK-456",
    }
    assert calls.count("pay") == 1
    assert calls.count("notify") == 1
