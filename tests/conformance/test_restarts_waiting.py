"""Scenarios of part B, steps, time and waiting, with the process dying at every recorded transition; see support/restarts.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import trio
from harness import Namespace
from restarts import Stage, names_of, picture_of, play
from trio.testing import MockClock
from worlds import World

from perdure.storage.schema import EntryStatus
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    HistoryDivergedError,
    JoinError,
    Message,
    QueueTimeoutError,
    RaceError,
    RunMode,
    StepFailure,
    StepInterruptedError,
    StepTimeoutError,
    current_step,
)
from perdure.workflow.activation import CRASH_LOOP_LIMIT

MakeNamespace = Callable[[], Namespace]


def failing_until(attempt: int, value: Any = "worked") -> Callable[[int], Any]:
    """Of the attempts at a step, this one is the first to work."""
    return lambda number: value if number >= attempt else ConnectionError(f"refused {number}")


# Steps.


async def test_retries_go_on_where_they_were_and_an_exhausted_step_recovers_with_a_fresh_count(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S17, S39: fails twice, works, in a branch of a join too; exhausted, the last error is kept; `recover()` begins anew."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def flaky(ctx: Context) -> Any:
            return await world.step(ctx, "flaky", failing_until(2), retry_backoff_base=5)

        async def steady(ctx: Context) -> Any:
            return await world.step(ctx, "steady", "steady")

        first = await world.step(ctx, "flaky", failing_until(3), retry_backoff_base=5)
        joined = dict(await ctx.join("join", {"flaky": flaky, "steady": steady}))
        works_at = 2 if "mended" in world.facts else 9
        last = await world.step(ctx, "doomed", failing_until(works_at), max_retries=1, retry_backoff_base=5)
        return [first, joined, last]

    async def mend(stage: Stage) -> None:
        stage.world.facts["mended"] = True

    async def script(stage: Stage) -> None:
        state, name, message = await stage.finish()
        assert (state, name) == ("failed", "StepExhaustedError")
        assert "ConnectionError: refused 2" in message
        await stage.do(lambda: mend(stage))
        await stage.recover()
        assert await stage.finish() == ("completed", ["worked", {"flaky": "worked", "steady": "steady"}, "worked"])

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        attempts = {path: line[2][1] for path, line in picture["entries"].items() if line[0] == "step"}
        assert attempts == {
            ("flaky",): 3,
            ("join", "flaky", "flaky"): 2,
            ("join", "steady", "steady"): 1,
            ("doomed",): 2,
        }

    await play(make_quick_namespace, mode, workflow, script, check=check)


async def test_attempts_stay_consistent_when_a_step_itself_kills_the_process(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18, S39: death during an attempt, and, at every write, between a failure and its retry."""

    async def workflow(world: World, ctx: Context) -> Any:
        stage: Stage = world.facts["stage"]

        async def deadly() -> Any:
            world.begin()
            await trio.sleep(1)
            if world.count("deadly") <= 2:
                stage.kill()
            if current_step().attempt < 3:
                raise ConnectionError("refused")
            return current_step().attempt

        return await ctx.step("deadly", deadly, retry_backoff_base=5)

    async def script(stage: Stage) -> None:
        assert await stage.finish() == ("completed", 3)

    await play(make_quick_namespace, mode, workflow, script)


