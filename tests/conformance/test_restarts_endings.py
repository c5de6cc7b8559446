"""Scenarios of part C, endings, with the process dying at every recorded transition; see support/restarts.py."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from harness import Namespace, SlowDriver
from restarts import Stage, names_of, play, played_once
from trio.testing import MockClock
from worlds import World

from perdure.storage import Driver
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    HistoryUpdated,
    RollbackCheckpointError,
    RollbackContext,
    RunMode,
    StepError,
    StepErrorEvent,
    StepFailure,
    UserCancellationError,
    WorkflowErrorEvent,
    WorkflowState,
)

MakeNamespace = Callable[[], Namespace]


async def count(stage: Stage, name: str) -> int:
    """How often the step's function was called so far; for an act."""
    return stage.world.count(name)


# What the user's own code can and cannot swallow.


async def nap(world: World, ctx: Context) -> Any:
    return (await ctx.sleep("nap", 10)).value


async def read(world: World, ctx: Context) -> Any:
    return [message.body for message in await ctx.queue.next_batch("read", timeout=10)]


async def joined(world: World, ctx: Context) -> Any:
    return dict(await ctx.join("join", {"a": lambda ctx: nap(world, ctx)}))


WAITS: dict[str, Callable[[World, Context], Awaitable[Any]]] = {"sleep": nap, "read": read, "in a branch": joined}


