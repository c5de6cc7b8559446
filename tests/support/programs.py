"""Programs: random trees of joins, races, loops and blocks as data, and the workflow that runs one; see test_branching.py.

1. The branch that wins a race is given by the program: the others fail, or end with a sleep that outlasts everything. In a
   tied race all branches are the same, so that its value is determined while its winner is not.
2. Every read has a message name of its own, so that who gets which message is determined too.
3. What a loser did is not determined; only that nothing of it happens once its race has returned.
4. Trio's scheduler is seeded with a drawn number, so that a failing example can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import trio
from harness import DriverKind, MovableClock, Namespace, SimulatedCrashError, host
from worlds import Path as Place
from worlds import World, outline

from perdure.testing import run_virtual
from perdure.workflow import (
    BlockFailure,
    Break,
    Context,
    Continue,
    CriticalError,
    JoinError,
    RaceError,
    RunMode,
    StepError,
    StepFailure,
    current_step,
)

__all__ = [
    "Block",
    "Disturbance",
    "Interpreter",
    "Join",
    "Loop",
    "Program",
    "Race",
    "Read",
    "Sleep",
    "Step",
    "check_disturbed",
    "run_disturbed",
]


def long_s(place: tuple[Any, ...], number: int) -> float:
    """A sleep that outlasts every part of a program, and every such sleep of a branch before it or further in."""
    return number * 1e4 * 20.0 ** (6 - len(place))


@dataclass(frozen=True)
class Step:
    """A step that takes a while, and fails once or for good."""

    seconds: int
    ending: Literal["works", "fails once", "fails", "is tried"]


@dataclass(frozen=True)
class Sleep:
    """A sleep."""

    seconds: int


@dataclass(frozen=True)
class Read:
    """A wait for a message, which comes."""


@dataclass(frozen=True)
class Loop:
    """A loop over a body."""

    body: tuple[Any, ...]
    count: int
    history_size: int


@dataclass(frozen=True)
class Block:
    """A try block."""

    body: tuple[Any, ...]


@dataclass(frozen=True)
class Join:
    """A join."""

    branches: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Race:
    """A race that the first branch wins, unless it fails; or, if it is tied, as many copies of the first as there are."""

    branches: tuple[tuple[Any, ...], ...]
    is_tied: bool


Program = tuple[Any, ...]


def mail_of(program: Program, place: tuple[Any, ...] = (), times: int = 1) -> Iterator[str]:
    """The name of every message that the program may wait for, as often as it may."""
    for number, part in enumerate(program):
        here = (*place, number)
        match part:
            case Read():
                yield from [name_of(here)] * times
            case Loop():
                yield from mail_of(part.body, here, times * part.count)
            case Block():
                yield from mail_of(part.body, here, times)
            case Join() | Race():
                for branch, body in enumerate(part.branches):
                    copies = range(len(part.branches)) if isinstance(part, Race) and part.is_tied else [branch]
                    if len(copies) == 1 or branch == 0:
                        for copy in copies:
                            yield from mail_of(body, (*here, f"b{copy}"), times)


def name_of(place: tuple[Any, ...]) -> str:
    return "mail for " + ".".join(map(str, place))


def is_tied(program: Program) -> bool:
    """Whether some race of the program has no winner that is given."""
    for part in program:
        match part:
            case Race() if part.is_tied and len(part.branches) > 1:
                return True
            case Join() | Race():
                if any(is_tied(body) for body in part.branches):
                    return True
            case Loop() | Block():
                if is_tied(part.body):
                    return True
    return False


class Interpreter:
    """Runs a program as a workflow."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.world = World(self._workflow, [(name, name) for name in mail_of(program)])
        self.lost: set[Place] = set()

    async def _workflow(self, world: World, ctx: Context) -> Any:
        try:
            return await self._run(ctx, self.program, ())
        except (StepError, JoinError, RaceError) as error:
            return f"{type(error).__name__}: {error}"

    async def _run(self, ctx: Context, program: Program, place: tuple[Any, ...]) -> list[Any]:
        return [await self._one(ctx, part, f"n{number}", (*place, number)) for number, part in enumerate(program)]

    async def _one(self, ctx: Context, part: Any, name: str, place: tuple[Any, ...]) -> Any:
        match part:
            case Step():
                return await self._step(ctx, part, name)
            case Sleep():
                return (await ctx.sleep(name, part.seconds)).value
            case Read():
                wanted = name_of(place)
                return len((await ctx.queue.next(name, names=[wanted])).body) > 0
            case Loop():
                return await self._loop(ctx, part, name, place)
            case Block():

                async def block(ctx: Context) -> Any:
                    return await self._run(ctx, part.body, place)

                outcome = await ctx.try_block(name, block)
                if isinstance(outcome, BlockFailure):
                    return [outcome.source, outcome.name, str(outcome.error), outcome.step and outcome.step.kind]
                return outcome.value
            case Join():

                async def branch(ctx: Context, body: Program, here: tuple[Any, ...]) -> Any:
                    return await self._run(ctx, body, here)

                return list(
                    (
                        await ctx.join(
                            name,
                            {
                                f"b{number}": partial(branch, body=body, here=(*place, f"b{number}"))
                                for number, body in enumerate(part.branches)
                            },
                        )
                    ).values()
                )
            case Race():
                return await self._race(ctx, part, name, place)
            case _:
                raise AssertionError(part)

    async def _step(self, ctx: Context, part: Step, name: str) -> Any:
        async def function() -> str:
            self.world.begin()
            await trio.sleep(part.seconds)
            if part.ending in ("fails", "is tried"):
                raise CriticalError("for good")
            if part.ending == "fails once" and current_step().attempt == 1:
                raise ConnectionError("once")
            return "worked"

        path = (*ctx._scope.activation.history.path_of(ctx._scope.location), name)
        if part.ending == "is tried":
            failure = await ctx.try_step(name, function)
            assert isinstance(failure, StepFailure)
            self.world.acknowledge(*path)
            return [failure.kind, failure.attempts, str(failure.error)]
        try:
            value = await ctx.step(name, function)
        except StepError:
            self.world.acknowledge(*path)
            raise
        self.world.acknowledge(*path)
        return value

    async def _loop(self, ctx: Context, part: Loop, name: str, place: tuple[Any, ...]) -> Any:
        async def body(ctx: Context, done: list[Any]) -> Any:
            done = [*done, await self._run(ctx, part.body, place)]
            return Break(done) if len(done) == part.count else Continue(done)

        return await ctx.loop(name, body, list[Any](), history_prune_interval=1, history_size=part.history_size)

    async def _race(self, ctx: Context, part: Race, name: str, place: tuple[Any, ...]) -> Any:
        async def branch(ctx: Context, body: Program, number: int) -> Any:
            value = await self._run(ctx, body, (*place, f"b{number}"))
            if number and not part.is_tied:
                await ctx.sleep("long", long_s(place, number))
            return value

        count = len(part.branches)
        bodies = [part.branches[0]] * count if part.is_tied else part.branches
        outer = ctx._scope.activation.history.path_of(ctx._scope.location)
        branches = {f"b{number}": partial(branch, body=body, number=number) for number, body in enumerate(bodies)}
        try:
            result = await ctx.race(name, branches)
        except RaceError:
            self.world.acknowledge(*outer, name)
            raise
        self.world.acknowledge(*outer, name)
        self.lost.update((*outer, name, other) for other in branches if other != result.winner)
        return result.value if part.is_tied else [result.winner, result.value]

    def owed(self) -> set[Place]:
        """The effects that are determined: not those of losers."""
        return {place for place in self.world.effects if not any(place[: len(lost)] == lost for lost in self.lost)}


