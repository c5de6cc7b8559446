"""Whether a recorded history still fits the code: `assert_replayable`.

1. The function runs on a copy, in memory, over what is recorded, as it will in the next process. Nothing recorded is called
   again, and nothing that is not recorded is begun: each branch comes to rest where it would begin a step, send a message
   or call a workflow.
2. Time stands still, at the moment of the recording unless another is said: what waited then waits now.
3. A workflow that has ended is taken as one that is still on its way, and replayed to its end: code that fits the whole
   history fits each part of it. One that is rolled back is asked for what is to be undone, and nothing is.
4. Code that waits for anything but its context's operations would wait here for ever: it is told, once nothing but time can end
   the wait. Time is virtual but for that of threads, so patience costs nothing.
5. What is asserted is that the code can go on from what is recorded. That it goes on well, is what other tests are for.

Rejected: to compare outputs as well. Code that makes something else of the same recorded results is no harm to what is under
way; `Replay` says what came of it, and a test can look.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar, cast

import trio
from trio.testing import MockClock

from perdure.storage import MemoryDriver, ValueCodec, layout
from perdure.testing.errors import NotReplayableError
from perdure.testing.history_files import (
    RecordedHistory,
    check_pairs,
    coded,
    describe_pairs,
    read_history,
    record_history,
)
from perdure.testing.virtual import holding, is_under_asyncio, run_virtual
from perdure.workflow import (
    ANY_MESSAGE,
    Context,
    ErrorInfo,
    FaultError,
    HistoryDivergedError,
    InvalidArgumentError,
    Workflow,
    WorkflowSnapshot,
    WorkflowState,
    definition_of,
)
from perdure.workflow.activation import Activation, Closing
from perdure.workflow.calls import ChildOutcome
from perdure.workflow.checks import check_when_ms
from perdure.workflow.collecting import collect
from perdure.workflow.failures import describe
from perdure.workflow.history import Path
from perdure.workflow.host import CallRefusal, CallRequest, HostLeavingError, Parcel
from perdure.workflow.ids import new_seed
from perdure.workflow.threads import virtual_time
from perdure.workflow.waits import Wait

__all__ = ["Replay", "assert_replayable"]

T = TypeVar("T")

_ENDED: Final = (WorkflowState.COMPLETED, WorkflowState.FAILED, WorkflowState.CANCELLED)
_PATIENCE_S: Final = 10 * 365 * 24 * 3600.0
_THREAD_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Replay:
    """How far the code of today came over a recorded history.

    Attributes:
        history: What was recorded.
        has_ended: Whether the function came to its end.
        output: What it returned, if it did.
        error: What it raised, if it did.
        new: What it would do next that is not recorded, in words, in order; for a workflow that is rolled back, what is
            still to be undone. None of it was done, but with `run_new_steps`.
        waits_until: When what it waits for ends, in seconds since the epoch; `None`: never by itself.
        waits_for: The names of the messages that it waits for; `("*",)` for any.
    """

    history: RecordedHistory
    has_ended: bool = False
    output: Any = None
    error: ErrorInfo | None = None
    new: tuple[str, ...] = ()
    waits_until: float | None = None
    waits_for: tuple[str, ...] = field(default=())


def assert_replayable(
    workflow: Workflow[Any, Any] | Callable[[Context, Any], Awaitable[Any]],
    history: RecordedHistory | Mapping[bytes, bytes] | str | os.PathLike[str],
    *,
    codec: ValueCodec | None = None,
    workflows: Iterable[Workflow[Any, Any] | Callable[[Context, Any], Awaitable[Any]]] = (),
    at: float | datetime | None = None,
    run_new_steps: bool = False,
) -> Replay:
    """See that a workflow of which this was recorded can go on with the code of today. Calls no step.

        def test_orders_under_way():
            assert_replayable(order, "tests/histories/order-waits.json")

    Works in plain tests and in async ones; it is not awaited. What is given stays as it is.

    Args:
        workflow: The code of today.
        history: The file that `record_history` made, or what it returned; a workflow's SQLite file, of a backup or of a data
            directory that no process has; or all pairs of a namespace.
        codec: What the values were encoded with.
        workflows: Those that it calls by their names.
        at: At which time it is to be, in seconds since the epoch or as a `datetime` with a timezone; `None`: when it was
            recorded. Later, timeouts and sleeps that were pending are over, and the code behind them is looked at too.
        run_new_steps: Whether steps that are not recorded are run. Give the workflow functions that do no harm then.

    Returns:
        How far it came.

    Raises:
        NotReplayableError: It cannot go on, and its instances would stop; the text says where, and what to write.
        HistoryFileError: The file is not there, or no recorded history.
        InvalidArgumentError: Something else was given; or the history is one of another workflow; or `at` is before the moment
            of the recording, which what `record_history` made bears.
        DecodeError: What is recorded is damaged.
    """
    definition = definition_of(workflow)
    at_ms = None if at is None else check_when_ms(at, "assert_replayable", "at=time.time()")
    if isinstance(workflows, str) or not isinstance(workflows, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError(f"workflows takes several, not {workflows!r:.80}; write workflows=[parcel]")
    called = {each.name: each for each in map(definition_of, workflows)}

    async def replay() -> Replay:
        recorded, source, is_dated = await _recorded(history)
        if recorded.state not in {state.value for state in WorkflowState}:
            raise InvalidArgumentError(
                f"{recorded.state!r:.80}, the state of {source}, is none; give what record_history(...) returned as it is"
            )
        if recorded.workflow not in (definition.name, ""):
            raise InvalidArgumentError(
                f"{source} is of workflow {recorded.workflow!r}, and {definition.name!r} was given; for a function that is to "
                f"take its place write workflow(name={recorded.workflow!r})({definition.name})"
            )
        if at_ms is not None and is_dated and at_ms < recorded.recorded_at_ms:
            raise InvalidArgumentError(
                f"at={at!r} is before {source} was recorded; it is in seconds since the epoch: an hour later is "
                f"at={recorded.recorded_at_ms / 1000 + 3600!r}"
            )
        clock = cast("MockClock", trio.lowlevel.current_clock())
        try:
            with virtual_time(partial(holding, clock)):  # plain functions in place: time would run away from a thread
                return await _replay(definition, recorded, codec, called, at_ms, run_new_steps=run_new_steps)
        except FaultError as fault:
            raise _not_replayable(recorded, source, fault) from fault

    return _apart(replay)


def _apart(main: Callable[[], Awaitable[Replay]]) -> Replay:
    """Run it in a Trio run of its own, in a thread where this one has an event loop already."""
    if not (trio.lowlevel.in_trio_run() or is_under_asyncio()):
        return run_virtual(main)
    outcome: list[Replay | BaseException] = []

    def work() -> None:
        try:
            outcome.append(run_virtual(main))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="assert_replayable")
    thread.start()
    thread.join()
    found = outcome[0]
    if isinstance(found, BaseException):
        raise found
    return found


async def _recorded(history: object) -> tuple[RecordedHistory, str, bool]:
    """What was given, what to call it, and whether it says itself when it was recorded."""
    if isinstance(history, RecordedHistory):
        return history, f"the history of {history.workflow_id!r}", True
    if isinstance(history, Mapping):
        recorded = await describe_pairs(check_pairs(cast("Mapping[bytes, bytes]", history)))
        return recorded, f"the history of {recorded.workflow_id!r}", False
    if isinstance(history, str | os.PathLike):
        path = os.fspath(cast("str | os.PathLike[str]", history))
        if _is_other_file(path):
            recorded = await describe_pairs((await record_history(path)).pairs)
            return recorded, path, False
        return read_history(path), path, True
    hint = " (it was decoded; what is needed are the stored bytes)" if isinstance(history, WorkflowSnapshot) else ""
    raise InvalidArgumentError(
        f"{type(history).__name__} is no recorded history{hint}; give the path of a file that record_history(...) made, or "
        "what it returned"
    )


def _is_other_file(path: str) -> bool:
    """Whether it is a file, and none that begins as a recorded history does."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(1) != b"{"


class _StoppedClock:
    """A clock that stands still."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    async def wait_until_ms(self, deadline_ms: int) -> None:
        await trio.lowlevel.checkpoint()
        if deadline_ms > self._now_ms:
            await trio.sleep_forever()


class _NoHost:
    """The surroundings of a workflow that is only replayed: other workflows are neither called nor told anything."""

    def __init__(self, called: Mapping[str, Workflow[Any, Any]], new: list[str]) -> None:
        self._called = called
        self._new = new

    def find_workflow(self, given: object) -> Workflow[Any, Any]:
        if not isinstance(given, str):
            return definition_of(given)
        if given not in self._called:
            raise InvalidArgumentError(f"workflow {given!r} is called by its name; write workflows=[{given}]")
        return self._called[given]

    async def deliver(self, parcel: Parcel) -> ErrorInfo | None:
        self._new.append(f"message {parcel.name!r} to workflow {parcel.target!r}")
        await trio.lowlevel.checkpoint()
        raise HostLeavingError("nothing is sent from a replay")

    async def start_child(self, request: CallRequest) -> ChildOutcome | CallRefusal | None:
        self._new.append(f"a call of workflow {request.workflow.name!r}")
        await trio.lowlevel.checkpoint()
        raise HostLeavingError("nothing is called from a replay")

    async def look_after(self, caller_id: str, child_id: str) -> ChildOutcome | CallRefusal | None:
        await trio.lowlevel.checkpoint()
        return None

    def has_room(self, workflow_id: str, count: int) -> bool:
        return False


class _Held(list[Path]):
    """The paths of held steps, told in words as they come."""

    def __init__(self, new: list[str]) -> None:
        super().__init__()
        self._new = new

    def append(self, path: Path, /) -> None:
        self._new.append(f"step {_path_text(path)}")
        super().append(path)


async def _replay(
    definition: Workflow[Any, Any],
    recorded: RecordedHistory,
    codec: ValueCodec | None,
    called: Mapping[str, Workflow[Any, Any]],
    at_ms: int | None,
    *,
    run_new_steps: bool,
) -> Replay:
    state = WorkflowState(recorded.state)
    pairs = dict(recorded.pairs)
    if state in _ENDED:
        pairs[layout.STATE_KEY] = WorkflowState.RUNNING.value.encode()
        for key in (layout.OUTPUT_KEY, layout.ERROR_KEY, layout.FAILURE_CAUSES_KEY):
            pairs.pop(key, None)
    driver = coded(MemoryDriver(pairs), codec, recorded.workflow_id)
    clock = _StoppedClock(recorded.recorded_at_ms if at_ms is None else at_ms)
    activation = await Activation.load(recorded.workflow_id, driver, clock=clock)
    new: list[str] = []
    activation.host = _NoHost({definition.name: definition, **called}, new)
    activation.history.adopt(definition.name, new_seed(recorded.workflow_id, activation.ids))
    activation.is_running = True
    if state is WorkflowState.ROLLING_BACK:
        undoings = await _patiently(recorded, definition, partial(collect, activation, definition.function))
        return Replay(recorded, new=tuple(f"rollback of step {_path_text(each.path)}" for each in undoings))
    if not run_new_steps:
        activation.held = _Held(new)
    value, error = await _patiently(recorded, definition, partial(activation.call, definition.function))
    if activation.closing is None:
        ended = None if error is None else describe(error)
        if ended is not None and state is WorkflowState.COMPLETED:
            raise NotReplayableError(
                f"workflow {recorded.workflow_id!r} ({definition.name}) had completed, and fails over the same history now: "
                f"{ended}",
                workflow_id=recorded.workflow_id,
                workflow=definition.name,
                location=None,
            ) from error
        return Replay(recorded, has_ended=True, output=value, error=ended, new=tuple(new))
    wait = activation.waiting if activation.closing is Closing.PARKED and activation.waiting is not None else Wait()
    return Replay(
        recorded,
        new=tuple(new),
        waits_until=None if wait.deadline_ms is None else wait.deadline_ms / 1000,
        waits_for=ANY_MESSAGE if wait.names is None else tuple(sorted(wait.names)),
    )


async def _patiently(recorded: RecordedHistory, definition: Workflow[Any, Any], call: Callable[[], Awaitable[T]]) -> T:
    """Await what runs the workflow's function, unless that waits for something else than its context.

    Raises:
        NotReplayableError: It does.
        Exception: As the call.
    """
    outcome: list[T] = []
    error: Exception | None = None
    line = ""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_lose_patience, nursery.cancel_scope)
        try:
            outcome.append(await call())
        except trio.Cancelled as cancelled:
            line = _line_of(definition, cancelled)
            raise
        except Exception as raised:
            error = raised
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error
    if not outcome:
        raise NotReplayableError(
            f"workflow {recorded.workflow_id!r} ({definition.name}) waits{line} for something that is not recorded, and would "
            "wait for it again in every process. Wait by ctx.sleep(...) or ctx.queue.next(...), or within a step",
            workflow_id=recorded.workflow_id,
            workflow=definition.name,
            location=None,
        )
    return outcome[0]


async def _lose_patience(scope: trio.CancelScope) -> None:
    """Cancel what takes longer than anything does; but whoever waits for a thread waits in real time."""
    clock = cast("MockClock", trio.lowlevel.current_clock())
    threads, own = trio.to_thread.current_default_thread_limiter(), trio.CapacityLimiter(1)
    is_patient = True
    while is_patient:
        await trio.sleep(_PATIENCE_S)
        is_patient = bool(threads.borrowed_tokens)
        while threads.borrowed_tokens:
            with holding(clock):
                await trio.to_thread.run_sync(time.sleep, _THREAD_S, limiter=own)
    scope.cancel()


def _line_of(definition: Workflow[Any, Any], error: BaseException) -> str:
    """Where in the workflow's own file this came from, in words; empty if from a branch."""
    code = getattr(inspect.unwrap(definition.function), "__code__", None)  # a callable object has none
    file = "" if code is None else str(code.co_filename)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]} of {os.path.basename(file)}" if lines else ""


