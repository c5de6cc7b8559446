"""Scenarios of part A, replay and history, with the process dying at every recorded transition; see support/restarts.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
import trio
import vectors
from harness import Namespace, SlowDriver
from restarts import Stage, names_of, picture_of, play
from trio.testing import MockClock
from worlds import World, entries_put

from perdure.storage import Batch, Driver
from perdure.storage.schema import EntryStatus, StepEntry
from perdure.workflow import (
    BlockOk,
    Break,
    Context,
    Continue,
    CriticalError,
    DuplicateNameError,
    HistoryDivergedError,
    OperationInProgressError,
    RunMode,
    StepError,
    StepFailure,
    WorkflowState,
    load_snapshot,
    replay_from_step,
)

MakeNamespace = Callable[[], Namespace]


async def finish(stage: Stage) -> None:
    """The script of a play in which nobody does anything: run to the end, with a restart at the first wait."""
    await stage.run()
    await stage.restart()
    await stage.finish()


@pytest.mark.parametrize("around", ["loop", "try block", "branch"])
async def test_what_is_finished_is_passed_over_as_a_unit_wherever_it_is(
    around: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S1, S39: a finished join, race, loop and try block, inside a loop, a block or a branch, followed by a sleep."""

    async def finished(world: World, ctx: Context) -> list[Any]:
        async def step(ctx: Context) -> Any:
            return await world.step(ctx, "s", "done", ephemeral=True)

        async def body(ctx: Context, _: None) -> Break[Any]:
            return Break(await step(ctx))

        joined = await ctx.join("join", {"a": step, "b": step})
        raced = await ctx.race("race", {"a": step})
        looped = await ctx.loop("loop", body)
        tried = await ctx.try_block("block", step)
        assert isinstance(tried, BlockOk)
        slept = await ctx.sleep("sleep", 10)
        return [dict(joined), raced.winner, raced.value, looped, tried.value, slept.value]

    async def workflow(world: World, ctx: Context) -> Any:
        async def branch(ctx: Context) -> Any:
            return await finished(world, ctx)

        async def body(ctx: Context, rounds: int) -> Continue[int] | Break[Any]:
            return Continue(1) if rounds == 0 else Break(await branch(ctx))

        if around == "loop":
            return await ctx.loop("around", body, 0)
        if around == "try block":
            tried = await ctx.try_block("around", branch)
            return tried.value if isinstance(tried, BlockOk) else None
        return (await ctx.join("around", {"branch": branch}))["branch"]

    explored = await play(make_quick_namespace, mode, workflow, finish)
    assert explored.counted >= 5


