"""The runtime of Perdure: a supervisor that hosts workflows as actors.

async with open_supervisor("data/", workflows=[order]) as supervisor:
    handle = await supervisor.spawn(order, "order-123", {"sku": 7})
    await handle.message("shipment-confirmed", "TRACK-456", id="evt-1")
    print(await handle.result())
"""

from perdure.actors.errors import (
    MissingExtraError,
    ScheduleNotFoundError,
    SupervisorClosedError,
    SupervisorError,
    UnregisteredWorkflowError,
    WorkflowExistsError,
    WorkflowNotFoundError,
)
from perdure.actors.handle import ActorHandle
from perdure.actors.schedule_handle import ScheduleHandle, ScheduleInfo
from perdure.actors.supervisor import Supervisor, WorkflowLike, open_supervisor
from perdure.workflow import WorkflowHandle

__all__ = [
    "ActorHandle",
    "MissingExtraError",
    "ScheduleHandle",
    "ScheduleInfo",
    "ScheduleNotFoundError",
    "Supervisor",
    "SupervisorClosedError",
    "SupervisorError",
    "UnregisteredWorkflowError",
    "WorkflowExistsError",
    "WorkflowHandle",
    "WorkflowLike",
    "WorkflowNotFoundError",
    "open_supervisor",
]
