"""A kit to property-test crash recovery: virtual time, simulated crashes at every write, and what is outside, counted.

async with virtual_supervisor([order], disk=disk, clock=clock) as supervisor:
    handle = await supervisor.spawn(order, "order-1", 7)
    await trio.sleep(30 * 24 * 3600)  # passes at once
    disk.crash()

Names are loaded when they are first used: pytest loads its plugin, which is in here, in every project; and what is built on
Hypothesis is asked for by those who have it. Without it, `dir` and `from perdure.testing import *` leave those names out, and
whoever asks for one is told what to install.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from perdure.testing.clock import SimulatedClock
    from perdure.testing.disk import SimulatedDisk, SimulatedStore
    from perdure.testing.errors import (
        EffectKeyError,
        EffectRefusedError,
        EffectThreadError,
        EffectTimeoutError,
        EndlessRunError,
        ExplorationError,
        HistoryFileError,
        NotRepeatableError,
        NotReplayableError,
        RecoveryDiffersError,
        SimulatedCrash,
        UnexpectedEndingError,
        VirtualTimeError,
    )
    from perdure.testing.explore import Exploration, explore_crashes, explore_crashes_now
    from perdure.testing.faults import CrashPoint, Fault, FaultyDriver, WriteGate, WritePoint
    from perdure.testing.history_files import RecordedHistory, read_history, record_history
    from perdure.testing.ledger import Effect, EffectFault, EffectLedger
    from perdure.testing.machine import WorkflowMachine, process_rule
    from perdure.testing.replaying import Replay, assert_replayable
    from perdure.testing.scenario import Ending, FinishedRun, Mail
    from perdure.testing.scheduling import seeded_scheduling
    from perdure.testing.simulation import Incarnation, Simulation
    from perdure.testing.strategies import (
        ProcessPlan,
        crash_plans,
        fault_plans,
        message_orders,
        process_plans,
        schedule_seeds,
        workflow_inputs,
    )
    from perdure.testing.virtual import run_virtual, virtual_supervisor

__all__ = [
    "CrashPoint",
    "Effect",
    "EffectFault",
    "EffectKeyError",
    "EffectLedger",
    "EffectRefusedError",
    "EffectThreadError",
    "EffectTimeoutError",
    "Ending",
    "EndlessRunError",
    "Exploration",
    "ExplorationError",
    "Fault",
    "FaultyDriver",
    "FinishedRun",
    "HistoryFileError",
    "Incarnation",
    "Mail",
    "NotRepeatableError",
    "NotReplayableError",
    "ProcessPlan",
    "RecordedHistory",
    "RecoveryDiffersError",
    "Replay",
    "SimulatedClock",
    "SimulatedCrash",
    "SimulatedDisk",
    "SimulatedStore",
    "Simulation",
    "UnexpectedEndingError",
    "VirtualTimeError",
    "WorkflowMachine",
    "WriteGate",
    "WritePoint",
    "assert_replayable",
    "crash_plans",
    "explore_crashes",
    "explore_crashes_now",
    "fault_plans",
    "message_orders",
    "process_plans",
    "process_rule",
    "read_history",
    "record_history",
    "run_virtual",
    "schedule_seeds",
    "seeded_scheduling",
    "virtual_supervisor",
    "workflow_inputs",
]

_HOMES: Final = {
    "clock": ("SimulatedClock",),
    "disk": ("SimulatedDisk", "SimulatedStore"),
    "errors": (
        "EffectKeyError",
        "EffectRefusedError",
        "EffectThreadError",
        "EffectTimeoutError",
        "EndlessRunError",
        "ExplorationError",
        "HistoryFileError",
        "NotRepeatableError",
        "NotReplayableError",
        "RecoveryDiffersError",
        "SimulatedCrash",
        "UnexpectedEndingError",
        "VirtualTimeError",
    ),
    "explore": ("Exploration", "explore_crashes", "explore_crashes_now"),
    "faults": ("CrashPoint", "Fault", "FaultyDriver", "WriteGate", "WritePoint"),
    "history_files": ("RecordedHistory", "read_history", "record_history"),
    "ledger": ("Effect", "EffectFault", "EffectLedger"),
    "replaying": ("Replay", "assert_replayable"),
    "scenario": ("Ending", "FinishedRun", "Mail"),
    "machine": ("WorkflowMachine", "process_rule"),
    "scheduling": ("seeded_scheduling",),
    "simulation": ("Incarnation", "Simulation"),
    "strategies": (
        "ProcessPlan",
        "crash_plans",
        "fault_plans",
        "message_orders",
        "process_plans",
        "schedule_seeds",
        "workflow_inputs",
    ),
    "virtual": ("run_virtual", "virtual_supervisor"),
}
"""Which module each exported name is loaded from; the same as above, for the interpreter."""

_ON_HYPOTHESIS: Final = ("machine", "strategies")
"""The modules that cannot be loaded without it."""

_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}


def _has_hypothesis() -> bool:
    try:
        return find_spec("hypothesis") is not None
    except (ImportError, ValueError):  # somebody keeps it away
        return False


if not TYPE_CHECKING and not _has_hypothesis():
    __all__ = [name for name in __all__ if _HOME_OF[name] not in _ON_HYPOTHESIS]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