async def test_a_version_is_decided_once_by_what_was_recorded_when_it_was_met(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2, S39: met after a finished join and loop by an instance of older code: 1; by a fresh place: the latest, and kept."""

    def code(latest: int) -> Any:
        async def workflow(world: World, ctx: Context) -> Any:
            async def branch(ctx: Context) -> Any:
                return await world.step(ctx, "s")

            async def body(ctx: Context, rounds: int) -> Continue[int] | Break[list[int]]:
                seen = 10 * rounds + (await ctx.get_version("inner", latest) if latest else 0)
                await ctx.sleep("pause", 10)
                return Continue(seen) if rounds == 0 else Break([rounds, seen])

            await ctx.join("join", {"a": branch})
            version = await ctx.get_version("outer", latest) if latest else 0
            first = await ctx.sleep("before", 10)
            later = await ctx.get_version("later", latest) if latest else 0
            rounds = await ctx.loop("loop", body, 0)
            last = await ctx.get_version("last", latest) if latest else 0
            await world.step(ctx, "end", ephemeral=True)
            return [version, first.value, later, rounds, last]

        return workflow

    async def script(stage: Stage) -> None:
        await stage.run()  # old code, up to the first sleep
        await stage.deploy(code(2))
        await stage.pass_time(10)
        await stage.run()  # into the loop's first iteration
        await stage.deploy(code(3))
        assert await stage.finish() == ("completed", [1, "completed", 2, [2, 23], 3])

    await play(make_quick_namespace, mode, code(0), script)


async def test_no_effect_outlives_the_version_that_led_to_it(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2, S39: each process has newer code; whatever it dies at, what was done is of one version, the recorded one."""

    async def workflow(world: World, ctx: Context) -> Any:
        stage: Stage = world.facts["stage"]
        await world.step(ctx, "before")
        version = await ctx.get_version("version", 2 + stage.deaths)
        await world.step(ctx, f"as {version}")
        await ctx.sleep("sleep", 10)
        return version

    async def script(stage: Stage) -> None:
        await stage.run()
        assert (await stage.finish())[0] == "completed"

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        assert {path[0] for path in stage.world.effects} == {"before", f"as {picture['output']}"}

    any_of = [f"as {version}" for version in (2, 3, 4)]
    await play(make_quick_namespace, mode, workflow, script, any_of=any_of, is_settled=False, check=check)


async def test_removed_retires_a_version_check(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S2, S39: `removed` retires it, where it is recorded and where it is not."""

    def code(is_retired: bool) -> Any:
        async def workflow(world: World, ctx: Context) -> Any:
            async def check(name: str) -> int:
                if is_retired:
                    await ctx.removed(name, "version_check")
                    return 0
                return await ctx.get_version(name, 2)

            versions = [await check("recorded")]
            await ctx.sleep("sleep", 10)
            versions.append(await check("not recorded"))
            await world.step(ctx, "end")
            return versions

        return workflow

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.deploy(code(True))
        assert await stage.finish() == ("completed", [0, 0])

    await play(make_quick_namespace, mode, code(False), script)


async def test_a_failure_that_try_step_handed_back_is_the_same_value_on_replay(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S3, S39: a critical failure, an exhausted step and a timeout, each before a sleep: equal values, no step run again."""
    seen: dict[str, StepFailure] = {}

    async def workflow(world: World, ctx: Context) -> Any:
        kinds: list[str] = []
        for name, effect, options in (
            ("critical", world.effect(CriticalError("no", 7)), {}),
            ("exhausted", world.effect(ConnectionError("down")), {"max_retries": 0}),
            ("timeout", world.effect(seconds=10), {"timeout": 5}),
        ):
            failure = await ctx.try_step(name, effect, **options)
            assert isinstance(failure, StepFailure)
            world.acknowledge(name)
            first = seen.setdefault(name, failure)
            assert (failure.kind, failure.step_name, failure.attempts) == (first.kind, name, 1)
            assert (failure.error.name, failure.error.message) == (first.error.name, first.error.message)
            kinds.append(failure.kind)
        await ctx.sleep("sleep", 10)
        return kinds

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.restart()
        assert await stage.finish() == ("completed", ["critical", "exhausted", "timeout"])

    await play(make_quick_namespace, mode, workflow, script)


async def step_of(world: World, ctx: Context) -> Any:
    return await world.step(ctx, "x", "value")


async def sleep_of(world: World, ctx: Context) -> Any:
    return (await ctx.sleep("x", 1)).value


async def read_of(world: World, ctx: Context) -> Any:
    return [message.body for message in await ctx.queue.next_batch("x", timeout=1)]


async def join_of(world: World, ctx: Context) -> Any:
    async def branch(ctx: Context) -> Any:
        return await world.step(ctx, "s", "branch")

    return dict(await ctx.join("x", {"a": branch}))


async def race_of(world: World, ctx: Context) -> Any:
    async def branch(ctx: Context) -> Any:
        return await world.step(ctx, "s", "branch")

    return (await ctx.race("x", {"a": branch})).value


async def loop_of(world: World, ctx: Context) -> Any:
    async def body(ctx: Context, _: None) -> Break[Any]:
        return Break(await world.step(ctx, "s", "body"))

    return await ctx.loop("x", body)


KINDS: dict[str, Any] = {
    "step": step_of,
    "sleep": sleep_of,
    "message": read_of,
    "join": join_of,
    "race": race_of,
    "loop": loop_of,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_divergence_is_named_writes_nothing_and_is_undone_by_the_old_code_or_by_removed(
    kind: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4, S39: each kind, in a branch: missing from the new code, or another kind in its place; the old code goes on, or
    `removed` makes it acceptable."""

    def code(operation: Any) -> Any:
        async def workflow(world: World, ctx: Context) -> Any:
            async def branch(ctx: Context) -> Any:
                value = await operation(world, ctx)
                await ctx.queue.next("wait", names=["go"])
                return value

            return (await ctx.join("join", {"branch": branch}))["branch"]

        return workflow

    async def missing(world: World, ctx: Context) -> Any:
        return None

    async def retired(world: World, ctx: Context) -> Any:
        await ctx.removed("x", kind)  # type: ignore[arg-type]
        return "retired"

    other = KINDS["sleep" if kind == "step" else "step"]

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.pass_time(1)
        assert await stage.run() == ("waits", False, ("go",))
        for wrong in (missing, other):
            await stage.deploy(code(wrong))
            text = await stage.refused(HistoryDivergedError)
            assert "'x" in text
            assert "'join' > 'branch'" in text
        await stage.deploy(code(retired if kind in ("step", "loop") else KINDS[kind]))
        await stage.run()
        await stage.send("go")
        stopped = await stage.finish()
        assert stopped[0] == "completed"
        assert (stopped[1] == "retired") == (kind in ("step", "loop"))

    await play(make_quick_namespace, mode, code(KINDS[kind]), script)


NAMES = ("a/b", "a", "b", "~0", "x" * 300, "🎉", "שלום:0", "q:count")


async def test_unusual_names_are_entries_of_their_own(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S5, S39: as names of steps, of branches and of a loop: no aliasing, each its own entry with its own value."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def branch(ctx: Context, name: str) -> Any:
            return await world.step(ctx, name, ["branch", name], ephemeral=True)

        async def body(ctx: Context, _: None) -> Break[Any]:
            return Break([await world.step(ctx, name, ["loop", name], ephemeral=True) for name in NAMES])

        values = [await world.step(ctx, name, ["root", name], ephemeral=name != "b") for name in NAMES]
        joined = await ctx.join("join/a", {name: lambda ctx, name=name: branch(ctx, name) for name in NAMES})
        await ctx.sleep("join", 10)
        return [values, dict(joined), await ctx.loop("a/b:0", body)]

    async def script(stage: Stage) -> None:
        await stage.run()
        _, [values, joined, looped] = await stage.finish()
        assert values == [["root", name] for name in NAMES]
        assert joined == {name: ["branch", name] for name in NAMES}
        assert looped == [["loop", name] for name in NAMES]

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        paths = [(name,) for name in NAMES]
        paths += [("join/a", name, name) for name in NAMES]
        paths += [("a/b:0", 0, name) for name in NAMES]
        assert set(names_of(picture, "step")) == set(paths)

    await play(make_quick_namespace, mode, workflow, script, check=check)


async def twice(world: World, ctx: Context) -> None:
    await world.step(ctx, "first", 1)
    await ctx.sleep("first", 10)


async def beside_its_queue(world: World, ctx: Context) -> None:
    await world.step(ctx, "q:count", 1)
    await ctx.queue.next_batch("q", timeout=1)


async def not_awaited(world: World, ctx: Context) -> None:
    forgotten = ctx.step("forgotten", world.effect())
    await world.step(ctx, "first", 1)
    await forgotten


async def two_at_once(world: World, ctx: Context) -> None:
    async with trio.open_nursery() as nursery:
        for name in ("one", "two"):
            nursery.start_soon(ctx.step, name, world.effect(seconds=1))


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        (beside_its_queue, DuplicateNameError, ("'q:count'", "'q'")),
        (twice, DuplicateNameError, ("'first'",)),
        (not_awaited, OperationInProgressError, ("'forgotten'",)),
        (two_at_once, OperationInProgressError, ("'one'", "'two'")),
    ],
)
async def test_what_cannot_be_replayed_is_refused_alike_at_every_restart_and_right_code_goes_on(
    wrong: Any,
    error: Any,
    named: tuple[str, ...],
    make_quick_namespace: MakeNamespace,
    mode: RunMode,
    autojump_clock: MockClock,
) -> None:
    """S5, S6, S39: a clash with a queue read's names; a name used twice; a forgotten await; two operations at once."""
    is_clean = wrong in (not_awaited, two_at_once)

    def code(asked: Any) -> Any:
        async def workflow(world: World, ctx: Context) -> Any:
            async def block(ctx: Context) -> Any:
                return await asked(world, ctx)

            before = await world.step(ctx, "before")
            await ctx.sleep("sleep", 10)
            return [before, isinstance(await ctx.try_block("block", block), BlockOk)]

        return workflow

    async def right(world: World, ctx: Context) -> None:
        if not is_clean:
            await world.step(ctx, "q:count" if wrong is beside_its_queue else "first", 1)

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.deploy(code(wrong))
        await stage.pass_time(10)
        text = await stage.refused(error, is_clean=False)  # the sleep before it is over, and recorded so
        assert all(name in text for name in named), text
        assert await stage.refused(error, is_clean=is_clean) == text
        picture = await stage.look()
        assert len(names_of(picture)) == (2 if is_clean else 3), "nothing of it is recorded"
        await stage.deploy(code(right))
        assert await stage.finish() == ("completed", [None, True])

    await play(make_quick_namespace, mode, code(wrong), script, any_of=["one", "two"])


EMPTY = (None, 0, "", [], {}, False)


async def test_empty_values_are_values(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S7, S39: steps that return one, and loops that break with one, run once and keep it, in value and type."""

    async def workflow(world: World, ctx: Context) -> Any:
        values: list[Any] = []
        for number, empty in enumerate(EMPTY):

            async def body(ctx: Context, _: None, empty: Any = empty) -> Break[Any]:
                return Break(await world.step(ctx, "inner", empty))

            values.append(await world.step(ctx, f"step {number}", empty, ephemeral=number % 3 > 0))
            values.append(await ctx.loop(f"loop {number}", body))
        for value, empty in zip(values, [empty for empty in EMPTY for _ in range(2)], strict=True):
            assert value == empty
            assert type(value) is type(empty)
        await ctx.sleep("sleep", 10)
        return values

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.finish()

    await play(make_quick_namespace, mode, workflow, script)


def rich() -> list[Any]:
    return [
        (1, "two"),
        {1, 2},
        b"bytes",
        datetime(2030, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
        Decimal("1.10"),
        UUID(int=5),
        2**70,
        float("nan"),
        -0.0,
        {1: {"a": [1, 2]}, "b": {(1, 2): "c"}},
    ]


async def test_every_run_sees_equal_values_of_equal_types_whatever_the_code_does_to_them(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S8, S39: values of every kind from a step, a branch and a message, mutated as soon as they are there."""
    seen: dict[str, str] = {}

    async def workflow(world: World, ctx: Context) -> Any:
        async def branch(ctx: Context) -> Any:
            return rich()

        async def look(name: str, value: list[Any]) -> None:
            text = repr([(type(part).__name__, part) for part in value])
            assert seen.setdefault(name, text) == text, "this run sees what every other run saw"
            value[0] = value[9]["b"] = "changed"
            value.append("changed")

        await look("step", await world.step(ctx, "step", rich()))
        await look("branch", (await ctx.join("join", {"a": branch}))["a"])
        await look("message", (await ctx.queue.next("read", names=["go"])).body)
        await ctx.sleep("sleep", 10)
        return await world.step(ctx, "last", rich())

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.send("go", rich())
        await stage.run()
        await stage.finish()

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        assert seen["step"] == seen["branch"] == seen["message"]
        assert picture["output"][4:7] == [Decimal("1.10"), UUID(int=5), 2**70]

    await play(make_quick_namespace, mode, workflow, script, check=check)


UNSTORABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "lock": (threading.Lock, "lock"),
    "generator": (lambda: (part for part in ()), "generator"),
    "file": (lambda: open(__file__, "rb"), "BufferedReader"),  # noqa: SIM115
    "class": (lambda: Stage, "type"),
    "size": (lambda: "x" * 2**20, "bytes"),
}


@pytest.mark.parametrize("what", UNSTORABLE)
async def test_a_result_that_cannot_be_stored_fails_the_workflow_alike_at_every_restart(
    what: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S9, S39: terminal, naming step and type, or size and limit; not run again once that is recorded, and never stuck."""
    make, named = UNSTORABLE[what]

    def close(value: Any) -> Any:
        if what == "file":
            value.close()
        return value

    async def workflow(world: World, ctx: Context) -> Any:
        await world.step(ctx, "before")
        await ctx.step("unstorable", world.effect(lambda attempt: close(make())))

    async def script(stage: Stage) -> None:
        state, _, message = await stage.finish()
        assert state == "failed"
        assert "'unstorable'" in message
        assert named in message
        await stage.restart()
        assert (await stage.finish())[0] == "failed"

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        assert picture["entries"]["unstorable",][1]["output"] is None

    await play(make_quick_namespace, mode, workflow, script, check=check)


class TwoArgumentsError(CriticalError):
    """An error that cannot be made again from its message."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{code} at {place}")
        self.code = code
        self.place = place


def chained() -> CriticalError:
    error = CriticalError("above")
    error.__cause__ = KeyError("below")
    return error


async def test_errors_of_every_shape_are_raised_alike_and_readable_after_every_restart(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10, S39: two arguments, attributes, a chain, a message of 1 MB that is not ASCII; caught, and at last the workflow's."""
    seen: dict[str, Any] = {}
    shapes: dict[str, Callable[[], Exception]] = {
        "two": lambda: TwoArgumentsError(402, "the desk"),
        "chain": chained,
        "long": lambda: CriticalError("ü" * 2**19),
    }

    async def workflow(world: World, ctx: Context) -> Any:
        for name, make in shapes.items():
            try:
                await ctx.step(name, world.effect(lambda attempt, make=make: make()))
            except StepError as error:
                world.acknowledge(name)
                info = error.error
                facts = (type(error), error.kind, info.name, info.message, dict(info.metadata), info.stack is None)
                assert seen.setdefault(name, facts) == facts, "this run sees what every other run saw"
                assert len(info.message.encode()) <= 2**16
        await ctx.sleep("sleep", 10)
        raise TwoArgumentsError(7, "the end")

    async def script(stage: Stage) -> None:
        await stage.run()
        assert await stage.finish() == ("failed", "TwoArgumentsError", "7 at the end")

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        assert picture["error"] == ("TwoArgumentsError", "7 at the end", {"code": 7, "place": "the end"}, False)
        assert seen["two"][2:5] == ("TwoArgumentsError", "402 at the desk", {"code": 402, "place": "the desk"})

    await play(make_quick_namespace, mode, workflow, script, check=check)


async def test_each_step_writes_what_changed_and_no_more_whatever_was_recorded_before(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S11, S39: of twelve steps, of which half were recorded by another process, the last is as much to write as the first."""
    batches: list[Batch] = []

    async def workflow(world: World, ctx: Context) -> Any:
        for number in range(12):
            await world.step(ctx, f"step {number}")
            if number == 5:
                await ctx.sleep("sleep", 10)

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.restart()
        await stage.finish()
        batches[:] = (await stage.namespace.driver()).batches

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        if not stage.deaths:
            steps = [batch for batch in batches if any(type(kind) is StepEntry for _, kind in entries_put(batch))]
            assert len(steps) >= 6
            assert {len(batch.puts) for batch in steps[1:-1]} == {3}, "a name, an entry and its metadata"

    await play(make_quick_namespace, mode, workflow, script, check=check)


@pytest.mark.parametrize("size", [0, 3])
async def test_pruning_commits_with_the_state_it_belongs_to_and_keeps_as_many_iterations_as_asked(
    size: int, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S12, S39: whatever the process dies at, what is retained fits the state; what is stored does not grow."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def body(ctx: Context, total: int) -> Continue[int] | Break[int]:
            total = await world.step(ctx, "add", total + 1)
            return Break(total) if total == 7 else Continue(total)

        return await ctx.loop("loop", body, 0, history_prune_interval=2, history_size=size)

    async def script(stage: Stage) -> None:
        stored = await picture_of(stage.namespace)  # as every process finds it
        if ("loop",) in stored["entries"]:
            iteration = stored["entries"]["loop",][1]["iteration"]
            retained = {path[1] for path in names_of(stored, "step")}
            is_over = stored["entries"]["loop",][2][0] is EntryStatus.COMPLETED
            pruned_to = (iteration + 1 if is_over else iteration - iteration % 2) - size
            assert retained - {iteration} == set(range(max(0, pruned_to), iteration)), "that which fits the state"
        assert await stage.finish() == ("completed", 7)

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        assert names_of(picture, "step") == [("loop", number, "add") for number in range(7 - size, 7)]

    await play(make_quick_namespace, mode, workflow, script, check=check)


async def test_wide_and_deep_workflows_resume_at_every_level(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S13, S39: a join of ten branches, loops nested five deep with a read in the innermost; sizes have tests of their own."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def branch(ctx: Context) -> Any:
            return await world.step(ctx, "s", 1)

        async def nested(ctx: Context, depth: int) -> Break[Any]:
            if depth == 0:
                return Break((await ctx.queue.next("read", names=["go"])).body)
            return Break(await ctx.loop("deeper", nested, depth - 1))

        joined = await ctx.join("join", {f"branch {number}": branch for number in range(10)})
        return [sum(joined.values()), await ctx.loop("loop", nested, 5)]

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.send("go", "deep")
        assert await stage.finish() == ("completed", [10, "deep"])

    await play(make_quick_namespace, mode, workflow, script)


async def test_a_replay_from_a_step_keeps_what_came_before_it_and_loses_no_message(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S14, S39: earlier sleeps, messages, joins and versions stay; what was read after the step is read again."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def branch(ctx: Context) -> Any:
            return await world.step(ctx, "s", "branch")

        async def body(ctx: Context, total: int) -> Continue[int] | Break[int]:
            await world.step(ctx, "round", ephemeral=True)
            return Break(total) if total == 1 else Continue(total + 1)

        kept = (await ctx.queue.next("kept", names=["go"])).body
        joined = dict(await ctx.join("join", {"a": branch}))
        version = await ctx.get_version("version", 2)
        await ctx.sleep("sleep", 10)
        await ctx.step("from here", world.effect())
        again = (await ctx.queue.next("again", names=["go"])).body
        total = await ctx.loop("loop", body, 0)
        return [kept, joined, version, again, total]

    async def rewind(stage: Stage) -> None:
        driver = await stage.namespace.driver()
        for entry in (await load_snapshot(driver)).entries:
            if entry.path == ("from here",):  # if the one who asked before did not learn that it was done
                await replay_from_step(driver, entry.id, clock=stage.clock)

    async def script(stage: Stage) -> None:
        await stage.send("go", "first")
        await stage.send("go", "second")
        end = ("completed", ["first", {"a": "branch"}, 2, "second", 1])
        assert await stage.finish() == end
        await stage.evict()
        before = await stage.look()
        await stage.do(lambda: rewind(stage))
        after = await stage.look()
        assert after["state"] is WorkflowState.PENDING
        assert set(names_of(after)) <= set(names_of(before))
        assert [message[2] for message in after["mail"]] == ["second"]
        assert ("join", "a", "s") in after["entries"]
        assert await stage.finish() == end

    await play(make_quick_namespace, mode, workflow, script)


async def test_names_that_branches_register_while_a_flush_is_on_its_way_reach_the_store(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S15, S39: every batch takes a while; a flush that is refused, lost or applied unknown to us is written or read anew."""

    def make() -> Namespace:
        namespace = make_quick_namespace()
        opened = namespace.open_driver

        async def open_slowly() -> Driver:
            return SlowDriver(await opened(), 0.7)  # type: ignore[return-value]

        namespace.open_driver = open_slowly  # type: ignore[method-assign]
        return namespace

    async def workflow(world: World, ctx: Context) -> Any:
        async def branch(ctx: Context, name: str, pause: float) -> Any:
            await world.step(ctx, f"{name} 1", seconds=pause)
            await world.step(ctx, f"{name} 2", seconds=pause)
            return name

        return dict(
            await ctx.join("join", {"a": lambda ctx: branch(ctx, "a", 0.5), "b": lambda ctx: branch(ctx, "b", 0.9)})
        )

    async def script(stage: Stage) -> None:
        assert await stage.finish() == ("completed", {"a": "a", "b": "b"})

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        names = {b"join", b"a", b"b", b"a 1", b"a 2", b"b 1", b"b 2"}
        assert picture["names"] == names

    await play(make, mode, workflow, script, check=check, faults=("refused", "lost", "applied"))


@pytest.mark.parametrize(
    "file", ["order", "retry", "sleep", "loopdone", "values", "errmeta", "migrate", "join", "race", "tried"]
)
async def test_a_history_of_the_reference_engine_ends_as_recorded_whatever_the_process_dies_at(
    file: str, make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16, S39: the first stop of each recording, resumed here."""
    stops = vectors.stops_of(file)

    async def workflow(world: World, ctx: Context) -> Any:
        return await vectors.WORKFLOWS[file](ctx, vectors.input_of(file))

    async def load(stage: Stage) -> None:
        driver = await stage.namespace.driver()
        await driver.inner.batch(Batch(puts=list(vectors.dump_of(stops[0]).items())))

    async def script(stage: Stage) -> None:
        await stage.do(lambda: load(stage))
        await stage.run()
        for stop in stops[1:]:
            if stop["sent"] is not None:
                await stage.send(*stop["sent"], id=vectors.MESSAGE_ID)
        last = stops[-1]["result"]
        if "threw" in last:
            assert await stage.finish() == ("failed", last["threw"]["name"], last["threw"]["message"])
        else:
            output = vectors.plain(last["output"]) if "output" in last else vectors.OUTCOMES[file]
            assert await stage.finish() == ("completed", output)

    await play(make_quick_namespace, mode, workflow, script, begins_ms=vectors.RECORDED_AT_MS)
