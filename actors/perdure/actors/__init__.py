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
    WorkflowNotEndedError,
    WorkflowNotFoundError,
)
from perdure.actors.events import EventStream, WorkflowStateChanged
from perdure.actors.faults import FaultedWorkflow
from perdure.actors.handle import ActorHandle
from perdure.actors.limits import WorkflowLimit
from perdure.actors.listing import WorkflowInfo
from perdure.actors.options import WorkflowLike
from perdure.actors.overseer import SupervisorStats
from perdure.actors.schedule_handle import ScheduleHandle, ScheduleInfo
from perdure.actors.supervisor import Supervisor, open_supervisor
from perdure.workflow import WorkflowHandle

__all__ = [
    "ActorHandle",
    "EventStream",
    "FaultedWorkflow",
    "MissingExtraError",
    "ScheduleHandle",
    "ScheduleInfo",
    "ScheduleNotFoundError",
    "Supervisor",
    "SupervisorClosedError",
    "SupervisorError",
    "SupervisorStats",
    "UnregisteredWorkflowError",
    "WorkflowExistsError",
    "WorkflowHandle",
    "WorkflowInfo",
    "WorkflowLike",
    "WorkflowNotEndedError",
    "WorkflowLimit",
    "WorkflowNotFoundError",
    "WorkflowStateChanged",
    "open_supervisor",
]
