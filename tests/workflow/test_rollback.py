"""Rollback: handlers of completed steps, last completed first, each once recorded, resumable, both errors kept."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from harness import Crash, Fault, FaultyDriver, Host, MovableClock, Namespace, SimulatedCrashError, crashes, host
from moments import MomentDriver, Moments
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import Batch, StorageError, decode_value, layout
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    HistoryDivergedError,
    InvalidArgumentError,
    MisuseError,
    RollbackCheckpointError,
    RollbackContext,
    RollbackError,
    RunMode,
    StepError,
    StepOk,
    SuspendSignal,
    TrioClock,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowHandle,
    WorkflowState,
    WorkflowSuspendedError,
    current_step,
    run_workflow,
    start_workflow,
)
from perdure.workflow.activation import CRASH_LOOP_LIMIT

calls: list[Any] = []
contexts: list[RollbackContext] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()
    contexts.clear()


async def do(name: str) -> str:
    calls.append(name)
    return f"{name} done"


async def undo(ctx: RollbackContext, output: str) -> None:
    contexts.append(ctx)
    calls.append(("undo", ctx.step_name, output))


def undo_in_thread(ctx: RollbackContext, output: str) -> None:
    contexts.append(ctx)
    calls.append(("undo", ctx.step_name, output))


async def fail() -> None:
    raise CriticalError("out of stock")


@dataclass
class Booking:
    """What a step returns, a loop's state is, and a handler is given."""

    number: int


async def book(number: int) -> Booking:
    return Booking(number)


async def see(ctx: RollbackContext, booking: Booking) -> None:
    calls.append(booking)


def undone(*names: str) -> list[Any]:
    return [("undo", name, f"{name} done") for name in names]


async def trip(ctx: Context, _: object) -> None:
    """Books a flight, a hotel and a car, of which the last is not to be had."""
    await ctx.step("look", do, "look")
    await ctx.rollback_checkpoint("booking")
    await ctx.step("flight", do, "flight", rollback=undo)
    await ctx.step("hotel", do, "hotel", rollback=undo_in_thread, timeout=0)
    await ctx.step("note", do, "note")
    await ctx.step("car", fail, rollback=undo)


FORWARD = ["look", "flight", "hotel", "note"]
TRIP = [*FORWARD, *undone("hotel", "flight")]


async def hang(ctx: RollbackContext, output: str) -> None:
    calls.append("hang")
    await trio.sleep(100)
    await undo(ctx, output)


async def hung(ctx: Context, _: object) -> None:
    """Fails, and is undone by a handler that takes a while, then by another."""
    await ctx.rollback_checkpoint("c")
    await ctx.step("flight", do, "flight", rollback=undo)
    await ctx.step("hotel", do, "hotel", rollback=hang, timeout=0)
    raise ValueError("no car")


async def refuse(ctx: RollbackContext, output: str) -> None:
    raise ConnectionError("not now")


async def refusing(ctx: Context, _: object) -> None:
    """Fails, and its handler does too, so that it waits."""
    await ctx.rollback_checkpoint("c")
    await ctx.step("flight", do, "flight", rollback=refuse, retry_backoff_base=1000, retry_backoff_max=1000)
    raise ValueError("no car")


@asynccontextmanager
async def started(namespace: Namespace, mode: RunMode, workflow: Any) -> AsyncIterator[WorkflowHandle]:
    """The handle of a workflow that runs for as long as the block does; then the process is gone."""
    driver = await namespace.restart()
    async with trio.open_nursery() as nursery:
        yield await start_workflow(nursery, "workflow-1", workflow, None, driver, mode=mode, clock=TrioClock())
        nursery.cancel_scope.cancel()


async def process_restarts(ctx: Context) -> None:
    """Where a test restarts the process."""
    await ctx.queue.next("restart", names=["go"])


async def loop_starts(namespace: Namespace) -> dict[int, object]:
    """The starting states that are kept, by iteration."""
    pairs = [
        (layout.parse_loop_start_key(key), value)
        for key, value in (await namespace.dump()).items()
        if key.startswith(layout.LOOP_START_PREFIX)
    ]
    return {iteration: decode_value(value) for (_, iteration), value in pairs}


async def failure_of(process: Host, workflow: Any) -> WorkflowFailedError:
    """Run to the end, which is a failure, letting time pass where something waits."""
    while True:
        try:
            result = await process.stop(workflow)
        except WorkflowFailedError as error:
            return error
        assert not result.state.is_terminal, f"it ended as {result.state}"
        pause_s = 0.001
        if result.sleep_until is not None:
            pause_s = max(pause_s, result.sleep_until - process.clock.now_ms() / 1000)
        await process.advance(pause_s)


