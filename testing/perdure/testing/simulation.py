"""A simulated computer: processes run on it one after the other, each in a Trio run of its own, and can be killed at any write.

1. Each process is its own `trio.run`, and does not find what the one before it left in plain globals of the workflows' modules
   (amnesia.py says which these are). What survives is the disk, the clock, what is outside (`EffectLedger`), and what the test
   itself did in between.
2. The same seed, code and crash point give the same run, write by write.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Generic, TypeVar

from perdure.actors import Supervisor, WorkflowInfo, WorkflowLike
from perdure.testing.amnesia import process_traces
from perdure.testing.checks import check_modules, check_outside_of_trio, check_several
from perdure.testing.clock import SimulatedClock
from perdure.testing.disk import SimulatedDisk
from perdure.testing.faults import CrashPoint, Fault, WritePoint, check_crash
from perdure.testing.strays import watching
from perdure.testing.virtual import check_computer, check_options, run_virtual, virtual_supervisor
from perdure.workflow import InvalidArgumentError, definition_of

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

    What a process left in plain globals of the workflows' modules (numbers, text, lists, dictionaries and the like) can be looked
    at until the next one begins, which does not find it. So count what happens outside in an `EffectLedger`, or in a module of
    the test's own.

    Args:
        workflows: As for `open_supervisor`.
        disk: A new one in memory unless given.
        clock: A new one unless given.
        keep_globals: Leave the globals as they are. Then what only a dead process knew is not found.
        modules: Further modules with globals that end with a process.
        options: What every process gives to `open_supervisor` besides.

    Raises:
        InvalidArgumentError: An argument is wrong.
    """

    def __init__(
        self,
        workflows: Iterable[WorkflowLike],
        *,
        disk: SimulatedDisk | None = None,
        clock: SimulatedClock | None = None,
        keep_globals: bool = False,
        modules: Iterable[ModuleType] = (),
        **options: Any,
    ) -> None:
        check_options(options, "clock", "disk")
        check_computer(disk, clock)
        self.workflows: list[WorkflowLike] = list(check_several(workflows, "workflows", "Simulation([order])"))
        self.disk: SimulatedDisk = SimulatedDisk() if disk is None else disk
        self.clock: SimulatedClock = SimulatedClock() if clock is None else clock
        self.options = options
        self._functions = [definition_of(each).function for each in self.workflows]
        self._modules = check_modules(modules)
        self._keeps_globals = keep_globals

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
            VirtualTimeError: It is called within Trio.
        """
        check_outside_of_trio(
            "a Simulation's process", "run it in a plain `def test_...()`, or take `async with virtual_supervisor(...)`"
        )

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

        with self._forgetful():
            value = run_virtual(live, seed=seed)
        gate = self.disk.gate
        return Incarnation(gate.life, value, gate.is_dead, gate.writes)

    @contextmanager
    def _forgetful(self) -> Generator[None]:
        """A process, which knows nothing of the one before, whichever computer that was on."""
        if self._keeps_globals:
            yield
            return
        process_traces.forget()
        with process_traces.watch(self._functions, self._modules):
            yield

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
            InvalidArgumentError: An argument is wrong.
            VirtualTimeError: It is called within Trio.
        """
        crashes = check_several(crashes, "crashes", "crashes=[CrashPoint(3, 'after')]")
        for each in crashes:
            check_crash(each)
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
