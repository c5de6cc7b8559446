"""The blocking face of a portal: the supervisor and its handles for plain threads.

Each method is the supervisor's or the handle's of the same name, which says what it promises. It may be called in any
number of threads at once, also in the plain function of a step, but not where an event loop runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from perdure.actors.options import WorkflowLike
from perdure.actors.portal.overseeing import BlockingOverseer
from perdure.actors.portal.thread import PortalThread
from perdure.actors.schedule_handle import ScheduleHandle, ScheduleInfo, ScheduleOptions
from perdure.workflow import ChildInfo, Context, ErrorInfo, HistoryEntry, Message, WorkflowHandle, WorkflowState
from perdure.workflow.checks import check_duration

if TYPE_CHECKING:
    import typing_extensions

    from perdure.actors.portal.awaitable import AsyncioSupervisor

__all__ = ["BlockingHandle", "BlockingScheduleHandle", "BlockingSupervisor"]

T = TypeVar("T")
InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")
if TYPE_CHECKING:
    Output_co = typing_extensions.TypeVar("Output_co", covariant=True, default=Any)
else:
    Output_co = TypeVar("Output_co", covariant=True)


class BlockingHandle(Generic[Output_co]):
    """A workflow, for plain threads. Its parameter is the type of what the workflow's function returns."""

    __slots__ = ("_handle", "_thread")

    def __init__(self, thread: PortalThread, handle: WorkflowHandle[Output_co]) -> None:
        self._thread = thread
        self._handle = handle

    def __repr__(self) -> str:
        return repr(self._handle)

    @property
    def workflow_id(self) -> str:
        """The workflow's id."""
        return self._handle.workflow_id

    def result(self, *, timeout: float | None = None) -> Output_co:
        """Wait until the workflow ends, and return what its function returned.

        Args:
            timeout: Seconds, after which a `TimeoutError` comes and the workflow goes on; for ever unless given.
        """
        return self._thread.call(lambda: self._handle.result(), timeout=_check_timeout(timeout))

    def message(self, name: str, body: object = None, *, id: str | None = None, timeout: float | None = None) -> None:
        """Put a message into the workflow's mailbox. Durable on return.

        After a `TimeoutError` (`timeout` is in seconds) it may have been sent all the same: give an `id` and send it again.
        """
        self._thread.call(lambda: self._handle.message(name, body, id=id), timeout=_check_timeout(timeout))

    def message_nowait(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """The same, except that a full mailbox is a `MailboxFullError`."""
        self._thread.call(lambda: self._handle.message_nowait(name, body, id=id))

    @overload
    def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: None = None
    ) -> Any: ...

    @overload
    def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: type[T]
    ) -> T: ...

    @overload
    def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: UnionType
    ) -> Any: ...

    def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: Any = None
    ) -> Any:
        """Send a message and return what the workflow replies to it."""
        return self._thread.call(
            lambda: self._handle.request(name, body, timeout=timeout, id=id, reply_type=reply_type)
        )

    def undelivered(self) -> tuple[Message[Any], ...]:
        """The messages in the mailbox, oldest first."""
        return self._thread.call(lambda: self._handle.undelivered())

    def wake(self) -> None:
        """End every pending sleep and retry backoff now. Durable on return."""
        self._thread.call(lambda: self._handle.wake())

    def recover(self) -> None:
        """Run a failed workflow again, over what is recorded. Durable on return."""
        self._thread.call(lambda: self._handle.recover())

    def evict(self) -> None:
        """Take the workflow out of memory; it stays resumable."""
        self._thread.call(lambda: self._handle.evict())

    def cancel(self) -> None:
        """End the workflow as cancelled, for good. Durable on return."""
        self._thread.call(lambda: self._handle.cancel())

    def get_state(self) -> WorkflowState:
        """Where it stands."""
        return self._thread.call(lambda: self._handle.get_state())

    def get_output(self) -> Output_co | None:
        """What it returned, or `None`."""
        return self._thread.call(lambda: self._handle.get_output())

    def get_error(self) -> ErrorInfo | None:
        """What it failed with, or `None`."""
        return self._thread.call(lambda: self._handle.get_error())

    def children(self) -> tuple[ChildInfo, ...]:
        """The workflows that it has called."""
        return self._thread.call(lambda: self._handle.children())

    def history(self) -> tuple[HistoryEntry, ...]:
        """Its history, decoded."""
        return self._thread.call(lambda: self._handle.history())