class TestOrder:
    async def test_handlers_run_in_the_reverse_order_of_completion_and_the_error_is_the_workflows(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: the last completed first; a step that failed, or has no handler, is not undone."""
        async with host(namespace, mode) as process:
            failure = await failure_of(process, trip)
            assert calls == TRIP
            assert (failure.name, failure.error.message) == ("CriticalError", "out of stock")
            snapshot = await namespace.snapshot()
            assert snapshot.state is WorkflowState.FAILED
            await process.restart()
            with pytest.raises(WorkflowFailedError):
                await process.stop(trip)
        assert calls == TRIP, "a failed workflow runs nothing"

    async def test_the_order_is_that_of_completion_where_the_clock_was_set_back(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: it is a stored sequence, not a time."""

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            await process_restarts(ctx)
            await ctx.step("hotel", do, "hotel", rollback=undo)
            raise ValueError("no car")

        async with host(namespace, mode) as process:
            await process.stop(workflow)
            process.clock.move(-3600)
            await process.restart()
            await process.send("go")
            await failure_of(process, workflow)
        entries = await namespace.entries()
        flight, hotel = (entries[name,].metadata for name in ("flight", "hotel"))
        assert flight is not None
        assert hotel is not None
        assert (hotel.completed_at_ms or 0) < (flight.completed_at_ms or 0)
        assert calls == ["flight", "hotel", *undone("hotel", "flight")]

    async def test_a_steps_place_in_the_order_is_in_the_batch_of_its_outcome(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35, S39: no crash leaves a completed step without its number."""
        async with host(namespace, mode) as process:
            await failure_of(process, trip)
            driver = await namespace.driver()
            ids = {path[-1]: entry.id for path, entry in (await namespace.entries()).items()}
            for number, name in enumerate(("flight", "hotel"), 1):
                batch = next(
                    dict(one.puts) for one in driver.batches if layout.metadata_key(ids[name]) in dict(one.puts)
                )
                assert decode_value(batch[layout.detail_key(ids[name])]) == {"completed": number}
                assert layout.decode_u64(batch[layout.COMPLETION_SEQUENCE_KEY]) == number

    async def test_what_a_handler_is_told(self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
        """S35: the step's name, path and output, the workflow's error, and a key of its own that stays the same."""
        keys: list[str] = []

        async def keyed() -> str:
            keys.append(current_step().idempotency_key)
            return "flight done"

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("booking")
            await ctx.step("flight", keyed, rollback=undo)
            raise LookupError("no car")

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        (context,) = contexts
        assert (context.workflow_id, context.step_name, context.path) == ("workflow-1", "flight", ("flight",))
        assert context.attempt == 1
        assert (context.error.name, context.error.message) == ("LookupError", "no car")
        assert len(context.idempotency_key) == 36
        assert context.idempotency_key != keys[0]
        assert not context.is_evicted()
        context.logger.info("told")

    async def test_each_outcome_is_recorded_and_forward_history_is_untouched(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: of an undone step only metadata changes; no entry is added or changed."""

        async def broken(ctx: RollbackContext, output: str) -> None:
            calls.append("broken")
            await trio.sleep_forever()

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("booking")
            await ctx.step("flight", do, "flight", rollback=undo)
            await ctx.step("hotel", do, "hotel", rollback=broken, timeout=5)
            await ctx.step("car", fail)

        async with host(namespace, mode) as process:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(failure_of, process, workflow)
                await process.advance(1)
                assert calls == ["flight", "hotel", "broken"]
                before = await namespace.dump()
                await process.advance(10)
            after = await namespace.dump()
        assert before[layout.STATE_KEY] == b"rolling_back"
        assert after[layout.STATE_KEY] == b"failed"
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        history = {key for key in changed if key.startswith((layout.HISTORY_PREFIX, layout.NAMES_PREFIX))}
        assert history == set()

    async def test_the_checkpoint_is_an_entry_and_undone_steps_say_when(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: as the reference engine stores them."""
        async with host(namespace, mode) as process:
            await failure_of(process, trip)
            entries = await namespace.entries()
        assert entries[("booking",)].kind == "rollback_checkpoint"
        assert entries[("booking",)].data == {"name": "booking"}
        assert entries[("booking",)].metadata is None
        times = {path[0]: entry.metadata.rollback_completed_at_ms for path, entry in entries.items() if entry.metadata}
        assert {name for name, time in times.items() if time} == {"flight", "hotel"}
        assert all(entry.metadata.rollback_error is None for entry in entries.values() if entry.metadata)

    async def test_a_failure_that_the_workflow_caught_hides_nothing(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: steps after a caught failure are undone as well, and so are those before it."""

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("booking")
            await ctx.step("flight", do, "flight", rollback=undo)
            try:
                await ctx.step("upgrade", fail)
            except StepError:
                calls.append("caught")
            await ctx.step("hotel", do, "hotel", rollback=undo)
            raise ValueError("no car")

        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
        assert failure.name == "ValueError"
        assert calls == ["flight", "caught", "hotel", "caught", *undone("hotel", "flight")]

    async def test_outputs_of_every_kind_reach_their_handlers_and_mutations_do_not(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: a handler gets what is recorded: None and empty values too, and not what the workflow made of it."""
        seen: list[Any] = []

        async def see(ctx: RollbackContext, output: Any) -> None:
            seen.append(output)

        async def give(value: Any) -> Any:
            return value

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            for index, value in enumerate([None, 0, "", [], {"a": [1]}]):
                given = await ctx.step(f"s{index}", give, value, rollback=see)
                if given:
                    given["a"].append(2)
            raise ValueError

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        assert seen == [{"a": [1]}, [], "", 0, None]

    async def test_a_handler_gets_the_type_that_the_step_is_annotated_with(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35, S8: and so do the bodies of iterations that run once more for their handlers."""

        async def workflow(ctx: Context, _: object) -> None:
            async def body(inner: Context, state: Booking) -> Continue[Booking] | Break[None]:
                await inner.step("book", book, state.number, rollback=see)
                return Continue(Booking(state.number + 1)) if state.number < 2 else Break(None)

            await ctx.rollback_checkpoint("c")
            await ctx.loop("loop", body, Booking(0))
            raise ValueError

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        assert calls == [Booking(2), Booking(1), Booking(0)]

    async def test_ephemeral_and_at_most_once_steps_are_undone_like_others(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35, S22, S23: once they have completed."""

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("once", do, "once", at_most_once=True, rollback=undo)
            await ctx.step("soon", do, "soon", ephemeral=True, rollback=undo)
            raise ValueError

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        assert calls == ["once", "soon", *undone("soon", "once")]

    async def test_a_step_that_worked_at_its_third_attempt_is_undone_once(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35, S17: failed attempts leave nothing to undo."""

        async def flaky() -> str:
            calls.append("try")
            if len(calls) < 3:
                raise ConnectionError("not yet")
            return "flaky done"

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flaky", flaky, rollback=undo)
            raise ValueError

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        assert calls == ["try", "try", "try", *undone("flaky")]


class TestWhen:
    async def test_without_a_checkpoint_a_failure_is_final_at_once(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: no checkpoint, no rollback."""

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.step("flight", do, "flight")
            raise ValueError("no car")

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
            batches = [dict(batch.puts) for batch in (await namespace.driver()).batches]
        assert not any(batch.get(layout.STATE_KEY) == b"rolling_back" for batch in batches)

    async def test_error_and_state_are_one_batch_before_the_first_handler(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: from then on the workflow cannot go forward any more."""
        async with host(namespace, mode) as process:
            await failure_of(process, trip)
            batches = [dict(batch.puts) for batch in (await namespace.driver()).batches]
        (turn,) = [batch for batch in batches if batch.get(layout.STATE_KEY) == b"rolling_back"]
        assert layout.ERROR_KEY in turn
        assert layout.FAILURE_CAUSES_KEY in turn

    @pytest.mark.parametrize("is_grouped", [False, True])
    async def test_a_rollback_error_out_of_a_step_undoes_what_was_done(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, is_grouped: bool
    ) -> None:
        """S35: `RollbackError` fails the step at once."""

        async def refuse() -> None:
            error = RollbackError("not like this")
            raise ExceptionGroup("several", [error, ValueError("x")]) if is_grouped else error

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            await ctx.step("refuse", refuse)

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        assert calls == ["flight", *undone("flight")]

    async def test_a_result_that_cannot_be_stored_is_rolled_back_too(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35, S9: whatever the error is."""

        async def workflow(ctx: Context, _: object) -> Any:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            return object()

        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
        assert failure.name == "ValueEncodeError"
        assert calls == ["flight", *undone("flight")]

    async def test_a_workflow_that_completes_undoes_nothing(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35."""

        async def workflow(ctx: Context, _: object) -> str:
            await ctx.rollback_checkpoint("c")
            return await ctx.step("flight", do, "flight", rollback=undo)

        async with host(namespace, mode) as process:
            assert await process.finish(workflow) == "flight done"
        assert calls == ["flight"]

    async def test_steps_before_a_restart_are_undone_after_it(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: the order of completion is stored; what the failing run replayed is undone like what it ran."""

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            await ctx.sleep("rest", 60)
            await ctx.step("hotel", do, "hotel", rollback=undo)
            raise ValueError

        async with host(namespace, mode) as process:
            result = await process.stop(workflow)
            assert result.state is WorkflowState.SLEEPING
            await process.restart()
            await failure_of(process, workflow)
        assert calls == ["flight", "hotel", *undone("hotel", "flight")]


class TestPlaces:
    """S35: wherever the steps are."""

    async def test_iterations_that_are_retained_are_undone_with_the_state_they_began_with(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: of a finished loop; forgotten iterations, and those without anything to undo, keep no state."""

        async def workflow(ctx: Context, _: object) -> None:
            async def body(inner: Context, number: int) -> Continue[int] | Break[str]:
                if number % 2 == 0:
                    await inner.step(f"book {number}", do, f"book {number}", rollback=undo)
                else:
                    await inner.step("note", do, f"note {number}")
                return Continue(number + 1) if number < 6 else Break("all")

            await ctx.rollback_checkpoint("c")
            await ctx.loop("loop", body, 0, history_prune_interval=2, history_size=3)
            await process_restarts(ctx)
            raise ValueError

        async with host(namespace, mode) as process:
            await process.stop(workflow)
            kept = await loop_starts(namespace)
            assert kept == {4: 4}, "iteration 6 began with the state in the loop's entry"
            await process.restart()
            await process.send("go")
            await failure_of(process, workflow)
        assert [call for call in calls if call[0] == "undo"] == undone("book 6", "book 4")
        assert [context.path for context in contexts] == [("loop", 6, "book 6"), ("loop", 4, "book 4")]

    async def test_a_loop_in_progress_is_undone_as_far_as_it_came(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: finished iterations and the one in progress; each body's own failure does not matter."""

        async def workflow(ctx: Context, _: object) -> None:
            async def body(inner: Context, number: int) -> Continue[int]:
                await inner.step("book", do, f"book {number}", rollback=undo)
                if number == 2:
                    raise ValueError("full")
                return Continue(number + 1)

            await ctx.rollback_checkpoint("c")
            await ctx.loop("loop", body, 0)

        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
        assert failure.error.message == "full"
        assert [call[2] for call in calls if call[0] == "undo"] == ["book 2 done", "book 1 done", "book 0 done"]

    async def test_starting_states_go_with_their_iterations(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35, S12: as many are kept as iterations are, also in a loop in a loop."""

        async def workflow(ctx: Context, _: object) -> None:
            async def outer(middle: Context, number: int) -> Continue[int] | Break[None]:
                async def inner(innermost: Context, letter: str) -> Continue[str] | Break[None]:
                    await innermost.step("book", do, f"{number}{letter}", rollback=undo)
                    return Continue(letter + "x") if len(letter) < 3 else Break(None)

                await middle.loop("inner", inner, "x", history_prune_interval=1, history_size=2)
                return Continue(number + 1) if number < 4 else Break(None)

            await ctx.rollback_checkpoint("c")
            await ctx.loop("outer", outer, 0, history_prune_interval=1, history_size=2)
            await process_restarts(ctx)
            raise ValueError

        async with host(namespace, mode) as process:
            await process.stop(workflow)
            keys = [key for key in await namespace.dump() if key.startswith(layout.LOOP_START_PREFIX)]
            # The outer loop keeps one besides the one in its entry, and so does each of the two inner ones.
            assert len(keys) == 3
            await process.restart()
            await process.send("go")
            await failure_of(process, workflow)
        assert [call[2] for call in calls if call[0] == "undo"] == ["4xxx done", "4xx done", "3xxx done", "3xx done"]

    async def test_a_finished_loop_that_replay_passed_over_counts_for_the_iteration_around_it(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: the outer iteration's starting state is kept although this life saw none of the steps."""

        async def workflow(ctx: Context, _: object) -> None:
            async def outer(middle: Context, number: int) -> Continue[int]:
                async def inner(innermost: Context, state: None) -> Break[None]:
                    await innermost.step("book", do, f"book {number}", rollback=undo)
                    return Break(None)

                await middle.loop("inner", inner)
                if number == 0:
                    await process_restarts(middle)
                    return Continue(1)
                raise ValueError

            await ctx.rollback_checkpoint("c")
            await ctx.loop("outer", outer, 0)

        async with host(namespace, mode) as process:
            await process.stop(workflow)
            await process.restart()
            await process.send("go")
            await failure_of(process, workflow)
        assert [call[2] for call in calls if call[0] == "undo"] == ["book 1 done", "book 0 done"]

    async def test_branches_of_a_finished_join_are_undone_in_the_order_in_which_their_steps_completed(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: the order is that of completion, whatever branch a step is in and however the branches are listed."""

        async def workflow(ctx: Context, _: object) -> None:
            def branch(name: str, first_s: float, second_s: float) -> Any:
                async def run(inner: Context) -> None:
                    await inner.sleep("first", first_s)
                    await inner.step("one", do, f"{name}1", rollback=undo)
                    await inner.sleep("second", second_s)
                    await inner.step("two", do, f"{name}2", rollback=undo)

                return run

            await ctx.rollback_checkpoint("c")
            await ctx.join("join", {"a": branch("a", 1, 5), "b": branch("b", 2, 1)})
            await ctx.step("after", do, "after", rollback=undo)
            await process_restarts(ctx)
            raise ValueError

        async with host(namespace, mode) as process:
            result = await process.stop(workflow)
            while result.waiting_for_messages is None:
                await process.advance(0.5)
                result = await process.stop(workflow)
            assert calls == ["a1", "b1", "b2", "a2", "after"]
            await process.restart()
            await process.send("go")
            await failure_of(process, workflow)
        assert [call[2] for call in calls[5:]] == ["after done", "a2 done", "b2 done", "b1 done", "a1 done"]
        assert contexts[1].path == ("join", "a", "two")

    async def test_a_failed_join_undoes_its_failed_branches_too(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35, S30: what a branch did before it failed, and all that the others did."""

        async def workflow(ctx: Context, _: object) -> None:
            async def good(inner: Context) -> None:
                await inner.step("hotel", do, "hotel", rollback=undo)

            async def bad(inner: Context) -> None:
                await inner.step("flight", do, "flight", rollback=undo)
                await inner.step("car", fail)

            await ctx.rollback_checkpoint("c")
            await ctx.join("join", {"good": good, "bad": bad})

        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
        assert failure.name == "JoinError"
        assert {call[1] for call in calls if call[0] == "undo"} == {"hotel", "flight"}

    async def test_the_winner_of_a_race_is_undone_and_the_losers_are_gone(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35, S29: what the losers recorded was forgotten with the winner's batch."""

        async def workflow(ctx: Context, _: object) -> None:
            async def quick(inner: Context) -> str:
                await inner.step("quick", do, "quick", rollback=undo)
                await inner.sleep("rest", 1)
                return "quick"

            async def slow(inner: Context) -> None:
                await inner.step("slow", do, "slow", rollback=undo)
                await inner.sleep("rest", 100)

            await ctx.rollback_checkpoint("c")
            await ctx.race("race", {"slow": slow, "quick": quick})
            raise ValueError

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        assert [call for call in calls if call[0] == "undo"] == undone("quick")

    async def test_a_race_that_all_lost_undoes_every_branch(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35."""

        async def workflow(ctx: Context, _: object) -> None:
            def branch(name: str) -> Any:
                async def run(inner: Context) -> None:
                    await inner.step("book", do, name, rollback=undo)
                    raise ValueError(name)

                return run

            await ctx.rollback_checkpoint("c")
            await ctx.race("race", {"a": branch("a"), "b": branch("b")})

        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
        assert failure.name == "RaceError"
        assert sorted(call[2] for call in calls if call[0] == "undo") == ["a done", "b done"]

    async def test_try_blocks_are_undone_whether_they_failed_or_not(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: their functions run over their entries, as on replay."""

        async def workflow(ctx: Context, _: object) -> None:
            async def good(inner: Context) -> None:
                await inner.step("flight", do, "flight", rollback=undo)

            async def bad(inner: Context) -> None:
                await inner.step("hotel", do, "hotel", rollback=undo)
                await inner.step("car", fail)

            async def empty(inner: Context) -> None:
                return None

            await ctx.rollback_checkpoint("c")
            await ctx.try_block("good", good)
            await ctx.try_block("bad", bad)
            await ctx.try_block("empty", empty)
            tried = await ctx.try_step("insurance", do, "insurance", rollback=undo)
            assert isinstance(tried, StepOk)
            raise ValueError

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        assert [call for call in calls if call[0] == "undo"] == undone("insurance", "hotel", "flight")

    async def test_a_checkpoint_inside_of_a_branch_counts_there_only(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: neither for the sibling, nor for what follows the join."""

        async def workflow(ctx: Context, _: object) -> None:
            async def branch(inner: Context) -> None:
                await inner.rollback_checkpoint("c")
                await inner.step("flight", do, "flight", rollback=undo)

            await ctx.join("join", {"branch": branch})
            await ctx.step("hotel", do, "hotel", rollback=undo)

        async with host(namespace, mode) as process:
            with pytest.raises(RollbackCheckpointError):
                await process.ended(workflow)

    @pytest.mark.parametrize("instead", ["another step", "nothing"])
    @pytest.mark.parametrize("where", ["branch", "iteration", "block"])
    async def test_code_that_changed_inside_of_something_finished_is_a_fault_if_it_leaves_something_out(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, where: str, instead: str
    ) -> None:
        """S4, S35: what a finished branch, iteration or block recorded is asked for, or nothing is undone."""
        is_right = [True]

        async def part(inner: Context, *_: object) -> Break[None] | None:
            if is_right:
                await inner.step("flight", do, "flight", rollback=undo)
            elif instead == "another step":
                await inner.step("train", do, "train", rollback=undo)
            return Break(None) if where == "iteration" else None

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            if where == "branch":
                await ctx.join("join", {"branch": part})
            elif where == "iteration":
                await ctx.loop("loop", part)
            else:
                await ctx.try_block("block", part)
            await ctx.step("hotel", do, "hotel", rollback=refuse, retry_backoff_base=50)
            raise ValueError

        async with host(namespace, mode) as process:
            await process.stop(workflow)
            await process.restart()
            is_right.clear()
            before = await namespace.dump()
            with pytest.raises(HistoryDivergedError, match="flight"):
                await process.ended(workflow)
            assert await namespace.dump() == before
        assert [call for call in calls if call[0] == "undo"] == []

    @pytest.mark.parametrize("where", ["branch", "iteration"])
    async def test_code_that_does_more_inside_of_something_finished_is_stopped_there_and_the_rest_is_undone(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, where: str
    ) -> None:
        """S35: on replay a finished branch or iteration is a unit, so its code may have grown."""
        has_grown: list[bool] = []

        async def part(inner: Context, *_: object) -> Break[None] | None:
            await inner.step("flight", do, "flight", rollback=undo)
            if has_grown:
                assert await inner.get_version("v", 2) == 1
                await inner.removed("gone", "step")
                await inner.step("seat", do, "seat", rollback=undo)
            return Break(None) if where == "iteration" else None

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            if where == "branch":
                await ctx.join("join", {"branch": part})
            else:
                await ctx.loop("loop", part)
            await ctx.step("hotel", do, "hotel", rollback=undo)
            has_grown.append(True)
            raise ValueError

        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        assert calls == ["flight", "hotel", *undone("hotel", "flight")]

    async def test_a_message_is_not_completed_by_a_rollback(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S35: neither where handlers are collected nor by one of them."""

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            message = await ctx.queue.next("order", completable=True)

            async def undo_late(rollback: RollbackContext, output: str) -> None:
                with pytest.raises(MisuseError):
                    await message.complete()
                await undo(rollback, output)

            await ctx.step("flight", do, "flight", rollback=undo_late)
            if len(calls) == 1:
                raise ValueError
            await message.complete()

        async with host(namespace, mode) as process:
            await process.stop(workflow)
            await process.send("order", 1)
            with pytest.raises(MisuseError):
                await process.ended(workflow)
            entries = await namespace.entries()
        assert calls[0] == "flight"
        assert entries[("order:0",)].data["body"]["completed"] is False


class TestChecks:
    @pytest.mark.parametrize("is_recorded", [False, True])
    async def test_a_handler_without_a_checkpoint_is_an_error_before_the_step_runs(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, is_recorded: bool
    ) -> None:
        """S35: a missing checkpoint; nothing is recorded, and with right code it goes on."""

        async def wrong(ctx: Context, _: object) -> None:
            await ctx.step("look", do, "look")
            await ctx.step("flight", do, "flight", rollback=undo)

        async def right(ctx: Context, _: object) -> str:
            await ctx.step("look", do, "look")
            await ctx.rollback_checkpoint("c")
            return await ctx.step("flight", do, "flight", rollback=undo)

        async with host(namespace, mode) as process:
            with pytest.raises(RollbackCheckpointError, match="rollback_checkpoint") as caught:
                await process.stop(wrong)
            assert caught.value.name == "flight"
            assert isinstance(caught.value, MisuseError)
            assert calls == ["look"]
            assert ("flight",) not in await namespace.entries()
            await process.restart()
            assert await process.finish(right) == "flight done"

    async def test_a_checkpoint_counts_inside_of_its_scope_and_not_outside(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: scopes inside inherit it when they begin."""

        async def inside(ctx: Context, _: object) -> None:
            async def body(inner: Context, _: None) -> None:
                await inner.step("flight", do, "flight", rollback=undo)
                raise ValueError

            await ctx.rollback_checkpoint("c")
            await ctx.loop("loop", body)

        async with host(namespace, mode) as process:
            await failure_of(process, inside)
        assert calls == ["flight", *undone("flight")]
        assert contexts[0].path == ("loop", 0, "flight")

    @pytest.mark.parametrize(
        "handler",
        [lambda: None, lambda one: None, lambda one, two, three: None, "undo", 7],
        ids=["none", "one", "three", "text", "number"],
    )
    async def test_a_handler_that_cannot_be_called_is_refused_before_the_step_runs(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, handler: Any
    ) -> None:
        """S35: it would be found out when it is too late."""

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=handler)

        async with host(namespace, mode) as process:
            with pytest.raises(InvalidArgumentError, match="rollback="):
                await process.stop(workflow)
        assert calls == []


class TestDivergence:
    async def test_code_that_does_not_fit_is_a_fault_and_right_code_goes_on(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S4, S35: the state stays rolling_back, and nothing is written."""
        fails = [True]

        async def undo_hotel(ctx: RollbackContext, output: str) -> None:
            if fails:
                raise ConnectionError("not now")
            await undo(ctx, output)

        def workflow(flight: str) -> Any:
            async def booking(ctx: Context, _: object) -> None:
                await ctx.rollback_checkpoint("c")
                await ctx.step(flight, do, "flight", rollback=undo)
                await ctx.step("hotel", do, "hotel", rollback=undo_hotel, retry_backoff_base=30)
                raise ValueError("no car")

            return booking

        async with host(namespace, mode) as process:
            result = await process.stop(workflow("flight"))
            assert result.state is WorkflowState.ROLLING_BACK
            await process.restart()
            before = await namespace.dump()
            with pytest.raises(HistoryDivergedError) as caught:
                await process.stop(workflow("train"))
            assert "'flight'" in str(caught.value)
            assert await namespace.dump() == before
            await process.restart()
            fails.clear()
            await failure_of(process, workflow("flight"))
        assert calls == ["flight", "hotel", *undone("hotel", "flight")]

    async def test_code_that_goes_further_now_is_stopped_where_history_ends(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: it would otherwise run forward steps of a workflow that is rolled back; no name is registered either."""
        is_broken = [True]

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            if is_broken:
                is_broken.clear()
                raise ValueError("no car")
            try:
                await ctx.step("car", do, "car", rollback=undo)
            finally:
                with pytest.raises(SuspendSignal):
                    await ctx.step("after", do, "after")

        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
            names = {value for key, value in (await namespace.dump()).items() if key.startswith(layout.NAMES_PREFIX)}
        assert failure.name == "ValueError"
        assert calls == ["flight", *undone("flight")]
        assert names == {b"c", b"flight"}

    async def test_the_workflows_logger_is_silent_while_handlers_are_collected(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """S35: the function runs once more, and its lines are not logged again; a handler's are."""
        replaying: list[bool] = []

        async def loud(ctx: RollbackContext, output: str) -> None:
            ctx.logger.info("undoing %s", output)

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=loud)
            ctx.logger.info("booked")
            replaying.append(ctx.is_replaying)
            raise ValueError

        caplog.set_level(logging.INFO, logger="perdure.workflow.user")
        async with host(namespace, mode) as process:
            await failure_of(process, workflow)
        lines = [record for record in caplog.records if record.name == "perdure.workflow.user"]
        assert [record.getMessage() for record in lines] == ["booked", "undoing flight done"]
        assert {record.__dict__["workflow_id"] for record in lines} == {"workflow-1"}
        assert replaying == [False, True]


class TestRetries:
    async def test_a_failing_handler_is_retried_with_the_steps_own_policy(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: the state stays rolling_back while it waits, with the alarm set; counts survive restarts."""

        async def flaky(ctx: RollbackContext, output: str) -> None:
            calls.append(("attempt", ctx.attempt, trio.current_time()))
            contexts.append(ctx)
            if ctx.attempt < 3:
                raise ConnectionError("not now")

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=flaky, retry_backoff_base=10)
            raise ValueError("no car")

        async with host(namespace, mode) as process:
            began = trio.current_time()
            result = await process.stop(workflow)
            assert result.state is WorkflowState.ROLLING_BACK
            assert result.sleep_until == process.clock.now_ms() / 1000 + 20
            assert await (await namespace.driver()).get_alarm("workflow-1") == round(result.sleep_until * 1000)
            metadata = (await namespace.entries())[("flight",)].metadata
            assert metadata is not None
            assert metadata.rollback_error == "ConnectionError: not now"
            assert metadata.rollback_completed_at_ms is None
            await process.advance(20.001)
            await process.stop(workflow)
            await process.restart()
            failure = await failure_of(process, workflow)
            metadata = (await namespace.entries())[("flight",)].metadata
            assert await (await namespace.driver()).get_alarm("workflow-1") is None
        assert failure.name == "ValueError"
        assert dict(failure.metadata) == {}
        assert metadata is not None
        assert metadata.rollback_error is None
        assert metadata.rollback_completed_at_ms is not None
        attempts = [(number, round(time - began)) for _, number, time in calls[1:]]
        assert attempts == [(1, 0), (2, 20), (3, 50)]
        assert len({context.idempotency_key for context in contexts}) == 1

    async def test_after_the_last_attempt_both_errors_are_kept_and_earlier_handlers_do_not_run(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: the workflow's own error first, what kept it from being undone beside it."""

        async def broken(ctx: RollbackContext, output: str) -> None:
            calls.append(ctx.attempt)
            raise ConnectionError("not ever")

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            await ctx.step("hotel", do, "hotel", rollback=broken, max_retries=2)
            await ctx.step("car", do, "car", rollback=undo)
            raise ValueError("no driver")

        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
            assert calls == ["flight", "hotel", "car", *undone("car"), 1, 2, 3]
            assert (failure.name, failure.error.message) == ("ValueError", "no driver")
            expected = {"rollback_step": "hotel", "rollback_error": "ConnectionError: not ever"}
            assert dict(failure.metadata) == expected
            await process.restart()
            with pytest.raises(WorkflowFailedError) as caught:
                await process.stop(workflow)
            assert dict(caught.value.metadata) == expected
            metadata = (await namespace.entries())[("hotel",)].metadata
        assert metadata is not None
        assert metadata.rollback_error == "ConnectionError: not ever"
        assert metadata.rollback_completed_at_ms is None
        assert len(calls) == 7

    async def test_newer_code_that_allows_fewer_attempts_gives_up_at_once_and_leaves_no_alarm(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: the error that is kept is that of the attempt which was recorded."""

        async def refusing_no_more(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=refuse, max_retries=0)
            raise ValueError("no car")

        async with host(namespace, mode) as process:
            result = await process.stop(refusing)
            assert result.state is WorkflowState.ROLLING_BACK
            await process.restart()
            assert await (await namespace.driver()).get_alarm(process.workflow_id) is not None
            failure = await failure_of(process, refusing_no_more)
            assert await (await namespace.driver()).get_alarm(process.workflow_id) is None
        assert (failure.name, failure.metadata["rollback_error"]) == ("ValueError", "ConnectionError: not now")
        assert (await namespace.attempts("flight"))[1] == 1

    @pytest.mark.parametrize(
        "error", [CriticalError("gone"), ExceptionGroup("x", [CriticalError("gone")])], ids=["alone", "grouped"]
    )
    async def test_a_critical_error_is_not_retried(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, error: Exception
    ) -> None:
        """S35."""

        async def broken(ctx: RollbackContext, output: str) -> None:
            calls.append(ctx.attempt)
            raise error

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=broken)
            raise ValueError

        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
        assert calls == ["flight", 1]
        assert failure.metadata["rollback_error"] == "CriticalError: gone"

    @pytest.mark.parametrize("is_retried", [False, True])
    async def test_a_handler_that_takes_too_long_is_cancelled(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, is_retried: bool
    ) -> None:
        """S35, S19: the step's timeout is the handler's too."""

        async def hang(ctx: RollbackContext, output: str) -> None:
            calls.append(ctx.attempt)
            if ctx.attempt == 1:
                await trio.sleep_forever()

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=hang, timeout=5, retry_on_timeout=is_retried)
            raise ValueError

        async with host(namespace, mode) as process, trio.open_nursery() as nursery:
            # In live mode `stop` returns while the handler runs.
            nursery.start_soon(trio.sleep, 60)
            failure = await failure_of(process, workflow)
            nursery.cancel_scope.cancel()
        assert calls == (["flight", 1, 2] if is_retried else ["flight", 1])
        assert failure.name == "ValueError"
        assert ("rollback_error" in failure.metadata) is not is_retried

    async def test_wake_ends_the_pause_between_attempts(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S24, S35: durably, running or not."""

        async def flaky(ctx: RollbackContext, output: str) -> None:
            calls.append(ctx.attempt)
            if ctx.attempt < 3:
                raise ConnectionError("not now")

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=flaky, retry_backoff_base=1000, retry_backoff_max=9000)
            raise ValueError

        async with host(namespace, mode) as process:
            began = trio.current_time()
            await process.stop(workflow)
            await process.control("wake")
            assert (await process.stop(workflow)).state is WorkflowState.ROLLING_BACK
            assert calls == ["flight", 1, 2]
            await process.restart()
            await process.control("wake")
            await failure_of(process, workflow)
            assert calls == ["flight", 1, 2, 3]
            assert trio.current_time() - began < 1

    async def test_a_plain_handler_that_returns_a_coroutine_is_a_fault(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: the coroutine would never run; nothing is recorded, and with right code the rollback goes on."""

        def workflow(handler: Any) -> Any:
            async def booking(ctx: Context, _: object) -> None:
                await ctx.rollback_checkpoint("c")
                await ctx.step("flight", do, "flight", rollback=handler, timeout=0)
                raise ValueError

            return booking

        async with host(namespace, mode) as process:
            with pytest.raises(InvalidArgumentError, match="returned a coroutine"):
                await process.ended(workflow(lambda ctx, output: undo(ctx, output)))
            assert (await namespace.snapshot()).state is WorkflowState.ROLLING_BACK
            await process.restart()
            await failure_of(process, workflow(undo))
        assert calls == ["flight", *undone("flight")]

    async def test_a_context_used_in_a_handler_is_a_fault(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S6, S35: the function that it belongs to is over."""
        is_wrong = [True]

        async def workflow(ctx: Context, _: object) -> None:
            async def reach_out(rollback: RollbackContext, output: str) -> None:
                if is_wrong:
                    await ctx.step("more", do, "more")
                await undo(rollback, output)

            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=reach_out)
            raise ValueError

        async with host(namespace, mode) as process:
            with pytest.raises(MisuseError, match="scope that is over"):
                await process.stop(workflow)
            await process.restart()
            is_wrong.clear()
            await failure_of(process, workflow)
        assert calls == ["flight", *undone("flight")]


class TestEndings:
    """S32, S33: cancel and evict while rolling back, in a handler and in the pause before its retry."""

    async def test_cancel_in_a_handler_ends_it_as_cancelled(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S32: permanently; what was to be undone stays, and no alarm is left."""
        async with started(namespace, mode, hung) as handle:
            await trio.sleep(1)
            assert calls == ["flight", "hotel", "hang"]
            await handle.cancel()
            with pytest.raises(WorkflowCancelledError):
                await handle.result()
        assert (await namespace.snapshot()).state is WorkflowState.CANCELLED
        assert await (await namespace.driver()).get_alarm("workflow-1") is None
        async with started(namespace, mode, hung) as handle:
            with pytest.raises(WorkflowCancelledError):
                await handle.result()
        assert calls == ["flight", "hotel", "hang"]

    async def test_cancel_in_the_pause_ends_it_as_cancelled(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S32: and the pause's alarm goes with it."""
        async with started(namespace, mode, refusing) as handle:
            await wait_all_tasks_blocked()
            assert await handle.get_state() is WorkflowState.ROLLING_BACK
            await handle.cancel()
            assert await handle.get_state() is WorkflowState.CANCELLED
        assert (await namespace.snapshot()).state is WorkflowState.CANCELLED
        assert await (await namespace.driver()).get_alarm("workflow-1") is None

    async def test_an_evicted_handler_runs_again_elsewhere(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S33: it is no failed attempt, and what was undone stays so."""
        async with started(namespace, mode, hung) as handle:
            await trio.sleep(1)
            await handle.evict()
            with pytest.raises(WorkflowSuspendedError) as caught:
                await handle.result()
            assert caught.value.state == "rolling_back"
        async with started(namespace, mode, hung) as handle:
            with pytest.raises(WorkflowFailedError) as failed:
                await handle.result()
        assert calls == ["flight", "hotel", "hang", "hang", *undone("hotel", "flight")]
        assert [context.attempt for context in contexts] == [1, 1]
        assert dict(failed.value.metadata) == {}

    async def test_a_handler_that_finishes_while_it_is_evicted_is_recorded(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S20, S33: cleanup in a shielded scope; the next life goes on with the next handler."""

        async def stubborn(ctx: RollbackContext, output: str) -> None:
            with trio.CancelScope(shield=True):
                await trio.sleep(10)
            assert ctx.is_evicted()
            calls.append("stubborn")

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            await ctx.step("hotel", do, "hotel", rollback=stubborn)
            raise ValueError

        async with started(namespace, mode, workflow) as handle:
            await trio.sleep(1)
            await handle.evict()
        assert calls == ["flight", "hotel", "stubborn"]
        async with started(namespace, mode, workflow) as handle:
            with pytest.raises(WorkflowFailedError):
                await handle.result()
        assert calls == ["flight", "hotel", "stubborn", *undone("flight")]

    async def test_a_message_to_a_workflow_that_is_rolled_back_is_taken(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35: it has not ended; after the end it is refused."""
        async with started(namespace, mode, refusing) as handle:
            await wait_all_tasks_blocked()
            await handle.message("late", 1)
            await handle.cancel()
            with pytest.raises(WorkflowEndedError):
                await handle.message("too late", 3)

    async def test_a_shutdown_waits_for_the_running_handler_and_begins_no_other(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S33, S49: draining evicts before the next handler."""
        async with started(namespace, mode, hung) as handle:
            await trio.sleep(1)
            handle._activation.drain()  # type: ignore[attr-defined]
            with pytest.raises(WorkflowSuspendedError):
                await handle.result()
        assert calls == ["flight", "hotel", "hang", *undone("hotel")]
        assert (await namespace.snapshot()).state is WorkflowState.ROLLING_BACK

    async def test_a_handler_that_ends_the_process_each_time_ends_as_a_crash_loop(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S18, S35: handlers count like step functions; the error that caused the rollback is kept."""

        async def deadly(ctx: RollbackContext, output: str) -> None:
            calls.append("deadly")
            namespace.kill()

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=deadly)
            raise ValueError("no car")

        for _ in range(CRASH_LOOP_LIMIT + 1):
            with pytest.raises(SimulatedCrashError):
                async with host(namespace, mode) as process:
                    await process.stop(workflow)
            await namespace.restart()
        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
        assert calls == ["flight", *["deadly"] * (CRASH_LOOP_LIMIT + 1)]
        assert failure.name == "ValueError"
        assert str(failure.metadata["rollback_error"]).startswith("CrashLoopError: ")

    async def test_a_crash_loop_in_a_step_is_not_rolled_back(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S18: recover() lets it go on, so what was done must stay."""

        async def deadly() -> None:
            namespace.kill()

        async def workflow(ctx: Context, _: object) -> None:
            await ctx.rollback_checkpoint("c")
            await ctx.step("flight", do, "flight", rollback=undo)
            await ctx.step("deadly", deadly)

        for _ in range(CRASH_LOOP_LIMIT + 1):
            with pytest.raises(SimulatedCrashError):
                async with host(namespace, mode) as process:
                    await process.stop(workflow)
            await namespace.restart()
        async with host(namespace, mode) as process:
            failure = await failure_of(process, workflow)
        assert failure.name == "CrashLoopError"
        assert calls == ["flight"]

    @pytest.mark.parametrize("fault", ["refused", "applied", "lost"])
    async def test_a_storage_error_is_no_failure_of_the_handler(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock, fault: Fault
    ) -> None:
        """S21, S35: the rollback goes on once the storage works; a handler whose outcome was lost runs again."""

        def is_outcome(batch: Batch) -> bool:
            return bool(calls) and calls[-1][0] == "undo" and calls[-1][1] == "hotel"

        driver = FaultyDriver((await namespace.driver()).inner, fault, is_outcome)
        async with trio.open_nursery() as nursery:
            handle = await start_workflow(nursery, "workflow-1", trip, None, driver, mode=mode)
            with pytest.raises(StorageError):
                await handle.result()
        await namespace.restart()
        async with host(namespace, mode) as process:
            failure = await failure_of(process, trip)
        repeated = [] if fault == "applied" else undone("hotel")
        assert calls == [*FORWARD, *undone("hotel"), *repeated, *undone("flight")]
        assert dict(failure.metadata) == {}


class Trip:
    """A trip that is undone, with a moment in each handler and one in the pause before a handler's second attempt."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments

    async def undo(self, ctx: RollbackContext, output: str) -> None:
        calls.append(("begin", ctx.step_name))
        await self.moments.reached(f"in {ctx.step_name}")
        if ctx.step_name == "hotel" and ctx.attempt == 1:
            raise ConnectionError("not now")
        await undo(ctx, output)

    async def run(self, ctx: Context, _: object) -> None:
        await ctx.rollback_checkpoint("c")
        await ctx.step("flight", do, "flight", rollback=self.undo)
        await ctx.step("hotel", do, "hotel", rollback=self.undo)
        raise ValueError("no car")


Act = Callable[[WorkflowHandle], Awaitable[None]]


async def until_undone(
    namespace: Namespace,
    mode: RunMode,
    at: int | None,
    act: Act,
    check: Callable[[Trip, WorkflowHandle], Awaitable[None]],
) -> list[str]:
    """Run the trip until it has failed, or until something was done to it at the given moment; then check."""
    clock = MovableClock()
    async with trio.open_nursery() as nursery:
        handle: Any = None
        moments = Moments(nursery, at, lambda: act(handle))
        trip = Trip(moments)
        driver = MomentDriver(await namespace.driver(), moments)
        while not moments.was_reached:
            moments.are_counted = False
            handle = await start_workflow(nursery, "w-1", trip.run, None, driver, mode=mode, clock=clock)
            moments.are_counted = True
            while not moments.was_reached:
                await wait_all_tasks_blocked()
                await moments.reached("parked or ended")
                if (await handle.get_state()).is_terminal or moments.was_reached:
                    break
                alarm_ms = await driver.get_alarm("w-1")
                assert alarm_ms is not None, "something brings it back"
                await trio.sleep(max(0.001, (alarm_ms - clock.now_ms()) / 1000))
                if mode == "yield":
                    break
            if (await handle.get_state()).is_terminal:
                break
        if at is not None:
            await moments.acted.wait()
            await wait_all_tasks_blocked()
        await check(trip, handle)
        nursery.cancel_scope.cancel()
    return moments.names


class TestEveryMoment:
    """S32, S33: from the first step to the end of the rollback."""

    async def _count(self, make_namespace: Callable[[], Namespace], mode: RunMode) -> list[str]:
        async def check(trip: Trip, handle: WorkflowHandle) -> None:
            assert await handle.get_state() is WorkflowState.FAILED

        async def nothing(handle: WorkflowHandle) -> None:
            raise AssertionError("this run only counts")

        names = await until_undone(make_namespace(), mode, None, nothing, check)
        assert names.count("in hotel") == 2
        assert names.count("in flight") == 1
        calls.clear()
        return names

    async def test_cancel_ends_it_as_cancelled_with_no_alarm_and_no_more_work(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S32: in a handler, at each commit, in the pause; only once it has failed it stays so."""
        names = await self._count(make_quick_namespace, mode)
        ends: list[WorkflowState] = []
        for at in range(len(names)):
            namespace = make_quick_namespace()

            async def cancel(handle: WorkflowHandle, namespace: Namespace = namespace) -> None:
                await handle.cancel()
                assert (await namespace.snapshot()).state.is_terminal, "durable once it returns"

            async def check(trip: Trip, handle: WorkflowHandle, namespace: Namespace = namespace) -> None:
                ends.append(await handle.get_state())
                assert (await namespace.snapshot()).state is ends[-1]
                assert await (await namespace.driver()).get_alarm("w-1") is None
                before, stored = list(calls), await namespace.dump()
                await trio.sleep(10_000)
                kind = WorkflowCancelledError if ends[-1] is WorkflowState.CANCELLED else WorkflowFailedError
                with pytest.raises(kind):
                    await handle.result()
                with pytest.raises(kind):
                    await run_workflow("w-1", trip.run, None, await namespace.restart(), mode=mode)
                assert calls == before
                assert await namespace.dump() == stored

            await until_undone(namespace, mode, at, cancel, check)
            await namespace.close()
        first_failed = ends.index(WorkflowState.FAILED)
        assert len(ends) == len(names)
        assert set(ends[:first_failed]) == {WorkflowState.CANCELLED}
        assert set(ends[first_failed:]) == {WorkflowState.FAILED}
        assert first_failed >= len(names) - 3, "only the last batch, or later, is too late"

    async def test_evict_leaves_it_resumable_and_it_ends_elsewhere_as_if_never_stopped(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S33: no attempt is counted for it, and nothing is undone twice that was recorded."""
        names = await self._count(make_quick_namespace, mode)
        for at in range(len(names)):
            namespace = make_quick_namespace()
            calls.clear()
            contexts.clear()

            async def evict(handle: WorkflowHandle) -> None:
                await handle.evict()

            async def check(trip: Trip, handle: WorkflowHandle, namespace: Namespace = namespace, at: int = at) -> None:
                before, stored = list(calls), await namespace.dump()
                assert layout.IDLE_ACTIVATIONS_KEY not in stored, "an eviction is no crash"
                await trio.sleep(0.0001)
                assert calls == before
                assert await namespace.dump() == stored
                await namespace.restart()
                trip.moments.are_counted = False
                clock = handle._activation.clock  # type: ignore[attr-defined]
                async with host(namespace, mode, workflow_id="w-1", clock=clock) as process:
                    failure = await failure_of(process, trip.run)
                assert (failure.name, dict(failure.metadata)) == ("ValueError", {}), names[at]
                assert [context.attempt for context in contexts] == [2, 1], names[at]
                undoings = [call for call in calls if call[0] == "undo"]
                assert undoings == undone("hotel", "flight"), names[at]

            await until_undone(namespace, mode, at, evict, check)
            await namespace.close()


class TestCrashes:
    async def test_a_crash_at_any_write_ends_like_a_run_without_crashes(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S35, S39: each handler runs at least once, in order; what is recorded as undone is not undone again."""

        async def scenario(namespace: Namespace) -> WorkflowFailedError:
            calls.append("life")
            async with host(namespace, mode) as process:
                return await failure_of(process, eventful)

        async def check(failure: WorkflowFailedError, namespace: Namespace, crash: Crash | None) -> None:
            assert failure.name == "CriticalError"
            assert dict(failure.metadata) == {}
            entries = await namespace.entries()
            states = {
                path: entry.metadata.rollback_completed_at_ms for path, entry in entries.items() if entry.metadata
            }
            assert {path for path, time in states.items() if time} == {("flight",), ("hotel",)}
            undoings = [call for call in calls if call[0] == "undo"]
            order = [call for index, call in enumerate(undoings) if index == 0 or undoings[index - 1] != call]
            assert order == undone("hotel", "flight"), crash
            # Only the handler whose outcome the crash met can have run twice.
            assert len(undoings) <= 2 + (crash is not None), crash
            assert len([call for call in calls if call == "failed attempt"]) in ((2,) if crash is None else (2, 3))
            calls.clear()

        explored = await crashes(scenario, make_quick_namespace, check)
        assert explored.counted > 8


async def eventful(ctx: Context, _: object) -> None:
    """A rollback with retries and with a sleep before it."""
    await ctx.rollback_checkpoint("c")
    await ctx.step("flight", do, "flight", rollback=undo)
    await ctx.sleep("rest", 5)
    await ctx.step("hotel", do, "hotel", rollback=at_third_attempt)
    await ctx.step("car", fail)


async def at_third_attempt(ctx: RollbackContext, output: str) -> None:
    if ctx.attempt < 3:
        calls.append("failed attempt")
        raise ConnectionError("not now")
    await undo(ctx, output)
