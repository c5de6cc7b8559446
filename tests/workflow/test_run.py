"""`run_workflow`: what a run takes over from earlier ones, what it leaves alone, what it returns."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import trio
from harness import Namespace, TrioClock, host
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import Batch, DecodeError, FormatVersionError, MemoryDriver, decode_value, layout
from perdure.workflow import (
    ANY_MESSAGE,
    Context,
    RunMode,
    Uuid7Generator,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowResult,
    WorkflowState,
    current_step,
    load_snapshot,
    run_workflow,
    send_message,
    start_workflow,
    workflow,
)
from perdure.workflow.history import FORMAT_VERSION


async def work() -> str:
    return "done"


async def waiting(ctx: Context, given: Any) -> Any:
    done = await ctx.step("work", work)
    message = await ctx.queue.next("go")
    return [given, done, message.body]


class TestInput:
    async def test_the_input_is_kept_from_the_first_run(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with host(namespace, mode) as process:
            await process.stop(waiting, {"sku": 7})
            await process.restart()
            await process.send("go", 1)
            assert await process.finish(waiting, {"sku": 8}) == [{"sku": 7}, "done", 1]
        assert (await namespace.snapshot()).input == {"sku": 7}
        await namespace.close()

    async def test_a_later_input_that_cannot_be_stored_is_not_even_looked_at(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with host(namespace, mode) as process:
            await process.stop(waiting, 1)
            await process.restart()
            await process.send("go", 1)
            assert await process.finish(waiting, object()) == [1, "done", 1]

    async def test_the_function_gets_the_stored_input_on_the_first_run_too(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S8: what the first run sees equals what replay sees, and changing it afterwards changes nothing."""
        seen: list[Any] = []

        async def looking(ctx: Context, given: Any) -> None:
            seen.append(given)
            given["items"].append("mine")
            await ctx.queue.next("go")

        given = {"items": (1, 2), 3: "three"}
        async with host(namespace, mode) as process:
            await process.stop(looking, given)
            assert given == {"items": (1, 2), 3: "three"}
            await process.restart()
            await process.stop(looking, given)
        assert seen[0] == seen[1] == {"items": [1, 2, "mine"], 3: "three"}
        assert (await namespace.snapshot()).input == {"items": [1, 2], 3: "three"}
        await namespace.close()


class TestEnded:
    """S34: started again with newer code, nothing runs and nothing is written."""

    async def _again(self, namespace: Namespace, mode: RunMode) -> WorkflowResult:
        async def newer(ctx: Context, given: Any) -> Any:
            calls.append("newer")
            await ctx.step("another", work)
            return "newer"

        calls: list[str] = []
        stored = await namespace.dump()
        driver = await namespace.restart()
        try:
            return await run_workflow("workflow-1", newer, "new input", driver, mode=mode)
        finally:
            assert calls == []
            assert driver.writes == 0
            assert await namespace.dump() == stored
            async with trio.open_nursery() as nursery:
                handle = await start_workflow(nursery, "workflow-1", newer, "new input", driver, mode=mode)
                with trio.move_on_after(1):
                    with suppress(WorkflowFailedError, WorkflowCancelledError):
                        await handle.result()
                await handle.wake()
                await handle.cancel()
                await handle.evict()
            assert calls == []
            assert driver.writes == 0
            assert await namespace.dump() == stored
            await namespace.close()

    async def test_a_completed_workflow_gives_its_output_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S34: a completed workflow started again with newer code: nothing runs, nothing is written."""
        async with host(namespace, mode) as process:
            await process.send("go", 5)
            output = await process.finish(waiting, 1)
        again = await self._again(namespace, mode)
        assert again == WorkflowResult(WorkflowState.COMPLETED, output)

    async def test_a_completed_workflow_of_the_reference_engine_is_not_even_adopted(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S34, S16: it has none of our own keys, and gets none."""
        async with host(namespace, mode) as process:
            await process.send("go", 5)
            output = await process.finish(waiting, 1)
            driver = await namespace.driver()
            await driver.batch(Batch(delete_prefixes=[layout.OWN_PREFIX]))
        again = await self._again(namespace, mode)
        assert again == WorkflowResult(WorkflowState.COMPLETED, output)

    async def test_a_failed_workflow_raises_its_error_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S34: a failed workflow started again with newer code: nothing runs, nothing is written."""

        async def failing(ctx: Context, _: Any) -> None:
            await ctx.step("work", work)
            raise KeyError("missing")

        async with host(namespace, mode) as process:
            with pytest.raises(WorkflowFailedError) as first:
                await process.stop(failing)
        assert isinstance(first.value.__cause__, KeyError)
        with pytest.raises(WorkflowFailedError) as again:
            await self._again(namespace, mode)
        assert again.value.error == first.value.error
        assert again.value.name == "KeyError"
        assert again.value.message == "'missing'"
        assert again.value.__cause__ is None, "the original died with its process"

    async def test_a_cancelled_workflow_stays_cancelled(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S34: a cancelled workflow started again with newer code: nothing runs, nothing is written."""
        async with host(namespace, mode) as process:
            await process.stop(waiting, 1)
            await process.control("cancel")
        with pytest.raises(WorkflowCancelledError) as caught:
            await self._again(namespace, mode)
        assert caught.value.workflow_id == "workflow-1"