class BlockingScheduleHandle:
    """A schedule, for plain threads."""

    __slots__ = ("_handle", "_thread")

    def __init__(self, thread: PortalThread, handle: ScheduleHandle) -> None:
        self._thread = thread
        self._handle = handle

    def __repr__(self) -> str:
        return repr(self._handle)

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self._handle.name

    def info(self) -> ScheduleInfo:
        """What is known of it."""
        return self._thread.call(lambda: self._handle.info())

    def pause(self) -> None:
        """Start nothing from now on, what is queued included. Durable on return."""
        self._thread.call(lambda: self._handle.pause())

    def resume(self) -> None:
        """Go on with what is queued and with the next occurrence. Durable on return."""
        self._thread.call(lambda: self._handle.resume())


class BlockingSupervisor(BlockingOverseer):
    """A supervisor, for plain threads; made by `open_portal`."""

    def __init__(self, thread: PortalThread) -> None:
        self._thread = thread

    @property
    def asyncio(self) -> AsyncioSupervisor:
        """The same supervisor for asyncio tasks, in any loop of this process."""
        from perdure.actors.portal.awaitable import AsyncioSupervisor

        return AsyncioSupervisor(self._thread)

    @overload
    def spawn(
        self,
        workflow: Callable[[Context, InputT], Awaitable[OutputT]],
        workflow_id: str,
        input: InputT,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> BlockingHandle[OutputT]: ...

    @overload
    def spawn(
        self,
        workflow: Callable[[Context, None], Awaitable[OutputT]],
        workflow_id: str,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> BlockingHandle[OutputT]: ...

    @overload
    def spawn(
        self,
        workflow: str,
        workflow_id: str,
        input: object = None,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> BlockingHandle: ...

    def spawn(
        self,
        workflow: WorkflowLike | str,
        workflow_id: str,
        input: object = None,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> BlockingHandle[Any]:
        """Start a workflow, or find it started: same id, same workflow and equal input. Durable on return."""
        spawn: Callable[..., Awaitable[WorkflowHandle[Any]]] = self._thread.supervisor.spawn
        handle = self._thread.call(
            lambda: spawn(workflow, workflow_id, input, start_at=start_at, deadline=deadline, attributes=attributes)
        )
        return BlockingHandle(self._thread, handle)

    def get(self, workflow_id: str) -> BlockingHandle:
        """The handle of a workflow that exists."""
        handle = self._thread.call(lambda: self._thread.supervisor.get(workflow_id))
        return BlockingHandle(self._thread, handle)

    @overload
    def schedule(
        self,
        name: str,
        workflow: Callable[[Context, InputT], Awaitable[object]],
        input: InputT,
        **options: Unpack[ScheduleOptions],
    ) -> BlockingScheduleHandle: ...

    @overload
    def schedule(
        self, name: str, workflow: Callable[[Context, None], Awaitable[object]], **options: Unpack[ScheduleOptions]
    ) -> BlockingScheduleHandle: ...

    @overload
    def schedule(
        self, name: str, workflow: str, input: object = None, **options: Unpack[ScheduleOptions]
    ) -> BlockingScheduleHandle: ...

    def schedule(
        self, name: str, workflow: WorkflowLike | str, input: object = None, **options: Unpack[ScheduleOptions]
    ) -> BlockingScheduleHandle:
        """Start a workflow again and again, exactly once for each occurrence. Durable on return."""
        schedule: Callable[..., Awaitable[ScheduleHandle]] = self._thread.supervisor.schedule
        handle = self._thread.call(lambda: schedule(name, workflow, input, **options))
        return BlockingScheduleHandle(self._thread, handle)

    def get_schedule(self, name: str) -> BlockingScheduleHandle:
        """The handle of a schedule that exists."""
        handle = self._thread.call(lambda: self._thread.supervisor.get_schedule(name))
        return BlockingScheduleHandle(self._thread, handle)

    def schedules(self) -> tuple[ScheduleInfo, ...]:
        """All schedules, by name."""
        return self._thread.call(lambda: self._thread.supervisor.schedules())

    def unschedule(self, name: str) -> None:
        """Remove a schedule, and the occurrences that it has queued. Durable on return."""
        self._thread.call(lambda: self._thread.supervisor.unschedule(name))

    def drain(self, *, grace: float | None = None) -> None:
        """Come to rest before the block is left: take nothing more, let running steps finish, have nothing live."""
        self._thread.call(lambda: self._thread.supervisor.drain(grace=grace))

    def describe(self, workflow_id: str) -> str:
        """Where a person finds the workflow's data."""
        return self._thread.supervisor.describe(workflow_id)

    def troubles(self) -> dict[str, BaseException]:
        """The workflows that cannot run here, and why."""

        async def look() -> dict[str, BaseException]:
            return self._thread.supervisor.troubles()

        return self._thread.call(look)


def _check_timeout(timeout: float | None) -> float | None:
    return None if timeout is None else check_duration(timeout, "timeout", "timeout=10.0")
