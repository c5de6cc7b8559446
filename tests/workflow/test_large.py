"""Large workflows: what an operation costs does not depend on what is recorded.

Work is measured, not time: what each batch carries, how often history is walked, what stays in memory and in the file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from harness import CrashingDriver, DriverKind, Host, Namespace, host
from trio.testing import MockClock

from perdure.storage import Batch, Driver, commit_batch
from perdure.storage.schema import MailboxMessage
from perdure.storage.sqlite import SqliteDriver
from perdure.workflow import Break, Context, Continue, RunMode, WorkflowState
from perdure.workflow.activation import Activation
from perdure.workflow.history import History, Node
from perdure.workflow.mailbox import Mailbox
from perdure.workflow.pending import Pending

calls: list[int] = []


class UnsyncedNamespace(Namespace):
    """A namespace whose file is not synced at every commit: it is the work that is measured here, not the disk."""

    async def open_driver(self) -> Driver:
        if self.kind == "memory":
            return await super().open_driver()
        return await SqliteDriver.open(
            self.path, create=not self.path.exists(), commit_in="inline", durability="normal"
        )


@pytest.fixture
async def namespace(driver_kind: DriverKind, tmp_path: Path) -> AsyncIterator[Namespace]:
    """An empty namespace on the driver under test."""
    namespace = UnsyncedNamespace(driver_kind, tmp_path)
    yield namespace
    await namespace.close()


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def effect(number: int) -> int:
    calls.append(number)
    return 1_000_000 + number


def shape(batch: Batch) -> tuple[int, ...]:
    """What a batch costs: puts, their values' bytes, deletions of each kind."""
    values = sum(len(value) for _, value in batch.puts)
    return len(batch.puts), values, len(batch.deletes), len(batch.delete_prefixes), len(batch.delete_ranges)


class Unscannable(dict[Any, Any]):
    """A dict for look-ups only: going through it is a scan of history."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("history was scanned")

    __iter__ = __reversed__ = keys = values = items = copy = __or__ = __ror__ = _refuse  # type: ignore[assignment]


def forbid_scans(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> History:
    """From here on, nothing may go through what is recorded in the scope of this context."""
    activation: Activation = ctx._scope.activation
    history = activation.history
    history.root.children = Unscannable(history.root.children)
    history._metadata = Unscannable(history._metadata)
    history._details = Unscannable(history._details)
    history._numbers = Unscannable(history._numbers)

    def refuse(_: object) -> Iterator[Any]:
        raise AssertionError("history was scanned")

    monkeypatch.setattr(Node, "walk", refuse)
    monkeypatch.setattr(History, "entries", refuse)
    return history


STEPS = 20_000


async def test_the_last_of_20000_steps_costs_what_the_first_did(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11: a flush is as large as what changed, and nothing goes through history, when recording and when replaying."""
    # Most are ephemeral, so that the disk is not what takes the time; around the two places every step is durable.
    durable = {*range(90, 111), *range(1_000, STEPS, 1_000), *range(STEPS - 20, STEPS)}

    async def workflow(ctx: Context, _: object) -> None:
        with monkeypatch.context() as patch:
            forbid_scans(ctx, patch)
            for number in range(STEPS):
                name = f"step-{number:05}"
                assert await ctx.step(name, effect, number, ephemeral=number not in durable) == 1_000_000 + number
        await ctx.sleep("wait", 60)

    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        assert (await process.stop(workflow)).state is WorkflowState.SLEEPING
        early, late = (batch_with(driver, f"step-{number:05}") for number in (100, STEPS - 2))
        assert shape(early) == shape(late)
        assert len(early.puts) == 3, "a step writes its name, its entry and its metadata"
        for batch in (early, late):
            assert sum(len(key) for key, _ in batch.puts) <= 60
        assert len(driver.batches) <= len(durable) + 3
        assert calls == list(range(STEPS))
        await process.restart()
        driver = await namespace.driver()
        await process.stop(workflow)
        assert driver.batches == [], "replay wrote something"
    assert len(calls) == STEPS


def batch_with(driver: CrashingDriver, name: str) -> Batch:
    """The batch that registered a name."""
    return next(batch for batch in driver.batches if any(value == name.encode() for _, value in batch.puts))


ITERATIONS = 100_000
INTERVAL = 500
KEPT = 20


