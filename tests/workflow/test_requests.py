"""Requests without a supervisor: asked through the driver or a local handle, answered in either mode, read later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from harness import Crash, Fault, FaultyDriver, Host, MovableClock, Namespace, SimulatedCrashError, crashes, host
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import Batch, Driver, MemoryDriver, StorageError, commit_batch, encode_value, layout
from perdure.workflow import (
    Context,
    NotARequestError,
    Reply,
    RequestUnansweredError,
    RunMode,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowSuspendedError,
    read_reply,
    replay_from_step,
    run_workflow,
    send_message,
    send_request,
    start_workflow,
)
from perdure.workflow.pending import Pending
from perdure.workflow.requests import REPLIES_MAX, Requests


async def double(number: int) -> int:
    return 2 * number


async def doubler(ctx: Context, count: int) -> int:
    for index in range(count):
        message = await ctx.queue.next(f"read-{index}", completable=True)
        await message.complete(await ctx.step(f"double-{index}", double, message.body))
    return count


class TestDriver:
    async def test_the_reply_is_read_once_the_workflow_has_run(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: asked, run and read each in another process; read as often as one likes, also after the end."""
        async with host(namespace, mode) as process:
            first = await send_request(await namespace.driver(), "double", 4, id="r-1", clock=process.clock)
            assert await read_reply(await namespace.driver(), first) is None
            await process.restart()
            await process.stop(doubler, 2)
            assert await read_reply(await namespace.driver(), first) == Reply(8)
            await process.restart()
            assert await read_reply(await namespace.driver(), first, reply_type=int) == Reply(8)
            second = await send_request(await namespace.driver(), "double", 5, clock=process.clock)
            assert await process.finish(doubler, 2) == 2
            before = await namespace.dump()
            assert await read_reply(await namespace.driver(), second) == Reply(10)
            assert await read_reply(await namespace.driver(), "never asked") is None
            assert await namespace.dump() == before

    async def test_the_same_id_is_sent_once_and_is_a_request_or_a_message(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S27: before it was read, after it, and over restarts."""
        async with host(namespace, mode) as process:
            for _ in range(2):
                driver = await namespace.driver()
                assert await send_request(driver, "double", 4, id="r-1", clock=process.clock) == "r-1"
                await send_message(driver, "double", 4, id="r-1", clock=process.clock)
                await process.restart()
            await process.send("double", 1, id="m-1")
            with pytest.raises(NotARequestError):
                await send_request(await namespace.driver(), "double", 1, id="m-1", clock=process.clock)
            await process.stop(doubler, 3)
            await process.restart()
            driver = await namespace.driver()
            await send_request(driver, "double", 4, id="r-1", clock=process.clock)
            with pytest.raises(NotARequestError):
                await read_reply(driver, "m-1")
            result = await process.stop(doubler, 3)
            assert result.waiting_for_messages == ("*",), "the third was never sent"

    @pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
    async def test_the_end_without_a_reply_is_told(
        self, how: str, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28: and a further request is refused."""

        async def rude(ctx: Context, _: Any) -> None:
            await ctx.queue.next("read", completable=True)
            await ctx.sleep("pause", 5)
            if how == "failed":
                raise ValueError("no")

        async with host(namespace, mode) as process:
            await send_request(await namespace.driver(), "ask", id="r-1", clock=process.clock)
            await process.stop(rude)
            if how == "cancelled":
                await process.control("cancel")
            else:
                try:
                    await process.finish(rude)
                except WorkflowFailedError:
                    assert how == "failed"
            await process.restart()
            driver = await namespace.driver()
            with pytest.raises(RequestUnansweredError) as caught:
                await read_reply(driver, "r-1")
            assert (caught.value.request_id, caught.value.state) == ("r-1", how)
            with pytest.raises(RequestUnansweredError):
                await send_request(driver, "ask", id="r-1", clock=process.clock)
            with pytest.raises(WorkflowEndedError):
                await send_request(driver, "ask", id="r-2", clock=process.clock)

    async def test_a_replay_from_an_earlier_step_keeps_the_reply_and_asks_nobody_again(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S14: what was completed stays completed; what was only read is delivered again, and is open still."""

        async def reader(ctx: Context, _: Any) -> list[Any]:
            await ctx.step("start", double, 1)
            first = await ctx.queue.next("first", completable=True)
            if first.name == "answered":
                await first.complete("reply")
            second = await ctx.queue.next("second", timeout=60, completable=True)
            await second.complete(f"to {second.name}")
            return [first.name, second.name]

        async with host(namespace, mode) as process:
            await send_request(await namespace.driver(), "answered", id="r-1", clock=process.clock)
            await send_request(await namespace.driver(), "later", id="r-2", clock=process.clock)
            assert await process.finish(reader) == ["answered", "later"]
            await process.restart()
            driver = await namespace.driver()
            entries = {entry.path: entry.id for entry in (await namespace.snapshot()).entries}
            await replay_from_step(driver, entries[("start",)], clock=process.clock)
            await send_request(driver, "answered", id="r-1", clock=process.clock)
            assert await read_reply(driver, "r-1") == Reply("reply")
            result = await process.stop(reader)
            assert result.waiting_for_messages == ("*",), "neither is delivered again"


class TestHandle:
    async def test_in_live_mode_it_is_waited_for_and_in_yield_mode_asked_again_after_the_run(
        self, namespace: Namespace, mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28."""
        async with host(namespace, mode) as process:
            await process.stop(doubler, 1)
            async with trio.open_nursery() as nursery:
                driver = await namespace.driver()
                clock = MovableClock()
                if mode == "live":
                    assert process.handle is not None
                    assert await process.handle.request("double", 4, timeout=10, id="r-1") == 8
                    assert await process.handle.request("double", 4, timeout=10, id="r-1") == 8
                    assert await process.handle.undelivered() == ()
                else:
                    handle = await start_workflow(nursery, "workflow-1", doubler, 1, driver, mode=mode, clock=clock)
                    await wait_all_tasks_blocked()
                    with pytest.raises(WorkflowSuspendedError, match="ask again with the same id"):
                        await handle.request("double", 4, timeout=10, id="r-1")
                    assert [message.id for message in await handle.undelivered()] == ["r-1"]
                    assert (await run_workflow("workflow-1", doubler, 1, driver, clock=clock)).output == 1
                    assert await read_reply(driver, "r-1") == Reply(8)
                nursery.cancel_scope.cancel()

    @pytest.mark.parametrize("how", ["evicted", "cancelled", "failed"])
    async def test_the_wait_ends_with_the_run(self, how: str, namespace: Namespace, autojump_clock: MockClock) -> None:
        """S28: an eviction says that it may be asked again, an end that nobody will reply."""

        async def rude(ctx: Context, _: None) -> None:
            await ctx.queue.next("read", completable=True)
            await ctx.sleep("pause", 60)
            raise ValueError("no")

        async with trio.open_nursery() as nursery:
            handle = await start_workflow(
                nursery, "w-1", rude, None, await namespace.driver(), mode="live", clock=MovableClock()
            )
            told: list[type[Exception]] = []

            async def ask() -> None:
                with pytest.raises((WorkflowSuspendedError, RequestUnansweredError)) as caught:
                    await handle.request("ask", timeout=None, id="r-1")
                told.append(caught.type)

            for _ in range(3):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            match how:
                case "evicted":
                    await handle.evict()
                case "cancelled":
                    await handle.cancel()
                    with pytest.raises(WorkflowCancelledError):
                        await handle.result()
                case _:
                    await handle.wake()
                    with pytest.raises(WorkflowFailedError):
                        await handle.result()
            await wait_all_tasks_blocked()
        assert told == [WorkflowSuspendedError if how == "evicted" else RequestUnansweredError] * 3
        await namespace.close()

    @pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
    async def test_nobody_is_told_a_reply_that_may_not_be_durable(
        self, fault: Fault, namespace: Namespace, autojump_clock: MockClock
    ) -> None:
        """S28, S21: the storage fails as the reply is written; asked again, it is there or comes with the next run."""

        def is_due(batch: Batch) -> bool:
            return any(key.startswith(layout.REPLY_PREFIX) for key, _ in batch.puts)

        async with trio.open_nursery() as nursery:
            driver: Driver = FaultyDriver(await namespace.driver(), fault, is_due)  # type: ignore[assignment]
            handle = await start_workflow(nursery, "w-1", doubler, 1, driver, mode="live", clock=MovableClock())
            with pytest.raises(WorkflowSuspendedError):
                await handle.request("double", 4, timeout=None, id="r-1")
            with pytest.raises(StorageError):
                await handle.result()
        async with host(namespace, "live") as process:
            await process.restart()
            expected = Reply(8) if fault == "applied" else None
            assert await read_reply(await namespace.driver(), "r-1") == expected
            assert await process.finish(doubler, 1) == 1
            assert await read_reply(await namespace.driver(), "r-1") == Reply(8)


class TestCrashes:
    async def test_the_reply_is_there_if_and_only_if_the_message_is_completed(
        self, make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
    ) -> None:
        """S28, S39: a crash at every write, and again at the first of the recovery; each asked and answered once."""

        async def scenario(namespace: Namespace) -> Any:
            async with host(namespace, mode) as process:
                for number in range(2):
                    await ask(process, number)
                    await consistent(namespace)
                    await process.stop(doubler, 2)
                    await consistent(namespace)
                output = await process.finish(doubler, 2)
                driver = await namespace.driver()
                return [output, *[await read_reply(driver, f"r-{number}") for number in range(2)]]

        async def ask(process: Host, number: int) -> None:
            if process.handle is None:
                driver = await process.namespace.driver()
                await send_request(driver, "double", number + 1, id=f"r-{number}", clock=process.clock)
                return
            try:
                reply = await process.handle.request("double", number + 1, timeout=60, id=f"r-{number}")
            except WorkflowSuspendedError:  # the process died under it
                raise SimulatedCrashError from None
            assert reply == 2 * (number + 1)

        async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
            assert outcome == [2, Reply(2), Reply(4)], crash
            await consistent(namespace)

        explored = await crashes(scenario, make_quick_namespace, check, is_twice=True)
        assert explored.counted >= 8


async def consistent(namespace: Namespace) -> None:
    """Open are those requests that wait or were read and not completed; answered, with a reply, those that were."""
    dump = await namespace.dump()
    known = [layout.parse_request_key(key) for key in dump if key.startswith(layout.REQUEST_PREFIX)]
    answered = {request_id for is_answered, request_id in known if is_answered}
    completed = {
        entry.data["body"]["id"]
        for entry in (await namespace.snapshot()).entries
        if entry.kind == "message" and isinstance(entry.data["body"], dict) and entry.data["body"]["completed"]
    }
    assert answered == completed
    assert {key for key in dump if key.startswith(layout.REPLY_PREFIX)} == {layout.reply_key(one) for one in answered}
    assert not answered & {request_id for is_answered, request_id in known if not is_answered}


class CutNamespace(Namespace):
    """In memory, behind a driver that takes 128 entries at once."""

    async def open_driver(self) -> Driver:
        return MemoryDriver(self._data, atomic_batch=False)


async def test_a_cut_batch_never_holds_a_completion_without_its_reply(
    tmp_path: Path, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S28, S39, for drivers that are not atomic: a crash between the pieces of a batch that answers many at once."""
    count = 60

    async def answers(ctx: Context, _: None) -> int:
        messages = await ctx.queue.next_batch("read", count=count, completable=True)

        async def answer(ctx: Context, index: int) -> None:
            await messages[index].complete(index)

        await ctx.join("all", {f"{index}": lambda ctx, index=index: answer(ctx, index) for index in range(count)})
        return len(messages)

    async def scenario(namespace: Namespace) -> Any:
        async with host(namespace, mode) as process:
            driver = await namespace.driver()
            for number in range(count):
                await send_request(driver, "ask", number, id=f"r-{number:02}", clock=process.clock)
            output = await process.finish(answers)
            replies = [await read_reply(await namespace.driver(), f"r-{number:02}") for number in range(count)]
            return output, replies

    async def check(outcome: Any, namespace: Namespace, crash: Crash | None) -> None:
        assert outcome == (count, [Reply(number) for number in range(count)]), crash

    # The messages are there from the beginning, so that the writes are those of the run.
    filled = CutNamespace("memory", tmp_path)
    for number in range(count):
        await send_request(await filled.driver(), "ask", number, id=f"r-{number:02}", clock=MovableClock())
    data = dict(filled._data)
    await filled.close()

    def make() -> Namespace:
        namespace = CutNamespace("memory", tmp_path)
        namespace._data.update(data)
        return namespace

    explored = await crashes(scenario, make, check)
    assert explored.counted >= 5


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("open"), st.integers(0, 30)),
            st.tuples(st.just("answer"), st.integers(0, 30)),
            st.tuples(st.just("reload"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_what_is_on_record_is_what_a_plain_dict_says(acts: list[tuple[str, int]]) -> None:
    """S28: open, answered and unknown ones told apart, over reloads, in the order of sending and answering."""

    async def main() -> None:
        driver = MemoryDriver()
        pending = Pending()
        requests = await Requests.load(driver, pending)
        model: dict[str, bool] = {}
        for sequence, (act, number) in enumerate(acts):
            request_id = f"r-{number}"
            if act == "open" and request_id not in model:
                requests.open(request_id, sequence, waiting=1)
                model[request_id] = False
            elif act == "answer" and model.get(request_id) is False:
                requests.answer(request_id, encode_value(number))
                model[request_id] = True
            elif act == "reload":
                await commit_batch(driver, pending.take())
                pending = Pending()
                requests = await Requests.load(driver, pending)
            for known, is_answered in model.items():
                assert (requests.is_open(known), requests.is_answered(known)) == (not is_answered, is_answered)
            assert not requests.is_known("another")

    trio.run(main)


async def test_the_oldest_reply_goes_first_also_over_a_reload() -> None:
    """S28: bounded memory; the order is that of answering, not of asking."""
    driver = MemoryDriver()
    pending = Pending()
    requests = await Requests.load(driver, pending)
    for number in range(REPLIES_MAX + 10):
        requests.open(f"r-{number}", number, waiting=REPLIES_MAX)
    for number in reversed(range(REPLIES_MAX)):
        requests.answer(f"r-{number}", encode_value(number))
    await commit_batch(driver, pending.take())
    pending = Pending()
    requests = await Requests.load(driver, pending)
    for number in range(REPLIES_MAX, REPLIES_MAX + 10):
        requests.answer(f"r-{number}", encode_value(number))
    await commit_batch(driver, pending.take())
    forgotten = [number for number in range(REPLIES_MAX + 10) if not requests.is_known(f"r-{number}")]
    assert forgotten == list(range(REPLIES_MAX - 10, REPLIES_MAX))
    assert len(await driver.list(layout.REPLY_PREFIX)) == REPLIES_MAX
    assert len(await driver.list(layout.REQUEST_PREFIX)) == REPLIES_MAX
