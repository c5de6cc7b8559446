"""One scenario, to be run again and again: a workflow, its input, what is sent to it, and how it comes to an end.

1. Every process does the same: it starts the workflow (which finds the one that is there), sends what was not acknowledged yet,
   under the ids that it had before, and waits until all workflows have ended. So does a program that is restarted.
2. What was acknowledged, and when it all began, is known outside: it outlives processes.
3. A run that would not end says what it waits for, instead of hanging: time is virtual, so patience costs nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import trio

from perdure.actors import Supervisor, WorkflowLike, WorkflowNotFoundError
from perdure.testing.amnesia import Amnesia
from perdure.testing.bridge import Link
from perdure.testing.disk import SimulatedDisk
from perdure.testing.errors import EndlessRunError
from perdure.testing.faults import CrashPoint, WritePoint
from perdure.testing.ledger import Effect, EffectLedger, ledgers_of
from perdure.testing.outline import Line, outline_of, shown, shown_path
from perdure.testing.simulation import Simulation, list_all
from perdure.workflow import (
    ErrorInfo,
    FaultError,
    HistoryEntry,
    InvalidArgumentError,
    WorkflowCancelledError,
    WorkflowEndedError,
    WorkflowFailedError,
    WorkflowHandle,
    WorkflowState,
)
from perdure.workflow.ids import repeatable_seeds

__all__ = ["Ending", "FinishedRun", "Mail", "Scenario"]


@dataclass(frozen=True, slots=True, repr=False)
class Mail:
    """A message that is sent to the workflow while it runs; again by the next process, until it is acknowledged.

    Attributes:
        name: Its name.
        body: Its body.
        at: How many seconds after the start it is sent, 0 or more. Messages go in order of time, then in the given order.
        id: Its id, which makes it one delivery however often it is sent; one of its own unless given.
        to: The id of the workflow that gets it; the explored one unless given.
    """

    name: str
    body: Any = None
    at: float = 0.0
    id: str | None = None
    to: str | None = None

    def __repr__(self) -> str:
        unusual = {"at": self.at or None, "id": self.id, "to": self.to}
        said = [f"{name}={value!r}" for name, value in unusual.items() if value is not None]
        return f"Mail({', '.join([repr(self.name), repr(self.body), *said])})"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a workflow ended.

    Attributes:
        state: `completed`, `failed`, `cancelled`; or where it stuck, with a `fault`.
        output: What it returned.
        error: What it failed with.
        fault: Why it cannot go on, if its code cannot run its own history.
        stack: Where it failed, as text; not compared.
    """

    state: WorkflowState
    output: Any = None
    error: ErrorInfo | None = None
    fault: str | None = None
    stack: str | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        if self.fault is not None:
            return f"stuck: {self.fault}"
        if self.error is not None:
            return f"{self.state.value}: {self.error}"
        return (
            f"{self.state.value}: {shown(self.output)}" if self.state is WorkflowState.COMPLETED else self.state.value
        )


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """One run of a scenario, from its first process to the end.

    Attributes:
        crashes: Where its processes died, in order; the last one did not.
        seed: In which order tasks ran.
        ending: How the explored workflow ended.
        history: Its history.
        others: How the other workflows ended, by id.
        effects: What happened outside, by the ledger's name.
        writes: What the processes wrote, in order.
        deaths: At which write each process but the last died.
        outlines: The histories of all workflows, by id, without ids and times.
        ledgers: The ledgers that were used.
        disk: The disk.
    """

    crashes: tuple[CrashPoint, ...]
    seed: int
    ending: Ending
    history: tuple[HistoryEntry, ...] = field(repr=False)
    others: Mapping[str, Ending] = field(repr=False)
    effects: Mapping[str, tuple[Effect, ...]] = field(repr=False)
    writes: Sequence[WritePoint] = field(repr=False)
    deaths: Sequence[WritePoint] = field(repr=False)
    outlines: Mapping[str, tuple[Line, ...]] = field(repr=False)
    ledgers: Sequence[EffectLedger] = field(repr=False)
    disk: SimulatedDisk = field(repr=False)

    @property
    def output(self) -> Any:
        """What the workflow returned."""
        return self.ending.output

    @property
    def state(self) -> WorkflowState:
        """How the workflow ended."""
        return self.ending.state

    @property
    def only(self) -> str:
        """This run, as `only=` takes it."""
        return only_text(self.crashes, self.seed)

    def writes_of(self, process: int) -> Sequence[WritePoint]:
        """What one process wrote, in order."""
        return [point for point in self.writes if point.life == process]


