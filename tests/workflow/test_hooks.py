"""`on_history_updated` and `on_error`: told of what is durable, once, and changing nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import trio
from harness import Crash, DriverKind, FaultyDriver, Function, Namespace, SimulatedCrashError, crashes, host
from trio.testing import MockClock

from perdure.storage import Batch, CommitUnknownError, Driver, MemoryDriver, layout
from perdure.storage.sqlite import SqliteDriver
from perdure.workflow import (
    Break,
    Context,
    Continue,
    CriticalError,
    ErrorEvent,
    ErrorInfo,
    HistoryEntry,
    HistoryUpdated,
    InvalidArgumentError,
    RollbackContext,
    RollbackErrorEvent,
    RunMode,
    StepErrorEvent,
    StepExhaustedError,
    TrioClock,
    UserCancellationError,
    WorkflowCancelledError,
    WorkflowErrorEvent,
    WorkflowFailedError,
    WorkflowState,
    current_step,
    hooks,
    run_workflow,
    start_workflow,
)
from perdure.workflow.history import History, Node
from perdure.workflow.hooks import make_hooks
from perdure.workflow.watch import Watch

Path = tuple[str | int, ...]

calls: list[Any] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def effect(value: Any = None) -> Any:
    calls.append(value)
    return value


class Failing:
    """A step's function that fails as often as it is told, then works; over restarts."""

    def __init__(self, times: int, error: type[Exception] = KeyError) -> None:
        self.left = times
        self.error = error
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error(f"failure {self.calls}")
        return "worked"


async def fail_once() -> str:
    if current_step().attempt == 1:
        raise KeyError("failure 1")
    return "worked"


class Mirror:
    """Follows a workflow by what a hook is told alone."""

    def __init__(self) -> None:
        self.events: list[HistoryUpdated] = []
        self.entries: dict[Path, HistoryEntry] = {}
        self.state = WorkflowState.PENDING

    def __call__(self, event: HistoryUpdated) -> None:
        self.events.append(event)
        for path in event.forgotten:
            self.entries = {at: entry for at, entry in self.entries.items() if at[: len(path)] != path}
        self.entries |= {entry.path: entry for entry in event.entries}
        self.state = event.state


async def flaky_branch(ctx: Context) -> str:
    return await ctx.step("flaky", fail_once, retry_backoff_base=0.5)


async def quick_branch(ctx: Context) -> list[int]:
    return [await ctx.step(f"quick {number}", effect, number) for number in range(3)]


async def slow_branch(ctx: Context) -> str:
    await ctx.step("begin", effect, "slow")
    await ctx.sleep("sleep", 5)
    return "slow"


async def everything(ctx: Context, _: object) -> str:
    """A bit of each primitive."""
    await one_by_one(ctx)
    await ctx.join("join", {"flaky": flaky_branch, "steps": quick_branch, "slow": slow_branch})
    await ctx.race("race", {"slow": slow_branch, "quick": quick_branch})
    await ctx.try_block("block", quick_branch)
    await ctx.sleep("sleep", 60)
    return "done"


async def one_by_one(ctx: Context) -> None:
    """A bit of each primitive without branches, whose order the scheduler chooses."""

    async def body(inner: Context, number: int) -> Continue[int] | Break[int]:
        await inner.step("work", effect, number)
        if number == 4:
            await inner.sleep("pause", 1)
        return Continue(number + 1) if number < 8 else Break(number)

    await ctx.get_version("version", 2)
    await ctx.step("first", effect, {"a": [1, 2]})
    await ctx.step("flaky", fail_once, retry_backoff_base=0.5)
    await ctx.removed("gone", "step")
    await ctx.loop("loop", body, 0, history_prune_interval=3, history_size=2)
    await ctx.now("time")
    await ctx.queue.next_batch("read", names=["early"], count=2, timeout=60)
    await ctx.queue.next_batch("late", names=["never"], timeout=1)


# on_history_updated.