async def test_a_loop_of_100000_iterations_stays_bounded(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S12: namespace, file and memory stay as they are, and pruning costs the same at any iteration."""
    sizes: list[tuple[int, ...]] = []
    files: list[int] = []

    async def workflow(ctx: Context, _: object) -> int:
        history = ctx._scope.activation.history
        driver = await namespace.driver()

        async def body(inner: Context, state: int) -> Continue[int] | Break[int]:
            number = state - 1_000_000
            if number % 50 == 0 or number % 50_000 < 3_000:
                await inner.step("work", effect, number, ephemeral=True)
            if number % 50_000 in (2_000, 10_000, 30_000):
                stored = await driver.list(b"")
                in_memory = sum(1 for _ in history.root.walk())
                sizes.append((number % 50_000, len(stored), in_memory, len(history._metadata), len(history.names)))
                if namespace.kind == "sqlite":
                    files.append(namespace.path.stat().st_size)
            return Continue(state + 1) if number < ITERATIONS - 1 else Break(number)

        return await ctx.loop("loop", body, 1_000_000, history_prune_interval=INTERVAL, history_size=KEPT)

    async with host(namespace, mode) as process:
        driver = await namespace.driver()
        assert await process.finish(workflow) == ITERATIONS - 1
        pruning = [batch for batch in driver.batches if batch.delete_ranges]
        at_end = await namespace.dump()
    assert len(pruning) == ITERATIONS // INTERVAL, "pruned once an interval, the last time as it ended"
    # Every iteration around both of these recorded a step: at 2,000 and at 52,000, and thinly at 10,000 and 99,500.
    for early, late in ((2_000, 52_000), (10_000, 99_500)):
        first, last = (pruning[number // INTERVAL - 1] for number in (early, late))
        assert shape(first) == shape(last)
        assert len(first.puts) <= 3 * KEPT + 3
    halves = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
    assert len(halves[0]) == 3
    assert halves[0] == halves[1], "something grew"
    assert len(at_end) <= 3 * KEPT + 20
    assert len(set(files[1:])) <= 1, f"the file grew: {files}"


READS = 5_000


async def fill_mailbox(process: Host, names: list[str]) -> None:
    """Put messages into the mailbox of a workflow that has not begun, in one batch."""
    pending = Pending()
    mailbox = Mailbox(pending)
    for number, name in enumerate(names):
        message = MailboxMessage(f"id-{number:05}", name, b"\x1a" + number.to_bytes(4, "big"), process.clock.now_ms())
        mailbox.write(message, remember=False)
    await commit_batch(await process.namespace.driver(), pending.take())


async def test_5000_queue_waits_in_one_workflow_are_linear(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S13: each wait costs what the first did, when it is recorded and when it is replayed; no recursion."""
    seen: list[int] = []

    async def workflow(ctx: Context, _: object) -> None:
        seen.clear()
        with monkeypatch.context() as patch:
            forbid_scans(ctx, patch)
            for number in range(READS):
                message = await ctx.queue.next(f"read-{number:04}", names=[f"name-{number % 7}"], timeout=60)
                seen.append(message.body)
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode) as process:
        await fill_mailbox(process, [f"name-{number % 7}" for number in range(READS)])
        driver = await namespace.driver()
        driver.batches.clear()
        assert (await process.stop(workflow)).state is WorkflowState.SLEEPING
        assert seen == list(range(READS))
        early, late = (batch_with(driver, f"read-{number:04}:count") for number in (100, READS - 2))
        assert shape(early) == shape(late)
        assert len(driver.batches) <= READS + 3
        assert sum(len(batch.puts) for batch in driver.batches) <= len(early.puts) * READS + 20
        await process.restart()
        driver = await namespace.driver()
        await process.stop(workflow)
        assert seen == list(range(READS))
        assert driver.batches == [], "replay wrote something"
        await process.send("go")
        await process.finish(workflow)


async def test_5000_waits_that_really_wait_cost_the_same_in_live_mode(
    namespace: Namespace, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S13: parking and waking does not go through what is recorded; the function is not run again."""
    runs: list[int] = []
    waits = 1_000

    async def workflow(ctx: Context, _: object) -> int:
        runs.append(1)
        forbid_scans(ctx, monkeypatch)
        for number in range(waits):
            await ctx.queue.next(f"read-{number:04}", names=["tick"], timeout=3_600)
        return waits

    async with host(namespace, "live") as process:
        await process.stop(workflow)
        driver = await namespace.driver()
        for _ in range(waits):
            await process.send("tick")
            await process.advance(1)
        monkeypatch.undo()
        assert await process.finish(workflow) == waits
        early, late = (batch_with(driver, f"read-{number:04}:count") for number in (100, waits - 2))
        assert shape(early) == shape(late)
        assert len(driver.batches) <= 3 * waits + 3
    assert runs == [1]


async def test_one_read_of_5000_messages_is_one_batch(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S13: taken, recorded and replayed together, in the order they were sent."""
    seen: list[list[int]] = []

    async def workflow(ctx: Context, _: object) -> int:
        messages = await ctx.queue.next_batch("all", count=READS)
        seen.append([message.body for message in messages])
        await ctx.queue.next("wait", names=["go"])
        return len(messages)

    async with host(namespace, mode) as process:
        await fill_mailbox(process, [f"name-{number % 7}" for number in range(READS + 1)])
        driver = await namespace.driver()
        driver.batches.clear()
        await process.stop(workflow)
        (reading,) = [batch for batch in driver.batches if batch.deletes]
        assert len(reading.deletes) == READS
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == READS
    assert seen[0] == seen[1] == list(range(READS))
