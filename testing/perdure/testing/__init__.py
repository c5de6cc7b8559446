"""A kit to property-test crash recovery: virtual time, simulated crashes at every write, and what is outside, counted.

async with virtual_supervisor([order], disk=disk, clock=clock) as supervisor:
    handle = await supervisor.spawn(order, "order-1", 7)
    await trio.sleep(30 * 24 * 3600)  # passes at once
    disk.crash()
"""

from perdure.testing.clock import SimulatedClock
from perdure.testing.disk import SimulatedDisk, SimulatedStore
from perdure.testing.errors import SimulatedCrash, VirtualTimeError
from perdure.testing.faults import CrashPoint, Fault, FaultyDriver, WriteGate, WritePoint
from perdure.testing.scheduling import seeded_scheduling
from perdure.testing.simulation import Incarnation, Simulation
from perdure.testing.virtual import run_virtual, virtual_supervisor

__all__ = [
    "CrashPoint",
    "Fault",
    "FaultyDriver",
    "Incarnation",
    "SimulatedClock",
    "SimulatedCrash",
    "SimulatedDisk",
    "SimulatedStore",
    "Simulation",
    "VirtualTimeError",
    "WriteGate",
    "WritePoint",
    "run_virtual",
    "seeded_scheduling",
    "virtual_supervisor",
]
