"""Sending to a supervisor's workflows: what the engine's desk needs to know of actors.

1. A sender holds the workflow's actor only while it sends. One that waits, for room or for a reply, holds nothing: the actor
   may be evicted, passivated or closed meanwhile, and whoever brings it in again lets in those for whom there is room.
2. The wait ends with the workflow (`WorkflowEndedError`, `WorkflowNotFoundError`) and with the supervisor.
3. Where an actor left memory in trouble it is not known what of its last batch is durable; then whoever waits looks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from perdure.actors.errors import SupervisorClosedError
from perdure.workflow.activation import Activation
from perdure.workflow.desk import Desk
from perdure.workflow.senders import ended_error

if TYPE_CHECKING:
    from perdure.actors.actor import Actor
    from perdure.actors.residents import Residents

__all__ = ["MailDesk"]


class MailDesk:
    """Where messages for the workflows of one supervisor are handed in.

    Args:
        residents: The workflows.
        mailbox_limit: How many messages a mailbox may hold, where the workflow does not say it.

    Attributes:
        desk: Where they are handed in.
    """

    def __init__(self, residents: Residents, mailbox_limit: int) -> None:
        self._residents = residents
        self._mailbox_limit = mailbox_limit
        self.desk: Desk = Desk(self)

    def visiting(self, workflow_id: str) -> AbstractAsyncContextManager[Activation]:
        """Hold the workflow's actor."""
        return self._visiting(workflow_id)

    @asynccontextmanager
    async def _visiting(self, workflow_id: str) -> AsyncGenerator[Activation]:
        async with self._residents.using(workflow_id) as actor:
            yield actor.activation

    async def ensure_running(self, workflow_id: str) -> None:
        """See that the workflow is activated."""
        await self._residents.ensure_running(workflow_id)

    def hold(self, workflow_id: str) -> Actor:
        """Hold the actor that is live."""
        actor = self._residents.live[workflow_id]
        actor.hold()
        return actor

    async def let_go(self, held: Actor) -> None:
        """Hold it no longer."""
        await self._residents.let_go(held)

    # What the residents tell.

    def admitted(self, actor: Actor) -> None:
        """A workflow came into memory."""
        definition = actor.definition
        limit = None if definition is None else definition.mailbox_limit
        self.desk.admitted(actor.activation, self._mailbox_limit if limit is None else limit)

    def gone(self, actor: Actor) -> None:
        """A workflow has left memory."""
        desk, workflow_id = self.desk, actor.workflow_id
        if actor.is_ended:
            history = actor.activation.history
            desk.senders.refuse(workflow_id, lambda: ended_error(history))
            desk.askers.ask_to_look(workflow_id)
        elif actor.error is not None:
            desk.senders.ask_to_look(workflow_id)
            desk.askers.ask_to_look(workflow_id, actor.activation.requests.is_answered)

    def not_found(self, workflow_id: str) -> None:
        """A workflow does not exist any more."""
        self.desk.senders.refuse(workflow_id, lambda: self._residents.not_found(workflow_id))
        self.desk.askers.ask_to_look(workflow_id)

    def close(self) -> None:
        """The supervisor leaves its block."""
        self.desk.senders.close(_closed_to_senders)
        self.desk.askers.close(_closed_to_askers)


def _closed_to_senders() -> SupervisorClosedError:
    return SupervisorClosedError(
        "the supervisor left its block while the message waited for room in the mailbox; nothing was sent, send it again at "
        "the next start"
    )


def _closed_to_askers() -> SupervisorClosedError:
    return SupervisorClosedError(
        "the supervisor left its block before the workflow replied; ask again with the same id at the next start"
    )
