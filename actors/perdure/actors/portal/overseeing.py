"""Looking and tidying through a portal: `Overseer` for plain threads and for asyncio tasks.

Each method is the supervisor's of the same name, which says what it promises.
"""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from os import PathLike
from typing import Any

from perdure.actors.errors import SupervisorClosedError
from perdure.actors.events import EventStream, WorkflowStateChanged
from perdure.actors.faults import FaultedWorkflow
from perdure.actors.listing import WorkflowInfo
from perdure.actors.overseer import SupervisorStats
from perdure.actors.portal.thread import PortalThread
from perdure.storage.attributes import Scalar
from perdure.workflow import Workflow, WorkflowState
from perdure.workflow.checks import check_duration

__all__ = ["AsyncioEvents", "AsyncioOverseer", "BlockingEvents", "BlockingOverseer"]


class BlockingEvents(Iterator[WorkflowStateChanged]):
    """Changes of state, for a plain thread; an iterator that waits for the next, and ends with the supervisor."""

    def __init__(self, thread: PortalThread, stream: EventStream) -> None:
        self._thread = thread
        self._stream = stream
        self._arrived: deque[WorkflowStateChanged] = deque()

    def __next__(self) -> WorkflowStateChanged:
        """The next event; blocks until there is one."""
        event = self.next()
        if event is None:
            raise StopIteration
        return event

    def next(self, *, timeout: float | None = None) -> WorkflowStateChanged | None:
        """The next event, or `None` once the supervisor ends and no more comes.

        Args:
            timeout: Seconds, after which a `TimeoutError` comes and nothing is lost; for ever unless given.
        """
        checked = None if timeout is None else check_duration(timeout, "timeout", "timeout=10.0")
        if not self._arrived:
            try:
                self._thread.call(lambda: _read(self._stream, self._arrived), timeout=checked)
            except SupervisorClosedError:
                _take(self._stream, self._arrived)
        return self._arrived.popleft() if self._arrived else None


class AsyncioEvents:
    """Changes of state, for an asyncio task; an asynchronous iterator that ends with the supervisor."""

    def __init__(self, thread: PortalThread, stream: EventStream) -> None:
        self._thread = thread
        self._stream = stream
        self._arrived: deque[WorkflowStateChanged] = deque()

    def __aiter__(self) -> AsyncioEvents:
        return self

    async def __anext__(self) -> WorkflowStateChanged:
        """The next event; waits until there is one. Cancelled, it loses none."""
        if not self._arrived:
            try:
                await self._thread.call_async(lambda: _read(self._stream, self._arrived))
            except SupervisorClosedError:
                _take(self._stream, self._arrived)
        if not self._arrived:
            raise StopAsyncIteration
        return self._arrived.popleft()


async def _read(stream: EventStream, arrived: deque[WorkflowStateChanged]) -> None:
    """Wait for an event, and take all that there are. They are kept for a reader that gave up in that very moment."""
    async for event in stream:
        arrived.append(event)
        _take(stream, arrived)
        return


def _take(stream: EventStream, arrived: deque[WorkflowStateChanged]) -> None:
    """Take what was told; also once the supervisor has ended, when nothing else is at the stream any more."""
    while (event := stream.next_nowait()) is not None:
        arrived.append(event)


async def _close(stream: EventStream) -> None:
    await stream.__aexit__()


