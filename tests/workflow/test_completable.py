"""Completable messages: until one is completed it is handed out again by every run, and then never again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from harness import Crash, Fault, FaultyDriver, Namespace, SimulatedCrashError, SlowDriver, crashes, host
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import Batch, Driver, StorageError, decode_value, encode_value, layout
from perdure.storage.schema import MessageEntry, decode_entry
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    FaultError,
    Message,
    MessageCompletedError,
    MisuseError,
    RollbackContext,
    RunMode,
    SuspendSignal,
    TrioClock,
    UserCancellationError,
    WorkflowFailedError,
    WorkflowState,
    run_workflow,
    start_workflow,
)
from perdure.workflow.reads import with_completed

VECTORS = Path(__file__).parents[1] / "vectors"


async def nothing_but(value: Any) -> Any:
    return value


async def completed(namespace: Namespace) -> dict[str, bool]:
    """Which of the messages in history were completed, by the last part of their path."""
    return {
        str(entry.path[-1]): entry.data["body"]["completed"]
        for entry in (await namespace.snapshot()).entries
        if entry.kind == "message" and isinstance(entry.data["body"], dict)
    }


async def waiting(namespace: Namespace) -> int:
    return len(await (await namespace.driver()).list(layout.MAILBOX_PREFIX))


class TestDelivery:
    async def test_what_is_not_completed_is_handed_out_by_every_run_until_it_is(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: not complete, so delivered again after a restart and never lost; complete, and the call does nothing."""
        seen: list[Any] = []
        is_ready = False

        async def order(ctx: Context, _: Any) -> Any:
            message = await ctx.queue.next("read", completable=True)
            seen.append(message.body)
            if not is_ready:
                await ctx.queue.next("gate", names=["gate"])
            await message.complete()
            return (await ctx.queue.next("gate", names=["gate"])).body

        async with host(namespace, mode) as process:
            await process.send("go", "hello")
            for runs in range(1, 4):
                stopped = await process.stop(order)
                assert stopped.state is WorkflowState.SLEEPING
                assert seen == ["hello"] * runs
                assert await waiting(namespace) == 0, "it is in history, and in one place only"
                assert await completed(namespace) == {"read:0": False}
                await process.restart()
            is_ready = True
            await process.stop(order)
            assert await completed(namespace) == {"read:0": True}
            await process.restart()
            before = await namespace.dump()
            await process.stop(order)
            assert await namespace.dump() == before, "completed by an earlier run: nothing to write"
            await process.send("gate", "end")
            assert await process.finish(order) == "end"
        await namespace.close()

    async def test_completing_is_durable_on_return_and_changes_that_record_only(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: one change, durable on return."""
        on_return: list[dict[str, bool]] = []

        async def order(ctx: Context, _: Any) -> Any:
            messages = await ctx.queue.next_batch("read", count=3, completable=True)
            before = await namespace.dump()
            await messages[1].complete()
            on_return.append(await completed(namespace))
            after = await namespace.dump()
            (changed,) = [key for key in after if after[key] != before.get(key)]
            assert before.keys() == after.keys()
            assert changed.startswith(layout.HISTORY_PREFIX)
            old, new = (decode_entry(dump[changed]).kind for dump in (before, after))
            assert isinstance(old, MessageEntry)
            assert isinstance(new, MessageEntry)
            assert new.body[:-1] == old.body[:-1], "all but the flag is the same, byte for byte"
            return [message.body for message in messages]

        async with host(namespace, mode) as process:
            for body in ({"a": [1, 2]}, {"completed": False}, None):
                await process.send("go", body)
            assert await process.finish(order) == [{"a": [1, 2]}, {"completed": False}, None]
            assert on_return == [{"read:0": False, "read:1": True, "read:2": False}]
        await namespace.close()

    async def test_a_message_that_a_step_completes_is_completed_by_whichever_attempt_gets_there(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: from inside a step; the attempt after one that completed it and failed passes the call over."""
        attempts: list[bool] = []

        async def order(ctx: Context, _: Any) -> Any:
            message = await ctx.queue.next("read", completable=True)

            async def handle() -> str:
                await message.complete()
                attempts.append((await completed(namespace))["read:0"])
                if len(attempts) < 3:
                    raise ConnectionError
                return f"handled {message.body}"

            return await ctx.step("handle", handle)

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            assert await process.finish(order) == "handled 1"
        assert attempts == [True, True, True]

    async def test_a_plain_function_completes_it_from_its_thread(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: from a step's worker thread."""

        async def order(ctx: Context, _: Any) -> Any:
            message = await ctx.queue.next("read", completable=True)

            def handle() -> None:
                trio.from_thread.run(message.complete)

            await ctx.step("handle", handle, timeout=0)
            return await completed(namespace)

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            assert await process.ended(order) == {"read:0": True}

    async def test_in_a_loop_each_message_is_completed_by_itself(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: a worker's loop: take, handle, complete, again."""
        handled: list[Any] = []

        async def handle(body: Any) -> None:
            handled.append(body)

        async def body(ctx: Context, count: int) -> Continue[int] | Break[int]:
            message = await ctx.queue.next("job", completable=True)
            await ctx.step("handle", handle, message.body)
            await message.complete()
            return Break(count) if count == 4 else Continue(count + 1)

        async def worker(ctx: Context, _: Any) -> int:
            return await ctx.loop("jobs", body, 0, history_prune_interval=2)

        async with host(namespace, mode) as process:
            for number in range(5):
                await process.send("job", number)
                await process.stop(worker)
                await process.restart()
            assert await process.finish(worker) == 4
            assert handled == list(range(5))
            assert set((await completed(namespace)).values()) == {True}


class TestMisuse:
    @pytest.mark.parametrize("place", ["workflow", "step"])
    async def test_completing_twice_is_a_fault_that_writes_nothing(
        self, place: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: completing twice is an error; with right code the workflow goes on, the message completed once."""
        is_mended = False
        attempts = 0

        async def order(ctx: Context, _: Any) -> Any:
            nonlocal attempts
            message = await ctx.queue.next("read", completable=True)

            async def handle() -> str:
                nonlocal attempts
                attempts += 1
                await message.complete()
                if not is_mended:
                    await message.complete()
                return "handled"

            return await (handle() if place == "workflow" else ctx.step("handle", handle))

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            with pytest.raises(MessageCompletedError) as caught:
                await process.stop(order)
            assert caught.value.location == "'read:0'"
            assert isinstance(caught.value, FaultError)
            assert attempts == 1, "a fault is not retried"
            await process.restart()
            snapshot = await namespace.snapshot()
            assert snapshot.state is WorkflowState.RUNNING
            assert {entry.kind for entry in snapshot.entries} == {"message"}
            assert await completed(namespace) == {"read:0": True}
            is_mended = True
            assert await process.finish(order) == "handled"

    async def test_twice_is_twice_also_when_the_first_time_was_an_earlier_runs(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: the replay of a completed one passes one call over, not two: the same code gives the same error."""
        times = 1

        async def order(ctx: Context, _: Any) -> None:
            message = await ctx.queue.next("read", completable=True)
            for _time in range(times):
                await message.complete()
            await ctx.queue.next("gate", names=["gate"])

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            await process.stop(order)
            await process.restart()
            times = 2
            with pytest.raises(MessageCompletedError):
                await process.stop(order)

    async def test_two_tasks_of_a_step_that_complete_it_at_once_are_twice(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: the second call is an error while the first is on its way to the disk, too."""

        async def order(ctx: Context, _: Any) -> None:
            message = await ctx.queue.next("read", completable=True)

            async def handle() -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(message.complete)
                    nursery.start_soon(message.complete)

            await ctx.step("handle", handle)

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            with pytest.raises(MessageCompletedError):
                await process.stop(order)

    @pytest.mark.parametrize("place", ["workflow", "step"])
    async def test_a_message_that_was_not_read_to_be_completed_says_how(
        self, place: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: the error shows the call; nothing is recorded, and a history of plain reads is completed by right code."""
        is_completable = False

        async def order(ctx: Context, _: Any) -> Any:
            [message] = await ctx.queue.next_batch("read", completable=is_completable)
            await (message.complete() if place == "workflow" else ctx.step("complete", message.complete))
            return message.body

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            with pytest.raises(MisuseError, match=r"ctx\.queue\.next_batch\('read', \.\.\., completable=True\)"):
                await process.stop(order)
            await process.restart()
            assert await completed(namespace) == {"read:0": False}
            is_completable = True
            assert await process.finish(order) == 1
            assert await completed(namespace) == {"read:0": True}

    async def test_completable_must_be_a_flag(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        async def order(ctx: Context, _: Any) -> None:
            await ctx.queue.next("read", completable="yes")  # type: ignore[arg-type]

        async with host(namespace, mode) as process:
            with pytest.raises(MisuseError, match="completable"):
                await process.stop(order)

    async def test_a_message_of_a_forgotten_iteration_cannot_be_completed(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: what history no longer holds is not written back into it."""
        kept: list[Message] = []

        async def body(ctx: Context, count: int) -> Continue[int] | Break[int]:
            kept.append(await ctx.queue.next("job", completable=True))
            return Break(count) if count == 1 else Continue(count + 1)

        async def order(ctx: Context, _: Any) -> None:
            await ctx.loop("jobs", body, 0, history_prune_interval=1, history_size=0)
            await kept[0].complete()

        async with host(namespace, mode) as process:
            await process.send("job", 1)
            await process.send("job", 2)
            with pytest.raises(MisuseError, match=r"#0 > 'job:0' can no longer be completed"):
                await process.stop(order)
            await process.restart()
            assert (await completed(namespace)).get("job:0") is None

    async def test_after_the_run_it_is_an_error_and_writes_nothing(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        kept: list[Message] = []

        async def order(ctx: Context, _: Any) -> None:
            kept.append(await ctx.queue.next("read", completable=True))

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            await process.finish(order)
            before = await namespace.dump()
            with pytest.raises(MisuseError, match="after the run that read it had ended"):
                await kept[0].complete()
            assert await namespace.dump() == before

    async def test_a_message_is_its_public_fields_and_a_copy_is_not_the_one_that_was_read(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        kept: list[Message] = []

        async def order(ctx: Context, _: Any) -> None:
            kept.append(await ctx.queue.next("read", completable=True))
            await ctx.queue.next("gate", names=["gate"])

        async with host(namespace, mode) as process:
            await process.send("go", 1, id="m-1")
            await process.stop(order)
            [message] = kept
            assert message == Message("m-1", "go", 1, message.created_at)
            assert repr(message) == repr(Message("m-1", "go", 1, message.created_at))
            with pytest.raises(FrozenInstanceError):
                message.body = 2  # type: ignore[misc]
            for other in (copy.copy(message), copy.deepcopy(message), replace(message), Message("m-1", "go", 1, 0.0)):
                with pytest.raises(MisuseError, match="complete the one that was read"):
                    await other.complete()


class TestCancellation:
    async def test_a_sealed_context_completes_nothing(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S31: a `finally` block that completes during an eviction records nothing."""
        raised: list[BaseException] = []

        async def order(ctx: Context, _: Any) -> Any:
            message = await ctx.queue.next("read", completable=True)
            try:
                await ctx.step("work", trio.sleep_forever, timeout=0)
            finally:
                with trio.CancelScope(shield=True):
                    try:
                        await message.complete()
                    except BaseException as error:
                        raised.append(error)
                        raise

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            await process.stop(order) if mode == "live" else None
            await process.run_and_leave(order, 1)
            assert await completed(namespace) == {"read:0": False}
        if mode == "live":
            assert [type(error) for error in raised] == [SuspendSignal]

    async def test_a_step_that_finishes_while_it_is_evicted_may_complete(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S20: what a step finished counts, and so does what it completed."""
        runs: list[int] = []

        async def order(ctx: Context, _: Any) -> Any:
            message = await ctx.queue.next("read", completable=True)

            async def handle() -> str:
                runs.append(len(runs))
                with trio.CancelScope(shield=True):
                    await trio.sleep(2)
                    await message.complete()
                return "handled"

            return await ctx.step("handle", handle)

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            await process.run_and_leave(order, 1)
            assert await completed(namespace) == {"read:0": True}
            assert await process.finish(order) == "handled"
        assert runs == [0]

    @pytest.mark.parametrize("by", ["user", "outside"])
    @pytest.mark.parametrize("after_s", [0.0, 0.5, 2.0])
    async def test_a_cancellation_finds_it_completed_or_not_begun(
        self, by: str, after_s: float, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S33: cancelled before, during and after its commit: never half."""
        completing: list[str] = []
        begun = trio.Event()

        async def order(ctx: Context, _: Any) -> None:
            message = await ctx.queue.next("read", completable=True)
            with trio.CancelScope() as scope:
                if by == "user":
                    scope.deadline = trio.current_time() + after_s
                    if after_s == 0.0:
                        scope.cancel()
                completing.append("begun")
                begun.set()
                await message.complete()
                completing.append("returned")
            await ctx.queue.next("gate", names=["gate"])

        driver: Driver = SlowDriver(await namespace.driver(), 1.0)  # type: ignore[assignment]
        async with host(namespace, mode) as process:
            await process.send("go", 1)
            async with trio.open_nursery() as nursery:
                handle = await start_workflow(nursery, "workflow-1", order, None, driver, mode=mode, clock=TrioClock())
                if by == "outside":
                    await begun.wait()
                    await trio.sleep(after_s)
                    await handle.evict()
                else:
                    await trio.sleep(10)
                    await wait_all_tasks_blocked()
                    if after_s == 0.0:
                        with pytest.raises(UserCancellationError):
                            await handle.result()
                nursery.cancel_scope.cancel()
            state = await completed(namespace)
        if by == "user" and after_s == 0.0:
            assert (completing, state) == (["begun"], {"read:0": False})
        else:
            assert (completing, state) == (["begun", "returned"], {"read:0": True})

    @pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
    async def test_a_storage_error_at_its_commit_leaves_it_to_the_next_run(
        self, fault: Fault, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S21: nothing that the workflow's code could catch; the next run completes it, or finds it completed."""
        caught: list[Exception] = []

        async def order(ctx: Context, _: Any) -> Any:
            message = await ctx.queue.next("read", completable=True)
            try:
                await message.complete()
            except Exception as error:
                caught.append(error)
            return message.body

        def is_due(batch: Batch) -> bool:
            return any(value.endswith(b"completed\xf5") for _, value in batch.puts)

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            driver: Driver = FaultyDriver(await namespace.driver(), fault, is_due)  # type: ignore[assignment]
            with pytest.raises(StorageError):
                await run_workflow("workflow-1", order, None, driver, mode=mode, clock=process.clock)
            await process.restart()
            assert await completed(namespace) == {"read:0": fault == "applied"}
            assert await process.finish(order) == 1
            assert await completed(namespace) == {"read:0": True}
        assert caught == []


class TestCrashes:
    async def test_each_message_is_handled_and_completed_once_whenever_the_process_dies(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S27, S39: a crash at every write between sending a message and completing it."""
        effects: dict[Namespace, list[str]] = {}

        async def scenario(namespace: Namespace) -> Any:
            world = effects.setdefault(namespace, [])

            async def handle(body: str) -> str:
                world.append(body)
                return f"handled {body}"

            async def order(ctx: Context, _: Any) -> Any:
                results: list[str] = []
                for number in range(2):
                    message = await ctx.queue.next(f"read-{number}", timeout=60, completable=True)

                    async def in_step(message: Message = message) -> str:
                        result = await handle(message.body)
                        await message.complete()
                        return result

                    if number == 0:
                        results.append(await ctx.step(f"handle-{number}", handle, message.body))
                        await message.complete()
                    else:
                        results.append(await ctx.step(f"handle-{number}", in_step))
                rest = await ctx.queue.next_batch("rest", timeout=1)
                return [results, len(rest)]

            async with host(namespace, mode) as process:
                await process.stop(order)
                for number in range(2):
                    await process.send("go", f"m-{number}", id=f"m-{number}")
                    await process.stop(order)
                return await process.finish(order)

        async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
            assert outcome == [["handled m-0", "handled m-1"], 0], crash
            assert await completed(namespace) == {"read-0:0": True, "read-1:0": True}, crash
            assert await waiting(namespace) == 0, crash
            counts = [effects[namespace].count(body) for body in ("m-0", "m-1")]
            assert all(1 <= count <= (1 if crash is None else 2) for count in counts), crash

        explored = await crashes(scenario, make_quick_namespace, check)
        assert explored.counted >= 8


class TestRollback:
    @pytest.mark.parametrize("fails", ["before", "after"])
    async def test_a_rollback_completes_nothing_and_keeps_what_was_completed(
        self, fails: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S35: the function is run once more for its handlers only, and writes nothing then."""
        undone: list[Any] = []

        async def undo(ctx: RollbackContext, output: Any) -> None:
            undone.append(output)

        async def fail() -> None:
            raise CriticalError("no")

        async def order(ctx: Context, _: Any) -> None:
            await ctx.rollback_checkpoint("checkpoint")
            message = await ctx.queue.next("read", completable=True)
            await ctx.step("one", nothing_but, 1, rollback=undo)
            if fails == "before":
                await ctx.step("fails", fail)
            await message.complete()
            await ctx.step("two", nothing_but, 2, rollback=undo)
            await ctx.step("fails", fail)

        async with host(namespace, mode) as process:
            await process.send("go", 1)
            with pytest.raises(WorkflowFailedError):
                await process.stop(order)
            assert await completed(namespace) == {"read:0": fails == "after"}
        assert undone == ([1] if fails == "before" else [2, 1])
        await namespace.close()

    async def test_code_that_completes_what_older_code_did_not_is_rolled_back_as_well(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S35: a call that stands before recorded entries hides no handler after it."""
        undone: list[Any] = []
        is_new = False

        async def undo(ctx: RollbackContext, output: Any) -> None:
            if not is_new:
                namespace.kill()
            undone.append(output)

        async def fail() -> None:
            raise CriticalError("no")

        async def order(ctx: Context, _: Any) -> None:
            await ctx.rollback_checkpoint("checkpoint")
            message = await ctx.queue.next("read", completable=True)
            if is_new:
                await message.complete()
            await ctx.step("one", nothing_but, 1, rollback=undo)
            await ctx.step("fails", fail)

        async def die() -> None:
            async with host(namespace, mode) as process:
                await process.send("go", 1)
                await process.stop(order)

        with pytest.raises(SimulatedCrashError):
            await die()
        is_new = True
        async with host(namespace, mode) as process:
            with pytest.raises(WorkflowFailedError):
                await process.stop(order)
            assert await completed(namespace) == {"read:0": False}
        assert undone == [1]
        await namespace.close()


class TestReference:
    async def test_a_message_that_the_reference_engine_recorded_is_completed_like_ours(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S16, S28: the field is the reference's own, and only it changes."""
        stops = json.loads((VECTORS / "order.json").read_text(encoding="utf-8"))
        dump = {bytes.fromhex(key): bytes.fromhex(value) for key, value in stops[-1]["kv"]}
        found = [
            entry
            for key, value in dump.items()
            if key.startswith(layout.HISTORY_PREFIX)
            and isinstance((entry := decode_entry(value)).kind, MessageEntry)
            and not entry.kind.name.endswith(":count")
        ]
        assert len(found) == 1
        for entry in found:
            assert isinstance(entry.kind, MessageEntry)
            before = decode_value(entry.kind.body)
            after = with_completed(entry.kind, "here")
            assert before["completed"] is False
            assert decode_value(after.body) == {**before, "completed": True}
            assert after.body[:-1] == entry.kind.body[:-1]

    def test_a_record_with_its_fields_in_another_order_is_completed_too(self) -> None:
        """S16: whoever wrote it, the field is found by its name."""
        fields = {"completed": False, "id": "m-1", "name": "go", "createdAt": 1.0, "body": {"completed": False}}
        after = with_completed(MessageEntry("go", encode_value(fields)), "here")
        assert decode_value(after.body) == {**fields, "completed": True}
        assert decode_value(after.body)["body"] == {"completed": False}
