"""What the engine's tests share: namespaces that survive a restart, a host for either mode, and crashes at every write.

1. A `Namespace` is the bytes of one workflow; `restart` is the death of the process: the driver in use goes dead first, so
   that nothing that still unwinds reaches the bytes, and a new driver is opened on them.
2. A `Host` does for one workflow what a process would, in yield or in live mode, in virtual time. `stop` is the common
   ground of both: run until the workflow has ended or waits.
3. `crashes` runs a scenario once without a crash, counts its writes, and again for every write with the process dying
   just before it and just after it; explored equals counted. Writes are counted over the restarts of a scenario's own.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Literal, NoReturn

import incarnations
import trio
import trio.testing

from perdure.storage import (
    Batch,
    BatchRefusedError,
    CodedDriver,
    CommitUnknownError,
    Driver,
    DriverClosedError,
    MemoryDriver,
    ValueCodec,
)
from perdure.storage.driver import nowait_batch
from perdure.storage.schema import EntryStatus
from perdure.storage.sqlite import SqliteDriver
from perdure.storage.sqlite_connection import Durability
from perdure.testing.scheduling import seeded_scheduling
from perdure.workflow import (
    Context,
    ErrorHook,
    HistoryEntry,
    HistoryHook,
    RunMode,
    TrioClock,
    Uuid7Generator,
    WorkflowFailedError,
    WorkflowHandle,
    WorkflowResult,
    WorkflowSnapshot,
    WorkflowState,
    control,
    load_snapshot,
    run_workflow,
    send_message,
    start_workflow,
)
from perdure.workflow.activation import Activation
from perdure.workflow.hooks import make_hooks

_numbers = count()

WORKFLOW_ID = "workflow-1"
"""The id of what a `Host` runs."""

DriverKind = Literal["memory", "sqlite"]
Function = Callable[[Context, Any], Awaitable[Any]]


class SimulatedCrashError(BaseException):
    """The process died here. A `BaseException`: nothing in the engine or in a workflow may handle it as an error."""


def scheduled(seed: int) -> AbstractContextManager[None]:
    """Trio runs what is runnable in random order; inside, in the same one each time, so that writes can be numbered."""
    return seeded_scheduling(seed)


class CrashingDriver:
    """A driver that counts writes and can die before or after one of them; dead, it lets nothing through.

    `on_write` is awaited after each write, if it is set. `is_recovery` if the process before died of such a death.
    """

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.writes = 0
        self.is_dead = False
        self.die_at: tuple[int, Literal["before", "after"]] | None = None
        self.has_crashed = False
        self.batches: list[Batch] = []
        self.on_write: Callable[[], Awaitable[None]] | None = None
        self.is_recovery = False

    @property
    def atomic_batch(self) -> bool:
        return self.inner.atomic_batch

    @property
    def value_bytes_max(self) -> int:
        return self.inner.value_bytes_max

    def die(self) -> None:
        """From here on nothing reaches the bytes."""
        self.is_dead = True

    def _check(self) -> None:
        if self.is_dead:
            raise SimulatedCrashError

    def _crash(self, when: Literal["before", "after"], batch: Batch | None) -> NoReturn:
        incarnations.record(when, self.batches, batch, again=self.is_recovery)
        self.has_crashed = True
        self.die()
        raise SimulatedCrashError

    async def _write(self, write: Callable[[], Awaitable[None]], batch: Batch | None = None) -> None:
        self._check()
        if self.die_at == (self.writes, "before"):
            self._crash("before", batch)
        await write()
        self.writes += 1
        if batch is not None:
            self.batches.append(batch)
        if self.die_at == (self.writes - 1, "after"):
            self._crash("after", batch)
        if self.on_write is not None:
            await self.on_write()

    async def get(self, key: bytes) -> bytes | None:
        self._check()
        return await self.inner.get(key)

    async def list(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        self._check()
        return await self.inner.list(prefix)

    async def set(self, key: bytes, value: bytes) -> None:
        await self._write(lambda: self.inner.set(key, value))

    async def delete(self, key: bytes) -> None:
        await self._write(lambda: self.inner.delete(key))

    async def delete_prefix(self, prefix: bytes) -> None:
        await self._write(lambda: self.inner.delete_prefix(prefix))

    async def delete_range(self, start: bytes, end: bytes) -> None:
        await self._write(lambda: self.inner.delete_range(start, end))

    async def batch(self, batch: Batch) -> None:
        await self._write(lambda: self.inner.batch(batch), batch)

    async def set_alarm(self, workflow_id: str, wake_at_ms: int) -> None:
        await self._write(lambda: self.inner.set_alarm(workflow_id, wake_at_ms))

    async def get_alarm(self, workflow_id: str) -> int | None:
        self._check()
        return await self.inner.get_alarm(workflow_id)

    async def clear_alarm(self, workflow_id: str) -> None:
        await self._write(lambda: self.inner.clear_alarm(workflow_id))

    async def aclose(self) -> None:
        await self.inner.aclose()


class PromptDriver(CrashingDriver):
    """The same for a driver that writes without waiting where it can, as drivers do outside of tests.

    With an `on_write`, which is awaited, it cannot; nor when a test has put a driver below that has no such way.
    """

    def batch_nowait(self, batch: Batch) -> bool:
        batch_nowait = nowait_batch(self.inner)
        if batch_nowait is None or self.on_write is not None:
            return False
        self._check()
        if self.die_at == (self.writes, "before"):
            self._crash("before", batch)
        if not batch_nowait(batch):
            return False
        self.batches.append(batch)
        self.writes += 1
        if self.die_at == (self.writes - 1, "after"):
            self._crash("after", batch)
        return True


class SlowDriver:
    """A driver whose batches take a while each, and are applied at the end of it."""

    def __init__(self, inner: Driver, batch_s: float = 1.0) -> None:
        self._inner = inner
        self._batch_s = batch_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def batch(self, batch: Batch) -> None:
        await trio.sleep(self._batch_s)
        await self._inner.batch(batch)


Fault = Literal["refused", "lost", "applied"]
"""A batch is refused; or its outcome is unknown, and it was not applied; or it was."""


class FaultyDriver:
    """A driver whose storage fails once, at the first batch that the test says is due."""

    def __init__(self, inner: Driver, fault: Fault, is_due: Callable[[Batch], bool]) -> None:
        self._inner = inner
        self._fault: Fault = fault
        self._is_due = is_due
        self.has_failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def batch(self, batch: Batch) -> None:
        if self.has_failed or not self._is_due(batch):
            await self._inner.batch(batch)
            return
        self.has_failed = True
        if self._fault == "refused":
            raise BatchRefusedError("refused by the test")
        if self._fault == "applied":
            await self._inner.batch(batch)
        await self._inner.aclose()
        raise CommitUnknownError("made unknown by the test")


class Namespace:
    """The bytes of one workflow, in memory or in a SQLite file.

    With `is_prompt`, batches are written without waiting where the driver can: no other task runs meanwhile. That is so in
    files and not in memory unless it is said, so that tests of both kinds go both ways. With a `codec`, user data is coded.

    Attributes:
        writes: How many writes the drivers that are closed by now made.
        has_crashed: Whether one of them died as `die_at` had told it to.
    """

    def __init__(
        self,
        kind: DriverKind,
        directory: Path,
        *,
        durability: Durability = "full",
        is_prompt: bool | None = None,
        codec: ValueCodec | None = None,
    ) -> None:
        self.kind = kind
        self._codec = codec
        self._is_prompt = kind == "sqlite" if is_prompt is None else is_prompt
        self._durability: Durability = durability
        self._path = directory / f"workflow-{next(_numbers)}.sqlite"
        self._data: dict[bytes, bytes] = {}
        self._driver: CrashingDriver | None = None
        self._die_at: tuple[int, Literal["before", "after"]] | None = None
        self.writes = 0
        self.has_crashed = False
        self._has_ever_crashed = False

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self._path

    async def driver(self) -> CrashingDriver:
        """The driver in use, opened if there is none."""
        if self._driver is None:
            self._driver = (PromptDriver if self._is_prompt else CrashingDriver)(await self.open_driver())
            self._driver.is_recovery = self._has_ever_crashed
            if self._die_at is not None:
                write, when = self._die_at
                self._driver.die_at = (write - self.writes, when)
        return self._driver

    async def open_driver(self) -> Driver:
        """Open a driver on the bytes."""
        driver: Driver
        if self.kind == "memory":
            driver = MemoryDriver(self._data)
        else:
            driver = await SqliteDriver.open(
                self._path, create=not self._path.exists(), durability=self._durability, commit_in="inline"
            )
        return driver if self._codec is None else CodedDriver(driver, self._codec, WORKFLOW_ID)

    async def die_at(self, write: int, when: Literal["before", "after"]) -> None:
        """Let the process die at the n-th write from now (from 0), whichever driver makes it; once only."""
        await self.close()
        self._die_at = (self.writes + write, when)
        self.has_crashed = False

    def spare(self) -> None:
        """Let the process live that was to die at a write, and never made it."""
        self._die_at = None

    async def restart(self) -> CrashingDriver:
        """The process dies, and another opens the namespace."""
        await self.close()
        return await self.driver()

    def kill(self) -> NoReturn:
        """For a step's function: the process dies here. Nothing that unwinds reaches the bytes."""
        assert self._driver is not None, "somebody runs the workflow"
        incarnations.record("between", (), None)
        self._driver.die()
        raise SimulatedCrashError

    async def close(self) -> None:
        """Let nothing through any more, and close."""
        if self._driver is not None:
            self.writes += self._driver.writes
            if self._driver.has_crashed:
                self.has_crashed, self._die_at = True, None
                self._has_ever_crashed = True
            self._driver.die()
            await self._driver.inner.aclose()
            self._driver = None

    async def dump(self) -> dict[bytes, bytes]:
        """All pairs."""
        return dict(await (await self.driver()).list(b""))

    async def snapshot(self) -> WorkflowSnapshot:
        """What is stored."""
        return await load_snapshot(await self.driver())

    async def entries(self) -> dict[tuple[str | int, ...], HistoryEntry]:
        """The stored history, by path."""
        return {entry.path: entry for entry in (await self.snapshot()).entries}

    async def attempts(self, *path: str | int) -> tuple[EntryStatus, int]:
        """The stored status and attempts of the step at a path."""
        metadata = (await self.entries())[path].metadata
        assert metadata is not None, "steps have metadata"
        return metadata.status, metadata.attempts


