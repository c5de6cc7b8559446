"""`ctx.call` under a supervisor: results, failures, policies, cycles, and many at once.

Deaths at every write are in `test_family_crashes.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import Supervisor
from perdure.storage import layout
from perdure.workflow import (
    CallCycleError,
    ChildCancelledError,
    ChildFailedError,
    Context,
    CriticalError,
    HistoryDivergedError,
    InvalidArgumentError,
    OnParentEnd,
    StepCriticalError,
    StepError,
    WorkflowFailedError,
    WorkflowState,
    replay_from_step,
    workflow,
)

effects: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()


async def work(name: str, seconds: float = 0.0) -> str:
    effects.append(name)
    await trio.sleep(seconds)
    return name


@workflow(name="child")
async def child(ctx: Context, input: str) -> str:
    await ctx.step("work", work, input)
    await ctx.sleep("nap", 10)
    return input.upper()


@workflow(name="parent")
async def parent(ctx: Context, input: str) -> str:
    result = await ctx.call("child", child, input)
    return await ctx.step("after", work, f"after {result}")


@workflow(name="failing")
async def failing(ctx: Context, input: int) -> None:
    await ctx.sleep("nap", input)
    raise ValueError("no good")


class TestResult:
    async def test_the_result_comes_back_and_the_child_runs_once(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(parent, child) as supervisor:
            handle = await supervisor.spawn(parent, "p", "a")
            assert await handle.result() == "after A"
            assert effects == ["a", "after A"]
            (info,) = await handle.children()
            assert (info.workflow, info.path, info.outcome) == ("child", ("child",), "completed")
            assert await (await supervisor.get(info.workflow_id)).result() == "A"

    async def test_while_the_child_runs_the_parent_may_leave_memory(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(parent, child) as supervisor:
            handle = await supervisor.spawn(parent, "p", "a")
            await trio.sleep(1)
            assert await handle.get_state() is WorkflowState.SLEEPING
            await handle.evict()
            assert await handle.result() == "after A"
        assert effects == ["a", "after A"]
        assert all(row.next_wake_ms is None for row in disk.rows.values())

    async def test_both_go_on_after_a_restart(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(parent, child) as supervisor:
            await supervisor.spawn(parent, "p", "a")
            await trio.sleep(1)
        async with disk.process(parent, child) as supervisor:
            assert await (await supervisor.get("p")).result() == "after A"
        assert effects == ["a", "after A"]


class TestFailure:
    async def test_a_child_that_fails_fails_its_parent_under_its_own_error(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            return await ctx.call("it", failing, 5, workflow_id="f")

        async with disk.process(calls, failing) as supervisor:
            with pytest.raises(WorkflowFailedError) as caught:
                await (await supervisor.spawn(calls, "p", None)).result()
            assert (caught.value.name, caught.value.error.message) == ("ValueError", "no good")
            assert caught.value.metadata["child"] == "f"

    async def test_a_failure_may_be_caught_and_is_the_same_on_replay(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        seen: list[Any] = []

        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            try:
                await ctx.call("it", failing, 5)
            except ChildFailedError as error:
                seen.append((error.workflow_id, error.step_name, error.error, str(error), error.entry_id))
            await ctx.sleep("nap", 100)
            return len(seen)

        async with disk.process(calls, failing) as supervisor:
            handle = await supervisor.spawn(calls, "p", None)
            await trio.sleep(10)
            await handle.evict()
            assert await handle.result() == 2
        assert seen[0] == seen[1]
        assert issubclass(ChildFailedError, WorkflowFailedError)
        assert issubclass(ChildFailedError, StepCriticalError)

    async def test_a_cancelled_child(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            try:
                await ctx.call("it", child, "x", workflow_id="c")
            except ChildCancelledError as error:
                return error.workflow_id

        async with disk.process(calls, child) as supervisor:
            handle = await supervisor.spawn(calls, "p", None)
            await trio.sleep(1)
            await (await supervisor.get("c")).cancel()
            assert await handle.result() == "c"


@workflow(name="endless")
async def endless(ctx: Context, input: Any) -> Any:
    await ctx.step("begin", work, "endless")
    return (await ctx.queue.next("go")).body


@workflow(name="caller")
async def caller(ctx: Context, input: dict[str, Any]) -> Any:
    """Calls what its input says; gives the result, or the name of the error."""
    options: dict[str, Any] = {key: input[key] for key in ("workflow_id", "on_parent_end") if key in input}
    try:
        return await ctx.call("call", input["workflow"], input.get("input"), **options)
    except StepError as error:
        return f"{type(error).__name__}: {error.error.name}"


async def ended(supervisor: Supervisor, workflow_id: str) -> WorkflowState:
    """Where a workflow stands once nothing happens any more."""
    await trio.sleep(1)
    return await (await supervisor.get(workflow_id)).get_state()


class TestIdentity:
    @pytest.mark.parametrize(("name", "input"), [("failing", 1), ("endless", 2)])
    async def test_an_id_that_is_taken_fails_the_call(
        self, disk: Disk, autojump_clock: MockClock, name: str, input: int
    ) -> None:
        async with disk.process(caller, failing, endless) as supervisor:
            await supervisor.spawn(endless, "taken", 1)
            call = {"workflow": name, "input": input, "workflow_id": "taken"}
            handle = await supervisor.spawn(caller, "p", call)
            assert await handle.result() == "StepCriticalError: WorkflowExistsError"
            assert await handle.children() == ()

    async def test_a_workflow_that_exists_is_joined_and_never_cancelled_from_here(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(caller, endless) as supervisor:
            shared = await supervisor.spawn(endless, "shared", 1)
            call = {"workflow": "endless", "input": 1, "workflow_id": "shared"}
            first, second = [await supervisor.spawn(caller, f"p-{number}", call) for number in (1, 2)]
            await trio.sleep(1)
            await first.cancel()
            assert await ended(supervisor, "shared") is WorkflowState.SLEEPING
            await second.evict()
            await shared.evict()
            await shared.message("go", "result")
            assert await second.result() == "result"
            third = await supervisor.spawn(caller, "p-3", call)
            assert await third.result() == "result"
        assert effects == ["endless"]

    async def test_an_id_used_again_never_meets_the_child_of_the_workflow_before(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S52"""
        async with disk.process(parent, child) as supervisor:
            assert await (await supervisor.spawn(parent, "p", "a")).result() == "after A"
        async with disk.process(parent, child) as supervisor:
            await disk.store.delete("p")
            assert await (await supervisor.spawn(parent, "p", "a")).result() == "after A"
        assert effects == ["a", "after A"] * 2
        assert len([workflow_id for workflow_id in disk.rows if workflow_id.startswith("p/")]) == 2

    async def test_the_catalog_knows_the_parent(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(parent, child) as supervisor:
            handle = await supervisor.spawn(parent, "p", "a")
            await handle.result()
            (info,) = await handle.children()
            assert disk.rows[info.workflow_id].parent_id == "p"
            assert disk.rows["p"].parent_id is None

    async def test_an_unregistered_workflow_is_a_fault_that_writes_nothing(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(parent) as supervisor:
            handle = await supervisor.spawn(parent, "p", "a")
            with pytest.raises(InvalidArgumentError, match="no workflow 'child' is registered"):
                await handle.result()
            assert await handle.children() == ()
        async with disk.process(parent, child) as supervisor:
            assert await (await supervisor.get("p")).result() == "after A"

    async def test_code_that_calls_something_else_is_a_divergence(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S4: the call of another workflow, or a step, at the place of a call."""

        def make(what: str) -> Any:
            @workflow(name="changing")
            async def changing(ctx: Context, input: Any) -> Any:
                if what == "step":
                    return await ctx.step("it", work, "step")
                if what == "send":
                    return await ctx.send("it", ctx.workflow_id, "note")
                return await ctx.call("it", child if what == "child" else endless, "x")

            return changing

        async with disk.process(make("child"), child, endless) as supervisor:
            await supervisor.spawn("changing", "p", None)
            await trio.sleep(1)
        for what in ("endless", "step", "send"):
            async with disk.process(make(what), child, endless) as supervisor:
                handle = await supervisor.get("p")
                await handle.wake()
                with pytest.raises(HistoryDivergedError):
                    await handle.result()
        async with disk.process(make("child"), child, endless) as supervisor:
            assert await (await supervisor.get("p")).result() == "X"
        assert effects == ["x"]


class TestParentsEnd:
    @pytest.mark.parametrize("policy", ["cancel", "leave"])
    @pytest.mark.parametrize("how", ["cancelled", "failed", "lost"])
    async def test_a_child_that_nobody_waits_for_is_cancelled_or_left(
        self, disk: Disk, autojump_clock: MockClock, policy: OnParentEnd, how: str
    ) -> None:
        """S29"""

        @workflow(name="dying")
        async def dying(ctx: Context, input: Any) -> Any:
            async def call(ctx: Context) -> Any:
                return await ctx.call("call", endless, 1, on_parent_end=policy)

            async def other(ctx: Context) -> Any:
                await ctx.sleep("nap", 5)
                return "other"

            if how == "lost":
                return (await ctx.race("race", {"call": call, "other": other})).value
            return await ctx.join("join", {"call": call, "other": other})

        async with disk.process(dying, endless) as supervisor:
            handle = await supervisor.spawn(dying, "p", None, deadline=3.0 if how == "failed" else None)
            await trio.sleep(1)
            (info,) = await handle.children()
            if how == "cancelled":
                await handle.cancel()
            await trio.sleep(10)
            expected = WorkflowState.CANCELLED if policy == "cancel" else WorkflowState.SLEEPING
            assert await ended(supervisor, info.workflow_id) is expected
            if policy == "leave":
                left = await supervisor.get(info.workflow_id)
                await left.message("go", "left")
                assert await left.result() == "left"
        assert all(layout.DUTIES_KEY not in namespace for namespace in disk.namespaces.values())

    async def test_the_children_of_children_are_cancelled_too(self, disk: Disk, autojump_clock: MockClock) -> None:
        async with disk.process(caller, endless) as supervisor:
            inner = {"workflow": "endless", "input": 1, "workflow_id": "3"}
            middle = {"workflow": "caller", "input": inner, "workflow_id": "2"}
            handle = await supervisor.spawn(caller, "1", {"workflow": "caller", "input": middle, "workflow_id": "1b"})
            await trio.sleep(1)
            await handle.cancel()
            await trio.sleep(5)
            states = {row.workflow_id: row.state for row in disk.rows.values()}
        assert states == dict.fromkeys(["1", "1b", "2", "3"], "cancelled")

    async def test_a_dormant_parent_that_is_cancelled_cancels_its_child(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(caller, endless) as supervisor:
            call = {"workflow": "endless", "input": 1, "workflow_id": "c"}
            handle = await supervisor.spawn(caller, "p", call)
            await trio.sleep(1)
            await handle.evict()
            await (await supervisor.get("c")).evict()
            await handle.cancel()
            assert await ended(supervisor, "c") is WorkflowState.CANCELLED


class TestCycle:
    async def test_a_workflow_that_calls_itself(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="selfish")
        async def selfish(ctx: Context, input: Any) -> Any:
            try:
                await ctx.call("me", selfish, None, workflow_id=ctx.workflow_id)
            except CallCycleError as error:
                return error.chain

        async with disk.process(selfish) as supervisor:
            assert await (await supervisor.spawn(selfish, "s", None)).result() == ["s", "s"]

    async def test_a_ring_is_found_where_it_would_close_and_told_alike_on_replay(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S47: a waits for b, b for c; c's call of a fails, and so all end."""
        seen: list[Any] = []

        @workflow(name="ring")
        async def ring(ctx: Context, input: list[str]) -> Any:
            await ctx.sleep("nap", len(input))
            follower = input[0]
            try:
                return await ctx.call("next", ring, rotated[follower], workflow_id=follower)
            except CallCycleError as error:
                seen.append((error.chain, error.error, str(error)))
            await ctx.sleep("rest", 10)
            return "first"

        rotated = {"a": ["b", "c", "a"], "b": ["c", "a"], "c": ["a"]}
        async with disk.process(ring) as supervisor:
            first = await supervisor.spawn(ring, "a", rotated["a"])
            await trio.sleep(8)
            for name in "abc":
                await (await supervisor.get(name)).evict()
            assert await first.result() == "first"
        assert len(seen) == 2
        assert seen[0] == seen[1]
        assert seen[0][0] == ("c", "a", "b", "c")
        assert "'c' -> 'a' -> 'b' -> 'c'" in seen[0][2]

    async def test_of_two_that_join_each_other_at_once_one_goes_on(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="pair")
        async def pair(ctx: Context, other: str) -> Any:
            await ctx.sleep("nap", 1)
            try:
                return ["told", await ctx.call("other", pair, ctx.workflow_id, workflow_id=other)]
            except CallCycleError:
                return "cycle"

        async with disk.process(pair) as supervisor:
            handles = [await supervisor.spawn(pair, *ids) for ids in (("x", "y"), ("y", "x"))]
            with trio.fail_after(100):
                results = [await handle.result() for handle in handles]
        assert "cycle" in results
        assert ["told", "cycle"] in results

    async def test_a_call_that_closed_a_ring_is_remembered_until_that_is_recorded_and_no_longer(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        @workflow(name="waits")
        async def waits(ctx: Context, input: Any) -> Any:
            return await ctx.call("other", closes, None, workflow_id="y")

        @workflow(name="closes")
        async def closes(ctx: Context, input: Any) -> Any:
            await ctx.queue.next("go")
            for number in range(5):
                try:
                    await ctx.call(f"caught-{number}", waits, None, workflow_id="x")
                except CallCycleError:
                    remembered.append(sum(map(len, hosting._failing.values())))  # pyright: ignore[reportPrivateUsage]
            return await ctx.call("other", waits, None, workflow_id="x")

        remembered: list[int] = []
        async with disk.process(waits, closes) as supervisor:
            hosting = supervisor._residents._hosting  # pyright: ignore[reportPrivateUsage]
            other = await supervisor.spawn(closes, "y", None)
            await supervisor.spawn(waits, "x", None)
            await trio.sleep(5)
            await other.message("go")
            with trio.fail_after(100), pytest.raises(WorkflowFailedError, match="could ever go on"):
                await other.result()
            await trio.sleep(5)
            assert remembered == [1] * 5
            assert hosting._failing == {}  # pyright: ignore[reportPrivateUsage]

    async def test_a_call_in_a_race_closes_no_cycle(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="raced")
        async def raced(ctx: Context, other: str) -> Any:
            async def call(ctx: Context) -> Any:
                return await ctx.call("other", raced, ctx.workflow_id, workflow_id=other)

            async def nap(ctx: Context) -> str:
                await ctx.sleep("nap", 5)
                return "nap"

            await ctx.sleep("begin", 1)
            return (await ctx.race("race", {"call": call, "nap": nap})).value

        async with disk.process(raced) as supervisor:
            handles = [await supervisor.spawn(raced, *ids) for ids in (("x", "y"), ("y", "x"))]
            assert [await handle.result() for handle in handles] == ["nap", "nap"]


class TestAgain:
    async def test_recovered_a_parent_recovers_the_child_that_failed_it(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S36"""
        attempts: list[int] = []

        async def shaky() -> str:
            attempts.append(1)
            if len(attempts) == 1:
                raise CriticalError("not yet")
            return "done"

        @workflow(name="shaky")
        async def shaken(ctx: Context, input: Any) -> str:
            await ctx.step("before", work, "before")
            return await ctx.step("shaky", shaky)

        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            return await ctx.call("call", shaken, 1)

        async with disk.process(calls, shaken) as supervisor:
            handle = await supervisor.spawn(calls, "p", None)
            with pytest.raises(WorkflowFailedError):
                await handle.result()
            await handle.recover()
            assert await handle.result() == "done"
            (info,) = await handle.children()
            assert info.outcome == "completed"
        assert effects == ["before"]
        assert len(disk.rows) == 2

    async def test_recovered_a_parent_calls_another_child_in_place_of_a_cancelled_one(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S36"""

        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            return await ctx.call("call", endless, 1)

        async with disk.process(calls, endless) as supervisor:
            handle = await supervisor.spawn(calls, "p", None)
            await trio.sleep(1)
            (first,) = await handle.children()
            await (await supervisor.get(first.workflow_id)).cancel()
            with pytest.raises(WorkflowFailedError) as failed:
                await handle.result()
            assert failed.value.name == "WorkflowCancelledError"
            await handle.recover()
            await trio.sleep(1)
            (second,) = await handle.children()
            assert second.workflow_id != first.workflow_id
            await (await supervisor.get(second.workflow_id)).message("go", "again")
            assert await handle.result() == "again"

    async def test_a_call_that_was_open_as_another_branch_failed_is_made_again(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S36: the child was cancelled with its parent's end, which recover() undoes."""
        is_good = False

        async def fail() -> str:
            if not is_good:
                raise CriticalError("no good")
            return "good"

        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            async def call(ctx: Context) -> Any:
                return await ctx.call("call", endless, 1)

            async def other(ctx: Context) -> Any:
                await ctx.sleep("nap", 1)
                return "other"

            await ctx.race("race", {"call": call, "other": other})
            return await ctx.step("fail", fail)

        async with disk.process(calls, endless) as supervisor:
            handle = await supervisor.spawn(calls, "p", None)
            with pytest.raises(WorkflowFailedError):
                await handle.result()
            is_good = True
            await handle.recover()
            assert await handle.result() == "good"

    async def test_replayed_from_a_step_it_calls_a_new_child_and_cancels_the_old_one(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S14"""

        @workflow(name="calls")
        async def calls(ctx: Context, input: Any) -> Any:
            await ctx.step("first", work, "first")
            await ctx.send("tell", "r", "item", "told")
            return await ctx.call("call", endless, 1)

        @workflow(name="reads")
        async def reads(ctx: Context, input: Any) -> Any:
            return [(await ctx.queue.next(f"read-{number}")).body for number in range(2)]

        async with disk.process(calls, endless, reads) as supervisor:
            reading = await supervisor.spawn(reads, "r", None)
            handle = await supervisor.spawn(calls, "p", None)
            await trio.sleep(1)
            (old,) = await handle.children()
            entries = {entry.path: entry.id for entry in await handle.history()}
            await handle.evict()
            driver = await disk.store.open_driver("p")
            await replay_from_step(driver, entries["first",], clock=disk.clock)
            await driver.aclose()
            await handle.wake()
            await trio.sleep(5)
            (new,) = await handle.children()
            assert new.workflow_id != old.workflow_id
            assert await ended(supervisor, old.workflow_id) is WorkflowState.CANCELLED
            await (await supervisor.get(new.workflow_id)).message("go", "new")
            assert await handle.result() == "new"
            assert await reading.result() == ["told", "told"]

    async def test_a_child_that_is_gone_before_its_parent_heard_of_it(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """What came of it is with the parent; a child that was taken away fails the call, and is not made again."""
        async with disk.process(caller, endless) as supervisor:
            handle = await supervisor.spawn(caller, "p", {"workflow": "endless", "input": 1, "workflow_id": "c"})
            await trio.sleep(1)
            await handle.evict()
            await (await supervisor.get("c")).evict()
        async with disk.process(caller, endless) as supervisor:
            await disk.store.delete("c")
            handle = await supervisor.get("p")
            await handle.wake()
            assert await handle.result() == "StepCriticalError: WorkflowNotFoundError"
        assert effects == ["endless"]


class TestMany:
    async def test_a_thousand_children_of_one_parent(self, disk: Disk, autojump_clock: MockClock) -> None:
        """S13: in one join; each is waited for, none is asked."""
        count = 1000 if disk.kind == "memory" else 200

        @workflow(name="small")
        async def small(ctx: Context, input: int) -> int:
            await ctx.sleep("nap", 10 + input % 7)
            return input

        @workflow(name="many")
        async def many(ctx: Context, input: int) -> int:
            def make(number: int) -> Any:
                async def branch(ctx: Context) -> int:
                    return await ctx.call("call", small, number)

                return branch

            return sum((await ctx.join("all", {str(number): make(number) for number in range(input)})).values())

        async with disk.process(small, many) as supervisor:
            handle = await supervisor.spawn(many, "p", count)
            assert await handle.result() == sum(range(count))
            assert len(await handle.children()) == count
