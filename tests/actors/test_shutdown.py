"""The end of a supervisor's block: in order, in time, and everything can be resumed."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import trio
from disks import Disk
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.actors import SupervisorClosedError, WorkflowNotFoundError
from perdure.workflow import Context, WorkflowFailedError, WorkflowState, WorkflowSuspendedError, workflow

effects: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()


@workflow(name="worker")
async def worker(ctx: Context, seconds: float) -> str:
    async def work() -> str:
        effects.append("begun")
        await trio.sleep(seconds)
        effects.append("done")
        return "worked"

    worked = await ctx.step("work", work, timeout=0)
    await ctx.step("next", note, "next")
    return worked


async def note(text: str) -> None:
    effects.append(text)


@workflow(name="waiter")
async def waiter(ctx: Context, input: Any) -> Any:
    return (await ctx.queue.next("go")).body


class TestOrder:
    """S49, in virtual time."""

    async def test_a_running_step_finishes_within_grace_and_nothing_is_begun_after_it(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        async with disk.process(worker, waiter, grace=10) as supervisor:
            await supervisor.spawn(worker, "worker-1", 6)
            await supervisor.spawn(waiter, "waiter-1")
            await trio.sleep(1)
            left_at = trio.current_time()
        assert trio.current_time() - left_at == pytest.approx(5, abs=0.1)
        assert effects == ["begun", "done"]
        async with disk.process(worker, waiter) as supervisor:
            assert await (await supervisor.get("worker-1")).result() == "worked"
            handle = await supervisor.get("waiter-1")
            await handle.message("go", 1)
            assert await handle.result() == 1
        assert effects == ["begun", "done", "next"]

    @pytest.mark.parametrize("waits", [False, True])
    async def test_a_branch_that_is_kept_from_going_on_goes_on_at_the_next_start(
        self, disk: Disk, autojump_clock: MockClock, waits: bool
    ) -> None:
        """S33, S45: its sleep has ended, so it waits for nothing; that the others wait or are done does not let it wait."""

        @workflow(name="branches")
        async def branches(ctx: Context, input: Any) -> Any:
            async def sleeper(ctx: Context) -> None:
                await ctx.sleep("nap", 2)
                await ctx.step("after", note, "after")

            async def busy(ctx: Context) -> None:
                await ctx.step("work", trio.sleep, 4)

            async def receiver(ctx: Context) -> None:
                if waits:
                    await ctx.queue.next("go", names=["go"])

            return list(await ctx.join("all", {"sleeper": sleeper, "busy": busy, "receiver": receiver}))

        async with disk.process(branches, grace=10) as supervisor:
            await supervisor.spawn(branches, "b-1", None)
            await trio.sleep(1)
        assert trio.current_time() == pytest.approx(4, abs=0.1), "the running step was waited for"
        assert effects == []
        async with disk.process(branches) as supervisor:
            await trio.sleep(1)  # and nobody asks for it
            assert effects == ["after"]
            handle = await supervisor.get("b-1")
            if waits:
                assert await handle.get_state() is WorkflowState.SLEEPING
                await handle.message("go")
            assert await handle.result() == ["sleeper", "busy", "receiver"]
        assert effects == ["after"]

    @pytest.mark.parametrize("grace", [0, 3])
    async def test_a_step_that_takes_longer_is_evicted_and_runs_again(
        self, disk: Disk, grace: float, autojump_clock: MockClock
    ) -> None:
        async with disk.process(worker, grace=grace) as supervisor:
            await supervisor.spawn(worker, "worker-1", 1000)
            await trio.sleep(1)
            left_at = trio.current_time()
        assert trio.current_time() - left_at == pytest.approx(grace, abs=0.1)
        assert effects == ["begun"]
        async with disk.process(worker) as supervisor:
            assert await (await supervisor.get("worker-1")).result() == "worked"
        assert effects == ["begun", "begun", "done", "next"]

    async def test_a_step_that_ignores_cancellation_is_waited_for_and_recorded(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        """S20, S49: shielded code can exceed grace; no hot loop meanwhile."""

        @workflow(name="stubborn")
        async def stubborn(ctx: Context, input: None) -> str:
            async def work() -> str:
                with trio.CancelScope(shield=True):
                    await trio.sleep(100)
                effects.append("done")
                return "worked"

            return await ctx.step("work", work, timeout=0)

        steps = 0

        class Counting(trio.abc.Instrument):
            def before_task_step(self, task: trio.lowlevel.Task) -> None:
                nonlocal steps
                steps += 1

        async with disk.process(stubborn, grace=1) as supervisor:
            await supervisor.spawn(stubborn, "s-1")
            await trio.sleep(1)
            left_at = trio.current_time()
            trio.lowlevel.add_instrument(counting := Counting())
        trio.lowlevel.remove_instrument(counting)
        assert trio.current_time() - left_at == pytest.approx(99, abs=0.1)
        assert steps < 200
        async with disk.process(stubborn) as supervisor:
            assert await (await supervisor.get("s-1")).result() == "worked"
        assert effects == ["done"]

    async def test_a_backoff_and_a_sleep_do_not_hold_it_up(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="retrier")
        async def retrier(ctx: Context, input: None) -> int:
            async def attempt() -> int:
                effects.append("attempt")
                if len(effects) == 1:
                    raise OSError("not now")
                return 1

            return await ctx.step("attempt", attempt, retry_backoff_base=100, retry_backoff_max=100)

        async with disk.process(retrier) as supervisor:
            await supervisor.spawn(retrier, "r-1")
            await trio.sleep(1)
            left_at = trio.current_time()
        assert trio.current_time() - left_at < 0.1
        async with disk.process(retrier) as supervisor:
            assert await (await supervisor.get("r-1")).result() == 1
        assert trio.current_time() - left_at == pytest.approx(99, abs=0.1), "the retry keeps its time"


class Failure(Exception):
    """The block's own error."""


