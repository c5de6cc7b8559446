"""What can go wrong when a process writes: it dies, the disk refuses, the outcome is unknown, it takes long.

1. All writes of one process go through one `WriteGate`, which numbers them, from 0, in the order in which they begin: on real
   files others may begin before one is done. What is to go wrong is said by number, so a run can be repeated exactly, and every
   write can have its turn. A write that could not be made gives its number to the next one.
2. A process that died is dead: nothing that still unwinds in it, `finally` blocks included, reaches a byte or reads one.
3. A fault is what the engine would be told by a real driver: `BatchRefusedError` when nothing was written,
   `CommitUnknownError` when nobody can know, which closes the driver.
4. The gate decides in plain code; `FaultyDriver` here and `SimulatedStore` (`disk.py`) do what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn, TypeAlias, cast, get_args

import trio

from perdure.storage import Batch, BatchRefusedError, CommitUnknownError, Driver
from perdure.storage.driver import SingleWrites, nowait_batch
from perdure.testing.errors import SimulatedCrash
from perdure.workflow import InvalidArgumentError
from perdure.workflow.checks import check_driver, check_duration

__all__ = [
    "CrashPoint",
    "Fault",
    "FaultyDriver",
    "When",
    "WriteGate",
    "WriteKind",
    "WritePoint",
    "check_crash",
    "check_faults",
    "current_gate",
]

When: TypeAlias = Literal["before", "after"]
"""Which side of a write: before anything of it is durable, or after all of it is."""

WriteKind: TypeAlias = Literal["batch", "rows", "create", "delete", "own"]
"""A workflow's transition; rows of the catalog; a namespace made, or deleted; the supervisor's own namespace."""

Fault: TypeAlias = Literal["refused", "full", "lost", "applied", "io"]
"""`refused`, `full`: the disk did not take it, nothing was written. `lost`, `applied`: nobody can know whether it was written,
and it was not, or was. `io`: an I/O error where a batch's outcome is known to be nothing (a row, a new namespace)."""


@dataclass(frozen=True, slots=True, order=True)
class CrashPoint:
    """Where a process is to die.

    Attributes:
        write: At its write of this number, from 0.
        when: Before it is durable, or after.
    """

    write: int
    when: When = "before"

    def __post_init__(self) -> None:
        if isinstance(self.write, bool) or not isinstance(self.write, int) or self.write < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(
                f"write must be an integer from 0, not {self.write!r}; write CrashPoint(3, 'after')"
            )
        if self.when not in ("before", "after"):
            raise InvalidArgumentError(
                f"when must be 'before' or 'after', not {self.when!r}; write CrashPoint(3, 'after')"
            )

    def __str__(self) -> str:
        return f"{self.when} write {self.write}"


def check_crash(crash_at: object) -> None:
    """`None`, or a `CrashPoint`.

    Raises:
        InvalidArgumentError: It is something else.
    """
    if not isinstance(crash_at, CrashPoint | None):
        raise InvalidArgumentError(
            f"crash_at is a CrashPoint, not {crash_at!r:.80}; write crash_at=CrashPoint(3, 'after')"
        )


def check_faults(faults: object) -> None:
    """`None`, or faults by the number of a write.

    Raises:
        InvalidArgumentError: It is something else.
    """
    if faults is None:
        return
    if not isinstance(faults, Mapping):
        raise InvalidArgumentError(
            f"faults are by the number of a write, not {faults!r:.80}; write faults={{3: 'full'}}"
        )
    for number, fault in cast("Mapping[object, object]", faults).items():
        if type(number) is not int or number < 0 or fault not in get_args(Fault):
            raise InvalidArgumentError(
                f"a fault is one of {', '.join(map(repr, get_args(Fault)))} by the number of a write, from 0, not "
                f"{number!r:.40}: {fault!r:.40}; write faults={{3: 'full'}}"
            )


def check_effect_number(number: object) -> None:
    """Refuse what is no number of an effect.

    Raises:
        InvalidArgumentError: It is neither `None` nor an integer from 0.
    """
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
        raise InvalidArgumentError(
            f"crash_after_effect is the number of an effect, from 0, not {number!r}; write crash_after_effect=0"
        )


@dataclass(frozen=True, slots=True)
class WritePoint:
    """One write that a process made, or was about to make.

    Attributes:
        life: Which process of the disk made it, from 0.
        number: Which of that process's writes it is, from 0.
        kind: What was written.
        workflow_id: Whose; empty for what belongs to no single workflow.
        batch: What the batch holds, if it is one.
    """

    life: int
    number: int
    kind: WriteKind
    workflow_id: str = ""
    batch: Batch | None = field(default=None, compare=False, repr=False)