class TestResult:
    async def test_a_waiting_workflow_tells_when_and_for_what(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        async def by_name(ctx: Context, _: Any) -> None:
            await ctx.queue.next("q", names=["b", "a", "b"], timeout=2.5)

        driver = await namespace.driver()
        result = await run_workflow("workflow-1", by_name, None, driver, clock=TrioClock(10_000))
        assert result == WorkflowResult(WorkflowState.SLEEPING, None, 12.5, ("a", "b"))
        assert await driver.get_alarm("workflow-1") == 12_500
        await namespace.close()

    async def test_a_wait_for_anything_is_told_as_such(self, namespace: Namespace, autojump_clock: MockClock) -> None:
        async def any_message(ctx: Context, _: Any) -> None:
            await ctx.queue.next("q")

        result = await run_workflow("workflow-1", any_message, None, await namespace.driver(), clock=TrioClock())
        assert result == WorkflowResult(WorkflowState.SLEEPING, None, None, ANY_MESSAGE)
        await namespace.close()

    async def test_a_sleep_waits_for_no_message(self, namespace: Namespace, autojump_clock: MockClock) -> None:
        async def sleeping(ctx: Context, _: Any) -> None:
            await ctx.sleep("z", 1)

        driver = await namespace.driver()
        result = await run_workflow("workflow-1", sleeping, None, driver, clock=TrioClock(10_000))
        assert result == WorkflowResult(WorkflowState.SLEEPING, None, 11.0, None)
        await namespace.close()

    async def test_a_live_run_returns_when_the_workflow_ends(
        self, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        async def sleeping(ctx: Context, _: Any) -> float:
            await ctx.sleep("z", 3600)
            return trio.current_time()

        result = await run_workflow(
            "workflow-1", sleeping, None, await namespace.driver(), mode="live", clock=TrioClock()
        )
        assert result.state is WorkflowState.COMPLETED
        assert result.output >= 3600
        await namespace.close()

    async def test_a_function_that_returns_nothing_stores_no_output(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S7: `None`."""

        async def nothing(ctx: Context, _: Any) -> None:
            await ctx.step("work", work)

        async with host(namespace, mode) as process:
            assert await process.finish(nothing) is None
        assert layout.OUTPUT_KEY not in await namespace.dump()
        await namespace.close()

    @pytest.mark.parametrize("value", [0, "", [], {}, False, 0.0, b""])
    async def test_empty_outputs_are_kept(
        self, value: Any, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S7: empty values keep their value and type."""

        async def returning(ctx: Context, _: Any) -> Any:
            return value

        async with host(namespace, mode) as process:
            first = await process.finish(returning)
            await process.restart()
            again = await process.finish(returning)
        assert first == again == value
        assert type(first) is type(again) is type(value)

    async def test_an_output_that_cannot_be_stored_fails_the_workflow_and_names_its_type(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S9: `failed`, never stuck; the error names the type."""

        async def returning(ctx: Context, _: Any) -> Any:
            return {"clock": autojump_clock}

        async with host(namespace, mode) as process:
            with pytest.raises(WorkflowFailedError, match="MockClock"):
                await process.stop(returning)
        snapshot = await namespace.snapshot()
        await namespace.close()
        assert snapshot.state is WorkflowState.FAILED
        assert snapshot.error is not None
        assert "MockClock" in snapshot.error.message


class TestNamespace:
    async def test_an_empty_one_is_a_pending_workflow(self, namespace: Namespace) -> None:
        snapshot = await namespace.snapshot()
        assert (snapshot.state, snapshot.input, snapshot.output, snapshot.error, snapshot.entries) == (
            WorkflowState.PENDING,
            None,
            None,
            None,
            (),
        )
        driver = await namespace.driver()
        assert driver.writes == 0
        await namespace.close()

    async def test_one_that_only_got_messages_is_pending_and_its_workflow_finds_them(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with host(namespace, mode) as process:
            await process.send("go", "early")
            assert (await namespace.snapshot()).state is WorkflowState.PENDING
            assert await process.finish(waiting, 1) == [1, "done", "early"]

    async def test_one_of_the_reference_engine_is_adopted_and_goes_on(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S16: what the reference engine stored has none of our own keys; they are added, and nothing else changes."""
        keys: list[str] = []

        async def keyed() -> str:
            keys.append(current_step().idempotency_key)
            return "done"

        async def two_steps(ctx: Context, given: Any) -> Any:
            message = await ctx.queue.next("go")
            await ctx.step("keyed", keyed)
            await ctx.queue.next("again")
            return [given, message.body]

        async with host(namespace, mode) as process:
            await process.stop(two_steps, "reference")
            await process.restart()
            driver = await namespace.driver()
            await driver.batch(Batch(delete_prefixes=[layout.OWN_PREFIX]))
            before = await namespace.dump()
            assert not any(key.startswith(layout.OWN_PREFIX) for key in before)
            await process.send("go", 1)
            await process.stop(two_steps, "other")
            after = await namespace.dump()
            assert after[layout.WORKFLOW_ID_KEY] == b"workflow-1"
            assert after[layout.WORKFLOW_TYPE_KEY] == b"two_steps"
            assert len(after[layout.SEED_KEY]) == 16
            assert layout.decode_u64(after[layout.FORMAT_VERSION_KEY]) == FORMAT_VERSION
            assert before.items() <= after.items()
            await process.restart()
            await process.send("again")
            assert await process.finish(two_steps) == ["reference", 1]
            assert (await namespace.dump())[layout.SEED_KEY] == after[layout.SEED_KEY]
        assert len(keys) == 1
        await namespace.close()

    async def test_one_written_by_a_newer_perdure_is_refused_and_left_alone(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with host(namespace, mode) as process:
            await process.stop(waiting, 1)
            await process.restart()
            driver = await namespace.driver()
            await driver.set(layout.FORMAT_VERSION_KEY, layout.encode_u64(FORMAT_VERSION + 1))
            stored = await namespace.dump()
            with pytest.raises(FormatVersionError, match="Upgrade Perdure") as caught:
                await process.stop(waiting, 1)
            assert (caught.value.found, caught.value.supported) == (FORMAT_VERSION + 1, FORMAT_VERSION)
            with pytest.raises(FormatVersionError):
                await send_message(driver, "go", 1)
            assert await namespace.dump() == stored
            await driver.set(layout.FORMAT_VERSION_KEY, layout.encode_u64(FORMAT_VERSION))
            await process.send("go", 2)
            assert await process.finish(waiting) == [1, "done", 2]

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            (layout.STATE_KEY, b"dozing"),
            (layout.STATE_KEY, b"\xff"),
            (layout.name_key(0), b"\xff"),
            (layout.name_key(7), b"gap"),
            (layout.entry_key((0,)), b""),
            (layout.FORMAT_VERSION_KEY, b"\x01"),
            (layout.WORKFLOW_TYPE_KEY, b"\xff"),
        ],
    )
    async def test_a_damaged_one_raises_a_typed_error_and_is_left_alone(
        self, key: bytes, value: bytes, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async with host(namespace, mode) as process:
            await process.stop(waiting, 1)
            await process.restart()
            driver = await namespace.driver()
            await driver.set(key, value)
            stored = await namespace.dump()
            with pytest.raises(DecodeError):
                await process.stop(waiting, 1)
            with pytest.raises(DecodeError):
                await load_snapshot(driver)
            assert await namespace.dump() == stored

    async def test_what_is_first_written_is_identity_input_and_state(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        named = workflow(name="order-v1")(waiting)
        driver = await namespace.driver()
        async with trio.open_nursery() as nursery:
            await start_workflow(nursery, "w-1", named, "in", driver, mode=mode)
            dump = await namespace.dump()
            nursery.cancel_scope.cancel()
        assert dump[layout.WORKFLOW_ID_KEY] == b"w-1"
        assert dump[layout.WORKFLOW_TYPE_KEY] == b"order-v1"
        assert dump[layout.STATE_KEY] == b"pending"
        assert decode_value(dump[layout.INPUT_KEY]) == "in"
        await namespace.close()


def test_the_same_clock_and_ids_give_the_same_bytes() -> None:
    """The clock and the id generator are injected, so a run can be repeated exactly."""

    async def one(seed: int) -> dict[bytes, bytes]:
        data: dict[bytes, bytes] = {}
        clock = TrioClock()
        async with trio.open_nursery() as nursery:
            ids = Uuid7Generator(clock, random.Random(seed))
            handle = await start_workflow(nursery, "w-1", waiting, 1, MemoryDriver(data), clock=clock, ids=ids)
            await wait_all_tasks_blocked()  # else the scheduler chooses what comes first
            await handle.message("go", 2)
            await handle.result()
        return data

    first, second, other = (trio.run(one, seed, clock=MockClock()) for seed in (5, 5, 6))
    assert first == second
    assert first != other