@pytest.mark.parametrize("wait", WAITS)
async def test_a_scope_of_the_users_around_a_durable_wait_is_the_same_fault_at_every_restart(
    wait: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S31, S39: the typed error, in both modes; nothing of the wait is recorded, and the right code goes on."""

    def code(timeout: float) -> Any:
        async def workflow(world: World, ctx: Context) -> Any:
            await world.step(ctx, "before")
            await ctx.sleep("first", 10)
            with trio.move_on_after(timeout):
                return await WAITS[wait](world, ctx)

        return workflow

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.deploy(code(1000))
        await stage.pass_time(10)
        for _ in range(2):  # first with a deadline that is never reached
            text = await stage.refused(UserCancellationError, is_clean=False)
            assert "timeout=" in text
            assert "ctx.race" in text
            stored = await stage.look()
            assert set(names_of(stored)) <= {("before",), ("first",), ("join",)}
        await stage.deploy(code(float("inf")))
        assert (await stage.finish())[0] == "completed"

    await play(make_quick_namespace, mode, code(float("inf")), script)


async def test_except_clauses_swallow_nothing_and_finally_blocks_record_nothing_when_it_is_stopped(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S31, S39: `except Exception` around a step, a sleep and a wait, `finally` with a step in it: stopped in each of them."""

    async def workflow(world: World, ctx: Context) -> Any:
        swallowed: list[str] = []
        try:
            try:
                await world.step(ctx, "step", "step", 10)
                await ctx.sleep("sleep", 10)
                message = await ctx.queue.next("read", names=["go"])
            except Exception as error:
                swallowed.append(repr(error))
                raise
        finally:
            await world.step(ctx, "cleanup")
        return [message.body, swallowed]

    async def script(stage: Stage) -> None:
        assert await stage.stop_after(5, "evict") == ("left",)  # in the step
        await stage.run()
        await stage.evict()  # in the sleep
        assert await stage.do(lambda: count(stage, "cleanup")) == 0
        await stage.pass_time(10)
        await stage.run()
        await stage.evict()  # in the wait
        assert await stage.do(lambda: count(stage, "cleanup")) == 0
        await stage.send("go", "sent")
        assert await stage.finish() == ("completed", ["sent", []])

    await play(make_quick_namespace, mode, workflow, script)


# cancel() and evict(), at every point.


async def one_of_everything(world: World, ctx: Context) -> Any:
    """A step, a sleep, a retry, a wait, branches of which one sleeps and one is in a step; then a failure, and its rollback."""

    async def sleeping(ctx: Context) -> Any:
        return (await ctx.sleep("sleep", 10)).value

    async def working(ctx: Context) -> Any:
        return await world.step(ctx, "work", "worked", 10)

    await ctx.rollback_checkpoint("checkpoint")
    await world.step(ctx, "step", "done", 10, rollback=world.undo)
    await ctx.sleep("sleep", 10)
    await world.step(ctx, "flaky", lambda attempt: ConnectionError("no") if attempt < 2 else 1, retry_backoff_base=5)
    await ctx.queue.next("read", names=["go"])
    await ctx.join("join", {"sleeping": sleeping, "working": working})
    if world.facts.get("fails"):
        await ctx.step("undone slowly", world.effect("slow"), rollback=slow_undo(world), retry_backoff_base=5)
        raise ValueError("failed")
    return "end"


def slow_undo(world: World) -> Any:
    """A handler that fails at first, then takes a while."""

    async def undo(ctx: RollbackContext, output: Any) -> None:
        if ctx.attempt == 1:
            raise ConnectionError("not yet")
        await trio.sleep(10)
        await world.undo(ctx, output)

    return undo


async def nowhere(stage: Stage) -> None:
    pass


async def in_sleep(stage: Stage) -> None:
    await stage.run()


async def in_backoff(stage: Stage) -> None:
    await in_sleep(stage)
    await stage.pass_time(10)
    assert (await stage.run())[0] == "waits"


async def in_wait(stage: Stage) -> None:
    await in_backoff(stage)
    await stage.pass_time(10)
    assert await stage.run() == ("waits", False, ("go",))


async def before_join(stage: Stage) -> None:
    await in_wait(stage)
    await stage.evict()
    await stage.send("go", id="go")


async def undoing(stage: Stage) -> None:
    await before_join(stage)
    await stage.run()
    assert await stage.state() is WorkflowState.ROLLING_BACK
    await stage.evict()
    await stage.pass_time(10)


async def at_the_end(stage: Stage) -> None:
    await before_join(stage)
    await stage.finish()


POINTS: dict[str, tuple[Callable[[Stage], Awaitable[None]], float | None, WorkflowState]] = {
    "in a step": (nowhere, 5, WorkflowState.CANCELLED),
    "in a sleep": (in_sleep, None, WorkflowState.CANCELLED),
    "in a backoff": (in_backoff, None, WorkflowState.CANCELLED),
    "in a wait": (in_wait, None, WorkflowState.CANCELLED),
    "in branches": (before_join, 5, WorkflowState.CANCELLED),
    "in a handler": (undoing, 5, WorkflowState.CANCELLED),
    "completed": (at_the_end, None, WorkflowState.COMPLETED),
    "failed": (at_the_end, None, WorkflowState.FAILED),
}


def begins(fails: bool) -> Any:
    async def workflow(world: World, ctx: Context) -> Any:
        world.facts["fails"] = fails
        return await one_of_everything(world, ctx)

    return workflow


@pytest.mark.parametrize("point", POINTS)
async def test_cancel_ends_it_as_cancelled_or_as_it_had_ended_and_the_work_stops(
    point: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S32, S39: during a step, while sleeping, backing off, waiting, in branches, while rolling back, after the end."""
    reach, after_s, state = POINTS[point]

    async def script(stage: Stage) -> None:
        await reach(stage)
        if after_s is None:
            await stage.cancel()
        else:
            assert await stage.stop_after(after_s, "cancel") == ("cancelled",)
        await stage.do(lambda: note_effects(stage))
        await stage.restart()
        assert await stage.state() is state
        await stage.pass_time(100_000)
        assert (await stage.run())[0] == state.value
        assert await stage.send("go") == "refused"
        assert len(stage.world.effects) == stage.world.facts["effects"], "the work has stopped"

    await play(
        make_quick_namespace,
        mode,
        begins(point in ("in a handler", "failed")),
        script,
        any_of=["work", "step"],
        is_settled=after_s is None,
    )


async def note_effects(stage: Stage) -> None:
    stage.world.facts["effects"] = len(stage.world.effects)


async def test_cancel_at_the_commit_of_a_step_ends_it_as_cancelled(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S32, S39: its result, on its way to the disk, may be there or not; nothing comes after it."""

    def make() -> Namespace:
        return slowed(make_quick_namespace(), 4)

    async def workflow(world: World, ctx: Context) -> Any:
        await world.step(ctx, "step", "done", 1)
        await world.step(ctx, "next", "done")

    async def script(stage: Stage) -> None:
        # Once it is created: after 4 s the first step may begin, at 5 it has ended, at 9 that is written.
        assert await stage.stop_after(7, "cancel") == ("cancelled",)
        assert (await stage.run()) == ("cancelled",)

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        assert picture["state"] is WorkflowState.CANCELLED
        if not stage.deaths:
            assert names_of(picture) == [("step",)]
            assert stage.world.effects == [("step",)]

    await play(make, mode, workflow, script, any_of=["step", "next"], is_settled=False, check=check)


def slowed(namespace: Namespace, batch_s: float) -> Namespace:
    """A namespace each of whose batches takes a while."""
    opened = namespace.open_driver

    async def open_slowly() -> Driver:
        return SlowDriver(await opened(), batch_s)  # type: ignore[return-value]

    namespace.open_driver = open_slowly  # type: ignore[method-assign]
    return namespace


@pytest.mark.parametrize("point", [point for point in POINTS if point != "failed"])
async def test_evict_leaves_it_resumable_and_it_ends_as_if_never_stopped(
    point: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S33, S39: at the same points; it resumes in another process, and what is stored in the end is that of a run without."""
    reach, after_s, _ = POINTS[point]
    fails = point == "in a handler"

    async def straight(stage: Stage) -> None:
        await in_wait(stage)
        await stage.send("go", id="go")
        await stage.finish()

    expected = await played_once(make_quick_namespace, mode, begins(fails), straight)

    async def script(stage: Stage) -> None:
        await reach(stage)
        if after_s is None:
            await stage.evict()
        else:
            assert await stage.stop_after(after_s, "evict") == ("left",)
        await stage.restart()
        assert (await stage.state()).is_terminal == (point == "completed")
        if reach in (nowhere, in_sleep, in_backoff):
            await stage.run()
            for _ in range(4):
                await stage.pass_time(10)
                await stage.run()
        if reach in (nowhere, in_sleep, in_backoff, in_wait):
            await stage.send("go", id="go")
        assert await stage.finish() == (("failed", "ValueError", "failed") if fails else ("completed", "end"))

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        assert picture == expected
        undone = [path for path in stage.world.effects if path[-1] == "undo"]
        assert list(dict.fromkeys(undone)) == ([("undone slowly", "undo"), ("step", "undo")] if fails else [])

    await play(make_quick_namespace, mode, begins(fails), script, check=check)


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
async def test_newer_code_runs_and_writes_nothing_for_what_has_ended(
    end: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S34, S39: completed, failed or cancelled, by whichever process."""

    async def workflow(world: World, ctx: Context) -> Any:
        await world.step(ctx, "step")
        await ctx.sleep("sleep", 10)
        if end == "failed":
            await ctx.step("fail", world.effect(CriticalError("no")))
        return "old"

    async def newer(world: World, ctx: Context) -> Any:
        await world.step(ctx, "newer")
        return "new"

    async def script(stage: Stage) -> None:
        await stage.run()
        if end == "cancelled":
            await stage.cancel()
        stopped = await stage.finish()
        assert stopped[0] == end
        await stage.deploy(newer)
        before = await stage.namespace.dump()
        assert await stage.run() == stopped
        await stage.wake()
        await stage.cancel()
        assert await stage.finish() == stopped
        assert await stage.namespace.dump() == before

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        assert stage.world.count("newer") == 0

    await play(make_quick_namespace, mode, workflow, script, check=check)


# Rollback and recover().


async def test_rollback_undoes_every_completed_step_in_reverse_and_goes_on_where_it_was(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S35, S39: in a finished join, a race's winner, a try block, retained iterations, after a caught failure; resumed between
    any two handlers."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def step(ctx: Context, name: str = "s") -> Any:
            return await world.step(ctx, name, name, ephemeral=True, rollback=world.undo)

        async def body(ctx: Context, rounds: int) -> Continue[int] | Break[int]:
            await step(ctx)
            return Continue(1) if rounds == 0 else Break(rounds)

        await step_without_handler(world, ctx)
        await ctx.rollback_checkpoint("checkpoint")
        await step(ctx, "first")
        await ctx.join("join", {"a": step})
        await ctx.race("race", {"a": step})
        await ctx.try_block("block", step)
        await ctx.loop("loop", body, 0)
        tried = await ctx.try_step("tried", world.effect(CriticalError("caught")), rollback=world.undo)
        assert isinstance(tried, StepFailure)
        await step(ctx, "last")
        await ctx.step("fail", world.effect(CriticalError("out of stock")), rollback=world.undo)

    async def script(stage: Stage) -> None:
        assert await stage.finish() == ("failed", "CriticalError", "out of stock")

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        undone = [path[:-1] for path in stage.world.effects if path[-1] == "undo"]
        assert list(dict.fromkeys(undone)) == [
            ("last",),
            ("loop", 1, "s"),
            ("loop", 0, "s"),
            ("block", "s"),
            ("race", "a", "s"),
            ("join", "a", "s"),
            ("first",),
        ]
        steps = {path: line for path, line in picture["entries"].items() if line[0] == "step"}
        assert {path for path, line in steps.items() if line[2][3]} == set(undone)
        assert all(steps[path][1]["output"] == path[-1] for path in undone), "forward history is untouched"

    await play(make_quick_namespace, mode, workflow, script, check=check, any_of=["s"])


async def step_without_handler(world: World, ctx: Context) -> None:
    await world.step(ctx, "no handler")


@pytest.mark.parametrize("heals", [True, False])
async def test_a_failing_handler_is_retried_and_then_both_errors_are_kept(
    heals: bool, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S35, S39: with the step's own policy, over restarts in its backoff; the handlers before it do not run if it is given up."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def failing(rollback: RollbackContext, output: Any) -> None:
            await world.undo(rollback, output)
            if rollback.attempt < 3 or not heals:
                raise ConnectionError(f"refused {rollback.attempt}")

        await ctx.rollback_checkpoint("checkpoint")
        await world.step(ctx, "first", rollback=world.undo)
        await world.step(ctx, "second", rollback=failing, max_retries=2, retry_backoff_base=10)
        raise ValueError("failed")

    async def script(stage: Stage) -> None:
        assert await stage.finish() == ("failed", "ValueError", "failed")

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        counts = Counter(stage.world.effects)
        assert counts["second", "undo"] >= 3
        assert (counts["first", "undo"] > 0) == heals
        if not heals:
            metadata = picture["error"][2]
            assert metadata["rollback_step"] == "second"
            assert metadata["rollback_error"] == "ConnectionError: refused 3"

    await play(make_quick_namespace, mode, workflow, script, check=check)


async def test_a_handler_without_a_checkpoint_is_refused_before_its_step_runs(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S35, S39: the same at every restart, nothing recorded; with the checkpoint it goes on."""

    def code(is_right: bool) -> Any:
        async def workflow(world: World, ctx: Context) -> Any:
            await world.step(ctx, "before")
            await ctx.sleep("sleep", 10)
            if is_right:
                await ctx.rollback_checkpoint("checkpoint")
            return await world.step(ctx, "pay", "paid", rollback=world.undo)

        return workflow

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.deploy(code(False))
        await stage.pass_time(10)
        text = await stage.refused(RollbackCheckpointError, is_clean=False)
        assert "'pay'" in text
        assert await stage.refused(RollbackCheckpointError) == text
        await stage.deploy(code(True))
        assert await stage.finish() == ("completed", "paid")

    await play(make_quick_namespace, mode, code(True), script)


async def test_recover_resets_what_failed_and_what_was_undone_and_nothing_else(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S36, S39: after a failed join, after exhausted retries and a rollback; on a workflow that did not fail it has no effect."""

    async def workflow(world: World, ctx: Context) -> Any:
        mended = world.facts.get("mended", 0)

        async def kept(ctx: Context) -> Any:
            return await world.step(ctx, "kept", "kept")

        async def broken(ctx: Context) -> Any:
            return await world.step(ctx, "broken", "mended" if mended else ConnectionError("down"), max_retries=0)

        plain = await world.step(ctx, "plain", "plain")
        await ctx.sleep("sleep", 10)
        both = dict(await ctx.join("join", {"kept": kept, "broken": broken}))
        await ctx.rollback_checkpoint("checkpoint")
        undone = await world.step(ctx, "undone", "undone", rollback=world.undo)
        last = await world.step(ctx, "last", "last" if mended > 1 else ConnectionError("down"), max_retries=0)
        return [plain, both, undone, last]

    async def mend(stage: Stage, number: int) -> None:
        stage.world.facts["mended"] = number

    async def script(stage: Stage) -> None:
        await stage.run()
        before = await stage.namespace.dump()
        await stage.recover()
        if stage.world.facts.get("mended") is None and len(stage.acts) == 2:
            assert await stage.namespace.dump() == before, "it did not fail"
        state, name, _ = await stage.finish()
        assert (state, name) == ("failed", "JoinError")
        await stage.do(lambda: mend(stage, 1))
        await stage.recover()
        state, name, _ = await stage.finish()
        assert (state, name) == ("failed", "StepExhaustedError")
        await stage.do(lambda: mend(stage, 2))
        await stage.recover("undone")
        end = ("completed", ["plain", {"kept": "kept", "broken": "mended"}, "undone", "last"])
        assert await stage.finish() == end
        await stage.recover()
        assert await stage.finish() == end

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        counts = Counter(stage.world.effects)
        assert counts["undone",] >= 2, "it was undone, and ran again"
        if not stage.deaths:
            assert counts["plain",] == counts["join", "kept", "kept"] == counts["undone", "undo"] == 1

    await play(make_quick_namespace, mode, workflow, script, check=check)


# Hooks.


async def test_hooks_that_raise_change_nothing_and_a_failure_is_told_once_at_most(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """S37, S39: of a retry, of an exhausted step that is caught, of the workflow; a process that dies in between loses the event,
    and none tells it again."""
    caplog.set_level(logging.CRITICAL, "perdure.workflow")

    async def workflow(world: World, ctx: Context) -> Any:
        await world.step(
            ctx, "flaky", lambda attempt: 1 if attempt > 1 else ConnectionError("no"), retry_backoff_base=10
        )
        try:
            await ctx.step("exhausted", world.effect(ConnectionError("never")), max_retries=0)
        except StepError:
            world.acknowledge("exhausted")
        await ctx.sleep("sleep", 10)
        await ctx.step("fail", world.effect(CriticalError("no")))

    def options(stage: Stage) -> dict[str, Any]:
        events: list[Any] = stage.world.facts.setdefault("events", [])

        def on_error(event: Any) -> None:
            if isinstance(event, StepErrorEvent):
                events.append((event.step_name, event.attempt, event.will_retry))
            else:
                events.append(type(event))
            raise ValueError("the hook failed")

        async def on_history_updated(event: HistoryUpdated) -> None:
            await trio.lowlevel.checkpoint()
            raise ValueError("the hook failed")

        return {"on_error": on_error, "on_history_updated": on_history_updated}

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.restart()
        assert await stage.finish() == ("failed", "CriticalError", "no")
        await stage.restart()
        assert await stage.finish() == ("failed", "CriticalError", "no")

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        told = Counter(stage.world.facts["events"])
        expected = {("flaky", 1, True), ("exhausted", 1, False), ("fail", 1, False), WorkflowErrorEvent}
        assert set(told) <= expected
        assert max(told.values(), default=0) <= 1
        assert len(told) >= len(expected) - stage.deaths - 1
        if not stage.deaths:
            assert set(told) == expected

    await play(make_quick_namespace, mode, workflow, script, check=check, options=options)
