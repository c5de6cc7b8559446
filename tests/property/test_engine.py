"""Random small programs, stopped and crashed anywhere: the same output and the same history as if never stopped.

1. A program is data; one workflow function interprets it, so that what differs between two runs is only how they went.
2. What comes from outside depends on where the workflow is (a message arrives when a read waits for it), never on how
   often it was stopped. Failures of steps depend on the attempt's number.
3. Trio's scheduler is seeded with a drawn number, so that a failing example can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import trio
from harness import DriverKind, Host, MovableClock, Namespace, SimulatedCrashError, host
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from perdure.testing import run_virtual
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    RunMode,
    StepError,
    WorkflowResult,
    WorkflowState,
    current_step,
)

NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Step:
    """A step that fails `failures` times, then returns `value`; or for good."""

    value: Any
    failures: int
    ending: Literal["works", "is exhausted", "is critical"]
    is_ephemeral: bool


@dataclass(frozen=True)
class Sleep:
    """A sleep."""

    seconds: float


@dataclass(frozen=True)
class Read:
    """A queue read; when it waits, messages of other names come, and then one that it takes, or none if it may time out."""

    names: tuple[str, ...] | None
    count: int
    timeout: float | None
    strangers: int
    arrives: bool


@dataclass(frozen=True)
class Loop:
    """A loop over a body, `count` times."""

    body: tuple[Any, ...]
    count: int
    prune_interval: int
    history_size: int | None


Program = tuple[Any, ...]

steps = st.builds(
    Step,
    st.none() | st.integers(-5, 2**40) | st.text(max_size=3) | st.lists(st.booleans(), max_size=2),
    st.integers(0, 2),
    st.sampled_from(["works", "works", "works", "is exhausted", "is critical"]),
    st.booleans(),
)
sleeps = st.builds(Sleep, st.sampled_from([0, 0.001, 1, 3600.5]))
reads = st.builds(
    Read,
    st.none() | st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True).map(tuple),
    st.integers(1, 3),
    st.none() | st.sampled_from([0, 5, 3600]),
    st.integers(0, 2),
    st.booleans(),
)


def loops(body: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Loops over such bodies."""
    return st.builds(
        Loop,
        st.lists(body, max_size=3).map(tuple),
        st.integers(1, 4),
        st.integers(1, 3),
        st.none() | st.integers(0, 3),
    )


leaves = steps | sleeps | reads
programs = st.lists(leaves | loops(leaves | loops(leaves)), min_size=1, max_size=5).map(tuple)


@dataclass(frozen=True)
class Disturbance:
    """How a run is disturbed: restarts at stops, and deaths at writes, each counted from the one before."""

    restarts: tuple[bool, ...] = ()
    crashes: tuple[tuple[int, Literal["before", "after"]], ...] = ()


disturbances = st.builds(
    Disturbance,
    st.lists(st.booleans(), max_size=12).map(tuple),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["before", "after"])), max_size=4).map(tuple),
)


@dataclass
class Interpreter:
    """Runs a program as a workflow; outlives its processes, as the world outside does."""

    program: Program
    waiting: tuple[tuple[Any, ...], Read] | None = None
    effects: list[tuple[Any, ...]] = field(default_factory=list)

    async def workflow(self, ctx: Context, _: Any) -> list[Any]:
        return await self.run(ctx, self.program, ())

    async def run(self, ctx: Context, program: Program, path: tuple[Any, ...]) -> list[Any]:
        return [await self.one(ctx, part, f"n{number}", (*path, number)) for number, part in enumerate(program)]

    async def one(self, ctx: Context, part: Any, name: str, path: tuple[Any, ...]) -> Any:
        match part:
            case Step():
                return await self.step(ctx, part, name, path)
            case Sleep():
                return (await ctx.sleep(name, part.seconds)).value
            case Read():
                self.waiting = path, part
                messages = await ctx.queue.next_batch(name, names=part.names, count=part.count, timeout=part.timeout)
                self.waiting = None
                return [[message.name, message.body, message.id] for message in messages]
            case Loop():

                async def body(inner: Context, done: list[Any]) -> Any:
                    done = [*done, await self.run(inner, part.body, (*path, len(done)))]
                    return Break(done) if len(done) == part.count else Continue(done)

                return await ctx.loop(
                    name,
                    body,
                    list[Any](),
                    history_prune_interval=part.prune_interval,
                    history_size=part.history_size,
                )
            case _:
                raise AssertionError(part)

    async def step(self, ctx: Context, part: Step, name: str, path: tuple[Any, ...]) -> Any:
        async def function() -> Any:
            self.effects.append(path)
            await trio.lowlevel.checkpoint()
            attempt = current_step().attempt
            if part.ending == "is critical" and attempt > part.failures:
                raise CriticalError("for good")
            if part.ending == "is exhausted" or attempt <= part.failures:
                raise ConnectionError(f"attempt {attempt}")
            return part.value

        try:
            return await ctx.step(name, function, max_retries=2, ephemeral=part.is_ephemeral)
        except StepError as failure:
            return [type(failure).__name__, failure.attempts, str(failure.error)]


