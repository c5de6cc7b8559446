"""`ctx.try_step` and `ctx.try_block`: recorded failures as values, the same on every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from harness import Crash, Namespace, SimulatedCrashError, host
from trio.testing import MockClock
from worlds import World, explore, run_in_world

from perdure.workflow import (
    BlockFailure,
    BlockOk,
    Break,
    Context,
    Continue,
    CriticalError,
    ErrorInfo,
    FaultError,
    HistoryDivergedError,
    InvalidArgumentError,
    JoinError,
    MisuseError,
    OperationInProgressError,
    RaceError,
    RollbackError,
    RunMode,
    StepCriticalError,
    StepError,
    StepExhaustedError,
    StepFailure,
    StepInterruptedError,
    StepOk,
    StepTimeoutError,
    WorkflowFailedError,
    WorkflowState,
)

YEAR = 365 * 86400.0


class Declined(CriticalError):
    """With an attribute, as users' errors have."""

    def __init__(self, code: int) -> None:
        super().__init__(f"declined: {code}")
        self.code = code


# try_step.


async def fail(kind: str) -> Any:
    """What makes a step fail in each way."""
    if kind == "critical":
        raise Declined(51)
    if kind == "rollback":
        raise RollbackError("undo")
    if kind == "timeout":
        await trio.sleep(YEAR)
    if kind == "unstorable":
        return trio.Lock()
    raise ConnectionError("refused")


OPTIONS: dict[str, dict[str, Any]] = {
    "critical": {},
    "unstorable": {},
    "timeout": {"timeout": 2.0},
    "exhausted": {"max_retries": 1, "retry_backoff_base": 3.0},
    "rollback": {"catch": ("rollback",)},
}

EXPECTED: dict[str, tuple[str, int, str, str]] = {
    "critical": ("critical", 1, "Declined", "declined: 51"),
    "unstorable": ("critical", 1, "ValueEncodeError", "Lock"),
    "timeout": ("timeout", 1, "StepTimeoutError", "2 seconds"),
    "exhausted": ("exhausted", 2, "ConnectionError", "refused"),
    "rollback": ("rollback", 1, "RollbackError", "undo"),
}


@pytest.mark.parametrize("kind", OPTIONS)
async def test_try_step_hands_back_the_same_failure_after_a_restart_and_does_not_run_the_step_again(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, kind: str, autojump_clock: MockClock
) -> None:
    """S3: equal in content, whatever the kind; with a death before and after every write."""
    handed: dict[int, list[Any]] = {}

    async def function(world: World, ctx: Context) -> Any:
        async def work() -> Any:
            world.begin()
            return await fail(kind)

        failure = await ctx.try_step("work", work, **OPTIONS[kind])
        world.acknowledge("work")
        handed.setdefault(id(world), []).append(failure)
        await ctx.sleep("rest", 10)
        await world.step(ctx, "after")
        return "survived"

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == "survived"
        failures = handed[id(world)]
        assert len(failures) >= 2
        assert all(failure == failures[0] for failure in failures)
        failure = failures[0]
        assert isinstance(failure, StepFailure)
        name = EXPECTED[kind][2]
        assert (failure.kind, failure.attempts, failure.error.name) == (*EXPECTED[kind][:2], name)
        assert EXPECTED[kind][3] in failure.error.message
        assert failure.step_name == "work"
        if kind == "critical":
            assert failure.error.metadata == {"code": 51}
        if crash is None:
            assert world.count("work") == EXPECTED[kind][1]

    await explore(make_quick_namespace, mode, function, check)