@dataclass(frozen=True)
class Disturbance:
    """How a run is disturbed: restarts at stops, and deaths at writes, each counted from the one before.

    `is_prompt` if writes take no turn of the scheduler, where that is possible.
    """

    is_prompt: bool = False
    restarts: tuple[bool, ...] = ()
    crashes: tuple[tuple[int, Literal["before", "after"]], ...] = ()


async def disturbed(
    program: Program, namespace: Namespace, mode: RunMode, disturbance: Disturbance
) -> tuple[Any, list[Any], Interpreter]:
    """Run a program to its end, disturbed; its output and its history."""
    interpreter = Interpreter(program)
    clock = MovableClock()
    restarts = iter(disturbance.restarts)
    crashes = iter(disturbance.crashes)
    while True:
        driver = await namespace.restart()
        driver.die_at = next(crashes, None)
        try:
            async with host(namespace, mode, clock=clock, seed=random.randrange(2**32)) as process:
                output = await interpreter.world.live_on(process, restarts=restarts)
        except BaseException as error:
            if not _is_crash(error):
                raise
        else:
            break
    history = await outline(namespace, with_losers=False)
    await namespace.close()
    return output, history, interpreter


def _is_crash(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_crash(part) for part in error.exceptions)
    return isinstance(error, SimulatedCrashError)


def run_disturbed(
    seed: int, program: Program, namespace: Namespace, mode: RunMode, disturbance: Disturbance
) -> tuple[Any, list[Any], Interpreter]:
    random.seed(seed)
    return run_virtual(disturbed, program, namespace, mode, disturbance, seed=seed)


def check_disturbed(
    program: Program, disturbance: Disturbance, seed: int, mode: RunMode, driver_kind: DriverKind, directory: Path
) -> None:
    """Run a program undisturbed and disturbed; the same output, the same history, and no acknowledged effect again."""
    expected, history, undisturbed = run_disturbed(seed, program, Namespace("memory", directory), "live", Disturbance())
    namespace = Namespace(driver_kind, directory, durability="normal", is_prompt=disturbance.is_prompt)
    output, found, interpreter = run_disturbed(seed + 1, program, namespace, mode, disturbance)
    assert output == expected
    assert interpreter.world.recurred == undisturbed.world.recurred == []
    if not is_tied(program):
        assert found == history
        assert interpreter.owed() == undisturbed.owed()
