"""The asyncio face of a portal: the supervisor and its handles for tasks of asyncio.

Each method is the supervisor's or the handle's of the same name, which says what it promises. It may be awaited in any
number of tasks at once, in any loop of the process. A task that is cancelled meanwhile gives up waiting; the workflow
goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from perdure.actors.options import WorkflowLike
from perdure.actors.portal.overseeing import AsyncioOverseer
from perdure.actors.portal.thread import PortalThread
from perdure.actors.schedule_handle import ScheduleHandle, ScheduleInfo, ScheduleOptions
from perdure.workflow import ChildInfo, Context, ErrorInfo, HistoryEntry, Message, WorkflowHandle, WorkflowState

if TYPE_CHECKING:
    import typing_extensions

    from perdure.actors.portal.blocking import BlockingSupervisor

__all__ = ["AsyncioHandle", "AsyncioScheduleHandle", "AsyncioSupervisor"]

T = TypeVar("T")
InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")
if TYPE_CHECKING:
    Output_co = typing_extensions.TypeVar("Output_co", covariant=True, default=Any)
else:
    Output_co = TypeVar("Output_co", covariant=True)


class AsyncioHandle(Generic[Output_co]):
    """A workflow, for asyncio tasks: a `WorkflowHandle`. Its parameter is the type of what the workflow's function returns."""

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

    async def result(self) -> Output_co:
        """Wait until the workflow ends, and return what its function returned."""
        return await self._thread.call_async(lambda: self._handle.result())

    async def message(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """Put a message into the workflow's mailbox. Durable on return."""
        await self._thread.call_async(lambda: self._handle.message(name, body, id=id))

    async def message_nowait(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """The same, except that a full mailbox is a `MailboxFullError`."""
        await self._thread.call_async(lambda: self._handle.message_nowait(name, body, id=id))

    @overload
    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: None = None
    ) -> Any: ...

    @overload
    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: type[T]
    ) -> T: ...

    @overload
    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: UnionType
    ) -> Any: ...

    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: Any = None
    ) -> Any:
        """Send a message and return what the workflow replies to it."""
        return await self._thread.call_async(
            lambda: self._handle.request(name, body, timeout=timeout, id=id, reply_type=reply_type)
        )

    async def undelivered(self) -> tuple[Message[Any], ...]:
        """The messages in the mailbox, oldest first."""
        return await self._thread.call_async(lambda: self._handle.undelivered())

    async def wake(self) -> None:
        """End every pending sleep and retry backoff now. Durable on return."""
        await self._thread.call_async(lambda: self._handle.wake())

    async def recover(self) -> None:
        """Run a failed workflow again, over what is recorded. Durable on return."""
        await self._thread.call_async(lambda: self._handle.recover())

    async def evict(self) -> None:
        """Take the workflow out of memory; it stays resumable."""
        await self._thread.call_async(lambda: self._handle.evict())

    async def cancel(self) -> None:
        """End the workflow as cancelled, for good. Durable on return."""
        await self._thread.call_async(lambda: self._handle.cancel())

    async def get_state(self) -> WorkflowState:
        """Where it stands."""
        return await self._thread.call_async(lambda: self._handle.get_state())

    async def get_output(self) -> Output_co | None:
        """What it returned, or `None`."""
        return await self._thread.call_async(lambda: self._handle.get_output())

    async def get_error(self) -> ErrorInfo | None:
        """What it failed with, or `None`."""
        return await self._thread.call_async(lambda: self._handle.get_error())

    async def children(self) -> tuple[ChildInfo, ...]:
        """The workflows that it has called."""
        return await self._thread.call_async(lambda: self._handle.children())

    async def history(self) -> tuple[HistoryEntry, ...]:
        """Its history, decoded."""
        return await self._thread.call_async(lambda: self._handle.history())


class AsyncioScheduleHandle:
    """A schedule, for asyncio tasks."""

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

    async def info(self) -> ScheduleInfo:
        """What is known of it."""
        return await self._thread.call_async(lambda: self._handle.info())

    async def pause(self) -> None:
        """Start nothing from now on, what is queued included. Durable on return."""
        await self._thread.call_async(lambda: self._handle.pause())

    async def resume(self) -> None:
        """Go on with what is queued and with the next occurrence. Durable on return."""
        await self._thread.call_async(lambda: self._handle.resume())


