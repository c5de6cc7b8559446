"""The asyncio face of a portal: awaitables in any loop, cancellation both ways, and neither side holds the other up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from portals import adder, failing, living_tasks, no_thread_left, sleeper, waiter

from perdure.actors import SupervisorClosedError, WorkflowExistsError, WorkflowNotFoundError
from perdure.actors.portal import AsyncioSupervisor, open_asyncio_portal, open_portal
from perdure.actors.portal.thread import PortalThread
from perdure.storage import MemoryStore, StoreLockedError
from perdure.workflow import (
    Context,
    HistoryUpdated,
    MisuseError,
    WorkflowCancelledError,
    WorkflowFailedError,
    WorkflowHandle,
    WorkflowState,
    WorkflowSuspendedError,
    workflow,
)

WORKFLOWS = [adder, waiter, sleeper, failing]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_left():
        yield


def thread_of(supervisor: AsyncioSupervisor) -> PortalThread:
    return supervisor._thread


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so; it is what another thread is about to do."""
    for _ in range(10_000):
        if await condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to be so")


async def until_waiters(supervisor: AsyncioSupervisor, number: int) -> None:
    """Wait until there are this many tasks in Trio; who looks is one of them."""

    async def are_there() -> bool:
        return await thread_of(supervisor).call_async(living_tasks) == number

    await until(are_there)


class TestCalls:
    """What is asked of a supervisor and of its handles, from asyncio tasks."""

    def test_each_method_is_awaited_and_does_what_the_originals_does(self) -> None:
        """S44."""

        async def main() -> None:
            async with open_asyncio_portal(MemoryStore(), WORKFLOWS) as supervisor:
                handle: WorkflowHandle[int] = await supervisor.spawn(adder, "adder-1", [1, 2])
                assert await handle.result() == 3
                assert (handle.workflow_id, repr(handle)) == ("adder-1", "<workflow 'adder-1'>")
                assert await handle.get_state() is WorkflowState.COMPLETED
                assert await handle.get_output() == 3
                assert await handle.get_error() is None
                assert [entry.path for entry in await handle.history()] == [("add",)]
                assert "adder-1" in supervisor.describe("adder-1")
                assert await supervisor.troubles() == {}
                with pytest.raises(WorkflowExistsError):
                    await supervisor.spawn(adder, "adder-1", [1, 3])
                with pytest.raises(WorkflowNotFoundError):
                    await supervisor.get("nobody")
                failed = await supervisor.spawn("failing", "failing-1")
                with pytest.raises(WorkflowFailedError, match="CriticalError: no"):
                    await failed.result()
                await failed.recover()
                with pytest.raises(WorkflowFailedError):
                    await failed.result()

                slow = await supervisor.spawn(sleeper, "sleeper-1", 1e6)
                await until(lambda: _is(slow, WorkflowState.SLEEPING))
                await slow.evict()
                await slow.wake()
                assert await slow.result() == "interrupted"
                given_up = await supervisor.spawn(waiter, "waiter-1")
                await given_up.cancel()
                with pytest.raises(WorkflowCancelledError):
                    await given_up.result()

        asyncio.run(main())

    def test_a_thousand_tasks_wait_for_one_workflow(self) -> None:
        """S51."""

        async def main() -> None:
            async with open_asyncio_portal(MemoryStore(), WORKFLOWS) as supervisor:
                handle = await supervisor.spawn(waiter, "waiter-1")
                waiting = [asyncio.create_task(handle.result()) for _ in range(1000)]
                await asyncio.sleep(0)
                await handle.message("go", "all")
                assert await asyncio.gather(*waiting) == ["all"] * 1000

        asyncio.run(main())

    def test_the_other_face_is_of_the_same_supervisor(self) -> None:
        with open_portal(MemoryStore(), WORKFLOWS) as supervisor:
            handle = supervisor.spawn(waiter, "waiter-1")

            async def send(number: int) -> None:
                await (await supervisor.asyncio.get("waiter-1")).message("go", number, id="m-1")

            asyncio.run(send(1))  # in a loop
            asyncio.run(send(2))  # and in another
            assert handle.result() == 1

        async def main() -> None:
            async with open_asyncio_portal(MemoryStore(), WORKFLOWS) as supervisor:
                blocking = supervisor.blocking
                spawned = await asyncio.to_thread(blocking.spawn, adder, "adder-1", [1])
                assert await asyncio.to_thread(spawned.result) == 1
                with pytest.raises(MisuseError, match=r"supervisor\.asyncio"):
                    blocking.get("adder-1")

        asyncio.run(main())


