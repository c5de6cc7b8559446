"""A simulated computer: processes run on it one after the other, each in a Trio run of its own, and can be killed at any write.

1. Nothing of a process survives but the disk, the clock, and what is outside (`EffectLedger`): each is its own `trio.run`.
2. The same seed, code and crash point give the same run, write by write.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from perdure.actors import Supervisor, WorkflowInfo, WorkflowLike
from perdure.testing.clock import SimulatedClock
from perdure.testing.disk import SimulatedDisk
from perdure.testing.faults import CrashPoint, Fault, WritePoint
from perdure.testing.strays import watching
from perdure.testing.virtual import check_options, run_virtual, virtual_supervisor
from perdure.workflow import InvalidArgumentError

__all__ = ["Incarnation", "Simulation", "list_all"]

T = TypeVar("T")

_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Incarnation(Generic[T]):
    """What became of one process.

    Attributes:
        life: Its number on the disk, from 0.
        value: What it returned; `None` if it died.
        has_crashed: Whether it died.
        writes: What it wrote, in order.
    """

    life: int
    value: T | None
    has_crashed: bool
    writes: Sequence[WritePoint]


class Simulation:
    """A computer with a disk and a clock, on which processes with a supervisor run one after the other.

        simulation = Simulation([order])
        simulation.run(begin, crash_at=CrashPoint(2, "after"))
        assert simulation.run(finish).value == "shipped"

    Args:
        workflows: As for `open_supervisor`.
        disk: A new one in memory unless given.
        clock: A new one unless given.
        options: What every process gives to `open_supervisor` besides.
    """

    def __init__(
        self,
        workflows: Iterable[WorkflowLike],
        *,
        disk: SimulatedDisk | None = None,
        clock: SimulatedClock | None = None,
        **options: Any,
    ) -> None:
        check_options(options, "clock", "disk")
        self.workflows: list[WorkflowLike] = list(workflows)
        self.disk: SimulatedDisk = SimulatedDisk() if disk is None else disk
        self.clock: SimulatedClock = SimulatedClock() if clock is None else clock
        self.options = options

    def run(
        self,
        process: Callable[[Supervisor], Awaitable[T]],
        *,
        crash_at: CrashPoint | None = None,
        crash_after_effect: int | None = None,
        faults: Mapping[int, Fault] | None = None,
        seed: int = 0,
    ) -> Incarnation[T]:
        """One process: a supervisor is opened on what is on the disk, and `process` called with it. Not within Trio.

        Args:
            process: What the process does; its end is the process's, in order.
            crash_at: At which of its writes it dies.
            crash_after_effect: After which of its effects in an `EffectLedger`, from 0, it dies, before that is recorded.
            faults: What goes wrong with its writes of these numbers.
            seed: Of the scheduler.

        Raises:
            Exception: What `process` or the supervisor raised, unless it did so because the process had died.
            InvalidArgumentError: An argument is wrong.
        """

        async def live() -> T | None:
            value: T | None = None
            async with virtual_supervisor(
                self.workflows,
                disk=self.disk,
                clock=self.clock,
                crash_at=crash_at,
                crash_after_effect=crash_after_effect,
                faults=faults,
                **self.options,
            ) as supervisor:
                running = process(supervisor)
                if not inspect.isawaitable(running):  # pyright: ignore[reportUnnecessaryComparison]
                    raise InvalidArgumentError(
                        f"a process is a coroutine function, not {process!r:.80}; write async def live(supervisor): ..."
                    )
                value = await running
            return None if self.disk.has_crashed else value

        value = run_virtual(live, seed=seed)
        gate = self.disk.gate
        return Incarnation(gate.life, value, gate.is_dead, gate.writes)

    def run_to_end(
        self,
        process: Callable[[Supervisor], Awaitable[T]],
        *,
        crashes: Sequence[CrashPoint] = (),
        seed: int = 0,
    ) -> Sequence[Incarnation[T]]:
        """The same process again and again, dying each time where it is told to, and at last not at all.

        Args:
            process: What each does.
            crashes: Where they die, in order; for Hypothesis, `crash_plans()`.
            seed: Of the scheduler; each process has another one, made of it.

        Returns:
            What became of each, in order; the last one's `value` is what it came to. A process that makes fewer writes than
            it was to die after is the last.

        Raises:
            Exception: What `process` or the supervisor raised, unless the process died first.
        """
        lived: list[Incarnation[T]] = []
        with watching():
            for number, crash_at in enumerate([*crashes, None]):
                lived.append(self.run(process, crash_at=crash_at, seed=seed + number))
                if not lived[-1].has_crashed:
                    break
        return lived


async def list_all(supervisor: Supervisor) -> list[WorkflowInfo]:
    """All workflows of a supervisor, in order of creation."""
    found: list[WorkflowInfo] = []
    while page := await supervisor.list(after=found[-1] if found else None, limit=_PAGE):
        found += page
        if len(page) < _PAGE:
            break
    return found
