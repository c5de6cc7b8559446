"""`to_asyncio`: code of asyncio in a step is like code of Trio there: cancelled, waited for, and its outcome as it is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import pytest
import trio
from portals import no_thread_left

from perdure.storage import MemoryDriver
from perdure.workflow import (
    Context,
    InvalidArgumentError,
    MisuseError,
    StepTimeoutError,
    WorkflowResult,
    current_step,
    run_workflow,
    to_asyncio,
)
from perdure.workflow.asyncio_thread import AsyncioThread


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_left():
        yield


async def run(function: Any, **options: Any) -> WorkflowResult:
    """One step with this function, in a workflow."""

    async def stepping(ctx: Context, _: None) -> Any:
        return await ctx.step("step", function, **options)

    return await run_workflow("w-1", stepping, None, MemoryDriver(), mode="live")


async def where() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    await asyncio.sleep(0)
    return asyncio.get_running_loop(), threading.current_thread()


class TestOutcomes:
    async def test_what_it_returns_comes_back_from_an_asyncio_loop_in_another_thread(self) -> None:
        async def add(one: int, other: int) -> int:
            await asyncio.sleep(0.001)
            assert threading.current_thread() is not threading.main_thread()
            return one + other

        async def step() -> int:
            return await to_asyncio(add, 1, 2)

        assert (await run(step)).output == 3

    async def test_it_may_be_the_steps_function_itself(self) -> None:
        async def stepping(ctx: Context, _: None) -> list[int]:
            return await ctx.step("step", to_asyncio, identity, [1])

        async def identity(value: list[int]) -> list[int]:
            return value

        assert (await run_workflow("w-1", stepping, None, MemoryDriver())).output == [1]

    async def test_outside_of_a_supervisor_nothing_is_left_of_the_loop(self) -> None:
        loop, thread = await to_asyncio(where)
        assert (loop.is_closed(), thread.is_alive()) == (True, False)
        assert (await to_asyncio(where))[0] is not loop

    async def test_an_exception_comes_out_as_it_is_and_the_step_is_retried(self) -> None:
        raised = OSError("not now")
        attempts: list[int] = []
        caught: list[OSError] = []

        async def fail() -> str:
            attempts.append(current_step().attempt)
            if len(attempts) == 1:
                raise raised
            return "done"

        async def step() -> str:
            try:
                return await to_asyncio(fail)
            except OSError as error:
                caught.append(error)
                raise

        assert (await run(step, retry_backoff_base=0)).output == "done"
        assert attempts == [1, 2]
        assert caught == [raised]

    @pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
    async def test_what_ends_the_program_comes_out_and_the_loop_is_left_in_order(
        self, ends: type[BaseException]
    ) -> None:
        async def leave() -> NoReturn:
            raise ends("mine")

        with pytest.raises(ends, match="mine"):
            await to_asyncio(leave)

    async def test_a_cancellation_from_inside_is_an_error_and_not_the_programs_end(self) -> None:
        """A `CancelledError` of asyncio is no `Exception`: raised in Trio, it would end the supervisor."""

        async def cancelled() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        with pytest.raises(concurrent.futures.CancelledError, match="inside"):
            await to_asyncio(cancelled)

    async def test_current_step_and_other_context_variables_are_those_of_the_caller(self) -> None:
        request: ContextVar[str] = ContextVar("request")
        seen: list[Any] = []

        async def look() -> None:
            await asyncio.sleep(0)
            seen.append((request.get(), current_step().name, current_step().idempotency_key))
            request.set("changed")

        async def step() -> None:
            request.set("mine")
            await to_asyncio(look)
            seen.append((request.get(), current_step().name, current_step().idempotency_key))

        await run(step)
        assert seen[0] == seen[1]
        assert seen[0][:2] == ("mine", "step")


class TestCancellation:
    async def test_a_timeout_cancels_it_and_waits_until_it_has_unwound(self) -> None:
        """S19: no two attempts at once."""
        steps: list[str] = []

        async def hang() -> None:
            steps.append("begun")
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.01)
                steps.append("unwound")

        async def step() -> None:
            await to_asyncio(hang)

        async def stepping(ctx: Context, _: None) -> str:
            try:
                await ctx.step("hang", step, timeout=0.02, retry_on_timeout=True, max_retries=1, retry_backoff_base=0)
            except StepTimeoutError:
                return "timed out"
            return "never"

        assert (await run_workflow("w-1", stepping, None, MemoryDriver(), mode="live")).output == "timed out"
        assert steps == ["begun", "unwound"] * 2

    async def test_what_finishes_all_the_same_is_the_outcome(self) -> None:
        """S20."""
        begun = trio.Event()
        token = trio.lowlevel.current_trio_token()

        async def stubborn() -> str:
            token.run_sync_soon(begun.set)
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)
            return "finished"

        results: list[str] = []

        async def call() -> None:
            results.append(await to_asyncio(stubborn))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await begun.wait()
            nursery.cancel_scope.cancel()
        assert results == ["finished"]

    async def test_nothing_is_begun_for_who_is_cancelled_already(self) -> None:
        begun: list[str] = []

        async def begin() -> None:
            begun.append("begun")

        with trio.CancelScope() as scope:
            scope.cancel()
            await to_asyncio(begin)
        assert (scope.cancelled_caught, begun) == (True, [])

    async def test_a_cancellation_at_any_moment_leaves_nothing(self) -> None:
        running = 0

        async def work() -> None:
            nonlocal running
            running += 1
            try:
                await asyncio.sleep(0.001)
            finally:
                running -= 1

        thread = AsyncioThread()
        for number in range(50):
            with trio.move_on_after(number / 20_000):
                await thread.run(work, ())
            assert running == 0
        await thread.aclose()


class TestClosing:
    async def test_what_is_left_in_the_loop_is_cancelled_and_waited_for(self) -> None:
        ends: list[str] = []
        kept: list[Any] = []

        async def background() -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.001)
                ends.append("task")

        async def numbers() -> Any:
            try:
                yield 1
            finally:
                ends.append("generator")

        async def start() -> None:
            kept.append(asyncio.create_task(background()))
            kept.append(numbers())
            assert await anext(kept[1]) == 1
            await asyncio.to_thread(ends.append, "worker")

        thread = AsyncioThread()
        await thread.run(start, ())
        await thread.aclose()
        assert ends == ["worker", "task", "generator"]
        with pytest.raises(MisuseError, match="has ended"):
            await thread.run(start, ())

    async def test_it_is_not_interrupted_by_cancellation(self) -> None:
        thread = AsyncioThread()
        loop, _ = await thread.run(where, ())
        with trio.CancelScope() as scope:
            scope.cancel()
            await thread.aclose()
        assert loop.is_closed()

    async def test_a_task_that_ends_the_program_does_not_end_the_loop_of_others(self) -> None:
        async def leave() -> NoReturn:
            raise SystemExit(1)

        async def start() -> asyncio.Task[None]:
            return asyncio.create_task(leave())

        async def ended(task: asyncio.Task[None]) -> bool:
            await asyncio.wait([task])
            return isinstance(task.exception(), SystemExit)

        thread = AsyncioThread()
        task = await thread.run(start, ())
        assert await thread.run(ended, (task,))
        await thread.aclose()


class TestWrongUse:
    async def test_a_coroutine_is_no_function(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"await to_asyncio\(fn, argument\)"):
            await to_asyncio(where())  # type: ignore[arg-type]

    async def test_a_plain_function_is_for_the_step_itself(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"ctx\.step itself"):
            await to_asyncio(len, "text")  # type: ignore[arg-type]

    async def test_where_asyncio_runs_it_is_not_needed(self) -> None:
        async def nested() -> None:
            with pytest.raises(MisuseError, match=r"await fn"):
                await to_asyncio(where)

        await to_asyncio(nested)