class WriteGate:
    """Where all writes of one process pass.

    Args:
        life: Which process of the disk this is.

    Attributes:
        writes: What was written, in the order in which it was done.
        begun: How many writes have begun, which is the number of the next one.
        effects: How much happened outside.
        is_dead: Whether the process has died.
        died_at: At which write it died, if at one: what was or would have been written.
        crash_at: Where it is to die.
        crash_after_effect: After which of its effects outside, from 0, it is to die, before that is recorded.
        faults: What goes wrong with the writes of these numbers.
        delay_s: How long each write takes, in seconds of Trio's clock.
        on_crash: Called at the moment of the death, once.
        on_write: Called before and after each write.
    """

    def __init__(self, life: int = 0) -> None:
        self.life = life
        self.writes: list[WritePoint] = []
        self.begun: int = 0
        self.is_dead: bool = False
        self.died_at: WritePoint | None = None
        self.crash_at: CrashPoint | None = None
        self.crash_after_effect: int | None = None
        self.effects: int = 0
        self._unrecorded: tuple[str | None] | None = None
        self.faults: Mapping[int, Fault] = {}
        self.delay_s: float = 0.0
        self.on_crash: Callable[[], None] | None = None
        self.on_write: Callable[[WritePoint, When], None] | None = None

    def check(self) -> None:
        """Let a dead process do nothing.

        Raises:
            SimulatedCrash: It is dead.
        """
        if self.is_dead:
            raise SimulatedCrash

    def die(self) -> None:
        """The process dies at this very moment. Returns; the caller is dead from here on."""
        if not self.is_dead:
            self.is_dead = True
            if self.on_crash is not None:
                self.on_crash()

    def crash(self) -> NoReturn:
        """The process dies at this very moment, in the caller.

        Raises:
            SimulatedCrash: Always.
        """
        self.die()
        raise SimulatedCrash

    def note_effect(self, workflow_id: str | None) -> None:
        """Something has happened outside, in a step of this workflow; `None`: in none."""
        if self.effects == self.crash_after_effect:
            self._unrecorded = (workflow_id,)
        self.effects += 1

    def begin(
        self, kind: WriteKind, workflow_id: str = "", batch: Batch | None = None
    ) -> tuple[WritePoint, Fault | None]:
        """A write is about to be made.

        Returns:
            Its number and content, for `end`; and what is to go wrong with it.

        Raises:
            SimulatedCrash: The process is dead, or died here.
        """
        self.check()
        point = WritePoint(self.life, self.begun, kind, workflow_id, batch)
        if self.crash_at == CrashPoint(point.number, "before") or self._would_record(point):
            self.died_at = point
            self.crash()
        if self.on_write is not None:
            self.on_write(point, "before")
            self.check()
        self.begun += 1
        fault = self.faults.get(point.number)
        if fault in ("refused", "full", "io"):
            self.writes.append(point)  # it has its number, though nothing came of it
        return point, fault

    def _would_record(self, point: WritePoint) -> bool:
        """Whether this may record the effect that is not to be recorded."""
        if self._unrecorded is None:
            return False
        (workflow_id,) = self._unrecorded
        return workflow_id is None or (point.kind == "batch" and point.workflow_id == workflow_id)

    def withdraw(self, point: WritePoint) -> None:
        """A write that had begun is not made; the next one has its number, if no other has begun meanwhile."""
        if self.begun == point.number + 1:
            self.begun = point.number

    @contextmanager
    def making(self, point: WritePoint) -> Generator[None]:
        """What fails inside withdraws this write."""
        try:
            yield
        except BaseException:
            self.withdraw(point)
            raise

    def end(self, point: WritePoint) -> None:
        """A write is durable.

        Raises:
            SimulatedCrash: The process died right after it, before anybody was told; or while it was made, and then what was
                made came too late for the disk that the next process finds.
        """
        self.check()
        self.writes.append(point)
        if self.on_write is not None:
            self.on_write(point, "after")
        if self.crash_at == CrashPoint(point.number, "after"):
            self.died_at = point
            self.crash()
        self.check()

    async def pause(self) -> None:
        """Take the time that a write takes; not interrupted by cancellation, as no write is."""
        if self.delay_s:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.delay_s)


current_gate: Final[ContextVar[WriteGate | None]] = ContextVar("perdure_testing_gate", default=None)
"""The simulated process that the caller is in: what is outside of it (`EffectLedger`) asks whether that is dead."""


