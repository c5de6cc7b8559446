"""A Hypothesis state machine in which a rule is one process: what outlives them is a disk and a clock.

1. A rule is one `trio.run` in virtual time, in an order of tasks that is drawn, on one disk and one clock. It may die at a
   write, which is drawn too; what dies is the process, never the example.
2. Invariants look at what is durable between two processes, when nothing runs.
3. In the end one more process runs without a fault until nothing is left to do: once faults stop, there is progress.
4. A failure is what a rule, an invariant or the end raises. What is printed of the least one is its rules, each with what
   became of its process.

Rejected: one Trio run for the whole example, with rules as tasks in it. A process that died could leave tasks, thread-local
state and module globals of Trio behind, and an invariant would see a moment in the middle of something.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import lru_cache
from inspect import iscoroutinefunction
from math import inf
from types import ModuleType
from typing import Any, ClassVar, Concatenate, Final, ParamSpec, TypeVar, cast

import trio

from perdure.actors import Supervisor, WorkflowInfo, WorkflowLike
from perdure.testing.clock import SimulatedClock
from perdure.testing.disk import SimulatedDisk
from perdure.testing.extras import missing_extra
from perdure.testing.faults import CrashPoint, WritePoint
from perdure.testing.ledger import turn_ledgers_to
from perdure.testing.simulation import Incarnation, Simulation, list_all
from perdure.workflow import InvalidArgumentError, WorkflowSnapshot, WorkflowState

try:
    from hypothesis import Phase, note, settings
    from hypothesis import strategies as st
    from hypothesis.stateful import Bundle, RuleBasedStateMachine, multiple, rule, run_state_machine_as_test

    from perdure.testing.strategies import ProcessPlan, process_plans
except ImportError as _error:
    raise missing_extra("WorkflowMachine", "hypothesis") from _error

__all__ = ["WorkflowMachine", "process_rule"]

P = ParamSpec("P")
T = TypeVar("T")

_LOOKS_MAX: Final = 1000
"""How often the last process looks whether anything is left to do."""
_LOOK_S: Final = 0.1
_LOOK_MAX_S: Final = 60.0


class WorkflowMachine(RuleBasedStateMachine):
    """Subclass it, say which workflows there are, and write what processes do; Hypothesis tries orders, crashes and schedules.

        class Shop(WorkflowMachine):
            workflows = [order]

            @process_rule(cents=st.integers(1, 100))
            async def buy(self, supervisor, cents):
                await supervisor.spawn(order, f"order-{cents}", cents)

            @invariant()
            def nobody_pays_twice(self):
                assert ...

        TestShop = Shop.TestCase

    Rules and invariants of Hypothesis's own (`rule`, `initialize`, `invariant`, `precondition`, bundles) go along; they run
    between processes. A subclass with an `__init__` or a `teardown` calls the one of this class.

    `TestCase` leaves out Hypothesis's phase `explain`: it would trace every line of every process, which takes many times as long
    as it took to find and shrink the example, only to name lines of libraries.

    Attributes:
        workflows: As for `open_supervisor`.
        options: What every process gives to `open_supervisor` besides.
        keep_globals: Whether a process finds what the one before left in globals, which real ones do not; see `Simulation`.
        modules: Further modules with globals that end with a process.
        must_come_to_rest: Whether the example fails unless each workflow ends, or waits for messages only, once no process dies
            any more. `False` where some go on for ever, or are to stop at a fault.
        simulation: The computer on which the processes run.
    """

    workflows: ClassVar[Iterable[WorkflowLike]] = ()
    options: ClassVar[Mapping[str, Any]] = {}
    keep_globals: ClassVar[bool] = False
    modules: ClassVar[Iterable[ModuleType]] = ()
    must_come_to_rest: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        if not self.workflows:
            raise InvalidArgumentError(
                f"{type(self).__name__} does not say which workflows there are; write workflows = [order] in the class"
            )
        self.simulation: Simulation = Simulation(
            self.workflows, keep_globals=self.keep_globals, modules=self.modules, **self.options
        )
        # An invariant that is asked before the first process is not to see the example before.
        turn_ledgers_to(self.simulation.disk)
        self._is_begun: bool | None = None
        self._surrounding = sys.exc_info()[1]

    @classmethod
    @lru_cache
    def _to_test_case(cls) -> Any:
        base: Any = super()
        made = base._to_test_case()

        def run(self: Any) -> None:
            chosen: settings = self.settings
            phases = [phase for phase in chosen.phases if phase is not Phase.explain]
            run_state_machine_as_test(cls, settings=settings(chosen, phases=phases))

        run.__dict__.update(made.runTest.__dict__)
        made.runTest = run
        return made

    @property
    def disk(self) -> SimulatedDisk:
        """What the processes leave."""
        return self.simulation.disk

    @property
    def clock(self) -> SimulatedClock:
        """The wall clock that they share."""
        return self.simulation.clock

    def stored(self) -> dict[str, WorkflowSnapshot]:
        """What is durable of each workflow, by id, as the next process will find it. Between processes only."""
        return self.disk.snapshots(codec=self.options.get("codec"))

    def process(
        self, body: Callable[[Supervisor], Awaitable[T]], plan: ProcessPlan | None = None, *, name: str = ""
    ) -> Incarnation[T]:
        """Run one process: what a `process_rule` does, for rules that start several, or look at what became of one.

        Args:
            body: What it does; if it dies meanwhile, it is cancelled.
            plan: How it lives and dies; `None`: nothing happens to it.
            name: What the story calls it.

        Raises:
            Exception: What the body or the supervisor raised, unless the process died first.
        """
        plan = ProcessPlan() if plan is None else plan
        if plan.clock_moves_s:
            self.clock.move(plan.clock_moves_s)

        async def live(supervisor: Supervisor) -> T:
            value = await body(supervisor)
            await trio.sleep(plan.stays_s)
            return value

        life = self.disk.lives
        try:
            lived = self.simulation.run(
                live,
                crash_at=plan.crash_at,
                crash_after_effect=plan.crash_after_effect,
                faults=plan.faults,
                seed=plan.seed,
            )
        except BaseException as error:
            note(_story(life, name, self.disk.gate.writes, f"ended with {type(error).__name__}: {error}"))
            raise
        how = f"died {_place(plan, self.disk.gate.died_at, lived.writes)}" if lived.has_crashed else "ended"
        note(_story(life, name, lived.writes, how))
        return lived

    async def check_end(self, supervisor: Supervisor) -> None:
        """Called in the last process, once nothing is left to do; for what must hold in the end. Override it."""

    def teardown(self) -> None:
        """Let a last process run to the end, unless the example has failed already."""
        if sys.exc_info()[1] is self._surrounding:
            self.process(self._end, name="the last one")

    async def _end(self, supervisor: Supervisor) -> None:
        busy = await come_to_rest(supervisor, self.clock)
        if self.must_come_to_rest:
            troubles = supervisor.troubles()
            for workflow_id, error in troubles.items():
                raise AssertionError(f"workflow {workflow_id!r} cannot go on: {error}") from error
            assert not busy, (
                f"these go on and on: {', '.join(f'{each.id!r} ({each.state.value})' for each in busy)}; where they are to, "
                "write must_come_to_rest = False in the class"
            )
        await self.check_end(supervisor)


async def come_to_rest(supervisor: Supervisor, clock: SimulatedClock) -> Sequence[WorkflowInfo]:
    """Let time pass until each workflow has ended, cannot go on, or waits for messages only. In virtual time.

    Returns:
        Those that still go on, after the last look.
    """
    busy: Sequence[WorkflowInfo] = ()
    pause_s = _LOOK_S
    for _ in range(_LOOKS_MAX):
        busy = [info for info in await list_all(supervisor) if not _is_at_rest(info)]
        if not busy:
            break
        due_s = min((_due_s(info) for info in busy), default=inf) - clock.now_ms() / 1000
        if due_s <= 0:
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MAX_S)
        else:
            await trio.sleep(due_s + 0.001)
            pause_s = _LOOK_S
    return busy


def _is_at_rest(info: WorkflowInfo) -> bool:
    if info.state.is_terminal or info.reason is not None:
        return True
    return info.state is WorkflowState.SLEEPING and info.next_wake is None


def _due_s(info: WorkflowInfo) -> float:
    return 0.0 if info.next_wake is None else info.next_wake


def _place(plan: ProcessPlan, died_at: WritePoint | None, writes: Sequence[WritePoint]) -> str:
    if died_at is None:
        return "of itself"
    if died_at in writes:
        return f"after write {died_at.number}, {_what(died_at)}"
    if plan.crash_at == CrashPoint(died_at.number, "before"):
        return f"before write {died_at.number}"
    return f"before write {died_at.number}, with its effect {plan.crash_after_effect} not recorded"


def _what(point: WritePoint) -> str:
    whose = f" of {point.workflow_id!r}" if point.workflow_id else ""
    return {
        "batch": f"a transition{whose}",
        "rows": f"the catalog's row{whose}",
        "create": f"the namespace{whose} made",
        "delete": f"the namespace{whose} deleted",
        "own": "the supervisor's own",
    }[point.kind]


def _story(life: int, name: str, writes: Sequence[WritePoint], how: str) -> str:
    return f"    # process {life}{f' ({name})' if name else ''}: {how}, having written {len(writes)} times"


def process_rule(
    _called_without: object = None,
    /,
    *,
    plan: st.SearchStrategy[ProcessPlan] | None = None,
    target: Bundle[Any] | None = None,
    targets: Sequence[Bundle[Any]] = (),
    **arguments: st.SearchStrategy[Any],
) -> Callable[
    [Callable[Concatenate[Any, Supervisor, P], Coroutine[Any, Any, Any]]],
    Callable[..., Any],
]:
    """A rule of a `WorkflowMachine` that is one process: `async def rule(self, supervisor, ...)`.

    Where a step is printed with `plan=None`, nothing was done in it.

    Args:
        plan: How the process lives and dies; `process_plans()` unless given.
        target: The bundle into which its result goes; also where the process died later, while it stayed.
        targets: Several of them.
        arguments: What is drawn for it, as for Hypothesis's `rule`.

    Raises:
        InvalidArgumentError: It does not decorate a coroutine function.
    """
    if _called_without is not None:
        raise InvalidArgumentError(
            "process_rule is called; write @process_rule(), or @process_rule(cents=st.integers(1, 100))"
        )
    if not isinstance(plan, st.SearchStrategy | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError(
            f"plan is a strategy, not {plan!r:.80}; write plan=process_plans(), or plan=st.just(...)"
        )
    nothing = cast("Any", multiple())
    wanted = targets if target is None else (target, *targets)

    def decorate(body: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        if not iscoroutinefunction(body):
            raise InvalidArgumentError(
                f"a process is written as a coroutine function, not {body!r:.80}; write async def buy(self, supervisor, ...)"
            )

        def run(self: WorkflowMachine, plan: ProcessPlan | None, **drawn: Any) -> Any:
            is_begun, self._is_begun = self._is_begun, None
            if not is_begun or plan is None:
                return nothing if wanted else None

            returned: list[Any] = []

            async def process(supervisor: Supervisor) -> None:
                returned.append(await body(self, supervisor, **drawn))

            self.process(process, plan, name=body.__name__)
            if not wanted:
                return None
            return returned[0] if returned else nothing

        run.__name__, run.__qualname__ = body.__name__, body.__qualname__
        run.__module__, run.__doc__ = body.__module__, body.__doc__
        drawn = {"plan": process_plans() if plan is None else plan, **arguments}
        if_begun = {name: each if isinstance(each, Bundle) else _if_begun(each) for name, each in drawn.items()}
        make: Any = rule  # its overloads know no arguments that are made up
        return cast("Callable[..., Any]", make(targets=wanted, **if_begun)(run))

    return decorate


# Hypothesis takes a step out of an example only where it is at most five choices, of which three are its own. So a step has a
# choice that comes first, the least of which is that it does nothing, and then makes no other.

_BEGUN: Final = [False] + [True] * 31


@st.composite
def _if_begun(draw: st.DrawFn, strategy: st.SearchStrategy[Any]) -> Any:
    machine = draw(st.runner())
    if machine._is_begun is None:  # whichever argument is drawn first
        machine._is_begun = draw(st.sampled_from(_BEGUN))
    return draw(strategy) if machine._is_begun else None
