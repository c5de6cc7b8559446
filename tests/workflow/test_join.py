"""`ctx.join`: branches beside each other, each kept as it settles; all values, or all errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
from harness import Crash, DriverKind, Fault, FaultyDriver, Namespace, host
from trio.testing import MockClock
from worlds import World, entries_put, explore, outline, run_in_world

from perdure.storage import StorageError, layout
from perdure.storage.schema import EntryStatus, StepEntry
from perdure.workflow import (
    Branch,
    Break,
    Context,
    Continue,
    CriticalError,
    InvalidArgumentError,
    JoinError,
    RunMode,
    WorkflowFailedError,
    WorkflowState,
    current_step,
)

YEAR = 365 * 86400.0


async def branches_of(namespace: Namespace, *path: str | int) -> dict[str, Any]:
    """What is recorded of each branch of a join."""
    return (await namespace.entries())[path].data["branches"]


# Values.


async def test_a_join_returns_every_value_as_it_is_stored_in_the_order_given(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S7, S8, S30: on every run; branches by name or as objects; a value changed afterwards changes nothing."""
    runs: list[list[Any]] = []

    async def function(world: World, ctx: Context) -> Any:
        async def value(ctx: Context, *, value: Any) -> Any:
            await trio.lowlevel.checkpoint()
            return value

        values: list[Any] = [None, 0, "", [], {}, False, (1, 2), b"x", 2**70]
        objects = [Branch(f"b{number}", partial(value, value=value_)) for number, value_ in enumerate(values)]
        result = await ctx.join("join", objects)
        plain = await ctx.join("plain", {"z": partial(value, value={1: 2}), "a": partial(value, value=None)})
        assert list(result) == [branch.name for branch in objects]
        assert list(plain) == ["z", "a"]
        runs.append([[result[branch] for branch in objects], dict(plain)])
        assert result["b6"] == [1, 2]
        if len(runs) == 1:
            result["b3"].append("changed")
        await ctx.sleep("rest", 10)

    await run_in_world(namespace, mode, function, restarts=True)
    assert len(runs) == 2
    assert runs[0][0][3] == ["changed"]
    runs[0][0][3].clear()
    assert runs[0] == runs[1] == [[None, 0, "", [], {}, False, [1, 2], b"x", 2**70], {"z": {1: 2}, "a": None}]
    assert [type(value) for value in runs[0][0]] == [type(value) for value in runs[1][0]]


# Crashes.


async def mixed(world: World, ctx: Context) -> Any:
    """Branches of every kind, one of which fails at once."""
    seen = world.__dict__.setdefault("seen", [])

    async def steps(ctx: Context) -> list[Any]:
        return [await world.step(ctx, "one", 1), await world.step(ctx, "two", 2, 3.0)]

    async def fails(ctx: Context) -> None:
        await world.step(ctx, "fine")
        await world.step(ctx, "fails", CriticalError("for good"))

    async def sleeps(ctx: Context) -> Any:
        outcome = await ctx.sleep("nap", 60)
        return await world.step(ctx, "after", outcome.value)

    async def waits(ctx: Context) -> Any:
        message = await ctx.queue.next("read", names=["mail"])
        return await world.step(ctx, "after", message.body)

    async def loops(ctx: Context) -> Any:
        async def body(ctx: Context, number: int) -> Any:
            await world.step(ctx, "work", number)
            await ctx.sleep("nap", 7)
            return Break("looped") if number == 2 else Continue(number + 1)

        return await ctx.loop("loop", body, 0, history_prune_interval=1, history_size=0)

    branches = {"steps": steps, "fails": fails, "sleeps": sleeps, "waits": waits, "loops": loops}
    try:
        await ctx.join("join", branches)
    except JoinError as error:
        seen.append(error)
    world.acknowledge("join")
    await ctx.sleep("rest", 10)
    await world.step(ctx, "end")
    return "ended"


