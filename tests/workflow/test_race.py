"""`ctx.race`: the first branch to succeed wins, durably, and nothing of the others remains or recurs."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import trio
from harness import (
    Crash,
    Fault,
    FaultyDriver,
    Namespace,
    SlowDriver,
    host,
)
from trio.testing import MockClock
from worlds import World, entries_put, explore, run_in_world

from perdure.storage import Batch, StorageError, layout
from perdure.storage.schema import RaceEntry
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    HistoryDivergedError,
    InvalidArgumentError,
    MisuseError,
    RaceError,
    RaceResult,
    RunMode,
    WorkflowFailedError,
    WorkflowState,
)

YEAR = 365 * 86400.0


async def statuses(namespace: Namespace, *path: str | int) -> dict[str, str]:
    """The recorded status of each branch of a race."""
    branches = (await namespace.entries())[path].data["branches"]
    return {name: branch["status"] for name, branch in branches.items()}


async def paths_below(namespace: Namespace, *path: str | int) -> set[Any]:
    """The paths of all entries below one."""
    return {found for found in await namespace.entries() if found[: len(path)] == path and found != path}


# S29: the winner's value, and what becomes of the losers.


async def test_the_winners_value_returns_without_waiting_for_a_loser(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29: a loser in a step that takes a year, some that sleep or wait, one of them deeper; then it parks as ever."""
    cancelled: list[str] = []

    async def function(world: World, ctx: Context) -> Any:
        async def quick(ctx: Context) -> str:
            return await world.step(ctx, "quick", "won", 2.0)

        async def working(ctx: Context) -> None:
            try:
                await world.step(ctx, "long", None, YEAR, timeout=0)
            except trio.Cancelled:
                cancelled.append("working")
                raise

        async def sleeping(ctx: Context) -> None:
            await ctx.sleep("long", YEAR)

        async def waiting(ctx: Context) -> None:
            await ctx.queue.next("mail")

        async def deeper(ctx: Context) -> None:
            await ctx.join("both", {"sleeping": sleeping, "waiting": waiting})

        branches = {"working": working, "sleeping": sleeping, "quick": quick, "waiting": waiting, "deeper": deeper}
        result = await ctx.race("race", branches)
        world.acknowledge("race")
        await ctx.sleep("rest", 10)
        return [result.winner, result.value]

    began_s = trio.current_time()
    output, world = await run_in_world(namespace, mode, function, restarts=True)
    assert output == ["quick", "won"]
    assert trio.current_time() - began_s == pytest.approx(12, abs=0.1)
    assert cancelled == ["working"]
    assert world.effects.count(("race", "quick", "quick")) == 1
    assert world.effects.count(("race", "working", "long")) == 1
    assert world.recurred == []
    assert await paths_below(namespace, "race") == {("race", "quick", "quick")}
    assert await statuses(namespace, "race") == {
        "working": "cancelled",
        "sleeping": "running",
        "quick": "completed",
        "waiting": "running",
        "deeper": "running",
    }


