"""A supervisor in virtual time, whose block is a process: it ends where the process dies.

1. Time is Trio's own, under an autojump clock: whenever every task waits, it jumps to the next deadline. So nothing may wait
   for a thread: storage works in place, and so do plain functions of steps.
2. A crash cancels the block and everything in it. What a process raises because it is dead says nothing, and goes no further;
   what its block raises of itself, such as a failed `assert`, comes out all the same: a test must not pass by dying.
3. Engine, drivers and supervisor are the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from math import inf
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack, cast
from weakref import WeakKeyDictionary

import trio
from trio.testing import MockClock

from perdure.actors import Supervisor, WorkflowLike, open_supervisor
from perdure.storage import PerdureError
from perdure.testing.amnesia import current_traces
from perdure.testing.checks import check_outside_of_trio
from perdure.testing.clock import SimulatedClock
from perdure.testing.disk import SimulatedDisk, current_disk
from perdure.testing.errors import SimulatedCrash, VirtualTimeError
from perdure.testing.faults import CrashPoint, Fault, check_crash, check_effect_number, check_faults, current_gate
from perdure.testing.scheduling import seeded_scheduling
from perdure.testing.strays import Watch
from perdure.workflow import InvalidArgumentError, definition_of
from perdure.workflow.checks import check_function
from perdure.workflow.threads import HoldClock, virtual_time

__all__ = [
    "OPTIONS",
    "RESERVED",
    "check_computer",
    "check_options",
    "holding",
    "is_under_asyncio",
    "run_virtual",
    "virtual_supervisor",
]

_holders: Final[WeakKeyDictionary[MockClock, int]] = WeakKeyDictionary()
_thresholds: Final[WeakKeyDictionary[MockClock, float]] = WeakKeyDictionary()

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@asynccontextmanager
async def virtual_supervisor(
    workflows: Iterable[WorkflowLike] = (),
    *,
    disk: SimulatedDisk | None = None,
    clock: SimulatedClock | None = None,
    crash_at: CrashPoint | None = None,
    crash_after_effect: int | None = None,
    faults: Mapping[int, Fault] | None = None,
    **options: Any,
) -> AsyncGenerator[Supervisor]:
    """Host workflows in virtual time: a year of sleep passes in milliseconds, on the real engine and supervisor.

        disk, clock = SimulatedDisk(), SimulatedClock()
        async with virtual_supervisor([order], disk=disk, clock=clock) as supervisor:
            handle = await supervisor.spawn(order, "order-1", 7)
            await trio.sleep(3600)
            disk.crash()
        async with virtual_supervisor([order], disk=disk, clock=clock) as supervisor:
            assert await (await supervisor.get("order-1")).result() == "shipped"

    The block is one process. It ends in order like that of `open_supervisor`, or where the process dies: at `disk.crash()`, or
    at `crash_at` or `crash_after_effect`; then the rest of the block is cancelled, nothing of it reaches the disk or an
    `EffectLedger`, and the program goes on after the block. `disk.has_crashed` says which it was. What the block itself raises
    comes out, of a dead process too: a failed `assert` after the crash, or in a `finally`.

    Globals of modules outlive the block, which those of a real process do not: what only a dead process knew is found by
    `explore_crashes`, by `Simulation` and by `WorkflowMachine`.

    Plain functions of steps run in place, on Trio's thread: they cannot use `trio.from_thread`. While something is done by
    `to_asyncio`, no virtual time passes.

    Args:
        workflows: As for `open_supervisor`.
        disk: What outlives the block; a new one in memory unless given.
        clock: The wall clock, which can be moved; a new one unless given. Give both to the block of the next process.
        crash_at: At which of its writes the process dies; `None`: at none.
        crash_after_effect: After which of the effects that an `EffectLedger` counts in this process, from 0, it dies: before the
            next transition of that workflow, so that it is not recorded. `None`: after none.
        faults: What goes wrong with its writes of these numbers, from 0.
        options: Anything else that `open_supervisor` takes, but for `clock` and `durability`.

    Raises:
        EffectThreadError: The block ended, and a thread that knows nothing of it had an effect meanwhile.
        VirtualTimeError: Trio runs on real time, or on a `MockClock` that does not jump by itself.
        InvalidArgumentError: An argument is wrong.
    """
    check_crash(crash_at)
    check_faults(faults)
    check_options(options)
    check_computer(disk, clock)
    hold_clock = _check_clock()
    check_effect_number(crash_after_effect)
    disk = SimulatedDisk() if disk is None else disk
    clock = SimulatedClock() if clock is None else clock
    store = disk.boot()
    gate = store.gate
    gate.crash_at, gate.crash_after_effect, gate.faults = crash_at, crash_after_effect, faults or {}
    workflows = list(workflows) if isinstance(workflows, Iterable) else workflows  # pyright: ignore[reportUnnecessaryIsInstance]
    process = trio.CancelScope()
    watch = Watch()
    disk_token, gate_token = current_disk.set(disk), current_gate.set(gate)
    died = gate.on_crash

    def crash() -> None:
        if died is not None:
            died()
        process.cancel()
        if running is not None:
            running.hurry()

    running: Supervisor | None = None
    own: BaseException | None = None
    gate.on_crash = crash
    try:
        with process, _traced(workflows), virtual_time(hold_clock):
            async with open_supervisor(store, workflows, clock=clock, **options) as running:
                running._residents.restarts.seed(gate.life)  # pyright: ignore[reportPrivateUsage]
                try:
                    yield running
                except BaseException as error:
                    own = _of_its_own(error)
                    raise
    except BaseException as error:
        if not gate.is_dead or _is_interruption(error):
            raise
        if own is not None:
            raise own from None
        # A dead process tells nobody anything. But whoever cancelled us from outside is still owed a cancellation.
        await trio.lowlevel.checkpoint_if_cancelled()
    finally:
        watch.end()
        clock.now_ms()  # so that it goes on from here in the next Trio run
        current_disk.reset(disk_token)
        current_gate.reset(gate_token)
        await store.aclose()
    watch.check()


def _traced(workflows: Iterable[WorkflowLike]) -> AbstractContextManager[None]:
    traces = current_traces.get()
    if traces is None or not isinstance(workflows, list):  # then the supervisor says what is wrong with them
        return nullcontext()
    return traces.watch([definition_of(each).function for each in workflows])


def _of_its_own(error: BaseException) -> BaseException | None:
    """What of an error of the block a death does not explain; what Perdure itself raises in a dead process, it does."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return group.subgroup(lambda each: not isinstance(each, BaseExceptionGroup) and _of_its_own(each) is not None)
    explained = (trio.Cancelled, SimulatedCrash, PerdureError, GeneratorExit)
    return None if isinstance(error, explained) and not isinstance(error, AssertionError) else error


