"""Orders over HTTP: FastAPI routes that start workflows, message them and await them. Needs fastapi and uvicorn.

    python examples/fastapi_app.py                             serve on port 8000; Ctrl-C, or kill -9, and start it again
    curl -X PUT  localhost:8000/orders/7 --json '{"sku": "teapot", "quantity": 2}'
    curl -X POST localhost:8000/orders/7/payment --json '{"id": "evt-1", "reference": "PAY-9"}'
    curl         localhost:8000/orders/7/result                waits for the end, 10 seconds at most

1. The supervisor lives as long as the application: `open_asyncio_portal` in its lifespan. It runs in a thread of its own, so
   the loop that serves requests is never held up by it.
2. A request that is repeated does no harm: the order's id makes the spawn idempotent, the event's id the message.
3. A route that answers has written: after the 202 the order goes on, whatever happens to this process.
4. Who stops waiting for a result, stops waiting; the order goes on.
5. The warehouse's client runs under asyncio only, so the step that uses it goes through `to_asyncio`.
6. One process owns the directory: serve it with one worker. The `@workflow` is what it would be without FastAPI.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from perdure.actors import SupervisorClosedError, WorkflowExistsError, WorkflowNotFoundError
from perdure.actors.portal import AsyncioHandle, AsyncioSupervisor, open_asyncio_portal
from perdure.workflow import (
    Context,
    QueueTimeoutError,
    WorkflowEndedError,
    WorkflowFailedError,
    current_step,
    to_asyncio,
    workflow,
)

RESULT_WAIT_S = 10.0
PAYMENT_WAIT_S = 7 * 86400.0


class Order(BaseModel):
    """What is ordered; the body of the request, and the workflow's input."""

    sku: str
    quantity: int = Field(gt=0)


class Payment(BaseModel):
    """What the payment service tells. It may tell it more than once, with the same id."""

    id: str
    reference: str


class Receipt(BaseModel):
    """The workflow's output."""

    reference: str
    items: list[str]


class Warehouse:
    """Stands for a client that runs under asyncio only. Its lock is of the loop that it was first used in, as pools are."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._reserved: dict[str, list[str]] = {}

    async def reserve(self, key: str, order: Order) -> list[str]:
        """Reserve items; the same key again gives the same ones."""
        async with self._lock:
            await asyncio.sleep(0.01)
            return self._reserved.setdefault(key, [f"{order.sku}-{number}" for number in range(order.quantity)])


warehouse = Warehouse()


async def reserve(order: Order) -> list[str]:
    return await to_asyncio(warehouse.reserve, current_step().idempotency_key, order)


@workflow(name="order")
async def order_workflow(ctx: Context, order: Order) -> Receipt:
    """Reserve, wait for the payment for a week, and hand out the receipt."""
    items = await ctx.step("reserve", reserve, order)
    try:
        paid = await ctx.queue.next("payment", timeout=PAYMENT_WAIT_S, type=Payment)
    except QueueTimeoutError:
        return Receipt(reference="expired", items=[])
    return Receipt(reference=paid.body.reference, items=items)


async def supervisor_of(request: Request) -> AsyncioSupervisor:
    supervisor: AsyncioSupervisor = request.app.state.supervisor
    return supervisor


Supervisor = Annotated[AsyncioSupervisor, Depends(supervisor_of)]


async def order_of(order_id: str, supervisor: Supervisor) -> AsyncioHandle[Any]:
    return await supervisor.get(f"order-{order_id}")


OrderHandle = Annotated[AsyncioHandle[Any], Depends(order_of)]


def create_app(data: Path) -> FastAPI:
    """The application, with its workflows in a directory."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with open_asyncio_portal(data, workflows=[order_workflow]) as supervisor:
            app.state.supervisor = supervisor
            yield

    app = FastAPI(title="Orders", lifespan=lifespan)

    async def answer_error(request: Request, error: Exception) -> Response:
        """The errors of the supervisor, as statuses."""
        statuses: dict[type[Exception], int] = {WorkflowNotFoundError: 404, SupervisorClosedError: 503}
        return JSONResponse({"detail": str(error)}, statuses.get(type(error), 409))

    for kind in (WorkflowNotFoundError, WorkflowExistsError, WorkflowEndedError, SupervisorClosedError):
        app.add_exception_handler(kind, answer_error)

    @app.put("/orders/{order_id}", status_code=202)
    async def start(order_id: str, order: Order, supervisor: Supervisor) -> dict[str, str]:
        handle = await supervisor.spawn(order_workflow, f"order-{order_id}", order)
        return {"state": (await handle.get_state()).value}

    @app.get("/orders/{order_id}")
    async def look(handle: OrderHandle) -> dict[str, str]:
        return {"state": (await handle.get_state()).value}

    @app.post("/orders/{order_id}/payment", status_code=202)
    async def pay(payment: Payment, handle: OrderHandle) -> dict[str, str]:
        await handle.message("payment", payment, id=payment.id)
        return {"state": (await handle.get_state()).value}

    @app.get("/orders/{order_id}/result")
    async def result(handle: OrderHandle, wait: float = RESULT_WAIT_S) -> Receipt:
        try:
            async with asyncio.timeout(min(wait, RESULT_WAIT_S)):
                receipt: Receipt = await handle.result()
        except TimeoutError:
            raise HTTPException(504, "it has not ended yet; ask again") from None
        except WorkflowFailedError as error:
            raise HTTPException(500, str(error)) from None
        return receipt

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Orders over HTTP, which outlive the server.")
    parser.add_argument("--data", type=Path, default=Path("orders-data"), help="directory for the orders")
    parser.add_argument("--port", type=int, default=8000, help="port to serve on (8000); 0 for any that is free")
    flags = parser.parse_args()
    # Asked to stop, the server answers the requests that it has, those that wait for a result included, and then ends the
    # lifespan, and with it the supervisor.
    uvicorn.run(create_app(flags.data), port=flags.port, access_log=False)
