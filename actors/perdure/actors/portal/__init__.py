"""Supervisors for programs without Trio: in a background thread, with blocking calls or with asyncio's awaitables.

with open_portal("data/", workflows=[order]) as supervisor:
    handle = supervisor.spawn(order, "order-123", {"sku": 7})
    handle.message("shipment-confirmed", "TRACK-456", id="evt-1")
    print(handle.result(timeout=60))

A portal has two faces, each an object of its own whose methods have the names and types of the supervisor's: whoever calls
one sees in its type whether to await. `open_portal` gives the blocking one, `open_asyncio_portal` the other; from each there
is a way to the other one (`supervisor.asyncio`, `supervisor.blocking`), for programs that have threads and a loop.

Rejected: one object with each method twice (`spawn`, `aspawn`), where every forgotten prefix is found at run time.
"""

from perdure.actors.portal.awaitable import AsyncioHandle, AsyncioScheduleHandle, AsyncioSupervisor
from perdure.actors.portal.blocking import BlockingHandle, BlockingScheduleHandle, BlockingSupervisor
from perdure.actors.portal.opening import open_asyncio_portal, open_portal
from perdure.actors.portal.overseeing import AsyncioEvents, BlockingEvents

__all__ = [
    "AsyncioEvents",
    "AsyncioHandle",
    "AsyncioScheduleHandle",
    "AsyncioSupervisor",
    "BlockingEvents",
    "BlockingHandle",
    "BlockingScheduleHandle",
    "BlockingSupervisor",
    "open_asyncio_portal",
    "open_portal",
]