def _is_interruption(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        parts: Sequence[BaseException] = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return any(map(_is_interruption, parts))
    return isinstance(error, KeyboardInterrupt)


RESERVED: Final = ("store", "durability")
"""What a simulated supervisor does not take, as the simulation has its own."""

OPTIONS: Final = tuple(signature(open_supervisor).parameters)[2:]
"""What a supervisor takes besides its store and its workflows, by name."""


def _unknown_option(name: str, value: object) -> str:
    return f"this does not take {name}=; of a supervisor it takes what open_supervisor does: {', '.join(OPTIONS)}"


def check_options(
    options: Mapping[str, Any], *reserved: str, unknown: Callable[[str, object], str] = _unknown_option
) -> None:
    """What is passed on to `open_supervisor`.

    Args:
        options: What was given.
        reserved: What the caller gives besides, and nobody else may.
        unknown: What to say of an option that there is not, by its name and value.

    Raises:
        InvalidArgumentError: It takes no such thing, or the simulation has one of its own.
    """
    for name, value in options.items():
        if name in (*RESERVED, *reserved):
            raise InvalidArgumentError(f"the simulation has its own {name}; leave {name}= out")
        if name not in OPTIONS:
            raise InvalidArgumentError(unknown(name, value))


def check_computer(disk: object, clock: object) -> None:
    """What outlives a process, each `None` or simulated.

    Raises:
        InvalidArgumentError: One of them is something else.
    """
    if not isinstance(disk, SimulatedDisk | None):
        raise InvalidArgumentError(f"disk is a SimulatedDisk, not {disk!r:.80}; write disk=SimulatedDisk({disk!r:.80})")
    if not isinstance(clock, SimulatedClock | None):
        raise InvalidArgumentError(
            f"clock is a SimulatedClock, which runs on virtual time, not {clock!r:.80}; write clock=SimulatedClock()"
        )


def _check_clock() -> HoldClock:
    try:
        clock = trio.lowlevel.current_clock()
    except RuntimeError:
        if is_under_asyncio():
            raise VirtualTimeError(
                "virtual time needs Trio, and this test runs under asyncio: a plugin has claimed it (pytest-asyncio's "
                "asyncio_mode=auto, or a marker asyncio or anyio). Write a plain `def test_...()` that calls run_virtual(main); "
                "or, if it is anyio's, let it run on Trio: a fixture `anyio_backend` that returns "
                "('trio', {'clock': trio.testing.MockClock(autojump_threshold=0)}). Only explore_crashes runs anywhere"
            ) from None
        raise VirtualTimeError(
            "virtual time needs Trio: in a test, write `async def test_...()`; elsewhere run_virtual(main)"
        ) from None
    if not isinstance(clock, MockClock) or clock.autojump_threshold == inf:
        raise VirtualTimeError(
            "this runs on real time, and a year of sleep would take one; in a test take pytest-trio's fixture "
            "`autojump_clock`, or with anyio a fixture `anyio_backend` that returns ('trio', {'clock': "
            "trio.testing.MockClock(autojump_threshold=0)}); elsewhere run_virtual(main) instead of trio.run(main)"
        )
    return partial(holding, clock)


def is_under_asyncio() -> bool:
    """Whether the caller is in an event loop of asyncio; does not import it."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def holding(clock: MockClock) -> Generator[None]:
    """Stop the clock from jumping while somebody waits for a thread; any number of them may overlap."""
    _holders[clock] = _holders.get(clock, 0) + 1
    if _holders[clock] == 1:
        _thresholds[clock] = clock.autojump_threshold
        clock.autojump_threshold = inf
    try:
        yield
    finally:
        _holders[clock] -= 1
        if not _holders[clock]:
            clock.autojump_threshold = _thresholds.pop(clock)


def run_virtual(fn: Callable[[Unpack[Ts]], Awaitable[T]], *args: Unpack[Ts], seed: int = 0) -> T:
    """`trio.run` in virtual time, with tasks in an order that is drawn from a seed.

    Args:
        fn: An async function.
        args: Its arguments.
        seed: Of the scheduler; under Hypothesis, drawn: `st.integers(0, 2**32 - 1)`.

    Returns:
        What it returned.

    Raises:
        VirtualTimeError: It is called within a Trio run.
    """
    check_function(fn, "what is run", "run_virtual(main)")
    check_outside_of_trio("run_virtual", "write `await main()` here, or call run_virtual in a plain `def test_...()`")
    with seeded_scheduling(seed):
        return trio.run(fn, *args, clock=MockClock(autojump_threshold=0))
