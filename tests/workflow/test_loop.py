"""`ctx.loop`: state that survives, iterations that are forgotten with the state that makes them superfluous."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Crash, Namespace, crashes, host
from trio.testing import MockClock

from perdure.storage import Batch, layout
from perdure.storage.schema import LoopEntry, decode_entry
from perdure.workflow import Break, Context, Continue, InvalidArgumentError, RunMode, WorkflowState

calls: list[Any] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def add(total: int) -> int:
    calls.append(total)
    return total + 1


def counting(until: int, *, pause_at: int | None = None, ephemeral: bool = False, **options: Any) -> Any:
    """A workflow that counts in a loop, one step for each iteration, and may wait in one of them."""

    async def workflow(ctx: Context, _: object) -> int:
        async def body(inner: Context, total: int) -> Continue[int] | Break[int]:
            following = await inner.step("add", add, total, ephemeral=ephemeral)
            if total == pause_at:
                await inner.queue.next("wait", names=["go"])
            return Continue(following) if following < until else Break(following)

        return await ctx.loop("count", body, 0, **options)

    return workflow


async def iterations(namespace: Namespace) -> list[int]:
    """The numbers of the loop's iterations that are in history."""
    return sorted({int(entry.path[1]) for entry in (await namespace.snapshot()).entries if len(entry.path) == 3})


