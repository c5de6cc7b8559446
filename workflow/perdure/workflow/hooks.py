"""`on_history_updated` and `on_error`: what a program wants to be told of its workflows, as it happens.

1. A hook is told what is durable, after it is, in the order in which it became so; what was not written is never told.
2. At most once: a process that dies between a commit and its hook never tells it. Who must not miss anything reads history.
3. A hook changes nothing: what it raises is logged, and no commit waits for it. A plain function is called where the commit
   was made; a coroutine function runs in a task of its own, one event after another, and lags behind if it is slow.
4. Cancellation, Ctrl-C and their like are not the hook's: they are never swallowed.
5. Without hooks nothing here is made or called.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

import trio

from perdure.storage.schema import Entry, EntryMetadata
from perdure.workflow.checks import check_function, is_coroutine_function
from perdure.workflow.errors import ErrorInfo, InvalidArgumentError
from perdure.workflow.failures import sole_exception
from perdure.workflow.history import Path
from perdure.workflow.snapshot import history_entry
from perdure.workflow.states import WorkflowState
from perdure.workflow.types import HistoryEntry

__all__ = [
    "EVENTS_WAITING_MAX",
    "ErrorEvent",
    "ErrorHook",
    "HistoryHook",
    "HistoryUpdated",
    "Hooks",
    "RollbackErrorEvent",
    "StepErrorEvent",
    "WorkflowErrorEvent",
    "make_hooks",
]

EVENTS_WAITING_MAX: Final = 10_000
"""How many events wait for a slow coroutine function; beyond that the oldest are dropped, which is logged."""

EventT = TypeVar("EventT")

_log = logging.getLogger("perdure.workflow")

ChangedEntry = tuple[Path, Entry, EntryMetadata | None]


class HistoryUpdated:
    """What one commit changed in a workflow, told to `on_history_updated`.

    Attributes:
        workflow_id: Which workflow.
        state: Where it stands now.
        forgotten: Paths below which (and at which) all entries were removed, before `entries` were written: old iterations
            of loops, what the losers of a race did.
    """

    __slots__ = ("_changed", "_entries", "forgotten", "state", "workflow_id")

    def __init__(
        self, workflow_id: str, state: WorkflowState, changed: Iterable[ChangedEntry], forgotten: Iterable[Path]
    ) -> None:
        self.workflow_id: str = workflow_id
        self.state: WorkflowState = state
        self.forgotten: tuple[Path, ...] = tuple(forgotten)
        self._changed = tuple(changed)
        self._entries: tuple[HistoryEntry, ...] | None = None

    @property
    def entries(self) -> tuple[HistoryEntry, ...]:
        """The entries that are new or changed, as they are now, in the order of their change; decoded when first asked for."""
        if self._entries is None:
            self._entries = tuple(history_entry(*changed) for changed in self._changed)
        return self._entries

    def __repr__(self) -> str:
        paths = [path for path, _, _ in self._changed]
        return (
            f"HistoryUpdated({self.workflow_id!r}, {self.state}, entries at {paths}, forgotten={list(self.forgotten)})"
        )


@dataclass(frozen=True, slots=True)
class StepErrorEvent:
    """An attempt at a step failed, told to `on_error`.

    Attributes:
        workflow_id: Which workflow.
        path: The step's place: names, and numbers for loop iterations.
        step_name: The step's name, which `path` ends with.
        attempt: Which attempt, from 1.
        max_retries: How many more than one the step may have.
        will_retry: Whether it is tried again.
        retry_delay: Seconds from the beginning of this attempt to that of the next, at the earliest; `None` without one.
        error: What it failed with.
    """

    workflow_id: str
    path: Path
    step_name: str
    attempt: int
    max_retries: int
    will_retry: bool
    retry_delay: float | None
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class RollbackErrorEvent:
    """An attempt at a rollback handler failed, told to `on_error`.

    Attributes:
        workflow_id: Which workflow.
        step_name: The step that was to be undone; `None` if the workflow ended the process again and again meanwhile.
        attempt: Which attempt, from 1; 0 without a step.
        will_retry: Whether it is tried again.
        error: What it failed with.
    """

    workflow_id: str
    step_name: str | None
    attempt: int
    will_retry: bool
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class WorkflowErrorEvent:
    """A workflow failed, told to `on_error`; a failed step behind it was told before.

    Attributes:
        workflow_id: Which workflow.
        error: What it failed with, as it is stored.
    """

    workflow_id: str
    error: ErrorInfo


ErrorEvent: TypeAlias = StepErrorEvent | RollbackErrorEvent | WorkflowErrorEvent
"""What `on_error` is told."""

HistoryHook: TypeAlias = Callable[[HistoryUpdated], Awaitable[None] | None]
"""What may be given as `on_history_updated`: a plain function, or a coroutine function."""

ErrorHook: TypeAlias = Callable[[ErrorEvent], Awaitable[None] | None]
"""What may be given as `on_error`: a plain function, or a coroutine function."""


class _Hook(Generic[EventT]):
    """One hook, and the events that wait for it."""

    def __init__(self, function: Callable[[EventT], Awaitable[None] | None], name: str) -> None:
        check_function(function, name, f"{name}=function")
        self.is_async: bool = is_coroutine_function(function)
        self._function = function
        self._name = name
        self._waiting: deque[EventT] = deque()
        self._dropped = 0
        self._nursery: trio.Nursery | None = None
        self._on_interrupt: Callable[[BaseException], None] | None = None
        self._idle: trio.Event | None = None

    def open(self, nursery: trio.Nursery, on_interrupt: Callable[[BaseException], None] | None) -> None:
        self._nursery = nursery
        self._on_interrupt = on_interrupt

    def tell(self, event: EventT) -> None:
        if not self.is_async:
            self._call(event)
            return
        if len(self._waiting) >= EVENTS_WAITING_MAX:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(event)
        if self._idle is None:
            self._start()

    def _call(self, event: EventT) -> None:
        try:
            answer = self._function(event)
            if hasattr(answer, "__await__"):
                close = getattr(answer, "close", None)
                if close is not None:
                    close()  # so that Python does not also warn that it was never awaited
                raise InvalidArgumentError(
                    f"{self._name} is a plain function that returned a coroutine; pass the coroutine function itself"
                )
        except Exception as error:
            self._log_failure(error)

    def _start(self) -> None:
        assert self._nursery is not None, "hooks are opened before anything is committed"
        self._idle = trio.Event()
        try:
            self._nursery.start_soon(self._deliver, name=f"perdure {self._name}")
        except RuntimeError:
            self._rest()
            _log.warning("%s is not told any more: the nursery that it would run in has ended", self._name)

    def _rest(self) -> None:
        """Nothing is told now, and nothing waits."""
        self._waiting.clear()
        if self._idle is not None:
            self._idle.set()
            self._idle = None

    @trio.lowlevel.enable_ki_protection
    async def _deliver(self) -> None:
        try:
            while self._waiting:
                await self._await(self._waiting.popleft())
                if self._dropped:
                    _log.warning("%s is slower than what it is told: %d events dropped", self._name, self._dropped)
                    self._dropped = 0
        except trio.Cancelled:
            raise
        except BaseException as error:
            if self._on_interrupt is None:
                raise
            self._on_interrupt(sole_exception(error))
        finally:
            self._rest()

    @trio.lowlevel.disable_ki_protection
    async def _await(self, event: EventT) -> None:
        try:
            await cast("Awaitable[None]", self._function(event))
        except BaseExceptionGroup as group:
            # Out of a nursery of the hook's: errors are its own, a cancellation or Ctrl-C among them is not.
            failed, rest = group.split(Exception)
            if failed is not None:
                self._log_failure(failed)
            if rest is not None:
                raise rest from None
        except Exception as error:
            self._log_failure(error)

    def _log_failure(self, error: BaseException) -> None:
        _log.error("%s raised, and nothing else changes: %r", self._name, error, exc_info=error)

    async def until_idle(self) -> None:
        while self._idle is not None:
            await self._idle.wait()


class Hooks:
    """The hooks of one run, or of one supervisor; made by `make_hooks`."""

    def __init__(self, on_history_updated: HistoryHook | None, on_error: ErrorHook | None) -> None:
        self._updated = None if on_history_updated is None else _Hook(on_history_updated, "on_history_updated")
        self._error = None if on_error is None else _Hook(on_error, "on_error")

    @property
    def wants_updates(self) -> bool:
        """Whether somebody is to be told of changes of history."""
        return self._updated is not None

    def tell_update(self, event: HistoryUpdated) -> None:
        """Tell what became durable; never raises what a hook raises."""
        if self._updated is not None:
            self._updated.tell(event)

    def tell_error(self, event: ErrorEvent) -> None:
        """Tell of a failure whose record became durable; never raises what a hook raises."""
        if self._error is not None:
            self._error.tell(event)

    def _hooks(self) -> list[_Hook[Any]]:
        return [hook for hook in (self._updated, self._error) if hook is not None]

    def open(self, nursery: trio.Nursery, *, on_interrupt: Callable[[BaseException], None] | None = None) -> None:
        """Say where coroutine functions run; before the first commit.

        Args:
            nursery: Its cancellation cancels the hooks; what still waits for them is not told.
            on_interrupt: Called with Ctrl-C and the like out of a hook; they go to the nursery unless given.
        """
        for hook in self._hooks():
            hook.open(nursery, on_interrupt)

    async def until_idle(self) -> None:
        """Return once every event so far was told."""
        for hook in self._hooks():
            await hook.until_idle()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """A block whose events are told by its end. Cancelled, coroutine functions are cancelled too.

        What the block raises comes out as it was, not in the group that a nursery would make of it.
        """
        if not any(hook.is_async for hook in self._hooks()):
            yield
            return
        outcome: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                self.open(nursery)
                try:
                    yield
                except BaseException as error:
                    outcome = error
        except BaseException as error:
            if outcome is None or not _is_cancellation_only(error):
                raise sole_exception(error) from None
        if outcome is not None:
            raise outcome


def _is_cancellation_only(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


def make_hooks(on_history_updated: HistoryHook | None, on_error: ErrorHook | None) -> Hooks | None:
    """The hooks that were given; `None` if none was, and then nothing is spent on them.

    Raises:
        InvalidArgumentError: One is no function.
    """
    return None if on_history_updated is None and on_error is None else Hooks(on_history_updated, on_error)