async def test_the_workflow_parks_after_a_race_in_yield_mode_too(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29: losers that were unwound do not count as running: the sleep after the race is one, with its alarm."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def quick(ctx: Context) -> int:
            return 1

        async def slow(ctx: Context) -> None:
            await ctx.sleep("long", YEAR)

        for number in range(3):
            await ctx.race(f"race {number}", {"slow": slow, "quick": quick, "slow too": slow})
        return (await ctx.sleep("rest", 10)).value

    async with host(namespace, mode) as process:
        stopped = await process.stop(workflow)
        assert stopped.state is WorkflowState.SLEEPING
        assert stopped.sleep_until == pytest.approx(process.clock.now_ms() / 1000 + 10)
        assert await (await namespace.driver()).get_alarm("workflow-1") == process.clock.now_ms() + 10_000
        assert await process.finish(workflow) == "completed"


async def decided_race(world: World, ctx: Context) -> Any:
    """Losers with recorded work, nested work, a wait, and a failure; the winner sleeps in between."""

    async def winner(ctx: Context) -> str:
        await world.step(ctx, "begin")
        await ctx.sleep("pause", 5)
        return await world.step(ctx, "end", "won")

    async def worker(ctx: Context) -> None:
        await world.step(ctx, "recorded")
        await world.step(ctx, "long", None, YEAR, timeout=0)

    async def sleeper(ctx: Context) -> None:
        async def body(ctx: Context, number: int) -> Any:
            await world.step(ctx, "recorded")
            await ctx.sleep("pause", 2)
            return Continue(number + 1)

        await ctx.loop("forever", body, 0)

    async def failing(ctx: Context) -> None:
        await world.step(ctx, "fails", CriticalError("no"))

    async def forked(ctx: Context) -> None:
        async def branch(ctx: Context) -> None:
            await world.step(ctx, "recorded")
            await ctx.queue.next("mail")

        await ctx.join("join", {"a": branch, "b": branch})

    await world.step(ctx, "before")
    branches = {"worker": worker, "sleeper": sleeper, "winner": winner, "failing": failing, "forked": forked}
    result = await ctx.race("race", branches)
    world.acknowledge("race")
    await ctx.sleep("rest", 10)
    await world.step(ctx, "after")
    return [result.winner, result.value]


async def test_a_crash_at_any_write_of_a_race_ends_like_a_run_without_one(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29, S39: once the race has returned nothing of it happens again, and no loser's history is left."""

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == ["winner", "won"]
        assert await paths_below(namespace, "race") == {("race", "winner", name) for name in ("begin", "pause", "end")}
        assert (await statuses(namespace, "race"))["winner"] == "completed"
        dump = await namespace.dump()
        known = {entry.id for entry in (await namespace.snapshot()).entries}
        assert {layout.parse_metadata_key(key) for key in dump if key.startswith(layout.METADATA_PREFIX)} <= known
        assert {layout.parse_detail_key(key) for key in dump if key.startswith(layout.DETAIL_PREFIX)} <= known
        if crash is None:
            assert world.count("begin") == world.count("end") == world.count("after") == 1

    # In yield mode a branch at work holds the others' parks: then the worker's step must not last.
    exploration = await explore(make_quick_namespace, mode, decided_race, check)
    assert exploration.counted >= 8


@pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
async def test_a_storage_error_at_any_write_of_a_race_ends_like_a_run_without_one(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, fault: Fault, autojump_clock: MockClock
) -> None:
    """S15, S21, S29: the winner's batch among them; after reloading the race is decided once."""
    number = 0
    while True:
        namespace, world = make_quick_namespace(), World(decided_race)
        driver = await namespace.driver()
        left = [number]

        def is_due(_: object, left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        faulty = driver.inner = FaultyDriver(driver.inner, fault, is_due)  # type: ignore[assignment]
        for _ in range(2):
            try:
                async with host(namespace, mode) as process:
                    output = await world.live_on(process)
                break
            except StorageError as error:
                if "by the test" not in str(error):
                    raise
        assert output == ["winner", "won"]
        assert world.recurred == []
        await namespace.close()
        if not faulty.has_failed:
            break
        number += 1
    assert number >= 8


# Promise 3: the winner is durable before a loser sees that it has lost, and after it the loser writes nothing.


def decides(batch: Batch) -> bool:
    """Whether a batch holds the winner of a race."""
    return any(isinstance(kind, RaceEntry) and kind.winner is not None for _, kind in entries_put(batch))


class Recorder:
    """A driver whose batches take a second, and that notes in a log when the winner of a race is durable."""

    def __init__(self, inner: Any, log: list[str]) -> None:
        self._inner = SlowDriver(inner)
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def batch(self, batch: Batch) -> None:
        if decides(batch):
            self._log.append("the winner is on its way")
        await self._inner.batch(batch)
        if decides(batch):
            self._log.append("the winner is durable")


Loser = Callable[[Context, list[str], Callable[[Awaitable[Any]], Awaitable[Any]]], Awaitable[Any]]


async def loses_in_a_step(ctx: Context, log: list[str], seen: Any) -> None:
    async def work() -> None:
        await seen(trio.sleep_forever())  # noqa: ASYNC105

    await ctx.step("work", work, timeout=0)


async def loses_as_its_step_ends(ctx: Context, log: list[str], seen: Any) -> None:
    async def work() -> None:
        await trio.sleep(3.5)  # the winner's batch is on its way from 3 s to 4 s
        log.append("the step is done")

    await seen(ctx.step("work", work))


async def loses_as_its_step_fails(ctx: Context, log: list[str], seen: Any) -> None:
    async def work() -> None:
        await trio.sleep(3.5)
        log.append("the step is done")
        raise CriticalError("no")

    await seen(ctx.step("work", work))


async def loses_as_its_step_times_out(ctx: Context, log: list[str], seen: Any) -> None:
    async def work() -> None:
        try:
            await trio.sleep(YEAR)
        finally:
            log.append("the step is done")

    await seen(ctx.step("work", work, timeout=2.5))


async def loses_as_its_sleep_ends(ctx: Context, log: list[str], seen: Any) -> None:
    await seen(ctx.sleep("nap", 3.5))


async def loses_as_its_message_arrives(ctx: Context, log: list[str], seen: Any) -> None:
    await seen(ctx.queue.next("read", names=["mail"]))


async def loses_asking_for_more(ctx: Context, log: list[str], seen: Any) -> None:
    await trio.sleep(3.5)
    await seen(ctx.sleep("nap", 0))


async def loses_below_a_shield(ctx: Context, log: list[str], seen: Any) -> None:
    with trio.CancelScope(shield=True):
        await loses_as_its_step_ends(ctx, log, seen)


async def loses_in_a_join(ctx: Context, log: list[str], seen: Any) -> None:
    async def quick(ctx: Context) -> None:
        await ctx.sleep("nap", 3.5)

    async def slow(ctx: Context) -> None:
        await loses_as_its_step_ends(ctx, log, seen)

    await ctx.join("join", {"quick": quick, "slow": slow})


LOSERS = [
    loses_in_a_step,
    loses_as_its_step_ends,
    loses_as_its_step_fails,
    loses_as_its_step_times_out,
    loses_as_its_sleep_ends,
    loses_as_its_message_arrives,
    loses_asking_for_more,
    loses_below_a_shield,
    loses_in_a_join,
]


@pytest.mark.parametrize("loser", LOSERS)
async def test_the_winner_is_durable_before_a_loser_sees_that_it_has_lost_and_writes_nothing_after_it(
    namespace: Namespace, mode: RunMode, loser: Loser, autojump_clock: MockClock
) -> None:
    """S29: also for a loser that would have got further while the winner's batch is on its way."""
    log: list[str] = []

    async def seen(awaited: Awaitable[Any]) -> Any:
        try:
            value = await awaited
        except BaseException:
            log.append("the loser has lost")
            raise
        log.append("the loser got further")
        return value

    async def workflow(ctx: Context, _: object) -> Any:
        async def winner(ctx: Context) -> str:
            async def work() -> None:
                await trio.sleep(1)

            await ctx.step("work", work)  # the race's entry is durable at 1 s, this step at 3 s
            return "won"

        async def losing(ctx: Context) -> str:
            await loser(ctx, log, seen)
            return "lost"

        result = await ctx.race("race", {"loser": losing, "winner": winner})
        log.append("the race has returned")
        return result.value

    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        driver.inner = Recorder(driver.inner, log)  # type: ignore[assignment]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.stop, workflow)
            await trio.sleep(3.5)
            if mode == "live":
                assert process.handle is not None
                await process.send("mail", "late")
            await trio.sleep(10)
    assert await (await namespace.driver()).get(layout.STATE_KEY) == b"completed"
    assert (await namespace.snapshot()).output == "won"
    told = [line for line in log if line != "the step is done"]
    assert told == [
        "the winner is on its way",
        "the winner is durable",
        "the loser has lost",
        "the race has returned",
    ]
    batches = driver.batches
    [at] = [number for number, batch in enumerate(batches) if decides(batch)]
    [race] = [location for location, kind in entries_put(batches[at]) if isinstance(kind, RaceEntry)]
    names = [value.decode() for _, value in await (await namespace.driver()).list(layout.NAMES_PREFIX)]
    prefix = layout.entry_key((*race, names.index("loser")))
    begun = any(key.startswith(prefix) for batch in batches[:at] for key, _ in batch.puts)
    assert prefix in batches[at].delete_prefixes or not begun
    assert not any(key.startswith(prefix) for batch in batches[at:] for key, _ in batch.puts)
    if mode == "live":
        # Nobody took the message: it waits.
        assert [value for _, value in await (await namespace.driver()).list(layout.MAILBOX_PREFIX)] != []


async def test_of_two_branches_that_succeed_at_once_one_wins_on_every_run(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29: whichever it is, the other leaves nothing, and a restart changes nothing."""
    for _ in range(10):
        namespace = make_namespace()
        results: list[RaceResult[str]] = []

        async def function(world: World, ctx: Context, results: list[RaceResult[str]] = results) -> Any:
            async def branch(ctx: Context) -> str:
                return await world.step(ctx, "work", "value")

            results.append(await ctx.race("race", {"a": branch, "b": branch}))
            await ctx.sleep("rest", 10)
            return results[-1].winner

        winner, world = await run_in_world(namespace, mode, function, restarts=True)
        assert len(results) == 2
        assert results == [RaceResult(winner, "value")] * 2
        assert await paths_below(namespace, "race") == {("race", winner, "work")}
        assert len(world.effects) == 2


async def test_a_loser_that_asks_for_something_below_a_shield_cannot_hold_the_race(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S20, S29: the race waits for shielded clean-up, no longer; what the clean-up asks for is refused."""
    cleaned: list[str] = []

    async def function(world: World, ctx: Context) -> Any:
        async def quick(ctx: Context) -> int:
            return await world.step(ctx, "quick", 1, 1.0)

        async def slow(ctx: Context) -> None:
            try:
                await world.step(ctx, "slow", None, YEAR, timeout=0)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(5)
                    cleaned.append("slept")
                    await ctx.sleep("never recorded", 100)
                cleaned.append("asked")

        result = await ctx.race("race", {"quick": quick, "slow": slow})
        took_s = trio.current_time()
        await ctx.sleep("rest", 1)
        return [result.value, took_s]

    output, _ = await run_in_world(namespace, mode, function)
    assert output[0] == 1
    assert output[1] == pytest.approx(6, abs=0.1) or mode == "yield"
    assert cleaned == ["slept"]
    assert await paths_below(namespace, "race") == {("race", "quick", "quick")}


@pytest.mark.parametrize("how", ["join", "race", "loop", "block"])
async def test_all_below_a_loser_is_stopped(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, how: str, autojump_clock: MockClock
) -> None:
    """S29: a loser in a join, a race, a loop or a block of its own; everything below it is cancelled, and forgotten."""
    cancelled: list[tuple[Namespace, str]] = []

    async def function(world: World, ctx: Context) -> Any:
        async def long(ctx: Context) -> None:
            await world.step(ctx, "recorded")
            try:
                await world.step(ctx, "long", None, YEAR, timeout=0)
            except trio.Cancelled:
                cancelled.append(how)
                raise

        async def body(ctx: Context, _: None) -> Any:
            await long(ctx)

        async def nested(ctx: Context) -> Any:
            if how == "join":
                await ctx.join("inner", {"a": long, "b": long})
            elif how == "race":
                await ctx.race("inner", {"a": long, "b": long})
            elif how == "loop":
                await ctx.loop("inner", body)
            else:
                await ctx.try_block("inner", long)

        async def quick(ctx: Context) -> str:
            return await world.step(ctx, "quick", "won", 3.0)

        result = await ctx.race("race", {"nested": nested, "quick": quick})
        world.acknowledge("race")
        await ctx.sleep("rest", 10)
        return result.value

    cancelled: list[str] = []

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == "won"
        assert await paths_below(namespace, "race") == {("race", "quick", "quick")}
        if crash is None:
            assert cancelled == [how] * (2 if how in ("join", "race") else 1)

    await explore(make_quick_namespace, mode, function, check)


async def test_a_race_inside_a_loser_may_be_decided_at_the_same_moment(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29: an inner winner that is recorded in the same batch as the outer one is gone with its branch."""

    async def function(world: World, ctx: Context) -> Any:
        async def one(ctx: Context) -> str:
            return await world.step(ctx, "one", "inner", 1.0)

        async def two(ctx: Context) -> str:
            await ctx.sleep("long", YEAR)
            return "never"

        async def nested(ctx: Context) -> str:
            result = await ctx.race("inner", {"one": one, "two": two})
            return await world.step(ctx, "after", result.value, 50.0)

        async def quick(ctx: Context) -> str:
            return await world.step(ctx, "quick", "outer", 1.0)

        result = await ctx.race("race", {"nested": nested, "quick": quick})
        world.acknowledge("race")
        await ctx.sleep("rest", 10)
        return result.value

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == "outer"
        assert await paths_below(namespace, "race") == {("race", "quick", "quick")}

    await explore(make_quick_namespace, mode, function, check)


async def test_a_loser_in_a_worker_thread_is_left_behind(namespace: Namespace, mode: RunMode) -> None:
    """S19, S29: the race does not wait for the thread, whose late result is ignored."""
    begun, release, done = trio.Event(), threading.Event(), trio.Event()

    def work() -> str:
        trio.from_thread.run_sync(begun.set)
        release.wait()
        trio.from_thread.run_sync(done.set, trio_token=token)
        return "late"

    async def workflow(ctx: Context, _: object) -> Any:
        async def quick(ctx: Context) -> str:
            await ctx.step("quick", begun.wait)
            return "won"

        async def slow(ctx: Context) -> str:
            return await ctx.step("slow", work, timeout=0)

        result = await ctx.race("race", {"quick": quick, "slow": slow})
        release.set()
        await ctx.step("wait", done.wait)
        return result.value

    token = trio.lowlevel.current_trio_token()
    async with host(namespace, mode) as process:
        assert await process.ended(workflow) == "won"
        assert await paths_below(namespace, "race") == {("race", "quick", "quick")}
        assert (await statuses(namespace, "race"))["slow"] == "cancelled"


async def test_what_comes_out_of_a_losers_unwinding_is_nobodys(
    make_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29: neither an exception of its clean-up, nor a misuse in it, nor what it did not get to, fails the workflow."""
    for number in range(4):

        async def function(world: World, ctx: Context, number: int = number) -> Any:
            async def quick(ctx: Context) -> str:
                await ctx.sleep("pause", 5)
                return await world.step(ctx, "quick", "won", 1.0)

            async def cleaning(ctx: Context) -> None:
                try:
                    await trio.sleep(YEAR)
                except BaseException:
                    if number == 0:
                        raise ValueError("of the clean-up") from None
                    if number == 1:
                        raise MisuseError("of the clean-up") from None
                    if number == 2:
                        await ctx.sleep("", -1)
                    raise

            async def slow(ctx: Context) -> None:
                async def body(ctx: Context, _: None) -> None:
                    if world.count("begin"):
                        await cleaning(ctx)  # before it asks for what is recorded
                    await world.step(ctx, "begin")
                    await ctx.sleep("long", YEAR)

                await ctx.loop("loop", body)

            result = await ctx.race("race", {"slow": slow, "quick": quick})
            world.acknowledge("race")
            await ctx.sleep("rest", 10)
            return result.value

        output, _ = await run_in_world(make_namespace(), mode, function, restarts=True)
        assert output == "won"


async def test_the_context_of_a_loser_is_refused_afterwards(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S6: like that of any scope that is over."""
    kept: list[Context] = []

    async def workflow(ctx: Context, _: object) -> Any:
        async def quick(ctx: Context) -> int:
            await trio.sleep(1)
            return 1

        async def slow(ctx: Context) -> None:
            kept.append(ctx)
            await ctx.sleep("long", YEAR)

        await ctx.race("race", {"quick": quick, "slow": slow})
        await kept[-1].sleep("more", 1)

    async with host(namespace, mode) as process:
        with pytest.raises(MisuseError, match="scope that is over"):
            await process.finish(workflow)
    assert (await namespace.snapshot()).state is not WorkflowState.FAILED


# Failures.


async def test_a_failure_does_not_decide_a_race(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S30: a failed branch is kept as failed, and its functions are not run again, while another goes on."""

    async def function(world: World, ctx: Context) -> Any:
        async def fails(ctx: Context) -> None:
            await world.step(ctx, "work")
            world.acknowledge("race", "fails")
            raise ValueError("no")

        async def waits(ctx: Context) -> str:
            await world.step(ctx, "begin")
            message = await ctx.queue.next("read", names=["mail"])
            return message.body

        result = await ctx.race("race", {"fails": fails, "waits": waits})
        await ctx.sleep("rest", 10)
        return [result.winner, result.value]

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == ["waits", "hello"]
        assert await statuses(namespace, "race") == {"fails": "failed", "waits": "completed"}

    await explore(make_quick_namespace, mode, function, check, [("mail", "hello")])


async def test_a_race_in_which_all_fail_raises_every_error_the_same_on_every_run(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S30: class, message, attributes and causes; also when restarts lie between the failures."""
    seen: dict[int, list[RaceError]] = {}

    async def function(world: World, ctx: Context) -> Any:
        async def first(ctx: Context) -> None:
            await world.step(ctx, "fails", CriticalError("for good"))

        async def second(ctx: Context) -> None:
            await ctx.sleep("pause", 5)
            error = KeyError("key")
            error.code = 7  # type: ignore[attr-defined]
            raise error

        try:
            await ctx.race("race", {"first": first, "second": second})
        except RaceError as error:
            seen.setdefault(id(world), []).append(error)
        await ctx.sleep("rest", 10)
        return "survived"

    async def check(output: Any, world: World, namespace: Namespace, crash: Crash | None) -> None:
        assert output == "survived"
        errors = seen[id(world)]
        assert len(errors) >= 2
        entries = await namespace.entries()
        for error in errors:
            assert (error.name, str(error)) == (
                "race",
                "all 2 branches of race 'race' failed: first: CriticalError: for good; second: KeyError: 'key'",
            )
            assert list(error.errors) == ["first", "second"]
            assert error.errors["second"].metadata == {"code": 7}
            assert list(error.causes) == [entries[("race",)].id, entries[("race", "first", "fails")].id]
        assert all(error.errors["first"] == errors[-1].errors["first"] for error in errors)
        if crash is None:
            assert all(error.errors == errors[0].errors for error in errors)

    await explore(make_quick_namespace, mode, function, check)


async def test_a_race_that_nobody_catches_fails_the_workflow_with_its_error(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S30: under the name of the class, with every branch's error in the message."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def fails(ctx: Context) -> None:
            raise ValueError("no")

        await ctx.race("race", {"only": fails})

    async with host(namespace, mode) as process:
        with pytest.raises(WorkflowFailedError) as caught:
            await process.stop(workflow)
    assert caught.value.name == "RaceError"
    assert "only: ValueError: no" in str(caught.value)


async def test_a_winner_that_diverges_is_a_divergence_and_no_result(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S30: new code in which the branch no longer asks for what is recorded of it; the old code goes on."""
    is_new = [False]

    async def workflow(ctx: Context, _: object) -> Any:
        async def branch(ctx: Context) -> str:
            if not is_new[0]:
                await ctx.sleep("pause", 5)
            return "won"

        async def other(ctx: Context) -> None:
            await ctx.sleep("long", YEAR)

        return (await ctx.race("race", {"branch": branch, "other": other})).value

    async with host(namespace, mode) as process:
        await process.stop(workflow)
        before = await namespace.dump()
        is_new[0] = True
        await process.restart()
        with pytest.raises(HistoryDivergedError, match="'race' > 'branch'"):
            await process.stop(workflow)
        await process.restart()
        assert await namespace.dump() == before
        is_new[0] = False
        assert await process.finish(workflow) == "won"


async def test_a_value_that_cannot_be_stored_does_not_win(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S9, S30: its branch fails, naming branch and type, and the race goes on."""

    async def function(world: World, ctx: Context) -> Any:
        async def bad(ctx: Context) -> Any:
            return object()

        async def good(ctx: Context) -> str:
            await ctx.sleep("pause", 5)
            return "won"

        result = await ctx.race("race", {"bad": bad, "good": good})
        await ctx.sleep("rest", 5)
        return result.value

    output, _ = await run_in_world(namespace, mode, function, restarts=True)
    assert output == "won"
    bad = (await namespace.entries())[("race",)].data["branches"]["bad"]
    assert bad["status"] == "failed"
    assert "branch 'bad' of race 'race'" in bad["error"]
    assert "object" in bad["error"]


# Time, mail, and how often.


async def test_races_of_a_wait_and_a_sleep_leave_nothing_behind(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S25: 2,000 of them in a loop, each ended by a message or by its timeout: tasks, parkings, lanes are what they were."""
    rounds = 2000 if mode == "live" and namespace.kind == "memory" else 60
    counts: list[tuple[int, int, int, int]] = []

    async def workflow(ctx: Context, _: object) -> int:
        activation = ctx._scope.activation

        async def body(ctx: Context, number: int) -> Any:
            async def wait(ctx: Context) -> Any:
                return (await ctx.queue.next("read", names=["mail"])).body

            async def give_up(ctx: Context) -> Any:
                await ctx.sleep("timeout", 10)

            result = await ctx.race("race", {"wait": wait, "give up": give_up})
            assert result.winner == ("wait" if number % 2 else "give up")
            tasks = trio.lowlevel.current_statistics().tasks_living
            counts.append((tasks, len(activation._parked), activation.busy, activation.lanes))
            return Break(number) if number == rounds - 1 else Continue(number + 1)

        return await ctx.loop("loop", body, 0)

    async with host(namespace, mode) as process:
        for number in range(rounds):
            await process.stop(workflow)
            if number % 2:
                await process.send("mail", number)
            else:
                await process.advance(10.001)
        assert (await process.stop(workflow)).output == rounds - 1
        if mode == "live":
            activation = cast("Any", process.handle)._activation
            assert len(activation.history.open_sleeps) == 0
            assert len(list(activation.history.entries())) < 100
    assert set(counts[1:]) == {counts[-1]}
    assert counts[-1][1:] == (0, 1, 1)


async def test_wake_ends_the_sleeps_of_a_race(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S24: at once; the wait of the other branch stays, and loses."""

    async def workflow(ctx: Context, _: object) -> Any:
        async def sleeps(ctx: Context) -> str:
            return (await ctx.sleep("nap", YEAR)).value

        async def waits(ctx: Context) -> Any:
            return await ctx.queue.next_batch("read", timeout=YEAR)

        result = await ctx.race("race", {"sleeps": sleeps, "waits": waits})
        return [result.winner, result.value]

    async with host(namespace, mode) as process:
        stopped = await process.stop(workflow)
        assert stopped.waiting_for_messages == ("*",)
        await process.control("wake")
        assert (await process.stop(workflow)).output == ["sleeps", "interrupted"]


async def test_a_race_with_a_sleeping_loser_costs_three_commits(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29: its entry with the sleep, the step's result, the winner; then the end of the workflow."""

    async def function(world: World, ctx: Context) -> Any:
        async def works(ctx: Context) -> str:
            return await world.step(ctx, "work", "won", 1.0)

        async def sleeps(ctx: Context) -> None:
            await ctx.sleep("long", YEAR)

        return (await ctx.race("race", {"sleeps": sleeps, "works": works})).value

    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        world = World(function)
        await process.stop(world.workflow)  # creates it
        output = await world.live_on(process)
    assert output == "won"
    batches = [batch for batch in driver.batches if not any(key == layout.INPUT_KEY for key, _ in batch.puts)]
    assert len(batches) <= 4


# What is refused.


@pytest.mark.parametrize(
    ("branches", "match"),
    [
        ({}, "at least one branch"),
        ("ab", "as a dict"),
        (None, "as a dict"),
        ([1], "Branch objects"),
        ({"a": None}, "must be a function"),
        ({"": print}, r"the name of a branch of race must not be empty; write for example ctx.race\(\"fetch\""),
        ({1: print}, "must be text"),
        ({"a": lambda: None}, "a context and nothing else"),
        ({"a": lambda ctx: None}, "plain function"),
        ({str(number): print for number in range(2049)}, "at most 2048"),
    ],
)
async def test_what_are_no_branches_is_refused(
    namespace: Namespace, mode: RunMode, branches: Any, match: str, autojump_clock: MockClock
) -> None:
    """S6: at once, saying what to write, and nothing is recorded."""

    async def workflow(ctx: Context, _: object) -> Any:
        await ctx.race("race", branches)

    async with host(namespace, mode) as process:
        with pytest.raises(InvalidArgumentError, match=match):
            await process.stop(workflow)
        assert (await namespace.snapshot()).entries == ()