class AsyncioSupervisor(AsyncioOverseer):
    """A supervisor, for asyncio tasks; made by `open_asyncio_portal`."""

    def __init__(self, thread: PortalThread) -> None:
        self._thread = thread

    @property
    def blocking(self) -> BlockingSupervisor:
        """The same supervisor for plain threads, in which no event loop runs."""
        from perdure.actors.portal.blocking import BlockingSupervisor

        return BlockingSupervisor(self._thread)

    @overload
    async def spawn(
        self,
        workflow: Callable[[Context, InputT], Awaitable[OutputT]],
        workflow_id: str,
        input: InputT,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> AsyncioHandle[OutputT]: ...

    @overload
    async def spawn(
        self,
        workflow: Callable[[Context, None], Awaitable[OutputT]],
        workflow_id: str,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> AsyncioHandle[OutputT]: ...

    @overload
    async def spawn(
        self,
        workflow: str,
        workflow_id: str,
        input: object = None,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> AsyncioHandle: ...

    async def spawn(
        self,
        workflow: WorkflowLike | str,
        workflow_id: str,
        input: object = None,
        *,
        start_at: float | datetime | None = None,
        deadline: float | datetime | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> AsyncioHandle[Any]:
        """Start a workflow, or find it started: same id, same workflow and equal input. Durable on return."""
        spawn: Callable[..., Awaitable[WorkflowHandle[Any]]] = self._thread.supervisor.spawn
        handle = await self._thread.call_async(
            lambda: spawn(workflow, workflow_id, input, start_at=start_at, deadline=deadline, attributes=attributes)
        )
        return AsyncioHandle(self._thread, handle)

    async def get(self, workflow_id: str) -> AsyncioHandle:
        """The handle of a workflow that exists."""
        handle = await self._thread.call_async(lambda: self._thread.supervisor.get(workflow_id))
        return AsyncioHandle(self._thread, handle)

    @overload
    async def schedule(
        self,
        name: str,
        workflow: Callable[[Context, InputT], Awaitable[object]],
        input: InputT,
        **options: Unpack[ScheduleOptions],
    ) -> AsyncioScheduleHandle: ...

    @overload
    async def schedule(
        self, name: str, workflow: Callable[[Context, None], Awaitable[object]], **options: Unpack[ScheduleOptions]
    ) -> AsyncioScheduleHandle: ...

    @overload
    async def schedule(
        self, name: str, workflow: str, input: object = None, **options: Unpack[ScheduleOptions]
    ) -> AsyncioScheduleHandle: ...

    async def schedule(
        self, name: str, workflow: WorkflowLike | str, input: object = None, **options: Unpack[ScheduleOptions]
    ) -> AsyncioScheduleHandle:
        """Start a workflow again and again, exactly once for each occurrence. Durable on return."""
        schedule: Callable[..., Awaitable[ScheduleHandle]] = self._thread.supervisor.schedule
        handle = await self._thread.call_async(lambda: schedule(name, workflow, input, **options))
        return AsyncioScheduleHandle(self._thread, handle)

    async def get_schedule(self, name: str) -> AsyncioScheduleHandle:
        """The handle of a schedule that exists."""
        handle = await self._thread.call_async(lambda: self._thread.supervisor.get_schedule(name))
        return AsyncioScheduleHandle(self._thread, handle)

    async def schedules(self) -> tuple[ScheduleInfo, ...]:
        """All schedules, by name."""
        return await self._thread.call_async(lambda: self._thread.supervisor.schedules())

    async def unschedule(self, name: str) -> None:
        """Remove a schedule, and the occurrences that it has queued. Durable on return."""
        await self._thread.call_async(lambda: self._thread.supervisor.unschedule(name))

    async def drain(self, *, grace: float | None = None) -> None:
        """Come to rest before the block is left: take nothing more, let running steps finish, have nothing live."""
        await self._thread.call_async(lambda: self._thread.supervisor.drain(grace=grace))

    def describe(self, workflow_id: str) -> str:
        """Where a person finds the workflow's data."""
        return self._thread.supervisor.describe(workflow_id)

    async def troubles(self) -> dict[str, BaseException]:
        """The workflows that cannot run here, and why."""

        async def look() -> dict[str, BaseException]:
            return self._thread.supervisor.troubles()

        return await self._thread.call_async(look)