class FaultyDriver(SingleWrites):
    """A driver that dies or fails where it is told to; it writes to another, such as a `MemoryDriver`.

        data = {}
        driver = FaultyDriver(MemoryDriver(data), crash_at=CrashPoint(2, "after"))
        await run_workflow("order-1", order, 7, driver)   # raises SimulatedCrash in the middle
        await run_workflow("order-1", order, 7, MemoryDriver(data))   # and this is the next process

    Once dead, every method raises `SimulatedCrash` and nothing reaches the inner driver, but for `aclose`.

    Args:
        inner: What really writes.
        crash_at: Where the process is to die; `None` for nowhere.
        faults: What goes wrong with the writes of these numbers, from 0.
        delay: Seconds that each write takes, of Trio's clock.
        atomic: Whether batches are all or nothing. With `False` the engine cuts large batches into pieces, each of them a
            write, so that a crash between two of them tears the batch. `None`: as the inner driver has it.
        gate: The process whose writes these are, when it has several drivers; then the arguments above are the gate's to say.
        workflow_id: What the gate is told.

    Raises:
        InvalidArgumentError: An argument is wrong.
    """

    def __init__(
        self,
        inner: Driver,
        *,
        crash_at: CrashPoint | None = None,
        faults: Mapping[int, Fault] | None = None,
        delay: float = 0.0,
        atomic: bool | None = None,
        gate: WriteGate | None = None,
        workflow_id: str = "",
        kind: Literal["batch", "own"] = "batch",
    ) -> None:
        if gate is None:
            check_driver(inner)
            check_crash(crash_at)
            check_faults(faults)
            gate = WriteGate()
            gate.crash_at, gate.faults = crash_at, faults or {}
            gate.delay_s = check_duration(delay, "delay", "delay=0.5")
        elif not isinstance(gate, WriteGate):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(
                f"gate is the WriteGate of a process, not {gate!r:.80}; write gate=WriteGate(), or leave gate= out"
            )
        elif crash_at is not None or faults or delay:
            raise InvalidArgumentError("with gate= say what goes wrong on it: gate.crash_at = CrashPoint(3, 'after')")
        self.inner = inner
        self.gate = gate
        self._atomic = atomic
        self._workflow_id = workflow_id
        self._kind: Literal["batch", "own"] = kind

    def __repr__(self) -> str:
        return (
            f"<FaultyDriver over {self.inner!r}, {len(self.gate.writes)} writes{', dead' if self.gate.is_dead else ''}>"
        )

    @property
    def writes(self) -> Sequence[WritePoint]:
        """The writes made, in order."""
        return self.gate.writes

    @property
    def atomic_batch(self) -> bool:
        """Whether batches are all or nothing."""
        return self.inner.atomic_batch if self._atomic is None else self._atomic

    @property
    def value_bytes_max(self) -> int:
        """As the inner driver's."""
        return self.inner.value_bytes_max

    async def get(self, key: bytes) -> bytes | None:
        """See `Driver.get`."""
        self.gate.check()
        return await self.inner.get(key)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """See `Driver.list`."""
        self.gate.check()
        return await self.inner.list(prefix)

    async def get_alarm(self, workflow_id: str) -> int | None:
        """See `Driver.get_alarm`."""
        self.gate.check()
        return await self.inner.get_alarm(workflow_id)

    async def batch(self, batch: Batch) -> None:
        """See `Driver.batch`; one write."""
        gate = self.gate
        gate.check()
        await gate.pause()
        point, fault = gate.begin(self._kind, self._workflow_id, batch)
        if fault is None:
            with gate.making(point):
                await self.inner.batch(batch)
            gate.end(point)
        else:
            await self._fail(fault, point, batch)

    def batch_nowait(self, batch: Batch) -> bool:
        """See `NowaitDriver.batch_nowait`; refers to `batch` where the inner driver does, or a fault is due."""
        gate, inner_nowait = self.gate, nowait_batch(self.inner)
        if inner_nowait is None or gate.delay_s or gate.begun in gate.faults:
            return False
        point, _ = gate.begin(self._kind, self._workflow_id, batch)
        with gate.making(point):
            is_written = inner_nowait(batch)
        if is_written:
            gate.end(point)
        else:
            gate.withdraw(point)  # it comes again, as `batch`
        return is_written

    async def _fail(self, fault: Fault, point: WritePoint, batch: Batch) -> NoReturn:
        match fault:
            case "refused" | "full" | "io":
                raise BatchRefusedError(f"simulated: {_REASONS[fault]}; nothing was written")
            case "lost" | "applied":
                if fault == "applied":
                    with self.gate.making(point):
                        await self.inner.batch(batch)
                self.gate.end(point)
                await self.inner.aclose()
                raise CommitUnknownError(f"simulated: {_REASONS[fault]}")

    async def aclose(self) -> None:
        """Close the inner driver, also of a dead process: what it holds is this process's, not the simulated one's."""
        await self.inner.aclose()


_REASONS = {
    "refused": "the batch was refused",
    "full": "database or disk is full",
    "io": "disk I/O error",
    "lost": "the commit's outcome is unknown",
    "applied": "the commit's outcome is unknown",
}
