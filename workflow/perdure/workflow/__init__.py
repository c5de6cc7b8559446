"""The engine of Perdure: durable workflows on one driver.

A workflow is an async function. Every effect goes through its `Context` and is recorded, so that after a crash the function
runs again from the top and recorded effects return their recorded results.
"""

from perdure.workflow.clock import Clock, SystemClock, TrioClock
from perdure.workflow.context import Context, QueueReader, WorkflowLogger
from perdure.workflow.definition import Workflow, WorkflowFunction, definition_of, workflow
from perdure.workflow.errors import (
    CrashLoopError,
    CriticalError,
    DuplicateNameError,
    ErrorInfo,
    FailureKind,
    FaultError,
    HistoryDivergedError,
    InvalidArgumentError,
    MisuseError,
    OperationInProgressError,
    QueueTimeoutError,
    RollbackError,
    StepCriticalError,
    StepError,
    StepExhaustedError,
    StepInterruptedError,
    StepTimeoutError,
    SuspendSignal,
    UserCancellationError,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowError,
    WorkflowFailedError,
    WorkflowSuspendedError,
)
from perdure.workflow.handle import WorkflowHandle
from perdure.workflow.ids import IdGenerator, Uuid7Generator
from perdure.workflow.run import run_workflow, send_message, start_workflow
from perdure.workflow.snapshot import load_snapshot
from perdure.workflow.states import InvalidTransitionError, WorkflowState
from perdure.workflow.step import StepInfo, current_step
from perdure.workflow.types import (
    ANY_MESSAGE,
    Break,
    Continue,
    HistoryEntry,
    Message,
    RunMode,
    SleepOutcome,
    WorkflowResult,
    WorkflowSnapshot,
)
from perdure.workflow.versions import RemovableKind

__all__ = [
    "ANY_MESSAGE",
    "Break",
    "Clock",
    "Context",
    "Continue",
    "CrashLoopError",
    "CriticalError",
    "DuplicateNameError",
    "ErrorInfo",
    "FailureKind",
    "FaultError",
    "HistoryDivergedError",
    "HistoryEntry",
    "IdGenerator",
    "InvalidArgumentError",
    "InvalidTransitionError",
    "Message",
    "MisuseError",
    "OperationInProgressError",
    "QueueReader",
    "QueueTimeoutError",
    "RemovableKind",
    "RollbackError",
    "RunMode",
    "SleepOutcome",
    "StepCriticalError",
    "StepError",
    "StepExhaustedError",
    "StepInfo",
    "StepInterruptedError",
    "StepTimeoutError",
    "SuspendSignal",
    "SystemClock",
    "TrioClock",
    "UserCancellationError",
    "Uuid7Generator",
    "Workflow",
    "WorkflowCancelledError",
    "WorkflowEndedError",
    "WorkflowError",
    "WorkflowFailedError",
    "WorkflowFunction",
    "WorkflowHandle",
    "WorkflowLogger",
    "WorkflowResult",
    "WorkflowSnapshot",
    "WorkflowState",
    "WorkflowSuspendedError",
    "current_step",
    "definition_of",
    "load_snapshot",
    "run_workflow",
    "send_message",
    "start_workflow",
    "workflow",
]