async def test_try_step_hands_back_that_the_outcome_of_an_at_most_once_step_is_unknown(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S3, S22: killed in the step; then the same failure on every run, and the function is not called again."""
    calls: list[str] = []
    handed: list[Any] = []

    async def function(world: World, ctx: Context) -> Any:
        async def pay() -> None:
            calls.append("pay")
            namespace.kill()

        handed.append(await ctx.try_step("pay", pay, at_most_once=True))
        await ctx.sleep("rest", 10)
        return handed[-1].kind

    with pytest.raises(SimulatedCrashError):
        await run_in_world(namespace, mode, function)
    output, _ = await run_in_world(namespace, mode, function, restarts=True)
    assert output == "interrupted"
    assert calls == ["pay"]
    assert len(handed) == 2
    assert handed[0] == handed[1]
    assert (handed[0].attempts, handed[0].error.name) == (1, "StepInterruptedError")


@pytest.mark.parametrize("kind", ["critical", "timeout", "exhausted", "rollback"])
async def test_try_step_raises_what_it_is_not_to_catch(
    namespace: Namespace, mode: RunMode, kind: str, autojump_clock: MockClock
) -> None:
    """S3: the step's error, as ctx.step raises it, on every run; `rollback` unless asked for."""
    raised: list[StepError] = []
    catch: tuple[Any, ...] = tuple({"critical", "timeout", "exhausted", "interrupted"} - {kind})
    options = {key: value for key, value in OPTIONS[kind].items() if key != "catch"}
    if kind != "rollback":
        options["catch"] = catch

    async def function(world: World, ctx: Context) -> Any:
        try:
            await ctx.try_step("work", fail, kind, **options)
        except StepError as error:
            raised.append(error)
        await ctx.sleep("rest", 10)
        return "survived"

    output, _ = await run_in_world(namespace, mode, function, restarts=True)
    assert output == "survived"
    classes: dict[str, type[StepError]] = {
        "timeout": StepTimeoutError,
        "exhausted": StepExhaustedError,
        "critical": StepCriticalError,
        "rollback": StepCriticalError,
    }
    assert [type(error) for error in raised] == [classes[kind]] * 2
    assert raised[0].error == raised[1].error


async def test_a_step_and_a_try_step_are_the_same_in_history(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S3, S4: new code may turn one into the other."""
    uses_try = [True]
    seen: list[Any] = []

    async def function(world: World, ctx: Context) -> Any:
        if uses_try[0]:
            seen.append(await ctx.try_step("good", world_step, 1))
            seen.append(await ctx.try_step("bad", fail, "critical"))
        else:
            seen.append(await ctx.step("good", world_step, 1))
            try:
                await ctx.step("bad", fail, "critical")
            except StepCriticalError as error:
                seen.append(error.error)
        await ctx.sleep("rest", 10)

    async def world_step(value: int) -> int:
        return value

    async with host(namespace, mode) as process:
        world = World(function)
        await process.stop(world.workflow)
        uses_try[0] = False
        await process.restart()
        await process.finish(world.workflow)
    assert isinstance(seen[0], StepOk)
    assert isinstance(seen[1], StepFailure)
    assert (seen[0].value, seen[1].error) == (seen[2], seen[3])


async def test_try_step_returns_the_value_as_it_is_stored(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S7, S8: empty values too, on the first run as after a restart."""
    values: list[Any] = [None, 0, "", [], False, (1, (2,)), {3: b"x"}]
    seen: list[list[Any]] = []

    async def function(world: World, ctx: Context) -> Any:
        async def give(value: Any) -> Any:
            world.begin()
            return value

        seen.append([await ctx.try_step(f"n{n}", give, value) for n, value in enumerate(values)])
        await ctx.sleep("rest", 10)

    _, world = await run_in_world(namespace, mode, function, restarts=True)
    assert seen[0] == seen[1] == [StepOk(value) for value in [None, 0, "", [], False, [1, [2]], {3: b"x"}]]
    assert len(world.effects) == len(values)


async def test_try_step_passes_faults_and_storage_trouble(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S3, S4: a divergence or a misuse is never handed back as a value, whatever is caught."""
    kinds: Any = ("critical", "timeout", "exhausted", "interrupted", "rollback")

    async def twice(ctx: Context, _: object) -> Any:
        await ctx.try_step("work", fail_not, catch=kinds)
        await ctx.try_step("work", fail_not, catch=kinds)

    async def no_function(ctx: Context, _: object) -> Any:
        await ctx.try_step("work", None, catch=kinds)  # type: ignore[call-overload]

    async def no_kind(ctx: Context, _: object) -> Any:
        await ctx.try_step("work", fail_not, catch=("critcal",))  # type: ignore[call-overload]

    async def text(ctx: Context, _: object) -> Any:
        await ctx.try_step("work", fail_not, catch="critical")  # type: ignore[call-overload]

    async def block_kind(ctx: Context, _: object) -> Any:
        await ctx.try_block("block", fail_block, catch=("critical",))  # type: ignore[arg-type]

    async def fail_block(ctx: Context) -> None: ...

    async def fail_not() -> None: ...

    for workflow in (twice, no_function, no_kind, text, block_kind):
        async with host(make_namespace(), mode) as process:
            with pytest.raises(MisuseError):
                await process.stop(workflow)
            assert (await process.namespace.snapshot()).state in (WorkflowState.PENDING, WorkflowState.RUNNING)


# try_block.


async def _step_fails(world: World, ctx: Context) -> None:
    await world.step(ctx, "fine")
    await world.step(ctx, "fails", Declined(7))


async def _join_fails(world: World, ctx: Context) -> None:
    async def branch(ctx: Context) -> None:
        await ctx.sleep("pause", 3)
        await _step_fails(world, ctx)

    await ctx.join("inner", {"a": branch, "b": branch})


async def _race_fails(world: World, ctx: Context) -> None:
    async def branch(ctx: Context) -> None:
        await ctx.sleep("pause", 3)
        await _step_fails(world, ctx)

    await ctx.race("inner", {"a": branch, "b": branch})


async def _rollback_in_step(world: World, ctx: Context) -> None:
    await world.step(ctx, "fails", RollbackError("undo"))


async def _rollback_in_block(world: World, ctx: Context) -> None:
    await world.step(ctx, "fine")
    raise RollbackError("undo all")


BLOCKS: dict[str, tuple[Any, str, str, str, str]] = {
    "step": (_step_fails, "step", "fails", "Declined", "declined: 7"),
    "join": (_join_fails, "join", "inner", "JoinError", "2 of 2 branches of join 'inner' failed"),
    "race": (_race_fails, "race", "inner", "RaceError", "all 2 branches of race 'inner' failed"),
    "rollback in a step": (_rollback_in_step, "step", "fails", "RollbackError", "undo"),
    "rollback in the block": (_rollback_in_block, "block", "block", "RollbackError", "undo all"),
}


@pytest.mark.parametrize("what", BLOCKS)
async def test_try_block_hands_back_the_same_failure_after_a_restart_and_runs_nothing_again(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, what: str, autojump_clock: MockClock
) -> None:
    """S1, S3: of a step, a join, a race or the block itself; with a death before and after every write."""
    function_, source, name, error_name, message = BLOCKS[what]
    handed: dict[int, list[Any]] = {}

    async def function(world: World, ctx: Context) -> Any:
        async def block(ctx: Context) -> None:
            await function_(world, ctx)

        failure = await ctx.try_block("block", block, catch=("step", "join", "race", "rollback"))
        world.acknowledge("block")
        handed.setdefault(id(world), []).append(failure)
        await ctx.sleep("rest", 10)
        return "survived"

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == "survived"
        failures = handed[id(world)]
        assert len(failures) >= 2
        assert all(failure == failures[0] for failure in failures)
        failure = failures[0]
        assert isinstance(failure, BlockFailure)
        assert (failure.source, failure.name, failure.error.name) == (source, name, error_name)
        assert message in failure.error.message
        assert (failure.step is not None) == (source == "step")
        if what == "step":
            assert failure.step == StepFailure("critical", "fails", 1, failure.error)
            assert failure.error.metadata == {"code": 7}
        if crash is None:
            assert len(world.effects) == len(set(world.effects))

    await explore(make_quick_namespace, mode, function, check)


@pytest.mark.parametrize("what", BLOCKS)
async def test_try_block_raises_what_it_is_not_to_catch(
    namespace: Namespace, mode: RunMode, what: str, autojump_clock: MockClock
) -> None:
    """S3: the error as it came, on every run; `rollback` unless asked for."""
    raised: list[Exception] = []
    catch: Any = {"step", "join", "race", "rollback"} - {what.split(maxsplit=1)[0]}

    async def function(world: World, ctx: Context) -> Any:
        async def block(ctx: Context) -> None:
            await BLOCKS[what][0](world, ctx)

        try:
            if what.startswith("rollback"):
                await ctx.try_block("block", block)
            else:
                await ctx.try_block("block", block, catch=catch)
        except (StepError, JoinError, RaceError, RollbackError) as error:
            raised.append(error)
            await ctx.sleep("rest", 10)
            return "raised"

    output, _ = await run_in_world(namespace, mode, function, restarts=True)
    assert output == "raised"
    assert len(raised) >= 2
    assert {(type(error), str(error)) for error in raised} == {(type(raised[0]), str(raised[0]))}


async def test_try_block_passes_exceptions_of_the_workflows_own(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S3: a ValueError, and a CriticalError, are no recorded failures; nor is what is raised outside of its own steps."""
    seen: list[str] = []

    async def function(world: World, ctx: Context) -> Any:
        for error in (ValueError("own"), CriticalError("own"), KeyError("own")):

            async def block(ctx: Context, error: Exception = error) -> None:
                await world.step(ctx, "fine")
                raise error

            try:
                await ctx.try_block(f"block {error!r}", block, catch=("step", "join", "race", "rollback"))
            except type(error) as passed:
                seen.append(type(error).__name__ if passed is error else "another")
        await ctx.sleep("rest", 10)

    await run_in_world(namespace, mode, function, restarts=True)
    assert seen == ["ValueError", "CriticalError", "KeyError"] * 2


async def test_an_uncaught_exception_out_of_a_block_fails_the_workflow_under_its_name(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10: as it would have without the block."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def block(ctx: Context) -> None:
            await ctx.sleep("pause", 1)
            raise ValueError("own")

        await ctx.try_block("block", block)

    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError) as ended:
            await process.finish(workflow)
    assert (ended.value.name, ended.value.error.message) == ("ValueError", "own")


async def test_a_block_gives_its_arguments_on_and_its_value_back(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S1: it runs again over what is recorded; nothing of it is stored, so its value is what this run's function returned."""
    seen: list[Any] = []

    async def function(world: World, ctx: Context) -> Any:
        async def block(ctx: Context, one: int, two: str) -> Any:
            value = await world.step(ctx, "work", one)
            return (value, two)

        async def nothing(ctx: Context) -> None: ...

        seen.append([await ctx.try_block("block", block, 1, "two"), await ctx.try_block("nothing", nothing)])
        await ctx.sleep("rest", 10)

    _, world = await run_in_world(namespace, mode, function, restarts=True)
    assert seen == [[BlockOk((1, "two")), BlockOk(None)]] * 2
    assert world.effects == [("block", "work")]
    assert set(await namespace.entries()) == {("block", "work"), ("rest",)}


async def test_a_block_is_a_scope_in_which_names_are_its_own(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S5, S6: the same name in two blocks and outside is no clash; twice in one block is, and so is the outer context."""

    async def fine(ctx: Context, _: object) -> Any:
        async def block(ctx: Context) -> int:
            return await ctx.step("work", one)

        await ctx.step("work", one)
        return [(await ctx.try_block(name, block)).value for name in ("a", "a/b", "~0", "b:0")]  # type: ignore[union-attr]

    async def one() -> int:
        return 1

    async def twice(ctx: Context, _: object) -> Any:
        async def block(ctx: Context) -> None:
            await ctx.step("work", one)
            await ctx.step("work", one)

        await ctx.try_block("block", block)

    async def outer(ctx: Context, _: object) -> Any:
        async def block(inner: Context) -> None:
            await ctx.step("work", one)

        await ctx.try_block("block", block)

    async def later(ctx: Context, _: object) -> Any:
        async def block(inner: Context) -> None:
            kept.append(inner)

        await ctx.try_block("block", block)
        await kept[0].step("work", one)

    async def forgotten(ctx: Context, _: object) -> Any:
        async def block(inner: Context) -> None:
            inner.step("work", one)  # type: ignore[unused-coroutine]

        await ctx.try_block("block", block)

    async def plain(ctx: Context, _: object) -> Any:
        def block(inner: Context) -> None: ...

        await ctx.try_block("block", block)  # type: ignore[arg-type]

    kept: list[Context] = []
    namespace = make_namespace()
    async with host(namespace, mode) as process:
        assert (await process.stop(fine)).output == [1, 1, 1, 1]
        assert set(await namespace.entries()) == {(name, "work") for name in ("a", "a/b", "~0", "b:0")} | {("work",)}
    cases: list[tuple[Any, type[FaultError], str]] = [
        (twice, MisuseError, "unique within a scope"),
        (outer, OperationInProgressError, "use the context that the block is given"),
        (later, MisuseError, "scope that is over"),
        (forgotten, OperationInProgressError, "not awaited"),
        (plain, InvalidArgumentError, "plain function"),
    ]
    for workflow, error, match in cases:
        async with host(make_namespace(), mode) as process:
            with pytest.raises(error, match=match):
                await process.stop(workflow)


# S4: blocks and changed code.


async def _noop() -> None: ...


@pytest.mark.parametrize("where", ["root", "loop", "branch", "block"])
@pytest.mark.parametrize(
    "change",
    [
        "the block is gone",
        "an operation of it is gone",
        "it has a new operation at its end",
        "it has a new operation before the others",
        "a step is in its place",
        "it is in the place of a step",
        "it is renamed",
        "it fails before an operation of it",
    ],
)
async def test_a_changed_block_is_a_divergence_and_the_old_code_goes_on(
    namespace: Namespace, mode: RunMode, change: str, where: str, autojump_clock: MockClock
) -> None:
    """S4: a finished block that has later entries after it, and all the ways in which new code can differ."""
    is_new = [False]

    async def part(ctx: Context) -> Any:
        new = is_new[0]

        async def block(ctx: Context) -> None:
            if new and change.endswith("before the others"):
                await ctx.step("new", _noop)
            await ctx.step("one", _noop)
            if new and change.startswith("it fails"):
                raise RollbackError("caught by the block")
            if not (new and change.startswith("an operation")):
                await ctx.step("two", _noop)
            if new and change.endswith("at its end"):
                await ctx.step("new", _noop)

        if new and change.startswith("a step"):
            await ctx.step("block", _noop)
        elif not (new and change == "the block is gone"):
            name = "other" if new and change.endswith("renamed") else "block"
            await ctx.try_block(name, block, catch=("step", "rollback"))
        if new and change.startswith("it is in the place"):
            await ctx.try_block("step", block)
        else:
            await ctx.step("step", _noop)
        await ctx.sleep("rest", 10)
        return "done"

    async def workflow(ctx: Context, _: object) -> Any:
        async def body(ctx: Context, _: None) -> Any:
            return Break(await part(ctx))

        if where == "loop":
            return await ctx.loop("outer", body)
        if where == "branch":
            return (await ctx.join("outer", {"branch": part}))["branch"]
        if where == "block":
            return (await ctx.try_block("outer", part)).value  # type: ignore[union-attr]
        return await part(ctx)

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        before = await namespace.dump()
        is_new[0] = True
        await process.restart()
        with pytest.raises(HistoryDivergedError):
            await process.stop(workflow)
        await process.restart()
        assert await namespace.dump() == before
        is_new[0] = False
        assert await process.finish(workflow) == "done"


async def test_a_block_that_was_taken_out_is_retired_with_removed(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: `removed(name, "try_block")` passes over all that is below it."""
    is_new = [False]

    async def workflow(ctx: Context, _: object) -> Any:
        async def block(ctx: Context) -> None:
            await ctx.step("one", _noop)

            async def branch(ctx: Context) -> None:
                await ctx.step("two", _noop)

            await ctx.join("join", {"a": branch})

        if is_new[0]:
            await ctx.removed("block", "try_block")
        else:
            await ctx.try_block("block", block)
        await ctx.sleep("rest", 10)
        return "done"

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        is_new[0] = True
        await process.restart()
        assert await process.finish(workflow) == "done"


async def test_a_divergence_inside_a_block_is_not_handed_back(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S4: nor can the block's own code swallow it."""
    is_new = [False]

    async def workflow(ctx: Context, _: object) -> Any:
        async def block(ctx: Context) -> None:
            try:
                await ctx.step("new" if is_new[0] else "old", _noop)
            except Exception:
                return
            await ctx.sleep("rest", 10)

        return isinstance(await ctx.try_block("block", block, catch=("step", "join", "race", "rollback")), BlockOk)

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        is_new[0] = True
        await process.restart()
        with pytest.raises(HistoryDivergedError, match="'block'"):
            await process.stop(workflow)
        is_new[0] = False
        await process.restart()
        assert await process.finish(workflow) is True


async def test_blocks_in_blocks_hand_back_what_reaches_them(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S1, S3: an inner block that does not catch the kind passes it to the outer one; loops in blocks go on."""
    seen: list[Any] = []

    async def function(world: World, ctx: Context) -> Any:
        async def inner(ctx: Context) -> None:
            await _step_fails(world, ctx)

        async def body(ctx: Context, number: int) -> Any:
            failure = await ctx.try_block("caught", inner)
            assert isinstance(failure, BlockFailure)
            await ctx.sleep("pause", 1)
            return Break(number) if number == 2 else Continue(number + 1)

        async def outer(ctx: Context) -> None:
            assert await ctx.loop("loop", body, 0) == 2
            await ctx.try_block("passed", inner, catch=("join",))

        seen.append(await ctx.try_block("outer", outer))
        await ctx.sleep("rest", 10)

    _, world = await run_in_world(namespace, mode, function, restarts=True)
    assert len(seen) >= 2
    assert all(failure == seen[0] for failure in seen)
    assert (seen[0].source, seen[0].name) == ("step", "fails")
    assert isinstance(seen[0].error, ErrorInfo)
    assert len(world.effects) == len(set(world.effects)) == 8


@pytest.mark.parametrize("caught", ["by a block", "by the code"])
@pytest.mark.parametrize("where", ["root", "loop", "branch"])
async def test_a_loop_that_fails_and_is_caught_resumes_with_what_came_after_it(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, where: str, caught: str, autojump_clock: MockClock
) -> None:
    """S1, S3: a loop has no record of its failure, which comes again out of the iteration that failed."""

    async def part(world: World, ctx: Context) -> Any:
        async def body(ctx: Context, number: int) -> Any:
            await world.step(ctx, "work", Declined(9) if number == 2 else None)
            return Continue(number + 1)

        async def loops(ctx: Context) -> None:
            await ctx.loop("inner", body, 0, history_prune_interval=1, history_size=0)

        if caught == "by a block":
            failure = await ctx.try_block("block", loops)
            assert isinstance(failure, BlockFailure)
            info = failure.error
        else:
            try:
                await loops(ctx)
            except StepCriticalError as error:
                info = error.error
        await ctx.sleep("pause", 5)
        await world.step(ctx, "after")
        return str(info)

    async def function(world: World, ctx: Context) -> Any:
        async def body(ctx: Context, _: None) -> Any:
            return Break(await part(world, ctx))

        async def branch(ctx: Context) -> Any:
            return await part(world, ctx)

        if where == "loop":
            result = await ctx.loop("outer", body)
        elif where == "branch":
            result = (await ctx.join("outer", {"a": branch}))["a"]
        else:
            result = await part(world, ctx)
        await ctx.sleep("rest", 10)
        return result

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == "Declined: declined: 9"
        if crash is None:
            assert world.count("work") == 3

    await explore(make_quick_namespace, mode, function, check)


@pytest.mark.parametrize("change", ["it does not fail", "it fails after more", "it breaks at once"])
async def test_a_loop_that_went_no_further_once_may_not_do_so_later(
    namespace: Namespace, mode: RunMode, change: str, autojump_clock: MockClock
) -> None:
    """S4: new code in which the loop that failed goes on, while what came after it is recorded."""
    is_new = False

    async def workflow(ctx: Context, _: object) -> Any:
        async def body(ctx: Context, number: int) -> Any:
            if is_new and change == "it breaks at once":
                await ctx.step("work", _noop)
                return Break(None)
            await ctx.step("work", _noop)
            if is_new and change == "it fails after more":
                await ctx.step("more", _noop)
            if number == 1 and not (is_new and change == "it does not fail"):
                raise ValueError("no")
            return Continue(number + 1)

        try:
            await ctx.loop("loop", body, 0)
        except ValueError:
            await ctx.step("after", _noop)
        await ctx.sleep("rest", 10)
        return "done"

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        before = await namespace.dump()
        is_new = True
        await process.restart()
        with pytest.raises(HistoryDivergedError, match="'after'"):
            await process.stop(workflow)
        await process.restart()
        assert await namespace.dump() == before
        is_new = False
        assert await process.finish(workflow) == "done"


async def test_an_interrupted_step_in_a_block_is_handed_back(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S22: as the failure of a step, after the death of the process in it."""
    raised: list[Any] = []

    async def function(world: World, ctx: Context) -> Any:
        async def die() -> None:
            namespace.kill()

        async def block(ctx: Context) -> None:
            try:
                await ctx.step("pay", die, at_most_once=True)
            except StepInterruptedError as error:
                raised.append(error)
                raise

        failure = await ctx.try_block("block", block)
        await ctx.sleep("rest", 10)
        return failure.step.kind  # type: ignore[union-attr]

    with pytest.raises(SimulatedCrashError):
        await run_in_world(namespace, mode, function)
    output, _ = await run_in_world(namespace, mode, function, restarts=True)
    assert output == "interrupted"
    assert len(raised) == 2
