"""The supervisor's workflow handles: what is asked of them goes to the live actor, or brings the workflow in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.actors.callers import rests_with_host
from perdure.actors.restarts import is_passing
from perdure.workflow import ChildInfo, ErrorInfo, HistoryEntry, Message, WorkflowState, WorkflowSuspendedError
from perdure.workflow.children import children_of
from perdure.workflow.control import recover, wake
from perdure.workflow.history import History
from perdure.workflow.snapshot import error_of, history_entries
from perdure.workflow.typed import decode_output

if TYPE_CHECKING:
    from perdure.actors.actor import Actor
    from perdure.actors.residents import Residents

__all__ = ["ActorHandle"]


class ActorHandle:
    """A workflow of a supervisor; see `WorkflowHandle` for what each method promises.

    A handle holds nothing: it may be kept, and made again with `supervisor.get`.
    """

    __slots__ = ("_residents", "_workflow_id")

    def __init__(self, residents: Residents, workflow_id: str) -> None:
        self._residents = residents
        self._workflow_id = workflow_id

    def __repr__(self) -> str:
        return f"<workflow {self._workflow_id!r}>"

    @property
    def workflow_id(self) -> str:
        """The workflow's id."""
        return self._workflow_id

    @rests_with_host
    async def result(self) -> Any:
        """Wait until the workflow ends, and return what its function returned.

        An evicted workflow is waited for until it was woken and has ended; if the supervisor leaves its block first,
        `WorkflowSuspendedError` comes.
        """
        self._residents.check_open()
        with self._residents.lending():
            return await self._result()

    async def _result(self) -> Any:
        residents = self._residents
        is_seen = False
        while True:
            actor = residents.live.get(self._workflow_id)
            if actor is not None and (actor.is_started or residents.is_closing):
                await actor.stopped.wait()
                if actor.is_ended:
                    return actor.result()
                if actor.error is not None and not is_passing(actor.error):
                    raise actor.error
                state = actor.activation.history.state.value
            else:
                row, arrival = await residents.await_arrival(self._workflow_id)
                state = row.state
                if arrival is not None and is_seen:
                    await arrival.wait()
                else:  # once, so that a damaged file is told, and not waited for
                    is_seen = True
                    async with residents.using(self._workflow_id) as actor:
                        if actor.is_ended:
                            return actor.result()
            if residents.is_closing:
                raise WorkflowSuspendedError(
                    f"the supervisor left its block while workflow {self._workflow_id!r} was {state}; it goes on at the "
                    "next start",
                    workflow_id=self._workflow_id,
                    state=state,
                )

    @rests_with_host
    async def message(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """Put a message into the mailbox, durable on return, and bring the workflow in if it is dormant.

        Waits while the mailbox is full.
        """
        with self._residents.lending():
            await self._residents.mail.desk.post(self._workflow_id, name, body, id)

    @rests_with_host
    async def message_nowait(self, name: str, body: object = None, *, id: str | None = None) -> None:
        """The same, except that a full mailbox is a `MailboxFullError`."""
        await self._residents.mail.desk.post_nowait(self._workflow_id, name, body, id)

    @rests_with_host
    async def request(
        self, name: str, body: object = None, *, timeout: float | None, id: str | None = None, reply_type: Any = None
    ) -> Any:
        """Send a request, bring the workflow in if it is dormant, and wait for the reply."""
        with self._residents.lending():
            return await self._residents.mail.desk.request(self._workflow_id, name, body, timeout, id, reply_type)

    @rests_with_host
    async def undelivered(self) -> tuple[Message[Any], ...]:
        """What is in the mailbox. Activates nothing."""
        return await self._residents.mail.desk.undelivered(self._workflow_id)

    @rests_with_host
    async def wake(self) -> None:
        """End pending sleeps and retry backoffs, durable on return, and bring the workflow in if it is dormant."""
        async with self._residents.using(self._workflow_id) as actor:
            await wake(actor.activation)
        await self._residents.ensure_running(self._workflow_id)

    @rests_with_host
    async def recover(self) -> None:
        """Run a failed workflow again. Another one is only brought in, and so replayed; an ended one not even that."""
        async with self._residents.using(self._workflow_id) as actor:
            await recover(actor.activation)
        await self._residents.ensure_running(self._workflow_id)

    @rests_with_host
    async def evict(self) -> None:
        """Take the workflow out of memory; its next message, alarm or wake brings it back, or the next start.

        So one that was at work (in a step, with mail that it has not read) stays away until somebody asks for it.
        """
        await self._residents.evict(self._workflow_id)

    @rests_with_host
    async def cancel(self) -> None:
        """End the workflow as cancelled, for good."""
        async with self._residents.using(self._workflow_id) as actor:
            await actor.cancel()

    @rests_with_host
    async def get_state(self) -> WorkflowState:
        """Where it stands."""
        return (await self._settled()).state

    @rests_with_host
    async def get_output(self) -> Any:
        """What it returned, typed by its function's annotation where that is registered, or `None`."""
        actor = await self._settled_actor()
        output = actor.activation.history.output
        return None if output is None else decode_output(actor.function, output)

    @rests_with_host
    async def get_error(self) -> ErrorInfo | None:
        """What it failed with, or `None`."""
        error: ErrorInfo | None = error_of(await self._settled())
        return error

    @rests_with_host
    async def children(self) -> tuple[ChildInfo, ...]:
        """The workflows that it has called, as far as its history holds them."""
        return children_of(await self._settled())

    @rests_with_host
    async def history(self) -> tuple[HistoryEntry, ...]:
        """Its history, decoded."""
        return history_entries(await self._settled())

    async def _settled(self) -> History:
        """What is recorded, once it is durable."""
        return (await self._settled_actor()).activation.history

    async def _settled_actor(self) -> Actor:
        async with self._residents.using(self._workflow_id) as actor:
            await actor.activation.settled()
        return actor