class BlockingOverseer:
    """The part of `BlockingSupervisor` that looks and tidies."""

    _thread: PortalThread

    def list(
        self,
        *,
        state: WorkflowState | str | Collection[WorkflowState | str] | None = None,
        workflow: Callable[..., Any] | Workflow[Any, Any] | str | None = None,
        created_before: float | datetime | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
        after: WorkflowInfo | str | None = None,
        limit: int = 100,
    ) -> builtins.list[WorkflowInfo]:
        """The workflows for which all that is given holds, in the order in which they were made."""
        return self._thread.call(
            lambda: self._thread.supervisor.list(
                state=state,
                workflow=workflow,
                created_before=created_before,
                attributes=attributes,
                parent_id=parent_id,
                after=after,
                limit=limit,
            )
        )

    def count(
        self,
        *,
        state: WorkflowState | str | Collection[WorkflowState | str] | None = None,
        workflow: Callable[..., Any] | Workflow[Any, Any] | str | None = None,
        created_before: float | datetime | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
    ) -> int:
        """How many workflows `list` would give without a limit."""
        return self._thread.call(
            lambda: self._thread.supervisor.count(
                state=state,
                workflow=workflow,
                created_before=created_before,
                attributes=attributes,
                parent_id=parent_id,
            )
        )

    def stats(self) -> SupervisorStats:
        """How the supervisor stands."""
        return self._thread.call(lambda: self._thread.supervisor.stats())

    @contextmanager
    def events(self, *, buffer: int = 1000) -> Generator[BlockingEvents, None, None]:
        """The changes of state of all workflows from now on, for as long as the block runs."""
        stream = self._thread.call(lambda: self._open_events(buffer))
        try:
            yield BlockingEvents(self._thread, stream)
        finally:
            with suppress(SupervisorClosedError):  # then nobody tells it anything any more
                self._thread.call(lambda: _close(stream))

    async def _open_events(self, buffer: int) -> EventStream:
        return await self._thread.supervisor.events(buffer=buffer).__aenter__()

    def faulted(self, *, limit: int = 100) -> builtins.list[FaultedWorkflow]:
        """The workflows that cannot run, and why."""
        return self._thread.call(lambda: self._thread.supervisor.faulted(limit=limit))

    def delete(self, workflow_id: str) -> None:
        """Delete a workflow that has ended, for good. Durable on return."""
        self._thread.call(lambda: self._thread.supervisor.delete(workflow_id))

    def backup(self, path: str | PathLike[str], workflow_id: str | None = None) -> Mapping[str, str]:
        """Copy one workflow to a file, or everything to a new directory."""
        return self._thread.call(lambda: self._thread.supervisor.backup(path, workflow_id))

    def reindex(self) -> int:
        """Read the catalog again from the workflows' files."""
        return self._thread.call(lambda: self._thread.supervisor.reindex())


class AsyncioOverseer:
    """The part of `AsyncioSupervisor` that looks and tidies."""

    _thread: PortalThread

    async def list(
        self,
        *,
        state: WorkflowState | str | Collection[WorkflowState | str] | None = None,
        workflow: Callable[..., Any] | Workflow[Any, Any] | str | None = None,
        created_before: float | datetime | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
        after: WorkflowInfo | str | None = None,
        limit: int = 100,
    ) -> builtins.list[WorkflowInfo]:
        """The workflows for which all that is given holds, in the order in which they were made."""
        return await self._thread.call_async(
            lambda: self._thread.supervisor.list(
                state=state,
                workflow=workflow,
                created_before=created_before,
                attributes=attributes,
                parent_id=parent_id,
                after=after,
                limit=limit,
            )
        )

    async def count(
        self,
        *,
        state: WorkflowState | str | Collection[WorkflowState | str] | None = None,
        workflow: Callable[..., Any] | Workflow[Any, Any] | str | None = None,
        created_before: float | datetime | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
    ) -> int:
        """How many workflows `list` would give without a limit."""
        return await self._thread.call_async(
            lambda: self._thread.supervisor.count(
                state=state,
                workflow=workflow,
                created_before=created_before,
                attributes=attributes,
                parent_id=parent_id,
            )
        )

    async def stats(self) -> SupervisorStats:
        """How the supervisor stands."""
        return await self._thread.call_async(lambda: self._thread.supervisor.stats())

    @asynccontextmanager
    async def events(self, *, buffer: int = 1000) -> AsyncGenerator[AsyncioEvents]:
        """The changes of state of all workflows from now on, for as long as the block runs."""
        stream = await self._thread.call_async(lambda: self._open_events(buffer))
        try:
            yield AsyncioEvents(self._thread, stream)
        finally:
            with suppress(SupervisorClosedError):  # then nobody tells it anything any more
                await self._thread.call_async(lambda: _close(stream))

    async def _open_events(self, buffer: int) -> EventStream:
        return await self._thread.supervisor.events(buffer=buffer).__aenter__()

    async def faulted(self, *, limit: int = 100) -> builtins.list[FaultedWorkflow]:
        """The workflows that cannot run, and why."""
        return await self._thread.call_async(lambda: self._thread.supervisor.faulted(limit=limit))

    async def delete(self, workflow_id: str) -> None:
        """Delete a workflow that has ended, for good. Durable on return."""
        await self._thread.call_async(lambda: self._thread.supervisor.delete(workflow_id))

    async def backup(self, path: str | PathLike[str], workflow_id: str | None = None) -> Mapping[str, str]:
        """Copy one workflow to a file, or everything to a new directory."""
        return await self._thread.call_async(lambda: self._thread.supervisor.backup(path, workflow_id))

    async def reindex(self) -> int:
        """Read the catalog again from the workflows' files."""
        return await self._thread.call_async(lambda: self._thread.supervisor.reindex())