class MovableClock(TrioClock):
    """Virtual wall-clock time that can also be set, like the clock of a machine; waits look again when it is."""

    def __init__(self, epoch_ms: int = 1_700_000_000_000) -> None:
        super().__init__(epoch_ms)
        self._offset_ms = 0
        self._moved = trio.Event()

    def now_ms(self) -> int:
        return super().now_ms() + self._offset_ms

    def move(self, seconds: float) -> None:
        """Set the clock forward, or back with a negative number."""
        self._offset_ms += round(seconds * 1000)
        self._moved.set()
        self._moved = trio.Event()

    async def wait_until_ms(self, deadline_ms: int) -> None:
        await trio.lowlevel.checkpoint()
        while (remaining_ms := deadline_ms - self.now_ms()) > 0:
            with trio.move_on_after(remaining_ms / 1000):
                await self._moved.wait()


@dataclass
class Host:
    """Runs one workflow as a process would; use it with `async with`."""

    namespace: Namespace
    mode: RunMode
    workflow_id: str = WORKFLOW_ID
    clock: MovableClock = field(default_factory=MovableClock)
    seed: int = 1
    on_history_updated: HistoryHook | None = None
    on_error: ErrorHook | None = None
    deadline: Any = None
    handle: WorkflowHandle | None = None
    _nursery: trio.Nursery | None = None
    _manager: Any = None
    _life: trio.Nursery | None = None
    _life_over: trio.Event = field(default_factory=trio.Event)
    _is_restarting: bool = False

    def _hooks(self) -> dict[str, Any]:
        return {"on_history_updated": self.on_history_updated, "on_error": self.on_error, "deadline": self.deadline}

    def ids(self) -> Uuid7Generator:
        self.seed += 1
        return Uuid7Generator(self.clock, random.Random(self.seed))

    async def __aenter__(self) -> Host:
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        assert self._nursery is not None
        if self.namespace._driver is not None:
            self.namespace._driver.die()
        self._nursery.cancel_scope.cancel()
        try:
            await self._manager.__aexit__(*error)
        except BaseExceptionGroup as group:
            _, rest = group.split(SimulatedCrashError)
            if rest is not None:
                if rest.exceptions == (error[1],):
                    return  # the body's own error leaves as itself
                raise
            if error[0] is not None:
                # All that the body saw of the crash was our nursery's cancellation, which must not leave it.
                raise SimulatedCrashError from None
        finally:
            await self.namespace.close()

    async def stop(self, fn: Function, input: object = None) -> WorkflowResult:
        """Run until the workflow ended or waits; raises what `run_workflow` raises."""
        driver = await self.namespace.driver()
        if self.mode == "yield":
            return await run_workflow(
                self.workflow_id, fn, input, driver, clock=self.clock, ids=self.ids(), **self._hooks()
            )
        if self.handle is None:
            assert self._nursery is not None
            if self._life is None:
                self._life = await self._nursery.start(self._live)
            self.handle = await start_workflow(
                self._life, self.workflow_id, fn, input, driver, clock=self.clock, ids=self.ids(), **self._hooks()
            )
        return await self._settled()

    async def _live(self, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """One life of the process in live mode, from a restart to the next."""
        self._life_over = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                task_status.started(nursery)
                await trio.sleep_forever()
        except BaseExceptionGroup as group:
            if not (self._is_restarting and is_crash(group)):
                raise  # it died by itself, and takes the host with it
        finally:
            self._life_over.set()

    async def _settled(self) -> WorkflowResult:
        assert self.handle is not None
        await trio.testing.wait_all_tasks_blocked()
        activation: Activation = self.handle._activation  # type: ignore[attr-defined]
        if activation.is_running and activation.closing is None:
            if not activation._is_quiet():  # a step's function or a commit is in progress
                state = activation.history.state
                return WorkflowResult(WorkflowState.RUNNING if state.is_terminal else state)
            wait = activation._merged_wait()
            sleep_until = None if wait.deadline_ms is None else wait.deadline_ms / 1000
            waiting = ("*",) if wait.names is None else (tuple(sorted(wait.names)) or None)
            return WorkflowResult(activation.history.state, None, sleep_until, waiting)
        return WorkflowResult(WorkflowState.COMPLETED, await self.handle.result())

    async def restart(self) -> None:
        """The process dies here: whatever unwinds reaches nothing, and the namespace is opened anew."""
        incarnations.record("between", (), None)
        if self.namespace._driver is not None:
            self.namespace._driver.die()
        if self._life is not None:
            self._is_restarting = True
            self._life.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await self._life_over.wait()
            self._life = None
            self._is_restarting = False
        self.handle = None
        await self.namespace.restart()

    async def evict(self) -> None:
        """Live mode: evict the workflow; the next `stop` activates it anew, in the same process."""
        if self.handle is not None:
            await self.handle.evict()
            self.handle = None

    async def run_and_leave(self, fn: Function, after_s: float) -> float:
        """Run the workflow for a time, then evict it or, in yield mode, cancel whoever runs it; the seconds that this took."""
        async with trio.open_nursery() as runner:
            runner.start_soon(self.stop, fn)
            await self.advance(after_s)
            left_s = trio.current_time()
            await self.evict()
            runner.cancel_scope.cancel()
        return trio.current_time() - left_s

    async def advance(self, seconds: float) -> None:
        """Let time pass (under a `MockClock`)."""
        await trio.sleep(seconds)
        await trio.testing.wait_all_tasks_blocked()

    async def send(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """Send a message, to the running workflow or into its namespace."""
        if self.handle is not None:
            await self.handle.message(name, body, id=id)
        else:
            await send_message(await self.namespace.driver(), name, body, id=id, clock=self.clock)

    async def finish(self, fn: Function, input: object = None) -> Any:
        """Run to the end, letting time pass where the workflow sleeps; returns its output."""
        while True:
            result = await self.stop(fn, input)
            if result.state is WorkflowState.COMPLETED:
                return result.output
            if result.sleep_until is None and result.waiting_for_messages is None:
                # Live mode, and a step's function or a commit waits for something: let time pass to whatever is due next.
                pause_s = trio.lowlevel.current_statistics().seconds_to_next_deadline
                assert pause_s != inf, "a step's function waits for ever"
                await self.advance(max(0.0, pause_s))
                continue
            if result.sleep_until is None:
                raise AssertionError(f"the workflow waits for {result.waiting_for_messages}, which nobody sends")
            # At least a millisecond: wall-clock milliseconds are rounded, and may show a deadline just before it is reached.
            await self.advance(max(0.001, result.sleep_until - self.clock.now_ms() / 1000))

    async def ended(self, fn: Function, input: object = None) -> Any:
        """Run to the end and return the output; time, messages and threads are somebody else's to move."""
        result = await self.stop(fn, input)
        while self.mode == "yield" and result.state is not WorkflowState.COMPLETED:
            assert result.sleep_until is not None, "the workflow waits for a message"
            await self.clock.wait_until_ms(round(result.sleep_until * 1000))
            result = await self.stop(fn, input)
        return result.output if self.handle is None else await self.handle.result()

    async def down(self) -> None:
        """Leave the namespace to somebody else; there is nothing to leave here."""

    async def control(self, action: Literal["wake", "cancel", "recover"]) -> None:
        """Do to the workflow what its handle does, running or not."""
        if self.handle is not None:
            await getattr(self.handle, action)()
            return
        hooks = make_hooks(self.on_history_updated, self.on_error)
        activation = await Activation.load(
            self.workflow_id, await self.namespace.driver(), clock=self.clock, hooks=hooks
        )
        await getattr(control, action)(activation)


@dataclass(frozen=True, slots=True)
class Crash:
    """Where a process is to die: at its n-th write (from 0), before or after it is durable.

    Attributes:
        again: Where the one that recovers is to die: before or after a write of its own; `None` if it lives.
        again_write: Which of its writes that is: the first unless all have their turn.
    """

    write: int
    when: Literal["before", "after"]
    again: Literal["before", "after"] | None = None
    again_write: int = 0


@dataclass
class Exploration:
    """What `crashes` counted and explored."""

    counted: int
    explored: list[Crash]


async def crashes(
    scenario: Callable[[Namespace], Awaitable[Any]],
    make_namespace: Callable[[], Namespace],
    check: Callable[[Any, Namespace, Crash | None], Awaitable[None]],
    *,
    is_twice: bool = False,
    is_twice_everywhere: bool = False,
    seed: int = 1,
) -> Exploration:
    """Run a scenario without a crash, then with one before and after each of its writes, and check each end.

    Up to the crash all is in the same order each time, since branches share batches as the scheduler has it.

    Args:
        scenario: Runs a workflow on a namespace to its end and returns what is to be checked. It is called again after a
            crash, on the same bytes, and must carry on as a new process would.
        make_namespace: Makes an empty namespace.
        check: Looks at what the scenario returned and at the namespace; raises if it is not right.
        is_twice: Explore each crash once more with another one, at the first write of the recovery from it: after that
            write where the first crash was before its own, and the other way round.
        is_twice_everywhere: Then explore each crash also with another one after each write of the recovery, to its end.
        seed: Of the scheduler.
    """
    namespace = make_namespace()
    with scheduled(seed):
        outcome = await scenario(namespace)
    await check(outcome, namespace, None)
    await namespace.close()
    counted = namespace.writes
    explored: list[Crash] = []
    for write in range(counted):
        crash_points = [Crash(write, "before"), Crash(write, "after")]
        if is_twice:
            crash_points += [Crash(write, "before", "after"), Crash(write, "after", "before")]
        for crash in crash_points:
            await _explore(scenario, make_namespace, check, crash, seed)
            explored.append(crash)
    assert len(explored) == (4 if is_twice else 2) * counted, "explored equals counted"
    for crash in list(explored) if is_twice_everywhere else ():
        if crash.again is None:
            for again_write in count():
                twice = Crash(crash.write, crash.when, "after", again_write)
                if not await _explore(scenario, make_namespace, check, twice, seed):
                    break  # the recovery makes fewer writes
                explored.append(twice)
    incarnations.record_write_points(counted)
    return Exploration(counted, explored)


async def _explore(
    scenario: Callable[[Namespace], Awaitable[Any]],
    make_namespace: Callable[[], Namespace],
    check: Callable[[Any, Namespace, Crash | None], Awaitable[None]],
    crash: Crash,
    seed: int,
) -> bool:
    """Run a scenario with a crash, and check its end; whether a second crash, if it has one, was reached."""
    namespace = make_namespace()
    await namespace.die_at(crash.write, crash.when)
    with scheduled(seed):
        await _run_to_death(scenario, namespace)
    await namespace.close()
    assert namespace.has_crashed, f"{crash} was never reached"
    if crash.again is not None:
        await namespace.die_at(crash.again_write, crash.again)
        await _run_to_death(scenario, namespace)  # or to the end, where nothing is left to write
        namespace.spare()
    await namespace.restart()
    was_reached = namespace.has_crashed
    outcome = await scenario(namespace)
    await check(outcome, namespace, crash)
    await namespace.close()
    return was_reached


async def _run_to_death(scenario: Callable[[Namespace], Awaitable[Any]], namespace: Namespace) -> None:
    try:
        await scenario(namespace)
    except BaseException as error:
        if not is_crash(error):
            raise


def is_crash(error: BaseException) -> bool:
    """Whether it is nothing but the death of the process."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_crash(part) for part in error.exceptions)
    return isinstance(error, SimulatedCrashError | DriverClosedError)


@asynccontextmanager
async def host(namespace: Namespace, mode: RunMode, **options: Any) -> AsyncIterator[Host]:
    """A `Host` whose end is an ordinary exit of its nursery; in the tests' own mode `hosted`, one with a supervisor."""
    if str(mode) == "hosted":
        from hosted import HostedHost

        made: Host = HostedHost(namespace, mode, **options)
    else:
        made = Host(namespace, mode, **options)
    async with made as running:
        yield running


__all__ = [
    "Crash",
    "CrashingDriver",
    "DriverKind",
    "Exploration",
    "Fault",
    "FaultyDriver",
    "Host",
    "MovableClock",
    "Namespace",
    "PromptDriver",
    "SimulatedCrashError",
    "SlowDriver",
    "WorkflowFailedError",
    "crashes",
    "host",
    "is_crash",
    "scheduled",
]