def _path_text(path: Path) -> str:
    return " > ".join(repr(part) if isinstance(part, str) else f"#{part}" for part in path)


def _not_replayable(recorded: RecordedHistory, source: str, fault: FaultError) -> NotReplayableError:
    location = fault.location if isinstance(fault, HistoryDivergedError) else None
    return NotReplayableError(
        f"{recorded}, and cannot go on with this code ({source}).\n{type(fault).__name__}: {fault}\n{_advice(fault)}",
        workflow_id=recorded.workflow_id,
        workflow=recorded.workflow,
        location=location,
    )


def _advice(fault: FaultError) -> str:
    if not isinstance(fault, HistoryDivergedError):
        return "Until that is mended, workflows that recorded this would stop; nothing of them would be lost."
    if fault.found is not None and fault.asked is not None:
        return (
            "If the code was changed on purpose, let workflows that are under way keep what they did:\n"
            '    if await ctx.get_version("this-change", 2) < 2:\n'
            f"        ...  # as it was: {fault.found} at {fault.location}\n"
            "    else:\n"
            f"        ...  # as it is now: {fault.asked}\n"
            f"Where {fault.asked} is only new, and what was recorded comes after it, it is for new workflows alone:\n"
            '    if await ctx.get_version("this-change", 2) >= 2:\n'
            f"        ...  # {fault.asked}"
        )
    return "If the code was changed on purpose, let workflows that are under way keep what they did, as said above."
