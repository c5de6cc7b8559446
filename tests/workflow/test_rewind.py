"""`replay_from_step`: what it forgets, what stays, and that the workflow then runs to the same end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
from harness import (
    Crash,
    CrashingDriver,
    DriverKind,
    Host,
    MovableClock,
    Namespace,
    SimulatedCrashError,
    crashes,
    host,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from perdure.storage import MemoryDriver, decode_value, layout
from perdure.storage.schema import EntryStatus, decode_message
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    HistoryEntry,
    InvalidArgumentError,
    RewindError,
    RollbackContext,
    RunMode,
    StepError,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowSnapshot,
    WorkflowState,
    current_step,
    load_snapshot,
    replay_from_step,
    run_workflow,
    send_message,
)

VECTORS = Path(__file__).parents[1] / "vectors"


@dataclass
class World:
    """What steps did, in order."""

    calls: list[str] = field(default_factory=list)

    async def do(self, name: str, result: Any = None) -> Any:
        self.calls.append(name)
        return result

    def seen(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


async def rewind(process: Host, *path: str | int) -> WorkflowSnapshot:
    """Let the process die, and replay from the step at a path; from the beginning without one."""
    await process.restart()
    namespace = process.namespace
    entry_id = (await namespace.entries())[path].id if path else None
    return await replay_from_step(await namespace.driver(), entry_id, clock=process.clock)


async def bodies_waiting(namespace: Namespace) -> list[Any]:
    pairs = await (await namespace.driver()).list(layout.MAILBOX_PREFIX)
    return [decode_value(decode_message(value).body) for _, value in pairs]


def order_of(world: World) -> Any:
    """A workflow with one of each simple thing."""

    async def order(ctx: Context, _: Any) -> Any:
        first = await ctx.step("first", world.do, "first", 1)
        version = await ctx.get_version("version", 3)
        outcome = await ctx.sleep("nap", 60)
        early = await ctx.queue.next("early", names=["go"])
        second = await ctx.step("second", world.do, "second", 2)
        late = await ctx.queue.next_batch("late", names=["go"], count=2)
        third = await ctx.step("third", world.do, "third", 3)
        return [first, version, outcome.value, early.body, second, [message.body for message in late], third]

    return order


ORDER_OUTPUT = [1, 3, "completed", "a", 2, ["b", "c"], 3]


async def run_order(process: Host, order: Any) -> None:
    for body in "abc":
        await process.send("go", body)
    assert await process.finish(order) == ORDER_OUTPUT


class TestWhatStays:
    async def test_what_came_before_the_step_stays_and_the_rest_is_done_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: earlier sleeps, messages and versions stay; consumed messages are not lost; the output is gone until the end."""
        world = World()
        order = order_of(world)
        async with host(namespace, mode) as process:
            await run_order(process, order)
            assert world.seen() == ["first", "second", "third"]
            before = await namespace.entries()
            snapshot = await rewind(process, "second")
            assert snapshot == await namespace.snapshot()
            assert (snapshot.state, snapshot.output, snapshot.error) == (WorkflowState.PENDING, None, None)
            kept = {("first",), ("version",), ("nap",), ("early:count",), ("early:0",)}
            assert await namespace.entries() == {path: entry for path, entry in before.items() if path in kept}
            assert await bodies_waiting(namespace) == ["b", "c"]
            started = process.clock.now_ms()
            assert await process.finish(order) == ORDER_OUTPUT
            assert process.clock.now_ms() == started, "the sleep is over"
            assert world.seen() == ["second", "third"]
            await rewind(process, "third")
            assert await process.finish(order) == ORDER_OUTPUT
            assert world.seen() == ["third"]
            await rewind(process, "first")
            assert [entry.path for entry in (await namespace.snapshot()).entries] == []
            assert await bodies_waiting(namespace) == ["a", "b", "c"]
            assert await process.finish(order) == ORDER_OUTPUT
            assert world.seen() == ["first", "second", "third"]
        await namespace.close()

    async def test_without_an_id_all_history_is_forgotten_and_the_input_stays(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: from the beginning."""
        world = World()
        order = order_of(world)
        async with host(namespace, mode) as process:
            for body in "abc":
                await process.send("go", body)
            while (await process.stop(order, {"the": "input"})).state is not WorkflowState.COMPLETED:
                await process.advance(60)
            world.seen()
            snapshot = await rewind(process)
            assert snapshot == WorkflowSnapshot(WorkflowState.PENDING, {"the": "input"}, None, None, ())
            prefixes = (layout.HISTORY_PREFIX, layout.METADATA_PREFIX, layout.DETAIL_PREFIX)
            assert not [key for key in await namespace.dump() if key.startswith(prefixes)]
            assert await process.finish(order, "another") == ORDER_OUTPUT
            assert (await namespace.snapshot()).input == {"the": "input"}
            assert world.seen() == ["first", "second", "third"]
        await namespace.close()

    async def test_nothing_of_what_was_forgotten_is_left_in_the_store(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: entries, metadata and details go; what is left is what a run to there had left."""
        world = World()

        async def failing() -> None:
            raise CriticalError("no")

        async def order(ctx: Context, _: Any) -> None:
            await ctx.step("first", world.do, "first")
            await ctx.step("second", world.do, "second")
            await ctx.try_step("third", failing)
            await ctx.sleep("nap", 60)

        async with host(namespace, mode) as process:
            await process.finish(order)
            await rewind(process, "second")
            dump = await namespace.dump()
            kept = (layout.HISTORY_PREFIX, layout.METADATA_PREFIX, layout.DETAIL_PREFIX)
            assert sorted(key[:2] for key in dump if key.startswith(kept)) == sorted(kept[:2])
            assert layout.OUTPUT_KEY not in dump
        await namespace.close()

    async def test_the_step_has_the_same_idempotency_key_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: whoever honours the key may answer with the old result."""
        keys: list[str] = []

        async def work() -> None:
            keys.append(current_step().idempotency_key)

        async def order(ctx: Context, _: Any) -> None:
            await ctx.step("work", work)

        async with host(namespace, mode) as process:
            await process.finish(order)
            await rewind(process, "work")
            await process.finish(order)
        assert len(keys) == 2
        assert len(set(keys)) == 1


class TestStates:
    async def test_a_failed_a_cancelled_and_a_sleeping_workflow_run_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: from every state; the error is gone, and what failed has fresh attempts."""
        world = World()
        is_broken = True

        async def charge() -> str:
            world.calls.append("charge")
            if is_broken:
                raise CriticalError("declined")
            return "charged"

        async def order(ctx: Context, _: Any) -> str:
            await ctx.step("reserve", world.do, "reserve")
            result = await ctx.step("charge", charge)
            await ctx.sleep("rest", 3600)
            return result

        async with host(namespace, mode) as process:
            with pytest.raises(WorkflowFailedError):
                await process.stop(order)
            snapshot = await rewind(process, "charge")
            assert (snapshot.state, snapshot.error) == (WorkflowState.PENDING, None)
            assert layout.FAILURE_CAUSES_KEY not in await namespace.dump()
            is_broken = False
            assert (await process.stop(order)).state is WorkflowState.SLEEPING
            assert world.seen() == ["reserve", "charge", "charge"]
            assert await namespace.attempts("charge") == (EntryStatus.COMPLETED, 1)

            await rewind(process, "charge")  # while it sleeps
            await process.stop(order)
            assert world.seen() == ["charge"]

            await process.control("cancel")
            with pytest.raises(WorkflowCancelledError):
                await process.stop(order)
            await rewind(process, "charge")
            assert (await namespace.snapshot()).state is WorkflowState.PENDING
            assert await (await namespace.driver()).get_alarm("workflow-1") == process.clock.now_ms()
            assert await process.finish(order) == "charged"
            assert world.seen() == ["charge"]
        await namespace.close()

    async def test_an_earlier_failure_that_the_code_handled_stays_a_failure(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: recorded outcomes before the step are kept as they are."""
        world = World()

        async def fail() -> None:
            world.calls.append("fail")
            raise CriticalError("no")

        async def order(ctx: Context, _: Any) -> str:
            try:
                await ctx.step("fails", fail)
            except StepError as error:
                message = error.error.message
            await ctx.step("after", world.do, "after")
            return message

        async with host(namespace, mode) as process:
            assert await process.finish(order) == "no"
            await rewind(process, "after")
            assert await process.finish(order) == "no"
        assert world.seen() == ["fail", "after", "after"]

    async def test_a_version_decided_after_the_step_is_decided_anew_and_one_before_it_stays(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S2: versions stay where they were recorded before the step."""
        world = World()
        is_new = False

        async def order(ctx: Context, _: Any) -> Any:
            await ctx.step("one", world.do, "one")
            early = await ctx.get_version("early", 2) if is_new else 0
            await ctx.step("two", world.do, "two")
            await ctx.queue.next("gate")
            await ctx.step("three", world.do, "three")
            late = await ctx.get_version("late", 2)
            return [early, late]

        async with host(namespace, mode) as process:
            await process.stop(order)
            await process.restart()
            is_new = True
            await process.send("go")
            assert await process.finish(order) == [1, 2]
            await rewind(process, "three")
            assert await process.finish(order) == [1, 2]
            await rewind(process, "two")
            await process.stop(order)
            assert await process.finish(order) == [2, 2]


class TestMessages:
    async def test_messages_go_back_before_what_waits_in_the_order_of_reading(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S27: FIFO for each name, again and again, whatever came meanwhile; a completed one stays consumed."""
        world = World()

        async def order(ctx: Context, _: Any) -> Any:
            await ctx.step("begin", world.do, "begin")
            read: list[Any] = []
            for number, names in enumerate((["b"], None, ["a"], ["b"])):
                message = await ctx.queue.next(f"read-{number}", names=names, completable=True)
                read.append(message.body)
                if message.body == "b2":
                    await message.complete()
            await ctx.step("middle", world.do, "middle")
            rest = await ctx.queue.next_batch("rest", count=100, timeout=1)
            return [read, [message.body for message in rest]]

        async with host(namespace, mode) as process:
            for body in ("a1", "b1", "a2", "b2", "a3", "b3"):
                await process.send(body[0], body)
            assert await process.finish(order) == [["b1", "a1", "a2", "b2"], ["a3", "b3"]]
            await rewind(process, "middle")
            assert await bodies_waiting(namespace) == ["a3", "b3"]
            await process.send("a", "a4")
            assert await process.finish(order) == [["b1", "a1", "a2", "b2"], ["a3", "b3", "a4"]]
            await rewind(process, "begin")
            await process.send("b", "b4")
            assert await bodies_waiting(namespace) == ["b1", "a1", "a2", "a3", "b3", "a4", "b4"]
            assert await process.finish(order) == [["b1", "a1", "a2", "b3"], ["a3", "a4", "b4"]]
            await rewind(process)
            assert await process.finish(order) == [["b1", "a1", "a2", "b3"], ["a3", "a4", "b4"]]
        await namespace.close()

    async def test_a_message_that_went_back_is_deduplicated_by_its_id_as_before(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S27: sent again, delivered once."""
        world = World()

        async def order(ctx: Context, _: Any) -> Any:
            await ctx.step("begin", world.do, "begin")
            first = await ctx.queue.next("read")
            rest = await ctx.queue.next_batch("rest", timeout=1)
            return [first.body, first.id, len(rest)]

        async with host(namespace, mode) as process:
            await process.send("go", {"deep": [1, None]}, id="m-1")
            assert await process.finish(order) == [{"deep": [1, None]}, "m-1", 0]
            await rewind(process, "begin")
            await process.send("go", "again", id="m-1")
            assert await process.finish(order) == [{"deep": [1, None]}, "m-1", 0]

    async def test_a_timed_out_read_after_the_step_waits_again_and_one_before_stays(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S26: what timed out before the step did so for good."""
        world = World()

        async def order(ctx: Context, _: Any) -> Any:
            before = await ctx.queue.next_batch("before", timeout=60)
            await ctx.step("step", world.do, "step")
            after = await ctx.queue.next_batch("after", timeout=60)
            return [len(before), len(after)]

        async with host(namespace, mode) as process:
            assert await process.finish(order) == [0, 0]
            await rewind(process, "step")
            await process.send("go")
            assert await process.finish(order) == [0, 1]


class TestLoops:
    def loop_of(self, world: World, last: int) -> Any:
        async def body(ctx: Context, total: int) -> Continue[int] | Break[int]:
            number = total % 100
            await ctx.step("a", world.do, f"a{number}")
            message = await ctx.queue.next("read")
            await ctx.step("b", world.do, f"b{number}")
            await ctx.step("c", world.do, f"c{number}")
            assert message.body == number
            return Break(total + 1) if number == last else Continue(total + 1)

        async def order(ctx: Context, _: Any) -> Any:
            await ctx.step("before", world.do, "before")
            total = await ctx.loop("loop", body, 100)
            await ctx.step("after", world.do, "after")
            return total

        return order

    async def test_the_current_iteration_is_rewound_and_no_other(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: inside a loop the enclosing loop's current iteration is rewound, with the state that it began with."""
        world = World()
        order = self.loop_of(world, 9)
        async with host(namespace, mode) as process:
            for number in range(3):
                await process.send("go", number)
            await process.stop(order)
            assert world.seen()[-1] == "a3"
            path = next(path for path in await namespace.entries() if path[-1] == "a" and 3 in path)
            await rewind(process, *path)
            assert await bodies_waiting(namespace) == []
            await process.stop(order)
            assert world.seen() == ["a3"]
            await process.send("go", 3)
            await process.stop(order)
            assert world.seen() == ["b3", "c3", "a4"]

    async def test_a_finished_loop_is_open_again_in_its_last_iteration(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: a loop that is over, then goes on from the middle of its last iteration, with its message where it was."""
        world = World()
        order = self.loop_of(world, 2)
        async with host(namespace, mode) as process:
            for number in range(3):
                await process.send("go", number)
            assert await process.finish(order) == 103
            world.seen()
            entries = await namespace.entries()
            last = {path[-1]: path for path in entries if 2 in path}
            await rewind(process, *last["b"])
            assert await bodies_waiting(namespace) == [], "it was read before the step"
            assert await process.finish(order) == 103
            assert world.seen() == ["b2", "c2", "after"]
            await rewind(process, *last["a"])
            assert await bodies_waiting(namespace) == [2]
            assert await process.finish(order) == 103
            assert world.seen() == ["a2", "b2", "c2", "after"]
            await rewind(process, "before")
            assert await process.finish(order) == 103
            assert len(world.seen()) == 11
        await namespace.close()

    async def test_an_iteration_whose_beginning_is_not_known_is_refused(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: an older iteration without its state: an error that says what can be done, and nothing is changed."""
        world = World()
        order = self.loop_of(world, 2)
        async with host(namespace, mode) as process:
            for number in range(3):
                await process.send("go", number)
            await process.finish(order)
            before = await namespace.dump()
            path = next(path for path in await namespace.entries() if path[-1] == "b" and 1 in path)
            with pytest.raises(
                RewindError, match="replay from a step of iteration 2, or from one before the loop"
            ) as caught:
                await rewind(process, *path)
            assert caught.value.found == "a step of an earlier iteration"
            assert await namespace.dump() == before
        await namespace.close()

    async def test_in_nested_loops_each_is_rewound(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: a step in a loop in a loop, both finished."""
        world = World()

        async def inner(ctx: Context, state: list[int]) -> Continue[list[int]] | Break[None]:
            outer, number = state
            await ctx.step("work", world.do, f"{outer}.{number}")
            return Break(None) if number == 2 else Continue([outer, number + 1])

        async def outer(ctx: Context, number: int) -> Continue[int] | Break[int]:
            await ctx.loop("inner", inner, [number, 0])
            return Break(number) if number == 2 else Continue(number + 1)

        async def order(ctx: Context, _: Any) -> Any:
            return await ctx.loop("outer", outer, 0)

        async with host(namespace, mode) as process:
            assert await process.finish(order) == 2
            world.seen()
            path = max(path for path in await namespace.entries() if path[-1] == "work" and path.count(2) == 2)
            await rewind(process, *path)
            assert await process.finish(order) == 2
            assert world.seen() == ["2.2"]


class TestBranches:
    async def test_an_enclosing_join_is_open_again_and_settled_branches_stay(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S30: joins stay; of the branches, those run on that lost something."""
        world = World()

        async def quick(ctx: Context) -> str:
            await ctx.step("work", world.do, "quick")
            return "quick"

        async def slow(ctx: Context) -> str:
            await ctx.step("one", world.do, "slow one")
            await ctx.sleep("nap", 60)
            await ctx.step("two", world.do, "slow two")
            await ctx.step("three", world.do, "slow three")
            return "slow"

        async def slower(ctx: Context) -> str:
            await ctx.step("one", world.do, "slower one")
            await ctx.sleep("nap", 120)
            await ctx.step("two", world.do, "slower two")
            return "slower"

        async def order(ctx: Context, _: Any) -> Any:
            before = await ctx.join("early", {"only": quick})
            result = await ctx.join("join", {"quick": quick, "slow": slow, "slower": slower})
            await ctx.step("after", world.do, "after")
            return [dict(before), dict(result)]

        expected = [{"only": "quick"}, {"quick": "quick", "slow": "slow", "slower": "slower"}]
        async with host(namespace, mode) as process:
            assert await process.finish(order) == expected
            world.seen()
            await rewind(process, "join", "slow", "three")
            entries = await namespace.entries()
            statuses = {name: branch["status"] for name, branch in entries["join",].data["branches"].items()}
            assert statuses == {"quick": "completed", "slow": "running", "slower": "running"}
            assert entries["join",].data["branches"]["slow"]["output"] is None
            assert entries["early",].data["branches"]["only"]["status"] == "completed"
            assert ("join", "slower", "two") not in entries, "it was recorded later"
            assert ("join", "slower", "nap") in entries
            assert await process.finish(order) == expected
            assert sorted(world.seen()) == ["after", "slow three", "slower two"]
            await rewind(process, "after")
            assert await process.finish(order) == expected
            assert world.seen() == ["after"]
        await namespace.close()

    async def test_a_branch_that_failed_and_runs_again_may_succeed(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S30: its error is gone from the join; one that failed before the step is told apart as before."""
        is_broken = True

        async def broken(ctx: Context) -> str:
            async def fail() -> str:
                if is_broken:
                    raise CriticalError("late")
                return "mended"

            await ctx.sleep("nap", 60)
            return await ctx.step("work", fail)

        async def lost(ctx: Context) -> None:
            raise ValueError("early")

        async def order(ctx: Context, _: Any) -> Any:
            await ctx.join("join", {"broken": broken, "lost": lost})

        async with host(namespace, mode) as process:
            with pytest.raises(WorkflowFailedError, match="2 of 2 branches") as caught:
                await process.finish(order)
            await rewind(process, "join", "broken", "work")
            is_broken = False
            with pytest.raises(WorkflowFailedError, match="1 of 2 branches") as caught:
                await process.finish(order)
            assert "ValueError: early" in str(caught.value)
            assert (await namespace.entries())["join",].data["branches"]["broken"]["output"] == "mended"
        await namespace.close()

    async def test_a_race_that_was_decided_begins_anew_beside_what_its_winner_had_done_before(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S29: no winner, all branches running; what a loser had read is there once; another may win now."""
        world = World()
        is_slow = False

        async def loser(ctx: Context) -> str:
            message = await ctx.queue.next("read", names=["go"])
            await ctx.step("work", world.do, "loser")
            await ctx.sleep("long", 100)
            return f"loser with {message.body}"

        async def winner(ctx: Context) -> str:
            await ctx.step("one", world.do, "winner one")
            await ctx.sleep("nap", 1000 if is_slow else 10)
            await ctx.step("two", world.do, "winner two")
            await ctx.sleep("rest", 1000 if is_slow else 10)
            return "winner"

        async def order(ctx: Context, _: Any) -> Any:
            result = await ctx.race("race", {"loser": loser, "winner": winner})
            return [result.winner, result.value]

        async with host(namespace, mode) as process:
            await process.send("go", "mail")
            assert await process.finish(order) == ["winner", "winner"]
            assert await bodies_waiting(namespace) == ["mail"]
            world.seen()
            await rewind(process, "race", "winner", "two")
            data = (await namespace.entries())["race",].data
            assert data["winner"] is None
            assert {branch["status"] for branch in data["branches"].values()} == {"running"}
            assert await bodies_waiting(namespace) == ["mail"]
            is_slow = True
            assert await process.finish(order) == ["loser", "loser with mail"]
            assert sorted(world.seen()) == ["loser", "winner two"]
        await namespace.close()

    async def test_messages_that_an_open_race_has_out_keep_their_turn(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S26, S29: what a branch read before the step goes back, when it loses, before what was read after it."""
        world = World()

        async def loser(ctx: Context) -> None:
            await ctx.queue.next("read", names=["go"])
            await ctx.sleep("long", 100_000)

        async def winner(ctx: Context) -> None:
            await ctx.step("wait", trio.sleep, 1)
            await ctx.step("two", world.do, "two")
            await ctx.queue.next("read", names=["go"])
            await ctx.queue.next("end", names=["end"])

        async def order(ctx: Context, _: Any) -> Any:
            await ctx.race("race", {"loser": loser, "winner": winner})
            rest = await ctx.queue.next_batch("rest", count=9, timeout=1)
            return [message.body for message in rest]

        async with host(namespace, mode) as process:
            for number in range(4):
                await process.send("go", number)
            await process.stop(order)
            if mode == "live":
                await process.advance(2)
            for _ in range(3):
                await rewind(process, "race", "winner", "two")
                assert await bodies_waiting(namespace) == [1, 2, 3]
                await process.stop(order)
                assert await bodies_waiting(namespace) == [2, 3]
            await process.send("end")
            assert await process.finish(order) == [0, 2, 3]
        await namespace.close()

    async def test_a_read_that_began_before_the_step_and_ended_after_it_goes_on(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S26: its deadline stays, and is open again."""
        world = World()

        async def reading(ctx: Context) -> Any:
            messages = await ctx.queue.next_batch("read", timeout=3600)
            return [message.body for message in messages]

        async def working(ctx: Context) -> None:
            await ctx.sleep("nap", 60)
            await ctx.step("work", world.do, "work")

        async def order(ctx: Context, _: Any) -> Any:
            return dict(await ctx.join("join", {"reading": reading, "working": working}))

        async with host(namespace, mode) as process:
            await process.stop(order)
            await process.advance(60)
            await process.stop(order)
            await process.send("go", "mail")
            assert await process.finish(order) == {"reading": ["mail"], "working": None}
            deadline = (await namespace.entries())["join", "reading", "read:deadline"].data
            assert deadline["state"] == "interrupted"
            await rewind(process, "join", "working", "work")
            entries = await namespace.entries()
            assert entries["join", "reading", "read:deadline"].data == {**deadline, "state": "pending"}
            assert ("join", "reading", "read:count") not in entries
            assert await process.finish(order) == {"reading": ["mail"], "working": None}
        await namespace.close()


class TestRollback:
    """With rollback: what was undone is not taken for done, and kept starting states reach further back."""

    @staticmethod
    async def undo(ctx: RollbackContext, output: Any) -> None:
        return None

    async def test_an_earlier_iteration_whose_beginning_was_kept_is_run_again_from_its_step(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: with the state that it began with; later iterations are forgotten, and so are states that are not needed."""
        world = World()

        async def body(ctx: Context, total: int) -> Continue[int] | Break[int]:
            number = total % 100
            await ctx.step("a", world.do, f"a{number}", rollback=self.undo)
            await ctx.step("b", world.do, f"b{number}")
            return Break(total) if number == 4 else Continue(total + 1)

        async def order(ctx: Context, _: Any) -> Any:
            await ctx.rollback_checkpoint("checkpoint")
            return await ctx.loop("loop", body, 100)

        async with host(namespace, mode) as process:
            assert await process.finish(order) == 104
            world.seen()
            path = next(path for path in await namespace.entries() if path[-1] == "b" and 1 in path)
            await rewind(process, *path)
            assert (await namespace.entries())["loop",].data == {"state": 101, "iteration": 1, "output": None}
            dump = await namespace.dump()
            starts = [layout.parse_loop_start_key(key)[1] for key in dump if key.startswith(layout.LOOP_START_PREFIX)]
            assert starts == [0]
            assert await process.finish(order) == 104
            assert world.seen() == ["b1", "a2", "b2", "a3", "b3", "a4", "b4"]
        await namespace.close()

    async def test_what_was_rolled_back_is_replayed_itself_or_not_replayed_over(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S35: refused where a step that was undone would count as done, with the step from which it works."""
        world = World()
        is_broken = True

        async def ship() -> None:
            if is_broken:
                raise CriticalError("out of stock")

        async def order(ctx: Context, _: Any) -> str:
            await ctx.step("look", world.do, "look")
            await ctx.rollback_checkpoint("checkpoint")
            await ctx.step("reserve", world.do, "reserve", rollback=self.undo)
            await ctx.step("charge", world.do, "charge", rollback=self.undo)
            await ctx.step("ship", ship)
            return "shipped"

        async with host(namespace, mode) as process:
            with pytest.raises(WorkflowFailedError):
                await process.stop(order)
            await process.restart()
            before = await namespace.dump()
            reserve = (await namespace.entries())["reserve",].id
            for step in ("ship", "charge"):
                with pytest.raises(RewindError, match=f"'reserve' was rolled back.*{reserve}") as caught:
                    await rewind(process, step)
                assert caught.value.found == "a step that was rolled back"
            assert await namespace.dump() == before
            is_broken = False
            world.seen()
            await rewind(process, "reserve")
            assert await process.finish(order) == "shipped"
            assert world.seen() == ["reserve", "charge"]
        await namespace.close()

    async def test_a_handler_that_gave_up_is_asked_again_in_a_later_rollback(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S35: rollback retry counters begin anew."""
        world = World()
        is_broken = True

        async def undo(ctx: RollbackContext, output: Any) -> None:
            world.calls.append(f"undo {ctx.attempt}")
            if is_broken:
                raise CriticalError("not now")

        async def ship() -> None:
            raise CriticalError("out of stock")

        async def order(ctx: Context, _: Any) -> None:
            await ctx.rollback_checkpoint("checkpoint")
            await ctx.step("reserve", world.do, "reserve", rollback=undo)
            await ctx.step("ship", ship)

        async with host(namespace, mode) as process:
            with pytest.raises(WorkflowFailedError):
                await process.stop(order)
            assert world.seen() == ["reserve", "undo 1"]
            await rewind(process, "ship")
            metadata = (await namespace.entries())["reserve",].metadata
            assert metadata is not None
            assert metadata.rollback_error is None
            is_broken = False
            with pytest.raises(WorkflowFailedError) as caught:
                await process.stop(order)
            assert world.seen() == ["undo 1"]
            assert "rollback_error" not in caught.value.metadata
        await namespace.close()


class TestRefused:
    async def test_what_is_no_step_or_not_there_is_named(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: an unknown or non-step entry is refused, and nothing is changed."""
        world = World()
        order = order_of(world)
        async with host(namespace, mode) as process:
            await run_order(process, order)
            await process.restart()
            before = await namespace.dump()
            entries = await namespace.entries()
            driver = await namespace.driver()
            for path, kind in ((("nap",), "sleep"), (("early:0",), "message"), (("version",), "version_check")):
                with pytest.raises(RewindError, match=f"is a {kind} .*the first step after it is 'second'") as caught:
                    await replay_from_step(driver, entries[path].id, clock=process.clock)
                assert (caught.value.entry_id, caught.value.found) == (entries[path].id, kind)
            with pytest.raises(RewindError, match="no entry with the id 'nonsense'") as caught:
                await replay_from_step(driver, "nonsense", clock=process.clock)
            assert caught.value.found is None
            with pytest.raises(InvalidArgumentError, match="entry_id must be the id"):
                await replay_from_step(driver, entries["first",], clock=process.clock)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="clock"):
                await replay_from_step(driver, None, clock="now")  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError):
                await replay_from_step(namespace)  # type: ignore[arg-type]
            assert await namespace.dump() == before
        await namespace.close()

    async def test_a_namespace_in_which_nothing_was_started_is_refused(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        driver = await namespace.driver()
        await send_message(driver, "go", 1, clock=MovableClock())
        with pytest.raises(RewindError, match="no workflow was ever started"):
            await replay_from_step(driver)
        await namespace.close()

    async def test_a_workflow_with_a_running_step_is_refused(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14: a step whose outcome is not known; once it is, it can be replayed."""
        world = World()

        async def charge() -> None:
            world.calls.append("charge")
            if len(world.calls) == 2:
                namespace.kill()

        async def order(ctx: Context, _: Any) -> str:
            await ctx.step("first", world.do, "first")
            await ctx.step("charge", charge, at_most_once=True)
            return "done"

        with pytest.raises(SimulatedCrashError):
            async with host(namespace, mode) as process:
                await process.stop(order)
        async with host(namespace, mode) as process:
            for path in (("first",), ("charge",), ()):
                with pytest.raises(RewindError, match="step 'charge' is running") as caught:
                    await rewind(process, *path)
                assert caught.value.found == "a running step"
            with pytest.raises(WorkflowFailedError, match="StepInterruptedError"):
                await process.stop(order)
            await rewind(process, "charge")
            assert await process.finish(order) == "done"
        assert world.calls == ["first", "charge", "charge"]


class TestCrashes:
    async def test_it_happened_or_it_did_not_and_the_end_is_the_same(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S39: a crash at every write of the first run, of the replay from a step, and of the run after it."""
        worlds: dict[Namespace, World] = {}
        rewound: set[Namespace] = set()

        async def scenario(namespace: Namespace) -> Any:
            world = worlds.setdefault(namespace, World())
            order = order_of(world)
            async with host(namespace, mode) as process:
                if namespace not in rewound:
                    for body in "abc":
                        await process.send("go", body, id=body)
                    await process.finish(order)
                    entry_id = (await namespace.entries())["second",].id
                    driver = await namespace.driver()
                    process.handle = None
                    await replay_from_step(driver, entry_id, clock=process.clock)
                    rewound.add(namespace)
                return await process.finish(order)

        async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
            assert outcome == ORDER_OUTPUT, crash
            assert await bodies_waiting(namespace) == [], crash
            calls = worlds[namespace].calls
            assert calls.count("first") <= (1 if crash is None else 2), crash
            assert 2 <= calls.count("second") <= (2 if crash is None else 4), crash

        explored = await crashes(scenario, make_quick_namespace, check)
        assert explored.counted >= 10

    async def test_a_batch_that_is_cut_can_be_asked_for_again(
        self, mode: RunMode, tmp_path: Path, autojump_clock: MockClock
    ) -> None:
        """S14, for drivers that are not atomic: killed between the pieces, the same call does the rest, and loses nothing."""
        count = 100
        world = World()

        async def order(ctx: Context, _: Any) -> Any:
            await ctx.step("first", world.do, "first")
            await ctx.step("second", world.do, "second")
            messages = await ctx.queue.next_batch("read", count=count)
            for number in range(count):
                await ctx.step(f"part-{number}", world.do, "part", ephemeral=True)
            return [message.body for message in messages]

        data: dict[bytes, bytes] = {}
        filled = MemoryDriver(data, atomic_batch=False)
        for number in range(count):
            await send_message(filled, "go", number, clock=MovableClock())
        result = await run_workflow("workflow-1", order, None, filled, clock=MovableClock())
        assert result.output == list(range(count))
        ended = dict(data)

        async def attempt(crash: Crash | None) -> int:
            namespace = CutNamespace(tmp_path, ended)
            driver = await namespace.driver()
            entry_id = (await namespace.entries())["second",].id
            if crash is not None:
                driver.die_at = (crash.write, crash.when)
            try:
                await replay_from_step(driver, entry_id, clock=MovableClock())
                assert crash is None
            except BaseException:
                assert crash is not None
                await namespace.restart()
                driver = await namespace.driver()
                if ("second",) in await namespace.entries():
                    await replay_from_step(driver, entry_id, clock=MovableClock())
            written = driver.writes
            async with host(namespace, mode) as process:
                assert (await namespace.snapshot()).state is WorkflowState.PENDING, crash
                assert await process.finish(order) == list(range(count)), crash
                assert await bodies_waiting(namespace) == [], crash
            return written

        writes = await attempt(None)
        assert writes >= 4
        for write in range(writes):
            await attempt(Crash(write, "before"))
            await attempt(Crash(write, "after"))


class CutNamespace(Namespace):
    """In memory, behind a driver that takes 128 entries at once; it starts with these bytes."""

    def __init__(self, directory: Path, data: dict[bytes, bytes]) -> None:
        super().__init__("memory", directory)
        self._data = dict(data)

    async def driver(self) -> CrashingDriver:
        if self._driver is None:
            self._driver = CrashingDriver(MemoryDriver(self._data, atomic_batch=False))
        return self._driver


class TestReference:
    async def test_a_history_of_the_reference_engine_is_replayed_from_its_steps(
        self, driver_kind: DriverKind, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S14, S16: its ids are random, so the order is that of locations; its messages go into our mailbox."""
        world = World()

        async def order(ctx: Context, order_id: str) -> Any:
            payment = await ctx.step("process-payment", world.do, "pay", {"id": f"pay-{order_id}", "cents": 1999})
            message = await ctx.queue.next("wait-shipping", names=["shipment-confirmed"])
            await ctx.step("notify-customer", world.do, "notify")
            return {"orderId": order_id, "payment": payment, "tracking": message.body}

        stops = json.loads((VECTORS / "order.json").read_text(encoding="utf-8"))
        dump = {bytes.fromhex(key): bytes.fromhex(value) for key, value in stops[-1]["kv"]}
        namespace = CutNamespace(Path(), dump)
        async with host(namespace, mode) as process:
            expected = (await namespace.snapshot()).output
            for step, calls in (("notify-customer", ["notify"]), ("process-payment", ["pay", "notify"])):
                await rewind(process, step)
                assert await process.finish(order) == expected
                assert world.seen() == calls
                assert await bodies_waiting(namespace) == []


@given(
    st.lists(st.sampled_from(["step", "sleep", "read", "timeout", "loop", "join"]), min_size=1, max_size=7),
    st.lists(st.integers(min_value=0, max_value=30), min_size=1, max_size=3),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_any_workflow_replayed_from_any_step_comes_to_the_same_end(program: list[str], targets: list[int]) -> None:
    """S14: earlier steps run once; the step and later ones once more; each message is read as before."""

    async def main() -> None:
        world = World()

        async def branch(ctx: Context, name: str) -> str:
            await ctx.step("one", world.do, f"{name} one")
            await ctx.step("two", world.do, f"{name} two")
            return name

        async def body(ctx: Context, number: int) -> Continue[int] | Break[int]:
            await ctx.step("in", world.do, f"in {number}")
            return Break(number) if number == 2 else Continue(number + 1)

        async def workflow(ctx: Context, _: Any) -> list[Any]:
            done: list[Any] = []
            for number, act in enumerate(program):
                name = f"{act}-{number}"
                match act:
                    case "step":
                        done.append(await ctx.step(name, world.do, name, number))
                    case "sleep":
                        done.append((await ctx.sleep(name, 0)).value)
                    case "read":
                        done.append((await ctx.queue.next(name, names=["go"])).body)
                    case "timeout":
                        done.append(len(await ctx.queue.next_batch(name, names=["never"], timeout=0)))
                    case "loop":
                        done.append(await ctx.loop(name, body, 0))
                    case _:
                        branches = {part: (lambda ctx, part=part: branch(ctx, part)) for part in "ab"}
                        done.append(dict(await ctx.join(name, branches)))
            return done

        driver = MemoryDriver()
        clock = MovableClock()
        for number in range(program.count("read")):
            await send_message(driver, "go", number, clock=clock)
        first = await run_workflow("w-1", workflow, None, driver, clock=clock)
        for target in targets:
            snapshot = await load_snapshot(driver)
            steps = [entry for entry in snapshot.entries if entry.kind == "step"]
            if not steps:
                return
            entry = steps[target % len(steps)]
            later = sum(step.id >= entry.id for step in steps)
            world.seen()
            if is_in_earlier_iteration(entry):
                with pytest.raises(RewindError, match="was not kept"):
                    await replay_from_step(driver, entry.id, clock=clock)
                continue
            await replay_from_step(driver, entry.id, clock=clock)
            second = await run_workflow("w-1", workflow, None, driver, clock=clock)
            assert second == first
            assert len(world.seen()) == later
            assert await driver.list(layout.MAILBOX_PREFIX) == []
            assert shape(await load_snapshot(driver)) == shape(snapshot)

    def is_in_earlier_iteration(entry: HistoryEntry) -> bool:
        return entry.path[-1] == "in" and 2 not in entry.path

    def shape(snapshot: WorkflowSnapshot) -> list[tuple[Any, ...]]:
        return [_plain(entry) for entry in snapshot.entries]

    trio.run(main)


def _plain(entry: HistoryEntry) -> tuple[Any, ...]:
    data = {key: value for key, value in entry.data.items() if key != "deadline_ms"}
    return entry.path, entry.kind, repr(data)
