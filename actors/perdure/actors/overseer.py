"""The part of a supervisor that looks and tidies; each method is thin, and what it does is in a module of its own."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from typing import Any, Final

import trio

from perdure.actors.alarms import AlarmWatch
from perdure.actors.callers import rests_with_host
from perdure.actors.catalog import CatalogKeeper
from perdure.actors.events import EventStream
from perdure.actors.faults import FaultedWorkflow, find_faulted
from perdure.actors.listing import LIST_LIMIT_MAX, WorkflowInfo, check_after, info_of, question_of
from perdure.actors.removal import Removal
from perdure.actors.residents import Residents
from perdure.storage import CatalogRow, NamespaceNotFoundError, StorageError, Store
from perdure.storage.attributes import Scalar
from perdure.workflow import InvalidArgumentError, Workflow, WorkflowState
from perdure.workflow.checks import check_count, check_workflow_id
from perdure.workflow.states import TERMINAL_STATES

__all__ = ["Overseer", "SupervisorStats"]

_ACTIVE: Final = tuple(state.value for state in WorkflowState if state not in TERMINAL_STATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorStats:
    """How a supervisor stands, and what it did since it was opened.

    Attributes:
        live: Workflows that are in memory and run, or wait there.
        sleeping: Workflows that have not ended and are not in memory.
        faulted: Workflows that this process found unable to run; see `Supervisor.faulted`.
        queued: Workflows that wait for a place in memory.
        mailbox_total: Messages that wait in the mailboxes of live workflows.
        mailbox_largest: The most that wait in one of them.
        commits: Batches that were made durable.
        commits_per_second: How many of them in a second, of late (the last minute, or the last 4,096).
        commit_p50_ms: Half of those took no longer, in milliseconds; 0 if there were none.
        commit_p99_ms: 99 of 100 of those took no longer, likewise.
        activations: How often a workflow's function was begun.
        passivations: How often an idle workflow was taken out of memory.
        restarts: How often a workflow was restarted after a fault of the runtime.
    """

    live: int
    sleeping: int
    faulted: int
    queued: int
    mailbox_total: int
    mailbox_largest: int
    commits: int
    commits_per_second: float
    commit_p50_ms: float
    commit_p99_ms: float
    activations: int
    passivations: int
    restarts: int


class Overseer:
    """What `Supervisor` offers to look at its workflows, and to tidy up."""

    def __init__(
        self,
        store: Store,
        keeper: CatalogKeeper,
        residents: Residents,
        alarms: AlarmWatch,
        definitions: dict[str, Workflow[Any, Any]],
    ) -> None:
        self._store = store
        self._keeper = keeper
        self._residents = residents
        self._alarms = alarms
        self._definitions = definitions
        self._removal = Removal(residents, keeper)

    @rests_with_host
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
        """The workflows for which all that is given holds, in the order in which they were made. Opens none of them.

        What is durable is shown, so a live workflow shows its state now. Any question is answered from an index, and costs
        what the narrowest of its conditions does.

        Args:
            state: In this state, or in one of these.
            workflow: Of this function, or of this name, which need not be registered here.
            created_before: Made before this time: seconds since the epoch, or a `datetime` with a timezone.
            attributes: With all of these attributes. A value is found by an equal one of the same type: `1`, `1.0`, `True`
                and `"1"` are four.
            parent_id: Called by this workflow.
            after: The last entry of the page before (`page[-1]`), or its id as long as it was not deleted.
            limit: How many at most: 1 to 10,000.

        Raises:
            WorkflowNotFoundError: `after` is an id, and there is no such workflow (any more).
            InvalidArgumentError: An argument cannot be asked for.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        question = question_of(state, workflow, created_before, attributes, parent_id)
        count = check_count(limit, "limit", least=1, example="limit=100")
        if count > LIST_LIMIT_MAX:
            raise InvalidArgumentError(
                f"limit= is at most {LIST_LIMIT_MAX}, not {count}; read on with after=page[-1] for more"
            )
        position = check_after(after)
        await self._look()
        if isinstance(position, str):
            row = await self._store.get_row(position)
            if row is None:
                raise self._residents.not_found(position)
            position = (row.created_at_ms, row.workflow_id)
        return [self._info(row) for row in await self._store.list_rows(**question, after=position, limit=count)]

    @rests_with_host
    async def count(
        self,
        *,
        state: WorkflowState | str | Collection[WorkflowState | str] | None = None,
        workflow: Callable[..., Any] | Workflow[Any, Any] | str | None = None,
        created_before: float | datetime | None = None,
        attributes: Mapping[str, Scalar] | None = None,
        parent_id: str | None = None,
    ) -> int:
        """How many workflows `list` would give without a limit. Opens none of them.

        Raises:
            InvalidArgumentError: An argument cannot be asked for.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        question = question_of(state, workflow, created_before, attributes, parent_id)
        await self._look()
        return await self._store.count_rows(**question)

    @rests_with_host
    async def stats(self) -> SupervisorStats:
        """How the supervisor stands. Cheap: it opens nothing, and counts the workflows that have not ended from an index.

        Raises:
            SupervisorClosedError: The supervisor is leaving its block.
        """
        await self._look()
        active = await self._store.count_rows(state=_ACTIVE)
        residents, meter = self._residents, self._keeper.meter
        live = [actor for actor in residents.live.values() if actor.is_started]
        awake = sum(not actor.activation.history.state.is_terminal for actor in live)
        mailboxes = [len(actor.activation.mailbox) for actor in residents.live.values()]
        rate = meter.rate()
        return SupervisorStats(
            live=len(live),
            sleeping=max(active - awake, 0),
            faulted=len(residents.troubles),
            queued=len(residents.dispatcher),
            mailbox_total=sum(mailboxes),
            mailbox_largest=max(mailboxes, default=0),
            commits=meter.commits,
            commits_per_second=rate.per_second,
            commit_p50_ms=rate.p50_ms,
            commit_p99_ms=rate.p99_ms,
            activations=residents.activations,
            passivations=residents.passivation.count,
            restarts=residents.restarts.count,
        )

    def events(self, *, buffer: int = 1000) -> EventStream:
        """The changes of state of all workflows from now on, for as long as the block runs.

            async with supervisor.events() as events:
                async for event in events:
                    print(event.workflow_id, event.new)

        Each is told once it is durable, in order. They are told to whoever listens and kept nowhere: what happens while
        nobody does, or just before a crash, is not told later. Telling never waits for a reader; one that falls behind by
        more than `buffer` events loses the oldest, and finds their number in `missed` of the next. The iteration ends when
        the supervisor leaves its block.

        Args:
            buffer: How many events are kept for this reader: 1 or more.

        Raises:
            SupervisorClosedError: The supervisor is leaving its block.
        """
        self._residents.check_open()
        return EventStream(self._keeper.events, check_count(buffer, "buffer", least=1, example="buffer=1000"))

    @rests_with_host
    async def faulted(self, *, limit: int = 100) -> builtins.list[FaultedWorkflow]:
        """The workflows that cannot run, and why, longest first. Opens none of them.

        They diverged, were stopped by their storage or by a bug, have a file that is damaged or gone, or a function that is
        not registered here; those that only wait and have not been looked at may have a trouble that is not known yet.
        They are tried again at their next message, `wake()` or `recover()`, and at the next start; those that a fault of the
        runtime stopped are restarted before that.

        Args:
            limit: How many at most: 1 to 10,000.

        Raises:
            SupervisorClosedError: The supervisor is leaving its block.
        """
        count = min(check_count(limit, "limit", least=1, example="limit=100"), LIST_LIMIT_MAX)
        await self._look()
        return await find_faulted(self._store, self._keeper, self._residents, self._definitions.keys(), count)

    @rests_with_host
    async def delete(self, workflow_id: str) -> None:
        """Delete a workflow that has ended, with all that is kept of it; durable on return. Its id can be used again then.

        One whose file is damaged or gone is deleted too, with what was set aside of it. Cancelled, it may have been deleted.

        Raises:
            WorkflowNotFoundError: There is none (any more).
            WorkflowNotEndedError: It has not ended, so cancel it first; or it still has to tell others that it has.
            StorageError: Its file cannot be removed.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        await trio.lowlevel.checkpoint()
        await self._removal.delete(check_workflow_id(workflow_id))

    @rests_with_host
    async def backup(self, path: str | PathLike[str], workflow_id: str | None = None) -> Mapping[str, str]:
        """Copy one workflow to a file, or everything to a new directory, while all goes on.

        A workflow is copied as it is at some moment, between two of its commits. A directory is usable as it is: open a
        supervisor on it. Its workflows are not all of one moment, so a message that was on its way from one to another may
        be in both copies, where it counts once, or in neither. Complete and durable on return, or not there.

        Args:
            path: Where to; nothing may be there yet.
            workflow_id: Which workflow; `None` copies everything.

        Returns:
            What could not be copied because its file is damaged or gone, by workflow id, and why. Empty when all is there.

        Raises:
            WorkflowNotFoundError: There is no such workflow.
            StorageError: `path` exists or cannot be written, or the one workflow cannot be read.
            SupervisorClosedError: The supervisor is leaving its block.
            InvalidArgumentError: `path` is no path.
        """
        _check_path(path)
        self._residents.check_open()
        await trio.lowlevel.checkpoint()
        if workflow_id is None:
            return await self._store.backup_all(path)
        try:
            await self._store.backup(check_workflow_id(workflow_id), path)
        except NamespaceNotFoundError as error:
            if error.path is not None:
                raise
            raise self._residents.not_found(workflow_id) from None
        return {}

    @rests_with_host
    async def reindex(self) -> int:
        """Read the catalog again from the workflows' files, while all goes on. It is not needed in ordinary life.

        For when somebody changed the files: put some back, repaired or removed some. It takes about a millisecond for each
        workflow, and holds each up for no longer than that.

        Returns:
            How many entries were not right.

        Raises:
            StorageError: The catalog cannot be written.
            SupervisorClosedError: The supervisor is leaving its block.
        """
        await self._look()
        changed = -1  # nobody knows what it came to, should it fail
        try:
            changed = await self._store.reindex()
        finally:
            if changed:
                for actor in self._residents.live.values():
                    actor.driver.note_reindexed()
                self._alarms.look_again()
        return changed

    async def _look(self) -> None:
        """Bring the catalog up to date with what is durable, and make durable who waits."""
        self._residents.check_open()
        await trio.lowlevel.checkpoint()
        await self._residents.late_parks.flush()
        with suppress(StorageError):  # the keeper tries again, and says so; until then what is there is shown
            await self._keeper.flush()

    def _info(self, row: CatalogRow) -> WorkflowInfo:
        residents = self._residents
        trouble = residents.troubles.get(row.workflow_id)
        reason = None if trouble is None else str(trouble) or type(trouble).__name__
        is_active = row.state in _ACTIVE
        if reason is None and is_active and row.problem is None and row.workflow_type not in self._definitions:
            reason = str(residents.unregistered(row.workflow_type))
        return info_of(row, is_live=residents.is_running(row.workflow_id), reason=reason)


def _check_path(path: object) -> None:
    if not isinstance(path, str | PathLike):
        raise InvalidArgumentError(
            f'the path of a new file or directory is needed, not {path!r}; write backup("copy/")'
        )