class TestHowItComes:
    """S49: an exception, a cancellation, Ctrl-C in the block and in a step; each comes out as itself."""

    @pytest.mark.parametrize("error", [Failure, KeyboardInterrupt, SystemExit, GeneratorExit])
    async def test_an_exception_in_the_block_comes_out_as_it_was(
        self, disk: Disk, error: type[BaseException], autojump_clock: MockClock
    ) -> None:
        raised = error("mine")
        caught: BaseException | None = None
        try:
            async with disk.process(worker, waiter) as supervisor:
                await supervisor.spawn(worker, "worker-1", 6)
                await supervisor.spawn(waiter, "waiter-1")
                await trio.sleep(1)
                raise raised
        except BaseException as out:
            caught = out
        assert caught is raised
        assert effects == ["begun", "done"], "it was an orderly end all the same"
        async with disk.process(worker, waiter) as supervisor:
            assert await (await supervisor.get("worker-1")).result() == "worked"
            assert await (await supervisor.get("waiter-1")).get_state() is WorkflowState.SLEEPING

    async def test_a_cancelled_block_ends_in_order_and_the_cancellation_goes_on(
        self, disk: Disk, autojump_clock: MockClock
    ) -> None:
        with trio.move_on_after(2) as scope:
            async with disk.process(worker) as supervisor:
                await supervisor.spawn(worker, "worker-1", 6)
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(6, abs=0.1)
        assert effects == ["begun", "done"]
        async with disk.process(worker) as supervisor:
            assert await (await supervisor.get("worker-1")).result() == "worked"

    async def test_a_block_that_is_cancelled_before_it_began_leaves_nothing_behind(self, disk: Disk) -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with disk.process(worker, handle_signals=True):
                await trio.lowlevel.checkpoint()
                raise AssertionError("it was not cancelled")
        async with disk.process(worker) as supervisor:
            await supervisor.spawn(worker, "worker-1", 0)

    @pytest.mark.parametrize("in_step", [False, True])
    async def test_a_workflow_that_ends_the_program_each_time_ends_as_a_crash_loop_beside_others(
        self, disk: Disk, in_step: bool, autojump_clock: MockClock
    ) -> None:
        """S18, S49: in its own code too, after what is replayed; the others go on."""

        @workflow(name="leaver")
        async def leaver(ctx: Context, input: None) -> None:
            await ctx.step("first", note, "first")

            async def leave() -> NoReturn:
                raise SystemExit(3)

            if in_step:
                await ctx.step("exit", leave)
            await leave()

        async def live() -> None:
            async with disk.process(worker, leaver) as supervisor:
                await supervisor.spawn(leaver, "leaver-1")
                await trio.sleep_forever()

        for _ in range(11):  # the first recorded something
            with pytest.raises(SystemExit):
                await live()
        async with disk.process(worker, leaver) as supervisor:
            with pytest.raises(WorkflowFailedError) as failed:
                await (await supervisor.get("leaver-1")).result()
            assert failed.value.name == "CrashLoopError"
            await supervisor.spawn(worker, "worker-1", 1)
            assert await (await supervisor.get("worker-1")).result() == "worked"
        assert effects.count("first") == 1

    @pytest.mark.parametrize("in_nursery", [False, True])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    async def test_ctrl_c_in_a_step_ends_the_block_and_not_the_workflow(
        self, disk: Disk, error: type[BaseException], in_nursery: bool, autojump_clock: MockClock
    ) -> None:
        is_pressed = True

        async def press() -> None:
            await trio.sleep(2)
            if is_pressed:
                raise error

        @workflow(name="pressed")
        async def pressed(ctx: Context, input: None) -> str:
            async def work() -> str:
                if in_nursery:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(press)
                else:
                    await press()
                return "pressed"

            return await ctx.step("work", work)

        async def live() -> None:
            async with disk.process(worker, pressed) as supervisor:
                await supervisor.spawn(worker, "worker-1", 6)
                await supervisor.spawn(pressed, "p-1")
                await trio.sleep_forever()

        with pytest.raises(error):
            await live()
        assert effects == ["begun", "done"], "the others end in order"
        is_pressed = False
        async with disk.process(worker, pressed) as supervisor:
            assert await (await supervisor.get("p-1")).result() == "pressed"
            assert await (await supervisor.get("worker-1")).result() == "worked"

    async def test_an_error_of_a_workflow_is_not_the_blocks(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="failing")
        async def failing(ctx: Context, input: None) -> NoReturn:
            raise Failure("its own")

        async with disk.process(failing) as supervisor:
            await supervisor.spawn(failing, "f-1")
            await trio.sleep(1)
            assert await (await supervisor.get("f-1")).get_state() is WorkflowState.FAILED