async def check_mixed(namespace: Namespace, world: World) -> None:
    branches = await branches_of(namespace, "join")
    assert {name: (branch["status"], branch["output"]) for name, branch in branches.items()} == {
        "steps": ("completed", [1, 2]),
        "fails": ("failed", None),
        "sleeps": ("completed", "completed"),
        "waits": ("completed", "hello"),
        "loops": ("completed", "looped"),
    }
    assert branches["fails"]["error"].startswith("CriticalError: for good")
    errors: list[JoinError] = world.__dict__["seen"]
    assert len(errors) >= 2
    assert all((str(error), error.causes) == (str(errors[0]), errors[0].causes) for error in errors)
    assert all(error.errors == errors[0].errors for error in errors)
    assert list(errors[0].errors) == ["fails"]
    entries = await namespace.entries()
    assert list(errors[0].causes) == [entries["join",].id, entries["join", "fails", "fails"].id]


async def test_a_crash_at_any_write_of_a_join_ends_like_a_run_without_one(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17, S30, S39: one fails, one sleeps, one waits, one loops; what settled is not run again, whatever the others do."""
    outlines: list[Any] = []

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == "ended"
        await check_mixed(namespace, world)
        outlines.append(await outline(namespace))
        if crash is None:
            assert len(world.effects) == len(set(world.effects)) == 10

    exploration = await explore(make_quick_namespace, mode, mixed, check, [("mail", "hello")])
    assert exploration.counted >= 12
    assert all(found == outlines[0] for found in outlines)


@pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
async def test_a_storage_error_at_any_write_of_a_join_ends_like_a_run_without_one(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, fault: Fault, autojump_clock: MockClock
) -> None:
    """S15, S21: no name that a branch registered is lost, no effect that was acknowledged happens again."""
    number = 0
    while True:
        namespace, world = make_quick_namespace(), World(mixed, [("mail", "hello")])
        driver = await namespace.driver()
        left = [number]

        def is_due(_: object, left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        faulty = driver.inner = FaultyDriver(driver.inner, fault, is_due)  # type: ignore[assignment]
        for _ in range(2):
            try:
                async with host(namespace, mode) as process:
                    output = await world.live_on(process, restarts=False)
                break
            except StorageError as error:
                if "by the test" not in str(error):
                    raise
        assert output == "ended"
        assert world.recurred == []
        await namespace.close()
        if not faulty.has_failed:
            break
        number += 1
    assert number >= 12


async def test_a_settled_branch_is_durable_while_others_go_on(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S30: each as it settles, its error with the data that tells it apart, and it is not run again after a restart."""
    runs: list[str] = []

    async def workflow(ctx: Context, _: object) -> Any:
        async def settles(ctx: Context) -> int:
            runs.append("settles")
            return 7

        async def fails(ctx: Context) -> None:
            runs.append("fails")
            error = ConnectionError("refused")
            error.port = 80  # type: ignore[attr-defined]
            raise error

        async def sleeps(ctx: Context) -> None:
            await ctx.sleep("nap", 60)

        try:
            await ctx.join("join", {"settles": settles, "fails": fails, "sleeps": sleeps})
        except JoinError as error:
            info = error.errors["fails"]
            return [info.name, info.message, dict(info.metadata), "ConnectionError" in (info.stack or "")]

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        recorded = await branches_of(namespace, "join")
        assert recorded["settles"] == {"status": "completed", "output": 7, "error": None}
        assert recorded["fails"] == {"status": "failed", "output": None, "error": "ConnectionError: refused"}
        assert recorded["sleeps"]["status"] == "running"
        await process.restart()
        assert await process.finish(workflow) == ["ConnectionError", "refused", {"port": 80}, True]
    assert sorted(runs) == ["fails", "settles"]


# Waits.


async def test_a_join_waits_for_the_earliest_deadline_and_the_union_of_names(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S26, S30: no branch's wait holds another's."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def nap(ctx: Context, seconds: float) -> float:
            await ctx.sleep("nap", seconds)
            return seconds

        async def read(ctx: Context, name: str, timeout: float | None) -> Any:
            return [message.body for message in await ctx.queue.next_batch("read", names=[name], timeout=timeout)]

        branches: dict[str, Any] = {
            "long": partial(nap, seconds=50),
            "short": partial(nap, seconds=20),
            "a": partial(read, name="a", timeout=None),
            "b": partial(read, name="b", timeout=30),
        }
        return dict(await ctx.join("join", branches))

    async with host(namespace, mode) as process:
        began_s = process.clock.now_ms() / 1000
        stopped = await process.stop(workflow)
        assert stopped.waiting_for_messages == ("a", "b")
        assert stopped.sleep_until == pytest.approx(began_s + 20)
        await process.advance(20.001)
        stopped = await process.stop(workflow)
        assert stopped.waiting_for_messages == ("a", "b")
        assert stopped.sleep_until == pytest.approx(began_s + 30)
        await process.advance(10)
        stopped = await process.stop(workflow)
        assert stopped.waiting_for_messages == ("a",)
        assert stopped.sleep_until == pytest.approx(began_s + 50)
        await process.advance(20)
        await process.restart()
        stopped = await process.stop(workflow)
        assert (stopped.waiting_for_messages, stopped.sleep_until) == (("a",), None)
        assert await (await namespace.driver()).get_alarm("workflow-1") is None
        await process.send("a", "hello")
        assert (await process.stop(workflow)).output == {"long": 50, "short": 20, "a": ["hello"], "b": []}


async def test_a_wait_for_any_message_absorbs_waits_for_names(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S26: join(wait any, wait "x") wakes for "y", which the branch that waits for "x" does not get."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def read(ctx: Context, names: list[str] | None) -> Any:
            return (await ctx.queue.next("read", names=names)).body

        return dict(await ctx.join("join", {"any": partial(read, names=None), "x": partial(read, names=["x"])}))

    async with host(namespace, mode) as process:
        assert (await process.stop(workflow)).waiting_for_messages == ("*",)
        await process.send("y", "for any")
        assert (await process.stop(workflow)).waiting_for_messages == ("x",)
        await process.send("y", "for nobody")
        assert (await process.stop(workflow)).waiting_for_messages == ("x",)
        await process.send("x", "for x")
        assert (await process.stop(workflow)).output == {"any": "for any", "x": "for x"}


async def test_branches_that_wait_for_one_name_get_different_messages(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S26, S27: each message to one of them, with a death at any write, and none is lost."""
    mail = [("mail", number) for number in range(6)]

    async def function(world: World, ctx: Context) -> Any:
        async def read(ctx: Context) -> list[Any]:
            first = await ctx.queue.next("first", names=["mail"])
            await ctx.sleep("pause", 1)
            second = await ctx.queue.next("second", names=["mail"])
            return [first.body, second.body]

        result = await ctx.join("join", {"a": read, "b": read, "c": read})
        return sorted(body for bodies in result.values() for body in bodies)

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == list(range(6))
        assert not any(key.startswith(layout.MAILBOX_PREFIX) for key in await namespace.dump())

    await explore(make_quick_namespace, mode, function, check, mail)


async def test_wake_ends_every_sleep_and_backoff_of_a_join_at_once(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24: in one batch, at any depth; the deadline of a queue read stays."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def sleeps(ctx: Context) -> str:
            return (await ctx.sleep("nap", YEAR)).value

        async def nested(ctx: Context) -> Any:
            return dict(await ctx.join("inner", {"a": sleeps, "b": sleeps}))

        async def retries(ctx: Context) -> str:
            async def flaky() -> str:
                calls.append(1)
                if len(calls) == 1:
                    raise ConnectionError("refused")
                return "worked"

            return await ctx.step("flaky", flaky, retry_backoff_base=1e6, retry_backoff_max=1e6)

        async def reads(ctx: Context) -> Any:
            return len(await ctx.queue.next_batch("read", timeout=100))

        return dict(await ctx.join("join", {"nested": nested, "retries": retries, "reads": reads}))

    calls: list[int] = []
    namespace = make_quick_namespace()
    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.control("wake")
        stopped = await process.stop(workflow)
        assert stopped.state is WorkflowState.SLEEPING
        assert stopped.sleep_until == pytest.approx(process.clock.now_ms() / 1000 + 100)
        await process.restart()
        assert await process.finish(workflow) == {
            "nested": {"a": "interrupted", "b": "interrupted"},
            "retries": "worked",
            "reads": 0,
        }


async def test_a_retry_in_a_branch_does_not_fail_the_join(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17: its backoff holds no other branch; only a branch whose retries are exhausted fails."""

    async def function(world: World, ctx: Context) -> Any:
        async def flaky(ctx: Context, failures: int) -> str:
            async def work() -> str:
                world.begin()
                if current_step().attempt <= failures:
                    raise ConnectionError(f"refused {current_step().attempt}")
                return "worked"

            return await ctx.step("flaky", work, max_retries=2, retry_backoff_base=10)

        async def steady(ctx: Context) -> int:
            await ctx.sleep("nap", 25)
            return await world.step(ctx, "steady", len(world.effects))

        result = await ctx.join("join", {"flaky": partial(flaky, failures=2), "steady": steady})
        world.acknowledge("join")
        try:
            await ctx.join("hopeless", {"flaky": partial(flaky, failures=1), "never": partial(flaky, failures=9)})
        except JoinError as error:
            world.acknowledge("hopeless")
            await ctx.sleep("rest", 10)
            return [dict(result)["flaky"], list(error.errors), str(error.errors["never"])]

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output[:2] == ["worked", ["never"]]
        assert output[2].startswith(
            "StepExhaustedError: step 'flaky' failed 3 times; the last error was ConnectionError"
        )
        assert await namespace.attempts("hopeless", "never", "flaky") == (EntryStatus.EXHAUSTED, 3)
        if crash is None:
            order = [path[1:] for path in world.effects if path[0] == "join"]
            assert order == [("flaky", "flaky"), ("flaky", "flaky"), ("steady", "steady"), ("flaky", "flaky")]

    await explore(make_quick_namespace, mode, function, check)


# Failures.


async def test_every_error_is_reported_and_told_apart_after_a_restart_as_before(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S10, S30: classes, messages, attributes and stacks of all branches; the same JoinError, caught or stored."""
    errors: list[JoinError] = []

    class Odd(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(code, text)
            self.code = code

    async def function(world: World, ctx: Context) -> Any:
        async def step_fails(ctx: Context) -> None:
            await world.step(ctx, "fails", CriticalError("für immer"))

        async def own(ctx: Context) -> None:
            await ctx.sleep("pause", 5)
            raise Odd(42, "two arguments")

        async def group(ctx: Context) -> None:
            raise ExceptionGroup("both", [ValueError("one"), TypeError("two")])

        async def silent(ctx: Context) -> None:
            raise ValueError

        async def fine(ctx: Context) -> int:
            return 1

        branches = {"step": step_fails, "own": own, "group": group, "silent": silent, "fine": fine}
        try:
            await ctx.join("join", branches)
        except JoinError as error:
            errors.append(error)
            await ctx.sleep("rest", 10)
            raise

    async with host(namespace, mode) as process:
        world = World(function)
        with pytest.raises(WorkflowFailedError) as ended:
            await world.live_on(process, restarts=True)
    first, second = errors[0], errors[-1]
    assert len(errors) >= 2
    assert first is not second
    assert list(first.errors) == ["step", "own", "group", "silent"]
    assert first.errors == second.errors
    assert dict(first.values) == dict(second.values) == {"fine": 1}
    assert (str(first), first.name, first.causes) == (str(second), second.name, second.causes)
    assert [(info.name, info.message) for info in first.errors.values()] == [
        ("CriticalError", "für immer"),
        ("Odd", "(42, 'two arguments')"),
        ("ExceptionGroup", "both (2 sub-exceptions)"),
        ("ValueError", ""),
    ]
    assert first.errors["own"].metadata == {"code": 42}
    assert all("Traceback" in (info.stack or "") for info in first.errors.values())
    assert isinstance(first.__cause__, Odd)  # the others failed before the restart
    assert second.__cause__ is None
    assert ended.value.name == "JoinError"
    assert "silent: ValueError" in str(ended.value)


@pytest.mark.parametrize("restarts", [True, False])
async def test_results_that_together_do_not_fit_fail_a_branch_and_say_so(
    namespace: Namespace, mode: RunMode, restarts: bool, autojump_clock: MockClock
) -> None:
    """S9, S30: the branches that fit are kept; the error names the branch, its size and the room; the same on every run."""
    errors: list[JoinError] = []

    async def function(world: World, ctx: Context) -> Any:
        async def large(ctx: Context, number: int) -> bytes:
            await ctx.sleep("turn", number)
            return b"x" * 400_000

        try:
            await ctx.join("join", {f"b{number}": partial(large, number=number) for number in range(4)})
        except JoinError as error:
            errors.append(error)
        await ctx.sleep("rest", 10)
        return len(errors)

    await run_in_world(namespace, mode, function, restarts=restarts)
    recorded = await branches_of(namespace, "join")
    assert [branch["status"] for branch in recorded.values()] == ["completed", "failed", "completed", "failed"]
    assert len(errors) == (2 if restarts or mode == "yield" else 1)
    assert errors[0].errors == errors[-1].errors
    assert all("branch 'b" in info.message and "400" in info.message for info in errors[0].errors.values())


@pytest.mark.parametrize("count", [20, 400])
async def test_long_errors_of_many_branches_are_cut_to_fit_into_one_value(
    namespace: Namespace, mode: RunMode, count: int, autojump_clock: MockClock
) -> None:
    """S10, S30: 65 KB of non-ASCII text each: every class is kept, the messages and stacks as far as there is room."""
    errors: list[JoinError] = []

    async def function(world: World, ctx: Context) -> Any:
        async def fails(ctx: Context) -> None:
            error = ValueError("ü" * 33_000)
            for number in range(40):
                setattr(error, f"attribute_{number}", "ä" * 2000)
            raise error

        branches = {f"b{number}": fails for number in range(count)}
        try:
            await ctx.join("join", branches)
        except JoinError as error:
            errors.append(error)
        await ctx.sleep("rest", 10)

    await run_in_world(namespace, mode, function, restarts=True)
    assert len(errors) == 2
    assert errors[0].errors == errors[1].errors
    assert str(errors[0]) == str(errors[1])
    assert len(errors[0].errors) == count
    assert {info.name for info in errors[0].errors.values()} == {"ValueError"}
    assert all(info.message.startswith("ü" * 100) for info in errors[0].errors.values())
    assert all(info.message.endswith("[cut]") for info in errors[0].errors.values())
    driver = await namespace.driver()
    assert max(len(value) for value in (await namespace.dump()).values()) <= driver.value_bytes_max


async def test_a_branch_result_that_cannot_be_stored_fails_its_branch(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S9: it names branch, join and type, is not run again, and the others' values are kept."""
    runs: list[str] = []

    async def function(world: World, ctx: Context) -> Any:
        async def bad(ctx: Context) -> Any:
            runs.append("bad")
            return {"lock": trio.Lock()}

        async def good(ctx: Context) -> int:
            runs.append("good")
            return 1

        try:
            await ctx.join("join", {"bad": bad, "good": good})
        except JoinError as error:
            await ctx.sleep("rest", 10)
            return str(error.errors["bad"])

    output, _ = await run_in_world(namespace, mode, function, restarts=True)
    assert "Lock" in output
    assert "branch 'bad' of join 'join'" in output
    assert sorted(runs) == ["bad", "good"]
    assert (await branches_of(namespace, "join"))["good"]["output"] == 1


# Cost.


class Counts:
    """How often a driver was written to, and how much."""

    def __init__(self, batches: list[Any]) -> None:
        self.commits = len(batches)
        self.puts = sum(len(batch.puts) for batch in batches)
        self.bytes = sum(len(key) + len(value) for batch in batches for key, value in batch.puts)


async def join_of(namespace: Namespace, mode: RunMode, count: int, seconds: float) -> Counts:
    """What a join of so many one-step branches writes, after the workflow's creation and without its end."""

    async def workflow(ctx: Context, _: object) -> int:
        async def effect() -> int:
            await trio.sleep(seconds)
            return 1

        async def branch(ctx: Context) -> int:
            return await ctx.step("work", effect)

        result = await ctx.join("join", {f"branch {number}": branch for number in range(count)})
        return sum(result.values())

    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        assert await process.finish(workflow) == count
    assert sum(isinstance(kind, StepEntry) for batch in driver.batches for _, kind in entries_put(batch)) == count
    begins = next(n for n, batch in enumerate(driver.batches) if any(entries_put(batch)))
    return Counts(driver.batches[begins:-1])


@pytest.mark.parametrize("is_prompt", [False, True], ids=["waiting", "prompt"])
@pytest.mark.parametrize("seconds", [0, 1])
async def test_a_join_of_100_one_step_branches_takes_at_most_5_commits(
    driver_kind: DriverKind, mode: RunMode, seconds: float, is_prompt: bool, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """S13: what ends together is written together, also where the driver could write at once."""
    namespace = Namespace(driver_kind, tmp_path, is_prompt=is_prompt)
    assert (await join_of(namespace, mode, 100, seconds)).commits <= 5


async def test_a_join_of_1000_branches_writes_ten_times_what_one_of_100_does(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S13: linear, in a few commits, and without a recursion error."""
    small = await join_of(make_quick_namespace(), mode, 100, 1)
    large = await join_of(make_quick_namespace(), mode, 1000, 1)
    assert large.commits <= 5
    # The longer names count, and whether the last branches share the others' batch; every branch's own would be 100 times.
    assert large.puts <= 15 * small.puts
    assert large.bytes <= 15 * small.bytes


async def test_joins_nested_20_deep_finish_after_a_restart(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S13: with a loop and a block at every level, a sleep at the bottom, and another at the top."""

    async def function(world: World, ctx: Context) -> Any:
        async def level(ctx: Context, depth: int) -> int:
            if depth == 20:
                await ctx.sleep("bottom", 10)
                return 1

            async def body(ctx: Context, _: None) -> Any:
                result = await ctx.join("join", {"down": partial(level, depth=depth + 1), "side": leaf})
                return Break(sum(result.values()))

            async def block(ctx: Context) -> int:
                return await ctx.loop("loop", body)

            return (await ctx.try_block("block", block)).value  # type: ignore[union-attr]

        async def leaf(ctx: Context) -> int:
            return await world.step(ctx, "leaf", 1)

        total = await level(ctx, 0)
        await ctx.sleep("top", 10)
        return total

    output, world = await run_in_world(namespace, mode, function, restarts=True)
    assert output == 21
    assert len(world.effects) == 20


# Names, and what is refused.


async def test_branch_names_are_registered_in_the_order_given(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S16, S30: before anything of the branches, whatever order they run in."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def branch(ctx: Context) -> None:
            await ctx.sleep("nap", 0)

        await ctx.join("join", dict.fromkeys("zyxabc", branch))

    for _ in range(5):
        namespace = make_namespace()
        async with host(namespace, mode) as process:
            await process.finish(workflow)
            names = [value.decode() for _, value in await (await namespace.driver()).list(layout.NAMES_PREFIX)]
            assert names == ["join", *"zyxabc", "nap"]


async def test_two_branches_of_one_name_are_refused(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: at once, and nothing is recorded."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def branch(ctx: Context) -> None: ...

        await ctx.join("join", [Branch("a", branch), Branch("a", branch)])

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match="two branches of one join are named 'a'"):
            await process.stop(workflow)
        assert (await namespace.snapshot()).entries == ()


async def test_names_that_leave_no_room_are_refused(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S9: 2,048 names of 512 bytes are more than one value holds."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def branch(ctx: Context) -> None: ...

        await ctx.join("join", {f"{number:0512}": branch for number in range(2048)})

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match="too much room"):
            await process.stop(workflow)
        assert (await namespace.snapshot()).entries == ()