async def _is(handle: WorkflowHandle, state: WorkflowState) -> bool:
    return await handle.get_state() is state


class TestCancellation:
    """S51: who stops waiting, on either side, and what becomes of the other."""

    @pytest.mark.parametrize("how", ["timeout", "cancel"])
    def test_a_task_that_is_cancelled_stops_waiting_in_trio_and_the_workflow_goes_on(self, how: str) -> None:
        async def main() -> None:
            async with open_asyncio_portal(MemoryStore(), WORKFLOWS) as supervisor:
                handle = await supervisor.spawn(waiter, "waiter-1")
                await until(lambda: _is(handle, WorkflowState.SLEEPING))
                idle = await thread_of(supervisor).call_async(living_tasks)
                if how == "timeout":
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(handle.result(), 0.01)
                else:
                    waiting = asyncio.create_task(handle.result())
                    await until_waiters(supervisor, idle + 1)
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                assert await thread_of(supervisor).call_async(living_tasks) == idle
                await handle.message("go", "on")
                assert await handle.result() == "on"

        asyncio.run(main())

    def test_a_spawn_that_is_cancelled_is_whole_or_not_there(self) -> None:
        """S45."""

        async def main() -> None:
            store = MemoryStore()
            async with open_asyncio_portal(store, WORKFLOWS) as supervisor:
                for number in range(30):
                    spawning = asyncio.create_task(supervisor.spawn(waiter, f"waiter-{number}"))
                    await asyncio.sleep(number / 20_000)
                    spawning.cancel()
                    await asyncio.wait([spawning])
                for number in range(30):
                    handle = await supervisor.spawn(waiter, f"waiter-{number}")
                    await handle.message("go", number)
                    assert await handle.result() == number

        asyncio.run(main())

    def test_those_who_wait_are_told_that_it_goes_on_later_and_later_calls_are_refused(self) -> None:
        """S49."""

        async def main() -> None:
            async with open_asyncio_portal(MemoryStore(), WORKFLOWS) as supervisor:
                handle = await supervisor.spawn(waiter, "waiter-1")
                idle = await thread_of(supervisor).call_async(living_tasks)
                waiting = [asyncio.create_task(handle.result()) for _ in range(10)]
                await until_waiters(supervisor, idle + 10)
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(error) for error in errors} == {WorkflowSuspendedError}
            for attempt in (supervisor.get("waiter-1"), handle.result(), handle.message("go"), supervisor.troubles()):
                with pytest.raises(SupervisorClosedError, match="open another"):
                    await attempt

        asyncio.run(main())


class TestNobodyIsHeldUp:
    """A loop that stands still holds up its own tasks only, and so does Trio's thread."""

    def test_the_loop_goes_on_while_the_supervisor_is_busy(self) -> None:
        held, released, was_released = threading.Event(), threading.Event(), list[bool]()

        def hold(event: HistoryUpdated) -> None:
            if not held.is_set():
                held.set()
                was_released.append(released.wait(10))

        async def main() -> None:
            async with open_asyncio_portal(MemoryStore(), WORKFLOWS, on_history_updated=hold) as supervisor:
                handle = asyncio.create_task(supervisor.spawn(waiter, "waiter-1"))
                assert await asyncio.to_thread(held.wait, 10)
                asked = asyncio.create_task(supervisor.get("waiter-1"))
                cancelled = asyncio.create_task(supervisor.troubles())
                await asyncio.sleep(0.01)
                cancelled.cancel()
                await asyncio.sleep(0.01)
                assert not asked.done()
                released.set()
                await asyncio.gather(handle, asked)
                with pytest.raises(asyncio.CancelledError):
                    await cancelled

        asyncio.run(main())
        assert was_released == [True]

    def test_workflows_go_on_while_the_loop_is_busy(self) -> None:
        finished = threading.Event()

        @workflow(name="finisher")
        async def finisher(ctx: Context, _: None) -> str:
            await ctx.queue.next("go")
            await ctx.step("finish", finished.set)
            return "finished"

        async def main() -> None:
            async with open_asyncio_portal(MemoryStore(), [finisher]) as supervisor:
                handle = await supervisor.spawn(finisher, "finisher-1")
                waiting = asyncio.create_task(handle.result())
                await handle.message("go")
                assert finished.wait(10), "the loop stands still here"
                assert await waiting == "finished"

        asyncio.run(main())