class TestClients:
    """S49: what those hear who ask a supervisor that leaves."""

    @pytest.mark.parametrize("is_dormant", [False, True])
    async def test_waiters_for_a_result_are_told_that_it_goes_on_later(
        self, disk: Disk, is_dormant: bool, autojump_clock: MockClock
    ) -> None:
        """S49, S51: also a hundred of them."""
        heard: list[WorkflowSuspendedError] = []

        async def wait(handle: Any) -> None:
            with pytest.raises(WorkflowSuspendedError) as caught:
                await handle.result()
            heard.append(caught.value)

        async with trio.open_nursery() as nursery, disk.process(waiter, worker, grace=5) as supervisor:
            handles = [await supervisor.spawn(waiter, "waiter-1"), await supervisor.spawn(worker, "worker-1", 1000)]
            await trio.sleep(1)
            for handle in handles:
                if is_dormant:
                    await handle.evict()
                for _ in range(50):
                    nursery.start_soon(wait, handle)
            await wait_all_tasks_blocked()
        assert len(heard) == 100
        assert {(error.workflow_id, error.state) for error in heard} == {
            ("waiter-1", "sleeping"),
            ("worker-1", "running"),
        }
        assert all("it goes on at the next start" in str(error) for error in heard)

    async def test_who_ends_within_grace_is_heard(self, disk: Disk, autojump_clock: MockClock) -> None:
        @workflow(name="brief")
        async def brief(ctx: Context, input: None) -> str:
            await ctx.step("work", trio.sleep, 3)
            return "brief"

        results: list[Any] = []

        async def wait(handle: Any) -> None:
            results.append(await handle.result())

        async with trio.open_nursery() as nursery, disk.process(brief) as supervisor:
            nursery.start_soon(wait, await supervisor.spawn(brief, "b-1"))
            await trio.sleep(1)
        assert results == ["brief"]

    async def test_nothing_is_taken_while_it_leaves(self, disk: Disk, autojump_clock: MockClock) -> None:
        refused = 0

        async def ask(supervisor: Any, handle: Any) -> None:
            nonlocal refused
            await trio.sleep(3)
            for attempt in (
                supervisor.spawn(waiter, "late"),
                supervisor.get("waiter-1"),
                handle.message("go", 1),
                handle.wake(),
                handle.cancel(),
                handle.evict(),
                handle.get_state(),
            ):
                with pytest.raises(SupervisorClosedError):
                    await attempt
                refused += 1

        async with trio.open_nursery() as nursery, disk.process(worker, waiter, grace=10) as supervisor:
            await supervisor.spawn(worker, "worker-1", 8)
            nursery.start_soon(ask, supervisor, await supervisor.spawn(waiter, "waiter-1"))
            await trio.sleep(1)
        assert refused == 7
        async with disk.process(worker, waiter) as supervisor:
            with pytest.raises(WorkflowNotFoundError):
                await supervisor.get("late")
            assert await (await supervisor.get("waiter-1")).get_state() is WorkflowState.SLEEPING

    @pytest.mark.parametrize("leave_after_s", [0.02, 0.03, 0.04])
    async def test_what_races_with_the_end_is_done_or_refused_never_half(
        self, disk: Disk, leave_after_s: float, autojump_clock: MockClock
    ) -> None:
        """S45: a spawn, a message or a look at any moment of the end."""
        done: dict[str, list[int]] = {"spawn": [], "message": [], "look": []}
        refused = 0

        async def client(supervisor: Any, what: str, number: int) -> None:
            nonlocal refused
            await trio.sleep(number / 1000)
            try:
                if what == "spawn":
                    await supervisor.spawn(waiter, f"spawn-{number}")
                else:
                    handle = await supervisor.get(f"{what}-{number}")
                    await (handle.message("go", number) if what == "message" else handle.get_state())
            except SupervisorClosedError:
                refused += 1
            else:
                done[what].append(number)

        async with disk.process(waiter) as supervisor:
            for number in range(60):
                await (await supervisor.spawn(waiter, f"look-{number}")).evict()
                await (await supervisor.spawn(waiter, f"message-{number}")).evict()
        async with trio.open_nursery() as nursery, disk.process(waiter) as supervisor:
            disk.store.delay_s = 0.005
            for number in range(60):
                for what in done:
                    nursery.start_soon(client, supervisor, what, number)
            await trio.sleep(leave_after_s)
        assert all(len(numbers) > 5 for numbers in done.values())
        assert sum(map(len, done.values())) + refused == 180
        assert refused > 30
        async with disk.process(waiter) as supervisor:
            await trio.sleep(10)
            for number in range(60):
                if number in done["spawn"]:
                    handle = await supervisor.get(f"spawn-{number}")
                    assert await handle.get_state() is WorkflowState.SLEEPING
                else:
                    with pytest.raises(WorkflowNotFoundError):
                        await supervisor.get(f"spawn-{number}")
                handle = await supervisor.get(f"message-{number}")
                is_sent = number in done["message"]
                assert (await handle.get_state() is WorkflowState.COMPLETED) == is_sent
            assert supervisor.troubles() == {}

    @pytest.mark.parametrize("what", ["spawn", "message", "look"])
    async def test_the_store_is_not_closed_under_who_is_at_it(
        self, disk: Disk, what: str, autojump_clock: MockClock
    ) -> None:
        """S45: one operation, and an end at each of its moments."""
        answers: list[str] = []

        async def client(supervisor: Any, number: int) -> None:
            try:
                if what == "spawn":
                    await supervisor.spawn(waiter, f"spawn-{number}")
                else:
                    handle = await supervisor.get(f"{what}-{number}")
                    await (handle.message("go", number) if what == "message" else handle.get_state())
            except SupervisorClosedError:
                answers.append("refused")
            else:
                answers.append("done")

        for number in range(20):
            async with disk.process(waiter) as supervisor:
                if what != "spawn":
                    await (await supervisor.spawn(waiter, f"{what}-{number}")).evict()
            async with trio.open_nursery() as nursery, disk.process(waiter) as supervisor:
                disk.store.delay_s = 0.005
                nursery.start_soon(client, supervisor, number)
                await trio.sleep(number / 1000)
        assert len(answers) == 20
        assert answers.count("done") > 10
