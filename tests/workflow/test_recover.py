"""`recover()`: exactly what failed the workflow, and what was undone, happens again; everything else is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from harness import Crash, Host, Namespace, crashes, host
from trio.testing import MockClock
from vectors import dump_of, stops_of

from perdure.storage import Batch, layout
from perdure.storage.schema import BranchStatus, EntryStatus, JoinEntry, LoopEntry, RaceEntry, decode_entry
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    HistoryDivergedError,
    JoinError,
    RaceError,
    RollbackContext,
    RunMode,
    StepError,
    WorkflowCancelledError,
    WorkflowFailedError,
    current_step,
)

calls: list[Any] = []
broken: set[str] = set()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    broken.clear()


async def do(name: str) -> str:
    """A step's function: fails for good while its name is among the broken."""
    calls.append(name)
    if name in broken:
        raise CriticalError(f"{name} is broken")
    return f"{name} done"


async def undo(ctx: RollbackContext, output: str) -> None:
    calls.append(("undo", output))
    if f"undo {ctx.step_name}" in broken:
        raise CriticalError(f"undoing {ctx.step_name} is broken")


async def fails(process: Host, workflow: Any) -> WorkflowFailedError:
    """Run to the end, which is a failure, letting time pass where something waits."""
    while True:
        try:
            result = await process.stop(workflow)
        except WorkflowFailedError as error:
            return error
        pause_s = 0.001
        if result.sleep_until is not None:
            pause_s = max(pause_s, result.sleep_until - process.clock.now_ms() / 1000)
        await process.advance(pause_s)


async def recover(process: Host, how: str) -> None:
    """Recover where it runs, or after a restart."""
    if how == "restarted":
        await process.restart()
    await process.control("recover")
    if process.mode == "live" and how == "restarted":
        await process.restart()


def changed(before: dict[bytes, bytes], after: dict[bytes, bytes]) -> set[bytes]:
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


each_way = pytest.mark.parametrize("how", ["at once", "restarted"])