async def test_what_is_told_adds_up_to_the_stored_history_and_state(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37: every change of an entry, branches included, every forgotten iteration and loser, every state, over restarts."""
    mirror = Mirror()
    async with host(namespace, mode, on_history_updated=mirror) as process:
        for body in ("one", "two", "three"):
            await process.send("early", body)
        while (result := await process.stop(everything)).state is not WorkflowState.COMPLETED:
            stored = await namespace.snapshot()
            assert (mirror.state, mirror.entries) == (stored.state, await namespace.entries())
            await process.restart()
            await process.advance(1)
            if result.sleep_until is not None:
                await process.advance(max(0.0, result.sleep_until - process.clock.now_ms() / 1000))
        assert mirror.entries == await namespace.entries()
        assert mirror.state is WorkflowState.COMPLETED
    assert {event.workflow_id for event in mirror.events} == {"workflow-1"}
    forgotten = [path for event in mirror.events for path in event.forgotten]
    assert forgotten == [*(("loop", number) for number in range(7)), ("race", "slow")]


async def test_an_event_holds_what_its_commit_changed_and_nothing_else(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37: cheap: never a copy of history, also not after a restart; and told only after the commit."""
    told: list[set[str]] = []

    def hook(event: HistoryUpdated) -> None:
        driver = namespace._driver
        assert driver is not None
        assert driver.writes == len(driver.batches), "told before it was durable"
        keys = {key for key, _ in driver.batches[-1].puts}
        written = {key for key in keys if key.startswith((layout.HISTORY_PREFIX, layout.METADATA_PREFIX))}
        ids = {entry.id for entry in event.entries}
        told.append(ids)
        assert len([key for key in written if key.startswith(layout.HISTORY_PREFIX)]) <= len(ids)
        assert {key for key in written if key.startswith(layout.METADATA_PREFIX)} <= set(map(layout.metadata_key, ids))

    async with host(namespace, mode, on_history_updated=hook) as process:
        await process.send("early")
        await process.stop(everything)
        await process.restart()
        before = len(told)
        known = {entry.id for entry in (await namespace.entries()).values()}
        await process.finish(everything)
        assert len(told) > before
    again = [ids for ids in told[before:] if ids & known]
    assert len(again) <= 4, "only what was unfinished changes again"
    assert sum(map(len, told)) < 90


async def test_events_of_the_drivers_own_quick_way_are_told_alike(
    driver_kind: DriverKind, mode: RunMode, tmp_path: Any, autojump_clock: MockClock
) -> None:
    """S37: a driver that commits without waiting is watched like one that does not."""
    driver: Driver = MemoryDriver()
    if driver_kind == "sqlite":
        driver = await SqliteDriver.open(tmp_path / "workflow.sqlite", create=True, commit_in="inline")
    mirror = Mirror()
    errors: list[ErrorEvent] = []

    async def workflow(ctx: Context, _: object) -> None:
        for number in range(30):
            await ctx.step(f"step {number}", effect, number)
        await ctx.step("flaky", Failing(1), retry_backoff_base=0.0)

    result = await run_workflow(
        "quick",
        workflow,
        None,
        driver,
        mode="live",
        on_history_updated=mirror,
        on_error=errors.append,
        clock=TrioClock(),
    )
    await driver.aclose()
    assert result.state is mirror.state is WorkflowState.COMPLETED
    assert list(mirror.entries) == [*((f"step {number}",) for number in range(30)), ("flaky",)]
    assert len(mirror.events) >= 32
    assert [type(error) for error in errors] == [StepErrorEvent]


class BusyDriver(MemoryDriver):
    """A driver before which somebody else always waits."""

    def batch_nowait(self, batch: Batch) -> bool:
        return False


async def test_a_commit_that_has_to_wait_after_all_is_told_once(mode: RunMode, autojump_clock: MockClock) -> None:
    """S37: a batch that could not be written at once takes what is to be told of it along."""
    mirror = Mirror()
    errors: list[ErrorEvent] = []

    async def workflow(ctx: Context, _: object) -> str:
        return await ctx.step("flaky", Failing(2), retry_backoff_base=0.0)

    driver = BusyDriver()
    while True:
        result = await run_workflow(
            "busy",
            workflow,
            None,
            driver,
            mode=mode,
            on_history_updated=mirror,
            on_error=errors.append,
            clock=TrioClock(),
        )
        if result.state.is_terminal:
            break
    assert mirror.state is WorkflowState.COMPLETED
    assert [event.attempt for event in errors if isinstance(event, StepErrorEvent)] == [1, 2]
    assert len(errors) == 2
    assert list(mirror.entries) == [("flaky",)]


async def test_telling_what_is_new_goes_through_no_history(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S37: cheap: what it costs to tell of a commit does not depend on the length of history, with a parked retry neither."""
    mirror = Mirror()
    walks: list[Node] = []
    walk = Node.walk

    def counted(node: Node) -> Iterator[Node]:
        walks.append(node)
        return walk(node)

    async def workflow(ctx: Context, _: object) -> None:
        for number in range(20):
            await ctx.step(f"step {number}", effect, number)
        await ctx.join("join", {"flaky": flaky_branch, "steps": quick_branch})
        await ctx.sleep("sleep", 60)

    async with host(namespace, mode, on_history_updated=mirror) as process:
        monkeypatch.setattr(Node, "walk", counted)
        await process.finish(workflow)
        monkeypatch.undo()
        assert walks == []
        assert mirror.entries == await namespace.entries()


async def test_a_wake_a_cancel_and_their_states_are_told(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S24, S32: what changes a workflow from outside is told as well; also a change of metadata alone."""
    mirror = Mirror()

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.sleep("sleep", 3600)
        await ctx.step("flaky", fail_once, retry_backoff_base=1800, retry_backoff_max=1800)
        await ctx.sleep("sleep again", 3600)

    async with host(namespace, mode, on_history_updated=mirror) as process:
        await process.stop(workflow)
        assert mirror.entries["sleep",].data["state"] == "pending"
        await process.control("wake")
        assert mirror.entries["sleep",].data["state"] == "interrupted"
        await process.stop(workflow)
        assert mirror.state is WorkflowState.SLEEPING
        metadata = mirror.entries["flaky",].metadata
        assert metadata is not None
        assert metadata.last_attempt_at_ms > 0
        told = len(mirror.events)
        await process.control("wake")
        (woken,) = [entry for event in mirror.events[told:] for entry in event.entries if entry.path == ("flaky",)][:1]
        assert woken.metadata is not None
        assert woken.metadata.last_attempt_at_ms == 0
        await process.stop(workflow)
        assert mirror.entries == await namespace.entries()
        await process.control("cancel")
        assert mirror.state is WorkflowState.CANCELLED
        assert mirror.events[-1].entries == ()


async def test_a_failed_workflow_and_its_recovery_are_told(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S36: the state `failed`, and the step that runs again."""
    mirror = Mirror()
    failing = Failing(1)

    async def workflow(ctx: Context, _: object) -> str:
        return await ctx.step("failing", failing, max_retries=0)

    async with host(namespace, mode, on_history_updated=mirror) as process:
        with pytest.raises(WorkflowFailedError):
            await process.finish(workflow)
        assert mirror.state is WorkflowState.FAILED
        await process.control("recover")
        assert mirror.entries["failing",].data == {"output": None, "error": None}
        assert await process.finish(workflow) == "worked"
        assert mirror.entries == await namespace.entries()
        assert mirror.state is WorkflowState.COMPLETED


async def test_mail_alone_is_no_change_of_history(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37: a message that nobody reads yet is in no history."""
    mirror = Mirror()

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.queue.next("wait", names=["go"])

    async with host(namespace, mode, on_history_updated=mirror) as process:
        await process.stop(workflow)
        told = len(mirror.events)
        await process.send("other")
        assert len(mirror.events) == told
        await process.send("go")
        await process.finish(workflow)
        assert len(mirror.events) > told


async def test_a_crash_at_any_write_tells_nothing_that_is_not_stored(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S39: a commit that a crash came before is not told; at most once, so one that it came after may not be either."""
    mirrors: list[Mirror] = []

    async def scenario(namespace: Namespace) -> Mirror:
        stored = await namespace.entries()
        mirror = Mirror()
        mirror.entries |= stored  # what a new process finds
        mirrors.append(mirror)
        async with host(namespace, mode, on_history_updated=mirror) as process:
            if not stored:
                await process.send("early")
            await process.finish(everything)
            assert mirror.entries == await namespace.entries()
        return mirror

    async def check(mirror: Mirror, namespace: Namespace, crash: Crash | None) -> None:
        stored = await namespace.entries()
        told = {entry.id for earlier in mirrors for event in earlier.events for entry in event.entries}
        forgotten = {path for earlier in mirrors for event in earlier.events for path in event.forgotten}
        assert mirror.entries == stored
        gone = {
            entry.path
            for earlier in mirrors
            for event in earlier.events
            for entry in event.entries
            if entry.id not in {kept.id for kept in stored.values()}
        }
        assert all(path[0] == "loop" or path[:2] == ("race", "slow") for path in gone), crash
        assert crash is not None or {path[:2] for path in gone} <= forgotten
        if crash is None:
            assert told >= {entry.id for entry in stored.values()}
        mirrors.clear()

    explored = await crashes(scenario, make_quick_namespace, check)
    assert explored.counted >= 12


# on_error.


def told(errors: Sequence[ErrorEvent]) -> list[tuple[Any, ...]]:
    """What matters of each event, in short."""
    short: list[tuple[Any, ...]] = []
    for event in errors:
        match event:
            case StepErrorEvent():
                short.append((event.step_name, event.attempt, event.will_retry, event.retry_delay, event.error.name))
            case _:
                short.append((type(event).__name__, event.error.name))
    return short


async def test_each_failed_attempt_is_told_once_and_not_again_on_later_runs(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S17: with its number, whether and when it is tried again, and the error as it is stored."""
    errors: list[ErrorEvent] = []
    failing = Failing(2)

    async def workflow(ctx: Context, _: object) -> str:
        async def body(inner: Context, _: None) -> Break[str]:
            return Break(await inner.step("flaky", failing, retry_backoff_base=0.5))

        worked = await ctx.loop("loop", body)
        await ctx.queue.next("wait", names=["go"])
        return worked

    async with host(namespace, mode, on_error=errors.append) as process:
        while (result := await process.stop(workflow)).sleep_until is not None:
            await process.restart()
            await process.advance(result.sleep_until - process.clock.now_ms() / 1000)
        await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == "worked"
    assert told(errors) == [("flaky", 1, True, 1.0, "KeyError"), ("flaky", 2, True, 2.0, "KeyError")]
    first = errors[0]
    assert isinstance(first, StepErrorEvent)
    assert (first.workflow_id, first.path, first.max_retries) == ("workflow-1", ("loop", 0, "flaky"), 3)
    assert first.error.message == "'failure 1'"
    assert "failure 1" in str(first.error.stack)


async def test_exhausted_retries_and_the_workflows_failure_are_told_once_each(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37: the workflow's failure is an event of its own kind; running a failed workflow again tells nothing."""
    errors: list[ErrorEvent] = []
    failing = Failing(5)

    async def workflow(ctx: Context, _: object) -> str:
        return await ctx.step("failing", failing, max_retries=1, retry_backoff_base=0.0)

    async with host(namespace, mode, on_error=errors.append) as process:
        for _ in range(3):
            with pytest.raises(WorkflowFailedError):
                await process.finish(workflow)
            await process.restart()
        expected = [
            ("failing", 1, True, 0.0, "KeyError"),
            ("failing", 2, False, None, "KeyError"),
            ("WorkflowErrorEvent", "StepExhaustedError"),
        ]
        assert told(errors) == expected
        failed = errors[-1]
        assert isinstance(failed, WorkflowErrorEvent)
        assert (failed.workflow_id, failed.error) == ("workflow-1", (await namespace.snapshot()).error)
        # recover() gives it a fresh count: these failures are new ones.
        await process.control("recover")
        with pytest.raises(WorkflowFailedError):
            await process.finish(workflow)
        assert told(errors) == expected * 2


async def test_a_failure_that_the_workflow_catches_is_a_steps_and_not_the_workflows(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37: nor is it told again when a replay raises it."""
    errors: list[ErrorEvent] = []

    async def workflow(ctx: Context, _: object) -> str:
        with pytest.raises(StepExhaustedError):
            await ctx.step("failing", Failing(9), max_retries=0)
        await ctx.queue.next("wait", names=["go"])
        return "caught"

    async with host(namespace, mode, on_error=errors.append) as process:
        for _ in range(3):
            await process.stop(workflow)
            await process.restart()
        await process.send("go")
        assert await process.finish(workflow) == "caught"
    assert told(errors) == [("failing", 1, False, None, "KeyError")]


async def hang() -> None:
    await trio.sleep_forever()


async def unstorable() -> object:
    return object()


@pytest.mark.parametrize(
    ("fn", "options", "expected"),
    [
        (Failing(1, CriticalError), {}, "CriticalError"),
        (unstorable, {}, "ValueEncodeError"),
        (hang, {"timeout": 5.0}, "StepTimeoutError"),
    ],
    ids=["critical", "unstorable", "timeout"],
)
async def test_a_failure_that_is_not_retried_says_so(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, fn: Any, options: dict[str, Any], expected: str
) -> None:
    """S37, S9, S19: critical errors, results that cannot be stored, timeouts."""
    errors: list[ErrorEvent] = []
    if isinstance(fn, Failing):
        fn = Failing(1, fn.error)

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.step("failing", fn, **options)

    async with host(namespace, mode, on_error=errors.append) as process:
        with pytest.raises(WorkflowFailedError):
            await process.finish(workflow)
    assert told(errors)[0] == ("failing", 1, False, None, expected)
    assert [type(event) for event in errors] == [StepErrorEvent, WorkflowErrorEvent]


async def test_a_timeout_that_is_retried_is_told_as_one_that_is(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S19: and its last one as the end."""
    errors: list[ErrorEvent] = []

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.step("hanging", hang, timeout=1.0, retry_on_timeout=True, max_retries=1, retry_backoff_base=1.0)

    async with host(namespace, mode, on_error=errors.append) as process:
        with pytest.raises(WorkflowFailedError):
            await process.finish(workflow)
    assert told(errors)[:2] == [
        ("hanging", 1, True, 2.0, "StepTimeoutError"),
        ("hanging", 2, False, None, "StepTimeoutError"),
    ]


async def test_an_unknown_outcome_is_told_by_the_run_that_finds_it(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S22: an `at_most_once` step in which the process died."""
    errors: list[ErrorEvent] = []

    async def die() -> None:
        namespace.kill()

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.step("once", die, at_most_once=True)

    with pytest.raises(SimulatedCrashError):
        async with host(namespace, mode, on_error=errors.append) as process:
            await process.stop(workflow)
    assert errors == []
    async with host(namespace, mode, on_error=errors.append) as process:
        with pytest.raises(WorkflowFailedError):
            await process.finish(workflow)
    assert told(errors)[0] == ("once", 1, False, None, "StepInterruptedError")


async def test_an_attempt_that_newer_code_does_not_retry_any_more_is_not_told_twice(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37: a failure is told once, also when another deployment decides otherwise about it."""
    errors: list[ErrorEvent] = []
    failing = Failing(9)

    def deployed(max_retries: int) -> Function:
        async def workflow(ctx: Context, _: object) -> None:
            await ctx.step("failing", failing, max_retries=max_retries, retry_backoff_base=60.0)

        return workflow

    async with host(namespace, mode, on_error=errors.append) as process:
        await process.stop(deployed(3))
        await process.restart()
        with pytest.raises(WorkflowFailedError):
            await process.finish(deployed(0))
    assert told(errors) == [
        ("failing", 1, True, 30.0, "KeyError"),
        ("WorkflowErrorEvent", "StepExhaustedError"),
    ]


@pytest.mark.parametrize("fault", ["refused", "lost", "applied"])
async def test_a_failure_whose_record_is_not_known_to_be_stored_is_not_told(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, fault: Any
) -> None:
    """S37, S21: it is told by the run that records it; one that was stored after all is not told again."""
    errors: list[ErrorEvent] = []
    failing = Failing(1)

    async def workflow(ctx: Context, _: object) -> str:
        return await ctx.step("failing", failing, retry_backoff_base=1.0)

    def is_due(batch: Batch) -> bool:
        return any(key.startswith(layout.HISTORY_PREFIX) for key, _ in batch.puts)

    faulty: Any = FaultyDriver(await namespace.driver(), fault, is_due)
    with pytest.raises((CommitUnknownError, Exception), match="by the test"):
        await run_workflow(
            "workflow-1", workflow, None, faulty, mode=mode, on_error=errors.append, clock=TrioClock(1_700_000_000_000)
        )
    assert errors == []
    failing.left = 0 if fault == "applied" else 1
    async with host(namespace, mode, on_error=errors.append) as process:
        await process.restart()
        assert await process.finish(workflow) == "worked"
    assert told(errors) == ([] if fault == "applied" else [("failing", 1, True, 2.0, "KeyError")])


async def test_a_failure_that_a_fault_dropped_is_not_told(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S31: a fault writes nothing, so the attempt never was; with right code it is made, and told."""
    errors: list[ErrorEvent] = []

    async def wrong(ctx: Context, _: object) -> None:
        with trio.move_on_after(3600):
            await ctx.step("failing", Failing(1), retry_backoff_base=1.0)

    async def right(ctx: Context, _: object) -> str:
        return await ctx.step("failing", Failing(0))

    async with host(namespace, mode, on_error=errors.append) as process:
        with pytest.raises(UserCancellationError):
            await process.stop(wrong)
        await process.restart()
        assert await process.finish(right) == "worked"
    assert errors == []


async def test_a_crash_at_any_write_tells_no_failure_twice(
    make_quick_namespace: Callable[[], Namespace], mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S39: without a crash each once; with one at most once, and only what is on record."""
    errors: list[ErrorEvent] = []

    async def fail() -> None:
        raise KeyError("always")

    async def workflow(ctx: Context, _: object) -> None:
        with pytest.raises(StepExhaustedError):
            await ctx.step("caught", fail, max_retries=1, retry_backoff_base=0.0)
        await ctx.sleep("sleep", 1)
        await ctx.step("failing", fail, max_retries=1, retry_backoff_base=0.5)

    async def scenario(namespace: Namespace) -> None:
        async with host(namespace, mode, on_error=errors.append) as process:
            with pytest.raises(WorkflowFailedError):
                await process.finish(workflow)

    async def check(_: object, namespace: Namespace, crash: Crash | None) -> None:
        seen = told(errors)
        assert len(seen) == len(set(seen)), f"{crash}: told twice"
        assert len(seen) == 5 if crash is None else len(seen) >= 3, crash
        for name in ("caught", "failing"):
            assert (await namespace.attempts(name))[1] == 2, crash
        errors.clear()

    explored = await crashes(scenario, make_quick_namespace, check)
    assert explored.counted >= 6


async def test_a_failure_of_a_races_loser_that_was_taken_back_with_it_is_not_told(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S29: what was recorded and then forgotten before it became durable never was; what was durable before was told."""
    errors: list[ErrorEvent] = []
    told_after: list[tuple[Any, ...]] = []

    async def early(ctx: Context) -> None:
        await ctx.step("early", Failing(9), retry_backoff_base=10.0)

    async def at_once(ctx: Context) -> None:
        await ctx.step("at once", Failing(9), retry_backoff_base=10.0)

    async def winner(ctx: Context) -> str:
        await ctx.sleep("sleep", 1)
        return "won"

    async def late(ctx: Context) -> None:
        await ctx.sleep("sleep", 1)
        await at_once(ctx)

    async def workflow(ctx: Context, _: object) -> str:
        result = await ctx.race("race", {"early": early, "late": late, "winner": winner})
        told_after.extend(told(errors))
        return str(result.value)

    async with host(namespace, mode, on_error=errors.append) as process:
        assert await process.finish(workflow) == "won"
        stored = {path for path in await namespace.entries() if path[0] == "race"}
    assert stored == {("race",), ("race", "winner", "sleep")}
    assert ("early", 1, True, 20.0, "KeyError") in told(errors)
    batches_with_late = [event for event in told(errors) if event[0] == "at once"]
    assert batches_with_late == [event for event in told_after if event[0] == "at once"], "told after the race was over"


def test_a_failure_whose_record_is_not_in_the_batch_is_dropped() -> None:
    """S37: only the failures that a batch records are told with it; one that it does not record was taken back."""
    errors: list[ErrorEvent] = []
    made = make_hooks(None, errors.append)
    assert made is not None
    watch = Watch(made, History("w"))
    for entry_id in ("kept", "taken back"):
        error = ErrorInfo("KeyError", entry_id)
        watch.note(StepErrorEvent("w", (entry_id,), entry_id, 1, 3, True, 0.2, error), entry_id)
    write = watch.watched(lambda batch: True)
    assert write(Batch(puts=[(layout.metadata_key("kept"), b"")]))
    assert write(Batch(puts=[(layout.metadata_key("taken back"), b"")]))
    assert [event.step_name for event in errors if isinstance(event, StepErrorEvent)] == ["kept"]


async def test_an_ended_workflow_tells_nothing_when_it_is_run_again(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S34: completed, failed and cancelled alike."""
    mirror = Mirror()
    errors: list[ErrorEvent] = []

    async def cancelled(ctx: Context, _: object) -> None:
        await ctx.sleep("sleep", 3600)

    async with host(namespace, mode, on_history_updated=mirror, on_error=errors.append) as process:
        await process.stop(cancelled)
        await process.control("cancel")
        before = len(mirror.events)
        await process.restart()
        with pytest.raises(WorkflowCancelledError):
            await process.stop(cancelled)
        assert (len(mirror.events), errors) == (before, [])


# What hooks do, and what they cannot do.


def raising(event: object) -> None:
    calls.append("told")
    raise RuntimeError("a bug in the hook")


async def raising_later(event: object) -> None:
    calls.append("told")
    await trio.lowlevel.checkpoint()
    raise RuntimeError("a bug in the hook")


async def raising_in_a_nursery(event: object) -> None:
    calls.append("told")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        raise RuntimeError("a bug in the hook")


async def give(event: object) -> None:
    calls.append("told")


def returning_a_coroutine(event: object) -> Any:
    calls.append("told")
    return give(event)


@pytest.mark.parametrize("hook", [raising, raising_later, raising_in_a_nursery, returning_a_coroutine])
async def test_hooks_that_raise_are_logged_and_nothing_else_changes(
    make_namespace: Callable[[], Namespace],
    mode: RunMode,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    hook: Any,
) -> None:
    """S37: the same bytes as without hooks, the same outcome, and a line in the log for each."""

    async def workflow(ctx: Context, _: object) -> None:
        await one_by_one(ctx)
        await ctx.step("failing", Failing(9), max_retries=1, retry_backoff_base=0.5)

    dumps: list[dict[bytes, bytes]] = []
    at_s = trio.current_time()
    for given in (None, hook):
        namespace = make_namespace()
        autojump_clock.jump(86400 * (len(dumps) + 1) + at_s - trio.current_time())  # both begin at one time of day
        clock_s = trio.current_time()
        calls.clear()
        caplog.clear()
        async with host(namespace, mode, on_history_updated=given, on_error=given) as process:
            process.clock.move(-clock_s)
            with pytest.raises(WorkflowFailedError, match="StepExhaustedError"):
                await process.finish(workflow)
            await trio.testing.wait_all_tasks_blocked()
            dumps.append({key: value for key, value in (await namespace.dump()).items() if key != layout.ERROR_KEY})
            error = (await namespace.snapshot()).error
            assert error is not None
            assert error.name == "StepExhaustedError"
    assert dumps[0] == dumps[1]
    logged = [record for record in caplog.records if "raised" in record.message]
    assert calls.count("told") == len(logged) >= 12
    assert {record.name for record in logged} == {"perdure.workflow"}
    assert {record.levelno for record in logged} == {logging.ERROR}
    assert {record.message.split()[0] for record in logged} == {"on_history_updated", "on_error"}
    assert all(record.exc_info for record in logged)


async def test_a_slow_coroutine_function_delays_no_commit_and_is_told_everything_in_order(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37: it lags behind, one event after another; a run returns once it has been told everything."""
    begun: list[int] = []
    done_at_s: list[float] = []
    mirror = Mirror()

    async def slow(event: HistoryUpdated) -> None:
        begun.append(len(mirror.events))
        mirror(event)
        await trio.sleep(10)
        assert begun[-1] == len(mirror.events) - 1, "another was begun meanwhile"

    async def workflow(ctx: Context, _: object) -> None:
        for number in range(5):
            await ctx.step(f"step {number}", effect, number)
        done_at_s.append(trio.current_time())

    begin_s = trio.current_time()
    result = await run_workflow(
        "slow", workflow, None, await namespace.driver(), mode=mode, on_history_updated=slow, clock=TrioClock()
    )
    assert result.state is WorkflowState.COMPLETED
    assert done_at_s == [begin_s]
    assert trio.current_time() - begin_s == 10 * len(mirror.events) >= 60
    assert mirror.entries == await namespace.entries()


async def test_cancelling_a_run_cancels_its_hooks_and_swallows_nothing(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37, S33: a hook that never ends does not hold an eviction, and the cancellation comes out."""
    seen: list[str] = []

    async def hook(event: HistoryUpdated) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            seen.append("cancelled")
            raise

    async def workflow(ctx: Context, _: object) -> str:
        await ctx.step("step", effect, "stepped")
        await ctx.sleep("sleep", 60)
        return "done"

    with trio.move_on_after(30) as scope:
        await run_workflow(
            "workflow-1",
            workflow,
            None,
            await namespace.driver(),
            mode="live",
            on_history_updated=hook,
            clock=TrioClock(),
        )
        seen.append("not reached")
    assert scope.cancelled_caught
    assert seen == ["cancelled"]
    async with host(namespace, mode) as process:
        await process.restart()
        assert await process.finish(workflow) == "done"
    assert calls == ["stepped"]


class Interruption(BaseException):
    """Stands for Ctrl-C and the like."""


def interrupting(event: object) -> None:
    raise Interruption


async def interrupting_later(event: object) -> None:
    await trio.lowlevel.checkpoint()
    raise Interruption


async def interrupting_in_a_nursery(event: object) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(interrupting_later, event)
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise RuntimeError("a bug in the hook") from None


@pytest.mark.parametrize("hook", [interrupting, interrupting_later, interrupting_in_a_nursery])
async def test_ctrl_c_in_a_hook_comes_out_of_the_run_as_itself(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, hook: Any
) -> None:
    """S37: what is meant for the program is not the hook's to raise and be logged; the workflow is evicted, and goes on."""

    async def workflow(ctx: Context, _: object) -> str:
        await ctx.step("step", effect, "stepped")
        await ctx.sleep("sleep", 60)
        return "done"

    driver = await namespace.driver()
    with pytest.raises(Interruption):
        await run_workflow("workflow-1", workflow, None, driver, mode=mode, on_history_updated=hook, clock=TrioClock())
    async with host(namespace, mode) as process:
        await process.restart()
        assert await process.finish(workflow) == "done"
    assert calls.count("stepped") == 1


async def test_what_a_run_raises_is_no_group_because_of_hooks(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37: with a coroutine function as a hook, faults come out as they do without."""

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.step("", effect)

    async def hook(event: object) -> None:
        await trio.sleep(1)

    with pytest.raises(InvalidArgumentError, match="must not be empty"):
        await run_workflow("w", workflow, None, await namespace.driver(), mode=mode, on_history_updated=hook)


async def test_a_hook_that_falls_too_far_behind_misses_the_oldest_events_and_the_log_says_so(
    namespace: Namespace,
    mode: RunMode,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S37: what waits for a slow hook is bounded, so it cannot fill the memory."""
    monkeypatch.setattr(hooks, "EVENTS_WAITING_MAX", 5)
    states: list[WorkflowState] = []
    paths: list[Path] = []

    async def slow(event: HistoryUpdated) -> None:
        states.append(event.state)
        paths.extend(entry.path for entry in event.entries)
        await trio.sleep(100)

    async def workflow(ctx: Context, _: object) -> None:
        for number in range(50):
            await ctx.step(f"step {number}", effect, number)

    await run_workflow(
        "slow", workflow, None, await namespace.driver(), mode=mode, on_history_updated=slow, clock=TrioClock()
    )
    assert len(states) <= 8
    assert paths[-1] == ("step 49",)
    assert states[-1] is WorkflowState.COMPLETED
    dropped = [record.message for record in caplog.records if "dropped" in record.message]
    assert len(dropped) == 1
    assert "on_history_updated" in dropped[0]


async def test_a_handle_whose_nursery_has_ended_works_without_its_hook(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """S37: a coroutine function has nowhere to run then; that is logged, and the commit is made."""

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.sleep("sleep", 3600)

    heard: list[WorkflowState] = []

    async def hook(event: HistoryUpdated) -> None:
        heard.append(event.state)

    async with trio.open_nursery() as nursery:
        handle = await start_workflow(
            nursery,
            "w",
            workflow,
            None,
            await namespace.driver(),
            mode=mode,
            on_history_updated=hook,
            clock=TrioClock(),
        )
        await trio.testing.wait_all_tasks_blocked()
        if mode == "live":
            await handle.evict()
    assert heard[-1] is WorkflowState.SLEEPING
    await handle.cancel()
    assert (await namespace.snapshot()).state is WorkflowState.CANCELLED
    assert [record for record in caplog.records if "not told any more" in record.message]


@pytest.mark.parametrize("argument", ["on_history_updated", "on_error"])
@pytest.mark.parametrize("given", ["text", 3, []])
async def test_what_is_no_function_is_refused(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, argument: str, given: Any
) -> None:
    """S37: before anything is run or written."""

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.step("step", effect)

    with pytest.raises(InvalidArgumentError, match=argument):
        await run_workflow("w", workflow, None, await namespace.driver(), mode=mode, **{argument: given})
    assert await namespace.dump() == {}


async def test_hooks_may_be_partials_and_objects(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock
) -> None:
    """S37: what is a coroutine function is known as for steps."""
    heard: list[str] = []

    async def listen(prefix: str, event: HistoryUpdated) -> None:
        await trio.lowlevel.checkpoint()
        heard.append(f"{prefix} {event.state.value}")

    class Listener:
        async def __call__(self, event: ErrorEvent) -> None:
            await trio.lowlevel.checkpoint()
            heard.append(type(event).__name__)

    async def workflow(ctx: Context, _: object) -> None:
        raise KeyError("x")

    with pytest.raises(WorkflowFailedError):
        await run_workflow(
            "w",
            workflow,
            None,
            await namespace.driver(),
            mode=mode,
            on_history_updated=partial(listen, "is"),
            on_error=Listener(),
        )
    assert sorted(heard) == ["WorkflowErrorEvent", "is failed"]


async def test_without_hooks_nothing_is_watched(namespace: Namespace, mode: RunMode, autojump_clock: MockClock) -> None:
    """S37: no cost where nobody listens: the committer is that of a run without hooks."""

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.sleep("sleep", 60)

    async with trio.open_nursery() as nursery:
        handle: Any = await start_workflow(
            nursery, "w", workflow, None, await namespace.driver(), mode=mode, clock=TrioClock()
        )
        assert handle._activation.watch is None
        assert handle._activation._committer._commit_batch.__module__ == "perdure.storage.split"
        await handle.cancel()


# Rollback.


async def fails(*_: object) -> None:
    raise CriticalError("beyond repair")


@pytest.mark.parametrize("times", [0, 2, 9])
async def test_failures_of_rollback_handlers_are_told_once_each_and_the_workflows_once(
    namespace: Namespace, mode: RunMode, autojump_clock: MockClock, times: int
) -> None:
    """S37, S35: the workflow's failure when it is recorded, before the rollback, then each failed attempt of a handler."""
    errors: list[ErrorEvent] = []
    mirror = Mirror()
    failing = Failing(times)

    async def undo(ctx: RollbackContext, output: object) -> None:
        await failing()

    async def workflow(ctx: Context, _: object) -> None:
        await ctx.rollback_checkpoint("checkpoint")
        await ctx.step("do", effect, "done", rollback=undo, max_retries=2, retry_backoff_base=0.5)
        await ctx.step("other", effect, "done", rollback=give_up_nothing)
        await ctx.step("failing", fails)

    async with host(namespace, mode, on_history_updated=mirror, on_error=errors.append) as process:
        for _ in range(12):
            try:
                result = await process.stop(workflow)
            except WorkflowFailedError:
                break
            assert result.state is WorkflowState.ROLLING_BACK
            stored = await namespace.snapshot()
            assert (mirror.state, mirror.entries) == (stored.state, await namespace.entries())
            await process.restart()
            if result.sleep_until is not None:
                await process.advance(max(0.001, result.sleep_until - process.clock.now_ms() / 1000))
        assert mirror.state is WorkflowState.FAILED
        assert mirror.entries == await namespace.entries()
        with pytest.raises(WorkflowFailedError):
            await process.stop(workflow)
    assert told(errors[:2]) == [("failing", 1, False, None, "CriticalError"), ("WorkflowErrorEvent", "CriticalError")]
    rollback = [
        (event.workflow_id, event.step_name, event.attempt, event.will_retry, event.error.name)
        for event in errors[2:]
        if isinstance(event, RollbackErrorEvent)
    ]
    assert len(rollback) == len(errors) - 2
    expected = [("workflow-1", "do", attempt, attempt < 3, "KeyError") for attempt in (1, 2, 3)]
    assert rollback == expected[:times]


async def give_up_nothing(ctx: RollbackContext, output: object) -> None:
    calls.append("undone")
