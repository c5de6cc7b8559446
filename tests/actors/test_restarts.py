"""What a fault of the runtime stops is restarted, with pauses, and never taken for a failure of the workflow (S18, S41)."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import trio
from disks import Disk
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors.restarts import BASE_S, CAP_S, Restarts, is_passing, pause_s
from perdure.actors.suspects import SUSPECT_FROM
from perdure.storage import (
    CommitUnknownError,
    CorruptStoreError,
    DecodeError,
    FormatVersionError,
    NamespaceNotFoundError,
    StorageError,
    layout,
)
from perdure.workflow import Context, HistoryDivergedError, StepExhaustedError, WorkflowFailedError, workflow
from perdure.workflow.activation import CRASH_LOOP_LIMIT, Activation, Closing
from perdure.workflow.errors import SuspendSignal

effects: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    effects.clear()


@workflow(name="order")
async def order(ctx: Context, input: int) -> int:
    async def work() -> int:
        effects.append(ctx.workflow_id)
        return input

    return await ctx.step("work", work)


class TestRule:
    @pytest.mark.parametrize(
        "error", [StorageError("x"), CommitUnknownError("x"), TypeError("a bug"), AssertionError(), OSError("x")]
    )
    def test_what_may_be_over_by_itself(self, error: Exception) -> None:
        assert is_passing(error)

    @pytest.mark.parametrize(
        "error",
        [
            CorruptStoreError("x", path="p"),
            NamespaceNotFoundError("x", workflow_id="w"),
            FormatVersionError("x", path="p", found=2, supported=1),
            DecodeError("x"),
            HistoryDivergedError("x", location="l", found=None, asked="a"),
            KeyboardInterrupt(),
            SystemExit(1),
        ],
    )
    def test_what_needs_a_repair_or_ends_the_program(self, error: BaseException) -> None:
        assert not is_passing(error)

    def test_pauses_double_to_the_cap_and_are_cut_by_half_at_most(self) -> None:
        random = Random(1)
        for restarts in range(2000):
            longest = min(CAP_S, BASE_S * 2 ** min(restarts, 60))
            assert longest / 2 <= pause_s(restarts, random) <= longest

    async def test_a_thousand_that_one_cause_stopped_do_not_come_back_at_one_moment(
        self, autojump_clock: MockClock
    ) -> None:
        times: dict[str, float] = {}
        restarts = Restarts(lambda workflow_id: times.setdefault(workflow_id, trio.current_time()) and None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(restarts.run)
            begun = trio.current_time()
            for number in range(1000):
                restarts.note_fault(f"w-{number}", StorageError("the disk is full"))
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
        waits = sorted(time - begun for time in times.values())
        assert len(waits) == 1000
        assert waits[0] >= BASE_S / 2
        assert waits[-1] <= BASE_S + 0.01
        assert waits[900] - waits[100] > 0.05

    async def test_an_earlier_restart_does_not_wait_for_a_later_one(self, autojump_clock: MockClock) -> None:
        times: list[tuple[str, float]] = []
        restarts = Restarts(lambda workflow_id: times.append((workflow_id, trio.current_time() - begun)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(restarts.run)
            begun = trio.current_time()
            for _ in range(8):
                restarts.note_fault("slow", StorageError("again"))
                await trio.sleep(100)
            times.clear()
            begun = trio.current_time()
            restarts.note_fault("slow", StorageError("again"))
            await wait_all_tasks_blocked()
            restarts.note_fault("quick", StorageError("first"))
            await trio.sleep(1)
            assert [workflow_id for workflow_id, _ in times] == ["quick"]
            restarts.forget("slow")
            await trio.sleep(100)
            assert [workflow_id for workflow_id, _ in times] == ["quick"], "it ran meanwhile"
            nursery.cancel_scope.cancel()


class TestBugs:
    """A bug of ours, played by an engine that raises what it never should."""

    @pytest.fixture
    def buggy(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
        """How often the engine is to fail, by workflow."""
        left: dict[str, int] = {}
        call = Activation.call

        async def failing(self: Activation, function: Any) -> Any:
            workflow_id = self.history.workflow_id
            if left.get(workflow_id, 0):
                left[workflow_id] -= 1
                raise TypeError("a bug")
            return await call(self, function)

        monkeypatch.setattr(Activation, "call", failing)
        return left

    async def test_the_actor_is_restarted_and_its_neighbours_do_not_notice(
        self, disk: Disk, buggy: dict[str, int], autojump_clock: MockClock
    ) -> None:
        buggy["o-1"] = 3
        async with disk.process(order) as supervisor:
            handles = [await supervisor.spawn(order, f"o-{number}", number) for number in range(3)]
            await wait_all_tasks_blocked()
            assert list(supervisor.troubles()) == ["o-1"]
            assert isinstance(supervisor.troubles()["o-1"], TypeError)
            assert effects == ["o-0", "o-2"] or effects == ["o-2", "o-0"]
            assert [await handle.result() for handle in handles] == [0, 1, 2]
            assert supervisor.troubles() == {}
            assert supervisor._residents.restarts.count == 3

    async def test_one_that_never_passes_ends_as_a_crash_loop(
        self, disk: Disk, buggy: dict[str, int], autojump_clock: MockClock
    ) -> None:
        """Promise 9: activations that record nothing are counted, over restarts of the process too."""
        buggy["o-1"] = 1000
        async with disk.process(order) as supervisor:
            await supervisor.spawn(order, "o-1", 1)
            await trio.sleep(1)
        async with disk.process(order) as supervisor:
            handle = await supervisor.get("o-1")
            with pytest.raises(WorkflowFailedError) as caught:
                await handle.result()
            assert caught.value.name == "CrashLoopError"
            assert 1000 - buggy["o-1"] == CRASH_LOOP_LIMIT
            buggy["o-1"] = 0
            await handle.recover()
            assert await handle.result() == 1


class TestFailuresOfUsers:
    async def test_they_are_outcomes_and_restart_nothing(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="failing")
        async def failing(ctx: Context, input: None) -> None:
            async def fail() -> None:
                raise OSError("the user's own")

            await ctx.step("fail", fail, max_retries=2)

        async with disk.process(failing) as supervisor:
            handle = await supervisor.spawn(failing, "f-1")
            with pytest.raises(WorkflowFailedError) as caught:
                await handle.result()
            assert caught.value.name == StepExhaustedError.__name__
            await trio.sleep(100)
            assert supervisor._residents.restarts.count == 0
            assert supervisor.troubles() == {}


class TestStorage:
    """S41, promise 7: an error of the storage is no failure of a workflow, however often it comes."""

    async def test_it_is_never_counted_as_a_crash_loop_even_when_only_results_cannot_be_written(
        self, disk: Disk, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
    ) -> None:
        """The count is durable before each step begins, and the step's result is what fails."""
        failing = True
        commit = Activation.commit

        async def commit_or_fail(self: Activation) -> None:
            if failing and effects and not self.must_commit_before_step:
                error = StorageError("the disk is full")
                self.close(Closing.STORAGE, error)
                raise SuspendSignal from error
            await commit(self)

        monkeypatch.setattr(Activation, "commit", commit_or_fail)
        monkeypatch.setattr(Activation, "commit_nowait", lambda self: False)
        async with disk.process(order) as supervisor:
            handle = await supervisor.spawn(order, "o-1", 1)
            await trio.sleep(3600)
            assert len(effects) > 2 * CRASH_LOOP_LIMIT
            assert (await handle.get_state()).value == "running"
            failing = False
            assert await handle.result() == 1

    async def test_pauses_begin_anew_after_a_run_that_came_to_its_own_end(
        self, disk: Disk, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
    ) -> None:
        left = 6
        call = Activation.call

        async def failing(self: Activation, function: Any) -> Any:
            nonlocal left
            if left:
                left -= 1
                raise StorageError("now and then")
            return await call(self, function)

        monkeypatch.setattr(Activation, "call", failing)

        @workflow(name="waiter")
        async def waiter(ctx: Context, input: None) -> Any:
            return (await ctx.queue.next("go")).body

        async with disk.process(waiter, idle_timeout=1) as supervisor:
            handle = await supervisor.spawn(waiter, "w-1")
            await trio.sleep(300)
            left = 1
            begun = trio.current_time()
            await handle.message("go", 7)
            assert await handle.result() == 7
            assert trio.current_time() - begun < 1, "the first pause again, not the seventh"


class TestSuspects:
    async def test_two_that_wait_for_each_other_do_not_wait_for_one_turn(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S18, S47: a suspect whose step waits for another suspect leaves its turn to it."""

        @workflow(name="outer")
        async def outer(ctx: Context, input: int) -> int:
            async def ask() -> int:
                return int(await (await supervisor.spawn(order, "inner", 1)).result())

            return await ctx.step("ask", ask, timeout=0)

        async with disk.process(order, outer) as supervisor:
            await supervisor.spawn(order, "inner", 1, start_at=50)
            await supervisor.spawn(outer, "outer", 1, start_at=60)
        for workflow_id in ("inner", "outer"):
            store = disk.next_store()
            await store.acquire()
            driver = await store.open_driver(workflow_id)
            await driver.set(layout.IDLE_ACTIVATIONS_KEY, layout.encode_u64(SUSPECT_FROM + 1))
            await driver.aclose()
            await store.aclose()
        async with disk.process(order, outer) as supervisor:
            handle = await supervisor.get("outer")
            await handle.wake()
            with trio.fail_after(1000):
                assert await handle.result() == 1
