"""Commits: everything recorded reaches the store, a refusal loses nothing, and any other failure ends in a reload."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, cast

import pytest
import trio
from harness import CrashingDriver, Namespace, SimulatedCrashError, host
from trio.testing import MockClock, wait_all_tasks_blocked

from perdure.storage import (
    Batch,
    BatchRefusedError,
    CommitUnknownError,
    Driver,
    MemoryDriver,
    ValueTooLargeError,
    layout,
)
from perdure.storage.schema import Entry, SleepEntry, SleepState
from perdure.workflow import Context, RunMode, WorkflowState
from perdure.workflow.checks import check_driver
from perdure.workflow.committer import Committer
from perdure.workflow.history import History, Node
from perdure.workflow.pending import Pending

Failure = Literal["refused", "lost", "written"]


class TroubledDriver(CrashingDriver):
    """A driver whose batches wait for the test to let them through, and fail as the test says."""

    def __init__(self, inner: CrashingDriver) -> None:
        super().__init__(inner)
        self.is_slow = False
        self.failures: list[Failure | None] = []
        self._waiting: trio.Event | None = None

    async def batch(self, batch: Batch) -> None:
        self.batches.append(batch)
        if self.is_slow:
            self._waiting = trio.Event()
            await self._waiting.wait()
        failure = self.failures.pop(0) if self.failures else None
        if failure == "refused":
            raise BatchRefusedError("not now")
        if failure != "lost":
            await self.inner.batch(batch)
        if failure is not None:
            raise CommitUnknownError("the disk went away")

    async def until_writing(self) -> None:
        await wait_all_tasks_blocked()
        assert self._waiting is not None, "no batch is being written"
        assert not self._waiting.is_set(), "no batch is being written"

    @property
    def is_writing(self) -> bool:
        """Whether a batch waits to be let through."""
        return self._waiting is not None and not self._waiting.is_set()

    def let_through(self) -> None:
        assert self._waiting is not None, "no batch is being written"
        self._waiting.set()


@pytest.fixture
async def driver(namespace: Namespace) -> Any:
    """A troubled driver on the driver under test."""
    yield TroubledDriver(await namespace.driver())
    await namespace.close()


def record(history: History, *names: str) -> None:
    """Register names and record a sleep by each, as a branch does."""
    for name in names:
        number = history.number_of(name)
        node = history.root.children.setdefault(number, Node())
        history.put_entry(node, Entry(f"id-{name}", (number,), SleepEntry(1, SleepState.COMPLETED)))


async def reloaded(driver: TroubledDriver) -> History:
    return await History.load("w", driver)


def sleeps(history: History) -> set[tuple[str | int, ...]]:
    return {history.path_of(entry.location) for entry in history.entries()}


async def test_names_registered_while_a_batch_is_being_written_reach_the_store(driver: TroubledDriver) -> None:
    """S15: two branches register new names while a flush is in progress; every name and entry is stored, numbered alike."""
    driver.is_slow = True
    history = History("w")
    committer = Committer(driver, history.pending)

    async def branch(*names: str) -> None:
        record(history, *names)
        await committer.commit()
        driver_names = {value.decode() for _, value in await driver.list(layout.NAMES_PREFIX)}
        assert driver_names >= set(names), "commit returned before it was durable"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(branch, "first")
        await driver.until_writing()
        nursery.start_soon(branch, "left", "shared")
        nursery.start_soon(branch, "right", "shared", "more")
        await driver.until_writing()
        assert len(driver.batches) == 1, "two batches at once"
        driver.let_through()
        await driver.until_writing()
        record(history, "late")  # and one more while those are being written
        driver.let_through()
        await wait_all_tasks_blocked()
        driver.is_slow = False
        await committer.commit()
    stored = await reloaded(driver)
    assert stored.names == history.names
    assert sorted(stored.names) == sorted({"first", "left", "right", "shared", "more", "late"})
    assert sleeps(stored) == sleeps(history) == {(name,) for name in history.names}
    assert committer.is_clean


async def test_those_who_ask_while_a_batch_is_being_written_share_the_next_one(driver: TroubledDriver) -> None:
    """S15: a hundred branches that finish together cost one batch, and each returns when its record is durable."""
    driver.is_slow = True
    history = History("w")
    committer = Committer(driver, history.pending)
    returned: list[int] = []

    async def branch(number: int) -> None:
        record(history, f"n{number}")
        await committer.commit()
        returned.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(branch, 0)
        await driver.until_writing()
        for number in range(1, 100):
            nursery.start_soon(branch, number)
        await driver.until_writing()
        driver.let_through()
        await driver.until_writing()
        assert returned == [0]
        driver.let_through()
    assert len(driver.batches) == committer.commits == 2
    assert len(returned) == 100


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("lanes", [1, 3])
async def test_who_waits_for_nothing_to_be_pending_is_served_before_those_who_record_without_a_pause(
    driver: TroubledDriver, lanes: int, is_slow: bool
) -> None:
    """Nothing is pending when it returns, nor until others have their turn; and they go on after that."""
    driver.is_slow = is_slow
    history = History("w")
    committer = Committer(driver, history.pending, is_alone=lanes == 1)
    done = [0] * lanes
    looked: list[int] = []

    async def lane(own: int) -> None:
        for number in range(60):
            record(history, f"{own}-{number}")
            if not committer.commit_nowait():
                await committer.commit()
            done[own] += 1

    async def look() -> None:
        await committer.settle()
        assert committer.is_clean
        assert sleeps(await reloaded(driver)) == sleeps(history)
        looked.append(sum(done))

    async def let_all_through() -> None:
        while sum(done) < 60 * lanes or len(looked) < 2:
            await wait_all_tasks_blocked()
            if driver.is_writing:
                driver.let_through()

    async with trio.open_nursery() as nursery:
        if is_slow:
            nursery.start_soon(let_all_through)
        for own in range(lanes):
            nursery.start_soon(lane, own)
        nursery.start_soon(look)
        nursery.start_soon(look)
    assert done == [60] * lanes
    assert len(looked) == 2
    assert max(looked) < 60 * lanes, "they were served before all was recorded"


async def test_who_gives_up_waiting_for_nothing_to_be_pending_holds_nobody_back(driver: TroubledDriver) -> None:
    history = History("w")
    committer = Committer(driver, history.pending)
    driver.is_slow = True
    record(history, "a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(committer.settle)
        await driver.until_writing()
        nursery.cancel_scope.cancel()
        driver.let_through()
    driver.is_slow = False
    record(history, "b")
    await committer.commit()
    assert committer.is_clean


async def test_nothing_to_write_writes_nothing(driver: TroubledDriver) -> None:
    """S15: a commit of nothing does not reach the driver."""
    history = History("w")
    committer = Committer(driver, history.pending)
    await committer.commit()
    record(history, "a")
    assert not committer.is_clean
    await committer.commit()
    await committer.commit()
    assert len(driver.batches) == 1


@pytest.mark.parametrize("times", [1, 3])
async def test_a_refused_batch_leaves_everything_dirty_and_the_next_one_writes_it(
    driver: TroubledDriver, times: int
) -> None:
    """S15: whoever asked gets the refusal; what was recorded before and since is in the batch that goes through."""
    driver.failures = ["refused"] * times
    history = History("w")
    committer = Committer(driver, history.pending)
    record(history, "a")
    history.set_idle_activations(3)
    for attempt in range(times):
        with pytest.raises(BatchRefusedError):
            await committer.commit()
        assert not committer.is_clean
        assert await driver.list(b"") == []
        record(history, f"since {attempt}")
    history.set_idle_activations(0)
    await committer.commit()
    stored = await reloaded(driver)
    assert stored.names == history.names
    assert sleeps(stored) == sleeps(history)
    assert stored.idle_activations == 0
    assert committer.commits == 1
    assert committer.is_clean


async def test_a_refusal_reaches_only_the_one_whose_batch_it_was_and_the_waiting_write_it(
    driver: TroubledDriver,
) -> None:
    """S15: a branch that waited for the refused batch to be over tries with its own, which carries all."""
    driver.is_slow = True
    driver.failures = ["refused"]
    history = History("w")
    committer = Committer(driver, history.pending)
    outcomes: list[str] = []

    async def branch(name: str) -> None:
        record(history, name)
        try:
            await committer.commit()
        except BatchRefusedError:
            outcomes.append(f"{name} refused")
        else:
            outcomes.append(f"{name} durable")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(branch, "first")
        await driver.until_writing()
        nursery.start_soon(branch, "second")
        await driver.until_writing()
        driver.let_through()
        await driver.until_writing()
        driver.let_through()
    assert outcomes == ["first refused", "second durable"]
    assert sleeps(await reloaded(driver)) == {("first",), ("second",)}


async def test_a_value_too_large_for_a_driver_that_does_not_wait_is_a_refusal_too(namespace: Namespace) -> None:
    """S15: the way without waiting that drivers may offer keeps the same rule."""
    memory = MemoryDriver(value_bytes_max=100)
    pending = Pending()
    committer = Committer(memory, pending)
    pending.put(b"a", b"fits")
    pending.put(b"b", b"x" * 101)
    with pytest.raises(ValueTooLargeError):
        await committer.commit()
    assert memory.data == {}
    assert committer.broken is None
    pending.put(b"b", b"shorter")
    await committer.commit()
    assert memory.data == {b"a": b"fits", b"b": b"shorter"}


@pytest.mark.parametrize("failure", ["lost", "written"])
async def test_any_other_failure_is_unknown_and_only_a_reload_tells(driver: TroubledDriver, failure: Failure) -> None:
    """S15: nothing is written by that committer any more, every waiter gets the error, and the store decides."""
    history = History("w")
    committer = Committer(driver, history.pending)
    record(history, "before")
    await committer.commit()
    driver.failures = [failure]
    driver.is_slow = True
    errors: list[BaseException] = []

    async def branch(name: str) -> None:
        record(history, name)
        try:
            await committer.commit()
        except CommitUnknownError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(branch, "in the batch")
        await driver.until_writing()
        nursery.start_soon(branch, "waiting")
        await driver.until_writing()
        driver.is_slow = False
        driver.let_through()
    record(history, "after")
    with pytest.raises(CommitUnknownError) as caught:
        await committer.commit()
    errors.append(caught.value)
    with pytest.raises(CommitUnknownError):
        await committer.commit_alone(Batch(deletes=[b"x"]))
    assert len(errors) == 3
    assert all(error is committer.broken for error in errors)
    assert len(driver.batches) == 2, "something was sent after the failure"
    stored = await reloaded(driver)
    assert sleeps(stored) == {("before",)} | ({("in the batch",)} if failure == "written" else set())
    again = Committer(driver, stored.pending)
    record(stored, "in the batch", "waiting")
    await again.commit()
    assert sleeps(await reloaded(driver)) == {("before",), ("in the batch",), ("waiting",)}


async def test_cancellation_does_not_interrupt_a_commit(driver: TroubledDriver) -> None:
    """S15: neither the one that writes nor the one that waits for it; what was recorded is durable."""
    driver.is_slow = True
    history = History("w")
    committer = Committer(driver, history.pending)
    scopes: list[trio.CancelScope] = []

    async def branch(name: str) -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            record(history, name)
            await committer.commit()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(branch, "writing")
        await driver.until_writing()
        nursery.start_soon(branch, "waiting")
        await driver.until_writing()
        for scope in scopes:
            scope.cancel()
        await driver.until_writing()
        driver.let_through()
        await driver.until_writing()
        driver.let_through()
    assert sleeps(await reloaded(driver)) == {("writing",), ("waiting",)}
    assert committer.is_clean


async def test_a_batch_of_its_own_leaves_what_is_pending(driver: TroubledDriver) -> None:
    """S15: written between others, it neither carries nor loses what is dirty."""
    driver.is_slow = True
    history = History("w")
    committer = Committer(driver, history.pending)
    record(history, "a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(committer.commit)
        await driver.until_writing()
        record(history, "b")
        nursery.start_soon(committer.commit_alone, Batch(puts=[(layout.IDLE_ACTIVATIONS_KEY, layout.encode_u64(7))]))
        await driver.until_writing()
        assert len(driver.batches) == 1, "two batches at once"
        driver.let_through()
        await driver.until_writing()
        driver.let_through()
    assert not committer.is_clean
    stored = await reloaded(driver)
    assert sleeps(stored) == {("a",)}
    assert stored.idle_activations == 7
    driver.is_slow = False
    await committer.commit()
    assert sleeps(await reloaded(driver)) == {("a",), ("b",)}


async def test_a_dying_process_breaks_the_committer(namespace: Namespace) -> None:
    """S15: what is not an exception of the storage counts as unknown as well."""
    driver = await namespace.driver()
    driver.die_at = (0, "after")
    history = History("w")
    committer = Committer(driver, history.pending)
    record(history, "a")
    for _ in range(2):
        with pytest.raises(SimulatedCrashError):
            await committer.commit()
    await namespace.restart()
    assert sleeps(await History.load("w", await namespace.driver())) == {("a",)}
    await namespace.close()


# The same, seen from a workflow.


@pytest.mark.parametrize("failure", ["refused", "lost", "written"])
async def test_a_workflow_whose_commit_failed_ends_its_run_and_goes_on_after_a_reload(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, failure: Failure
) -> None:
    """S15: the run ends with the storage's error, nothing more is written, and the store decides what runs again."""
    calls: list[str] = []

    async def effect(name: str) -> str:
        calls.append(name)
        return name

    async def workflow(ctx: Context, _: object) -> list[str]:
        return [await ctx.step(name, effect, name) for name in ("one", "two", "three")]

    troubled = TroubledDriver(await namespace.driver())
    troubled.batch = fail_at_step(troubled, "two", failure)  # type: ignore[method-assign]
    async with host(namespace, mode) as process:
        namespace._driver = troubled
        with pytest.raises((BatchRefusedError, CommitUnknownError)):
            await process.stop(workflow)
        assert calls == ["one", "two"]
        written = len(troubled.batches)
        await trio.sleep(100)
        assert len(troubled.batches) == written
        await process.restart()
        snapshot = await namespace.snapshot()
        assert snapshot.state is WorkflowState.RUNNING
        kept = ["one", "two"] if failure == "written" else ["one"]
        assert [entry.path[-1] for entry in snapshot.entries] == kept
        assert await process.finish(workflow) == ["one", "two", "three"]
    assert calls == ["one", "two", *(["two"] if failure != "written" else []), "three"]


def fail_at_step(driver: TroubledDriver, name: str, failure: Failure) -> Callable[[Batch], Awaitable[None]]:
    """Batches fail from the one on that records the step's name."""
    usual = driver.batch

    async def batch(batch: Batch) -> None:
        if any(value == name.encode() for _, value in batch.puts):
            driver.failures = [failure]
        await usual(batch)

    return batch


async def test_a_wrapper_that_delegates_sees_every_batch() -> None:
    """S38: `batch_nowait` counts only where the driver's own class has it, on every version of Python."""

    class Watching:
        def __init__(self, inner: MemoryDriver) -> None:
            self._inner = inner
            self.batches: list[Batch] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def batch(self, batch: Batch) -> None:
            self.batches.append(batch)
            await self._inner.batch(batch)

    watching = Watching(MemoryDriver())
    check_driver(watching)
    pending = Pending()
    committer = Committer(cast("Driver", watching), pending, is_alone=True)
    for number in range(20):
        pending.put(b"key", bytes([number]))
        await committer.commit()
    assert len(watching.batches) == 20