class TestSteps:
    @each_way
    async def test_only_what_failed_the_workflow_runs_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, how: str
    ) -> None:
        """S36, S17: an exhausted step that the workflow had caught, and gone on from, stays as it is."""

        async def workflow(ctx: Context, _: object) -> list[str]:
            with contextlib.suppress(StepError):
                await ctx.step("caught", do, "caught")
            one = await ctx.step("one", do, "one")
            two = await ctx.step("two", do, "two")
            return [one, two]

        broken.update({"caught", "two"})
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            broken.clear()
            await recover(process, how)
            assert await process.ended(workflow) == ["one done", "two done"]
        assert calls == ["caught", "one", "two", "two"]

    async def test_nothing_else_changes(self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
        """S36: the step's entry, metadata and detail, and the workflow's own fields; one batch."""

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.step("one", do, "one")
            await ctx.step("two", do, "two")

        broken.add("two")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            await process.restart()
            before = await namespace.dump()
            entries = await namespace.entries()
            batches = len((await namespace.driver()).batches)
            await process.control("recover")
            after = await namespace.dump()
            assert len((await namespace.driver()).batches) == batches + 1
        two = entries[("two",)]
        expected = {
            layout.entry_key((1,)),
            layout.metadata_key(two.id),
            layout.detail_key(two.id),
            layout.STATE_KEY,
            layout.ERROR_KEY,
            layout.FAILURE_CAUSES_KEY,
            layout.PASSABLE_KEY,
            layout.ALARM_KEY,
        }
        assert changed(before, after) <= expected
        assert after[layout.STATE_KEY] == b"pending"
        assert layout.detail_key(two.id) not in after

    async def test_what_was_done_about_the_failure_need_not_be_asked_for_any_more(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36, S4: the code takes another way now; that way is recorded and replayed like any, through restarts."""

        async def workflow(ctx: Context, _: object) -> str:
            try:
                await ctx.step("pay", do, "pay")
                await ctx.step("ship", do, "ship")
                await ctx.queue.next("wait", names=["go"])
            except StepError:
                await ctx.step("apologize", do, "apologize")
                raise
            return await ctx.step("thank", do, "thank")

        broken.add("pay")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            assert calls == ["pay", "apologize"]
            broken.clear()
            await process.control("recover")
            result = await process.stop(workflow)
            assert result.waiting_for_messages == ("go",)
            await process.restart()
            await process.send("go")
            await process.stop(workflow)
            await process.restart()
            assert await process.ended(workflow) == "thank done"
        assert calls == ["pay", "apologize", "pay", "ship", "thank"]

    async def test_what_was_done_about_the_failure_is_not_done_twice_if_it_fails_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: it is there if the code asks for it."""

        async def workflow(ctx: Context, _: object) -> None:
            try:
                await ctx.step("pay", do, "pay")
            except StepError:
                await ctx.step("apologize", do, "apologize")
                raise

        broken.add("pay")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            for _ in range(2):
                await process.control("recover")
                failure = await fails(process, workflow)
            assert failure.error.message == "pay is broken"
            broken.clear()
            await process.control("recover")
            await process.ended(workflow)
        assert calls == ["pay", "apologize", "pay", "pay", "pay"]

    async def test_what_came_before_the_failure_has_still_to_be_asked_for(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S4, S36: and so has what is recorded from then on."""

        def workflow(*names: str) -> Any:
            async def steps(ctx: Context, _: object) -> None:
                for name in names:
                    await ctx.step(name, do, name)
                await ctx.queue.next("wait", names=["go"])

            return steps

        broken.add("two")
        async with host(namespace, mode) as process:
            await fails(process, workflow("one", "two"))
            broken.clear()
            await process.restart()
            await process.control("recover")
            await process.restart()
            with pytest.raises(HistoryDivergedError, match="'one'"):
                await process.ended(workflow("two"))
            await process.restart()
            await process.stop(workflow("one", "two", "three"))
            await process.restart()
            with pytest.raises(HistoryDivergedError, match="'three'"):
                await process.ended(workflow("one", "two"))

    @pytest.mark.parametrize("state", ["running", "sleeping", "completed", "cancelled", "rolling_back"])
    async def test_it_has_no_effect_on_a_workflow_that_did_not_fail(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, state: str
    ) -> None:
        """S36: nothing is written."""

        async def stuck(ctx: RollbackContext, output: str) -> None:
            raise ConnectionError("not now")

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("one", do, "one", rollback=stuck, retry_backoff_base=100, retry_backoff_max=100)
            if state == "sleeping":
                await ctx.sleep("sleep", 100)
            elif state == "rolling_back":
                raise ValueError

        async with host(namespace, mode) as process:
            await process.stop(workflow)
            if state == "cancelled":
                await process.restart()
                driver = await namespace.driver()
                await driver.batch(Batch(puts=[(layout.STATE_KEY, b"cancelled")]))
            elif state == "running":
                await process.restart()
                driver = await namespace.driver()
                await driver.batch(Batch(puts=[(layout.STATE_KEY, b"running")]))
            before = await namespace.dump()
            assert before[layout.STATE_KEY].decode() == state
            await process.control("recover")
            assert await namespace.dump() == before
            await process.restart()
            await process.control("recover")
            assert await namespace.dump() == before
            if state == "cancelled":
                with pytest.raises(WorkflowCancelledError):
                    await process.stop(workflow)

    async def test_an_error_that_no_step_caused_resets_nothing(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: the function runs again over all that is recorded."""

        async def workflow(ctx: Context, _: object) -> str:
            with contextlib.suppress(StepError):
                await ctx.step("one", do, "one")
            if "code" in broken:
                raise LookupError("no such thing")
            return await ctx.step("two", do, "two")

        broken.update({"one", "code"})
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            await process.restart()
            await process.control("recover")
            assert await namespace.attempts("one") == (EntryStatus.EXHAUSTED, 1)
            assert layout.PASSABLE_KEY not in await namespace.dump()
            broken.clear()
            await process.restart()
            assert await process.ended(workflow) == "two done"
        assert calls == ["one", "two"]


class TestBranches:
    @each_way
    async def test_a_failed_branch_runs_again_and_the_others_are_kept(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, how: str
    ) -> None:
        """S36, S30: over what it had recorded before it failed."""

        async def workflow(ctx: Context, _: object) -> dict[str, Any]:
            async def good(inner: Context) -> str:
                return await inner.step("good", do, "good")

            async def bad(inner: Context) -> str:
                await inner.step("first", do, "first")
                await inner.step("bad", do, "bad")
                return await inner.step("last", do, "last")

            return dict(await ctx.join("join", {"good": good, "bad": bad}))

        broken.add("bad")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            broken.clear()
            await recover(process, how)
            assert await process.ended(workflow) == {"good": "good done", "bad": "last done"}
        assert sorted(calls) == ["bad", "bad", "first", "good", "last"]

    async def test_what_is_stored_of_a_failed_branch_is_gone_and_its_siblings_stay(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: the status is running again; text and detail of the failure are deleted."""

        async def workflow(ctx: Context, _: object) -> None:
            def branch(name: str) -> Any:
                async def run(inner: Context) -> None:
                    if name in broken:
                        raise LookupError(name)
                    await inner.step("step", do, name)

                return run

            await ctx.join("join", {name: branch(name) for name in ("a", "b", "c")})

        broken.update({"b", "c"})
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            await process.restart()
            await process.control("recover")
            dump = await namespace.dump()
            (join,) = [
                e
                for k, v in dump.items()
                if k.startswith(layout.HISTORY_PREFIX) and isinstance((e := decode_entry(v)).kind, JoinEntry)
            ]
            assert isinstance(join.kind, JoinEntry)
            statuses = {name: (branch.status, branch.error) for name, branch in join.kind.branches.items()}
            assert statuses == {
                "a": (BranchStatus.COMPLETED, None),
                "b": (BranchStatus.RUNNING, None),
                "c": (BranchStatus.RUNNING, None),
            }
            assert layout.detail_key(join.id) not in dump
            await process.restart()
            broken.clear()
            await process.ended(workflow)
        assert sorted(calls) == ["a", "b", "c"]

    async def test_joins_in_joins_are_reopened_on_the_way_to_what_failed_only(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: each join on the path of the failure, at any depth."""

        async def workflow(ctx: Context, _: object) -> None:
            def inner_branch(name: str) -> Any:
                async def run(innermost: Context) -> None:
                    await innermost.step("work", do, name)

                return run

            def outer_branch(name: str) -> Any:
                async def run(inner: Context) -> None:
                    await inner.join("inner", {key: inner_branch(f"{name}{key}") for key in "xy"})

                return run

            await ctx.join("outer", {name: outer_branch(name) for name in "ab"})

        broken.add("ay")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            broken.clear()
            await process.control("recover")
            await process.ended(workflow)
        assert sorted(calls) == ["ax", "ay", "ay", "bx", "by"]

    async def test_a_join_whose_failure_was_caught_and_raised_again_later_is_reopened(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: the cause of the error counts, not where it was raised."""

        async def workflow(ctx: Context, _: object) -> str:
            async def branch(inner: Context) -> str:
                return await inner.step("work", do, "work")

            failure: JoinError | None = None
            value = "nothing"
            try:
                value = (await ctx.join("join", {"branch": branch}))["branch"]
            except JoinError as error:
                failure = error
            await ctx.step("report", do, "report")
            if failure is not None:
                raise LookupError("in the end") from failure
            return value

        broken.add("work")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            broken.clear()
            await process.control("recover")
            assert await process.ended(workflow) == "work done"
        assert calls == ["work", "report", "work"]

    @each_way
    async def test_a_race_that_all_lost_is_run_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, how: str
    ) -> None:
        """S36: each branch over what it had recorded before it failed."""

        async def workflow(ctx: Context, _: object) -> str:
            def branch(name: str) -> Any:
                async def run(inner: Context) -> str:
                    await inner.step("first", do, f"{name}1")
                    return await inner.step("second", do, f"{name}2")

                return run

            return (await ctx.race("race", {"a": branch("a"), "b": branch("b")})).winner

        broken.update({"a2", "b2"})
        async with host(namespace, mode) as process:
            failure = await fails(process, workflow)
            assert failure.name == RaceError.__name__
            broken.remove("b2")
            await recover(process, how)
            assert await process.ended(workflow) == "b"
        # Whether the other gets to its second step before it has lost is the scheduler's.
        assert sorted(call for call in calls if call != "a2") == ["a1", "b1", "b2", "b2"]


class TestUndone:
    @each_way
    async def test_steps_that_were_undone_run_again_and_can_be_undone_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, how: str
    ) -> None:
        """S36: with fresh metadata and a new place in the order; steps without a handler stay."""

        async def workflow(ctx: Context, _: object) -> str:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            await ctx.step("note", do, "note")
            await ctx.step("hotel", do, "hotel", rollback=undo)
            return await ctx.step("car", do, "car", rollback=undo)

        broken.add("car")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            first = ["flight", "note", "hotel", "car", ("undo", "hotel done"), ("undo", "flight done")]
            assert calls == first
            await recover(process, how)
            await fails(process, workflow)
            again = ["flight", "hotel", "car", ("undo", "hotel done"), ("undo", "flight done")]
            assert calls == first + again
            broken.clear()
            await recover(process, how)
            assert await process.ended(workflow) == "car done"
        assert calls == first + again + ["flight", "hotel", "car"]

    async def test_an_undone_step_that_runs_again_has_other_idempotency_keys(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: or a service that honours them would answer with what was undone; each is stable over attempts and restarts."""
        keys: list[tuple[str, str]] = []

        async def book(name: str) -> None:
            keys.append((f"do {name}", current_step().idempotency_key))
            if name == "car" or current_step().attempt == 1:
                raise ConnectionError("not now")

        async def cancel(ctx: RollbackContext, output: object) -> None:
            keys.append((f"undo {ctx.step_name}", ctx.idempotency_key))
            if ctx.attempt == 1:
                raise ConnectionError("not now")

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", book, "flight", rollback=cancel)
            await ctx.step("car", book, "car", max_retries=0)

        async with host(namespace, mode) as process:
            for _ in range(3):
                await fails(process, workflow)
                await process.restart()
                await process.control("recover")
                await process.restart()
        seen = {what: [key for name, key in keys if name == what] for what in ("do flight", "undo flight", "do car")}
        for what in ("do flight", "undo flight"):
            assert len(seen[what]) == 6
            assert seen[what][::2] == seen[what][1::2], "one key for all attempts"
            assert len(set(seen[what])) == 3, "and another each time it is undone"
        assert len(set(seen["do car"])) == 1, "what failed may have had its effect all the same"
        assert len({key for _, key in keys}) == 7

    async def test_after_a_rollback_that_gave_up_what_was_undone_runs_again_and_the_counts_are_fresh(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: a step whose handler failed was not undone, and stays."""

        async def workflow(ctx: Context, _: object) -> str:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            await ctx.step("hotel", do, "hotel", rollback=undo)
            return await ctx.step("car", do, "car")

        broken.update({"car", "undo flight"})
        async with host(namespace, mode) as process:
            failure = await fails(process, workflow)
            assert failure.metadata["rollback_step"] == "flight"
            await process.restart()
            await process.control("recover")
            entries = await namespace.entries()
            flight, hotel = entries[("flight",)].metadata, entries[("hotel",)].metadata
            assert flight is not None
            assert (flight.status, flight.rollback_error) == (EntryStatus.COMPLETED, None)
            assert hotel is not None
            assert (hotel.status, hotel.attempts, hotel.rollback_completed_at_ms) == (EntryStatus.PENDING, 0, None)
            await process.restart()
            broken.clear()
            broken.add("car")
            failure = await fails(process, workflow)
            assert "rollback_step" not in failure.metadata
        done = ["flight", "hotel", "car", ("undo", "hotel done"), ("undo", "flight done")]
        assert calls == [*done, "hotel", "car", ("undo", "hotel done"), ("undo", "flight done")]

    @each_way
    async def test_a_finished_loop_goes_back_to_the_earliest_iteration_with_something_undone(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, how: str
    ) -> None:
        """S36: with the state that it began with; later iterations replay what is not undone."""

        async def workflow(ctx: Context, _: object) -> str:
            async def body(inner: Context, state: list[str]) -> Continue[list[str]] | Break[list[str]]:
                number = len(state)
                noted = await inner.step("note", do, f"note {number}")
                if number in (1, 3):
                    await inner.step("book", do, f"book {number}", rollback=undo)
                state = [*state, noted]
                return Continue(state) if number < 4 else Break(state)

            await ctx.rollback_checkpoint("c")
            notes = await ctx.loop("loop", body, [])
            return await ctx.step("car", do, f"car {len(notes)}")

        broken.add("car 5")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            assert calls[-3:] == ["car 5", ("undo", "book 3 done"), ("undo", "book 1 done")]
            await process.restart()
            await process.control("recover")
            stored = [
                decode_entry(v) for k, v in (await namespace.dump()).items() if k.startswith(layout.HISTORY_PREFIX)
            ]
            (loop,) = [entry for entry in stored if isinstance(entry.kind, LoopEntry)]
            assert isinstance(loop.kind, LoopEntry)
            assert (loop.kind.iteration, loop.kind.output) == (1, None)
            metadata = (await namespace.entries())[("loop",)].metadata
            assert metadata is not None
            assert (metadata.status, metadata.completed_at_ms) == (EntryStatus.RUNNING, None)
            if how == "restarted":
                await process.restart()
            calls.clear()
            broken.clear()
            assert await process.ended(workflow) == "car 5 done"
        assert calls == ["book 1", "book 3", "car 5"]

    async def test_a_decided_race_whose_winner_was_undone_is_run_anew(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36, S29: losers begin from nothing, since what they recorded was forgotten."""

        async def workflow(ctx: Context, _: object) -> str:
            async def quick(inner: Context) -> str:
                await inner.step("note", do, "note")
                return await inner.step("book", do, "quick", rollback=undo)

            async def slow(inner: Context) -> str:
                await inner.sleep("rest", 100)
                return await inner.step("book", do, "slow", rollback=undo)

            await ctx.rollback_checkpoint("c")
            won = await ctx.race("race", {"slow": slow, "quick": quick})
            return await ctx.step("car", do, f"car for {won.winner}")

        broken.add("car for quick")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            await process.restart()
            await process.control("recover")
            stored = [
                decode_entry(v) for k, v in (await namespace.dump()).items() if k.startswith(layout.HISTORY_PREFIX)
            ]
            (race,) = [entry for entry in stored if isinstance(entry.kind, RaceEntry)]
            assert isinstance(race.kind, RaceEntry)
            assert race.kind.winner is None
            assert {branch.status for branch in race.kind.branches.values()} == {BranchStatus.RUNNING}
            await process.restart()
            broken.clear()
            assert await process.ended(workflow) == "car for quick done"
        assert calls == ["note", "quick", "car for quick", ("undo", "quick done"), "quick", "car for quick"]

    async def test_a_completed_join_with_something_undone_runs_that_branch_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: and only that one."""

        async def workflow(ctx: Context, _: object) -> None:
            async def booked(inner: Context) -> None:
                await inner.step("book", do, "book", rollback=undo)
                await inner.step("note", do, "note")

            async def looked_up(inner: Context) -> None:
                calls.append("looking up")
                await inner.step("look", do, "look")

            await ctx.rollback_checkpoint("c")
            await ctx.join("join", {"booked": booked, "looked up": looked_up})
            await ctx.step("car", do, "car")

        broken.add("car")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            await process.restart()
            await process.control("recover")
            await process.restart()
            broken.clear()
            calls.clear()
            await process.ended(workflow)
        assert calls == ["book", "car"]

    async def test_an_undone_step_may_return_something_else_and_the_code_take_another_way(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36: what was recorded after it is there if asked for, and no divergence if not."""
        prices = [10, 20]

        async def book() -> int:
            return prices.pop(0)

        async def workflow(ctx: Context, _: object) -> str:
            await ctx.rollback_checkpoint("c")
            price = await ctx.step("book", book, rollback=undo)
            if price == 10:
                await ctx.step("cheap", do, "cheap")
            else:
                await ctx.step("dear", do, "dear")
            return await ctx.step("pay", do, "pay")

        broken.add("pay")
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            broken.clear()
            await process.control("recover")
            assert await process.ended(workflow) == "pay done"
        assert calls == ["cheap", "pay", ("undo", 10), "dear", "pay"]

    async def test_a_workflow_that_the_reference_engine_rolled_back_is_recovered(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36, S16: what failed there and what was undone there runs again here."""

        async def workflow(ctx: Context, _: object) -> str:
            await ctx.rollback_checkpoint("billing")
            await ctx.step("reserve", do, "reserve", rollback=undo)
            await ctx.step("charge", do, "charge", rollback=undo)
            return await ctx.step("ship", do, "ship")

        driver = await namespace.driver()
        await driver.batch(Batch(puts=list(dump_of(stops_of("rollback")[0]).items())))
        async with host(namespace, mode) as process:
            failure = await fails(process, workflow)
            assert (failure.name, failure.error.message) == ("CriticalError", "out of stock")
            assert calls == []
            await process.restart()
            await process.control("recover")
            await process.restart()
            assert await process.ended(workflow) == "ship done"
        assert calls == ["reserve", "charge", "ship"]

    async def test_where_it_is_not_known_what_failed_it_an_iteration_that_cannot_be_gone_back_to_stays(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36, S16: every exhausted step may have failed it, but the first iteration's starting state was not kept."""

        async def body(inner: Context, number: int) -> Continue[int] | Break[int]:
            await inner.try_step("hail", do, f"hail {number}")
            return Continue(number + 1) if number < 1 else Break(number)

        async def workflow(ctx: Context, _: object) -> str:
            await ctx.loop("loop", body, 0)
            return await ctx.step("ride", do, "ride")

        broken.update({"hail 0", "hail 1", "ride"})
        async with host(namespace, mode) as process:
            await fails(process, workflow)
            await process.restart()
            await (await namespace.driver()).delete(layout.FAILURE_CAUSES_KEY)  # as if the reference engine had run it
            await process.restart()
            broken.clear()
            await recover(process, "restarted")
            assert await process.ended(workflow) == "ride done"
            assert await namespace.attempts("loop", 0, "hail") == (EntryStatus.EXHAUSTED, 1)
        assert calls == ["hail 0", "hail 1", "ride", "hail 1", "ride"]


async def eventful(ctx: Context, _: object) -> str:
    """Something of everything is undone, and fails once more after that."""

    async def branch(inner: Context) -> None:
        await inner.step("book", do, "branch", rollback=undo)

    async def body(inner: Context, number: int) -> Continue[int] | Break[int]:
        await inner.step("book", do, f"iteration {number}", rollback=undo)
        return Continue(number + 1) if number < 2 else Break(number)

    async def quick(inner: Context) -> None:
        await inner.step("book", do, "quick", rollback=undo)

    async def slow(inner: Context) -> None:
        await inner.sleep("rest", 1000)

    await ctx.rollback_checkpoint("c")
    await ctx.join("join", {"branch": branch})
    await ctx.loop("loop", body, 0)
    await ctx.race("race", {"quick": quick, "slow": slow})
    return await ctx.step("car", do, "car")


EVENTFUL = ["branch", "iteration 0", "iteration 1", "iteration 2", "quick"]


class TestCrashes:
    async def test_a_crash_at_any_write_ends_like_a_run_without_crashes(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S36, S35, S39: before and after each write of the failure, the rollback, the recovery and the run after it."""

        async def scenario(namespace: Namespace) -> Any:
            async with host(namespace, mode) as process:
                # Who recovers looks first, and leaves alone what he has recovered before.
                if layout.PASSABLE_KEY not in await namespace.dump():
                    broken.add("car")
                    await fails(process, eventful)
                    await process.restart()
                    await process.control("recover")
                    await process.restart()
                broken.clear()
                return await process.ended(eventful)

        async def check(output: Any, namespace: Namespace, crash: Crash | None) -> None:
            assert output == "car done", crash
            entries = await namespace.entries()
            undone = [
                e.path for e in entries.values() if e.metadata and e.metadata.rollback_completed_at_ms is not None
            ]
            assert undone == [], crash
            for name in EVENTFUL:
                # Done, undone, and done again; whatever the crash met, once more.
                assert calls.count(("undo", f"{name} done")) in ((1,) if crash is None else (1, 2)), (crash, name)
                assert calls.count(name) in ((2,) if crash is None else (2, 3)), (crash, name)
            calls.clear()

        explored = await crashes(scenario, make_quick_namespace, check)
        assert explored.counted > 20
