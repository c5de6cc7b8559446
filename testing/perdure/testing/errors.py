"""What the kit raises."""

from __future__ import annotations

from perdure.storage import PerdureError

__all__ = ["SimulatedCrash", "VirtualTimeError"]


class SimulatedCrash(BaseException):
    """The process died here.

    A `BaseException`, since nothing in a workflow or in the engine may handle a death as an error. It never leaves
    `virtual_supervisor` or `Simulation.run`; under `FaultyDriver` alone it comes out of whatever was awaited.
    """


class VirtualTimeError(PerdureError):
    """Something that needs virtual time was used without it."""
