"""Steps and sleeps under a crash at every write: the end is that of a run without one, and no acknowledged effect recurs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import trio
from harness import Crash, Fault, FaultyDriver, Host, Namespace, SimulatedCrashError, crashes, host
from trio.testing import MockClock

from perdure.storage import StorageError
from perdure.workflow import (
    Context,
    RunMode,
    StepInterruptedError,
    WorkflowState,
    current_step,
)

NAMES = ["prepare", "note one", "note two", "flaky", "nap", "notify", "rest", "file"]
"""The recorded operations of `workflow`, in program order."""

EPHEMERAL = {"note one", "note two"}

OUTPUT = ["prepared", "one", "two", "after 3", "interrupted", "notified", "completed", "filed"]


@dataclass
class World:
    """What is outside of the workflow, and survives the deaths of its process: effects, and what was acknowledged."""

    mode: RunMode
    log: list[str] = field(default_factory=list)
    acknowledged: set[str] = field(default_factory=set)
    recurred: list[str] = field(default_factory=list)
    woken: int = 0

    async def effect(self, result: str) -> str:
        step = current_step()
        if step.name in self.acknowledged:
            self.recurred.append(step.name)
        self.log.append(f"{step.name} {step.attempt}")
        await trio.lowlevel.checkpoint()
        if step.name == "flaky":
            if step.attempt < 3:
                raise ConnectionError("refused")
            return f"after {step.attempt}"
        return result

    async def workflow(self, ctx: Context, _: object) -> list[Any]:
        async def step(name: str, result: str, *, ephemeral: bool = False) -> str:
            value = await ctx.step(name, self.effect, result, ephemeral=ephemeral, retry_backoff_base=5.0)
            if not ephemeral:
                self.acknowledged.add(name)  # it returned, so it is durable
                self.acknowledged |= EPHEMERAL & set(NAMES[: NAMES.index(name)])  # and what came before it with it
            return value

        outputs = [await step("prepare", "prepared")]
        outputs.append(await step("note one", "one", ephemeral=True))
        outputs.append(await step("note two", "two", ephemeral=True))
        outputs.append(await step("flaky", ""))
        outputs.append((await ctx.sleep("nap", 10_000)).value)
        outputs.append(await step("notify", "notified"))
        outputs.append((await ctx.sleep("rest", 10)).value)
        outputs.append(await step("file", "filed"))
        return outputs

    async def live_on(self, namespace: Namespace) -> Any:
        """A process opens the namespace and carries on: lets time pass, and ends the long sleep with wake()."""
        await check_order(namespace)
        async with host(namespace, self.mode) as process:
            while True:
                stopped = await process.stop(self.workflow)
                if stopped.state is WorkflowState.COMPLETED:
                    return stopped.output
                assert stopped.sleep_until is not None
                left_s = stopped.sleep_until - process.clock.now_ms() / 1000
                if left_s > 1000:
                    await process.advance(1)
                    await process.control("wake")
                    self.woken += 1
                else:
                    await process.advance(max(0.0, left_s))

    async def check_end(self, output: Any, namespace: Namespace) -> None:
        """The end of a run without a crash, whatever happened on the way."""
        assert output == OUTPUT
        assert self.recurred == []
        snapshot = await namespace.snapshot()
        assert snapshot.state is WorkflowState.COMPLETED
        assert snapshot.output == OUTPUT
        by_creation = sorted(snapshot.entries, key=lambda entry: entry.id)
        assert [entry.path[0] for entry in by_creation] == NAMES
        for entry, value in zip(by_creation, OUTPUT, strict=True):
            if entry.kind == "sleep":
                assert entry.data["state"] == value
                continue
            assert entry.data["output"] == value
            assert entry.metadata is not None
            assert (entry.metadata.status.name, entry.metadata.attempts) == (
                "COMPLETED",
                3 if entry.path == ("flaky",) else 1,
            )
        expected = [f"{name} 1" for name in NAMES if name not in ("nap", "rest")] + ["flaky 2", "flaky 3"]
        assert set(self.log) == set(expected), "every effect at least once"
        assert await (await namespace.driver()).get_alarm("workflow-1") is None


async def check_order(namespace: Namespace) -> None:
    """What is recorded is the beginning of the program, without a gap."""
    entries = sorted((await namespace.snapshot()).entries, key=lambda entry: entry.id)
    assert [entry.path[0] for entry in entries] == NAMES[: len(entries)]


async def test_a_crash_at_any_write_ends_like_a_run_without_one(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17, S18, S23, S24: retries, ephemeral steps, a sleep that is woken and one that is not; before and after each write."""
    worlds: dict[Namespace, World] = {}

    async def scenario(namespace: Namespace) -> Any:
        world = worlds.setdefault(namespace, World(mode))
        with trio.fail_after(1000):  # a step that is tried for ever never ends
            return await world.live_on(namespace)

    async def check(output: Any, namespace: Namespace, crash: Crash | None) -> None:
        world = worlds[namespace]
        await world.check_end(output, namespace)
        if crash is None:
            assert len(world.log) == 8
            assert world.woken == 1

    exploration = await crashes(scenario, make_namespace, check)
    assert exploration.counted >= 10
    assert any(len(world.log) > 8 for world in worlds.values()), "some crash made an unacknowledged effect recur"


