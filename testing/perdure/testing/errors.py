"""What the kit raises."""

from __future__ import annotations

from perdure.storage import PerdureError
from perdure.workflow import WorkflowState

__all__ = [
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
]


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


class EffectThreadError(PerdureError):
    """An effect came from a thread that knows of no simulation while one is open; nothing happened.

    Attributes:
        ledger: The ledger's name.
        effect: The effect's name.
        thread: The thread's name.
    """

    ledger: str
    effect: str
    thread: str


class ExplorationError(PerdureError, AssertionError):
    """An exploration found something, or cannot explore; `only` is the run, as `explore_crashes(only=...)` takes it.

    An `AssertionError`, as it is a test that fails.
    """

    only: str


class RecoveryDiffersError(ExplorationError):
    """A run with crashes did not end as the one without. The text tells the whole story.

    Attributes:
        only: The run, as `only=` takes it.
        differences: What was otherwise, in sentences.
        story: What the processes did.
    """

    differences: tuple[str, ...]
    story: str


class NotRepeatableError(ExplorationError):
    """Two runs with the same seed and the same crashes, if any, are not alike: nothing can be said of crashes yet.

    Attributes:
        only: The run, as `only=` takes it.
        differences: What was otherwise, in sentences.
    """

    differences: tuple[str, ...]


class EndlessRunError(ExplorationError):
    """A run did not come to an end: the workflow waits for something that never comes, or goes on for ever.

    Attributes:
        only: The run, as `only=` takes it.
    """


class UnexpectedEndingError(ExplorationError):
    """The workflow ends in another state than it was to end in, already without a crash.

    Attributes:
        only: The run, as `only=` takes it.
        state: In which state it ended.
    """

    state: WorkflowState


class HistoryFileError(PerdureError):
    """A file of a recorded history cannot be read or written, or exists already; `path` names it."""

    path: str


class NotReplayableError(PerdureError, AssertionError):
    """The code does not fit a recorded history: workflows that recorded it would stop. The text says what to write.

    Attributes:
        workflow_id: The id of the workflow that was recorded.
        workflow: Its name.
        location: The place in history where they part, or `None` if that is not what is wrong.
    """

    workflow_id: str
    workflow: str
    location: str | None