async def test_a_step_that_kills_the_process_every_time_ends_in_a_crash_loop_error(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S18, S39: after ten activations, whatever else the process dies of meanwhile; `recover()` then lets the mended step run."""

    async def workflow(world: World, ctx: Context) -> Any:
        stage: Stage = world.facts["stage"]

        async def deadly() -> str:
            world.begin()
            if "mended" not in world.facts:
                stage.kill()
            return "mended"

        await world.step(ctx, "before")
        return await ctx.step("deadly", deadly)

    async def mend(stage: Stage) -> None:
        stage.world.facts["mended"] = True

    async def script(stage: Stage) -> None:
        state, name, _ = await stage.finish()
        assert (state, name) == ("failed", "CrashLoopError")
        assert stage.world.count("deadly") <= CRASH_LOOP_LIMIT + 1 + stage.deaths - stage.kills
        await stage.do(lambda: mend(stage))
        await stage.recover()
        assert await stage.finish() == ("completed", "mended")

    await play(make_quick_namespace, mode, workflow, script, any_of=["deadly"])


async def test_at_no_time_do_two_attempts_at_a_step_that_times_out_run(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S19, S39: cancelled for real, its cleaning up waited for, then retried; and one whose timeout is final, caught."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def slow() -> int:
            world.begin()
            assert "running" not in world.facts, "two attempts at once"
            world.facts["running"] = True
            try:
                await trio.sleep(100 if current_step().attempt < 3 else 1)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(2)
                del world.facts["running"]
            return current_step().attempt

        attempt = await ctx.step("retried", slow, timeout=5, retry_on_timeout=True)
        world.acknowledge("retried")
        try:
            await ctx.step("final", world.effect(seconds=100), timeout=5)
        except StepTimeoutError as error:
            world.acknowledge("final")
            return [attempt, error.kind, error.attempts, error.error.message]

    async def script(stage: Stage) -> None:
        assert await stage.finish() == ("completed", [3, "timeout", 1, "it was cancelled after 5 seconds"])

    await play(make_quick_namespace, mode, workflow, script)


async def test_a_step_that_finishes_in_spite_of_its_eviction_is_recorded(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S20, S39: eviction waits for it; a crash before the result is written runs it again, one after does not."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def stubborn() -> str:
            world.begin()
            with trio.CancelScope(shield=True):
                await trio.sleep(10)
            return "finished"

        result = await ctx.step("stubborn", stubborn)
        world.acknowledge("stubborn")
        slept = await ctx.sleep("sleep", 100)
        return [result, slept.value]

    async def script(stage: Stage) -> None:
        assert await stage.stop_after(5, "evict") == ("left",)
        picture = await picture_of(stage.namespace)
        assert picture["entries"]["stubborn",][1] == {"output": "finished", "error": None}
        assert await stage.finish() == ("completed", ["finished", "completed"])

    await play(make_quick_namespace, mode, workflow, script)


async def test_a_storage_error_is_no_failure_of_a_step(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S21, S39: at every write, refused, lost, or applied without our knowing: after reloading the result is there, or the step
    runs again; no attempt is counted for it."""

    async def workflow(world: World, ctx: Context) -> Any:
        results = [await world.step(ctx, "one", 1)]
        results.append(await world.step(ctx, "flaky", failing_until(2), retry_backoff_base=5))
        results.append(await world.step(ctx, "noted", 2, ephemeral=True))
        await ctx.sleep("sleep", 10)
        results.append(await world.step(ctx, "two", 4))
        return results

    async def script(stage: Stage) -> None:
        assert await stage.finish() == ("completed", [1, "worked", 2, 4])

    await play(make_quick_namespace, mode, workflow, script, faults=("refused", "lost", "applied"))


async def test_an_at_most_once_step_runs_at_most_once_and_an_unknown_outcome_is_told(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S22, S39: killed before, during and after the function: `StepInterruptedError`, which `try_step` can return."""
    ends: Counter[tuple[str, int]] = Counter()

    async def workflow(world: World, ctx: Context) -> Any:
        outcomes: list[str] = []
        await world.step(ctx, "before", ephemeral=True)
        try:
            outcomes.append(await ctx.step("raised", world.effect("done", 1), at_most_once=True))
        except StepInterruptedError:
            outcomes.append("unknown")
        tried = await ctx.try_step("tried", world.effect("done", 1), at_most_once=True)
        outcomes.append("unknown" if isinstance(tried, StepFailure) else tried.value)
        await ctx.sleep("sleep", 10)
        await world.step(ctx, "after")
        return outcomes

    async def script(stage: Stage) -> None:
        await stage.run()
        assert (await stage.finish())[0] == "completed"

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        for name, outcome in zip(("raised", "tried"), picture["output"], strict=True):
            count = stage.world.count(name)
            ends[outcome, count] += 1
            assert count <= 1
            assert outcome == "unknown" or count == 1
            if not stage.deaths:
                assert outcome == "done"
            status = picture["entries"][name,][2][0]
            assert status is (EntryStatus.EXHAUSTED if outcome == "unknown" else EntryStatus.COMPLETED)

    await play(
        make_quick_namespace,
        mode,
        workflow,
        script,
        at_most_once=["raised", "tried"],
        is_settled=False,
        check=check,
    )
    assert set(ends) == {("done", 1), ("unknown", 0), ("unknown", 1)}


async def test_ephemeral_steps_are_in_the_next_durable_write_and_recur_in_order(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S23, S39: what is recorded is a beginning of the program, whatever the process dies at."""
    order = ["e1", "e2", "d1", "e3", "sleep", "e4", "d2"]

    async def workflow(world: World, ctx: Context) -> Any:
        for name in order:
            if name == "sleep":
                await ctx.sleep("sleep", 10)
            else:
                await world.step(ctx, name, ephemeral=name[0] == "e")

    async def script(stage: Stage) -> None:
        stored = await picture_of(stage.namespace)
        assert [path[0] for path in stored["order"]] == order[: len(stored["order"])]
        assert stored["order"] in ([(name,) for name in order[:count]] for count in (0, 3, 5, 7))
        assert (await stage.finish())[0] == "completed"

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        rank = [order.index(str(path[0])) for path in stage.world.effects]
        restarts = sum(later <= earlier for earlier, later in pairwise(rank))
        assert restarts <= stage.deaths, "in order in every life"

    await play(make_quick_namespace, mode, workflow, script, check=check)


# Time.


async def test_sleeps_end_at_their_deadline_whatever_happens_to_the_clock_and_the_process(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24, S39: past deadlines, a restart before and one after the deadline, a clock set back and forward an hour, a year."""

    async def workflow(world: World, ctx: Context) -> Any:
        outcomes = [await ctx.sleep("nothing", 0), await ctx.sleep_until("past", 1.0)]
        for name, seconds in (("short", 10), ("half an hour", 1800), ("an hour", 3600), ("a year", 365 * 86400)):
            outcomes.append(await ctx.sleep(name, seconds))
            await world.step(ctx, f"after {name}", ephemeral=True)
        return [outcome.value for outcome in outcomes]

    async def move(stage: Stage, seconds: float) -> None:
        stage.clock.move(seconds)

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.pass_time(5)
        await stage.restart()
        await stage.run()  # before the deadline
        await stage.restart()
        await stage.pass_time(5)  # the process that is there after the deadline was not there at it
        assert (await stage.run())[0] == "waits"
        await stage.do(lambda: move(stage, 3600))
        assert (await stage.run())[0] == "waits"
        before = await stage.look()
        await stage.do(lambda: move(stage, -3600))
        await stage.pass_time(3600)
        assert await stage.run() == ("waits", True, None)
        assert await stage.look() == before, "set back, it waits for its deadline"
        assert await stage.finish() == ("completed", ["completed"] * 6)

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        assert len(names_of(picture, "sleep")) == 6

    await play(make_quick_namespace, mode, workflow, script, check=check)


async def test_wake_ends_what_waits_for_time_at_once_and_durably(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S24, S39: in a sleep, in a retry's backoff and inside a join; asked for again where it was not acknowledged; harmless when
    nothing sleeps, and after the end."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def sleeping(ctx: Context) -> str:
            return (await ctx.sleep("sleep", 10_000)).value

        async def retrying(ctx: Context) -> Any:
            return await world.step(ctx, "flaky", failing_until(2), retry_backoff_base=10_000, retry_backoff_max=10_000)

        async def waiting(ctx: Context) -> Any:
            return (await ctx.queue.next("read", names=["go"])).body

        first = await sleeping(ctx)
        return [first, dict(await ctx.join("join", {"s": sleeping, "r": retrying, "w": waiting}))]

    async def script(stage: Stage) -> None:
        begun_s = trio.current_time()
        await stage.run()
        await stage.wake()
        await stage.run()
        await stage.wake()
        assert await stage.run() == ("waits", False, ("go",))
        before = await stage.look()
        await stage.wake()
        await stage.run()
        assert await stage.look() == before
        await stage.send("go", "sent")
        end = ["interrupted", {"s": "interrupted", "r": "worked", "w": "sent"}]
        assert await stage.finish() == ("completed", end)
        await stage.wake()
        assert trio.current_time() - begun_s < 1000, "nobody waited"

    await play(make_quick_namespace, mode, workflow, script)


# Messages.


async def test_waits_with_a_timeout_that_end_by_message_leave_nothing_behind(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S25, S39: five in a loop: no alarm, no task, no parking, no entry more than one wait has."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def body(ctx: Context, total: int) -> Continue[int] | Break[int]:
            total += (await ctx.queue.next("read", names=["go"], timeout=3600)).body
            return Break(total) if total == 5 else Continue(total)

        return await ctx.loop("loop", body, 0, history_prune_interval=1, history_size=0)

    async def script(stage: Stage) -> None:
        tasks: set[int] = set()
        entries: set[int] = set()
        for _ in range(4):
            assert await stage.run() == ("waits", True, ("go",))
            if not stage.deaths:
                tasks.add(trio.lowlevel.current_statistics().tasks_living)
            if mode == "live" and stage.process.handle is not None:
                assert len(stage.process.handle._activation._parked) == 1  # type: ignore[attr-defined]
            entries.add(len((await stage.look())["entries"]))
            await stage.send("go", 1)
        assert len(tasks) <= 1
        assert len(entries) == 1
        await stage.run()
        await stage.send("go", 1)
        assert await stage.finish() == ("completed", 5)

    await play(make_quick_namespace, mode, workflow, script)


async def test_messages_are_taken_in_order_by_name_and_count_and_none_is_eaten_by_a_timeout(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S26, S39: FIFO, any of several names, count, a deadline that survives restarts, a message that beats it, and one that does
    not."""

    async def workflow(world: World, ctx: Context) -> Any:
        def bodies(messages: list[Message]) -> list[Any]:
            return [message.body for message in messages]

        taken = [bodies(await ctx.queue.next_batch("two", names=["a", "b"], count=2))]
        taken.append(bodies([await ctx.queue.next("in time", names=["c"], timeout=100)]))
        try:
            await ctx.queue.next("too late", names=["d"], timeout=100)
        except QueueTimeoutError:
            taken.append(["timeout"])
        taken.append(bodies([await ctx.queue.next("now", names=["d"])]))
        taken.append(bodies(await ctx.queue.next_batch("rest", count=10)))
        return taken

    async def script(stage: Stage) -> None:
        for name in ("x", "b", "a", "a"):
            await stage.send(name, f"{name} {len(stage.acts)}")
        await stage.run()
        await stage.restart()
        await stage.run()
        await stage.pass_time(99)
        await stage.send("c", "just in time")
        await stage.run()
        await stage.pass_time(50)
        await stage.restart()
        await stage.run()
        await stage.pass_time(50)
        assert await stage.run() == ("waits", False, ("d",))
        await stage.send("d", "next")
        state, taken = await stage.finish()
        assert state == "completed"
        assert taken[1:4] == [["just in time"], ["timeout"], ["next"]]
        assert [body[0] for body in taken[0]] == ["b", "a"]
        assert [body[0] for body in taken[4]] == ["x", "a"]

    await play(make_quick_namespace, mode, workflow, script)


async def test_branches_that_wait_for_the_same_name_get_different_messages_and_any_wakes_for_any(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S26, S39: whichever branch gets which; each message is in history once."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def read(ctx: Context) -> Any:
            return (await ctx.queue.next("read", names=["x"])).body

        async def read_any(ctx: Context) -> Any:
            return (await ctx.queue.next("read", timeout=1000)).body

        return dict(await ctx.join("join", {"one": read, "two": read, "any": read_any}))

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.send("y", "for any")
        assert await stage.run() == ("waits", False, ("x",))
        await stage.send("x", 1)
        await stage.run()
        await stage.send("x", 2)
        assert (await stage.finish())[0] == "completed"

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        output = dict(picture["output"])
        assert output.pop("any") == "for any"
        assert sorted(output.values()) == [1, 2]
        assert picture["mail"] == []
        messages = [line[1]["body"] for line in picture["entries"].values() if line[0] == "message"]
        assert sorted(body["id"] for body in messages if isinstance(body, dict)) == sorted(
            f"message {number}" for number in (1, 3, 5)
        )

    await play(make_quick_namespace, mode, workflow, script, is_settled=False, check=check)


async def test_a_message_is_neither_lost_nor_handled_twice_between_its_sending_and_its_handling(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S27, S39: at any point; the same id again, before and after restarts, is one delivery."""

    async def workflow(world: World, ctx: Context) -> Any:
        handled: list[Any] = []
        for number in range(2):
            message = await ctx.queue.next(f"read {number}", names=["go"], timeout=3600)
            handled.append(await world.step(ctx, f"handle {message.body}", message.body))
        rest = await ctx.queue.next_batch("rest", count=10, timeout=10)
        return [handled, [message.body for message in rest]]

    async def script(stage: Stage) -> None:
        await stage.send("go", 1, id="m-1")  # before it runs
        await stage.send("go", 1, id="m-1")
        await stage.run()
        await stage.send("go", 1, id="m-1")
        await stage.restart()
        await stage.send("go", 1, id="m-1")
        await stage.run()
        await stage.send("go", 2, id="m-2")
        await stage.send("go", 2, id="m-2")
        assert await stage.finish() == ("completed", [[1, 2], []])
        assert await stage.send("go", 3, id="m-3") == "refused"

    await play(make_quick_namespace, mode, workflow, script)


async def test_a_completable_message_is_handed_out_until_it_is_complete(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S28, S39: delivered again by every run before, a no-op on replay after; one that is not completed is not lost either."""

    async def workflow(world: World, ctx: Context) -> Any:
        first = await ctx.queue.next("first", names=["go"], completable=True)
        if "first" not in world.facts:
            world.facts["handed out"] = world.facts.get("handed out", 0) + 1
        await ctx.sleep("sleep", 10)
        handled = await world.step(ctx, "handle", first.body)
        await first.complete()
        world.facts["first"] = "complete"
        second = await ctx.queue.next("second", names=["go"], completable=True)
        return [handled, second.body]

    async def script(stage: Stage) -> None:
        await stage.send("go", 1)
        await stage.run()
        await stage.restart()
        await stage.run()
        await stage.pass_time(10)
        await stage.run()
        await stage.restart()
        await stage.run()
        await stage.send("go", 2)
        assert await stage.finish() == ("completed", [1, 2])

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        completed = [picture["entries"][name,][1]["body"]["completed"] for name in ("first:0", "second:0")]
        assert completed == [True, False]
        assert stage.world.facts["handed out"] >= 2

    await play(make_quick_namespace, mode, workflow, script, check=check)


# Branches.


async def test_a_race_does_not_wait_for_its_losers_and_their_effects_do_not_recur(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S29, S39: one that is in a long step, one that sleeps, one in a join of its own, one that had taken a message."""

    async def workflow(world: World, ctx: Context) -> Any:
        async def in_step(ctx: Context) -> None:
            await world.step(ctx, "done")
            try:
                await world.step(ctx, "long", seconds=10_000, timeout=0)
            finally:
                if not (await stage.namespace.driver()).is_dead:
                    world.facts["has lost"] = True

        async def in_sleep(ctx: Context) -> None:
            await ctx.sleep("sleep", 10_000)

        async def in_join(ctx: Context) -> None:
            await ctx.join("join", {"step": in_step, "sleep": in_sleep})

        async def in_read(ctx: Context) -> None:
            await ctx.queue.next("read", names=["go"])
            await ctx.queue.next("never", names=["never"])

        async def quick(ctx: Context) -> Any:
            return await world.step(ctx, "won", "won", 5)

        stage: Stage = world.facts["stage"]
        losers = {"step": in_step, "sleep": in_sleep, "join": in_join, "read": in_read}
        begun_s = trio.current_time()
        result = await ctx.race("race", {**losers, "quick": quick})
        world.acknowledge("race")
        assert trio.current_time() - begun_s < 1000
        await ctx.sleep("after", 10)
        message = await ctx.queue.next("again", names=["go"])
        return [result.winner, result.value, message.body]

    async def script(stage: Stage) -> None:
        stored = await picture_of(stage.namespace)  # as every process finds it
        if "has lost" in stage.world.facts:
            assert stored["entries"]["race",][1]["winner"] == "quick", "durable before a loser knows"
        await stage.send("go", "given back")
        await stage.run()
        await stage.restart()
        assert await stage.finish() == ("completed", ["quick", "won", "given back"])

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        below = [path for path in picture["entries"] if path[0] == "race"]
        assert below == [("race",), ("race", "quick", "won")], "what the losers did is forgotten"

    await play(make_quick_namespace, mode, workflow, script, any_of=["done", "long", "won"], check=check)


async def test_settled_branches_are_kept_and_their_errors_told_apart_alike_on_every_run(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S30, S39: of a join one branch fails, one fails otherwise later, one sleeps, one waits for a message; then a race of which
    every branch fails."""
    seen: dict[str, Any] = {}

    class OtherError(CriticalError):
        pass

    async def workflow(world: World, ctx: Context) -> Any:
        async def fails(ctx: Context) -> None:
            await ctx.step("fail", world.effect(CriticalError("at once")))

        async def fails_later(ctx: Context) -> None:
            await ctx.sleep("sleep", 5)
            await ctx.step("fail", world.effect(OtherError("later", 7)))

        async def sleeps(ctx: Context) -> Any:
            await ctx.sleep("sleep", 10)
            return await world.step(ctx, "slept", "slept")

        async def waits(ctx: Context) -> Any:
            return (await ctx.queue.next("read", names=["go"])).body

        def note(name: str, error: JoinError | RaceError) -> dict[str, str]:
            facts = {branch: (info.name, info.message) for branch, info in error.errors.items()}
            assert seen.setdefault(name, facts) == facts, "this run sees what every other run saw"
            return {branch: f"{kind}: {text}" for branch, (kind, text) in facts.items()}

        try:
            await ctx.join("join", {"fails": fails, "later": fails_later, "sleeps": sleeps, "waits": waits})
        except JoinError as error:
            world.acknowledge("join")
            joined = note("join", error)
        try:
            await ctx.race("race", {"fails": fails, "later": fails_later})
        except RaceError as error:
            world.acknowledge("race")
            return [joined, note("race", error)]

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.restart()
        await stage.run()
        await stage.pass_time(5)
        await stage.run()
        await stage.send("go", "sent")
        state, (joined, raced) = await stage.finish()
        assert state == "completed"
        assert joined.keys() == raced.keys() == {"fails", "later"}
        assert joined["fails"] != joined["later"]
        assert "at once" in joined["fails"]
        assert "later" in joined["later"]

    def check(stage: Stage, picture: dict[str, Any]) -> None:
        branches = picture["entries"]["join",][1]["branches"]
        assert {name: branch["status"] for name, branch in branches.items()} == {
            "fails": "failed",
            "later": "failed",
            "sleeps": "completed",
            "waits": "completed",
        }
        assert branches["waits"]["output"] == "sent"

    await play(make_quick_namespace, mode, workflow, script, check=check)


async def test_a_branch_that_diverges_wins_no_race(
    make_quick_namespace: MakeNamespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S30, S39: it returns at once because it no longer asks for what is recorded: a divergence, not a result."""

    def code(is_right: bool) -> Any:
        async def workflow(world: World, ctx: Context) -> Any:
            async def one(ctx: Context) -> Any:
                if not is_right:
                    return "too early"
                await world.step(ctx, "recorded")
                return (await ctx.sleep("longer", 20)).value

            async def two(ctx: Context) -> Any:
                return (await ctx.sleep("sleep", 10)).value

            result = await ctx.race("race", {"one": one, "two": two})
            return [result.winner, result.value]

        return workflow

    async def script(stage: Stage) -> None:
        await stage.run()
        await stage.deploy(code(False))
        assert "'race' > 'one'" in await stage.refused(HistoryDivergedError)
        await stage.deploy(code(True))
        assert await stage.finish() == ("completed", ["two", "completed"])

    await play(make_quick_namespace, mode, code(True), script)