class TestEnd:
    """S49: leaving the block."""

    def test_the_loop_goes_on_while_a_running_step_finishes_within_grace(self) -> None:
        begun, finish, effects = threading.Event(), threading.Event(), list[str]()

        @workflow(name="worker")
        async def worker(ctx: Context, _: None) -> None:
            def work() -> None:
                begun.set()
                assert finish.wait(10)
                effects.append("done")

            await ctx.step("work", work)

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                async with open_asyncio_portal(MemoryStore(), [worker]) as supervisor:
                    await supervisor.spawn(worker, "worker-1")
                    assert await asyncio.to_thread(begun.wait, 10)
                    group.create_task(asyncio.to_thread(finish.set))
                assert effects == ["done"]

        asyncio.run(main())

    def test_cancelled_while_it_leaves_it_waits_for_no_grace_and_is_in_order_all_the_same(self, tmp_path: Path) -> None:
        begun, seconds, effects = threading.Event(), [60.0], list[str]()

        @workflow(name="worker")
        async def worker(ctx: Context, _: None) -> str:
            async def work() -> str:
                begun.set()
                await trio.sleep(seconds[0])
                effects.append("done")
                return "worked"

            return await ctx.step("work", work, timeout=0)

        async def serve() -> None:
            async with open_asyncio_portal(tmp_path, [worker, waiter], grace=60) as supervisor:
                await supervisor.spawn(worker, "worker-1")
                await asyncio.to_thread(begun.wait, 10)
                await asyncio.sleep(60)

        async def main() -> None:
            serving = asyncio.create_task(serve())
            await asyncio.to_thread(begun.wait, 10)
            serving.cancel()
            done, _ = await asyncio.wait([serving], timeout=0.1)
            assert not done, "the step has its grace"
            serving.cancel()
            async with asyncio.timeout(10):
                with pytest.raises(asyncio.CancelledError):
                    await serving
            assert effects == []
            seconds[0] = 0
            async with open_asyncio_portal(tmp_path, [worker, waiter]) as supervisor:
                assert await (await supervisor.get("worker-1")).result() == "worked"

        asyncio.run(main())

    def test_what_cannot_be_opened_says_why_and_leaves_no_thread(self, tmp_path: Path) -> None:
        """S42."""

        async def main() -> None:
            async with open_asyncio_portal(tmp_path, WORKFLOWS):
                with pytest.raises(StoreLockedError):
                    async with open_asyncio_portal(tmp_path, WORKFLOWS):
                        pytest.fail("it was opened twice")

        asyncio.run(main())

    def test_cancelled_while_it_opens_nothing_is_left(self, tmp_path: Path) -> None:
        async def main() -> None:
            for number in range(20):
                opening = asyncio.create_task(_open_and_leave(tmp_path))
                await asyncio.sleep(number / 2000)
                opening.cancel()
                await asyncio.wait([opening])
            await _open_and_leave(tmp_path)

        asyncio.run(main())

    def test_an_exception_in_the_block_comes_out_as_it_was(self) -> None:
        raised = KeyError("mine")

        async def main() -> None:
            async with open_asyncio_portal(MemoryStore(), WORKFLOWS):
                raise raised

        with pytest.raises(KeyError) as caught:
            asyncio.run(main())
        assert caught.value is raised

    def test_code_of_a_workflow_that_ends_the_program_comes_out_of_the_block(self) -> None:
        @workflow(name="quitter")
        async def quitter(ctx: Context, _: None) -> None:
            raise SystemExit(3)

        async def main() -> None:
            async with open_asyncio_portal(MemoryStore(), [quitter, waiter]) as supervisor:
                handle = await supervisor.spawn(waiter, "waiter-1")
                await supervisor.spawn(quitter, "quitter-1")
                with pytest.raises((WorkflowSuspendedError, SupervisorClosedError)):
                    await handle.result()

        with pytest.raises(SystemExit) as caught:
            asyncio.run(main())
        assert caught.value.code == 3


async def _open_and_leave(directory: Path) -> Any:
    async with open_asyncio_portal(directory, WORKFLOWS) as supervisor:
        return await supervisor.troubles()