def only_text(crashes: Sequence[CrashPoint], seed: int) -> str:
    """A run in a few characters: `3/after+0/before@seed7`."""
    return f"{'+'.join(f'{crash.write}/{crash.when}' for crash in crashes) or 'no crash'}@seed{seed}"


class Scenario:
    """What is run again and again.

    Args:
        workflow: The explored workflow.
        workflow_id: Its id.
        input: Its input.
        mail: What is sent to it.
        others: Further workflows, which it may call.
        cancel_at: When all that has not ended is cancelled, in seconds after the start; `None`: never.
        timeout: Within how many seconds of virtual time a process has to see the end.
        writes_max: How many writes a process may make.
        ignore: Entries whose values may differ; `ignored` gathers those that there were.
        amnesia: What each process forgets; `None`: nothing.
        options: What each process gives to `open_supervisor` besides.
        link: Who waits for it all.
    """

    def __init__(
        self,
        workflow: WorkflowLike,
        workflow_id: str,
        input: Any,
        *,
        mail: Sequence[Mail],
        others: Sequence[WorkflowLike],
        cancel_at: float | None,
        timeout: float,
        writes_max: int,
        ignore: Sequence[str],
        amnesia: Amnesia | None,
        options: Mapping[str, Any],
        link: Link,
    ) -> None:
        self.workflow = workflow
        self.workflow_id = workflow_id
        self.input = input
        self.mail: list[Mail] = sorted(mail, key=lambda each: each.at)
        self.workflows: list[WorkflowLike] = [workflow, *(each for each in others if each is not workflow)]
        self.cancel_at = cancel_at
        self.timeout_s = timeout
        self.writes_max = writes_max
        self.ignore = ignore
        self.ignored: set[str] = set()
        self.amnesia = amnesia
        self.options = options
        self.link = link

    def run(self, crashes: Sequence[CrashPoint], seed: int) -> FinishedRun:
        """From an empty disk to the end, with these deaths on the way. Blocks.

        Raises:
            EndlessRunError: There is no end.
            JobCancelled: Nobody waits for it any more.
        """
        return _Run(self, tuple(crashes), seed).to_end()


