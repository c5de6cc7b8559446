"""A new workflow that is run at once says so in the batch that creates it, and only such a one."""

from __future__ import annotations

import pytest
import trio
from disks import Disk
from trio.testing import MockClock

from perdure.actors import WorkflowLimit
from perdure.storage import Driver, StorageError, layout
from perdure.workflow import Context, workflow
from perdure.workflow.activation import CRASH_LOOP_LIMIT

ran: list[str] = []


@pytest.fixture(autouse=True)
def _none_ran() -> None:
    ran.clear()


@workflow(name="job")
async def job(ctx: Context, seconds: float) -> str:
    """One step, which takes some time."""
    return await ctx.step("do", do, ctx.workflow_id, seconds)


async def do(workflow_id: str, seconds: float) -> str:
    ran.append(workflow_id)
    await trio.sleep(seconds)
    return workflow_id


def stored(disk: Disk, workflow_id: str) -> tuple[str | None, int]:
    """The state, and how many activations in a row are counted that recorded nothing, as they are durable."""
    namespace = disk.namespaces.get(workflow_id, {})
    count = namespace.get(layout.IDLE_ACTIVATIONS_KEY)
    state = namespace.get(layout.STATE_KEY)
    return None if state is None else state.decode(), 0 if count is None else layout.decode_u64(count)


class Creations:
    """What the first batch of each workflow says."""

    def __init__(self, disk: Disk) -> None:
        self.found: dict[str, tuple[str | None, int]] = {}
        self._disk = disk
        disk.store.watch = self._look

    def _look(self, when: str) -> None:
        for workflow_id in self._disk.namespaces:
            says = stored(self._disk, workflow_id)
            if says[0] is not None:
                self.found.setdefault(workflow_id, says)


async def test_its_first_step_waits_for_no_commit_but_that_of_its_creation(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """What must be durable before a step function is: that the workflow runs, and that this activation is counted."""
    async with disk.process(job) as supervisor:
        creations = Creations(disk)
        handle = await supervisor.spawn(job, "job-1", 5)
        await trio.testing.wait_all_tasks_blocked()
        assert ran == ["job-1"]
        assert creations.found == {"job-1": ("running", 1)}
        assert disk.store.written.count("batch") == 1
        assert await handle.result() == "job-1"
        assert stored(disk, "job-1") == ("completed", 0)
        assert disk.store.written.count("batch") == 3


async def test_what_has_to_wait_is_pending_until_it_is_started(disk: Disk, autojump_clock: MockClock) -> None:
    """A time to start at, a deadline, a limit of its type, or no place: nothing says that it runs before it does."""

    @workflow(name="limited")
    async def limited(ctx: Context, seconds: float) -> None:
        await ctx.step("do", do, ctx.workflow_id, seconds)

    async with disk.process(job, limited, max_live=3, limits={"limited": WorkflowLimit(concurrency=1)}) as supervisor:
        creations = Creations(disk)
        await supervisor.spawn(job, "later", 1, start_at=100)
        await supervisor.spawn(job, "bounded", 1, deadline=100)
        for number in range(2):
            await supervisor.spawn(limited, f"limited-{number}", 5)
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(supervisor.spawn, job, f"job-{number}", 5)
        begun = {workflow_id for workflow_id, says in creations.found.items() if says == ("running", 1)}
        assert {says for workflow_id, says in creations.found.items() if workflow_id not in begun} == {("pending", 0)}
        # `bounded` and `limited-0` have the other places; whoever has none is not said to run.
        assert len(begun) == 1
        assert begun < {f"job-{number}" for number in range(10)}
        assert supervisor._residents.slots.taken == 3
        await trio.sleep(200)
        assert sorted(ran) == sorted(creations.found)
        assert supervisor._residents.slots.taken == 0


async def test_a_place_that_was_taken_for_a_new_workflow_is_free_again_if_it_is_not_made(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """However often the storage fails; the next one is made and run in it."""
    async with disk.process(job, max_live=1) as supervisor:
        original = disk.store.open_driver

        async def fail(workflow_id: str, *, create: bool = False) -> Driver:
            raise StorageError("disk full")

        disk.store.open_driver = fail  # type: ignore[method-assign]
        for _ in range(3):
            with pytest.raises(StorageError, match="disk full"):
                await supervisor.spawn(job, "job-1", 1)
            assert supervisor._residents.slots.taken == 0
        disk.store.open_driver = original  # type: ignore[method-assign]
        assert await (await supervisor.spawn(job, "job-1", 1)).result() == "job-1"


async def test_one_that_is_not_started_after_all_is_run_by_the_next_process(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """The supervisor closes while the creation is on its way: the workflow is recovered as any that runs."""
    async with trio.open_nursery() as nursery, disk.process(job) as supervisor:
        disk.store.delay_s = 1
        nursery.start_soon(supervisor.spawn, job, "job-1", 1)
        await trio.sleep(1.5)  # the row is written, and the first batch about to be
        assert stored(disk, "job-1") == (None, 0)
    assert ran == []
    assert stored(disk, "job-1") == ("running", 1)
    assert disk.rows["job-1"].next_wake_ms == 0
    async with disk.process(job) as supervisor:
        assert await (await supervisor.get("job-1")).result() == "job-1"
    assert ran == ["job-1"]
    assert stored(disk, "job-1") == ("completed", 0)


async def test_one_that_is_evicted_before_its_first_record_is_not_counted(
    disk: Disk, autojump_clock: MockClock
) -> None:
    """Leaving is no crash: the count that came with the creation goes with it."""
    async with disk.process(job, grace=0) as supervisor:
        await supervisor.spawn(job, "job-1", 50)
        assert stored(disk, "job-1") == ("running", 1)
    assert stored(disk, "job-1") == ("running", 0)


async def test_its_creation_is_the_first_of_ten_activations_and_no_more(disk: Disk, autojump_clock: MockClock) -> None:
    """Promise 9: the count goes up by one for each activation that begins a step and dies, from the first on."""

    @workflow(name="deadly")
    async def deadly(ctx: Context, input: None) -> None:
        await ctx.step("die", die)

    async def die() -> None:
        ran.append("deadly")
        disk.die()
        await trio.sleep_forever()

    async def live(*, is_first: bool) -> None:
        async with disk.process(deadly, grace=0) as supervisor:
            if is_first:
                await supervisor.spawn(deadly, "deadly-1")
            await trio.sleep(10)

    for number in range(CRASH_LOOP_LIMIT):
        await live(is_first=number == 0)
        assert len(ran) == number + 1
        assert stored(disk, "deadly-1") == ("running", number + 1)
    await live(is_first=False)
    assert len(ran) == CRASH_LOOP_LIMIT
    assert stored(disk, "deadly-1")[0] == "failed"
