"""What the kit raises."""

from __future__ import annotations

from perdure.storage import PerdureError

__all__ = ["EffectKeyError", "EffectRefusedError", "EffectTimeoutError", "SimulatedCrash", "VirtualTimeError"]


class SimulatedCrash(BaseException):
    """The process died here.

    A `BaseException`, since nothing in a workflow or in the engine may handle a death as an error. It never leaves
    `virtual_supervisor` or `Simulation.run`; under `FaultyDriver` alone it comes out of whatever was awaited.
    """


class VirtualTimeError(PerdureError):
    """Something that needs virtual time was used without it."""


class EffectRefusedError(PerdureError):
    """The outside world refused an effect, as it was told to; nothing happened.

    Attributes:
        ledger: The ledger's name.
        effect: The effect's name.
    """

    ledger: str
    effect: str


class EffectTimeoutError(PerdureError, TimeoutError):
    """The outside world did not answer in time, as it was told to: the effect may have happened or not.

    A `TimeoutError` too, as most libraries raise. Attributes as of `EffectRefusedError`.
    """

    ledger: str
    effect: str


class EffectKeyError(PerdureError):
    """An idempotency key was used again for another effect: each effect needs a key of its own.

    Attributes:
        ledger: The ledger's name.
        effect: The effect's name.
        key: The key.
    """

    ledger: str
    effect: str
    key: str