class _Run:
    """One run: what outlives its processes."""

    def __init__(self, scenario: Scenario, crashes: tuple[CrashPoint, ...], seed: int) -> None:
        self.scenario = scenario
        self.crashes = crashes
        self.seed = seed
        self.simulation = Simulation(scenario.workflows, keep_globals=True, **scenario.options)  # amnesia says
        self.begun_ms = self.simulation.clock.now_ms()
        self.settled: set[int] = set()

    @property
    def only(self) -> str:
        return only_text(self.crashes, self.seed)

    def to_end(self) -> FinishedRun:
        deaths: list[WritePoint] = []
        for number in range(len(self.crashes) + 1):
            crash = self.crashes[number] if number < len(self.crashes) else None
            seen = self._live(crash)
            if seen is not None:
                return self._finished(seen, deaths)
            died_at = self.simulation.disk.gate.died_at
            assert died_at is not None, "it died at no write"
            deaths.append(died_at)
        raise AssertionError("the last process died, which nobody told it to")

    def _live(self, crash: CrashPoint | None) -> _Seen | None:
        """One process; what it has seen at the end, or `None` if it died."""
        self.scenario.link.check()
        if self.scenario.amnesia is not None:
            self.scenario.amnesia.forget()

        async def process(supervisor: Supervisor) -> _Seen:
            return await self.scenario.link.run(_Process(self, supervisor).live)

        with repeatable_seeds():
            return self.simulation.run(process, crash_at=crash, seed=self.seed).value

    def endless(self, reason: str) -> EndlessRunError:
        name = self.scenario.workflow_id
        return EndlessRunError(
            f"{name!r} does not come to an end: {reason}. Send what it waits for (messages=[('name', body)]), or cancel it "
            f"(cancel_at=3600.0), or allow more (timeout=, writes_max=). This was the run {self.only!r}",
            only=self.only,
        )

    def _finished(self, seen: _Seen, deaths: list[WritePoint]) -> FinishedRun:
        disk = self.simulation.disk
        ledgers = ledgers_of(disk)
        _check_names(ledgers)
        return FinishedRun(
            crashes=self.crashes[: len(deaths)],
            seed=self.seed,
            ending=seen.endings[self.scenario.workflow_id],
            history=seen.history,
            others={key: ending for key, ending in seen.endings.items() if key != self.scenario.workflow_id},
            effects={ledger.name: ledger.effects_on(disk) for ledger in ledgers},
            writes=disk.history,
            deaths=deaths,
            outlines=seen.outlines,
            ledgers=ledgers,
            disk=disk,
        )


@dataclass
class _Seen:
    """What a process has seen at the end."""

    endings: dict[str, Ending]
    outlines: dict[str, tuple[Line, ...]]
    history: tuple[HistoryEntry, ...]