async def disturbed(
    program: Program, namespace: Namespace, mode: RunMode, disturbance: Disturbance
) -> tuple[Any, list[Any], list[tuple[Any, ...]]]:
    """Run a program to its end, disturbed; returns output, history and effects."""
    world = Interpreter(program)
    clock = MovableClock()
    restarts = iter(disturbance.restarts)
    crashes = iter(disturbance.crashes)
    while True:
        driver = await namespace.restart()
        driver.die_at = next(crashes, None)
        try:
            async with host(namespace, mode, clock=clock, seed=random.randrange(2**32)) as process:
                output = await _to_the_end(process, world, restarts)
        except BaseException as error:
            if not _is_crash(error):
                raise
        else:
            if output is not None:
                break
    history = await _outline(namespace)
    await namespace.close()
    return output[0], history, world.effects


async def _to_the_end(process: Host, world: Interpreter, restarts: Iterator[bool]) -> tuple[Any] | None:
    """Run until the workflow has ended (its output in a tuple), or the process ends between two stops (`None`)."""
    arrivals: dict[Any, int] = {}
    while True:
        stopped = await process.stop(world.workflow)
        if stopped.state is WorkflowState.COMPLETED:
            return (stopped.output,)
        if next(restarts, False):
            return None
        await _go_on(process, world, stopped, arrivals)


async def _go_on(process: Host, world: Interpreter, stopped: WorkflowResult, arrivals: dict[Any, int]) -> None:
    """Let happen what the workflow waits for."""
    if stopped.waiting_for_messages is not None:
        assert world.waiting is not None
        path, read = world.waiting
        if read.arrives or read.timeout is None:
            wanted = read.names or NAMES
            strangers = [] if read.names is None else [name for name in NAMES if name not in read.names]
            for number in range(read.strangers if strangers else 0):
                await process.send(strangers[0], f"stranger {number}", id=f"{path}-{number}")
            await process.send(wanted[-1], [*path], id=f"{path}")
            return
    assert stopped.sleep_until is not None, stopped
    await process.advance(max(0.001, stopped.sleep_until - process.clock.now_ms() / 1000))


async def _outline(namespace: Namespace) -> list[Any]:
    """History without ids and times."""
    outline: list[Any] = []
    for entry in (await namespace.snapshot()).entries:
        data = {key: value for key, value in entry.data.items() if key != "deadline_ms"}
        if isinstance(data.get("body"), dict):
            data["body"] = {key: data["body"][key] for key in ("id", "name", "body", "completed")}
        metadata = entry.metadata
        outline.append(
            (entry.path, entry.kind, data, metadata and (metadata.status, metadata.attempts, metadata.error))
        )
    return outline


def _is_crash(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_crash(part) for part in error.exceptions)
    return isinstance(error, SimulatedCrashError)


def _run(seed: int, main: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    random.seed(seed)
    return run_virtual(main, *args, seed=seed)


@pytest.mark.parametrize("mode", ["yield", "live"])
@pytest.mark.parametrize("driver_kind", ["memory", "sqlite"])
@given(program=programs, disturbance=disturbances, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_disturbed_run_ends_as_an_undisturbed_one_with_the_same_history(
    driver_kind: DriverKind, mode: RunMode, tmp_path: Path, program: Program, disturbance: Disturbance, seed: int
) -> None:
    """S18, S23, S27: random programs, restarts and deaths at writes, in both modes: as an undisturbed live run."""

    def namespace() -> Namespace:
        return Namespace(driver_kind, tmp_path, durability="normal")

    output, history, effects = _run(seed, disturbed, program, Namespace("memory", tmp_path), "live", Disturbance())
    undisturbed = _run(seed + 1, disturbed, program, namespace(), mode, Disturbance())
    assert undisturbed == (output, history, effects)
    found = _run(seed + 2, disturbed, program, namespace(), mode, disturbance)
    assert found[:2] == (output, history)
    assert set(found[2]) == set(effects)
    assert len(found[2]) >= len(effects)
    event(f"{len(disturbance.crashes)} crashes")
