"""The blocking face of a portal: the supervisor's promises hold for plain threads, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trio
from portals import adder, failing, living_tasks, no_thread_left, sleeper, wait_until, waiter

from perdure.actors import SupervisorClosedError, WorkflowExistsError, WorkflowNotFoundError, open_supervisor
from perdure.actors.portal import BlockingHandle, BlockingSupervisor, open_portal
from perdure.actors.portal.thread import PortalThread
from perdure.storage import MemoryStore, StoreLockedError
from perdure.workflow import (
    Context,
    HistoryUpdated,
    InvalidArgumentError,
    MisuseError,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowState,
    WorkflowSuspendedError,
    workflow,
)

WORKFLOWS = [adder, waiter, sleeper, failing]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with no_thread_left():
        yield


@pytest.fixture
def supervisor() -> Iterator[BlockingSupervisor]:
    with open_portal(MemoryStore(), WORKFLOWS) as supervisor:
        yield supervisor


def thread_of(supervisor: BlockingSupervisor) -> PortalThread:
    return supervisor._thread


class TestCalls:
    """What is asked of a supervisor and of its handles, from plain code."""

    def test_a_workflow_is_spawned_and_its_result_awaited(self, supervisor: BlockingSupervisor) -> None:
        handle = supervisor.spawn(adder, "adder-1", [1, 2])
        assert handle.result() == 3
        assert handle.result(timeout=5) == 3
        assert (handle.workflow_id, repr(handle)) == ("adder-1", "<workflow 'adder-1'>")
        assert handle.get_state() is WorkflowState.COMPLETED
        assert handle.get_output() == 3
        assert handle.get_error() is None
        assert [entry.path for entry in handle.history()] == [("add",)]
        assert "adder-1" in supervisor.describe("adder-1")
        assert supervisor.troubles() == {}

    def test_a_spawn_is_idempotent_and_errors_come_as_they_are(self, supervisor: BlockingSupervisor) -> None:
        """S44."""
        supervisor.spawn(adder, "adder-1", [1, 2])
        assert supervisor.spawn(adder, "adder-1", [1, 2]).result() == 3
        with pytest.raises(WorkflowExistsError):
            supervisor.spawn(adder, "adder-1", [1, 3])
        with pytest.raises(WorkflowNotFoundError):
            supervisor.get("nobody")
        with pytest.raises(WorkflowEndedError):
            supervisor.get("adder-1").message("go")
        with pytest.raises(WorkflowFailedError, match="CriticalError: no"):
            supervisor.spawn("failing", "failing-1").result()
        error = supervisor.get("failing-1").get_error()
        assert error is not None
        assert error.name == "CriticalError"

    def test_a_message_a_wake_and_a_cancellation_arrive(self, supervisor: BlockingSupervisor) -> None:
        handle = supervisor.spawn(waiter, "waiter-1")
        handle.message("go", {"n": 1}, id="m-1")
        assert handle.result() == {"n": 1}
        slow = supervisor.spawn(sleeper, "sleeper-1", 1e6)
        wait_until(lambda: slow.get_state() is WorkflowState.SLEEPING)
        slow.evict()
        slow.wake()
        assert slow.result() == "interrupted"
        given_up = supervisor.spawn(waiter, "waiter-2")
        given_up.cancel()
        with pytest.raises(WorkflowCancelledError):
            given_up.result()

    def test_a_failed_workflow_is_recovered(self) -> None:
        fails = True

        @workflow(name="moody")
        async def moody(ctx: Context, _: None) -> str:
            async def act() -> str:
                if fails:
                    raise OSError("down")
                return "up"

            return await ctx.step("act", act, max_retries=0)

        with open_portal(MemoryStore(), [moody]) as supervisor:
            handle = supervisor.spawn(moody, "moody-1")
            with pytest.raises(WorkflowFailedError):
                handle.result()
            fails = False
            handle.recover()
            assert handle.result() == "up"

    def test_many_threads_ask_at_once(self, supervisor: BlockingSupervisor) -> None:
        """S44, S51: fifty threads spawn one workflow, and all of them get its result."""

        def ask(number: int) -> Any:
            handle = supervisor.spawn(waiter, "waiter-1")
            if number == 0:
                handle.message("go", "all")
            return handle.result(timeout=20)

        with ThreadPoolExecutor(50) as pool:
            assert list(pool.map(ask, range(50))) == ["all"] * 50

    def test_a_plain_function_of_a_step_may_call_its_own_supervisor(self) -> None:
        opened: list[BlockingSupervisor] = []

        @workflow(name="parent")
        async def parent(ctx: Context, _: None) -> int:
            def delegate() -> int:
                return opened[0].spawn(adder, "child", [3, 4]).result(timeout=10)

            return await ctx.step("delegate", delegate)

        with open_portal(MemoryStore(), [parent, adder]) as supervisor:
            opened.append(supervisor)
            assert supervisor.spawn(parent, "parent-1").result(timeout=20) == 7

    def test_a_wait_that_takes_too_long_is_given_up_and_the_workflow_goes_on(
        self, supervisor: BlockingSupervisor
    ) -> None:
        """S51."""
        handle = supervisor.spawn(waiter, "waiter-1")
        thread = thread_of(supervisor)
        wait_until(lambda: handle.get_state() is WorkflowState.SLEEPING)
        before = thread.call(living_tasks)
        with pytest.raises(TimeoutError, match=r"within 0\.01 seconds"):
            handle.result(timeout=0.01)
        assert thread.call(living_tasks) == before, "nobody waits in Trio either"
        handle.message("go", "on", timeout=10)
        assert handle.result() == "on"

    @pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "1", True])
    def test_a_timeout_that_is_none_is_refused(self, supervisor: BlockingSupervisor, timeout: Any) -> None:
        handle = supervisor.spawn(adder, "adder-1", [1])
        with pytest.raises(InvalidArgumentError, match=r"timeout=10\.0"):
            handle.result(timeout=timeout)

    def test_ctrl_c_ends_the_wait_and_not_the_workflow(self, supervisor: BlockingSupervisor) -> None:
        """S49, S51."""
        handle = supervisor.spawn(waiter, "waiter-1")
        thread = thread_of(supervisor)
        wait_until(lambda: handle.get_state() is WorkflowState.SLEEPING)
        before = thread.call(living_tasks)

        def press_when_somebody_waits() -> None:
            wait_until(lambda: thread.call(living_tasks) > before)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        presser = threading.Thread(target=press_when_somebody_waits)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            handle.result()
        presser.join()
        wait_until(lambda: thread.call(living_tasks) == before)
        handle.message("go", "on")
        assert handle.result() == "on"

    def test_where_an_event_loop_runs_blocking_is_refused(self, supervisor: BlockingSupervisor) -> None:
        async def in_asyncio() -> None:
            with pytest.raises(MisuseError, match="open_asyncio_portal"):
                supervisor.get("waiter-1")
            with pytest.raises(MisuseError, match="open_asyncio_portal"), open_portal(MemoryStore()):
                pass

        async def in_trio() -> None:
            with pytest.raises(MisuseError, match="open_supervisor"):
                supervisor.get("waiter-1")

        asyncio.run(in_asyncio())
        trio.run(in_trio)

    def test_in_its_own_thread_blocking_is_refused(self) -> None:
        refused: list[BaseException] = []

        def hook(event: HistoryUpdated) -> None:
            try:
                opened[0].get("adder-1")
            except MisuseError as error:
                refused.append(error)

        opened: list[BlockingSupervisor] = []
        with open_portal(MemoryStore(), WORKFLOWS, on_history_updated=hook) as supervisor:
            opened.append(supervisor)
            supervisor.spawn(adder, "adder-1", [1]).result()
        assert refused


class TestEnd:
    """S49: leaving the block, and whoever asks meanwhile and afterwards."""

    def test_a_running_step_finishes_within_grace_and_the_rest_goes_on_later(self, tmp_path: Path) -> None:
        begun, effects = threading.Event(), list[str]()

        @workflow(name="worker")
        async def worker(ctx: Context, _: None) -> str:
            async def work() -> str:
                begun.set()
                await trio.sleep(0.1)
                effects.append("done")
                return "worked"

            worked = await ctx.step("work", work)
            await ctx.step("next", effects.append, "next")
            return worked

        with open_portal(tmp_path, [worker]) as supervisor:
            supervisor.spawn(worker, "worker-1")
            assert begun.wait(10)
        assert effects == ["done"]
        with open_portal(tmp_path, [worker]) as supervisor:
            assert supervisor.get("worker-1").result() == "worked"
        assert effects == ["done", "next"]

    def test_those_who_wait_are_told_that_it_goes_on_later(self) -> None:
        """S51."""
        with ThreadPoolExecutor(10) as pool:
            with open_portal(MemoryStore(), WORKFLOWS) as supervisor:
                handle = supervisor.spawn(waiter, "waiter-1")
                before = thread_of(supervisor).call(living_tasks)
                waiting = [pool.submit(handle.result) for _ in range(10)]
                wait_until(lambda: thread_of(supervisor).call(living_tasks) == before + 10)
            errors = [wait.exception() for wait in waiting]
        assert {type(error) for error in errors} == {WorkflowSuspendedError}

    def test_calls_after_the_end_are_refused(self, tmp_path: Path) -> None:
        with open_portal(tmp_path, WORKFLOWS) as supervisor:
            handle = supervisor.spawn(waiter, "waiter-1")
        for attempt in (
            lambda: supervisor.spawn(waiter, "late"),
            lambda: supervisor.get("waiter-1"),
            supervisor.troubles,
            handle.result,
            lambda: handle.message("go"),
            handle.get_state,
            handle.cancel,
        ):
            with pytest.raises(SupervisorClosedError, match="open another"):
                attempt()

    def test_calls_that_race_with_the_end_are_done_or_refused(self) -> None:
        """S45: whatever the moment, no call hangs and none is half done."""
        store, done = MemoryStore(), list[str]()

        def spawn(supervisor: BlockingSupervisor, first: int) -> None:
            for number in range(first, 10_000, 4):
                try:
                    supervisor.spawn(waiter, f"waiter-{number}")
                except SupervisorClosedError:
                    return
                done.append(f"waiter-{number}")

        with ThreadPoolExecutor(4) as pool:
            with open_portal(store, WORKFLOWS) as supervisor:
                spawning = [pool.submit(spawn, supervisor, first) for first in range(4)]
                wait_until(lambda: len(done) > 20)
            assert [task.result(timeout=20) for task in spawning] == [None] * 4
        with open_portal(store.restart(), WORKFLOWS) as supervisor:
            assert {supervisor.get(workflow_id).workflow_id for workflow_id in done} == set(done)

    def test_an_exception_in_the_block_comes_out_as_it_was_after_an_orderly_end(self, tmp_path: Path) -> None:
        raised = KeyError("mine")

        def use() -> None:
            with open_portal(tmp_path, WORKFLOWS) as supervisor:
                supervisor.spawn(waiter, "waiter-1")
                raise raised

        with pytest.raises(KeyError) as caught:
            use()
        assert caught.value is raised
        with open_portal(tmp_path, WORKFLOWS) as supervisor:
            assert supervisor.get("waiter-1").get_state() is WorkflowState.SLEEPING

    def test_code_of_a_workflow_that_ends_the_program_comes_out_of_the_block(self) -> None:
        @workflow(name="quitter")
        async def quitter(ctx: Context, _: None) -> None:
            raise SystemExit(3)

        errors: list[SupervisorClosedError] = []

        def use() -> None:
            with open_portal(MemoryStore(), [quitter, waiter]) as supervisor:
                handle = supervisor.spawn(waiter, "waiter-1")
                supervisor.spawn(quitter, "quitter-1")
                with pytest.raises((WorkflowSuspendedError, SupervisorClosedError)):
                    handle.result()
                wait_until(lambda: thread_of(supervisor)._ended.done())
                with pytest.raises(SupervisorClosedError) as closed:
                    handle.get_state()
                errors.append(closed.value)

        with pytest.raises(SystemExit) as caught:
            use()
        assert caught.value.code == 3
        assert errors[0].__cause__ is caught.value

    def test_a_supervisor_that_cannot_be_opened_says_why_and_leaves_no_thread(self, tmp_path: Path) -> None:
        """S42."""
        with open_portal(tmp_path, WORKFLOWS):
            with pytest.raises(StoreLockedError), open_portal(tmp_path, WORKFLOWS):
                pytest.fail("it was opened twice")
            with pytest.raises(InvalidArgumentError, match="grace"), open_portal(MemoryStore(), grace=-1):
                pytest.fail("it was opened")
            with pytest.raises(TypeError):
                open_portal(MemoryStore(), workflow=[waiter])  # type: ignore[call-arg]

    def test_signals_are_for_the_main_thread(self) -> None:
        refused: list[BaseException | None] = []

        def use() -> None:
            with pytest.raises(InvalidArgumentError, match="main thread") as caught:
                open_portal(MemoryStore(), handle_signals=True)
            refused.append(caught.value)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert refused
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with open_portal(MemoryStore(), handle_signals=True):
            assert signal.getsignal(signal.SIGTERM) is not handlers[1]
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers

    def test_a_trio_program_can_use_what_a_portal_left(self, tmp_path: Path) -> None:
        with open_portal(tmp_path, WORKFLOWS) as supervisor:
            supervisor.spawn(waiter, "waiter-1").message("go", 1)

        async def look() -> Any:
            async with open_supervisor(tmp_path, WORKFLOWS) as supervisor:
                return await (await supervisor.get("waiter-1")).result()

        assert trio.run(look) == 1


class TestFork:
    """S42: a process that was forked has no supervisor, and is told so; the parent's is unharmed."""

    def test_a_child_is_refused_at_once_and_leaves_without_ending_the_parents(self, tmp_path: Path) -> None:
        receiving, sending = os.pipe()
        with open_portal(tmp_path, WORKFLOWS) as supervisor:
            handle: BlockingHandle[Any] = supervisor.spawn(waiter, "waiter-1")
            portal = open_portal(tmp_path / "child", WORKFLOWS)
            child = os.fork()
            if child == 0:
                os.write(sending, _in_child(handle, portal).encode())
                os._exit(0)
            os.close(sending)
            with os.fdopen(receiving) as answers:
                assert answers.read() == "open the portal after the fork: refused, opened its own"
            assert os.waitpid(child, 0)[1] == 0
            handle.message("go", "parent")
            assert handle.result() == "parent"


def _in_child(handle: BlockingHandle[Any], portal: Any) -> str:
    told = []
    try:
        handle.get_state()
    except SupervisorClosedError as error:
        told.append("open the portal after the fork: refused" if "after the fork" in str(error) else str(error))
    with open_portal(MemoryStore(), WORKFLOWS) as own:
        if own.spawn(adder, "adder-1", [1]).result(timeout=20) == 1:
            told.append("opened its own")
    return ", ".join(told)