async def test_a_loop_goes_on_in_the_iteration_it_was_in_after_a_restart(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S7, S12: state and iteration are stored; finished iterations do not run again."""
    workflow = counting(10, pause_at=6)
    async with host(namespace, mode) as process:
        await process.stop(workflow)
        (loop,) = [entry for entry in (await namespace.snapshot()).entries if entry.kind == "loop"]
        assert loop.data == {"state": 6, "iteration": 6, "output": None}
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == 10
        snapshot = await namespace.snapshot()
    assert calls == list(range(10))
    (loop,) = [entry for entry in snapshot.entries if entry.kind == "loop"]
    assert loop.data == {"state": 9, "iteration": 9, "output": 10}
    assert loop.metadata is not None
    assert loop.metadata.status.name == "COMPLETED"


async def test_a_finished_loop_is_visited_as_a_unit(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S7: its body is not called on replay, whatever it would do."""
    bodies: list[object] = []

    async def workflow(ctx: Context, _: object) -> str:
        async def body(inner: Context, state: object) -> Break[str]:
            bodies.append(state)
            await inner.step("add", add, 1)
            return Break("value")

        value = await ctx.loop("loop", body)
        await ctx.queue.next("wait", names=["go"])
        return value

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == "value"
    assert bodies == [None]


@pytest.mark.parametrize(
    ("interval", "size", "kept_at_25", "kept_at_end"),
    [
        (20, None, range(26), range(10, 30)),
        (5, None, range(20, 26), range(25, 30)),
        (5, 0, range(25, 26), range(0)),
        (1, 0, range(25, 26), range(0)),
        (4, 1, range(23, 26), range(29, 30)),
        (3, 10, range(14, 26), range(20, 30)),
        (7, 100, range(26), range(30)),
    ],
)
async def test_history_keeps_as_many_iterations_as_it_was_told(
    namespace: Namespace,
    mode: RunMode,
    autojump_clock: MockClock,
    interval: int,
    size: int | None,
    kept_at_25: range,
    kept_at_end: range,
) -> None:
    """S12: pruning at every interval down to `history_size`, which may be larger than the interval; and at the end."""
    workflow = counting(30, pause_at=25, history_prune_interval=interval, history_size=size)
    async with host(namespace, mode) as process:
        await process.stop(workflow)
        assert await iterations(namespace) == list(kept_at_25)
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == 30
        assert await iterations(namespace) == list(kept_at_end)
        steps = [entry for entry in (await namespace.snapshot()).entries if entry.kind == "step"]
        stored = await namespace.dump()
    assert calls == list(range(30))
    metadata = [key for key in stored if key.startswith(layout.METADATA_PREFIX)]
    assert len(metadata) == len(steps) + 1, "metadata without its entry"


def loop_entry(batch: Batch) -> LoopEntry | None:
    for key, value in batch.puts:
        if key.startswith(layout.HISTORY_PREFIX) and isinstance(kind := decode_entry(value).kind, LoopEntry):
            return kind
    return None


@pytest.mark.parametrize("ephemeral", [False, True])
async def test_pruning_commits_with_the_state_it_belongs_to(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, ephemeral: bool
) -> None:
    """S12: no batch forgets iterations without the state that has passed them; once an interval, one range."""
    workflow = counting(41, pause_at=36, ephemeral=ephemeral, history_prune_interval=10, history_size=3)
    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        await process.stop(workflow)
        batches = list(driver.batches)
        driver = await namespace.restart()
        process.handle = None
        await process.send("go")
        await process.finish(workflow)
        batches += driver.batches
    pruning = [batch for batch in batches if batch.delete_ranges]
    for batch, iteration in zip(pruning, [10, 20, 30, 40, 40], strict=True):
        entry = loop_entry(batch)
        assert entry is not None, "pruning without the loop's state"
        assert entry.iteration == iteration
        assert (entry.output is not None) == (batch is pruning[-1])
        (bounds,) = batch.delete_ranges
        kept_from = iteration - 3 if entry.output is None else iteration - 2
        assert bounds[1] == layout.loop_iterations_range((0,), 0, kept_from)[1]
    assert calls == list(range(41))


async def test_a_wait_in_an_iteration_makes_what_came_before_durable(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S12, S23: iterations that recorded nothing durable by themselves are not lost to a crash after a durable step."""

    async def workflow(ctx: Context, _: object) -> list[int]:
        async def body(inner: Context, seen: list[int]) -> Continue[list[int]] | Break[list[int]]:
            if len(seen) == 7:
                await inner.step("add", add, 7)
                await inner.queue.next("wait", names=["go"])
                return Break(seen)
            return Continue([*seen, len(seen)])

        return await ctx.loop("count", body, [])

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        (loop,) = [entry for entry in (await namespace.snapshot()).entries if entry.kind == "loop"]
        assert loop.data["iteration"] == 7
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == list(range(7))
    assert calls == [7]


@pytest.mark.parametrize("ephemeral", [False, True])
async def test_a_crash_at_any_write_of_a_loop_ends_as_without_one(
    make_namespace: Any, mode: RunMode, autojump_clock: MockClock, ephemeral: bool
) -> None:
    """S12: pruning, state and value stay together, before and after every write; no durable step runs twice."""
    workflow = counting(9, ephemeral=ephemeral, history_prune_interval=3, history_size=1)

    async def scenario(namespace: Namespace) -> Any:
        async with host(namespace, mode) as process:
            output = await process.finish(workflow)
            return output, await iterations(namespace), (await namespace.snapshot()).entries

    async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
        output, kept, entries = outcome
        assert output == 9
        assert kept == [8]
        assert sorted(entry.kind for entry in entries) == ["loop", "step"]
        assert sorted(set(calls)) == list(range(9))
        if crash is None:
            assert calls == list(range(9))
        elif not ephemeral:
            # Only the step whose outcome the crash kept from the disk may have run twice.
            assert len(calls) - 9 == (crash.when == "before" and calls != list(range(9)))
        calls.clear()

    exploration = await crashes(scenario, make_namespace, check)
    assert len(exploration.explored) == 2 * exploration.counted
    assert exploration.counted >= (4 if ephemeral else 10)


def nested(depth: int) -> Any:
    """Loops nested `depth` deep, each of one full iteration and one that breaks, with a wait at the bottom."""

    async def descend(ctx: Context, level: int) -> int:
        if level == depth:
            await ctx.queue.next("wait", names=["go"])
            return await ctx.step("bottom", add, level)

        async def body(inner: Context, state: int) -> Continue[int] | Break[int]:
            if state == 0:
                return Continue(1)
            return Break(await descend(inner, level + 1))

        return await ctx.loop("loop", body, 0)

    async def workflow(ctx: Context, _: object) -> int:
        return await descend(ctx, 0)

    return workflow


async def test_loops_nested_20_deep_survive_a_restart_at_the_bottom(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S13: loops nested 20 deep: no recursion error, each level's state is kept, and the deepest place is one path."""
    workflow = nested(20)
    async with host(namespace, mode) as process:
        assert (await process.stop(workflow)).state is WorkflowState.SLEEPING
        loops = [entry for entry in (await namespace.snapshot()).entries if entry.kind == "loop"]
        assert len(loops) == 20
        assert all(entry.data["iteration"] == 1 for entry in loops)
        await process.restart()
        await process.stop(workflow)
        await process.send("go")
        assert await process.finish(workflow) == 21
        paths = [entry.path for entry in (await namespace.snapshot()).entries if entry.kind == "step"]
    assert paths == [("loop", 1) * 20 + ("bottom",)]
    assert calls == [20]


async def test_a_nested_loop_prunes_within_its_own_iteration(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S12: pruning an inner loop leaves the outer one's iterations alone, and the outer takes the inner ones along."""

    async def workflow(ctx: Context, _: object) -> list[int]:
        async def outer(first: Context, rows: list[int]) -> Continue[list[int]] | Break[list[int]]:
            async def inner(second: Context, total: int) -> Continue[int] | Break[int]:
                await second.step("add", add, (len(rows), total))
                return Continue(total + 1) if total < 6 else Break(total)

            rows = [*rows, await first.loop("inner", inner, 0, history_prune_interval=2, history_size=2)]
            return Continue(rows) if len(rows) < 6 else Break(rows)

        value = await ctx.loop("outer", outer, [], history_prune_interval=3, history_size=2)
        await ctx.queue.next("wait", names=["go"])
        return value

    async def add(place: tuple[int, int]) -> int:
        calls.append(place)
        return 0

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        paths = {entry.path for entry in (await namespace.snapshot()).entries if entry.kind == "step"}
        assert paths == {("outer", row, "inner", column, "add") for row in (4, 5) for column in (5, 6)}
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == [6] * 6
    assert calls == [(row, column) for row in range(6) for column in range(7)]


@pytest.mark.parametrize("answer", [0, "on", Continue, {"state": 1}])
async def test_a_wrong_answer_of_the_body_is_a_mistake_and_not_a_failure(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, answer: object
) -> None:
    """S12: the error says what to return; right code goes on in the same iteration."""

    async def wrong(ctx: Context, _: object) -> object:
        async def body(inner: Context, total: int) -> Any:
            await inner.step("add", add, total)
            return answer if total == 2 else Continue(total + 1)

        return await ctx.loop("count", body, 0)

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match=r"Continue\(state\).*Break\(value\)"):
            await process.stop(wrong)
        await process.restart()
        assert not (await namespace.snapshot()).state.is_terminal
        assert await process.finish(counting(5)) == 5
    assert calls == list(range(5))


async def test_none_goes_on_only_in_a_loop_without_state(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S12: returning nothing repeats a stateless loop, and would lose the state of another."""
    rounds: list[int] = []

    async def stateless(ctx: Context, _: object) -> str:
        async def body(inner: Context, state: None) -> Break[str] | None:
            rounds.append(await inner.step("add", add, len(rounds)))
            return Break("done") if len(rounds) == 3 else None

        return await ctx.loop("loop", body)

    async def forgetful(ctx: Context, _: object) -> Any:
        async def body(inner: Context, state: int) -> Any:
            return None

        return await ctx.loop("other", body, 1)

    async with host(namespace, mode) as process:
        assert await process.finish(stateless) == "done"
    assert rounds == [1, 2, 3]
    other = Namespace(namespace.kind, namespace.path.parent)
    async with host(other, mode) as process:
        with pytest.raises(InvalidArgumentError, match="None although the loop has a state"):
            await process.stop(forgetful)