class _Process:
    """What one process does."""

    def __init__(self, run: _Run, supervisor: Supervisor) -> None:
        self.run = run
        self.scenario = run.scenario
        self.supervisor = supervisor
        self.patience = trio.CancelScope()

    async def live(self) -> _Seen:
        scenario = self.scenario
        self.run.simulation.disk.gate.on_write = self._count
        handle = await self.supervisor.spawn(scenario.workflow, scenario.workflow_id, scenario.input)
        endings: dict[str, Ending] = {}
        self.patience.deadline = trio.current_time() + scenario.timeout_s
        with self.patience, _alone():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                nursery.start_soon(self._cancel)
                endings[scenario.workflow_id] = await _ending_of(handle)
                await self._await_others(endings)
                nursery.cancel_scope.cancel()
        if self.patience.cancelled_caught:
            raise self.run.endless(await self._stand(handle))
        return await self._look(endings)

    def _count(self, point: WritePoint, when: str) -> None:
        if point.number >= self.scenario.writes_max:  # raised in here, the engine would take it for a fault of the disk
            self.patience.cancel()

    async def _send(self) -> None:
        """What was not acknowledged yet, each at its time."""
        clock = self.run.simulation.clock
        for number, mail in enumerate(self.scenario.mail):
            if number in self.run.settled:
                continue
            await clock.wait_until_ms(self.run.begun_ms + round(mail.at * 1000))
            workflow_id = self.scenario.workflow_id if mail.to is None else mail.to
            message_id = f"message-{number}" if mail.id is None else mail.id
            try:
                await (await self.supervisor.get(workflow_id)).message(mail.name, mail.body, id=message_id)
            except WorkflowEndedError:
                pass  # refused for good, which is an answer
            except WorkflowNotFoundError:
                raise InvalidArgumentError(
                    f"there was no workflow {workflow_id!r} for the message {mail.name!r} after {mail.at} seconds; "
                    "send it later: Mail(name, body, to=..., at=10.0)"
                ) from None
            self.run.settled.add(number)

    async def _cancel(self) -> None:
        if self.scenario.cancel_at is None:
            return
        await self.run.simulation.clock.wait_until_ms(self.run.begun_ms + round(self.scenario.cancel_at * 1000))
        for info in await list_all(self.supervisor):
            if not info.state.is_terminal:
                await (await self.supervisor.get(info.id)).cancel()

    async def _await_others(self, endings: dict[str, Ending]) -> None:
        """Until all that was made has ended, what the others made meanwhile included."""
        while waited_for := [info.id for info in await list_all(self.supervisor) if info.id not in endings]:
            for workflow_id in waited_for:
                endings[workflow_id] = await _ending_of(await self.supervisor.get(workflow_id))

    async def _look(self, endings: dict[str, Ending]) -> _Seen:
        histories = {key: await (await self.supervisor.get(key)).history() for key in endings}
        outlines = {key: outline_of(history, ignore=self.scenario.ignore) for key, history in histories.items()}
        names = {line.path[-1] for outline in outlines.values() for line in outline if line.path}
        self.scenario.ignored |= {name for name in self.scenario.ignore if name in names}
        return _Seen(endings, outlines, histories[self.scenario.workflow_id])

    async def _stand(self, handle: WorkflowHandle[Any]) -> str:
        """Where it stands, in words."""
        history = await handle.history()
        last = max(history, key=lambda entry: entry.id, default=None)
        after = "before it recorded anything" if last is None else f"after {last.kind} {shown_path(last.path)!r}"
        if len(self.run.simulation.disk.gate.writes) >= self.scenario.writes_max:
            return f"it has made {self.scenario.writes_max} writes and goes on; it stands {after}"
        workflows = await list_all(self.supervisor)
        open_ones = [f"{info.id!r} is {info.state.value}" for info in workflows if not info.state.is_terminal]
        stands = f"after {self.scenario.timeout_s:g} seconds of virtual time {', '.join(open_ones)}; it stands {after}"
        if (
            trio.to_thread.current_default_thread_limiter().borrowed_tokens
        ):  # nothing of the kit or the engine takes one here
            stands += (
                ". A step waits for a real thread (trio.to_thread.run_sync), while virtual time runs on: hand the plain function "
                "itself to ctx.step, which then runs in place"
            )
        return stands


def _check_names(ledgers: Sequence[EffectLedger]) -> None:
    """What happened is told and compared by the ledger's name; of two of one name, one would hide the other."""
    count, name = max(((len(each), name) for name, each in _by_name(ledgers).items()), default=(0, ""))
    if count > 1:
        raise InvalidArgumentError(
            f"{count} ledgers are called {name!r}, and effects are compared by the ledger's name. Give each a name of its own; "
            f"and make it once, outside of functions, as each call would make another: bank = EffectLedger({name!r})"
        )


def _by_name(ledgers: Sequence[EffectLedger]) -> dict[str, list[EffectLedger]]:
    found: dict[str, list[EffectLedger]] = {}
    for ledger in ledgers:
        found.setdefault(ledger.name, []).append(ledger)
    return found


@contextmanager
def _alone() -> Generator[None]:
    """An exception that is alone in its group comes out as itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _lone(group) from None


def _lone(error: BaseException) -> BaseException:
    inner = _inner(error)
    return _lone(inner[0]) if len(inner) == 1 else error


def _inner(error: BaseException) -> Sequence[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return ()
    return cast("BaseExceptionGroup[BaseException]", error).exceptions


async def _ending_of(handle: WorkflowHandle[Any]) -> Ending:
    try:
        return Ending(WorkflowState.COMPLETED, await handle.result())
    except WorkflowFailedError as error:
        return Ending(WorkflowState.FAILED, error=ErrorInfo(error.name, error.error.message), stack=error.stack)
    except WorkflowCancelledError:
        return Ending(WorkflowState.CANCELLED)
    except FaultError as error:
        return Ending(WorkflowState.RUNNING, fault=f"{type(error).__name__}: {error}")