async def test_a_second_crash_during_the_recovery_from_the_first_changes_nothing_either(
    tmp_path: Path, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17, S18, S23, S24: at every write of every recovery; in memory, since there are hundreds."""
    explored = 0
    first = 0
    while True:
        second = 0
        while True:
            namespace, world = Namespace("memory", tmp_path), World(mode)
            deaths = 0
            for write in (first, second):
                driver = await namespace.restart()
                driver.die_at = (write, "after")
                deaths += await dies(world, namespace)
            await namespace.restart()
            await world.check_end(await world.live_on(namespace), namespace)
            await namespace.close()
            explored += 1
            if deaths < 2:
                break
            second += 1
        if second == 0:
            break
        first += 1
    assert first >= 10
    assert explored >= 50


async def dies(world: World, namespace: Namespace) -> bool:
    """Whether the process died before the workflow ended."""
    try:
        await world.live_on(namespace)
    except SimulatedCrashError:
        return True
    return False


@pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
async def test_a_storage_error_at_any_write_ends_like_a_run_without_one(
    make_namespace: Callable[[], Namespace], mode: RunMode, fault: Fault, autojump_clock: MockClock
) -> None:
    """S21: the process lives, the activation ends with the storage's error, and a new one carries on after reloading."""
    number = 0
    while True:
        namespace, world = make_namespace(), World(mode)
        driver = await namespace.driver()
        left = [number]

        def is_due(_: object, left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        faulty = driver.inner = FaultyDriver(driver.inner, fault, is_due)  # type: ignore[assignment]
        try:
            output = await world.live_on(namespace)
        except StorageError as error:
            if "by the test" not in str(error):
                raise
            await namespace.restart()
            output = await world.live_on(namespace)
        await world.check_end(output, namespace)
        await namespace.close()
        if not faulty.has_failed:
            break
        number += 1
    assert number >= 10


# at_most_once has an end of its own: nobody knows whether a step took effect that was begun before a crash.


@dataclass
class Payment:
    """A world in which a payment may be made at most once."""

    mode: RunMode
    calls: list[str] = field(default_factory=list)

    async def pay(self) -> str:
        self.calls.append("pay")
        await trio.lowlevel.checkpoint()
        return "paid"

    async def work(self, name: str) -> str:
        self.calls.append(name)
        await trio.lowlevel.checkpoint()
        return name

    async def workflow(self, ctx: Context, _: object) -> str:
        await ctx.step("before", self.work, "before", ephemeral=True)
        try:
            outcome = await ctx.step("pay", self.pay, at_most_once=True)
        except StepInterruptedError:
            outcome = "unknown"
        await ctx.sleep("pause", 10)
        await ctx.step("after", self.work, "after")
        return outcome


async def test_an_at_most_once_step_runs_at_most_once_whatever_write_the_process_dies_at(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S22: killed before, during and after the function; `paid` only if it was, `unknown` only after a crash in between."""
    payments: dict[Namespace, Payment] = {}
    outcomes: dict[tuple[str, int], int] = {}

    async def scenario(namespace: Namespace) -> Any:
        payment = payments.setdefault(namespace, Payment(mode))
        async with host(namespace, mode) as process:
            return await process.finish(payment.workflow)

    async def check(output: Any, namespace: Namespace, crash: Crash | None) -> None:
        paid = payments[namespace].calls.count("pay")
        outcomes[output, paid] = outcomes.get((output, paid), 0) + 1
        assert paid <= 1
        assert output in ("paid", "unknown")
        if output == "paid":
            assert paid == 1
        if crash is None:
            assert output == "paid"
        assert (await namespace.snapshot()).output == output
        assert payments[namespace].calls.count("after") >= 1

    await crashes(scenario, make_namespace, check)
    # After the start was written: not begun. After the function, before its result was written: begun.
    assert outcomes[("unknown", 0)] >= 1
    assert outcomes[("unknown", 1)] >= 1
    assert set(outcomes) == {("paid", 1), ("unknown", 0), ("unknown", 1)}


Where = Literal["at the start", "half-way", "at the end"]


@pytest.mark.parametrize("where", ["at the start", "half-way", "at the end"])
async def test_a_process_that_dies_inside_a_function_runs_ordinary_steps_again_and_at_most_once_steps_not(
    namespace: Namespace, mode: RunMode, where: Where, autojump_clock: MockClock
) -> None:
    """S18, S22: the death is in the step itself, not at a write."""
    effects: list[str] = []
    deaths = {"ordinary": 1, "at most once": 1}

    async def effect() -> str:
        name = current_step().name
        for moment in ("at the start", "half-way", "at the end"):
            if moment == "half-way":
                effects.append(name)
            await trio.sleep(1)
            if moment == where and deaths[name]:
                deaths[name] -= 1
                namespace.kill()
        return "done"

    async def workflow(ctx: Context, _: None) -> list[str]:
        outputs = [await ctx.step("ordinary", effect)]
        try:
            outputs.append(await ctx.step("at most once", effect, at_most_once=True))
        except StepInterruptedError:
            outputs.append("unknown")
        return outputs

    async def one_life() -> Any:
        process: Host
        async with host(namespace, mode) as process:
            return await process.finish(workflow)

    for _ in range(2):
        with pytest.raises(SimulatedCrashError):
            await one_life()
    assert await one_life() == ["done", "unknown"]
    assert effects.count("ordinary") == (1 if where == "at the start" else 2)
    assert effects.count("at most once") == (0 if where == "at the start" else 1)
